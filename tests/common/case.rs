//! Problems for the operations of one layer, the reference's results, and the check of results.
//!
//! A [`Case`] is a few numbers that determine all data, so a failing case can be printed and run again with
//! `ARIL_CASE='…'`. The parts that depend on the kind of layer implement [`Layer`]: linear layers and embeddings
//! ([`dense`](super::dense)), and experts ([`experts`](super::experts)).
//!
//! Memory that no operation may read is NaN: gaps and guards, rows of `x` whose token has no adapter, and outputs that
//! are only written. Memory that no operation may write is compared bit by bit.

use std::{
    collections::BTreeMap,
    fmt,
    ops::{Deref, DerefMut},
};

use aril::{
    Element, Slot,
    adapter::Adapter,
    model::{Model, ModelSpec, Shard},
    plan::Capacity,
    routing::Batch,
    slots::SlotInfo,
};
use proptest::prelude::*;
use rand::{SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{
    compare::{Expected, Place, compare},
    factors::neighbour,
    values::{Dtype, Values},
};

/// A problem. It derefs to its layer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Case<L> {
    pub layer: L,
    pub dtype: Dtype,
    pub values: Values,
    /// Slots beyond the loaded ones.
    pub empty_slots: usize,
    /// By token: a slot, -1, or any number that is not a slot.
    pub slots: Vec<i32>,
    /// By token, in units of one half; `None` for no scales.
    pub half_scales: Option<Vec<i8>>,
    /// Elements before the first row, and from the end of a row to the next: of x, y and out.
    pub offsets: [usize; 3],
    pub gaps: [usize; 3],
    pub seed: u64,
    /// `y` of a linear layer is a matrix of each slice, in a buffer of its own.
    pub separate: bool,
}

impl<L> Deref for Case<L> {
    type Target = L;

    fn deref(&self) -> &L {
        &self.layer
    }
}

impl<L> DerefMut for Case<L> {
    fn deref_mut(&mut self) -> &mut L {
        &mut self.layer
    }
}

/// A kind of layer, an operation on it, and the router's choices.
pub trait Layer: Clone + fmt::Debug + Serialize + DeserializeOwned {
    /// The name of the kind in printed cases.
    const KIND: &'static str;

    /// The layer's name in the model.
    type Id: Copy;

    /// An adapter of the layer, without values.
    type Lora;

    /// The factors of one adapter.
    type Pairs;

    /// Adds the layer to a model, and returns the shard that the operations run on.
    fn describe(&self, spec: &mut ModelSpec) -> (Self::Id, Shard);

    /// The loaded adapters, by slot.
    fn loras(&self) -> &[Self::Lora];

    /// The largest rank of the adapters, at least 1.
    fn max_rank(&self) -> usize;

    /// Rows and columns of `x`, of `y`, and of `out` if the operation writes `out` and only reads `y`.
    fn shapes(&self, num_tokens: usize) -> ([[usize; 2]; 2], Option<[usize; 2]>);

    /// Values for the factors of an adapter.
    fn pairs_of(&self, values: Values, lora: &Self::Lora, rng: &mut StdRng) -> Self::Pairs;

    /// An adapter with these factors, as PEFT or another trainer would write it.
    fn load(&self, lora: &Self::Lora, pairs: &Self::Pairs) -> Adapter;

    /// Sets elements that must not be read to NaN.
    fn poison<T: Element>(case: &Case<Self>, world: &mut World<T, Self>);

    /// Sets the elements that the reference writes; `expected` holds the initial ones.
    fn expect<T: Element>(case: &Case<Self>, world: &World<T, Self>, expected: &mut [Expected<T>]);
}

