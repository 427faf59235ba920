//! Every number that a plan decides by, and the questions that plans ask of them.
//!
//! Limits and tile shapes are those of the kernels, from `csrc/aril.h`. The other thresholds were measured on an H100
//! SXM; each says what it was measured against. Those that size launches are in a table by family of devices,
//! [`FAMILIES`]. Those that a workspace depends on are the same on all devices: [`linear::LARGE_M_TOKENS`],
//! [`linear::LARGE_M_WORK`] and [`linear::MIN_SPAN_BLOCKS`]. No result depends on a threshold: every choice is
//! bit-identical. The exception is how many blocks share a row of a fused linear ([`forward`]), which is a function of
//! the layer's shape alone.

use super::Device;
use crate::ffi;

/// The largest number of slots in a weight table.
pub const MAX_SLOTS: usize = ffi::ARIL_MAX_SLOTS as usize;
/// The largest number of experts of one layer on one rank.
pub(super) const MAX_EXPERTS: usize = ffi::ARIL_MAX_EXPERTS as usize;
/// The largest x and y dimensions of a CUDA grid.
pub(super) const MAX_GRID_X: usize = i32::MAX as usize;
pub(super) const MAX_GRID_Y: usize = 65_535;

/// Tokens in a small tile and in a wide tile.
pub(super) const TOKENS_PER_TILE: usize = ffi::ARIL_TOKENS_PER_TILE as usize;
pub(super) const WIDE_TILE: usize = ffi::ARIL_WIDE_TILE as usize;
/// Routes in a small tile of routes.
pub(super) const ROUTES_PER_TILE: usize = ffi::ARIL_ROUTES_PER_TILE as usize;
/// Shrink sums `in_features` as a tree of fixed shape: K tiles of features, slabs of K tiles, spans of slabs.
pub(super) const K_TILE: usize = ffi::ARIL_K_TILE as usize;
pub(super) const K_TILES_PER_SLAB: usize = ffi::ARIL_K_TILES_PER_SLAB as usize;
pub(super) const K_TILES_PER_SPAN: usize = K_TILES_PER_SLAB * ffi::ARIL_K_SLABS_PER_SPAN as usize;
/// Ranks in a tile of a factor.
pub(super) const RANK_TILE: usize = ffi::ARIL_RANK_TILE as usize;
/// Bytes of the header of a mailbox, and of one partial sum with its tag.
pub(super) const MAILBOX_HEADER: usize = ffi::ARIL_MAILBOX_HEADER as usize;
pub(super) const WORD_BYTES: usize = ffi::ARIL_WORD_BYTES as usize;
/// Warps in a block of the small-tile kernels.
pub(super) const WARPS: usize = ffi::ARIL_WARPS as usize;
/// Outputs in a tile of B.
pub(super) const OUT_TILE: usize = ffi::ARIL_OUT_TILE as usize;
/// Shared memory that is reserved for a kernel's static variables, in bytes.
pub(super) const STATIC_BYTES: usize = ffi::ARIL_STATIC_BYTES as usize;

/// Whether a 16-bit linear layer on this many tokens runs as one launch of small tiles, rather than as two of wide
/// tiles. Layers with much work have wide tiles from fewer tokens on ([`linear::LARGE_M_TOKENS`]).
///
/// With 512 tokens one launch is 1.4 times faster on average. With 2048 it is faster only at rank 16 in the smallest
/// layer.
pub(crate) const fn is_small_m(num_tokens: usize) -> bool {
    num_tokens <= SMALL_M
}
/// The largest number of tokens in small tiles.
pub(super) const SMALL_M: usize = ffi::ARIL_SMALL_M as usize;

/// Whether expand stages all ranks of B in shared memory. Wide tiles require it.
pub(super) const fn is_staged(max_rank: usize) -> bool {
    max_rank <= ffi::ARIL_STAGED_RANK as usize
}

/// What groups a step's routes by expert and slot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum GroupedBy {
    /// Each block of each operation groups the routes itself.
    EachOperation,
    /// The first operation groups the routes for those after it.
    FirstOperation,
    /// A separate kernel groups the routes before the first operation.
    Kernel,
}

