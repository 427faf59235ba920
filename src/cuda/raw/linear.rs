use super::{
    abi::{dtype_code, int},
    matrix::{MatrixMut, MatrixRef},
    memory::Stream,
    routing::RoutedBatch,
    step::Step,
};
use crate::{
    DType,
    cuda::{Kernels, kernels::Operation},
    error::{LaunchError, OperandError},
    ffi,
    model::{LinearId, LinearSite, MAX_SLICES, Model, ModelId},
    plan::{Capacity, LinearPlan, PlanError},
};

/// The most tiles of a norm's launch, whose grid has up to 32 blocks per tile.
const MAX_NORM_TILES: usize = i32::MAX as usize / 32;

/// The LoRA operations of one linear layer.
#[derive(Clone, Debug)]
pub struct LoraLinear {
    kernels: Kernels,
    model: ModelId,
    site: LinearSite,
    plan: LinearPlan,
}

impl LoraLinear {
    /// Plans the layer `id` of `model` for batches within `capacity`.
    ///
    /// # Errors
    /// [`PlanError`] if the id belongs to another model, or the kernels do not support a size or the capacity. There is no slow
    /// fallback.
    pub fn new(
        kernels: &Kernels,
        model: &Model,
        id: LinearId,
        dtype: DType,
        capacity: Capacity,
    ) -> Result<Self, PlanError> {
        let site = model.linear(id).ok_or(PlanError::Foreign)?.clone();
        let plan = LinearPlan::new(&site, dtype, capacity)?;
        Ok(Self { kernels: kernels.clone(), model: model.id(), site, plan })
    }

    /// The launch configuration.
    pub fn plan(&self) -> &LinearPlan {
        &self.plan
    }

    #[doc = include_str!("../../docs/operations/linear_add_delta.md")]
    ///
    /// The step's workspace has at least [`plan().workspace_bytes()`](LinearPlan::workspace_bytes). Enqueues the work, and neither
    /// allocates nor waits. May be captured in a CUDA graph.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer and the step. Nothing was enqueued.
    ///
    /// # Safety
    /// From this call until the work has run:
    /// - **Validity.** `x`, `y`, the workspace, the table and the factors that it points to are device memory of the kernels'
    ///   context, in their whole extent. The batch's routing has been updated. The stream belongs to that context.
    /// - **Liveness.** That memory stays mapped.
    /// - **Workspace.** `mailbox` was zero before its first use, and only these operations have written it since. Otherwise
    ///   kernels may use stale sums or wait forever.
    /// - **Aliasing.** Only work ordered by the stream writes `x`, the table, its factors or the routing, or accesses `y` or the
    ///   workspace.
    /// - **Order.** Kernels read weights and routing before they wait for their predecessors. A kernel that writes either must not
    ///   trigger programmatic dependent launch early, and each writing thread must call `__threadfence` before the kernel ends.
    ///   Copies need nothing.
    /// - **Context.** The kernels' context is current on this thread. (This is checked.)
    #[doc(alias = "sgmv")]
    #[doc(alias = "bgmv")]
    pub unsafe fn add_delta(&self, step: &Step, x: MatrixRef, y: MatrixMut) -> Result<(), LaunchError> {
        let args = self.args(step, Some(x), Some(y))?;
        // SAFETY: the caller's obligations.
        unsafe { self.launch(ffi::aril_linear, &args, step.stream) }
    }

    #[doc = include_str!("../../docs/operations/linear_write_delta.md")]
    ///
    /// With a captured batch, rows beyond the last update are unchanged.
    ///
    /// # Errors
    /// As for [`add_delta`](Self::add_delta).
    ///
    /// # Safety
    /// As for `add_delta`.
    pub unsafe fn write_delta(&self, step: &Step, x: MatrixRef, y: MatrixMut) -> Result<(), LaunchError> {
        let args = self.args(step, Some(x), Some(y))?;
        let args = ffi::aril_linear_args { overwrites: 1, ..args };
        // SAFETY: the caller's obligations.
        unsafe { self.launch(ffi::aril_linear, &args, step.stream) }
    }

    /// Enqueues the first half of [`add_delta`](Self::add_delta): computes `A x[t]` into the workspace. Does not need `y`, so it
    /// may overlap the base GEMM.
    ///
    /// # Errors
    /// As for `add_delta`.
    ///
    /// # Safety
    /// As for `add_delta`. Nothing else uses the workspace until [`expand`](Self::expand) has run.
    pub unsafe fn shrink(&self, step: &Step, x: MatrixRef) -> Result<(), LaunchError> {
        let args = self.args(step, Some(x), None)?;
        let shrink = if step.is_beside { ffi::aril_linear_shrink_beside } else { ffi::aril_linear_shrink };
        // SAFETY: the caller's obligations.
        unsafe { self.launch(shrink, &args, step.stream) }
    }

