//! Embeddings: as the engine describes them, and as one rank holds them.

use std::ops::Range;

use super::{
    cut::{Cut, TpRank, check_padding, check_size, cut, cut_padded},
    error::SpecError,
};

/// An unsharded embedding.
#[derive(Clone, Debug)]
pub(super) struct Embedding {
    pub(super) module: String,
    pub(super) vocab: usize,
    /// Rows that the ranks split evenly; `None` if every rank holds all rows.
    pub(super) padded: Option<usize>,
    pub(super) hidden: usize,
}

impl Embedding {
    /// Checks everything that does not depend on the rank.
    pub(super) fn check(&self) -> Result<(), SpecError> {
        let Self { module, vocab, padded, hidden } = self;
        check_size(module, *vocab)?;
        check_size(module, *hidden)?;
        padded.map_or(Ok(()), |padded| check_padding(module, *vocab, padded))
    }

    /// The embedding on rank `tp`.
    pub(super) fn shard(&self, tp: TpRank, entry: usize) -> Result<EmbeddingSite, SpecError> {
        let rows = match self.padded {
            Some(padded) => cut_padded(tp, &self.module, self.vocab, padded)?,
            None => cut(tp, &self.module, self.vocab, 1)?,
        };
        Ok(EmbeddingSite { module: self.module.clone(), rows, hidden: self.hidden, entry })
    }
}

/// An embedding on one rank.
#[derive(Clone, Debug)]
pub struct EmbeddingSite {
    module: String,
    rows: Cut,
    hidden: usize,
    entry: usize,
}

impl EmbeddingSite {
    /// Full path of the module, such as `model.embed_tokens`.
    pub fn module(&self) -> &str {
        &self.module
    }

    /// Rows of the embedding on this rank, without padding. Token ids outside `0..vocab` get no delta.
    pub fn vocab(&self) -> usize {
        self.rows.len
    }

    /// The rows of the unsharded embedding that this rank holds, without padding.
    ///
    /// The operations take token ids relative to its start: with a
    /// [vocabulary-parallel](super::ModelSpec::vocab_parallel_embedding) embedding, the id of token `t` is
    /// `ids[t] - range.start`. Ids of other ranks' rows are then negative or too large, and get no delta. They must not
    /// be replaced by 0.
    pub fn range(&self) -> Range<usize> {
        self.rows.range()
    }

    /// Features of one embedding row.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Descriptor-table entry of the embedding.
    pub fn entry(&self) -> usize {
        self.entry
    }

    /// Rows of the unsharded embedding.
    pub(crate) fn whole_vocab(&self) -> usize {
        self.rows.whole
    }
}
