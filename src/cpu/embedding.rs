use rayon::iter::{IndexedParallelIterator, ParallelIterator};

use super::{MatrixMut, WeightTable};
use crate::{
    Element,
    error::OperandError,
    model::{EmbeddingId, EmbeddingSite, ModelSpec},
    routing::Batch,
};

/// The adapters of an embedding.
#[derive(Clone, Debug)]
pub struct LoraEmbedding {
    site: EmbeddingSite,
}

impl LoraEmbedding {
    /// The embedding `id` of `model`.
    pub fn new(model: &ModelSpec, id: EmbeddingId) -> Self {
        Self { site: model[id].clone() }
    }

    /// Adds `scaling · B A[:, token_ids[t]]` to `y[t]`, for every token `t` that has an adapter and an id in the vocabulary. All
    /// other rows of `y` keep every bit.
    ///
    /// `y` is `[tokens, hidden]`.
    ///
    /// # Errors
    /// If the operands don't fit the embedding and the batch; then `y` is as it was.
    pub fn add_delta<T: Element>(
        &self,
        token_ids: &[i32],
        mut y: MatrixMut<'_, T>,
        weights: &WeightTable<T>,
        batch: &Batch<'_>,
    ) -> Result<(), OperandError> {
        if token_ids.len() != batch.num_tokens() {
            return Err(OperandError::Length { operand: "token_ids", got: token_ids.len(), want: batch.num_tokens() });
        }
        y.check(batch.num_tokens(), self.site.hidden())?;
        if !self.site.is_in(weights.model()) {
            return Err(OperandError::Model);
        }
        y.rows_mut().enumerate().for_each(|(token, y)| {
            let Some(id) = usize::try_from(token_ids[token]).ok().filter(|&id| id < self.site.vocab()) else { return };
            let Some(factors) = weights.factors(batch.slots()[token], self.site.entry()) else { return };
            factors.expand(&factors.look_up(self.site.vocab(), id), batch.scale(token), y);
        });
        Ok(())
    }
}
