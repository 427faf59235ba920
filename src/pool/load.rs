use std::sync::{Arc, OnceLock};

use super::{AdapterId, PoolError};
use crate::error::LoadError;

/// A load of an adapter: the way from its source to host memory, on all ranks of a group. It has ended once the adapter is there, or has
/// failed. Any thread may ask for it; the pool takes note of its end in [`poll`](super::AdapterPool::poll), as in most other calls.
///
/// Later loads of the adapter are others. Nor does a load say whether the adapter is still there.
#[derive(Clone, Debug)]
pub struct Load {
    id: AdapterId,
    end: Arc<OnceLock<End>>,
}

/// A load that is under way.
#[derive(Debug, Default)]
pub(super) struct Loading(Arc<OnceLock<End>>);

/// How a load has ended. If an error has no reason, the adapter was unregistered before.
type End = Result<(), Option<Arc<LoadError>>>;

impl Load {
    /// A load that has ended.
    pub(super) fn ended(id: AdapterId, result: Result<(), Arc<LoadError>>) -> Self {
        Self { id, end: Arc::new(OnceLock::from(result.map_err(Some))) }
    }

    /// The adapter.
    pub fn id(&self) -> AdapterId {
        self.id
    }

    /// Whether the load has ended.
    ///
    /// # Errors
    /// [`PoolError::Failed`] if it has failed, and [`PoolError::Unknown`] if the adapter was unregistered, or the pool dropped, before it ended.
    pub fn has_ended(&self) -> Result<bool, PoolError> {
        let id = self.id;
        match self.end.get() {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(Some(error))) => Err(PoolError::Failed { id, error: Arc::clone(error) }),
            Some(Err(None)) => Err(PoolError::Unknown { id }),
        }
    }
}

impl Loading {
    /// The load, which is of this adapter.
    pub(super) fn load(&self, id: AdapterId) -> Load {
        Load { id, end: Arc::clone(&self.0) }
    }

    pub(super) fn end(self, result: Result<(), Arc<LoadError>>) {
        self.set(result.map_err(Some));
    }

    fn set(&self, end: End) {
        // The first end counts.
        let _ = self.0.set(end);
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.set(Err(None));
    }
}
