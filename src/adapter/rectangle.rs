//! One rank's part of a stored factor, and its conversion to the layout and element type of a block.
//!
//! Invariant: its views lie inside their tensor.

use half::{bf16, f16};
use rayon::prelude::*;

use super::{
    error::AdapterError,
    layout::{self, B, CORE, EmbeddingA, K_TILE, LinearA, TILE_FEATURES, TILE_RANKS},
    tensor::View,
};
use crate::{DType, Element, model::Rows};

/// A factor, or a range of its features.
#[derive(Clone, Debug)]
pub(super) struct Rectangle<'a> {
    /// Stored features, one view after the other. The features after them are zero.
    views: Vec<View<'a>>,
    rank: usize,
    features: usize,
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
        Self { views: vec![view], rank: view.rows, features: view.cols, kind: Kind::LinearA }
    }

    /// A of an embedding, `[rank, vocab]`.
    pub(super) fn embedding_a(view: View<'a>) -> Self {
        Self { kind: Kind::EmbeddingA, ..Self::linear_a(view) }
    }

    /// B, `[out_features, rank]`.
    pub(super) fn b(view: View<'a>) -> Self {
        Self { views: vec![view], rank: view.cols, features: view.rows, kind: Kind::B }
    }

    /// These rows of B, which is the part of `view` that begins at its row `first`.
    pub(super) fn rows_of_b(view: View<'a>, first: usize, rows: &Rows) -> Self {
        let views = rows.ranges.iter().map(|range| view.rows(first + range.start..first + range.end));
        Self { views: views.collect(), rank: view.cols, features: rows.len, kind: Kind::B }
    }

    /// Size in a block in elements, including padding.
    pub(super) fn block_elems(&self) -> usize {
        let Self { rank, features, .. } = *self;
        match self.kind {
            Kind::LinearA => LinearA { rank, in_features: features }.elems(),
            Kind::EmbeddingA => EmbeddingA { vocab: features, rank }.elems(),
            Kind::B => B { out_features: features, rank }.elems(),
        }
    }

    /// Writes the factor to `part`, which has its size.
    pub(super) fn write<T: Element>(&self, part: &mut [u8]) -> Result<(), AdapterError> {
        let Some(view) = self.views.first() else {
            part.fill(0);
            return Ok(());
        };
        match view.tensor.dtype() {
            DType::BF16 => self.convert::<bf16, T>(part),
            DType::F16 => self.convert::<f16, T>(part),
            DType::F32 => self.convert::<f32, T>(part),
        }
    }

    fn convert<S: Element, T: Element>(&self, part: &mut [u8]) -> Result<(), AdapterError> {
        /// Large enough to be worth scheduling, small enough that the output stays in cache.
        const MIN_TASK_BYTES: usize = 1 << 16;
        let stripe_bytes = layout::stripe_elems(self.rank) * size_of::<T>();
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
        let stripes = max_elems / layout::stripe_elems(self.rank);
        let len = (stripes * TILE_FEATURES / K_TILE * K_TILE).max(K_TILE);
        (0..self.features).step_by(len).map(move |start| self.narrowed(start, len))
    }

    /// Up to `len` features from `start` on. If `start` is at a stripe boundary, their part of the block has the layout of a
    /// separate factor.
    fn narrowed(&self, start: usize, len: usize) -> Self {
        let end = self.features.min(start + len);
        let mut next = 0;
        let views = self.views.iter().filter_map(|view| {
            let first = next;
            next += self.features_of(view);
            let range = start.max(first)..end.min(next);
            let narrowed = |range| match self.kind {
                Kind::LinearA | Kind::EmbeddingA => view.columns(range),
                Kind::B => view.rows(range),
            };
            (!range.is_empty()).then(|| narrowed(range.start - first..range.end - first))
        });
        Self { views: views.collect(), features: end - start, ..*self }
    }

    fn features_of(&self, view: &View<'_>) -> usize {
        match self.kind {
            Kind::LinearA | Kind::EmbeddingA => view.cols,
            Kind::B => view.rows,
        }
    }

    /// Writes the factor and returns whether every element is finite.
    fn pack<S: Element, T: Element>(&self, part: &mut [u8]) -> bool {
        let Self { rank, features, .. } = *self;
        part.fill(0);
        let (mut finite, mut first) = (true, 0);
        for view in &self.views {
            finite &= match self.kind {
                Kind::LinearA => {
                    let layout = LinearA { rank, in_features: features };
                    scatter::<S, T, TILE_FEATURES, CORE>(view, part, |row, col| layout.at(row, first + col))
                }
                Kind::EmbeddingA => {
                    let layout = EmbeddingA { vocab: features, rank };
                    scatter::<S, T, 1, 1>(view, part, |row, col| layout.at(first + col, row))
                }
                Kind::B => {
                    let layout = B { out_features: features, rank };
                    scatter::<S, T, TILE_RANKS, CORE>(view, part, |row, col| layout.at(first + row, col))
                }
            };
            first += self.features_of(view);
        }
        finite
    }

    /// The error for the first weight that is not finite in `T`.
    fn unrepresentable<S: Element, T: Element>(&self) -> Option<AdapterError> {
        for view in &self.views {
            let View { name, tensor, rows, cols, .. } = *view;
            for place in (0..rows).flat_map(|row| (0..cols).map(move |col| view.at(row, col))) {
                let value = read::<S>(view.element(place));
                if !T::from_f32(value).to_f32().is_finite() {
                    let (tensor, index) = (name.clone(), tensor.index(place));
                    return Some(AdapterError::Unrepresentable { tensor, index, value, dtype: T::DTYPE });
                }
            }
        }
        None
    }
}

/// Writes the elements of a view row by row to the offsets `at`. Each `RUN` elements of a row have the same relative offsets, and each
/// `PIECE` of them are contiguous. Returns whether every element is finite.
fn scatter<S: Element, T: Element, const RUN: usize, const PIECE: usize>(
    view: &View<'_>,
    part: &mut [u8],
    at: impl Fn(usize, usize) -> usize,
) -> bool {
    let bytes = |elems: usize| elems * size_of::<T>();
    let mut finite = true;
    // One row, padded with zeros.
    let mut converted = vec![T::default(); view.cols.next_multiple_of(RUN)];
    for row in 0..view.rows {
        finite &= match view.contiguous_row(row) {
            Some(elements) => convert::<S, T>(elements.chunks_exact(size_of::<S>()), &mut converted),
            None => {
                let elements = (0..view.cols).map(|col| view.element(view.at(row, col)));
                convert::<S, T>(elements, &mut converted)
            }
        };
        for (run, values) in converted.chunks_exact(RUN).enumerate() {
            // One bounds check for the whole run, so that pieces need none.
            let out = &mut part[bytes(at(row, run * RUN))..][..bytes(at(0, RUN - PIECE) - at(0, 0) + PIECE)];
            for (piece, values) in values.chunks_exact(PIECE).enumerate() {
                let out = &mut out[bytes(at(0, piece * PIECE) - at(0, 0))..][..bytes(PIECE)];
                out.copy_from_slice(bytemuck::cast_slice(values));
            }
        }
    }
    finite
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
