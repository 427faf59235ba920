use std::sync::Arc;

use super::upload::{Adapter, Arena, Filled, Reservation, Shared};
use crate::{
    DType, Slot,
    adapter::SlotImage,
    error::{LoadError, SlotError},
    model::Model,
    plan::{Capacity, PlanError},
    residency::{Bounds, Resident, SlotInfo, Slots, Usage},
    routing::Batch,
};

/// The adapters in host memory, a slot each. Clones are the same table.
///
/// A table may be used by any number of threads: a [`step`](Self::step) works on the adapters that were there when it began, whatever
/// is loaded meanwhile.
#[derive(Clone, Debug)]
#[doc(alias = "max_loras")]
pub struct WeightTable {
    shared: Arc<Shared>,
    slots: Arc<Slots<Arc<Adapter>>>,
}

impl WeightTable {
    /// A table of `capacity.num_slots` empty slots for the adapters of `model`, whose factors have at most rank
    /// `capacity.max_rank`, are `dtype` and take at most `arena_bytes`. `capacity.max_tokens` bounds nothing on the CPU.
    ///
    /// # Errors
    /// If a bound is zero or past its limit.
    #[doc(alias = "max_lora_rank")]
    pub fn new(model: &Model, dtype: DType, capacity: Capacity, arena_bytes: usize) -> Result<Self, PlanError> {
        let capacity = capacity.checked()?;
        let arena = Arena { bytes: arena_bytes, used: 0.into() };
        let slots = Arc::new(Slots::new(capacity.num_slots));
        let bounds = Bounds { model: model.clone(), dtype, capacity };
        Ok(Self { shared: Arc::new(Shared { bounds, arena }), slots })
    }

    /// The bytes of an arena in which there is room for these adapters at once.
    ///
    /// An engine that replaces adapters while all others stay loaded counts the largest one twice: the old one and the new one are there
    /// at once.
    pub fn arena_bytes<'a>(images: impl IntoIterator<Item = &'a SlotImage<'a>>) -> usize {
        images.into_iter().map(SlotImage::bytes).sum()
    }

    /// Loads an adapter into a slot, in place of the one that was there. There must be room for the new one beside the old one.
    ///
    /// # Errors
    /// If the image does not fit the table, or a weight cannot be represented (NaN, or too large for the type). The slot is as it
    /// was.
    pub fn load(&self, slot: Slot, image: &SlotImage<'_>) -> Result<Resident, LoadError> {
        self.load_with_progress(slot, image, |_| ())
    }

    /// As [`load`](Self::load), and calls `progress` with how many of the image's [`bytes`](SlotImage::bytes) are done, each time that
    /// there are more: adapters of experts may have gigabytes.
    ///
    /// # Errors
    /// As for `load`.
    pub fn load_with_progress(
        &self,
        slot: Slot,
        image: &SlotImage<'_>,
        progress: impl FnMut(usize),
    ) -> Result<Resident, LoadError> {
        self.slots.index(slot)?;
        let filled = self.reserve(image)?.fill_with_progress(image, progress)?;
        self.commit(slot, filled)
    }

    /// Reserves room for an adapter.
    ///
    /// # Errors
    /// If the image does not fit the table, or there is no room.
    pub fn reserve(&self, image: &SlotImage<'_>) -> Result<Reservation, LoadError> {
        Reservation::new(&self.shared, image)
    }

    /// Puts an adapter into a slot, in place of the one that was there: for the steps that begin from now on.
    ///
    /// # Errors
    /// If there is no such slot, or the room is of another table.
    pub fn commit(&self, slot: Slot, filled: Filled) -> Result<Resident, LoadError> {
        let Filled { adapter, max_rank } = filled;
        if !Arc::ptr_eq(&self.shared, &adapter.room.shared) {
            return Err(SlotError::OtherTable.into());
        }
        let (bytes, adapter) = (adapter.room.bytes, Arc::new(adapter));
        let (resident, _old) = self.slots.replace(&mut self.slots.lock(), slot, bytes, max_rank, adapter)?;
        Ok(resident)
    }

    /// Empties a slot: its tokens are the base model's from the next step on.
    ///
    /// # Errors
    /// If there is no such slot.
    pub fn unload(&self, slot: Slot) -> Result<(), LoadError> {
        let old = self.slots.take(&mut self.slots.lock(), slot);
        Ok(old.map(drop)?)
    }

    /// Refuses adapters that are no longer where they were loaded.
    ///
    /// A [`step`](Self::step) keeps the adapters that were loaded when it began. A check that passes after `step` has returned therefore
    /// holds for that step, whatever other threads load and unload.
    ///
    /// # Errors
    /// If one has been unloaded or replaced, or its slot does not exist.
    pub fn check(&self, residents: impl IntoIterator<Item = Resident>) -> Result<(), SlotError> {
        self.slots.check(residents)
    }

    /// What a slot holds, if it is loaded.
    pub fn get(&self, slot: Slot) -> Option<SlotInfo> {
        self.slots.lock().info(slot.index()?)
    }

    /// What the loaded slots hold, in the order of slots.
    pub fn loaded(&self) -> Vec<SlotInfo> {
        self.slots.lock().infos()
    }

    /// The arena's bytes, used and free.
    pub fn usage(&self) -> Usage {
        self.shared.arena.usage()
    }

    /// Whether there is room for an adapter now.
    pub fn fits(&self, image: &SlotImage<'_>) -> bool {
        image.bytes() <= self.usage().largest_gap
    }

    /// What the slots of `batch` hold now, by slot.
    pub(super) fn adapters(&self, batch: &Batch<'_>) -> Vec<Option<Arc<Adapter>>> {
        let mut adapters = Vec::new();
        let blocks = self.slots.lock();
        for index in batch.slots().iter().filter_map(|slot| slot.index()).filter(|&index| index < self.slots.len()) {
            if index >= adapters.len() {
                adapters.resize(index + 1, None);
            }
            if adapters[index].is_none() {
                adapters[index] = blocks.get(index).map(Arc::clone);
            }
        }
        adapters
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
}
