use rayon::{iter::IndexedParallelIterator, iter::ParallelIterator, slice::ParallelSliceMut};

use super::{Matrix, MatrixMut, Step, WeightTable};
use crate::{
    Element,
    error::OperandError,
    model::{LinearId, LinearSite, ModelId},
    plan::PlanError,
};

/// The adapters of one linear layer.
#[derive(Clone, Debug)]
pub struct LoraLinear {
    model: ModelId,
    site: LinearSite,
}

impl LoraLinear {
    /// The layer `id` of the table's model.
    ///
    /// # Errors
    /// If the id is of another model.
    pub fn new(weights: &WeightTable, id: LinearId) -> Result<Self, PlanError> {
        let site = weights.model().linear(id).ok_or(PlanError::Foreign)?.clone();
        Ok(Self { model: weights.model().id(), site })
    }

    /// Adds `scaling · B (A x[t])` to `y[t]`, for every token `t` that has an adapter. Base tokens keep `y` bit for bit.
    ///
    /// `x` is `[tokens, in_features]` and `y` is `[tokens, out_features]`. With row-parallel layers `y` is this rank's partial
    /// sum: call this before the all-reduce.
    ///
    /// # Errors
    /// If the operands don't fit the layer and the step; then `y` is as it was.
    #[doc(alias = "punica")]
    pub fn add_delta<T: Element>(
        &self,
        step: &mut Step<'_>,
        x: Matrix<'_, T>,
        y: MatrixMut<'_, T>,
    ) -> Result<(), OperandError> {
        y.check(step.num_tokens(), self.site.out_features())?;
        self.shrink(step, x)?;
        self.expand(step, y)
    }

    /// `y[t] = scaling · B (A x[t])`, and zero for every token and slice that has no adapter: for a base GEMM that adds its product to
    /// what `y` holds.
    ///
    /// # Errors
    /// As for [`add_delta`](Self::add_delta).
    pub fn write_delta<T: Element>(
        &self,
        step: &mut Step<'_>,
        x: Matrix<'_, T>,
        mut y: MatrixMut<'_, T>,
    ) -> Result<(), OperandError> {
        y.check(step.num_tokens(), self.site.out_features())?;
        self.shrink(step, x)?;
        y.clear();
        self.expand(step, y)
    }

    /// The first half of [`add_delta`](Self::add_delta): `A x[t]` into the workspace.
    ///
    /// # Errors
    /// If the operands don't fit the layer and the step.
    pub fn shrink<T: Element>(&self, step: &mut Step<'_>, x: Matrix<'_, T>) -> Result<(), OperandError> {
        x.check(step.num_tokens(), self.site.in_features())?;
        step.check::<T>("x", self.model)?;
        let v_stride = self.v_stride(step);
        let mut sums = std::mem::take(&mut step.workspace.v);
        sums.clear();
        sums.resize(step.num_tokens() * v_stride, 0.0);
        sums.par_chunks_mut(v_stride).enumerate().for_each(|(token, v)| {
            for (slice, v) in v.chunks_mut(step.max_rank).enumerate() {
                if let Some(factors) = step.factors(step.batch.slots()[token], self.site.first_entry() + slice) {
                    factors.shrink(x.row(token), v);
                }
            }
        });
        step.workspace.v = sums;
        Ok(())
    }

    /// The second half of [`add_delta`](Self::add_delta): adds `scaling · B v` to `y`, from what [`shrink`](Self::shrink) left
    /// in the same step.
    ///
    /// # Errors
    /// If the operands don't fit the layer and the step, or nothing of this step was shrunk; then `y` is as it was.
    pub fn expand<T: Element>(&self, step: &mut Step<'_>, mut y: MatrixMut<'_, T>) -> Result<(), OperandError> {
        y.check(step.num_tokens(), self.site.out_features())?;
        step.check::<T>("y", self.model)?;
        let (v_stride, sums) = (self.v_stride(step), &step.workspace.v);
        if sums.len() != step.num_tokens() * v_stride {
            let got = sums.len() / v_stride;
            return Err(OperandError::Length { operand: "workspace", got, want: step.num_tokens() });
        }
        y.rows_mut().enumerate().for_each(|(token, mut y)| {
            for (slice, site) in self.site.slices().iter().enumerate() {
                let (y_slice, rest) = y.split_at_mut(site.out_features());
                y = rest;
                let v = &sums[token * v_stride + slice * step.max_rank..];
                if let Some(factors) = step.factors(step.batch.slots()[token], self.site.first_entry() + slice) {
                    factors.expand(v, step.batch.scale(token), y_slice);
                }
            }
        });
        Ok(())
    }

    fn v_stride(&self, step: &Step<'_>) -> usize {
        self.site.slices().len() * step.max_rank
    }
}
