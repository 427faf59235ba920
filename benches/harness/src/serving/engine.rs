use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, VecDeque},
};

use super::{Adapter, Hardware, Memory, Policy, Request, Time};

/// What the engine has left in a step, for requests that start in it.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    requests: usize,
    tokens: usize,
}

impl Room {
    /// Whether another request could start.
    pub fn is_left(&self) -> bool {
        self.requests > 0 && self.tokens > 0
    }

    /// Takes the room of a request, if there is any. Its prompt may be longer than the step's tokens: the rest is computed later.
    pub fn take(&mut self, request: &Request) -> bool {
        let has_room = self.is_left();
        if has_room {
            self.requests -= 1;
            self.tokens -= request.prompt.min(self.tokens);
        }
        has_room
    }
}

/// What decides for an engine which requests start, and loads their adapters.
pub trait Server {
    /// A request has arrived.
    fn arrive(&mut self, number: usize, request: &Request);

    /// Takes note of the loads that have ended until `now`.
    fn advance(&mut self, now: Time);

    /// The requests that start in this step, each with a lease on its adapter. The step waits for adapters that are not ready.
    fn admit(&mut self, now: Time, room: &mut Room) -> Vec<usize>;

    /// Whether the adapter of a request that has started is on the device.
    fn is_ready(&self, adapter: Adapter, now: Time) -> bool;

    /// When the next load ends after `now`.
    fn next_ready(&self, now: Time) -> Option<Time>;

    /// A request has ended, and gives back its lease.
    fn finish(&mut self, number: usize, adapter: Adapter);

    /// A step has been launched, and requests that ended in it have given back their leases.
    fn end_step(&mut self);
}

/// When tokens were computed, by the number of the request.
#[derive(Clone, Debug)]
pub struct Times {
    pub first_token: Vec<Time>,
    pub last_token: Vec<Time>,
}

impl Times {
    pub fn new(requests: usize) -> Self {
        Self { first_token: vec![0; requests], last_token: vec![0; requests] }
    }
}

/// An engine with continuous batching and chunked prefill.
#[derive(Debug)]
pub struct Engine<S> {
    pub server: S,
    hardware: Hardware,
    /// When the next step may begin.
    now: Time,
    /// Requests whose prompt is not computed yet, by their start.
    prefilling: Vec<Prefilling>,
    /// The others: the step that computes the last token, the number of the start, and the request.
    decoding: BinaryHeap<Reverse<(u64, u64, usize)>>,
    /// The adapters of running requests, each with their number.
    adapters: HashMap<Adapter, usize>,
    starts: u64,
    arrived: usize,
    /// The requests that have ended, and when, until they are asked for.
    ends: VecDeque<(Time, usize)>,
    finished: usize,
    pub stalled: Time,
    /// The end of the last step.
    pub end: Time,
    /// The most distinct adapters of a step.
    pub max_adapters: usize,
    /// Output tokens that were computed.
    pub tokens: u64,
    pub steps: u64,
    /// The distinct adapters of all steps, added up.
    pub step_adapters: u64,
}

/// A request between its start and its first token.
#[derive(Clone, Copy, Debug)]
struct Prefilling {
    number: usize,
    start: u64,
    /// Tokens of the prompt that are not computed yet, and those of them that the step computes.
    prompt: usize,
    chunk: usize,
}

impl<S: Server> Engine<S> {
    pub fn new(hardware: Hardware, server: S) -> Self {
        Self {
            server,
            hardware,
            now: 0,
            prefilling: Vec::new(),
            decoding: BinaryHeap::new(),
            adapters: HashMap::new(),
            starts: 0,
            arrived: 0,
            ends: VecDeque::new(),
            finished: 0,
            stalled: 0,
            end: 0,
            max_adapters: 0,
            tokens: 0,
            steps: 0,
            step_adapters: 0,
        }
    }

    /// Requests that have arrived and not ended.
    pub fn outstanding(&self) -> usize {
        self.arrived - self.finished
    }

    /// The next request that has ended until `now`, once for each.
    pub fn next_end(&mut self, now: Time) -> Option<usize> {
        self.ends.front().filter(|(end, _)| *end <= now)?;
        self.ends.pop_front().map(|(_, number)| number)
    }

    /// A request arrives for the next step.
    pub fn arrive(&mut self, number: usize, request: &Request) {
        self.server.arrive(number, request);
        self.arrived += 1;
    }

    /// Begins the steps that begin before `until`, or until all requests have ended.
    pub fn advance(&mut self, until: Option<Time>, trace: &[Request], times: &mut Times) {
        while until.map_or(self.outstanding() > 0, |until| self.now < until) {
            if !self.begin_step(trace) {
                let ready = self.server.next_ready(self.now);
                let next = until.into_iter().chain(ready).min().expect("something waits for something");
                if self.outstanding() > 0 {
                    self.stalled += next - self.now;
                }
                self.now = next;
                continue;
            }
            self.end_step(trace, times);
        }
    }

