//! The time of steps on a GPU, in bf16 and on random weights: prefills without and with 8 adapters, and decode steps in
//! graphs without adapters and with 1, 8 and as many as sequences.
//!
//! A figure is the median over runs, each between two events on the stream. A replay of a graph includes the update of
//! the step's routing. The host stays ahead of the device, so that none of its time is in a figure.
//!
//! The host's time between steps is the engine's own: from the tokens of a step on the host to the next graph on the
//! stream. Meanwhile the device waits, or has the step in flight if the engine runs ahead.
//!
//! The floor of a decode step is the time to read its weights and its keys and values at the rate at which a kernel
//! reads memory, which is measured before; with several ranks, a rank reads its share of them. Of experts, it counts
//! those that the step's tokens choose if all choices are equally likely.

#![expect(clippy::disallowed_methods, reason = "a benchmark allocates and waits as it goes")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::{self, ExitCode},
    sync::Arc,
    thread::{self, ScopedJoinHandle},
    time::{Duration, Instant},
};

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    model::TpRank,
    plan::Capacity,
    pool::{AdapterId, Lease, Load, PoolConfig, PoolError, Source, StreamId},
    routing::Batch,
};
use clap::Parser;
use cudarc::{
    driver::{
        CudaEvent, LaunchConfig, PushKernelArg as _,
        result::memcpy_dtod_async,
        sys::{self, CUdevice_attribute, CUevent_flags},
    },
    nvrtc::Ptx,
};
use half::bf16;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use rayon::prelude::*;
use tokio::sync::mpsc::unbounded_channel;

use aril_bench::engine::{self, Run};
use aril_engine::{
    Changes, Engine, HostTime, Limits, Request, Sampling, Sizes,
    graph::{self, Captured, Drawn, OfStack, Tables, Variant},
};
use aril_qwen3::{
    checkpoint::Weights,
    config::Config,
    cuda::Cuda,
    device::{BlockTable, Device as _, Slots},
    dummy,
    error::{Context as _, Error, Result, bail},
    forward::{FUSED_TOKENS, Kept, Session, Step},
    group::Rank,
    model::{Described, Model, Split, describe},
    stderr::say,
};

/// Tokens of a block of the cache.
const BLOCK_ROWS: usize = 16;

/// The longest wait for an adapter before it is asked for again.
const WAIT: Duration = Duration::from_millis(10);

/// Sequences, steps of a round, rounds and adapters of the figure of the host, and the tokens of its prompts.
const HOST_BATCH: usize = 64;
const HOST_STEPS: usize = 25;
const HOST_ROUNDS: usize = 4;
const HOST_ADAPTERS: usize = 8;
const HOST_POSITIONS: usize = 4096;
const PROMPT: usize = 16;

/// The longest time for these prompts.
const HOST_LIMIT: Duration = Duration::from_secs(20);

/// Replays before the first that counts.
const WARM_UPS: usize = 3;

/// Sequences of a prefill, each with an adapter of its own or none, and its timed runs.
const PREFILL_SEQUENCES: usize = 8;
const PREFILLS: usize = 5;

/// How long a rank waits for another.
const RANK_LIMIT: Duration = Duration::from_secs(120);

/// Bytes that no cache holds, which a kernel reads to measure the rate.
const READ_BYTES: usize = 4 << 30;

/// Measures prefills and decode steps of models, each given by the directory of its config.json, on random weights.
#[derive(Clone, Debug, Parser)]
#[command(name = "figures", version)]
struct Arguments {
    /// The directories of the models' configurations
    #[arg(required = true)]
    models: Vec<PathBuf>,
    /// The GPU, by the driver's number
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// The GPUs of a tensor-parallel group, from --device on
    #[arg(long, value_name = "N", default_value_t = 1)]
    tp: usize,
    /// Each GPU of the group has some of the experts, instead of a part of each. Such figures are printed alone
    #[arg(long, requires = "tp", conflicts_with = "out")]
    ep: bool,
    /// Each GPU of the group has a part of both factors of linear layers. Such figures are printed alone
    #[arg(long, requires = "tp", conflicts_with = "out")]
    fully_sharded_loras: bool,
    /// Adapters whose experts share the outer factors, A of gate and up and B of down. Such figures are printed alone
    #[arg(long, conflicts_with = "out")]
    shared_outer: bool,
    /// What the first GPU of the group computes, on this GPU alone, without what the GPUs exchange: the difference to
    /// the figures of the group is the time of its collectives. Such figures are printed alone
    #[arg(long, requires = "tp", conflicts_with_all = ["out", "fully_sharded_loras"])]
    without_collectives: bool,
    /// Sequences of a step
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 32, 64, 128, 256])]
    batches: Vec<usize>,
    /// Tokens of each sequence, the step's own among them
    #[arg(long, value_delimiter = ',', default_values_t = [512, 8192])]
    contexts: Vec<usize>,
    /// Tokens of a prefill, of 8 sequences together
    #[arg(long, value_delimiter = ',', default_values_t = [4096, 32768])]
    prefills: Vec<usize>,
    /// The ranks of adapters, which change all linear layers of a layer. Prefills have the first
    #[arg(long, value_delimiter = ',', default_values_t = [16, 64])]
    ranks: Vec<usize>,
    /// The adapters that the stack has room for, of the first rank; 0 for no stack
    #[arg(long, default_value_t = 8)]
    stack: usize,
    /// Memory for keys and values. A step that needs more is left out, and named
    #[arg(long, value_name = "GIB", default_value_t = 48)]
    kv_gib: usize,
    /// Memory for adapters. A step that needs more is left out, and named
    #[arg(long, value_name = "GIB", default_value_t = 24)]
    arena_gib: usize,
    /// The most replays of a figure
    #[arg(long, default_value_t = 20)]
    replays: usize,
    /// The longest time for the replays of a figure
    #[arg(long, value_name = "MS", default_value_t = 300)]
    figure_ms: u64,
    /// The time for a model. Decode steps that would begin later are left out, and named
    #[arg(long, value_name = "S", default_value_t = 600)]
    budget: u64,
    /// Adds the figures to a record, as JSON
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// The figures of a rank.
#[derive(Debug)]
struct Record {
    run: Run,
    /// Whether it is printed: that of the first rank.
    is_printed: bool,
}

