//! Operands: typed memory, and matrices in it.

#![expect(unsafe_code, reason = "copies between operands, and takes ids of another type")]

use std::{marker::PhantomData, ops::Range, sync::Arc};

use cudarc::driver::{
    CudaSlice, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice, SyncOnDrop, result,
};

use super::buffer::{Kept, Region};
use crate::{
    Element, Slices,
    cuda::{
        Buffer, LaunchError, Queue,
        raw::{self, RawMatrix},
    },
    error::OperandError,
    extent::Extent,
    model::MAX_SLICES,
};

/// An input in device memory: a cudarc slice or view that was allocated on the queue's stream, or a [`Buffer`].
#[derive(Debug)]
pub struct View<'a, T>(Source<'a, T, CudaView<'a, T>>);

/// An input and output in device memory: a cudarc slice or view that was allocated on the queue's stream, or a
/// [`Buffer`].
#[derive(Debug)]
pub struct ViewMut<'a, T>(Source<'a, T, CudaViewMut<'a, T>>);

#[derive(Debug)]
enum Source<'a, T, V> {
    Borrowed(V),
    Kept(Elements<T>, PhantomData<&'a T>),
}

/// A range of a buffer's elements.
#[derive(Debug)]
struct Elements<T> {
    memory: Arc<Region<T>>,
    first: usize,
    len: usize,
    /// Keeps anybody from borrowing a shared buffer exclusively.
    _shared: Option<Arc<Buffer<T>>>,
}

impl<T> Elements<T> {
    fn share(&self) -> Self {
        self.slice(0..self.len)
    }

    /// # Panics
    /// If the range is out of bounds.
    fn slice(&self, Range { start, end }: Range<usize>) -> Self {
        assert!(start <= end && end <= self.len, "the range must be in the view");
        let (memory, shared) = (Arc::clone(&self.memory), self._shared.clone());
        Self { memory, first: self.first + start, len: end - start, _shared: shared }
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
        View(Source::Kept(self.elements(range), PhantomData))
    }

    /// A range of elements, as input and output.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn slice_mut(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        ViewMut(Source::Kept(self.elements(range), PhantomData))
    }

    /// The elements before `mid` and those from `mid` on, such as the input and the output of an operation in one
    /// buffer.
    ///
    /// ```no_run
    /// # use aril::cuda::*;
    /// fn add_delta(layer: &LoraLinear, step: &mut Step<'_>, both: &mut Buffer<f32>) -> Result<(), LaunchError> {
    ///     let tokens = step.num_tokens();
    ///     let (x, y) = both.split_at_mut(tokens * 4096);
    ///     layer.add_delta(step, Matrix::new(x.as_view(), tokens, 4096)?, MatrixMut::new(y, tokens, 1024)?)
    /// }
    /// ```
    ///
    /// # Panics
    /// If `mid` is out of bounds.
    pub fn split_at_mut(&mut self, mid: usize) -> (ViewMut<'_, T>, ViewMut<'_, T>) {
        let len = self.len();
        assert!(mid <= len, "the buffer must have the elements before `mid`");
        let [first, second] = [0..mid, mid..len].map(|range| ViewMut(Source::Kept(self.elements(range), PhantomData)));
        (first, second)
    }

    fn elements(&self, range: Range<usize>) -> Elements<T> {
        assert!(range.start <= range.end && range.end <= self.len(), "the range must be in the buffer");
        let first = self.range.start + range.start;
        Elements { memory: Arc::clone(&self.memory), first, len: range.len(), _shared: None }
    }
}

impl<'a, T> From<CudaView<'a, T>> for View<'a, T> {
    fn from(view: CudaView<'a, T>) -> Self {
        Self(Source::Borrowed(view))
    }
}

impl<'a> View<'a, i32> {
    /// Ids as other libraries have them. One above `i32::MAX` is negative, and no id of anything.
    pub fn of_ids(ids: CudaView<'a, u32>) -> Self {
        // SAFETY: both types have the same size, and every value of one is a value of the other.
        let ids = unsafe { ids.transmute::<i32>(ids.len()) };
        ids.expect("as many elements of the same size").into()
    }
}

impl<'a, T> From<&'a CudaSlice<T>> for View<'a, T> {
    fn from(slice: &'a CudaSlice<T>) -> Self {
        slice.as_view().into()
    }
}

impl<'a, T> From<&'a Buffer<T>> for View<'a, T> {
    fn from(buffer: &'a Buffer<T>) -> Self {
        buffer.slice(0..buffer.len())
    }
}

