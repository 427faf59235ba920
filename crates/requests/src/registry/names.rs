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

#[derive(Debug)]
enum Entry<V> {
    /// A name of its own. It is served, being loaded, or both.
    Adapter { served: Option<V>, loading: Option<Ticket>, aliases: BTreeSet<Arc<str>> },
    /// An alias of an adapter that is served.
    Alias(Arc<str>),
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
            Some(Entry::Alias(target)) => return Err(alias_of(name, target)),
            Some(Entry::Adapter { loading: Some(_), .. }) => return Err(RegistryError::Loading { name: name.into() }),
            Some(Entry::Adapter { .. }) if on_duplicate == OnDuplicate::Refuse => {
                return Err(RegistryError::Loaded { name: name.into() });
            }
            Some(Entry::Adapter { served, loading, .. }) => {
                on_duplicate.check(name, served.as_ref().map(V::id))?;
                *loading = Some(ticket);
                name.into()
            }
            None => {
                on_duplicate.check(name, None)?;
                let name: Arc<str> = name.into();
                let entry = Entry::Adapter { served: None, loading: Some(ticket), aliases: BTreeSet::new() };
                self.entries.insert(name.clone(), entry);
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
        let Some(Entry::Adapter { served, loading, .. }) = self.entries.get_mut(name) else {
            return Err(RegistryError::Unloaded { name: name.clone() });
        };
        if *loading != Some(ticket) {
            return Err(RegistryError::Unloaded { name: name.clone() });
        }
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
        let Some(Entry::Adapter { served, loading, .. }) = self.entries.get_mut(name) else { return };
        if *loading != Some(ticket) {
            return;
        }
        *loading = None;
        if served.is_none() {
            self.entries.remove(name);
        }
    }

    pub(super) fn unload(&mut self, name: &str) -> Result<Unloaded<V>, RegistryError> {
        self.not_base(name)?;
        if let Entry::Alias(target) = self.entry(name)? {
            return Err(alias_of(name, target));
        }
        let Some(Entry::Adapter { served, aliases, .. }) = self.entries.remove(name) else { return Err(unknown(name)) };
        for alias in &aliases {
            self.entries.remove(alias);
        }
        if let Some(version) = &served {
            self.owners.remove(&version.id());
        }
        Ok(Unloaded { version: served, aliases: aliases.into_iter().collect() })
    }

    pub(super) fn alias(&mut self, alias: &str, target: &str, on_duplicate: OnDuplicate) -> Result<(), RegistryError> {
        self.not_base(alias)?;
        let old = match self.entries.get(alias) {
            Some(Entry::Adapter { served: Some(_), .. }) => return Err(RegistryError::Loaded { name: alias.into() }),
            Some(Entry::Adapter { .. }) => return Err(RegistryError::Loading { name: alias.into() }),
            Some(Entry::Alias(old)) if on_duplicate == OnDuplicate::Refuse => return Err(alias_of(alias, old)),
            Some(Entry::Alias(old)) => Some(old.clone()),
            None => None,
        };
        let version_of = |old: &Arc<str>| match self.entries.get(old) {
            Some(Entry::Adapter { served, .. }) => served.as_ref().map(V::id),
            _ => None,
        };
        on_duplicate.check(alias, old.as_ref().and_then(version_of))?;
        self.not_base(target)?;
        match self.entry(target)? {
            Entry::Alias(target_of) => return Err(alias_of(target, target_of)),
            Entry::Adapter { served: None, .. } => return Err(RegistryError::Loading { name: target.into() }),
            Entry::Adapter { .. } => {}
        }
        if let Some(Entry::Adapter { aliases, .. }) = old.and_then(|old| self.entries.get_mut(&old)) {
            aliases.remove(alias);
        }
        let (alias, target): (Arc<str>, Arc<str>) = (alias.into(), target.into());
        if let Some(Entry::Adapter { aliases, .. }) = self.entries.get_mut(&target) {
            aliases.insert(alias.clone());
        }
        self.entries.insert(alias, Entry::Alias(target));
        Ok(())
    }

    pub(super) fn remove_alias(&mut self, alias: &str) -> Result<(), RegistryError> {
        self.not_base(alias)?;
        let Entry::Alias(target) = self.entry(alias)? else {
            return Err(RegistryError::NotAlias { name: alias.into() });
        };
        let target = target.clone();
        if let Some(Entry::Adapter { aliases, .. }) = self.entries.get_mut(&target) {
            aliases.remove(alias);
        }
        self.entries.remove(alias);
        Ok(())
    }

    pub(super) fn resolve(&self, name: &str) -> Result<Served, RegistryError> {
        if self.base.contains(name) {
            return Ok(Served::Base);
        }
        let entry = match self.entry(name)? {
            Entry::Alias(target) => self.entry(target)?,
            own => own,
        };
        match entry {
            Entry::Adapter { served: Some(version), .. } => Ok(Served::Adapter(version.id())),
            _ => Err(RegistryError::Loading { name: name.into() }),
        }
    }

    pub(super) fn list(&self) -> Vec<Listed> {
        let listed = |(name, entry): (&Arc<str>, &Entry<V>)| match entry {
            Entry::Adapter { served: Some(version), aliases, .. } => {
                Some(Listed { name: name.clone(), id: version.id(), aliases: aliases.iter().cloned().collect() })
            }
            _ => None,
        };
        self.entries.iter().filter_map(listed).collect()
    }

    pub(super) fn base_names(&self) -> Vec<Arc<str>> {
        self.base.iter().cloned().collect()
    }

    pub(super) fn name_of(&self, id: AdapterId) -> Option<Arc<str>> {
        self.owners.get(&id).cloned()
    }

    fn entry(&self, name: &str) -> Result<&Entry<V>, RegistryError> {
        self.entries.get(name).ok_or_else(|| unknown(name))
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

fn alias_of(alias: &str, target: &Arc<str>) -> RegistryError {
    RegistryError::Alias { alias: alias.into(), target: target.clone() }
}