impl Record {
    /// Prints a line.
    fn print(&self, line: &str) {
        if self.is_printed {
            println!("{line}");
        }
    }
}

fn main() -> ExitCode {
    match measure(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Measures, prints a table for each model, and writes the record.
fn measure(arguments: &Arguments) -> Result<()> {
    let (record, measured) = if arguments.tp < 2 || arguments.without_collectives {
        measure_rank(arguments, &Rank::default())?
    } else {
        (measure_ranks(arguments, &Rank::threads(arguments.tp, RANK_LIMIT)?)?, Ok(()))
    };
    if let Some(path) = &arguments.out {
        let added = engine::Record::add(path, record.run).map_err(|error| Error::new(error.to_string()));
        added.context(path.display())?;
    }
    measured
}

/// Measures on all ranks of a group, and returns the record of the first.
fn measure_ranks(arguments: &Arguments, ranks: &[Rank]) -> Result<Record> {
    let measure = |rank: &Rank| {
        let measured = measure_rank(arguments, rank).and_then(|(record, measured)| measured.map(|()| record));
        measured.unwrap_or_else(|error| {
            say(&format!("rank {}: {error}\n", rank.tp().rank()));
            // An orderly end would wait for the GPUs, which wait for this rank.
            process::abort()
        })
    };
    let records = thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || measure(rank))).collect();
        threads.into_iter().map(ScopedJoinHandle::join).collect::<std::result::Result<Vec<_>, _>>()
    });
    let records = records.map_err(|_| Error::new("a rank panicked"))?;
    records.into_iter().next().ok_or_else(|| Error::new("the group has no rank"))
}

/// Measures on one rank. Returns what was measured before an error, too.
fn measure_rank(arguments: &Arguments, rank: &Rank) -> Result<(Record, Result<()>)> {
    let start = Instant::now();
    let device = if arguments.without_collectives {
        Cuda::<bf16>::without_collectives(arguments.device, TpRank::new(0, arguments.tp)?)?
    } else {
        Cuda::<bf16>::of_rank(arguments.device + rank.local(), rank)?
    };
    let gpu = device.queue.stream().context().name()?;
    let read_gb_per_s = read_rate(&device)?;
    let (commit, tp) = (option_env!("ARIL_COMMIT"), rank.tp().size());
    let (aril, commit) = (env!("CARGO_PKG_VERSION").to_owned(), commit.map(str::to_owned));
    let meta = engine::Meta { gpu, tp, aril, commit, seconds: 0.0, read_gb_per_s };
    let mut record = Record { run: Run { meta, ..Run::default() }, is_printed: rank.tp().rank() == 0 };
    let part = match device.tp().size() {
        size if size == tp => String::new(),
        size => format!(", which computes the part of one of {size}, without collectives"),
    };
    record.print(&format!("{tp} x {}{part}: a kernel reads {read_gb_per_s:.0} GB/s", record.run.meta.gpu));
    let models = arguments.models.iter();
    let measured =
        models.map(|model| measure_model(&device, rank, arguments, model, &mut record).context(model.display()));
    let measured: Result<()> = measured.collect();
    record.run.meta.seconds = start.elapsed().as_secs_f64();
    for failure in &record.run.failures {
        record.print(&format!("left out: {failure}"));
    }
    record.print(&format!("{:.0} s", record.run.meta.seconds));
    Ok((record, measured.and_then(|()| rank.finish())))
}

