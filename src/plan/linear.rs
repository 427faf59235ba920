//! Launch configurations of linear layers and embeddings.

use std::fmt;

use super::{
    capacity::Capacity,
    error::PlanError,
    thresholds::{
        FEW_TOKENS, LANE_FEATURES, LANES_PER_GROUP, LANES_PER_SPAN, MAILBOX_HEADER, MAX_GRID_X, MAX_GRID_Y, RANK_TILE,
        WIDE_TILE, WORD_BYTES, has_few_tokens, is_staged,
        linear::{
            MAX_B_BYTES, MAX_WIDE_UNITS, MIN_EXPAND_BLOCKS, MIN_SPAN_BLOCKS, SMALL_COLUMNS, SMALL_OUTS, WIDE_COLUMNS,
            WIDE_OUTS,
        },
    },
    workspace::WorkspaceBytes,
};
use crate::{
    DType,
    model::{LinearSite, SliceSite},
};

/// Launch configuration of a linear layer.
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
    /// [`PlanError::Limit`] if the kernels do not support a size or a bound.
    pub fn new(site: &LinearSite, dtype: DType, capacity: Capacity) -> Result<Self, PlanError> {
        let capacity = capacity.checked()?;
        let out_features: Vec<usize> = site.slices().iter().map(SliceSite::out_features).collect();
        let (value, max) = (site.in_features(), MAX_GRID_Y * LANE_FEATURES);
        if value > max {
            return Err(PlanError::Limit { what: "in_features", value, max });
        }
        let plan = Self { dtype, in_features: site.in_features(), out_features, capacity };
        check_outputs(&plan.out_features, capacity, plan.columns().div_ceil(SMALL_COLUMNS) * plan.num_groups())?;
        Ok(plan)
    }

    /// Whether one launch computes both shrink and expand.
    fn is_one_launch(&self, num_tokens: usize) -> bool {
        self.dtype != DType::F32 && has_few_tokens(num_tokens)
    }

    /// Lanes of [`LANE_FEATURES`] input features that one shrink block reduces: a group, or a span of groups. Both are
    /// bit-identical.
    pub(crate) fn lanes_per_split(&self, num_tokens: usize) -> usize {
        let blocks = num_tokens.div_ceil(WIDE_TILE) * self.columns().div_ceil(WIDE_COLUMNS) * self.num_spans();
        if self.is_one_launch(num_tokens) || blocks < MIN_SPAN_BLOCKS { LANES_PER_GROUP } else { LANES_PER_SPAN }
    }

    /// Outputs of one slice per expand block.
    pub(crate) fn outs_per_block(&self, num_tokens: usize, max_tiles: usize) -> usize {
        outs_per_block(&self.out_features, self.capacity.max_rank, num_tokens, max_tiles)
    }

    /// Shrink blocks that a token's input features are split over.
    pub fn num_splits(&self, num_tokens: usize) -> usize {
        self.num_lanes().div_ceil(self.lanes_per_split(num_tokens))
    }

    /// Workspace for a batch of `num_tokens` tokens.
    pub fn workspace_bytes_for(&self, num_tokens: usize) -> WorkspaceBytes {
        let sums = self.num_splits(num_tokens) * num_tokens * self.sums_per_token();
        if self.is_one_launch(num_tokens) {
            WorkspaceBytes { mailbox: MAILBOX_HEADER + sums * WORD_BYTES, partials: 0 }
        } else {
            WorkspaceBytes { mailbox: 0, partials: sums * size_of::<f32>() }
        }
    }

    /// Workspace for any batch within the capacity.
    pub fn workspace_bytes(&self) -> WorkspaceBytes {
        let max_tokens = self.capacity.max_tokens;
        let few = self.workspace_bytes_for(max_tokens.min(FEW_TOKENS));
        if self.is_one_launch(max_tokens) {
            return few;
        }
        // Groups are apart up to so many tokens, at the fewest ranks: so that more room never needs less.
        let last_grouped = (MIN_SPAN_BLOCKS - 1) / self.num_spans() * WIDE_TILE;
        let sums = (self.num_groups() * max_tokens.min(last_grouped)).max(self.num_spans() * max_tokens);
        few.max(WorkspaceBytes { mailbox: 0, partials: sums * self.sums_per_token() * size_of::<f32>() })
    }

    fn sums_per_token(&self) -> usize {
        self.out_features.len() * self.capacity.max_rank.next_multiple_of(RANK_TILE)
    }

    /// Rank tiles of all slices.
    fn columns(&self) -> usize {
        self.out_features.len() * self.capacity.max_rank.div_ceil(RANK_TILE)
    }

    /// The capacity of the plan.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// The element type of activations and factors.
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

/// Outputs of one slice per expand block, in a batch of `num_tokens` tokens in up to `tiles` tiles. All choices are bit-identical.
///
/// Large blocks amortise the start of a block; small blocks fill the device.
pub(crate) fn outs_per_block(out_features: &[usize], max_rank: usize, num_tokens: usize, tiles: usize) -> usize {
    let wide = !has_few_tokens(num_tokens) && is_staged(max_rank);
    let unit = if wide { WIDE_OUTS } else { SMALL_OUTS };
    let unit_bytes = unit * max_rank.next_multiple_of(RANK_TILE) * DType::BF16.bytes();
    let mut times = if wide { MAX_WIDE_UNITS } else { (MAX_B_BYTES / unit_bytes).max(1) };
    while times > 1 && out_blocks(out_features, times * unit) * tiles < MIN_EXPAND_BLOCKS {
        times /= 2;
    }
    times * unit
}

fn out_blocks(out_features: &[usize], outs_per_block: usize) -> usize {
    out_features.iter().map(|out| out.div_ceil(outs_per_block)).sum()
}

/// Rejects outputs whose expand blocks, together with `shrink_blocks` per tile, exceed the largest grid.
pub(crate) fn check_outputs(out_features: &[usize], capacity: Capacity, shrink_blocks: usize) -> Result<(), PlanError> {
    let [small, wide] = [capacity.max_tokens.min(FEW_TOKENS), capacity.max_tokens].map(|n| capacity.max_tiles(n));
    let max = (MAX_GRID_X / small.max(wide)).saturating_sub(shrink_blocks);
    // The smallest blocks are the most.
    let blocks = out_blocks(out_features, WIDE_OUTS);
    if blocks > max {
        let value = blocks * WIDE_OUTS;
        return Err(PlanError::Limit { what: "out_features", value, max: max * WIDE_OUTS });
    }
    Ok(())
}
