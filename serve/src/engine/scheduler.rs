//! Which tokens run in the next step.
//!
//! Requests run in the order of their submission, as far as the limits allow: the tokens of a step, the running requests, the
//! adapters of the running requests ([`Admission`]) and the blocks of the cache. A prompt may take several steps. If blocks run out,
//! the youngest running request gives up its own and waits; later, its tokens are computed again.
//!
//! Invariants: a running request holds a lease on its adapter's version and the blocks of its computed tokens; a waiting request holds
//! neither. A version stays registered while a request for it waits or runs, even if it was unloaded.

use std::{
    collections::{BTreeSet, HashMap},
    mem,
    ops::Bound::{Excluded, Unbounded},
    time::Duration,
};

use aril::{
    Slot,
    admission::{self, Admission, Answer},
    pool::{AdapterId, CacheNamespace, Lease, PoolError},
};

use super::{
    cache::{Chain, Counters, KvCache},
    plan::{Chunk, Plan, Scores},
    request::{Event, Events, Failure, Finish, Request, RequestId},
    sampling::Sampler,
};
use crate::adapter_pool::AdapterPool;

/// Adapters of waiting requests that are brought to the device ahead of them.
const PREFETCHED: usize = 2;

/// Bounds of the scheduler.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Tokens of a step. At least as many as requests.
    pub(crate) step_tokens: usize,
    /// Running requests.
    pub(crate) running: usize,
    /// Waiting requests.
    pub(crate) waiting: usize,
    /// Adapters of the running requests.
    pub(crate) adapters: usize,
    /// When a waiting request is served before all younger ones.
    pub(crate) max_wait: Duration,
}

/// All requests, and the adapters that they name.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: Limits,
    admission: Admission<RequestId, AdapterId>,
    cache: KvCache,
    sequences: HashMap<RequestId, Sequence>,
    running: BTreeSet<RequestId>,
    versions: HashMap<AdapterId, Version>,
    last_request: u64,
    preemptions: u64,
}

/// A request and its tokens.
#[derive(Debug)]
struct Sequence {
    request: Request,
    /// The prompt and the chosen tokens.
    tokens: Vec<u32>,
    sampler: Sampler,
    events: Events,
    /// Present while it runs.
    held: Option<Held>,
}

/// What a running request holds.
#[derive(Debug)]
struct Held {
    lease: Option<Lease>,
    chain: Chain,
    /// Tokens whose keys and values are in the cache.
    computed: usize,
}

/// A version of an adapter that the pool knows.
#[derive(Clone, Copy, Debug)]
struct Version {
    bytes: usize,
    /// Waiting and running requests.
    requests: usize,
    /// Whether it is unregistered when the last of them ends.
    is_retired: bool,
}

/// The requests of a plan's chunks.
#[derive(Debug, Default)]
pub(crate) struct Scheduled {
    pub(crate) plan: Plan,
    requests: Vec<RequestId>,
}

/// The state of a scheduler, for metrics.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    pub(crate) preemptions: u64,
    pub(crate) blocks: usize,
    pub(crate) free_blocks: usize,
    pub(crate) cache: Counters,
    pub(crate) running_adapters: Vec<AdapterId>,
    pub(crate) waiting_adapters: Vec<AdapterId>,
}

impl Scheduler {
    pub(crate) fn new(limits: Limits, cache: KvCache) -> Self {
        Self {
            limits,
            admission: Admission::new(admission::Limits::new(limits.adapters, limits.max_wait)),
            cache,
            sequences: HashMap::new(),
            running: BTreeSet::new(),
            versions: HashMap::new(),
            last_request: 0,
            preemptions: 0,
        }
    }

    /// Adds a version of an adapter that the pool has registered, of `bytes` bytes.
    pub(crate) fn add_version(&mut self, id: AdapterId, bytes: usize) {
        self.versions.insert(id, Version { bytes, requests: 0, is_retired: false });
    }

    /// Unregisters a version once its last request has ended. New requests for it are refused.
    pub(crate) fn retire(&mut self, id: AdapterId, pool: &mut impl AdapterPool) {
        if let Some(version) = self.versions.get_mut(&id) {
            version.is_retired = true;
            self.sweep(Some(id), pool);
        }
    }

