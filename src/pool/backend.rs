use std::{ops::Range, time::Duration};

use super::{AdapterId, PoolError, StreamId, core::Granted};
use crate::error::LoadError;

/// The memory and the streams of an [`AdapterPool`](super::AdapterPool): the pool decides, and its backend carries it out. No call waits,
/// except [`next_read`](Self::next_read) with a time.
///
/// Nobody else can implement it, because its arguments have no public names.
pub trait Backend {
    /// What an adapter is registered by.
    type Source;

    /// Size of an adapter's block in bytes, and whether it is exact. Otherwise it is an upper bound.
    #[doc(hidden)]
    fn size(&self, source: &Self::Source) -> Result<(usize, bool), PoolError>;

    /// The adapter is registered.
    #[doc(hidden)]
    fn add(&mut self, id: AdapterId, source: Self::Source);

    /// The adapter is registered no longer. It is not read again.
    #[doc(hidden)]
    fn remove(&mut self, id: AdapterId);

    /// Starts to read an adapter into host memory. [`next_read`](Self::next_read) returns its end.
    ///
    /// With a copy, each part of the adapter is enqueued as for [`copy`](Self::copy) once it is packed, until the copy is
    /// [revoked](Self::revoke). A read that fails or whose copy was revoked ends when the parts have run. Returns whether parts will be
    /// copied.
    #[doc(hidden)]
    fn read(&mut self, id: AdapterId, to: Range<usize>, copy: Option<&Copy>) -> bool;

    /// A read that has ended since the last call. Blocks this thread for up to a time, if one is given.
    #[doc(hidden)]
    fn next_read(&mut self, wait: Option<Duration>) -> Option<Read>;

    /// Whether a read can copy an adapter part by part.
    #[doc(hidden)]
    fn copies_parts(&self) -> bool;

    /// Enqueues no further part of a copy that a read makes. Does nothing and returns `false` if all of them are.
    #[doc(hidden)]
    fn revoke(&mut self, copy: &Copy) -> bool;

    /// The read that makes this copy has ended well: all of its parts are enqueued. [`next_copied`](Self::next_copied) returns their end.
    #[doc(hidden)]
    fn finish(&mut self, copy: &Copy);

    /// Enqueues a copy on the transfer stream, after all launches that may read memory of [evicted](Self::evict) adapters.
    /// [`next_copied`](Self::next_copied) returns its end.
    ///
    /// # Errors
    /// [`LoadError`] if the copy cannot be enqueued. Nothing may be enqueued that writes to device memory.
    #[doc(hidden)]
    fn copy(&mut self, copy: &Copy) -> Result<(), LoadError>;

    /// The number of a copy that has ended since the last call.
    #[doc(hidden)]
    fn next_copied(&mut self) -> Option<u64>;

    /// Makes the adapter of a slot visible to later launches on a stream.
    #[doc(hidden)]
    fn point(&mut self, granted: Granted, stream: StreamId) -> Result<(), PoolError>;

    /// Whether slots can be emptied now.
    #[doc(hidden)]
    fn may_evict(&self) -> bool;

    /// The slot is empty, and its memory may be overwritten by later copies. Launches on it that were enqueued without a lease read
    /// the memory as it was, and later ones find no adapter.
    #[doc(hidden)]
    fn evict(&mut self, slot: usize);

    /// The adapter has left host memory.
    #[doc(hidden)]
    fn forget(&mut self, id: AdapterId);
}

/// A copy of an adapter from host memory to the device.
#[derive(Clone, Debug)]
#[expect(unnameable_types, reason = "of a sealed trait")]
pub struct Copy {
    pub(crate) id: AdapterId,
    /// Where the adapter is in host memory.
    pub(crate) from: Range<usize>,
    /// Where its block is in the device's arena.
    #[cfg_attr(not(any(test, feature = "cuda")), expect(dead_code, reason = "the CPU copies nothing"))]
    pub(crate) to: Range<usize>,
    pub(crate) slot: usize,
    /// Number of the copy. No two copies of a pool have the same.
    pub(crate) number: u64,
}

/// The end of a read.
#[derive(Debug)]
#[expect(unnameable_types, reason = "of a sealed trait")]
pub struct Read {
    pub(crate) id: AdapterId,
    pub(crate) time: Duration,
    /// The size of the adapter's block in bytes, at most the one registered.
    pub(crate) result: Result<usize, LoadError>,
}
