//! The place of an adapter in a weight table.

use std::fmt;

/// A token's adapter, or the base model: the row of the descriptor table that the adapter was loaded into.
///
/// The same bytes as the `i32` that kernels read.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
#[doc(alias = "lora_int_id")]
#[doc(alias = "weight_indices")]
#[doc(alias = "buffer_id")]
pub struct Slot(i32);

impl Slot {
    /// The base model: the token's rows are left as they are, bit for bit.
    pub const BASE: Self = Self(-1);

    /// The slot of that index.
    pub const fn new(index: u16) -> Self {
        Self(index as i32)
    }

    /// The slot's index, or `None` for the base model.
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
