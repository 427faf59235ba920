//! A workload on the device, with so many sets of its adapters that no cache holds the next one.

use std::{collections::BTreeMap, iter::repeat_n, sync::Arc};

use aril::{
    DType,
    cuda::{LoraEmbedding, LoraLinear, Workspace, raw},
    model::{LinearId, Model},
    plan::{ForwardPlan, WorkspaceBytes},
};
use half::bf16;

use crate::{
    Result,
    data::{Data, LARGE, SetLayout, checked_tokens},
    device::{Gpu, Graph, Memory},
    report::median,
    workload::{COLD_BYTES, Operation, Suite, Workload},
};

const MAX_SETS: usize = 1024;

/// The largest relative error of the deltas of a workload.
pub const MAX_ERROR: f64 = 2e-2;

/// The data of all workloads, generated once.
pub struct Stage {
    pub gpu: Gpu,
    pub data: Arc<Data>,
    pub weights: Memory,
    pub inputs: Memory,
    bases: Memory,
    pub y: Memory,
}

/// The part of the stage that a workload needs, in elements.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room {
    pub weights: usize,
    pub inputs: usize,
    pub y: usize,
}

impl Room {
    /// For a workload's layer with all sets of its adapters.
    pub fn new(workload: &Workload) -> Self {
        Self {
            weights: weight_elems(workload),
            inputs: workload.num_tokens() * workload.in_features,
            y: workload.num_tokens() * workload.out_features(),
        }
    }

    fn max(self, other: Self) -> Self {
        Self { weights: self.weights.max(other.weights), inputs: self.inputs.max(other.inputs), y: self.y.max(other.y) }
    }
}

impl Stage {
    /// Makes room for the largest.
    pub fn new(rooms: impl IntoIterator<Item = Room>) -> Result<Self> {
        Self::with(Gpu::new()?, Arc::new(Data::new(LARGE)), rooms)
    }

    /// Another stage on the same stream, with memory of its own.
    pub fn beside(&self, rooms: impl IntoIterator<Item = Room>) -> Result<Self> {
        Self::with(self.gpu.clone(), Arc::clone(&self.data), rooms)
    }

    fn with(gpu: Gpu, data: Arc<Data>, rooms: impl IntoIterator<Item = Room>) -> Result<Self> {
        let room = rooms.into_iter().fold(Room::default(), Room::max);
        let weights = gpu.fill(&data.weights, room.weights)?;
        let inputs = gpu.fill(&data.inputs, room.inputs)?;
        let bases = gpu.fill(&data.bases, room.y)?;
        let y = gpu.alloc(elem_bytes(room.y))?;
        Ok(Self { gpu, data, weights, inputs, bases, y })
    }

    /// Restores the `y` that an operation adds to.
    pub fn reset(&self, elems: usize) -> Result<()> {
        self.gpu.copy(self.y.address, self.bases.address, elem_bytes(elems))
    }
}

/// The size of a workload's sets of adapters.
pub fn weight_elems(workload: &Workload) -> usize {
    num_cold_sets(workload) * SetLayout::new(workload).elems
}

fn num_cold_sets(workload: &Workload) -> usize {
    COLD_BYTES.div_ceil(workload.bytes().weights.max(1)).min(MAX_SETS)
}

pub fn elem_bytes(elems: usize) -> usize {
    elems * size_of::<bf16>()
}

/// The most tokens of a batch for which `silu_mul` is not meant.
const MOST_TOKENS_APART: usize = 512;

/// The operation behind a layer of gate and up: `silu(gate) · up`.
struct Consumer {
    /// A batch of base tokens.
    base_batch: raw::RoutedBatch,
    _routing: raw::Routing,
    _routing_memory: Memory,
    /// Columns of the output.
    features: usize,
    out: Memory,
}

/// A workload's layer with `num_sets` sets of adapters.
pub struct Layer<'a> {
    stage: &'a Stage,
    workload: &'a Workload,
    model: Model,
    kernel: Kernel,
    workspace: Workspace,
    batch: raw::RoutedBatch,
    routing: raw::Routing,
    _routing_memory: Memory,
    consumer: Option<Consumer>,
    tables: Memory,
    layout: SetLayout,
    num_sets: usize,
}

