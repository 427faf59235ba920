//! Upper bounds that the host knows before any step, and the limits of the kernels on them.

use super::{
    error::PlanError,
    thresholds::{MAX_EXPERTS, MAX_SLOTS, TOKENS_PER_TILE, WIDE_TILE, has_few_tokens},
};
use crate::model::MAX_RANK;

/// Upper bounds that fix every buffer, so that nothing is allocated per step.
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
    /// Tokens in a batch.
    pub max_tokens: usize,
    /// Rows of the descriptor table, at most [`MAX_SLOTS`].
    #[doc(alias = "max_loras")]
    pub num_slots: usize,
    /// The largest rank of a factor, at most [`MAX_RANK`].
    #[doc(alias = "max_lora_rank")]
    pub max_rank: usize,
}

impl Capacity {
    /// Up to `max_tokens` tokens in a batch. The other bounds are zero, which is refused where the capacity is used.
    pub const fn tokens(max_tokens: usize) -> Self {
        Self { max_tokens, num_slots: 0, max_rank: 0 }
    }

    /// Sets the number of slots.
    #[must_use]
    pub const fn slots(self, num_slots: usize) -> Self {
        Self { num_slots, ..self }
    }

    /// Sets the largest rank of a factor.
    #[must_use]
    pub const fn rank(self, max_rank: usize) -> Self {
        Self { max_rank, ..self }
    }

    /// Checks the bounds against the kernels' limits.
    ///
    /// # Errors
    /// If one is zero or past its limit.
    pub fn checked(self) -> Result<Self, PlanError> {
        limit("max_tokens", self.max_tokens, i32::MAX as usize / TOKENS_PER_TILE)?;
        limit("num_slots", self.num_slots, MAX_SLOTS)?;
        limit("max_rank", self.max_rank, MAX_RANK)?;
        Ok(self)
    }

    /// The most tiles that an operation on `num_tokens` tokens can meet: each slot may leave one of its tiles unfilled, and so may
    /// the tokens that have none.
    pub fn max_tiles(&self, num_tokens: usize) -> usize {
        if has_few_tokens(num_tokens) { self.max_small_tiles(num_tokens) } else { self.max_wide_tiles(num_tokens) }
    }

    /// As [`max_tiles`](Self::max_tiles), of the small tiles.
    pub(crate) fn max_small_tiles(&self, num_tokens: usize) -> usize {
        self.tiles_of(TOKENS_PER_TILE, num_tokens)
    }

    /// As [`max_tiles`](Self::max_tiles), of the wide tiles.
    pub(crate) fn max_wide_tiles(&self, num_tokens: usize) -> usize {
        self.tiles_of(WIDE_TILE, num_tokens)
    }

    fn tiles_of(&self, size: usize, num_tokens: usize) -> usize {
        (num_tokens + (size - 1) * (self.num_slots + 1).min(num_tokens)) / size
    }
}

/// Upper bounds on the routes of a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct RouteCapacity {
    /// Tokens in a batch.
    pub max_tokens: usize,
    /// Experts that a token chooses.
    pub top_k: usize,
    /// Experts of a layer that this rank holds, at most 1024; it may hold none.
    pub num_experts: usize,
}

impl RouteCapacity {
    /// Up to `max_tokens` tokens in a batch. The other bounds are zero; without routes, it is refused where it is used.
    pub const fn tokens(max_tokens: usize) -> Self {
        Self { max_tokens, top_k: 0, num_experts: 0 }
    }

    /// Sets the experts that a token chooses.
    #[must_use]
    pub const fn top_k(self, top_k: usize) -> Self {
        Self { top_k, ..self }
    }

    /// Sets the experts of a layer that this rank holds.
    #[must_use]
    pub const fn experts(self, num_experts: usize) -> Self {
        Self { num_experts, ..self }
    }

    /// Checks the bounds against the kernels' limits.
    ///
    /// # Errors
    /// If one is past its limit, or there are no tokens or no routes.
    pub fn checked(self) -> Result<Self, PlanError> {
        let max_routes = i32::MAX as usize / TOKENS_PER_TILE;
        if self.num_experts > 0 {
            limit("num_experts", self.num_experts, MAX_EXPERTS)?;
        }
        limit("max_tokens", self.max_tokens, max_routes)?;
        limit("top_k", self.top_k, max_routes / self.max_tokens)?;
        Ok(self)
    }

    /// Rows of matrices of routes.
    pub(crate) fn max_routes(&self) -> usize {
        self.max_tokens * self.top_k
    }
}

/// Upper bounds on the blocks that a step's routes are put in, each of one slot and one expert.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct AlignCapacity {
    /// The routes.
    pub routes: RouteCapacity,
    /// Slots that adapters may be in, at most [`MAX_SLOTS`].
    #[doc(alias = "max_loras")]
    pub num_slots: usize,
    /// Routes of a block.
    pub block_size: usize,
}

impl AlignCapacity {
    /// Blocks of `block_size` of these routes, of adapters in `num_slots` slots.
    pub const fn new(routes: RouteCapacity, num_slots: usize, block_size: usize) -> Self {
        Self { routes, num_slots, block_size }
    }

    /// Checks the bounds against the kernels' limits.
    ///
    /// # Errors
    /// If one is zero (`num_experts` may be) or past its limit, or blocks of this size may be too many to count their routes.
    pub fn checked(self) -> Result<Self, PlanError> {
        let routes = self.routes.checked()?;
        limit("num_slots", self.num_slots, MAX_SLOTS)?;
        limit("block_size", self.block_size, i32::MAX as usize / routes.max_routes())?;
        Ok(self)
    }

    /// The most blocks: one for a route to each expert for each slot, and the others full.
    pub fn max_blocks(&self) -> usize {
        let RouteCapacity { max_tokens, num_experts, .. } = self.routes;
        let routes = self.routes.max_routes();
        match (self.num_slots.min(max_tokens) * num_experts).min(routes) {
            0 => 0,
            groups => groups + (routes - groups) / self.block_size.max(1),
        }
    }

    /// The most routes of all blocks, padding among them.
    #[doc(alias = "max_num_tokens_padded")]
    pub fn max_padded(&self) -> usize {
        self.max_blocks() * self.block_size
    }
}

/// Refuses a bound that is zero or past its limit.
pub(super) fn limit(what: &'static str, value: usize, max: usize) -> Result<(), PlanError> {
    if (1..=max).contains(&value) { Ok(()) } else { Err(PlanError::Limit { what, value, max }) }
}
