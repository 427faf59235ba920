//! The adapters whose A are rows of the base weights.

#![expect(unsafe_code, reason = "calls the raw API")]

use std::sync::Arc;

use crate::{
    Element, Slot,
    cuda::{
        Buffer, LaunchError, MatrixMut, Step, WeightTable,
        memory::{Kept, Operand, Region},
        raw,
        steps::Checked,
    },
    model::LinearId,
    plan::PlanError,
    unique::unique,
};

/// `A` of the adapters that run, as further rows of the base weights: the base GEMM computes `v = A x` of all of them
/// for the bytes of `A`, and no launch shrinks. [`raw::Stack`] says what W and `y` are then.
///
/// [`place`](Self::place) brings the adapters of a batch into the stack, in place of those that were used least
/// recently. Then [`LoraLinear::add_stacked_delta`](super::LoraLinear::add_stacked_delta) and
/// [`stacked_silu_mul`](super::LoraLinear::stacked_silu_mul) add the deltas.
///
/// The rows are the stack's, cut off a [`Buffer`] of W and what is behind it:
///
/// ```no_run
/// use aril::{cuda::{Buffer, LaunchError, LoraLinear, MatrixMut, Stack, Step, WeightTable}, model::LinearId};
/// use half::bf16;
///
/// const POSITIONS: usize = 8;
/// const RANK: usize = 16;
///
/// /// `w` is `[outputs + stacked_rows, inputs]`.
/// fn stack(weights: &WeightTable, id: LinearId, layer: &LoraLinear, w: &mut Buffer<bf16>) -> Result<Stack, LaunchError> {
///     let (inputs, outputs) = (weights.model()[id].in_features(), weights.model()[id].out_features());
///     assert_eq!(w.len(), (outputs + layer.plan().stacked_rows(POSITIONS, RANK)) * inputs);
///     Stack::new(weights, (POSITIONS, RANK), [(id, w.split_off(outputs * inputs))])
/// }
///
/// /// Whether the deltas were added: if not, the engine adds them in another mode.
/// fn add(layer: &LoraLinear, stack: &mut Stack, step: &mut Step<'_>, y: MatrixMut<'_, bf16>) -> Result<bool, LaunchError> {
///     if !stack.place(step)? {
///         return Ok(false);
///     }
///     // … the GEMM by all rows of `w`, which writes all columns of `y`.
///     layer.add_stacked_delta(step, stack, y)?;
///     Ok(true)
/// }
/// ```
#[derive(Debug)]
pub struct Stack {
    raw: raw::Stack,
    weights: WeightTable,
    /// What graphs keep: its memory, and that of its table.
    memory: Arc<[Kept]>,
    id: u64,
    /// The adapter at each position, and the number of the last batch that had it.
    positions: Vec<(Slot, u64)>,
    /// By slot, the position that it had last.
    position_of: Vec<usize>,
    /// Of the batch that is being placed.
    missing: Vec<Slot>,
    batches: u64,
}

impl Stack {
    /// An empty stack for `positions` adapters of the table, of ranks up to `rank`. `rows` of a layer are
    /// `[stacked_rows, in_features]` ([`LinearPlan::stacked_rows`](crate::plan::LinearPlan::stacked_rows)), contiguous
    /// and aligned to 16 bytes: the end of the buffer of its base weight, which the GEMM reads as part of W.
    ///
    /// # Errors
    /// [`LaunchError`] if a size is outside its limits, an id belongs to another model, a layer is fully sharded or is
    /// there twice, rows have another length, type, queue or alignment, `in_features` or a slice's outputs are no
    /// multiple of 8, the table is of `f32`, the stream is being captured, or device memory is exhausted.
    pub fn new<T: Element>(
        weights: &WeightTable,
        (positions, rank): (usize, usize),
        rows: impl IntoIterator<Item = (LinearId, Buffer<T>)>,
    ) -> Result<Self, LaunchError> {
        let (queue, model) = (weights.queue(), weights.model());
        raw::Stack::check_limits(positions, rank)?;
        queue.prepare()?;
        let mut kept = vec![weights.kept()];
        let mut matrices = Vec::new();
        for (id, mut buffer) in rows {
            queue.check("the stack's rows", buffer.memory().queue())?;
            let site = model.linear(id).ok_or(PlanError::Foreign)?;
            let (address, rows) = (buffer.device_ptr(), raw::Stack::rows_of(site, positions, rank));
            matrices.push((id, MatrixMut::new(&mut buffer, rows, site.in_features())?.at(address)));
            kept.push(Arc::clone(buffer.memory()) as Kept);
        }
        let region = Arc::new(Region::<u8>::new(queue, raw::Stack::device_bytes(model, positions, matrices.len()))?);
        // SAFETY: this type owns the memory and the rows, uses them on one stream only, and frees them in its order.
        // Graphs that use them keep them alive.
        let raw = unsafe {
            raw::Stack::new(
                queue.kernels(),
                model,
                weights.dtype(),
                (positions, rank),
                &matrices,
                region.region(),
                queue.raw(),
            )
        }?;
        kept.push(region);
        Ok(Self {
            raw,
            weights: weights.clone(),
            memory: kept.into(),
            id: unique(),
            positions: vec![(Slot::BASE, 0); positions],
            position_of: vec![0; weights.capacity().num_slots],
            missing: Vec::with_capacity(positions),
            batches: 0,
        })
    }

