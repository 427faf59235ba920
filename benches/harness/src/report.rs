//! Averages, and tables of figures.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use crate::{
    results::{Added, Chain, HostCost, Others},
    workload::{Suite, Workload},
};

/// The median.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        len if len.is_multiple_of(2) => (values[middle - 1] + values[middle]) / 2.0,
        _ => values[middle],
    }
}

/// The smallest of the sorted values that `percent` of them do not exceed.
///
/// # Panics
/// If there are none.
pub fn percentile<T: Copy>(sorted: &[T], percent: usize) -> T {
    sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1]
}

pub fn geometric_mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (mut logs, mut count) = (0.0, 0.0);
    for value in values {
        logs += value.ln();
        count += 1.0;
    }
    f64::exp(logs / count)
}

/// Figures by class. Classes keep the order in which they were added.
#[derive(Debug, Default)]
pub struct Classes(Vec<Class>);

#[derive(Debug)]
struct Class {
    name: String,
    suite: Suite,
    figures: Vec<Figures>,
}

/// The figures of one workload, in µs.
#[derive(Clone, Debug)]
pub struct Figures {
    pub id: String,
    pub us: f64,
    pub floor_us: f64,
    /// With fused activation and combine, if measured.
    pub fused_us: Option<f64>,
    /// Of deltas that are written instead of added, if measured.
    pub write_us: Option<f64>,
    /// The fastest other library, if measured.
    pub fastest: Option<(String, f64)>,
    /// The fastest other library that only writes deltas, if measured.
    pub deltas: Option<(String, f64)>,
}

/// A kind of other library, and our time for the same work. Records without times of writing deltas have that of adding
/// them.
type Other = fn(&Figures) -> Option<(&(String, f64), f64)>;

const FASTEST: Other = |figures| Some((figures.fastest.as_ref()?, figures.us));
const DELTAS: Other = |figures| Some((figures.deltas.as_ref()?, figures.write_us.unwrap_or(figures.us)));

/// A time that some workloads have besides, and its column.
type Part = fn(&Figures) -> Option<f64>;

const PARTS: [(&str, Part); 2] = [
    ("with activation and combine, µs", |figures| figures.fused_us),
    ("writing deltas, µs", |figures| figures.write_us),
];

impl Classes {
    pub fn add(&mut self, suite: Suite, class: String, figures: Figures) {
        match self.0.iter_mut().find(|known| known.name == class) {
            Some(known) => known.figures.push(figures),
            None => self.0.push(Class { name: class, suite, figures: vec![figures] }),
        }
    }

    /// Geometric means: one row per class, and one over all workloads of `benches/workloads.json`.
    pub fn table(&self) -> Table {
        let any = |of: Other| self.0.iter().any(|class| class.figures.iter().any(|figures| of(figures).is_some()));
        let (compared, deltas) = (any(FASTEST), any(DELTAS));
        let has = |of: Part| self.0.iter().any(|class| class.figures.iter().any(|figures| of(figures).is_some()));
        let parts = PARTS.into_iter().filter(|part| has(part.1));
        let mut header = vec!["class", "n", "µs", "floor, µs", "times the floor"];
        header.extend(parts.clone().map(|part| part.0));
        if compared {
            header.extend(["fastest other, µs", "other/ours", "worst", "at", "fastest others"]);
        }
        if deltas {
            header.extend(["deltas only, µs", "deltas only/ours", "worst", "at"]);
        }
        let mut table = Table::new(&header);
        let common = self.0.iter().filter(|class| class.suite.is_in_list());
        let all: Vec<Figures> = common.flat_map(|class| &class.figures).cloned().collect();
        let rows = self.0.iter().map(|class| (class.name.as_str(), &class.figures));
        for (class, figures) in rows.chain([("all of workloads.json", &all)]).filter(|row| !row.1.is_empty()) {
            let mean = |of: fn(&Figures) -> f64| geometric_mean(figures.iter().map(of));
            let (us, floor_us) = (mean(|figures| figures.us), mean(|figures| figures.floor_us));
            let mut row = vec![class.to_owned(), figures.len().to_string()];
            row.extend([us, floor_us, us / floor_us].map(|value| format!("{value:.2}")));
            for (_, of) in parts.clone() {
                let us: Vec<f64> = figures.iter().filter_map(of).collect();
                row.push(if us.is_empty() { String::new() } else { format!("{:.2}", geometric_mean(us)) });
            }
            if compared {
                row.extend(against(figures, FASTEST));
            }
            if deltas {
                row.extend(against(figures, DELTAS).into_iter().take(4));
            }
            table.row(row);
        }
        table
    }
}

