use rand::{SeedableRng, rngs::StdRng};
use rand_distr::{Distribution as _, Exp1, LogNormal, Zipf};
use serde::{Deserialize, Serialize};

use super::{Adapter, Time};
use crate::Result;

/// What a trace is drawn from.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Trace {
    pub seed: u64,
    pub requests: usize,
    pub adapters: u32,
    /// The exponent of Zipf's law.
    pub zipf: f64,
    /// Requests per second; `None` if all arrive at once.
    pub rate: Option<f64>,
}

/// A request of a trace.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Request {
    pub arrival: Time,
    pub adapter: Adapter,
    /// Tokens.
    pub prompt: usize,
    /// Tokens, at least one.
    pub output: usize,
}

/// Means, in tokens, and the standard deviation of the logarithm of both lengths.
const MEAN_PROMPT: f64 = 256.0;
const MEAN_OUTPUT: f64 = 128.0;
const DEVIATION: f64 = 0.8;
/// The longest prompt and the longest output, in tokens.
const MAX_TOKENS: f64 = 4096.0;

impl Trace {
    /// The requests, by arrival. Traces that differ only in their rate have the same requests, closer together or farther apart.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "times of a trace and samples in the ranges of their distributions"
    )]
    pub fn draw(&self) -> Result<Vec<Request>> {
        let mut rng = StdRng::seed_from_u64(self.seed);
        let adapters = Zipf::new(f64::from(self.adapters), self.zipf)?;
        // The mean of a log-normal distribution is exp(µ + σ²/2).
        let lengths = |mean: f64| LogNormal::new(mean.ln() - DEVIATION * DEVIATION / 2.0, DEVIATION);
        let (prompts, outputs) = (lengths(MEAN_PROMPT)?, lengths(MEAN_OUTPUT)?);
        let mut gaps = 0.0;
        let request = |_| {
            let gap: f64 = Exp1.sample(&mut rng);
            gaps += gap;
            let tokens = |length: f64| length.round().clamp(1.0, MAX_TOKENS) as usize;
            Request {
                arrival: self.rate.map_or(0, |rate| (gaps / rate * 1e6) as Time),
                adapter: adapters.sample(&mut rng) as Adapter,
                prompt: tokens(prompts.sample(&mut rng)),
                output: tokens(outputs.sample(&mut rng)),
            }
        };
        Ok((0..self.requests).map(request).collect())
    }
}

/// The model of a GPU, and the bounds of its engine. Times are in µs.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Hardware {
    /// Adapters that device memory holds.
    pub slots: usize,
    /// Adapters that host memory holds.
    pub host_adapters: usize,
    /// From host memory to the device.
    pub copy_us: Time,
    /// From the disk to host memory.
    pub read_us: Time,
    /// Fixed part of a step.
    pub step_us: Time,
    /// Part of a step for each distinct adapter.
    pub adapter_us: Time,
    /// Part of a step for 1000 tokens of prompts.
    pub thousand_tokens_us: Time,
    /// Part of a step for 1000 requests that decode.
    pub thousand_decodes_us: Time,
    /// Running requests, at most.
    pub max_requests: usize,
    /// Tokens of a step, at most.
    pub max_tokens: usize,
}

impl Hardware {
    /// One GPU like an H200, with Qwen3-8B and adapters of 83 MB: 50 GB/s to the device, 3 GB/s from the disk, weights and adapters
    /// read at 4 TB/s, and 600 TFLOP/s.
    pub const H200: Self = Self {
        slots: 32,
        host_adapters: 1000,
        copy_us: 1660,
        read_us: 27_700,
        step_us: 5000,
        adapter_us: 20,
        thousand_tokens_us: 27_000,
        thousand_decodes_us: 27_000,
        max_requests: 64,
        max_tokens: 2048,
    };

    /// One H200 with Qwen3-8B and adapters of 87 MB, measured: loads are those of `benches/record/h200/pool.json` (commit 9ef02ab), and
    /// steps are fitted to the decode steps and the prefill with adapters of rank 16 in `serve.json` (commit cd661ad).
    pub const MEASURED: Self = Self {
        slots: 32,
        host_adapters: 256,
        copy_us: 1603,
        read_us: 4086,
        step_us: 4250,
        adapter_us: 50,
        thousand_tokens_us: 25_500,
        thousand_decodes_us: 39_000,
        max_requests: 64,
        max_tokens: 2048,
    };

    /// Time of a step in µs: `prefill` tokens of prompts, and a token each of `decodes` requests.
    pub fn step(&self, prefill: usize, decodes: usize, adapters: usize) -> Time {
        let tokens = self.thousand_tokens_us * prefill as Time + self.thousand_decodes_us * decodes as Time;
        self.step_us + self.adapter_us * adapters as Time + tokens / 1000
    }
}
