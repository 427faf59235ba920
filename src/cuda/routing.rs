#![expect(unsafe_code, reason = "calls the raw door")]

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, DevicePtr, DeviceSlice};

use super::{Kernels, LaunchError, raw, region::Region};
use crate::{error::OperandError, plan::Capacity, routing::Batch};

/// A step's routing on the device, built once per step for all layers.
#[derive(Debug)]
pub struct Routing {
    // Dropped before the memory it writes.
    raw: raw::Routing,
    memory: Region,
}

/// The batch that a [`Routing`] was last updated with. While it lives, the routing cannot be updated again.
#[derive(Debug)]
pub struct RoutedBatch<'a> {
    pub(super) raw: raw::RoutedBatch,
    memory: &'a Region,
}

impl Routing {
    /// Allocates what batches within `capacity` need, on `stream`, and `steps_in_flight` pinned host buffers: as many steps as
    /// the host may run ahead of the device.
    ///
    /// # Errors
    /// If the capacity is past the kernels' limits, or there is no memory left.
    pub fn new(
        kernels: &Kernels,
        capacity: Capacity,
        steps_in_flight: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<Self, LaunchError> {
        let memory = Region::new(kernels, raw::Routing::device_bytes(capacity)?, stream)?;
        // SAFETY: the memory is this type's own for as long as it lives, and freed in the order of its stream, on which alone it
        // is used.
        let raw = unsafe { raw::Routing::new(kernels, capacity, steps_in_flight, memory.region()) }?;
        Ok(Self { raw, memory })
    }

    /// Enqueues one host-to-device copy and the grouping kernel on `stream`, which is the one the routing was made on.
    ///
    /// # Errors
    /// `Busy` if `steps_in_flight` copies are pending: it never waits. `Capacity` if the batch is too large. Nothing was enqueued.
    pub fn update(&mut self, batch: &Batch<'_>, stream: &CudaStream) -> Result<RoutedBatch<'_>, LaunchError> {
        self.memory.check("the routing", stream)?;
        // SAFETY: the stream is the memory's own.
        let raw = unsafe { self.raw.update(batch, stream.into()) }?;
        Ok(RoutedBatch { raw, memory: &self.memory })
    }

    /// As [`update`](Self::update), for slots that are on the device already: one `i32` per token, -1 or anything that is not a
    /// slot for the base model; and, if given, one scale per token.
    ///
    /// # Errors
    /// `Capacity` if the batch is too large, `Operand` if there are not as many scales as slots. Nothing was enqueued.
    pub fn update_on_device(
        &mut self,
        token_slots: &CudaView<'_, i32>,
        token_scales: Option<&CudaView<'_, f32>>,
        stream: &CudaStream,
    ) -> Result<RoutedBatch<'_>, LaunchError> {
        self.memory.check("the routing", stream)?;
        self.memory.check_context("token_slots", token_slots.stream())?;
        let num_tokens = token_slots.len();
        self.raw.capture_batch(num_tokens)?;
        if let Some(scales) = token_scales {
            self.memory.check_context("token_scales", scales.stream())?;
            if scales.len() != num_tokens {
                let (operand, got) = ("token_scales", scales.len());
                return Err(OperandError::Length { operand, got, want: num_tokens }.into());
            }
        }
        let (slots, _slots_guard) = token_slots.device_ptr(stream);
        let scales = token_scales.map(|scales| scales.device_ptr(stream));
        let scales_ptr = scales.as_ref().map(|(ptr, _guard)| *ptr);
        // SAFETY: both have `num_tokens` elements, and cudarc orders their uses; the stream is the memory's own.
        let raw = unsafe { self.raw.update_on_device(slots, scales_ptr, num_tokens, stream.into()) }?;
        Ok(RoutedBatch { raw, memory: &self.memory })
    }

    /// The batch to capture a CUDA graph of up to `num_tokens` rows with, through the raw door
    /// ([`raw::Routing::capture_batch`]).
    ///
    /// # Errors
    /// `Capacity` if it is too large.
    pub fn capture_batch(&self, num_tokens: usize) -> Result<raw::RoutedBatch, LaunchError> {
        self.raw.capture_batch(num_tokens)
    }
}

impl RoutedBatch<'_> {
    /// Rows of the matrices that it is for.
    pub fn num_tokens(&self) -> usize {
        self.raw.num_tokens()
    }

    pub(super) fn check(&self, stream: &CudaStream) -> Result<(), LaunchError> {
        self.memory.check("the batch", stream)
    }
}
