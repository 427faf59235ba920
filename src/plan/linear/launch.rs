//! The launches of operations on linear layers and embeddings: every choice that a launch makes, for `csrc` to take as it is.

use super::{LinearPlan, b_bytes, likely_tiles, out_blocks, outs_per_block, small_outs, time_of_waves, wide_outs};
use crate::{
    DType,
    plan::{
        Device,
        capacity::Capacity,
        shared_memory,
        thresholds::{
            RANK_TILE, TOKENS_PER_TILE, is_small_m, is_staged,
            linear::{
                FEW_TILES, LARGE_M_OUTS, LARGE_M_RANK_TILES, LARGE_M_WARPGROUPS, RESIDENT_SILU_MUL, SHRINK_START,
                SMALL_M_RANK_TILES, most_blocks, resident_shrink, shrink_k_tile, turns_blocks, warpgroup_rank_tiles,
            },
        },
    },
};

/// How the operations on a layer are launched. All choices are bit-identical.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct LinearLaunch {
    /// Outputs of one slice per expand block.
    pub(crate) outs: usize,
    /// Blocks of expand.
    pub(crate) expand_blocks: usize,
    /// Shared memory of a block of expand, in bytes. Of shrink, too, if one launch computes both.
    pub(crate) shared_bytes: usize,
    /// Set if blocks of small tiles take turns.
    pub(crate) turns: Option<Turns>,
    /// Set if shrink has wide tiles.
    pub(crate) wide_shrink: Option<WideShrink>,
}

/// How blocks take turns on small tiles.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Turns {
    /// Tiles that have blocks of shrink.
    pub(crate) shrink_tiles: usize,
    /// The most tiles of a batch of few slots, and the outputs of one slice per expand block of such a batch.
    pub(crate) few_tiles: usize,
    pub(crate) outs_of_few: usize,
}

/// A block that shrinks wide tiles.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct WideShrink {
    /// Rank tiles of a warpgroup.
    pub(crate) rank_tiles: usize,
    pub(crate) warpgroups: usize,
    /// Splits that it reduces, one after the other.
    pub(crate) splits_per_block: usize,
    pub(crate) shared_bytes: usize,
}

/// How SiLU·mul of a layer of gate and up is launched. All choices are bit-identical.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct SiluMulLaunch {
    /// Features of both slices per block.
    pub(crate) outs: usize,
    /// Whether the kernel is the one of many tokens.
    pub(crate) wide: bool,
    pub(crate) shared_bytes: usize,
}

/// How an operation on an embedding is launched. All choices are bit-identical.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct EmbeddingLaunch {
    /// Outputs per block.
    pub(crate) outs: usize,
    pub(crate) shared_bytes: usize,
}

impl LinearPlan {
    /// The launches for a batch of `num_tokens` tokens in up to `max_tiles` tiles, of adapters in a table of ranks up to `table_rank`,
    /// which is at most the capacity's.
    pub(crate) fn launch(&self, num_tokens: usize, max_tiles: usize, table_rank: usize) -> LinearLaunch {
        let outs = self.outs_per_block(num_tokens, max_tiles);
        let expand_blocks = max_tiles * out_blocks(&self.out_features, outs);
        let launch = LinearLaunch { outs, expand_blocks, shared_bytes: 0, turns: None, wide_shrink: None };
        if self.dtype == DType::F32 {
            launch
        } else if self.is_large_m(num_tokens) {
            let shared_bytes = wide_expand_bytes(outs, table_rank, self.device);
            let wide_shrink = Some(self.wide_shrink(num_tokens, max_tiles, table_rank));
            LinearLaunch { shared_bytes, wide_shrink, ..launch }
        } else {
            let shared_bytes = shared_memory::small(num_tokens, table_rank, outs);
            let launch = LinearLaunch { shared_bytes, ..launch };
            self.in_turns(launch, num_tokens, max_tiles, table_rank).unwrap_or(launch)
        }
    }

