//! The numbers that a workload is computed on, and the error of its results against the `f64` reference. Host and
//! device have the same numbers.

use std::{collections::BTreeMap, ops::Range};

use aril::{
    DType,
    adapter::{
        Adapter, Tensor,
        layout::{B, EmbeddingA, LinearA},
    },
    reference::{self, Factors},
};
use half::bf16;
use rayon::prelude::*;

use crate::{
    Result,
    noise::Noise,
    workload::{Operation, Workload},
};

/// The largest number of tokens that are checked.
const CHECKED_TOKENS: usize = 32;

/// The numbers in all matrices. Deltas and `y` have about the same magnitude.
pub struct Data {
    pub weights: Noise,
    /// x
    pub inputs: Noise,
    /// y before the operation
    pub bases: Noise,
}

/// A period of weights that no cache holds.
pub const LARGE: usize = 67_108_859;
/// A period of weights that is fast to generate.
pub const SMALL: usize = 1_048_573;

impl Data {
    /// The period of the weights is [`LARGE`] or [`SMALL`], both prime.
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
        let adapter = |(slot, slices): (usize, &[[usize; 2]])| {
            let mut tensors = Vec::new();
            for (slice, &[a, b]) in slices.iter().enumerate() {
                let [a_shape, b_shape] = workload.factor_shapes(slot, slice);
                let [a_layout, b_layout] = FactorLayout::of(workload, slot, slice);
                let [a, b] =
                    [(a, a_layout), (b, b_layout)].map(|(first, layout)| self.factor(set + first, layout).collect());
                let factors: [(&str, [usize; 2], Vec<bf16>); 2] = match workload.operation {
                    // PEFT stores A with one column per id.
                    Operation::Embedding => {
                        let [ids, rank] = a_shape;
                        [("lora_embedding_A", [rank, ids], transposed(a, rank)), ("lora_embedding_B", b_shape, b)]
                    }
                    Operation::Linear => [("lora_A.weight", a_shape, a), ("lora_B.weight", b_shape, b)],
                };
                for (name, shape, values) in factors {
                    let tensor = Tensor::new(DType::BF16, shape, bytemuck::cast_slice(&values).to_vec())?;
                    tensors.push((format!("slice{slice}.{name}"), tensor));
                }
            }
            let rank = workload.ranks[slot];
            let alpha = f64::from(workload.scaling()) * rank as f64;
            let config = format!(r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {alpha}}}"#);
            Ok(Adapter::from_tensors(&config, tensors)?)
        };
        SetLayout::new(workload).factors.chunks(workload.out_slices.len()).enumerate().map(adapter).collect()
    }

    /// The relative error of the deltas of some tokens, all slices, given their rows of y; `set` is where the factors
    /// begin.
    pub fn error(&self, workload: &Workload, set: usize, got: &BTreeMap<usize, Vec<bf16>>) -> f64 {
        let layout = SetLayout::new(workload);
        let mut tokens: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for &token in got.keys() {
            tokens.entry(usize::try_from(workload.slots[token]).unwrap_or(0)).or_default().push(token);
        }
        let (error, norm) = tokens
            .par_iter()
            .map(|(&slot, tokens)| self.squares(workload, &layout, set, slot, tokens, got))
            .reduce(|| (0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
        if got.is_empty() { 0.0 } else { (error / norm).sqrt() }
    }

    /// The sums of the squared errors of one slot's deltas, and of the squared deltas.
    fn squares(
        &self,
        workload: &Workload,
        layout: &SetLayout,
        set: usize,
        slot: usize,
        tokens: &[usize],
        got: &BTreeMap<usize, Vec<bf16>>,
    ) -> (f64, f64) {
        let &Workload { in_features, ref out_slices, .. } = workload;
        let (rank, scaling) = (workload.ranks[slot], f64::from(workload.scaling()));
        let (mut error, mut norm, mut first_out) = (0.0, 0.0, 0);
        for (slice, &out) in out_slices.iter().enumerate() {
            let [a, b] = layout.factors[slot * out_slices.len() + slice].map(|elem| set + elem);
            let [a_layout, b_layout] = FactorLayout::of(workload, slot, slice);
            let b: Vec<f64> = self.factor(b, b_layout).map(f64::from).collect();
            let all_of_a: Vec<f64> = match a_layout {
                // Only the rows of the tokens are read.
                FactorLayout::EmbeddingA(_) => Vec::new(),
                _ => self.factor(a, a_layout).map(f64::from).collect(),
            };
            for &token in tokens {
                let bases = self.bases.range(token * workload.out_features() + first_out, out);
                let deltas = match a_layout {
                    FactorLayout::EmbeddingA(layout) => {
                        let row = layout.at(workload.token_id(token), 0);
                        let a: Vec<f64> = self.weights.range(a + row, rank).map(f64::from).collect();
                        reference::embedding(0, 1, Factors { a: &a, b: &b, rank, scaling })
                    }
                    _ => {
                        let x: Vec<f64> = self.inputs.range(token * in_features, in_features).map(f64::from).collect();
                        reference::linear(&x, Factors { a: &all_of_a, b: &b, rank, scaling })
                    }
                };
                for ((got, base), delta) in got[&token][first_out..].iter().zip(bases).zip(deltas) {
                    error += (got.to_f64() - f64::from(base) - delta.value).powi(2);
                    norm += delta.value.powi(2);
                }
            }
            first_out += out;
        }
        (error, norm)
    }

    /// The elements of a factor that begins at `first`, row by row.
    pub fn factor(&self, first: usize, layout: FactorLayout) -> impl Iterator<Item = bf16> {
        let [rows, cols] = layout.shape();
        (0..rows).flat_map(move |row| (0..cols).map(move |col| self.weights.at(first + layout.at(row, col))))
    }
}

/// The memory layout of a factor.
#[derive(Clone, Copy, Debug)]
pub enum FactorLayout {
    LinearA(LinearA),
    EmbeddingA(EmbeddingA),
    B(B),
}

impl FactorLayout {
    /// The layouts of a slot's A and B.
    fn of(workload: &Workload, slot: usize, slice: usize) -> [Self; 2] {
        let [[rows, cols], [out_features, rank]] = workload.factor_shapes(slot, slice);
        let a = match workload.operation {
            Operation::Embedding => Self::EmbeddingA(EmbeddingA { vocab: rows, rank: cols }),
            Operation::Linear => Self::LinearA(LinearA { rank: rows, in_features: cols }),
        };
        [a, Self::B(B { out_features, rank })]
    }

    /// The layouts of a linear module's A and B.
    pub fn linear(rank: usize, in_features: usize, out_features: usize) -> [Self; 2] {
        [Self::LinearA(LinearA { rank, in_features }), Self::B(B { out_features, rank })]
    }

    fn shape(self) -> [usize; 2] {
        match self {
            Self::LinearA(LinearA { rank, in_features }) => [rank, in_features],
            Self::EmbeddingA(EmbeddingA { vocab, rank }) => [vocab, rank],
            Self::B(B { out_features, rank }) => [out_features, rank],
        }
    }

    pub fn elems(self) -> usize {
        match self {
            Self::LinearA(layout) => layout.elems(),
            Self::EmbeddingA(layout) => layout.elems(),
            Self::B(layout) => layout.elems(),
        }
    }

    fn at(self, row: usize, col: usize) -> usize {
        match self {
            Self::LinearA(layout) => layout.at(row, col),
            Self::EmbeddingA(layout) => layout.at(row, col),
            Self::B(layout) => layout.at(row, col),
        }
    }

    /// The ranges without an element, where kernels expect zeros.
    pub fn padding(self) -> Vec<Range<usize>> {
        let ([rows, cols], mut is_padding) = (self.shape(), vec![true; self.elems()]);
        for row in 0..rows {
            (0..cols).for_each(|col| is_padding[self.at(row, col)] = false);
        }
        let mut end = 0;
        let runs = is_padding.chunk_by(|a, b| a == b).map(|run| {
            end += run.len();
            (run[0], end - run.len()..end)
        });
        runs.filter(|(is_padding, _)| *is_padding).map(|(_, range)| range).collect()
    }
}

/// How a set of adapters lies in memory, in elements: each adapter's factors in one piece.
#[derive(Debug)]
pub struct SetLayout {
    /// By slot and slice: where A and B begin.
    pub factors: Vec<[usize; 2]>,
    pub elems: usize,
}

impl SetLayout {
    pub fn new(workload: &Workload) -> Self {
        let mut elems = 0;
        let mut place = |layout: FactorLayout| {
            let start = elems;
            elems += layout.elems();
            start
        };
        let slots = 0..workload.num_slots();
        let slices = slots.flat_map(|slot| (0..workload.out_slices.len()).map(move |slice| (slot, slice)));
        let factors = slices.map(|(slot, slice)| FactorLayout::of(workload, slot, slice).map(&mut place)).collect();
        Self { factors, elems }
    }
}

fn transposed(values: Vec<bf16>, cols: usize) -> Vec<bf16> {
    (0..cols).flat_map(|col| values[col..].iter().step_by(cols)).copied().collect()
}

/// Evenly spread tokens that have an adapter, the first and the last among them.
pub fn checked_tokens(slots: &[i32]) -> Vec<usize> {
    let adapted: Vec<usize> = (0..slots.len()).filter(|&token| slots[token] >= 0).collect();
    let count = adapted.len().min(CHECKED_TOKENS);
    (0..count).map(|i| adapted[if count > 1 { i * (adapted.len() - 1) / (count - 1) } else { 0 }]).collect()
}