/// A class's cells about other libraries.
fn against(figures: &[Figures], other: Other) -> [String; 5] {
    let ratio = |figures: &Figures| other(figures).map(|((_, us), ours)| us / ours);
    let ratios = || figures.iter().filter_map(|figures| Some((ratio(figures)?, figures.id.as_str())));
    let Some((worst, id)) = ratios().min_by(|a, b| a.0.total_cmp(&b.0)) else { return Default::default() };
    let fastest = || figures.iter().filter_map(|figures| Some(other(figures)?.0));
    let us = geometric_mean(fastest().map(|(_, us)| *us));
    let ratio = geometric_mean(ratios().map(|(ratio, _)| ratio));
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    fastest().for_each(|(name, _)| *counts.entry(name).or_default() += 1);
    let mut names: Vec<_> = counts.into_iter().collect();
    names.sort_by_key(|&(_, count)| Reverse(count));
    let names: Vec<String> = names.into_iter().map(|(name, count)| format!("{name} {count}")).collect();
    [format!("{us:.2}"), format!("{ratio:.2}"), format!("{worst:.2}"), id.to_owned(), names.join(", ")]
}

/// What LoRA adds to layers, one row each. A figure of another library is bold if it is less than all of ours.
pub fn added(layers: &[(&Workload, &Added)], others: &Others) -> Table {
    let modes: BTreeSet<&str> =
        layers.iter().flat_map(|(_, added)| added.added_us.keys()).map(String::as_str).collect();
    let columns: Vec<[String; 2]> = modes.iter().map(|mode| [format!("{mode}, µs"), format!("{mode}, %")]).collect();
    let mut columns: Vec<&str> = columns.iter().flatten().map(String::as_str).collect();
    let is_compared = layers.iter().any(|(workload, _)| others.least_added(workload).is_some());
    if is_compared {
        columns.extend(["fastest other, µs", "which"]);
    }
    let mut table = Table::new(&[&["layer", "T", "rank", "GEMM, µs"], columns.as_slice()].concat());
    for (workload, Added { gemm_us, added_us, .. }) in layers {
        let mut row = vec![
            format!("{} {}", workload.model, workload.layer),
            workload.num_tokens().to_string(),
            workload.max_rank().to_string(),
            format!("{gemm_us:.1}"),
        ];
        for mode in &modes {
            row.extend(match added_us.get(*mode) {
                Some(us) => [format!("{us:+.1}"), format!("{:+.1}", 100.0 * us / gemm_us)],
                None => Default::default(),
            });
        }
        if is_compared {
            row.extend(match others.least_added(workload) {
                Some((name, us)) if added_us.values().all(|ours| us < *ours) => {
                    [format!("**{us:+.1}**"), name.to_owned()]
                }
                Some((name, us)) => [format!("{us:+.1}"), name.to_owned()],
                None => Default::default(),
            });
        }
        table.row(row);
    }
    table
}

/// Chains of decoder layers, one row each: the time of the GEMMs alone, and that of each arrangement over it.
pub fn chain(chains: &[Chain]) -> Table {
    let modes: BTreeSet<&str> = chains.iter().flat_map(|chain| chain.us.keys()).map(String::as_str).collect();
    let mut table = Table::new(
        &[&["model", "T", "adapters", "rank", "GEMMs, µs"], &*Vec::from_iter(modes.iter().copied())].concat(),
    );
    for Chain { model, rank, tokens, adapters, gemms_us, us } in chains {
        let mut row = vec![model.clone(), tokens.to_string(), adapters.to_string(), rank.to_string()];
        row.push(format!("{gemms_us:.1}"));
        row.extend(
            modes.iter().map(|mode| us.get(*mode).map_or_else(String::new, |us| format!("{:.3}", us / gemms_us))),
        );
        table.row(row);
    }
    table
}

/// The costs of layers on the host, one row each, and a row of targets.
pub fn host(layers: &[(&Workload, &HostCost)]) -> Table {
    let mut table = Table::new(&["layer", "T", "plan, µs", "operands, µs", "add_delta, µs"]);
    for (workload, HostCost { plan_us, operands_us, add_delta_us, .. }) in layers {
        let mut row = vec![format!("{} {}", workload.model, workload.layer), workload.num_tokens().to_string()];
        row.extend([plan_us, operands_us, add_delta_us].map(|us| format!("{us:.2}")));
        table.row(row);
    }
    if !table.is_empty() {
        table.row(["target, at most", "", "", "2", "3"].map(str::to_owned).to_vec());
    }
    table
}

/// Rows of cells. The first row has the headings.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(header: &[&str]) -> Self {
        Self { rows: vec![header.iter().map(|&word| word.to_owned()).collect()] }
    }

    /// Whether it has only headings.
    pub fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    pub fn row(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    pub fn markdown(&self) -> String {
        let mut lines: Vec<String> = self.rows.iter().map(|row| format!("| {} |\n", row.join(" | "))).collect();
        lines.insert(1, format!("|{}\n", "---|".repeat(self.rows[0].len())));
        lines.concat()
    }
}

impl fmt::Display for Table {
    /// Aligns the columns.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.rows[0].len()).map(width).collect();
        for row in &self.rows {
            write!(f, "{:<1$}", row[0], widths[0])?;
            row.iter().zip(&widths).skip(1).try_for_each(|(word, width)| write!(f, "{word:>0$}", width + 2))?;
            writeln!(f)?;
        }
        Ok(())
    }
}
