//! Tensors over bytes that anyone may own, and strided views of them.
//!
//! Invariant: a tensor has exactly as many bytes as its shape and element type require.

use std::{fmt, ops::Range, sync::Arc};

use half::{bf16, f16};

use super::error::{AdapterError, TensorName};
use crate::{DType, Element};

/// The owner of a tensor's bytes: a vector, a shared slice, a memory map, a static slice or any other handle.
pub(super) type Storage = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A tensor of an adapter. Clones share its bytes.
#[derive(Clone)]
pub struct Tensor {
    dtype: DType,
    shape: Vec<usize>,
    storage: Storage,
    bytes: Range<usize>,
}

impl Tensor {
    /// A row-major tensor of little-endian elements, as in safetensors files.
    ///
    /// The bytes are kept, not copied. They may be a `Vec<u8>`, an `Arc<[u8]>`, a `&'static [u8]`, a memory map or any other
    /// handle, and must not change while the tensor or a clone is alive.
    ///
    /// # Errors
    /// [`AdapterError::Bytes`] if the number of bytes does not match the shape and element type.
    pub fn new(
        dtype: DType,
        shape: impl Into<Vec<usize>>,
        bytes: impl AsRef<[u8]> + Send + Sync + 'static,
    ) -> Result<Self, AdapterError> {
        let len = bytes.as_ref().len();
        Self::part(dtype, shape, Arc::new(bytes), 0..len)
    }

    /// Like [`new`](Self::new), but takes a range of shared bytes, such as those of a file with many tensors.
    ///
    /// # Errors
    /// [`AdapterError::Bytes`] if the range is out of bounds, or its length does not match the shape and element type.
    pub fn part(
        dtype: DType,
        shape: impl Into<Vec<usize>>,
        storage: Arc<dyn AsRef<[u8]> + Send + Sync>,
        bytes: Range<usize>,
    ) -> Result<Self, AdapterError> {
        let shape = shape.into();
        let want = shape.iter().try_fold(dtype.bytes(), |bytes, &dim| bytes.checked_mul(dim));
        let got = (*storage).as_ref().get(bytes.clone()).map_or(0, <[u8]>::len);
        if want == Some(bytes.len()) && got == bytes.len() {
            Ok(Self { dtype, shape, storage, bytes })
        } else {
            Err(AdapterError::Bytes { dtype, shape, got })
        }
    }

    /// A tensor of `len` bytes that are elsewhere: [`bytes`](Self::bytes) is empty.
    pub(super) fn absent(dtype: DType, shape: Vec<usize>, len: usize) -> Result<Self, AdapterError> {
        let want = shape.iter().try_fold(dtype.bytes(), |bytes, &dim| bytes.checked_mul(dim));
        if want == Some(len) {
            Ok(Self { dtype, shape, storage: Arc::new([]), bytes: 0..0 })
        } else {
            Err(AdapterError::Bytes { dtype, shape, got: len })
        }
    }

    fn is_absent(&self) -> bool {
        self.bytes.is_empty() && !self.is_empty()
    }

    /// Whether the tensor has no elements, which is not whether its bytes are here.
    pub(super) fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The dimensions, slowest-varying first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements: row-major, little-endian.
    pub fn bytes(&self) -> &[u8] {
        &(*self.storage).as_ref()[self.bytes.clone()]
    }

    /// The index of the element at a linear offset.
    pub(super) fn index(&self, mut place: usize) -> Vec<usize> {
        let mut index: Vec<_> = self
            .shape
            .iter()
            .rev()
            .map(|&dim| {
                let index = place % dim;
                place /= dim;
                index
            })
            .collect();
        index.reverse();
        index
    }

    /// All elements as `f32`, row-major.
    pub fn to_f32(&self) -> Vec<f32> {
        fn widen<T: Element>(bytes: &[u8]) -> Vec<f32> {
            bytes.chunks_exact(size_of::<T>()).map(|bytes| bytemuck::pod_read_unaligned::<T>(bytes).to_f32()).collect()
        }
        match self.dtype {
            DType::BF16 => widen::<bf16>(self.bytes()),
            DType::F16 => widen::<f16>(self.bytes()),
            DType::F32 => widen::<f32>(self.bytes()),
        }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

/// A factor `[rows, cols]`.
#[derive(Clone, Debug)]
pub(super) struct Factor {
    pub(super) name: TensorName,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) tensor: Tensor,
}

impl Factor {
    pub(super) fn new(name: TensorName, tensor: Tensor) -> Result<Self, AdapterError> {
        let [rows, cols] = Stored { name: &name, tensor: &tensor }.matrix()?;
        Ok(Self { name, rows, cols, tensor })
    }

