use std::ops::Range;

use super::{PoolError, StreamId, core::Granted, transfer::Copy};
use crate::{adapter::SlotImage, error::LoadError, model::Model};

/// The memory and the streams of a pool.
pub(crate) trait Backend {
    /// An adapter in the host tier.
    type Packed: Send + 'static;
    /// Writes an adapter to the host tier, on loader threads.
    type Packer: Send + 'static;

    /// What the block of an adapter has beside the image, in bytes.
    fn row_bytes(model: &Model) -> usize;

    /// As [`Transfer::copies_parts`](super::transfer::Transfer::copies_parts).
    fn copies_parts(&self) -> bool;

    /// The packer of a read, which makes this copy. Returns whether it does.
    fn packer(&mut self, copy: Option<&Copy>) -> (Self::Packer, bool);

    /// Writes an image to its place in the host tier, which has the size of its block. Nothing else uses the place meanwhile.
    ///
    /// If it fails, or what it returns is dropped before it is [sealed](Self::seal), no part of the copy is on its way any more.
    fn pack(packer: Self::Packer, image: &SlotImage<'_>, to: Range<usize>) -> Result<Self::Packed, LoadError>;

    /// The adapter is the one that was asked for, on the loader thread. If its copy was revoked, waits for its parts.
    fn seal(packed: Self::Packed) -> Result<Self::Packed, LoadError>;

    /// As [`Transfer::revoke`](super::transfer::Transfer::revoke).
    fn revoke(&mut self, copy: &Copy) -> bool;

    /// As [`Transfer::finish`](super::transfer::Transfer::finish).
    fn finish(&mut self, packed: &Self::Packed, copy: &Copy);

    /// As [`Transfer::copy`](super::transfer::Transfer::copy).
    fn copy(&mut self, packed: &mut Self::Packed, copy: &Copy) -> Result<(), LoadError>;

    /// The number of a copy that has ended since the last call.
    fn next_copied(&mut self) -> Option<u64>;

    /// Makes the adapter of a slot visible to later launches on a stream.
    fn point(&mut self, granted: Granted, stream: StreamId) -> Result<(), PoolError>;

    /// As [`Transfer::may_evict`](super::transfer::Transfer::may_evict).
    fn may_evict(&self) -> bool;

    /// The slot is empty.
    fn evict(&mut self, slot: usize);
}
