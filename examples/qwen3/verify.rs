//! `--verify`: every request once more, alone, in `f32`, on a model that has its adapter merged into the weights.
//!
//! Nothing of multi-LoRA is left in that run, and nothing of the other requests. It takes the tokens that the batch chose, so that
//! logits are compared step by step even where a near tie was decided otherwise.

use std::iter;

use aril::{DType, Slot, adapter::Adapter};

use crate::{
    checkpoint::{Checkpoint, Weights},
    config::Config,
    device::Device,
    error::{Context, Result},
    generate::{Generation, Sequence, replay},
    model::{Described, Model},
    requests::Request,
};

/// What the merged model says of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Verdict {
    /// The largest difference of any logit of any step.
    pub(crate) difference: f32,
    /// What it may be.
    pub(crate) tolerance: f32,
    /// Whether the merged model chooses the same tokens.
    pub(crate) tokens_agree: bool,
}

impl Verdict {
    pub(crate) fn passes(self) -> bool {
        self.difference <= self.tolerance
    }
}

/// What merged models are made of.
pub(crate) struct Merge<'a> {
    pub(crate) config: &'a Config,
    pub(crate) described: &'a Described,
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) adapters: &'a [(&'a str, &'a Adapter)],
}

/// Judges what a batch computed in `dtype` gave.
pub(crate) fn verify<D: Device<Elem = f32>>(
    device: &D,
    Merge { config, described, checkpoint, adapters }: Merge<'_>,
    requests: &[Request],
    generations: &[Generation],
    dtype: DType,
) -> Result<Vec<Verdict>> {
    let mut verdicts = vec![None; requests.len()];
    for (index, request) in requests.iter().enumerate() {
        if verdicts[index].is_some() {
            continue;
        }
        let alike = |other: &Request| (other.adapter, other.scale) == (request.adapter, request.scale);
        let alike: Vec<usize> = (index..requests.len()).filter(|&other| alike(&requests[other])).collect();
        let tokens = alike.iter().map(|&index| requests[index].prompt.len()).max().unwrap_or(0);
        let weights = Weights::new(checkpoint, config.int4_group);
        let (name, weights) = match request.adapter {
            None => ("", Ok(weights)),
            Some(adapter) => {
                let (name, adapter) = adapters[adapter];
                (name, weights.merged(adapter, &described.model, request.scale))
            }
        };
        let model = weights.and_then(|weights| Model::new(device, config, described, weights, iter::empty(), tokens));
        let model = model.context(format_args!("merging adapter `{name}`"))?;
        for index in alike {
            let sequence = Sequence { prompt: &requests[index].prompt, slot: Slot::BASE, scale: 1.0 };
            let merged = replay(&model, &[sequence], &[&generations[index].tokens])?;
            verdicts[index] = Some(compare(&generations[index], &merged[0], config, dtype));
        }
    }
    Ok(verdicts.into_iter().flatten().collect())
}

fn compare(generation: &Generation, merged: &Generation, config: &Config, dtype: DType) -> Verdict {
    let chosen = merged.logits.chunks_exact(config.vocab).map(|logits| {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        logits.iter().position(|&logit| logit == largest)
    });
    let tokens_agree = chosen.eq(generation.tokens.iter().map(|&token| Some(token as usize)));
    Verdict {
        difference: largest_difference(&generation.logits, &merged.logits),
        tolerance: tolerance(&merged.logits, config, dtype),
        tokens_agree,
    }
}

/// The largest difference of two runs' logits; infinite where one is not a number.
pub(crate) fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    let difference = |(a, b): (&f32, &f32)| match (a - b).abs() {
        nan if nan.is_nan() => f32::INFINITY,
        difference => difference,
    };
    a.iter().zip(b).map(difference).fold(0.0, f32::max)
}

/// How far rounding alone takes the logits from the merged model's.
///
/// A model, not a bound: a worst-case bound would let any adapter pass. Take all roundings as independent, of a root mean square of
/// under half the unit roundoff `u` of the dtype relative to what is rounded, and what is rounded as no larger than the residual
/// stream that it ends up in. A layer has 28 on the way: 17 in its attention half (2 norm, 2 weights, 2 deltas, 2 products, 2 head
/// norm, 3 rope, 2 scores, 1 softmax, 1 sum), 11 in the other (2 norm, 2 weights, 2 deltas, 2 products, 2 activation, 1 sum), which
/// add up to `½ u √(28 layers)` of the hidden state, and as much of the largest logit, whose own rounding adds `u` at most.
/// Experts have at most 2 more, of the router's weights and of the combine; but most of theirs are of several experts each, which
/// average out. All this is as long as rounding does not send a token to another expert. Every product also sums up to `k` terms in
/// `f32`, here and in the merged model: `2k` more roundings of that type each time.
#[expect(clippy::cast_possible_truncation, reason = "a tolerance")]
fn tolerance(logits: &[f32], config: &Config, dtype: DType) -> f32 {
    let largest = logits.iter().fold(0.0, |largest: f32, logit| largest.max(logit.abs()));
    let roundings = 28.0 * config.layers as f64;
    let terms = config.hidden.max(config.intermediate) as f64;
    let (u, u_f32) = (dtype.unit_roundoff(), DType::F32.unit_roundoff());
    let hidden = 0.5 * (roundings * (u * u + 2.0 * terms * u_f32 * u_f32)).sqrt();
    (f64::from(largest) * (hidden + u)) as f32
}
