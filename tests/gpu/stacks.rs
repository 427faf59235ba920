//! What steps with stacks must have. `crate::model` moves adapters through them.

use aril::{
    DType, Slot,
    cuda::{Buffer, Graph, LaunchError, LoraLinear, Matrix, MatrixMut, Routing, Stack, Step, WeightTable, Workspace},
    error::OperandError,
    model::{Linear, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    routing::Batch,
};
use half::bf16;

use crate::{
    common::adapters::{self, Lora},
    device::Gpu,
};

const FEATURES: usize = 64;
const TOKENS: usize = 12;
const POSITIONS: usize = 3;
const RANK: usize = 16;
/// y without columns of v: gate and up.
const OUTPUTS: usize = 2 * FEATURES;

struct World {
    _gpu: Gpu,
    weights: WeightTable,
    layer: LoraLinear,
    stack: Stack,
    columns: usize,
    routing: Routing,
    workspace: Workspace,
    y: Buffer<bf16>,
    out: Buffer<bf16>,
}

impl World {
    fn new() -> Self {
        let (gpu, mut spec) = (Gpu::new(), ModelSpec::new());
        let layer = Linear::new("m", Parallel::Replicated, FEATURES).slice("gate", FEATURES).slice("up", FEATURES);
        let id = spec.linear(layer).unwrap();
        let (model, capacity) = (spec.shard(TpRank::SINGLE).unwrap(), Capacity::tokens(TOKENS).slots(6).rank(32));
        let bytes = WeightTable::arena_bytes_for(&model, DType::BF16, capacity);
        let weights = WeightTable::new(&gpu.queue, &model, DType::BF16, capacity, 2 * bytes).unwrap();
        let layer = LoraLinear::new(&weights, id).unwrap();
        let columns = OUTPUTS + layer.plan().stacked_rows(POSITIONS, RANK);
        let mut w = Buffer::<bf16>::zeros(&gpu.queue, columns * FEATURES).unwrap();
        let stack = Stack::new(&weights, (POSITIONS, RANK), [(id, w.split_off(OUTPUTS * FEATURES))]).unwrap();
        assert_eq!((w.len(), stack.positions(), stack.rank()), (OUTPUTS * FEATURES, POSITIONS, RANK));
        Self {
            routing: Routing::new(&gpu.queue, capacity, 16).unwrap(),
            workspace: Workspace::new(&weights).unwrap(),
            y: Buffer::zeros(&gpu.queue, TOKENS * columns).unwrap(),
            out: Buffer::zeros(&gpu.queue, TOKENS * FEATURES).unwrap(),
            _gpu: gpu,
            weights,
            layer,
            stack,
            columns,
        }
    }

    fn load(&self, slot: usize, rank: usize) -> Slot {
        let module = |name| Lora::adding(format!("m.{name}"), [FEATURES; 2], rank, 2.0).dtype(DType::BF16);
        let adapter = adapters::adapter(&["gate", "up"].map(module));
        self.weights.load(slot, &adapter.plan(self.weights.model(), DType::BF16).unwrap()).unwrap()
    }

    fn capture(&mut self) -> Graph {
        let Self { weights, layer, stack, columns, routing, workspace, y, .. } = self;
        let record = |step: &mut Step<'_>| {
            assert!(stack.place(step)?);
            layer.add_stacked_delta(step, stack, MatrixMut::new(&mut *y, TOKENS, *columns)?)
        };
        weights.capture(routing, TOKENS, workspace, record).unwrap()
    }
}

/// What a step must have for the operations with a stack.
#[test]
#[ignore = "needs a GPU"]
fn steps_without_their_adapters_in_the_stack_are_refused() {
    let (mut world, mut other) = (World::new(), World::new());
    let slots: Vec<Slot> = (0..6).map(|slot| world.load(slot, if slot == 5 { 32 } else { 8 })).collect();
    let mut graph = world.capture();
    let columns = world.columns;
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
