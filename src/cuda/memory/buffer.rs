//! Memory on the device, and buffers in it and in page-locked memory.

#![expect(
    unsafe_code,
    reason = "copies between the host and memory that it owns, which it reinterprets, and frees in stream order"
)]

use std::{any::Any, marker::PhantomData, mem::ManuallyDrop, ops::Range, sync::Arc};

use cudarc::driver::{CudaSlice, DevicePtrMut, DeviceRepr, ValidAsZeroBits, result};

use super::pinned::Pinned;
use crate::{
    cuda::{
        LaunchError, Queue,
        raw::DeviceRegion,
        stream::{self, Relaxed},
    },
    error::OperandError,
    sizes::MAX_BYTES,
};

/// Device memory on a queue that a captured [`Graph`](crate::cuda::Graph) can keep alive.
///
/// All work on a buffer is enqueued on its queue, and sees the results of the work enqueued before it.
#[derive(Debug)]
pub struct Buffer<T> {
    pub(super) memory: Arc<Region<T>>,
    /// The elements of the memory that are the buffer's.
    pub(super) range: Range<usize>,
}

impl<T: DeviceRepr + ValidAsZeroBits> Buffer<T> {
    /// A buffer of `len` zeros.
    ///
    /// # Errors
    /// [`LaunchError`] if device memory is exhausted, or no memory can hold `len` elements.
    pub fn zeros(queue: &Queue, len: usize) -> Result<Self, LaunchError> {
        let bytes = LaunchError::bytes_of::<T>("the buffer's elements", len)?;
        Ok(Self::of(Region::new(queue, bytes)?))
    }
}

impl<T> Buffer<T> {
    fn of(memory: Region<T>) -> Self {
        let range = 0..memory.len();
        Self { memory: Arc::new(memory), range }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of the first element, for the engine's own kernels on the queue's stream.
    pub fn device_ptr(&self) -> u64 {
        self.memory.region().ptr + (self.range.start * size_of::<T>()) as u64
    }

    pub(in crate::cuda) fn memory(&self) -> &Arc<Region<T>> {
        &self.memory
    }

    /// Cuts the elements from `mid` on off, into a buffer of their own. Both are in the memory of the one, which is
    /// freed when neither is left.
    ///
    /// # Panics
    /// If `mid` is out of bounds.
    #[must_use]
    pub fn split_off(&mut self, mid: usize) -> Self {
        assert!(mid <= self.len(), "the buffer must have the elements before `mid`");
        let end = std::mem::replace(&mut self.range.end, self.range.start + mid);
        Self { memory: Arc::clone(&self.memory), range: self.range.end..end }
    }
}

impl<T: DeviceRepr> Buffer<T> {
    /// A buffer that owns `slice`, which must have been allocated on the queue's stream.
    ///
    /// # Errors
    /// [`LaunchError::WrongContext`] or [`LaunchError::WrongStream`] if it was allocated in another context or on
    /// another stream, or [`LaunchError::Capturing`].
    pub fn from_slice(queue: &Queue, slice: CudaSlice<T>) -> Result<Self, LaunchError> {
        queue.prepare()?;
        Ok(Self::of(Region::from_slice(queue, slice)?))
    }

    /// Copies `elements` to the start of the buffer, in stream order, and waits for the copy.
    ///
    /// # Errors
    /// [`LaunchError`] if `elements` is longer than the buffer, or the stream is being captured.
    #[expect(clippy::disallowed_methods, reason = "waits, as documented")]
    pub fn write(&mut self, elements: &[T]) -> Result<(), LaunchError> {
        check_len(elements.len(), self.len())?;
        let queue = self.memory.queue();
        queue.prepare()?;
        // SAFETY: the buffer is large enough, the stream orders its uses, and the source outlives the copy.
        unsafe { result::memcpy_htod_async(self.device_ptr(), elements, queue.stream().cu_stream()) }?;
        let _relaxed = Relaxed::new();
        Ok(queue.stream().synchronize()?)
    }

    /// Copies the start of the buffer to `elements`, in stream order, and waits for the copy.
    ///
    /// # Errors
    /// [`LaunchError`] if `elements` is longer than the buffer, or the stream is being captured.
    #[expect(clippy::disallowed_methods, reason = "waits, as documented")]
    pub fn read(&self, elements: &mut [T]) -> Result<(), LaunchError> {
        check_len(elements.len(), self.len())?;
        let queue = self.memory.queue();
        queue.prepare()?;
        // SAFETY: the buffer is large enough, and the target outlives the copy.
        unsafe { result::memcpy_dtoh_async(elements, self.device_ptr(), queue.stream().cu_stream()) }?;
        let _relaxed = Relaxed::new();
        Ok(queue.stream().synchronize()?)
    }

