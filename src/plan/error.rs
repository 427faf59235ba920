//! Errors of plans.

use crate::DType;

/// A layer or a capacity that the kernels do not support.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The device is too old for the operation.
    #[error("the fused linear needs a device of compute capability 9.0 or newer; this one has {major}.{minor}")]
    ComputeCapability {
        /// Major compute capability of the device.
        major: i32,
        /// Minor compute capability of the device.
        minor: i32,
    },
    /// The layer id belongs to another model than the weights. Ids belong to the one
    /// [`ModelSpec`](crate::model::ModelSpec) object that they were added to, even if another one describes equal
    /// layers.
    #[error(
        "the layer id and the weights belong to different models: an id belongs to the one `ModelSpec` object that it was \
         added to"
    )]
    Foreign,
    /// The layer is fully sharded, and the operations do not exchange `v` between the ranks.
    #[error("the layer is fully sharded over the ranks, which only `FullyShardedLinear` supports")]
    FullySharded,
    /// The operation supports 16-bit element types alone.
    #[error("{operation} supports bf16 and f16, not {got}")]
    DType {
        /// Name of the operation.
        operation: &'static str,
        /// The element type given.
        got: DType,
    },
    /// The experts were described without [`Experts::top_k`](crate::model::Experts::top_k).
    #[error("the number of experts per token is not set: call `Experts::top_k`")]
    NoTopK,
    /// The layer is not fully sharded, so that its ranks have nothing to exchange between shrink and expand.
    #[error("the layer is not fully sharded")]
    NotFullySharded,
    /// A size is outside its limits.
    #[error("{what} is {value}, but must be 1 to {max}")]
    Limit {
        /// Name of the size.
        what: &'static str,
        /// The value given.
        value: usize,
        /// The largest allowed value.
        max: usize,
    },
    /// A size is not a multiple of what the kernels require.
    #[error("{what} is {value}, but must be a multiple of {of}")]
    Multiple {
        /// Name of the size.
        what: &'static str,
        /// The value given.
        value: usize,
        /// The required divisor.
        of: usize,
    },
    /// The device has too little shared memory for a fused linear of this shape and rank.
    #[error("the fused linear of this layer needs {needed} bytes of shared memory, and the device has {available}")]
    SharedMemory {
        /// Bytes that a thread block needs for the smallest batch.
        needed: usize,
        /// Bytes that it may have.
        available: usize,
    },
}
