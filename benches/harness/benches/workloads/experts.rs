//! Layers of experts: the grouping of the routes, gate_up and down, captured in CUDA graphs that use sets of adapters
//! and choices of the router in turn. Suite `moe-own` is also timed with fused activation and combine.

use std::{cell::RefCell, collections::BTreeMap};

use aril::{
    DType,
    cuda::{LoraExperts, Workspace, raw},
    model::{Activation, Model},
};
use half::bf16;

use aril_bench::{
    Result,
    data::checked_tokens,
    device::{Gpu, Memory},
    experts::{DOWN, ExpertsLayout, ExpertsWorkload, GATE, Shape, Turns, UP},
    layer::{MAX_ERROR, Room, Stage, Times, elem_bytes},
    results::{Entry, Info, PEER, Results},
    workload::Suite,
};

/// Replays of the operation, and of its parts and variants.
const REPLAYS: usize = 12;
const OTHER_REPLAYS: usize = 8;

/// What a workload takes of the stage.
pub(crate) fn room(workload: &ExpertsWorkload) -> Room {
    let [inputs, y] = workload.matrix_elems();
    let layout = ExpertsLayout::new(workload);
    // Padding must be zero, and the stage's weights are not: workloads with padding have weights of their own.
    let weights = if layout.padding(workload).is_empty() { workload.turns().sets * layout.elems } else { 0 };
    Room { weights, inputs, y }
}

/// Checks a workload's operations and, if they are right, times them, with weights in the cache too if `warm`.
pub(crate) fn measure(stage: &Stage, workload: &ExpertsWorkload, warm: bool, results: &mut Results) -> Result<()> {
    let layer = ExpertsLayer::new(stage, workload)?;
    let Turns { sets, choices } = layer.turns;
    let (bytes, flops) = (workload.bytes(choices), workload.flops());
    let info = Info { bytes, flops, sets, topk_reps: Some(choices) };
    results.info.insert(workload.id.clone(), info);
    let errors = [layer.check(0)?, layer.check(choices - 1)?].concat();
    if errors.iter().any(|err| err.is_nan() || *err >= MAX_ERROR) {
        results.fail(&workload.id, "wrong", format!("relative errors {errors:.3?}"));
        return Ok(());
    }
    let err = errors.into_iter().fold(0.0, f64::max);
    let note = Some(layer.experts.plan().to_string());
    let mut entry = Entry { id: workload.id.clone(), peer: PEER.to_owned(), err, note, ..Entry::default() };
    let reps = layer.repetitions(bytes.total())?;
    let cold = layer.time(reps, REPLAYS, |i| layer.run(i))?;
    entry.reps = Some(reps);
    (entry.cold_us, entry.cold_min, entry.cold_max) = (Some(cold.median), Some(cold.min), Some(cold.max));
    entry.gate_up_us = Some(layer.time(reps, OTHER_REPLAYS, |i| layer.run_gate_up(i))?.median);
    if workload.suite == Suite::Moe {
        entry.write_us = Some(layer.time(reps, OTHER_REPLAYS, |i| layer.run_write(i))?.median);
    }
    if workload.suite == Suite::MoeOwn {
        let [inter, tokens] = [workload.num_routes() * workload.shape.inter, workload.num_tokens()];
        let out = stage.gpu.alloc(elem_bytes(inter.max(tokens * workload.shape.hidden)))?;
        entry.fused_us = Some(layer.time(reps, OTHER_REPLAYS, |i| layer.run_fused(i, &out))?.median);
    }
    if warm {
        entry.warm_us = Some(layer.time((reps / 2).max(4), OTHER_REPLAYS, |_| layer.run(0))?.median);
    }
    results.moe.push(entry);
    Ok(())
}

