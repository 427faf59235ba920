//! The launches of operations on linear layers and embeddings: every choice that a launch makes, for `csrc` to take as
//! it is.

use super::{LinearPlan, b_bytes, likely_tiles, out_blocks, outs_per_block, small_outs, time_of_waves, wide_outs};
use crate::{
    DType, ffi,
    plan::{
        BatchBounds, Device,
        capacity::Capacity,
        int, shared_memory,
        thresholds::{
            RANK_TILE, TOKENS_PER_TILE, is_small_m, is_staged,
            linear::{LARGE_M_OUTS, LARGE_M_RANK_TILES, LARGE_M_WARPGROUPS, SMALL_M_RANK_TILES, warpgroup_rank_tiles},
            time_beside, times,
        },
    },
};

impl LinearPlan {
    /// The launches for a batch. All choices are bit-identical.
    pub(crate) fn launch(&self, batch: BatchBounds) -> ffi::aril_linear_plan {
        let BatchBounds { num_tokens, table_rank, .. } = batch;
        let tiles = self.max_tiles(batch);
        let outs = self.outs_per_block(num_tokens, tiles);
        let launch = self.with_outs(batch, outs, &self.out_features);
        if self.dtype == DType::F32 {
            launch
        } else if self.is_large_m(num_tokens) {
            let smem_bytes = int(wide_expand_bytes(outs, table_rank, self.device));
            self.with_wide_shrink(ffi::aril_linear_plan { smem_bytes, ..launch }, batch)
        } else {
            let smem_bytes = int(shared_memory::small(num_tokens, table_rank, outs));
            self.in_turns(ffi::aril_linear_plan { smem_bytes, ..launch }, outs, batch)
        }
    }

    /// The most tiles of a batch, of the size that the layer works on.
    fn max_tiles(&self, batch: BatchBounds) -> usize {
        if self.is_large_m(batch.num_tokens) { batch.wide_tiles } else { batch.small_tiles }
    }

    /// What all operations have, with so many outputs of a slice per block of expand, whose slices have so many.
    fn with_outs(&self, batch: BatchBounds, outs: usize, out_features: &[usize]) -> ffi::aril_linear_plan {
        let tiles = self.max_tiles(batch);
        ffi::aril_linear_plan {
            max_tiles: int(tiles),
            large_m: self.is_large_m(batch.num_tokens).into(),
            k_tiles_per_split: int(self.k_tiles_per_split(batch.num_tokens)),
            expand_blocks: int(tiles * out_blocks(out_features, outs)),
            outs_per_block: int(outs),
            shrink_tiles: int(tiles),
            few_tiles: int(tiles),
            outs_per_block_of_few: int(outs),
            ..ffi::aril_linear_plan::default()
        }
    }

    /// The launch in turns, if it has too many blocks for all tiles at once.
    fn in_turns(&self, launch: ffi::aril_linear_plan, outs: usize, batch: BatchBounds) -> ffi::aril_linear_plan {
        let BatchBounds { num_tokens, small_tiles, table_rank, .. } = batch;
        let (measured, multiprocessors) = (self.device.measured(), self.device.multiprocessors);
        let few_tiles = small_tiles.min(num_tokens.div_ceil(TOKENS_PER_TILE) + measured.few_tiles);
        let shrink_blocks = self.rank_tiles_of(table_rank).div_ceil(SMALL_M_RANK_TILES) * self.num_slabs();
        let blocks = out_blocks(&self.out_features, outs);
        let most_blocks = times(measured.most_blocks, multiprocessors);
        if few_tiles == small_tiles || small_tiles * (shrink_blocks + blocks) <= most_blocks {
            return launch;
        }
        // So many tiles have blocks, of which a tile has so many.
        let turns_blocks = times(measured.turns_blocks, multiprocessors);
        let tiles = |blocks: usize| few_tiles.max(turns_blocks.div_ceil(blocks)).min(small_tiles);
        let outs_of_few = self.outs_per_block(num_tokens, few_tiles);
        let of_few = few_tiles * out_blocks(&self.out_features, outs_of_few);
        ffi::aril_linear_plan {
            takes_turns: 1,
            shrink_tiles: int(tiles(shrink_blocks)),
            expand_blocks: int(of_few.max(tiles(blocks) * blocks)),
            few_tiles: int(few_tiles),
            outs_per_block_of_few: int(outs_of_few),
            ..launch
        }
    }

