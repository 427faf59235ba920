//! The fused linear on the CPU against the reference.
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
    cpu::{FusedLinear, Matrix, MatrixMut, WeightTable},
    error::OperandError,
    model::{Linear, ModelSpec, Parallel, TpRank},
    routing::Batch,
};
use common::{
    cases::{Case, Site, Sizes, compare},
    forward::{Base, forward_cases},
};
use proptest::prelude::*;

fn check<T: Element>(case: &Case, accumulates: bool) -> Result<(), TestCaseError> {
    let (world, base) = (case.world::<T>(), Base::<T>::of(case));
    let Site::Linear(id) = world.site else { panic!("the case is of a linear layer") };
    let mut weights = WeightTable::<T>::new(&world.model, world.num_slots, world.max_rank);
    for (slot, adapter) in world.adapters.iter().enumerate() {
        weights.load(Slot::new(slot as u16), &adapter.plan(&world.model, T::DTYPE).unwrap()).unwrap();
    }
    let batch = match &world.scales {
        Some(scales) => Batch::new(&world.slots).with_scales(scales).unwrap(),
        None => Batch::new(&world.slots),
    };
    let slices: Vec<_> = base
        .slices
        .iter()
        .map(|(place, w)| Matrix::strided(w, place.rows, place.cols, place.stride).unwrap())
        .collect();
    let layer = FusedLinear::new(&world.model, id, &slices).unwrap();
    let layer = match &base.bias {
        Some(bias) => layer.with_bias(bias).unwrap(),
        None => layer,
    };
    let (tokens, mut buffer) = (case.num_tokens(), world.y.clone());
    let x = Matrix::strided(&world.x[case.x_offset..], tokens, case.in_features(), case.x_stride()).unwrap();
    let y_cols = case.slices().iter().sum();
    let y = MatrixMut::strided(&mut buffer[case.y_offset..], tokens, y_cols, case.y_stride()).unwrap();
    if accumulates {
        layer.accumulate(x, y, &weights, &batch).unwrap();
    } else {
        layer.forward(x, y, &weights, &batch).unwrap();
    }
    compare(case.y_place(), &buffer, &base.expected(case, &world, accumulates), &case.replay())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_fused_linear_agrees_with_the_reference(case in forward_cases(Sizes::SMALL), accumulates: bool) {
        for_dtype!(case, check(&case, accumulates))?;
    }
}

#[test]
fn operands_of_another_shape_are_refused_by_name() {
    let mut model = ModelSpec::new(TpRank::SINGLE);
    let id = model.linear(Linear::new("layer", Parallel::Replicated, 8).slice("q", 2).slice("v", 1)).unwrap();
    let data = [1.0_f32; 16];
    let w = |rows, cols| Matrix::new(&data, rows, cols).unwrap();
    let length = |operand, got, want| Err(OperandError::Length { operand, got, want });
    let new = |slices: &[Matrix<'_, f32>]| FusedLinear::new(&model, id, slices).map(|_| ());
    assert_eq!(new(&[w(2, 8)]), length("W", 1, 2));
    assert!(matches!(new(&[w(2, 8), w(2, 8)]), Err(OperandError::Shape { operand: "W", rows: 2, want_rows: 1, .. })));
    let layer = FusedLinear::new(&model, id, &[w(2, 8), w(1, 8)]).unwrap();
    assert_eq!(layer.with_bias(&data[..2]).map(|_| ()), length("bias", 2, 3));
}
