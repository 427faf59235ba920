//! Whose long body is read next.
//!
//! Few are read at the same time, and no client has all turns. Each client is charged for the bytes of its bodies: the
//! next turn is that of the body which its client would begin first if all clients' bodies were read at the same speed,
//! beside each other (start-time fair queueing).

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::oneshot;

/// Who sends bodies.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) enum Client {
    /// Whoever has this key.
    Key(String),
    Address(IpAddr),
}

/// The turns.
#[derive(Debug)]
pub(super) struct Turns {
    /// The most turns of a client.
    of_client: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    free: usize,
    /// The place, in bytes, of the body that has begun last.
    now: u64,
    clients: HashMap<Client, Charged>,
    /// By place, and by order of arrival.
    waiting: BTreeMap<Place, (Client, oneshot::Sender<()>)>,
    arrived: u64,
}

type Place = (u64, u64);

#[derive(Debug, Default)]
struct Charged {
    /// Turns that it has.
    turns: usize,
    /// Where its next body begins.
    end: u64,
}

/// A turn, or the wait for one. Dropping it gives it up.
#[derive(Debug)]
pub(super) struct Turn {
    turns: Arc<Turns>,
    client: Client,
    place: Place,
}

impl Turns {
    /// At least two turns, one of which is always another client's.
    pub(super) fn new(count: usize) -> Self {
        let state = State { free: count, now: 0, clients: HashMap::new(), waiting: BTreeMap::new(), arrived: 0 };
        Self { of_client: count - 1, state: Mutex::new(state) }
    }

    /// Waits for a turn to read so many bytes of a client.
    pub(super) async fn take(self: &Arc<Self>, client: Client, bytes: usize) -> Turn {
        let (begin, begins) = oneshot::channel();
        let turn = {
            let mut state = self.state();
            state.arrived += 1;
            let (now, arrived) = (state.now, state.arrived);
            let charged = state.clients.entry(client.clone()).or_default();
            let place = (charged.end.max(now), arrived);
            charged.end = place.0.saturating_add(bytes as u64);
            state.waiting.insert(place, (client.clone(), begin));
            state.begin(self.of_client);
            Turn { turns: Arc::clone(self), client, place }
        };
        // Only `turn` takes the sender away without a word.
        let _ = begins.await;
        turn
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // It is whole between its calls.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Begins as many bodies as there are turns.
    fn begin(&mut self, of_client: usize) {
        while self.free > 0 {
            let has_turn = |client| self.clients.get(client).is_none_or(|charged| charged.turns < of_client);
            let Some(next) = self.waiting.iter().find(|(_, (client, _))| has_turn(client)).map(|(place, _)| *place)
            else {
                break;
            };
            let Some((client, begin)) = self.waiting.remove(&next) else { break };
            self.now = self.now.max(next.0);
            self.free -= 1;
            self.clients.entry(client).or_default().turns += 1;
            // Without a receiver, its turn is being given up.
            let _ = begin.send(());
        }
        let now = self.now;
        self.clients.retain(|_, charged| charged.turns > 0 || charged.end > now);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.turns.state();
        if state.waiting.remove(&self.place).is_none() {
            state.free += 1;
            if let Some(charged) = state.clients.get_mut(&self.client) {
                charged.turns -= 1;
            }
            if state.waiting.is_empty() {
                // Nobody has been kept waiting.
                state.now = state.clients.values().map(|charged| charged.end).max().unwrap_or(0).max(state.now);
            }
        }
        state.begin(self.turns.of_client);
    }
}

#[cfg(test)]
mod tests {
    use std::{future::Future, pin::Pin, task::Poll};

    use super::*;

    fn client(number: u8) -> Client {
        Client::Address([127, 0, 0, number].into())
    }

    /// Polls once.
    fn now<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
        match future.poll(&mut std::task::Context::from_waker(std::task::Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_client_never_has_all_turns() {
        let turns = Arc::new(Turns::new(3));
        let mut many: Vec<_> = (0..5).map(|_| Box::pin(turns.take(client(1), 1000))).collect();
        let mut begun: Vec<_> = many.iter_mut().filter_map(|take| now(take.as_mut())).collect();
        assert_eq!(begun.len(), 2);
        let mut other = Box::pin(turns.take(client(2), 1_000_000));
        let held = now(other.as_mut()).expect("a turn is left for others");
        // Nobody else gets more than that.
        let mut third = Box::pin(turns.take(client(3), 1));
        assert!(now(third.as_mut()).is_none());
        // The one that has had least goes first.
        begun.clear();
        let third = now(third.as_mut()).expect("it is next");
        assert_eq!(many[2..].iter_mut().filter_map(|take| now(take.as_mut())).map(|turn| begun.push(turn)).count(), 1);
        drop((third, held));
        assert!(now(many[3].as_mut()).is_some());
    }

    #[test]
    fn clients_take_turns_by_bytes() {
        let turns = Arc::new(Turns::new(2));
        let first = now(Box::pin(turns.take(client(9), 1)).as_mut()).expect("it is free");
        let second = now(Box::pin(turns.take(client(8), 1)).as_mut()).expect("it is free");
        let mut waiting = Vec::new();
        for (number, bytes) in [(1, 100), (1, 100), (1, 100), (2, 10), (2, 10), (2, 10), (3, 10)] {
            let take = Box::pin(turns.take(client(number), bytes));
            waiting.push((number, take));
            assert!(waiting.last_mut().is_some_and(|(_, take)| now(take.as_mut()).is_none()));
        }
        // One turn goes round.
        drop(first);
        let mut order = Vec::new();
        while !waiting.is_empty() {
            let begun = waiting.iter_mut().enumerate().find_map(|(at, (_, take))| Some((at, now(take.as_mut())?)));
            let (at, turn) = begun.expect("a turn is free");
            order.push(waiting.remove(at).0);
            drop(turn);
        }
        assert_eq!(order, [1, 2, 3, 2, 2, 1, 1]);
        drop(second);
        assert!(turns.state().clients.is_empty() || turns.state().waiting.is_empty());
    }

    /// A wait that is given up, before its turn or behind it, leaves nothing.
    #[test]
    fn what_is_given_up_holds_nothing() {
        let turns = Arc::new(Turns::new(2));
        let held = now(Box::pin(turns.take(client(1), 1)).as_mut()).expect("it is free");
        let mut given_up = Box::pin(turns.take(client(1), 1));
        assert!(now(given_up.as_mut()).is_none());
        let mut begun = Box::pin(turns.take(client(1), 1));
        assert!(now(begun.as_mut()).is_none());
        drop(given_up);
        // It begins, and nobody looks.
        drop(held);
        drop(begun);
        let state = turns.state();
        assert_eq!((state.free, state.waiting.len(), state.clients.len()), (2, 0, 0));
    }
}
