//! `--time-experts`: the time of a whole layer of experts, with and without adapters.
//!
//! The layer has the sizes of Qwen3-30B-A3B and random weights and tokens in bf16. It consists of the router, the
//! sorting of routes, both grouped GEMMs, the activation and the combine. These kernels are the example's own. With
//! adapters, activation and combine are the library's.
//!
//! A figure is the median over replays of a CUDA graph of several layers, per layer. Each layer of a graph has its own
//! tokens, so that other experts are used and weights come from memory. All buffers are allocated before, as in an
//! engine.

use std::fmt::Write as _;

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cuda::{self, Graph, Grouping, LoraExperts, Routing, WeightTable, Workspace},
    model::{Experts, Model, ModelSpec, TpRank},
    plan::{Capacity, RouteCapacity},
    routing::Batch,
};
use cudarc::driver::sys::CUevent_flags;
use half::bf16;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::{
    Buffers, Cuda, Matrix,
    experts::{GroupedGemms, Plain, Routes},
};
use crate::{
    device::Device,
    error::{Result, bail},
    experts::ExpertsShape,
};

const HIDDEN: usize = 2048;
const INTER: usize = 768;
const EXPERTS: usize = 128;
const TOP_K: usize = 8;

const ADAPTERS: usize = 8;
const RANK: usize = 16;

/// Tokens of a step. Up to 128 tokens take the adapters in turn, as in decoding. More tokens are divided among the
/// adapters in order, as in a prefill.
const TOKENS: [usize; 7] = [1, 8, 32, 64, 128, 256, 4096];
const MAX_TOKENS: usize = 4096;

/// Layers in a graph.
const TURNS: usize = 8;
const WARM_UPS: usize = 3;
const REPLAYS: usize = 20;

/// Times the layer and returns a table.
pub(crate) fn time_experts(ordinal: usize) -> Result<String> {
    let device = Cuda::new(ordinal)?;
    let name = device.queue.stream().context().name()?;

    let mut spec = ModelSpec::new();
    let id = spec.experts(Experts::new("mlp.experts", EXPERTS, HIDDEN, INTER).top_k(TOP_K))?;
    let model = spec.shard(TpRank::SINGLE)?;
    let per_expert = device.random_adapters(&model, [EXPERTS; 4])?;
    let shared_outer = device.random_adapters(&model, [1, EXPERTS, EXPERTS, 1])?;
    let layer = Layer {
        router: device.noise(EXPERTS, HIDDEN)?,
        gate_up: device.random_experts(2 * INTER, HIDDEN)?,
        down: device.random_experts(HIDDEN, INTER)?,
        lora: device.lora_experts(&per_expert.0, id)?,
        device: &device,
    };
    let Buffers { mut routing, mut workspace } = device.buffers(&per_expert.0)?;
    let mut grouping = device.grouping(RouteCapacity::tokens(MAX_TOKENS).top_k(TOP_K).experts(EXPERTS))?;

    let mut table = format!(
        "A layer of experts of Qwen3-30B-A3B in bf16 on {name}, in µs, and what {ADAPTERS} adapters of rank {RANK} \
         add\n\n\
         {:>6} {:>10} {:>20} {:>20}\n",
        "tokens", "without", "per-expert", "shared-outer"
    );
    for tokens in TOKENS {
        let slot = |token| if tokens <= 128 { token % ADAPTERS } else { token * ADAPTERS / tokens };
        let of = |slots: &[Slot]| (0..tokens).map(|token| slots[slot(token)]).collect::<Vec<_>>();
        let inputs = (0..TURNS).map(|turn| device.tokens(turn, tokens)).collect::<Result<Vec<_>>>()?;
        let mut values = Values::new(&device, tokens)?;
        let mut graphs = Vec::new();
        let mut outputs = Vec::new();
        for (adapters, adapted) in [(&per_expert, false), (&per_expert, true), (&shared_outer, true)] {
            // A first run loads what is loaded lazily.
            let (adapters, slots) = adapters;
            let slots = of(slots);
            let batch = routing.update(&Batch::new(&slots))?;
            let mut step = adapters.step(&batch, &mut workspace)?;
            layer.enqueue(&mut step, &mut grouping, &inputs[0], &mut values, adapted)?;
            outputs.push(device.read(&values.out)?);
            let graph = adapters.capture(&routing, tokens, &mut workspace, |step| {
                device.captured(step, |step| {
                    inputs.iter().try_for_each(|x| layer.enqueue(step, &mut grouping, x, &mut values, adapted))
                })
            })?;
            graphs.push((adapters, slots, graph));
        }
        for with in &outputs[1..] {
            let moved = difference(with, &outputs[0]);
            if !(0.01..10.0).contains(&moved) {
                bail!("{tokens} tokens: adapters move the layer's output by {moved:e} of its size");
            }
        }
        let [without, per_expert, shared_outer] = device.time(&mut graphs, &mut routing, &mut workspace)?[..] else {
            unreachable!("three graphs")
        };
        let added = |us: f64| format!("{us:.1} (+{:.1})", us - without);
        writeln!(table, "{tokens:>6} {without:>10.1} {:>20} {:>20}", added(per_expert), added(shared_outer))?;
    }
    Ok(table)
}

