//! The engine's channel between ranks, and that of the threads of one process.

use std::{
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::model::TpRank;

/// The channel between the ranks of a group, as one rank sees it.
///
/// An implementation on sockets sends the bytes; one on a collective library copies them to a buffer, and gathers
/// [`Message::BYTES`] bytes of each rank.
pub trait Ranks {
    /// This rank.
    fn tp(&self) -> TpRank;

    /// Sends a message to all ranks and returns the messages of all ranks, by rank, this one's among them. Blocks until
    /// they have arrived. The n-th calls of all ranks belong together.
    ///
    /// Another rank may be reading an adapter's files before it calls. A time limit must allow for that.
    ///
    /// A panic is caught, and ends the group as an error does. So does a message of this rank that is not the one
    /// given, or one that no rank sends. What other ranks are made to say decides no memory of this rank.
    ///
    /// # Errors
    /// [`ChannelError`] if a rank does not answer. The channel is then not used again. Other ranks of the same call
    /// should also get an error; those that do not will get one from the next call.
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

/// The channel between the ranks of one process, each on a thread of its own.
///
/// Either all ranks of an exchange get all messages, or all get the same error. If a rank is dropped, the others get an
/// error at once. If it neither calls nor is dropped, they get one after the time limit. The channel is broken after an
/// error.
///
/// With another `M` it carries an engine's own values.
#[derive(Debug)]
pub struct InProcess<M = Message> {
    tp: TpRank,
    time_limit: Duration,
    shared: Arc<Shared<M>>,
}

#[derive(Debug)]
struct Shared<M> {
    state: Mutex<State<M>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<M> {
    /// Number of completed exchanges.
    completed: u64,
    /// Messages of the current exchange, by rank.
    messages: Vec<Option<M>>,
    /// Messages of the last completed exchange. A rank reads them before it sends its next one, so none is overwritten
    /// unread.
    last: Vec<M>,
    broken: Option<ChannelError>,
}

impl InProcess {
    /// The most ranks of a group. Each has a thread.
    pub const MAX_RANKS: usize = 1024;
}

impl<M: Clone> InProcess<M> {
    /// The channels of `size` ranks, by rank. In an exchange, a rank waits for the others up to `time_limit`, while
    /// they may open and fill an adapter.
    ///
    /// # Panics
    /// If `size` is above [`MAX_RANKS`](InProcess::MAX_RANKS).
    pub fn group(size: usize, time_limit: Duration) -> Vec<Self> {
        let most = InProcess::<Message>::MAX_RANKS;
        assert!(size <= most, "a group of one process has up to {most} ranks, not {size}");
        let state = State { completed: 0, messages: vec![None; size], last: Vec::new(), broken: None };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let ranks = (0..size).filter_map(|rank| TpRank::new(rank, size).ok());
        ranks.map(|tp| Self { tp, time_limit, shared: Arc::clone(&shared) }).collect()
    }

    /// Sends a message to every rank, and returns those of all ranks, by rank: [`Ranks::all_gather`].
    ///
    /// # Errors
    /// If a rank does not send in time, or has ended.
    pub fn gather(&self, message: M) -> Result<Vec<M>, ChannelError> {
        let mut state = self.lock();
        if let Some(broken) = &state.broken {
            return Err(broken.clone());
        }
        let exchange = state.completed;
        state.messages[self.tp.rank()] = Some(message);
        if state.messages.iter().all(Option::is_some) {
            state.last = state.messages.iter_mut().filter_map(Option::take).collect();
            state.completed += 1;
            self.shared.changed.notify_all();
            return Ok(state.last.clone());
        }
        let is_open = |state: &mut State<M>| state.completed == exchange && state.broken.is_none();
        let waited = self.shared.changed.wait_timeout_while(state, self.time_limit, is_open);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.completed != exchange {
            return Ok(state.last.clone());
        }
        if let Some(broken) = &state.broken {
            return Err(broken.clone());
        }
        let silent = state.messages.iter().enumerate().filter(|(_, message)| message.is_none());
        let silent = silent.map(|(rank, _)| rank).collect();
        let reason = format!("no answer within {:?}", self.time_limit);
        Err(self.fail(&mut state, silent, reason))
    }

    /// Fails if the channel is broken.
    ///
    /// # Errors
    /// The one that broke it.
    pub fn check(&self) -> Result<(), ChannelError> {
        self.lock().broken.clone().map_or(Ok(()), Err)
    }
}

impl<M> InProcess<M> {
    /// Locks the state. A message's `Clone` may panic under the lock, which leaves the state as it was.
    fn lock(&self) -> MutexGuard<'_, State<M>> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, state: &mut State<M>, ranks: Vec<usize>, reason: String) -> ChannelError {
        self.shared.changed.notify_all();
        state.broken.insert(ChannelError { ranks, reason }).clone()
    }
}

impl Ranks for InProcess {
    fn tp(&self) -> TpRank {
        self.tp
    }

    fn all_gather(&mut self, message: &Message) -> Result<Vec<Message>, ChannelError> {
        self.gather(*message)
    }
}

impl<M> Drop for InProcess<M> {
    fn drop(&mut self) {
        let mut state = self.lock();
        if state.broken.is_none() {
            self.fail(&mut state, vec![self.tp.rank()], "left the group".to_owned());
        }
    }
}
