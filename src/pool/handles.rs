//! What callers of a pool hold: leases, loads and versions. Any thread may drop them.

use std::sync::{Arc, OnceLock, mpsc::Sender};

use super::{AdapterId, CacheNamespace, PoolError, StreamId};
use crate::{Slot, error::LoadError};

/// What somebody else has dropped.
#[derive(Clone, Copy, Debug)]
pub(super) enum Dropped {
    Lease(Slot, StreamId),
    Version(AdapterId),
}

/// A request's hold on an adapter in its slot, for launches on one stream. Dropping it ends the hold; it never blocks,
/// and any thread may do so.
///
/// The slot is valid for launches until the next end of a step of the stream after the lease was dropped. After that, a
/// step refuses it ([`OperandError::NotLeased`](crate::error::OperandError::NotLeased)), also if another adapter is
/// leased there, unless another lease holds the same copy of the same adapter.
#[derive(Debug)]
#[must_use]
pub struct Lease {
    pub(super) id: AdapterId,
    pub(super) slot: Slot,
    pub(super) stream: StreamId,
    pub(super) dropped: Sender<Dropped>,
}

impl Lease {
    /// The adapter.
    pub fn id(&self) -> AdapterId {
        self.id
    }

    /// The adapter's slot.
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// The stream that the slot was leased for.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// The prefix-cache namespace of the adapter.
    pub fn cache_namespace(&self) -> CacheNamespace {
        self.id.cache_namespace()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Without a receiver, the pool is gone.
        let _ = self.dropped.send(Dropped::Lease(self.slot, self.stream));
    }
}

/// A load of an adapter: the way from its source to host memory, on all ranks of a group. It has ended once the adapter
/// is there, or has failed. Any thread may ask for it; the pool takes note of its end in
/// [`poll`](super::AdapterPool::poll), as in most other calls.
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
    /// [`PoolError::Failed`] if it has failed, and [`PoolError::Unknown`] if the adapter was unregistered, or the pool
    /// dropped, before it ended.
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

/// A version of an adapter that is registered until this is dropped; by any thread, without blocking. The pool takes
/// note of the drop in its next call, as of that of a lease. Requests that hold a lease keep it.
#[derive(Debug)]
#[must_use = "dropping a version unregisters it"]
pub struct Version {
    pub(super) load: Load,
    pub(super) dropped: Sender<Dropped>,
}

impl Version {
    /// The version's id.
    pub fn id(&self) -> AdapterId {
        self.load.id()
    }

    /// Its first load.
    pub fn load(&self) -> &Load {
        &self.load
    }

    /// This version, once its load has ended.
    pub(super) fn loaded(self) -> Result<Self, PoolError> {
        self.load.has_ended().map(|_| self)
    }
}

impl Drop for Version {
    fn drop(&mut self) {
        // Without a receiver, the pool is gone.
        let _ = self.dropped.send(Dropped::Version(self.id()));
    }
}
