//! Far more adapters than the device holds, through a pool: requests in Zipf order, continuous batching, and every
//! output compared bit for bit with its adapter applied alone. On the CPU by default; with `--features cuda` and a
//! driver, on the GPU.
//!
//! ```sh
//! cargo run --release --example swap -- --adapters 500 --slots 16 --requests 5000
//! ```

#![forbid(unsafe_code)]

mod adapters;
mod device;

use std::{
    collections::VecDeque,
    error::Error,
    time::{Duration, Instant},
};

use aril::{
    Slot,
    plan::Capacity,
    pool::{Lease, PoolConfig, PoolError, Snapshot, StreamId},
};
use clap::Parser;
use half::bf16;
use indicatif::{ProgressBar, ProgressStyle};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use rand_distr::{Distribution, Zipf};

use self::{
    adapters::{Library, MAX_RANK, Served},
    device::{Cpu, Device},
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Requests that wait behind the running ones and are prefetched.
const LOOKAHEAD: usize = 4;
/// Steps of the longest request.
const MAX_STEPS: usize = 12;

#[derive(Clone, Debug, Parser)]
struct Options {
    /// Adapters on disk.
    #[arg(long, default_value_t = 200)]
    adapters: usize,
    /// Slots of the device.
    #[arg(long, default_value_t = 12)]
    slots: usize,
    /// Size of the device's arena, in MiB.
    #[arg(long, default_value_t = 2)]
    arena_mib: usize,
    /// Size of the host tier, in MiB.
    #[arg(long, default_value_t = 8)]
    host_mib: usize,
    /// Requests.
    #[arg(long, default_value_t = 2000)]
    requests: usize,
    /// Requests in a batch.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Exponent of the Zipf distribution of the requests' adapters.
    #[arg(long, default_value_t = 1.0)]
    zipf: f64,
    /// Seed of adapters and requests.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run on the CPU even if there is a GPU.
    #[arg(long)]
    cpu: bool,
}

/// A request: one token in each step.
struct Request<'a> {
    served: &'a Served,
    steps_left: usize,
}

/// What a run has done.
struct Outcome {
    snapshot: Snapshot,
    steps: usize,
    tokens: usize,
    /// Requests that were asked for again because of `Loading` or `Full`.
    refusals: usize,
    time: Duration,
}

fn main() -> Result<()> {
    run(&Options::parse())
}

/// Runs on the GPU if there is one and the feature `cuda` is on, or else on the CPU.
fn run(options: &Options) -> Result<()> {
    let capacity = Capacity::tokens(options.batch).slots(options.slots).rank(MAX_RANK);
    let config = PoolConfig::arena_bytes(options.arena_mib << 20).host_bytes(options.host_mib << 20);
    #[cfg(feature = "cuda")]
    if !options.cpu && aril::cuda::driver_is_present() {
        return run_on(device::gpu::Gpu::new(capacity, config)?, options);
    }
    run_on(Cpu::new(capacity, config)?, options)
}

fn run_on<D: Device>(mut device: D, options: &Options) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(options.seed);
    println!("{} adapters on disk, served on {}", options.adapters, D::NAME);
    let library = Library::write(&mut device, options.adapters, &mut rng)?;
    let zipf = Zipf::new(options.adapters as f64, options.zipf)?;
    let requests = (0..options.requests).map(|_| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a whole number from 1 on")]
        let rank = zipf.sample(&mut rng) as usize;
        Request { served: &library.served[rank - 1], steps_left: rng.random_range(1..=MAX_STEPS) }
    });
    let outcome = serve(&mut device, requests.collect(), options.batch)?;
    report(options, &outcome);
    Ok(())
}

