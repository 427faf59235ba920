//! Cases of linear layers, of embeddings, and of trained rows of embeddings and heads.

use aril::{
    Element,
    adapter::Adapter,
    model::{EmbeddingId, Linear, LinearId, MAX_SLICES, ModelSpec, Parallel, RowsId, Shard, TpRank},
    reference::Delta,
};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize};

use super::{
    case::{self, Layer, Subject, features, poison_rows},
    compare::{Expected, expect_sum},
    factors::{Modules, Pair, fill, scaling},
    small,
    values::{Dtype, Values},
};

/// A layer, and the ranks of its adapters.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Dense {
    pub op: Op,
    /// One list of ranks per adapter, one rank per slice; 0 where the adapter has no such module. Of trained rows, their
    /// numbers, which are at most the vocabulary.
    pub adapters: Vec<Vec<usize>>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Op {
    Linear { in_features: usize, slices: Vec<usize> },
    Embedding { vocab: usize, hidden: usize },
    RowEmbeddings { vocab: usize, hidden: usize },
    RowLogits { vocab: usize, hidden: usize },
}

#[derive(Clone, Copy, Debug)]
pub enum Site {
    Linear(LinearId),
    Embedding(EmbeddingId),
    RowEmbeddings(RowsId),
    RowLogits(RowsId),
}

pub type Case = case::Case<Dense>;
pub type World<T> = case::World<T, Dense>;

impl Dense {
    pub fn in_features(&self) -> usize {
        match &self.op {
            Op::Linear { in_features, .. } => *in_features,
            Op::Embedding { vocab, .. } | Op::RowEmbeddings { vocab, .. } => *vocab,
            Op::RowLogits { hidden, .. } => *hidden,
        }
    }

    pub fn is_linear(&self) -> bool {
        matches!(self.op, Op::Linear { .. })
    }

    pub fn slices(&self) -> Vec<usize> {
        match &self.op {
            Op::Linear { slices, .. } => slices.clone(),
            Op::Embedding { hidden, .. } | Op::RowEmbeddings { hidden, .. } => vec![*hidden],
            Op::RowLogits { vocab, .. } => vec![*vocab],
        }
    }

    /// The vocabulary, the features, and the path of a module with trained rows.
    fn of_rows(&self) -> Option<(usize, usize, &'static str)> {
        match self.op {
            Op::RowEmbeddings { vocab, hidden } => Some((vocab, hidden, "embed_tokens")),
            Op::RowLogits { vocab, hidden } => Some((vocab, hidden, "lm_head")),
            _ => None,
        }
    }
}

/// What a [`Layer`] with a linear layer `dense` has of that.
macro_rules! as_of_dense {
    () => {
        type Id = aril::model::LinearId;
        type Lora = Vec<usize>;
        type Pairs = <Dense as Layer>::Pairs;

        fn describe(&self, spec: &mut aril::model::ModelSpec) -> (aril::model::LinearId, aril::model::Shard) {
            match self.dense.describe(spec) {
                ($crate::common::dense::Site::Linear(id), shard) => (id, shard),
                _ => panic!("the layer is an embedding"),
            }
        }

        fn loras(&self) -> &[Vec<usize>] {
            &self.dense.adapters
        }

        fn max_rank(&self) -> usize {
            self.dense.max_rank()
        }

        fn pairs_of(&self, values: Values, ranks: &Vec<usize>, rng: &mut StdRng) -> Self::Pairs {
            self.dense.pairs_of(values, ranks, rng)
        }

        fn load(&self, ranks: &Vec<usize>, pairs: &Self::Pairs) -> aril::adapter::Adapter {
            self.dense.load(ranks, pairs)
        }
    };
}
pub(crate) use as_of_dense;

impl Layer for Dense {
    const KIND: &'static str = "dense";

    type Id = Site;
    type Lora = Vec<usize>;
    /// By slice. Of trained rows, the ids are A and the rows are B.
    type Pairs = Vec<Option<Pair>>;

