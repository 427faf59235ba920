//! What a stream that is being captured would forbid this thread, or would make a part of the graph.

use std::{
    marker::PhantomData,
    sync::{Mutex, PoisonError},
};

use cudarc::driver::{
    CudaSlice, CudaStream, DriverError,
    sys::{CUstreamCaptureMode, CUstreamCaptureStatus, cuThreadExchangeStreamCaptureMode},
};

/// While it lives, this thread may allocate and free memory and ask for events, whatever is being captured. Otherwise the driver refuses
/// that to a thread that captures, and to all threads if one captures in the global mode; and the capture fails.
///
/// For calls on what no capture knows: none of them may touch a stream that is being captured.
#[must_use]
pub(super) struct Relaxed {
    before: Option<CUstreamCaptureMode>,
    /// The mode is the thread's.
    not_send: PhantomData<*const ()>,
}

impl Relaxed {
    pub(super) fn new() -> Self {
        // Without a driver the calls fail by themselves.
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

/// Sets the mode of this thread, and gives the one before.
fn exchange(mut mode: CUstreamCaptureMode) -> Result<CUstreamCaptureMode, DriverError> {
    // SAFETY: the mode may be written.
    #[expect(unsafe_code, reason = "FFI")]
    unsafe { cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result()?;
    Ok(mode)
}

/// Memory whose last owner has gone while its stream was being captured: freed then, it would be freed by the graph.
static POSTPONED: Mutex<Vec<CudaSlice<u8>>> = Mutex::new(Vec::new());

/// Frees memory in the order of its stream: now, or once the stream is no longer captured and this or
/// [`free_postponed`] is called again.
pub(super) fn free(memory: CudaSlice<u8>) {
    POSTPONED.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
    free_postponed();
}

/// Frees what captures that have ended since kept from being freed.
pub(super) fn free_postponed() {
    let mut postponed = POSTPONED.lock().unwrap_or_else(PoisonError::into_inner);
    let free: Vec<_> = postponed.extract_if(.., |memory| !is_captured(memory.stream())).collect();
    drop(postponed);
    let _relaxed = Relaxed::new();
    drop(free);
}

fn is_captured(stream: &CudaStream) -> bool {
    match stream.capture_status() {
        Ok(status) => status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
        Err(error) => {
            // The next call that can return it does.
            stream.context().record_err::<()>(Err(error));
            false
        }
    }
}
