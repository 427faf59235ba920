//! The contents of a weight table's slots. Both backends share it.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use crate::{
    DType, Slot,
    adapter::SlotImage,
    error::{OperandError, SlotError},
    model::Model,
    plan::Capacity,
};

pub use crate::arena::blocks::Usage;

/// What the weight tables of both backends say of their slots and bounds. The slots are in the field `$slots`.
macro_rules! table_methods {
    ($($slots:ident).+) => {
        impl WeightTable {
            /// Gives the table to a pool: only the handle that this returns, and its clones, load, unload and step from
            /// now on.
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
            pub(crate) fn check_slot(&self, slot: usize) -> Result<(), SlotError> {
                self.$($slots).+.check_index(slot)
            }

            /// Rejects a batch that names a slot whose adapter is not in the table now. The slots of a pool's batch are
            /// those of its leases, which the pool checks.
            pub(super) fn check_loaded(&self, slots: &[Slot]) -> Result<(), OperandError> {
                if self.is_owner { Ok(()) } else { self.$($slots).+.check_loaded(slots) }
            }

            /// Rejects adapters that have been unloaded or replaced, or are in another table. Takes no lock. The
            /// operations of a step check the slots of its batch by themselves; with slots in device memory, an engine
            /// checks those that it meant after the operations: if that passes, every operation was enqueued before any
            /// of these slots changed.
            ///
            /// # Errors
            /// [`SlotError::Gone`] for the first adapter that is no longer in its slot.
            pub fn check(&self, slots: impl IntoIterator<Item = Slot>) -> Result<(), SlotError> {
                self.$($slots).+.check(slots)
            }

            /// The content of the slot with this index; `None` if it is empty or does not exist.
            pub fn get(&self, slot: usize) -> Option<SlotInfo> {
                self.$($slots).+.lock().info(slot)
            }

            /// The contents of all loaded slots, by slot.
            pub fn loaded(&self) -> Vec<SlotInfo> {
                self.$($slots).+.lock().infos()
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

/// The content of a loaded slot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct SlotInfo {
    /// The slot, with this content.
    pub slot: Slot,
    /// Size of the factors, in bytes.
    pub bytes: usize,
    /// The largest rank.
    pub max_rank: usize,
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
    /// The [generation](Slot::generation) of each slot; 0 if it is empty.
    generations: Box<[AtomicU64]>,
    /// Changes that have begun.
    #[cfg(feature = "cuda")]
    changes: AtomicU64,
    /// Whether a pool has the slots. It is set once, under the lock.
    is_claimed: AtomicBool,
}

/// The content of the slots.
#[derive(Debug)]
pub(crate) struct Contents<B>(Vec<Option<(SlotInfo, B)>>);

impl<B> Slots<B> {
    pub(crate) fn new(num_slots: usize) -> Self {
        Self {
            blocks: Mutex::new(Contents((0..num_slots).map(|_| None).collect())),
            generations: (0..num_slots).map(|_| AtomicU64::new(0)).collect(),
            #[cfg(feature = "cuda")]
            changes: AtomicU64::new(0),
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

    /// Locks the blocks. A panic of another thread cannot leave them inconsistent, because each change is the last step
    /// of its call.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Contents<B>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn len(&self) -> usize {
        self.generations.len()
    }

    /// Rejects a slot that does not exist.
    pub(crate) fn check_index(&self, slot: usize) -> Result<(), SlotError> {
        let num_slots = self.len();
        if slot < num_slots { Ok(()) } else { Err(SlotError::NoSuchSlot { slot, num_slots }) }
    }

    /// Invalidates a slot's generation, runs `change`, and restores the generation if `change` fails. Work enqueued
    /// before a successful `check` was therefore enqueued before the change.
    #[cfg(feature = "cuda")]
    pub(crate) fn changing<E>(
        &self,
        _blocks: &mut Contents<B>,
        index: usize,
        change: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let generation = self.generations[index].swap(0, Ordering::SeqCst);
        self.changes.fetch_add(1, Ordering::SeqCst);
        change().inspect_err(|_| self.generations[index].store(generation, Ordering::SeqCst))
    }

    /// The number of changes that have begun. None has between two calls that return the same.
    #[cfg(feature = "cuda")]
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Stores a block in a slot and returns the previous block.
    pub(crate) fn replace(
        &self,
        blocks: &mut Contents<B>,
        index: usize,
        bytes: usize,
        max_rank: usize,
        block: B,
    ) -> Result<(Slot, Option<B>), SlotError> {
        self.check_index(index)?;
        let slot = Slot::filled(index);
        let old = blocks.0[index].replace((SlotInfo { slot, bytes, max_rank }, block));
        self.generations[index].store(slot.generation(), Ordering::SeqCst);
        Ok((slot, old.map(|(_, block)| block)))
    }

    /// Removes the block of a slot.
    pub(crate) fn take(&self, blocks: &mut Contents<B>, index: usize) -> Result<Option<B>, SlotError> {
        self.check_index(index)?;
        self.generations[index].store(0, Ordering::SeqCst);
        Ok(blocks.0[index].take().map(|(_, block)| block))
    }

    /// Rejects adapters that are no longer in their slots.
    pub(crate) fn check(&self, slots: impl IntoIterator<Item = Slot>) -> Result<(), SlotError> {
        let gone = slots.into_iter().find(|slot| !self.is_loaded(*slot));
        gone.map_or(Ok(()), |slot| Err(SlotError::Gone { slot }))
    }

    /// Rejects slots of a batch whose adapters are not in them.
    pub(crate) fn check_loaded(&self, slots: &[Slot]) -> Result<(), OperandError> {
        let stray = slots.iter().find(|slot| !self.is_loaded(**slot));
        stray.map_or(Ok(()), |&slot| Err(OperandError::NotLoaded { slot }))
    }

    /// Whether the adapter that a slot names is in it. The base model is.
    fn is_loaded(&self, slot: Slot) -> bool {
        let Some(index) = slot.index() else { return true };
        self.generations.get(index).is_some_and(|now| now.load(Ordering::SeqCst) == slot.generation())
    }
}

impl<B> Contents<B> {
    pub(crate) fn get(&self, index: usize) -> Option<&B> {
        self.0.get(index)?.as_ref().map(|(_, block)| block)
    }

    pub(crate) fn info(&self, index: usize) -> Option<SlotInfo> {
        self.0.get(index)?.as_ref().map(|(info, _)| *info)
    }

    pub(crate) fn infos(&self) -> Vec<SlotInfo> {
        self.0.iter().flatten().map(|(info, _)| *info).collect()
    }
}