/// A workload's layer on the device.
struct ExpertsLayer<'a> {
    stage: &'a Stage,
    workload: &'a ExpertsWorkload,
    turns: Turns,
    layout: ExpertsLayout,
    model: Model,
    experts: LoraExperts,
    /// Weights of its own, for workloads with padding.
    _weights: Option<Memory>,
    tables: Memory,
    ids: Memory,
    batch: raw::RoutedBatch,
    _routing: (raw::Routing, Memory),
    grouping: RefCell<raw::Grouping>,
    _grouping_memory: Memory,
    workspace: Workspace,
}

impl<'a> ExpertsLayer<'a> {
    fn new(stage: &'a Stage, workload: &'a ExpertsWorkload) -> Result<Self> {
        let (gpu, (model, id)) = (&stage.gpu, workload.model()?);
        let (turns, layout, capacity) = (workload.turns(), ExpertsLayout::new(workload), workload.capacity());
        let experts = LoraExperts::for_model(&gpu.kernels, &model, id, DType::BF16, capacity)?;
        let workspace = Workspace::with_bytes(&gpu.queue()?, experts.plan().workspace_bytes())?;

        let own_weights = own_weights(stage, workload, &layout, turns.sets)?;
        let weights = own_weights.as_ref().unwrap_or(&stage.weights);
        if elem_bytes(turns.sets * layout.elems) > weights.bytes {
            return Err("the stage was made for other workloads".into());
        }
        let (gate_up, down, num_slots) = (model[id].gate_up(), model[id].down(), workload.adapters.len());
        let mut tables = vec![raw::Descriptor::default(); turns.sets * num_slots * model.num_entries()];
        for (row, descriptors) in tables.chunks_mut(model.num_entries()).enumerate() {
            let (set, slot) = (row / num_slots * layout.elems, row % num_slots);
            let rank = i32::try_from(workload.adapters[slot].rank)?;
            let at = |elem: usize| weights.address + elem_bytes(set + elem) as u64;
            for (projection, slice, module) in [(gate_up, 0, GATE), (gate_up, 1, UP), (down, 0, DOWN)] {
                let factors = &layout.factors[slot][module];
                for (expert, factors) in factors.iter().enumerate() {
                    let [a, b] = factors.map(at);
                    descriptors[projection.expert_entry(expert) + slice] = raw::Descriptor { a, b, rank, scaling: 1.0 };
                }
                let [a, b] = match (workload.adapters[slot].shared_outer, factors[0].map(at)) {
                    (true, [_, b]) if module == DOWN => [0, b],
                    (true, [a, _]) => [a, 0],
                    (false, _) => [0, 0],
                };
                descriptors[projection.shared_entry() + slice] = raw::Descriptor { a, b, rank, scaling: 1.0 };
            }
        }
        let tables = gpu.upload(&tables)?;
        let ids = gpu.upload(&(0..turns.choices).flat_map(|choice| workload.chosen(choice)).collect::<Vec<_>>())?;

        let memory = gpu.alloc(raw::Routing::device_bytes(capacity)?)?;
        // SAFETY: the memory lives as long as the routing, and is its own.
        let mut routing = unsafe { raw::Routing::new(&gpu.kernels, capacity, 1, memory.region()) }?;
        // SAFETY: the stream is alive and not capturing.
        let batch = unsafe { routing.update(&workload.slots, None, gpu.raw_stream()) }?;

        let routes = experts.plan().routes();
        let grouping_memory = zeros(gpu, raw::Grouping::device_bytes(routes)?)?;
        // SAFETY: the memory is zero, lives as long as the grouping, and is its own.
        let grouping = unsafe { raw::Grouping::new(&gpu.kernels, routes, grouping_memory.region()) }?;
        Ok(Self {
            stage,
            workload,
            turns,
            layout,
            model,
            experts,
            _weights: own_weights,
            tables,
            ids,
            batch,
            _routing: (routing, memory),
            grouping: RefCell::new(grouping),
            _grouping_memory: grouping_memory,
            workspace,
        })
    }

    /// Enqueues the `i`th operation.
    fn run(&self, i: usize) -> Result<()> {
        let mut routes = self.group(i)?;
        self.add_gate_up_delta(i, &mut routes)?;
        self.add_down_delta(i, &mut routes)
    }

