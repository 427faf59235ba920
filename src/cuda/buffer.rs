#![expect(unsafe_code, reason = "copies between the host and memory that it owns")]

use std::{marker::PhantomData, ops::Range, sync::Arc};

use cudarc::driver::{
    CudaSlice, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice, SyncOnDrop, ValidAsZeroBits,
    result,
};

use super::{
    LaunchError, Queue, Step,
    capturing::Relaxed,
    pinned::Pinned,
    region::{Kept, Region},
};

/// Device memory on a queue that a captured [`Graph`](super::Graph) can keep alive.
///
/// All work on a buffer is enqueued on its queue, and sees the results of the work enqueued before it.
#[derive(Debug)]
pub struct Buffer<T> {
    memory: Arc<Region<T>>,
}

impl<T: DeviceRepr + ValidAsZeroBits> Buffer<T> {
    /// A buffer of `len` zeros.
    ///
    /// # Errors
    /// [`LaunchError`] if device memory is exhausted, or no memory can hold `len` elements.
    pub fn zeros(queue: &Queue, len: usize) -> Result<Self, LaunchError> {
        let bytes = LaunchError::bytes_of::<T>("the buffer's elements", len)?;
        Ok(Self { memory: Arc::new(Region::new(queue, bytes)?) })
    }
}

impl<T: DeviceRepr> Buffer<T> {
    /// A buffer that owns `slice`, which must have been allocated on the queue's stream.
    ///
    /// # Errors
    /// [`LaunchError::WrongContext`] or [`LaunchError::WrongStream`] if it was allocated in another context or on another stream,
    /// [`LaunchError::PerThreadStream`] if on the calling thread's default stream, or [`LaunchError::Capturing`].
    pub fn from_slice(queue: &Queue, slice: CudaSlice<T>) -> Result<Self, LaunchError> {
        let _entered = queue.enter()?;
        Ok(Self { memory: Arc::new(Region::from_slice(queue, slice)?) })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of the first element, for the engine's own kernels on the queue's stream.
    pub fn device_ptr(&self) -> u64 {
        self.memory.region().ptr
    }

    /// Copies `elements` to the start of the buffer, in stream order, and waits for the copy.
    ///
    /// # Errors
    /// [`LaunchError`] if `elements` is longer than the buffer, or the stream is being captured.
    #[expect(clippy::disallowed_methods, reason = "waits, as documented")]
    pub fn write(&mut self, elements: &[T]) -> Result<(), LaunchError> {
        check_len(elements.len(), self.len())?;
        let queue = self.memory.queue();
        let _entered = queue.enter()?;
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
        let _entered = queue.enter()?;
        // SAFETY: the buffer is large enough, and the target outlives the copy.
        unsafe { result::memcpy_dtoh_async(elements, self.device_ptr(), queue.stream().cu_stream()) }?;
        let _relaxed = Relaxed::new();
        Ok(queue.stream().synchronize()?)
    }

    /// Enqueues a copy of the first `len` pinned elements to the start of the buffer. Never waits. The pinned elements must not
    /// change until the copy has finished; [`PinnedBuffer::elements`] waits for it.
    ///
    /// # Errors
    /// [`LaunchError`] if either has fewer than `len` elements, they belong to different queues, or the stream is being captured.
    pub fn enqueue_write(&mut self, from: &mut PinnedBuffer<T>, len: usize) -> Result<(), LaunchError> {
        let queue = self.check_copy(from, len)?;
        let _entered = queue.enter()?;
        // SAFETY: the buffer is large enough, and the stream orders its uses. The stream belongs to the current context.
        unsafe { from.memory.copy_to(self.device_ptr(), len * size_of::<T>(), queue.raw()) }
    }

    /// Enqueues a copy of the first `len` elements to the start of the pinned ones. Never waits; [`PinnedBuffer::elements`] waits
    /// for the copy.
    ///
    /// # Errors
    /// As for [`enqueue_write`](Self::enqueue_write).
    pub fn enqueue_read(&self, to: &mut PinnedBuffer<T>, len: usize) -> Result<(), LaunchError> {
        let queue = self.check_copy(to, len)?;
        let _entered = queue.enter()?;
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
        Ok(Self { memory: Pinned::new(bytes, 0)?, queue: queue.clone(), len, elements: PhantomData })
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
        // SAFETY: the memory holds `len` elements, zeroed (which is valid) or copied from elements. Page-locked memory is page-aligned.
        // The slice borrows the bytes.
        Ok(unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), self.len) })
    }
}