/// The rate at which a kernel reads memory, in GB/s: the best of a few grids.
fn read_rate(device: &Cuda<bf16>) -> Result<f64> {
    let stream = device.queue.stream();
    let context = stream.context();
    let kernels = Ptx::from_src(include_str!("../../ceilings.ptx"));
    let read = context.load_module(kernels)?.load_function("read")?;
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let multiprocessors = usize::try_from(context.attribute(attribute)?)?;
    let source = stream.alloc_zeros::<u8>(READ_BYTES)?;
    let mut best = 0.0_f64;
    for (blocks_per_multiprocessor, threads) in [(8, 256), (4, 512), (16, 128), (32, 256)] {
        let blocks = multiprocessors * blocks_per_multiprocessor;
        // A thread reads four vectors of 16 bytes a round, and writes a sum at the end.
        let (round, mut sums) = (blocks * threads * 64, stream.alloc_zeros::<u32>(blocks * threads)?);
        let rounds = READ_BYTES / round;
        let config = LaunchConfig {
            grid_dim: (u32::try_from(blocks)?, 1, 1),
            block_dim: (u32::try_from(threads)?, 1, 1),
            shared_mem_bytes: 0,
        };
        let times = measure_runs(device, 4, Duration::MAX, || {
            let mut kernel = stream.launch_builder(&read);
            kernel.arg(&source).arg(&rounds).arg(&mut sums);
            // SAFETY: the rounds end within the source, and there is a sum for each thread.
            unsafe { kernel.launch(config) }?;
            Ok(())
        })?;
        best = times.iter().map(|us| (rounds * round) as f64 / us / 1e3).fold(best, f64::max);
    }
    Ok(best)
}

/// The times of runs in µs, each between two events, without the first ones. Stops after `limit`.
fn measure_runs(
    device: &Cuda<bf16>,
    runs: usize,
    limit: Duration,
    mut enqueue: impl FnMut() -> Result<()>,
) -> Result<Vec<f64>> {
    let stream = device.queue.stream();
    let event = || stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
    // All ranks run equally often.
    let limit = if device.tp().size() > 1 { Duration::MAX } else { limit };
    let mut events: Vec<[CudaEvent; 2]> = Vec::new();
    let start = Instant::now();
    for run in 0..WARM_UPS + runs.max(1) {
        if run > WARM_UPS && start.elapsed() > limit {
            break;
        }
        let [before, after] = [event()?, event()?];
        before.record(stream)?;
        enqueue()?;
        after.record(stream)?;
        events.push([before, after]);
    }
    let us = |[before, after]: &[CudaEvent; 2]| Ok(f64::from(before.elapsed_ms(after)?) * 1e3);
    events.iter().skip(WARM_UPS).map(us).collect()
}

/// The value at a share of the sorted values, in percent.
fn percentile(values: &mut [f64], percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() - 1) * percent / 100]
}

