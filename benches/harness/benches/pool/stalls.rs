//! Replays of a decode step of Qwen3-8B beside one part of a load at a time, to find which part delays a step.
//!
//! | column | is |
//! |---|---|
//! | device | the time between events around a replay. The host is up to four replays ahead |
//! | call | the time on the host of the calls that enqueue a replay and its events |
//! | period | the time on the device from the end of one replay to the end of the next |
//!
//! The slowest replay is named by the time since the work beside it began, and by the run of that work that it
//! overlaps.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aril::{
    DType,
    cuda::{Graph, Queue, Staging, Step, WeightTable},
    plan::Capacity,
    pool::Source,
};
use aril_bench::{
    Result,
    data::SMALL,
    device::{Event, Gpu},
    noise::Noise,
    pool::{LAYERS, Layers},
    report::percentile,
};

use crate::{
    beside::{Runs, Setup, WORKS, run_beside},
    neighbours::Captured,
    waited,
};

pub(crate) const RANK: usize = 16;
/// Tokens of the step, each with an adapter of its own.
pub(crate) const TOKENS: usize = 8;
const WARM_UP: usize = 200;
/// Replays that the host is ahead of the device.
const AHEAD: usize = 4;
/// The replays beside one work end after this time.
const MOST: Duration = Duration::from_secs(10);

/// With `waits`, of steps that the host waits for ([`waited`]).
pub(crate) fn measure(gpu: &Gpu, replays: usize, only: &str, waits: bool) -> Result<()> {
    let (layers, noise) = (Layers::qwen3_8b(LAYERS), Noise::new(1, SMALL, 0.02));
    let (model, linears) = layers.model()?;
    let dir = tempfile::tempdir()?;
    layers.write(RANK, &noise, dir.path())?;
    let adapter = Arc::new(layers.adapter(RANK, &noise)?);
    let memory = Source::memory(Arc::clone(&adapter), &model, DType::BF16)?;
    let disk = Source::directory(dir.path(), &model, DType::BF16)?;
    let image = adapter.plan(&model, DType::BF16)?;
    let small = Layers::qwen3_8b(1).adapter(RANK, &noise)?;
    let small = small.plan(&model, DType::BF16)?;

    let capacity = Capacity::tokens(TOKENS).slots(TOKENS + 1).rank(RANK);
    // Beside those of the step, one that is loaded again and again.
    let arena_bytes = WeightTable::arena_bytes((0..TOKENS + 2).map(|_| &image));
    let weights = WeightTable::new(&gpu.queue()?, &model, DType::BF16, capacity, arena_bytes)?;
    // Not by `load`, the first of which is to be measured.
    let mut staging = Staging::new(weights.queue())?;
    let load = |slot| Ok(weights.commit(slot, weights.reserve(&image)?.fill(&image, &mut staging)?)?);
    let slots = (0..TOKENS).map(load).collect::<Result<Vec<_>>>()?;
    drop(staging);
    let mut captured = Captured::new(gpu, &weights, &linears, slots)?;
    let queue = Queue::new(&gpu.kernels, &gpu.new_stream()?)?;
    let (memory, disk, dir) = (&memory, &disk, dir.path());
    let setup = Setup { weights: &weights, image: &image, small: &small, memory, dir, disk, queue };
    let works = WORKS.into_iter().filter(|(name, _)| name.contains(only));
    println!("{replays} replays beside each work; an adapter has {} MB; µs\n", image.bytes() / 1_000_000);
    if waits {
        return waited::measure(gpu, &setup, &mut captured, works, replays);
    }
    let (graph, batch, workspace) = captured.start()?;
    let mut step = weights.step(&batch, workspace)?;
    gpu.time_each(WARM_UP, || Ok(graph.replay(&mut step)?))?;
    println!(
        "| beside | runs | ms a run | device p50 | p99 | max | call p50 | p99 | max | period p99 | max | slowest, \
         device | slowest, call |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    for (name, make) in works {
        let (measured, beside) = run_beside(make(&setup)?, || replay(gpu, graph, &mut step, replays))?;
        println!("{}", measured.row(name, &beside));
    }
    println!();
    Ok(())
}

/// Times of replays.
struct Measured {
    device: Vec<f64>,
    call: Vec<f64>,
    period: Vec<f64>,
    /// When each replay was enqueued.
    enqueued: Vec<Instant>,
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
    Ok(Measured { device, call, period, enqueued })
}

impl Measured {
    fn row(&self, name: &str, beside: &Runs) -> String {
        let [device, call, period] = [&self.device, &self.call, &self.period].map(|us| percentiles(us));
        format!(
            "| {name} | {} | {:.3} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {} | {} |",
            beside.runs.len(),
            beside.mean_ms(),
            device[0],
            device[1],
            device[2],
            call[0],
            call[1],
            call[2],
            period[1],
            period[2],
            self.place(&self.device, AHEAD, beside),
            self.place(&self.call, 1, beside),
        )
    }

    /// Where the slowest replay was, which ended when the host enqueued the one that is `ahead` behind it.
    fn place(&self, us: &[f64], ahead: usize, beside: &Runs) -> String {
        let slowest = us.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b)).map_or(0, |(slowest, _)| slowest);
        let last = self.enqueued.len() - 1;
        let [begin, end] = [slowest, (slowest + ahead).min(last)].map(|replay| self.enqueued[replay]);
        let Some([first, _]) = beside.runs.first() else { return format!("replay {slowest}") };
        if end < *first {
            return format!("replay {slowest}, before the work");
        }
        let since = (begin.saturating_duration_since(*first)).as_secs_f64() * 1e3;
        let overlapping = beside.runs.iter().position(|[start, stop]| *start <= end && begin <= *stop);
        let run = overlapping.map_or("between runs".to_owned(), |run| format!("run {run}"));
        format!("replay {slowest}, {since:.1} ms, {run}")
    }
}

/// Median, p99 and the greatest.
pub(crate) fn percentiles(us: &[f64]) -> [f64; 3] {
    let mut us = us.to_vec();
    us.sort_by(f64::total_cmp);
    [50, 99, 100].map(|percent| percentile(&us, percent))
}
