//! One rank's part of a stored factor, and its conversion to the layout and element type of a block.
//!
//! Invariant: its views lie inside their tensor.

#[cfg(feature = "cuda")]
use std::any::Any;
use std::{array::from_fn, cell::RefCell, iter, marker::PhantomData, mem, ops::Range};

use half::{bf16, f16};
use rayon::prelude::*;

use super::{
    error::AdapterError,
    joined::{Pair, multiplied},
    layout::{self, B, CORE, EmbeddingA, K_TILE, LinearA, RowIds, Rows, TILE_FEATURES, TILE_RANKS},
    nested::is_nested,
    tensor::{Between, Rows as StoredRows, View},
};
use crate::{DType, Element};

/// A factor, or a range of its features.
#[derive(Clone, Debug)]
pub(super) struct Rectangle<'a> {
    /// Stored features, one view after the other. The features after them are zero. Of several adapters, the views of
    /// the first one, then as many of the next one with the same features, and so on.
    views: Vec<View<'a>>,
    /// What the elements of each adapter are multiplied by; none if there is one adapter, whose elements are kept.
    multipliers: Vec<f32>,
    /// Of trained rows, their features.
    rank: usize,
    /// Of trained rows, their number.
    features: usize,
    kind: Kind<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Kind<'a> {
    Factor(FactorKind),
    Rows,
    /// The ids of trained rows, which are not in a tensor, and the first row of this rank.
    Ids(&'a [u32], u32),
}

/// What a factor is, which decides its [layout](super::layout).
#[derive(Clone, Copy, Debug)]
pub(crate) enum FactorKind {
    LinearA,
    EmbeddingA,
    B,
}

/// A factor of an image that is one matrix in the memory of a device.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub(crate) struct FactorOnDevice<'a> {
    /// What the device knows it by.
    pub(crate) memory: &'a (dyn Any + Send + Sync),
    /// Place of the first element there, in bytes.
    pub(crate) start: usize,
    pub(crate) dtype: DType,
    pub(crate) kind: FactorKind,
    /// A `[rank, in_features]`, B `[out_features, rank]`, A of an embedding `[vocab, rank]`.
    pub(crate) shape: [usize; 2],
    /// In elements.
    pub(crate) strides: [usize; 2],
    /// In the block, including padding.
    pub(crate) elems: usize,
}

impl<'a> Rectangle<'a> {
    /// These ranks of A of a linear module, for these input features.
    pub(super) fn linear_a(pair: &Pair<'a>, ranks: Range<usize>, features: Range<usize>) -> Self {
        let rank = ranks.len();
        let views = pair.a(ranks).map(|view| view.columns(features.clone())).collect();
        Self {
            views,
            multipliers: pair.multipliers(),
            rank,
            features: features.len(),
            kind: Kind::Factor(FactorKind::LinearA),
        }
    }

    /// A of an embedding, for these ids.
    pub(super) fn embedding_a(pair: &Pair<'a>, ids: Range<usize>) -> Self {
        Self { kind: Kind::Factor(FactorKind::EmbeddingA), ..Self::linear_a(pair, 0..pair.rank(), ids) }
    }

    /// These rows of B, one range after the other, and rows of zeros up to `len`.
    pub(super) fn b(pair: &Pair<'a>, ranges: &[Range<usize>], len: usize) -> Self {
        let of_view = |view: View<'a>| ranges.iter().map(move |range| view.rows(range.clone()));
        let views: Vec<_> = pair.b().flat_map(of_view).collect();
        let multipliers = if pair.is_of_one() { Vec::new() } else { vec![1.0; pair.b().count()] };
        Self { views, multipliers, rank: pair.rank(), features: len, kind: Kind::Factor(FactorKind::B) }
    }

    /// Trained rows with `hidden` features: those of each view, one after the other.
    pub(super) fn rows(views: Vec<View<'a>>, hidden: usize) -> Self {
        let features = views.iter().map(|view| view.rows).sum();
        Self { views, multipliers: Vec::new(), rank: hidden, features, kind: Kind::Rows }
    }

