//! The layers that adapters adapt, and the adapters that requests may name.

use std::path::Path;

use aril::{
    Slot,
    adapter::Adapter,
    model::{Linear as Fused, LinearId, ModelSpec, Parallel, TpRank},
    plan::Capacity,
};
use aril_candle::{Adapters, Delta, Step};
use candle_core::{DType, Device, Error, Result, Tensor, bail};
use candle_nn::{Linear, Module};

/// The adapted layers, in the order in which the model adds them.
#[derive(Debug, Default)]
pub struct Sites {
    spec: ModelSpec,
    ids: Vec<LinearId>,
}

impl Sites {
    /// Adds a layer that computes the modules `slices` of `parent`, given with their numbers of outputs, in one
    /// multiplication by `base`, whose weight is `[sum of outputs, in_features]`.
    pub fn linear(&mut self, parent: &str, slices: &[(&str, usize)], base: Linear) -> Result<LoraLinear> {
        let fused = Fused::new(parent, Parallel::Column, base.weight().dim(1)?);
        let fused = slices.iter().fold(fused, |fused, &(module, outputs)| fused.slice(module, outputs));
        let id = self.spec.linear(fused).map_err(Error::wrap)?;
        self.ids.push(id);
        Ok(LoraLinear { base, id })
    }
}

/// A linear layer of the base model, followed by the deltas of a step's adapters.
#[derive(Debug)]
pub struct LoraLinear {
    base: Linear,
    id: LinearId,
}

impl LoraLinear {
    /// `x` is `[tokens, in_features]`.
    pub fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        self.add(x, &step.delta(self.id))
    }

    /// `x` is `[sequences, in_features]`, the last token of every sequence.
    pub fn forward_last(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        self.add(x, &step.output_delta(self.id))
    }

    fn add(&self, x: &Tensor, delta: &Delta<'_>) -> Result<Tensor> {
        let y = self.base.forward(x)?;
        y.inplace_op2(x, delta)?;
        Ok(y)
    }
}

/// Adapters by name.
#[derive(Debug)]
pub struct Named {
    adapters: Adapters,
    /// The name of the adapter in each slot.
    names: Vec<Option<(String, Slot)>>,
}

impl Named {
    pub fn new(sites: &Sites, dtype: DType, device: &Device, capacity: Capacity) -> Result<Self> {
        let model = sites.spec.shard(TpRank::SINGLE).map_err(Error::wrap)?;
        let arena = Adapters::arena_bytes_for(&model, dtype, capacity)?;
        let adapters = Adapters::new(&model, sites.ids.iter().copied(), dtype, device, capacity, arena)?;
        Ok(Self { adapters, names: vec![None; capacity.num_slots] })
    }

    /// Registers the adapter that PEFT saved in `directory`, or replaces the one of that name. On an error all is as it
    /// was.
    pub fn register(&mut self, name: &str, directory: &Path) -> Result<()> {
        let Some(index) = self.index_of(Some(name)).or_else(|| self.index_of(None)) else {
            bail!("no room for the adapter `{name}`: there are {} already", self.names.len())
        };
        let slot = self.adapters.load(index, &Adapter::open(directory).map_err(Error::wrap)?)?;
        self.names[index] = Some((name.to_owned(), slot));
        Ok(())
    }

    /// Removes an adapter. Sequences that name it are refused from now on.
    pub fn remove(&mut self, name: &str) -> Result<()> {
        let Some(index) = self.index_of(Some(name)) else { bail!("no adapter `{name}` is registered") };
        self.adapters.unload(index)?;
        self.names[index] = None;
        Ok(())
    }

    /// Begins a step of sequences, each with its adapter and how many tokens it has in this step.
    pub fn step(&mut self, sequences: &[(Option<&str>, usize)]) -> Result<Step<'_>> {
        let (mut tokens, mut last_tokens) = (Vec::new(), Vec::with_capacity(sequences.len()));
        for &(name, num_tokens) in sequences {
            let slot = name.map_or(Ok(Slot::BASE), |name| self.registered(name))?;
            tokens.resize(tokens.len() + num_tokens, slot);
            last_tokens.push(slot);
        }
        self.adapters.step(&tokens, &last_tokens)
    }

    fn registered(&self, name: &str) -> Result<Slot> {
        match self.names.iter().flatten().find(|(registered, _)| registered == name) {
            Some((_, slot)) => Ok(*slot),
            None => bail!("no adapter `{name}` is registered"),
        }
    }

    fn index_of(&self, name: Option<&str>) -> Option<usize> {
        self.names.iter().position(|of_slot| of_slot.as_ref().map(|(name, _)| name.as_str()) == name)
    }
}
