//! One rank's part of a stored factor, and its conversion to the layout and element type of a block.
//!
//! Invariant: its views lie inside their tensor.

use std::{array::from_fn, cell::RefCell};

use half::{bf16, f16};
use rayon::prelude::*;

use super::{
    error::AdapterError,
    image::is_nested,
    layout::{self, B, CORE, CORE_ELEMS, EmbeddingA, K_TILE, LinearA, TILE_FEATURES, TILE_RANKS},
    tensor::{Rows as StoredRows, View},
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

    /// Whether a part of it is [scattered](View::is_scattered).
    pub(super) fn is_scattered(&self) -> bool {
        self.views.iter().any(View::is_scattered)
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
        /// Large enough to be worth scheduling, small enough for threads to have as much to do.
        const MIN_TASK_BYTES: usize = 1 << 16;
        let stripe_bytes = layout::stripe_elems(self.rank) * size_of::<T>();
        let mut stripes = MIN_TASK_BYTES.div_ceil(stripe_bytes).next_multiple_of(K_TILE / TILE_FEATURES);
        // Some features of A are a piece of each row. A file is read in few pieces.
        let is_read_at_once = |view: &View<'_>| match self.kind {
            Kind::LinearA | Kind::EmbeddingA => view.tensor.is_in_file(),
            Kind::B => view.is_read_at_once(),
        };
        if self.views.iter().any(is_read_at_once) {
            stripes = stripes.max(part.len().div_ceil(stripe_bytes));
        }
        let features = stripes * TILE_FEATURES;
        let pack = |(task, part): (usize, &mut [u8])| self.narrowed(task * features, features).pack::<S, T>(part);
        let is_finite = if is_nested() {
            let mut tasks = part.chunks_mut(stripes * stripe_bytes).enumerate();
            tasks.try_fold(true, |is_finite, task| Ok(pack(task)? && is_finite))?
        } else {
            let tasks = part.par_chunks_mut(stripes * stripe_bytes).enumerate();
            tasks.map(pack).try_reduce(|| true, |a, b| Ok(a && b))?
        };
        if is_finite { Ok(()) } else { self.unrepresentable::<S, T>() }
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
    fn pack<S: Element, T: Element>(&self, part: &mut [u8]) -> Result<bool, AdapterError> {
        thread_local! {
            static BUFFERS: RefCell<Buffers> = const { RefCell::new(Buffers { loaded: Vec::new(), written: Vec::new() }) };
        }
        // Not borrowed meanwhile: a handle of the user's that has the bytes may itself pack another adapter on this thread.
        let mut buffers = BUFFERS.take();
        let packed = self.pack_through::<S, T>(part, &mut buffers);
        BUFFERS.set(buffers);
        packed
    }

    /// As [`pack`](Self::pack), through `buffers`.
    fn pack_through<S: Element, T: Element>(
        &self,
        part: &mut [u8],
        Buffers { loaded, written }: &mut Buffers,
    ) -> Result<bool, AdapterError> {
        loaded.resize_with(self.views.len().max(loaded.len()), Vec::new);
        let views = self.views.iter().zip(loaded);
        let views = views.map(|(view, buffer)| view.load(buffer)).collect::<Result<Vec<_>, _>>()?;
        let rows = views.iter().flat_map(StoredRows::iter);
        let (rank, core_bytes) = (self.rank, CORE_ELEMS * size_of::<T>());
        let mut pieces = Pieces { written, are_finite: true };
        match self.kind {
            Kind::LinearA => {
                let rows: Vec<_> = rows.collect();
                let tile_elems = layout::stripe_elems(rank) * (K_TILE / TILE_FEATURES);
                for (k_tile, part) in part.chunks_exact_mut(tile_elems * size_of::<T>()).enumerate() {
                    for (ranks, part) in part.chunks_exact_mut(CORE * K_TILE * size_of::<T>()).enumerate() {
                        let rows = from_fn(|row| rows.get(ranks * CORE + row).copied().unwrap_or_default());
                        pieces.write::<T>(part, |part| {
                            for (core, out) in part.chunks_exact_mut(core_bytes).enumerate() {
                                write_core::<S, T>(rows, k_tile * K_TILE + core * CORE, out);
                            }
                        });
                    }
                }
            }
            Kind::B => match &views[..] {
                // Without the cost of an iterator over several views for each short row.
                [view] => write_b::<S, T>(view.iter(), rank, part, &mut pieces),
                _ => write_b::<S, T>(rows, rank, part, &mut pieces),
            },
            Kind::EmbeddingA => {
                let rows: Vec<_> = rows.collect();
                let row_bytes = rank.next_multiple_of(TILE_RANKS) * size_of::<T>();
                for (first, part) in part.chunks_mut(TILE_FEATURES * row_bytes).enumerate() {
                    pieces.write::<T>(part, |part| {
                        for (id, part) in part.chunks_exact_mut(row_bytes).enumerate() {
                            for (ranks, out) in part.chunks_exact_mut(CORE * size_of::<T>()).enumerate() {
                                let row = |rank| rows.get(ranks * CORE + rank).copied().unwrap_or_default();
                                let id = first * TILE_FEATURES + id;
                                write_row::<S, T>(from_fn(|rank| element::<S>(row(rank), id)), out);
                            }
                        }
                    });
                }
            }
        }
        Ok(pieces.end())
    }

    /// Returns the error for the first weight that is not finite in `T`.
    fn unrepresentable<S: Element, T: Element>(&self) -> Result<(), AdapterError> {
        let mut buffer = Vec::new();
        for view in &self.views {
            for (row, elements_of_row) in view.load(&mut buffer)?.iter().enumerate() {
                let values = (0..view.cols).map(|col| element::<S>(elements_of_row, col).to_f32());
                if let Some((col, value)) = values.enumerate().find(|(_, value)| !T::from_f32(*value).is_finite()) {
                    let (tensor, index) = (view.name.clone(), view.tensor.index(view.at(row, col)));
                    return Err(AdapterError::Unrepresentable { tensor, index, value, dtype: T::DTYPE });
                }
            }
        }
        Ok(())
    }
}

