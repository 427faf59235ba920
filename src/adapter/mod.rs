//! Adapters as PEFT stores them, and what they become in a slot.
//!
//! [`Adapter::open`] maps the files of a directory and [`Adapter::read`] copies them; [`Adapter::from_safetensors`] takes the bytes of
//! such files and [`Adapter::from_tensors`] tensors. All of them read `adapter_config.json` and the tensors' names and shapes, and
//! refuse, by name, whatever cannot be served exactly. [`Adapter::plan`] finds the adapter's place in a [`Model`] and what this
//! rank needs of it; [`SlotImage::write_to`] then reads the weights, once. Not for training, merging into base weights, or residency.
//!
//! ```no_run
//! # use aril::{DType, adapter::{Adapter, AdapterError}, model::Model};
//! # fn pack(model: &Model) -> Result<Vec<u8>, AdapterError> {
//! let adapter = Adapter::read("adapters/pirate")?;
//! let image = adapter.plan(model, DType::BF16)?;
//! let mut block = vec![0; image.bytes()];
//! image.write_to(&mut block)?;
//! # Ok(block)
//! # }
//! ```
//!
//! Invariant: every tensor of an adapter is in its modules and stacks, is a base weight, or was refused, and each of those is in a plan
//! or was refused. Those without elements are in none, and only for what experts without a gate do not have.
//!
//! # What PEFT does
//!
//! An adapter has the effect that it has in PEFT 0.21, or it is refused. For `adapter_config.json` this means:
//!
//! | field | rule |
//! |---|---|
//! | `lora_alpha`, `alpha_pattern`, `use_rslora` | The scaling of a module is α/r, or α/√r. `lora_alpha` is required. |
//! | `r`, `rank_pattern` | The factors of a module must have this rank. PEFT does not load others. |
//! | `target_modules`, `exclude_modules`, `layers_to_transform`, `layers_pattern` | The factors must be of modules that these fields select. PEFT drops others without an error. `target_modules: null` needs `target_parameters`; PEFT would choose by the model's type. `layers_pattern` must be plain names. |
//! | `target_parameters` | The same for parameters that hold all experts. |
//! | patterns in these fields | Python's `re`. Constructs that Python lacks, or that our engine reads differently, are refused: POSIX classes, set operators, `\<`, `\N{…}`, inline flags, possessive quantifiers. A configuration may have 64 regular expressions, besides any number of plain paths; their compiled size and their work on all modules are bounded. |
//! | `modules_to_save`, `bias`, `use_dora` and others | Refused if they switch anything on. So is an unknown field, unless it is null, false or empty. |
//!
//! These differ from PEFT on purpose:
//!
//! - If `r`, `target_modules` or `target_parameters` is absent, the tensors decide. PEFT uses defaults. Trainers that send adapters from
//!   memory often write only `peft_type` and `lora_alpha`.
//! - With `"target_modules": "all-linear"`, factors of `lm_head` or of an embedding are refused, because PEFT drops them. A head named
//!   `unembed_tokens` is served: the trainers that write this name train it.
//! - A key may carry wrappers (`base_model.model`, `module`, `_orig_mod`, FSDP's), the adapter's name, or a model's outer names from
//!   another version or framework, and may lack them. PEFT drops every key that is not exactly its own. A module that the model lacks
//!   is refused, and so are an embedding's factors for a linear layer and a linear layer's for an embedding.
//! - PEFT saves the `base_layer.weight` of an embedding or a head with every adapter of it, and loads it over the base model's weight.
//!   Such an adapter is refused until the engine has compared the two: [`Adapter::compare_base_weights`].
//! - `peft_type` may be lower case.
//!
//! # Experts
//!
//! The factors of a mixture of experts come expert by expert, or all in one pair of tensors, in several forms; those are [`Stack`]s
//! until a model says how many experts there are. Each of these is read, of the experts of a path that the model has, each `{proj}`
//! one of `gate_proj`, `up_proj`, `down_proj` and `gate_up_proj`, or of `w1`, `w3` and `w2`:
//!
//! | form | keys | A | B | made by |
//! |---|---|---|---|---|
//! | an expert's | `experts.{e}.{proj}` | `[r, in]` | `[out, r]` | PEFT on lists of modules; prime-rl |
//! | stacked | `experts.{proj}` | `[E, r, in]` | `[E, out, r]` | Tinker, Megatron-Bridge, SkyRL; E is 1 where all share one |
//! | fms | `block_sparse_moe.w1` | `[E, in, r]` or as stacked | `[E, r, out]` or as stacked | fms-acceleration |
//! | side by side | `shared_experts.{proj}` | `[r, in]`; of down `[r, E in]` | `[E out, r]`; of down `[out, r]` | Inkling's shared experts |
//! | parameters | `experts`, `experts.base_layer` | `[E r, in]`, by expert | `[out, r E]`, expert fastest | PEFT's `target_parameters` |
//!
//! Of a parameter the factors may also be those of the transposed delta, with `in` and `out` exchanged ([`Orientation`]). What
//! cannot be told from `peft_version`, `target_parameters` and the shapes is refused. A stacked gate_up may have an A for each of its
//! halves, one after the other. Gate and up in one are taken apart as the checkpoint has them
//! ([`Experts::stored_halves`](crate::model::Experts::stored_halves)).
//!
//! However an adapter spells it, its block is the same: factors that all experts have alike are there once
//! ([`SlotImage::shared`]), and only those of the experts that this rank holds.

