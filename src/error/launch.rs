//! Errors of operations on the GPU.

use std::fmt;

use cudarc::driver::{DriverError, sys};

use super::OperandError;
use crate::{plan::PlanError, sizes::max_elements};

/// An operation on the GPU that was rejected or failed. Nothing was enqueued or allocated, except as
/// [`Kernel`](Self::Kernel) and [`WeightTable::step`](crate::cuda::WeightTable::step) say.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// Every staging buffer of the routing is read by an update that has not run. Wait for a step to finish, or make
    /// the routing with more buffers.
    #[error("all {steps_in_flight} staging buffers of the routing are in use")]
    Busy {
        /// Number of staging buffers.
        steps_in_flight: usize,
    },
    /// The step is being captured, and graphs are replayed in other steps.
    #[error("a graph cannot be replayed in a step that is being captured")]
    CapturedReplay,
    /// The engine is capturing the queue's stream. Its graph, which keeps nothing alive, could be replayed after the
    /// operands are freed.
    #[error("the stream is being captured; capture with `WeightTable::capture` or the raw API instead")]
    Capturing,
    /// The layer was created after the capture began. Its kernels read W before they wait for the kernel in front of
    /// them, which may be a captured one that writes W.
    #[error("{layer} was created after the capture of the step began; create it before")]
    CreatedInCapture {
        /// The layer.
        layer: &'static str,
    },
    /// The CUDA driver returned an error. That of a kernel that failed earlier, such as `CUDA_ERROR_LAUNCH_FAILED`, is
    /// returned by every later call in the context.
    #[error("the CUDA driver returned an error: {0}")]
    Driver(DriverError),
    /// The CUDA runtime or the kernel's launcher returned an error.
    ///
    /// A linear layer in `f32` or on more than 319 tokens, and experts with more than 1024 routes, may take several
    /// launches. The earlier ones may be enqueued. Then `y` gets the whole result or stays as it was, and the workspace
    /// can be used again.
    #[error("the kernel launch failed with status {status}: {message}")]
    Kernel {
        /// A positive `cudaError_t` or a negative `ARIL_ERR_*` (`csrc/aril.h`).
        status: i32,
        /// Description of the status.
        message: String,
    },
    /// The address of an operand is not sufficiently aligned.
    #[error("{operand} must be aligned to {alignment} bytes", operand = Named(operand))]
    Misaligned {
        /// Name of the operand.
        operand: &'static str,
        /// The required alignment in bytes.
        alignment: usize,
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
    /// cudarc did not create the stream, and wraps such a stream from version 0.19.10 on. The program was built with an
    /// older one.
    #[error("cudarc takes streams that it did not create from version 0.19.10 on, and this program has an older one")]
    OldCudarc,
    /// An operand does not match the layer or the step.
    #[error(transparent)]
    Operand(OperandError),
    /// The operand belongs to a step of another batch, or a replay in the step has overwritten it.
    #[error("`{operand}` belong to a step of another batch, or a graph was replayed since")]
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
    /// The stream is `CU_STREAM_PER_THREAD`, which names another stream on each thread. Its order would not cover the
    /// uses of an object on two threads.
    #[error(
        "the per-thread default stream is another stream on each thread; create one with cudarc's \
         `CudaContext::new_stream`, or in candle the device with `Device::new_cuda_with_stream` instead of \
         `Device::new_cuda`"
    )]
    PerThreadStream,
    /// The kernels do not support the layer or the capacity.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The graph was captured for batches without adapters, and the batch has one, or its slots are in device memory.
    #[error("the graph was captured without adapters, and the batch has one")]
    WithoutAdapters,
    /// The thread's current context, or that of an operand, is not the one that the kernels were loaded into.
    #[error("{operand} belongs to another CUDA context than the kernels", operand = Named(operand))]
    WrongContext {
        /// Name of the operand, or "the thread".
        operand: &'static str,
    },
    /// Memory has fewer bytes than its user needs: a workspace fewer than a layer, or the memory of a routing or a
    /// grouping fewer than its capacity.
    #[error("{memory} has {got} bytes; {user} needs {want}")]
    TooSmall {
        /// The memory.
        memory: &'static str,
        /// Its size in bytes.
        got: usize,
        /// What uses it.
        user: &'static str,
        /// The bytes that it needs.
        want: usize,
    },
    /// The operand was created on another stream than the queue's, whose order does not cover its uses. This holds for
    /// memory of cudarc, too: its events do not cover reads on several streams.
    #[error("{operand} was created on a different stream", operand = Named(operand))]
    WrongStream {
        /// Name of the operand.
        operand: &'static str,
    },
}

impl From<DriverError> for LaunchError {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

impl From<OperandError> for LaunchError {
    fn from(error: OperandError) -> Self {
        match error {
            OperandError::Plan(error) => Self::Plan(error),
            error => Self::Operand(error),
        }
    }
}

impl LaunchError {
    /// Rejects memory of fewer bytes than `user` needs.
    pub(crate) fn room(memory: &'static str, got: usize, user: &'static str, want: usize) -> Result<(), Self> {
        if want > got { Err(Self::TooSmall { memory, got, user, want }) } else { Ok(()) }
    }

    /// The bytes of `len` elements. Rejects more than memory can hold.
    pub(crate) fn bytes_of<T>(what: &'static str, len: usize) -> Result<usize, Self> {
        OperandError::within(what, len, max_elements::<T>())?;
        Ok(len * size_of::<T>())
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

/// Displays what an error is about: an operand such as `x`, or a thing such as "the routing".
struct Named<'a>(&'a str);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.starts_with("the ") { f.write_str(self.0) } else { write!(f, "`{}`", self.0) }
    }
}

#[cfg(test)]
mod tests {
    use cudarc::driver::{DriverError, sys};

    use super::LaunchError;

    #[test]
    fn messages_name_what_is_wrong() {
        let too_small =
            LaunchError::room("the workspace", 65536, "this layer", 131_200).expect_err("the layer needs more");
        for (error, message) in [
            (too_small, "the workspace has 65536 bytes; this layer needs 131200"),
            (LaunchError::WrongStream { operand: "the routing" }, "the routing was created on a different stream"),
            (LaunchError::WrongStream { operand: "x" }, "`x` was created on a different stream"),
            (LaunchError::Misaligned { operand: "x", alignment: 16 }, "`x` must be aligned to 16 bytes"),
        ] {
            assert_eq!(error.to_string(), message);
        }
        assert!(LaunchError::room("the workspace", 2, "this layer", 2).is_ok());
    }

    /// As `tests/cpu/errors.rs` has it for the errors of both backends. The message needs the driver, which has the
    /// text of its errors.
    #[test]
    fn the_cause_is_in_the_message_alone() {
        let driver = LaunchError::from(DriverError(sys::CUresult::CUDA_ERROR_NOT_INITIALIZED));
        assert!(std::error::Error::source(&driver).is_none());
    }
}