fn measure_model(
    device: &Cuda<bf16>,
    rank: &Rank,
    arguments: &Arguments,
    dir: &Path,
    record: &mut Record,
) -> Result<()> {
    let name = dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let start = Instant::now();
    let config = Config::read(dir)?;
    if config.hybrid.is_some() {
        bail!("{name}: gated delta nets are not measured");
    }
    let (expert_parallel, fully_sharded) = (arguments.ep, arguments.fully_sharded_loras);
    for (name, is_given) in [("--ep", expert_parallel), ("--shared-outer", arguments.shared_outer)] {
        if is_given && config.moe.is_none() {
            bail!("{name}: the model has no experts");
        }
    }
    let described = describe(&config, Split { tp: device.tp(), expert_parallel, fully_sharded })?;
    let largest = |values: &[usize]| values.iter().copied().max().unwrap_or(1).max(1);
    let (max_batch, most) = (largest(&arguments.batches), largest(&arguments.ranks));
    let max_tokens = max_batch.max(largest(&arguments.prefills));
    let slots = max_batch.max(PREFILL_SEQUENCES);
    let capacity = Capacity::tokens(max_tokens).slots(slots).rank(most);
    let source = |&rank: &usize| {
        let adapter = random_adapter(&config, rank, arguments.shared_outer)?;
        Ok((rank, Source::memory(adapter, &described.model, DType::BF16)?))
    };
    let sources = arguments.ranks.iter().map(source).collect::<Result<Vec<_>>>()?;
    let most_bytes = sources.iter().map(|(_, source)| source.bytes()).max().unwrap_or(0);
    // Two adapters are read at a time; the files are in memory.
    let arena_bytes = arguments.arena_gib << 30;
    let pool = PoolConfig::arena_bytes(arena_bytes).host_bytes(2 * most_bytes.max(1 << 20)).packers(16);
    let (pool, table) = device.pool(&described.model, capacity, pool)?;
    let model = random_model(device, &config, &described, table, max_tokens)?;
    let model = if arguments.stack > 0 { model.stacked((arguments.stack, arguments.ranks[0]))? } else { model };
    record.print(&format!(
        "\n{name}: random weights and adapters in {:.1} s; an adapter of rank {most} has {} MB",
        start.elapsed().as_secs_f64(),
        most_bytes / 1_000_000
    ));

    let row_bytes = 2 * config.layers * model.heads.kv_features() * size_of::<bf16>();
    let max_rows = (arguments.kv_gib << 30) / row_bytes;
    let rows = |batch: usize, context: usize| (batch * context.div_ceil(BLOCK_ROWS) + 1) * BLOCK_ROWS;
    let fits = |batch: usize, context: usize, record: &mut Record| {
        if context == 0 || batch == 0 || context > config.max_positions {
            bail!("there is no step of {batch} sequences of {context} tokens");
        }
        let gib = (rows(batch, context) * row_bytes) >> 30;
        let fits = rows(batch, context) <= max_rows;
        if !fits {
            let sentence = format!("{name}, {batch} sequences of {context} tokens: {gib} GiB of keys and values");
            record.run.failures.push(sentence);
        }
        Ok(fits)
    };
    let (mut steps, mut prefills) = (Vec::new(), Vec::new());
    for &context in &arguments.contexts {
        for &batch in &arguments.batches {
            if fits(batch, context, record)? {
                steps.push((batch, context));
            }
        }
    }
    for &tokens in &arguments.prefills {
        if fits(PREFILL_SEQUENCES, tokens / PREFILL_SEQUENCES, record)? {
            prefills.push((PREFILL_SEQUENCES, tokens / PREFILL_SEQUENCES));
        }
    }
    let sizes = || steps.iter().chain(&prefills).copied();
    let most_rows = sizes().map(|(batch, context)| rows(batch, context)).max().unwrap_or(BLOCK_ROWS);
    let longest = sizes().map(|(_, context)| context).max().unwrap_or(1);
    let most = sizes().map(|(batch, _)| batch).max().unwrap_or(1);
    let mut session = model.session(most_rows, longest, most)?;
    let mut adapters = Adapters { pool, arena_bytes, sources, ids: BTreeMap::new() };
    for (_, context) in prefills {
        measure_prefill(&model, &mut session, &mut adapters, (&name, context), record)?;
    }
    // What the prefills left there, alike for all sequences, would make tokens choose the same experts.
    fill_caches(device, &model, &mut session)?;
    record.print(&format!(
        "{:>7} {:>5} {:>8} {:>4} {:>6} {:>10} {:>10} {:>10} {:>10} {:>11}",
        "context", "batch", "adapters", "rank", "base", "p50 us", "p90 us", "on gemm", "on own", "a layer"
    ));
    for (batch, context) in steps {
        // All ranks measure the same steps.
        let is_late = start.elapsed() > Duration::from_secs(arguments.budget);
        if rank.gather(&[u8::from(is_late)])?.iter().any(|late| late == &[1]) {
            record.run.failures.push(format!("{name}, {batch} sequences of {context} tokens: no time was left"));
            continue;
        }
        let bytes = step_bytes(&config, batch, context) / device.tp().size() as u64;
        let mut timer =
            Timer { device, arguments, model: &model, session: &mut session, name: &name, batch, context, bytes };
        timer.measure(&mut adapters, record)?;
    }
    drop(session);
    if device.tp().size() > 1 {
        return Ok(());
    }
    let Adapters { mut pool, sources, ids, .. } = adapters;
    for id in ids.into_values().flatten() {
        pool.unregister(id)?;
    }
    pool.end_step(StreamId::FIRST)?;
    device.queue.stream().synchronize()?;
    let rank = sources.first().map_or(0, |(rank, _)| *rank);
    let num_adapters = HOST_ADAPTERS.min(arena_bytes / most_bytes.max(1));
    let sources = sources.iter().take(1).flat_map(|(_, source)| vec![source.clone(); num_adapters]).collect();
    measure_host(&model, pool, sources, (max_batch.min(HOST_BATCH), rank, &name), record)
}

/// A model of random weights. They are one block of memory, which is page-locked while it is copied to the device over
/// and over.
fn random_model<'d>(
    device: &'d Cuda<bf16>,
    config: &Config,
    described: &Described,
    table: aril::cuda::WeightTable,
    tokens: usize,
) -> Result<Model<'d, Cuda<bf16>>> {
    let mut locked = std::ptr::null_mut();
    let checkpoint = dummy::checkpoint(config, DType::BF16, |block| {
        locked = block.as_mut_ptr().cast();
        // SAFETY: the block is mapped, and is unlocked before it is unmapped.
        unsafe { sys::cuMemHostRegister_v2(locked, block.len(), 0) }.result()?;
        Ok(())
    })?;
    let model = Model::new(device, config, described, Weights::new(&checkpoint, None), table, tokens)?;
    device.queue.stream().synchronize()?;
    // SAFETY: it was locked above, and no copy reads it any more.
    unsafe { sys::cuMemHostUnregister(locked) }.result()?;
    Ok(model)
}

