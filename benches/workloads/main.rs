//! Measures the linear layers of `benches/workloads.json`, which other libraries are measured on too, the way they are.
//!
//! A workload is checked against the reference, then timed: many operations in one CUDA graph, each with other adapters so that
//! weights come from memory (`cold_us`), and each with the same (`warm_us`); the median of 20 replays, divided by the operations
//! in one. Grouping the batch by slot is done once per step for all layers, and is not in these times (`benches/routing.rs`).
//!
//! Writes the results as JSON, and ends with a table of geometric means by class. The floor of a workload is what its bytes take
//! at the rate at which this device reads memory, measured in the same run, and never less than a launch.
//!
//! Other suites, when asked for: layers of experts ([`experts`]), what LoRA adds to the time of a whole layer ([`added`]), and what a
//! layer costs the host ([`host`]).

mod added;
#[path = "../common/mod.rs"]
mod common;
mod experts;
mod host;

use std::{
    collections::HashMap,
    fs,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use aril::cuda::LaunchError;
use clap::Parser;

use added::Base;
use common::{
    Result, ceilings,
    experts::ExpertsWorkload,
    layer::{Layer, MAX_ERROR, Room, Stage},
    own::{launched, own, own_experts, with_base},
    report::{self, Classes, Figures},
    results::{Entry, Info, Others, PEER, Results},
    workload::{self, Bytes, COLD_BYTES, Suite, Workload},
};
use experts::Wanted;

const REPLAYS: usize = 20;

#[derive(Debug, Parser)]
#[command(about = "Measures the layers of workloads.json on the first GPU")]
struct Cli {
    /// Where the results go.
    #[arg(long, default_value = "aril.json")]
    out: PathBuf,
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["decode", "prefill", "own"])]
    suite: Vec<Suite>,
    /// Only workloads whose id contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Only workloads with one of these tags.
    #[arg(long, value_delimiter = ',')]
    tags: Vec<String>,
    /// Seconds; workloads not reached by then are listed in the results.
    #[arg(long, default_value_t = 540.0)]
    budget: f64,
    /// A few workloads of each suite.
    #[arg(long)]
    quick: bool,
    /// Check the results only.
    #[arg(long)]
    no_time: bool,
    /// Leave out the times with weights in the cache.
    #[arg(long)]
    no_warm: bool,
    /// Another list of workloads than the one built in.
    #[arg(long)]
    workloads: Option<PathBuf>,
    /// Results of others on the same kind of device, for the table. May be repeated: what several files have is taken from the
    /// first.
    #[arg(long)]
    against: Vec<PathBuf>,
    /// Print the table of these results, and measure nothing.
    #[arg(long)]
    table: Option<PathBuf>,
    /// Print the table in Markdown.
    #[arg(long)]
    markdown: bool,
    /// Print a row for each layer of a class.
    #[arg(long)]
    by_layer: bool,
    /// What cargo passes.
    #[arg(long, hide = true)]
    bench: bool,
}

/// What is asked for.
struct Chosen {
    layers: Vec<Workload>,
    experts: Vec<ExpertsWorkload>,
}

