//! `--arena-mib`: the adapters in a pool of the library's, on one device or on all ranks of a group, and the batches of
//! requests whose adapters fit in it together.

use std::{mem, result, sync::Arc, time::Duration};

use aril::{
    Element, Slot,
    adapter::Adapter,
    group::GroupPool,
    model::Model,
    pool::{AdapterId, AdapterPool, Backend, Lease, PoolConfig, PoolError, Snapshot, Source, StreamId},
};

use crate::{
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
    /// The state of the pool, on this rank.
    fn snapshot(&self) -> Snapshot;
}

/// A pool that knows all adapters of a run.
struct Pooled<D: Device, B: Backend> {
    pool: AdapterPool<B>,
    /// With their names.
    adapters: Vec<(String, AdapterId)>,
    slots: for<'a> fn(&'a AdapterPool<B>) -> Slots<'a, D>,
}

/// A rank's pool for steps of at most `tokens` tokens, and the table whose slots it fills. Every rank makes the same
/// calls.
pub(crate) fn pooled<D: Device>(
    device: &D,
    model: &Model,
    adapters: &[(String, Arc<Adapter>)],
    tokens: usize,
    config: PoolConfig,
    rank: &Rank,
) -> Result<(Box<dyn Batches<D>>, D::Adapters)> {
    let source = |(name, adapter): &(String, Arc<Adapter>)| {
        Source::memory(Arc::clone(adapter), model, D::Elem::DTYPE).context(format_args!("adapter `{name}`"))
    };
    let sources = adapters.iter().map(source).collect::<Result<Vec<_>>>()?;
    let capacity = capacity(tokens, sources.iter().map(Source::max_rank), rank)?;
    let (pool, table) = device.pool(model, capacity, config)?;
    let sources = adapters.iter().map(|(name, _)| name).zip(sources);
    let pool: Box<dyn Batches<D>> = if rank.tp().size() == 1 {
        Box::new(Pooled::new(pool, sources, |pool| Slots::Pool(pool))?)
    } else {
        Box::new(Pooled::new(GroupPool::new(rank.clone(), pool)?, sources, |pool| Slots::Ranks(pool))?)
    };
    Ok((pool, table))
}

/// Requests that run together.
pub(crate) struct Batch {
    /// The indices of the requests, each with its adapter's slot.
    pub(crate) requests: Vec<(usize, Slot)>,
    leases: Vec<Lease>,
}

impl Batch {
    /// Takes all waiting requests, on a table that has the adapters in these slots.
    pub(crate) fn of_all(requests: &[Request], waiting: &mut Vec<usize>, slots: &[Slot]) -> Self {
        let slot = |adapter: Option<usize>| adapter.map_or(Slot::BASE, |index| slots[index]);
        let requests = waiting.drain(..).map(|request| (request, slot(requests[request].adapter)));
        Self { requests: requests.collect(), leases: Vec::new() }
    }
}

impl<D: Device, B: Backend<Source: From<Source>>> Pooled<D, B> {
    fn new<'n>(
        mut pool: AdapterPool<B>,
        sources: impl Iterator<Item = (&'n String, Source)>,
        slots: for<'a> fn(&'a AdapterPool<B>) -> Slots<'a, D>,
    ) -> Result<Self> {
        let register = |(name, source): (&String, Source)| {
            let id = pool.register(source.into()).context(format_args!("adapter `{name}`"))?;
            Ok((name.clone(), id))
        };
        let adapters = sources.map(register).collect::<Result<_>>()?;
        Ok(Self { pool, adapters, slots })
    }

    /// The place of an adapter among those of a batch, which it joins unless it is there; `None` if it does not fit
    /// beside them.
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
            match self.pool.prepare(ids, StreamId::FIRST) {
                Err(PoolError::Loading { .. } | PoolError::Full) => {
                    self.pool.end_step(StreamId::FIRST)?;
                    self.pool.wait(WAIT);
                }
                leases => return leases,
            }
        }
    }
}

impl<D: Device, B: Backend<Source: From<Source>>> Batches<D> for Pooled<D, B> {
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
        Ok(self.pool.end_step(StreamId::FIRST)?)
    }

    fn slots(&self) -> Slots<'_, D> {
        (self.slots)(&self.pool)
    }

    fn snapshot(&self) -> Snapshot {
        self.pool.snapshot()
    }
}
