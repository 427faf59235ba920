use std::{
    ffi::{CStr, c_void},
    sync::Arc,
};

use cudarc::driver::{CudaContext, result, sys};
use libloading::Library;

use super::LaunchError;
use crate::{ffi, plan::Device};

/// Whether a CUDA driver is installed. Without one, everything else in this module fails with an error.
pub fn driver_is_present() -> bool {
    // cudarc knows only if it loads the driver itself; a dependant may link the driver instead.
    // SAFETY: loading the driver's library has no preconditions, and it stays loaded while anything else uses it.
    #[expect(unsafe_code, reason = "loads a library")]
    ["libcuda.so.1", "libcuda.so"].into_iter().any(|name| unsafe { Library::new(name) }.is_ok())
}

/// An operation of the C ABI, with its arguments and the stream.
pub(super) type Operation<Args> = unsafe extern "C" fn(*const Args, *mut c_void) -> i32;

/// The kernels, loaded into one CUDA context.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Kernels {
    /// The `CUcontext`, for comparison only.
    context: usize,
    device: Device,
}

impl Kernels {
    /// Loads every kernel into the thread's current context, so that no launch has to, and waits for a short kernel which tests
    /// that the device starts thread blocks in order of their index. The kernels rely on that order.
    ///
    /// # Errors
    /// [`LaunchError`] if there is no driver or no current context, this build has no code for the device, or the test fails.
    pub fn load() -> Result<Self, LaunchError> {
        if !driver_is_present() {
            return Err(LaunchError::NoDriver);
        }
        let context = result::ctx::get_current()?.ok_or(LaunchError::WrongContext { operand: "the thread" })?;
        // SAFETY: a context is current.
        #[expect(unsafe_code, reason = "FFI")]
        let status = unsafe { ffi::aril_load() };
        check(status)?;
        Ok(Self { context: context as usize, device: describe(current_device()?)? })
    }

    /// Like [`load`](Self::load), into a cudarc context, which becomes current on this thread.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn load_into(context: &CudaContext) -> Result<Self, LaunchError> {
        context.bind_to_thread()?;
        Self::load()
    }

    /// The context's device, for plans.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Rejects a thread with another current context, which the CUDA runtime would launch into.
    pub(super) fn check_thread(&self) -> Result<(), LaunchError> {
        match result::ctx::get_current()? {
            Some(context) if context as usize == self.context => Ok(()),
            _ => Err(LaunchError::WrongContext { operand: "the thread" }),
        }
    }

    /// The context, which must be current on this thread, as one of cudarc's. Rejects any but the primary context of a device:
    /// cudarc would destroy others.
    pub(super) fn primary_context(&self) -> Result<Arc<CudaContext>, LaunchError> {
        self.check_thread()?;
        let current = result::ctx::get_current()?;
        // It becomes current.
        let primary = CudaContext::new(usize::try_from(current_device()?).unwrap_or(0))?;
        let Err(error) = self.check_context("the stream", &primary) else { return Ok(primary) };
        // It becomes current once more when cudarc drops it.
        drop(primary);
        if let Some(current) = current {
            // SAFETY: it was current on this thread.
            #[expect(unsafe_code, reason = "FFI")]
            unsafe { result::ctx::set_current(current) }?;
        }
        Err(error)
    }

    /// Enqueues an operation on `num_tokens` tokens, if there are any.
    ///
    /// # Safety
    /// The arguments and their memory are as the operation requires.
    #[expect(unsafe_code, reason = "FFI")]
    pub(super) unsafe fn launch<Args>(
        &self,
        operation: Operation<Args>,
        args: &Args,
        num_tokens: i32,
        stream: *mut c_void,
    ) -> Result<(), LaunchError> {
        self.check_thread()?;
        if num_tokens == 0 {
            return Ok(());
        }
        // SAFETY: the caller's obligations.
        check(unsafe { operation(args, stream) })
    }

    /// Rejects an operand of another context.
    pub(super) fn check_context(&self, operand: &'static str, context: &CudaContext) -> Result<(), LaunchError> {
        if context.cu_ctx() as usize == self.context { Ok(()) } else { Err(LaunchError::WrongContext { operand }) }
    }
}

/// The device of the current context, which is its ordinal.
fn current_device() -> Result<sys::CUdevice, LaunchError> {
    let mut device = 0;
    // SAFETY: a context is current, and the pointer is valid for the call.
    #[expect(unsafe_code, reason = "FFI")]
    unsafe { sys::cuCtxGetDevice(&raw mut device) }.result()?;
    Ok(device)
}

/// A device, for plans.
fn describe(device: sys::CUdevice) -> Result<Device, LaunchError> {
    use sys::CUdevice_attribute as Attribute;
    let attribute = |attribute| {
        // SAFETY: the device is that of a context.
        #[expect(unsafe_code, reason = "FFI")]
        unsafe {
            result::device::get_attribute(device, attribute)
        }
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let size = |attribute_of| Ok::<_, LaunchError>(usize::try_from(attribute(attribute_of)?).unwrap_or(0));
    Ok(Device {
        compute_capability: (major, minor),
        multiprocessors: size(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes: size(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        shared_bytes_per_multiprocessor: size(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
        reserved_shared_bytes: size(Attribute::CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK)?,
    })
}

/// Converts a status of the C ABI.
pub(super) fn check(status: i32) -> Result<(), LaunchError> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the function takes any status.
    #[expect(unsafe_code, reason = "FFI")]
    let message = unsafe { ffi::aril_status_string(status) };
    // SAFETY: it returns a static string.
    #[expect(unsafe_code, reason = "FFI")]
    let message = unsafe { CStr::from_ptr(message) };
    Err(LaunchError::Kernel { status, message: message.to_string_lossy().into_owned() })
}
