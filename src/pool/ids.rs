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
/// Every [`AdapterId`] has its own namespace, and so has the base model. A sequence whose adapter applies from a
/// position on ([`Invocation`](crate::adapter::Invocation)) has [another one](Self::invoked_at), whose blocks before
/// that position are [the base model's](Self::of_block). Namespaces of different processes are unrelated.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[doc(alias = "lora_name")]
pub struct CacheNamespace {
    /// 0 for the base model.
    version: u64,
    /// Position of the first token that the version applies to.
    start: u64,
}

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
        CacheNamespace { version: self.0.get(), start: 0 }
    }
}

impl CacheNamespace {
    /// The namespace of the base model.
    pub const BASE: Self = Self { version: 0, start: 0 };

    /// The namespace of a sequence whose tokens are the base model's before the position `start`, and the version's
    /// from there on. Where it is counts: behind other tokens of the base model, equal tokens have other keys and
    /// values.
    #[must_use]
    pub const fn invoked_at(self, start: usize) -> Self {
        Self { start: if self.version == 0 { 0 } else { start as u64 }, ..self }
    }

    /// The namespace of a block of such a sequence, which ends in front of the position `end`: the base model's if it
    /// ends before the version applies.
    ///
    /// ```
    /// # use aril::pool::{AdapterId, CacheNamespace};
    /// let namespace = AdapterId::unique().cache_namespace().invoked_at(40);
    /// let blocks = [16, 32, 48].map(|end| namespace.of_block(end));
    /// assert_eq!(blocks, [CacheNamespace::BASE, CacheNamespace::BASE, namespace]);
    /// ```
    #[must_use]
    pub const fn of_block(self, end: usize) -> Self {
        if end as u64 <= self.start { Self::BASE } else { self }
    }

    /// The version; `None` for the base model.
    pub const fn version(self) -> Option<AdapterId> {
        match NonZeroU64::new(self.version) {
            Some(version) => Some(AdapterId(version)),
            None => None,
        }
    }

    /// The namespace as numbers, to be hashed into a key.
    pub const fn get(self) -> [u64; 2] {
        [self.version, self.start]
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