/// The operation, with the operands that only it has.
enum Kernel {
    Embedding { embedding: LoraEmbedding, ids: Memory },
    Linear { linear: LoraLinear, id: LinearId },
}

/// A stack of a set's adapters.
pub struct Stacked {
    stack: raw::Stack,
    _memory: Memory,
}

/// Times of one operation, in µs.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Times {
    /// Times one of the `count` operations of a graph.
    pub fn of(gpu: &Gpu, graph: &Graph, count: usize, replays: usize) -> Result<Self> {
        let mut us = gpu.time(graph, replays)?;
        us.iter_mut().for_each(|us| *us /= count as f64);
        let median = median(&mut us);
        Ok(Self { median, min: us[0], max: us[us.len() - 1] })
    }
}

impl<'a> Layer<'a> {
    pub fn new(stage: &'a Stage, workload: &'a Workload) -> Result<Self> {
        let gpu = &stage.gpu;
        let (model, kernel) = Kernel::new(gpu, workload)?;
        let workspace = Workspace::with_bytes(&gpu.queue()?, kernel.workspace_bytes(&model))?;

        let (layout, num_sets) = (SetLayout::new(workload), num_cold_sets(workload));
        if elem_bytes(weight_elems(workload)) > stage.weights.bytes {
            return Err("the stage was made for other workloads".into());
        }
        let ranks = workload.ranks.iter().flat_map(|&rank| repeat_n(i32::try_from(rank), workload.out_slices.len()));
        let ranks = ranks.collect::<std::result::Result<Vec<i32>, _>>()?;
        let scaling = workload.scaling();
        let at = |elem: usize| stage.weights.address + elem_bytes(elem) as u64;
        let mut tables = Vec::with_capacity(num_sets * layout.factors.len());
        for set in (0..num_sets).map(|set| set * layout.elems) {
            let descriptors = layout.factors.iter().zip(&ranks);
            tables.extend(descriptors.map(|(&[a, b], &rank)| raw::Descriptor {
                a: at(set + a),
                b: at(set + b),
                rank,
                scaling,
            }));
        }
        let tables = gpu.upload(&tables)?;

        let (routing, routing_memory, batch) = route(gpu, workload, &workload.slots)?;
        let consumer = Consumer::new(gpu, workload)?;
        Ok(Self {
            stage,
            workload,
            model,
            kernel,
            workspace,
            batch,
            routing,
            _routing_memory: routing_memory,
            consumer,
            tables,
            layout,
            num_sets,
        })
    }

    pub fn num_sets(&self) -> usize {
        self.num_sets
    }

    /// The plan, for a linear layer.
    pub fn plan(&self) -> Option<String> {
        match &self.kernel {
            Kernel::Embedding { .. } => None,
            Kernel::Linear { linear, .. } => Some(linear.plan().to_string()),
        }
    }

    /// Enqueues the operation with the adapters of a set.
    pub fn add_delta(&self, set: usize) -> Result<()> {
        self.add_delta_to(self.workload.num_tokens(), self.batch, set)
    }

    /// Adds to a batch without tokens: everything that `add_delta` costs the host, except the launches.
    pub fn add_no_delta(&self) -> Result<()> {
        self.add_delta_to(0, self.routing.capture_batch(0)?, 0)
    }

    fn add_delta_to(&self, tokens: usize, batch: raw::RoutedBatch, set: usize) -> Result<()> {
        let (x, y) = (self.x(tokens), self.y(tokens));
        let step = self.step(set, batch, self.stage.gpu.raw_stream());
        match &self.kernel {
            Kernel::Embedding { embedding, ids } => {
                // SAFETY: all of it is this type's or the stage's, used on this stream only, and outlives the graphs
                // made here.
                unsafe { embedding.add_delta_raw(&step, ids.address, y) }?;
            }
            Kernel::Linear { linear, .. } => {
                // SAFETY: as above.
                unsafe { linear.add_delta_raw(&step, x, y) }?;
            }
        }
        Ok(())
    }

