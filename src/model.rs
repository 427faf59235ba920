//! What an engine adapts: the layers of its model as one tensor-parallel rank runs them.
//!
//! A [`ModelSpec`] is built once. It gives every adapted module of the model (in PEFT's sense: what `target_modules` names) a row
//! of the descriptor table, and says how the module's factors are cut for this rank. It knows nothing of adapters or devices.
//!
//! Invariant: every entry is of one module (or of what the experts of a layer share of it), and no two of the same.

mod experts;

use std::{collections::HashMap, sync::Arc};

pub use experts::{Activation, Experts, ExpertsId, ExpertsSite, Halves, ProjectionSite};
pub(crate) use experts::{ExpertModule, ExpertSlice};

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
}

/// How tensor parallelism cuts a linear layer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Parallel {
    /// Each rank holds some of the output features: qkv, gate-up, lm_head.
    Column,
    /// Each rank holds the whole layer.
    Replicated,
    /// Each rank holds some of the input features and computes a partial sum: o, down.
    Row,
}

/// One linear layer to be described to [`ModelSpec::linear`]: a path, the input features, and the modules fused into its output.
///
/// ```
/// use aril::model::{Linear, ModelSpec, Parallel, TpRank};
///
/// let mut model = ModelSpec::new(TpRank::SINGLE);
/// let qkv = Linear::new("model.layers.0.self_attn", Parallel::Column, 1024)
///     .slice("q_proj", 2048)
///     .slice("k_proj", 1024)
///     .slice("v_proj", 1024)
///     .fused("qkv_proj");
/// let id = model.linear(qkv)?;
/// assert_eq!(model[id].out_features(), 4096);
/// # Ok::<(), aril::model::SpecError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Linear {
    path: String,
    parallel: Parallel,
    in_features: usize,
    slices: Vec<(String, usize, Option<usize>)>,
    fused: Option<String>,
}

impl Linear {
    /// Names the layer's parent module (`""` for a module at the top, such as `lm_head`) and its whole, unsharded input features.
    pub fn new(path: impl Into<String>, parallel: Parallel, in_features: usize) -> Self {
        Self { path: path.into(), parallel, in_features, slices: Vec::new(), fused: None }
    }

    /// Appends a module with its whole, unsharded output features. Its output follows that of the slice before.
    pub fn slice(mut self, module: impl Into<String>, out_features: usize) -> Self {
        self.slices.push((module.into(), out_features, None));
        self
    }

    /// Appends a column-parallel module that exists in only `shards` different parts, each held by `size / shards` neighbouring
    /// ranks: k and v where there are fewer key-value heads than ranks.
    pub fn replicated_slice(mut self, module: impl Into<String>, out_features: usize, shards: usize) -> Self {
        self.slices.push((module.into(), out_features, Some(shards)));
        self
    }

    /// Accepts adapters that were trained on all slices as one module of this name (one A, the B's stacked in slice order).
    pub fn fused(mut self, module: impl Into<String>) -> Self {
        self.fused = Some(module.into());
        self
    }
}

/// Names a linear layer of a [`ModelSpec`].
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct LinearId(usize);

/// Names an embedding of a [`ModelSpec`].
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct EmbeddingId(usize);

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

    /// Whether a table of those entries is of a model with this layer in this place.
    pub(crate) fn is_in(&self, entries: &[Entry]) -> bool {
        let entries = entries.get(self.first_entry..self.first_entry + self.slices.len());
        entries.is_some_and(|entries| {
            let mut pairs = entries.iter().zip(&self.slices);
            pairs.all(|(entry, slice)| entry.shape == self.shape(slice) && *entry.module == slice.module)
        })
    }

    fn shape(&self, slice: &SliceSite) -> EntryShape {
        EntryShape::Linear { input: self.in_features, output: slice.out_features }
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

    /// Whether a table of those entries is of a model with this embedding in this place.
    pub(crate) fn is_in(&self, entries: &[Entry]) -> bool {
        entries.get(self.entry).is_some_and(|entry| entry.shape == self.shape() && *entry.module == self.module)
    }

    fn shape(&self) -> EntryShape {
        EntryShape::Embedding { vocab: self.vocab, hidden: self.hidden }
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

    pub(crate) fn range(self) -> std::ops::Range<usize> {
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

/// The adapted layers of a model, as one tensor-parallel rank of the engine runs them.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    tp: TpRank,
    linears: Vec<LinearSite>,
    embeddings: Vec<EmbeddingSite>,
    experts: Vec<ExpertsSite>,
    targets: HashMap<String, Target>,
    experts_at: HashMap<String, ExpertsId>,
    entries: Vec<Entry>,
}

/// What a row of the descriptor table is for. Tables keep those of the model they were made for, and refuse what is not theirs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Entry {
    module: Arc<str>,
    shape: EntryShape,
}

/// The shape of a module's factors on this rank, and the part of the whole that they are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum EntryShape {
    Linear {
        input: Cut,
        output: Cut,
    },
    Embedding {
        vocab: usize,
        hidden: usize,
    },
    /// Of one expert, or of what all share.
    Expert {
        slice: ExpertModule,
        expert: Option<usize>,
        input: Cut,
        output: Cut,
    },
}

