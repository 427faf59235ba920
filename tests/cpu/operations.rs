//! The CPU's operations against the reference.

use crate::{
    common::{
        adapters::{self, Lora},
        case::Subject,
        cpu::{matrix, matrix_mut, slots, table},
        dense::{Case, Dense, Site, Sizes, World, cases, check_overwriting},
        slices::SliceBuffers,
    },
    for_dtype,
};
use aril::{
    DType, Element, IntoSlices as _, Slices, Slot,
    adapter::{Adapter, AdapterError},
    cpu::{LoraEmbedding, LoraLinear, Matrix, MatrixMut, WeightTable, Workspace},
    error::{LoadError, OperandError, SlotError},
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::{Capacity, PlanError},
    routing::{Batch, Segments},
};
use proptest::prelude::*;

/// `add_delta`, its halves apart, or `write_delta`.
#[derive(Default)]
struct Cpu {
    apart: bool,
    overwrites: bool,
    /// Separate outputs one after the other, each by the layer with its slice alone.
    one_by_one: bool,
}

impl Subject<Dense> for Cpu {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let tokens = case.num_tokens();
        let weights = table(&world.model, T::DTYPE, world.capacity(tokens), &world.adapters);
        let slots = world.loaded_slots(|slot| weights.get(slot));
        let (batch, mut workspace) = (world.batch_of(&slots), Workspace::default());
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let x = matrix(&world.x, case.x());
        match world.id {
            Site::Embedding(id) => {
                let (layer, mut buffer) = (LoraEmbedding::new(&weights, id).unwrap(), world.y.clone());
                layer.add_delta(&mut step, &case.token_ids(), matrix_mut(&mut buffer, case.y())).unwrap();
                buffer
            }
            Site::Linear(id) => {
                let outputs = SliceBuffers::new(&world.y, case.y(), &case.slices(), case.separate);
                let mut buffers = outputs.buffers();
                let layer = LoraLinear::new(&weights, id).unwrap();
                let mut run = |layer: &LoraLinear, y: Slices<MatrixMut<'_, T>>| {
                    if self.apart {
                        layer.shrink(&mut step, x).unwrap().expand(y).unwrap();
                    } else if self.overwrites {
                        layer.write_delta(&mut step, x, y).unwrap();
                    } else {
                        layer.add_delta(&mut step, x, y).unwrap();
                    }
                };
                if self.one_by_one && case.separate {
                    for (slice, y) in
                        outputs.each(&mut buffers, |buffer, at| matrix_mut(buffer, at)).into_iter().enumerate()
                    {
                        run(&layer.with_slice(slice).unwrap(), y.into_slices());
                    }
                    assert!(layer.with_slice(case.slices().len()).is_none());
                } else {
                    run(&layer, outputs.matrices(&mut buffers, |buffer, place| matrix_mut(buffer, place)));
                }
                outputs.merged(buffers)
            }
        }
    }
}

#[test]
fn infinite_sums_stay_infinite() {
    for case in Case::of_infinities(8, 16) {
        for_dtype!(case.check_infinities(&mut Cpu::default())).unwrap();
    }
}

