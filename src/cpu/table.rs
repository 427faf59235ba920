//! The table of adapters in host memory.

use std::sync::Arc;

use super::upload::{Adapter, Arena, Filled, Reservation, Shared, Staging};
use crate::{
    DType, Slot,
    adapter::SlotImage,
    error::{LoadError, OperandError, SlotError},
    model::Model,
    plan::{Capacity, PlanError},
    routing::Batch,
    sizes::{product, sum},
    slots::{Bounds, SlotInfo, Slots, Usage},
};

/// Adapters in host memory, one per slot. Clones refer to the same table.
///
/// Any number of threads may use a table. A [`step`](Self::step) keeps the adapters that were loaded when it started,
/// even if other threads load meanwhile.
#[derive(Clone, Debug)]
#[doc(alias = "max_loras")]
pub struct WeightTable {
    shared: Arc<Shared>,
    slots: Arc<Slots<Arc<Adapter>>>,
    /// Whether this handle is that of a pool.
    is_owner: bool,
}

table_methods!(slots);

impl WeightTable {
    /// A table of `capacity.num_slots` empty slots for adapters of `model` in `dtype`. Adapters may have ranks up to
    /// `capacity.max_rank` and take up to `arena_bytes` bytes in total. Steps have up to `capacity.max_tokens` tokens.
    ///
    /// # Errors
    /// [`PlanError::Limit`] if a bound of the capacity is invalid.
    #[doc(alias = "max_lora_rank")]
    pub fn new(model: &Model, dtype: DType, capacity: Capacity, arena_bytes: usize) -> Result<Self, PlanError> {
        let bounds = Bounds { model: model.clone(), dtype, capacity: capacity.checked()? };
        let slots = Arc::new(Slots::new(bounds.capacity.num_slots));
        let shared = Arc::new(Shared { bounds, arena: Arena::new(arena_bytes) });
        Ok(Self { shared, slots, is_owner: false })
    }

    /// Size of an arena in bytes that has room for all these adapters.
    ///
    /// To replace adapters while all others stay loaded, count the largest one twice, because old and new exist at
    /// once.
    pub fn arena_bytes<'a>(images: impl IntoIterator<Item = &'a SlotImage<'a>>) -> usize {
        sum(images.into_iter().map(SlotImage::bytes))
    }

    /// Size of an arena in bytes in which adapters of ranks up to `capacity.max_rank` fit into all slots, even if they
    /// have factors for all modules of the model, and one more, which replaces another.
    pub fn arena_bytes_for(model: &Model, dtype: DType, capacity: Capacity) -> usize {
        product(&[SlotImage::max_bytes(model, dtype, capacity.max_rank), capacity.num_slots.saturating_add(1)])
    }

    /// Loads an adapter into the slot with this index and replaces the previous one. The arena must have room for both.
    /// Returns the slot, as batches name it.
    ///
    /// # Errors
    /// [`LoadError`] if the image does not match the table, the arena is full, or a weight has no finite value in the
    /// table's element type. The slot is then unchanged.
    pub fn load(&self, slot: usize, image: &SlotImage<'_>) -> Result<Slot, LoadError> {
        self.load_with_progress(slot, image, |_| ())
    }

    /// Like [`load`](Self::load), and calls `progress` with the number of bytes loaded so far, out of
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
        let filled = self.reserve(image)?.fill_with_progress(image, &mut Staging::default(), progress)?;
        self.commit(slot, filled)
    }

    /// What [`Reservation::fill`] takes on every backend.
    ///
    /// # Errors
    /// None; the GPU's has some.
    pub fn staging(&self) -> Result<Staging, LoadError> {
        Ok(Staging::default())
    }

    /// Reserves room for an adapter.
    ///
    /// # Errors
    /// [`LoadError`] if the image does not match the table or the arena is full.
    pub fn reserve(&self, image: &SlotImage<'_>) -> Result<Reservation, LoadError> {
        self.check_owner()?;
        Reservation::new(&self.shared, image)
    }

    /// Puts an adapter into a slot and replaces the previous one, for steps that start from now on.
    ///
    /// # Errors
    /// [`LoadError::Slot`] if the slot does not exist, the room was reserved in another table, or the table belongs to
    /// a pool.
    pub fn commit(&self, slot: usize, filled: Filled) -> Result<Slot, LoadError> {
        let Filled { adapter } = filled;
        if !Arc::ptr_eq(&self.shared, &adapter.room.shared) {
            return Err(SlotError::OtherTable.into());
        }
        Ok(self.put(slot, adapter)?)
    }

    /// Puts an adapter into a slot.
    pub(super) fn put(&self, slot: usize, adapter: Adapter) -> Result<Slot, SlotError> {
        let (bytes, max_rank) = (adapter.packed.bytes(), adapter.packed.max_rank());
        let mut blocks = self.slots.lock();
        self.check_owner()?;
        let (slot, _old) = self.slots.replace(&mut blocks, slot, bytes, max_rank, Arc::new(adapter))?;
        Ok(slot)
    }

    /// Empties a slot. Steps that start from now on refuse a batch that names its adapter.
    ///
    /// # Errors
    /// [`LoadError::Slot`] if the slot does not exist, or belongs to a pool.
    pub fn unload(&self, slot: usize) -> Result<(), LoadError> {
        let mut blocks = self.slots.lock();
        self.check_owner()?;
        Ok(self.slots.take(&mut blocks, slot).map(drop)?)
    }

    /// Memory use of the arena.
    pub fn usage(&self) -> Usage {
        self.shared.arena.usage()
    }

    /// Whether the arena has room for an adapter now.
    pub fn fits(&self, image: &SlotImage<'_>) -> bool {
        !self.is_pooled() && image.bytes() <= self.usage().largest_gap
    }

    pub(super) fn bounds(&self) -> &Bounds {
        &self.shared.bounds
    }

    /// The part that adapters refer to.
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The adapters of `batch`, by slot.
    pub(super) fn adapters(&self, batch: &Batch<'_>) -> Result<Vec<Option<Arc<Adapter>>>, OperandError> {
        let mut adapters = Vec::new();
        let blocks = self.slots.lock();
        self.check_loaded(batch.slots())?;
        for index in batch.slots().iter().filter_map(|slot| slot.index()) {
            if index >= adapters.len() {
                adapters.resize(index + 1, None);
            }
            if adapters[index].is_none() {
                adapters[index] = blocks.get(index).map(Arc::clone);
            }
        }
        Ok(adapters)
    }
}
