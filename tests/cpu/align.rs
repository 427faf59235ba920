//! Routes in blocks of one slot and one expert each, on the host, and the bounds on their number.

use crate::common::align::{Case, steps};
use aril::{
    Slot,
    error::OperandError,
    plan::{AlignCapacity, MAX_SLOTS, PlanError, RouteCapacity},
    routing::{AlignedRoutes, Batch, TopK},
};
use proptest::prelude::*;

/// The blocks by brute force: for each slot and expert, a pass over all routes.
fn expected(case: &Case) -> (Vec<usize>, Vec<usize>, Vec<Slot>) {
    let (top_k, slots) = (case.top_k(), case.slots());
    let (mut routes, mut experts, mut block_slots) = (Vec::new(), Vec::new(), Vec::new());
    for expert in 0..case.num_experts {
        for slot in 0..case.num_slots {
            let mut left = 0;
            for route in 0..top_k.num_routes() {
                let is_here = top_k.expert(route, case.num_experts) == Some(expert) && top_k.row(route).is_some();
                if !is_here || slots[route / case.top_k].index() != Some(slot) {
                    continue;
                }
                if left == 0 {
                    experts.push(slot * case.num_experts + expert);
                    block_slots.push(slots[route / case.top_k]);
                    left = case.block_size;
                }
                routes.push(route);
                left -= 1;
            }
            routes.extend(vec![top_k.num_routes(); left]);
        }
    }
    (routes, experts, block_slots)
}

proptest! {
    #[test]
    fn routes_are_put_in_blocks(steps in steps(1, 60)) {
        for case in steps {
            let aligned = case.aligned();
            let (routes, experts, slots) = expected(&case);
            prop_assert_eq!((aligned.routes(), aligned.block_experts(), aligned.block_slots()), (&*routes, &*experts, &*slots));
            prop_assert!(slots.len() <= case.capacity().max_blocks());
            prop_assert!(routes.len() <= case.capacity().max_padded());
        }
    }

    /// A route to each expert for each slot, and the rest to the last: no step of one expert a token has more blocks.
    #[test]
    fn max_blocks_is_reached(
        num_tokens in 1..300_usize, num_slots in 1..30_usize, num_experts in 0..30_usize, block_size in 1..80_usize,
    ) {
        let pairs = num_slots * num_experts;
        let pair = |token: usize| token.min(pairs.saturating_sub(1));
            let case = Case {
            slots: (0..num_tokens).map(|token| (pair(token) % num_slots) as i32).collect(),
            top_k: 1,
            ids: (0..num_tokens).map(|token| (pair(token) / num_slots) as i32).collect(),
            rows: None,
            num_experts,
            num_slots,
            block_size,
        };
        let (aligned, capacity) = (case.aligned(), case.capacity());
        prop_assert_eq!(aligned.block_slots().len(), capacity.max_blocks());
        prop_assert_eq!(aligned.routes().len(), capacity.max_padded());
    }

    /// The bounds for a step suffice for a smaller step.
    #[test]
    fn max_blocks_grows_with_the_routes(max_tokens in 1..500_usize, top_k in 1..9_usize, num_experts in 0..100_usize) {
        let blocks = |max_tokens, top_k| {
            let routes = RouteCapacity::tokens(max_tokens).top_k(top_k).experts(num_experts);
            AlignCapacity::new(routes, 7, 16).max_blocks()
        };
        prop_assert!(blocks(max_tokens, top_k) <= blocks(max_tokens + 1, top_k));
        prop_assert!(blocks(max_tokens, top_k) <= blocks(max_tokens, top_k + 1));
    }
}

#[test]
fn bounds_outside_the_limits_are_refused_by_name() {
    let routes = RouteCapacity::tokens(1 << 14).top_k(8).experts(128);
    let good = AlignCapacity::new(routes, MAX_SLOTS, 64);
    assert_eq!(good.checked(), Ok(good));
    let refused = |capacity: AlignCapacity, what, value, max| {
        assert_eq!(capacity.checked(), Err(PlanError::Limit { what, value, max }));
    };
    for num_slots in [0, MAX_SLOTS + 1] {
        refused(AlignCapacity::new(routes, num_slots, 64), "num_slots", num_slots, MAX_SLOTS);
    }
    // An `i32` must count the routes of all blocks.
    let max = i32::MAX as usize / (8 << 14);
    let largest = AlignCapacity::new(routes, MAX_SLOTS, max);
    assert_eq!(largest.checked(), Ok(largest));
    assert!(i32::try_from(largest.max_padded()).is_ok());
    for block_size in [0, max + 1] {
        refused(AlignCapacity::new(routes, MAX_SLOTS, block_size), "block_size", block_size, max);
    }
    let no_routes = AlignCapacity::new(routes.top_k(0), MAX_SLOTS, 64);
    assert!(matches!(no_routes.checked(), Err(PlanError::Limit { what: "top_k", .. })));
}

#[test]
fn choices_for_other_tokens_are_refused() {
    let (top_k, slots) = (TopK::new(&[0; 6], 2).unwrap(), [Slot::new(0); 2]);
    let refused = AlignedRoutes::new(&top_k, &Batch::new(&slots), 1, 1, 4.try_into().unwrap());
    assert_eq!(refused, Err(OperandError::Tokens { got: 3, want: 2 }));
}
