/// What a workspace must hold, in bytes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct WorkspaceBytes {
    /// For what the blocks of one launch hand over to each other, each sum with a tag that says of which launch it is. It must be
    /// zero when it is first used, and nothing but the kernels may write it.
    pub mailbox: usize,
    /// For what one launch leaves for the next.
    pub partials: usize,
}

impl WorkspaceBytes {
    /// Enough for both.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self { mailbox: self.mailbox.max(other.mailbox), partials: self.partials.max(other.partials) }
    }
}
