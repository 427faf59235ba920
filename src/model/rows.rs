//! Where adapters may have rows of their own: as the engine declares it, and as one rank holds it.

use std::ops::Range;

use super::{
    embedding::EmbeddingSite,
    error::SpecError,
    linear::LinearSite,
    shard::{EmbeddingId, LinearId},
};
use crate::adapter::MIN_STAGING_BYTES;

/// The most features of a row, so that a staging buffer has room for one.
const MAX_HIDDEN: usize = MIN_STAGING_BYTES / size_of::<f32>();

/// The embedding and the head of an unsharded model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub(super) embedding: EmbeddingId,
    pub(super) head: LinearId,
    pub(super) is_tied: bool,
}

impl Rows {
    /// Entries of a slot.
    pub(super) const ENTRIES: usize = 2;

    /// The rows on the rank that has these sites.
    pub(super) fn shard(
        self,
        embedding: &EmbeddingSite,
        head: &LinearSite,
        first_entry: usize,
    ) -> Result<RowsSite, SpecError> {
        let hidden = embedding.hidden();
        let not_head = |reason| SpecError::NotHead { embedding: embedding.module().to_owned(), reason };
        let [slice] = head.slices() else { return Err(not_head("has several slices")) };
        let range = match slice.ranges() {
            [] => 0..0,
            [range] => range.clone(),
            _ => return Err(not_head("has several parts")),
        };
        if head.in_range() != (0..hidden) {
            return Err(not_head("has other input features on a rank than a row has"));
        }
        if hidden > MAX_HIDDEN {
            return Err(not_head("has more input features than a row may have, 131072"));
        }
        let whole = [embedding.whole_vocab(), slice.whole_out_features()];
        if self.is_tied && whole[0] != whole[1] {
            return Err(not_head("is tied, but has another vocabulary"));
        }
        Ok(RowsSite {
            ids: self,
            embedding: RowsPart {
                range: embedding.range(),
                whole: whole[0],
                entry: first_entry,
                module_entry: embedding.entry(),
            },
            head: RowsPart { range, whole: whole[1], entry: first_entry + 1, module_entry: head.first_entry() },
            outputs: slice.out_features(),
            hidden,
        })
    }
}

/// The rows of an embedding and of a head on one rank.
#[derive(Clone, Debug)]
pub struct RowsSite {
    ids: Rows,
    pub(crate) embedding: RowsPart,
    pub(crate) head: RowsPart,
    outputs: usize,
    hidden: usize,
}

/// The rows of one of both.
#[derive(Clone, Debug)]
pub(crate) struct RowsPart {
    /// On this rank.
    pub(crate) range: Range<usize>,
    /// Of the unsharded module.
    pub(crate) whole: usize,
    /// Of the descriptor table.
    pub(crate) entry: usize,
    /// That of the module's factors.
    pub(crate) module_entry: usize,
}

impl RowsSite {
    /// The embedding.
    pub fn embedding(&self) -> EmbeddingId {
        self.ids.embedding
    }

    /// The head.
    pub fn head(&self) -> LinearId {
        self.ids.head
    }

    /// Whether the head has the weight of the embedding.
    pub fn is_tied(&self) -> bool {
        self.ids.is_tied
    }

    /// Descriptor-table entry of the rows of the embedding. That of the head follows.
    pub fn first_entry(&self) -> usize {
        self.embedding.entry
    }

    /// Features of a row.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Outputs of the head on this rank, with any padding.
    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }
}
