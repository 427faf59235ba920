//! The life of an adapter between its files and a slot.

mod id;

pub use id::{AdapterId, CacheNamespace};
