#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{
    DType, Slot,
    adapter::SlotImage,
    cpu,
    error::LoadError,
    model::Model,
    slots::{Resident, Usage},
};

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

    /// Use of the memory.
    fn usage(&self) -> Usage;

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

/// Implements [`Table`] for a backend's table. `fill` is the way that the backend writes an adapter.
macro_rules! table {
    ($backend:ident, $fill:expr) => {
        impl Table for $backend::WeightTable {
            type Reservation = $backend::Reservation;
            type Filled = $backend::Filled;

            fn model(&self) -> &Model {
                self.model()
            }

            fn dtype(&self) -> DType {
                self.dtype()
            }

            fn usage(&self) -> Usage {
                self.usage()
            }

            fn free_slot(&self, first: u16) -> Option<Slot> {
                let slots = (first..=u16::MAX).take_while(|&index| usize::from(index) < self.capacity().num_slots);
                slots.map(Slot::new).find(|&slot| self.get(slot).is_none())
            }

            fn can_hold(&self, image: &SlotImage<'_>) -> bool {
                Self::arena_bytes([image]) <= self.usage().capacity
            }

            fn reserve(&self, slot: Slot, image: &SlotImage<'_>) -> Result<Self::Reservation, LoadError> {
                self.check_slot(slot)?;
                self.reserve(image)
            }

            fn fill(&self, reservation: Self::Reservation, image: &SlotImage<'_>) -> Result<Self::Filled, LoadError> {
                let fill: fn(&Self, Self::Reservation, &SlotImage<'_>) -> Result<Self::Filled, LoadError> = $fill;
                fill(self, reservation, image)
            }

            fn commit(&self, slot: Slot, filled: Self::Filled) -> Result<Resident, LoadError> {
                self.commit(slot, filled)
            }

            fn unload(&self, slot: Slot) -> Result<(), LoadError> {
                self.unload(slot)
            }
        }
    };
}

table!(cpu, |_, reservation, image| reservation.fill(image, &mut cpu::Staging::default()));
#[cfg(feature = "cuda")]
table!(cuda, |table, reservation, image| table.fill_with_progress(reservation, image, |_| ()));
