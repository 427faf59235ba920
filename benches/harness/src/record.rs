//! The files in `benches/record`: a folder for each GPU, with our figures and those of the fastest other libraries.

use std::{
    collections::{BTreeSet, HashMap},
    path::{Path, PathBuf},
};

use crate::{
    Result,
    report::{self, Classes, Figures, Table, geometric_mean},
    results::{self, Added, Entry, HostCost, Others, OthersFile, PEER, Results},
    selection::{Chosen, Subject},
    workload::{Suite, Workload},
};

/// Folders of records, the one that documents show first.
pub const FOLDERS: [&str; 2] = ["h200", "h100"];
/// Our figures in a folder.
const OURS: [&str; 3] = ["linear.json", "moe.json", "layer.json"];
/// The figures of other libraries in it.
const OTHERS: &str = "others.json";
/// Figures of chosen other kernels, fastest or not, and ours of the same call.
const KERNELS: &str = "kernels.json";

/// One folder.
pub struct Record {
    /// Its path in the repository.
    pub path: String,
    pub linear: Results,
    pub moe: Results,
    /// Layers with their base GEMM.
    pub layer: Results,
    pub others: Others,
    /// Chosen other kernels beside ours, if measured.
    pub kernels: Option<OthersFile>,
}

impl Record {
    /// The record of the repository `root` that documents show: of the newest GPU that has one.
    pub fn newest(root: &Path) -> Result<Self> {
        let folder = FOLDERS.iter().find(|folder| root.join("benches/record").join(folder).exists());
        Self::load(root, folder.ok_or("benches/record has no record")?)
    }

    /// The record in a folder of `benches/record`.
    pub fn load(root: &Path, folder: &str) -> Result<Self> {
        let path = path(folder);
        let [linear, moe, layer] = OURS.map(|file| root.join(&path).join(file));
        Ok(Self {
            linear: Results::load(&linear)?,
            moe: Results::load(&moe)?,
            layer: Results::load(&layer)?,
            others: Others::load(&[root.join(&path).join(OTHERS)])?,
            kernels: Some(root.join(&path).join(KERNELS))
                .filter(|file| file.exists())
                .map(|file| results::load(&file))
                .transpose()?,
            path,
        })
    }

    /// The figures of linear layers and embeddings, then of experts.
    pub fn figures<'a>(&self, chosen: &'a Chosen) -> Vec<(Subject<'a>, Figures)> {
        let linear = figures(&self.linear, &self.linear.dense, chosen, &self.others);
        [linear, figures(&self.moe, &self.moe.moe, chosen, &self.others)].concat()
    }

    /// What LoRA adds to layers.
    pub fn added<'a>(&'a self, chosen: &'a Chosen) -> Vec<(&'a Workload, &'a Added)> {
        added(&self.layer, chosen)
    }
}

/// The path of a folder in the repository.
pub fn path(folder: &str) -> String {
    format!("benches/record/{folder}")
}

/// The repository that this was built in.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

impl Results {
    /// The rate that floors are computed with, in GB/s.
    pub fn rate(&self) -> Result<f64> {
        let rate = |name: &str| self.ceilings.get(name).copied().ok_or_else(|| format!("the results lack {name}"));
        Ok(rate("hbm_read_GBps")?.max(rate("hbm_copy_GBps")?))
    }
}

/// The measured ones of the chosen workloads among `entries`.
fn figures<'a>(
    results: &Results,
    entries: &[Entry],
    chosen: &'a Chosen,
    others: &Others,
) -> Vec<(Subject<'a>, Figures)> {
    let by_id: HashMap<&str, Subject<'a>> = chosen.subjects().map(|subject| (subject.id(), subject)).collect();
    let Ok(rate) = results.rate() else { return Vec::new() };
    let figures = |Entry { id, cold_us, fused_us, write_us, .. }: &Entry| {
        let (us, subject) = ((*cold_us)?, *by_id.get(id.as_str())?);
        let (fastest, deltas) = (others.fastest(id), others.fastest_of_deltas(id));
        let bytes = results.info.get(id).map_or_else(|| subject.bytes(), |info| info.bytes);
        let (id, floor_us) = (id.clone(), bytes.floor_us(rate));
        Some((subject, Figures { id, us, floor_us, fused_us: *fused_us, write_us: *write_us, fastest, deltas }))
    };
    entries.iter().filter_map(figures).collect()
}

