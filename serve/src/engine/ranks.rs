//! An engine on the ranks of a tensor-parallel group, each on a thread of its own.
//!
//! The first rank has the scheduler. It tells the others all that it does to its model and its adapters ([`Order`]), and does the same
//! itself. So all ranks enqueue the same steps, in which they exchange activations, and make the same calls of their part of the
//! library's [`GroupPool`], which loads an adapter into the same slot of all ranks, or of none.
//!
//! Invariant: no rank waits for one that has ended. All of a rank's waits for others are exchanges, which fail, or of device work, before
//! which [`Capture::wait`] looks after the other ranks.

use std::{
    collections::{HashMap, VecDeque},
    mem, result,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::Duration,
};

use aril::{
    Slot,
    error::LoadError,
    group::{Group, GroupError, GroupPool},
    pool::{AdapterId, PoolConfig, PoolError, Snapshot, Source, Tier},
};

use super::{
    graph::Capture,
    plan::Plan,
    pool::{Lease, Pool, Steps},
    runner::Runner,
};
use crate::{
    device::Slots,
    error::{Context as _, Error, Result, bail},
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

/// What is done to an adapter.
#[derive(Clone)]
pub(crate) enum Change {
    /// Reads it into host memory, beside steps.
    Read(AdapterId, Source),
    /// Leases it, and loads it before if it is not on the device.
    Acquire(AdapterId),
    Release(AdapterId),
    Remove(AdapterId),
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
    adapters: &mut RankPool<'_, D>,
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

/// The adapters of one rank.
pub(crate) struct RankPool<'d, D: Capture> {
    device: &'d D,
    pool: GroupPool<Rank, D::Adapters>,
    sources: HashMap<AdapterId, Source>,
}

impl<'d, D: Capture> RankPool<'d, D> {
    /// The part of a rank's table in the pool of its group.
    pub(crate) fn new(device: &'d D, rank: &Rank, table: D::Adapters, config: &PoolConfig) -> Result<Self> {
        let pool = GroupPool::new(Group::new(rank.clone(), table)?)?;
        let pool = pool.with_host_tier(config.host_bytes, config.packers)?;
        Ok(Self { device, pool, sources: HashMap::new() })
    }

    /// What has the slots of the adapters.
    pub(crate) fn slots(&self) -> Slots<'_, D> {
        Slots::Ranks(&self.pool)
    }

    /// Does to an adapter what all ranks do.
    fn carry_out(&mut self, change: Change) -> Result<()> {
        match change {
            Change::Read(id, source) => {
                // The load fails alike, and tells all ranks of it.
                let _ = self.pool.prefetch(id.get(), source.clone());
                self.sources.insert(id, source);
            }
            // All ranks have the same result.
            Change::Acquire(id) => drop(self.acquire(id)?),
            Change::Release(id) => self.pool.release(id.get())?,
            Change::Remove(id) => {
                self.pool.remove(id.get())?;
                self.sources.remove(&id);
            }
        }
        Ok(())
    }

    /// Leases an adapter on all ranks, or returns why none of them can.
    fn acquire(&mut self, id: AdapterId) -> Result<result::Result<Slot, GroupError>> {
        // The ranks of one process have the number in common.
        let version = id.get();
        if self.pool.slot(version).is_none() {
            // A load may wait for memory that is in use on the device.
            self.device.wait()?;
        }
        let Some(source) = self.sources.get(&id) else { bail!("{id} was never read") };
        match self.pool.acquire_from(version, source) {
            Err(error @ (GroupError::Refused { .. } | GroupError::NoFreeSlot)) => Ok(Err(error)),
            slot => Ok(Ok(slot.context(id)?)),
        }
    }
}

/// The pool of a group, as its first rank decides for all.
///
/// An adapter is read by all ranks beside steps. Once the first one has read it, all load it between two steps, and so it is known to be
/// whole on each of them. Later, a step that needs it may wait for its copy from host memory.
pub(crate) struct PoolOfRanks<'d, D: Capture> {
    own: RankPool<'d, D>,
    others: Others,
    versions: HashMap<AdapterId, Version>,
    /// Those whose first load has not ended, in their order.
    loading: Vec<AdapterId>,
    failures: VecDeque<(AdapterId, Arc<LoadError>)>,
    releases: Receiver<AdapterId>,
    release: Sender<AdapterId>,
    /// Whether a load waits for a lease to end.
    is_full: bool,
    /// Why the group cannot go on.
    broken: Option<Error>,
}