proptest! {
    #[test]
    fn cpu_agrees_with_the_reference(case in cases(Sizes::SMALL), apart: bool) {
        let case = Case::from_environment().unwrap_or(case);
        for_dtype!(case.check(&mut Cpu { apart, ..Cpu::default() }))?;
    }

    #[test]
    fn separate_outputs_have_the_bits_of_a_fused_one(
        case in cases(Sizes::SMALL),
        apart: bool,
        overwrites: bool,
        one_by_one: bool,
    ) {
        for_dtype!(case.check_separate(&mut Cpu { apart, overwrites, one_by_one }))?;
    }

    #[test]
    fn cpu_overwrites(case in cases(Sizes::SMALL)) {
        let [mut adds, mut overwrites] = [false, true].map(|overwrites| Cpu { overwrites, ..Cpu::default() });
        for_dtype!(case, check_overwriting(&mut adds, &mut overwrites, &case))?;
    }

    /// A token's result has the same bits alone as in any batch.
    #[test]
    fn cpu_is_batch_invariant(case in cases(Sizes { max_tokens: 8, ..Sizes::SMALL })) {
        fn run<T: Element>(case: &Case) -> Result<(), TestCaseError> {
            let world = case.world::<T>();
            let together = Cpu::default().run(case, &world);
            for token in 0..case.num_tokens() {
                let mut alone = case.world::<T>();
                alone.slots.fill(-1);
                alone.slots[token] = world.slots[token];
                let alone = Cpu::default().run(case, &alone);
                let row = case.y().at(token, 0)..case.y().at(token + 1, 0);
                let bits = |y: &[T]| bytemuck::cast_slice::<T, u8>(&y[row.clone()]).to_vec();
                prop_assert!(bits(&together) == bits(&alone), "token {token}\n{}", case.replay());
            }
            Ok(())
        }
        for_dtype!(case, run(&case))?;
    }

    /// A batch without adapters computes nothing, whatever x holds, so an engine may skip it.
    #[test]
    fn a_batch_without_adapters_may_be_skipped(case in cases(Sizes::SMALL), apart: bool) {
        fn run<T: Element>(case: &Case, apart: bool) -> Result<(), TestCaseError> {
            let mut world = case.world::<T>();
            world.x.fill(T::from_f32(f32::NAN));
            prop_assert!(world.slots.iter().all(|&slot| slot < 0));
            let y = Cpu { apart, ..Cpu::default() }.run(case, &world);
            prop_assert!(bytemuck::cast_slice::<T, u8>(&y) == bytemuck::cast_slice::<T, u8>(&world.y), "{}", case.replay());
            Ok(())
        }
        let case = Case { slots: case.slots.iter().map(|slot| slot | i32::MIN).collect(), ..case };
        for_dtype!(case, run(&case, apart))?;
    }

    #[test]
    fn segments_are_a_stable_sort(slots in prop::collection::vec(-3..7_i32, 0..60), num_slots in 0..6_usize) {
        let mut expected: Vec<(usize, usize)> = Vec::new();
        for slot in 0..num_slots {
            expected.extend((0..slots.len()).filter(|&t| usize::try_from(slots[t]) == Ok(slot)).map(|t| (slot, t)));
        }
        let segments = Segments::new(&slots, num_slots);
        let got: Vec<_> = segments
            .iter()
            .flat_map(|(slot, tokens)| tokens.iter().map(move |&token| (slot, token)))
            .collect();
        prop_assert_eq!(got, expected);
        prop_assert!(segments.iter().all(|(_, tokens)| !tokens.is_empty()));
    }
}

fn model(spec: &mut ModelSpec, layer: Linear, tp: TpRank) -> (Model, LinearId) {
    let id = spec.linear(layer).unwrap();
    (spec.shard(tp).unwrap(), id)
}

fn layer() -> Linear {
    Linear::new("m", Parallel::Column, 2).slice("q", 4)
}

fn capacity() -> Capacity {
    Capacity::tokens(4).slots(1).rank(4)
}

/// Exact sums over all of a layer's input.
#[test]
fn many_features_are_all_summed_up() {
    for case in Case::of_many_features(&[1, 5]) {
        for apart in [false, true] {
            for_dtype!(case.check(&mut Cpu { apart, ..Cpu::default() })).unwrap();
        }
    }
}

#[test]
fn every_slice_has_its_delta() {
    for case in Case::of_many_slices(&[1, 6, 19]) {
        for apart in [false, true] {
            for_dtype!(case.check(&mut Cpu { apart, ..Cpu::default() })).unwrap();
        }
    }
}

/// A layer from 3 to 4 + 2 features and an embedding, with tables that fit and tables that do not.
struct Sites {
    model: Model,
    linear: LoraLinear,
    embedding: LoraEmbedding,
    weights: WeightTable,
    other_weights: WeightTable,
}

impl Sites {
    const IN: usize = 3;
    const OUT: usize = 6;
    const VOCAB: usize = 9;

