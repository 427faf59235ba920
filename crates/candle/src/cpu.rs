//! Adapters in host memory, on candle's vectors.

use std::{panic, thread};

use aril::{
    DType, Element, Slot,
    adapter::SlotImage,
    cpu::{LoraLinear, Matrix, MatrixMut, WeightTable, Workspace},
    error::OperandError,
    model::{LinearId, Model},
    plan::Capacity,
    routing::Batch,
};
use candle_core::{CpuStorage, Error, Layout, Result, backend::BackendStorage};
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::{Layers, Place, Rows, mixed};

#[derive(Debug)]
pub(super) struct Cpu {
    weights: WeightTable,
    layers: Layers<LoraLinear>,
    /// Threads that run operations, and nothing of others.
    threads: ThreadPool,
}

/// The slots of a step's rows.
#[derive(Debug)]
pub(super) struct Routed<'a> {
    cpu: &'a Cpu,
    tokens: Vec<Slot>,
    outputs: Vec<Slot>,
}

impl Cpu {
    pub(super) fn new(
        model: &Model,
        ids: &[LinearId],
        dtype: DType,
        capacity: Capacity,
        arena_bytes: usize,
    ) -> Result<Self> {
        let weights = WeightTable::new(model, dtype, capacity, arena_bytes).map_err(Error::wrap)?;
        let layers = Layers::new(ids, |id| LoraLinear::new(&weights, id), LoraLinear::with_slice)?;
        let threads = ThreadPoolBuilder::new().thread_name(|index| format!("aril-candle-{index}"));
        Ok(Self { weights, layers, threads: threads.build().map_err(Error::wrap)? })
    }

    pub(super) fn load(&self, slot: usize, image: &SlotImage<'_>) -> Result<Slot> {
        self.weights.load(slot, image).map_err(Error::wrap)
    }

    pub(super) fn unload(&self, slot: usize) -> Result<()> {
        self.weights.unload(slot).map_err(Error::wrap)
    }

    pub(super) fn step(&mut self, tokens: &[Slot], outputs: &[Slot]) -> Result<Routed<'_>> {
        for slots in [tokens, outputs] {
            // The adapters are in the slots, which are not too many.
            self.weights.step(&Batch::new(slots), &mut Workspace::default()).map_err(Error::wrap)?;
        }
        Ok(Routed { cpu: self, tokens: tokens.to_vec(), outputs: outputs.to_vec() })
    }

    /// Runs an operation. This thread has candle's storages meanwhile, and does nothing else: as one of rayon's
    /// threads, it would take up other work while it waits, which may want the same storages.
    fn run<R: Send>(&self, operation: impl FnOnce() -> R + Send) -> R {
        let run = || self.threads.install(operation);
        if rayon::current_thread_index().is_none() {
            return run();
        }
        thread::scope(|threads| threads.spawn(run).join()).unwrap_or_else(|panic| panic::resume_unwind(panic))
    }
}

impl Routed<'_> {
    pub(super) fn num_rows(&self, rows: Rows) -> usize {
        self.slots(rows).len()
    }

    fn slots(&self, rows: Rows) -> &[Slot] {
        match rows {
            Rows::Tokens => &self.tokens,
            Rows::Outputs => &self.outputs,
        }
    }

    pub(super) fn add_delta(
        &self,
        place: Place,
        (y, y_layout): (&mut CpuStorage, &Layout),
        (x, x_layout): (&CpuStorage, &Layout),
    ) -> Result<()> {
        match (y, x) {
            (CpuStorage::BF16(y), CpuStorage::BF16(x)) => self.add(place, (y, y_layout), (x, x_layout)),
            (CpuStorage::F16(y), CpuStorage::F16(x)) => self.add(place, (y, y_layout), (x, x_layout)),
            (CpuStorage::F32(y), CpuStorage::F32(x)) => self.add(place, (y, y_layout), (x, x_layout)),
            (y, x) => Err(mixed(y.dtype(), x.dtype(), self.cpu.weights.dtype())),
        }
    }

    fn add<T: Element>(
        &self,
        place: Place,
        (y, y_layout): (&mut [T], &Layout),
        (x, x_layout): (&[T], &Layout),
    ) -> Result<()> {
        let (cpu, layer, slots) = (self.cpu, self.cpu.layers.get(place)?, self.slots(place.rows));
        let (x_at, y_at) = (super::Matrix::of("x", x_layout)?, super::Matrix::of("y", y_layout)?);
        let add = || {
            let x = Matrix::strided(&x[x_at.start..], x_at.rows, x_at.cols, x_at.row_stride)?;
            let y = MatrixMut::strided(&mut y[y_at.start..], y_at.rows, y_at.cols, y_at.row_stride)?;
            let mut workspace = Workspace::default();
            layer.add_delta(&mut cpu.weights.step(&Batch::new(slots), &mut workspace)?, x, y)
        };
        cpu.run(add).map_err(|error: OperandError| Error::wrap(error))
    }
}
