//! The operations of linear layers.

#![expect(unsafe_code, reason = "launches kernels")]

use std::ffi::c_void;

use crate::{
    DType, Element, IntoSlices, Slices, contract,
    cuda::{
        Kernels, LaunchError, Matrix, MatrixMut, Stack, Step, WeightTable,
        kernels::Operation,
        raw::{self, NO_OUTPUTS, RawMatrix, dtype_code, int},
        steps::{Checked, join},
    },
    ffi,
    model::{LinearId, MAX_SLICES, Model, SliceSite},
    plan::{Capacity, LinearPlan, PlanError},
};

/// The LoRA operations of one linear layer.
///
/// The operations whose names end in `_raw` are for memory and streams that the engine owns.
#[derive(Clone, Debug)]
pub struct LoraLinear {
    kernels: Kernels,
    contract: contract::Linear,
}

/// What an operation is beside its operands.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Kind {
    /// Adds the delta to `y`.
    Adds,
    /// Writes the delta to `y`.
    Writes,
    /// A half of `Adds`. A batch without adapters needs none.
    Half,
}

impl LoraLinear {
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
    /// [`PlanError`] if the id belongs to another model, or the kernels do not support a size or the capacity. There is
    /// no slow fallback.
    pub fn for_model(
        kernels: &Kernels,
        model: &Model,
        id: LinearId,
        dtype: DType,
        capacity: Capacity,
    ) -> Result<Self, PlanError> {
        let contract = contract::Linear::new(model, id, dtype, capacity, kernels.device())?;
        Ok(Self { kernels: kernels.clone(), contract })
    }

    /// The layer with one of its slices alone, whose outputs are the columns of `y`; `None` if there is no such slice.
    /// For outputs that cannot be borrowed at once. Each operation has the same bits as that of all slices.
    pub fn with_slice(&self, index: usize) -> Option<Self> {
        Some(Self { kernels: self.kernels.clone(), contract: self.contract.with_slice(index)? })
    }

    /// The launch configuration. It also gives the size of the workspace.
    pub fn plan(&self) -> &LinearPlan {
        &self.contract.plan
    }

