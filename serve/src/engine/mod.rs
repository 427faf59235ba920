//! The engine: continuous batching of requests for many adapters on one model.
//!
//! [`Engine::step`] does everything: it plans ([`scheduler`]), runs the plan in one pass of the model ([`plan`]), chooses tokens
//! ([`sampling`]) and sends them to the requests' owners. One thread owns an engine; `worker` is that thread.

mod cache;
#[cfg(feature = "cuda")]
mod cuda_graph;
pub(crate) mod graph;
mod plan;
mod request;
mod sampling;
mod scheduler;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use aril::pool::{AdapterId, PoolError, Residency, Snapshot, Source, Tier};

use self::{
    cache::KvCache,
    graph::{Decoder, Tables},
    scheduler::Scheduler,
};
pub(crate) use self::{
    graph::Capture,
    request::{Event, Events, Failure, Finish, Request, RequestId},
    sampling::{Chosen, Logprobs, Sampling},
    scheduler::{Limits, State},
};
use crate::{adapter_pool::AdapterPool as _, error::Result, forward::Session, model::Model};

/// Sizes of an engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) limits: Limits,
    /// Blocks of the cache.
    pub(crate) blocks: u32,
    /// Tokens of a block.
    pub(crate) block_rows: usize,
    /// Tokens of the longest sequence.
    pub(crate) max_positions: usize,
    /// Whether sequences share the blocks of equal prefixes.
    pub(crate) is_sharing: bool,
}

/// A model, its adapters, and the requests that run on them.
pub(crate) struct Engine<'m, D: Capture> {
    model: &'m Model<'m, D>,
    session: Session<'m, D>,
    decoder: Decoder<D>,
    pool: D::Pool,
    scheduler: Scheduler,
    block_rows: usize,
    /// When the results of the last step were on the host.
    read: Option<Instant>,
    host_time: HostTime,
}

/// For how long the device waited for the host between the results of a step and a graph that followed at once.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HostTime {
    pub(crate) total: Duration,
    /// Steps that this is the total of.
    pub(crate) steps: u64,
}

impl<'m, D: Capture> Engine<'m, D> {
    /// An engine on a model whose adapters are those of `pool`.
    pub(crate) fn new(model: &'m Model<'m, D>, pool: D::Pool, sizes: Sizes) -> Result<Self> {
        let Sizes { limits, blocks, block_rows, max_positions, is_sharing } = sizes;
        // Graphs have a block of their own.
        let rows = blocks as usize * block_rows;
        let mut session = model.session(rows + block_rows, max_positions)?;
        let tables = Tables {
            columns: max_positions.div_ceil(block_rows),
            block_rows: plan::index(block_rows)?,
            spare_row: plan::index(rows)?,
        };
        Ok(Self {
            model,
            decoder: Decoder::new(model, &mut session, limits.running, tables)?,
            session,
            pool,
            scheduler: Scheduler::new(limits, KvCache::new(blocks, block_rows, is_sharing)),
            block_rows,
            read: None,
            host_time: HostTime::default(),
        })
    }

    /// Makes an adapter known and starts to load it.
    pub(crate) fn add_adapter(&mut self, source: Source) -> std::result::Result<AdapterId, PoolError> {
        let bytes = source.bytes();
        let id = self.pool.register(source)?;
        self.pool.prefetch(id)?;
        self.scheduler.add_version(id, bytes);
        Ok(id)
    }

    /// Refuses new requests for an adapter, and forgets it when the last of its requests has ended.
    pub(crate) fn remove_adapter(&mut self, id: AdapterId) {
        self.scheduler.retire(id, &mut self.pool);
    }

    /// Adds a request that arrived at `now`, which counts from any moment, the same one in all calls.
    pub(crate) fn submit(
        &mut self,
        request: Request,
        events: Events,
        now: Duration,
    ) -> std::result::Result<RequestId, Failure> {
        self.scheduler.submit(request, events, now, &mut self.pool)
    }

    /// Ends a request, if it has not ended.
    pub(crate) fn cancel(&mut self, id: RequestId) {
        self.scheduler.end(id, &mut self.pool);
    }

    /// Runs one step. Returns how many tokens it computed: none if all requests wait for their adapters.
    pub(crate) fn step(&mut self, now: Duration) -> std::result::Result<usize, PoolError> {
        let scheduled = self.scheduler.plan(now, &mut self.pool);
        let tokens = scheduled.plan.chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        if tokens > 0 {
            let Self { model, session, decoder, .. } = self;
            let scores = scheduled.plan.run(model, session, decoder, self.block_rows);
            if let (Some(enqueued), Some(read)) = (decoder.take_enqueued(), self.read) {
                self.host_time.total += enqueued.duration_since(read);
                self.host_time.steps += 1;
            }
            self.read = Some(Instant::now());
            match scores {
                Ok(scores) => self.scheduler.complete(&scheduled, scores, &mut self.pool),
                Err(error) => {
                    tracing::error!(%error, "a step failed");
                    let failure = Failure::Step(error.to_string().into());
                    self.scheduler.fail_running(&failure, &mut self.pool);
                }
            }
        }
        if tokens == 0 || self.is_idle() {
            self.read = None;
        }
        // The leases of requests that have ended are given back before the commit, so that their slots can be used in the next step.
        self.settle()?;
        Ok(tokens)
    }

    /// Takes note of requests that have ended since the last step, so that their adapters' slots can be used.
    pub(crate) fn settle(&mut self) -> std::result::Result<(), PoolError> {
        self.pool.commit()
    }

    /// Blocks this thread until an adapter has been read, or for `timeout`. Returns `false` at once if none is being read.
    pub(crate) fn wait_for_adapters(&mut self, timeout: Duration) -> bool {
        self.pool.wait(timeout)
    }

    /// Whether no request waits or runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    pub(crate) fn state(&self) -> State {
        self.scheduler.state()
    }

    pub(crate) fn host_time(&self) -> HostTime {
        self.host_time
    }

    pub(crate) fn pool(&self) -> Snapshot {
        self.pool.snapshot()
    }

    /// Whether an adapter has been read, or the error of its last load.
    pub(crate) fn is_loaded(&mut self, id: AdapterId) -> std::result::Result<bool, PoolError> {
        match self.pool.residency(id) {
            None => Err(PoolError::Unknown { id }),
            Some(Residency { failure: Some(error), .. }) => Err(PoolError::Failed { id, error }),
            Some(residency) if residency.tier == Tier::Source => {
                // Others may have taken its memory since it was read. A prefetch of one that is being read changes nothing.
                self.pool.prefetch(id)?;
                Ok(false)
            }
            Some(_) => Ok(true),
        }
    }

    /// Where an adapter is; `None` if it is not known.
    #[cfg(test)]
    pub(crate) fn residency(&self, id: AdapterId) -> Option<Residency> {
        self.pool.residency(id)
    }
}
