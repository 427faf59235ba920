//! The routing of a step.

#![expect(unsafe_code, reason = "calls the raw API")]

use std::sync::Arc;

use crate::{
    Slot,
    cuda::{
        LaunchError, Queue, View,
        memory::{Kept, Memory as _, Region},
        raw,
    },
    error::OperandError,
    plan::Capacity,
    routing::Batch,
};

/// The routing of a step on the device. It is updated once per step, for all layers.
#[derive(Debug)]
pub struct Routing {
    // Dropped before the memory it writes.
    raw: raw::Routing,
    memory: Arc<Region>,
    capacity: Capacity,
    /// The slots of the last update, one for each run of tokens with the same; empty if they were in device memory.
    slots: Vec<Slot>,
    /// Whether a token may have an adapter.
    has_adapters: bool,
    /// That of the last update.
    batch: raw::RoutedBatch,
}

/// The batch of the last update of a [`Routing`]. Borrows the routing, so that it cannot be updated meanwhile.
#[derive(Debug)]
pub struct RoutedBatch<'a> {
    pub(in crate::cuda) raw: raw::RoutedBatch,
    routing: &'a Routing,
}

impl Routing {
    /// Allocates device memory for batches within `capacity`, and `steps_in_flight` pinned host buffers. The host may
    /// run that many steps ahead of the device.
    ///
    /// # Errors
    /// [`LaunchError`] if a bound of the capacity is invalid, or memory is exhausted.
    pub fn new(queue: &Queue, capacity: Capacity, steps_in_flight: usize) -> Result<Self, LaunchError> {
        let memory = Arc::new(Region::new(queue, raw::Routing::device_bytes(capacity)?)?);
        // SAFETY: this type owns the memory, uses it on one stream only, and frees it in that stream's order. Graphs
        // that read it keep it alive.
        let raw = unsafe { raw::Routing::new(queue.kernels(), capacity, steps_in_flight, memory.region()) }?;
        let (batch, slots) = (raw.batch_of(std::iter::empty()), Vec::with_capacity(capacity.max_tokens));
        Ok(Self { raw, memory, capacity, slots, has_adapters: false, batch })
    }

    /// Enqueues the kernel that groups the batch's tokens by slot, which reads them in a pinned buffer. Never waits.
    /// The step of the batch checks that the adapters are in the slots.
    ///
    /// # Errors
    /// [`OperandError::Capacity`] if the batch is too large, [`OperandError::NoSuchSlot`] if it names a slot at or
    /// above the capacity's. [`LaunchError::Busy`] if `steps_in_flight` updates have not run; see [`wait`](Self::wait).
    /// [`LaunchError::Capturing`]. Nothing was enqueued.
    pub fn update(&mut self, batch: &Batch<'_>) -> Result<RoutedBatch<'_>, LaunchError> {
        batch.check(self.capacity)?;
        let queue = self.memory.queue();
        queue.prepare()?;
        let numbers = batch.slots().iter().map(|slot| slot.number());
        // SAFETY: the memory belongs to this stream.
        unsafe { self.raw.update_from(numbers.clone(), batch.scales(), queue.raw()) }?;
        self.slots.clear();
        self.slots.extend(batch.slots().chunk_by(Slot::eq).map(|run| run[0]));
        self.has_adapters = batch.has_adapters();
        self.batch = self.raw.batch_of(numbers);
        Ok(self.batch())
    }

    /// Whether [`update`](Self::update) has a free staging buffer.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] if the driver returns an error.
    pub fn is_ready(&self) -> Result<bool, LaunchError> {
        self.queue().bind()?;
        self.raw.is_ready()
    }

    /// Blocks this thread until [`update`](Self::update) has a free staging buffer, which is when the one
    /// `steps_in_flight` updates ago has run.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] if the driver returns an error.
    pub fn wait(&self) -> Result<(), LaunchError> {
        self.queue().bind()?;
        self.raw.wait()
    }

    /// Like [`update`](Self::update), with the [numbers](Slot::number) of slots, and scales, in device memory.
    /// `token_slots` is `[tokens]`; -1 or any value that is not a slot is the base model. `token_scales` is `[tokens]`.
    ///
    /// The host does not see the slots, so that no step checks which adapters are in them: a slot whose adapter was
    /// unloaded, or that no lease holds any more, gives what was in it, the base model, or the adapter that was loaded
    /// or leased there since then.
    ///
    /// # Errors
    /// [`OperandError::Capacity`] if the batch is too large, [`LaunchError::Operand`] if there is not one scale per
    /// slot, [`LaunchError::Capturing`]. Nothing was enqueued.
    pub fn update_on_device<'a>(
        &mut self,
        token_slots: impl Into<View<'a, i32>>,
        token_scales: Option<View<'a, f32>>,
    ) -> Result<RoutedBatch<'_>, LaunchError> {
        let (mut token_slots, mut token_scales) = (token_slots.into(), token_scales);
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
        queue.prepare()?;
        let (slots, _slots_guard) = token_slots.on(&queue)?;
        let (scales, _scales_guard) = token_scales.as_mut().map(|scales| scales.on(&queue)).transpose()?.unzip();
        // SAFETY: both have `num_tokens` elements. All of the memory belongs to this stream.
        self.batch = unsafe { self.raw.update_on_device(slots, scales, num_tokens, queue.raw()) }?;
        self.slots.clear();
        self.has_adapters = true;
        Ok(self.batch())
    }

    /// The batch of the last update, which has no tokens before the first.
    pub fn batch(&self) -> RoutedBatch<'_> {
        RoutedBatch { raw: self.batch, routing: self }
    }

    /// A batch of up to `num_tokens` tokens to capture a CUDA graph with, in the raw API. See
    /// [`raw::Routing::capture_batch`].
    ///
    /// # Errors
    /// [`OperandError::Capacity`] if `num_tokens` exceeds the capacity.
    pub fn capture_batch(&self, num_tokens: usize) -> Result<raw::RoutedBatch, LaunchError> {
        self.raw.capture_batch(num_tokens)
    }

    /// The queue of the routing.
    pub fn queue(&self) -> &Queue {
        self.memory.queue()
    }

    /// Slots of the tables that the routing is for.
    pub(in crate::cuda) fn num_slots(&self) -> usize {
        self.capacity.num_slots
    }

    pub(in crate::cuda) fn kept(&self) -> Kept {
        self.memory.clone()
    }
}

impl<'a> RoutedBatch<'a> {
    /// Tokens in the batch.
    pub fn num_tokens(&self) -> usize {
        self.raw.num_tokens()
    }

    /// Whether a token has a slot, or may have one in device memory.
    pub fn has_adapters(&self) -> bool {
        self.routing.has_adapters
    }

    pub(in crate::cuda) fn queue(&self) -> &Queue {
        self.routing.queue()
    }

    pub(in crate::cuda) fn num_slots(&self) -> usize {
        self.routing.num_slots()
    }

    /// The slots of the tokens, without repetitions of the one before, if the host has them; otherwise none.
    pub(crate) fn slots(&self) -> &'a [Slot] {
        &self.routing.slots
    }
}
