//! Loading an adapter into a weight table: reserve, fill, commit.

#![expect(unsafe_code, reason = "copies to memory that it owns")]

use std::sync::Arc;

use cudarc::driver::CudaEvent;

use super::{HostAdapter, LaunchError, Staging, arena::Arena, capturing::Relaxed, raw::Descriptor};
use crate::{
    adapter::SlotImage,
    blocks::Block,
    error::{LoadError, SlotError},
    residency::Bounds,
};

/// Room for an adapter in a table. Any thread may fill it. Dropping it frees the room.
#[derive(Debug)]
#[must_use]
pub struct Reservation {
    pub(super) arena: Arc<Arena>,
    pub(super) bounds: Bounds,
    /// For the factors, and for the descriptors on their way to the table. `None` once they belong to a slot.
    pub(super) rooms: Option<[Block; 2]>,
    pub(super) image_bytes: usize,
    /// Work that may still use the room.
    pub(super) waits: Vec<Arc<CudaEvent>>,
    /// The last work that writes to the room.
    pub(super) written: Option<Arc<CudaEvent>>,
}

/// An adapter whose copies to the device are enqueued, and which is not in a slot yet. Dropping it frees its room.
#[derive(Debug)]
#[must_use]
pub struct Filled {
    pub(super) reservation: Reservation,
    pub(super) max_rank: usize,
}

impl Reservation {
    /// Size of the image that the room was reserved for, in bytes.
    pub fn bytes(&self) -> usize {
        self.image_bytes
    }

    /// Converts the adapter's weights and enqueues their copies on the staging's stream, also while the queue's stream is being captured.
    /// Blocks this thread while both staging buffers are being copied.
    ///
    /// # Errors
    /// [`LoadError`] if a weight has no finite value in the table's element type, the image is not the one that the room was
    /// reserved for, or the staging belongs to another context.
    pub fn fill(self, image: &SlotImage<'_>, staging: &mut Staging) -> Result<Filled, LoadError> {
        self.fill_with_progress(image, staging, |_| ())
    }

    /// Like [`fill`](Self::fill), and calls `progress` with the number of bytes whose copies have been enqueued.
    ///
    /// # Errors
    /// As for `fill`.
    pub fn fill_with_progress(
        self,
        image: &SlotImage<'_>,
        staging: &mut Staging,
        progress: impl FnMut(usize),
    ) -> Result<Filled, LoadError> {
        self.bounds.check_image(image)?;
        self.expect_size(image.bytes())?;
        self.fill_by(
            image.max_rank(),
            staging,
            // SAFETY: the obligations of `fill_by`.
            |staging, block| unsafe { staging.copy_image(block, image, progress) },
            |block| Descriptor::row(image, block),
        )
    }

    /// Enqueues the copy of an adapter in page-locked memory, which the caller keeps until it has [waited](Filled::wait) for it.
    pub(super) fn fill_packed(self, packed: &HostAdapter, staging: &mut Staging) -> Result<Filled, LoadError> {
        self.expect_size(packed.bytes)?;
        let (memory, range) = packed.place();
        self.fill_by(
            packed.max_rank,
            staging,
            // SAFETY: the obligations of `fill_by`. The caller keeps the adapter, which nothing writes to.
            |staging, block| unsafe { staging.copy_part(block, memory, range) },
            |block| packed.row(block),
        )
    }

    /// Rejects an image that the room was not reserved for.
    fn expect_size(&self, bytes: usize) -> Result<(), SlotError> {
        let reserved = self.image_bytes;
        if bytes == reserved { Ok(()) } else { Err(SlotError::OtherImage { bytes, reserved }) }
    }

    /// Enqueues the copies of factors, which `copy` enqueues on the staging's stream, and of descriptors. `copy` has the address of the
    /// block, which has the size of the image, and which nothing else uses until the copies have run.
    fn fill_by(
        mut self,
        max_rank: usize,
        staging: &mut Staging,
        copy: impl FnOnce(&mut Staging, u64) -> Result<(), LoadError>,
        row: impl FnOnce(u64) -> Vec<Descriptor>,
    ) -> Result<Filled, LoadError> {
        let queue = self.arena.queue();
        queue.kernels().check_context("the staging", staging.context())?;
        queue.bind()?;
        for event in self.waits.drain(..) {
            staging.wait_for(&event)?;
        }
        let written = queue.new_event()?;
        let [block, row_at] = self.rooms().each_ref().map(|room| self.arena.address(room));
        let descriptors = row(block);
        let copied = copy(staging, block)
            // SAFETY: the allocation belongs to this reservation and has the copy's size. The staging stream waits for its earlier uses,
            // and later uses wait for `written`.
            .and_then(|()| unsafe { staging.copy_bytes(row_at, bytemuck::cast_slice(&descriptors)) });
        let recorded = staging.record(&written);
        self.written = Some(Arc::new(written));
        copied?;
        recorded?;
        Ok(Filled { reservation: self, max_rank })
    }
}

impl Reservation {
    pub(super) fn rooms(&self) -> &[Block; 2] {
        self.rooms.as_ref().expect("a reservation has its rooms until it is committed")
    }

    pub(super) fn take_rooms(&mut self) -> [Block; 2] {
        self.rooms.take().expect("a reservation has its rooms until it is committed")
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(rooms) = self.rooms.take() {
            self.arena.give_back(rooms, self.written.take());
        }
    }
}

impl Filled {
    /// Whether the copies have finished.
    pub fn is_ready(&self) -> bool {
        let _relaxed = Relaxed::new();
        self.reservation.written.as_ref().is_none_or(|written| written.is_complete())
    }

    /// Blocks this thread until the copies have finished. A commit after that does not delay any step.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] if the driver returns an error.
    pub fn wait(&self) -> Result<(), LaunchError> {
        let _relaxed = Relaxed::new();
        Ok(self.reservation.written.as_ref().map_or(Ok(()), |written| written.synchronize())?)
    }
}
