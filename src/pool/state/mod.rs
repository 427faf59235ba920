//! The state of a pool and its decisions, without memory, threads or a device: an [`Executor`] carries them out.

mod batch;
mod device;
#[cfg(test)]
mod group_tests;
mod loading;
#[cfg(test)]
mod loading_tests;
#[cfg(test)]
mod schedules;
#[cfg(test)]
mod test_device;

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use self::device::{Device, Host, HostPlace};
use super::{
    AdapterId, Counters, Load, PoolError, Residency, Snapshot, StreamId, Tier, backend::Executor, handles::Loading,
};
use crate::{Slot, error::LoadError, plan::PlanError};

/// Which adapters are where, and what happens next.
#[derive(Debug)]
pub(crate) struct State {
    device: Device,
    host: Host,
    adapters: HashMap<AdapterId, Entry>,
    /// Adapters on their way up, the most urgent ones first.
    queue: VecDeque<AdapterId>,
    /// Unregistered adapters that still have memory.
    gone: Vec<AdapterId>,
    reads: usize,
    max_reads: usize,
    /// Number of the last use. It orders adapters by use.
    uses: u64,
    /// Number of the batch that is being prepared, or of the next one.
    batch: u64,
    pins: usize,
    pub(crate) counters: Counters,
}

/// Bounds of a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) num_slots: usize,
    pub(crate) arena_bytes: usize,
    pub(crate) host_bytes: usize,
    /// Reads at the same time.
    pub(crate) max_reads: usize,
}

/// An adapter.
#[derive(Debug, Default)]
struct Entry {
    /// Size of its block.
    bytes: usize,
    last_use: u64,
    /// Number of the last batch that it was in.
    batch: u64,
    host: HostPlace,
    slot: Option<usize>,
    is_pinned: bool,
    is_gone: bool,
    /// Whether it is in the queue.
    is_waiting: bool,
    /// Whether it was not on the device when it was last asked for.
    is_missed: bool,
    failure: Option<Arc<LoadError>>,
    /// Its load, while this is under way.
    loading: Option<Loading>,
}

impl State {
    pub(crate) fn new(limits: Limits) -> Result<Self, PlanError> {
        let mut device = Device::new(limits.num_slots, limits.arena_bytes)?;
        device.add_stream();
        Ok(Self {
            device,
            host: Host::new(limits.host_bytes)?,
            adapters: HashMap::new(),
            queue: VecDeque::new(),
            gone: Vec::new(),
            reads: 0,
            max_reads: limits.max_reads,
            uses: 0,
            // An adapter that was in no batch has 0, which is neither this batch nor the one before.
            batch: 2,
            pins: 0,
            counters: Counters::default(),
        })
    }

    pub(crate) fn add_stream(&mut self) -> StreamId {
        self.device.add_stream()
    }

    /// Makes an adapter of `bytes` bytes known.
    pub(crate) fn register(&mut self, id: AdapterId, bytes: usize) -> Result<(), PoolError> {
        for (what, blocks) in [("arena", &self.device.blocks), ("host tier", &self.host.blocks)] {
            if !blocks.can_hold(bytes) {
                let max = blocks.usage().capacity;
                return Err(PoolError::TooLarge { adapters: 1, bytes, what, max });
            }
        }
        self.adapters.insert(id, Entry { bytes, ..Entry::default() });
        Ok(())
    }

    /// Forgets an adapter: at once for new requests, and its memory once nothing uses it.
    pub(crate) fn unregister(&mut self, id: AdapterId, backend: &mut impl Executor) -> Result<(), PoolError> {
        self.set_pinned(id, false)?;
        let entry = self.registered(id)?;
        entry.is_gone = true;
        entry.loading = None;
        if std::mem::take(&mut entry.is_waiting) {
            self.queue.retain(|&other| other != id);
        }
        self.gone.push(id);
        self.sweep(backend);
        Ok(())
    }

    /// Starts the way up to the device, unless the last load failed.
    pub(crate) fn prefetch(&mut self, id: AdapterId, backend: &mut impl Executor) -> Result<Load, PoolError> {
        match &self.registered(id)?.failure {
            Some(error) => Err(PoolError::Failed { id, error: Arc::clone(error) }),
            None => self.retry(id, backend),
        }
    }