/// Memory of a thread for what it packs.
#[derive(Debug, Default)]
struct Buffers {
    /// What is in a file, or in columns, by view.
    loaded: Vec<Vec<u8>>,
    written: Vec<u8>,
}

/// A part of a block that is written piece by piece, each of a few KB in a cache of this core, and then stored past the caches: the device
/// copies it from there. What it copied from the caches of many cores would delay the step beside the load (benches/record/designs.md).
#[derive(Debug)]
struct Pieces<'a> {
    written: &'a mut Vec<u8>,
    are_finite: bool,
}

impl Pieces<'_> {
    /// Lets `write` write the next piece.
    #[inline(always)]
    fn write<T: Element>(&mut self, piece: &mut [u8], write: impl FnOnce(&mut [u8])) {
        // Only what is new is cleared.
        self.written.resize(piece.len().max(self.written.len()), 0);
        let written = &mut self.written[..piece.len()];
        write(written);
        self.are_finite &= are_finite::<T>(written);
        store_past_caches(written, piece);
    }

    /// Ends the part. Returns whether all elements are finite.
    fn end(self) -> bool {
        end_stores();
        self.are_finite
    }
}

/// Copies bytes to a slice of their length, whose last bytes and whose whole, if it is misaligned, may remain in a cache.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "calls the instructions")]
fn store_past_caches(from: &[u8], to: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    const BYTES: usize = size_of::<__m128i>();
    if !to.as_ptr().addr().is_multiple_of(BYTES) {
        return to.copy_from_slice(from);
    }
    let ((from, last), (to, last_to)) = (from.as_chunks::<BYTES>(), to.as_chunks_mut::<BYTES>());
    for (from, to) in from.iter().zip(to) {
        // SAFETY: it has 16 bytes, at any address. The instruction is of every x86-64 processor, as the others are.
        let bytes = unsafe { _mm_loadu_si128(from.as_ptr().cast()) };
        // SAFETY: it has 16 bytes, too. The target begins at a multiple of 16 bytes, and so does each of its chunks.
        unsafe { _mm_stream_si128(to.as_mut_ptr().cast(), bytes) };
    }
    last_to.copy_from_slice(last);
}

/// Other threads, and the copies that they enqueue, see the stores of this thread after this, as they see all others.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "calls the instruction")]
fn end_stores() {
    // SAFETY: it accesses no memory.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn store_past_caches(from: &[u8], to: &mut [u8]) {
    to.copy_from_slice(from);
}

#[cfg(not(target_arch = "x86_64"))]
fn end_stores() {}

