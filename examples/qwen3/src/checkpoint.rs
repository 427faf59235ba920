//! The base model's weights: safetensors in 16 or 32 bits, or 4 or 8 bits packed by compressed-tensors, in one file or
//! several with an index.
//!
//! Linear layers are unpacked while they are read. Experts stay as stored, because there are many of them. Files are
//! mapped and tensors converted one at a time, so loading needs no second copy of the model.
//!
//! Invariants: every tensor of the files is read, or the checkpoint is rejected. No size comes from a configuration
//! that the tensors contradict.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    iter,
    ops::Range,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use aril::{
    DType, Element,
    adapter::{
        Adapter, BaseWeight, ImageEntry, Module, ModuleKind, TrainedRows,
        layout::{B, LinearA},
    },
    model::{ExpertsId, Model, ProjectionSite},
};
use half::{bf16, f16};
use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use crate::{
    config::Config,
    error::{Context, Result, bail},
    experts::{ExpertWeights, ExpertsShape, Packed, Packing},
    files,
    model::held,
};

/// The largest index in MiB.
const MAX_INDEX_MIB: u64 = 64;

/// A checkpoint's tensors, mapped.
#[derive(Debug)]
pub struct Checkpoint {
    /// The files.
    pub shards: Vec<Shard>,
    /// The tensors of all files, by name.
    pub tensors: BTreeMap<String, Tensor>,
    /// The bytes of the tensors that have been read, by all ranks together.
    pub read_bytes: AtomicU64,
}

/// A file of weights, mapped.
#[derive(Debug)]
pub struct Shard {
    /// Where it was opened.
    pub path: PathBuf,
    /// All of the file.
    pub bytes: Mmap,
}

/// Where a tensor is, and what it holds.
#[derive(Debug)]
pub struct Tensor {
    /// Index into [`Checkpoint::shards`].
    pub shard: usize,
    /// The element type in the file.
    pub dtype: Dtype,
    /// The dimensions, row-major.
    pub shape: Vec<usize>,
    /// Bytes of the file.
    pub bytes: Range<usize>,
}

impl Checkpoint {
    /// Maps the weights of a model's directory: those that its index names, or `model.safetensors`.
    ///
    /// # Errors
    ///
    /// If a file is missing or not a safetensors file, or if the index and the files differ.
    pub fn open(model: &Path) -> Result<Self> {
        let index = model.join("model.safetensors.index.json");
        let single = model.join("model.safetensors");
        let mut checkpoint = Self { shards: Vec::new(), tensors: BTreeMap::new(), read_bytes: AtomicU64::new(0) };
        if single.exists() || !index.exists() {
            checkpoint.add_shard(single)?;
            return Ok(checkpoint);
        }
        let text = files::read_text(&index, MAX_INDEX_MIB)?;
        let Index { weight_map } = serde_json::from_str(&text).context(index.display())?;
        for file in weight_map.values().collect::<BTreeSet<_>>() {
            if Path::new(file).file_name() != Some(OsStr::new(file)) {
                bail!("{}: `{file}` is not a file beside it", index.display());
            }
            checkpoint.add_shard(model.join(file))?;
        }
        for (name, file) in &weight_map {
            let found = checkpoint.tensors.get(&text_name(name));
            let found = found.map(|tensor| &checkpoint.shards[tensor.shard].path);
            if found != Some(&model.join(file)) {
                bail!("{}: tensor `{name}` is not in `{file}`", index.display());
            }
        }
        Ok(checkpoint)
    }

    fn add_shard(&mut self, path: PathBuf) -> Result<()> {
        let file = files::open(&path)?;
        // SAFETY: nobody changes the checkpoint while it is mapped (documented for `--model`).
        let bytes = unsafe { Mmap::map(&file) }.context(path.display())?;
        for (name, view) in SafeTensors::deserialize(&bytes).context(path.display())?.iter() {
            let start = view.data().as_ptr().addr() - bytes.as_ptr().addr();
            let tensor = Tensor {
                shard: self.shards.len(),
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                bytes: start..start + view.data().len(),
            };
            if self.tensors.insert(text_name(name), tensor).is_some() {
                bail!("{}: tensor `{name}` is in another file too", path.display());
            }
        }
        self.shards.push(Shard { path, bytes });
        Ok(())
    }

