use std::{borrow::Borrow, collections::HashMap, time::Duration};

use super::{
    channel::Ranks,
    error::{GroupError, Phase},
    host::{HostTier, Opened, Origin},
    load::{Group, Progress},
    table::HostTable,
};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{
    Slot,
    adapter::{Adapter, AdapterError},
    cpu,
    error::{LoadError, OperandError},
    pool::{Counters, PoolError, Snapshot, Source, Tier},
    residency::Usage,
    routing::Batch,
};

/// The slots of a group's tables, shared by more adapters than fit: an adapter is loaded into the same slot on all ranks, or on none.
///
/// All ranks make the same calls in the same order. What they decide depends on these calls and on the verdicts that they exchange
/// alone, so all evict the same adapters. The pool alone loads into the tables, unloads, and starts steps.
///
/// A load blocks until all ranks have made it. Requests for adapters that are loaded exchange nothing.
///
/// With a [host tier](Self::with_host_tier), each rank keeps its parts of adapters packed in host memory, page-locked on CUDA, and a
/// [`prefetch`](Self::prefetch) brings them there beside steps. A rank reads what its tier lacks, so the ranks' tiers may differ.
#[derive(Debug)]
pub struct GroupPool<R, T: HostTable> {
    /// With the pool's own handle of the table.
    group: Group<R, T>,
    /// That of everybody else.
    table: T,
    host: Option<HostTier<T>>,
    /// By version.
    loaded: HashMap<u64, Loaded>,
    /// Of the adapter in each slot, up to the last that had one.
    leases: Vec<usize>,
    /// Number of the last use. It orders adapters by use.
    uses: u64,
    counters: Counters,
}

#[derive(Debug)]
struct Loaded {
    slot: Slot,
    last_use: u64,
}

impl<R: Ranks, T: HostTable> GroupPool<R, T> {
    /// A pool of a group whose tables are empty, without a host tier. It takes this rank's table for good: other handles refuse loads,
    /// unloads and steps.
    ///
    /// # Errors
    /// [`PoolError::Slot`] if the table has adapters, or belongs to another pool.
    pub fn new(group: Group<R, T>) -> Result<Self, PoolError> {
        let (group, table) = group.claim()?;
        let (loaded, leases, counters) = (HashMap::new(), Vec::new(), Counters::default());
        Ok(Self { group, table, host: None, loaded, leases, uses: 0, counters })
    }

    /// Gives this rank a host tier of `host_bytes` bytes, all of which are allocated now on CUDA. Two prefetched adapters are read at a
    /// time, beside one that [`acquire`](Self::acquire) reads. Up to `packers` threads read and convert the weights of each.
    ///
    /// # Errors
    /// [`PoolError`] if the bytes are beyond a limit, memory is exhausted, or threads cannot be started.
    pub fn with_host_tier(self, host_bytes: usize, packers: usize) -> Result<Self, PoolError> {
        let host = HostTier::new(self.group.table(), host_bytes, packers)?;
        Ok(Self { host: Some(host), ..self })
    }

    /// The table of this rank, to make layers of, and to capture. The pool alone loads, unloads and steps.
    pub fn table(&self) -> &T {
        &self.table
    }

    /// Starts to read this rank's part of an adapter into its host tier, and counts as a use there. Needs no other rank, and does nothing
    /// without a host tier. The source may be one of another rank. If the read fails, the next [`acquire`](Self::acquire) fails on all
    /// ranks and says why; the one after it opens the adapter again.
    ///
    /// # Errors
    /// [`LoadError::Slot`] if the source is of another element type, [`LoadError::Adapter`] if it is of another rank, and this rank's
    /// part cannot be planned.
    pub fn prefetch(&mut self, version: u64, source: Source) -> Result<(), LoadError> {
        self.host.as_mut().map_or(Ok(()), |host| host.prefetch(self.group.table(), version, &source))
    }

    /// Whether a [`prefetch`](Self::prefetch) of an adapter is under way on this rank.
    pub fn is_reading(&mut self, version: u64) -> bool {
        self.host.as_mut().is_some_and(|host| host.is_reading(version))
    }

    /// Blocks this thread until a prefetch has ended on this rank, or for `timeout`. Returns whether one has; `false` at once if none is
    /// under way.
    pub fn wait(&mut self, timeout: Duration) -> bool {
        self.host.as_mut().is_some_and(|host| host.wait(timeout))
    }