    fn with_wide_shrink(&self, launch: ffi::aril_linear_plan, batch: BatchBounds) -> ffi::aril_linear_plan {
        let BatchBounds { num_tokens, wide_tiles, table_rank, .. } = batch;
        let all_rank_tiles = self.rank_tiles_of(table_rank);
        let rank_tiles = warpgroup_rank_tiles(all_rank_tiles);
        let fits_slice = table_rank.div_ceil(RANK_TILE) <= rank_tiles;
        let most = if fits_slice { 1 } else { LARGE_M_WARPGROUPS.min(all_rank_tiles.div_ceil(rank_tiles)) };
        let (warpgroups, shared_bytes) = shared_memory::wide_shrink(rank_tiles, most, self.device);
        ffi::aril_linear_plan {
            splits_per_block: int(self.splits_per_block(num_tokens, wide_tiles)),
            rank_tiles: int(rank_tiles),
            warpgroups: int(warpgroups),
            shrink_smem_bytes: int(shared_bytes),
            ..launch
        }
    }

    /// Splits that one shrink block of wide tiles reduces, one after the other.
    fn splits_per_block(&self, num_tokens: usize, max_tiles: usize) -> usize {
        let (measured, rank_tiles, most) = (self.device.measured(), self.rank_tiles(), LARGE_M_RANK_TILES);
        let (rank_blocks, per_multiprocessor) = if rank_tiles <= most * self.out_features.len() {
            (rank_tiles.div_ceil(most), measured.resident_shrink(rank_tiles))
        } else {
            (rank_tiles.div_ceil(most * LARGE_M_WARPGROUPS), 1)
        };
        let places = (self.device.multiprocessors, per_multiprocessor);
        let splits = self.num_splits(num_tokens);
        let tiles = likely_tiles(num_tokens, max_tiles);
        let time = |splits_per_block: usize| -> usize {
            let k_tiles = splits_per_block * self.k_tiles_per_split(num_tokens);
            let blocks_of_tile = rank_blocks * splits.div_ceil(splits_per_block);
            let wave =
                |resident: usize| measured.shrink_start + k_tiles * time_beside(measured.shrink_k_tile, resident);
            tiles.map(|tiles| time_of_waves(tiles * blocks_of_tile, places, wave)).iter().sum()
        };
        (1..=splits).min_by_key(|&splits_per_block| time(splits_per_block)).expect("there is a split")
    }

    /// Rank tiles of all slices of adapters of so many ranks.
    fn rank_tiles_of(&self, rank: usize) -> usize {
        self.out_features.len() * rank.div_ceil(RANK_TILE)
    }

    /// The launch that expands a layer of gate and up within its activation. All choices are bit-identical.
    pub(crate) fn silu_mul_launch(&self, batch: BatchBounds) -> ffi::aril_linear_plan {
        let BatchBounds { num_tokens, table_rank, .. } = batch;
        let (features, max_rank) = (&self.out_features[..1], self.capacity.max_rank);
        let (is_large_m, device) = (self.is_large_m(num_tokens), self.device);
        let tiles = self.max_tiles(batch);
        let outs = if is_large_m && is_staged(max_rank) {
            wide_outs(features, device.measured().resident_silu_mul, max_rank, num_tokens, tiles, device)
        } else {
            let step = (LARGE_M_OUTS, b_bytes(2 * LARGE_M_OUTS, max_rank));
            small_outs(features, step, tiles, device)
        };
        let wide = (is_large_m && is_staged(table_rank)).then(|| shared_memory::wide_silu_mul(table_rank, self.device));
        let wide = wide.flatten();
        let smem_bytes = int(wide.unwrap_or(2 * shared_memory::in_place_expand(table_rank)));
        ffi::aril_linear_plan { smem_bytes, wide: wide.is_some().into(), ..self.with_outs(batch, outs, features) }
    }
}

