//! No kernel reads a wrong adapter, whatever the host does and in whatever legal order the device runs: random hosts and devices,
//! and the same with each rule broken.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeMap, time::Duration};

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IteratorRandom};
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use super::{
    Core, Limits, Rule,
    world::{Obligation, World},
};
use crate::{
    blocks::GRANULE_BYTES,
    error::SlotError,
    pool::{AdapterId, PoolError, StreamId},
};

/// Schedules of the property; of a broken rule, fewer show it.
const SCHEDULES: u64 = 200_000;
const BROKEN: u64 = 20_000;
/// Actions of the longest schedule.
const MAX_ACTIONS: usize = 60;

/// A lease of a request.
#[derive(Clone, Copy, Debug)]
struct Held {
    id: AdapterId,
    slot: usize,
    stream: StreamId,
}

/// A host with a pool and a device.
struct Schedule {
    rng: StdRng,
    core: Core,
    world: World,
    /// Registered adapters, and whether they are pinned.
    adapters: BTreeMap<AdapterId, bool>,
    held: Vec<Held>,
    /// Leases that ended since the last commit of their stream: launches may follow.
    ended: Vec<Held>,
    limits: Limits,
}

impl Schedule {
    fn new(seed: u64, rule: Option<Rule>, obligation: Option<Obligation>) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let (slots, streams) = (rng.random_range(2..5), rng.random_range(1..4));
        let (device, host) = (rng.random_range(6..14), rng.random_range(6..20));
        let limits = Limits {
            num_slots: slots,
            arena_bytes: device * GRANULE_BYTES,
            host_bytes: host * GRANULE_BYTES,
            max_reads: rng.random_range(1..3),
        };
        let mut core = Core::new(limits).unwrap();
        core.device.rules.broken = rule;
        for stream in 1..streams {
            assert_eq!(core.add_stream(), StreamId(stream));
        }
        let mut world = World::new(streams, slots, [device, host], rng.random_ratio(3, 4));
        world.broken = obligation;
        let mut schedule =
            Self { rng, core, world, adapters: BTreeMap::new(), held: Vec::new(), ended: Vec::new(), limits };
        (0..6).for_each(|_| schedule.register());
        schedule
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
        let bytes = self.rng.random_range(1..5 * GRANULE_BYTES);
        if let Ok(id) = self.core.register(bytes, self.rng.random_ratio(3, 4)) {
            self.adapters.insert(id, false);
        }
    }

    fn any_adapter(&mut self) -> Option<AdapterId> {
        self.adapters.keys().copied().choose(&mut self.rng)
    }

    fn any_stream(&mut self) -> StreamId {
        StreamId(self.rng.random_range(0..self.world.num_streams()))
    }

    fn act(&mut self) {
        match self.rng.random_range(0..100) {
            0..20 => self.request(),
            20..35 => self.launch(),
            35..50 => self.end_lease(),
            50..64 => {
                let stream = self.any_stream();
                self.commit(stream);
            }
            64..67 => self.launch_without_lease(),
            67..78 => self.read(),
            78..86 => self.notice(),
            86..92 => {
                if let Some(id) = self.any_adapter() {
                    self.core.retry(id, &mut self.world).unwrap();
                }
            }
            92..94 => self.register(),
            94..97 => self.pin(),
            97 => self.world.is_capturing = !self.world.is_capturing,
            98 => {
                if let Some(id) = self.any_adapter() {
                    self.adapters.remove(&id);
                    self.core.unregister(id, &mut self.world).unwrap();
                    let again = self.core.prepare(&[id], StreamId::FIRST, &mut self.world);
                    assert!(matches!(again, Err(PoolError::Unknown { id: other }) if other == id));
                }
            }
            _ => self.world.refuses_copies = !self.world.refuses_copies,
        }
    }

    /// Asks for a batch of one to three adapters.
    fn request(&mut self) {
        let stream = self.any_stream();
        let size = self.rng.random_range(1..4);
        let ids: Vec<_> = (0..size).filter_map(|_| self.any_adapter()).collect();
        match self.core.prepare(&ids, stream, &mut self.world) {
            Ok(granted) => {
                assert_eq!(granted.len(), ids.len());
                for (&id, granted) in ids.iter().zip(granted) {
                    self.world.lease(stream, granted);
                    self.held.push(Held { id, slot: granted.slot, stream });
                }
            }
            Err(PoolError::Failed { id, .. }) => self.core.retry(id, &mut self.world).unwrap(),
            Err(PoolError::Full | PoolError::Loading { .. } | PoolError::TooLarge { .. }) => {}
            Err(error) => unreachable!("{error}"),
        }
    }

    /// Launches a kernel of a lease, which may have ended since its stream's last commit.
    fn launch(&mut self) {
        let leases = self.held.iter().chain(&self.ended);
        if let Some(&Held { id, slot, stream }) = leases.choose(&mut self.rng) {
            self.world.launch(stream, slot, id);
        }
    }

    /// Launches a kernel on any slot, with which no safe step could be made.
    fn launch_without_lease(&mut self) {
        let (stream, slot) = (self.any_stream(), self.rng.random_range(0..self.limits.num_slots));
        if !self.world.open[stream.0][slot] {
            self.world.launch_without_lease(stream, slot);
        }
    }

    fn end_lease(&mut self) {
        if let Some(index) = (0..self.held.len()).choose(&mut self.rng) {
            let held = self.held.swap_remove(index);
            self.core.release(held.slot, held.stream);
            self.ended.push(held);
        }
    }

    fn commit(&mut self, stream: StreamId) {
        self.core.commit(stream, &mut self.world).unwrap();
        self.ended.retain(|held| held.stream != stream);
    }

    /// Continues a read: packs some of it, ends it, or ends it and tells the pool.
    fn read(&mut self) {
        let Some(read) = (0..self.world.num_reads()).choose(&mut self.rng) else { return };
        let is_good = self.rng.random_ratio(7, 8);
        match self.rng.random_range(0..3) {
            0 => drop(self.world.pack(read)),
            1 => self.world.end_read(read, is_good),
            _ => self.take_read(read, is_good),
        }
    }

    /// Ends a read, unless it has ended, and tells the pool.
    fn take_read(&mut self, read: usize, is_good: bool) {
        self.world.end_read(read, is_good);
        let (id, bytes) = self.world.take_read(read);
        let result = bytes.ok_or_else(|| SlotError::OtherTable.into());
        self.core.has_read(id, Duration::ZERO, result, &mut self.world);
    }

    /// Polls after the end of some copies was noticed.
    fn notice(&mut self) {
        std::mem::take(&mut self.world.news).into_iter().for_each(|number| self.core.has_copied(number));
        self.core.poll(&mut self.world);
    }

    /// Runs some of the work that may run.
    fn run_device(&mut self) {
        for _ in 0..self.rng.random_range(0..4) {
            let stream = self.rng.random_range(0..=self.world.num_streams());
            self.world.run(stream);
        }
    }

    fn check(&self) -> Result<(), String> {
        if let Some(wrong) = &self.world.wrong {
            return Err(wrong.clone());
        }
        let is_lost = |held: &&Held| self.core.adapters.get(&held.id).is_none_or(|entry| entry.slot != Some(held.slot));
        if let Some(held) = self.held.iter().find(is_lost) {
            return Err(format!("{} lost slot {}, which is leased", held.id, held.slot));
        }
        // Steps may use the slots of leases, and of those that ended since the last commit of their stream. No others.
        for (stream, open) in self.world.open.iter().enumerate() {
            let may_use = |slot| {
                self.held.iter().chain(&self.ended).any(|held| (held.stream, held.slot) == (StreamId(stream), slot))
            };
            if let Some(slot) = (0..open.len()).find(|&slot| open[slot] != may_use(slot)) {
                return Err(format!("stream {stream} may use slot {slot}: {}", open[slot]));
            }
        }
        let snapshot = self.core.snapshot();
        let pins = self.adapters.values().filter(|is_pinned| **is_pinned).count();
        let is_right = snapshot.adapters == self.adapters.len()
            && snapshot.leases == self.held.len()
            && snapshot.reading <= self.limits.max_reads
            && snapshot.pinned == pins
            && pins < self.limits.num_slots;
        if !is_right {
            return Err(format!("{} leases and {pins} pins, but {snapshot:?}", self.held.len()));
        }
        Ok(())
    }

    fn pin(&mut self) {
        let Some(id) = self.any_adapter() else { return };
        let is_pinned = !self.adapters[&id];
        match self.core.set_pinned(id, is_pinned) {
            Ok(()) => drop(self.adapters.insert(id, is_pinned)),
            Err(error) => assert!(is_pinned && matches!(error, PoolError::Pinned { .. })),
        }
    }

    /// Ends all leases, reads and copies. Then any batch that fits can be leased, and every byte and slot comes back.
    fn finish(mut self) -> Result<(), String> {
        self.world.refuses_copies = false;
        self.world.is_capturing = false;
        while !self.held.is_empty() {
            self.end_lease();
        }
        self.settle()?;
        let size = self.rng.random_range(1..4);
        let batch: Vec<_> = (0..size).filter_map(|_| self.any_adapter()).collect();
        for &id in &batch {
            self.core.retry(id, &mut self.world).unwrap();
        }
        self.settle()?;
        let mut refusal = None;
        for _ in 0..16 {
            refusal = match self.core.prepare(&batch, StreamId::FIRST, &mut self.world) {
                Ok(granted) => {
                    granted.into_iter().for_each(|granted| self.core.release(granted.slot, StreamId::FIRST));
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
        let ids: Vec<_> = self.adapters.keys().copied().collect();
        for id in ids {
            self.core.unregister(id, &mut self.world).unwrap();
        }
        self.settle()?;
        let snapshot = self.core.snapshot();
        let used = (snapshot.device_memory.used, snapshot.host_memory.used, snapshot.resident, snapshot.host);
        if used != (0, 0, 0, 0) || !self.core.adapters.is_empty() || !self.core.gone.is_empty() {
            return Err(format!("memory was lost: {snapshot:?}"));
        }
        Ok(())
    }

    /// Runs everything to its end.
    fn settle(&mut self) -> Result<(), String> {
        for stream in 0..self.world.num_streams() {
            self.commit(StreamId(stream));
        }
        loop {
            self.notice();
            let mut ran = false;
            for stream in 0..=self.world.num_streams() {
                while self.world.run(stream) {
                    ran = true;
                }
            }
            if self.world.num_reads() > 0 {
                self.take_read(0, true);
            } else if !ran {
                break;
            }
        }
        self.world.wrong.take().map_or(Ok(()), Err)
    }
}

/// The first seed whose schedule goes wrong, the number of its actions, and what went wrong.
fn first_wrong(schedules: u64, rule: Option<Rule>, obligation: Option<Obligation>) -> Option<(u64, usize, String)> {
    let run = |seed: u64, actions| Schedule::new(seed, rule, obligation).run(actions);
    let seed = (0..schedules).into_par_iter().find_first(|&seed| run(seed, MAX_ACTIONS).is_err())?;
    (0..=MAX_ACTIONS).find_map(|actions| run(seed, actions).err().map(|wrong| (seed, actions, wrong)))
}

#[test]
fn no_kernel_reads_a_wrong_adapter() {
    assert_eq!(first_wrong(SCHEDULES, None, None), None);
}

#[test]
fn every_rule_is_needed() {
    let rules = [
        Rule::Leases,
        Rule::Commit,
        Rule::EveryStream,
        Rule::Copying,
        Rule::Source,
        Rule::Close,
        Rule::Whole,
        Rule::Revoke,
    ];
    for rule in rules {
        let wrong = first_wrong(BROKEN, Some(rule), None);
        assert!(wrong.is_some(), "without {rule:?}, nothing went wrong");
    }
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
        let wrong = first_wrong(BROKEN, None, Some(obligation));
        assert!(wrong.is_some(), "without {obligation:?}, nothing went wrong");
    }
}
