//! The layers of a model that adapters adapt.
//!
//! A [`ModelSpec`] describes the whole model once. [`ModelSpec::shard`] freezes the description as one rank runs it:
//! a [`Model`] gives every adapted module (in PEFT's sense: what `target_modules` names) a row of the descriptor table, and says which
//! part of the module's factors, and of its base weight, the rank holds. Neither knows of adapters or devices.
//!
//! ```
//! use aril::model::{Linear, ModelSpec, Parallel, TpRank};
//!
//! let mut spec = ModelSpec::new();
//! let qkv = Linear::new("model.layers.0.self_attn", Parallel::Column, 1024).heads("q_proj", 16, 128);
//! let qkv = spec.linear(qkv.kv_heads("k_proj", 2, 128).kv_heads("v_proj", 2, 128))?;
//!
//! // Rank 3 of 4: four of the heads of q, and one of k and of v, which rank 2 holds, too.
//! let model = spec.shard(TpRank::new(3, 4)?)?;
//! let [q, k, v] = model[qkv].slices() else { unreachable!() };
//! assert_eq!(q.range(), 12 * 128..16 * 128);
//! assert_eq!((k.range(), v.range()), (128..256, 128..256));
//! # Ok::<(), aril::model::SpecError>(())
//! ```
//!
//! Invariant: every entry is of one module (or of the factors that the experts of a layer share), and no two entries are of the same.

mod experts;
mod shard;
mod spec;

use std::{collections::HashMap, fmt, ops::Range, sync::Arc};

pub use experts::{Activation, Experts, ExpertsSite, Halves, ProjectionSite};
pub(crate) use experts::{ExpertModule, ExpertSlice};
pub use shard::Shard;
pub use spec::{Linear, ModelSpec, Parallel, SpecError};

use crate::ffi;

/// The most slices that one layer may fuse.
pub const MAX_SLICES: usize = ffi::ARIL_MAX_SLICES as usize;

/// The largest rank of a factor.
pub const MAX_RANK: usize = ffi::ARIL_MAX_RANK as usize;

/// This process's place in the tensor-parallel group.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TpRank {
    rank: usize,
    size: usize,
}

impl TpRank {
    /// The whole model on one device.
    pub const SINGLE: Self = Self { rank: 0, size: 1 };

    /// Rank `rank` of `size`.
    ///
    /// # Errors
    /// If `rank` is not below `size`.
    pub fn new(rank: usize, size: usize) -> Result<Self, SpecError> {
        if rank < size { Ok(Self { rank, size }) } else { Err(SpecError::TpRank { rank, size }) }
    }

    /// This process's rank, from 0.
    pub const fn rank(self) -> usize {
        self.rank
    }

    /// Ranks of the group.
    pub const fn size(self) -> usize {
        self.size
    }
}

/// Identifies a description: ids of one are not of another.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
struct SpecId(u64);

macro_rules! id {
    ($(#[$doc:meta])* $id:ident, $site:ident, $get:ident, $field:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        pub struct $id {
            spec: SpecId,
            index: usize,
        }

        impl std::ops::Index<$id> for Model {
            type Output = $site;

            /// # Panics
            /// If the id is not of this model's description.
            fn index(&self, id: $id) -> &$site {
                assert!(self.$get(id).is_some(), concat!("the ", $what, " id is of another model"));
                &self.0.$field[id.index]
            }
        }

        impl Model {
            #[doc = concat!("The ", $what, " place in the model, or none if the id is of another description.")]
            pub fn $get(&self, id: $id) -> Option<&$site> {
                if id.spec == self.0.id.spec { self.0.$field.get(id.index) } else { None }
            }
        }
    };
}

id! {
    /// Names a linear layer of a [`ModelSpec`] and of the [`Model`]s made of it.
    LinearId, LinearSite, linear, linears, "linear layer's"
}

id! {
    /// Names an embedding of a [`ModelSpec`] and of the [`Model`]s made of it.
    EmbeddingId, EmbeddingSite, embedding, embeddings, "embedding's"
}

id! {
    /// Names the experts of one layer of a [`ModelSpec`] and of the [`Model`]s made of it.
    ExpertsId, ExpertsSite, experts, expert_layers, "experts'"
}

/// A linear layer as this rank holds it.
#[derive(Clone, Debug)]
pub struct LinearSite {
    in_features: Cut,
    slices: Vec<SliceSite>,
    first_entry: usize,
}

impl LinearSite {
    /// Input features on this rank.
    pub fn in_features(&self) -> usize {
        self.in_features.len
    }

    /// The columns of the whole, unsharded base weight `[out, in]` that this rank holds.
    pub fn in_range(&self) -> Range<usize> {
        self.in_features.range()
    }

    /// Output features on this rank, over all slices.
    pub fn out_features(&self) -> usize {
        self.slices.iter().map(SliceSite::out_features).sum()
    }

