//! The table of adapters in device memory.

#![expect(unsafe_code, reason = "calls the driver on memory that it owns")]

use std::{fmt, sync::Arc};

use cudarc::driver::{CudaEvent, result};

use super::{
    Filled, Kept, LaunchError, Queue, Region, Relaxed, Reservation, Staging,
    arena::Arena,
    raw::{self, Descriptor, DeviceRegion},
    staging::Stagings,
    upload::Room,
};
use crate::{
    DType, Slot,
    adapter::SlotImage,
    arena::blocks::{self, Block},
    arena::copies::{Arena as _, Copies},
    error::{LoadError, OperandError, SlotError},
    model::Model,
    plan::{Capacity, ExpertsPlan, ForwardPlan, LinearPlan, PlanError, WorkspaceBytes},
    sizes::product,
    slots::{Bounds, Contents, SlotInfo, Slots, Usage},
};

/// Adapters in device memory, one per slot: an arena of blocks of exact size, and the descriptor table that points into
/// it. Clones refer to the same table.
///
/// One thread may step while others reserve, fill and commit. A slot changes in stream order: work enqueued before a
/// commit sees the previous adapter, work enqueued after it the new one. The table's address never changes, so graphs
/// follow the current slots.
#[derive(Clone)]
#[doc(alias = "max_loras")]
#[doc(alias = "lora_a_stacked")]
pub struct WeightTable {
    pub(super) shared: Arc<Shared>,
    /// Whether this handle is that of a pool.
    is_owner: bool,
}

pub(super) struct Shared {
    pub(super) queue: Queue,
    bounds: Bounds,
    pub(super) arena: Arc<Arena>,
    /// Whether a pool has adapters in the arena beside those in the slots.
    shares_arena: bool,
    table: Region,
    /// `None` for blocks that belong to a pool.
    pub(super) slots: Slots<Option<Block>>,
    /// For [`WeightTable::load`].
    stagings: Stagings,
}

impl fmt::Debug for WeightTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Bounds { dtype, capacity, .. } = &self.shared.bounds;
        f.debug_struct("WeightTable")
            .field("dtype", dtype)
            .field("capacity", capacity)
            .field("usage", &self.usage())
            .finish_non_exhaustive()
    }
}

table_methods!(shared.slots);

/// An adapter of a pool, in a block that ends with a row of descriptors.
#[derive(Debug)]
pub(in crate::cuda) struct Copied {
    /// The end of the copy of block and row.
    pub(in crate::cuda) copied: Arc<CudaEvent>,
    /// Address of the descriptors.
    pub(in crate::cuda) row: u64,
    /// Size of the image.
    pub(in crate::cuda) bytes: usize,
    pub(in crate::cuda) max_rank: usize,
}

/// The slots of a step's batch, in which the batch's adapters are.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Loaded<'a> {
    weights: &'a WeightTable,
    slots: &'a [Slot],
    /// Changes of the table's slots that had begun before.
    changes: u64,
}

impl<'a> Loaded<'a> {
    pub(in crate::cuda) fn slots(&self) -> &'a [Slot] {
        self.slots
    }

    pub(in crate::cuda) fn is_of(&self, weights: &WeightTable) -> bool {
        Arc::ptr_eq(&self.weights.shared, &weights.shared)
    }

    /// Rejects a batch of which an adapter is in its slot no longer. Work enqueued before a call that returns `Ok` was
    /// enqueued before the adapters change.
    pub(in crate::cuda) fn check(&self) -> Result<(), OperandError> {
        let &Self { weights, slots, changes } = self;
        if weights.shared.slots.changes() == changes { Ok(()) } else { weights.check_loaded(slots) }
    }
}

impl WeightTable {
    /// The slots of a batch. Rejects them if their adapters are not there.
    pub(in crate::cuda) fn loaded_slots<'a>(&'a self, slots: &'a [Slot]) -> Result<Loaded<'a>, OperandError> {
        let changes = self.shared.slots.changes();
        self.check_loaded(slots)?;
        Ok(Loaded { weights: self, slots, changes })
    }

