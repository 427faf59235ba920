//! Reports of a pool's state.

use super::{Core, Entry};
use crate::{
    Slot,
    pool::{AdapterId, Residency, Snapshot, Tier},
};

impl Core {
    /// The state of the pool. Takes time for each slot, and none for adapters elsewhere.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let mut snapshot = Snapshot {
            adapters: self.adapters.len() - self.gone.len(),
            resident: 0,
            copying: 0,
            host: self.host.len(),
            reading: self.reads,
            waiting: self.queue.len(),
            leased: 0,
            leases: 0,
            pinned: self.pins,
            device_memory: self.device.blocks.usage(),
            host_memory: self.host.blocks.usage(),
            counters: self.counters,
        };
        for place in self.device.occupied() {
            snapshot.resident += 1;
            snapshot.copying += usize::from(place.is_copying);
            snapshot.leased += usize::from(place.leases > 0);
            snapshot.leases += place.leases;
        }
        snapshot
    }

    /// Where an adapter is; `None` if it is not registered.
    pub(crate) fn residency_of(&self, id: AdapterId) -> Option<Residency> {
        self.adapters.get(&id).filter(|entry| !entry.is_gone).map(|entry| self.residency(id, entry))
    }

    /// Where all registered adapters are, by id.
    pub(crate) fn residencies(&self) -> Vec<Residency> {
        let registered = self.adapters.iter().filter(|(_, entry)| !entry.is_gone);
        let mut all: Vec<_> = registered.map(|(&id, entry)| self.residency(id, entry)).collect();
        all.sort_unstable_by_key(|residency| residency.id);
        all
    }

    fn residency(&self, id: AdapterId, entry: &Entry) -> Residency {
        let slot = entry.slot.and_then(|slot| u16::try_from(slot).ok()).map(Slot::new);
        let in_host = entry.host.is_ready();
        Residency {
            id,
            tier: if slot.is_some() {
                Tier::Device
            } else if in_host {
                Tier::Host
            } else {
                Tier::Source
            },
            slot,
            in_host,
            bytes: entry.bytes,
            leases: entry.slot.map_or(0, |slot| self.device.leases(slot)),
            is_pinned: entry.is_pinned,
            failure: entry.failure.clone(),
        }
    }
}
