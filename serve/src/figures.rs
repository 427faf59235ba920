//! The time of decode steps in graphs on a GPU, in bf16 and on random weights: without adapters, and with 1, 8 and as many adapters as
//! sequences.
//!
//! A figure is the median over replays, each between two events on the stream. A replay includes the update of the step's routing. The
//! host stays ahead of the device, so that none of its time is in a figure.
//!
//! The host's time between steps is the engine's own: from the tokens of a step on the host to the next graph on the stream.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    model::TpRank,
    plan::{Capacity, MAX_FORWARD_TOKENS},
    pool::{AdapterId, Lease, PoolConfig, PoolError, Source},
};
use clap::Parser;
use cudarc::driver::sys::CUevent_flags;
use half::bf16;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde::Serialize;
use tokio::sync::mpsc::unbounded_channel;

use crate::{
    adapter_pool::AdapterPool,
    checkpoint::Weights,
    config::Config,
    cuda::Cuda,
    device::{BlockTable, Device as _},
    dummy,
    engine::{
        Capture as _, Engine, Limits, Request, Sampling, Sizes,
        graph::{Batch, Captured, Tables, Variant},
    },
    error::{Context as _, Error, Result, bail},
    forward::{Session, Step},
    model::{Described, Model, describe},
};

/// Tokens of a block of the cache.
const BLOCK_ROWS: usize = 16;

/// The longest wait for an adapter before it is asked for again.
const WAIT: Duration = Duration::from_millis(10);

/// Sequences, steps and adapters of the figure of the host, and the tokens of its prompts.
const HOST_BATCH: usize = 64;
const HOST_STEPS: usize = 100;
const HOST_ADAPTERS: usize = 8;
const PROMPT: usize = 16;

/// The longest time for these prompts.
const HOST_LIMIT: Duration = Duration::from_secs(20);

/// Replays before the first that counts.
const WARM_UPS: usize = 3;

