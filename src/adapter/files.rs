//! The files of an adapter's directory.
//!
//! Only safetensors are read, because loading a pickle can execute code. Other files, such as a tokenizer, are ignored.
//! Invariants: every tensor is where the index says, if there is one; only regular files are read; and no memory is
//! allocated on the word of a malformed file.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fmt,
    fs::{self, File},
    io::{self, Read as _},
    ops::Range,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use memmap2::Mmap;
use safetensors::{
    Dtype, SafeTensorError, SafeTensors,
    tensor::{Metadata, TensorInfo},
};
use serde::Deserialize;

use super::{
    error::{AdapterError, TensorName},
    tensor::{FileType, Storage, Tensor, WeightFile},
};
use crate::DType;

const WEIGHTS: &str = "adapter_model.safetensors";
const INDEX: &str = "adapter_model.safetensors.index.json";

/// Size limit of `adapter_config.json` in bytes: enough for ranks and alphas of about 50,000 modules.
const MAX_CONFIG_BYTES: u64 = 4 << 20;
/// Size limit of an index, in bytes.
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Size limit of a safetensors header, in bytes: that of the safetensors crate.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// A tensor of a file, or an error if its element type is not supported. The error matters only if the adapter uses the
/// tensor.
pub(super) type Stored = (TensorName, Result<Tensor, AdapterError>);

/// How a weight file is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Access {
    /// As [`Adapter::map`](super::Adapter::map), alone, requires of its caller.
    Map,
    Copy,
    /// The headers now, and each tensor when it is packed.
    InPlace,
}

/// The state of a file when it was opened.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Stamp {
    pub(super) path: PathBuf,
    device: u64,
    inode: u64,
    len: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
}

impl Stamp {
    fn new(path: &Path, metadata: &fs::Metadata) -> Self {
        Self {
            path: path.to_owned(),
            device: metadata.dev(),
            inode: metadata.ino(),
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// A file that was opened.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) stamp: Stamp,
    /// The file, if tensors are read from it later.
    file: Option<Arc<WeightFile>>,
}

impl Opened {
    /// Whether its path still leads to the file as it was opened.
    pub(super) fn is_in_place(&self) -> bool {
        let path = &self.stamp.path;
        fs::metadata(path).is_ok_and(|metadata| Stamp::new(path, &metadata) == self.stamp)
    }

    /// Rejects a file that has been modified since it was opened.
    pub(super) fn check(&self) -> Result<(), AdapterError> {
        let Some(WeightFile { path, file }) = self.file.as_deref() else { return Ok(()) };
        let metadata = file.metadata().map_err(|error| AdapterError::Read { path: path.clone(), error })?;
        if Stamp::new(path, &metadata) == self.stamp {
            Ok(())
        } else {
            Err(AdapterError::Changed { path: path.clone() })
        }
    }
}

/// Opens the files of an adapter for reading, by the paths of the directory's files. It may refuse some of them, such
/// as those that links lead to from outside a folder.
#[derive(Clone)]
pub struct Opener(Arc<Open>);

type Open = dyn Fn(&Path) -> io::Result<File> + Send + Sync;

impl Opener {
    /// An opener. It must not wait, as opening a pipe does for its other end. What is no regular file is refused after
    /// it.
    pub fn new(open: impl Fn(&Path) -> io::Result<File> + Send + Sync + 'static) -> Self {
        Self(Arc::new(open))
    }

    /// Opens a file.
    ///
    /// # Errors
    /// The system's, or the opener's own.
    pub fn open(&self, path: &Path) -> io::Result<File> {
        (self.0)(path)
    }
}

/// Opens any regular file.
impl Default for Opener {
    fn default() -> Self {
        // Check before opening, because opening a pipe waits for its other end.
        Self::new(|path| fs::metadata(path).and_then(regular).and_then(|_| File::open(path)))
    }
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Opener").finish_non_exhaustive()
    }
}

fn regular(metadata: fs::Metadata) -> io::Result<fs::Metadata> {
    if metadata.is_file() { Ok(metadata) } else { Err(io::Error::other("it is not a regular file")) }
}

/// Reads the files of a directory.
pub(super) struct Files<'a> {
    dir: &'a Path,
    access: Access,
    opener: &'a Opener,
    /// The files opened so far.
    pub(super) opened: Vec<Opened>,
}

impl<'a> Files<'a> {
    pub(super) fn new(dir: &'a Path, access: Access, opener: &'a Opener) -> Self {
        Self { dir, access, opener, opened: Vec::new() }
    }

