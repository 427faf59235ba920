//! No kernel reads a wrong adapter, whatever the host does and in whatever legal order the device runs: random hosts
//! and devices, and the same with each obligation of a backend broken. What nothing uses has room for others.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IteratorRandom};
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use serde_json::{Value, json};

use super::{
    Entry, HostPlace, Limits, State,
    test_device::{Obligation, TestDevice},
};
use crate::{
    Slot,
    arena::blocks::{self, GRANULE_BYTES},
    group::{
        ChannelError, OnRanks,
        member::{Exchange, Member},
        said::Said,
    },
    model::TpRank,
    pool::{AdapterId, AdapterPool, Granted, Load, PoolError, StreamId, Version, backend::Backend},
};

/// The most schedules that show a broken obligation.
const BROKEN: u64 = 20_000;
/// Actions of the longest schedule of one device.
const MAX_ACTIONS: usize = 60;

/// A lease of a request.
#[derive(Clone, Copy, Debug)]
struct Held {
    id: AdapterId,
    slot: usize,
    /// The slot as batches name it.
    content: Slot,
    stream: StreamId,
}

/// The use of an adapter's copy on the device, as the rule for overwriting it counts it.
#[derive(Debug, Default)]
struct Uses {
    /// Number of the copy.
    number: u64,
    /// Streams that it was leased for since it was idle.
    streams: BTreeSet<StreamId>,
    /// Those of which no step has ended since its last lease did.
    waits_for: BTreeSet<StreamId>,
}

/// The devices of a pool.
trait Worlds: Backend {
    /// Of one world, or more.
    fn of(worlds: Vec<TestDevice>, rng: &mut StdRng, broken: Broken) -> Self;
    /// The source of an adapter of so many bytes.
    fn source(bytes: usize) -> Self::Source;
    fn each(&mut self) -> impl Iterator<Item = &mut TestDevice>;
    /// Reads that the pool has not heard of the end of.
    fn num_reads(&self) -> usize;

    fn get(&mut self, world: usize) -> &mut TestDevice {
        self.each().nth(world).unwrap()
    }
}

impl Worlds for TestDevice {
    fn of(mut worlds: Vec<TestDevice>, _: &mut StdRng, _: Broken) -> Self {
        worlds.swap_remove(0)
    }

    fn source(bytes: usize) -> usize {
        bytes
    }

    fn each(&mut self) -> impl Iterator<Item = &mut TestDevice> {
        [self].into_iter()
    }

    fn num_reads(&self) -> usize {
        TestDevice::num_reads(self)
    }
}

/// All ranks of a group are on this thread: those after the first.
struct Here(Vec<Member<TestDevice>>);

impl Exchange<TestDevice> for Here {
    fn exchange(&mut self, _: TpRank, said: Vec<Said>) -> Result<Vec<Said>, ChannelError> {
        Ok(said)
    }

    fn each(&mut self, own: &mut Member<TestDevice>, mut act: impl FnMut(&mut Member<TestDevice>)) {
        act(own);
        self.0.iter_mut().for_each(act);
    }
}

/// One rank is on this thread. What two others say has the form of answers, and is made up.
struct Lies {
    rng: StdRng,
    /// Whether what this rank says is changed, too.
    of_own: bool,
}

impl Exchange<TestDevice> for Lies {
    fn exchange(&mut self, _: TpRank, own: Vec<Said>) -> Result<Vec<Said>, ChannelError> {
        let said = serde_json::to_value(&own[0]).unwrap();
        let of_others = [(); 2].map(|()| self.lie(said.clone()));
        let first = if self.of_own { self.lie(said) } else { said };
        Ok([first].into_iter().chain(of_others).map(|said| serde_json::from_value(said).unwrap()).collect())
    }
}

