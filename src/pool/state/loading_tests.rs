//! Adapters on their way to the device: copied while they are read, or waiting for room.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::mpsc::channel;

use super::{Limits, State, test_device::TestDevice};
use crate::{
    arena::blocks::GRANULE_BYTES,
    pool::{AdapterId, AdapterPool, PoolError, StreamId, Tier, backend::Executor as _},
};

/// A pool of `slots` slots, whose adapters have two granules each, and its world.
fn pool(slots: usize) -> (State, TestDevice) {
    let granules = 2 * slots;
    let limits = Limits {
        num_slots: slots,
        arena_bytes: granules * GRANULE_BYTES,
        host_bytes: 8 * granules * GRANULE_BYTES,
        max_reads: 2,
    };
    (State::new(limits).unwrap(), TestDevice::new(1, slots, [granules, 8 * granules], true))
}

fn register(state: &mut State) -> AdapterId {
    register_of(state, 2)
}

fn register_of(state: &mut State, granules: usize) -> AdapterId {
    let id = AdapterId::unique();
    state.register(id, granules * GRANULE_BYTES).unwrap();
    id
}

/// Ends the first read, and tells the pool.
fn end_read(state: &mut State, world: &mut TestDevice, is_good: bool) {
    world.tell_read(0, is_good);
    while let Some(read) = world.next_read() {
        state.has_read(read, world);
    }
}

/// Reads and copies an adapter.
fn load(state: &mut State, world: &mut TestDevice, id: AdapterId) {
    state.retry(id, world).unwrap();
    while world.num_reads() > 0 {
        end_read(state, world, true);
    }
    run(state, world);
}

/// Runs the streams, and tells the pool, until nothing is left.
fn run(state: &mut State, world: &mut TestDevice) {
    while (0..=world.num_streams()).any(|stream| world.run(stream)) {
        while let Some(number) = world.next_copied() {
            state.has_copied(number);
        }
        state.poll(world);
    }
}

fn tier(state: &State, id: AdapterId) -> Tier {
    state.residency_of(id).unwrap().tier
}

/// Leases an adapter, launches on it, ends the lease, and runs everything.
fn launch(state: &mut State, world: &mut TestDevice, id: AdapterId) {
    let granted = state.prepare(&[id], StreamId::FIRST, world).unwrap()[0];
    world.point(&[granted], StreamId::FIRST).unwrap();
    world.launch(StreamId::FIRST, granted.slot, id);
    state.release(granted.slot, StreamId::FIRST);
    state.end_step(StreamId::FIRST, world).unwrap();
    run(state, world);
    assert_eq!(world.wrong, None);
}

/// Its room is taken at once, and its parts run before the read ends. It cannot be leased before.
#[test]
fn an_adapter_is_copied_while_it_is_read() {
    let (mut state, mut world) = pool(1);
    let id = register(&mut state);
    state.prefetch(id, &mut world).unwrap();
    assert!(world.pack(0) && world.run(1));
    let snapshot = state.snapshot();
    assert_eq!((snapshot.resident, snapshot.copying, snapshot.reading), (1, 1, 1));
    assert_eq!(tier(&state, id), Tier::Source);
    for _ in 0..2 {
        let refused = state.prepare(&[id], StreamId::FIRST, &mut world);
        assert!(matches!(refused, Err(PoolError::Loading { .. })), "{refused:?}");
    }
    end_read(&mut state, &mut world, true);
    assert_eq!(tier(&state, id), Tier::Device);
    // The other part, and the end of all.
    assert!(world.run(1) && world.run(1) && !world.run(1));
    launch(&mut state, &mut world, id);
    let counters = state.counters;
    assert_eq!((counters.copies, counters.copied_bytes), (1, 2 * GRANULE_BYTES as u64));
}

/// A batch takes the room of adapters that are being read and not in the batch. They end in host memory.
#[test]
fn a_batch_takes_the_room_of_reads() {
    let (mut state, mut world) = pool(1);
    let [other, read] = [(); 2].map(|()| register(&mut state));
    load(&mut state, &mut world, other);
    state.prefetch(read, &mut world).unwrap();
    // It was used before the other, and had to leave.
    assert_eq!((tier(&state, other), state.counters.evictions), (Tier::Host, 1));
    assert!(world.pack(0));
    launch(&mut state, &mut world, other);
    end_read(&mut state, &mut world, true);
    // Nothing but the prefetch asks for it, and it is older than the batch.
    assert_eq!([tier(&state, other), tier(&state, read)], [Tier::Device, Tier::Host]);
    launch(&mut state, &mut world, read);
}

/// All of it is on its way, so that it keeps its room, and the batch waits for its end.
#[test]
fn a_copy_that_is_complete_is_not_revoked() {
    let (mut state, mut world) = pool(1);
    let [other, read] = [(); 2].map(|()| register(&mut state));
    load(&mut state, &mut world, other);
    state.prefetch(read, &mut world).unwrap();
    world.end_read(0, true);
    let refused = state.prepare(&[other], StreamId::FIRST, &mut world);
    assert!(matches!(refused, Err(PoolError::Loading { id }) if id == other), "{refused:?}");
    end_read(&mut state, &mut world, true);
    run(&mut state, &mut world);
    launch(&mut state, &mut world, read);
    launch(&mut state, &mut world, other);
}

