#![expect(unsafe_code, reason = "reinterprets memory as bytes and defers its deallocation")]

use std::{any::Any, marker::PhantomData, mem::ManuallyDrop, sync::Arc};

use cudarc::driver::{CudaSlice, DevicePtrMut, DeviceRepr, ValidAsZeroBits};

use crate::{
    cuda::{
        LaunchError, Queue,
        raw::DeviceRegion,
        stream::{self, Relaxed},
    },
    error::OperandError,
    extent::MAX_BYTES,
};

/// Memory that a captured graph keeps alive.
pub(in crate::cuda) type Kept = Arc<dyn Any + Send + Sync>;

/// Device memory used on one stream, whose order is the only synchronisation. It may be dropped while the stream is being captured.
#[derive(Debug)]
pub(in crate::cuda) struct Region<T = u8> {
    queue: Queue,
    bytes: ManuallyDrop<CudaSlice<u8>>,
    ptr: u64,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: DeviceRepr + ValidAsZeroBits> Region<T> {
    /// Allocates zeroed memory on the queue's stream: `bytes`, or up to one element more.
    #[expect(clippy::disallowed_methods, reason = "allocates at creation only")]
    pub(in crate::cuda) fn new(queue: &Queue, bytes: usize) -> Result<Self, LaunchError> {
        OperandError::within("the size of device memory in bytes", bytes, MAX_BYTES)?;
        let _entered = queue.enter()?;
        stream::free_postponed(queue.stream().context());
        let len = bytes.div_ceil(size_of::<T>().max(1));
        let _relaxed = Relaxed::new();
        let bytes = queue.stream().alloc_zeros((len * size_of::<T>()).max(1))?;
        Ok(Self::of(queue, bytes, len))
    }
}

impl<T> Region<T> {
    /// Takes memory allocated on the queue's stream, which orders its deallocation.
    pub(in crate::cuda) fn from_slice(queue: &Queue, elements: CudaSlice<T>) -> Result<Self, LaunchError> {
        queue.check("the slice", &Queue::new(queue.kernels(), elements.stream())?)?;
        let (stream, len, bytes) = (Arc::clone(elements.stream()), elements.len(), elements.num_bytes());
        let _relaxed = Relaxed::new();
        // SAFETY: the slice gives up its memory, whose stream waits for all other uses. Any byte is a valid `u8`.
        let bytes = unsafe { stream.upgrade_device_ptr(elements.leak(), bytes) };
        Ok(Self::of(queue, bytes, len))
    }

    fn of(queue: &Queue, mut bytes: CudaSlice<u8>, len: usize) -> Self {
        let ptr = bytes.device_ptr_mut(queue.stream()).0;
        Self { queue: queue.clone(), bytes: ManuallyDrop::new(bytes), ptr, len, elements: PhantomData }
    }

    pub(in crate::cuda) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Elements.
    pub(in crate::cuda) fn len(&self) -> usize {
        self.len
    }

    /// The memory, for use on its stream.
    pub(in crate::cuda) fn region(&self) -> DeviceRegion {
        DeviceRegion { ptr: self.ptr, bytes: self.bytes.num_bytes() }
    }
}

impl<T> Drop for Region<T> {
    fn drop(&mut self) {
        // SAFETY: nothing uses it afterwards.
        stream::free(unsafe { ManuallyDrop::take(&mut self.bytes) }, &self.queue);
    }
}
