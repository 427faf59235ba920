//! The part of a stored factor that a rank needs, and its conversion to the element type of a block.
//!
//! Invariant: it lies inside its factor.

use std::ops::Range;

use half::{bf16, f16};
use rayon::prelude::*;

use super::{AdapterError, image::padded, tensor::Factor};
use crate::{DType, Element};

/// A rectangle of a stored factor.
#[derive(Clone, Debug)]
pub(super) struct Rectangle<'a> {
    factor: &'a Factor,
    rows: Range<usize>,
    cols: Range<usize>,
    /// Whether the block holds it as `[cols, rows]`.
    transposed: bool,
}

impl<'a> Rectangle<'a> {
    pub(super) fn new(factor: &'a Factor, rows: Range<usize>, cols: Range<usize>) -> Self {
        Self { factor, rows, cols, transposed: false }
    }

    pub(super) fn transposed(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// The elements it takes in a block of `dtype`, padding included.
    pub(super) fn block_elems(&self, dtype: DType) -> usize {
        let (rows, cols) = self.block_shape();
        rows * padded(cols, dtype)
    }

    /// Writes its rows to `part`, each padded with zeros.
    pub(super) fn write<T: Element>(&self, part: &mut [u8]) -> Result<(), AdapterError> {
        match self.factor.tensor.dtype() {
            DType::BF16 => self.convert::<bf16, T>(part),
            DType::F16 => self.convert::<f16, T>(part),
            DType::F32 => self.convert::<f32, T>(part),
        }
    }

    fn convert<S: Element, T: Element>(&self, part: &mut [u8]) -> Result<(), AdapterError> {
        /// So that a row is not too little work to give away.
        const MIN_TASK_BYTES: usize = 1 << 16;
        let (_, cols) = self.block_shape();
        let row_bytes = padded(cols, T::DTYPE) * size_of::<T>();
        let bad_row = part
            .par_chunks_exact_mut(row_bytes)
            .with_min_len(MIN_TASK_BYTES.div_ceil(row_bytes))
            .enumerate()
            .find_map_first(|(row, out)| {
                let (out, padding) = out.split_at_mut(cols * size_of::<T>());
                padding.fill(0);
                (!self.convert_row::<S, T>(row, out)).then_some(row)
            });
        bad_row.map_or(Ok(()), |row| Err(self.unrepresentable::<S, T>(row)))
    }

    /// Writes a row of the block, and says whether all of it is finite.
    fn convert_row<S: Element, T: Element>(&self, row: usize, out: &mut [u8]) -> bool {
        let bytes = &self.factor.tensor.bytes()[self.index(row, 0) * size_of::<S>()..];
        let elements = bytes.chunks_exact(size_of::<S>());
        if self.transposed {
            convert::<S, T>(elements.step_by(self.factor.cols), out)
        } else {
            convert::<S, T>(elements, out)
        }
    }

    /// Names the first weight of a block's row that is not finite there.
    fn unrepresentable<S: Element, T: Element>(&self, block_row: usize) -> AdapterError {
        let (_, cols) = self.block_shape();
        let value = |index: usize| {
            let bytes = &self.factor.tensor.bytes()[index * size_of::<S>()..][..size_of::<S>()];
            bytemuck::pod_read_unaligned::<S>(bytes).to_f32()
        };
        let is_bad = |index: &usize| !T::from_f32(value(*index)).to_f32().is_finite();
        let index = (0..cols).map(|col| self.index(block_row, col)).find(is_bad).unwrap_or(self.index(block_row, 0));
        AdapterError::Unrepresentable {
            tensor: self.factor.name.clone(),
            row: index / self.factor.cols,
            col: index % self.factor.cols,
            value: value(index),
            dtype: T::DTYPE,
        }
    }

    fn block_shape(&self) -> (usize, usize) {
        if self.transposed { (self.cols.len(), self.rows.len()) } else { (self.rows.len(), self.cols.len()) }
    }

    /// Where an element of the block is in the factor.
    fn index(&self, row: usize, col: usize) -> usize {
        let (row, col) = if self.transposed { (col, row) } else { (row, col) };
        (self.rows.start + row) * self.factor.cols + self.cols.start + col
    }
}

fn convert<'a, S: Element, T: Element>(elements: impl Iterator<Item = &'a [u8]>, out: &mut [u8]) -> bool {
    let mut finite = true;
    for (element, out) in elements.zip(out.chunks_exact_mut(size_of::<T>())) {
        let stored = T::from_f32(bytemuck::pod_read_unaligned::<S>(element).to_f32());
        finite &= stored.to_f32().is_finite();
        out.copy_from_slice(bytemuck::bytes_of(&stored));
    }
    finite
}