/// Measures decode steps of models, each given by the directory of its config.json, on random weights.
#[derive(Clone, Debug, Parser)]
#[command(name = "figures", version)]
#[non_exhaustive]
pub struct Arguments {
    /// The directories of the models' configurations
    #[arg(required = true)]
    pub models: Vec<PathBuf>,
    /// The GPU, by the driver's number
    #[arg(long, default_value_t = 0)]
    pub device: usize,
    /// Sequences of a step
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 32, 64, 128, 256])]
    pub batches: Vec<usize>,
    /// Tokens of each sequence, the step's own among them
    #[arg(long, value_delimiter = ',', default_values_t = [512, 8192])]
    pub contexts: Vec<usize>,
    /// The ranks of adapters, which change all linear layers of a layer
    #[arg(long, value_delimiter = ',', default_values_t = [16, 64])]
    pub ranks: Vec<usize>,
    /// Memory for keys and values. A step that needs more is left out, and named
    #[arg(long, value_name = "GIB", default_value_t = 48)]
    pub kv_gib: usize,
    /// Memory for adapters. A step that needs more is left out, and named
    #[arg(long, value_name = "GIB", default_value_t = 24)]
    pub arena_gib: usize,
    /// The most replays of a figure
    #[arg(long, default_value_t = 40)]
    pub replays: usize,
    /// The longest time for the replays of a figure
    #[arg(long, value_name = "MS", default_value_t = 500)]
    pub figure_ms: u64,
    /// Writes the figures as JSON
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// The figures of a run.
#[derive(Debug, Serialize)]
struct Record {
    meta: Meta,
    steps: Vec<Figure>,
    host: Vec<HostFigure>,
    /// What was left out, and why.
    failures: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Meta {
    gpu: String,
    aril: &'static str,
    commit: Option<&'static str>,
    seconds: f64,
}

/// The time of a step.
#[derive(Debug, Serialize)]
struct Figure {
    model: String,
    batch: usize,
    context: usize,
    /// Adapters of the step, which its sequences have in turn.
    adapters: usize,
    /// Their rank; 0 without adapters.
    rank: usize,
    /// Whether layers run base weights and adapters in one launch; if not, cuBLASLt's GEMMs and launches for deltas.
    fused: bool,
    replays: usize,
    p50_us: f64,
    p90_us: f64,
}

/// The time of the engine's steps of one token of each sequence, whose contexts are short.
#[derive(Debug, Serialize)]
struct HostFigure {
    model: String,
    batch: usize,
    adapters: usize,
    rank: usize,
    steps: u64,
    /// Mean time between steps.
    host_us: f64,
    /// Mean time of a step, that before it included.
    step_us: f64,
}

/// Measures, prints a table for each model, and writes the record.
///
/// # Errors
/// A sentence that names the argument or the file at fault, or the GPU's error.
pub fn run(arguments: &Arguments) -> std::result::Result<(), String> {
    measure(arguments).map_err(|error| error.to_string())
}

fn measure(arguments: &Arguments) -> Result<()> {
    let start = Instant::now();
    let device = Cuda::<bf16>::new(arguments.device)?;
    let gpu = device.queue.stream().context().name()?;
    let meta = Meta { gpu, aril: env!("CARGO_PKG_VERSION"), commit: option_env!("ARIL_COMMIT"), seconds: 0.0 };
    let mut record = Record { meta, steps: Vec::new(), host: Vec::new(), failures: Vec::new() };
    for model in &arguments.models {
        measure_model(&device, arguments, model, &mut record).context(model.display())?;
    }
    record.meta.seconds = start.elapsed().as_secs_f64();
    if let Some(path) = &arguments.out {
        fs::write(path, serde_json::to_string(&record)?).context(path.display())?;
    }
    Ok(())
}

fn measure_model(device: &Cuda<bf16>, arguments: &Arguments, dir: &Path, record: &mut Record) -> Result<()> {
    let name = dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let start = Instant::now();
    let config = Config::read(dir)?;
    let described = describe(&config, TpRank::SINGLE)?;
    let largest = |values: &[usize]| values.iter().copied().max().unwrap_or(1).max(1);
    let (max_batch, max_rank) = (largest(&arguments.batches), largest(&arguments.ranks));
    let capacity = Capacity::tokens(max_batch).slots(max_batch).rank(max_rank);
    let sources = arguments.ranks.iter().map(|&rank| random_adapter(&config, rank).map(|adapter| (rank, adapter)));
    let sources = sources.collect::<Result<Vec<_>>>()?;
    let bytes = sources.iter().map(|(_, adapter)| source(adapter, &described).map(|source| source.bytes()));
    let most_bytes = bytes.collect::<Result<Vec<_>>>()?.into_iter().max().unwrap_or(0);
    // Two adapters are read ahead; the files are in memory.
    let pool = PoolConfig::arena_bytes(arguments.arena_gib << 30).host_bytes(4 * most_bytes.max(1 << 20));
    let (mut pool, table) = device.pool(&described.model, capacity, pool)?;
    let mut adapters = Vec::new();
    for (rank, adapter) in &sources {
        let ids = (0..max_batch).map(|_| Ok(pool.register(source(adapter, &described)?)?));
        adapters.push((*rank, ids.collect::<Result<Vec<AdapterId>>>()?));
    }
    let checkpoint = dummy::checkpoint(&config, DType::BF16)?;
    let model = Model::new(device, &config, &described, Weights::new(&checkpoint, None), table, max_batch)?;
    drop(checkpoint);
    println!(
        "\n{name}: random weights in {:.1} s; an adapter of rank {max_rank} has {} MB",
        start.elapsed().as_secs_f64(),
        most_bytes / 1_000_000
    );

    let row_bytes = 2 * config.layers * config.heads.kv_features() * size_of::<bf16>();
    let max_rows = (arguments.kv_gib << 30) / row_bytes;
    let rows = |batch: usize, context: usize| (batch * context.div_ceil(BLOCK_ROWS) + 1) * BLOCK_ROWS;
    let mut steps = Vec::new();
    for &context in &arguments.contexts {
        for &batch in &arguments.batches {
            if context == 0 || batch == 0 || context > config.max_positions {
                bail!("there is no step of {batch} sequences of {context} tokens");
            }
            if rows(batch, context) <= max_rows {
                steps.push((batch, context));
            } else {
                let gib = (rows(batch, context) * row_bytes) >> 30;
                record
                    .failures
                    .push(format!("{name}, {batch} sequences of {context} tokens: {gib} GiB of keys and values"));
            }
        }
    }
    let most_rows = steps.iter().map(|&(batch, context)| rows(batch, context)).max().unwrap_or(BLOCK_ROWS);
    let mut session = model.session(most_rows, largest(&arguments.contexts))?;
    println!(
        "{:>7} {:>5} {:>8} {:>4} {:>6} {:>10} {:>10} {:>10} {:>10}",
        "context", "batch", "adapters", "rank", "base", "p50 us", "p90 us", "on gemm", "on own"
    );
    for (batch, context) in steps {
        let mut timer = Timer { device, arguments, model: &model, session: &mut session, name: &name, batch, context };
        timer.measure(&mut pool, &adapters, record)?;
    }
    drop(session);
    let sources = (0..HOST_ADAPTERS).map(|_| sources.first().map(|(_, adapter)| source(adapter, &described)));
    let sources = sources.flatten().collect::<Result<Vec<_>>>()?;
    let rank = arguments.ranks.first().copied().unwrap_or(0);
    measure_host(&model, pool, sources, (max_batch.min(HOST_BATCH), rank, &name), record)
}

/// Measures the host's time between steps of the engine.
fn measure_host(
    model: &Model<'_, Cuda<bf16>>,
    pool: aril::cuda::AdapterPool,
    sources: Vec<Source>,
    (batch, rank, name): (usize, usize, &str),
    record: &mut Record,
) -> Result<()> {
    let max_positions = PROMPT + WARM_UPS + HOST_STEPS + batch + 1;
    let limits = Limits {
        step_tokens: model.adapters.capacity().max_tokens,
        running: batch,
        waiting: batch,
        adapters: sources.len().max(1),
        max_wait: Duration::from_secs(1),
    };
    let blocks = u32::try_from(batch * max_positions.div_ceil(BLOCK_ROWS))?;
    let sizes = Sizes { limits, blocks, block_rows: BLOCK_ROWS, max_positions, is_sharing: false };
    let mut engine = Engine::new(model, pool, sizes)?;
    let adapters = sources.into_iter().map(|source| engine.add_adapter(source));
    let adapters = adapters.collect::<std::result::Result<Vec<_>, _>>()?;
    let start = Instant::now();
    let mut receivers = Vec::new();
    for index in 0..batch {
        let request = Request {
            adapter: adapters.get(index % adapters.len().max(1)).copied(),
            prompt: vec![u32::try_from(index)?; PROMPT],
            max_tokens: max_positions - PROMPT,
            stop_tokens: Vec::new(),
            sampling: Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, seed: None, logprobs: None },
        };
        let (events, receiver) = unbounded_channel();
        engine.submit(request, events, start.elapsed()).context("a request")?;
        receivers.push(receiver);
    }
    // Until all prompts are computed.
    let mut computed = 0;
    while computed < batch * (PROMPT + WARM_UPS) {
        let tokens = engine.step(start.elapsed())?;
        computed += tokens;
        if tokens == 0 {
            engine.wait_for_adapters(WAIT);
        }
        if start.elapsed() > HOST_LIMIT {
            bail!("the prompts of {batch} requests took more than {HOST_LIMIT:?}");
        }
    }
    let (before, timed) = (engine.host_time(), Instant::now());
    for _ in 0..HOST_STEPS {
        engine.step(start.elapsed())?;
    }
    let (after, elapsed) = (engine.host_time(), timed.elapsed());
    let steps = after.steps - before.steps;
    let host_us = (after.total - before.total).as_secs_f64() * 1e6 / steps as f64;
    let step_us = elapsed.as_secs_f64() * 1e6 / HOST_STEPS as f64;
    println!("the engine, {batch} sequences: {host_us:.1} us between steps, {step_us:.1} us a step");
    let adapters = adapters.len();
    record.host.push(HostFigure { model: name.to_owned(), batch, adapters, rank, steps, host_us, step_us });
    Ok(())
}

