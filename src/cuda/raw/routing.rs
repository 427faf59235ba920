use cudarc::driver::sys;

use super::{DeviceRegion, Parts, Stream, int, within};
use crate::{
    Slot,
    cuda::{Kernels, LaunchError, kernels::check, pinned::Pinned},
    ffi,
    plan::Capacity,
    routing::Batch,
};

/// A step's routing in the engine's device memory, and the pinned buffers that bring it there.
///
/// Built once per step for all layers. Its addresses never change, so a captured graph follows whatever was routed last.
#[derive(Debug)]
pub struct Routing {
    kernels: Kernels,
    capacity: Capacity,
    /// `[max_tokens]` slots and, behind the live ones, as many scales.
    staged: u64,
    routing: ffi::aril_routing,
    staging: Vec<Pinned>,
    next: usize,
}

// SAFETY: device addresses, and pinned memory and events that this type alone owns.
unsafe impl Send for Routing {}
// SAFETY: nothing changes behind a shared reference.
unsafe impl Sync for Routing {}

/// Where things are in a routing's memory, in bytes.
struct Layout {
    staged: usize,
    tokens: usize,
    scales: usize,
    slots: usize,
    num_tokens: usize,
    indptr: usize,
    tiles: usize,
    num_tiles: usize,
    wide_tiles: usize,
    num_wide_tiles: usize,
    end: usize,
}

impl Layout {
    fn new(capacity: Capacity) -> Self {
        let mut parts = Parts(0);
        let mut part = |bytes| parts.push(bytes);
        let Capacity { max_tokens, num_slots, .. } = capacity;
        let (tiles, wide_tiles) = (capacity.max_small_tiles(max_tokens), capacity.max_wide_tiles(max_tokens));
        Self {
            staged: part(staging_bytes(capacity)),
            tokens: part(max_tokens * size_of::<i32>()),
            scales: part(max_tokens * size_of::<f32>()),
            slots: part(max_tokens * size_of::<i32>()),
            num_tokens: part(size_of::<i32>()),
            indptr: part((num_slots + 1) * size_of::<i32>()),
            tiles: part(tiles * size_of::<ffi::aril_tile>()),
            num_tiles: part(size_of::<i32>()),
            wide_tiles: part(wide_tiles * size_of::<ffi::aril_tile>()),
            num_wide_tiles: part(size_of::<i32>()),
            end: parts.0,
        }
    }
}

fn staging_bytes(capacity: Capacity) -> usize {
    capacity.max_tokens * (size_of::<Slot>() + size_of::<f32>())
}

impl Routing {
    /// The device memory that [`new`](Self::new) needs.
    ///
    /// # Errors
    /// If the capacity is past the kernels' limits.
    pub fn device_bytes(capacity: Capacity) -> Result<usize, LaunchError> {
        Ok(Layout::new(capacity.checked()?).end)
    }

    /// Takes `memory`, aligned to 256 bytes, and allocates `steps_in_flight` pinned host buffers: as many steps as the host may
    /// run ahead of the device. Nothing is routed until [`update`](Self::update) is.
    ///
    /// # Errors
    /// If the capacity is past the kernels' limits, `memory` is too small or misaligned, or there is no pinned memory left.
    ///
    /// # Safety
    /// - **Validity.** `memory` addresses device memory of the kernels' context for its whole extent.
    /// - **Liveness.** That memory stays mapped for as long as this or any batch of it is used, and until the work has run.
    /// - **Aliasing.** Nobody else writes it.
    pub unsafe fn new(
        kernels: &Kernels,
        capacity: Capacity,
        steps_in_flight: usize,
        memory: DeviceRegion,
    ) -> Result<Self, LaunchError> {
        kernels.check_thread()?;
        let layout = Layout::new(capacity.checked()?);
        memory.check_parts("the routing's memory", layout.end)?;
        let at = |offset: usize| memory.ptr + offset as u64;
        let tiles = |all, count| ffi::aril_tiles { all: at(all) as *mut ffi::aril_tile, count: at(count) as *mut i32 };
        let routing = ffi::aril_routing {
            tokens: at(layout.tokens) as *mut i32,
            scales: at(layout.scales) as *mut f32,
            slots: at(layout.slots) as *mut i32,
            num_tokens: at(layout.num_tokens) as *mut i32,
            indptr: at(layout.indptr) as *mut i32,
            tiles: tiles(layout.tiles, layout.num_tiles),
            wide_tiles: tiles(layout.wide_tiles, layout.num_wide_tiles),
        };
        let staging = (0..steps_in_flight.max(1))
            .map(|_| Pinned::new(staging_bytes(capacity), sys::CU_MEMHOSTALLOC_WRITECOMBINED));
        let staging = staging.collect::<Result<_, _>>()?;
        Ok(Self { kernels: kernels.clone(), capacity, staged: at(layout.staged), routing, staging, next: 0 })
    }

