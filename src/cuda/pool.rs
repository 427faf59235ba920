//! The adapter pool of a GPU.

#![expect(unsafe_code, reason = "copies between memory that it owns")]

use std::{collections::VecDeque, ops::Range, sync::Arc, time::Duration};

use cudarc::driver::{CudaEvent, result};

use super::{
    LaunchError, Queue, WeightTable, arena::Arena, capturing::Relaxed, flip::Flip, host::NOWHERE,
    host_arena::HostArena, own_stream::OwnStream, raw::Descriptor, table::row_bytes,
};
use crate::{
    DType,
    adapter::{SlotImage, layout::ALIGNMENT_BYTES},
    error::LoadError,
    model::Model,
    plan::Capacity,
    pool::{
        AdapterId, Backend, Copy, Granted, Lease, Outcome, Pool, PoolConfig, PoolError, Residency, Snapshot, Source,
        StreamId, adapter_pool, arena_bytes, slot_at,
    },
    residency::Bounds,
};

adapter_pool! {
    ///
    /// Adapters are packed in page-locked host memory, and copied on a stream of the pool's own. Every compute queue has its own
    /// [table](Self::weights) of descriptors over one arena: the first lease of an adapter on a queue points the slot of that table
    /// to the adapter, in stream order. Table addresses never change, so graphs follow the current slots.
    ///
    /// A lease that has to enqueue work on a stream that is being captured is refused with
    /// [`LaunchError::Capturing`]. While any stream is, no adapter is evicted. Dropping a pool waits for its copies.
    Device
}

/// The memory and the streams of a pool.
#[derive(Debug)]
pub(crate) struct Device {
    bounds: Bounds,
    /// By stream.
    lanes: Vec<Lane>,
    arena: Arc<Arena>,
    host: Arc<HostArena>,
    /// For the copies.
    stream: OwnStream,
    is_poisoning: bool,
    /// What was copied to a slot last, by slot.
    contents: Vec<Option<Content>>,
    /// Copies that may not have run yet: their numbers and events, in order.
    copying: VecDeque<(u64, Arc<CudaEvent>)>,
}

/// A compute stream.
#[derive(Debug)]
struct Lane {
    weights: WeightTable,
    /// The copy that each slot of the table was pointed to last; 0 if the slot has no adapter.
    flipped: Vec<u64>,
    /// Slots whose rows still point to adapters that were evicted, because they could not be emptied.
    stale: Vec<usize>,
}

/// The block of a slot.
#[derive(Debug)]
struct Content {
    copied: Arc<CudaEvent>,
    /// Address of the descriptors.
    row: u64,
    bytes: usize,
    max_rank: usize,
}

/// An adapter in host memory.
#[derive(Debug)]
pub(crate) struct Packed {
    bytes: usize,
    max_rank: usize,
    /// The descriptors of a block at [`NOWHERE`].
    row: Vec<Descriptor>,
}

impl AdapterPool {
    /// A pool for adapters of `model` in `dtype`, with `capacity.num_slots` slots and an arena in device memory. `queue` is its
    /// [first stream](StreamId::FIRST).
    ///
    /// # Errors
    /// [`PoolError`] if a bound is invalid, device or page-locked memory is exhausted, or the stream is being captured.
    pub fn new(
        queue: &Queue,
        model: &Model,
        dtype: DType,
        capacity: Capacity,
        config: PoolConfig,
    ) -> Result<Self, PoolError> {
        let bounds = Bounds { model: model.clone(), dtype, capacity: capacity.checked()?, is_pooled: true };
        let device = Device::new(queue, bounds.clone(), config)?;
        Ok(Self { pool: Pool::new(device, bounds, config)? })
    }

    /// Adds a compute stream with a table of its own.
    ///
    /// # Errors
    /// [`PoolError::Device`] if the queue belongs to another context, its stream is being captured, or device memory is exhausted.
    pub fn add_queue(&mut self, queue: &Queue) -> Result<StreamId, PoolError> {
        self.pool.backend_mut().add_lane(queue)?;
        Ok(self.pool.add_stream())
    }

    /// The table of a compute stream, to make layers of and to step with; `None` if the stream belongs to another pool. The pool
    /// alone loads and unloads.
    pub fn weights(&self, stream: StreamId) -> Option<&WeightTable> {
        self.pool.backend().lanes.get(stream.0).map(|lane| &lane.weights)
    }
}

impl Device {
    fn new(queue: &Queue, bounds: Bounds, config: PoolConfig) -> Result<Self, LaunchError> {
        let num_slots = bounds.capacity.num_slots;
        let arena = Arc::new(Arena::new(queue, config.arena_bytes)?);
        let stream = OwnStream::new(queue)?;
        arena.pending().iter().try_for_each(|event| stream.wait_for(event))?;
        let mut device = Self {
            bounds,
            lanes: Vec::new(),
            arena,
            host: Arc::new(HostArena::new(queue, config.host_bytes)?),
            stream,
            is_poisoning: config.is_poisoning,
            contents: (0..num_slots).map(|_| None).collect(),
            copying: VecDeque::new(),
        };
        device.add_lane(queue)?;
        Ok(device)
    }

    fn add_lane(&mut self, queue: &Queue) -> Result<(), LaunchError> {
        queue.kernels().check_context("the pool", self.arena.queue().stream().context())?;
        let weights = WeightTable::with(queue, self.bounds.clone(), Arc::clone(&self.arena))?;
        self.lanes.push(Lane { weights, flipped: vec![0; self.contents.len()], stale: vec![] });
        Ok(())
    }