/// Writes B from its rows. Outputs without a row are zero.
fn write_b<'a, S: Element, T: Element>(
    mut rows: impl Iterator<Item = &'a [u8]>,
    rank: usize,
    part: &mut [u8],
    pieces: &mut Pieces<'_>,
) {
    for part in part.chunks_exact_mut(layout::stripe_elems(rank) * size_of::<T>()) {
        let outputs: [_; TILE_FEATURES] = from_fn(|_| rows.next().unwrap_or_default());
        pieces.write::<T>(part, |part| {
            for (i, out) in part.chunks_exact_mut(CORE_ELEMS * size_of::<T>()).enumerate() {
                let (first, core) = (i / CORE * TILE_RANKS, i % CORE);
                let output = |n| core / 4 * 32 + n / 2 * 8 + core % 4 * 2 + n % 2;
                write_core::<S, T>(from_fn(|n| outputs[output(n)]), first, out);
            }
        });
    }
}

/// Writes the core of 8 rows whose first element is `first` in each. Rows that end earlier are followed by zeros.
#[inline(always)]
fn write_core<S: Element, T: Element>(rows: [&[u8]; CORE], first: usize, out: &mut [u8]) {
    for (row, out) in rows.into_iter().zip(out.chunks_exact_mut(CORE * size_of::<T>())) {
        match row.get(first * size_of::<S>()..(first + CORE) * size_of::<S>()) {
            // The same bits, and faster than a conversion of each element to its own type.
            Some(elements) if S::DTYPE == T::DTYPE => out.copy_from_slice(elements),
            Some(elements) => write_row::<S, T>(bytemuck::pod_read_unaligned(elements), out),
            None => write_row::<S, T>(from_fn(|i| element(row, first + i)), out),
        }
    }
}

/// Writes 8 elements.
#[inline(always)]
fn write_row<S: Element, T: Element>(elements: [S; CORE], out: &mut [u8]) {
    out.copy_from_slice(bytemuck::cast_slice(&elements.map(convert::<S, T>)));
}

/// Whether all elements are finite. Looks at all of them, which is faster than to stop at one that is not.
fn are_finite<T: Element>(piece: &[u8]) -> bool {
    let elements = piece.chunks_exact(size_of::<T>());
    elements.fold(true, |are_finite, element| are_finite & bytemuck::pod_read_unaligned::<T>(element).is_finite())
}

#[inline(always)]
fn convert<S: Element, T: Element>(value: S) -> T {
    if S::DTYPE == T::DTYPE { bytemuck::cast(value) } else { T::from_f32(value.to_f32()) }
}

/// One element of a row, or zero after its end.
fn element<S: Element>(row: &[u8], index: usize) -> S {
    row.get(index * size_of::<S>()..(index + 1) * size_of::<S>()).map_or(S::default(), bytemuck::pod_read_unaligned)
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::{Pieces, are_finite};
    use crate::Element;

    /// At any address, and of any length.
    #[test]
    fn pieces_are_stored_as_they_are_written() {
        let value = |at: usize| (at * 7 + 5).to_le_bytes()[0];
        let mut written = vec![0xdd; 8];
        for (offset, len) in (0..=16).flat_map(|offset| (0..=100).map(move |len| (offset, len))) {
            let mut block = [0xee; 160];
            let mut pieces = Pieces { written: &mut written, are_finite: true };
            for (number, piece) in block[offset..][..len].chunks_mut(40).enumerate() {
                pieces.write::<f32>(piece, |piece| {
                    piece.iter_mut().enumerate().for_each(|(at, byte)| *byte = value(number * 40 + at));
                });
            }
            pieces.end();
            let is_right = |(at, &byte): (usize, &u8)| {
                byte == if (offset..offset + len).contains(&at) { value(at - offset) } else { 0xee }
            };
            assert!(block.iter().enumerate().all(is_right), "{len} bytes at {offset}");
        }
    }

    #[test]
    fn elements_that_are_not_finite_are_found() {
        fn check<T: Element>(most: T) {
            let mut piece = [T::default(); 24];
            for at in 0..piece.len() {
                for (value, is_finite) in [
                    (most, true),
                    (T::from_f32(-most.to_f32()), true),
                    (T::from_f32(f32::INFINITY), false),
                    (T::from_f32(f32::NEG_INFINITY), false),
                    (T::from_f32(f32::NAN), false),
                    (T::from_f32(-f32::NAN), false),
                ] {
                    piece[at] = value;
                    assert_eq!(are_finite::<T>(bytemuck::cast_slice(&piece)), is_finite, "{at}, {}", value.to_f32());
                }
                piece[at] = T::default();
            }
        }
        check(bf16::MAX);
        check(f16::MAX);
        check(f32::MAX);
    }
}
