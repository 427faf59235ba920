//! Streams, device memory and matrices of the engine, how objects divide their memory, and conversions to the types of
//! the C ABI (`csrc/aril.h`).

use std::ffi::c_void;

use crate::{
    DType, Element, Slices,
    contract::Shape,
    error::{LaunchError, OperandError},
    extent::Extent,
    ffi,
    model::{MAX_SLICES, SliceSite},
};

/// A CUDA stream of the engine.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(transparent)]
pub struct Stream(*mut c_void);

// SAFETY: it holds a handle. The driver's calls that take it are thread-safe.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Wraps a `CUstream` or `cudaStream_t`. `CU_STREAM_PER_THREAD` names another stream on each thread.
    pub const fn from_raw(stream: *mut c_void) -> Self {
        Self(stream)
    }

    /// The `CUstream` or `cudaStream_t`.
    pub const fn as_raw(self) -> *mut c_void {
        self.0
    }
}

impl From<&cudarc::driver::CudaStream> for Stream {
    fn from(stream: &cudarc::driver::CudaStream) -> Self {
        Self(stream.cu_stream().cast())
    }
}

/// Device memory of the engine.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DeviceRegion {
    /// Address of the first byte.
    pub ptr: u64,
    /// Size in bytes.
    pub bytes: usize,
}

impl DeviceRegion {
    /// Rejects memory that is smaller than `bytes` or not aligned for [`Arrays`].
    pub(in crate::cuda) fn check_room(&self, operand: &'static str, bytes: usize) -> Result<(), LaunchError> {
        LaunchError::room(operand, self.bytes, "this capacity", bytes)?;
        let alignment = Arrays::ALIGNMENT_BYTES;
        if self.ptr.is_multiple_of(alignment as u64) {
            Ok(())
        } else {
            Err(LaunchError::Misaligned { operand, alignment })
        }
    }
}

/// Lays out arrays in device memory, one after the other, each aligned for the kernels.
pub(in crate::cuda) struct Arrays {
    start: u64,
    bytes: usize,
}

impl Arrays {
    /// Alignment of the memory and of each array.
    const ALIGNMENT_BYTES: usize = 256;

    /// An empty layout in memory at the address `start`.
    pub(in crate::cuda) const fn at(start: u64) -> Self {
        Self { start, bytes: 0 }
    }

    /// Appends an array of `len` elements and returns its address.
    pub(in crate::cuda) const fn push<T>(&mut self, len: usize) -> u64 {
        let address = self.start + self.bytes as u64;
        self.bytes += (len * size_of::<T>()).next_multiple_of(Self::ALIGNMENT_BYTES);
        address
    }

    /// Size of all arrays in bytes.
    pub(in crate::cuda) const fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A row-major input matrix in device memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MatrixRef(pub(in crate::cuda) RawMatrix);

/// A row-major input and output matrix in device memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MatrixMut(pub(in crate::cuda) RawMatrix);

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::cuda) struct RawMatrix {
    ptr: u64,
    pub(in crate::cuda) dtype: DType,
    rows: usize,
    cols: usize,
    row_stride: usize,
}

macro_rules! raw_matrix {
    ($matrix:ident) => {
        impl $matrix {
            /// A matrix of contiguous rows, at the address `ptr`.
            pub const fn new<T: Element>(ptr: u64, rows: usize, cols: usize) -> Self {
                Self::with_dtype(ptr, T::DTYPE, rows, cols)
            }

            /// Like `new`, with an element type known at run time.
            pub const fn with_dtype(ptr: u64, dtype: DType, rows: usize, cols: usize) -> Self {
                Self(RawMatrix { ptr, dtype, rows, cols, row_stride: cols })
            }

            /// Sets the distance between the starts of rows, in elements.
            #[must_use]
            pub const fn row_stride(self, row_stride: usize) -> Self {
                Self(RawMatrix { row_stride, ..self.0 })
            }
        }

        impl From<Slices<$matrix>> for Slices<RawMatrix> {
            fn from(matrices: Slices<$matrix>) -> Self {
                matrices.map(|matrix| matrix.0)
            }
        }
    };
}

raw_matrix!(MatrixRef);
raw_matrix!(MatrixMut);

impl RawMatrix {
    /// Rejects rows that overlap, or that no memory could hold.
    pub(in crate::cuda) fn shape(&self, operand: &'static str) -> Result<Shape, OperandError> {
        let addressable = isize::MAX as usize / self.dtype.bytes();
        let extent = Extent::new(operand, addressable, self.rows, self.cols, self.row_stride)?;
        Ok(Shape { dtype: self.dtype, extent })
    }

    /// The same matrix at another address.
    pub(in crate::cuda) fn at(self, ptr: u64) -> Self {
        Self { ptr, ..self }
    }

