use std::ops::Range;

use super::{PoolError, StreamId, core::Granted, transfer::Copy};
use crate::{adapter::SlotImage, error::LoadError, model::Model};

/// The memory and the streams of a pool.
pub(crate) trait Backend {
    /// An adapter in the host tier.
    type Packed: Send + 'static;
    /// Writes adapters to the host tier, on loader threads.
    type Packer: Clone + Send + 'static;

    /// What the block of an adapter has beside the image, in bytes.
    fn row_bytes(model: &Model) -> usize;

    fn packer(&self) -> Self::Packer;

    /// Writes an image to its place in the host tier, which has the size of its block. Nothing else uses the place meanwhile.
    fn pack(packer: &Self::Packer, image: &SlotImage<'_>, to: Range<usize>) -> Result<Self::Packed, LoadError>;

    /// As [`Transfer::copy`](super::transfer::Transfer::copy).
    fn copy(&mut self, packed: &mut Self::Packed, copy: &Copy) -> Result<(), LoadError>;

    /// The number of a copy that has ended since the last call.
    fn next_copied(&mut self) -> Option<u64>;

    /// Makes the adapter of a slot visible to later launches on a stream. Steps of the stream may use the slot until it is
    /// [closed](Self::close).
    fn lease(&mut self, granted: Granted, stream: StreamId) -> Result<(), PoolError>;

    /// As [`Transfer::close`](super::transfer::Transfer::close).
    fn close(&mut self, slot: usize, stream: StreamId);

    /// As [`Transfer::may_evict`](super::transfer::Transfer::may_evict).
    fn may_evict(&self) -> bool;

    /// The slot is empty.
    fn evict(&mut self, slot: usize);
}
