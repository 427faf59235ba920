//! A reference engine: continuous batching of requests for many adapters on one model, without a server. The model is
//! `aril_qwen3`.
//!
//! [`Engine::step`] does everything: it plans (`scheduler.rs`), runs the plan in one pass of the model (`plan.rs`),
//! chooses tokens (`sampling.rs`) and sends them to the requests' owners. One thread owns an engine; [`worker`] is that
//! thread.
//!
//! On several ranks, `ranks.rs` has the others do the same.
//!
//! An engine that runs ahead enqueues a step before it reads the tokens of the last one, which the device takes from
//! where it has chosen them. So the device does not wait for the host. The tokens are the same.

mod cache;
#[cfg(feature = "cuda")]
mod cuda_graph;
pub mod graph;
mod plan;
mod pool;
mod ranks;
mod request;
mod runner;
mod sampling;
mod scheduler;
#[cfg(test)]
mod tests;
pub mod worker;

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use aril::pool::{AdapterId, AdapterPool, Load, PoolError, Snapshot, Source, Tier};
#[cfg(feature = "cuda")]
use aril_qwen3::cuda;
use aril_qwen3::{checkpoint, config, cpu, device, device_arg, error, forward, group, model};
use metrics::Histogram;

pub use self::{
    cache::Counters,
    pool::sentence,
    request::{Event, Events, Failure, Finish, Request, RequestId},
    sampling::{Changes, Chosen, Logprobs, Sampling},
    scheduler::{Limits, State},
};
use self::{
    cache::KvCache,
    error::{Error, Result},
    graph::Capture,
    group::Rank,
    model::Model,
    plan::Enqueued,
    pool::{Pool, RankPool},
    ranks::{Order, Others},
    runner::Runner,
    scheduler::{Scheduled, Scheduler},
};

/// Sizes of an engine.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Bounds of the scheduler.
    pub limits: Limits,
    /// Blocks of the cache.
    pub blocks: u32,
    /// Tokens of a block.
    pub block_rows: usize,
    /// Tokens of the longest sequence.
    pub max_positions: usize,
    /// Whether sequences share the blocks of equal prefixes, if the model has attention in all layers.
    pub is_sharing: bool,
    /// Whether a step is enqueued while the last one runs.
    pub runs_ahead: bool,
}

/// A model, its adapters, and the requests that run on them.
pub struct Engine<'m, D: Capture> {
    runner: Runner<'m, D>,
    pool: Pool<D>,
    /// Why the group cannot go on.
    broken: Option<Error>,
    scheduler: Scheduler,
    runs_ahead: bool,
    /// The last step, if its results have not been read.
    in_flight: Option<InFlight>,
    /// When the results of the last step were on the host.
    read: Option<Instant>,
    host_time: HostTime,
    /// The tokens of each step.
    step_tokens: Histogram,
}

aril_qwen3::opaque! {
    [D: Capture] Engine<'_, D>;
    [D: Capture] graph::Batch<D>;
    [D: Capture] graph::Captured<D>;
    [D: Capture] graph::Drawn<'_, D>;
}

/// A step that has been enqueued.
#[derive(Debug)]
struct InFlight {
    scheduled: Scheduled,
    enqueued: Enqueued,
}

/// The host's time between the results of a step and a graph that followed at once. Meanwhile the device waits, unless
/// the engine runs ahead.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostTime {
    /// That time, of all steps together.
    pub total: Duration,
    /// Steps that this is the total of.
    pub steps: u64,
}

impl<'m, D: Capture> Engine<'m, D> {
    /// An engine on one rank, whose adapters are those of `pool`, without any.
    ///
    /// # Errors
    ///
    /// The device's, where it has no room for the cache.
    pub fn alone(model: &'m Model<'m, D>, pool: AdapterPool<D::Tiers>, sizes: Sizes) -> Result<Self> {
        let pool = RankPool::new(Rank::default(), pool)?;
        let runner = Runner::new(model, pool.slots(), &sizes)?;
        Ok(Self::new(runner, Pool::new(pool, Others::default()), sizes))
    }

    /// An engine on a model whose adapters are those of `pool`, on the ranks that this has.
    pub(crate) fn new(runner: Runner<'m, D>, pool: Pool<D>, sizes: Sizes) -> Self {
        let Sizes { limits, blocks, block_rows, is_sharing, runs_ahead, .. } = sizes;
        // The state of a gated delta net is kept of whole sequences alone.
        let is_sharing = is_sharing && runner.model.config.hybrid.is_none();
        Self {
            runner,
            pool,
            broken: None,
            scheduler: Scheduler::new(limits, KvCache::new(blocks, block_rows, limits.running, is_sharing)),
            runs_ahead,
            in_flight: None,
            read: None,
            host_time: HostTime::default(),
            step_tokens: Histogram::noop(),
        }
    }

    /// Records the tokens of each step from now on.
    pub fn record_tokens(&mut self, step_tokens: Histogram) {
        self.step_tokens = step_tokens;
    }

    /// Makes an adapter known and starts to load it. If it is pinned, it is never moved off the device again.
    ///
    /// # Errors
    ///
    /// The pool's, if it cannot hold the adapter.
    pub fn add_adapter(&mut self, mut source: Source, is_pinned: bool) -> std::result::Result<Load, PoolError> {
        let invocation = source.take_invocation();
        let keeps_routers = !self.runner.model.routers().any(|router| source.adapts(router));
        let version = self.pool.load(source)?;
        let load = version.load.clone();
        if is_pinned {
            self.pool.pin(load.id())?;
        }
        self.scheduler.add_version(version, invocation, keeps_routers);
        Ok(load)
    }