    /// Address and row stride.
    pub(in crate::cuda) fn place(&self) -> (*mut c_void, i64) {
        // The stride of a single row is unused and may have any value, which need not be aligned.
        let row_stride = if self.rows < 2 { self.cols } else { self.row_stride };
        (self.ptr as *mut c_void, i64::try_from(row_stride).unwrap_or(i64::MAX))
    }

    /// Rejects an address that kernels cannot read.
    pub(in crate::cuda) fn check_alignment(&self, operand: &'static str, alignment: usize) -> Result<(), LaunchError> {
        check_alignment(operand, self.ptr, alignment)
    }
}

/// The outputs of an operation that has none.
pub(in crate::cuda) const NO_OUTPUTS: [ffi::aril_outputs; MAX_SLICES] =
    [ffi::aril_outputs { first: std::ptr::null_mut(), stride: 0 }; MAX_SLICES];

impl Slices<RawMatrix> {
    pub(in crate::cuda) fn shapes(&self) -> Result<Slices<Shape>, OperandError> {
        self.try_map(|operand, matrix| matrix.shape(operand))
    }

    /// Where the outputs of each slice are that have a delta. The matrices are of these slices.
    pub(in crate::cuda) fn places(&self, slices: &[SliceSite]) -> [ffi::aril_outputs; MAX_SLICES] {
        self.places_at([0; MAX_SLICES], slices)
    }

    /// [`places`](Self::places), if the matrices' addresses are relative to these.
    pub(in crate::cuda) fn places_at(
        &self,
        addresses: [u64; MAX_SLICES],
        slices: &[SliceSite],
    ) -> [ffi::aril_outputs; MAX_SLICES] {
        let is_fused = self.len() == 1;
        let mut places = NO_OUTPUTS;
        let mut rest = places.iter_mut().zip(slices);
        for ((_, matrix), address) in self.named().zip(addresses) {
            let (matrix_at, stride) = matrix.place();
            let mut column = 0;
            for (place, slice) in rest.by_ref().take(if is_fused { slices.len() } else { 1 }) {
                let offset = (column + slice.delta_range().start) * matrix.dtype.bytes();
                let first = matrix_at.wrapping_byte_add(offset) as u64;
                *place = ffi::aril_outputs { first: first.wrapping_add(address) as *mut c_void, stride };
                column += slice.out_features();
            }
        }
        places
    }
}

/// Refuses memory at an address that kernels cannot read.
pub(in crate::cuda) fn check_alignment(
    operand: &'static str,
    address: u64,
    alignment: usize,
) -> Result<(), LaunchError> {
    if address.is_multiple_of(alignment as u64) { Ok(()) } else { Err(LaunchError::Misaligned { operand, alignment }) }
}

/// Converts a count.
pub(in crate::cuda) fn int(value: usize) -> Result<i32, LaunchError> {
    let max = i32::MAX as usize;
    i32::try_from(value).map_err(|_| OperandError::Capacity { what: "a count", got: value, max }.into())
}

/// Converts an element type.
pub(in crate::cuda) fn dtype_code(dtype: DType) -> i32 {
    let ffi::aril_dtype(code) = match dtype {
        DType::BF16 => ffi::aril_dtype::ARIL_BF16,
        DType::F16 => ffi::aril_dtype::ARIL_F16,
        DType::F32 => ffi::aril_dtype::ARIL_F32,
    };
    code.cast_signed()
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::{
        IntoSlices as _,
        model::{Linear, ModelSpec, Parallel, TpRank},
    };

    /// Outputs that have been checked are those that kernels get: of an iterator that has more behind its end, neither
    /// has it.
    #[test]
    fn every_checked_slice_has_its_place() {
        let mut spec = ModelSpec::new();
        let id = spec.linear(Linear::new("m", Parallel::Column, 8).slice("q", 64).slice("k", 32)).unwrap();
        let model = spec.shard(TpRank::SINGLE).unwrap();
        let slices = model[id].slices();
        let places = |y: &Slices<MatrixMut>| {
            Slices::<RawMatrix>::from(*y).places(slices).map(|place| place.first as u64)[..3].to_vec()
        };
        let [q, k] = [(0x1000, 64), (0x2000, 32)].map(|(at, cols)| MatrixMut::new::<f32>(at, 2, cols));
        assert_eq!(places(&MatrixMut::new::<f32>(0x1000, 2, 96).into_slices()), [0x1000, 0x1000 + 64 * 4, 0]);
        assert_eq!(places(&[q, k].into_slices()), [0x1000, 0x2000, 0]);
        let mut rest = [Some(q), None, Some(k)].into_iter();
        let y: Slices<_> = std::iter::from_fn(|| rest.next().flatten()).collect();
        assert_eq!(y.len(), 1);
        assert_eq!(Slices::<RawMatrix>::from(y).shapes().unwrap().named().count(), 1);
    }
}
