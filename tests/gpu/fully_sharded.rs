//! Fully sharded layers: shrink on every rank, the exchange of `v` on the host, and expand on every rank, against the
//! CPU and the reference.

use aril::{
    DType, Element,
    adapter::Adapter,
    cpu,
    cuda::{Buffer, FullyShardedLinear, LaunchError, Matrix, MatrixMut, Queue, Routing, WeightTable, Workspace},
    model::{Collective, Linear, LinearId, LinearSite, Model, ModelSpec, Parallel, Shard, SliceSite, TpRank},
    plan::Capacity,
    reference::{self, Factors},
    routing::Batch,
};
use cudarc::driver::{DeviceRepr, ValidAsZeroBits};
use half::{bf16, f16};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    common::{
        adapters::{Lora, parts, round},
        case::loaded_slots,
        compare::{Expected, Place, expect_sum},
        slices::SliceBuffers,
        small::choose,
        values::Values,
    },
    device::Gpu,
    setup::slots_of,
};

const SLOTS: usize = 3;
const ARENA_BYTES: usize = 1 << 25;

/// An element type of the tables.
trait Float: Element + DeviceRepr + ValidAsZeroBits {}
impl<T: Element + DeviceRepr + ValidAsZeroBits> Float for T {}

/// A layer on a group of ranks, and the adapters of its first slots. The last slot is empty.
struct World {
    spec: ModelSpec,
    id: LinearId,
    size: usize,
    inputs: usize,
    /// By slot, then by module.
    loras: Vec<Vec<Lora>>,
    adapters: Vec<Adapter>,
    max_rank: usize,
}

impl World {
    /// Modules of these outputs, and adapters of these ranks, scaled by 2. Values have the element type of the table.
    fn new(
        parallel: Parallel,
        [size, inputs]: [usize; 2],
        outputs: &[usize],
        ranks: [usize; 2],
        dtype: DType,
        mut value: impl FnMut() -> f32,
    ) -> Self {
        let mut spec = ModelSpec::new();
        let layer = Linear::new("layer", parallel, inputs);
        let layer = (0..).zip(outputs).fold(layer, |layer, (i, &outputs)| layer.slice(format!("m{i}"), outputs));
        let id = spec.linear(layer).unwrap();
        // The second adapter lacks the first of several modules.
        let modules = |slot: usize| usize::from(slot == 1 && outputs.len() > 1)..outputs.len();
        let mut lora = |slot: usize, i: usize| {
            let rank = ranks[slot];
            let zeros = Lora::linear(format!("layer.m{i}"), inputs, outputs[i], rank).dtype(dtype);
            zeros.alpha(2.0 * rank as f64).fill(&mut value)
        };
        let loras: Vec<Vec<Lora>> = (0..2).map(|slot| modules(slot).map(|i| lora(slot, i)).collect()).collect();
        let adapter = |loras: &Vec<Lora>| {
            let (config, tensors) = parts(1.0, loras);
            Adapter::from_tensors(&config, tensors).unwrap()
        };
        let adapters = loras.iter().map(adapter).collect();
        Self { spec, id, size, inputs, loras, adapters, max_rank: ranks.into_iter().max().unwrap() }
    }

    fn model(&self, rank: usize) -> Model {
        self.spec.shard(Shard::new(TpRank::new(rank, self.size).unwrap()).fully_sharded()).unwrap()
    }

    fn capacity(&self, tokens: usize) -> Capacity {
        Capacity::tokens(tokens).slots(SLOTS).rank(self.max_rank)
    }

    /// A rank's table on the GPU.
    fn weights<T: Element>(&self, gpu: &Gpu, rank: usize, tokens: usize) -> WeightTable {
        let model = self.model(rank);
        let weights = WeightTable::new(&gpu.queue, &model, T::DTYPE, self.capacity(tokens), ARENA_BYTES).unwrap();
        for (slot, adapter) in (0..).zip(&self.adapters) {
            weights.load(slot, &adapter.plan(&model, T::DTYPE).unwrap()).unwrap();
        }
        weights
    }

    /// The result of the exchange, as expand reads it.
    fn exchanged(&self, parts: &[Vec<f32>]) -> Vec<f32> {
        match self.model(0)[self.id].exchange().unwrap().collective() {
            Collective::AllGather => parts.concat(),
            Collective::AllReduce => (0..parts[0].len()).map(|i| parts.iter().map(|part| part[i]).sum()).collect(),
        }
    }
}

