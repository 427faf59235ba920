//! Stacks whose adapters come and go: with the stack that steps and replays get, each token has the delta of its own
//! adapter or the batch is refused. The base GEMM is the host's: it multiplies by the rows as they are on the device.

use std::{sync::Arc, time::Duration};

use aril::{
    DType, Slot,
    adapter::Adapter,
    cuda::{
        AdapterPool, Buffer, Graph, LaunchError, LoraLinear, Matrix, MatrixMut, Routing, Stack, Step, WeightTable,
        Workspace,
    },
    error::OperandError,
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    pool::{PoolConfig, PoolError, Source, StreamId},
    routing::Batch,
};
use cudarc::driver::result;
use half::bf16;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    common::{
        adapters::{self, Lora},
        small::choose,
    },
    device::Gpu,
};

const FEATURES: usize = 64;
const TOKENS: usize = 12;
const POSITIONS: usize = 3;
const RANK: usize = 16;
/// y without columns of v: gate and up.
const OUTPUTS: usize = 2 * FEATURES;

fn model() -> (Model, LinearId) {
    let mut spec = ModelSpec::new();
    let layer = Linear::new("m", Parallel::Replicated, FEATURES).slice("gate", FEATURES).slice("up", FEATURES);
    let id = spec.linear(layer).unwrap();
    (spec.shard(TpRank::SINGLE).unwrap(), id)
}

/// Adds `value` to gate and twice as much to up, where x is ones.
fn adapter(rank: usize, value: f32) -> Adapter {
    let module =
        |name: &str, value: f32| Lora::adding(format!("m.{name}"), [FEATURES; 2], rank, value).dtype(DType::BF16);
    adapters::adapter(&[module("gate", value), module("up", 2.0 * value)])
}

struct World {
    gpu: Gpu,
    weights: WeightTable,
    layer: LoraLinear,
    stack: Stack,
    /// W, whose rows are followed by those of the stack.
    w: Buffer<bf16>,
    num_rows: usize,
    routing: Routing,
    workspace: Workspace,
    y: Buffer<bf16>,
    out: Buffer<bf16>,
}

impl World {
    fn new(gpu: Gpu, weights: &WeightTable, id: LinearId) -> Self {
        let layer = LoraLinear::new(weights, id).unwrap();
        let num_rows = layer.plan().stacked_rows(POSITIONS, RANK);
        let mut w = Buffer::zeros(&gpu.queue, (OUTPUTS + num_rows) * FEATURES).unwrap();
        let stack = Stack::new(weights, (POSITIONS, RANK), [(id, w.split_off(OUTPUTS * FEATURES))]).unwrap();
        assert_eq!((w.len(), stack.positions(), stack.rank()), (OUTPUTS * FEATURES, POSITIONS, RANK));
        Self {
            routing: Routing::new(&gpu.queue, weights.capacity(), 16).unwrap(),
            workspace: Workspace::new(weights).unwrap(),
            y: Buffer::zeros(&gpu.queue, TOKENS * (OUTPUTS + num_rows)).unwrap(),
            out: Buffer::zeros(&gpu.queue, TOKENS * FEATURES).unwrap(),
            weights: weights.clone(),
            gpu,
            layer,
            stack,
            w,
            num_rows,
        }
    }

    fn of_table(num_slots: usize, max_rank: usize) -> Self {
        let (gpu, (model, id)) = (Gpu::new(), model());
        let capacity = Capacity::tokens(TOKENS).slots(num_slots).rank(max_rank);
        let bytes = WeightTable::arena_bytes_for(&model, DType::BF16, capacity);
        let weights = WeightTable::new(&gpu.queue, &model, DType::BF16, capacity, 2 * bytes).unwrap();
        Self::new(gpu, &weights, id)
    }

    fn load(&self, slot: usize, rank: usize, value: f32) -> Slot {
        let adapter = adapter(rank, value);
        self.weights.load(slot, &adapter.plan(self.weights.model(), DType::BF16).unwrap()).unwrap()
    }

