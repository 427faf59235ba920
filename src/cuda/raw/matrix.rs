use std::ffi::c_void;

use crate::{DType, Element, error::OperandError, extent::Extent};

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
        // A stride that no row takes may be of any size.
        let row_stride = i64::try_from(self.row_stride).unwrap_or(i64::MAX);
        Ok((self.ptr as *mut c_void, row_stride))
    }
}
