//! What is measured, in the schema that all libraries' results have.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::Path,
};

use serde::{Deserialize, Serialize};

use super::{Result, workload::Bytes};

/// The name that our results have among those of others.
pub const PEER: &str = "aril";

/// Those that only write deltas, and leave it to other kernels to add them.
const DELTAS_ONLY: [&str; 1] = ["sglang_v2_moe"];

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
    pub host: Vec<HostCost>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
pub struct Meta {
    pub gpu: String,
    pub aril: String,
    pub replays: usize,
    pub cold_bytes: usize,
    pub seconds: f64,
    pub not_reached: Vec<String>,
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
    /// Of experts, what is before the activation, with the grouping of the routes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gate_up_us: Option<f64>,
    /// Of experts, with the activation and the combine, which take the place of the base's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fused_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

#[derive(Debug, Deserialize, Serialize)]
pub struct Info {
    #[serde(flatten)]
    pub bytes: Bytes,
    pub flops: usize,
    pub sets: usize,
    /// Of experts: how many choices of the router take turns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topk_reps: Option<usize>,
}

/// What LoRA adds to a layer's matrix multiplication, by how they go together.
#[derive(Debug, Deserialize, Serialize)]
pub struct Added {
    pub id: String,
    pub gemm_us: f64,
    pub added_us: BTreeMap<String, f64>,
}

/// What a layer costs the host, in µs: to plan it, and for each call to check the operands, and with that to launch.
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
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    }

    /// Never leaves half a file.
    pub fn save(&self, path: &Path) -> Result<()> {
        let part = path.with_extension("part");
        fs::write(&part, serde_json::to_vec(self)?)?;
        Ok(fs::rename(part, path)?)
    }

    pub fn fail(&mut self, id: &str, kind: &str, msg: String) {
        println!("{kind}: {id}: {msg}");
        self.failures.push(Failure { id: id.to_owned(), peer: PEER.to_owned(), kind: kind.to_owned(), msg });
    }
}

/// What others take, in µs: by workload, then by library.
#[derive(Debug, Default)]
pub struct Others(HashMap<String, BTreeMap<String, f64>>);

impl Others {
    /// From files of results. What several of them have is taken from the first.
    pub fn load(paths: &[impl AsRef<Path>]) -> Result<Self> {
        #[derive(Deserialize)]
        struct File {
            dense: Vec<Entry>,
            #[serde(default)]
            moe: Vec<Entry>,
        }
        let mut others = Self::default();
        for path in paths {
            let file: File = serde_json::from_slice(&fs::read(path)?)?;
            others.add(file.dense);
            others.add(file.moe);
        }
        Ok(others)
    }

    /// Keeps what is there already. Loops over a framework's operations are no library, and we are none of the others.
    pub fn add(&mut self, entries: Vec<Entry>) {
        for Entry { id, peer, cold_us, .. } in entries {
            let Some(us) = cold_us else { continue };
            if !peer.starts_with("torch_") && peer != PEER {
                self.0.entry(id).or_default().entry(peer).or_insert(us);
            }
        }
    }

    /// The fastest that does what we do, and what it takes.
    pub fn fastest(&self, id: &str) -> Option<(String, f64)> {
        self.fastest_of(id, |name| !DELTAS_ONLY.contains(&name))
    }

    /// The fastest of those that do less: they only write deltas.
    pub fn fastest_of_deltas(&self, id: &str) -> Option<(String, f64)> {
        self.fastest_of(id, |name| DELTAS_ONLY.contains(&name))
    }

    fn fastest_of(&self, id: &str, counts: impl Fn(&str) -> bool) -> Option<(String, f64)> {
        let others = self.0.get(id)?.iter().filter(|(name, _)| counts(name));
        others.map(|(name, &us)| (name.clone(), us)).min_by(|a, b| a.1.total_cmp(&b.1))
    }
}