    /// Adds a request. Its events follow, unless it is refused.
    pub(crate) fn submit(
        &mut self,
        request: Request,
        events: Events,
        now: Duration,
        pool: &mut impl AdapterPool,
    ) -> Result<RequestId, Failure> {
        let waiting = self.admission.num_waiting();
        if waiting >= self.limits.waiting {
            return Err(Failure::QueueFull { waiting });
        }
        let tokens = request.prompt.len() + request.max_tokens;
        let room = self.cache.num_blocks() * self.cache.block_rows();
        if tokens > room {
            return Err(Failure::Cache { tokens, room });
        }
        let id = RequestId(self.last_request + 1);
        let entry = match request.adapter {
            None => admission::Request::base(id, now),
            Some(adapter) => {
                let version = self.versions.get_mut(&adapter).filter(|version| !version.is_retired);
                let version = version.ok_or(Failure::Unloaded)?;
                if pool.residency(adapter).is_some_and(|residency| residency.failure.is_some()) {
                    // Its files may be whole again.
                    pool.retry(adapter).map_err(|error| failure(&error))?;
                }
                admission::Request::new(id, adapter, version.bytes, now)
            }
        };
        self.admission.enqueue(entry)?;
        if let Some(version) = request.adapter.and_then(|adapter| self.versions.get_mut(&adapter)) {
            version.requests += 1;
        }
        self.last_request = id.0;
        let (tokens, sampler) = (request.prompt.clone(), Sampler::new(request.sampling.clone()));
        self.sequences.insert(id, Sequence { request, tokens, sampler, events, held: None });
        Ok(id)
    }

    /// Ends a request, if it has not ended, and frees what it holds.
    pub(crate) fn end(&mut self, id: RequestId, pool: &mut impl AdapterPool) {
        let Some(sequence) = self.sequences.remove(&id) else { return };
        let known = self.admission.cancel(&id);
        debug_assert_eq!(known, Ok(()), "a sequence waits or runs");
        self.running.remove(&id);
        if let Some(held) = sequence.held {
            self.cache.release(held.chain);
        }
        let adapter = sequence.request.adapter;
        if let Some(version) = adapter.and_then(|adapter| self.versions.get_mut(&adapter)) {
            version.requests -= 1;
        }
        self.sweep(adapter, pool);
    }

    /// Ends a request without a result.
    fn fail(&mut self, id: RequestId, failure: Failure, pool: &mut impl AdapterPool) {
        if let Some(sequence) = self.sequences.get(&id) {
            // Without a receiver, nobody waits for it.
            let _ = sequence.events.send(Event::Failed(failure));
        }
        self.end(id, pool);
    }

    /// Ends all running requests without a result.
    pub(crate) fn fail_running(&mut self, failure: &Failure, pool: &mut impl AdapterPool) {
        for id in mem::take(&mut self.running) {
            self.fail(id, failure.clone(), pool);
        }
    }

    /// Plans the next step. The plan is empty if nothing runs.
    pub(crate) fn plan(&mut self, now: Duration, pool: &mut impl AdapterPool) -> Scheduled {
        let mut scheduled = Scheduled::default();
        let mut budget = self.limits.step_tokens;
        let has_room = self.plan_running(&mut scheduled, &mut budget);
        if has_room {
            self.plan_waiting(&mut scheduled, &mut budget, now, pool);
        }
        scheduled
    }

    /// Plans the next tokens of the running requests, the oldest first. Returns `false` if the cache is full.
    fn plan_running(&mut self, scheduled: &mut Scheduled, budget: &mut usize) -> bool {
        let mut has_room = true;
        let mut next = self.running.first().copied();
        while let Some(id) = next.filter(|_| *budget > 0) {
            loop {
                let sequence = self.sequences.get_mut(&id).expect("a running request is known");
                if let Some(chunk) = sequence.next_chunk(&mut self.cache, *budget) {
                    *budget -= chunk.tokens.len();
                    scheduled.push(id, chunk);
                    break;
                }
                has_room = false;
                let youngest = *self.running.last().expect("this request runs");
                self.preempt(youngest);
                if youngest == id {
                    return false;
                }
            }
            next = self.running.range((Excluded(id), Unbounded)).next().copied();
        }
        has_room
    }

    /// Starts waiting requests.
    fn plan_waiting(
        &mut self,
        scheduled: &mut Scheduled,
        budget: &mut usize,
        now: Duration,
        pool: &mut impl AdapterPool,
    ) {
        for adapter in self.admission.prefetch().take(PREFETCHED) {
            // If its last load failed, its requests fail below.
            let _ = pool.prefetch(adapter);
        }
        let Self { limits, admission, cache, sequences, running, .. } = self;
        let mut failed = Vec::new();
        admission.admit(now, |offered| {
            if *budget == 0 || running.len() == limits.running {
                return Answer::Stop;
            }
            let lease = match offered.adapter.map(|adapter| pool.acquire(adapter)).transpose() {
                Ok(lease) => lease,
                Err(PoolError::Loading { .. } | PoolError::Full) => return Answer::Skip,
                Err(error) => {
                    failed.push((offered.id, failure(&error)));
                    return Answer::Skip;
                }
            };
            let sequence = sequences.get_mut(&offered.id).expect("a waiting request is known");
            let namespace = offered.adapter.map_or(CacheNamespace::BASE, AdapterId::cache_namespace);
            let (chain, computed) = cache.start(namespace, &sequence.tokens);
            sequence.held = Some(Held { lease, chain, computed });
            let Some(chunk) = sequence.next_chunk(cache, *budget) else {
                sequence.give_up(cache);
                return Answer::Stop;
            };
            *budget -= chunk.tokens.len();
            scheduled.push(offered.id, chunk);
            running.insert(offered.id);
            Answer::Take
        });
        for (id, failure) in failed {
            self.fail(id, failure, pool);
        }
    }

