use std::{fmt, sync::Arc};

use super::{Step, Workspace};
use crate::{
    DType, Element, Slot,
    adapter::{
        ImageEntry, MIN_STAGING_BYTES, SlotImage,
        layout::{B, CORE, CORE_ELEMS, EmbeddingA, LinearA, TILE_ELEMS, TILE_FEATURES, TILE_RANKS},
    },
    error::{LoadError, OperandError, SlotError},
    model::Model,
    plan::{Capacity, PlanError},
    residency::{Bounds, Resident, SlotInfo, Slots, Usage},
    routing::Batch,
};

/// Bytes that are packed before progress is reported.
const PROGRESS_BYTES: usize = 4 << 20;
const _: () = assert!(PROGRESS_BYTES >= MIN_STAGING_BYTES);

/// The adapters in host memory, a slot each. Clones are the same table.
///
/// A table may be used by any number of threads: a [`step`](Self::step) works on the adapters that were there when it began, whatever
/// is loaded meanwhile.
#[derive(Clone, Debug)]
#[doc(alias = "max_loras")]
pub struct WeightTable {
    shared: Arc<Shared>,
    slots: Arc<Slots<Arc<Adapter>>>,
}

/// What a table shares with its adapters, and so owns none of them.
#[derive(Debug)]
struct Shared {
    bounds: Bounds,
    arena: Arena,
}

/// A budget of bytes.
#[derive(Debug)]
struct Arena {
    bytes: usize,
    used: std::sync::atomic::AtomicUsize,
}

/// Room for an adapter in a table. Dropping it gives the room back.
#[derive(Debug)]
#[must_use]
pub struct Reservation {
    shared: Arc<Shared>,
    bytes: usize,
}

/// An adapter in its room, which no slot has yet. Dropping it gives the room back.
#[derive(Debug)]
#[must_use]
pub struct Filled {
    adapter: Adapter,
    max_rank: usize,
}

/// An adapter's block. The room is given back with the last step that works on it.
pub(super) struct Adapter {
    /// Elements of the table's type, in memory aligned for any of them.
    block: Vec<f32>,
    entries: Vec<Option<ImageEntry>>,
    room: Reservation,
}

impl WeightTable {
    /// A table of `capacity.num_slots` empty slots for the adapters of `model`, whose factors have at most rank
    /// `capacity.max_rank`, are `dtype` and take at most `arena_bytes`. `capacity.max_tokens` bounds nothing on the CPU.
    ///
    /// # Errors
    /// If a bound is zero or past its limit.
    #[doc(alias = "max_lora_rank")]
    pub fn new(model: &Model, dtype: DType, capacity: Capacity, arena_bytes: usize) -> Result<Self, PlanError> {
        let capacity = capacity.checked()?;
        let arena = Arena { bytes: arena_bytes, used: 0.into() };
        let slots = Arc::new(Slots::new(capacity.num_slots));
        let bounds = Bounds { model: model.clone(), dtype, capacity };
        Ok(Self { shared: Arc::new(Shared { bounds, arena }), slots })
    }

    /// Loads an adapter into a slot, in place of the one that was there. There must be room for the new one beside the old one.
    ///
    /// # Errors
    /// If the image does not fit the table, or a weight cannot be represented (NaN, or too large for the type). The slot is as it
    /// was.
    pub fn load(&self, slot: Slot, image: &SlotImage<'_>) -> Result<Resident, LoadError> {
        self.load_with_progress(slot, image, |_| ())
    }

    /// As [`load`](Self::load), and calls `progress` with how many of the image's [`bytes`](SlotImage::bytes) are done, each time that
    /// there are more: adapters of experts may have gigabytes.
    ///
    /// # Errors
    /// As for `load`.
    pub fn load_with_progress(
        &self,
        slot: Slot,
        image: &SlotImage<'_>,
        progress: impl FnMut(usize),
    ) -> Result<Resident, LoadError> {
        self.slots.index(slot)?;
        let filled = self.reserve(image)?.fill_with_progress(image, progress)?;
        self.commit(slot, filled)
    }

    /// Reserves room for an adapter.
    ///
    /// # Errors
    /// If the image does not fit the table, or there is no room.
    pub fn reserve(&self, image: &SlotImage<'_>) -> Result<Reservation, LoadError> {
        self.shared.bounds.check(image)?;
        let bytes = image.bytes();
        self.shared.arena.take(bytes).map_err(|largest_gap| LoadError::Full { bytes, largest_gap })?;
        Ok(Reservation { shared: Arc::clone(&self.shared), bytes })
    }

    /// Puts an adapter into a slot, in place of the one that was there: for the steps that begin from now on.
    ///
    /// # Errors
    /// If there is no such slot, or the room is of another table.
    pub fn commit(&self, slot: Slot, filled: Filled) -> Result<Resident, LoadError> {
        let Filled { adapter, max_rank } = filled;
        if !Arc::ptr_eq(&self.shared, &adapter.room.shared) {
            return Err(SlotError::OtherTable.into());
        }
        let (bytes, adapter) = (adapter.room.bytes, Arc::new(adapter));
        let (resident, _old) = self.slots.replace(&mut self.slots.lock(), slot, bytes, max_rank, adapter)?;
        Ok(resident)
    }

