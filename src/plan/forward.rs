use std::fmt;

use super::{Capacity, EXCHANGE_HEADER, PlanError, WorkspaceBytes, limit};
use crate::{
    DType, ffi,
    model::{LinearSite, SliceSite},
};

/// The most tokens of a fused linear.
pub const MAX_FORWARD_TOKENS: usize = ffi::ARIL_FORWARD_TOKENS as usize;

const UNIT_ROWS: usize = ffi::ARIL_FORWARD_UNIT_ROWS as usize;
const BLOCK_ROWS: usize = ffi::ARIL_FORWARD_BLOCK_ROWS as usize;
const PARTS: usize = ffi::ARIL_FORWARD_PARTS as usize;
/// Ranks that are exchanged together, and the bytes of two of them with their tag.
const PAIR_RANKS: usize = 16;
const ENTRY_BYTES: usize = 16;
/// What rows of W and x have a multiple of, in elements of two bytes.
const ROW_ELEMS: usize = ffi::ARIL_FORWARD_ALIGNMENT as usize / 2;
/// Units of a cluster of two blocks, at most.
const MAX_SPLIT_UNITS: usize = 12;
/// Blocks that a launch has at most, if the layer is not a very large one: one for each multiprocessor of an H200. It is no
/// device's own number, as the order of sums depends on it.
const BLOCKS: usize = 132;

/// How a fused linear is launched: `y = x Wᵀ + bias + scaling · B (A x)` of up to [`MAX_FORWARD_TOKENS`] tokens.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ForwardPlan {
    dtype: DType,
    out_features: Vec<usize>,
    capacity: Capacity,
    splits: usize,
    units: usize,
}

impl ForwardPlan {
    /// Plans a layer for batches within `capacity`, of which larger batches are left to other operations.
    ///
    /// # Errors
    /// If the kernel cannot take the element type, the shape or the bounds.
    pub fn new(site: &LinearSite, dtype: DType, capacity: Capacity) -> Result<Self, PlanError> {
        let capacity = capacity.checked()?;
        if dtype == DType::F32 {
            return Err(PlanError::ForwardDType { got: dtype });
        }
        let in_features = site.in_features();
        if !in_features.is_multiple_of(ROW_ELEMS) {
            return Err(PlanError::Multiple { what: "in_features", value: in_features, of: ROW_ELEMS });
        }
        // Copies count in `i32`.
        limit("in_features", in_features, i32::MAX as usize / 4)?;
        let out_features: Vec<usize> = site.slices().iter().map(SliceSite::out_features).collect();
        limit("out_features", out_features.iter().sum(), i32::MAX as usize / 4)?;
        let (splits, units) = share_out(&out_features);
        Ok(Self { dtype, out_features, capacity, splits, units })
    }

    /// The workspace that a batch of `num_tokens` needs.
    pub fn workspace_bytes_for(&self, num_tokens: usize) -> WorkspaceBytes {
        let pairs = self.out_features.len() * self.capacity.max_rank.next_multiple_of(PAIR_RANKS) / 2;
        WorkspaceBytes { exchange: EXCHANGE_HEADER + PARTS * num_tokens * pairs * ENTRY_BYTES, planes: 0 }
    }

    /// A workspace for any batch within the capacity.
    pub fn workspace_bytes(&self) -> WorkspaceBytes {
        self.workspace_bytes_for(self.max_tokens())
    }

    /// The most tokens of a batch: the capacity's, up to [`MAX_FORWARD_TOKENS`].
    pub fn max_tokens(&self) -> usize {
        self.capacity.max_tokens.min(MAX_FORWARD_TOKENS)
    }

    /// Blocks that share a row's input features. A function of the shape alone, as the order of sums depends on it.
    pub fn splits(&self) -> usize {
        self.splits
    }

    /// Blocks of the launch.
    pub fn blocks(&self) -> usize {
        clusters(&self.out_features, self.units) * self.splits
    }

    /// Units of rows of W that a cluster of blocks has.
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

/// Blocks that share a row, and the units of rows that they have: two blocks unless there are rows enough for one, and the fewest
/// units of which every cluster has a place at once.
fn share_out(out_features: &[usize]) -> (usize, usize) {
    let units: usize = out_features.iter().map(|&out| slice_units(out)).sum();
    let splits = if units > BLOCKS / 2 * MAX_SPLIT_UNITS { 1 } else { 2 };
    let most = BLOCKS / splits;
    let last = if splits == 1 { units } else { MAX_SPLIT_UNITS };
    let fits = |&of_cluster: &usize| clusters(out_features, of_cluster) <= most;
    (splits, (units.div_ceil(most)..last).find(fits).unwrap_or(last))
}

fn clusters(out_features: &[usize], units: usize) -> usize {
    out_features.iter().map(|&out| slice_units(out).div_ceil(units)).sum()
}

/// Of whole blocks of rows, which B's tiles have.
fn slice_units(out_features: usize) -> usize {
    out_features.div_ceil(BLOCK_ROWS) * (BLOCK_ROWS / UNIT_ROWS)
}

impl fmt::Display for ForwardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "fused linear {}, up to {} tokens, rank {}: {} blocks, {} of a row, {} rows each, {} bytes of workspace",
            self.dtype,
            self.max_tokens(),
            self.capacity.max_rank,
            self.blocks(),
            self.splits,
            self.units * UNIT_ROWS,
            self.workspace_bytes().exchange,
        )
    }
}
