//! Launch configurations of the operations on a layer's experts.

use std::fmt;

#[cfg(any(feature = "cuda", test))]
use super::{
    BatchBounds, int, shared_memory,
    thresholds::{
        OUT_TILE, ROUTES_PER_TILE, TOKENS_PER_TILE, WIDE_TILE,
        experts::{EXPAND_PIECES, MIN_OUTS_PER_WARP, SHRINK_PIECES},
        linear::{LARGE_M_RANK_TILES, LARGE_M_WARPGROUPS, warpgroup_rank_tiles},
    },
};
use super::{
    Device, WorkspaceBytes,
    capacity::{Capacity, RouteCapacity},
    error::PlanError,
    thresholds::{GroupedBy, K_TILE, K_TILES_PER_SLAB, ONE_BLOCK_ROUTES, RANK_TILE, is_staged},
};
#[cfg(any(feature = "cuda", test))]
use crate::ffi;
use crate::{
    DType,
    model::{ExpertsSite, ProjectionSite},
    sizes::product,
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
    dtype: DType,
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

/// What the launch of an operation on experts is sized by, beside the layer.
#[cfg(any(feature = "cuda", test))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertsBatch {
    pub(crate) bounds: BatchBounds,
    /// Experts of a token.
    pub(crate) top_k: usize,
    /// Whether an operation before this one, or a kernel, has grouped the routes.
    pub(crate) is_grouped: bool,
    pub(crate) inputs: Inputs,
}

/// What has completed when an operation starts.
#[cfg(any(feature = "cuda", test))]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Inputs {
    /// Nothing: it waits for the work in front of it.
    InFront,
    /// All work but the base operation in front.
    Complete,
    /// All work but the base operation in front and the activation before that, so many blocks of which announce their
    /// ends.
    Announced(i32),
}

