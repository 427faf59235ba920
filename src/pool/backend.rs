//! What a pool asks of the memory and the streams that it manages.

use std::{ops::Range, time::Duration};

use super::{AdapterId, PoolError, StreamId, core::Granted};
use crate::{
    Slot,
    error::{LoadError, OperandError},
    model::TpRank,
};

/// The memory and the streams of an [`AdapterPool`](super::AdapterPool): the pool decides, and its backend carries it out. No call waits for
/// a file or for the device, except [`notice`](Self::notice) with a time.
///
/// Nobody else can implement it, because its arguments have no public names.
pub trait Backend {
    /// What an adapter is registered by.
    type Source;
    /// A table whose slots the pool fills.
    type Weights;
    /// The batch of a step.
    type Batch<'a>;
    /// The workspace of a step.
    type Workspace;
    /// A step.
    type Step<'a>
    where
        Self: 'a;
    /// Why a step is refused.
    type Error: From<OperandError>;

    /// Whether the pool can go on.
    #[doc(hidden)]
    fn check(&self) -> Result<(), PoolError> {
        Ok(())
    }

    /// Takes note of a call of the pool, before its effects.
    #[doc(hidden)]
    fn called(&mut self, _call: Call<'_>) {}

    /// The rank of the model.
    #[doc(hidden)]
    fn tp(&self) -> TpRank {
        TpRank::SINGLE
    }

    /// The source for this backend's rank of a group, of one for any rank. Its reads have fingerprints.
    #[doc(hidden)]
    fn shard(&self, source: &Self::Source) -> Result<Self::Source, LoadError>
    where
        Self::Source: Clone,
    {
        Ok(source.clone())
    }

    /// An adapter is registered. Returns the size of its block in bytes.
    #[doc(hidden)]
    fn add(&mut self, id: AdapterId, source: Self::Source) -> Result<usize, PoolError>;

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

    /// Takes note of reads and copies that have ended. Blocks this thread until a read ends or for up to a time, if one is given.
    #[doc(hidden)]
    fn notice(&mut self, wait: Option<Duration>);

    /// A read that has ended.
    #[doc(hidden)]
    fn next_read(&mut self) -> Option<Read>;

    /// Whether a read can copy an adapter part by part.
    #[doc(hidden)]
    fn copies_parts(&self) -> bool;

    /// Enqueues no further part of a copy that a read makes. Does nothing and returns `false` if all of them are.
    #[doc(hidden)]
    fn revoke(&mut self, copy: &Copy) -> bool;

    /// A complete copy of a read that could not be [revoked](Self::revoke) has another end than to be [finished](Self::finish): its slot and
    /// its block are others' now. Returns whether [`next_copied`](Self::next_copied) will return its end.
    #[doc(hidden)]
    fn abandon(&mut self, copy: &Copy) -> bool;

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

    /// The number of a copy that has ended.
    #[doc(hidden)]
    fn next_copied(&mut self) -> Option<u64>;

    /// Blocks this thread until all copies have run.
    #[doc(hidden)]
    fn settle(&mut self);

    /// Makes the adapters of slots visible to later launches on a stream.
    ///
    /// # Errors
    /// [`PoolError`] if that cannot be enqueued for all of them. No step may use them then.
    #[doc(hidden)]
    fn point(&mut self, granted: &[Granted], stream: StreamId) -> Result<(), PoolError>;

    /// Whether slots can be emptied now.
    #[doc(hidden)]
    fn may_evict(&mut self) -> bool;

    /// The slot is empty, and its memory may be overwritten by later copies. Launches on it that were enqueued without a lease read
    /// the memory as it was, and later ones find no adapter.
    #[doc(hidden)]
    fn evict(&mut self, slot: usize);

    /// The adapter has left host memory.
    #[doc(hidden)]
    fn forget(&mut self, id: AdapterId);

    /// The table of a stream; `None` if it is not one of the pool's.
    #[doc(hidden)]
    fn weights(&self, stream: StreamId) -> Option<&Self::Weights>;

    /// The slots of a batch, as far as the host knows them.
    #[doc(hidden)]
    fn slots<'b>(batch: &'b Self::Batch<'_>) -> &'b [Slot];

    /// Starts a step, whose slots are checked afterwards.
    #[doc(hidden)]
    fn step<'a>(
        &'a self,
        stream: StreamId,
        batch: &Self::Batch<'a>,
        workspace: &'a mut Self::Workspace,
    ) -> Result<Self::Step<'a>, Self::Error>;
}

/// A call of a pool that its decisions depend on.
#[derive(Clone, Copy, Debug)]
#[expect(unnameable_types, reason = "of a sealed trait")]
pub enum Call<'a> {
    Unregister(AdapterId),
    Prefetch(AdapterId),
    Retry(AdapterId),
    Pin(AdapterId, bool),
    Prepare(&'a [AdapterId], StreamId),
    EndStep(StreamId),
    /// A lease of the slot has ended.
    Release(usize, StreamId),
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
    /// What the ranks of a group know the adapter by that was read; 0 without a group.
    pub(crate) fingerprint: u64,
    pub(crate) result: Result<(), LoadError>,
}
