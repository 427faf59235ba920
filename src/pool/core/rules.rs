//! The rules for overwriting memory. Tests break each of them to show that its violation is seen.

/// A rule for overwriting memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Rule {
    /// A leased slot is not overwritten.
    Leases,
    /// Launches may follow the end of a lease until the next end of a step.
    EndStep,
    /// So they may on every stream that the slot was leased for.
    EveryStream,
    /// A block is not overwritten while it is being copied to.
    Copying,
    /// Steps may not use a slot after the end of a step that follows the last lease of their stream.
    Close,
    /// A host block is not overwritten while it is being copied from.
    Source,
    /// An adapter that is being read has no slot for leases, even if parts of it have been copied.
    Whole,
    /// A read whose copy has been enqueued as a whole keeps its room on the device.
    Revoke,
}

/// The rules that hold: all of them, except in tests.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rules {
    #[cfg(test)]
    pub(crate) broken: Option<Rule>,
}

impl Rules {
    #[cfg(test)]
    pub(super) fn holds(self, rule: Rule) -> bool {
        self.broken != Some(rule)
    }

    #[cfg(not(test))]
    pub(super) const fn holds(self, _rule: Rule) -> bool {
        true
    }
}
