//! The CPU's operations against the reference.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and its numbers are small"
)]

mod common;

use aril::{
    DType, Element, Slot,
    adapter::{Adapter, Tensor},
    cpu::{LoraEmbedding, LoraLinear, Matrix, MatrixMut, Workspace},
    error::{LoadError, OperandError, SlotError},
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::{Capacity, PlanError},
    routing::{Batch, Segments},
};
use common::{
    cases::{Case, Site, Sizes, Subject, World, cases, check, check_overwriting},
    cpu::table,
};
use proptest::prelude::*;

/// `add_delta`, its halves apart, or `write_delta`.
#[derive(Default)]
struct Cpu {
    apart: bool,
    overwrites: bool,
}

impl Subject for Cpu {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let (tokens, mut buffer) = (case.num_tokens(), world.y.clone());
        let weights = table(&world.model, T::DTYPE, world.capacity(tokens), &world.adapters);
        let (batch, mut workspace) = (world.batch(), Workspace::default());
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let x = Matrix::strided(&world.x[case.x_offset..], tokens, case.in_features(), case.x_stride()).unwrap();
        let y_cols = case.slices().iter().sum();
        let y = MatrixMut::strided(&mut buffer[case.y_offset..], tokens, y_cols, case.y_stride()).unwrap();
        match world.site {
            Site::Embedding(id) => {
                let layer = LoraEmbedding::new(&weights, id).unwrap();
                layer.add_delta(&mut step, &world.token_ids, y).unwrap();
            }
            Site::Linear(id) => {
                let layer = LoraLinear::new(&weights, id).unwrap();
                if self.apart {
                    layer.shrink(&mut step, x).unwrap();
                    layer.expand(&mut step, y).unwrap();
                } else if self.overwrites {
                    layer.write_delta(&mut step, x, y).unwrap();
                } else {
                    layer.add_delta(&mut step, x, y).unwrap();
                }
            }
        }
        buffer
    }
}

proptest! {
    #[test]
    fn cpu_agrees_with_the_reference(case in cases(Sizes::SMALL), apart: bool) {
        let case = Case::from_environment().unwrap_or(case);
        for_dtype!(case, check(&mut Cpu { apart, ..Cpu::default() }, &case))?;
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
                alone.slots.fill(Slot::BASE);
                alone.slots[token] = world.slots[token];
                let alone = Cpu::default().run(case, &alone);
                let row = case.y_offset + token * case.y_stride()..case.y_offset + (token + 1) * case.y_stride();
                let bits = |y: &[T]| bytemuck::cast_slice::<T, u8>(&y[row.clone()]).to_vec();
                prop_assert!(bits(&together) == bits(&alone), "token {token}\n{}", case.replay());
            }
            Ok(())
        }
        for_dtype!(case, run(&case))?;
    }

    /// Nothing is computed for a batch without adapters, whatever x holds: an engine may skip it.
    #[test]
    fn a_batch_without_adapters_may_be_skipped(case in cases(Sizes::SMALL), apart: bool) {
        fn run<T: Element>(case: &Case, apart: bool) -> Result<(), TestCaseError> {
            let mut world = case.world::<T>();
            world.x.fill(T::from_f32(f32::NAN));
            prop_assert!(!Batch::new(&world.slots).has_adapters());
            let y = Cpu { apart, ..Cpu::default() }.run(case, &world);
            prop_assert!(bytemuck::cast_slice::<T, u8>(&y) == bytemuck::cast_slice::<T, u8>(&world.y), "{}", case.replay());
            Ok(())
        }
        let case = Case { slots: case.slots.iter().map(|slot| slot | i32::MIN).collect(), ..case };
        for_dtype!(case, run(&case, apart))?;
    }

    #[test]
    fn segments_are_a_stable_sort(slots in prop::collection::vec(-3..7_i32, 0..60), num_slots in 0..6_usize) {
        let slots: Vec<Slot> = slots.into_iter().map(bytemuck::cast).collect();
        let mut expected: Vec<(usize, usize)> = Vec::new();
        for slot in 0..num_slots {
            expected.extend((0..slots.len()).filter(|&t| slots[t].index() == Some(slot)).map(|t| (slot, t)));
        }
        let segments = Segments::new(&slots, num_slots);
        let got: Vec<_> = segments
            .iter()
            .flat_map(|(slot, tokens)| tokens.iter().map(move |&token| (slot.index().unwrap(), token)))
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
    Capacity::tokens(1).slots(1).rank(4)
}

