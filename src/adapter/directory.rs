use std::path::{Path, PathBuf};

use super::{
    error::AdapterError,
    files::{Access, Stamp},
    open::Adapter,
};
use crate::error::LoadError;

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
        let (adapter, files) = Adapter::load(path, Access::InPlace)?;
        let files = files.into_iter().map(|file| file.stamp).collect();
        Ok((Self { path: path.to_owned(), files }, adapter))
    }

    /// Calls `pack` with the adapter. Rejects files that are not those that were checked, or are modified meanwhile.
    ///
    /// With `whole`, the weights are in memory, and its plan finds equal factors. Otherwise each is read when it is written.
    pub(crate) fn read<R>(
        &self,
        whole: bool,
        pack: impl FnOnce(&Adapter) -> Result<R, LoadError>,
    ) -> Result<R, LoadError> {
        let (adapter, files) = Adapter::load(&self.path, if whole { Access::Copy } else { Access::InPlace })?;
        if let Some(file) = files.iter().find(|file| !self.files.contains(&file.stamp)) {
            return Err(AdapterError::Changed { path: file.stamp.path.clone() }.into());
        }
        let packed = pack(&adapter);
        files.iter().try_for_each(|file| file.check())?;
        packed
    }
}