/// An adapter that is registered, or was and has leases.
struct Version {
    source: Source,
    state: State,
    leases: usize,
    is_registered: bool,
    /// Whether it has been read since the last attempt to load it.
    is_read: bool,
}

enum State {
    /// Not loaded by all ranks yet.
    New,
    /// All ranks have loaded it before.
    Whole,
    Failed(Arc<LoadError>),
}

/// Ends a lease when it is dropped.
struct Hold {
    id: AdapterId,
    release: Sender<AdapterId>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Without a receiver, the pool is gone.
        let _ = self.release.send(self.id);
    }
}

impl<'d, D: Capture> PoolOfRanks<'d, D> {
    pub(crate) fn new(own: RankPool<'d, D>, others: Others) -> Self {
        let (release, releases) = channel();
        Self {
            own,
            others,
            versions: HashMap::new(),
            loading: Vec::new(),
            failures: VecDeque::new(),
            releases,
            release,
            is_full: false,
            broken: None,
        }
    }

    fn known(&self, id: AdapterId) -> Option<&Version> {
        self.versions.get(&id).filter(|version| version.is_registered)
    }

    /// Does to an adapter on this rank what the others are told to do. An error ends the engine at the next commit.
    fn carry_out(&mut self, change: Change) {
        self.others.tell(|| Order::Adapter(change.clone()));
        if let Err(error) = self.own.carry_out(change) {
            self.broken.get_or_insert(error);
        }
    }

    fn read(&mut self, id: AdapterId) {
        let Some(version) = self.versions.get_mut(&id) else { return };
        version.is_read = true;
        let source = version.source.clone();
        self.carry_out(Change::Read(id, source));
    }

    /// Leases an adapter on all ranks. An adapter that cannot be loaded has failed; if there is no room, it may be tried again.
    fn lease(&mut self, id: AdapterId) -> result::Result<Slot, PoolError> {
        if self.broken.is_some() {
            return Err(PoolError::Full);
        }
        self.others.tell(|| Order::Adapter(Change::Acquire(id)));
        let leased = match self.own.acquire(id) {
            Ok(leased) => leased,
            Err(error) => {
                self.broken = Some(error);
                return Err(PoolError::Full);
            }
        };
        let is_leasing = self.versions.values().any(|version| version.leases > 0);
        let Some(version) = self.versions.get_mut(&id) else { return Err(PoolError::Unknown { id }) };
        version.is_read = false;
        match leased {
            Ok(slot) => {
                version.leases += 1;
                version.state = State::Whole;
                Ok(slot)
            }
            // Another lease will end, and make room.
            Err(error) if error.is_full() && is_leasing => {
                self.is_full = true;
                Err(PoolError::Full)
            }
            Err(error) => {
                let error = Arc::new(LoadError::Group(Box::new(error)));
                version.state = State::Failed(Arc::clone(&error));
                self.failures.push_back((id, Arc::clone(&error)));
                Err(PoolError::Failed { id, error })
            }
        }
    }

    fn end_lease(&mut self, id: AdapterId) {
        self.carry_out(Change::Release(id));
        self.is_full = false;
        if let Some(version) = self.versions.get_mut(&id) {
            version.leases -= 1;
            self.forget(id);
        }
    }

    /// Forgets a version that is not registered any more, unless it has leases.
    fn forget(&mut self, id: AdapterId) {
        if self.versions.get(&id).is_some_and(|version| !version.is_registered && version.leases == 0) {
            self.versions.remove(&id);
            self.carry_out(Change::Remove(id));
        }
    }

