#![expect(unsafe_code, reason = "calls the driver on memory of its own")]

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::{CudaEvent, result};
use offset_allocator::{Allocation, Allocator};

use super::{
    Graph, LaunchError, Queue, RoutedBatch, Routing, Staging, Step, Workspace, graph,
    raw::{self, Descriptor, DeviceRegion},
    region::{Kept, Region},
};
use crate::{
    DType, Slot,
    adapter::SlotImage,
    error::{LoadError, SlotError},
    model::Model,
    plan::{Capacity, ExpertsPlan, LinearPlan, PlanError, WorkspaceBytes},
    residency::{Resident, SlotInfo, Slots, Usage},
};

/// What the arena hands out.
const GRANULE_BYTES: usize = 256;

/// The adapters in device memory, a slot each: one arena of exact-size blocks, and the descriptor table over them. Clones are the same
/// table.
///
/// Loading and stepping share nothing but the device: one thread may begin steps while others reserve, fill and commit. A slot changes
/// in the order of the queue: what is enqueued before sees the adapter that was there, what is enqueued after sees the new one. The
/// table's address never changes, so captured graphs follow what the slots hold.
#[derive(Clone)]
#[doc(alias = "max_loras")]
#[doc(alias = "lora_a_stacked")]
pub struct WeightTable {
    shared: Arc<Shared>,
}

struct Shared {
    queue: Queue,
    model: Model,
    dtype: DType,
    capacity: Capacity,
    arena: Region,
    table: Region,
    slots: Slots<Room>,
    memory: Mutex<Memory>,
    /// That of [`WeightTable::load`].
    staging: Mutex<Option<Staging>>,
}

/// The arena's free list.
struct Memory {
    allocator: Allocator,
    used: usize,
    /// Work that may still use memory that is free: copies into it wait for these.
    pending: Vec<Arc<CudaEvent>>,
}

/// A part of the arena.
struct Room {
    allocation: Allocation,
    bytes: usize,
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Room").field("offset", &self.offset()).field("bytes", &self.bytes).finish()
    }
}

impl Room {
    fn offset(&self) -> usize {
        self.allocation.offset as usize * GRANULE_BYTES
    }
}

/// Room for an adapter in a table. Dropping it gives the room back. May be filled by any thread.
#[derive(Debug)]
#[must_use]
pub struct Reservation {
    table: WeightTable,
    /// For the block, and for its row of descriptors on the way to the table; until they are given to a slot or back.
    rooms: Option<[Room; 2]>,
    image_bytes: usize,
    /// Work that may still use the room.
    waits: Vec<Arc<CudaEvent>>,
    /// The last work that writes it.
    written: Option<Arc<CudaEvent>>,
}

/// An adapter on the device or on its way there, which no slot has yet. Dropping it gives the room back.
#[derive(Debug)]
#[must_use]
pub struct Filled {
    reservation: Reservation,
    max_rank: usize,
}

impl fmt::Debug for WeightTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { dtype, capacity, .. } = &*self.shared;
        f.debug_struct("WeightTable")
            .field("dtype", dtype)
            .field("capacity", capacity)
            .field("usage", &self.usage())
            .finish_non_exhaustive()
    }
}

