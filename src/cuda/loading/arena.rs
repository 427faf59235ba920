//! The device memory of a weight table, and its allocator.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::CudaEvent;

use super::{LaunchError, Queue, Region, Relaxed};
use crate::{
    arena::blocks::{Block, Blocks},
    arena::copies,
    error::LoadError,
    slots::Usage,
};

/// Device memory that is allocated in blocks of any size.
pub(in crate::cuda) struct Arena {
    queue: Queue,
    region: Region,
    free: Mutex<FreeList>,
}

/// The free parts of the arena.
struct FreeList {
    blocks: Blocks,
    /// Work that may still use free memory. Copies into it wait for these events.
    pending: Vec<Arc<CudaEvent>>,
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("usage", &self.usage()).finish_non_exhaustive()
    }
}

impl Arena {
    pub(in crate::cuda) fn new(queue: &Queue, bytes: usize) -> Result<Self, LaunchError> {
        let blocks = Blocks::new("the arena's bytes", bytes)?;
        let region = Region::new(queue, blocks.usage().capacity)?;
        // Copies on other streams wait for the allocation.
        let allocated = Arc::new(queue.stream().record_event(None)?);
        Ok(Self { queue: queue.clone(), region, free: Mutex::new(FreeList { blocks, pending: vec![allocated] }) })
    }

    /// The queue that orders the memory's deallocation.
    pub(in crate::cuda) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Address of a block.
    pub(super) fn address(&self, block: &Block) -> u64 {
        self.base() + block.offset() as u64
    }

    /// Address of the memory.
    pub(in crate::cuda) fn base(&self) -> u64 {
        self.region.region().ptr
    }

    /// Work that precedes the first use of the memory.
    pub(in crate::cuda) fn pending(&self) -> Vec<Arc<CudaEvent>> {
        self.lock().pending.clone()
    }

    /// Allocates two blocks or none. Also returns the work that may still use them.
    pub(super) fn take(&self, bytes: [usize; 2]) -> Result<([Block; 2], Vec<Arc<CudaEvent>>), LoadError> {
        let mut free = self.lock();
        free.forget_done();
        let first = free.allocate(bytes[0])?;
        match free.allocate(bytes[1]) {
            Ok(second) => Ok(([first, second], free.pending.clone())),
            Err(error) => {
                free.blocks.free(first);
                Err(error)
            }
        }
    }

    /// Whether two blocks of these sizes are free.
    pub(super) fn fits(&self, bytes: [usize; 2]) -> bool {
        let mut free = self.lock();
        let blocks = bytes.map(|bytes| free.blocks.allocate(bytes));
        let fits = blocks.iter().all(Option::is_some);
        blocks.into_iter().flatten().for_each(|block| free.blocks.free(block));
        fits
    }

    pub(super) fn usage(&self) -> Usage {
        self.lock().blocks.usage()
    }

    fn lock(&self) -> MutexGuard<'_, FreeList> {
        // A panic cannot leave the list half-changed: allocating and freeing are one call each.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl copies::Arena<CudaEvent> for Arena {
    fn give_back(&self, blocks: impl IntoIterator<Item = Block>, event: Option<Arc<CudaEvent>>) {
        let mut free = self.lock();
        free.pending.extend(event);
        blocks.into_iter().for_each(|block| free.blocks.free(block));
    }
}

impl Drop for Arena {
    /// Makes the queue's stream, which orders the deallocation, wait for copies on other streams.
    fn drop(&mut self) {
        for event in &self.free.get_mut().unwrap_or_else(PoisonError::into_inner).pending {
            if self.queue.prepare().and_then(|()| Ok(self.queue.stream().wait(event)?)).is_err() {
                // The stream is being captured, or the context is gone and with it the copy.
                let _relaxed = Relaxed::new();
                let _ = event.synchronize();
            }
        }
    }
}

impl FreeList {
    fn allocate(&mut self, bytes: usize) -> Result<Block, LoadError> {
        self.blocks.allocate(bytes).ok_or_else(|| LoadError::Full { bytes, largest_gap: self.blocks.largest_gap() })
    }

    fn forget_done(&mut self) {
        let _relaxed = Relaxed::new();
        self.pending.retain(|event| !event.is_complete());
    }
}