    /// The ids of trained rows, on a rank whose first row this is.
    pub(super) fn ids(ids: &'a [u32], first: u32) -> Self {
        let (views, multipliers) = (Vec::new(), Vec::new());
        Self { views, multipliers, rank: 1, features: ids.len(), kind: Kind::Ids(ids, first) }
    }

    /// The views of each adapter.
    fn views_of_adapters(&self) -> impl Iterator<Item = &[View<'a>]> {
        self.views.chunks((self.views.len() / self.multipliers.len().max(1)).max(1))
    }

    /// Factors for which this is the same are written together.
    pub(super) fn between(&self) -> Option<Between> {
        if let [view] = &self.views[..] { view.between() } else { None }
    }

    /// Size in a block in elements, including padding.
    pub(super) fn block_elems(&self) -> usize {
        let Self { rank, features, .. } = *self;
        match self.kind {
            Kind::Factor(FactorKind::LinearA) => LinearA { rank, in_features: features }.elems(),
            Kind::Factor(FactorKind::EmbeddingA) => EmbeddingA { vocab: features, rank }.elems(),
            Kind::Factor(FactorKind::B) => B { out_features: features, rank }.elems(),
            Kind::Rows => Rows { count: features, hidden: rank }.elems(),
            Kind::Ids(..) => RowIds { count: features }.elems(),
        }
    }

    /// The fewest features that lie together in a block, and their elements.
    fn unit(&self) -> (usize, usize) {
        match self.kind {
            Kind::Factor(_) => (K_TILE, K_TILE / TILE_FEATURES * layout::stripe_elems(self.rank)),
            Kind::Rows => (1, Rows { count: 1, hidden: self.rank }.elems()),
            Kind::Ids(..) => (RowIds::TILE, TILE_FEATURES),
        }
    }

    /// Writes factors to these parts, which have their sizes. Several factors lie [between](Self::between) each other.
    ///
    /// Fails if an element that was written is not finite. [`error`](Self::error) finds it, unless its bytes have
    /// changed since.
    pub(super) fn write<T: Element>(factors: Vec<Part<'_, '_>>) -> Result<(), AdapterError> {
        let first = factors.first().map(|&(factor, _)| factor);
        let Some((first, view)) = first.and_then(|factor| Some((factor, factor.views.first()?))) else {
            factors.into_iter().for_each(|(factor, part)| factor.fill::<T>(part));
            return Ok(());
        };
        let is_finite = match view.tensor.dtype() {
            DType::BF16 => Self::convert_all::<bf16, T>(factors),
            DType::F16 => Self::convert_all::<f16, T>(factors),
            DType::F32 => Self::convert_all::<f32, T>(factors),
        }?;
        if is_finite { Ok(()) } else { Err(first.changing()) }
    }

    /// The error of a factor, some element of which was not finite and is now.
    pub(super) fn changing(&self) -> AdapterError {
        AdapterError::Changing { tensor: self.views[0].name.clone() }
    }

    /// Writes a factor that is in no tensor: ids, or zeros.
    fn fill<T: Element>(&self, part: &mut [u8]) {
        part.fill(0);
        if let Kind::Ids(ids, first) = self.kind {
            for (id, place) in ids.iter().zip(part.chunks_exact_mut(RowIds { count: 1 }.at(1) * size_of::<T>())) {
                place[..size_of::<u32>()].copy_from_slice(&(id - first).to_ne_bytes());
            }
        }
    }

    fn convert_all<S: Element, T: Element>(mut factors: Vec<Part<'_, '_>>) -> Result<bool, AdapterError> {
        match &mut factors[..] {
            [(factor, part)] => factor.convert::<S, T>(part),
            _ => convert_together::<S, T>(factors),
        }
    }

