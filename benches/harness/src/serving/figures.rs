use std::{error::Error, fs, path::Path, time::Duration};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{Aril, FILE, Fifo, Hardware, Outcome, Policy, SLora, Trace, Vllm, run};
use crate::{Result, report::percentile};

const SEED: u64 = 1;
const REQUESTS: usize = 10_000;
const ADAPTERS: [u32; 2] = [1000, 100_000];
const ZIPF: f64 = 1.0;
/// Requests per second.
pub(super) const RATES: [u32; 8] = [4, 8, 12, 16, 20, 24, 28, 32];
/// Slots that batches leave for adapters that are loaded ahead.
const AHEAD: usize = 4;
const MAX_WAIT: Duration = Duration::from_secs(1);

/// A policy, by the name that tables and plots show.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Aril,
    Fifo,
    Vllm,
    Slora,
    SloraClustered,
}

impl Kind {
    pub const ALL: [Self; 5] = [Self::Aril, Self::Fifo, Self::Vllm, Self::Slora, Self::SloraClustered];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Aril => "aril",
            Self::Fifo => "FIFO",
            Self::Vllm => "vLLM",
            Self::Slora => "S-LoRA",
            Self::SloraClustered => "S-LoRA, clustered",
        }
    }

    /// The policy with all of the device's slots.
    fn policy(self, settings: &Settings) -> Box<dyn Policy> {
        let Settings { hardware: Hardware { slots, max_tokens, .. }, ahead, .. } = *settings;
        match self {
            Self::Aril => Box::new(Aril::new(slots - ahead, ahead, Duration::from_millis(settings.max_wait_ms))),
            Self::Fifo => Box::new(Fifo::new(slots - ahead, ahead)),
            Self::Vllm => Box::new(Vllm::new(slots)),
            Self::Slora => Box::new(SLora::new(slots, max_tokens, false)),
            Self::SloraClustered => Box::new(SLora::new(slots, max_tokens, true)),
        }
    }
}

/// What all runs have in common.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Settings {
    pub hardware: Hardware,
    /// Slots that batches of `aril` and `FIFO` leave for adapters that are loaded ahead.
    pub ahead: usize,
    /// When a request of `aril` is overdue.
    pub max_wait_ms: u64,
}

/// One run of a trace.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Run {
    pub trace: Trace,
    pub policy: Kind,
    pub figures: Figures,
}

/// The figures of a run.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Figures {
    /// Adapters that were loaded to the device.
    pub loads: u64,
    /// Share of requests that needed no load: one less the loads per request.
    pub hit_rate: f64,
    /// Share of the run in which the device computed nothing while a request waited.
    pub stalled: f64,
    /// Time from arrival to the first token.
    pub first_token_p50_ms: f64,
    pub first_token_p99_ms: f64,
    /// Time from arrival to the last token.
    pub last_token_p50_ms: f64,
    pub last_token_p99_ms: f64,
    /// Requests and output tokens per second of the run.
    pub requests_per_s: f64,
    pub tokens_per_s: f64,
}

/// The file of all runs.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Record {
    pub about: String,
    pub settings: Settings,
    pub runs: Vec<Run>,
}

impl Run {
    /// Runs a policy on a trace.
    pub fn new(trace: Trace, policy: Kind, settings: &Settings) -> Result<Self> {
        let requests = trace.draw()?;
        let outcome = run(&requests, settings.hardware, &mut *policy.policy(settings));
        let tokens = requests.iter().map(|request| request.output).sum();
        Ok(Self { trace, policy, figures: Figures::new(&outcome, tokens) })
    }
}

impl Figures {
    fn new(outcome: &Outcome, tokens: usize) -> Self {
        let requests = outcome.first_token.len();
        let seconds = outcome.end as f64 / 1e6;
        let percentiles = |times: &[u64]| {
            let mut times = times.to_vec();
            times.sort_unstable();
            [50, 99].map(|percent| percentile(&times, percent) as f64 / 1e3)
        };
        let [first_token_p50_ms, first_token_p99_ms] = percentiles(&outcome.first_token);
        let [last_token_p50_ms, last_token_p99_ms] = percentiles(&outcome.last_token);
        Self {
            loads: outcome.loads,
            hit_rate: rounded(1.0 - outcome.loads as f64 / requests as f64),
            stalled: rounded(outcome.stalled as f64 / outcome.end as f64),
            first_token_p50_ms,
            first_token_p99_ms,
            last_token_p50_ms,
            last_token_p99_ms,
            requests_per_s: rounded(requests as f64 / seconds),
            tokens_per_s: rounded(tokens as f64 / seconds),
        }
    }
}

/// To four decimals, which a file keeps exactly.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

impl Record {
    /// Reads the record of the repository `root`.
    pub fn load(root: &Path) -> Result<Self> {
        let error = |error: &dyn Error| format!("{FILE}: {error}");
        let bytes = fs::read(root.join(FILE)).map_err(|cause| error(&cause))?;
        Ok(serde_json::from_slice(&bytes).map_err(|cause| error(&cause))?)
    }

    /// Runs all policies on all traces.
    pub fn run() -> Result<Self> {
        let settings =
            Settings { hardware: Hardware::H200, ahead: AHEAD, max_wait_ms: u64::try_from(MAX_WAIT.as_millis())? };
        let rates: Vec<Option<f64>> = RATES.into_iter().map(|rate| Some(rate.into())).chain([None]).collect();
        let traces = ADAPTERS.into_iter().flat_map(|adapters| {
            let trace =
                move |rate: &Option<f64>| Trace { seed: SEED, requests: REQUESTS, adapters, zipf: ZIPF, rate: *rate };
            rates.iter().map(trace)
        });
        let runs: Vec<(Trace, Kind)> = traces.flat_map(|trace| Kind::ALL.map(|policy| (trace, policy))).collect();
        // In parallel, and in the same order.
        let runs = runs
            .into_par_iter()
            .map(|(trace, policy)| Run::new(trace, policy, &settings).map_err(|error| error.to_string()));
        Ok(Self {
            about: "Simulated, not measured: `cargo run --release -p aril-bench -- serving` wrote this file."
                .to_owned(),
            settings,
            runs: runs.collect::<std::result::Result<_, _>>()?,
        })
    }
}