impl GroupedBy {
    pub(crate) const fn of(num_routes: usize) -> Self {
        if num_routes <= ffi::ARIL_EACH_BLOCK_ROUTES as usize {
            Self::EachOperation
        } else if num_routes <= ONE_BLOCK_ROUTES {
            Self::FirstOperation
        } else {
            Self::Kernel
        }
    }

    /// The same in the C ABI.
    pub(super) const fn code(self) -> i32 {
        let ffi::aril_grouped_by(code) = match self {
            Self::EachOperation => ffi::aril_grouped_by::ARIL_EACH_OPERATION,
            Self::FirstOperation => ffi::aril_grouped_by::ARIL_FIRST_OPERATION,
            Self::Kernel => ffi::aril_grouped_by::ARIL_GROUP_KERNEL,
        };
        code.cast_signed()
    }
}

/// The largest number of routes in small tiles only.
pub(super) const ONE_BLOCK_ROUTES: usize = ffi::ARIL_ONE_BLOCK_ROUTES as usize;

/// How a linear layer's launches are sized.
pub(super) mod linear {
    use super::{K_TILES_PER_SLAB, WARPS};
    use crate::ffi;

    /// Rank tiles, over all slices, of a shrink block (small_m) and of a warpgroup (large_m).
    pub(in crate::plan) const SMALL_M_RANK_TILES: usize = WARPS / K_TILES_PER_SLAB;
    pub(in crate::plan) const LARGE_M_RANK_TILES: usize = ffi::ARIL_MAX_RANK_TILES as usize;
    /// The most warpgroups of a shrink block (large_m) of [`LARGE_M_RANK_TILES`] rank tiles each. Where a warpgroup has
    /// room for a slice, blocks of one are faster, though each reads x, than large ones, which have a multiprocessor
    /// for themselves; adapters of lower ranks than the table's need few of these blocks (H200,
    /// `benches/record/designs.md`).
    pub(in crate::plan) const LARGE_M_WARPGROUPS: usize = ffi::ARIL_MAX_WARPGROUPS as usize;
    /// Rank tiles of a warpgroup, for so many of all slices: those of the three kernels.
    pub(in crate::plan) const fn warpgroup_rank_tiles(rank_tiles: usize) -> usize {
        match rank_tiles {
            0..=2 => 2,
            3..=4 => 4,
            _ => LARGE_M_RANK_TILES,
        }
    }
    /// With wide tiles, shrink reduces spans instead of slabs from this many blocks on. 500 is faster than 300 in the
    /// largest layers.
    pub(in crate::plan) const MIN_SPAN_BLOCKS: usize = 500;

    /// An expand block computes a multiple of this many outputs of one slice.
    pub(in crate::plan) const SMALL_M_OUTS: usize = ffi::ARIL_OUTS_SMALL_M as usize;
    pub(in crate::plan) const LARGE_M_OUTS: usize = ffi::ARIL_OUTS_LARGE_M as usize;
    /// A layer has wide tiles from this many tokens on if a token has at least so much work: the largest rank times the
    /// sum of twice the input features of each slice and the output features. With 384 and 512 tokens of 2 or 8
    /// adapters, layers with that much take 0.48 to 1.03 of their time on small tiles, and layers with less 0.83 to
    /// 2.0. With 256 tokens, it depends on the number of adapters.
    pub(in crate::plan) const LARGE_M_TOKENS: usize = 320;
    pub(in crate::plan) const LARGE_M_WORK: usize = 1_700_000;
}

/// How the launches of a projection of experts are sized.
pub(super) mod experts {
    use super::{K_TILES_PER_SLAB, WARPS};
    use crate::ffi;

    /// Pieces (a tile of routes times a rank tile or a range of outputs) that one block of shrink or expand works on at
    /// a time.
    pub(in crate::plan) const SHRINK_PIECES: usize = WARPS / K_TILES_PER_SLAB;
    pub(in crate::plan) const EXPAND_PIECES: usize = WARPS;

    /// The fewest outputs of all slices, or of a token, that a warp of expand computes.
    pub(in crate::plan) const MIN_OUTS_PER_WARP: usize = ffi::ARIL_OUT_UNIT as usize;
}