    /// Takes note of a step's results: those of each sampled chunk.
    pub(crate) fn complete(&mut self, scheduled: &Scheduled, scores: Vec<Scores>, pool: &mut impl AdapterPool) {
        let mut scores = scores.into_iter();
        for (&id, chunk) in scheduled.requests.iter().zip(&scheduled.plan.chunks) {
            let sequence = self.sequences.get_mut(&id).expect("a request ends between steps");
            let held = sequence.held.as_mut().expect("a scheduled request runs");
            held.computed = chunk.position + chunk.tokens.len();
            self.cache.publish(&mut held.chain, &sequence.tokens[..held.computed]);
            if !chunk.is_sampled {
                continue;
            }
            let scores = scores.next().expect("a sampled chunk has a result");
            let Some(chosen) = sequence.sampler.choose_from(&scores) else {
                self.fail(id, Failure::NotNumbers, pool);
                continue;
            };
            sequence.tokens.push(chosen.token);
            let finish = sequence.finish(chosen.token);
            // Without a receiver, the request runs until its client's cancellation arrives.
            let _ = sequence.events.send(Event::Token(chosen, finish));
            if finish.is_some() {
                self.end(id, pool);
            }
        }
    }

    /// Whether no request waits or runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.sequences.is_empty()
    }

    pub(crate) fn state(&self) -> State {
        let mut waiting_adapters: Vec<AdapterId> = self.admission.prefetch().collect();
        waiting_adapters.sort_unstable();
        State {
            running: self.running.len(),
            waiting: self.admission.num_waiting(),
            preemptions: self.preemptions,
            blocks: self.cache.num_blocks(),
            free_blocks: self.cache.num_free(),
            cache: self.cache.counters(),
            running_adapters: self.admission.batch().to_vec(),
            waiting_adapters,
        }
    }

    /// Published blocks of a namespace.
    #[cfg(test)]
    pub(super) fn num_published(&self, namespace: CacheNamespace) -> usize {
        self.cache.num_published(namespace)
    }

    fn preempt(&mut self, id: RequestId) {
        self.running.remove(&id);
        let ran = self.admission.preempt(&id);
        debug_assert_eq!(ran, Ok(()), "a running request was admitted");
        self.sequences.get_mut(&id).expect("a running request is known").give_up(&mut self.cache);
        self.preemptions += 1;
    }

    /// Unregisters a retired version without requests, and withdraws its part of the cache.
    fn sweep(&mut self, adapter: Option<AdapterId>, pool: &mut impl AdapterPool) {
        let Some(id) = adapter else { return };
        if self.versions.get(&id).is_some_and(|version| version.is_retired && version.requests == 0) {
            self.versions.remove(&id);
            self.cache.forget(id.cache_namespace());
            let known = pool.unregister(id);
            debug_assert!(known.is_ok(), "a version is registered until here");
        }
    }
}

impl Scheduled {
    fn push(&mut self, id: RequestId, chunk: Chunk) {
        self.requests.push(id);
        self.plan.chunks.push(chunk);
    }
}

impl Sequence {
    /// The next tokens, up to `budget` of them, with blocks for their keys and values; `None` if the cache is full.
    fn next_chunk(&mut self, cache: &mut KvCache, budget: usize) -> Option<Chunk> {
        let Held { lease, chain, computed } = self.held.as_mut()?;
        let end = self.tokens.len().min(*computed + budget);
        let is_sampled = end == self.tokens.len();
        cache.grow(chain, end).then(|| Chunk {
            slot: lease.as_ref().map_or(Slot::BASE, Lease::slot),
            position: *computed,
            tokens: self.tokens[*computed..end].to_vec(),
            blocks: chain.blocks()[..end.div_ceil(cache.block_rows())].to_vec(),
            is_sampled,
            draw: if is_sampled { self.sampler.draw() } else { None },
        })
    }

    /// Gives up the lease and the blocks.
    fn give_up(&mut self, cache: &mut KvCache) {
        if let Some(held) = self.held.take() {
            cache.release(held.chain);
        }
    }

    /// Why the request ends with its last token, if it does.
    fn finish(&self, token: u32) -> Option<Finish> {
        if self.request.stop_tokens.contains(&token) {
            return Some(Finish::Stop);
        }
        let chosen = self.tokens.len() - self.request.prompt.len();
        (chosen == self.request.max_tokens).then_some(Finish::Length)
    }
}

fn failure(error: &PoolError) -> Failure {
    Failure::Adapter(error.to_string().into())
}
