//! What the state of a pool and its backend tell each other.

use std::{ops::Range, time::Duration};

use super::{AdapterId, StreamId};
use crate::{Slot, error::LoadError};

/// A lease that was granted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Granted {
    pub(crate) slot: usize,
    /// The slot with the adapter, as batches name it.
    pub(crate) content: Slot,
    /// Number of the copy that brought the adapter.
    pub(crate) number: u64,
    /// Whether the copy has not ended yet.
    pub(crate) is_copying: bool,
}

/// A call of a pool that its decisions depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call<'a> {
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
pub(crate) struct Transfer {
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
pub(crate) struct ReadEnd {
    pub(crate) id: AdapterId,
    pub(crate) time: Duration,
    /// What the ranks of a group know the adapter by that was read; 0 without a group.
    pub(crate) fingerprint: u64,
    pub(crate) result: Result<(), LoadError>,
}