    fn new() -> Self {
        let mut spec = ModelSpec::new();
        let linear = Linear::new("m", Parallel::Replicated, Self::IN).slice("q", 4).slice("k", 2);
        let linear = spec.linear(linear).unwrap();
        let embedding = spec.embedding("embed", Self::VOCAB, Self::OUT).unwrap();
        let model = spec.shard(TpRank::SINGLE).unwrap();
        let mut other = ModelSpec::new();
        other.linear(Linear::new("other", Parallel::Replicated, 2).slice("q", 4)).unwrap();
        let other = other.shard(TpRank::SINGLE).unwrap();
        let [weights, other_weights] = [&model, &other]
            .map(|model| WeightTable::new(model, DType::F32, Capacity::tokens(4).slots(2).rank(4), 1 << 20).unwrap());
        weights.load(0, &adapter().plan(&model, DType::F32).unwrap()).unwrap();
        let linear = LoraLinear::new(&weights, linear).unwrap();
        let embedding = LoraEmbedding::new(&weights, embedding).unwrap();
        Self { model, linear, embedding, weights, other_weights }
    }
}

/// An adapter of rank 1 for every module of [`Sites`], all ones.
fn adapter() -> Adapter {
    let modules = [Lora::linear("m.q", 3, 4, 1), Lora::linear("m.k", 3, 2, 1), Lora::embedding("embed", 9, 6, 1)];
    adapters::adapter(&modules.map(|module| module.of_rows(|_| 1.0)))
}

/// Operands that do not fit are refused by name and leave `y` as it was, in every operation.
#[test]
fn an_error_leaves_y_as_it_was() {
    let sites = Sites::new();
    let slots = slots(&sites.weights, [0, -1, 0]);
    let (batch, shorter) = (Batch::new(&slots), Batch::new(&slots[..2]));
    // The other table has none of the adapters.
    let of_other = Batch::new(&[Slot::BASE; 3]);
    let (tokens, x) = (slots.len(), [1.0_f32; 4 * Sites::IN]);
    let refused = |[x_rows, x_cols]: [usize; 2], y_shape: [usize; 2], batch: &Batch<'_>, is_other: bool| {
        let weights = if is_other { &sites.other_weights } else { &sites.weights };
        let x = || Matrix::new(&x[..x_rows * x_cols], x_rows, x_cols).unwrap();
        let mut errors = Vec::new();
        for way in 0..3 {
            let mut buffer = [7.0_f32; 32];
            let y = MatrixMut::new(&mut buffer, y_shape[0], y_shape[1]).unwrap();
            let mut workspace = Workspace::default();
            let mut step = weights.step(if is_other { &of_other } else { batch }, &mut workspace).unwrap();
            let result = match way {
                0 => sites.linear.add_delta(&mut step, x(), y),
                1 => sites.linear.write_delta(&mut step, x(), y),
                // After a refused shrink there is nothing to expand.
                _ => sites.linear.shrink(&mut step, x()).and_then(|shrunk| shrunk.expand(y)),
            };
            errors.push(result.err());
            assert!(errors[way].is_none() || buffer == [7.0; 32], "way {way}: {:?}", errors[way]);
        }
        errors
    };
    let shape = |operand, [rows, cols]: [usize; 2], [want_rows, want_cols]: [usize; 2]| {
        Some(OperandError::Shape { operand, rows, cols, want_rows, want_cols })
    };
    let [good_x, good_y] = [[tokens, Sites::IN], [tokens, Sites::OUT]];
    assert_eq!(refused(good_x, good_y, &batch, false), [None, None, None]);
    let of_y = |y| shape("y", y, good_y);
    for y in [[2, 6], [4, 6], [3, 5], [3, 7]] {
        assert_eq!(refused(good_x, y, &batch, false), [of_y(y), of_y(y), of_y(y)]);
    }
    for x in [[2, 3], [4, 3], [3, 2], [3, 4]] {
        let of_x = || shape("x", x, good_x);
        assert_eq!(refused(x, good_y, &batch, false), [of_x(), of_x(), of_x()]);
    }
    let model = || Some(OperandError::Model);
    assert_eq!(refused(good_x, good_y, &batch, true), [model(), model(), model()]);
    let of_x = || shape("x", good_x, [2, Sites::IN]);
    assert_eq!(refused(good_x, [2, Sites::OUT], &shorter, false), [of_x(), of_x(), of_x()]);

    let look_up = |ids: &[i32], y_shape: [usize; 2], is_other: bool| {
        let mut buffer = [7.0_f32; 32];
        let y = MatrixMut::new(&mut buffer, y_shape[0], y_shape[1]).unwrap();
        let weights = if is_other { &sites.other_weights } else { &sites.weights };
        let mut workspace = Workspace::default();
        let mut step = weights.step(if is_other { &of_other } else { &batch }, &mut workspace).unwrap();
        let result = sites.embedding.add_delta(&mut step, ids, y);
        assert!(result.is_ok() || buffer == [7.0; 32], "{result:?}");
        result.err()
    };
    assert_eq!(look_up(&[1, 2, 3], good_y, false), None);
    for ids in [&[1, 2][..], &[1, 2, 3, 4]] {
        let length = OperandError::Length { operand: "token_ids", got: ids.len(), want: 3 };
        assert_eq!(look_up(ids, good_y, false), Some(length));
    }
    assert_eq!(look_up(&[1, 2, 3], [3, 5], false), of_y([3, 5]));
    assert_eq!(look_up(&[1, 2, 3], [2, 6], false), of_y([2, 6]));
    assert_eq!(look_up(&[1, 2, 3], good_y, true), model());
}

