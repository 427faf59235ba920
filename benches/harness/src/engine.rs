//! The figures of the reference engine, which `figures` and the load of `aril-serve` write: prefills, decode steps, and
//! a server under a trace of requests.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{
    Result,
    plots::{Axis, Kind, Line, Panel, Plot},
    report::Table,
    results,
};

/// The file in the folder of a GPU.
const FILE: &str = "serve.json";

/// Adapters and ranks of the tables; a step of fewer sequences has one each.
const ADAPTERS: usize = 8;
const RANKS: [usize; 2] = [16, 64];
/// The context of the plot.
const CONTEXT: usize = 512;

/// The runs of one GPU. Of figures of the same, the last one counts.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    pub runs: Vec<Run>,
}

/// What a program measured.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    pub meta: Meta,
    #[serde(default)]
    pub prefills: Vec<Prefill>,
    #[serde(default)]
    pub steps: Vec<Step>,
    #[serde(default)]
    pub host: Vec<Host>,
    #[serde(default)]
    pub traces: Vec<Trace>,
    #[serde(default)]
    pub first_tokens: Vec<FirstToken>,
    /// What was left out, and why.
    #[serde(default)]
    pub failures: Vec<String>,
}

impl Run {
    /// Tells the models of a tensor-parallel group from those on one GPU.
    fn name_ranks(&mut self) {
        let Meta { tp, .. } = self.meta;
        if tp > 1 {
            let models = self.prefills.iter_mut().map(|prefill| &mut prefill.model);
            let models = models.chain(self.steps.iter_mut().map(|step| &mut step.model));
            let models = models.chain(self.host.iter_mut().map(|host| &mut host.model));
            let models = models.chain(self.traces.iter_mut().map(|trace| &mut trace.model));
            let models = models.chain(self.first_tokens.iter_mut().map(|first| &mut first.model));
            models.for_each(|model| model.push_str(&format!(", tp {tp}")));
        }
    }
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Meta {
    pub gpu: String,
    /// GPUs that a model was split over; 0 if the program knows of one alone.
    #[serde(default)]
    pub tp: usize,
    pub aril: String,
    /// The commit of the build, if its environment named one (`ARIL_COMMIT`).
    pub commit: Option<String>,
    pub seconds: f64,
    /// The rate at which a kernel reads memory; 0 if it was not measured.
    #[serde(default)]
    pub read_gb_per_s: f64,
}

/// A step that computes prompts of equal lengths.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Prefill {
    pub model: String,
    /// Of all sequences.
    pub tokens: usize,
    pub sequences: usize,
    pub adapters: usize,
    pub rank: usize,
    pub runs: usize,
    pub p50_us: f64,
}

/// A decode step in a graph.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    pub model: String,
    pub batch: usize,
    pub context: usize,
    pub adapters: usize,
    pub rank: usize,
    /// Whether layers run base weights and adapters in one launch; if not, cuBLASLt's GEMMs and launches for deltas.
    pub fused: bool,
    /// Whether cuBLASLt's GEMMs have the rows of the stack.
    #[serde(default)]
    pub stacked: bool,
    /// The fewest bytes that the step reads without adapters.
    pub bytes: u64,
    pub replays: usize,
    pub p50_us: f64,
    pub p90_us: f64,
}

/// The engine's own time between steps.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    pub model: String,
    pub batch: usize,
    pub adapters: usize,
    pub rank: usize,
    /// Whether the next step is enqueued while one runs.
    #[serde(default)]
    pub ahead: bool,
    pub steps: u64,
    pub host_us: f64,
    pub step_us: f64,
}

/// A server under a trace of requests.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    pub model: String,
    /// Adapters that requests were for; 0 for the base model alone.
    pub adapters: u32,
    pub rank: usize,
    pub zipf: f64,
    pub requests: usize,
    /// Requests per second; none if all came at once.
    pub rate: Option<f64>,
    pub requests_per_s: f64,
    pub tokens_per_s: f64,
    pub first_token_p50_ms: f64,
    pub first_token_p99_ms: f64,
    pub between_tokens_p50_ms: f64,
    pub between_tokens_p99_ms: f64,
    /// Copies of adapters to the device.
    pub loads: f64,
}