    /// Enqueues a linear layer's operation that overwrites `y`.
    pub fn write_delta(&self, set: usize) -> Result<()> {
        let num_tokens = self.workload.num_tokens();
        let (x, y, step) =
            (self.x(num_tokens), self.y(num_tokens), self.step(set, self.batch, self.stage.gpu.raw_stream()));
        // SAFETY: as above.
        Ok(unsafe { self.linear()?.write_delta_raw(&step, x, y) }?)
    }

    /// The fused linear of the layer, with base weights `[out, in]` at that address.
    pub fn fused(&self, base: u64) -> Result<raw::FusedLinear> {
        let Workload { in_features, out_slices, .. } = self.workload;
        let mut row = 0;
        let slices: Vec<_> = out_slices
            .iter()
            .map(|&rows| {
                let slice = base + elem_bytes(row * in_features) as u64;
                row += rows;
                raw::MatrixRef::new::<bf16>(slice, rows, *in_features)
            })
            .collect();
        let Kernel::Linear { id, .. } = self.kernel else {
            return Err("an embedding has no base weights".into());
        };
        let capacity = self.workload.capacity();
        Ok(raw::FusedLinear::new(&self.stage.gpu.kernels, &self.model, id, DType::BF16, capacity, &slices)?)
    }

    /// Enqueues the base product and the deltas in one launch. `y` is overwritten.
    pub fn forward(&self, fused: &raw::FusedLinear, set: usize) -> Result<()> {
        let num_tokens = self.workload.num_tokens();
        let (x, y, step) =
            (self.x(num_tokens), self.y(num_tokens), self.step(set, self.batch, self.stage.gpu.raw_stream()));
        // SAFETY: as above; the base weights are the stage's.
        Ok(unsafe { fused.forward(&step, x, y) }?)
    }

    /// A stack of all of a set's adapters, whose rows of the base weight begin at that address.
    pub fn stacked(&self, rows: u64, set: usize) -> Result<Stacked> {
        let (gpu, Workload { in_features, .. }) = (&self.stage.gpu, self.workload);
        let Kernel::Linear { id, .. } = self.kernel else {
            return Err("an embedding has no base weights".into());
        };
        let (positions, rank) = (self.workload.num_slots(), self.workload.max_rank());
        let memory = gpu.alloc(raw::Stack::device_bytes(&self.model, positions, 1))?;
        let rows = raw::MatrixMut::new::<bf16>(rows, stacked_rows(self.workload), *in_features);
        let (size, stream) = ((positions, rank), gpu.raw_stream());
        // SAFETY: the memory is this object's and the stage's, and used on this stream only.
        let stack = unsafe {
            raw::Stack::new(&gpu.kernels, &self.model, DType::BF16, size, &[(id, rows)], memory.region(), stream)
        }?;
        for slot in 0..positions {
            // SAFETY: as above.
            unsafe { stack.set(slot, &self.table(set), Some(slot), stream) }?;
        }
        Ok(Stacked { stack, _memory: memory })
    }

    /// Enqueues the expand of what the GEMM has computed by a set's stack.
    pub fn add_stacked(&self, stacked: &Stacked, set: usize) -> Result<()> {
        let cols = self.workload.out_features() + stacked_rows(self.workload);
        let y = raw::MatrixMut::new::<bf16>(self.stage.y.address, self.workload.num_tokens(), cols);
        let step = self.step(set, self.batch, self.stage.gpu.raw_stream());
        // SAFETY: as above.
        Ok(unsafe { self.linear()?.add_stacked_delta_raw(&step, &stacked.stack, y) }?)
    }

    /// Enqueues shrink of a linear layer.
    pub fn shrink(&self, set: usize) -> Result<()> {
        let (x, step) = (self.x(self.workload.num_tokens()), self.step(set, self.batch, self.stage.gpu.raw_stream()));
        // SAFETY: as above.
        Ok(unsafe { self.linear()?.shrink_raw(&step, x) }?)
    }

