//! Stacks: the rows that they copy, and the operations on the columns of v, against the reference.

use aril::{
    DType, Element,
    adapter::Adapter,
    cuda::{
        LaunchError, LoraLinear, WeightTable,
        raw::{self, MatrixMut, MatrixRef, Stack},
    },
    error::OperandError,
    model::{Activation, Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::{Capacity, PlanError},
    reference::{self, Delta, Factors},
};
use bytemuck::Pod;
use half::{bf16, f16};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};

use crate::{
    common::{
        adapters::{Lora, parts},
        compare::{Expected, Place, compare, expect_activation, expect_sum},
        small::{choose, random_cases},
        values::Values,
    },
    device::{Buffer, Gpu},
};

/// A layer, its adapters, and where they are in a stack.
struct Case {
    inputs: usize,
    outputs: Vec<usize>,
    values: Values,
    num_slots: usize,
    positions: usize,
    /// The stack's, as given.
    rank: usize,
    /// By slot, then by slice.
    loras: Vec<Vec<Option<Lora>>>,
    /// By slot.
    position_of: Vec<Option<usize>>,
    slots: Vec<i32>,
    scales: Vec<f32>,
}

impl Case {
    fn new(rng: &mut StdRng, values: Values, dtype: DType, gate_up: bool) -> Self {
        let mut outputs: Vec<usize> =
            (0..rng.random_range(1..=3)).map(|_| 8 * rng.random_range(1..=choose(60, 9))).collect();
        if gate_up {
            outputs = vec![outputs[0]; 2];
        }
        let inputs = 8 * rng.random_range(1..=choose(70, 40));
        let rank = *[3, 8, 16, 17, 40, 64, 128].get(rng.random_range(0..7)).unwrap();
        let num_slots = rng.random_range(1..=choose(100, 5));
        let positions = rng.random_range(1..=num_slots + 3);
        let mut value = {
            let mut rng = StdRng::seed_from_u64(rng.random());
            move || values.value(&mut rng)
        };
        // Every adapter has a module.
        let mut lora = |rng: &mut StdRng, slice: usize, outputs: usize, present: usize| {
            let of_slice = rng.random_range(1..=rank);
            let zeros = Lora::linear(format!("layer.m{slice}"), inputs, outputs, of_slice).dtype(dtype);
            let is_there = slice == present || rng.random_bool(0.8);
            is_there.then(|| zeros.alpha(2.0 * of_slice as f64).fill(&mut value))
        };
        let mut slot = |_| {
            let present = rng.random_range(0..outputs.len());
            outputs.iter().enumerate().map(|(i, &outs)| lora(rng, i, outs, present)).collect()
        };
        let loras: Vec<Vec<Option<Lora>>> = (0..num_slots).map(&mut slot).collect();
        // Most slots are in the stack, at any positions.
        let mut places: Vec<usize> = (0..positions).collect();
        places.shuffle(rng);
        let mut position_of = vec![None; num_slots];
        for position in &mut position_of {
            *position = rng.random_bool(0.8).then(|| places.pop()).flatten();
        }
        let tokens = *[1, 5, 16, 17, 64, 130, 600].get(rng.random_range(0..choose(7, 4))).unwrap();
        let slot = |rng: &mut StdRng| match rng.random_range(0..6) {
            0 => -1,
            _ => rng.random_range(0..num_slots as i32),
        };
        let slots = (0..tokens).map(|_| slot(rng)).collect();
        let scales = (0..tokens).map(|_| [1.0, 0.5, 2.0, -1.0][rng.random_range(0..4)]).collect();
        Self { inputs, outputs, values, num_slots, positions, rank, loras, position_of, slots, scales }
    }

    fn spec(&self) -> (Model, LinearId) {
        let mut spec = ModelSpec::new();
        // Another layer in front, so that entries and rows are not the first.
        spec.linear(Linear::new("other", Parallel::Column, 8).slice("m", 8)).unwrap();
        let layer = Linear::new("layer", Parallel::Column, self.inputs);
        let layer = (0..).zip(&self.outputs).fold(layer, |layer, (i, &outs)| layer.slice(format!("m{i}"), outs));
        let id = spec.linear(layer).unwrap();
        (spec.shard(TpRank::SINGLE).unwrap(), id)
    }

