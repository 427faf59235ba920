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

/// Rows of a matrix with `whole` rows that one rank holds: these ranges, one after the other, and rows of zeros up to
/// `len`.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Rows {
    pub(crate) whole: usize,
    /// Ascending and not adjacent.
    pub(crate) ranges: Vec<Range<usize>>,
    pub(crate) len: usize,
}

impl Rows {
    /// All of so many rows.
    pub(crate) fn whole(rows: usize) -> Self {
        Self { whole: rows, ranges: std::iter::once(0..rows).collect(), len: rows }
    }

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

/// The range of `whole` that this rank holds when the dimension is split into `shards` equal parts. With fewer shards
/// than ranks, consecutive ranks hold the same shard.
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

/// The range of `whole` that this rank holds when the dimension is padded to `padded` and then split evenly, without
/// padding.
pub(super) fn cut_padded(tp: TpRank, path: &str, whole: usize, padded: usize) -> Result<Cut, SpecError> {
    let Cut { start, len, .. } = cut(tp, path, padded, tp.size)?;
    let start = start.min(whole);
    Ok(Cut { whole, start, len: len.min(whole - start) })
}

/// Consecutive output features of one module that tensor parallelism splits by one rule.
/// [`Linear::merged`](super::Linear::merged) takes several.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Part {
    features: usize,
    split: Split,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Split {
    /// In equal ranges.
    Even,
    /// In whole heads. With fewer heads than ranks, if `replicated`, consecutive ranks hold the same head.
    Heads { heads: usize, replicated: bool },
    /// Every rank holds all features.
    Replicated,
    /// In equal ranges of `padded` features, of which the module has the first ones.
    Padded { padded: usize },
}

impl Part {
    /// Features that are split into equal ranges.
    pub const fn even(features: usize) -> Self {
        Self { features, split: Split::Even }
    }

    /// `num_heads` heads of `head_dim` features each. Each rank holds whole heads.
    pub const fn heads(num_heads: usize, head_dim: usize) -> Self {
        Self::of_heads(num_heads, head_dim, false)
    }

    /// Key-value heads. With fewer heads than ranks, consecutive ranks hold the same head.
    pub const fn kv_heads(num_heads: usize, head_dim: usize) -> Self {
        Self::of_heads(num_heads, head_dim, true)
    }

    /// Features that every rank holds.
    pub const fn replicated(features: usize) -> Self {
        Self { features, split: Split::Replicated }
    }

    /// The rows of a vocabulary, which engines pad to `padded` rows.
    pub(super) const fn padded(features: usize, padded: usize) -> Self {
        Self { features, split: Split::Padded { padded } }
    }

    const fn of_heads(heads: usize, head_dim: usize, replicated: bool) -> Self {
        Self { features: heads.saturating_mul(head_dim), split: Split::Heads { heads, replicated } }
    }

    /// Checks everything that does not depend on the rank.
    fn check(self, parallel: Parallel, module: &str) -> Result<(), SpecError> {
        if self.split != Split::Even && parallel != Parallel::Column {
            return Err(SpecError::NotColumn { module: module.to_owned() });
        }
        check_size(module, self.features)?;
        if let Split::Padded { padded } = self.split { check_padding(module, self.features, padded) } else { Ok(()) }
    }

    /// Checks the parts of a module.
    pub(super) fn check_all(parts: &[Self], parallel: Parallel, module: &str) -> Result<(), SpecError> {
        parts.iter().try_for_each(|part| part.check(parallel, module))?;
        check_size(module, parts.iter().fold(0, |sum, part| sum.saturating_add(part.features)))
    }

    /// The rows of a module of these parts that a rank holds.
    pub(super) fn rows(parts: &[Self], parallel: Parallel, tp: TpRank, module: &str) -> Result<Rows, SpecError> {
        let mut rows = Rows::default();
        for part in parts {
            let part = match (parallel, part.split) {
                (Parallel::Row | Parallel::Replicated, _) | (_, Split::Replicated) => {
                    cut(tp, module, part.features, 1)?.into()
                }
                (_, Split::Even) => cut(tp, module, part.features, tp.size)?.into(),
                (_, Split::Heads { heads, replicated }) => {
                    let shards = if heads.is_multiple_of(tp.size) {
                        tp.size
                    } else if replicated && tp.size.is_multiple_of(heads) {
                        heads
                    } else {
                        return Err(SpecError::Heads { module: module.to_owned(), heads, size: tp.size });
                    };
                    cut(tp, module, part.features, shards)?.into()
                }
                (_, Split::Padded { padded }) => {
                    Rows { len: padded / tp.size, ..cut_padded(tp, module, part.features, padded)?.into() }
                }
            };
            rows.append(part);
        }
        Ok(rows)
    }
}
