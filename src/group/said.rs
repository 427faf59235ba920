//! What the ranks of a group tell each other, and its bytes: JSON, padded with zeros.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
};

use serde::{Deserialize, Serialize};

use super::{
    channel::{ChannelError, Message, Ranks},
    error::Phase,
};
use crate::{error::panic_message, model::TpRank};

/// Characters of a reason. Each takes up to 6 bytes in JSON.
const MAX_REASON: usize = 299;
const _: () = assert!((MAX_REASON + 1) * 6 + 600 <= Message::BYTES);

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

/// A reason, of which a long one is cut off.
pub(super) fn reason(text: &str) -> String {
    let mut reason: String = text.chars().take(MAX_REASON + 1).collect();
    if let Some((cut, _)) = reason.char_indices().nth(MAX_REASON) {
        reason.truncate(cut);
        reason.push('…');
    }
    reason
}

/// What all ranks say, by rank. What this one says is among it as it was said, or the channel has failed. So has one
/// that panics.
pub(super) fn exchange(ranks: &mut impl Ranks, tp: TpRank, said: &Said) -> Result<Vec<Said>, ChannelError> {
    let own = to_message(said);
    // After a panic, the channel is not used again.
    let gathered = catch_unwind(AssertUnwindSafe(|| ranks.all_gather(&own))).unwrap_or_else(|payload| {
        Err(ChannelError { ranks: Vec::new(), reason: format!("it panicked: {}", panic_message(payload)) })
    })?;
    let is_as_sent = |rank: usize, message: &Message| rank != tp.rank() || *message == own;
    let said = (0..tp.size()).map(|rank| {
        let message = gathered.get(rank).filter(|message| is_as_sent(rank, message));
        message.and_then(from_message).ok_or(rank)
    });
    let (said, unread): (Vec<_>, Vec<_>) = said.partition(Result::is_ok);
    if unread.is_empty() && gathered.len() == tp.size() {
        return Ok(said.into_iter().flatten().collect());
    }
    let reason = format!("{} messages arrived, which are not what {} ranks say", gathered.len(), tp.size());
    Err(ChannelError { ranks: unread.into_iter().filter_map(Result::err).collect(), reason })
}

fn to_message(said: &Said) -> Message {
    let json = serde_json::to_vec(said).expect("numbers and strings have a JSON form");
    let mut bytes = [0; Message::BYTES];
    bytes[..json.len()].copy_from_slice(&json);
    Message::from_bytes(bytes)
}

/// What a message of another rank says, or `None` if it says nothing of this kind.
fn from_message(message: &Message) -> Option<Said> {
    let bytes = message.as_bytes();
    let end = bytes.iter().rposition(|&byte| byte != 0)? + 1;
    serde_json::from_slice(&bytes[..end]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(text: &str) -> Said {
        Said { calls: u64::MAX, on: On::Copy, answer: Answer::Failed { reason: reason(text) } }
    }

    #[test]
    fn bytes_of_nobody_say_nothing() {
        for bytes in [[0; Message::BYTES], [b'x'; Message::BYTES], [0xff; Message::BYTES]] {
            assert!(from_message(&Message::from_bytes(bytes)).is_none());
        }
    }

    /// Whatever its characters take in JSON.
    #[test]
    fn long_reasons_are_cut_off() {
        for text in ["x", "ä", "\u{0}", "\u{1}", "\"", "🦀", "x\u{1}ä"] {
            for times in [0, 1, 99, 100, 101, 299, 300, 301, 10_000] {
                let whole: String = text.chars().cycle().take(times).collect();
                let received = from_message(&to_message(&failed(&whole))).map(|said| said.answer);
                let Some(Answer::Failed { reason }) = received else { unreachable!() };
                let expected = if times < 300 { whole } else { whole.chars().take(299).chain(['…']).collect() };
                assert_eq!(reason, expected);
            }
        }
    }
}