/// Serves all requests. Fails at the first output that is not its adapter's.
fn serve(device: &mut impl Device, mut waiting: VecDeque<Request<'_>>, max_batch: usize) -> Result<Outcome> {
    let bar = ProgressBar::new(waiting.len() as u64);
    bar.set_style(ProgressStyle::with_template("{bar:40} {pos}/{len} requests, {per_sec}, {msg}")?);
    let start = Instant::now();
    let (mut steps, mut tokens, mut refusals) = (0, 0, 0);
    let mut running: Vec<(Lease, Request<'_>)> = Vec::new();
    while !waiting.is_empty() || !running.is_empty() {
        // Requests whose adapters are ready join the batch. One that is not does not hold up those behind it.
        let mut next = 0;
        while running.len() < max_batch && next < waiting.len().min(LOOKAHEAD) {
            match device.pool().acquire(waiting[next].served.id, StreamId::FIRST) {
                Ok(lease) => running.extend(waiting.remove(next).map(|request| (lease, request))),
                Err(PoolError::Loading { .. } | PoolError::Full) => {
                    refusals += 1;
                    next += 1;
                }
                Err(error) => return Err(error.into()),
            }
        }
        for request in waiting.iter().take(LOOKAHEAD) {
            device.pool().prefetch(request.served.id)?;
        }
        if running.is_empty() {
            device.pool().end_step(StreamId::FIRST)?;
            device.pool().wait(Duration::from_millis(10));
            continue;
        }
        let slots: Vec<Slot> = running.iter().map(|(lease, _)| lease.slot()).collect();
        let x: Vec<bf16> = running.iter().flat_map(|(_, request)| request.served.x.iter().copied()).collect();
        let y = device.step(&slots, &x)?;
        for ((_, request), y) in running.iter().zip(y.chunks(adapters::OUTPUTS)) {
            let is_same = y.iter().map(|y| y.to_bits()).eq(request.served.y.iter().map(|y| y.to_bits()));
            if !is_same {
                return Err(format!("step {steps}: {} has another output than alone", request.served.id).into());
            }
        }
        (steps, tokens) = (steps + 1, tokens + running.len());
        running.retain_mut(|(_, request)| {
            request.steps_left -= 1;
            bar.inc(u64::from(request.steps_left == 0));
            request.steps_left > 0
        });
        device.pool().end_step(StreamId::FIRST)?;
        bar.set_message(format!("{} on the device", device.pool().snapshot().resident));
    }
    bar.finish_and_clear();
    Ok(Outcome { snapshot: device.pool().snapshot(), steps, tokens, refusals, time: start.elapsed() })
}

fn report(options: &Options, outcome: &Outcome) {
    let Outcome { snapshot, steps, tokens, refusals, time } = outcome;
    let counters = snapshot.counters;
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    let hit_rate = 100.0 * counters.hits as f64 / (counters.hits + counters.misses).max(1) as f64;
    let rows = [
        ("requests", options.requests.to_string()),
        ("outputs, all as alone", tokens.to_string()),
        ("steps", steps.to_string()),
        ("time", format!("{:.2} s, {:.0} tokens/s", time.as_secs_f64(), *tokens as f64 / time.as_secs_f64())),
        (
            "leases of resident adapters",
            format!("{} of {} ({hit_rate:.1} %)", counters.hits, counters.hits + counters.misses),
        ),
        ("requests asked for again", refusals.to_string()),
        ("copies to the device", format!("{}, {}", counters.copies, mib(counters.copied_bytes))),
        ("evictions from the device", counters.evictions.to_string()),
        ("reads from disk", format!("{}, {}", counters.reads, mib(counters.read_bytes))),
        ("evictions from host memory", counters.host_evictions.to_string()),
        ("fragmentation at the end", format!("{:.1} %", 100.0 * snapshot.device_memory.fragmentation())),
    ];
    for (what, value) in rows {
        println!("{what:<30} {value}");
    }
}

#[test]
fn every_request_gets_its_adapter() -> Result<()> {
    let small =
        ["swap", "--adapters", "40", "--requests", "200", "--slots", "6", "--arena-mib", "1", "--host-mib", "2"];
    run(&Options::parse_from(small))
}
