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

use cudarc::driver::sys::CUgraphInstantiate_flags;

use crate::{
    device::Gpu,
    model::{Beside, Captured, Refused, STREAMS},
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

/// Calls what has nothing to do with the step that is being captured.
pub fn call_beside(beside: Beside, step: &mut Step<'_>, weights: &WeightTable, routing: &Routing) {
    let (queue, stream) = (step.queue(), step.queue().stream());
    match beside {
        Beside::Nothing => {}
        Beside::End => assert!(stream.end_capture(CUgraphInstantiate_flags(0)).is_err(), "a capture was stolen"),
        Beside::Copies => {
            let (from, mut to) = (stream.clone_htod(&[3.0_f32; 4]).unwrap(), stream.alloc_zeros::<f32>(4).unwrap());
            stream.memcpy_dtod(&from, &mut to).unwrap();
            let mut buffer = Buffer::<f32>::zeros(queue, 4).unwrap();
            queue.copy(&to, &mut buffer).unwrap();
            let mut values = [0.0; 4];
            buffer.read(&mut values).unwrap();
            assert_eq!(values, [3.0; 4]);
        }
        Beside::Allocation => {
            let memory = stream.alloc_zeros::<f32>(4).unwrap();
            assert_eq!(stream.clone_dtoh(&memory).unwrap(), [0.0; 4]);
        }
        Beside::Capture => {
            let mut workspace = Workspace::new(weights).unwrap();
            let [from, mut to] = [(); 2].map(|()| Buffer::<f32>::zeros(queue, 4).unwrap());
            let record = |step: &mut Step<'_>| step.copy(&from, &mut to);
            drop(weights.capture(routing, 1, &mut workspace, record).unwrap());
        }
    }
}

/// Copies a slice of cudarc's, which was allocated on a stream, with the queue of another.
pub fn copy(backend: &Backend, of: usize, on: usize) -> Result<(), Error> {
    let (slice, queue) = (backend.queue(of).stream().clone_htod(&[5.0_f32; 4])?, backend.queue(on));
    let (mut to, mut values) = (Buffer::<f32>::zeros(queue, 4)?, [0.0; 4]);
    queue.copy(&slice, &mut to)?;
    to.read(&mut values)?;
    assert_eq!(values, [5.0; 4]);
    Ok(())
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
        LaunchError::WrongStream { .. } => Refused::OtherStream,
        error => Refused::Other(error.to_string()),
    }
}
