//! A pool of a group: all ranks load into the same slots and evict the same adapters, whatever happens to one of them.

use std::{
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use aril::{
    DType, Slot,
    adapter::{Adapter, AdapterError, Tensor},
    cpu::{WeightTable, Workspace},
    error::{LoadError, OperandError, SlotError},
    group::{ChannelError, Group, GroupError, GroupPool, HostTable, InProcess, Message, Phase, Ranks},
    model::TpRank,
    pool::{PoolError, Source, Tier},
    routing::Batch,
};
use proptest::prelude::*;

use crate::{
    faults::{Fault, Faulty, silence},
    world::{INPUTS, NEVER, OUTPUTS, World, each, refused},
};

/// Slots of the tables.
const SLOTS: usize = 2;

/// Runs a pool on each rank, with these tables.
fn each_pool<T: HostTable + Clone + Sync + Send, O: Send>(
    tables: &[T],
    run: impl Fn(usize, GroupPool<InProcess, T>) -> O + Sync,
) -> Vec<O> {
    each(InProcess::group(tables.len(), NEVER), |rank, ranks| {
        run(rank, GroupPool::new(Group::new(ranks, tables[rank].clone()).unwrap()).unwrap())
    })
}

/// The adapter of a version, which adds its number.
fn version(world: &World, version: u64) -> Result<Adapter, AdapterError> {
    Ok(world.adapter(|_| number(version)))
}

#[expect(clippy::cast_precision_loss, reason = "a small number")]
fn number(version: u64) -> f32 {
    version as f32
}

/// Leases a version, and checks that its slot adds its number.
fn acquire(world: &World, pool: &mut GroupPool<InProcess, WeightTable>, number_: u64) -> Result<Slot, GroupError> {
    let slot = pool.acquire(number_, || version(world, number_))?;
    assert_eq!(world.delta_of(pool, slot), Ok(number(number_)));
    Ok(slot)
}

/// The one value of all ranks.
fn same<T: PartialEq + std::fmt::Debug>(of_ranks: Vec<T>) -> T {
    of_ranks
        .into_iter()
        .reduce(|first, other| {
            assert_eq!(first, other);
            first
        })
        .unwrap()
}

#[test]
fn the_least_recently_used_adapter_is_replaced() {
    let world = World::new(3);
    let tables: Vec<_> = (0..3).map(|rank| world.table(rank, SLOTS + 1)).collect();
    let slots = each_pool(&tables, |_, mut pool| {
        let slots = [1, 2].map(|version| acquire(&world, &mut pool, version).unwrap());
        (1..3).for_each(|version| pool.release(version).unwrap());
        // Version 1 is used last, so that version 2 goes.
        assert_eq!(acquire(&world, &mut pool, 1).unwrap(), slots[0]);
        assert_eq!(acquire(&world, &mut pool, 3).unwrap(), slots[1]);
        assert_eq!([1, 2, 3].map(|version| pool.slot(version)), [Some(slots[0]), None, Some(slots[1])]);
        // What is leased is not replaced.
        assert!(matches!(acquire(&world, &mut pool, 2), Err(GroupError::NoFreeSlot)));
        assert_eq!([1, 3].map(|version| acquire(&world, &mut pool, version).unwrap()), slots);
        // Leases are counted.
        pool.release(3).unwrap();
        assert!(matches!(acquire(&world, &mut pool, 2), Err(GroupError::NoFreeSlot)));
        pool.release(3).unwrap();
        assert!(matches!(pool.release(3), Err(GroupError::NotLeased { version: 3 })));
        assert!(matches!(pool.release(9), Err(GroupError::NotLeased { version: 9 })));
        assert_eq!(acquire(&world, &mut pool, 2).unwrap(), slots[1]);
        slots
    });
    assert_eq!(same(slots), [Slot::new(0), Slot::new(1)]);
}

/// One rank has room for a single adapter. All ranks evict for it, and it alone says that its arena is full.
#[test]
fn a_rank_whose_arena_is_fuller_decides_for_all() {
    let world = World::new(3);
    let tables: Vec<_> = [3, 1, 3].iter().enumerate().map(|(rank, &room)| world.table(rank, room)).collect();
    let slots = each_pool(&tables, |_, mut pool| {
        let first = acquire(&world, &mut pool, 1).unwrap();
        let error = acquire(&world, &mut pool, 2).unwrap_err();
        assert_eq!(refused(&error), [(1, Phase::Reserve)]);
        assert_eq!(world.delta_of(&pool, first), Ok(1.0));
        pool.release(1).unwrap();
        let second = acquire(&world, &mut pool, 2).unwrap();
        assert_eq!((pool.slot(1), pool.table().loaded().len()), (None, 1));
        [first, second]
    });
    assert_eq!(same(slots), [Slot::new(0), Slot::new(1)]);
}

/// It could never be loaded, so that nothing is evicted for it.
#[test]
fn an_adapter_too_large_for_one_rank_evicts_nothing() {
    let world = World::new(2);
    let tables = [world.table(0, 2), world.table(1, 0)];
    each_pool(&tables, |_, mut pool| {
        assert_eq!(refused(&acquire(&world, &mut pool, 1).unwrap_err()), [(1, Phase::Reserve)]);
    });
    let tables = [world.table(0, 4), world.table(1, 1)];
    each_pool(&tables, |_, mut pool| {
        let first = acquire(&world, &mut pool, 1).unwrap();
        pool.release(1).unwrap();
        let error = pool.acquire(2, || Ok(world.twice_as_large())).unwrap_err();
        assert_eq!(refused(&error), [(1, Phase::Reserve)]);
        assert_eq!(acquire(&world, &mut pool, 1).unwrap(), first);
    });
}

/// An adapter is opened once while it is in host memory, on each rank by itself. The least recently used one leaves first.
#[test]
fn an_adapter_in_host_memory_is_not_opened_again() {
    let world = World::new(2);
    let tables: Vec<_> = (0..2).map(|rank| world.table(rank, 1)).collect();
    each_pool(&tables, |rank, pool| {
        // The second rank has room for two adapters, and the first one for three.
        let mut pool = pool.with_host_tier((3 - rank) * world.adapter_bytes(rank), 2).unwrap();
        let opened = Mutex::new(Vec::new());
        let use_once = |pool: &mut GroupPool<InProcess, WeightTable>, number_: u64| {
            let open = || {
                opened.lock().unwrap().push(number_);
                version(&world, number_)
            };
            let slot = pool.acquire(number_, open).unwrap();
            assert_eq!(world.delta_of(pool, slot), Ok(number(number_)));
            pool.release(number_).unwrap();
        };
        for number_ in [1, 2, 1, 2, 3, 1] {
            use_once(&mut pool, number_);
        }
        // With room for two, version 1 left for version 3.
        assert_eq!(*opened.lock().unwrap(), if rank == 0 { vec![1, 2, 3] } else { vec![1, 2, 3, 1] });
        let tiers = [1, 2, 3, 4].map(|number_| pool.tier(number_));
        let second = if rank == 0 { Tier::Host } else { Tier::Source };
        assert_eq!(tiers, [Tier::Device, second, Tier::Host, Tier::Source]);
        assert_eq!(pool.host_usage().unwrap().largest_gap, 0);
    });
}

/// A prefetch of an adapter in host memory is a use of it.
#[test]
fn what_was_prefetched_last_leaves_host_memory_last() {
    const ROOM: u64 = 6;
    let world = World::new(1);
    each_pool(&[world.table(0, SLOTS)], |rank, pool| {
        let bytes = world.adapter_bytes(rank);
        let mut pool = pool.with_host_tier(usize::try_from(ROOM).unwrap() * bytes, 1).unwrap();
        let prefetch = |pool: &mut GroupPool<InProcess, WeightTable>, number_: u64| {
            let (adapter, table) = (Arc::new(version(&world, number_).unwrap()), pool.table());
            let source = Source::memory(adapter, table.model(), table.dtype()).unwrap();
            pool.prefetch(number_, source).unwrap();
        };
        let use_once = |pool: &mut GroupPool<InProcess, WeightTable>, number_: u64| {
            acquire(&world, pool, number_).unwrap();
            pool.release(number_).unwrap();
        };
        (1..=ROOM).for_each(|number_| use_once(&mut pool, number_));
        (1..=ROOM).rev().for_each(|number_| prefetch(&mut pool, number_));
        for more in 1..ROOM {
            prefetch(&mut pool, ROOM + more);
            use_once(&mut pool, ROOM + more);
            // The first ones' slots have been used again by then.
            for number_ in (1..=ROOM).filter(|_| more > 1) {
                let expected = if number_ > ROOM - more { Tier::Source } else { Tier::Host };
                assert_eq!(pool.tier(number_), expected, "version {number_} behind {more} more");
            }
        }
    });
}

/// A load from host memory is a use of it.
#[test]
fn what_was_loaded_last_leaves_host_memory_last() {
    let world = World::new(1);
    each_pool(&[world.table(0, SLOTS)], |rank, pool| {
        let mut pool = pool.with_host_tier(4 * world.adapter_bytes(rank), 1).unwrap();
        // All of the first four fit. The first two leave their slots, and are loaded again.
        for number_ in [1, 2, 3, 4, 1, 2, 5, 6] {
            acquire(&world, &mut pool, number_).unwrap();
            pool.release(number_).unwrap();
        }
        let tiers = [1, 2, 3, 4, 5, 6].map(|number_| pool.tier(number_));
        assert_eq!(tiers, [Tier::Host, Tier::Host, Tier::Source, Tier::Source, Tier::Device, Tier::Device]);
        assert_eq!(pool.snapshot().host, 4);
    });
}

/// An adapter that waits for room in the arena is kept in host memory, and one that never has room is not.
#[test]
fn a_refused_adapter_is_packed_if_it_may_fit_later() {
    let world = World::new(2);
    let tables = [world.table(0, 4), world.table(1, 1)];
    each_pool(&tables, |rank, pool| {
        let mut pool = pool.with_host_tier(8 * world.adapter_bytes(rank), 1).unwrap();
        acquire(&world, &mut pool, 1).unwrap();
        assert_eq!(refused(&acquire(&world, &mut pool, 2).unwrap_err()), [(1, Phase::Reserve)]);
        assert_eq!(pool.tier(2), Tier::Host);
        let error = pool.acquire(3, || Ok(world.twice_as_large())).unwrap_err();
        assert_eq!(refused(&error), [(1, Phase::Reserve)]);
        assert_eq!(pool.tier(3), [Tier::Host, Tier::Source][rank]);
    });
}

/// A prefetch reads beside steps, and needs no other rank. What it could not read fails the next load on all ranks, once.
#[test]
fn a_prefetch_fills_the_host_tier() {
    let world = World::new(2);
    let tables: Vec<_> = (0..2).map(|rank| world.table(rank, SLOTS)).collect();
    each_pool(&tables, |rank, pool| {
        let mut pool = pool.with_host_tier(4 * world.adapter_bytes(rank), 2).unwrap();
        let (model, dtype) = (pool.table().model().clone(), pool.table().dtype());
        let source = |adapter: Adapter| Source::memory(Arc::new(adapter), &model, dtype).unwrap();
        let end = Instant::now() + Duration::from_secs(30);
        while pool.tier(1) != Tier::Host {
            assert!(Instant::now() < end, "no prefetch takes note of the end of another");
            pool.prefetch(1, source(version(&world, 1).unwrap())).unwrap();
            thread::yield_now();
        }
        let slot = pool.acquire(1, || -> Result<Adapter, AdapterError> { unreachable!("it was prefetched") }).unwrap();
        assert_eq!(world.delta_of(&pool, slot), Ok(1.0));
        // Of the second rank alone.
        if rank == 1 {
            pool.prefetch(2, source(world.adapter(|_| f32::NAN))).unwrap();
        }
        assert_eq!(refused(&acquire(&world, &mut pool, 2).unwrap_err()), [(1, Phase::Plan)]);
        assert_eq!(world.delta_of(&pool, slot), Ok(1.0));
        assert_ne!(acquire(&world, &mut pool, 2).unwrap(), slot);
        assert_eq!(world.delta_of(&pool, slot), Ok(1.0));
        let larger = World::new(3);
        let other = Source::memory(Arc::new(larger.adapter(|_| 1.0)), larger.table(rank, 1).model(), dtype).unwrap();
        assert!(matches!(pool.prefetch(3, other), Err(LoadError::Adapter(_))));
    });
}

/// Weights that packing threads have to wait for until the lock is free, and how many have come.
struct Slow(Vec<u8>, Arc<(Mutex<()>, AtomicUsize)>);

impl AsRef<[u8]> for Slow {
    fn as_ref(&self) -> &[u8] {
        if thread::current().name().is_some_and(|name| name.starts_with("aril-packer")) {
            let (lock, come) = &*self.1;
            come.fetch_add(1, Ordering::SeqCst);
            drop(lock.lock().unwrap());
        }
        &self.0
    }
}

/// Slow prefetches, as many as are read at a time, do not delay a load.
#[test]
fn a_load_does_not_wait_for_prefetches() {
    let world = World::new(1);
    each_pool(&[world.table(0, SLOTS)], |_, pool| {
        let mut pool = pool.with_host_tier(4 * world.adapter_bytes(0), 1).unwrap();
        let (model, dtype) = (pool.table().model().clone(), pool.table().dtype());
        let gate = Arc::new((Mutex::new(()), AtomicUsize::new(0)));
        let slow = [("A", [1, INPUTS]), ("B", [OUTPUTS, 1])].map(|(side, shape)| {
            let ones = bytemuck::cast_slice(&vec![1.0_f32; shape[0] * shape[1]]).to_vec();
            let tensor = Tensor::new(DType::F32, shape, Slow(ones, Arc::clone(&gate))).unwrap();
            (format!("m.q.lora_{side}.weight"), tensor)
        });
        let slow = Adapter::from_tensors(r#"{"peft_type": "LORA", "lora_alpha": 1}"#, slow).unwrap();
        let source = Source::memory(Arc::new(slow), &model, dtype).unwrap();
        let held = gate.0.lock().unwrap();
        (1..3).for_each(|number_| pool.prefetch(number_, source.clone()).unwrap());
        let end = Instant::now() + Duration::from_secs(30);
        while gate.1.load(Ordering::SeqCst) < 2 {
            assert!(Instant::now() < end, "the prefetches are not packed");
            thread::yield_now();
        }
        let slot = acquire(&world, &mut pool, 3).unwrap();
        assert!(pool.is_reading(1) && pool.is_reading(2));
        drop(held);
        assert_ne!(pool.acquire_from(1, &source).unwrap(), slot);
    });
}

/// All ranks load from the source of one of them, each its own part. Files that have changed since are an error of the rank that reads.
#[test]
fn ranks_read_from_one_source() {
    let world = World::new(2);
    let tables: Vec<_> = (0..2).map(|rank| world.table(rank, SLOTS)).collect();
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let adapter = Arc::new(world.adapter(|rank| 1.0 + rank as f32));
    let source = Source::memory(adapter, tables[0].model(), DType::F32).unwrap();
    each_pool(&tables, |rank, pool| {
        let mut pool = pool.with_host_tier(4 * world.adapter_bytes(rank), 1).unwrap();
        assert!(!pool.is_reading(1) && !pool.wait(NEVER));
        (1..3).for_each(|number_| pool.prefetch(number_, source.clone()).unwrap());
        let end = Instant::now() + Duration::from_secs(30);
        while pool.is_reading(1) || pool.is_reading(2) {
            assert!(Instant::now() < end, "the reads end");
            pool.wait(Duration::from_secs(1));
        }
        assert!(!pool.wait(NEVER));
        // The third was not prefetched.
        for number_ in [1, 2, 3] {
            let slot = pool.acquire_from(number_, &source).unwrap();
            assert_eq!(world.delta_of(&pool, slot), Ok([1.0, 2.0][rank]));
            pool.release(number_).unwrap();
        }
        let snapshot = pool.snapshot();
        assert_eq!((snapshot.resident, snapshot.host, snapshot.leases), (SLOTS, 3, 0));
        let counters = snapshot.counters;
        assert_eq!((counters.misses, counters.copies, counters.evictions, counters.reads), (3, 3, 1, 3));
    });
}

/// A removed adapter leaves its slot and the host memory of all ranks, unless it has a lease.
#[test]
fn a_removed_adapter_leaves_all_memory() {
    let world = World::new(2);
    let tables: Vec<_> = (0..2).map(|rank| world.table(rank, SLOTS)).collect();
    let slots = each_pool(&tables, |rank, pool| {
        let mut pool = pool.with_host_tier(2 * world.adapter_bytes(rank), 1).unwrap();
        let slot = acquire(&world, &mut pool, 1).unwrap();
        assert!(matches!(pool.remove(1), Err(GroupError::Leased { version: 1 })));
        assert_eq!(world.delta_of(&pool, slot), Ok(1.0));
        pool.release(1).unwrap();
        pool.remove(1).unwrap();
        pool.remove(9).unwrap();
        assert_eq!((pool.slot(1), pool.tier(1)), (None, Tier::Source));
        let snapshot = pool.snapshot();
        assert_eq!((snapshot.device_memory.used, snapshot.host_memory.used, snapshot.resident), (0, 0, 0));
        (slot, acquire(&world, &mut pool, 2).unwrap())
    });
    let (first, second) = same(slots);
    assert_eq!(first, second);
}

/// A channel whose rank leaves the group instead of some exchange.
struct Leaving {
    tp: TpRank,
    channel: Option<InProcess>,
    exchanges: usize,
}

impl Ranks for Leaving {
    fn tp(&self) -> TpRank {
        self.tp
    }

    fn all_gather(&mut self, message: &Message) -> Result<Vec<Message>, ChannelError> {
        let gone = || ChannelError { ranks: vec![self.tp.rank()], reason: "it has left".to_owned() };
        let left = self.exchanges == 0;
        self.exchanges = self.exchanges.saturating_sub(1);
        if left {
            self.channel = None;
        }
        self.channel.as_mut().map_or_else(|| Err(gone()), |channel| channel.all_gather(message))
    }
}

/// A rank vanishes while the slot is chosen, before the vote, or before the commit. No rank has the new adapter.
#[test]
fn a_rank_that_vanishes_leaves_nobody_with_half_an_adapter() {
    let world = World::new(3);
    for (exchanges, has_host) in (0..3).flat_map(|exchanges| [(exchanges, false), (exchanges, true)]) {
        let tables: Vec<_> = (0..3).map(|rank| world.table(rank, SLOTS)).collect();
        // The first load takes three exchanges.
        let leaving = |rank| if rank == 1 { 3 + exchanges } else { usize::MAX };
        let ranks = InProcess::group(3, NEVER).into_iter().map(|channel| Leaving {
            tp: channel.tp(),
            exchanges: leaving(channel.tp().rank()),
            channel: Some(channel),
        });
        each(ranks.collect(), |rank, ranks| {
            let mut pool = GroupPool::new(Group::new(ranks, tables[rank].clone()).unwrap()).unwrap();
            if has_host {
                pool = pool.with_host_tier(4 * world.adapter_bytes(rank), 2).unwrap();
            }
            let first = pool.acquire(1, || version(&world, 1)).unwrap();
            let error = pool.acquire(2, || version(&world, 2)).unwrap_err();
            let is_expected = match exchanges {
                0 | 1 => matches!(error, GroupError::Channel(_)),
                _ => matches!(error, GroupError::Torn { not_emptied: None, .. }),
            };
            assert!(is_expected, "{error}");
            let other = Slot::new(u16::from(first == Slot::new(0)));
            assert_eq!(world.delta_of(&pool, first), Ok(1.0));
            assert!(pool.table().get(other).is_none());
            assert_eq!((pool.slot(1), pool.slot(2)), (Some(first), None));
            assert!(matches!(pool.acquire(2, || version(&world, 2)), Err(GroupError::Channel(_))));
            // What is loaded needs no exchange.
            assert_eq!(pool.acquire(1, || version(&world, 1)).unwrap(), first);
        });
    }
}

/// A rank fails in each phase, by an error or a panic. The adapters that all ranks have stay the same, and the next load succeeds.
#[test]
fn a_rank_that_fails_fails_all() {
    [false, true].into_iter().for_each(each_fault_fails_all);
}

fn each_fault_fails_all(has_host: bool) {
    silence();
    let world = World::new(3);
    let phases = [Phase::Plan, Phase::Reserve, Phase::Fill, Phase::Commit];
    for fault in phases.map(Fault::Error).into_iter().chain(phases.map(Fault::Panic)) {
        let fault_of = |rank: usize| Arc::new(Mutex::new((rank == 1).then_some(fault)));
        let later = |rank| (Arc::new(Mutex::new(None)), fault_of(rank));
        let tables: Vec<_> = (0..3).map(|rank| (world.table(rank, SLOTS + 1), later(rank))).collect();
        each(InProcess::group(3, NEVER), |rank, ranks| {
            let (table, (now, later)) = &tables[rank];
            let faulty = Faulty::new(table.clone(), Arc::clone(now));
            let mut pool = GroupPool::new(Group::new(ranks, faulty.clone()).unwrap()).unwrap();
            let table = faulty.owner.get().unwrap();
            if has_host {
                pool = pool.with_host_tier(3 * world.adapter_bytes(rank), 2).unwrap();
            }
            let slots = [1, 2].map(|number| pool.acquire(number, || version(&world, number)).unwrap());
            pool.release(1).unwrap();
            // The slot of version 1 is to be replaced.
            *now.lock().unwrap() = later.lock().unwrap().take();
            let open = || faulty.enter(Phase::Plan).map_err(|_| AdapterError::Empty).and_then(|()| version(&world, 3));
            let failed = panic::catch_unwind(AssertUnwindSafe(|| pool.acquire(3, open)));
            let is_torn = matches!(fault, Fault::Error(Phase::Commit) | Fault::Panic(Phase::Commit));
            match failed {
                Err(_) => assert!(rank == 1 && matches!(fault, Fault::Panic(_))),
                Ok(Err(GroupError::Torn { slot, .. })) => assert!(is_torn && slot == slots[0]),
                Ok(Err(error)) => assert_eq!(refused(&error).iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [1]),
                Ok(Ok(slot)) => panic!("{slot} after {fault:?}"),
            }
            // The previous adapter is lost if a rank did not commit, and serves otherwise.
            assert_eq!(pool.slot(1), (!is_torn).then_some(slots[0]), "{fault:?}");
            assert_eq!([0, 1].map(|slot| world.delta(table, slots[slot])), [if is_torn { 0.0 } else { 1.0 }, 2.0]);
            assert_eq!(pool.acquire(3, || version(&world, 3)).unwrap(), slots[0]);
            assert_eq!(slots.map(|slot| world.delta(table, slot)), [3.0, 2.0]);
            assert_eq!([1, 2, 3].map(|number| pool.slot(number)), [None, Some(slots[1]), Some(slots[0])]);
        });
    }
}

/// A call on all ranks: a request for a version, or the end of one.
#[derive(Clone, Copy, Debug)]
enum Call {
    Acquire(u64),
    Release(u64),
    /// On some ranks alone.
    Prefetch(u64),
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let version = || 1..6_u64;
    let call = prop_oneof![
        3 => version().prop_map(Call::Acquire),
        3 => version().prop_map(Call::Release),
        1 => version().prop_map(Call::Prefetch),
    ];
    prop::collection::vec(call, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Any calls on ranks of any room and any host tier, against a list of versions by use. A rank that is late makes no difference,
    /// nor what its host tier holds.
    #[test]
    fn all_ranks_decide_the_same(
        calls in calls(),
        rooms in prop::collection::vec(1..4_usize, 2..5),
        hosts in prop::collection::vec(prop::option::of(0..4_usize), 4),
    ) {
        let world = World::new(rooms.len());
        let tables: Vec<_> = rooms.iter().enumerate().map(|(rank, &room)| world.table(rank, room)).collect();
        let room = rooms.iter().copied().min().unwrap().min(SLOTS);
        let slots = each_pool(&tables, |rank, mut pool| {
            if let Some(room) = hosts[rank] {
                pool = pool.with_host_tier(room * world.adapter_bytes(rank), 1).unwrap();
            }
            // From the least recently used one on: version and leases.
            let mut expected: Vec<(u64, usize)> = Vec::new();
            let mut slots = Vec::new();
            for (index, &call) in calls.iter().enumerate() {
                if (index + rank) % 7 == 0 {
                    thread::yield_now();
                }
                match call {
                    Call::Acquire(number) => {
                        let there = expected.iter().position(|(there, _)| *there == number);
                        let is_idle = |(_, leases): &(u64, usize)| *leases == 0;
                        let victim = expected.iter().position(is_idle);
                        let leases = match (there, victim) {
                            (Some(there), _) => expected.remove(there).1,
                            (None, _) if expected.len() < room => 0,
                            (None, Some(victim)) => expected.remove(victim).1,
                            (None, None) => {
                                acquire(&world, &mut pool, number).unwrap_err();
                                continue;
                            }
                        };
                        slots.push(acquire(&world, &mut pool, number).unwrap());
                        expected.push((number, leases + 1));
                    }
                    Call::Prefetch(number) => if (index + rank) % 2 == 0 {
                        let table = pool.table();
                        let adapter = Arc::new(version(&world, number).unwrap());
                        let source = Source::memory(adapter, table.model(), table.dtype()).unwrap();
                        pool.prefetch(number, source).unwrap();
                    },
                    Call::Release(number) => {
                        let lease = expected.iter_mut().find(|(there, leases)| *there == number && *leases > 0);
                        assert_eq!(pool.release(number).is_ok(), lease.is_some());
                        lease.into_iter().for_each(|(_, leases)| *leases -= 1);
                    }
                }
                let loaded = (1..6).filter(|&number| pool.slot(number).is_some()).count();
                assert_eq!(loaded, expected.len());
                for &(number_, leases) in &expected {
                    let slot = pool.slot(number_).unwrap();
                    let added = if leases > 0 { Ok(number(number_)) } else { Err(OperandError::NotLeased { slot }) };
                    assert_eq!(world.delta_of(&pool, slot), added);
                }
            }
            slots
        });
        same(slots);
    }
}

/// A step of a pool names leased slots alone, on every rank.
#[test]
fn a_step_refuses_slots_that_were_not_acquired_or_are_released() {
    let world = World::new(2);
    let tables: Vec<_> = (0..2).map(|rank| world.table(rank, SLOTS)).collect();
    each_pool(&tables, |_, mut pool| {
        let is_refused = |pool: &GroupPool<InProcess, WeightTable>, slot| {
            assert_eq!(world.delta_of(pool, slot), Err(OperandError::NotLeased { slot }));
        };
        is_refused(&pool, Slot::new(0));
        let slot = acquire(&world, &mut pool, 1).unwrap();
        is_refused(&pool, Slot::new(1));
        assert_eq!(acquire(&world, &mut pool, 1).unwrap(), slot);
        pool.release(1).unwrap();
        assert_eq!(world.delta_of(&pool, slot), Ok(1.0));
        pool.release(1).unwrap();
        // It is still there.
        assert_eq!(pool.slot(1), Some(slot));
        is_refused(&pool, slot);
        assert_eq!(world.delta_of(&pool, Slot::BASE), Ok(0.0));
    });
}

/// A pool's table is its own, whichever handle is used and whenever it was made. A table with adapters or of another pool is refused.
#[test]
fn the_pool_alone_changes_its_table() {
    let world = World::new(1);
    let alone = || InProcess::group(1, NEVER).pop().unwrap();
    let table = world.table(0, SLOTS + 1);
    let adapter = version(&world, 7).unwrap();
    let image = adapter.plan(table.model(), DType::F32).unwrap();
    let written = table.reserve(&image).unwrap().fill(&image, &mut table.staging().unwrap()).unwrap();
    let mut beside = Group::new(alone(), table.clone()).unwrap();
    let mut pool = GroupPool::new(Group::new(alone(), table.clone()).unwrap()).unwrap();
    let slot = acquire(&world, &mut pool, 1).unwrap();
    let is_pooled = |error: LoadError| assert!(matches!(error, LoadError::Slot(SlotError::Pooled)), "{error}");
    for handle in [&table, pool.table()] {
        is_pooled(handle.load(slot, &image).map(drop).unwrap_err());
        is_pooled(handle.reserve(&image).map(drop).unwrap_err());
        is_pooled(handle.unload(slot).unwrap_err());
        assert!(!handle.fits(&image));
        let (slots, mut workspace) = ([Slot::BASE], Workspace::default());
        assert_eq!(handle.step(&Batch::new(&slots), &mut workspace).unwrap_err(), OperandError::Pooled);
    }
    is_pooled(table.commit(slot, written).map(drop).unwrap_err());
    assert_eq!(refused(&beside.load(slot, 7, || Ok(&adapter)).unwrap_err()), [(0, Phase::Reserve)]);
    assert_eq!(world.delta_of(&pool, slot), Ok(1.0));

    let made = |table: &WeightTable| GroupPool::new(Group::new(alone(), table.clone()).unwrap());
    assert!(matches!(made(&table), Err(PoolError::Slot(SlotError::Pooled))));
    let loaded = world.table(0, SLOTS);
    loaded.load(Slot::new(1), &image).unwrap();
    assert!(matches!(made(&loaded), Err(PoolError::Slot(SlotError::Loaded { adapters: 1 }))));
    assert_eq!(world.delta(&loaded, Slot::new(1)), 7.0);
    loaded.unload(Slot::new(1)).unwrap();
    made(&loaded).unwrap();
}
