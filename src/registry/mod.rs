//! The names that requests use: which version of an adapter a name stands for.
//!
//! A [`Registry`] has the semantics of vLLM's endpoints for adapters. It holds names and [`AdapterId`]s alone; the weights are the
//! pool's.
//!
//! | vLLM | here |
//! |---|---|
//! | `load_lora_adapter` | [`Registry::reserve`] the name, load the adapter, [`Reservation::commit`] its id |
//! | `load_lora_adapter` with `load_inplace` | the same with [`OnDuplicate::Replace`] |
//! | `unload_lora_adapter` | [`Registry::unload`], then unregister the returned id |
//! | `/v1/models` | [`Registry::base_names`] and [`Registry::list`] |
//! | the `model` of a request | [`Registry::resolve`] |
//!
//! # Concurrency
//!
//! Every call is atomic, and calls of any threads take effect in one order (linearizable). None waits for a load: a load runs between
//! `reserve` and `commit`, when the registry is not locked.
//!
//! - A name is loaded by one caller at a time. Another one gets [`RegistryError::Loading`] at once.
//! - A replaced name resolves to the old version until `commit`, and to the new one after it. A load that fails drops its
//!   [`Reservation`], and the old version stays.
//! - `unload` removes a name at once, also while it is being loaded: that load's `commit` fails with [`RegistryError::Unloaded`].
//! - A request that resolved a name before it was replaced or unloaded keeps its [`AdapterId`]. The pool serves that version or rejects
//!   it; the id never becomes another version's.
//!
//! # Names
//!
//! Names are compared byte for byte. A name of an adapter, or an alias,
//!
//! - has 1 to [`MAX_NAME_BYTES`] bytes of UTF-8;
//! - contains no control character, no `\`, and no white space except U+0020, which neither begins nor ends it;
//! - may have several parts separated by `/` (`org/adapter`), none of which is empty, `.` or `..`.
//!
//! So a name fits on one line of a log, and on Unix a folder joined with a name is a path below that folder. The base model's names are
//! the engine's own (vLLM's default is a path), and are taken but not checked.

mod error;
mod name;
mod names;
#[cfg(test)]
mod tests;

use std::sync::{Arc, PoisonError};
#[cfg(not(test))]
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

#[cfg(test)]
use shuttle::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

pub use self::{
    error::RegistryError,
    name::{MAX_NAME_BYTES, NameError},
};
use self::{
    name::check,
    names::{Names, Ticket},
};
use crate::pool::{AdapterId, CacheNamespace};

/// The names of the base model and of the loaded adapters. Clones are the same registry.
///
/// ```
/// use std::{error::Error, path::Path};
///
/// use aril::{cpu::AdapterPool, pool::Source, registry::{OnDuplicate, Registry, RegistryError, Served}};
///
/// /// Serves an adapter under a name, or another version of it.
/// fn load(registry: &Registry, pool: &mut AdapterPool, name: &str, dir: &Path) -> Result<(), Box<dyn Error>> {
///     let reservation = registry.reserve(name, OnDuplicate::Replace)?;
///     // Meanwhile the old version is served. An error drops the reservation, and the old version stays.
///     let source = Source::directory(dir, pool.weights().model(), pool.weights().dtype())?;
///     let id = pool.register(source)?;
///     match reservation.commit(id) {
///         Ok(Some(old)) => pool.unregister(old)?,
///         Ok(None) => {}
///         Err(error) => {
///             pool.unregister(id)?;
///             return Err(error.into());
///         }
///     }
///     Ok(())
/// }
///
/// let registry = Registry::new(["qwen3-8b"]);
/// assert_eq!(registry.resolve("qwen3-8b"), Ok(Served::Base));
/// assert!(matches!(registry.resolve("pirate"), Err(RegistryError::Unknown { .. })));
///
/// let reservation = registry.reserve("pirate", OnDuplicate::Refuse)?;
/// assert!(matches!(registry.resolve("pirate"), Err(RegistryError::Loading { .. })));
/// drop(reservation); // the load failed
/// assert!(matches!(registry.resolve("pirate"), Err(RegistryError::Unknown { .. })));
/// # let _ = load;
/// # Ok::<(), RegistryError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Registry {
    names: Arc<RwLock<Names>>,
}

/// What requests for a name run on.
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

/// What [`Registry::reserve`] and [`Registry::alias`] do with a name that is in use.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[doc(alias = "load_inplace")]
pub enum OnDuplicate {
    /// Refuse it.
    Refuse,
    /// Replace what it stands for. A name that is not in use is added.
    Replace,
}

