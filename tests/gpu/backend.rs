//! The GPU, for what is written once for every backend (tests/model).

use std::sync::Arc;

pub use aril::cuda::{
    AdapterPool, Filled, Graph, LoraLinear, Matrix, MatrixMut, Reservation, Routing, Staging, Step, Tiers, WeightTable,
    Workspace,
};
use aril::{
    DType,
    cuda::{Buffer, LaunchError, Queue},
    error::OperandError,
    model::Model,
    plan::Capacity,
    pool::{PoolConfig, StreamId},
};

use crate::{
    device::Gpu,
    model::{Captured, Refused, STREAMS},
};

pub type Elements = Buffer<f32>;
pub type Error = LaunchError;

pub const HAS_GRAPHS: bool = true;
/// One descriptor, in whole granules.
pub const ROW_BYTES: usize = 256;
pub const ROUTINGS: usize = 4;

/// Streams of one device.
#[derive(Clone)]
pub struct Backend {
    streams: Arc<[Gpu; STREAMS]>,
}

impl Backend {
    pub fn new() -> Self {
        let first = Gpu::new();
        let second = Gpu::in_context(Arc::clone(&first.context));
        Self { streams: Arc::new([first, second]) }
    }

    pub fn queue(&self, stream: usize) -> &Queue {
        &self.streams[stream].queue
    }

    pub fn table(&self, model: &Model, dtype: DType, capacity: Capacity, bytes: usize) -> WeightTable {
        WeightTable::new(self.queue(0), model, dtype, capacity, bytes).unwrap()
    }

    pub fn pool(&self, model: &Model, dtype: DType, capacity: Capacity, config: PoolConfig) -> AdapterPool {
        AdapterPool::new(self.queue(0), model, dtype, capacity, config).unwrap()
    }

    pub fn add_stream(&self, pool: &mut AdapterPool, stream: usize) -> StreamId {
        pool.add_queue(self.queue(stream)).unwrap()
    }

    pub fn routing(&self, stream: usize, capacity: Capacity) -> Routing {
        Routing::new(self.queue(stream), capacity, 2).unwrap()
    }

    /// A workspace for layers of the table's model.
    pub fn workspace(&self, stream: usize, weights: &WeightTable) -> Workspace {
        Workspace::with_bytes(self.queue(stream), weights.workspace_bytes().unwrap()).unwrap()
    }

    pub fn elements(&self, stream: usize, elements: &[f32]) -> Elements {
        let mut buffer = Buffer::zeros(self.queue(stream), elements.len()).unwrap();
        buffer.write(elements).unwrap();
        buffer
    }
}

pub fn write(to: &mut Elements, elements: &[f32]) {
    to.write(elements).unwrap();
}

pub fn read(from: &Elements, elements: &mut [f32]) {
    from.read(elements).unwrap();
}

pub fn capture(
    weights: &WeightTable,
    routing: &Routing,
    captured: Captured,
    workspace: &mut Workspace,
    record: impl FnOnce(&mut Step<'_>) -> Result<(), Error>,
) -> Result<Graph, Error> {
    if captured.has_adapters {
        weights.capture(routing, captured.tokens, workspace, record)
    } else {
        weights.capture_without_adapters(routing, captured.tokens, workspace, record)
    }
}

pub fn replay(graph: &mut Graph, step: &mut Step<'_>) -> Result<(), Error> {
    graph.replay(step)
}

pub fn refused(error: Error) -> Refused {
    match error {
        LaunchError::Operand(error) => Refused::Operand(error),
        LaunchError::Plan(error) => Refused::Operand(OperandError::from(error)),
        // A graph of another stream is also one of another routing.
        LaunchError::OtherGraph { .. } | LaunchError::WrongStream { operand: "the graph" } => Refused::OtherGraph,
        LaunchError::WithoutAdapters => Refused::WithoutAdapters,
        error => Refused::Other(error.to_string()),
    }
}
