//! The adapters of an engine: on each of its ranks, or the only one, a part of the library's [`GroupPool`].
//!
//! The first rank decides for all: [`Pool`] tells the other ranks each call of their part ([`Change`]) before it makes
//! the same one itself.

use std::{
    collections::HashMap,
    result,
    sync::mpsc::{Receiver, Sender, channel},
    time::Duration,
};

use aril::{
    Slot,
    group::GroupPool,
    pool::{self, AdapterId, AdapterPool, Load, PoolError, Residency, Snapshot, Source, StreamId, Tier},
};

use crate::{
    device::Slots,
    error::{Result, bail},
    group::Rank,
};
use crate::{
    graph::Capture,
    plan::Plan,
    ranks::{Order, Others},
};

/// Why an adapter is not there, without its number, which nobody else knows.
pub fn sentence(error: &PoolError) -> String {
    match error {
        PoolError::Failed { error, .. } => error.to_string(),
        PoolError::TooLarge { bytes, what, max, .. } => {
            format!("it has {bytes} bytes, and the {what} has {max} (--arena-mib, --host-mib)")
        }
        PoolError::Pinned { .. } => {
            "pinned beside the others, it would leave no room for those that are not (--arena-mib)".into()
        }
        error => error.to_string(),
    }
}

/// A call of the pool. Ranks have different ids of an adapter, so that versions are numbered as their loads begin, and
/// leases as they are granted.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Load(Source),
    Unload(u64),
    Prefetch(u64),
    Retry(u64),
    Pin(u64),
    Acquire(u64),
    Release(u64),
    EndStep,
    Wait(Duration),
}

/// The pool of one rank.
pub(crate) struct RankPool<D: Capture> {
    pool: GroupPool<Rank, D::Tiers>,
    /// By number.
    versions: HashMap<u64, pool::Version>,
    loaded: u64,
    /// By number.
    leases: HashMap<u64, pool::Lease>,
    leased: u64,
}

impl<D: Capture> RankPool<D> {
    /// The part of a rank, of which `pool` is the memory, without adapters.
    pub(crate) fn new(rank: Rank, pool: AdapterPool<D::Tiers>) -> Result<Self> {
        let pool = GroupPool::new(rank, pool)?;
        Ok(Self { pool, versions: HashMap::new(), loaded: 0, leases: HashMap::new(), leased: 0 })
    }

    /// What has the slots of the adapters.
    pub(crate) fn slots(&self) -> Slots<'_, D> {
        Slots::Ranks(&self.pool)
    }

    /// Names the slots of the first rank's plan as the leases of this rank do: the ranks have the same slots, and
    /// different copies.
    pub(super) fn name_own_slots(&self, plan: &mut Plan) -> Result<()> {
        let own = self.leases.values().map(|lease| (lease.slot().index(), lease.slot()));
        let own: HashMap<Option<usize>, Slot> = own.chain([(None, Slot::BASE)]).collect();
        for chunk in &mut plan.chunks {
            let Some(&slot) = own.get(&chunk.slot.index()) else {
                bail!("this rank has not leased {:?}, which rank 0 has", chunk.slot);
            };
            chunk.slot = slot;
        }
        Ok(())
    }

    /// Does what all ranks do, with the same result. If they cannot go on, the next end of a step returns an error.
    pub(super) fn carry_out(&mut self, change: Change) -> result::Result<(), PoolError> {
        match change {
            Change::Load(source) => drop(self.load(source)),
            Change::Unload(number) => drop(self.versions.remove(&number)),
            Change::Prefetch(number) => drop(self.id(number).map(|id| self.pool.prefetch(id))),
            Change::Retry(number) => drop(self.id(number).map(|id| self.pool.retry(id))),
            Change::Pin(number) => drop(self.id(number).map(|id| self.pool.pin(id))),
            Change::Acquire(number) => drop(self.id(number).map(|id| self.acquire(id))),
            Change::Release(number) => drop(self.leases.remove(&number)),
            Change::EndStep => return self.pool.end_step(StreamId::FIRST),
            Change::Wait(timeout) => {
                self.pool.wait(timeout);
            }
        }
        Ok(())
    }

    fn id(&self, number: u64) -> Option<AdapterId> {
        self.versions.get(&number).map(pool::Version::id)
    }

    /// Loads an adapter, whose version has the number `loaded` then.
    fn load(&mut self, source: Source) -> result::Result<Load, PoolError> {
        self.loaded += 1;
        let version = self.pool.load(Ok(source))?;
        let load = version.load().clone();
        self.versions.insert(self.loaded, version);
        Ok(load)
    }

    /// Leases an adapter, with the number `leased` then. Returns its slot.
    fn acquire(&mut self, id: AdapterId) -> result::Result<Slot, PoolError> {
        let lease = self.pool.acquire(id, StreamId::FIRST)?;
        let slot = lease.slot();
        self.leased += 1;
        self.leases.insert(self.leased, lease);
        Ok(slot)
    }
}