/// A batch, and the layer's input in the table's type.
struct Tokens<T> {
    slots: Vec<i32>,
    x: Vec<T>,
}

impl<T: Element> Tokens<T> {
    fn new(world: &World, tokens: usize, mut value: impl FnMut() -> f32) -> Self {
        let slots = [0, -1, 1, 0, 2, 1];
        let x = (0..tokens * world.inputs).map(|_| T::from_f32(value())).collect();
        Self { slots: slots.into_iter().cycle().take(tokens).collect(), x }
    }

    fn len(&self) -> usize {
        self.slots.len()
    }

    /// The input features of a rank.
    fn x_of(&self, site: &LinearSite, inputs: usize) -> Vec<T> {
        self.x.chunks(inputs).flat_map(|x| x[site.in_range()].to_vec()).collect()
    }

    /// The batch of one token.
    fn alone(&self, token: usize, inputs: usize) -> Self {
        Self { slots: vec![self.slots[token]], x: self.x[token * inputs..][..inputs].to_vec() }
    }
}

/// A rank's layer on the GPU, and the operands of a step.
struct Rank<T> {
    weights: WeightTable,
    layer: FullyShardedLinear,
    routing: Routing,
    workspace: Workspace,
    x: Buffer<T>,
    sent: Buffer<f32>,
    received: Buffer<f32>,
    y: Buffer<T>,
    shape: Shape,
    /// Outputs of each slice.
    slices: Vec<usize>,
}

/// Extents of the operands.
#[derive(Clone, Copy)]
struct Shape {
    tokens: usize,
    inputs: usize,
    outputs: usize,
    sent: [usize; 2],
    received: [usize; 2],
}

impl<T: Float> Rank<T> {
    /// Buffers of `v` are NaN.
    fn new(gpu: &Gpu, world: &World, rank: usize, batch: &Tokens<T>) -> Self {
        let tokens = batch.len();
        let weights = world.weights::<T>(gpu, rank, tokens);
        let site = &weights.model()[world.id];
        let exchange = site.exchange().unwrap();
        let shape = Shape {
            tokens,
            inputs: site.in_features(),
            outputs: site.out_features(),
            sent: exchange.sent(tokens, world.max_rank),
            received: exchange.received(tokens, world.max_rank),
        };
        let nan = |[rows, cols]: [usize; 2]| filled(&gpu.queue, &vec![f32::NAN; rows * cols]);
        Self {
            slices: site.slices().iter().map(SliceSite::out_features).collect(),
            layer: FullyShardedLinear::new(&weights, world.id).unwrap(),
            routing: Routing::new(&gpu.queue, weights.capacity(), 2).unwrap(),
            workspace: Workspace::new(&weights).unwrap(),
            x: filled(&gpu.queue, &batch.x_of(site, world.inputs)),
            sent: nan(shape.sent),
            received: nan(shape.received),
            y: Buffer::zeros(&gpu.queue, tokens * shape.outputs).unwrap(),
            shape,
            weights,
        }
    }

    fn shrink(&mut self, slots: &[i32]) -> Vec<f32> {
        let Self { weights, layer, routing, workspace, x, sent, shape, .. } = self;
        let slots = slots_of(weights, slots);
        let batch = routing.update(&Batch::new(&slots)).unwrap();
        let step = weights.step(&batch, workspace).unwrap();
        let [rows, cols] = shape.sent;
        let x = Matrix::new(&*x, shape.tokens, shape.inputs).unwrap();
        layer.shrink(&step, x, MatrixMut::new(&mut *sent, rows, cols).unwrap()).unwrap();
        read(sent)
    }

    fn expand(&mut self, slots: &[i32], v: &[f32], y: &[T]) -> Vec<T> {
        let Self { weights, layer, routing, workspace, received, y: y_buffer, shape, slices, .. } = self;
        received.write(v).unwrap();
        y_buffer.write(y).unwrap();
        let slots = slots_of(weights, slots);
        let batch = routing.update(&Batch::new(&slots)).unwrap();
        let step = weights.step(&batch, workspace).unwrap();
        let [rows, cols] = shape.received;
        let v = Matrix::new(&*received, rows, cols).unwrap();
        layer.expand(&step, v, MatrixMut::new(&mut *y_buffer, shape.tokens, shape.outputs).unwrap()).unwrap();
        let fused = read(y_buffer);

        // The same with a buffer for each slice.
        let place = Place { offset: 0, rows: shape.tokens, cols: shape.outputs, stride: shape.outputs };
        let outputs = SliceBuffers::new(y, place, slices, true);
        let mut buffers: Vec<Buffer<T>> = outputs.buffers().iter().map(|part| filled(weights.queue(), part)).collect();
        let y = outputs.matrices(&mut buffers, |buffer, Place { offset, rows, cols, stride }| {
            let end = buffer.len();
            MatrixMut::strided(buffer.slice_mut(offset..end), rows, cols, stride).unwrap()
        });
        let v = Matrix::new(&*received, rows, cols).unwrap();
        layer.expand(&step, v, y).unwrap();
        let separate = outputs.merged(buffers.iter().map(read).collect());
        assert_eq!(bytemuck::cast_slice::<T, u8>(&fused), bytemuck::cast_slice::<T, u8>(&separate));
        fused
    }
}

