//! Cases of operations that read the `y` of a linear layer, fused with its expand.

use std::ops::Range;

use aril::{
    DType, Element,
    adapter::Adapter,
    model::{Activation, LinearId, ModelSpec, Shard},
    reference::Delta,
};
use proptest::prelude::*;
use rand::{SeedableRng, rngs::StdRng};
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use serde::{Deserialize, Serialize};

use super::{
    case::{self, Layer, features, poison_rows},
    compare::{Expected, error_of_sum, expect_activation, expect_sum, expect_within},
    dense::{self, Dense, Op, Site, Sizes},
    values::Values,
};

/// A layer and the operation behind it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Consumed {
    pub dense: Dense,
    pub by: By,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum By {
    SiluMul,
    /// The rows of the case's `out` are those of the residual, then those of the operation's `out`.
    AddRmsNorm,
}

pub type Case = case::Case<Consumed>;
pub type World<T> = case::World<T, Consumed>;

pub const EPS: f32 = 1e-6;

impl Consumed {
    /// Columns of the operation's output.
    pub fn features(&self) -> usize {
        self.dense.slices()[0]
    }

    /// Matrices in the case's `out`.
    pub fn outputs(&self) -> usize {
        match self.by {
            By::SiluMul => 1,
            By::AddRmsNorm => 2,
        }
    }
}

impl Layer for Consumed {
    const KIND: &'static str = "consumed";

    type Id = LinearId;
    type Lora = Vec<usize>;
    type Pairs = <Dense as Layer>::Pairs;

    fn describe(&self, spec: &mut ModelSpec) -> (LinearId, Shard) {
        match self.dense.describe(spec) {
            (Site::Linear(id), shard) => (id, shard),
            (Site::Embedding(_), _) => panic!("nothing is fused with an embedding"),
        }
    }

    fn loras(&self) -> &[Vec<usize>] {
        &self.dense.adapters
    }

    fn max_rank(&self) -> usize {
        self.dense.max_rank()
    }

    fn shapes(&self, num_tokens: usize) -> ([[usize; 2]; 2], Option<[usize; 2]>) {
        (self.dense.shapes(num_tokens).0, Some([self.outputs() * num_tokens, self.features()]))
    }

    fn pairs_of(&self, values: Values, ranks: &Vec<usize>, rng: &mut StdRng) -> Self::Pairs {
        self.dense.pairs_of(values, ranks, rng)
    }

    fn load(&self, ranks: &Vec<usize>, pairs: &Self::Pairs) -> Adapter {
        self.dense.load(ranks, pairs)
    }

    fn poison<T: Element>(case: &Case, world: &mut World<T>) {
        poison_rows(&mut world.x, case.x(), |token| case.adapter(token).is_some());
        let residual_rows = (case.outputs() - 1) * case.num_tokens();
        poison_rows(&mut world.out, case.out(), |row| row < residual_rows);
        if (case.by, case.values) == (By::SiluMul, Values::Exact) {
            // Where the sigmoid is exact, if the deltas are small.
            for token in 0..case.num_tokens() {
                for gate in &mut world.y[case.y().at(token, 0)..][..case.features()] {
                    *gate = T::from_f32(gate.to_f32() + 64.0);
                }
            }
        }
    }

    fn expect<T: Element>(case: &Case, world: &World<T>, expected: &mut [Expected<T>]) {
        // The products of the largest cases take a second of one core.
        let sums: Vec<_> = (0..case.num_tokens()).into_par_iter().map(|token| case.sums(world, token)).collect();
        for (token, sums) in sums.into_iter().enumerate() {
            match case.by {
                By::SiluMul => {
                    let (gates, ups) = sums.split_at(case.features());
                    for (feature, (&gate, &up)) in gates.iter().zip(ups).enumerate() {
                        expected[case.out().at(token, feature)] =
                            expect_activation(case.values, Activation::Silu, Some(gate), up, case.roundings());
                    }
                }
                By::AddRmsNorm => case.expect_norm(world, token, &sums, expected),
            }
        }
    }
}

impl Case {
    /// In exact bf16, with contiguous rows. The adapters have these ranks in gate and up, or the first in a layer of one slice.
    pub fn consumed(by: By, in_features: usize, features: usize, adapters: &[[usize; 2]], slots: Vec<i32>) -> Self {
        let slices = slices_of(by, features);
        let adapters = adapters.iter().map(|ranks| ranks[..slices.len()].to_vec()).collect();
        let dense = Dense { op: Op::Linear { in_features, slices }, adapters };
        Self { slots, ..Self::of(Consumed { dense, by }, Values::Exact, 7) }
    }

    /// The norm's weight.
    pub fn weight<T: Element>(&self) -> Vec<T> {
        let mut rng = StdRng::seed_from_u64(!self.seed);
        (0..self.features()).map(|_| T::from_f32(self.values.value(&mut rng))).collect()
    }