/// The steps of one size.
struct Timer<'a, 'm> {
    device: &'a Cuda<bf16>,
    arguments: &'a Arguments,
    model: &'m Model<'m, Cuda<bf16>>,
    session: &'a mut Session<'m, Cuda<bf16>>,
    name: &'a str,
    batch: usize,
    context: usize,
}

impl Timer<'_, '_> {
    fn measure(
        &mut self,
        pool: &mut aril::cuda::AdapterPool,
        adapters: &[(usize, Vec<AdapterId>)],
        record: &mut Record,
    ) -> Result<()> {
        let (batch, columns) = (self.batch, self.context.div_ceil(BLOCK_ROWS));
        let tables = Tables {
            columns,
            block_rows: u32::try_from(BLOCK_ROWS)?,
            spare_row: u32::try_from(batch * columns * BLOCK_ROWS)?,
        };
        let mut operands = Batch::new(self.device, batch, tables)?;
        let mut capture = |has_adapters, is_fused| {
            let captured = Captured::new(self.model, self.session, &operands, Variant { has_adapters, is_fused })?;
            captured.ok_or_else(|| Error::new("the device has no graphs"))
        };
        let mut kinds = Vec::new();
        for is_fused in [false, true] {
            if !is_fused || batch <= MAX_FORWARD_TOKENS {
                kinds.push((is_fused, capture(false, is_fused)?, capture(true, is_fused)?));
            }
        }
        operands.set(self.model, &self.step(tables)?)?;

        let base = vec![Slot::BASE; batch];
        let mut without = Vec::new();
        for (is_fused, graph, _) in &mut kinds {
            without.push(self.time(graph, &base, (0, 0, *is_fused), &without, record)?);
        }
        for (rank, ids) in adapters {
            let mut counts: Vec<usize> = [1, 8, batch].into_iter().filter(|&count| count <= batch).collect();
            counts.sort_unstable();
            counts.dedup();
            for count in counts {
                let leases = match lease(pool, &ids[..count]) {
                    Ok(leases) => leases,
                    Err(PoolError::TooLarge { .. }) => {
                        let Self { name, context, .. } = *self;
                        record.failures.push(format!(
                            "{name}, {batch} sequences of {context} tokens: {count} adapters of rank {rank} do not fit in \
                             the arena"
                        ));
                        continue;
                    }
                    Err(error) => return Err(error.into()),
                };
                let slots: Vec<Slot> = leases.iter().map(Lease::slot).cycle().take(batch).collect();
                for ((is_fused, _, graph), own) in kinds.iter_mut().zip(&without) {
                    self.time(graph, &slots, (count, *rank, *is_fused), &[without[0], *own], record)?;
                }
                drop(leases);
                AdapterPool::commit(pool)?;
            }
        }
        Ok(())
    }

