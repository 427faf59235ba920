//! Upper bounds on a step that the host knows in advance, checked against the limits of the kernels.

use super::{
    error::PlanError,
    thresholds::{MAX_EXPERTS, MAX_SLOTS, TOKENS_PER_TILE, WIDE_TILE, is_small_m},
};
use crate::{model::MAX_RANK, sizes::product};

/// Upper bounds on batches and adapters. They size every buffer, so that no step allocates.
///
/// ```
/// use aril::plan::Capacity;
///
/// let capacity = Capacity::tokens(8192).slots(64).rank(32).checked()?;
/// assert_eq!((capacity.max_tokens, capacity.num_slots, capacity.max_rank), (8192, 64, 32));
/// assert!(Capacity::tokens(8192).slots(64).checked().is_err());
/// # Ok::<(), aril::plan::PlanError>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Capacity {
    /// Tokens per batch: the most rows that a layer of a step has. A longer batch is refused.
    ///
    /// With chunked prefill, the token budget of a step (vLLM's `max_num_batched_tokens`), which counts decoded tokens,
    /// too. If the scheduler bounds prompts alone, that bound plus a token for each running sequence, or as many as
    /// speculative decoding proposes.
    #[doc(alias = "max_num_batched_tokens")]
    pub max_tokens: usize,
    /// Slots of the weight table, at most [`MAX_SLOTS`].
    #[doc(alias = "max_loras")]
    pub num_slots: usize,
    /// The largest rank of a loaded adapter, at most [`MAX_RANK`].
    #[doc(alias = "max_lora_rank")]
    pub max_rank: usize,
}

impl Capacity {
    /// A capacity for batches of up to `max_tokens` tokens. Set the other bounds, too: they start at zero, which is
    /// invalid.
    pub const fn tokens(max_tokens: usize) -> Self {
        Self { max_tokens, num_slots: 0, max_rank: 0 }
    }

    /// Sets the number of slots.
    #[must_use]
    pub const fn slots(self, num_slots: usize) -> Self {
        Self { num_slots, ..self }
    }

    /// Sets the largest rank.
    #[must_use]
    pub const fn rank(self, max_rank: usize) -> Self {
        Self { max_rank, ..self }
    }

    /// Returns the capacity if every bound is valid.
    ///
    /// # Errors
    /// [`PlanError::Limit`] if a bound is zero or exceeds the kernels' limit.
    pub fn checked(self) -> Result<Self, PlanError> {
        limit("max_tokens", self.max_tokens, i32::MAX as usize / TOKENS_PER_TILE)?;
        limit("num_slots", self.num_slots, MAX_SLOTS)?;
        limit("max_rank", self.max_rank, MAX_RANK)?;
        Ok(self)
    }

    /// This capacity with as many slots as the tokens of a batch have.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn of_batch(self, slots: impl IntoIterator<Item = i32>) -> Self {
        let (mut seen, mut num_slots, mut last) = ([0_u64; MAX_SLOTS.div_ceil(64)], 0, -1);
        for slot in slots {
            // In a prefill, neighbours mostly have the same slot.
            if slot == last {
                continue;
            }
            last = slot;
            if let Some(index) = usize::try_from(slot).ok().filter(|&index| index < self.num_slots) {
                let (word, bit) = (&mut seen[index / 64], 1 << (index % 64));
                num_slots += usize::from(*word & bit == 0);
                *word |= bit;
            }
        }
        self.slots(num_slots)
    }

    /// The largest number of tiles in an operation on `num_tokens` tokens. A tile holds tokens of one slot, so each
    /// slot can leave one tile partly filled, as can the tokens without a slot.
    ///
    /// A captured launch is replayed with any spread of tokens. It has blocks for all of these tiles, or, where they
    /// would be many, for some, which then take turns.
    pub fn max_tiles(&self, num_tokens: usize) -> usize {
        if is_small_m(num_tokens) { self.max_small_tiles(num_tokens) } else { self.max_wide_tiles(num_tokens) }
    }

    /// [`max_tiles`](Self::max_tiles) for small tiles.
    pub(crate) fn max_small_tiles(&self, num_tokens: usize) -> usize {
        self.tiles_of(TOKENS_PER_TILE, num_tokens)
    }

    /// [`max_tiles`](Self::max_tiles) for wide tiles.
    pub(crate) fn max_wide_tiles(&self, num_tokens: usize) -> usize {
        self.tiles_of(WIDE_TILE, num_tokens)
    }

    fn tiles_of(&self, size: usize, num_tokens: usize) -> usize {
        let padding = product(&[size - 1, self.num_slots.saturating_add(1).min(num_tokens)]);
        num_tokens.saturating_add(padding) / size
    }
}