    /// These tokens alone, with their rows of the world.
    pub fn part<T: Element>(&self, world: &World<T>, tokens: Range<usize>) -> (Self, World<T>) {
        let mut part = Self { slots: self.slots[tokens.clone()].to_vec(), ..self.clone() };
        part.half_scales.iter_mut().for_each(|scales| *scales = scales[tokens.clone()].to_vec());
        let mut rows = part.world::<T>();
        for (to, from) in tokens.enumerate() {
            let copy = |into: &mut [T], at: usize, source: &[T], from: usize, cols: usize| {
                into[at..at + cols].copy_from_slice(&source[from..from + cols]);
            };
            copy(&mut rows.x, part.x().at(to, 0), &world.x, self.x().at(from, 0), self.x().cols);
            copy(&mut rows.y, part.y().at(to, 0), &world.y, self.y().at(from, 0), self.y().cols);
            for output in 0..self.outputs() {
                let (to, from) = (to + output * part.num_tokens(), from + output * self.num_tokens());
                let cols = self.out().cols;
                copy(&mut rows.out, part.out().at(to, 0), &world.out, self.out().at(from, 0), cols);
            }
        }
        (part, rows)
    }

    /// A token's rows of the written buffer, in bytes.
    pub fn written<T: Element>(&self, out: &[T], token: usize) -> Vec<u8> {
        let row = |output| &out[self.out().at(token + output * self.num_tokens(), 0)..][..self.out().cols];
        (0..self.outputs()).flat_map(|output| bytemuck::cast_slice::<T, u8>(row(output)).to_vec()).collect()
    }

    /// y plus the delta of a token.
    fn sums<T: Element>(&self, world: &World<T>, token: usize) -> Vec<Delta> {
        let y = self.y().row(&world.y, token);
        let mut sums: Vec<Delta> = y.iter().map(|&y| Delta { value: y, magnitude: y.abs() }).collect();
        let pairs = self.adapter(token).map(|adapter| &world.pairs[adapter]);
        for (slice, pair) in pairs.into_iter().flatten().enumerate() {
            let Some(pair) = pair else { continue };
            let deltas = pair.linear::<T>(&self.x().row(&world.x, token), self.scale(token));
            for (sum, delta) in sums[slice * self.features()..].iter_mut().zip(deltas) {
                sum.value += delta.value;
                sum.magnitude += delta.magnitude;
            }
        }
        sums
    }

    /// Roundings of a sum of y and a delta.
    fn roundings(&self) -> usize {
        self.dense.in_features() + self.max_rank() + 8
    }

    /// The rows of residual and `out`.
    fn expect_norm<T: Element>(&self, world: &World<T>, token: usize, sums: &[Delta], expected: &mut [Expected<T>]) {
        let (place, roundings) = (self.out(), self.roundings() + 1);
        let unit = DType::F32.unit_roundoff();
        // Each sum, rounded, and its error.
        let mut rounded = Vec::new();
        for (feature, &sum) in sums.iter().enumerate() {
            let at = place.at(token, feature);
            let residual = f64::from(world.out[at].to_f32());
            expected[at] = expect_sum(self.values, residual, sum, roundings);
            let value = residual + sum.value;
            rounded.push(if self.values == Values::Exact {
                (f64::from(T::from_f32(value as f32).to_f32()), 0.0)
            } else {
                let magnitude = residual.abs() + sum.magnitude;
                match expect_within::<T>(value, error_of_sum::<T>(Delta { value, magnitude }, roundings)) {
                    Expected::Within(value, error) => (value, error),
                    _ => unreachable!("a value within an error"),
                }
            });
        }
        let features = rounded.len() as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| rounded.iter().map(of).sum::<f64>() / features;
        let (mean, mean_error) = (mean(|(r, _)| r * r), mean(|(r, error)| 2.0 * r.abs() * error + error * error));
        // Squares, their sum, the quotient and eps round.
        let mean_error = mean_error + (features + 8.0) * unit * (mean + mean_error);
        let scale = |mean: f64| 1.0 / (mean.max(0.0) + f64::from(EPS)).sqrt();
        let (lowest, highest) = (scale(mean + mean_error), scale(mean - mean_error));
        let weight = self.weight::<T>();
        for (feature, &(sum, error)) in rounded.iter().enumerate() {
            let at = place.at(token + self.num_tokens(), feature);
            if !mean.is_finite() {
                // The scale is zero.
                expected[at] = if sum.is_finite() { Expected::Exactly(T::from_f32(0.0)) } else { Expected::Nan };
                continue;
            }
            let quotient = sum.abs() * scale(mean);
            let most = (sum.abs() + error) * highest;
            let least = (sum.abs() - error).max(0.0) * lowest;
            let error = (most - quotient).max(quotient - least) + 8.0 * unit * most;
            let Expected::Within(quotient, error) = expect_within::<T>(quotient, error) else { unreachable!() };
            let weight = f64::from(weight[feature].to_f32());
            expected[at] = expect_within(weight * quotient.copysign(sum), weight.abs() * error);
        }
    }
}

fn slices_of(by: By, features: usize) -> Vec<usize> {
    match by {
        By::SiluMul => vec![features; 2],
        By::AddRmsNorm => vec![features],
    }
}

/// Any layer and operation behind it.
pub fn cases(sizes: Sizes) -> impl Strategy<Value = Case> {
    case::cases(sizes.max_tokens, move |_, num_adapters| {
        let by = prop_oneof![Just(By::SiluMul), Just(By::AddRmsNorm)];
        (dense::linears(sizes, num_adapters), features(sizes.max_features), by).prop_map(|(mut dense, features, by)| {
            let slices = slices_of(by, features);
            for ranks in &mut dense.adapters {
                // Some adapters have a module of gate alone.
                ranks.resize(slices.len(), 0);
            }
            if let Op::Linear { slices: old, .. } = &mut dense.op {
                *old = slices;
            }
            Consumed { dense, by }
        })
    })
}
