#![expect(unsafe_code, reason = "calls the raw API")]

use std::ffi::c_void;

use super::{
    LaunchError, Matrix, MatrixMut, Step, View, WeightTable,
    raw::{self, Kernel},
};
use crate::{
    Element, ffi,
    model::LinearId,
    plan::{LinearPlan, PlanError},
};

/// The LoRA operations of one linear layer, planned for a table.
#[derive(Clone, Debug)]
pub struct LoraLinear {
    raw: raw::LoraLinear,
}

impl LoraLinear {
    /// Plans the layer `id` of the table's model, for the table's element type and capacity.
    ///
    /// # Errors
    /// [`PlanError`] if the id belongs to another model, or the kernels do not support a size or the capacity. There is no slow
    /// fallback.
    pub fn new(weights: &WeightTable, id: LinearId) -> Result<Self, PlanError> {
        let kernels = weights.queue().kernels();
        let raw = raw::LoraLinear::new(kernels, weights.model(), id, weights.dtype(), weights.capacity())?;
        Ok(Self { raw })
    }

    /// The launch configuration. It also gives the size of the workspace.
    pub fn plan(&self) -> &LinearPlan {
        self.raw.plan()
    }

    /// Enqueues `y[t] += scaling · B (A x[t])`, for every token `t` whose slot has an adapter of this layer. All other rows of `y`
    /// keep every bit.
    ///
    /// `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`. In a row-parallel layer, `y` is this rank's partial sum:
    /// call this before the all-reduce. Neither allocates nor waits.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer and the step. Nothing was enqueued.
    #[doc(alias = "sgmv")]
    #[doc(alias = "bgmv")]
    #[doc(alias = "punica")]
    pub fn add_delta<T: Element>(
        &self,
        step: &mut Step<'_>,
        x: Matrix<'_, T>,
        y: MatrixMut<'_, T>,
    ) -> Result<(), LaunchError> {
        self.enqueue(ffi::aril_linear, false, step, Some(x), Some(y))
    }

    /// Enqueues `y[t] = scaling · B (A x[t])`, or zero for tokens and slices without an adapter. For a base GEMM that accumulates
    /// into `y` (`beta = 1`). Does not read `y`.
    ///
    /// In a captured step, rows beyond the batch of the last update are unchanged.
    ///
    /// # Errors
    /// As for [`add_delta`](Self::add_delta).
    pub fn write_delta<T: Element>(
        &self,
        step: &mut Step<'_>,
        x: Matrix<'_, T>,
        y: MatrixMut<'_, T>,
    ) -> Result<(), LaunchError> {
        self.enqueue(ffi::aril_linear, true, step, Some(x), Some(y))
    }

    /// Enqueues the first half of [`add_delta`](Self::add_delta): computes `A x[t]` into the workspace. Does not need `y`.
    ///
    /// # Errors
    /// As for `add_delta`.
    pub fn shrink<T: Element>(&self, step: &mut Step<'_>, x: Matrix<'_, T>) -> Result<(), LaunchError> {
        self.enqueue(ffi::aril_linear_shrink, false, step, Some(x), None)
    }

    /// Enqueues the second half of [`add_delta`](Self::add_delta): `y[t] += scaling · B v`, with `v` from the last
    /// [`shrink`](Self::shrink) of this layer in the step. Without a shrink, the result is unspecified.
    ///
    /// # Errors
    /// As for `add_delta`.
    pub fn expand<T: Element>(&self, step: &mut Step<'_>, y: MatrixMut<'_, T>) -> Result<(), LaunchError> {
        self.enqueue(ffi::aril_linear_expand, false, step, None, Some(y))
    }

    /// Enqueues `out[t] = silu(gate) · up`, where gate and up are the slices of `y[t] + scaling · B v`, with `v` from the last
    /// [`shrink`](Self::shrink) of this layer in the step. For every token, with or without an adapter, in `f32` with one rounding.
    /// Replaces [`expand`](Self::expand) and the base's activation, and saves a pass over `y`.
    ///
    /// The layer has two slices of equal size, gate and up. `y` is `[tokens, out_features]`, `out` is `[tokens, out_features / 2]`.
    /// In a captured step, rows beyond the batch of the last update are unchanged. A batch without adapters needs no `shrink`;
    /// otherwise, without one, the result is unspecified.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer and the step, or the slices are not gate and up. Nothing was
    /// enqueued.
    #[doc(alias = "silu_and_mul")]
    pub fn silu_mul<T: Element>(
        &self,
        step: &mut Step<'_>,
        y: Matrix<'_, T>,
        mut out: MatrixMut<'_, T>,
    ) -> Result<(), LaunchError> {
        let mut args = self.raw.silu_mul_args(&step.raw(), y.shape(), out.shape())?;
        y.check_as("y", step)?;
        out.check_as("out", step)?;
        step.enter()?;
        step.keep([y.kept(), out.kept()]);
        let queue = step.queue();
        let ((y, _y_guard), (out, _out_guard)) = (y.on(queue), out.on(queue));
        (args.layer.y, args.out) = (y as *mut c_void, out as *mut c_void);
        // SAFETY: as in `enqueue`.
        unsafe { self.raw.launch_silu_mul(&args, queue.raw()) }
    }

