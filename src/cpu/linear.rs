use rayon::{iter::IndexedParallelIterator, iter::ParallelIterator, slice::ParallelSliceMut};

use super::{Matrix, MatrixMut, Step, WeightTable};
use crate::{
    Element,
    error::OperandError,
    model::{LinearId, LinearSite, ModelId},
    plan::PlanError,
};

/// The LoRA operations of one linear layer.
#[derive(Clone, Debug)]
pub struct LoraLinear {
    model: ModelId,
    site: LinearSite,
}

impl LoraLinear {
    /// The layer `id` of the table's model.
    ///
    /// # Errors
    /// [`PlanError::Foreign`] if the id belongs to another model.
    pub fn new(weights: &WeightTable, id: LinearId) -> Result<Self, PlanError> {
        let site = weights.model().linear(id).ok_or(PlanError::Foreign)?.clone();
        Ok(Self { model: weights.model().id(), site })
    }

    /// `y[t] += scaling · B (A x[t])`, for every token `t` whose slot has an adapter of this layer. All other rows of `y` keep
    /// every bit.
    ///
    /// `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`. In a row-parallel layer, `y` is this rank's partial sum:
    /// call this before the all-reduce.
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the layer and the step. `y` is then unchanged.
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

    /// `y[t] = scaling · B (A x[t])`, or zero for tokens and slices without an adapter. For a base GEMM that accumulates into `y`.
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

    /// The first half of [`add_delta`](Self::add_delta): computes `A x[t]` into the workspace.
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the layer and the step.
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

    /// The second half of [`add_delta`](Self::add_delta): `y[t] += scaling · B v`, with `v` from the step's last
    /// [`shrink`](Self::shrink).
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the layer and the step, or the step has no shrink. `y` is then unchanged.
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
