//! The library's pool of adapters on either device.

use std::{result, time::Duration};

use aril::pool::{self, AdapterId, Backend, Lease, PoolError, Snapshot, Source, StreamId};

/// The library's, on its first compute stream.
pub trait AdapterPool {
    fn register(&mut self, source: Source) -> result::Result<AdapterId, PoolError>;
    fn prepare(&mut self, ids: &[AdapterId]) -> result::Result<Vec<Lease>, PoolError>;
    fn commit(&mut self) -> result::Result<(), PoolError>;
    fn wait(&mut self, timeout: Duration) -> bool;
    fn snapshot(&self) -> Snapshot;
}

impl<B: Backend<Source = Source>> AdapterPool for pool::AdapterPool<B> {
    fn register(&mut self, source: Source) -> result::Result<AdapterId, PoolError> {
        self.register(source)
    }

    fn prepare(&mut self, ids: &[AdapterId]) -> result::Result<Vec<Lease>, PoolError> {
        self.prepare(ids, StreamId::FIRST)
    }

    fn commit(&mut self) -> result::Result<(), PoolError> {
        self.commit(StreamId::FIRST)
    }

    fn wait(&mut self, timeout: Duration) -> bool {
        self.wait(timeout)
    }

    fn snapshot(&self) -> Snapshot {
        self.snapshot()
    }
}
