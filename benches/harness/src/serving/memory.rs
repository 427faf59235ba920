use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
};

use super::{Adapter, Hardware, Time};

/// Where adapters are: in slots of the device, in host memory, or only on the disk. The least recently used ones make way.
#[derive(Debug)]
pub struct Memory {
    hardware: Hardware,
    slots: HashMap<Adapter, Slot>,
    /// The adapters in host memory, and their last use.
    host: HashMap<Adapter, u64>,
    /// Copies that have not begun: when they may, their number, and the adapter.
    copies: BinaryHeap<Reverse<(Time, u64, Adapter)>>,
    link_is_free: Time,
    disk_is_free: Time,
    num_loads: u64,
    uses: u64,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// When the copy ends; `None` if it has not begun.
    ready: Option<Time>,
    leases: usize,
    last_use: u64,
}

impl Memory {
    pub fn new(hardware: Hardware) -> Self {
        Self {
            hardware,
            slots: HashMap::new(),
            host: HashMap::new(),
            copies: BinaryHeap::new(),
            link_is_free: 0,
            disk_is_free: 0,
            num_loads: 0,
            uses: 0,
        }
    }

    /// Begins the copies that may begin until `now`, in the order in which they may.
    pub fn advance(&mut self, now: Time) {
        while let Some(&Reverse((earliest, _, adapter))) = self.copies.peek() {
            let begin = earliest.max(self.link_is_free);
            if begin > now {
                break;
            }
            self.copies.pop();
            self.link_is_free = begin + self.hardware.copy_us;
            if let Some(slot) = self.slots.get_mut(&adapter) {
                slot.ready = Some(self.link_is_free);
            }
        }
    }

    /// When the next copy ends after `now`.
    pub fn next_ready(&self, now: Time) -> Option<Time> {
        let running = self.slots.values().filter_map(|slot| slot.ready).filter(|ready| *ready > now).min();
        let next = self
            .copies
            .peek()
            .map(|Reverse((earliest, ..))| (*earliest).max(self.link_is_free).max(now) + self.hardware.copy_us);
        running.into_iter().chain(next).min()
    }

    pub fn is_ready(&self, adapter: Adapter, now: Time) -> bool {
        self.slots.get(&adapter).and_then(|slot| slot.ready).is_some_and(|ready| ready <= now)
    }

    /// Begins to load an adapter, unless it is there or under way. `keep` names adapters that do not make way. Returns whether there is
    /// room.
    pub fn load(&mut self, adapter: Adapter, now: Time, keep: &[Adapter]) -> bool {
        self.uses += 1;
        if let Some(slot) = self.slots.get_mut(&adapter) {
            slot.last_use = self.uses;
            return true;
        }
        if self.slots.len() >= self.hardware.slots {
            let idle = self.slots.iter().filter(|(adapter, slot)| {
                slot.leases == 0 && slot.ready.is_some_and(|ready| ready <= now) && !keep.contains(adapter)
            });
            let Some(victim) = idle.min_by_key(|(_, slot)| slot.last_use).map(|(adapter, _)| *adapter) else {
                return false;
            };
            self.slots.remove(&victim);
        }
        self.slots.insert(adapter, Slot { ready: None, leases: 0, last_use: self.uses });
        self.num_loads += 1;
        let earliest = self.read(adapter, now);
        self.copies.push(Reverse((earliest, self.num_loads, adapter)));
        self.advance(now);
        true
    }

    /// Brings an adapter into host memory, and returns when it is there.
    fn read(&mut self, adapter: Adapter, now: Time) -> Time {
        if self.host.insert(adapter, self.uses).is_some() {
            return now;
        }
        if self.host.len() > self.hardware.host_adapters {
            let victim = self.host.iter().min_by_key(|(_, last_use)| **last_use).map(|(adapter, _)| *adapter);
            victim.map(|victim| self.host.remove(&victim));
        }
        self.disk_is_free = self.disk_is_free.max(now) + self.hardware.read_us;
        self.disk_is_free
    }

    /// Keeps an adapter that is ready, or on its way, in its slot.
    pub fn lease(&mut self, adapter: Adapter) {
        self.uses += 1;
        let slot = self.slots.get_mut(&adapter).expect("a leased adapter has a slot");
        slot.leases += 1;
        slot.last_use = self.uses;
    }

    pub fn release(&mut self, adapter: Adapter) {
        self.uses += 1;
        let slot = self.slots.get_mut(&adapter).expect("a leased adapter has a slot");
        slot.leases -= 1;
        slot.last_use = self.uses;
    }

    /// Drops the adapters that are ready, and neither leased nor to be kept.
    pub fn drop_idle(&mut self, now: Time, keep: &[Adapter]) {
        self.slots.retain(|adapter, slot| {
            slot.leases > 0 || slot.ready.is_none_or(|ready| ready > now) || keep.contains(adapter)
        });
    }

    /// Slots without an adapter.
    pub fn free_slots(&self) -> usize {
        self.hardware.slots - self.slots.len()
    }

    /// Loads that were begun.
    pub fn num_loads(&self) -> u64 {
        self.num_loads
    }
}