struct Layer<'a> {
    device: &'a Cuda<bf16>,
    router: Matrix<bf16>,
    gate_up: Plain<bf16>,
    down: Plain<bf16>,
    lora: LoraExperts,
}

/// The buffers of a step. Each is written before it is read.
struct Values {
    scores: Matrix<bf16>,
    routes: Routes,
    rows: Matrix<bf16>,
    gate_up: Matrix<bf16>,
    inter: Matrix<bf16>,
    down: Matrix<bf16>,
    out: Matrix<bf16>,
}

impl Values {
    fn new(device: &Cuda<bf16>, tokens: usize) -> Result<Self> {
        let routes = tokens * TOP_K;
        Ok(Self {
            scores: device.alloc(tokens, EXPERTS)?,
            routes: Routes::new(device, tokens, (EXPERTS, 0..EXPERTS), TOP_K)?,
            rows: device.alloc(routes, HIDDEN)?,
            gate_up: device.alloc(routes, 2 * INTER)?,
            inter: device.alloc(routes, INTER)?,
            down: device.alloc(routes, HIDDEN)?,
            out: device.alloc(tokens, HIDDEN)?,
        })
    }
}

impl Layer<'_> {
    /// The forward's layer of experts, with the adapters of a step or without a call of the library's.
    fn enqueue(
        &self,
        step: &mut cuda::Step<'_>,
        grouping: &mut Grouping,
        x: &Matrix<bf16>,
        values: &mut Values,
        adapted: bool,
    ) -> Result<()> {
        let Self { device, router, gate_up, down, lora } = self;
        let Values { scores, routes, rows, gate_up: y, inter, down: z, out } = values;
        routes.choose(device, (x, router), (scores, false), true)?;
        let routes = &*routes;
        let mut grouped = if adapted { Some(device.group(grouping, step, routes)?) } else { None };

        let GroupedGemms { tensor, activated, .. } = &device.functions.grouped_gemm;
        if adapted || !gate_up.run_on_tokens_into(device, activated, x, routes, inter)? {
            if !gate_up.run_on_tokens_into(device, tensor, x, routes, y)? {
                device.gather_into(x, &routes.tokens, rows)?;
                gate_up.run_into(device, rows, routes, y)?;
            }
            match &mut grouped {
                Some(grouped) => device.activate_into(lora, step, grouped, x, y, inter)?,
                None => device.silu_mul_into(y, Some(routes), inter)?,
            }
        }
        down.run_into(device, inter, routes, z)?;
        match &mut grouped {
            Some(grouped) => device.combine_adapted_into(lora, step, grouped, inter, z, out),
            None => device.combine_into(z, routes, out),
        }
    }
}

impl Cuda<bf16> {
    /// Random weights of a linear layer that preserve the magnitude of their input.
    fn noise(&self, rows: usize, cols: usize) -> Result<Matrix<bf16>> {
        let mut slice = self.slice(rows, cols)?;
        let noise = noise(0, (cols as f32).powf(-0.5));
        for first in (0..rows * cols).step_by(noise.len()) {
            let len = noise.len().min(rows * cols - first);
            self.queue.stream().memcpy_htod(&noise[..len], &mut slice.slice_mut(first..first + len))?;
        }
        self.matrix(rows, cols, slice)
    }

    fn random_experts(&self, out_features: usize, in_features: usize) -> Result<Plain<bf16>> {
        let shape = ExpertsShape { experts: EXPERTS, out_features, in_features };
        Ok(Plain { shape, weights: self.noise(EXPERTS * out_features, in_features)? })
    }

