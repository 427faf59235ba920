//! Launch configurations of the operations on a layer's experts.

use std::fmt;

use super::{
    Device, WorkspaceBytes,
    capacity::{Capacity, RouteCapacity},
    error::PlanError,
    thresholds::{GroupedBy, K_TILE, K_TILES_PER_SLAB, ONE_BLOCK_ROUTES, RANK_TILE, is_staged},
};
#[cfg(any(feature = "cuda", test))]
use super::{
    shared_memory,
    thresholds::{
        OUT_TILE, ROUTES_PER_TILE, TOKENS_PER_TILE, WIDE_TILE,
        experts::{
            EXPAND_PIECES, MIN_OUTS_PER_WARP, SHRINK_PIECES, WIDE_OUTS, max_blocks, max_blocks_beside_base,
            max_wide_expand, max_wide_shrink, outs_per_warp,
        },
        linear::{LARGE_M_RANK_TILES, LARGE_M_WARPGROUPS, warpgroup_rank_tiles},
    },
};
#[cfg(feature = "cuda")]
use crate::ffi;
use crate::{
    DType,
    extent::product,
    model::{ExpertsSite, ProjectionSite},
};

/// Launch configurations of the operations on a layer's experts.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ExpertsPlan {
    dtype: DType,
    capacity: Capacity,
    top_k: usize,
    gate_up: ProjectionPlan,
    down: ProjectionPlan,
}

/// Launch configurations of the operations on one projection.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ProjectionPlan {
    capacity: Capacity,
    device: Device,
    num_experts: usize,
    in_features: usize,
    num_slices: usize,
    /// Output features of one slice.
    out_features: usize,
    from_tokens: bool,
    interleaved: bool,
}

/// How expand divides its work.
#[cfg(any(feature = "cuda", test))]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum ExpandBy {
    /// By tile of routes and by range of outputs of one slice.
    Slices,
    /// By tile of routes and by range of outputs, which a warp computes for all slices.
    Routes,
    /// By token and by range of outputs.
    Tokens,
}

/// Grid sizes of shrink and expand, and outputs per expand block (wide tiles) or warp (small tiles). All choices are bit-identical.
#[cfg(any(feature = "cuda", test))]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct GridSizes {
    pub(crate) shrink: usize,
    pub(crate) expand: usize,
    pub(crate) outs: usize,
}

/// Launch configuration of one operation.
#[cfg(any(feature = "cuda", test))]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct ProjectionLaunch {
    pub(crate) small: GridSizes,
    /// Set if wide tiles are possible. The device chooses the tile size.
    pub(crate) wide: Option<WideLaunch>,
}

/// The launches on wide tiles.
#[cfg(any(feature = "cuda", test))]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct WideLaunch {
    pub(crate) grid: GridSizes,
    /// Of a block of shrink: rank tiles of a warpgroup, and warpgroups.
    pub(crate) rank_tiles: usize,
    pub(crate) warpgroups: usize,
    /// Shared memory of a block, in bytes.
    pub(crate) shrink_bytes: usize,
    pub(crate) expand_bytes: usize,
}

