//! Which tokens run in the next step.
//!
//! Requests run in the order of their submission, as far as the limits allow: the tokens of a step, the running
//! requests, the adapters of the running requests ([`Admission`]) and the blocks of the cache. A prompt may take
//! several steps. If blocks run out, the youngest running request gives up its own and waits; later, its tokens are
//! computed again.
//!
//! A step may be planned while the last one runs, whose tokens are not known yet. A request that turns out to have
//! ended has a chunk too many then, whose result is dropped.
//!
//! Invariants: a running request holds a lease on its adapter's version and the blocks of its planned tokens; a waiting
//! request holds neither. A version stays registered while a request for it waits or runs, even if it was unloaded. The
//! device runs steps in the order of their plans, so what a plan takes from another request is used after the steps
//! planned before.

use std::{
    collections::{BTreeSet, HashMap},
    mem,
    ops::Bound::{Excluded, Unbounded},
    time::Duration,
};

use aril::{
    Slot,
    adapter::Invocation,
    pool::{AdapterId, CacheNamespace, Load, PoolError},
};
use aril_requests::admission::{self, Admission, Answer};

use crate::{
    cache::{Chain, Counters, KvCache},
    graph::Capture,
    plan::{Chunk, Plan, Scores},
    pool::{self, Lease, Pool},
    request::{Event, Events, Failure, Finish, Request, RequestId},
    sampling::{Before, Logprobs, Sampler, rank},
};

/// Adapters of waiting requests that are brought to the device ahead of them.
const PREFETCHED: usize = 2;

/// Bounds of the scheduler.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tokens of a step. At least as many as requests.
    pub step_tokens: usize,
    /// Running requests.
    pub running: usize,
    /// Waiting requests.
    pub waiting: usize,
    /// Adapters of the running requests.
    pub adapters: usize,
    /// When a waiting request is served before all younger ones.
    pub max_wait: Duration,
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
    /// Loads that waiting requests wait for.
    loads: HashMap<AdapterId, Load>,
    last_request: u64,
    last_step: u64,
    preemptions: u64,
}

/// A request and its tokens.
#[derive(Debug)]
struct Sequence {
    request: Request,
    /// Position of the first token that its adapter applies to.
    start: usize,
    /// The prompt and the chosen tokens.
    tokens: Vec<u32>,
    /// Where the token after these is being chosen.
    next: Option<Place>,
    sampler: Sampler,
    /// Tokens of the prompt behind which log-probabilities have been reported.
    reported: usize,
    events: Events,
    /// Present while it runs.
    held: Option<Held>,
}

/// A sampled chunk of a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Place {
    step: u64,
    row: usize,
}

/// What a running request holds.
#[derive(Debug)]
struct Held {
    lease: Option<Lease>,
    /// Of its adapter, as of a [`Version`].
    keeps_routers: bool,
    chain: Chain,
    /// Tokens whose keys and values are in the cache when all planned steps have run.
    computed: usize,
}

/// A version of an adapter that the pool knows.
#[derive(Debug)]
struct Version {
    /// Unregisters it when it is dropped.
    _registered: pool::Version,
    /// Unless it applies to whole sequences.
    invocation: Option<Invocation>,
    /// Whether it has no factors of a router.
    keeps_routers: bool,
    /// Waiting and running requests.
    requests: usize,
    /// Whether it is dropped when the last of them ends.
    is_retired: bool,
}

/// What a step has room for.
#[derive(Clone, Copy, Debug)]
struct Budget {
    tokens: usize,
    /// Rows of logits beyond one of each running request.
    rows: usize,
}

impl Budget {
    fn spend(&mut self, chunk: &Chunk) {
        self.tokens -= chunk.tokens.len();
        self.rows -= chunk.rows().saturating_sub(1);
    }
}

/// The requests of a plan's chunks.
#[derive(Debug, Default)]
pub(crate) struct Scheduled {
    pub(crate) plan: Plan,
    requests: Vec<RequestId>,
    /// Counts plans.
    step: u64,
    sampled: usize,
}

