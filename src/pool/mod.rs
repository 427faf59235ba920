//! The life of an adapter between its files and a slot.
//!
#![doc = include_str!("../docs/pool.md")]

mod adapter_pool;
mod backend;
mod config;
mod core;
mod counters;
mod error;
mod handles;
mod id;
mod loaders;
#[cfg(feature = "metrics")]
mod metrics;
mod simulated;
mod source;

pub use self::{
    adapter_pool::AdapterPool,
    backend::Backend,
    config::PoolConfig,
    counters::{Counters, Residency, Snapshot, Tier},
    error::PoolError,
    handles::{Lease, Load, Version},
    id::{AdapterId, CacheNamespace, StreamId},
    simulated::{Simulated, SimulatedPool, Work},
    source::Source,
};
pub(crate) use self::{
    adapter_pool::slot_at,
    backend::{Call, Copy, Read},
    core::{Granted, Limits},
    loaders::{HostTier, arena_bytes},
};