/// The data of a case.
pub struct World<T, L: Layer> {
    pub model: Model,
    pub id: L::Id,
    pub adapters: Vec<Adapter>,
    /// By adapter.
    pub pairs: Vec<L::Pairs>,
    /// By token, as in the case: -1, or any number that is not a slot, is the base model.
    pub slots: Vec<i32>,
    pub scales: Option<Vec<f32>>,
    pub num_slots: usize,
    pub max_rank: usize,
    /// The whole buffers.
    pub x: Vec<T>,
    pub y: Vec<T>,
    pub out: Vec<T>,
}

/// Computes a case: the whole buffer that the operation writes, afterwards.
pub trait Subject<L: Layer> {
    fn run<T: Element>(&mut self, case: &Case<L>, world: &World<T, L>) -> Vec<T>;
}

impl<L: Layer> Case<L> {
    /// In bf16, with contiguous rows, without tokens.
    pub fn of(layer: L, values: Values, seed: u64) -> Self {
        let (slots, half_scales) = (Vec::new(), None);
        Self {
            layer,
            dtype: Dtype::BF16,
            values,
            empty_slots: 1,
            slots,
            half_scales,
            offsets: [0; 3],
            gaps: [0; 3],
            seed,
            separate: false,
        }
    }

    /// The same with another layer.
    pub fn with(&self, change: impl FnOnce(&mut L)) -> Self {
        let mut case = self.clone();
        change(&mut case.layer);
        case
    }

    pub fn num_tokens(&self) -> usize {
        self.slots.len()
    }

    /// The largest rank of the adapters, at least 1.
    pub fn max_rank(&self) -> usize {
        self.layer.max_rank()
    }

    /// An adapter with these factors.
    pub fn load(&self, lora: &L::Lora, pairs: &L::Pairs) -> Adapter {
        self.layer.load(lora, pairs)
    }

    /// Slots of the table.
    pub fn num_slots(&self) -> usize {
        self.loras().len() + self.empty_slots
    }

    /// The adapter of a token.
    pub fn adapter(&self, token: usize) -> Option<usize> {
        usize::try_from(self.slots[token]).ok().filter(|&slot| slot < self.loras().len())
    }

    /// The factor on the scaling of a token's adapter.
    pub fn scale(&self, token: usize) -> f64 {
        self.half_scales.as_ref().map_or(1.0, |halves| f64::from(halves[token]) / 2.0)
    }

    pub fn x(&self) -> Place {
        self.place(0, self.shapes(self.num_tokens()).0[0])
    }

    pub fn y(&self) -> Place {
        self.place(1, self.shapes(self.num_tokens()).0[1])
    }

    /// Empty if the operation writes `y`.
    pub fn out(&self) -> Place {
        self.place(2, self.shapes(self.num_tokens()).1.unwrap_or([0, 0]))
    }

    /// Whether the operation reads `y`, and writes `out`.
    pub fn has_out(&self) -> bool {
        self.shapes(self.num_tokens()).1.is_some()
    }

    /// The place of the written matrix.
    pub fn target(&self) -> Place {
        if self.has_out() { self.out() } else { self.y() }
    }

    fn place(&self, matrix: usize, [rows, cols]: [usize; 2]) -> Place {
        Place { offset: self.offsets[matrix], rows, cols, stride: cols + self.gaps[matrix] }
    }

    /// The case in `ARIL_CASE`, which replaces the random ones, if it is of this kind.
    pub fn from_environment() -> Option<Self> {
        let text = std::env::var("ARIL_CASE").ok()?;
        let mut cases: BTreeMap<String, serde_json::Value> =
            serde_json::from_str(&text).expect("ARIL_CASE is a printed case");
        Some(serde_json::from_value(cases.remove(L::KIND)?).expect("ARIL_CASE is a printed case"))
    }

    /// The command that runs the case again.
    pub fn replay(&self) -> String {
        let text = serde_json::to_string(&BTreeMap::from([(L::KIND, self)])).expect("a case is plain data");
        format!("ARIL_CASE='{text}'")
    }

