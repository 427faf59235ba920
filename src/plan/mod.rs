//! What a launch will look like, from shapes and upper bounds alone.
//!
//! Pure and printable: no device is needed to make a plan, and the same problem always has the same plan. The tiles are those of
//! `csrc/aril.h`, so that a plan and the kernels it is for cannot disagree.

mod experts;

use std::fmt;

use crate::{
    DType, ffi,
    model::{LinearSite, MAX_RANK, SliceSite},
};

#[cfg(feature = "cuda")]
pub(crate) use self::experts::ExpandBy;
pub use self::experts::{AlignCapacity, ExpertsPlan, ProjectionPlan, RouteCapacity};

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

/// The most slots of a table.
pub const MAX_SLOTS: usize = ffi::ARIL_MAX_SLOTS as usize;

const TOKENS_PER_TILE: usize = ffi::ARIL_TOKENS_PER_TILE as usize;
const WIDE_TILE: usize = ffi::ARIL_WIDE_TILE as usize;
const FEW_TOKENS: usize = ffi::ARIL_SMALL_M as usize;
const STAGED_RANK: usize = ffi::ARIL_STAGED_RANK as usize;
const OUTS_FEW: usize = ffi::ARIL_OUTS_SMALL_M as usize;
const OUTS_WIDE: usize = ffi::ARIL_OUTS_LARGE_M as usize;
const LANE_FEATURES: usize = ffi::ARIL_K_TILE as usize;
const LANES_PER_GROUP: usize = ffi::ARIL_K_TILES_PER_SLAB as usize;
const LANES_PER_SPAN: usize = LANES_PER_GROUP * ffi::ARIL_K_SLABS_PER_SPAN as usize;
const RANK_TILE: usize = ffi::ARIL_RANK_TILE as usize;
const MAILBOX_HEADER: usize = ffi::ARIL_MAILBOX_HEADER as usize;

/// The most blocks in the second dimension of a CUDA grid.
const MAX_GRID_Y: usize = 65_535;
/// The most in the first.
const MAX_GRID_X: usize = i32::MAX as usize;

/// Ranks of all slices that a block of shrink works on with few tokens, and those that it is counted for with many, in tiles.
const COLUMNS_FEW: usize = 2;
const COLUMNS_WIDE: usize = 8;
/// Blocks with many tokens from which on shrink is split into spans. (H100: 500 are faster than 300 in the largest layers.)
const MANY_BLOCKS: usize = 500;
/// The multiprocessors of the devices that the thresholds here were measured on: H100 SXM.
const MULTIPROCESSORS: usize = 132;
/// What a block of expand may have of B with few tokens, in bytes. (H100: 64 KB are 2 % faster than 32 with 128 and more adapters.)
const SUPPLY_BYTES: usize = 64 << 10;

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
        self.tiles_of(if num_tokens > FEW_TOKENS { WIDE_TILE } else { TOKENS_PER_TILE }, num_tokens)
    }

    /// As [`max_tiles`](Self::max_tiles), of the small tiles.
    pub(crate) fn max_small_tiles(&self, num_tokens: usize) -> usize {
        self.tiles_of(TOKENS_PER_TILE, num_tokens)
    }

    /// The most small and the most wide tiles of any batch.
    #[cfg(feature = "cuda")]
    pub(crate) fn all_tiles(&self) -> [usize; 2] {
        [TOKENS_PER_TILE, WIDE_TILE].map(|size| self.tiles_of(size, self.max_tokens))
    }

    fn tiles_of(&self, size: usize, num_tokens: usize) -> usize {
        (num_tokens + (size - 1) * (self.num_slots + 1).min(num_tokens)) / size
    }
}

/// Refuses a bound that is zero or past its limit.
fn limit(what: &'static str, value: usize, max: usize) -> Result<(), PlanError> {
    if (1..=max).contains(&value) { Ok(()) } else { Err(PlanError::Limit { what, value, max }) }
}

