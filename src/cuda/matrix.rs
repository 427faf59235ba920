use cudarc::driver::SyncOnDrop;

use super::{LaunchError, Queue, Step, View, ViewMut, raw, region::Kept};
use crate::{Element, error::OperandError, extent::Extent};

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
    ($matrix:ident, $view:ident, $raw:ident, $operand:literal $(, $mut:tt)?) => {
        impl<'a, T: Element> $matrix<'a, T> {
            /// A matrix of contiguous rows.
            ///
            /// # Errors
            /// [`OperandError::Extent`] if `view` has fewer than `rows * cols` elements.
            pub fn new(view: impl Into<$view<'a, T>>, rows: usize, cols: usize) -> Result<Self, OperandError> {
                Self::strided(view, rows, cols, cols)
            }

            /// A matrix whose rows start `row_stride` elements apart.
            ///
            /// # Errors
            /// [`OperandError::Extent`] if `view` is too short, or [`OperandError::Overlap`] if `row_stride < cols`.
            pub fn strided(
                view: impl Into<$view<'a, T>>,
                rows: usize,
                cols: usize,
                row_stride: usize,
            ) -> Result<Self, OperandError> {
                let view = view.into();
                let extent = Extent::new($operand, view.len(), rows, cols, row_stride)?;
                Ok(Self { view, extent })
            }

            /// The matrix in the raw API, without its address.
            pub(super) fn shape(&self) -> raw::$raw {
                self.at(0)
            }

            /// The raw matrix at this address.
            pub(super) fn at(&self, address: u64) -> raw::$raw {
                let Extent { rows, cols, row_stride } = self.extent;
                raw::$raw::new::<T>(address, rows, cols).row_stride(row_stride)
            }

            pub(super) fn check(&self, step: &Step<'_>) -> Result<(), LaunchError> {
                self.check_as($operand, step)
            }

            /// Like `check`. Errors name the matrix `operand`.
            pub(super) fn check_as(&self, operand: &'static str, step: &Step<'_>) -> Result<(), LaunchError> {
                self.view.check(operand, step)
            }

            pub(super) fn kept(&self) -> Option<Kept> {
                self.view.kept()
            }

            /// The address, after making the queue's stream wait for other uses of the memory.
            pub(super) fn on<'s>(&'s $($mut)? self, queue: &'s Queue) -> (u64, Option<SyncOnDrop<'s>>) {
                self.view.on(queue)
            }
        }
    };
}

matrix!(Matrix, View, MatrixRef, "x");
matrix!(MatrixMut, ViewMut, MatrixMut, "y", mut);

impl<T: Element> Matrix<'_, T> {
    /// Refuses memory of another context or, of a buffer, of another stream.
    pub(super) fn check_queue(&self, operand: &'static str, queue: &Queue) -> Result<(), LaunchError> {
        self.view.check_queue(operand, queue)
    }
}
