//! Adapters as PEFT stores them, and what they become in a slot.
//!
//! [`Adapter::open`] reads `adapter_config.json` and the headers of the weight files and refuses, by name, whatever it cannot
//! serve exactly. [`Adapter::plan`] finds the adapter's place in a [`ModelSpec`] and what this rank needs of it;
//! [`SlotImage::write_to`] then reads the weights, once. Not for training, merging into base weights, or residency.
//!
//! ```no_run
//! # use aril::{DType, adapter::{Adapter, AdapterError}, model::ModelSpec};
//! # fn pack(model: &ModelSpec) -> Result<Vec<u8>, AdapterError> {
//! let adapter = Adapter::open("adapters/pirate")?;
//! let image = adapter.plan(model, DType::BF16)?;
//! let mut block = vec![0; image.bytes()];
//! image.write_to(&mut block)?;
//! # Ok(block)
//! # }
//! ```
//!
//! Invariant: every tensor of an adapter is in its modules or was refused, and every module of it is in a plan or was refused.
//!
//! The scaling of a module is α/r, or α/√r with `use_rslora`. Here r is always the rank of the module's own tensors: `r` and
//! `rank_pattern` of the configuration only repeat it, and files exist in which they do not. α has no default: without
//! `lora_alpha` an adapter is refused.

mod config;
mod error;
mod files;
mod image;
pub mod layout;
mod names;
mod rectangle;
mod tensor;

use std::{collections::BTreeMap, path::Path};

pub use error::AdapterError;
pub use image::{ImageEntry, SlotImage};
pub use tensor::{Tensor, TensorName};

use self::{config::Config, names::Side, rectangle::Rectangle, tensor::Factor};
use crate::{
    DType,
    model::{MAX_RANK, ModelSpec, Target},
};

/// An adapter: parsed, checked and mapped from its files, its weights not read yet.
#[derive(Debug)]
#[doc(alias = "PeftModel")]
pub struct Adapter {
    modules: Vec<Module>,
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
    /// The files stay mapped: they must not be changed or truncated while the adapter lives. (Replacing one by renaming another
    /// over it, as downloaders do, is fine.)
    ///
    /// # Errors
    /// If a file is missing, unreadable or malformed, or if anything in it is not supported.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self, AdapterError> {
        let dir = dir.as_ref();
        let config = Config::parse(&files::config(dir)?)?;
        Self::assemble(&config, files::tensors(dir)?)
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
        Self::assemble(&config, tensors.into_iter().map(named))
    }

    /// The adapted modules, sorted by path.
    pub fn modules(&self) -> &[Module] {
        &self.modules
    }

    /// The largest rank of any module.
    #[doc(alias = "max_lora_rank")]
    pub fn max_rank(&self) -> usize {
        self.modules.iter().map(Module::rank).max().unwrap_or(0)
    }

    /// What the adapter takes in a slot of `model` on this tensor-parallel rank, its weights in `dtype`.
    ///
    /// Any subset of the model's modules will do, each with a rank of its own.
    ///
    /// # Errors
    /// If a module has no place in the model or shares it with another, or a factor's shape is not the model's.
    pub fn plan(&self, model: &ModelSpec, dtype: DType) -> Result<SlotImage<'_>, AdapterError> {
        let mut image = SlotImage::new(dtype, model);
        let mut taken: BTreeMap<usize, &Module> = BTreeMap::new();
        for module in &self.modules {
            let first_new = image.entries().len();
            module.place(locate(model, &module.path)?, model, &mut image)?;
            for entry in &image.entries()[first_new..] {
                if let Some(other) = taken.insert(entry.entry, module) {
                    return Err(AdapterError::Overlap { module: module.path.clone(), other: other.path.clone() });
                }
            }
        }
        Ok(image)
    }

    fn assemble(config: &Config, tensors: impl IntoIterator<Item = files::Stored>) -> Result<Self, AdapterError> {
        let mut pairs: BTreeMap<String, Pair> = BTreeMap::new();
        for (name, tensor) in tensors {
            let Some(key) = names::parse(&name)? else { continue };
            let half = Half { factor: Factor::new(name, tensor?)?, of: (key.kind, key.adapter) };
            pairs.entry(key.module).or_default().insert(key.side, half)?;
        }
        if pairs.is_empty() {
            return Err(AdapterError::Empty);
        }
        let modules = pairs.into_iter().map(|(path, pair)| pair.finish(path, config)).collect::<Result<_, _>>()?;
        Ok(Self { modules })
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

    /// Puts what this rank needs of the factors into the image. The target alone decides what shapes they must have.
    fn place<'a>(&'a self, target: Target, model: &ModelSpec, image: &mut SlotImage<'a>) -> Result<(), AdapterError> {
        let rank = self.rank();
        match target {
            Target::Linear { entry, input, output } => {
                self.a.expect_shape(rank, input.whole)?;
                self.b.expect_shape(output.whole, rank)?;
                let a = image.place(Rectangle::linear_a(&self.a, input.range()));
                let b = image.place(Rectangle::b(&self.b, output.range()));
                image.push(entry, rank, self.scaling, a, b);
            }
            Target::Embedding { entry, vocab, hidden } => {
                self.a.expect_shape(rank, vocab)?;
                self.b.expect_shape(hidden, rank)?;
                let a = image.place(Rectangle::embedding_a(&self.a));
                let b = image.place(Rectangle::b(&self.b, 0..hidden));
                image.push(entry, rank, self.scaling, a, b);
            }
            Target::Fused(layer) => {
                let slices: Vec<_> = model.fused(layer).collect();
                let [(_, input, _), ..] = slices[..] else { return Ok(()) };
                self.a.expect_shape(rank, input.whole)?;
                self.b.expect_shape(slices.iter().map(|(_, _, output)| output.whole).sum(), rank)?;
                let a = image.place(Rectangle::linear_a(&self.a, input.range()));
                let mut first_row = 0;
                for (entry, _, output) in slices {
                    let rows = first_row + output.start..first_row + output.start + output.len;
                    let b = image.place(Rectangle::b(&self.b, rows));
                    image.push(entry, rank, self.scaling, a, b);
                    first_row += output.whole;
                }
            }
        }
        Ok(())
    }
}

