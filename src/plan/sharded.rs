//! The launches of a fully sharded linear layer.

use super::{
    BatchBounds, int, shared_memory,
    thresholds::{RANK_TILE, linear::SMALL_M_OUTS},
};
use crate::ffi;

/// The launches for slices of so many outputs each, and `width` ranks of v of a slice. All choices are bit-identical.
pub(crate) fn sharded_launch(
    num_outs: impl ExactSizeIterator<Item = usize>,
    width: usize,
    batch: BatchBounds,
) -> ffi::aril_sharded_plan {
    let BatchBounds { small_tiles, table_rank, .. } = batch;
    let num_slices = num_outs.len();
    let expand_blocks: usize = num_outs.map(|outs| outs.div_ceil(SMALL_M_OUTS)).sum();
    ffi::aril_sharded_plan {
        max_tiles: int(small_tiles),
        shrink_blocks: int(small_tiles * num_slices * width.div_ceil(RANK_TILE)),
        expand_blocks: int(small_tiles * expand_blocks),
        smem_bytes: int(shared_memory::small_expand(table_rank, SMALL_M_OUTS)),
    }
}

#[cfg(test)]
mod tests {
    use super::{BatchBounds, ffi, sharded_launch};

    #[test]
    fn launches_are_those_that_were_measured() {
        let launch = |width, table_rank| {
            let batch = BatchBounds { num_tokens: 64, small_tiles: 12, wide_tiles: 9, table_rank };
            let ffi::aril_sharded_plan { max_tiles, shrink_blocks, expand_blocks, smem_bytes } =
                sharded_launch([1024, 257, 128].into_iter(), width, batch);
            format!("{max_tiles} tiles, {shrink_blocks} + {expand_blocks} blocks, {smem_bytes} bytes")
        };
        assert_eq!(launch(4, 16), "12 tiles, 36 + 84 blocks, 9216 bytes");
        assert_eq!(launch(32, 128), "12 tiles, 144 + 84 blocks, 73728 bytes");
        // B is read in place.
        assert_eq!(launch(34, 136), "12 tiles, 180 + 84 blocks, 9216 bytes");
    }
}
