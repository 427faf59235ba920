//! What a channel does to the memory of a rank: nothing.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::{Limits, test_device::TestDevice};
use crate::{
    arena::blocks::GRANULE_BYTES,
    error::LoadError,
    group::{ChannelError, GroupError, Message, OnRanks, Ranks},
    model::TpRank,
    pool::{AdapterPool, PoolError, StreamId},
};

/// A channel of one rank that does this to the text of a message.
struct Through(fn(String) -> String);

impl Ranks for Through {
    fn tp(&self) -> TpRank {
        TpRank::SINGLE
    }

    fn all_gather(&mut self, message: &Message) -> Result<Vec<Message>, ChannelError> {
        let text = (self.0)(String::from_utf8_lossy(message.as_bytes()).into_owned());
        let mut bytes = [0; Message::BYTES];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Ok(vec![Message::from_bytes(bytes)])
    }
}

type Pool = AdapterPool<OnRanks<Through, TestDevice>>;

fn pool(channel: fn(String) -> String, host: usize, copies_parts: bool) -> Pool {
    let limits =
        Limits { num_slots: 2, arena_bytes: 8 * GRANULE_BYTES, host_bytes: host * GRANULE_BYTES, max_reads: 2 };
    let world = TestDevice::new(1, 2, [8, host], copies_parts);
    AdapterPool::within(OnRanks::of(Through(channel), world), limits).unwrap()
}

fn world(pool: &mut Pool) -> &mut TestDevice {
    pool.backend.parts().1
}

fn is_over<T>(result: Result<T, PoolError>) -> bool {
    let Err(PoolError::Load(LoadError::Group(error))) = result else { return false };
    matches!(*error, GroupError::Channel(_))
}

/// It has begun a copy, which no other read ends.
#[test]
fn a_channel_that_panics_while_a_read_begins() {
    let panics = |text: String| {
        assert!(!text.contains(r#""on":"Read""#), "on purpose");
        text
    };
    let mut pool = pool(panics, 8, true);
    let id = pool.register(Ok(4 * GRANULE_BYTES)).unwrap();
    let load = pool.prefetch(id).unwrap();
    for _ in 0..2 {
        world(&mut pool).pack(0);
        pool.poll();
        assert!(matches!(load.has_ended(), Err(PoolError::Failed { .. })));
        assert!(is_over(pool.prefetch(id)) && is_over(pool.acquire(id, StreamId::FIRST)));
    }
    let world = world(&mut pool);
    assert_eq!(world.num_reads(), 1);
    world.tell_read(0, true);
    pool.poll();
    let world = self::world(&mut pool);
    while world.run(1) {}
    assert_eq!((world.num_reads(), world.wrong.clone()), (0, None));
    let snapshot = pool.snapshot();
    assert_eq!((snapshot.reading, snapshot.host_memory.used), (1, 4 * GRANULE_BYTES), "its memory is others'");
}

/// Host memory is not written while it is copied from.
#[test]
fn a_channel_that_says_that_copies_have_ended() {
    let lies = |text: String| text.replacen(r#"{"reads":[],"copied":0"#, r#"{"reads":[],"copied":99"#, 1);
    let mut pool = pool(lies, 4, false);
    let [first, second] = [(); 2].map(|()| pool.register(Ok(4 * GRANULE_BYTES)).unwrap());
    pool.prefetch(first).unwrap();
    world(&mut pool).tell_read(0, true);
    pool.poll();
    pool.poll();
    assert!(is_over(pool.prefetch(second)));
    let world = world(&mut pool);
    assert_eq!(world.num_reads(), 0);
    while world.run(1) {}
    assert_eq!(world.wrong, None);
    assert_eq!(pool.snapshot().copying, 1);
}
