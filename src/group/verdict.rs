//! What the ranks tell each other, and its bytes: JSON, padded with zeros.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{
    channel::{ChannelError, Message, Ranks},
    error::Phase,
};
use crate::{error::panic_message, model::TpRank};

/// Characters of a reason. Each takes up to 6 bytes in JSON.
const MAX_REASON: usize = 299;
const _: () = assert!((MAX_REASON + 1) * 6 + 600 <= Message::BYTES);

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) enum Verdict {
    /// The lowest empty slot from some slot on.
    Free(Option<usize>),
    /// The adapter is ready to be committed.
    Ready {
        slot: usize,
        fingerprint: u64,
    },
    /// The adapter is in the slot.
    Committed {
        slot: usize,
        fingerprint: u64,
    },
    Failed {
        phase: Phase,
        reason: String,
        is_full: bool,
    },
}

impl Verdict {
    /// A failure. A long reason is cut off.
    pub(super) fn failed(phase: Phase, text: &str, is_full: bool) -> Self {
        Self::Failed { phase, reason: reason(text), is_full }
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
pub(super) fn exchange<T: DeserializeOwned>(
    ranks: &mut impl Ranks,
    tp: TpRank,
    said: &impl Serialize,
) -> Result<Vec<T>, ChannelError> {
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

fn to_message(said: &impl Serialize) -> Message {
    let json = serde_json::to_vec(said).expect("numbers and strings have a JSON form");
    let mut bytes = [0; Message::BYTES];
    bytes[..json.len()].copy_from_slice(&json);
    Message::from_bytes(bytes)
}

/// What a message of another rank says, or `None` if it says nothing of this kind.
fn from_message<T: DeserializeOwned>(message: &Message) -> Option<T> {
    let bytes = message.as_bytes();
    let end = bytes.iter().rposition(|&byte| byte != 0)? + 1;
    serde_json::from_slice(&bytes[..end]).ok()
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Free(_) => f.write_str("chooses a slot"),
            Self::Ready { slot, fingerprint } => {
                write!(f, "loads the adapter with fingerprint {fingerprint} into slot {slot}")
            }
            Self::Committed { slot, fingerprint } => {
                write!(f, "has committed the adapter with fingerprint {fingerprint} to slot {slot}")
            }
            Self::Failed { phase, reason, .. } => write!(f, "could not {phase}: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_verdicts() {
        for verdict in [
            Verdict::Free(None),
            Verdict::Free(Some(usize::MAX)),
            Verdict::Ready { slot: usize::MAX, fingerprint: u64::MAX },
            Verdict::Ready { slot: 0, fingerprint: 0 },
            Verdict::Committed { slot: usize::MAX, fingerprint: u64::MAX },
            Verdict::failed(Phase::Fill, "", false),
            Verdict::failed(Phase::Reserve, "\"ä\" \u{0}\n", true),
        ] {
            assert_eq!(from_message(&to_message(&verdict)), Some(verdict));
        }
        for bytes in [[0; Message::BYTES], [b'x'; Message::BYTES], [0xff; Message::BYTES]] {
            assert_eq!(from_message::<Verdict>(&Message::from_bytes(bytes)), None);
        }
    }

    /// Whatever its characters take in JSON.
    #[test]
    fn long_reasons_are_cut_off() {
        for text in ["x", "ä", "\u{1}", "\"", "🦀", "x\u{1}ä"] {
            for times in [99, 100, 101, 299, 300, 301, 10_000] {
                let whole: String = text.chars().cycle().take(times).collect();
                let verdict = Verdict::failed(Phase::Reserve, &whole, false);
                let received = from_message(&to_message(&verdict));
                assert_eq!(received.as_ref(), Some(&verdict));
                let Some(Verdict::Failed { phase: Phase::Reserve, reason, is_full: false }) = received else {
                    unreachable!()
                };
                let expected = if times < 300 { whole } else { whole.chars().take(299).chain(['…']).collect() };
                assert_eq!(reason, expected);
            }
        }
    }
}
