//! Adapters in device memory, on the addresses in candle's storage and on candle's stream.

use std::collections::BTreeMap;

use aril::{
    DType, Element, Slices, Slot,
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

use super::{Matrix, Outputs, Rows, mixed, unknown};

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
        y: Outputs<'_, CudaStorage>,
        x: (&CudaStorage, &Layout),
    ) -> Result<()> {
        let dtype = x.0.dtype();
        if let Some((y, _)) = y.iter().find(|(y, _)| y.dtype() != dtype) {
            return Err(mixed(y.dtype(), dtype, self.weights.dtype()));
        }
        match dtype {
            CandleDType::BF16 => self.add::<half::bf16>(id, rows, y, x),
            CandleDType::F16 => self.add::<half::f16>(id, rows, y, x),
            CandleDType::F32 => self.add::<f32>(id, rows, y, x),
            dtype => Err(mixed(dtype, dtype, self.weights.dtype())),
        }
    }

    fn add<T: Element + CudaDType>(
        &self,
        id: LinearId,
        rows: Rows,
        y: Outputs<'_, CudaStorage>,
        (x, x_layout): (&CudaStorage, &Layout),
    ) -> Result<()> {
        let x_at = Matrix::of("x", x_layout)?;
        let routed = match rows {
            Rows::Tokens => &self.tokens,
            Rows::Outputs => &self.outputs,
        };
        let (Some(step), layer) = (&routed.step, self.layers.get(&id).ok_or_else(|| unknown(id))?) else {
            bail!("the step's batch was refused")
        };
        let stream = self.queue.stream();
        let is_elsewhere = |storage: &CudaStorage| storage.device().cuda_stream() != *stream;
        if is_elsewhere(x) || y.iter().any(|(y, _)| is_elsewhere(y)) {
            bail!("an operand is on another device than the adapters")
        }
        let (x, _x_used) = x.as_cuda_slice::<T>()?.device_ptr(stream);
        let address = |begin: u64, at: &Matrix| begin + (at.start * size_of::<T>()) as u64;
        let x = MatrixRef::new::<T>(address(x, &x_at), x_at.rows, x_at.cols).row_stride(x_at.row_stride);
        let (mut outputs, mut used) = (Vec::new(), Vec::new());
        for (y, layout) in y {
            let at = Matrix::of("y", layout)?;
            let (y, y_used) = y.as_cuda_slice_mut::<T>()?.device_ptr_mut(stream);
            outputs.push(MatrixMut::new::<T>(address(y, &at), at.rows, at.cols).row_stride(at.row_stride));
            used.push(y_used);
        }
        // SAFETY: candle's layouts are within its storage, which is used and freed on this stream only. aril owns the table, workspace
        // and routing and orders their uses with the stream. The step's routing has been updated, and is not again while the `Step`
        // that leads here borrows the adapters. x and the outputs are of different storages: all but one are borrowed exclusively.
        unsafe { layer.add_delta_raw(step, x, outputs.into_iter().collect::<Slices<_>>()) }.map_err(Error::wrap)
    }
}
