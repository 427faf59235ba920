//! Channels that lie, panic or lose a rank, and ranks that do not do the same: a named error on all ranks, and no memory but by this rank's
//! own account.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
    time::Duration,
};

use aril::{
    DType,
    adapter::{Adapter, AdapterError},
    cpu::Tiers,
    error::LoadError,
    group::{ChannelError, GroupError, GroupPool, InProcess, Message, Phase, Ranks},
    model::TpRank,
    pool::{AdapterId, Lease, PoolError, Source, StreamId, Version},
};
use serde_json::{Value, json};

use crate::{
    common::adapters,
    pool::{LIMIT, Pool, STREAM, acquire, group_error, prepare, release, source},
    world::{NEVER, World, each, refused},
};

/// The other rank of two says what this one does, but for what a function changes.
struct Told<F>(F);

fn to_message(said: &Value) -> Message {
    let mut bytes = [0; Message::BYTES];
    let text = said.to_string();
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    Message::from_bytes(bytes)
}

fn from_message(message: &Message) -> Value {
    let text = String::from_utf8_lossy(message.as_bytes());
    serde_json::from_str(text.trim_end_matches('\0')).unwrap()
}

impl<F: FnMut(&mut Value)> Ranks for Told<F> {
    fn tp(&self) -> TpRank {
        TpRank::new(0, 2).unwrap()
    }

    fn all_gather(&mut self, message: &Message) -> Result<Vec<Message>, ChannelError> {
        let mut said = from_message(message);
        (self.0)(&mut said);
        Ok(vec![*message, to_message(&said)])
    }
}

/// Whether a rank says something about this.
fn is_on(said: &Value, on: &str) -> bool {
    said["on"] == on || said["on"].get(on).is_some()
}

/// Loads and leases two adapters, for which there is room one after the other.
fn serve<R: Ranks>(world: &World, pool: &mut Pool<R>) -> Result<(), PoolError> {
    for value in [1.0, 2.0] {
        let id = pool.register(Ok(source(world, 0, |_| value)))?;
        let lease = loop {
            match acquire(pool, id) {
                Err(PoolError::Full) => pool.poll(),
                lease => break lease?,
            }
        };
        assert_eq!(world.delta_of(pool, lease.slot()), Ok(value));
        drop(lease);
        pool.end_step(STREAM)?;
    }
    Ok(())
}

/// Checks that every call returns this error, and nothing waits.
fn is_over<R: Ranks>(world: &World, pool: &mut Pool<R>, id: AdapterId, is_it: impl Fn(&GroupError) -> bool) {
    let load = pool.loading(id);
    let source = || Ok(source(world, 0, |_| 3.0));
    let results = [
        pool.register(source()).map(drop),
        pool.load(source()).map(drop),
        pool.load_then(source(), |_| ()).map(drop),
        pool.prefetch(id).map(drop),
        pool.retry(id).map(drop),
        pool.pin(id),
        pool.unpin(id),
        pool.prepare(&[id], STREAM).map(drop),
        pool.acquire(id, STREAM).map(drop),
        pool.end_step(STREAM),
    ];
    for result in results {
        let error = result.unwrap_err();
        assert!(is_it(group_error(&error)), "{error}");
    }
    assert!(!pool.wait(NEVER) && load.is_none());
}

/// What another rank says to need is the size of a block if it is more than this rank needs.
#[test]
fn a_block_has_at_least_the_size_of_its_own_rank() {
    let world = World::new(2);
    let bytes = source(&world, 0, |_| 1.0).bytes();
    for (told, expected) in [(0, bytes), (1, bytes), (bytes + 1, bytes + 1), (2 * bytes, 2 * bytes)] {
        let other = move |said: &mut Value| {
            if is_on(said, "Size") {
                said["answer"]["Size"]["bytes"] = json!(told);
            }
        };
        let mut pool = world.pool(Told(other), 4, 4);
        let id = pool.register(Ok(source(&world, 0, |_| 1.0))).unwrap();
        assert_eq!(pool.residency(id).unwrap().bytes, expected);
        serve(&world, &mut pool).unwrap();
    }
    let other = |said: &mut Value| {
        if is_on(said, "Size") {
            said["answer"]["Size"]["bytes"] = json!(usize::MAX);
        }
    };
    let mut pool = world.pool(Told(other), 4, 4);
    let error = pool.register(Ok(source(&world, 0, |_| 1.0))).unwrap_err();
    assert!(matches!(error, PoolError::TooLarge { bytes: usize::MAX, .. }), "{error}");
    assert_eq!(pool.snapshot().adapters, 0);
}

