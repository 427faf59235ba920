//! Adapters with the image of their combination.
//!
//! Invariant: the image borrows from the adapters, which stay where they are, and as they are, as long as the image is
//! there.

#![expect(unsafe_code, reason = "a value that borrows from what is beside it")]

use std::sync::Arc;

use super::{error::AdapterError, image::SlotImage, open::Adapter};
use crate::{DType, digest, model::Model};

/// Adapters, each with its scale, and their planned image.
#[derive(Debug)]
pub(crate) struct Planned {
    // Declared first: it is dropped before what it borrows from.
    image: SlotImage<'static>,
    parts: Vec<(Arc<Adapter>, f32)>,
}

impl Planned {
    /// As [`Adapter::plan`], whether or not the adapter's invocation was taken.
    pub(crate) fn new(adapter: Arc<Adapter>, model: &Model, dtype: DType) -> Result<Self, AdapterError> {
        Self::combined(vec![(adapter, 1.0)], model, dtype)
    }

    /// As [`SlotImage::combined`], whether or not the parts' invocations were taken.
    pub(crate) fn combined(parts: Vec<(Arc<Adapter>, f32)>, model: &Model, dtype: DType) -> Result<Self, AdapterError> {
        let borrow = |(adapter, scale): &(Arc<Adapter>, f32)| {
            // SAFETY: the adapter is in the memory of an `Arc` that is dropped after the image. As long as there is
            // that `Arc`, nobody has the adapter alone, so that nobody changes or moves it. The image is given away for
            // a shorter time only.
            let borrowed: &'static Adapter = unsafe { &*Arc::as_ptr(adapter) };
            (borrowed, *scale)
        };
        let borrowed: Vec<_> = parts.iter().map(borrow).collect();
        Ok(Self { image: SlotImage::of_parts(&borrowed, model, dtype)?, parts })
    }

    pub(crate) fn image(&self) -> &SlotImage<'_> {
        &self.image
    }

    /// The adapters and their scales.
    pub(crate) fn parts(&self) -> &[(Arc<Adapter>, f32)] {
        &self.parts
    }

    /// A number that depends on the scales and on all of the adapters, as [`Adapter::fingerprint`] does.
    pub(crate) fn fingerprint(&self) -> Result<u64, AdapterError> {
        let of_part = |(adapter, scale): &(Arc<Adapter>, f32)| {
            Ok(digest::mix(adapter.fingerprint()?, u64::from(scale.to_bits())))
        };
        self.parts.iter().map(of_part).try_fold(0, |number, part| Ok(digest::mix(number, part?)))
    }
}
