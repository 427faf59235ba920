//! The shape and stride of a matrix that fits in its buffer.

use crate::error::OperandError;

/// Rows, columns, and the distance between the starts of rows in elements.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Extent {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
}

impl Extent {
    /// The extent of `operand` in a buffer of `len` elements.
    pub(crate) fn new(
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

    /// Rejects another shape.
    pub(crate) fn expect(&self, operand: &'static str, want_rows: usize, want_cols: usize) -> Result<(), OperandError> {
        let Self { rows, cols, .. } = *self;
        if (rows, cols) == (want_rows, want_cols) {
            Ok(())
        } else {
            Err(OperandError::Shape { operand, rows, cols, want_rows, want_cols })
        }
    }
}
