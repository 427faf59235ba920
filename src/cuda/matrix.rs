use super::{View, ViewMut, raw, step::Operand};
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
    ($matrix:ident, $view:ident, $raw:ident, $operand:literal) => {
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

            /// The matrix as an operand, which errors name `x` or `y`.
            pub(super) fn operand(&mut self) -> Option<Operand<'_>> {
                self.operand_as($operand)
            }

            pub(super) fn operand_as(&mut self, name: &'static str) -> Option<Operand<'_>> {
                Some((name, &mut self.view))
            }
        }
    };
}

matrix!(Matrix, View, MatrixRef, "x");
matrix!(MatrixMut, ViewMut, MatrixMut, "y");

impl<'a, T: Element> Matrix<'a, T> {
    /// Where the elements are.
    pub(super) fn view(&self) -> &View<'a, T> {
        &self.view
    }
}
