use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};

use super::{Kernels, LaunchError, raw};
use crate::{Element, error::OperandError, extent::Extent};

/// A row-major matrix in device memory, to be read.
#[derive(Debug)]
pub struct Matrix<'a, T> {
    view: CudaView<'a, T>,
    extent: Extent,
}

/// A row-major matrix in device memory, to be read and written.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    view: CudaViewMut<'a, T>,
    extent: Extent,
}

macro_rules! matrix {
    ($matrix:ident, $view:ident, $raw:ident, $operand:literal) => {
        impl<'a, T: Element> $matrix<'a, T> {
            /// `rows` rows of `cols` elements, one behind the other.
            ///
            /// # Errors
            /// If `view` is shorter.
            pub fn new(view: $view<'a, T>, rows: usize, cols: usize) -> Result<Self, OperandError> {
                Self::strided(view, rows, cols, cols)
            }

            /// `rows` rows of `cols` elements whose beginnings are `row_stride` elements apart.
            ///
            /// # Errors
            /// If `view` is shorter or rows overlap.
            pub fn strided(
                view: $view<'a, T>,
                rows: usize,
                cols: usize,
                row_stride: usize,
            ) -> Result<Self, OperandError> {
                let extent = Extent::new($operand, view.len(), rows, cols, row_stride)?;
                Ok(Self { view, extent })
            }

            /// What the raw door calls it, if it were at `ptr`.
            pub(super) fn at(&self, ptr: u64) -> raw::$raw {
                let Extent { rows, cols, row_stride } = self.extent;
                raw::$raw::new::<T>(ptr, rows, cols).row_stride(row_stride)
            }

            pub(super) fn check_context(&self, kernels: &Kernels) -> Result<(), LaunchError> {
                self.check_context_as($operand, kernels)
            }

            /// As `check_context`, of an operand that has another name.
            pub(super) fn check_context_as(&self, operand: &'static str, kernels: &Kernels) -> Result<(), LaunchError> {
                kernels.check_context(operand, self.view.stream().context())
            }
        }
    };
}

matrix!(Matrix, CudaView, MatrixRef, "x");
matrix!(MatrixMut, CudaViewMut, MatrixMut, "y");

impl<T: Element> Matrix<'_, T> {
    /// Has `stream` wait for what writes the matrix. The guard is to be dropped once the launch is enqueued.
    pub(super) fn on<'s>(&'s self, stream: &'s CudaStream) -> (raw::MatrixRef, SyncOnDrop<'s>) {
        let (ptr, guard) = self.view.device_ptr(stream);
        (self.at(ptr), guard)
    }
}

impl<T: Element> MatrixMut<'_, T> {
    /// Has `stream` wait for what reads or writes the matrix. The guard is to be dropped once the launch is enqueued.
    pub(super) fn on<'s>(&'s mut self, stream: &'s CudaStream) -> (raw::MatrixMut, SyncOnDrop<'s>) {
        let Extent { rows, cols, row_stride } = self.extent;
        let (ptr, guard) = self.view.device_ptr_mut(stream);
        (raw::MatrixMut::new::<T>(ptr, rows, cols).row_stride(row_stride), guard)
    }
}
