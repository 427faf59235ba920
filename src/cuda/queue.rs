use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, sys::CUstreamCaptureStatus};

use super::{Kernels, LaunchError, capturing::Relaxed, raw};

/// The handle in CUDA's headers, which cudarc does not name.
const CU_STREAM_PER_THREAD: usize = 2;

/// A CUDA stream and the kernels of its context. Objects created on a queue run on its stream, in order. Clones are the same queue.
#[derive(Clone, Debug)]
pub struct Queue {
    kernels: Kernels,
    stream: Arc<CudaStream>,
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
        Ok(Self { kernels: kernels.clone(), stream: Arc::clone(stream) })
    }

    /// The stream.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The kernels of the stream's context.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    pub(super) fn raw(&self) -> raw::Stream {
        raw::Stream::from(&*self.stream)
    }

    /// Makes the context current on this thread.
    pub(super) fn bind(&self) -> Result<(), LaunchError> {
        Ok(self.stream.context().bind_to_thread()?)
    }

    /// Makes the context current on this thread. Rejects a stream that is being captured, because the graph could outlive its
    /// operands.
    pub(super) fn enter(&self) -> Result<(), LaunchError> {
        // This also binds the context.
        match self.stream.capture_status()? {
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
            _ => Err(LaunchError::Capturing),
        }
    }

    pub(super) fn new_event(&self) -> Result<CudaEvent, LaunchError> {
        let _relaxed = Relaxed::new();
        Ok(self.stream.context().new_event(None)?)
    }

    /// Rejects an operand of another stream or context.
    pub(super) fn check(&self, operand: &'static str, other: &Self) -> Result<(), LaunchError> {
        if self.kernels != other.kernels {
            return Err(LaunchError::WrongContext { operand });
        }
        if self.stream.cu_stream() != other.stream.cu_stream() {
            return Err(LaunchError::WrongStream { operand });
        }
        Ok(())
    }
}
