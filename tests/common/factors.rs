//! The factors of modules in cases, and adapters with these factors.

use std::{collections::BTreeMap, fmt::Write as _};

use aril::{
    DType, Element,
    adapter::{Adapter, Tensor},
    model::{Linear, Parallel},
    reference::{self, Delta},
};
use rand::{RngExt, rngs::StdRng};

use super::values::Values;

/// The factors of a module, whole, as an adapter stores them.
#[derive(Clone, Debug)]
pub struct Pair {
    pub rank: usize,
    pub scaling: f64,
    /// `[rank, in]`
    pub a: Vec<f64>,
    /// `[out, rank]`
    pub b: Vec<f64>,
}

/// A scaling. In exact cases it is a power of two, so that they stay exact.
pub fn scaling(values: Values, rng: &mut StdRng) -> f64 {
    match values {
        Values::Exact => [0.5, 1.0, 2.0][rng.random_range(0..3)],
        Values::Rounded => [0.7, 1.0, 1.9][rng.random_range(0..3)],
    }
}

/// `len` values; a share of `density` is not zero.
pub fn fill(values: Values, len: usize, density: f64, rng: &mut StdRng) -> Vec<f64> {
    (0..len).map(|_| if rng.random_bool(density) { f64::from(values.value(rng)) } else { 0.0 }).collect()
}

impl Pair {
    /// The factors as a table of `T` holds them.
    fn stored<T: Element>(values: &[f64]) -> Vec<f64> {
        values.iter().map(|&value| f64::from(T::from_f32(value as f32).to_f32())).collect()
    }

    /// `scale · scaling · B (A x)` with the factors in a table of `T`.
    pub fn linear<T: Element>(&self, x: &[f64], scale: f64) -> Vec<Delta> {
        let [a, b] = [&self.a, &self.b].map(|values| Self::stored::<T>(values));
        reference::linear(x, reference::Factors { a: &a, b: &b, rank: self.rank, scaling: self.scaling * scale })
    }

    /// `scale · scaling · B A[:, id]` with the factors in a table of `T`.
    pub fn embedding<T: Element>(&self, id: usize, vocab: usize, scale: f64) -> Vec<Delta> {
        let [a, b] = [&self.a, &self.b].map(|values| Self::stored::<T>(values));
        let factors = reference::Factors { a: &a, b: &b, rank: self.rank, scaling: self.scaling * scale };
        reference::embedding(id, vocab, factors)
    }
}

/// Layers before and after a case's layer, so that a wrong entry shows.
pub fn neighbour(path: &str) -> Linear {
    Linear::new(path, Parallel::Replicated, 3).slice("m0", 5)
}

/// An adapter under construction: its tensors, and each module's α.
#[derive(Default)]
pub struct Modules {
    tensors: Vec<(String, Tensor)>,
    alphas: String,
    /// Of trained rows, by module.
    ids: BTreeMap<String, Vec<u32>>,
}

impl Modules {
    /// The names of a linear module's factors, and of an embedding's.
    pub const LINEAR: [&str; 2] = ["lora_A.weight", "lora_B.weight"];
    pub const EMBEDDING: [&str; 2] = ["lora_embedding_A", "lora_embedding_B"];

    pub fn put(&mut self, path: &str, alpha: f64, names: [&str; 2], a: (&[usize], &[f64]), b: (&[usize], &[f64])) {
        for (name, (shape, values)) in names.into_iter().zip([a, b]) {
            self.push(format!("{path}.{name}"), shape, values);
        }
        write!(self.alphas, r#"{}"{path}": {alpha}"#, if self.alphas.is_empty() { "" } else { ", " }).unwrap();
    }

    /// Trained rows with these ids.
    pub fn put_rows(&mut self, path: &str, ids: &[f64], shape: &[usize], rows: &[f64]) {
        self.push(format!("{path}.token_adapter.trainable_tokens_delta"), shape, rows);
        self.ids.insert(path.to_owned(), ids.iter().map(|&id| id as u32).collect());
    }

    fn push(&mut self, key: String, shape: &[usize], values: &[f64]) {
        let values: Vec<f32> = values.iter().map(|&value| value as f32).collect();
        let tensor = Tensor::new(DType::F32, shape, bytemuck::cast_slice(&values).to_vec()).unwrap();
        self.tensors.push((key, tensor));
    }

    /// The adapter. It always adapts the neighbours too, with weights that would show.
    pub fn adapter(mut self) -> Adapter {
        for path in ["before.m0", "behind.m0"] {
            self.put(path, 1.0, Self::LINEAR, (&[1, 3], &[1e4; 3]), (&[5, 1], &[1e4; 5]));
        }
        let (alphas, ids) = (self.alphas, serde_json::to_string(&self.ids).unwrap());
        let config = format!(
            r#"{{"peft_type": "LORA", "lora_alpha": 1, "alpha_pattern": {{{alphas}}}, "trainable_token_indices": {ids}}}"#
        );
        Adapter::from_tensors(&config, self.tensors).unwrap()
    }
}
