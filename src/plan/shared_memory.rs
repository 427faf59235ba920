//! Shared memory of thread blocks, in bytes, as the kernels of `csrc` divide it. Each launch checks that it has enough.

use super::{
    Device,
    thresholds::{
        K_TILE, K_TILES_PER_SLAB, ONE_BLOCK_ROUTES, OUT_TILE, RANK_TILE, ROUTES_PER_TILE, STATIC_BYTES,
        TOKENS_PER_TILE, WARPS, WIDE_TILE, forward::OUT_UNIT, is_staged, linear::LARGE_M_OUTS,
    },
};
use crate::{DType, ffi};

/// Bytes of an element of a factor.
const ELEM: usize = 2;
/// Ranks of a product instruction, and the terms that stand for an element of v.
const RANKS_PER_STEP: usize = 16;
const TERMS: usize = 2;
/// Bytes behind a row of inputs, and behind a row of outputs, against bank conflicts.
const INPUT_PAD: usize = 16;
const OUTPUT_PAD: usize = 64;
/// Static variables of a block of which several are to fit on a multiprocessor.
const STATIC_OF_MANY: usize = 1 << 10;

/// The terms of v of so many tokens.
fn terms(tokens: usize, max_rank: usize) -> usize {
    max_rank.div_ceil(RANKS_PER_STEP) * TERMS * tokens * RANKS_PER_STEP * ELEM
}

/// So many rows of B.
fn b(outs: usize, max_rank: usize) -> usize {
    outs * max_rank.next_multiple_of(RANK_TILE) * ELEM
}

/// A warp that expands tiles of routes within the activation, or by token within the combine.
pub(super) const ACTIVATE_WARP: usize = ffi::ARIL_ACTIVATE_WARP_BYTES as usize;
pub(super) const COMBINE_WARP: usize = ffi::ARIL_COMBINE_WARP_BYTES as usize;

/// A warp that adds or writes so many outputs of tiles of routes: two stages of B and y, and the terms of v of steps
/// that it does not keep in registers (`ExpandStages` of `csrc/moe/expand.cuh`).
pub(super) fn expand_warp(dtype: DType, max_rank: usize, outs: usize) -> usize {
    const MOST_RANK_TILES: usize = 6;
    const UNIT: usize = OUT_UNIT * RANK_TILE * ELEM;
    let rank_tiles = max_rank.div_ceil(RANK_TILE).min(MOST_RANK_TILES);
    let most_whole = if dtype == DType::BF16 { 4 } else { 2 };
    let whole = if rank_tiles <= most_whole { rank_tiles } else { 2 };
    let units = outs / OUT_UNIT;
    let stage = (units * whole).max(rank_tiles) * UNIT + units * ROUTES_PER_TILE * OUT_UNIT * ELEM;
    let steps = rank_tiles.div_ceil(2) - usize::from(rank_tiles == whole);
    2 * stage + steps * TERMS * ROUTES_PER_TILE * RANKS_PER_STEP * ELEM
}

/// A block on route tiles, whose warps expand with so much each. With so many routes of experts that the first
/// operation groups, all operations ask for the memory of the sort, whether they sort or not: otherwise the
/// multiprocessors would divide their memory anew between launches.
pub(super) fn route_tiles(warp_bytes: usize, sorted: Option<(usize, usize)>) -> usize {
    const SHRINK: usize = ffi::ARIL_EXPERTS_SHRINK_BYTES as usize;
    const LOCAL_TILES: usize = ffi::ARIL_LOCAL_TILES_BYTES as usize;
    const WARP: usize = 32;
    let sort = |(num_routes, num_experts): (usize, usize)| {
        // Of each group and round a counter and a beginning; of each route a key, the route, and where a tile begins.
        let counted = (num_experts + 2) * num_routes.div_ceil(WARPS * WARP) * (size_of::<u64>() + size_of::<u16>());
        let of_route = size_of::<u32>() + size_of::<ffi::aril_route_entry>() + size_of::<u16>();
        counted.next_multiple_of(16) + ONE_BLOCK_ROUTES * of_route + size_of::<u16>()
    };
    let grouping = sorted.map_or(0, |sorted| sort(sorted).max(SHRINK + LOCAL_TILES));
    SHRINK.max(WARPS * warp_bytes).max(grouping)
}

