//! The model as one tensor-parallel rank runs it.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::Arc,
};

use super::{cut::TpRank, embedding::EmbeddingSite, experts::ExpertsSite, linear::LinearSite, rows::RowsSite};

/// Identifies a [`ModelSpec`](super::ModelSpec). Ids of layers are valid only for models sharded from it.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct SpecId(pub(super) u64);

macro_rules! id {
    ($(#[$doc:meta])* $id:ident, $site:ident, $get:ident, $ids:ident, $field:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        pub struct $id {
            pub(super) spec: SpecId,
            pub(super) index: usize,
        }

        impl std::ops::Index<$id> for Model {
            type Output = $site;

            /// # Panics
            /// If the id belongs to another [`ModelSpec`](super::ModelSpec).
            fn index(&self, id: $id) -> &$site {
                assert!(self.$get(id).is_some(), concat!("the ", $what, " id belongs to another model"));
                &self.0.$field[id.index]
            }
        }

        impl Model {
            #[doc = concat!("The ", $what, " place in the model, or `None` if the id belongs to another")]
            /// [`ModelSpec`](super::ModelSpec).
            pub fn $get(&self, id: $id) -> Option<&$site> {
                if id.spec == self.0.id.spec { self.0.$field.get(id.index) } else { None }
            }

            #[doc = concat!("The ", $what, " id of each place, in the order of the description.")]
            pub fn $ids(&self) -> impl Iterator<Item = $id> {
                let spec = self.0.id.spec;
                (0..self.0.$field.len()).map(move |index| $id { spec, index })
            }
        }
    };
}

id! {
    /// Identifies a linear layer of a [`ModelSpec`](super::ModelSpec) and of every [`Model`] sharded from it.
    LinearId, LinearSite, linear, linear_ids, linears, "linear layer's"
}

id! {
    /// Identifies an embedding of a [`ModelSpec`](super::ModelSpec) and of every [`Model`] sharded from it.
    EmbeddingId, EmbeddingSite, embedding, embedding_ids, embeddings, "embedding's"
}

id! {
    /// Identifies the experts of one layer of a [`ModelSpec`](super::ModelSpec) and of every [`Model`] sharded from it.
    ExpertsId, ExpertsSite, experts, experts_ids, expert_layers, "experts'"
}

id! {
    /// Identifies the [trained rows](super::ModelSpec::trained_rows) of a [`ModelSpec`](super::ModelSpec) and of every
    /// [`Model`] sharded from it.
    RowsId, RowsSite, rows, rows_ids, rows, "rows'"
}

/// The part of a model that one rank holds, for [`ModelSpec::shard`](super::ModelSpec::shard).
///
/// With tensor parallelism alone, a [`TpRank`] is enough. It converts to a shard.
///
/// ```
/// use aril::model::{Experts, ModelSpec, Shard, TpRank};
///
/// // Qwen3-30B-A3B on the second of four ranks. Each rank has a quarter of a layer's experts.
/// let mut spec = ModelSpec::new();
/// let id = spec.experts(Experts::new("model.layers.0.mlp.experts", 128, 2048, 768).top_k(8))?;
/// let model = spec.shard(Shard::new(TpRank::new(1, 4)?).experts_tp(TpRank::SINGLE).held(id, 32..64))?;
/// assert_eq!(model[id].held().len(), 32);
/// assert_eq!(model[id].gate_up().out_features(), 2 * 768);
/// # Ok::<(), aril::model::SpecError>(())
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
#[must_use]
pub struct Shard {
    pub(super) tp: TpRank,
    pub(super) is_fully_sharded: bool,
    pub(super) experts_tp: TpRank,
    pub(super) held: BTreeMap<ExpertsId, Vec<usize>>,
}

impl Shard {
    /// The shard of a tensor-parallel rank. It holds all experts, sharded like the other layers.
    pub fn new(tp: TpRank) -> Self {
        Self { tp, is_fully_sharded: false, experts_tp: tp, held: BTreeMap::new() }
    }

    /// Shards both factors of every column-parallel and row-parallel linear layer, as in S-LoRA. Each rank then holds
    /// and reads only its share of A and B, but must [exchange](super::LinearSite::exchange) `v = A x` between shrink
    /// and expand (`FullyShardedLinear` in [`cpu`](crate::cpu::FullyShardedLinear) and `cuda`). Experts, embeddings and
    /// replicated layers are sharded as without it. It is for adapters that do not fit otherwise, as the exchange takes
    /// time.
    #[doc(alias = "fully_sharded_loras")]
    pub fn fully_sharded(mut self) -> Self {
        self.is_fully_sharded = true;
        self
    }

    /// Sets the tensor-parallel group that shards `inter` of the experts, if it is not the model's.
    #[doc(alias = "moe_tp")]
    pub fn experts_tp(mut self, tp: TpRank) -> Self {
        self.experts_tp = tp;
        self
    }

    /// Sets the experts of a layer that the rank holds under expert parallelism, in order of the engine's local expert
    /// ids. The default is all of them.
    #[doc(alias = "expert_map")]
    pub fn held(mut self, layer: ExpertsId, experts: impl IntoIterator<Item = usize>) -> Self {
        self.held.insert(layer, experts.into_iter().collect());
        self
    }
}

impl From<TpRank> for Shard {
    fn from(tp: TpRank) -> Self {
        Self::new(tp)
    }
}

/// What the factors of a module are for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// One slice of a layer.
    Slice(LinearId, usize),
    Embedding(EmbeddingId),
    /// One A for all slices of the layer, and one B with the rows of all slices.
    Fused(LinearId),
}

/// The adapted layers on one tensor-parallel rank. Immutable and cheap to clone.
///
/// Weight tables, layers and adapter images belong to one model and are rejected by another. Two models are equal if
/// they come from the same [`ModelSpec`](super::ModelSpec), for equal [`Shard`]s, with no layer added in between.
#[derive(Clone)]
pub struct Model(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) id: ModelId,
    pub(super) tp: TpRank,
    pub(super) linears: Vec<LinearSite>,
    pub(super) embeddings: Vec<EmbeddingSite>,
    pub(super) expert_layers: Vec<ExpertsSite>,
    pub(super) rows: Vec<RowsSite>,
    pub(super) targets: HashMap<String, Target>,
    pub(super) experts_at: HashMap<String, ExpertsId>,
}

/// Identifies a model. A [`ModelSpec`](super::ModelSpec) only grows, so models with equal ids have equal layers and
/// entries.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct ModelId {
    pub(super) spec: SpecId,
    /// Index among the description's shards.
    pub(super) shard: usize,
    pub(super) num_entries: usize,
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
    /// The tensor-parallel rank that the model was sharded for.
    pub fn tp(&self) -> TpRank {
        self.0.tp
    }

    /// The linear layers, in the order of the calls of [`ModelSpec::linear`](super::ModelSpec::linear).
    pub fn linears(&self) -> &[LinearSite] {
        &self.0.linears
    }

    pub(crate) fn embeddings(&self) -> &[EmbeddingSite] {
        &self.0.embeddings
    }

    pub(crate) fn trained_rows(&self) -> &[RowsSite] {
        &self.0.rows
    }

    /// The expert layers, in the order of the calls of [`ModelSpec::experts`](super::ModelSpec::experts).
    pub fn expert_layers(&self) -> &[ExpertsSite] {
        &self.0.expert_layers
    }

    /// Entries per slot in the descriptor table: one per slice of each linear layer, one per embedding, those listed at
    /// [`ProjectionSite`](super::ProjectionSite) for experts, and two for [trained rows](super::RowsSite).
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
}