/// The largest number of tokens of a fused linear.
pub const MAX_FORWARD_TOKENS: usize = ffi::ARIL_FORWARD_TOKENS as usize;

/// How a fused linear is launched.
pub(super) mod forward {
    use crate::{DType, ffi, plan::Device};

    /// Rows of a strip of W, and those of a unit, which the rows of a slice are padded to.
    pub(in crate::plan) const STRIP_ROWS: usize = ffi::ARIL_FORWARD_STRIP_ROWS as usize;
    pub(in crate::plan) const OUT_UNIT: usize = ffi::ARIL_OUT_UNIT as usize;
    /// Strips that a block multiplies at a time.
    pub(in crate::plan) const STRIPS: usize = ffi::ARIL_FORWARD_STRIPS as usize;
    /// Strips of a cluster of two blocks, at most.
    pub(in crate::plan) const SPLIT_STRIPS: usize = ffi::ARIL_FORWARD_SPLIT_STRIPS as usize;
    /// Parts of the input features, whose sums of `A x` are handed over; and ranks that are handed over together.
    pub(in crate::plan) const PARTS: usize = ffi::ARIL_FORWARD_PARTS as usize;
    pub(in crate::plan) const RANK_TILE: usize = 16;
    /// Input features of a box of W or x, and boxes of a stage of the ring; its stages; warps that compute deltas, and
    /// what they know of the batch; tokens of a segment.
    pub(in crate::plan) const BOX_FEATURES: usize = ffi::ARIL_FORWARD_BOX_FEATURES as usize;
    pub(in crate::plan) const MAX_STAGES: usize = ffi::ARIL_FORWARD_STAGES as usize;
    /// How often a block polls for another one's sum before it computes the sum itself. Takes about a millisecond.
    #[cfg(feature = "cuda")]
    pub(in crate::plan) const POLLS: usize = 1024;
    /// Sizes of batches with a ring of their own.
    pub(in crate::plan) const RINGS: usize = ffi::ARIL_FORWARD_RINGS as usize;
    pub(in crate::plan) const DELTA_WARPS: usize = ffi::ARIL_FORWARD_DELTA_WARPS as usize;
    pub(in crate::plan) const BATCH_BYTES: usize = ffi::ARIL_FORWARD_BATCH_BYTES as usize;
    pub(in crate::plan) const SEGMENT_TOKENS: usize = ffi::ARIL_SEGMENT_TOKENS as usize;
    /// Shared memory of a block for static variables, and for the alignment of the rest.
    pub(in crate::plan) const STATIC_BYTES: usize = ffi::ARIL_FORWARD_STATIC_BYTES as usize;
    pub(in crate::plan) const ALIGNMENT_BYTES: usize = ffi::ARIL_FORWARD_ALIGNMENT_BYTES as usize;
    /// Rows of W and x are a multiple of so many 16-bit elements.
    pub(in crate::plan) const ALIGNED_FEATURES: usize = ffi::ARIL_FORWARD_ALIGNMENT as usize / DType::BF16.bytes();
    /// The kernel counts features, and bytes of rows, in `i32`.
    pub(in crate::plan) const MAX_FEATURES: usize = i32::MAX as usize / 4;

    /// Blocks that share rows are chosen as for so many, an H100's, on every device: the order of sums depends on them.
    pub(in crate::plan) const BLOCKS: usize = Device::H100.multiprocessors;
}

/// Families of devices, by the lowest compute capability of each: a device is of the last one that is not above it.
/// Nothing was measured but on Hopper, whose thresholds the others have until figures of theirs are entered here
/// (`Measured { resident_silu_mul: 1, ..HOPPER }`).
static FAMILIES: [((i32, i32), Measured); 5] =
    [((8, 0), HOPPER), ((8, 6), HOPPER), ((9, 0), HOPPER), ((10, 0), HOPPER), ((12, 0), HOPPER)];

