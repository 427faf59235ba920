//! Routes to be arranged in blocks of one slot and one expert each, and the expected blocks.

use std::num::NonZeroUsize;

use aril::{
    Slot,
    plan::{AlignCapacity, RouteCapacity},
    routing::{AlignedRoutes, Batch, TopK},
};
use proptest::prelude::*;

use super::{case::indices, experts::rows};

/// A step.
#[derive(Clone, Debug)]
pub struct Case {
    /// By token: a slot, -1, or any number that is not a slot.
    pub slots: Vec<i32>,
    pub top_k: usize,
    /// By route: a local expert id, -1, or any number that is not an expert.
    pub ids: Vec<i32>,
    /// By route: distinct rows, or any number that is not a row.
    pub rows: Option<Vec<i32>>,
    pub num_experts: usize,
    pub num_slots: usize,
    pub block_size: usize,
}

impl Case {
    pub fn num_tokens(&self) -> usize {
        self.slots.len()
    }

    /// The tightest bounds, for at least one token.
    pub fn capacity(&self) -> AlignCapacity {
        let Self { top_k, num_experts, num_slots, block_size, .. } = *self;
        let routes = RouteCapacity::tokens(self.num_tokens().max(1)).top_k(top_k).experts(num_experts);
        AlignCapacity::new(routes, num_slots, block_size)
    }

    pub fn slots(&self) -> Vec<Slot> {
        self.slots.iter().map(|&slot| bytemuck::cast(slot)).collect()
    }

    /// The same routes without slots beyond the number of slots, which the safe API refuses.
    #[cfg(feature = "cuda")]
    pub fn known_slots(&self) -> Vec<Slot> {
        let is_known = |slot: &Slot| slot.index().is_none_or(|index| index < self.num_slots);
        self.slots().into_iter().map(|slot| if is_known(&slot) { slot } else { Slot::BASE }).collect()
    }

    pub fn top_k(&self) -> TopK<'_> {
        let top_k = TopK::new(&self.ids, self.top_k).unwrap();
        self.rows.as_ref().map_or(top_k, |rows| top_k.with_rows(rows).unwrap())
    }

    /// The host's result.
    pub fn aligned(&self) -> AlignedRoutes {
        let block_size = NonZeroUsize::new(self.block_size).unwrap();
        AlignedRoutes::new(&self.top_k(), &Batch::new(&self.slots()), self.num_experts, self.num_slots, block_size)
            .unwrap()
    }
}

/// Steps of one layer of experts.
pub fn steps(count: usize, max_tokens: usize) -> impl Strategy<Value = Vec<Case>> {
    let block_size = prop_oneof![1..=20_usize, Just(16), Just(64), Just(128)];
    let experts = prop_oneof![1 => Just(0), 9 => 1..=40_usize];
    (experts, 1..=12_usize, block_size).prop_flat_map(move |(num_experts, num_slots, block_size)| {
        let step = (0..=max_tokens, 1..=8_usize).prop_flat_map(move |(num_tokens, top_k)| {
            let num_routes = num_tokens * top_k;
            let choices = (indices(num_slots, num_tokens), indices(num_experts, num_routes), rows(num_routes));
            choices.prop_map(move |(slots, ids, rows)| Case {
                slots,
                top_k,
                ids,
                rows,
                num_experts,
                num_slots,
                block_size,
            })
        });
        prop::collection::vec(step, count)
    })
}
