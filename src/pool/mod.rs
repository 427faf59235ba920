//! The life of an adapter between its files and a slot.
//!
#![doc = include_str!("../docs/pool.md")]

mod adapter_pool;
mod backend;
mod counters;
mod error;
mod handles;
mod ids;
mod loaders;
mod messages;
#[cfg(feature = "metrics")]
mod metrics;
mod source;
mod state;

pub use self::{
    adapter_pool::{AdapterPool, PoolConfig},
    backend::Backend,
    counters::{Counters, Residency, Snapshot, Tier},
    error::PoolError,
    handles::{Lease, Load, Version},
    ids::{AdapterId, CacheNamespace, StreamId},
    source::Source,
};
pub(crate) use self::{
    backend::Executor,
    loaders::{HostTier, arena_bytes},
    messages::{Call, Granted, ReadEnd, Transfer},
    state::Limits,
};
