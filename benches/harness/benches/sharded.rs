//! The kernels of one rank of a linear layer, plain and fully sharded: the time per layer in a captured graph, without
//! what the ranks exchange. Each layer has factors of its own, so that all of them come from memory.

use std::time::Duration;

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cuda::{
        Buffer, FullyShardedLinear, Graph, LaunchError, LoraLinear, Matrix, MatrixMut, Routing, WeightTable, Workspace,
    },
    model::{Linear, LinearId, Model, ModelSpec, Parallel, Shard, TpRank},
    plan::Capacity,
    routing::Batch,
};
use criterion::{Criterion, criterion_group, criterion_main};
use half::bf16;

use aril_bench::{Result, data::SMALL, device::Gpu, noise::Noise};

/// Modules of Qwen3-8B: name, form, input and output features.
const MODULES: [(&str, Parallel, usize, usize); 2] =
    [("gate_up", Parallel::Column, 4096, 24576), ("down", Parallel::Row, 12288, 4096)];
const RANKS: [usize; 3] = [16, 64, 256];
const TENSOR_PARALLEL: [usize; 2] = [2, 4];
const TOKENS: [usize; 2] = [8, 64];
/// Adapters of a batch, in turn.
const ADAPTERS: usize = 8;
/// Factors of all layers together, in bytes. More than the cache holds.
const FACTOR_BYTES: usize = 200 << 20;

/// Copies of one layer, and an adapter of all of them.
struct Layers {
    spec: ModelSpec,
    ids: Vec<LinearId>,
    adapter: Adapter,
    rank: usize,
}

impl Layers {
    fn new(parallel: Parallel, [input, output]: [usize; 2], rank: usize, noise: &Noise) -> Result<Self> {
        let count = (FACTOR_BYTES / (ADAPTERS * rank * (input + output))).clamp(3, 36);
        let (mut spec, mut ids, mut tensors) = (ModelSpec::new(), Vec::new(), Vec::new());
        for layer in 0..count {
            ids.push(spec.linear(Linear::new(format!("{layer}"), parallel, input).slice("m", output))?);
            for (factor, shape) in [("A", [rank, input]), ("B", [output, rank])] {
                let values: Vec<bf16> = noise.range(layer * 7919, shape[0] * shape[1]).collect();
                let tensor = Tensor::new(DType::BF16, shape, bytemuck::cast_slice(&values).to_vec())?;
                tensors.push((format!("{layer}.m.lora_{factor}.weight"), tensor));
            }
        }
        let adapter = Adapter::from_tensors(r#"{"peft_type": "LORA", "lora_alpha": 1}"#, tensors)?;
        Ok(Self { spec, ids, adapter, rank })
    }

    /// A table of the first rank's part, with the adapter in all slots.
    fn weights(&self, gpu: &Gpu, shard: Shard) -> Result<WeightTable> {
        let model = self.spec.shard(shard)?;
        let image = self.adapter.plan(&model, DType::BF16)?;
        let capacity = Capacity::tokens(TOKENS[1]).slots(ADAPTERS).rank(self.rank);
        let arena_bytes = WeightTable::arena_bytes([&image; ADAPTERS]);
        let weights = WeightTable::new(&gpu.queue()?, &model, DType::BF16, capacity, arena_bytes)?;
        (0..ADAPTERS).try_for_each(|slot| weights.load(slot, &image).map(|_| ()))?;
        Ok(weights)
    }

    /// A graph of all layers: the plain delta, or shrink and expand.
    fn capture<'w>(&self, gpu: &Gpu, weights: &'w WeightTable, tokens: usize, noise: &Noise) -> Result<Captured<'w>> {
        let (queue, model): (_, &Model) = (gpu.queue()?, weights.model());
        let site = &model[self.ids[0]];
        let [input, output] = [site.in_features(), site.out_features()];
        let mut x = Buffer::<bf16>::zeros(&queue, tokens * input)?;
        x.write(&noise.range(0, tokens * input).collect::<Vec<_>>())?;
        let mut y = Buffer::<bf16>::zeros(&queue, tokens * output)?;
        let routing = Routing::new(&queue, weights.capacity(), 1)?;
        let mut workspace = Workspace::new(weights)?;
        let slots = weights.loaded().into_iter().map(|info| info.slot).cycle().take(tokens).collect();
        let graph = match site.exchange() {
            None => {
                let layers = self.ids.iter().map(|&id| LoraLinear::new(weights, id));
                let layers = layers.collect::<std::result::Result<Vec<_>, _>>()?;
                weights.capture(&routing, tokens, &mut workspace, |step| -> std::result::Result<(), LaunchError> {
                    for layer in &layers {
                        let x = Matrix::new(&x, tokens, input)?;
                        layer.add_delta(step, x, MatrixMut::new(&mut y, tokens, output)?)?;
                    }
                    Ok(())
                })?
            }
            Some(exchange) => {
                let layers = self.ids.iter().map(|&id| FullyShardedLinear::new(weights, id));
                let layers = layers.collect::<std::result::Result<Vec<_>, _>>()?;
                let [sent, received] = [exchange.sent(tokens, self.rank), exchange.received(tokens, self.rank)];
                let mut v = Buffer::<f32>::zeros(&queue, sent[0] * sent[1])?;
                let mut exchanged = Buffer::<f32>::zeros(&queue, received[0] * received[1])?;
                exchanged.write(&vec![0.01; received[0] * received[1]])?;
                weights.capture(&routing, tokens, &mut workspace, |step| -> std::result::Result<(), LaunchError> {
                    for layer in &layers {
                        let x = Matrix::new(&x, tokens, input)?;
                        layer.shrink(step, x, MatrixMut::new(&mut v, sent[0], sent[1])?)?;
                        let v = Matrix::new(&exchanged, received[0], received[1])?;
                        layer.expand(step, v, MatrixMut::new(&mut y, tokens, output)?)?;
                    }
                    Ok(())
                })?
            }
        };
        gpu.synchronize()?;
        Ok(Captured { graph, weights, routing, workspace, slots })
    }
}