    fn columns(&self) -> usize {
        OUTPUTS + self.num_rows
    }

    /// The rows of the stack, as copies on the queue have left them.
    fn rows(&self) -> Vec<bf16> {
        let mut rows = vec![bf16::ZERO; self.num_rows * FEATURES];
        self.gpu.synchronize();
        let first = self.w.device_ptr() + (OUTPUTS * FEATURES * 2) as u64;
        // SAFETY: W and the stack keep the memory, which has this many elements more.
        unsafe { result::memcpy_dtoh_sync(&mut rows, first) }.unwrap();
        rows
    }

    /// What the base GEMM gives for x of ones: zeros, and v in each row.
    fn multiply(&mut self) {
        let sums = self.rows().chunks(FEATURES).map(|row| row.iter().map(|a| a.to_f32()).sum()).collect::<Vec<f32>>();
        let row = [bf16::ZERO; OUTPUTS].into_iter().chain(sums.into_iter().map(bf16::from_f32));
        let y: Vec<bf16> = row.cycle().take(TOKENS * self.columns()).collect();
        self.y.write(&y).unwrap();
    }

    fn capture(&mut self) -> Graph {
        let columns = self.columns();
        let Self { weights, layer, stack, routing, workspace, y, .. } = self;
        let record = |step: &mut Step<'_>| {
            assert!(stack.place(step)?);
            layer.add_stacked_delta(step, stack, MatrixMut::new(&mut *y, TOKENS, columns)?)
        };
        weights.capture(routing, TOKENS, workspace, record).unwrap()
    }

    /// Checks what was added for each token's value.
    fn check(&self, values: &[f32]) {
        let mut y = vec![bf16::NAN; self.y.len()];
        self.y.read(&mut y).unwrap();
        for (row, value) in y.chunks(self.columns()).zip(values) {
            let [gate, up] = [value, &(2.0 * value)].map(|value| bf16::from_f32(*value));
            assert!(row[..FEATURES].iter().all(|&y| y == gate), "{} for {gate}", row[0]);
            assert!(row[FEATURES..OUTPUTS].iter().all(|&y| y == up), "{} for {up}", row[FEATURES]);
        }
    }
}

/// Enqueues a step of the table with the stack, by its operation or a graph. Whether the stack has room for the batch.
fn step(world: &mut World, slots: &[Slot], graph: Option<&mut Graph>) -> Result<bool, LaunchError> {
    world.gpu.synchronize();
    let placed = {
        let batch = world.routing.update(&Batch::new(slots))?;
        world.stack.place(&mut world.weights.step(&batch, &mut world.workspace)?)?
    };
    world.multiply();
    let columns = world.columns();
    let batch = world.routing.update(&Batch::new(slots))?;
    let mut step = world.weights.step(&batch, &mut world.workspace)?;
    let again = world.stack.place(&mut step)?;
    assert_eq!(again, placed);
    match graph {
        Some(graph) => graph.replay(&mut step)?,
        None => {
            let y = MatrixMut::new(&mut world.y, slots.len(), columns)?;
            world.layer.add_stacked_delta(&mut step, &world.stack, y)?;
        }
    }
    Ok(placed)
}

