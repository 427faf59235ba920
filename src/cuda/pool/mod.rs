//! The adapter pool of a GPU, and the tables of its queues.

#![expect(unsafe_code, reason = "copies between memory that it owns")]

mod part_copy;

use std::{collections::VecDeque, ops::Range, sync::Arc, time::Duration};

use cudarc::driver::{CudaEvent, result};

use self::part_copy::{PartCopy, Unsealed};
use super::{
    LaunchError, Queue, RoutedBatch, Step, WeightTable, Workspace,
    loading::{Arena, Copied, Packing, row_bytes},
    memory::{HostArena, HostPart},
    raw::Descriptor,
    stream::{OwnStream, Relaxed},
};
use crate::{
    DType, Slot,
    adapter::{SlotImage, layout::ALIGNMENT_BYTES},
    arena::blocks,
    arena::copies::{Copies, CopyStream as _},
    error::{LoadError, OperandError, SlotError},
    model::{Model, TpRank},
    plan::Capacity,
    pool::{
        self, AdapterId, Backend, Executor, Granted, HostTier, PoolConfig, PoolError, ReadEnd, Source, StreamId,
        Transfer, arena_bytes,
    },
    slots::Bounds,
};

/// An [`AdapterPool`](pool::AdapterPool) on a GPU.
///
/// Adapters are packed in page-locked host memory, and copied on a stream of the pool's own. Every compute queue has
/// its own [table](Self::weights) of descriptors over one arena: the first lease of an adapter on a queue points the
/// slot of that table to the adapter, in stream order. Table addresses never change, so graphs follow the current
/// slots.
///
/// A lease that has to enqueue work on a stream that is being captured is refused with
/// [`LaunchError::Capturing`]. While any stream is, no adapter is evicted. Dropping a pool waits for its copies.
pub type AdapterPool = pool::AdapterPool<Tiers>;

/// The memory and the streams of an [`AdapterPool`].
#[derive(Debug)]
pub struct Tiers {
    bounds: Bounds,
    /// By stream.
    lanes: Vec<Lane>,
    arena: Arc<Arena>,
    host: Arc<HostArena>,
    tier: HostTier<Packed>,
    /// For the copies.
    stream: Arc<OwnStream>,
    is_poisoning: bool,
    /// What was copied to a slot last, by slot.
    contents: Vec<Option<Copied>>,
    /// Copies that may not have run yet: their numbers and events, in order.
    copying: VecDeque<(u64, Arc<CudaEvent>)>,
    /// Copies that reads make, by number. Those that have failed or were revoked stay until the next read.
    part_copies: Vec<(u64, Arc<PartCopy>)>,
}

/// Address of a block whose place is not known yet.
const NOWHERE: u64 = 1 << 20;

/// Bytes of a part of an adapter that is copied while others are packed. Smaller ones take more calls of the driver,
/// and of larger ones more are left when the last factor is packed.
const PART_BYTES: usize = 1 << 20;

/// A compute stream.
#[derive(Debug)]
struct Lane {
    /// The pool's own handle of the table.
    owner: WeightTable,
    /// The handle of everybody else.
    weights: WeightTable,
    /// The copy that each slot of the table was pointed to last; 0 if the slot has no adapter.
    pointed: Vec<u64>,
    /// Slots whose rows still point to adapters that were evicted, because they could not be emptied.
    stale: Vec<usize>,
}

/// An adapter in host memory.
#[derive(Debug)]
struct Packed {
    bytes: usize,
    max_rank: usize,
    /// The descriptors of a block at [`NOWHERE`].
    row: Vec<Descriptor>,
    /// The copy that its read makes.
    // Declared before the memory: dropping it waits for copies from there.
    unsealed: Option<Unsealed>,
    /// The block: the image, and behind it the descriptors.
    part: HostPart,
}

/// Writes an adapter to page-locked memory, and copies it to the device meanwhile.
#[derive(Debug)]
struct Packer {
    // Declared first: dropping it waits for copies from the memory.
    unsealed: Unsealed,
    part: HostPart,
}