const HOPPER: Measured = Measured {
    max_b_bytes: 64 << 10,
    min_expand_blocks: 2,
    few_tiles: 8,
    most_blocks: (125, 11),
    turns_blocks: (9, 2),
    resident_shrink: [5, 4, 3],
    shrink_start: 10,
    shrink_k_tile: (4, 4),
    max_large_m_outs: 24 * linear::LARGE_M_OUTS,
    resident_expand: [3, 2],
    resident_silu_mul: 2,
    large_m_start: 112,
    large_m_outs: (48, 16),
    outs_per_warp: (16, 128),
    max_blocks: [1, 2],
    max_blocks_beside_base: 2,
    wide_outs: 1024,
    max_wide_shrink: 8,
    max_wide_expand: 9,
    base_to_factors: [[[1, 1], [3, 3]], [[2, 1], [5, 3]]],
    base_to_factors_stacked: 5,
    least_stacked: 16,
    stacked_any_rank: 512,
    stacked_rank: 32,
    trigger_boxes: 16,
};

impl Device {
    /// What was measured on its family.
    pub(super) fn measured(self) -> &'static Measured {
        let [(_, first), ..] = &FAMILIES;
        let of_family = FAMILIES.iter().rev().find(|(lowest, _)| *lowest <= self.compute_capability);
        of_family.map_or(first, |(_, measured)| measured)
    }
}

/// What was measured on a family of devices. Numbers of blocks are for each multiprocessor; of a pair, a fraction.
#[derive(Debug)]
pub(super) struct Measured {
    // Linear layers on small tiles.
    /// The most bytes of B that an expand block reads. 64 KB is 2 % faster than 32 KB with 128 or more adapters.
    pub(super) max_b_bytes: usize,
    /// Expand blocks shrink until there are this many. On 132 multiprocessors, 264 has a better mean over all workloads
    /// than 132, 400 or 528.
    pub(super) min_expand_blocks: usize,
    /// A batch of few slots has up to so many small tiles more than a batch of one slot. The grid of a table of many
    /// slots has thread blocks for a batch of few, which take turns on more tiles.
    pub(super) few_tiles: usize,
    /// A grid of small tiles of more blocks takes turns: 1,500 on 132 multiprocessors. Nearly all of them would be idle
    /// (H200, `benches/record/designs.md`, "Tables of many slots").
    pub(super) most_blocks: (usize, usize),
    /// It has blocks of shrink, and of expand, for as many tiles as make so many: 594 on 132 multiprocessors (the same
    /// table).
    pub(super) turns_blocks: (usize, usize),

    // Linear layers on wide tiles: a model of an H200 (`benches/record/designs.md`, "Waves of blocks"). Times are a
    // constant, and so much for each resident block.
    /// Blocks of shrink of one warpgroup that share a multiprocessor, by the warpgroup's rank tiles: up to 2, up to 4
    /// and more. A block of more warpgroups has it to itself.
    pub(super) resident_shrink: [usize; 3],
    /// The time of the start of such a block, and of a K tile.
    pub(super) shrink_start: usize,
    pub(super) shrink_k_tile: (usize, usize),
    /// The most outputs of an expand block. Up to 3072 are 1 % faster than up to 2048 at ranks above 40.
    pub(super) max_large_m_outs: usize,
    /// Blocks of expand that share a multiprocessor, with two stages each: up to rank 40, and above. And of SiLU·mul.
    pub(super) resident_expand: [usize; 2],
    pub(super) resident_silu_mul: usize,
    /// How long the start of such a block takes, less its rank, and how long [`linear::LARGE_M_OUTS`] outputs of a tile
    /// take.
    pub(super) large_m_start: usize,
    pub(super) large_m_outs: (usize, usize),

    // Experts.
    /// Up to the former rank, the outputs of one slice that a warp of expand computes, where a block has shared memory
    /// for them. Up to rank 16, 128 are up to 6 % faster than an output tile, 64, which fits everywhere
    /// (`have_room_everywhere` of `csrc/moe/expand.cuh`).
    pub(super) outs_per_warp: (usize, usize),
    /// The most blocks of shrink, and of expand: where each operation groups the routes itself, and otherwise. One for
    /// the former, so that both are resident at once, and two for the latter: up to 15 % faster each.
    pub(super) max_blocks: [usize; 2],
    /// The most blocks of expand beside the base operation in front: what a warp does behind that operation is shorter.
    pub(super) max_blocks_beside_base: usize,
    /// With wide tiles, outputs of one slice that an expand block computes. 1024 are 2 to 12 % faster than 768, 512 or
    /// 256.
    pub(super) wide_outs: usize,
    /// The most blocks with wide tiles. Up to 4 % faster than as many as are resident at once, because blocks differ in
    /// work; twice as many are no faster, and take longer to find that they have none.
    pub(super) max_wide_shrink: usize,
    pub(super) max_wide_expand: usize,