    /// Empties a slot: its tokens are the base model's from the next step on.
    ///
    /// # Errors
    /// If there is no such slot.
    pub fn unload(&self, slot: Slot) -> Result<(), LoadError> {
        let old = self.slots.take(&mut self.slots.lock(), slot);
        Ok(old.map(drop)?)
    }

    /// Begins a step of the tokens of `batch`, on the adapters that are loaded now.
    ///
    /// # Errors
    /// None: those of the GPU's table, which checks its operands here.
    pub fn step<'a>(&self, batch: &Batch<'a>, workspace: &'a mut Workspace) -> Result<Step<'a>, OperandError> {
        let mut adapters = Vec::new();
        let blocks = self.slots.lock();
        for index in batch.slots().iter().filter_map(|slot| slot.index()).filter(|&index| index < self.slots.len()) {
            if index >= adapters.len() {
                adapters.resize(index + 1, None);
            }
            if adapters[index].is_none() {
                adapters[index] = blocks.get(index).map(Arc::clone);
            }
        }
        drop(blocks);
        workspace.clear();
        let Bounds { model, dtype, capacity } = &self.shared.bounds;
        Ok(Step { model: model.id(), dtype: *dtype, max_rank: capacity.max_rank, adapters, batch: *batch, workspace })
    }

    /// Refuses adapters that are no longer where they were loaded.
    ///
    /// A [`step`](Self::step) keeps the adapters that were loaded when it began. A check that passes after `step` has returned therefore
    /// holds for that step, whatever other threads load and unload.
    ///
    /// # Errors
    /// If one has been unloaded or replaced, or its slot does not exist.
    pub fn check(&self, residents: impl IntoIterator<Item = Resident>) -> Result<(), SlotError> {
        self.slots.check(residents)
    }

    /// What a slot holds, if it is loaded.
    pub fn get(&self, slot: Slot) -> Option<SlotInfo> {
        self.slots.lock().info(slot.index()?)
    }

    /// What the loaded slots hold, in the order of slots.
    pub fn loaded(&self) -> Vec<SlotInfo> {
        self.slots.lock().infos()
    }

    /// The arena's bytes, used and free.
    pub fn usage(&self) -> Usage {
        self.shared.arena.usage()
    }

    /// Whether there is room for an adapter now.
    pub fn fits(&self, image: &SlotImage<'_>) -> bool {
        image.bytes() <= self.usage().largest_gap
    }

    /// The model that it was made for.
    pub fn model(&self) -> &Model {
        &self.shared.bounds.model
    }

    /// The element type of the factors, and of the operands of a step.
    pub fn dtype(&self) -> DType {
        self.shared.bounds.dtype
    }

    /// The bounds that it was made for.
    pub fn capacity(&self) -> Capacity {
        self.shared.bounds.capacity
    }
}

impl Arena {
    /// Takes so many bytes, or says how many there are.
    fn take(&self, bytes: usize) -> Result<(), usize> {
        use std::sync::atomic::Ordering::Relaxed;
        let taken = |used: usize| Some(used + bytes).filter(|&used| used <= self.bytes);
        self.used.fetch_update(Relaxed, Relaxed, taken).map(drop).map_err(|used| self.bytes - used)
    }

    fn usage(&self) -> Usage {
        let used = self.used.load(std::sync::atomic::Ordering::Relaxed);
        Usage { capacity: self.bytes, used, largest_gap: self.bytes - used }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.shared.arena.used.fetch_sub(self.bytes, std::sync::atomic::Ordering::Relaxed);
    }
}

impl Reservation {
    /// Bytes of the room.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Packs an adapter into the room, on rayon's threads.
    ///
    /// # Errors
    /// If a weight cannot be represented (NaN, or too large for the type), or the image does not fit the table or has another size than
    /// the room.
    pub fn fill(self, image: &SlotImage<'_>) -> Result<Filled, LoadError> {
        self.fill_with_progress(image, |_| ())
    }

    /// As [`fill`](Self::fill), and calls `progress` with the bytes that are done, each time that there are more.
    ///
    /// # Errors
    /// As for `fill`.
    pub fn fill_with_progress(
        self,
        image: &SlotImage<'_>,
        mut progress: impl FnMut(usize),
    ) -> Result<Filled, LoadError> {
        self.shared.bounds.check(image)?;
        if image.bytes() != self.bytes {
            return Err(SlotError::OtherImage { bytes: image.bytes(), reserved: self.bytes }.into());
        }
        let mut block = vec![0.0_f32; image.bytes().div_ceil(size_of::<f32>())];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut block);
        for piece in image.pieces(PROGRESS_BYTES) {
            piece.write_to(&mut bytes[piece.range()])?;
            progress(piece.range().end);
        }
        let mut entries = vec![None; image.num_entries()];
        for entry in image.entries() {
            entries[entry.entry] = Some(*entry);
        }
        Ok(Filled { adapter: Adapter { block, entries, room: self }, max_rank: image.max_rank() })
    }
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adapter").field("bytes", &self.room.bytes).finish_non_exhaustive()
    }
}

