//! Data-parallel attention and expert-parallel experts: each rank has sequences of its own, and tokens travel to the
//! ranks of their experts.
//!
//! Four ranks, each a thread of one process, compute what a single rank computes for all tokens. A layer is a
//! projection, which every rank has whole and computes for its own tokens, and experts, of which a rank holds a
//! quarter. In front of the experts, the ranks gather all tokens: their activations, their adapters and the router's
//! choice. Each computes its experts' part for all of them, and a rank's tokens get the sum of all parts. So a layer
//! has two steps of the rank's table: one of its own batch, one of the gathered one. All numbers are small integers, so
//! that sums are exact in any order.

#![forbid(unsafe_code)]

use std::{
    sync::{Arc, Barrier, Mutex},
    thread,
    time::Duration,
};

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cpu::{AdapterPool, LoraExperts, LoraLinear, Matrix, MatrixMut, Tiers, WeightTable, Workspace},
    group::{GroupPool, InProcess, Ranks},
    model::{Activation, Experts, ExpertsId, Linear, LinearId, ModelSpec, Parallel, Shard, TpRank},
    plan::Capacity,
    pool::{Lease, PoolConfig, Source, StreamId},
    routing::{Batch, TopK},
};

type Error = Box<dyn std::error::Error + Send + Sync>;
type Result<T> = std::result::Result<T, Error>;

const HIDDEN: usize = 8;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;
const RANK: usize = 2;
const ADAPTERS: usize = 2;
const LAYERS: usize = 2;
const MAX_TOKENS: usize = 16;
const STREAM: StreamId = StreamId::FIRST;
/// How long a rank waits for another.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Integers from -1 to 1.
fn integers(seed: usize, len: usize) -> Vec<f32> {
    let integer = |i: usize| (i + 97 * seed).wrapping_mul(2_654_435_761) >> 9;
    (0..len).map(|i| [-1.0, 0.0, 1.0][integer(i) % 3]).collect()
}

