//! What the fused linear is given beside a case, and the answers that the reference gives.

use aril::{Element, reference::Delta};
use proptest::prelude::*;
use rand::{SeedableRng, rngs::StdRng};

use super::cases::{Case, Expected, Op, Place, Sizes, World, cases, expect_sum};

/// A base layer's weights, NaN wherever there is no element of them.
pub struct Base<T> {
    pub slices: Vec<(Place, Vec<T>)>,
    pub bias: Option<Vec<T>>,
}

/// Cases of linear layers whose rows the copy engine can read, of up to so many tokens.
pub fn forward_cases(sizes: Sizes) -> impl Strategy<Value = Case> {
    cases(sizes).prop_map(|case| {
        let op = match case.op {
            Op::Linear { in_features, slices } => Op::Linear { in_features: in_features.next_multiple_of(8), slices },
            Op::Embedding { vocab, hidden } => {
                Op::Linear { in_features: vocab.next_multiple_of(8), slices: vec![hidden] }
            }
        };
        let [x_offset, x_gap] = [case.x_offset, case.x_gap].map(|elems| elems.next_multiple_of(8));
        Case { op, x_offset, x_gap, ..case }
    })
}

impl<T: Element> Base<T> {
    /// The weights that belong to a case: every second one has a bias, and rows that are apart.
    pub fn of(case: &Case) -> Self {
        let mut rng = StdRng::seed_from_u64(!case.seed);
        let cols = case.in_features();
        let place = |rows| Place { offset: 0, rows, cols, stride: cols + case.seed as usize % 3 * 8 };
        let slices =
            case.slices().into_iter().map(|out| (place(out), place(out).buffer(case.values, &mut rng))).collect();
        let outs: usize = case.slices().iter().sum();
        let bias = (case.seed.is_multiple_of(2))
            .then(|| (0..outs).map(|_| T::from_f32(case.values.value(&mut rng))).collect());
        Self { slices, bias }
    }

    /// What the whole buffer `y` must hold.
    pub fn expected(&self, case: &Case, world: &World<T>, accumulates: bool) -> Vec<Expected<T>> {
        let mut expected: Vec<_> = world.y.iter().map(|&y| Expected::Untouched(y)).collect();
        let roundings = 2 * case.in_features() + world.max_rank + 12;
        for (token, slot) in world.slots.iter().enumerate() {
            let x = case.x_place().row(&world.x, token);
            let adapter = slot.index().and_then(|slot| world.adapters.get(slot));
            let mut out = 0;
            for (slice, (place, w)) in self.slices.iter().enumerate() {
                let deltas = adapter.and_then(|adapter| world.deltas(case, adapter, token, slice));
                for row in 0..place.rows {
                    let at = case.y_place().at(token, out);
                    let products = || place.row(w, row).into_iter().zip(&x).map(|(w, x)| w * x);
                    let delta = deltas.as_ref().map_or(Delta { value: 0.0, magnitude: 0.0 }, |deltas| deltas[row]);
                    let bias = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[out].to_f32()));
                    let y = if accumulates { f64::from(world.y[at].to_f32()) } else { 0.0 };
                    let sum = Delta {
                        value: products().sum::<f64>() + bias + delta.value,
                        magnitude: products().map(f64::abs).sum::<f64>() + bias.abs() + delta.magnitude,
                    };
                    expected[at] = expect_sum(case.values, y, sum, roundings);
                    out += 1;
                }
            }
        }
        expected
    }
}
