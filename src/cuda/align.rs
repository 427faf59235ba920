#![expect(unsafe_code, reason = "calls the raw API")]

use std::marker::PhantomData;

use cudarc::driver::CudaView;

use super::{LaunchError, Queue, RoutedBatch, TopK, raw, region::Region};
use crate::plan::AlignCapacity;

/// Aligns a layer's routes to blocks of one slot and one expert on the device, as
/// [`routing::AlignedRoutes`](crate::routing::AlignedRoutes) does on the host. Layers may share an alignment; each updates it.
#[derive(Debug)]
#[doc(alias = "moe_align_block_size")]
pub struct Alignment {
    raw: raw::Alignment,
    memory: Region<i32>,
}

/// The result of the last update of an [`Alignment`], for the engine's own kernels on any stream. Borrows the alignment, so that it
/// cannot be updated meanwhile, and the routing, so that no other batch takes the place of the aligned one.
#[derive(Debug)]
pub struct AlignedRoutes<'g, 's> {
    raw: raw::AlignedRoutes,
    memory: &'g Region<i32>,
    batch: PhantomData<RoutedBatch<'s>>,
}

impl Alignment {
    /// Allocates device memory for routes within `capacity`.
    ///
    /// # Errors
    /// [`LaunchError`] if a bound of the capacity is invalid, or device memory is exhausted.
    pub fn new(queue: &Queue, capacity: AlignCapacity) -> Result<Self, LaunchError> {
        let memory = Region::new(queue, raw::Alignment::device_bytes(capacity)?)?;
        // SAFETY: the memory is zero. This type owns it while it lives, writes it on one stream only, and frees it in that stream's
        // order.
        let raw = unsafe { raw::Alignment::new(queue.kernels(), capacity, memory.region()) }?;
        Ok(Self { raw, memory })
    }

    /// Enqueues the kernel that aligns the routes of `batch`. It does not read the router's weights. Neither allocates nor waits.
    ///
    /// # Errors
    /// [`LaunchError`] if `top_k` and `batch` differ in their number of tokens or exceed the capacity, an operand belongs to
    /// another context or stream, or the stream is being captured. Nothing was enqueued.
    pub fn update<'g, 's>(
        &'g mut self,
        batch: &RoutedBatch<'s>,
        top_k: &TopK<'_>,
    ) -> Result<AlignedRoutes<'g, 's>, LaunchError> {
        let queue = self.memory.queue().clone();
        queue.check("the batch", batch.queue())?;
        top_k.check_tokens(batch.num_tokens())?;
        top_k.check_queue(&queue)?;
        let _entered = queue.enter()?;
        let raw = {
            let (top_k, _guards) = top_k.on(&queue);
            let _memory_guard = self.memory.written();
            // SAFETY: the operands have a value for each route. The guards order their uses, and the reads of the memory on other
            // streams. The memory and the batch belong to this stream.
            unsafe { self.raw.align(batch.raw, top_k, queue.raw()) }?
        };
        Ok(AlignedRoutes { raw, memory: &self.memory, batch: PhantomData })
    }
}

impl AlignedRoutes<'_, '_> {
    /// Route numbers of all blocks, `[max_padded]`. The first [`num_padded`](Self::num_padded) are set; padding is `tokens *
    /// top_k`.
    #[doc(alias = "sorted_token_ids")]
    pub fn routes(&self) -> CudaView<'_, i32> {
        self.memory.view(self.raw.routes(), self.raw.max_padded())
    }

    /// `slot * num_experts + expert` of each block, `[max_blocks]`; -1 after the last block.
    #[doc(alias = "expert_ids")]
    pub fn block_experts(&self) -> CudaView<'_, i32> {
        self.memory.view(self.raw.block_experts(), self.raw.max_blocks())
    }

    /// The slot of each block, `[max_blocks]`; -1 after the last block.
    pub fn block_slots(&self) -> CudaView<'_, i32> {
        self.memory.view(self.raw.block_slots(), self.raw.max_blocks())
    }

    /// The number of routes in all blocks, including padding: `[1]`.
    #[doc(alias = "num_tokens_post_padded")]
    pub fn num_padded(&self) -> CudaView<'_, i32> {
        self.memory.view(self.raw.num_padded(), 1)
    }
}