/// A read that fails frees its room, and so does an adapter that is forgotten meanwhile.
#[test]
fn room_comes_back() {
    let (mut state, mut world) = pool(1);
    let [bad, gone, good] = [(); 3].map(|()| register(&mut state));
    state.prefetch(bad, &mut world).unwrap();
    assert!(world.pack(0));
    end_read(&mut state, &mut world, false);
    assert_eq!((state.snapshot().resident, state.snapshot().device_memory.used), (0, 0));
    assert!(state.residency_of(bad).unwrap().failure.is_some());
    state.prefetch(gone, &mut world).unwrap();
    assert!(world.pack(0));
    state.unregister(gone, &mut world).unwrap();
    assert_eq!((state.snapshot().resident, state.snapshot().device_memory.used), (0, 0));
    end_read(&mut state, &mut world, true);
    let snapshot = state.snapshot();
    assert_eq!((snapshot.host, snapshot.host_memory.used), (0, 0));
    state.prefetch(good, &mut world).unwrap();
    end_read(&mut state, &mut world, true);
    launch(&mut state, &mut world, good);
}

/// Where an earlier adapter has no room, nothing is copied before the read ends.
#[test]
fn a_read_takes_room_in_turn() {
    let (mut state, mut world) = pool(2);
    let [leased, large, small] = [2, 4, 2].map(|granules| register_of(&mut state, granules));
    load(&mut state, &mut world, leased);
    let granted = state.prepare(&[leased], StreamId::FIRST, &mut world).unwrap()[0];
    state.prefetch(large, &mut world).unwrap();
    state.prefetch(small, &mut world).unwrap();
    assert_eq!((world.num_reads(), state.snapshot().resident), (2, 1));
    for _ in 0..2 {
        end_read(&mut state, &mut world, true);
        run(&mut state, &mut world);
    }
    assert_eq!([tier(&state, large), tier(&state, small)], [Tier::Host; 2]);
    state.release(granted.slot, StreamId::FIRST);
    state.end_step(StreamId::FIRST, &mut world).unwrap();
    state.poll(&mut world);
    run(&mut state, &mut world);
    assert_eq!(tier(&state, large), Tier::Host, "the smaller one was asked for later");
    assert_eq!(tier(&state, small), Tier::Device);
    launch(&mut state, &mut world, large);
}

/// While a capture keeps the device from being rearranged, the host tier has room for one of two adapters. Neither
/// evicts the other.
#[test]
fn a_batch_keeps_what_it_has_in_host_memory() {
    let bytes = 2 * GRANULE_BYTES;
    let limits = Limits { num_slots: 2, arena_bytes: 2 * bytes, host_bytes: bytes, max_reads: 2 };
    let (mut state, mut world) = (State::new(limits).unwrap(), TestDevice::new(1, 2, [4, 2], false));
    let others = [(); 2].map(|()| register(&mut state));
    others.iter().for_each(|&id| load(&mut state, &mut world, id));
    let granted = state.prepare(&others, StreamId::FIRST, &mut world).unwrap();
    let batch = [(); 2].map(|()| register(&mut state));
    state.prefetch(batch[0], &mut world).unwrap();
    end_read(&mut state, &mut world, true);
    assert_eq!(tier(&state, batch[0]), Tier::Host, "the slots are leased");
    granted.into_iter().for_each(|granted| state.release(granted.slot, StreamId::FIRST));
    world.is_capturing = true;
    state.end_step(StreamId::FIRST, &mut world).unwrap();
    for _ in 0..2 {
        let refused = state.prepare(&batch, StreamId::FIRST, &mut world);
        assert!(matches!(refused, Err(PoolError::Loading { id }) if id == batch[1]), "{refused:?}");
        assert_eq!((tier(&state, batch[0]), world.num_reads()), (Tier::Host, 0));
    }
    world.is_capturing = false;
    let mut calls = 0;
    while state.prepare(&batch, StreamId::FIRST, &mut world).is_err() {
        calls += 1;
        assert!(calls < 4, "{:?}", state.snapshot());
        while world.num_reads() > 0 {
            end_read(&mut state, &mut world, true);
        }
        run(&mut state, &mut world);
    }
}

/// Whether its read is under way, has ended or has failed: nobody serves it, and its memory returns.
#[test]
fn an_adapter_that_is_unregistered_before_a_call_notes_its_end_is_not_loaded() {
    for end in [None, Some(true), Some(false)] {
        let limits = Limits { num_slots: 1, arena_bytes: GRANULE_BYTES, host_bytes: GRANULE_BYTES, max_reads: 1 };
        let mut pool = AdapterPool::within(TestDevice::new(1, 1, [1, 1], true), limits).unwrap();
        let (served, versions) = channel();
        let load = pool.load_then(GRANULE_BYTES, move |loaded| served.send(loaded).unwrap()).unwrap();
        end.into_iter().for_each(|is_good| pool.backend.tell_read(0, is_good));
        assert!(!load.has_ended().unwrap());
        pool.unregister(load.id()).unwrap();
        for ended in [versions.try_recv().unwrap().map(drop), load.has_ended().map(drop)] {
            assert!(matches!(ended, Err(PoolError::Unknown { id }) if id == load.id()), "{end:?}: {ended:?}");
        }
        if end.is_none() {
            pool.backend.tell_read(0, true);
        }
        while (0..=1).any(|stream| pool.backend.run(stream)) {}
        pool.poll();
        let snapshot = pool.snapshot();
        assert_eq!((snapshot.adapters, snapshot.device_memory.used, snapshot.host_memory.used), (0, 0, 0), "{end:?}");
    }
}