impl AdapterPool {
    /// A pool for adapters of `model` in `dtype`, with `capacity.num_slots` slots and an arena in device memory.
    /// `queue` is its [first stream](StreamId::FIRST).
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
        let bounds = Bounds { model: model.clone(), dtype, capacity: capacity.checked()? };
        Self::with(Tiers::new(queue, bounds, config)?, capacity.num_slots, config)
    }

    /// Size of an arena in bytes in which `count` adapters of ranks up to `max_rank` fit, even if they have factors for
    /// all modules of the model: for [`PoolConfig::arena_bytes`], or for the host tier.
    pub fn arena_bytes(model: &Model, dtype: DType, max_rank: usize, count: usize) -> usize {
        arena_bytes(model, dtype, max_rank, count, row_bytes(model.num_entries()))
    }

    /// Adds a compute stream with a table of its own.
    ///
    /// # Errors
    /// [`PoolError::Device`] if the queue belongs to another context, its stream is being captured, or device memory is
    /// exhausted.
    pub fn add_queue(&mut self, queue: &Queue) -> Result<StreamId, PoolError> {
        self.backend.add_lane(queue)?;
        Ok(self.new_stream())
    }
}

impl Tiers {
    fn new(queue: &Queue, bounds: Bounds, config: PoolConfig) -> Result<Self, PoolError> {
        let num_slots = bounds.capacity.num_slots;
        let arena = Arc::new(Arena::new(queue, config.arena_bytes)?);
        let stream = Arc::new(OwnStream::new(queue)?);
        arena.pending().iter().try_for_each(|event| stream.wait_for(event))?;
        let tier = HostTier::new(bounds.clone(), row_bytes(bounds.model.num_entries()), config)?;
        let mut tiers = Self {
            bounds,
            lanes: Vec::new(),
            arena,
            // As many bytes as the pool's state gives away, which are whole granules.
            host: Arc::new(HostArena::new(queue, blocks::whole_granules(config.host_bytes))?),
            tier,
            stream,
            is_poisoning: config.is_poisoning,
            contents: (0..num_slots).map(|_| None).collect(),
            copying: VecDeque::new(),
            part_copies: Vec::new(),
        };
        tiers.add_lane(queue)?;
        Ok(tiers)
    }

    fn add_lane(&mut self, queue: &Queue) -> Result<(), PoolError> {
        queue.kernels().check_context("the pool", self.arena.queue().stream().context())?;
        let weights = WeightTable::sharing(queue, self.bounds.clone(), Arc::clone(&self.arena))?;
        let owner = weights.claim()?;
        self.lanes.push(Lane { owner, weights, pointed: vec![0; self.contents.len()], stale: vec![] });
        Ok(())
    }

    /// Empties the rows of adapters that were evicted, and makes later copies wait for all launches that may have read
    /// them.
    fn clear_rows(&mut self) -> Result<(), LaunchError> {
        for Lane { weights, stale, .. } in self.lanes.iter_mut().filter(|lane| !lane.stale.is_empty()) {
            self.stream.wait_for(&weights.clear(stale)?)?;
            stale.clear();
        }
        Ok(())
    }

    /// Makes the stream wait for the earlier uses of a block, and returns its address.
    fn take_block(&mut self, copy: &Transfer) -> Result<u64, LaunchError> {
        self.clear_rows()?;
        self.arena.queue().bind()?;
        let block = self.arena.base() + copy.to.start as u64;
        if self.is_poisoning {
            // SAFETY: the block is in the arena, and the stream waits for its earlier uses.
            unsafe { result::memset_d8_async(block, 0xff, copy.to.len(), self.stream.raw().as_raw().cast()) }?;
        }
        Ok(block)
    }

    /// Makes room for the parts of a copy.
    fn begin(&mut self, copy: &Transfer) -> Result<Arc<PartCopy>, LaunchError> {
        let block = self.take_block(copy)?;
        let parts = Arc::new(PartCopy::new(self.arena.queue(), &self.stream, block, copy.to.len())?);
        self.part_copies.retain(|(_, parts)| Arc::strong_count(parts) > 1 || parts.is_complete());
        self.part_copies.push((copy.number, Arc::clone(&parts)));
        Ok(parts)
    }

    /// Takes note of a copy that has been enqueued, of an adapter to this block.
    fn has_enqueued(&mut self, copy: &Transfer, block: u64, copied: Arc<CudaEvent>) {
        self.copying.push_back((copy.number, Arc::clone(&copied)));
        let &mut Packed { bytes, max_rank, .. } = self.tier.packed(copy.id);
        self.contents[copy.slot] = Some(Copied { copied, row: block + row_at(bytes) as u64, bytes, max_rank });
    }
}

