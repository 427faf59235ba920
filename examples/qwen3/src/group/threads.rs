//! The ranks of one process, each on a thread of its own.

use std::{
    mem,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use aril::group::ChannelError;

use super::Link;

pub(super) struct Threads {
    rank: usize,
    limit: Duration,
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Number of completed exchanges.
    completed: u64,
    /// The bytes of the current exchange, by rank.
    bytes: Vec<Option<Vec<u8>>>,
    /// Those of the last completed one. A rank copies them before it sends its next ones.
    last: Vec<Vec<u8>>,
    broken: Option<ChannelError>,
}

impl Threads {
    pub(super) fn group(size: usize, limit: Duration) -> Vec<Self> {
        let state = State { completed: 0, bytes: vec![None; size], last: Vec::new(), broken: None };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        (0..size).map(|rank| Self { rank, limit, shared: Arc::clone(&shared) }).collect()
    }

    /// Locks the state, which no panic leaves inconsistent.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Breaks the group, unless it is broken.
    fn fail(&self, state: &mut State, ranks: Vec<usize>, reason: String) -> ChannelError {
        self.shared.changed.notify_all();
        state.broken.get_or_insert(ChannelError { ranks, reason }).clone()
    }
}

impl Link for Threads {
    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, ChannelError> {
        let mut state = self.lock();
        if let Some(broken) = &state.broken {
            return Err(broken.clone());
        }
        let exchange = state.completed;
        state.bytes[self.rank] = Some(bytes.to_vec());
        if state.bytes.iter().all(Option::is_some) {
            state.last = state.bytes.iter_mut().filter_map(mem::take).collect();
            state.completed += 1;
            self.shared.changed.notify_all();
            return Ok(state.last.clone());
        }
        let is_open = |state: &mut State| state.completed == exchange && state.broken.is_none();
        let waited = self.shared.changed.wait_timeout_while(state, self.limit, is_open);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.completed != exchange {
            return Ok(state.last.clone());
        }
        let silent = (0..state.bytes.len()).filter(|&rank| state.bytes[rank].is_none()).collect();
        Err(self.fail(&mut state, silent, format!("no answer within {:?}", self.limit)))
    }

    fn check(&self) -> Result<(), ChannelError> {
        self.lock().broken.clone().map_or(Ok(()), Err)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let mut state = self.lock();
        self.fail(&mut state, vec![self.rank], "left the group".to_owned());
    }
}
