//! The library's pool of adapters on either device.

use std::{result, time::Duration};

use aril::{
    cpu,
    pool::{AdapterId, Lease, PoolError, Snapshot, Source, StreamId},
};

/// `aril::{cpu, cuda}::AdapterPool`, on its first compute stream.
pub(crate) trait AdapterPool {
    fn register(&mut self, source: Source) -> result::Result<AdapterId, PoolError>;
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