/// The time to the first token of a prompt for an adapter that is on the device, in host memory, or in its source alone.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct FirstToken {
    pub model: String,
    pub rank: usize,
    /// The adapter's factors.
    pub bytes: usize,
    /// Tokens.
    pub prompt: usize,
    /// Sequences of another adapter that run.
    pub beside: u64,
    pub runs: usize,
    pub device_p50_ms: f64,
    pub host_p50_ms: f64,
    pub source_p50_ms: f64,
}

impl Record {
    /// Adds a run to the record in a file, or begins one.
    pub fn add(path: &Path, run: Run) -> Result<()> {
        let mut record: Self = if path.exists() { results::load(path)? } else { Self::default() };
        record.runs.push(run);
        results::save(&record, path)
    }

    /// The record in a folder, if it has one.
    pub fn load(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(FILE);
        let mut record: Option<Self> = path.exists().then(|| results::load(&path)).transpose()?;
        record.iter_mut().flat_map(|record| &mut record.runs).for_each(Run::name_ranks);
        Ok(record)
    }

    /// The block of benches/README.md.
    pub fn shown(&self, path: &str) -> String {
        let tables = [
            ("Decode steps in graphs", self.step_table()),
            ("Prefills", self.prefill_table()),
            ("Between steps", self.host_table()),
            ("The server under a trace", self.trace_table()),
            ("The first token of an adapter", self.first_token_table()),
        ];
        let tables = tables.into_iter().filter(|(_, table)| !table.is_empty());
        let tables: Vec<String> = tables.map(|(name, table)| format!("**{name}**\n\n{}\n", table.markdown())).collect();
        format!("{}{}", tables.concat(), self.source(path))
    }

    fn source(&self, path: &str) -> String {
        let gpu = self.runs.first().map_or("", |run| run.meta.gpu.as_str());
        let mut commits = Vec::new();
        for commit in self.runs.iter().map(|run| run.meta.commit.as_deref().unwrap_or("unknown")) {
            if !commits.contains(&commit) {
                commits.push(commit);
            }
        }
        let of_ranks = if self.runs.iter().any(|run| run.meta.tp > 1) { " for each rank" } else { "" };
        format!("One {gpu}{of_ranks}, commit {} (`{path}/{FILE}`).\n", commits.join(", "))
    }