/// Outputs of one slice that a block of expand works on, for up to `tiles` tiles of `num_tokens` tokens. The bits of the result do
/// not depend on it.
///
/// Large blocks pay less often for what each begins with; but every multiprocessor should have two. (H100: 264 blocks at the least
/// have a better mean over all workloads than 132, 400 or 528. With many tokens up to 1024 outputs are 2 % faster than up to 2048.)
pub(crate) fn outs_per_block(out_features: &[usize], max_rank: usize, num_tokens: usize, tiles: usize) -> usize {
    let wide = num_tokens > FEW_TOKENS && max_rank <= STAGED_RANK;
    let unit = if wide { OUTS_WIDE } else { OUTS_FEW };
    let unit_bytes = unit * max_rank.next_multiple_of(RANK_TILE) * DType::BF16.bytes();
    let mut times = if wide { 8 } else { (SUPPLY_BYTES / unit_bytes).max(1) };
    while times > 1 && out_blocks(out_features, times * unit) * tiles < 2 * MULTIPROCESSORS {
        times /= 2;
    }
    times * unit
}

fn out_blocks(out_features: &[usize], outs_per_block: usize) -> usize {
    out_features.iter().map(|out| out.div_ceil(outs_per_block)).sum()
}

/// Refuses outputs whose blocks no grid counts, beside `shrink_blocks` of each tile.
pub(crate) fn check_outputs(out_features: &[usize], capacity: Capacity, shrink_blocks: usize) -> Result<(), PlanError> {
    let [small, wide] = [capacity.max_tokens.min(FEW_TOKENS), capacity.max_tokens].map(|n| capacity.max_tiles(n));
    let max = (MAX_GRID_X / small.max(wide)).saturating_sub(shrink_blocks);
    // The smallest blocks are the most.
    let blocks = out_blocks(out_features, OUTS_WIDE);
    if blocks > max {
        let value = blocks * OUTS_WIDE;
        return Err(PlanError::Limit { what: "out_features", value, max: max * OUTS_WIDE });
    }
    Ok(())
}

/// What a workspace must hold, in bytes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct WorkspaceBytes {
    /// For what the blocks of one launch hand over to each other, each sum with a tag that says of which launch it is. It must be
    /// zero when it is first used, and nothing but the kernels may write it.
    pub mailbox: usize,
    /// For what one launch leaves for the next.
    pub partials: usize,
}

impl WorkspaceBytes {
    /// Enough for both.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self { mailbox: self.mailbox.max(other.mailbox), partials: self.partials.max(other.partials) }
    }
}

/// How a linear layer is launched.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LinearPlan {
    dtype: DType,
    in_features: usize,
    out_features: Vec<usize>,
    capacity: Capacity,
}

impl LinearPlan {
    /// Plans a layer for batches within `capacity`.
    ///
    /// # Errors
    /// If the kernels cannot take the shape or the bounds.
    pub fn new(site: &LinearSite, dtype: DType, capacity: Capacity) -> Result<Self, PlanError> {
        let capacity = capacity.checked()?;
        let out_features: Vec<usize> = site.slices().iter().map(SliceSite::out_features).collect();
        let (value, max) = (site.in_features(), MAX_GRID_Y * LANE_FEATURES);
        if value > max {
            return Err(PlanError::Limit { what: "in_features", value, max });
        }
        let plan = Self { dtype, in_features: site.in_features(), out_features, capacity };
        check_outputs(&plan.out_features, capacity, plan.columns().div_ceil(COLUMNS_FEW) * plan.num_groups())?;
        Ok(plan)
    }

    /// Whether shrink and expand are one launch, which takes groups of lanes.
    ///
    /// (H100: with 512 tokens it is faster than tiles of 64, 1.4 times in the mean; with 2048 only at rank 16 in the smallest layer.)
    fn is_one_launch(&self, num_tokens: usize) -> bool {
        self.dtype != DType::F32 && num_tokens <= FEW_TOKENS
    }