/// A shared buffer, which nobody can write to. What has the view, or a [part](View::slice) of it, needs no borrow of
/// the buffer.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use aril::{cuda::*, model::LinearId};
/// use half::bf16;
///
/// struct Qkv {
///     w: Arc<Buffer<bf16>>,
///     layer: FusedLinear<'static, bf16>,
/// }
///
/// /// q, k and v are slice after slice in one W.
/// fn qkv(weights: &WeightTable, id: LinearId, w: Arc<Buffer<bf16>>) -> Result<Qkv, LaunchError> {
///     const HIDDEN: usize = 4096;
///     let all = View::from(Arc::clone(&w));
///     let rows = |first: usize, rows: usize| {
///         Matrix::new(all.slice(first * HIDDEN..(first + rows) * HIDDEN), rows, HIDDEN)
///     };
///     let layer = FusedLinear::new(weights, id, [rows(0, 4096)?, rows(4096, 1024)?, rows(5120, 1024)?])?;
///     Ok(Qkv { w, layer })
/// }
/// ```
impl<T> From<Arc<Buffer<T>>> for View<'static, T> {
    fn from(buffer: Arc<Buffer<T>>) -> Self {
        let part = buffer.elements(0..buffer.len());
        Self(Source::Kept(Elements { _shared: Some(buffer), ..part }, PhantomData))
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
        buffer.slice_mut(0..buffer.len())
    }
}

impl<'a, T> View<'a, T> {
    /// A range of the elements.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> View<'a, T> {
        View(match &self.0 {
            Source::Borrowed(view) => Source::Borrowed(view.slice(range)),
            Source::Kept(part, _) => Source::Kept(part.slice(range), PhantomData),
        })
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
    /// # fn add(
    /// #     layers: &[LoraLinear], step: &mut Step<'_>, x: &Buffer<f32>, mut y: ViewMut<'_, f32>,
    /// # ) -> Result<(), LaunchError> {
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

/// An address, and the guard of cudarc's memory.
pub(in crate::cuda) type Placed<'s> = (u64, Option<SyncOnDrop<'s>>);

/// An operand's name in errors, and its memory.
pub(in crate::cuda) type Operand<'o> = (&'static str, &'o mut dyn Memory);

/// Device memory that operations use.
pub(in crate::cuda) trait Memory {
    /// Rejects memory of another context or stream. In a captured step, also rejects borrowed memory.
    fn check(&self, operand: &'static str, queue: &Queue, is_captured: bool) -> Result<(), LaunchError>;

    /// The memory that a captured step must keep alive.
    fn kept(&self) -> Option<Kept>;

    /// The address, for use on the queue's stream. Of cudarc's memory, that stream waits for what cudarc's events have
    /// of other streams, and later uses by cudarc wait for this one if the guard is dropped after the launch is
    /// enqueued. Such an event may be one of a capture of another stream, of which the wait makes the queue's stream a
    /// part: then this is refused.
    fn on<'s>(&'s mut self, queue: &'s Queue) -> Result<Placed<'s>, LaunchError>;
}

macro_rules! view {
    ($view:ident) => {
        impl<T: Send + Sync + 'static> $view<'_, T> {
            /// Number of elements.
            pub(in crate::cuda) fn len(&self) -> usize {
                match &self.0 {
                    Source::Borrowed(view) => view.len(),
                    Source::Kept(part, _) => part.len,
                }
            }

            /// Rejects memory of another context or stream.
            pub(in crate::cuda) fn check_queue(&self, operand: &'static str, queue: &Queue) -> Result<(), LaunchError> {
                let stream = match &self.0 {
                    Source::Borrowed(view) => view.stream(),
                    Source::Kept(part, _) => part.memory.queue().stream(),
                };
                queue.check_stream(operand, stream)
            }
        }
    };
}

view!(View);
view!(ViewMut);

macro_rules! memory {
    ($view:ty, $device_ptr:ident, $($borrow:tt)+) => {
        impl<T: Send + Sync + 'static> Memory for $view {
            fn check(&self, operand: &'static str, queue: &Queue, is_captured: bool) -> Result<(), LaunchError> {
                match &self.0 {
                    Source::Borrowed(_) if is_captured => Err(LaunchError::NotKept { operand }),
                    _ => self.check_queue(operand, queue),
                }
            }

            fn kept(&self) -> Option<Kept> {
                match &self.0 {
                    Source::Borrowed(_) => None,
                    Source::Kept(part, _) => Some(Arc::clone(&part.memory) as Kept),
                }
            }

            fn on<'s>(&'s mut self, queue: &'s Queue) -> Result<Placed<'s>, LaunchError> {
                match $($borrow)+ self.0 {
                    Source::Borrowed(view) => {
                        let (ptr, guard) = view.$device_ptr(queue.stream());
                        queue.prepare()?;
                        Ok((ptr, Some(guard)))
                    }
                    Source::Kept(part, _) => Ok((part.ptr(), None)),
                }
            }
        }
    };
}

