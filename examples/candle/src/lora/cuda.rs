//! Adapters in device memory, on the addresses in candle's storage and on candle's stream. The device is one of
//! `Device::new_cuda_with_stream`: aril rejects the per-thread default stream of `Device::new_cuda`.

use aril::{
    DType, Slot,
    adapter::SlotImage,
    cuda::{
        Kernels, LoraLinear, Queue, Routing, WeightTable, Workspace,
        raw::{MatrixMut, MatrixRef, RoutedBatch, Step, Stream},
    },
    model::{LinearId, Model},
    plan::Capacity,
    routing::Batch,
};
use candle_core::{
    CudaDevice, CudaStorage, Error, Layout, Result,
    backend::BackendStorage,
    bail,
    cuda::{
        CudaDType,
        cudarc::driver::{DevicePtr, DevicePtrMut},
    },
};

use super::{Backend, Rows, matrix};

/// Steps that the host may run ahead of the device.
const STEPS_IN_FLIGHT: usize = 2;

pub(super) struct Cuda {
    queue: Queue,
    weights: WeightTable,
    layers: Vec<LoraLinear>,
    workspace: Workspace,
    tokens: Routed,
    last_tokens: Routed,
}

struct Routed {
    routing: Routing,
    batch: Option<RoutedBatch>,
}

impl Cuda {
    pub(super) fn new(
        model: &Model,
        ids: &[LinearId],
        dtype: DType,
        capacity: Capacity,
        bytes: usize,
        device: &CudaDevice,
    ) -> Result<Self> {
        let stream = device.cuda_stream();
        let kernels = Kernels::load_into(stream.context()).map_err(Error::wrap)?;
        let queue = Queue::new(&kernels, &stream).map_err(Error::wrap)?;
        let weights = WeightTable::new(&queue, model, dtype, capacity, bytes).map_err(Error::wrap)?;
        let layer = |&id| LoraLinear::for_model(&kernels, model, id, dtype, capacity).map_err(Error::wrap);
        let layers = ids.iter().map(layer).collect::<Result<_>>()?;
        let workspace = Workspace::new(&weights).map_err(Error::wrap)?;
        let routed = || {
            let routing = Routing::new(&queue, capacity, STEPS_IN_FLIGHT).map_err(Error::wrap)?;
            Ok::<_, Error>(Routed { routing, batch: None })
        };
        let (tokens, last_tokens) = (routed()?, routed()?);
        Ok(Self { queue, weights, layers, workspace, tokens, last_tokens })
    }

    fn add_delta<T: aril::Element + CudaDType>(
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
        let stream = self.queue.stream();
        let step = Step::new(self.weights.raw(), batch, self.workspace.raw(), Stream::from(&**stream));
        let ((x_start, x_rows, x_cols), (y_start, y_rows, y_cols)) = (matrix(x_layout)?, matrix(y_layout)?);
        let (x, _x_used) = x.as_cuda_slice::<T>()?.device_ptr(stream);
        let (y, _y_used) = y.as_cuda_slice_mut::<T>()?.device_ptr_mut(stream);
        let address = |begin: u64, elems: usize| begin + (elems * size_of::<T>()) as u64;
        let x = MatrixRef::new::<T>(address(x, x_start), x_rows, x_cols);
        let y = MatrixMut::new::<T>(address(y, y_start), y_rows, y_cols);
        // SAFETY: candle's layouts are within its storage, which is used and freed on this stream only. aril owns the table, workspace
        // and routing and orders their uses with the stream. `route` has routed the batch.
        unsafe { self.layers[site].add_delta_raw(&step, x, y) }.map_err(Error::wrap)
    }
}

impl Backend for Cuda {
    fn load(&self, slot: Slot, image: &SlotImage<'_>) -> Result<()> {
        self.weights.load(slot, image).map(drop).map_err(Error::wrap)
    }

    fn unload(&self, slot: Slot) -> Result<()> {
        self.weights.unload(slot).map_err(Error::wrap)
    }

    fn route(&mut self, rows: Rows, slots: Vec<Slot>) -> Result<()> {
        let Routed { routing, batch } = match rows {
            Rows::Tokens => &mut self.tokens,
            Rows::LastTokens => &mut self.last_tokens,
        };
        routing.wait().and_then(|()| routing.update(&Batch::new(&slots)).map(drop)).map_err(Error::wrap)?;
        *batch = Some(routing.capture_batch(slots.len()).map_err(Error::wrap)?);
        Ok(())
    }

    fn add_delta_cuda(
        &self,
        site: usize,
        rows: Rows,
        y: (&mut CudaStorage, &Layout),
        x: (&CudaStorage, &Layout),
    ) -> Result<()> {
        match y.0.dtype() {
            candle_core::DType::BF16 => self.add_delta::<half::bf16>(site, rows, y, x),
            candle_core::DType::F16 => self.add_delta::<half::f16>(site, rows, y, x),
            candle_core::DType::F32 => self.add_delta::<f32>(site, rows, y, x),
            dtype => bail!("there are no adapters in {dtype:?}"),
        }
    }
}