impl ExpertsPlan {
    /// Plans the experts of a layer for batches within `capacity`, with up to [`ExpertsSite::top_k`] experts per token,
    /// on an H100.
    ///
    /// # Errors
    /// [`PlanError::NoTopK`] if the site has no number of experts per token, [`PlanError::Limit`] if the kernels do not
    /// support a size or a bound.
    pub fn new(site: &ExpertsSite, dtype: DType, capacity: Capacity) -> Result<Self, PlanError> {
        let capacity = capacity.checked()?;
        let (num_experts, top_k) = (site.held().len(), site.top_k());
        if top_k == 0 {
            return Err(PlanError::NoTopK);
        }
        RouteCapacity { max_tokens: capacity.max_tokens, top_k, num_experts }.checked()?;
        let projection = |site: &ProjectionSite, from_tokens| ProjectionPlan {
            dtype,
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

    /// The same experts on another device, whose multiprocessors the grids fill. Neither the results nor the workspace
    /// depend on it.
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
        // Rows of sums: one per route, and one per token where the routes of a token may share them. The mailbox tags
        // each sum. The partials of operations with wide tiles do not.
        let routes = product(&[num_tokens, top_k]);
        let rows = routes.saturating_add(if self.from_tokens { num_tokens } else { 0 });
        let ranks = self.capacity.max_rank.next_multiple_of(RANK_TILE);
        let sums = product(&[self.num_slabs(), rows, self.num_slices, ranks]);
        let partials = if self.is_wide(routes) { product(&[sums, size_of::<f32>()]) } else { 0 };
        WorkspaceBytes { mailbox: WorkspaceBytes::mailbox_of(sums), partials }
    }

    /// Whether the operations that add or write deltas may use wide tiles, with separate launches for shrink and
    /// expand.
    fn is_wide(&self, num_routes: usize) -> bool {
        GroupedBy::of(num_routes) == GroupedBy::Kernel && is_staged(self.capacity.max_rank) && !self.interleaved
    }

    /// Whether the fused operation (`activate` for gate-up, `combine` for down) is faster for this many routes than
    /// adding the delta and then running the engine's own kernel.
    pub fn prefers_fused(&self, num_routes: usize) -> bool {
        !self.is_wide(num_routes)
    }

    /// The launches of an operation on a batch. All choices are bit-identical.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn launch(&self, form: ffi::aril_experts_form, batch: ExpertsBatch) -> ffi::aril_experts_plan {
        let ExpertsBatch { bounds: BatchBounds { num_tokens, small_tiles, table_rank, .. }, top_k, .. } = batch;
        let (num_routes, multiprocessors) = (num_tokens * top_k, self.device.multiprocessors);
        let measured = self.device.measured();
        let rank_tiles = self.num_slices * self.capacity.max_rank.div_ceil(RANK_TILE);
        let tiles = self.max_tiles(ROUTES_PER_TILE, num_routes);
        let of_tokens = if self.from_tokens {
            self.capacity.max_small_tiles(num_tokens) * (TOKENS_PER_TILE / ROUTES_PER_TILE)
        } else {
            0
        };
        // Expand divides its work by range of outputs, and by tile of routes and slice, by tile for all slices, or by
        // token.
        let by_tile_and_slice = form.0 < ffi::aril_experts_form::ARIL_ACTIVATE.0;
        let (expand_tiles, outs, slices, warp_bytes) = match form {
            ffi::aril_experts_form::ARIL_ACTIVATE => (tiles, MIN_OUTS_PER_WARP, 1, shared_memory::ACTIVATE_WARP),
            _ if by_tile_and_slice => {
                let outs = self.outs_per_warp(table_rank);
                (tiles, outs, self.num_slices, shared_memory::expand_warp(self.dtype, table_rank, outs))
            }
            _ => (num_tokens, MIN_OUTS_PER_WARP, 1, shared_memory::COMBINE_WARP),
        };
        let expand_pieces = slices * self.out_features.div_ceil(outs);
        let grouped_by = GroupedBy::of(num_routes);
        let is_first = grouped_by == GroupedBy::FirstOperation;
        let max_small = multiprocessors * measured.max_blocks(grouped_by);
        let is_beside_base = batch.inputs != Inputs::InFront;
        let max_expand = if is_beside_base { multiprocessors * measured.max_blocks_beside_base } else { max_small };
        // If one block groups the routes, shrink gets one block less, so that all blocks of shrink start at once.
        let max_shrink = max_small - usize::from(is_first);
        // At least all pieces of one tile.
        let blocks = |tiles: usize, pieces: usize, at_once: usize, max: usize| {
            (tiles * pieces).div_ceil(at_once).min(max).max(pieces.div_ceil(at_once))
        };
        let expand_blocks = int(blocks(expand_tiles, expand_pieces, EXPAND_PIECES, max_expand));
        let shrink_pieces = rank_tiles * self.num_slabs();
        let shrink_blocks = int(blocks(tiles + of_tokens, shrink_pieces, SHRINK_PIECES, max_shrink));
        let groups_routes = (is_first && !batch.is_grouped).into();
        let announces = form == ffi::aril_experts_form::ARIL_ACTIVATE
            && batch.inputs == Inputs::Complete
            && self.dtype != DType::F32
            && grouped_by == GroupedBy::EachOperation
            && expand_blocks <= ffi::ARIL_ACTIVATION_BLOCKS;
        let (inputs, activation_blocks) = match batch.inputs {
            Inputs::InFront => (ffi::aril_inputs::ARIL_INPUTS_IN_FRONT, 0),
            Inputs::Complete => (ffi::aril_inputs::ARIL_INPUTS_COMPLETE, if announces { expand_blocks } else { 0 }),
            Inputs::Announced(blocks) => (ffi::aril_inputs::ARIL_INPUTS_ANNOUNCED, blocks),
        };
        let launch = ffi::aril_experts_plan {
            max_tiles: int(small_tiles),
            grouped_by: grouped_by.code(),
            groups_routes,
            inputs: inputs.0.cast_signed(),
            activation_blocks,
            blocks: groups_routes + shrink_blocks + expand_blocks,
            shrink_blocks,
            expand_blocks,
            outs_per_block: int(outs),
            smem_bytes: int(shared_memory::route_tiles(warp_bytes, is_first.then_some((num_routes, self.num_experts)))),
            ..ffi::aril_experts_plan::default()
        };
        if by_tile_and_slice && self.is_wide(num_routes) { self.with_wide_tiles(launch, batch) } else { launch }
    }