impl WeightTable {
    /// A table of `capacity.num_slots` empty slots for the adapters of `model`, with `arena_bytes` for their factors of `dtype`.
    ///
    /// # Errors
    /// If the capacity is past the kernels' limits or there is no memory left.
    pub fn new(
        queue: &Queue,
        model: &Model,
        dtype: DType,
        capacity: Capacity,
        arena_bytes: usize,
    ) -> Result<Self, LaunchError> {
        let capacity = capacity.checked()?;
        let granules = u32::try_from(arena_bytes.div_ceil(GRANULE_BYTES)).map_err(|_| LaunchError::Capacity {
            what: "the arena's bytes",
            got: arena_bytes,
            max: u32::MAX as usize * GRANULE_BYTES,
        })?;
        let table_bytes = capacity.num_slots * model.num_entries() * size_of::<Descriptor>();
        let arena = Region::new(queue, arena_bytes.next_multiple_of(GRANULE_BYTES))?;
        let table = Region::new(queue, table_bytes)?;
        // Copies of other streams come behind the allocation.
        let allocated = Arc::new(queue.stream().record_event(None)?);
        let memory = Memory { allocator: Allocator::new(granules), used: 0, pending: vec![allocated] };
        let shared = Shared {
            queue: queue.clone(),
            model: model.clone(),
            dtype,
            capacity,
            arena,
            table,
            slots: Slots::new(capacity.num_slots),
            memory: Mutex::new(memory),
            staging: Mutex::new(None),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Loads an adapter into a slot, in place of the one that was there: [`reserve`](Self::reserve), [`fill`](Reservation::fill) and
    /// [`commit`](Self::commit), with a [`Staging`] of the table's own. There must be room for the new adapter beside the old one.
    ///
    /// Packs on rayon's threads, and blocks this thread until the copies are done. Steps of other threads go on meanwhile.
    ///
    /// # Errors
    /// If the image does not fit the table, a weight cannot be represented, the arena is full, or the queue's stream is being captured.
    /// The slot is as it was.
    pub fn load(&self, slot: Slot, image: &SlotImage<'_>) -> Result<Resident, LoadError> {
        self.load_with_progress(slot, image, |_| ())
    }

    /// As [`load`](Self::load), and calls `progress` with how many of the image's [`bytes`](SlotImage::bytes) are packed and enqueued to be
    /// copied, each time that there are more: adapters of experts may have gigabytes.
    ///
    /// # Errors
    /// As for `load`.
    pub fn load_with_progress(
        &self,
        slot: Slot,
        image: &SlotImage<'_>,
        progress: impl FnMut(usize),
    ) -> Result<Resident, LoadError> {
        self.shared.slots.index(slot)?;
        self.shared.queue.enter()?;
        let reservation = self.reserve(image)?;
        let filled = {
            let mut staging = self.shared.staging.lock().unwrap_or_else(PoisonError::into_inner);
            let staging = match &mut *staging {
                Some(staging) => staging,
                none => none.insert(Staging::new(&self.shared.queue)?),
            };
            reservation.fill_with_progress(image, staging, progress)?
        };
        filled.wait()?;
        self.commit(slot, filled)
    }

    /// Reserves room for an adapter. Enqueues nothing.
    ///
    /// # Errors
    /// If the image does not fit the table, or there is no room.
    pub fn reserve(&self, image: &SlotImage<'_>) -> Result<Reservation, LoadError> {
        let Shared { model, dtype, capacity, .. } = &*self.shared;
        image.check_table(model.id(), *dtype, capacity.max_rank)?;
        self.shared.queue.bind()?;
        let mut memory = self.shared.memory();
        memory.forget_done();
        let block = memory.allocate(image.bytes())?;
        let row = match memory.allocate(self.shared.row_bytes()) {
            Ok(row) => row,
            Err(error) => {
                memory.free(block);
                return Err(error);
            }
        };
        Ok(Reservation {
            table: self.clone(),
            rooms: Some([block, row]),
            image_bytes: image.bytes(),
            waits: memory.pending.clone(),
            written: None,
        })
    }

    /// Puts an adapter into a slot, in place of the one that was there, in the order of the queue: what is enqueued from now on waits, on
    /// the device, for the adapter's copies. Copies nothing from the host and waits for nothing on it.
    ///
    /// # Errors
    /// If there is no such slot, the room is of another table, or the queue's stream is being captured. The slot is as it was.
    pub fn commit(&self, slot: Slot, filled: Filled) -> Result<Resident, LoadError> {
        let Filled { mut reservation, max_rank } = filled;
        if !Arc::ptr_eq(&self.shared, &reservation.table.shared) {
            return Err(SlotError::OtherTable.into());
        }
        let Shared { queue, slots, arena, .. } = &*self.shared;
        let index = slots.index(slot)?;
        queue.enter()?;
        // The order of the lock is that of the stream.
        let mut blocks = slots.lock();
        let [block, staged] = reservation.rooms();
        let (staged, bytes) = (arena.region().ptr + staged.offset() as u64, block.bytes);
        let done = Arc::new(self.shared.new_event()?);
        slots.changing(&mut blocks, index, || {
            if let Some(written) = &reservation.written {
                queue.stream().wait(written)?;
            }
            let row = self.shared.row(index);
            // SAFETY: both rows are this table's, and as long; the stream orders their uses.
            unsafe { result::memcpy_dtod_async(row.ptr, staged, row.bytes, queue.stream().cu_stream()) }?;
            Ok::<_, LaunchError>(done.record(queue.stream())?)
        })?;
        let [block, staged] = reservation.take_rooms();
        let (resident, old) = slots.replace(&mut blocks, slot, bytes, max_rank, block)?;
        self.shared.memory().give_back([Some(staged), old].into_iter().flatten(), Some(done));
        Ok(resident)
    }

    /// Empties a slot, in the order of the queue: its tokens are the base model's from now on.
    ///
    /// # Errors
    /// If there is no such slot, or the queue's stream is being captured.
    pub fn unload(&self, slot: Slot) -> Result<(), LoadError> {
        let Shared { queue, slots, .. } = &*self.shared;
        let index = slots.index(slot)?;
        queue.enter()?;
        let mut blocks = slots.lock();
        let done = Arc::new(self.shared.new_event()?);
        slots.changing(&mut blocks, index, || {
            let row = self.shared.row(index);
            // SAFETY: the row is this table's, and the stream orders its uses.
            unsafe { result::memset_d8_async(row.ptr, 0, row.bytes, queue.stream().cu_stream()) }?;
            Ok::<_, LaunchError>(done.record(queue.stream())?)
        })?;
        let old = slots.take(&mut blocks, slot)?;
        if let Some(old) = old {
            self.shared.memory().give_back([old], Some(done));
        }
        Ok(())
    }

    /// Begins a step of a batch: checks once what its operations have in common.
    ///
    /// # Errors
    /// If the table, the batch and the workspace are not of one queue, or its stream is being captured.
    pub fn step<'a>(&'a self, batch: &RoutedBatch<'a>, workspace: &'a mut Workspace) -> Result<Step<'a>, LaunchError> {
        let queue = &self.shared.queue;
        queue.check("the batch", batch.queue())?;
        queue.check("the workspace", workspace.queue())?;
        queue.enter()?;
        Ok(Step::new(queue, raw::Step::new(self.raw(), batch.raw, workspace.raw(), queue.raw()), None))
    }

