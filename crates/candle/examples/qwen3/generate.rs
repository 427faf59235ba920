//! Greedy decoding of many sequences, each with any adapter or none.

use candle_core::{Result, Tensor, bail};

use crate::{
    adapters::Named,
    model::{Cache, Qwen3, Row},
};

/// A sequence during decoding.
#[derive(Clone, Debug)]
pub struct Sequence {
    pub adapter: Option<String>,
    /// The prompt, followed by the generated tokens.
    pub tokens: Vec<u32>,
    /// The number of tokens in the cache.
    cached: usize,
    cache: Cache,
}

impl Sequence {
    /// A new sequence, with an empty cache.
    pub fn new(model: &Qwen3, adapter: Option<&str>, prompt: &[u32]) -> Self {
        Self { adapter: adapter.map(str::to_owned), tokens: prompt.to_vec(), cached: 0, cache: model.cache() }
    }
}

/// Runs all tokens of every sequence that are not in its cache in one forward, and returns the next logits:
/// `[sequences, vocab]`.
///
/// A new sequence runs its whole prompt, and a decoding sequence one token, in the same step.
pub fn step(model: &Qwen3, adapters: &Named, sequences: &mut [&mut Sequence]) -> Result<Tensor> {
    if sequences.iter().any(|sequence| sequence.cached == sequence.tokens.len()) {
        bail!("a sequence has no new token")
    }
    let lengths: Vec<_> = sequences
        .iter()
        .map(|sequence| (sequence.adapter.as_deref(), sequence.tokens.len() - sequence.cached))
        .collect();
    let step = adapters.step(&lengths)?;
    let mut rows: Vec<_> = sequences
        .iter_mut()
        .map(|Sequence { tokens, cached, cache, .. }| Row { tokens: &tokens[*cached..], cache })
        .collect();
    let logits = model.forward(&mut rows, &step)?;
    for sequence in sequences {
        sequence.cached = sequence.tokens.len();
    }
    Ok(logits)
}

/// Appends the model's tokens to every sequence until it ends the text or has `max_new_tokens` new tokens.
pub fn generate(model: &Qwen3, adapters: &Named, sequences: &mut [Sequence], max_new_tokens: usize) -> Result<()> {
    let mut active: Vec<&mut Sequence> = sequences.iter_mut().collect();
    for _ in 0..max_new_tokens {
        if active.is_empty() {
            break;
        }
        let next = step(model, adapters, &mut active)?.argmax(1)?.to_vec1::<u32>()?;
        for (sequence, next) in active.iter_mut().zip(next) {
            sequence.tokens.push(next);
        }
        active.retain(|sequence| sequence.tokens.last() != Some(&model.config().eos_token_id));
    }
    Ok(())
}
