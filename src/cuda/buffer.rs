#![expect(unsafe_code, reason = "copies between the host and memory of its own")]

use std::{marker::PhantomData, ops::Range, sync::Arc};

use cudarc::driver::{
    CudaSlice, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice, SyncOnDrop, ValidAsZeroBits,
    result,
};

use super::{
    LaunchError, Queue, Step,
    region::{Kept, Region},
};

/// Device memory of a queue that captured steps may keep: a [`Graph`](super::Graph) of operations on it shares its ownership.
///
/// Everything that uses a buffer is enqueued on its queue, so its content is what the work enqueued before has left there.
#[derive(Debug)]
pub struct Buffer<T> {
    memory: Arc<Region<T>>,
}

impl<T: DeviceRepr + ValidAsZeroBits> Buffer<T> {
    /// `len` zeros.
    ///
    /// # Errors
    /// If there is no memory left.
    pub fn zeros(queue: &Queue, len: usize) -> Result<Self, LaunchError> {
        Ok(Self { memory: Arc::new(Region::new(queue, len * size_of::<T>())?) })
    }
}

impl<T: DeviceRepr> Buffer<T> {
    /// The memory of a slice that was allocated on the queue's stream.
    ///
    /// # Errors
    /// If it was allocated on another stream, or the queue's stream is being captured.
    pub fn from_slice(queue: &Queue, slice: CudaSlice<T>) -> Result<Self, LaunchError> {
        queue.enter()?;
        Ok(Self { memory: Arc::new(Region::from_slice(queue, slice)?) })
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The address of the first element: for an engine's own kernels on the queue's stream.
    pub fn device_ptr(&self) -> u64 {
        self.memory.region().ptr
    }

    /// Copies `elements` to the beginning, in the order of the queue, and waits for the copy.
    ///
    /// # Errors
    /// If there are more elements than the buffer has, or the queue's stream is being captured.
    #[expect(clippy::disallowed_methods, reason = "says that it waits")]
    pub fn write(&mut self, elements: &[T]) -> Result<(), LaunchError> {
        self.check(elements.len())?;
        let queue = self.memory.queue();
        queue.enter()?;
        // SAFETY: there is room, nothing else uses the memory unordered, and the source lives until the copy is done.
        unsafe { result::memcpy_htod_async(self.device_ptr(), elements, queue.stream().cu_stream()) }?;
        Ok(queue.stream().synchronize()?)
    }

    /// Copies the beginning to `elements`, in the order of the queue, and waits for the copy.
    ///
    /// # Errors
    /// If there are more elements than the buffer has, or the queue's stream is being captured.
    #[expect(clippy::disallowed_methods, reason = "says that it waits")]
    pub fn read(&self, elements: &mut [T]) -> Result<(), LaunchError> {
        self.check(elements.len())?;
        let queue = self.memory.queue();
        queue.enter()?;
        // SAFETY: the buffer has so many elements, and the target lives until the copy is done.
        unsafe { result::memcpy_dtoh_async(elements, self.device_ptr(), queue.stream().cu_stream()) }?;
        Ok(queue.stream().synchronize()?)
    }

    fn check(&self, len: usize) -> Result<(), LaunchError> {
        LaunchError::within("the copy's elements", len, self.len())
    }
}

/// Elements in device memory, to be read: of a cudarc slice or view, or of a [`Buffer`].
#[derive(Debug)]
pub struct View<'a, T>(Source<'a, T, CudaView<'a, T>>);

/// Elements in device memory, to be read and written: of a cudarc slice or view, or of a [`Buffer`].
#[derive(Debug)]
pub struct ViewMut<'a, T>(Source<'a, T, CudaViewMut<'a, T>>);

#[derive(Debug)]
enum Source<'a, T, V> {
    Borrowed(V),
    Kept(Part<T>, PhantomData<&'a T>),
}

/// Elements of a buffer.
#[derive(Debug)]
struct Part<T> {
    memory: Arc<Region<T>>,
    first: usize,
    len: usize,
}

impl<T> Part<T> {
    fn ptr(&self) -> u64 {
        self.memory.region().ptr + (self.first * size_of::<T>()) as u64
    }
}

impl<T> Buffer<T> {
    /// The elements of a range, to be read.
    ///
    /// # Panics
    /// If the buffer is shorter.
    pub fn slice(&self, range: Range<usize>) -> View<'_, T> {
        View(Source::Kept(self.part(range), PhantomData))
    }