    /// The last figure of each key, in the order of the first ones.
    fn last<'a, F: 'a, K: PartialEq>(
        &'a self,
        of: impl Fn(&'a Run) -> &'a [F],
        key: impl Fn(&'a F) -> K,
    ) -> Vec<&'a F> {
        let mut last: Vec<&F> = Vec::new();
        for figure in self.runs.iter().flat_map(of) {
            match last.iter_mut().find(|known| key(known) == key(figure)) {
                Some(known) => *known = figure,
                None => last.push(figure),
            }
        }
        last
    }

    /// The sizes of steps: model, context and batch.
    fn sizes(&self) -> Vec<(&str, usize, usize)> {
        let size = |step: &'_ Step| (step.model.clone(), step.context, step.batch);
        let steps = self.last(|run| &run.steps, size);
        steps.into_iter().map(|step| (step.model.as_str(), step.context, step.batch)).collect()
    }

    fn step_table(&self) -> Table {
        let mut table = Table::new(&[
            "model",
            "context",
            "batch",
            "GEMM base, µs",
            "of its floor",
            "fused base, µs",
            "of its floor",
            "8 adapters, rank 16, µs",
            "over the GEMM base, %",
            "over its own base, %",
            "rank 64, µs",
            "over the GEMM base, %",
            "over its own base, %",
            "one each, rank 16, µs",
            "over the GEMM base, %",
        ]);
        for (model, context, batch) in self.sizes() {
            let of = Of { runs: &self.runs, model, context, batch };
            let mut row = vec![model.to_owned(), context.to_string(), batch.to_string()];
            for is_fused in [false, true] {
                let base = of.find(0, 0, (is_fused, false));
                row.push(base.map_or_else(String::new, |(step, _)| format!("{:.0}", step.p50_us)));
                let share = |(step, run): (&Step, &Run)| step.bytes as f64 / run.meta.read_gb_per_s / 1e3 / step.p50_us;
                row.push(base.map_or_else(String::new, |base| format!("{:.2}", share(base))));
            }
            for (adapters, rank, has_own) in
                [(ADAPTERS.min(batch), RANKS[0], true), (ADAPTERS.min(batch), RANKS[1], true), (batch, RANKS[0], false)]
            {
                let cells = of.best(adapters, rank).map(|best| {
                    let percent = |share: f64| format!("{:+.1}", 100.0 * share);
                    [
                        format!("{:.0}", best.us),
                        best.over_gemm.map_or_else(String::new, percent),
                        percent(best.over_own),
                    ]
                });
                row.extend(cells.unwrap_or_default().into_iter().take(if has_own { 3 } else { 2 }));
            }
            table.row(row);
        }
        table
    }

    fn prefill_table(&self) -> Table {
        let mut table =
            Table::new(&["model", "tokens", "sequences", "without, ms", "8 adapters, rank 16, ms", "added, %"]);
        let prefills =
            self.last(|run| &run.prefills, |prefill| (&prefill.model, prefill.tokens, prefill.adapters, prefill.rank));
        for with in prefills.iter().filter(|prefill| prefill.rank == RANKS[0]) {
            let is_base = |prefill: &&&Prefill| {
                (&prefill.model, prefill.tokens, prefill.adapters) == (&with.model, with.tokens, 0)
            };
            let Some(base) = prefills.iter().find(is_base) else { continue };
            table.row(vec![
                with.model.clone(),
                with.tokens.to_string(),
                with.sequences.to_string(),
                format!("{:.1}", base.p50_us / 1e3),
                format!("{:.1}", with.p50_us / 1e3),
                format!("{:+.1}", 100.0 * (with.p50_us / base.p50_us - 1.0)),
            ]);
        }
        table
    }

    fn host_table(&self) -> Table {
        let mut table = Table::new(&["model", "batch", "adapters", "engine", "on the host, µs", "step, µs"]);
        for host in self.last(|run| &run.host, |host| (&host.model, host.batch, host.ahead)) {
            let how = if host.ahead { "runs ahead" } else { "waits for each step" };
            table.row(vec![
                host.model.clone(),
                host.batch.to_string(),
                host.adapters.to_string(),
                how.to_owned(),
                format!("{:.0}", host.host_us),
                format!("{:.0}", host.step_us),
            ]);
        }
        table
    }

    fn trace_table(&self) -> Table {
        let mut table = Table::new(&[
            "model",
            "adapters",
            "rank",
            "requests",
            "arriving, 1/s",
            "requests/s",
            "tokens/s",
            "first token p50, ms",
            "p99, ms",
            "between tokens p50, ms",
            "p99, ms",
            "loads",
        ]);
        let key = |trace: &Trace| (trace.model.clone(), trace.adapters, trace.rank, trace.rate.map(f64::to_bits));
        for trace in self.last(|run| &run.traces, key) {
            let mut row = vec![trace.model.clone(), trace.adapters.to_string(), trace.rank.to_string()];
            row.push(trace.requests.to_string());
            row.push(trace.rate.map_or_else(|| "all at once".to_owned(), |rate| format!("{rate:.0}")));
            row.push(format!("{:.1}", trace.requests_per_s));
            row.push(format!("{:.0}", trace.tokens_per_s));
            let times = [
                trace.first_token_p50_ms,
                trace.first_token_p99_ms,
                trace.between_tokens_p50_ms,
                trace.between_tokens_p99_ms,
            ];
            row.extend(times.map(|ms| format!("{ms:.1}")));
            row.push(format!("{:.0}", trace.loads));
            table.row(row);
        }
        table
    }

    fn first_token_table(&self) -> Table {
        let mut table = Table::new(&[
            "model",
            "rank",
            "MB",
            "tokens of the prompt",
            "sequences beside it",
            "on the device, ms",
            "in host memory, ms",
            "in its directory, ms",
        ]);
        for first in self.last(|run| &run.first_tokens, |first| (&first.model, first.rank, first.beside)) {
            let mut row = vec![first.model.clone(), first.rank.to_string(), format!("{:.0}", first.bytes as f64 / 1e6)];
            row.extend([first.prompt.to_string(), first.beside.to_string()]);
            row.extend([first.device_p50_ms, first.host_p50_ms, first.source_p50_ms].map(|ms| format!("{ms:.1}")));
            table.row(row);
        }
        table
    }

    /// What adapters add to decode steps.
    pub fn plot(&self, path: &str) -> Plot {
        let mut models: Vec<&str> = Vec::new();
        for (model, ..) in self.sizes() {
            if !models.contains(&model) {
                models.push(model);
            }
        }
        let panel = |model: &str| {
            let batches = self.sizes().into_iter().filter(|size| (size.0, size.1) == (model, CONTEXT));
            let batches: Vec<usize> = batches.map(|(.., batch)| batch).collect();
            let points = |adapters: &dyn Fn(usize) -> usize, rank: usize, share: fn(&Best) -> Option<f64>| {
                let point = |&batch: &usize| {
                    let of = Of { runs: &self.runs, model, context: CONTEXT, batch };
                    Some((batch as f64, 100.0 * share(&of.best(adapters(batch), rank)?)?))
                };
                batches.iter().filter_map(point).collect::<Vec<_>>()
            };
            let few = |batch: usize| ADAPTERS.min(batch);
            let lines = [
                ("8 adapters, over the GEMM base", Kind::Ours, points(&few, RANKS[0], |best| best.over_gemm)),
                ("8 adapters, over its own base", Kind::OursFused, points(&few, RANKS[0], |best| Some(best.over_own))),
                ("rank 64, over the GEMM base", Kind::OursFirst, points(&few, RANKS[1], |best| best.over_gemm)),
                (
                    "one each, over the GEMM base",
                    Kind::OursEach,
                    points(&|batch| batch, RANKS[0], |best| best.over_gemm),
                ),
            ];
            let lines = lines.into_iter().filter(|(.., points)| !points.is_empty());
            let lines = lines.map(|(name, kind, points)| Line::new(name, kind, points)).collect();
            Panel { caption: model.to_owned(), lines }
        };
        let source = self.source(path);
        Plot {
            file: "engine.svg",
            title: format!("What adapters add to decode steps of {CONTEXT} tokens, rank {} unless named", RANKS[0]),
            axis: Axis::Overhead,
            source: source.trim_end().replace('`', ""),
            panels: models.into_iter().map(panel).filter(|panel| !panel.lines.is_empty()).collect(),
        }
    }
}

/// The steps of one size.
struct Of<'a> {
    runs: &'a [Run],
    model: &'a str,
    context: usize,
    batch: usize,
}

