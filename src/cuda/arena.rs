//! Which parts of a table's memory are free. Pure: it knows sizes and offsets, and no address.

use offset_allocator::{Allocation, Allocator, ext::min_allocator_size};

use super::LaunchError;
use crate::error::LoadError;

/// What is handed out, and what every offset is a multiple of.
const GRANULE_BYTES: usize = 256;

/// A free list in granules.
pub(super) struct Arena {
    allocator: Allocator,
    granules: u32,
    used: usize,
}

/// A part of an arena.
pub(super) struct Room {
    allocation: Allocation,
    bytes: usize,
}

impl std::fmt::Debug for Room {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Room").field("offset", &self.offset()).field("bytes", &self.bytes).finish()
    }
}

impl Room {
    pub(super) fn offset(&self) -> usize {
        self.allocation.offset as usize * GRANULE_BYTES
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Arena {
    /// So many bytes, or up to 255 more, all free.
    pub(super) fn new(bytes: usize) -> Result<Self, LaunchError> {
        let granules = u32::try_from(bytes.div_ceil(GRANULE_BYTES)).map_err(|_| LaunchError::Capacity {
            what: "the arena's bytes",
            got: bytes,
            max: u32::MAX as usize * GRANULE_BYTES,
        })?;
        Ok(Self { allocator: Allocator::new(granules), granules, used: 0 })
    }

    /// The bytes of a new arena in which there is room for blocks of these sizes, in whatever order they come, and for `beside` more
    /// behind each of them, which are free again when the next one comes.
    pub(super) fn bytes_for(blocks: impl IntoIterator<Item = usize>, beside: usize) -> usize {
        let (mut total, mut spare) = (0_usize, 0);
        for granules in blocks.into_iter().map(granules) {
            total = total.saturating_add(granules);
            // The allocator looks for a gap of one of its size classes, so the last block needs a larger gap than itself.
            spare = spare.max(gap_for(granules) - granules).max(gap_for(self::granules(beside)));
        }
        total.saturating_add(spare).saturating_mul(GRANULE_BYTES)
    }

    pub(super) fn allocate(&mut self, bytes: usize) -> Result<Room, LoadError> {
        let granules = granules(bytes);
        let allocation = u32::try_from(granules).ok().and_then(|granules| self.allocator.allocate(granules));
        let allocation = allocation.ok_or_else(|| LoadError::Full { bytes, largest_gap: self.largest_gap() })?;
        let bytes = granules * GRANULE_BYTES;
        self.used += bytes;
        Ok(Room { allocation, bytes })
    }

    pub(super) fn free(&mut self, room: Room) {
        self.used -= room.bytes;
        self.allocator.free(room.allocation);
    }

    pub(super) fn bytes(&self) -> usize {
        self.granules as usize * GRANULE_BYTES
    }

    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// The most bytes that can be allocated now.
    pub(super) fn largest_gap(&self) -> usize {
        self.allocator.storage_report().largest_free_region as usize * GRANULE_BYTES
    }
}

/// What `bytes` take. Nothing takes a granule, too: every room has an offset of its own.
fn granules(bytes: usize) -> usize {
    bytes.div_ceil(GRANULE_BYTES).max(1)
}

/// The smallest gap in which the allocator finds room for so many granules.
fn gap_for(granules: usize) -> usize {
    // Larger ones are in no arena.
    u32::try_from(granules).map_or(granules, |granules| min_allocator_size(granules) as usize)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Arena, GRANULE_BYTES};

    proptest! {
        /// Adapters that are loaded one at a time, each with a row beside it until it is committed.
        #[test]
        fn there_is_room_for_what_was_counted(
            blocks in prop::collection::vec(1..10_000_000_usize, 1..12),
            beside in 1..100_000_usize,
        ) {
            let bytes = Arena::bytes_for(blocks.iter().copied(), beside);
            let mut arena = Arena::new(bytes).unwrap();
            for &block in &blocks {
                prop_assert!(arena.allocate(block).is_ok(), "{block} of {bytes}");
                let row = arena.allocate(beside);
                prop_assert!(row.is_ok(), "{beside} beside {block} of {bytes}");
                row.into_iter().for_each(|row| arena.free(row));
            }
            // One of the allocator's size classes is an eighth larger than the one before.
            let exact: usize = blocks.iter().sum();
            let largest = blocks.iter().copied().max().unwrap_or(0).max(beside * 8);
            prop_assert!(bytes <= exact + largest / 8 + beside + (blocks.len() + 2) * GRANULE_BYTES);
        }
    }

    #[test]
    fn nothing_needs_nothing_and_too_much_is_refused() {
        assert_eq!(Arena::bytes_for([], 4096), 0);
        let too_much = Arena::bytes_for([usize::MAX, usize::MAX], 1);
        assert!(too_much > u32::MAX as usize * GRANULE_BYTES);
        assert!(Arena::new(too_much).is_err());
    }

    #[test]
    fn rooms_are_whole_granules_apart_from_each_other() {
        let mut arena = Arena::new(1000).unwrap();
        let rooms = [1, 257, 0].map(|bytes| arena.allocate(bytes).unwrap());
        let mut places = rooms.each_ref().map(|room| (room.offset(), room.bytes()));
        places.sort_unstable();
        assert_eq!(places.map(|(_, bytes)| bytes).iter().sum::<usize>(), 4 * GRANULE_BYTES);
        assert!(places.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        assert_eq!((arena.used(), arena.largest_gap()), (1024, 0));
        rooms.into_iter().for_each(|room| arena.free(room));
        assert_eq!((arena.used(), arena.largest_gap()), (0, 1024));
    }
}
