//! Cases of linear layers that are computed with their base weights.

use aril::{Element, reference::Delta};
use proptest::prelude::*;
use rand::{SeedableRng, rngs::StdRng};
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use serde::{Deserialize, Serialize};

use super::{
    case::{self, Layer, poison_rows},
    compare::{Expected, Place, expect_sum},
    dense::{self, Dense, Op, Sizes, as_of_dense},
    values::{Dtype, Values},
};

/// A linear layer, its base weights, and the ranks of its adapters.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Fused {
    pub dense: Dense,
    pub has_bias: bool,
    /// Elements before W's first row, and from the end of a row to the next.
    pub w_gap: usize,
    /// The seed of W and the bias.
    pub w_seed: u64,
    pub accumulates: bool,
}

pub type Case = case::Case<Fused>;
pub type World<T> = case::World<T, Fused>;

/// W of each slice and the bias, in buffers that are NaN elsewhere.
pub struct Base<T> {
    pub slices: Vec<(Place, Vec<T>)>,
    pub bias: Option<(Place, Vec<T>)>,
}

impl Fused {
    pub fn in_features(&self) -> usize {
        self.dense.in_features()
    }

    pub fn slices(&self) -> Vec<usize> {
        self.dense.slices()
    }

    pub fn base<T: Element>(&self, values: Values) -> Base<T> {
        let mut rng = StdRng::seed_from_u64(self.w_seed);
        let cols = self.in_features();
        let slices = self.slices().into_iter().map(|rows| {
            let place = Place { offset: self.w_gap, rows, cols, stride: cols + self.w_gap };
            (place, place.buffer(values, &mut rng))
        });
        let slices = slices.collect();
        let outs = self.slices().iter().sum();
        let place = Place { offset: 0, rows: 1, cols: outs, stride: outs };
        let bias = self.has_bias.then(|| (place, place.buffer(values, &mut rng)));
        Base { slices, bias }
    }
}

impl Layer for Fused {
    const KIND: &'static str = "fused";

    as_of_dense!();

    fn shapes(&self, num_tokens: usize) -> ([[usize; 2]; 2], Option<[usize; 2]>) {
        self.dense.shapes(num_tokens)
    }

    fn poison<T: Element>(case: &Case, world: &mut World<T>) {
        poison_rows(&mut world.y, case.y(), |_| case.accumulates);
    }

    fn expect<T: Element>(case: &Case, world: &World<T>, expected: &mut [Expected<T>]) {
        let Base { slices, bias } = case.base::<T>(case.values);
        let rows = |(place, w): &(Place, Vec<T>)| (0..place.rows).map(|row| place.row(w, row)).collect();
        let (slices, bias): (Vec<Vec<Vec<f64>>>, _) =
            (slices.iter().map(rows).collect(), bias.map(|(place, bias)| place.row(&bias, 0)));
        // At most 2 K + r products and sums, a few scalings, the bias and y round once each.
        let roundings = 2 * case.in_features() + world.max_rank + 12;
        let sums_of = |token: usize| {
            let x = case.x().row(&world.x, token);
            let pairs = case.adapter(token).map(|adapter| &world.pairs[adapter]);
            let mut sums: Vec<Delta> = Vec::new();
            for (slice, rows) in slices.iter().enumerate() {
                let pair = pairs.and_then(|pairs| pairs[slice].as_ref());
                let deltas = pair.map(|pair| pair.linear::<T>(&x, case.scale(token)));
                for (row, w) in rows.iter().enumerate() {
                    let mut sum = deltas.as_ref().map_or(Delta { value: 0.0, magnitude: 0.0 }, |deltas| deltas[row]);
                    let products = w.iter().zip(&x).map(|(w, x)| w * x);
                    for term in products.chain(bias.as_ref().map(|bias| bias[sums.len()])) {
                        sum.value += term;
                        sum.magnitude += term.abs();
                    }
                    sums.push(sum);
                }
            }
            sums
        };
        // The products of the largest cases take a second of one core.
        let sums: Vec<_> = (0..case.num_tokens()).into_par_iter().map(sums_of).collect();
        for (token, sums) in sums.into_iter().enumerate() {
            for (out, sum) in sums.into_iter().enumerate() {
                let at = case.y().at(token, out);
                let y = if case.accumulates { f64::from(world.y[at].to_f32()) } else { 0.0 };
                expected[at] = expect_sum(case.values, y, sum, roundings);
            }
        }
    }
}

impl Case {
    /// The same problem with W and a bias, written or added to y.
    pub fn fused(dense: dense::Case, accumulates: bool) -> Self {
        let layer = Fused { dense: dense.layer, has_bias: true, w_gap: 8, w_seed: 11, accumulates };
        Self {
            layer,
            dtype: dense.dtype,
            values: dense.values,
            empty_slots: dense.empty_slots,
            slots: dense.slots,
            half_scales: dense.half_scales,
            offsets: dense.offsets,
            gaps: dense.gaps,
            seed: dense.seed,
            separate: dense.separate,
        }
    }
}

/// Any case that the fused linear takes: in 16 bits, and features and row strides of x and W are multiples of 8
/// elements.
pub fn cases(sizes: Sizes) -> impl Strategy<Value = Case> {
    let layers = move |_, num_adapters| {
        let base = (any::<bool>(), 0..=2_usize, any::<u64>(), any::<bool>());
        (dense::linears(sizes, num_adapters), base).prop_map(|(mut dense, (has_bias, w_gap, w_seed, accumulates))| {
            if let Op::Linear { in_features, .. } = &mut dense.op {
                *in_features = in_features.next_multiple_of(8);
            }
            Fused { dense, has_bias, w_gap: 8 * w_gap, w_seed, accumulates }
        })
    };
    case::cases(sizes.max_tokens, layers).prop_map(|mut case| {
        for elements in [&mut case.offsets[0], &mut case.gaps[0]] {
            *elements = elements.next_multiple_of(8);
        }
        let dtype = if matches!(case.dtype, Dtype::F32) { Dtype::BF16 } else { case.dtype };
        Case { dtype, ..case }
    })
}
