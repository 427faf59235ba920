//! Leases, batches, and adapters that are forgotten or replaced while requests use them.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use aril::{
    DType,
    pool::{AdapterId, CacheNamespace, PoolConfig, PoolError, Source, StreamId, Tier},
};

use crate::setup::{BYTES, Setup, adapter};

const STREAM: StreamId = StreamId::FIRST;

fn is_full<T>(result: &Result<T, PoolError>) -> bool {
    matches!(result, Err(PoolError::Full))
}

#[test]
fn no_adapter_of_a_batch_is_evicted_for_another() {
    let mut setup = Setup::new(2, 3);
    let ids = [1.0, 2.0, 3.0].map(|value| setup.adding(value));
    // The first is the least recently used, and in the batch.
    setup.use_once(ids[0]);
    setup.use_once(ids[1]);
    let leases = setup.prepare(&[ids[2], ids[0], ids[2]]).unwrap();
    assert_eq!(setup.step(&leases.iter().collect::<Vec<_>>()), [3.0, 1.0, 3.0]);
    assert_eq!((leases[0].slot(), leases[1].id()), (leases[2].slot(), ids[0]));
    assert_eq!(setup.pool.residency(ids[1]).unwrap().tier, Tier::Host);
    drop(leases);
    setup.pool.end_step(STREAM).unwrap();
    setup.finish();
}

#[test]
fn a_batch_that_does_not_fit_is_refused_as_a_whole() {
    let mut setup = Setup::new(2, 3);
    let ids = [1.0, 2.0, 3.0].map(|value| setup.adding(value));
    for id in ids {
        setup.use_once(id);
    }
    let held = setup.lease(ids[1]);
    let before = setup.pool.residencies().iter().map(|r| (r.tier, r.leases)).collect::<Vec<_>>();
    let evictions = setup.pool.snapshot().counters.evictions;
    assert!(is_full(&setup.pool.prepare(&[ids[2], ids[0]], STREAM)));
    let after = setup.pool.residencies().iter().map(|r| (r.tier, r.leases)).collect::<Vec<_>>();
    assert_eq!((before, evictions), (after, setup.pool.snapshot().counters.evictions), "something was half done");
    // One that never fits is not worth a retry.
    let refused = setup.pool.prepare(&ids, STREAM).unwrap_err();
    assert!(matches!(refused, PoolError::TooLarge { adapters: 3, max: 2, .. }), "{refused}");
    assert_eq!(setup.step(&[&held]), [2.0]);
    drop(held);
    assert!(is_full(&setup.pool.prepare(&[ids[2], ids[0]], STREAM)), "the step of the lease has not ended");
    setup.pool.end_step(STREAM).unwrap();
    let leases = setup.prepare(&[ids[2], ids[0]]).unwrap();
    assert_eq!(setup.step(&[&leases[0], &leases[1]]), [3.0, 1.0]);
    assert_eq!(setup.pool.snapshot().counters.full, 2);
    drop(leases);
    setup.pool.end_step(STREAM).unwrap();
    setup.finish();
}

#[test]
fn a_slot_waits_for_the_end_of_a_step_on_every_stream_that_it_was_leased_for() {
    let mut setup = Setup::new(1, 2);
    let other = setup.pool.add_stream();
    let ids = [1.0, 2.0].map(|value| setup.adding(value));
    let leases = [setup.lease(ids[0]), setup.pool.acquire(ids[0], other).unwrap()];
    assert_eq!(leases.each_ref().map(|lease| lease.stream()), [STREAM, other]);
    setup.pool.prefetch(ids[1]).unwrap();
    setup.settle();
    let refused = |setup: &mut Setup| is_full(&setup.pool.acquire(ids[1], STREAM));
    assert!(refused(&mut setup));
    setup.pool.end_step(STREAM).unwrap();
    drop(leases);
    setup.pool.end_step(other).unwrap();
    assert!(refused(&mut setup));
    setup.pool.end_step(STREAM).unwrap();
    assert_eq!(setup.use_once(ids[1]), 2.0);
    // Streams that no longer step do not hold what others use.
    setup.pool.end_step(STREAM).unwrap();
    assert_eq!(setup.use_once(ids[0]), 1.0);
    assert_eq!(setup.use_once(ids[1]), 2.0);
    let elsewhere = { Setup::new(1, 1).pool }.add_stream();
    assert_eq!(elsewhere, other, "streams are numbered");
    let unknown = setup.pool.add_stream();
    let mut fresh = Setup::new(1, 1);
    let id = fresh.adding(1.0);
    // One behind the last stream, and one far behind.
    for unknown in [other, unknown] {
        let refused = fresh.pool.acquire(id, unknown);
        assert!(matches!(refused, Err(PoolError::NoSuchStream { stream }) if stream == unknown));
        assert!(matches!(fresh.pool.end_step(unknown), Err(PoolError::NoSuchStream { .. })));
    }
    fresh.finish();
    setup.finish();
}