    /// The same launch in turns, if it has too many blocks for all tiles at once.
    fn in_turns(
        &self,
        launch: LinearLaunch,
        num_tokens: usize,
        max_tiles: usize,
        table_rank: usize,
    ) -> Option<LinearLaunch> {
        let multiprocessors = self.device.multiprocessors;
        let few_tiles = max_tiles.min(num_tokens.div_ceil(TOKENS_PER_TILE) + FEW_TILES);
        let shrink_blocks = self.rank_tiles_of(table_rank).div_ceil(SMALL_M_RANK_TILES) * self.num_slabs();
        if few_tiles == max_tiles || max_tiles * shrink_blocks + launch.expand_blocks <= most_blocks(multiprocessors) {
            return None;
        }
        // So many tiles have blocks, of which a tile has so many.
        let tiles = |blocks: usize| few_tiles.max(turns_blocks(multiprocessors).div_ceil(blocks)).min(max_tiles);
        let outs_of_few = self.outs_per_block(num_tokens, few_tiles);
        let blocks = out_blocks(&self.out_features, launch.outs);
        let of_few = few_tiles * out_blocks(&self.out_features, outs_of_few);
        let turns = Turns { shrink_tiles: tiles(shrink_blocks), few_tiles, outs_of_few };
        Some(LinearLaunch { expand_blocks: of_few.max(tiles(blocks) * blocks), turns: Some(turns), ..launch })
    }

    fn wide_shrink(&self, num_tokens: usize, max_tiles: usize, table_rank: usize) -> WideShrink {
        let all_rank_tiles = self.rank_tiles_of(table_rank);
        let rank_tiles = warpgroup_rank_tiles(all_rank_tiles);
        let fits_slice = table_rank.div_ceil(RANK_TILE) <= rank_tiles;
        let most = if fits_slice { 1 } else { LARGE_M_WARPGROUPS.min(all_rank_tiles.div_ceil(rank_tiles)) };
        let (warpgroups, shared_bytes) = shared_memory::wide_shrink(rank_tiles, most, self.device);
        let splits_per_block = self.splits_per_block(num_tokens, max_tiles);
        WideShrink { rank_tiles, warpgroups, splits_per_block, shared_bytes }
    }

    /// Splits that one shrink block of wide tiles reduces, one after the other.
    fn splits_per_block(&self, num_tokens: usize, max_tiles: usize) -> usize {
        let (rank_tiles, most) = (self.rank_tiles(), LARGE_M_RANK_TILES);
        let (rank_blocks, per_multiprocessor) = if rank_tiles <= most * self.out_features.len() {
            (rank_tiles.div_ceil(most), resident_shrink(rank_tiles))
        } else {
            (rank_tiles.div_ceil(most * LARGE_M_WARPGROUPS), 1)
        };
        let places = (self.device.multiprocessors, per_multiprocessor);
        let splits = self.num_splits(num_tokens);
        let tiles = likely_tiles(num_tokens, max_tiles);
        let time = |splits_per_block: usize| -> usize {
            let k_tiles = splits_per_block * self.k_tiles_per_split(num_tokens);
            let blocks_of_tile = rank_blocks * splits.div_ceil(splits_per_block);
            let wave = |resident: usize| SHRINK_START + k_tiles * shrink_k_tile(resident);
            tiles.map(|tiles| time_of_waves(tiles * blocks_of_tile, places, wave)).iter().sum()
        };
        (1..=splits).min_by_key(|&splits_per_block| time(splits_per_block)).expect("there is a split")
    }

    /// Rank tiles of all slices of adapters of so many ranks.
    fn rank_tiles_of(&self, rank: usize) -> usize {
        self.out_features.len() * rank.div_ceil(RANK_TILE)
    }

    /// The launch that expands a layer of gate and up within its activation. Arguments as for [`launch`](Self::launch).
    pub(crate) fn silu_mul_launch(&self, num_tokens: usize, max_tiles: usize, table_rank: usize) -> SiluMulLaunch {
        let (features, max_rank) = (&self.out_features[..1], self.capacity.max_rank);
        let (is_large_m, multiprocessors) = (self.is_large_m(num_tokens), self.device.multiprocessors);
        let outs = if is_large_m && is_staged(max_rank) {
            wide_outs(features, (multiprocessors, RESIDENT_SILU_MUL), max_rank, num_tokens, max_tiles)
        } else {
            let step = (LARGE_M_OUTS, b_bytes(2 * LARGE_M_OUTS, max_rank));
            small_outs(features, step, max_tiles, multiprocessors)
        };
        let wide = (is_large_m && is_staged(table_rank)).then(|| shared_memory::wide_silu_mul(table_rank, self.device));
        match wide.flatten() {
            Some(shared_bytes) => SiluMulLaunch { outs, wide: true, shared_bytes },
            None => SiluMulLaunch { outs, wide: false, shared_bytes: 2 * shared_memory::in_place_expand(table_rank) },
        }
    }
}