    /// Captures a step of up to `num_tokens` rows in a graph: what `record` enqueues by the step that it is given. The graph keeps the
    /// table, the routing's memory, the workspace's and that of the operands, which are to be [`Buffer`](super::Buffer)s; it keeps
    /// nothing for what `record` enqueues by other means.
    ///
    /// Replays follow what is loaded and [routed](Routing::update) by then.
    ///
    /// # Errors
    /// If `num_tokens` is past the routing's capacity; the table, the routing and the workspace are not of one queue; its stream is
    /// being captured; nothing was captured; or what `record` returns. The stream is as it was.
    pub fn capture<E: From<LaunchError>>(
        &self,
        routing: &Routing,
        num_tokens: usize,
        workspace: &mut Workspace,
        record: impl FnOnce(&mut Step<'_>) -> Result<(), E>,
    ) -> Result<Graph, E> {
        let queue = &self.shared.queue;
        queue.check("the routing", routing.queue())?;
        queue.check("the workspace", workspace.queue())?;
        let batch = routing.capture_batch(num_tokens)?;
        let [mailbox, partials] = workspace.kept();
        let kept = vec![Arc::clone(&self.shared) as Kept, routing.kept(), mailbox, partials];
        let raw = raw::Step::new(self.raw(), batch, workspace.raw(), queue.raw());
        graph::capture(queue, kept, |kept| record(&mut Step::new(queue, raw, Some(kept))))
    }

    /// Refuses adapters that are no longer where they were loaded. Takes no lock.
    ///
    /// A check before a step's operations finds what has gone by then. A check behind them that passes says that all of them were
    /// enqueued before any of these slots changed: an engine that commits on another thread than it steps on checks there, too.
    ///
    /// # Errors
    /// If one has been unloaded or replaced.
    pub fn check(&self, residents: impl IntoIterator<Item = Resident>) -> Result<(), SlotError> {
        self.shared.slots.check(residents)
    }

    /// What a slot holds, if it is loaded.
    pub fn get(&self, slot: Slot) -> Option<SlotInfo> {
        self.shared.slots.lock().info(slot.index()?)
    }

    /// What the loaded slots hold, in the order of slots.
    pub fn loaded(&self) -> Vec<SlotInfo> {
        self.shared.slots.lock().infos()
    }

    /// The arena's bytes, used and free. An adapter that is being loaded also uses a row of descriptors.
    pub fn usage(&self) -> Usage {
        let memory = self.shared.memory();
        Usage { capacity: self.shared.arena.region().bytes, used: memory.used, largest_gap: memory.largest_gap() }
    }

    /// Whether there is room for an adapter now.
    pub fn fits(&self, image: &SlotImage<'_>) -> bool {
        let mut memory = self.shared.memory();
        let rooms = [image.bytes(), self.shared.row_bytes()].map(|bytes| memory.allocate(bytes).ok());
        let fits = rooms.iter().all(Option::is_some);
        rooms.into_iter().flatten().for_each(|room| memory.free(room));
        fits
    }

    /// The model that it was made for.
    pub fn model(&self) -> &Model {
        &self.shared.model
    }

    /// The element type of the factors, and of the operands of a step.
    pub fn dtype(&self) -> DType {
        self.shared.dtype
    }

    /// The bounds that it was made for.
    pub fn capacity(&self) -> Capacity {
        self.shared.capacity
    }

    /// The queue that it was made on.
    pub fn queue(&self) -> &Queue {
        &self.shared.queue
    }

    /// What the raw door calls it.
    pub fn raw(&self) -> raw::Table {
        let Shared { model, dtype, capacity, table, .. } = &*self.shared;
        raw::Table::new(model, *dtype, table.region().ptr, capacity.num_slots, capacity.max_rank)
    }

    /// A workspace that is enough for every layer of the model.
    ///
    /// # Errors
    /// If no kernel takes the shape of one of them. Experts of which no [`top_k`](crate::model::Experts::top_k) was described count
    /// for nothing.
    pub fn workspace_bytes(&self) -> Result<WorkspaceBytes, PlanError> {
        let Shared { model, dtype, capacity, .. } = &*self.shared;
        let linears =
            model.linears().iter().map(|site| Ok(LinearPlan::new(site, *dtype, *capacity)?.workspace_bytes()));
        let experts = model.expert_layers().iter().filter(|site| site.top_k() > 0);
        let experts = experts.map(|site| Ok(ExpertsPlan::new(site, *dtype, *capacity)?.workspace_bytes()));
        linears.chain(experts).try_fold(WorkspaceBytes::default(), |most, bytes| Ok(most.max(bytes?)))
    }
}

impl Shared {
    fn memory(&self) -> MutexGuard<'_, Memory> {
        // A thread that panicked with the lock left it whole: allocating and freeing are one call each.
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new_event(&self) -> Result<CudaEvent, LaunchError> {
        Ok(self.queue.stream().context().new_event(None)?)
    }

