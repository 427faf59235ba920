//! The files in `benches/record`: a folder for each GPU, with our figures and those of the fastest other libraries.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use crate::{
    Result,
    report::{self, Classes, Figures, Table},
    results::{Added, Entry, HostCost, Others, Results},
    selection::{Chosen, Subject},
    workload::Workload,
};

/// Folders of records, the one that documents show first.
pub const FOLDERS: [&str; 2] = ["h200", "h100"];
/// Our figures in a folder.
const OURS: [&str; 3] = ["linear.json", "moe.json", "layer.json"];
/// The figures of other libraries in it.
const OTHERS: &str = "others.json";

/// One folder.
pub struct Record {
    /// Its path in the repository.
    pub path: String,
    pub linear: Results,
    pub moe: Results,
    /// Layers with their base GEMM.
    pub layer: Results,
    pub others: Others,
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
pub fn classes(figures: Vec<(Subject<'_>, Figures)>, by_layer: bool) -> Table {
    let mut classes = Classes::default();
    for (subject, figures) in figures {
        classes.add(subject.suite(), subject.class(by_layer), figures);
    }
    classes.table()
}

/// What layers cost the host.
pub fn host(results: &Results, chosen: &Chosen) -> Table {
    let layer = |id: &str| chosen.layers.iter().find(|workload| workload.id == id);
    let host: Vec<(&Workload, &HostCost)> =
        results.host.iter().filter_map(|cost| Some((layer(&cost.id)?, cost))).collect();
    report::host(&host)
}

/// Every table of one file of results that has a row.
pub fn tables(results: &Results, chosen: &Chosen, others: &Others, by_layer: bool) -> Vec<Table> {
    let of = |entries| classes(figures(results, entries, chosen, others), by_layer);
    let tables = [
        of(&results.dense),
        of(&results.moe),
        report::added(&added(results, chosen), others),
        report::chain(&results.chain),
        host(results, chosen),
    ];
    tables.into_iter().filter(|table| !table.is_empty()).collect()
}
