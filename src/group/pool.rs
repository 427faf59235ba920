use std::{borrow::Borrow, collections::HashMap};

use super::{channel::Ranks, error::GroupError, load::Group, table::Table};
use crate::{
    Slot,
    adapter::{Adapter, AdapterError},
};

/// The slots of a group's tables, shared by more adapters than fit: an adapter is loaded into the same slot on all ranks, or on none.
///
/// All ranks make the same calls in the same order. What they decide depends on these calls and on the verdicts that they exchange
/// alone, so all evict the same adapters. The pool alone loads into the tables and unloads.
///
/// A load blocks until all ranks have made it. Requests for adapters that are loaded exchange nothing.
#[derive(Debug)]
pub struct GroupPool<R, T> {
    group: Group<R, T>,
    /// By version.
    loaded: HashMap<u64, Loaded>,
    /// Number of the last use. It orders adapters by use.
    uses: u64,
}

#[derive(Debug)]
struct Loaded {
    slot: Slot,
    leases: usize,
    last_use: u64,
}

impl<R: Ranks, T: Table> GroupPool<R, T> {
    /// A pool of a group whose tables are empty.
    pub fn new(group: Group<R, T>) -> Self {
        Self { group, loaded: HashMap::new(), uses: 0 }
    }

    /// The table of this rank.
    pub fn table(&self) -> &T {
        self.group.table()
    }

    /// Leases an adapter for steps of all ranks, until [`release`](Self::release), and returns its slot, which is the same on all ranks.
    /// Leases of an adapter are counted.
    ///
    /// An adapter that is not loaded is [loaded](Group::load) from `open`, which may be called several times. Where no slot is empty, it
    /// replaces the least recently used adapter without a lease. Where the arena of any rank is full, all ranks evict such adapters, one
    /// at a time, until it fits on all. Call this between the same two steps on all ranks.
    ///
    /// `version` is a number by which all ranks know the adapter, as for [`Group::prepare`].
    ///
    /// # Errors
    /// As for [`Group::load`], and [`GroupError::NoFreeSlot`] if all slots are leased. Leased adapters keep serving. Others do, too,
    /// except those that were evicted for room, and the one in the slot of [`GroupError::Torn`].
    ///
    /// # Panics
    /// If `open` or the table panics, as for [`Group::load`].
    pub fn acquire<A: Borrow<Adapter>>(
        &mut self,
        version: u64,
        open: impl Fn() -> Result<A, AdapterError>,
    ) -> Result<Slot, GroupError> {
        self.uses += 1;
        if let Some(loaded) = self.loaded.get_mut(&version) {
            loaded.leases += 1;
            loaded.last_use = self.uses;
            return Ok(loaded.slot);
        }
        let slot = match (self.group.free_slot(), self.victim()) {
            (Err(GroupError::NoFreeSlot), Some(victim)) => self.loaded[&victim].slot,
            (slot, _) => slot?,
        };
        let prepared = loop {
            match (self.group.prepare(slot, version, &open), self.victim()) {
                (Err(GroupError::Refused { failures, .. }), Some(victim))
                    if failures.iter().all(|failure| failure.is_full) =>
                {
                    self.evict(victim);
                }
                (prepared, _) => break prepared?,
            }
        };
        // The adapter in the slot is replaced, or lost.
        self.loaded.retain(|_, loaded| loaded.slot != slot);
        self.group.commit(prepared)?;
        self.loaded.insert(version, Loaded { slot, leases: 1, last_use: self.uses });
        Ok(slot)
    }

    /// Ends one lease of an adapter, after the last step that uses it. The adapter stays loaded until it is evicted.
    ///
    /// # Errors
    /// [`GroupError::NotLeased`].
    pub fn release(&mut self, version: u64) -> Result<(), GroupError> {
        let loaded = self.loaded.get_mut(&version).filter(|loaded| loaded.leases > 0);
        loaded.ok_or(GroupError::NotLeased { version })?.leases -= 1;
        Ok(())
    }

    /// The slot of an adapter; `None` if it is not loaded. For routers that place requests.
    pub fn slot(&self, version: u64) -> Option<Slot> {
        self.loaded.get(&version).map(|loaded| loaded.slot)
    }

    /// The least recently used adapter without a lease.
    fn victim(&self) -> Option<u64> {
        let idle = self.loaded.iter().filter(|(_, loaded)| loaded.leases == 0);
        idle.min_by_key(|(_, loaded)| loaded.last_use).map(|(&version, _)| version)
    }

    /// Unloads an adapter. If this rank cannot, it keeps the memory, and no rank chooses the slot again.
    fn evict(&mut self, version: u64) {
        if let Some(loaded) = self.loaded.remove(&version) {
            // The ranks go on together, and the verdict of the next load tells them of it.
            let _ = self.group.table().unload(loaded.slot);
        }
    }
}
