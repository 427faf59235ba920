//! The adapter pool of the CPU, whose device is host memory.

use std::{collections::VecDeque, ops::Range, sync::Arc, time::Duration};

use super::{
    Step, WeightTable, Workspace,
    upload::{Adapter, Packed, Reservation},
};
use crate::{
    DType,
    adapter::SlotImage,
    error::{LoadError, OperandError},
    model::Model,
    plan::Capacity,
    pool::{
        AdapterId, Backend, Copy, Granted, Lease, Outcome, Pool, PoolConfig, PoolError, Residency, Snapshot, Source,
        StreamId, adapter_pool, arena_bytes, slot_at,
    },
    routing::Batch,
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
    /// The pool's own handle of the table.
    owner: WeightTable,
    /// That of everybody else.
    weights: WeightTable,
    copied: VecDeque<u64>,
}

impl AdapterPool {
    /// A pool for adapters of `model` in `dtype`, with `capacity.num_slots` slots.
    ///
    /// # Errors
    /// [`PoolError`] if a bound is invalid, or threads cannot be started.
    pub fn new(model: &Model, dtype: DType, capacity: Capacity, config: PoolConfig) -> Result<Self, PoolError> {
        let weights = WeightTable::new(model, dtype, capacity, config.arena_bytes)?;
        let bounds = weights.bounds().clone();
        let host = Host { owner: weights.claim()?, weights, copied: VecDeque::new() };
        Ok(Self { pool: Pool::new(host, bounds, config)? })
    }

    /// Starts a step of `batch` on `stream`. The step borrows the pool, so that no slot changes before its last operation.
    ///
    /// ```
    /// # use aril::{cpu::{AdapterPool, Workspace}, pool::StreamId, routing::Batch};
    /// # fn step(pool: &mut AdapterPool, batch: &Batch<'_>, workspace: &mut Workspace) -> Result<(), Box<dyn std::error::Error>> {
    /// let step = pool.step(StreamId::FIRST, batch, workspace)?;
    /// println!("{}", step.num_tokens());
    /// pool.commit(StreamId::FIRST)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// ```compile_fail,E0502
    /// # use aril::{cpu::{AdapterPool, Workspace}, pool::StreamId, routing::Batch};
    /// # fn step(pool: &mut AdapterPool, batch: &Batch<'_>, workspace: &mut Workspace) -> Result<(), Box<dyn std::error::Error>> {
    /// let step = pool.step(StreamId::FIRST, batch, workspace)?;
    /// pool.commit(StreamId::FIRST)?;
    /// println!("{}", step.num_tokens());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`OperandError::NotLeased`] if no [lease](Lease) of the stream holds a slot of the batch, [`OperandError::NoSuchStream`], or
    /// as for [`WeightTable::step`].
    pub fn step<'a>(
        &'a self,
        stream: StreamId,
        batch: &Batch<'a>,
        workspace: &'a mut Workspace,
    ) -> Result<Step<'a>, OperandError> {
        let step = self.pool.backend().owner.step(batch, workspace)?;
        self.pool.check_leased(stream, batch.slots())?;
        Ok(step)
    }

    /// The table, to make layers of, which all compute streams have in common; `None` if the stream belongs to another pool. The pool
    /// alone loads, unloads and [steps](Self::step).
    pub fn weights(&self, stream: StreamId) -> Option<&WeightTable> {
        self.pool.has_stream(stream).then(|| &self.pool.backend().weights)
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
        let room = Reservation::uncounted(self.owner.shared(), packed.bytes());
        self.owner.put(slot_at(copy.slot), Adapter { packed: Arc::clone(packed), room })?;
        self.copied.push_back(copy.number);
        Ok(())
    }

    fn next_copied(&mut self) -> Option<u64> {
        self.copied.pop_front()
    }

    /// A step takes the adapters that are in the slots.
    fn point(&mut self, _: Granted, _: StreamId) -> Result<(), PoolError> {
        Ok(())
    }

    fn may_evict(&self) -> bool {
        true
    }

    fn evict(&mut self, slot: usize) {
        self.owner.unload(slot_at(slot)).expect("the pool's slots are those of its table");
    }
}