    pub(super) fn config(&mut self) -> Result<String, AdapterError> {
        match self.text(&self.dir.join(super::config::FILE), MAX_CONFIG_BYTES) {
            Err(AdapterError::Read { error, .. }) if error.kind() == io::ErrorKind::NotFound && self.dir.is_dir() => {
                let inside = fs::read_dir(self.dir).into_iter().flatten().flatten().map(|entry| entry.path());
                let inside = inside.filter(|path| path.join(super::config::FILE).exists()).min();
                Err(AdapterError::NoConfig { dir: self.dir.to_owned(), inside })
            }
            config => config,
        }
    }

    /// All tensors of the weight files.
    pub(super) fn tensors(&mut self) -> Result<Vec<Stored>, AdapterError> {
        let dir = self.dir;
        let [weights, index] = [WEIGHTS, INDEX].map(|name| dir.join(name));
        if weights.exists() {
            return self.file(&weights);
        }
        if index.exists() {
            return self.sharded(index);
        }
        let entries = fs::read_dir(dir).map_err(|error| AdapterError::Read { path: dir.to_owned(), error })?;
        match entries.flatten().map(|entry| entry.path()).filter(|path| is_pickle(path)).min() {
            Some(path) => Err(AdapterError::Pickle { path }),
            None => Err(AdapterError::NoWeights { dir: dir.to_owned() }),
        }
    }

    fn sharded(&mut self, index: PathBuf) -> Result<Vec<Stored>, AdapterError> {
        let text = self.text(&index, MAX_INDEX_BYTES)?;
        let Index { mut weight_map } =
            serde_json::from_str(&text).map_err(|error| AdapterError::json(index.clone(), &text, &error))?;
        let mut tensors = Vec::new();
        for shard in weight_map.values().cloned().collect::<BTreeSet<_>>() {
            if Path::new(&shard).file_name() != Some(shard.as_ref()) {
                return Err(AdapterError::ShardName { index, shard });
            }
            let tensors_of_shard = match self.file(&self.dir.join(&shard)) {
                Err(AdapterError::Read { error, .. }) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(AdapterError::NoShard { index, shard });
                }
                tensors => tensors?,
            };
            for (name, tensor) in tensors_of_shard {
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

    /// Reads a text file of at most `max_bytes` bytes.
    fn text(&mut self, path: &Path, max_bytes: u64) -> Result<String, AdapterError> {
        let (file, len) = self.open(path)?;
        let mut text = String::new();
        let read = if len > max_bytes {
            Err(io::Error::other(format!("it has {len} bytes, but must have at most {max_bytes}")))
        } else {
            file.take(max_bytes).read_to_string(&mut text)
        };
        read.map_err(|error| AdapterError::Read { path: path.to_owned(), error })?;
        Ok(text)
    }

    /// Opens a regular file, takes note of it and returns its length. A pipe or a device might never end.
    fn open(&mut self, path: &Path) -> Result<(File, u64), AdapterError> {
        let opened = self.opener.open(path).and_then(|file| {
            let metadata = file.metadata().and_then(regular)?;
            Ok((file, metadata))
        });
        let (file, metadata) = opened.map_err(|error| AdapterError::Read { path: path.to_owned(), error })?;
        self.opened.push(Opened { stamp: Stamp::new(path, &metadata), file: None });
        Ok((file, metadata.len()))
    }

    fn file(&mut self, path: &Path) -> Result<Vec<Stored>, AdapterError> {
        let (mut file, len) = self.open(path)?;
        let unreadable = |error| AdapterError::Read { path: path.to_owned(), error };
        match self.access {
            Access::Map => parse(path, &(Arc::new(map(&file).map_err(unreadable)?) as Storage)),
            Access::InPlace => {
                let (header, metadata) = header(path, &mut file, len)?;
                let file = Arc::new(WeightFile { path: path.to_owned(), file });
                self.opened.iter_mut().last().into_iter().for_each(|opened| opened.file = Some(Arc::clone(&file)));
                let tensor = |stored, shape, bytes: Range<usize>| {
                    let range = header.len() + bytes.start..header.len() + bytes.end;
                    Tensor::remote(stored, shape, Arc::clone(&file) as _, range)
                };
                Ok(stored(path, &metadata, tensor))
            }
            Access::Copy => {
                let bytes = copy(path, &mut file, len)?;
                let stamp = Stamp::new(path, &file.metadata().map_err(unreadable)?);
                if self.opened.last().map(|opened| &opened.stamp) != Some(&stamp) {
                    return Err(AdapterError::Changed { path: path.to_owned() });
                }
                parse(path, &(Arc::new(bytes) as Storage))
            }
        }
    }
}

/// Whether a file holds an adapter's weights in a format that can execute code. Trainers leave other pickles around.
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
    /// Shard of each tensor.
    weight_map: BTreeMap<String, String>,
}

#[expect(unsafe_code, reason = "maps weight files instead of copying them")]
fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is only read, as bytes, which may have any value. `Adapter::map` requires that nobody changes the
    // file.
    unsafe { Mmap::map(file) }
}

