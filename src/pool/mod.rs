//! The life of an adapter between its files and a slot.

mod core;
mod counters;
mod error;
mod id;
mod stream;
mod transfer;

pub use self::{
    counters::{Counters, Residency, Snapshot, Tier},
    error::PoolError,
    id::{AdapterId, CacheNamespace},
    stream::StreamId,
};