    /// A table of `capacity.num_slots` empty slots for adapters of `model` in `dtype`, with an arena of `arena_bytes`
    /// bytes for their factors. [`arena_bytes`](Self::arena_bytes) computes the size from adapters, and
    /// [`arena_bytes_for`](Self::arena_bytes_for) from the bounds.
    ///
    /// # Errors
    /// [`LaunchError`] if a bound of the capacity is invalid, or device memory or page-locked memory, of which
    /// [`load`](Self::load) needs 16 MiB, is exhausted.
    pub fn new(
        queue: &Queue,
        model: &Model,
        dtype: DType,
        capacity: Capacity,
        arena_bytes: usize,
    ) -> Result<Self, LaunchError> {
        let bounds = Bounds { model: model.clone(), dtype, capacity: capacity.checked()? };
        Self::with(queue, bounds, Arc::new(Arena::new(queue, arena_bytes)?), false)
    }

    /// A table with its factors in an arena that a pool shares among tables, and that may belong to another queue of
    /// the same context.
    pub(in crate::cuda) fn sharing(queue: &Queue, bounds: Bounds, arena: Arc<Arena>) -> Result<Self, LaunchError> {
        Self::with(queue, bounds, arena, true)
    }

    fn with(queue: &Queue, bounds: Bounds, arena: Arc<Arena>, shares_arena: bool) -> Result<Self, LaunchError> {
        let num_slots = bounds.capacity.num_slots;
        let table = Region::new(queue, product(&[num_slots, row_bytes(bounds.model.num_entries())]))?;
        let slots = Slots::new(num_slots);
        // A pool has page-locked memory of its own.
        let stagings = if shares_arena { Stagings::default() } else { Stagings::with_one(queue)? };
        let shared = Shared { queue: queue.clone(), bounds, arena, shares_arena, table, slots, stagings };
        Ok(Self { shared: Arc::new(shared), is_owner: false })
    }

