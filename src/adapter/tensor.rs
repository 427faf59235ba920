//! A tensor's bytes, mapped from a file or owned, and how they are read as numbers.
//!
//! It knows nothing of what a tensor is for. Invariant: there are exactly as many bytes as the shape and the type ask for.

use std::{fmt, ops::Range, path::PathBuf, sync::Arc};

use half::{bf16, f16};
use memmap2::Mmap;

use super::AdapterError;
use crate::{DType, Element};

/// A tensor of an adapter, in memory or mapped from a file.
#[derive(Clone)]
pub struct Tensor {
    dtype: DType,
    shape: Vec<usize>,
    data: Data,
}

#[derive(Clone)]
enum Data {
    Owned(Vec<u8>),
    Mapped(Arc<Mmap>, Range<usize>),
}

impl Tensor {
    /// A row-major tensor in memory, little-endian as in safetensors files.
    ///
    /// # Errors
    /// If `bytes` is not as long as the shape and the type ask for.
    pub fn new(dtype: DType, shape: impl Into<Vec<usize>>, bytes: Vec<u8>) -> Result<Self, AdapterError> {
        Self::checked(dtype, shape.into(), Data::Owned(bytes))
    }

    pub(super) fn mapped(
        dtype: DType,
        shape: Vec<usize>,
        file: Arc<Mmap>,
        range: Range<usize>,
    ) -> Result<Self, AdapterError> {
        Self::checked(dtype, shape, Data::Mapped(file, range))
    }

    fn checked(dtype: DType, shape: Vec<usize>, data: Data) -> Result<Self, AdapterError> {
        let want = shape.iter().try_fold(dtype.bytes(), |bytes, &dim| bytes.checked_mul(dim));
        let got = data.bytes().len();
        if want == Some(got) { Ok(Self { dtype, shape, data }) } else { Err(AdapterError::Bytes { dtype, shape, got }) }
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The dimensions, slowest first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements, row-major and little-endian.
    pub fn bytes(&self) -> &[u8] {
        self.data.bytes()
    }

    /// All elements, row-major.
    pub(super) fn to_f32(&self) -> Vec<f32> {
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

impl Data {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            Self::Mapped(file, range) => &file[range.clone()],
        }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

/// A tensor as errors name it: its key, and the file that it is in.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct TensorName {
    /// The key, as the file spells it.
    pub key: String,
    /// The file; none for a tensor that was passed in memory.
    pub file: Option<PathBuf>,
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.key)?;
        self.file.as_ref().map_or(Ok(()), |file| write!(f, " in {}", file.display()))
    }
}

/// A factor of a module, `[rows, cols]`.
#[derive(Clone, Debug)]
pub(super) struct Factor {
    pub(super) name: TensorName,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) tensor: Tensor,
}

impl Factor {
    pub(super) fn new(name: TensorName, tensor: Tensor) -> Result<Self, AdapterError> {
        match *tensor.shape() {
            [rows, cols] => Ok(Self { name, rows, cols, tensor }),
            _ => Err(AdapterError::NotMatrix { tensor: name, shape: tensor.shape }),
        }
    }

    /// Fails unless it is `[rows, cols]`.
    pub(super) fn expect_shape(&self, rows: usize, cols: usize) -> Result<(), AdapterError> {
        if (self.rows, self.cols) == (rows, cols) {
            return Ok(());
        }
        Err(AdapterError::Shape { tensor: self.name.clone(), got: [self.rows, self.cols], want: [rows, cols] })
    }
}