    fn padded_rank(&self) -> usize {
        self.rank.next_multiple_of(8)
    }

    fn num_outputs(&self) -> usize {
        self.outputs.iter().sum()
    }

    /// The row of a module's A in the layer's stack.
    fn row(&self, slice: usize, position: usize) -> usize {
        (slice * self.positions + position) * self.padded_rank()
    }

    /// The module of a token at a slice that is in the stack.
    fn lora(&self, token: usize, slice: usize) -> Option<(&Lora, usize)> {
        let slot = usize::try_from(self.slots[token]).ok()?;
        Some((self.loras[slot][slice].as_ref()?, self.position_of[slot]?))
    }
}

/// A case on the GPU.
struct World {
    gpu: Gpu,
    weights: WeightTable,
    layer: LoraLinear,
    stack: Stack,
    rows: Buffer,
    _memory: Buffer,
    _routing_memory: Buffer,
    _routing: raw::Routing,
    step: raw::Step,
}

impl World {
    fn new(case: &Case, dtype: DType) -> Self {
        let gpu = Gpu::new();
        let (model, id) = case.spec();
        let tokens = case.slots.len();
        let capacity = Capacity::tokens(tokens).slots(case.num_slots).rank(case.rank);
        let adapters: Vec<Adapter> = case
            .loras
            .iter()
            .map(|loras| {
                let (config, tensors) = parts(1.0, &loras.iter().flatten().cloned().collect::<Vec<_>>());
                Adapter::from_tensors(&config, tensors).unwrap()
            })
            .collect();
        let images: Vec<_> = adapters.iter().map(|adapter| adapter.plan(&model, dtype).unwrap()).collect();
        let weights = WeightTable::new(&gpu.queue, &model, dtype, capacity, WeightTable::arena_bytes(&images)).unwrap();
        for (slot, image) in (0..).zip(&images) {
            weights.load(slot, image).unwrap();
        }
        let layer = LoraLinear::new(&weights, id).unwrap();
        let num_rows = layer.plan().stacked_rows(case.positions, case.rank);
        assert_eq!(num_rows, case.outputs.len() * case.positions * case.padded_rank());
        let rows = gpu.poisoned(num_rows * case.inputs * 2);
        let matrix = MatrixMut::with_dtype(rows.address(), dtype, num_rows, case.inputs);
        let memory = gpu.without_indices(Stack::device_bytes(&model, case.positions, 1));
        let stream = gpu.raw_stream();
        // SAFETY: the memory is this object's, and used on this stream alone.
        let stack = unsafe {
            Stack::new(
                &gpu.kernels,
                &model,
                dtype,
                (case.positions, case.rank),
                &[(id, matrix)],
                memory.region(),
                stream,
            )
        }
        .unwrap();
        for (slot, position) in (0..).zip(&case.position_of) {
            let Some(position) = *position else { continue };
            // SAFETY: as above, and the table lives as long.
            unsafe { stack.set(position, &weights.raw(), Some(slot), stream) }.unwrap();
        }
        let routing_memory = gpu.poisoned(raw::Routing::device_bytes(capacity).unwrap());
        // SAFETY: as above.
        let mut routing = unsafe { raw::Routing::new(&gpu.kernels, capacity, 1, routing_memory.region()) }.unwrap();
        // SAFETY: as above.
        let batch = unsafe { routing.update(&case.slots, Some(&case.scales), stream) }.unwrap();
        let none = raw::DeviceRegion { ptr: 0, bytes: 0 };
        let workspace = raw::Workspace { mailbox: none, partials: none };
        let step = raw::Step::new(weights.raw(), batch, workspace, stream);
        Self {
            gpu,
            weights,
            layer,
            stack,
            rows,
            _memory: memory,
            _routing_memory: routing_memory,
            _routing: routing,
            step,
        }
    }
}

