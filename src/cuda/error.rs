use cudarc::driver::{DriverError, sys};

use crate::{adapter::AdapterError, error::OperandError, error::SlotError, plan::PlanError};

/// Why nothing was enqueued.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The adapter cannot be packed.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// The engine has more copies under way than it made room for: wait for a step to finish.
    #[error("all {steps_in_flight} staging buffers of the routing are still being copied")]
    Busy {
        /// Staging buffers.
        steps_in_flight: usize,
    },
    /// The batch or a buffer is larger than what was sized for it.
    #[error("{what} is {got}, but only {max} was made room for")]
    Capacity {
        /// What is too large.
        what: &'static str,
        /// How large.
        got: usize,
        /// What there is room for.
        max: usize,
    },
    /// The operation needs a newer device.
    #[error("the fused linear needs compute capability 9.0 or newer; this device has {major}.{minor}")]
    ComputeCapability {
        /// The device's.
        major: i32,
        /// Behind the point.
        minor: i32,
    },
    /// The driver refused.
    #[error("the CUDA driver: {0}")]
    Driver(#[from] DriverError),
    /// The table's memory has no room for the adapter.
    #[error("the weight table has no {bytes} contiguous bytes free for the adapter; the largest gap is {largest}")]
    Full {
        /// What the adapter takes.
        bytes: usize,
        /// The largest free region.
        largest: usize,
    },
    /// The CUDA runtime or a kernel's launcher refused.
    #[error("the kernel was not launched: {message} (status {status})")]
    Kernel {
        /// A `cudaError_t`, or a negative `ARIL_ERR_*`.
        status: i32,
        /// What it means.
        message: String,
    },
    /// The operand begins where kernels cannot read it.
    #[error("`{operand}` must begin at a multiple of {alignment} bytes")]
    Misaligned {
        /// Which operand.
        operand: &'static str,
        /// Its alignment in bytes.
        alignment: usize,
    },
    /// There is no CUDA driver on this machine.
    #[error("no CUDA driver was found on this machine")]
    NoDriver,
    /// An operand does not fit.
    #[error(transparent)]
    Operand(#[from] OperandError),
    /// No kernel takes the problem.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The adapter does not fit the table.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The context current on this thread, or the operand's, is not the one the kernels were loaded in.
    #[error("`{operand}` belongs to another CUDA context than the one the kernels were loaded in")]
    WrongContext {
        /// Which operand, or `the thread`.
        operand: &'static str,
    },
    /// The operand belongs to another stream, which would have to be waited for.
    #[error("`{operand}` was made on another stream than the one launched on")]
    WrongStream {
        /// Which operand.
        operand: &'static str,
    },
}

impl LaunchError {
    /// Whether device memory, or memory that the driver needs for the device, has run out.
    pub fn is_out_of_memory(&self) -> bool {
        /// `cudaErrorMemoryAllocation`
        const RUNTIME: i32 = 2;
        match self {
            Self::Driver(error) => error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            Self::Kernel { status, .. } => *status == RUNTIME,
            _ => false,
        }
    }
}
