//! Counters of pools, and where an adapter is.

use std::{sync::Arc, time::Duration};

use super::AdapterId;
use crate::{error::LoadError, slots::Usage};

/// What a pool has done since it was created. A lease of an adapter that is on the device at the first request is a
/// hit.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Counters {
    /// Leases of adapters that were on the device.
    pub hits: u64,
    /// Leases of adapters that were not.
    pub misses: u64,
    /// Leases whose stream waits for a copy.
    pub waits: u64,
    /// Batches refused with [`PoolError::Loading`](super::PoolError::Loading).
    pub loading: u64,
    /// Batches refused with [`PoolError::Full`](super::PoolError::Full).
    pub full: u64,
    /// Adapters evicted from the device for others.
    pub evictions: u64,
    /// Adapters copied to the device anew because the free memory was in pieces.
    pub moves: u64,
    /// Adapters evicted from the host tier for others.
    pub host_evictions: u64,
    /// Adapters read and packed into the host tier.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// The time that loader threads spent on reads, failed ones included.
    pub read_time: Duration,
    /// Copies to the device.
    pub copies: u64,
    /// Their bytes.
    pub copied_bytes: u64,
    /// Reads and copies that failed.
    pub failures: u64,
}

/// The state of a pool.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Snapshot {
    /// Registered adapters.
    pub adapters: usize,
    /// Adapters on the device, including those that are being copied there.
    pub resident: usize,
    /// Adapters that are being copied to the device.
    pub copying: usize,
    /// Adapters in the host tier, whether or not they are on the device.
    pub host: usize,
    /// Adapters that are being read.
    pub reading: usize,
    /// Adapters that wait for a read or for room on the device.
    pub waiting: usize,
    /// Leased adapters.
    pub leased: usize,
    /// Leases.
    pub leases: usize,
    /// Pinned adapters.
    pub pinned: usize,
    /// Memory of the device tier.
    pub device_memory: Usage,
    /// Memory of the host tier.
    pub host_memory: Usage,
    /// What the pool has done.
    pub counters: Counters,
}

/// The fastest tier that an adapter is in.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[non_exhaustive]
pub enum Tier {
    /// Its source alone: a directory, or tensors in memory.
    Source,
    /// Packed in host memory.
    Host,
    /// In a slot, or being copied to it.
    Device,
}

/// Where an adapter is.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Residency {
    /// The adapter.
    pub id: AdapterId,
    /// The fastest tier that it is in.
    pub tier: Tier,
    /// Index of its slot on the device. It may change once no lease is left.
    pub slot: Option<usize>,
    /// Whether it is in the host tier.
    pub in_host: bool,
    /// Size of its block in bytes.
    pub bytes: usize,
    /// Its leases.
    pub leases: usize,
    /// Whether it is pinned.
    pub is_pinned: bool,
    /// Why its last load failed, if it did. [`retry`](super::AdapterPool::retry) forgets it.
    pub failure: Option<Arc<LoadError>>,
}