    /// Starts requests, waits for their adapters, and computes. Returns whether there is anything to compute.
    fn begin_step(&mut self, trace: &[Request]) -> bool {
        self.server.advance(self.now);
        // Running requests come first: one token each, or a chunk of the prompt.
        let mut prefill = self.hardware.max_tokens.saturating_sub(self.decoding.len());
        for request in &mut self.prefilling {
            request.chunk = request.prompt.min(prefill);
            prefill -= request.chunk;
        }
        let running = self.prefilling.len() + self.decoding.len();
        let mut room = Room { requests: self.hardware.max_requests - running, tokens: prefill };
        let started = self.server.admit(self.now, &mut room);
        for &number in &started {
            let Request { prompt, adapter, .. } = trace[number];
            let chunk = prompt.min(prefill);
            prefill -= chunk;
            self.starts += 1;
            self.prefilling.push(Prefilling { number, start: self.starts, prompt, chunk });
            *self.adapters.entry(adapter).or_default() += 1;
        }
        let mut ready = self.now;
        while !started.iter().all(|number| self.server.is_ready(trace[*number].adapter, ready)) {
            let Some(next) = self.server.next_ready(ready) else { break };
            ready = next;
            self.server.advance(ready);
        }
        self.stalled += ready - self.now;
        self.now = ready;
        if self.adapters.is_empty() {
            return false;
        }
        let prefill = self.prefilling.iter().map(|request| request.chunk).sum();
        self.max_adapters = self.max_adapters.max(self.adapters.len());
        self.now += self.hardware.step(prefill, self.decoding.len(), self.adapters.len());
        self.end = self.now;
        self.steps += 1;
        self.step_adapters += self.adapters.len() as u64;
        true
    }

    /// Takes note of the tokens of a step.
    fn end_step(&mut self, trace: &[Request], times: &mut Times) {
        let Self { prefilling, decoding, now, steps, .. } = self;
        self.tokens += decoding.len() as u64;
        prefilling.retain_mut(|request| {
            request.prompt -= request.chunk;
            // A prompt without a token in this step has not been computed, even if none of it is left.
            let gives_token = request.chunk > 0 && request.prompt == 0;
            if gives_token {
                self.tokens += 1;
                // A request that begins anew has had its first token.
                let first = &mut times.first_token[request.number];
                *first = if *first == 0 { *now } else { *first };
                let last = *steps + trace[request.number].output as u64 - 1;
                decoding.push(Reverse((last, request.start, request.number)));
            }
            !gives_token
        });
        while let Some(&Reverse((last, _, number))) = self.decoding.peek() {
            if last > self.steps {
                break;
            }
            self.decoding.pop();
            times.last_token[number] = self.now;
            let adapter = trace[number].adapter;
            let requests = self.adapters.get_mut(&adapter).expect("the adapter has a running request");
            *requests -= 1;
            if *requests == 0 {
                self.adapters.remove(&adapter);
            }
            self.server.finish(number, adapter);
            self.ends.push_back((self.now, number));
            self.finished += 1;
        }
        self.server.end_step();
    }
}

/// What a run gave.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Of each request, from its arrival: the first token, and the last one.
    pub first_token: Vec<Time>,
    pub last_token: Vec<Time>,
    /// Adapters that were loaded to the device.
    pub loads: u64,
    /// Time in which the device computed nothing while a request waited.
    pub stalled: Time,
    /// The end of the last step.
    pub end: Time,
    /// The most distinct adapters of a step.
    pub max_adapters: usize,
}

/// A policy on a model of memory.
struct Modelled<'a> {
    memory: Memory,
    policy: &'a mut dyn Policy,
}

impl Server for Modelled<'_> {
    fn arrive(&mut self, number: usize, request: &Request) {
        self.policy.arrive(number, request);
    }

    fn advance(&mut self, now: Time) {
        self.memory.advance(now);
    }

    fn admit(&mut self, now: Time, room: &mut Room) -> Vec<usize> {
        self.policy.admit(now, &mut self.memory, room)
    }

    fn is_ready(&self, adapter: Adapter, now: Time) -> bool {
        self.memory.is_ready(adapter, now)
    }

    fn next_ready(&self, now: Time) -> Option<Time> {
        self.memory.next_ready(now)
    }

    fn finish(&mut self, number: usize, adapter: Adapter) {
        self.memory.release(adapter);
        self.policy.finish(number, adapter);
    }

    fn end_step(&mut self) {}
}

/// Runs a trace to its end.
pub fn run(trace: &[Request], hardware: Hardware, policy: &mut dyn Policy) -> Outcome {
    let mut engine = Engine::new(hardware, Modelled { memory: Memory::new(hardware), policy });
    let mut times = Times::new(trace.len());
    for (number, request) in trace.iter().enumerate() {
        engine.advance(Some(request.arrival), trace, &mut times);
        engine.arrive(number, request);
    }
    engine.advance(None, trace, &mut times);
    let from_arrival = |times: &[Time]| times.iter().zip(trace).map(|(time, request)| time - request.arrival).collect();
    Outcome {
        first_token: from_arrival(&times.first_token),
        last_token: from_arrival(&times.last_token),
        loads: engine.server.memory.num_loads(),
        stalled: engine.stalled,
        end: engine.end,
        max_adapters: engine.max_adapters,
    }
}