mod config;
mod error;
mod experts;
mod files;
mod image;
pub mod layout;
mod names;
mod pattern;
mod rectangle;
mod shown;
mod tensor;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

pub use error::AdapterError;
pub use experts::Orientation;
pub use image::{ImageEntry, MIN_STAGING_BYTES, Piece, SharedEntry, SlotImage};
pub use tensor::{Tensor, TensorName};

use self::{
    config::Config,
    experts::{Layer, Source},
    files::Access,
    names::{InExperts, Named, Side},
    rectangle::Rectangle,
    tensor::{Factor, Storage, Stored},
};
use crate::{
    DType,
    model::{ExpertsId, MAX_RANK, Model, Target},
};

/// An adapter: parsed and checked, its weights not converted yet.
#[derive(Debug)]
#[doc(alias = "PeftModel")]
pub struct Adapter {
    config: Config,
    modules: Vec<Module>,
    stacks: Vec<Stack>,
    /// Factors without elements, which some write for a module that experts do not have. Only a model says whether they do not.
    empty: Vec<Stack>,
    base_weights: Vec<BaseWeight>,
    orientation: Option<Orientation>,
}

/// A weight of the base model that an adapter brings: its embedding's or its head's.
#[derive(Debug)]
pub struct BaseWeight {
    path: String,
    name: TensorName,
    tensor: Tensor,
}

/// One adapted module of an adapter.
#[derive(Debug)]
pub struct Module {
    path: String,
    kind: ModuleKind,
    scaling: f32,
    a: Factor,
    b: Factor,
}

/// Factors of several experts in one pair of tensors. Only a model says how many experts there are, and so of which rank they are.
#[derive(Debug)]
pub struct Stack {
    path: String,
    a: (TensorName, Tensor),
    b: (TensorName, Tensor),
}