/// y with v of each token's own adapter. All other columns are NaN, as are the ends of rows.
fn outputs<T: Element>(case: &Case, rng: &mut StdRng) -> (Place, Vec<T>) {
    let (first, tokens) = (case.num_outputs(), case.slots.len());
    let cols = first + case.outputs.len() * case.positions * case.padded_rank();
    let place = Place { offset: 0, rows: tokens, cols, stride: cols + 8 };
    let mut y = place.buffer::<T>(case.values, rng);
    for token in 0..tokens {
        for column in first..cols {
            y[place.at(token, column)] = T::from_f32(f32::NAN);
        }
        for slice in 0..case.outputs.len() {
            let Some((lora, position)) = case.lora(token, slice) else { continue };
            // The GEMM computes the padding of the rank, too.
            for r in 0..case.padded_rank() {
                let v = if r < lora.rank { case.values.value(rng) } else { 0.0 };
                y[place.at(token, first + case.row(slice, position) + r)] = T::from_f32(v);
            }
        }
    }
    (place, y)
}

/// The delta of a token at a slice.
fn delta<T: Element>(case: &Case, (place, y): (Place, &[T]), token: usize, slice: usize) -> Option<Vec<Delta>> {
    let (lora, position) = case.lora(token, slice)?;
    let first = case.num_outputs() + case.row(slice, position);
    let v: Vec<f64> = (0..lora.rank).map(|r| f64::from(y[place.at(token, first + r)].to_f32())).collect();
    let identity: Vec<f64> =
        (0..lora.rank * lora.rank).map(|i| f64::from(u8::from(i % (lora.rank + 1) == 0))).collect();
    let b: Vec<f64> = lora.b.iter().map(|&b| f64::from(b)).collect();
    let scaling = 2.0 * f64::from(case.scales[token]);
    Some(reference::linear(&v, Factors { a: &identity, b: &b, rank: lora.rank, scaling }))
}

fn check<T: Element + Pod>(seed: u64, values: Values) {
    let mut rng = StdRng::seed_from_u64(seed);
    let case = Case::new(&mut rng, values, T::DTYPE, false);
    let world = World::new(&case, T::DTYPE);
    let rows: Vec<T> = world.rows.read();
    for (slot, position) in case.position_of.iter().enumerate() {
        for (slice, lora) in case.loras[slot].iter().enumerate() {
            let Some(position) = *position else { continue };
            for r in 0..case.padded_rank() {
                let row = &rows[(case.row(slice, position) + r) * case.inputs..][..case.inputs];
                let has = |lora: &&Lora| r < lora.rank;
                let want = lora.as_ref().filter(has).map(|lora| &lora.a[r * case.inputs..][..case.inputs]);
                let want: Vec<T> = match want {
                    Some(values) => values.iter().map(|&value| T::from_f32(value)).collect(),
                    None => vec![T::from_f32(0.0); case.inputs],
                };
                assert_eq!(bytemuck::cast_slice::<T, u8>(row), bytemuck::cast_slice::<T, u8>(&want), "seed {seed}");
            }
        }
    }

    let (place, y) = outputs::<T>(&case, &mut rng);
    let mut expected: Vec<Expected<T>> = y.iter().map(|&y| Expected::Untouched(y)).collect();
    for token in 0..case.slots.len() {
        let mut column = 0;
        for (slice, &outs) in case.outputs.iter().enumerate() {
            if let Some(deltas) = delta(&case, (place, &y), token, slice) {
                for (out, delta) in deltas.into_iter().enumerate() {
                    let at = place.at(token, column + out);
                    expected[at] = expect_sum(values, f64::from(y[at].to_f32()), delta, case.rank + 8);
                }
            }
            column += outs;
        }
    }
    let buffer = world.gpu.upload(&y);
    let matrix = MatrixMut::with_dtype(buffer.address(), T::DTYPE, place.rows, place.cols).row_stride(place.stride);
    // SAFETY: the memory lives until it has been read, and is used on this stream alone.
    unsafe { world.layer.add_stacked_delta_raw(&world.step, &world.stack, matrix) }.unwrap();
    compare(place, &buffer.read::<T>(), &expected, &format!("seed {seed}")).unwrap();
}

