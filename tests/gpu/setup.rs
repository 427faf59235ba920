//! Layers whose adapters add an integer to every output, which identifies the adapter of each token.

use std::sync::Arc;

use aril::{
    DType, Slot,
    adapter::Adapter,
    cuda::{Buffer, Graph, LaunchError, LoraLinear, Matrix, MatrixMut, Routing, Step, WeightTable, Workspace},
    error::{LoadError, OperandError},
    model::Model,
    plan::Capacity,
    routing::Batch,
};
use cudarc::{
    driver::{CudaEvent, CudaFunction, CudaStream, LaunchConfig, PushKernelArg},
    nvrtc::Ptx,
};

use crate::{
    common::{
        adapters::{self, Lora},
        adding,
        case::loaded_slots,
    },
    device::Gpu,
};

pub const TOKENS: usize = 8;
pub const SLOTS: usize = 4;
pub const MAX_RANK: usize = 64;

/// Layers with as many inputs as outputs, and the operands of a step.
pub struct Setup {
    pub gpu: Gpu,
    pub weights: WeightTable,
    pub layers: Vec<LoraLinear>,
    pub features: usize,
    pub routing: Routing,
    pub workspace: Workspace,
    pub x: Buffer<f32>,
    /// `[layers, TOKENS, features]`
    pub y: Buffer<f32>,
}

impl Setup {
    /// `features` is a power of two, so that every sum is exact.
    pub fn new(num_layers: usize, features: usize, arena_bytes: usize) -> Self {
        Self::on(Gpu::new(), num_layers, features, arena_bytes)
    }

    pub fn on(gpu: Gpu, num_layers: usize, features: usize, arena_bytes: usize) -> Self {
        let (model, ids) = adding::model(num_layers, features);
        let capacity = Capacity::tokens(TOKENS).slots(SLOTS).rank(MAX_RANK);
        let weights = WeightTable::new(&gpu.queue, &model, DType::F32, capacity, arena_bytes).unwrap();
        let mut x = Buffer::zeros(&gpu.queue, TOKENS * features).unwrap();
        x.write(&vec![1.0; TOKENS * features]).unwrap();
        Self {
            layers: ids.into_iter().map(|id| LoraLinear::new(&weights, id).unwrap()).collect(),
            features,
            routing: Routing::new(&gpu.queue, capacity, 2).unwrap(),
            workspace: Workspace::new(&weights).unwrap(),
            x,
            y: Buffer::zeros(&gpu.queue, num_layers * TOKENS * features).unwrap(),
            weights,
            gpu,
        }
    }

    pub fn model(&self) -> &Model {
        self.weights.model()
    }

    pub fn adapter(&self, rank: usize, value: f32) -> Adapter {
        adding::adapter(self.layers.len(), self.features, rank, value)
    }

    pub fn load(&self, slot: usize, rank: usize, value: f32) -> Result<Slot, LoadError> {
        self.weights.load(slot, &self.adapter(rank, value).plan(self.model(), DType::F32).unwrap())
    }

    /// Enqueues an eager step on zeroed y, whose tokens have the slots of these numbers with the adapters that are
    /// there now.
    pub fn enqueue(&mut self, slots: &[i32]) {
        self.y.write(&vec![0.0; self.y.len()]).unwrap();
        self.enqueue_on_y(slots);
    }

    /// The same without zeroing y, and so without waiting.
    pub fn enqueue_on_y(&mut self, slots: &[i32]) {
        let slots = slots_of(&self.weights, slots);
        let batch = self.routing.update(&Batch::new(&slots)).unwrap();
        let mut step = self.weights.step(&batch, &mut self.workspace).unwrap();
        add_deltas(&self.layers, self.features, &mut step, &self.x, &mut self.y).unwrap();
    }

    /// What was added to every output of a token in every layer, by token.
    ///
    /// # Panics
    /// If a token's outputs differ.
    pub fn added(&self) -> [f32; TOKENS] {
        let mut y = vec![f32::NAN; self.y.len()];
        self.y.read(&mut y).unwrap();
        let rows = adding::added(&y, self.features);
        std::array::from_fn(|token| {
            let mut layers = rows[token..].iter().step_by(TOKENS);
            assert!(layers.all(|value| *value == rows[token]), "token {token} has {rows:?} in the layers");
            rows[token]
        })
    }

