//! The adapters as the scheduler sees them: in the library's pool on one rank, or in that of a group (`ranks`).

use std::{any::Any, sync::Arc, time::Duration};

use aril::{
    Slot,
    error::LoadError,
    pool::{AdapterId, AdapterPool, Backend, Outcome, PoolError, Residency, Snapshot, Source, StreamId, Tier},
};

use crate::{
    device::{Device, Slots},
    error,
};

/// A pool of adapters. Its operations are those of an [`AdapterPool`], on its first compute stream.
pub(crate) trait Pool {
    fn register(&mut self, source: Source) -> Result<AdapterId, PoolError>;
    fn unregister(&mut self, id: AdapterId) -> Result<(), PoolError>;
    fn prefetch(&mut self, id: AdapterId) -> Result<(), PoolError>;
    fn retry(&mut self, id: AdapterId) -> Result<(), PoolError>;
    /// The next load that has failed.
    fn next_failure(&mut self) -> Option<(AdapterId, Arc<LoadError>)>;
    /// Where an adapter is; `None` if it is not registered.
    fn residency(&self, id: AdapterId) -> Option<Residency>;

    /// Whether an adapter has been read, or the error of its last load. One whose memory others have taken since is read again.
    fn is_loaded(&mut self, id: AdapterId) -> Result<bool, PoolError> {
        match self.residency(id) {
            None => Err(PoolError::Unknown { id }),
            Some(Residency { failure: Some(error), .. }) => Err(PoolError::Failed { id, error }),
            Some(Residency { tier: Tier::Source, .. }) => {
                // A prefetch of one that is being read changes nothing.
                self.prefetch(id)?;
                Ok(false)
            }
            Some(_) => Ok(true),
        }
    }

    /// Whether the last load of an adapter has failed.
    fn has_failed(&self, id: AdapterId) -> bool {
        self.residency(id).is_some_and(|residency| residency.failure.is_some())
    }

    /// The fastest tier that an adapter is in; `None` if it is not known.
    fn tier(&self, id: AdapterId) -> Option<Tier> {
        self.residency(id).map(|residency| residency.tier)
    }

    fn acquire(&mut self, id: AdapterId) -> Result<Lease, PoolError>;
    fn commit(&mut self) -> error::Result<()>;
    fn wait(&mut self, timeout: Duration) -> bool;
    fn snapshot(&self) -> Snapshot;
}

/// A pool whose steps run on a device.
pub(crate) trait Steps<D: Device>: Pool {
    /// What has the slots of its leases.
    fn slots(&self) -> Slots<'_, D>;
}

/// A running request's hold on its adapter's slot.
#[derive(Debug)]
pub(crate) struct Lease {
    slot: Slot,
    /// Ends the hold when it is dropped.
    _hold: Box<dyn Any>,
}

impl Lease {
    pub(crate) fn new(slot: Slot, hold: impl Any) -> Self {
        Self { slot, _hold: Box::new(hold) }
    }

    pub(crate) fn slot(&self) -> Slot {
        self.slot
    }
}

impl<B: Backend<Source = Source>, D: Device<Tiers = B>> Steps<D> for AdapterPool<B> {
    fn slots(&self) -> Slots<'_, D> {
        Slots::Pool(self)
    }
}

impl<B: Backend<Source = Source>> Pool for AdapterPool<B> {
    fn register(&mut self, source: Source) -> Result<AdapterId, PoolError> {
        self.register(source)
    }

    fn unregister(&mut self, id: AdapterId) -> Result<(), PoolError> {
        self.unregister(id)
    }

    fn prefetch(&mut self, id: AdapterId) -> Result<(), PoolError> {
        self.prefetch(id)
    }

    fn retry(&mut self, id: AdapterId) -> Result<(), PoolError> {
        self.retry(id)
    }

    fn next_failure(&mut self) -> Option<(AdapterId, Arc<LoadError>)> {
        loop {
            let Outcome { id, result, .. } = self.next_outcome()?;
            if let Err(error) = result {
                return Some((id, error));
            }
        }
    }

    fn residency(&self, id: AdapterId) -> Option<Residency> {
        self.residency(id)
    }

    fn acquire(&mut self, id: AdapterId) -> Result<Lease, PoolError> {
        let lease = self.acquire(id, StreamId::FIRST)?;
        Ok(Lease::new(lease.slot(), lease))
    }

    fn commit(&mut self) -> error::Result<()> {
        Ok(self.commit(StreamId::FIRST)?)
    }

    fn wait(&mut self, timeout: Duration) -> bool {
        self.wait(timeout)
    }

    fn snapshot(&self) -> Snapshot {
        self.snapshot()
    }
}