    /// The state of the pool on this rank. Its adapters are those that are on the device. `waits`, `loading`,
    /// `moves` and `copied_bytes` are 0.
    pub fn snapshot(&self) -> Snapshot {
        let host = self.host.as_ref();
        let of_host = host.map(HostTier::counters).unwrap_or_default();
        Snapshot {
            adapters: self.loaded.len(),
            resident: self.loaded.len(),
            copying: 0,
            host: host.map_or(0, HostTier::len),
            reading: host.map_or(0, HostTier::reads),
            waiting: 0,
            leased: self.leases.iter().filter(|&&leases| leases > 0).count(),
            leases: self.leases.iter().sum(),
            pinned: 0,
            device_memory: self.table().usage(),
            host_memory: self.host_usage().unwrap_or(Usage { capacity: 0, used: 0, largest_gap: 0 }),
            counters: Counters {
                host_evictions: of_host.host_evictions,
                reads: of_host.reads,
                read_bytes: of_host.read_bytes,
                read_time: of_host.read_time,
                failures: self.counters.failures + of_host.failures,
                ..self.counters
            },
        }
    }

    /// The fastest tier that an adapter is in on this rank.
    pub fn tier(&self, version: u64) -> Tier {
        match &self.host {
            _ if self.loaded.contains_key(&version) => Tier::Device,
            Some(host) if host.has(version) => Tier::Host,
            _ => Tier::Source,
        }
    }

    /// Memory use of this rank's host tier.
    pub fn host_usage(&self) -> Option<Usage> {
        self.host.as_ref().map(HostTier::usage)
    }

    /// Leases an adapter for steps of all ranks, until [`release`](Self::release), and returns its slot, which is the same on all ranks.
    /// Leases of an adapter are counted.
    ///
    /// An adapter that is not loaded is [loaded](Group::load) from this rank's host tier, or from `open`, which may be called several
    /// times, and leaves it in the host tier. Where no slot is empty, it
    /// replaces the least recently used adapter without a lease. Where the arena of any rank is full, all ranks evict such adapters, one
    /// at a time, until it fits on all. Call this between the same two steps on all ranks.
    ///
    /// `version` is a number by which all ranks know the adapter, as for [`Group::prepare`].
    ///
    /// # Errors
    /// As for [`Group::load`], and [`GroupError::NoFreeSlot`] if all slots are leased. Leased adapters keep serving. Others do, too,
    /// except those that were evicted for room, and the one in the slot of [`GroupError::Torn`].
    ///
    /// # Panics
    /// If `open` or the table panics, as for [`Group::load`].
    pub fn acquire<A: Borrow<Adapter>>(
        &mut self,
        version: u64,
        open: impl Fn() -> Result<A, AdapterError>,
    ) -> Result<Slot, GroupError> {
        self.acquire_by(version, &Opened(open))
    }

    /// As [`acquire`](Self::acquire), of a source, which may be one of another rank. Files that have changed since it was made are this
    /// rank's error.
    ///
    /// # Errors
    /// As for `acquire`.
    ///
    /// # Panics
    /// If the table panics, as for [`Group::load`].
    pub fn acquire_from(&mut self, version: u64, source: &Source) -> Result<Slot, GroupError> {
        self.acquire_by(version, source)
    }

    fn acquire_by(&mut self, version: u64, origin: &impl Origin) -> Result<Slot, GroupError> {
        self.uses += 1;
        if let Some(loaded) = self.loaded.get_mut(&version) {
            loaded.last_use = self.uses;
            self.counters.hits += 1;
            let slot = loaded.slot;
            self.lease(slot);
            return Ok(slot);
        }
        let loaded = self.load(version, origin);
        match &loaded {
            Ok(_) => self.counters.misses += 1,
            Err(error) if error.is_full() => self.counters.full += 1,
            Err(_) => self.counters.failures += 1,
        }
        loaded
    }

    /// Loads an adapter, and leases it.
    fn load(&mut self, version: u64, origin: &impl Origin) -> Result<Slot, GroupError> {
        let slot = match (self.group.free_slot(), self.victim()) {
            (Err(GroupError::NoFreeSlot), Some(victim)) => self.loaded[&victim].slot,
            (slot, _) => slot?,
        };
        let prepared = loop {
            let host = &mut self.host;
            let prepared = self.group.prepare_by(slot, version, |table, progress| match host {
                Some(host) => host.fill(table, (slot, version), origin, progress),
                None => origin.read(table, |image| {
                    *progress = Progress { phase: Phase::Reserve, can_hold: table.can_hold(image) };
                    let reservation = table.reserve(slot, image)?;
                    progress.phase = Phase::Fill;
                    table.fill(reservation, image)
                }),
            });
            match (prepared, self.victim()) {
                (Err(error @ GroupError::Refused { .. }), Some(victim)) if error.is_full() => {
                    self.evict(victim);
                }
                (prepared, _) => break prepared?,
            }
        };
        // The adapter in the slot is replaced, or lost.
        let before = self.loaded.len();
        self.loaded.retain(|_, loaded| loaded.slot != slot);
        self.counters.evictions += (before - self.loaded.len()) as u64;
        self.group.commit(prepared)?;
        self.counters.copies += 1;
        self.loaded.insert(version, Loaded { slot, last_use: self.uses });
        self.lease(slot);
        Ok(slot)
    }