impl Lies {
    /// The same rank, with another answer.
    fn lie(&mut self, mut said: Value) -> Value {
        let rng = &mut self.rng;
        let (on, answer) = (said["on"].clone(), &mut said["answer"]);
        let some = |rng: &mut StdRng, most: &Value| rng.random_range(0..=most.as_u64().unwrap().saturating_add(2));
        if rng.random_ratio(1, 3) {
            return said;
        }
        let failed = json!({ "Failed": { "reason": "a lie" } });
        match on.as_str() {
            None => {
                let ends = answer["Ends"]["reads"].as_array_mut().unwrap();
                let all = [json!("UnderWay"), json!({ "Whole": 0 }), json!("Failed"), json!({ "Clear": 0 })];
                ends.iter_mut().for_each(|end| *end = all[rng.random_range(0..all.len())].clone());
                answer["Ends"]["copied"] = json!(on["Ends"]["copied"].as_u64().unwrap() + rng.random_range(0..4));
            }
            Some("Size") => answer["Size"]["bytes"] = json!(some(rng, &answer["Size"]["bytes"])),
            Some("Copy" | "Point") => *answer = if rng.random() { json!("Yes") } else { failed },
            Some(_) => *answer = json!(if rng.random_ratio(3, 4) { "Yes" } else { "No" }),
        }
        said
    }
}

/// A channel that a group of worlds has.
trait Channel: Exchange<TestDevice> + Sized {
    fn group(worlds: Vec<TestDevice>, rng: &mut StdRng, broken: Broken) -> OnRanks<Self, TestDevice>;

    /// The ranks after the first.
    fn others(&mut self) -> &mut [Member<TestDevice>] {
        &mut []
    }
}

impl Channel for Lies {
    fn group(mut worlds: Vec<TestDevice>, rng: &mut StdRng, broken: Broken) -> OnRanks<Self, TestDevice> {
        let lies = Self { rng: StdRng::seed_from_u64(rng.random()), of_own: broken.is_own_changed };
        OnRanks::of(lies, worlds.swap_remove(0))
    }
}

impl Channel for Here {
    fn group(mut worlds: Vec<TestDevice>, rng: &mut StdRng, _: Broken) -> OnRanks<Self, TestDevice> {
        // Some take a little more on some ranks.
        let extra = |world: &mut TestDevice| world.extra_bytes = rng.random_range(0..2) * GRANULE_BYTES;
        worlds.iter_mut().for_each(extra);
        let own = worlds.remove(0);
        OnRanks::of(Self(worlds.into_iter().map(Member::new).collect()), own)
    }

    fn others(&mut self) -> &mut [Member<TestDevice>] {
        &mut self.0
    }
}

impl<C: Channel> Worlds for OnRanks<C, TestDevice> {
    fn of(worlds: Vec<TestDevice>, rng: &mut StdRng, broken: Broken) -> Self {
        C::group(worlds, rng, broken)
    }

    fn source(bytes: usize) -> Self::Source {
        Ok(bytes)
    }

    fn each(&mut self) -> impl Iterator<Item = &mut TestDevice> {
        let (channel, own) = self.parts();
        [own].into_iter().chain(channel.others().iter_mut().map(|member| &mut member.backend))
    }

    fn num_reads(&self) -> usize {
        OnRanks::num_reads(self)
    }
}

/// What is broken.
#[derive(Clone, Copy, Debug, Default)]
struct Broken {
    obligation: Option<Obligation>,
    /// What a rank has said comes back changed, and counts.
    is_own_changed: bool,
}

/// A host with a pool and its devices.
struct Schedule<W: Worlds> {
    rng: StdRng,
    pool: AdapterPool<W>,
    num_worlds: usize,
    num_streams: usize,
    /// What went wrong first.
    wrong: Option<String>,
    /// Registered adapters, and whether they are pinned.
    adapters: BTreeMap<AdapterId, bool>,
    /// Versions, which are registered until they are dropped.
    versions: BTreeMap<AdapterId, Version>,
    /// Loads that have not ended.
    loads: Vec<Load>,
    held: Vec<Held>,
    /// The slots of all leases so far.
    contents: Vec<Slot>,
    /// Leases that ended since the last end of a step of their stream: launches may follow.
    ended: Vec<Held>,
    /// Of adapters that have been leased.
    uses: BTreeMap<AdapterId, Uses>,
    /// Leases so far.
    granted: u64,
    limits: Limits,
}

