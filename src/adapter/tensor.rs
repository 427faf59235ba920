//! Tensors over bytes that anyone may own, and strided views of them.
//!
//! Invariant: a tensor has exactly as many bytes as its shape and element type require.

use std::{any::Any, fmt, fs::File, ops::Range, os::unix::fs::FileExt as _, path::PathBuf, sync::Arc};

use half::{bf16, f16};

use super::error::{AdapterError, TensorName};
use crate::{DType, Element};

/// The owner of a tensor's bytes: a vector, a shared slice, a memory map, a static slice or any other handle.
pub(super) type Storage = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Bytes that are read when they are needed.
pub(crate) trait Remote: Send + Sync {
    /// Fills `bytes` with those from `start` on.
    fn read(&self, bytes: &mut [u8], start: usize) -> Result<(), AdapterError>;

    /// What a device knows the bytes by, if they are in its memory, where nothing writes them any more.
    fn on_device(&self) -> Option<&(dyn Any + Send + Sync)> {
        None
    }
}

#[derive(Debug)]
pub(super) struct WeightFile {
    pub(super) path: PathBuf,
    pub(super) file: File,
}

impl Remote for WeightFile {
    fn read(&self, bytes: &mut [u8], start: usize) -> Result<(), AdapterError> {
        let read = self.file.read_exact_at(bytes, start as u64);
        read.map_err(|error| AdapterError::Read { path: self.path.clone(), error })
    }
}

/// A tensor of an adapter. Clones share its bytes.
#[derive(Clone)]
pub struct Tensor {
    dtype: DType,
    shape: Vec<usize>,
    place: Place,
    bytes: Range<usize>,
}

/// Where a tensor's bytes are.
#[derive(Clone)]
enum Place {
    Memory(Storage),
    /// Elsewhere, such as in a file, whose elements are converted when they are read.
    Remote(Arc<dyn Remote>, FileType),
}

/// The element type of a tensor in a file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum FileType {
    Kept(DType),
    /// F64, which is read as F32.
    Double,
    /// F8_E4M3, which is read as BF16.
    Float8,
}

impl FileType {
    /// Bytes of an element in the file.
    const fn bytes(self) -> usize {
        match self {
            Self::Kept(dtype) => dtype.bytes(),
            Self::Double => size_of::<f64>(),
            Self::Float8 => size_of::<u8>(),
        }
    }

    /// What it is read as.
    const fn dtype(self) -> DType {
        match self {
            Self::Kept(dtype) => dtype,
            Self::Double => DType::F32,
            Self::Float8 => DType::BF16,
        }
    }

    /// Converts the elements at the beginning of `bytes`, which have room for them in both types, in place.
    fn convert(self, bytes: &mut [u8], elements: usize) {
        match self {
            Self::Kept(_) => {}
            // The nearest F32 is what torch rounds to, also on the way to 16 bits.
            Self::Double => {
                for element in 0..elements {
                    let value: f64 =
                        bytemuck::pod_read_unaligned(&bytes[element * size_of::<f64>()..][..size_of::<f64>()]);
                    #[expect(clippy::cast_possible_truncation, reason = "rounds to the nearest")]
                    bytes[element * size_of::<f32>()..][..size_of::<f32>()]
                        .copy_from_slice(&(value as f32).to_le_bytes());
                }
            }
            Self::Float8 => {
                // From the last on, because they become larger.
                for element in (0..elements).rev() {
                    let value = widened(bytes[element]);
                    bytes[element * size_of::<bf16>()..][..size_of::<bf16>()].copy_from_slice(&value.to_le_bytes());
                }
            }
        }
    }
}

/// An F8_E4M3 (a sign, four bits of exponent with a bias of 7, three of mantissa; no infinity) as BF16, which has each
/// of them.
fn widened(float8: u8) -> bf16 {
    const BIAS: u16 = 127 - 7;
    const MANTISSA: u32 = 7 - 3;
    let magnitude = match float8 & 0x7f {
        0x7f => bf16::NAN,
        subnormal @ 0..8 => bf16::from_f32(f32::from(subnormal) / 512.0),
        normal => bf16::from_bits((u16::from(normal) << MANTISSA) + (BIAS << 7)),
    };
    if float8 & 0x80 == 0 { magnitude } else { -magnitude }
}

