//! Slots of a weight table.

use std::fmt;

/// The slot of a token's adapter, or [`Slot::BASE`] for the base model.
///
/// `repr(transparent)` over `i32`, which is what kernels read.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
#[doc(alias = "lora_int_id")]
#[doc(alias = "weight_indices")]
#[doc(alias = "buffer_id")]
pub struct Slot(i32);

impl Slot {
    /// The base model, -1. Operations leave the token's rows unchanged, bit for bit.
    pub const BASE: Self = Self(-1);

    /// The slot with this index.
    pub const fn new(index: u16) -> Self {
        Self(index as i32)
    }

    /// The index of the slot, or `None` for [`Slot::BASE`].
    #[expect(clippy::cast_sign_loss, reason = "guarded by the comparison")]
    pub const fn index(self) -> Option<usize> {
        if self.0 < 0 { None } else { Some(self.0 as usize) }
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