impl<W: Worlds> Schedule<W> {
    fn new(seed: u64, most_worlds: usize, broken: Broken) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let (slots, streams) = (rng.random_range(2..5), rng.random_range(1..4));
        let (device, host) = (rng.random_range(6..14), rng.random_range(6..20));
        let limits = Limits {
            num_slots: slots,
            arena_bytes: device * GRANULE_BYTES,
            host_bytes: host * GRANULE_BYTES,
            max_reads: rng.random_range(1..3),
        };
        let copies_parts = rng.random_ratio(3, 4);
        let num_worlds = rng.random_range(most_worlds.min(2)..=most_worlds);
        let worlds = (0..num_worlds).map(|_| {
            let mut world = TestDevice::new(streams, slots, [device, host], copies_parts);
            world.broken = broken.obligation;
            world
        });
        let worlds = worlds.collect();
        let mut pool = AdapterPool::within(W::of(worlds, &mut rng, broken), limits).unwrap();
        for stream in 1..streams {
            assert_eq!(pool.new_stream(), StreamId(stream));
        }
        let mut schedule = Self {
            rng,
            pool,
            num_worlds,
            num_streams: streams,
            wrong: None,
            adapters: BTreeMap::new(),
            versions: BTreeMap::new(),
            loads: Vec::new(),
            held: Vec::new(),
            contents: Vec::new(),
            ended: Vec::new(),
            uses: BTreeMap::new(),
            granted: 0,
            limits,
        };
        (0..6).for_each(|_| schedule.register());
        schedule
    }

    /// Runs up to `actions` actions, or until the ranks cannot agree any more, and then the device. Returns what went
    /// wrong there.
    fn run_device_of(mut self, actions: usize) -> Result<(), String> {
        for _ in 0..actions {
            if self.pool.backend.check().is_err() {
                break;
            }
            self.act();
            self.run_device();
            self.check_device()?;
        }
        self.pool.poll();
        while (0..=self.num_streams).any(|stream| self.any_world().run(stream)) {}
        self.check_device()
    }

    /// Runs up to `actions` actions, then lets everything end. Returns what went wrong.
    fn run(mut self, actions: usize) -> Result<(), String> {
        for _ in 0..actions {
            self.act();
            self.run_device();
            self.check()?;
        }
        self.finish()
    }

    fn register(&mut self) {
        let source = W::source(self.rng.random_range(1..5 * GRANULE_BYTES));
        let id = if self.rng.random() {
            self.pool.register(source)
        } else {
            self.pool.load(source).map(|version| {
                let id = version.id();
                self.loads.push(version.load().clone());
                self.versions.insert(id, version);
                id
            })
        };
        self.adapters.extend(id.map(|id| (id, false)));
    }

    /// Drops an adapter's version, or unregisters it by its id.
    fn unregister(&mut self, id: AdapterId) {
        match self.versions.remove(&id) {
            Some(version) => drop(version),
            None => self.pool.unregister(id).unwrap(),
        }
    }

    fn retry(&mut self, id: AdapterId) {
        self.loads.push(self.pool.state.retry(id, &mut self.pool.backend).unwrap());
    }

    fn any_adapter(&mut self) -> Option<AdapterId> {
        self.adapters.keys().copied().choose(&mut self.rng)
    }

    fn any_world(&mut self) -> &mut TestDevice {
        let world = self.rng.random_range(0..self.num_worlds);
        self.pool.backend.get(world)
    }

    /// Whether a world may begin to hinder the pool. One is enough to hinder all.
    fn may_hinder(&mut self) -> bool {
        self.rng.random_range(0..self.num_worlds) == 0
    }

    fn any_stream(&mut self) -> StreamId {
        StreamId(self.rng.random_range(0..self.num_streams))
    }

    fn act(&mut self) {
        match self.rng.random_range(0..100) {
            0..20 => self.request(),
            20..35 => self.launch(),
            35..50 => self.end_lease(),
            50..64 => {
                let stream = self.any_stream();
                self.end_step(stream);
            }
            64..67 => self.launch_without_lease(),
            67..78 => self.read(),
            78..86 => self.notice(),
            86..92 => {
                if let Some(id) = self.any_adapter() {
                    self.retry(id);
                }
            }
            92..94 => self.register(),
            94..97 => self.pin(),
            97 => {
                let may = self.may_hinder();
                let world = self.any_world();
                world.is_capturing = may && !world.is_capturing;
            }
            98 => {
                if let Some(id) = self.any_adapter() {
                    self.adapters.remove(&id);
                    self.unregister(id);
                    let again = self.pool.prepare(&[id], StreamId::FIRST);
                    let is_unknown = matches!(again, Err(PoolError::Unknown { id: other }) if other == id);
                    assert!(is_unknown || self.pool.backend.check().is_err());
                }
            }
            _ => {
                let (may, what, is_group) = (self.may_hinder(), self.rng.random_range(0..3), self.num_worlds > 1);
                let world = self.rng.random_range(0..self.num_worlds);
                let number = world as u64 + 1;
                let world = self.pool.backend.get(world);
                match what {
                    0 => world.refuses_copies = may && !world.refuses_copies,
                    1 => world.refuses_points = may && !world.refuses_points,
                    _ => world.other = if is_group && may && world.other == 0 { number } else { 0 },
                }
            }
        }
    }

    /// Asks for a batch of one to three adapters.
    fn request(&mut self) {
        let stream = self.any_stream();
        let size = self.rng.random_range(1..4);
        let ids: Vec<_> = (0..size).filter_map(|_| self.any_adapter()).collect();
        let is_too_large = self.is_too_large(&ids);
        let is_in_host_alone =
            |state: &State, id| state.residency_of(id).is_some_and(|at| at.in_host && at.slot.is_none());
        let in_host: Vec<_> = ids.iter().copied().filter(|&id| is_in_host_alone(&self.pool.state, id)).collect();
        let result = self.pool.state.prepare(&ids, stream, &mut self.pool.backend);
        let was_too_large = matches!(result, Err(PoolError::TooLarge { .. }));
        if was_too_large != is_too_large && !matches!(result, Err(PoolError::Failed { .. })) {
            self.is_wrong(format!("{ids:?} never fit: {is_too_large}, but {result:?}"));
        }
        // One that cannot be copied need not stay.
        let is_lost = |&id: &AdapterId| {
            let at = self.pool.state.residency_of(id);
            at.is_none_or(|at| !at.in_host && at.slot.is_none() && at.failure.is_none())
        };
        if let Some(id) = in_host.into_iter().find(is_lost) {
            self.is_wrong(format!("{id} of the batch {ids:?} left host memory for another one of it"));
        }
        match result {
            Ok(granted) => self.lease(&ids, &granted, stream),
            Err(PoolError::Failed { id, .. }) => self.retry(id),
            Err(PoolError::Full) if self.is_free() => self.is_wrong(format!("{ids:?} wait, but nothing is in use")),
            Err(PoolError::Full | PoolError::Loading { .. } | PoolError::TooLarge { .. }) => {}
            Err(error) => unreachable!("{error}"),
        }
    }

    /// Whether nothing has to be released for a batch that fits.
    fn is_free(&mut self) -> bool {
        self.held.is_empty()
            && self.uses.values().all(|uses| uses.waits_for.is_empty())
            && !self.adapters.values().any(|is_pinned| *is_pinned)
            && !self.pool.backend.each().any(|world| world.is_capturing)
    }

    /// Whether a batch never fits beside the pinned adapters that are on the device. Nobody asks this of one that is
    /// there.
    fn is_too_large(&self, ids: &[AdapterId]) -> bool {
        let mut together: BTreeSet<_> = ids.iter().copied().collect();
        let is_there = together.iter().all(|id| self.pool.state.adapters[id].slot.is_some());
        let on_device = self.pool.state.device.occupied().map(|place| place.id);
        together.extend(on_device.filter(|id| self.adapters.get(id) == Some(&true)));
        let bytes = blocks::bytes_for(together.iter().map(|id| self.pool.state.adapters[id].bytes), 0);
        !is_there && (together.len() > self.limits.num_slots || bytes > self.limits.arena_bytes)
    }

    /// Takes note of the leases of a batch.
    fn lease(&mut self, ids: &[AdapterId], granted: &[Granted], stream: StreamId) {
        assert_eq!(granted.len(), ids.len());
        let is_pointed = self.pool.backend.point(granted, stream).is_ok();
        for (&id, &granted) in ids.iter().zip(granted) {
            let slot = granted.slot;
            let uses = self.uses.entry(id).or_default();
            if uses.number != granted.number {
                *uses = Uses { number: granted.number, ..Uses::default() };
            }
            let is_leased = self.held.iter().any(|held| held.slot == slot);
            if !granted.is_copying && !is_leased && uses.waits_for.is_empty() {
                uses.streams.clear();
            }
            uses.streams.insert(stream);
            self.granted += 1;
            if is_pointed {
                self.pool.state.open(slot, stream);
                let content = granted.content;
                self.held.push(Held { id, slot, content, stream });
                if !self.contents.contains(&content) {
                    self.contents.push(content);
                }
            } else {
                self.pool.state.release(slot, stream);
                if !is_leased {
                    uses.waits_for = uses.streams.clone();
                }
            }
        }
    }

    /// Launches a kernel of a lease, which may have ended since the last end of a step of its stream.
    fn launch(&mut self) {
        let leases = self.held.iter().chain(&self.ended);
        if let Some(&Held { id, slot, stream, .. }) = leases.choose(&mut self.rng) {
            self.pool.backend.each().for_each(|world| world.launch(stream, slot, id));
        }
    }

    /// Launches a kernel on any slot, with which no safe step could be made.
    fn launch_without_lease(&mut self) {
        let (stream, slot) = (self.any_stream(), self.rng.random_range(0..self.limits.num_slots));
        if !self.held.iter().chain(&self.ended).any(|held| (held.stream, held.slot) == (stream, slot)) {
            self.any_world().launch_without_lease(stream, slot);
        }
    }

    fn end_lease(&mut self) {
        if let Some(index) = (0..self.held.len()).choose(&mut self.rng) {
            let held = self.held.swap_remove(index);
            self.pool.state.release(held.slot, held.stream);
            if let Some(uses) =
                self.uses.get_mut(&held.id).filter(|_| self.held.iter().all(|other| other.id != held.id))
            {
                uses.waits_for = uses.streams.clone();
            }
            self.ended.push(held);
        }
    }

    fn end_step(&mut self, stream: StreamId) {
        self.pool.state.end_step(stream, &mut self.pool.backend).unwrap();
        self.ended.retain(|held| held.stream != stream);
        self.uses.values_mut().for_each(|uses| uses.waits_for.retain(|&other| other != stream));
    }

    /// Continues a read of each world: packs some of it, ends it, or ends it and tells the pool.
    fn read(&mut self) {
        for world in 0..self.num_worlds {
            let Some(read) = (0..self.pool.backend.get(world).num_reads()).choose(&mut self.rng) else { continue };
            let is_good = self.rng.random_ratio(7, 8);
            match self.rng.random_range(0..3) {
                0 => drop(self.pool.backend.get(world).pack(read)),
                1 => self.pool.backend.get(world).end_read(read, is_good),
                _ => self.tell_read(world, read, is_good),
            }
        }
    }

    /// Ends a read, unless it has ended, and tells the pool.
    fn tell_read(&mut self, world: usize, read: usize, is_good: bool) {
        self.pool.backend.get(world).tell_read(read, is_good);
        self.pool.backend.notice(None);
        self.notice_reads();
    }

    fn notice_reads(&mut self) {
        while let Some(read) = self.pool.backend.next_read() {
            self.pool.state.has_read(read, &mut self.pool.backend);
        }
    }

    /// Polls after the end of some copies was noticed.
    fn notice(&mut self) {
        self.pool.backend.notice(None);
        while let Some(number) = self.pool.backend.next_copied() {
            self.pool.state.has_copied(number);
        }
        self.notice_reads();
        self.pool.state.poll(&mut self.pool.backend);
    }

    /// Runs some of the work that may run.
    fn run_device(&mut self) {
        for _ in 0..self.rng.random_range(0..4) * self.num_worlds {
            let stream = self.rng.random_range(0..=self.num_streams);
            self.any_world().run(stream);
        }
    }

    fn check_device(&mut self) -> Result<(), String> {
        self.pool.backend.each().find_map(|world| world.wrong.clone()).map_or(Ok(()), Err)
    }

    fn check(&mut self) -> Result<(), String> {
        self.check_device()?;
        if let Some(wrong) = self.wrong.clone() {
            return Err(wrong);
        }
        let is_lost =
            |held: &&Held| self.pool.state.adapters.get(&held.id).is_none_or(|entry| entry.slot != Some(held.slot));
        if let Some(held) = self.held.iter().find(is_lost) {
            return Err(format!("{} lost slot {}, which is leased", held.id, held.slot));
        }
        // Steps may use the slots of leases, and of those that ended since the last end of a step of their stream. No
        // others, and no earlier adapters of the same slots.
        for stream in (0..self.num_streams).map(StreamId) {
            let may_use =
                |slot| self.held.iter().chain(&self.ended).any(|held| (held.stream, held.content) == (stream, slot));
            let is_open = |slot| self.pool.state.is_open(slot, stream);
            if let Some(slot) = self.contents.iter().find(|&&slot| is_open(slot) != may_use(slot)) {
                return Err(format!("{stream:?} may use {slot:?}: {}", is_open(*slot)));
            }
        }
        self.check_room()?;
        self.check_loads()?;
        let snapshot = self.pool.state.snapshot();
        let pins = self.adapters.values().filter(|is_pinned| **is_pinned).count();
        let is_right = snapshot.adapters == self.adapters.len()
            && snapshot.leases == self.held.len()
            && snapshot.reading <= self.limits.max_reads
            && snapshot.reading == self.pool.backend.num_reads()
            && snapshot.counters.hits + snapshot.counters.misses == self.granted
            && snapshot.pinned == pins
            && pins < self.limits.num_slots;
        if !is_right {
            return Err(format!("{} leases and {pins} pins, but {snapshot:?}", self.held.len()));
        }
        Ok(())
    }

    /// What nothing uses can be evicted, and what waits is known to.
    fn check_room(&self) -> Result<(), String> {
        let State { device, host, adapters, queue, gone, .. } = &self.pool.state;
        for (id, entry) in adapters {
            let Some(slot) = entry.slot else { continue };
            let waits = self.uses.get(id).is_some_and(|uses| !uses.waits_for.is_empty());
            let is_used = waits || device.is_copying(slot) || self.held.iter().any(|held| held.slot == slot);
            if device.is_idle(slot) == is_used {
                return Err(format!("{id} may be evicted: {}, but {:?}", !is_used, self.uses.get(id)));
            }
        }
        let is_loading = |entry: &Entry| {
            let is_on_its_way = entry.is_waiting || matches!(entry.host, HostPlace::Reading { .. });
            is_on_its_way && !entry.host.is_ready() && !entry.is_gone
        };
        // Each list, and how many adapters believe that they are in it.
        let count = |is_in: fn(&Entry) -> bool| adapters.values().filter(|entry| is_in(entry)).count();
        let lists = [
            ("waiting", queue.len(), count(|entry| entry.is_waiting)),
            ("loading", count(|entry| entry.loading.is_some()), count(is_loading)),
            ("gone", gone.len(), count(|entry| entry.is_gone)),
            ("in host memory", host.len(), count(|entry| entry.host.is_ready())),
        ];
        let wrong = lists.into_iter().find(|(_, listed, believe)| listed != believe);
        wrong.map_or(Ok(()), |(what, listed, believe)| Err(format!("{listed} adapters are {what}, of {believe}")))
    }

    /// A load that has not ended is the adapter's. One of an unregistered adapter has.
    fn check_loads(&mut self) -> Result<(), String> {
        let mut wrong = None;
        self.loads.retain(|load| {
            let (id, is_registered) = (load.id(), self.adapters.contains_key(&load.id()));
            let is_right = match load.has_ended() {
                Ok(false) => is_registered && self.pool.loading(id).is_some(),
                Err(PoolError::Unknown { .. }) => !is_registered,
                _ => return false,
            };
            if !is_right {
                wrong = Some(format!("{id} is registered: {is_registered}, but {load:?}"));
            }
            matches!(load.has_ended(), Ok(false))
        });
        wrong.map_or(Ok(()), Err)
    }

    fn is_wrong(&mut self, what: String) {
        self.wrong.get_or_insert(what);
    }

    fn pin(&mut self) {
        let Some(id) = self.any_adapter() else { return };
        let is_pinned = !self.adapters[&id];
        let others = self.adapters.iter().filter(|(other, _)| **other != id);
        let bytes = |id: &AdapterId| self.pool.state.adapters[id].bytes;
        let (pinned, free): (Vec<_>, Vec<_>) = others.partition(|(_, is_pinned)| **is_pinned);
        let largest = free.into_iter().map(|(id, _)| bytes(id)).max().unwrap_or(0);
        let needed = pinned.iter().map(|(id, _)| bytes(id)).sum::<usize>() + bytes(&id) + largest;
        let fits = pinned.len() + 1 < self.limits.num_slots && needed <= self.limits.arena_bytes;
        match self.pool.state.set_pinned(id, is_pinned) {
            Ok(()) if !is_pinned || fits => drop(self.adapters.insert(id, is_pinned)),
            Err(PoolError::Pinned { .. }) if is_pinned && !fits => {}
            result => self.is_wrong(format!("pinning {id} to {is_pinned}: {result:?}, with room: {fits}")),
        }
    }

    /// Ends all leases, reads and copies. Then any batch that fits can be leased, and every byte and slot comes back.
    fn finish(mut self) -> Result<(), String> {
        for world in self.pool.backend.each() {
            (world.refuses_copies, world.refuses_points, world.is_capturing) = (false, false, false);
            world.other = 0;
        }
        while !self.held.is_empty() {
            self.end_lease();
        }
        self.settle()?;
        let size = self.rng.random_range(1..4);
        let batch: Vec<_> = (0..size).filter_map(|_| self.any_adapter()).collect();
        for &id in &batch {
            self.retry(id);
        }
        self.settle()?;
        let mut refusal = None;
        for _ in 0..16 {
            refusal = match self.pool.state.prepare(&batch, StreamId::FIRST, &mut self.pool.backend) {
                Ok(granted) => {
                    self.lease(&batch, &granted, StreamId::FIRST);
                    while !self.held.is_empty() {
                        self.end_lease();
                    }
                    None
                }
                Err(PoolError::TooLarge { .. }) => None,
                Err(error) => Some(format!("an idle pool refuses {batch:?}: {error}")),
            };
            self.settle()?;
        }
        if let Some(refusal) = refusal {
            return Err(refusal);
        }
        while let Some((id, _)) = self.adapters.pop_first() {
            self.unregister(id);
        }
        self.pool.poll();
        self.settle()?;
        let snapshot = self.pool.state.snapshot();
        let used = (snapshot.device_memory.used, snapshot.host_memory.used, snapshot.resident, snapshot.host);
        if used != (0, 0, 0, 0) || !self.pool.state.adapters.is_empty() || !self.pool.state.gone.is_empty() {
            return Err(format!("memory was lost: {snapshot:?}"));
        }
        Ok(())
    }

    /// Runs everything to its end.
    fn settle(&mut self) -> Result<(), String> {
        for stream in 0..self.num_streams {
            self.end_step(StreamId(stream));
        }
        // What one rank hears of another's failed read takes another round.
        let mut rounds = 0;
        while rounds < 16 {
            self.notice();
            rounds += 1;
            for world in 0..self.num_worlds {
                for stream in 0..=self.num_streams {
                    while self.pool.backend.get(world).run(stream) {
                        rounds = 0;
                    }
                }
                if self.pool.backend.get(world).num_reads() > 0 {
                    self.tell_read(world, 0, true);
                    rounds = 0;
                }
            }
        }
        self.check()
    }
}