/// Fills the cache with the embedding's random numbers.
fn fill_caches(
    device: &Cuda<bf16>,
    model: &Model<'_, Cuda<bf16>>,
    session: &mut Session<'_, Cuda<bf16>>,
) -> Result<()> {
    let stream = device.queue.stream().cu_stream();
    let numbers = &model.embed;
    for kept in &session.state.kept {
        let Kept::Cache(_, cache) = kept else { continue };
        for values in [&cache.keys, &cache.values] {
            for first in (0..values.len()).step_by(numbers.len()) {
                let bytes = numbers.len().min(values.len() - first) * size_of::<bf16>();
                let to = values.address + (first * size_of::<bf16>()) as u64;
                // SAFETY: both matrices have this many bytes, and are used on this stream alone.
                unsafe { memcpy_dtod_async(to, numbers.address, bytes, stream) }?;
            }
        }
    }
    Ok(())
}

/// The fewest bytes that a decode step without adapters reads: weights of layers and head, and keys and values.
fn step_bytes(config: &Config, batch: usize, context: usize) -> u64 {
    let Config { vocab, hidden, intermediate, heads, .. } = *config;
    let (query, kv) = (heads.query_features() as f64, heads.kv_features() as f64);
    let [vocab, hidden, intermediate] = [vocab, hidden, intermediate].map(|size| size as f64);
    let mut elems = vocab * hidden + 2.0 * kv * (batch * context * config.layers) as f64;
    for layer in 0..config.layers {
        elems += hidden * (2.0 * query + 2.0 * kv);
        elems += match config.experts_in(layer) {
            None => 3.0 * hidden * intermediate,
            Some(moe) => {
                let experts = moe.experts as f64;
                let not_chosen = (1.0 - moe.top_k as f64 / experts).powf(batch as f64);
                let chosen = experts * (1.0 - not_chosen);
                experts * hidden + 3.0 * hidden * moe.intermediate as f64 * chosen
            }
        };
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of bytes of some GPU")]
    let bytes = (elems * size_of::<bf16>() as f64) as u64;
    bytes
}

/// A pool that has as many copies of each adapter as steps ask for.
struct Adapters {
    pool: aril::cuda::AdapterPool,
    arena_bytes: usize,
    /// By rank.
    sources: Vec<(usize, Source)>,
    ids: BTreeMap<usize, Vec<AdapterId>>,
}

impl Adapters {
    /// Leases `count` adapters of a rank together, and waits until they are there; `None` if they do not fit in the
    /// arena.
    fn lease(&mut self, rank: usize, count: usize) -> Result<Option<Vec<Lease>>> {
        let source = self.sources.iter().find(|source| source.0 == rank);
        let (_, source) = source.ok_or_else(|| Error::new(format!("no adapter has rank {rank}")))?;
        if source.bytes() * count > self.arena_bytes {
            return Ok(None);
        }
        let ids = self.ids.entry(rank).or_default();
        while ids.len() < count {
            ids.push(self.pool.register(source.clone())?);
        }
        loop {
            match self.pool.prepare(&ids[..count], StreamId::FIRST) {
                Err(PoolError::Loading { .. } | PoolError::Full) => {
                    self.pool.end_step(StreamId::FIRST)?;
                    self.pool.wait(WAIT);
                }
                Err(PoolError::TooLarge { .. }) => return Ok(None),
                leases => return Ok(Some(leases?)),
            }
        }
    }

    fn give_back(&mut self, leases: Vec<Lease>) -> Result<()> {
        drop(leases);
        Ok(self.pool.end_step(StreamId::FIRST)?)
    }
}

/// Measures a step of prompts of `len` tokens, without adapters and with one for each sequence.
fn measure_prefill(
    model: &Model<'_, Cuda<bf16>>,
    session: &mut Session<'_, Cuda<bf16>>,
    adapters: &mut Adapters,
    (name, len): (&str, usize),
    record: &mut Record,
) -> Result<()> {
    let rank = adapters.sources.first().map_or(0, |(rank, _)| *rank);
    let Some(leases) = adapters.lease(rank, PREFILL_SEQUENCES)? else {
        let sentence =
            format!("{name}, a prefill: {PREFILL_SEQUENCES} adapters of rank {rank} do not fit in the arena");
        record.run.failures.push(sentence);
        return Ok(());
    };
    let base = vec![Slot::BASE; PREFILL_SEQUENCES];
    let adapted: Vec<Slot> = leases.iter().map(Lease::slot).collect();
    let steps = [prefill(&model.config, &base, len)?, prefill(&model.config, &adapted, len)?];
    let mut times = [const { Vec::new() }; 2];
    // In turn, as a device that gets warm becomes slower. The first runs load what is loaded lazily.
    for run in 0..=PREFILLS {
        for (step, times) in steps.iter().zip(&mut times) {
            let us = measure_forward(model, Slots::Pool(&adapters.pool), session, step)?;
            if run > 0 {
                times.push(us);
            }
        }
    }
    let p50_us = times.each_mut().map(|times| percentile(times, 50));
    let tokens = steps[0].ids.len();
    let added = format!(" {:+.1} %", (p50_us[1] / p50_us[0] - 1.0) * 100.0);
    for (p50_us, adapters, rank, added) in [(p50_us[0], 0, 0, ""), (p50_us[1], PREFILL_SEQUENCES, rank, &*added)] {
        record.print(&format!("prefill of {tokens} tokens, {adapters} adapters: {:.2} ms{added}", p50_us / 1e3));
        let (model, sequences, runs) = (name.to_owned(), PREFILL_SEQUENCES, PREFILLS);
        record.run.prefills.push(engine::Prefill { model, tokens, sequences, adapters, rank, runs, p50_us });
    }
    adapters.give_back(leases)
}

/// The time of a step that is enqueued operation by operation, in µs.
fn measure_forward(
    model: &Model<'_, Cuda<bf16>>,
    adapters: Slots<'_, Cuda<bf16>>,
    session: &mut Session<'_, Cuda<bf16>>,
    step: &Step,
) -> Result<f64> {
    let stream = model.device.queue.stream();
    let event = || stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
    stream.synchronize()?;
    let [before, after] = [event()?, event()?];
    before.record(stream)?;
    drop(model.forward(adapters, session, step)?);
    after.record(stream)?;
    Ok(f64::from(before.elapsed_ms(&after)?) * 1e3)
}

/// A step of prompts of `len` tokens, one for each slot.
fn prefill(config: &Config, slots: &[Slot], len: usize) -> Result<Step> {
    let columns = len.div_ceil(BLOCK_ROWS);
    let mut rng = StdRng::seed_from_u64(0);
    let vocab = u32::try_from(config.vocab)?;
    let first_rows = (0..slots.len() * columns).map(|block| u32::try_from(block * BLOCK_ROWS));
    let first_rows = first_rows.collect::<std::result::Result<_, _>>()?;
    let mut step = Step {
        ids: (0..slots.len() * len).map(|_| rng.random_range(0..vocab)).collect(),
        scales: vec![1.0; slots.len() * len],
        keeps_routers: true,
        table: BlockTable { first_rows, columns, block_rows: u32::try_from(BLOCK_ROWS)?, states: vec![0; slots.len()] },
        ..Step::default()
    };
    for (sequence, &slot) in (0..).zip(slots) {
        step.positions.extend((0..).take(len));
        step.sequences.extend(std::iter::repeat_n(sequence, len));
        step.slots.extend(std::iter::repeat_n(slot, len));
        step.sampled.push(u32::try_from(step.slots.len() - 1)?);
    }
    Ok(step)
}

/// Measures the host's time between steps of the engine.
fn measure_host(
    model: &Model<'_, Cuda<bf16>>,
    pool: aril::cuda::AdapterPool,
    sources: Vec<Source>,
    (batch, rank, name): (usize, usize, &str),
    record: &mut Record,
) -> Result<()> {
    let max_tokens = WARM_UPS + 2 * HOST_ROUNDS * (WARM_UPS + HOST_STEPS) + batch + 1;
    let limits = Limits {
        step_tokens: model.adapters.capacity().max_tokens,
        running: batch,
        waiting: batch,
        adapters: sources.len().max(1),
        max_wait: Duration::from_secs(1),
    };
    let blocks = u32::try_from(batch * (PROMPT + max_tokens).div_ceil(BLOCK_ROWS))?;
    let max_positions = HOST_POSITIONS.min(model.config.max_positions);
    let sizes = Sizes { limits, blocks, block_rows: BLOCK_ROWS, max_positions, is_sharing: false, runs_ahead: false };
    let mut engine = Engine::alone(model, pool, sizes)?;
    let adapters = sources.into_iter().map(|source| engine.add_adapter(source, false));
    let adapters = adapters.collect::<std::result::Result<Vec<_>, _>>()?;
    let start = Instant::now();
    let mut receivers = Vec::new();
    for index in 0..batch {
        let request = Request {
            adapter: adapters.get(index % adapters.len().max(1)).map(Load::id),
            prompt: vec![u32::try_from(index)?; PROMPT],
            max_tokens,
            stop_tokens: Vec::new(),
            prompt_logprobs: None,
            sampling: Sampling {
                temperature: 0.0,
                top_p: 1.0,
                top_k: 0,
                seed: None,
                logprobs: None,
                changes: Changes::NONE,
            },
        };
        let (events, receiver) = unbounded_channel();
        engine.submit(request, events, start.elapsed()).context("a request")?;
        receivers.push(receiver);
    }
    // Until all prompts are computed.
    let mut warm_ups = vec![0; batch];
    while warm_ups.iter().any(|&tokens| tokens < WARM_UPS) {
        if !engine.step(start.elapsed())? {
            engine.wait_for_adapters(WAIT);
        }
        for (tokens, receiver) in warm_ups.iter_mut().zip(&mut receivers) {
            while receiver.try_recv().is_ok() {
                *tokens += 1;
            }
        }
        if start.elapsed() > HOST_LIMIT {
            bail!("the prompts of {batch} requests took more than {HOST_LIMIT:?}");
        }
    }
    // In turn, because contexts grow.
    let mut sums = [(false, HostTime::default(), Duration::ZERO), (true, HostTime::default(), Duration::ZERO)];
    for _ in 0..HOST_ROUNDS {
        for (ahead, host, elapsed) in &mut sums {
            engine.run_ahead(*ahead);
            for _ in 0..WARM_UPS {
                engine.step(start.elapsed())?;
            }
            let (before, timed) = (engine.host_time(), Instant::now());
            for _ in 0..HOST_STEPS {
                engine.step(start.elapsed())?;
            }
            *elapsed += timed.elapsed();
            let after = engine.host_time();
            host.total += after.total - before.total;
            host.steps += after.steps - before.steps;
        }
    }
    for (ahead, HostTime { total, steps }, elapsed) in sums {
        let host_us = total.as_secs_f64() * 1e6 / steps as f64;
        let step_us = elapsed.as_secs_f64() * 1e6 / (HOST_ROUNDS * HOST_STEPS) as f64;
        let how = if ahead { "running ahead" } else { "waiting for each step" };
        record.print(&format!(
            "the engine, {batch} sequences, {how}: {host_us:.1} us between steps, {step_us:.1} us a step"
        ));
        let (model, adapters) = (name.to_owned(), adapters.len());
        record.run.host.push(engine::Host { model, batch, adapters, rank, ahead, steps, host_us, step_us });
    }
    Ok(())
}

/// How the linear layers of a step run.
#[derive(Clone, Copy, PartialEq)]
enum Base {
    /// GEMMs, and launches for deltas.
    Gemm,
    /// Base weights and adapters in one launch, where that is fastest.
    Fused,
    /// GEMMs with the rows of the stack.
    Stacked,
}

impl Base {
    fn name(self) -> &'static str {
        match self {
            Self::Gemm => "gemm",
            Self::Fused => "fused",
            Self::Stacked => "stack",
        }
    }
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
    bytes: u64,
}

