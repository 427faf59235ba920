//! Adapters on disk, and what they become in a slot.

mod image;
mod tensor;

pub use image::{ALIGNMENT_BYTES, ImageEntry, SlotImage, padded};
pub use tensor::Tensor;

use crate::error::SlotError;

/// STUB
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// The adapter does not fit the table, or there is no such slot.
    #[error(transparent)]
    Slot(#[from] SlotError),
}