impl Tensor {
    /// A row-major tensor of little-endian elements, as in safetensors files.
    ///
    /// The bytes are kept, not copied. They may be a `Vec<u8>`, an `Arc<[u8]>`, a `&'static [u8]`, a memory map or any
    /// other handle, and must not change while the tensor or a clone is alive.
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
        let got = (*storage).as_ref().get(bytes.clone()).map(<[u8]>::len);
        if got.is_some() && got == want {
            Ok(Self { dtype, shape, place: Place::Memory(storage), bytes })
        } else {
            Err(AdapterError::Bytes { dtype, shape, got: got.unwrap_or(0) })
        }
    }

    /// As [`part`](Self::part), of the bytes of a file.
    pub(super) fn of_file(
        stored: FileType,
        shape: Vec<usize>,
        storage: &Storage,
        bytes: Range<usize>,
    ) -> Result<Self, AdapterError> {
        if let FileType::Kept(dtype) = stored {
            return Self::part(dtype, shape, Arc::clone(storage), bytes);
        }
        let mut bytes = (**storage).as_ref().get(bytes).unwrap_or_default().to_vec();
        let elements = bytes.len() / stored.bytes();
        let len = elements * stored.dtype().bytes();
        bytes.resize(len.max(bytes.len()), 0);
        stored.convert(&mut bytes, elements);
        bytes.truncate(len);
        Self::new(stored.dtype(), shape, bytes)
    }

    /// A tensor that is read from a range of a file or of other memory. [`bytes`](Self::bytes) is empty.
    pub(super) fn remote(
        stored: FileType,
        shape: Vec<usize>,
        from: Arc<dyn Remote>,
        bytes: Range<usize>,
    ) -> Result<Self, AdapterError> {
        let dtype = stored.dtype();
        let want = shape.iter().try_fold(stored.bytes(), |bytes, &dim| bytes.checked_mul(dim));
        if want == Some(bytes.len()) {
            Ok(Self { dtype, shape, place: Place::Remote(from, stored), bytes })
        } else {
            Err(AdapterError::Bytes { dtype, shape, got: bytes.len() })
        }
    }

    /// A tensor in the memory of a device.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_device(
        dtype: DType,
        shape: Vec<usize>,
        from: Arc<dyn Remote>,
        len: usize,
    ) -> Result<Self, AdapterError> {
        Self::remote(FileType::Kept(dtype), shape, from, 0..len)
    }

    /// What a device knows the tensor by, and the place of the elements there, in bytes.
    pub(super) fn on_device(&self) -> Option<(&(dyn Any + Send + Sync), usize)> {
        match &self.place {
            Place::Remote(remote, FileType::Kept(_)) => Some((remote.on_device()?, self.bytes.start)),
            Place::Memory(_) | Place::Remote(..) => None,
        }
    }

    pub(super) fn is_remote(&self) -> bool {
        !matches!(self.place, Place::Memory(_))
    }

    /// A range of the tensor's bytes, which are read into `buffer` if they are elsewhere.
    pub(super) fn read<'a>(&'a self, range: Range<usize>, buffer: &'a mut Vec<u8>) -> Result<&'a [u8], AdapterError> {
        let (remote, stored) = match &self.place {
            Place::Memory(storage) => {
                // Its owner may have fewer bytes now.
                let bytes = (**storage).as_ref().get(self.bytes.clone());
                let gone = || AdapterError::Bytes { dtype: self.dtype, shape: self.shape.clone(), got: 0 };
                return bytes.map(|bytes| &bytes[range]).ok_or_else(gone);
            }
            Place::Remote(remote, stored) => (remote, *stored),
        };
        let [first, elements] = [range.start, range.len()].map(|bytes| bytes / self.dtype.bytes());
        let len = elements * stored.bytes();
        // Only what is new is cleared.
        buffer.resize(len.max(range.len()).max(buffer.len()), 0);
        remote.read(&mut buffer[..len], self.bytes.start + first * stored.bytes())?;
        stored.convert(buffer, elements);
        Ok(&buffer[..range.len()])
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

    /// The elements: row-major, little-endian; none if they are in device memory.
    ///
    /// # Panics
    /// If the handle that has them has fewer bytes now than when the tensor was made.
    pub fn bytes(&self) -> &[u8] {
        match &self.place {
            Place::Memory(storage) => &(**storage).as_ref()[self.bytes.clone()],
            Place::Remote(..) => &[],
        }
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

    /// All elements as `f32`, row-major. Those in device memory are read.
    ///
    /// # Panics
    /// As for [`bytes`](Self::bytes), or if device memory cannot be read.
    pub fn to_f32(&self) -> Vec<f32> {
        fn widen<T: Element>(bytes: &[u8]) -> Vec<f32> {
            bytes.chunks_exact(size_of::<T>()).map(|bytes| bytemuck::pod_read_unaligned::<T>(bytes).to_f32()).collect()
        }
        let (len, mut buffer) = (self.shape.iter().product::<usize>() * self.dtype.bytes(), Vec::new());
        let bytes = self.read(0..len, &mut buffer).expect("the memory can be read");
        match self.dtype {
            DType::BF16 => widen::<bf16>(bytes),
            DType::F16 => widen::<f16>(bytes),
            DType::F32 => widen::<f32>(bytes),
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

/// A tensor, a row or a column in it, and the strides of views that lie between each other there.
pub(super) type Between = (usize, usize, [usize; 2]);

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

    /// The matrix with the elements of each row contiguous. What is in a file, or has a column stride, is in `buffer`.
    pub(super) fn load<'b>(&'b self, buffer: &'b mut Vec<u8>) -> Result<Rows<'b>, AdapterError> {
        /// To read so many bytes more takes as long as another call.
        const GAP_BYTES: usize = 4096;
        let Self { tensor, rows, cols, .. } = *self;
        if rows == 0 || cols == 0 {
            return Ok(Rows { bytes: &[], stride: 0, len: 0, rows });
        }
        let size = tensor.dtype.bytes();
        let (stride, len) = (self.row_stride * size, cols * size);
        let span = |rows: Range<usize>| self.at(rows.start, 0) * size..(self.at(rows.end - 1, cols - 1) + 1) * size;
        let is_apart = tensor.is_remote() && stride > len + GAP_BYTES;
        if self.col_stride == 1 && !is_apart {
            let bytes = tensor.read(span(0..rows), buffer)?;
            return Ok(Rows { bytes, stride, len, rows });
        }
        let mut read = Vec::new();
        if self.col_stride > 1 {
            let bytes = tensor.read(span(0..rows), &mut read)?;
            return Ok(self.gather(bytes, self.start, buffer));
        }
        buffer.clear();
        for row in 0..rows {
            buffer.extend_from_slice(tensor.read(span(row..row + 1), &mut read)?);
        }
        Ok(Rows { bytes: buffer, stride: len, len, rows })
    }

    /// The matrix, of which `bytes` begin with the tensor's element `first`.
    fn gather<'b>(&self, bytes: &[u8], first: usize, buffer: &'b mut Vec<u8>) -> Rows<'b> {
        fn copy<const SIZE: usize>(from: &[u8], step: usize, to: &mut [u8]) {
            for (from, to) in from.chunks(step * SIZE).zip(to.as_chunks_mut::<SIZE>().0) {
                to.copy_from_slice(&from[..SIZE]);
            }
        }
        let (rows, size, step) = (self.rows, self.tensor.dtype.bytes(), self.col_stride);
        let len = self.cols * size;
        // Only what is new is cleared.
        buffer.resize((rows * len).max(buffer.len()), 0);
        let to = &mut buffer[..rows * len];
        for (row, to) in to.chunks_exact_mut(len).enumerate() {
            let from = &bytes[(self.at(row, 0) - first) * size..];
            if size == 2 { copy::<2>(from, step, to) } else { copy::<4>(from, step, to) }
        }
        Rows { bytes: to, stride: len, len, rows }
    }

    /// Calls `take` with each of these views, which lie [between each other](Self::between), and its number. What they
    /// have is read once.
    pub(super) fn load_together(
        views: &[Self],
        [read, buffer]: [&mut Vec<u8>; 2],
        mut take: impl FnMut(usize, Rows<'_>),
    ) -> Result<(), AdapterError> {
        let first = views.iter().map(|view| view.start).min();
        let last = views.iter().map(|view| view.at(view.rows - 1, view.cols - 1)).max();
        let (Some(tensor), Some(first), Some(last)) = (views.first().map(|view| view.tensor), first, last) else {
            return Ok(());
        };
        let size = tensor.dtype.bytes();
        let bytes = tensor.read(first * size..(last + 1) * size, read)?;
        views.iter().enumerate().for_each(|(number, view)| take(number, view.gather(bytes, first, buffer)));
        Ok(())
    }

    /// Where its elements are, if neither those of a row nor those of a column are contiguous. Views with the same
    /// place lie between each other in a tensor, and have the same strides.
    pub(super) fn between(&self) -> Option<Between> {
        let [low, high] = [self.row_stride.min(self.col_stride), self.row_stride.max(self.col_stride)];
        let place = (std::ptr::from_ref(self.tensor).addr(), self.start / high, [self.row_stride, self.col_stride]);
        (low > 1 && self.rows > 0 && self.cols > 0).then_some(place)
    }

    /// Whether a file is read once for all rows, and not for some at a time.
    pub(super) fn is_read_at_once(&self) -> bool {
        self.tensor.is_remote() && self.col_stride > 1
    }

    /// Its place in the memory of a device, if it is there: what the device knows it by, and the first element, in
    /// bytes.
    #[cfg(feature = "cuda")]
    pub(super) fn on_device(&self) -> Option<(&'a (dyn Any + Send + Sync), usize)> {
        let (memory, start) = self.tensor.on_device()?;
        Some((memory, start + self.start * self.tensor.dtype.bytes()))
    }

    #[cfg(feature = "cuda")]
    pub(super) fn strides(&self) -> [usize; 2] {
        [self.row_stride, self.col_stride]
    }

    /// Whether both are the same elements of one tensor.
    pub(super) fn is_stored_as(&self, other: &Self) -> bool {
        let place = |view: &Self| {
            let Self { tensor, rows, cols, start, row_stride, col_stride, .. } = *view;
            (std::ptr::from_ref(tensor), [rows, cols, start, row_stride, col_stride])
        };
        place(self) == place(other)
    }

    /// Whether both have the same shape, element type and bits. Reads them as far as they are equal. Elements in the
    /// memory of a device are compared by their place alone.
    pub(super) fn same(&self, other: &Self) -> Result<bool, AdapterError> {
        /// Matrices that differ mostly do so in the first elements.
        const FIRST: usize = 32;
        /// Bytes that are read at once.
        const READ_BYTES: usize = 1 << 17;
        if (self.rows, self.cols, self.tensor.dtype) != (other.rows, other.cols, other.tensor.dtype) {
            return Ok(false);
        }
        if self.is_stored_as(other) {
            return Ok(true);
        }
        if self.tensor.on_device().is_some() {
            return Ok(false);
        }
        // Along what is contiguous.
        if self.row_stride < self.col_stride && other.row_stride < other.col_stride {
            return self.transposed().same(&other.transposed());
        }
        let mut buffers = [Vec::new(), Vec::new()];
        let mut are_equal = |rows: Range<usize>, cols: Range<usize>| {
            let [a, b] = [self, other].map(|view| view.rows(rows.clone()).columns(cols.clone()));
            let [a_buffer, b_buffer] = &mut buffers;
            Ok(a.load(a_buffer)?.iter().eq(b.load(b_buffer)?.iter()))
        };
        let row_bytes = self.row_stride.max(other.row_stride) * self.tensor.dtype.bytes();
        let step = (READ_BYTES / row_bytes.max(1)).max(1);
        let first = (0..self.rows.min(1), 0..self.cols.min(FIRST));
        let steps = (0..self.rows).step_by(step).map(|row| (row..self.rows.min(row + step), 0..self.cols));
        all([first].into_iter().chain(steps).map(|(rows, cols)| are_equal(rows, cols)))
    }
}

/// Whether all answers are yes. Asks for none after another one.
pub(super) fn all<E>(mut answers: impl Iterator<Item = Result<bool, E>>) -> Result<bool, E> {
    answers.find(|answer| !matches!(answer, Ok(true))).unwrap_or(Ok(true))
}

/// The rows of a matrix, each contiguous.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a> {
    bytes: &'a [u8],
    /// Bytes from one row to the next.
    stride: usize,
    /// Bytes of a row.
    len: usize,
    rows: usize,
}

impl<'a> Rows<'a> {
    /// Rows of `len` bytes, one after the other.
    pub(super) fn dense(bytes: &'a [u8], len: usize, rows: usize) -> Self {
        Self { bytes, stride: len, len, rows }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &'a [u8]> {
        let Self { bytes, stride, len, rows } = *self;
        (0..rows).map(move |row| &bytes[row * stride..][..len])
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    /// Bytes, behind others.
    struct Elsewhere(Vec<u8>);

    impl Remote for Elsewhere {
        fn read(&self, bytes: &mut [u8], start: usize) -> Result<(), AdapterError> {
            bytes.copy_from_slice(&self.0[start..][..bytes.len()]);
            Ok(())
        }
    }

    #[test]
    fn elements_that_are_elsewhere_are_read() {
        let values = [1.0, -2.0, 0.5, 3.0_f32];
        let bytes = [&[0xff; 8][..], bytemuck::bytes_of(&values)].concat();
        let from = Arc::new(Elsewhere(bytes));
        let tensor = Tensor::remote(FileType::Kept(DType::F32), vec![2, 2], from, 8..24).unwrap();
        assert_eq!((tensor.to_f32(), tensor.bytes()), (values.to_vec(), &[][..]));
        let mut buffer = Vec::new();
        assert_eq!(tensor.read(4..8, &mut buffer).unwrap(), bytemuck::bytes_of(&values[1]));
    }
}
