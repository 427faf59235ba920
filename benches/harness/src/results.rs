//! Measured figures, in the JSON schema that all libraries' results have.

use std::{
    collections::{BTreeMap, HashMap},
    error::Error,
    fs,
    path::Path,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    Result,
    workload::{self, Bytes, Workload},
};

/// The name of aril among the libraries.
pub const PEER: &str = "aril";

/// Libraries that only write deltas, which other kernels add.
const DELTAS_ONLY: [&str; 2] = ["sglang_v2_moe", "flashinfer_bgmv_moe"];

#[derive(Debug, Default, Deserialize, Serialize)]
pub struct Results {
    pub meta: Meta,
    pub ceilings: BTreeMap<String, f64>,
    pub dense: Vec<Entry>,
    #[serde(default)]
    pub moe: Vec<Entry>,
    pub info: BTreeMap<String, Info>,
    pub failures: Vec<Failure>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layer: Vec<Added>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chain: Vec<Chain>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub host: Vec<HostCost>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
pub struct Meta {
    pub gpu: String,
    /// What plans ask of it, if it has no record yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    pub aril: String,
    /// The commit of the build, if its environment named one (`ARIL_COMMIT`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    pub replays: usize,
    pub cold_bytes: usize,
    pub seconds: f64,
    pub not_reached: Vec<String>,
}

impl Meta {
    pub fn commit(&self) -> &str {
        self.commit.as_deref().unwrap_or("unknown")
    }
}

#[derive(Debug, Default, Deserialize, Serialize)]
pub struct Entry {
    pub id: String,
    pub peer: String,
    pub err: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reps: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cold_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cold_min: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cold_max: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warm_us: Option<f64>,
    /// For experts, the time of the grouping and of gate_up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gate_up_us: Option<f64>,
    /// For experts, the time with fused activation and combine, which replace the base's kernels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fused_us: Option<f64>,
    /// For experts, the time of writing deltas instead of adding them, which is what some libraries do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

#[derive(Debug, Deserialize, Serialize)]
pub struct Info {
    #[serde(flatten)]
    pub bytes: Bytes,
    pub flops: usize,
    pub sets: usize,
    /// For experts, the number of choices of the router.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topk_reps: Option<usize>,
}

/// What LoRA adds to a layer's GEMM, by arrangement.
#[derive(Debug, Deserialize, Serialize)]
pub struct Added {
    pub id: String,
    pub gemm_us: f64,
    pub added_us: BTreeMap<String, f64>,
}

impl Added {
    /// What the arrangement adds that adds least, in µs. The fused linear, which replaces the GEMM, may add less than
    /// nothing.
    pub fn least_us(&self) -> Option<f64> {
        self.added_us.values().copied().min_by(f64::total_cmp)
    }
}

/// Times of the GEMMs of a decoder layer in a chain of such layers, alone and by arrangement with LoRA, in µs.
#[derive(Debug, Deserialize, Serialize)]
pub struct Chain {
    pub model: String,
    pub rank: usize,
    pub tokens: usize,
    /// Of the batch.
    pub adapters: usize,
    pub gemms_us: f64,
    pub us: BTreeMap<String, f64>,
}

/// Time on the host, in µs: to plan a layer once, to check the operands of a call, and to check and launch.
#[derive(Debug, Deserialize, Serialize)]
pub struct HostCost {
    pub id: String,
    pub plan_us: f64,
    pub operands_us: f64,
    pub add_delta_us: f64,
}

#[derive(Debug, Deserialize, Serialize)]
pub struct Failure {
    pub id: String,
    pub peer: String,
    pub kind: String,
    pub msg: String,
}

impl Results {
    pub fn load(path: &Path) -> Result<Self> {
        load(path)
    }

    pub fn save(&self, path: &Path) -> Result<()> {
        save(self, path)
    }

