//! The layouts of factors in a block, against the nested loops that their docs describe.

use aril::adapter::layout::{B, EmbeddingA, LinearA};
use proptest::prelude::*;

proptest! {
    #[test]
    fn a_of_a_linear_module_is_cores_by_k_tiles(rank in 1..40_usize, in_features in 1..1100_usize) {
        let layout = LinearA { rank, in_features };
        let mut place = 0;
        for k_tile in 0..in_features.div_ceil(256) {
            for tile in 0..rank.div_ceil(8) {
                for core in 0..32 {
                    for (row, feature) in (0..8).flat_map(|row| (0..8).map(move |feature| (row, feature))) {
                        prop_assert_eq!(layout.at(tile * 8 + row, k_tile * 256 + core * 8 + feature), place);
                        place += 1;
                    }
                }
            }
        }
        prop_assert_eq!(layout.elems(), place);
    }

    #[test]
    fn b_is_cores_by_stripes(rank in 1..40_usize, out_features in 1..300_usize) {
        let layout = B { out_features, rank };
        let mut place = 0;
        for stripe in 0..out_features.div_ceil(64) {
            for tile in 0..rank.div_ceil(8) {
                for (i, j) in (0..2).flat_map(|i| (0..4).map(move |j| (i, j))) {
                    for (n, column) in (0..8).flat_map(|n| (0..8).map(move |column| (n, column))) {
                        let output = stripe * 64 + 32 * i + 8 * (n / 2) + 2 * j + n % 2;
                        prop_assert_eq!(layout.at(output, tile * 8 + column), place);
                        place += 1;
                    }
                }
            }
        }
        prop_assert_eq!(layout.elems(), place);
    }

    /// A row for each id, and stripes of 64 rows.
    #[test]
    fn a_of_an_embedding_is_rows(rank in 1..40_usize, vocab in 1..300_usize) {
        let layout = EmbeddingA { vocab, rank };
        let padded = rank.next_multiple_of(8);
        for (id, row) in (0..vocab).flat_map(|id| (0..rank).map(move |row| (id, row))) {
            prop_assert_eq!(layout.at(id, row), id * padded + row);
        }
        prop_assert_eq!(layout.elems(), vocab.next_multiple_of(64) * padded);
    }
}