    /// Refuses a configuration whose sizes differ from the tensors', before anything is allocated by these sizes. Also
    /// refuses a tied head stored with other values than the embedding, which some versions of transformers use and
    /// some do not.
    ///
    /// # Errors
    ///
    /// If a size differs, or such a head has other values: with the field and the tensor.
    pub fn check(&self, config: &Config) -> Result<()> {
        let Config { vocab, hidden, intermediate, heads, .. } = *config;
        // The rows of a weight, packed or not.
        let rows = |path: String| ["weight", "weight_packed"].map(|name| (format!("{path}.{name}"), 0));
        let embed = |dim| [("model.embed_tokens.weight".to_owned(), dim)];
        self.expect_size("vocab_size", vocab, &embed(0))?;
        self.expect_size("hidden_size", hidden, &embed(1))?;
        for layer in 0..config.layers {
            let norm = format!("model.layers.{layer}.input_layernorm.weight");
            if !self.tensors.contains_key(&norm) {
                let layers = config.layers;
                bail!("config.json: `num_hidden_layers` is {layers}, but {}: tensor `{norm}` is missing", self.files());
            }
            if let Some(heads) = config.delta_net_in(layer) {
                let path = format!("model.layers.{layer}.linear_attn");
                let (qkv, values) = (heads.convolved_features(), heads.value_features());
                self.expect_size("linear_num_value_heads", heads.value, &[(format!("{path}.A_log"), 0)])?;
                self.expect_size("linear_value_head_dim", heads.value_dim, &rows(format!("{path}.norm")))?;
                let of_keys = "linear_num_key_heads`, `linear_key_head_dim` and those of values: `in_proj_qkv";
                self.expect_size(of_keys, qkv, &rows(format!("{path}.in_proj_qkv")))?;
                let of_values = "linear_num_value_heads` times `linear_value_head_dim";
                self.expect_size(of_values, values, &rows(format!("{path}.in_proj_z")))?;
                self.expect_size("linear_conv_kernel_dim", heads.taps, &[(format!("{path}.conv1d.weight"), 2)])?;
            } else {
                let path = format!("model.layers.{layer}.self_attn");
                self.expect_size("head_dim", heads.dim, &rows(format!("{path}.q_norm")))?;
                let (query, kv) = (heads.projected_features(), heads.kv_features());
                self.expect_size("num_attention_heads` times `head_dim", query, &rows(format!("{path}.q_proj")))?;
                self.expect_size("num_key_value_heads` times `head_dim", kv, &rows(format!("{path}.k_proj")))?;
            }
            let mlp = format!("model.layers.{layer}.mlp");
            let Some(moe) = config.experts_in(layer) else {
                self.expect_size("intermediate_size", intermediate, &rows(format!("{mlp}.gate_proj")))?;
                continue;
            };
            self.expect_size("num_local_experts` or `num_experts", moe.experts, &rows(format!("{mlp}.gate")))?;
            let [weight, packed] = rows(format!("{mlp}.experts.0.gate_proj"));
            let fused = (format!("{mlp}.experts.down_proj"), 2);
            self.expect_size("moe_intermediate_size", moe.intermediate, &[weight, packed, fused])?;
            let shared = rows(format!("{mlp}.shared_expert.gate_proj"));
            self.expect_size("shared_expert_intermediate_size", intermediate, &shared)?;
        }
        let [embed, head] = ["model.embed_tokens.weight", "lm_head.weight"].map(|name| self.tensors.get(name));
        if let (true, Some(embed), Some(head)) = (config.tied, embed, head)
            && (embed.dtype, &embed.shape, self.bytes(embed)) != (head.dtype, &head.shape, self.bytes(head))
        {
            let head = self.subject("lm_head.weight");
            bail!("{head} is not the embedding, which `tie_word_embeddings` in config.json says that it is");
        }
        Ok(())
    }

    /// Fails if a field differs from its dimension of the first of these tensors that exists. (If none exists, reading
    /// them fails.)
    fn expect_size(&self, field: &str, size: usize, places: &[(String, usize)]) -> Result<()> {
        let stored = |(name, dim): &(String, usize)| Some((name.clone(), *dim, &self.tensors.get(name)?.shape));
        let Some((name, dim, shape)) = places.iter().find_map(stored) else { return Ok(()) };
        if shape.get(dim) == Some(&size) {
            return Ok(());
        }
        // transformers has a default for one of them.
        let default = if (field, size) == ("head_dim", 128) { ", which is its default" } else { "" };
        bail!("config.json: `{field}` is {size}{default}, but {} is {shape:?}", self.subject(&name));
    }

