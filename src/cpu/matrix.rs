use rayon::{iter::IndexedParallelIterator, iter::ParallelIterator, slice::ParallelSliceMut};

use crate::{Element, contract::Shape, error::OperandError, extent::Extent};

/// A row-major input matrix.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T> {
    data: &'a [T],
    extent: Extent,
}

impl<'a, T: Element> Matrix<'a, T> {
    /// A matrix of contiguous rows.
    ///
    /// # Errors
    /// [`OperandError::Extent`] if `data` has fewer than `rows * cols` elements.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Result<Self, OperandError> {
        Self::strided(data, rows, cols, cols)
    }

    /// A matrix whose rows start `row_stride` elements apart.
    ///
    /// # Errors
    /// [`OperandError::Extent`] if `data` is too short, or [`OperandError::Overlap`] if `row_stride < cols`.
    pub fn strided(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> Result<Self, OperandError> {
        Ok(Self { data, extent: Extent::new("x", data.len(), rows, cols, row_stride)? })
    }

    pub(super) fn shape(&self) -> Shape {
        Shape { dtype: T::DTYPE, extent: self.extent }
    }

    pub(super) fn row(&self, row: usize) -> &'a [T] {
        &self.data[row * self.extent.row_stride..][..self.extent.cols]
    }
}

/// A row-major input and output matrix.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    data: &'a mut [T],
    extent: Extent,
}

impl<'a, T: Element> MatrixMut<'a, T> {
    /// A matrix of contiguous rows.
    ///
    /// # Errors
    /// [`OperandError::Extent`] if `data` has fewer than `rows * cols` elements.
    pub fn new(data: &'a mut [T], rows: usize, cols: usize) -> Result<Self, OperandError> {
        Self::strided(data, rows, cols, cols)
    }

    /// A matrix whose rows start `row_stride` elements apart.
    ///
    /// # Errors
    /// [`OperandError::Extent`] if `data` is too short, or [`OperandError::Overlap`] if `row_stride < cols`.
    pub fn strided(data: &'a mut [T], rows: usize, cols: usize, row_stride: usize) -> Result<Self, OperandError> {
        let extent = Extent::new("y", data.len(), rows, cols, row_stride)?;
        Ok(Self { data, extent })
    }

    pub(super) fn shape(&self) -> Shape {
        Shape { dtype: T::DTYPE, extent: self.extent }
    }

    /// The rows, as disjoint slices.
    pub(super) fn rows_mut(&mut self) -> impl IndexedParallelIterator<Item = &mut [T]> {
        let Extent { rows, cols, row_stride } = self.extent;
        self.data.par_chunks_mut(row_stride.max(1)).take(rows).map(move |row| &mut row[..cols])
    }

    /// Calls `compute` with the index of each row and the row, on rayon's threads. It is `dyn`, since operations are compiled in
    /// every crate that uses them, for each `T`: a parallel iterator of each would be most of that.
    pub(super) fn for_rows(&mut self, compute: &(dyn Fn(usize, &mut [T]) + Sync)) {
        self.rows_mut().enumerate().for_each(|(index, row)| compute(index, row));
    }

    pub(super) fn clear(&mut self) {
        self.for_rows(&|_, row| row.fill(T::default()));
    }
}