/// A loaded adapter, as [`Registry::list`] returns it.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Listed {
    /// The adapter's name.
    pub name: Arc<str>,
    /// The version that it stands for.
    pub id: AdapterId,
    /// Its aliases, sorted.
    pub aliases: Vec<Arc<str>>,
}

/// What [`Registry::unload`] removed.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
#[must_use = "the pool holds the adapter until it is unregistered"]
pub struct Unloaded {
    /// The version that was served, for the pool to unregister; `None` if the name's first load had not finished.
    pub id: Option<AdapterId>,
    /// The aliases that went with the name, sorted.
    pub aliases: Vec<Arc<str>>,
}

impl Registry {
    /// A registry without adapters. Adapters cannot take the names of the base model, which resolve to [`Served::Base`].
    pub fn new<S: Into<String>>(base_names: impl IntoIterator<Item = S>) -> Self {
        let base_names = base_names.into_iter().map(|name| Arc::from(name.into())).collect();
        Self { names: Arc::new(RwLock::new(Names::new(base_names))) }
    }

    /// Reserves a name for an adapter that the caller is about to load. Until the reservation is committed, the name resolves as
    /// before.
    ///
    /// # Errors
    /// - [`RegistryError::Name`] if the name breaks a [rule](self#names).
    /// - [`RegistryError::Base`] if it is the base model's, and [`RegistryError::Alias`] if it is an alias.
    /// - [`RegistryError::Loading`] if another caller has reserved it.
    /// - [`RegistryError::Loaded`] if an adapter has it, with [`OnDuplicate::Refuse`].
    #[doc(alias = "load_lora_adapter")]
    pub fn reserve(&self, name: &str, on_duplicate: OnDuplicate) -> Result<Reservation, RegistryError> {
        check(name)?;
        let (name, ticket) = self.write().reserve(name, on_duplicate)?;
        Ok(Reservation { registry: self.clone(), name, ticket })
    }

    /// Removes an adapter's name and its aliases at once, and cancels a load in progress.
    ///
    /// # Errors
    /// [`RegistryError::Unknown`], [`RegistryError::Base`], or [`RegistryError::Alias`], which leaves both names.
    #[doc(alias = "unload_lora_adapter")]
    pub fn unload(&self, name: &str) -> Result<Unloaded, RegistryError> {
        self.write().unload(name)
    }

    /// Lets requests for `alias` run on the adapter named `target`: on each of its versions, until it is unloaded.
    ///
    /// # Errors
    /// - [`RegistryError::Name`], [`RegistryError::Base`], [`RegistryError::Loaded`] or [`RegistryError::Loading`] if `alias` breaks a
    ///   [rule](self#names) or is a name of something else.
    /// - [`RegistryError::Alias`] if `alias` is an alias, with [`OnDuplicate::Refuse`], or if `target` is one.
    /// - [`RegistryError::Unknown`], [`RegistryError::Base`] or [`RegistryError::Loading`] if no adapter is served as `target`.
    pub fn alias(&self, alias: &str, target: &str, on_duplicate: OnDuplicate) -> Result<(), RegistryError> {
        check(alias)?;
        self.write().alias(alias, target, on_duplicate)
    }

    /// Removes an alias. Its adapter stays.
    ///
    /// # Errors
    /// [`RegistryError::Unknown`], [`RegistryError::Base`], or [`RegistryError::NotAlias`] if it is an adapter's own name.
    pub fn remove_alias(&self, alias: &str) -> Result<(), RegistryError> {
        self.write().remove_alias(alias)
    }

    /// What a request for this name runs on.
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

    /// Locks the names. A panic of another thread cannot leave them inconsistent, because no call panics between its changes.
    fn read(&self) -> RwLockReadGuard<'_, Names> {
        self.names.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Names> {
        self.names.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A name whose adapter is being loaded. Dropping it gives the name back.
#[derive(Debug)]
#[must_use = "dropping a reservation gives the name back"]
pub struct Reservation {
    registry: Registry,
    name: Arc<str>,
    ticket: Ticket,
}

impl Reservation {
    /// The reserved name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Lets the name stand for `id` from now on, and returns the version that it replaced, for the pool to unregister.
    ///
    /// # Errors
    /// Nothing has changed, and the caller unregisters `id`, if the name was unloaded meanwhile ([`RegistryError::Unloaded`]) or `id` is
    /// served under a name already ([`RegistryError::Id`]).
    pub fn commit(self, id: AdapterId) -> Result<Option<AdapterId>, RegistryError> {
        self.registry.write().commit(&self.name, self.ticket, id)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.registry.write().release(&self.name, self.ticket);
    }
}
