//! What a pool asks of the memory and the streams that it manages.

use std::{ops::Range, time::Duration};

use super::{
    AdapterId, PoolError, StreamId,
    messages::{Call, Granted, ReadEnd, Transfer},
};
use crate::{
    Slot,
    error::{LoadError, OperandError},
    model::TpRank,
};

/// The memory and the streams of an [`AdapterPool`](super::AdapterPool): the pool decides, and its backend carries it
/// out.
///
/// Nobody else can implement it: what a pool asks of its backend is private.
#[expect(private_bounds, reason = "seals the trait")]
pub trait Backend: Executor {
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

/// Carries out what a pool decides. No call waits for a file or for the device, except [`notice`](Self::notice) with a
/// time.
pub(crate) trait Executor {
    /// Whether the pool can go on.
    fn check(&self) -> Result<(), PoolError> {
        Ok(())
    }

    /// Takes note of a call of the pool, before its effects.
    fn called(&mut self, _call: Call<'_>) {}

    /// The rank of the model.
    fn tp(&self) -> TpRank {
        TpRank::SINGLE
    }

    /// The adapter is registered no longer. It is not read again.
    fn remove(&mut self, id: AdapterId);

    /// Starts to read an adapter into host memory. [`next_read`](Self::next_read) returns its end.
    ///
    /// With a copy, each part of the adapter is enqueued as for [`copy`](Self::copy) once it is packed, until the copy
    /// is [revoked](Self::revoke). A read that fails or whose copy was revoked ends when the parts have run. Returns
    /// whether parts will be copied.
    fn read(&mut self, id: AdapterId, to: Range<usize>, copy: Option<&Transfer>) -> bool;

    /// Takes note of reads and copies that have ended. Blocks this thread until a read ends or for up to a time, if one
    /// is given.
    fn notice(&mut self, wait: Option<Duration>);

    /// A read that has ended.
    fn next_read(&mut self) -> Option<ReadEnd>;

    /// Whether a read can copy an adapter part by part. If none can, the calls for such copies do nothing.
    fn copies_parts(&self) -> bool {
        false
    }

    /// Enqueues no further part of a copy that a read makes. Does nothing and returns `false` if all of them are.
    fn revoke(&mut self, _copy: &Transfer) -> bool {
        false
    }

    /// A complete copy of a read, which could not be [revoked](Self::revoke), is not [finished](Self::finish): its slot
    /// and its block have new owners. Returns whether [`next_copied`](Self::next_copied) will return its end.
    fn abandon(&mut self, _copy: &Transfer) -> bool {
        false
    }

    /// The read that makes this copy has ended well: all of its parts are enqueued. [`next_copied`](Self::next_copied)
    /// returns their end.
    fn finish(&mut self, _copy: &Transfer) {}

    /// Enqueues a copy on the transfer stream, after all launches that may read memory of [evicted](Self::evict)
    /// adapters. [`next_copied`](Self::next_copied) returns its end.
    ///
    /// # Errors
    /// [`LoadError`] if the copy cannot be enqueued. Nothing may be enqueued that writes to device memory.
    fn copy(&mut self, copy: &Transfer) -> Result<(), LoadError>;

    /// The number of a copy that has ended.
    fn next_copied(&mut self) -> Option<u64>;

    /// Blocks this thread until all copies have run.
    fn settle(&mut self) {}

    /// Makes the adapters of slots visible to later launches on a stream.
    ///
    /// # Errors
    /// [`PoolError`] if that cannot be enqueued for all of them. No step may use them then.
    fn point(&mut self, _granted: &[Granted], _stream: StreamId) -> Result<(), PoolError> {
        Ok(())
    }

    /// Whether slots can be emptied now.
    fn may_evict(&mut self) -> bool {
        true
    }

    /// The slot is empty, and its memory may be overwritten by later copies. Launches on it that were enqueued without
    /// a lease read the memory as it was, and later ones find no adapter.
    fn evict(&mut self, slot: usize);

    /// The adapter has left host memory.
    fn forget(&mut self, id: AdapterId);
}
