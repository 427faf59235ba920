#![expect(unsafe_code, reason = "calls the raw door")]

use std::{marker::PhantomData, sync::Arc};

use cudarc::driver::CudaStream;

use super::{
    Kernels, LaunchError, Matrix, MatrixMut, RoutedBatch, WeightTable,
    raw::{self, LayerWeights},
    region::Region,
};
use crate::{
    Element,
    error::OperandError,
    model::{LinearId, ModelSpec},
    plan::{Capacity, LinearPlan, WorkspaceBytes},
};

/// The adapters of one linear layer: shapes checked, launches planned, workspace sized.
#[derive(Clone, Debug)]
pub struct LoraLinear<T> {
    raw: raw::LoraLinear,
    kernels: Kernels,
    element: PhantomData<T>,
}

/// Scratch for a layer's operation. Any number of layers may share one.
#[derive(Debug)]
pub struct Workspace {
    exchange: Region,
    planes: Region,
}

impl Workspace {
    /// Allocates on `stream`: the [maximum](WorkspaceBytes::max) of what the layers' [`LinearPlan::workspace_bytes`] ask for.
    ///
    /// # Errors
    /// If there is no memory left.
    pub fn new(kernels: &Kernels, bytes: WorkspaceBytes, stream: &Arc<CudaStream>) -> Result<Self, LaunchError> {
        let region = |bytes| Region::new(kernels, bytes, stream);
        Ok(Self { exchange: region(bytes.exchange)?, planes: region(bytes.planes)? })
    }

    /// Refuses another stream.
    pub(super) fn check(&self, stream: &CudaStream) -> Result<(), LaunchError> {
        self.exchange.check("the workspace", stream)
    }

    /// Where it is; for the raw door.
    pub fn region(&self) -> raw::Workspace {
        raw::Workspace { exchange: self.exchange.region(), planes: self.planes.region() }
    }
}

impl<T: Element> LoraLinear<T> {
    /// Plans the layer `id` of `model` for batches within `capacity`.
    ///
    /// # Errors
    /// If no kernel takes this shape or these bounds: there is no slow path to fall into.
    pub fn new(kernels: &Kernels, model: &ModelSpec, id: LinearId, capacity: Capacity) -> Result<Self, LaunchError> {
        let raw = raw::LoraLinear::new(kernels, model, id, T::DTYPE, capacity)?;
        Ok(Self { raw, kernels: kernels.clone(), element: PhantomData })
    }

    /// What will be launched; for logs, and for the size of the workspace.
    pub fn plan(&self) -> &LinearPlan {
        self.raw.plan()
    }

    /// Enqueues `y[t] += scaling · B (A x[t])` on `stream`, for every token `t` that has an adapter.
    ///
    /// `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`. Allocates nothing and waits for nothing. Base tokens keep
    /// `y` bit for bit. With row-parallel layers `y` is this rank's partial sum: call this before the all-reduce.
    ///
    /// # Errors
    /// If the operands don't fit the plan; then nothing was enqueued.
    #[doc(alias = "sgmv")]
    #[doc(alias = "bgmv")]
    #[doc(alias = "punica")]
    pub fn add_delta(
        &self,
        x: Matrix<'_, T>,
        mut y: MatrixMut<'_, T>,
        weights: &WeightTable<T>,
        batch: &RoutedBatch<'_>,
        workspace: &mut Workspace,
        stream: &CudaStream,
    ) -> Result<(), LaunchError> {
        let layer = self.check(Some(&x), Some(&y), weights, batch, workspace, stream)?;
        let (x, _x_guard) = x.on(stream);
        let (y, _y_guard) = y.on(stream);
        // SAFETY: `check` found every operand large enough, in the kernels' context and, but for x and y, which the guards order,
        // made on this stream; the batch's routing was updated on it.
        unsafe { self.raw.add_delta(x, y, layer, batch.raw, workspace.region(), stream.into()) }
    }

    /// Enqueues `y[t] = scaling · B (A x[t])` on `stream`, and zero for every token and slice that has no adapter: for a base GEMM
    /// that adds its product to what `y` holds (`beta = 1`). Nothing of `y` is read.
    ///
    /// # Errors
    /// As for [`add_delta`](Self::add_delta).
    pub fn write_delta(
        &self,
        x: Matrix<'_, T>,
        mut y: MatrixMut<'_, T>,
        weights: &WeightTable<T>,
        batch: &RoutedBatch<'_>,
        workspace: &mut Workspace,
        stream: &CudaStream,
    ) -> Result<(), LaunchError> {
        let layer = self.check(Some(&x), Some(&y), weights, batch, workspace, stream)?;
        let (x, _x_guard) = x.on(stream);
        let (y, _y_guard) = y.on(stream);
        // SAFETY: as in `add_delta`.
        unsafe { self.raw.write_delta(x, y, layer, batch.raw, workspace.region(), stream.into()) }
    }

    /// Enqueues the first half of [`add_delta`](Self::add_delta): `A x[t]` into the workspace. It needs nothing of `y`.
    ///
    /// # Errors
    /// As for `add_delta`.
    pub fn shrink(
        &self,
        x: Matrix<'_, T>,
        weights: &WeightTable<T>,
        batch: &RoutedBatch<'_>,
        workspace: &mut Workspace,
        stream: &CudaStream,
    ) -> Result<(), LaunchError> {
        let layer = self.check(Some(&x), None, weights, batch, workspace, stream)?;
        let (x, _x_guard) = x.on(stream);
        // SAFETY: as in `add_delta`.
        unsafe { self.raw.shrink(x, layer, batch.raw, workspace.region(), stream.into()) }
    }

    /// Enqueues the second half of [`add_delta`](Self::add_delta): adds `scaling · B v` to `y`, from what
    /// [`shrink`](Self::shrink) of the same layer, weights and batch left in the workspace. Without it, `y` gets whatever the
    /// workspace held.
    ///
    /// # Errors
    /// As for `add_delta`.
    pub fn expand(
        &self,
        mut y: MatrixMut<'_, T>,
        weights: &WeightTable<T>,
        batch: &RoutedBatch<'_>,
        workspace: &Workspace,
        stream: &CudaStream,
    ) -> Result<(), LaunchError> {
        let layer = self.check(None, Some(&y), weights, batch, workspace, stream)?;
        let (y, _y_guard) = y.on(stream);
        // SAFETY: as in `add_delta`.
        unsafe { self.raw.expand(y, layer, batch.raw, workspace.region(), stream.into()) }
    }

    /// Refuses operands that do not fit before anything is enqueued for them, and makes the context current.
    fn check(
        &self,
        x: Option<&Matrix<'_, T>>,
        y: Option<&MatrixMut<'_, T>>,
        weights: &WeightTable<T>,
        batch: &RoutedBatch<'_>,
        workspace: &Workspace,
        stream: &CudaStream,
    ) -> Result<LayerWeights, LaunchError> {
        self.kernels.check_context("the stream", stream.context())?;
        x.map_or(Ok(()), |x| x.check_context(&self.kernels))?;
        y.map_or(Ok(()), |y| y.check_context(&self.kernels))?;
        weights.check(stream)?;
        batch.check(stream)?;
        workspace.check(stream)?;
        if !self.raw.site().is_in(weights.model()) {
            return Err(OperandError::Model.into());
        }
        let layer = weights.layer(self.raw.site().first_entry());
        self.raw.args(x.map(|x| x.at(0)), y.map(|y| y.at(0)), layer, batch.raw, workspace.region())?;
        Ok(layer)
    }
}
