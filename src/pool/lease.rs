use std::sync::mpsc::Sender;

use super::{AdapterId, CacheNamespace, StreamId, adapter_pool::Dropped};
use crate::Slot;

/// A request's hold on an adapter in its slot, for launches on one stream. Dropping it ends the hold; it never blocks, and any
/// thread may do so.
///
/// The slot is valid for launches until the next end of a step of the stream after the lease was dropped. After that, a step refuses it
/// ([`OperandError::NotLeased`](crate::error::OperandError::NotLeased)), unless another lease holds it, whose adapter may be another.
/// So take the slots of each step from its leases.
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
