//! The life of an adapter between its files and a slot.
//!
#![doc = include_str!("../docs/pool.md")]

mod api;
mod backend;
mod config;
mod core;
mod counters;
mod error;
mod id;
mod lease;
mod loaders;
#[cfg(feature = "metrics")]
mod metrics;
mod pooled;
mod simulated;
mod source;
mod stream;
mod transfer;

pub(crate) use self::{
    api::adapter_pool,
    backend::Backend,
    core::Granted,
    loaders::{Loaded, Loaders, packers_of},
    pooled::{Pool, arena_bytes, slot_at},
    transfer::Copy,
};
pub use self::{
    config::PoolConfig,
    counters::{Counters, Outcome, Residency, Snapshot, Tier},
    error::PoolError,
    id::{AdapterId, CacheNamespace},
    lease::Lease,
    simulated::{SimulatedPool, Work},
    source::Source,
    stream::StreamId,
};
