//! What the ranks of a pool's group tell each other.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::error::Phase;

/// What a rank tells the others.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Said {
    /// A digest of all calls of the rank.
    pub(super) calls: u64,
    pub(super) on: On,
    pub(super) answer: Answer,
}

/// What the ranks agree on.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) enum On {
    Limits {
        slots: usize,
        streams: usize,
    },
    Size,
    Read,
    /// Of so many reads, and of the copies after the first so many.
    Ends {
        reads: usize,
        copied: u64,
    },
    Copy,
    Point,
    Evict,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum Answer {
    Yes,
    No,
    Failed {
        reason: String,
    },
    Limits {
        arena_bytes: usize,
        host_bytes: usize,
        max_reads: usize,
    },
    Size {
        bytes: usize,
    },
    Ends {
        reads: Vec<End>,
        /// Copies, since the pool was made.
        copied: u64,
        /// Why the first of the reads that failed did.
        reason: String,
    },
}

/// How far a rank has come with a read.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) enum End {
    UnderWay,
    /// With the fingerprint of what was read.
    Whole(u64),
    Failed,
    /// It has failed all the same, and nothing of its copy is on its way on this rank.
    Clear(u64),
}

impl On {
    /// What a rank could not do that has failed.
    pub(super) fn phase(self) -> Phase {
        match self {
            Self::Copy => Phase::Fill,
            Self::Point => Phase::Commit,
            _ => Phase::Plan,
        }
    }

    /// Whether a rank may answer this.
    pub(super) fn may_be(self, answer: &Answer) -> bool {
        match (self, answer) {
            (Self::Limits { .. }, Answer::Limits { max_reads, .. }) => *max_reads > 0,
            (Self::Size, Answer::Size { .. } | Answer::Failed { .. })
            | (Self::Copy | Self::Point, Answer::Yes | Answer::Failed { .. })
            | (Self::Read | Self::Evict, Answer::Yes | Answer::No) => true,
            (Self::Ends { reads, copied }, Answer::Ends { reads: ends, copied: other, .. }) => {
                ends.len() == reads && *other >= copied
            }
            _ => false,
        }
    }
}

impl Answer {
    pub(super) fn is_yes(&self) -> bool {
        matches!(self, Self::Yes)
    }

    pub(super) fn ends(&self) -> &[End] {
        if let Self::Ends { reads, .. } = self { reads } else { &[] }
    }
}

impl End {
    /// The fingerprint of what was read, if that has ended well.
    pub(super) fn fingerprint(self) -> Option<u64> {
        if let Self::Whole(fingerprint) | Self::Clear(fingerprint) = self { Some(fingerprint) } else { None }
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.on {
            On::Limits { slots, streams } => {
                return write!(f, "makes a pool of {slots} slots and {streams} streams");
            }
            On::Size => "registers an adapter",
            On::Read => "starts a read",
            On::Ends { .. } => "asks what has ended",
            On::Copy => "copies an adapter",
            On::Point => "leases a slot",
            On::Evict => "empties a slot",
        };
        write!(f, "{what} after the calls {:016x}", self.calls)
    }
}
