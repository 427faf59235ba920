use std::path::{Path, PathBuf};

use super::{
    error::AdapterError,
    files::{Access, Stamp},
    open::Adapter,
};

/// A directory whose adapter has been checked, and is read later.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    files: Vec<Stamp>,
}

impl Directory {
    /// Reads the configuration and the headers of the weight files. Returns the adapter without its weights, to be planned. The
    /// size of its image is an upper bound, because equal factors of experts are not found.
    pub(crate) fn open(path: &Path) -> Result<(Self, Adapter), AdapterError> {
        let (adapter, files) = Adapter::load(path, Access::Headers)?;
        Ok((Self { path: path.to_owned(), files }, adapter))
    }

    /// Reads the adapter into memory. Rejects files that are not those that were checked.
    pub(crate) fn read(&self) -> Result<Adapter, AdapterError> {
        let (adapter, files) = Adapter::load(&self.path, Access::Copy)?;
        let changed = files.iter().find(|file| !self.files.contains(file));
        changed.map_or(Ok(adapter), |file| Err(AdapterError::Changed { path: file.path.clone() }))
    }
}
