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

/// Aligns a layer's routes to blocks of one slot and one expert, in device memory of the engine, as
/// [`routing::AlignedRoutes`](crate::routing::AlignedRoutes) does on the host. Layers may share an alignment, one after the other.
#[derive(Debug)]
pub struct Alignment {
    kernels: Kernels,
    /// The result for a full batch.
    most: AlignedRoutes,
}

/// Addresses of aligned routes.
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

/// The result for a full batch in memory at `start`, and the number of bytes it takes.
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
    /// Device memory that [`new`](Self::new) needs, in bytes.
    ///
    /// # Errors
    /// [`LaunchError::Plan`] if a bound of the capacity is invalid.
    pub fn device_bytes(capacity: AlignCapacity) -> Result<usize, LaunchError> {
        Ok(lay_out(capacity.checked()?, 0).1)
    }

    /// An alignment in `memory`, which must be aligned to 256 bytes.
    ///
    /// # Errors
    /// [`LaunchError`] if a bound of the capacity is invalid, or `memory` is too small or misaligned.
    ///
    /// # Safety
    /// - **Validity.** `memory` is device memory of the kernels' context, and all of it is zero.
    /// - **Liveness.** It stays mapped while the alignment or its results are in use, and until the work has run.
    /// - **Aliasing.** Nothing else writes it.
    pub unsafe fn new(kernels: &Kernels, capacity: AlignCapacity, memory: DeviceRegion) -> Result<Self, LaunchError> {
        let (most, bytes) = lay_out(capacity.checked()?, memory.ptr);
        memory.check_room("the alignment's memory", bytes)?;
        Ok(Self { kernels: kernels.clone(), most })
    }

    /// Enqueues the kernel that aligns the routes of `batch`. It does not read the router's weights. Neither allocates nor waits.
    /// May be captured in a CUDA graph.
    ///
    /// # Errors
    /// [`OperandError::Capacity`](crate::error::OperandError::Capacity) if the batch or `top_k` exceeds the capacity. Nothing was enqueued.
    ///
    /// # Safety
    /// - **Validity.** The addresses of `top_k` have one element per route of the batch. `stream` belongs to the kernels' context.
    /// - **Liveness.** That memory stays mapped until the work has run.
    /// - **Aliasing.** Until then, only work ordered by `stream` writes it. Uses of the result are ordered by `stream`, too.
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
    /// Address of the route numbers of all blocks, `i32 [max_padded]`. The first [`num_padded`](Self::num_padded) are set; padding
    /// is `tokens * top_k`.
    #[doc(alias = "sorted_token_ids")]
    pub const fn routes(&self) -> u64 {
        self.routes
    }

    /// Address of `slot * num_experts + expert` of each block, `i32 [max_blocks]`; -1 after the last block.
    #[doc(alias = "expert_ids")]
    pub const fn block_experts(&self) -> u64 {
        self.block_experts
    }

    /// Address of the slot of each block, `i32 [max_blocks]`; -1 after the last block.
    pub const fn block_slots(&self) -> u64 {
        self.block_slots
    }

    /// Address of the number of routes in all blocks, including padding, `i32 [1]`.
    #[doc(alias = "num_tokens_post_padded")]
    pub const fn num_padded(&self) -> u64 {
        self.num_padded
    }

    /// The largest number of blocks in the step, which is the grid size for a GEMM.
    pub fn max_blocks(&self) -> usize {
        self.capacity.max_blocks()
    }

    /// The largest number of routes in all blocks, including padding.
    pub fn max_padded(&self) -> usize {
        self.capacity.max_padded()
    }
}
