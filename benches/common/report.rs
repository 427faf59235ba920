//! Averages and the table of them.

use std::{collections::BTreeMap, fmt};

/// The middle one, or the mean of the two in the middle.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        len if len.is_multiple_of(2) => (values[middle - 1] + values[middle]) / 2.0,
        _ => values[middle],
    }
}

pub fn geometric_mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (mut logs, mut count) = (0.0, 0.0);
    for value in values {
        logs += value.ln();
        count += 1.0;
    }
    f64::exp(logs / count)
}

/// Figures by class.
#[derive(Debug, Default)]
pub struct Table {
    classes: BTreeMap<String, Vec<Figures>>,
}

/// Those of one workload, in µs.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    pub us: f64,
    pub floor_us: f64,
    /// The fastest of others, where there are figures of others.
    pub peer_us: Option<f64>,
}

impl Table {
    pub fn add(&mut self, class: String, figures: Figures) {
        self.classes.entry(class).or_default().push(figures);
    }
}

impl fmt::Display for Table {
    /// Geometric means.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = ["n", "us", "floor us", "us/floor", "best peer", "peer/us"];
        write!(f, "{:<32}", "class")?;
        header.iter().try_for_each(|column| write!(f, "{column:>10}"))?;
        writeln!(f)?;
        let all: Vec<Figures> = self.classes.values().flatten().copied().collect();
        let rows = self.classes.iter().map(|(class, figures)| (class.as_str(), figures));
        for (class, figures) in rows.chain([("all", &all)]) {
            let mean = |of: &dyn Fn(&Figures) -> f64| geometric_mean(figures.iter().map(of));
            let (us, floor_us) = (mean(&|figures| figures.us), mean(&|figures| figures.floor_us));
            write!(f, "{class:<32}{:>10}{us:>10.2}{floor_us:>10.2}{:>10.2}", figures.len(), us / floor_us)?;
            let against: Vec<(f64, f64)> = figures.iter().filter_map(|f| Some((f.peer_us?, f.us))).collect();
            if !against.is_empty() {
                let peer_us = geometric_mean(against.iter().map(|pair| pair.0));
                let times = geometric_mean(against.iter().map(|pair| pair.0 / pair.1));
                write!(f, "{peer_us:>10.2}{times:>10.2}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