    pub fn fail(&mut self, id: &str, kind: &str, msg: String) {
        println!("{kind}: {id}: {msg}");
        self.failures.push(Failure { id: id.to_owned(), peer: PEER.to_owned(), kind: kind.to_owned(), msg });
    }
}

/// A file of other libraries' figures: as a runner writes it, as [`Others::reduced`] leaves it, or with ours of the
/// same call.
#[derive(Debug, Default, Deserialize, Serialize)]
pub struct OthersFile {
    pub meta: OthersMeta,
    #[serde(default)]
    pub dense: Vec<Entry>,
    #[serde(default)]
    pub moe: Vec<Entry>,
    #[serde(default)]
    pub overlap: Vec<WithBase>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct OthersMeta {
    pub gpu: String,
    #[serde(default)]
    pub torch: String,
    #[serde(default)]
    pub triton: String,
    #[serde(default)]
    pub cuda: String,
    pub cold_bytes: usize,
    pub replays: usize,
    #[serde(default)]
    pub about: String,
}

/// Times of a base layer's GEMM, alone (`base_us`) and with other libraries' LoRA (`NAME_us`), in µs.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct WithBase {
    pub id: String,
    #[serde(flatten)]
    pub times: BTreeMap<String, serde_json::Value>,
}

impl WithBase {
    /// The arrangement that adds least to the GEMM, and the µs that it adds.
    pub fn least_added(&self) -> Option<(String, f64)> {
        let us = |name: &str| self.times.get(name)?.as_f64();
        let base = us("base_us")?;
        let names = self.times.keys().filter(|name| name.ends_with("_us") && *name != "base_us");
        let added = names.filter_map(|name| Some((name.trim_end_matches("_us").to_owned(), us(name)? - base)));
        added.min_by(|a, b| a.1.total_cmp(&b.1))
    }
}

/// Figures of other libraries, in µs.
#[derive(Debug, Default)]
pub struct Others {
    /// By workload, then by library.
    times: HashMap<String, BTreeMap<String, f64>>,
    /// The arrangements that add least to a base layer's GEMM, with their workloads.
    added: Vec<(String, f64, Workload)>,
}

impl Others {
    /// Reads files of results. The first file that has a figure counts.
    pub fn load(paths: &[impl AsRef<Path>]) -> Result<Self> {
        let mut others = Self::default();
        for path in paths {
            let file: OthersFile = load(path.as_ref())?;
            others.add(file.dense);
            others.add(file.moe);
            others.add_overlap(&file.overlap)?;
        }
        Ok(others)
    }

    /// Adds figures, and keeps those that are there. Skips our own, and loops over a framework's operations.
    pub fn add(&mut self, entries: Vec<Entry>) {
        for Entry { id, peer, cold_us, .. } in entries {
            let Some(us) = cold_us else { continue };
            if is_other(&peer) {
                self.times.entry(id).or_default().entry(peer).or_insert(us);
            }
        }
    }

    /// Adds figures of layers with their GEMM, and keeps those that are there.
    pub fn add_overlap(&mut self, overlap: &[WithBase]) -> Result<()> {
        let list = workload::parse(workload::BUILT_IN)?;
        for with_base in overlap {
            let id = &with_base.id;
            let workload =
                list.iter().find(|workload| workload.id == *id).ok_or_else(|| format!("there is no {id}"))?;
            let Some((name, us)) = with_base.least_added() else { continue };
            if !self.added.iter().any(|(_, _, known)| known.id == *id) {
                self.added.push((name, us, workload.clone()));
            }
        }
        Ok(())
    }

    /// The fastest library that adds deltas to `y`, and its time.
    pub fn fastest(&self, id: &str) -> Option<(String, f64)> {
        self.fastest_of(id, |name| !is_deltas_only(name))
    }

    /// The fastest library that only writes deltas, and its time.
    pub fn fastest_of_deltas(&self, id: &str) -> Option<(String, f64)> {
        self.fastest_of(id, is_deltas_only)
    }