/// Reads a safetensors file after checking its length against its header.
fn copy(path: &Path, file: &mut File, len: u64) -> Result<Vec<u8>, AdapterError> {
    let unreadable = |error| AdapterError::Read { path: path.to_owned(), error };
    let (mut bytes, metadata) = header(path, file, len)?;
    let data_len = metadata.data_len();
    bytes.try_reserve_exact(data_len).map_err(|error| unreadable(io::Error::other(error)))?;
    file.take(data_len as u64).read_to_end(&mut bytes).map_err(unreadable)?;
    Ok(bytes)
}

/// Reads the header of a safetensors file of `len` bytes, with its length before it, and checks `len` against it.
fn header(path: &Path, file: &mut File, len: u64) -> Result<(Vec<u8>, Metadata), AdapterError> {
    let unreadable = |error| AdapterError::Read { path: path.to_owned(), error };
    let malformed = |bytes: &[u8], error| AdapterError::safetensors(path, bytes, &error);
    let mut bytes = Vec::new();
    let prefix = size_of::<u64>() as u64;
    file.take(prefix).read_to_end(&mut bytes).map_err(unreadable)?;
    let Ok(header_len) = bytes[..].try_into().map(u64::from_le_bytes) else {
        return Err(malformed(&bytes, SafeTensorError::HeaderTooSmall));
    };
    if header_len > MAX_HEADER_BYTES {
        return Err(malformed(&bytes, SafeTensorError::HeaderTooLarge));
    }
    file.take(header_len).read_to_end(&mut bytes).map_err(unreadable)?;
    let header = &bytes[size_of::<u64>()..];
    if header.len() as u64 != header_len {
        return Err(malformed(&bytes, SafeTensorError::InvalidHeaderLength));
    }
    let header = str::from_utf8(header).map_err(|source| malformed(&bytes, SafeTensorError::InvalidHeader(source)))?;
    let metadata: Metadata = serde_json::from_str(header)
        .map_err(|error| malformed(&bytes, SafeTensorError::InvalidHeaderDeserialization(error)))?;
    if (bytes.len() as u64).checked_add(metadata.data_len() as u64) != Some(len) {
        return Err(malformed(&bytes, SafeTensorError::MetadataIncompleteBuffer));
    }
    Ok((bytes, metadata))
}

/// The tensors of a complete safetensors file. Errors name it `path`.
pub(super) fn parse(path: &Path, storage: &Storage) -> Result<Vec<Stored>, AdapterError> {
    let bytes = (**storage).as_ref();
    let (header, metadata) =
        SafeTensors::read_metadata(bytes).map_err(|error| AdapterError::safetensors(path, bytes, &error))?;
    let data = size_of::<u64>() + header;
    let part = |stored, shape, bytes: Range<usize>| {
        Tensor::of_file(stored, shape, storage, data + bytes.start..data + bytes.end)
    };
    Ok(stored(path, &metadata, part))
}

/// The tensors of a file. `tensor` makes one from its element type, shape and range in the file's data.
fn stored(
    path: &Path,
    metadata: &Metadata,
    tensor: impl Fn(FileType, Vec<usize>, Range<usize>) -> Result<Tensor, AdapterError>,
) -> Vec<Stored> {
    let stored = |(key, info): (String, &TensorInfo)| {
        let name = TensorName { key, file: Some(path.to_owned()) };
        let (start, end) = info.data_offsets;
        let tensor = file_type(&name, info.dtype).and_then(|stored| tensor(stored, info.shape.clone(), start..end));
        (name, tensor)
    };
    let mut tensors: Vec<_> = metadata.tensors().into_iter().map(stored).collect();
    // Sort, because a hash map has no fixed order: the same file must always give the same error.
    tensors.sort_by(|(a, _), (b, _)| a.key.cmp(&b.key));
    tensors
}

fn file_type(tensor: &TensorName, dtype: Dtype) -> Result<FileType, AdapterError> {
    match dtype {
        Dtype::BF16 => Ok(FileType::Kept(DType::BF16)),
        Dtype::F16 => Ok(FileType::Kept(DType::F16)),
        Dtype::F32 => Ok(FileType::Kept(DType::F32)),
        Dtype::F64 => Ok(FileType::Double),
        Dtype::F8_E4M3 => Ok(FileType::Float8),
        _ => Err(AdapterError::DType { tensor: tensor.clone(), dtype: format!("{dtype:?}") }),
    }
}
