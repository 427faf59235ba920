#![expect(unsafe_code, reason = "calls the raw door")]

use std::sync::Arc;

use super::{
    LaunchError, Queue, View, raw,
    region::{Kept, Region},
};
use crate::{error::OperandError, plan::Capacity, routing::Batch};

/// A step's routing on the device, built once per step for all layers.
#[derive(Debug)]
pub struct Routing {
    // Dropped before the memory it writes.
    raw: raw::Routing,
    memory: Arc<Region>,
}

/// The batch that a [`Routing`] was last updated with. While it lives, the routing cannot be updated again.
#[derive(Debug)]
pub struct RoutedBatch<'a> {
    pub(super) raw: raw::RoutedBatch,
    memory: &'a Region,
}

impl Routing {
    /// Allocates what batches within `capacity` need, and `steps_in_flight` pinned host buffers: as many steps as the host may run
    /// ahead of the device.
    ///
    /// # Errors
    /// If the capacity is past the kernels' limits, or there is no memory left.
    pub fn new(queue: &Queue, capacity: Capacity, steps_in_flight: usize) -> Result<Self, LaunchError> {
        let memory = Arc::new(Region::new(queue, raw::Routing::device_bytes(capacity)?)?);
        // SAFETY: the memory is this type's own, is freed in the order of its stream, and is used on that stream alone; graphs that
        // read it keep it.
        let raw = unsafe { raw::Routing::new(queue.kernels(), capacity, steps_in_flight, memory.region()) }?;
        Ok(Self { raw, memory })
    }

    /// Enqueues one host-to-device copy and the grouping kernel.
    ///
    /// # Errors
    /// `Busy` if `steps_in_flight` copies are pending: it never waits, but [`wait`](Self::wait) does. `Capacity` if the batch is too
    /// large. `Capturing` if the queue's stream is being captured. Nothing was enqueued.
    pub fn update(&mut self, batch: &Batch<'_>) -> Result<RoutedBatch<'_>, LaunchError> {
        self.queue().enter()?;
        let stream = self.queue().raw();
        // SAFETY: the stream is the memory's own.
        let raw = unsafe { self.raw.update(batch, stream) }?;
        Ok(RoutedBatch { raw, memory: &self.memory })
    }

    /// Whether [`update`](Self::update) has a free staging buffer now.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn is_ready(&self) -> Result<bool, LaunchError> {
        self.queue().bind()?;
        self.raw.is_ready()
    }

    /// Blocks this thread until [`update`](Self::update) has a free staging buffer: until the copy of the step that is
    /// `steps_in_flight` before the next one is done.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn wait(&self) -> Result<(), LaunchError> {
        self.queue().bind()?;
        self.raw.wait()
    }

    /// As [`update`](Self::update), for slots that are on the device already: one `i32` per token, -1 or anything that is not a
    /// slot for the base model; and, if given, one scale per token.
    ///
    /// # Errors
    /// `Capacity` if the batch is too large, `Operand` if there are not as many scales as slots, `Capturing` if the queue's stream is
    /// being captured. Nothing was enqueued.
    pub fn update_on_device<'a>(
        &mut self,
        token_slots: impl Into<View<'a, i32>>,
        token_scales: Option<View<'a, f32>>,
    ) -> Result<RoutedBatch<'_>, LaunchError> {
        let token_slots = token_slots.into();
        let num_tokens = token_slots.len();
        self.raw.capture_batch(num_tokens)?;
        let queue = self.queue().clone();
        token_slots.check_queue("token_slots", &queue)?;
        if let Some(scales) = &token_scales {
            scales.check_queue("token_scales", &queue)?;
            if scales.len() != num_tokens {
                let (operand, got) = ("token_scales", scales.len());
                return Err(OperandError::Length { operand, got, want: num_tokens }.into());
            }
        }
        queue.enter()?;
        let (slots, _slots_guard) = token_slots.on(&queue);
        let (scales, _scales_guard) = token_scales.as_ref().map(|scales| scales.on(&queue)).unzip();
        // SAFETY: both have `num_tokens` elements, and guards order their uses; the stream is the memory's own.
        let raw = unsafe { self.raw.update_on_device(slots, scales, num_tokens, queue.raw()) }?;
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

    /// The queue that it was made on.
    pub fn queue(&self) -> &Queue {
        self.memory.queue()
    }

    pub(super) fn kept(&self) -> Kept {
        self.memory.clone()
    }
}

impl RoutedBatch<'_> {
    /// Rows of the matrices that it is for.
    pub fn num_tokens(&self) -> usize {
        self.raw.num_tokens()
    }

    pub(super) fn queue(&self) -> &Queue {
        self.memory.queue()
    }
}
