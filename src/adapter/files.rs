//! The files of an adapter's directory.
//!
//! Only safetensors: reading a pickle executes what its author put there. Other files (a tokenizer, `added_tokens.json`) are
//! none of our business. Invariant: with an index, every tensor is where the index says, and nowhere else.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs::{self, File},
    path::{Path, PathBuf},
    sync::Arc,
};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use super::{
    AdapterError,
    tensor::{Tensor, TensorName},
};
use crate::DType;

const WEIGHTS: &str = "adapter_model.safetensors";
const INDEX: &str = "adapter_model.safetensors.index.json";

/// A tensor that is there; an error if it is not of a type that we read, which only matters if it is of the adapter.
pub(super) type Stored = (TensorName, Result<Tensor, AdapterError>);

pub(super) fn config(dir: &Path) -> Result<String, AdapterError> {
    read(&dir.join(super::config::FILE))
}

/// All tensors of the weight files in `dir`.
pub(super) fn tensors(dir: &Path) -> Result<Vec<Stored>, AdapterError> {
    let [weights, index] = [WEIGHTS, INDEX].map(|name| dir.join(name));
    if weights.exists() {
        return map(&weights);
    }
    if index.exists() {
        return sharded(dir, index);
    }
    let entries = fs::read_dir(dir).map_err(|source| AdapterError::Read { path: dir.to_owned(), source })?;
    match entries.flatten().map(|entry| entry.path()).filter(|path| is_pickle(path)).min() {
        Some(path) => Err(AdapterError::Pickle { path }),
        None => Err(AdapterError::NoWeights { dir: dir.to_owned() }),
    }
}

/// Whether a file would be an adapter's weights in a format that can execute code. (Trainers leave other pickles around.)
fn is_pickle(path: &Path) -> bool {
    let [stem, extension] =
        [path.file_stem(), path.extension()].map(|part| part.and_then(OsStr::to_str).unwrap_or_default());
    match extension {
        "bin" | "pt" | "pth" => stem.starts_with("adapter_model"),
        "ckpt" => stem == "model_weights",
        extension => extension == "nemo",
    }
}

#[derive(Deserialize)]
struct Index {
    /// Tensor to shard.
    weight_map: BTreeMap<String, String>,
}

fn sharded(dir: &Path, index: PathBuf) -> Result<Vec<Stored>, AdapterError> {
    let Index { mut weight_map } = serde_json::from_str(&read(&index)?)
        .map_err(|source| AdapterError::Json { path: index.clone(), source: source.into() })?;
    let mut tensors = Vec::new();
    for shard in weight_map.values().cloned().collect::<BTreeSet<_>>() {
        if Path::new(&shard).file_name() != Some(shard.as_ref()) {
            return Err(AdapterError::ShardName { index, shard });
        }
        for (name, tensor) in map(&dir.join(&shard))? {
            let indexed = weight_map.remove(&name.key);
            if indexed.as_ref() != Some(&shard) {
                let indexed = indexed.map_or("nowhere".to_owned(), |other| format!("in {other}"));
                return Err(AdapterError::Index { index, tensor: name.key, indexed, found: format!("in {shard}") });
            }
            tensors.push((name, tensor));
        }
    }
    match weight_map.pop_first() {
        None => Ok(tensors),
        Some((tensor, shard)) => {
            Err(AdapterError::Index { index, tensor, indexed: format!("in {shard}"), found: "nowhere".to_owned() })
        }
    }
}

fn read(path: &Path) -> Result<String, AdapterError> {
    fs::read_to_string(path).map_err(|source| AdapterError::Read { path: path.to_owned(), source })
}

#[expect(unsafe_code, reason = "weights are read where the system maps them, not copied through the heap")]
fn map(path: &Path) -> Result<Vec<Stored>, AdapterError> {
    let unreadable = |source| AdapterError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(unreadable)?;
    // SAFETY: the map is only ever read, as bytes of any value, and `Adapter::open` asks that nobody changes the file meanwhile.
    let map = Arc::new(unsafe { Mmap::map(&file) }.map_err(unreadable)?);
    let (header, metadata) = SafeTensors::read_metadata(&map)
        .map_err(|source| AdapterError::Safetensors { path: path.to_owned(), source: source.into() })?;
    let data = size_of::<u64>() + header;
    let tensor = |(key, info): (String, &safetensors::tensor::TensorInfo)| {
        let name = TensorName { key, file: Some(path.to_owned()) };
        let (start, end) = info.data_offsets;
        let tensor = dtype(&name, info.dtype)
            .and_then(|dtype| Tensor::mapped(dtype, info.shape.clone(), Arc::clone(&map), data + start..data + end));
        (name, tensor)
    };
    let mut tensors: Vec<_> = metadata.tensors().into_iter().map(tensor).collect();
    // Not in the order of a hash map, so that what is refused first is the same each time.
    tensors.sort_by(|(a, _), (b, _)| a.key.cmp(&b.key));
    Ok(tensors)
}

fn dtype(tensor: &TensorName, dtype: Dtype) -> Result<DType, AdapterError> {
    match dtype {
        Dtype::BF16 => Ok(DType::BF16),
        Dtype::F16 => Ok(DType::F16),
        Dtype::F32 => Ok(DType::F32),
        _ => Err(AdapterError::DType { tensor: tensor.clone(), dtype: format!("{dtype:?}") }),
    }
}
