use std::sync::Arc;

use aril::{
    adapter::Escaped,
    pool::{AdapterId, PoolError},
};

use super::NameError;

/// An adapter that [`load`](super::Registry::load) does not load.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The name cannot be used.
    #[error(transparent)]
    Name(#[from] RegistryError),
    /// The pool refuses the adapter.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// A name that cannot be used as asked. No call that returns an error has changed anything.
///
/// Messages show names escaped and shortened, so that they fit on one line of a log.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// The name breaks a [rule](super#names).
    #[error("\"{}\" cannot be a name: {reason}", Escaped(name))]
    Name {
        /// The name given.
        name: Arc<str>,
        /// The rule.
        reason: NameError,
    },
    /// Nothing has this name. vLLM answers a request for it with 404.
    #[error("no model or adapter is named \"{}\"", Escaped(name))]
    Unknown {
        /// The name given.
        name: Arc<str>,
    },
    /// The name is the base model's own.
    #[error("\"{}\" is a name of the base model", Escaped(name))]
    Base {
        /// The name given.
        name: Arc<str>,
    },
    /// An adapter has the name, and is not to be replaced.
    #[error("an adapter named \"{}\" is loaded already; unload it first, or replace it in place", Escaped(name))]
    Loaded {
        /// The name given.
        name: Arc<str>,
    },
    /// The name does not stand for the version that was to be replaced.
    #[error("\"{}\" does not stand for {expected}{}", Escaped(name), now(*served))]
    OtherVersion {
        /// The name given.
        name: Arc<str>,
        /// The version given.
        expected: AdapterId,
        /// The version that the name stands for.
        served: Option<AdapterId>,
    },
    /// The first adapter of this name, or one to replace it, is being loaded. It can be retried.
    #[error("an adapter named \"{}\" is being loaded", Escaped(name))]
    Loading {
        /// The name given.
        name: Arc<str>,
    },
    /// The name was unloaded while its adapter was being loaded.
    #[error("\"{}\" was unloaded while its adapter was being loaded", Escaped(name))]
    Unloaded {
        /// The name given.
        name: Arc<str>,
    },
    /// The version is served under a name already.
    #[error("{id} is served as \"{}\" already", Escaped(name))]
    Id {
        /// The version given.
        id: AdapterId,
        /// Its name.
        name: Arc<str>,
    },
}

fn now(served: Option<AdapterId>) -> String {
    served.map_or_else(|| ", but for no version".to_owned(), |id| format!(", but for {id}"))
}