    /// The step's tokens and places: each sequence in blocks of its own.
    fn step(&self, Tables { columns, block_rows, .. }: Tables) -> Result<Step> {
        let mut rng = StdRng::seed_from_u64(0);
        let vocab = u32::try_from(self.model.config.vocab)?;
        let first_rows = (0..self.batch * columns).map(|block| u32::try_from(block * BLOCK_ROWS));
        Ok(Step {
            ids: (0..self.batch).map(|_| rng.random_range(0..vocab)).collect(),
            positions: vec![u32::try_from(self.context - 1)?; self.batch],
            table: BlockTable { first_rows: first_rows.collect::<std::result::Result<_, _>>()?, columns, block_rows },
            ..Step::default()
        })
    }

    /// Times the replays of a graph, prints the figure beside the medians of others, and returns its own, in µs.
    fn time(
        &mut self,
        captured: &mut Captured<Cuda<bf16>>,
        slots: &[Slot],
        (adapters, rank, fused): (usize, usize, bool),
        others: &[f64],
        record: &mut Record,
    ) -> Result<f64> {
        let stream = self.device.queue.stream();
        let event = || stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let limit = Duration::from_millis(self.arguments.figure_ms);
        let mut times = Vec::new();
        let start = Instant::now();
        for replay in 0..WARM_UPS + self.arguments.replays.max(1) {
            if replay > WARM_UPS && start.elapsed() > limit {
                break;
            }
            let (before, after) = (event()?, event()?);
            before.record(stream)?;
            self.device.replay(&mut captured.graph, &mut self.session.buffers, slots)?;
            after.record(stream)?;
            times.push((before, after));
        }
        let us = times.iter().skip(WARM_UPS).map(|(before, after)| Ok(f64::from(before.elapsed_ms(after)?) * 1e3));
        let mut us = us.collect::<Result<Vec<_>>>()?;
        us.sort_by(f64::total_cmp);
        let at = |share: usize| us[(us.len() - 1) * share / 100];
        let (p50_us, p90_us) = (at(50), at(90));
        let Self { name, batch, context, .. } = *self;
        let base = if fused { "fused" } else { "gemm" };
        let added: Vec<String> =
            others.iter().map(|other| format!("{:>+8.1} %", (p50_us / other - 1.0) * 100.0)).collect();
        println!(
            "{context:>7} {batch:>5} {adapters:>8} {rank:>4} {base:>6} {p50_us:>10.1} {p90_us:>10.1} {}",
            added.join(" ")
        );
        let (model, replays) = (name.to_owned(), us.len());
        record.steps.push(Figure { model, batch, context, adapters, rank, fused, replays, p50_us, p90_us });
        Ok(p50_us)
    }
}

