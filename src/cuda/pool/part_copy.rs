//! A copy of an adapter to the device in parts, for pools.

#![expect(unsafe_code, reason = "copies between memory that their owner keeps")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaEvent, result, sys};

use crate::{
    arena::copies::{Copies, CopyStream as _},
    cuda::{
        LaunchError, Queue,
        loading::Packing,
        stream::{OwnStream, Relaxed},
    },
    error::{LoadError, OperandError},
};

/// The copy of a block to the device, part by part, while an adapter is packed. Packing threads enqueue the parts; the
/// pool may revoke the copy at any time.
#[derive(Debug)]
pub(super) struct PartCopy {
    /// Of the context.
    queue: Queue,
    /// Address and size of the block.
    block: u64,
    bytes: usize,
    /// Recorded after the last part.
    copied: Arc<CudaEvent>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The parts. More may come until they end.
    copies: Copies<OwnStream>,
    /// No more parts may come, and the block may belong to another adapter.
    is_revoked: bool,
    /// Of a block that was packed on the device.
    image: Option<Image>,
    /// Why the host has not got its image.
    lost: Option<LaunchError>,
}

/// Page-locked memory that gets the image of a block, behind the copies or before the block belongs to another adapter.
#[derive(Debug)]
struct Image {
    /// Exposed.
    address: usize,
    bytes: usize,
    end: Arc<CudaEvent>,
    is_enqueued: bool,
}

impl PartCopy {
    pub(super) fn new(queue: &Queue, stream: &Arc<OwnStream>, block: u64, bytes: usize) -> Result<Self, LaunchError> {
        let copies = Copies::begin(stream, queue.new_event()?);
        let copied = Arc::clone(copies.end_event());
        let state = Mutex::new(State { copies, is_revoked: false, image: None, lost: None });
        Ok(Self { queue: queue.clone(), block, bytes, copied, state })
    }

    /// Address of the block.
    pub(super) fn block(&self) -> u64 {
        self.block
    }

    /// The end of all parts, once they are complete.
    pub(super) fn copied(&self) -> &Arc<CudaEvent> {
        &self.copied
    }

    /// The end of the last copy from or to host memory, once the parts are complete or revoked.
    pub(super) fn last(&self) -> Arc<CudaEvent> {
        Arc::clone(self.lock().image.as_ref().map_or(&self.copied, |image| &image.end))
    }

    /// The queue of the context.
    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Packs an image to the start of the block, unless the copy was revoked, and waits. Returns whether it has.
    /// `image` gets the same bytes: behind the last part, or before the copy is revoked. `scratch` are four bytes.
    ///
    /// # Safety
    /// Both are page-locked memory, which nothing uses before [`last`](Self::last), or frees before this is dropped.
    /// The stream waits for earlier uses of the block, whose descriptors are written after this call.
    pub(super) unsafe fn pack(
        &self,
        packing: &Packing<'_>,
        image: &mut [u8],
        scratch: &mut [u8; 4],
    ) -> Result<bool, LoadError> {
        let of_device = super::row_at(image.len());
        let end = of_device + scratch.len();
        OperandError::within("the end of an image in its block", end, self.bytes).map_err(LaunchError::from)?;
        // Not on the stream, where other adapters would wait, too.
        packing.wait()?;
        let (packed, end) = (self.queue.new_event()?, Arc::new(self.queue.new_event()?));
        let mut state = self.lock();
        if state.is_revoked || state.copies.is_ended() {
            return Ok(false);
        }
        self.queue.bind()?;
        let (address, bytes) = (image.as_mut_ptr().expose_provenance(), image.len());
        // SAFETY: the block has as many bytes. No later use of it is enqueued before the copy is revoked. The factors
        // live until this returns: after an error, the caller waits for the stream.
        unsafe { packing.launch(state.copies.stream().raw(), self.block, self.block + of_device as u64, scratch) }?;
        state.copies.stream().end(&packed)?;
        state.image = Some(Image { address, bytes, end, is_enqueued: false });
        drop(state);
        let _relaxed = Relaxed::new();
        packed.synchronize().map_err(LaunchError::from)?;
        packing.check(*scratch)?;
        Ok(true)
    }