fn filled<T: Float>(queue: &Queue, values: &[T]) -> Buffer<T> {
    let mut buffer = Buffer::zeros(queue, values.len()).unwrap();
    buffer.write(values).unwrap();
    buffer
}

fn read<T: Float>(buffer: &Buffer<T>) -> Vec<T> {
    let mut values = vec![T::default(); buffer.len()];
    buffer.read(&mut values).unwrap();
    values
}

/// What shrink writes on each rank, and expand after the exchange, on the GPU.
fn on_gpu<T: Float>(gpu: &Gpu, world: &World, batch: &Tokens<T>, y: &[Vec<T>]) -> (Vec<Vec<f32>>, Vec<Vec<T>>) {
    let mut ranks: Vec<_> = (0..world.size).map(|rank| Rank::new(gpu, world, rank, batch)).collect();
    let parts: Vec<_> = ranks.iter_mut().map(|rank| rank.shrink(&batch.slots)).collect();
    let v = world.exchanged(&parts);
    let y = ranks.iter_mut().zip(y).map(|(rank, y)| rank.expand(&batch.slots, &v, y)).collect();
    (parts, y)
}

/// The same on the CPU.
fn on_cpu<T: Element>(world: &World, batch: &Tokens<T>, y: &[Vec<T>]) -> (Vec<Vec<f32>>, Vec<Vec<T>>) {
    let (tokens, mut workspace) = (batch.len(), cpu::Workspace::default());
    let tables = (0..world.size).map(|rank| {
        let model = world.model(rank);
        let weights = cpu::WeightTable::new(&model, T::DTYPE, world.capacity(tokens), ARENA_BYTES).unwrap();
        for (slot, adapter) in (0..).zip(&world.adapters) {
            weights.load(slot, &adapter.plan(&model, T::DTYPE).unwrap()).unwrap();
        }
        weights
    });
    let tables: Vec<_> = tables.collect();
    let mut parts = Vec::new();
    for weights in &tables {
        let site = &weights.model()[world.id];
        let [rows, cols] = site.exchange().unwrap().sent(tokens, world.max_rank);
        let (x, mut v) = (batch.x_of(site, world.inputs), vec![f32::NAN; rows * cols]);
        let slots = loaded_slots(&batch.slots, |slot| weights.get(slot));
        let step = weights.step(&Batch::new(&slots), &mut workspace).unwrap();
        let x = cpu::Matrix::new(&x, tokens, site.in_features()).unwrap();
        let layer = cpu::FullyShardedLinear::new(weights, world.id).unwrap();
        layer.shrink(&step, x, cpu::MatrixMut::new(&mut v, rows, cols).unwrap()).unwrap();
        parts.push(v);
    }
    let v = world.exchanged(&parts);
    let expand = |(weights, y): (&cpu::WeightTable, &Vec<T>)| {
        let site = &weights.model()[world.id];
        let [rows, cols] = site.exchange().unwrap().received(tokens, world.max_rank);
        let mut y = y.clone();
        let slots = loaded_slots(&batch.slots, |slot| weights.get(slot));
        let step = weights.step(&Batch::new(&slots), &mut workspace).unwrap();
        let v = cpu::Matrix::new(&v, rows, cols).unwrap();
        let layer = cpu::FullyShardedLinear::new(weights, world.id).unwrap();
        layer.expand(&step, v, cpu::MatrixMut::new(&mut y, tokens, site.out_features()).unwrap()).unwrap();
        y
    };
    let y = tables.iter().zip(y).map(expand).collect();
    (parts, y)
}