impl Timer<'_, '_> {
    fn measure(&mut self, adapters: &mut Adapters, record: &mut Record) -> Result<()> {
        let (batch, columns) = (self.batch, self.context.div_ceil(BLOCK_ROWS));
        let tables = Tables {
            columns,
            block_rows: u32::try_from(BLOCK_ROWS)?,
            spare_row: u32::try_from(batch * columns * BLOCK_ROWS)?,
            spare_state: 0,
        };
        let mut operands = graph::Batch::new(self.device, batch, tables)?;
        let mut capture = |has_adapters, base| {
            let stacked = if base == Base::Stacked { OfStack::Deltas } else { OfStack::Nothing };
            let captured = Captured::new(
                (self.model, Slots::Pool(&adapters.pool)),
                self.session,
                &operands,
                Variant { has_adapters, changes_routers: false, is_fused: base == Base::Fused, stacked },
            )?;
            captured.ok_or_else(|| Error::new("the device has no graphs"))
        };
        let mut kinds = Vec::new();
        for base in [Base::Gemm, Base::Fused, Base::Stacked] {
            let is_there = match base {
                Base::Gemm => true,
                Base::Fused => batch <= FUSED_TOKENS,
                Base::Stacked => self.model.stack.is_some(),
            };
            if is_there {
                kinds.push((base, capture(false, base)?, capture(true, base)?));
            }
        }
        operands.set(self.device, &self.step(tables)?, &Drawn { last: None, sources: &[] })?;

        let base = vec![Slot::BASE; batch];
        let mut without = Vec::new();
        for (kind, graph, _) in &mut kinds {
            without.push(self.time((graph, &adapters.pool), &base, (0, 0, *kind), &without, record)?);
        }
        for &rank in &self.arguments.ranks {
            let mut counts: Vec<usize> = [1, 8, batch].into_iter().filter(|&count| count <= batch).collect();
            counts.sort_unstable();
            counts.dedup();
            for count in counts {
                let Some(leases) = adapters.lease(rank, count)? else {
                    record.run.failures.push(format!(
                        "{}, {batch} sequences of {} tokens: {count} adapters of rank {rank} do not fit in the arena",
                        self.name, self.context
                    ));
                    continue;
                };
                let slots: Vec<Slot> = leases.iter().map(Lease::slot).cycle().take(batch).collect();
                for ((kind, _, graph), own) in kinds.iter_mut().zip(&without) {
                    if *kind == Base::Stacked && (count > self.arguments.stack || rank > self.arguments.ranks[0]) {
                        continue;
                    }
                    self.time((graph, &adapters.pool), &slots, (count, rank, *kind), &[without[0], *own], record)?;
                }
                adapters.give_back(leases)?;
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
            table: BlockTable {
                first_rows: first_rows.collect::<std::result::Result<_, _>>()?,
                columns,
                block_rows,
                states: vec![0; self.batch],
            },
            ..Step::default()
        })
    }

