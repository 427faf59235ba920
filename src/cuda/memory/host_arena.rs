#![expect(unsafe_code, reason = "the driver's pinned memory")]

use std::{fmt, ops::Range, sync::Arc};

use cudarc::driver::{CudaContext, result};

use crate::{
    cuda::{LaunchError, Queue, raw::Stream, stream::Relaxed},
    error::OperandError,
    extent::MAX_BYTES,
};

/// Page-locked host memory, whose parts different threads write and the device reads.
pub(crate) struct HostArena {
    context: Arc<CudaContext>,
    ptr: *mut u8,
    len: usize,
}

// SAFETY: it holds memory that nothing else owns.
unsafe impl Send for HostArena {}
// SAFETY: its parts are accessed through unsafe methods alone, whose callers keep them apart.
unsafe impl Sync for HostArena {}

impl fmt::Debug for HostArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostArena").field("len", &self.len).finish_non_exhaustive()
    }
}

impl HostArena {
    /// Allocates zeroed memory.
    pub(in crate::cuda) fn new(queue: &Queue, len: usize) -> Result<Self, LaunchError> {
        OperandError::within("the size of page-locked memory in bytes", len, MAX_BYTES)?;
        queue.bind()?;
        let _relaxed = Relaxed::new();
        // SAFETY: the context is current.
        let ptr: *mut u8 = unsafe { result::malloc_host(len.max(1), 0) }?.cast();
        // SAFETY: just allocated with this length.
        unsafe { ptr.write_bytes(0, len) };
        Ok(Self { context: Arc::clone(queue.stream().context()), ptr, len })
    }

    /// A part of the memory.
    ///
    /// # Safety
    /// Neither another thread nor a copy uses the part while the slice exists.
    #[expect(clippy::mut_from_ref, reason = "callers keep the parts apart")]
    pub(in crate::cuda) unsafe fn part(&self, range: Range<usize>) -> &mut [u8] {
        let start = self.address(&range);
        // SAFETY: in the memory, which is initialized. The caller vouches that nothing else uses the part.
        unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
    }

    /// Enqueues a copy of a part to the device.
    ///
    /// # Safety
    /// Nothing writes to the part until the copy has run, and the memory stays allocated. `to` is the address of as many bytes of
    /// device memory, which other work uses only if it is ordered against the stream. The stream belongs to the thread's current
    /// context.
    pub(in crate::cuda) unsafe fn copy_to(
        &self,
        range: Range<usize>,
        to: u64,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        // SAFETY: in the memory, which is initialized. The caller vouches that nothing writes to the part.
        let bytes = unsafe { std::slice::from_raw_parts(self.address(&range), range.len()) };
        // SAFETY: the caller's obligations.
        Ok(unsafe { result::memcpy_htod_async(to, bytes, stream.as_raw().cast()) }?)
    }

    /// The address of a part.
    fn address(&self, range: &Range<usize>) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= self.len, "the part is in the arena");
        // SAFETY: in the allocation.
        unsafe { self.ptr.add(range.start) }
    }
}

impl Drop for HostArena {
    /// The owner has waited for all copies.
    fn drop(&mut self) {
        // On an error the context is gone, and with it the memory.
        let _ = self.context.bind_to_thread();
        let _relaxed = Relaxed::new();
        // SAFETY: allocated by `new`. No copy reads it.
        let _ = unsafe { result::free_host(self.ptr.cast()) };
    }
}