fn added<'a>(results: &'a Results, chosen: &'a Chosen) -> Vec<(&'a Workload, &'a Added)> {
    let layer = |id: &str| chosen.layers.iter().find(|workload| workload.id == id);
    results.layer.iter().filter_map(|added| Some((layer(&added.id)?, added))).collect()
}

/// The table of figures by class.
pub fn classes(figures: Vec<(Subject<'_>, Figures)>) -> Table {
    let mut classes = Classes::default();
    for (subject, figures) in figures {
        classes.add(subject.suite(), subject.class(), figures);
    }
    classes.table()
}

/// Our kernels and others of one call, by kind, tokens, adapters and rank: geometric means over the layers. A library
/// that only writes deltas is compared with our time of writing them.
pub fn kernels(entries: &[Entry], chosen: &Chosen) -> Table {
    let others: BTreeSet<&str> =
        entries.iter().map(|entry| entry.peer.as_str()).filter(|peer| results::is_other(peer)).collect();
    let by_id: HashMap<(&str, &str), &Entry> =
        entries.iter().map(|entry| ((entry.id.as_str(), entry.peer.as_str()), entry)).collect();
    let mut rows: Vec<([String; 4], Vec<&Entry>)> = Vec::new();
    for subject in chosen.subjects() {
        let Some(&ours) = by_id.get(&(subject.id(), PEER)) else { continue };
        let kind = match subject {
            Subject::Layer(workload) if workload.suite == Suite::Prefill => "prefill",
            Subject::Layer(_) => "decode",
            Subject::Experts(workload) => &workload.tag,
        };
        let [tokens, adapters, rank] =
            [subject.num_tokens(), subject.num_slots(), subject.max_rank()].map(|number| number.to_string());
        let key = [kind.to_owned(), tokens, adapters, rank];
        match rows.iter_mut().find(|(known, _)| *known == key) {
            Some((_, of)) => of.push(ours),
            None => rows.push((key, vec![ours])),
        }
    }
    let writes = entries.iter().any(|entry| entry.write_us.is_some());
    let mut header = ["workload", "tokens", "adapters", "rank", "aril, µs"].map(str::to_owned).to_vec();
    header.extend(writes.then(|| "aril, writing deltas, µs".to_owned()));
    header.extend(others.iter().flat_map(|other| [format!("{other}, µs"), format!("{other}/ours")]));
    let mut table = Table::new(&header.iter().map(String::as_str).collect::<Vec<_>>());
    let cell = |us: Vec<f64>, digits: usize| match us.len() {
        0 => String::new(),
        _ => format!("{:.digits$}", geometric_mean(us)),
    };
    for (key, ours) in rows {
        let mut row = key.to_vec();
        row.push(cell(ours.iter().filter_map(|entry| entry.cold_us).collect(), 1));
        row.extend(writes.then(|| cell(ours.iter().filter_map(|entry| entry.write_us).collect(), 1)));
        for other in &others {
            let pairs = ours.iter().filter_map(|entry| {
                let us = by_id.get(&(entry.id.as_str(), *other))?.cold_us?;
                let written = entry.write_us.filter(|_| results::is_deltas_only(other));
                Some((us, us / written.or(entry.cold_us)?))
            });
            let (us, ratios): (Vec<f64>, Vec<f64>) = pairs.unzip();
            row.extend([cell(us, 1), cell(ratios, 1)]);
        }
        table.row(row);
    }
    table
}

/// What layers cost the host.
pub fn host(results: &Results, chosen: &Chosen) -> Table {
    let layer = |id: &str| chosen.layers.iter().find(|workload| workload.id == id);
    let host: Vec<(&Workload, &HostCost)> =
        results.host.iter().filter_map(|cost| Some((layer(&cost.id)?, cost))).collect();
    report::host(&host)
}

/// Every table of one file of results that has a row.
pub fn tables(results: &Results, chosen: &Chosen, others: &Others) -> Vec<Table> {
    let of = |entries| classes(figures(results, entries, chosen, others));
    let tables = [
        of(&results.dense),
        of(&results.moe),
        report::added(&added(results, chosen), others),
        report::chain(&results.chain),
        host(results, chosen),
    ];
    tables.into_iter().filter(|table| !table.is_empty()).collect()
}
