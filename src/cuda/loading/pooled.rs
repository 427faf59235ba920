//! The table of a pool, which decides what is in the slots.

#![expect(unsafe_code, reason = "copies between memory that it owns")]

use std::sync::Arc;

use cudarc::driver::{CudaEvent, result};

use super::{LaunchError, WeightTable, table::Shared};
use crate::{Slot, copies::Arena as _, error::OperandError};

impl WeightTable {
    /// Points a slot to the block and the descriptors of an adapter, in stream order, after its copy.
    pub(super) fn point(&self, slot: Slot, content: &Content) -> Result<(), LaunchError> {
        let Shared { queue, slots, .. } = &*self.shared;
        let Some(index) = slot.index() else { return Ok(()) };
        let _entered = queue.enter()?;
        let mut blocks = slots.lock();
        slots.changing(&mut blocks, index, || {
            queue.stream().wait(&content.copied)?;
            let row = self.shared.row(index);
            // SAFETY: the block ends with a row of this table's length, and is not overwritten before the end of a step of the stream.
            unsafe { result::memcpy_dtod_async(row.ptr, content.row, row.bytes, queue.stream().cu_stream()) }?;
            Ok::<_, LaunchError>(())
        })?;
        let replaced = slots.replace(&mut blocks, slot, content.bytes, content.max_rank, None);
        replaced.map(drop).map_err(|_| OperandError::Capacity { what: "the slot", got: index, max: slots.len() }.into())
    }

    /// Makes the rows of slots empty, in stream order. The event is recorded after it.
    pub(super) fn clear(&self, slots: &[usize]) -> Result<CudaEvent, LaunchError> {
        let queue = &self.shared.queue;
        let _entered = queue.enter()?;
        let cleared = queue.new_event()?;
        for &slot in slots {
            let row = self.shared.row(slot);
            // SAFETY: the row belongs to this table, and the stream orders its uses.
            unsafe { result::memset_d8_async(row.ptr, 0, row.bytes, queue.stream().cu_stream()) }?;
        }
        cleared.record(queue.stream())?;
        Ok(cleared)
    }

    /// Takes note that a slot has no adapter. Its row is as it was.
    pub(super) fn forget(&self, slot: Slot) {
        let Shared { slots, .. } = &*self.shared;
        // Every slot of the pool is one of the table.
        let _ = slots.take(&mut slots.lock(), slot);
    }
}

/// The block of a slot.
#[derive(Debug)]
pub(super) struct Content {
    /// The end of the copy of block and row.
    pub(super) copied: Arc<CudaEvent>,
    /// Address of the descriptors.
    pub(super) row: u64,
    /// Size of the image.
    pub(super) bytes: usize,
    pub(super) max_rank: usize,
}

impl Drop for Shared {
    /// Makes the deallocation of another queue's arena wait for the work of this queue.
    fn drop(&mut self) {
        if self.queue.stream().cu_stream() == self.arena.queue().stream().cu_stream() {
            return;
        }
        let done = self.queue.new_event().and_then(|done| {
            let _entered = self.queue.enter()?;
            done.record(self.queue.stream())?;
            Ok(Arc::new(done))
        });
        match done {
            Ok(done) => self.arena.give_back([], Some(done)),
            // Without the event, the memory can never be freed.
            Err(_) => std::mem::forget(Arc::clone(&self.arena)),
        }
    }
}
