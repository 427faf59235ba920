use crate::{
    DType, Element, Slot,
    adapter::{AdapterError, ImageEntry, SlotImage, padded},
    error::SlotError,
    model::{Entry, ModelSpec},
};

/// The adapters in host memory, a slot each.
#[derive(Debug)]
#[doc(alias = "max_loras")]
pub struct WeightTable<T> {
    model: Vec<Entry>,
    max_rank: usize,
    slots: Vec<Option<Adapter<T>>>,
}

#[derive(Debug)]
struct Adapter<T> {
    block: Vec<T>,
    entries: Vec<Option<ImageEntry>>,
}

impl<T: Element> WeightTable<T> {
    /// A table of empty slots for the adapters of `model`, whose factors have at most rank `max_rank`.
    #[doc(alias = "max_lora_rank")]
    pub fn new(model: &ModelSpec, num_slots: usize, max_rank: usize) -> Self {
        let slots = (0..num_slots).map(|_| None).collect();
        Self { model: model.entries().to_vec(), max_rank, slots }
    }

    /// Loads an adapter into a slot, in place of the one that was there. On an error the slot is as it was.
    ///
    /// # Errors
    /// If the image does not fit the table, or a weight cannot be represented (NaN, or too large for the type).
    pub fn load(&mut self, slot: Slot, image: &SlotImage<'_>) -> Result<(), AdapterError> {
        let index = self.index(slot)?;
        image.check_table(&self.model, T::DTYPE, self.max_rank)?;
        let mut block = vec![T::default(); image.bytes() / T::DTYPE.bytes()];
        image.write_to(bytemuck::cast_slice_mut(&mut block))?;
        let mut entries = vec![None; self.model.len()];
        for entry in image.entries() {
            entries[entry.entry] = Some(*entry);
        }
        self.slots[index] = Some(Adapter { block, entries });
        Ok(())
    }

    /// Empties a slot: its tokens are the base model's from now on.
    ///
    /// # Errors
    /// If there is no such slot.
    pub fn unload(&mut self, slot: Slot) -> Result<(), SlotError> {
        let index = self.index(slot)?;
        self.slots[index] = None;
        Ok(())
    }

    pub(super) fn model(&self) -> &[Entry] {
        &self.model
    }

    pub(super) fn max_rank(&self) -> usize {
        self.max_rank
    }

    /// The factors that a token of `slot` has at a table entry, if any.
    pub(super) fn factors(&self, slot: Slot, entry: usize) -> Option<Factors<'_, T>> {
        let adapter = self.slots.get(slot.index()?)?.as_ref()?;
        let ImageEntry { a_elems, b_elems, rank, scaling, .. } = adapter.entries[entry]?;
        Some(Factors { a: &adapter.block[a_elems..], b: &adapter.block[b_elems..], rank, scaling })
    }

    fn index(&self, slot: Slot) -> Result<usize, SlotError> {
        slot.index_below(self.slots.len())
    }
}

/// A module's factors, as laid out in the block (`adapter::image`).
pub(super) struct Factors<'a, T> {
    a: &'a [T],
    b: &'a [T],
    pub(super) rank: usize,
    pub(super) scaling: f32,
}

impl<'a, T: Element> Factors<'a, T> {
    const DTYPE: DType = T::DTYPE;

    /// A row of A `[rank, in_features]`, or of an embedding's A `[vocab, rank]`.
    pub(super) fn a_row(&self, row: usize, cols: usize) -> &'a [T] {
        &self.a[row * padded(cols, Self::DTYPE)..][..cols]
    }

    /// A row of B `[out_features, rank]`.
    pub(super) fn b_row(&self, row: usize) -> &'a [T] {
        &self.b[row * padded(self.rank, Self::DTYPE)..][..self.rank]
    }

    /// Adds `scale · B v` to `y`.
    pub(super) fn expand(&self, v: &[f32], scale: f32, y: &mut [T]) {
        let scale = scale * self.scaling;
        for (row, out) in y.iter_mut().enumerate() {
            let delta: f32 = self.b_row(row).iter().zip(v).map(|(b, v)| b.to_f32() * v).sum();
            *out = T::from_f32(out.to_f32() + scale * delta);
        }
    }
}
