use std::fmt;

use super::{
    Capacity, LANE_FEATURES, LANES_PER_GROUP, MAILBOX_HEADER, MAX_SLOTS, MULTIPROCESSORS, PlanError, RANK_TILE,
    STAGED_RANK, WIDE_TILE, WorkspaceBytes, limit,
};
use crate::{
    DType, ffi,
    model::{ExpertsSite, ProjectionSite},
};

/// The most experts of a layer that a rank can hold.
const MAX_EXPERTS: usize = ffi::ARIL_MAX_EXPERTS as usize;
const ROUTES_PER_TILE: usize = ffi::ARIL_ROUTES_PER_TILE as usize;
const FEW_ROUTES: usize = ffi::ARIL_ONE_BLOCK_ROUTES as usize;
const TOKENS_PER_TILE: usize = ffi::ARIL_TOKENS_PER_TILE as usize;
/// Pieces that a block of shrink works on at a time, and a block of expand.
const SHRINK_PIECES: usize = 2;
const EXPAND_PIECES: usize = 8;
/// The least outputs that a warp of expand works on where these are of all slices, or of tokens.
const OUTS_PER_UNIT: usize = ffi::ARIL_OUT_UNIT as usize;
/// Outputs of a slice that a warp of expand works on elsewhere: of few ranks, and of more. (H100: 128 are up to 6 % faster than 64.)
const OUTS_PER_WARP: usize = 128;
const OUTS_PER_WARP_OF_MANY_RANKS: usize = ffi::ARIL_OUT_TILE as usize;
const FEW_RANKS: usize = 16;
/// The most blocks of either: of the fewest routes, so that the device has room for both at a time, and of more. (H100: up to 15 %
/// faster each.)
const MAX_BLOCKS_FOR_FEWEST: usize = MULTIPROCESSORS;
const MAX_BLOCKS: usize = 2 * MULTIPROCESSORS;
const FEWEST_ROUTES: usize = ffi::ARIL_EACH_BLOCK_ROUTES as usize;
/// With wide tiles, tiles of ranks that a block of shrink works on; and outputs of a slice that a block of expand does. (H100: 1024 are
/// 2 to 12 % faster than 768, 512 or 256.)
const WIDE_COLUMNS: usize = 8;
const WIDE_OUTS: usize = 1024;
/// The most blocks of either with wide tiles. (H100: up to 4 % faster than as many as the device has room for at a time, since what a
/// block does differs; twice as many are no faster, and take longer to find that there is nothing to do.)
const MAX_WIDE_SHRINK: usize = 8 * MULTIPROCESSORS;
const MAX_WIDE_EXPAND: usize = 9 * MULTIPROCESSORS;

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

/// How the operations on a layer's experts are launched.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ExpertsPlan {
    dtype: DType,
    capacity: Capacity,
    top_k: usize,
    gate_up: ProjectionPlan,
    down: ProjectionPlan,
}

/// How those on one projection are.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ProjectionPlan {
    capacity: Capacity,
    num_experts: usize,
    in_features: usize,
    num_slices: usize,
    /// Of a slice.
    out_features: usize,
    from_tokens: bool,
    interleaved: bool,
}

/// What expand goes by.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only the GPU launches"))]
pub(crate) enum ExpandBy {
    /// Tiles of routes, and outputs of a slice.
    Slices,
    /// Tiles of routes, and the same outputs of all slices.
    Routes,
    /// Tokens, and outputs.
    Tokens,
}

/// Blocks of a launch, and the outputs that one of expand has. The bits of the result do not depend on them.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Blocks {
    pub(crate) shrink: usize,
    pub(crate) expand: usize,
    pub(crate) outs: usize,
}

/// How an operation is launched.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct ProjectionLaunch {
    pub(crate) small: Blocks,
    /// If there may be wide tiles. The device decides which ones it goes by.
    pub(crate) wide: Option<Blocks>,
}

impl ExpertsPlan {
    /// Plans the experts of a layer for batches within `capacity`, whose tokens have up to [`ExpertsSite::top_k`] routes.
    ///
    /// # Errors
    /// If the kernels cannot take the shape or the bounds.
    pub fn new(site: &ExpertsSite, dtype: DType, capacity: Capacity) -> Result<Self, PlanError> {
        let capacity = capacity.checked()?;
        let (num_experts, top_k) = (site.held().len(), site.top_k());
        RouteCapacity { max_tokens: capacity.max_tokens, top_k, num_experts }.checked()?;
        let projection = |site: &ProjectionSite, from_tokens| ProjectionPlan {
            capacity,
            num_experts,
            in_features: site.in_features(),
            num_slices: site.num_slices(),
            out_features: site.out_features() / site.num_slices(),
            from_tokens,
            interleaved: site.columns(0).1 > 1,
        };
        let (gate_up, down) = (projection(site.gate_up(), true), projection(site.down(), false));
        Ok(Self { dtype, capacity, top_k, gate_up, down })
    }

    /// A workspace for any batch within the capacity, and both projections.
    pub fn workspace_bytes(&self) -> WorkspaceBytes {
        let bytes = |plan: &ProjectionPlan| plan.workspace_bytes_for(self.capacity.max_tokens, self.top_k);
        bytes(&self.gate_up).max(bytes(&self.down))
    }

    /// Of what is before the activation.
    pub fn gate_up(&self) -> &ProjectionPlan {
        &self.gate_up
    }

    /// Of what is after it.
    pub fn down(&self) -> &ProjectionPlan {
        &self.down
    }

    /// The bounds it was planned for.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// Experts that a token may choose.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// The bounds on the routes of a step.
    pub fn routes(&self) -> RouteCapacity {
        let num_experts = self.gate_up.num_experts;
        RouteCapacity { max_tokens: self.capacity.max_tokens, top_k: self.top_k, num_experts }
    }