    fn tokens(&self, turn: usize, tokens: usize) -> Result<Matrix<bf16>> {
        let noise = noise(1 + turn as u64, 1.0);
        let values: Vec<bf16> = noise.iter().copied().cycle().take(tokens * HIDDEN).collect();
        self.upload(tokens, HIDDEN, &values)
    }

    /// A table with all slots full. The numbers of A's and B's of gate and up, and of down, are one for each expert or
    /// one for all.
    fn random_adapters(
        &self,
        model: &Model,
        [gate_up_a, gate_up_b, down_a, down_b]: [usize; 4],
    ) -> Result<(WeightTable, Vec<Slot>)> {
        let mut tensors = Vec::new();
        let modules = [
            ("gate_proj", HIDDEN, INTER, gate_up_a, gate_up_b),
            ("up_proj", HIDDEN, INTER, gate_up_a, gate_up_b),
            ("down_proj", INTER, HIDDEN, down_a, down_b),
        ];
        for (module, in_features, out_features, num_a, num_b) in modules {
            let factors = [("A", num_a, RANK, in_features), ("B", num_b, out_features, RANK)];
            for (factor, count, rows, cols) in factors {
                let noise = noise(100 + tensors.len() as u64, (cols as f32).powf(-0.5));
                let values: Vec<bf16> = noise.iter().copied().cycle().take(count * rows * cols).collect();
                let tensor = Tensor::new(DType::BF16, [count, rows, cols], bytemuck::cast_slice(&values).to_vec())?;
                tensors.push((format!("mlp.experts.{module}.lora_{factor}.weight"), tensor));
            }
        }
        let config = format!(r#"{{"peft_type": "LORA", "r": {RANK}, "lora_alpha": {RANK}}}"#);
        let adapter = Adapter::from_tensors(&config, tensors)?;
        let images = (0..ADAPTERS).map(|_| adapter.plan(model, DType::BF16));
        let images = images.collect::<std::result::Result<Vec<_>, _>>()?;
        let capacity = Capacity::tokens(MAX_TOKENS).slots(ADAPTERS).rank(RANK);
        let table = self.adapters(model, capacity, WeightTable::arena_bytes(&images))?;
        let slots = images.iter().enumerate().map(|(slot, image)| self.load(&table, slot, image, |_| ()));
        let slots = slots.collect::<Result<_>>()?;
        Ok((table, slots))
    }

    /// How long a layer of each graph takes, in µs. The graphs take turns, so that each meets the same clocks.
    fn time(
        &self,
        graphs: &mut [(&WeightTable, Vec<Slot>, Graph)],
        routing: &mut Routing,
        workspace: &mut Workspace,
    ) -> Result<Vec<f64>> {
        let stream = self.queue.stream();
        let event = || stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let mut times = vec![Vec::new(); graphs.len()];
        for replay in 0..WARM_UPS + REPLAYS {
            for ((adapters, slots, graph), times) in graphs.iter_mut().zip(&mut times) {
                let (start, end) = (event()?, event()?);
                routing.wait()?;
                let batch = routing.update(&Batch::new(slots))?;
                let mut step = adapters.step(&batch, workspace)?;
                start.record(stream)?;
                graph.replay(&mut step)?;
                end.record(stream)?;
                let us = f64::from(start.elapsed_ms(&end)?) * 1e3;
                if replay >= WARM_UPS {
                    times.push(us / TURNS as f64);
                }
            }
        }
        let median = |mut times: Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        Ok(times.into_iter().map(median).collect())
    }
}

/// Random numbers with this standard deviation. Their number is prime, so a matrix that repeats them has no equal rows.
fn noise(seed: u64, deviation: f32) -> Vec<bf16> {
    const LEN: usize = 1_048_573;
    let limit = deviation * 3.0_f32.sqrt();
    let mut rng = StdRng::seed_from_u64(seed);
    (0..LEN).map(|_| bf16::from_f32(rng.random_range(-limit..limit))).collect()
}

/// The norm of `with - without`, relative to that of `without`. NaN if an element is NaN.
fn difference(with: &[f32], without: &[f32]) -> f64 {
    let norm = |squares: &mut dyn Iterator<Item = f64>| squares.map(|value| value * value).sum::<f64>().sqrt();
    let differences = &mut with.iter().zip(without).map(|(a, b)| f64::from(a - b));
    norm(differences) / norm(&mut without.iter().map(|&value| f64::from(value)))
}
