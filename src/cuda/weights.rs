use std::{fmt, marker::PhantomData, sync::Arc};

use cudarc::driver::CudaStream;
use offset_allocator::{Allocation, Allocator};

use super::{
    Kernels, LaunchError,
    raw::{Descriptor, LayerWeights},
    region::Region,
};
use crate::{
    Element, Slot,
    adapter::{MIN_STAGING_BYTES, SlotImage},
    error::SlotError,
    model::{Entry, ModelSpec},
    plan::Capacity,
};

/// What the arena hands out.
const GRANULE_BYTES: usize = 256;

/// What is packed before it is copied.
const MAX_STAGING_BYTES: usize = 32 << 20;

/// The adapters in device memory, a slot each: one arena of exact-size blocks, and the descriptor table over them.
///
/// The table's address never changes, so captured graphs follow what the slots hold. A slot changes in the order of the stream:
/// what is enqueued before sees the adapter that was there, what is enqueued after sees the new one.
#[doc(alias = "max_loras")]
#[doc(alias = "lora_a_stacked")]
pub struct WeightTable<T> {
    arena: Region,
    table: Region,
    allocator: Allocator,
    blocks: Vec<Option<Allocation>>,
    model: Vec<Entry>,
    max_rank: usize,
    element: PhantomData<T>,
}

impl<T> fmt::Debug for WeightTable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { arena, table, model, max_rank, .. } = self;
        let loaded = self.blocks.iter().flatten().count();
        f.debug_struct("WeightTable")
            .field("arena", arena)
            .field("table", table)
            .field("num_slots", &self.blocks.len())
            .field("loaded", &loaded)
            .field("num_entries", &model.len())
            .field("max_rank", max_rank)
            .finish_non_exhaustive()
    }
}

impl<T: Element> WeightTable<T> {
    /// A table of `capacity.num_slots` empty slots for the adapters of `model`, with `arena_bytes` for their factors.
    ///
    /// # Errors
    /// If the capacity is past the kernels' limits or there is no memory left.
    pub fn new(
        kernels: &Kernels,
        model: &ModelSpec,
        capacity: Capacity,
        arena_bytes: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<Self, LaunchError> {
        let Capacity { num_slots, max_rank, .. } = capacity.checked()?;
        let granules = arena_bytes.div_ceil(GRANULE_BYTES);
        let max = u32::MAX as usize;
        let granules = u32::try_from(granules).map_err(|_| LaunchError::Capacity {
            what: "the arena's bytes",
            got: arena_bytes,
            max: max * GRANULE_BYTES,
        })?;
        let table_bytes = num_slots * model.num_entries() * size_of::<Descriptor>();
        Ok(Self {
            arena: Region::new(kernels, arena_bytes.next_multiple_of(GRANULE_BYTES), stream)?,
            table: Region::new(kernels, table_bytes, stream)?,
            allocator: Allocator::new(granules),
            blocks: (0..num_slots).map(|_| None).collect(),
            model: model.entries().to_vec(),
            max_rank,
            element: PhantomData,
        })
    }

    /// Loads an adapter into a slot, in place of the one that was there. On an error the slot is as it was.
    ///
    /// There must be room for the new adapter beside the old one. Not for the hot path: it packs on this thread and copies from
    /// pageable memory.
    ///
    /// # Errors
    /// If the image does not fit the table, a weight cannot be represented, or the arena is full.
    pub fn load(&mut self, slot: Slot, image: &SlotImage<'_>, stream: &CudaStream) -> Result<(), LaunchError> {
        self.load_with_progress(slot, image, stream, |_| ())
    }

    /// As [`load`](Self::load), and calls `progress` with how many of the image's [`bytes`](SlotImage::bytes) are packed and enqueued to be
    /// copied, each time that there are more: adapters of experts may have gigabytes.
    ///
    /// # Errors
    /// As for `load`.
    pub fn load_with_progress(
        &mut self,
        slot: Slot,
        image: &SlotImage<'_>,
        stream: &CudaStream,
        progress: impl FnMut(usize),
    ) -> Result<(), LaunchError> {
        self.check(stream)?;
        let index = self.index(slot)?;
        image.check_table(&self.model, T::DTYPE, self.max_rank)?;

        let allocation = self.allocate(image.bytes())?;
        let offset = allocation.offset as usize * GRANULE_BYTES;
        if let Err(error) = self.copy(offset, image, progress).and_then(|()| self.describe(index, offset, image)) {
            self.allocator.free(allocation);
            return Err(error);
        }
        if let Some(old) = self.blocks[index].replace(allocation) {
            self.allocator.free(old);
        }
        Ok(())
    }

    /// Empties a slot: its tokens are the base model's from now on.
    ///
    /// # Errors
    /// If there is no such slot.
    pub fn unload(&mut self, slot: Slot, stream: &CudaStream) -> Result<(), LaunchError> {
        self.check(stream)?;
        let index = self.index(slot)?;
        self.write_row(index, &vec![Descriptor::default(); self.model.len()])?;
        if let Some(old) = self.blocks[index].take() {
            self.allocator.free(old);
        }
        Ok(())
    }

    /// Where the layer of that first entry ([`LinearSite::first_entry`](crate::model::LinearSite::first_entry),
    /// [`EmbeddingSite::entry`](crate::model::EmbeddingSite::entry)) has its descriptors; for the raw door.
    pub fn layer(&self, first_entry: usize) -> LayerWeights {
        LayerWeights::new(self.table.region().ptr, self.blocks.len(), self.model.len(), first_entry, self.max_rank)
    }

    pub(super) fn check(&self, stream: &CudaStream) -> Result<(), LaunchError> {
        self.table.check("the weight table", stream)
    }

    /// What each of a slot's descriptors is for.
    pub(super) fn model(&self) -> &[Entry] {
        &self.model
    }

    /// Packs the block and copies it to the arena, piece by piece: the host never holds all of it.
    fn copy(
        &mut self,
        offset: usize,
        image: &SlotImage<'_>,
        mut progress: impl FnMut(usize),
    ) -> Result<(), LaunchError> {
        let mut staging = vec![0; image.bytes().clamp(MIN_STAGING_BYTES, MAX_STAGING_BYTES)];
        image.write_pieces(&mut staging, |begin, piece| {
            self.arena.write(offset + begin, piece)?;
            progress(begin + piece.len());
            Ok(())
        })
    }

    fn describe(&mut self, index: usize, offset: usize, image: &SlotImage<'_>) -> Result<(), LaunchError> {
        self.write_row(index, &Descriptor::row(image, self.arena.region().ptr + offset as u64))
    }

    fn write_row(&mut self, index: usize, row: &[Descriptor]) -> Result<(), LaunchError> {
        self.table.write(index * size_of_val(row), bytemuck::cast_slice(row))
    }

    fn allocate(&mut self, bytes: usize) -> Result<Allocation, LaunchError> {
        let granules = u32::try_from(bytes.div_ceil(GRANULE_BYTES)).ok();
        granules.and_then(|granules| self.allocator.allocate(granules)).ok_or_else(|| {
            let largest = self.allocator.storage_report().largest_free_region as usize * GRANULE_BYTES;
            LaunchError::Full { bytes, largest }
        })
    }

    fn index(&self, slot: Slot) -> Result<usize, SlotError> {
        slot.index_below(self.blocks.len())
    }
}
