//! A pool on the ranks of a group: an adapter is in the same slot on all ranks or on none, whatever happens to one of them.

use std::{
    mem,
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use aril::{
    DType, Slot,
    cpu::{AdapterPool, Tiers},
    error::{LoadError, OperandError, SlotError},
    group::{ChannelError, GroupError, GroupPool, InProcess, Message, Phase, Ranks},
    model::TpRank,
    plan::Capacity,
    pool::{AdapterId, Lease, Load, PoolConfig, PoolError, Source, StreamId, Tier, Version},
};
use proptest::prelude::*;

use crate::{
    common::adapters::{self, Lora},
    world::{INPUTS, NEVER, OUTPUTS, World, each, refused},
};

pub(crate) const STREAM: StreamId = StreamId::FIRST;
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

pub(crate) type Pool<R = InProcess> = GroupPool<R, Tiers>;

/// Runs a pool on each rank of a group, with room for these numbers of adapters on the device.
fn each_pool<O: Send>(world: &World, rooms: &[usize], run: impl Fn(usize, Pool) -> O + Sync) -> Vec<O> {
    each(InProcess::group(world.size, NEVER), |rank, ranks| run(rank, world.pool(ranks, rooms[rank], 8)))
}

/// An adapter that adds `values` on the ranks, as the source of a rank.
pub(crate) fn source(world: &World, rank: usize, values: impl Fn(usize) -> f32) -> Source {
    Source::memory(Arc::new(world.adapter(values)), &world.model(rank), DType::F32).unwrap()
}

/// Registers an adapter that adds `value` on all ranks.
fn register<R: Ranks>(world: &World, pool: &mut Pool<R>, rank: usize, value: f32) -> AdapterId {
    pool.register(Ok(source(world, rank, |_| value))).unwrap()
}

/// Leases a batch, once its adapters have been read.
pub(crate) fn prepare<R: Ranks>(pool: &mut Pool<R>, ids: &[AdapterId]) -> Result<Vec<Lease>, PoolError> {
    loop {
        match pool.prepare(ids, STREAM) {
            Err(PoolError::Loading { .. }) => drop(pool.wait(LIMIT)),
            result => return result,
        }
    }
}

pub(crate) fn acquire<R: Ranks>(pool: &mut Pool<R>, id: AdapterId) -> Result<Lease, PoolError> {
    Ok(prepare(pool, &[id])?.remove(0))
}

pub(crate) fn release<R: Ranks>(pool: &mut Pool<R>, lease: Lease) {
    drop(lease);
    pool.end_step(STREAM).unwrap();
}

fn tiers<R: Ranks>(pool: &Pool<R>, ids: &[AdapterId]) -> Vec<Tier> {
    ids.iter().map(|&id| pool.residency(id).unwrap().tier).collect()
}

/// Why no rank has an adapter.
pub(crate) fn group_error(error: &PoolError) -> &GroupError {
    let error = match error {
        PoolError::Failed { error, .. } => error,
        PoolError::Load(error) => error,
        other => panic!("{other}"),
    };
    let LoadError::Group(error) = error else { panic!("{error}") };
    error
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

/// One rank has room for a single adapter, so that all have.
#[test]
fn the_smallest_rank_decides_for_all() {
    let world = World::new(3);
    each_pool(&world, &[3, 1, 3], |rank, mut pool| {
        let [first, second] = [1.0, 2.0].map(|value| register(&world, &mut pool, rank, value));
        assert!(matches!(prepare(&mut pool, &[first, second]), Err(PoolError::TooLarge { adapters: 2, .. })));
        let lease = acquire(&mut pool, first).unwrap();
        assert!(matches!(acquire(&mut pool, second), Err(PoolError::Full)));
        assert_eq!(world.delta_of(&pool, lease.slot()), Ok(1.0));
        release(&mut pool, lease);
        let lease = acquire(&mut pool, second).unwrap();
        assert_eq!((world.delta_of(&pool, lease.slot()), pool.snapshot().resident), (Ok(2.0), 1));
    });
}

/// On every rank, also if its own slot is leased to another adapter.
#[test]
fn a_step_refuses_the_slot_of_an_ended_lease_and_of_another_rank() {
    let world = World::new(2);
    let slots = Mutex::new([Slot::BASE; 2]);
    let meeting = Barrier::new(2);
    each_pool(&world, &[1; 2], |rank, mut pool| {
        let ids = [1.0, 2.0].map(|value| register(&world, &mut pool, rank, value));
        let lease = acquire(&mut pool, ids[0]).unwrap();
        let ended = lease.slot();
        release(&mut pool, lease);
        let lease = acquire(&mut pool, ids[1]).unwrap();
        assert_eq!(lease.slot().index(), ended.index());
        slots.lock().unwrap()[rank] = lease.slot();
        meeting.wait();
        let of_other = slots.lock().unwrap()[1 - rank];
        assert_eq!(world.delta_of(&pool, lease.slot()), Ok(2.0));
        for slot in [ended, of_other] {
            assert_eq!(world.delta_of(&pool, slot), Err(OperandError::NotLeased { slot }));
        }
    });
}

/// All ranks load from the source of one of them, each its own part. Pins and loads are those of any pool.
#[test]
fn ranks_read_from_one_source() {
    let world = World::new(2);
    each_pool(&world, &[2; 2], |rank, mut pool| {
        let of_first = source(&world, 0, |rank| 1.0 + rank as f32);
        let ids = [(); 2].map(|()| pool.register(Ok(of_first.clone())).unwrap());
        let load = pool.prefetch(ids[0]).unwrap();
        pool.pin(ids[0]).unwrap();
        assert!(matches!(pool.pin(ids[1]), Err(PoolError::Pinned { .. })));
        assert!(pool.wait_for(&load, LIMIT).unwrap());
        assert_eq!(tiers(&pool, &ids), [Tier::Device, Tier::Source]);
        let leases = prepare(&mut pool, &ids).unwrap();
        for lease in &leases {
            assert_eq!(world.delta_of(&pool, lease.slot()), Ok([1.0, 2.0][rank]));
        }
        pool.unregister(ids[0]).unwrap();
        assert_eq!(world.delta_of(&pool, leases[0].slot()), Ok([1.0, 2.0][rank]));
        drop(leases);
        pool.unregister(ids[1]).unwrap();
        pool.end_step(STREAM).unwrap();
        let snapshot = pool.snapshot();
        assert_eq!((snapshot.device_memory.used, snapshot.host_memory.used, snapshot.adapters), (0, 0, 0));
    });
}

/// Weights of an adapter that adds 1, whose reader panics.
struct Panics(Vec<u8>);

impl AsRef<[u8]> for Panics {
    fn as_ref(&self) -> &[u8] {
        let is_reader = thread::current().name().is_some_and(|name| name.starts_with("aril-"));
        assert!(!is_reader, "on purpose");
        &self.0
    }
}

/// An adapter that a rank cannot read fails on all ranks with its reason, and takes nothing from others. So does one whose reader panics.
#[test]
fn an_adapter_that_one_rank_cannot_read_is_loaded_by_none() {
    let world = World::new(3);
    let module = Lora::adding("m.q", [INPUTS, 3 * OUTPUTS], 1, 1.0);
    let panicking = || adapters::owned_by(std::slice::from_ref(&module), |_, bytes| Panics(bytes));
    for panics in [false, true] {
        // A slot for each, as what is being copied is not replaced.
        let reasons = each_pool(&world, &[3; 3], |rank, mut pool| {
            let good = register(&world, &mut pool, rank, 1.0);
            let kept = acquire(&mut pool, good).unwrap();
            let bad = match rank == 1 && panics {
                true => Source::memory(Arc::new(panicking()), &world.model(rank), DType::F32).unwrap(),
                false => source(&world, rank, |rank| if rank == 1 && !panics { f32::NAN } else { 2.0 }),
            };
            let bad = pool.register(Ok(bad)).unwrap();
            // Another read beside it.
            let other = register(&world, &mut pool, rank, 3.0);
            let loads = [bad, other].map(|id| pool.prefetch(id).unwrap());
            let error = pool.wait_for(&loads[0], LIMIT).unwrap_err();
            assert_eq!(acquire(&mut pool, bad).unwrap_err().to_string(), error.to_string());
            assert!(pool.wait_for(&loads[1], LIMIT).unwrap());
            let GroupError::Refused { own, .. } = group_error(&error) else { panic!("{error}") };
            assert_eq!((refused(group_error(&error)), own.is_some()), (vec![(1, Phase::Fill)], rank == 1));
            assert_eq!((tiers(&pool, &[bad]), pool.snapshot().counters.failures), (vec![Tier::Source], 1));
            let lease = acquire(&mut pool, other).unwrap();
            assert_eq!([&kept, &lease].map(|lease| world.delta_of(&pool, lease.slot())), [Ok(1.0), Ok(3.0)]);
            // It fails again, and its memory is free.
            release(&mut pool, lease);
            pool.retry(bad).unwrap();
            assert!(matches!(acquire(&mut pool, bad), Err(PoolError::Failed { .. })));
            let host = pool.snapshot();
            assert_eq!(host.host_memory.used, 2 * host.host_memory.used / host.host);
            error.to_string().split_once(' ').unwrap().1.split_once(' ').unwrap().1.to_owned()
        });
        let reason = same(reasons);
        assert!(reason.contains("rank 1 could not fill: "), "{reason}");
        assert_eq!(reason.contains("panicked: on purpose"), panics, "{reason}");
    }
}

/// An adapter that does not match the table of a rank is registered by none.
#[test]
fn an_adapter_that_one_rank_cannot_plan_is_registered_by_none() {
    let world = World::new(2);
    each_pool(&world, &[2; 2], |rank, mut pool| {
        let bad = match rank {
            0 => source(&world, rank, |_| 1.0),
            _ => Source::memory(Arc::new(world.adapter(|_| 1.0)), &world.model(rank), DType::BF16).unwrap(),
        };
        let error = pool.register(Ok(bad)).unwrap_err();
        assert_eq!(refused(group_error(&error)), [(1, Phase::Plan)]);
        assert_eq!(pool.snapshot().adapters, 0);
        let good = register(&world, &mut pool, rank, 5.0);
        let lease = acquire(&mut pool, good).unwrap();
        assert_eq!(world.delta_of(&pool, lease.slot()), Ok(5.0));
    });
}

/// The only rank of a group has its own errors.
#[test]
fn errors_of_a_group_of_one_are_its_own() {
    let world = World::new(1);
    each_pool(&world, &[2], |rank, mut pool| {
        let unplanned = Source::memory(Arc::new(world.adapter(|_| 1.0)), &world.model(rank), DType::BF16).unwrap();
        let error = pool.register(Ok(unplanned)).unwrap_err().to_string();
        assert!(!error.contains("rank 0"), "{error}");
        let unread = pool.register(Ok(source(&world, rank, |_| f32::NAN))).unwrap();
        let load = pool.prefetch(unread).unwrap();
        let error = pool.wait_for(&load, LIMIT).unwrap_err().to_string();
        assert!(!error.contains("rank 0"), "{error}");
    });
}

/// Pools that do not belong together.
#[test]
fn a_group_has_pools_of_its_ranks_without_adapters() {
    let world = World::new(2);
    let pool = |rank: usize, slots: usize| {
        let capacity = Capacity::tokens(1).slots(slots).rank(8);
        AdapterPool::new(&world.model(rank), DType::F32, capacity, PoolConfig::arena_bytes(1 << 16)).unwrap()
    };
    each(InProcess::group(2, NEVER), |rank, ranks| {
        let error = GroupPool::new(ranks, pool(1 - rank, 2)).map(drop).unwrap_err();
        assert!(matches!(group_error(&error), GroupError::OtherRank { .. }), "{error}");
    });
    each(InProcess::group(2, NEVER), |rank, ranks| {
        let error = GroupPool::new(ranks, pool(rank, 2 + rank)).map(drop).unwrap_err();
        assert!(error.to_string().contains("rank 1 makes a pool of 3 slots"), "{error}");
    });
    let alone = World::new(1);
    let group = |pool| GroupPool::new(InProcess::group(1, NEVER).remove(0), pool).map(drop);
    let pool = || {
        let capacity = Capacity::tokens(1).slots(2).rank(8);
        AdapterPool::new(&alone.model(0), DType::F32, capacity, PoolConfig::arena_bytes(1 << 16)).unwrap()
    };
    let is_refused = |pool| {
        let error = group(pool).unwrap_err();
        assert!(matches!(error, PoolError::Slot(SlotError::Loaded { adapters: 1 })), "{error}");
    };
    let source = || source(&alone, 0, |_| 1.0);
    let mut registered = pool();
    registered.register(source()).unwrap();
    is_refused(registered);
    // One that is unregistered, and still has memory.
    let mut leased = pool();
    let id = leased.register(source()).unwrap();
    let load = leased.prefetch(id).unwrap();
    assert!(leased.wait_for(&load, LIMIT).unwrap());
    let lease = leased.acquire(id, STREAM).unwrap();
    leased.unregister(id).unwrap();
    is_refused(leased);
    drop(lease);
    // Whose version was dropped, is gone.
    let mut emptied = pool();
    let version = emptied.load(source()).unwrap();
    assert!(emptied.wait_for(version.load(), LIMIT).unwrap());
    drop(version);
    group(emptied).unwrap();
}

/// Ranks that make different calls hear of it at their next exchange, and load nothing more. What is leased serves.
#[test]
fn ranks_that_make_different_calls_are_told() {
    let world = World::new(2);
    each_pool(&world, &[2; 2], |rank, mut pool| {
        let ids = [1.0, 2.0].map(|value| register(&world, &mut pool, rank, value));
        let lease = acquire(&mut pool, ids[0]).unwrap();
        if rank == 1 {
            pool.pin(ids[0]).unwrap();
        }
        let error = acquire(&mut pool, ids[1]).unwrap_err();
        assert!(matches!(group_error(&error), GroupError::Disagreement { ranks } if ranks.len() == 2), "{error}");
        assert_eq!(world.delta_of(&pool, lease.slot()), Ok(1.0));
        for result in [pool.end_step(STREAM), pool.prefetch(ids[1]).map(drop), pool.acquire(ids[0], STREAM).map(drop)] {
            assert!(matches!(group_error(&result.unwrap_err()), GroupError::Disagreement { .. }));
        }
        assert_eq!(world.delta_of(&pool, lease.slot()), Ok(1.0));
    });
}

/// A channel whose rank leaves the group instead of some exchange.
struct Leaving {
    tp: TpRank,
    channel: Option<InProcess>,
    exchanges: usize,
    /// Exchanges so far.
    made: Arc<AtomicUsize>,
}

impl Ranks for Leaving {
    fn tp(&self) -> TpRank {
        self.tp
    }

    fn all_gather(&mut self, message: &Message) -> Result<Vec<Message>, ChannelError> {
        let gone = || ChannelError { ranks: vec![self.tp.rank()], reason: "it has left".to_owned() };
        if self.made.fetch_add(1, Ordering::SeqCst) == self.exchanges {
            self.channel = None;
        }
        self.channel.as_mut().map_or_else(|| Err(gone()), |channel| channel.all_gather(message))
    }
}

/// A rank vanishes in any of the exchanges. Whoever has a lease has the adapter; all others get an error, and nobody waits.
#[test]
fn a_rank_that_vanishes_leaves_nobody_with_half_an_adapter() {
    let world = World::new(3);
    for exchanges in 0.. {
        let made = Arc::new(AtomicUsize::new(0));
        let ranks = InProcess::group(3, NEVER).into_iter().map(|channel| {
            let tp = channel.tp();
            let leaving = tp.rank() == 1;
            let made = if leaving { Arc::clone(&made) } else { Arc::default() };
            // The first is that of the pool itself.
            Leaving { tp, channel: Some(channel), exchanges: if leaving { 1 + exchanges } else { usize::MAX }, made }
        });
        let leases = each(ranks.collect(), |rank, ranks| {
            let mut pool = world.pool(ranks, 2, 8);
            let mut leased = 0;
            let mut run = || {
                let mut held = Vec::new();
                for value in [1.0, 2.0] {
                    let id = pool.register(Ok(source(&world, rank, |_| value)))?;
                    let lease = acquire(&mut pool, id)?;
                    assert_eq!(world.delta_of(&pool, lease.slot()), Ok(value));
                    held.push(lease);
                    leased += 1;
                }
                Ok::<(), PoolError>(())
            };
            match run() {
                Ok(()) => {}
                Err(error) => assert!(matches!(group_error(&error), GroupError::Channel(_)), "{error}"),
            }
            leased
        });
        // The last exchange of a lease may reach a part of the ranks.
        assert!(leases.iter().max().unwrap() - leases.iter().min().unwrap() <= 1, "{leases:?}");
        if made.load(Ordering::SeqCst) <= 1 + exchanges {
            assert_eq!(leases, [2; 3]);
            break;
        }
    }
}

/// A channel that ranks which hang have one day stopped to use: from then on, the others wait for them up to a time limit.
struct Hanging {
    channel: InProcess,
    later: InProcess,
    hangs: Arc<AtomicBool>,
}

impl Ranks for Hanging {
    fn tp(&self) -> TpRank {
        self.channel.tp()
    }

    fn all_gather(&mut self, message: &Message) -> Result<Vec<Message>, ChannelError> {
        if self.hangs.load(Ordering::SeqCst) { &mut self.later } else { &mut self.channel }.all_gather(message)
    }
}

/// A rank that does nothing ends the wait of the others at the time limit.
#[test]
fn a_rank_that_hangs_does_not_hang_the_others() {
    let world = World::new(2);
    let (hangs, done) = (Arc::new(AtomicBool::new(false)), Barrier::new(2));
    let groups = [NEVER, Duration::from_millis(300)].map(|limit| InProcess::group(2, limit));
    let [channels, later] = groups.map(Vec::into_iter);
    let ranks = channels.zip(later).map(|(channel, later)| Hanging { channel, later, hangs: Arc::clone(&hangs) });
    each(ranks.collect(), |rank, ranks| {
        let mut pool = world.pool(ranks, 2, 8);
        let id = register(&world, &mut pool, rank, 1.0);
        done.wait();
        hangs.store(true, Ordering::SeqCst);
        if rank == 1 {
            // Until the other has given up.
            done.wait();
        }
        let error = acquire(&mut pool, id).unwrap_err();
        assert!(matches!(group_error(&error), GroupError::Channel(error) if error.ranks == [1]), "{error}");
        if rank == 0 {
            done.wait();
        }
    });
}

/// A call on all ranks.
#[derive(Clone, Debug)]
enum Call {
    Register { is_bad: bool },
    Unregister(usize),
    Prepare(Vec<usize>),
    Prefetch(usize),
    Retry(usize),
    Pin(usize, bool),
    Drop(usize),
    EndStep,
    Wait,
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let index = || 0..8_usize;
    let call = prop_oneof![
        2 => prop::bool::weighted(0.2).prop_map(|is_bad| Call::Register { is_bad }),
        1 => index().prop_map(Call::Unregister),
        6 => prop::collection::vec(index(), 1..3).prop_map(Call::Prepare),
        2 => index().prop_map(Call::Prefetch),
        1 => index().prop_map(Call::Retry),
        1 => (index(), any::<bool>()).prop_map(|(index, is_pinned)| Call::Pin(index, is_pinned)),
        3 => index().prop_map(Call::Drop),
        4 => Just(Call::EndStep),
        3 => Just(Call::Wait),
    ];
    prop::collection::vec(call, 1..60)
}

/// What came of a call, without ids, which differ between ranks.
fn outcome<T: std::fmt::Debug>(result: Result<T, PoolError>) -> String {
    match result {
        Ok(value) => format!("{value:?}"),
        Err(error) => {
            let text = format!("{error:?}");
            text.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
        }
    }
}

/// What is known of a load.
fn ended(load: Result<Load, PoolError>) -> String {
    outcome(load.and_then(|load| load.has_ended()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// Any calls on ranks of any room, of which some cannot read some adapters, and are late. All ranks answer the same, and a step has what
    /// was leased.
    #[test]
    fn all_ranks_decide_the_same(calls in calls(), rooms in prop::collection::vec((1..4_usize, 1..5_usize), 2..5)) {
        decide_the_same(&calls, &rooms);
    }
}

/// A read that begins where something else has ended is waited for, too.
#[test]
fn a_wait_begins_the_reads_that_were_held_up() {
    let registered = [true, false].map(|is_bad| Call::Register { is_bad });
    let calls: Vec<_> = registered.into_iter().chain([Call::Prefetch(2), Call::Prepare(vec![1])]).collect();
    for _ in 0..20 {
        decide_the_same(&calls, &[(1, 2), (3, 2)]);
    }
}

fn decide_the_same(calls: &[Call], rooms: &[(usize, usize)]) {
    let world = World::new(rooms.len());
    let answers = each(InProcess::group(world.size, NEVER), |rank, ranks| {
        let (device, host) = rooms[rank];
        let mut pool = world.pool(ranks, device, host);
        let (mut ids, mut held, mut answers) = (Vec::new(), Vec::<(Lease, f32)>::new(), Vec::new());
        let mut versions = Vec::<Version>::new();
        for (index, call) in calls.iter().enumerate() {
            if (index + rank) % 7 == 0 {
                thread::yield_now();
            }
            let of = |index: usize| ids.get(index % ids.len().max(1)).copied();
            let answer = match call {
                Call::Register { is_bad } => {
                    let value = index as f32 + 1.0;
                    let bad_rank = index % world.size;
                    let values = |rank| if *is_bad && rank == bad_rank { f32::NAN } else { value };
                    let source = source(&world, rank, values);
                    let id = if index % 3 == 2 {
                        pool.load(Ok(source)).map(|version| {
                            versions.push(version);
                            versions[versions.len() - 1].id()
                        })
                    } else {
                        pool.register(Ok(source))
                    };
                    if let Ok(id) = id {
                        ids.push((id, value));
                    }
                    outcome(id.map(drop))
                }
                Call::Unregister(index) => of(*index).map_or_else(String::new, |(id, _)| {
                    match versions.iter().position(|version| version.id() == id) {
                        Some(version) => {
                            drop(versions.swap_remove(version));
                            String::new()
                        }
                        None => outcome(pool.unregister(id)),
                    }
                }),
                Call::Prepare(indices) => {
                    let batch: Vec<_> = indices.iter().filter_map(|&index| of(index)).collect();
                    let leases = pool.prepare(&batch.iter().map(|(id, _)| *id).collect::<Vec<_>>(), STREAM);
                    let slots = leases
                        .as_ref()
                        .map(|leases| leases.iter().map(|lease| lease.slot().index()).collect::<Vec<_>>());
                    let answer = match &slots {
                        Ok(slots) => format!("{slots:?}"),
                        Err(_) => String::new(),
                    };
                    match leases {
                        Ok(leases) => {
                            held.extend(leases.into_iter().zip(batch.iter().map(|(_, value)| *value)));
                            answer
                        }
                        Err(error) => outcome::<()>(Err(error)),
                    }
                }
                Call::Prefetch(index) => of(*index).map_or_else(String::new, |(id, _)| ended(pool.prefetch(id))),
                Call::Retry(index) => of(*index).map_or_else(String::new, |(id, _)| ended(pool.retry(id))),
                Call::Pin(index, true) => of(*index).map_or_else(String::new, |(id, _)| outcome(pool.pin(id))),
                Call::Pin(index, false) => of(*index).map_or_else(String::new, |(id, _)| outcome(pool.unpin(id))),
                Call::Drop(index) => {
                    if !held.is_empty() {
                        drop(held.swap_remove(index % held.len()));
                    }
                    String::new()
                }
                Call::EndStep => outcome(pool.end_step(STREAM)),
                Call::Wait => pool.wait(LIMIT).to_string(),
            };
            for (lease, value) in &held {
                assert_eq!(world.delta_of(&pool, lease.slot()), Ok(*value), "after {call:?}");
            }
            answers.push((answer, pool.snapshot().resident, pool.snapshot().host));
        }
        drop(mem::take(&mut held));
        // A load that is not asked for any more ends, too.
        while pool.wait(LIMIT) {}
        for (id, _) in ids {
            let _ = pool.unregister(id);
        }
        pool.end_step(STREAM).unwrap();
        pool.poll();
        let snapshot = pool.snapshot();
        answers.push((String::new(), snapshot.resident, snapshot.host));
        assert_eq!((snapshot.device_memory.used, snapshot.host_memory.used), (0, 0), "{snapshot:?}");
        answers
    });
    same(answers);
}