/// A graph, and what its steps share.
struct Captured<'w> {
    graph: Graph,
    weights: &'w WeightTable,
    routing: Routing,
    workspace: Workspace,
    slots: Vec<Slot>,
}

impl Captured<'_> {
    /// Enqueues this many replays.
    fn replay(&mut self, replays: u64) -> Result<()> {
        self.routing.wait()?;
        let batch = self.routing.update(&Batch::new(&self.slots))?;
        let mut step = self.weights.step(&batch, &mut self.workspace)?;
        (0..replays).try_for_each(|_| Ok(self.graph.replay(&mut step)?))
    }
}

fn sharded(criterion: &mut Criterion) {
    let (gpu, noise) = (Gpu::new().expect("there is a GPU"), Noise::new(1, SMALL, 0.02));
    let mut group = criterion.benchmark_group("sharded/bf16");
    group.sample_size(10).warm_up_time(Duration::from_millis(50)).measurement_time(Duration::from_millis(200));
    for (module, parallel, input, output) in MODULES {
        for rank in RANKS {
            let layers = Layers::new(parallel, [input, output], rank, &noise).expect("it is a model");
            for tp in TENSOR_PARALLEL {
                let plain = Shard::new(TpRank::new(0, tp).expect("the group has a rank"));
                for (form, shard) in [("plain", plain.clone()), ("fully-sharded", plain.fully_sharded())] {
                    let weights = layers.weights(&gpu, shard).expect("there is memory for it");
                    for tokens in TOKENS {
                        let mut graph = layers.capture(&gpu, &weights, tokens, &noise).expect("it can be captured");
                        let count = layers.ids.len() as u64;
                        group.bench_function(format!("{module}/r{rank}/tp{tp}/t{tokens}/{form}"), |bencher| {
                            bencher.iter_custom(|iterations| {
                                let replays = iterations.div_ceil(count);
                                let us = gpu.time_eager(|| graph.replay(replays)).expect("it runs");
                                Duration::from_secs_f64(us / 1e6 * iterations as f64 / (replays * count) as f64)
                            });
                        });
                    }
                }
            }
        }
    }
}

criterion_group!(benches, sharded);
criterion_main!(benches);