    #[doc = doc_of!(linear_add_delta)]
    ///
    /// Enqueues the work, and neither allocates nor waits.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer and the step. Nothing was enqueued.
    #[doc(alias = "sgmv")]
    #[doc(alias = "bgmv")]
    #[doc(alias = "punica")]
    pub fn add_delta<'a, T: Element>(
        &self,
        step: &mut Step<'_>,
        x: Matrix<'_, T>,
        y: impl IntoSlices<MatrixMut<'a, T>>,
    ) -> Result<(), LaunchError> {
        self.enqueue(ffi::aril_linear, Kind::Adds, step, Some(x), Some(y.into_slices()))
    }

    /// [`add_delta`](Self::add_delta) on memory that the engine owns.
    ///
    /// The step's workspace has at least [`plan().workspace_bytes()`](LinearPlan::workspace_bytes). Enqueues the work,
    /// and neither allocates nor waits. May be captured in a CUDA graph.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer and the step. Nothing was enqueued.
    ///
    /// # Safety
    /// From this call until the work has run:
    /// - **Validity.** `x`, `y`, the workspace, the table and the factors that it points to are device memory of the
    ///   kernels' context, in their whole extent. The batch's routing has been updated. The stream belongs to that
    ///   context.
    /// - **Liveness.** That memory stays mapped.
    /// - **Workspace.** `mailbox` was zero before its first use, and only these operations have written it since.
    ///   Otherwise kernels may use stale sums or wait forever.
    /// - **Aliasing.** Only work ordered by the stream writes `x`, the table, its factors or the routing, or accesses
    ///   `y` or the workspace. No two of `x` and the matrices of `y` overlap.
    /// - **Order.** Kernels read weights and routing before they wait for their predecessors. A kernel that writes
    ///   either must not trigger programmatic dependent launch early, and each writing thread must call `__threadfence`
    ///   before the kernel ends. Copies need nothing. Any other kernel that is launched with programmatic stream
    ///   serialization, between this operation and later work that uses `y`, the workspace or the routing, waits for
    ///   its predecessors (`griddepcontrol.wait`) in one of its thread blocks at least: whatever waits for that kernel
    ///   counts on it to end after this operation.
    /// - **Context.** The kernels' context is current on this thread. (This is checked.)
    pub unsafe fn add_delta_raw(
        &self,
        step: &raw::Step,
        x: raw::MatrixRef,
        y: impl IntoSlices<raw::MatrixMut>,
    ) -> Result<(), LaunchError> {
        let args = self.args(step, Some(x), Some(&y.into_slices().into()))?;
        // SAFETY: the caller's obligations.
        unsafe { self.run(ffi::aril_linear, &args, step.stream) }
    }

    #[doc = doc_of!(linear_write_delta)]
    ///
    /// In a captured step, rows beyond the batch of the last update are unchanged.
    ///
    /// # Errors
    /// As for [`add_delta`](Self::add_delta).
    pub fn write_delta<'a, T: Element>(
        &self,
        step: &mut Step<'_>,
        x: Matrix<'_, T>,
        y: impl IntoSlices<MatrixMut<'a, T>>,
    ) -> Result<(), LaunchError> {
        self.enqueue(ffi::aril_linear, Kind::Writes, step, Some(x), Some(y.into_slices()))
    }

    /// [`write_delta`](Self::write_delta) on memory that the engine owns. With a captured batch, rows beyond the last
    /// update are unchanged.
    ///
    /// # Errors
    /// As for [`add_delta_raw`](Self::add_delta_raw).
    ///
    /// # Safety
    /// As for `add_delta_raw`.
    pub unsafe fn write_delta_raw(
        &self,
        step: &raw::Step,
        x: raw::MatrixRef,
        y: impl IntoSlices<raw::MatrixMut>,
    ) -> Result<(), LaunchError> {
        let mut args = self.args(step, Some(x), Some(&y.into_slices().into()))?;
        args.overwrites = 1;
        // SAFETY: the caller's obligations.
        unsafe { self.run(ffi::aril_linear, &args, step.stream) }
    }

    /// Enqueues the first half of [`add_delta`](Self::add_delta): computes `v = A x[t]` into the workspace. Does not
    /// need `y`. What this returns expands `v`. It borrows the step, so that no other operation uses the workspace
    /// between the halves.
    ///
    /// Enqueues nothing if no token of the step [has an adapter](Step::has_adapters).
    ///
    /// # Errors
    /// As for `add_delta`.
    pub fn shrink<'b, 's, T: Element>(
        &'b self,
        step: &'b mut Step<'s>,
        x: Matrix<'_, T>,
    ) -> Result<Shrunk<'b, 's>, LaunchError> {
        self.enqueue(ffi::aril_linear_shrink, Kind::Half, step, Some(x), None)?;
        Ok(Shrunk { layer: self, step })
    }

    /// Enqueues the first half of [`add_delta_raw`](Self::add_delta_raw): computes `A x[t]` into the workspace. Does
    /// not need `y`, so it may overlap the base GEMM.
    ///
    /// # Errors
    /// As for `add_delta_raw`.
    ///
    /// # Safety
    /// As for `add_delta_raw`. Nothing else uses the workspace until [`expand_raw`](Self::expand_raw) has run.
    pub unsafe fn shrink_raw(&self, step: &raw::Step, x: raw::MatrixRef) -> Result<(), LaunchError> {
        let args = self.args(step, Some(x), None)?;
        // SAFETY: the caller's obligations.
        unsafe { self.run(ffi::aril_linear_shrink, &args, step.stream) }
    }

    /// Enqueues the second half of [`add_delta_raw`](Self::add_delta_raw): `y[t] += scaling · B v`, with `v` from
    /// [`shrink_raw`](Self::shrink_raw) of the same layer and step.
    ///
    /// # Errors
    /// As for `add_delta_raw`.
    ///
    /// # Safety
    /// As for `add_delta_raw`. The `shrink_raw` is ordered before it.
    pub unsafe fn expand_raw(&self, step: &raw::Step, y: impl IntoSlices<raw::MatrixMut>) -> Result<(), LaunchError> {
        let args = self.args(step, None, Some(&y.into_slices().into()))?;
        // SAFETY: the caller's obligations.
        unsafe { self.run(ffi::aril_linear_expand, &args, step.stream) }
    }

    /// [`Shrunk::silu_mul`] on memory that the engine owns. Rows of tokens beyond the last update are unchanged.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer and the step, or the slices are not gate and up. Nothing
    /// was enqueued.
    ///
    /// # Safety
    /// As for [`expand_raw`](Self::expand_raw), with `out` in the place of `y`, and `y` as an input like `x`. A batch
    /// without adapters needs no `shrink_raw`.
    pub unsafe fn silu_mul_raw(
        &self,
        step: &raw::Step,
        y: impl IntoSlices<raw::MatrixRef>,
        out: raw::MatrixMut,
    ) -> Result<(), LaunchError> {
        let args = self.silu_mul_args(step, &y.into_slices().into(), out)?;
        // SAFETY: the caller's obligations.
        unsafe { self.run_silu_mul(&args, step.stream) }
    }

    /// Enqueues `y[t] += scaling · B v[t]` for every token with an adapter, with the `v` that the base GEMM has
    /// computed. All other rows keep every bit. Does not need a workspace. Enqueues nothing if no token of the step
    /// [has an adapter](Step::has_adapters).
    ///
    /// `y` is the output `[tokens, out_features + stacked_rows]` of a GEMM by W′ ([`raw::Stack`]), of bf16 or f16,
    /// whose rows are aligned to 16 bytes. The columns of the outputs are changed. The step's batch is
    /// [placed](Stack::place) in the stack.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer, the stack and the step, or
    /// [`OperandError::NotPlaced`](crate::error::OperandError::NotPlaced). Nothing was enqueued.
    pub fn add_stacked_delta<T: Element>(
        &self,
        step: &mut Step<'_>,
        stack: &Stack,
        mut y: MatrixMut<'_, T>,
    ) -> Result<(), LaunchError> {
        let (raw, raw::MatrixMut(matrix)) = (step.raw(), y.shape());
        let operands: Checked<'_, '_, 1> = stack.check(step, [y.operand()])?;
        if !step.has_adapters() {
            self.stacked_args(&raw, stack.raw(), matrix)?;
            return Ok(());
        }
        operands.enqueue(|[y], stream| {
            let y = raw::MatrixMut(matrix.at(y));
            // SAFETY: the operands are as `Checked::enqueue` says. The stack has the adapters of the batch.
            unsafe { self.add_stacked_delta_raw(&stack.bounded(raw, stream), stack.raw(), y) }
        })
    }

    /// [`add_stacked_delta`](Self::add_stacked_delta) on memory that the engine owns. Tokens whose slot has an adapter
    /// that is not in the stack get no delta: use another operation for batches that have any.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer, the stack and the step. Nothing was enqueued.
    ///
    /// # Safety
    /// As for [`add_delta_raw`](Self::add_delta_raw), with `y` in the place of `x` and `y`, and the stack's memory as
    /// that of the table.
    pub unsafe fn add_stacked_delta_raw(
        &self,
        step: &raw::Step,
        stack: &raw::Stack,
        y: raw::MatrixMut,
    ) -> Result<(), LaunchError> {
        let args = self.stacked_args(step, stack, y.0)?;
        // SAFETY: the operands fit the plan and the stack, and the caller vouches for their memory.
        unsafe { self.kernels.launch(ffi::aril_stacked_expand, &args, args.num_tokens, step.stream.as_raw()) }
    }

    /// Enqueues `out[t] = silu(gate) · up`, where gate and up are the slices of what
    /// [`add_stacked_delta`](Self::add_stacked_delta) makes of `y`, in `f32` with one rounding, for every token. `out`
    /// is `[tokens, out_features / 2]`, with rows aligned to 16 bytes. In a captured step, rows beyond the batch of the
    /// last update are unchanged.
    ///
    /// # Errors
    /// As for `add_stacked_delta`; also if the slices are not gate and up.
    pub fn stacked_silu_mul<T: Element>(
        &self,
        step: &mut Step<'_>,
        stack: &Stack,
        mut y: Matrix<'_, T>,
        mut out: MatrixMut<'_, T>,
    ) -> Result<(), LaunchError> {
        let (raw, raw::MatrixRef(of_y), raw::MatrixMut(of_out)) = (step.raw(), y.shape(), out.shape());
        let operands: Checked<'_, '_, 2> = stack.check(step, [y.operand_as("y"), out.operand_as("out")])?;
        operands.enqueue(|[y, out], stream| {
            let (y, out) = (raw::MatrixRef(of_y.at(y)), raw::MatrixMut(of_out.at(out)));
            // SAFETY: as in `add_stacked_delta`.
            unsafe { self.stacked_silu_mul_raw(&stack.bounded(raw, stream), stack.raw(), y, out) }
        })
    }

    /// [`stacked_silu_mul`](Self::stacked_silu_mul) on memory that the engine owns.
    ///
    /// # Errors
    /// As for `add_stacked_delta_raw`; also if the slices are not gate and up.
    ///
    /// # Safety
    /// As for `add_stacked_delta_raw`, with `out` as its `y`. `y` is an input.
    pub unsafe fn stacked_silu_mul_raw(
        &self,
        step: &raw::Step,
        stack: &raw::Stack,
        y: raw::MatrixRef,
        raw::MatrixMut(out): raw::MatrixMut,
    ) -> Result<(), LaunchError> {
        let layer = self.stacked_args(step, stack, y.0)?;
        self.contract.check_stacked_out(step.shape(), out.shape("out")?)?;
        out.check_alignment("out", contract::Linear::STACKED_ALIGNMENT_BYTES)?;
        let (out, out_stride) = out.place();
        let args = ffi::aril_stacked_silu_mul_args { layer, out, out_stride };
        // SAFETY: as above.
        unsafe { self.kernels.launch(ffi::aril_stacked_silu_mul, &args, args.layer.num_tokens, step.stream.as_raw()) }
    }

    /// Checks the operands of a layer in a stack and returns the arguments of the C ABI.
    fn stacked_args(
        &self,
        step: &raw::Step,
        stack: &raw::Stack,
        y: RawMatrix,
    ) -> Result<ffi::aril_stacked_args, LaunchError> {
        let (contract::Linear { site, plan, .. }, shape) = (&self.contract, step.shape());
        let first = self.contract.check_stacked(shape, y.shape("y")?, stack.columns(shape.model, site)?)?;
        y.check_alignment("y", contract::Linear::STACKED_ALIGNMENT_BYTES)?;
        let (outs, v_stride) = y.place();
        let routing = step.batch.routing;
        Ok(ffi::aril_stacked_args {
            modules: stack.modules_of(site),
            positions: int(stack.positions())?,
            rank: int(stack.rank())?,
            max_tiles: int(step.batch.max_small_tiles)?,
            num_tokens: int(step.batch.num_tokens)?,
            tiles: routing.tiles,
            rows: routing.rows,
            num_slices: int(site.slices().len())?,
            dtype: dtype_code(plan.dtype()),
            v: outs.wrapping_byte_add(first * plan.dtype().bytes()),
            v_stride,
            out_features: out_features(site.slices())?,
            y: y.into_slices().places(site.slices()),
        })
    }

    fn enqueue<T: Element>(
        &self,
        operation: Operation<ffi::aril_linear_args>,
        kind: Kind,
        step: &mut Step<'_>,
        mut x: Option<Matrix<'_, T>>,
        mut y: Option<Slices<MatrixMut<'_, T>>>,
    ) -> Result<(), LaunchError> {
        let shapes = y.as_ref().map(Slices::<MatrixMut<'_, T>>::shapes);
        let mut args = self.args(&step.raw(), x.as_ref().map(Matrix::shape), shapes.as_ref())?;
        args.overwrites = (kind == Kind::Writes).into();
        let x = x.as_mut().and_then(Matrix::operand);
        let y = y.as_mut().map_or_else(Default::default, Slices::<MatrixMut<'_, T>>::operands);
        let operands: Checked<'_, '_, { 1 + MAX_SLICES }> = step.check(join([x], y))?;
        if kind == Kind::Half && !step.has_adapters() {
            return Ok(());
        }
        operands.enqueue(|[x, y @ ..], stream| {
            args.x = x as *const c_void;
            if let Some(shapes) = shapes {
                args.y = shapes.places_at(y, self.contract.site.slices());
            }
            // SAFETY: the operands fit the plan (checked), and are as `Checked::enqueue` says.
            unsafe { self.run(operation, &args, stream) }
        })
    }

    /// Checks the operands of `silu_mul` and returns the arguments of the C ABI.
    fn silu_mul_args(
        &self,
        step: &raw::Step,
        y: &Slices<RawMatrix>,
        raw::MatrixMut(out): raw::MatrixMut,
    ) -> Result<ffi::aril_silu_mul_args, LaunchError> {
        self.contract.check_silu_mul(step.shape(), &y.shapes()?, out.shape("out")?)?;
        let (out, out_stride) = out.place();
        let layer = self.args_of(step, None, Some(y), self.plan().silu_mul_launch(step.bounds()))?;
        Ok(ffi::aril_silu_mul_args { layer, out, out_stride })
    }

    unsafe fn run_silu_mul(&self, args: &ffi::aril_silu_mul_args, stream: raw::Stream) -> Result<(), LaunchError> {
        // SAFETY: the operands fit the plan, and the caller vouches for their memory.
        unsafe { self.kernels.launch(ffi::aril_silu_mul, args, args.layer.num_tokens, stream.as_raw()) }
    }

    /// Checks the operands and returns the arguments of the C ABI. Shrink and expand ignore the operand that they lack.
    fn args(
        &self,
        step: &raw::Step,
        x: Option<raw::MatrixRef>,
        y: Option<&Slices<RawMatrix>>,
    ) -> Result<ffi::aril_linear_args, LaunchError> {
        let x = x.map(|raw::MatrixRef(x)| x);
        let shapes = (x.map(|x| x.shape("x")).transpose()?, y.map(Slices::<RawMatrix>::shapes).transpose()?);
        self.contract.check(step.shape(), shapes.0, shapes.1.as_ref())?;
        self.args_of(step, x, y, self.plan().launch(step.bounds()))
    }

    /// The arguments of the C ABI, of operands that have been checked.
    fn args_of(
        &self,
        step: &raw::Step,
        x: Option<RawMatrix>,
        y: Option<&Slices<RawMatrix>>,
        launch: ffi::aril_linear_plan,
    ) -> Result<ffi::aril_linear_args, LaunchError> {
        let raw::Step { table, batch, workspace, .. } = step;
        let contract::Linear { site, plan, .. } = &self.contract;
        let (x, x_stride) = x.map_or((std::ptr::null_mut(), 0), |x| x.place());
        let y = y.map_or(NO_OUTPUTS, |y| y.places(site.slices()));
        workspace.check(plan.workspace_bytes_for(batch.num_tokens))?;
        Ok(ffi::aril_linear_args {
            dtype: dtype_code(plan.dtype()),
            num_tokens: int(batch.num_tokens)?,
            plan: launch,
            overwrites: 0,
            in_features: int(site.in_features())?,
            num_slices: int(site.slices().len())?,
            out_features: out_features(site.slices())?,
            x,
            x_stride,
            y,
            mailbox: workspace.mailbox.ptr as *mut c_void,
            mailbox_bytes: workspace.mailbox.bytes as u64,
            partials: workspace.partials.ptr as *mut f32,
            weights: table.at(site.first_entry())?,
            routing: batch.routing,
        })
    }

    unsafe fn run(
        &self,
        operation: Operation<ffi::aril_linear_args>,
        args: &ffi::aril_linear_args,
        stream: raw::Stream,
    ) -> Result<(), LaunchError> {
        // SAFETY: the operands fit the plan, and the caller vouches for their memory.
        unsafe { self.kernels.launch(operation, args, args.num_tokens, stream.as_raw()) }
    }
}

/// Outputs of each slice.
fn out_features(slices: &[SliceSite]) -> Result<[i32; MAX_SLICES], LaunchError> {
    let mut out_features = [0; MAX_SLICES];
    for (out, slice) in out_features.iter_mut().zip(slices) {
        *out = int(slice.out_features())?;
    }
    Ok(out_features)
}

/// `v = A x[t]` of a step's tokens in its workspace, from [`LoraLinear::shrink`]. One operation expands it.
#[derive(Debug)]
#[must_use = "the delta is added by the operation that expands it"]
pub struct Shrunk<'b, 's> {
    layer: &'b LoraLinear,
    step: &'b mut Step<'s>,
}

impl Shrunk<'_, '_> {
    /// Enqueues the second half of [`add_delta`](LoraLinear::add_delta): `y[t] += scaling · B v`. Enqueues nothing if
    /// `shrink` has not.
    ///
    /// # Errors
    /// As for `add_delta`.
    pub fn expand<'a, T: Element>(self, y: impl IntoSlices<MatrixMut<'a, T>>) -> Result<(), LaunchError> {
        self.layer.enqueue(ffi::aril_linear_expand, Kind::Half, self.step, None, Some(y.into_slices()))
    }

    #[doc = doc_of!(linear_silu_mul)]
    ///
    /// In a captured step, rows beyond the batch of the last update are unchanged.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer and the step, or the slices are not gate and up. Nothing
    /// was enqueued.
    #[doc(alias = "silu_and_mul")]
    pub fn silu_mul<'a, T: Element>(
        self,
        y: impl IntoSlices<Matrix<'a, T>>,
        mut out: MatrixMut<'_, T>,
    ) -> Result<(), LaunchError> {
        let (Self { layer, step }, mut y) = (self, y.into_slices());
        let shapes = y.shapes();
        let mut args = layer.silu_mul_args(&step.raw(), &shapes, out.shape())?;
        let operands: Checked<'_, '_, { 1 + MAX_SLICES }> = step.check(join(y.operands(), [out.operand_as("out")]))?;
        operands.enqueue(|[y @ .., out], stream| {
            args.layer.y = shapes.places_at(y, layer.contract.site.slices());
            args.out = out as *mut c_void;
            // SAFETY: as in `enqueue`. The shrink is the last operation on the workspace, or the batch has no adapter.
            unsafe { layer.run_silu_mul(&args, stream) }
        })
    }
}
