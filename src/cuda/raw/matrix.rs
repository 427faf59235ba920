use std::ffi::c_void;

use crate::{
    DType, Element,
    contract::Shape,
    error::{LaunchError, OperandError},
    extent::Extent,
};

/// A row-major input matrix in device memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MatrixRef(pub(in crate::cuda) RawMatrix);

/// A row-major input and output matrix in device memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MatrixMut(pub(in crate::cuda) RawMatrix);

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::cuda) struct RawMatrix {
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
    /// Rejects rows that overlap, or that no memory could hold.
    pub(in crate::cuda) fn shape(&self, operand: &'static str) -> Result<Shape, OperandError> {
        let addressable = isize::MAX as usize / self.dtype.bytes();
        let extent = Extent::new(operand, addressable, self.rows, self.cols, self.row_stride)?;
        Ok(Shape { dtype: self.dtype, extent })
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

/// Refuses memory at an address that kernels cannot read.
pub(in crate::cuda) fn check_alignment(
    operand: &'static str,
    address: u64,
    alignment: usize,
) -> Result<(), LaunchError> {
    if address.is_multiple_of(alignment as u64) { Ok(()) } else { Err(LaunchError::Misaligned { operand, alignment }) }
}
