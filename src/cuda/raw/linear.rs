use super::{
    abi::{dtype_code, int},
    matrix::{MatrixMut, MatrixRef, RawMatrix},
    memory::Stream,
    routing::RoutedBatch,
    step::Step,
};
use crate::{
    DType, contract,
    cuda::{Kernels, kernels::Operation},
    error::LaunchError,
    ffi,
    model::{LinearId, MAX_SLICES, Model},
    plan::{Capacity, LinearPlan, PlanError},
};

/// The LoRA operations of one linear layer.
#[derive(Clone, Debug)]
pub struct LoraLinear {
    kernels: Kernels,
    contract: contract::Linear,
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
        Ok(Self { kernels: kernels.clone(), contract: contract::Linear::new(model, id, dtype, capacity)? })
    }

    /// The launch configuration.
    pub fn plan(&self) -> &LinearPlan {
        &self.contract.plan
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
        // SAFETY: the caller's obligations.
        unsafe { self.launch(ffi::aril_linear_shrink, &args, step.stream) }
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
        self.contract.check_silu_mul(step.shape(), y.shape("y")?, out.shape("out")?)?;
        let (layer, plan, (out, out_stride)) = (self.launch_args(step, None, Some(y))?, self.plan(), out.place());
        let (tokens, tiles) = (step.batch.num_tokens, self.max_tiles(&step.batch));
        let outs_per_block = int(plan.silu_mul_outs_per_block(tokens, tiles))?;
        let outs_per_block_of_few = if plan.is_large_m(tokens) {
            outs_per_block
        } else {
            int(plan.silu_mul_outs_per_block(tokens, plan.max_few_tiles(tokens, tiles)))?
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

    /// The most tiles of a batch, of the size that the layer works on.
    fn max_tiles(&self, batch: &RoutedBatch) -> usize {
        if self.plan().is_large_m(batch.num_tokens) { batch.max_wide_tiles } else { batch.max_small_tiles }
    }

    /// Checks the operands and returns the arguments of the C ABI. Shrink and expand ignore the operand that they lack.
    pub(in crate::cuda) fn args(
        &self,
        step: &Step,
        x: Option<MatrixRef>,
        y: Option<MatrixMut>,
    ) -> Result<ffi::aril_linear_args, LaunchError> {
        let (x, y) = (x.map(|MatrixRef(x)| x), y.map(|MatrixMut(y)| y));
        let shapes = (x.map(|x| x.shape("x")).transpose()?, y.map(|y| y.shape("y")).transpose()?);
        self.contract.check(step.shape(), shapes.0, shapes.1)?;
        self.launch_args(step, x, y)
    }

    /// The arguments of the C ABI, of operands that have been checked.
    fn launch_args(
        &self,
        step: &Step,
        x: Option<RawMatrix>,
        y: Option<RawMatrix>,
    ) -> Result<ffi::aril_linear_args, LaunchError> {
        let Step { table, batch, workspace, .. } = step;
        let contract::Linear { site, plan, .. } = &self.contract;
        let num_tokens = batch.num_tokens;
        let [(x, x_stride), (y, y_stride)] = [x, y].map(|m| m.map_or((std::ptr::null_mut(), 0), |m| m.place()));
        workspace.check(plan.workspace_bytes_for(num_tokens))?;
        let max_tiles = self.max_tiles(batch);
        let outs_per_block = plan.outs_per_block(num_tokens, max_tiles);
        let max_few_tiles = plan.max_few_tiles(num_tokens, max_tiles);
        let outs_per_block_of_few =
            if plan.is_large_m(num_tokens) { outs_per_block } else { plan.outs_per_block(num_tokens, max_few_tiles) };
        let mut out_features = [0; MAX_SLICES];
        for (out, slice) in out_features.iter_mut().zip(site.slices()) {
            *out = int(slice.out_features())?;
        }
        Ok(ffi::aril_linear_args {
            dtype: dtype_code(plan.dtype()),
            num_tokens: int(num_tokens)?,
            max_tiles: int(max_tiles)?,
            large_m: plan.is_large_m(num_tokens).into(),
            k_tiles_per_split: int(plan.k_tiles_per_split(num_tokens))?,
            splits_per_block: int(plan.splits_per_block(num_tokens, max_tiles))?,
            outs_per_block: int(outs_per_block)?,
            max_few_tiles: int(max_few_tiles)?,
            outs_per_block_of_few: int(outs_per_block_of_few)?,
            overwrites: 0,
            in_features: int(site.in_features())?,
            num_slices: int(site.slices().len())?,
            out_features,
            x,
            x_stride,
            y,
            y_stride,
            mailbox: workspace.mailbox.ptr as *mut std::ffi::c_void,
            mailbox_bytes: workspace.mailbox.bytes as u64,
            partials: workspace.partials.ptr as *mut f32,
            weights: table.at(site.first_entry())?,
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
