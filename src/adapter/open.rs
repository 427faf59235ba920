//! Reads an adapter from files, bytes or tensors, and pairs its factors.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    config::Config,
    error::{AdapterError, TensorName},
    experts::Orientation,
    files::{self, Access},
    module::{BaseWeight, Module, ModuleKind, Stack},
    names::{self, Named, Side},
    tensor::{Factor, Storage, Tensor},
};
use crate::model::MAX_RANK;

/// An adapter: parsed and checked, its weights not converted yet.
#[derive(Debug)]
#[doc(alias = "PeftModel")]
pub struct Adapter {
    pub(super) config: Config,
    pub(super) modules: Vec<Module>,
    pub(super) stacks: Vec<Stack>,
    /// Factors without elements, which some write for a module that experts do not have. Only a model says whether they do not.
    pub(super) empty: Vec<Stack>,
    pub(super) base_weights: Vec<BaseWeight>,
    pub(super) orientation: Option<Orientation>,
}

impl Adapter {
    /// Opens the adapter in a directory: `adapter_config.json` and safetensors, in one file or in shards with an index.
    ///
    /// The files stay mapped: they must not be changed or truncated while the adapter lives. A process that reads behind the end of a
    /// file that was truncated is killed (`SIGBUS`). Replacing a file by renaming another over it, as downloaders do, is fine; where
    /// others may do more, [`read`](Self::read).
    ///
    /// # Errors
    /// If a file is missing, unreadable or malformed, or if anything in it is not supported.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self, AdapterError> {
        Self::load(dir.as_ref(), Access::Map)
    }

    /// As [`open`](Self::open), but copies the files into memory, so that nothing that happens to them later matters: for adapters of
    /// strangers. It takes as much memory as the files are long.
    ///
    /// # Errors
    /// As for [`open`](Self::open), or if there is not enough memory.
    pub fn read(dir: impl AsRef<Path>) -> Result<Self, AdapterError> {
        Self::load(dir.as_ref(), Access::Copy)
    }

    fn load(dir: &Path, access: Access) -> Result<Self, AdapterError> {
        let config = Config::parse(&files::config(dir)?)?;
        Self::assemble(config, files::tensors(dir, access)?)
    }

    /// Makes an adapter of the bytes of its safetensors files, of which there may be several with different tensors, and the text of its
    /// `adapter_config.json`.
    ///
    /// The bytes are kept, not copied: a `Vec<u8>`, an `Arc<[u8]>`, a `&'static [u8]`, a map of a file, or any handle that keeps them in
    /// place. They have to stay the same as long as the adapter lives.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use aril::adapter::{Adapter, AdapterError};
    /// fn downloaded(config: &str, body: Arc<[u8]>) -> Result<Adapter, AdapterError> {
    ///     Adapter::from_safetensors(config, [body])
    /// }
    /// ```
    ///
    /// # Errors
    /// As for [`open`](Self::open). Errors call the files `file 0`, `file 1`, and so on.
    pub fn from_safetensors<B: AsRef<[u8]> + Send + Sync + 'static>(
        config: &str,
        files: impl IntoIterator<Item = B>,
    ) -> Result<Self, AdapterError> {
        let config = Config::parse(config)?;
        let mut tensors = Vec::new();
        for (index, file) in files.into_iter().enumerate() {
            let storage: Storage = Arc::new(file);
            tensors.append(&mut files::parse(&PathBuf::from(format!("file {index}")), &storage)?);
        }
        Self::assemble(config, tensors)
    }

    /// Makes an adapter of tensors in memory, as a trainer sends them. `config` is the text of an `adapter_config.json`; the
    /// tensors are named as in PEFT's files, with or without `base_model.model.`.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn from_tensors(
        config: &str,
        tensors: impl IntoIterator<Item = (String, Tensor)>,
    ) -> Result<Self, AdapterError> {
        let config = Config::parse(config)?;
        let named = |(key, tensor)| (TensorName { key, file: None }, Ok(tensor));
        Self::assemble(config, tensors.into_iter().map(named))
    }

    /// Says how PEFT's factors of parameters that hold all experts stand, in place of what `peft_version` and the shapes say: for
    /// adapters that are refused as ambiguous, or that a later PEFT has saved again, which keeps the `peft_version` it has loaded.
    #[must_use]
    #[doc(alias = "is_3d_lora_weight")]
    pub fn oriented(self, orientation: Orientation) -> Self {
        Self { orientation: Some(orientation), ..self }
    }

    /// The weights of the base model that the adapter brings and that were not compared yet. PEFT saves those of the embedding and of the
    /// head with every adapter of one of them, and loads them over the base model's.
    pub fn base_weights(&self) -> &[BaseWeight] {
        &self.base_weights
    }

    /// Finds out whether the adapter's weights of the base model are the base model's own: `is_same` is asked of each, and they are then
    /// forgotten. Without this, an adapter that has any cannot be [planned](Self::plan).
    ///
    /// What counts is what the engine computes with: where it rounds the base model's weights, it has to compare them rounded.
    ///
    /// ```
    /// # use aril::adapter::{Adapter, AdapterError};
    /// # fn compare(mut adapter: Adapter, embedding: &[half::bf16]) -> Result<Adapter, AdapterError> {
    /// adapter.compare_base_weights(|weight| -> Result<bool, AdapterError> {
    ///     let values = weight.tensor().to_f32();
    ///     let same = values.iter().copied().map(half::bf16::from_f32).eq(embedding.iter().copied());
    ///     Ok(weight.path() == "model.embed_tokens" && same)
    /// })?;
    /// # Ok(adapter)
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`AdapterError::OtherBase`] for the first of which `is_same` says no; and what it returns, at once. Nothing is forgotten then.
    #[doc(alias = "save_embedding_layers")]
    pub fn compare_base_weights<E: From<AdapterError>>(
        &mut self,
        mut is_same: impl FnMut(&BaseWeight) -> Result<bool, E>,
    ) -> Result<(), E> {
        for weight in &self.base_weights {
            if !is_same(weight)? {
                return Err(AdapterError::OtherBase { tensor: weight.name.clone() }.into());
            }
        }
        self.base_weights.clear();
        Ok(())
    }

    /// The adapted modules, sorted by path.
    pub fn modules(&self) -> &[Module] {
        &self.modules
    }

    /// The stacked factors of experts, sorted by path.
    pub fn stacks(&self) -> &[Stack] {
        &self.stacks
    }

    /// The largest rank of any module; of stacks, [`SlotImage::max_rank`](super::SlotImage::max_rank) knows it.
    #[doc(alias = "max_lora_rank")]
    pub fn max_rank(&self) -> usize {
        self.modules.iter().map(Module::rank).max().unwrap_or(0)
    }

    fn assemble(config: Config, tensors: impl IntoIterator<Item = files::Stored>) -> Result<Self, AdapterError> {
        let mut pairs: BTreeMap<String, Pair> = BTreeMap::new();
        let mut base_weights = Vec::new();
        for (name, tensor) in tensors {
            match names::parse(&name)? {
                Named::Factor(key) => {
                    let half = Half { name, tensor: tensor?, of: (key.kind, key.adapter) };
                    pairs.entry(key.module).or_default().insert(key.side, half)?;
                }
                Named::BaseWeight(path) => base_weights.push(BaseWeight { path, name, tensor: tensor? }),
            }
        }
        config.check_work(pairs.keys())?;
        let (mut modules, mut stacks, mut empty) = (Vec::new(), Vec::new(), Vec::new());
        for (path, pair) in pairs {
            match pair.finish(path, &config)? {
                Finished::Module(module) => modules.push(module),
                Finished::Stack(stack) => stacks.push(stack),
                Finished::Empty(stack) => empty.push(stack),
            }
        }
        if modules.is_empty() && stacks.is_empty() {
            return Err(AdapterError::Empty);
        }
        Ok(Self { config, modules, stacks, empty, base_weights, orientation: None })
    }
}