/// A channel that returns another message of this rank than was sent.
struct Changed<R, F>(R, F);

impl<R: Ranks, F: Fn(&mut Value)> Ranks for Changed<R, F> {
    fn tp(&self) -> TpRank {
        self.0.tp()
    }

    fn all_gather(&mut self, message: &Message) -> Result<Vec<Message>, ChannelError> {
        let mut messages = self.0.all_gather(message)?;
        let own = self.tp().rank();
        let said = from_message(&messages[own]);
        let mut told = said.clone();
        (self.1)(&mut told);
        if told != said {
            messages[own] = to_message(&told);
        }
        Ok(messages)
    }
}

/// What this rank has said counts as it was said.
#[test]
fn a_channel_that_changes_what_its_own_rank_says_ends_the_group() {
    for size in [1, 2] {
        let world = World::new(size);
        each(InProcess::group(size, NEVER), |rank, ranks| {
            let smaller = |said: &mut Value| {
                if is_on(said, "Size") {
                    said["answer"]["Size"]["bytes"] = json!(1);
                }
            };
            let mut pool = world.pool(Changed(ranks, smaller), 1, 1);
            let adapter = Arc::new(world.adapter(|_| 1.0));
            let own = Source::memory(Arc::clone(&adapter), &world.model(rank), DType::F32).unwrap();
            let error = pool.register(Ok(own)).unwrap_err();
            assert!(matches!(group_error(&error), GroupError::Channel(error) if error.ranks == [rank]), "{error}");
            assert_eq!((Arc::strong_count(&adapter), pool.snapshot().adapters), (1, 0));
        });
    }
}

/// An answer to another question names the rank that gave it.
#[test]
fn answers_of_another_form_end_the_group() {
    let world = World::new(2);
    type Spoil = fn(&mut Value);
    let spoiled: [(&str, Spoil); 12] = [
        ("Size", |answer| *answer = json!("Yes")),
        ("Size", |answer| *answer = json!({ "Ends": { "reads": [], "copied": 0, "reason": "" } })),
        ("Copy", |answer| *answer = json!("No")),
        ("Copy", |answer| *answer = json!({ "Size": { "bytes": 1 } })),
        ("Point", |answer| *answer = json!("No")),
        ("Evict", |answer| *answer = json!({ "Failed": { "reason": "" } })),
        ("Ends", |answer| *answer = json!("Yes")),
        ("Ends", |answer| answer["Ends"]["reads"] = json!([])),
        ("Ends", |answer| answer["Ends"]["reads"].as_array_mut().unwrap().push(json!("UnderWay"))),
        ("Ends", |answer| *answer = json!(null)),
        ("Ends", |answer| answer["Ends"]["copied"] = json!(-1)),
        ("Evict", |answer| *answer = json!("Maybe")),
    ];
    for (on, spoil) in spoiled {
        let other = move |said: &mut Value| {
            // The form of an end is that of reads under way.
            if is_on(said, on) && (on != "Ends" || said["on"]["Ends"]["reads"] != 0) {
                spoil(&mut said["answer"]);
            }
        };
        let mut pool = world.pool(Told(other), 1, 4);
        let error = serve(&world, &mut pool).unwrap_err();
        let is_it = |error: &GroupError| matches!(error, GroupError::Channel(error) if error.ranks == [1]);
        assert!(is_it(group_error(&error)), "{on}: {error}");
        is_over(&world, &mut pool, AdapterId::unique(), is_it);
    }
    let other = |said: &mut Value| said["answer"]["Limits"]["max_reads"] = json!(0);
    let capacity = aril::plan::Capacity::tokens(1).slots(1).rank(8);
    let config = aril::pool::PoolConfig::arena_bytes(1 << 16);
    let pool = aril::cpu::AdapterPool::new(&world.model(0), DType::F32, capacity, config).unwrap();
    let error = GroupPool::new(Told(other), pool).map(drop).unwrap_err();
    assert!(matches!(group_error(&error), GroupError::Channel(error) if error.ranks == [1]), "{error}");
}