/// Any loads, unloads and batches: those that fit get the deltas of their own adapters, and all others are refused.
#[test]
#[ignore = "needs a GPU"]
fn each_token_has_its_adapter_whatever_comes_and_goes() {
    const SLOTS: usize = 6;
    let mut rng = StdRng::seed_from_u64(5);
    let mut world = World::of_table(SLOTS, 32);
    let mut graph = world.capture();
    let mut loaded: Vec<Option<(Slot, usize, f32)>> = vec![None; SLOTS];
    let (mut fitted, mut refused) = (0, 0);
    for turn in 0..choose(400, 60) {
        let slot = rng.random_range(0..SLOTS);
        match rng.random_range(0..4) {
            0 => {
                let rank = *[1, 8, 16, 16, 16, 32].get(rng.random_range(0..6)).unwrap();
                let value = (rng.random_range(1..60) * 2) as f32;
                loaded[slot] = Some((world.load(slot, rank, value), rank, value));
            }
            1 if rng.random_bool(0.3) => {
                world.weights.unload(slot).unwrap();
                loaded[slot] = None;
            }
            _ => {
                let few = rng.random_range(1..=SLOTS);
                let of_token = |rng: &mut StdRng| loaded[rng.random_range(0..few)].unwrap_or((Slot::BASE, 0, 0.0));
                let tokens: Vec<_> = (0..rng.random_range(1..=TOKENS)).map(|_| of_token(&mut rng)).collect();
                let slots: Vec<Slot> = tokens.iter().map(|token| token.0).collect();
                let mut distinct: Vec<Slot> = slots.iter().copied().filter(|slot| *slot != Slot::BASE).collect();
                distinct.sort_unstable();
                distinct.dedup();
                let fits = distinct.len() <= POSITIONS && tokens.iter().all(|&(_, rank, _)| rank <= RANK);
                let done = step(&mut world, &slots, (turn % 2 == 0).then_some(&mut graph));
                if fits {
                    assert!(done.unwrap());
                    world.check(&tokens.iter().map(|token| token.2).collect::<Vec<_>>());
                    fitted += 1;
                } else {
                    assert!(matches!(done, Err(LaunchError::Operand(OperandError::NotPlaced))), "{done:?}");
                    refused += 1;
                }
            }
        }
    }
    assert!(fitted > 10 && refused > 5, "{fitted} fitted, {refused} refused");
}

/// The copies of a pool in the slots of its table: an adapter that comes again is in the stack again.
#[test]
#[ignore = "needs a GPU"]
fn a_pool_moves_adapters_through_the_stack() {
    const ADAPTERS: usize = 7;
    let mut rng = StdRng::seed_from_u64(6);
    let (gpu, (model, id)) = (Gpu::new(), model());
    let capacity = Capacity::tokens(TOKENS).slots(4).rank(RANK);
    let bytes = AdapterPool::arena_bytes(&model, DType::BF16, RANK, 4);
    let config = PoolConfig::arena_bytes(bytes).host_bytes(2 * ADAPTERS * bytes).poisoning();
    let mut pool = AdapterPool::new(&gpu.queue, &model, DType::BF16, capacity, config).unwrap();
    let value = |i: usize| (2 * i + 2) as f32;
    let source = |i: usize| Source::memory(Arc::new(adapter(RANK, value(i))), &model, DType::BF16).unwrap();
    let ids: Vec<_> = (0..ADAPTERS).map(|i| pool.register(source(i)).unwrap()).collect();
    let weights = pool.weights(StreamId::FIRST).unwrap().clone();
    let mut world = World::new(gpu, &weights, id);
    let mut graph = world.capture();
    for _ in 0..choose(150, 20) {
        let batch: Vec<usize> = (0..POSITIONS).map(|_| rng.random_range(0..ADAPTERS)).collect();
        let of_batch: Vec<_> = batch.iter().map(|&i| ids[i]).collect();
        let leases = loop {
            match pool.prepare(&of_batch, StreamId::FIRST) {
                Err(PoolError::Loading { .. }) => pool.wait(Duration::from_millis(1)),
                leases => break leases.unwrap(),
            };
        };
        let slots: Vec<Slot> = leases.iter().map(|lease| lease.slot()).cycle().take(TOKENS).collect();
        for replays in [false, true] {
            let routed = world.routing.update(&Batch::new(&slots)).unwrap();
            let mut step = pool.step(StreamId::FIRST, &routed, &mut world.workspace).unwrap();
            assert!(world.stack.place(&mut step).unwrap());
            drop(step);
            world.multiply();
            let columns = world.columns();
            world.gpu.synchronize();
            let routed = world.routing.update(&Batch::new(&slots)).unwrap();
            let mut step = pool.step(StreamId::FIRST, &routed, &mut world.workspace).unwrap();
            assert!(world.stack.place(&mut step).unwrap());
            if replays {
                graph.replay(&mut step).unwrap();
            } else {
                let y = MatrixMut::new(&mut world.y, TOKENS, columns).unwrap();
                world.layer.add_stacked_delta(&mut step, &world.stack, y).unwrap();
            }
            drop(step);
            let values: Vec<f32> = batch.iter().map(|&i| value(i)).cycle().take(TOKENS).collect();
            world.check(&values);
        }
        drop(leases);
        pool.end_step(StreamId::FIRST).unwrap();
    }
}

