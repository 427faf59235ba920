//! The base model's weights: one safetensors file, or several with an index.
//!
//! Files are mapped and tensors converted one at a time, so that loading takes no second copy of the model. Invariant: every
//! tensor of the files is read, or the checkpoint is refused.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
};

use aril::{
    Element,
    adapter::{Module, ModuleKind},
};
use half::{bf16, f16};
use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use crate::error::{Context, Result, bail};

/// A checkpoint's tensors, mapped.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Tensor>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    bytes: Mmap,
}

#[derive(Debug)]
struct Tensor {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

impl Checkpoint {
    pub(crate) fn open(model: &Path) -> Result<Self> {
        let index = model.join("model.safetensors.index.json");
        let single = model.join("model.safetensors");
        let mut checkpoint = Self { shards: Vec::new(), tensors: BTreeMap::new() };
        if single.exists() || !index.exists() {
            checkpoint.add_shard(single)?;
            return Ok(checkpoint);
        }
        let text = std::fs::read_to_string(&index).context(index.display())?;
        let Index { weight_map } = serde_json::from_str(&text).context(index.display())?;
        for file in weight_map.values().collect::<BTreeSet<_>>() {
            if Path::new(file).file_name() != Some(OsStr::new(file)) {
                bail!("{}: `{file}` is not a file beside it", index.display());
            }
            checkpoint.add_shard(model.join(file))?;
        }
        for (name, file) in &weight_map {
            let found = checkpoint.tensors.get(name).map(|tensor| &checkpoint.shards[tensor.shard].path);
            if found != Some(&model.join(file)) {
                bail!("{}: tensor `{name}` is not in `{file}`", index.display());
            }
        }
        Ok(checkpoint)
    }

    fn add_shard(&mut self, path: PathBuf) -> Result<()> {
        let file = File::open(&path).context(path.display())?;
        // SAFETY: nobody changes the checkpoint while it is loaded, as everybody who maps one has to trust.
        let bytes = unsafe { Mmap::map(&file) }.context(path.display())?;
        for (name, view) in SafeTensors::deserialize(&bytes).context(path.display())?.iter() {
            let start = view.data().as_ptr().addr() - bytes.as_ptr().addr();
            let tensor = Tensor {
                shard: self.shards.len(),
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                bytes: start..start + view.data().len(),
            };
            if self.tensors.insert(name.to_owned(), tensor).is_some() {
                bail!("{}: tensor `{name}` is in another file too", path.display());
            }
        }
        self.shards.push(Shard { path, bytes });
        Ok(())
    }

    /// Reads a tensor of that shape.
    fn read(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let Some(tensor) = self.tensors.get(name) else {
            let files = self.shards.iter().map(|shard| shard.path.display().to_string()).collect::<Vec<_>>().join(", ");
            bail!("{files}: tensor `{name}` is missing");
        };
        let shard = &self.shards[tensor.shard];
        let subject = || format!("{}: tensor `{name}`", shard.path.display());
        if tensor.shape != shape {
            bail!("{} is {:?}, but config.json asks for {shape:?}", subject(), tensor.shape);
        }
        let bytes = &shard.bytes[tensor.bytes.clone()];
        let values = match tensor.dtype {
            Dtype::BF16 => widen::<bf16>(bytes),
            Dtype::F16 => widen::<f16>(bytes),
            Dtype::F32 => widen::<f32>(bytes),
            other => bail!("{} is {other:?}; BF16, F16 and F32 are implemented", subject()),
        };
        match position(&values, |value| !value.is_finite()) {
            Some(index) => bail!("{} holds {} at element {index}", subject(), values[index]),
            None => Ok(values),
        }
    }
}

fn widen<T: Element>(bytes: &[u8]) -> Vec<f32> {
    bytes.par_chunks_exact(size_of::<T>()).map(|bytes| bytemuck::pod_read_unaligned::<T>(bytes).to_f32()).collect()
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The weights that a model is built of: a checkpoint's, with an adapter merged into them or as they are.
#[derive(Debug)]
pub(crate) struct Weights<'a> {
    checkpoint: &'a Checkpoint,
    unread: BTreeSet<&'a str>,
    /// The modules to be merged, and those of them that were not yet.
    modules: &'a [Module],
    unmerged: BTreeSet<&'a str>,
    scale: f32,
}

impl<'a> Weights<'a> {
    /// The base model's weights.
    pub(crate) fn new(checkpoint: &'a Checkpoint) -> Self {
        let unread = checkpoint.tensors.keys().map(String::as_str).collect();
        Self { checkpoint, unread, modules: &[], unmerged: BTreeSet::new(), scale: 1.0 }
    }