    /// Loads new adapters that have been read, as far as there is room.
    fn load_new(&mut self) {
        for id in mem::take(&mut self.loading) {
            if self.known(id).is_none() {
                continue;
            }
            if self.is_full || self.own.pool.is_reading(id.get()) {
                self.loading.push(id);
                continue;
            }
            match self.lease(id) {
                Ok(_) => self.end_lease(id),
                Err(PoolError::Full) => self.loading.push(id),
                // It is among the failures.
                Err(_) => {}
            }
        }
    }
}

impl<D: Capture> Steps<D> for PoolOfRanks<'_, D> {
    fn slots(&self) -> Slots<'_, D> {
        self.own.slots()
    }
}

impl<D: Capture> Pool for PoolOfRanks<'_, D> {
    fn register(&mut self, source: Source) -> result::Result<AdapterId, PoolError> {
        let id = AdapterId::unique();
        let version = Version { source, state: State::New, leases: 0, is_registered: true, is_read: false };
        self.versions.insert(id, version);
        Ok(id)
    }

    fn unregister(&mut self, id: AdapterId) -> result::Result<(), PoolError> {
        let version = self.versions.get_mut(&id).filter(|version| version.is_registered);
        version.ok_or(PoolError::Unknown { id })?.is_registered = false;
        self.forget(id);
        Ok(())
    }

    fn prefetch(&mut self, id: AdapterId) -> result::Result<(), PoolError> {
        let version = self.known(id).ok_or(PoolError::Unknown { id })?;
        match &version.state {
            State::Failed(error) => return Err(PoolError::Failed { id, error: Arc::clone(error) }),
            State::New if !self.loading.contains(&id) => {
                self.loading.push(id);
                self.read(id);
            }
            State::Whole if !version.is_read && self.own.pool.tier(id.get()) == Tier::Source => self.read(id),
            State::New | State::Whole => {}
        }
        Ok(())
    }

    fn retry(&mut self, id: AdapterId) -> result::Result<(), PoolError> {
        if let Some(version @ Version { state: State::Failed(_), .. }) = self.versions.get_mut(&id) {
            version.state = State::New;
        }
        self.prefetch(id)
    }

    fn next_failure(&mut self) -> Option<(AdapterId, Arc<LoadError>)> {
        self.failures.pop_front()
    }

    fn is_loaded(&mut self, id: AdapterId) -> result::Result<bool, PoolError> {
        match &self.known(id).ok_or(PoolError::Unknown { id })?.state {
            State::Failed(error) => Err(PoolError::Failed { id, error: Arc::clone(error) }),
            State::New => Ok(false),
            State::Whole => Ok(true),
        }
    }

    fn has_failed(&self, id: AdapterId) -> bool {
        self.known(id).is_some_and(|version| matches!(version.state, State::Failed(_)))
    }

    /// That of the first rank. The others may have other adapters in host memory.
    fn tier(&self, id: AdapterId) -> Option<Tier> {
        self.known(id).map(|_| self.own.pool.tier(id.get()))
    }

    fn acquire(&mut self, id: AdapterId) -> result::Result<Lease, PoolError> {
        self.known(id).ok_or(PoolError::Unknown { id })?;
        if self.own.pool.slot(id.get()).is_none() {
            self.prefetch(id)?;
            if self.loading.contains(&id) || self.own.pool.is_reading(id.get()) {
                return Err(PoolError::Loading { id });
            }
            if self.is_full {
                return Err(PoolError::Full);
            }
        }
        let slot = self.lease(id)?;
        Ok(Lease::new(slot, Hold { id, release: self.release.clone() }))
    }

    fn commit(&mut self) -> Result<()> {
        while let Ok(id) = self.releases.try_recv() {
            self.end_lease(id);
        }
        self.load_new();
        self.broken.take().map_or(Ok(()), Err)
    }

    fn wait(&mut self, timeout: Duration) -> bool {
        self.own.pool.wait(timeout)
    }

    /// That of the first rank.
    fn snapshot(&self) -> Snapshot {
        let mut snapshot = self.own.pool.snapshot();
        snapshot.adapters = self.versions.values().filter(|version| version.is_registered).count();
        snapshot.waiting = self.loading.len();
        snapshot
    }
}