    fn convert<S: Element, T: Element>(&self, part: &mut [u8]) -> Result<bool, AdapterError> {
        /// Large enough to be worth scheduling, small enough for threads to have as much to do.
        const MIN_TASK_BYTES: usize = 1 << 16;
        let (unit, unit_elems) = self.unit();
        let unit_bytes = unit_elems * size_of::<T>();
        let mut units = MIN_TASK_BYTES.div_ceil(unit_bytes);
        // Some features of A are a piece of each row. A file, or the memory of a device, is read in few pieces.
        let is_read_at_once = |view: &View<'_>| match self.kind {
            Kind::Factor(FactorKind::LinearA | FactorKind::EmbeddingA) => view.tensor.is_remote(),
            Kind::Factor(FactorKind::B) | Kind::Rows | Kind::Ids(..) => view.is_read_at_once(),
        };
        if self.views.iter().any(is_read_at_once) {
            units = units.max(part.len().div_ceil(unit_bytes));
        }
        let features = units * unit;
        let pack = |(task, part): (usize, &mut [u8])| self.narrowed(task * features, features).pack::<S, T>(part);
        if is_nested() {
            let mut tasks = part.chunks_mut(units * unit_bytes).enumerate();
            tasks.try_fold(true, |is_finite, task| Ok(pack(task)? && is_finite))
        } else {
            let tasks = part.par_chunks_mut(units * unit_bytes).enumerate();
            tasks.map(pack).try_reduce(|| true, |a, b| Ok(a && b))
        }
    }

    /// Splits the factor into consecutive parts of at most `max_elems` elements, which must hold one K tile, or row.
    pub(super) fn split(&self, max_elems: usize) -> impl Iterator<Item = Self> {
        let (unit, elems) = self.unit();
        let len = (max_elems / elems).max(1) * unit;
        (0..self.features).step_by(len).map(move |start| self.narrowed(start, len))
    }

    /// Up to `len` features from `start` on. If `start` is at a stripe boundary, their part of the block has the layout
    /// of a separate factor.
    fn narrowed(&self, start: usize, len: usize) -> Self {
        let end = self.features.min(start + len);
        let narrowed = |view: &View<'a>, range| match self.kind {
            Kind::Factor(FactorKind::LinearA | FactorKind::EmbeddingA) => view.columns(range),
            Kind::Factor(FactorKind::B) | Kind::Rows | Kind::Ids(..) => view.rows(range),
        };
        let views = self.views_of_adapters().flat_map(|views| {
            let mut next = 0;
            views.iter().filter_map(move |view| {
                let first = next;
                next += self.features_of(view);
                let range = start.max(first)..end.min(next);
                (!range.is_empty()).then(|| narrowed(view, range.start - first..range.end - first))
            })
        });
        let (views, multipliers) = (views.collect(), self.multipliers.clone());
        let kind = match self.kind {
            Kind::Ids(ids, first) => Kind::Ids(&ids[start..end], first),
            kind => kind,
        };
        Self { views, multipliers, features: end - start, kind, ..*self }
    }

    fn features_of(&self, view: &View<'_>) -> usize {
        match self.kind {
            Kind::Factor(FactorKind::LinearA | FactorKind::EmbeddingA) => view.cols,
            Kind::Factor(FactorKind::B) | Kind::Rows | Kind::Ids(..) => view.rows,
        }
    }

    /// Writes the factor and returns whether every element is finite.
    fn pack<S: Element, T: Element>(&self, part: &mut [u8]) -> Result<bool, AdapterError> {
        if !self.multipliers.is_empty() {
            return self.pack_joined::<T>(part);
        }
        with_buffers(self.views.len(), |buffers| {
            let views = self.views.iter().zip(buffers);
            let views = views.map(|(view, buffer)| view.load(buffer)).collect::<Result<Vec<_>, _>>()?;
            Ok(self.pack_rows::<S, T>(&views, part))
        })
    }

    /// As [`pack`](Self::pack), of several adapters, whose factors are joined first.
    fn pack_joined<T: Element>(&self, part: &mut [u8]) -> Result<bool, AdapterError> {
        let is_b = matches!(self.kind, Kind::Factor(FactorKind::B));
        let stored =
            self.views_of_adapters().next().map_or(0, |views| views.iter().map(|view| self.features_of(view)).sum());
        let [rows, cols] = if is_b { [stored, self.rank] } else { [self.rank, stored] };
        let mut joined = vec![T::default(); rows * cols];
        with_buffers(1, |buffers| {
            let mut first_rank = 0;
            for (views, &multiplier) in self.views_of_adapters().zip(&self.multipliers) {
                let [mut row, col] = if is_b { [0, first_rank] } else { [first_rank, 0] };
                for view in views {
                    let to = joined.chunks_exact_mut(cols).skip(row);
                    let to = to.map(|to| &mut to[col..col + view.cols]);
                    let from = view.load(&mut buffers[0])?;
                    match view.tensor.dtype() {
                        DType::BF16 => join::<bf16, T>(from, multiplier, to),
                        DType::F16 => join::<f16, T>(from, multiplier, to),
                        DType::F32 => join::<f32, T>(from, multiplier, to),
                    }
                    row += view.rows;
                }
                first_rank += views.first().map_or(0, |view| if is_b { view.cols } else { view.rows });
            }
            Ok(())
        })?;
        let rows = StoredRows::dense(bytemuck::cast_slice(&joined), cols * size_of::<T>(), rows);
        Ok(self.pack_rows::<T, T>(&[rows], part))
    }

    /// As [`pack`](Self::pack), from rows.
    fn pack_rows<S: Element, T: Element>(&self, views: &[StoredRows<'_>], part: &mut [u8]) -> bool {
        let rows = views.iter().flat_map(StoredRows::iter);
        let (rank, mut stores) = (self.rank, Stores::<T>::new(part));
        match self.kind {
            Kind::Factor(FactorKind::LinearA) => {
                let rows: Vec<_> = rows.collect();
                for k_tile in 0..self.features.div_ceil(K_TILE) {
                    for ranks in 0..rank.div_ceil(CORE) {
                        let rows = from_fn(|row| rows.get(ranks * CORE + row).copied().unwrap_or_default());
                        for core in 0..K_TILE / CORE {
                            write_core::<S, T>(rows, k_tile * K_TILE + core * CORE, &mut stores);
                        }
                    }
                }
            }
            Kind::Factor(FactorKind::B) => match views {
                // Without the cost of an iterator over several views for each short row.
                [view] => write_b::<S, T>(view.iter(), self.features, rank, &mut stores),
                _ => write_b::<S, T>(rows, self.features, rank, &mut stores),
            },
            Kind::Factor(FactorKind::EmbeddingA) => {
                let rows: Vec<_> = rows.collect();
                for id in 0..self.features.next_multiple_of(TILE_FEATURES) {
                    let row = |rank: usize| rows.get(rank).copied().unwrap_or_default();
                    let element = |rank| convert(element::<S>(row(rank), id));
                    stores.rows(rank.div_ceil(CORE), |ranks| from_fn(|rank| element(ranks * CORE + rank)));
                }
            }
            Kind::Rows | Kind::Ids(..) => {
                let cores = self.unit().1 / CORE;
                rows.for_each(|row| stores.rows(cores, |core| core_row::<S, T>(row, core * CORE)));
            }
        }
        stores.end()
    }

    /// The factor in the memory of a device; `None` if it is elsewhere, or of several matrices.
    #[cfg(feature = "cuda")]
    pub(super) fn on_device(&self) -> Option<FactorOnDevice<'a>> {
        let (Kind::Factor(kind), [view]) = (self.kind, &self.views[..]) else { return None };
        if !self.multipliers.is_empty() {
            return None;
        }
        let (memory, start) = view.on_device()?;
        let view = if matches!(kind, FactorKind::EmbeddingA) { view.transposed() } else { *view };
        let (shape, strides) = ([view.rows, view.cols], view.strides());
        let (dtype, elems) = (view.tensor.dtype(), self.block_elems());
        Some(FactorOnDevice { memory, start, dtype, kind, shape, strides, elems })
    }

    /// The error of a factor that could not be written.
    pub(super) fn error<T: Element>(&self) -> Option<AdapterError> {
        let multipliers = self.multipliers.iter().copied().chain(iter::repeat(1.0));
        let mut views = self.views_of_adapters().zip(multipliers);
        views.find_map(|(views, multiplier)| {
            views.iter().find_map(|view| {
                let find = match view.tensor.dtype() {
                    DType::BF16 => unrepresentable::<bf16, T>,
                    DType::F16 => unrepresentable::<f16, T>,
                    DType::F32 => unrepresentable::<f32, T>,
                };
                find(view, multiplier).err()
            })
        })
    }
}