    /// Enqueues the operation behind the layer with its expand, or alone on a batch of base tokens.
    pub fn consume(&self, set: usize, is_base: bool) -> Result<()> {
        let (consumer, num_tokens) = (self.consumer()?, self.workload.num_tokens());
        let batch = if is_base { consumer.base_batch } else { self.batch };
        let step = self.step(set, batch, self.stage.gpu.raw_stream());
        let y = raw::MatrixRef::new::<bf16>(self.stage.y.address, num_tokens, self.workload.out_features());
        let out = raw::MatrixMut::new::<bf16>(consumer.out.address, num_tokens, consumer.features);
        // SAFETY: as above.
        Ok(unsafe { self.linear()?.silu_mul_raw(&step, y, out) }?)
    }

    /// Whether `consume` supports the layer.
    pub fn is_consumed(&self) -> bool {
        self.consumer.is_some()
    }

    /// A token's row of the output of `consume`.
    pub fn consumed_row(&self, token: usize) -> Result<Vec<bf16>> {
        let Consumer { out, features, .. } = self.consumer()?;
        self.stage.gpu.read(out.address + elem_bytes(token * features) as u64, *features)
    }

    /// What `consume` makes of a token's row of y, computed here.
    pub fn expected_row(&self, token: usize) -> Result<Vec<f64>> {
        let y: Vec<f64> = self.row(token)?.into_iter().map(f64::from).collect();
        let (gate, up) = y.split_at(self.consumer()?.features);
        Ok(gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect())
    }

    fn consumer(&self) -> Result<&Consumer> {
        self.consumer.as_ref().ok_or_else(|| "no operation behind the layer is fused with its expand".into())
    }

    fn linear(&self) -> Result<&LoraLinear> {
        match &self.kernel {
            Kernel::Embedding { .. } => Err("an embedding is one kernel".into()),
            Kernel::Linear { linear, .. } => Ok(linear),
        }
    }

    fn step(&self, set: usize, batch: raw::RoutedBatch, stream: raw::Stream) -> raw::Step {
        raw::Step::new(self.table(set), batch, self.workspace.raw(), stream)
    }

    fn x(&self, tokens: usize) -> raw::MatrixRef {
        raw::MatrixRef::new::<bf16>(self.stage.inputs.address, tokens, self.workload.in_features)
    }

    fn y(&self, tokens: usize) -> raw::MatrixMut {
        raw::MatrixMut::new::<bf16>(self.stage.y.address, tokens, self.workload.out_features())
    }

    fn table(&self, set: usize) -> raw::Table {
        let Self { workload, model, layout, .. } = self;
        let table_bytes = layout.factors.len() * size_of::<raw::Descriptor>();
        let table = self.tables.address + (set % self.num_sets * table_bytes) as u64;
        raw::Table::new(model, DType::BF16, table, workload.num_slots(), workload.max_rank())
    }

    /// Runs once and returns the relative error of the deltas of some tokens, over all slices. Fails if a row of a base
    /// token changed.
    pub fn check(&self) -> Result<f64> {
        let Self { stage: Stage { data, .. }, workload: Workload { slots, .. }, .. } = self;
        let cols = self.workload.out_features();
        self.stage.reset(slots.len() * cols)?;
        let set = self.num_sets - 1;
        self.add_delta(set)?;
        let row = |token| self.row(token);
        for token in (0..slots.len()).filter(|&token| slots[token] < 0) {
            if !row(token)?.into_iter().eq(data.bases.range(token * cols, cols)) {
                return Err(format!("token {token} has no adapter, but its output was changed").into());
            }
        }
        let rows = checked_tokens(slots).into_iter().map(|token| Ok((token, row(token)?)));
        Ok(data.error(self.workload, set * self.layout.elems, &rows.collect::<Result<BTreeMap<_, _>>>()?))
    }

    /// A token's row of y.
    pub fn row(&self, token: usize) -> Result<Vec<bf16>> {
        self.strided_row(token, self.workload.out_features())
    }

    /// The same of rows that are that many elements apart.
    pub fn strided_row(&self, token: usize, stride: usize) -> Result<Vec<bf16>> {
        self.stage.gpu.read(self.stage.y.address + elem_bytes(token * stride) as u64, self.workload.out_features())
    }

    /// Captures `count` operations, with the sets in turn if `cold`, else with the first one each time.
    pub fn capture(&self, count: usize, cold: bool) -> Result<Graph> {
        self.stage.gpu.capture(|| (0..count).try_for_each(|i| self.add_delta(if cold { i } else { 0 })))
    }

