//! Trained rows on the CPU.

use super::{Matrix, MatrixMut, Step, WeightTable};
use crate::{Element, contract, error::OperandError, model::RowsId, plan::PlanError};

/// The operations of [trained rows](crate::model::ModelSpec::trained_rows).
#[derive(Clone, Debug)]
#[doc(alias = "trainable_token_indices")]
pub struct TrainedRows {
    contract: contract::TrainedRows,
}

impl TrainedRows {
    /// The rows `id` of the table's model.
    ///
    /// # Errors
    /// [`PlanError::Foreign`] if the id belongs to another model.
    pub fn new(weights: &WeightTable, id: RowsId) -> Result<Self, PlanError> {
        let contract = contract::TrainedRows::new(weights.model(), id, weights.dtype(), weights.capacity())?;
        Ok(Self { contract })
    }

    #[doc = doc_of!(rows_replace_embeddings)]
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the model and the step. `y` is then unchanged.
    pub fn replace_embeddings<T: Element>(
        &self,
        step: &mut Step<'_>,
        token_ids: &[i32],
        mut y: MatrixMut<'_, T>,
    ) -> Result<(), OperandError> {
        self.contract.check_embeddings(step.shape(), token_ids.len(), y.shape())?;
        let site = &self.contract.site;
        y.for_rows(&|token, y| {
            let rows = step.rows::<T>(step.batch.slots()[token], site.embedding.entry, site.hidden());
            let (Some(rows), Ok(id)) = (rows, usize::try_from(token_ids[token])) else { return };
            if let Some(row) = rows.find(id) {
                y.copy_from_slice(rows.row(row));
            }
        });
        Ok(())
    }

    #[doc = doc_of!(rows_replace_logits)]
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the model and the step. `y` is then unchanged.
    pub fn replace_logits<T: Element>(
        &self,
        step: &mut Step<'_>,
        x: Matrix<'_, T>,
        mut y: MatrixMut<'_, T>,
    ) -> Result<(), OperandError> {
        self.contract.check_logits(step.shape(), x.shape(), y.shape())?;
        let site = &self.contract.site;
        y.for_rows(&|token, y| {
            let rows = step.rows::<T>(step.batch.slots()[token], site.head.entry, site.hidden());
            for (rows, row) in rows.iter().flat_map(|rows| (0..rows.count()).map(move |row| (rows, row))) {
                let products = x.row(token).iter().zip(rows.row(row)).map(|(x, w)| x.to_f32() * w.to_f32());
                y[rows.id(row)] = T::from_f32(products.sum());
            }
        });
        Ok(())
    }
}
