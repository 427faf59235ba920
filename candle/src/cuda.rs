//! Adapters in device memory, on the addresses in candle's storage and on candle's stream.

use std::collections::BTreeMap;

use aril::{
    DType, Element, Slot,
    adapter::SlotImage,
    cuda::{
        Kernels, LoraLinear, Queue, Routing, WeightTable, Workspace,
        raw::{MatrixMut, MatrixRef, Step},
    },
    model::{LinearId, Model},
    plan::Capacity,
    routing::Batch,
    slots::Resident,
};
use candle_core::{
    CudaDevice, CudaStorage, DType as CandleDType, Error, Layout, Result,
    backend::BackendStorage,
    bail,
    cuda::{
        CudaDType,
        cudarc::driver::{DevicePtr, DevicePtrMut},
    },
};

use super::{Matrix, Rows, mixed, unknown};

/// Steps that the host may run ahead of the device.
const STEPS_IN_FLIGHT: usize = 2;

#[derive(Debug)]
pub(super) struct Cuda {
    queue: Queue,
    weights: WeightTable,
    layers: BTreeMap<LinearId, LoraLinear>,
    workspace: Workspace,
    tokens: Routed,
    outputs: Routed,
}

#[derive(Debug)]
struct Routed {
    routing: Routing,
    step: Option<Step>,
}

impl Cuda {
    pub(super) fn new(
        model: &Model,
        ids: &[LinearId],
        dtype: DType,
        capacity: Capacity,
        arena_bytes: usize,
        device: &CudaDevice,
    ) -> Result<Self> {
        let stream = device.cuda_stream();
        let kernels = Kernels::load_into(stream.context()).map_err(Error::wrap)?;
        let queue = Queue::new(&kernels, &stream).map_err(Error::wrap)?;
        let weights = WeightTable::new(&queue, model, dtype, capacity, arena_bytes).map_err(Error::wrap)?;
        let layer = |&id| Ok((id, LoraLinear::new(&weights, id).map_err(Error::wrap)?));
        let layers = ids.iter().map(layer).collect::<Result<_>>()?;
        let workspace = Workspace::new(&weights).map_err(Error::wrap)?;
        let routed = || {
            let routing = Routing::new(&queue, capacity, STEPS_IN_FLIGHT).map_err(Error::wrap)?;
            Ok::<_, Error>(Routed { routing, step: None })
        };
        let (tokens, outputs) = (routed()?, routed()?);
        Ok(Self { queue, weights, layers, workspace, tokens, outputs })
    }

    pub(super) fn load(&self, slot: Slot, image: &SlotImage<'_>) -> Result<Resident> {
        self.weights.load(slot, image).map_err(Error::wrap)
    }

    pub(super) fn unload(&self, slot: Slot) -> Result<()> {
        self.weights.unload(slot).map_err(Error::wrap)
    }

    pub(super) fn route(&mut self, rows: Rows, slots: &[Slot]) -> Result<()> {
        let Routed { routing, step } = match rows {
            Rows::Tokens => &mut self.tokens,
            Rows::Outputs => &mut self.outputs,
        };
        *step = None;
        routing.wait().map_err(Error::wrap)?;
        let batch = routing.update(&Batch::new(slots)).map_err(Error::wrap)?;
        *step = Some(self.weights.step(&batch, &mut self.workspace).map_err(Error::wrap)?.raw());
        Ok(())
    }

    pub(super) fn add_delta(
        &self,
        id: LinearId,
        rows: Rows,
        y: (&mut CudaStorage, &Layout),
        x: (&CudaStorage, &Layout),
    ) -> Result<()> {
        match (y.0.dtype(), x.0.dtype()) {
            (CandleDType::BF16, CandleDType::BF16) => self.add::<half::bf16>(id, rows, y, x),
            (CandleDType::F16, CandleDType::F16) => self.add::<half::f16>(id, rows, y, x),
            (CandleDType::F32, CandleDType::F32) => self.add::<f32>(id, rows, y, x),
            (y, x) => Err(mixed(y, x, self.weights.dtype())),
        }
    }

    fn add<T: Element + CudaDType>(
        &self,
        id: LinearId,
        rows: Rows,
        (y, y_layout): (&mut CudaStorage, &Layout),
        (x, x_layout): (&CudaStorage, &Layout),
    ) -> Result<()> {
        let (x_at, y_at) = (Matrix::of("x", x_layout)?, Matrix::of("y", y_layout)?);
        let routed = match rows {
            Rows::Tokens => &self.tokens,
            Rows::Outputs => &self.outputs,
        };
        let (Some(step), layer) = (&routed.step, self.layers.get(&id).ok_or_else(|| unknown(id))?) else {
            bail!("the step's batch was refused")
        };
        let stream = self.queue.stream();
        if [x.device(), y.device()].iter().any(|device| device.cuda_stream() != *stream) {
            bail!("an operand is on another device than the adapters")
        }
        let (x, _x_used) = x.as_cuda_slice::<T>()?.device_ptr(stream);
        let (y, _y_used) = y.as_cuda_slice_mut::<T>()?.device_ptr_mut(stream);
        let address = |begin: u64, at: &Matrix| begin + (at.start * size_of::<T>()) as u64;
        let x = MatrixRef::new::<T>(address(x, &x_at), x_at.rows, x_at.cols).row_stride(x_at.row_stride);
        let y = MatrixMut::new::<T>(address(y, &y_at), y_at.rows, y_at.cols).row_stride(y_at.row_stride);
        // SAFETY: candle's layouts are within its storage, which is used and freed on this stream only. aril owns the table, workspace
        // and routing and orders their uses with the stream. The step's routing has been updated, and is not again while the `Step`
        // that leads here borrows the adapters. x and y are of different storages: one is borrowed exclusively.
        unsafe { layer.add_delta_raw(step, x, y) }.map_err(Error::wrap)
    }
}
