//! The way up: from the source to host memory, and from there to the device.

use std::{collections::VecDeque, sync::Arc};

use super::{Entry, HostPlace, State};
use crate::{
    arena::blocks::Block,
    error::LoadError,
    pool::{
        AdapterId,
        backend::Executor,
        messages::{ReadEnd, Transfer},
    },
};

/// What came of an attempt to copy an adapter to the device.
enum Outcome {
    /// It is being copied, or the copy failed.
    Done,
    /// It would evict adapters that were used after it was asked for. It stays in host memory.
    Outranked,
    /// There is no room until something is released.
    Blocked,
}

impl State {
    /// Puts an adapter that is not on the device into the queue.
    pub(super) fn enqueue(&mut self, id: AdapterId, push: fn(&mut VecDeque<AdapterId>, AdapterId)) {
        let Some(entry) = self.adapters.get_mut(&id).filter(|entry| entry.slot.is_none()) else { return };
        if !entry.host.is_ready() {
            entry.loading.get_or_insert_default();
        }
        if std::mem::replace(&mut entry.is_waiting, true) {
            self.queue.retain(|&other| other != id);
        }
        push(&mut self.queue, id);
    }

    /// Starts the reads and copies for which there is room, in the queue's order. An adapter does not overtake another
    /// one that waits for the same memory.
    pub(super) fn advance(&mut self, backend: &mut impl Executor) {
        let (mut no_device, mut no_host) = (false, false);
        // Whether all adapters so far have room on the device, so that a read may take some for the next one.
        let mut may_copy = true;
        let mut queue = std::mem::take(&mut self.queue);
        queue.retain(|&id| {
            let Some(entry) = self.adapters.get_mut(&id) else { return false };
            match &entry.host {
                HostPlace::Reading { .. } => {}
                HostPlace::Absent => no_host = no_host || !self.read(id, may_copy, backend),
                HostPlace::Ready { .. } if no_device => {}
                HostPlace::Ready { .. } => match self.copy_up(id, backend) {
                    Outcome::Done => return false,
                    Outcome::Outranked => {
                        self.adapters.entry(id).and_modify(|entry| entry.is_waiting = false);
                        return false;
                    }
                    Outcome::Blocked => no_device = true,
                },
            }
            may_copy &= self.adapters[&id].host.is_copied_meanwhile();
            true
        });
        self.queue = queue;
    }

    /// Starts to read an adapter, if there is room in the host tier. If it `may_copy` and there is room on the device,
    /// too, the read also copies it there.
    fn read(&mut self, id: AdapterId, may_copy: bool, backend: &mut impl Executor) -> bool {
        if self.reads == self.max_reads {
            return false;
        }
        let Some(block) = self.host_block(id, backend) else { return false };
        let (to, bytes) = (block.range(), self.adapters[&id].bytes);
        let room = if may_copy && backend.copies_parts() { self.make_room(id, bytes, backend).ok() } else { None };
        let mut copy = room.map(|copy| Transfer { from: to.start..to.start + bytes, ..copy });
        if !backend.read(id, to, copy.as_ref()) {
            copy.take().into_iter().for_each(|copy| self.device.evict(copy.slot));
        }
        // It has no slot for leases before it is read, even if parts of it have been copied.
        if let Some(entry) = self.adapters.get_mut(&id) {
            entry.host = HostPlace::Reading { block, copy };
        }
        self.reads += 1;
        true
    }

    /// Takes back the room on the device of an adapter that is being read, unless all of it has been enqueued.
    pub(super) fn revoke(&mut self, id: AdapterId, backend: &mut impl Executor) {
        let Some(Entry { host: HostPlace::Reading { copy, .. }, .. }) = self.adapters.get_mut(&id) else { return };
        if let Some(copy) = copy.take_if(|copy| backend.revoke(copy)) {
            self.device.evict(copy.slot);
        }
    }

    /// Host memory for an adapter. Evicts others, and adapters in the queue only for the current batch.
    fn host_block(&mut self, id: AdapterId, backend: &mut impl Executor) -> Option<Block> {
        let bytes = self.adapters[&id].bytes;
        let is_urgent = self.adapters[&id].batch == self.batch;
        loop {
            if let Some(block) = self.host.blocks.allocate(bytes) {
                return Some(block);
            }
            let is_free = |other| self.may_leave_host(other) && !self.adapters[&other].is_waiting;
            let is_less_urgent =
                |other| is_urgent && self.may_leave_host(other) && self.adapters[&other].batch != self.batch;
            let victim = self.host.victim(is_free).or_else(|| self.host.victim(is_less_urgent))?;
            self.forget(victim, backend);
            self.counters.host_evictions += 1;
        }
    }

    /// Whether an adapter is in host memory, and nothing reads it there.
    pub(super) fn may_leave_host(&self, id: AdapterId) -> bool {
        let Some(entry) = self.adapters.get(&id) else { return false };
        let is_copying = entry.slot.is_some_and(|slot| self.device.is_copying(slot));
        entry.host.is_ready() && !is_copying
    }

