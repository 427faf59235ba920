use super::{Shape, StepShape};
use crate::{
    DType,
    error::OperandError,
    model::{EmbeddingId, EmbeddingSite, Model, ModelId},
    plan::{Capacity, PlanError, check_outputs},
};

/// An embedding.
#[derive(Clone, Debug)]
pub(crate) struct Embedding {
    model: ModelId,
    pub(crate) site: EmbeddingSite,
    pub(crate) dtype: DType,
    pub(crate) capacity: Capacity,
}

impl Embedding {
    pub(crate) fn new(model: &Model, id: EmbeddingId, dtype: DType, capacity: Capacity) -> Result<Self, PlanError> {
        let site = model.embedding(id).ok_or(PlanError::Foreign)?.clone();
        let capacity = capacity.checked()?;
        check_outputs(&[site.hidden()], capacity, 0)?;
        Ok(Self { model: model.id(), site, dtype, capacity })
    }

    pub(crate) fn check(&self, step: StepShape, num_ids: usize, y: Shape) -> Result<(), OperandError> {
        let tokens = step.num_tokens;
        step.check(self.model, self.dtype, self.capacity, self.capacity.max_tokens)?;
        if num_ids != tokens {
            return Err(OperandError::Length { operand: "token_ids", got: num_ids, want: tokens });
        }
        y.expect("y", self.dtype, tokens, self.site.hidden())
    }
}