    /// Room for so many adapters.
    pub fn positions(&self) -> usize {
        self.raw.positions()
    }

    /// The highest rank of an adapter in the stack: that of [`new`](Self::new), in steps of 8.
    pub fn rank(&self) -> usize {
        self.raw.rank()
    }

    /// Enqueues copies of `A` for the adapters of the step's batch that are not in the stack, and returns whether all
    /// are. Call it once in each step before the operations with the stack, or the replay of a graph with such.
    ///
    /// It returns `false`, and enqueues nothing, if the batch has more adapters than there are
    /// [`positions`](Self::positions), one of a higher [`rank`](Self::rank), or slots in device memory. A copy is a
    /// launch for all layers. Neither allocates nor waits. A captured step is for any batch: its replays need the batch
    /// of their step to be placed.
    ///
    /// # Errors
    /// [`OperandError::OtherTable`](crate::error::OperandError::OtherTable) if the stack is of another table than the
    /// step, [`OperandError::NotLoaded`](crate::error::OperandError::NotLoaded) as for any operation of the step.
    /// [`LaunchError::Capturing`] if the engine captures the queue's stream. [`LaunchError::Driver`].
    pub fn place(&mut self, step: &mut Step<'_>) -> Result<bool, LaunchError> {
        step.check_table(&self.weights)?;
        if step.is_captured() {
            return Ok(true);
        }
        if !step.has_adapters() {
            step.has_placed(self.id);
            return Ok(true);
        }
        let slots = step.adapters();
        if slots.is_empty() || !self.look_up(slots) {
            return Ok(false);
        }
        let operands: Checked<'_, '_, 0> = step.check([])?;
        operands.enqueue(|[], stream| self.set_missing(stream))?;
        step.has_placed(self.id);
        Ok(true)
    }

    /// Finds what is missing of a batch. Whether the stack has room for the batch.
    fn look_up(&mut self, slots: &[Slot]) -> bool {
        self.batches += 1;
        self.missing.clear();
        let mut found = 0;
        for &slot in slots {
            let Some(index) = slot.index() else { continue };
            let (at, last) = &mut self.positions[self.position_of[index]];
            if *at == slot {
                found += usize::from(*last != self.batches);
                *last = self.batches;
            } else if !self.missing.contains(&slot) {
                if found + self.missing.len() >= self.raw.positions() {
                    return false;
                }
                self.missing.push(slot);
            }
        }
        let fits = |slot: &Slot| {
            let info = slot.index().and_then(|index| self.weights.get(index));
            info.is_none_or(|info| info.max_rank <= self.raw.rank())
        };
        found + self.missing.len() <= self.raw.positions() && self.missing.iter().all(fits)
    }

    /// Gives what is missing positions that the batch does not use.
    fn set_missing(&mut self, stream: raw::Stream) -> Result<(), LaunchError> {
        while let Some(slot) = self.missing.pop() {
            let index = slot.index().expect("the base model is not missing");
            let last = |position: &usize| self.positions[*position].1;
            let position = (0..self.positions.len()).min_by_key(last).expect("there is a position");
            // SAFETY: the table and the stack belong to this stream, which orders their uses. `look_up` has compared
            // the rank; the adapter is in its slot (`Checked::enqueue` compares again), and when it leaves, no step has
            // its slot in the batch any more.
            unsafe { self.raw.set(position, &self.weights.raw(), Some(index), stream) }?;
            self.positions[position] = (slot, self.batches);
            self.position_of[index] = position;
        }
        Ok(())
    }

    /// Rejects a step whose batch has not been placed. A captured step keeps the stack's memory.
    pub(super) fn check<'s, 'o, const N: usize>(
        &self,
        step: &'s Step<'_>,
        operands: [Option<Operand<'o>>; N],
    ) -> Result<Checked<'s, 'o, N>, LaunchError> {
        step.check_table(&self.weights)?;
        step.check_placed(self.id, &self.memory)?;
        step.check(operands)
    }

    /// The step, on a stream, with the most tiles of a batch that is placed: of as many slots as there are positions,
    /// and of the base model. The table may have room for many more.
    pub(super) fn bounded(&self, step: raw::Step, stream: raw::Stream) -> raw::Step {
        let (mut batch, placed) = (step.batch, self.weights.capacity().slots(self.positions()));
        batch.max_small_tiles = batch.max_small_tiles.min(placed.max_small_tiles(batch.num_tokens));
        raw::Step { batch, stream, ..step }
    }

    /// The stack in the raw API.
    pub(super) fn raw(&self) -> &raw::Stack {
        &self.raw
    }
}
