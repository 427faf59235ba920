use std::sync::mpsc::Sender;

use super::{AdapterId, Load, PoolError, adapter_pool::Dropped};

/// A version of an adapter that is registered until this is dropped; by any thread, without blocking. The pool takes note of the drop in its
/// next call, as of that of a lease. Requests that hold a lease keep it.
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