    /// The weights with `scale · scaling · B A` added in `f32` to every module that the adapter has.
    pub(crate) fn merged(checkpoint: &'a Checkpoint, modules: &'a [Module], scale: f32) -> Self {
        let unmerged = modules.iter().map(Module::path).collect();
        Self { modules, unmerged, scale, ..Self::new(checkpoint) }
    }

    /// The weight `[out, in]` of a linear module, or `[vocab, hidden]` of an embedding.
    pub(crate) fn module<T: Element>(&mut self, path: &str, rows: usize, cols: usize) -> Result<Vec<T>> {
        self.module_from(path, path, rows, cols)
    }

    /// The weight of a module that is stored under another's name, as it is tied to it. What is merged is the module's own.
    pub(crate) fn module_from<T: Element>(
        &mut self,
        path: &str,
        stored: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<T>> {
        let name = format!("{stored}.weight");
        let mut values = self.read(&name, &[rows, cols])?;
        if let Some(module) = self.adapted(path) {
            merge(&mut values, cols, module, self.scale)?;
            self.unmerged.remove(module.path());
        }
        narrow(&name, &values)
    }

    /// The weight of a norm.
    pub(crate) fn norm<T: Element>(&mut self, path: &str, len: usize) -> Result<Vec<T>> {
        let name = format!("{path}.weight");
        let values = self.read(&name, &[len])?;
        narrow(&name, &values)
    }

    /// Whether an adapter was merged that has this module.
    pub(crate) fn adapts(&self, path: &str) -> bool {
        self.adapted(path).is_some()
    }

    /// Passes over a tensor, if it is there.
    pub(crate) fn ignore(&mut self, name: &str) {
        self.unread.remove(name);
    }

    /// Ends loading.
    pub(crate) fn finish(self) -> Result<()> {
        if let Some(name) = self.unread.first() {
            let file = &self.checkpoint.shards[self.checkpoint.tensors[*name].shard].path;
            bail!("{}: tensor `{name}` has no place in a dense Qwen3 of this config.json", file.display());
        }
        if let Some(path) = self.unmerged.first() {
            bail!("module `{path}` has no weight to be merged into");
        }
        Ok(())
    }

    fn read(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let values = self.checkpoint.read(name, shape)?;
        self.unread.remove(name);
        Ok(values)
    }

    /// The adapter's module of that path, which may be spelled without the model's outer names or with more of them.
    fn adapted(&self, path: &str) -> Option<&'a Module> {
        let within = |outer: &str, inner: &str| outer.strip_suffix(inner).is_some_and(|rest| rest.ends_with('.'));
        self.modules
            .iter()
            .find(|module| module.path() == path || within(module.path(), path) || within(path, module.path()))
    }
}

fn narrow<T: Element>(name: &str, values: &[f32]) -> Result<Vec<T>> {
    match position(values, |value| !T::from_f32(value).to_f32().is_finite()) {
        Some(index) => bail!("tensor `{name}` holds {}, which is too large for {}", values[index], T::DTYPE),
        None => Ok(values.par_iter().map(|&value| T::from_f32(value)).collect()),
    }
}

/// Where the first value is that answers the description.
fn position(values: &[f32], is_wanted: impl Fn(f32) -> bool + Sync) -> Option<usize> {
    const CHUNK: usize = 1 << 14;
    let holds_one = |chunk: &[f32]| chunk.iter().any(|&value| is_wanted(value));
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
    weight.par_chunks_exact_mut(cols).zip(left.par_chunks_exact(rank)).for_each(|(row, left)| {
        let mut delta = vec![0.0; cols];
        for (left, right) in left.iter().zip(right.chunks_exact(cols)) {
            delta.iter_mut().zip(right).for_each(|(delta, right)| *delta += left * right);
        }
        row.iter_mut().zip(delta).for_each(|(weight, delta)| *weight += scale * module.scaling() * delta);
    });
    Ok(())
}

/// The transpose of a row-major matrix of `rows` rows.
fn transposed(matrix: &[f32], rows: usize) -> Vec<f32> {
    let cols = matrix.len() / rows;
    (0..matrix.len()).map(|i| matrix[i % rows * cols + i / rows]).collect()
}
