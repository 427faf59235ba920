use std::{error::Error, fs, path::Path};

use aril::pool::Tier;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{
    Event, FILE, LeastLoaded, Mark, Modulo, Outcome, Random, Resident, Ring, RoundRobin, Router, Scenario, run,
};
use crate::{
    Result,
    report::percentile,
    serving::{Hardware, Request, Time, Trace},
};

const SEEDS: [u64; 3] = [1, 2, 3];
const ADAPTERS: u32 = 100_000;
const REPLICAS: u32 = 16;
/// The other fleets, and the other exponents.
const FLEETS: [u32; 2] = [8, 64];
const ZIPF: f64 = 1.0;
const EXPONENTS: [f64; 2] = [0.8, 1.2];
/// Requests of a run, for each replica.
const REQUESTS: u32 = 1500;
/// Requests per second, for each replica.
pub(super) const RATES: [u32; 4] = [16, 24, 32, 40];
const RATE: u32 = 24;
/// Of a disk of 3 GB/s.
const DISK_US: Time = 29_100;
/// How long the time after an event lasts.
const AFTER_US: Time = 10_000_000;

/// A policy, by the name that tables and plots show.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Random,
    RoundRobin,
    LeastLoaded,
    Modulo,
    Consistent,
    Bounded,
    Placements,
    Resident,
}

impl Kind {
    pub const ALL: [Self; 8] = [
        Self::Resident,
        Self::Placements,
        Self::Bounded,
        Self::Consistent,
        Self::Modulo,
        Self::LeastLoaded,
        Self::RoundRobin,
        Self::Random,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::RoundRobin => "round robin",
            Self::LeastLoaded => "least loaded",
            Self::Modulo => "hash, modulo",
            Self::Consistent => "hash, consistent",
            Self::Bounded => "hash, bounded loads",
            Self::Placements => "own placements",
            Self::Resident => "residency",
        }
    }

    pub fn router(self, replicas: usize, seed: u64, settings: &Settings) -> Box<dyn Router> {
        let resident = || Resident::new(replicas, settings.host_cost, settings.source_cost);
        match self {
            Self::Random => Box::new(Random::new(seed)),
            Self::RoundRobin => Box::new(RoundRobin::default()),
            Self::LeastLoaded => Box::new(LeastLoaded),
            Self::Modulo => Box::new(Modulo),
            Self::Consistent => Box::new(Ring::new(replicas, None)),
            Self::Bounded => Box::new(Ring::new(replicas, Some(settings.bound))),
            Self::Placements => Box::new(resident().untold()),
            Self::Resident => Box::new(resident()),
        }
    }
}

/// What all runs have in common.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Settings {
    pub hardware: Hardware,
    /// Slots that batches leave for adapters that are loaded ahead.
    pub ahead: usize,
    /// When a request is overdue.
    pub max_wait_ms: u64,
    /// How often each replica reports where its adapters are.
    pub report_us: Time,
    /// Of `residency`: the cost of an adapter in host memory, and elsewhere, in requests.
    pub host_cost: usize,
    pub source_cost: usize,
    /// Of `hash, bounded loads`: the most requests of a replica, over the mean.
    pub bound: f64,
}

impl Settings {
    pub const ALL: Self = Self {
        hardware: Hardware::MEASURED,
        ahead: 4,
        max_wait_ms: 1000,
        report_us: 1_000_000,
        host_cost: 4,
        source_cost: 12,
        bound: 1.25,
    };
}

/// A run of a scenario.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Run {
    pub scenario: Scenario,
    pub policy: Kind,
    /// Without the first third of the requests; with an event, until it.
    pub figures: Figures,
    /// For ten seconds after the event.
    pub after: Option<Figures>,
}

/// The figures of a part of a run.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Figures {
    /// Shares of the requests whose adapter was on the device of their replica, in its host memory, or only on its disk.
    pub device: f64,
    pub host: f64,
    pub disk: f64,
    /// Per request.
    pub reads: f64,
    pub copies: f64,
    /// Share of the time in which a device computed nothing while a request waited.
    pub stalled: f64,
    /// Distinct adapters of a step.
    pub step_adapters: f64,
    /// Output tokens of the busiest replica over those of the mean.
    pub imbalance: f64,
    pub tokens_per_s: f64,
    /// Time from arrival to the first token.
    pub first_token_p50_ms: f64,
    pub first_token_p99_ms: f64,
    /// Time from arrival to the last token.
    pub last_token_p50_ms: f64,
    pub last_token_p99_ms: f64,
}

/// The file of all runs.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Record {
    pub about: String,
    pub settings: Settings,
    pub runs: Vec<Run>,
}

impl Run {
    /// Runs a policy on a scenario.
    pub fn new(scenario: Scenario, policy: Kind, settings: &Settings) -> Result<Self> {
        let requests = scenario.draw()?;
        let mut router = policy.router(scenario.replicas as usize, scenario.trace.seed, settings);
        let [begin, event] = scenario.marks();
        let marks = if scenario.event.is_some() {
            let end = requests.partition_point(|request| request.arrival < requests[event].arrival + AFTER_US);
            vec![begin, event, end]
        } else {
            vec![begin]
        };
        let outcome = run(&scenario, &requests, settings, &mut *router, &marks)?;
        let mut parts = outcome.marks.windows(2).map(|part| Figures::new(&outcome, &requests, [&part[0], &part[1]]));
        let figures = parts.next().ok_or("a run has two marks")?;
        let after = parts.next().filter(|_| scenario.event.is_some());
        Ok(Self { scenario, policy, figures, after })
    }
}

