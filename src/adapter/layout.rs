//! The memory layout of factors in an adapter's block, which is the order in which kernels read them.
//!
//! A of a linear module, and every B, consist of 8 × 8 cores, the operand shape of tensor-core instructions. A of an
//! embedding is row-major, so that one token reads one row. Offsets are in elements and independent of the element
//! type.
//!
//! Invariant: ranks are padded to a multiple of 8, and features to a multiple of 256 in A of a linear module and of 64
//! elsewhere. Padding is zero. Kernels rely on it.

use crate::{
    ffi,
    sizes::{product, round_up},
};

/// Alignment of every factor in bytes, in a block that is itself aligned to 256 bytes.
pub const ALIGNMENT_BYTES: usize = ffi::ARIL_FACTOR_ALIGNMENT as usize;

/// Consecutive features of a linear module's A that are stored for 8 ranks.
pub(crate) const K_TILE: usize = ffi::ARIL_K_TILE as usize;
/// Rows and columns of a core.
pub(crate) const CORE: usize = ffi::ARIL_CORE as usize;
pub(crate) const CORE_ELEMS: usize = CORE * CORE;
/// Ranks and outputs of a tile of B.
pub(crate) const TILE_RANKS: usize = ffi::ARIL_RANK_TILE as usize;
pub(crate) const TILE_FEATURES: usize = ffi::ARIL_OUT_TILE as usize;
pub(crate) const TILE_ELEMS: usize = TILE_RANKS * TILE_FEATURES;

// Tiles are aligned even in the smallest element type.
const _: () = assert!((TILE_ELEMS * 2).is_multiple_of(ALIGNMENT_BYTES));
const _: () = assert!(TILE_RANKS == CORE && K_TILE.is_multiple_of(TILE_FEATURES));

/// A of a linear module: cores `[in_features / 256][rank / 8][32]`, each `[8 ranks][8 features]`.
///
/// One step of a kernel reads 256 features of 8 ranks, which are contiguous.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LinearA {
    /// Rows of A.
    pub rank: usize,
    /// Columns of A.
    pub in_features: usize,
}

impl LinearA {
    /// Size in elements, including padding; `usize::MAX` if it is larger.
    pub const fn elems(self) -> usize {
        elems(self.rank, round_up(self.in_features, K_TILE))
    }

    /// Offset of an element, which the factor has. That of any other has no meaning, and may overflow.
    pub const fn at(self, rank: usize, feature: usize) -> usize {
        let k_tile = feature / K_TILE * elems(self.rank, K_TILE);
        let core = rank / CORE * (K_TILE / CORE) + feature % K_TILE / CORE;
        k_tile + core * CORE_ELEMS + rank % CORE * CORE + feature % CORE
    }
}

/// A of an embedding: its transpose `[vocab, rank]`, row-major.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct EmbeddingA {
    /// Rows of the embedding.
    pub vocab: usize,
    /// Rows of A in PEFT's layout.
    pub rank: usize,
}

impl EmbeddingA {
    /// Size in elements, including padding; `usize::MAX` if it is larger.
    pub const fn elems(self) -> usize {
        elems(self.rank, self.vocab)
    }

    /// Offset of an element, which the factor has. That of any other has no meaning, and may overflow.
    pub const fn at(self, id: usize, rank: usize) -> usize {
        id * self.rank.next_multiple_of(TILE_RANKS) + rank
    }
}

/// B of any module: cores `[out_features / 64][rank / 8][2 i][4 j]`, each `[8 n][8 ranks]`. Row `n` of core `(i, j)`
/// holds output `32 * i + 8 * (n / 2) + 2 * j + n % 2` of the 64.
///
/// With this order, multiplying by four consecutive cores leaves eight consecutive outputs in each lane of a warp.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct B {
    /// Rows of B.
    pub out_features: usize,
    /// Columns of B.
    pub rank: usize,
}

impl B {
    /// Size in elements, including padding; `usize::MAX` if it is larger.
    pub const fn elems(self) -> usize {
        elems(self.rank, self.out_features)
    }

    /// Offset of an element, which the factor has. That of any other has no meaning, and may overflow.
    pub const fn at(self, output: usize, rank: usize) -> usize {
        let core = output % TILE_FEATURES / 32 * 4 + output % 8 / 2;
        let n = output % 32 / 8 * 2 + output % 2;
        let tile = output / TILE_FEATURES * stripe_elems(self.rank) + rank / TILE_RANKS * TILE_ELEMS;
        tile + core * CORE_ELEMS + n * CORE + rank % CORE
    }
}

/// Trained rows: `[count, hidden]`, row-major.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Rows {
    /// The number of rows.
    pub count: usize,
    /// Features of a row.
    pub hidden: usize,
}

impl Rows {
    /// Size in elements, including padding; `usize::MAX` if it is larger.
    pub const fn elems(self) -> usize {
        product(&[self.count, round_up(self.hidden, TILE_FEATURES)])
    }

    /// Offset of an element, which the rows have. That of any other has no meaning, and may overflow.
    pub const fn at(self, row: usize, feature: usize) -> usize {
        row * self.hidden.next_multiple_of(TILE_FEATURES) + feature
    }
}

/// The ids of trained rows, ascending, relative to the rank's first row: an `i32` in the place of two elements each.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RowIds {
    /// The number of rows.
    pub count: usize,
}

impl RowIds {
    /// Ids in the place of a tile of elements.
    pub(super) const TILE: usize = TILE_FEATURES / 2;

    /// Size in elements, including padding; `usize::MAX` if it is larger.
    pub const fn elems(self) -> usize {
        product(&[2, round_up(self.count, Self::TILE)])
    }

    /// Offset of the `i32` of a row, in elements.
    pub const fn at(self, row: usize) -> usize {
        2 * row
    }
}

/// Elements of 64 features, for all ranks. In every factor, 256 features precede the next 256.
pub(super) const fn stripe_elems(rank: usize) -> usize {
    product(&[round_up(rank, TILE_RANKS), TILE_FEATURES])
}

const fn elems(rank: usize, features: usize) -> usize {
    product(&[stripe_elems(rank), features.div_ceil(TILE_FEATURES)])
}
