//! Partitions a dimension over the ranks of a tensor-parallel group.

use std::ops::Range;

use super::error::SpecError;

/// The rank of this process in its tensor-parallel group.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TpRank {
    pub(super) rank: usize,
    pub(super) size: usize,
}

impl TpRank {
    /// A group of one: the whole model on one device.
    pub const SINGLE: Self = Self { rank: 0, size: 1 };

    /// Rank `rank` of `size` ranks.
    ///
    /// # Errors
    /// [`SpecError::TpRank`] if `rank >= size`.
    pub fn new(rank: usize, size: usize) -> Result<Self, SpecError> {
        if rank < size { Ok(Self { rank, size }) } else { Err(SpecError::TpRank { rank, size }) }
    }

    /// The rank, counted from 0.
    pub const fn rank(self) -> usize {
        self.rank
    }

    /// The number of ranks in the group.
    pub const fn size(self) -> usize {
        self.size
    }
}

/// How tensor parallelism shards a linear layer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Parallel {
    /// Each rank holds a range of the output features: qkv, gate-up, `lm_head`.
    Column,
    /// Each rank holds the whole layer.
    Replicated,
    /// Each rank holds a range of the input features and computes a partial sum: o, down.
    Row,
}

/// The range `start..start + len` of a dimension of length `whole`, held by one rank.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Cut {
    pub(crate) whole: usize,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl Cut {
    pub(super) fn all(whole: usize) -> Self {
        Self { whole, start: 0, len: whole }
    }

    fn shard(whole: usize, index: usize, shards: usize) -> Self {
        let len = whole / shards;
        Self { whole, start: index * len, len }
    }

    pub(crate) fn range(self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// Rows of a matrix with `whole` rows that one rank holds: these ranges, one after the other, and rows of zeros up to `len`.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Rows {
    pub(crate) whole: usize,
    /// Ascending and not adjacent.
    pub(crate) ranges: Vec<Range<usize>>,
    pub(crate) len: usize,
}

impl Rows {
    /// Appends the rows of another matrix below this one.
    pub(super) fn append(&mut self, below: Self) {
        for range in below.ranges {
            let range = self.whole + range.start..self.whole + range.end;
            match self.ranges.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => self.ranges.push(range),
            }
        }
        self.whole += below.whole;
        self.len += below.len;
    }
}

impl From<Cut> for Rows {
    fn from(cut: Cut) -> Self {
        Self { whole: cut.whole, ranges: Vec::from_iter((cut.len > 0).then(|| cut.range())), len: cut.len }
    }
}

/// Rejects zero features and more than `i32::MAX`.
pub(super) fn check_size(path: &str, features: usize) -> Result<(), SpecError> {
    if features == 0 || i32::try_from(features).is_err() {
        return Err(SpecError::Features { path: path.to_owned(), features });
    }
    Ok(())
}

/// The range of `whole` that this rank holds when the dimension is split into `shards` equal parts. With fewer shards than ranks,
/// consecutive ranks hold the same shard.
pub(super) fn cut(TpRank { rank, size }: TpRank, path: &str, whole: usize, shards: usize) -> Result<Cut, SpecError> {
    if shards == 1 {
        return Ok(Cut::all(whole));
    }
    if shards == 0 || !whole.is_multiple_of(shards) || !size.is_multiple_of(shards) {
        return Err(SpecError::Uneven { path: path.to_owned(), features: whole, shards, size });
    }
    Ok(Cut::shard(whole, rank / (size / shards), shards))
}

/// Rejects a padded vocabulary that is smaller than the vocabulary, or too large.
pub(super) fn check_padding(path: &str, vocab: usize, padded: usize) -> Result<(), SpecError> {
    check_size(path, padded)?;
    if padded < vocab { Err(SpecError::Padding { module: path.to_owned(), vocab, padded }) } else { Ok(()) }
}

/// The range of `whole` that this rank holds when the dimension is padded to `padded` and then split evenly, without padding.
pub(super) fn cut_padded(tp: TpRank, path: &str, whole: usize, padded: usize) -> Result<Cut, SpecError> {
    let Cut { start, len, .. } = cut(tp, path, padded, tp.size)?;
    let start = start.min(whole);
    Ok(Cut { whole, start, len: len.min(whole - start) })
}