    /// The element type it was planned for.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

impl ProjectionPlan {
    /// The workspace that a batch of `num_tokens` with `top_k` routes each needs.
    pub fn workspace_bytes_for(&self, num_tokens: usize, top_k: usize) -> WorkspaceBytes {
        // Sums of routes, and of tokens where these may share them: with a tag, and without, for those operations that have wide tiles.
        let rows = num_tokens * top_k + if self.from_tokens { num_tokens } else { 0 };
        let sums = self.num_groups() * rows * self.num_slices * self.capacity.max_rank.next_multiple_of(RANK_TILE);
        let partials = if self.is_wide(num_tokens * top_k) { sums * size_of::<f32>() } else { 0 };
        WorkspaceBytes { mailbox: MAILBOX_HEADER + sums * 2 * size_of::<f32>(), partials }
    }

    /// Whether adding and writing may have tiles of up to 64 routes, and a launch each for shrink and expand.
    fn is_wide(&self, num_routes: usize) -> bool {
        num_routes > FEW_ROUTES && self.capacity.max_rank <= STAGED_RANK && !self.interleaved
    }

    /// The blocks for a batch of `num_tokens` with `top_k` routes each.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only the GPU launches"))]
    pub(crate) fn launch(&self, num_tokens: usize, top_k: usize, by: ExpandBy) -> ProjectionLaunch {
        let num_routes = num_tokens * top_k;
        let rank_tiles = self.num_slices * self.capacity.max_rank.div_ceil(RANK_TILE);
        let wide = (by == ExpandBy::Slices && self.is_wide(num_routes)).then(|| {
            let tiles = self.max_tiles(WIDE_TILE, num_routes);
            let of_tokens = if self.from_tokens { self.capacity.tiles_of(WIDE_TILE, num_tokens) } else { 0 };
            let shrink_pieces = rank_tiles.div_ceil(WIDE_COLUMNS) * self.num_groups();
            let expand_pieces = self.num_slices * self.out_features.div_ceil(WIDE_OUTS);
            Blocks {
                shrink: ((tiles + of_tokens) * shrink_pieces).min(MAX_WIDE_SHRINK),
                expand: (tiles * expand_pieces).min(MAX_WIDE_EXPAND),
                outs: WIDE_OUTS,
            }
        });
        let tiles = self.max_tiles(ROUTES_PER_TILE, num_routes);
        let of_tokens = if self.from_tokens {
            self.capacity.max_small_tiles(num_tokens) * (TOKENS_PER_TILE / ROUTES_PER_TILE)
        } else {
            0
        };
        let shrink_pieces = rank_tiles * self.num_groups();
        let outs_per_warp =
            if self.capacity.max_rank <= FEW_RANKS { OUTS_PER_WARP } else { OUTS_PER_WARP_OF_MANY_RANKS };
        let (expand_tiles, outs, slices) = match by {
            ExpandBy::Slices => (tiles, outs_per_warp, self.num_slices),
            ExpandBy::Routes => (tiles, OUTS_PER_UNIT, 1),
            ExpandBy::Tokens => (num_tokens, OUTS_PER_UNIT, 1),
        };
        let expand_pieces = slices * self.out_features.div_ceil(outs);
        let max_expand = if num_routes <= FEWEST_ROUTES { MAX_BLOCKS_FOR_FEWEST } else { MAX_BLOCKS };
        // One less where there is one that sorts, so that all of shrink begin at once: none waits for that.
        let sorts = FEWEST_ROUTES < num_routes && num_routes <= FEW_ROUTES;
        let max_shrink = max_expand - usize::from(sorts);
        // All pieces of a tile at the least.
        let blocks = |tiles: usize, pieces: usize, at_once: usize, max: usize| {
            (tiles * pieces).div_ceil(at_once).min(max).max(pieces.div_ceil(at_once))
        };
        let small = Blocks {
            shrink: blocks(tiles + of_tokens, shrink_pieces, SHRINK_PIECES, max_shrink),
            expand: blocks(expand_tiles, expand_pieces, EXPAND_PIECES, max_expand),
            outs,
        };
        ProjectionLaunch { small, wide }
    }

    /// The most tiles that so many routes can be: each slot may leave one unfilled at each expert, and so may the routes that have
    /// none and those that are not here.
    fn max_tiles(&self, size: usize, num_routes: usize) -> usize {
        let groups = self.num_experts * self.capacity.num_slots + 2;
        (num_routes + (size - 1) * groups.min(num_routes)) / size
    }

    fn num_groups(&self) -> usize {
        self.in_features.div_ceil(LANE_FEATURES * LANES_PER_GROUP)
    }
}

impl fmt::Display for ExpertsPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Capacity { max_tokens, num_slots, max_rank } = self.capacity;
        let WorkspaceBytes { mailbox, partials } = self.workspace_bytes();
        let is_wide = |plan: &ProjectionPlan| self.dtype != DType::F32 && plan.is_wide(max_tokens * self.top_k);
        let wide = match (is_wide(&self.gate_up), is_wide(&self.down)) {
            (true, _) => format!(", three that add or write more than {FEW_ROUTES} routes"),
            (false, true) => format!(", three that add or write more than {FEW_ROUTES} routes of down"),
            (false, false) => String::new(),
        };
        write!(
            f,
            "experts {}, up to {max_tokens} tokens of {num_slots} slots with {} of {} experts each, rank {max_rank}: one launch for each \
             projection{wide}, {mailbox} + {partials} bytes of workspace",
            self.dtype, self.top_k, self.gate_up.num_experts,
        )
    }
}