/// Upper bounds on the routes of a step. A route is one token's choice of one expert.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct RouteCapacity {
    /// Tokens per batch.
    pub max_tokens: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Experts of one layer on this rank: 0 to 1024.
    pub num_experts: usize,
}

impl RouteCapacity {
    /// A capacity for batches of up to `max_tokens` tokens. Set `top_k`, too: it starts at zero, which is invalid.
    pub const fn tokens(max_tokens: usize) -> Self {
        Self { max_tokens, top_k: 0, num_experts: 0 }
    }

    /// Sets the number of experts per token.
    #[must_use]
    pub const fn top_k(self, top_k: usize) -> Self {
        Self { top_k, ..self }
    }

    /// Sets the number of experts of one layer on this rank.
    #[must_use]
    pub const fn experts(self, num_experts: usize) -> Self {
        Self { num_experts, ..self }
    }

    /// Returns the capacity if every bound is valid.
    ///
    /// # Errors
    /// [`PlanError::Limit`] if `max_tokens` or `top_k` is zero, a bound exceeds the kernels' limit, or there are too
    /// many routes.
    pub fn checked(self) -> Result<Self, PlanError> {
        let max_routes = i32::MAX as usize / TOKENS_PER_TILE;
        if self.num_experts > 0 {
            limit("num_experts", self.num_experts, MAX_EXPERTS)?;
        }
        limit("max_tokens", self.max_tokens, max_routes)?;
        limit("top_k", self.top_k, max_routes / self.max_tokens)?;
        Ok(self)
    }

    /// Routes in a full batch, which is also the number of rows of `[routes, ..]` matrices.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn max_routes(&self) -> usize {
        product(&[self.max_tokens, self.top_k])
    }
}

/// Rejects a value outside `1..=max`.
pub(super) fn limit(what: &'static str, value: usize, max: usize) -> Result<(), PlanError> {
    if (1..=max).contains(&value) { Ok(()) } else { Err(PlanError::Limit { what, value, max }) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::routing::Segments;

    /// Bounds that nothing has checked give the largest sizes, not small ones.
    #[test]
    fn sizes_of_any_bounds_do_not_wrap() {
        const HALF: usize = 1 << (usize::BITS / 2);
        let routes = RouteCapacity::tokens(HALF).top_k(HALF).experts(HALF);
        assert_eq!(routes.max_routes(), usize::MAX);
        let tokens = Capacity::tokens(usize::MAX).slots(usize::MAX).rank(8);
        assert!(tokens.max_tiles(usize::MAX) > usize::MAX / 256);
        assert!(routes.checked().is_err() && tokens.checked().is_err());
    }

    proptest! {
        /// A batch has as many slots as segments, and its tiles are within the bounds: with base tokens, slots outside
        /// the table, and tokens of a slot that follow each other or do not.
        #[test]
        fn a_batch_has_the_slots_of_its_tokens(
            num_slots in 1..=MAX_SLOTS,
            runs in prop::collection::vec((-3..=8200_i32, 0..10_i32, 1..=100_usize), 0..=40),
        ) {
            // Slots anywhere, or a few over and over.
            let slots = runs.iter().flat_map(|&(slot, few, len)| vec![if few < 7 { few - 1 } else { slot }; len]);
            let slots: Vec<i32> = slots.collect();
            let capacity = Capacity::tokens(slots.len().max(1)).slots(num_slots).rank(8);
            let (of_batch, segments) = (capacity.of_batch(slots.iter().copied()), Segments::new(&slots, num_slots));
            prop_assert_eq!(of_batch, capacity.slots(segments.len()));
            let base = slots.len() - segments.iter().map(|(_, tokens)| tokens.len()).sum::<usize>();
            let groups = || segments.iter().map(|(_, tokens)| tokens.len()).chain([base]);
            for (size, bound) in [
                (TOKENS_PER_TILE, of_batch.max_small_tiles(slots.len())),
                (WIDE_TILE, of_batch.max_wide_tiles(slots.len())),
            ] {
                let tiles = groups().map(|tokens| tokens.div_ceil(size)).sum::<usize>();
                prop_assert!(tiles <= bound && bound <= tiles + segments.len() + 1, "{tiles} tiles, {bound}");
            }
        }
    }
}
