//! Small integers, whose sums are exact in `f32`, and the reference's deltas of whole layers.

use aril::{
    DType,
    adapter::{Adapter, ModuleKind, SlotImage},
    cpu::WeightTable,
    model::{Model, ModelSpec, TpRank},
    plan::Capacity,
    reference::{self, Factors},
};

use crate::common::adapters::Lora;

pub(crate) const TOKENS: usize = 3;
pub(crate) const RANK: usize = 3;
/// The first and the last token have the adapter.
pub(crate) const SLOTS: [i32; TOKENS] = [0, -1, 0];

/// Integers from -2 to 2 that look random.
pub(crate) fn integers(seed: usize, len: usize) -> Vec<f32> {
    let mixed = |i: usize| (i + seed * 7919).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (0..len).map(|i| [-2.0, -1.0, 0.0, 1.0, 2.0][mixed(i + 1) % 5]).collect()
}

/// A module with factors of integers, scaled by 2.
pub(crate) fn module(kind: ModuleKind, path: &str, inputs: usize, outputs: usize) -> Lora {
    module_of_rank(RANK, kind, path, inputs, outputs)
}

pub(crate) fn module_of_rank(rank: usize, kind: ModuleKind, path: &str, inputs: usize, outputs: usize) -> Lora {
    let mut values = integers(path.len() + outputs + rank, rank * (inputs + outputs)).into_iter();
    let zeros = match kind {
        ModuleKind::Linear => Lora::linear(path, inputs, outputs, rank),
        ModuleKind::Embedding => Lora::embedding(path, inputs, outputs, rank),
    };
    zeros.alpha(2.0 * rank as f64).fill(|| values.next().unwrap())
}

/// The unsharded delta of one token, by the reference.
pub(crate) fn delta(lora: &Lora, x: &[f32]) -> Vec<f32> {
    let wide = |values: &[f32]| values.iter().map(|&value| f64::from(value)).collect::<Vec<_>>();
    let (a, b, x) = (wide(&lora.a), wide(&lora.b), wide(x));
    let factors = Factors { a: &a, b: &b, rank: lora.rank, scaling: 2.0 };
    reference::linear(&x, factors).iter().map(|delta| delta.value as f32).collect()
}

/// The model and a table with the adapter in slot 0, for each rank.
pub(crate) fn group(spec: &ModelSpec, size: usize, adapter: &Adapter) -> Vec<WeightTable> {
    let models = (0..size).map(|rank| spec.shard(TpRank::new(rank, size).unwrap()).unwrap());
    models.map(|model| table(&model, std::slice::from_ref(adapter))).collect()
}

/// A table with the adapters in its first slots, for no higher ranks than theirs, or than 1 where they have no factors.
pub(crate) fn table(model: &Model, adapters: &[Adapter]) -> WeightTable {
    let images: Vec<_> = adapters.iter().map(|adapter| adapter.plan(model, DType::F32).unwrap()).collect();
    let max_rank = images.iter().map(SlotImage::max_rank).max().unwrap().max(1);
    let capacity = Capacity::tokens(TOKENS).slots(images.len()).rank(max_rank);
    let weights = WeightTable::new(model, DType::F32, capacity, WeightTable::arena_bytes(&images)).unwrap();
    for (slot, image) in images.iter().enumerate() {
        weights.load(slot, image).unwrap();
    }
    weights
}
