//! The adapters as the scheduler sees them: in the library's pool on one rank, or in that of a group (`ranks`).

use std::{any::Any, time::Duration};

use aril::{
    Slot,
    pool::{AdapterId, AdapterPool, Backend, Load, PoolError, Residency, Snapshot, Source, StreamId, Tier},
};

use crate::{
    device::{Device, Slots},
    error,
};

/// Why an adapter is not there, without its number, which nobody else knows.
pub(crate) fn sentence(error: &PoolError) -> String {
    match error {
        PoolError::Failed { error, .. } => error.to_string(),
        PoolError::TooLarge { bytes, what, max, .. } => {
            format!("it has {bytes} bytes, and the {what} has {max} (--arena-mib, --host-mib)")
        }
        PoolError::Pinned { .. } => {
            "pinned beside the others, it would leave no room for those that are not (--arena-mib)".into()
        }
        error => error.to_string(),
    }
}

/// A pool of adapters. Its operations are those of an [`AdapterPool`], on its first compute stream.
pub(crate) trait Pool {
    fn load(&mut self, source: Source) -> Result<Version, PoolError>;
    fn prefetch(&mut self, id: AdapterId) -> Result<Load, PoolError>;
    fn retry(&mut self, id: AdapterId) -> Result<Load, PoolError>;
    fn pin(&mut self, id: AdapterId) -> Result<(), PoolError>;
    /// The load of an adapter that is under way.
    fn loading(&self, id: AdapterId) -> Option<Load>;
    /// Where an adapter is; `None` if it is not registered.
    fn residency(&self, id: AdapterId) -> Option<Residency>;

    /// Whether the last load of an adapter has failed.
    fn has_failed(&self, id: AdapterId) -> bool {
        self.residency(id).is_some_and(|residency| residency.failure.is_some())
    }

    /// The fastest tier that an adapter is in; `None` if it is not known.
    fn tier(&self, id: AdapterId) -> Option<Tier> {
        self.residency(id).map(|residency| residency.tier)
    }

    fn acquire(&mut self, id: AdapterId) -> Result<Lease, PoolError>;
    fn end_step(&mut self) -> error::Result<()>;
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

/// A version of an adapter that the pool knows until it is dropped.
#[derive(Debug)]
pub(crate) struct Version {
    load: Load,
    /// Unregisters it when it is dropped.
    _hold: Box<dyn Any>,
}

impl Version {
    pub(crate) fn new(load: Load, hold: impl Any) -> Self {
        Self { load, _hold: Box::new(hold) }
    }

    /// Its first load.
    pub(crate) fn load(&self) -> &Load {
        &self.load
    }
}

impl<B: Backend<Source = Source>, D: Device<Tiers = B>> Steps<D> for AdapterPool<B> {
    fn slots(&self) -> Slots<'_, D> {
        Slots::Pool(self)
    }
}

impl<B: Backend<Source = Source>> Pool for AdapterPool<B> {
    fn load(&mut self, source: Source) -> Result<Version, PoolError> {
        let version = self.load(source)?;
        Ok(Version::new(version.load().clone(), version))
    }

    fn prefetch(&mut self, id: AdapterId) -> Result<Load, PoolError> {
        self.prefetch(id)
    }

    fn retry(&mut self, id: AdapterId) -> Result<Load, PoolError> {
        self.retry(id)
    }

    fn pin(&mut self, id: AdapterId) -> Result<(), PoolError> {
        self.pin(id)
    }

    fn loading(&self, id: AdapterId) -> Option<Load> {
        self.loading(id)
    }

    fn residency(&self, id: AdapterId) -> Option<Residency> {
        self.residency(id)
    }

    fn acquire(&mut self, id: AdapterId) -> Result<Lease, PoolError> {
        let lease = self.acquire(id, StreamId::FIRST)?;
        Ok(Lease::new(lease.slot(), lease))
    }

    fn end_step(&mut self) -> error::Result<()> {
        Ok(self.end_step(StreamId::FIRST)?)
    }

    fn wait(&mut self, timeout: Duration) -> bool {
        self.wait(timeout)
    }

    fn snapshot(&self) -> Snapshot {
        self.snapshot()
    }
}
