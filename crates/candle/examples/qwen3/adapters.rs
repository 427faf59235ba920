//! The layers that adapters adapt, and the adapters that requests may name.

use std::{collections::BTreeMap, path::Path, thread, time::Duration};

use aril::{
    DType, Slot,
    model::{EmbeddingId, Linear as Fused, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    pool::{PoolConfig, PoolError, Source, Version},
};
use aril_candle::{Adapters, Step};
use candle_core::{Device, Error, Result, Tensor, bail};
use candle_nn::{Embedding, Linear, Module};

/// The adapted layers.
#[derive(Debug, Default)]
pub struct Sites(ModelSpec);

impl Sites {
    /// Adds a layer that computes the modules `slices` of `parent`, given with their numbers of outputs, in one
    /// multiplication by `base`, whose weight is `[sum of outputs, in_features]`.
    pub fn linear(&mut self, parent: &str, slices: &[(&str, usize)], base: Linear) -> Result<LoraLinear> {
        let fused = Fused::new(parent, Parallel::Column, base.weight().dim(1)?);
        let fused = slices.iter().fold(fused, |fused, &(module, outputs)| fused.slice(module, outputs));
        Ok(LoraLinear { base, id: self.0.linear(fused).map_err(Error::wrap)? })
    }

    /// Adds an embedding at `path`.
    pub fn embedding(&mut self, path: &str, base: Embedding) -> Result<LoraEmbedding> {
        let (vocab, hidden) = base.embeddings().dims2()?;
        Ok(LoraEmbedding { base, id: self.0.embedding(path, vocab, hidden).map_err(Error::wrap)? })
    }
}

/// A linear layer of the base model, followed by the deltas of a step's adapters.
#[derive(Debug)]
pub struct LoraLinear {
    base: Linear,
    id: LinearId,
}

impl LoraLinear {
    /// `x` is `[rows of the step, in_features]`.
    pub fn forward(&self, x: &Tensor, step: &Step) -> Result<Tensor> {
        let y = self.base.forward(x)?;
        y.inplace_op2(x, &step.delta(self.id))?;
        Ok(y)
    }
}

/// The embedding of the base model, followed by the deltas of a step's adapters.
#[derive(Debug)]
pub struct LoraEmbedding {
    base: Embedding,
    id: EmbeddingId,
}

impl LoraEmbedding {
    /// `tokens` are those of the step's rows.
    pub fn forward(&self, tokens: &Tensor, step: &Step) -> Result<Tensor> {
        let y = self.base.forward(tokens)?;
        y.inplace_op2(tokens, &step.embedding_delta(self.id))?;
        Ok(y)
    }
}

/// Adapters by name.
#[derive(Debug)]
pub struct Named {
    adapters: Adapters,
    model: Model,
    dtype: DType,
    versions: BTreeMap<String, Version>,
}

impl Named {
    /// Room for as many adapters as the capacity has slots. Others are read again when they are needed.
    pub fn new(sites: &Sites, dtype: DType, device: &Device, capacity: Capacity) -> Result<Self> {
        let model = sites.0.shard(TpRank::SINGLE).map_err(Error::wrap)?;
        let arena = Adapters::arena_bytes(&model, dtype, capacity.max_rank, capacity.num_slots);
        let adapters = Adapters::new(&model, dtype, device, capacity, PoolConfig::arena_bytes(arena))?;
        Ok(Self { adapters, model, dtype, versions: BTreeMap::new() })
    }

    /// Registers the adapter that PEFT saved in `directory`, or replaces the one of that name. On an error all is as it
    /// was.
    pub fn register(&mut self, name: &str, directory: &Path) -> Result<()> {
        let source = Source::directory(directory, &self.model, self.dtype).map_err(Error::wrap)?;
        let version = self.adapters.load(source).map_err(Error::wrap)?;
        if !self.adapters.wait_for(version.load(), Duration::from_secs(60)).map_err(Error::wrap)? {
            bail!("the adapter `{name}` was not read in a minute")
        }
        self.versions.insert(name.to_owned(), version);
        Ok(())
    }

    /// Removes an adapter. Sequences that name it are refused from now on.
    pub fn remove(&mut self, name: &str) -> Result<()> {
        match self.versions.remove(name) {
            Some(_) => Ok(()),
            None => bail!("no adapter `{name}` is registered"),
        }
    }

    /// Begins a step of sequences, each with its adapter and how many tokens it has in this step.
    pub fn step(&self, sequences: &[(Option<&str>, usize)]) -> Result<Step> {
        let mut named = BTreeMap::new();
        for name in sequences.iter().filter_map(|(name, _)| *name) {
            let Some(version) = self.versions.get(name) else { bail!("no adapter `{name}` is registered") };
            named.insert(name, version.id());
        }
        let ids: Vec<_> = named.values().copied().collect();
        let leases = loop {
            match self.adapters.prepare(&ids) {
                // An engine would run other sequences meanwhile.
                Err(PoolError::Loading { .. }) => thread::sleep(Duration::from_millis(1)),
                leases => break leases.map_err(Error::wrap)?,
            }
        };
        let slots: BTreeMap<_, _> = named.into_keys().zip(leases.iter().map(|lease| lease.slot())).collect();
        let slot = |name: Option<&str>| name.and_then(|name| slots.get(name).copied()).unwrap_or(Slot::BASE);
        let tokens = sequences.iter().flat_map(|&(name, tokens)| std::iter::repeat_n(slot(name), tokens));
        self.adapters.step(&tokens.collect::<Vec<_>>())
    }
}
