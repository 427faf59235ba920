//! The workloads that only aril is measured on.

use aril::model::Halves;

use crate::{
    Result,
    experts::{ExpertsAdapter, ExpertsWorkload, Router, Shape, Spread, size},
    workload::{self, Operation, Suite, Workload},
};

const VOCAB: usize = 151_936;
const HIDDEN: usize = 4096;

/// The ranks of a batch of unrelated adapters.
const MIXED_RANKS: [usize; 5] = [8, 16, 32, 64, 128];

/// Single operations of Qwen3-8B.
pub fn own() -> Result<Vec<Workload>> {
    let list = workload::parse(workload::BUILT_IN)?;
    let layer = |layer| find(&list, "qwen3-8b", layer);
    let (qkv, o, gate_up, down) = (layer("qkv")?, layer("o")?, layer("gate_up")?, layer("down")?);
    let lm_head = Workload { layer: "lm_head".to_owned(), in_features: HIDDEN, out_slices: vec![VOCAB], ..o.clone() };
    let embedding = Workload {
        layer: "embedding".to_owned(),
        operation: Operation::Embedding,
        in_features: VOCAB,
        out_slices: vec![HIDDEN],
        ..o.clone()
    };
    let mut workloads = mixed_ranks(&[qkv.clone(), gate_up.clone()]);
    workloads.extend(resident(&o));
    workloads.extend(speculative(&[qkv.clone(), o.clone(), gate_up.clone(), down.clone()]));
    workloads.extend(engine(&[qkv.clone(), o, gate_up, down]));
    workloads.extend(vocabulary(&lm_head, &embedding));
    workloads.extend(idle(&qkv));
    Ok(workloads)
}

/// Tokens and adapters of the layers with their GEMM.
const WITH_BASE: [(u16, u16); 14] = [
    (1, 1),
    (8, 8),
    (16, 8),
    (16, 16),
    (32, 8),
    (32, 32),
    (64, 8),
    (64, 64),
    (128, 8),
    (256, 8),
    (512, 8),
    (2048, 8),
    (4096, 8),
    (8192, 8),
];

/// The layers of two models with the GEMM of their base layer. Each adapter has about as many tokens: scattered up to
/// 256 tokens, as in decode, and contiguous above, as in prefill.
pub fn with_base() -> Result<Vec<Workload>> {
    let list = workload::parse(workload::BUILT_IN)?;
    let mut workloads = Vec::new();
    for model in ["qwen3-8b", "qwen3-32b"] {
        for name in ["qkv", "o", "gate_up", "down"] {
            let layer = find(&list, model, name)?;
            for rank in [16, 64] {
                for (tokens, num_slots) in WITH_BASE {
                    let mut slots = scattered(tokens, 0..num_slots);
                    if tokens > 256 {
                        slots.sort();
                    }
                    let id = format!("layer/{model}/{name}/r{rank}/t{tokens}/uniform{num_slots}");
                    let ranks = vec![rank; num_slots.into()];
                    workloads.push(Workload { id, suite: Suite::Layer, ranks, slots, ..layer.clone() });
                }
            }
        }
    }
    Ok(workloads)
}

/// A fused layer and a single one, for the costs of the host.
pub fn launched() -> Result<Vec<Workload>> {
    let list = workload::parse(workload::BUILT_IN)?;
    let mut workloads = Vec::new();
    for name in ["qkv", "o"] {
        let layer = find(&list, "qwen3-8b", name)?;
        for tokens in [1, 64_u16] {
            let num_slots = tokens.min(8);
            let id = format!("host/qwen3-8b/{name}/r16/t{tokens}/uniform{num_slots}");
            let (ranks, slots) = (vec![16; num_slots.into()], scattered(tokens, 0..num_slots));
            workloads.push(Workload { id, suite: Suite::Host, ranks, slots, ..layer.clone() });
        }
    }
    Ok(workloads)
}