    /// The same launch and those on wide tiles. The device chooses the size.
    #[cfg(any(feature = "cuda", test))]
    fn with_wide_tiles(&self, launch: ffi::aril_experts_plan, batch: ExpertsBatch) -> ffi::aril_experts_plan {
        let ExpertsBatch { bounds: BatchBounds { num_tokens, table_rank, .. }, top_k, .. } = batch;
        let (measured, multiprocessors) = (self.device.measured(), self.device.multiprocessors);
        let tiles = self.max_tiles(WIDE_TILE, num_tokens * top_k);
        let of_tokens = if self.from_tokens { self.capacity.max_wide_tiles(num_tokens) } else { 0 };
        let most_rank_tiles = self.num_slices * self.capacity.max_rank.div_ceil(RANK_TILE);
        let shrink_pieces = most_rank_tiles.div_ceil(LARGE_M_RANK_TILES) * self.num_slabs();
        let expand_pieces = self.num_slices * self.out_features.div_ceil(measured.wide_outs);
        let all_rank_tiles = self.num_slices * table_rank.div_ceil(RANK_TILE);
        let rank_tiles = warpgroup_rank_tiles(all_rank_tiles);
        let most = LARGE_M_WARPGROUPS.min(all_rank_tiles.div_ceil(rank_tiles));
        let (warpgroups, shrink_bytes) = shared_memory::wide_shrink(rank_tiles, most, self.device);
        ffi::aril_experts_plan {
            wide_shrink_blocks: int(
                ((tiles + of_tokens) * shrink_pieces).min(multiprocessors * measured.max_wide_shrink)
            ),
            rank_tiles: int(rank_tiles),
            warpgroups: int(warpgroups),
            wide_shrink_smem_bytes: int(shrink_bytes),
            wide_expand_blocks: int((tiles * expand_pieces).min(multiprocessors * measured.max_wide_expand)),
            wide_outs_per_block: int(measured.wide_outs),
            wide_expand_smem_bytes: int(shared_memory::wide_expand(table_rank, self.device)),
            ..launch
        }
    }

    /// Outputs of one slice that a warp of expand computes.
    #[cfg(any(feature = "cuda", test))]
    fn outs_per_warp(&self, table_rank: usize) -> usize {
        let outs = self.device.measured().outs_per_warp(self.capacity.max_rank);
        let warp_bytes = shared_memory::expand_warp(self.dtype, table_rank, outs);
        let fit = shared_memory::route_tiles(warp_bytes, None) <= shared_memory::of_block(self.device);
        if fit { outs } else { OUT_TILE }
    }

    /// The largest number of tiles in `num_routes` routes. Each pair of a slot and an expert can leave one tile partly
    /// filled, as can the routes without a slot and the routes that are not local.
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

    use super::{ExpertsBatch, ExpertsPlan, Inputs, ProjectionPlan};
    use crate::{
        DType, ffi,
        model::{Experts, Halves, ModelSpec, TpRank},
        plan::{BatchBounds, Capacity, Device},
    };

    fn plan(experts: Experts, capacity: Capacity) -> ExpertsPlan {
        let mut spec = ModelSpec::new();
        let id = spec.experts(experts).unwrap();
        ExpertsPlan::new(&spec.shard(TpRank::SINGLE).unwrap()[id], DType::BF16, capacity).unwrap()
    }

