use aril::pool::Tier;
use serde::{Deserialize, Serialize};

use super::{Replica, Router, Settings};
use crate::{
    Result,
    serving::{Engine, Request, Time, Times, Trace},
};

/// What happens to a fleet.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Scenario {
    pub replicas: u32,
    /// Requests of the whole fleet.
    pub trace: Trace,
    /// From the disk to host memory, in µs.
    pub read_us: Time,
    /// What happens when two thirds of the requests have arrived.
    pub event: Option<Event>,
}

/// A change.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// Zipf's law ranks other adapters first: none of the popular ones stays popular.
    Popularity,
    /// A replica leaves. Its requests, waiting and running, are placed again and begin anew.
    Leave,
    /// The router starts anew, and knows the loads of the replicas alone.
    Restart,
}

impl Event {
    pub const ALL: [Self; 3] = [Self::Popularity, Self::Leave, Self::Restart];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Popularity => "other adapters are popular",
            Self::Leave => "a replica leaves",
            Self::Restart => "the router starts anew",
        }
    }
}

impl Scenario {
    /// The first request that is measured, and the first behind the event.
    pub fn marks(&self) -> [usize; 2] {
        [self.trace.requests / 3, self.trace.requests * 2 / 3]
    }

    /// The requests, with their adapters.
    pub fn draw(&self) -> Result<Vec<Request>> {
        let mut requests = self.trace.draw()?;
        if self.event == Some(Event::Popularity) {
            let adapters = self.trace.adapters;
            for request in &mut requests[self.marks()[1]..] {
                request.adapter = (request.adapter + adapters / 2 - 1) % adapters + 1;
            }
        }
        Ok(requests)
    }
}

/// The counters of all replicas at a moment.
#[derive(Clone, Debug)]
pub struct Mark {
    /// The number of the request whose arrival it is.
    pub number: usize,
    pub now: Time,
    pub replicas: Vec<Counters>,
}

/// The counters of a replica.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    pub is_up: bool,
    pub tokens: u64,
    pub stalled: Time,
    pub steps: u64,
    pub step_adapters: u64,
    pub reads: u64,
    pub copies: u64,
}

/// What a run gave.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub times: Times,
    /// Where the adapter of each request was on its replica when it was placed first.
    pub tiers: Vec<Tier>,
    /// The replica of each request, the last one.
    pub replicas: Vec<usize>,
    pub marks: Vec<Mark>,
}

/// A fleet that runs a trace.
struct Fleet<'a> {
    requests: &'a [Request],
    router: &'a mut dyn Router,
    engines: Vec<Engine<Replica>>,
    loads: Vec<Option<usize>>,
    times: Times,
    tiers: Vec<Option<Tier>>,
    replicas: Vec<usize>,
    /// The first request of which the router knows.
    known: usize,
}

/// Runs a scenario to its end. `marks` are numbers of requests, at whose arrival counters are noted.
pub fn run(
    scenario: &Scenario,
    requests: &[Request],
    settings: &Settings,
    router: &mut dyn Router,
    marks: &[usize],
) -> Result<Outcome> {
    let mut settings = *settings;
    settings.hardware.read_us = scenario.read_us;
    let engine = |_| Ok(Engine::new(settings.hardware, Replica::new(&settings)?));
    let engines: Vec<_> = (0..scenario.replicas).map(engine).collect::<Result<_>>()?;
    let mut fleet = Fleet {
        requests,
        router,
        loads: vec![Some(0); engines.len()],
        engines,
        times: Times::new(requests.len()),
        tiers: vec![None; requests.len()],
        replicas: vec![0; requests.len()],
        known: 0,
    };
    let mut noted = Vec::new();
    // Replicas report in turn, each once in the interval.
    let turn = settings.report_us / Time::from(scenario.replicas);
    let mut reports = (0..).map(|at| at * turn).zip((0..fleet.engines.len()).cycle()).peekable();
    for (number, request) in requests.iter().enumerate() {
        while let Some((now, replica)) = reports.next_if(|(now, _)| *now < request.arrival) {
            fleet.advance(now);
            fleet.report(replica);
        }
        fleet.advance(request.arrival);
        if marks.contains(&number) {
            noted.push(fleet.mark(number));
        }
        match scenario.event.filter(|_| number == scenario.marks()[1]) {
            Some(Event::Leave) => fleet.leave(0),
            Some(Event::Restart) => {
                fleet.known = number;
                fleet.router.restart();
            }
            Some(Event::Popularity) | None => {}
        }
        fleet.place(number);
    }
    noted.push(fleet.mark(requests.len()));
    let Fleet { engines, loads, mut times, tiers, replicas, .. } = fleet;
    for (mut engine, _) in engines.into_iter().zip(loads).filter(|(_, load)| load.is_some()) {
        engine.advance(None, requests, &mut times);
    }
    let tiers = tiers.into_iter().map(|tier| tier.expect("every request was placed")).collect();
    Ok(Outcome { times, tiers, replicas, marks: noted })
}

impl Fleet<'_> {
    /// Begins all steps that begin before `now`.
    fn advance(&mut self, now: Time) {
        for (replica, engine) in self.engines.iter_mut().enumerate() {
            let Some(load) = &mut self.loads[replica] else { continue };
            engine.advance(Some(now), self.requests, &mut self.times);
            while let Some(number) = engine.next_end(now) {
                *load -= 1;
                if number >= self.known {
                    self.router.finish(self.requests[number].adapter, replica);
                }
            }
        }
    }

    fn report(&mut self, replica: usize) {
        if self.loads[replica].is_some() {
            self.router.report(replica, &self.engines[replica].server.report());
        }
    }

    fn place(&mut self, number: usize) {
        let request = &self.requests[number];
        let replica = self.router.place(request.adapter, &self.loads);
        *self.loads[replica].as_mut().expect("the replica is up") += 1;
        self.replicas[number] = replica;
        let engine = &mut self.engines[replica];
        self.tiers[number].get_or_insert(engine.server.tier(request.adapter));
        engine.arrive(number, request);
    }

    fn leave(&mut self, replica: usize) {
        self.loads[replica] = None;
        self.router.leave(replica);
        let requests: Vec<usize> = self.engines[replica].server.requests().collect();
        requests.into_iter().for_each(|number| self.place(number));
    }

    fn mark(&self, number: usize) -> Mark {
        let counters = |(engine, load): (&Engine<Replica>, &Option<usize>)| {
            let [reads, copies] = engine.server.loads();
            let Engine { tokens, stalled, steps, step_adapters, .. } = *engine;
            Counters { is_up: load.is_some(), tokens, stalled, steps, step_adapters, reads, copies }
        };
        let now = self.requests[number.min(self.requests.len() - 1)].arrival;
        Mark { number, now, replicas: self.engines.iter().zip(&self.loads).map(counters).collect() }
    }
}