/// A matrix is inside its memory, and its rows do not overlap.
#[test]
fn matrices_fit_in_their_memory() {
    let mut memory = [0.0_f32; 20];
    let mut make = |rows, cols, row_stride| {
        let read = Matrix::strided(&memory, rows, cols, row_stride).err();
        let written = MatrixMut::strided(&mut memory, rows, cols, row_stride).err();
        [("x", read), ("y", written)]
    };
    for (rows, cols, row_stride) in [(4, 5, 5), (3, 6, 7), (1, 20, 20), (1, 20, 90), (0, 5, usize::MAX), (7, 0, 3)] {
        assert!(make(rows, cols, row_stride).iter().all(|(_, error)| error.is_none()), "{rows} {cols} {row_stride}");
    }
    for (rows, cols, row_stride) in
        [(5, 5, 5), (4, 5, 6), (1, 21, 21), (3, 6, 8), (3, 1, usize::MAX), (usize::MAX, 1, 2)]
    {
        for (operand, error) in make(rows, cols, row_stride) {
            assert_eq!(error, Some(OperandError::Extent { operand, rows, cols, row_stride, len: 20 }));
        }
    }
    for (rows, cols, row_stride) in [(2, 5, 4), (1, 5, 0), (0, 5, 4)] {
        for (operand, error) in make(rows, cols, row_stride) {
            assert_eq!(error, Some(OperandError::Overlap { operand, cols, row_stride }));
        }
    }
}

/// After a refused load, the slot keeps its adapter.
#[test]
fn a_failed_load_leaves_the_slot_as_it_was() {
    let Sites { model, linear, weights, .. } = Sites::new();
    let adapter = adapter();
    let added = |weights: &WeightTable| {
        let mut y = [0.0; 2 * Sites::OUT];
        let x = Matrix::new(&[1.0; 2 * Sites::IN], 2, Sites::IN).unwrap();
        let y_matrix = MatrixMut::new(&mut y, 2, Sites::OUT).unwrap();
        let mut workspace = Workspace::default();
        let slots = slots(weights, [0, 1]);
        let mut step = weights.step(&Batch::new(&slots), &mut workspace).unwrap();
        linear.add_delta(&mut step, x, y_matrix).unwrap();
        [y[0], y[Sites::OUT]]
    };
    assert_eq!(added(&weights), [3.0, 0.0]);
    let refused = |slot: usize, adapter: &Adapter, model: &Model, dtype: DType| {
        let error = weights.load(slot, &adapter.plan(model, dtype).unwrap()).unwrap_err();
        assert_eq!(added(&weights), [3.0, 0.0], "{error}");
        error
    };
    for got in [DType::BF16, DType::F16] {
        let error = refused(0, &adapter, &model, got);
        assert!(
            matches!(error, LoadError::Slot(SlotError::DType { got: is, want: DType::F32 }) if is == got),
            "{error}"
        );
    }
    let adding = |rank: usize, value: f32| adapters::adapter(&[Lora::adding("m.q", [3, 4], rank, value)]);
    let error = refused(0, &adding(5, 3.0), &model, DType::F32);
    assert!(matches!(error, LoadError::Slot(SlotError::Rank { rank: 5, max_rank: 4 })), "{error}");
    let error = refused(0, &adding(4, f32::NAN), &model, DType::F32);
    assert!(matches!(error, LoadError::Adapter(AdapterError::Unrepresentable { .. })), "{error}");
    let error = refused(2, &adapter, &model, DType::F32);
    assert!(matches!(error, LoadError::Slot(SlotError::NoSuchSlot { slot: 2, num_slots: 2 })), "{error}");
    assert!(matches!(weights.unload(2), Err(LoadError::Slot(SlotError::NoSuchSlot { .. }))));
    assert_eq!(added(&weights), [3.0, 0.0]);
    weights.load(1, &adding(4, 3.0).plan(&model, DType::F32).unwrap()).unwrap();
    weights.unload(0).unwrap();
    assert_eq!(added(&weights), [0.0, 3.0]);
}