/// The launch of an embedding of `hidden` outputs. All choices are bit-identical.
pub(crate) fn embedding_launch(
    hidden: usize,
    capacity: Capacity,
    device: Device,
    batch: BatchBounds,
) -> ffi::aril_embedding_plan {
    let BatchBounds { num_tokens, small_tiles, wide_tiles, table_rank } = batch;
    let is_wide = !is_small_m(num_tokens);
    let tiles = if is_wide { wide_tiles } else { small_tiles };
    let outs = outs_per_block(&[hidden], capacity.max_rank, is_wide.then_some(num_tokens), tiles, device);
    let shared_bytes = if is_wide {
        wide_expand_bytes(outs, table_rank, device)
    } else {
        shared_memory::small_expand(table_rank, outs)
    };
    ffi::aril_embedding_plan {
        max_tiles: int(tiles),
        blocks: int(tiles * hidden.div_ceil(outs)),
        outs_per_block: int(outs),
        smem_bytes: int(shared_bytes),
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

    /// In up to so many tiles of either size.
    fn batch(num_tokens: usize, tiles: usize, table_rank: usize) -> BatchBounds {
        BatchBounds { num_tokens, small_tiles: tiles, wide_tiles: tiles, table_rank }
    }

    fn printed_of(plan: &LinearPlan, num_tokens: usize, max_tiles: usize) -> String {
        let launch = plan.launch(batch(num_tokens, max_tiles, plan.capacity.max_rank));
        let turns = (launch.takes_turns != 0).then(|| {
            let (few, outs) = (launch.few_tiles, launch.outs_per_block_of_few);
            format!(", in turns: shrink of {} tiles, {outs} outputs up to {few} tiles", launch.shrink_tiles)
        });
        let shrink = (launch.warpgroups > 0).then(|| {
            let (rank_tiles, splits, bytes) = (launch.rank_tiles, launch.splits_per_block, launch.shrink_smem_bytes);
            format!(", shrink {} x {rank_tiles} rank tiles, {splits} splits, {bytes} bytes", launch.warpgroups)
        });
        let [turns, shrink] = [turns, shrink].map(Option::unwrap_or_default);
        let (tiles, blocks, outs) = (launch.max_tiles, launch.expand_blocks, launch.outs_per_block);
        format!("{tiles} tiles, {blocks} of {outs}, {} bytes{turns}{shrink}", launch.smem_bytes)
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
        let launch = |rank| {
            let launch = gate_up(rank).silu_mul_launch(batch(2048, 40, rank));
            (launch.outs_per_block, launch.smem_bytes, launch.wide)
        };
        assert_eq!(launch(16), (640, 89_088, 1));
        assert_eq!(launch(128), (640, 16_384, 0));
    }

    #[test]
    fn launches_of_gate_up_and_embeddings_are_those_that_were_measured() {
        let gate_up = |rank| plan(4096, &[12_288, 12_288], DType::BF16, 8, rank);
        let silu_mul = |tokens, rank| {
            let launch = gate_up(rank).silu_mul_launch(batch(tokens, tokens.div_ceil(64) + 8, rank));
            let kernel = if launch.wide != 0 { "wide" } else { "plain" };
            format!("{kernel}, {} of {}, {} bytes", launch.expand_blocks, launch.outs_per_block, launch.smem_bytes)
        };
        check(&[
            (silu_mul(64, 16), "plain, 432 of 256, 2048 bytes"),
            (silu_mul(2048, 16), "wide, 280 of 1792, 98304 bytes"),
            (silu_mul(2048, 64), "wide, 280 of 1792, 114688 bytes"),
            (silu_mul(2048, 128), "wide, 280 of 1792, 220160 bytes"),
            (silu_mul(2048, 200), "plain, 3840 of 128, 26624 bytes"),
        ]);
        let embedding = |tokens, rank| {
            let capacity = Capacity { max_tokens: 8192, num_slots: 8, max_rank: rank };
            let batch = batch(tokens, capacity.max_tiles(tokens), rank);
            let launch = embedding_launch(4096, capacity, Device::H100, batch);
            format!("{}, {} bytes", launch.outs_per_block, launch.smem_bytes)
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
        let of = |rank| plan.launch(batch(2048, 40, rank));
        let shrink = |rank: usize| (of(rank).rank_tiles, of(rank).warpgroups);
        assert_eq!([16, 32, 64, 128].map(shrink), [(2, 1), (4, 1), (8, 1), (8, 2)]);
        assert!(of(16).smem_bytes < of(128).smem_bytes && of(16).outs_per_block == of(128).outs_per_block);
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