    /// Whether an adapter's copy of a base weight equals the base model's, as `T`.
    ///
    /// # Errors
    ///
    /// If the model has no such module, or the checkpoint has no such weight of this shape.
    pub fn has<T: Element>(&self, weight: &BaseWeight, model: &Model, tied: bool) -> Result<bool> {
        let path = weight.path_in(model)?;
        let name = if tied { "model.embed_tokens.weight" } else { &format!("{path}.weight") };
        if self.tensors.get(name).is_none_or(|stored| stored.shape != weight.tensor().shape()) {
            return Ok(false);
        }
        let shape = weight.tensor().shape();
        let (theirs, ours) = (weight.tensor().to_f32(), self.read(name, shape, &Block::whole(shape))?);
        let round = |value: &f32| T::from_f32(*value).to_f32();
        Ok(theirs.iter().map(round).eq(ours.iter().map(round)))
    }

    fn bytes(&self, tensor: &Tensor) -> &[u8] {
        &self.shards[tensor.shard].bytes[tensor.bytes.clone()]
    }

    fn files(&self) -> String {
        self.shards.iter().map(|shard| shard.path.display().to_string()).collect::<Vec<_>>().join(", ")
    }

    /// Finds a tensor of this shape.
    fn find(&self, name: &str, shape: &[usize]) -> Result<(Dtype, &[u8])> {
        let Some(tensor) = self.tensors.get(name) else {
            bail!("{}: tensor `{name}` is missing", self.files());
        };
        if tensor.shape != shape {
            bail!("{} is {:?}, but config.json asks for {shape:?}", self.subject(name), tensor.shape);
        }
        Ok((tensor.dtype, self.bytes(tensor)))
    }

    /// Reads a block of a tensor of this shape.
    fn read(&self, name: &str, shape: &[usize], block: &Block) -> Result<Vec<f32>> {
        let (dtype, bytes) = self.find(name, shape)?;
        let width = last(shape);
        let values = match dtype {
            Dtype::BF16 => widen::<bf16>(bytes, width, block),
            Dtype::F16 => widen::<f16>(bytes, width, block),
            Dtype::F32 => widen::<f32>(bytes, width, block),
            other => bail!("{} is {other:?}; BF16, F16 and F32 are implemented", self.subject(name)),
        };
        match position(&values, |value| !value.is_finite()) {
            Some(at) => {
                bail!("{} holds {} at element {}", self.subject(name), values[at], block.place(at, width))
            }
            None => Ok(values),
        }
    }

    /// Reads a block of a tensor of this shape as `T`. Consecutive elements that are stored as `T` are not copied.
    fn read_as<T: Element>(&self, name: &str, shape: &[usize], block: &Block) -> Result<Cow<'_, [T]>> {
        let (dtype, bytes) = self.find(name, shape)?;
        let is_stored_so = matches!(
            (dtype, T::DTYPE),
            (Dtype::BF16, DType::BF16) | (Dtype::F16, DType::F16) | (Dtype::F32, DType::F32)
        );
        // Files may have tensors at odd addresses.
        let stored = bytemuck::try_cast_slice::<u8, T>(bytes).ok().filter(|_| is_stored_so);
        let Some(values) = stored else { return narrow(name, &self.read(name, shape, block)?).map(Cow::Owned) };
        let width = last(shape);
        let values = block.of(values, width);
        match position(&values, |value| !value.to_f32().is_finite()) {
            Some(at) => {
                let (value, place) = (values[at].to_f32(), block.place(at, width));
                bail!("{} holds {value} at element {place}", self.subject(name))
            }
            None => Ok(values),
        }
    }

    /// Reads a block of the three tensors of a packed matrix. Its columns are whole groups.
    fn read_packed(&self, path: &str, [rows, cols]: [usize; 2], packing: Packing, block: &Block) -> Result<Packed> {
        let [packed, scale, shape] = packed_tensors(path);
        let (group, per_word) = (packing.group, packing.per_word());
        if !cols.is_multiple_of(group) {
            bail!("{} has {cols} columns, which are not whole groups of {group}", self.subject(&packed));
        }
        let width = cols / per_word;
        let words = match self.find(&packed, &[rows, width])? {
            (Dtype::I32, bytes) => {
                let block = block.packed(per_word).scaled(size_of::<u32>());
                integers(&block.of(bytes, width * size_of::<u32>()), u32::from_le_bytes)
            }
            (other, _) => bail!("{} is {other:?}, not I32", self.subject(&packed)),
        };
        let stored: Vec<i64> = match self.find(&shape, &[2])? {
            (Dtype::I64, bytes) => integers(bytes, i64::from_le_bytes),
            (Dtype::I32, bytes) => integers(bytes, |bytes| i32::from_le_bytes(bytes).into()),
            (other, _) => bail!("{} is {other:?}, not I64", self.subject(&shape)),
        };
        if stored != [i64::try_from(rows)?, i64::try_from(cols)?] {
            bail!("{} holds {stored:?}, but config.json asks for [{rows}, {cols}]", self.subject(&shape));
        }
        Ok(Packed { packing, words, scales: self.read(&scale, &[rows, cols / group], &block.packed(group))? })
    }

    /// An existing tensor, and its file.
    fn subject(&self, name: &str) -> String {
        format!("{}: tensor `{name}`", self.shards[self.tensors[name].shard].path.display())
    }
}

