use super::{
    FILE, Record, Run,
    figures::{Kind, RATES},
};
use crate::{
    plots::{self, Axis, Line, Panel, Plot},
    report::Table,
};

/// Rates of the document's table.
const SHOWN: [f64; 3] = [16.0, 24.0, 32.0];

/// A row for each run.
pub fn table<'a>(runs: impl IntoIterator<Item = &'a Run>) -> Table {
    let header = [
        "adapters",
        "requests/s",
        "policy",
        "hit rate, %",
        "stalled, %",
        "first token p50, ms",
        "p99, ms",
        "last token p50, ms",
        "p99, ms",
        "tokens/s",
    ];
    let mut table = Table::new(&header);
    for Run { trace, policy, figures } in runs {
        let percent = |share: f64| format!("{:.1}", 100.0 * share);
        let whole = |value: f64| format!("{value:.0}");
        table.row(vec![
            trace.adapters.to_string(),
            trace.rate.map_or_else(|| "all at once".to_owned(), whole),
            policy.name().to_owned(),
            percent(figures.hit_rate),
            percent(figures.stalled),
            whole(figures.first_token_p50_ms),
            whole(figures.first_token_p99_ms),
            whole(figures.last_token_p50_ms),
            whole(figures.last_token_p99_ms),
            whole(figures.tokens_per_s),
        ]);
    }
    table
}

/// The block of benches/README.md.
pub fn shown(record: &Record) -> String {
    let is_shown = |run: &&Run| run.trace.rate.is_none_or(|rate| SHOWN.contains(&rate));
    format!("{}\nSimulated (`{FILE}`).\n", table(record.runs.iter().filter(is_shown)).markdown())
}

/// The time to the first token against the rate of requests.
pub fn plot(record: &Record) -> Plot {
    let mut numbers: Vec<u32> = record.runs.iter().map(|run| run.trace.adapters).collect();
    numbers.dedup();
    let requests = record.runs.first().map_or(0, |run| run.trace.requests);
    let panel = |adapters: u32| {
        let line = |policy: Kind| {
            let of_policy = record.runs.iter().filter(|run| run.trace.adapters == adapters && run.policy == policy);
            let points = of_policy.filter_map(|run| Some((run.trace.rate?, run.figures.first_token_p99_ms)));
            Line::new(policy.name(), color(policy), points.collect())
        };
        Panel { caption: format!("{adapters} adapters"), lines: Kind::ALL.map(line).into() }
    };
    Plot {
        file: "serving.svg",
        title: format!("Time to the first token, p99, of {requests} requests for adapters by Zipf's law"),
        source: format!("simulated, {} to {} requests/s, {FILE}", RATES[0], RATES[RATES.len() - 1]),
        axis: Axis::Latency,
        panels: numbers.into_iter().map(panel).collect(),
    }
}

fn color(policy: Kind) -> plots::Kind {
    match policy {
        Kind::Aril => plots::Kind::Ours,
        Kind::Fifo => plots::Kind::Floor,
        Kind::Vllm => plots::Kind::Other,
        Kind::Slora => plots::Kind::OtherPolicy,
        Kind::SloraClustered => plots::Kind::OtherVariant,
    }
}