/// Experts of other models, and of unusual routers, ranks and layouts. The tokens of an adapter are scattered up to 128
/// tokens, as in decode, and contiguous above, as in prefill.
pub fn own_experts() -> Vec<ExpertsWorkload> {
    let per_expert = |rank| ExpertsAdapter { rank, shared_outer: false };
    let mut workloads = Vec::new();
    let shape = |hidden, inter, num_experts, top_k, halves| Shape { hidden, inter, num_experts, top_k, halves };
    let qwen3 = ("qwen3-30b-a3b", shape(2048, 768, 128, 8, Halves::GateUp));
    for model in [
        ("qwen3.5-35b-a3b", shape(2048, 512, 256, 8, Halves::GateUp)),
        ("gpt-oss-120b", shape(2880, 2880, 128, 4, Halves::Interleaved)),
    ] {
        for tokens in [1, 8, 32, 128, 1024_u16] {
            for num_slots in [1, 8_u16].into_iter().filter(|&num_slots| num_slots <= tokens) {
                let (class, adapters) =
                    (format!("{} {}", model.0, size(tokens.into())), vec![per_expert(16); num_slots.into()]);
                workloads.push(experts(model, &class, "per_expert/r16", adapters, tokens, Spread::Uniform));
            }
        }
    }
    for tokens in [8, 32, 128, 1024] {
        for spread in [Spread::Uniform, Spread::Same] {
            for num_slots in [1, 8] {
                let class = match spread {
                    Spread::Uniform => "each token its experts",
                    Spread::Same => "the same experts for all tokens",
                };
                workloads.push(experts(
                    qwen3,
                    class,
                    "per_expert/r16",
                    vec![per_expert(16); num_slots],
                    tokens,
                    spread,
                ));
            }
        }
        let mixed: Vec<_> = [8, 16, 24, 32].map(per_expert).repeat(2);
        for (name, adapters) in [("mixed", mixed), ("padded", vec![per_expert(32); 8])] {
            let (class, kind) = (format!("experts' ranks {name}"), format!("per_expert/{name}"));
            workloads.push(experts(qwen3, &class, &kind, adapters, tokens, Spread::Uniform));
        }
        let layouts = [false, true].map(|shared_outer| ExpertsAdapter { rank: 16, shared_outer }).repeat(4);
        workloads.push(experts(qwen3, "per_expert beside shared_outer", "mixed/r16", layouts, tokens, Spread::Uniform));
    }
    workloads
}

/// Adapters of many ranks, and the same padded to the largest, as an engine needs whose memory has one rank.
fn mixed_ranks(layers: &[Workload]) -> Vec<Workload> {
    let mut workloads = Vec::new();
    for layer in layers {
        for tokens in [16, 64, 256] {
            for (distribution, adapters, num_slots) in
                [("distinct", "distinct", tokens), ("uniform8", "few adapters", 8)]
            {
                let slots = scattered(tokens, 0..num_slots);
                let mixed: Vec<usize> = MIXED_RANKS.into_iter().cycle().take(num_slots.into()).collect();
                let padded = vec![MIXED_RANKS[MIXED_RANKS.len() - 1]; num_slots.into()];
                for (name, ranks) in [("mixed", mixed), ("padded", padded)] {
                    let (class, id) = (format!("ranks {name}, {adapters}"), format!("{name}/t{tokens}/{distribution}"));
                    workloads.push(workload(layer, &class, &id, ranks, slots.clone()));
                }
            }
        }
    }
    workloads
}

/// Few adapters in use of many that are resident. The layer is small, so that all of them fit.
fn resident(layer: &Workload) -> Vec<Workload> {
    let mut workloads = Vec::new();
    for num_slots in [64, 1000] {
        for tokens in [8, 64] {
            let slots = scattered(tokens, (5..64).step_by(8));
            let (class, id) = (format!("8 of {num_slots} adapters"), format!("r16/t{tokens}/uniform8_pool{num_slots}"));
            workloads.push(workload(layer, &class, &id, vec![16; num_slots], slots));
        }
    }
    workloads
}

/// The table of an engine that is ready for more than a batch has: 8 adapters of rank 16 in use, of 256 slots and up to
/// rank 64.
fn engine(layers: &[Workload]) -> Vec<Workload> {
    let mut workloads = Vec::new();
    for layer in layers {
        for tokens in [8, 64, 256] {
            let ranks = [vec![16; 8], vec![8; 247], vec![64]].concat();
            let id = format!("engine/t{tokens}/uniform8_pool256");
            workloads.push(workload(
                layer,
                "8 adapters of rank 16, room for 256 of rank 64",
                &id,
                ranks,
                scattered(tokens, 0..8),
            ));
        }
    }
    workloads
}

