//! An engine on the ranks of a tensor-parallel group, each on a thread of its own.
//!
//! The first rank has the scheduler. It tells the others all that it does to its model and its adapters ([`Order`]), and does the same
//! itself. So all ranks enqueue the same steps, in which they exchange activations, and make the same calls of their part of the
//! library's [`GroupPool`].
//!
//! Invariant: no rank waits for one that has ended. All of a rank's waits for others are exchanges, which fail, or of device work, before
//! which [`Capture::wait`] looks after the other ranks.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    result,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::Duration,
};

use aril::{
    error::LoadError,
    group::GroupPool,
    pool::{self, AdapterId, PoolError, Residency, Snapshot, Source, StreamId, Tier},
};

use super::{
    graph::Capture,
    plan::Plan,
    pool::{Lease, Pool, Steps},
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

/// A call of the pool. Ranks have different ids of an adapter, so that adapters are numbered as they are registered, and leases as they
/// are granted.
#[derive(Clone)]
pub(crate) enum Change {
    Register(Source),
    Unregister(u64),
    Prefetch(u64),
    Retry(u64),
    Acquire(u64),
    Release(u64),
    Commit,
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
            Ok(Order::Step(plan, is_behind)) => drop(runner.enqueue(adapters.slots(), &plan, is_behind)?),
            Ok(Order::Adapter(change)) => adapters.carry_out(change)?,
            Ok(Order::End) => return Ok(()),
            Err(_) => bail!("rank 0 has ended"),
        }
    }
}

/// The pool of one rank.
pub(crate) struct RankPool<D: Capture> {
    pool: GroupPool<Rank, D::Tiers>,
    /// The adapters' ids, by number.
    ids: HashMap<u64, AdapterId>,
    registered: u64,
    /// By number.
    leases: HashMap<u64, pool::Lease>,
    leased: u64,
}

impl<D: Capture> RankPool<D> {
    pub(crate) fn new(pool: GroupPool<Rank, D::Tiers>) -> Self {
        Self { pool, ids: HashMap::new(), registered: 0, leases: HashMap::new(), leased: 0 }
    }

    /// What has the slots of the adapters.
    pub(crate) fn slots(&self) -> Slots<'_, D> {
        Slots::Ranks(&self.pool)
    }

    /// Does what all ranks do, with the same result. If they cannot go on, the next commit returns an error.
    fn carry_out(&mut self, change: Change) -> result::Result<(), PoolError> {
        match change {
            Change::Register(source) => drop(self.register(source)),
            Change::Unregister(number) => drop(self.unregister(number)),
            Change::Prefetch(number) => drop(self.prefetch(number)),
            Change::Retry(number) => drop(self.retry(number)),
            Change::Acquire(number) => drop(self.acquire(number)),
            Change::Release(number) => drop(self.leases.remove(&number)),
            Change::Commit => return self.commit().map(drop),
            Change::Wait(timeout) => {
                self.pool.wait(timeout);
            }
        }
        Ok(())
    }

    fn register(&mut self, source: Source) -> result::Result<AdapterId, PoolError> {
        self.registered += 1;
        let id = self.pool.register(source)?;
        self.ids.insert(self.registered, id);
        Ok(id)
    }

    fn unregister(&mut self, number: u64) -> result::Result<(), PoolError> {
        self.ids.remove(&number).map_or(Ok(()), |id| self.pool.unregister(id))
    }

    fn prefetch(&mut self, number: u64) -> result::Result<(), PoolError> {
        self.ids.get(&number).map_or(Ok(()), |&id| self.pool.prefetch(id))
    }

    fn retry(&mut self, number: u64) -> result::Result<(), PoolError> {
        self.ids.get(&number).map_or(Ok(()), |&id| self.pool.retry(id))
    }

    /// Leases an adapter. Returns the lease's number.
    fn acquire(&mut self, number: u64) -> result::Result<Option<u64>, PoolError> {
        let Some(&id) = self.ids.get(&number) else { return Ok(None) };
        let lease = self.pool.acquire(id, StreamId::FIRST)?;
        self.leased += 1;
        self.leases.insert(self.leased, lease);
        Ok(Some(self.leased))
    }

    /// Ends a step, and returns how loads have ended.
    fn commit(&mut self) -> result::Result<Vec<pool::Outcome>, PoolError> {
        self.pool.commit(StreamId::FIRST)?;
        let mut outcomes = Vec::new();
        while let Some(outcome) = self.pool.next_outcome() {
            outcomes.push(outcome);
        }
        Ok(outcomes)
    }
}

