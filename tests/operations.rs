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
    Element, Slot,
    cpu::{LoraEmbedding, LoraLinear, Matrix, MatrixMut, WeightTable, Workspace},
    routing::{Batch, Segments},
};
use common::cases::{Case, Site, Sizes, Subject, World, cases, check};
use proptest::prelude::*;

/// `add_delta`, or its halves apart.
struct Cpu {
    apart: bool,
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
            Site::Linear(id) => LoraLinear::new(&world.model, id).add_delta(x, y, &weights, &batch).unwrap(),
        }
        buffer
    }
}

proptest! {
    #[test]
    fn cpu_agrees_with_the_reference(case in cases(Sizes::SMALL), apart: bool) {
        let case = Case::from_environment().unwrap_or(case);
        for_dtype!(case, check(&mut Cpu { apart }, &case))?;
    }

    /// A token's result has the same bits alone as in any batch.
    #[test]
    fn cpu_is_batch_invariant(case in cases(Sizes { max_tokens: 8, ..Sizes::SMALL })) {
        fn run<T: Element>(case: &Case) -> Result<(), TestCaseError> {
            let world = case.world::<T>();
            let together = Cpu { apart: false }.run(case, &world);
            for token in 0..case.num_tokens() {
                let mut alone = case.world::<T>();
                alone.slots.fill(Slot::BASE);
                alone.slots[token] = world.slots[token];
                let alone = Cpu { apart: false }.run(case, &alone);
                let row = case.y_offset + token * case.y_stride()..case.y_offset + (token + 1) * case.y_stride();
                let bits = |y: &[T]| bytemuck::cast_slice::<T, u8>(&y[row.clone()]).to_vec();
                prop_assert!(bits(&together) == bits(&alone), "token {token}\n{}", case.replay());
            }
            Ok(())
        }
        for_dtype!(case, run(&case))?;
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
