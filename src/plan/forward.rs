//! The launch of a fused linear layer.

use std::fmt;

use super::{
    capacity::{Capacity, limit},
    error::PlanError,
    thresholds::{
        MAILBOX_HEADER, MAX_FORWARD_TOKENS, WORD_BYTES,
        forward::{
            ALIGNED_FEATURES, BLOCK_ROWS, BLOCKS, MAX_FEATURES, PARTS, RANK_TILE, SPLIT_UNITS, UNIT_ROWS, UNITS,
        },
    },
    workspace::WorkspaceBytes,
};
use crate::{
    DType,
    model::{LinearSite, SliceSite},
};

/// How a fused linear layer is launched: `y = x Wᵀ + bias + scaling · B (A x)`, of up to [`MAX_FORWARD_TOKENS`] tokens.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ForwardPlan {
    dtype: DType,
    out_features: Vec<usize>,
    capacity: Capacity,
    splits: usize,
    units: usize,
}

impl ForwardPlan {
    /// Plans a layer for batches within `capacity`, of up to [`max_tokens`](Self::max_tokens) tokens.
    ///
    /// # Errors
    /// If no kernel takes the element type, the shape or the bounds: `f32`, `in_features` that are not a multiple of 8, or a fully
    /// sharded layer.
    pub fn new(site: &LinearSite, dtype: DType, capacity: Capacity) -> Result<Self, PlanError> {
        if site.exchange().is_some() {
            return Err(PlanError::FullySharded);
        }
        let capacity = capacity.checked()?;
        if dtype == DType::F32 {
            return Err(PlanError::FusedDType { got: dtype });
        }
        let in_features = site.in_features();
        limit("in_features", in_features, MAX_FEATURES)?;
        if !in_features.is_multiple_of(ALIGNED_FEATURES) {
            return Err(PlanError::Multiple { what: "in_features", value: in_features, of: ALIGNED_FEATURES });
        }
        let out_features: Vec<usize> = site.slices().iter().map(SliceSite::out_features).collect();
        limit("out_features", out_features.iter().sum(), MAX_FEATURES)?;
        let (splits, units) = share_out(&out_features);
        Ok(Self { dtype, out_features, capacity, splits, units })
    }

    /// Whether a device of that compute capability has the fused linear: from 9.0 on.
    pub const fn is_for((major, _minor): (i32, i32)) -> bool {
        major >= 9
    }

    /// The most tokens of a batch: the capacity's, up to [`MAX_FORWARD_TOKENS`]. A larger batch is for a GEMM of the engine's and
    /// `add_delta`, which sum up in another order.
    pub fn max_tokens(&self) -> usize {
        self.capacity.max_tokens.min(MAX_FORWARD_TOKENS)
    }

    /// The workspace that a batch of `num_tokens` needs.
    pub fn workspace_bytes_for(&self, num_tokens: usize) -> WorkspaceBytes {
        let ranks = self.capacity.max_rank.next_multiple_of(RANK_TILE);
        let sums = PARTS * num_tokens * self.out_features.len() * ranks;
        WorkspaceBytes { mailbox: MAILBOX_HEADER + sums * WORD_BYTES, partials: 0 }
    }

    /// A workspace for any batch of up to [`max_tokens`](Self::max_tokens).
    pub fn workspace_bytes(&self) -> WorkspaceBytes {
        self.workspace_bytes_for(self.max_tokens())
    }

    /// Blocks that share a row's input features. A function of the layer's shape alone, because the order of sums depends on it.
    pub fn splits(&self) -> usize {
        self.splits
    }

    /// Blocks of the launch.
    pub fn blocks(&self) -> usize {
        clusters(&self.out_features, self.units) * self.splits
    }

    /// Whether two blocks share the features of a row, and load x once for all rows that they have.
    pub(super) fn reads_input_once(&self) -> bool {
        self.splits == 2 && self.units <= UNITS
    }

    /// Units of rows of W that a cluster of blocks has. The bits of the result do not depend on it.
    #[cfg(feature = "cuda")]
    pub(crate) fn units(&self) -> usize {
        self.units
    }

    /// The bounds it was planned for.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// The element type it was planned for.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

/// The blocks that share a row, and their units of rows: two blocks, unless one block each has enough rows; and the fewest units with
/// which all clusters are resident at once.
fn share_out(out_features: &[usize]) -> (usize, usize) {
    let units: usize = out_features.iter().map(|&out| slice_units(out)).sum();
    let splits = if units > BLOCKS / 2 * SPLIT_UNITS { 1 } else { 2 };
    let most = BLOCKS / splits;
    let last = if splits == 1 { units } else { SPLIT_UNITS };
    let fits = |&of_cluster: &usize| clusters(out_features, of_cluster) <= most;
    (splits, (units.div_ceil(most)..last).find(fits).unwrap_or(last))
}

fn clusters(out_features: &[usize], units: usize) -> usize {
    out_features.iter().map(|&out| slice_units(out).div_ceil(units)).sum()
}

/// Of whole blocks of rows.
fn slice_units(out_features: usize) -> usize {
    out_features.div_ceil(BLOCK_ROWS) * (BLOCK_ROWS / UNIT_ROWS)
}

impl fmt::Display for ForwardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "fused linear {}, up to {} tokens, rank {}: {} blocks, {} to a row, {} rows to a cluster, {} bytes of workspace",
            self.dtype,
            self.max_tokens(),
            self.capacity.max_rank,
            self.blocks(),
            self.splits,
            self.units * UNIT_ROWS,
            self.workspace_bytes().mailbox,
        )
    }
}
