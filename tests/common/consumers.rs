//! Cases of `silu_mul`, which reads the `y` of a layer of gate and up, fused with its expand.

use std::ops::Range;

use aril::{Element, model::Activation, reference::Delta};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use serde::{Deserialize, Serialize};

use super::{
    case::{self, Layer, features, poison_rows},
    compare::{Expected, expect_activation},
    dense::{self, Dense, Op, Sizes, as_of_dense},
    values::Values,
};

/// A layer of gate and up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Consumed {
    pub dense: Dense,
}

pub type Case = case::Case<Consumed>;
pub type World<T> = case::World<T, Consumed>;

impl Consumed {
    /// Columns of the operation's output.
    pub fn features(&self) -> usize {
        self.dense.slices()[0]
    }
}

impl Layer for Consumed {
    const KIND: &'static str = "consumed";

    as_of_dense!();

    fn shapes(&self, num_tokens: usize) -> ([[usize; 2]; 2], Option<[usize; 2]>) {
        (self.dense.shapes(num_tokens).0, Some([num_tokens, self.features()]))
    }

    fn poison<T: Element>(case: &Case, world: &mut World<T>) {
        poison_rows(&mut world.x, case.x(), |token| case.adapter(token).is_some());
        poison_rows(&mut world.out, case.out(), |_| false);
        if case.values == Values::Exact {
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
            let (gates, ups) = sums.split_at(case.features());
            for (feature, (&gate, &up)) in gates.iter().zip(ups).enumerate() {
                expected[case.out().at(token, feature)] =
                    expect_activation(case.values, Activation::Silu, Some(gate), up, case.roundings());
            }
        }
    }
}

impl Case {
    /// In exact bf16, with contiguous rows. The adapters have these ranks in gate and up.
    pub fn consumed(in_features: usize, features: usize, adapters: &[[usize; 2]], slots: Vec<i32>) -> Self {
        let adapters = adapters.iter().map(|ranks| ranks.to_vec()).collect();
        let dense = Dense { op: Op::Linear { in_features, slices: vec![features; 2] }, adapters };
        Self { slots, ..Self::of(Consumed { dense }, Values::Exact, 7) }
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
            copy(&mut rows.out, part.out().at(to, 0), &world.out, self.out().at(from, 0), self.out().cols);
        }
        (part, rows)
    }

    /// A token's row of the written buffer, in bytes.
    pub fn written<'a, T: Element>(&self, out: &'a [T], token: usize) -> &'a [u8] {
        bytemuck::cast_slice(&out[self.out().at(token, 0)..][..self.out().cols])
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
}

/// Any layer of gate and up.
pub fn cases(sizes: Sizes) -> impl Strategy<Value = Case> {
    case::cases(sizes.max_tokens, move |_, num_adapters| {
        (dense::linears(sizes, num_adapters), features(sizes.max_features)).prop_map(|(mut dense, features)| {
            for ranks in &mut dense.adapters {
                // Some adapters have a module of gate alone.
                ranks.resize(2, 0);
            }
            if let Op::Linear { slices, .. } = &mut dense.op {
                *slices = vec![features; 2];
            }
            Consumed { dense }
        })
    })
}
