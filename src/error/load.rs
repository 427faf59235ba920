use super::SlotError;
use crate::{adapter::AdapterError, plan::PlanError};

/// An adapter that could not be loaded. The slot and the table are as they were.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A weight cannot be read or represented.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// The device or its driver refused.
    #[cfg(feature = "cuda")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
    #[error(transparent)]
    Device(#[from] super::LaunchError),
    /// The table's memory has no room for the adapter.
    #[error("the weight table has no {bytes} contiguous bytes free for the adapter; the largest gap is {largest_gap}")]
    Full {
        /// Bytes that the adapter takes.
        bytes: usize,
        /// Bytes of the largest free region.
        largest_gap: usize,
    },
    /// No kernel takes the problem: for an engine that makes its table and its layers as it loads.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The adapter does not fit the table.
    #[error(transparent)]
    Slot(#[from] SlotError),
}
