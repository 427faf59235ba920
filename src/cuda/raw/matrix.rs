use std::ffi::c_void;

use crate::{
    DType, Element,
    error::{LaunchError, OperandError},
    extent::Extent,
};

/// A row-major input matrix in device memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MatrixRef(pub(super) RawMatrix);

/// A row-major input and output matrix in device memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MatrixMut(pub(super) RawMatrix);

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct RawMatrix {
    ptr: u64,
    dtype: DType,
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
    };
}

raw_matrix!(MatrixRef);
raw_matrix!(MatrixMut);

impl RawMatrix {
    /// Rejects another element type or shape, and returns address and row stride.
    pub(super) fn expect(
        &self,
        operand: &'static str,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> Result<(*mut c_void, i64), OperandError> {
        if self.dtype != dtype {
            return Err(OperandError::DType { operand, got: self.dtype, want: dtype });
        }
        let addressable = isize::MAX as usize / dtype.bytes();
        Extent::new(operand, addressable, self.rows, self.cols, self.row_stride)?.expect(operand, rows, cols)?;
        // With fewer than two rows, the stride is unused and may have any value.
        let row_stride = i64::try_from(self.row_stride).unwrap_or(i64::MAX);
        Ok((self.ptr as *mut c_void, row_stride))
    }

    /// As [`expect`](Self::expect), of a matrix whose rows begin at multiples of so many bytes.
    pub(super) fn expect_aligned(
        &self,
        operand: &'static str,
        dtype: DType,
        rows: usize,
        cols: usize,
        alignment: usize,
    ) -> Result<(*mut c_void, i64), LaunchError> {
        let (ptr, row_stride) = self.expect(operand, dtype, rows, cols)?;
        check_alignment(operand, self.ptr, alignment)?;
        if rows < 2 {
            // The stride is unused and may have any value.
            return Ok((ptr, i64::try_from(cols).unwrap_or(i64::MAX)));
        }
        // Cannot overflow: the rows fit in memory.
        let stride_bytes = self.row_stride * dtype.bytes();
        if !stride_bytes.is_multiple_of(alignment) {
            return Err(LaunchError::MisalignedRows { operand, alignment, stride_bytes });
        }
        Ok((ptr, row_stride))
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
