//! The life of an adapter between its files and a slot.
//!
#![doc = include_str!("../docs/pool.md")]

mod adapter_pool;
mod backend;
mod core;
mod counters;
mod error;
mod handles;
mod loaders;
#[cfg(feature = "metrics")]
mod metrics;
mod source;

pub use self::{
    adapter_pool::{AdapterPool, PoolConfig},
    backend::Backend,
    counters::{Counters, Residency, Snapshot, Tier},
    error::PoolError,
    handles::{AdapterId, CacheNamespace, Lease, Load, StreamId, Version},
    source::Source,
};
pub(crate) use self::{
    backend::{Call, Copy, Read},
    core::{Granted, Limits},
    loaders::{HostTier, arena_bytes},
};
