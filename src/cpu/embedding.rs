use rayon::iter::{IndexedParallelIterator, ParallelIterator};

use super::{MatrixMut, Step, WeightTable};
use crate::{
    Element,
    error::OperandError,
    model::{EmbeddingId, EmbeddingSite, ModelId},
    plan::PlanError,
};

/// The adapters of an embedding.
#[derive(Clone, Debug)]
pub struct LoraEmbedding {
    model: ModelId,
    site: EmbeddingSite,
}

impl LoraEmbedding {
    /// The embedding `id` of the table's model.
    ///
    /// # Errors
    /// If the id is of another model.
    pub fn new(weights: &WeightTable, id: EmbeddingId) -> Result<Self, PlanError> {
        let site = weights.model().embedding(id).ok_or(PlanError::Foreign)?.clone();
        Ok(Self { model: weights.model().id(), site })
    }

    /// Adds `scaling · B A[:, token_ids[t]]` to `y[t]`, for every token `t` that has an adapter and an id in the vocabulary. All
    /// other rows of `y` keep every bit.
    ///
    /// `y` is `[tokens, hidden]`.
    ///
    /// # Errors
    /// If the operands don't fit the embedding and the step; then `y` is as it was.
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
        y.rows_mut().enumerate().for_each(|(token, y)| {
            let Some(id) = usize::try_from(token_ids[token]).ok().filter(|&id| id < self.site.vocab()) else { return };
            let Some(factors) = step.factors(step.batch.slots()[token], self.site.entry()) else { return };
            factors.expand(&factors.look_up(self.site.vocab(), id), step.batch.scale(token), y);
        });
        Ok(())
    }
}