    /// Enqueues `residual[t] += y[t] + scaling · B v`, then `out[t] = weight · residual[t] / √(mean(residual[t]²) + eps)`, with `v`
    /// from the last
    /// [`shrink`](Self::shrink) of this layer in the step. For every token, with or without an adapter.
    /// Replaces [`expand`](Self::expand), the base's residual addition and its RMSNorm, and saves a pass over `y`.
    ///
    /// Formula and roundings are those of Qwen3 in Hugging Face's transformers (`Qwen3DecoderLayer`, `Qwen3RMSNorm`): the residual is
    /// summed in `f32` and rounded to the element type; the quotient is computed in `f32` from the rounded residual, and rounded
    /// before its product with the weight is.
    ///
    /// The layer has one slice. `y`, `residual` and `out` are `[tokens, out_features]`, `weight` is `[out_features]`. In a
    /// row-parallel layer an all-reduce stands between `y` and the residual, so only a model on one rank can use this.
    /// In a captured step, rows beyond the batch of the last update are unchanged. A batch without adapters needs no `shrink`;
    /// otherwise, without one, the result is unspecified.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer and the step, or the layer has several slices. Nothing was enqueued.
    #[doc(alias = "fused_add_rms_norm")]
    pub fn add_rms_norm<'a, T: Element>(
        &self,
        step: &mut Step<'_>,
        y: Matrix<'_, T>,
        mut residual: MatrixMut<'_, T>,
        weight: impl Into<View<'a, T>>,
        eps: f32,
        mut out: MatrixMut<'_, T>,
    ) -> Result<(), LaunchError> {
        let weight = weight.into();
        let shapes = (y.shape(), residual.shape(), out.shape());
        let mut args = self.raw.add_rms_norm_args(&step.raw(), shapes.0, shapes.1, weight.len(), eps, shapes.2)?;
        y.check_as("y", step)?;
        residual.check_as("residual", step)?;
        weight.check("weight", step)?;
        out.check_as("out", step)?;
        step.enter()?;
        step.keep([y.kept(), residual.kept(), weight.kept(), out.kept()]);
        let queue = step.queue();
        let ((y, _y_guard), (weight, _weight_guard)) = (y.on(queue), weight.on(queue));
        let ((residual, _residual_guard), (out, _out_guard)) = (residual.on(queue), out.on(queue));
        (args.layer.y, args.weight) = (y as *mut c_void, weight as *const c_void);
        (args.residual, args.out) = (residual as *mut c_void, out as *mut c_void);
        // SAFETY: as in `enqueue`.
        unsafe { self.raw.launch_add_rms_norm(&args, queue.raw()) }
    }

    fn enqueue<T: Element>(
        &self,
        kernel: Kernel,
        overwrites: bool,
        step: &mut Step<'_>,
        x: Option<Matrix<'_, T>>,
        mut y: Option<MatrixMut<'_, T>>,
    ) -> Result<(), LaunchError> {
        let shapes = (x.as_ref().map(Matrix::shape), y.as_ref().map(MatrixMut::shape));
        let mut args = self.raw.args(&step.raw(), shapes.0, shapes.1)?;
        x.as_ref().map_or(Ok(()), |x| x.check(step))?;
        y.as_ref().map_or(Ok(()), |y| y.check(step))?;
        step.enter()?;
        step.keep([x.as_ref().and_then(Matrix::kept), y.as_ref().and_then(MatrixMut::kept)]);
        let queue = step.queue();
        let (x, _x_guard) = x.as_ref().map(|x| x.on(queue)).unzip();
        let (y, _y_guard) = y.as_mut().map(|y| y.on(queue)).unzip();
        args.x = x.unwrap_or(0) as *const c_void;
        args.y = y.unwrap_or(0) as *mut c_void;
        args.overwrites = overwrites.into();
        // SAFETY: every operand is large enough and in the queue's context (checked). The step's table, routing and workspace, and
        // buffers, belong to the queue; guards order the other operands. Graphs keep their operands alive.
        unsafe { self.raw.launch(kernel, &args, queue.raw()) }
    }
}