fn check_silu_mul<T: Element + Pod>(seed: u64, values: Values) {
    let mut rng = StdRng::seed_from_u64(seed);
    let case = Case::new(&mut rng, values, T::DTYPE, true);
    let world = World::new(&case, T::DTYPE);
    let (place, y) = outputs::<T>(&case, &mut rng);
    let features = case.outputs[0];
    let out_place = Place { offset: 0, rows: place.rows, cols: features, stride: features + 16 };
    let before = out_place.buffer::<T>(values, &mut rng);
    let mut expected: Vec<Expected<T>> = before.iter().map(|&out| Expected::Untouched(out)).collect();
    for token in 0..case.slots.len() {
        let deltas = [0, 1].map(|slice| delta(&case, (place, &y), token, slice));
        for feature in 0..features {
            let [gate, up] = [0, 1].map(|slice| {
                let y = f64::from(y[place.at(token, slice * features + feature)].to_f32());
                let delta = deltas[slice].as_ref().map_or(Delta { value: 0.0, magnitude: 0.0 }, |all| all[feature]);
                Delta { value: y + delta.value, magnitude: y.abs() + delta.magnitude }
            });
            expected[out_place.at(token, feature)] =
                expect_activation(values, Activation::Silu, Some(gate), up, case.rank + 8);
        }
    }
    let (y, out) = (world.gpu.upload(&y), world.gpu.upload(&before));
    let of_y = MatrixRef::with_dtype(y.address(), T::DTYPE, place.rows, place.cols).row_stride(place.stride);
    let of_out = MatrixMut::with_dtype(out.address(), T::DTYPE, place.rows, features).row_stride(out_place.stride);
    // SAFETY: as above.
    unsafe { world.layer.stacked_silu_mul_raw(&world.step, &world.stack, of_y, of_out) }.unwrap();
    compare(out_place, &out.read::<T>(), &expected, &format!("seed {seed}")).unwrap();
}

