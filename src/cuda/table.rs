#![expect(unsafe_code, reason = "calls the driver on memory of its own")]

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::driver::result;

use super::{
    Filled, LaunchError, Queue, Reservation, Staging,
    arena::{Arena, Room},
    raw::{self, Descriptor, DeviceRegion},
    region::{Kept, Region},
};
use crate::{
    DType, Slot,
    adapter::SlotImage,
    error::{LoadError, SlotError},
    model::Model,
    plan::{Capacity, ExpertsPlan, ForwardPlan, LinearPlan, PlanError, WorkspaceBytes},
    residency::{Bounds, Resident, SlotInfo, Slots, Usage},
};

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
    bounds: Bounds,
    arena: Arc<Arena>,
    table: Region,
    slots: Slots<Room>,
    /// That of [`WeightTable::load`].
    staging: Mutex<Option<Staging>>,
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
        let table_bytes = capacity.num_slots * model.num_entries() * size_of::<Descriptor>();
        let arena = Arc::new(Arena::new(queue, arena_bytes)?);
        let table = Region::new(queue, table_bytes)?;
        let shared = Shared {
            queue: queue.clone(),
            bounds: Bounds { model: model.clone(), dtype, capacity },
            arena,
            table,
            slots: Slots::new(capacity.num_slots),
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
        let Shared { queue, bounds, arena, .. } = &*self.shared;
        bounds.check(image)?;
        queue.bind()?;
        let (rooms, waits) = arena.take(self.shared.rooms_of(image))?;
        Ok(Reservation {
            arena: Arc::clone(arena),
            bounds: bounds.clone(),
            rooms: Some(rooms),
            image_bytes: image.bytes(),
            waits,
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
        if !Arc::ptr_eq(&self.shared.arena, &reservation.arena) {
            return Err(SlotError::OtherTable.into());
        }
        let Shared { queue, slots, arena, .. } = &*self.shared;
        let index = slots.index(slot)?;
        queue.enter()?;
        // The order of the lock is that of the stream.
        let mut blocks = slots.lock();
        let [block, staged] = reservation.rooms();
        let (staged, bytes) = (arena.address(staged), block.bytes);
        let done = Arc::new(queue.new_event()?);
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
        arena.give_back([Some(staged), old].into_iter().flatten(), Some(done));
        Ok(resident)
    }

    /// Empties a slot, in the order of the queue: its tokens are the base model's from now on.
    ///
    /// # Errors
    /// If there is no such slot, or the queue's stream is being captured.
    pub fn unload(&self, slot: Slot) -> Result<(), LoadError> {
        let Shared { queue, slots, arena, .. } = &*self.shared;
        let index = slots.index(slot)?;
        queue.enter()?;
        let mut blocks = slots.lock();
        let done = Arc::new(queue.new_event()?);
        slots.changing(&mut blocks, index, || {
            let row = self.shared.row(index);
            // SAFETY: the row is this table's, and the stream orders its uses.
            unsafe { result::memset_d8_async(row.ptr, 0, row.bytes, queue.stream().cu_stream()) }?;
            Ok::<_, LaunchError>(done.record(queue.stream())?)
        })?;
        let old = slots.take(&mut blocks, slot)?;
        if let Some(old) = old {
            arena.give_back([old], Some(done));
        }
        Ok(())
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
        self.shared.arena.usage()
    }

    /// Whether there is room for an adapter now.
    pub fn fits(&self, image: &SlotImage<'_>) -> bool {
        self.shared.arena.fits(self.shared.rooms_of(image))
    }

    /// The model that it was made for.
    pub fn model(&self) -> &Model {
        &self.shared.bounds.model
    }

    /// The element type of the factors, and of the operands of a step.
    pub fn dtype(&self) -> DType {
        self.shared.bounds.dtype
    }

    /// The bounds that it was made for.
    pub fn capacity(&self) -> Capacity {
        self.shared.bounds.capacity
    }

    /// The queue that it was made on.
    pub fn queue(&self) -> &Queue {
        &self.shared.queue
    }

    pub(super) fn kept(&self) -> Kept {
        self.shared.clone()
    }

    /// What the raw door calls it.
    pub fn raw(&self) -> raw::Table {
        let Bounds { model, dtype, capacity } = &self.shared.bounds;
        raw::Table::new(model, *dtype, self.shared.table.region().ptr, capacity.num_slots, capacity.max_rank)
    }

    /// A workspace that is enough for every layer of the model.
    ///
    /// # Errors
    /// If no kernel takes the shape of one of them. Experts of which no [`top_k`](crate::model::Experts::top_k) was described count
    /// for nothing.
    pub fn workspace_bytes(&self) -> Result<WorkspaceBytes, PlanError> {
        let Bounds { model, dtype, capacity } = &self.shared.bounds;
        let linears = model.linears().iter().map(|site| {
            // A layer that no fused linear takes needs nothing for one.
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
    /// Bytes of the rooms that an image takes: its block, and its row of descriptors on the way to the table.
    fn rooms_of(&self, image: &SlotImage<'_>) -> [usize; 2] {
        [image.bytes(), self.row_bytes()]
    }

    fn row_bytes(&self) -> usize {
        self.bounds.model.num_entries() * size_of::<Descriptor>()
    }

    /// Where a slot's descriptors are.
    fn row(&self, index: usize) -> DeviceRegion {
        let bytes = self.row_bytes();
        DeviceRegion { ptr: self.table.region().ptr + (index * bytes) as u64, bytes }
    }
}
