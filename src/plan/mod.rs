//! What a launch will look like, from shapes and upper bounds alone.
//!
//! Pure and printable: no device is needed to make a plan, and the same problem always has the same plan. The tiles are those of
//! `csrc/aril.h`, so that a plan and the kernels it is for cannot disagree.

use std::fmt;

use crate::{
    DType, ffi,
    model::{LinearSite, MAX_RANK, SliceSite},
};

/// Upper bounds that fix every buffer, so that nothing is allocated per step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
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
const FEW_TOKENS: usize = ffi::ARIL_FEW_TOKENS as usize;
const LANE_FEATURES: usize = ffi::ARIL_LANE_FEATURES as usize;
const LANES_PER_GROUP: usize = ffi::ARIL_LANES_PER_GROUP as usize;
const RANK_TILE: usize = ffi::ARIL_RANK_TILE as usize;

/// The most blocks in the second dimension of a CUDA grid.
const MAX_GRID_Y: usize = 65_535;
/// The most in the first.
const MAX_GRID_X: usize = i32::MAX as usize;

/// Ranks of all slices that a block of shrink works on, in tiles.
const COLUMNS_PER_BLOCK: usize = 8;
/// Where a block with few tokens takes a group of lanes: with no more such tiles,
const GROUPED_COLUMNS: usize = 2;
/// with more lanes,
const MANY_LANES: usize = 32;
/// or with more tokens.
const GROUPED_TOKENS: usize = 64;
/// The multiprocessors of the devices that the thresholds here were measured on: H100 SXM.
const MULTIPROCESSORS: usize = 132;
/// Outputs that the warps of a block of expand take at once.
const OUTS_AT_ONCE: usize = (ffi::ARIL_OUTS_PER_WARP * ffi::ARIL_EXPAND_WARPS) as usize;
/// What a block of expand may have of B on its way, in bytes.
const SUPPLY_BYTES: usize = 32 << 10;

impl Capacity {
    /// Checks the bounds against the kernels' limits.
    ///
    /// # Errors
    /// If one is zero or past its limit.
    pub fn checked(self) -> Result<Self, PlanError> {
        let limit = |what, value, max| match value {
            0 => Err(PlanError::Limit { what, value, max }),
            value if value > max => Err(PlanError::Limit { what, value, max }),
            _ => Ok(()),
        };
        limit("max_tokens", self.max_tokens, i32::MAX as usize / TOKENS_PER_TILE)?;
        limit("num_slots", self.num_slots, MAX_SLOTS)?;
        limit("max_rank", self.max_rank, MAX_RANK)?;
        Ok(self)
    }

    /// The most tiles that an operation on `num_tokens` tokens can meet: each slot may leave one of its tiles unfilled.
    pub fn max_tiles(&self, num_tokens: usize) -> usize {
        self.tiles_of(if num_tokens > FEW_TOKENS { WIDE_TILE } else { TOKENS_PER_TILE }, num_tokens)
    }

    /// The most small and the most wide tiles of any batch.
    #[cfg(feature = "cuda")]
    pub(crate) fn all_tiles(&self) -> [usize; 2] {
        [TOKENS_PER_TILE, WIDE_TILE].map(|size| self.tiles_of(size, self.max_tokens))
    }

    fn tiles_of(&self, size: usize, num_tokens: usize) -> usize {
        (num_tokens + (size - 1) * self.num_slots.min(num_tokens)) / size
    }
}

/// How expand shares out a layer's outputs. The bits of the result do not depend on it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct ExpandPlan {
    /// Outputs of one slice that a block works on.
    pub(crate) outs_per_block: usize,
    /// How many times [`OUTS_AT_ONCE`] of them have their weights in shared memory or on the way there.
    pub(crate) slots: usize,
    blocks: usize,
}

impl ExpandPlan {
    /// Plans for up to `tiles` tiles of `num_tokens` tokens.
    ///
    /// Large blocks pay less often for what each begins with; but every multiprocessor should have two. (H100: 264 blocks at the
    /// least have a better mean over all workloads than 132, 396 or 528. With many tokens up to 1024 outputs are 1 % faster in the
    /// mean than up to 2048, and slower in the largest layers.)
    pub(crate) fn new(out_features: &[usize], max_rank: usize, num_tokens: usize, tiles: usize) -> Self {
        let bytes_at_once = OUTS_AT_ONCE * max_rank.next_multiple_of(RANK_TILE) * DType::BF16.bytes();
        // With few tokens, all of a block's weights are to be on their way before its predecessors end.
        let most = if num_tokens > FEW_TOKENS { 8 } else { (SUPPLY_BYTES / bytes_at_once).clamp(1, 4) };
        let blocks = |times: usize| out_features.iter().map(|out| out.div_ceil(times * OUTS_AT_ONCE)).sum::<usize>();
        let mut times = most;
        while times > 1 && blocks(times) * tiles < 2 * MULTIPROCESSORS {
            times /= 2;
        }
        let slots = (SUPPLY_BYTES / bytes_at_once).clamp(1, times);
        Self { outs_per_block: times * OUTS_AT_ONCE, slots, blocks: blocks(times) }
    }

