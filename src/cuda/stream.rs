//! Streams: the queues that work is enqueued on, the streams of copies, and driver calls that a stream capture would
//! forbid, or would add to the graph.

#![expect(unsafe_code, reason = "calls the driver, and wraps streams")]

use std::{
    ffi::{c_int, c_uint},
    marker::PhantomData,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, DriverError, result,
    sys::{self, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus, cuThreadExchangeStreamCaptureMode},
};

use crate::{
    arena::copies::CopyStream,
    cuda::{Kernels, LaunchError, raw},
};

/// The handle in CUDA's headers, which cudarc does not name.
const CU_STREAM_PER_THREAD: usize = 2;

/// A CUDA stream and the kernels of its context. Objects created on a queue run on its stream, in order. Clones are the
/// same queue.
#[derive(Clone, Debug)]
pub struct Queue {
    kernels: Kernels,
    stream: Arc<CudaStream>,
}

impl Queue {
    /// The queue of `stream`.
    ///
    /// # Errors
    /// [`LaunchError::WrongContext`] if the kernels were loaded into another context, [`LaunchError::PerThreadStream`]
    /// if the stream is the calling thread's default stream.
    pub fn new(kernels: &Kernels, stream: &Arc<CudaStream>) -> Result<Self, LaunchError> {
        kernels.check_context("the stream", stream.context())?;
        if stream.cu_stream().addr() == CU_STREAM_PER_THREAD {
            return Err(LaunchError::PerThreadStream);
        }
        Ok(Self { kernels: kernels.clone(), stream: Arc::clone(stream) })
    }

    /// The queue of a stream that cudarc does not know: the `CUstream` or `cudaStream_t` of an engine in C++, or of one
    /// with another CUDA crate. The queue never destroys the stream. Two queues of one stream are the same queue.
    ///
    /// # Errors
    /// [`LaunchError::WrongContext`] if the kernels' context is not current on this thread, or is not the primary
    /// context of its device, which is that of the CUDA runtime. [`LaunchError::PerThreadStream`].
    /// [`LaunchError::OldCudarc`] if the program was built with a cudarc before 0.19.10.
    ///
    /// # Safety
    /// - **Validity.** `stream` belongs to the kernels' context.
    /// - **Liveness.** It is not destroyed before every object of the queue has been dropped, each while the stream was
    ///   not being captured, and then all work on the stream has run.
    /// - **Aliasing.** The engine orders the uses of cudarc's slices of other streams that are operands: cudarc's
    ///   events do not.
    pub unsafe fn from_raw(kernels: &Kernels, stream: raw::Stream) -> Result<Self, LaunchError> {
        let context = kernels.primary_context()?;
        let stream: CUstream = stream.as_raw().cast();
        // Names the stand-in with every cudarc, so that none of them makes it dead code.
        let _ = <CudaContext as WrapStream>::wrap_borrowed_stream;
        // SAFETY: the caller's obligations.
        let wrapped = unsafe { context.wrap_borrowed_stream(stream) };
        if wrapped.cu_stream() == stream { Self::new(kernels, &wrapped) } else { Err(LaunchError::OldCudarc) }
    }

    /// The stream.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The kernels of the stream's context.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    pub(in crate::cuda) fn raw(&self) -> raw::Stream {
        raw::Stream::from(&*self.stream)
    }

    /// Makes the context current on this thread.
    pub(in crate::cuda) fn bind(&self) -> Result<(), LaunchError> {
        Ok(self.stream.context().bind_to_thread()?)
    }

    /// Makes the context current on this thread, to enqueue work. Rejects a stream that the engine is capturing,
    /// because its graph could outlive the operands.
    pub(in crate::cuda) fn prepare(&self) -> Result<(), LaunchError> {
        // This also binds the context.
        match self.stream.capture_status()? {
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
            _ => Err(LaunchError::Capturing),
        }
    }

    pub(in crate::cuda) fn new_event(&self) -> Result<CudaEvent, LaunchError> {
        let _relaxed = Relaxed::new();
        Ok(self.stream.context().new_event(None)?)
    }

    /// Rejects an operand of another stream or context.
    pub(in crate::cuda) fn check(&self, operand: &'static str, other: &Self) -> Result<(), LaunchError> {
        self.check_stream(operand, &other.stream)
    }

    /// Rejects another stream, and one of another context.
    pub(in crate::cuda) fn check_stream(&self, operand: &'static str, stream: &CudaStream) -> Result<(), LaunchError> {
        self.kernels.check_context(operand, stream.context())?;
        if self.stream.cu_stream() == stream.cu_stream() { Ok(()) } else { Err(LaunchError::WrongStream { operand }) }
    }
}

/// Stands in for cudarc's method of this name, which versions before 0.19.10 lack. A type's own method takes precedence
/// of a trait's.
trait WrapStream {
    /// Some other stream of the context.
    unsafe fn wrap_borrowed_stream(self: &Arc<Self>, stream: CUstream) -> Arc<CudaStream>;
}

impl WrapStream for CudaContext {
    unsafe fn wrap_borrowed_stream(self: &Arc<Self>, _stream: CUstream) -> Arc<CudaStream> {
        self.default_stream()
    }
}

/// A stream that cudarc does not know, so that it does not turn on multi-stream event tracking in the engine's context.
#[derive(Debug)]
pub(in crate::cuda) struct OwnStream {
    context: Arc<CudaContext>,
    stream: sys::CUstream,
}

