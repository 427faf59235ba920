//! Measures the adapter pool on a GPU.
//!
//! Writes the figures as JSON and prints them as tables. Each measurement has a pool of its own, and one that fails
//! leaves the others' figures. All of them take less than a minute. With `--stalls`, measures [`stalls`] alone, in two
//! minutes, and with `--stalls --waits` [`waited`].
//!
//! | module | measures |
//! |---|---|
//! | [`load`] | the time of a load to the device, from the host tier, tensors, files and device memory, against a plain copy |
//! | [`steps`] | the time on the host of a step's leases and its end, by the number of resident adapters |
//! | [`reading`] | the limits of a load from files: opening, planning, reading from the page cache, packing |
//! | [`neighbours`] | replays of a decode step, alone and beside loads |
//! | [`stalls`] | replays of a decode step beside each part of a load |
//! | [`waited`] | the same of steps that the host waits for, each with an update of its routing |
//!
//! The memory of adapters of many ranks against padded slots ([`Memory`]) is computed.

mod beside;
mod load;
mod neighbours;
mod reading;
mod stalls;
mod steps;
mod waited;

use std::{
    path::PathBuf,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use aril::{
    cuda::{AdapterPool, raw::Descriptor},
    model::Model,
    pool::{AdapterId, Lease, PoolError, Source, StreamId},
};
use aril_bench::{
    Result,
    device::Gpu,
    pool::{Figures, Memory},
};
use clap::Parser;

#[derive(Debug, Parser)]
#[command(about = "Measures the adapter pool on the first GPU")]
struct Cli {
    /// Where the figures go
    #[arg(long, default_value = "pool.json")]
    out: PathBuf,
    /// Measures which part of a load delays a step, and prints it
    #[arg(long)]
    stalls: bool,
    /// With `--stalls`: the host waits for each step, whose routing it updates
    #[arg(long, requires = "stalls")]
    waits: bool,
    /// Replays beside each part of a load
    #[arg(long, default_value_t = 10_000)]
    replays: usize,
    /// Only beside those parts whose name contains this
    #[arg(long, default_value = "")]
    beside: String,
    /// What cargo passes
    #[arg(long, hide = true)]
    bench: bool,
}

/// The longest wait for a load.
const LIMIT: Duration = Duration::from_secs(20);

type Measurement = fn(&Gpu, &mut Figures) -> Result<()>;

const MEASUREMENTS: [(&str, Measurement); 5] = [
    ("memory", memory),
    ("load", load::measure),
    ("reading", reading::measure),
    ("steps", steps::measure),
    ("neighbours", neighbours::measure),
];

fn main() -> Result<ExitCode> {
    let cli = Cli::parse();
    let (start, gpu, mut figures) = (Instant::now(), Gpu::new()?, Figures::default());
    figures.meta.gpu = gpu.context.name()?;
    figures.meta.aril = env!("CARGO_PKG_VERSION").to_owned();
    figures.meta.commit = option_env!("ARIL_COMMIT").map(str::to_owned);
    println!("{}\n", figures.meta.gpu);
    if cli.stalls {
        stalls::measure(&gpu, cli.replays, &cli.beside, cli.waits)?;
        println!("{:.0} s", start.elapsed().as_secs_f64());
        return Ok(ExitCode::SUCCESS);
    }
    for (name, measure) in MEASUREMENTS {
        if let Err(error) = measure(&gpu, &mut figures) {
            figures.fail(name, error.to_string());
        }
        figures.meta.seconds = start.elapsed().as_secs_f64();
        figures.save(&cli.out)?;
    }
    figures.tables().iter().for_each(|table| println!("{table}"));
    println!("{:.0} s, {} failed", figures.meta.seconds, figures.failures.len());
    Ok(if figures.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn memory(_: &Gpu, figures: &mut Figures) -> Result<()> {
    figures.memory = Some(Memory::of_qwen3_8b()?);
    Ok(())
}

/// Bytes of a tier with room for `count` adapters of the source's size.
fn room(model: &Model, source: &Source, count: usize) -> usize {
    const GRANULE: usize = 1024;
    let block = source.bytes() + model.num_entries() * size_of::<Descriptor>() + GRANULE;
    // The allocator finds a block only in a gap that is up to an eighth larger.
    block * count + block / 8
}

/// As many packing threads as the machine has cores, and at most 16.
fn packers() -> usize {
    thread::available_parallelism().map_or(1, Into::into).min(16)
}

/// Leases adapters on the first stream once they are in host memory.
fn lease(pool: &mut AdapterPool, ids: &[AdapterId]) -> Result<Vec<Lease>> {
    let start = Instant::now();
    loop {
        match pool.prepare(ids, StreamId::FIRST) {
            Err(PoolError::Loading { .. }) if start.elapsed() < LIMIT => drop(pool.wait(Duration::from_millis(100))),
            leases => return leases.map_err(|error| format!("{error}: {:?}", pool.snapshot()).into()),
        }
    }
}