/// Schedules of a property: `ARIL_MORE_CASES` times as many as otherwise.
fn schedules() -> u64 {
    2_500 * std::env::var("ARIL_MORE_CASES").map_or(1, |times| times.parse().expect("ARIL_MORE_CASES is a number"))
}

/// The first seed whose schedule goes wrong, the number of its actions, and what went wrong, on one device or on the
/// ranks of a group.
fn first_wrong(is_group: bool, schedules: u64, broken: Broken) -> Option<(u64, usize, String)> {
    let run = |seed, actions| match is_group {
        false => Schedule::<TestDevice>::new(seed, 1, broken).run(actions),
        true => Schedule::<OnRanks<Here, TestDevice>>::new(seed, 3, broken).run(actions),
    };
    // A group agrees on the ends of reads and copies, so that less happens in as many actions.
    let most = if is_group { 2 * MAX_ACTIONS } else { MAX_ACTIONS };
    let seed = (0..schedules).into_par_iter().find_first(|&seed| run(seed, most).is_err())?;
    (0..=most).find_map(|actions| run(seed, actions).err().map(|wrong| (seed, actions, wrong)))
}

#[test]
fn no_kernel_reads_a_wrong_adapter() {
    assert_eq!(first_wrong(false, schedules(), Broken::default()), None);
}