    /// Size of an arena in bytes that has room for all these adapters, loaded one at a time in any order.
    ///
    /// It is more than the sum of [`SlotImage::bytes`]: sizes are rounded up to 256 bytes, and a load also needs
    /// [`num_entries`](Model::num_entries) [`Descriptor`]s.
    ///
    /// To replace adapters while all others stay loaded, count the largest one twice, because old and new exist at
    /// once. That is enough for adapters of one size. Where sizes differ, a replaced adapter may leave a gap that is
    /// too small for the next one: count the largest one three times for one slot that is replaced again and again; for
    /// several slots no number is always enough, and a load that finds no gap is refused ([`LoadError::Full`]).
    pub fn arena_bytes<'a>(images: impl IntoIterator<Item = &'a SlotImage<'a>>) -> usize {
        let sizes = images.into_iter().map(|image| (image.bytes(), row_bytes(image.num_entries())));
        let (blocks, rows): (Vec<_>, Vec<_>) = sizes.unzip();
        blocks::bytes_for(blocks, rows.into_iter().max().unwrap_or(0))
    }

    /// Size of an arena in bytes in which adapters of ranks up to `capacity.max_rank` fit into all slots, even if they
    /// have factors for all modules of the model, and one more, which replaces another. Needs neither adapters nor a
    /// device.
    ///
    /// Blocks have the exact size of their adapters, so that an engine whose adapters are smaller may give less. What
    /// [`arena_bytes`](Self::arena_bytes) says of replacements holds here, too.
    pub fn arena_bytes_for(model: &Model, dtype: DType, capacity: Capacity) -> usize {
        let image = SlotImage::max_bytes(model, dtype, capacity.max_rank);
        let count = capacity.num_slots.saturating_add(1);
        blocks::bytes_for_equal(image, count, row_bytes(model.num_entries()))
    }

    /// Loads an adapter into the slot with this index and replaces the previous one: [`reserve`](Self::reserve),
    /// [`fill`](Reservation::fill) and [`commit`](Self::commit), with a [`Staging`] of the table. The arena must have
    /// room for both. Returns the slot, as batches name it.
    ///
    /// Weights are converted on rayon's threads. Blocks this thread until the copies have finished; other threads may
    /// step meanwhile.
    ///
    /// # Errors
    /// [`LoadError`] if the image does not match the table, the arena is full, a weight has no finite value in the
    /// table's element type, or the stream is being captured. The slot is then unchanged.
    pub fn load(&self, slot: usize, image: &SlotImage<'_>) -> Result<Slot, LoadError> {
        self.load_with_progress(slot, image, |_| ())
    }

    /// Like [`load`](Self::load), and calls `progress` with the number of bytes whose copies have been enqueued, out of
    /// [`SlotImage::bytes`].
    ///
    /// # Errors
    /// As for `load`.
    pub fn load_with_progress(
        &self,
        slot: usize,
        image: &SlotImage<'_>,
        progress: impl FnMut(usize),
    ) -> Result<Slot, LoadError> {
        self.check_slot(slot)?;
        self.shared.queue.prepare()?;
        let filled = self.fill_with_progress(self.reserve(image)?, image, progress)?;
        self.commit(slot, filled)
    }

    /// A staging of the caller's own, for [`Reservation::fill`] on the calling thread.
    ///
    /// # Errors
    /// As for [`Staging::new`].
    pub fn staging(&self) -> Result<Staging, LaunchError> {
        Staging::new(&self.shared.queue)
    }

    /// Fills a reservation with a staging of the table, and waits for the copies.
    pub(crate) fn fill_with_progress(
        &self,
        reservation: Reservation,
        image: &SlotImage<'_>,
        progress: impl FnMut(usize),
    ) -> Result<Filled, LoadError> {
        // The staging is free for another load while this one waits.
        let mut staging = self.shared.stagings.lend(&self.shared.queue)?;
        let filled = reservation.fill_with_progress(image, &mut staging, progress)?;
        drop(staging);
        filled.wait()?;
        Ok(filled)
    }

    /// Reserves room for an adapter. Enqueues nothing, so that it may be called while the queue's stream is being
    /// captured.
    ///
    /// # Errors
    /// [`LoadError`] if the image does not match the table or the arena is full.
    pub fn reserve(&self, image: &SlotImage<'_>) -> Result<Reservation, LoadError> {
        self.check_owner()?;
        self.shared.bounds.check_image(image)?;
        let Shared { queue, bounds, arena, .. } = &*self.shared;
        queue.bind()?;
        let (blocks, waits) = arena.take(self.shared.rooms_of(image.bytes()))?;
        Ok(Reservation {
            room: Room::new(arena, blocks),
            bounds: bounds.clone(),
            image_bytes: image.bytes(),
            adapter: image.adapter(),
            waits,
        })
    }

    /// Puts an adapter into a slot and replaces the previous one, in stream order. Work enqueued after it waits on the
    /// device for the adapter's copies. The host neither copies nor waits.
    ///
    /// # Errors
    /// [`LoadError`] if the slot does not exist, the room was reserved in another table, the table belongs to a pool,
    /// or the stream is being captured. The slot is then unchanged.
    pub fn commit(&self, slot: usize, filled: Filled) -> Result<Slot, LoadError> {
        let Filled { reservation: Reservation { room, .. }, max_rank } = filled;
        if !Arc::ptr_eq(&self.shared.arena, room.arena()) {
            return Err(SlotError::OtherTable.into());
        }
        let Shared { queue, slots, arena, .. } = &*self.shared;
        slots.check_index(slot)?;
        queue.prepare()?;
        // Updates are enqueued under the lock, so that the stream has them in the lock's order.
        let mut blocks = slots.lock();
        self.check_owner()?;
        let [block, staged] = room.blocks();
        let (staged, bytes) = (arena.address(staged), block.bytes());
        let done = self.change_row(&mut blocks, slot, |row| {
            if let Some(written) = room.written().filter(|written| !is_complete(written)) {
                queue.stream().wait(written)?;
            }
            // SAFETY: both rows belong to this table and have the same length. The stream orders their uses.
            Ok(unsafe { result::memcpy_dtod_async(row.ptr, staged, row.bytes, queue.stream().cu_stream()) }?)
        })?;
        let [block, staged] = room.into_blocks();
        let (slot, old) = slots.replace(&mut blocks, slot, bytes, max_rank, Some(block))?;
        arena.give_back([Some(staged), old.flatten()].into_iter().flatten(), Some(done));
        Ok(slot)
    }

    /// Empties a slot in stream order. Operations refuse a batch that names its adapter from now on; in device memory,
    /// the slot is of the base model in work enqueued after it.
    ///
    /// # Errors
    /// [`LoadError`] if the slot does not exist, the table belongs to a pool, or the stream is being captured.
    pub fn unload(&self, slot: usize) -> Result<(), LoadError> {
        let Shared { queue, slots, arena, .. } = &*self.shared;
        self.check_owner()?;
        slots.check_index(slot)?;
        queue.prepare()?;
        let mut blocks = slots.lock();
        self.check_owner()?;
        let done = self.change_row(&mut blocks, slot, |row| {
            // SAFETY: the row belongs to this table, and the stream orders its uses.
            Ok(unsafe { result::memset_d8_async(row.ptr, 0, row.bytes, queue.stream().cu_stream()) }?)
        })?;
        let old = slots.take(&mut blocks, slot)?;
        if let Some(old) = old.flatten() {
            arena.give_back([old], Some(done));
        }
        Ok(())
    }

    /// Enqueues a change of a slot's row, which is all that `change` enqueues, and returns the event behind it. Once
    /// the change is enqueued, no error is returned: if the driver refuses the event, the change has run.
    fn change_row(
        &self,
        blocks: &mut Contents<Option<Block>>,
        index: usize,
        change: impl FnOnce(DeviceRegion) -> Result<(), LaunchError>,
    ) -> Result<Arc<CudaEvent>, LaunchError> {
        let Shared { queue, slots, .. } = &*self.shared;
        let mut changes = Copies::begin(queue.stream(), queue.new_event()?);
        slots.changing(blocks, index, || change(self.shared.row(index)))?;
        let _ = changes.end();
        Ok(Arc::clone(changes.end_event()))
    }

    /// Points a slot to the block and the descriptors of an adapter, in stream order, after its copy.
    pub(in crate::cuda) fn point(&self, slot: usize, content: &Copied) -> Result<(), LaunchError> {
        let Shared { queue, slots, .. } = &*self.shared;
        queue.prepare()?;
        let mut blocks = slots.lock();
        slots.changing(&mut blocks, slot, || {
            queue.stream().wait(&content.copied)?;
            let row = self.shared.row(slot);
            // SAFETY: the block ends with a row of this table's length, and is not overwritten before the end of a step
            // of the stream.
            unsafe { result::memcpy_dtod_async(row.ptr, content.row, row.bytes, queue.stream().cu_stream()) }?;
            Ok::<_, LaunchError>(())
        })?;
        let replaced = slots.replace(&mut blocks, slot, content.bytes, content.max_rank, None);
        replaced.map(drop).map_err(|_| OperandError::Capacity { what: "the slot", got: slot, max: slots.len() }.into())
    }

    /// Makes the rows of slots empty, in stream order. The event is recorded after it.
    pub(in crate::cuda) fn clear(&self, slots: &[usize]) -> Result<CudaEvent, LaunchError> {
        let queue = &self.shared.queue;
        queue.prepare()?;
        let cleared = queue.new_event()?;
        for &slot in slots {
            let row = self.shared.row(slot);
            // SAFETY: the row belongs to this table, and the stream orders its uses.
            unsafe { result::memset_d8_async(row.ptr, 0, row.bytes, queue.stream().cu_stream()) }?;
        }
        cleared.record(queue.stream())?;
        Ok(cleared)
    }

    /// Takes note that a slot has no adapter. Its row is as it was.
    pub(in crate::cuda) fn forget(&self, slot: usize) {
        let Shared { slots, .. } = &*self.shared;
        // Every slot of the pool is one of the table.
        let _ = slots.take(&mut slots.lock(), slot);
    }

    /// Memory use of the arena. Besides the factors, a load in progress uses the size of one slot's descriptors.
    ///
    /// Of a pool's table, the factors in its slots. The pool has all other memory.
    pub fn usage(&self) -> Usage {
        let usage = self.shared.arena.usage();
        if self.shared.shares_arena {
            let used = self.loaded().iter().map(|info| info.bytes).sum();
            Usage { used, largest_gap: 0, ..usage }
        } else {
            usage
        }
    }

    /// Whether the arena has room for an adapter now.
    pub fn fits(&self, image: &SlotImage<'_>) -> bool {
        !self.is_pooled() && self.shared.arena.fits(self.shared.rooms_of(image.bytes()))
    }

    /// The queue of the table.
    pub fn queue(&self) -> &Queue {
        &self.shared.queue
    }

    /// The table in the raw API.
    pub fn raw(&self) -> raw::Table {
        let Bounds { model, dtype, capacity, .. } = &self.shared.bounds;
        raw::Table::new(model, *dtype, self.shared.table.region().ptr, capacity.num_slots, capacity.max_rank)
    }

    /// What a graph keeps alive: the descriptors, and the arena that they point into.
    pub(in crate::cuda) fn kept(&self) -> Kept {
        Arc::clone(&self.shared) as Kept
    }

    /// Workspace for any layer of the model. Fully sharded layers need none.
    ///
    /// # Errors
    /// [`PlanError`] if the kernels do not support a layer. Experts without
    /// [`Experts::top_k`](crate::model::Experts::top_k) are ignored.
    pub fn workspace_bytes(&self) -> Result<WorkspaceBytes, PlanError> {
        let Bounds { model, dtype, capacity, .. } = &self.shared.bounds;
        let linears = model.linears().iter().filter(|site| site.exchange().is_none()).map(|site| {
            // A layer that the fused linear does not support needs no workspace for it.
            let fused = ForwardPlan::new(site, *dtype, *capacity);
            let fused = fused.map_or_else(|_| WorkspaceBytes::default(), |plan| plan.workspace_bytes());
            Ok(LinearPlan::new(site, *dtype, *capacity)?.workspace_bytes().max(fused))
        });
        let experts = model.expert_layers().iter().filter(|site| site.top_k() > 0);
        let experts = experts.map(|site| Ok(ExpertsPlan::new(site, *dtype, *capacity)?.workspace_bytes()));
        linears.chain(experts).try_fold(WorkspaceBytes::default(), |most, bytes| Ok(most.max(bytes?)))
    }
}