/// The state of a scheduler, for metrics.
#[derive(Clone, Debug)]
pub struct State {
    /// Requests that run.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// How often a running request had to wait again.
    pub preemptions: u64,
    /// Blocks of the cache.
    pub blocks: usize,
    /// Blocks that no sequence holds.
    pub free_blocks: usize,
    /// What prefix sharing has saved.
    pub cache: Counters,
    /// The adapters of running requests.
    pub running_adapters: Vec<AdapterId>,
    /// The adapters of waiting requests.
    pub waiting_adapters: Vec<AdapterId>,
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
            loads: HashMap::new(),
            last_request: 0,
            last_step: 0,
            preemptions: 0,
        }
    }

    /// Adds a version of an adapter, which may apply from an invocation on, and may have no factors of a router.
    pub(crate) fn add_version(&mut self, version: pool::Version, invocation: Option<Invocation>, keeps_routers: bool) {
        let id = version.load.id();
        let version = Version { _registered: version, invocation, keeps_routers, requests: 0, is_retired: false };
        self.versions.insert(id, version);
    }

    /// The versions that the pool knows.
    pub(crate) fn versions(&self) -> impl Iterator<Item = AdapterId> {
        self.versions.keys().copied()
    }

    /// Unregisters a version once its last request has ended. New requests for it are refused.
    pub(crate) fn retire(&mut self, id: AdapterId) {
        if let Some(version) = self.versions.get_mut(&id) {
            version.is_retired = true;
            self.sweep(Some(id));
        }
    }

    /// Adds a request. Its events follow, unless it is refused.
    pub(crate) fn submit<D: Capture>(
        &mut self,
        mut request: Request,
        events: Events,
        now: Duration,
        pool: &mut Pool<D>,
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
        let start = self.start(&request)?;
        if start.is_none() {
            // All of its tokens are the base model's.
            request.adapter = None;
        }
        let entry = match request.adapter.filter(|adapter| self.versions.contains_key(adapter)) {
            None => admission::Request::base(id, now),
            Some(adapter) => {
                if pool.has_failed(adapter) {
                    // Its files may be whole again.
                    pool.retry(adapter).map_err(|error| failure(&error))?;
                }
                watch(&mut self.loads, adapter, pool);
                admission::Request::new(id, adapter, now)
            }
        };
        self.admission.enqueue(entry)?;
        if let Some(version) = request.adapter.and_then(|adapter| self.versions.get_mut(&adapter)) {
            version.requests += 1;
        }
        self.last_request = id.0;
        let (tokens, sampler) = (request.prompt.clone(), Sampler::new(request.sampling.clone()));
        let start = start.unwrap_or(0);
        let sequence = Sequence { request, start, tokens, next: None, sampler, reported: 0, events, held: None };
        self.sequences.insert(id, sequence);
        Ok(id)
    }

    /// Position of the first token that a request's adapter applies to, if it applies to any.
    fn start(&self, request: &Request) -> Result<Option<usize>, Failure> {
        let Some(adapter) = request.adapter else { return Ok(None) };
        let version = self.versions.get(&adapter).filter(|version| !version.is_retired).ok_or(Failure::Unloaded)?;
        let start = |invocation: &Invocation| invocation.start_in(&request.prompt);
        Ok(version.invocation.as_ref().map_or(Some(0), start))
    }

    /// Ends a request, if it has not ended, and frees what it holds.
    pub(crate) fn end(&mut self, id: RequestId) {
        if self.sequences.contains_key(&id) {
            let known = self.admission.cancel(&id);
            debug_assert_eq!(known, Ok(()), "a sequence waits or runs");
            self.forget(id);
        }
    }

    /// Frees what a request holds that admission does not know any more.
    fn forget(&mut self, id: RequestId) {
        let Some(sequence) = self.sequences.remove(&id) else { return };
        self.running.remove(&id);
        if let Some(held) = sequence.held {
            self.cache.release(held.chain);
        }
        let adapter = sequence.request.adapter;
        if let Some(version) = adapter.and_then(|adapter| self.versions.get_mut(&adapter)) {
            version.requests -= 1;
        }
        self.sweep(adapter);
    }

    /// Ends a request without a result.
    fn fail(&mut self, id: RequestId, failure: Failure) {
        self.tell(id, failure);
        self.end(id);
    }

    fn tell(&self, id: RequestId, failure: Failure) {
        if let Some(sequence) = self.sequences.get(&id) {
            // Without a receiver, nobody waits for it.
            let _ = sequence.events.send(Event::Failed(failure));
        }
    }

    /// Ends the waiting requests of adapters whose loads have failed.
    fn fail_loads(&mut self) {
        let mut failures = Vec::new();
        self.loads.retain(|&adapter, load| {
            let ended = load.has_ended().inspect_err(|error| failures.push((adapter, failure(error))));
            matches!(ended, Ok(false))
        });
        for (adapter, failure) in failures {
            let waits = |sequence: &Sequence| sequence.request.adapter == Some(adapter) && sequence.held.is_none();
            let waiting = self.sequences.iter().filter(|(_, sequence)| waits(sequence));
            for id in waiting.map(|(id, _)| *id).collect::<Vec<_>>() {
                self.fail(id, failure.clone());
            }
        }
    }

    /// Ends all running requests, and those of a step that failed, without a result.
    pub(crate) fn fail_step(&mut self, step: &Scheduled, failure: &Failure) {
        for id in mem::take(&mut self.running).into_iter().chain(step.requests.iter().copied()) {
            self.fail(id, failure.clone());
        }
    }

    /// Plans the next step. The plan is empty if nothing runs.
    pub(crate) fn plan<D: Capture>(&mut self, now: Duration, pool: &mut Pool<D>) -> Scheduled {
        self.fail_loads();
        self.last_step += 1;
        let mut scheduled = Scheduled { step: self.last_step, ..Scheduled::default() };
        let mut budget =
            Budget { tokens: self.limits.step_tokens, rows: self.limits.running.saturating_sub(self.running.len()) };
        let has_room = self.plan_running(&mut scheduled, &mut budget);
        if has_room {
            self.plan_waiting(&mut scheduled, &mut budget, now, pool);
        }
        debug_assert!(
            scheduled.plan.num_tokens() <= self.limits.step_tokens,
            "the step has more tokens than a step may have"
        );
        scheduled
    }

    /// Plans the next tokens of the running requests, the oldest first. Returns `false` if the cache is full.
    fn plan_running(&mut self, scheduled: &mut Scheduled, budget: &mut Budget) -> bool {
        let mut has_room = true;
        let mut next = self.running.first().copied();
        while let Some(id) = next.filter(|_| budget.tokens > 0) {
            loop {
                let sequence = self.sequences.get_mut(&id).expect("a running request is known");
                if sequence.is_ending() {
                    break;
                }
                if let Some(chunk) = sequence.next_chunk(&mut self.cache, *budget) {
                    budget.spend(&chunk);
                    scheduled.push(id, sequence, chunk);
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
    fn plan_waiting<D: Capture>(
        &mut self,
        scheduled: &mut Scheduled,
        budget: &mut Budget,
        now: Duration,
        pool: &mut Pool<D>,
    ) {
        for adapter in self.admission.prefetch().take(PREFETCHED) {
            // If its last load failed, its requests fail when they are offered.
            let _ = pool.prefetch(adapter);
            watch(&mut self.loads, adapter, pool);
        }
        let Self { limits, admission, cache, sequences, running, versions, loads, .. } = self;
        let mut failed = Vec::new();
        admission.admit(now, |offered| {
            if budget.tokens == 0 || budget.rows == 0 || running.len() == limits.running {
                return Answer::Stop;
            }
            let lease = match offered.adapter.map(|adapter| pool.acquire(adapter)).transpose() {
                Ok(lease) => lease,
                Err(PoolError::Loading { id }) => {
                    watch(loads, id, pool);
                    return Answer::Skip;
                }
                Err(PoolError::Full) => return Answer::Skip,
                Err(error) => {
                    failed.push((offered.id, failure(&error)));
                    return Answer::Fail;
                }
            };
            let sequence = sequences.get_mut(&offered.id).expect("a waiting request is known");
            let namespace = offered.adapter.map_or(CacheNamespace::BASE, AdapterId::cache_namespace);
            let namespace = namespace.invoked_at(sequence.start);
            // What is reported of a token of the prompt is computed, not shared.
            let shareable = if sequence.is_reporting() { &[] } else { &*sequence.tokens };
            let (chain, computed) = cache.start(namespace, shareable);
            let version = offered.adapter.and_then(|adapter| versions.get(&adapter));
            let keeps_routers = version.is_none_or(|version| version.keeps_routers);
            sequence.held = Some(Held { lease, keeps_routers, chain, computed });
            // One row is its own.
            let mut left = Budget { rows: budget.rows - 1, ..*budget };
            let Some(chunk) = sequence.next_chunk(cache, left) else {
                sequence.give_up(cache);
                return Answer::Stop;
            };
            left.spend(&chunk);
            *budget = left;
            // Without a receiver, its cancellation is on its way.
            let _ = sequence.events.send(Event::Started(computed));
            scheduled.push(offered.id, sequence, chunk);
            running.insert(offered.id);
            Answer::Take
        });
        for (id, failure) in failed {
            self.tell(id, failure);
            self.forget(id);
        }
    }

    /// Takes note of a step's results: those of each row.
    pub(crate) fn complete(&mut self, scheduled: &Scheduled, scores: Vec<Scores>) {
        let mut scores = scores.into_iter();
        for (&id, chunk) in scheduled.requests.iter().zip(&scheduled.plan.chunks) {
            let scored: Vec<Scores> = scores.by_ref().take(chunk.scored.len()).collect();
            let scores = chunk.is_sampled.then(|| scores.next().expect("a sampled chunk has a result"));
            // The request may have ended since.
            let Some(sequence) = self.sequences.get_mut(&id) else { continue };
            // It may have been preempted since.
            if let Some(held) = &mut sequence.held {
                let computed = chunk.position + chunk.tokens.len();
                self.cache.publish(&mut held.chain, &sequence.tokens[..computed]);
            }
            if sequence.report(chunk.position + chunk.scored.start, &scored).is_none() {
                self.fail(id, Failure::NotNumbers);
                continue;
            }
            let Some(scores) = scores else { continue };
            sequence.next = sequence.next.filter(|next| next.step != scheduled.step);
            let Sequence { request, tokens, sampler, .. } = &mut *sequence;
            let (prompt, chosen) = tokens.split_at(request.prompt.len());
            let before = Before { prompt, chosen };
            let Some(chosen) = sampler.choose_from(&scores, &before) else {
                self.fail(id, Failure::NotNumbers);
                continue;
            };
            sequence.tokens.push(chosen.token);
            let finish = sequence.finish(chosen.token);
            // Without a receiver, the request runs until its client's cancellation arrives.
            let _ = sequence.events.send(Event::Token(chosen, finish));
            if finish.is_some() {
                self.end(id);
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

    /// Published blocks of a version, or of the base model.
    #[cfg(test)]
    pub(super) fn num_published(&self, version: Option<AdapterId>) -> usize {
        self.cache.num_published(version)
    }

    fn preempt(&mut self, id: RequestId) {
        self.running.remove(&id);
        let ran = self.admission.preempt(&id);
        debug_assert_eq!(ran, Ok(()), "a running request was admitted");
        self.sequences.get_mut(&id).expect("a running request is known").give_up(&mut self.cache);
        self.preemptions += 1;
    }

    /// Drops a retired version without requests, and withdraws its part of the cache.
    fn sweep(&mut self, adapter: Option<AdapterId>) {
        let Some(id) = adapter else { return };
        if self.versions.get(&id).is_some_and(|version| version.is_retired && version.requests == 0) {
            self.versions.remove(&id);
            self.cache.forget(id);
        }
    }
}

impl Scheduled {
    fn push(&mut self, id: RequestId, sequence: &mut Sequence, chunk: Chunk) {
        if chunk.is_sampled {
            sequence.next = Some(Place { step: self.step, row: self.sampled + chunk.scored.len() });
        }
        self.sampled += chunk.rows();
        self.requests.push(id);
        self.plan.chunks.push(chunk);
    }
}

impl Sequence {
    /// The next tokens, within `budget`, with blocks for their keys and values; `None` if the cache is full.
    fn next_chunk(&mut self, cache: &mut KvCache, budget: Budget) -> Option<Chunk> {
        let (is_reporting, reported, last) = (self.is_reporting(), self.reported, self.request.prompt.len() - 1);
        let Held { lease, keeps_routers, chain, computed } = self.held.as_mut()?;
        let known = self.tokens.len();
        let len = known + usize::from(self.next.is_some());
        let position = *computed;
        let mut end = len.min(position + budget.tokens);
        let mut scored = 0..0;
        if is_reporting {
            let first = reported.max(position);
            end = end.min(first + 1 + budget.rows);
            scored = first - position..end.min(last).max(first) - position;
        }
        if !cache.grow(chain, end) {
            return None;
        }
        *computed = end;
        let mut tokens = self.tokens[position..end.min(known)].to_vec();
        let source = self.next.filter(|_| end > known).map(|next| next.row);
        // A token that is not known yet.
        tokens.resize(end - position, 0);
        let is_sampled = end == len;
        Some(Chunk {
            slot: lease.as_ref().map_or(Slot::BASE, |lease| lease.slot),
            start: self.start,
            keeps_routers: *keeps_routers,
            position,
            tokens,
            source,
            blocks: chain.blocks()[..end.div_ceil(cache.block_rows())].to_vec(),
            state: chain.state(),
            is_sampled,
            draw: if is_sampled && scored.is_empty() { self.sampler.draw() } else { None },
            scored,
        })
    }

    /// Whether there are tokens of the prompt whose log-probabilities are wanted, and not reported.
    fn is_reporting(&self) -> bool {
        self.request.prompt_logprobs.is_some() && self.reported < self.request.prompt.len() - 1
    }

    /// Reports what the logits of some tokens of the prompt, from `first` on, say of those behind them; `None` if a
    /// logit is not a number.
    fn report(&mut self, first: usize, scored: &[Scores]) -> Option<()> {
        for (token, scores) in (first..).zip(scored) {
            let Scores::Logits(logits) = scores else { return None };
            if logits.iter().any(|logit| logit.is_nan()) {
                return None;
            }
            let behind = self.request.prompt[token + 1] as usize;
            let logprobs = Logprobs::of(logits, behind, self.request.prompt_logprobs.unwrap_or(0));
            // Without a receiver, the request runs until its client's cancellation arrives.
            let _ = self.events.send(Event::Prompt(logprobs, rank(logits, behind)));
            self.reported = token + 1;
        }
        Some(())
    }

    /// Whether the token that is being chosen is the last one, whatever it is.
    fn is_ending(&self) -> bool {
        let chosen = self.tokens.len() - self.request.prompt.len();
        self.next.is_some() && chosen + 1 == self.request.max_tokens
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

/// Takes note of an adapter's load, if one is under way.
fn watch<D: Capture>(loads: &mut HashMap<AdapterId, Load>, id: AdapterId, pool: &Pool<D>) {
    loads.extend(pool.loading(id).map(|load| (id, load)));
}

fn failure(error: &PoolError) -> Failure {
    Failure::Adapter(pool::sentence(error).into())
}
