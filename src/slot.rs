//! The slot of an adapter.

use std::fmt;

use crate::unique::unique;

/// The slot of a token's adapter, with the adapter that is in it, or [`Slot::BASE`] for the base model.
///
/// A load, a table or a lease hands it out. It names that adapter alone: once the slot has another adapter or none, and
/// in any other table or pool, steps refuse it. No two loads of a process, nor two copies of pools, have equal slots.
///
/// ```
/// use aril::{adapter::SlotImage, cpu::{WeightTable, Workspace}, error::{LoadError, OperandError}, routing::Batch};
///
/// fn replace(weights: &WeightTable, first: &SlotImage<'_>, second: &SlotImage<'_>) -> Result<(), LoadError> {
///     let old = weights.load(0, first)?;
///     let new = weights.load(0, second)?;
///     let step = |slot| weights.step(&Batch::new(&[slot]), &mut Workspace::default()).map(drop);
///     assert_eq!(step(old), Err(OperandError::NotLoaded { slot: old }));
///     assert_eq!(step(new), Ok(()));
///     Ok(())
/// }
/// ```
#[derive(Clone, Copy, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[doc(alias = "lora_int_id")]
#[doc(alias = "weight_indices")]
#[doc(alias = "buffer_id")]
pub struct Slot {
    number: i32,
    /// The content of the slot; 0 for the base model.
    generation: u64,
}

impl Slot {
    /// The base model. Operations leave the token's rows unchanged, bit for bit.
    pub const BASE: Self = Self { number: -1, generation: 0 };

    /// A slot with an adapter that is put there now.
    pub(crate) fn filled(index: usize) -> Self {
        let number = i32::try_from(index).expect("a table has no more slots than this");
        Self { number, generation: unique() }
    }

    /// The index of the slot, or `None` for [`Slot::BASE`].
    #[expect(clippy::cast_sign_loss, reason = "guarded by the comparison")]
    pub const fn index(self) -> Option<usize> {
        if self.number < 0 { None } else { Some(self.number as usize) }
    }

    /// The index of the slot, or -1 for [`Slot::BASE`]: what kernels read, for slots in device memory and the raw API.
    /// It does not say which adapter is in the slot.
    pub const fn number(self) -> i32 {
        self.number
    }

    /// What is in the slot: no other content of any slot has the same; 0 for the base model.
    pub(crate) const fn generation(self) -> u64 {
        self.generation
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.index() {
            Some(index) => write!(f, "Slot({index}, generation {})", self.generation),
            None => f.write_str("Slot(BASE)"),
        }
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.index() {
            Some(index) => write!(f, "slot {index}"),
            None => f.write_str("the base model's slot"),
        }
    }
}