impl ModelSpec {
    /// A model without any adapted layer yet.
    pub fn new(tp: TpRank) -> Self {
        Self {
            tp,
            linears: Vec::new(),
            embeddings: Vec::new(),
            experts: Vec::new(),
            targets: HashMap::new(),
            experts_at: HashMap::new(),
            entries: Vec::new(),
        }
    }

    /// Adds a linear layer.
    ///
    /// # Errors
    /// If the layer has no slices or too many, a size is zero or does not divide over the ranks, a slice is replicated in a layer
    /// that is not column-parallel, or a module is there already.
    pub fn linear(&mut self, layer: Linear) -> Result<LinearId, SpecError> {
        let Linear { path, parallel, in_features, slices, fused } = layer;
        if slices.is_empty() || slices.len() > MAX_SLICES {
            return Err(SpecError::Slices { path, slices: slices.len() });
        }
        let whole_path = |module: &str| if path.is_empty() { module.to_owned() } else { format!("{path}.{module}") };
        let input = match parallel {
            Parallel::Row => cut(self.tp, &path, in_features, self.tp.size)?,
            Parallel::Column | Parallel::Replicated => cut(self.tp, &path, in_features, 1)?,
        };
        let mut sites = Vec::with_capacity(slices.len());
        for (name, out_features, shards) in &slices {
            let module = whole_path(name);
            let shards = match (parallel, shards) {
                (Parallel::Column, shards) => shards.unwrap_or(self.tp.size),
                (Parallel::Row | Parallel::Replicated, None) => 1,
                (Parallel::Row | Parallel::Replicated, Some(_)) => return Err(SpecError::Replicated { module }),
            };
            let output = cut(self.tp, &module, *out_features, shards)?;
            sites.push(SliceSite { module, out_features: output });
        }

        let id = LinearId(self.linears.len());
        let first_entry = self.entries.len();
        let mut targets: Vec<_> = sites
            .iter()
            .enumerate()
            .map(|(i, site)| {
                let target = Target::Linear { entry: first_entry + i, input, output: site.out_features };
                (site.module.clone(), target)
            })
            .collect();
        targets.extend(fused.map(|name| (whole_path(&name), Target::Fused(id))));
        self.claim(targets)?;
        let site = LinearSite { in_features: input, slices: sites, first_entry };
        let entry = |slice: &SliceSite| Entry { module: slice.module.as_str().into(), shape: site.shape(slice) };
        self.entries.extend(site.slices.iter().map(entry));
        self.linears.push(site);
        Ok(id)
    }

    /// Adds an embedding of `vocab` rows of `hidden` features, whole on every rank.
    ///
    /// # Errors
    /// If a size is zero or the module is there already.
    pub fn embedding(
        &mut self,
        module: impl Into<String>,
        vocab: usize,
        hidden: usize,
    ) -> Result<EmbeddingId, SpecError> {
        let module = module.into();
        cut(self.tp, &module, vocab, 1)?;
        cut(self.tp, &module, hidden, 1)?;
        let entry = self.entries.len();
        self.claim(vec![(module.clone(), Target::Embedding { entry, vocab, hidden })])?;
        let site = EmbeddingSite { module, vocab, hidden, entry };
        self.entries.push(Entry { module: site.module.as_str().into(), shape: site.shape() });
        self.embeddings.push(site);
        Ok(EmbeddingId(self.embeddings.len() - 1))
    }

