use cudarc::driver::SyncOnDrop;

use super::{LaunchError, Queue, Step, View, ViewMut, raw, region::Kept};
use crate::{Element, error::OperandError, extent::Extent};

/// A row-major matrix in device memory, to be read.
#[derive(Debug)]
pub struct Matrix<'a, T> {
    view: View<'a, T>,
    extent: Extent,
}

/// A row-major matrix in device memory, to be read and written.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    view: ViewMut<'a, T>,
    extent: Extent,
}

macro_rules! matrix {
    ($matrix:ident, $view:ident, $raw:ident, $operand:literal $(, $mut:tt)?) => {
        impl<'a, T: Element> $matrix<'a, T> {
            /// `rows` rows of `cols` elements, one behind the other.
            ///
            /// # Errors
            /// If `view` is shorter.
            pub fn new(view: impl Into<$view<'a, T>>, rows: usize, cols: usize) -> Result<Self, OperandError> {
                Self::strided(view, rows, cols, cols)
            }

            /// `rows` rows of `cols` elements whose beginnings are `row_stride` elements apart.
            ///
            /// # Errors
            /// If `view` is shorter or rows overlap.
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

            /// What the raw door calls it, but for its address.
            pub(super) fn shape(&self) -> raw::$raw {
                self.at(0)
            }

            /// What the raw door calls it, at that address.
            pub(super) fn at(&self, address: u64) -> raw::$raw {
                let Extent { rows, cols, row_stride } = self.extent;
                raw::$raw::new::<T>(address, rows, cols).row_stride(row_stride)
            }

            pub(super) fn check(&self, step: &Step<'_>) -> Result<(), LaunchError> {
                self.check_as($operand, step)
            }

            /// As `check`, of an operand that has another name.
            pub(super) fn check_as(&self, operand: &'static str, step: &Step<'_>) -> Result<(), LaunchError> {
                self.view.check(operand, step)
            }

            pub(super) fn kept(&self) -> Option<Kept> {
                self.view.kept()
            }

            /// Its address, once the queue's stream has been told to wait for what else uses it.
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
