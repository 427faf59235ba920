use cudarc::driver::{DriverError, sys};

use super::OperandError;
use crate::plan::PlanError;

/// Why nothing was enqueued or allocated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
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
    /// The stream is being captured by somebody else, who would replay the operation when its operands may be gone.
    #[error("the stream is being captured; capture with `WeightTable::capture`, or through the raw door")]
    Capturing,
    /// The device is too old for the operation.
    #[error("the fused linear needs a device of compute capability 9.0 or newer; this one has {major}.{minor}")]
    ComputeCapability {
        /// The device's, before the point.
        major: i32,
        /// And behind it.
        minor: i32,
    },
    /// The driver refused.
    #[error("the CUDA driver: {0}")]
    Driver(#[from] DriverError),
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
    /// Rows of the operand begin where kernels cannot read them.
    #[error("each row of `{operand}` must begin at a multiple of {alignment} bytes, but rows are {stride_bytes} apart")]
    MisalignedRows {
        /// Which operand.
        operand: &'static str,
        /// The alignment of its rows in bytes.
        alignment: usize,
        /// The distance between the beginnings of rows in bytes.
        stride_bytes: usize,
    },
    /// There is no CUDA driver on this machine.
    #[error("no CUDA driver was found on this machine")]
    NoDriver,
    /// A captured step enqueued nothing.
    #[error("nothing was captured")]
    NothingCaptured,
    /// The operand of a captured step is borrowed, so that the graph cannot keep its memory.
    #[error("`{operand}` is borrowed; the operands of a captured step are buffers, which its graph keeps")]
    NotKept {
        /// Which operand.
        operand: &'static str,
    },
    /// An operand does not fit.
    #[error(transparent)]
    Operand(#[from] OperandError),
    /// The operand was made in a step of another batch.
    #[error("`{operand}` were made in a step of another batch")]
    OtherBatch {
        /// Which operand.
        operand: &'static str,
    },
    /// No kernel takes the problem.
    #[error(transparent)]
    Plan(#[from] PlanError),
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
    /// Refuses more than there is room for.
    pub(crate) fn within(what: &'static str, got: usize, max: usize) -> Result<(), Self> {
        if got > max { Err(Self::Capacity { what, got, max }) } else { Ok(()) }
    }

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
