#![expect(unsafe_code, reason = "calls the raw API")]

use std::ffi::c_void;

use super::{LaunchError, Matrix, MatrixMut, Step, WeightTable, raw};
use crate::{Element, ffi, model::LinearId, plan::PlanError};

/// The LoRA operations of a [fully sharded](crate::model::Shard::fully_sharded) linear layer. Between them, the engine exchanges `v`
/// with the other ranks, as [`Exchange`](crate::model::Exchange) says. [`cpu::FullyShardedLinear`](crate::cpu::FullyShardedLinear) has
/// an example.
#[derive(Clone, Debug)]
#[doc(alias = "S-LoRA")]
pub struct FullyShardedLinear {
    raw: raw::FullyShardedLinear,
}

impl FullyShardedLinear {
    /// Plans the layer `id` of the table's model, for the table's element type and capacity.
    ///
    /// # Errors
    /// [`PlanError`] if the id belongs to another model, the layer has no [exchange](crate::model::LinearSite::exchange), or the kernels
    /// do not support a size or the capacity.
    pub fn new(weights: &WeightTable, id: LinearId) -> Result<Self, PlanError> {
        let kernels = weights.queue().kernels();
        let raw = raw::FullyShardedLinear::new(kernels, weights.model(), id, weights.dtype(), weights.capacity())?;
        Ok(Self { raw })
    }

    /// Enqueues this rank's part of `v = A x[t]` for every token `t`: its rows of `v`, or its partial sum. Elements beyond the rank of the
    /// token's adapter are zero.
    ///
    /// `x` is `[tokens, in_features]`, `v` is [`Exchange::sent`](crate::model::Exchange::sent) with the table's `max_rank`. In a captured
    /// step, rows beyond the batch of the last update are unchanged. Neither allocates nor waits.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer and the step. Nothing was enqueued.
    pub fn shrink<T: Element>(
        &self,
        step: &Step<'_>,
        x: Matrix<'_, T>,
        mut v: MatrixMut<'_, f32>,
    ) -> Result<(), LaunchError> {
        let mut args = self.raw.shrink_args(&step.raw(), x.shape(), v.shape())?;
        x.check(step)?;
        v.check_as("v", step)?;
        let _entered = step.enter()?;
        step.keep([x.kept(), v.kept()]);
        let queue = step.queue();
        let ((x, _x_guard), (v, _v_guard)) = (x.on(queue), v.on(queue));
        (args.x, args.v) = (x as *const c_void, v as *mut f32);
        // SAFETY: every operand is large enough and in the queue's context (checked). The step's table and routing, and buffers, belong
        // to the queue; guards order the other operands. Graphs keep their operands alive.
        unsafe { self.raw.launch(ffi::aril_sharded_shrink, &args, &step.raw()) }
    }

    /// Enqueues `y[t] += scaling · B v`, for every token `t` whose slot has an adapter of this layer, in the columns of this rank's rows
    /// of B. All other elements of `y` keep every bit.
    ///
    /// `v` is [`Exchange::received`](crate::model::Exchange::received) with the table's `max_rank`, the result of the exchange. `y` is
    /// `[tokens, out_features]`. Neither allocates nor waits.
    ///
    /// # Errors
    /// As for [`shrink`](Self::shrink).
    pub fn expand<T: Element>(
        &self,
        step: &Step<'_>,
        v: Matrix<'_, f32>,
        mut y: MatrixMut<'_, T>,
    ) -> Result<(), LaunchError> {
        let mut args = self.raw.expand_args(&step.raw(), v.shape(), y.shape())?;
        v.check_as("v", step)?;
        y.check(step)?;
        let _entered = step.enter()?;
        step.keep([v.kept(), y.kept()]);
        let queue = step.queue();
        let ((v, _v_guard), (y, _y_guard)) = (v.on(queue), y.on(queue));
        (args.v, args.y) = (v as *mut f32, y as *mut c_void);
        // SAFETY: as in `shrink`. Expand does not write `v`.
        unsafe { self.raw.launch(ffi::aril_sharded_expand, &args, &step.raw()) }
    }
}
