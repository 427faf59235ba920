use super::{MatrixMut, Step, WeightTable};
use crate::{Element, contract, error::OperandError, model::EmbeddingId, plan::PlanError};

/// The LoRA operation of one embedding.
#[derive(Clone, Debug)]
pub struct LoraEmbedding {
    contract: contract::Embedding,
}

impl LoraEmbedding {
    /// The embedding `id` of the table's model.
    ///
    /// # Errors
    /// [`PlanError::Foreign`] if the id belongs to another model, [`PlanError::Limit`] if the kernels of a GPU do not support a size.
    pub fn new(weights: &WeightTable, id: EmbeddingId) -> Result<Self, PlanError> {
        let contract = contract::Embedding::new(weights.model(), id, weights.dtype(), weights.capacity())?;
        Ok(Self { contract })
    }

    #[doc = doc_of!(embedding_add_delta)]
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the embedding and the step. `y` is then unchanged.
    pub fn add_delta<T: Element>(
        &self,
        step: &mut Step<'_>,
        token_ids: &[i32],
        mut y: MatrixMut<'_, T>,
    ) -> Result<(), OperandError> {
        self.contract.check(step.shape(), token_ids.len(), y.shape())?;
        let site = &self.contract.site;
        y.for_rows(&|token, y| {
            let Some(id) = usize::try_from(token_ids[token]).ok().filter(|&id| id < site.vocab()) else { return };
            let Some(factors) = step.factors(step.batch.slots()[token], site.entry()) else { return };
            factors.expand(&factors.look_up(site.vocab(), id), step.batch.scale(token), y);
        });
        Ok(())
    }
}