/// Speculative decoding: of each sequence a row of the base model, which drafts, and four of its tenant's adapter, which
/// verify; and as many rows of the tenants alone.
fn speculative(layers: &[Workload]) -> Vec<Workload> {
    const ROWS: u16 = 5;
    let mut workloads = Vec::new();
    for layer in layers {
        for sequences in [8, 32_u16] {
            let of_sequence = |slot: u16, drafts: bool| {
                (0..ROWS).map(move |row| if drafts && row == 0 { -1 } else { i32::from(slot) })
            };
            for (name, class, drafts) in
                [("drafted", "drafts and verifications", true), ("verified", "verifications alone", false)]
            {
                let slots = (0..sequences).flat_map(|slot| of_sequence(slot, drafts)).collect();
                let id = format!("{name}/t{}/uniform{sequences}", ROWS * sequences);
                workloads.push(workload(layer, class, &id, vec![16; sequences.into()], slots));
            }
        }
    }
    workloads
}

/// The layers as wide as the vocabulary: an output head over sampled rows, and an embedding of decode and prefill.
fn vocabulary(lm_head: &Workload, embedding: &Workload) -> Vec<Workload> {
    let mut workloads = Vec::new();
    for (layer, batches) in [(lm_head, [1, 8, 64].as_slice()), (embedding, &[1, 8, 64, 2048])] {
        for rank in [16, 64] {
            for &tokens in batches {
                let num_slots = tokens.min(8);
                let id = format!("r{rank}/t{tokens}/uniform{num_slots}");
                let slots = scattered(tokens, 0..num_slots);
                workloads.push(workload(layer, &layer.layer, &id, vec![rank; num_slots.into()], slots));
            }
        }
    }
    workloads
}

/// Batches in which no token has an adapter.
fn idle(layer: &Workload) -> Vec<Workload> {
    let of =
        |tokens| workload(layer, "no adapter in use", &format!("r16/t{tokens}/none"), vec![16; 8], vec![-1; tokens]);
    [1, 64, 4096].map(of).to_vec()
}

fn find(list: &[Workload], model: &str, layer: &str) -> Result<Workload> {
    let found = list.iter().find(|workload| workload.model == model && workload.layer == layer);
    found.cloned().ok_or_else(|| format!("there is no layer {layer} of {model}").into())
}

/// `layer` with other adapters.
fn workload(layer: &Workload, class: &str, id: &str, ranks: Vec<usize>, slots: Vec<i32>) -> Workload {
    let id = format!("own/{}/{}/{id}", layer.model, layer.layer);
    Workload { id, suite: Suite::Own, tag: class.to_owned(), ranks, slots, ..layer.clone() }
}

/// The experts of a model with those adapters.
fn experts(
    (model, shape): (&str, Shape),
    class: &str,
    kind: &str,
    adapters: Vec<ExpertsAdapter>,
    tokens: u16,
    spread: Spread,
) -> ExpertsWorkload {
    const MOST_SCATTERED: u16 = 128;
    let num_slots = u16::try_from(adapters.len()).unwrap_or(u16::MAX);
    let mut slots = scattered(tokens, 0..num_slots);
    if tokens > MOST_SCATTERED {
        slots.sort();
    }
    let routes = match spread {
        Spread::Uniform => "uniform",
        Spread::Same => "same",
    };
    ExpertsWorkload {
        id: format!("moe-own/{model}/{kind}/t{tokens}/a{num_slots}/{routes}"),
        suite: Suite::MoeOwn,
        tag: class.to_owned(),
        shape,
        adapters,
        slots,
        router: Router { seed: 7919 * u64::from(tokens) + u64::from(num_slots), spread },
    }
}

/// Gives each slot about as many tokens as any other, and neighbouring tokens different slots.
fn scattered(tokens: u16, slots: impl Iterator<Item = u16>) -> Vec<i32> {
    let slots: Vec<u16> = slots.collect();
    (0..usize::from(tokens)).map(|token| slots[token * 7 % slots.len()].into()).collect()
}
