//! Tokens and routes as described by a batch and by a router's choices.

use aril::{
    Slot,
    error::OperandError,
    routing::{Batch, Segments, TopK},
};

const IDS: [i32; 6] = [5, 0, -1, 2, 3, 3];
const WEIGHTS: [f32; 6] = [0.75, 0.25, 0.5, 0.125, 2.0, 3.0];

/// The weights of a route: on the experts' input, on the rows of down, and in the combine.
fn weights(top_k: &TopK<'_>, route: usize) -> [f32; 3] {
    [top_k.input_weight(route), top_k.row_weight(route), top_k.output_weight(route)]
}

#[test]
fn a_routes_weight_is_applied_in_one_place() {
    let plain = TopK::new(&IDS, 2).unwrap().scaled(4.0);
    let weighted = plain.with_weights(&WEIGHTS).unwrap();
    for (route, &weight) in WEIGHTS.iter().enumerate() {
        assert_eq!(weights(&plain, route), [1.0, 1.0, 4.0]);
        assert_eq!(weights(&weighted, route), [1.0, 1.0, 4.0 * weight]);
        assert_eq!(weights(&weighted.on_input(), route), [weight, 1.0, 4.0]);
        assert_eq!(weights(&weighted.on_rows(), route), [1.0, weight, 4.0]);
    }
    assert_eq!((plain.weights(), weighted.weights(), weighted.factor()), (None, Some(&WEIGHTS[..]), 4.0));
    assert_eq!(TopK::new(&IDS, 2).unwrap().factor(), 1.0);
}

#[test]
fn a_route_has_an_expert_and_a_row_if_they_are_here() {
    let top_k = TopK::new(&IDS, 3).unwrap();
    assert_eq!((top_k.num_tokens(), top_k.num_routes(), top_k.top_k(), top_k.ids()), (2, 6, 3, &IDS[..]));
    let experts = |num_held| [0, 1, 2, 3, 4, 5].map(|route| top_k.expert(route, num_held));
    assert_eq!(experts(6), [Some(5), Some(0), None, Some(2), Some(3), Some(3)]);
    assert_eq!(experts(3), [None, Some(0), None, Some(2), None, None]);
    assert_eq!((top_k.rows(), [0, 5].map(|route| top_k.row(route))), (None, [Some(0), Some(5)]));
    let rows = [5, 0, 6, -1, i32::MIN, 3];
    let sorted = top_k.with_rows(&rows).unwrap();
    assert_eq!(sorted.rows(), Some(&rows[..]));
    assert_eq!([0, 1, 2, 3, 4, 5].map(|route| sorted.row(route)), [Some(5), Some(0), None, None, None, Some(3)]);
}

#[test]
fn choices_that_are_not_of_each_route_are_refused() {
    for top_k in [0, 4] {
        assert_eq!(TopK::new(&IDS, top_k).unwrap_err(), OperandError::TopK { ids: 6, top_k });
    }
    assert_eq!(TopK::new(&[], 4).unwrap().num_tokens(), 0);
    let top_k = TopK::new(&IDS, 2).unwrap();
    let refused = |operand, got| OperandError::Routes { operand, got, want: 6 };
    assert_eq!(top_k.with_weights(&WEIGHTS[1..]).unwrap_err(), refused("weights", 5));
    assert_eq!(top_k.with_rows(&[0; 7]).unwrap_err(), refused("rows", 7));
}

#[test]
fn a_batch_has_a_slot_and_a_scale_for_each_token() {
    let slots = [Slot::BASE; 4];
    let batch = Batch::new(&slots);
    assert_eq!((batch.num_tokens(), batch.slots(), batch.scales(), batch.scale(2)), (4, &slots[..], None, 1.0));
    let scales = [0.5, -2.0, 0.0, 7.0];
    let scaled = batch.with_scales(&scales).unwrap();
    assert_eq!((scaled.scales(), [0, 1, 2, 3].map(|token| scaled.scale(token))), (Some(&scales[..]), scales));
    let error = batch.with_scales(&scales[..3]).unwrap_err();
    assert_eq!(error, OperandError::Length { operand: "scales", got: 3, want: 4 });
    assert!(!batch.has_adapters() && !Batch::new(&[]).has_adapters());
    assert_eq!(Slot::BASE.to_string(), "the base model's slot");
}

#[test]
fn segments_have_the_tokens_of_a_slot() {
    let slots = [-1, 3, 1, 3];
    let segments = Segments::new(&slots, 4);
    let listed: Vec<_> = segments.iter().collect();
    assert_eq!(listed, [(1, &[2_usize][..]), (3, &[1, 3])]);
    assert_eq!((segments.len(), segments.is_empty()), (2, false));
    assert_eq!(Segments::new(&slots, 3).len(), 1);
    assert!(Segments::new(&slots, 1).is_empty());
}