    /// Times the replays of a graph, prints the figure beside the medians of others, and returns its own, in µs.
    fn time(
        &mut self,
        (captured, pool): (&mut Captured<Cuda<bf16>>, &aril::cuda::AdapterPool),
        slots: &[Slot],
        (count, rank, base): (usize, usize, Base),
        others: &[f64],
        record: &mut Record,
    ) -> Result<f64> {
        let (device, buffers) = (self.device, &mut self.session.buffers);
        let limit = Duration::from_millis(self.arguments.figure_ms);
        let mut us = measure_runs(device, self.arguments.replays, limit, || {
            let mut step = Cuda::<bf16>::start(Slots::Pool(pool), buffers, &Batch::new(slots))?;
            if let (Base::Stacked, Some(stack)) = (base, &self.model.stack) {
                stack.borrow_mut().place(&mut step)?;
            }
            Ok(captured.graph.replay(&mut step)?)
        })?;
        let [p50_us, p90_us] = [50, 90].map(|percent| percentile(&mut us, percent));
        let Self { name, batch, context, bytes, .. } = *self;
        let floor_us = bytes as f64 / record.run.meta.read_gb_per_s / 1e3;
        let added: Vec<String> = match count {
            0 => vec![format!("{:.2} of the floor", floor_us / p50_us)],
            _ => {
                let a_layer = |other: &f64| format!("{:>+8.2} us", (p50_us - other) / self.model.layers.len() as f64);
                let shares = others.iter().map(|other| format!("{:>+8.1} %", (p50_us / other - 1.0) * 100.0));
                shares.chain(others.last().map(a_layer)).collect()
            }
        };
        record.print(&format!(
            "{context:>7} {batch:>5} {count:>8} {rank:>4} {:>6} {p50_us:>10.1} {p90_us:>10.1} {}",
            base.name(),
            added.join(" ")
        ));
        let (model, replays) = (name.to_owned(), us.len());
        record.run.steps.push(engine::Step {
            model,
            batch,
            context,
            adapters: count,
            rank,
            fused: base == Base::Fused,
            stacked: base == Base::Stacked,
            bytes,
            replays,
            p50_us,
            p90_us,
        });
        Ok(p50_us)
    }
}

