#![expect(unsafe_code, reason = "creates and destroys a stream")]

use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaEvent, CudaStream,
    result::{self, stream::StreamKind},
    sys,
};

use super::Relaxed;
use crate::{
    copies::CopyStream,
    cuda::{LaunchError, Queue, raw::Stream},
};

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
        queue.bind()?;
        let _relaxed = Relaxed::new();
        let context = Arc::clone(queue.stream().context());
        Ok(Self { context, stream: result::stream::create(StreamKind::NonBlocking)? })
    }

    pub(in crate::cuda) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    pub(in crate::cuda) fn raw(&self) -> Stream {
        Stream::from_raw(self.stream.cast())
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
