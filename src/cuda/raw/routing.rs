//! The routing of a step, by addresses.

use std::ptr;

use super::memory::{Arrays, DeviceRegion, Stream, int};
use crate::{
    cuda::{Kernels, kernels::check, memory::Pinned},
    error::{LaunchError, OperandError},
    ffi,
    plan::{BatchBounds, Capacity},
};

/// The routing of a step in device memory of the engine, and the pinned buffers that batches are copied from.
///
/// It is updated once per step, for all layers. Its addresses never change, so graphs follow the last update.
#[derive(Debug)]
pub struct Routing {
    kernels: Kernels,
    capacity: Capacity,
    routing: ffi::aril_routing,
    /// Each has the slots of a batch, directly followed by its scales.
    staging: Vec<Pinned>,
    next: usize,
}

// SAFETY: it holds device addresses, and pinned memory and events that nothing else owns.
unsafe impl Send for Routing {}
// SAFETY: a shared reference changes nothing.
unsafe impl Sync for Routing {}

const TOKENS_PER_TILE: usize = ffi::ARIL_TOKENS_PER_TILE as usize;

/// The arrays of a routing in memory at `start`, and the number of bytes they take.
fn lay_out(capacity: Capacity, start: u64) -> (ffi::aril_routing, usize) {
    let Capacity { max_tokens, num_slots, .. } = capacity;
    let mut arrays = Arrays::at(start);
    let routing = ffi::aril_routing {
        tokens: arrays.push::<i32>(max_tokens) as *mut _,
        scales: arrays.push::<f32>(max_tokens) as *mut _,
        slots: arrays.push::<i32>(max_tokens) as *mut _,
        num_tokens: arrays.push::<i32>(1) as *mut _,
        indptr: arrays.push::<i32>(num_slots + 1) as *mut _,
        tiles: tiles(&mut arrays, capacity.max_small_tiles(max_tokens)),
        wide_tiles: tiles(&mut arrays, capacity.max_wide_tiles(max_tokens)),
        segments: arrays.push::<ffi::aril_segments>(1) as *mut _,
        rows: arrays.push::<ffi::aril_row>(capacity.max_small_tiles(max_tokens) * TOKENS_PER_TILE) as *mut _,
    };
    (routing, arrays.bytes())
}

fn tiles(arrays: &mut Arrays, max_tiles: usize) -> ffi::aril_tiles {
    let all = arrays.push::<ffi::aril_tile>(max_tiles) as *mut _;
    ffi::aril_tiles { all, count: arrays.push::<i32>(1) as *mut _ }
}

fn staging_bytes(capacity: Capacity) -> usize {
    capacity.max_tokens * (size_of::<i32>() + size_of::<f32>())
}

impl Routing {
    /// Device memory that [`new`](Self::new) needs, in bytes.
    ///
    /// # Errors
    /// [`LaunchError::Plan`] if a bound of the capacity is invalid.
    pub fn device_bytes(capacity: Capacity) -> Result<usize, LaunchError> {
        Ok(lay_out(capacity.checked()?, 0).1)
    }

    /// A routing in `memory`, which must be aligned to 256 bytes. Allocates `steps_in_flight` pinned host buffers: the
    /// host may run that many steps ahead of the device. Call [`update`](Self::update) before any operation.
    ///
    /// # Errors
    /// [`LaunchError`] if a bound of the capacity is invalid, `memory` is too small or misaligned, or pinned memory is
    /// exhausted.
    ///
    /// # Safety
    /// - **Validity.** `memory` is device memory of the kernels' context.
    /// - **Liveness.** It stays mapped while the routing or its batches are in use, and until the work has run.
    /// - **Aliasing.** Nothing else writes it.
    pub unsafe fn new(
        kernels: &Kernels,
        capacity: Capacity,
        steps_in_flight: usize,
        memory: DeviceRegion,
    ) -> Result<Self, LaunchError> {
        kernels.check_thread()?;
        let (routing, bytes) = lay_out(capacity.checked()?, memory.ptr);
        memory.check_room("the routing's memory", bytes)?;
        let staging = (0..steps_in_flight.max(1)).map(|_| Pinned::new(staging_bytes(capacity)));
        let staging = staging.collect::<Result<_, _>>()?;
        Ok(Self { kernels: kernels.clone(), capacity, routing, staging, next: 0 })
    }