/// Copies of which another rank says that fewer have ended than it said before.
#[test]
fn copies_do_not_begin_again() {
    let world = World::new(2);
    let other = |said: &mut Value| {
        if said["on"]["Ends"]["copied"].as_u64().is_some_and(|copied| copied > 0) {
            said["answer"]["Ends"]["copied"] = json!(0);
        }
    };
    let mut pool = world.pool(Told(other), 1, 4);
    let error = serve(&world, &mut pool).unwrap_err();
    assert!(matches!(group_error(&error), GroupError::Channel(error) if error.ranks == [1]), "{error}");
}

/// A channel of one rank that panics once it is to tell something.
struct Panics(&'static str);

impl Ranks for Panics {
    fn tp(&self) -> TpRank {
        TpRank::SINGLE
    }

    fn all_gather(&mut self, message: &Message) -> Result<Vec<Message>, ChannelError> {
        assert!(!is_on(&from_message(message), self.0), "on purpose");
        Ok(vec![*message])
    }
}

/// Whenever it does, all later calls say so, and so does every load that is under way.
#[test]
fn a_channel_that_panics_ends_the_group() {
    let world = World::new(1);
    let is_it = |error: &GroupError| matches!(error, GroupError::Channel(error) if error.ranks.is_empty() && error.reason == "it panicked: on purpose");
    for on in ["Size", "Ends", "Copy", "Point", "Evict"] {
        let mut pool = world.pool(Panics(on), 1, 4);
        let error = serve(&world, &mut pool).unwrap_err();
        assert!(is_it(group_error(&error)), "{on}: {error}");
        is_over(&world, &mut pool, AdapterId::unique(), is_it);
    }
    let mut pool = world.pool(Panics("Ends"), 1, 4);
    let (told, ends) = channel();
    let then = move |loaded: Result<Version, PoolError>| told.send(loaded.map(drop)).unwrap();
    let load = pool.load_then(Ok(source(&world, 0, |_| 1.0)), then).unwrap();
    pool.poll();
    let ended = [ends.try_recv().unwrap(), load.has_ended().map(drop), pool.wait_for(&load, NEVER).map(drop)];
    for ended in ended {
        let error = ended.unwrap_err();
        assert!(is_it(group_error(&error)), "{error}");
    }
    is_over(&world, &mut pool, load.id(), is_it);
}

/// An adapter that adds `value`, written to a folder, as the source of a rank.
fn in_directory(world: &World, rank: usize, folder: &tempfile::TempDir, value: f32) -> Source {
    adapters::write(folder.path(), &world.parts(|_| value));
    Source::directory(folder.path(), &world.model(rank), DType::F32).unwrap()
}

/// The error of an adapter that cannot be leased.
fn failure<R: Ranks>(pool: &mut Pool<R>, id: AdapterId) -> PoolError {
    acquire(pool, id).map(drop).unwrap_err()
}

/// An adapter that is another one on a rank is loaded by none, each time that it is tried. The group goes on.
#[test]
fn ranks_that_register_different_adapters_load_none() {
    let world = World::new(2);
    for is_in_directory in [[false; 2], [true, false], [true; 2]] {
        each(InProcess::group(2, NEVER), |rank, ranks| {
            let (mut pool, mut folders) = (world.pool(ranks, 2, 4), Vec::new());
            let mut source = |value: f32| {
                folders.push(tempfile::tempdir().unwrap());
                Ok(match is_in_directory[rank] {
                    true => in_directory(&world, rank, &folders[folders.len() - 1], value),
                    false => source(&world, rank, |_| value),
                })
            };
            let same = pool.register(source(3.0)).unwrap();
            let values = if rank == 0 { [1.0, 2.0] } else { [2.0, 1.0] };
            let ids = values.map(|value| pool.register(source(value)).unwrap());
            for id in ids.into_iter().chain(ids) {
                pool.retry(id).unwrap();
                let error = failure(&mut pool, id);
                let GroupError::Disagreement { ranks } = group_error(&error) else { panic!("{error}") };
                assert!(ranks.len() == 2 && ranks[0][6..] != ranks[1][6..], "{error}");
                assert!(ranks.iter().all(|rank| rank.contains("has read an adapter with fingerprint")), "{error}");
                assert_eq!(pool.residency(id).unwrap().slot, None);
            }
            let lease = acquire(&mut pool, same).unwrap();
            assert_eq!(world.delta_of(&pool, lease.slot()), Ok(3.0));
            assert_eq!(pool.snapshot().counters.failures, 4);
        });
    }
}

/// Why a rank has no source.
fn missing(world: &World, rank: usize) -> AdapterError {
    Source::directory("/nowhere/to/be/found", &world.model(rank), DType::F32).unwrap_err()
}

/// A rank whose files are not there tells the others. The group goes on.
#[test]
fn a_rank_without_a_source_is_named_on_all_ranks() {
    let world = World::new(3);
    each(InProcess::group(3, NEVER), |rank, ranks| {
        let mut pool = world.pool(ranks, 2, 4);
        let (told, ends) = channel::<()>();
        for call in 0..3 {
            let own = if rank == 1 { Err(missing(&world, rank)) } else { Ok(source(&world, rank, |_| 1.0)) };
            let error = match call {
                0 => pool.register(own).map(drop),
                1 => pool.load(own).map(drop),
                _ => {
                    let told = told.clone();
                    pool.load_then(own, move |_| told.send(()).unwrap()).map(drop)
                }
            };
            let error = error.unwrap_err();
            assert_eq!(refused(group_error(&error)), [(1, Phase::Plan)]);
            let GroupError::Refused { own, .. } = group_error(&error) else { unreachable!() };
            let is_own = matches!(own.as_deref(), Some(LoadError::Adapter(error)) if error.to_string() == missing(&world, 1).to_string());
            assert_eq!((is_own, own.is_some()), (rank == 1, rank == 1));
            assert!(error.to_string().contains(&missing(&world, 1).to_string()), "{error}");
        }
        assert!(ends.try_recv().is_err());
        assert_eq!(pool.snapshot().adapters, 0);
        let id = pool.register(Ok(source(&world, rank, |_| 5.0))).unwrap();
        let lease = acquire(&mut pool, id).unwrap();
        assert_eq!(world.delta_of(&pool, lease.slot()), Ok(5.0));
    });
}

/// What no rank registers, no rank keeps.
#[test]
fn no_rank_keeps_what_another_refuses() {
    let world = World::new(2);
    let [good, other_type] = [DType::F32, DType::BF16].map(|dtype| {
        let world = &world;
        move |rank: usize, adapter: &Arc<Adapter>| Source::memory(Arc::clone(adapter), &world.model(rank), dtype)
    });
    type Register<'a> = &'a (dyn Fn(usize, &Arc<Adapter>) -> Result<Source, AdapterError> + Sync);
    let without = |rank: usize, _: &Arc<Adapter>| Err(missing(&world, rank));
    let refusals: [[Register<'_>; 2]; 5] =
        [[&good, &other_type], [&other_type, &good], [&other_type; 2], [&good, &without], [&without, &good]];
    for registers in refusals {
        each(InProcess::group(2, NEVER), |rank, ranks| {
            let mut pool = world.pool(ranks, 2, 4);
            let adapter = Arc::new(world.adapter(|_| 1.0));
            for _ in 0..2 {
                let error = pool.register(registers[rank](rank, &adapter)).unwrap_err();
                assert!(matches!(group_error(&error), GroupError::Refused { .. }), "{error}");
                let error = pool.load(registers[rank](rank, &adapter)).map(drop).unwrap_err();
                assert!(matches!(group_error(&error), GroupError::Refused { .. }), "{error}");
                assert_eq!((Arc::strong_count(&adapter), pool.snapshot().adapters), (1, 0));
            }
        });
    }
    // Too large for all of them.
    each(InProcess::group(2, NEVER), |rank, ranks| {
        let mut pool = world.pool(ranks, 0, 4);
        let adapter = Arc::new(world.adapter(|_| 1.0));
        let error = pool.register(good(rank, &adapter)).unwrap_err();
        assert!(matches!(error, PoolError::TooLarge { .. }), "{error}");
        assert_eq!((Arc::strong_count(&adapter), pool.snapshot().adapters), (1, 0));
    });
}

/// The adapters of a rank, and its leases.
struct Held {
    ids: [AdapterId; 2],
    leases: Vec<Option<Lease>>,
}

/// What a rank does with them.
type Act = fn(&World, &mut Pool, &mut Held, StreamId);

/// Two ranks of which the second does what the first does not, or with one other argument, hear of it in the next call that exchanges anything.
#[test]
fn every_call_and_each_of_its_arguments_counts() {
    let world = World::new(2);
    let acts: [(&str, Act, Act); 23] = [
        (
            "pin, unpin",
            |_, pool, held, _| drop(pool.pin(held.ids[0])),
            |_, pool, held, _| drop(pool.unpin(held.ids[0])),
        ),
        ("pin", |_, pool, held, _| drop(pool.pin(held.ids[0])), |_, pool, held, _| drop(pool.pin(held.ids[1]))),
        ("unpin", |_, pool, held, _| drop(pool.unpin(held.ids[0])), |_, pool, held, _| drop(pool.unpin(held.ids[1]))),
        ("unpin, nothing", |_, pool, held, _| drop(pool.unpin(held.ids[0])), |_, _, _, _| ()),
        (
            "prefetch",
            |_, pool, held, _| drop(pool.prefetch(held.ids[0])),
            |_, pool, held, _| drop(pool.prefetch(held.ids[1])),
        ),
        ("prefetch, nothing", |_, pool, held, _| drop(pool.prefetch(held.ids[0])), |_, _, _, _| ()),
        (
            "prefetch, retry",
            |_, pool, held, _| drop(pool.prefetch(held.ids[0])),
            |_, pool, held, _| drop(pool.retry(held.ids[0])),
        ),
        ("retry", |_, pool, held, _| drop(pool.retry(held.ids[0])), |_, pool, held, _| drop(pool.retry(held.ids[1]))),
        (
            "unregister",
            |_, pool, held, _| drop(pool.unregister(held.ids[0])),
            |_, pool, held, _| drop(pool.unregister(held.ids[1])),
        ),
        ("unregister, nothing", |_, pool, held, _| drop(pool.unregister(held.ids[0])), |_, _, _, _| ()),
        (
            "prepare: ids",
            |_, pool, held, _| drop(pool.prepare(&held.ids[..1], STREAM)),
            |_, pool, held, _| drop(pool.prepare(&held.ids[1..], STREAM)),
        ),
        (
            "prepare: order",
            |_, pool, held, _| drop(pool.prepare(&[held.ids[0], held.ids[1]], STREAM)),
            |_, pool, held, _| drop(pool.prepare(&[held.ids[1], held.ids[0]], STREAM)),
        ),
        (
            "prepare: length",
            |_, pool, held, _| std::mem::forget(pool.prepare(&held.ids[..1], STREAM)),
            |_, pool, held, _| std::mem::forget(pool.prepare(&[held.ids[0]; 2], STREAM)),
        ),
        (
            "prepare: stream",
            |_, pool, held, _| std::mem::forget(pool.prepare(&held.ids[..1], STREAM)),
            |_, pool, held, other| std::mem::forget(pool.prepare(&held.ids[..1], other)),
        ),
        ("prepare, nothing", |_, pool, held, _| std::mem::forget(pool.acquire(held.ids[0], STREAM)), |_, _, _, _| ()),
        ("prepare of nothing, nothing", |_, pool, _, _| drop(pool.prepare(&[], STREAM)), |_, _, _, _| ()),
        ("end of a step", |_, pool, _, _| drop(pool.end_step(STREAM)), |_, pool, _, other| drop(pool.end_step(other))),
        ("end of a step, nothing", |_, pool, _, _| drop(pool.end_step(STREAM)), |_, _, _, _| ()),
        ("release: slot", |_, _, held, _| drop(held.leases[0].take()), |_, _, held, _| drop(held.leases[1].take())),
        ("release: stream", |_, _, held, _| drop(held.leases[0].take()), |_, _, held, _| drop(held.leases[2].take())),
        ("release, nothing", |_, _, held, _| drop(held.leases[0].take()), |_, _, _, _| ()),
        (
            "load, register",
            |world, pool, _, _| std::mem::forget(pool.load(Ok(source(world, 0, |_| 4.0)))),
            |world, pool, _, _| drop(pool.register(Ok(source(world, 0, |_| 4.0)))),
        ),
        (
            "prefetch and a release, prepare",
            |_, pool, held, _| {
                drop(pool.prefetch(held.ids[0]));
                drop(held.leases[0].take());
            },
            |_, pool, held, _| drop(pool.prepare(&held.ids, STREAM)),
        ),
    ];
    for (what, first, second) in acts {
        each(InProcess::group(2, NEVER), |rank, ranks| {
            let (mut pool, other) = world.pool_of_streams(ranks, 2, 8);
            let ids = [1.0, 2.0].map(|value| pool.register(Ok(source(&world, rank, |_| value))).unwrap());
            let mut leases = prepare(&mut pool, &ids).unwrap();
            leases.extend(pool.prepare(&ids[..1], other).unwrap());
            while pool.snapshot().copying > 0 {
                pool.poll();
            }
            let mut held = Held { ids, leases: leases.into_iter().map(Some).collect() };
            (if rank == 0 { first } else { second })(&world, &mut pool, &mut held, other);
            let error = pool.register(Ok(source(&world, rank, |_| 3.0))).unwrap_err();
            assert!(
                matches!(group_error(&error), GroupError::Disagreement { ranks } if ranks.len() == 2),
                "{what}: {error}"
            );
        });
    }
}

/// As many calls with the same arguments do not differ.
#[test]
fn the_same_calls_agree() {
    let world = World::new(2);
    each(InProcess::group(2, NEVER), |rank, ranks| {
        let (mut pool, other) = world.pool_of_streams(ranks, 2, 8);
        let id = pool.register(Ok(source(&world, rank, |_| 1.0))).unwrap();
        for _ in 0..3 {
            let lease = acquire(&mut pool, id).unwrap();
            pool.pin(id).unwrap();
            pool.unpin(id).unwrap();
            drop(pool.prefetch(id).unwrap());
            pool.end_step(other).unwrap();
            release(&mut pool, lease);
            pool.register(Ok(source(&world, rank, |_| 2.0))).unwrap();
        }
    });
}

/// Also after one that panics, which ends neither its call nor the group.
#[test]
fn the_callbacks_of_loads_of_a_group_are_called_once() {
    let world = World::new(2);
    each(InProcess::group(2, NEVER), |rank, ranks| {
        let mut pool: GroupPool<InProcess, Tiers> = world.pool(ranks, 2, 4);
        let ends: Vec<Receiver<bool>> = [1.0, f32::NAN, 3.0]
            .map(|value| {
                let (told, ends) = channel();
                let then = move |loaded: Result<Version, PoolError>| {
                    told.send(loaded.is_ok()).unwrap();
                    assert!(value == 3.0, "on purpose");
                };
                pool.load_then(Ok(source(&world, rank, |_| value)), then).unwrap();
                ends
            })
            .into();
        for _ in 0..3 {
            pool.wait(Duration::from_secs(10));
            pool.poll();
        }
        while pool.wait(LIMIT) {}
        let told: Vec<Vec<_>> = ends.iter().map(|ends| ends.try_iter().collect()).collect();
        assert_eq!(told, [[true], [false], [true]]);
        pool.register(Ok(source(&world, rank, |_| 4.0))).unwrap();
    });
}