    /// Starts the way up to the device. A failure of the last load is forgotten.
    pub(crate) fn retry(&mut self, id: AdapterId, backend: &mut impl Executor) -> Result<Load, PoolError> {
        self.registered(id)?.failure = None;
        self.touch(id);
        self.enqueue(id, VecDeque::push_back);
        self.advance(backend);
        // One without a load under way is in host memory, or could not be copied from there.
        let failure = self.registered(id)?.failure.clone();
        Ok(self.loading(id).unwrap_or_else(|| Load::ended(id, failure.map_or(Ok(()), Err))))
    }

    /// The load of an adapter that is under way.
    pub(crate) fn loading(&self, id: AdapterId) -> Option<Load> {
        self.adapters.get(&id)?.loading.as_ref().map(|loading| loading.load(id))
    }

    /// Keeps an adapter on the device once it is there, or no longer. At least one slot, and room for the largest of
    /// the other adapters, is never pinned.
    pub(crate) fn set_pinned(&mut self, id: AdapterId, is_pinned: bool) -> Result<(), PoolError> {
        let entry = self.registered(id)?;
        if entry.is_pinned == is_pinned {
            return Ok(());
        }
        if is_pinned {
            let others = self.adapters.iter().filter(|(other, entry)| **other != id && !entry.is_gone);
            let (pinned, free): (Vec<_>, Vec<_>) = others.map(|(_, entry)| entry).partition(|entry| entry.is_pinned);
            let pinned: usize = pinned.iter().map(|entry| entry.bytes).sum();
            let largest = free.iter().map(|entry| entry.bytes).max().unwrap_or(0);
            let needed = pinned + self.adapters[&id].bytes + largest;
            if self.pins + 1 >= self.device.num_slots() || needed > self.device.blocks.usage().capacity {
                return Err(PoolError::Pinned { id });
            }
        }
        self.registered(id)?.is_pinned = is_pinned;
        self.pins = if is_pinned { self.pins + 1 } else { self.pins - 1 };
        Ok(())
    }

    pub(crate) fn limits(&self) -> Limits {
        let Self { device, host, max_reads, .. } = self;
        let [arena_bytes, host_bytes] = [&device.blocks, &host.blocks].map(|blocks| blocks.usage().capacity);
        Limits { num_slots: device.num_slots(), arena_bytes, host_bytes, max_reads: *max_reads }
    }

    /// Adapters that are registered, or still have memory.
    pub(crate) fn num_adapters(&self) -> usize {
        self.adapters.len()
    }

    pub(crate) fn num_streams(&self) -> usize {
        self.device.num_streams()
    }

    pub(crate) fn has_stream(&self, stream: StreamId) -> bool {
        self.device.has_stream(stream)
    }

    /// Steps of the stream may use the slot of a lease from now on, until the end of a step that follows its last one.
    pub(crate) fn open(&mut self, slot: usize, stream: StreamId) {
        self.device.open(slot, stream);
    }

    /// Whether steps of a stream may use a slot with the adapter that it names.
    pub(crate) fn is_open(&self, slot: Slot, stream: StreamId) -> bool {
        self.device.is_open(slot, stream)
    }

    /// Reads that have not ended.
    pub(crate) fn reads(&self) -> usize {
        self.reads
    }

    /// Ends a lease.
    pub(crate) fn release(&mut self, slot: usize, stream: StreamId) {
        self.device.release(slot, stream);
    }

    /// Takes note of the end of a step's launches on a stream.
    pub(crate) fn end_step(&mut self, stream: StreamId, backend: &mut impl Executor) -> Result<(), PoolError> {
        if !self.device.has_stream(stream) {
            return Err(PoolError::NoSuchStream { stream });
        }
        self.device.end_step(stream);
        self.poll(backend);
        Ok(())
    }

    /// Frees what is no longer used, and continues what waits for room.
    pub(crate) fn poll(&mut self, backend: &mut impl Executor) {
        self.sweep(backend);
        self.advance(backend);
    }

    fn registered(&mut self, id: AdapterId) -> Result<&mut Entry, PoolError> {
        self.adapters.get_mut(&id).filter(|entry| !entry.is_gone).ok_or(PoolError::Unknown { id })
    }