impl Queue {
    /// Enqueues a copy of `from` to the start of `to`. Never waits.
    ///
    /// # Errors
    /// [`LaunchError`] if `to` is shorter than `from`, an operand belongs to another context or (for buffers) another stream, or
    /// the stream is being captured.
    pub fn copy<'a, T: DeviceRepr + Send + Sync + 'static>(
        &self,
        from: impl Into<View<'a, T>>,
        to: impl Into<ViewMut<'a, T>>,
    ) -> Result<(), LaunchError> {
        let (mut from, mut to) = (from.into(), to.into());
        check_len(from.len(), to.len())?;
        from.check_queue("from", self)?;
        to.check_queue("to", self)?;
        let _entered = self.enter()?;
        let bytes = from.len() * size_of::<T>();
        let (source, _source_guard) = from.on(self);
        let (target, _target_guard) = to.on(self);
        // SAFETY: both have this many bytes. They do not overlap, because the target is borrowed exclusively. Buffers are used and
        // freed in stream order; guards order the other operands.
        Ok(unsafe { result::memcpy_dtod_async(target, source, bytes, self.stream().cu_stream()) }?)
    }
}

fn check_len(len: usize, max: usize) -> Result<(), LaunchError> {
    Ok(crate::error::OperandError::within("the copy's elements", len, max)?)
}

/// An input in device memory: a cudarc slice or view, or a [`Buffer`].
#[derive(Debug)]
pub struct View<'a, T>(Source<'a, T, CudaView<'a, T>>);

/// An input and output in device memory: a cudarc slice or view, or a [`Buffer`].
#[derive(Debug)]
pub struct ViewMut<'a, T>(Source<'a, T, CudaViewMut<'a, T>>);

#[derive(Debug)]
enum Source<'a, T, V> {
    Borrowed(V),
    Kept(Part<T>, PhantomData<&'a T>),
}

/// A range of a buffer's elements.
#[derive(Debug)]
struct Part<T> {
    memory: Arc<Region<T>>,
    first: usize,
    len: usize,
    /// Keeps anybody from borrowing a shared buffer exclusively.
    _shared: Option<Arc<Buffer<T>>>,
}

impl<T> Part<T> {
    fn share(&self) -> Self {
        Self { memory: Arc::clone(&self.memory), first: self.first, len: self.len, _shared: self._shared.clone() }
    }

    fn ptr(&self) -> u64 {
        self.memory.region().ptr + (self.first * size_of::<T>()) as u64
    }
}

