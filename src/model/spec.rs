//! Describing a model.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    Cut, EmbeddingId, EmbeddingSite, Experts, ExpertsId, Inner, LinearId, LinearSite, MAX_SLICES, Model, ModelId,
    Shard, SliceSite, SpecId, Target, TpRank,
};

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
/// let mut spec = ModelSpec::new();
/// let qkv = Linear::new("model.layers.0.self_attn", Parallel::Column, 1024)
///     .heads("q_proj", 16, 128)
///     .kv_heads("k_proj", 8, 128)
///     .kv_heads("v_proj", 8, 128)
///     .fused("qkv_proj");
/// let qkv = spec.linear(qkv)?;
/// assert_eq!(spec.shard(TpRank::SINGLE)?[qkv].out_features(), 4096);
/// # Ok::<(), aril::model::SpecError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Linear {
    path: String,
    parallel: Parallel,
    in_features: usize,
    slices: Vec<Slice>,
    fused: Option<String>,
}

/// One module of a linear layer, whole.
#[derive(Clone, Debug)]
struct Slice {
    module: String,
    out_features: usize,
    /// The heads that a cut may not divide: their number, and whether ranks may share one.
    heads: Option<(usize, Sharing)>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Sharing {
    None,
    Replicated,
}

impl Linear {
    /// Names the layer's parent module (`""` for a module at the top, such as `lm_head`) and its whole, unsharded input features.
    pub fn new(path: impl Into<String>, parallel: Parallel, in_features: usize) -> Self {
        Self { path: path.into(), parallel, in_features, slices: Vec::new(), fused: None }
    }

    /// Appends a module with its whole, unsharded output features. Its output follows that of the slice before.
    pub fn slice(self, module: impl Into<String>, out_features: usize) -> Self {
        self.push(module, out_features, None)
    }

    /// Appends a column-parallel module of `num_heads` heads of `head_dim` features each: q. Ranks hold whole heads.
    pub fn heads(self, module: impl Into<String>, num_heads: usize, head_dim: usize) -> Self {
        self.push(module, num_heads.saturating_mul(head_dim), Some((num_heads, Sharing::None)))
    }

    /// Appends a column-parallel module of key-value heads: k or v. Where there are fewer heads than ranks, neighbouring ranks hold
    /// the same head.
    pub fn kv_heads(self, module: impl Into<String>, num_heads: usize, head_dim: usize) -> Self {
        self.push(module, num_heads.saturating_mul(head_dim), Some((num_heads, Sharing::Replicated)))
    }

    /// Accepts adapters that were trained on all slices as one module of this name (one A, the B's stacked in slice order).
    pub fn fused(mut self, module: impl Into<String>) -> Self {
        self.fused = Some(module.into());
        self
    }

    fn push(mut self, module: impl Into<String>, out_features: usize, heads: Option<(usize, Sharing)>) -> Self {
        self.slices.push(Slice { module: module.into(), out_features, heads });
        self
    }

    /// The whole path of one of its modules.
    fn module(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// The layer as rank `tp` holds it.
    fn shard(&self, tp: TpRank, first_entry: usize) -> Result<LinearSite, SpecError> {
        let input = if self.parallel == Parallel::Row { tp.size } else { 1 };
        let slices = self.slices.iter().map(|slice| {
            let module = self.module(&slice.module);
            let out_features = slice.cut(self.parallel, tp, &module)?;
            Ok(SliceSite { module, out_features })
        });
        Ok(LinearSite {
            in_features: cut(tp, &self.path, self.in_features, input)?,
            slices: slices.collect::<Result<_, _>>()?,
            first_entry,
        })
    }
}

impl Slice {
    fn cut(&self, parallel: Parallel, tp: TpRank, module: &str) -> Result<Cut, SpecError> {
        let shards = match (parallel, self.heads) {
            (Parallel::Row | Parallel::Replicated, _) => 1,
            (Parallel::Column, None) => tp.size,
            (Parallel::Column, Some((heads, Sharing::Replicated))) if tp.size.is_multiple_of(heads) => {
                tp.size.min(heads)
            }
            (Parallel::Column, Some((heads, _))) if heads.is_multiple_of(tp.size) => tp.size,
            (Parallel::Column, Some((heads, _))) => {
                return Err(SpecError::Heads { module: module.to_owned(), heads, size: tp.size });
            }
        };
        cut(tp, module, self.out_features, shards)
    }
}

/// The adapted layers of a whole model. [`shard`](Self::shard) cuts them for a rank and freezes them.
#[derive(Debug)]
pub struct ModelSpec {
    id: SpecId,
    layers: Vec<Described>,
    counts: Counts,
    modules: HashSet<String>,
    /// Those that it was cut in so far. The place of one among them identifies it.
    shards: Mutex<Vec<Shard>>,
}

/// Layers of each kind.
#[derive(Debug, Default)]
struct Counts {
    linears: usize,
    embeddings: usize,
    experts: usize,
}

#[derive(Debug)]
enum Described {
    Linear(Linear),
    Embedding { module: String, vocab: usize, hidden: usize },
    Experts(Experts),
}

impl Default for ModelSpec {
    fn default() -> Self {
        Self::new()
    }
}

impl ModelSpec {
    /// A model without any adapted layer yet.
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            id: SpecId(NEXT.fetch_add(1, Ordering::Relaxed)),
            layers: Vec::new(),
            counts: Counts::default(),
            modules: HashSet::new(),
            shards: Mutex::default(),
        }
    }

