use super::{MatrixMut, Step, WeightTable};
use crate::{
    Element,
    error::OperandError,
    model::{EmbeddingId, EmbeddingSite, ModelId},
    plan::PlanError,
};

/// The LoRA operation of one embedding.
#[derive(Clone, Debug)]
pub struct LoraEmbedding {
    model: ModelId,
    site: EmbeddingSite,
}

impl LoraEmbedding {
    /// The embedding `id` of the table's model.
    ///
    /// # Errors
    /// [`PlanError::Foreign`] if the id belongs to another model.
    pub fn new(weights: &WeightTable, id: EmbeddingId) -> Result<Self, PlanError> {
        let site = weights.model().embedding(id).ok_or(PlanError::Foreign)?.clone();
        Ok(Self { model: weights.model().id(), site })
    }

    #[doc = include_str!("../docs/operations/embedding_add_delta.md")]
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the embedding and the step. `y` is then unchanged.
    pub fn add_delta<T: Element>(
        &self,
        step: &mut Step<'_>,
        token_ids: &[i32],
        mut y: MatrixMut<'_, T>,
    ) -> Result<(), OperandError> {
        if token_ids.len() != step.num_tokens() {
            return Err(OperandError::Length { operand: "token_ids", got: token_ids.len(), want: step.num_tokens() });
        }
        y.check(step.num_tokens(), self.site.hidden())?;
        step.check::<T>("y", self.model)?;
        y.for_rows(&|token, y| {
            let Some(id) = usize::try_from(token_ids[token]).ok().filter(|&id| id < self.site.vocab()) else { return };
            let Some(factors) = step.factors(step.batch.slots()[token], self.site.entry()) else { return };
            factors.expand(&factors.look_up(self.site.vocab(), id), step.batch.scale(token), y);
        });
        Ok(())
    }
}