/// Finds what a path stands for: the model's module of that path, else its only module of another spelling of it.
fn locate(model: &ModelSpec, module: &str) -> Result<Target, AdapterError> {
    if let Some(target) = model.target(module) {
        return Ok(target);
    }
    let mut places: Vec<_> = names::spellings(module).filter_map(|path| Some((model.target(&path)?, path))).collect();
    match (places.pop(), places.is_empty()) {
        (None, _) => Err(AdapterError::NoPlace { module: module.to_owned() }),
        (Some((target, _)), true) => Ok(target),
        (Some(last), false) => {
            places.push(last);
            let places = places.into_iter().map(|(_, path)| path).collect();
            Err(AdapterError::Ambiguous { module: module.to_owned(), places })
        }
    }
}

/// The factors of a module, as they are found.
#[derive(Default)]
struct Pair {
    a: Option<Half>,
    b: Option<Half>,
}

struct Half {
    factor: Factor,
    /// What both halves must have in common: the module's kind and, in some state dicts, the adapter's name.
    of: (ModuleKind, Option<String>),
}

impl Pair {
    fn insert(&mut self, side: Side, half: Half) -> Result<(), AdapterError> {
        let place = match side {
            Side::A => &mut self.a,
            Side::B => &mut self.b,
        };
        if let Some(same) = place {
            return Err(AdapterError::Duplicate { tensor: half.factor.name, other: same.factor.name.clone() });
        }
        *place = Some(half);
        Ok(())
    }

    fn finish(self, path: String, config: &Config) -> Result<Module, AdapterError> {
        let (a, b, kind) = match (self.a, self.b) {
            (Some(a), Some(b)) if a.of == b.of => (a.factor, b.factor, a.of.0),
            (Some(a), Some(b)) => return Err(AdapterError::Unpaired { tensor: a.factor.name, other: b.factor.name }),
            (Some(a), None) => return Err(AdapterError::MissingFactor { tensor: a.factor.name, missing: 'B' }),
            (None, Some(b)) => return Err(AdapterError::MissingFactor { tensor: b.factor.name, missing: 'A' }),
            (None, None) => return Err(AdapterError::Empty),
        };
        let rank = a.rows;
        if rank != b.cols {
            let (a_cols, b_rows, b_rank) = (a.cols, b.rows, b.cols);
            return Err(AdapterError::RankMismatch { tensor: a.name, a_rank: rank, a_cols, b_rows, b_rank });
        }
        if !(1..=MAX_RANK).contains(&rank) {
            return Err(AdapterError::Rank { tensor: a.name, rank });
        }
        let scaling = config.scaling(&path, rank)?;
        Ok(Module { path, kind, scaling, a, b })
    }
}