/// Shrink and expand of a small tile, of `num_tokens` tokens if they are few.
pub(super) fn small(num_tokens: usize, max_rank: usize, outs: usize) -> usize {
    let a = WARPS * RANK_TILE * K_TILE * ELEM;
    let x = num_tokens.min(TOKENS_PER_TILE) * (K_TILES_PER_SLAB * K_TILE * ELEM + INPUT_PAD);
    (a + x).max(small_expand(max_rank, outs))
}

/// Expand of a small tile. Up to some rank it stages B.
pub(super) fn small_expand(max_rank: usize, outs: usize) -> usize {
    let staged = if is_staged(max_rank) { b(outs.next_multiple_of(OUT_TILE), max_rank) } else { 0 };
    staged + in_place_expand(max_rank)
}

/// Expand of a small tile that reads B in place.
pub(super) fn in_place_expand(max_rank: usize) -> usize {
    terms(TOKENS_PER_TILE, max_rank)
}

/// Warpgroups of so many rank tiles that shrink a wide tile, up to `most` and as far as the device has room, and what
/// they need.
pub(super) fn wide_shrink(rank_tiles: usize, most: usize, device: Device) -> (usize, usize) {
    let bytes = |warpgroups: usize| (WIDE_TILE + warpgroups * rank_tiles * RANK_TILE) * K_TILE * ELEM;
    let warpgroups = (2..=most).rev().find(|&warpgroups| bytes(warpgroups) <= of_block(device)).unwrap_or(1);
    (warpgroups, bytes(warpgroups))
}

/// Expand of a wide tile. One of a single slice fits on all devices.
pub(super) fn wide_expand(max_rank: usize, device: Device) -> usize {
    let stage = WIDE_TILE * (LARGE_M_OUTS * ELEM + OUTPUT_PAD) + b(LARGE_M_OUTS, max_rank);
    in_stages(terms(WIDE_TILE, max_rank), stage, device).unwrap_or(0)
}

/// Expand of a wide tile of gate and up within their activation, if a device has room for it.
pub(super) fn wide_silu_mul(max_rank: usize, device: Device) -> Option<usize> {
    let stage = WIDE_TILE * (2 * LARGE_M_OUTS * ELEM + OUTPUT_PAD) + b(2 * LARGE_M_OUTS, max_rank);
    in_stages(2 * terms(WIDE_TILE, max_rank), stage, device)
}

/// The terms of v, and a ring of two stages, or as much of it as leaves room for another block on the multiprocessor:
/// two blocks with one stage are faster than one with two, and lower ranks than the table's have more stages in as many
/// bytes. Otherwise as much as there is. Nothing if a block has no room for one stage.
fn in_stages(v: usize, stage: usize, device: Device) -> Option<usize> {
    let share = [2, 1].map(|blocks| share(blocks, device)).into_iter().find(|&share| v + stage <= share)?;
    Some((v + 2 * stage).min(share))
}

/// The most with which so many blocks fit on a multiprocessor.
fn share(blocks: usize, device: Device) -> usize {
    let Device { shared_bytes_per_multiprocessor, reserved_shared_bytes, .. } = device;
    let share = shared_bytes_per_multiprocessor / blocks;
    share.saturating_sub(reserved_shared_bytes + STATIC_OF_MANY).min(of_block(device))
}

/// The most that a launch may ask for.
pub(super) fn of_block(device: Device) -> usize {
    device.shared_bytes.saturating_sub(STATIC_BYTES)
}
