//! Opens an adapter from files, bytes or tensors, and pairs its factors.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    config::Config,
    error::{AdapterError, TensorName},
    experts::Orientation,
    files::{self, Access, Files, Opened, Opener},
    invocation::Invocation,
    module::{BaseWeight, Module, ModuleKind, Stack, TrainedRows},
    names::{self, Named, Side},
    pattern::Work,
    tensor::{Factor, Storage, Tensor},
};
use crate::{model::MAX_RANK, unique::unique};

/// An adapter whose configuration and tensor names are parsed and checked. Weights are not converted yet.
#[derive(Debug)]
#[doc(alias = "PeftModel")]
pub struct Adapter {
    /// No other adapter has it.
    pub(super) id: u64,
    pub(super) config: Config,
    pub(super) modules: Vec<Module>,
    pub(super) stacks: Vec<Stack>,
    /// Factors with zero elements, which some trainers write for modules that ungated experts lack. Only a model can
    /// tell whether the module is missing.
    pub(super) empty: Vec<Stack>,
    pub(super) base_weights: Vec<BaseWeight>,
    pub(super) rows: Vec<TrainedRows>,
    pub(super) orientation: Option<Orientation>,
}

impl Adapter {
    /// Opens the adapter in a directory: `adapter_config.json`, and safetensors in one file or in shards with an index.
    ///
    /// The weight files are read into memory, which takes as many bytes as they have. What is done to them later has no
    /// effect.
    ///
    /// # Errors
    /// [`AdapterError`] if a file is missing, unreadable or malformed, has anything unsupported in it, or is modified
    /// while it is read, or if memory is exhausted.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self, AdapterError> {
        Self::open_with(dir, &Opener::default())
    }

    /// Like [`open`](Self::open), but opens each file with `opener`.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn open_with(dir: impl AsRef<Path>, opener: &Opener) -> Result<Self, AdapterError> {
        Ok(Self::load(dir.as_ref(), Access::Copy, opener)?.0)
    }

    /// Like [`open`](Self::open), but maps the weight files into memory, whose pages are read when they are needed.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    ///
    /// # Safety
    /// Nothing modifies or truncates the weight files while the adapter, a clone of one of its tensors or a
    /// [`Source`](crate::pool::Source) of it is alive: the bytes of a map are Rust's to read, and reading past the end
    /// of a truncated file kills the process with `SIGBUS`. To replace a file by renaming another over it is safe.
    #[expect(unsafe_code, reason = "its caller has an obligation")]
    pub unsafe fn map(dir: impl AsRef<Path>) -> Result<Self, AdapterError> {
        Ok(Self::load(dir.as_ref(), Access::Map, &Opener::default())?.0)
    }

    /// The adapter in a directory, and the files that it was read from.
    pub(super) fn load(dir: &Path, access: Access, opener: &Opener) -> Result<(Self, Vec<Opened>), AdapterError> {
        let mut files = Files::new(dir, access, opener);
        let config = Config::parse(&files.config()?)?;
        let adapter = Self::assemble(config, files.tensors()?)?;
        Ok((adapter, files.opened))
    }

    /// Opens an adapter from the bytes of one or more safetensors files and the text of its `adapter_config.json`.
    ///
    /// The bytes are kept, not copied. They may be a `Vec<u8>`, an `Arc<[u8]>`, a `&'static [u8]`, a memory map or any
    /// other handle, and must not change while the adapter is alive.
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
    /// As for [`open`](Self::open). Errors name the files `file 0`, `file 1` and so on.
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

    /// Opens an adapter from tensors in memory, such as a trainer sends. `config` is the text of an
    /// `adapter_config.json`. Tensors are named as in PEFT's files, with or without `base_model.model.`.
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

    /// Sets the orientation of the factors of PEFT's `target_parameters`, instead of deriving it from `peft_version`
    /// and the shapes. Use it for adapters that are rejected as ambiguous, and for adapters that a later PEFT has saved
    /// again, which keeps the original `peft_version`.
    #[must_use]
    #[doc(alias = "is_3d_lora_weight")]
    pub fn oriented(self, orientation: Orientation) -> Self {
        Self { id: unique(), orientation: Some(orientation), ..self }
    }

    /// The adapter's copies of base weights that have not been compared yet. PEFT saves the embedding and head weights
    /// with every adapter of either, and loads them over the base model's.
    pub fn base_weights(&self) -> &[BaseWeight] {
        &self.base_weights
    }

    /// Checks that the adapter's copies of base weights equal the base model's: calls `is_same` for each, then forgets
    /// them. An adapter with uncompared base weights cannot be [planned](Self::plan).
    ///
    /// [`BaseWeight::path_in`] says which weight it is a copy of. Compare with the weights that the engine computes
    /// with. If the engine rounds them, round the adapter's copy, too.
    ///
    /// ```
    /// # use aril::adapter::{Adapter, AdapterError};
    /// # fn compare(
    /// #     mut adapter: Adapter, model: &aril::model::Model, embedding: &[half::bf16],
    /// # ) -> Result<Adapter, AdapterError> {
    /// adapter.compare_base_weights(|weight| -> Result<bool, AdapterError> {
    ///     let values = weight.tensor().to_f32();
    ///     let same = values.iter().copied().map(half::bf16::from_f32).eq(embedding.iter().copied());
    ///     Ok(weight.path_in(model)? == "model.embed_tokens" && same)
    /// })?;
    /// # Ok(adapter)
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`AdapterError::OtherBase`] for the first weight that `is_same` rejects, or the error that `is_same` returns.
    /// All weights are then kept.
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

    /// The tokens from which on the adapter applies, if it does not apply to whole sequences, for an engine that heeds
    /// them. An adapter whose invocation was not taken cannot be [planned](Self::plan). A
    /// [`Source`](crate::pool::Source) takes what is left of it.
    #[doc(alias = "aLoRA")]
    pub fn take_invocation(&mut self) -> Option<Invocation> {
        self.config.invocation.take()
    }

    /// What has not been taken.
    pub(crate) fn invocation(&self) -> Option<&Invocation> {
        self.config.invocation.as_ref()
    }

    /// The adapted modules, sorted by path.
    pub fn modules(&self) -> &[Module] {
        &self.modules
    }

    /// The stacked expert factors, sorted by path.
    pub fn stacks(&self) -> &[Stack] {
        &self.stacks
    }

    /// The trained rows of the embedding and of the head.
    #[doc(alias = "trainable_token_indices")]
    #[doc(alias = "modules_to_save")]
    pub fn trained_rows(&self) -> &[TrainedRows] {
        &self.rows
    }

    /// The largest rank of all modules. It does not include stacks; see
    /// [`SlotImage::max_rank`](super::SlotImage::max_rank).
    #[doc(alias = "max_lora_rank")]
    pub fn max_rank(&self) -> usize {
        self.modules.iter().map(Module::rank).max().unwrap_or(0)
    }

    fn assemble(mut config: Config, tensors: impl IntoIterator<Item = files::Stored>) -> Result<Self, AdapterError> {
        let mut pairs: BTreeMap<String, Pair> = BTreeMap::new();
        let mut base_weights = Vec::new();
        let (mut rows, mut whole): (BTreeMap<String, Factor>, BTreeMap<String, Factor>) = Default::default();
        let mut first: Option<(TensorName, Option<String>)> = None;
        let mut expect_one = |name: &TensorName, adapter: &Option<String>| {
            let (other, of_other) = first.get_or_insert_with(|| (name.clone(), adapter.clone()));
            let (tensor, other) = (name.clone(), other.clone());
            if of_other == adapter { Ok(()) } else { Err(AdapterError::Adapters { tensor, other }) }
        };
        for (name, tensor) in tensors {
            match names::parse(&name)? {
                Named::Factor(key) => {
                    expect_one(&name, &key.adapter)?;
                    let half = Half { name, tensor: tensor?, kind: key.kind };
                    pairs.entry(key.module).or_default().insert(key.side, half)?;
                }
                Named::Rows(path, adapter) => {
                    expect_one(&name, &adapter)?;
                    if let Some(same) = rows.insert(path, Factor::new(name.clone(), tensor?)?) {
                        return Err(AdapterError::Duplicate { tensor: name, other: same.name });
                    }
                }
                Named::BaseWeight(path) if config.place_saved(&path).is_some() => {
                    if let Some(same) = whole.insert(path, Factor::new(name.clone(), tensor?)?) {
                        return Err(AdapterError::Duplicate { tensor: name, other: same.name });
                    }
                }
                Named::BaseWeight(path) => base_weights.push(BaseWeight { path, name, tensor: tensor? }),
            }
        }
        config.check_work(pairs.keys())?;
        config.settle_layers(pairs.keys());
        let work = Work::new(pairs.len());
        let (mut modules, mut stacks, mut empty) = (Vec::new(), Vec::new(), Vec::new());
        for (path, pair) in pairs {
            match pair.finish(path, &config, &work)? {
                Finished::Module(module) => modules.push(module),
                Finished::Stack(stack) => stacks.push(stack),
                Finished::Empty(stack) => empty.push(stack),
            }
        }
        let of_modules = modules.iter().map(|module| (module.path(), module.kind, &module.a.name));
        let of_stacks = stacks.iter().chain(&empty).map(|stack| (&*stack.path, ModuleKind::Linear, &stack.a.0));
        let of_rows = rows.iter().chain(&whole).map(|(path, rows)| (&**path, ModuleKind::Embedding, &rows.name));
        config.check_invoked(of_modules.chain(of_stacks).chain(of_rows))?;
        config.check_tied(&modules, &work)?;
        if modules.is_empty() && stacks.is_empty() && rows.is_empty() && whole.is_empty() {
            return Err(AdapterError::Empty);
        }
        let mut rows = trained_rows(rows, &config)?;
        rows.append(&mut whole_modules(whole, &config)?);
        Ok(Self { id: unique(), config, modules, stacks, empty, base_weights, rows, orientation: None })
    }
}

