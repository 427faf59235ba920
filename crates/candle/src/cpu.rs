//! Adapters in host memory, on candle's vectors.

use std::{
    panic,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};

use aril::{
    DType, Element, Slot,
    cpu::{AdapterPool, LoraEmbedding, LoraExperts, LoraLinear, Matrix, MatrixMut, Workspace},
    error::OperandError,
    model::Model,
    plan::Capacity,
    pool::{PoolConfig, StreamId},
    routing::{Batch, TopK},
};
use candle_core::{CpuStorage, Error, Layout, Result, Storage, Tensor, WithDType, bail};
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::{Delta, Layers, Operation, Point, found, span};

#[derive(Debug)]
pub(super) struct Cpu {
    /// Locked during an operation, which waits for nothing else meanwhile.
    state: Mutex<State>,
    layers: Layers<LoraLinear, LoraEmbedding, LoraExperts>,
    /// Threads that run operations, and nothing of others.
    threads: ThreadPool,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) pool: AdapterPool,
    workspace: Workspace,
}

impl Cpu {
    pub(super) fn new(model: &Model, dtype: DType, capacity: Capacity, config: PoolConfig) -> Result<Self> {
        let pool = AdapterPool::new(model, dtype, capacity, config).map_err(Error::wrap)?;
        let weights = found(pool.weights(StreamId::FIRST), StreamId::FIRST)?;
        let linear = (|id| LoraLinear::new(weights, id), LoraLinear::with_slice);
        let (embedding, experts) = (|id| LoraEmbedding::new(weights, id), |id| LoraExperts::new(weights, id));
        let layers = Layers::new(model, linear, embedding, experts).map_err(Error::wrap)?;
        let threads = ThreadPoolBuilder::new().thread_name(|index| format!("aril-candle-{index}"));
        let state = Mutex::new(State { pool, workspace: Workspace::default() });
        Ok(Self { state, layers, threads: threads.build().map_err(Error::wrap)? })
    }

    /// Rejects slots that no step may have.
    pub(super) fn check(&self, slots: &[Slot]) -> Result<()> {
        let State { pool, workspace } = &mut *self.lock();
        pool.step(StreamId::FIRST, &Batch::new(slots), workspace).map(drop).map_err(Error::wrap)
    }

    /// A panic leaves scratch memory, whose contents do not matter.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add<T: Element + WithDType>(
        &self,
        delta: &Delta<'_>,
        (y, y_layout): (&mut [T], &Layout),
        (x, x_layout): (&CpuStorage, &Layout),
    ) -> Result<()> {
        let at = super::Matrix::of("y", y_layout)?;
        let y = MatrixMut::strided(&mut y[at.start..], at.rows, at.cols, at.row_stride).map_err(Error::wrap)?;
        let x_rows = || {
            let at = super::Matrix::of("x", x_layout)?;
            Matrix::strided(&x.as_slice::<T>()?[at.start..], at.rows, at.cols, at.row_stride).map_err(Error::wrap)
        };
        let (batch, State { pool, workspace }) = (Batch::new(&delta.step.slots), &mut *self.lock());
        let mut step = pool.step(StreamId::FIRST, &batch, workspace).map_err(Error::wrap)?;
        let added = match delta.operation {
            Operation::Linear(id, slice) => {
                let (layer, x) = (self.layers.linear(id, slice)?, x_rows()?);
                self.run(|| layer.add_delta(&mut step, x, y))
            }
            Operation::Embedding(id) => {
                let layer = found(self.layers.embeddings.get(&id), id)?;
                let ids = ids(&x.as_slice()?[span("x", x_layout)?]);
                self.run(|| layer.add_delta(&mut step, &ids, y))
            }
            Operation::Experts(id, point, routes) => {
                let (layer, x) = (found(self.layers.experts.get(&id), id)?, x_rows()?);
                let (experts, weights) = (ids(&of(&routes.experts)?), routes.weights.as_ref().map(of::<f32>));
                let weights = weights.transpose()?;
                let top_k = TopK::new(&experts, routes.top_k).and_then(|top_k| match &weights {
                    Some(weights) => top_k.with_weights(weights),
                    None => Ok(top_k),
                });
                let top_k = top_k.map_err(Error::wrap)?;
                self.run(|| match point {
                    Point::GateUp => layer.add_gate_up_delta(&mut step, &top_k, x, y),
                    Point::Down => layer.add_down_delta(&mut step, &top_k, x, y),
                    Point::Combined => layer.add_combined_delta(&mut step, &top_k, x, y),
                })
            }
        };
        added.map_err(|error: OperandError| Error::wrap(error))
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

/// Ids as aril has them. One above `i32::MAX` is negative, and no id of anything.
fn ids(ids: &[u32]) -> Vec<i32> {
    ids.iter().map(|id| id.cast_signed()).collect()
}

/// The elements of a contiguous tensor.
fn of<T: WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("the routes are not on the CPU") };
    Ok(storage.as_slice()?[span("routes", layout)?].to_vec())
}
