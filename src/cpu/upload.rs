//! Loading an adapter into a weight table: reserve, fill, commit.

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
    adapter::{
        ImageEntry, MIN_STAGING_BYTES, RowsEntry, SlotImage,
        layout::{RowIds, Rows},
    },
    error::{LoadError, SlotError},
    slots::{Bounds, Usage},
};

/// Bytes written between two calls of `progress`.
const PROGRESS_BYTES: usize = 4 << 20;
const _: () = assert!(PROGRESS_BYTES >= MIN_STAGING_BYTES);

/// The part of a table that its adapters refer to.
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

/// Room for an adapter in a table. Dropping it frees the room.
#[derive(Debug)]
#[must_use]
pub struct Reservation {
    pub(super) shared: Arc<Shared>,
    pub(super) bytes: usize,
    /// [Whose](SlotImage::adapter) image the room is for, if that is still to be written.
    adapter: Option<u64>,
}

/// What a GPU copies adapters through. The CPU needs nothing: [`WeightTable::staging`](super::WeightTable::staging)
/// makes one, so that one loader compiles for both.
#[derive(Debug, Default)]
pub struct Staging(());

/// A written adapter that is not in a slot yet. Dropping it frees its room.
#[derive(Debug)]
#[must_use]
pub struct Filled {
    pub(super) adapter: Adapter,
}

/// A written adapter, in a slot or not.
pub(crate) struct Packed {
    /// Elements of the table's type. `f32` gives sufficient alignment for all of them.
    block: Vec<f32>,
    entries: Vec<Option<ImageEntry>>,
    rows: Vec<RowsEntry>,
    image_bytes: usize,
    max_rank: usize,
}

/// An adapter in a slot. The last step that uses it frees the room.
#[derive(Debug)]
pub(super) struct Adapter {
    pub(super) packed: Arc<Packed>,
    pub(super) room: Reservation,
}

impl Arena {
    pub(super) fn new(bytes: usize) -> Self {
        Self { bytes, used: 0.into() }
    }

    /// Gives back `bytes`.
    pub(super) fn free(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Takes `bytes`, or returns how many are free.
    pub(super) fn take(&self, bytes: usize) -> Result<(), usize> {
        let taken = |used: usize| used.checked_add(bytes).filter(|&used| used <= self.bytes);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken)
            .map(drop)
            .map_err(|used| self.bytes.saturating_sub(used))
    }

    pub(super) fn usage(&self) -> Usage {
        let used = self.used.load(Ordering::Relaxed);
        Usage { capacity: self.bytes, used, largest_gap: self.bytes.saturating_sub(used) }
    }
}

impl Reservation {
    /// Reserves room for an image that matches the table.
    pub(super) fn new(shared: &Arc<Shared>, image: &SlotImage<'_>) -> Result<Self, LoadError> {
        shared.bounds.check_image(image)?;
        let bytes = image.bytes();
        shared.arena.take(bytes).map_err(|largest_gap| LoadError::Full { bytes, largest_gap })?;
        Ok(Self { shared: Arc::clone(shared), bytes, adapter: Some(image.adapter()) })
    }

    /// Room in a table whose pool has counted the bytes. A step may still have the adapter that was there before.
    pub(super) fn uncounted(shared: &Arc<Shared>, bytes: usize) -> Self {
        shared.arena.used.fetch_add(bytes, Ordering::Relaxed);
        Self { shared: Arc::clone(shared), bytes, adapter: None }
    }

    /// Size of the room, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Writes an adapter into the room, on rayon's threads.
    ///
    /// # Errors
    /// [`LoadError`] if a weight has no finite value in the table's element type, or the image is not that of the
    /// adapter that the room was reserved for.
    pub fn fill(self, image: &SlotImage<'_>, staging: &mut Staging) -> Result<Filled, LoadError> {
        self.fill_with_progress(image, staging, |_| ())
    }

    /// Like [`fill`](Self::fill), and calls `progress` with the number of bytes written so far.
    ///
    /// # Errors
    /// As for `fill`.
    pub fn fill_with_progress(
        self,
        image: &SlotImage<'_>,
        _staging: &mut Staging,
        progress: impl FnMut(usize),
    ) -> Result<Filled, LoadError> {
        self.shared.bounds.check_image(image)?;
        let (bytes, reserved) = (image.bytes(), self.bytes);
        if (Some(image.adapter()), bytes) != (self.adapter, reserved) {
            return Err(SlotError::OtherImage { bytes, reserved }.into());
        }
        let packed = Arc::new(Packed::new(image, progress)?);
        Ok(Filled { adapter: Adapter { packed, room: self } })
    }
}

impl Filled {
    /// Whether the adapter is written, which it is.
    pub fn is_ready(&self) -> bool {
        true
    }

    /// Returns at once.
    ///
    /// # Errors
    /// None; the GPU's has some.
    pub fn wait(&self) -> Result<(), LoadError> {
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.shared.arena.free(self.bytes);
    }
}

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packed").field("bytes", &self.image_bytes).finish_non_exhaustive()
    }
}

impl Packed {
    /// Writes an image, and calls `progress` with the number of bytes written so far.
    pub(super) fn new(image: &SlotImage<'_>, mut progress: impl FnMut(usize)) -> Result<Self, LoadError> {
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
        Ok(Self { block, entries, rows: image.rows().to_vec(), image_bytes: image.bytes(), max_rank: image.max_rank() })
    }

    /// Size of the image, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.image_bytes
    }

    /// The largest rank.
    pub(super) fn max_rank(&self) -> usize {
        self.max_rank
    }

    /// The factors at a descriptor-table entry.
    pub(super) fn factors<T: Element>(&self, entry: usize) -> Option<Factors<'_, T>> {
        Some(Factors::new(bytemuck::cast_slice(&self.block), self.entries[entry].as_ref()?))
    }

    /// The trained rows at a descriptor-table entry, of `hidden` features.
    pub(super) fn rows<T: Element>(&self, entry: usize, hidden: usize) -> Option<TrainedRows<'_, T>> {
        let &RowsEntry { ids_elems, rows_elems, count, .. } = self.rows.iter().find(|rows| rows.entry == entry)?;
        let block: &[T] = bytemuck::cast_slice(&self.block);
        Some(TrainedRows { ids: &block[ids_elems..], rows: &block[rows_elems..], layout: Rows { count, hidden } })
    }
}

/// Trained rows in a block.
pub(super) struct TrainedRows<'a, T> {
    ids: &'a [T],
    rows: &'a [T],
    layout: Rows,
}

impl<T: Element> TrainedRows<'_, T> {
    /// The number of rows.
    pub(super) fn count(&self) -> usize {
        self.layout.count
    }

    /// The id of a row, relative to the rank's first row.
    pub(super) fn id(&self, row: usize) -> usize {
        let at = RowIds { count: self.layout.count }.at(row);
        let id: &[u8] = bytemuck::cast_slice(&self.ids[at..at + 2]);
        bytemuck::pod_read_unaligned::<u32>(&id[..size_of::<u32>()]) as usize
    }

    /// The row of an id.
    pub(super) fn find(&self, id: usize) -> Option<usize> {
        let (mut first, mut end) = (0, self.count());
        while first < end {
            let middle = first.midpoint(end);
            if self.id(middle) < id { first = middle + 1 } else { end = middle }
        }
        (first < self.count() && self.id(first) == id).then_some(first)
    }

    /// A row.
    pub(super) fn row(&self, row: usize) -> &[T] {
        &self.rows[self.layout.at(row, 0)..][..self.layout.hidden]
    }
}
