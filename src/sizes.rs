//! Sums and products of sizes, which do not wrap, and the most that memory holds.

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

/// The product of these sizes, or `usize::MAX` if it is larger. Nothing has that size, so that whoever allocates it
/// gets an error.
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
