//! The GPU, for what is written once for every backend (tests/model).

use std::sync::Arc;

pub use aril::cuda::{
    AdapterPool, Filled, FullyShardedLinear, FusedLinear, Graph, Grouping, LoraEmbedding, LoraExperts, LoraLinear,
    Matrix, MatrixMut, Reservation, Routing, Staging, Step, Tiers, TopK, TrainedRows, WeightTable, Workspace,
};
use aril::{
    DType, Element,
    cuda::{self, Buffer, LaunchError, Queue, Readback, RoutedBatch, View, ViewMut},
    error::{LoadError, OperandError},
    model::{LinearId, Model},
    plan::{Capacity, RouteCapacity, WorkspaceBytes},
    pool::{PoolConfig, StreamId},
    routing::Batch,
};
use cudarc::driver::{
    DeviceRepr, ValidAsZeroBits, result,
    sys::{CUgraphInstantiate_flags, CUresult},
};
use half::bf16;

pub use crate::experts::launch;
use crate::{
    device::Gpu,
    model::{Beside, Captured, FEATURES, MAX_RANK, Refused, STREAMS, Tensors, machine::ROWS},
    readback::on_device,
};

pub type Elements<T = f32> = Buffer<T>;
pub type Error = LaunchError;

pub const HAS_GRAPHS: bool = true;
/// One descriptor, in whole granules.
pub const ROW_BYTES: usize = 256;
pub const ROUTINGS: usize = 4;

/// A type of operands.
pub trait Value: Element + DeviceRepr + ValidAsZeroBits {}

impl<T: Element + DeviceRepr + ValidAsZeroBits> Value for T {}

/// A stack behind W of zeros, and the output of the GEMM by both, which is the host's.
pub struct Stack {
    stack: cuda::Stack,
    w: Buffer<bf16>,
    num_rows: usize,
    y: Buffer<bf16>,
}

impl Stack {
    pub fn new(weights: &WeightTable, id: LinearId, positions: usize) -> Option<Self> {
        let num_rows = LoraLinear::new(weights, id).unwrap().plan().stacked_rows(positions, MAX_RANK);
        let mut w = Buffer::zeros(weights.queue(), (FEATURES + num_rows) * FEATURES).unwrap();
        let rows = w.split_off(FEATURES * FEATURES);
        let stack = cuda::Stack::new(weights, (positions, MAX_RANK), [(id, rows)]).unwrap();
        let y = Buffer::zeros(weights.queue(), ROWS * (FEATURES + num_rows)).unwrap();
        Some(Self { stack, w, num_rows, y })
    }

    /// Places the batch, and multiplies x of ones by W and by what the stack then has.
    pub fn multiply(&mut self, step: &mut Step<'_>) -> Result<(), Error> {
        self.stack.place(step)?;
        let mut rows = vec![bf16::ZERO; self.num_rows * FEATURES];
        step.queue().stream().synchronize()?;
        let first = self.w.device_ptr() + (FEATURES * FEATURES * size_of::<bf16>()) as u64;
        // SAFETY: the stack keeps the memory, which has this many elements behind W.
        unsafe { result::memcpy_dtoh_sync(&mut rows, first) }?;
        let v = rows.chunks(FEATURES).map(|row| bf16::from_f32(row.iter().map(|a| a.to_f32()).sum()));
        let row: Vec<_> = [bf16::ZERO; FEATURES].into_iter().chain(v).collect();
        self.y.write(&row.repeat(ROWS))
    }

    pub fn add_delta(&mut self, layer: &LoraLinear, step: &mut Step<'_>) -> Result<(), Error> {
        if step.is_captured() {
            self.stack.place(step)?;
        }
        let y = MatrixMut::new(&mut self.y, step.num_tokens(), FEATURES + self.num_rows)?;
        layer.add_stacked_delta(step, &self.stack, y)
    }

    /// y without v.
    pub fn y(&self) -> Vec<bf16> {
        elements_of(&self.y).chunks(FEATURES + self.num_rows).flat_map(|row| row[..FEATURES].to_vec()).collect()
    }
}

/// Streams of one device.
#[derive(Clone)]
pub struct Backend {
    streams: Arc<[Gpu; STREAMS]>,
    trainer: Readback,
}

impl Backend {
    pub fn new() -> Self {
        let first = Gpu::new();
        let second = Gpu::in_context(Arc::clone(&first.context));
        let trainer = Readback::new(&Gpu::in_context(Arc::clone(&first.context)).queue).unwrap();
        Self { streams: Arc::new([first, second]), trainer }
    }