    /// Enqueues the `i`th operation, which writes the deltas over `y`. Its results are checked by the GPU tests.
    fn run_write(&self, i: usize) -> Result<()> {
        let mut routes = self.group(i)?;
        let (step, [gate_up, down]) = (self.step(i), self.operands(&routes));
        // SAFETY: as below.
        unsafe { self.experts.write_gate_up_delta_raw(&step, &mut routes, gate_up.0, gate_up.1) }?;
        // SAFETY: as below.
        Ok(unsafe { self.experts.write_down_delta_raw(&step, &mut routes, down.0, down.1) }?)
    }

    /// Enqueues the grouping and gate_up of the `i`th operation.
    fn run_gate_up(&self, i: usize) -> Result<()> {
        self.add_gate_up_delta(i, &mut self.group(i)?)
    }

    /// Enqueues the `i`th operation with fused activation and combine, which write to `out`.
    fn run_fused(&self, i: usize, out: &Memory) -> Result<()> {
        let (Shape { hidden, inter, .. }, tokens) = (self.workload.shape, self.workload.num_tokens());
        let (mut routes, step) = (self.group(i)?, self.step(i));
        let num_routes = routes.num_routes();
        let [of_down_x, of_down_y] = self.workload.of_down().map(|elems| elem_bytes(elems) as u64);
        let [inputs, bases] = [self.stage.inputs.address, self.stage.y.address];
        let x = raw::MatrixRef::new::<bf16>(inputs, tokens, hidden);
        let y = raw::MatrixRef::new::<bf16>(bases, num_routes, 2 * inter);
        let activated = raw::MatrixMut::new::<bf16>(out.address, num_routes, inter);
        // SAFETY: as below, and `out` is large enough and lives as long.
        unsafe { self.experts.activate_raw(&step, &mut routes, x, y, activated, Activation::Silu) }?;
        let x = raw::MatrixRef::new::<bf16>(inputs + of_down_x, num_routes, inter);
        let y = raw::MatrixRef::new::<bf16>(bases + of_down_y, num_routes, hidden);
        let combined = raw::MatrixMut::new::<bf16>(out.address, tokens, hidden);
        // SAFETY: as above.
        Ok(unsafe { self.experts.combine_raw(&step, &mut routes, x, y, combined) }?)
    }

    fn group(&self, i: usize) -> Result<raw::GroupedRoutes> {
        let choice = i % self.turns.choices * self.workload.num_routes() * size_of::<i32>();
        let top_k = raw::TopK::new(self.ids.address + choice as u64, self.workload.shape.top_k);
        let stream = self.stage.gpu.raw_stream();
        // SAFETY: all of it is this type's, used on this stream only, and outlives the graphs made here.
        Ok(unsafe { self.grouping.borrow_mut().group(self.batch, top_k, stream) }?)
    }

    fn add_gate_up_delta(&self, i: usize, routes: &mut raw::GroupedRoutes) -> Result<()> {
        let [(x, y), _] = self.operands(routes);
        // SAFETY: as above, and of the stage; each route has a row of its own.
        Ok(unsafe { self.experts.add_gate_up_delta_raw(&self.step(i), routes, x, y) }?)
    }

    fn add_down_delta(&self, i: usize, routes: &mut raw::GroupedRoutes) -> Result<()> {
        let [_, (x, y)] = self.operands(routes);
        // SAFETY: as above.
        Ok(unsafe { self.experts.add_down_delta_raw(&self.step(i), routes, x, y) }?)
    }