/// The pool of an engine, as its first rank decides for all.
pub(crate) struct Pool<D: Capture> {
    own: RankPool<D>,
    pub(super) others: Others,
    numbers: HashMap<AdapterId, u64>,
    /// What the drops of holds change.
    changes: Receiver<Change>,
    sender: Sender<Change>,
}

/// A hold on a lease or a version. Its drop makes a change, at the end of the step.
#[derive(Debug)]
struct Hold {
    change: Change,
    sender: Sender<Change>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Without a receiver, the pool is gone.
        let _ = self.sender.send(self.change.clone());
    }
}

/// A running request's hold on its adapter's slot.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) slot: Slot,
    _hold: Hold,
}

/// A version of an adapter that the pool knows until it is dropped.
#[derive(Debug)]
pub(crate) struct Version {
    /// Its first load.
    pub(crate) load: Load,
    _hold: Hold,
}

impl<D: Capture> Pool<D> {
    /// The pool of the rank `own` and the `others`, if there are any.
    pub(crate) fn new(own: RankPool<D>, others: Others) -> Self {
        let (sender, changes) = channel();
        Self { own, others, numbers: HashMap::new(), changes, sender }
    }

    pub(crate) fn slots(&self) -> Slots<'_, D> {
        self.own.slots()
    }

    pub(crate) fn load(&mut self, source: Source) -> result::Result<Version, PoolError> {
        self.tell(Change::Load(source.clone()));
        let load = self.own.load(source)?;
        self.numbers.insert(load.id(), self.own.loaded);
        Ok(Version { load, _hold: self.hold(Change::Unload(self.own.loaded)) })
    }

    pub(crate) fn prefetch(&mut self, id: AdapterId) -> result::Result<Load, PoolError> {
        // To ask for it again would only take an exchange.
        if let Some(load) = self.loading(id) {
            return Ok(load);
        }
        self.tell(Change::Prefetch(self.number(id)?));
        self.own.pool.prefetch(id)
    }

    pub(crate) fn retry(&mut self, id: AdapterId) -> result::Result<Load, PoolError> {
        self.tell(Change::Retry(self.number(id)?));
        self.own.pool.retry(id)
    }

    pub(crate) fn pin(&mut self, id: AdapterId) -> result::Result<(), PoolError> {
        self.tell(Change::Pin(self.number(id)?));
        self.own.pool.pin(id)
    }

    /// The load of an adapter that is under way.
    pub(crate) fn loading(&self, id: AdapterId) -> Option<Load> {
        self.own.pool.loading(id)
    }

    /// Whether the last load of an adapter has failed.
    pub(crate) fn has_failed(&self, id: AdapterId) -> bool {
        self.residency(id).is_some_and(|residency| residency.failure.is_some())
    }

    /// The fastest tier that an adapter is in; `None` if it is not known.
    pub(crate) fn tier(&self, id: AdapterId) -> Option<Tier> {
        self.residency(id).map(|residency| residency.tier)
    }

    fn residency(&self, id: AdapterId) -> Option<Residency> {
        self.own.pool.residency(id)
    }

    pub(crate) fn acquire(&mut self, id: AdapterId) -> result::Result<Lease, PoolError> {
        // As for a prefetch.
        if self.loading(id).is_some() {
            return Err(PoolError::Loading { id });
        }
        self.tell(Change::Acquire(self.number(id)?));
        match self.own.acquire(id) {
            Ok(slot) => Ok(Lease { slot, _hold: self.hold(Change::Release(self.own.leased)) }),
            // The next end of a step says why the ranks cannot go on.
            Err(PoolError::Load(_)) if !self.others.is_empty() => Err(PoolError::Full),
            Err(error) => Err(error),
        }
    }

    /// Makes the changes of holds that have been dropped, and ends the step.
    pub(crate) fn end_step(&mut self) -> Result<()> {
        while let Ok(change) = self.changes.try_recv() {
            if let Change::Unload(number) = change {
                self.numbers.retain(|_, other| *other != number);
            }
            self.tell(change.clone());
            self.own.carry_out(change)?;
        }
        self.tell(Change::EndStep);
        Ok(self.own.pool.end_step(StreamId::FIRST)?)
    }

    pub(crate) fn wait(&mut self, timeout: Duration) -> bool {
        self.tell(Change::Wait(timeout));
        self.own.pool.wait(timeout)
    }

    /// That of the first rank.
    pub(crate) fn snapshot(&self) -> Snapshot {
        self.own.pool.snapshot()
    }

    /// Tells the other ranks what this one is about to do.
    fn tell(&self, change: Change) {
        self.others.tell(|| Order::Adapter(change.clone()));
    }

    fn hold(&self, change: Change) -> Hold {
        Hold { change, sender: self.sender.clone() }
    }

    fn number(&self, id: AdapterId) -> result::Result<u64, PoolError> {
        self.numbers.get(&id).copied().ok_or(PoolError::Unknown { id })
    }
}
