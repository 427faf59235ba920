//! Adapters in device memory, on candle's slices and on candle's stream.

use std::sync::{Mutex, PoisonError};

use aril::{
    DType, Element, Slot,
    adapter::SlotImage,
    cuda::{Kernels, LaunchError, LoraLinear, Matrix, MatrixMut, Queue, RoutedBatch, Routing, WeightTable, Workspace},
    model::{LinearId, Model},
    plan::Capacity,
    routing::Batch,
};
use candle_core::{
    CudaDevice, CudaStorage, DType as CandleDType, Error, Layout, Result, backend::BackendStorage, cuda::CudaDType,
};

use super::{Layers, Place, Rows, mixed};

/// Steps that the host may run ahead of the device.
const STEPS_IN_FLIGHT: usize = 2;

#[derive(Debug)]
pub(super) struct Cuda {
    table: Table,
    tokens: Routing,
    outputs: Routing,
}

/// What all steps have.
#[derive(Debug)]
struct Table {
    weights: WeightTable,
    layers: Layers<LoraLinear>,
    /// Locked while an operation is enqueued, so that the launches of another one are not between its own. Nothing is
    /// waited for meanwhile.
    workspace: Mutex<Workspace>,
}

/// The slots of a step's rows, on the device.
#[derive(Debug)]
pub(super) struct Routed<'a> {
    table: &'a Table,
    tokens: RoutedBatch<'a>,
    outputs: RoutedBatch<'a>,
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
        let layers = Layers::new(ids, |id| LoraLinear::new(&weights, id), LoraLinear::with_slice)?;
        let workspace = Mutex::new(Workspace::new(&weights).map_err(Error::wrap)?);
        let routing = || Routing::new(&queue, capacity, STEPS_IN_FLIGHT).map_err(Error::wrap);
        let (tokens, outputs) = (routing()?, routing()?);
        Ok(Self { table: Table { weights, layers, workspace }, tokens, outputs })
    }

    pub(super) fn load(&self, slot: usize, image: &SlotImage<'_>) -> Result<Slot> {
        self.table.weights.load(slot, image).map_err(Error::wrap)
    }

    pub(super) fn unload(&self, slot: usize) -> Result<()> {
        self.table.weights.unload(slot).map_err(Error::wrap)
    }

    pub(super) fn step(&mut self, tokens: &[Slot], outputs: &[Slot]) -> Result<Routed<'_>> {
        self.table.weights.check(tokens.iter().chain(outputs).copied()).map_err(Error::wrap)?;
        Ok(Routed {
            table: &self.table,
            tokens: route(&mut self.tokens, tokens)?,
            outputs: route(&mut self.outputs, outputs)?,
        })
    }
}

fn route<'a>(routing: &'a mut Routing, slots: &[Slot]) -> Result<RoutedBatch<'a>> {
    routing.wait().map_err(Error::wrap)?;
    routing.update(&Batch::new(slots)).map_err(Error::wrap)
}

impl Routed<'_> {
    pub(super) fn num_rows(&self, rows: Rows) -> usize {
        self.batch(rows).num_tokens()
    }

    fn batch(&self, rows: Rows) -> &RoutedBatch<'_> {
        match rows {
            Rows::Tokens => &self.tokens,
            Rows::Outputs => &self.outputs,
        }
    }

    pub(super) fn add_delta(
        &self,
        place: Place,
        y: (&mut CudaStorage, &Layout),
        x: (&CudaStorage, &Layout),
    ) -> Result<()> {
        match (y.0.dtype(), x.0.dtype()) {
            (CandleDType::BF16, CandleDType::BF16) => self.add::<half::bf16>(place, y, x),
            (CandleDType::F16, CandleDType::F16) => self.add::<half::f16>(place, y, x),
            (CandleDType::F32, CandleDType::F32) => self.add::<f32>(place, y, x),
            (y, x) => Err(mixed(y, x, self.table.weights.dtype())),
        }
    }

    fn add<T: Element + CudaDType>(
        &self,
        place: Place,
        (y, y_layout): (&mut CudaStorage, &Layout),
        (x, x_layout): (&CudaStorage, &Layout),
    ) -> Result<()> {
        let Table { weights, layers, workspace } = self.table;
        let layer = layers.get(place)?;
        let (x_at, y_at) = (super::Matrix::of("x", x_layout)?, super::Matrix::of("y", y_layout)?);
        let x = x.as_cuda_slice::<T>()?.slice(x_at.start..);
        let y = y.as_cuda_slice_mut::<T>()?.slice_mut(y_at.start..);
        let add = || {
            let x = Matrix::strided(x, x_at.rows, x_at.cols, x_at.row_stride)?;
            let y = MatrixMut::strided(y, y_at.rows, y_at.cols, y_at.row_stride)?;
            // A panic leaves scratch memory, whose contents do not matter.
            let mut workspace = workspace.lock().unwrap_or_else(PoisonError::into_inner);
            layer.add_delta(&mut weights.step(self.batch(place.rows), &mut workspace)?, x, y)
        };
        add().map_err(|error: LaunchError| Error::wrap(error))
    }
}