    /// What an eager step adds.
    pub fn step(&mut self, slots: &[i32]) -> [f32; TOKENS] {
        self.enqueue(slots);
        self.added()
    }

    /// A graph of all layers and [`TOKENS`] rows.
    pub fn capture(&mut self) -> Graph {
        let Self { weights, layers, features, routing, workspace, x, y, .. } = self;
        weights.capture(routing, TOKENS, workspace, |step| add_deltas(layers, *features, step, x, y)).unwrap()
    }

    /// What a replay of the graph adds.
    pub fn replay(&mut self, graph: &mut Graph, slots: &[i32]) -> [f32; TOKENS] {
        self.y.write(&vec![0.0; self.y.len()]).unwrap();
        loop {
            let slots = slots_of(&self.weights, slots);
            let batch = self.routing.update(&Batch::new(&slots)).unwrap();
            match self.weights.step(&batch, &mut self.workspace) {
                Ok(mut step) => graph.replay(&mut step).unwrap(),
                // Another thread has replaced the adapter since.
                Err(LaunchError::Operand(OperandError::NotLoaded { .. })) => continue,
                Err(error) => panic!("{error}"),
            }
            return self.added();
        }
    }
}

/// The slots with these numbers and the adapters that are there now. All other numbers are the base model.
pub fn slots_of(weights: &WeightTable, numbers: &[i32]) -> Vec<Slot> {
    loaded_slots(numbers, |slot| weights.get(slot))
}

/// Loads an adapter with these modules.
pub fn load(weights: &WeightTable, slot: usize, modules: &[Lora]) -> Slot {
    let adapter = adapters::adapter(modules);
    weights.load(slot, &adapter.plan(weights.model(), weights.dtype()).unwrap()).unwrap()
}

/// Loads an adapter with a module of each of two experts of these sizes.
pub fn load_experts(weights: &WeightTable, slot: usize, path: &str, [hidden, inter]: [usize; 2]) -> Slot {
    let module = |expert| Lora::linear(format!("{path}.{expert}.down_proj"), inter, hidden, 1);
    load(weights, slot, &[0, 1].map(module))
}

/// Enqueues or records the operation of every layer.
pub fn add_deltas(
    layers: &[LoraLinear],
    features: usize,
    step: &mut Step<'_>,
    x: &Buffer<f32>,
    y: &mut Buffer<f32>,
) -> Result<(), LaunchError> {
    let tokens = step.num_tokens();
    for (i, layer) in layers.iter().enumerate() {
        let first = i * TOKENS * features;
        let x = Matrix::new(x.slice(0..tokens * features), tokens, features)?;
        let y = MatrixMut::new(y.slice_mut(first..first + tokens * features), tokens, features)?;
        layer.add_delta(step, x, y)?;
    }
    Ok(())
}

/// A kernel that keeps a stream busy for a given time. It always ends, by the clock.
pub struct Spin {
    kernel: CudaFunction,
    stream: Arc<CudaStream>,
}

impl Spin {
    const PTX: &str = r"
        .version 7.0
        .target sm_80
        .address_size 64
        .visible .entry spin(.param .u64 nanoseconds)
        {
            .reg .pred %again;
            .reg .b64 %time, %start, %now, %past;
            mov.u64 %start, %globaltimer;
            ld.param.u64 %time, [nanoseconds];
        spin:
            mov.u64 %now, %globaltimer;
            sub.u64 %past, %now, %start;
            setp.lt.u64 %again, %past, %time;
            @%again bra spin;
            ret;
        }
    ";

    pub fn new(gpu: &Gpu) -> Self {
        let kernel = gpu.context.load_module(Ptx::from_src(Self::PTX)).unwrap().load_function("spin").unwrap();
        let spin = Self { kernel, stream: gpu.stream.clone() };
        // Load it and run it once: the first launch may wait for the device.
        spin.run(0);
        gpu.synchronize();
        spin
    }

    /// Enqueues the kernel and an event after it.
    pub fn run(&self, milliseconds: u64) -> CudaEvent {
        let nanoseconds = milliseconds * 1_000_000;
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the kernel has this parameter and accesses no memory.
        unsafe { self.stream.launch_builder(&self.kernel).arg(&nanoseconds).launch(config) }.unwrap();
        self.stream.record_event(None).unwrap()
    }
}