/// Of adapter `seed`, for all modules of all layers.
fn adapter(seed: usize) -> Result<Adapter> {
    let experts = |layer| (0..EXPERTS).map(move |e| (layer, format!("mlp.experts.{e}")));
    let modules = (0..LAYERS).flat_map(|layer| {
        let of_expert =
            |(layer, path): (usize, String)| ["up_proj", "down_proj"].map(|m| (layer, format!("{path}.{m}")));
        [(layer, "attn.o_proj".to_owned())].into_iter().chain(experts(layer).flat_map(of_expert))
    });
    let mut tensors = Vec::new();
    for (number, (layer, module)) in modules.enumerate() {
        for (side, shape) in [("A", [RANK, HIDDEN]), ("B", [HIDDEN, RANK])] {
            let values = integers(1000 * seed + 2 * number + usize::from(side == "B"), RANK * HIDDEN);
            let tensor = Tensor::new(DType::F32, shape, bytemuck::cast_slice(&values).to_vec())?;
            tensors.push((format!("layers.{layer}.{module}.lora_{side}.weight"), tensor));
        }
    }
    Ok(Adapter::from_tensors(&format!(r#"{{"peft_type": "LORA", "r": {RANK}, "lora_alpha": {RANK}}}"#), tensors)?)
}

/// `W x` for a square W.
fn product(seed: usize, x: &[f32]) -> Vec<f32> {
    let w = integers(seed, HIDDEN * HIDDEN);
    w.chunks(HIDDEN).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

/// A token on its way to the experts.
#[derive(Clone)]
struct Token {
    x: Vec<f32>,
    adapter: Option<usize>,
    experts: [usize; TOP_K],
}

/// What the ranks exchange. An engine has NCCL's all-gather and reduce-scatter, or an all-to-all of DeepEP, in place of
/// this.
struct Exchange<T> {
    parts: Mutex<Vec<Vec<T>>>,
    barrier: Barrier,
}

impl<T: Clone> Exchange<T> {
    fn new(size: usize) -> Self {
        Self { parts: Mutex::new(vec![Vec::new(); size]), barrier: Barrier::new(size) }
    }

    /// The parts of all ranks.
    fn all_gather(&self, rank: usize, part: Vec<T>) -> Result<Vec<Vec<T>>> {
        self.parts.lock().map_err(|_| "a rank panicked")?[rank] = part;
        self.barrier.wait();
        let parts = self.parts.lock().map_err(|_| "a rank panicked")?.clone();
        // Nobody writes the next part before everybody has read this one.
        self.barrier.wait();
        Ok(parts)
    }
}

struct Layer {
    o: LinearId,
    experts: ExpertsId,
}

/// A rank: its pool, whose steps take this table, and the leases of its adapters.
struct Engine<'e> {
    rank: TpRank,
    layers: &'e [Layer],
    pool: &'e GroupPool<InProcess, Tiers>,
    weights: &'e WeightTable,
    leases: Vec<Lease>,
    tokens: &'e Exchange<Token>,
    sums: &'e Exchange<f32>,
}

impl Engine<'_> {
    fn slots_of(&self, adapters: impl Iterator<Item = Option<usize>>) -> Vec<Slot> {
        adapters.map(|adapter| adapter.map_or(Slot::BASE, |adapter| self.leases[adapter].slot())).collect()
    }

    /// The outputs of the rank's own tokens, each an input and its adapter.
    fn run(&self, batch: &[(Vec<f32>, Option<usize>)]) -> Result<Vec<Vec<f32>>> {
        let own_slots = self.slots_of(batch.iter().map(|(_, adapter)| *adapter));
        let mut rows: Vec<f32> = batch.iter().flat_map(|(x, _)| x.clone()).collect();
        let (mut of_own, mut of_all) = (Workspace::default(), Workspace::default());
        for (number, layer) in self.layers.iter().enumerate() {
            let mut y: Vec<f32> = rows.chunks(HIDDEN).flat_map(|x| product(10_000 + number, x)).collect();
            if !batch.is_empty() {
                let mut own = self.pool.step(STREAM, &Batch::new(&own_slots), &mut of_own)?;
                let x = Matrix::new(&rows, batch.len(), HIDDEN)?;
                LoraLinear::new(self.weights, layer.o)?.add_delta(
                    &mut own,
                    x,
                    MatrixMut::new(&mut y, batch.len(), HIDDEN)?,
                )?;
            }

            let route = |(x, (_, adapter)): (&[f32], &(Vec<f32>, Option<usize>))| {
                let first = x.iter().filter(|x| **x > 0.0).count() % EXPERTS;
                Token { x: x.to_vec(), adapter: *adapter, experts: [first, (first + 3) % EXPERTS] }
            };
            let sent = y.chunks(HIDDEN).zip(batch).map(route).collect();
            let gathered = self.tokens.all_gather(self.rank.rank(), sent)?;
            let before: usize = gathered[..self.rank.rank()].iter().map(Vec::len).sum();
            let parts = self.experts_part(number, layer.experts, &gathered.concat(), &mut of_all)?;
            let parts = self.sums.all_gather(self.rank.rank(), parts)?;
            rows = (before * HIDDEN..(before + batch.len()) * HIDDEN)
                .map(|i| parts.iter().map(|part| part[i]).sum::<f32>().signum())
                .collect();
        }
        Ok(rows.chunks(HIDDEN).map(<[f32]>::to_vec).collect())
    }

    /// What the experts of this rank add to each of these tokens.
    fn experts_part(
        &self,
        number: usize,
        id: ExpertsId,
        tokens: &[Token],
        workspace: &mut Workspace,
    ) -> Result<Vec<f32>> {
        if tokens.is_empty() {
            return Ok(Vec::new());
        }
        let model = self.weights.model();
        let held = model[id].held();
        // Local numbers; -1 is another rank's expert.
        let local = |expert: &usize| held.iter().position(|held| held == expert).map_or(Ok(-1), i32::try_from);
        let ids: Vec<i32> =
            tokens.iter().flat_map(|token| &token.experts).map(local).collect::<std::result::Result<_, _>>()?;
        let top_k = TopK::new(&ids, TOP_K)?;
        let routes = tokens.iter().flat_map(|token| token.experts.map(|expert| (token, expert)));
        let seed = |half: usize, expert: usize| 20_000 + 1000 * number + 2 * expert + half;
        let up: Vec<f32> = routes.clone().flat_map(|(token, expert)| product(seed(0, expert), &token.x)).collect();
        let x: Vec<f32> = tokens.iter().flat_map(|token| token.x.clone()).collect();

        let slots = self.slots_of(tokens.iter().map(|token| token.adapter));
        let mut gathered = self.pool.step(STREAM, &Batch::new(&slots), workspace)?;
        let layer = LoraExperts::new(self.weights, id)?;
        let (count, routes_count) = (tokens.len(), tokens.len() * TOP_K);
        let (mut activated, mut sums) = (vec![0.0; routes_count * HIDDEN], vec![0.0; count * HIDDEN]);
        let [x, up] = [Matrix::new(&x, count, HIDDEN)?, Matrix::new(&up, routes_count, HIDDEN)?];
        let out = MatrixMut::new(&mut activated, routes_count, HIDDEN)?;
        layer.activate(&mut gathered, &top_k, x, up, out, Activation::Relu2)?;
        let down: Vec<f32> =
            routes.zip(activated.chunks(HIDDEN)).flat_map(|((_, expert), row)| product(seed(1, expert), row)).collect();
        let [x, down] = [Matrix::new(&activated, routes_count, HIDDEN)?, Matrix::new(&down, routes_count, HIDDEN)?];
        layer.combine(&mut gathered, &top_k, x, down, MatrixMut::new(&mut sums, count, HIDDEN)?)?;
        Ok(sums)
    }
}

/// The model, and the part of each of `size` ranks: all of `o`, and an equal share of the experts.
fn describe() -> Result<(ModelSpec, Vec<Layer>)> {
    let mut spec = ModelSpec::new();
    let layers = (0..LAYERS).map(|layer| {
        let o = Linear::new(format!("layers.{layer}.attn"), Parallel::Replicated, HIDDEN).slice("o_proj", HIDDEN);
        let experts =
            Experts::new(format!("layers.{layer}.mlp.experts"), EXPERTS, HIDDEN, HIDDEN).top_k(TOP_K).ungated();
        Ok(Layer { o: spec.linear(o)?, experts: spec.experts(experts)? })
    });
    let layers = layers.collect::<Result<_>>()?;
    Ok((spec, layers))
}

type Tokens = Vec<(Vec<f32>, Option<usize>)>;

/// The outputs of each rank's tokens.
fn run_group(spec: &ModelSpec, layers: &[Layer], batches: &[Vec<Tokens>]) -> Result<Vec<Vec<Vec<Vec<f32>>>>> {
    let size = batches.len();
    let (tokens, sums) = (Exchange::new(size), Exchange::new(size));
    let run = |ranks: InProcess, batches: &[Tokens]| {
        let rank = ranks.tp();
        let share = EXPERTS / size;
        let of_experts = layers.iter().fold(Shard::new(rank).experts_tp(TpRank::SINGLE), |shard, layer| {
            shard.held(layer.experts, rank.rank() * share..(rank.rank() + 1) * share)
        });
        let model = spec.shard(of_experts)?;
        let capacity = Capacity::tokens(MAX_TOKENS).slots(ADAPTERS).rank(RANK);
        let config = PoolConfig::arena_bytes(AdapterPool::arena_bytes(&model, DType::F32, RANK, ADAPTERS));
        let mut pool = GroupPool::new(ranks, AdapterPool::new(&model, DType::F32, capacity, config)?)?;
        let mut load = |seed: usize| {
            let id = pool.register(Source::memory(Arc::new(adapter(seed)?), &model, DType::F32))?;
            let load = pool.prefetch(id)?;
            pool.wait_for(&load, TIME_LIMIT)?;
            Ok(pool.acquire(id, STREAM)?)
        };
        let leases = (0..ADAPTERS).map(&mut load).collect::<Result<_>>()?;
        let weights = pool.weights(STREAM).ok_or("the pool has its first stream")?;
        let engine = Engine { rank, layers, pool: &pool, weights, leases, tokens: &tokens, sums: &sums };
        batches.iter().map(|batch| engine.run(batch)).collect::<Result<Vec<_>>>()
    };
    let run = &run;
    thread::scope(|scope| {
        let ranks = InProcess::group(size, TIME_LIMIT).into_iter().zip(batches);
        let threads: Vec<_> = ranks.map(|(rank, batches)| scope.spawn(move || run(rank, batches))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| "a rank panicked")?).collect()
    })
}

fn main() -> Result<()> {
    let (spec, layers) = describe()?;
    // The tokens of each rank in each step: an uneven spread, an idle rank, one rank with all tokens, and none.
    let spreads = [[3, 2, 4, 1], [1, 0, 5, 2], [0, 12, 0, 0], [0, 0, 0, 0]];
    let mut seed = 0;
    let mut token = |_| {
        seed += 1;
        (integers(30_000 + seed, HIDDEN), [None, Some(0), Some(1)][seed % 3])
    };
    let steps: Vec<[Tokens; 4]> =
        spreads.iter().map(|spread| spread.map(|count| (0..count).map(&mut token).collect())).collect();

    let of_rank = |rank: usize| steps.iter().map(|step| step[rank].clone()).collect::<Vec<_>>();
    let ranks = run_group(&spec, &layers, &[0, 1, 2, 3].map(of_rank))?;
    let single = run_group(&spec, &layers, &[steps.iter().map(|step| step.concat()).collect()])?;
    for (step, whole) in single[0].iter().enumerate() {
        let parts: Vec<_> = ranks.iter().flat_map(|rank| rank[step].clone()).collect();
        assert_eq!(&parts, whole, "step {step}");
    }
    let without = |step: &[Tokens; 4]| step.concat().into_iter().map(|(x, _)| (x, None)).collect();
    let base = run_group(&spec, &layers, &[steps.iter().map(without).collect()])?;
    assert_ne!(base, single, "the adapters change something");
    println!("Four ranks compute for {} steps what one computes.", steps.len());
    Ok(())
}

#[test]
fn runs() -> Result<()> {
    main()
}