    /// The elements of a range, to be read and written.
    ///
    /// # Panics
    /// If the buffer is shorter.
    pub fn slice_mut(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        ViewMut(Source::Kept(self.part(range), PhantomData))
    }

    fn part(&self, range: Range<usize>) -> Part<T> {
        assert!(range.start <= range.end && range.end <= self.memory.len(), "the range is not in the buffer");
        Part { memory: Arc::clone(&self.memory), first: range.start, len: range.len() }
    }
}

impl<'a, T> From<CudaView<'a, T>> for View<'a, T> {
    fn from(view: CudaView<'a, T>) -> Self {
        Self(Source::Borrowed(view))
    }
}

impl<'a, T> From<&'a CudaSlice<T>> for View<'a, T> {
    fn from(slice: &'a CudaSlice<T>) -> Self {
        slice.as_view().into()
    }
}

impl<'a, T> From<&'a Buffer<T>> for View<'a, T> {
    fn from(buffer: &'a Buffer<T>) -> Self {
        buffer.slice(0..buffer.memory.len())
    }
}

impl<'a, T> From<CudaViewMut<'a, T>> for ViewMut<'a, T> {
    fn from(view: CudaViewMut<'a, T>) -> Self {
        Self(Source::Borrowed(view))
    }
}

impl<'a, T> From<&'a mut CudaSlice<T>> for ViewMut<'a, T> {
    fn from(slice: &'a mut CudaSlice<T>) -> Self {
        slice.as_view_mut().into()
    }
}

impl<'a, T> From<&'a mut Buffer<T>> for ViewMut<'a, T> {
    fn from(buffer: &'a mut Buffer<T>) -> Self {
        buffer.slice_mut(0..buffer.memory.len())
    }
}

impl<T> View<'_, T> {
    /// Refuses memory of another context or, of a buffer, of another stream.
    pub(super) fn check_queue(&self, operand: &'static str, queue: &Queue) -> Result<(), LaunchError> {
        match &self.0 {
            Source::Borrowed(view) => queue.kernels().check_context(operand, view.stream().context()),
            Source::Kept(part, _) => queue.check(operand, part.memory.queue()),
        }
    }
}

macro_rules! view {
    ($view:ident, $device_ptr:ident $(, $mut:tt)?) => {
        impl<T: Send + Sync + 'static> $view<'_, T> {
            /// Elements.
            pub(super) fn len(&self) -> usize {
                match &self.0 {
                    Source::Borrowed(view) => view.len(),
                    Source::Kept(part, _) => part.len,
                }
            }

            /// Refuses memory of another context or, of a buffer, of another stream; in a captured step also memory that cannot be
            /// kept.
            pub(super) fn check(&self, operand: &'static str, step: &Step<'_>) -> Result<(), LaunchError> {
                match &self.0 {
                    Source::Borrowed(_) if step.is_captured() => Err(LaunchError::NotKept { operand }),
                    Source::Borrowed(view) => step.queue().kernels().check_context(operand, view.stream().context()),
                    Source::Kept(part, _) => step.queue().check(operand, part.memory.queue()),
                }
            }

            /// What a captured step is to keep.
            pub(super) fn kept(&self) -> Option<Kept> {
                match &self.0 {
                    Source::Borrowed(_) => None,
                    Source::Kept(part, _) => Some(Arc::clone(&part.memory) as Kept),
                }
            }

            /// Has the queue's stream wait for what else uses the memory. The guard is to be dropped once the launch is enqueued.
            pub(super) fn on<'s>(&'s $($mut)? self, queue: &'s Queue) -> (u64, Option<SyncOnDrop<'s>>) {
                match & $($mut)? self.0 {
                    Source::Borrowed(view) => {
                        let (ptr, guard) = view.$device_ptr(queue.stream());
                        (ptr, Some(guard))
                    }
                    Source::Kept(part, _) => (part.ptr(), None),
                }
            }
        }
    };
}

view!(View, device_ptr);
view!(ViewMut, device_ptr_mut, mut);
