use super::thresholds::{MAILBOX_HEADER, WORD_BYTES};
use crate::extent::product;

/// Sizes of a workspace, in bytes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct WorkspaceBytes {
    /// Mailboxes between the blocks of one launch: partial sums of `A x`, each tagged with its launch. The memory must be zero
    /// before its first use, and only the kernels may write it.
    pub mailbox: usize,
    /// Partial sums of `A x` that one launch leaves for the next. The memory may hold anything.
    pub partials: usize,
}

impl WorkspaceBytes {
    /// Size of a mailbox for this many sums.
    pub(super) const fn mailbox_of(sums: usize) -> usize {
        product(&[sums, WORD_BYTES]).saturating_add(MAILBOX_HEADER)
    }

    /// The larger of both, for each of the two sizes.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self { mailbox: self.mailbox.max(other.mailbox), partials: self.partials.max(other.partials) }
    }
}
