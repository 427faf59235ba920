//! The page-locked buffers through which a table copies adapters.

#![expect(unsafe_code, reason = "copies on a stream that it owns")]

use std::{
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::{CudaContext, CudaEvent};

use super::{LaunchError, OwnStream, Pinned, Queue, raw::Stream};
use crate::{
    adapter::{MIN_STAGING_BYTES, SlotImage},
    arena::copies::{Copies, CopyStream as _},
    error::LoadError,
};

/// Size of each buffer.
const BUFFER_BYTES: usize = 8 << 20;
const _: () = assert!(BUFFER_BYTES >= MIN_STAGING_BYTES);

/// Copies adapters to the device on a stream that it owns, through two page-locked buffers of 8 MiB: one is filled
/// while the other is copied. Use one per loader thread, for all its loads: making or dropping one holds up the
/// driver's calls of all threads for milliseconds.
#[derive(Debug)]
pub struct Staging {
    // Declared before the stream: dropping them waits for their copies.
    buffers: [Pinned; 2],
    next: usize,
    stream: Arc<OwnStream>,
}

impl Staging {
    /// Allocates the buffers in the context of `queue`.
    ///
    /// # Errors
    /// [`LaunchError`] if page-locked memory is exhausted.
    pub fn new(queue: &Queue) -> Result<Self, LaunchError> {
        queue.bind()?;
        let buffer = || Pinned::new(BUFFER_BYTES);
        let stream = Arc::new(OwnStream::new(queue)?);
        Ok(Self { buffers: [buffer()?, buffer()?], next: 0, stream })
    }

    pub(super) fn context(&self) -> &Arc<CudaContext> {
        self.stream.context()
    }

    /// The stream of the copies.
    pub(super) fn raw(&self) -> Stream {
        self.stream.raw()
    }

    /// Blocks this thread until the copies so far have run.
    pub(super) fn synchronize(&self) -> Result<(), LaunchError> {
        self.stream.synchronize()
    }

    /// Makes later copies wait for an event, on the device.
    pub(super) fn wait_for(&mut self, event: &CudaEvent) -> Result<(), LaunchError> {
        self.stream.wait_for(event)
    }

    /// Copies that are about to be enqueued. The event is recorded behind the last one.
    pub(super) fn begin(&mut self, end: CudaEvent) -> Copies<OwnStream> {
        Copies::begin(&self.stream, end)
    }

    /// Writes an image piece by piece and enqueues the copies, so that the host never holds all of it. Blocks this
    /// thread while both buffers are being copied.
    ///
    /// # Safety
    /// `to` is the address of [`SlotImage::bytes`] bytes of device memory in the staging's context. They stay mapped
    /// until the copies have run, and other work uses them only if it is ordered against the staging's stream.
    pub(super) unsafe fn copy_image(
        &mut self,
        to: u64,
        image: &SlotImage<'_>,
        mut progress: impl FnMut(usize),
    ) -> Result<(), LoadError> {
        for piece in image.pieces(BUFFER_BYTES) {
            let range = piece.range();
            // SAFETY: the caller's obligations.
            unsafe { self.copy(to + range.start as u64, range.len(), |bytes| Ok(piece.write_to(bytes)?)) }?;
            progress(range.end);
        }
        Ok(())
    }

    /// Enqueues a copy of `bytes`, through the buffers.
    ///
    /// # Safety
    /// As for [`copy_image`](Self::copy_image).
    pub(super) unsafe fn copy_bytes(&mut self, to: u64, bytes: &[u8]) -> Result<(), LoadError> {
        for (i, part) in bytes.chunks(BUFFER_BYTES).enumerate() {
            let fill = |buffer: &mut [u8]| {
                buffer.copy_from_slice(part);
                Ok(())
            };
            // SAFETY: the caller's obligations.
            unsafe { self.copy(to + (i * BUFFER_BYTES) as u64, part.len(), fill) }?;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`copy_image`](Self::copy_image).
    unsafe fn copy(
        &mut self,
        to: u64,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), LoadError>,
    ) -> Result<(), LoadError> {
        let stream = self.stream.raw();
        let buffer = &mut self.buffers[self.next];
        fill(&mut buffer.wait_bytes()?[..len])?;
        // SAFETY: the caller's obligations.
        unsafe { buffer.copy_to(to, len, stream) }?;
        self.next = 1 - self.next;
        Ok(())
    }
}

/// Stagings for the loads of a table. Each load has one to itself, and no lock while it packs: packing threads may take
/// up another load, and `progress` may load, too.
#[derive(Debug, Default)]
pub(super) struct Stagings {
    idle: Mutex<Vec<Staging>>,
}

/// The most idle stagings: while the copies of one load run, another one packs. With more loads at a time, the copies
/// share one link, and a staging has 16 MiB of page-locked memory.
const MAX_IDLE: usize = 2;

impl Stagings {
    /// With a staging for the first load, because to allocate one beside a step delays the step.
    pub(super) fn with_one(queue: &Queue) -> Result<Self, LaunchError> {
        Ok(Self { idle: Mutex::new(vec![Staging::new(queue)?]) })
    }

    /// An idle staging or, if there is none, a new one.
    pub(super) fn lend(&self, queue: &Queue) -> Result<Lent<'_>, LaunchError> {
        let idle = self.lock().pop();
        let staging = idle.map_or_else(|| Staging::new(queue), Ok)?;
        Ok(Lent { stagings: self, staging: Some(staging) })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Staging>> {
        // A panic cannot leave the list half-changed.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A staging that is returned when this is dropped.
#[derive(Debug)]
pub(super) struct Lent<'a> {
    stagings: &'a Stagings,
    staging: Option<Staging>,
}

impl Deref for Lent<'_> {
    type Target = Staging;

    fn deref(&self) -> &Staging {
        self.staging.as_ref().expect("it is lent until it is dropped")
    }
}

impl DerefMut for Lent<'_> {
    fn deref_mut(&mut self) -> &mut Staging {
        self.staging.as_mut().expect("it is lent until it is dropped")
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let mut idle = self.stagings.lock();
        if idle.len() < MAX_IDLE {
            idle.extend(self.staging.take());
        }
        // One that is not kept waits for its copies, without the lock.
        drop(idle);
    }
}
