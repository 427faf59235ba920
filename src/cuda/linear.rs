#![expect(unsafe_code, reason = "calls the raw door")]

use std::{ffi::c_void, sync::Arc};

use super::{
    LaunchError, Matrix, MatrixMut, Queue, Step, WeightTable,
    raw::{self, Kernel},
    region::{Kept, Region},
};
use crate::{
    Element, ffi,
    model::LinearId,
    plan::{LinearPlan, PlanError, WorkspaceBytes},
};

/// The adapters of one linear layer: shapes checked, launches planned, workspace sized.
#[derive(Clone, Debug)]
pub struct LoraLinear {
    raw: raw::LoraLinear,
}

/// Scratch for the operations of a step. Any number of layers and graphs of one queue share one.
#[derive(Debug)]
pub struct Workspace {
    mailbox: Arc<Region>,
    partials: Arc<Region>,
}

impl Workspace {
    /// One that is enough for every layer of the table's model.
    ///
    /// # Errors
    /// If no kernel takes the shape of a layer, or there is no memory left.
    pub fn new(weights: &WeightTable) -> Result<Self, LaunchError> {
        Self::with_bytes(weights.queue(), weights.workspace_bytes()?)
    }

    /// One of that size: the [maximum](WorkspaceBytes::max) of what the layers' [`LinearPlan::workspace_bytes`] ask for.
    ///
    /// # Errors
    /// If there is no memory left.
    pub fn with_bytes(queue: &Queue, bytes: WorkspaceBytes) -> Result<Self, LaunchError> {
        let region = |bytes| Ok::<_, LaunchError>(Arc::new(Region::new(queue, bytes)?));
        Ok(Self { mailbox: region(bytes.mailbox)?, partials: region(bytes.partials)? })
    }

    pub(super) fn queue(&self) -> &Queue {
        self.mailbox.queue()
    }

    pub(super) fn kept(&self) -> [Kept; 2] {
        [self.mailbox.clone(), self.partials.clone()]
    }

    /// What the raw door calls it.
    pub fn raw(&self) -> raw::Workspace {
        raw::Workspace { mailbox: self.mailbox.region(), partials: self.partials.region() }
    }
}

impl LoraLinear {
    /// Plans the layer `id` of the table's model, for the table's element type and capacity.
    ///
    /// # Errors
    /// If the id is of another model, or no kernel takes this shape or these bounds: there is no slow path to fall into.
    pub fn new(weights: &WeightTable, id: LinearId) -> Result<Self, PlanError> {
        let kernels = weights.queue().kernels();
        let raw = raw::LoraLinear::new(kernels, weights.model(), id, weights.dtype(), weights.capacity())?;
        Ok(Self { raw })
    }

    /// What will be launched; for logs, and for the size of the workspace.
    pub fn plan(&self) -> &LinearPlan {
        self.raw.plan()
    }

    /// Enqueues `y[t] += scaling · B (A x[t])`, for every token `t` that has an adapter.
    ///
    /// `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`. Allocates nothing and waits for nothing. Base tokens keep
    /// `y` bit for bit. With row-parallel layers `y` is this rank's partial sum: call this before the all-reduce.
    ///
    /// # Errors
    /// If the operands don't fit the layer and the step; then nothing was enqueued.
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

    /// Enqueues `y[t] = scaling · B (A x[t])`, and zero for every token and slice that has no adapter: for a base GEMM that adds its
    /// product to what `y` holds (`beta = 1`). Nothing of `y` is read.
    ///
    /// Rows of a captured step that the last update did not have are left alone.
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

    /// Enqueues the first half of [`add_delta`](Self::add_delta): `A x[t]` into the workspace. It needs nothing of `y`.
    ///
    /// # Errors
    /// As for `add_delta`.
    pub fn shrink<T: Element>(&self, step: &mut Step<'_>, x: Matrix<'_, T>) -> Result<(), LaunchError> {
        self.enqueue(ffi::aril_linear_shrink, false, step, Some(x), None)
    }

    /// Enqueues the second half of [`add_delta`](Self::add_delta): adds `scaling · B v` to `y`, from what
    /// [`shrink`](Self::shrink) of the same layer left in the step's workspace. Without it, `y` gets whatever the workspace held.
    ///
    /// # Errors
    /// As for `add_delta`.
    pub fn expand<T: Element>(&self, step: &mut Step<'_>, y: MatrixMut<'_, T>) -> Result<(), LaunchError> {
        self.enqueue(ffi::aril_linear_expand, false, step, None, Some(y))
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
        // SAFETY: every operand was found large enough and in the queue's context; the step's table, routing and workspace, and
        // buffers, are of the queue, and guards order the others. What a graph replays is kept.
        unsafe { self.raw.launch(kernel, &args, queue.raw()) }
    }
}