/// The `y` of each rank before the operation.
fn before<T: Element>(world: &World, tokens: usize, mut value: impl FnMut() -> f32) -> Vec<Vec<T>> {
    let outputs = |rank: usize| world.model(rank)[world.id].out_features();
    (0..world.size).map(|rank| (0..tokens * outputs(rank)).map(|_| T::from_f32(value())).collect()).collect()
}

fn bits<T: Element>(values: &[T]) -> Vec<u32> {
    values.iter().map(|value| value.to_f32().to_bits()).collect()
}

/// How a layer is sharded; the number of ranks, and of inputs; the outputs of its modules; and the ranks of two
/// adapters.
type Layer = (Parallel, [usize; 2], &'static [usize], [usize; 2]);

const SMALL_LAYERS: [Layer; 3] = [
    (Parallel::Column, [3, 300], &[96, 48, 48], [17, 2]),
    (Parallel::Row, [2, 264], &[72], [1, 33]),
    (Parallel::Column, [3, 72], &[264], [140, 7]),
];

/// The last one has ranks too high to stage B, which are no multiple of the number of tensor-parallel ranks.
const LAYERS: [Layer; 6] = [
    (Parallel::Column, [2, 256], &[512], [16, 8]),
    (Parallel::Column, [3, 300], &[96, 48, 48], [17, 2]),
    (Parallel::Column, [8, 1032], &[640, 64], [5, 64]),
    (Parallel::Row, [2, 512], &[72], [1, 33]),
    (Parallel::Row, [4, 2304], &[640], [16, 64]),
    (Parallel::Column, [3, 520], &[300], [200, 7]),
];

const TOKENS: [usize; 5] = [1, 6, 17, 70, 600];

/// Sums of small integers are exact in any order: the bits are those of the CPU. Of tokens without an adapter, `v` is
/// zero and `y` as it was.
fn exact<T: Float>() {
    let gpu = Gpu::new();
    for &(parallel, sizes, outputs, ranks) in choose(&LAYERS[..], &SMALL_LAYERS) {
        let mut rng = StdRng::seed_from_u64(3);
        let mut integer = || f32::from(rng.random_range(-2_i8..=2));
        let world = World::new(parallel, sizes, outputs, ranks, T::DTYPE, &mut integer);
        for &tokens in choose(&TOKENS[..], &[6, 520]) {
            let batch = Tokens::<T>::new(&world, tokens, &mut integer);
            let y = before(&world, tokens, &mut integer);
            let (gpu, cpu) = (on_gpu(&gpu, &world, &batch, &y), on_cpu(&world, &batch, &y));
            for rank in 0..world.size {
                let what = format!("{parallel:?} {sizes:?} {outputs:?}, {tokens} tokens, rank {rank}");
                assert!(gpu.0[rank] == cpu.0[rank], "v of {what}");
                assert!(bits(&gpu.1[rank]) == bits(&cpu.1[rank]), "y of {what}");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn integers_are_exact_in_f32() {
    exact::<f32>();
}

#[test]
#[ignore = "needs a GPU"]
fn integers_are_exact_in_bf16() {
    exact::<bf16>();
}

#[test]
#[ignore = "needs a GPU"]
fn integers_are_exact_in_f16() {
    exact::<f16>();
}

/// Random values are within the rounding of the unsharded layer's reference.
fn random<T: Float>() {
    let gpu = Gpu::new();
    for &(parallel, sizes, outputs, ranks) in choose(&LAYERS[..], &SMALL_LAYERS) {
        let mut rng = StdRng::seed_from_u64(4);
        let mut value = || round(rng.random_range(-1.0_f32..1.0), T::DTYPE);
        let world = World::new(parallel, sizes, outputs, ranks, T::DTYPE, &mut value);
        let batch = Tokens::<T>::new(&world, 40, &mut value);
        let y = before(&world, 40, &mut value);
        let (_, added) = on_gpu(&gpu, &world, &batch, &y);
        // By slot and module.
        let wide = |values: &[f32]| values.iter().map(|&value| f64::from(value)).collect::<Vec<_>>();
        let factors: Vec<Vec<_>> = world
            .loras
            .iter()
            .map(|loras| {
                loras.iter().map(|lora| (lora.path.clone(), wide(&lora.a), wide(&lora.b), lora.rank)).collect()
            })
            .collect();
        for (token, (slot, x)) in batch.slots.iter().zip(batch.x.chunks(world.inputs)).enumerate() {
            let x: Vec<f64> = x.iter().map(|x| f64::from(x.to_f32())).collect();
            for i in 0..outputs.len() {
                let adapted = usize::try_from(*slot)
                    .ok()
                    .and_then(|slot| factors.get(slot)?.iter().find(|(path, ..)| *path == format!("layer.m{i}")));
                let delta =
                    adapted.map(|(_, a, b, rank)| reference::linear(&x, Factors { a, b, rank: *rank, scaling: 2.0 }));
                for rank in 0..world.size {
                    let model = world.model(rank);
                    let site = &model[world.id];
                    let first: usize = site.slices()[..i].iter().map(|slice| slice.out_features()).sum();
                    let slice = &site.slices()[i];
                    let outputs: Vec<usize> = slice.ranges().iter().cloned().flatten().collect();
                    for (column, output) in outputs.into_iter().enumerate() {
                        let at = token * site.out_features() + first + column;
                        let (before, after) = (y[rank][at].to_f32(), added[rank][at].to_f32());
                        match &delta {
                            Some(delta) if slice.delta_range().contains(&column) => {
                                let roundings = world.inputs + world.max_rank + world.size + 8;
                                let expected =
                                    expect_sum::<T>(Values::Rounded, f64::from(before), delta[output], roundings);
                                let Expected::Within(value, error) = expected else { unreachable!() };
                                let difference = (f64::from(after) - value).abs();
                                assert!(
                                    difference <= error,
                                    "{parallel:?} {sizes:?}, token {token}, rank {rank}, output {output}: {after} \
                                     instead of {value}"
                                );
                            }
                            _ => assert_eq!(after.to_bits(), before.to_bits()),
                        }
                    }
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn random_values_are_within_their_rounding() {
    random::<f32>();
    random::<bf16>();
    random::<f16>();
}

/// A token's bits depend on nothing else in its batch, and are the same from a captured graph.
#[test]
#[ignore = "needs a GPU"]
fn a_token_gets_in_any_batch_and_in_a_graph_what_it_gets_alone() {
    let gpu = Gpu::new();
    for &(parallel, sizes, outputs, ranks) in choose(&LAYERS[..], &SMALL_LAYERS) {
        let mut rng = StdRng::seed_from_u64(5);
        let mut value = || rng.random_range(-1.0_f32..1.0);
        let world = World::new(parallel, sizes, outputs, ranks, DType::BF16, &mut value);
        let tokens = 530;
        let batch = Tokens::<bf16>::new(&world, tokens, &mut value);
        let y = before::<bf16>(&world, tokens, &mut value);
        let (parts, added) = on_gpu(&gpu, &world, &batch, &y);
        let v = world.exchanged(&parts);
        for &token in choose(&[0, 2, 3, 517][..], &[2, 517]) {
            let alone = batch.alone(token, world.inputs);
            let row = |rank: usize| {
                let outputs = y[rank].len() / tokens;
                token * outputs..(token + 1) * outputs
            };
            let y: Vec<_> = (0..world.size).map(|rank| y[rank][row(rank)].to_vec()).collect();
            let (parts_alone, added_alone) = on_gpu(&gpu, &world, &alone, &y);
            for rank in 0..world.size {
                let width = parts[rank].len() / tokens;
                assert_eq!(bits(&parts_alone[rank]), bits(&parts[rank][token * width..][..width]));
                assert_eq!(bits(&added_alone[rank]), bits(&added[rank][row(rank)]), "token {token}");
            }
        }

        let mut rank = Rank::new(&gpu, &world, 1, &batch);
        rank.received.write(&v).unwrap();
        rank.y.write(&y[1]).unwrap();
        let Rank { weights, layer, routing, workspace, x, sent, received, y, shape, .. } = &mut rank;
        let mut graph = weights
            .capture(routing, tokens, workspace, |step| -> Result<(), LaunchError> {
                let ([rows, cols], [v_rows, v_cols]) = (shape.sent, shape.received);
                let x = Matrix::new(&*x, tokens, shape.inputs)?;
                layer.shrink(step, x, MatrixMut::new(&mut *sent, rows, cols)?)?;
                let v = Matrix::new(&*received, v_rows, v_cols)?;
                layer.expand(step, v, MatrixMut::new(&mut *y, tokens, shape.outputs)?)
            })
            .unwrap();
        let slots = slots_of(weights, &batch.slots);
        let update = routing.update(&Batch::new(&slots)).unwrap();
        graph.replay(&mut weights.step(&update, workspace).unwrap()).unwrap();
        assert_eq!(bits(&read(sent)), bits(&parts[1]));
        assert_eq!(bits(&read(y)), bits(&added[1]));
    }
}