    fn describe(&self, spec: &mut ModelSpec) -> (Site, Shard) {
        let site = match &self.op {
            Op::Linear { in_features, slices } => {
                let layer = Linear::new("layer", Parallel::Replicated, *in_features);
                let layer = slices.iter().enumerate().fold(layer, |layer, (i, out)| layer.slice(format!("m{i}"), *out));
                Site::Linear(spec.linear(layer).unwrap())
            }
            Op::Embedding { vocab, hidden } => Site::Embedding(spec.embedding("layer.m0", *vocab, *hidden).unwrap()),
            Op::RowEmbeddings { vocab, hidden } | Op::RowLogits { vocab, hidden } => {
                let embedding = spec.embedding("embed_tokens", *vocab, *hidden).unwrap();
                let head = Linear::new("", Parallel::Replicated, *hidden).slice("lm_head", *vocab);
                let head = spec.linear(head).unwrap();
                let rows = spec.trained_rows(embedding, head, false).unwrap();
                let is_of_head = matches!(self.op, Op::RowLogits { .. });
                if is_of_head { Site::RowLogits(rows) } else { Site::RowEmbeddings(rows) }
            }
        };
        (site, TpRank::SINGLE.into())
    }

    fn loras(&self) -> &[Vec<usize>] {
        &self.adapters
    }

    fn max_rank(&self) -> usize {
        // No rank bounds the number of rows.
        let ranks = self.adapters.iter().flatten().copied().filter(|_| self.of_rows().is_none());
        ranks.max().unwrap_or(0).max(1)
    }

    fn shapes(&self, num_tokens: usize) -> ([[usize; 2]; 2], Option<[usize; 2]>) {
        ([[num_tokens, self.in_features()], [num_tokens, self.slices().iter().sum()]], None)
    }

    fn pairs_of(&self, values: Values, ranks: &Vec<usize>, rng: &mut StdRng) -> Self::Pairs {
        if let Some((vocab, hidden, _)) = self.of_rows() {
            let rank = ranks[0].min(vocab);
            let a = rand::seq::index::sample(rng, vocab, rank).iter().map(|id| id as f64).collect();
            let b = fill(values, rank * hidden, 1.0, rng);
            return vec![(rank > 0).then_some(Pair { rank, scaling: 1.0, a, b })];
        }
        let mut pair = |(&rank, out): (&usize, usize)| {
            let [a, b] = [rank * self.in_features(), out * rank].map(|len| fill(values, len, 1.0, rng));
            (rank > 0).then(|| Pair { rank, scaling: scaling(values, rng), a, b })
        };
        ranks.iter().zip(self.slices()).map(&mut pair).collect()
    }

    fn load(&self, _: &Vec<usize>, pairs: &Self::Pairs) -> Adapter {
        let mut modules = Modules::default();
        if let Some((_, hidden, path)) = self.of_rows() {
            if let Some(Pair { rank, a, b, .. }) = &pairs[0] {
                modules.put_rows(path, a, &[*rank, hidden], b);
            }
            return modules.adapter();
        }
        let names = if self.is_linear() { Modules::LINEAR } else { Modules::EMBEDDING };
        for (slice, (pair, out)) in pairs.iter().zip(self.slices()).enumerate() {
            let Some(Pair { rank, scaling, a, b }) = pair else { continue };
            let shapes = [[*rank, self.in_features()], [out, *rank]];
            let path = format!("layer.m{slice}");
            modules.put(&path, scaling * *rank as f64, names, (&shapes[0], a), (&shapes[1], b));
        }
        modules.adapter()
    }

    fn poison<T: Element>(case: &Case, world: &mut World<T>) {
        poison_rows(&mut world.x, case.x(), |token| case.adapter(token).is_some());
    }

    fn expect<T: Element>(case: &Case, world: &World<T>, expected: &mut [Expected<T>]) {
        let place = case.y();
        for (token, id) in case.token_ids().into_iter().enumerate() {
            let Some(adapter) = case.adapter(token) else { continue };
            if case.of_rows().is_some() {
                if let Some(rows) = &world.pairs[adapter][0] {
                    expect_rows(case, world, (token, id), rows, expected);
                }
                continue;
            }
            let mut first = 0;
            for (pair, out_features) in world.pairs[adapter].iter().zip(case.slices()) {
                let deltas = pair.as_ref().and_then(|pair| match case.op {
                    Op::Linear { .. } => Some(pair.linear::<T>(&case.x().row(&world.x, token), case.scale(token))),
                    Op::Embedding { vocab, .. } => {
                        let id = usize::try_from(id).ok().filter(|&id| id < vocab)?;
                        Some(pair.embedding::<T>(id, vocab, case.scale(token)))
                    }
                    Op::RowEmbeddings { .. } | Op::RowLogits { .. } => None,
                });
                for (out, delta) in deltas.into_iter().flatten().enumerate() {
                    let at = place.at(token, first + out);
                    // At most K + r products and sums and a few scalings round once each.
                    let roundings = case.in_features() + world.max_rank + 8;
                    expected[at] = expect_sum(case.values, f64::from(world.y[at].to_f32()), delta, roundings);
                }
                first += out_features;
            }
        }
    }
}

