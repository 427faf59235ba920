//! Errors of groups.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::channel::ChannelError;
use crate::{error::LoadError, model::TpRank};

/// A failed operation of a [`Group`](super::Group).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// The ranks cannot exchange verdicts: the channel has failed or panicked, or returned what no rank says. This
    /// rank's table is unchanged, and so is that of each rank which returns an error from
    /// [`prepare`](super::Group::prepare). The group cannot be used again: make one with a new channel.
    #[error("the ranks of the group are not connected: {0}")]
    Channel(ChannelError),
    /// The ranks called different operations, gave different slots or fingerprints, or have read different adapters for
    /// one. This rank's slots are unchanged.
    #[error("the ranks disagree: {}", List(.ranks))]
    Disagreement {
        /// What each rank does, by rank.
        ranks: Vec<String>,
    },
    /// No slot is empty on all ranks.
    #[error("no slot is empty on all ranks of the group")]
    NoFreeSlot,
    /// The channel is of another rank than the table's model.
    #[error(
        "the channel is of rank {} of {}, but the table's model is of rank {} of {}",
        .channel.rank(), .channel.size(), .table.rank(), .table.size()
    )]
    OtherRank {
        /// Rank of the channel.
        channel: TpRank,
        /// Rank of the table's model.
        table: TpRank,
    },
    /// Some ranks cannot load the adapter. The tables of all ranks are unchanged.
    #[error("no rank of the group loaded the adapter: {}", List(.failures))]
    Refused {
        /// The failures of all ranks, by rank.
        failures: Vec<RankFailure>,
        /// The error of this rank, if it is one of them.
        own: Option<Box<LoadError>>,
    },
    /// Some ranks did not commit what all ranks had prepared, or did not answer. So that no two ranks compute with
    /// different adapters, each rank with this error has emptied the slot. The previous adapter is lost.
    ///
    /// After all ranks are prepared, this can fail: the CUDA driver, which then fails every later call, too; a commit
    /// to a stream that is being captured; a rank that dies, calls another operation, or commits another adapter or to
    /// another slot; the channel.
    #[error("{}", torn(*.slot, .failures, .channel.as_ref(), .not_emptied.as_deref()))]
    Torn {
        /// Index of the slot.
        slot: usize,
        /// The failures of all ranks; if the channel failed, of this one.
        failures: Vec<RankFailure>,
        /// The failure of the channel.
        channel: Option<ChannelError>,
        /// Why this rank could not empty the slot. It must not be used.
        not_emptied: Option<Box<LoadError>>,
    },
}

impl From<ChannelError> for GroupError {
    fn from(error: ChannelError) -> Self {
        Self::Channel(error)
    }
}

impl GroupError {
    /// Whether the adapter may be loaded when others are released.
    pub fn is_full(&self) -> bool {
        match self {
            Self::NoFreeSlot => true,
            Self::Refused { failures, .. } => failures.iter().all(|failure| failure.is_full),
            _ => false,
        }
    }
}

fn torn(
    slot: usize,
    failures: &[RankFailure],
    channel: Option<&ChannelError>,
    not_emptied: Option<&LoadError>,
) -> String {
    let mut reasons: Vec<_> = failures.iter().map(ToString::to_string).collect();
    reasons.extend(channel.map(|error| format!("the ranks are not connected: {error}")));
    let state = match not_emptied {
        None => "is now empty".to_owned(),
        Some(error) => format!("must not be used, because it cannot be emptied ({error})"),
    };
    format!("not all ranks of the group committed the adapter to slot {slot}, which {state}: {}", List(&reasons))
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
    /// Whether its arena had no room, but would have without the adapters that are loaded.
    pub is_full: bool,
}

/// A part of loading an adapter.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub enum Phase {
    /// Opening the adapter and planning its image for the rank.
    Plan,
    /// Reserving memory.
    Reserve,
    /// Converting weights and copying them.
    Fill,
    /// Putting the adapter into the slot.
    Commit,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plan => "plan",
            Self::Reserve => "reserve",
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
