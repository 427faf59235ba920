//! One rank's part of a stored factor, and its conversion to the layout and element type of a block.
//!
//! Invariant: it lies inside its tensor.

use half::{bf16, f16};
use rayon::prelude::*;

use super::{
    error::AdapterError,
    layout::{self, B, CORE, EmbeddingA, K_TILE, LinearA, TILE_FEATURES, TILE_RANKS},
    tensor::View,
};
use crate::{DType, Element};

/// A factor, or a range of its features.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rectangle<'a> {
    view: View<'a>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    LinearA,
    EmbeddingA,
    B,
}

impl<'a> Rectangle<'a> {
    /// A of a linear module, `[rank, in_features]`.
    pub(super) fn linear_a(view: View<'a>) -> Self {
        Self { view, kind: Kind::LinearA }
    }

    /// A of an embedding, `[rank, vocab]`.
    pub(super) fn embedding_a(view: View<'a>) -> Self {
        Self { view, kind: Kind::EmbeddingA }
    }

    /// B, `[out_features, rank]`.
    pub(super) fn b(view: View<'a>) -> Self {
        Self { view, kind: Kind::B }
    }

    /// Size in a block in elements, including padding.
    pub(super) fn block_elems(&self) -> usize {
        let (rank, features) = self.shape();
        match self.kind {
            Kind::LinearA => LinearA { rank, in_features: features }.elems(),
            Kind::EmbeddingA => EmbeddingA { vocab: features, rank }.elems(),
            Kind::B => B { out_features: features, rank }.elems(),
        }
    }

    /// Writes the factor to `part`, which has its size.
    pub(super) fn write<T: Element>(&self, part: &mut [u8]) -> Result<(), AdapterError> {
        match self.view.tensor.dtype() {
            DType::BF16 => self.convert::<bf16, T>(part),
            DType::F16 => self.convert::<f16, T>(part),
            DType::F32 => self.convert::<f32, T>(part),
        }
    }

    fn convert<S: Element, T: Element>(&self, part: &mut [u8]) -> Result<(), AdapterError> {
        /// Large enough to be worth scheduling, small enough that the output stays in cache.
        const MIN_TASK_BYTES: usize = 1 << 16;
        let stripe_bytes = layout::stripe_elems(self.shape().0) * size_of::<T>();
        let stripes = MIN_TASK_BYTES.div_ceil(stripe_bytes).next_multiple_of(K_TILE / TILE_FEATURES);
        let features = stripes * TILE_FEATURES;
        let finite = part
            .par_chunks_mut(stripes * stripe_bytes)
            .enumerate()
            .all(|(task, part)| self.narrowed(task * features, features).pack::<S, T>(part));
        if finite { Ok(()) } else { self.unrepresentable::<S, T>().map_or(Ok(()), Err) }
    }

    /// Splits the factor into consecutive parts of at most `max_elems` elements, which must hold one K tile.
    pub(super) fn split(&self, max_elems: usize) -> impl Iterator<Item = Self> {
        let (rank, features) = self.shape();
        let stripes = max_elems / layout::stripe_elems(rank);
        let len = (stripes * TILE_FEATURES / K_TILE * K_TILE).max(K_TILE);
        (0..features).step_by(len).map(move |start| self.narrowed(start, len))
    }

    /// Up to `len` features from `start` on. If `start` is at a stripe boundary, their part of the block has the layout of a
    /// separate factor.
    fn narrowed(&self, start: usize, len: usize) -> Self {
        let range = start..self.shape().1.min(start + len);
        let view = match self.kind {
            Kind::LinearA | Kind::EmbeddingA => self.view.columns(range),
            Kind::B => self.view.rows(range),
        };
        Self { view, ..*self }
    }

    /// Writes the factor and returns whether every element is finite.
    fn pack<S: Element, T: Element>(&self, part: &mut [u8]) -> bool {
        let (rank, features) = self.shape();
        part.fill(0);
        match self.kind {
            Kind::LinearA => {
                let layout = LinearA { rank, in_features: features };
                self.scatter::<S, T, TILE_FEATURES, CORE>(part, |row, col| layout.at(row, col))
            }
            Kind::EmbeddingA => {
                let layout = EmbeddingA { vocab: features, rank };
                self.scatter::<S, T, 1, 1>(part, |row, col| layout.at(col, row))
            }
            Kind::B => {
                let layout = B { out_features: features, rank };
                self.scatter::<S, T, TILE_RANKS, CORE>(part, |row, col| layout.at(row, col))
            }
        }
    }

    /// Writes the elements row by row to the offsets `at`. Each `RUN` elements of a row have the same relative offsets, and each
    /// `PIECE` of them are contiguous.
    fn scatter<S: Element, T: Element, const RUN: usize, const PIECE: usize>(
        &self,
        part: &mut [u8],
        at: impl Fn(usize, usize) -> usize,
    ) -> bool {
        let bytes = |elems: usize| elems * size_of::<T>();
        let mut finite = true;
        // One row, padded with zeros.
        let mut converted = vec![T::default(); self.view.cols.next_multiple_of(RUN)];
        for row in 0..self.view.rows {
            finite &= match self.view.contiguous_row(row) {
                Some(elements) => convert::<S, T>(elements.chunks_exact(size_of::<S>()), &mut converted),
                None => {
                    let elements = (0..self.view.cols).map(|col| self.view.element(self.view.at(row, col)));
                    convert::<S, T>(elements, &mut converted)
                }
            };
            for (run, values) in converted.chunks_exact(RUN).enumerate() {
                // One bounds check for the whole run, so that pieces need none.
                let out = &mut part[bytes(at(row, run * RUN))..][..bytes(at(0, RUN - PIECE) + PIECE)];
                for (piece, values) in values.chunks_exact(PIECE).enumerate() {
                    let out = &mut out[bytes(at(0, piece * PIECE))..][..bytes(PIECE)];
                    out.copy_from_slice(bytemuck::cast_slice(values));
                }
            }
        }
        finite
    }

    /// The error for the first weight that is not finite in `T`.
    fn unrepresentable<S: Element, T: Element>(&self) -> Option<AdapterError> {
        let View { name, tensor, rows, cols, .. } = self.view;
        for place in (0..rows).flat_map(|row| (0..cols).map(move |col| self.view.at(row, col))) {
            let value = read::<S>(self.view.element(place));
            if !T::from_f32(value).to_f32().is_finite() {
                let (tensor, index) = (name.clone(), tensor.index(place));
                return Some(AdapterError::Unrepresentable { tensor, index, value, dtype: T::DTYPE });
            }
        }
        None
    }

    /// Rank and features.
    fn shape(&self) -> (usize, usize) {
        let View { rows, cols, .. } = self.view;
        match self.kind {
            Kind::LinearA | Kind::EmbeddingA => (rows, cols),
            Kind::B => (cols, rows),
        }
    }
}

/// Converts elements and returns whether every one is finite.
fn convert<'a, S: Element, T: Element>(elements: impl Iterator<Item = &'a [u8]>, out: &mut [T]) -> bool {
    let mut finite = true;
    for (element, out) in elements.zip(out) {
        *out = T::from_f32(read::<S>(element));
        finite &= out.to_f32().is_finite();
    }
    finite
}

fn read<S: Element>(element: &[u8]) -> f32 {
    bytemuck::pod_read_unaligned::<S>(element).to_f32()
}