    /// Empties the rows of adapters that were evicted, and makes later copies wait for all launches that may have read them.
    fn clear_rows(&mut self) -> Result<(), LaunchError> {
        for Lane { weights, stale, .. } in self.lanes.iter_mut().filter(|lane| !lane.stale.is_empty()) {
            self.stream.wait_for(&weights.clear(stale)?)?;
            stale.clear();
        }
        Ok(())
    }

    /// Enqueues the copy of a block.
    fn enqueue(&self, copy: &Copy, copied: &CudaEvent) -> Result<(), LaunchError> {
        let to = self.arena.base() + copy.to.start as u64;
        if self.is_poisoning {
            // SAFETY: the block is in the arena, and the stream waits for its earlier uses.
            unsafe { result::memset_d8_async(to, 0xff, copy.to.len(), self.stream.raw().as_raw().cast()) }?;
        }
        // SAFETY: the pool does not change the part before the copy has ended, and the memory lives until `drop` has waited for
        // it. The block is as large, and the stream waits for its earlier uses; later ones wait for `copied`.
        unsafe { self.host.copy_to(copy.from.clone(), to, self.stream.raw()) }?;
        self.stream.record(copied).inspect_err(|_| {
            // Nobody could wait for the copy. With the driver's error, so much as waiting may fail.
            let _ = self.stream.synchronize();
        })
    }
}

impl Backend for Device {
    type Packed = Packed;
    type Packer = Arc<HostArena>;

    fn row_bytes(model: &Model) -> usize {
        row_bytes(model.num_entries())
    }

    fn packer(&self) -> Arc<HostArena> {
        Arc::clone(&self.host)
    }

    fn pack(host: &Arc<HostArena>, image: &SlotImage<'_>, to: Range<usize>) -> Result<Packed, LoadError> {
        let bytes = image.bytes();
        // SAFETY: the pool has given the place to this read alone.
        image.write_to(unsafe { host.part(to.start..to.start + bytes) })?;
        Ok(Packed { bytes, max_rank: image.max_rank(), row: Descriptor::row(image, NOWHERE) })
    }

    fn copy(&mut self, packed: &mut Packed, copy: &Copy) -> Result<(), LoadError> {
        self.clear_rows()?;
        let queue = self.arena.queue();
        queue.bind().map_err(LoadError::from)?;
        let block = self.arena.base() + copy.to.start as u64;
        let row: Vec<_> = packed.row.iter().map(|descriptor| descriptor.moved(NOWHERE, block)).collect();
        let row_bytes: &[u8] = bytemuck::cast_slice(&row);
        let row_at = packed.bytes.next_multiple_of(ALIGNMENT_BYTES);
        let row_start = copy.from.start + row_at;
        // SAFETY: the adapter is in host memory, and neither its read nor a copy of it is under way.
        unsafe { self.host.part(row_start..row_start + row_bytes.len()) }.copy_from_slice(row_bytes);
        let copied = Arc::new(queue.new_event()?);
        self.enqueue(copy, &copied)?;
        self.copying.push_back((copy.number, Arc::clone(&copied)));
        self.contents[copy.slot] =
            Some(Content { copied, row: block + row_at as u64, bytes: packed.bytes, max_rank: packed.max_rank });
        Ok(())
    }

    fn next_copied(&mut self) -> Option<u64> {
        let _relaxed = Relaxed::new();
        let is_copied = self.copying.front().is_some_and(|(_, copied)| copied.is_complete());
        if is_copied { self.copying.pop_front().map(|(number, _)| number) } else { None }
    }

    fn lease(&mut self, granted: Granted, stream: StreamId) -> Result<(), PoolError> {
        let Granted { slot, number, .. } = granted;
        let lane = &mut self.lanes[stream.0];
        if lane.flipped[slot] != number {
            let content = self.contents[slot].as_ref().expect("a leased slot has a block");
            let &Content { ref copied, row, bytes, max_rank } = content;
            lane.weights.flip(slot_at(slot), &Flip { copied, row, bytes, max_rank })?;
            lane.flipped[slot] = number;
        }
        lane.weights.set_leased(slot, true);
        Ok(())
    }

    fn close(&mut self, slot: usize, stream: StreamId) {
        self.lanes[stream.0].weights.set_leased(slot, false);
    }

    /// Not while a stream is being captured, which could not empty its row.
    fn may_evict(&self) -> bool {
        self.lanes.iter().all(|lane| lane.weights.queue().enter().is_ok())
    }

    fn evict(&mut self, slot: usize) {
        for lane in &mut self.lanes {
            lane.weights.forget(slot_at(slot));
            if std::mem::take(&mut lane.flipped[slot]) != 0 {
                lane.stale.push(slot);
            }
        }
        self.contents[slot] = None;
        // After an error, the next copy tries again and returns it.
        let _ = self.clear_rows();
    }
}

impl Drop for Device {
    /// Waits for the copies, which read host memory and write to the arena.
    fn drop(&mut self) {
        let _relaxed = Relaxed::new();
        for (_, copied) in self.copying.drain(..) {
            // On an error the context is gone, and with it the copy.
            let _ = copied.synchronize();
        }
    }
}
