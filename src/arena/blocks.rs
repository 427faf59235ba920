//! Allocation of blocks in an arena, by offset. The arena's memory is elsewhere.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    ops::Range,
};

use crate::{
    plan::PlanError,
    sizes::{product, round_up, sum},
};

/// Memory use of a weight table, in bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Usage {
    /// Size of the arena.
    pub capacity: usize,
    /// Loaded and reserved bytes. On the CPU they may exceed the capacity while steps have adapters of a pool that
    /// others have replaced.
    pub used: usize,
    /// Size of the largest free block.
    pub largest_gap: usize,
}

impl Usage {
    /// Free bytes, in one block or several.
    pub const fn free(&self) -> usize {
        self.capacity.saturating_sub(self.used)
    }

    /// The part of the free bytes outside the largest free block, from 0 to 1.
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub fn fragmentation(&self) -> f64 {
        if self.free() == 0 { 0.0 } else { 1.0 - self.largest_gap as f64 / self.free() as f64 }
    }
}

/// Allocation granularity.
pub(crate) const GRANULE_BYTES: usize = 256;

/// The free and the used blocks of an arena. A block takes the smallest gap that it fits in, so that adapters of one
/// size replace each other without loss.
pub(crate) struct Blocks {
    /// The sizes of gaps by offset, in granules. No two of them touch.
    gaps: BTreeMap<usize, usize>,
    /// The same gaps, by size and offset.
    by_size: BTreeSet<(usize, usize)>,
    capacity: usize,
    used: usize,
}

/// A used block. It is lost unless it is [freed](Blocks::free).
#[must_use]
pub(crate) struct Block {
    /// In granules.
    at: usize,
    granules: usize,
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
        self.at * GRANULE_BYTES
    }

    /// Size in bytes, whole granules.
    pub(crate) fn bytes(&self) -> usize {
        self.granules * GRANULE_BYTES
    }

    /// Byte range in the arena.
    pub(crate) fn range(&self) -> Range<usize> {
        self.offset()..self.offset() + self.bytes()
    }
}

/// Size in bytes of an arena of `bytes` bytes, which has whole granules.
pub(crate) fn whole_granules(bytes: usize) -> usize {
    round_up(bytes, GRANULE_BYTES)
}

impl Blocks {
    /// An arena of `bytes` bytes, rounded up to whole granules. `what` names it in the error.
    pub(crate) fn new(what: &'static str, bytes: usize) -> Result<Self, PlanError> {
        let max = u32::MAX as usize * GRANULE_BYTES;
        if bytes > max {
            return Err(PlanError::Limit { what, value: bytes, max });
        }
        let mut blocks =
            Self { gaps: BTreeMap::new(), by_size: BTreeSet::new(), capacity: whole_granules(bytes), used: 0 };
        blocks.add_gap(0, bytes.div_ceil(GRANULE_BYTES));
        Ok(blocks)
    }

    fn add_gap(&mut self, at: usize, granules: usize) {
        if granules > 0 {
            self.gaps.insert(at, granules);
            self.by_size.insert((granules, at));
        }
    }

    fn remove_gap(&mut self, at: usize) -> Option<usize> {
        let granules = self.gaps.remove(&at)?;
        self.by_size.remove(&(granules, at));
        Some(granules)
    }

    /// Allocates a block; `None` if no free block is large enough.
    pub(crate) fn allocate(&mut self, bytes: usize) -> Option<Block> {
        let wanted = granules(bytes);
        let &(gap, at) = self.by_size.range((wanted, 0)..).next()?;
        self.remove_gap(at);
        self.add_gap(at + wanted, gap - wanted);
        self.used += wanted * GRANULE_BYTES;
        Some(Block { at, granules: wanted })
    }

    /// Whether a block of this size fits if no other is used.
    pub(crate) fn can_hold(&self, bytes: usize) -> bool {
        fits(bytes, self.capacity)
    }

    pub(crate) fn free(&mut self, block: Block) {
        self.used -= block.bytes();
        let before = self.gaps.range(..block.at).next_back();
        let before = before.filter(|&(&at, &granules)| at + granules == block.at).map(|(&at, _)| at);
        let behind = self.remove_gap(block.at + block.granules).unwrap_or(0);
        let first = before.and_then(|at| self.remove_gap(at)).unwrap_or(0);
        self.add_gap(block.at - first, first + block.granules + behind);
    }