    /// Ends one lease of an adapter, after the last step that uses it. The adapter stays loaded until it is evicted.
    ///
    /// # Errors
    /// [`GroupError::NotLeased`].
    pub fn release(&mut self, version: u64) -> Result<(), GroupError> {
        let index = self.slot(version).and_then(Slot::index);
        let leases = index.and_then(|index| self.leases.get_mut(index)).filter(|leases| **leases > 0);
        *leases.ok_or(GroupError::NotLeased { version })? -= 1;
        Ok(())
    }

    /// Forgets an adapter: unloads it, and frees its host memory. All ranks must, unless it has a lease.
    ///
    /// # Errors
    /// [`GroupError::Leased`]. Nothing is changed then.
    pub fn remove(&mut self, version: u64) -> Result<(), GroupError> {
        if self.slot(version).is_some_and(|slot| self.is_leased(slot)) {
            return Err(GroupError::Leased { version });
        }
        self.unload(version);
        if let Some(host) = &mut self.host {
            host.remove(version);
        }
        Ok(())
    }

    /// The slot of an adapter; `None` if it is not loaded. For routers that place requests.
    pub fn slot(&self, version: u64) -> Option<Slot> {
        self.loaded.get(&version).map(|loaded| loaded.slot)
    }

    /// Takes note of a lease of the adapter in a slot.
    fn lease(&mut self, slot: Slot) {
        if let Some(index) = slot.index() {
            self.leases.resize(self.leases.len().max(index + 1), 0);
            self.leases[index] += 1;
        }
    }

    /// Whether the adapter in a slot has a lease.
    fn is_leased(&self, slot: Slot) -> bool {
        slot.index().is_some_and(|index| self.leases.get(index).is_some_and(|&leases| leases > 0))
    }

    /// Rejects slots of adapters without a lease.
    fn check_leased(&self, slots: &[Slot]) -> Result<(), OperandError> {
        let stale = slots.iter().find(|&&slot| slot != Slot::BASE && !self.is_leased(slot));
        stale.map_or(Ok(()), |&slot| Err(OperandError::NotLeased { slot }))
    }

    /// The least recently used adapter without a lease.
    fn victim(&self) -> Option<u64> {
        let idle = self.loaded.iter().filter(|(_, loaded)| !self.is_leased(loaded.slot));
        idle.min_by_key(|(_, loaded)| loaded.last_use).map(|(&version, _)| version)
    }

    fn evict(&mut self, version: u64) {
        self.counters.evictions += 1;
        self.unload(version);
    }

    /// Unloads an adapter. If this rank cannot, it keeps the memory, and no rank chooses the slot again.
    fn unload(&mut self, version: u64) {
        if let Some(loaded) = self.loaded.remove(&version) {
            // The ranks go on together, and the verdict of the next load tells them of it.
            let _ = self.group.table().unload(loaded.slot);
        }
    }
}

/// Starts the steps of a pool on one backend. The batch is the argument of the backend's own `step`.
macro_rules! step {
    ($(#[$attribute:meta])* $backend:ident, $batch:ty, $error:ty) => {
        $(#[$attribute])*
        impl<R: Ranks> GroupPool<R, $backend::WeightTable> {
            /// Starts a step of `batch` on this rank. The step borrows the pool, so that no slot changes before its last operation.
            ///
            /// # Errors
            /// [`OperandError::NotLeased`] if the batch names a slot whose adapter was not [acquired](Self::acquire), or has been
            /// [released](Self::release); or as for the table's own `step`.
            pub fn step<'a>(
                &'a self,
                batch: &$batch,
                workspace: &'a mut $backend::Workspace,
            ) -> Result<$backend::Step<'a>, $error> {
                let step = self.group.table().step(batch, workspace)?;
                self.check_leased(batch.slots())?;
                Ok(step)
            }
        }
    };
}

step!(cpu, Batch<'a>, OperandError);
step!(
    #[cfg(feature = "cuda")]
    cuda,
    cuda::RoutedBatch<'a>,
    cuda::LaunchError
);