    /// The layer in a model, between others.
    pub fn model(&self) -> (Model, L::Id) {
        let mut spec = ModelSpec::new();
        spec.linear(neighbour("before")).unwrap();
        let (id, shard) = self.describe(&mut spec);
        spec.linear(neighbour("behind")).unwrap();
        (spec.shard(shard).unwrap(), id)
    }

    /// The factors of one more adapter.
    pub fn pairs_of(&self, lora: &L::Lora, rng: &mut StdRng) -> L::Pairs {
        self.layer.pairs_of(self.values, lora, rng)
    }

    /// By adapter.
    pub fn pairs(&self, rng: &mut StdRng) -> Vec<L::Pairs> {
        self.loras().iter().map(|lora| self.pairs_of(lora, rng)).collect()
    }

    pub fn world<T: Element>(&self) -> World<T, L> {
        let mut rng = StdRng::seed_from_u64(self.seed);
        let pairs = self.pairs(&mut rng);
        let adapters = self.loras().iter().zip(&pairs).map(|(lora, pairs)| self.load(lora, pairs)).collect();
        World { adapters, ..self.world_of(pairs, &mut rng) }
    }

    /// With these factors, but without adapters.
    pub fn world_of<T: Element>(&self, pairs: Vec<L::Pairs>, rng: &mut StdRng) -> World<T, L> {
        let (model, id) = self.model();
        let mut world = World {
            model,
            id,
            adapters: Vec::new(),
            pairs,
            slots: self.slots.clone(),
            scales: self.half_scales.as_deref().map(halved),
            num_slots: self.num_slots(),
            max_rank: self.max_rank(),
            x: self.x().buffer(self.values, rng),
            y: self.y().buffer(self.values, rng),
            out: self.out().buffer(self.values, rng),
        };
        L::poison(self, &mut world);
        world
    }

    /// Runs the case and compares the result with the reference's.
    pub fn check<T: Element>(&self, subject: &mut impl Subject<L>) -> Result<(), TestCaseError> {
        let world = self.world::<T>();
        compare(self.target(), &subject.run(self, &world), &world.expected(self), &self.replay())
    }

    /// Runs the case with one `y` of all slices and with one of each, which must give the same bits.
    pub fn check_separate<T: Element>(&self, subject: &mut impl Subject<L>) -> Result<(), TestCaseError> {
        let world = self.world::<T>();
        let [fused, separate] = [false, true].map(|separate| subject.run(&Self { separate, ..self.clone() }, &world));
        prop_assert!(
            bytemuck::cast_slice::<T, u8>(&fused) == bytemuck::cast_slice::<T, u8>(&separate),
            "separate slices differ\n{}",
            self.replay()
        );
        Ok(())
    }

    /// Runs the case with an infinity in every row of `x` that is read, so that each `A x` is infinite. What is written
    /// must be infinite or NaN where the reference is, and nowhere else.
    pub fn check_infinities<T: Element>(&self, subject: &mut impl Subject<L>) -> Result<(), TestCaseError> {
        let mut world = self.world::<T>();
        for row in 0..self.x().rows {
            let first = &mut world.x[self.x().at(row, 0)];
            if first.to_f32().is_finite() {
                *first = T::from_f32(f32::INFINITY);
            }
        }
        let mut infinities = 0;
        for (at, (got, expected)) in subject.run(self, &world).iter().zip(world.expected(self)).enumerate() {
            let Expected::Within(expected, _) = expected else { continue };
            let got = f64::from(got.to_f32());
            let good = if expected.is_finite() {
                got.is_finite()
            } else {
                got == expected || got.is_nan() && expected.is_nan()
            };
            prop_assert!(good, "element {at} is {got}, not {expected}\n{}", self.replay());
            infinities += usize::from(expected.is_infinite());
        }
        prop_assert!(infinities > 0, "the case has no infinite sum\n{}", self.replay());
        Ok(())
    }
}