/// The beginnings of the names of what a model has beside its text model: what sees images, and what drafts tokens.
const OTHER_PARTS: [&str; 2] = ["model.visual.", "mtp."];

/// The name of a tensor where a model is a text model alone.
fn text_name(name: &str) -> String {
    name.strip_prefix("model.language_model.").map_or_else(|| name.to_owned(), |rest| format!("model.{rest}"))
}

/// The integers, the scales and the shape of a packed module.
fn packed_tensors(path: &str) -> [String; 3] {
    ["packed", "scale", "shape"].map(|part| format!("{path}.weight_{part}"))
}

fn integers<V, const BYTES: usize>(bytes: &[u8], from_bytes: impl Fn([u8; BYTES]) -> V) -> Vec<V> {
    bytes.as_chunks().0.iter().map(|bytes| from_bytes(*bytes)).collect()
}

/// A block of a matrix of `width` columns, in any alignment.
fn widen<T: Element>(bytes: &[u8], width: usize, block: &Block) -> Vec<f32> {
    let bytes = block.scaled(size_of::<T>()).of(bytes, width * size_of::<T>());
    bytes.par_chunks_exact(size_of::<T>()).map(|bytes| bytemuck::pod_read_unaligned::<T>(bytes).to_f32()).collect()
}

/// The last dimension: the columns of a tensor as a matrix.
fn last(shape: &[usize]) -> usize {
    shape.last().copied().unwrap_or(1)
}

/// The rows of a matrix, and the columns of each, that a rank holds. The matrix of a tensor has its last dimension as
/// columns.
#[derive(Clone, Debug)]
pub struct Block {
    /// Ranges of rows, in the order that the rank has them in.
    pub rows: Vec<Range<usize>>,
    /// The columns of each row.
    pub cols: Range<usize>,
}

impl Block {
    pub(crate) fn whole(shape: &[usize]) -> Self {
        let (rows, cols) = shape.split_at(shape.len().saturating_sub(1));
        Self { rows: iter::once(0..rows.iter().product()).collect(), cols: 0..cols.iter().product() }
    }

    /// The block of these rows. Ranges that follow each other are one.
    fn joining(rows: impl Iterator<Item = Range<usize>>, cols: Range<usize>) -> Self {
        let mut joined: Vec<Range<usize>> = Vec::new();
        for rows in rows {
            match joined.last_mut() {
                Some(last) if last.end == rows.start => last.end = rows.end,
                _ => joined.push(rows),
            }
        }
        Self { rows: joined, cols }
    }