    /// Enqueues the second half of [`add_delta`](Self::add_delta): `y[t] += scaling · B v`, with `v` from [`shrink`](Self::shrink)
    /// of the same layer and step.
    ///
    /// # Errors
    /// As for `add_delta`.
    ///
    /// # Safety
    /// As for `add_delta`. The `shrink` is ordered before it.
    pub unsafe fn expand(&self, step: &Step, y: MatrixMut) -> Result<(), LaunchError> {
        let args = self.args(step, None, Some(y))?;
        // SAFETY: the caller's obligations.
        unsafe { self.launch(ffi::aril_linear_expand, &args, step.stream) }
    }

    #[doc = include_str!("../../docs/operations/linear_silu_mul.md")]
    ///
    /// Rows of tokens beyond the last update are unchanged.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer and the step, or the slices are not gate and up. Nothing was
    /// enqueued.
    ///
    /// # Safety
    /// As for `expand`, with `out` in the place of `y`, and `y` as an input like `x`. A batch without adapters needs no `shrink`.
    #[doc(alias = "silu_and_mul")]
    pub unsafe fn silu_mul(&self, step: &Step, y: MatrixRef, out: MatrixMut) -> Result<(), LaunchError> {
        let args = self.silu_mul_args(step, y, out)?;
        // SAFETY: the caller's obligations.
        unsafe { self.launch_silu_mul(&args, step.stream) }
    }

    /// Checks the operands of `silu_mul` and returns the arguments of the C ABI.
    pub(in crate::cuda) fn silu_mul_args(
        &self,
        step: &Step,
        MatrixRef(y): MatrixRef,
        MatrixMut(out): MatrixMut,
    ) -> Result<ffi::aril_silu_mul_args, LaunchError> {
        let features = OperandError::gate_up(&self.site)?;
        let batch = &step.batch;
        let layer = self.args(step, None, Some(MatrixMut(y)))?;
        let (out, out_stride) = out.expect("out", self.plan.dtype(), batch.num_tokens, features)?;
        let (tokens, tiles) = (batch.num_tokens, self.max_tiles(batch));
        let outs_per_block = int(self.plan.silu_mul_outs_per_block(tokens, tiles))?;
        let outs_per_block_of_few = if self.plan.is_large_m(tokens) {
            outs_per_block
        } else {
            int(self.plan.silu_mul_outs_per_block(tokens, self.plan.max_few_tiles(tokens, tiles)))?
        };
        let layer = ffi::aril_linear_args { outs_per_block, outs_per_block_of_few, ..layer };
        Ok(ffi::aril_silu_mul_args { layer, out, out_stride })
    }

    pub(in crate::cuda) unsafe fn launch_silu_mul(
        &self,
        args: &ffi::aril_silu_mul_args,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        // SAFETY: the operands fit the plan, and the caller vouches for their memory.
        unsafe { self.kernels.launch(ffi::aril_silu_mul, args, args.layer.num_tokens, stream.as_raw()) }
    }

    #[doc = include_str!("../../docs/operations/linear_add_rms_norm.md")]
    ///
    /// Rows of tokens beyond the last update are unchanged.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer and the step, or the layer has several slices. Nothing was enqueued.
    ///
    /// # Safety
    /// As for `expand`, with `residual` and `out` in the place of `y`, and `y` and `weight` as inputs like `x`. `weight` is the
    /// address of `out_features` elements. A batch without adapters needs no `shrink`.
    #[doc(alias = "fused_add_rms_norm")]
    pub unsafe fn add_rms_norm(
        &self,
        step: &Step,
        y: MatrixRef,
        residual: MatrixMut,
        weight: u64,
        eps: f32,
        out: MatrixMut,
    ) -> Result<(), LaunchError> {
        let args = self.add_rms_norm_args(step, y, residual, self.site.out_features(), eps, out)?;
        let args = ffi::aril_add_rms_norm_args { weight: weight as *const std::ffi::c_void, ..args };
        // SAFETY: the caller's obligations.
        unsafe { self.launch_add_rms_norm(&args, step.stream) }
    }

