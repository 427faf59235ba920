//! Which adapters are on the device and in host memory.

use std::{
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use aril::{
    DType,
    cpu::AdapterPool,
    error::SlotError,
    model::{Experts, ModelSpec, TpRank},
    plan::Capacity,
    pool::{PoolConfig, PoolError, Source, StreamId, Tier},
};

use crate::{
    common::adapters::{Lora, parts, write},
    setup::{BYTES, Setup, adapter, model, slow},
};

#[test]
fn an_adapter_is_read_once_while_it_is_in_host_memory() {
    let mut setup = Setup::new(1, 3);
    let dirs = [1.0, 2.0, 3.0].map(|value| (tempfile::tempdir().unwrap(), value));
    let ids = dirs.each_ref().map(|(dir, value)| setup.directory(dir.path(), *value));
    assert!(matches!(setup.pool.acquire(ids[0], StreamId::FIRST), Err(PoolError::Loading { id }) if id == ids[0]));
    // Otherwise, the time of the read would decide whether the next lease is refused, too, or waits for the copy.
    setup.settle();
    for round in 0..3 {
        for (&id, (_, value)) in ids.iter().zip(&dirs) {
            assert_eq!(setup.use_once(id), *value, "round {round}");
        }
    }
    let counters = setup.pool.snapshot().counters;
    assert_eq!((counters.reads, counters.read_bytes), (3, 3 * BYTES as u64));
    assert_eq!(counters.copied_bytes, 9 * BYTES as u64);
    assert_eq!((counters.copies, counters.evictions, counters.host_evictions), (9, 8, 0));
    assert_eq!((counters.hits, counters.misses, counters.failures), (0, 9, 0));
    // In the first round, they were leased when their copies had ended; later, while those were on their way.
    assert_eq!((counters.loading, counters.waits), (3, 6));
    // Where it is on the device already, it is a hit.
    assert_eq!(setup.use_once(ids[2]), 3.0);
    let counters = setup.pool.snapshot().counters;
    assert_eq!((counters.hits, counters.waits), (1, 6));
    setup.finish();
}

/// Nothing is read for a batch that has no slot, or no memory.
#[test]
fn a_batch_without_a_slot_or_memory_is_not_read() {
    for (slots, room) in [(1, 4), (4, 1)] {
        let mut setup = Setup::with(slots, PoolConfig::arena_bytes(room * BYTES).host_bytes(4 * BYTES));
        let ids = [1.0, 2.0].map(|value| setup.adding(value));
        let lease = setup.lease(ids[0]);
        assert!(matches!(setup.pool.acquire(ids[1], StreamId::FIRST), Err(PoolError::Full)));
        let snapshot = setup.pool.snapshot();
        assert_eq!((snapshot.waiting, snapshot.reading, snapshot.counters.full), (0, 0, 1));
        drop(lease);
        setup.pool.end_step(StreamId::FIRST).unwrap();
        setup.finish();
    }
}

#[test]
fn the_least_recently_used_adapter_is_evicted() {
    let mut setup = Setup::new(3, 4);
    let ids = [1.0, 2.0, 3.0, 4.0].map(|value| setup.adding(value));
    for id in [ids[0], ids[1], ids[2], ids[0]] {
        setup.use_once(id);
    }
    setup.use_once(ids[3]);
    let tiers = ids.map(|id| setup.pool.residency(id).unwrap().tier);
    assert_eq!(tiers, [Tier::Device, Tier::Host, Tier::Device, Tier::Device]);
    // A prefetch counts as a use.
    setup.pool.prefetch(ids[2]).unwrap();
    setup.use_once(ids[1]);
    let tiers = ids.map(|id| setup.pool.residency(id).unwrap().tier);
    assert_eq!(tiers, [Tier::Host, Tier::Device, Tier::Device, Tier::Device]);
    setup.finish();
}

#[test]
fn host_memory_has_a_budget() {
    let mut setup = Setup::new(1, 2);
    let ids = [1.0, 2.0, 3.0].map(|value| setup.adding(value));
    for (id, value) in [(0, 1.0), (1, 2.0), (2, 3.0), (0, 1.0)] {
        assert_eq!(setup.use_once(ids[id]), value);
    }
    let snapshot = setup.pool.snapshot();
    assert_eq!((snapshot.counters.reads, snapshot.counters.host_evictions, snapshot.host), (4, 2, 2));
    assert_eq!(ids.map(|id| setup.pool.residency(id).unwrap().in_host), [true, false, true]);
    setup.finish();
}

/// In any order, and each beside the others.
#[test]
fn an_arena_of_a_rank_holds_as_many_adapters() {
    let (model, _) = model();
    for (rank, count) in [(8, 1), (8, 5), (64, 3)] {
        let bytes = AdapterPool::arena_bytes(&model, DType::F32, rank, count);
        let mut setup = Setup::with(count, PoolConfig::arena_bytes(bytes));
        let ids: Vec<_> = (1..=count).map(|value| setup.memory(adapter(rank, value as f32))).collect();
        let leases = setup.prepare(&ids).unwrap();
        let values = setup.step(&leases.iter().collect::<Vec<_>>());
        assert_eq!(values, (1..=count).map(|value| value as f32).collect::<Vec<_>>());
        drop(leases);
        setup.finish();
    }
}

/// A pool's arena has whole granules, and so has its table's. A step that keeps an adapter which another one has replaced has more.
#[test]
fn free_memory_is_never_less_than_none() {
    let mut setup = Setup::with(1, PoolConfig::arena_bytes(BYTES - 1).host_bytes(2 * BYTES));
    let ids = [1.0, 2.0].map(|value| setup.adding(value));
    let usage = |setup: &Setup| setup.pool.weights(StreamId::FIRST).unwrap().usage();
    let lease = setup.lease(ids[0]);
    assert_eq!((usage(&setup).capacity, usage(&setup).used, usage(&setup).free()), (BYTES, BYTES, 0));
    assert_eq!(usage(&setup).fragmentation(), 0.0);
    assert_eq!(setup.pool.snapshot().device_memory.free(), 0);
    drop(lease);
    setup.pool.end_step(StreamId::FIRST).unwrap();
    assert_eq!(setup.use_once(ids[1]), 2.0);
    setup.finish();
}

#[test]
fn a_prefetch_brings_an_adapter_up() {
    let mut setup = Setup::new(2, 2);
    let id = setup.adding(5.0);
    setup.pool.prefetch(id).unwrap();
    setup.settle();
    assert_eq!(setup.pool.residency(id).unwrap().tier, Tier::Device);
    let lease = setup.pool.acquire(id, StreamId::FIRST).unwrap();
    assert_eq!(setup.step(&[&lease]), [5.0]);
    drop(lease);
    setup.pool.end_step(StreamId::FIRST).unwrap();
    setup.finish();
}

#[test]
fn an_older_prefetch_evicts_no_newer_adapter() {
    let mut setup = Setup::with(1, PoolConfig::arena_bytes(BYTES).host_bytes(2 * BYTES).loaders(1));
    let ids = [1.0, 2.0].map(|value| setup.adding(value));
    ids.iter().for_each(|&id| drop(setup.pool.prefetch(id).unwrap()));
    setup.pool.prefetch(ids[0]).unwrap();
    setup.settle();
    let tiers = ids.map(|id| setup.pool.residency(id).unwrap().tier);
    assert_eq!((tiers, setup.pool.snapshot().waiting), ([Tier::Device, Tier::Host], 0));
    setup.finish();
}

/// It goes up first, and is read once.
#[test]
fn an_adapter_that_waits_for_the_device_keeps_its_host_memory() {
    let mut setup = Setup::with(1, PoolConfig::arena_bytes(BYTES).host_bytes(BYTES).loaders(1));
    let ids = [1.0, 2.0, 3.0].map(|value| setup.adding(value));
    let lease = setup.lease(ids[0]);
    ids[1..].iter().for_each(|&id| drop(setup.pool.prefetch(id).unwrap()));
    setup.settle();
    let tiers = |setup: &Setup| ids.map(|id| setup.pool.residency(id).unwrap().tier);
    assert_eq!(tiers(&setup), [Tier::Device, Tier::Host, Tier::Source]);
    drop(lease);
    setup.pool.end_step(StreamId::FIRST).unwrap();
    setup.pool.poll();
    setup.settle();
    assert_eq!(tiers(&setup), [Tier::Source, Tier::Source, Tier::Device]);
    assert_eq!(setup.pool.snapshot().counters.reads, 3);
    setup.finish();
}

/// It no longer waits for the device, so that others may take its place in host memory.
#[test]
fn an_older_prefetch_that_evicted_nothing_leaves_host_memory() {
    let mut setup = Setup::with(1, PoolConfig::arena_bytes(BYTES).host_bytes(BYTES).loaders(1));
    let ids = [1.0, 2.0, 3.0].map(|value| setup.adding(value));
    ids[..2].iter().for_each(|&id| drop(setup.pool.prefetch(id).unwrap()));
    setup.pool.prefetch(ids[0]).unwrap();
    setup.settle();
    let tiers = |setup: &Setup| ids.map(|id| setup.pool.residency(id).unwrap().tier);
    assert_eq!(tiers(&setup), [Tier::Device, Tier::Host, Tier::Source]);
    setup.pool.prefetch(ids[2]).unwrap();
    setup.settle();
    assert_eq!(tiers(&setup), [Tier::Source, Tier::Source, Tier::Device]);
    setup.finish();
}

#[test]
fn not_everything_can_be_pinned() {
    let mut setup = Setup::new(3, 4);
    let ids = [1.0, 2.0, 3.0, 4.0].map(|value| setup.adding(value));
    setup.pool.pin(ids[0]).unwrap();
    setup.pool.pin(ids[1]).unwrap();
    setup.pool.pin(ids[1]).unwrap();
    assert!(matches!(setup.pool.pin(ids[2]), Err(PoolError::Pinned { id }) if id == ids[2]));
    for id in ids {
        setup.use_once(id);
    }
    let tiers = ids.map(|id| setup.pool.residency(id).unwrap().tier);
    assert_eq!(tiers, [Tier::Device, Tier::Device, Tier::Host, Tier::Device]);
    // A batch for which the pinned ones leave no room says so.
    let refused = setup.prepare(&[ids[2], ids[3]]).unwrap_err();
    assert!(matches!(refused, PoolError::TooLarge { adapters: 2, max: 3, .. }), "{refused}");
    setup.pool.unpin(ids[0]).unwrap();
    setup.pool.pin(ids[2]).unwrap();
    // Who is forgotten is no longer pinned.
    setup.pool.unregister(ids[2]).unwrap();
    assert_eq!(setup.pool.snapshot().pinned, 1);
    // Bytes count, too.
    let mut setup_of_bytes = Setup::with(4, PoolConfig::arena_bytes(5 * BYTES));
    let (small, large) = (setup_of_bytes.adding(1.0), setup_of_bytes.memory(adapter(32, 2.0)));
    setup_of_bytes.pool.pin(small).unwrap();
    let other = setup_of_bytes.adding(3.0);
    assert!(matches!(setup_of_bytes.pool.pin(other), Err(PoolError::Pinned { .. })));
    setup_of_bytes.pool.unregister(large).unwrap();
    setup_of_bytes.pool.pin(other).unwrap();
    setup.finish();
}

#[test]
fn pins_leave_a_slot_and_room_for_the_largest_of_the_others() {
    let mut setup = Setup::with(2, PoolConfig::arena_bytes(9 * BYTES).host_bytes(9 * BYTES));
    let ids = [1.0, 2.0].map(|value| setup.adding(value));
    setup.pool.pin(ids[0]).unwrap();
    assert!(matches!(setup.pool.pin(ids[1]), Err(PoolError::Pinned { .. })), "a slot is left");
    setup.finish();
    let mut setup = Setup::with(4, PoolConfig::arena_bytes(5 * BYTES).host_bytes(9 * BYTES));
    let (_small, large) = (setup.adding(1.0), setup.memory(adapter(32, 2.0)));
    setup.pool.pin(large).unwrap();
    setup.finish();
}

#[test]
fn a_poll_notices_the_end_of_a_read() {
    let mut setup = Setup::new(1, 1);
    let id = setup.adding(1.0);
    setup.pool.prefetch(id).unwrap();
    let end = Instant::now() + Duration::from_secs(30);
    while setup.pool.residency(id).unwrap().tier != Tier::Device {
        assert!(Instant::now() < end, "nothing was noticed");
        thread::yield_now();
        setup.pool.poll();
    }
    setup.finish();
}

#[test]
fn others_keep_waiting_when_a_waiting_adapter_is_forgotten() {
    // One host block, so that one adapter is read at a time.
    let mut setup = Setup::with(3, PoolConfig::arena_bytes(3 * BYTES).host_bytes(BYTES));
    let ids = [1.0, 2.0, 3.0].map(|value| setup.adding(value));
    ids.iter().for_each(|&id| drop(setup.pool.prefetch(id).unwrap()));
    setup.pool.unregister(ids[1]).unwrap();
    setup.settle();
    let tiers = [ids[0], ids[2]].map(|id| setup.pool.residency(id).unwrap().tier);
    assert_eq!(tiers, [Tier::Device, Tier::Device]);
    setup.finish();
}

#[test]
fn ranks_share_an_arena() {
    // Rank 32 takes four times the bytes of rank 8.
    let mut setup = Setup::with(8, PoolConfig::arena_bytes(5 * BYTES).host_bytes(16 * BYTES));
    let (small, large) = ([1.0, 2.0].map(|value| setup.adding(value)), setup.memory(adapter(32, 3.0)));
    assert_eq!((setup.use_once(small[0]), setup.use_once(small[1])), (1.0, 2.0));
    assert_eq!(setup.use_once(large), 3.0);
    let snapshot = setup.pool.snapshot();
    assert_eq!((snapshot.resident, snapshot.counters.evictions), (1, 2), "{snapshot:?}");
    assert_eq!(snapshot.device_memory.used, 4 * BYTES);
    assert!((0.0..=1.0).contains(&snapshot.device_memory.fragmentation()));
    assert_eq!(setup.use_once(small[0]), 1.0);
    assert_eq!(setup.pool.snapshot().resident, 2);
    setup.finish();
}

/// A large adapter that waits for room is not overtaken by a small one, for which there would be room.
#[test]
fn an_adapter_that_waits_is_not_overtaken() {
    let mut setup = Setup::with(4, PoolConfig::arena_bytes(5 * BYTES).host_bytes(16 * BYTES));
    let [held, large] = [(16, 1.0), (32, 2.0)].map(|(rank, value)| setup.memory(adapter(rank, value)));
    let small = setup.adding(3.0);
    let lease = setup.lease(held);
    for id in [large, small] {
        setup.pool.prefetch(id).unwrap();
        setup.settle();
    }
    let tiers = |setup: &Setup| [large, small].map(|id| setup.pool.residency(id).unwrap().tier);
    assert_eq!(tiers(&setup), [Tier::Host, Tier::Host]);
    drop(lease);
    setup.pool.end_step(StreamId::FIRST).unwrap();
    assert_eq!(tiers(&setup), [Tier::Device, Tier::Device]);
    setup.finish();
}

/// It waits for the next call, although an adapter of its own batch, which was used after it, is in the way.
#[test]
fn an_adapter_of_the_last_batch_goes_on_waiting() {
    let mut setup = Setup::with(4, PoolConfig::arena_bytes(3 * BYTES).host_bytes(8 * BYTES));
    let small = [1.0, 2.0, 3.0].map(|value| setup.adding(value));
    let large = setup.memory(adapter(16, 4.0));
    for id in small {
        setup.use_once(id);
    }
    let batch = [large, small[1]];
    assert!(matches!(setup.pool.prepare(&batch, StreamId::FIRST), Err(PoolError::Loading { id }) if id == large));
    setup.settle();
    assert_eq!((setup.pool.residency(large).unwrap().tier, setup.pool.snapshot().waiting), (Tier::Host, 1));
    drop(setup.prepare(&batch).unwrap());
    setup.pool.end_step(StreamId::FIRST).unwrap();
    setup.finish();
}

/// As many adapters of a batch as there are loaders are read at once.
#[test]
fn a_batch_is_read_by_all_loaders() {
    let mut setup = Setup::with(3, PoolConfig::arena_bytes(4 * BYTES).host_bytes(4 * BYTES).loaders(2));
    let ids = [1.0, 2.0, 3.0].map(|value| setup.adding(value));
    assert!(matches!(setup.pool.prepare(&ids, StreamId::FIRST), Err(PoolError::Loading { .. })));
    let snapshot = setup.pool.snapshot();
    assert_eq!((snapshot.reading, snapshot.waiting), (2, 3));
    setup.settle();
    setup.finish();
}

/// Factors of experts that are equal are stored once, and nothing is reserved for the others.
#[test]
fn equal_factors_of_experts_take_no_room() {
    const WIDTH: usize = 256;
    let mut spec = ModelSpec::new();
    spec.experts(Experts::new("m.experts", 2, WIDTH, WIDTH).ungated().top_k(1)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let module = |expert: usize| {
        let mut module = Lora::linear(format!("m.experts.{expert}.up_proj"), WIDTH, WIDTH, 8).dtype(DType::F32);
        module.a.fill(1.0);
        module.b.fill(1.0 + expert as f32);
        module
    };
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &parts(8.0, &[module(0), module(1)]));
    let source = Source::directory(dir.path(), &model, DType::F32).unwrap();
    // Of four factors of one size, two are the same.
    let bytes = 3 * 8 * WIDTH * size_of::<f32>();
    assert_eq!(source.bytes(), bytes);
    let config = PoolConfig::arena_bytes(bytes).host_bytes(bytes);
    let mut pool = AdapterPool::new(&model, DType::F32, Capacity::tokens(1).slots(1).rank(8), config).unwrap();
    let id = pool.register(source).unwrap();
    let load = pool.prefetch(id).unwrap();
    assert!(pool.wait_for(&load, Duration::from_secs(30)).unwrap());
    assert_eq!(pool.snapshot().device_memory.used, bytes);
}

/// Whoever has started a load hears how it ends: that load, whatever happens to the adapter and to other loads.
#[test]
fn a_load_is_waited_for_by_its_handle() {
    const LIMIT: Duration = Duration::from_secs(30);
    let mut setup = Setup::new(2, 2);
    let lock = Arc::new(Mutex::new(()));
    let ids = [slow(&lock), adapter(8, 2.0), adapter(8, 3.0)].map(|adapter| setup.memory(adapter));
    // A batch that is refused has started it. A prefetch joins it.
    let held = lock.lock().unwrap();
    assert!(matches!(setup.pool.prepare(&ids[..1], StreamId::FIRST), Err(PoolError::Loading { .. })));
    let [asked, joined] = [setup.pool.loading(ids[0]).unwrap(), setup.pool.prefetch(ids[0]).unwrap()];
    drop(held);
    // It waits through the ends of others.
    let others = [ids[1], ids[2]].map(|id| setup.pool.prefetch(id).unwrap());
    for load in others.iter().rev().chain([&asked]) {
        assert!(setup.pool.wait_for(load, LIMIT).unwrap());
    }
    assert!(joined.has_ended().unwrap() && joined.id() == ids[0] && setup.pool.loading(ids[0]).is_none());
    // One that is there has ended at once.
    assert!(setup.pool.prefetch(ids[2]).unwrap().has_ended().unwrap());
    // A version that is unregistered, and another one of the same adapter.
    let gone = setup.memory(slow(&lock));
    let held = lock.lock().unwrap();
    let load = setup.pool.prefetch(gone).unwrap();
    setup.pool.unregister(gone).unwrap();
    assert!(setup.pool.loading(gone).is_none());
    let ended = setup.pool.wait_for(&load, LIMIT);
    assert!(matches!(ended, Err(PoolError::Unknown { id }) if id == gone), "{ended:?}");
    drop(held);
    ids.iter().for_each(|&id| setup.pool.unregister(id).unwrap());
    assert!(asked.has_ended().unwrap(), "the load had ended before");
    setup.finish();
}

/// Two free blocks of one adapter each are no room for one of twice the size, but nothing is in use.
#[test]
fn the_device_is_rearranged_for_a_batch_that_fits() {
    let mut setup = Setup::with(4, PoolConfig::arena_bytes(3 * BYTES).host_bytes(8 * BYTES));
    let small = [1.0, 2.0, 3.0].map(|value| setup.adding(value));
    let large = setup.memory(adapter(16, 4.0));
    for (&id, value) in small.iter().zip([1.0, 2.0, 3.0]) {
        assert_eq!(setup.use_once(id), value);
    }
    // While the one in the middle is leased, it cannot be moved.
    let held = setup.lease(small[1]);
    assert!(matches!(setup.prepare(&[large, small[1]]), Err(PoolError::Full)));
    let counters = setup.pool.snapshot().counters;
    assert_eq!((counters.full, counters.moves), (1, 0));
    assert_eq!(setup.step(&[&held]), [2.0]);
    drop(held);
    setup.pool.end_step(StreamId::FIRST).unwrap();
    let leases = setup.prepare(&[large, small[1]]).unwrap();
    assert_eq!(setup.step(&[&leases[0], &leases[1]]), [4.0, 2.0]);
    assert!(setup.pool.snapshot().counters.moves > 0);
    drop(leases);
    setup.pool.end_step(StreamId::FIRST).unwrap();
    setup.finish();
}

#[test]
fn what_does_not_fit_the_pool_is_refused_when_it_is_registered() {
    let mut setup = Setup::with(2, PoolConfig::arena_bytes(2 * BYTES).host_bytes(8 * BYTES));
    let source = |adapter, model: &_, dtype| Source::memory(adapter, model, dtype).unwrap();
    let large = source(adapter(32, 1.0), &setup.model, DType::F32);
    assert_eq!((large.bytes(), large.max_rank()), (4 * BYTES, 32));
    let refused = setup.pool.register(large).unwrap_err();
    assert!(matches!(refused, PoolError::TooLarge { what: "arena", bytes, .. } if bytes == 4 * BYTES), "{refused}");
    let half = source(adapter(8, 1.0), &setup.model, DType::BF16);
    let refused = setup.pool.register(half).unwrap_err();
    assert!(matches!(refused, PoolError::Slot(SlotError::DType { .. })), "{refused}");
    let other = source(adapter(8, 1.0), &model().0, DType::F32);
    assert!(matches!(setup.pool.register(other).unwrap_err(), PoolError::Slot(SlotError::Model)));
    let mut small_host = Setup::with(2, PoolConfig::arena_bytes(8 * BYTES).host_bytes(2 * BYTES));
    let large = source(adapter(32, 1.0), &small_host.model, DType::F32);
    let refused = small_host.pool.register(large).unwrap_err();
    assert!(matches!(refused, PoolError::TooLarge { what: "host tier", .. }), "{refused}");
    setup.finish();
}

#[test]
fn a_snapshot_counts_leased_slots_and_copies() {
    let mut setup = Setup::new(3, 4);
    let ids = [1.0, 2.0, 3.0, 4.0].map(|value| setup.adding(value));
    for id in ids {
        setup.use_once(id);
    }
    let lease = setup.lease(ids[0]);
    let counts = |setup: &Setup| {
        let snapshot = setup.pool.snapshot();
        (snapshot.resident, snapshot.leased, snapshot.leases, snapshot.copying)
    };
    assert_eq!(counts(&setup), (3, 1, 1, 1));
    setup.pool.poll();
    assert_eq!(counts(&setup), (3, 1, 1, 0));
    drop(lease);
    setup.pool.end_step(StreamId::FIRST).unwrap();
    setup.finish();
}

#[test]
fn one_call_says_where_the_adapters_are() {
    let mut setup = Setup::new(2, 4);
    let ids = [1.0, 2.0, 3.0, 4.0].map(|value| setup.adding(value));
    for &id in &ids[..3] {
        setup.use_once(id);
    }
    setup.pool.pin(ids[1]).unwrap();
    let lease = setup.lease(ids[2]);
    let seen: Vec<_> = setup.pool.residencies().iter().map(|r| (r.id, r.tier, r.leases, r.is_pinned)).collect();
    let tiers = [Tier::Host, Tier::Device, Tier::Device, Tier::Source];
    let want: Vec<_> = (0..4).map(|i| (ids[i], tiers[i], usize::from(i == 2), i == 1)).collect();
    assert_eq!(seen, want);
    assert_eq!(setup.pool.residency(ids[2]).unwrap().slot, lease.slot().index());
    let snapshot = setup.pool.snapshot();
    assert_eq!((snapshot.adapters, snapshot.resident, snapshot.host, snapshot.reading), (4, 2, 3, 0));
    assert_eq!((snapshot.leased, snapshot.leases, snapshot.pinned, snapshot.copying), (1, 1, 1, 0));
    assert_eq!((snapshot.device_memory.used, snapshot.host_memory.used), (2 * BYTES, 3 * BYTES));
    drop(lease);
    setup.pool.end_step(StreamId::FIRST).unwrap();
    setup.finish();
}

/// A version that is dropped leaves the pool, before its load has ended or after, and as long as no request holds it.
#[test]
fn a_version_is_registered_until_it_is_dropped() {
    let mut setup = Setup::new(3, 4);
    let source = Source::memory(adapter(8, 1.0), &setup.model, DType::F32).unwrap();
    let [early, late, leased, kept] = [(); 4].map(|()| setup.pool.load(source.clone()).unwrap());
    drop(early);
    assert!(setup.pool.wait_for(late.load(), Duration::from_secs(30)).unwrap());
    let lease = setup.lease(leased.id());
    let ids = [late.id(), leased.id()];
    drop((late, leased));
    setup.pool.poll();
    assert_eq!(setup.pool.snapshot().adapters, 1);
    for id in ids {
        let refused = setup.pool.acquire(id, StreamId::FIRST);
        assert!(matches!(refused, Err(PoolError::Unknown { .. })), "{refused:?}");
    }
    assert_eq!(setup.step(&[&lease]), [1.0]);
    drop(lease);
    assert_eq!(setup.use_once(kept.id()), 1.0);
    // Whose id was unregistered, is gone already.
    setup.pool.unregister(kept.id()).unwrap();
    drop(kept);
    setup.finish();
}