    /// The block of a row-major matrix of `width` columns. Consecutive elements are not copied.
    fn of<'a, V: Clone>(&self, values: &'a [V], width: usize) -> Cow<'a, [V]> {
        match &self.rows[..] {
            [rows] if self.cols == (0..width) => values[rows.start * width..rows.end * width].into(),
            rows => {
                let mut block = Vec::with_capacity(rows.iter().map(Range::len).sum::<usize>() * self.cols.len());
                for row in rows.iter().cloned().flatten() {
                    block.extend_from_slice(&values[row * width..][self.cols.clone()]);
                }
                block.into()
            }
        }
    }

    /// The index in the matrix of an element of the block.
    fn place(&self, at: usize, width: usize) -> usize {
        let (row, col) = (at / self.cols.len(), at % self.cols.len());
        self.rows.iter().cloned().flatten().nth(row).unwrap_or(0) * width + self.cols.start + col
    }

    /// The block of a matrix each of whose elements takes `parts` elements.
    fn scaled(&self, parts: usize) -> Self {
        Self { rows: self.rows.clone(), cols: self.cols.start * parts..self.cols.end * parts }
    }

    /// The block of a matrix each of whose elements is for `of` consecutive columns, which the block's columns are
    /// whole numbers of.
    fn packed(&self, of: usize) -> Self {
        Self { rows: self.rows.clone(), cols: self.cols.start / of..self.cols.end / of }
    }

    /// The block with as many more columns as make them whole groups.
    fn widened(&self, group: usize) -> Self {
        let Range { start, end } = self.cols;
        Self { rows: self.rows.clone(), cols: start / group * group..end.next_multiple_of(group) }
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The weights of a model: a checkpoint's, with or without a merged adapter.
#[derive(Debug)]
pub struct Weights<'a> {
    checkpoint: &'a Checkpoint,
    /// The form of packed modules.
    packing: Option<Packing>,
    unread: BTreeSet<&'a str>,
    /// The modules to merge, except those of experts, by the model's paths.
    modules: BTreeMap<String, &'a Module>,
    /// The trained rows to put in, by the model's paths.
    rows: BTreeMap<String, &'a TrainedRows>,
    /// The modules not merged yet.
    unmerged: BTreeSet<String>,
    /// The factors of experts to merge.
    factors: Option<Factors>,
    scale: f32,
}

impl<'a> Weights<'a> {
    /// The base model's weights.
    pub fn new(checkpoint: &'a Checkpoint, packing: Option<Packing>) -> Self {
        let is_text = |name: &&str| !OTHER_PARTS.iter().any(|part| name.starts_with(part));
        let unread = checkpoint.tensors.keys().map(String::as_str).filter(is_text).collect();
        let (modules, rows, unmerged) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Self { checkpoint, packing, unread, modules, rows, unmerged, factors: None, scale: 1.0 }
    }

    /// The weights with `scale · scaling · B A` added in `f32` to every module of the adapter, and with its trained rows.
    pub(crate) fn merged(self, adapter: &'a Adapter, model: &Model, scale: f32) -> Result<Self> {
        let mut modules = BTreeMap::new();
        for module in adapter.modules() {
            let path = module.path_in(model)?;
            if !path.split('.').any(|name| name == "experts") {
                modules.insert(path, module);
            }
        }
        let mut rows = BTreeMap::new();
        for trained in adapter.trained_rows() {
            rows.insert(trained.path_in(model)?, trained);
        }
        // A tied head has the rows of the embedding.
        for site in model.rows_ids().map(|id| &model[id]).filter(|site| site.is_tied()) {
            let head = model[site.head()].slices()[0].module();
            let of_embedding = rows.get(model[site.embedding()].module());
            if let Some(&trained) = of_embedding.filter(|rows| rows.is_tied()) {
                rows.entry(head.to_owned()).or_insert(trained);
            }
        }
        let unmerged = modules.keys().chain(rows.keys()).cloned().collect();
        Ok(Self { modules, rows, unmerged, factors: Some(Factors::new(adapter, model)?), scale, ..self })
    }

