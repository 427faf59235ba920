//! Shared memory of thread blocks, in bytes, as the kernels of `csrc` divide it. Each launch checks that it has enough.

use super::{
    Device,
    thresholds::{
        K_TILE, K_TILES_PER_SLAB, OUT_TILE, RANK_TILE, ROUTES_PER_TILE, STATIC_BYTES, TOKENS_PER_TILE, WARPS,
        WIDE_TILE, is_staged, linear::LARGE_M_OUTS,
    },
};

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

/// Expand of small tiles of routes by warps of so many outputs each, at ranks that need one product: two stages of B and y.
pub(super) fn warps_of_experts(max_rank: usize, outs: usize) -> usize {
    WARPS * 2 * (b(outs, max_rank) + ROUTES_PER_TILE * outs * ELEM)
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

/// Warpgroups of so many rank tiles that shrink a wide tile, up to `most` and as far as the device has room, and what they need.
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

/// The terms of v, and a ring of two stages, or as much of it as leaves room for another block on the multiprocessor: two blocks with one
/// stage are faster than one with two, and lower ranks than the table's have more stages in as many bytes. Otherwise as much as there is.
/// Nothing if a block has no room for one stage.
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