/// Checks that are of layers whose results have a row for each token.
impl<L: Layer> Case<L> {
    /// The bits of each token's row are the same without the tokens behind the first ones of `fewer`, and of each
    /// `every`th where all others are the base model's. Returns the rows.
    pub fn check_invariance<T: Element>(
        &self,
        subject: &mut impl Subject<L>,
        fewer: &[usize],
        every: usize,
    ) -> Result<Vec<T>, TestCaseError> {
        let (world, place) = (self.world::<T>(), self.target());
        let all = subject.run(self, &world);
        let bits = |values: &[T]| bytemuck::cast_slice::<T, u8>(values).to_vec();
        for tokens in fewer.iter().copied().filter(|&tokens| tokens < self.num_tokens()) {
            let (mut case, mut part) = (self.clone(), self.world::<T>());
            case.slots.truncate(tokens);
            part.slots.truncate(tokens);
            part.scales.iter_mut().for_each(|scales| scales.truncate(tokens));
            let (rows, part) = (..place.at(tokens, 0), subject.run(&case, &part));
            prop_assert!(bits(&all[rows]) == bits(&part[rows]), "{tokens} tokens differ\n{}", self.replay());
        }
        let mut alone = self.world::<T>();
        for token in (0..self.num_tokens()).step_by(every) {
            alone.slots.fill(-1);
            alone.slots[token] = world.slots[token];
            let (row, alone) = (place.at(token, 0)..place.at(token + 1, 0), subject.run(self, &alone));
            prop_assert!(bits(&all[row.clone()]) == bits(&alone[row]), "token {token} alone\n{}", self.replay());
        }
        Ok(all)
    }

    /// NaN in the rows of one token, all of whose results are NaN, changes no other element.
    pub fn check_nan<T: Element>(&self, subject: &mut impl Subject<L>) -> Result<(), TestCaseError> {
        let mut world = self.world::<T>();
        let expected = subject.run(self, &world);
        let Some(token) = (self.seed as usize).checked_rem(self.num_tokens()) else { return Ok(()) };
        for (buffer, place) in [(&mut world.x, self.x()), (&mut world.y, self.y())] {
            buffer[place.at(token, 0)..][..place.cols].fill(T::from_f32(f32::NAN));
        }
        let (mut got, first) = (subject.run(self, &world), self.target().at(token, 0));
        let row = first..first + self.target().cols;
        prop_assert!(got[row.clone()].iter().all(|y| y.to_f32().is_nan()), "NaN is lost\n{}", self.replay());
        got[row.clone()].copy_from_slice(&expected[row]);
        let is_same = bytemuck::cast_slice::<T, u8>(&got) == bytemuck::cast_slice::<T, u8>(&expected);
        prop_assert!(is_same, "NaN has spread\n{}", self.replay());
        Ok(())
    }
}

/// The slots with these numbers and the adapters that are there, which a table says. All other numbers are the base
/// model.
pub fn loaded_slots(numbers: &[i32], get: impl Fn(usize) -> Option<SlotInfo>) -> Vec<Slot> {
    let loaded = |&number: &i32| usize::try_from(number).ok().and_then(&get).map_or(Slot::BASE, |info| info.slot);
    numbers.iter().map(loaded).collect()
}

impl<T: Element, L: Layer> World<T, L> {
    /// A batch of these slots with the case's scales.
    pub fn batch_of<'a>(&'a self, slots: &'a [Slot]) -> Batch<'a> {
        match &self.scales {
            Some(scales) => Batch::new(slots).with_scales(scales).unwrap(),
            None => Batch::new(slots),
        }
    }

    /// The slots of the batch with the adapters that are there. The raw API and memory of the device take the numbers
    /// instead.
    pub fn loaded_slots(&self, get: impl Fn(usize) -> Option<SlotInfo>) -> Vec<Slot> {
        loaded_slots(&self.slots, get)
    }

    /// The tightest bounds for a batch of `num_tokens` tokens, and at least one token and slot.
    pub fn capacity(&self, max_tokens: usize) -> Capacity {
        Capacity::tokens(max_tokens.max(1)).slots(self.num_slots.max(1)).rank(self.max_rank)
    }

