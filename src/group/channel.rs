use std::fmt;

use crate::model::TpRank;

/// The channel between the ranks of a group, as one rank sees it.
///
/// An implementation on sockets sends the bytes; one on a collective library copies them to a buffer, and gathers [`Message::BYTES`]
/// bytes of each rank.
pub trait Ranks {
    /// This rank.
    fn tp(&self) -> TpRank;

    /// Sends a message to all ranks and returns the messages of all ranks, by rank, this one's among them. Blocks until they have
    /// arrived. The n-th calls of all ranks belong together.
    ///
    /// Another rank may be reading an adapter's files before it calls. A time limit must allow for that.
    ///
    /// # Errors
    /// [`ChannelError`] if a rank does not answer. The channel is then not used again. Other ranks of the same call should also get an
    /// error; those that do not will get one from the next call.
    fn all_gather(&mut self, message: &Message) -> Result<Vec<Message>, ChannelError>;
}

/// What one rank tells the others: bytes of a fixed number, whose meaning is private to this module.
#[derive(Clone, Copy, Eq, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct Message([u8; Message::BYTES]);

impl Message {
    /// Size of a message.
    pub const BYTES: usize = 4096;

    /// The message of these bytes, from [`as_bytes`](Self::as_bytes) on another rank.
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// The bytes to send.
    pub const fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.0.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
        write!(f, "Message({:?})", String::from_utf8_lossy(&self.0[..end]))
    }
}

/// Ranks that did not answer.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{}: {reason}", Numbers(.ranks))]
pub struct ChannelError {
    /// The ranks, ascending. Empty if the channel itself failed.
    pub ranks: Vec<usize>,
    /// Why they did not answer.
    pub reason: String,
}

/// Displays the numbers of ranks.
struct Numbers<'a>(&'a [usize]);

impl fmt::Display for Numbers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => f.write_str("the channel"),
            [one] => write!(f, "rank {one}"),
            [first, rest @ ..] => {
                write!(f, "ranks {first}")?;
                rest.iter().try_for_each(|rank| write!(f, ", {rank}"))
            }
        }
    }
}