/// What an adapter takes a module for.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum ModuleKind {
    /// A matrix multiplication: `lora_A`, `lora_B`.
    Linear,
    /// A table of rows: `lora_embedding_A`, `lora_embedding_B`.
    Embedding,
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

    /// The largest rank of any module; of stacks, [`SlotImage::max_rank`] knows it.
    #[doc(alias = "max_lora_rank")]
    pub fn max_rank(&self) -> usize {
        self.modules.iter().map(Module::rank).max().unwrap_or(0)
    }

    /// What the adapter takes in a slot of `model` on this tensor-parallel rank, its weights in `dtype`.
    ///
    /// Any subset of the model's modules will do, each with a rank of its own. Of experts, it reads as much as it takes to see
    /// whether they have the same factors.
    ///
    /// # Errors
    /// If a module has no place in the model or shares it with another, a factor's shape is not the model's, stacked experts can
    /// be read in more than one way, or there are [base weights](Self::base_weights) that were not compared.
    pub fn plan(&self, model: &Model, dtype: DType) -> Result<SlotImage<'_>, AdapterError> {
        if let Some(weight) = self.base_weights.first() {
            return Err(AdapterError::BaseWeight { tensor: weight.name.clone() });
        }
        let mut image = SlotImage::new(dtype, model);
        let mut taken: BTreeMap<usize, &Module> = BTreeMap::new();
        let mut layers: BTreeMap<ExpertsId, Layer<'_, '_>> = BTreeMap::new();
        let mut layer = |id, source, at: &InExperts| {
            layers.entry(id).or_insert_with(|| Layer::new(&model[id], &self.config)).add(source, at)
        };
        for module in &self.modules {
            let first_new = image.entries().len();
            match locate(model, &module.path)? {
                (Place::Experts(id, at), _) => {
                    module.expect_kind(ModuleKind::Linear)?;
                    layer(id, module.source(), &at)?;
                }
                (Place::Module(target), _) => module.place(target, model, &mut image)?,
            }
            for entry in &image.entries()[first_new..] {
                if let Some(other) = taken.insert(entry.entry, module) {
                    return Err(AdapterError::Overlap { module: module.path.clone(), other: other.path.clone() });
                }
            }
        }
        for stack in self.stacks.iter().chain(&self.empty) {
            match locate(model, &stack.path)? {
                (Place::Experts(id, at), _) => layer(id, stack.source(), &at)?,
                (Place::Module(_), _) => return Err(stack.not_matrix()),
            }
        }
        layers.into_values().try_for_each(|layer| layer.place(self.orientation, &mut image))?;
        Ok(image)
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

impl Module {
    /// The module's path in the model, such as `model.layers.0.self_attn.q_proj`, as the adapter spells it.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// What the adapter takes the module for.
    pub fn kind(&self) -> ModuleKind {
        self.kind
    }

    /// The rank of the factors, at least 1.
    pub fn rank(&self) -> usize {
        self.a.rows
    }

    /// α/r, or α/√r for rank-stabilised adapters.
    pub fn scaling(&self) -> f32 {
        self.scaling
    }

    /// Columns of A: the module's whole, unsharded input features, or an embedding's rows.
    pub fn in_features(&self) -> usize {
        self.a.cols
    }

    /// Rows of B: the module's whole, unsharded output features.
    pub fn out_features(&self) -> usize {
        self.b.rows
    }

    /// Reads A, row-major `[rank, in_features]`.
    pub fn a_f32(&self) -> Vec<f32> {
        self.a.tensor.to_f32()
    }

    /// Reads B, row-major `[out_features, rank]`.
    pub fn b_f32(&self) -> Vec<f32> {
        self.b.tensor.to_f32()
    }

    /// The module's path as the model spells it, or that of the fused module of a layer: of the model's module that
    /// [`plan`](Adapter::plan) gives the factors to.
    ///
    /// # Errors
    /// If the module has no place in the model, or several.
    pub fn path_in(&self, model: &Model) -> Result<String, AdapterError> {
        locate(model, &self.path).map(|(_, path)| path)
    }

