//! A step on the CPU: a batch with its table and its workspace.

use std::sync::Arc;

use super::{
    WeightTable,
    factors::Factors,
    upload::{Adapter, TrainedRows},
};
use crate::{
    DType, Element, Slot, contract::StepShape, error::OperandError, model::ModelId, plan::PlanError, routing::Batch,
};

/// The operations of one batch, and the table, batch and workspace that they share.
///
/// A step keeps the adapters of its batch.
#[derive(Debug)]
pub struct Step<'a> {
    pub(super) model: ModelId,
    pub(super) dtype: DType,
    pub(super) num_slots: usize,
    pub(super) max_rank: usize,
    /// Adapters of the batch, by slot.
    pub(super) adapters: Vec<Option<Arc<Adapter>>>,
    pub(super) batch: Batch<'a>,
    pub(super) workspace: &'a mut Workspace,
}

impl Step<'_> {
    /// Tokens in the batch.
    pub fn num_tokens(&self) -> usize {
        self.batch.num_tokens()
    }

    /// What the operations are checked against.
    pub(super) fn shape(&self) -> StepShape {
        let &Self { model, dtype, num_slots, max_rank, .. } = self;
        StepShape { model, dtype, num_slots, max_rank, num_tokens: self.num_tokens() }
    }

    /// Whether a token has a slot. If none has, an engine may skip what [`Batch::has_adapters`] says.
    pub fn has_adapters(&self) -> bool {
        self.batch.has_adapters()
    }

    /// The factors of a slot at a descriptor-table entry.
    pub(super) fn factors<T: Element>(&self, slot: Slot, entry: usize) -> Option<Factors<'_, T>> {
        self.adapters.get(slot.index()?)?.as_ref()?.packed.factors(entry)
    }

    /// The trained rows of a slot at a descriptor-table entry.
    pub(super) fn rows<T: Element>(&self, slot: Slot, entry: usize, hidden: usize) -> Option<TrainedRows<'_, T>> {
        self.adapters.get(slot.index()?)?.as_ref()?.packed.rows(entry, hidden)
    }
}

impl WeightTable {
    /// Starts a step of `batch`, which keeps its adapters, whatever is loaded and unloaded meanwhile.
    ///
    /// # Errors
    /// [`OperandError::Capacity`] if the batch has more tokens than
    /// [`Capacity::max_tokens`](crate::plan::Capacity::max_tokens), [`OperandError::NoSuchSlot`] and
    /// [`OperandError::NotLoaded`] if it names a slot that the table does not have, or whose adapter is not there any
    /// more, [`OperandError::Pooled`] if the table belongs to a pool, whose own `step` starts its steps.
    pub fn step<'a>(&self, batch: &Batch<'a>, workspace: &'a mut Workspace) -> Result<Step<'a>, OperandError> {
        batch.check(self.capacity())?;
        if self.is_pooled() {
            return Err(OperandError::Pooled);
        }
        Ok(Step {
            model: self.model().id(),
            dtype: self.dtype(),
            num_slots: self.capacity().num_slots,
            max_rank: self.capacity().max_rank,
            adapters: self.adapters(batch)?,
            batch: *batch,
            workspace,
        })
    }
}

/// Scratch memory of a step: `A x` of what is [`Shrunk`](super::Shrunk).
#[derive(Clone, Debug, Default)]
pub struct Workspace {
    /// `[tokens, slices, max_rank]`
    pub(super) v: Vec<f32>,
}

impl Workspace {
    /// A workspace for any layer of the table's model, or of any other table: it grows.
    ///
    /// # Errors
    /// None; the GPU's has some.
    pub fn new(_weights: &WeightTable) -> Result<Self, PlanError> {
        Ok(Self::default())
    }
}