/// An adapter of random factors for all linear layers of every layer, experts included.
fn random_adapter(config: &Config, rank: usize, shared_outer: bool) -> Result<Arc<Adapter>> {
    let Config { hidden, intermediate, heads, .. } = *config;
    let (query, kv) = (heads.query_features(), heads.kv_features());
    let mut factors = Vec::new();
    for layer in 0..config.layers {
        let mut add = |module: &str, count: Option<usize>, in_features: usize, out_features: usize| {
            for (factor, rows, cols) in [("A", rank, in_features), ("B", out_features, rank)] {
                let is_outer = (factor == "A") != (module == "down_proj");
                let count = count.map(|count| if shared_outer && is_outer { 1 } else { count });
                let shape: Vec<usize> = count.into_iter().chain([rows, cols]).collect();
                factors.push((format!("model.layers.{layer}.{module}.lora_{factor}.weight"), shape));
            }
        };
        for (module, in_features, out_features) in
            [("q_proj", hidden, query), ("k_proj", hidden, kv), ("v_proj", hidden, kv), ("o_proj", query, hidden)]
        {
            add(&format!("self_attn.{module}"), None, in_features, out_features);
        }
        let (path, count, inter) = match config.experts_in(layer) {
            Some(moe) => ("mlp.experts", Some(moe.experts), moe.intermediate),
            None => ("mlp", None, intermediate),
        };
        for (module, in_features, out_features) in
            [("gate_proj", hidden, inter), ("up_proj", hidden, inter), ("down_proj", inter, hidden)]
        {
            add(&format!("{path}.{module}"), count, in_features, out_features);
        }
    }
    let mut rng = StdRng::seed_from_u64(rank as u64);
    let noise: Vec<bf16> = (0..65_521).map(|_| bf16::from_f32(rng.random_range(-0.02..0.02))).collect();
    let noise: &[u8] = bytemuck::cast_slice(&noise);
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let bytes = shape.iter().product::<usize>() * size_of::<bf16>();
        let mut values = noise.repeat(bytes.div_ceil(noise.len()));
        values.truncate(bytes);
        Ok((name, Tensor::new(DType::BF16, shape, values)?))
    };
    let tensors = factors.into_par_iter().map(tensor).collect::<Result<Vec<_>>>()?;
    let config = format!(r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}}}"#);
    Ok(Arc::new(Adapter::from_tensors(&config, tensors)?))
}