    fn row_bytes(&self) -> usize {
        self.model.num_entries() * size_of::<Descriptor>()
    }

    /// Where a slot's descriptors are.
    fn row(&self, index: usize) -> DeviceRegion {
        let bytes = self.row_bytes();
        DeviceRegion { ptr: self.table.region().ptr + (index * bytes) as u64, bytes }
    }
}

impl Drop for Shared {
    /// Has the memory's stream, in whose order it is freed, wait for copies on others.
    fn drop(&mut self) {
        for event in &self.memory.get_mut().unwrap_or_else(PoisonError::into_inner).pending {
            if self.queue.enter().and_then(|()| Ok(self.queue.stream().wait(event)?)).is_err() {
                // The stream is being captured, or the context is gone and the copy with it.
                let _ = event.synchronize();
            }
        }
    }
}

impl Memory {
    fn allocate(&mut self, bytes: usize) -> Result<Room, LoadError> {
        let granules = bytes.div_ceil(GRANULE_BYTES).max(1);
        let allocation = u32::try_from(granules).ok().and_then(|granules| self.allocator.allocate(granules));
        let allocation = allocation.ok_or_else(|| LoadError::Full { bytes, largest_gap: self.largest_gap() })?;
        let bytes = granules * GRANULE_BYTES;
        self.used += bytes;
        Ok(Room { allocation, bytes })
    }