impl Figures {
    fn new(outcome: &Outcome, requests: &[Request], [begin, end]: [&Mark; 2]) -> Self {
        let numbers = begin.number..end.number;
        let count = numbers.len() as f64;
        let in_tier = |tier| numbers.clone().filter(|number| outcome.tiers[*number] == tier).count() as f64 / count;
        let percentiles = |times: &[Time]| {
            let mut times: Vec<Time> = numbers.clone().map(|number| times[number] - requests[number].arrival).collect();
            times.sort_unstable();
            [50, 99].map(|percent| percentile(&times, percent) as f64 / 1e3)
        };
        let [first_token_p50_ms, first_token_p99_ms] = percentiles(&outcome.times.first_token);
        let [last_token_p50_ms, last_token_p99_ms] = percentiles(&outcome.times.last_token);
        // Of the replicas that were there to the end.
        let replicas: Vec<_> = begin.replicas.iter().zip(&end.replicas).filter(|(_, end)| end.is_up).collect();
        let sum = |of: fn(&super::Counters) -> u64| {
            replicas.iter().map(|(begin, end)| of(end) - of(begin)).sum::<u64>() as f64
        };
        let tokens = sum(|replica| replica.tokens);
        let busiest = replicas.iter().map(|(begin, end)| end.tokens - begin.tokens).max().unwrap_or(0) as f64;
        let elapsed = (end.now - begin.now) as f64;
        Self {
            device: rounded(in_tier(Tier::Device)),
            host: rounded(in_tier(Tier::Host)),
            disk: rounded(in_tier(Tier::Source)),
            reads: rounded(sum(|replica| replica.reads) / count),
            copies: rounded(sum(|replica| replica.copies) / count),
            stalled: rounded(sum(|replica| replica.stalled) / (elapsed * replicas.len() as f64)),
            step_adapters: rounded(sum(|replica| replica.step_adapters) / sum(|replica| replica.steps)),
            imbalance: rounded(busiest * replicas.len() as f64 / tokens),
            tokens_per_s: rounded(tokens / elapsed * 1e6),
            first_token_p50_ms,
            first_token_p99_ms,
            last_token_p50_ms,
            last_token_p99_ms,
        }
    }
}

/// To four decimals, which a file keeps exactly.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// All scenarios.
pub fn scenarios() -> Vec<Scenario> {
    let scenario = |replicas: u32, rate: u32, zipf: f64, read_us: Time, event: Option<Event>| {
        SEEDS.map(|seed| {
            let trace = Trace {
                seed,
                requests: (replicas * REQUESTS) as usize,
                adapters: ADAPTERS,
                zipf,
                rate: Some(f64::from(replicas * rate)),
            };
            Scenario { replicas, trace, read_us, event }
        })
    };
    let on_disk = |replicas, rate, zipf, event| scenario(replicas, rate, zipf, DISK_US, event);
    let rates = RATES.map(|rate| on_disk(REPLICAS, rate, ZIPF, None));
    let fleets = FLEETS.map(|replicas| on_disk(replicas, RATE, ZIPF, None));
    let exponents = EXPONENTS.map(|zipf| on_disk(REPLICAS, RATE, zipf, None));
    let cache = scenario(REPLICAS, RATE, ZIPF, Hardware::MEASURED.read_us, None);
    let events = Event::ALL.map(|event| on_disk(REPLICAS, RATE, ZIPF, Some(event)));
    let all = rates.into_iter().chain(fleets).chain(exponents).chain([cache]).chain(events);
    all.flatten().collect()
}

impl Record {
    /// Reads the record of the repository `root`.
    pub fn load(root: &Path) -> Result<Self> {
        let error = |error: &dyn Error| format!("{FILE}: {error}");
        let bytes = fs::read(root.join(FILE)).map_err(|cause| error(&cause))?;
        Ok(serde_json::from_slice(&bytes).map_err(|cause| error(&cause))?)
    }

    /// Runs all policies on all scenarios.
    pub fn run() -> Result<Self> {
        let settings = Settings::ALL;
        let scenarios = scenarios();
        let runs: Vec<_> =
            scenarios.into_iter().flat_map(|scenario| Kind::ALL.map(|policy| (scenario, policy))).collect();
        // In parallel, and in the same order.
        let runs = runs
            .into_par_iter()
            .map(|(scenario, policy)| Run::new(scenario, policy, &settings).map_err(|error| error.to_string()));
        Ok(Self {
            about: "Simulated, not measured: `cargo run --release -p aril-bench -- fleet` wrote this file.".to_owned(),
            settings,
            runs: runs.collect::<std::result::Result<_, _>>()?,
        })
    }
}
