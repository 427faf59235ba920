//! Loading an adapter into a weight table: reserve, fill, commit.

#![expect(unsafe_code, reason = "copies to memory that it owns")]

use std::sync::Arc;

use cudarc::driver::CudaEvent;

use super::{LaunchError, OwnStream, Relaxed, Staging, arena::Arena, raw::Descriptor};
use crate::{
    adapter::SlotImage,
    arena::copies,
    error::{LoadError, SlotError},
    slots::Bounds,
};

/// Room for the factors of an adapter, and for its descriptors on their way to the table.
pub(super) type Room = copies::Room<OwnStream, Arena>;

/// Room for an adapter in a table. Any thread may fill it. Dropping it frees the room.
#[derive(Debug)]
#[must_use]
pub struct Reservation {
    pub(super) room: Room,
    pub(super) bounds: Bounds,
    pub(super) image_bytes: usize,
    /// [Whose](SlotImage::adapter) image the room is for; `None` for factors in device memory.
    pub(super) adapter: Option<u64>,
    /// Work that may still use the room.
    pub(super) waits: Vec<Arc<CudaEvent>>,
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

    /// Converts the adapter's weights and enqueues their copies on the staging's stream, also while the queue's stream
    /// is being captured. Blocks this thread while both staging buffers are being copied.
    ///
    /// # Errors
    /// [`LoadError`] if a weight has no finite value in the table's element type, the image is not that of the adapter
    /// that the room was reserved for, or the staging belongs to another context.
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
        let (bytes, reserved) = (image.bytes(), self.image_bytes);
        if (Some(image.adapter()), bytes) != (self.adapter, reserved) {
            return Err(SlotError::OtherImage { bytes, reserved }.into());
        }
        self.fill_by(
            image.max_rank(),
            staging,
            // SAFETY: the obligations of `fill_by`.
            |staging, block, _| unsafe { staging.copy_image(block, image, progress) },
            |block| Ok(Descriptor::row(image, block)),
        )
    }

    /// Enqueues the copies of factors, which `copy` enqueues on the staging's stream, and of descriptors. `copy` has
    /// the address of the block, which has the size of the image, and which nothing else uses until the copies have
    /// run. It has the address of the descriptors, too, for scratch memory: they are copied after it.
    pub(super) fn fill_by(
        mut self,
        max_rank: usize,
        staging: &mut Staging,
        copy: impl FnOnce(&mut Staging, u64, u64) -> Result<(), LoadError>,
        row: impl FnOnce(u64) -> Result<Vec<Descriptor>, LaunchError>,
    ) -> Result<Filled, LoadError> {
        let arena = Arc::clone(self.room.arena());
        let queue = arena.queue();
        queue.kernels().check_context("the staging", staging.context())?;
        queue.bind()?;
        for event in self.waits.drain(..) {
            staging.wait_for(&event)?;
        }
        let [block, row_at] = self.room.blocks().each_ref().map(|block| arena.address(block));
        let descriptors = row(block)?;
        // From here on, nothing frees the room under a copy: neither an error nor a panic of `copy`, which calls the
        // user's code.
        self.room.write(staging.begin(queue.new_event()?));
        copy(staging, block, row_at)?;
        // SAFETY: the room of the descriptors belongs to this reservation and has their size. The staging's stream
        // waits for its earlier uses, and later uses wait for the end of the copies.
        unsafe { staging.copy_bytes(row_at, bytemuck::cast_slice(&descriptors)) }?;
        self.room.end()?;
        Ok(Filled { reservation: self, max_rank })
    }
}

impl Filled {
    /// Whether the copies have finished.
    pub fn is_ready(&self) -> bool {
        let _relaxed = Relaxed::new();
        self.reservation.room.written().is_none_or(|written| written.is_complete())
    }

    /// Blocks this thread until the copies have finished. A commit after that does not delay any step.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] if the driver returns an error.
    pub fn wait(&self) -> Result<(), LaunchError> {
        let _relaxed = Relaxed::new();
        Ok(self.reservation.room.written().map_or(Ok(()), |written| written.synchronize())?)
    }
}
