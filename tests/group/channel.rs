//! The channel of one process: time limits, ranks that go, and messages that are none.

use std::{
    cell::Cell,
    sync::{
        Barrier,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use aril::{
    group::{ChannelError, GroupError, InProcess, Message, Ranks},
    model::TpRank,
};
use proptest::prelude::*;

use crate::{
    limit::Limit,
    pool::{group_error, source},
    world::{NEVER, World, each},
};

fn message(text: &str) -> Message {
    let mut bytes = [0; Message::BYTES];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    Message::from_bytes(bytes)
}

/// Each exchange has the messages of its own call, however the ranks' threads run.
#[test]
fn exchanges_do_not_mix() {
    for size in [1, 2, 5] {
        each(InProcess::group(size, NEVER), |rank, mut ranks| {
            for call in 0..300 {
                if (call + rank) % 7 == 0 {
                    thread::yield_now();
                }
                let expected: Vec<_> = (0..size).map(|rank| message(&format!("{rank} {call}"))).collect();
                assert_eq!(ranks.all_gather(&expected[rank]).unwrap(), expected);
            }
        });
    }
}

/// All ranks that wait get an error that names the silent ones, and so do these when they call.
#[test]
fn silent_ranks_are_named() {
    let (limit, done) = (Duration::from_secs(2), Barrier::new(5));
    let start = Instant::now();
    let errors = each(InProcess::group(5, limit), |rank, mut ranks| {
        let silent = [1, 3].contains(&rank);
        if silent {
            done.wait();
        }
        let error = ranks.all_gather(&message("late")).unwrap_err();
        if !silent {
            done.wait();
        }
        // The channel is broken for ever.
        assert_eq!(ranks.all_gather(&message("again")), Err(error.clone()));
        error
    });
    assert!(start.elapsed() >= limit);
    for error in errors {
        assert_eq!(error, ChannelError { ranks: vec![1, 3], reason: "no answer within 2s".into() });
        assert_eq!(error.to_string(), "ranks 1, 3: no answer within 2s");
    }
}

/// A rank whose thread panics outside the group leaves it, long before the time limit.
#[test]
fn a_rank_that_unwinds_leaves() {
    let _limit = Limit::new();
    let [first, second] = <[_; 2]>::try_from(InProcess::group(2, NEVER)).unwrap();
    let waiting = thread::spawn(move || {
        let mut first = first;
        first.all_gather(&message("x"))
    });
    let died = thread::spawn(move || {
        let _second = second;
        std::panic::resume_unwind(Box::new(()));
    });
    assert!(died.join().is_err());
    assert_eq!(waiting.join().unwrap(), Err(ChannelError { ranks: vec![1], reason: "left the group".into() }));
}

/// After the last exchange, a rank may go at once: the others have their messages.
#[test]
fn a_rank_may_go_after_its_last_exchange() {
    let complete = AtomicUsize::new(0);
    for _ in 0..200 {
        each(InProcess::group(3, NEVER), |_, mut ranks| {
            assert_eq!(ranks.all_gather(&message("x")).unwrap().len(), 3);
            complete.fetch_add(1, Ordering::Relaxed);
        });
    }
    assert_eq!(complete.into_inner(), 600);
}

/// A channel that changes what it returns.
struct Broken<F>(InProcess, F);

impl<F: Fn(&mut Vec<Message>)> Ranks for Broken<F> {
    fn tp(&self) -> TpRank {
        self.0.tp()
    }

    fn all_gather(&mut self, message: &Message) -> Result<Vec<Message>, ChannelError> {
        let mut messages = self.0.all_gather(message)?;
        (self.1)(&mut messages);
        Ok(messages)
    }
}

/// Registers an adapter through a channel that does this to all messages from the first one on, on all ranks.
fn register_through(spoil: impl Fn(&mut Vec<Message>) + Sync) -> Vec<ChannelError> {
    let world = World::new(3);
    each(InProcess::group(3, NEVER), |rank, ranks| {
        let is_made = Cell::new(false);
        let spoil = |messages: &mut Vec<Message>| {
            if is_made.get() {
                spoil(messages)
            }
        };
        let mut pool = world.pool(Broken(ranks, spoil), 2, 2);
        is_made.set(true);
        let error = pool.register(Ok(source(&world, rank, |_| 9.0))).unwrap_err();
        assert_eq!(pool.snapshot().adapters, 0);
        match group_error(&error) {
            GroupError::Channel(error) => error.clone(),
            other => panic!("{other}"),
        }
    })
}

#[test]
fn messages_that_are_missing_or_none_are_refused() {
    let channel = |spoil: fn(&mut Vec<Message>)| register_through(spoil).into_iter().map(|error| error.ranks);
    assert!(channel(|messages| messages.truncate(1)).all(|ranks| ranks == [1, 2]));
    assert!(channel(Vec::clear).all(|ranks| ranks == [0, 1, 2]));
    assert!(channel(|messages| messages.push(messages[0])).all(|ranks| ranks.is_empty()));
    assert!(channel(|messages| messages[1] = message("null")).all(|ranks| ranks == [1]));
    assert!(channel(|messages| messages[2] = message("{\"Ready\":{}}")).all(|ranks| ranks == [2]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Bytes of another program are refused, and no adapter is loaded.
    #[test]
    fn any_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 1..200), rank in 0..3_usize) {
        let mut all = [0; Message::BYTES];
        all[..bytes.len()].copy_from_slice(&bytes);
        for error in register_through(|messages| messages[rank] = Message::from_bytes(all)) {
            prop_assert_eq!(error.ranks, [rank]);
        }
    }
}