    /// Brings an adapter to the device.
    ///
    /// # Errors
    ///
    /// The pool's, if it does not know the adapter or has no room for it.
    pub fn prefetch(&mut self, id: AdapterId) -> std::result::Result<Load, PoolError> {
        self.pool.prefetch(id)
    }

    /// Refuses new requests for an adapter, and forgets it when the last of its requests has ended.
    pub fn remove_adapter(&mut self, id: AdapterId) {
        self.scheduler.retire(id);
    }

    /// Adds a request that arrived at `now`, which counts from any moment, the same one in all calls.
    ///
    /// # Errors
    ///
    /// Why the request cannot run.
    pub fn submit(
        &mut self,
        request: Request,
        events: Events,
        now: Duration,
    ) -> std::result::Result<RequestId, Failure> {
        self.scheduler.submit(request, events, now, &mut self.pool)
    }

    /// Ends a request, if it has not ended.
    pub fn cancel(&mut self, id: RequestId) {
        self.scheduler.end(id);
    }

    /// Enqueues a step, and ends the last one or, unless the engine runs ahead, this one. Returns `false` if there was
    /// neither: all requests wait for their adapters.
    ///
    /// # Errors
    ///
    /// A step that fails ends its requests. On several ranks it ends the engine, with this error, because not all may
    /// have run it.
    pub fn step(&mut self, now: Duration) -> Result<bool> {
        let mut last = self.in_flight.take();
        if let Some(chosen_on_the_host) = last.take_if(|last| !last.scheduled.plan.is_drawn()) {
            self.end(chosen_on_the_host);
        }
        let scheduled = self.scheduler.plan(now, &mut self.pool);
        let has_tokens = scheduled.plan.num_tokens() > 0;
        let is_working = has_tokens || last.is_some();
        if has_tokens {
            self.enqueue(scheduled, last.is_some());
        }
        if let Some(last) = last {
            self.end(last);
        }
        if let Some(this) = self.in_flight.take_if(|_| !self.runs_ahead) {
            self.end(this);
        }
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        if !has_tokens || self.is_idle() {
            self.read = None;
        }
        // The leases of requests that have ended are given back before the end of the step, so that their slots can be
        // used in the next step.
        self.settle()?;
        Ok(is_working)
    }

    /// Enqueues a step behind the last one, whose tokens may be its own.
    fn enqueue(&mut self, scheduled: Scheduled, is_behind: bool) {
        self.pool.others.tell(|| Order::Step(scheduled.plan.clone(), is_behind));
        self.step_tokens.record(scheduled.plan.num_tokens() as f64);
        let enqueued = self.runner.enqueue(self.pool.slots(), &scheduled.plan, is_behind);
        if let (Some(enqueued), Some(read)) = (self.runner.take_enqueued(), self.read) {
            self.host_time.total += enqueued.duration_since(read);
            self.host_time.steps += 1;
        }
        match enqueued {
            Ok(enqueued) => self.in_flight = Some(InFlight { scheduled, enqueued }),
            Err(error) => self.fail(&scheduled, error),
        }
    }

    /// Reads the results of a step.
    fn end(&mut self, InFlight { scheduled, enqueued }: InFlight) {
        let scores = self.runner.scores(&scheduled.plan, &enqueued, self.in_flight.is_none());
        self.read = Some(Instant::now());
        match scores {
            Ok(scores) => self.scheduler.complete(&scheduled, scores),
            Err(error) => self.fail(&scheduled, error),
        }
    }

    fn fail(&mut self, scheduled: &Scheduled, error: Error) {
        tracing::error!(%error, "a step failed");
        let failure = Failure::Step(error.to_string().into());
        self.scheduler.fail_step(scheduled, &failure);
        if !self.pool.others.is_empty() {
            self.broken.get_or_insert(error);
        }
    }

    /// Whether steps are enqueued while the last one runs, from the next step on.
    pub fn run_ahead(&mut self, runs_ahead: bool) {
        self.runs_ahead = runs_ahead;
    }

    /// Takes note of requests that have ended since the last step, so that their adapters' slots can be used.
    ///
    /// # Errors
    ///
    /// Why the ranks of a group cannot go on.
    pub fn settle(&mut self) -> Result<()> {
        self.pool.end_step()
    }

    /// Blocks this thread until an adapter has been read, or for `timeout`. Returns `false` at once if none is being
    /// read.
    pub fn wait_for_adapters(&mut self, timeout: Duration) -> bool {
        self.pool.wait(timeout)
    }

    /// Whether no request waits or runs.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle() && self.in_flight.is_none()
    }

    /// The requests, and the blocks of the cache.
    pub fn state(&self) -> State {
        self.scheduler.state()
    }

    /// The host's time since the engine was made.
    pub fn host_time(&self) -> HostTime {
        self.host_time
    }

    /// The adapters' memory and loads.
    pub fn pool(&self) -> Snapshot {
        self.pool.snapshot()
    }

    /// The fastest memory that each adapter is in.
    pub fn tiers(&self) -> HashMap<AdapterId, Tier> {
        let tier = |id| Some((id, self.pool.tier(id)?));
        self.scheduler.versions().filter_map(tier).collect()
    }

    /// Ends the other ranks of the group, after all that they have been told.
    pub fn stop(&self) {
        self.pool.others.tell(|| Order::End);
    }
}
