//! Driver calls that a stream capture would forbid, or would add to the graph.

use std::{
    marker::PhantomData,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::{
    CudaContext, CudaSlice, DriverError,
    sys::{CUstreamCaptureMode, cuThreadExchangeStreamCaptureMode},
};

use crate::cuda::{LaunchError, Queue};

/// Allows this thread to allocate, free and query events during any stream capture. Without it, the driver rejects such calls on a
/// capturing thread, and on every thread during a global capture, and the capture fails.
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
    #[expect(unsafe_code, reason = "FFI")]
    unsafe { cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result()?;
    Ok(mode)
}

/// Memory dropped while its stream was being captured, and its queue. Freeing it then would add the deallocation to the graph.
static POSTPONED: Mutex<Vec<(CudaSlice<u8>, Queue)>> = Mutex::new(Vec::new());

/// Frees memory in stream order, or, while its stream is being captured, at a later call of this function or of [`free_postponed`].
pub(in crate::cuda) fn free(memory: CudaSlice<u8>, queue: &Queue) {
    postponed().push((memory, queue.clone()));
    free_postponed(queue.stream().context());
}

/// Frees postponed memory of a context whose stream is no longer being captured. That of other contexts, which other threads may have
/// current, is left to them.
pub(in crate::cuda) fn free_postponed(context: &Arc<CudaContext>) {
    let of_context: Vec<_> = postponed().extract_if(.., |(_, queue)| queue.stream().context() == context).collect();
    for (memory, queue) in of_context {
        let captured = match queue.enter() {
            Err(LaunchError::Capturing) => Some(memory),
            entered => {
                if let Err(LaunchError::Driver(error)) = entered {
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
