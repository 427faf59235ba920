//! The names that requests use: which version of an adapter a name stands for.
//!
//! A [`Registry`] has the semantics of vLLM's endpoints for adapters. It holds names and [versions](Version) alone; the
//! weights are the pool's. It owns the versions, so that one that is replaced or unloaded leaves the pool when it is
//! dropped.
//!
//! | vLLM | here |
//! |---|---|
//! | `load_lora_adapter` | [`Registry::load`]; [`Registry::begin_load`] for an engine that loads in a way of its own |
//! | its `load_inplace` | the same with [`OnDuplicate::Replace`], or [`OnDuplicate::ReplaceVersion`] for a known one |
//! | `unload_lora_adapter` | [`Registry::unload`] |
//! | `/v1/models` | [`Registry::base_names`] and [`Registry::list`] |
//! | the `model` of a request | [`Registry::resolve`] |
//!
//! # Concurrency
//!
//! Every call is atomic, and calls of any threads take effect in one order (linearizable). None waits for a load: a
//! load runs between `begin_load` and `serve`, when the registry is not locked.
//!
//! - A name is loaded by one caller at a time. Another one gets [`RegistryError::Loading`] at once.
//! - A replaced name resolves to the old version until `serve`, and to the new one after it. A load that fails drops
//!   its [`PendingLoad`], and the old version stays.
//! - `unload` removes a name at once, also while it is being loaded: that load's `serve` fails with
//!   [`RegistryError::Unloaded`].
//! - A request that resolved a name before it was replaced or unloaded keeps its [`AdapterId`]. The pool serves that
//!   version or rejects it; the id never becomes another version's.
//!
//! # Names
//!
//! Names are compared byte for byte. A name of an adapter
//!
//! - has 1 to [`MAX_NAME_BYTES`] bytes of UTF-8;
//! - contains no control character, no `\`, and no white space except U+0020, which neither begins nor ends it;
//! - does not end with `@` and a number: `name@7` is [the version](AdapterId::get) 7 of `name`;
//! - may have parts separated by `/`, none of which is `..`: `org/adapter`, or the path or the address that the adapter
//!   comes from (`/data/saffron`, `s3://bucket/saffron`), which vLLM's resolvers and TRL use as its name.
//!
//! So a name fits on one line of a log. As a path on Unix, `folder.join(name.trim_start_matches('/'))` does not leave
//! the folder; joined as it is, a name that begins with `/` would replace it. The base model's names are the engine's
//! own (vLLM's default is a path), and are taken but not checked.

mod error;
mod name;
mod names;
#[cfg(test)]
mod tests;

#[cfg(not(test))]
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::{
    num::NonZeroUsize,
    sync::{Arc, PoisonError},
};

use aril::pool::{self, AdapterId, AdapterPool, Backend, CacheNamespace, Load};
#[cfg(test)]
use shuttle::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

pub use self::{
    error::{LoadError, RegistryError},
    name::{MAX_NAME_BYTES, NameError},
};
use self::{
    name::check,
    names::{Names, Ticket},
};

/// The names of the base model and of the loaded adapters. Clones are the same registry.
///
/// ```
/// use std::{error::Error, time::Duration};
///
/// use aril::{cpu::AdapterPool, pool::Source};
/// use aril_requests::registry::{OnDuplicate::Replace, Registry, RegistryError, Served};
/// # use aril::{DType, adapter::{Adapter, Tensor}, model::{Linear, ModelSpec, Parallel, TpRank}};
/// # use aril::{plan::Capacity, pool::PoolConfig};
///
/// let registry = Registry::new(["qwen3-8b"]);
/// assert_eq!(registry.resolve("qwen3-8b"), Ok(Served::Base));
/// assert!(matches!(registry.resolve("pirate"), Err(RegistryError::Unknown { .. })));
/// # let mut spec = ModelSpec::new();
/// # spec.linear(Linear::new("m", Parallel::Replicated, 1).slice("q", 1))?;
/// # let model = spec.shard(TpRank::SINGLE)?;
/// # let capacity = Capacity::tokens(1).slots(1).rank(8);
/// # let config = PoolConfig::arena_bytes(1 << 16).host_bytes(1 << 16);
/// # let mut pool = AdapterPool::new(&model, DType::F32, capacity, config)?;
/// # let source = |weight: f32| -> Result<Source, Box<dyn Error>> {
/// #     let tensor = || Tensor::new(DType::F32, [1, 1], bytemuck::cast_slice(&[weight]).to_vec());
/// #     let factors = [("m.q.lora_A.weight".to_owned(), tensor()?), ("m.q.lora_B.weight".to_owned(), tensor()?)];
/// #     let adapter = Adapter::from_tensors(r#"{"peft_type": "LORA", "lora_alpha": 1}"#, factors)?;
/// #     Ok(Source::memory(adapter.into(), &model, DType::F32)?)
/// # };
/// # let (first, broken, second) = (source(1.0)?, source(f32::NAN)?, source(2.0)?);
///
/// let load = registry.load(&mut pool, "pirate", Replace, first)?;
/// // An engine steps meanwhile. Each call of the pool may be the one that takes note of the load's end.
/// pool.wait_for(&load, Duration::from_secs(60))?;
/// let old = Served::Adapter(load.id());
/// assert_eq!(registry.resolve("pirate"), Ok(old));
///
/// // Weights that are not numbers: the first version is served as before, and alone in the pool.
/// let load = registry.load(&mut pool, "pirate", Replace, broken)?;
/// assert!(pool.wait_for(&load, Duration::from_secs(60)).is_err());
/// assert_eq!((registry.resolve("pirate"), pool.snapshot().adapters), (Ok(old), 1));
///
/// let load = registry.load(&mut pool, "pirate", Replace, second)?;
/// assert_eq!((registry.resolve("pirate"), pool.snapshot().adapters), (Ok(old), 2));
/// pool.wait_for(&load, Duration::from_secs(60))?;
/// assert_eq!((registry.resolve("pirate"), pool.snapshot().adapters), (Ok(Served::Adapter(load.id())), 1));
/// # Ok::<(), Box<dyn Error>>(())
/// ```
#[derive(Debug)]
pub struct Registry<V> {
    names: Arc<RwLock<Names<V>>>,
}

