use std::ffi::CStr;

use cudarc::driver::{CudaContext, result};
use libloading::Library;

use super::LaunchError;
use crate::ffi;

/// Whether this machine has a CUDA driver. Without one, nothing else of this module may work, and says so.
pub fn driver_is_present() -> bool {
    // cudarc can tell only where it loads the driver itself, and a dependant may have it linked instead.
    // SAFETY: the driver's library has no preconditions on being loaded, and stays loaded where anything else uses it.
    #[expect(unsafe_code, reason = "loads a library")]
    ["libcuda.so.1", "libcuda.so"].into_iter().any(|name| unsafe { Library::new(name) }.is_ok())
}

/// The kernels, loaded in one context.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Kernels {
    /// The `CUcontext`, to compare with.
    context: usize,
}

impl Kernels {
    /// Loads every kernel into the context current on this thread, so that no launch pays for it later, and tests that the device
    /// begins blocks in the order of their index, on which the kernels rely. Waits for that test.
    ///
    /// # Errors
    /// If there is no driver, no current context, this build has no kernels for its device, or the device fails the test.
    pub fn load() -> Result<Self, LaunchError> {
        if !driver_is_present() {
            return Err(LaunchError::NoDriver);
        }
        let context = result::ctx::get_current()?.ok_or(LaunchError::WrongContext { operand: "the thread" })?;
        // SAFETY: a context is current.
        #[expect(unsafe_code, reason = "FFI")]
        let status = unsafe { ffi::aril_load() };
        check(status)?;
        Ok(Self { context: context as usize })
    }

    /// As [`load`](Self::load), into a context of cudarc's, which becomes current on this thread.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn load_into(context: &CudaContext) -> Result<Self, LaunchError> {
        context.bind_to_thread()?;
        Self::load()
    }

    /// Refuses a thread on which another context is current: the runtime would launch in that one.
    pub(super) fn check_thread(&self) -> Result<(), LaunchError> {
        match result::ctx::get_current()? {
            Some(context) if context as usize == self.context => Ok(()),
            _ => Err(LaunchError::WrongContext { operand: "the thread" }),
        }
    }

    /// Refuses an operand of another context.
    pub(super) fn check_context(&self, operand: &'static str, context: &CudaContext) -> Result<(), LaunchError> {
        if context.cu_ctx() as usize == self.context { Ok(()) } else { Err(LaunchError::WrongContext { operand }) }
    }
}

/// The result of a call through the C ABI.
pub(super) fn check(status: i32) -> Result<(), LaunchError> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: takes any status.
    #[expect(unsafe_code, reason = "FFI")]
    let message = unsafe { ffi::aril_status_string(status) };
    // SAFETY: a string that lives forever.
    #[expect(unsafe_code, reason = "FFI")]
    let message = unsafe { CStr::from_ptr(message) };
    Err(LaunchError::Kernel { status, message: message.to_string_lossy().into_owned() })
}