    /// `x` and `y` of gate_up, and of down.
    fn operands(&self, routes: &raw::GroupedRoutes) -> [(raw::MatrixRef, raw::MatrixMut); 2] {
        let (Shape { hidden, inter, .. }, tokens) = (self.workload.shape, self.workload.num_tokens());
        let [down_x, down_y] = self.workload.of_down().map(|elems| elem_bytes(elems) as u64);
        let [inputs, y] = [self.stage.inputs.address, self.stage.y.address];
        let matrix = |x: u64, rows: usize, cols: usize| raw::MatrixRef::new::<bf16>(inputs + x, rows, cols);
        let matrix_mut = |at: u64, cols: usize| raw::MatrixMut::new::<bf16>(y + at, routes.num_routes(), cols);
        [
            (matrix(0, tokens, hidden), matrix_mut(0, 2 * inter)),
            (matrix(down_x, routes.num_routes(), inter), matrix_mut(down_y, hidden)),
        ]
    }

    fn step(&self, i: usize) -> raw::Step {
        let Self { stage, workload, model, .. } = self;
        let num_slots = workload.adapters.len();
        let table = i % self.turns.sets * num_slots * model.num_entries() * size_of::<raw::Descriptor>();
        let table = self.tables.address + table as u64;
        let table = raw::Table::new(model, DType::BF16, table, num_slots, workload.max_rank());
        raw::Step::new(table, self.batch, self.workspace.raw(), stage.gpu.raw_stream())
    }

    /// Times one of `count` operations in a graph.
    fn time(&self, count: usize, replays: usize, operation: impl Fn(usize) -> Result<()>) -> Result<Times> {
        let gpu = &self.stage.gpu;
        let graph = gpu.capture(|| (0..count).try_for_each(operation))?;
        Times::of(gpu, &graph, count, replays)
    }

    /// Runs the `i`th operation alone and returns the relative errors of gate_up and of down, over all routes of some
    /// tokens.
    fn check(&self, i: usize) -> Result<[f64; 2]> {
        let Self { stage: Stage { gpu, data, y, .. }, workload, .. } = self;
        let Shape { hidden, inter, top_k, .. } = workload.shape;
        self.stage.reset(workload.matrix_elems()[1])?;
        self.run(i)?;
        let rows = |first: usize, token: usize, cols: usize| {
            let elem = first + token * top_k * cols;
            gpu.read(y.address + elem_bytes(elem) as u64, top_k * cols)
        };
        let of_down = workload.of_down()[1];
        let rows = |token| Ok((token, [rows(0, token, 2 * inter)?, rows(of_down, token, hidden)?]));
        let got = checked_tokens(&workload.slots).into_iter().map(rows).collect::<Result<BTreeMap<_, _>>>()?;
        let (set, choice) = (i % self.turns.sets * self.layout.elems, i % self.turns.choices);
        Ok(workload.errors(data, set, &workload.chosen(choice), &got))
    }

    /// The number of operations for a graph: each set and each choice at least once, and enough to time.
    fn repetitions(&self, bytes: usize) -> Result<usize> {
        let eager = self.stage.gpu.time_eager(|| self.run(0))?;
        let us = (bytes as f64 / 2.5e6 + 10.0).max(if eager > 1500.0 { eager } else { 0.0 });
        let Turns { sets, choices } = self.turns;
        let turn = sets.max(choices);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 32")]
        let turns = ((2000.0 / us).min(32.0) / turn as f64).round_ties_even() as usize;
        Ok(turn * turns.max(1))
    }
}

/// Weights with zeros in the padding, if the factors have padding.
fn own_weights(
    stage: &Stage,
    workload: &ExpertsWorkload,
    layout: &ExpertsLayout,
    sets: usize,
) -> Result<Option<Memory>> {
    let padding = layout.padding(workload);
    if padding.is_empty() {
        return Ok(None);
    }
    let weights = stage.gpu.fill(&stage.data.weights, sets * layout.elems)?;
    for set in (0..sets).map(|set| set * layout.elems) {
        for range in &padding {
            stage.gpu.zero(weights.address + elem_bytes(set + range.start) as u64, elem_bytes(range.len()))?;
        }
    }
    Ok(Some(weights))
}

fn zeros(gpu: &Gpu, bytes: usize) -> Result<Memory> {
    let memory = gpu.alloc(bytes)?;
    gpu.zero(memory.address, bytes)?;
    Ok(memory)
}