    /// Checks the operands of `add_rms_norm` and returns the arguments of the C ABI, without the weight's address.
    pub(in crate::cuda) fn add_rms_norm_args(
        &self,
        step: &Step,
        MatrixRef(y): MatrixRef,
        MatrixMut(residual): MatrixMut,
        weight_len: usize,
        eps: f32,
        MatrixMut(out): MatrixMut,
    ) -> Result<ffi::aril_add_rms_norm_args, LaunchError> {
        let features = OperandError::norm(&self.site, weight_len)?;
        let (dtype, num_tokens) = (self.plan.dtype(), step.batch.num_tokens);
        let layer = self.args(step, None, Some(MatrixMut(y)))?;
        let (residual, residual_stride) = residual.expect("residual", dtype, num_tokens, features)?;
        let (out, out_stride) = out.expect("out", dtype, num_tokens, features)?;
        OperandError::within("the batch's tiles", self.max_tiles(&step.batch), MAX_NORM_TILES)?;
        let weight = std::ptr::null();
        Ok(ffi::aril_add_rms_norm_args { layer, weight, eps, residual, residual_stride, out, out_stride })
    }

    pub(in crate::cuda) unsafe fn launch_add_rms_norm(
        &self,
        args: &ffi::aril_add_rms_norm_args,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        // SAFETY: the operands fit the plan, and the caller vouches for their memory.
        unsafe { self.kernels.launch(ffi::aril_add_rms_norm, args, args.layer.num_tokens, stream.as_raw()) }
    }

    /// The most tiles of a batch, of the size that the layer works on.
    fn max_tiles(&self, batch: &RoutedBatch) -> usize {
        if self.plan.is_large_m(batch.num_tokens) { batch.max_wide_tiles } else { batch.max_small_tiles }
    }

    /// Checks the operands and returns the arguments of the C ABI. Shrink and expand ignore the operand that they lack.
    pub(in crate::cuda) fn args(
        &self,
        step: &Step,
        x: Option<MatrixRef>,
        y: Option<MatrixMut>,
    ) -> Result<ffi::aril_linear_args, LaunchError> {
        let Step { table, batch, workspace, .. } = step;
        let (dtype, num_tokens) = (self.plan.dtype(), batch.num_tokens);
        let null = (std::ptr::null_mut(), 0);
        let (x, x_stride) = match x {
            Some(MatrixRef(x)) => x.expect("x", dtype, num_tokens, self.site.in_features())?,
            None => null,
        };
        let (y, y_stride) = match y {
            Some(MatrixMut(y)) => y.expect("y", dtype, num_tokens, self.site.out_features())?,
            None => null,
        };
        workspace.check(self.plan.workspace_bytes_for(num_tokens))?;
        OperandError::within("the batch's tokens", num_tokens, self.plan.capacity().max_tokens)?;
        let max_tiles = self.max_tiles(batch);
        let outs_per_block = self.plan.outs_per_block(num_tokens, max_tiles);
        let max_few_tiles = self.plan.max_few_tiles(num_tokens, max_tiles);
        let outs_per_block_of_few = if self.plan.is_large_m(num_tokens) {
            outs_per_block
        } else {
            self.plan.outs_per_block(num_tokens, max_few_tiles)
        };
        let mut out_features = [0; MAX_SLICES];
        for (out, slice) in out_features.iter_mut().zip(self.site.slices()) {
            *out = int(slice.out_features())?;
        }
        Ok(ffi::aril_linear_args {
            dtype: dtype_code(dtype),
            num_tokens: int(num_tokens)?,
            max_tiles: int(max_tiles)?,
            large_m: self.plan.is_large_m(num_tokens).into(),
            k_tiles_per_split: int(self.plan.k_tiles_per_split(num_tokens))?,
            splits_per_block: int(self.plan.splits_per_block(num_tokens, max_tiles))?,
            outs_per_block: int(outs_per_block)?,
            max_few_tiles: int(max_few_tiles)?,
            outs_per_block_of_few: int(outs_per_block_of_few)?,
            overwrites: 0,
            in_features: int(self.site.in_features())?,
            num_slices: int(self.site.slices().len())?,
            out_features,
            x,
            x_stride,
            y,
            y_stride,
            mailbox: workspace.mailbox.ptr as *mut std::ffi::c_void,
            mailbox_bytes: workspace.mailbox.bytes as u64,
            partials: workspace.partials.ptr as *mut f32,
            weights: table.expect(self.model, dtype, &self.plan.capacity(), self.site.first_entry())?,
            routing: batch.routing,
        })
    }

    pub(in crate::cuda) unsafe fn launch(
        &self,
        operation: Operation<ffi::aril_linear_args>,
        args: &ffi::aril_linear_args,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        // SAFETY: the operands fit the plan, and the caller vouches for their memory.
        unsafe { self.kernels.launch(operation, args, args.num_tokens, stream.as_raw()) }
    }
}
