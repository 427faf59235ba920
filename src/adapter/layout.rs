//! Where the elements of a factor are in a block: the order in which kernels read them.
//!
//! A linear module's A and every B are made of cores of 8 by 8 elements, row by row, which is what the tensor cores take. An
//! embedding's A is row-major, so that what belongs to a token is one row. All is counted in elements, and the same for every type.
//!
//! Invariant: a factor takes its rank, padded to a multiple of 8, times its features, padded to a multiple of 256 in a linear
//! module's A and of 64 elsewhere, and holds zeros wherever it has no element. Kernels rely on them.

use crate::ffi;

/// What every factor is aligned to, in a block that begins on a boundary of 256 bytes.
pub const ALIGNMENT_BYTES: usize = ffi::ARIL_FACTOR_ALIGNMENT as usize;

/// Features of a linear module's A that stand together, of 8 ranks.
pub(crate) const LANE_FEATURES: usize = ffi::ARIL_K_TILE as usize;
/// Rows and columns of a core.
pub(crate) const CORE: usize = ffi::ARIL_CORE as usize;
pub(crate) const CORE_ELEMS: usize = CORE * CORE;
/// Ranks and outputs of a tile of B.
pub(crate) const TILE_RANKS: usize = ffi::ARIL_RANK_TILE as usize;
pub(crate) const TILE_FEATURES: usize = ffi::ARIL_OUT_TILE as usize;
pub(crate) const TILE_ELEMS: usize = TILE_RANKS * TILE_FEATURES;

// Whole tiles, of the smallest elements.
const _: () = assert!((TILE_ELEMS * 2).is_multiple_of(ALIGNMENT_BYTES));
const _: () = assert!(TILE_RANKS == CORE && LANE_FEATURES.is_multiple_of(TILE_FEATURES));

/// A of a linear module: cores `[in_features / 256][rank / 8][32]`, each `[8 ranks][8 features]`.
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
        let core = rank / CORE * (LANE_FEATURES / CORE) + feature % LANE_FEATURES / CORE;
        lane + core * CORE_ELEMS + rank % CORE * CORE + feature % CORE
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

/// B of any module: cores `[out_features / 64][rank / 8][2 i][4 j]`, each `[8 n][8 ranks]`, where the output of the 64 is
/// `32 * i + 8 * (n / 2) + 2 * j + n % 2`.
///
/// So products with four cores that stand together leave a lane of a warp eight neighbouring outputs.
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
        let core = output % TILE_FEATURES / 32 * 4 + output % 8 / 2;
        let n = output % 32 / 8 * 2 + output % 2;
        let tile = output / TILE_FEATURES * stripe_elems(self.rank) + rank / TILE_RANKS * TILE_ELEMS;
        tile + core * CORE_ELEMS + n * CORE + rank % CORE
    }
}

/// What 64 features take, of all ranks. In every factor 256 stand together, before the next 256.
pub(super) const fn stripe_elems(rank: usize) -> usize {
    rank.next_multiple_of(TILE_RANKS) * TILE_FEATURES
}

const fn elems(rank: usize, features: usize) -> usize {
    stripe_elems(rank) * features.div_ceil(TILE_FEATURES)
}
