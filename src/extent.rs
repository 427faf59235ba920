//! The shape and stride of a matrix that fits in its buffer, and the sizes of memory.

use crate::error::OperandError;

/// The largest size of an object in bytes.
#[cfg(any(test, feature = "cuda"))]
pub(crate) const MAX_BYTES: usize = isize::MAX as usize;

/// The most elements of a type that memory can hold.
#[cfg(any(test, feature = "cuda"))]
pub(crate) const fn max_elements<T>() -> usize {
    match size_of::<T>() {
        0 => MAX_BYTES,
        bytes => MAX_BYTES / bytes,
    }
}

/// The product of these sizes, or `usize::MAX` if it is larger. Nothing has that size, so that whoever allocates it gets an error.
pub(crate) const fn product(sizes: &[usize]) -> usize {
    let (mut product, mut rest) = (1_usize, sizes);
    while let [first, others @ ..] = rest {
        product = product.saturating_mul(*first);
        rest = others;
    }
    product
}

/// The next multiple of `of` from `size` on, or `usize::MAX` if it is larger.
pub(crate) const fn round_up(size: usize, of: usize) -> usize {
    product(&[size.div_ceil(of), of])
}

/// The sum of these sizes, or `usize::MAX` if it is larger.
pub(crate) fn sum(sizes: impl IntoIterator<Item = usize>) -> usize {
    sizes.into_iter().fold(0, usize::saturating_add)
}

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

#[cfg(test)]
mod tests {
    use super::{MAX_BYTES, max_elements, product, round_up, sum};

    #[test]
    fn sizes_do_not_wrap() {
        assert_eq!(product(&[]), 1);
        assert_eq!(product(&[3, 5, 7]), 105);
        assert_eq!(product(&[1 << 62, 4]), usize::MAX);
        assert_eq!(product(&[usize::MAX, usize::MAX, 0]), 0);
        assert_eq!(product(&[0, usize::MAX, usize::MAX]), 0);
        assert!(product(&[1 << 31, 1 << 31, 1 << 31]) > MAX_BYTES);
        assert_eq!([round_up(0, 8), round_up(1, 8), round_up(8, 8), round_up(usize::MAX, 8)], [0, 8, 8, usize::MAX]);
        assert_eq!([sum([]), sum([3, 5, 7]), sum([1, usize::MAX, 1])], [0, 15, usize::MAX]);
    }

    #[test]
    fn memory_holds_no_more_elements_than_bytes() {
        assert_eq!(max_elements::<u8>(), MAX_BYTES);
        assert_eq!(max_elements::<f32>(), MAX_BYTES / 4);
        assert_eq!(max_elements::<()>(), MAX_BYTES);
        assert!((max_elements::<[f32; 3]>() + 1).checked_mul(12).is_some_and(|bytes| bytes > MAX_BYTES));
        // What wraps to no bytes in `usize`.
        assert!(1 << 62 > max_elements::<f32>());
    }
}
