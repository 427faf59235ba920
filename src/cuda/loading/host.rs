//! Adapters in page-locked host memory beside a table: the host tier of a group's pool.

#![expect(unsafe_code, reason = "parts of the host arena")]

use std::{
    fmt,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{Queue, host_arena::HostArena, raw::Descriptor};
use crate::{
    DType,
    adapter::SlotImage,
    blocks::{Block, Blocks},
    error::LoadError,
    model::Model,
    pool::PoolError,
    residency::Usage,
};

/// Address of a block whose place is not known yet.
pub(super) const NOWHERE: u64 = 1 << 20;

/// Page-locked host memory for packed adapters.
pub struct HostMemory {
    arena: HostArena,
    blocks: Mutex<Blocks>,
}

/// An adapter packed in page-locked host memory.
#[derive(Debug)]
pub struct HostAdapter {
    memory: Arc<HostMemory>,
    /// `None` once it is free.
    block: Option<Block>,
    pub(super) bytes: usize,
    pub(super) max_rank: usize,
    pub(super) model: Model,
    pub(super) dtype: DType,
    /// The descriptors of a block at [`NOWHERE`].
    row: Vec<Descriptor>,
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory").field("usage", &self.usage()).finish_non_exhaustive()
    }
}

impl HostMemory {
    pub(super) fn new(queue: &Queue, bytes: usize) -> Result<Self, PoolError> {
        let blocks = Blocks::new("the host tier's bytes", bytes)?;
        let arena = HostArena::new(queue, blocks.usage().capacity)?;
        Ok(Self { arena, blocks: Mutex::new(blocks) })
    }

    pub(crate) fn usage(&self) -> Usage {
        self.lock().usage()
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        // A panic cannot leave the blocks half-changed: allocating and freeing are one call each.
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostAdapter {
    /// Packs an adapter, or returns `None` if there is no room.
    pub(crate) fn new(memory: &Arc<HostMemory>, image: &SlotImage<'_>) -> Result<Option<Self>, LoadError> {
        let Some(block) = memory.lock().allocate(image.bytes()) else { return Ok(None) };
        let adapter = Self {
            memory: Arc::clone(memory),
            block: Some(block),
            bytes: image.bytes(),
            max_rank: image.max_rank(),
            model: image.model().clone(),
            dtype: image.dtype(),
            row: Descriptor::row(image, NOWHERE),
        };
        // SAFETY: the block is the adapter's alone, and nobody has the adapter yet.
        image.write_to(unsafe { memory.arena.part(adapter.range()) })?;
        Ok(Some(adapter))
    }

    /// The memory that its bytes are in, and where.
    pub(super) fn place(&self) -> (&HostArena, Range<usize>) {
        (&self.memory.arena, self.range())
    }

    /// The descriptors of a block at this address.
    pub(super) fn row(&self, block: u64) -> Vec<Descriptor> {
        self.row.iter().map(|descriptor| descriptor.moved(NOWHERE, block)).collect()
    }

    fn range(&self) -> Range<usize> {
        let start = self.block.as_ref().map_or(0, Block::offset);
        start..start + self.bytes
    }
}

impl Drop for HostAdapter {
    /// Whoever copied it has waited for the copy.
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.memory.lock().free(block);
        }
    }
}