    /// A block of the weight `[out, in]` of a linear module, or `[vocab, hidden]` of an embedding.
    ///
    /// # Errors
    ///
    /// If the tensor is missing, or has another shape, or values that `T` cannot represent.
    pub fn module<T: Element>(&mut self, path: &str, shape: [usize; 2], block: &Block) -> Result<Cow<'a, [T]>> {
        self.module_from(path, path, shape, block)
    }

    /// A block of the weight of a module that is tied to another and stored under its name. Only the module's own delta
    /// is merged.
    pub(crate) fn module_from<T: Element>(
        &mut self,
        path: &str,
        stored: &str,
        shape: [usize; 2],
        block: &Block,
    ) -> Result<Cow<'a, [T]>> {
        let name = format!("{stored}.weight");
        let (module, rows) = (self.modules.get(path).copied(), self.rows.get(path).copied());
        if module.is_none() && rows.is_none() {
            return match self.packed(stored) {
                None => self.tensor(&name, &shape, block),
                Some(_) => narrow(&name, &self.matrix(stored, shape, block)?).map(Cow::Owned),
            };
        }
        let mut values = self.matrix(stored, shape, &Block::whole(&shape))?;
        module.map_or(Ok(()), |module| merge(&mut values, shape[1], module, self.scale))?;
        for (&id, row) in rows.iter().flat_map(|rows| iter::zip(rows.ids(), rows.rows())) {
            values[id as usize * shape[1]..][..shape[1]].copy_from_slice(&row);
        }
        self.unmerged.remove(path);
        narrow(&name, &block.of(&values, shape[1])).map(Cow::Owned)
    }

    /// A block of a tensor that no adapter changes.
    ///
    /// # Errors
    ///
    /// If the tensor is missing, or has another shape, or values that `T` cannot represent.
    pub fn tensor<T: Element>(&mut self, name: &str, shape: &[usize], block: &Block) -> Result<Cow<'a, [T]>> {
        let values = self.checkpoint.read_as(name, shape, block)?;
        self.note(name);
        Ok(values)
    }

    /// The weight of a norm.
    ///
    /// # Errors
    ///
    /// If the tensor is missing, or has another shape, or values that `T` cannot represent.
    pub fn norm<T: Element>(&mut self, path: &str, len: usize) -> Result<Cow<'a, [T]>> {
        self.tensor(&format!("{path}.weight"), &[len], &Block::whole(&[len]))
    }

    /// The rank's part of the weights of one projection of all experts: separate modules of each expert, each of this
    /// shape, or one tensor for all. The experts of other ranks are theirs to read.
    ///
    /// They stay packed if all are stored so, no adapter is merged and the rank's columns are whole groups.
    ///
    /// # Errors
    ///
    /// If a tensor is missing, or has another shape, or values that `T` cannot represent.
    pub fn experts<T: Element>(
        &mut self,
        path: &str,
        projection: ExpertsProjection<'_>,
        whole: [usize; 2],
        model: &Model,
        id: ExpertsId,
    ) -> Result<(ExpertsShape, ExpertWeights<'a, T>)> {
        let site = projection.site(model, id);
        let (in_features, out_features) = (site.in_features(), site.out_features());
        let (experts, held) = (model[id].num_experts(), held(&model[id]));
        let shape = ExpertsShape { experts: held.len(), out_features, in_features };
        let block = projection.block(whole, model, id);
        let modules_of = |experts: Range<usize>| {
            let of_one =
                |expert: usize| projection.modules.iter().map(move |module| format!("{path}.{expert}.{module}"));
            experts.flat_map(of_one).collect::<Vec<_>>()
        };
        for module in [modules_of(0..held.start), modules_of(held.end..experts)].concat() {
            self.ignore(&format!("{module}.weight"));
            packed_tensors(&module).iter().for_each(|name| self.ignore(name));
        }
        let modules = modules_of(held.clone());
        let stay = self.factors.is_none() && modules.iter().all(|module| self.packed(module).is_some());
        let is_whole = |packing: &Packing| block.cols == block.widened(packing.group).cols;
        if let Some(packing) = self.packing.filter(|packing| stay && is_whole(packing)) {
            let mut all = Packed { packing, words: Vec::new(), scales: Vec::new() };
            for module in &modules {
                all.append(self.read_packed(module, whole, packing, &block)?);
            }
            return Ok((shape, ExpertWeights::Packed(all)));
        }
        let fused = format!("{path}.{}", projection.fused);
        let is_fused = self.checkpoint.tensors.contains_key(&fused);
        let [rows, cols] = whole;
        let fused_shape = [experts, projection.modules.len() * rows, cols];
        let of_all = || {
            let firsts = (0..modules.len()).map(|module| (held.start * projection.modules.len() + module) * rows);
            let of_one = |first: usize| block.rows.iter().map(move |rows| first + rows.start..first + rows.end);
            Block::joining(firsts.flat_map(of_one), block.cols.clone())
        };
        if self.factors.is_none() && modules.iter().all(|module| self.packed(module).is_none()) {
            let parts = if is_fused {
                vec![self.tensor(&fused, &fused_shape, &of_all())?]
            } else {
                let read = |module: &String| self.tensor(&format!("{module}.weight"), &whole, &block);
                modules.iter().map(read).collect::<Result<_>>()?
            };
            return Ok((shape, ExpertWeights::Plain(parts)));
        }
        let mut values = Vec::new();
        if is_fused {
            values = self.read(&fused, &fused_shape, &of_all())?;
        } else {
            for module in &modules {
                values.append(&mut self.matrix(module, whole, &block)?);
            }
        }
        if let Some(factors) = &self.factors {
            factors.merge(&mut values, site, self.scale);
        }
        Ok((shape, ExpertWeights::Plain(vec![Cow::Owned(narrow(&fused, &values)?)])))
    }

    /// Whether the merged adapter changes this module.
    pub(crate) fn adapts(&self, path: &str) -> bool {
        self.modules.contains_key(path) || self.rows.contains_key(path)
    }

    /// Skips a tensor if it exists.
    pub fn ignore(&mut self, name: &str) {
        self.note(name);
    }

    /// Takes note of a tensor that has been read.
    fn note(&mut self, name: &str) {
        if self.unread.remove(name) {
            let bytes = self.checkpoint.tensors[name].bytes.len() as u64;
            self.checkpoint.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Ends loading.
    ///
    /// # Errors
    ///
    /// If a tensor of the checkpoint has not been read, or a module of the merged adapter has not been met.
    pub fn finish(self) -> Result<()> {
        if let Some(name) = self.unread.first() {
            let file = &self.checkpoint.shards[self.checkpoint.tensors[*name].shard].path;
            bail!("{}: tensor `{name}` has no place in a Qwen3 of this config.json", file.display());
        }
        if let Some(path) = self.unmerged.first() {
            bail!("module `{path}` has no weight to be merged into");
        }
        Ok(())
    }

    fn read(&mut self, name: &str, shape: &[usize], block: &Block) -> Result<Vec<f32>> {
        let values = self.checkpoint.read(name, shape, block)?;
        self.note(name);
        Ok(values)
    }

    /// A block of a module's weight in any stored form.
    fn matrix(&mut self, path: &str, shape: [usize; 2], block: &Block) -> Result<Vec<f32>> {
        let Some(packing) = self.packed(path) else { return self.read(&format!("{path}.weight"), &shape, block) };
        let groups = block.widened(packing.group);
        let values: Vec<f32> = self.read_packed(path, shape, packing, &groups)?.values().collect();
        let width = groups.cols.len();
        let cols = block.cols.start - groups.cols.start..block.cols.end - groups.cols.start;
        Ok(Block { rows: iter::once(0..values.len() / width).collect(), cols }.of(&values, width).into_owned())
    }

    fn read_packed(&mut self, path: &str, shape: [usize; 2], packing: Packing, block: &Block) -> Result<Packed> {
        let values = self.checkpoint.read_packed(path, shape, packing, block)?;
        for name in packed_tensors(path) {
            self.note(&name);
        }
        Ok(values)
    }

    /// The form of a module, if it is packed.
    fn packed(&self, path: &str) -> Option<Packing> {
        let [packed, ..] = packed_tensors(path);
        self.packing.filter(|_| self.checkpoint.tensors.contains_key(&packed))
    }
}

/// One projection of experts, and how checkpoints name its weights.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsProjection<'a> {
    /// The modules of an expert.
    modules: &'a [&'a str],
    /// The tensor that holds the modules of all experts.
    fused: &'a str,
    is_down: bool,
}