/// Returns the error for the first weight whose product with `multiplier` is not finite in `T`.
fn unrepresentable<S: Element, T: Element>(view: &View<'_>, multiplier: f32) -> Result<(), AdapterError> {
    let mut buffer = Vec::new();
    for (row, elements_of_row) in view.load(&mut buffer)?.iter().enumerate() {
        let is_finite = |value: &S| multiplied::<S, T>(*value, multiplier).is_finite();
        let mut values = (0..view.cols).map(|col| element::<S>(elements_of_row, col)).enumerate();
        if let Some((col, value)) = values.find(|(_, value)| !is_finite(value)) {
            let (tensor, index) = (view.name.clone(), view.tensor.index(view.at(row, col)));
            let value = value.to_f32() * multiplier;
            return Err(AdapterError::Unrepresentable { tensor, index, value, dtype: T::DTYPE });
        }
    }
    Ok(())
}

/// Writes the elements of rows, multiplied, to these places.
fn join<'t, S: Element, T: Element>(from: StoredRows<'_>, multiplier: f32, to: impl Iterator<Item = &'t mut [T]>) {
    for (from, to) in from.iter().zip(to) {
        for (from, to) in from.chunks_exact(size_of::<S>()).zip(to) {
            *to = multiplied(bytemuck::pod_read_unaligned::<S>(from), multiplier);
        }
    }
}