memory!(View<'_, T>, device_ptr, &);
memory!(&View<'_, T>, device_ptr, &);
memory!(ViewMut<'_, T>, device_ptr_mut, &mut);

impl Queue {
    /// Enqueues a copy of `from` to the start of `to`. Never waits.
    ///
    /// # Errors
    /// [`LaunchError`] if `to` is shorter than `from`, an operand belongs to another context or stream, or the engine
    /// captures the stream.
    pub fn copy<'a, T: DeviceRepr + Send + Sync + 'static>(
        &self,
        from: impl Into<View<'a, T>>,
        to: impl Into<ViewMut<'a, T>>,
    ) -> Result<(), LaunchError> {
        let (mut from, mut to) = (from.into(), to.into());
        OperandError::within("the copy's elements", from.len(), to.len())?;
        from.check_queue("from", self)?;
        to.check_queue("to", self)?;
        self.prepare()?;
        let bytes = from.len() * size_of::<T>();
        let (source, _source_guard) = from.on(self)?;
        let (target, _target_guard) = to.on(self)?;
        // SAFETY: both have this many bytes. They do not overlap, because the target is borrowed exclusively. Both
        // belong to this stream, in whose order they are used and freed.
        Ok(unsafe { result::memcpy_dtod_async(target, source, bytes, self.stream().cu_stream()) }?)
    }
}

/// A row-major input matrix in device memory.
#[derive(Debug)]
pub struct Matrix<'a, T> {
    view: View<'a, T>,
    extent: Extent,
}

/// A row-major input and output matrix in device memory.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    view: ViewMut<'a, T>,
    extent: Extent,
}

macro_rules! matrix {
    ($matrix:ident, $view:ident, $raw:ident, $operand:literal) => {
        impl<'a, T: Element> $matrix<'a, T> {
            /// A matrix of contiguous rows.
            ///
            /// # Errors
            /// [`LaunchError::Operand`] if `view` has fewer than `rows * cols` elements.
            pub fn new(view: impl Into<$view<'a, T>>, rows: usize, cols: usize) -> Result<Self, LaunchError> {
                Self::strided(view, rows, cols, cols)
            }

            /// A matrix whose rows start `row_stride` elements apart.
            ///
            /// # Errors
            /// [`LaunchError::Operand`] if `view` is too short, or `row_stride < cols`.
            pub fn strided(
                view: impl Into<$view<'a, T>>,
                rows: usize,
                cols: usize,
                row_stride: usize,
            ) -> Result<Self, LaunchError> {
                let view = view.into();
                let extent = Extent::new($operand, view.len(), rows, cols, row_stride)?;
                Ok(Self { view, extent })
            }

            /// The matrix in the raw API, without its address.
            pub(in crate::cuda) fn shape(&self) -> raw::$raw {
                self.at(0)
            }

            /// The raw matrix at this address.
            pub(in crate::cuda) fn at(&self, address: u64) -> raw::$raw {
                let Extent { rows, cols, row_stride } = self.extent;
                raw::$raw::new::<T>(address, rows, cols).row_stride(row_stride)
            }

            /// The matrix as an operand, which errors name `x` or `y`.
            pub(in crate::cuda) fn operand(&mut self) -> Option<Operand<'_>> {
                self.operand_as($operand)
            }

            pub(in crate::cuda) fn operand_as(&mut self, name: &'static str) -> Option<Operand<'_>> {
                Some((name, &mut self.view))
            }
        }

        impl<T: Element> Slices<$matrix<'_, T>> {
            /// The matrices in the raw API, without their addresses.
            pub(in crate::cuda) fn shapes(&self) -> Slices<RawMatrix> {
                self.map(|matrix| matrix.shape().0)
            }

            /// The matrices as operands.
            pub(in crate::cuda) fn operands(&mut self) -> [Option<Operand<'_>>; MAX_SLICES] {
                let mut operands = self.named_mut().map(|(name, matrix)| (name, &mut matrix.view as &mut dyn Memory));
                std::array::from_fn(|_| operands.next())
            }
        }
    };
}

matrix!(Matrix, View, MatrixRef, "x");
matrix!(MatrixMut, ViewMut, MatrixMut, "y");

impl<'a, T: Element> Matrix<'a, T> {
    /// Where the elements are.
    pub(in crate::cuda) fn view(&self) -> &View<'a, T> {
        &self.view
    }
}