    pub(crate) fn usage(&self) -> Usage {
        Usage { capacity: self.capacity, used: self.used, largest_gap: self.largest_gap() }
    }

    pub(crate) fn largest_gap(&self) -> usize {
        self.by_size.last().map_or(0, |(granules, _)| granules * GRANULE_BYTES)
    }
}

/// Size of a new arena in bytes that has room for blocks of these sizes, allocated one at a time in any order, each
/// together with `beside` further bytes that are free again before the next one.
pub(crate) fn bytes_for(blocks: impl IntoIterator<Item = usize>, beside: usize) -> usize {
    of_granules(sum(blocks.into_iter().map(granules)), beside)
}

/// [`bytes_for`] `count` blocks of one size.
pub(crate) fn bytes_for_equal(bytes: usize, count: usize, beside: usize) -> usize {
    of_granules(product(&[granules(bytes), count]), beside)
}

fn of_granules(blocks: usize, beside: usize) -> usize {
    let beside = if blocks > 0 && beside > 0 { granules(beside) } else { 0 };
    product(&[blocks.saturating_add(beside), GRANULE_BYTES])
}

/// Whether a block fits in a free one of `gap_bytes` bytes.
pub(crate) fn fits(bytes: usize, gap_bytes: usize) -> bool {
    granules(bytes).saturating_mul(GRANULE_BYTES) <= gap_bytes
}

/// Granules of a block. An empty block takes one, so that every block has its own offset.
fn granules(bytes: usize) -> usize {
    bytes.div_ceil(GRANULE_BYTES).max(1)
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use proptest::prelude::*;

    use super::{Blocks, GRANULE_BYTES, bytes_for, bytes_for_equal};

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
            let exact: usize = blocks.iter().sum();
            prop_assert!(bytes <= exact + beside + (blocks.len() + 1) * GRANULE_BYTES);
        }

        /// Adapters of one size are replaced again and again in any slots, if one more is counted than there are slots;
        /// those of any size in one slot, if the largest is counted twice more.
        #[test]
        fn what_is_replaced_leaves_room_for_the_next(
            (others, largest) in (prop::collection::vec(1..1_000_000_usize, 0..4), 1..1_000_000_usize),
            (slots, beside) in (1..9_usize, 1..10_000_usize),
            replaced in prop::collection::vec((0..9_usize, 1..=100_usize), 1..200),
            is_of_one_size: bool,
        ) {
            let (slots, counted) = if is_of_one_size { (slots, slots + 1) } else { (1, 3) };
            let sizes = others.iter().map(|size| size % largest + 1).chain(std::iter::repeat_n(largest, counted));
            let mut free = Blocks::new("the arena", bytes_for(sizes, beside)).unwrap();
            let others: Vec<_> = others.iter().map(|size| free.allocate(size % largest + 1).unwrap()).collect();
            let mut held: Vec<_> = (0..slots).map(|_| None).collect();
            for (slot, percent) in replaced {
                let bytes = if is_of_one_size { largest } else { (largest * percent).div_ceil(100) };
                let block = free.allocate(bytes);
                prop_assert!(block.is_some(), "{bytes} bytes in {free:?}");
                let row = free.allocate(beside);
                prop_assert!(row.is_some(), "{beside} bytes in {free:?}");
                let old = std::mem::replace(&mut held[slot % slots], block);
                old.into_iter().chain(row).for_each(|block| free.free(block));
            }
            held.into_iter().flatten().chain(others).for_each(|block| free.free(block));
            let usage = free.usage();
            prop_assert_eq!((usage.used, usage.largest_gap), (0, usage.capacity));
        }
    }

    #[test]
    fn nothing_needs_nothing_and_too_much_is_refused() {
        assert_eq!(bytes_for([], 4096), 0);
        for too_much in [
            bytes_for([usize::MAX, usize::MAX], 1),
            bytes_for_equal(1, usize::MAX, usize::MAX),
            bytes_for_equal(usize::MAX, 2, 1),
        ] {
            assert_eq!(too_much, usize::MAX);
            assert!(Blocks::new("the arena", too_much).is_err());
        }
        assert_eq!(bytes_for_equal(1000, 0, 4096), 0);
        assert_eq!(bytes_for_equal(1000, 3, 300), bytes_for([1000; 3], 300));
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
