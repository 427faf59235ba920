//! Batches: all of their adapters are leased, or none.

use std::{collections::VecDeque, sync::Arc};

use super::{Entry, State};
use crate::{
    arena::blocks,
    pool::{AdapterId, PoolError, StreamId, backend::Executor, messages::Granted},
};

impl State {
    /// Leases all adapters of a batch for a step on `stream`, or none. No adapter of the batch is evicted for another
    /// one.
    pub(crate) fn prepare(
        &mut self,
        ids: &[AdapterId],
        stream: StreamId,
        backend: &mut impl Executor,
    ) -> Result<Vec<Granted>, PoolError> {
        if !self.device.has_stream(stream) {
            return Err(PoolError::NoSuchStream { stream });
        }
        let missing = self.missing(ids);
        let brought = missing.and_then(|missing| self.bring(ids, &missing, backend));
        // From here on, its adapters are merely the most recently used ones.
        self.batch += 1;
        brought?;
        ids.iter().map(|&id| self.lease(id, stream)).collect()
    }

    /// Leases an adapter that is on the device.
    fn lease(&mut self, id: AdapterId, stream: StreamId) -> Result<Granted, PoolError> {
        let entry = self.registered(id)?;
        let was_missed = std::mem::take(&mut entry.is_missed);
        let slot = entry.slot;
        let granted = slot.and_then(|slot| self.device.lease(slot, stream)).ok_or(PoolError::Full)?;
        self.counters.hits += u64::from(!was_missed);
        self.counters.misses += u64::from(was_missed);
        self.counters.waits += u64::from(granted.is_copying);
        Ok(granted)
    }

    /// The adapters of a batch that are not on the device. They become the most recently used ones.
    fn missing(&mut self, ids: &[AdapterId]) -> Result<Vec<AdapterId>, PoolError> {
        for &id in ids {
            let entry = self.registered(id)?;
            if let Some(error) = &entry.failure {
                return Err(PoolError::Failed { id, error: Arc::clone(error) });
            }
        }
        let (mut sizes, mut missing) = (Vec::with_capacity(ids.len()), Vec::new());
        for &id in ids {
            let batch = self.batch;
            let entry = self.registered(id)?;
            if std::mem::replace(&mut entry.batch, batch) == batch {
                continue;
            }
            sizes.push(entry.bytes);
            if entry.slot.is_none() {
                entry.is_missed = true;
                missing.push(id);
            }
            self.touch(id);
        }
        if !missing.is_empty() {
            self.check_size(&sizes)?;
        }
        Ok(missing)
    }

    /// Rejects a batch of adapters of these sizes that never fits beside the pinned ones.
    fn check_size(&self, sizes: &[usize]) -> Result<(), PoolError> {
        let (adapters, bytes) = (sizes.len(), sizes.iter().sum());
        let pinned = self.device.occupied().filter_map(|place| self.adapters.get(&place.id));
        let pinned = pinned.filter(|entry| entry.is_pinned && entry.batch != self.batch).map(|entry| entry.bytes);
        let all: Vec<_> = pinned.chain(sizes.iter().copied()).collect();
        let (num_slots, capacity) = (self.device.num_slots(), self.device.blocks.usage().capacity);
        let bounds =
            [("number of slots", num_slots, all.len()), ("arena", capacity, blocks::bytes_for(all.iter().copied(), 0))];
        for (what, max, needed) in bounds {
            if needed > max {
                return Err(PoolError::TooLarge { adapters, bytes, what, max });
            }
        }
        Ok(())
    }

    /// Brings the missing adapters of the current batch `ids` to the device, or says why they cannot all be there.
    fn bring(
        &mut self,
        ids: &[AdapterId],
        missing: &[AdapterId],
        backend: &mut impl Executor,
    ) -> Result<(), PoolError> {
        if missing.is_empty() {
            return Ok(());
        }
        if !self.could_bring(missing, false) {
            // Other adapters that are being read have room that they do not need yet.
            let others: Vec<_> = self.queue.iter().copied().filter(|id| !missing.contains(id)).collect();
            others.into_iter().for_each(|id| self.revoke(id, backend));
            if !self.could_bring(missing, true) {
                self.counters.full += 1;
                return Err(PoolError::Full);
            }
        }
        for &id in missing.iter().rev() {
            self.enqueue(id, VecDeque::push_front);
        }
        self.advance(backend);
        // While nothing is being read or copied, an adapter without a slot means that one in host memory has no room.
        let is_stuck = |id: &AdapterId| self.adapters[id].slot.is_none();
        if self.reads == 0 && self.device.is_idle_all() && ids.iter().any(is_stuck) && backend.may_evict() {
            self.rearrange(backend);
        }
        let refusal = self.refusal(ids);
        match &refusal {
            Some(PoolError::Loading { .. }) => self.counters.loading += 1,
            Some(PoolError::Full) => self.counters.full += 1,
            _ => {}
        }
        refusal.map_or(Ok(()), Err)
    }

    /// Whether there are slots and bytes, now or once all copies have ended, for the missing adapters of the current
    /// batch that have none yet.
    fn could_bring(&self, missing: &[AdapterId], once_copied: bool) -> bool {
        let missing = missing.iter().map(|id| &self.adapters[id]).filter(|entry| !entry.host.is_copied_meanwhile());
        let (needed, bytes) = missing.fold((0, 0), |(slots, bytes), entry| (slots + 1, bytes + entry.bytes));
        let may_evict = |entry: &Entry| !entry.is_pinned && entry.batch != self.batch;
        let (slots, room) = self.device.reclaimable(once_copied, |id| self.adapters.get(&id).is_some_and(may_evict));
        needed <= slots && bytes <= room
    }

    /// Why a batch cannot be leased now.
    fn refusal(&self, ids: &[AdapterId]) -> Option<PoolError> {
        // What is under way may give room when it ends.
        let is_waiting = self.reads > 0 || self.device.has_unused_copy();
        let mut refusal = None;
        for &id in ids {
            let entry = &self.adapters[&id];
            if let Some(error) = &entry.failure {
                return Some(PoolError::Failed { id, error: Arc::clone(error) });
            }
            if entry.slot.is_none() && !matches!(refusal, Some(PoolError::Loading { .. })) {
                let is_full = entry.host.is_ready() && !is_waiting;
                refusal = Some(if is_full { PoolError::Full } else { PoolError::Loading { id } });
            }
        }
        refusal
    }

    /// Copies everything to the device anew, because the free memory is in pieces and nothing is in use.
    fn rearrange(&mut self, backend: &mut impl Executor) {
        let ids: Vec<_> = self.device.occupied().map(|place| place.id).collect();
        for id in ids {
            self.evict(id, backend);
            self.counters.moves += 1;
            if self.adapters[&id].is_pinned || self.adapters[&id].batch == self.batch {
                self.enqueue(id, VecDeque::push_front);
            }
        }
        self.advance(backend);
    }
}