impl Adapter {
    /// The factors at a table entry, if any.
    pub(super) fn factors<T: Element>(&self, entry: usize) -> Option<Factors<'_, T>> {
        let ImageEntry { a_elems, b_elems, rank, scaling, .. } = self.entries[entry]?;
        let block: &[T] = bytemuck::cast_slice(&self.block);
        Some(Factors { a: &block[a_elems..], b: &block[b_elems..], rank, scaling })
    }
}

/// A module's factors, as laid out in the block (`adapter::layout`).
#[derive(Clone, Copy)]
pub(super) struct Factors<'a, T> {
    a: &'a [T],
    b: &'a [T],
    rank: usize,
    scaling: f32,
}

impl<T: Element> Factors<'_, T> {
    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn scaling(&self) -> f32 {
        self.scaling
    }

    /// Whether both have one A, and not only equal ones.
    pub(super) fn share_a(&self, other: &Self) -> bool {
        std::ptr::eq(self.a, other.a)
    }

    /// Whether both have one B, and not only equal ones.
    pub(super) fn share_b(&self, other: &Self) -> bool {
        std::ptr::eq(self.b, other.b)
    }

    /// Writes `A x` to the beginning of `v`.
    pub(super) fn shrink(&self, x: &[T], v: &mut [f32]) {
        let layout = LinearA { rank: self.rank, in_features: x.len() };
        for (i, v) in v[..self.rank].chunks_mut(TILE_RANKS).enumerate() {
            // Each in eight interleaved sums, so that it vectorizes.
            let mut sums = [[0.0; CORE]; TILE_RANKS];
            for (k, x) in x.chunks(CORE).enumerate() {
                let x = padded(x.iter().map(|x| x.to_f32()));
                add_products(&self.a[layout.at(i * TILE_RANKS, k * CORE)..][..CORE_ELEMS], &x, &mut sums);
            }
            v.iter_mut().zip(sums).for_each(|(v, sums)| *v = sums.iter().sum());
        }
    }

    /// `A[:, id]`, of an embedding.
    pub(super) fn look_up(&self, vocab: usize, id: usize) -> Vec<f32> {
        let row = EmbeddingA { vocab, rank: self.rank }.at(id, 0);
        self.a[row..][..self.rank].iter().map(|a| a.to_f32()).collect()
    }

    /// Adds `scale · B v` to `y`.
    pub(super) fn expand(&self, v: &[f32], scale: f32, y: &mut [T]) {
        self.delta(v, scale, y.len(), |output, delta| y[output] = T::from_f32(y[output].to_f32() + delta));
    }

    /// Calls `put` with each output and its element of `scale · B v`.
    pub(super) fn delta(&self, v: &[f32], scale: f32, out_features: usize, mut put: impl FnMut(usize, f32)) {
        let scale = scale * self.scaling;
        self.product(v, out_features, |output, product| put(output, scale * product));
    }

    /// Calls `put` with each output and its element of `B v`.
    pub(super) fn product(&self, v: &[f32], out_features: usize, mut put: impl FnMut(usize, f32)) {
        let layout = B { out_features, rank: self.rank };
        for begin in (0..out_features).step_by(TILE_FEATURES) {
            // In the order of the rows of the cores, each in eight interleaved sums.
            let mut sums = [[0.0; CORE]; TILE_FEATURES];
            for (i, v) in v[..self.rank].chunks(TILE_RANKS).enumerate() {
                let v = padded(v.iter().copied());
                add_products(&self.b[layout.at(begin, i * TILE_RANKS)..][..TILE_ELEMS], &v, &mut sums);
            }
            for output in 0..TILE_FEATURES.min(out_features - begin) {
                put(begin + output, sums[layout.at(output, 0) / CORE].iter().sum());
            }
        }
    }
}

/// Adds the products of each row of cores with `x` to its eight sums.
fn add_products<T: Element>(rows: &[T], x: &[f32; CORE], sums: &mut [[f32; CORE]]) {
    for (row, sums) in rows.as_chunks::<CORE>().0.iter().zip(sums) {
        for lane in 0..CORE {
            sums[lane] += row[lane].to_f32() * x[lane];
        }
    }
}

/// The values, and zeros behind them.
fn padded(values: impl Iterator<Item = f32>) -> [f32; CORE] {
    let mut padded = [0.0; CORE];
    padded.iter_mut().zip(values).for_each(|(padded, value)| *padded = value);
    padded
}
