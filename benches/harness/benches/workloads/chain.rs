//! The GEMMs of a decoder layer one after the other, as decode runs them: in a chain, the end of each overlaps the
//! start of the next. Each of the decoder layers of a CUDA graph has base weights and adapters that no cache holds.

use std::collections::BTreeSet;

use aril::plan::MAX_FORWARD_TOKENS;
use aril_bench::{
    Result,
    gemm::Gemm,
    layer::Stage,
    report::median,
    results::{Chain, Results},
    workload::{Suite, Workload},
};

use crate::{
    REPLAYS,
    added::{self, Adapted, Mode, after, alone, fused},
};

/// The layers of a decoder layer, in order.
const LAYERS: [&str; 4] = ["qkv", "o", "gate_up", "down"];
/// Decoder layers of a graph.
const DECODER_LAYERS: usize = 16;
/// The GEMMs alone, and what is compared with them.
const MODES: [(&str, Mode); 3] = [("alone", alone), ("after", after), ("fused", fused)];

/// Times the chains of all workloads whose four layers are there, up to the tokens of the fused linear.
pub(crate) fn measure(gemm: &Gemm, stage: &Stage, workloads: &[&Workload], results: &mut Results) -> Result<()> {
    let is_short =
        |workload: &&&Workload| workload.suite == Suite::Layer && workload.num_tokens() <= MAX_FORWARD_TOKENS;
    let workloads: Vec<&Workload> = workloads.iter().filter(is_short).copied().collect();
    let models: BTreeSet<&str> = workloads.iter().map(|workload| workload.model.as_str()).collect();
    for model in models {
        let of_layer =
            |name| workloads.iter().filter(move |workload| workload.model == model && workload.layer == name).copied();
        let stages = LAYERS.map(|name| stage.beside(of_layer(name).map(added::room)));
        let stages = stages.into_iter().collect::<Result<Vec<_>>>()?;
        for first in of_layer(LAYERS[0]) {
            let same = |name| of_layer(name).find(|other| (&other.ranks, &other.slots) == (&first.ranks, &first.slots));
            let layers: Vec<&Workload> = LAYERS.into_iter().filter_map(same).collect();
            if layers.len() < LAYERS.len() {
                continue;
            }
            let adapted = layers.iter().zip(&stages).map(|(workload, stage)| Adapted::fused(gemm, stage, workload));
            let adapted = adapted.collect::<Result<Vec<_>>>()?;
            let graphs = MODES.iter().map(|(_, mode)| {
                let decoder_layer = |i| adapted.iter().try_for_each(|layer| mode(layer, i));
                stage.gpu.capture(|| (0..DECODER_LAYERS).try_for_each(decoder_layer))
            });
            let times = stage.gpu.time_in_turn(&graphs.collect::<Result<Vec<_>>>()?, REPLAYS)?;
            let mut us = times.into_iter().map(|mut us| median(&mut us) / DECODER_LAYERS as f64);
            let gemms_us = us.next().unwrap_or(f64::NAN);
            results.chain.push(Chain {
                model: model.to_owned(),
                rank: first.max_rank(),
                tokens: first.num_tokens(),
                adapters: first.slots.iter().filter(|&&slot| slot >= 0).collect::<BTreeSet<_>>().len(),
                gemms_us,
                us: MODES[1..].iter().map(|&(name, _)| name.to_owned()).zip(us).collect(),
            });
        }
    }
    Ok(())
}
