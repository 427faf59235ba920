//! Replays of a decode step of Qwen3-8B beside one part of a load at a time, to find which part delays a step.
//!
//! | column | is |
//! |---|---|
//! | device | the time between events around a replay. The host is up to four replays ahead |
//! | call | the time on the host of the calls that enqueue a replay and its events |
//! | period | the time on the device from the end of one replay to the end of the next |
//!
//! The slowest replay is named by the time since the work beside it began, and by the run of that work that it overlaps.

use std::{
    result,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use aril::{
    DType, Slot,
    adapter::SlotImage,
    cuda::{AdapterPool, Buffer, Graph, PinnedBuffer, Queue, Staging, Step, WeightTable},
    plan::Capacity,
    pool::{AdapterId, PoolConfig, Source, Tier},
};
use aril_bench::{
    Result,
    data::SMALL,
    device::{Event, Gpu},
    noise::Noise,
    pool::{LAYERS, Layers},
    report::percentile,
};
use cudarc::driver::result as driver;
use rayon::ThreadPoolBuilder;

use crate::{LIMIT, neighbours::Captured, packers, room};

const RANK: usize = 16;
/// Tokens of the step, each with an adapter of its own.
const TOKENS: usize = 8;
const WARM_UP: usize = 200;
/// Replays that the host is ahead of the device.
const AHEAD: usize = 4;
/// The work beside replays begins this long after the first one.
const ALONE_FIRST: Duration = Duration::from_millis(50);
const STAGING_BYTES: usize = 16 << 20;
/// The replays beside one work end after this time.
const MOST: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_micros(200);

type Sent<T> = result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
/// One run of the work beside replays.
type Work<'a> = Box<dyn FnMut() -> Sent<()> + Send + 'a>;

/// What works beside replays need.
struct Setup<'a> {
    weights: &'a WeightTable,
    image: &'a SlotImage<'a>,
    memory: &'a Source,
    disk: &'a Source,
    /// Another stream of the context.
    queue: Queue,
}

/// Each work, made before its replays begin.
type Make = for<'a> fn(&Setup<'a>) -> Result<Option<Work<'a>>>;

const WORKS: [(&str, Make); 16] = [
    ("alone", |_| Ok(None)),
    ("first and later WeightTable::load", |setup| load(setup, None)),
    ("WeightTable::load with 4 packers", |setup| load(setup, Some(4))),
    ("pool, from disk", |setup| pooled(setup, false)),
    ("pool, from host memory", |setup| pooled(setup, true)),
    ("16 MiB page-locked memory zeroed", |setup| {
        let mut memory = PinnedBuffer::<u8>::zeros(&setup.queue, STAGING_BYTES)?;
        work(move || Ok(memory.elements().map(|bytes| bytes.fill(0))?))
    }),
    ("100 events made and destroyed", |setup| {
        let context = Arc::clone(setup.queue.stream().context());
        work(move || {
            context.bind_to_thread()?;
            (0..100).try_for_each(|_| Event::new().map(drop)).map_err(|error| error.to_string().into())
        })
    }),
    ("Buffer: new and drop, on a stream", |setup| {
        let (queue, bytes) = (setup.queue.clone(), setup.image.bytes());
        work(move || Ok(Buffer::<u8>::zeros(&queue, bytes).map(drop)?))
    }),
    ("packing on rayon's threads", |setup| pack(setup, None)),
    ("packing on 4 threads", |setup| pack(setup, Some(4))),
    ("copies of 8 MiB", |setup| copy(setup, 8 << 20)),
    ("copies of 1 MiB", |setup| copy(setup, 1 << 20)),
    ("copies of the whole adapter", |setup| copy(setup, setup.image.bytes())),
    ("alone again", |_| Ok(None)),
    ("Staging: new and drop", |setup| {
        let queue = setup.queue.clone();
        work(move || Ok(Staging::new(&queue).map(drop)?))
    }),
    ("16 MiB page-locked and freed", |setup| {
        let context = Arc::clone(setup.queue.stream().context());
        work(move || {
            context.bind_to_thread()?;
            // SAFETY: the context is current, and nothing uses the memory.
            let memory = unsafe { driver::malloc_host(STAGING_BYTES, 0) }?;
            // SAFETY: as above.
            Ok(unsafe { driver::free_host(memory) }?)
        })
    }),
];