/// Rows with the ids that the configuration has for them.
fn trained_rows(rows: BTreeMap<String, Factor>, config: &Config) -> Result<Vec<TrainedRows>, AdapterError> {
    let mut places = Vec::new();
    let with_ids = rows.into_iter().map(|(path, rows)| {
        let rejected = |rows: Factor, reason| Err(AdapterError::Rows { tensor: rows.name, reason });
        let Some((place, ids)) = config.token_ids_of(&path) else {
            return rejected(rows, "`trainable_token_indices` does not have their module, or has it twice");
        };
        if ids.len() != rows.rows {
            return rejected(rows, "`trainable_token_indices` has another number of ids");
        }
        places.push(place);
        let mut sorted: Vec<_> = ids.iter().copied().zip(0..).collect();
        sorted.sort_unstable();
        let (ids, places) = sorted.into_iter().unzip();
        Ok(TrainedRows { path, ids, places, rows, is_whole: false, is_tied: true, needs_tied: false })
    });
    let mut rows = with_ids.collect::<Result<Vec<_>, _>>()?;
    let is_without = |(place, (_, ids)): &(usize, &(_, Vec<u32>))| !ids.is_empty() && !places.contains(place);
    for (_, (module, ids)) in config.token_ids.iter().enumerate().filter(is_without) {
        // PEFT saves the rows of a tied head with those of the embedding.
        let module = module.as_deref().unwrap_or("embed_tokens");
        let are_same = |rows: &&mut TrainedRows| {
            names::is_embedding(&rows.path) && config.token_ids_of(&rows.path).is_some_and(|(_, same)| same == ids)
        };
        match rows.iter_mut().find(are_same).filter(|_| names::is_head(module)) {
            Some(rows) => rows.needs_tied = true,
            None => return Err(AdapterError::NoRows { module: module.to_owned(), ids: ids.len() }),
        }
    }
    Ok(rows)
}