    /// Times `count` operations in a graph.
    pub fn time(&self, count: usize, cold: bool, replays: usize) -> Result<Times> {
        Times::of(&self.stage.gpu, &self.capture(count, cold)?, count, replays)
    }

    /// The number of operations for a graph: each of `num_sets` at least once, and enough to time.
    pub fn repetitions(&self, num_sets: usize) -> Result<usize> {
        let eager = self.stage.gpu.time_eager(|| self.add_delta(0))?;
        let us = (self.workload.bytes().total() as f64 / 2.5e6 + 4.0).max(eager - 150.0);
        Ok(repetitions(num_sets, us))
    }
}

impl Consumer {
    fn new(gpu: &Gpu, workload: &Workload) -> Result<Option<Self>> {
        let features = match workload.out_slices[..] {
            [gate, up] if workload.suite == Suite::Layer && gate == up => gate,
            _ => return Ok(None),
        };
        let num_tokens = workload.num_tokens();
        if num_tokens <= MOST_TOKENS_APART {
            return Ok(None);
        }
        let (routing, routing_memory, base_batch) = route(gpu, workload, &vec![-1; num_tokens])?;
        let out = gpu.alloc(elem_bytes(num_tokens * features))?;
        Ok(Some(Self { base_batch, _routing: routing, _routing_memory: routing_memory, features, out }))
    }
}

/// Routes a batch of these slots.
fn route(gpu: &Gpu, workload: &Workload, slots: &[i32]) -> Result<(raw::Routing, Memory, raw::RoutedBatch)> {
    let capacity = workload.capacity();
    let memory = gpu.alloc(raw::Routing::device_bytes(capacity)?)?;
    // SAFETY: the memory lives as long as the routing, and is its own.
    let mut routing = unsafe { raw::Routing::new(&gpu.kernels, capacity, 1, memory.region()) }?;
    // SAFETY: the stream is alive and not capturing.
    let batch = unsafe { routing.update(slots, None, gpu.raw_stream()) }?;
    Ok((routing, memory, batch))
}

impl Kernel {
    fn new(gpu: &Gpu, workload: &Workload) -> Result<(Model, Self)> {
        let capacity = workload.capacity();
        match workload.operation {
            Operation::Embedding => {
                let (model, id) = workload.embedding_model()?;
                let embedding = LoraEmbedding::for_model(&gpu.kernels, &model, id, DType::BF16, capacity)?;
                let ids = (0..workload.num_tokens()).map(|token| i32::try_from(workload.token_id(token)));
                let ids = gpu.upload(&ids.collect::<std::result::Result<Vec<_>, _>>()?)?;
                Ok((model, Self::Embedding { embedding, ids }))
            }
            Operation::Linear => {
                let (model, id) = workload.linear_model()?;
                let linear = LoraLinear::for_model(&gpu.kernels, &model, id, DType::BF16, capacity)?;
                Ok((model, Self::Linear { linear, id }))
            }
        }
    }

    /// Enough for all operations of the layer.
    fn workspace_bytes(&self, model: &Model) -> WorkspaceBytes {
        match self {
            Self::Embedding { .. } => WorkspaceBytes::default(),
            Self::Linear { linear, id } => {
                let fused = ForwardPlan::new(&model[*id], DType::BF16, linear.plan().capacity());
                linear
                    .plan()
                    .workspace_bytes()
                    .max(fused.map_or(WorkspaceBytes::default(), |plan| plan.workspace_bytes()))
            }
        }
    }
}

/// Rows of a stack of all adapters of a workload.
pub fn stacked_rows(workload: &Workload) -> usize {
    workload.out_slices.len() * workload.num_slots() * workload.max_rank().next_multiple_of(8)
}

/// The number of operations for a graph: each of `num_sets` at least once, and enough to time if one takes `us`.
pub fn repetitions(num_sets: usize, us: f64) -> usize {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
    let wanted = (600.0 / us.max(1.0)).ceil().clamp(4.0, 48.0) as usize;
    wanted.div_ceil(num_sets) * num_sets
}