    fn free(&mut self, room: Room) {
        self.used -= room.bytes;
        self.allocator.free(room.allocation);
    }

    /// Frees rooms that work before `event` may still use. Asks no event: a thread that captures a stream may not.
    fn give_back(&mut self, rooms: impl IntoIterator<Item = Room>, event: Option<Arc<CudaEvent>>) {
        self.pending.extend(event);
        rooms.into_iter().for_each(|room| self.free(room));
    }

    fn forget_done(&mut self) {
        self.pending.retain(|event| !event.is_complete());
    }

    fn largest_gap(&self) -> usize {
        self.allocator.storage_report().largest_free_region as usize * GRANULE_BYTES
    }
}

impl Reservation {
    /// Bytes of the image that it is for.
    pub fn bytes(&self) -> usize {
        self.image_bytes
    }

    /// Packs the adapter that the room was reserved for, and enqueues its copies on the staging's own stream. Blocks this thread while
    /// both of the staging's buffers are being copied.
    ///
    /// # Errors
    /// If a weight cannot be represented, the image is another one, or the staging is of another context.
    pub fn fill(self, image: &SlotImage<'_>, staging: &mut Staging) -> Result<Filled, LoadError> {
        self.fill_with_progress(image, staging, |_| ())
    }

    /// As [`fill`](Self::fill), and calls `progress` with the bytes that are packed and enqueued, each time that there are more.
    ///
    /// # Errors
    /// As for `fill`.
    pub fn fill_with_progress(
        mut self,
        image: &SlotImage<'_>,
        staging: &mut Staging,
        progress: impl FnMut(usize),
    ) -> Result<Filled, LoadError> {
        let shared = Arc::clone(&self.table.shared);
        image.check_table(shared.model.id(), shared.dtype, shared.capacity.max_rank)?;
        if image.bytes() != self.image_bytes {
            return Err(SlotError::OtherImage { bytes: image.bytes(), reserved: self.image_bytes }.into());
        }
        shared.queue.kernels().check_context("the staging", staging.context())?;
        shared.queue.bind()?;
        for event in self.waits.drain(..) {
            staging.wait_for(&event)?;
        }
        let written = shared.new_event()?;
        let [block, row] = self.rooms().each_ref().map(|room| shared.arena.region().ptr + room.offset() as u64);
        let descriptors = Descriptor::row(image, block);
        // SAFETY: the rooms are this reservation's, and as large; the staging waits for what used them before, and what uses them
        // after waits for `written`.
        let copied = unsafe { staging.copy_image(block, image, progress) }
            // SAFETY: as above.
            .and_then(|()| unsafe { staging.copy_bytes(row, bytemuck::cast_slice(&descriptors)) });
        let recorded = staging.record(&written);
        self.written = Some(Arc::new(written));
        copied?;
        recorded?;
        Ok(Filled { reservation: self, max_rank: image.max_rank() })
    }
}

impl Reservation {
    fn rooms(&self) -> &[Room; 2] {
        self.rooms.as_ref().expect("a reservation has its rooms until it is committed")
    }

    fn take_rooms(&mut self) -> [Room; 2] {
        self.rooms.take().expect("a reservation has its rooms until it is committed")
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(rooms) = self.rooms.take() {
            self.table.shared.memory().give_back(rooms, self.written.take());
        }
    }
}

impl Filled {
    /// Whether the copies are done.
    pub fn is_ready(&self) -> bool {
        self.reservation.written.as_ref().is_none_or(|written| written.is_complete())
    }

    /// Blocks this thread until the copies are done: what is committed then delays no step.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn wait(&self) -> Result<(), LaunchError> {
        Ok(self.reservation.written.as_ref().map_or(Ok(()), |written| written.synchronize())?)
    }
}