/// What a registry holds of a version that is served: an owner whose drop unregisters it, or its id, which the engine
/// unregisters.
pub trait Version {
    /// The version's id.
    fn id(&self) -> AdapterId;
}

impl Version for AdapterId {
    fn id(&self) -> AdapterId {
        *self
    }
}

impl Version for pool::Version {
    fn id(&self) -> AdapterId {
        self.id()
    }
}

impl<V> Clone for Registry<V> {
    fn clone(&self) -> Self {
        Self { names: Arc::clone(&self.names) }
    }
}

/// What a model name resolves to.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Served {
    /// The base model, without an adapter.
    Base,
    /// A version of an adapter.
    Adapter(AdapterId),
}

impl Served {
    /// The adapter's version; `None` for the base model.
    pub const fn adapter(self) -> Option<AdapterId> {
        match self {
            Self::Base => None,
            Self::Adapter(id) => Some(id),
        }
    }

    /// The prefix-cache namespace of requests for the name.
    pub const fn cache_namespace(self) -> CacheNamespace {
        match self {
            Self::Base => CacheNamespace::BASE,
            Self::Adapter(id) => id.cache_namespace(),
        }
    }
}

/// What [`Registry::begin_load`] does with a name that is in use.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[doc(alias = "load_inplace")]
pub enum OnDuplicate {
    /// Refuse it.
    Refuse,
    /// Replace what it stands for. A name that is not in use is added.
    Replace,
    /// Replace it if it stands for this version, and refuse it otherwise, also if it is not in use: of several callers
    /// who have seen the same version, one replaces it (compare and swap).
    ReplaceVersion(AdapterId),
}

/// A loaded adapter, as [`Registry::list`] returns it.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Listed {
    /// The adapter's name.
    pub name: Arc<str>,
    /// The version that it stands for.
    pub id: AdapterId,
    /// Other versions that are [served](Registry::keeping), newest first.
    pub older: Vec<AdapterId>,
}

/// What [`Registry::unload`] removed.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
#[must_use = "an id has to be unregistered"]
pub struct Unloaded<V> {
    /// The versions that were served, newest first; none if the name's first load had not finished.
    pub versions: Vec<V>,
}

/// What [`PendingLoad::serve`] replaced.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
#[must_use = "an id has to be unregistered"]
pub struct Replaced<V> {
    /// The version that is served no longer; `None` if the name had fewer than the registry [keeps](Registry::keeping).
    pub version: Option<V>,
}

impl Registry<pool::Version> {
    /// Loads an adapter, which the name stands for once it is in host memory: a call of the pool takes note of that,
    /// drops the version that is served no longer, and says so in the [`Load`] that is returned. Requests that lease the
    /// dropped version finish on it.
    ///
    /// Whatever fails, the name stands for the old version as before, can be loaded again, and nothing of the new
    /// version is in the pool. If the name is [unloaded](Self::unload) meanwhile, the new version leaves the pool, too.
    ///
    /// # Errors
    /// Those of [`begin_load`](Self::begin_load) and of [`AdapterPool::load`]; nothing is loaded. How the load ends is
    /// said by [`Load::has_ended`].
    #[doc(alias = "load_lora_adapter")]
    pub fn load<B: Backend>(
        &self,
        pool: &mut AdapterPool<B>,
        name: &str,
        on_duplicate: OnDuplicate,
        source: B::Source,
    ) -> Result<Load, LoadError> {
        // The last load of the name may have ended.
        pool.poll();
        let pending = self.begin_load(name, on_duplicate)?;
        let serve = |loaded: Result<_, _>| {
            // A failure is that of the load. Without the name, nobody can ask for the version.
            drop(loaded.map(|version| pending.serve(version)));
        };
        Ok(pool.load_then(source, serve)?)
    }
}

