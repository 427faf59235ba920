//! Matrices in host memory.

use rayon::{iter::IndexedParallelIterator, iter::ParallelIterator, slice::ParallelSliceMut};

use crate::{Element, Slices, contract::Shape, error::OperandError, extent::Extent, model::SliceSite};

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

impl<'a, T: Element> Slices<Matrix<'a, T>> {
    /// A row of outputs, slice after slice.
    pub(super) fn row(&self, row: usize) -> impl Iterator<Item = &'a T> {
        self.named().flat_map(move |(_, matrix)| matrix.row(row))
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

    /// Calls `compute` with the index of each row and the row, on rayon's threads. It is `dyn`, since operations are
    /// compiled in every crate that uses them, for each `T`: a parallel iterator of each would be most of that.
    pub(super) fn for_rows(&mut self, compute: &(dyn Fn(usize, &mut [T]) + Sync)) {
        self.rows_mut().enumerate().for_each(|(index, row)| compute(index, row));
    }
}

impl<T: Element> Slices<MatrixMut<'_, T>> {
    /// Calls `compute` with the index of each row and of each slice, and the row's outputs of the slice. The matrices
    /// are of these slices.
    pub(super) fn for_rows(&mut self, slices: &[SliceSite], compute: &(dyn Fn(usize, usize, &mut [T]) + Sync)) {
        let is_fused = self.len() == 1;
        for (first, (_, matrix)) in self.named_mut().enumerate() {
            let slices = if is_fused { slices } else { &slices[first..=first] };
            matrix.for_rows(&|row, mut rest| {
                for (slice, site) in slices.iter().enumerate() {
                    let (outputs, behind) = rest.split_at_mut(site.out_features());
                    rest = behind;
                    compute(row, first + slice, outputs);
                }
            });
        }
    }
}
