//! An adapter on its way into a weight table: room is reserved, filled, and then committed to a slot.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::factors::Factors;
use crate::{
    Element,
    adapter::{ImageEntry, MIN_STAGING_BYTES, SlotImage},
    error::{LoadError, SlotError},
    residency::{Bounds, Usage},
};

/// Bytes that are packed before progress is reported.
const PROGRESS_BYTES: usize = 4 << 20;
const _: () = assert!(PROGRESS_BYTES >= MIN_STAGING_BYTES);

/// What a table shares with its adapters, and so owns none of them.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) bounds: Bounds,
    pub(super) arena: Arena,
}

/// A budget of bytes.
#[derive(Debug)]
pub(super) struct Arena {
    pub(super) bytes: usize,
    pub(super) used: AtomicUsize,
}

/// Room for an adapter in a table. Dropping it gives the room back.
#[derive(Debug)]
#[must_use]
pub struct Reservation {
    pub(super) shared: Arc<Shared>,
    pub(super) bytes: usize,
}

/// An adapter in its room, which no slot has yet. Dropping it gives the room back.
#[derive(Debug)]
#[must_use]
pub struct Filled {
    pub(super) adapter: Adapter,
    pub(super) max_rank: usize,
}

/// An adapter's block. The room is given back with the last step that works on it.
pub(super) struct Adapter {
    /// Elements of the table's type, in memory aligned for any of them.
    block: Vec<f32>,
    entries: Vec<Option<ImageEntry>>,
    pub(super) room: Reservation,
}

impl Arena {
    /// Takes so many bytes, or says how many there are.
    fn take(&self, bytes: usize) -> Result<(), usize> {
        let taken = |used: usize| Some(used + bytes).filter(|&used| used <= self.bytes);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).map(drop).map_err(|used| self.bytes - used)
    }

    pub(super) fn usage(&self) -> Usage {
        let used = self.used.load(Ordering::Relaxed);
        Usage { capacity: self.bytes, used, largest_gap: self.bytes - used }
    }
}

impl Reservation {
    /// Takes room for an image, if it fits the table and there is some.
    pub(super) fn new(shared: &Arc<Shared>, image: &SlotImage<'_>) -> Result<Self, LoadError> {
        shared.bounds.check(image)?;
        let bytes = image.bytes();
        shared.arena.take(bytes).map_err(|largest_gap| LoadError::Full { bytes, largest_gap })?;
        Ok(Self { shared: Arc::clone(shared), bytes })
    }

    /// Bytes of the room.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Packs an adapter into the room, on rayon's threads.
    ///
    /// # Errors
    /// If a weight cannot be represented (NaN, or too large for the type), or the image does not fit the table or has another size than
    /// the room.
    pub fn fill(self, image: &SlotImage<'_>) -> Result<Filled, LoadError> {
        self.fill_with_progress(image, |_| ())
    }

    /// As [`fill`](Self::fill), and calls `progress` with the bytes that are done, each time that there are more.
    ///
    /// # Errors
    /// As for `fill`.
    pub fn fill_with_progress(
        self,
        image: &SlotImage<'_>,
        mut progress: impl FnMut(usize),
    ) -> Result<Filled, LoadError> {
        self.shared.bounds.check(image)?;
        if image.bytes() != self.bytes {
            return Err(SlotError::OtherImage { bytes: image.bytes(), reserved: self.bytes }.into());
        }
        let mut block = vec![0.0_f32; image.bytes().div_ceil(size_of::<f32>())];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut block);
        for piece in image.pieces(PROGRESS_BYTES) {
            piece.write_to(&mut bytes[piece.range()])?;
            progress(piece.range().end);
        }
        let mut entries = vec![None; image.num_entries()];
        for entry in image.entries() {
            entries[entry.entry] = Some(*entry);
        }
        Ok(Filled { adapter: Adapter { block, entries, room: self }, max_rank: image.max_rank() })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.shared.arena.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adapter").field("bytes", &self.room.bytes).finish_non_exhaustive()
    }
}

impl Adapter {
    /// The factors at a table entry, if any.
    pub(super) fn factors<T: Element>(&self, entry: usize) -> Option<Factors<'_, T>> {
        Some(Factors::new(bytemuck::cast_slice(&self.block), self.entries[entry].as_ref()?))
    }
}