    /// How many lanes of [`LANE_FEATURES`] a block of shrink sums up: a group, or a span of groups. The bits of the result do not
    /// depend on it.
    pub(crate) fn lanes_per_split(&self, num_tokens: usize) -> usize {
        let blocks = num_tokens.div_ceil(WIDE_TILE) * self.columns().div_ceil(COLUMNS_WIDE) * self.num_spans();
        if self.is_one_launch(num_tokens) || blocks < MANY_BLOCKS { LANES_PER_GROUP } else { LANES_PER_SPAN }
    }

    /// Outputs of one slice that a block of expand works on.
    pub(crate) fn outs_per_block(&self, num_tokens: usize, max_tiles: usize) -> usize {
        outs_per_block(&self.out_features, self.capacity.max_rank, num_tokens, max_tiles)
    }

    /// Blocks that share a token's input in shrink.
    pub fn num_splits(&self, num_tokens: usize) -> usize {
        self.num_lanes().div_ceil(self.lanes_per_split(num_tokens))
    }

    /// The workspace that a batch of `num_tokens` needs.
    pub fn workspace_bytes_for(&self, num_tokens: usize) -> WorkspaceBytes {
        let sums = self.num_splits(num_tokens) * num_tokens * self.sums_per_token();
        if self.is_one_launch(num_tokens) {
            WorkspaceBytes { mailbox: MAILBOX_HEADER + sums * 2 * size_of::<f32>(), partials: 0 }
        } else {
            WorkspaceBytes { mailbox: 0, partials: sums * size_of::<f32>() }
        }
    }

    /// A workspace for any batch within the capacity.
    pub fn workspace_bytes(&self) -> WorkspaceBytes {
        let max_tokens = self.capacity.max_tokens;
        let few = self.workspace_bytes_for(max_tokens.min(FEW_TOKENS));
        if self.is_one_launch(max_tokens) {
            return few;
        }
        // Groups are apart up to so many tokens, at the fewest ranks: so that more room never needs less.
        let last_grouped = (MANY_BLOCKS - 1) / self.num_spans() * WIDE_TILE;
        let sums = (self.num_groups() * max_tokens.min(last_grouped)).max(self.num_spans() * max_tokens);
        few.max(WorkspaceBytes { mailbox: 0, partials: sums * self.sums_per_token() * size_of::<f32>() })
    }

    fn sums_per_token(&self) -> usize {
        self.out_features.len() * self.capacity.max_rank.next_multiple_of(RANK_TILE)
    }

    /// Tiles of ranks, of all slices.
    fn columns(&self) -> usize {
        self.out_features.len() * self.capacity.max_rank.div_ceil(RANK_TILE)
    }

    /// The bounds it was planned for.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// The element type it was planned for.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    fn num_lanes(&self) -> usize {
        self.in_features.div_ceil(LANE_FEATURES)
    }

    fn num_groups(&self) -> usize {
        self.num_lanes().div_ceil(LANES_PER_GROUP)
    }

    fn num_spans(&self) -> usize {
        self.num_lanes().div_ceil(LANES_PER_SPAN)
    }
}

impl fmt::Display for LinearPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Capacity { max_tokens, num_slots, max_rank } = self.capacity;
        let tiles = self.capacity.max_tiles(max_tokens);
        let outs = self.outs_per_block(max_tokens, tiles);
        let launches = if self.is_one_launch(max_tokens) { "one launch" } else { "two launches" };
        let WorkspaceBytes { mailbox, partials } = self.workspace_bytes();
        write!(
            f,
            "linear {}, up to {max_tokens} tokens of {num_slots} slots, rank {max_rank}: {tiles} tiles, {launches}, shrink {} splits of \
             {} lanes, expand {} blocks of {outs} outputs, {mailbox} + {partials} bytes of workspace",
            self.dtype,
            self.num_splits(max_tokens),
            self.num_lanes(),
            out_blocks(&self.out_features, outs),
        )
    }
}

/// A problem that no kernel takes.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The layer's id is of another model.
    #[error("the layer is of another model than the weights")]
    Foreign,
    /// A size is zero or past what the kernels take.
    #[error("{what} is {value}; it must be 1 to {max}")]
    Limit {
        /// Which size.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The kernels' limit.
        max: usize,
    },
}
