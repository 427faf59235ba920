//! Errors of pools.

use std::sync::Arc;

use super::{AdapterId, StreamId};
use crate::{
    error::{LoadError, SlotError},
    plan::PlanError,
};

/// A request that the pool refuses. Nothing is leased.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The CUDA driver or a launch failed.
    #[cfg(feature = "cuda")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
    #[error(transparent)]
    Device(#[from] crate::error::LaunchError),
    /// The last load of the adapter failed. Other adapters are not affected; [`retry`](super::AdapterPool::retry) tries
    /// again.
    #[error("{id} could not be loaded: {error}")]
    Failed {
        /// The adapter.
        id: AdapterId,
        /// Why it could not be loaded.
        error: Arc<LoadError>,
    },
    /// There is no room until leases and their steps end: other adapters on the device are in use or pinned. Retry
    /// after the end of a step.
    #[error("the device has no room until other adapters are released")]
    Full,
    /// The ranks of a group have not done what was asked for: some refuse the adapter, or they are not connected any
    /// more, or do different things ([`LoadError::Group`]).
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The adapter is on its way, or waits for reads and copies of others to end. Retry later. Its load has been
    /// started if it was not under way.
    #[error("{id} is being loaded")]
    Loading {
        /// The first adapter of the batch that is not ready.
        id: AdapterId,
    },
    /// The stream belongs to another pool.
    #[error("the pool has no stream {stream:?}")]
    NoSuchStream {
        /// The stream given.
        stream: StreamId,
    },
    /// Another pinned adapter would leave no room for the others.
    #[error("pinning {id} would leave no room for other adapters")]
    Pinned {
        /// The adapter that was not pinned.
        id: AdapterId,
    },
    /// A bound of the pool is invalid.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The adapter does not match the pool's table.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The loader threads could not be started.
    #[error("the loader threads could not be started: {0}")]
    Threads(std::io::Error),
    /// The adapters never fit together, whatever else is released.
    #[error("{adapters} adapters of {bytes} bytes do not fit beside the pinned ones: the {what} is {max}")]
    TooLarge {
        /// Distinct adapters of the batch, or 1.
        adapters: usize,
        /// Their bytes.
        bytes: usize,
        /// The bound that they exceed.
        what: &'static str,
        /// Its value.
        max: usize,
    },
    /// The adapter was never registered with this pool, or has been unregistered.
    #[error("{id} is not registered")]
    Unknown {
        /// The id given.
        id: AdapterId,
    },
}

impl PoolError {
    /// The error of a load, if it is one.
    pub(crate) fn into_load(self) -> Option<LoadError> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Device(error) => Some(error.into()),
            Self::Load(error) => Some(error),
            Self::Plan(error) => Some(error.into()),
            Self::Slot(error) => Some(error.into()),
            _ => None,
        }
    }
}
