//! `--arena-mib`: the adapters in a pool of the library's, on one device or on all ranks of a group, and the batches of requests whose
//! adapters fit in it together.

use std::{mem, result, sync::Arc, time::Duration};

use aril::{
    Element, Slot,
    adapter::Adapter,
    group::{Group, GroupPool, HostTable},
    model::Model,
    pool::{AdapterId, Lease, PoolConfig, PoolError, Snapshot, Source},
};

use crate::{
    adapter_pool::AdapterPool,
    device::{Device, Slots},
    error::{Context, Result},
    group::Rank,
    model::capacity,
    requests::Request,
};

/// The longest wait for a loader thread before a batch is asked for again.
const WAIT: Duration = Duration::from_millis(10);

/// Forms batches of requests.
pub(crate) trait Batches<D: Device> {
    /// Takes the first of the waiting requests, and all behind it whose adapters fit beside those taken.
    fn next_batch(&mut self, requests: &[Request], waiting: &mut Vec<usize>) -> Result<Batch>;
    /// Ends a batch. Its adapters may be evicted from now on.
    fn finish(&mut self, batch: Batch) -> Result<()>;
    /// What has the slots of a batch.
    fn slots(&self) -> Slots<'_, D>;
    /// The state of the pool; `None` if there are several.
    fn snapshot(&self) -> Option<Snapshot>;
}

/// A pool that knows all adapters of a run.
pub(crate) struct Pooled<P> {
    pool: P,
    /// With their names.
    adapters: Vec<(String, AdapterId)>,
}

/// Requests that run together.
pub(crate) struct Batch {
    /// The indices of the requests, each with its adapter's slot.
    pub(crate) requests: Vec<(usize, Slot)>,
    leases: Vec<Lease>,
}

impl Batch {
    /// Takes all waiting requests, on a table that has the adapters in the slots 0, 1, ...
    pub(crate) fn of_all(requests: &[Request], waiting: &mut Vec<usize>) -> Result<Self> {
        let slot = |adapter: Option<usize>| adapter.map_or(Ok(Slot::BASE), |index| u16::try_from(index).map(Slot::new));
        let requests = waiting.drain(..).map(|request| Ok((request, slot(requests[request].adapter)?)));
        Ok(Self { requests: requests.collect::<Result<_>>()?, leases: Vec::new() })
    }
}

impl<P: AdapterPool> Pooled<P> {
    /// A pool for steps of at most `tokens` tokens, and the table whose slots it fills.
    pub(crate) fn new<D: Device<Pool = P>>(
        device: &D,
        model: &Model,
        adapters: &[(String, Arc<Adapter>)],
        tokens: usize,
        config: PoolConfig,
    ) -> Result<(Self, D::Adapters)> {
        let source = |(name, adapter): &(String, Arc<Adapter>)| {
            Source::memory(Arc::clone(adapter), model, D::Elem::DTYPE).context(format_args!("adapter `{name}`"))
        };
        let sources = adapters.iter().map(source).collect::<Result<Vec<_>>>()?;
        let (mut pool, table) =
            device.pool(model, capacity(tokens, sources.iter().map(Source::max_rank), &Rank::default())?, config)?;
        let register = |(source, (name, _)): (Source, &(String, Arc<Adapter>))| {
            let id = pool.register(source).context(format_args!("adapter `{name}`"))?;
            Ok((name.clone(), id))
        };
        let adapters = sources.into_iter().zip(adapters).map(register).collect::<Result<_>>()?;
        Ok((Self { pool, adapters }, table))
    }

    /// The place of an adapter among those of a batch, which it joins unless it is there; `None` if it does not fit beside them.
    fn place(&mut self, adapter: usize, ids: &mut Vec<AdapterId>) -> Result<Option<usize>> {
        let (name, id) = self.adapters[adapter].clone();
        let there = ids.iter().position(|&other| other == id);
        if there.is_some() {
            return Ok(there);
        }
        ids.push(id);
        match self.lease(ids) {
            Ok(_) => Ok(Some(ids.len() - 1)),
            Err(PoolError::TooLarge { .. }) => {
                ids.pop();
                Ok(None)
            }
            Err(error) => Err(error).context(format_args!("adapter `{name}`")),
        }
    }