/// What is measured at a time.
#[derive(Clone, Copy)]
enum Subject<'a> {
    Layer(&'a Workload),
    Experts(&'a ExpertsWorkload),
}

fn main() -> Result<ExitCode> {
    let cli = Cli::parse();
    let chosen = Chosen::new(&cli)?;
    if chosen.subjects().next().is_none() {
        return Err("no workload is asked for".into());
    }
    let results = match &cli.table {
        Some(path) => Results::load(path)?,
        None => measure(&cli, &chosen)?,
    };
    let by_id: HashMap<&str, Subject<'_>> = chosen.subjects().map(|subject| (subject.id(), subject)).collect();
    let others = Others::load(&cli.against)?;
    let table = |entries| classes(&results, entries, &by_id, &others, cli.by_layer).table();
    let layer = |id: &str| match by_id.get(id)? {
        Subject::Layer(workload) => Some(*workload),
        Subject::Experts(_) => None,
    };
    let layers = results.layer.iter().filter_map(|added| Some((layer(&added.id)?, added)));
    let layers = report::added(&layers.collect::<Vec<_>>());
    let host = results.host.iter().filter_map(|cost| Some((layer(&cost.id)?, cost)));
    let host = report::host(&host.collect::<Vec<_>>());
    for table in [table(&results.dense), table(&results.moe), layers, host].iter().filter(|table| !table.is_empty()) {
        println!("{}", if cli.markdown { table.markdown() } else { table.to_string() });
    }
    Ok(if results.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Chosen {
    fn new(cli: &Cli) -> Result<Self> {
        let given = cli.workloads.as_ref().map(fs::read_to_string).transpose()?;
        let list = given.as_deref().unwrap_or(workload::BUILT_IN);
        let is_chosen = |suite: Suite, id: &str, tag: &String| {
            cli.suite.contains(&suite) && id.contains(&cli.only) && (cli.tags.is_empty() || cli.tags.contains(tag))
        };
        let mut layers = [workload::parse(list)?, own()?, with_base()?, launched()?].concat();
        layers.retain(|workload| is_chosen(workload.suite, &workload.id, &workload.tag));
        let mut experts = [common::experts::parse(list)?, own_experts()].concat();
        experts.retain(|workload| is_chosen(workload.suite, &workload.id, &workload.tag));
        Ok(if cli.quick {
            Self { layers: workload::quick(layers), experts: common::experts::quick(experts) }
        } else {
            Self { layers, experts }
        })
    }

    fn subjects(&self) -> impl Iterator<Item = Subject<'_>> {
        self.layers.iter().map(Subject::Layer).chain(self.experts.iter().map(Subject::Experts))
    }
}

impl<'a> Subject<'a> {
    fn id(self) -> &'a str {
        match self {
            Self::Layer(workload) => &workload.id,
            Self::Experts(workload) => &workload.id,
        }
    }

    fn suite(self) -> Suite {
        match self {
            Self::Layer(workload) => workload.suite,
            Self::Experts(workload) => workload.suite,
        }
    }

    fn room(self) -> Room {
        match self {
            Self::Layer(workload) if workload.suite == Suite::Layer => added::room(workload),
            Self::Layer(workload) => Room::new(workload),
            Self::Experts(workload) => experts::room(workload),
        }
    }

    fn bytes(self) -> Bytes {
        match self {
            Self::Layer(workload) => workload.bytes(),
            Self::Experts(workload) => workload.bytes(workload.turns().choices),
        }
    }

    fn class(self, by_layer: bool) -> String {
        match self {
            Self::Layer(workload) if by_layer => format!("{}, {}", workload.class(), workload.layer),
            Self::Layer(workload) => workload.class(),
            Self::Experts(workload) => workload.class(),
        }
    }
}

/// Measures all, and saves the results.
fn measure(cli: &Cli, chosen: &Chosen) -> Result<Results> {
    let (start, budget) = (Instant::now(), Duration::from_secs_f64(cli.budget));
    let subjects: Vec<Subject<'_>> = chosen.subjects().collect();
    let stage = Stage::new(subjects.iter().map(|subject| subject.room()))?;
    let is_with_base = subjects.iter().any(|subject| subject.suite() == Suite::Layer);
    let base = is_with_base.then(|| Base::new(&stage.gpu)).transpose()?;
    let mut results = Results::default();
    results.meta.gpu = stage.gpu.context.name()?;
    results.meta.aril = env!("CARGO_PKG_VERSION").to_owned();
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
        let measured = match (subject, &base) {
            (Subject::Layer(workload), Some(base)) if workload.suite == Suite::Layer => {
                base.measure(&stage, workload, cli.no_time, &mut results)
            }
            (Subject::Layer(workload), _) if workload.suite == Suite::Host => {
                host::measure(&stage, workload, &mut results)
            }
            (Subject::Layer(workload), _) => run(&stage, workload, cli, &mut results),
            (Subject::Experts(workload), _) => {
                let wanted = Wanted { cold: !cli.no_time, warm: !cli.no_warm };
                experts::measure(&stage, workload, wanted, &mut results)
            }
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
    let mut entry = Entry { id, peer, err, note, ..Entry::default() };
    if !cli.no_time {
        let reps = layer.repetitions(layer.num_sets())?;
        let cold = layer.time(reps, true, REPLAYS)?;
        entry.reps = Some(reps);
        (entry.cold_us, entry.cold_min, entry.cold_max) = (Some(cold.median), Some(cold.min), Some(cold.max));
        if layer.num_sets() == 1 {
            entry.warm_us = entry.cold_us;
        } else if !cli.no_warm {
            entry.warm_us = Some(layer.time(layer.repetitions(1)?, false, REPLAYS)?.median);
        }
    }
    results.dense.push(entry);
    Ok(())
}

/// What was measured of the subjects, by class.
fn classes(
    results: &Results,
    entries: &[Entry],
    subjects: &HashMap<&str, Subject<'_>>,
    others: &Others,
    by_layer: bool,
) -> Classes {
    let rate = results.ceilings["hbm_read_GBps"].max(results.ceilings["hbm_copy_GBps"]);
    let mut classes = Classes::default();
    for Entry { id, cold_us, fused_us, .. } in entries {
        let (Some(us), Some(subject)) = (*cold_us, subjects.get(id.as_str())) else { continue };
        let (fastest, deltas) = (others.fastest(id), others.fastest_of_deltas(id));
        let (id, floor_us, fused_us) = (id.clone(), subject.bytes().floor_us(rate), *fused_us);
        let figures = Figures { id, us, floor_us, fused_us, fastest, deltas };
        classes.add(subject.suite(), subject.class(by_layer), figures);
    }
    classes
}
