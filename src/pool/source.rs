use std::{path::Path, sync::Arc};

use crate::{
    DType,
    adapter::{Adapter, AdapterError, Directory, SlotImage},
    error::{LoadError, SlotError},
    model::Model,
    residency::Bounds,
};

/// Where a pool reads an adapter from, checked for one rank of a model. Making a source takes a while; any thread may do so.
#[derive(Clone, Debug)]
pub struct Source {
    kind: Kind,
    model: Model,
    dtype: DType,
    bytes: usize,
    max_rank: usize,
    has_experts: bool,
}

#[derive(Clone, Debug)]
enum Kind {
    Directory(Directory),
    Memory(Arc<Adapter>),
}

impl Source {
    /// A directory, as for [`Adapter::open`]. Reads the configuration and the headers of the weight files.
    ///
    /// Each load reads the files again, into memory, so that nothing done to them can stop the process. Files that have been
    /// modified or replaced since are an error of the load. Adapters with [base weights](Adapter::base_weights), or with a given
    /// [orientation](Adapter::oriented), must come from [memory](Self::memory).
    ///
    /// # Errors
    /// As for [`Adapter::open`] and [`Adapter::plan`], except for the values of weights.
    pub fn directory(dir: impl AsRef<Path>, model: &Model, dtype: DType) -> Result<Self, AdapterError> {
        let (directory, adapter) = Directory::open(dir.as_ref())?;
        Self::planned(Kind::Directory(directory), &adapter.plan(model, dtype)?)
    }

    /// An adapter in memory, such as a trainer sends. It stays there.
    ///
    /// # Errors
    /// As for [`Adapter::plan`].
    pub fn memory(adapter: Arc<Adapter>, model: &Model, dtype: DType) -> Result<Self, AdapterError> {
        Self::planned(Kind::Memory(Arc::clone(&adapter)), &adapter.plan(model, dtype)?)
    }

    fn planned(kind: Kind, image: &SlotImage<'_>) -> Result<Self, AdapterError> {
        let (model, dtype) = (image.model().clone(), image.dtype());
        Ok(Self {
            kind,
            model,
            dtype,
            bytes: image.bytes(),
            max_rank: image.max_rank(),
            has_experts: image.has_experts(),
        })
    }

    /// Size of the adapter's [image](SlotImage::bytes) in bytes. For a directory, an upper bound: factors of experts that turn out
    /// equal share memory.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The largest rank.
    pub fn max_rank(&self) -> usize {
        self.max_rank
    }

    /// Rejects a source for another table.
    pub(super) fn check(&self, bounds: &Bounds) -> Result<(), SlotError> {
        bounds.check(&self.model, self.dtype, self.max_rank)
    }

    /// Reads the adapter and plans its image.
    pub(super) fn read<R>(&self, pack: impl FnOnce(&SlotImage<'_>) -> Result<R, LoadError>) -> Result<R, LoadError> {
        let pack = |adapter: &Adapter| pack(&adapter.plan(&self.model, self.dtype)?);
        match &self.kind {
            Kind::Memory(adapter) => pack(adapter),
            // The plan compares the factors of experts.
            Kind::Directory(directory) => directory.read(self.has_experts, pack),
        }
    }
}
