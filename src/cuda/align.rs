#![expect(unsafe_code, reason = "calls the raw door")]

use cudarc::driver::CudaView;

use super::{LaunchError, Queue, RoutedBatch, TopK, raw, region::Region};
use crate::plan::AlignCapacity;

/// A layer's routes in blocks of one slot and one expert each, on the device:
/// [`routing::AlignedRoutes`](crate::routing::AlignedRoutes) says what for. Layers may share one: each updates it.
#[derive(Debug)]
#[doc(alias = "moe_align_block_size")]
pub struct Alignment {
    raw: raw::Alignment,
    memory: Region<i32>,
}

/// The routes that an [`Alignment`] was last updated with, for the engine's own kernels on any stream. While they live, it cannot be
/// updated again.
#[derive(Debug)]
pub struct AlignedRoutes<'a> {
    raw: raw::AlignedRoutes,
    memory: &'a Region<i32>,
}

impl Alignment {
    /// Allocates what the routes within `capacity` need.
    ///
    /// # Errors
    /// If the capacity is past the kernels' limits, or there is no memory left.
    pub fn new(queue: &Queue, capacity: AlignCapacity) -> Result<Self, LaunchError> {
        let memory = Region::new(queue, raw::Alignment::device_bytes(capacity)?)?;
        // SAFETY: the memory is zero, this type's own for as long as it lives, and written on its stream alone, in whose order it is
        // freed.
        let raw = unsafe { raw::Alignment::new(queue.kernels(), capacity, memory.region()) }?;
        Ok(Self { raw, memory })
    }

    /// Enqueues the kernel that puts what a layer's router chose for the tokens of `batch` in blocks. The router's weights are not
    /// read. Allocates nothing and waits for nothing.
    ///
    /// # Errors
    /// If the router chose for other tokens than the batch has, or for more than there is room for, or the queue's stream is being captured.
    /// Nothing was enqueued.
    pub fn update(&mut self, batch: &RoutedBatch<'_>, top_k: &TopK<'_>) -> Result<AlignedRoutes<'_>, LaunchError> {
        let queue = self.memory.queue().clone();
        queue.check("the batch", batch.queue())?;
        top_k.check_tokens(batch.num_tokens())?;
        top_k.check_queue(&queue)?;
        queue.enter()?;
        let raw = {
            let (top_k, _guards) = top_k.on(&queue);
            let _memory_guard = self.memory.written();
            // SAFETY: there is a value for each route, and the guards order them, and what reads the memory elsewhere; the stream is
            // the memory's and the batch's own.
            unsafe { self.raw.align(batch.raw, top_k, queue.raw()) }?
        };
        Ok(AlignedRoutes { raw, memory: &self.memory })
    }
}

impl AlignedRoutes<'_> {
    /// The routes of each block, one block after the other: `[max_padded]`, of which as many are set as
    /// [`num_padded`](Self::num_padded) says. Padding is the number of all routes, `tokens * top_k`.
    #[doc(alias = "sorted_token_ids")]
    pub fn routes(&self) -> CudaView<'_, i32> {
        self.memory.view(self.raw.routes(), self.raw.max_padded())
    }

    /// Each block's `slot * num_experts + expert`, `[max_blocks]`; -1 behind the last.
    #[doc(alias = "expert_ids")]
    pub fn block_experts(&self) -> CudaView<'_, i32> {
        self.memory.view(self.raw.block_experts(), self.raw.max_blocks())
    }

    /// Each block's slot, `[max_blocks]`; -1 behind the last.
    pub fn block_slots(&self) -> CudaView<'_, i32> {
        self.memory.view(self.raw.block_slots(), self.raw.max_blocks())
    }

    /// The number of routes of all blocks, padding among them: one.
    #[doc(alias = "num_tokens_post_padded")]
    pub fn num_padded(&self) -> CudaView<'_, i32> {
        self.memory.view(self.raw.num_padded(), 1)
    }
}
