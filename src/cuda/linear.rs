#![expect(unsafe_code, reason = "calls the raw API")]

use std::ffi::c_void;

use super::{LaunchError, Matrix, MatrixMut, Step, WeightTable, kernels::Operation, raw};
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

    #[doc = include_str!("../docs/operations/linear_add_delta.md")]
    ///
    /// Enqueues the work, and neither allocates nor waits.
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
        self.enqueue(ffi::aril_linear, Kind::Adds, step, Some(x), Some(y))
    }

    #[doc = include_str!("../docs/operations/linear_write_delta.md")]
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
        self.enqueue(ffi::aril_linear, Kind::Writes, step, Some(x), Some(y))
    }

    /// Enqueues the first half of [`add_delta`](Self::add_delta): computes `v = A x[t]` into the workspace. Does not need `y`. What this
    /// returns expands `v`. It borrows the step, so that no other operation uses the workspace between the halves.
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

    fn enqueue<T: Element>(
        &self,
        operation: Operation<ffi::aril_linear_args>,
        kind: Kind,
        step: &mut Step<'_>,
        x: Option<Matrix<'_, T>>,
        mut y: Option<MatrixMut<'_, T>>,
    ) -> Result<(), LaunchError> {
        let shapes = (x.as_ref().map(Matrix::shape), y.as_ref().map(MatrixMut::shape));
        let mut args = self.raw.args(&step.raw(), shapes.0, shapes.1)?;
        x.as_ref().map_or(Ok(()), |x| x.check(step))?;
        y.as_ref().map_or(Ok(()), |y| y.check(step))?;
        let _entered = step.enter()?;
        if kind == Kind::Half && !step.has_adapters() {
            return Ok(());
        }
        step.keep([x.as_ref().and_then(Matrix::kept), y.as_ref().and_then(MatrixMut::kept)]);
        let queue = step.queue();
        let (x, _x_guard) = x.as_ref().map(|x| x.on(queue)).unzip();
        let (y, _y_guard) = y.as_mut().map(|y| y.on(queue)).unzip();
        args.x = x.unwrap_or(0) as *const c_void;
        args.y = y.unwrap_or(0) as *mut c_void;
        args.overwrites = (kind == Kind::Writes).into();
        // SAFETY: every operand is large enough and in the queue's context (checked). The step's table, routing and workspace, and
        // buffers, belong to the queue; guards order the other operands. Graphs keep their operands alive.
        unsafe { self.raw.launch(operation, &args, queue.raw()) }
    }
}

/// `v = A x[t]` of a step's tokens in its workspace, from [`LoraLinear::shrink`]. One operation expands it.
#[derive(Debug)]
#[must_use = "the delta is added by the operation that expands it"]
pub struct Shrunk<'b, 's> {
    layer: &'b LoraLinear,
    step: &'b mut Step<'s>,
}

impl Shrunk<'_, '_> {
    /// Enqueues the second half of [`add_delta`](LoraLinear::add_delta): `y[t] += scaling · B v`. Enqueues nothing if `shrink` has not.
    ///
    /// # Errors
    /// As for `add_delta`.
    pub fn expand<T: Element>(self, y: MatrixMut<'_, T>) -> Result<(), LaunchError> {
        self.layer.enqueue(ffi::aril_linear_expand, Kind::Half, self.step, None, Some(y))
    }

    #[doc = include_str!("../docs/operations/linear_silu_mul.md")]
    ///
    /// In a captured step, rows beyond the batch of the last update are unchanged.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer and the step, or the slices are not gate and up. Nothing was
    /// enqueued.
    #[doc(alias = "silu_and_mul")]
    pub fn silu_mul<T: Element>(self, y: Matrix<'_, T>, mut out: MatrixMut<'_, T>) -> Result<(), LaunchError> {
        let Self { layer: LoraLinear { raw }, step } = self;
        let mut args = raw.silu_mul_args(&step.raw(), y.shape(), out.shape())?;
        y.check_as("y", step)?;
        out.check_as("out", step)?;
        let _entered = step.enter()?;
        step.keep([y.kept(), out.kept()]);
        let queue = step.queue();
        let ((y, _y_guard), (out, _out_guard)) = (y.on(queue), out.on(queue));
        (args.layer.y, args.out) = (y as *mut c_void, out as *mut c_void);
        // SAFETY: as in `enqueue`. The shrink is the last operation on the workspace, or the batch has no adapter.
        unsafe { raw.launch_silu_mul(&args, queue.raw()) }
    }
}
