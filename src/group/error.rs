//! Errors of groups.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::channel::ChannelError;
use crate::{error::LoadError, model::TpRank};

/// A failed operation of a [`GroupPool`](super::GroupPool).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// The channel has failed or panicked, or returned what no rank says. The group cannot be used again: make one with
    /// a new channel.
    #[error("the ranks of the group are not connected: {0}")]
    Channel(ChannelError),
    /// The ranks made different calls, or have read different adapters for one. This rank's slots are unchanged.
    #[error("the ranks disagree: {}", List(.ranks))]
    Disagreement {
        /// What each rank does, by rank.
        ranks: Vec<String>,
    },
    /// The channel is of another rank than the pool's model.
    #[error(
        "the channel is of rank {} of {}, but the pool's model is of rank {} of {}",
        .channel.rank(), .channel.size(), .table.rank(), .table.size()
    )]
    OtherRank {
        /// Rank of the channel.
        channel: TpRank,
        /// Rank of the pool's model.
        table: TpRank,
    },
    /// Some ranks cannot load the adapter. The slots of all ranks are unchanged.
    #[error("no rank of the group loaded the adapter: {}", List(.failures))]
    Refused {
        /// The failures of all ranks, by rank.
        failures: Vec<RankFailure>,
        /// The error of this rank, if it is one of them.
        own: Option<Box<LoadError>>,
    },
}

impl From<ChannelError> for GroupError {
    fn from(error: ChannelError) -> Self {
        Self::Channel(error)
    }
}

/// The failure of one rank.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct RankFailure {
    /// The rank.
    pub rank: usize,
    /// What it could not do.
    pub phase: Phase,
    /// The message of its error, of at most 300 characters.
    pub reason: String,
}

/// A part of loading an adapter.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub enum Phase {
    /// Opening the adapter and planning its image for the rank.
    Plan,
    /// Converting weights and copying them.
    Fill,
    /// Putting the adapter into the slot.
    Commit,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plan => "plan",
            Self::Fill => "fill",
            Self::Commit => "commit",
        })
    }
}

impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, phase, reason, .. } = self;
        write!(f, "rank {rank} could not {phase}: {reason}")
    }
}

/// Displays items, separated by semicolons.
struct List<'a, T>(&'a [T]);

impl<T: fmt::Display> fmt::Display for List<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, item) in self.0.iter().enumerate() {
            write!(f, "{}{item}", if i == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}