/// The matrices of the modules that the configuration names.
fn whole_modules(whole: BTreeMap<String, Factor>, config: &Config) -> Result<Vec<TrainedRows>, AdapterError> {
    let places: Vec<_> = whole.keys().filter_map(|path| config.place_saved(path)).collect();
    if let Some((_, module)) = config.saved.iter().enumerate().find(|(place, _)| !places.contains(place)) {
        return Err(AdapterError::NoWeight { module: module.clone() });
    }
    let rows = whole.into_iter().map(|(path, rows)| {
        let ids = (0..).take(rows.rows).collect();
        let places = (0..rows.rows).collect();
        TrainedRows { path, ids, places, rows, is_whole: true, is_tied: config.ties, needs_tied: false }
    });
    Ok(rows.collect())
}

/// The factors of a module, while tensors are being collected.
#[derive(Default)]
struct Pair {
    a: Option<Half>,
    b: Option<Half>,
}

struct Half {
    name: TensorName,
    tensor: Tensor,
    /// Must agree for A and B.
    kind: ModuleKind,
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

    fn finish(self, path: String, config: &Config, work: &Work) -> Result<Finished, AdapterError> {
        let (a, b, kind) = match (self.a, self.b) {
            (Some(a), Some(b)) if a.kind == b.kind => ((a.name, a.tensor), (b.name, b.tensor), a.kind),
            (Some(a), Some(b)) => return Err(AdapterError::Unpaired { tensor: a.name, other: b.name }),
            (Some(a), None) => return Err(AdapterError::MissingFactor { tensor: a.name, missing: 'B' }),
            (None, Some(b)) => return Err(AdapterError::MissingFactor { tensor: b.name, missing: 'A' }),
            (None, None) => return Err(AdapterError::Empty),
        };
        let tensors = [&a.1, &b.1];
        if !names::is_parameter(&path) {
            config.check_target(&path, kind, work)?;
        }
        if names::is_of_experts(&path) && tensors.iter().all(|tensor| tensor.is_empty()) {
            return Ok(Finished::Empty(Stack { path, a, b }));
        }
        if kind == ModuleKind::Linear && names::is_stack(&path, tensors.map(|tensor| tensor.shape().len())) {
            return Ok(Finished::Stack(Stack { path, a, b }));
        }
        if let Some((tensor, _)) = [&a, &b].into_iter().find(|(_, tensor)| tensor.shape() == [0]) {
            return Err(AdapterError::Ungathered { tensor: tensor.clone() });
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
        let scaling = config.scaling(&path, rank, &a.name, work)?;
        Ok(Finished::Module(Module { path, kind, scaling, a, b }))
    }
}
