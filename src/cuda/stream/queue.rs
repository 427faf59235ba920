use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use cudarc::driver::{CudaEvent, CudaStream, sys::CUstreamCaptureStatus};

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