impl ExpertsPlan {
    /// Plans the experts of a layer for batches within `capacity`, with up to [`ExpertsSite::top_k`] experts per token, on an H100.
    ///
    /// # Errors
    /// [`PlanError::NoTopK`] if the site has no number of experts per token, [`PlanError::Limit`] if the kernels do not support a size
    /// or a bound.
    pub fn new(site: &ExpertsSite, dtype: DType, capacity: Capacity) -> Result<Self, PlanError> {
        let capacity = capacity.checked()?;
        let (num_experts, top_k) = (site.held().len(), site.top_k());
        if top_k == 0 {
            return Err(PlanError::NoTopK);
        }
        RouteCapacity { max_tokens: capacity.max_tokens, top_k, num_experts }.checked()?;
        let projection = |site: &ProjectionSite, from_tokens| ProjectionPlan {
            capacity,
            device: Device::H100,
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

    /// The same experts on another device, whose multiprocessors the grids fill. Neither the results nor the workspace depend on it.
    #[must_use]
    pub fn on(self, device: Device) -> Self {
        let device = device.sizable();
        let (gate_up, down) = (ProjectionPlan { device, ..self.gate_up }, ProjectionPlan { device, ..self.down });
        Self { gate_up, down, ..self }
    }

    /// Workspace for any batch within the capacity, for both projections.
    pub fn workspace_bytes(&self) -> WorkspaceBytes {
        let bytes = |plan: &ProjectionPlan| plan.workspace_bytes_for(self.capacity.max_tokens, self.top_k);
        bytes(&self.gate_up).max(bytes(&self.down))
    }

    /// The projection before the activation.
    pub fn gate_up(&self) -> &ProjectionPlan {
        &self.gate_up
    }

    /// The projection after the activation.
    pub fn down(&self) -> &ProjectionPlan {
        &self.down
    }

    /// The capacity of the plan.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// The largest number of experts per token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// The bounds on the routes of a step.
    pub fn routes(&self) -> RouteCapacity {
        let num_experts = self.gate_up.num_experts;
        RouteCapacity { max_tokens: self.capacity.max_tokens, top_k: self.top_k, num_experts }
    }

    /// The element type of activations and factors.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

impl ProjectionPlan {
    /// Workspace for a batch of `num_tokens` tokens with `top_k` experts each.
    pub fn workspace_bytes_for(&self, num_tokens: usize, top_k: usize) -> WorkspaceBytes {
        // Rows of sums: one per route, and one per token where the routes of a token may share them. The mailbox tags each sum. The
        // partials of operations with wide tiles do not.
        let routes = product(&[num_tokens, top_k]);
        let rows = routes.saturating_add(if self.from_tokens { num_tokens } else { 0 });
        let ranks = self.capacity.max_rank.next_multiple_of(RANK_TILE);
        let sums = product(&[self.num_slabs(), rows, self.num_slices, ranks]);
        let partials = if self.is_wide(routes) { product(&[sums, size_of::<f32>()]) } else { 0 };
        WorkspaceBytes { mailbox: WorkspaceBytes::mailbox_of(sums), partials }
    }

    /// Whether the operations that add or write deltas may use wide tiles, with separate launches for shrink and expand.
    fn is_wide(&self, num_routes: usize) -> bool {
        GroupedBy::of(num_routes) == GroupedBy::Kernel && is_staged(self.capacity.max_rank) && !self.interleaved
    }

    /// Whether the fused operation (`activate` for gate-up, `combine` for down) is faster for this many routes than adding the
    /// delta and then running the engine's own kernel.
    pub fn prefers_fused(&self, num_routes: usize) -> bool {
        !self.is_wide(num_routes)
    }

    /// The launches for a batch of `num_tokens` tokens with `top_k` experts each, of adapters in a table of ranks up to `table_rank`, which
    /// is at most the capacity's; of an operation that runs beside the base operation in front or not.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn launch(
        &self,
        (num_tokens, top_k, table_rank): (usize, usize, usize),
        by: ExpandBy,
        beside_base: bool,
    ) -> ProjectionLaunch {
        let (num_routes, multiprocessors) = (num_tokens * top_k, self.device.multiprocessors);
        let rank_tiles = self.num_slices * self.capacity.max_rank.div_ceil(RANK_TILE);
        let wide = (by == ExpandBy::Slices && self.is_wide(num_routes)).then(|| {
            let tiles = self.max_tiles(WIDE_TILE, num_routes);
            let of_tokens = if self.from_tokens { self.capacity.max_wide_tiles(num_tokens) } else { 0 };
            let shrink_pieces = rank_tiles.div_ceil(LARGE_M_RANK_TILES) * self.num_slabs();
            let expand_pieces = self.num_slices * self.out_features.div_ceil(WIDE_OUTS);
            let grid = GridSizes {
                shrink: ((tiles + of_tokens) * shrink_pieces).min(max_wide_shrink(multiprocessors)),
                expand: (tiles * expand_pieces).min(max_wide_expand(multiprocessors)),
                outs: WIDE_OUTS,
            };
            let all_rank_tiles = self.num_slices * table_rank.div_ceil(RANK_TILE);
            let rank_tiles = warpgroup_rank_tiles(all_rank_tiles);
            let most = LARGE_M_WARPGROUPS.min(all_rank_tiles.div_ceil(rank_tiles));
            let (warpgroups, shrink_bytes) = shared_memory::wide_shrink(rank_tiles, most, self.device);
            let expand_bytes = shared_memory::wide_expand(table_rank, self.device);
            WideLaunch { grid, rank_tiles, warpgroups, shrink_bytes, expand_bytes }
        });
        let tiles = self.max_tiles(ROUTES_PER_TILE, num_routes);
        let of_tokens = if self.from_tokens {
            self.capacity.max_small_tiles(num_tokens) * (TOKENS_PER_TILE / ROUTES_PER_TILE)
        } else {
            0
        };
        let shrink_pieces = rank_tiles * self.num_slabs();
        let (expand_tiles, outs, slices) = match by {
            ExpandBy::Slices => (tiles, self.outs_per_warp(table_rank), self.num_slices),
            ExpandBy::Routes => (tiles, MIN_OUTS_PER_WARP, 1),
            ExpandBy::Tokens => (num_tokens, MIN_OUTS_PER_WARP, 1),
        };
        let expand_pieces = slices * self.out_features.div_ceil(outs);
        let grouped_by = GroupedBy::of(num_routes);
        let max_small = max_blocks(grouped_by, multiprocessors);
        let max_expand = if beside_base { max_blocks_beside_base(multiprocessors) } else { max_small };
        // If one block groups the routes, shrink gets one block less, so that all blocks of shrink start at once.
        let max_shrink = max_small - usize::from(grouped_by == GroupedBy::FirstOperation);
        // At least all pieces of one tile.
        let blocks = |tiles: usize, pieces: usize, at_once: usize, max: usize| {
            (tiles * pieces).div_ceil(at_once).min(max).max(pieces.div_ceil(at_once))
        };
        let small = GridSizes {
            shrink: blocks(tiles + of_tokens, shrink_pieces, SHRINK_PIECES, max_shrink),
            expand: blocks(expand_tiles, expand_pieces, EXPAND_PIECES, max_expand),
            outs,
        };
        ProjectionLaunch { small, wide }
    }

    /// The thread blocks of expand that announce their ends, in an activation of so many routes; 0 if they do not.
    #[cfg(feature = "cuda")]
    pub(crate) fn announced_blocks(num_routes: usize, grid: GridSizes) -> i32 {
        let is_few = GroupedBy::of(num_routes) == GroupedBy::EachOperation;
        i32::try_from(grid.expand).ok().filter(|&blocks| is_few && blocks <= ffi::ARIL_ACTIVATION_BLOCKS).unwrap_or(0)
    }

    /// Outputs of one slice that a warp of expand computes.
    #[cfg(any(feature = "cuda", test))]
    fn outs_per_warp(&self, table_rank: usize) -> usize {
        let outs = outs_per_warp(self.capacity.max_rank);
        let fit = shared_memory::warps_of_experts(table_rank, outs) <= shared_memory::of_block(self.device);
        if fit { outs } else { OUT_TILE }
    }

    /// The largest number of tiles in `num_routes` routes. Each pair of a slot and an expert can leave one tile partly filled, as
    /// can the routes without a slot and the routes that are not local.
    #[cfg(any(feature = "cuda", test))]
    fn max_tiles(&self, size: usize, num_routes: usize) -> usize {
        let groups = self.num_experts * self.capacity.num_slots + 2;
        (num_routes + (size - 1) * groups.min(num_routes)) / size
    }

    fn num_slabs(&self) -> usize {
        self.in_features.div_ceil(K_TILE * K_TILES_PER_SLAB)
    }
}

impl fmt::Display for ExpertsPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Capacity { max_tokens, num_slots, max_rank } = self.capacity;
        let WorkspaceBytes { mailbox, partials } = self.workspace_bytes();
        let is_wide = |plan: &ProjectionPlan| self.dtype != DType::F32 && plan.is_wide(max_tokens * self.top_k);
        let wide = match (is_wide(&self.gate_up), is_wide(&self.down)) {
            (true, _) => format!(", three that add or write more than {ONE_BLOCK_ROUTES} routes"),
            (false, true) => format!(", three that add or write more than {ONE_BLOCK_ROUTES} routes of down"),
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

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use proptest::prelude::*;

    use super::{ExpandBy, ExpertsPlan, GridSizes};
    use crate::{
        DType,
        model::{Experts, Halves, ModelSpec, TpRank},
        plan::{Capacity, Device},
    };

    fn plan(experts: Experts, capacity: Capacity) -> ExpertsPlan {
        let mut spec = ModelSpec::new();
        let id = spec.experts(experts).unwrap();
        ExpertsPlan::new(&spec.shard(TpRank::SINGLE).unwrap()[id], DType::BF16, capacity).unwrap()
    }

    proptest! {
        /// However the routes are spread over experts and slots, those without a slot and those that are not local among them.
        #[test]
        fn max_tiles_bounds_every_spread_and_is_reached(
            (num_experts, num_slots) in (1..6_usize, 1..6_usize),
            routes in prop::collection::vec(0..40_usize, 1..40),
            size in prop::sample::select(vec![8, 64_usize]),
        ) {
            let capacity = Capacity::tokens(4096).slots(num_slots).rank(8);
            let plan = plan(Experts::new("m", num_experts, 8, 8).top_k(1), capacity).gate_up;
            let groups = num_experts * num_slots + 2;
            let tiles = |counts: &[usize]| -> usize { counts.iter().map(|count| count.div_ceil(size)).sum() };
            let routes = &routes[..routes.len().min(groups)];
            prop_assert!(tiles(routes) <= plan.max_tiles(size, routes.iter().sum()));
            // One route in each group, and the rest in one of them.
            let num_routes: usize = routes.iter().sum();
            let groups = groups.min(num_routes);
            let mut worst = vec![1; groups];
            if let Some(first) = worst.first_mut() {
                *first += num_routes - groups;
            }
            prop_assert_eq!(tiles(&worst), plan.max_tiles(size, num_routes));
        }
    }

    /// `shrink + expand blocks of outs` of small tiles, then of wide ones if there are.
    fn printed(plan: &ExpertsPlan, num_tokens: usize, top_k: usize, by: ExpandBy) -> String {
        printed_of(plan, (num_tokens, top_k), by, false)
    }

    fn printed_of(plan: &ExpertsPlan, (num_tokens, top_k): (usize, usize), by: ExpandBy, beside_base: bool) -> String {
        let blocks = |GridSizes { shrink, expand, outs }: GridSizes| format!("{shrink} + {expand} of {outs}");
        let projections = [plan.gate_up(), plan.down()].map(|projection| {
            let launch = projection.launch((num_tokens, top_k, plan.capacity().max_rank), by, beside_base);
            let wide = launch.wide.map(|wide| format!(" | {}", blocks(wide.grid))).unwrap_or_default();
            blocks(launch.small) + &wide
        });
        projections.join("; ")
    }

    /// The launches that the figures of the record are of: gate_up, then down.
    #[test]
    fn launches_are_those_that_were_measured() {
        use ExpandBy::{Routes, Slices, Tokens};
        let qwen3 = |slots, rank| {
            plan(Experts::new("m", 128, 2048, 768).top_k(8), Capacity::tokens(4096).slots(slots).rank(rank))
        };
        let gpt_oss = Experts::new("m", 32, 2880, 2880).top_k(4).halves(Halves::Interleaved);
        let gpt_oss = plan(gpt_oss, Capacity::tokens(4096).slots(8).rank(128));
        let small = plan(Experts::new("m", 2, 100, 70).top_k(2).ungated(), Capacity::tokens(4096).slots(2).rank(17));
        let launches = [
            (printed(&qwen3(4, 16), 1, 8, Slices), "40 + 12 of 128; 8 + 16 of 128"),
            (printed(&qwen3(4, 16), 1, 8, Routes), "40 + 24 of 32; 8 + 64 of 32"),
            (printed(&qwen3(4, 16), 1, 8, Tokens), "40 + 3 of 32; 8 + 8 of 32"),
            (printed(&qwen3(4, 17), 8, 8, Slices), "132 + 132 of 64; 96 + 132 of 64"),
            (printed(&qwen3(4, 17), 9, 8, Slices), "263 + 216 of 64; 108 + 264 of 64"),
            (printed(&qwen3(4, 16), 128, 8, Slices), "263 + 264 of 128; 263 + 264 of 128"),
            (
                printed(&qwen3(4, 16), 129, 8, Slices),
                "264 + 264 of 128 | 1056 + 1044 of 1024; 264 + 264 of 128 | 522 + 1044 of 1024",
            ),
            (printed(&qwen3(1, 64), 129, 8, Routes), "264 + 264 of 32; 264 + 264 of 32"),
            (
                printed(&qwen3(1, 128), 4096, 8, Slices),
                "264 + 264 of 64 | 1056 + 1188 of 1024; 264 + 264 of 64 | 1056 + 1188 of 1024",
            ),
            (printed(&qwen3(1, 129), 4096, 8, Slices), "264 + 264 of 64; 264 + 264 of 64"),
            (printed_of(&qwen3(4, 16), (8, 8), Routes, false), "132 + 132 of 32; 64 + 132 of 32"),
            (printed_of(&qwen3(4, 16), (8, 8), Routes, true), "132 + 192 of 32; 64 + 264 of 32"),
            (printed(&gpt_oss, 16, 4, Tokens), "132 + 132 of 32; 132 + 132 of 32"),
            (printed(&gpt_oss, 700, 4, Slices), "264 + 264 of 64; 264 + 264 of 64 | 1056 + 891 of 1024"),
            (printed(&small, 3, 2, Slices), "18 + 2 of 64; 9 + 2 of 64"),
            (printed(&small, 32, 2, Routes), "32 + 5 of 32; 20 + 7 of 32"),
            (printed(&small, 33, 2, Slices), "32 + 4 of 64; 20 + 4 of 64"),
            (printed(&small, 600, 2, Slices), "264 + 39 of 64 | 36 + 24 of 1024; 233 + 39 of 64 | 24 + 24 of 1024"),
            (printed(&small, 5, 2, Tokens), "18 + 2 of 32; 9 + 3 of 32"),
        ];
        let smaller = qwen3(4, 16).on(Device { multiprocessors: 66, ..Device::H100 });
        assert_eq!(printed(&smaller, 8, 8, Routes), "66 + 66 of 32; 64 + 66 of 32");
        assert_eq!(
            printed(&smaller, 129, 8, Slices),
            "132 + 132 of 128 | 528 + 594 of 1024; 132 + 132 of 128 | 522 + 594 of 1024"
        );
        for (number, (printed, expected)) in launches.into_iter().enumerate() {
            assert_eq!(printed, expected, "launch {number}");
        }
    }

    /// Rank tiles of a warpgroup, warpgroups, and bytes of shrink and of expand, of gate_up and then of down. A warpgroup need not have
    /// room for a slice, as it must in a linear layer.
    #[test]
    fn blocks_of_wide_tiles_are_those_that_were_measured() {
        let blocks = |rank: usize, device: Device| {
            let qwen3 = Experts::new("m", 128, 2048, 768).top_k(8);
            let plan = plan(qwen3, Capacity::tokens(4096).slots(4).rank(rank)).on(device);
            [plan.gate_up(), plan.down()].map(|plan| {
                let wide = plan.launch((512, 8, rank), ExpandBy::Slices, false).wide.unwrap();
                [wide.rank_tiles, wide.warpgroups, wide.shrink_bytes, wide.expand_bytes]
            })
        };
        let launches = [
            (8, [[2, 1, 40_960, 49_152], [2, 1, 40_960, 49_152]]),
            (16, [[4, 1, 49_152, 53_248], [2, 1, 40_960, 53_248]]),
            (32, [[8, 1, 65_536, 65_536], [4, 1, 49_152, 65_536]]),
            (64, [[8, 2, 98_304, 90_112], [8, 1, 65_536, 90_112]]),
            (128, [[8, 3, 131_072, 114_688], [8, 2, 98_304, 114_688]]),
        ];
        for (rank, expected) in launches {
            assert_eq!(blocks(rank, Device::H100), expected, "rank {rank}");
        }
        let little = Device { shared_bytes: 99 << 10, shared_bytes_per_multiprocessor: 100 << 10, ..Device::H100 };
        assert_eq!(blocks(128, little), [[8, 1, 65_536, 89_088], [8, 1, 65_536, 89_088]]);
    }

    /// A warp has 128 outputs up to rank 16, where its block has shared memory for them: 96 KB beside static variables.
    #[test]
    fn warps_have_as_many_outputs_as_fit() {
        let outs = |rank, kilobytes: usize| {
            let qwen3 = Experts::new("m", 128, 2048, 768).top_k(8);
            let plan = plan(qwen3, Capacity::tokens(4096).slots(4).rank(rank));
            let plan = plan.on(Device { shared_bytes: kilobytes << 10, ..Device::H100 });
            plan.down().launch((8, 8, rank), ExpandBy::Slices, false).small.outs
        };
        assert_eq!([99, 107, 108, 227].map(|kilobytes| outs(16, kilobytes)), [64, 64, 128, 128]);
        assert_eq!([99, 227].map(|kilobytes| outs(8, kilobytes)), [128, 128]);
        assert_eq!(outs(17, 227), 64);
    }
}
