use crate::{DType, Slot, adapter::SlotImage, cpu, error::LoadError, model::Model, residency::Resident};

/// A weight table that a [`Group`](super::Group) loads into.
///
/// Reservations and filled adapters free their memory when they are dropped.
pub trait Table {
    /// Memory for an adapter.
    type Reservation;
    /// An adapter that is not in a slot yet.
    type Filled;

    /// The model of the adapters.
    fn model(&self) -> &Model;

    /// The element type of factors.
    fn dtype(&self) -> DType;

    /// The lowest empty slot from the index `first` on.
    fn free_slot(&self, first: u16) -> Option<Slot>;

    /// Whether an image would fit if no adapter was loaded.
    fn can_hold(&self, image: &SlotImage<'_>) -> bool;

    /// Reserves memory for an adapter that will be put into `slot`.
    ///
    /// # Errors
    /// [`LoadError`] if the slot does not exist, the image does not match the table, or there is no room.
    fn reserve(&self, slot: Slot, image: &SlotImage<'_>) -> Result<Self::Reservation, LoadError>;

    /// Writes an adapter and waits until it is written, so that no failed copy can make the commit fail.
    ///
    /// # Errors
    /// [`LoadError`] if a weight has no finite value in the table's element type, or a copy failed.
    fn fill(&self, reservation: Self::Reservation, image: &SlotImage<'_>) -> Result<Self::Filled, LoadError>;

    /// Puts an adapter into the slot that its memory was reserved for. [`GroupError::Torn`](super::GroupError::Torn) lists what may
    /// still fail here.
    ///
    /// # Errors
    /// [`LoadError`]. The slot is then unchanged.
    fn commit(&self, slot: Slot, filled: Self::Filled) -> Result<Resident, LoadError>;

    /// Empties a slot.
    ///
    /// # Errors
    /// [`LoadError`] if the slot does not exist, or as for `commit`.
    fn unload(&self, slot: Slot) -> Result<(), LoadError>;
}

/// The lowest slot of `num_slots` from `first` on that `is_loaded` rejects.
fn free_slot(first: u16, num_slots: usize, is_loaded: impl Fn(Slot) -> bool) -> Option<Slot> {
    (first..=u16::MAX).take_while(|&index| usize::from(index) < num_slots).map(Slot::new).find(|&slot| !is_loaded(slot))
}

impl Table for cpu::WeightTable {
    type Reservation = cpu::Reservation;
    type Filled = cpu::Filled;

    fn model(&self) -> &Model {
        self.model()
    }

    fn dtype(&self) -> DType {
        self.dtype()
    }

    fn free_slot(&self, first: u16) -> Option<Slot> {
        free_slot(first, self.capacity().num_slots, |slot| self.get(slot).is_some())
    }

    fn can_hold(&self, image: &SlotImage<'_>) -> bool {
        Self::arena_bytes([image]) <= self.usage().capacity
    }

    fn reserve(&self, slot: Slot, image: &SlotImage<'_>) -> Result<cpu::Reservation, LoadError> {
        self.check_slot(slot)?;
        self.reserve(image)
    }

    fn fill(&self, reservation: cpu::Reservation, image: &SlotImage<'_>) -> Result<cpu::Filled, LoadError> {
        reservation.fill(image)
    }

    fn commit(&self, slot: Slot, filled: cpu::Filled) -> Result<Resident, LoadError> {
        self.commit(slot, filled)
    }

    fn unload(&self, slot: Slot) -> Result<(), LoadError> {
        self.unload(slot)
    }
}

#[cfg(feature = "cuda")]
mod on_device {
    use super::*;
    use crate::cuda;

    impl Table for cuda::WeightTable {
        type Reservation = cuda::Reservation;
        type Filled = cuda::Filled;

        fn model(&self) -> &Model {
            self.model()
        }

        fn dtype(&self) -> DType {
            self.dtype()
        }

        fn free_slot(&self, first: u16) -> Option<Slot> {
            free_slot(first, self.capacity().num_slots, |slot| self.get(slot).is_some())
        }

        fn can_hold(&self, image: &SlotImage<'_>) -> bool {
            Self::arena_bytes([image]) <= self.usage().capacity
        }

        fn reserve(&self, slot: Slot, image: &SlotImage<'_>) -> Result<cuda::Reservation, LoadError> {
            self.check_slot(slot)?;
            self.reserve(image)
        }

        fn fill(&self, reservation: cuda::Reservation, image: &SlotImage<'_>) -> Result<cuda::Filled, LoadError> {
            self.fill_with_progress(reservation, image, |_| ())
        }

        fn commit(&self, slot: Slot, filled: cuda::Filled) -> Result<Resident, LoadError> {
            self.commit(slot, filled)
        }

        fn unload(&self, slot: Slot) -> Result<(), LoadError> {
            self.unload(slot)
        }
    }
}
