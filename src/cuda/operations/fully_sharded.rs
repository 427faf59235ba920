//! The halves of a fully sharded linear layer.

#![expect(unsafe_code, reason = "launches kernels")]

use std::ffi::c_void;

use crate::{
    DType, Element, IntoSlices, Slices, contract,
    cuda::{
        Kernels, LaunchError, Matrix, MatrixMut, Step, WeightTable,
        kernels::Operation,
        raw::{self, NO_OUTPUTS, RawMatrix, dtype_code, int},
        steps::{Checked, join},
    },
    ffi,
    model::{Collective, LinearId, MAX_SLICES, Model},
    plan::{Capacity, PlanError, sharded_launch},
};

/// The LoRA operations of a [fully sharded](crate::model::Shard::fully_sharded) linear layer. Between them, the engine
/// exchanges `v` with the other ranks, as [`Exchange`](crate::model::Exchange) says.
/// [`cpu::FullyShardedLinear`](crate::cpu::FullyShardedLinear) has an example.
#[derive(Clone, Debug)]
#[doc(alias = "S-LoRA")]
pub struct FullyShardedLinear {
    kernels: Kernels,
    contract: contract::FullyShardedLinear,
}

impl FullyShardedLinear {
    /// Plans the layer `id` of the table's model, for the table's element type and capacity.
    ///
    /// # Errors
    /// As for [`for_model`](Self::for_model).
    pub fn new(weights: &WeightTable, id: LinearId) -> Result<Self, PlanError> {
        Self::for_model(weights.queue().kernels(), weights.model(), id, weights.dtype(), weights.capacity())
    }

    /// Plans the layer `id` of `model`, for tables of this element type and batches within `capacity`.
    ///
    /// # Errors
    /// [`PlanError`] if the id belongs to another model, the layer has no
    /// [exchange](crate::model::LinearSite::exchange), or the kernels do not support a size or the capacity.
    pub fn for_model(
        kernels: &Kernels,
        model: &Model,
        id: LinearId,
        dtype: DType,
        capacity: Capacity,
    ) -> Result<Self, PlanError> {
        let contract = contract::FullyShardedLinear::new(model, id, dtype, capacity)?;
        Ok(Self { kernels: kernels.clone(), contract })
    }

    /// Enqueues this rank's part of `v = A x[t]` for every token `t`: its rows of `v`, or its partial sum. Elements
    /// beyond the rank of the token's adapter are zero.
    ///
    /// `x` is `[tokens, in_features]`, `v` is [`Exchange::sent`](crate::model::Exchange::sent) with the table's
    /// `max_rank`. In a captured step, rows beyond the batch of the last update are unchanged. Neither allocates nor
    /// waits.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer and the step. Nothing was enqueued.
    pub fn shrink<T: Element>(
        &self,
        step: &Step<'_>,
        mut x: Matrix<'_, T>,
        mut v: MatrixMut<'_, f32>,
    ) -> Result<(), LaunchError> {
        let mut args = self.shrink_args(&step.raw(), x.shape(), v.shape())?;
        step.check([x.operand(), v.operand_as("v")])?.enqueue(|[x, v], stream| {
            (args.x, args.v) = (x as *const c_void, v as *mut f32);
            // SAFETY: the operands fit the layer (checked), and are as `Checked::enqueue` says.
            unsafe { self.launch(ffi::aril_sharded_shrink, &args, stream) }
        })
    }

    /// [`shrink`](Self::shrink) on memory that the engine owns. May be captured in a CUDA graph.
    ///
    /// # Errors
    /// As for `shrink`.
    ///
    /// # Safety
    /// From this call until the work has run:
    /// - **Validity.** `x`, `v`, the table and the factors that it points to are device memory of the kernels' context,
    ///   in their whole extent. The batch's routing has been updated. The stream belongs to that context.
    /// - **Liveness.** That memory stays mapped.
    /// - **Aliasing.** Only work ordered by the stream writes `x`, the table, its factors or the routing, or accesses
    ///   `v`.
    /// - **Order.** As for [`LoraLinear::add_delta_raw`](super::LoraLinear::add_delta_raw).
    /// - **Context.** The kernels' context is current on this thread. (This is checked.)
    pub unsafe fn shrink_raw(&self, step: &raw::Step, x: raw::MatrixRef, v: raw::MatrixMut) -> Result<(), LaunchError> {
        let args = self.shrink_args(step, x, v)?;
        // SAFETY: the caller's obligations.
        unsafe { self.launch(ffi::aril_sharded_shrink, &args, step.stream) }
    }

