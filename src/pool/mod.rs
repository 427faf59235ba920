//! The life of an adapter between its files and a slot.
//!
#![doc = include_str!("../docs/pool.md")]

mod adapter_pool;
mod backend;
mod config;
mod core;
mod counters;
mod error;
mod id;
mod lease;
mod load;
mod loaders;
#[cfg(feature = "metrics")]
mod metrics;
mod simulated;
mod source;
mod stream;
mod version;

pub use self::{
    adapter_pool::AdapterPool,
    backend::Backend,
    config::PoolConfig,
    counters::{Counters, Residency, Snapshot, Tier},
    error::PoolError,
    id::{AdapterId, CacheNamespace},
    lease::Lease,
    load::Load,
    simulated::{Simulated, SimulatedPool, Work},
    source::Source,
    stream::StreamId,
    version::Version,
};
pub(crate) use self::{
    adapter_pool::slot_at,
    backend::{Call, Copy, Read},
    core::{Granted, Limits},
    loaders::{HostTier, arena_bytes},
};