/// What trained rows replace of a token.
fn expect_rows<T: Element>(
    case: &Case,
    world: &World<T>,
    (token, id): (usize, i32),
    Pair { a: ids, b: rows, .. }: &Pair,
    expected: &mut [Expected<T>],
) {
    let rounded = |value: f64| T::from_f32(value as f32);
    let place = case.y();
    for (&of_row, row) in ids.iter().zip(rows.chunks(rows.len() / ids.len())) {
        if matches!(case.op, Op::RowLogits { .. }) {
            let x = case.x().row(&world.x, token);
            let products = || x.iter().zip(row).map(|(x, &w)| x * f64::from(rounded(w).to_f32()));
            let sum = Delta { value: products().sum(), magnitude: products().map(f64::abs).sum() };
            expected[place.at(token, of_row as usize)] = expect_sum(case.values, 0.0, sum, x.len() + 8);
        } else if f64::from(id) == of_row {
            for (feature, &value) in row.iter().enumerate() {
                expected[place.at(token, feature)] = Expected::Untouched(rounded(value));
            }
        }
    }
}

impl Case {
    /// A linear layer in exact bf16, with contiguous rows.
    pub fn linear(in_features: usize, slices: &[usize], adapters: &[&[usize]], slots: Vec<i32>) -> Self {
        let op = Op::Linear { in_features, slices: slices.to_vec() };
        let layer = Dense { op, adapters: adapters.iter().map(|ranks| ranks.to_vec()).collect() };
        Self { slots, ..Self::of(layer, Values::Exact, 7) }
    }

    /// Layers with as many input features as `down` and `o` of large models, and with one more than whole slabs or
    /// spans; in exact bf16 and f16.
    pub fn of_many_features(tokens: &[usize]) -> Vec<Self> {
        let mut cases = Vec::new();
        let all =
            [(6144, Dtype::BF16), (8193, Dtype::F16), (9000, Dtype::BF16), (12_288, Dtype::F16), (14_336, Dtype::BF16)];
        for &(in_features, dtype) in small::choose(&all[..], &[(4097, Dtype::F16), (4104, Dtype::BF16)]) {
            for &tokens in tokens {
                let slots = (0..tokens as i32).map(|token| token % 4 - 1).collect();
                let case = Self::linear(in_features, &[40, 72], &[&[16, 3], &[1, 64], &[33, 0]], slots);
                cases.push(Self { dtype, gaps: [in_features % 8, 0, 0], ..case });
            }
        }
        cases
    }

    /// Layers of five to eight fused modules, of different ranks or absent, in every type.
    pub fn of_many_slices(tokens: &[usize]) -> Vec<Self> {
        let widths = [24, 7, 130, 1, 64, 300, 9, 256];
        let ranks = [[3, 16, 1, 8, 64, 2, 5, 17], [0, 1, 40, 0, 9, 33, 100, 1], [8; 8], [0, 0, 0, 0, 0, 0, 0, 12]];
        let mut cases = Vec::new();
        for slices in (5..=MAX_SLICES).step_by(small::choose(1, 3)) {
            for (dtype, &tokens) in [Dtype::BF16, Dtype::F16, Dtype::F32].into_iter().cycle().skip(slices).zip(tokens) {
                let slots = (0..tokens as i32).map(|token| (token * 3 + token / 7) % 5 - 1).collect();
                let adapters = ranks.each_ref().map(|ranks| &ranks[..slices]);
                let case = Self::linear(700, &widths[..slices], &adapters, slots);
                cases.push(Self { dtype, gaps: [0, slices % 2, 0], ..case });
            }
        }
        cases
    }