/// A table is as wide as the model it was made for: a layer of another model would read past its adapters.
#[test]
fn weights_of_another_model_are_refused() {
    let [first, second] = [0, 1].map(|rank| TpRank::new(rank, 2).unwrap());
    let mut spec = ModelSpec::new();
    let (own, id) = model(&mut spec, layer(), first);
    let weights = table(&own, DType::F32, capacity(), &[]);
    let (slots, mut workspace) = ([Slot::new(0)], Workspace::default());
    let batch = Batch::new(&slots);
    let mut add = |of: &Model, id| {
        let (layer, mut y) = (LoraLinear::new(&table(of, DType::F32, capacity(), &[]), id).unwrap(), [7.0; 2]);
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let (x, y_matrix) = (Matrix::new(&[1.0; 2], 1, 2).unwrap(), MatrixMut::new(&mut y, 1, 2).unwrap());
        let results = [layer.add_delta(&mut step, x, y_matrix), layer.shrink(&mut step, x)];
        assert_eq!((&results[0], y), (&results[1], [7.0; 2]));
        results[0].clone()
    };
    assert_eq!(add(&own, id), Ok(()));
    assert_eq!(add(&spec.shard(first).unwrap(), id), Ok(()));
    assert_eq!(add(&spec.shard(second).unwrap(), id), Err(OperandError::Model));
    // Of the same description, before a layer was added to it and after.
    let (grown, _) = model(&mut spec, Linear::new("n", Parallel::Replicated, 1).slice("q", 1), first);
    assert_eq!(add(&grown, id), Err(OperandError::Model));
    let (equal, other) = model(&mut ModelSpec::new(), layer(), first);
    assert_eq!(add(&equal, other), Err(OperandError::Model));
    assert_eq!(LoraLinear::new(&weights, other).unwrap_err(), PlanError::Foreign);
}

/// Operands are of the table's element type.
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
    assert_eq!(layer.expand(&mut step, MatrixMut::new(&mut y, 1, 4).unwrap()), refused("y"));
    assert_eq!(y, [7.0; 4]);
}

/// What an earlier step left in the workspace is of other tokens, even if it has the right size.
#[test]
fn nothing_is_expanded_that_was_not_shrunk_in_the_step() {
    let (model, id) = model(&mut ModelSpec::new(), layer(), TpRank::SINGLE);
    let weights = table(&model, DType::F32, capacity(), &[]);
    let (layer, batch, mut workspace) =
        (LoraLinear::new(&weights, id).unwrap(), Batch::new(&[Slot::BASE; 3]), Workspace::default());
    let mut y = [7.0; 3 * 4];
    for _ in 0..2 {
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let refused = layer.expand(&mut step, MatrixMut::new(&mut y, 3, 4).unwrap());
        assert_eq!(refused, Err(OperandError::Length { operand: "workspace", got: 0, want: 3 }));
        layer.shrink(&mut step, Matrix::new(&[1.0; 6], 3, 2).unwrap()).unwrap();
        layer.expand(&mut step, MatrixMut::new(&mut y, 3, 4).unwrap()).unwrap();
    }
    assert_eq!(y, [7.0; 3 * 4]);
}

/// The same shapes, but another rank's part of the whole.
#[test]
fn an_adapter_planned_for_another_rank_is_refused() {
    let mut spec = ModelSpec::new();
    spec.linear(layer()).unwrap();
    let [first, second] = [0, 1].map(|rank| spec.shard(TpRank::new(rank, 2).unwrap()).unwrap());
    let tensor = |shape: [usize; 2]| Tensor::new(DType::F32, shape, vec![0; shape[0] * shape[1] * 4]).unwrap();
    let tensors = [("m.q.lora_A.weight", tensor([1, 2])), ("m.q.lora_B.weight", tensor([4, 1]))];
    let tensors = tensors.map(|(name, tensor)| (name.to_owned(), tensor));
    let adapter = Adapter::from_tensors(r#"{"peft_type": "LORA", "lora_alpha": 1}"#, tensors).unwrap();
    let weights = table(&first, DType::F32, capacity(), std::slice::from_ref(&adapter));
    let error = weights.load(Slot::new(0), &adapter.plan(&second, DType::F32).unwrap()).unwrap_err();
    assert!(matches!(error, LoadError::Slot(SlotError::Model)), "{error}");
    assert!(weights.get(Slot::new(0)).is_some());
}