impl ExpertsProjection<'_> {
    pub(crate) const GATE_UP: Self = Self { modules: &["gate_proj", "up_proj"], fused: "gate_up_proj", is_down: false };
    pub(crate) const DOWN: Self = Self { modules: &["down_proj"], fused: "down_proj", is_down: true };

    fn site(self, model: &Model, id: ExpertsId) -> &ProjectionSite {
        if self.is_down { model[id].down() } else { model[id].gate_up() }
    }

    /// The block of each module's weight that a rank holds.
    fn block(self, [rows, cols]: [usize; 2], model: &Model, id: ExpertsId) -> Block {
        let inter = model[id].inter_range();
        let (rows, cols) = if self.is_down { (0..rows, inter) } else { (inter, 0..cols) };
        Block { rows: vec![rows], cols }
    }
}

/// An adapter's factors, as the library reads them from any form.
#[derive(Debug)]
struct Factors {
    block: Vec<f32>,
    /// By their entry in the model.
    entries: BTreeMap<usize, ImageEntry>,
}

impl Factors {
    fn new(adapter: &Adapter, model: &Model) -> Result<Self> {
        let image = adapter.plan(model, DType::F32)?;
        let mut block = vec![0.0; image.bytes() / size_of::<f32>()];
        image.write_to(bytemuck::cast_slice_mut(&mut block))?;
        Ok(Self { block, entries: image.entries().iter().map(|entry| (entry.entry, *entry)).collect() })
    }