    /// The last use of an adapter that may be evicted from the device: neither being read, nor pinned, nor in the
    /// current batch.
    pub(super) fn rank(&self, id: AdapterId) -> Option<u64> {
        let entry = self.adapters.get(&id)?;
        (entry.slot.is_some() && !entry.is_pinned && entry.batch != self.batch).then_some(entry.last_use)
    }

    /// Takes a slot and a block on the device for an adapter. Evicts the least recently used others. Returns its copy
    /// without the source.
    fn make_room(&mut self, id: AdapterId, bytes: usize, backend: &mut impl Executor) -> Result<Transfer, Outcome> {
        let entry = &self.adapters[&id];
        let last_use = entry.last_use;
        let older = |state: &Self, id| state.rank(id).filter(|&rank| rank < last_use);
        if !self.device.could_hold(bytes, |id| older(self, id).is_some()) {
            // The last batch is asked for again, even if one of its adapters stands in the way of another.
            let is_last_batch = entry.batch + 1 >= self.batch;
            let is_outranked = !is_last_batch && self.device.could_hold(bytes, |id| self.rank(id).is_some());
            return Err(if is_outranked { Outcome::Outranked } else { Outcome::Blocked });
        }
        loop {
            if let Some(copy) = self.device.take(id, bytes) {
                return Ok(copy);
            }
            let victim = self.device.victim(|id| older(self, id)).filter(|_| backend.may_evict());
            let Some(victim) = victim else { return Err(Outcome::Blocked) };
            self.evict(victim, backend);
            self.counters.evictions += 1;
        }
    }

    /// Copies an adapter from host memory to the device, if there is room.
    fn copy_up(&mut self, id: AdapterId, backend: &mut impl Executor) -> Outcome {
        let Some(entry) = self.adapters.get(&id) else { return Outcome::Done };
        let HostPlace::Ready { block } = &entry.host else { return Outcome::Blocked };
        let (from, bytes) = (block.offset()..block.offset() + entry.bytes, entry.bytes);
        let copy = match self.make_room(id, bytes, backend) {
            Ok(copy) => Transfer { from, ..copy },
            Err(outcome) => return outcome,
        };
        match backend.copy(&copy) {
            Ok(()) => self.has_enqueued(id, &copy),
            Err(error) => {
                self.device.evict(copy.slot);
                self.fail(id, Arc::new(error));
            }
        }
        Outcome::Done
    }

    /// Takes note of a copy that has been enqueued.
    fn has_enqueued(&mut self, id: AdapterId, copy: &Transfer) {
        self.counters.copies += 1;
        self.counters.copied_bytes += copy.from.len() as u64;
        if let Some(entry) = self.adapters.get_mut(&id) {
            entry.slot = Some(copy.slot);
            entry.is_waiting = false;
        }
    }

    /// Takes note of the end of a read.
    pub(crate) fn has_read(&mut self, read: ReadEnd, backend: &mut impl Executor) {
        let ReadEnd { id, time, result, .. } = read;
        self.reads -= 1;
        self.counters.read_time += time;
        let Some(entry) = self.adapters.get_mut(&id) else { return };
        let HostPlace::Reading { block, copy } = std::mem::take(&mut entry.host) else { return };
        match result {
            Ok(()) => {
                entry.host = HostPlace::Ready { block };
                if let Some(loading) = entry.loading.take() {
                    loading.end(Ok(()));
                }
                self.host.insert(entry.last_use, id);
                self.counters.reads += 1;
                self.counters.read_bytes += entry.bytes as u64;
                if let Some(copy) = copy {
                    backend.finish(&copy);
                    self.has_enqueued(id, &copy);
                    self.queue.retain(|&other| other != id);
                }
            }
            Err(error) => {
                copy.into_iter().for_each(|copy| self.device.evict(copy.slot));
                self.host.blocks.free(block);
                self.fail(id, Arc::new(error));
                self.queue.retain(|&other| other != id);
            }
        }
        self.poll(backend);
    }

    /// Takes note of the end of a copy.
    pub(crate) fn has_copied(&mut self, number: u64) {
        self.device.has_copied(number);
    }

    /// Takes note that nothing ends any more which is under way: its memory is not used again, and those who wait for
    /// it are told why.
    pub(crate) fn stop(&mut self, error: Option<LoadError>) {
        let Some(error) = error.map(Arc::new) else { return };
        self.queue.clear();
        let waits = |entry: &Entry| entry.is_waiting || entry.loading.is_some();
        let waiting: Vec<_> = self.adapters.iter().filter(|(_, entry)| waits(entry)).map(|(&id, _)| id).collect();
        waiting.into_iter().for_each(|id| self.fail(id, Arc::clone(&error)));
    }

    /// Takes note of an adapter that could not be loaded.
    fn fail(&mut self, id: AdapterId, error: Arc<LoadError>) {
        self.counters.failures += 1;
        if let Some(entry) = self.adapters.get_mut(&id) {
            entry.failure = Some(Arc::clone(&error));
            entry.is_waiting = false;
            if let Some(loading) = entry.loading.take() {
                loading.end(Err(error));
            }
        }
    }
}
