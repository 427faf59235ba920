//! The pool in simulated time: what it starts, and when.

use std::time::Duration;

use aril::{
    error::OperandError,
    plan::{MAX_SLOTS, PlanError},
    pool::{AdapterId, PoolConfig, PoolError, SimulatedPool, StreamId, Tier, Work},
    routing::Batch,
};

const BYTES: usize = 1000;
/// Blocks are whole granules.
const BLOCK: usize = 1024;
const STREAM: StreamId = StreamId::FIRST;
const TIME: Duration = Duration::from_millis(3);

/// A pool with room for `slots` adapters on the device and `host` in host memory, and `count` adapters.
fn pool<const N: usize>(slots: usize, host: usize) -> (SimulatedPool, [AdapterId; N]) {
    let config = PoolConfig::arena_bytes(slots * BLOCK).host_bytes(host * BLOCK);
    let mut pool = SimulatedPool::new(slots, config).unwrap();
    let ids = [(); N].map(|()| pool.register(BYTES).unwrap());
    (pool, ids)
}

/// Ends all work that was started, and what that starts.
fn run(pool: &mut SimulatedPool) {
    while let Some(work) = pool.next_work() {
        pool.end(work, TIME).unwrap();
    }
}

fn tiers<const N: usize>(pool: &SimulatedPool, ids: [AdapterId; N]) -> [Tier; N] {
    ids.map(|id| pool.residency(id).unwrap().tier)
}

#[test]
fn a_read_copies_an_adapter_to_the_device() {
    let (mut pool, [a]) = pool(1, 1);
    assert_eq!(pool.next_work(), None);
    assert!(matches!(pool.acquire(a, STREAM), Err(PoolError::Loading { id }) if id == a));
    let work = pool.next_work().unwrap();
    assert!(matches!(work, Work::Read { id, bytes: BLOCK, is_copied: true, .. } if id == a), "{work:?}");
    assert_eq!(pool.next_work(), None);
    assert!(matches!(pool.acquire(a, STREAM), Err(PoolError::Loading { .. })));
    let load = pool.loading(a).unwrap();
    assert!(!load.has_ended().unwrap());
    pool.end(work, TIME).unwrap();
    assert!(load.has_ended().unwrap() && pool.loading(a).is_none());
    let snapshot = pool.snapshot();
    assert_eq!((snapshot.resident, snapshot.copying, snapshot.host), (1, 0, 1));
    let counters = snapshot.counters;
    assert_eq!((counters.reads, counters.read_bytes, counters.read_time), (1, BLOCK as u64, TIME));
    assert_eq!((counters.copies, counters.copied_bytes), (1, BLOCK as u64));
    let lease = pool.acquire(a, STREAM).unwrap();
    assert_eq!((lease.id(), pool.snapshot().counters.waits), (a, 0));
}

#[test]
fn an_adapter_in_host_memory_is_copied() {
    let (mut pool, [a, b]) = pool(1, 2);
    for id in [a, b] {
        pool.prefetch(id).unwrap();
        run(&mut pool);
    }
    assert_eq!(tiers(&pool, [a, b]), [Tier::Host, Tier::Device]);
    // It is leased behind its copy, which can neither be evicted nor read again.
    let lease = pool.acquire(a, STREAM).unwrap();
    let work = pool.next_work().unwrap();
    assert!(matches!(work, Work::Copy { id, bytes: BLOCK, .. } if id == a), "{work:?}");
    assert_eq!((pool.snapshot().copying, pool.snapshot().counters.waits), (1, 1));
    drop(lease);
    pool.end_step(STREAM).unwrap();
    // Nothing has to be released for it.
    assert!(matches!(pool.acquire(b, STREAM), Err(PoolError::Loading { id }) if id == b), "the copy has not ended");
    pool.end(work, TIME).unwrap();
    assert_eq!((pool.snapshot().copying, pool.next_work()), (0, None));
    pool.poll();
    assert!(matches!(pool.next_work(), Some(Work::Copy { id, .. }) if id == b), "there is room for it now");
    let _lease = pool.acquire(b, STREAM).unwrap();
    assert_eq!(pool.snapshot().counters.reads, 2);
}

/// Launches of the step may follow the end of a lease.
#[test]
fn a_slot_is_free_after_the_step() {
    let (mut pool, [a, b]) = pool(1, 2);
    pool.prefetch(a).unwrap();
    run(&mut pool);
    let lease = pool.acquire(a, STREAM).unwrap();
    pool.prefetch(b).unwrap();
    run(&mut pool);
    assert_eq!(tiers(&pool, [a, b]), [Tier::Device, Tier::Host]);
    drop(lease);
    pool.poll();
    assert!(pool.next_work().is_none());
    pool.end_step(STREAM).unwrap();
    run(&mut pool);
    assert_eq!(tiers(&pool, [a, b]), [Tier::Host, Tier::Device]);
}

