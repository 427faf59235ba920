//! Requests for many adapters, by Zipf's law, for a server under load.

use rand::{SeedableRng, rngs::StdRng};
use rand_distr::{Distribution as _, Exp1, LogNormal, Zipf};
use serde::{Deserialize, Serialize};

use crate::Result;

/// An adapter, by its rank in Zipf's law.
pub type Adapter = u32;
/// Microseconds since the beginning of a run.
pub type Time = u64;

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
    /// The requests, by arrival. Traces that differ only in their rate have the same requests, closer together or
    /// farther apart.
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