    /// Enqueues one host-to-device copy and the grouping kernel.
    ///
    /// # Errors
    /// `Busy` if `steps_in_flight` copies are pending: it never waits. `Capacity` if the batch is too large. Nothing was enqueued.
    ///
    /// # Safety
    /// - **Validity.** `stream` is a stream of the kernels' context, and not capturing.
    /// - **Aliasing.** Work of other streams that uses a batch of this is ordered against `stream`.
    pub unsafe fn update(&mut self, batch: &Batch<'_>, stream: Stream) -> Result<RoutedBatch, LaunchError> {
        let routed = self.capture_batch(batch.num_tokens())?;
        self.kernels.check_thread()?;
        let steps_in_flight = self.staging.len();
        let staging = &mut self.staging[self.next];
        let Some(buffer) = staging.try_bytes()? else { return Err(LaunchError::Busy { steps_in_flight }) };
        let slots: &[u8] = bytemuck::cast_slice(batch.slots());
        let scales: &[u8] = bytemuck::cast_slice(batch.scales().unwrap_or_default());
        let len = slots.len() + scales.len();
        buffer[..slots.len()].copy_from_slice(slots);
        buffer[slots.len()..len].copy_from_slice(scales);
        // SAFETY: `staged` has room for as many bytes as the staging buffer; the caller vouches for the stream.
        unsafe { staging.copy_to(self.staged, len, stream) }?;
        self.next = (self.next + 1) % steps_in_flight;

        let scales = self.staged + (batch.num_tokens() * size_of::<Slot>()) as u64;
        let token_scales = batch.scales().map_or(std::ptr::null(), |_| scales as *const f32);
        // SAFETY: both lie in this routing's memory.
        unsafe { self.route(self.staged as *const i32, token_scales, batch.num_tokens(), stream) }?;
        Ok(routed)
    }

    /// Whether [`update`](Self::update) has a free staging buffer now.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn is_ready(&self) -> Result<bool, LaunchError> {
        self.staging[self.next].is_free()
    }

    /// Blocks this thread until [`update`](Self::update) has a free staging buffer: until the copy of the step that is
    /// `steps_in_flight` before the next one is done.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn wait(&self) -> Result<(), LaunchError> {
        self.staging[self.next].wait()
    }

    /// As [`update`](Self::update), for slots (`i32`, one per token) and, if not null, scales (`f32`, likewise) that are on the
    /// device already. May be captured.
    ///
    /// # Errors
    /// `Capacity` if the batch is too large; then nothing was enqueued.
    ///
    /// # Safety
    /// - **Validity.** `token_slots` and `token_scales` address `num_tokens` values each, and `stream` is a stream of the
    ///   kernels' context.
    /// - **Liveness.** They stay mapped until the work has run.
    /// - **Aliasing.** Nobody writes them meanwhile, except work ordered by `stream`, which also orders all that uses a batch of
    ///   this routing.
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

    /// The batch to capture a CUDA graph of up to `num_tokens` rows with: the same addresses, upper bounds for counts. Rows that
    /// the last update before a replay did not have, or had as base, are left alone by the replay.
    ///
    /// # Errors
    /// `Capacity` if it is too large.
    pub fn capture_batch(&self, num_tokens: usize) -> Result<RoutedBatch, LaunchError> {
        within("the batch's tokens", num_tokens, self.capacity.max_tokens)?;
        let max_tiles = self.capacity.max_tiles(num_tokens);
        let max_small_tiles = self.capacity.max_small_tiles(num_tokens);
        Ok(RoutedBatch { routing: self.routing, num_tokens, max_tiles, max_small_tiles })
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

/// A routed batch: where its grouping is on the device, and upper bounds for its counts.
#[derive(Clone, Copy, Debug)]
pub struct RoutedBatch {
    pub(super) routing: ffi::aril_routing,
    pub(super) num_tokens: usize,
    pub(super) max_tiles: usize,
    pub(super) max_small_tiles: usize,
}

// SAFETY: device addresses, which are data.
unsafe impl Send for RoutedBatch {}
// SAFETY: as above.
unsafe impl Sync for RoutedBatch {}

impl RoutedBatch {
    /// Rows of the matrices that it is for.
    pub const fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// The address of the tokens that have a slot, by slot and, within one, in any order: `i32`, as many as `indptr` ends with.
    pub fn tokens(&self) -> u64 {
        self.routing.tokens as u64
    }

    /// The address of where each slot's tokens begin in [`tokens`](Self::tokens), and where the last slot's end: `i32
    /// [num_slots + 1]`.
    #[doc(alias = "seg_indptr")]
    #[doc(alias = "lora_token_start_loc")]
    pub fn indptr(&self) -> u64 {
        self.routing.indptr as u64
    }
}
