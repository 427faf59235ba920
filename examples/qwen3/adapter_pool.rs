//! The library's pool of adapters on either device.

use std::{result, time::Duration};

use aril::{
    cpu,
    pool::{AdapterId, Lease, Outcome, PoolError, Residency, Snapshot, Source, StreamId},
};

/// `aril::{cpu, cuda}::AdapterPool`, on its first compute stream.
pub(crate) trait AdapterPool {
    fn register(&mut self, source: Source) -> result::Result<AdapterId, PoolError>;
    fn unregister(&mut self, id: AdapterId) -> result::Result<(), PoolError>;
    fn prefetch(&mut self, id: AdapterId) -> result::Result<(), PoolError>;
    fn retry(&mut self, id: AdapterId) -> result::Result<(), PoolError>;
    fn next_outcome(&mut self) -> Option<Outcome>;
    fn residency(&self, id: AdapterId) -> Option<Residency>;
    fn acquire(&mut self, id: AdapterId) -> result::Result<Lease, PoolError>;
    fn prepare(&mut self, ids: &[AdapterId]) -> result::Result<Vec<Lease>, PoolError>;
    fn commit(&mut self) -> result::Result<(), PoolError>;
    fn wait(&mut self, timeout: Duration) -> bool;
    fn snapshot(&self) -> Snapshot;
}

macro_rules! adapter_pool {
    ($pool:ty) => {
        impl AdapterPool for $pool {
            fn register(&mut self, source: Source) -> result::Result<AdapterId, PoolError> {
                <$pool>::register(self, source)
            }

            fn unregister(&mut self, id: AdapterId) -> result::Result<(), PoolError> {
                <$pool>::unregister(self, id)
            }

            fn prefetch(&mut self, id: AdapterId) -> result::Result<(), PoolError> {
                <$pool>::prefetch(self, id)
            }

            fn retry(&mut self, id: AdapterId) -> result::Result<(), PoolError> {
                <$pool>::retry(self, id)
            }

            fn next_outcome(&mut self) -> Option<Outcome> {
                <$pool>::next_outcome(self)
            }

            fn residency(&self, id: AdapterId) -> Option<Residency> {
                <$pool>::residency(self, id)
            }

            fn acquire(&mut self, id: AdapterId) -> result::Result<Lease, PoolError> {
                <$pool>::acquire(self, id, StreamId::FIRST)
            }

            fn prepare(&mut self, ids: &[AdapterId]) -> result::Result<Vec<Lease>, PoolError> {
                <$pool>::prepare(self, ids, StreamId::FIRST)
            }

            fn commit(&mut self) -> result::Result<(), PoolError> {
                <$pool>::commit(self, StreamId::FIRST)
            }

            fn wait(&mut self, timeout: Duration) -> bool {
                <$pool>::wait(self, timeout)
            }

            fn snapshot(&self) -> Snapshot {
                <$pool>::snapshot(self)
            }
        }
    };
}

adapter_pool!(cpu::AdapterPool);
#[cfg(feature = "cuda")]
adapter_pool!(aril::cuda::AdapterPool);