    /// Enqueues `y[t] += scaling · B v`, for every token `t` whose slot has an adapter of this layer, in the columns of
    /// this rank's rows of B. All other elements of `y` keep every bit.
    ///
    /// `v` is [`Exchange::received`](crate::model::Exchange::received) with the table's `max_rank`, the result of the
    /// exchange. `y` is `[tokens, out_features]`, or a matrix of each slice ([`Slices`]). Neither allocates nor waits.
    ///
    /// # Errors
    /// As for [`shrink`](Self::shrink).
    pub fn expand<'a, T: Element>(
        &self,
        step: &Step<'_>,
        mut v: Matrix<'_, f32>,
        y: impl IntoSlices<MatrixMut<'a, T>>,
    ) -> Result<(), LaunchError> {
        let mut y = y.into_slices();
        let shapes = y.shapes();
        let mut args = self.expand_args(&step.raw(), v.shape(), &shapes)?;
        let operands: Checked<'_, '_, { 1 + MAX_SLICES }> = step.check(join([v.operand_as("v")], y.operands()))?;
        operands.enqueue(|[v, y @ ..], stream| {
            args.v = v as *mut f32;
            args.y = shapes.places_at(y, self.contract.site.slices());
            // SAFETY: as in `shrink`. Expand does not write `v`.
            unsafe { self.launch(ffi::aril_sharded_expand, &args, stream) }
        })
    }

    /// [`expand`](Self::expand) on memory that the engine owns. May be captured in a CUDA graph.
    ///
    /// # Errors
    /// As for `shrink`.
    ///
    /// # Safety
    /// As for [`shrink_raw`](Self::shrink_raw), with `v` in place of `x`, and `y` in place of `v`.
    pub unsafe fn expand_raw(
        &self,
        step: &raw::Step,
        v: raw::MatrixRef,
        y: impl IntoSlices<raw::MatrixMut>,
    ) -> Result<(), LaunchError> {
        let args = self.expand_args(step, v, &y.into_slices().into())?;
        // SAFETY: the caller's obligations.
        unsafe { self.launch(ffi::aril_sharded_expand, &args, step.stream) }
    }

    /// Checks the operands of [`shrink`](Self::shrink), and returns the arguments of the C ABI.
    fn shrink_args(
        &self,
        step: &raw::Step,
        raw::MatrixRef(x): raw::MatrixRef,
        raw::MatrixMut(v): raw::MatrixMut,
    ) -> Result<ffi::aril_sharded_args, LaunchError> {
        self.contract.check_shrink(step.shape(), x.shape("x")?, v.shape("v")?)?;
        let ((x, x_stride), (v, v_stride)) = (x.place(), v.place());
        Ok(ffi::aril_sharded_args { x, x_stride, v: v.cast(), v_stride, ..self.args(step)? })
    }

    /// Checks the operands of [`expand`](Self::expand), and returns the arguments of the C ABI.
    fn expand_args(
        &self,
        step: &raw::Step,
        raw::MatrixRef(v): raw::MatrixRef,
        y: &Slices<RawMatrix>,
    ) -> Result<ffi::aril_sharded_args, LaunchError> {
        self.contract.check_expand(step.shape(), v.shape("v")?, &y.shapes()?)?;
        let ((v, v_stride), y) = (v.place(), y.places(self.contract.site.slices()));
        Ok(ffi::aril_sharded_args { v: v.cast(), v_stride, y, ..self.args(step)? })
    }

    /// The arguments without operands.
    fn args(&self, step: &raw::Step) -> Result<ffi::aril_sharded_args, LaunchError> {
        let raw::Step { table, batch, .. } = step;
        let contract::FullyShardedLinear { site, exchange, dtype, .. } = &self.contract;
        let mut num_outs = [0; MAX_SLICES];
        for (outs, slice) in num_outs.iter_mut().zip(site.slices()) {
            *outs = int(slice.delta_range().len())?;
        }
        let tp = exchange.tp();
        let (tp_size, tp_rank) = match exchange.collective() {
            Collective::AllGather => (tp.size(), tp.rank()),
            Collective::AllReduce => (1, 0),
        };
        let width = exchange.width(table.max_rank());
        Ok(ffi::aril_sharded_args {
            dtype: dtype_code(*dtype),
            num_tokens: int(batch.num_tokens)?,
            plan: sharded_launch(site.slices().iter().map(|slice| slice.delta_range().len()), width, step.bounds()),
            tp_size: int(tp_size)?,
            tp_rank: int(tp_rank)?,
            width: int(width)?,
            in_features: int(site.in_features())?,
            num_slices: int(site.slices().len())?,
            num_outs,
            x: std::ptr::null(),
            x_stride: 0,
            v: std::ptr::null_mut(),
            v_stride: 0,
            y: NO_OUTPUTS,
            weights: table.at(site.first_entry())?,
            routing: batch.routing,
        })
    }

    unsafe fn launch(
        &self,
        operation: Operation<ffi::aril_sharded_args>,
        args: &ffi::aril_sharded_args,
        stream: raw::Stream,
    ) -> Result<(), LaunchError> {
        // SAFETY: the operands fit the layer, and the caller vouches for their memory.
        unsafe { self.kernels.launch(operation, args, args.num_tokens, stream.as_raw()) }
    }
}
