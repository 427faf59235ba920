//! The device memory of a weight table, and which of it is free.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::CudaEvent;
use offset_allocator::{Allocation, Allocator};

use super::{LaunchError, Queue, region::Region};
use crate::{error::LoadError, residency::Usage};

/// What the arena hands out.
const GRANULE_BYTES: usize = 256;

/// Device memory that is handed out in rooms of any size.
pub(super) struct Arena {
    queue: Queue,
    region: Region,
    free: Mutex<FreeList>,
}

/// Which parts of the arena are free.
struct FreeList {
    allocator: Allocator,
    used: usize,
    /// Work that may still use memory that is free: copies into it wait for these.
    pending: Vec<Arc<CudaEvent>>,
}

/// A part of the arena.
#[must_use]
pub(super) struct Room {
    allocation: Allocation,
    pub(super) bytes: usize,
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Room").field("offset", &self.offset()).field("bytes", &self.bytes).finish()
    }
}

impl Room {
    fn offset(&self) -> usize {
        self.allocation.offset as usize * GRANULE_BYTES
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("usage", &self.usage()).finish_non_exhaustive()
    }
}

impl Arena {
    pub(super) fn new(queue: &Queue, bytes: usize) -> Result<Self, LaunchError> {
        let granules = u32::try_from(bytes.div_ceil(GRANULE_BYTES)).map_err(|_| LaunchError::Capacity {
            what: "the arena's bytes",
            got: bytes,
            max: u32::MAX as usize * GRANULE_BYTES,
        })?;
        let region = Region::new(queue, bytes.next_multiple_of(GRANULE_BYTES))?;
        // Copies of other streams come behind the allocation.
        let allocated = Arc::new(queue.stream().record_event(None)?);
        let free = FreeList { allocator: Allocator::new(granules), used: 0, pending: vec![allocated] };
        Ok(Self { queue: queue.clone(), region, free: Mutex::new(free) })
    }

    /// The queue in whose order the memory is freed.
    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Where a room is.
    pub(super) fn address(&self, room: &Room) -> u64 {
        self.region.region().ptr + room.offset() as u64
    }

    /// Takes rooms of these sizes, all or none. Also returns the work that may still use them.
    pub(super) fn take(&self, bytes: [usize; 2]) -> Result<([Room; 2], Vec<Arc<CudaEvent>>), LoadError> {
        let mut free = self.lock();
        free.forget_done();
        let first = free.allocate(bytes[0])?;
        match free.allocate(bytes[1]) {
            Ok(second) => Ok(([first, second], free.pending.clone())),
            Err(error) => {
                free.free(first);
                Err(error)
            }
        }
    }

    /// Frees rooms that work before `event` may still use. Asks no event: a thread that captures a stream may not.
    pub(super) fn give_back(&self, rooms: impl IntoIterator<Item = Room>, event: Option<Arc<CudaEvent>>) {
        let mut free = self.lock();
        free.pending.extend(event);
        rooms.into_iter().for_each(|room| free.free(room));
    }

    /// Whether there is room of these sizes now.
    pub(super) fn fits(&self, bytes: [usize; 2]) -> bool {
        let mut free = self.lock();
        let rooms = bytes.map(|bytes| free.allocate(bytes).ok());
        let fits = rooms.iter().all(Option::is_some);
        rooms.into_iter().flatten().for_each(|room| free.free(room));
        fits
    }

    pub(super) fn usage(&self) -> Usage {
        let free = self.lock();
        Usage { capacity: self.region.region().bytes, used: free.used, largest_gap: free.largest_gap() }
    }

    fn lock(&self) -> MutexGuard<'_, FreeList> {
        // A thread that panicked with the lock left it whole: allocating and freeing are one call each.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Arena {
    /// Has the memory's stream, in whose order it is freed, wait for copies on others.
    fn drop(&mut self) {
        for event in &self.free.get_mut().unwrap_or_else(PoisonError::into_inner).pending {
            if self.queue.enter().and_then(|()| Ok(self.queue.stream().wait(event)?)).is_err() {
                // The stream is being captured, or the context is gone and the copy with it.
                let _ = event.synchronize();
            }
        }
    }
}

impl FreeList {
    fn allocate(&mut self, bytes: usize) -> Result<Room, LoadError> {
        let granules = bytes.div_ceil(GRANULE_BYTES).max(1);
        let allocation = u32::try_from(granules).ok().and_then(|granules| self.allocator.allocate(granules));
        let allocation = allocation.ok_or_else(|| LoadError::Full { bytes, largest_gap: self.largest_gap() })?;
        let bytes = granules * GRANULE_BYTES;
        self.used += bytes;
        Ok(Room { allocation, bytes })
    }

    fn free(&mut self, room: Room) {
        self.used -= room.bytes;
        self.allocator.free(room.allocation);
    }

    fn forget_done(&mut self) {
        self.pending.retain(|event| !event.is_complete());
    }

    fn largest_gap(&self) -> usize {
        self.allocator.storage_report().largest_free_region as usize * GRANULE_BYTES
    }
}
