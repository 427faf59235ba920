use std::ops::Range;

use super::{AdapterId, StreamId};
use crate::error::LoadError;

/// What a pool decides and a backend does. No call waits.
pub(crate) trait Transfer {
    /// Starts to read an adapter into host memory. [`Core::has_read`](super::Core::has_read) takes the result.
    fn read(&mut self, id: AdapterId, to: Range<usize>);

    /// Enqueues a copy on the transfer stream, which first waits for these commits.
    /// [`Core::has_copied`](super::Core::has_copied) takes note of its end.
    ///
    /// # Errors
    /// [`LoadError`] if the copy cannot be enqueued. Nothing may be enqueued that writes to device memory.
    fn copy(&mut self, copy: &Copy, waits: &[Commit]) -> Result<(), LoadError>;

    /// The slot is empty, and its memory may be overwritten by later copies.
    fn evict(&mut self, slot: usize);

    /// The adapter has left host memory.
    fn forget(&mut self, id: AdapterId);
}

/// A copy of an adapter from host memory to the device.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    pub(crate) id: AdapterId,
    /// Where the adapter is in host memory.
    #[cfg_attr(not(any(test, feature = "cuda")), expect(dead_code, reason = "the CPU copies nothing"))]
    pub(crate) from: Range<usize>,
    /// Where its block is in the device's arena.
    #[cfg_attr(not(any(test, feature = "cuda")), expect(dead_code, reason = "the CPU copies nothing"))]
    pub(crate) to: Range<usize>,
    pub(crate) slot: usize,
    /// Number of the copy. No two copies of a pool have the same.
    pub(crate) number: u64,
}

/// The end of a step's launches on a stream: the `number`-th of that stream, from 1.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Commit {
    pub(crate) stream: StreamId,
    pub(crate) number: u64,
}