/// Calls `read` with as many buffers of this thread.
fn with_buffers<R>(count: usize, read: impl FnOnce(&mut [Vec<u8>]) -> R) -> R {
    thread_local! {
        static BUFFERS: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
    }
    // Not borrowed meanwhile: a handle of the user's that has the bytes may itself pack another adapter on this thread.
    let mut buffers = BUFFERS.take();
    buffers.resize_with(count.max(buffers.len()), Vec::new);
    let result = read(&mut buffers[..count]);
    BUFFERS.set(buffers);
    result
}

/// A factor and its part of a block.
pub(super) type Part<'s, 'a> = (&'s Rectangle<'a>, &'s mut [u8]);

/// Writes factors that lie [between](Rectangle::between) each other, reading what they have once.
fn convert_together<S: Element, T: Element>(factors: Vec<Part<'_, '_>>) -> Result<bool, AdapterError> {
    // Some features of all factors, which are packed from a cache of this core.
    let mut tasks: Vec<Vec<Part<'_, '_>>> = Vec::new();
    let features_of = |factor: &Rectangle<'_>| match factor.kind {
        Kind::Factor(FactorKind::LinearA) => K_TILE,
        _ => TILE_FEATURES,
    };
    for (factor, part) in factors {
        let task_bytes = layout::stripe_elems(factor.rank) * (features_of(factor) / TILE_FEATURES) * size_of::<T>();
        for (task, part) in part.chunks_mut(task_bytes).enumerate() {
            tasks.resize_with(tasks.len().max(task + 1), Vec::new);
            tasks[task].push((factor, part));
        }
    }
    let pack = |(task, parts): (usize, Vec<Part<'_, '_>>)| {
        let narrowed = parts.into_iter().map(|(factor, part)| {
            let features = features_of(factor);
            (factor.narrowed(task * features, features), part)
        });
        let mut narrowed: Vec<_> = narrowed.collect();
        let views: Vec<_> = narrowed.iter().flat_map(|(factor, _)| factor.views.first().copied()).collect();
        with_buffers(2, |buffers| {
            let (read, gathered) = buffers.split_at_mut(1);
            let mut is_finite = true;
            View::load_together(&views, [&mut read[0], &mut gathered[0]], |number, rows| {
                let (factor, part) = &mut narrowed[number];
                is_finite &= factor.pack_rows::<S, T>(&[rows], part);
            })?;
            Ok(is_finite)
        })
    };
    if is_nested() {
        tasks.into_iter().enumerate().map(pack).try_fold(true, |a, b| Ok(b? && a))
    } else {
        tasks.into_par_iter().enumerate().map(pack).try_reduce(|| true, |a, b| Ok(a && b))
    }
}

