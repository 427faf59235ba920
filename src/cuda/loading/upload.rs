//! Loading an adapter into a weight table: reserve, fill, commit.

#![expect(unsafe_code, reason = "copies to memory that it owns")]

use std::sync::Arc;

use cudarc::driver::CudaEvent;

use super::{LaunchError, OwnStream, Packing, Relaxed, Staging, arena::Arena, raw::Descriptor};
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
    /// [Whose](SlotImage::adapter) image the room is for.
    pub(super) adapter: u64,
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
    /// is being captured. Blocks this thread while both staging buffers are being copied. Weights in the memory of this
    /// device ([`Readback`](super::Readback)) are converted there: blocks this thread until that has run.
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
        mut self,
        image: &SlotImage<'_>,
        staging: &mut Staging,
        mut progress: impl FnMut(usize),
    ) -> Result<Filled, LoadError> {
        self.bounds.check_image(image)?;
        let (bytes, reserved) = (image.bytes(), self.image_bytes);
        if (image.adapter(), bytes) != (self.adapter, reserved) {
            return Err(SlotError::OtherImage { bytes, reserved }.into());
        }
        let arena = Arc::clone(self.room.arena());
        let queue = arena.queue();
        queue.kernels().check_context("the staging", staging.context())?;
        queue.bind()?;
        let packing = Packing::new(image, queue);
        packing.as_ref().map_or(Ok(()), Packing::wait)?;
        for event in self.waits.drain(..) {
            staging.wait_for(&event)?;
        }
        let [block, row_at] = self.room.blocks().each_ref().map(|block| arena.address(block));
        // From here on, nothing frees the room under a copy: neither an error nor a panic of `progress`.
        self.room.write(staging.begin(queue.new_event()?));
        match packing {
            Some(packing) => {
                // SAFETY: the room has the image's size and, for the descriptors, more than four bytes, which are
                // written after this call. The staging's stream waits for the earlier uses of both, and later uses
                // wait for the end of the copies.
                unsafe { packing.pack(staging, block, row_at) }?;
                progress(bytes);
            }
            // SAFETY: as above.
            None => unsafe { staging.copy_image(block, image, progress) }?,
        }
        // SAFETY: as above.
        unsafe { staging.copy_bytes(row_at, bytemuck::cast_slice(&Descriptor::row(image, block))) }?;
        self.room.end()?;
        Ok(Filled { reservation: self, max_rank: image.max_rank() })
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