#[test]
fn an_adapter_is_forgotten_at_once_and_its_memory_returns_with_the_last_lease() {
    let mut setup = Setup::new(2, 2);
    let id = setup.adding(7.0);
    let leases = [setup.lease(id), setup.lease(id)];
    setup.pool.unregister(id).unwrap();
    let is_unknown = |error: PoolError| matches!(error, PoolError::Unknown { id: other } if other == id);
    assert!(is_unknown(setup.pool.acquire(id, STREAM).unwrap_err()));
    assert!(is_unknown(setup.pool.prefetch(id).unwrap_err()));
    assert!(is_unknown(setup.pool.pin(id).unwrap_err()));
    assert!(is_unknown(setup.pool.unregister(id).unwrap_err()));
    assert!(setup.pool.residency(id).is_none() && setup.pool.residencies().is_empty());
    let [first, second] = leases;
    drop(first);
    setup.pool.end_step(STREAM).unwrap();
    assert_eq!(setup.step(&[&second]), [7.0]);
    assert_eq!(setup.pool.snapshot().device_memory.used, BYTES);
    drop(second);
    setup.pool.poll();
    assert_eq!(setup.pool.snapshot().device_memory.used, BYTES, "launches may follow until the end of the step");
    // No other batch has to come.
    setup.pool.end_step(STREAM).unwrap();
    setup.pool.poll();
    let snapshot = setup.pool.snapshot();
    assert_eq!((snapshot.device_memory.used, snapshot.host_memory.used, snapshot.resident), (0, 0, 0));
    setup.finish();
}

#[test]
fn a_new_version_is_loaded_beside_the_old_one() {
    let mut setup = Setup::new(2, 4);
    let old = setup.adding(1.0);
    let running = setup.lease(old);
    let new = setup.adding(2.0);
    assert_ne!(old.cache_namespace(), new.cache_namespace());
    assert!([old, new].iter().all(|id| id.cache_namespace() != CacheNamespace::BASE));
    let next = setup.lease(new);
    setup.pool.unregister(old).unwrap();
    assert_eq!(setup.step(&[&running, &next]), [1.0, 2.0]);
    assert_eq!([running.cache_namespace(), next.cache_namespace()], [old, new].map(|id| id.cache_namespace()));
    drop(running);
    setup.pool.end_step(STREAM).unwrap();
    assert_eq!(setup.pool.snapshot().resident, 1);
    assert_eq!(setup.step(&[&next]), [2.0]);
    drop(next);
    setup.pool.end_step(STREAM).unwrap();
    setup.finish();
}

#[test]
fn what_is_being_read_can_be_forgotten() {
    let mut setup = Setup::new(2, 2);
    let ids = [1.0, 2.0].map(|value| setup.adding(value));
    for id in ids {
        setup.pool.prefetch(id).unwrap();
        setup.pool.unregister(id).unwrap();
    }
    assert!(!setup.pool.wait(Duration::ZERO) || setup.pool.snapshot().reading < 2);
    setup.finish();
}

/// Of a stream that used what was in the slot before, no step has to end for what is in it now.
#[test]
fn a_slot_forgets_the_streams_of_an_adapter_that_has_left() {
    let mut setup = Setup::new(1, 3);
    let other = setup.pool.add_stream();
    let ids = [1.0, 2.0, 3.0].map(|value| setup.adding(value));
    for id in ids {
        setup.use_once(id);
    }
    drop(setup.pool.acquire(ids[0], other).unwrap());
    setup.pool.end_step(other).unwrap();
    let waits = setup.pool.snapshot().counters.waits;
    assert_eq!(setup.use_once(ids[1]), 2.0);
    assert_eq!(setup.pool.snapshot().counters.waits, waits + 1, "it was not leased while it was copied");
    let lease =
        setup.pool.acquire(ids[2], STREAM).expect("every stream that used the second adapter has ended its step");
    drop(lease);
    setup.pool.end_step(STREAM).unwrap();
    setup.finish();
}

