use cudarc::driver::{DriverError, sys};

use super::OperandError;
use crate::plan::PlanError;

/// An operation on the GPU that was rejected or failed. Nothing was enqueued or allocated, except as [`Kernel`](Self::Kernel) says.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// Every staging buffer of the routing has a copy in flight. Wait for a step to finish, or make the routing with more buffers.
    #[error("all {steps_in_flight} staging buffers of the routing are in use")]
    Busy {
        /// Number of staging buffers.
        steps_in_flight: usize,
    },
    /// A batch or a buffer exceeds the size that memory was allocated for.
    #[error("{what} is {got}, but must be at most {max}")]
    Capacity {
        /// What is too large.
        what: &'static str,
        /// Its size.
        got: usize,
        /// The largest allowed size.
        max: usize,
    },
    /// The step is being captured, and graphs are replayed in other steps.
    #[error("a graph cannot be replayed in a step that is being captured")]
    CapturedReplay,
    /// The stream is being captured. A graph captured outside [`WeightTable::capture`](crate::cuda::WeightTable::capture) could be
    /// replayed after the operands are freed.
    #[error("the stream is being captured; capture with `WeightTable::capture` or the raw API instead")]
    Capturing,
    /// The device is too old for the operation.
    #[error("the fused linear needs a device of compute capability 9.0 or newer; this one has {major}.{minor}")]
    ComputeCapability {
        /// Major compute capability of the device.
        major: i32,
        /// Minor compute capability of the device.
        minor: i32,
    },
    /// The CUDA driver returned an error.
    #[error("the CUDA driver returned an error: {0}")]
    Driver(#[from] DriverError),
    /// The CUDA runtime or the kernel's launcher returned an error.
    ///
    /// A linear layer in `f32` or on more than 319 tokens, and experts with more than 1024 routes, may take several launches. The
    /// earlier ones may be enqueued. Then `y` gets the whole result or stays as it was, and the workspace can be used again.
    #[error("the kernel launch failed with status {status}: {message}")]
    Kernel {
        /// A positive `cudaError_t` or a negative `ARIL_ERR_*` (`csrc/aril.h`).
        status: i32,
        /// Description of the status.
        message: String,
    },
    /// The address of an operand is not sufficiently aligned.
    #[error("`{operand}` must be aligned to {alignment} bytes")]
    Misaligned {
        /// Name of the operand.
        operand: &'static str,
        /// The required alignment in bytes.
        alignment: usize,
    },
    /// The rows of an operand are not sufficiently aligned.
    #[error("each row of `{operand}` must begin at a multiple of {alignment} bytes, but rows are {stride_bytes} apart")]
    MisalignedRows {
        /// Name of the operand.
        operand: &'static str,
        /// The required alignment in bytes.
        alignment: usize,
        /// Distance between the beginnings of two rows, in bytes.
        stride_bytes: usize,
    },
    /// No CUDA driver is installed.
    #[error("no CUDA driver was found on this machine")]
    NoDriver,
    /// The capture recorded no work.
    #[error("the captured step enqueued no work")]
    NothingCaptured,
    /// The operand of a captured step is borrowed, so the graph cannot keep its memory alive.
    #[error(
        "`{operand}` is borrowed, but the operands of a captured step must be buffers, which the graph keeps alive"
    )]
    NotKept {
        /// Name of the operand.
        operand: &'static str,
    },
    /// An operand does not match the layer or the step.
    #[error(transparent)]
    Operand(#[from] OperandError),
    /// The operand belongs to a step of another batch.
    #[error("`{operand}` belong to a step of another batch")]
    OtherBatch {
        /// Name of the operand.
        operand: &'static str,
    },
    /// The graph was captured with another object than the step has.
    #[error("the graph was captured with another {what} than the step's")]
    OtherGraph {
        /// `table`, `routing` or `workspace`.
        what: &'static str,
    },
    /// The stream is `CU_STREAM_PER_THREAD`, which names another stream on each thread. Its order would not cover the uses of an
    /// object on two threads.
    #[error(
        "the per-thread default stream is another stream on each thread; create one with `CudaContext::new_stream`"
    )]
    PerThreadStream,
    /// The kernels do not support the layer or the capacity.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The thread's current context, or that of an operand, is not the one that the kernels were loaded into.
    #[error("`{operand}` belongs to another CUDA context than the kernels")]
    WrongContext {
        /// Name of the operand, or `the thread`.
        operand: &'static str,
    },
    /// The operand belongs to another stream, so the order of the launch stream does not cover it.
    #[error("`{operand}` belongs to another stream than the launch")]
    WrongStream {
        /// Name of the operand.
        operand: &'static str,
    },
}

impl LaunchError {
    /// Rejects a size above `max`.
    pub(crate) fn within(what: &'static str, got: usize, max: usize) -> Result<(), Self> {
        if got > max { Err(Self::Capacity { what, got, max }) } else { Ok(()) }
    }

    /// Whether the cause is exhausted device memory.
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