#[test]
fn no_kernel_of_a_rank_reads_a_wrong_adapter() {
    assert_eq!(first_wrong(true, schedules(), Broken::default()), None);
}

/// Whatever the others are said to say.
#[test]
fn no_message_decides_the_memory_of_a_rank() {
    let run = |seed, broken| Schedule::<OnRanks<Lies, TestDevice>>::new(seed, 1, broken).run_device_of(MAX_ACTIONS);
    let wrong = |broken, schedules| (0..schedules).into_par_iter().find_map_first(|seed| run(seed, broken).err());
    assert_eq!(wrong(Broken::default(), schedules()), None);
    // What this rank says is what it has done.
    assert!(wrong(Broken { is_own_changed: true, ..Broken::default() }, BROKEN).is_some());
}

#[test]
fn every_obligation_of_a_backend_is_needed() {
    let obligations = [
        Obligation::CopyFirst,
        Obligation::RowOfStream,
        Obligation::ClearFirst,
        Obligation::PartsFirst,
        Obligation::Revoked,
    ];
    for obligation in obligations {
        for is_group in [false, true] {
            let wrong = first_wrong(is_group, BROKEN, Broken { obligation: Some(obligation), ..Broken::default() });
            assert!(wrong.is_some(), "without {obligation:?}, nothing went wrong; of a group: {is_group}");
        }
    }
}
