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
        self.check_shrink(step)?;
        y.rows_mut().enumerate().for_each(|(token, y)| {
            self.deltas::<T>(step, token, |out, delta| y[out] = T::from_f32(y[out].to_f32() + delta));
        });
        Ok(())
    }

    /// `out[t] = silu(gate) · up`, where gate and up are the slices of `y[t] + scaling · B v`, with `v` from the step's last
    /// [`shrink`](Self::shrink). For every token, with or without an adapter, in `f32` with one rounding. Replaces
    /// [`expand`](Self::expand) and the base's activation.
    ///
    /// The layer has two slices of equal size, gate and up. `y` is `[tokens, out_features]`, `out` is `[tokens, out_features / 2]`.
    /// A batch without adapters needs no `shrink`.
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
        out.rows_mut().enumerate().for_each(|(token, out)| {
            let mut sums: Vec<f32> = y.row(token).iter().map(|y| y.to_f32()).collect();
            self.deltas::<T>(step, token, |column, delta| sums[column] += delta);
            let (gate, up) = sums.split_at(features);
            for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
                *out = T::from_f32(activation::apply(Activation::Silu, Some(gate), up));
            }
        });
        Ok(())
    }

    /// `residual[t] += y[t] + scaling · B v`, then `out[t] = weight · residual[t] / √(mean(residual[t]²) + eps)`, with `v`
    /// from the step's last
    /// [`shrink`](Self::shrink). For every token, with or without an adapter.
    /// Replaces [`expand`](Self::expand), the base's residual addition and its RMSNorm.
    ///
    /// Formula and roundings are those of Qwen3 in Hugging Face's transformers (`Qwen3DecoderLayer`, `Qwen3RMSNorm`): the residual is
    /// summed in `f32` and rounded to the element type; the quotient is computed in `f32` from the rounded residual, and rounded
    /// before its product with the weight is.
    ///
    /// The layer has one slice. `y`, `residual` and `out` are `[tokens, out_features]`, `weight` is `[out_features]`. In a
    /// row-parallel layer an all-reduce stands between `y` and the residual, so only a model on one rank can use this.
    /// A batch without adapters needs no `shrink`.
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
