//! Models whose adapters add a number to every output where x is ones, which identifies the adapter of each token.

use aril::{
    adapter::Adapter,
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
};

use super::adapters::{self, Lora};

/// Linear layers with as many inputs as outputs. Every sum is exact, if that is a power of two.
pub fn model(layers: usize, features: usize) -> (Model, Vec<LinearId>) {
    let mut spec = ModelSpec::new();
    let layer = |i| Linear::new(format!("layers.{i}"), Parallel::Replicated, features).slice("m", features);
    let ids = (0..layers).map(|i| spec.linear(layer(i)).unwrap()).collect();
    (spec.shard(TpRank::SINGLE).unwrap(), ids)
}

/// The modules of an adapter that adds a number in each layer. `rank` is a power of two.
pub fn modules(layers: usize, features: usize, rank: usize, value: impl Fn(usize) -> f32) -> Vec<Lora> {
    let module = |layer: usize| Lora::adding(format!("layers.{layer}.m"), [features; 2], rank, value(layer));
    (0..layers).map(module).collect()
}

/// An adapter that adds `value` in each layer.
pub fn adapter(layers: usize, features: usize, rank: usize, value: f32) -> Adapter {
    adapters::adapter(&modules(layers, features, rank, |_| value))
}

/// What was added to each row.
///
/// # Panics
/// If the outputs of a row differ: it has a part of one adapter, and a part of another.
pub fn added(y: &[f32], features: usize) -> Vec<f32> {
    let value = |(number, row): (usize, &[f32])| {
        let other = row.iter().find(|&&value| value != row[0]);
        assert!(other.is_none(), "row {number} has {}, and {other:?}", row[0]);
        row[0]
    };
    y.chunks(features).enumerate().map(value).collect()
}