    /// The arrangement that adds least to a layer's GEMM for the same tokens and adapters, and the µs that it adds.
    pub fn least_added(&self, workload: &Workload) -> Option<(&str, f64)> {
        let same = |other: &&(String, f64, Workload)| {
            let Workload { model, layer, ranks, slots, .. } = &other.2;
            (model, layer, ranks, slots.len())
                == (&workload.model, &workload.layer, &workload.ranks, workload.num_tokens())
        };
        self.added.iter().find(same).map(|(name, us, _)| (name.as_str(), *us))
    }

    fn fastest_of(&self, id: &str, counts: impl Fn(&str) -> bool) -> Option<(String, f64)> {
        let others = self.times.get(id)?.iter().filter(|(name, _)| counts(name));
        others.map(|(name, &us)| (name.clone(), us)).min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Keeps the fastest library at each workload, and for experts also the fastest that only writes deltas. The first
    /// file that has a figure counts. A note marks figures that are not from the first file.
    pub fn reduced(paths: &[impl AsRef<Path>], about: &str) -> Result<OthersFile> {
        let mut reduced = OthersFile::default();
        let mut known: Vec<(usize, Entry, bool)> = Vec::new();
        for (index, path) in paths.iter().enumerate() {
            let OthersFile { meta, dense, moe, overlap } = load(path.as_ref())?;
            if index == 0 {
                reduced.meta = OthersMeta { about: about.to_owned(), ..meta };
            } else if meta.gpu != reduced.meta.gpu {
                return Err(
                    format!("{} is of a {}, not of a {}", path.as_ref().display(), meta.gpu, reduced.meta.gpu).into()
                );
            }
            let entries =
                dense.into_iter().map(|entry| (entry, false)).chain(moe.into_iter().map(|entry| (entry, true)));
            for (entry, is_moe) in entries.filter(|(entry, _)| entry.cold_us.is_some() && is_other(&entry.peer)) {
                if !known.iter().any(|(_, known, _)| (&known.id, &known.peer) == (&entry.id, &entry.peer)) {
                    known.push((index, entry, is_moe));
                }
            }
            for with_base in overlap {
                if !reduced.overlap.iter().any(|known| known.id == with_base.id) {
                    reduced.overlap.push(with_base);
                }
            }
        }
        let is_deltas = |entry: &Entry| is_deltas_only(&entry.peer);
        let mut fastest: Vec<(usize, Entry, bool)> = Vec::new();
        for (index, entry, is_moe) in known {
            let rival =
                fastest.iter_mut().find(|(_, rival, _)| rival.id == entry.id && is_deltas(rival) == is_deltas(&entry));
            match rival {
                Some(rival) if rival.1.cold_us > entry.cold_us => *rival = (index, entry, is_moe),
                Some(_) => {}
                None => fastest.push((index, entry, is_moe)),
            }
        }
        for (index, Entry { id, peer, err, cold_us, .. }, is_moe) in fastest {
            let note = (index > 0).then(|| "from an earlier run on the same GPU model".to_owned());
            let entry = Entry { id, peer, err, cold_us, note, ..Entry::default() };
            if is_moe { reduced.moe.push(entry) } else { reduced.dense.push(entry) }
        }
        Ok(reduced)
    }
}

/// Reads a file of figures.
pub(crate) fn load<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let error = |error: &dyn Error| format!("{}: {error}", path.display());
    let bytes = fs::read(path).map_err(|cause| error(&cause))?;
    Ok(serde_json::from_slice(&bytes).map_err(|cause| error(&cause))?)
}

/// Writes a file of figures, atomically.
pub fn save(figures: &impl Serialize, path: &Path) -> Result<()> {
    let part = path.with_extension("part");
    fs::write(&part, serde_json::to_vec(figures)?)?;
    Ok(fs::rename(part, path)?)
}

pub(crate) fn is_other(peer: &str) -> bool {
    !peer.starts_with("torch_") && peer != PEER
}

/// Whether a library only writes deltas.
pub(crate) fn is_deltas_only(peer: &str) -> bool {
    DELTAS_ONLY.contains(&peer)
}
