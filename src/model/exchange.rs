//! What the ranks exchange in a fully sharded layer.

use std::ops::Range;

use super::cut::TpRank;

/// The exchange between the two halves of the delta in a [fully sharded](super::Shard::fully_sharded) layer: shrink writes a part of
/// `v = A x` to a buffer of the engine, the engine exchanges it with the other ranks, and expand reads the result. All buffers are
/// `f32`, row-major and contiguous.
///
/// | | column-parallel | row-parallel |
/// |---|---|---|
/// | A on a rank | rows `i·w..(i + 1)·w` of rank `i`, with `w = ⌈rank / ranks⌉` | its input columns |
/// | shrink writes | these rows of `v`: `[tokens, slices, ⌈max_rank / ranks⌉]` | a partial sum of `v`: `[tokens, slices, max_rank]` |
/// | the engine | gathers the buffers of all ranks, in their order | sums the buffers of all ranks |
/// | expand reads | `[ranks, tokens, slices, ⌈max_rank / ranks⌉]` | `[tokens, slices, max_rank]` |
/// | B on a rank | the rows of its outputs | an equal range of rows |
/// | expand adds to | all its columns of `y` | [these columns](super::SliceSite::delta_range) of its partial sum `y` |
///
/// `max_rank` is the table's, and `rank` the adapter's. Shrink writes zeros beyond the adapter's rank, and for tokens without an adapter.
/// The exchange is between all ranks: each takes part for every fully sharded layer of a step, or none does, which all ranks can tell
/// from the [batch](crate::routing::Batch::has_adapters). The engine's own all-reduce of a row-parallel layer's `y` follows expand, as
/// without full sharding.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Exchange {
    collective: Collective,
    tp: TpRank,
    slices: usize,
}

/// The collective operation of an [`Exchange`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Collective {
    /// Concatenates the buffers of all ranks, in their order.
    AllGather,
    /// Adds up the buffers of all ranks.
    AllReduce,
}

impl Exchange {
    pub(super) fn new(collective: Collective, tp: TpRank, slices: usize) -> Self {
        Self { collective, tp, slices }
    }

    /// What the engine does between shrink and expand.
    pub fn collective(&self) -> Collective {
        self.collective
    }

    /// Rows and columns of the buffer that shrink writes: the tokens, and the ranks of all slices.
    pub fn sent(&self, num_tokens: usize, max_rank: usize) -> [usize; 2] {
        [num_tokens, self.slices * self.width(max_rank)]
    }

    /// Rows and columns of the buffer that expand reads: the rows of all ranks' buffers, or of their sum.
    pub fn received(&self, num_tokens: usize, max_rank: usize) -> [usize; 2] {
        let [rows, cols] = self.sent(num_tokens, max_rank);
        match self.collective {
            Collective::AllGather => [self.tp.size * rows, cols],
            Collective::AllReduce => [rows, cols],
        }
    }

    /// This rank.
    #[cfg(feature = "cuda")]
    pub(crate) fn tp(&self) -> TpRank {
        self.tp
    }

    /// Elements of `v` that one rank computes for an adapter of rank `rank`.
    pub(crate) fn width(&self, rank: usize) -> usize {
        match self.collective {
            Collective::AllGather => rank.div_ceil(self.tp.size),
            Collective::AllReduce => rank,
        }
    }

    /// The rows of A on this rank.
    pub(super) fn a_rows(&self, rank: usize) -> Range<usize> {
        let (first, width) = match self.collective {
            Collective::AllGather => (self.tp.rank, self.width(rank)),
            Collective::AllReduce => (0, rank),
        };
        (first * width).min(rank)..((first + 1) * width).min(rank)
    }
}