impl Packer {
    /// Packs an image to its place in the host tier. If it fails, or what it returns is dropped before it is
    /// [sealed](Packed::seal), no part of the copy is on its way any more.
    fn pack(mut self, image: &SlotImage<'_>) -> Result<Packed, LoadError> {
        let (bytes, row) = (image.bytes(), Descriptor::row(image, NOWHERE));
        let (block, end) = (self.part.bytes(), block_end(bytes, &row));
        fits(end, block.len())?;
        let (place, of_row) = block[..end].split_at_mut(row_at(bytes));
        let place = &mut place[..bytes];
        match self.unsealed.parts() {
            None => image.write_to(place)?,
            Some(parts) => {
                let scratch = of_row.first_chunk_mut();
                let packing = Packing::new(image, parts.queue()).zip(scratch);
                // SAFETY: nothing writes to the bytes before the read has ended. It ends after the copies, for whose
                // end the part is kept, or is sealed, when the part knows it. `begin` has made the stream wait.
                let pack = |(packing, scratch): (Packing<'_>, _)| unsafe { parts.pack(&packing, place, scratch) };
                let is_packed = packing.map_or(Ok(false), pack)?;
                if !is_packed {
                    // SAFETY: as above.
                    image.write_in_parts(place, PART_BYTES, |at, part| Ok(unsafe { parts.copy(at, part) }?))?;
                }
                write_row(&row, of_row, parts.block());
                // SAFETY: as above.
                unsafe { parts.copy(row_at(bytes), of_row) }?;
            }
        }
        let Self { unsealed, part } = self;
        Ok(Packed { bytes, max_rank: image.max_rank(), row, unsealed: Some(unsealed), part })
    }
}

impl Packed {
    /// The adapter is the one that was asked for. If its copy was revoked, waits for its parts.
    fn seal(mut self) -> Result<Self, LoadError> {
        if let Some(unsealed) = self.unsealed.take() {
            let parts = unsealed.0.clone();
            unsealed.seal()?;
            parts.iter().for_each(|parts| self.part.is_copied_until(&parts.last()));
        }
        Ok(self)
    }

    /// Enqueues the last of some copies, to a block of so many bytes at this address. Returns their end.
    ///
    /// # Safety
    /// The stream of the copies waits for earlier uses of the block, and later ones wait for the end of the copies. The
    /// stream belongs to the thread's current context.
    unsafe fn copy_to(
        &mut self,
        block: u64,
        block_bytes: usize,
        copies: Copies<OwnStream>,
    ) -> Result<Arc<CudaEvent>, LoadError> {
        let Self { bytes, row, part, .. } = self;
        let end = block_end(*bytes, row);
        fits(end, block_bytes.min(part.bytes().len()))?;
        write_row(row, &mut part.bytes()[row_at(*bytes)..end], block);
        // SAFETY: the caller's obligations. The block is as large.
        Ok(unsafe { part.copy_to(end, block, copies) }?)
    }
}

impl Backend for Tiers {
    type Source = Source;
    type Weights = WeightTable;
    type Batch<'a> = RoutedBatch<'a>;
    type Workspace = Workspace;
    type Step<'a> = Step<'a>;
    type Error = LaunchError;

    fn shard(&self, source: &Source) -> Result<Source, LoadError> {
        self.tier.shard(source)
    }

    fn add(&mut self, id: AdapterId, source: Source) -> Result<usize, PoolError> {
        self.tier.add(id, source)
    }

    fn weights(&self, stream: StreamId) -> Option<&WeightTable> {
        self.lanes.get(stream.0).map(|lane| &lane.weights)
    }

    fn slots<'b>(batch: &'b RoutedBatch<'_>) -> &'b [Slot] {
        batch.slots()
    }

    fn step<'a>(
        &'a self,
        stream: StreamId,
        batch: &RoutedBatch<'a>,
        workspace: &'a mut Workspace,
    ) -> Result<Step<'a>, LaunchError> {
        let lane = self.lanes.get(stream.0).ok_or(OperandError::NoSuchStream { stream })?;
        lane.owner.step(batch, workspace)
    }
}

impl Executor for Tiers {
    fn tp(&self) -> TpRank {
        self.tier.tp()
    }

    fn remove(&mut self, id: AdapterId) {
        self.tier.remove(id);
    }

