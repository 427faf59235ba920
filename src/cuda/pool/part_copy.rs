//! A copy of an adapter to the device in parts, for pools.

#![expect(unsafe_code, reason = "copies between memory that their owner keeps")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaEvent, result};

use crate::{
    arena::copies::Copies,
    cuda::{
        LaunchError, Queue,
        stream::{OwnStream, Relaxed},
    },
    error::OperandError,
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
}

impl PartCopy {
    pub(super) fn new(queue: &Queue, stream: &Arc<OwnStream>, block: u64, bytes: usize) -> Result<Self, LaunchError> {
        let copies = Copies::begin(stream, queue.new_event()?);
        let copied = Arc::clone(copies.end_event());
        let state = Mutex::new(State { copies, is_revoked: false });
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
        state.is_revoked |= !state.copies.is_ended();
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
            let ended = state.copies.end();
            state.is_revoked = ended.is_err();
            return ended;
        }
        drop(state);
        self.wait();
        Ok(())
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
