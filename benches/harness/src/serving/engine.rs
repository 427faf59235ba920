use std::collections::HashSet;

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

/// A request between its start and its end.
#[derive(Clone, Copy, Debug)]
struct Running {
    number: usize,
    /// Tokens of the prompt that are not computed yet.
    prompt: usize,
    output: usize,
}

/// Runs a trace to its end.
pub fn run(trace: &[Request], hardware: Hardware, policy: &mut dyn Policy) -> Outcome {
    let mut memory = Memory::new(hardware);
    let mut outcome =
        Outcome { first_token: vec![0; trace.len()], last_token: vec![0; trace.len()], ..Outcome::default() };
    let (mut now, mut arrived, mut finished) = (0, 0, 0);
    let mut running: Vec<Running> = Vec::new();
    while finished < trace.len() {
        while arrived < trace.len() && trace[arrived].arrival <= now {
            policy.arrive(arrived, &trace[arrived]);
            arrived += 1;
        }
        memory.advance(now);

        // Running requests come first: one token each, or a chunk of the prompt.
        let decoding = running.iter().filter(|request| request.prompt == 0).count();
        let mut prefill = hardware.max_tokens.saturating_sub(decoding);
        let mut chunks: Vec<usize> = Vec::with_capacity(hardware.max_requests);
        for request in &running {
            let chunk = request.prompt.min(prefill);
            prefill -= chunk;
            chunks.push(chunk);
        }
        let mut room = Room { requests: hardware.max_requests - running.len(), tokens: prefill };
        let mut ready = now;
        for number in policy.admit(now, &mut memory, &mut room) {
            let request = &trace[number];
            let chunk = request.prompt.min(prefill);
            prefill -= chunk;
            chunks.push(chunk);
            running.push(Running { number, prompt: request.prompt, output: request.output });
        }
        while let Some(next) = memory.next_ready(ready) {
            if running.iter().all(|request| memory.is_ready(trace[request.number].adapter, ready)) {
                break;
            }
            ready = next;
            memory.advance(ready);
        }
        outcome.stalled += ready - now;
        now = ready;

        if running.is_empty() {
            let arrival = trace.get(arrived).map(|request| request.arrival);
            let next = arrival.into_iter().chain(memory.next_ready(now)).min().expect("something waits for something");
            if arrived > finished {
                outcome.stalled += next - now;
            }
            now = next;
            continue;
        }
        let tokens =
            running.iter().zip(&chunks).map(|(request, chunk)| if request.prompt == 0 { 1 } else { *chunk }).sum();
        let adapters: HashSet<Adapter> = running.iter().map(|request| trace[request.number].adapter).collect();
        outcome.max_adapters = outcome.max_adapters.max(adapters.len());
        now += hardware.step(tokens, adapters.len());

        let mut chunks = chunks.into_iter();
        running.retain_mut(|request| {
            let (chunk, was_decoding) = (chunks.next().unwrap_or(0), request.prompt == 0);
            request.prompt -= chunk;
            let gives_token = was_decoding || (chunk > 0 && request.prompt == 0);
            if !gives_token {
                return true;
            }
            let Request { arrival, adapter, output, .. } = trace[request.number];
            if request.output == output {
                outcome.first_token[request.number] = now - arrival;
            }
            request.output -= 1;
            if request.output == 0 {
                outcome.last_token[request.number] = now - arrival;
                memory.release(adapter);
                policy.finish(request.number, adapter);
                finished += 1;
            }
            request.output > 0
        });
    }
    Outcome { loads: memory.num_loads(), end: now, ..outcome }
}
