use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use super::{Listed, OnDuplicate, RegistryError, Served, Unloaded, Version};
use aril::pool::AdapterId;

/// One load. No ticket is used twice, so that a load which has been cancelled cannot touch a later one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Ticket(u64);

/// The names of a registry. Each method is one atomic change: it checks everything first.
#[derive(Debug)]
pub(super) struct Names<V> {
    base: BTreeSet<Arc<str>>,
    entries: BTreeMap<Arc<str>, Entry<V>>,
    /// The name of each version that is served.
    owners: HashMap<AdapterId, Arc<str>>,
    last_ticket: u64,
}

/// A name that is served, being loaded, or both.
#[derive(Debug)]
struct Entry<V> {
    served: Option<V>,
    loading: Option<Ticket>,
}

impl<V: Version> Names<V> {
    pub(super) fn new(base: BTreeSet<Arc<str>>) -> Self {
        Self { base, entries: BTreeMap::new(), owners: HashMap::new(), last_ticket: 0 }
    }

    pub(super) fn begin_load(
        &mut self,
        name: &str,
        on_duplicate: OnDuplicate,
    ) -> Result<(Arc<str>, Ticket), RegistryError> {
        self.not_base(name)?;
        let ticket = Ticket(self.last_ticket + 1);
        let name = match self.entries.get_mut(name) {
            Some(Entry { loading: Some(_), .. }) => return Err(RegistryError::Loading { name: name.into() }),
            Some(_) if on_duplicate == OnDuplicate::Refuse => {
                return Err(RegistryError::Loaded { name: name.into() });
            }
            Some(Entry { served, loading }) => {
                on_duplicate.check(name, served.as_ref().map(V::id))?;
                *loading = Some(ticket);
                name.into()
            }
            None => {
                on_duplicate.check(name, None)?;
                let name: Arc<str> = name.into();
                self.entries.insert(name.clone(), Entry { served: None, loading: Some(ticket) });
                name
            }
        };
        self.last_ticket = ticket.0;
        Ok((name, ticket))
    }

    /// Lets a name stand for `id`, whose version the caller puts in place of the one that is returned.
    pub(super) fn serve(
        &mut self,
        name: &Arc<str>,
        ticket: Ticket,
        id: AdapterId,
    ) -> Result<&mut Option<V>, RegistryError> {
        let entry = self.entries.get_mut(name).filter(|entry| entry.loading == Some(ticket));
        let Some(Entry { served, loading }) = entry else {
            return Err(RegistryError::Unloaded { name: name.clone() });
        };
        if let Some(owner) = self.owners.get(&id) {
            return Err(RegistryError::Id { id, name: owner.clone() });
        }
        *loading = None;
        if let Some(old) = served {
            self.owners.remove(&old.id());
        }
        self.owners.insert(id, name.clone());
        Ok(served)
    }

    /// Ends a load whose version is not served. After `serve`, or an unload, it does nothing.
    pub(super) fn release(&mut self, name: &str, ticket: Ticket) {
        let entry = self.entries.get_mut(name).filter(|entry| entry.loading == Some(ticket));
        let Some(Entry { served, loading }) = entry else { return };
        *loading = None;
        if served.is_none() {
            self.entries.remove(name);
        }
    }

    pub(super) fn unload(&mut self, name: &str) -> Result<Unloaded<V>, RegistryError> {
        self.not_base(name)?;
        let Entry { served, .. } = self.entries.remove(name).ok_or_else(|| unknown(name))?;
        if let Some(version) = &served {
            self.owners.remove(&version.id());
        }
        Ok(Unloaded { version: served })
    }

    pub(super) fn resolve(&self, name: &str) -> Result<Served, RegistryError> {
        if self.base.contains(name) {
            return Ok(Served::Base);
        }
        match self.entries.get(name).ok_or_else(|| unknown(name))? {
            Entry { served: Some(version), .. } => Ok(Served::Adapter(version.id())),
            _ => Err(RegistryError::Loading { name: name.into() }),
        }
    }

    pub(super) fn list(&self) -> Vec<Listed> {
        let listed = |(name, entry): (&Arc<str>, &Entry<V>)| {
            Some(Listed { name: name.clone(), id: entry.served.as_ref()?.id() })
        };
        self.entries.iter().filter_map(listed).collect()
    }

    pub(super) fn base_names(&self) -> Vec<Arc<str>> {
        self.base.iter().cloned().collect()
    }

    pub(super) fn name_of(&self, id: AdapterId) -> Option<Arc<str>> {
        self.owners.get(&id).cloned()
    }

    fn not_base(&self, name: &str) -> Result<(), RegistryError> {
        if self.base.contains(name) { Err(RegistryError::Base { name: name.into() }) } else { Ok(()) }
    }
}

fn unknown(name: &str) -> RegistryError {
    RegistryError::Unknown { name: name.into() }
}

impl OnDuplicate {
    /// Rejects a name that does not stand for the version that is to be replaced.
    fn check(self, name: &str, served: Option<AdapterId>) -> Result<(), RegistryError> {
        match self {
            Self::ReplaceVersion(expected) if served != Some(expected) => {
                Err(RegistryError::OtherVersion { name: name.into(), expected, served })
            }
            _ => Ok(()),
        }
    }
}
