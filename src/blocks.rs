//! Allocation of blocks in an arena, by offset. The arena's memory is elsewhere.

use std::{fmt, ops::Range};

use offset_allocator::{Allocation, Allocator, ext::min_allocator_size};

use crate::{extent::product, plan::PlanError, residency::Usage};

/// Allocation granularity.
pub(crate) const GRANULE_BYTES: usize = 256;

/// The most blocks of an arena, free ones included.
const MAX_BLOCKS: u32 = 1 << 17;

/// The free and the used blocks of an arena.
pub(crate) struct Blocks {
    allocator: Allocator,
    capacity: usize,
    used: usize,
}

/// A used block. It is lost unless it is [freed](Blocks::free).
#[must_use]
pub(crate) struct Block {
    allocation: Allocation,
    bytes: usize,
}

impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocks").field("usage", &self.usage()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({:?})", self.range())
    }
}

impl Block {
    /// Offset in the arena, in bytes.
    pub(crate) fn offset(&self) -> usize {
        self.allocation.offset as usize * GRANULE_BYTES
    }

    /// Size in bytes, whole granules.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Byte range in the arena.
    pub(crate) fn range(&self) -> Range<usize> {
        self.offset()..self.offset() + self.bytes
    }
}

/// Size in bytes of an arena of `bytes` bytes, which has whole granules.
pub(crate) fn whole_granules(bytes: usize) -> usize {
    product(&[bytes.div_ceil(GRANULE_BYTES), GRANULE_BYTES])
}

impl Blocks {
    /// An arena of `bytes` bytes, rounded up to whole granules. `what` names it in the error.
    pub(crate) fn new(what: &'static str, bytes: usize) -> Result<Self, PlanError> {
        let max = u32::MAX as usize * GRANULE_BYTES;
        let granules = u32::try_from(bytes.div_ceil(GRANULE_BYTES));
        let granules = granules.map_err(|_| PlanError::Limit { what, value: bytes, max })?;
        // Of an arena of n granules, at most n blocks are used or free.
        let allocator = Allocator::with_max_allocs(granules, granules.saturating_add(2).min(MAX_BLOCKS));
        Ok(Self { allocator, capacity: whole_granules(bytes), used: 0 })
    }

    /// Allocates a block; `None` if no free block is large enough.
    pub(crate) fn allocate(&mut self, bytes: usize) -> Option<Block> {
        let granules = granules(bytes);
        let allocation = self.allocator.allocate(u32::try_from(granules).ok()?)?;
        let bytes = granules * GRANULE_BYTES;
        self.used += bytes;
        Some(Block { allocation, bytes })
    }

    /// Whether a block of this size fits if no other is used.
    pub(crate) fn can_hold(&self, bytes: usize) -> bool {
        fits(bytes, self.capacity)
    }

    pub(crate) fn free(&mut self, block: Block) {
        self.used -= block.bytes;
        self.allocator.free(block.allocation);
    }

    pub(crate) fn usage(&self) -> Usage {
        Usage { capacity: self.capacity, used: self.used, largest_gap: self.largest_gap() }
    }

    pub(crate) fn largest_gap(&self) -> usize {
        self.allocator.storage_report().largest_free_region as usize * GRANULE_BYTES
    }
}

/// Size of a new arena in bytes that has room for blocks of these sizes, allocated one at a time in any order, each together with
/// `beside` further bytes that are free again before the next one.
pub(crate) fn bytes_for(blocks: impl IntoIterator<Item = usize>, beside: usize) -> usize {
    let (mut total, mut spare) = (0_usize, 0);
    for granules in blocks.into_iter().map(granules) {
        total = total.saturating_add(granules);
        // The allocator searches by size class, so the last block needs a gap larger than itself.
        spare = spare.max(gap_for(granules) - granules);
        if beside > 0 {
            spare = spare.max(gap_for(self::granules(beside)));
        }
    }
    total.saturating_add(spare).saturating_mul(GRANULE_BYTES)
}

/// Whether the allocator finds room for a block in a free one of `gap_bytes` bytes.
pub(crate) fn fits(bytes: usize, gap_bytes: usize) -> bool {
    // It rounds free blocks down to a size class, and requests up.
    gap_for(granules(bytes)).saturating_mul(GRANULE_BYTES) <= gap_bytes
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

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use proptest::prelude::*;

    use super::{Blocks, GRANULE_BYTES, bytes_for};

    proptest! {
        /// Adapters are loaded one at a time, each with its descriptors until it is committed.
        #[test]
        fn there_is_room_for_what_was_counted(
            blocks in prop::collection::vec(1..10_000_000_usize, 1..12),
            beside in 1..100_000_usize,
        ) {
            let bytes = bytes_for(blocks.iter().copied(), beside);
            let mut free = Blocks::new("the arena", bytes).unwrap();
            for &block in &blocks {
                prop_assert!(free.allocate(block).is_some(), "{block} of {bytes}");
                let row = free.allocate(beside);
                prop_assert!(row.is_some(), "{beside} beside {block} of {bytes}");
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
        assert!(Blocks::new("the arena", too_much).is_err());
    }

    #[test]
    fn blocks_are_whole_granules_apart_from_each_other() {
        let mut free = Blocks::new("the arena", 1000).unwrap();
        let blocks = [1, 257, 0].map(|bytes| free.allocate(bytes).unwrap());
        let mut places = blocks.each_ref().map(|block| (block.offset(), block.bytes()));
        places.sort_unstable();
        assert_eq!(places.map(|(_, bytes)| bytes).iter().sum::<usize>(), 4 * GRANULE_BYTES);
        assert!(places.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        assert_eq!((free.usage().used, free.largest_gap()), (1024, 0));
        blocks.into_iter().for_each(|block| free.free(block));
        assert_eq!((free.usage().used, free.largest_gap()), (0, 1024));
    }
}