    /// Leases adapters, which no batch uses now, together. Waits until they are there.
    fn lease(&mut self, ids: &[AdapterId]) -> result::Result<Vec<Lease>, PoolError> {
        loop {
            match self.pool.prepare(ids) {
                Err(PoolError::Loading { .. } | PoolError::Full) => {
                    self.pool.commit()?;
                    self.pool.wait(WAIT);
                }
                leases => return leases,
            }
        }
    }
}

impl<D: Device> Batches<D> for Pooled<D::Pool> {
    fn next_batch(&mut self, requests: &[Request], waiting: &mut Vec<usize>) -> Result<Batch> {
        let (mut ids, mut taken) = (Vec::new(), Vec::new());
        for request in mem::take(waiting) {
            let place = match requests[request].adapter {
                None => None,
                Some(adapter) => match self.place(adapter, &mut ids)? {
                    None => {
                        waiting.push(request);
                        continue;
                    }
                    place => place,
                },
            };
            taken.push((request, place));
        }
        let leases = self.lease(&ids)?;
        let slot = |place: Option<usize>| place.map_or(Slot::BASE, |place| leases[place].slot());
        let requests = taken.into_iter().map(|(request, place)| (request, slot(place))).collect();
        Ok(Batch { requests, leases })
    }

    fn finish(&mut self, batch: Batch) -> Result<()> {
        drop(batch.leases);
        Ok(self.pool.commit()?)
    }

    fn slots(&self) -> Slots<'_, D> {
        Slots::Pool(&self.pool)
    }

    fn snapshot(&self) -> Option<Snapshot> {
        Some(self.pool.snapshot())
    }
}

/// The pools of all ranks of a group. Every rank makes the same calls, and has each adapter in the same slot.
pub(crate) struct PooledOnRanks<T: HostTable> {
    pool: GroupPool<Rank, T>,
    /// With their names. Their places are their versions.
    adapters: Vec<(String, Arc<Adapter>)>,
    /// The adapters of the batch, one for each of its requests.
    leased: Vec<u64>,
}

impl<T: HostTable + Clone> PooledOnRanks<T> {
    /// Pools for steps of at most `tokens` tokens, and this rank's table.
    pub(crate) fn new<D: Device<Adapters = T>>(
        device: &D,
        model: &Model,
        adapters: &[(String, Arc<Adapter>)],
        tokens: usize,
        config: PoolConfig,
        rank: &Rank,
    ) -> Result<(Self, T)> {
        let max_rank = |(name, adapter): &(String, Arc<Adapter>)| {
            let image = adapter.plan(model, D::Elem::DTYPE).context(format_args!("adapter `{name}`"))?;
            Ok(image.max_rank())
        };
        let ranks = adapters.iter().map(max_rank).collect::<Result<Vec<_>>>()?;
        let capacity = capacity(tokens, ranks.into_iter(), rank)?;
        let table = device.adapters(model, capacity, config.arena_bytes)?;
        let pool = GroupPool::new(Group::new(rank.clone(), table.clone())?)?;
        let pool = pool.with_host_tier(config.host_bytes, config.packers)?;
        Ok((Self { pool, adapters: adapters.to_vec(), leased: Vec::new() }, table))
    }
}

impl<D: Device> Batches<D> for PooledOnRanks<D::Adapters> {
    fn next_batch(&mut self, requests: &[Request], waiting: &mut Vec<usize>) -> Result<Batch> {
        let mut taken = Vec::new();
        for request in mem::take(waiting) {
            let Some(index) = requests[request].adapter else {
                taken.push((request, Slot::BASE));
                continue;
            };
            let ((name, adapter), version) = (&self.adapters[index], index as u64);
            match self.pool.acquire(version, || Ok(Arc::clone(adapter))) {
                Ok(slot) => {
                    self.leased.push(version);
                    taken.push((request, slot));
                }
                Err(error) if error.is_full() && !self.leased.is_empty() => waiting.push(request),
                Err(error) => return Err(error).context(format_args!("adapter `{name}`")),
            }
        }
        Ok(Batch { requests: taken, leases: Vec::new() })
    }

    fn finish(&mut self, _: Batch) -> Result<()> {
        Ok(self.leased.drain(..).try_for_each(|version| self.pool.release(version))?)
    }

    fn slots(&self) -> Slots<'_, D> {
        Slots::Ranks(&self.pool)
    }

    fn snapshot(&self) -> Option<Snapshot> {
        None
    }
}
