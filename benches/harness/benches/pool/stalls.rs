//! Replays of a decode step of Qwen3-8B beside one part of a load at a time, to find which part delays a step.
//!
//! | column | is |
//! |---|---|
//! | device | the time between events around a replay. The host is up to four replays ahead |
//! | call | the time on the host of the calls that enqueue a replay and its events |

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
    beside::{Setup, WORKS, run_beside},
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
    let setup = Setup { weights: &weights, image: &image, memory: &memory, disk: &disk, queue };
    let works = WORKS.into_iter().filter(|(name, _)| name.contains(only));
    println!("{replays} replays beside each work; an adapter has {} MB; µs\n", image.bytes() / 1_000_000);
    if waits {
        return waited::measure(gpu, &setup, &mut captured, works, replays);
    }
    let (graph, batch, workspace) = captured.start()?;
    let mut step = weights.step(&batch, workspace)?;
    gpu.time_each(WARM_UP, || Ok(graph.replay(&mut step)?))?;
    println!("| beside | runs | ms a run | device p50 | p99 | max | call p50 | p99 | max |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for (name, make) in works {
        let (times, beside) = run_beside(make(&setup)?, || replay(gpu, graph, &mut step, replays))?;
        let times = times.map(|us| percentiles(&us).map(|us| format!("{us:.1}")).join(" | "));
        println!("| {name} | {} | {:.3} | {} |", beside.count, beside.mean_ms(), times.join(" | "));
    }
    println!();
    Ok(())
}

/// The times of replays on the device, and of the calls that enqueue them, in µs.
fn replay(gpu: &Gpu, graph: &mut Graph, step: &mut Step<'_>, replays: usize) -> Result<[Vec<f64>; 2]> {
    let events = (0..replays).map(|_| Ok([Event::new()?, Event::new()?])).collect::<Result<Vec<_>>>()?;
    let (mut call, begin) = (Vec::with_capacity(replays), Instant::now());
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
    }
    gpu.synchronize()?;
    let device = events[..call.len()].iter().map(|[start, end]| start.us_until(end)).collect::<Result<_>>()?;
    Ok([device, call])
}

/// Median, p99 and the greatest.
pub(crate) fn percentiles(us: &[f64]) -> [f64; 3] {
    let mut us = us.to_vec();
    us.sort_by(f64::total_cmp);
    [50, 99, 100].map(|percent| percentile(&us, percent))
}