#[test]
#[ignore = "needs a GPU"]
fn rows_are_those_of_a_and_deltas_those_of_v() {
    for seed in 0..u64::from(random_cases(60)) {
        check::<bf16>(4 * seed, Values::Exact);
        check::<bf16>(4 * seed + 1, Values::Rounded);
        check::<f16>(4 * seed + 2, Values::Exact);
        check::<f16>(4 * seed + 3, Values::Rounded);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_activation_has_the_deltas_of_v() {
    for seed in 0..u64::from(random_cases(40)) {
        check_silu_mul::<bf16>(4 * seed, Values::Exact);
        check_silu_mul::<bf16>(4 * seed + 1, Values::Rounded);
        check_silu_mul::<f16>(4 * seed + 2, Values::Exact);
        check_silu_mul::<f16>(4 * seed + 3, Values::Rounded);
    }
}

/// A case of one slot and one position, with a token of the slot.
fn single(outputs: &[usize], inputs: usize) -> Case {
    let lora = |(slice, &outs): (usize, &usize)| Some(Lora::linear(format!("layer.m{slice}"), inputs, outs, 8));
    Case {
        inputs,
        outputs: outputs.to_vec(),
        values: Values::Exact,
        num_slots: 2,
        positions: 2,
        rank: 8,
        loras: (0..2).map(|_| outputs.iter().enumerate().map(lora).collect()).collect(),
        position_of: vec![None, Some(0)],
        slots: vec![1],
        scales: vec![1.0],
    }
}

/// A graph has the stack as it is at each replay: a slot that moves, that leaves, and that others take the position of.
#[test]
#[ignore = "needs a GPU"]
fn graphs_have_the_positions_of_each_replay() {
    let mut case = single(&[64], 64);
    for (slot, loras) in case.loras.iter_mut().enumerate() {
        let lora = loras[0].take().unwrap();
        loras[0] = Some(lora.of_rows(|_| (slot + 1) as f32));
    }
    let world = World::new(&case, DType::BF16);
    let stream = world.gpu.raw_stream();
    let place = Place { offset: 0, rows: 1, cols: 64 + 2 * 8, stride: 64 + 2 * 8 };
    // v is 1 at the first position, and 10 at the second.
    let v = |column: usize| {
        if column < 64 {
            0.0
        } else if column < 72 {
            1.0
        } else {
            10.0
        }
    };
    let before: Vec<bf16> = (0..place.cols).map(|column| bf16::from_f32(v(column))).collect();
    let mut buffer = world.gpu.upload(&before);
    let matrix = MatrixMut::new::<bf16>(buffer.address(), 1, place.cols);
    let graph = world.gpu.capture(|| {
        // SAFETY: the memory outlives the graph, and is used on this stream alone.
        unsafe { world.layer.add_stacked_delta_raw(&world.step, &world.stack, matrix) }.unwrap();
    });
    let mut replay = || {
        buffer.write(&before);
        graph.replay();
        buffer.read::<bf16>()[0].to_f32()
    };
    let set = |position: usize, slot: Option<usize>| {
        // SAFETY: the table lives as long as the stack.
        unsafe { world.stack.set(position, &world.weights.raw(), slot, stream) }.unwrap();
    };
    // Of the token's slot, 1, rows of B are 2: 8 ranks of them.
    assert_eq!(replay(), 16.0);
    set(1, Some(1));
    assert_eq!(replay(), 160.0);
    set(1, Some(0));
    assert_eq!(replay(), 0.0);
    set(0, Some(1));
    assert_eq!(replay(), 16.0);
    set(0, None);
    assert_eq!(replay(), 0.0);
}

/// Sizes, operands and places that are wrong.
#[test]
#[ignore = "needs a GPU"]
fn a_stack_refuses_what_it_cannot_serve() {
    let case = single(&[64, 32], 64);
    let world = World::new(&case, DType::BF16);
    let (model, id) = case.spec();
    let (gpu, stream) = (&world.gpu, world.gpu.raw_stream());
    let rows = |num: usize, cols: usize| MatrixMut::new::<bf16>(world.rows.address(), num, cols);
    let new = |positions: usize, dtype: DType, rows: &[(LinearId, MatrixMut)]| {
        let memory = gpu.poisoned(1 << 16);
        // SAFETY: the stack is not used.
        unsafe { Stack::new(&gpu.kernels, &model, dtype, (positions, 8), rows, memory.region(), stream) }
            .map(drop)
            .unwrap_err()
            .to_string()
    };
    let bf16 = DType::BF16;
    assert_eq!(
        new(0, bf16, &[(id, rows(0, 64))]),
        PlanError::Limit { what: "positions", value: 0, max: 8192 }.to_string()
    );
    assert_eq!(new(2, bf16, &[]), PlanError::Limit { what: "layers", value: 0, max: usize::MAX }.to_string());
    assert_eq!(new(2, DType::F32, &[(id, rows(32, 64))]), "a stack supports bf16 and f16, not f32");
    assert!(new(2, bf16, &[(id, rows(31, 64))]).contains("the stack's rows"));
    assert_eq!(new(2, bf16, &[(id, rows(32, 64)), (id, rows(32, 64))]), "a layer of the stack is given twice");

    let y = gpu.poisoned(1 << 12);
    let add = |cols: usize, stride: usize| {
        let y = MatrixMut::new::<half::bf16>(y.address(), 1, cols).row_stride(stride);
        // SAFETY: nothing is enqueued.
        unsafe { world.layer.add_stacked_delta_raw(&world.step, &world.stack, y) }
    };
    let refused = |result: Result<(), LaunchError>| result.unwrap_err().to_string();
    assert!(refused(add(96, 96)).contains("`y` is [1, 96]"), "{}", refused(add(96, 96)));
    let other = Model::clone(&model)[id].slices().len();
    assert_eq!(other, 2);
    // SAFETY: nothing is enqueued.
    let position = unsafe { world.stack.set(2, &world.weights.raw(), Some(0), stream) };
    assert!(matches!(
        position,
        Err(LaunchError::Operand(OperandError::Capacity { what: "the position", got: 2, max: 1 }))
    ));
    // SAFETY: as above.
    let slot = unsafe { world.stack.set(0, &world.weights.raw(), Some(2), stream) };
    assert!(matches!(slot, Err(LaunchError::Operand(OperandError::Capacity { what: "the slot", got: 2, max: 1 }))));
}
