//! Cases of operations that read the `y` of a linear layer, fused with its expand.

use aril::{
    Element,
    adapter::Adapter,
    model::{Activation, LinearId, ModelSpec, Shard},
    reference::Delta,
};
use proptest::prelude::*;
use rand::rngs::StdRng;
use serde::{Deserialize, Serialize};

use super::{
    case::{self, Layer, features, poison_rows},
    compare::{Expected, expect_activation},
    dense::{self, Dense, Op, Site, Sizes},
    values::Values,
};

/// A layer and the operation behind it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Consumed {
    pub dense: Dense,
}

pub type Case = case::Case<Consumed>;
pub type World<T> = case::World<T, Consumed>;

impl Consumed {
    /// Features of gate and of up.
    fn features(&self) -> usize {
        self.dense.slices()[0]
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
            (Site::Embedding(_), _) => panic!("an embedding has no gate"),
        }
    }

    fn loras(&self) -> &[Vec<usize>] {
        &self.dense.adapters
    }

    fn max_rank(&self) -> usize {
        self.dense.max_rank()
    }

    fn shapes(&self, num_tokens: usize) -> ([[usize; 2]; 2], Option<[usize; 2]>) {
        (self.dense.shapes(num_tokens).0, Some([num_tokens, self.features()]))
    }

    fn pairs_of(&self, values: Values, ranks: &Vec<usize>, rng: &mut StdRng) -> Self::Pairs {
        self.dense.pairs_of(values, ranks, rng)
    }

    fn load(&self, ranks: &Vec<usize>, pairs: &Self::Pairs) -> Adapter {
        self.dense.load(ranks, pairs)
    }

    /// Moves exact gates to where the sigmoid is exact, if the deltas are small.
    fn poison<T: Element>(case: &Case, world: &mut World<T>) {
        poison_rows(&mut world.x, case.x(), |token| case.adapter(token).is_some());
        poison_rows(&mut world.out, case.out(), |_| false);
        if case.values == Values::Exact {
            for token in 0..case.num_tokens() {
                for gate in &mut world.y[case.y().at(token, 0)..][..case.features()] {
                    *gate = T::from_f32(gate.to_f32() + 64.0);
                }
            }
        }
    }

    fn expect<T: Element>(case: &Case, world: &World<T>, expected: &mut [Expected<T>]) {
        let features = case.features();
        let roundings = case.dense.in_features() + world.max_rank + 8;
        for token in 0..case.num_tokens() {
            let y = case.y().row(&world.y, token);
            let mut sums: Vec<Delta> = y.iter().map(|&y| Delta { value: y, magnitude: y.abs() }).collect();
            let pairs = case.adapter(token).map(|adapter| &world.pairs[adapter]);
            for (slice, pair) in pairs.into_iter().flatten().enumerate() {
                let Some(pair) = pair else { continue };
                let deltas = pair.linear::<T>(&case.x().row(&world.x, token), case.scale(token));
                for (sum, delta) in sums[slice * features..].iter_mut().zip(deltas) {
                    sum.value += delta.value;
                    sum.magnitude += delta.magnitude;
                }
            }
            let (gates, ups) = sums.split_at(features);
            for (feature, (&gate, &up)) in gates.iter().zip(ups).enumerate() {
                expected[case.out().at(token, feature)] =
                    expect_activation(case.values, Activation::Silu, Some(gate), up, roundings);
            }
        }
    }
}

impl Case {
    /// A layer of gate and up, in exact bf16, with contiguous rows.
    pub fn gate_up(in_features: usize, features: usize, adapters: &[[usize; 2]], slots: Vec<i32>) -> Self {
        let op = Op::Linear { in_features, slices: vec![features; 2] };
        let dense = Dense { op, adapters: adapters.iter().map(|ranks| ranks.to_vec()).collect() };
        Self { slots, ..Self::of(Consumed { dense }, Values::Exact, 7) }
    }
}

/// Any layer of gate and up.
pub fn cases(sizes: Sizes) -> impl Strategy<Value = Case> {
    case::cases(sizes.max_tokens, move |_, num_adapters| {
        (dense::linears(sizes, num_adapters), features(sizes.max_features)).prop_map(|(mut dense, features)| {
            if let Op::Linear { slices, .. } = &mut dense.op {
                *slices = vec![features; 2];
            }
            for ranks in &mut dense.adapters {
                // Some adapters have a single module of one of the two slices.
                ranks.resize(2, 0);
            }
            Consumed { dense }
        })
    })
}
