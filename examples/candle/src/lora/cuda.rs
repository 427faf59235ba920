//! Adapters in device memory, on the addresses in candle's storage and on candle's stream.

use std::sync::Arc;

use aril::{
    Slot,
    adapter::Adapter,
    cuda::{
        Kernels, LaunchError, Routing, WeightTable, Workspace,
        raw::{LayerWeights, LoraLinear, MatrixMut, MatrixRef, RoutedBatch, Stream},
    },
    model::{LinearId, ModelSpec},
    plan::{Capacity, WorkspaceBytes},
    routing::Batch,
};
use candle_core::{
    CudaDevice, CudaStorage, Error, Layout, Result, bail,
    cuda::{
        CudaDType,
        cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut},
    },
};

use super::{Backend, Rows, matrix};

/// Steps that the host may run ahead of the device.
const STEPS_IN_FLIGHT: usize = 2;

pub(super) struct Cuda<T> {
    stream: Arc<CudaStream>,
    weights: WeightTable<T>,
    layers: Vec<Layer>,
    workspace: Workspace,
    tokens: Routed,
    last_tokens: Routed,
}

struct Layer {
    operation: LoraLinear,
    weights: LayerWeights,
}

struct Routed {
    routing: Routing,
    batch: Option<RoutedBatch>,
}

impl<T: aril::Element> Cuda<T> {
    pub(super) fn new(
        spec: &ModelSpec,
        ids: &[LinearId],
        capacity: Capacity,
        bytes: usize,
        device: &CudaDevice,
    ) -> Result<Self> {
        let stream = device.cuda_stream();
        let kernels = Kernels::load_into(stream.context()).map_err(Error::wrap)?;
        let weights = WeightTable::new(&kernels, spec, capacity, bytes, &stream).map_err(Error::wrap)?;
        let layer = |&id: &LinearId| {
            let operation = LoraLinear::new(&kernels, spec, id, T::DTYPE, capacity).map_err(Error::wrap)?;
            Ok(Layer { operation, weights: weights.layer(spec[id].first_entry()) })
        };
        let layers = ids.iter().map(layer).collect::<Result<Vec<_>>>()?;
        let needed = layers.iter().map(|layer| layer.operation.plan().workspace_bytes());
        let needed = needed.fold(WorkspaceBytes::default(), WorkspaceBytes::max);
        let workspace = Workspace::new(&kernels, needed, &stream).map_err(Error::wrap)?;
        let routed = || {
            let routing = Routing::new(&kernels, capacity, STEPS_IN_FLIGHT, &stream).map_err(Error::wrap)?;
            Ok::<_, Error>(Routed { routing, batch: None })
        };
        let (tokens, last_tokens) = (routed()?, routed()?);
        Ok(Self { stream, weights, layers, workspace, tokens, last_tokens })
    }
}

impl<T: aril::Element + CudaDType> Backend for Cuda<T> {
    fn load(&mut self, slot: Slot, spec: &ModelSpec, adapter: &Adapter) -> Result<()> {
        let image = adapter.plan(spec, T::DTYPE).map_err(Error::wrap)?;
        self.weights.load(slot, &image, &self.stream).map_err(Error::wrap)
    }

    fn unload(&mut self, slot: Slot) -> Result<()> {
        self.weights.unload(slot, &self.stream).map_err(Error::wrap)
    }

    fn route(&mut self, rows: Rows, slots: Vec<Slot>) -> Result<()> {
        let Routed { routing, batch } = match rows {
            Rows::Tokens => &mut self.tokens,
            Rows::LastTokens => &mut self.last_tokens,
        };
        let mut update = || routing.update(&Batch::new(&slots), &self.stream).map(drop);
        match update() {
            Err(LaunchError::Busy { .. }) => {
                self.stream.synchronize().map_err(Error::wrap)?;
                update()
            }
            result => result,
        }
        .map_err(Error::wrap)?;
        *batch = Some(routing.capture_batch(slots.len()).map_err(Error::wrap)?);
        Ok(())
    }

    fn add_delta_cuda(
        &self,
        site: usize,
        rows: Rows,
        (y, y_layout): (&mut CudaStorage, &Layout),
        (x, x_layout): (&CudaStorage, &Layout),
    ) -> Result<()> {
        let routed = match rows {
            Rows::Tokens => &self.tokens,
            Rows::LastTokens => &self.last_tokens,
        };
        let Some(batch) = routed.batch else { bail!("no step was begun") };
        let ((x_start, x_rows, x_cols), (y_start, y_rows, y_cols)) = (matrix(x_layout)?, matrix(y_layout)?);
        let (x, y) = (x.as_cuda_slice::<T>()?, y.as_cuda_slice_mut::<T>()?);
        let (x, _x_used) = x.device_ptr(&self.stream);
        let (y, _y_used) = y.device_ptr_mut(&self.stream);
        let address = |begin: u64, elems: usize| begin + (elems * size_of::<T>()) as u64;
        let x = MatrixRef::new::<T>(address(x, x_start), x_rows, x_cols);
        let y = MatrixMut::new::<T>(address(y, y_start), y_rows, y_cols);
        let Layer { operation, weights } = &self.layers[site];
        // SAFETY: candle's layouts are within its storage; it and everything of `self` is used on candle's stream alone, on which
        // candle also frees what it drops. The workspace is aril's own, and the batch was routed by `route`.
        unsafe { operation.add_delta(x, y, *weights, batch, self.workspace.region(), Stream::from(&*self.stream)) }
            .map_err(Error::wrap)
    }
}