    fn source(&self) -> Source<'_> {
        Source::new(&self.path, [self.a.stored(), self.b.stored()])
    }

    /// Puts what this rank needs of the factors into the image. The target alone decides what they must be.
    fn place<'a>(&'a self, target: Target, model: &Model, image: &mut SlotImage<'a>) -> Result<(), AdapterError> {
        self.expect_kind(match target {
            Target::Linear { .. } | Target::Fused(_) => ModuleKind::Linear,
            Target::Embedding { .. } => ModuleKind::Embedding,
        })?;
        let rank = self.rank();
        match target {
            Target::Linear { entry, input, output } => {
                self.a.expect_shape(rank, input.whole)?;
                self.b.expect_shape(output.whole, rank)?;
                let a = image.place(Rectangle::linear_a(self.a.view().columns(input.range())));
                let b = image.place(Rectangle::b(self.b.view().rows(output.range())));
                image.push(entry, rank, self.scaling, a, b);
            }
            Target::Embedding { entry, vocab, hidden } => {
                self.a.expect_shape(rank, vocab)?;
                self.b.expect_shape(hidden, rank)?;
                let a = image.place(Rectangle::embedding_a(self.a.view()));
                let b = image.place(Rectangle::b(self.b.view()));
                image.push(entry, rank, self.scaling, a, b);
            }
            Target::Fused(layer) => {
                let slices: Vec<_> = model.fused(layer).collect();
                let [(_, input, _), ..] = slices[..] else { return Ok(()) };
                self.a.expect_shape(rank, input.whole)?;
                self.b.expect_shape(slices.iter().map(|(_, _, output)| output.whole).sum(), rank)?;
                let a = image.place(Rectangle::linear_a(self.a.view().columns(input.range())));
                let mut first_row = 0;
                for (entry, _, output) in slices {
                    let rows = first_row + output.start..first_row + output.start + output.len;
                    let b = image.place(Rectangle::b(self.b.view().rows(rows)));
                    image.push(entry, rank, self.scaling, a, b);
                    first_row += output.whole;
                }
            }
        }
        Ok(())
    }
}

impl Module {
    /// Fails unless the model's module is of the kind that the factors are of.
    fn expect_kind(&self, want: ModuleKind) -> Result<(), AdapterError> {
        if self.kind == want {
            return Ok(());
        }
        let name = |kind| match kind {
            ModuleKind::Linear => "a linear layer",
            ModuleKind::Embedding => "an embedding",
        };
        let (tensor, module) = (self.a.name.clone(), self.path.clone());
        Err(AdapterError::Kind { tensor, module, got: name(self.kind), want: name(want) })
    }
}

impl BaseWeight {
    /// The path of the embedding or head, such as `model.embed_tokens`, as the adapter spells it.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The weight.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

impl Stack {
    /// The path of a module of all experts, such as `model.layers.0.mlp.experts.down_proj`, or, with PEFT's `target_parameters`, of
    /// the experts, less or more some `base_layer`; as the adapter spells it.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The shape of A.
    pub fn a_shape(&self) -> &[usize] {
        self.a.1.shape()
    }

    /// The shape of B.
    pub fn b_shape(&self) -> &[usize] {
        self.b.1.shape()
    }

    fn source(&self) -> Source<'_> {
        Source::new(&self.path, [&self.a, &self.b].map(|(name, tensor)| Stored { name, tensor }))
    }

    /// For one that is where the model has something else than experts.
    fn not_matrix(&self) -> AdapterError {
        let (tensor, a) = &self.a;
        AdapterError::NotMatrix { tensor: tensor.clone(), shape: a.shape().to_vec() }
    }
}

/// What a path stands for.
enum Place {
    Module(Target),
    Experts(ExpertsId, InExperts),
}

/// Finds what a path stands for, and how the model spells it: the model's module of that path, else its only module of another
/// spelling of it.
fn locate(model: &Model, module: &str) -> Result<(Place, String), AdapterError> {
    if let Some(place) = place(model, module) {
        return Ok((place, module.to_owned()));
    }
    let mut places: Vec<_> = names::spellings(module).filter_map(|path| Some((place(model, &path)?, path))).collect();
    match (places.pop(), places.is_empty()) {
        (None, _) => Err(AdapterError::NoPlace { module: module.to_owned() }),
        (Some(place), true) => Ok(place),
        (Some(last), false) => {
            places.push(last);
            let places = places.into_iter().map(|(_, path)| path).collect();
            Err(AdapterError::Ambiguous { module: module.to_owned(), places })
        }
    }
}

fn place(model: &Model, path: &str) -> Option<Place> {
    if let Some(target) = model.target(path) {
        return Some(Place::Module(target));
    }
    let at = names::in_experts(path)?;
    Some(Place::Experts(model.experts_at(&at.experts)?, at))
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