/// A step has no more tokens than its table is for, and their slots are those of the table. The first fault is named, as on the GPU.
#[test]
fn batches_beyond_the_table_are_refused() {
    let (model, _) = model(&mut ModelSpec::new(), layer(), TpRank::SINGLE);
    let adapter = adapters::adapter(&[Lora::linear("m.q", 2, 4, 1)]);
    let [weights, larger] = [3, 5].map(|num_slots| {
        let capacity = Capacity::tokens(2).slots(num_slots).rank(8);
        let weights = WeightTable::new(&model, DType::F32, capacity, 1 << 16).unwrap();
        let image = adapter.plan(&model, DType::F32).unwrap();
        for slot in 0..num_slots {
            weights.load(slot, &image).unwrap();
        }
        weights
    });
    let [own, last] = slots(&weights, [0, 2]);
    let [equal, third, fourth] = slots(&larger, [2, 3, 4]);
    let refused = |slots: &[Slot]| weights.step(&Batch::new(slots), &mut Workspace::default()).map(drop).err();
    let stray = |slot| Some(OperandError::NoSuchSlot { slot, num_slots: 3 });
    assert_eq!(refused(&[last, Slot::BASE]), None);
    assert_eq!(refused(&[own, third]), stray(third));
    assert_eq!(refused(&[fourth, third]), stray(fourth));
    // It has the number of a slot of the table.
    assert_eq!(refused(&[own, equal]), Some(OperandError::NotLoaded { slot: equal }));
    assert_eq!(refused(&[equal, third]), stray(third));
    let too_many = Some(OperandError::Capacity { what: "the batch's tokens", got: 3, max: 2 });
    assert_eq!(refused(&[Slot::BASE; 3]), too_many);
    assert_eq!(refused(&[third; 3]), too_many);
}

#[test]
fn ranks_are_those_of_distinct_adapters() {
    let (model, _) = model(&mut ModelSpec::new(), layer(), TpRank::SINGLE);
    let capacity = Capacity::tokens(8).slots(4).rank(8);
    let weights = WeightTable::new(&model, DType::F32, capacity, 1 << 16).unwrap();
    let [first, empty, third] = [(0, 3), (1, 1), (2, 5)].map(|(slot, rank)| {
        let adapter = adapters::adapter(&[Lora::linear("m.q", 2, 4, rank)]);
        weights.load(slot, &adapter.plan(&model, DType::F32).unwrap()).unwrap()
    });
    weights.unload(1).unwrap();
    let ranks = |slots: &[Slot]| weights.ranks(&Batch::new(slots));
    assert_eq!((ranks(&[]), ranks(&[Slot::BASE, empty]), ranks(&[first, first])), (0, 0, 3));
    assert_eq!(ranks(&[third, first, Slot::BASE, third, empty, first]), 8);
}

/// Bounds, tolerances and tests use it: half the distance from 1 to the next larger number.
#[test]
fn unit_roundoffs_are_those_of_the_formats() {
    let above_one = |next: f64| (next - 1.0) / 2.0;
    let bf16 = half::bf16::from_bits(half::bf16::ONE.to_bits() + 1).to_f64();
    let f16 = half::f16::from_bits(half::f16::ONE.to_bits() + 1).to_f64();
    assert_eq!(DType::BF16.unit_roundoff(), above_one(bf16));
    assert_eq!(DType::F16.unit_roundoff(), above_one(f16));
    assert_eq!(DType::F32.unit_roundoff(), above_one(f64::from(1.0_f32.next_up())));
}

