//! Which adapter is in which slot: what a weight table says of itself, on either backend.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use crate::{DType, Slot, adapter::SlotImage, error::SlotError, model::Model, plan::Capacity};

/// An adapter as it was loaded into a slot: the slot, and the generation of its content.
///
/// A [`Slot`] alone names whoever is there by the time that a kernel reads it. A `Resident` stays valid until the slot is loaded
/// again or unloaded; from then on, the `check` of the table that loaded it refuses it. Tables number their generations apart: a
/// resident says nothing of another table.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[doc(alias = "lora_int_id")]
pub struct Resident {
    slot: Slot,
    generation: u64,
}

impl Resident {
    /// The slot that the adapter was loaded into.
    pub const fn slot(self) -> Slot {
        self.slot
    }

    /// The generation of the slot's content: from 1, and different for every load of a table.
    pub const fn generation(self) -> u64 {
        self.generation
    }
}

/// What a loaded slot holds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct SlotInfo {
    /// The slot and its generation.
    pub resident: Resident,
    /// Bytes of its factors.
    pub bytes: usize,
    /// The largest rank of its factors.
    pub max_rank: usize,
}

/// The memory of a table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Usage {
    /// Bytes of the arena.
    pub capacity: usize,
    /// Bytes that are loaded or reserved.
    pub used: usize,
    /// Bytes of the largest adapter that fits now.
    pub largest_gap: usize,
}

impl Usage {
    /// Bytes that are neither loaded nor reserved, in one gap or several.
    pub const fn free(&self) -> usize {
        self.capacity - self.used
    }
}

/// What the adapters of a table must fit.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    pub(crate) model: Model,
    pub(crate) dtype: DType,
    pub(crate) capacity: Capacity,
}

impl Bounds {
    /// Refuses an image that was planned for another table.
    pub(crate) fn check(&self, image: &SlotImage<'_>) -> Result<(), SlotError> {
        if *image.model() != self.model {
            return Err(SlotError::Model);
        }
        if image.dtype() != self.dtype {
            return Err(SlotError::DType { got: image.dtype(), want: self.dtype });
        }
        let (rank, max_rank) = (image.max_rank(), self.capacity.max_rank);
        if rank > max_rank { Err(SlotError::Rank { rank, max_rank }) } else { Ok(()) }
    }
}

/// The slots of a table. The blocks are behind a lock that loading takes; the generations can be read without it.
#[derive(Debug)]
pub(crate) struct Slots<B> {
    blocks: Mutex<Blocks<B>>,
    /// 0 where nothing is loaded.
    generations: Box<[AtomicU64]>,
}

/// What the slots hold.
#[derive(Debug)]
pub(crate) struct Blocks<B> {
    all: Vec<Option<(SlotInfo, B)>>,
    last_generation: u64,
}

impl<B> Slots<B> {
    pub(crate) fn new(num_slots: usize) -> Self {
        Self {
            blocks: Mutex::new(Blocks { all: (0..num_slots).map(|_| None).collect(), last_generation: 0 }),
            generations: (0..num_slots).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// The blocks, locked. A thread that panicked with the lock left them whole: every change of them is the last step of its call.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Blocks<B>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn len(&self) -> usize {
        self.generations.len()
    }

    /// The index of a slot.
    pub(crate) fn index(&self, slot: Slot) -> Result<usize, SlotError> {
        let num_slots = self.len();
        slot.index().filter(|&index| index < num_slots).ok_or(SlotError::NoSuchSlot { slot, num_slots })
    }

    /// Makes `check` refuse what a slot holds before `change` changes it, so that what was enqueued before a check that passes was
    /// enqueued before the change. An error of `change` leaves the slot as it was.
    #[cfg(feature = "cuda")]
    pub(crate) fn changing<E>(
        &self,
        _blocks: &mut Blocks<B>,
        index: usize,
        change: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let generation = self.generations[index].swap(0, Ordering::SeqCst);
        change().inspect_err(|_| self.generations[index].store(generation, Ordering::SeqCst))
    }

    /// Puts a block into a slot, and returns the one that was there.
    pub(crate) fn replace(
        &self,
        blocks: &mut Blocks<B>,
        slot: Slot,
        bytes: usize,
        max_rank: usize,
        block: B,
    ) -> Result<(Resident, Option<B>), SlotError> {
        let index = self.index(slot)?;
        blocks.last_generation += 1;
        let resident = Resident { slot, generation: blocks.last_generation };
        let old = blocks.all[index].replace((SlotInfo { resident, bytes, max_rank }, block));
        self.generations[index].store(resident.generation, Ordering::SeqCst);
        Ok((resident, old.map(|(_, block)| block)))
    }

    /// Takes the block out of a slot.
    pub(crate) fn take(&self, blocks: &mut Blocks<B>, slot: Slot) -> Result<Option<B>, SlotError> {
        let index = self.index(slot)?;
        self.generations[index].store(0, Ordering::SeqCst);
        Ok(blocks.all[index].take().map(|(_, block)| block))
    }

    /// Refuses adapters that are no longer where they were loaded.
    pub(crate) fn check(&self, residents: impl IntoIterator<Item = Resident>) -> Result<(), SlotError> {
        for resident in residents {
            let index = self.index(resident.slot)?;
            if self.generations[index].load(Ordering::SeqCst) != resident.generation {
                return Err(SlotError::Gone { slot: resident.slot, generation: resident.generation });
            }
        }
        Ok(())
    }
}

impl<B> Blocks<B> {
    pub(crate) fn get(&self, index: usize) -> Option<&B> {
        self.all.get(index)?.as_ref().map(|(_, block)| block)
    }

    pub(crate) fn info(&self, index: usize) -> Option<SlotInfo> {
        self.all.get(index)?.as_ref().map(|(info, _)| *info)
    }

    pub(crate) fn infos(&self) -> Vec<SlotInfo> {
        self.all.iter().flatten().map(|(info, _)| *info).collect()
    }
}
