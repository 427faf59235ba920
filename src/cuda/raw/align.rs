use super::{
    abi::int,
    memory::{Arrays, DeviceRegion, Stream},
    routing::RoutedBatch,
    top_k::TopK,
};
use crate::{
    cuda::{Kernels, kernels::check},
    error::LaunchError,
    ffi,
    plan::{AlignCapacity, RouteCapacity},
};

/// A layer's routes in blocks of one slot and one expert each, in the engine's device memory:
/// [`routing::AlignedRoutes`](crate::routing::AlignedRoutes) says what for. Any number of layers may share one, one after the other.
#[derive(Debug)]
pub struct Alignment {
    kernels: Kernels,
    /// As many as there is room for.
    most: AlignedRoutes,
}

/// Where the routes of a step are on the device, in blocks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct AlignedRoutes {
    capacity: AlignCapacity,
    routes: u64,
    block_experts: u64,
    block_slots: u64,
    num_padded: u64,
    places: u64,
    mailbox: u64,
}

/// As many as there is room for, in the memory at `start`, and the bytes of their arrays.
fn lay_out(capacity: AlignCapacity, start: u64) -> (AlignedRoutes, usize) {
    let mut arrays = Arrays::at(start);
    let counts = capacity.routes.num_experts.next_multiple_of(2) * ffi::ARIL_WORD_BYTES as usize;
    let routes = AlignedRoutes {
        capacity,
        routes: arrays.push::<i32>(capacity.max_padded()),
        block_experts: arrays.push::<i32>(capacity.max_blocks()),
        block_slots: arrays.push::<i32>(capacity.max_blocks()),
        num_padded: arrays.push::<i32>(1),
        places: arrays.push::<i32>(capacity.routes.max_routes()),
        mailbox: arrays.push::<u8>(ffi::ARIL_MAILBOX_HEADER as usize + counts),
    };
    (routes, arrays.bytes())
}

impl Alignment {
    /// The device memory that [`new`](Self::new) needs.
    ///
    /// # Errors
    /// If the capacity is past the kernels' limits.
    pub fn device_bytes(capacity: AlignCapacity) -> Result<usize, LaunchError> {
        Ok(lay_out(capacity.checked()?, 0).1)
    }

    /// Takes `memory`, aligned to 256 bytes.
    ///
    /// # Errors
    /// If the capacity is past the kernels' limits, or `memory` is too small or misaligned.
    ///
    /// # Safety
    /// - **Validity.** `memory` addresses device memory of the kernels' context for its whole extent, all of it zero.
    /// - **Liveness.** That memory stays mapped for as long as this or any routes of it are used, and until the work has run.
    /// - **Aliasing.** Nobody else writes it.
    pub unsafe fn new(kernels: &Kernels, capacity: AlignCapacity, memory: DeviceRegion) -> Result<Self, LaunchError> {
        let (most, bytes) = lay_out(capacity.checked()?, memory.ptr);
        memory.check_room("the alignment's memory", bytes)?;
        Ok(Self { kernels: kernels.clone(), most })
    }

    /// Enqueues one kernel, which puts what a layer's router chose for the tokens of `batch` in blocks. The router's weights are not
    /// read. Allocates nothing, waits for nothing, and may be captured in a CUDA graph.
    ///
    /// # Errors
    /// `Capacity` if there are more tokens or experts for each than it was made for; then nothing was enqueued.
    ///
    /// # Safety
    /// - **Validity.** `top_k` addresses a value for each route of the batch's tokens, and `stream` is a stream of the kernels'
    ///   context.
    /// - **Liveness.** They stay mapped until the work has run.
    /// - **Aliasing.** Nobody writes them meanwhile, except work ordered by `stream`, which also orders all that uses the result.
    pub unsafe fn align(
        &mut self,
        batch: RoutedBatch,
        top_k: TopK,
        stream: Stream,
    ) -> Result<AlignedRoutes, LaunchError> {
        self.kernels.check_thread()?;
        let AlignCapacity { routes, num_slots, block_size } = self.most.capacity;
        let raw = top_k.expect(batch, routes)?;
        let step = RouteCapacity { max_tokens: batch.num_tokens, top_k: top_k.top_k, ..routes };
        let aligned = AlignedRoutes { capacity: AlignCapacity { routes: step, num_slots, block_size }, ..self.most };
        let args = ffi::aril_align_args {
            num_tokens: int(batch.num_tokens)?,
            num_slots: int(num_slots)?,
            block_size: int(block_size)?,
            max_blocks: int(aligned.max_blocks())?,
            top_k: raw,
            routing: batch.routing,
            sorted_routes: aligned.routes() as *mut i32,
            block_experts: aligned.block_experts() as *mut i32,
            block_slots: aligned.block_slots() as *mut i32,
            num_padded: aligned.num_padded() as *mut i32,
            places: aligned.places as *mut i32,
            mailbox: aligned.mailbox as *mut std::ffi::c_void,
        };
        // SAFETY: the memory is laid out for the capacity; the caller vouches for the rest.
        check(unsafe { ffi::aril_align(&args, stream.as_raw()) })?;
        Ok(aligned)
    }
}

impl AlignedRoutes {
    /// The address of the routes of each block, one block after the other: `i32 [max_padded]`, of which as many are set as
    /// [`num_padded`](Self::num_padded) says. Padding is the number of all routes, `tokens * top_k`.
    #[doc(alias = "sorted_token_ids")]
    pub const fn routes(&self) -> u64 {
        self.routes
    }

    /// The address of each block's `slot * num_experts + expert`, `i32 [max_blocks]`; -1 behind the last.
    #[doc(alias = "expert_ids")]
    pub const fn block_experts(&self) -> u64 {
        self.block_experts
    }

    /// The address of each block's slot, `i32 [max_blocks]`; -1 behind the last.
    pub const fn block_slots(&self) -> u64 {
        self.block_slots
    }

    /// The address of the number of routes of all blocks, padding among them: one `i32`.
    #[doc(alias = "num_tokens_post_padded")]
    pub const fn num_padded(&self) -> u64 {
        self.num_padded
    }

    /// The most blocks that the step can have: what a GEMM's grid is to be for.
    pub fn max_blocks(&self) -> usize {
        self.capacity.max_blocks()
    }

    /// The most routes of these.
    pub fn max_padded(&self) -> usize {
        self.capacity.max_padded()
    }
}