    pub fn queue(&self, stream: usize) -> &Queue {
        &self.streams[stream].queue
    }

    pub fn table(&self, model: &Model, dtype: DType, capacity: Capacity, bytes: usize) -> Result<WeightTable, Error> {
        WeightTable::new(self.queue(0), model, dtype, capacity, bytes)
    }

    pub fn pool(&self, model: &Model, dtype: DType, capacity: Capacity, config: PoolConfig) -> AdapterPool {
        AdapterPool::new(self.queue(0), model, dtype, capacity, config).unwrap()
    }

    pub fn add_stream(&self, pool: &mut AdapterPool, stream: usize) -> StreamId {
        pool.add_queue(self.queue(stream)).unwrap()
    }

    pub fn routing(&self, stream: usize, capacity: Capacity) -> Result<Routing, Error> {
        Routing::new(self.queue(stream), capacity, 2)
    }

    /// Routes a batch of the host, or one whose slots have these numbers in device memory.
    pub fn update<'a>(
        &self,
        routing: &'a mut Routing,
        batch: &Batch<'_>,
        numbers: Option<&[i32]>,
    ) -> Result<RoutedBatch<'a>, Error> {
        let Some(numbers) = numbers else { return routing.update(batch) };
        let numbers = self.elements(0, numbers);
        routing.update_on_device(&numbers, None)
    }

    pub fn grouping(&self, capacity: RouteCapacity) -> Result<Grouping, Error> {
        Grouping::new(self.queue(0), capacity)
    }

    /// A workspace for layers of the table's model.
    pub fn workspace(&self, stream: usize, weights: &WeightTable) -> Workspace {
        Workspace::with_bytes(self.queue(stream), weights.workspace_bytes().unwrap()).unwrap()
    }

    pub fn workspace_of(&self, [mailbox, partials]: [usize; 2]) -> Result<Workspace, Error> {
        let mut bytes = WorkspaceBytes::default();
        (bytes.mailbox, bytes.partials) = (mailbox, partials);
        Workspace::with_bytes(self.queue(0), bytes)
    }

    pub fn elements<T: DeviceRepr + ValidAsZeroBits>(&self, stream: usize, elements: &[T]) -> Elements<T> {
        let mut buffer = Buffer::zeros(self.queue(stream), elements.len()).unwrap();
        if !elements.is_empty() {
            buffer.write(elements).unwrap();
        }
        buffer
    }

    pub fn tensors(&self, tensors: Tensors) -> Tensors {
        tensors.into_iter().map(|(name, tensor)| (name, on_device(&self.trainer, &tensor))).collect()
    }

    pub fn synchronize(&self) -> Result<(), Error> {
        Ok(self.queue(0).stream().synchronize()?)
    }
}

pub fn elements_of<T: Value>(elements: &Elements<T>) -> Vec<T> {
    let mut values = vec![T::default(); elements.len()];
    if !values.is_empty() {
        elements.read(&mut values).unwrap();
    }
    values
}

pub fn part<T>(elements: &Elements<T>, first: usize) -> View<'_, T> {
    elements.slice(first..elements.len())
}

pub fn part_mut<T>(elements: &mut Elements<T>, first: usize) -> ViewMut<'_, T> {
    elements.slice_mut(first..elements.len())
}

fn launch_error<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a LaunchError> {
    match error.downcast_ref() {
        Some(LoadError::Device(error)) => Some(error),
        _ => error.downcast_ref(),
    }
}

/// Whether the error came from the driver or a kernel, so that a call passed a check that it should not have.
pub fn is_of_device(error: &(dyn std::error::Error + 'static)) -> bool {
    match launch_error(error) {
        Some(LaunchError::Driver(error)) => error.0 != CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        Some(LaunchError::Kernel { .. }) => true,
        _ => false,
    }
}

/// The error of operands that a launch has returned.
pub fn operand_error(error: &(dyn std::error::Error + 'static)) -> Option<OperandError> {
    match launch_error(error)? {
        LaunchError::Operand(error) => Some(error.clone()),
        LaunchError::Plan(error) => Some(OperandError::from(error.clone())),
        _ => None,
    }
}

pub fn write<T: DeviceRepr>(to: &mut Elements<T>, elements: &[T]) {
    to.write(elements).unwrap();
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