impl EmbeddingLaunch {
    /// For a batch of `num_tokens` tokens in up to `max_tiles` tiles, of an embedding of `hidden` outputs. `table_rank` as for
    /// [`LinearPlan::launch`].
    pub(crate) fn new(
        hidden: usize,
        capacity: Capacity,
        device: Device,
        (num_tokens, max_tiles, table_rank): (usize, usize, usize),
    ) -> Self {
        let wide_tokens = (!is_small_m(num_tokens)).then_some(num_tokens);
        let outs = outs_per_block(&[hidden], capacity.max_rank, wide_tokens, max_tiles, device);
        let shared_bytes = match wide_tokens {
            Some(_) => wide_expand_bytes(outs, table_rank, device),
            None => shared_memory::small_expand(table_rank, outs),
        };
        Self { outs, shared_bytes }
    }
}

/// Shared memory of a block that expands wide tiles: B is staged up to some rank, and otherwise read in place.
fn wide_expand_bytes(outs: usize, table_rank: usize, device: Device) -> usize {
    if is_staged(table_rank) {
        shared_memory::wide_expand(table_rank, device)
    } else {
        shared_memory::small_expand(table_rank, outs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::thresholds::{K_TILES_PER_SLAB, K_TILES_PER_SPAN};

    fn plan(in_features: usize, out_features: &[usize], dtype: DType, num_slots: usize, max_rank: usize) -> LinearPlan {
        let capacity = Capacity { max_tokens: 8192, num_slots, max_rank };
        LinearPlan { dtype, in_features, out_features: out_features.to_vec(), capacity, device: Device::H100 }
    }

    fn printed_of(plan: &LinearPlan, num_tokens: usize, max_tiles: usize) -> String {
        let LinearLaunch { outs, expand_blocks, shared_bytes, turns, wide_shrink } =
            plan.launch(num_tokens, max_tiles, plan.capacity.max_rank);
        let turns = turns.map(|Turns { shrink_tiles, few_tiles, outs_of_few }| {
            format!(", in turns: shrink of {shrink_tiles} tiles, {outs_of_few} outputs up to {few_tiles} tiles")
        });
        let shrink = wide_shrink.map(|WideShrink { rank_tiles, warpgroups, splits_per_block, shared_bytes }| {
            format!(", shrink {warpgroups} x {rank_tiles} rank tiles, {splits_per_block} splits, {shared_bytes} bytes")
        });
        let [turns, shrink] = [turns, shrink].map(Option::unwrap_or_default);
        format!("{max_tiles} tiles, {expand_blocks} of {outs}, {shared_bytes} bytes{turns}{shrink}")
    }

    fn printed(plan: &LinearPlan, num_tokens: usize) -> String {
        let (capacity, large_m) = (plan.capacity, plan.is_large_m(num_tokens));
        let tiles = if large_m { capacity.max_wide_tiles(num_tokens) } else { capacity.max_small_tiles(num_tokens) };
        printed_of(plan, num_tokens, tiles)
    }

    fn check(launches: &[(String, &str)]) {
        for (number, (printed, expected)) in launches.iter().enumerate() {
            assert_eq!(printed, expected, "launch {number}");
        }
    }

    /// The launches that the figures of the record are of, on an H100 or H200.
    #[test]
    fn launches_are_those_that_were_measured() {
        use DType::{BF16, F16, F32};
        let qkv = |slots, rank| plan(4096, &[4096, 1024, 1024], BF16, slots, rank);
        let o = |dtype, slots, rank| plan(4096, &[4096], dtype, slots, rank);
        check(&[
            // One tile, whose expand has the most blocks; shrink needs more memory.
            (printed(&qkv(8, 16), 1), "1 tiles, 24 of 256, 34832 bytes"),
            (printed(&qkv(32, 16), 64), "34 tiles, 408 of 512, 65792 bytes"),
            // 3,840 blocks without turns.
            (
                printed(&qkv(256, 64), 64),
                "64 tiles, 600 of 512, 69632 bytes, in turns: shrink of 13 tiles, 256 outputs up to 12 tiles",
            ),
            (printed(&o(BF16, 64, 16), 512), "92 tiles, 368 of 1024, 65792 bytes"),
            // B is read in place.
            (printed(&o(BF16, 8, 200), 512), "40 tiles, 640 of 256, 65792 bytes"),
            // Much work: wide tiles from 320 tokens on.
            (printed(&plan(12_288, &[4096], BF16, 2, 128), 319), "22 tiles, 352 of 256, 73728 bytes"),
            (
                printed(&plan(12_288, &[4096], BF16, 2, 128), 320),
                "7 tiles, 224 of 128, 114688 bytes, shrink 2 x 8 rank tiles, 1 splits, 98304 bytes",
            ),
            // Two, four and eight rank tiles of a warpgroup, which has room for a slice.
            (
                printed(&o(BF16, 8, 16), 2048),
                "40 tiles, 320 of 512, 53248 bytes, shrink 1 x 2 rank tiles, 1 splits, 40960 bytes",
            ),
            (
                printed(&o(BF16, 8, 17), 2048),
                "40 tiles, 320 of 512, 61440 bytes, shrink 1 x 4 rank tiles, 1 splits, 49152 bytes",
            ),
            (
                printed(&o(BF16, 8, 64), 2048),
                "40 tiles, 280 of 640, 90112 bytes, shrink 1 x 8 rank tiles, 1 splits, 65536 bytes",
            ),
            (
                printed(&qkv(8, 64), 8192),
                "136 tiles, 816 of 1024, 90112 bytes, shrink 1 x 8 rank tiles, 2 splits, 65536 bytes",
            ),
            // It has none: two warpgroups, three, and B in place.
            (
                printed(&o(BF16, 8, 128), 2048),
                "40 tiles, 280 of 640, 114688 bytes, shrink 2 x 8 rank tiles, 2 splits, 98304 bytes",
            ),
            (
                printed(&qkv(8, 128), 2048),
                "40 tiles, 240 of 1024, 114688 bytes, shrink 3 x 8 rank tiles, 1 splits, 131072 bytes",
            ),
            (
                printed(&o(BF16, 8, 200), 2048),
                "40 tiles, 640 of 256, 13312 bytes, shrink 3 x 8 rank tiles, 1 splits, 131072 bytes",
            ),
            (
                printed(&o(F16, 8, 48), 2048),
                "40 tiles, 280 of 640, 77824 bytes, shrink 1 x 8 rank tiles, 1 splits, 65536 bytes",
            ),
            // Small blocks reduce several splits.
            (
                printed(&plan(9000, &[100], BF16, 3, 72), 1400),
                "25 tiles, 25 of 128, 98304 bytes, shrink 2 x 8 rank tiles, 2 splits, 98304 bytes",
            ),
            // f32 has no choices.
            (printed(&o(F32, 8, 16), 2048), "40 tiles, 320 of 512, 0 bytes"),
        ]);
    }

    /// A grid of more than 1,500 blocks has blocks for as many tiles as make 594, or for those of a batch of few slots.
    #[test]
    fn blocks_take_turns_where_they_would_be_many() {
        let small = plan(1024, &[100], DType::BF16, 8192, 16);
        let wide = plan(25_600, &[25_600, 25_600], DType::BF16, 8192, 16);
        check(&[
            (printed_of(&small, 16, 750), "750 tiles, 750 of 2048, 66560 bytes"),
            (
                printed_of(&small, 16, 751),
                "751 tiles, 594 of 2048, 66560 bytes, in turns: shrink of 594 tiles, 256 outputs up to 9 tiles",
            ),
            // 300 tokens are few up to 27 tiles.
            (printed_of(&wide, 300, 27), "27 tiles, 702 of 2048, 66560 bytes"),
            (
                printed_of(&wide, 300, 28),
                "28 tiles, 702 of 2048, 66560 bytes, in turns: shrink of 27 tiles, 2048 outputs up to 27 tiles",
            ),
        ]);
        // Half the multiprocessors, half the blocks.
        let half = small.on(Device { multiprocessors: 66, ..Device::H100 });
        check(&[
            (printed_of(&half, 16, 375), "375 tiles, 375 of 2048, 66560 bytes"),
            (
                printed_of(&half, 16, 376),
                "376 tiles, 297 of 2048, 66560 bytes, in turns: shrink of 297 tiles, 256 outputs up to 9 tiles",
            ),
        ]);
    }

    /// As on devices of compute capability 8.6 and 8.9: one warpgroup for three, and one stage of B and y.
    #[test]
    fn launches_fit_in_little_shared_memory() {
        let little = Device { shared_bytes: 99 << 10, shared_bytes_per_multiprocessor: 100 << 10, ..Device::H100 };
        let o = |rank| plan(4096, &[4096], DType::BF16, 8, rank).on(little);
        check(&[
            (
                printed(&o(16), 2048),
                "40 tiles, 320 of 512, 49152 bytes, shrink 1 x 2 rank tiles, 1 splits, 40960 bytes",
            ),
            (
                printed(&o(128), 2048),
                "40 tiles, 280 of 640, 89088 bytes, shrink 1 x 8 rank tiles, 2 splits, 65536 bytes",
            ),
        ]);
        let gate_up = |rank| plan(4096, &[4096, 4096], DType::BF16, 8, rank).on(little);
        let launch = |rank| gate_up(rank).silu_mul_launch(2048, 40, rank);
        assert_eq!(launch(16), SiluMulLaunch { outs: 640, wide: true, shared_bytes: 89_088 });
        assert_eq!(launch(128), SiluMulLaunch { outs: 640, wide: false, shared_bytes: 16_384 });
    }

    #[test]
    fn launches_of_gate_up_and_embeddings_are_those_that_were_measured() {
        let gate_up = |rank| plan(4096, &[12_288, 12_288], DType::BF16, 8, rank);
        let silu_mul = |tokens, rank| {
            let SiluMulLaunch { outs, wide, shared_bytes } =
                gate_up(rank).silu_mul_launch(tokens, tokens.div_ceil(64) + 8, rank);
            format!("{} of {outs}, {shared_bytes} bytes", if wide { "wide" } else { "plain" })
        };
        check(&[
            (silu_mul(64, 16), "plain of 256, 2048 bytes"),
            (silu_mul(2048, 16), "wide of 1792, 98304 bytes"),
            (silu_mul(2048, 64), "wide of 1792, 114688 bytes"),
            (silu_mul(2048, 128), "wide of 1792, 220160 bytes"),
            (silu_mul(2048, 200), "plain of 128, 26624 bytes"),
        ]);
        let embedding = |tokens, rank| {
            let capacity = Capacity { max_tokens: 8192, num_slots: 8, max_rank: rank };
            let EmbeddingLaunch { outs, shared_bytes } =
                EmbeddingLaunch::new(4096, capacity, Device::H100, (tokens, capacity.max_tiles(tokens), rank));
            format!("{outs}, {shared_bytes} bytes")
        };
        check(&[
            (embedding(512, 16), "512, 17408 bytes"),
            (embedding(512, 200), "256, 13312 bytes"),
            (embedding(513, 16), "128, 53248 bytes"),
            (embedding(513, 200), "256, 13312 bytes"),
        ]);
    }

    /// A table of lower ranks than the plan's has smaller blocks.
    #[test]
    fn a_table_of_lower_ranks_needs_less() {
        let plan = plan(4096, &[4096], DType::BF16, 8, 128);
        let of = |rank| plan.launch(2048, 40, rank);
        let shrink = |rank: usize| of(rank).wide_shrink.map(|shrink| (shrink.rank_tiles, shrink.warpgroups));
        assert_eq!([16, 32, 64, 128].map(shrink), [(2, 1), (4, 1), (8, 1), (8, 2)].map(Some));
        assert!(of(16).shared_bytes < of(128).shared_bytes && of(16).outs == of(128).outs);
    }

    /// The batches of the GPU test `several_splits_of_a_block`.
    #[test]
    fn blocks_of_few_waves_reduce_several_splits() {
        let of = |plan: LinearPlan, num_tokens| {
            let tiles = plan.capacity.max_wide_tiles(num_tokens);
            (plan.k_tiles_per_split(num_tokens), plan.splits_per_block(num_tokens, tiles))
        };
        let bf16 = DType::BF16;
        assert_eq!(of(plan(9000, &[100], bf16, 3, 72), 1400), (K_TILES_PER_SLAB, 2));
        assert_eq!(of(plan(13_000, &[64, 8, 8, 8, 8, 8, 8, 8], bf16, 2, 72), 900), (K_TILES_PER_SPAN, 2));
        // One slot's tile has all of its splits at once.
        assert_eq!(of(plan(4096, &[4096], bf16, 1, 64), 600), (K_TILES_PER_SLAB, 1));
    }

    /// In batches of 2,048 tokens of 8 slots, three blocks share a multiprocessor at rank 16, two at rank 64.
    #[test]
    fn outputs_of_a_block_fill_whole_waves() {
        let outs = |features: &[usize], tokens: usize, max_rank: usize| {
            let plan = plan(4096, features, DType::BF16, 8, max_rank);
            plan.outs_per_block(tokens, plan.capacity.max_wide_tiles(tokens))
        };
        assert_eq!((outs(&[4096], 2048, 16), outs(&[4096, 1024, 1024], 2048, 16)), (512, 768));
        assert_eq!((outs(&[4096], 2048, 64), outs(&[4096], 8192, 64)), (640, 2048));
    }
}
