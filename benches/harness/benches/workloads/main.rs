//! Measures the workloads of `benches/workloads.json`, which other libraries are measured on too, and our own, on a
//! GPU.
//!
//! A workload is checked against the reference, then timed: many operations in one CUDA graph, each with another set of
//! adapters so that weights come from memory (`cold_us`), or each with the same (`warm_us`). The time of an operation
//! is the median of 20 replays, divided by the operations in one. The batch is grouped by slot once per step for all
//! layers; these times leave that out.
//!
//! Writes the results as JSON and prints tables of geometric means by class. The floor of a workload is the time of its
//! bytes at the rate at which this device reads memory, measured in the same run, and at least that of a launch.
//!
//! | module | suites |
//! |---|---|
//! | this one | `decode`, `prefill`, `own` |
//! | [`experts`] | `moe`, `moe-own` |
//! | [`added`] | `layer`: what LoRA adds to the base GEMM |
//! | [`chain`] | `layer`, too: decoder layers in a chain |
//! | [`host`] | `host`: what a layer costs the host |

mod added;
mod chain;
mod experts;
mod host;

use std::{
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use aril::cuda::LaunchError;
use aril_bench::{
    Result, ceilings,
    gemm::Gemm,
    layer::{Layer, MAX_ERROR, Room, Stage},
    record,
    results::{Entry, Info, Others, PEER, Results},
    selection::{Chosen, Selection, Subject},
    workload::{COLD_BYTES, Suite, Workload},
};
use clap::Parser;

const REPLAYS: usize = 20;
const DEFAULT_SUITES: [Suite; 3] = [Suite::Decode, Suite::Prefill, Suite::Own];
const SUITES_OF_NEW_GPU: [Suite; 4] = [Suite::Decode, Suite::Prefill, Suite::Moe, Suite::Layer];

#[derive(Debug, Parser)]
#[command(about = "Measures workloads on the first GPU: by default those of decode, prefill and own")]
struct Cli {
    /// Where the results go
    #[arg(long, default_value = "aril.json")]
    out: PathBuf,
    #[command(flatten)]
    selection: Selection,
    /// For a GPU that has no record: a few workloads of each suite and the base GEMMs beside them, in GPU.json, and what to
    /// send
    #[arg(long, conflicts_with_all = ["out", "suite", "quick"])]
    new_gpu: bool,
    /// Seconds; workloads not reached by then are listed in the results
    #[arg(long, default_value_t = 540.0)]
    budget: f64,
    /// Leave out the times with weights in the cache
    #[arg(long)]
    no_warm: bool,
    /// What cargo passes
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<ExitCode> {
    let mut cli = Cli::parse();
    let suites = if cli.new_gpu { &SUITES_OF_NEW_GPU[..] } else { &DEFAULT_SUITES };
    cli.selection.quick |= cli.new_gpu;
    let chosen = Chosen::new(&cli.selection, suites)?;
    let results = measure(&mut cli, &chosen)?;
    record::tables(&results, &chosen, &Others::default()).iter().for_each(|table| println!("{table}"));
    if cli.new_gpu {
        println!(
            "Please send {} with an issue. It names the GPU, and nothing else of this machine.",
            cli.out.display()
        );
    }
    Ok(if results.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What a subject takes of the stage.
fn room(subject: Subject<'_>) -> Room {
    match subject {
        Subject::Layer(workload) if workload.suite == Suite::Layer => added::room(workload),
        Subject::Layer(workload) => Room::new(workload),
        Subject::Experts(workload) => experts::room(workload),
    }
}

/// Measures all, and saves the results.
fn measure(cli: &mut Cli, chosen: &Chosen) -> Result<Results> {
    let (start, budget) = (Instant::now(), Duration::from_secs_f64(cli.budget));
    let subjects: Vec<Subject<'_>> = chosen.subjects().collect();
    let stage = Stage::new(subjects.iter().map(|&subject| room(subject)))?;
    let is_with_base = subjects.iter().any(|subject| subject.suite() == Suite::Layer);
    let gemm = is_with_base.then(|| Gemm::new(&stage.gpu)).transpose()?;
    let mut results = Results::default();
    results.meta.gpu = stage.gpu.context.name()?;
    if cli.new_gpu {
        cli.out = format!("{}.json", results.meta.gpu.replace(char::is_whitespace, "-")).into();
        results.meta.device = Some(format!("{:?}", stage.gpu.kernels.device()));
    }
    results.meta.aril = env!("CARGO_PKG_VERSION").to_owned();
    results.meta.commit = option_env!("ARIL_COMMIT").map(str::to_owned);
    results.meta.replays = REPLAYS;
    results.meta.cold_bytes = COLD_BYTES;
    results.ceilings = ceilings::measure(&stage.gpu)?;
    println!("{}, {} workloads", results.meta.gpu, subjects.len());
    results.ceilings.iter().for_each(|(name, value)| println!("{name:<32}{value:>10.2}"));

    let mut saved = Instant::now();
    let ids = |subjects: &[Subject<'_>]| subjects.iter().map(|subject| subject.id().to_owned()).collect();
    for (index, &subject) in subjects.iter().enumerate() {
        if start.elapsed() > budget {
            results.meta.not_reached = ids(&subjects[index..]);
            break;
        }
        let measured = match (subject, &gemm) {
            (Subject::Layer(workload), Some(gemm)) if workload.suite == Suite::Layer => {
                added::measure(gemm, &stage, workload, &mut results)
            }
            (Subject::Layer(workload), _) if workload.suite == Suite::Host => {
                host::measure(&stage, workload, &mut results)
            }
            (Subject::Layer(workload), _) => run(&stage, workload, cli, &mut results),
            (Subject::Experts(workload), _) => experts::measure(&stage, workload, !cli.no_warm, &mut results),
        };
        if let Err(error) = measured {
            let kind = match error.downcast_ref::<LaunchError>() {
                Some(LaunchError::Plan(_)) => "unsupported",
                _ => "error",
            };
            results.fail(subject.id(), kind, error.to_string());
        }
        if let Err(error) = stage.gpu.synchronize() {
            println!("the device is lost after {}: {error}", subject.id());
            results.meta.not_reached = ids(&subjects[index + 1..]);
            break;
        }
        if saved.elapsed() > Duration::from_secs(20) {
            results.save(&cli.out)?;
            saved = Instant::now();
        }
    }
    if let Some(gemm) = gemm.filter(|_| start.elapsed() < budget) {
        let layers = subjects.iter().filter_map(|subject| match subject {
            Subject::Layer(workload) => Some(*workload),
            Subject::Experts(_) => None,
        });
        if let Err(error) = chain::measure(&gemm, &stage, &layers.collect::<Vec<_>>(), &mut results) {
            results.fail("chain", "error", error.to_string());
        }
    }
    results.meta.seconds = start.elapsed().as_secs_f64();
    results.save(&cli.out)?;
    let (failures, not_reached) = (results.failures.len(), results.meta.not_reached.len());
    let measured = results.dense.len() + results.moe.len() + results.layer.len() + results.host.len();
    println!("\n{measured} measured, {failures} failed, {not_reached} not reached\n");
    Ok(results)
}

fn run(stage: &Stage, workload: &Workload, cli: &Cli, results: &mut Results) -> Result<()> {
    let layer = Layer::new(stage, workload)?;
    let info = Info { bytes: workload.bytes(), flops: workload.flops(), sets: layer.num_sets(), topk_reps: None };
    results.info.insert(workload.id.clone(), info);
    let err = layer.check()?;
    if err.is_nan() || err >= MAX_ERROR {
        results.fail(&workload.id, "wrong", format!("relative error {err:.3e}"));
        return Ok(());
    }
    let (id, peer, note) = (workload.id.clone(), PEER.to_owned(), layer.plan());
    let reps = layer.repetitions(layer.num_sets())?;
    let cold = layer.time(reps, true, REPLAYS)?;
    let mut entry = Entry { id, peer, err, note, reps: Some(reps), ..Entry::default() };
    (entry.cold_us, entry.cold_min, entry.cold_max) = (Some(cold.median), Some(cold.min), Some(cold.max));
    if layer.num_sets() == 1 {
        entry.warm_us = entry.cold_us;
    } else if !cli.no_warm {
        entry.warm_us = Some(layer.time(layer.repetitions(1)?, false, REPLAYS)?.median);
    }
    results.dense.push(entry);
    Ok(())
}