    /// Adds a linear layer.
    ///
    /// # Errors
    /// If the layer has no slices or too many, a size is zero or too large, a slice has heads in a layer that is not
    /// column-parallel, or a module is there already.
    pub fn linear(&mut self, layer: Linear) -> Result<LinearId, SpecError> {
        let Linear { path, parallel, in_features, slices, fused } = &layer;
        if slices.is_empty() || slices.len() > MAX_SLICES {
            return Err(SpecError::Slices { path: path.clone(), slices: slices.len() });
        }
        check_size(path, *in_features)?;
        let mut modules = Vec::with_capacity(slices.len() + 1);
        for slice in slices {
            let module = layer.module(&slice.module);
            if slice.heads.is_some() && *parallel != Parallel::Column {
                return Err(SpecError::NotColumn { module });
            }
            check_size(&module, slice.out_features)?;
            modules.push(module);
        }
        modules.extend(fused.as_ref().map(|name| layer.module(name)));
        self.claim(modules)?;
        self.layers.push(Described::Linear(layer));
        self.counts.linears += 1;
        Ok(LinearId { spec: self.id, index: self.counts.linears - 1 })
    }

    /// Adds an embedding of `vocab` rows of `hidden` features, whole on every rank.
    ///
    /// # Errors
    /// If a size is zero or too large, or the module is there already.
    pub fn embedding(
        &mut self,
        module: impl Into<String>,
        vocab: usize,
        hidden: usize,
    ) -> Result<EmbeddingId, SpecError> {
        let module = module.into();
        check_size(&module, vocab)?;
        check_size(&module, hidden)?;
        self.claim(vec![module.clone()])?;
        self.layers.push(Described::Embedding { module, vocab, hidden });
        self.counts.embeddings += 1;
        Ok(EmbeddingId { spec: self.id, index: self.counts.embeddings - 1 })
    }

    /// Adds the experts of a layer.
    ///
    /// # Errors
    /// If there are no experts or too many, a size is zero or too large, or the module is there already.
    pub fn experts(&mut self, layer: Experts) -> Result<ExpertsId, SpecError> {
        layer.check()?;
        self.claim(vec![layer.path().to_owned()])?;
        self.layers.push(Described::Experts(layer));
        self.counts.experts += 1;
        Ok(ExpertsId { spec: self.id, index: self.counts.experts - 1 })
    }

