//! The adapter pool of the CPU, whose device is host memory.

use std::{collections::VecDeque, ops::Range, sync::Arc, time::Duration};

use super::{
    Step, WeightTable, Workspace,
    upload::{Adapter, Packed, Reservation},
};
use crate::{
    DType, Slot,
    arena::blocks::whole_granules,
    error::{LoadError, OperandError},
    model::{Model, TpRank},
    plan::Capacity,
    pool::{
        self, AdapterId, Backend, Executor, HostTier, PoolConfig, PoolError, ReadEnd, Source, StreamId, Transfer,
        arena_bytes,
    },
    routing::Batch,
};

/// An [`AdapterPool`](pool::AdapterPool) on the CPU.
///
/// A step keeps its adapters by itself, and a copy only shares the host tier's memory: an adapter in both tiers is
/// stored once. Bytes are counted as on a device, in blocks of one arena, so an engine behaves as it does on the GPU.
pub type AdapterPool = pool::AdapterPool<Tiers>;

/// The memory of an [`AdapterPool`]: the slots, the host tier, and the copies that have ended.
#[derive(Debug)]
pub struct Tiers {
    /// The pool's own handle of the table.
    owner: WeightTable,
    /// The handle of everybody else.
    weights: WeightTable,
    host: HostTier<Arc<Packed>>,
    copied: VecDeque<u64>,
}

impl AdapterPool {
    /// A pool for adapters of `model` in `dtype`, with `capacity.num_slots` slots.
    ///
    /// # Errors
    /// [`PoolError`] if a bound is invalid, or threads cannot be started.
    pub fn new(model: &Model, dtype: DType, capacity: Capacity, config: PoolConfig) -> Result<Self, PoolError> {
        let weights = WeightTable::new(model, dtype, capacity, whole_granules(config.arena_bytes))?;
        let host = HostTier::new(weights.bounds().clone(), 0, config)?;
        let tiers = Tiers { owner: weights.claim()?, weights, host, copied: VecDeque::new() };
        Self::with(tiers, capacity.num_slots, config)
    }

    /// Size of an arena in bytes in which `count` adapters of ranks up to `max_rank` fit, even if they have factors for
    /// all modules of the model: for [`PoolConfig::arena_bytes`], or for the host tier.
    pub fn arena_bytes(model: &Model, dtype: DType, max_rank: usize, count: usize) -> usize {
        arena_bytes(model, dtype, max_rank, count, 0)
    }

    /// Adds a compute stream: a thread that steps beside the [first](StreamId::FIRST).
    pub fn add_stream(&mut self) -> StreamId {
        self.new_stream()
    }
}

impl Backend for Tiers {
    type Source = Source;
    type Weights = WeightTable;
    type Batch<'a> = Batch<'a>;
    type Workspace = Workspace;
    type Step<'a> = Step<'a>;
    type Error = OperandError;

    fn shard(&self, source: &Source) -> Result<Source, LoadError> {
        self.host.shard(source)
    }

    fn add(&mut self, id: AdapterId, source: Source) -> Result<usize, PoolError> {
        self.host.add(id, source)
    }

    /// All streams have it in common.
    fn weights(&self, _: StreamId) -> Option<&WeightTable> {
        Some(&self.weights)
    }

    fn slots<'b>(batch: &'b Batch<'_>) -> &'b [Slot] {
        batch.slots()
    }

    fn step<'a>(
        &'a self,
        _: StreamId,
        batch: &Batch<'a>,
        workspace: &'a mut Workspace,
    ) -> Result<Step<'a>, OperandError> {
        self.owner.step(batch, workspace)
    }
}

/// A copy takes no time, and a step takes the adapters that are in the slots.
impl Executor for Tiers {
    fn tp(&self) -> TpRank {
        self.host.tp()
    }

    fn remove(&mut self, id: AdapterId) {
        self.host.remove(id);
    }

    fn read(&mut self, id: AdapterId, _to: Range<usize>, _copy: Option<&Transfer>) -> bool {
        self.host.read(id, |image| Ok(Arc::new(Packed::new(image, |_| ())?)), Ok);
        false
    }

    fn notice(&mut self, wait: Option<Duration>) {
        self.host.notice(wait);
    }

    fn next_read(&mut self) -> Option<ReadEnd> {
        self.host.next_read()
    }

    fn copy(&mut self, copy: &Transfer) -> Result<(), LoadError> {
        let packed = self.host.packed(copy.id);
        let room = Reservation::uncounted(self.owner.shared(), packed.bytes());
        self.owner.put(copy.slot, Adapter { packed: Arc::clone(packed), room })?;
        self.copied.push_back(copy.number);
        Ok(())
    }

    fn next_copied(&mut self) -> Option<u64> {
        self.copied.pop_front()
    }

    fn evict(&mut self, slot: usize) {
        self.owner.unload(slot).expect("the pool's slots are those of its table");
    }

    fn forget(&mut self, id: AdapterId) {
        self.host.forget(id);
    }
}