impl Shared {
    /// Sizes of the rooms that an image needs: for its factors, and for its descriptors on the way to the table.
    fn rooms_of(&self, image_bytes: usize) -> [usize; 2] {
        [image_bytes, self.row_bytes()]
    }

    pub(super) fn row_bytes(&self) -> usize {
        row_bytes(self.bounds.model.num_entries())
    }

    /// The descriptors of a slot.
    pub(super) fn row(&self, index: usize) -> DeviceRegion {
        let bytes = self.row_bytes();
        DeviceRegion { ptr: self.table.region().ptr + (index * bytes) as u64, bytes }
    }
}

impl Drop for Shared {
    /// Makes the deallocation of another queue's arena wait for the work of this queue.
    fn drop(&mut self) {
        if self.queue.stream().cu_stream() == self.arena.queue().stream().cu_stream() {
            return;
        }
        let done = self.queue.new_event().and_then(|done| {
            self.queue.prepare()?;
            done.record(self.queue.stream())?;
            Ok(Arc::new(done))
        });
        match done {
            Ok(done) => self.arena.give_back([], Some(done)),
            // Without the event, the memory can never be freed.
            Err(_) => std::mem::forget(Arc::clone(&self.arena)),
        }
    }
}

fn is_complete(event: &CudaEvent) -> bool {
    let _relaxed = Relaxed::new();
    event.is_complete()
}

/// The bytes of a slot's descriptors.
pub(in crate::cuda) fn row_bytes(num_entries: usize) -> usize {
    product(&[num_entries, size_of::<Descriptor>()])
}
