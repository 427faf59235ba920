//! The workloads of linear layers and embeddings. `benches/workloads.json` lists those that every library is measured
//! on; [`own`](crate::own) has those that only aril is measured on.

use std::collections::{BTreeMap, BTreeSet};

use aril::{
    model::{EmbeddingId, Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::Capacity,
};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::Result;

/// The committed list.
pub const BUILT_IN: &str = include_str!("../../workloads.json");

/// A graph uses so many sets of adapters in turn that their active bytes exceed this. No L2 cache is half as large.
pub const COLD_BYTES: usize = 128 << 20;

/// The least time of a launch, in µs: the lower bound of every floor.
pub const LAUNCH_US: f64 = 0.9;

/// The bytes of an element.
const BF16: usize = 2;

/// One layer, its tokens and their adapters.
#[derive(Clone, Debug)]
pub struct Workload {
    pub id: String,
    pub suite: Suite,
    pub tag: String,
    pub model: String,
    pub layer: String,
    pub operation: Operation,
    /// For an embedding, the rows of its vocabulary.
    pub in_features: usize,
    pub out_slices: Vec<usize>,
    /// The ranks of all resident adapters, in use or not, by slot.
    pub ranks: Vec<usize>,
    /// By token: the number of the slot, or -1.
    pub slots: Vec<i32>,
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, ValueEnum)]
pub enum Suite {
    Decode,
    Prefill,
    /// Linear layers and embeddings that only aril is measured on.
    Own,
    /// What LoRA adds to the GEMM of its base layer.
    Layer,
    /// What a layer costs the host.
    Host,
    /// Experts.
    Moe,
    /// Experts that only aril is measured on.
    MoeOwn,
}

impl Suite {
    /// Whether other libraries are measured on it: the suites of `benches/workloads.json`.
    pub fn is_in_list(self) -> bool {
        matches!(self, Self::Decode | Self::Prefill | Self::Moe)
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Operation {
    Embedding,
    Linear,
}

/// The bytes that any implementation must move: the factors of each adapter in use once, and x and y of each token with
/// an adapter. An embedding reads one row of A and one id per token.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Bytes {
    #[serde(rename = "w_bytes")]
    pub weights: usize,
    #[serde(rename = "x_bytes")]
    pub x: usize,
    /// Read and written; with the base GEMM only written.
    #[serde(rename = "y_bytes")]
    pub y: usize,
}

impl Bytes {
    pub fn total(self) -> usize {
        self.weights + self.x + self.y
    }

    /// The time to move them at a rate, in µs, and at least [`LAUNCH_US`].
    pub fn floor_us(self, gigabytes_per_second: f64) -> f64 {
        (self.total() as f64 / gigabytes_per_second / 1e3).max(LAUNCH_US)
    }
}

impl Workload {
    pub fn num_tokens(&self) -> usize {
        self.slots.len()
    }

    pub fn out_features(&self) -> usize {
        self.out_slices.iter().sum()
    }

    pub fn num_slots(&self) -> usize {
        self.ranks.len()
    }

    pub fn max_rank(&self) -> usize {
        self.ranks.iter().copied().max().unwrap_or(1)
    }

    /// Rows and columns of A and B as they lie in memory: an embedding's A has a row for each id.
    pub fn factor_shapes(&self, slot: usize, slice: usize) -> [[usize; 2]; 2] {
        let (rank, in_features) = (self.ranks[slot], self.in_features);
        let a = match self.operation {
            Operation::Embedding => [in_features, rank],
            Operation::Linear => [rank, in_features],
        };
        [a, [self.out_slices[slice], rank]]
    }

    /// The scaling of all adapters. An embedding's deltas are sums of few products, so a larger scaling keeps them
    /// above the rounding errors of `y`.
    pub fn scaling(&self) -> f32 {
        match self.operation {
            Operation::Embedding => 256.0,
            Operation::Linear => 1.0,
        }
    }

    /// A token's row of the embedding.
    pub fn token_id(&self, token: usize) -> usize {
        token * 7919 % self.in_features
    }

    pub fn bytes(&self) -> Bytes {
        const ID: usize = 4;
        let adapters: BTreeSet<usize> = self.adapted_tokens().collect();
        let ranks: usize = adapters.into_iter().map(|slot| self.ranks[slot]).sum();
        let tokens = self.adapted_tokens().count();
        let (a, x) = match self.operation {
            Operation::Embedding => (self.adapted_tokens().map(|slot| self.ranks[slot]).sum(), tokens * ID),
            Operation::Linear => (ranks * self.out_slices.len() * self.in_features, tokens * self.in_features * BF16),
        };
        let y = tokens * self.out_features() * BF16 * 2;
        Bytes { weights: (a + ranks * self.out_features()) * BF16, x, y }
    }

    /// The bytes that its base GEMM and LoRA must move together: W and the factors of each adapter in use once, x read
    /// once and y written once.
    pub fn bytes_with_base(&self) -> Bytes {
        let (tokens, outputs) = (self.num_tokens(), self.out_features());
        Bytes {
            weights: self.bytes().weights + self.in_features * outputs * BF16,
            x: tokens * self.in_features * BF16,
            y: tokens * outputs * BF16,
        }
    }

    pub fn flops(&self) -> usize {
        let shrink = match self.operation {
            Operation::Embedding => 0,
            Operation::Linear => self.out_slices.len() * self.in_features,
        };
        self.adapted_tokens().map(|slot| 2 * self.ranks[slot] * (shrink + self.out_features())).sum()
    }

