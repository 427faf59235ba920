//! Where the elements of a factor are in a block: the order in which kernels read them.
//!
//! A linear module's A and every B are made of tiles of 8 ranks by 32 features, of which each lane of a warp takes 8 elements that
//! stand together, one lane behind the other. An embedding's A is row-major, so that what belongs to a token is one row. All is
//! counted in elements, and the same for every type.
//!
//! Invariant: a factor takes its rank, padded to a multiple of 8, times its features, padded to a multiple of 256 in a linear
//! module's A and of 32 elsewhere, and holds zeros wherever it has no element. Kernels rely on them.

use crate::ffi;

/// What every factor is aligned to, in a block that begins on a boundary of 256 bytes.
pub const ALIGNMENT_BYTES: usize = ffi::ARIL_FACTOR_ALIGNMENT as usize;

/// Features of a linear module's A that stand together, of 8 ranks.
pub(crate) const LANE_FEATURES: usize = ffi::ARIL_LANE_FEATURES as usize;
/// Ranks and features of a tile.
pub(crate) const TILE_RANKS: usize = ffi::ARIL_RANK_TILE as usize;
pub(crate) const TILE_FEATURES: usize = ffi::ARIL_K_TILE as usize;
pub(crate) const TILE_ELEMS: usize = TILE_RANKS * TILE_FEATURES;

// Whole tiles, of the smallest elements.
const _: () = assert!((TILE_ELEMS * 2).is_multiple_of(ALIGNMENT_BYTES));

/// A of a linear module: tiles `[in_features / 256][rank / 8][8 times 32 features]`, each `[8 ranks][32 features]`.
///
/// So what a step of the kernels takes, 256 features of 8 ranks, is one piece.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LinearA {
    /// Rows.
    pub rank: usize,
    /// Columns.
    pub in_features: usize,
}

impl LinearA {
    /// The elements that it takes.
    pub const fn elems(self) -> usize {
        elems(self.rank, self.in_features.next_multiple_of(LANE_FEATURES))
    }

    /// Where an element is.
    pub const fn at(self, rank: usize, feature: usize) -> usize {
        let lane = feature / LANE_FEATURES * elems(self.rank, LANE_FEATURES);
        let tile = rank / TILE_RANKS * (LANE_FEATURES / TILE_FEATURES) + feature % LANE_FEATURES / TILE_FEATURES;
        lane + tile * TILE_ELEMS + rank % TILE_RANKS * TILE_FEATURES + feature % TILE_FEATURES
    }
}

/// A of an embedding: its transpose `[vocab, rank]`, row-major.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct EmbeddingA {
    /// Rows of the embedding.
    pub vocab: usize,
    /// Rows of A, as PEFT stores it.
    pub rank: usize,
}

impl EmbeddingA {
    /// The elements that it takes.
    pub const fn elems(self) -> usize {
        elems(self.rank, self.vocab)
    }

    /// Where an element is.
    pub const fn at(self, id: usize, rank: usize) -> usize {
        id * self.rank.next_multiple_of(TILE_RANKS) + rank
    }
}

/// B of any module: tiles `[out_features / 32][rank / 8]`, each `[8 c][4 q][4 j][2 i]`, where the output is
/// `8 * (c / 2) + 2 * j + c % 2` and the rank `2 * q + i`.
///
/// So what lane `4 * c + q` takes are its operands of four `mma.m16n8k16`, one for each `j`, after which it holds the sums of eight
/// neighbouring outputs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct B {
    /// Rows.
    pub out_features: usize,
    /// Columns.
    pub rank: usize,
}

impl B {
    /// The elements that it takes.
    pub const fn elems(self) -> usize {
        elems(self.rank, self.out_features)
    }

    /// Where an element is.
    pub const fn at(self, output: usize, rank: usize) -> usize {
        let (c, j) = (output % 32 / 8 * 2 + output % 2, output % 8 / 2);
        let (q, i) = (rank % 8 / 2, rank % 2);
        tile(self.rank, rank, output) + ((c * 4 + q) * 4 + j) * 2 + i
    }
}

/// What 32 features take, of all ranks: in every factor they stand together, before the next 32.
pub(super) const fn stripe_elems(rank: usize) -> usize {
    rank.next_multiple_of(TILE_RANKS) * TILE_FEATURES
}

const fn elems(rank: usize, features: usize) -> usize {
    stripe_elems(rank) * features.div_ceil(TILE_FEATURES)
}

/// Where the tile of an element begins, in a factor of `of_rank`.
const fn tile(of_rank: usize, rank: usize, feature: usize) -> usize {
    feature / TILE_FEATURES * stripe_elems(of_rank) + rank / TILE_RANKS * TILE_ELEMS
}
