//! The contents of a weight table's slots. Both backends share it.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use crate::{DType, Slot, adapter::SlotImage, error::SlotError, model::Model, plan::Capacity};

/// What the weight tables of both backends say of their slots and bounds. The slots are in the field `$slots`.
macro_rules! table_methods {
    ($($slots:ident).+) => {
        impl WeightTable {
            /// Gives the table to a pool: only the handle that this returns, and its clones, load, unload and step from now on.
            pub(crate) fn claim(&self) -> Result<Self, SlotError> {
                self.$($slots).+.claim()?;
                Ok(Self { is_owner: true, ..self.clone() })
            }

            /// Whether another handle, that of a pool, has the slots.
            pub(crate) fn is_pooled(&self) -> bool {
                !self.is_owner && self.$($slots).+.is_claimed()
            }

            /// Rejects changes of slots that belong to a pool.
            pub(super) fn check_owner(&self) -> Result<(), SlotError> {
                if self.is_pooled() { Err(SlotError::Pooled) } else { Ok(()) }
            }

            /// Rejects a slot that does not exist.
            pub(crate) fn check_slot(&self, slot: Slot) -> Result<(), SlotError> {
                self.$($slots).+.index(slot).map(drop)
            }

            /// The content of a slot; `None` if it is empty.
            pub fn get(&self, slot: Slot) -> Option<SlotInfo> {
                self.$($slots).+.lock().info(slot.index()?)
            }

            /// The contents of all loaded slots, by slot.
            pub fn loaded(&self) -> Vec<SlotInfo> {
                self.$($slots).+.lock().infos()
            }

            /// The sum of the largest ranks of the distinct adapters that are in the batch's slots now, for
            /// [`LinearPlan::fastest_mode`](crate::plan::LinearPlan::fastest_mode). Takes time for each slot and token, and allocates.
            pub fn ranks(&self, batch: &Batch<'_>) -> usize {
                self.$($slots).+.lock().ranks(batch.slots())
            }

            /// The model of the adapters.
            pub fn model(&self) -> &Model {
                &self.shared.bounds.model
            }

            /// The element type of factors and operands.
            pub fn dtype(&self) -> DType {
                self.shared.bounds.dtype
            }

            /// The capacity of the table.
            pub fn capacity(&self) -> Capacity {
                self.shared.bounds.capacity
            }
        }
    };
}

/// A loaded adapter: its slot and the generation of the slot's content.
///
/// A [`Slot`] alone refers to whichever adapter is in it when a kernel runs. A `Resident` is valid until its slot is loaded again
/// or unloaded; after that, the table's `check` rejects it. Generations of different tables are unrelated.
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

    /// The generation of the slot's content. Every load of a table increments it, from 1.
    pub const fn generation(self) -> u64 {
        self.generation
    }
}

/// The content of a loaded slot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct SlotInfo {
    /// The slot and its generation.
    pub resident: Resident,
    /// Size of the factors, in bytes.
    pub bytes: usize,
    /// The largest rank.
    pub max_rank: usize,
}

/// Memory use of a weight table, in bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Usage {
    /// Size of the arena.
    pub capacity: usize,
    /// Loaded and reserved bytes. On the CPU they may exceed the capacity while steps have adapters of a pool that others have replaced.
    pub used: usize,
    /// Size of the largest free block.
    pub largest_gap: usize,
}

impl Usage {
    /// Free bytes, in one block or several.
    pub const fn free(&self) -> usize {
        self.capacity.saturating_sub(self.used)
    }

    /// The part of the free bytes outside the largest free block, from 0 to 1.
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub fn fragmentation(&self) -> f64 {
        if self.free() == 0 { 0.0 } else { 1.0 - self.largest_gap as f64 / self.free() as f64 }
    }
}

/// The bounds that every adapter in a table must meet.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    pub(crate) model: Model,
    pub(crate) dtype: DType,
    pub(crate) capacity: Capacity,
}

impl Bounds {
    /// Rejects an image for another model or element type, or of too large a rank.
    pub(crate) fn check_image(&self, image: &SlotImage<'_>) -> Result<(), SlotError> {
        self.check(image.model(), image.dtype(), image.max_rank())
    }

