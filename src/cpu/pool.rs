//! The adapter pool of the CPU, whose device is host memory.

use std::{
    collections::{HashSet, VecDeque},
    ops::Range,
    sync::Arc,
    time::Duration,
};

use super::{
    WeightTable,
    upload::{Adapter, Packed, Reservation},
};
use crate::{
    DType,
    adapter::SlotImage,
    error::LoadError,
    model::Model,
    plan::Capacity,
    pool::{
        AdapterId, Backend, Copy, Granted, Lease, Outcome, Pool, PoolConfig, PoolError, Residency, Snapshot, Source,
        StreamId, adapter_pool, arena_bytes, slot_at,
    },
};

adapter_pool! {
    ///
    /// On the CPU, a step keeps its adapters by itself, and a copy only shares the host tier's memory: an adapter in both tiers
    /// is stored once. Bytes are counted as on a device, in blocks of one arena, so an engine behaves as it does on the GPU.
    Host
}

/// The slots, and the copies that have ended.
#[derive(Debug)]
pub(crate) struct Host {
    weights: WeightTable,
    copied: VecDeque<u64>,
    /// Slots that steps of each stream may use.
    leased: HashSet<(usize, StreamId)>,
}

impl AdapterPool {
    /// A pool for adapters of `model` in `dtype`, with `capacity.num_slots` slots.
    ///
    /// # Errors
    /// [`PoolError`] if a bound is invalid, or threads cannot be started.
    pub fn new(model: &Model, dtype: DType, capacity: Capacity, config: PoolConfig) -> Result<Self, PoolError> {
        let weights = WeightTable::pooled(model, dtype, capacity, config.arena_bytes)?;
        let bounds = weights.bounds().clone();
        Ok(Self { pool: Pool::new(Host { weights, copied: VecDeque::new(), leased: HashSet::new() }, bounds, config)? })
    }

    /// The slots, to make layers of and to step with. The pool alone loads and unloads.
    pub fn weights(&self) -> &WeightTable {
        &self.pool.backend().weights
    }

    /// Adds a compute stream: a thread that steps beside the [first](StreamId::FIRST).
    pub fn add_stream(&mut self) -> StreamId {
        self.pool.add_stream()
    }
}

impl Backend for Host {
    type Packed = Arc<Packed>;
    type Packer = ();

    fn row_bytes(_: &Model) -> usize {
        0
    }

    /// A copy takes no time.
    fn copies_parts(&self) -> bool {
        false
    }

    fn packer(&mut self, _copy: Option<&Copy>) -> ((), bool) {
        ((), false)
    }

    fn pack((): (), image: &SlotImage<'_>, _to: Range<usize>) -> Result<Arc<Packed>, LoadError> {
        Ok(Arc::new(Packed::new(image, |_| ())?))
    }

    fn seal(packed: Arc<Packed>) -> Result<Arc<Packed>, LoadError> {
        Ok(packed)
    }

    fn revoke(&mut self, _copy: &Copy) -> bool {
        false
    }

    fn finish(&mut self, _packed: &Arc<Packed>, _copy: &Copy) {}

    fn copy(&mut self, packed: &mut Arc<Packed>, copy: &Copy) -> Result<(), LoadError> {
        let room = Reservation::uncounted(self.weights.shared(), packed.bytes());
        self.weights.put(slot_at(copy.slot), Adapter { packed: Arc::clone(packed), room })?;
        self.copied.push_back(copy.number);
        Ok(())
    }

    fn next_copied(&mut self) -> Option<u64> {
        self.copied.pop_front()
    }

    fn lease(&mut self, granted: Granted, stream: StreamId) -> Result<(), PoolError> {
        if self.leased.insert((granted.slot, stream)) {
            self.weights.set_leased(granted.slot, true);
        }
        Ok(())
    }

    fn close(&mut self, slot: usize, stream: StreamId) {
        self.leased.remove(&(slot, stream));
        self.weights.set_leased(slot, self.leased.iter().any(|&(leased, _)| leased == slot));
    }

    fn may_evict(&self) -> bool {
        true
    }

    fn evict(&mut self, slot: usize) {
        self.weights.empty(slot_at(slot)).expect("the pool's slots are those of its table");
    }
}