    /// Refuses outputs whose blocks no grid counts.
    pub(crate) fn check(out_features: &[usize], capacity: Capacity) -> Result<(), PlanError> {
        // The smallest blocks are the most.
        let blocks: usize = out_features.iter().map(|out| out.div_ceil(OUTS_AT_ONCE)).sum();
        let [small, wide] = [capacity.max_tokens.min(FEW_TOKENS), capacity.max_tokens].map(|n| capacity.max_tiles(n));
        let max = MAX_GRID_X / small.max(wide);
        if blocks > max {
            let value = blocks * OUTS_AT_ONCE;
            return Err(PlanError::Limit { what: "out_features", value, max: max * OUTS_AT_ONCE });
        }
        Ok(())
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
        ExpandPlan::check(&out_features, capacity)?;
        Ok(Self { dtype, in_features: site.in_features(), out_features, capacity })
    }

    /// How many lanes of [`LANE_FEATURES`] a block of shrink sums up: one, a group, or all of a token's. The bits of the result do
    /// not depend on it.
    ///
    /// Few tokens fill the device only if many blocks share out a token's input, and many tokens would only have more to add up.
    /// (H100: up to 16 tokens a lane is faster in the mean; up to 64 a group is where there is little to fetch, 16 ranks in all,
    /// or much to add up, more than 8192 features; beyond, everywhere. With more than 256, half of the multiprocessors should have
    /// a block, and all six before nobody shares.)
    pub(crate) fn lanes_per_split(&self, num_tokens: usize) -> usize {
        self.lanes_per_split_of(num_tokens, self.out_features.len() * self.capacity.max_rank.div_ceil(RANK_TILE))
    }

    /// With so many tiles of ranks, of all slices.
    fn lanes_per_split_of(&self, num_tokens: usize, columns: usize) -> usize {
        if num_tokens <= FEW_TOKENS {
            let much = num_tokens > TOKENS_PER_TILE && self.num_lanes() > MANY_LANES;
            let little = num_tokens > TOKENS_PER_TILE && columns <= GROUPED_COLUMNS;
            return if num_tokens > GROUPED_TOKENS || much || little { LANES_PER_GROUP } else { 1 };
        }
        let blocks = num_tokens.div_ceil(WIDE_TILE) * columns.div_ceil(COLUMNS_PER_BLOCK);
        if blocks >= 6 * MULTIPROCESSORS {
            i32::MAX as usize
        } else if blocks * self.num_lanes().div_ceil(LANES_PER_GROUP) >= MULTIPROCESSORS / 2 {
            LANES_PER_GROUP
        } else {
            1
        }
    }

    /// How expand shares out the outputs.
    #[cfg(feature = "cuda")]
    pub(crate) fn expand(&self, num_tokens: usize, max_tiles: usize) -> ExpandPlan {
        ExpandPlan::new(&self.out_features, self.capacity.max_rank, num_tokens, max_tiles)
    }

    /// Blocks that share a token's input in shrink.
    pub fn num_splits(&self, num_tokens: usize) -> usize {
        self.num_lanes().div_ceil(self.lanes_per_split(num_tokens))
    }

    /// The workspace that a batch of `num_tokens` needs.
    pub fn workspace_bytes_for(&self, num_tokens: usize) -> usize {
        self.num_splits(num_tokens) * num_tokens * self.plane_bytes_per_token()
    }

    /// A workspace for any batch within the capacity.
    pub fn workspace_bytes(&self) -> usize {
        let max_tokens = self.capacity.max_tokens;
        // Planes grow with the tokens until these are split less, which is only where a tile begins. So that more room never
        // needs less, as if the ranks were so few, of all that are split alike, that shrink is split the most.
        let last_of_tiles = (FEW_TOKENS..max_tokens).step_by(WIDE_TILE).take(6 * MULTIPROCESSORS);
        let candidates = [TOKENS_PER_TILE, GROUPED_TOKENS, max_tokens]
            .into_iter()
            .chain(last_of_tiles)
            .map(|tokens| tokens.min(max_tokens));
        let lanes = |tokens| self.lanes_per_split_of(tokens, GROUPED_COLUMNS + 1);
        let planes = candidates.map(|tokens| self.num_lanes().div_ceil(lanes(tokens)) * tokens);
        planes.max().unwrap_or(0) * self.plane_bytes_per_token()
    }

    fn plane_bytes_per_token(&self) -> usize {
        self.out_features.len() * self.capacity.max_rank.next_multiple_of(RANK_TILE) * size_of::<f32>()
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
}

impl fmt::Display for LinearPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Capacity { max_tokens, num_slots, max_rank } = self.capacity;
        let tiles = self.capacity.max_tiles(max_tokens);
        let expand = ExpandPlan::new(&self.out_features, max_rank, max_tokens, tiles);
        write!(
            f,
            "linear {}, up to {max_tokens} tokens of {num_slots} slots, rank {max_rank}: {tiles} tiles, shrink {} splits of {} lanes, \
             expand {} blocks of {} outputs, {} bytes of workspace",
            self.dtype,
            self.num_splits(max_tokens),
            self.num_lanes(),
            expand.blocks,
            expand.outs_per_block,
            self.workspace_bytes()
        )
    }
}

/// A problem that no kernel takes.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
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