    /// Adds `scale · scaling · B A` to the weights of a projection, `[experts, out, in]`.
    fn merge(&self, weights: &mut [f32], site: &ProjectionSite, scale: f32) {
        let (cols, slices) = (site.in_features(), site.num_slices());
        let rows = site.out_features() / slices;
        // An expert's slices are stacked.
        weights.par_chunks_exact_mut(rows * cols).enumerate().for_each(|(index, weight)| {
            let entry = site.expert_entry(index / slices) + index % slices;
            let Some(&ImageEntry { a_elems, b_elems, rank, scaling, .. }) = self.entries.get(&entry) else { return };
            let (a, b) = (LinearA { rank, in_features: cols }, B { out_features: rows, rank });
            let element = |elems, at| self.block[elems + at];
            let left: Vec<f32> = pairs(rows, rank).map(|(row, r)| element(b_elems, b.at(row, r))).collect();
            let right: Vec<f32> = pairs(rank, cols).map(|(r, col)| element(a_elems, a.at(r, col))).collect();
            add_product(weight, cols, (&left, &right), scale * scaling);
        });
    }
}

/// The indices of a row-major matrix.
fn pairs(rows: usize, cols: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |row| (0..cols).map(move |col| (row, col)))
}

fn narrow<T: Element>(name: &str, values: &[f32]) -> Result<Vec<T>> {
    match position(values, |value| !T::from_f32(value).to_f32().is_finite()) {
        Some(index) => bail!("tensor `{name}` holds {}, which is too large for {}", values[index], T::DTYPE),
        None => Ok(values.par_iter().map(|&value| T::from_f32(value)).collect()),
    }
}

/// The index of the first value for which the predicate holds.
fn position<V: Copy + Sync>(values: &[V], is_wanted: impl Fn(V) -> bool + Sync) -> Option<usize> {
    const CHUNK: usize = 1 << 14;
    let holds_one = |chunk: &[V]| chunk.iter().any(|&value| is_wanted(value));
    let chunk = values.par_chunks(CHUNK).position_first(holds_one)?;
    let within = values[chunk * CHUNK..].iter().position(|&value| is_wanted(value))?;
    Some(chunk * CHUNK + within)
}

/// Adds `scale · scaling · B A` to a weight of `cols` columns.
fn merge(weight: &mut [f32], cols: usize, module: &Module, scale: f32) -> Result<()> {
    let (a, b, rank) = (module.a_f32(), module.b_f32(), module.rank());
    let (left, right) = match module.kind() {
        ModuleKind::Linear => (b, a),
        // An embedding's weight is [vocab, hidden], and its B A is [hidden, vocab].
        ModuleKind::Embedding => (transposed(&a, rank), transposed(&b, cols)),
    };
    if (left.len(), right.len()) != (weight.len() / cols * rank, rank * cols) {
        bail!("module `{}` is of another shape than its weight", module.path());
    }
    add_product(weight, cols, (&left, &right), scale * module.scaling());
    Ok(())
}

/// Adds a multiple of the product of two matrices to a weight of `cols` columns.
fn add_product(weight: &mut [f32], cols: usize, (left, right): (&[f32], &[f32]), factor: f32) {
    let rank = right.len() / cols;
    weight.par_chunks_exact_mut(cols).zip(left.par_chunks_exact(rank)).for_each(|(row, left)| {
        let mut delta = vec![0.0; cols];
        for (left, right) in left.iter().zip(right.chunks_exact(cols)) {
            delta.iter_mut().zip(right).for_each(|(delta, right)| *delta += left * right);
        }
        row.iter_mut().zip(delta).for_each(|(weight, delta)| *weight += factor * delta);
    });
}

/// The transpose of a row-major matrix of `rows` rows.
fn transposed(matrix: &[f32], rows: usize) -> Vec<f32> {
    let cols = matrix.len() / rows;
    (0..matrix.len()).map(|i| matrix[i % rows * cols + i / rows]).collect()
}