    /// The slices, in the order of the output.
    pub fn slices(&self) -> &[SliceSite] {
        &self.slices
    }

    /// The descriptor-table entry of the first slice; the others follow it.
    pub fn first_entry(&self) -> usize {
        self.first_entry
    }
}

/// One module of a linear layer as this rank holds it.
#[derive(Clone, Debug)]
pub struct SliceSite {
    module: String,
    out_features: Cut,
}

impl SliceSite {
    /// The module's whole path, such as `model.layers.0.self_attn.q_proj`.
    pub fn module(&self) -> &str {
        &self.module
    }

    /// Output features on this rank.
    pub fn out_features(&self) -> usize {
        self.out_features.len
    }

    /// The rows of the module's whole, unsharded base weight `[out, in]` that this rank holds.
    pub fn range(&self) -> Range<usize> {
        self.out_features.range()
    }
}

/// An embedding as this rank holds it: the whole of it, as embeddings are looked up before the hidden state is cut.
#[derive(Clone, Debug)]
pub struct EmbeddingSite {
    module: String,
    vocab: usize,
    hidden: usize,
    entry: usize,
}

impl EmbeddingSite {
    /// The module's whole path, such as `model.embed_tokens`.
    pub fn module(&self) -> &str {
        &self.module
    }

    /// Rows of the embedding: token ids at or above it have no adapter.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Features of the embedding.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Its descriptor-table entry.
    pub fn entry(&self) -> usize {
        self.entry
    }
}

/// A contiguous range of a dimension that was `whole` long before it was cut for this rank.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Cut {
    pub(crate) whole: usize,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl Cut {
    fn all(whole: usize) -> Self {
        Self { whole, start: 0, len: whole }
    }

    fn shard(whole: usize, index: usize, shards: usize) -> Self {
        let len = whole / shards;
        Self { whole, start: index * len, len }
    }

    pub(crate) fn range(self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// Where one adapted module goes: its table entry and the parts of its factors that this rank needs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// A `[rank, input]`, B `[output, rank]`.
    Linear { entry: usize, input: Cut, output: Cut },
    /// A `[rank, vocab]`, B `[hidden, rank]`.
    Embedding { entry: usize, vocab: usize, hidden: usize },
    /// One A for all slices of this layer, their B's stacked.
    Fused(LinearId),
}

/// The adapted layers of a model, as one rank of the engine runs them: frozen, and cheap to clone and to share.
///
/// Tables, layers and images of adapters are made for a model. Those of different models are refused together; two models are the
/// same if they were made of one [`ModelSpec`], for equal [`Shard`]s, without a layer added in between.
#[derive(Clone)]
pub struct Model(Arc<Inner>);

struct Inner {
    id: ModelId,
    tp: TpRank,
    linears: Vec<LinearSite>,
    embeddings: Vec<EmbeddingSite>,
    expert_layers: Vec<ExpertsSite>,
    targets: HashMap<String, Target>,
    experts_at: HashMap<String, ExpertsId>,
}

/// Identifies a model: equal ids have equal layers in equal places, since descriptions only grow.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct ModelId {
    spec: SpecId,
    /// Which of the description's shards.
    shard: usize,
    num_entries: usize,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
            .field("tp", &self.0.tp)
            .field("linears", &self.0.linears.len())
            .field("embeddings", &self.0.embeddings.len())
            .field("experts", &self.0.expert_layers.len())
            .field("num_entries", &self.num_entries())
            .finish()
    }
}

impl PartialEq for Model {
    fn eq(&self, other: &Self) -> bool {
        self.id() == other.id()
    }
}

impl Eq for Model {}

impl Model {
    /// The tensor-parallel rank that it was cut for.
    pub fn tp(&self) -> TpRank {
        self.0.tp
    }

    /// The linear layers, in the order in which they were described.
    pub fn linears(&self) -> &[LinearSite] {
        &self.0.linears
    }

    /// The experts of layers, in the order in which they were described.
    pub fn expert_layers(&self) -> &[ExpertsSite] {
        &self.0.expert_layers
    }

    /// Rows of the descriptor table that one slot takes: one for each slice of each linear layer, one for each embedding, and those
    /// of [`ProjectionSite`] for experts.
    pub fn num_entries(&self) -> usize {
        self.0.id.num_entries
    }

    pub(crate) fn id(&self) -> ModelId {
        self.0.id
    }

    pub(crate) fn target(&self, module: &str) -> Option<Target> {
        self.0.targets.get(module).copied()
    }

    pub(crate) fn experts_at(&self, path: &str) -> Option<ExpertsId> {
        self.0.experts_at.get(path).copied()
    }

    /// The linear slices with their entries and cuts, for the layer of a fused module.
    pub(crate) fn fused(&self, id: LinearId) -> impl Iterator<Item = (usize, Cut, Cut)> {
        let site = &self[id];
        site.slices.iter().enumerate().map(|(i, slice)| (site.first_entry + i, site.in_features, slice.out_features))
    }
}
