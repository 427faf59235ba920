//! An engine on the ranks of a tensor-parallel group, each on a thread of its own.
//!
//! The first rank has the scheduler. It tells the others all that it does to its model and its adapters ([`Order`]), and does the same
//! itself. So all ranks enqueue the same steps, in which they exchange activations, and make the same calls of their part of the
//! library's [`GroupPool`].
//!
//! Invariant: no rank waits for one that has ended. All of a rank's waits for others are exchanges, which fail, or of device work, before
//! which [`Capture::wait`] looks after the other ranks.

use std::{
    collections::HashMap,
    result,
    sync::mpsc::{Receiver, Sender, channel},
    time::Duration,
};

use aril::{
    Slot,
    group::GroupPool,
    pool::{self, AdapterId, Load, PoolError, Residency, Snapshot, Source, StreamId},
};

use super::{
    graph::Capture,
    plan::Plan,
    pool::{Lease, Pool, Steps, Version},
    runner::Runner,
};
use crate::{
    device::Slots,
    error::{Result, bail},
    group::Rank,
};

/// What the first rank does, and all others do after it.
pub(crate) enum Order {
    /// Enqueues a step, which may be behind the last one.
    Step(Plan, bool),
    Adapter(Change),
    /// Ends, once all earlier orders have been carried out.
    End,
}

/// A call of the pool. Ranks have different ids of an adapter, so that versions are numbered as their loads begin, and leases as they
/// are granted.
#[derive(Clone)]
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

/// The other ranks of the first one's group.
#[derive(Clone, Default)]
pub(crate) struct Others(Vec<Sender<Order>>);

impl Others {
    /// The channels to as many ranks, and their ends.
    pub(crate) fn new(count: usize) -> (Self, Vec<Receiver<Order>>) {
        let (orders, received) = (0..count).map(|_| channel()).unzip();
        (Self(orders), received)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn tell(&self, order: impl Fn() -> Order) {
        for rank in &self.0 {
            // The next exchange fails if a rank has ended.
            let _ = rank.send(order());
        }
    }
}

/// Carries out the orders of the first rank until the last of them.
pub(crate) fn follow<D: Capture>(
    runner: &mut Runner<'_, D>,
    adapters: &mut RankPool<D>,
    orders: &Receiver<Order>,
) -> Result<()> {
    loop {
        match orders.recv() {
            Ok(Order::Step(mut plan, is_behind)) => {
                adapters.name_own_slots(&mut plan)?;
                drop(runner.enqueue(adapters.slots(), &plan, is_behind)?);
            }
            Ok(Order::Adapter(change)) => adapters.carry_out(change)?,
            Ok(Order::End) => return Ok(()),
            Err(_) => bail!("rank 0 has ended"),
        }
    }
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
    pub(crate) fn new(pool: GroupPool<Rank, D::Tiers>) -> Self {
        Self { pool, versions: HashMap::new(), loaded: 0, leases: HashMap::new(), leased: 0 }
    }

    /// What has the slots of the adapters.
    pub(crate) fn slots(&self) -> Slots<'_, D> {
        Slots::Ranks(&self.pool)
    }

    /// Names the slots of the first rank's plan as the leases of this rank do: the ranks have the same slots, and different copies.
    fn name_own_slots(&self, plan: &mut Plan) -> Result<()> {
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
    fn carry_out(&mut self, change: Change) -> result::Result<(), PoolError> {
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

    /// Leases an adapter. Returns the lease's number.
    fn acquire(&mut self, id: AdapterId) -> result::Result<u64, PoolError> {
        let lease = self.pool.acquire(id, StreamId::FIRST)?;
        self.leased += 1;
        self.leases.insert(self.leased, lease);
        Ok(self.leased)
    }
}

/// The pool of a group, as its first rank decides for all.
pub(crate) struct PoolOfRanks<D: Capture> {
    own: RankPool<D>,
    others: Others,
    numbers: HashMap<AdapterId, u64>,
    /// What the drops of holds change.
    changes: Receiver<Change>,
    sender: Sender<Change>,
}

/// A hold on a lease or a version. Its drop makes a change.
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

impl<D: Capture> PoolOfRanks<D> {
    pub(crate) fn new(own: RankPool<D>, others: Others) -> Self {
        let (sender, changes) = channel();
        Self { own, others, numbers: HashMap::new(), changes, sender }
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

impl<D: Capture> Steps<D> for PoolOfRanks<D> {
    fn slots(&self) -> Slots<'_, D> {
        self.own.slots()
    }
}

impl<D: Capture> Pool for PoolOfRanks<D> {
    fn load(&mut self, source: Source) -> result::Result<Version, PoolError> {
        self.tell(Change::Load(source.clone()));
        let load = self.own.load(source)?;
        self.numbers.insert(load.id(), self.own.loaded);
        Ok(Version::new(load, self.hold(Change::Unload(self.own.loaded))))
    }

    fn prefetch(&mut self, id: AdapterId) -> result::Result<Load, PoolError> {
        // To ask for it again would only take an exchange.
        if let Some(load) = self.loading(id) {
            return Ok(load);
        }
        self.tell(Change::Prefetch(self.number(id)?));
        self.own.pool.prefetch(id)
    }

    fn retry(&mut self, id: AdapterId) -> result::Result<Load, PoolError> {
        self.tell(Change::Retry(self.number(id)?));
        self.own.pool.retry(id)
    }

    fn pin(&mut self, id: AdapterId) -> result::Result<(), PoolError> {
        self.tell(Change::Pin(self.number(id)?));
        self.own.pool.pin(id)
    }

    fn loading(&self, id: AdapterId) -> Option<Load> {
        self.own.pool.loading(id)
    }

    fn residency(&self, id: AdapterId) -> Option<Residency> {
        self.own.pool.residency(id)
    }

    fn acquire(&mut self, id: AdapterId) -> result::Result<Lease, PoolError> {
        // As for a prefetch.
        if self.loading(id).is_some() {
            return Err(PoolError::Loading { id });
        }
        self.tell(Change::Acquire(self.number(id)?));
        match self.own.acquire(id) {
            Ok(number) => {
                let slot = self.own.leases[&number].slot();
                Ok(Lease::new(slot, self.hold(Change::Release(number))))
            }
            // The next end of a step says why the ranks cannot go on.
            Err(PoolError::Load(_)) => Err(PoolError::Full),
            Err(error) => Err(error),
        }
    }

    fn end_step(&mut self) -> Result<()> {
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

    fn wait(&mut self, timeout: Duration) -> bool {
        self.tell(Change::Wait(timeout));
        self.own.pool.wait(timeout)
    }

    /// That of the first rank.
    fn snapshot(&self) -> Snapshot {
        self.own.pool.snapshot()
    }
}
