//! Launches of the example's own kernels.

use std::{ffi::c_void, marker::PhantomData, ptr};

use aril::cuda::{LaunchError, raw::Stream};
use cudarc::driver::{
    CudaContext, CudaFunction, DeviceRepr,
    sys::{CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig, cuLaunchKernelEx},
};

use super::Cuda;
use crate::{error::Result, kernels::THREADS};

/// A launch of one of the example's kernels.
pub(super) struct Launch<'a> {
    context: &'a CudaContext,
    stream: Stream,
    function: &'a CudaFunction,
    arguments: Vec<*mut c_void>,
    /// Before its predecessors have ended. The kernel waits for them.
    starts_early: bool,
    lifetime: PhantomData<&'a c_void>,
}

impl<T> Cuda<T> {
    pub(super) fn kernel<'a>(&'a self, function: &'a CudaFunction) -> Launch<'a> {
        self.lets_next_start.set(false);
        let (context, stream) = (self.queue.stream().context(), self.stream.get());
        Launch { context, stream, function, arguments: Vec::new(), starts_early: false, lifetime: PhantomData }
    }

    /// A kernel that starts before the kernel in front of it ends, and waits for that one's results itself.
    pub(super) fn early<'a>(&'a self, function: &'a CudaFunction) -> Launch<'a> {
        Launch { starts_early: true, ..self.kernel(function) }
    }

    /// A kernel that reads the result of a layer, and starts early behind operations that let it. Behind cuBLASLt and
    /// NCCL, which let no kernel start before they end, an early start takes 1.5 us longer (H200).
    pub(super) fn consumer<'a>(&'a self, function: &'a CudaFunction) -> Launch<'a> {
        let starts_early = self.lets_next_start.get();
        Launch { starts_early, ..self.kernel(function) }
    }
}

impl<'a> Launch<'a> {
    pub(super) fn arg<V: DeviceRepr>(&mut self, value: &'a V) -> &mut Self {
        self.arguments.push(ptr::from_ref(value).cast_mut().cast());
        self
    }
}

/// Enqueues a kernel of `THREADS` threads, with a block for each row and part of a row.
pub(super) fn launch(kernel: Launch<'_>, rows: usize, parts: usize) -> Result<()> {
    launch_blocks(kernel, (rows, parts), THREADS, 0)
}

/// Enqueues a kernel with a grid, the threads of a block and the bytes of its dynamic shared memory.
pub(super) fn launch_blocks(
    mut kernel: Launch<'_>,
    grid: (usize, usize),
    threads: u32,
    shared_bytes: usize,
) -> Result<()> {
    if grid.0 * grid.1 == 0 {
        return Ok(());
    }
    kernel.context.bind_to_thread().map_err(LaunchError::from)?;
    let mut attribute = CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let config = CUlaunchConfig {
        gridDimX: u32::try_from(grid.0)?,
        gridDimY: u32::try_from(grid.1)?,
        gridDimZ: 1,
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: u32::try_from(shared_bytes)?,
        hStream: kernel.stream.as_raw().cast(),
        attrs: &raw mut attribute,
        numAttrs: kernel.starts_early.into(),
    };
    let (function, arguments) = (kernel.function.cu_function(), kernel.arguments.as_mut_ptr());
    // SAFETY: each kernel gets the arguments that it declares: matrices of its element type and documented shapes, and
    // sizes of 8 bytes. The forward keeps shapes and indices in bounds.
    unsafe { cuLaunchKernelEx(&raw const config, function, arguments, ptr::null_mut()) }
        .result()
        .map_err(LaunchError::from)?;
    Ok(())
}