    /// Enqueues the copy of the image to host memory, if there is one.
    fn save(&self, state: &mut State) -> Result<(), LaunchError> {
        let State { copies, image: Some(Image { address, bytes, end, is_enqueued }), .. } = state else {
            return Ok(());
        };
        if std::mem::replace(is_enqueued, true) {
            return Ok(());
        }
        self.queue.bind()?;
        let to = std::ptr::with_exposed_provenance_mut(*address);
        let stream = copies.stream().raw().as_raw().cast();
        // SAFETY: `pack` has been given the memory, and the block has its size. No later use of the block is enqueued
        // yet.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to, self.block, *bytes, stream) }.result()?;
        copies.stream().end(end)
    }

    /// Enqueues a part of the block at this offset, unless the copy was revoked.
    ///
    /// # Safety
    /// The bytes are in page-locked memory, which nothing writes to or frees before the copy has run. The stream waits
    /// for earlier uses of the block.
    pub(super) unsafe fn copy(&self, at: usize, bytes: &[u8]) -> Result<(), LaunchError> {
        OperandError::within("the end of a part in its block", at.saturating_add(bytes.len()), self.bytes)?;
        let state = self.lock();
        if !state.is_revoked && !state.copies.is_ended() {
            self.queue.bind()?;
            let stream = state.copies.stream().raw().as_raw().cast();
            // SAFETY: the caller's obligations. No later use of the block is enqueued before the copy is revoked.
            unsafe { result::memcpy_htod_async(self.block + at as u64, bytes, stream) }?;
        }
        Ok(())
    }

    /// Whether the copy was revoked. Does nothing and returns `false` if it is complete.
    pub(super) fn revoke(&self) -> bool {
        let mut state = self.lock();
        if !state.is_revoked && !state.copies.is_ended() {
            state.is_revoked = true;
            state.lost = self.save(&mut state).err();
        }
        state.is_revoked
    }

    /// Whether all parts are enqueued.
    pub(super) fn is_complete(&self) -> bool {
        let state = self.lock();
        state.copies.is_ended() && !state.is_revoked
    }

    /// Takes note of the last part. If the copy was revoked, blocks this thread until its parts have run.
    fn complete(&self) -> Result<(), LaunchError> {
        let mut state = self.lock();
        if !state.is_revoked {
            let ended = state.copies.end().and_then(|()| self.save(&mut state));
            state.is_revoked = ended.is_err();
            return ended;
        }
        let lost = state.lost.take();
        drop(state);
        self.wait();
        lost.map_or(Ok(()), Err)
    }

    /// Blocks this thread until the parts, of which no more may come, have run.
    pub(super) fn wait(&self) {
        let _relaxed = Relaxed::new();
        // On an error here, the parts have run, or the context is gone, and with it the parts.
        let _ = self.lock().copies.end();
        let _ = self.copied.synchronize();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave the state half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The reading end of a copy. Unless it is sealed, its drop revokes the copy and blocks the thread until the parts have
/// run, so that the host memory can be used again.
#[derive(Debug)]
pub(super) struct Unsealed(pub(super) Option<Arc<PartCopy>>);

impl Unsealed {
    /// The copy, if there is one.
    pub(super) fn parts(&self) -> Option<&PartCopy> {
        self.0.as_deref()
    }

    /// Takes note of the last part.
    pub(super) fn seal(mut self) -> Result<(), LaunchError> {
        self.parts().map_or(Ok(()), PartCopy::complete)?;
        self.0 = None;
        Ok(())
    }
}

impl Drop for Unsealed {
    fn drop(&mut self) {
        if let Some(parts) = self.0.take() {
            parts.revoke();
            parts.wait();
        }
    }
}
