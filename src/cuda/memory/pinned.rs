//! Page-locked memory of the host.

#![expect(unsafe_code, reason = "the driver's pinned memory and events")]

use std::{
    fmt,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::{CudaContext, CudaEvent, result, sys};

use crate::{
    arena::copies::{Copies, CopyStream, Lent},
    cuda::{
        LaunchError, Queue,
        raw::Stream,
        stream::{OwnStream, Relaxed},
    },
    error::OperandError,
    sizes::MAX_BYTES,
};

/// Page-locked host memory, and the event of its last use by the device. It may be made, used and dropped while streams
/// are captured, unless the use is on one of them. Any thread may drop it.
#[derive(Debug)]
pub(in crate::cuda) struct Pinned {
    /// Of the memory and the event.
    context: sys::CUcontext,
    ptr: *mut u8,
    len: usize,
    event: sys::CUevent,
}

// SAFETY: it holds memory and an event that nothing else owns.
unsafe impl Send for Pinned {}
// SAFETY: a shared reference only queries the event.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates zeroed memory in the thread's current context.
    pub(in crate::cuda) fn new(len: usize) -> Result<Self, LaunchError> {
        let context = result::ctx::get_current()?.ok_or(LaunchError::WrongContext { operand: "the thread" })?;
        let _relaxed = Relaxed::new();
        // SAFETY: a context is current.
        let ptr: *mut u8 = unsafe { result::malloc_host(len.max(1), 0) }?.cast();
        // SAFETY: just allocated with this length.
        unsafe { ptr.write_bytes(0, len) };
        match result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING) {
            Ok(event) => Ok(Self { context, ptr, len, event }),
            Err(error) => {
                // SAFETY: allocated above and unused.
                unsafe { result::free_host(ptr.cast()) }?;
                Err(error.into())
            }
        }
    }

    /// Whether the last use has finished.
    pub(in crate::cuda) fn is_free(&self) -> Result<bool, LaunchError> {
        let _relaxed = Relaxed::new();
        // SAFETY: the event is alive; one that was never recorded counts as complete.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Blocks this thread until the last use has finished.
    pub(in crate::cuda) fn wait(&self) -> Result<(), LaunchError> {
        let _relaxed = Relaxed::new();
        // SAFETY: the event is alive.
        Ok(unsafe { result::event::synchronize(self.event) }?)
    }

    /// The memory, if the last use has finished.
    pub(in crate::cuda) fn try_bytes(&mut self) -> Result<Option<&mut [u8]>, LaunchError> {
        // SAFETY: nothing reads it.
        Ok(if self.is_free()? { Some(unsafe { self.bytes() }) } else { None })
    }

    /// Blocks this thread until the last use has finished, and returns the memory.
    pub(in crate::cuda) fn wait_bytes(&mut self) -> Result<&mut [u8], LaunchError> {
        self.wait()?;
        // SAFETY: nothing reads it.
        Ok(unsafe { self.bytes() })
    }

    /// # Safety
    /// The last use has finished.
    unsafe fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: initialized at creation and owned by this type. The caller vouches that nothing reads it.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }

    /// Takes note that work which was enqueued on the stream reads the memory.
    ///
    /// # Safety
    /// The stream belongs to the thread's current context.
    pub(in crate::cuda) unsafe fn in_use(&mut self, stream: Stream) -> Result<(), LaunchError> {
        Using(stream.as_raw().cast()).end(&self.event)
    }

    /// Enqueues a copy of the first `len` bytes.
    ///
    /// # Safety
    /// `to` is the address of `len` bytes of device memory that stay mapped until the copy has run and that other work
    /// uses only in stream order. The stream belongs to the thread's current context.
    pub(in crate::cuda) unsafe fn copy_to(&mut self, to: u64, len: usize, stream: Stream) -> Result<(), LaunchError> {
        let stream = stream.as_raw().cast();
        // SAFETY: initialized, and at least this long.
        let bytes = unsafe { std::slice::from_raw_parts(self.ptr, len.min(self.len)) };
        // SAFETY: the caller vouches for the address and the stream. Nothing accesses the memory before the event.
        unsafe { result::memcpy_htod_async(to, bytes, stream) }?;
        Using(stream).end(&self.event)
    }

    /// Enqueues a copy to the first `len` bytes.
    ///
    /// # Safety
    /// As for [`copy_to`](Self::copy_to), of what is copied from.
    pub(in crate::cuda) unsafe fn copy_from(
        &mut self,
        from: u64,
        len: usize,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        let stream = stream.as_raw().cast();
        // SAFETY: initialized and at least this long. Nothing reads it before the event.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.ptr, len.min(self.len)) };
        // SAFETY: the caller vouches for the address and the stream. Nothing accesses the memory before the event.
        unsafe { result::memcpy_dtoh_async(bytes, from, stream) }?;
        Using(stream).end(&self.event)
    }
}

/// The stream of a use that has just been enqueued. It is alive, and belongs to the thread's current context.
struct Using(sys::CUstream);

impl CopyStream for Using {
    type Event = sys::CUevent;
    type Error = LaunchError;

    fn record(&self, event: &sys::CUevent) -> Result<(), LaunchError> {
        // SAFETY: the stream is alive, and so is the event of the memory.
        Ok(unsafe { result::event::record(*event, self.0) }?)
    }

    fn synchronize(&self) -> Result<(), LaunchError> {
        // SAFETY: the stream is alive.
        Ok(unsafe { result::stream::synchronize(self.0) }?)
    }
}