// SAFETY: it holds a handle. The driver's calls that take it are thread-safe.
unsafe impl Send for OwnStream {}
// SAFETY: as above.
unsafe impl Sync for OwnStream {}

impl OwnStream {
    /// A stream in the queue's context.
    pub(in crate::cuda) fn new(queue: &Queue) -> Result<Self, LaunchError> {
        Self::with_priority(queue, 0)
    }

    /// A stream in the queue's context that has the priority of the queue's.
    pub(in crate::cuda) fn like(queue: &Queue) -> Result<Self, LaunchError> {
        queue.bind()?;
        let mut priority = 0;
        // SAFETY: the stream is alive, and the pointer is valid for the call.
        unsafe { sys::cuStreamGetPriority(queue.stream().cu_stream(), &raw mut priority) }.result()?;
        Self::with_priority(queue, priority)
    }

    fn with_priority(queue: &Queue, priority: c_int) -> Result<Self, LaunchError> {
        queue.bind()?;
        let _relaxed = Relaxed::new();
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: the context is current, and the pointer is valid for the call.
        unsafe { sys::cuStreamCreateWithPriority(&raw mut stream, flags, priority) }.result()?;
        Ok(Self { context: Arc::clone(queue.stream().context()), stream })
    }

    pub(in crate::cuda) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    pub(in crate::cuda) fn raw(&self) -> raw::Stream {
        raw::Stream::from_raw(self.stream.cast())
    }

    /// Makes later work wait for an event, on the device. The context is current.
    pub(in crate::cuda) fn wait_for(&self, event: &CudaEvent) -> Result<(), LaunchError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the stream and the event are alive.
        Ok(unsafe { result::stream::wait_event(self.stream, event.cu_event(), flags) }?)
    }
}

impl CopyStream for OwnStream {
    type Event = CudaEvent;
    type Error = LaunchError;

    fn record(&self, event: &CudaEvent) -> Result<(), LaunchError> {
        self.context.bind_to_thread()?;
        // SAFETY: the stream and the event are alive.
        Ok(unsafe { result::event::record(event.cu_event(), self.stream) }?)
    }

    fn synchronize(&self) -> Result<(), LaunchError> {
        self.context.bind_to_thread()?;
        let _relaxed = Relaxed::new();
        // SAFETY: the stream is alive.
        Ok(unsafe { result::stream::synchronize(self.stream) }?)
    }
}

/// The stream of an engine.
impl CopyStream for CudaStream {
    type Event = CudaEvent;
    type Error = LaunchError;

    fn record(&self, event: &CudaEvent) -> Result<(), LaunchError> {
        Ok(event.record(self)?)
    }

    fn synchronize(&self) -> Result<(), LaunchError> {
        self.context().bind_to_thread()?;
        let _relaxed = Relaxed::new();
        // SAFETY: the stream is alive.
        Ok(unsafe { result::stream::synchronize(self.cu_stream()) }?)
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        // On an error the context is gone, and with it the stream.
        let _ = self.context.bind_to_thread();
        let _relaxed = Relaxed::new();
        // SAFETY: nothing else has the stream. The driver destroys it once its work is done.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}

/// Allows this thread to allocate, free and query events during any stream capture. Without it, the driver rejects such
/// calls on a capturing thread, and on every thread during a global capture, and the capture fails.
///
/// The calls must not touch a stream that is being captured.
#[must_use]
pub(in crate::cuda) struct Relaxed {
    before: Option<CUstreamCaptureMode>,
    /// The mode belongs to the thread.
    not_send: PhantomData<*const ()>,
}

impl Relaxed {
    pub(in crate::cuda) fn new() -> Self {
        // Without a driver, the calls that follow return the error.
        Self { before: exchange(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).ok(), not_send: PhantomData }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            let _ = exchange(before);
        }
    }
}

/// Sets this thread's capture mode and returns the previous one.
fn exchange(mut mode: CUstreamCaptureMode) -> Result<CUstreamCaptureMode, DriverError> {
    // SAFETY: the pointer is valid for the call, which writes the mode.
    unsafe { cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result()?;
    Ok(mode)
}

/// Memory dropped while its stream was being captured, and its queue. Freeing it then would add the deallocation to the
/// graph.
static POSTPONED: Mutex<Vec<(CudaSlice<u8>, Queue)>> = Mutex::new(Vec::new());

/// Frees memory in stream order, or, while its stream is being captured, at a later call of this function or of
/// [`free_postponed`].
pub(in crate::cuda) fn free(memory: CudaSlice<u8>, queue: &Queue) {
    postponed().push((memory, queue.clone()));
    free_postponed(queue.stream().context());
}

/// Frees postponed memory of a context whose stream is no longer being captured. That of other contexts, which other
/// threads may have current, is left to them.
pub(in crate::cuda) fn free_postponed(context: &Arc<CudaContext>) {
    let of_context: Vec<_> = postponed().extract_if(.., |(_, queue)| queue.stream().context() == context).collect();
    for (memory, queue) in of_context {
        let captured = match queue.prepare() {
            Err(LaunchError::Capturing) => Some(memory),
            prepared => {
                if let Err(LaunchError::Driver(error)) = prepared {
                    // The next call that can return the error returns it.
                    context.record_err::<()>(Err(error));
                }
                let _relaxed = Relaxed::new();
                drop(memory);
                None
            }
        };
        postponed().extend(captured.map(|memory| (memory, queue)));
    }
}

fn postponed() -> MutexGuard<'static, Vec<(CudaSlice<u8>, Queue)>> {
    POSTPONED.lock().unwrap_or_else(PoisonError::into_inner)
}