impl<T> Buffer<T> {
    /// A range of elements, as input.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn slice(&self, range: Range<usize>) -> View<'_, T> {
        View(Source::Kept(self.part(range), PhantomData))
    }

    /// A range of elements, as input and output.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn slice_mut(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        ViewMut(Source::Kept(self.part(range), PhantomData))
    }

    /// The elements before `mid` and those from `mid` on, such as the input and the output of an operation in one buffer.
    ///
    /// ```no_run
    /// # use aril::cuda::*;
    /// fn add_delta(layer: &LoraLinear, step: &mut Step<'_>, activations: &mut Buffer<f32>) -> Result<(), LaunchError> {
    ///     let tokens = step.num_tokens();
    ///     let (x, y) = activations.split_at_mut(tokens * 4096);
    ///     layer.add_delta(step, Matrix::new(x.as_view(), tokens, 4096)?, MatrixMut::new(y, tokens, 1024)?)
    /// }
    /// ```
    ///
    /// # Panics
    /// If `mid` is out of bounds.
    pub fn split_at_mut(&mut self, mid: usize) -> (ViewMut<'_, T>, ViewMut<'_, T>) {
        let len = self.memory.len();
        assert!(mid <= len, "the buffer must have the elements before `mid`");
        let [first, second] = [0..mid, mid..len].map(|range| ViewMut(Source::Kept(self.part(range), PhantomData)));
        (first, second)
    }

    fn part(&self, range: Range<usize>) -> Part<T> {
        assert!(range.start <= range.end && range.end <= self.memory.len(), "the range must be in the buffer");
        Part { memory: Arc::clone(&self.memory), first: range.start, len: range.len(), _shared: None }
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

/// A shared buffer, which nobody can write to. What has the view needs no borrow of it.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use aril::{cuda::*, model::LinearId};
/// use half::bf16;
///
/// struct Output {
///     w: Arc<Buffer<bf16>>,
///     layer: FusedLinear<'static, bf16>,
/// }
///
/// fn output(weights: &WeightTable, id: LinearId, w: Arc<Buffer<bf16>>) -> Result<Output, LaunchError> {
///     let layer = FusedLinear::new(weights, id, [Matrix::new(Arc::clone(&w), 4096, 4096)?])?;
///     Ok(Output { w, layer })
/// }
/// ```
impl<T> From<Arc<Buffer<T>>> for View<'static, T> {
    fn from(buffer: Arc<Buffer<T>>) -> Self {
        let part = buffer.part(0..buffer.memory.len());
        Self(Source::Kept(Part { _shared: Some(buffer), ..part }, PhantomData))
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

impl<T> ViewMut<'_, T> {
    /// The same elements, as input.
    pub fn as_view(&self) -> View<'_, T> {
        View(match &self.0 {
            Source::Borrowed(view) => Source::Borrowed(view.as_view()),
            Source::Kept(part, _) => Source::Kept(part.share(), PhantomData),
        })
    }

    /// The same elements, for one of several uses.
    ///
    /// ```no_run
    /// # use aril::cuda::*;
    /// # fn add(layers: &[LoraLinear], step: &mut Step<'_>, x: &Buffer<f32>, mut y: ViewMut<'_, f32>) -> Result<(), LaunchError> {
    /// for layer in layers {
    ///     layer.add_delta(step, Matrix::new(x, 1, 64)?, MatrixMut::new(y.reborrow(), 1, 64)?)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut(match &mut self.0 {
            Source::Borrowed(view) => Source::Borrowed(view.slice_mut(..)),
            Source::Kept(part, _) => Source::Kept(part.share(), PhantomData),
        })
    }
}

/// Device memory that operations use.
pub(super) trait Memory {
    /// Rejects memory of another context or, of a buffer, of another stream. In a captured step, also rejects borrowed memory.
    fn check(&self, operand: &'static str, step: &Step<'_>) -> Result<(), LaunchError>;

    /// The memory that a captured step must keep alive.
    fn kept(&self) -> Option<Kept>;

    /// Makes the queue's stream wait for other uses of the memory. Drop the guard after the launch is enqueued.
    fn on<'s>(&'s mut self, queue: &'s Queue) -> (u64, Option<SyncOnDrop<'s>>);
}

macro_rules! view {
    ($view:ident) => {
        impl<T: Send + Sync + 'static> $view<'_, T> {
            /// Number of elements.
            pub(super) fn len(&self) -> usize {
                match &self.0 {
                    Source::Borrowed(view) => view.len(),
                    Source::Kept(part, _) => part.len,
                }
            }

            /// Rejects memory of another context or, for buffers, of another stream.
            pub(super) fn check_queue(&self, operand: &'static str, queue: &Queue) -> Result<(), LaunchError> {
                match &self.0 {
                    Source::Borrowed(view) => queue.kernels().check_context(operand, view.stream().context()),
                    Source::Kept(part, _) => queue.check(operand, part.memory.queue()),
                }
            }
        }
    };
}

view!(View);
view!(ViewMut);

macro_rules! memory {
    ($view:ty, $device_ptr:ident, $($borrow:tt)+) => {
        impl<T: Send + Sync + 'static> Memory for $view {
            fn check(&self, operand: &'static str, step: &Step<'_>) -> Result<(), LaunchError> {
                match &self.0 {
                    Source::Borrowed(_) if step.is_captured() => Err(LaunchError::NotKept { operand }),
                    _ => self.check_queue(operand, step.queue()),
                }
            }

            fn kept(&self) -> Option<Kept> {
                match &self.0 {
                    Source::Borrowed(_) => None,
                    Source::Kept(part, _) => Some(Arc::clone(&part.memory) as Kept),
                }
            }

            fn on<'s>(&'s mut self, queue: &'s Queue) -> (u64, Option<SyncOnDrop<'s>>) {
                match $($borrow)+ self.0 {
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

memory!(View<'_, T>, device_ptr, &);
memory!(&View<'_, T>, device_ptr, &);
memory!(ViewMut<'_, T>, device_ptr_mut, &mut);