/// As on a device.
#[test]
fn a_step_refuses_the_slot_of_an_ended_lease() {
    let (mut pool, [a, b]) = pool(1, 2);
    let lease = |pool: &mut SimulatedPool, id| {
        pool.prefetch(id).unwrap();
        run(pool);
        pool.acquire(id, STREAM).unwrap()
    };
    let first = lease(&mut pool, a);
    let slots = [first.slot()];
    let batch = Batch::new(&slots);
    pool.step(STREAM, &batch, &mut ()).unwrap();
    drop(first);
    pool.end_step(STREAM).unwrap();
    let _second = lease(&mut pool, b);
    assert_eq!(pool.step(STREAM, &batch, &mut ()), Err(OperandError::NotLeased { slot: slots[0] }));
}

/// A batch takes the room of adapters that are being read. Their reads end in host memory.
#[test]
fn a_batch_revokes_the_copy_of_a_read() {
    let (mut pool, [a, b]) = pool(1, 2);
    pool.prefetch(a).unwrap();
    run(&mut pool);
    pool.prefetch(b).unwrap();
    let read = pool.next_work().unwrap();
    assert_eq!(tiers(&pool, [a, b]), [Tier::Host, Tier::Source]);
    let _lease = pool.acquire(a, STREAM).unwrap();
    assert!(matches!(pool.next_work(), Some(Work::Copy { id, .. }) if id == a));
    pool.end(read, TIME).unwrap();
    assert_eq!(tiers(&pool, [a, b]), [Tier::Device, Tier::Host]);
}

#[test]
fn batches_pins_and_ids_are_those_of_a_pool() {
    let (mut pool, [a, b, c]) = pool(2, 3);
    assert!(matches!(pool.prepare(&[a, b, c], STREAM), Err(PoolError::TooLarge { adapters: 3, .. })));
    assert!(matches!(pool.prepare(&[a, b], STREAM), Err(PoolError::Loading { .. })));
    run(&mut pool);
    let leases = pool.prepare(&[b, a, b], STREAM).unwrap();
    assert_eq!(leases.iter().map(aril::pool::Lease::id).collect::<Vec<_>>(), [b, a, b]);
    assert_eq!(leases[0].slot(), leases[2].slot());
    assert_eq!(pool.residencies().iter().map(|residency| residency.leases).collect::<Vec<_>>(), [1, 2, 0]);
    drop(leases);
    pool.end_step(STREAM).unwrap();

    pool.pin(a).unwrap();
    assert!(matches!(pool.pin(b), Err(PoolError::Pinned { .. })));
    let _lease = pool.acquire(b, STREAM).unwrap();
    pool.prefetch(c).unwrap();
    run(&mut pool);
    assert_eq!(tiers(&pool, [a, b, c]), [Tier::Device, Tier::Device, Tier::Host]);
    pool.unpin(a).unwrap();
    pool.prefetch(c).unwrap();
    run(&mut pool);
    assert_eq!(tiers(&pool, [a, b, c]), [Tier::Host, Tier::Device, Tier::Device]);

    pool.unregister(c).unwrap();
    assert!(pool.residency(c).is_none());
    assert!(matches!(pool.acquire(c, STREAM), Err(PoolError::Unknown { id }) if id == c));
    assert_eq!(pool.snapshot().resident, 1, "nothing used it");
    assert!(matches!(pool.register(3 * BLOCK), Err(PoolError::TooLarge { what: "arena", .. })));
}

/// Neither a read nor a copy of another pool ends here, nor an adapter that no memory holds fits.
#[test]
fn what_is_not_the_pools_is_refused() {
    let (mut first, [a, b]) = pool(1, 2);
    let (mut second, [c, d]) = pool(1, 2);
    for (pool, [first, second]) in [(&mut first, [a, b]), (&mut second, [c, d])] {
        pool.prefetch(first).unwrap();
        run(pool);
        pool.prefetch(second).unwrap();
    }
    let (read, own) = (first.next_work().unwrap(), second.next_work().unwrap());
    let before = format!("{:?}", second.snapshot());
    assert!(matches!(second.end(read, TIME), Err(PoolError::Unknown { id }) if id == b));
    assert_eq!(format!("{:?}", second.snapshot()), before);
    second.end(own, TIME).unwrap();
    // Copies are numbered by each pool.
    let copying = || {
        let (mut pool, [a, b]) = pool(1, 2);
        for id in [a, b] {
            pool.prefetch(id).unwrap();
            run(&mut pool);
        }
        pool.prefetch(a).unwrap();
        let copy = pool.next_work().unwrap();
        (pool, a, copy)
    };
    let ((_, a, copy), (mut second, _, own)) = (copying(), copying());
    let numbers = [&copy, &own].map(|work| match work {
        Work::Copy { number, .. } => *number,
        work => panic!("{work:?}"),
    });
    assert_eq!(numbers[0], numbers[1]);
    assert!(matches!(second.end(copy, TIME), Err(PoolError::Unknown { id }) if id == a));
    assert_eq!(second.snapshot().copying, 1);
    second.end(own, TIME).unwrap();
    assert_eq!(second.snapshot().copying, 0);

    assert!(matches!(first.register(usize::MAX), Err(PoolError::TooLarge { bytes: usize::MAX, .. })));
    for num_slots in [0, MAX_SLOTS + 1, usize::MAX] {
        let refused = SimulatedPool::new(num_slots, PoolConfig::arena_bytes(BLOCK));
        assert!(matches!(refused, Err(PoolError::Plan(PlanError::Limit { what: "num_slots", .. }))));
    }
}