    // Which mode adds least to a layer, on an H200 and an H100 (`layer.json` of `benches/record`, layers of Qwen3-8B and
    // 32B, with 8 adapters and with one for each token).
    /// The mode is fused where the base weights have so many times the bytes of the adapters' factors: with up to 16
    /// tokens, and with more; where blocks share rows and read x once, and elsewhere; of other layers, and of down, which
    /// has at least twice as many input features as outputs.
    pub(super) base_to_factors: [[[usize; 2]; 2]; 2],
    /// Where the layer has a stack, at least so many times, with more than 16 tokens and but for down.
    pub(super) base_to_factors_stacked: usize,
    /// Otherwise it is stacked from so many tokens on.
    pub(super) least_stacked: usize,
    /// With more tokens than the former, up to the latter rank: with higher ranks, the rows of a stack cost a GEMM of
    /// many tokens more than launches for deltas.
    pub(super) stacked_any_rank: usize,
    pub(super) stacked_rank: usize,

    // Fused linear layers.
    /// Dependents begin when a block has this many boxes of features left to load. (H200, chain of layers: 6 to 9 %
    /// slower with 8, 3 to 5 % with 32.)
    pub(super) trigger_boxes: usize,
}

impl Measured {
    pub(super) fn resident_shrink(&self, rank_tiles: usize) -> usize {
        let [two, four, more] = self.resident_shrink;
        match linear::warpgroup_rank_tiles(rank_tiles) {
            2 => two,
            4 => four,
            _ => more,
        }
    }

    pub(super) fn resident_expand(&self, max_rank: usize) -> usize {
        self.resident_expand[usize::from(max_rank > 40)]
    }

    pub(super) fn outs_per_warp(&self, max_rank: usize) -> usize {
        let (most_rank, outs) = self.outs_per_warp;
        if max_rank <= most_rank { outs } else { OUT_TILE }
    }

    pub(super) fn max_blocks(&self, grouped_by: GroupedBy) -> usize {
        self.max_blocks[usize::from(grouped_by != GroupedBy::EachOperation)]
    }

    pub(super) fn base_to_factors(
        &self,
        num_tokens: usize,
        reads_input_once: bool,
        is_down: bool,
        has_stack: bool,
    ) -> usize {
        let is_many = num_tokens > 16;
        let times = self.base_to_factors[usize::from(is_many)][usize::from(!reads_input_once)][usize::from(is_down)];
        if has_stack && is_many && !is_down { times.max(self.base_to_factors_stacked) } else { times }
    }

    pub(super) fn is_fastest_stacked(&self, num_tokens: usize, stack_rank: usize) -> bool {
        num_tokens >= self.least_stacked && (num_tokens <= self.stacked_any_rank || stack_rank <= self.stacked_rank)
    }
}

/// So many of each multiprocessor, or a time beside so many resident blocks.
pub(super) const fn times((numerator, denominator): (usize, usize), multiprocessors: usize) -> usize {
    multiprocessors * numerator / denominator
}
pub(super) const fn time_beside((constant, of_each): (usize, usize), resident: usize) -> usize {
    constant + of_each * resident
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::{Device, FAMILIES};

    #[test]
    fn a_device_has_the_thresholds_of_its_family() {
        let capabilities = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)];
        let families = [0, 0, 1, 1, 2, 3, 3, 4, 4];
        for (compute_capability, family) in capabilities.into_iter().zip(families) {
            let measured = Device { compute_capability, ..Device::H100 }.measured();
            assert!(ptr::eq(measured, &raw const FAMILIES[family].1), "{compute_capability:?}");
        }
    }
}