/// Leases adapters together. Waits until they are there.
fn lease(pool: &mut aril::cuda::AdapterPool, ids: &[AdapterId]) -> std::result::Result<Vec<Lease>, PoolError> {
    loop {
        match AdapterPool::prepare(pool, ids) {
            Err(PoolError::Loading { .. } | PoolError::Full) => {
                AdapterPool::commit(pool)?;
                pool.wait(WAIT);
            }
            leases => return leases,
        }
    }
}

fn source(adapter: &Arc<Adapter>, described: &Described) -> Result<Source> {
    Ok(Source::memory(Arc::clone(adapter), &described.model, DType::BF16)?)
}

/// An adapter of random factors for all linear layers of every layer, experts included.
fn random_adapter(config: &Config, rank: usize) -> Result<Arc<Adapter>> {
    let Config { hidden, intermediate, heads, .. } = *config;
    let (query, kv) = (heads.query_features(), heads.kv_features());
    let mut rng = StdRng::seed_from_u64(rank as u64);
    let noise: Vec<bf16> = (0..65_521).map(|_| bf16::from_f32(rng.random_range(-0.02..0.02))).collect();
    let mut tensors = Vec::new();
    for layer in 0..config.layers {
        let mut add = |module: &str, count: Option<usize>, in_features: usize, out_features: usize| -> Result<()> {
            for (factor, rows, cols) in [("A", rank, in_features), ("B", out_features, rank)] {
                let shape: Vec<usize> = count.into_iter().chain([rows, cols]).collect();
                let len = shape.iter().product();
                let values: Vec<bf16> = noise.iter().copied().cycle().take(len).collect();
                let tensor = Tensor::new(DType::BF16, shape, bytemuck::cast_slice(&values).to_vec())?;
                tensors.push((format!("model.layers.{layer}.{module}.lora_{factor}.weight"), tensor));
            }
            Ok(())
        };
        for (module, in_features, out_features) in
            [("q_proj", hidden, query), ("k_proj", hidden, kv), ("v_proj", hidden, kv), ("o_proj", query, hidden)]
        {
            add(&format!("self_attn.{module}"), None, in_features, out_features)?;
        }
        let (path, count, inter) = match config.experts_in(layer) {
            Some(moe) => ("mlp.experts", Some(moe.experts), moe.intermediate),
            None => ("mlp", None, intermediate),
        };
        for (module, in_features, out_features) in
            [("gate_proj", hidden, inter), ("up_proj", hidden, inter), ("down_proj", inter, hidden)]
        {
            add(&format!("{path}.{module}"), count, in_features, out_features)?;
        }
    }
    let config = format!(r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}}}"#);
    Ok(Arc::new(Adapter::from_tensors(&config, tensors)?))
}
