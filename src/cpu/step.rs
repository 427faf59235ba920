use std::sync::Arc;

use super::{WeightTable, Workspace, factors::Factors, upload::Adapter};
use crate::{DType, Element, Slot, error::OperandError, model::ModelId, routing::Batch};

/// A step of a batch: what all its operations have in common.
///
/// It works on the adapters that were loaded when it [began](super::WeightTable::step).
#[derive(Debug)]
pub struct Step<'a> {
    pub(super) model: ModelId,
    pub(super) dtype: DType,
    pub(super) max_rank: usize,
    /// By slot; those that the batch has.
    pub(super) adapters: Vec<Option<Arc<Adapter>>>,
    pub(super) batch: Batch<'a>,
    pub(super) workspace: &'a mut Workspace,
}

impl Step<'_> {
    /// The tokens of the batch.
    pub fn num_tokens(&self) -> usize {
        self.batch.num_tokens()
    }

    /// Refuses a layer of another model, and an operand of another element type.
    pub(super) fn check<T: Element>(&self, operand: &'static str, model: ModelId) -> Result<(), OperandError> {
        if self.model != model {
            return Err(OperandError::Model);
        }
        if T::DTYPE != self.dtype {
            return Err(OperandError::DType { operand, got: T::DTYPE, want: self.dtype });
        }
        Ok(())
    }

    /// The factors that a token of `slot` has at a table entry, if any.
    pub(super) fn factors<T: Element>(&self, slot: Slot, entry: usize) -> Option<Factors<'_, T>> {
        self.adapters.get(slot.index()?)?.as_ref()?.factors(entry)
    }
}

impl WeightTable {
    /// Begins a step of the tokens of `batch`, on the adapters that are loaded now.
    ///
    /// # Errors
    /// None: those of the GPU's table, which checks its operands here.
    pub fn step<'a>(&self, batch: &Batch<'a>, workspace: &'a mut Workspace) -> Result<Step<'a>, OperandError> {
        workspace.clear();
        Ok(Step {
            model: self.model().id(),
            dtype: self.dtype(),
            max_rank: self.capacity().max_rank,
            adapters: self.adapters(batch),
            batch: *batch,
            workspace,
        })
    }
}
