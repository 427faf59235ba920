use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use cudarc::driver::{
    CudaContext, CudaEvent, CudaStream,
    sys::{CUstream, CUstreamCaptureStatus},
};

use super::Relaxed;
use crate::{
    cuda::{Kernels, LaunchError, raw},
    gate::{Closed, Entered, Gate},
};

/// The handle in CUDA's headers, which cudarc does not name.
const CU_STREAM_PER_THREAD: usize = 2;

/// The gates of streams, by handle.
static GATES: Mutex<Option<HashMap<usize, Weak<Gate>>>> = Mutex::new(None);

/// A CUDA stream and the kernels of its context. Objects created on a queue run on its stream, in order. Clones are the same queue.
#[derive(Clone, Debug)]
pub struct Queue {
    kernels: Kernels,
    stream: Arc<CudaStream>,
    /// All queues of the stream have the same.
    gate: Arc<Gate>,
}

impl Queue {
    /// The queue of `stream`.
    ///
    /// # Errors
    /// [`LaunchError::WrongContext`] if the kernels were loaded into another context, [`LaunchError::PerThreadStream`] if the stream
    /// is the calling thread's default stream.
    pub fn new(kernels: &Kernels, stream: &Arc<CudaStream>) -> Result<Self, LaunchError> {
        kernels.check_context("the stream", stream.context())?;
        if stream.cu_stream().addr() == CU_STREAM_PER_THREAD {
            return Err(LaunchError::PerThreadStream);
        }
        Ok(Self { kernels: kernels.clone(), stream: Arc::clone(stream), gate: gate_of(stream) })
    }

    /// The queue of a stream that cudarc does not know: the `CUstream` or `cudaStream_t` of an engine in C++, or of one with another
    /// CUDA crate. The queue never destroys the stream. Two queues of one stream are the same queue.
    ///
    /// # Errors
    /// [`LaunchError::WrongContext`] if the kernels' context is not current on this thread, or is not the primary context of its
    /// device, which is that of the CUDA runtime. [`LaunchError::PerThreadStream`]. [`LaunchError::OldCudarc`] if the program was built
    /// with a cudarc before 0.19.10.
    ///
    /// # Safety
    /// - **Validity.** `stream` belongs to the kernels' context.
    /// - **Liveness.** It is not destroyed before every object of the queue has been dropped, each while the stream was not being
    ///   captured, and then all work on the stream has run.
    /// - **Aliasing.** The engine orders the uses of cudarc's slices of other streams that are operands: cudarc's events do not.
    #[expect(unsafe_code, reason = "wraps a stream that the caller owns")]
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

    /// Makes the context current on this thread. Rejects a stream that is being captured, because the graph could outlive its
    /// operands. While what it returns is alive, no thread begins a capture: keep it until the work is enqueued.
    pub(in crate::cuda) fn enter(&self) -> Result<Entered<'_>, LaunchError> {
        let entered = self.gate.enter();
        // This also binds the context.
        match self.stream.capture_status()? {
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(entered),
            _ => Err(LaunchError::Capturing),
        }
    }

    /// Like [`enter`](Self::enter), to begin a capture: waits until all threads have enqueued what they entered for.
    pub(in crate::cuda) fn enter_alone(&self) -> Result<Closed<'_>, LaunchError> {
        let closed = self.gate.close();
        match self.stream.capture_status()? {
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(closed),
            _ => Err(LaunchError::Capturing),
        }
    }

    pub(in crate::cuda) fn new_event(&self) -> Result<CudaEvent, LaunchError> {
        let _relaxed = Relaxed::new();
        Ok(self.stream.context().new_event(None)?)
    }

    /// Rejects an operand of another stream or context.
    pub(in crate::cuda) fn check(&self, operand: &'static str, other: &Self) -> Result<(), LaunchError> {
        if self.kernels != other.kernels {
            return Err(LaunchError::WrongContext { operand });
        }
        if self.stream.cu_stream() != other.stream.cu_stream() {
            return Err(LaunchError::WrongStream { operand });
        }
        Ok(())
    }
}

/// The gate of a stream. Default streams of different contexts have the same handle, and share one.
fn gate_of(stream: &CudaStream) -> Arc<Gate> {
    let mut gates = GATES.lock().unwrap_or_else(PoisonError::into_inner);
    let gates = gates.get_or_insert_default();
    let handle = stream.cu_stream().addr();
    if let Some(gate) = gates.get(&handle).and_then(Weak::upgrade) {
        return gate;
    }
    gates.retain(|_, gate| gate.strong_count() > 0);
    let gate = Arc::new(Gate::default());
    gates.insert(handle, Arc::downgrade(&gate));
    gate
}

/// Stands in for cudarc's method of this name, which versions before 0.19.10 lack. A type's own method takes precedence of a trait's.
#[expect(unsafe_code, reason = "the signature of cudarc's method")]
trait WrapStream {
    /// Some other stream of the context.
    unsafe fn wrap_borrowed_stream(self: &Arc<Self>, stream: CUstream) -> Arc<CudaStream>;
}

#[expect(unsafe_code, reason = "the signature of cudarc's method")]
impl WrapStream for CudaContext {
    unsafe fn wrap_borrowed_stream(self: &Arc<Self>, _stream: CUstream) -> Arc<CudaStream> {
        self.default_stream()
    }
}
