//! `--verify`: runs each request again, alone, in `f32`, on a model whose weights contain the merged adapter.
//!
//! This run has no multi-LoRA and no other requests. It follows the tokens that the batch chose, so that logits are
//! compared step by step even after a near tie.

use std::sync::Arc;

use aril::{DType, Slot, adapter::Adapter};

use crate::{
    checkpoint::{Checkpoint, Weights},
    config::Config,
    device::Device,
    error::{Context, Result},
    generate::{Generation, Sequence, replay},
    group::Rank,
    model::{Described, Model, load},
    requests::Request,
    verdict::{Roundings, Verdict},
};

/// The inputs of merged models.
pub(crate) struct Merge<'a> {
    pub(crate) config: &'a Config,
    pub(crate) described: &'a Described,
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) adapters: &'a [(String, Arc<Adapter>)],
}

/// Judges the results of a batch computed in `dtype`.
pub(crate) fn verify<D: Device<Elem = f32>>(
    device: &D,
    Merge { config, described, checkpoint, adapters }: Merge<'_>,
    requests: &[Request],
    generations: &[Generation],
    dtype: DType,
) -> Result<Vec<Verdict>> {
    let roundings = Roundings { layers: config.layers, terms: config.hidden.max(config.intermediate), dtype };
    let mut verdicts = vec![None; requests.len()];
    for (index, request) in requests.iter().enumerate() {
        if verdicts[index].is_some() {
            continue;
        }
        let alike = |other: &Request| (other.adapter, other.scale) == (request.adapter, request.scale);
        let alike: Vec<usize> = (index..requests.len()).filter(|&other| alike(&requests[other])).collect();
        let tokens = alike.iter().map(|&index| requests[index].prompt.len()).max().unwrap_or(0);
        let weights = Weights::new(checkpoint, config.packing);
        let (name, weights) = match request.adapter {
            None => ("", Ok(weights)),
            Some(adapter) => {
                let (name, adapter) = &adapters[adapter];
                (name.as_str(), weights.merged(adapter, &described.model, request.scale))
            }
        };
        let build = |weights| {
            let (table, _) = load(device, &described.model, &[], tokens, &Rank::default())?;
            Model::new(device, config, described, weights, table, tokens)
        };
        let model = weights.and_then(build).context(format_args!("merging adapter `{name}`"))?;
        for index in alike {
            let sequence = Sequence { request: index, prompt: &requests[index].prompt, slot: Slot::BASE, scale: 1.0 };
            let merged = replay(&model, &[sequence], &[&generations[index].tokens])?;
            let Generation { tokens, logits } = &generations[index];
            verdicts[index] = Some(Verdict::new(logits, &merged[0].logits, config.vocab, tokens, roundings));
        }
    }
    Ok(verdicts.into_iter().flatten().collect())
}
