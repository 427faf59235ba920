use std::{any::Any, sync::Arc};

use cudarc::driver::{CudaSlice, CudaView, DevicePtrMut, DeviceRepr, SyncOnDrop, ValidAsZeroBits};

use super::{LaunchError, Queue, raw::DeviceRegion};

/// What a captured graph keeps alive for as long as it may be replayed.
pub(super) type Kept = Arc<dyn Any + Send + Sync>;

/// Device memory that is used on one stream only, so that the stream's own order is all the order it needs; but others may read a
/// view.
#[derive(Debug)]
pub(super) struct Region<T = u8> {
    queue: Queue,
    elements: CudaSlice<T>,
    ptr: u64,
}

impl<T: DeviceRepr + ValidAsZeroBits> Region<T> {
    /// Allocates zeroed memory on the queue's stream.
    #[expect(clippy::disallowed_methods, reason = "owners allocate when they are made, never later")]
    pub(super) fn new(queue: &Queue, bytes: usize) -> Result<Self, LaunchError> {
        queue.enter()?;
        let elements = queue.stream().alloc_zeros(bytes.div_ceil(size_of::<T>()).max(1))?;
        Self::from_slice(queue, elements)
    }
}

impl<T> Region<T> {
    /// Takes memory that was allocated on the queue's stream, in whose order it is freed.
    pub(super) fn from_slice(queue: &Queue, mut elements: CudaSlice<T>) -> Result<Self, LaunchError> {
        queue.check("the slice", &Queue::new(queue.kernels(), elements.stream())?)?;
        let ptr = elements.device_ptr_mut(queue.stream()).0;
        Ok(Self { queue: queue.clone(), elements, ptr })
    }

    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    pub(super) fn len(&self) -> usize {
        self.elements.len()
    }

    /// Where it is. For use on its stream.
    pub(super) fn region(&self) -> DeviceRegion {
        DeviceRegion { ptr: self.ptr, bytes: self.elements.num_bytes() }
    }
}

impl<T: DeviceRepr> Region<T> {
    /// Has its stream wait for those that view it, before a launch that writes it. The guard is to be dropped once that is enqueued.
    pub(super) fn written(&mut self) -> SyncOnDrop<'_> {
        self.elements.device_ptr_mut(self.queue.stream()).1
    }

    /// The elements from an address in this memory on, to be read on any stream.
    pub(super) fn view(&self, address: u64, len: usize) -> CudaView<'_, T> {
        let offset = usize::try_from(address - self.ptr).expect("an offset in memory is a usize");
        let first = offset / size_of::<T>();
        self.elements.slice(first..first + len)
    }
}
