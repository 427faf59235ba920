//! A checkpoint of random weights for any `config.json`, so that a model is measured at its true size without its
//! files.
//!
//! All tensors are parts of one block of random numbers, as large as the largest of them, which is made in a second.
//! Norms are ones.

use std::{collections::BTreeMap, path::PathBuf, sync::atomic::AtomicU64};

use aril::{DType, Element};
use half::{bf16, f16};
use memmap2::MmapMut;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use rayon::prelude::*;
use safetensors::Dtype;

use crate::{
    checkpoint::{Checkpoint, Shard, Tensor},
    config::Config,
    error::{Context as _, Result, bail},
};

/// The standard deviation of weights, as `initializer_range` of Qwen3's configurations.
const DEVIATION: f32 = 0.02;

/// Random numbers that are drawn. Matrices repeat them, and as their number is prime, no two of their rows are equal.
const NUMBERS: usize = 1_048_573;

/// Distance between the beginnings of tensors in the block, in elements.
const STRIDE: usize = 4_096;

/// A checkpoint of random weights for this configuration, in `dtype`. `lock` gets the block, which stays where it is.
///
/// # Errors
///
/// That of `lock`, or there is no memory.
pub fn checkpoint(config: &Config, dtype: DType, lock: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Checkpoint> {
    let (mut block, checkpoint) = match dtype {
        DType::BF16 => of::<bf16>(config, Dtype::BF16)?,
        DType::F16 => of::<f16>(config, Dtype::F16)?,
        DType::F32 => of::<f32>(config, Dtype::F32)?,
        _ => bail!("{dtype} is not implemented"),
    };
    lock(&mut block)?;
    let shard = Shard { path: PathBuf::from("random weights"), bytes: block.make_read_only()? };
    Ok(Checkpoint { shards: vec![shard], ..checkpoint })
}

/// The block, and a checkpoint that names its parts.
fn of<T: Element>(config: &Config, dtype: Dtype) -> Result<(MmapMut, Checkpoint)> {
    let shapes = shapes(config);
    let len = |shape: &[usize]| shape.iter().product::<usize>();
    let is_norm = |shape: &[usize]| shape.len() == 1;
    let longest = |norms| shapes.iter().filter(|(_, shape)| is_norm(shape) == norms).map(|(_, shape)| len(shape)).max();
    // The ones come first.
    let ones = longest(true).unwrap_or(0).next_multiple_of(STRIDE);
    let elems = ones + longest(false).unwrap_or(0) + NUMBERS;
    let mut block = MmapMut::map_anon(elems * size_of::<T>()).context("memory for random weights")?;
    let values: &mut [T] = bytemuck::cast_slice_mut(&mut block);
    let (norms, matrices) = values.split_at_mut(ones);
    norms.fill(T::from_f32(1.0));
    let limit = DEVIATION * 3.0_f32.sqrt();
    let mut rng = StdRng::seed_from_u64(0);
    let numbers: Vec<T> = (0..NUMBERS).map(|_| T::from_f32(rng.random_range(-limit..limit))).collect();
    matrices.par_chunks_mut(NUMBERS).for_each(|chunk| chunk.copy_from_slice(&numbers[..chunk.len()]));

    let mut tensors = BTreeMap::new();
    for (index, (name, shape)) in shapes.into_iter().enumerate() {
        let first = if is_norm(&shape) { 0 } else { ones + index * STRIDE % NUMBERS };
        let bytes = first * size_of::<T>()..(first + len(&shape)) * size_of::<T>();
        tensors.insert(name, Tensor { shard: 0, dtype, shape, bytes });
    }
    Ok((block, Checkpoint { shards: Vec::new(), tensors, read_bytes: AtomicU64::new(0) }))
}

/// The names and shapes of all tensors.
fn shapes(config: &Config) -> Vec<(String, Vec<usize>)> {
    let Config { vocab, hidden, intermediate, heads, .. } = *config;
    let (query, projected, kv) = (heads.query_features(), heads.projected_features(), heads.kv_features());
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocab, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    if !config.tied {
        shapes.push(("lm_head.weight".to_owned(), vec![vocab, hidden]));
    }
    for layer in 0..config.layers {
        let mut add =
            |name: &str, shape: &[usize]| shapes.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
        add("input_layernorm.weight", &[hidden]);
        if let Some(heads) = config.delta_net_in(layer) {
            let (convolved, values) = (heads.convolved_features(), heads.value_features());
            add("linear_attn.in_proj_qkv.weight", &[convolved, hidden]);
            add("linear_attn.in_proj_z.weight", &[values, hidden]);
            add("linear_attn.in_proj_b.weight", &[heads.value, hidden]);
            add("linear_attn.in_proj_a.weight", &[heads.value, hidden]);
            add("linear_attn.conv1d.weight", &[convolved, 1, heads.taps]);
            add("linear_attn.A_log", &[heads.value]);
            add("linear_attn.dt_bias", &[heads.value]);
            add("linear_attn.norm.weight", &[heads.value_dim]);
            add("linear_attn.out_proj.weight", &[hidden, values]);
        } else {
            add("self_attn.q_proj.weight", &[projected, hidden]);
            add("self_attn.k_proj.weight", &[kv, hidden]);
            add("self_attn.v_proj.weight", &[kv, hidden]);
            add("self_attn.q_norm.weight", &[heads.dim]);
            add("self_attn.k_norm.weight", &[heads.dim]);
            add("self_attn.o_proj.weight", &[hidden, query]);
        }
        add("post_attention_layernorm.weight", &[hidden]);
        if let Some(moe) = config.experts_in(layer) {
            add("mlp.gate.weight", &[moe.experts, hidden]);
            add("mlp.experts.gate_up_proj", &[moe.experts, 2 * moe.intermediate, hidden]);
            add("mlp.experts.down_proj", &[moe.experts, hidden, moe.intermediate]);
        }
        let dense = match (config.experts_in(layer), &config.hybrid) {
            (None, _) => "mlp",
            (Some(_), Some(_)) => "mlp.shared_expert",
            (Some(_), None) => continue,
        };
        for (module, shape) in
            [("gate", [intermediate, hidden]), ("up", [intermediate, hidden]), ("down", [hidden, intermediate])]
        {
            add(&format!("{dense}.{module}_proj.weight"), &shape);
        }
        if config.hybrid.is_some() {
            add("mlp.shared_expert_gate.weight", &[1, hidden]);
        }
    }
    shapes
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use aril::model::TpRank;

    use super::*;
    use crate::{
        checkpoint::Weights,
        cpu::Cpu,
        device::{Device as _, Slots},
        forward::Step,
        group::Rank,
        model::{Model, describe, load},
    };

    /// Every fixture's configuration has random weights that the forward runs on, and that are all read.
    #[test]
    fn random_weights_run() {
        for name in ["qwen3", "qwen3-untied", "qwen3-moe", "qwen3-hybrid"] {
            let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
            let config = Config::read(&fixtures.join(name)).expect("the fixture is whole");
            let checkpoint = checkpoint(&config, DType::BF16, |_| Ok(())).expect("there is memory");
            checkpoint.check(&config).expect("the sizes are those of the configuration");
            let described = describe(&config, TpRank::SINGLE).expect("the model has no layer twice");
            let device = Cpu::<bf16>::default();
            let (table, _) = load(&device, &described.model, &[], 4, &Rank::default()).expect("the capacity is valid");
            let weights = Weights::new(&checkpoint, None);
            let model = Model::new(&device, &config, &described, weights, table, 4).expect("all tensors are there");
            let mut session = model.session(16, 16, 1).expect("there is memory");
            let mut step =
                Step { ids: vec![1, 2, 3], positions: vec![0, 1, 2], sequences: vec![0; 3], ..Step::default() };
            step.table = crate::device::BlockTable { first_rows: vec![0], columns: 1, block_rows: 16, states: vec![0] };
            step.slots = vec![aril::Slot::BASE; 3];
            step.scales = vec![1.0; 3];
            step.sampled = vec![2];
            let logits = device
                .read(&model.forward(Slots::Table(&model.adapters), &mut session, &step).expect("it runs"))
                .expect("it runs");
            assert_eq!(logits.len(), config.vocab);
            assert!(logits.iter().all(|logit| logit.is_finite()) && logits.iter().any(|logit| logit.abs() > 1e-3));
        }
    }
}