impl Drop for Pinned {
    /// Waits for the last use.
    fn drop(&mut self) {
        // The thread may have no context, or another one. On an error the context is gone, and with it the copy and the
        // memory. SAFETY: the context was current when the memory was allocated. One that is gone is an error.
        if unsafe { sys::cuCtxPushCurrent_v2(self.context) }.result().is_err() {
            return;
        }
        let _ = self.wait();
        let _relaxed = Relaxed::new();
        // SAFETY: the last copy is done.
        let _ = unsafe { result::free_host(self.ptr.cast()) };
        // SAFETY: nothing else has the event.
        let _ = unsafe { result::event::destroy(self.event) };
        let mut context = std::ptr::null_mut();
        // SAFETY: the pointer is valid for the call, which writes the context that was pushed above.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut context) };
    }
}

/// Page-locked host memory, whose [parts](HostPart) different threads write and the device reads.
pub(crate) struct HostArena {
    context: Arc<CudaContext>,
    ptr: *mut u8,
    len: usize,
    lent: Lent,
    /// Parts that nobody has, and whose last copies may not have run.
    copied: Mutex<Vec<(Range<usize>, Arc<CudaEvent>)>>,
}

// SAFETY: it holds memory that nothing else owns.
unsafe impl Send for HostArena {}
// SAFETY: its memory is accessed through parts alone, which do not overlap.
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
        Ok(Self {
            context: Arc::clone(queue.stream().context()),
            ptr,
            len,
            lent: Lent::default(),
            copied: Mutex::default(),
        })
    }

    /// Lends a part of the memory, of some bytes. Blocks this thread until the last copies of those who had it have
    /// run. Returns `None` if somebody has some of it.
    pub(in crate::cuda) fn lend(self: &Arc<Self>, range: Range<usize>) -> Option<HostPart> {
        self.reclaim(&range);
        let is_lent = !range.is_empty() && range.end <= self.len && self.lent.lend(&range);
        is_lent.then(|| HostPart { arena: Arc::clone(self), range, copied: None })
    }

    /// Takes back the parts whose copies have run, after those of this range.
    fn reclaim(&self, range: &Range<usize>) {
        let _relaxed = Relaxed::new();
        self.copied().retain(|(part, copied)| {
            let is_wanted = part.start < range.end && range.start < part.end;
            if is_wanted {
                // On an error the context is gone, and with it the copy.
                let _ = copied.synchronize();
            }
            let is_busy = !is_wanted && !copied.is_complete();
            if !is_busy {
                self.lent.give_back(part);
            }
            is_busy
        });
    }

    fn copied(&self) -> MutexGuard<'_, Vec<(Range<usize>, Arc<CudaEvent>)>> {
        // A panic cannot leave the list half-changed.
        self.copied.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A part of page-locked memory that nobody else has. After its drop, nobody gets it before the last copy has run.
#[derive(Debug)]
pub(in crate::cuda) struct HostPart {
    arena: Arc<HostArena>,
    range: Range<usize>,
    /// The end of the last copy from the part.
    copied: Option<Arc<CudaEvent>>,
}

impl HostPart {
    /// Blocks this thread until the last copy has run, and returns the memory.
    pub(in crate::cuda) fn bytes(&mut self) -> &mut [u8] {
        self.wait();
        // SAFETY: the part is in the allocation.
        let start = unsafe { self.arena.ptr.add(self.range.start) };
        // SAFETY: the memory is initialized and lives as long as the arena. No other part overlaps this one, and no
        // copy reads it.
        unsafe { std::slice::from_raw_parts_mut(start, self.range.len()) }
    }

    /// Takes note of copies of the memory that end with this event.
    pub(in crate::cuda) fn is_copied_until(&mut self, copied: &Arc<CudaEvent>) {
        self.copied = Some(Arc::clone(copied));
    }

    /// Enqueues a copy of the first `len` bytes to the device, as the last of these copies. Returns their end.
    ///
    /// # Safety
    /// `to` is the address of as many bytes of device memory, which other work uses only if it is ordered against the
    /// stream. The stream belongs to the thread's current context.
    pub(in crate::cuda) unsafe fn copy_to(
        &mut self,
        len: usize,
        to: u64,
        mut copies: Copies<OwnStream>,
    ) -> Result<Arc<CudaEvent>, LaunchError> {
        OperandError::within("the bytes to copy", len, self.range.len())?;
        let stream = copies.stream().raw().as_raw().cast();
        // SAFETY: the caller's obligations. The memory is not written or given back before the end of the copies.
        unsafe { result::memcpy_htod_async(to, &self.bytes()[..len], stream) }?;
        self.is_copied_until(copies.end_event());
        copies.end()?;
        Ok(Arc::clone(copies.end_event()))
    }

    fn wait(&mut self) {
        if let Some(copied) = self.copied.take() {
            let _relaxed = Relaxed::new();
            // On an error the context is gone, and with it the copy.
            let _ = copied.synchronize();
        }
    }
}

impl Drop for HostPart {
    fn drop(&mut self) {
        let _relaxed = Relaxed::new();
        match self.copied.take().filter(|copied| !copied.is_complete()) {
            Some(copied) => self.arena.copied().push((self.range.clone(), copied)),
            None => self.arena.lent.give_back(&self.range),
        }
    }
}

impl Drop for HostArena {
    /// All parts are gone.
    fn drop(&mut self) {
        self.reclaim(&(0..self.len));
        // On an error the context is gone, and with it the memory.
        let _ = self.context.bind_to_thread();
        let _relaxed = Relaxed::new();
        // SAFETY: allocated by `new`. No copy reads it.
        let _ = unsafe { result::free_host(self.ptr.cast()) };
    }
}