    pub(super) fn view(&self) -> View<'_> {
        self.stored().view([self.rows, self.cols])
    }

    pub(super) fn stored(&self) -> Stored<'_> {
        Stored { name: &self.name, tensor: &self.tensor }
    }

    /// Rejects another shape.
    pub(super) fn expect_shape(&self, rows: usize, cols: usize) -> Result<(), AdapterError> {
        self.stored().expect_shape(rows, cols)
    }
}

/// A tensor and its name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stored<'a> {
    pub(super) name: &'a TensorName,
    pub(super) tensor: &'a Tensor,
}

impl<'a> Stored<'a> {
    /// The shape, if it has two dimensions.
    pub(super) fn matrix(self) -> Result<[usize; 2], AdapterError> {
        let shape = self.tensor.shape();
        shape.try_into().map_err(|_| AdapterError::NotMatrix { tensor: self.name.clone(), shape: shape.to_vec() })
    }

    /// Rejects another shape.
    pub(super) fn expect_shape(self, rows: usize, cols: usize) -> Result<(), AdapterError> {
        let (got, want) = (self.matrix()?, [rows, cols]);
        if got == want { Ok(()) } else { Err(AdapterError::Shape { tensor: self.name.clone(), got, want }) }
    }

    /// The contiguous matrix of this shape at the start of the tensor.
    pub(super) fn view(self, shape: [usize; 2]) -> View<'a> {
        self.spaced(shape, [shape[1], 1])
    }

    /// The matrix of this shape at the start of the tensor, with these strides.
    pub(super) fn spaced(self, [rows, cols]: [usize; 2], [row_stride, col_stride]: [usize; 2]) -> View<'a> {
        let Self { name, tensor } = self;
        View { name, tensor, rows, cols, start: 0, row_stride, col_stride }
    }
}

/// A strided matrix in a tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    pub(super) name: &'a TensorName,
    pub(super) tensor: &'a Tensor,
    pub(super) rows: usize,
    pub(super) cols: usize,
    start: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> View<'a> {
    /// The same matrix, `elems` further on.
    pub(super) fn moved(self, elems: usize) -> Self {
        Self { start: self.start + elems, ..self }
    }

    pub(super) fn transposed(self) -> Self {
        let Self { rows, cols, row_stride, col_stride, .. } = self;
        Self { rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride, ..self }
    }

    pub(super) fn columns(self, range: Range<usize>) -> Self {
        Self { start: self.start + range.start * self.col_stride, cols: range.len(), ..self }
    }

    pub(super) fn rows(self, range: Range<usize>) -> Self {
        Self { start: self.start + range.start * self.row_stride, rows: range.len(), ..self }
    }

    /// Every `step`-th row, beginning with `first`.
    pub(super) fn every_row(self, first: usize, step: usize) -> Self {
        let rows = (self.rows - first).div_ceil(step);
        Self { rows, row_stride: self.row_stride * step, ..self.rows(first..self.rows) }
    }

    /// Linear offset of an element in the tensor.
    pub(super) fn at(&self, row: usize, col: usize) -> usize {
        self.start + row * self.row_stride + col * self.col_stride
    }

    /// The elements of a row, if they are contiguous.
    pub(super) fn contiguous_row(&self, row: usize) -> Option<&'a [u8]> {
        let size = self.tensor.dtype.bytes();
        (self.col_stride == 1).then(|| &self.tensor.bytes()[self.at(row, 0) * size..][..self.cols * size])
    }

    /// The element at a linear offset.
    pub(super) fn element(&self, index: usize) -> &'a [u8] {
        let size = self.tensor.dtype.bytes();
        &self.tensor.bytes()[index * size..][..size]
    }

    /// Whether both have the same shape, element type and bits. Different tensors without bytes differ.
    pub(super) fn same(&self, other: &Self) -> bool {
        if (self.rows, self.cols, self.tensor.dtype) != (other.rows, other.cols, other.tensor.dtype) {
            return false;
        }
        let place = |view: &Self| (std::ptr::from_ref(view.tensor), view.start, view.row_stride, view.col_stride);
        if place(self) == place(other) {
            return true;
        }
        let is_absent = self.tensor.is_absent() || other.tensor.is_absent();
        !is_absent
            && (0..self.rows).all(|row| match (self.contiguous_row(row), other.contiguous_row(row)) {
                (Some(a), Some(b)) => a == b,
                _ => (0..self.cols).all(|col| self.element(self.at(row, col)) == other.element(other.at(row, col))),
            })
    }
}
