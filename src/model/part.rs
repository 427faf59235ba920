//! Output features of a module that are sharded alike.

use super::{
    cut::{Parallel, Rows, TpRank, check_padding, check_size, cut, cut_padded},
    error::SpecError,
};

/// Consecutive output features of one module that tensor parallelism splits by one rule. [`Linear::merged`](super::Linear::merged)
/// takes several.
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