    /// Enqueues the kernel that groups tokens by slot, which reads the [number](crate::Slot::number) of each token's
    /// slot and, optionally, a [scale](crate::routing::Batch::with_scales) for each, in a pinned buffer. Never waits. A
    /// number at or above the capacity's is the base model, as -1 is. Which adapters are in the slots is not checked.
    ///
    /// # Errors
    /// [`LaunchError::Busy`] if `steps_in_flight` updates have not run. [`OperandError::Capacity`] if the batch is too
    /// large, [`OperandError::Length`] if there is not one scale per token. Nothing was enqueued.
    ///
    /// # Safety
    /// - **Validity.** `stream` belongs to the kernels' context and is not being captured.
    /// - **Aliasing.** Work on other streams that uses a batch of this routing is ordered against `stream`.
    pub unsafe fn update(
        &mut self,
        slots: &[i32],
        scales: Option<&[f32]>,
        stream: Stream,
    ) -> Result<RoutedBatch, LaunchError> {
        if let Some(scales) = scales.filter(|scales| scales.len() != slots.len()) {
            return Err(OperandError::Length { operand: "scales", got: scales.len(), want: slots.len() }.into());
        }
        // SAFETY: the caller's obligations.
        unsafe { self.update_from(slots.iter().copied(), scales, stream) }
    }

    /// [`update`](Self::update), with as many scales as slots.
    ///
    /// # Safety
    /// As for `update`.
    pub(in crate::cuda) unsafe fn update_from(
        &mut self,
        slots: impl ExactSizeIterator<Item = i32>,
        scales: Option<&[f32]>,
        stream: Stream,
    ) -> Result<RoutedBatch, LaunchError> {
        let num_tokens = slots.len();
        let routed = self.capture_batch(num_tokens)?;
        self.kernels.check_thread()?;
        let steps_in_flight = self.staging.len();
        let staging = &mut self.staging[self.next];
        let Some(buffer) = staging.try_bytes()? else { return Err(LaunchError::Busy { steps_in_flight }) };
        let (slots_bytes, factors_bytes) = buffer.split_at_mut(num_tokens * size_of::<i32>());
        let staged: &mut [i32] = bytemuck::cast_slice_mut(slots_bytes);
        staged.iter_mut().zip(slots).for_each(|(staged, slot)| *staged = slot);
        let factors: &[u8] = bytemuck::cast_slice(scales.unwrap_or_default());
        factors_bytes[..factors.len()].copy_from_slice(factors);
        // Not copied to the device first: a copy would wait for those of loads, which go the same way, for up to 8 MiB
        // each.
        let token_slots: *const i32 = staged.as_ptr();
        let token_scales = scales.map_or(ptr::null(), |_| factors_bytes.as_ptr().cast());
        // SAFETY: the caller vouches for the stream. The buffer is page-locked, so that the device reads it at the
        // host's address. Nothing writes it until the kernel has run, which `in_use` takes note of.
        unsafe { self.route(token_slots, token_scales, num_tokens, stream) }?;
        // SAFETY: as above.
        unsafe { self.staging[self.next].in_use(stream) }?;
        self.next = (self.next + 1) % steps_in_flight;
        Ok(routed)
    }

    /// Whether [`update`](Self::update) has a free staging buffer.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] if the driver returns an error.
    pub fn is_ready(&self) -> Result<bool, LaunchError> {
        self.staging[self.next].is_free()
    }

    /// Blocks this thread until [`update`](Self::update) has a free staging buffer, which is when the one
    /// `steps_in_flight` updates ago has run.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] if the driver returns an error.
    pub fn wait(&self) -> Result<(), LaunchError> {
        self.staging[self.next].wait()
    }