/// What a step must have for the operations with a stack.
#[test]
#[ignore = "needs a GPU"]
fn steps_without_their_adapters_in_the_stack_are_refused() {
    let mut world = World::of_table(6, 32);
    let mut other = World::of_table(6, 32);
    let slots: Vec<Slot> = (0..6).map(|slot| world.load(slot, if slot == 5 { 32 } else { 8 }, 2.0)).collect();
    let mut graph = world.capture();
    let columns = world.columns();
    let not_placed = |done: Result<(), LaunchError>| {
        assert!(matches!(done, Err(LaunchError::Operand(OperandError::NotPlaced))), "{done:?}");
    };
    let World { weights, layer, stack, routing, workspace, y, out, .. } = &mut world;

    let batch = routing.update(&Batch::new(&slots[..1])).unwrap();
    let mut step = weights.step(&batch, workspace).unwrap();
    not_placed(layer.add_stacked_delta(&mut step, stack, MatrixMut::new(&mut *y, 1, columns).unwrap()));
    let (of_y, of_out) = (Matrix::new(&*y, 1, columns).unwrap(), MatrixMut::new(&mut *out, 1, FEATURES).unwrap());
    not_placed(layer.stacked_silu_mul(&mut step, stack, of_y, of_out));
    not_placed(graph.replay(&mut step));
    let of_other = other.stack.place(&mut step);
    assert!(matches!(of_other, Err(LaunchError::Operand(OperandError::OtherTable))), "{of_other:?}");
    let y_of = MatrixMut::new(&mut *y, 1, columns).unwrap();
    let of_other = layer.add_stacked_delta(&mut step, &other.stack, y_of);
    assert!(matches!(of_other, Err(LaunchError::Operand(OperandError::OtherTable))), "{of_other:?}");
    assert!(stack.place(&mut step).unwrap());
    layer.add_stacked_delta(&mut step, stack, MatrixMut::new(&mut *y, 1, columns).unwrap()).unwrap();
    // The next step is another.
    drop(step);
    let mut step = weights.step(&batch, workspace).unwrap();
    not_placed(graph.replay(&mut step));
    drop(step);

    // Too many, too high a rank, and slots that the host does not see.
    let numbers = {
        let mut numbers = Buffer::zeros(weights.queue(), 1).unwrap();
        numbers.write(&[0_i32]).unwrap();
        numbers
    };
    for slots in [&slots[..4], &slots[5..]] {
        let batch = routing.update(&Batch::new(slots)).unwrap();
        assert!(!stack.place(&mut weights.step(&batch, workspace).unwrap()).unwrap());
    }
    let batch = routing.update_on_device(&numbers, None).unwrap();
    let mut step = weights.step(&batch, workspace).unwrap();
    assert!(!stack.place(&mut step).unwrap());
    not_placed(graph.replay(&mut step));
    drop(step);
    // A batch of the base model needs no place.
    let batch = routing.update(&Batch::new(&[Slot::BASE])).unwrap();
    graph.replay(&mut weights.step(&batch, workspace).unwrap()).unwrap();
    // The adapter that left the table has left the stack.
    let batch = routing.update(&Batch::new(&slots[..1])).unwrap();
    let mut step = weights.step(&batch, workspace).unwrap();
    weights.unload(0).unwrap();
    let gone = stack.place(&mut step);
    assert!(matches!(gone, Err(LaunchError::Operand(OperandError::NotLoaded { .. }))), "{gone:?}");
}