/// The faster of the ways to run a step with adapters.
struct Best {
    us: f64,
    /// Its part above the time without adapters on cuBLASLt's GEMMs, and in its own way.
    over_gemm: Option<f64>,
    over_own: f64,
}

impl<'a> Of<'a> {
    fn find(&self, adapters: usize, rank: usize, how: (bool, bool)) -> Option<(&'a Step, &'a Run)> {
        self.runs.iter().rev().find_map(|run| Some((self.in_run(run, adapters, rank, how)?, run)))
    }

    fn in_run(&self, run: &'a Run, adapters: usize, rank: usize, how: (bool, bool)) -> Option<&'a Step> {
        let is_it = |step: &&Step| {
            (step.model.as_str(), step.context, step.batch) == (self.model, self.context, self.batch)
                && (step.adapters, step.rank, (step.fused, step.stacked)) == (adapters, rank, how)
        };
        run.steps.iter().rfind(is_it)
    }

    /// The fastest way, over the steps without adapters of the same run.
    fn best(&self, adapters: usize, rank: usize) -> Option<Best> {
        let ways = [(false, false), (true, false), (false, true)].into_iter().filter_map(|how| {
            let (step, run) = self.find(adapters, rank, how)?;
            let [gemm, own] = [(false, false), how].map(|how| self.in_run(run, 0, 0, how).map(|base| base.p50_us));
            let over = |base: f64| step.p50_us / base - 1.0;
            Some(Best { us: step.p50_us, over_gemm: gemm.map(over), over_own: over(own?) })
        });
        ways.min_by(|a, b| a.us.total_cmp(&b.us))
    }
}
