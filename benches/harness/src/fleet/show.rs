use super::{
    Event, FILE, Figures, Record, Run, Scenario,
    figures::{Kind, RATES},
};
use crate::{
    plots::{self, Axis, Line, Panel, Plot},
    report::Table,
    serving::Hardware,
};

/// Scenarios of the document's table: replicas, requests per second of each, the exponent, and whether the page cache has the adapters.
const SHOWN: [(u32, f64, f64, bool); 6] = [
    (16, 24.0, 1.0, false),
    (16, 40.0, 1.0, false),
    (64, 24.0, 1.0, false),
    (16, 24.0, 0.8, false),
    (16, 24.0, 1.2, false),
    (16, 24.0, 1.0, true),
];
/// Policies of the plot. The others nearly coincide with one of these.
const PLOTTED: [(Kind, plots::Kind); 5] = [
    (Kind::Resident, plots::Kind::Ours),
    (Kind::Bounded, plots::Kind::OtherPolicy),
    (Kind::Consistent, plots::Kind::Other),
    (Kind::LeastLoaded, plots::Kind::OtherDeltas),
    (Kind::Random, plots::Kind::OtherVariant),
];

impl Scenario {
    /// Requests per second of each replica.
    fn rate(&self) -> f64 {
        self.trace.rate.unwrap_or(f64::INFINITY) / f64::from(self.replicas)
    }

    fn is_cached(&self) -> bool {
        self.read_us == Hardware::MEASURED.read_us
    }
}

/// Runs that differ only in their seeds.
fn groups<'a>(runs: impl IntoIterator<Item = &'a Run>) -> Vec<Vec<&'a Run>> {
    let mut groups: Vec<Vec<&Run>> = Vec::new();
    for run in runs {
        let is_same = |of: &[&Run]| {
            let mut scenario = of[0].scenario;
            scenario.trace.seed = run.scenario.trace.seed;
            scenario == run.scenario && of[0].policy == run.policy
        };
        match groups.iter_mut().find(|group| is_same(group)) {
            Some(group) => group.push(run),
            None => groups.push(vec![run]),
        }
    }
    groups
}

/// The mean of a figure.
fn mean(figures: &[&Figures], of: fn(&Figures) -> f64) -> f64 {
    figures.iter().map(|figures| of(figures)).sum::<f64>() / figures.len() as f64
}

fn percent(share: f64) -> String {
    format!("{:.1}", 100.0 * share)
}

/// A row for each scenario without an event and each policy, of means over seeds.
pub fn table<'a>(runs: impl IntoIterator<Item = &'a Run>) -> Table {
    let header = [
        "replicas",
        "requests/s of each",
        "Zipf",
        "adapters from",
        "policy",
        "on the device, %",
        "in host memory, %",
        "elsewhere, %",
        "adapters of a step",
        "stalled, %",
        "busiest over mean",
        "first token p50, ms",
        "p99, ms",
        "last token p50, ms",
        "tokens/s",
    ];
    let mut table = Table::new(&header);
    for group in groups(runs.into_iter().filter(|run| run.scenario.event.is_none())) {
        let (scenario, figures) = (&group[0].scenario, group.iter().map(|run| &run.figures).collect::<Vec<_>>());
        let mean = |of| mean(&figures, of);
        table.row(vec![
            scenario.replicas.to_string(),
            format!("{:.0}", scenario.rate()),
            format!("{:.1}", scenario.trace.zipf),
            if scenario.is_cached() { "page cache" } else { "disk" }.to_owned(),
            group[0].policy.name().to_owned(),
            percent(mean(|of| of.device)),
            percent(mean(|of| of.host)),
            percent(mean(|of| of.disk)),
            format!("{:.1}", mean(|of| of.step_adapters)),
            percent(mean(|of| of.stalled)),
            format!("{:.2}", mean(|of| of.imbalance)),
            format!("{:.0}", mean(|of| of.first_token_p50_ms)),
            format!("{:.0}", mean(|of| of.first_token_p99_ms)),
            format!("{:.0}", mean(|of| of.last_token_p50_ms)),
            format!("{:.0}", mean(|of| of.tokens_per_s)),
        ]);
    }
    table
}

/// A row for each event and each policy, of means over seeds.
pub fn events<'a>(runs: impl IntoIterator<Item = &'a Run>) -> Table {
    let header = [
        "event",
        "policy",
        "on the device before, %",
        "after, %",
        "elsewhere before, %",
        "after, %",
        "first token p50 before, ms",
        "after, ms",
        "p99 before, ms",
        "after, ms",
    ];
    let mut table = Table::new(&header);
    for group in groups(runs.into_iter().filter(|run| run.after.is_some())) {
        let before: Vec<_> = group.iter().map(|run| &run.figures).collect();
        let after: Vec<_> = group.iter().filter_map(|run| run.after.as_ref()).collect();
        let both = |of: fn(&Figures) -> f64, shown: fn(f64) -> String| {
            [&before, &after].map(|figures| shown(mean(figures, of)))
        };
        let whole = |value: f64| format!("{value:.0}");
        let mut row =
            vec![group[0].scenario.event.map_or("", Event::name).to_owned(), group[0].policy.name().to_owned()];
        row.extend(both(|of| of.device, percent));
        row.extend(both(|of| of.disk, percent));
        row.extend(both(|of| of.first_token_p50_ms, whole));
        row.extend(both(|of| of.first_token_p99_ms, whole));
        table.row(row);
    }
    table
}

/// The blocks of benches/README.md.
pub fn shown(record: &Record) -> [(&'static str, String); 2] {
    let is_shown = |of: (u32, f64, f64, bool), scenario: &Scenario| {
        (scenario.replicas, scenario.rate(), scenario.trace.zipf, scenario.is_cached()) == of
    };
    let rows = SHOWN.iter().flat_map(|of| record.runs.iter().filter(|run| is_shown(*of, &run.scenario)));
    let block = |table: Table| format!("{}\nSimulated (`{FILE}`).\n", table.markdown());
    [("fleet", block(table(rows))), ("fleet events", block(events(&record.runs)))]
}

/// The time to the first token against the rate of requests.
pub fn plot(record: &Record) -> Plot {
    let (replicas, _, zipf, is_cached) = SHOWN[0];
    let is_in = |run: &&Run| {
        let scenario = &run.scenario;
        (scenario.replicas, scenario.trace.zipf, scenario.is_cached(), scenario.event)
            == (replicas, zipf, is_cached, None)
    };
    let groups = groups(record.runs.iter().filter(is_in));
    let panel = |caption: &str, of: fn(&Figures) -> f64| {
        let lines = PLOTTED.iter().map(|(policy, kind)| {
            let of_policy = groups.iter().filter(|group| group[0].policy == *policy);
            let point = |group: &Vec<&Run>| {
                let figures: Vec<_> = group.iter().map(|run| &run.figures).collect();
                (group[0].scenario.rate(), mean(&figures, of))
            };
            Line::new(policy.name(), *kind, of_policy.map(point).collect())
        });
        Panel { caption: caption.to_owned(), lines: lines.collect() }
    };
    Plot {
        file: "fleet.svg",
        title: format!("Time to the first token on {replicas} replicas with 100,000 adapters by Zipf's law"),
        source: format!("simulated, {} to {} requests/s of each replica, {FILE}", RATES[0], RATES[RATES.len() - 1]),
        axis: Axis::Latency,
        panels: vec![panel("Median", |of| of.first_token_p50_ms), panel("99th percentile", |of| of.first_token_p99_ms)],
    }
}
