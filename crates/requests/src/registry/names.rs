use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
};

use super::{Listed, OnDuplicate, RegistryError, Served, Unloaded, Version, name::versioned};
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
    /// The most versions of a name.
    kept: usize,
}

/// A name that is served, being loaded, or both.
#[derive(Debug)]
struct Entry<V> {
    /// The versions that are served, newest first.
    served: VecDeque<V>,
    loading: Option<Ticket>,
}

impl<V: Version> Names<V> {
    pub(super) fn new(base: BTreeSet<Arc<str>>, kept: usize) -> Self {
        Self { base, entries: BTreeMap::new(), owners: HashMap::new(), last_ticket: 0, kept }
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
                on_duplicate.check(name, served.front().map(V::id))?;
                *loading = Some(ticket);
                name.into()
            }
            None => {
                on_duplicate.check(name, None)?;
                let name: Arc<str> = name.into();
                self.entries.insert(name.clone(), Entry { served: VecDeque::new(), loading: Some(ticket) });
                name
            }
        };
        self.last_ticket = ticket.0;
        Ok((name, ticket))
    }

    /// Lets a name stand for a version, and returns the one that is served no longer. After an error, the version is
    /// still there.
    pub(super) fn serve(
        &mut self,
        name: &Arc<str>,
        ticket: Ticket,
        version: &mut Option<V>,
    ) -> Result<Option<V>, RegistryError> {
        let entry = self.entries.get_mut(name).filter(|entry| entry.loading == Some(ticket));
        let Some(Entry { served, loading }) = entry else {
            return Err(RegistryError::Unloaded { name: name.clone() });
        };
        let id = version.as_ref().expect("it is served once").id();
        if let Some(owner) = self.owners.get(&id) {
            return Err(RegistryError::Id { id, name: owner.clone() });
        }
        *loading = None;
        let old = if served.len() < self.kept { None } else { served.pop_back() };
        old.iter().for_each(|old| drop(self.owners.remove(&old.id())));
        self.owners.insert(id, name.clone());
        served.extend(version.take());
        served.rotate_right(1);
        Ok(old)
    }

    /// Ends a load whose version is not served. After `serve`, or an unload, it does nothing.
    pub(super) fn release(&mut self, name: &str, ticket: Ticket) {
        let entry = self.entries.get_mut(name).filter(|entry| entry.loading == Some(ticket));
        let Some(Entry { served, loading }) = entry else { return };
        *loading = None;
        if served.is_empty() {
            self.entries.remove(name);
        }
    }

    pub(super) fn unload(&mut self, name: &str) -> Result<Unloaded<V>, RegistryError> {
        self.not_base(name)?;
        let Entry { served, .. } = self.entries.remove(name).ok_or_else(|| unknown(name))?;
        served.iter().for_each(|version| drop(self.owners.remove(&version.id())));
        Ok(Unloaded { versions: served.into() })
    }

    pub(super) fn resolve(&self, name: &str) -> Result<Served, RegistryError> {
        if self.base.contains(name) {
            return Ok(Served::Base);
        }
        if let Some(Entry { served, .. }) = self.entries.get(name) {
            let newest = served.front().map(|version| Served::Adapter(version.id()));
            return newest.ok_or_else(|| RegistryError::Loading { name: name.into() });
        }
        // No name has this form.
        let of_version = versioned(name).and_then(|(name, number)| {
            let mut versions = self.entries.get(name)?.served.iter().map(V::id);
            versions.find(|id| id.get() == number).map(Served::Adapter)
        });
        of_version.ok_or_else(|| unknown(name))
    }

    pub(super) fn list(&self) -> Vec<Listed> {
        let listed = |(name, entry): (&Arc<str>, &Entry<V>)| {
            let mut versions = entry.served.iter().map(V::id);
            Some(Listed { name: name.clone(), id: versions.next()?, older: versions.collect() })
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
