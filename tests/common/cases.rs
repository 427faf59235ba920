//! Problems for the operations, the answers that the reference gives, and how answers are compared.
//!
//! A [`Case`] is a few numbers from which everything else follows, so that a failing one can be printed and run again with
//! `ARIL_CASE='…'`. Two kinds of numbers: exact ones, small integers whose sums have no rounding error before the store, so that
//! answers must agree bit for bit; and rounded ones, normals, whose answers must agree within a bound derived from the formats.

use std::fmt::Write as _;

use aril::{
    DType, Element, Slot,
    adapter::{Adapter, Tensor},
    model::{EmbeddingId, Linear, LinearId, MAX_SLICES, Model, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    reference,
    routing::Batch,
};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize};

/// A problem.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Case {
    pub op: Op,
    pub dtype: Dtype,
    pub values: Values,
    /// One list of ranks per adapter, one rank per slice; 0 where the adapter has no such module.
    pub adapters: Vec<Vec<usize>>,
    /// Slots beyond those that are loaded.
    pub empty_slots: usize,
    /// By token: a slot, -1, or anything else that is no slot.
    pub slots: Vec<i32>,
    /// By token, in halves; none for no scales.
    pub half_scales: Option<Vec<i8>>,
    /// Elements before the first row, and from the end of a row to the next.
    pub x_offset: usize,
    pub x_gap: usize,
    pub y_offset: usize,
    pub y_gap: usize,
    pub seed: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Op {
    Linear { in_features: usize, slices: Vec<usize> },
    Embedding { vocab: usize, hidden: usize },
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Dtype {
    BF16,
    F16,
    F32,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Values {
    Exact,
    Rounded,
}

/// Calls a function that is generic over the element type, for the case's.
#[macro_export]
macro_rules! for_dtype {
    ($case:expr, $function:ident($($argument:expr),*)) => {
        match $case.dtype {
            $crate::common::cases::Dtype::BF16 => $function::<half::bf16>($($argument),*),
            $crate::common::cases::Dtype::F16 => $function::<half::f16>($($argument),*),
            $crate::common::cases::Dtype::F32 => $function::<f32>($($argument),*),
        }
    };
}

/// What a case stands for.
pub struct World<T> {
    pub model: Model,
    pub site: Site,
    pub adapters: Vec<Adapter>,
    pub slots: Vec<Slot>,
    pub scales: Option<Vec<f32>>,
    pub num_slots: usize,
    pub max_rank: usize,
    /// The whole buffers, NaN wherever there is no element of the matrix.
    pub x: Vec<T>,
    pub y: Vec<T>,
    pub token_ids: Vec<i32>,
}

#[derive(Clone, Copy, Debug)]
pub enum Site {
    Linear(LinearId),
    Embedding(EmbeddingId),
}

/// Compares what overwrites NaN with what adds to zeros, bit by bit. Embeddings have no such operation.
pub fn check_overwriting<T: Element>(
    adds: &mut impl Subject,
    overwrites: &mut impl Subject,
    case: &Case,
) -> Result<(), TestCaseError> {
    if matches!(case.op, Op::Embedding { .. }) {
        return Ok(());
    }
    let on = |value: f32| {
        let mut world = case.world::<T>();
        for token in 0..case.num_tokens() {
            let row = &mut world.y[case.y_offset + token * case.y_stride()..];
            row[..case.slices().iter().sum()].fill(T::from_f32(value));
        }
        world
    };
    let [added, written] = [adds.run(case, &on(0.0)), overwrites.run(case, &on(f32::NAN))];
    prop_assert!(
        bytemuck::cast_slice::<T, u8>(&added) == bytemuck::cast_slice::<T, u8>(&written),
        "overwriting differs\n{}",
        case.replay()
    );
    Ok(())
}

/// What the whole buffer `y` must hold, element by element.
#[derive(Clone, Copy, Debug)]
pub enum Expected<T> {
    /// These bits, or zero of the other sign: a sum of exact products is of either, depending on the order.
    Exactly(T),
    /// These bits, which are not to be written.
    Untouched(T),
    /// This value, give or take.
    Within(f64, f64),
}

impl Case {
    /// Layers that take many features, as `down` and `o` of large models do, and one past what a block, a group and a span of the
    /// kernels' sums have; few tokens and many, in exact bf16 and f16.
    pub fn of_many_features(tokens: &[usize]) -> Vec<Self> {
        let mut cases = Vec::new();
        for (in_features, dtype) in
            [(6144, Dtype::BF16), (8193, Dtype::F16), (9000, Dtype::BF16), (12_288, Dtype::F16), (14_336, Dtype::BF16)]
        {
            for &tokens in tokens {
                let slots = (0..tokens as i32).map(|token| token % 4 - 1).collect();
                let case = Self::linear(in_features, &[40, 72], &[&[16, 3], &[1, 64], &[33, 0]], slots);
                cases.push(Self { dtype, x_gap: in_features % 8, ..case });
            }
        }
        cases
    }

    /// Layers of five to eight fused modules, each of a rank of its own or absent, in every type.
    pub fn of_many_slices(tokens: &[usize]) -> Vec<Self> {
        let widths = [24, 7, 130, 1, 64, 300, 9, 256];
        let ranks = [[3, 16, 1, 8, 64, 2, 5, 17], [0, 1, 40, 0, 9, 33, 100, 1], [8; 8], [0, 0, 0, 0, 0, 0, 0, 12]];
        let mut cases = Vec::new();
        for slices in 5..=MAX_SLICES {
            for (dtype, &tokens) in [Dtype::BF16, Dtype::F16, Dtype::F32].into_iter().cycle().skip(slices).zip(tokens) {
                let slots = (0..tokens as i32).map(|token| (token * 3 + token / 7) % 5 - 1).collect();
                let adapters = ranks.each_ref().map(|ranks| &ranks[..slices]);
                cases.push(Self { dtype, y_gap: slices % 2, ..Self::linear(700, &widths[..slices], &adapters, slots) });
            }
        }
        cases
    }

    /// Of a linear layer, in exact bf16, rows one behind the other.
    pub fn linear(in_features: usize, slices: &[usize], adapters: &[&[usize]], slots: Vec<i32>) -> Self {
        Self {
            op: Op::Linear { in_features, slices: slices.to_vec() },
            dtype: Dtype::BF16,
            values: Values::Exact,
            adapters: adapters.iter().map(|ranks| ranks.to_vec()).collect(),
            empty_slots: 1,
            slots,
            half_scales: None,
            x_offset: 0,
            x_gap: 0,
            y_offset: 0,
            y_gap: 0,
            seed: 7,
        }
    }

    pub fn x_stride(&self) -> usize {
        self.in_features() + self.x_gap
    }

    pub fn y_stride(&self) -> usize {
        self.slices().iter().sum::<usize>() + self.y_gap
    }

    pub fn x_place(&self) -> Place {
        let (offset, rows, cols, stride) = (self.x_offset, self.num_tokens(), self.in_features(), self.x_stride());
        Place { offset, rows, cols, stride }
    }

    pub fn y_place(&self) -> Place {
        let (offset, rows, stride) = (self.y_offset, self.num_tokens(), self.y_stride());
        Place { offset, rows, cols: self.slices().iter().sum(), stride }
    }

    pub fn in_features(&self) -> usize {
        match &self.op {
            Op::Linear { in_features, .. } => *in_features,
            Op::Embedding { vocab, .. } => *vocab,
        }
    }

    pub fn slices(&self) -> Vec<usize> {
        match &self.op {
            Op::Linear { slices, .. } => slices.clone(),
            Op::Embedding { hidden, .. } => vec![*hidden],
        }
    }

    pub fn num_tokens(&self) -> usize {
        self.slots.len()
    }

    /// The case that `ARIL_CASE` asks for instead of random ones.
    pub fn from_environment() -> Option<Self> {
        let text = std::env::var("ARIL_CASE").ok()?;
        Some(serde_json::from_str(&text).expect("ARIL_CASE is a printed case"))
    }

    /// How to run it again.
    pub fn replay(&self) -> String {
        format!("ARIL_CASE='{}'", serde_json::to_string(self).expect("a case is plain data"))
    }

    pub fn world<T: Element>(&self) -> World<T> {
        let mut rng = StdRng::seed_from_u64(self.seed);
        let mut spec = ModelSpec::new();
        let site = match &self.op {
            Op::Linear { in_features, slices } => {
                let layer = Linear::new("layer", Parallel::Replicated, *in_features);
                let layer = slices.iter().enumerate().fold(layer, |layer, (i, out)| layer.slice(format!("m{i}"), *out));
                Site::Linear(spec.linear(layer).unwrap())
            }
            Op::Embedding { vocab, hidden } => Site::Embedding(spec.embedding("layer.m0", *vocab, *hidden).unwrap()),
        };
        // A second layer, so that entries have somewhere to go wrong.
        spec.linear(Linear::new("other", Parallel::Replicated, 3).slice("m0", 5)).unwrap();

        let adapters = self.adapters.iter().map(|ranks| self.adapter(ranks, &mut rng)).collect();
        let tokens = self.num_tokens();
        let x = self.x_place().buffer(self.values, &mut rng);
        let y = self.y_place().buffer(self.values, &mut rng);
        let vocab = self.in_features() as i32;
        let token_ids = (0..tokens).map(|_| rng.random_range(-1..=vocab)).collect();
        World {
            model: spec.shard(TpRank::SINGLE).unwrap(),
            site,
            adapters,
            slots: self.slots.iter().map(|&slot| bytemuck::cast(slot)).collect(),
            scales: self.half_scales.as_ref().map(|halves| halves.iter().map(|&half| f32::from(half) / 2.0).collect()),
            num_slots: self.adapters.len() + self.empty_slots,
            max_rank: self.adapters.iter().flatten().copied().max().unwrap_or(0).max(1),
            x,
            y,
            token_ids,
        }
    }

    /// The adapter with those ranks: α is such that exact cases scale by a power of two.
    fn adapter(&self, ranks: &[usize], rng: &mut StdRng) -> Adapter {
        let mut tensors = Vec::new();
        let mut alphas = String::new();
        let suffixes = match self.op {
            Op::Linear { .. } => ["lora_A.weight", "lora_B.weight"],
            Op::Embedding { .. } => ["lora_embedding_A", "lora_embedding_B"],
        };
        for (slice, (&rank, out)) in ranks.iter().zip(self.slices()).enumerate().filter(|(_, (rank, _))| **rank > 0) {
            for (suffix, shape) in suffixes.into_iter().zip([[rank, self.in_features()], [out, rank]]) {
                let values: Vec<f32> = (0..shape[0] * shape[1]).map(|_| self.values.value(rng)).collect();
                let tensor = Tensor::new(DType::F32, shape.to_vec(), bytemuck::cast_slice(&values).to_vec()).unwrap();
                tensors.push((format!("layer.m{slice}.{suffix}"), tensor));
            }
            let alpha = rank as f64 * [0.5, 1.0, 2.0][rng.random_range(0..3)];
            write!(alphas, r#"{}"layer.m{slice}": {alpha}"#, if alphas.is_empty() { "" } else { ", " }).unwrap();
        }
        // The other layer is always adapted, with weights that would show.
        for (suffix, shape) in [("lora_A.weight", [1, 3]), ("lora_B.weight", [5, 1])] {
            let values = vec![1e4_f32; shape[0] * shape[1]];
            let tensor = Tensor::new(DType::F32, shape.to_vec(), bytemuck::cast_slice(&values).to_vec()).unwrap();
            tensors.push((format!("other.m0.{suffix}"), tensor));
        }
        let config = format!(r#"{{"peft_type": "LORA", "lora_alpha": 1, "alpha_pattern": {{{alphas}}}}}"#);
        Adapter::from_tensors(&config, tensors).unwrap()
    }
}

impl Values {
    pub fn value(self, rng: &mut StdRng) -> f32 {
        match self {
            // Zeros are of both signs.
            Self::Exact => f32::from(rng.random_range(-2..=2_i8)).copysign(if rng.random() { 1.0 } else { -1.0 }),
            // The sum of four uniforms is normal enough.
            Self::Rounded => (0..4).map(|_| rng.random_range(-0.25..0.25_f32)).sum(),
        }
    }
}

/// Where a matrix is in its buffer.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub offset: usize,
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl Place {
    /// Of values, and NaN before, between and behind them.
    pub fn buffer<T: Element>(&self, values: Values, rng: &mut StdRng) -> Vec<T> {
        const GUARD: usize = 64;
        let mut buffer = vec![T::from_f32(f32::NAN); self.offset + self.rows * self.stride + GUARD];
        for row in buffer[self.offset..].chunks_mut(self.stride.max(1)).take(self.rows) {
            row[..self.cols].fill_with(|| T::from_f32(values.value(rng)));
        }
        buffer
    }

    /// Where an element is.
    pub fn at(&self, row: usize, col: usize) -> usize {
        self.offset + row * self.stride + col
    }

    pub fn row<T: Element>(&self, buffer: &[T], row: usize) -> Vec<f64> {
        buffer[self.at(row, 0)..][..self.cols].iter().map(|value| f64::from(value.to_f32())).collect()
    }
}

impl<T: Element> World<T> {
    pub fn batch(&self) -> Batch<'_> {
        match &self.scales {
            Some(scales) => Batch::new(&self.slots).with_scales(scales).unwrap(),
            None => Batch::new(&self.slots),
        }
    }

    /// The tightest bounds on a batch of so many tokens; of no tokens or slots, those of one.
    pub fn capacity(&self, max_tokens: usize) -> Capacity {
        Capacity::tokens(max_tokens.max(1)).slots(self.num_slots.max(1)).rank(self.max_rank)
    }

    /// What the reference makes of the buffer `y`.
    pub fn expected(&self, case: &Case) -> Vec<Expected<T>> {
        let mut expected: Vec<_> = self.y.iter().map(|&y| Expected::Untouched(y)).collect();
        for (token, slot) in self.slots.iter().enumerate() {
            let Some(adapter) = slot.index().and_then(|slot| self.adapters.get(slot)) else { continue };
            let mut out_start = case.y_offset + token * case.y_stride();
            for (slice, out_features) in case.slices().into_iter().enumerate() {
                if let Some(deltas) = self.deltas(case, adapter, token, slice) {
                    for (out, delta) in deltas.into_iter().enumerate() {
                        let y = f64::from(self.y[out_start + out].to_f32());
                        // Each of the at most K + r products and sums, and a few scalings, rounds once.
                        let roundings = case.in_features() + self.max_rank + 8;
                        expected[out_start + out] = expect_sum(case.values, y, delta, roundings);
                    }
                }
                out_start += out_features;
            }
        }
        expected
    }

    fn deltas(&self, case: &Case, adapter: &Adapter, token: usize, slice: usize) -> Option<Vec<reference::Delta>> {
        let path = format!("layer.m{slice}");
        let module = adapter.modules().iter().find(|module| module.path() == path)?;
        let stored = |values: Vec<f32>| -> Vec<f64> {
            values.into_iter().map(|value| f64::from(T::from_f32(value).to_f32())).collect()
        };
        let (a, b) = (stored(module.a_f32()), stored(module.b_f32()));
        let scale = self.scales.as_ref().map_or(1.0, |scales| f64::from(scales[token]));
        let scaling = f64::from(module.scaling()) * scale;
        let factors = reference::Factors { a: &a, b: &b, rank: module.rank(), scaling };
        match case.op {
            Op::Linear { in_features, .. } => {
                let x = &self.x[case.x_offset + token * case.x_stride()..][..in_features];
                let x: Vec<f64> = x.iter().map(|x| f64::from(x.to_f32())).collect();
                Some(reference::linear(&x, factors))
            }
            Op::Embedding { vocab, .. } => {
                let id = usize::try_from(self.token_ids[token]).ok().filter(|&id| id < vocab)?;
                Some(reference::embedding(id, vocab, factors))
            }
        }
    }
}

/// What `y + delta` must be, after the roundings that whatever computes it may do in f32 and the one of the store.
pub fn expect_sum<T: Element>(values: Values, y: f64, delta: reference::Delta, roundings: usize) -> Expected<T> {
    let sum = y + delta.value;
    if values == Values::Exact {
        // Exact in f32, so that the only rounding is that of the store.
        assert!(delta.magnitude < f64::from(1 << 24) && f64::from(sum as f32) == sum, "the case is not exact");
        return Expected::Exactly(T::from_f32(sum as f32));
    }
    expect_within(sum, error_of_sum::<T>(reference::Delta { magnitude: y.abs() + delta.magnitude, ..delta }, roundings))
}

/// How far from it a sum in f32 may be. Of `A x`, kernels of the 16-bit types take two bf16 terms, each of which rounds once.
pub fn error_of_sum<T: Element>(sum: reference::Delta, roundings: usize) -> f64 {
    let terms = if T::DTYPE == DType::F32 { 0.0 } else { DType::BF16.unit_roundoff().powi(2) };
    (roundings as f64 * DType::F32.unit_roundoff() + terms) * sum.magnitude
}

/// What a value that is off by up to `error` must be, when it is rounded to T: to nearest, perhaps among T's smallest numbers.
pub fn expect_within<T: Element>(value: f64, error: f64) -> Expected<T> {
    let store = T::DTYPE.unit_roundoff() * (value.abs() + error);
    let smallest = if T::DTYPE == DType::F16 { 2.0_f64.powi(-25) } else { 2.0_f64.powi(-134) };
    Expected::Within(value, error + store + smallest)
}

/// Checks a whole buffer, whose matrix is at a place, against what it must hold.
pub fn compare<T: Element>(
    place: Place,
    got: &[T],
    expected: &[Expected<T>],
    replay: &str,
) -> Result<(), TestCaseError> {
    prop_assert_eq!(got.len(), expected.len());
    let bits = |value: &T| bytemuck::bytes_of(value).to_vec();
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        let good = match expected {
            Expected::Exactly(expected) => {
                bits(got) == bits(expected) || [got, expected].map(|v| v.to_f32()) == [0.0; 2]
            }
            Expected::Untouched(expected) => bits(got) == bits(expected),
            Expected::Within(value, bound) => {
                // What is next to the largest number may become infinite.
                let end = T::from_f32((value + bound.copysign(*value)) as f32);
                (f64::from(got.to_f32()) - value).abs() <= *bound || end.to_f32().is_infinite() && *got == end
            }
        };
        if !good {
            let (at, stride) = (index as isize - place.offset as isize, place.stride as isize);
            let (row, col) = (at.div_euclid(stride), at.rem_euclid(stride));
            let got = got.to_f32();
            let expected = match expected {
                Expected::Exactly(value) => format!("exactly {}", value.to_f32()),
                Expected::Untouched(value) => format!("{} as it was", value.to_f32()),
                Expected::Within(value, bound) => format!("{value} ± {bound}"),
            };
            return Err(TestCaseError::fail(format!("y[{row}, {col}] is {got}, not {expected}\n{replay}")));
        }
    }
    Ok(())
}

/// How large the cases are.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub max_features: usize,
    pub max_tokens: usize,
    pub max_rank: usize,
}

impl Sizes {
    /// Small enough for a debug build on the CPU.
    pub const SMALL: Self = Self { max_features: 300, max_tokens: 40, max_rank: 40 };
    /// Past every tile of the kernels for few tokens.
    pub const LARGE: Self = Self { max_features: 1500, max_tokens: 300, max_rank: 512 };
}

/// Any case.
pub fn cases(sizes: Sizes) -> impl Strategy<Value = Case> {
    let dtype = prop_oneof![Just(Dtype::BF16), Just(Dtype::F16), Just(Dtype::F32)];
    let values = prop_oneof![Just(Values::Exact), Just(Values::Rounded)];
    let features =
        || prop_oneof![1..=sizes.max_features, 1..=20_usize, (1..=sizes.max_features / 8).prop_map(|n| n * 8)];
    let slices = prop_oneof![
        3 => prop::collection::vec(features(), 1..=3),
        1 => prop::collection::vec(1..=(sizes.max_features / 4), 4..=MAX_SLICES),
    ];
    let op = prop_oneof![
        4 => (features(), slices)
            .prop_map(|(in_features, slices)| Op::Linear { in_features, slices }),
        1 => (features(), features()).prop_map(|(vocab, hidden)| Op::Embedding { vocab, hidden }),
    ];
    (op, dtype, values, 0..=5_usize, 0..=2_usize, any::<u64>()).prop_flat_map(
        move |(op, dtype, values, num_adapters, empty_slots, seed)| {
            let num_slices = if let Op::Linear { slices, .. } = &op { slices.len() } else { 1 };
            let rank = prop_oneof![1 => Just(0), 4 => 1..=17_usize, 3 => 1..=sizes.max_rank];
            let adapters = prop::collection::vec(prop::collection::vec(rank, num_slices), num_adapters);
            let num_slots = (num_adapters + empty_slots) as i32;
            let stray = prop_oneof![Just(i32::MIN), Just(i32::MAX), Just(num_slots), Just(-2), Just(-1)];
            let slot = prop_oneof![5 => 0..num_slots.max(1), 1 => Just(-1), 1 => stray];
            let slots = prop::collection::vec(slot, 0..=sizes.max_tokens);
            let gap = || prop_oneof![Just(0), 0..9_usize];
            (adapters, slots, (gap(), gap(), gap(), gap()), any::<bool>()).prop_map(
                move |(adapters, slots, (x_offset, x_gap, y_offset, y_gap), scaled)| {
                    let half_scales = scaled.then(|| (0..slots.len()).map(|i| (i % 9) as i8 - 4).collect());
                    let (op, slots) = (op.clone(), slots.clone());
                    Case {
                        op,
                        dtype,
                        values,
                        adapters,
                        empty_slots,
                        slots,
                        half_scales,
                        x_offset,
                        x_gap,
                        y_offset,
                        y_gap,
                        seed,
                    }
                },
            )
        },
    )
}

/// What computes the answer to a case: the buffer `y` after the operation.
pub trait Subject {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T>;
}

/// Runs a case and compares the answer with the reference's.
pub fn check<T: Element>(subject: &mut impl Subject, case: &Case) -> Result<(), TestCaseError> {
    let world = case.world::<T>();
    compare(case.y_place(), &subject.run(case, &world), &world.expected(case), &case.replay())
}