/// The pool of a group, as its first rank decides for all.
pub(crate) struct PoolOfRanks<D: Capture> {
    own: RankPool<D>,
    others: Others,
    numbers: HashMap<AdapterId, u64>,
    /// Adapters that are on their way, as far as has been heard: to ask for them again would only take an exchange.
    asked: HashSet<AdapterId>,
    failures: VecDeque<(AdapterId, Arc<LoadError>)>,
    releases: Receiver<u64>,
    release: Sender<u64>,
}

/// Ends a lease when it is dropped.
struct Hold {
    number: u64,
    release: Sender<u64>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Without a receiver, the pool is gone.
        let _ = self.release.send(self.number);
    }
}

impl<D: Capture> PoolOfRanks<D> {
    pub(crate) fn new(own: RankPool<D>, others: Others) -> Self {
        let (release, releases) = channel();
        Self {
            own,
            others,
            numbers: HashMap::new(),
            asked: HashSet::new(),
            failures: VecDeque::new(),
            releases,
            release,
        }
    }

    /// Tells the other ranks what this one is about to do.
    fn tell(&self, change: Change) {
        self.others.tell(|| Order::Adapter(change.clone()));
    }

    fn number(&self, id: AdapterId) -> result::Result<u64, PoolError> {
        self.numbers.get(&id).copied().ok_or(PoolError::Unknown { id })
    }

    /// Takes note of an adapter that a call has asked for.
    fn ask(&mut self, id: AdapterId) {
        if self.tier(id) == Some(Tier::Source) && !self.has_failed(id) {
            self.asked.insert(id);
        }
    }
}

impl<D: Capture> Steps<D> for PoolOfRanks<D> {
    fn slots(&self) -> Slots<'_, D> {
        self.own.slots()
    }
}

impl<D: Capture> Pool for PoolOfRanks<D> {
    fn register(&mut self, source: Source) -> result::Result<AdapterId, PoolError> {
        self.tell(Change::Register(source.clone()));
        let id = self.own.register(source)?;
        self.numbers.insert(id, self.own.registered);
        Ok(id)
    }

    fn unregister(&mut self, id: AdapterId) -> result::Result<(), PoolError> {
        let number = self.number(id)?;
        self.tell(Change::Unregister(number));
        self.numbers.remove(&id);
        self.asked.remove(&id);
        self.own.unregister(number)
    }

    fn prefetch(&mut self, id: AdapterId) -> result::Result<(), PoolError> {
        let number = self.number(id)?;
        if self.asked.contains(&id) {
            return Ok(());
        }
        self.tell(Change::Prefetch(number));
        self.own.prefetch(number)?;
        self.ask(id);
        Ok(())
    }

    fn retry(&mut self, id: AdapterId) -> result::Result<(), PoolError> {
        let number = self.number(id)?;
        self.tell(Change::Retry(number));
        self.own.retry(number)?;
        self.ask(id);
        Ok(())
    }

    fn next_failure(&mut self) -> Option<(AdapterId, Arc<LoadError>)> {
        self.failures.pop_front()
    }

    fn residency(&self, id: AdapterId) -> Option<Residency> {
        self.own.pool.residency(id)
    }

    fn acquire(&mut self, id: AdapterId) -> result::Result<Lease, PoolError> {
        let number = self.number(id)?;
        if self.asked.contains(&id) {
            return Err(PoolError::Loading { id });
        }
        self.tell(Change::Acquire(number));
        match self.own.acquire(number) {
            Ok(Some(number)) => {
                let slot = self.own.leases[&number].slot();
                Ok(Lease::new(slot, Hold { number, release: self.release.clone() }))
            }
            Ok(None) => Err(PoolError::Unknown { id }),
            // The next commit says why the ranks cannot go on.
            Err(PoolError::Load(_)) => Err(PoolError::Full),
            Err(error) => {
                if matches!(error, PoolError::Loading { .. }) {
                    self.ask(id);
                }
                Err(error)
            }
        }
    }

    fn commit(&mut self) -> Result<()> {
        while let Ok(number) = self.releases.try_recv() {
            self.tell(Change::Release(number));
            self.own.leases.remove(&number);
        }
        self.tell(Change::Commit);
        for outcome in self.own.commit()? {
            self.asked.remove(&outcome.id);
            if let Err(error) = outcome.result {
                self.failures.push_back((outcome.id, error));
            }
        }
        let pool = &self.own.pool;
        self.asked.retain(|&id| pool.residency(id).is_some_and(|residency| residency.tier == Tier::Source));
        Ok(())
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