pub(crate) fn measure(gpu: &Gpu, replays: usize, only: &str) -> Result<()> {
    let (layers, noise) = (Layers::qwen3_8b(LAYERS), Noise::new(1, SMALL, 0.02));
    let (model, linears) = layers.model()?;
    let dir = tempfile::tempdir()?;
    layers.write(RANK, &noise, dir.path())?;
    let adapter = Arc::new(layers.adapter(RANK, &noise)?);
    let memory = Source::memory(Arc::clone(&adapter), &model, DType::BF16)?;
    let disk = Source::directory(dir.path(), &model, DType::BF16)?;
    let image = adapter.plan(&model, DType::BF16)?;

    let capacity = Capacity::tokens(TOKENS).slots(TOKENS + 1).rank(RANK);
    // Beside those of the step, one that is loaded again and again.
    let arena_bytes = WeightTable::arena_bytes((0..TOKENS + 2).map(|_| &image));
    let weights = WeightTable::new(&gpu.queue()?, &model, DType::BF16, capacity, arena_bytes)?;
    let slots = (0..TOKENS).map(|slot| Ok(Slot::new(slot.try_into()?))).collect::<Result<Vec<_>>>()?;
    // Not by `load`, the first of which is to be measured.
    let mut staging = Staging::new(weights.queue())?;
    for &slot in &slots {
        weights.commit(slot, weights.reserve(&image)?.fill(&image, &mut staging)?)?;
    }
    drop(staging);
    let mut captured = Captured::new(gpu, &weights, &linears, slots)?;
    let (graph, batch, workspace) = captured.start()?;
    let mut step = weights.step(&batch, workspace)?;
    gpu.time_each(WARM_UP, || Ok(graph.replay(&mut step)?))?;

    println!("{replays} replays beside each work; an adapter has {} MB; µs\n", image.bytes() / 1_000_000);
    println!(
        "| beside | runs | ms a run | device p50 | p99 | max | call p50 | p99 | max | period p99 | max | slowest, device | slowest, call |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    let queue = Queue::new(&gpu.kernels, &gpu.new_stream()?)?;
    let setup = Setup { weights: &weights, image: &image, memory: &memory, disk: &disk, queue };
    for (name, make) in WORKS.into_iter().filter(|(name, _)| name.contains(only)) {
        let beside = make(&setup)?;
        println!("{}", measure_beside(gpu, (graph, &mut step), replays, beside)?.row(name));
    }
    println!();
    Ok(())
}

fn work<'a>(run: impl FnMut() -> Sent<()> + Send + 'a) -> Result<Option<Work<'a>>> {
    Ok(Some(Box::new(run)))
}

/// Loads into the slot that the step does not use.
fn load<'a>(setup: &Setup<'a>, packers: Option<usize>) -> Result<Option<Work<'a>>> {
    let (weights, image) = (setup.weights, setup.image);
    let slot = Slot::new(TOKENS.try_into()?);
    let threads = packers.map(|threads| ThreadPoolBuilder::new().num_threads(threads).build()).transpose()?;
    work(move || {
        let load = || weights.load(slot, image).map(drop);
        Ok(threads.as_ref().map_or_else(load, |threads| threads.install(load))?)
    })
}

/// Packs the adapter into memory that is not page-locked.
fn pack<'a>(setup: &Setup<'a>, packers: Option<usize>) -> Result<Option<Work<'a>>> {
    let (image, mut block) = (setup.image, vec![0; setup.image.bytes()]);
    let threads = packers.map(|threads| ThreadPoolBuilder::new().num_threads(threads).build()).transpose()?;
    work(move || {
        let mut pack = || image.write_to(&mut block);
        Ok(match &threads {
            Some(threads) => threads.install(pack),
            None => pack(),
        }?)
    })
}

/// Copies an adapter's bytes in pieces from page-locked memory that is ready, as many at a time as a [`Staging`] has room for, or one.
fn copy<'a>(setup: &Setup<'a>, piece: usize) -> Result<Option<Work<'a>>> {
    let memory = (0..(STAGING_BYTES / piece).max(1)).map(|_| Ok(PinnedBuffer::<u8>::zeros(&setup.queue, piece)?));
    let mut memory = memory.collect::<Result<Vec<_>>>()?;
    let (mut to, count) = (Buffer::<u8>::zeros(&setup.queue, piece)?, setup.image.bytes().div_ceil(piece));
    work(move || {
        for copy in 0..count {
            let buffers = memory.len();
            let from = &mut memory[copy % buffers];
            from.elements()?;
            to.enqueue_write(from, piece)?;
        }
        Ok(())
    })
}

/// Brings adapters to the device of a pool, one at a time.
fn pooled<'a>(setup: &Setup<'a>, from_host: bool) -> Result<Option<Work<'a>>> {
    let (model, memory, disk) = (setup.weights.model(), setup.memory, setup.disk);
    let capacity = Capacity::tokens(TOKENS).slots(1).rank(RANK);
    let config = PoolConfig::arena_bytes(room(model, memory, 1)).host_bytes(room(model, memory, 4)).packers(packers());
    let mut pool = AdapterPool::new(&setup.queue, model, DType::BF16, capacity, config)?;
    if !from_host {
        return work(move || {
            let id = pool.register(disk.clone())?;
            bring(&mut pool, id)?;
            Ok(pool.unregister(id)?)
        });
    }
    let pair = [pool.register(memory.clone())?, pool.register(memory.clone())?];
    let mut turn = pair.into_iter().cycle();
    for id in pair {
        bring(&mut pool, id).map_err(|error| error.to_string())?;
    }
    work(move || turn.next().map_or(Ok(()), |id| bring(&mut pool, id)))
}