impl<V: Version> Registry<V> {
    /// A registry without adapters. Adapters cannot take the names of the base model, which resolve to
    /// [`Served::Base`].
    pub fn new<S: Into<String>>(base_names: impl IntoIterator<Item = S>) -> Self {
        Self::keeping(NonZeroUsize::MIN, base_names)
    }

    /// Like [`new`](Self::new), and serves up to so many versions of an adapter: its name stands for the newest, and
    /// `name@7` for the one whose [number](AdapterId::get) is 7. The oldest is dropped when another one is served.
    pub fn keeping<S: Into<String>>(versions: NonZeroUsize, base_names: impl IntoIterator<Item = S>) -> Self {
        let base_names = base_names.into_iter().map(|name| Arc::from(name.into())).collect();
        Self { names: Arc::new(RwLock::new(Names::new(base_names, versions.get()))) }
    }

    /// Begins the load of an adapter that a name is to stand for. Until the adapter is [served](PendingLoad::serve),
    /// the name resolves as before.
    ///
    /// # Errors
    /// - [`RegistryError::Name`] if the name breaks a [rule](self#names).
    /// - [`RegistryError::Base`] if it is the base model's.
    /// - [`RegistryError::Loading`] if another caller loads an adapter under it.
    /// - [`RegistryError::Loaded`] if an adapter has it, with [`OnDuplicate::Refuse`].
    /// - [`RegistryError::OtherVersion`] if it does not stand for the version of [`OnDuplicate::ReplaceVersion`].
    #[doc(alias = "load_lora_adapter")]
    pub fn begin_load(&self, name: &str, on_duplicate: OnDuplicate) -> Result<PendingLoad<V>, RegistryError> {
        check(name)?;
        let (name, ticket) = self.write().begin_load(name, on_duplicate)?;
        Ok(PendingLoad { registry: self.clone(), name, ticket })
    }

    /// Removes an adapter's name at once, and cancels a load in progress.
    ///
    /// # Errors
    /// [`RegistryError::Unknown`] or [`RegistryError::Base`].
    #[doc(alias = "unload_lora_adapter")]
    pub fn unload(&self, name: &str) -> Result<Unloaded<V>, RegistryError> {
        self.write().unload(name)
    }

    /// What a request for this name, or for a version of it, runs on.
    ///
    /// # Errors
    /// [`RegistryError::Unknown`], or [`RegistryError::Loading`] if the name's first load has not finished.
    pub fn resolve(&self, name: &str) -> Result<Served, RegistryError> {
        self.read().resolve(name)
    }

    /// The adapters that are served, sorted by name, as they were at one moment.
    #[doc(alias = "show_available_models")]
    pub fn list(&self) -> Vec<Listed> {
        self.read().list()
    }

    /// The names of the base model, sorted.
    pub fn base_names(&self) -> Vec<Arc<str>> {
        self.read().base_names()
    }

    /// The name of a version that is served, for logs and metrics.
    pub fn name_of(&self, id: AdapterId) -> Option<Arc<str>> {
        self.read().name_of(id)
    }

    /// Locks the names. A panic of another thread cannot leave them inconsistent, because no call panics between its
    /// changes.
    fn read(&self) -> RwLockReadGuard<'_, Names<V>> {
        self.names.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Names<V>> {
        self.names.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A name whose adapter is being loaded. Dropping it gives the name back.
#[derive(Debug)]
#[must_use = "dropping a pending load gives the name back"]
pub struct PendingLoad<V: Version> {
    registry: Registry<V>,
    name: Arc<str>,
    ticket: Ticket,
}

impl<V: Version> PendingLoad<V> {
    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Lets the name stand for `version` from now on, and returns the one that it replaced.
    ///
    /// # Errors
    /// No name has changed, and `version` is dropped, if the name was unloaded meanwhile ([`RegistryError::Unloaded`])
    /// or the version is served under a name already ([`RegistryError::Id`]).
    pub fn serve(self, version: V) -> Result<Replaced<V>, RegistryError> {
        // Dropped without the lock: its end may take a while.
        let mut version = Some(version);
        let replaced = self.registry.write().serve(&self.name, self.ticket, &mut version);
        Ok(Replaced { version: replaced? })
    }
}

impl<V: Version> Drop for PendingLoad<V> {
    fn drop(&mut self) {
        self.registry.write().release(&self.name, self.ticket);
    }
}
