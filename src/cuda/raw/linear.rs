use super::{
    abi::{dtype_code, int},
    matrix::{MatrixMut, MatrixRef},
    memory::Stream,
    step::Step,
};
use crate::{
    DType,
    cuda::{Kernels, kernels::check},
    error::LaunchError,
    ffi,
    model::{LinearId, LinearSite, MAX_SLICES, Model, ModelId},
    plan::{Capacity, LinearPlan, PlanError},
};

/// The adapters of one linear layer: shapes checked, launches planned, workspace sized.
#[derive(Clone, Debug)]
pub struct LoraLinear {
    kernels: Kernels,
    model: ModelId,
    site: LinearSite,
    plan: LinearPlan,
}

/// An operation of the C ABI.
pub(in crate::cuda) type Kernel = unsafe extern "C" fn(*const ffi::aril_linear_args, *mut std::ffi::c_void) -> i32;

impl LoraLinear {
    /// Plans the layer `id` of `model` for batches within `capacity`.
    ///
    /// # Errors
    /// If the id is of another model, or no kernel takes this shape or these bounds: there is no slow path to fall into.
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

    /// What will be launched; for logs.
    pub fn plan(&self) -> &LinearPlan {
        &self.plan
    }

    /// Enqueues `y[t] += scaling · B (A x[t])` on the step's stream, for every token `t` that has an adapter.
    ///
    /// `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`, the step's workspace has
    /// [`plan().workspace_bytes()`](LinearPlan::workspace_bytes). Allocates nothing, waits for nothing, and may be captured in a CUDA graph. Base tokens keep `y` bit for
    /// bit. With row-parallel layers `y` is this rank's partial sum: call this before the all-reduce.
    ///
    /// # Errors
    /// If the operands don't fit the plan; then nothing was enqueued.
    ///
    /// # Safety
    /// From this call until the work has run:
    /// - **Validity.** `x`, `y`, the step's table and workspace address device memory of the kernels' context for their whole extent, as
    ///   do the table's descriptors, and the step's batch is of a routing that was updated before. Its stream is of that context.
    /// - **Liveness.** That memory stays mapped.
    /// - **Workspace.** Its mailbox was zero before its first use, and nothing but these operations has written it since. Otherwise
    ///   the kernels may take old sums for new ones, or wait forever.
    /// - **Aliasing.** Nobody writes `x`, the table, its factors or the routing, or reads or writes `y` or the workspace, except work
    ///   ordered by the stream.
    /// - **Order.** A kernel that writes weights or the routing neither lets its dependents begin early (programmatic dependent
    ///   launch) nor ends before each thread that wrote has fenced (`__threadfence`): weights and routing are fetched before the
    ///   kernels enqueued earlier are waited for. Copies are always in order.
    /// - **Context.** (checked) the context current on this thread is that of the kernels.
    #[doc(alias = "sgmv")]
    #[doc(alias = "bgmv")]
    pub unsafe fn add_delta(&self, step: &Step, x: MatrixRef, y: MatrixMut) -> Result<(), LaunchError> {
        let args = self.args(step, Some(x), Some(y))?;
        // SAFETY: the caller's obligations.
        unsafe { self.launch(ffi::aril_linear, &args, step.stream) }
    }

    /// Enqueues `y[t] = scaling · B (A x[t])`, and zero for every token and slice that has no adapter: for a base GEMM that adds its
    /// product to what `y` holds (`beta = 1`). Nothing of `y` is read.
    ///
    /// Rows of a captured batch that the last update did not have are left alone.
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

    /// Enqueues the first half of [`add_delta`](Self::add_delta): `A x[t]` into the workspace. It needs nothing of `y`, so it may
    /// run beside the base GEMM.
    ///
    /// # Errors
    /// As for `add_delta`.
    ///
    /// # Safety
    /// As for `add_delta`; nobody else uses the workspace until [`expand`](Self::expand) has run.
    pub unsafe fn shrink(&self, step: &Step, x: MatrixRef) -> Result<(), LaunchError> {
        let args = self.args(step, Some(x), None)?;
        // SAFETY: the caller's obligations.
        unsafe { self.launch(ffi::aril_linear_shrink, &args, step.stream) }
    }

    /// Enqueues the second half of [`add_delta`](Self::add_delta): adds `scaling · B v` to `y`, from what
    /// [`shrink`](Self::shrink) of the same layer and step left in the workspace.
    ///
    /// # Errors
    /// As for `add_delta`.
    ///
    /// # Safety
    /// As for `add_delta`; `shrink` was ordered before it.
    pub unsafe fn expand(&self, step: &Step, y: MatrixMut) -> Result<(), LaunchError> {
        let args = self.args(step, None, Some(y))?;
        // SAFETY: the caller's obligations.
        unsafe { self.launch(ffi::aril_linear_expand, &args, step.stream) }
    }

    /// The arguments of both halves: the one for which an operand is not given leaves it alone.
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
        LaunchError::within("the batch's tokens", num_tokens, self.plan.capacity().max_tokens)?;
        let mut out_features = [0; MAX_SLICES];
        for (out, slice) in out_features.iter_mut().zip(self.site.slices()) {
            *out = int(slice.out_features())?;
        }
        Ok(ffi::aril_linear_args {
            dtype: dtype_code(dtype),
            num_tokens: int(num_tokens)?,
            max_tiles: int(batch.max_tiles)?,
            k_tiles_per_split: int(self.plan.lanes_per_split(num_tokens))?,
            outs_per_block: int(self.plan.outs_per_block(num_tokens, batch.max_tiles))?,
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
        kernel: Kernel,
        args: &ffi::aril_linear_args,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        self.kernels.check_thread()?;
        if args.num_tokens == 0 {
            return Ok(());
        }
        // SAFETY: the operands fit the plan, and the caller vouches for their memory.
        check(unsafe { kernel(args, stream.as_raw()) })
    }
}