/// Returns when the adapter is on the device.
fn bring(pool: &mut AdapterPool, id: AdapterId) -> Sent<()> {
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        pool.prefetch(id)?;
        pool.poll();
        if pool.residency(id).is_some_and(|residency| residency.tier == Tier::Device) && pool.snapshot().copying == 0 {
            return Ok(());
        }
        thread::sleep(POLL);
    }
    Err(format!("not on the device after {LIMIT:?}: {:?}", pool.snapshot()).into())
}

/// Replays, and the runs of what was beside them.
struct Measured {
    device: Vec<f64>,
    call: Vec<f64>,
    period: Vec<f64>,
    /// When each replay was enqueued.
    enqueued: Vec<Instant>,
    runs: Vec<[Instant; 2]>,
}

fn measure_beside(
    gpu: &Gpu,
    (graph, step): (&mut Graph, &mut Step<'_>),
    replays: usize,
    work: Option<Work<'_>>,
) -> Result<Measured> {
    let Some(mut work) = work else { return replay(gpu, graph, step, replays) };
    let is_done = AtomicBool::new(false);
    let (measured, runs) = thread::scope(|threads| {
        let beside = threads.spawn(|| {
            thread::sleep(ALONE_FIRST);
            let mut runs = Vec::new();
            while !is_done.load(Ordering::Relaxed) {
                let start = Instant::now();
                work()?;
                runs.push([start, Instant::now()]);
            }
            Sent::Ok(runs)
        });
        let measured = replay(gpu, graph, step, replays);
        is_done.store(true, Ordering::Relaxed);
        (measured, beside.join())
    });
    let runs = runs.map_err(|_| "the thread beside the replays panicked")?.map_err(|error| error.to_string())?;
    Ok(Measured { runs, ..measured? })
}

fn replay(gpu: &Gpu, graph: &mut Graph, step: &mut Step<'_>, replays: usize) -> Result<Measured> {
    let events = (0..replays).map(|_| Ok([Event::new()?, Event::new()?])).collect::<Result<Vec<_>>>()?;
    let (mut call, mut enqueued) = (Vec::with_capacity(replays), Vec::with_capacity(replays));
    let begin = Instant::now();
    for (run, [start, end]) in events.iter().enumerate() {
        if begin.elapsed() > MOST {
            break;
        }
        if let Some([_, earlier]) = run.checked_sub(AHEAD).map(|earlier| &events[earlier]) {
            earlier.wait()?;
        }
        let now = Instant::now();
        start.record(&gpu.stream)?;
        graph.replay(step)?;
        end.record(&gpu.stream)?;
        call.push(now.elapsed().as_secs_f64() * 1e6);
        enqueued.push(now);
    }
    gpu.synchronize()?;
    let events = &events[..call.len()];
    let device = events.iter().map(|[start, end]| start.us_until(end)).collect::<Result<_>>()?;
    let period = events.windows(2).map(|pair| pair[0][1].us_until(&pair[1][1])).collect::<Result<_>>()?;
    Ok(Measured { device, call, period, enqueued, runs: Vec::new() })
}

impl Measured {
    fn row(&self, name: &str) -> String {
        let sorted = |us: &[f64]| {
            let mut us = us.to_vec();
            us.sort_by(f64::total_cmp);
            [50, 99, 100].map(|percent| percentile(&us, percent))
        };
        let [device, call, period] = [&self.device, &self.call, &self.period].map(|us| sorted(us));
        let busy: f64 = self.runs.iter().map(|[start, end]| (*end - *start).as_secs_f64()).sum();
        #[expect(clippy::cast_precision_loss, reason = "a mean")]
        let mean = if self.runs.is_empty() { 0.0 } else { busy * 1e3 / self.runs.len() as f64 };
        format!(
            "| {name} | {} | {mean:.3} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {} | {} |",
            self.runs.len(),
            device[0],
            device[1],
            device[2],
            call[0],
            call[1],
            call[2],
            period[1],
            period[2],
            self.place(&self.device, AHEAD),
            self.place(&self.call, 1),
        )
    }

    /// Where the slowest replay was, which ended when the host enqueued the one that is `ahead` behind it.
    fn place(&self, us: &[f64], ahead: usize) -> String {
        let slowest = us.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b)).map_or(0, |(slowest, _)| slowest);
        let last = self.enqueued.len() - 1;
        let [begin, end] = [slowest, (slowest + ahead).min(last)].map(|replay| self.enqueued[replay]);
        let Some([first, _]) = self.runs.first() else { return format!("replay {slowest}") };
        if end < *first {
            return format!("replay {slowest}, before the work");
        }
        let since = (begin.saturating_duration_since(*first)).as_secs_f64() * 1e3;
        let overlapping = self.runs.iter().position(|[start, stop]| *start <= end && begin <= *stop);
        let run = overlapping.map_or("between runs".to_owned(), |run| format!("run {run}"));
        format!("replay {slowest}, {since:.1} ms, {run}")
    }
}