/// Elements of a row of a core.
type CoreRow<T> = [T; CORE];

/// A part of a block that is written past the caches, one row of a core after the other: the device copies it from
/// there. What it copied from the caches of many cores would delay the step beside the load
/// (benches/record/designs.md).
#[derive(Debug)]
struct Stores<'a, T> {
    part: &'a mut [[u8; WORD]],
    /// Whether words can be stored past the caches.
    is_aligned: bool,
    /// Sums whose element has its first bit set if one was not finite.
    overflows: [u64; 2],
    element: PhantomData<T>,
}

/// Bytes that are stored at once.
const WORD: usize = 16;

impl<'a, T: Element> Stores<'a, T> {
    /// The exponents of the elements, all ones, and the first bits.
    const EXPONENTS: u64 = match T::DTYPE {
        DType::BF16 => 0x7f80_7f80_7f80_7f80,
        DType::F16 => 0x7c00_7c00_7c00_7c00,
        DType::F32 => 0x7f80_0000_7f80_0000,
    };
    const LOWEST: u64 = Self::EXPONENTS & !(Self::EXPONENTS << 1);

    fn new(part: &'a mut [u8]) -> Self {
        let is_aligned = part.as_ptr().addr().is_multiple_of(WORD);
        Self { part: part.as_chunks_mut().0, is_aligned, overflows: [0; 2], element: PhantomData }
    }

    /// Writes the next `count` rows.
    #[inline(always)]
    fn rows(&mut self, count: usize, row: impl Fn(usize) -> CoreRow<T>) {
        let words = size_of::<CoreRow<T>>() / WORD;
        let (part, rest) = mem::take(&mut self.part).split_at_mut(count * words);
        self.part = rest;
        let [mut low, mut high] = self.overflows;
        for (number, part) in part.chunks_exact_mut(words).enumerate() {
            let row = row(number);
            for (word, to) in bytemuck::bytes_of(&row).as_chunks::<WORD>().0.iter().zip(part) {
                let halves: [u64; 2] = bytemuck::pod_read_unaligned(word);
                // An exponent of ones and its lowest bit are the first bit of the element, and no other exponent
                // reaches it. Looks at all elements, which is faster than to stop at one that is not finite.
                low |= (halves[0] & Self::EXPONENTS) + Self::LOWEST;
                high |= (halves[1] & Self::EXPONENTS) + Self::LOWEST;
                if self.is_aligned { store_past_caches(word, to) } else { *to = *word }
            }
        }
        self.overflows = [low, high];
    }

    /// Ends the part. Returns whether all elements are finite.
    fn end(self) -> bool {
        end_stores();
        self.overflows.iter().all(|overflow| overflow & (Self::EXPONENTS + Self::LOWEST) == 0)
    }
}

/// Copies a word to an address that is a multiple of its size.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
#[expect(unsafe_code, reason = "calls the instructions")]
fn store_past_caches(from: &[u8; WORD], to: &mut [u8; WORD]) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
    // SAFETY: it has 16 bytes, at any address. The instruction is of every x86-64 processor, as the other is.
    let word = unsafe { _mm_loadu_si128(from.as_ptr().cast()) };
    // SAFETY: it has 16 bytes, too, and begins at a multiple of them.
    unsafe { _mm_stream_si128(to.as_mut_ptr().cast(), word) };
}

/// Other threads, and the copies that they enqueue, see the stores of this thread after this, as they see all others.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "calls the instruction")]
fn end_stores() {
    // SAFETY: it accesses no memory.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn store_past_caches(from: &[u8; WORD], to: &mut [u8; WORD]) {
    *to = *from;
}

#[cfg(not(target_arch = "x86_64"))]
fn end_stores() {}

