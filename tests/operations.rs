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
    adapter::{Adapter, AdapterError, Tensor},
    cpu::{LoraEmbedding, LoraLinear, Matrix, MatrixMut, WeightTable, Workspace},
    error::{OperandError, SlotError},
    model::{Linear, ModelSpec, Parallel, TpRank},
    routing::{Batch, Segments},
};
use common::cases::{Case, Site, Sizes, Subject, World, cases, check, check_overwriting};
use proptest::prelude::*;

/// `add_delta`, its halves apart, or `write_delta`.
#[derive(Default)]
struct Cpu {
    apart: bool,
    overwrites: bool,
}

impl Subject for Cpu {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let mut weights = WeightTable::<T>::new(&world.model, world.num_slots, world.max_rank);
        for (slot, adapter) in world.adapters.iter().enumerate() {
            let image = adapter.plan(&world.model, T::DTYPE).unwrap();
            weights.load(Slot::new(slot as u16), &image).unwrap();
        }
        let batch = match &world.scales {
            Some(scales) => Batch::new(&world.slots).with_scales(scales).unwrap(),
            None => Batch::new(&world.slots),
        };
        let (tokens, mut buffer) = (case.num_tokens(), world.y.clone());
        let x = Matrix::strided(&world.x[case.x_offset..], tokens, case.in_features(), case.x_stride()).unwrap();
        let y_cols = case.slices().iter().sum();
        let y = MatrixMut::strided(&mut buffer[case.y_offset..], tokens, y_cols, case.y_stride()).unwrap();
        match world.site {
            Site::Embedding(id) => {
                LoraEmbedding::new(&world.model, id).add_delta(&world.token_ids, y, &weights, &batch).unwrap();
            }
            Site::Linear(id) if self.apart => {
                let (layer, mut workspace) = (LoraLinear::new(&world.model, id), Workspace::default());
                layer.shrink(x, &weights, &batch, &mut workspace).unwrap();
                layer.expand(y, &weights, &batch, &workspace).unwrap();
            }
            Site::Linear(id) if self.overwrites => {
                LoraLinear::new(&world.model, id).write_delta(x, y, &weights, &batch).unwrap();
            }
            Site::Linear(id) => LoraLinear::new(&world.model, id).add_delta(x, y, &weights, &batch).unwrap(),
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

/// A table is as wide as the model it was made for: a layer of another model would read past its adapters.
#[test]
fn weights_of_another_model_are_refused() {
    let model = |path, parallel, rank| {
        let mut model = ModelSpec::new(TpRank::new(rank, 2).unwrap());
        let id = model.linear(Linear::new(path, parallel, 8).slice("q", 8)).unwrap();
        (model, id)
    };
    let (table, own) = model("m", Parallel::Replicated, 0);
    let weights = WeightTable::<f32>::new(&table, 1, 4);
    let (x, slots) = ([1.0; 8], [Slot::new(0)]);
    let launch = |(model, id): (ModelSpec, _), features| {
        let (x, mut y) = (Matrix::new(&x[..features], 1, features).unwrap(), [0.0; 8]);
        LoraLinear::new(&model, id).add_delta(x, MatrixMut::new(&mut y, 1, 8).unwrap(), &weights, &Batch::new(&slots))
    };
    assert_eq!(launch((table.clone(), own), 8), Ok(()));
    assert_eq!(launch(model("m", Parallel::Row, 0), 4), Err(OperandError::Model));
    assert_eq!(launch(model("n", Parallel::Replicated, 0), 8), Err(OperandError::Model));
    assert_eq!(launch(model("m", Parallel::Replicated, 1), 8), Ok(()));
}

/// The same shapes, but another rank's part of the whole.
#[test]
fn an_adapter_planned_for_another_rank_is_refused() {
    let model = |rank| {
        let mut model = ModelSpec::new(TpRank::new(rank, 2).unwrap());
        model.linear(Linear::new("m", Parallel::Column, 2).slice("q", 4)).unwrap();
        model
    };
    let tensor = |shape: [usize; 2]| Tensor::new(DType::F32, shape, vec![0; shape[0] * shape[1] * 4]).unwrap();
    let tensors = [("m.q.lora_A.weight", tensor([1, 2])), ("m.q.lora_B.weight", tensor([4, 1]))];
    let tensors = tensors.map(|(name, tensor)| (name.to_owned(), tensor));
    let adapter = Adapter::from_tensors(r#"{"peft_type": "LORA", "lora_alpha": 1}"#, tensors).unwrap();
    let mut weights = WeightTable::<f32>::new(&model(0), 1, 4);
    let error = weights.load(Slot::new(0), &adapter.plan(&model(1), DType::F32).unwrap()).unwrap_err();
    assert!(matches!(error, AdapterError::Slot(SlotError::Model)), "{error}");
    weights.load(Slot::new(0), &adapter.plan(&model(0), DType::F32).unwrap()).unwrap();
}
