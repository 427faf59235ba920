use super::SlotError;
use crate::{adapter::AdapterError, group::GroupError, plan::PlanError};

/// A failed load. The slot and the table are unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A weight cannot be read, or has no finite value in the table's element type.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// The CUDA driver or a launch failed.
    #[cfg(feature = "cuda")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
    #[error(transparent)]
    Device(#[from] super::LaunchError),
    /// The factors of a module in device memory do not match it.
    #[cfg(feature = "cuda")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
    #[error("the factors of `{module}`: {error}")]
    Factors {
        /// Path of the module.
        module: String,
        /// Why.
        error: Box<super::LaunchError>,
    },
    /// The arena has no free block of the adapter's size.
    #[error(
        "the adapter needs {bytes} contiguous bytes, but the largest free block of the weight table has {largest_gap}"
    )]
    Full {
        /// Size of the adapter, in bytes.
        bytes: usize,
        /// Size of the largest free block, in bytes.
        largest_gap: usize,
    },
    /// The ranks of a group did not load the adapter.
    #[error(transparent)]
    Group(Box<GroupError>),
    /// The thread that read the adapter panicked.
    #[error("the thread that read the adapter panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
    /// The kernels do not support the table or a layer. For engines that create them while they load.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The slot does not exist, or the adapter does not match the table.
    #[error(transparent)]
    Slot(#[from] SlotError),
}