    /// Rejects another model or element type, or too large a rank.
    pub(crate) fn check(&self, model: &Model, dtype: DType, rank: usize) -> Result<(), SlotError> {
        if *model != self.model {
            return Err(SlotError::Model);
        }
        if dtype != self.dtype {
            return Err(SlotError::DType { got: dtype, want: self.dtype });
        }
        let max_rank = self.capacity.max_rank;
        if rank > max_rank { Err(SlotError::Rank { rank, max_rank }) } else { Ok(()) }
    }
}

/// The slots of a table. Contents are behind a lock; generations are atomic, so that `check` takes no lock.
#[derive(Debug)]
pub(crate) struct Slots<B> {
    blocks: Mutex<Contents<B>>,
    /// The generation of each slot; 0 if it is empty.
    generations: Box<[AtomicU64]>,
    /// Whether a pool has the slots. It is set once, under the lock.
    is_claimed: AtomicBool,
}

/// The content of the slots.
#[derive(Debug)]
pub(crate) struct Contents<B> {
    all: Vec<Option<(SlotInfo, B)>>,
    last_generation: u64,
}

impl<B> Slots<B> {
    pub(crate) fn new(num_slots: usize) -> Self {
        Self {
            blocks: Mutex::new(Contents { all: (0..num_slots).map(|_| None).collect(), last_generation: 0 }),
            generations: (0..num_slots).map(|_| AtomicU64::new(0)).collect(),
            is_claimed: AtomicBool::new(false),
        }
    }

    /// Gives the slots to a pool, for good. They must be empty.
    pub(crate) fn claim(&self) -> Result<(), SlotError> {
        let blocks = self.lock();
        if self.is_claimed() {
            return Err(SlotError::Pooled);
        }
        let adapters = blocks.infos().len();
        if adapters > 0 {
            return Err(SlotError::Loaded { adapters });
        }
        self.is_claimed.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Whether a pool has the slots. Under the lock, they are not given to one meanwhile.
    pub(crate) fn is_claimed(&self) -> bool {
        self.is_claimed.load(Ordering::SeqCst)
    }

    /// Locks the blocks. A panic of another thread cannot leave them inconsistent, because each change is the last step of its
    /// call.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Contents<B>> {
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

    /// Invalidates a slot's generation, runs `change`, and restores the generation if `change` fails. Work enqueued before a
    /// successful `check` was therefore enqueued before the change.
    #[cfg(feature = "cuda")]
    pub(crate) fn changing<E>(
        &self,
        _blocks: &mut Contents<B>,
        index: usize,
        change: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let generation = self.generations[index].swap(0, Ordering::SeqCst);
        change().inspect_err(|_| self.generations[index].store(generation, Ordering::SeqCst))
    }

    /// Stores a block in a slot and returns the previous block.
    pub(crate) fn replace(
        &self,
        blocks: &mut Contents<B>,
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

    /// Removes the block of a slot.
    pub(crate) fn take(&self, blocks: &mut Contents<B>, slot: Slot) -> Result<Option<B>, SlotError> {
        let index = self.index(slot)?;
        self.generations[index].store(0, Ordering::SeqCst);
        Ok(blocks.all[index].take().map(|(_, block)| block))
    }

    /// Rejects adapters that are no longer in their slots.
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

impl<B> Contents<B> {
    pub(crate) fn get(&self, index: usize) -> Option<&B> {
        self.all.get(index)?.as_ref().map(|(_, block)| block)
    }

    pub(crate) fn info(&self, index: usize) -> Option<SlotInfo> {
        self.all.get(index)?.as_ref().map(|(info, _)| *info)
    }

    /// The sum of the largest ranks of the distinct adapters in these slots.
    pub(crate) fn ranks(&self, slots: &[Slot]) -> usize {
        let mut ranks: Vec<usize> =
            self.all.iter().map(|block| block.as_ref().map_or(0, |(info, _)| info.max_rank)).collect();
        let rank = |slot: &Slot| slot.index().and_then(|index| ranks.get_mut(index)).map_or(0, std::mem::take);
        slots.iter().map(rank).sum()
    }

    pub(crate) fn infos(&self) -> Vec<SlotInfo> {
        self.all.iter().flatten().map(|(info, _)| *info).collect()
    }
}
