use super::{LayerWeights, MatrixMut, MatrixRef, RoutedBatch, Stream, Workspace, dtype_code, int};
use crate::{
    DType,
    cuda::{Kernels, LaunchError, kernels::check},
    ffi,
    model::{LinearId, LinearSite, MAX_SLICES, ModelSpec},
    plan::{Capacity, LinearPlan},
};

/// The adapters of one linear layer: shapes checked, launches planned, workspace sized.
#[derive(Clone, Debug)]
pub struct LoraLinear {
    kernels: Kernels,
    site: LinearSite,
    num_entries: usize,
    plan: LinearPlan,
}

impl LoraLinear {
    /// Plans the layer `id` of `model` for batches within `capacity`.
    ///
    /// # Errors
    /// If no kernel takes this shape or these bounds: there is no slow path to fall into.
    pub fn new(
        kernels: &Kernels,
        model: &ModelSpec,
        id: LinearId,
        dtype: DType,
        capacity: Capacity,
    ) -> Result<Self, LaunchError> {
        let site = model[id].clone();
        let plan = LinearPlan::new(&site, dtype, capacity)?;
        Ok(Self { kernels: kernels.clone(), site, num_entries: model.num_entries(), plan })
    }

    /// What will be launched; for logs.
    pub fn plan(&self) -> &LinearPlan {
        &self.plan
    }

    /// The layer as described.
    pub(in crate::cuda) fn site(&self) -> &LinearSite {
        &self.site
    }

    /// Enqueues `y[t] += scaling · B (A x[t])` on `stream`, for every token `t` that has an adapter.
    ///
    /// `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`, `workspace` has
    /// [`plan().workspace_bytes()`](LinearPlan::workspace_bytes). Allocates nothing, waits for nothing, and may be captured in a CUDA graph. Base tokens keep `y` bit for
    /// bit. With row-parallel layers `y` is this rank's partial sum: call this before the all-reduce.
    ///
    /// # Errors
    /// If the operands don't fit the plan; then nothing was enqueued.
    ///
    /// # Safety
    /// From this call until the work has run:
    /// - **Validity.** `x`, `y`, `weights` and `workspace` address device memory of the kernels' context for their whole extent, as
    ///   do the table's descriptors, and `batch` is of a routing that was updated before. `stream` is of that context.
    /// - **Liveness.** That memory stays mapped.
    /// - **Workspace.** Its exchange was zero before its first use, and nothing but these operations has written it since. Otherwise
    ///   the kernels may take old sums for new ones, or wait forever.
    /// - **Aliasing.** Nobody writes `x`, `weights` or the routing, or reads or writes `y` or `workspace`, except work ordered by
    ///   `stream`.
    /// - **Order.** A kernel that writes weights or the routing neither lets its dependents begin early (programmatic dependent
    ///   launch) nor ends before each thread that wrote has fenced (`__threadfence`): weights and routing are fetched before the
    ///   kernels enqueued earlier are waited for. Copies are always in order.
    /// - **Context.** (checked) the context current on this thread is that of the kernels.
    #[doc(alias = "sgmv")]
    #[doc(alias = "bgmv")]
    pub unsafe fn add_delta(
        &self,
        x: MatrixRef,
        y: MatrixMut,
        weights: LayerWeights,
        batch: RoutedBatch,
        workspace: Workspace,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        let args = self.args(Some(x), Some(y), weights, batch, workspace)?;
        // SAFETY: the caller's obligations.
        unsafe { self.launch(ffi::aril_linear, &args, stream) }
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
    pub unsafe fn write_delta(
        &self,
        x: MatrixRef,
        y: MatrixMut,
        weights: LayerWeights,
        batch: RoutedBatch,
        workspace: Workspace,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        let args = self.args(Some(x), Some(y), weights, batch, workspace)?;
        let args = ffi::aril_linear_args { overwrites: 1, ..args };
        // SAFETY: the caller's obligations.
        unsafe { self.launch(ffi::aril_linear, &args, stream) }
    }

    /// Enqueues the first half of [`add_delta`](Self::add_delta): `A x[t]` into the workspace. It needs nothing of `y`, so it may
    /// run beside the base GEMM.
    ///
    /// # Errors
    /// As for `add_delta`.
    ///
    /// # Safety
    /// As for `add_delta`; nobody else uses the workspace until [`expand`](Self::expand) has run.
    pub unsafe fn shrink(
        &self,
        x: MatrixRef,
        weights: LayerWeights,
        batch: RoutedBatch,
        workspace: Workspace,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        let args = self.args(Some(x), None, weights, batch, workspace)?;
        // SAFETY: the caller's obligations.
        unsafe { self.launch(ffi::aril_linear_shrink, &args, stream) }
    }

    /// Enqueues the second half of [`add_delta`](Self::add_delta): adds `scaling · B v` to `y`, from what
    /// [`shrink`](Self::shrink) of the same layer, weights and batch left in the workspace.
    ///
    /// # Errors
    /// As for `add_delta`.
    ///
    /// # Safety
    /// As for `add_delta`; `shrink` was ordered before it.
    pub unsafe fn expand(
        &self,
        y: MatrixMut,
        weights: LayerWeights,
        batch: RoutedBatch,
        workspace: Workspace,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        let args = self.args(None, Some(y), weights, batch, workspace)?;
        // SAFETY: the caller's obligations.
        unsafe { self.launch(ffi::aril_linear_expand, &args, stream) }
    }

    /// The arguments of both halves: the one for which an operand is not given leaves it alone.
    pub(in crate::cuda) fn args(
        &self,
        x: Option<MatrixRef>,
        y: Option<MatrixMut>,
        weights: LayerWeights,
        batch: RoutedBatch,
        workspace: Workspace,
    ) -> Result<ffi::aril_linear_args, LaunchError> {
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
        let max_tokens = self.plan.capacity().max_tokens;
        if num_tokens > max_tokens {
            return Err(LaunchError::Capacity { what: "the batch's tokens", got: num_tokens, max: max_tokens });
        }
        let mut out_features = [0; MAX_SLICES];
        for (out, slice) in out_features.iter_mut().zip(self.site.slices()) {
            *out = int(slice.out_features())?;
        }
        Ok(ffi::aril_linear_args {
            dtype: dtype_code(dtype),
            num_tokens: int(num_tokens)?,
            max_tiles: int(batch.max_tiles)?,
            lanes_per_split: int(self.plan.lanes_per_split(num_tokens))?,
            outs_per_block: int(self.plan.outs_per_block(num_tokens, batch.max_tiles))?,
            overwrites: 0,
            in_features: int(self.site.in_features())?,
            num_slices: int(self.site.slices().len())?,
            out_features,
            x,
            x_stride,
            y,
            y_stride,
            exchange: workspace.exchange.ptr as *mut std::ffi::c_void,
            planes: workspace.planes.ptr as *mut f32,
            weights: weights.expect(&self.plan.capacity(), self.num_entries)?,
            routing: batch.routing,
        })
    }

    unsafe fn launch(
        &self,
        kernel: unsafe extern "C" fn(*const ffi::aril_linear_args, *mut std::ffi::c_void) -> i32,
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
