//! Ids of adapters and of streams.

use std::{fmt, num::NonZeroU64};

use crate::unique::unique;

/// One version of an adapter: an adapter that is registered again, under the same name or with the same weights, has
/// another id. No id is used twice in a process.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[doc(alias = "lora_int_id")]
pub struct AdapterId(NonZeroU64);

/// Part of the key of an engine's prefix cache: KV blocks computed in one namespace are never valid in another one.
///
/// Every [`AdapterId`] has its own namespace, and so has the base model. Namespaces of different processes are
/// unrelated.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[doc(alias = "lora_name")]
pub struct CacheNamespace(u64);

impl AdapterId {
    /// An id that no adapter of this process has, for engines whose adapters are in another pool than an `AdapterPool`.
    pub fn unique() -> Self {
        Self(NonZeroU64::new(unique()).expect("a process does not count to 2^64"))
    }

    /// The id as a number, for logs.
    pub const fn get(self) -> u64 {
        self.0.get()
    }

    /// The prefix-cache namespace of this version.
    pub const fn cache_namespace(self) -> CacheNamespace {
        CacheNamespace(self.0.get())
    }
}

impl CacheNamespace {
    /// The namespace of the base model.
    pub const BASE: Self = Self(0);

    /// The namespace as a number, to be hashed into a key.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for AdapterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "adapter {}", self.0)
    }
}

/// A compute stream of a pool: one that steps are enqueued on. Streams of other pools are unrelated.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct StreamId(pub(crate) usize);

impl StreamId {
    /// The stream that the pool was created on.
    pub const FIRST: Self = Self(0);
}