/// Writes B from its rows. Outputs without a row are zero.
fn write_b<'a, S: Element, T: Element>(
    mut rows: impl Iterator<Item = &'a [u8]>,
    features: usize,
    rank: usize,
    stores: &mut Stores<'_, T>,
) {
    for _ in 0..features.div_ceil(TILE_FEATURES) {
        let outputs: [_; TILE_FEATURES] = from_fn(|_| rows.next().unwrap_or_default());
        for ranks in 0..rank.div_ceil(TILE_RANKS) {
            for core in 0..TILE_FEATURES / CORE {
                let output = |n| core / 4 * 32 + n / 2 * 8 + core % 4 * 2 + n % 2;
                write_core::<S, T>(from_fn(|n| outputs[output(n)]), ranks * TILE_RANKS, stores);
            }
        }
    }
}

/// Elements from `first` on of a row that ends before the core does.
#[cold]
#[inline(never)]
fn last_row<S: Element>(row: &[u8], first: usize) -> CoreRow<S> {
    from_fn(|i| element(row, first + i))
}

/// Writes the core of 8 rows whose first element is `first` in each. Rows that end earlier are followed by zeros.
#[inline(always)]
fn write_core<S: Element, T: Element>(rows: [&[u8]; CORE], first: usize, stores: &mut Stores<'_, T>) {
    stores.rows(CORE, |row| core_row::<S, T>(rows[row], first));
}

/// The elements of a row from `first` on. A row that ends earlier is followed by zeros.
#[inline(always)]
fn core_row<S: Element, T: Element>(row: &[u8], first: usize) -> CoreRow<T> {
    let elements: CoreRow<S> = match row.get(first * size_of::<S>()..(first + CORE) * size_of::<S>()) {
        Some(elements) => bytemuck::pod_read_unaligned(elements),
        None => last_row(row, first),
    };
    // The same bits, and faster than a conversion of each element to its own type.
    if S::DTYPE == T::DTYPE { bytemuck::cast(elements) } else { elements.map(convert) }
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
    use std::array::from_fn;

    use half::{bf16, f16};

    use super::{CORE, Stores};
    use crate::Element;

    /// At any address, and of any length.
    #[test]
    fn rows_are_stored_one_after_the_other() {
        for (offset, rows) in (0..=16).flat_map(|offset| (0..=4).map(move |rows| (offset, rows))) {
            let value = |row: usize, element: usize| bf16::from_f32((row * CORE + element) as f32);
            let (row_bytes, mut block) = (CORE * size_of::<bf16>(), [0xee; 96]);
            let mut stores = Stores::<bf16>::new(&mut block[offset..][..rows * row_bytes]);
            stores.rows(rows, |row| from_fn(|element| value(row, element)));
            assert!(stores.end());
            let rows_of_block = block[offset..].chunks_exact(row_bytes).take(rows).enumerate();
            for (row, bytes) in rows_of_block {
                let got: [bf16; CORE] = bytemuck::pod_read_unaligned(bytes);
                assert_eq!(got, from_fn(|element| value(row, element)), "{rows} rows at {offset}");
            }
            let is_beside = |at: &usize| !(offset..offset + rows * row_bytes).contains(at);
            assert!((0..block.len()).filter(is_beside).all(|at| block[at] == 0xee), "{rows} rows at {offset}");
        }
    }

    #[test]
    fn elements_that_are_not_finite_are_found() {
        fn check<T: Element>(most: T) {
            for (at, (value, is_finite)) in (0..CORE).flat_map(|at| {
                [
                    (most.to_f32(), true),
                    (-most.to_f32(), true),
                    (0.0, true),
                    (f32::INFINITY, false),
                    (f32::NEG_INFINITY, false),
                    (f32::NAN, false),
                    (-f32::NAN, false),
                ]
                .map(|value| (at, value))
            }) {
                for row in 0..2 {
                    let mut block = [0; 2 * CORE * size_of::<f32>()];
                    let mut stores = Stores::<T>::new(&mut block);
                    let other = T::from_f32(-most.to_f32());
                    let element = |at_of| if at_of == (row, at) { T::from_f32(value) } else { other };
                    stores.rows(2, |row| from_fn(|at| element((row, at))));
                    assert_eq!(stores.end(), is_finite, "{at}, {value}");
                }
            }
        }
        check(bf16::MAX);
        check(f16::MAX);
        check(f32::MAX);
    }
}
