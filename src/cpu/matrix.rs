use crate::{Element, error::OperandError};

/// A row-major matrix, to be read.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T> {
    data: &'a [T],
    extent: Extent,
}

impl<'a, T: Element> Matrix<'a, T> {
    /// `rows` rows of `cols` elements, one behind the other.
    ///
    /// # Errors
    /// If `data` is shorter.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Result<Self, OperandError> {
        Self::strided(data, rows, cols, cols)
    }

    /// `rows` rows of `cols` elements whose beginnings are `row_stride` elements apart.
    ///
    /// # Errors
    /// If `data` is shorter or rows overlap.
    pub fn strided(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> Result<Self, OperandError> {
        Ok(Self { data, extent: Extent::new("x", data.len(), rows, cols, row_stride)? })
    }

    pub(super) fn row(&self, row: usize) -> &'a [T] {
        &self.data[row * self.extent.row_stride..][..self.extent.cols]
    }

    pub(super) fn check(&self, rows: usize, cols: usize) -> Result<(), OperandError> {
        self.extent.check("x", rows, cols)
    }
}

/// A row-major matrix, to be read and written.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    data: &'a mut [T],
    extent: Extent,
}

impl<'a, T: Element> MatrixMut<'a, T> {
    /// `rows` rows of `cols` elements, one behind the other.
    ///
    /// # Errors
    /// If `data` is shorter.
    pub fn new(data: &'a mut [T], rows: usize, cols: usize) -> Result<Self, OperandError> {
        Self::strided(data, rows, cols, cols)
    }

    /// `rows` rows of `cols` elements whose beginnings are `row_stride` elements apart.
    ///
    /// # Errors
    /// If `data` is shorter or rows overlap.
    pub fn strided(data: &'a mut [T], rows: usize, cols: usize, row_stride: usize) -> Result<Self, OperandError> {
        let extent = Extent::new("y", data.len(), rows, cols, row_stride)?;
        Ok(Self { data, extent })
    }

    /// Disjoint rows, for threads to write.
    pub(super) fn rows_mut(&mut self) -> impl rayon::iter::IndexedParallelIterator<Item = &mut [T]> {
        use rayon::{iter::IndexedParallelIterator, iter::ParallelIterator, slice::ParallelSliceMut};
        let Extent { rows, cols, row_stride } = self.extent;
        self.data.par_chunks_mut(row_stride.max(1)).take(rows).map(move |row| &mut row[..cols])
    }

    pub(super) fn check(&self, rows: usize, cols: usize) -> Result<(), OperandError> {
        self.extent.check("y", rows, cols)
    }
}

/// Rows, columns and the distance between rows, known to fit in their memory.
#[derive(Clone, Copy, Debug)]
struct Extent {
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl Extent {
    fn new(
        operand: &'static str,
        len: usize,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Result<Self, OperandError> {
        if row_stride < cols {
            return Err(OperandError::Overlap { operand, cols, row_stride });
        }
        let end = match rows.checked_sub(1) {
            None => Some(0),
            Some(last) => last.checked_mul(row_stride).and_then(|start| start.checked_add(cols)),
        };
        if end.is_none_or(|end| end > len) {
            return Err(OperandError::Extent { operand, rows, cols, row_stride, len });
        }
        Ok(Self { rows, cols, row_stride })
    }

    fn check(&self, operand: &'static str, want_rows: usize, want_cols: usize) -> Result<(), OperandError> {
        let Self { rows, cols, .. } = *self;
        if (rows, cols) == (want_rows, want_cols) {
            Ok(())
        } else {
            Err(OperandError::Shape { operand, rows, cols, want_rows, want_cols })
        }
    }
}
