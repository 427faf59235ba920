//! What a workload is computed on, and what must come out; the same on the host and on the device.

use std::collections::BTreeMap;

use aril::{
    DType, Slot,
    adapter::{
        Adapter, Tensor,
        layout::{B, LinearA},
    },
    reference::{self, Factors},
};
use half::bf16;
use rayon::prelude::*;

use super::{Result, noise::Noise, workload::Workload};

/// Tokens with an adapter whose outputs are checked, at most.
const CHECKED_TOKENS: usize = 32;

/// The numbers in all matrices. Deltas are about as large as what they are added to.
pub struct Data {
    pub weights: Noise,
    /// x
    pub inputs: Noise,
    /// y before the operation
    pub bases: Noise,
}

/// Weights before they repeat: more than any cache holds.
pub const LARGE: usize = 67_108_859;
/// Few enough to be made in no time.
pub const SMALL: usize = 1_048_573;

impl Data {
    /// With so many weights before they repeat: [`LARGE`] or [`SMALL`], both prime.
    pub fn new(weights: usize) -> Self {
        let other = weights.min(8_388_593);
        Self {
            weights: Noise::new(1, weights, 0.02),
            inputs: Noise::new(2, other, 1.0),
            bases: Noise::new(3, other, 0.1),
        }
    }

    /// The adapters of the set that begins at `set`, by slot.
    pub fn adapters(&self, workload: &Workload, set: usize) -> Result<Vec<Adapter>> {
        let &Workload { in_features, rank, ref out_slices, .. } = workload;
        let config = format!(r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}}}"#);
        let adapter = |slices: &[[usize; 2]]| {
            let mut tensors = Vec::new();
            for (slice, (&[a, b], &out)) in slices.iter().zip(out_slices).enumerate() {
                let a: Vec<bf16> = self.a(set + a, rank, in_features).collect();
                let b: Vec<bf16> = self.b(set + b, out, rank).collect();
                for (side, shape, values) in [("A", [rank, in_features], a), ("B", [out, rank], b)] {
                    let tensor = Tensor::new(DType::BF16, shape, bytemuck::cast_slice(&values).to_vec())?;
                    tensors.push((format!("slice{slice}.lora_{side}.weight"), tensor));
                }
            }
            Ok(Adapter::from_tensors(&config, tensors)?)
        };
        SetLayout::new(workload).factors.chunks(out_slices.len()).map(adapter).collect()
    }

    /// The relative error of the deltas of some tokens, all slices, given their rows of y; `set` is where the factors begin.
    pub fn error(&self, workload: &Workload, set: usize, got: &BTreeMap<usize, Vec<bf16>>) -> f64 {
        let layout = SetLayout::new(workload);
        let mut tokens: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for &token in got.keys() {
            tokens.entry(workload.slots[token].index().unwrap_or(0)).or_default().push(token);
        }
        let (error, norm) = tokens
            .par_iter()
            .map(|(&slot, tokens)| self.squares(workload, &layout, set, slot, tokens, got))
            .reduce(|| (0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
        if got.is_empty() { 0.0 } else { (error / norm).sqrt() }
    }

    /// The squares of the errors of one slot's deltas, and of the deltas.
    fn squares(
        &self,
        workload: &Workload,
        layout: &SetLayout,
        set: usize,
        slot: usize,
        tokens: &[usize],
        got: &BTreeMap<usize, Vec<bf16>>,
    ) -> (f64, f64) {
        let &Workload { in_features, rank, ref out_slices, .. } = workload;
        let (mut error, mut norm, mut first_out) = (0.0, 0.0, 0);
        for (slice, &out) in out_slices.iter().enumerate() {
            let [a, b] = layout.factors[slot * out_slices.len() + slice].map(|elem| set + elem);
            let a: Vec<f64> = self.a(a, rank, in_features).map(f64::from).collect();
            let b: Vec<f64> = self.b(b, out, rank).map(f64::from).collect();
            let factors = Factors { a: &a, b: &b, rank, scaling: 1.0 };
            for token in tokens {
                let x: Vec<f64> = self.inputs.range(token * in_features, in_features).map(f64::from).collect();
                let bases = self.bases.range(token * workload.out_features() + first_out, out);
                let deltas = reference::linear(&x, factors);
                for ((got, base), delta) in got[token][first_out..].iter().zip(bases).zip(deltas) {
                    error += (got.to_f64() - f64::from(base) - delta.value).powi(2);
                    norm += delta.value.powi(2);
                }
            }
            first_out += out;
        }
        (error, norm)
    }

    /// The A `[rank, in_features]` that begins at `first`.
    fn a(&self, first: usize, rank: usize, in_features: usize) -> impl Iterator<Item = bf16> {
        let layout = LinearA { rank, in_features };
        let row = move |row| (0..in_features).map(move |col| self.weights.at(first + layout.at(row, col)));
        (0..rank).flat_map(row)
    }

    /// The B `[out_features, rank]` that begins at `first`.
    pub fn b(&self, first: usize, out_features: usize, rank: usize) -> impl Iterator<Item = bf16> {
        let layout = B { out_features, rank };
        (0..out_features).flat_map(move |row| (0..rank).map(move |col| self.weights.at(first + layout.at(row, col))))
    }
}

/// How a set of adapters lies in memory, in elements: each adapter's factors in one piece, laid out as in a block.
#[derive(Debug)]
pub struct SetLayout {
    /// By slot and slice: where A and B begin.
    pub factors: Vec<[usize; 2]>,
    pub elems: usize,
}

impl SetLayout {
    pub fn new(workload: &Workload) -> Self {
        let &Workload { in_features, rank, ref out_slices, num_slots, .. } = workload;
        let a_elems = LinearA { rank, in_features }.elems();
        let mut elems = 0;
        let slices = (0..num_slots).flat_map(|_| out_slices);
        let place = |&out_features: &usize| {
            let a = elems;
            elems += a_elems + B { out_features, rank }.elems();
            [a, a + a_elems]
        };
        let factors = slices.map(place).collect();
        Self { factors, elems }
    }
}

/// Evenly spread tokens that have an adapter, the first and the last among them.
pub fn checked_tokens(slots: &[Slot]) -> Vec<usize> {
    let adapted: Vec<usize> = (0..slots.len()).filter(|&token| slots[token].index().is_some()).collect();
    let count = adapted.len().min(CHECKED_TOKENS);
    (0..count).map(|i| adapted[if count > 1 { i * (adapted.len() - 1) / (count - 1) } else { 0 }]).collect()
}
