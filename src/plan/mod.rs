//! What a launch will look like, from shapes and upper bounds alone.
//!
//! Pure and printable: no device is needed to make a plan, and the same problem always has the same plan. The tiles are those of
//! `csrc/aril.h`, so that a plan and the kernels it is for cannot disagree.

use std::fmt;

use crate::{DType, ffi, model::LinearSite, model::MAX_RANK};

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
const K_PER_CHUNK: usize = ffi::ARIL_K_PER_CHUNK as usize;
const OUT_PER_TILE: usize = ffi::ARIL_OUT_PER_TILE as usize;

/// The most blocks in the second dimension of a CUDA grid.
const MAX_GRID_Y: usize = 65_535;

const SUM_LANES: usize = ffi::ARIL_SUM_LANES as usize;
const LANES_PER_GROUP: usize = ffi::ARIL_LANES_PER_GROUP as usize;
const V_ALIGNMENT: usize = ffi::ARIL_V_ALIGNMENT as usize;

/// [`lanes_per_split`] by the most tokens of a batch: few tokens fill the device only if many blocks share out a token's input, and
/// many tokens would only have more to add up.
const LANES_PER_SPLIT: [(usize, usize); 3] = [(16, 1), (1024, LANES_PER_GROUP), (usize::MAX, SUM_LANES)];

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

    /// The most tiles that `num_tokens` tokens can form: each slot may leave one of its tiles unfilled.
    pub fn max_tiles(&self, num_tokens: usize) -> usize {
        (num_tokens + (TOKENS_PER_TILE - 1) * self.num_slots.min(num_tokens)) / TOKENS_PER_TILE
    }
}

/// How many of the lanes of the sum over the input features a block of shrink takes. The bits of the result do not depend on it.
pub(crate) fn lanes_per_split(num_tokens: usize) -> usize {
    LANES_PER_SPLIT.into_iter().find(|(tokens, _)| num_tokens <= *tokens).map_or(SUM_LANES, |(_, lanes)| lanes)
}

/// Refuses an embedding that is too wide for a grid.
#[cfg(feature = "cuda")]
pub(crate) fn check_hidden(hidden: usize) -> Result<(), PlanError> {
    check_grid("hidden", hidden.div_ceil(OUT_PER_TILE), OUT_PER_TILE)
}

fn check_grid(what: &'static str, tiles: usize, per_tile: usize) -> Result<(), PlanError> {
    if tiles > MAX_GRID_Y {
        return Err(PlanError::Limit { what, value: tiles * per_tile, max: MAX_GRID_Y * per_tile });
    }
    Ok(())
}

/// How a linear layer is launched.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LinearPlan {
    dtype: DType,
    chunks: usize,
    out_tiles: usize,
    /// Floats that shrink leaves for one token.
    v_stride: usize,
    capacity: Capacity,
}

impl LinearPlan {
    /// Plans a layer for batches within `capacity`.
    ///
    /// # Errors
    /// If the kernels cannot take the shape or the bounds.
    pub fn new(site: &LinearSite, dtype: DType, capacity: Capacity) -> Result<Self, PlanError> {
        let capacity = capacity.checked()?;
        let chunks = site.in_features().div_ceil(K_PER_CHUNK);
        let out_tiles = site.slices().iter().map(|slice| slice.out_features().div_ceil(OUT_PER_TILE)).sum();
        check_grid("in_features", chunks, K_PER_CHUNK)?;
        check_grid("out_features", out_tiles, OUT_PER_TILE)?;
        Ok(Self {
            dtype,
            chunks,
            out_tiles,
            v_stride: site.slices().len() * capacity.max_rank.next_multiple_of(V_ALIGNMENT),
            capacity,
        })
    }

    /// Blocks that share a token's input in shrink.
    pub fn num_splits(&self, num_tokens: usize) -> usize {
        self.chunks.min(SUM_LANES).div_ceil(lanes_per_split(num_tokens))
    }

    /// The workspace that a batch of `num_tokens` needs.
    pub fn workspace_bytes_for(&self, num_tokens: usize) -> usize {
        self.num_splits(num_tokens) * num_tokens * self.v_stride * size_of::<f32>()
    }

    /// The workspace that any batch within the capacity needs.
    pub fn workspace_bytes(&self) -> usize {
        let max_tokens = self.capacity.max_tokens;
        let largest = LANES_PER_SPLIT.map(|(tokens, _)| self.workspace_bytes_for(tokens.min(max_tokens)));
        largest.into_iter().max().unwrap_or(0)
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

impl fmt::Display for LinearPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dtype, chunks, out_tiles, capacity: Capacity { max_tokens, num_slots, max_rank }, .. } = self;
        let tiles = self.capacity.max_tiles(*max_tokens);
        let splits = self.num_splits(*max_tokens);
        write!(
            f,
            "linear {dtype}, up to {max_tokens} tokens of {num_slots} slots, rank {max_rank}: {tiles} tiles, \
             shrink {splits} splits of {chunks} chunks, expand {out_tiles} output tiles, {} bytes of workspace",
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