    /// Rows of the descriptor table that one slot takes: one for each slice of each linear layer, one for each embedding, and those
    /// of [`ProjectionSite`] for experts.
    pub fn num_entries(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub(crate) fn target(&self, module: &str) -> Option<Target> {
        self.targets.get(module).copied()
    }

    pub(crate) fn experts_at(&self, path: &str) -> Option<ExpertsId> {
        self.experts_at.get(path).copied()
    }

    /// The linear slices with their entries and cuts, for the layer of a fused module.
    pub(crate) fn fused(&self, id: LinearId) -> impl Iterator<Item = (usize, Cut, Cut)> {
        let site = &self[id];
        site.slices.iter().enumerate().map(|(i, slice)| (site.first_entry + i, site.in_features, slice.out_features))
    }

    fn has(&self, module: &str) -> bool {
        self.targets.contains_key(module) || self.experts_at.contains_key(module)
    }

    fn claim(&mut self, targets: Vec<(String, Target)>) -> Result<(), SpecError> {
        for (i, (module, _)) in targets.iter().enumerate() {
            if self.has(module) || targets[..i].iter().any(|(other, _)| other == module) {
                return Err(SpecError::Duplicate { module: module.clone() });
            }
        }
        self.targets.extend(targets);
        Ok(())
    }
}

/// Cuts a dimension in `shards` parts and takes this rank's, neighbouring ranks sharing a part if there are more ranks.
fn cut(TpRank { rank, size }: TpRank, path: &str, whole: usize, shards: usize) -> Result<Cut, SpecError> {
    if whole == 0 || i32::try_from(whole).is_err() {
        return Err(SpecError::Features { path: path.to_owned(), features: whole });
    }
    if shards == 1 {
        return Ok(Cut::all(whole));
    }
    if shards == 0 || !whole.is_multiple_of(shards) || !size.is_multiple_of(shards) {
        return Err(SpecError::Uneven { path: path.to_owned(), features: whole, shards, size });
    }
    Ok(Cut::shard(whole, rank / (size / shards), shards))
}

impl std::ops::Index<LinearId> for ModelSpec {
    type Output = LinearSite;

    fn index(&self, id: LinearId) -> &LinearSite {
        &self.linears[id.0]
    }
}

impl std::ops::Index<EmbeddingId> for ModelSpec {
    type Output = EmbeddingSite;

    fn index(&self, id: EmbeddingId) -> &EmbeddingSite {
        &self.embeddings[id.0]
    }
}

impl std::ops::Index<ExpertsId> for ModelSpec {
    type Output = ExpertsSite;

    fn index(&self, id: ExpertsId) -> &ExpertsSite {
        &self.experts[id.0]
    }
}

/// Why a model cannot be described so.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// The engine named a module twice.
    #[error("the module `{module}` is described twice")]
    Duplicate {
        /// The module's path.
        module: String,
    },
    /// The engine gave a number of experts that no layer has.
    #[error("`{path}` has {num_experts} experts; a layer has 1 to 2147483647")]
    Experts {
        /// The path of the experts.
        path: String,
        /// The number given.
        num_experts: usize,
    },
    /// The engine gave a size that no layer has.
    #[error("`{path}` has {features} features; a layer has 1 to 2147483647")]
    Features {
        /// The layer's or module's path.
        path: String,
        /// The size given.
        features: usize,
    },
    /// The engine holds an expert that does not exist, or twice.
    #[error("expert {expert} of `{path}` is held twice or not one of its {num_experts}")]
    Held {
        /// The path of the experts.
        path: String,
        /// The expert.
        expert: usize,
        /// Experts of the whole layer.
        num_experts: usize,
    },
    /// The engine cut the output of a layer whose output is whole on every rank.
    #[error("`{module}` is a replicated slice, which only a column-parallel layer has")]
    Replicated {
        /// The module's path.
        module: String,
    },
    /// The engine fused no modules, or too many.
    #[error("the layer at `{path}` has {slices} slices; a layer has 1 to {MAX_SLICES}")]
    Slices {
        /// The layer's path.
        path: String,
        /// How many were given.
        slices: usize,
    },
    /// The engine gave a rank outside its tensor-parallel group.
    #[error("tensor-parallel rank {rank} is not below the group's size {size}")]
    TpRank {
        /// The rank given.
        rank: usize,
        /// The size given.
        size: usize,
    },
    /// The engine's tensor-parallel group does not divide a layer.
    #[error("`{path}` has {features} features, which cannot be cut in {shards} even shards over {size} ranks")]
    Uneven {
        /// The layer's or module's path.
        path: String,
        /// Its whole features.
        features: usize,
        /// Parts asked for.
        shards: usize,
        /// Ranks in the group.
        size: usize,
    },
}