/// It is on the device, so that it needs no room beside itself.
#[test]
fn a_pinned_adapter_of_a_batch_counts_once() {
    let mut setup = Setup::new(3, 4);
    let ids = [1.0, 2.0, 3.0, 4.0].map(|value| setup.adding(value));
    setup.use_once(ids[0]);
    setup.pool.pin(ids[0]).unwrap();
    let leases = setup.prepare(&[ids[1], ids[0], ids[2]]).unwrap();
    assert_eq!(setup.step(&leases.iter().collect::<Vec<_>>()), [2.0, 1.0, 3.0]);
    drop(leases);
    setup.pool.end_step(STREAM).unwrap();
    let refused = setup.pool.prepare(&ids[1..], STREAM).unwrap_err();
    assert!(matches!(refused, PoolError::TooLarge { adapters: 3, max: 3, .. }), "{refused}");
    setup.finish();
}

/// Neither against the bytes that pins leave to the others, nor against the slots.
#[test]
fn what_is_unregistered_does_not_count_against_pins() {
    let mut setup = Setup::with(3, PoolConfig::arena_bytes(4 * BYTES).host_bytes(8 * BYTES));
    // As large as the arena.
    let large = setup.memory(adapter(32, 9.0));
    let ids = [1.0, 2.0, 3.0].map(|value| setup.adding(value));
    assert!(matches!(setup.pool.pin(ids[0]), Err(PoolError::Pinned { .. })), "the large one would have no room");
    let lease = setup.lease(large);
    setup.pool.unregister(large).unwrap();
    ids[..2].iter().for_each(|&id| setup.pool.pin(id).unwrap());
    assert!(matches!(setup.pool.pin(ids[2]), Err(PoolError::Pinned { .. })), "no slot would be left");
    // An adapter that was pinned gives up its pin.
    setup.pool.unregister(ids[0]).unwrap();
    assert_eq!(setup.pool.snapshot().pinned, 1);
    setup.pool.pin(ids[2]).unwrap();
    assert_eq!(setup.step(&[&lease]), [9.0]);
    drop(lease);
    setup.pool.end_step(STREAM).unwrap();
    setup.finish();
}

/// A version that was dropped is unregistered for the next call, whichever that is.
#[test]
fn any_call_notes_that_a_version_was_dropped() {
    let mut setup = Setup::new(2, 2);
    let source = Source::memory(adapter(8, 1.0), &setup.model, DType::F32).unwrap();
    let kept = setup.pool.load(source.clone()).unwrap();
    let calls: [fn(&mut Setup, AdapterId); 2] = [
        |setup, gone| assert!(matches!(setup.pool.pin(gone), Err(PoolError::Unknown { id }) if id == gone)),
        |setup, gone| assert!(matches!(setup.pool.unpin(gone), Err(PoolError::Unknown { id }) if id == gone)),
    ];
    for call in calls {
        let version = setup.pool.load(source.clone()).unwrap();
        let id = version.id();
        setup.pool.pin(id).unwrap();
        drop(version);
        call(&mut setup, id);
        assert_eq!((setup.pool.snapshot().adapters, setup.pool.snapshot().pinned), (1, 0));
    }
    // The pin of a version that was dropped leaves room for another one.
    let version = setup.pool.load(source.clone()).unwrap();
    setup.pool.pin(version.id()).unwrap();
    drop(version);
    setup.pool.pin(kept.id()).unwrap();
    drop(kept);
    setup.pool.register(source).unwrap();
    assert_eq!(setup.pool.snapshot().adapters, 1);
    setup.finish();
}

/// Also the weights that an engine holds in memory, of an adapter that was read and of one that was not.
#[test]
fn a_forgotten_adapter_is_dropped() {
    let mut setup = Setup::new(1, 1);
    let adapters = [1.0, 2.0].map(|value| adapter(8, value));
    let weak = adapters.each_ref().map(Arc::downgrade);
    let ids = adapters.map(|adapter| setup.memory(adapter));
    let lease = setup.lease(ids[0]);
    ids.iter().for_each(|&id| setup.pool.unregister(id).unwrap());
    assert_eq!(setup.step(&[&lease]), [1.0]);
    drop(lease);
    setup.pool.end_step(STREAM).unwrap();
    // A loader may still be about to end its read.
    let end = Instant::now() + Duration::from_secs(30);
    while weak.iter().any(|adapter| adapter.strong_count() > 0) {
        assert!(Instant::now() < end, "an unregistered adapter is kept");
        thread::yield_now();
    }
    setup.finish();
}