    /// The initial contents of the written buffer.
    pub fn target(&self, case: &Case<L>) -> &[T] {
        if case.has_out() { &self.out } else { &self.y }
    }

    /// The reference's result.
    pub fn expected(&self, case: &Case<L>) -> Vec<Expected<T>> {
        let mut expected: Vec<_> = self.target(case).iter().map(|&value| Expected::Untouched(value)).collect();
        L::expect(case, self, &mut expected);
        expected
    }
}

/// Sets the rows of a matrix that are not read to NaN.
pub fn poison_rows<T: Element>(buffer: &mut [T], place: Place, is_read: impl Fn(usize) -> bool) {
    for row in (0..place.rows).filter(|&row| !is_read(row)) {
        buffer[place.at(row, 0)..][..place.cols].fill(T::from_f32(f32::NAN));
    }
}

pub fn halved(halves: &[i8]) -> Vec<f32> {
    halves.iter().map(|&half| f32::from(half) / 2.0).collect()
}

/// Any case of up to `max_tokens` tokens. `layer` chooses a layer for the numbers of tokens and adapters. Strategies are
/// boxed, here and where layers are chosen: without optimisation, what they hold would not fit on a thread's stack.
pub fn cases<L: Layer + 'static, S: Strategy<Value = L> + 'static>(
    max_tokens: usize,
    layer: impl Fn(usize, usize) -> S + 'static,
) -> BoxedStrategy<Case<L>> {
    // Some tables have more slots than kernels load descriptors of at once.
    let empty_slots = prop_oneof![4 => 0..=2_usize, 1 => 30..=70_usize];
    let cases =
        (0..=max_tokens, 0..=5_usize, empty_slots).prop_flat_map(move |(num_tokens, num_adapters, empty_slots)| {
            let layer = layer(num_tokens, num_adapters).boxed();
            let slots = indices(num_adapters + empty_slots.min(2), num_tokens);
            let scales = prop::option::of(prop::collection::vec(-4..=4_i8, num_tokens));
            let dtype = prop_oneof![Just(Dtype::BF16), Just(Dtype::F16), Just(Dtype::F32)];
            let values = prop_oneof![Just(Values::Exact), Just(Values::Rounded)];
            let gaps = || prop::array::uniform3(prop_oneof![Just(0), 0..9_usize]);
            (layer, slots, scales, dtype, values, gaps(), gaps(), any::<u64>(), any::<bool>()).prop_map(
                move |(layer, slots, half_scales, dtype, values, offsets, gaps, seed, separate)| Case {
                    layer,
                    dtype,
                    values,
                    empty_slots,
                    slots,
                    half_scales,
                    offsets,
                    gaps,
                    seed,
                    separate,
                },
            )
        });
    cases.boxed()
}

/// Any number of features, small or large, a multiple of 8 or not.
pub fn features(max: usize) -> impl Strategy<Value = usize> {
    prop_oneof![1..=max, 1..=20_usize, (1..=max / 8).prop_map(|n| n * 8)]
}

/// Ids mostly below `end`, sometimes -1 or out of range; or all equal; or all different, as far as possible.
pub fn indices(end: usize, len: usize) -> impl Strategy<Value = Vec<i32>> {
    let end = end as i32;
    let stray = prop_oneof![Just(i32::MIN), Just(i32::MAX), Just(end), Just(-2), Just(-1)];
    let any = prop_oneof![6 => 0..end.max(1), 1 => Just(-1), 1 => stray];
    let each = (0..end.max(1)).prop_map(move |first| (0..len as i32).map(|i| (first + i) % end.max(1)).collect());
    prop_oneof![
        4 => prop::collection::vec(any, len),
        1 => (0..end.max(1)).prop_map(move |one| vec![one; len]),
        1 => each,
    ]
}