    proptest! {
        /// However the routes are spread over experts and slots, those without a slot and those that are not local
        /// among them.
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

    const SLICES: ffi::aril_experts_form = ffi::aril_experts_form::ARIL_ADD;
    const ROUTES: ffi::aril_experts_form = ffi::aril_experts_form::ARIL_ACTIVATE;
    const TOKENS: ffi::aril_experts_form = ffi::aril_experts_form::ARIL_COMBINE;

    fn launch(
        plan: &ProjectionPlan,
        (num_tokens, top_k, table_rank): (usize, usize, usize),
        form: ffi::aril_experts_form,
        inputs: Inputs,
    ) -> ffi::aril_experts_plan {
        let (small_tiles, wide_tiles) =
            (plan.capacity.max_small_tiles(num_tokens), plan.capacity.max_wide_tiles(num_tokens));
        let bounds = BatchBounds { num_tokens, small_tiles, wide_tiles, table_rank };
        plan.launch(form, ExpertsBatch { bounds, top_k, is_grouped: false, inputs })
    }

    /// `shrink + expand blocks of outs` of small tiles, then of wide ones if there are.
    fn printed(plan: &ExpertsPlan, num_tokens: usize, top_k: usize, form: ffi::aril_experts_form) -> String {
        printed_of(plan, (num_tokens, top_k), form, Inputs::InFront)
    }

    fn printed_of(
        plan: &ExpertsPlan,
        (num_tokens, top_k): (usize, usize),
        form: ffi::aril_experts_form,
        inputs: Inputs,
    ) -> String {
        let blocks = |shrink: i32, expand: i32, outs: i32| format!("{shrink} + {expand} of {outs}");
        let projections = [plan.gate_up(), plan.down()].map(|projection| {
            let launch = launch(projection, (num_tokens, top_k, plan.capacity().max_rank), form, inputs);
            let wide = blocks(launch.wide_shrink_blocks, launch.wide_expand_blocks, launch.wide_outs_per_block);
            let wide = if launch.wide_shrink_blocks > 0 { format!(" | {wide}") } else { String::new() };
            blocks(launch.shrink_blocks, launch.expand_blocks, launch.outs_per_block) + &wide
        });
        projections.join("; ")
    }

    /// The launches that the figures of the record are of: gate_up, then down.
    #[test]
    fn launches_are_those_that_were_measured() {
        let qwen3 = |slots, rank| {
            plan(Experts::new("m", 128, 2048, 768).top_k(8), Capacity::tokens(4096).slots(slots).rank(rank))
        };
        let gpt_oss = Experts::new("m", 32, 2880, 2880).top_k(4).halves(Halves::Interleaved);
        let gpt_oss = plan(gpt_oss, Capacity::tokens(4096).slots(8).rank(128));
        let small = plan(Experts::new("m", 2, 100, 70).top_k(2).ungated(), Capacity::tokens(4096).slots(2).rank(17));
        let launches = [
            (printed(&qwen3(4, 16), 1, 8, SLICES), "40 + 12 of 128; 8 + 16 of 128"),
            (printed(&qwen3(4, 16), 1, 8, ROUTES), "40 + 24 of 32; 8 + 64 of 32"),
            (printed(&qwen3(4, 16), 1, 8, TOKENS), "40 + 3 of 32; 8 + 8 of 32"),
            (printed(&qwen3(4, 17), 8, 8, SLICES), "132 + 132 of 64; 96 + 132 of 64"),
            (printed(&qwen3(4, 17), 9, 8, SLICES), "263 + 216 of 64; 108 + 264 of 64"),
            (printed(&qwen3(4, 16), 128, 8, SLICES), "263 + 264 of 128; 263 + 264 of 128"),
            (
                printed(&qwen3(4, 16), 129, 8, SLICES),
                "264 + 264 of 128 | 1056 + 1044 of 1024; 264 + 264 of 128 | 522 + 1044 of 1024",
            ),
            (printed(&qwen3(1, 64), 129, 8, ROUTES), "264 + 264 of 32; 264 + 264 of 32"),
            (
                printed(&qwen3(1, 128), 4096, 8, SLICES),
                "264 + 264 of 64 | 1056 + 1188 of 1024; 264 + 264 of 64 | 1056 + 1188 of 1024",
            ),
            (printed(&qwen3(1, 129), 4096, 8, SLICES), "264 + 264 of 64; 264 + 264 of 64"),
            (printed_of(&qwen3(4, 16), (8, 8), ROUTES, Inputs::InFront), "132 + 132 of 32; 64 + 132 of 32"),
            (printed_of(&qwen3(4, 16), (8, 8), ROUTES, Inputs::Complete), "132 + 192 of 32; 64 + 264 of 32"),
            (printed(&gpt_oss, 16, 4, TOKENS), "132 + 132 of 32; 132 + 132 of 32"),
            (printed(&gpt_oss, 700, 4, SLICES), "264 + 264 of 64; 264 + 264 of 64 | 1056 + 891 of 1024"),
            (printed(&small, 3, 2, SLICES), "18 + 2 of 64; 9 + 2 of 64"),
            (printed(&small, 32, 2, ROUTES), "32 + 5 of 32; 20 + 7 of 32"),
            (printed(&small, 33, 2, SLICES), "32 + 4 of 64; 20 + 4 of 64"),
            (printed(&small, 600, 2, SLICES), "264 + 39 of 64 | 36 + 24 of 1024; 233 + 39 of 64 | 24 + 24 of 1024"),
            (printed(&small, 5, 2, TOKENS), "18 + 2 of 32; 9 + 3 of 32"),
        ];
        let smaller = qwen3(4, 16).on(Device { multiprocessors: 66, ..Device::H100 });
        assert_eq!(printed(&smaller, 8, 8, ROUTES), "66 + 66 of 32; 64 + 66 of 32");
        assert_eq!(
            printed(&smaller, 129, 8, SLICES),
            "132 + 132 of 128 | 528 + 594 of 1024; 132 + 132 of 128 | 522 + 594 of 1024"
        );
        for (number, (printed, expected)) in launches.into_iter().enumerate() {
            assert_eq!(printed, expected, "launch {number}");
        }
    }

    /// Rank tiles of a warpgroup, warpgroups, and bytes of shrink and of expand, of gate_up and then of down. A
    /// warpgroup need not have room for a slice, as it must in a linear layer.
    #[test]
    fn blocks_of_wide_tiles_are_those_that_were_measured() {
        let blocks = |rank: usize, device: Device| {
            let qwen3 = Experts::new("m", 128, 2048, 768).top_k(8);
            let plan = plan(qwen3, Capacity::tokens(4096).slots(4).rank(rank)).on(device);
            [plan.gate_up(), plan.down()].map(|plan| {
                let plan = launch(plan, (512, 8, rank), SLICES, Inputs::InFront);
                [plan.rank_tiles, plan.warpgroups, plan.wide_shrink_smem_bytes, plan.wide_expand_smem_bytes]
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
            launch(plan.down(), (8, 8, rank), SLICES, Inputs::InFront).outs_per_block
        };
        assert_eq!([99, 107, 108, 227].map(|kilobytes| outs(16, kilobytes)), [64, 64, 128, 128]);
        assert_eq!([99, 227].map(|kilobytes| outs(8, kilobytes)), [128, 128]);
        assert_eq!(outs(17, 227), 64);
    }

    /// Shared memory of blocks on route tiles of Qwen3-30B-A3B at rank 16 and 64: what shrink needs, more where one
    /// block sorts the routes, and by the kernel beyond.
    #[test]
    fn blocks_of_route_tiles_have_what_they_need() {
        let bytes = |rank, tokens, form| {
            let plan = plan(Experts::new("m", 128, 2048, 768).top_k(8), Capacity::tokens(4096).slots(4).rank(rank));
            [plan.gate_up(), plan.down()].map(|plan| launch(plan, (tokens, 8, rank), form, Inputs::InFront).smem_bytes)
        };
        for (rank, expand) in [(16, 98_304), (64, 77_824)] {
            assert_eq!(bytes(rank, 8, SLICES), [expand; 2]);
            assert_eq!(bytes(rank, 129, SLICES), [expand; 2]);
            assert_eq!(bytes(rank, 8, ROUTES), [67_584; 2]);
            assert_eq!(bytes(rank, 9, ROUTES), [77_824; 2]);
            assert_eq!(bytes(rank, 129, TOKENS), [67_584; 2]);
        }
    }

    /// An activation of few routes beside the base operation announces its ends, and the combine behind it waits for as
    /// many.
    #[test]
    fn only_activations_beside_the_base_announce_their_ends() {
        let plan = plan(Experts::new("m", 128, 2048, 768).top_k(8), Capacity::tokens(4096).slots(4).rank(16));
        let blocks = |tokens, form, inputs| {
            let plan = launch(plan.gate_up(), (tokens, 8, 16), form, inputs);
            (plan.inputs, plan.activation_blocks, plan.groups_routes)
        };
        assert_eq!(blocks(8, ROUTES, Inputs::InFront), (0, 0, 0));
        assert_eq!(blocks(8, ROUTES, Inputs::Complete), (1, 192, 0));
        assert_eq!(blocks(9, ROUTES, Inputs::Complete), (1, 0, 1));
        assert_eq!(blocks(8, TOKENS, Inputs::Complete), (1, 0, 0));
        assert_eq!(blocks(8, TOKENS, Inputs::Announced(192)), (2, 192, 0));
        assert_eq!(blocks(129, SLICES, Inputs::InFront), (0, 0, 0));
    }
}