    /// The class whose mean its figures enter.
    pub fn class(&self) -> String {
        let tokens = self.num_tokens();
        match self.suite {
            Suite::Own | Suite::Layer | Suite::Host | Suite::Moe | Suite::MoeOwn => self.tag.clone(),
            Suite::Prefill => format!("prefill T={tokens}"),
            Suite::Decode => {
                let size = match tokens {
                    0..=16 => "T<=16",
                    17..=64 => "T=32..64",
                    65.. => "T>=128",
                };
                let adapters =
                    if tokens > 1 && self.distribution() == "distinct" { "distinct" } else { "few adapters" };
                format!("decode {size} {adapters}")
            }
        }
    }

    /// How adapters are spread over the tokens: the last part of the id.
    pub fn distribution(&self) -> &str {
        self.id.rsplit('/').next().unwrap_or_default()
    }

    /// A model of this linear layer alone.
    pub fn linear_model(&self) -> Result<(Model, LinearId)> {
        let mut spec = ModelSpec::new();
        let layer = Linear::new("", Parallel::Replicated, self.in_features);
        let slices = self.out_slices.iter().enumerate();
        let id = spec.linear(slices.fold(layer, |layer, (i, &out)| layer.slice(format!("slice{i}"), out)))?;
        Ok((spec.shard(TpRank::SINGLE)?, id))
    }

    /// A model of this embedding alone.
    pub fn embedding_model(&self) -> Result<(Model, EmbeddingId)> {
        let mut spec = ModelSpec::new();
        let id = spec.embedding("slice0", self.in_features, self.out_features())?;
        Ok((spec.shard(TpRank::SINGLE)?, id))
    }

    /// The tightest bounds on its batch.
    pub fn capacity(&self) -> Capacity {
        Capacity::tokens(self.num_tokens()).slots(self.num_slots()).rank(self.max_rank())
    }

    /// The slots of the tokens with an adapter.
    fn adapted_tokens(&self) -> impl Iterator<Item = usize> {
        self.slots.iter().filter_map(|&slot| usize::try_from(slot).ok())
    }
}

/// Reads the linear layers of a list in the format of `benches/workloads.json`.
pub fn parse(text: &str) -> Result<Vec<Workload>> {
    let file: File = serde_json::from_str(text)?;
    let suites = [(Suite::Decode, file.dense_decode), (Suite::Prefill, file.dense_prefill)];
    let entries = suites.into_iter().flat_map(|(suite, entries)| entries.into_iter().map(move |entry| (suite, entry)));
    entries.map(|(suite, entry)| entry.resolve(suite, &file.mappings)).collect()
}

/// Keeps rank 16 and a few batch sizes of each layer.
pub fn quick(mut workloads: Vec<Workload>) -> Vec<Workload> {
    let mut seen = BTreeSet::new();
    workloads.retain(|workload| {
        let tokens = workload.num_tokens();
        let size = if [1, 16, 64, 2048].contains(&tokens) { tokens } else { 0 };
        let kind = (workload.layer.clone(), workload.suite, size);
        workload.max_rank() == 16 && size > 0 && seen.insert(kind)
    });
    workloads
}

#[derive(Deserialize)]
struct File {
    mappings: BTreeMap<String, Mapping>,
    dense_decode: Vec<Entry>,
    dense_prefill: Vec<Entry>,
}

/// How adapters are spread over tokens.
#[derive(Deserialize)]
pub struct Mapping {
    tokens: usize,
    pub adapters: usize,
    /// By token; -1 for none.
    token_adapter: Option<Vec<i32>>,
    /// An adapter and how many tokens in a row have it.
    segments: Option<Vec<(i32, usize)>>,
}

#[derive(Deserialize)]
struct Entry {
    id: String,
    tag: String,
    model: String,
    layer: String,
    in_features: usize,
    out_slices: Vec<usize>,
    rank: usize,
    tokens: usize,
    mapping: String,
}

impl Mapping {
    /// The slots of a workload's tokens.
    pub fn slots(&self, id: &str, tokens: usize) -> Result<Vec<i32>> {
        let slots: Vec<i32> = match (&self.token_adapter, &self.segments) {
            (Some(adapters), None) => adapters.clone(),
            (None, Some(segments)) => {
                segments.iter().flat_map(|&(adapter, len)| std::iter::repeat_n(adapter, len)).collect()
            }
            _ => return Err(format!("{id}: a mapping has token_adapter or segments").into()),
        };
        if slots.len() != tokens || self.tokens != tokens {
            return Err(format!("{id}: {tokens} tokens, but its mapping has {}", slots.len()).into());
        }
        if slots.iter().any(|&slot| usize::try_from(slot).is_ok_and(|slot| slot >= self.adapters)) {
            return Err(format!("{id}: its mapping names an adapter that is not there").into());
        }
        Ok(slots)
    }
}

impl Entry {
    fn resolve(self, suite: Suite, mappings: &BTreeMap<String, Mapping>) -> Result<Workload> {
        let Self { id, tag, model, layer, in_features, out_slices, rank, tokens, mapping } = self;
        let mapping = mappings.get(&mapping).ok_or_else(|| format!("{id}: there is no mapping {mapping}"))?;
        let (operation, ranks, slots) = (Operation::Linear, vec![rank; mapping.adapters], mapping.slots(&id, tokens)?);
        Ok(Workload { id, suite, tag, model, layer, operation, in_features, out_slices, ranks, slots })
    }
}