    fn read(&mut self, id: AdapterId, to: Range<usize>, copy: Option<&Transfer>) -> bool {
        let bytes = to.len();
        let part = self.host.lend(to);
        // After an error, the copy of the whole adapter returns it.
        let parts = copy.filter(|_| part.is_some()).and_then(|copy| self.begin(copy).ok());
        let is_copied = parts.is_some();
        let packer = part.map(|part| Packer { unsealed: Unsealed(parts), part });
        let pack = move |image: &SlotImage<'_>| match packer {
            Some(packer) => packer.pack(image),
            // Somebody has some of its place.
            None => Err(LoadError::Full { bytes, largest_gap: 0 }),
        };
        self.tier.read(id, pack, Packed::seal);
        is_copied
    }

    fn notice(&mut self, wait: Option<Duration>) {
        self.tier.notice(wait);
    }

    fn next_read(&mut self) -> Option<ReadEnd> {
        self.tier.next_read()
    }

    fn copies_parts(&self) -> bool {
        true
    }

    fn revoke(&mut self, copy: &Transfer) -> bool {
        let parts = self.part_copies.iter().find(|(number, _)| *number == copy.number);
        parts.is_some_and(|(_, parts)| parts.revoke())
    }

    fn abandon(&mut self, copy: &Transfer) -> bool {
        let is_of = |(number, parts): &(u64, Arc<PartCopy>)| *number == copy.number && parts.is_complete();
        let Some(place) = self.part_copies.iter().position(is_of) else { return false };
        let (number, parts) = self.part_copies.swap_remove(place);
        self.copying.push_back((number, Arc::clone(parts.copied())));
        true
    }

    fn finish(&mut self, copy: &Transfer) {
        let place = self.part_copies.iter().position(|(number, _)| *number == copy.number);
        let (_, parts) = self.part_copies.swap_remove(place.expect("a read that is sealed has its parts"));
        self.has_enqueued(copy, parts.block(), Arc::clone(parts.copied()));
    }

    fn copy(&mut self, copy: &Transfer) -> Result<(), LoadError> {
        let block = self.take_block(copy)?;
        let copies = Copies::begin(&self.stream, self.arena.queue().new_event()?);
        let packed = self.tier.packed(copy.id);
        // SAFETY: `take_block` has made the stream wait and the context current. The pool does not overwrite the block
        // before the copy has ended, and a slot that points there waits for it.
        let copied = unsafe { packed.copy_to(block, copy.to.len(), copies) }?;
        self.has_enqueued(copy, block, copied);
        Ok(())
    }

    fn next_copied(&mut self) -> Option<u64> {
        let _relaxed = Relaxed::new();
        let is_copied = self.copying.front().is_some_and(|(_, copied)| copied.is_complete());
        if is_copied { self.copying.pop_front().map(|(number, _)| number) } else { None }
    }

    fn settle(&mut self) {
        let _relaxed = Relaxed::new();
        for (_, copied) in &self.copying {
            // On an error the context is gone, and with it the copy.
            let _ = copied.synchronize();
        }
    }

    fn point(&mut self, granted: &[Granted], stream: StreamId) -> Result<(), PoolError> {
        let lane = &mut self.lanes[stream.0];
        for &Granted { slot, number, .. } in granted {
            if lane.pointed[slot] != number {
                let content = self.contents[slot].as_ref().expect("a leased slot has a block");
                lane.owner.point(slot, content)?;
                lane.pointed[slot] = number;
            }
        }
        Ok(())
    }

    /// False during a capture: the row could not be cleared.
    fn may_evict(&mut self) -> bool {
        self.lanes.iter().all(|lane| lane.weights.queue().prepare().is_ok())
    }

    fn evict(&mut self, slot: usize) {
        for lane in &mut self.lanes {
            lane.weights.forget(slot);
            if std::mem::take(&mut lane.pointed[slot]) != 0 {
                lane.stale.push(slot);
            }
        }
        self.contents[slot] = None;
        // After an error, the next copy tries again and returns it.
        let _ = self.clear_rows();
    }

    fn forget(&mut self, id: AdapterId) {
        self.tier.forget(id);
    }
}

impl Drop for Tiers {
    /// Waits for the copies between host memory and the arena. Reads copy nothing more.
    fn drop(&mut self) {
        for (_, parts) in self.part_copies.drain(..) {
            parts.revoke();
        }
        // On an error the context is gone, and with it the copies.
        let _ = self.stream.synchronize();
    }
}

/// Where the descriptors are in the block of an image of `image_bytes` bytes.
fn row_at(image_bytes: usize) -> usize {
    image_bytes.next_multiple_of(ALIGNMENT_BYTES)
}

/// Where the block of an image of `image_bytes` bytes with these descriptors ends.
fn block_end(image_bytes: usize, row: &[Descriptor]) -> usize {
    row_at(image_bytes) + size_of_val(row)
}

/// Rejects what is larger than its place.
fn fits(bytes: usize, reserved: usize) -> Result<(), SlotError> {
    if bytes <= reserved { Ok(()) } else { Err(SlotError::OtherImage { bytes, reserved }) }
}

/// Writes the descriptors of an adapter whose block is at this address to memory of their size.
fn write_row(row: &[Descriptor], to: &mut [u8], block: u64) {
    let row: Vec<_> = row.iter().map(|descriptor| descriptor.moved(NOWHERE, block)).collect();
    to.copy_from_slice(bytemuck::cast_slice(&row));
}
