//! An adapter with its image.
//!
//! Invariant: the image borrows from the adapter, which stays where it is, and as it is, as long as the image is there.

#![expect(unsafe_code, reason = "a value that borrows from what is beside it")]

use std::sync::Arc;

use super::{error::AdapterError, image::SlotImage, open::Adapter};
use crate::{DType, model::Model};

/// An adapter and its planned image.
#[derive(Debug)]
pub(crate) struct Planned {
    // Declared first: it is dropped before what it borrows from.
    image: SlotImage<'static>,
    adapter: Arc<Adapter>,
}

impl Planned {
    /// As [`Adapter::plan`].
    pub(crate) fn new(adapter: Arc<Adapter>, model: &Model, dtype: DType) -> Result<Self, AdapterError> {
        // SAFETY: the adapter is in the memory of an `Arc` that is dropped after the image. As long as there is that
        // `Arc`, nobody has the adapter alone, so that nobody changes or moves it. The image is given away for a
        // shorter time only.
        let borrowed: &'static Adapter = unsafe { &*Arc::as_ptr(&adapter) };
        Ok(Self { image: borrowed.plan(model, dtype)?, adapter })
    }

    pub(crate) fn image(&self) -> &SlotImage<'_> {
        &self.image
    }

    pub(crate) fn adapter(&self) -> &Arc<Adapter> {
        &self.adapter
    }
}