/// Layers of another model are refused: they would read past the table's rows.
#[test]
fn weights_of_another_model_are_refused() {
    let [first, second] = [0, 1].map(|rank| TpRank::new(rank, 2).unwrap());
    let mut spec = ModelSpec::new();
    let (own, id) = model(&mut spec, layer(), first);
    let weights = table(&own, DType::F32, capacity(), &[]);
    let (slots, mut workspace) = ([Slot::BASE], Workspace::default());
    let batch = Batch::new(&slots);
    let mut add = |of: &Model, id| {
        let (layer, mut y) = (LoraLinear::new(&table(of, DType::F32, capacity(), &[]), id).unwrap(), [7.0; 2]);
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let (x, y_matrix) = (Matrix::new(&[1.0; 2], 1, 2).unwrap(), MatrixMut::new(&mut y, 1, 2).unwrap());
        let results = [layer.add_delta(&mut step, x, y_matrix), layer.shrink(&mut step, x).map(drop)];
        assert_eq!((&results[0], y), (&results[1], [7.0; 2]));
        results[0].clone()
    };
    assert_eq!(add(&own, id), Ok(()));
    assert_eq!(add(&spec.shard(first).unwrap(), id), Ok(()));
    assert_eq!(add(&spec.shard(second).unwrap(), id), Err(OperandError::Model));
    // The same description before and after a layer was added.
    let (grown, _) = model(&mut spec, Linear::new("n", Parallel::Replicated, 1).slice("q", 1), first);
    assert_eq!(add(&grown, id), Err(OperandError::Model));
    let (equal, other) = model(&mut ModelSpec::new(), layer(), first);
    assert_eq!(add(&equal, other), Err(OperandError::Model));
    assert_eq!(LoraLinear::new(&weights, other).unwrap_err(), PlanError::Foreign);
}

/// Operands must have the table's element type.
#[test]
fn operands_of_another_type_are_refused() {
    let (model, id) = model(&mut ModelSpec::new(), layer(), TpRank::SINGLE);
    let weights = table(&model, DType::BF16, capacity(), &[]);
    let (layer, batch, mut workspace) =
        (LoraLinear::new(&weights, id).unwrap(), Batch::new(&[Slot::BASE]), Workspace::default());
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    let mut y = [7.0_f32; 4];
    let (x, y_matrix) = (Matrix::new(&[1.0_f32; 2], 1, 2).unwrap(), MatrixMut::new(&mut y, 1, 4).unwrap());
    let refused = |operand| Err(OperandError::DType { operand, got: DType::F32, want: DType::BF16 });
    assert_eq!(layer.write_delta(&mut step, x, y_matrix), refused("x"));
    assert_eq!(layer.shrink(&mut step, x).map(drop), refused("x"));
    let half = [half::bf16::ONE; 2];
    let shrunk = layer.shrink(&mut step, Matrix::new(&half, 1, 2).unwrap()).unwrap();
    assert_eq!(shrunk.expand(MatrixMut::new(&mut y, 1, 4).unwrap()), refused("y"));
    assert_eq!(y, [7.0; 4]);
}

/// The same shapes, but another rank's part of the whole.
#[test]
fn an_adapter_planned_for_another_rank_is_refused() {
    let mut spec = ModelSpec::new();
    spec.linear(layer()).unwrap();
    let [first, second] = [0, 1].map(|rank| spec.shard(TpRank::new(rank, 2).unwrap()).unwrap());
    let adapter = adapters::adapter(&[Lora::linear("m.q", 2, 4, 1)]);
    let weights = table(&first, DType::F32, capacity(), std::slice::from_ref(&adapter));
    let error = weights.load(0, &adapter.plan(&second, DType::F32).unwrap()).unwrap_err();
    assert!(matches!(error, LoadError::Slot(SlotError::Model)), "{error}");
    assert!(weights.get(0).is_some());
}
