//! The description of a whole, unsharded model.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    embedding::Embedding,
    error::SpecError,
    experts::Experts,
    linear::Linear,
    rows::Rows,
    shard::{EmbeddingId, ExpertsId, Inner, LinearId, Model, ModelId, RowsId, Shard, SpecId, Target},
};

/// The adapted layers of a whole, unsharded model. [`shard`](Self::shard) makes the [`Model`] of one rank.
#[derive(Debug)]
pub struct ModelSpec {
    id: SpecId,
    layers: Vec<Described>,
    counts: Counts,
    modules: HashSet<String>,
    /// Distinct shards so far. The index of a shard identifies it.
    shards: Mutex<Vec<Shard>>,
}

/// Number of layers of each kind.
#[derive(Debug, Default)]
struct Counts {
    linears: usize,
    embeddings: usize,
    experts: usize,
    rows: usize,
}

#[derive(Debug)]
enum Described {
    Linear(Linear),
    Embedding(Embedding),
    Experts(Experts),
    Rows(Rows),
}

impl Default for ModelSpec {
    fn default() -> Self {
        Self::new()
    }
}

impl ModelSpec {
    /// A model without layers.
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
    /// [`SpecError`] if the layer has no slices or more than [`MAX_SLICES`](super::MAX_SLICES), a size is zero or
    /// exceeds `i32::MAX`, a module with heads, replicated features or padding is in a layer that is not
    /// column-parallel, or a module was added before.
    pub fn linear(&mut self, layer: Linear) -> Result<LinearId, SpecError> {
        self.claim(layer.check()?)?;
        self.layers.push(Described::Linear(layer));
        self.counts.linears += 1;
        Ok(LinearId { spec: self.id, index: self.counts.linears - 1 })
    }

    /// Adds an embedding of `vocab` rows with `hidden` features each. Every rank holds all of it.
    ///
    /// # Errors
    /// [`SpecError`] if a size is zero or exceeds `i32::MAX`, or the module was added before.
    pub fn embedding(
        &mut self,
        module: impl Into<String>,
        vocab: usize,
        hidden: usize,
    ) -> Result<EmbeddingId, SpecError> {
        self.add_embedding(Embedding { module: module.into(), vocab, padded: None, hidden })
    }

    /// Adds an embedding of `vocab` rows with `hidden` features each, on ranks that split `padded` rows evenly. Each
    /// rank adds the delta of its own tokens to its partial sum, before the engine's all-reduce. Token ids are
    /// [relative to the rank's first row](super::EmbeddingSite::range).
    ///
    /// # Errors
    /// [`SpecError`] if a size is zero or exceeds `i32::MAX`, `padded` is less than `vocab`, or the module was added
    /// before.
    #[doc(alias = "VocabParallelEmbedding")]
    pub fn vocab_parallel_embedding(
        &mut self,
        module: impl Into<String>,
        vocab: usize,
        padded: usize,
        hidden: usize,
    ) -> Result<EmbeddingId, SpecError> {
        self.add_embedding(Embedding { module: module.into(), vocab, padded: Some(padded), hidden })
    }

    fn add_embedding(&mut self, layer: Embedding) -> Result<EmbeddingId, SpecError> {
        layer.check()?;
        self.claim(vec![layer.module.clone()])?;
        self.layers.push(Described::Embedding(layer));
        self.counts.embeddings += 1;
        Ok(EmbeddingId { spec: self.id, index: self.counts.embeddings - 1 })
    }

    /// Adds the experts of one layer.
    ///
    /// # Errors
    /// [`SpecError`] if a size or the number of experts is zero or exceeds `i32::MAX`, or the module was added before.
    pub fn experts(&mut self, layer: Experts) -> Result<ExpertsId, SpecError> {
        layer.check()?;
        self.claim(vec![layer.path().to_owned()])?;
        self.layers.push(Described::Experts(layer));
        self.counts.experts += 1;
        Ok(ExpertsId { spec: self.id, index: self.counts.experts - 1 })
    }

    /// Declares that the engine applies *trained rows*: rows of the embedding and of the head that an adapter has in the
    /// place of the base model's (`trainable_token_indices`), by the operations of `TrainedRows` in
    /// [`cpu`](crate::cpu::TrainedRows) and `cuda`. Adapters with such rows are rejected for a model without it. If the
    /// head `is_tied`, it has the weight of the embedding in the base model, and rows of the embedding are its own, too.
    ///
    /// The head has one slice, and all input features on each rank.
    ///
    /// # Errors
    /// [`SpecError::Foreign`] if a layer belongs to another description. [`shard`](Self::shard) rejects a layer that is
    /// no head of the embedding ([`SpecError::NotHead`]).
    #[doc(alias = "trainable_token_indices")]
    pub fn trained_rows(&mut self, embedding: EmbeddingId, head: LinearId, is_tied: bool) -> Result<RowsId, SpecError> {
        if [embedding.spec, head.spec] != [self.id; 2] {
            return Err(SpecError::Foreign);
        }
        self.layers.push(Described::Rows(Rows { embedding, head, is_tied }));
        self.counts.rows += 1;
        Ok(RowsId { spec: self.id, index: self.counts.rows - 1 })
    }

    /// The model on one rank, given by a [`TpRank`](super::TpRank), or by a [`Shard`] that also says which experts the
    /// rank holds. One process may shard for several ranks; layer ids are valid for all of them.
    ///
    /// # Errors
    /// [`SpecError::Uneven`] or [`SpecError::Heads`] if a layer cannot be split evenly over the ranks.
    /// [`SpecError::Held`] if a held expert is out of range or listed twice, [`SpecError::Foreign`] if the experts
    /// belong to another description, [`SpecError::NotHead`] as for [`trained_rows`](Self::trained_rows).
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
            rows: Vec::with_capacity(self.counts.rows),
            targets: HashMap::new(),
            experts_at: HashMap::new(),
        };
        for layer in &self.layers {
            let first_entry = model.id.num_entries;
            model.id.num_entries += match layer {
                Described::Linear(layer) => {
                    let id = LinearId { spec: self.id, index: model.linears.len() };
                    let site = layer.shard(tp, shard.is_fully_sharded, first_entry)?;
                    for (i, slice) in site.slices().iter().enumerate() {
                        model.targets.insert(slice.module().to_owned(), Target::Slice(id, i));
                    }
                    if let Some(name) = &layer.fused {
                        model.targets.insert(layer.module(name), Target::Fused(id));
                    }
                    let num_slices = site.slices().len();
                    model.linears.push(site);
                    num_slices
                }
                Described::Embedding(layer) => {
                    let id = EmbeddingId { spec: self.id, index: model.embeddings.len() };
                    model.targets.insert(layer.module.clone(), Target::Embedding(id));
                    model.embeddings.push(layer.shard(tp, first_entry)?);
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
                Described::Rows(rows) => {
                    let (embedding, head) = (&model.embeddings[rows.embedding.index], &model.linears[rows.head.index]);
                    model.rows.push(rows.shard(embedding, head, first_entry)?);
                    Rows::ENTRIES
                }
            };
        }
        model.id.shard = self.number(shard);
        Ok(Model(Arc::new(model)))
    }

    /// The index of a shard. Equal shards have equal indices.
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
