//! An adapter on its way into a weight table: room is reserved, filled, and then committed to a slot.

#![expect(unsafe_code, reason = "copies to memory of its own")]

use std::sync::Arc;

use cudarc::driver::CudaEvent;

use super::{
    LaunchError, Staging,
    arena::{Arena, Room},
    capturing::Relaxed,
    raw::Descriptor,
};
use crate::{
    adapter::SlotImage,
    error::{LoadError, SlotError},
    residency::Bounds,
};

/// Room for an adapter in a table. Dropping it gives the room back. May be filled by any thread.
#[derive(Debug)]
#[must_use]
pub struct Reservation {
    pub(super) arena: Arc<Arena>,
    pub(super) bounds: Bounds,
    /// For the block, and for its row of descriptors on the way to the table; until they are given to a slot or back.
    pub(super) rooms: Option<[Room; 2]>,
    pub(super) image_bytes: usize,
    /// Work that may still use the room.
    pub(super) waits: Vec<Arc<CudaEvent>>,
    /// The last work that writes it.
    pub(super) written: Option<Arc<CudaEvent>>,
}

/// An adapter on the device or on its way there, which no slot has yet. Dropping it gives the room back.
#[derive(Debug)]
#[must_use]
pub struct Filled {
    pub(super) reservation: Reservation,
    pub(super) max_rank: usize,
}

impl Reservation {
    /// Bytes of the image that it is for.
    pub fn bytes(&self) -> usize {
        self.image_bytes
    }

    /// Packs the adapter that the room was reserved for, and enqueues its copies on the staging's own stream, also while the queue's is
    /// being captured. Blocks this thread while both of the staging's buffers are being copied.
    ///
    /// # Errors
    /// If a weight cannot be represented, the image is another one, or the staging is of another context.
    pub fn fill(self, image: &SlotImage<'_>, staging: &mut Staging) -> Result<Filled, LoadError> {
        self.fill_with_progress(image, staging, |_| ())
    }

    /// As [`fill`](Self::fill), and calls `progress` with the bytes that are packed and enqueued, each time that there are more.
    ///
    /// # Errors
    /// As for `fill`.
    pub fn fill_with_progress(
        mut self,
        image: &SlotImage<'_>,
        staging: &mut Staging,
        progress: impl FnMut(usize),
    ) -> Result<Filled, LoadError> {
        self.bounds.check(image)?;
        if image.bytes() != self.image_bytes {
            return Err(SlotError::OtherImage { bytes: image.bytes(), reserved: self.image_bytes }.into());
        }
        let queue = self.arena.queue();
        queue.kernels().check_context("the staging", staging.context())?;
        queue.bind()?;
        for event in self.waits.drain(..) {
            staging.wait_for(&event)?;
        }
        let written = queue.new_event()?;
        let [block, row] = self.rooms().each_ref().map(|room| self.arena.address(room));
        let descriptors = Descriptor::row(image, block);
        // SAFETY: the rooms are this reservation's, and as large; the staging waits for what used them before, and what uses them
        // after waits for `written`.
        let copied = unsafe { staging.copy_image(block, image, progress) }
            // SAFETY: as above.
            .and_then(|()| unsafe { staging.copy_bytes(row, bytemuck::cast_slice(&descriptors)) });
        let recorded = staging.record(&written);
        self.written = Some(Arc::new(written));
        copied?;
        recorded?;
        Ok(Filled { reservation: self, max_rank: image.max_rank() })
    }
}

impl Reservation {
    pub(super) fn rooms(&self) -> &[Room; 2] {
        self.rooms.as_ref().expect("a reservation has its rooms until it is committed")
    }

    pub(super) fn take_rooms(&mut self) -> [Room; 2] {
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
    /// Whether the copies are done.
    pub fn is_ready(&self) -> bool {
        let _relaxed = Relaxed::new();
        self.reservation.written.as_ref().is_none_or(|written| written.is_complete())
    }

    /// Blocks this thread until the copies are done: what is committed then delays no step.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn wait(&self) -> Result<(), LaunchError> {
        let _relaxed = Relaxed::new();
        Ok(self.reservation.written.as_ref().map_or(Ok(()), |written| written.synchronize())?)
    }
}
