use rayon::{iter::IndexedParallelIterator, iter::ParallelIterator, slice::ParallelSliceMut};

use super::{Matrix, MatrixMut, Step, WeightTable, activation};
use crate::{
    Element,
    error::OperandError,
    model::{Activation, LinearId, LinearSite, ModelId},
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
    /// [`PlanError::Foreign`] if the id belongs to another model, [`PlanError::FullySharded`] if the layer is fully sharded.
    pub fn new(weights: &WeightTable, id: LinearId) -> Result<Self, PlanError> {
        let site = weights.model().linear(id).ok_or(PlanError::Foreign)?.clone();
        if site.exchange().is_some() {
            return Err(PlanError::FullySharded);
        }
        Ok(Self { model: weights.model().id(), site })
    }

    #[doc = include_str!("../docs/operations/linear_add_delta.md")]
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

    #[doc = include_str!("../docs/operations/linear_write_delta.md")]
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
        self.check_shrink(step)?;
        y.for_rows(&|token, y| {
            self.deltas::<T>(step, token, |out, delta| y[out] = T::from_f32(y[out].to_f32() + delta));
        });
        Ok(())
    }

    #[doc = include_str!("../docs/operations/linear_silu_mul.md")]
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the layer and the step, the slices are not gate and up, or the step has no
    /// shrink. `out` is then unchanged.
    #[doc(alias = "silu_and_mul")]
    pub fn silu_mul<T: Element>(
        &self,
        step: &mut Step<'_>,
        y: Matrix<'_, T>,
        mut out: MatrixMut<'_, T>,
    ) -> Result<(), OperandError> {
        let features = OperandError::gate_up(&self.site)?;
        y.check_as("y", step.num_tokens(), 2 * features)?;
        out.check_as("out", step.num_tokens(), features)?;
        step.check::<T>("y", self.model)?;
        if step.batch.has_adapters() {
            self.check_shrink(step)?;
        }
        out.for_rows(&|token, out| {
            let mut sums: Vec<f32> = y.row(token).iter().map(|y| y.to_f32()).collect();
            self.deltas::<T>(step, token, |column, delta| sums[column] += delta);
            let (gate, up) = sums.split_at(features);
            for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
                *out = T::from_f32(activation::apply(Activation::Silu, Some(gate), up));
            }
        });
        Ok(())
    }

    #[doc = include_str!("../docs/operations/linear_add_rms_norm.md")]
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the layer and the step, the layer has several slices, or the step has no
    /// shrink. `residual` and `out` are then unchanged.
    #[doc(alias = "fused_add_rms_norm")]
    pub fn add_rms_norm<T: Element>(
        &self,
        step: &mut Step<'_>,
        y: Matrix<'_, T>,
        mut residual: MatrixMut<'_, T>,
        weight: &[T],
        eps: f32,
        mut out: MatrixMut<'_, T>,
    ) -> Result<(), OperandError> {
        let features = OperandError::norm(&self.site, weight.len())?;
        y.check_as("y", step.num_tokens(), features)?;
        residual.check_as("residual", step.num_tokens(), features)?;
        out.check_as("out", step.num_tokens(), features)?;
        step.check::<T>("y", self.model)?;
        if step.batch.has_adapters() {
            self.check_shrink(step)?;
        }
        let round = |value: f32| T::from_f32(value).to_f32();
        residual.rows_mut().zip(out.rows_mut()).enumerate().for_each(|(token, (residual, out))| {
            let mut sums: Vec<f32> = y.row(token).iter().map(|y| y.to_f32()).collect();
            self.deltas::<T>(step, token, |column, delta| sums[column] += delta);
            let mut squares = 0.0;
            for (residual, sum) in residual.iter_mut().zip(&sums) {
                *residual = T::from_f32(residual.to_f32() + sum);
                squares += residual.to_f32().powi(2);
            }
            #[expect(clippy::cast_precision_loss, reason = "rounded like any f32")]
            let scale = 1.0 / (squares / features as f32 + eps).sqrt();
            for ((out, residual), weight) in out.iter_mut().zip(&*residual).zip(weight) {
                *out = T::from_f32(weight.to_f32() * round(residual.to_f32() * scale));
            }
        });
        Ok(())
    }

    /// Rejects a step without a shrink of as many sums as this layer has.
    fn check_shrink(&self, step: &Step<'_>) -> Result<(), OperandError> {
        let (v_stride, len) = (self.v_stride(step), step.workspace.v.len());
        if len == step.num_tokens() * v_stride {
            return Ok(());
        }
        Err(OperandError::Length { operand: "workspace", got: len / v_stride, want: step.num_tokens() })
    }

    /// Calls `put` with each column of a token's delta and its value, if the token has an adapter.
    fn deltas<T: Element>(&self, step: &Step<'_>, token: usize, mut put: impl FnMut(usize, f32)) {
        let mut first = 0;
        for (slice, site) in self.site.slices().iter().enumerate() {
            if let Some(factors) = step.factors::<T>(step.batch.slots()[token], self.site.first_entry() + slice) {
                let v = &step.workspace.v[token * self.v_stride(step) + slice * step.max_rank..];
                let put = |out, delta| put(first + out, delta);
                factors.delta(v, step.batch.scale(token), site.out_features(), put);
            }
            first += site.out_features();
        }
    }

    fn v_stride(&self, step: &Step<'_>) -> usize {
        self.site.slices().len() * step.max_rank
    }
}