    /// Makes an adapter the most recently used one.
    fn touch(&mut self, id: AdapterId) {
        self.uses += 1;
        if let Some(entry) = self.adapters.get_mut(&id) {
            let last_use = std::mem::replace(&mut entry.last_use, self.uses);
            self.host.touch(last_use, self.uses);
        }
    }

    /// Frees the memory of unregistered adapters that nothing uses.
    pub(crate) fn sweep(&mut self, backend: &mut impl Executor) {
        let mut gone = std::mem::take(&mut self.gone);
        gone.retain(|&id| !self.remove(id, backend));
        self.gone = gone;
    }

    /// Frees what nothing uses of an adapter's memory. Returns whether it had no other.
    fn remove(&mut self, id: AdapterId, backend: &mut impl Executor) -> bool {
        let Some(entry) = self.adapters.get(&id) else { return true };
        if entry.slot.is_some_and(|slot| self.device.is_idle(slot)) && backend.may_evict() {
            self.evict(id, backend);
        }
        if self.may_leave_host(id) {
            self.forget(id, backend);
        }
        self.revoke(id, backend);
        let entry = &self.adapters[&id];
        let is_empty = entry.slot.is_none() && matches!(entry.host, HostPlace::Absent);
        if is_empty {
            self.adapters.remove(&id);
        }
        is_empty
    }

    /// Empties the slot of an idle adapter.
    fn evict(&mut self, id: AdapterId, backend: &mut impl Executor) {
        if let Some(slot) = self.adapters.get_mut(&id).and_then(|entry| entry.slot.take()) {
            self.device.evict(slot);
            backend.evict(slot);
        }
    }

    /// Frees the host memory of an adapter that is not being copied.
    fn forget(&mut self, id: AdapterId, backend: &mut impl Executor) {
        let Some(entry) = self.adapters.get_mut(&id) else { return };
        if let HostPlace::Ready { block } = std::mem::take(&mut entry.host) {
            self.host.remove(entry.last_use);
            self.host.blocks.free(block);
            backend.forget(id);
            if entry.is_waiting {
                // It is read again.
                entry.loading.get_or_insert_default();
            }
        }
    }
}

impl State {
    /// The state of the pool. Takes time for each slot, and none for adapters elsewhere.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let mut snapshot = Snapshot {
            adapters: self.adapters.len() - self.gone.len(),
            resident: 0,
            copying: 0,
            host: self.host.len(),
            reading: self.reads,
            waiting: self.queue.len(),
            leased: 0,
            leases: 0,
            pinned: self.pins,
            device_memory: self.device.blocks.usage(),
            host_memory: self.host.blocks.usage(),
            counters: self.counters,
        };
        for place in self.device.occupied() {
            snapshot.resident += 1;
            snapshot.copying += usize::from(place.is_copying);
            snapshot.leased += usize::from(place.leases > 0);
            snapshot.leases += place.leases;
        }
        snapshot
    }

    /// Where an adapter is; `None` if it is not registered.
    pub(crate) fn residency_of(&self, id: AdapterId) -> Option<Residency> {
        self.adapters.get(&id).filter(|entry| !entry.is_gone).map(|entry| self.residency(id, entry))
    }

    /// Where all registered adapters are, by id.
    pub(crate) fn residencies(&self) -> Vec<Residency> {
        let registered = self.adapters.iter().filter(|(_, entry)| !entry.is_gone);
        let mut all: Vec<_> = registered.map(|(&id, entry)| self.residency(id, entry)).collect();
        all.sort_unstable_by_key(|residency| residency.id);
        all
    }

    fn residency(&self, id: AdapterId, entry: &Entry) -> Residency {
        let in_host = entry.host.is_ready();
        Residency {
            id,
            tier: if entry.slot.is_some() {
                Tier::Device
            } else if in_host {
                Tier::Host
            } else {
                Tier::Source
            },
            slot: entry.slot,
            in_host,
            bytes: entry.bytes,
            leases: entry.slot.map_or(0, |slot| self.device.leases(slot)),
            is_pinned: entry.is_pinned,
            failure: entry.failure.clone(),
        }
    }
}