    /// Like [`update`](Self::update), with the addresses of slots, `i32 [tokens]`, and optionally of scales, `f32
    /// [tokens]`, in device memory. May be captured in a CUDA graph.
    ///
    /// # Errors
    /// [`OperandError::Capacity`] if the batch is too large. Nothing was enqueued.
    ///
    /// # Safety
    /// - **Validity.** `token_slots` and `token_scales` are the addresses of `num_tokens` elements each. `stream`
    ///   belongs to the kernels' context.
    /// - **Liveness.** That memory stays mapped until the work has run.
    /// - **Aliasing.** Until then, only work ordered by `stream` writes it. All uses of this routing's batches are
    ///   ordered by `stream`, too.
    pub unsafe fn update_on_device(
        &mut self,
        token_slots: u64,
        token_scales: Option<u64>,
        num_tokens: usize,
        stream: Stream,
    ) -> Result<RoutedBatch, LaunchError> {
        let routed = self.capture_batch(num_tokens)?;
        self.kernels.check_thread()?;
        let token_scales = token_scales.unwrap_or(0) as *const f32;
        // SAFETY: the caller vouches for the addresses.
        unsafe { self.route(token_slots as *const i32, token_scales, num_tokens, stream) }?;
        Ok(routed)
    }

    /// A batch of up to `num_tokens` tokens to capture a CUDA graph with. It has the same addresses as an updated
    /// batch, and upper bounds for its counts. A replay leaves rows unchanged that are beyond the last update, or base
    /// tokens in it.
    ///
    /// # Errors
    /// [`OperandError::Capacity`] if `num_tokens` exceeds the capacity.
    pub fn capture_batch(&self, num_tokens: usize) -> Result<RoutedBatch, LaunchError> {
        OperandError::within("the batch's tokens", num_tokens, self.capacity.max_tokens)?;
        Ok(self.bounded(num_tokens, self.capacity))
    }

    /// The batch of the last update, whose tokens had these slots. Its bounds are for these alone: its operations are
    /// enqueued before the next update, and not captured.
    pub(in crate::cuda) fn batch_of(&self, slots: impl ExactSizeIterator<Item = i32>) -> RoutedBatch {
        self.bounded(slots.len(), self.capacity.of_batch(slots))
    }

    fn bounded(&self, num_tokens: usize, capacity: Capacity) -> RoutedBatch {
        RoutedBatch {
            routing: self.routing,
            num_tokens,
            num_slots: self.capacity.num_slots,
            max_small_tiles: capacity.max_small_tiles(num_tokens),
            max_wide_tiles: capacity.max_wide_tiles(num_tokens),
        }
    }

    unsafe fn route(
        &self,
        token_slots: *const i32,
        token_scales: *const f32,
        num_tokens: usize,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        let args = ffi::aril_route_args {
            token_slots,
            token_scales,
            num_tokens: int(num_tokens)?,
            num_slots: int(self.capacity.num_slots)?,
            routing: self.routing,
        };
        // SAFETY: the routing's memory is laid out for this capacity; the caller vouches for the rest.
        check(unsafe { ffi::aril_route(&args, stream.as_raw()) })
    }
}

/// A batch: the addresses of its grouping, and upper bounds for its counts.
#[derive(Clone, Copy, Debug)]
pub struct RoutedBatch {
    pub(in crate::cuda) routing: ffi::aril_routing,
    pub(in crate::cuda) num_tokens: usize,
    pub(in crate::cuda) num_slots: usize,
    pub(in crate::cuda) max_small_tiles: usize,
    pub(in crate::cuda) max_wide_tiles: usize,
}

// SAFETY: it holds device addresses, which are plain data.
unsafe impl Send for RoutedBatch {}
// SAFETY: as above.
unsafe impl Sync for RoutedBatch {}

impl RoutedBatch {
    /// Tokens in the batch.
    pub const fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// What launches are sized by, with a table of up to this rank.
    pub(in crate::cuda) const fn bounds(&self, table_rank: usize) -> BatchBounds {
        let Self { num_tokens, max_small_tiles: small_tiles, max_wide_tiles: wide_tiles, .. } = *self;
        BatchBounds { num_tokens, small_tiles, wide_tiles, table_rank }
    }

    /// Address of the tokens that have a slot, `i32`, sorted by slot and in any order within a slot. Their number is
    /// the last element of [`indptr`](Self::indptr).
    pub fn tokens(&self) -> u64 {
        self.routing.tokens as u64
    }

    /// Address of the offset of each slot's tokens in [`tokens`](Self::tokens), `i32 [num_slots + 1]`.
    #[doc(alias = "seg_indptr")]
    #[doc(alias = "lora_token_start_loc")]
    pub fn indptr(&self) -> u64 {
        self.routing.indptr as u64
    }
}