    /// The model as one rank runs it: a [`TpRank`], or a [`Shard`] that says more of the experts. Several ranks of one process have a
    /// model each, with the same ids.
    ///
    /// # Errors
    /// If a layer does not divide evenly over the ranks, or the shard has experts that do not exist, one twice, or those of another
    /// description.
    pub fn shard(&self, shard: impl Into<Shard>) -> Result<Model, SpecError> {
        let shard = shard.into();
        if shard.held.keys().any(|layer| layer.spec != self.id) {
            return Err(SpecError::Foreign);
        }
        let tp = shard.tp;
        let mut model = Inner {
            id: ModelId { spec: self.id, shard: 0, num_entries: 0 },
            tp,
            linears: Vec::with_capacity(self.counts.linears),
            embeddings: Vec::with_capacity(self.counts.embeddings),
            expert_layers: Vec::with_capacity(self.counts.experts),
            targets: HashMap::new(),
            experts_at: HashMap::new(),
        };
        for layer in &self.layers {
            let first_entry = model.id.num_entries;
            model.id.num_entries += match layer {
                Described::Linear(layer) => {
                    let id = LinearId { spec: self.id, index: model.linears.len() };
                    let site = layer.shard(tp, first_entry)?;
                    for (i, slice) in site.slices.iter().enumerate() {
                        let (entry, input, output) = (first_entry + i, site.in_features, slice.out_features);
                        model.targets.insert(slice.module.clone(), Target::Linear { entry, input, output });
                    }
                    if let Some(name) = &layer.fused {
                        model.targets.insert(layer.module(name), Target::Fused(id));
                    }
                    let num_slices = site.slices.len();
                    model.linears.push(site);
                    num_slices
                }
                &Described::Embedding { ref module, vocab, hidden } => {
                    model.targets.insert(module.clone(), Target::Embedding { entry: first_entry, vocab, hidden });
                    model.embeddings.push(EmbeddingSite { module: module.clone(), vocab, hidden, entry: first_entry });
                    1
                }
                Described::Experts(layer) => {
                    let id = ExpertsId { spec: self.id, index: model.expert_layers.len() };
                    model.experts_at.insert(layer.path().to_owned(), id);
                    let site = layer.shard(shard.experts_tp, shard.held.get(&id).map(Vec::as_slice), first_entry)?;
                    let num_entries = site.num_entries();
                    model.expert_layers.push(site);
                    num_entries
                }
            };
        }
        model.id.shard = self.number(shard);
        Ok(Model(Arc::new(model)))
    }

    /// The place of a shard among those so far: the same for equal ones.
    fn number(&self, shard: Shard) -> usize {
        let mut shards = self.shards.lock().unwrap_or_else(PoisonError::into_inner);
        shards.iter().position(|other| *other == shard).unwrap_or_else(|| {
            shards.push(shard);
            shards.len() - 1
        })
    }

    fn claim(&mut self, modules: Vec<String>) -> Result<(), SpecError> {
        for (i, module) in modules.iter().enumerate() {
            if self.modules.contains(module) || modules[..i].contains(module) {
                return Err(SpecError::Duplicate { module: module.clone() });
            }
        }
        self.modules.extend(modules);
        Ok(())
    }
}

/// Refuses a size that no layer has.
pub(super) fn check_size(path: &str, features: usize) -> Result<(), SpecError> {
    if features == 0 || i32::try_from(features).is_err() {
        return Err(SpecError::Features { path: path.to_owned(), features });
    }
    Ok(())
}

/// Cuts a dimension in `shards` parts and takes this rank's, neighbouring ranks sharing a part if there are more ranks.
pub(super) fn cut(TpRank { rank, size }: TpRank, path: &str, whole: usize, shards: usize) -> Result<Cut, SpecError> {
    if shards == 1 {
        return Ok(Cut::all(whole));
    }
    if shards == 0 || !whole.is_multiple_of(shards) || !size.is_multiple_of(shards) {
        return Err(SpecError::Uneven { path: path.to_owned(), features: whole, shards, size });
    }
    Ok(Cut::shard(whole, rank / (size / shards), shards))
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
    /// The shard holds experts of a layer of another description.
    #[error("the shard holds experts of a layer of another model")]
    Foreign,
    /// The shard holds an expert that does not exist, or twice.
    #[error("expert {expert} of `{path}` is held twice or not one of its {num_experts}")]
    Held {
        /// The path of the experts.
        path: String,
        /// The expert.
        expert: usize,
        /// Experts of the whole layer.
        num_experts: usize,
    },
    /// The engine's tensor-parallel group does not divide the heads of a layer.
    #[error("`{module}` has {heads} heads, which {size} ranks cannot share")]
    Heads {
        /// The module's path.
        module: String,
        /// Its whole heads.
        heads: usize,
        /// Ranks in the group.
        size: usize,
    },
    /// The engine gave heads to a layer whose output is whole on every rank.
    #[error("`{module}` has heads, which only the slices of a column-parallel layer have")]
    NotColumn {
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
