//! The device memory of a weight table, and its allocator.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::CudaEvent;
use offset_allocator::{Allocation, Allocator, ext::min_allocator_size};

use super::{LaunchError, Queue, capturing::Relaxed, region::Region};
use crate::{error::LoadError, residency::Usage};

/// Allocation granularity.
const GRANULE_BYTES: usize = 256;

/// Device memory that is allocated in blocks of any size.
pub(super) struct Arena {
    queue: Queue,
    region: Region,
    free: Mutex<FreeList>,
}

/// The free parts of the arena.
struct FreeList {
    allocator: Allocator,
    used: usize,
    /// Work that may still use free memory. Copies into it wait for these events.
    pending: Vec<Arc<CudaEvent>>,
}

/// An allocated block.
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
        let mut free = FreeList::new(bytes)?;
        let region = Region::new(queue, bytes.next_multiple_of(GRANULE_BYTES))?;
        // Copies on other streams wait for the allocation.
        let allocated = Arc::new(queue.stream().record_event(None)?);
        free.pending.push(allocated);
        Ok(Self { queue: queue.clone(), region, free: Mutex::new(free) })
    }

    /// The queue that orders the memory's deallocation.
    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Address of a block.
    pub(super) fn address(&self, room: &Room) -> u64 {
        self.region.region().ptr + room.offset() as u64
    }

    /// Allocates two blocks or none. Also returns the work that may still use them.
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

    /// Frees blocks that work before `event` may still use.
    pub(super) fn give_back(&self, rooms: impl IntoIterator<Item = Room>, event: Option<Arc<CudaEvent>>) {
        let mut free = self.lock();
        free.pending.extend(event);
        rooms.into_iter().for_each(|room| free.free(room));
    }

    /// Whether two blocks of these sizes are free.
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
        // A panic cannot leave the list half-changed: allocating and freeing are one call each.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Arena {
    /// Makes the queue's stream, which orders the deallocation, wait for copies on other streams.
    fn drop(&mut self) {
        for event in &self.free.get_mut().unwrap_or_else(PoisonError::into_inner).pending {
            if self.queue.enter().and_then(|()| Ok(self.queue.stream().wait(event)?)).is_err() {
                // The stream is being captured, or the context is gone and with it the copy.
                let _relaxed = Relaxed::new();
                let _ = event.synchronize();
            }
        }
    }
}

/// Size of a new arena in bytes that has room for blocks of these sizes, allocated one at a time in any order, each together with
/// `beside` further bytes that are free again before the next one.
pub(super) fn bytes_for(blocks: impl IntoIterator<Item = usize>, beside: usize) -> usize {
    let (mut total, mut spare) = (0_usize, 0);
    for granules in blocks.into_iter().map(granules) {
        total = total.saturating_add(granules);
        // The allocator searches by size class, so the last block needs a gap larger than itself.
        spare = spare.max(gap_for(granules) - granules).max(gap_for(self::granules(beside)));
    }
    total.saturating_add(spare).saturating_mul(GRANULE_BYTES)
}

/// Granules of a block. An empty block takes one, so that every block has its own offset.
fn granules(bytes: usize) -> usize {
    bytes.div_ceil(GRANULE_BYTES).max(1)
}

/// The smallest free block in which the allocator finds room for this many granules.
fn gap_for(granules: usize) -> usize {
    // Larger blocks fit no arena.
    u32::try_from(granules).map_or(granules, |granules| min_allocator_size(granules) as usize)
}

impl FreeList {
    /// A free list of at least `bytes` bytes.
    fn new(bytes: usize) -> Result<Self, LaunchError> {
        let granules = u32::try_from(bytes.div_ceil(GRANULE_BYTES)).map_err(|_| LaunchError::Capacity {
            what: "the arena's bytes",
            got: bytes,
            max: u32::MAX as usize * GRANULE_BYTES,
        })?;
        Ok(Self { allocator: Allocator::new(granules), used: 0, pending: Vec::new() })
    }

    fn allocate(&mut self, bytes: usize) -> Result<Room, LoadError> {
        let granules = granules(bytes);
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
        let _relaxed = Relaxed::new();
        self.pending.retain(|event| !event.is_complete());
    }

    fn largest_gap(&self) -> usize {
        self.allocator.storage_report().largest_free_region as usize * GRANULE_BYTES
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use proptest::prelude::*;

    use super::{FreeList, GRANULE_BYTES, bytes_for};

    proptest! {
        /// Adapters are loaded one at a time, each with its descriptors until it is committed.
        #[test]
        fn there_is_room_for_what_was_counted(
            blocks in prop::collection::vec(1..10_000_000_usize, 1..12),
            beside in 1..100_000_usize,
        ) {
            let bytes = bytes_for(blocks.iter().copied(), beside);
            let mut free = FreeList::new(bytes).unwrap();
            for &block in &blocks {
                prop_assert!(free.allocate(block).is_ok(), "{block} of {bytes}");
                let row = free.allocate(beside);
                prop_assert!(row.is_ok(), "{beside} beside {block} of {bytes}");
                row.into_iter().for_each(|row| free.free(row));
            }
            // Each size class of the allocator is an eighth larger than the previous one.
            let exact: usize = blocks.iter().sum();
            let largest = blocks.iter().copied().max().unwrap_or(0).max(beside * 8);
            prop_assert!(bytes <= exact + largest / 8 + beside + (blocks.len() + 2) * GRANULE_BYTES);
        }
    }

    #[test]
    fn nothing_needs_nothing_and_too_much_is_refused() {
        assert_eq!(bytes_for([], 4096), 0);
        let too_much = bytes_for([usize::MAX, usize::MAX], 1);
        assert!(too_much > u32::MAX as usize * GRANULE_BYTES);
        assert!(FreeList::new(too_much).is_err());
    }

    #[test]
    fn rooms_are_whole_granules_apart_from_each_other() {
        let mut free = FreeList::new(1000).unwrap();
        let rooms = [1, 257, 0].map(|bytes| free.allocate(bytes).unwrap());
        let mut places = rooms.each_ref().map(|room| (room.offset(), room.bytes));
        places.sort_unstable();
        assert_eq!(places.map(|(_, bytes)| bytes).iter().sum::<usize>(), 4 * GRANULE_BYTES);
        assert!(places.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        assert_eq!((free.used, free.largest_gap()), (1024, 0));
        rooms.into_iter().for_each(|room| free.free(room));
        assert_eq!((free.used, free.largest_gap()), (0, 1024));
    }
}
