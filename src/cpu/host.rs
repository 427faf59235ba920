//! Adapters in host memory beside a table: the host tier of a group's pool.

use std::sync::Arc;

use super::{
    WeightTable,
    upload::{Adapter, Arena, Filled, Packed, Reservation},
};
use crate::{
    DType,
    adapter::SlotImage,
    error::{LoadError, SlotError},
    model::Model,
    pool::PoolError,
    residency::Usage,
};

/// A budget of host memory for packed adapters.
#[derive(Debug)]
pub struct HostMemory(Arena);

/// An adapter packed in host memory. A table that loads it shares the memory.
#[derive(Debug)]
pub struct HostAdapter {
    memory: Arc<HostMemory>,
    packed: Arc<Packed>,
    model: Model,
    dtype: DType,
}

impl HostMemory {
    pub(crate) fn usage(&self) -> Usage {
        self.0.usage()
    }
}

impl HostAdapter {
    /// Packs an adapter, or returns `None` if there is no room.
    pub(crate) fn new(memory: &Arc<HostMemory>, image: &SlotImage<'_>) -> Result<Option<Self>, LoadError> {
        if memory.0.take(image.bytes()).is_err() {
            return Ok(None);
        }
        let packed = Packed::new(image, |_| ()).inspect_err(|_| memory.0.free(image.bytes()))?;
        let (model, dtype) = (image.model().clone(), image.dtype());
        Ok(Some(Self { memory: Arc::clone(memory), packed: Arc::new(packed), model, dtype }))
    }
}

impl Drop for HostAdapter {
    fn drop(&mut self) {
        self.memory.0.free(self.packed.bytes());
    }
}

impl WeightTable {
    #[expect(clippy::unnecessary_wraps, reason = "as on CUDA")]
    pub(crate) fn host_memory(&self, bytes: usize) -> Result<HostMemory, PoolError> {
        Ok(HostMemory(Arena::new(bytes)))
    }

    /// As [`arena_bytes`](Self::arena_bytes).
    pub(crate) fn arena_bytes_of(&self, packed: &HostAdapter) -> usize {
        packed.packed.bytes()
    }

    /// As [`reserve`](Self::reserve).
    pub(crate) fn reserve_packed(&self, packed: &HostAdapter) -> Result<Reservation, LoadError> {
        self.check_owner()?;
        self.bounds().check(&packed.model, packed.dtype, packed.packed.max_rank())?;
        Reservation::of(self.shared(), packed.packed.bytes())
    }

    /// As [`Reservation::fill`]. Copies nothing.
    pub(crate) fn fill_packed(&self, room: Reservation, packed: &HostAdapter) -> Result<Filled, LoadError> {
        let bytes = packed.packed.bytes();
        if bytes != room.bytes {
            return Err(SlotError::OtherImage { bytes, reserved: room.bytes }.into());
        }
        Ok(Filled { adapter: Adapter { packed: Arc::clone(&packed.packed), room } })
    }
}