    /// Enqueues a copy of the first `len` pinned elements to the start of the buffer. Never waits. The pinned elements
    /// must not change until the copy has finished; [`PinnedBuffer::elements`] waits for it.
    ///
    /// # Errors
    /// [`LaunchError`] if either has fewer than `len` elements, they belong to different queues, or the stream is being
    /// captured.
    pub fn enqueue_write(&mut self, from: &mut PinnedBuffer<T>, len: usize) -> Result<(), LaunchError> {
        let queue = self.check_copy(from, len)?;
        queue.prepare()?;
        // SAFETY: the buffer is large enough, and the stream orders its uses. The stream belongs to the current
        // context.
        unsafe { from.memory.copy_to(self.device_ptr(), len * size_of::<T>(), queue.raw()) }
    }

    /// Enqueues a copy of the first `len` elements to the start of the pinned ones. Never waits;
    /// [`PinnedBuffer::elements`] waits for the copy.
    ///
    /// # Errors
    /// As for [`enqueue_write`](Self::enqueue_write).
    pub fn enqueue_read(&self, to: &mut PinnedBuffer<T>, len: usize) -> Result<(), LaunchError> {
        let queue = self.check_copy(to, len)?;
        queue.prepare()?;
        // SAFETY: as for `enqueue_write`.
        unsafe { to.memory.copy_from(self.device_ptr(), len * size_of::<T>(), queue.raw()) }
    }

    /// Checks a copy between the buffer and pinned memory, and returns its queue.
    fn check_copy(&self, pinned: &PinnedBuffer<T>, len: usize) -> Result<&Queue, LaunchError> {
        check_len(len, self.len())?;
        check_len(len, pinned.len())?;
        let queue = self.memory.queue();
        queue.check("the pinned elements", &pinned.queue)?;
        Ok(queue)
    }
}

/// Page-locked host memory, for copies to and from a [`Buffer`] that do not wait.
///
/// An engine that writes inputs while an earlier step runs needs one per step in flight.
#[derive(Debug)]
pub struct PinnedBuffer<T> {
    memory: Pinned,
    queue: Queue,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: DeviceRepr + ValidAsZeroBits> PinnedBuffer<T> {
    /// `len` zeros, for copies on the queue.
    ///
    /// # Errors
    /// [`LaunchError`] if page-locked memory is exhausted, or no memory can hold `len` elements.
    pub fn zeros(queue: &Queue, len: usize) -> Result<Self, LaunchError> {
        let bytes = LaunchError::bytes_of::<T>("the pinned elements", len)?;
        queue.bind()?;
        Ok(Self { memory: Pinned::new(bytes)?, queue: queue.clone(), len, elements: PhantomData })
    }
}

impl<T> PinnedBuffer<T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the last copy has finished, so that [`elements`](Self::elements) does not block.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] if the driver returns an error.
    pub fn is_ready(&self) -> Result<bool, LaunchError> {
        self.queue.bind()?;
        self.memory.is_free()
    }

    /// Blocks this thread until the last copy has finished, and returns the elements.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] if the driver returns an error.
    pub fn elements(&mut self) -> Result<&mut [T], LaunchError> {
        self.queue.bind()?;
        let bytes = self.memory.wait_bytes()?;
        // SAFETY: the memory holds `len` elements, zeroed (which is valid) or copied from elements. Page-locked memory
        // is page-aligned. The slice borrows the bytes.
        Ok(unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), self.len) })
    }
}

fn check_len(len: usize, max: usize) -> Result<(), LaunchError> {
    Ok(OperandError::within("the copy's elements", len, max)?)
}

/// Memory that a captured graph keeps alive.
pub(in crate::cuda) type Kept = Arc<dyn Any + Send + Sync>;

/// Device memory used on one stream, whose order is the only synchronisation. It may be dropped while the stream is
/// being captured.
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
        queue.prepare()?;
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
        queue.check_stream("the slice", elements.stream())?;
        let (stream, len, bytes) = (Arc::clone(elements.stream()), elements.len(), elements.num_bytes());
        let _relaxed = Relaxed::new();
        // SAFETY: the slice gives up its memory. Its stream, which is the queue's, orders aril's uses of it behind its
        // own, and behind what cudarc's events have of other streams. Any byte is a valid `u8`.
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
