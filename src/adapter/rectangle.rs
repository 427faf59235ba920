//! The part of a stored factor that a tensor-parallel rank needs, and its conversion to the layout and the element type of a
//! block.
//!
//! Invariant: it lies inside its factor.

use std::ops::Range;

use half::{bf16, f16};
use rayon::prelude::*;

use super::{
    AdapterError,
    layout::{self, B, EmbeddingA, LANE_FEATURES, LinearA, TILE_FEATURES, TILE_RANKS},
    tensor::Factor,
};
use crate::{DType, Element};

/// Some features of a stored factor.
#[derive(Clone, Debug)]
pub(super) struct Rectangle<'a> {
    factor: &'a Factor,
    kind: Kind,
    /// Columns of an A, rows of a B.
    features: Range<usize>,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    LinearA,
    EmbeddingA,
    B,
}

impl<'a> Rectangle<'a> {
    /// Some columns of a linear module's A.
    pub(super) fn linear_a(factor: &'a Factor, features: Range<usize>) -> Self {
        Self { factor, kind: Kind::LinearA, features }
    }

    /// An embedding's A.
    pub(super) fn embedding_a(factor: &'a Factor) -> Self {
        Self { factor, kind: Kind::EmbeddingA, features: 0..factor.cols }
    }

    /// Some rows of a B.
    pub(super) fn b(factor: &'a Factor, features: Range<usize>) -> Self {
        Self { factor, kind: Kind::B, features }
    }

    /// The elements it takes in a block, padding included.
    pub(super) fn block_elems(&self) -> usize {
        let (rank, features) = (self.rank(), self.features.len());
        match self.kind {
            Kind::LinearA => LinearA { rank, in_features: features }.elems(),
            Kind::EmbeddingA => EmbeddingA { vocab: features, rank }.elems(),
            Kind::B => B { out_features: features, rank }.elems(),
        }
    }

    /// Writes all of `part`, which is as large as it takes.
    pub(super) fn write<T: Element>(&self, part: &mut [u8]) -> Result<(), AdapterError> {
        match self.factor.tensor.dtype() {
            DType::BF16 => self.convert::<bf16, T>(part),
            DType::F16 => self.convert::<f16, T>(part),
            DType::F32 => self.convert::<f32, T>(part),
        }
    }

    fn convert<S: Element, T: Element>(&self, part: &mut [u8]) -> Result<(), AdapterError> {
        /// So that a task is not too little work to give away, and what it writes stays in the cache.
        const MIN_TASK_BYTES: usize = 1 << 16;
        let stripe_bytes = layout::stripe_elems(self.rank()) * size_of::<T>();
        let stripes = MIN_TASK_BYTES.div_ceil(stripe_bytes).next_multiple_of(LANE_FEATURES / TILE_FEATURES);
        let features = stripes * TILE_FEATURES;
        let finite = part
            .par_chunks_mut(stripes * stripe_bytes)
            .enumerate()
            .all(|(task, part)| self.narrowed(task * features, features).pack::<S, T>(part));
        if finite { Ok(()) } else { self.unrepresentable::<S, T>().map_or(Ok(()), Err) }
    }

    /// Up to `len` of its features. If they begin with a stripe, their part of the block is laid out like a factor of its own.
    fn narrowed(&self, start: usize, len: usize) -> Self {
        let start = self.features.start + start;
        Self { features: start..self.features.end.min(start + len), ..*self }
    }

    /// Writes the part, and says whether all of it is finite.
    fn pack<S: Element, T: Element>(&self, part: &mut [u8]) -> bool {
        let (rank, features) = (self.rank(), self.features.len());
        part.fill(0);
        match self.kind {
            Kind::LinearA => {
                let layout = LinearA { rank, in_features: features };
                self.scatter::<S, T, TILE_FEATURES, TILE_FEATURES>(part, |row, col| layout.at(row, col))
            }
            Kind::EmbeddingA => {
                let layout = EmbeddingA { vocab: features, rank };
                self.scatter::<S, T, 1, 1>(part, |row, col| layout.at(col, row))
            }
            Kind::B => {
                let layout = B { out_features: features, rank };
                self.scatter::<S, T, TILE_RANKS, 2>(part, |row, col| layout.at(row, col))
            }
        }
    }

    /// Writes the elements to where `at` says, row by row. Each `RUN` of a row are placed alike, each `PIECE` of them together.
    fn scatter<S: Element, T: Element, const RUN: usize, const PIECE: usize>(
        &self,
        part: &mut [u8],
        at: impl Fn(usize, usize) -> usize,
    ) -> bool {
        let bytes = |elems: usize| elems * size_of::<T>();
        let mut finite = true;
        // A row, with zeros behind it.
        let mut converted = Vec::new();
        for (row, elements) in self.rows::<S>().enumerate() {
            let cols = elements.len() / size_of::<S>();
            converted.resize(cols.next_multiple_of(RUN), T::default());
            finite &= convert::<S, T>(elements, &mut converted);
            for (run, values) in converted.chunks_exact(RUN).enumerate() {
                // So long that no piece needs a check of its own.
                let out = &mut part[bytes(at(row, run * RUN))..][..bytes(at(0, RUN - PIECE) + PIECE)];
                for (piece, values) in values.chunks_exact(PIECE).enumerate() {
                    let out = &mut out[bytes(at(0, piece * PIECE))..][..bytes(PIECE)];
                    out.copy_from_slice(bytemuck::cast_slice(values));
                }
            }
        }
        finite
    }

    /// Names the first weight that is not finite in a block.
    fn unrepresentable<S: Element, T: Element>(&self) -> Option<AdapterError> {
        let (first_row, first_col) = match self.kind {
            Kind::LinearA | Kind::EmbeddingA => (0, self.features.start),
            Kind::B => (self.features.start, 0),
        };
        self.rows::<S>().enumerate().find_map(|(row, elements)| {
            let mut values = elements.chunks_exact(size_of::<S>()).map(read::<S>).enumerate();
            let (col, value) = values.find(|(_, value)| !T::from_f32(*value).to_f32().is_finite())?;
            let (tensor, row, col) = (self.factor.name.clone(), first_row + row, first_col + col);
            Some(AdapterError::Unrepresentable { tensor, row, col, value, dtype: T::DTYPE })
        })
    }

    /// The stored elements, row by row.
    fn rows<S: Element>(&self) -> impl Iterator<Item = &'a [u8]> {
        let (rows, cols) = match self.kind {
            Kind::LinearA | Kind::EmbeddingA => (0..self.factor.rows, self.features.clone()),
            Kind::B => (self.features.clone(), 0..self.factor.cols),
        };
        let Factor { tensor, cols: stride, .. } = self.factor;
        rows.map(move |row| {
            &tensor.bytes()[(row * stride + cols.start) * size_of::<S>()..][..cols.len() * size_of::<S>()]
        })
    }

    fn rank(&self) -> usize {
        match self.kind {
            Kind::LinearA | Kind::EmbeddingA => self.factor.rows,
            Kind::B => self.factor.cols,
        }
    }
}

/// Converts elements, and says whether all of them are finite.
fn convert<S: Element, T: Element>(elements: &[u8], out: &mut [T]) -> bool {
    let mut finite = true;
    for (element, out) in elements.chunks_exact(size_of::<S>()).zip(out) {
        *out = T::from_f32(read::<S>(element));
        finite &= out.to_f32().is_finite();
    }
    finite
}

fn read<S: Element>(element: &[u8]) -> f32 {
    bytemuck::pod_read_unaligned::<S>(element).to_f32()
}