/// The factors of a module, as they are found.
#[derive(Default)]
struct Pair {
    a: Option<Half>,
    b: Option<Half>,
}

struct Half {
    name: TensorName,
    tensor: Tensor,
    /// What both halves must have in common: the module's kind and, in some state dicts, the adapter's name.
    of: (ModuleKind, Option<String>),
}

enum Finished {
    Module(Module),
    Stack(Stack),
    Empty(Stack),
}

impl Pair {
    fn insert(&mut self, side: Side, half: Half) -> Result<(), AdapterError> {
        let place = match side {
            Side::A => &mut self.a,
            Side::B => &mut self.b,
        };
        if let Some(same) = place {
            return Err(AdapterError::Duplicate { tensor: half.name, other: same.name.clone() });
        }
        *place = Some(half);
        Ok(())
    }

    fn finish(self, path: String, config: &Config) -> Result<Finished, AdapterError> {
        let (a, b, kind) = match (self.a, self.b) {
            (Some(a), Some(b)) if a.of == b.of => ((a.name, a.tensor), (b.name, b.tensor), a.of.0),
            (Some(a), Some(b)) => return Err(AdapterError::Unpaired { tensor: a.name, other: b.name }),
            (Some(a), None) => return Err(AdapterError::MissingFactor { tensor: a.name, missing: 'B' }),
            (None, Some(b)) => return Err(AdapterError::MissingFactor { tensor: b.name, missing: 'A' }),
            (None, None) => return Err(AdapterError::Empty),
        };
        let tensors = [&a.1, &b.1];
        if !names::is_parameter(&path) {
            config.check_target(&path, kind)?;
        }
        if names::is_of_experts(&path) && tensors.iter().all(|tensor| tensor.bytes().is_empty()) {
            return Ok(Finished::Empty(Stack { path, a, b }));
        }
        if kind == ModuleKind::Linear && names::is_stack(&path, tensors.map(|tensor| tensor.shape().len())) {
            return Ok(Finished::Stack(Stack { path, a, b }));
        }
        let (a, b) = (Factor::new(a.0, a.1)?, Factor::new(b.0, b.1)?);
        let rank = a.rows;
        if rank != b.cols {
            let (a_cols, b_rows, b_rank) = (a.cols, b.rows, b.cols);
            return Err(AdapterError::RankMismatch { tensor: a.name, a_rank: rank, a_cols, b_rows, b_rank });
        }
        if !(1..=MAX_RANK).contains(&rank) {
            return Err(AdapterError::Rank { tensor: a.name, rank });
        }
        let scaling = config.scaling(&path, rank, &a.name)?;
        Ok(Finished::Module(Module { path, kind, scaling, a, b }))
    }
}