    /// Layers in bf16 and f16 for `check_infinities`, of ranks up to `most`. A sum over one rank is infinite, over
    /// several mostly NaN.
    pub fn of_infinities(tokens: i32, most: usize) -> [Self; 2] {
        let slots: Vec<i32> = (0..tokens).map(|token| token % 4 - 1).collect();
        [Dtype::BF16, Dtype::F16].map(|dtype| {
            let case = Self::linear(264, &[72, 40], &[&[1, 1], &[2, most], &[most, 3]], slots.clone());
            Self { dtype, values: Values::Rounded, ..case }
        })
    }

    /// By token, for an embedding: ids of its rows, and some below and above them.
    pub fn token_ids(&self) -> Vec<i32> {
        let (mut rng, vocab) = (StdRng::seed_from_u64(!self.seed), self.in_features() as i32);
        (0..self.num_tokens()).map(|_| rng.random_range(-1..=vocab)).collect()
    }
}

/// Compares overwritten NaN with deltas added to zeros, bit by bit. Only linear layers have an operation that overwrites.
pub fn check_overwriting<T: Element>(
    adds: &mut impl Subject<Dense>,
    overwrites: &mut impl Subject<Dense>,
    case: &Case,
) -> Result<(), TestCaseError> {
    if !case.is_linear() {
        return Ok(());
    }
    let on = |value: f32| {
        let mut world = case.world::<T>();
        for token in 0..case.num_tokens() {
            world.y[case.y().at(token, 0)..][..case.y().cols].fill(T::from_f32(value));
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

/// The largest sizes of cases.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub max_features: usize,
    pub max_tokens: usize,
    pub max_rank: usize,
}

impl Sizes {
    /// Small enough for a debug build on the CPU.
    pub const SMALL: Self = Self { max_features: 300, max_tokens: 40, max_rank: 40 };

    /// More than one of every tile of the small_m kernels.
    pub fn large() -> Self {
        let large = Self { max_features: 1500, max_tokens: 300, max_rank: 512 };
        small::choose(large, Self { max_features: 300, max_tokens: 40, max_rank: 144 })
    }

    /// More tokens than the small_m kernels take.
    pub fn of_many_tokens() -> Self {
        let many = Self { max_tokens: 1500, max_features: 500, max_rank: 200 };
        small::choose(many, Self { max_tokens: 700, max_features: 72, max_rank: 40 })
    }
}

/// Any case.
pub fn cases(sizes: Sizes) -> impl Strategy<Value = Case> {
    case::cases(sizes.max_tokens, move |_, num_adapters| layers(sizes, num_adapters))
}

fn layers(sizes: Sizes, num_adapters: usize) -> impl Strategy<Value = Dense> {
    let max = sizes.max_features;
    let embeddings = (features(max), features(max)).prop_map(|(vocab, hidden)| Op::Embedding { vocab, hidden });
    let rows = (features(max), features(max), any::<bool>()).prop_map(|(vocab, hidden, is_of_head)| {
        if is_of_head { Op::RowLogits { vocab, hidden } } else { Op::RowEmbeddings { vocab, hidden } }
    });
    let op = prop_oneof![4 => linear_ops(max), 1 => embeddings, 1 => rows];
    adapted(op, sizes.max_rank, num_adapters)
}

/// Any linear layer.
pub fn linears(sizes: Sizes, num_adapters: usize) -> impl Strategy<Value = Dense> {
    adapted(linear_ops(sizes.max_features), sizes.max_rank, num_adapters)
}

fn linear_ops(max_features: usize) -> impl Strategy<Value = Op> {
    let slices = prop_oneof![
        3 => prop::collection::vec(features(max_features), 1..=3),
        1 => prop::collection::vec(1..=(max_features / 4), 4..=MAX_SLICES),
    ];
    (features(max_features), slices).prop_map(|(in_features, slices)| Op::Linear { in_features, slices })
}

fn adapted(op: impl Strategy<Value = Op>, max_rank: usize, num_adapters: usize) -> impl Strategy<Value = Dense> {
    op.prop_flat_map(move |op| {
        let num_slices = if let Op::Linear { slices, .. } = &op { slices.len() } else { 1 };
        let rank = prop_oneof![1 => Just(0), 4 => 1..=17_usize, 3 => 1..=max_rank];
        let adapters = prop::collection::vec(prop::collection::vec(rank, num_slices), num_adapters);
        adapters.prop_map(move |adapters| Dense { op: op.clone(), adapters })
    })
}
