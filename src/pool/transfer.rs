use std::ops::Range;

use super::{AdapterId, StreamId};
use crate::error::LoadError;

/// What a pool decides and a backend does. No call waits.
pub(crate) trait Transfer {
    /// Starts to read an adapter into host memory. [`Core::has_read`](super::Core::has_read) takes the result.
    ///
    /// With a copy, each part of the adapter is enqueued as for [`copy`](Self::copy) once it is packed, until the copy is
    /// [revoked](Self::revoke). A read that fails or whose copy was revoked ends when the parts have run. Returns whether parts will be
    /// copied.
    fn read(&mut self, id: AdapterId, to: Range<usize>, copy: Option<&Copy>) -> bool;

    /// Whether a read can copy an adapter part by part.
    fn copies_parts(&self) -> bool;

    /// Enqueues no further part of a copy that a read makes. Does nothing and returns `false` if all of them are.
    fn revoke(&mut self, copy: &Copy) -> bool;

    /// The read that makes this copy has ended well: all of its parts are enqueued.
    /// [`Core::has_copied`](super::Core::has_copied) takes note of their end.
    fn finish(&mut self, copy: &Copy);

    /// Enqueues a copy on the transfer stream, after all launches that may read memory of [evicted](Self::evict) adapters.
    /// [`Core::has_copied`](super::Core::has_copied) takes note of its end.
    ///
    /// # Errors
    /// [`LoadError`] if the copy cannot be enqueued. Nothing may be enqueued that writes to device memory.
    fn copy(&mut self, copy: &Copy) -> Result<(), LoadError>;

    /// Steps of a stream may no longer use a slot.
    fn close(&mut self, slot: usize, stream: StreamId);

    /// Whether slots can be emptied now.
    fn may_evict(&self) -> bool;

    /// The slot is empty, and its memory may be overwritten by later copies. Launches on it that were enqueued without a lease read
    /// the memory as it was, and later ones find no adapter.
    fn evict(&mut self, slot: usize);

    /// The adapter has left host memory.
    fn forget(&mut self, id: AdapterId);
}

/// A copy of an adapter from host memory to the device.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
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
