//! A pool on the ranks of a group. Every rank makes the same decisions; what may differ between them, they agree on.

use std::{
    collections::{HashMap, VecDeque},
    fmt, mem,
    ops::Range,
    time::Duration,
};

use super::{
    channel::{ChannelError, Ranks},
    error::{GroupError, Phase, RankFailure},
    member::{Exchange, MAX_READS, Member, Reading},
    said::{self, Answer, End, On, Said},
};
use crate::{
    Slot,
    adapter::AdapterError,
    digest,
    error::LoadError,
    model::TpRank,
    pool::{
        AdapterId, AdapterPool, Backend, Call, Executor, Granted, Limits, PoolError, ReadEnd, Source, StreamId,
        Transfer,
    },
};

/// An [`AdapterPool`] on the ranks of a group: an adapter is in the same slot on all ranks, or on none.
///
/// All ranks make the same calls in the same order, and drop leases between the same calls. Each decides for itself,
/// and all decide the same, because what may differ between ranks is agreed on: the end of a read or a copy, whether a
/// copy can be enqueued, and what has failed. A load that fails on one rank fails on all, with the reasons of all; in a
/// group of one, with its own error. So does one of which the ranks have read different adapters: other weights, names
/// of modules or configurations.
///
/// A rank registers a source, or the error for which it has none. Then no rank has the adapter, and all get
/// [`GroupError::Refused`], which names the rank.
///
/// While an adapter is registered, read or copied, a call waits for the other ranks to make it, and a rank that does
/// not ends the group: then every call that could change a slot is an error ([`LoadError::Group`]), as is the end of
/// every load that was under way, and steps go on with the leases that they have. A channel that panics, or returns
/// what no rank says, ends it likewise. Calls for adapters that are loaded exchange nothing.
pub type GroupPool<R, B> = AdapterPool<OnRanks<R, B>>;

/// The memory and the streams of a [`GroupPool`], which are those of this rank.
pub struct OnRanks<R, B> {
    ranks: R,
    /// This rank, in a box, so that pools of a group are about as large as others.
    member: Box<Member<B>>,
    /// Why the ranks cannot agree any more.
    broken: Option<Broken>,
    /// A digest of all calls.
    calls: u64,
    /// The numbers of the registered adapters, in their order. Ranks have different ids.
    numbers: HashMap<AdapterId, u64>,
    registered: u64,
    /// Reads that have not ended on all ranks, in the order of their starts.
    reading: VecDeque<Reading>,
    /// Copies that have not ended on all ranks, in the order in which they were enqueued, and how many have.
    copying: VecDeque<u64>,
    copied: u64,
    /// The copy that each slot was pointed to last, by stream and slot.
    pointed: HashMap<(StreamId, usize), u64>,
    /// For the pool.
    reads: VecDeque<ReadEnd>,
    copies: VecDeque<u64>,
}

#[derive(Clone, Debug)]
enum Broken {
    Channel(ChannelError),
    Disagreement(Vec<String>),
}

impl<R, B> fmt::Debug for OnRanks<R, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnRanks").field("broken", &self.broken).finish_non_exhaustive()
    }
}

impl Broken {
    fn error(&self) -> LoadError {
        LoadError::Group(Box::new(match self {
            Self::Channel(error) => GroupError::Channel(error.clone()),
            Self::Disagreement(ranks) => GroupError::Disagreement { ranks: ranks.clone() },
        }))
    }
}

#[expect(private_bounds, reason = "ranks have it, and tests")]
impl<R: Exchange<B>, B: Backend> OnRanks<R, B> {
    pub(crate) fn of(ranks: R, backend: B) -> Self {
        Self {
            ranks,
            member: Box::new(Member::new(backend)),
            broken: None,
            calls: 0,
            numbers: HashMap::new(),
            registered: 0,
            reading: VecDeque::new(),
            copying: VecDeque::new(),
            copied: 0,
            pointed: HashMap::new(),
            reads: VecDeque::new(),
            copies: VecDeque::new(),
        }
    }

    #[cfg(test)]
    pub(crate) fn parts(&mut self) -> (&mut R, &mut B) {
        (&mut self.ranks, &mut self.member.backend)
    }

    /// Has each rank that is here act.
    fn each(&mut self, act: impl FnMut(&mut Member<B>)) {
        self.ranks.each(&mut self.member, act);
    }

    /// Reads that have not been taken.
    #[cfg(test)]
    pub(crate) fn num_reads(&self) -> usize {
        self.reading.len() + self.reads.len()
    }

    /// The answers of all ranks.
    ///
    /// # Errors
    /// Why they cannot agree any more.
    fn ask(&mut self, on: On, mut answer: impl FnMut(&mut Member<B>) -> Answer) -> Result<Vec<Answer>, LoadError> {
        if let Some(broken) = &self.broken {
            return Err(broken.error());
        }
        let (tp, calls, mut own) = (self.member.backend.tp(), self.calls, Vec::new());
        self.each(|member| own.push(Said { calls, on, answer: answer(member) }));
        let broken = match self.ranks.exchange(tp, own) {
            Err(error) => Broken::Channel(error),
            Ok(said) if said.iter().any(|said| (said.calls, said.on) != (calls, on)) => Broken::Disagreement(
                said.iter().enumerate().map(|(rank, said)| format!("rank {rank} {said}")).collect(),
            ),
            Ok(said) => {
                let ranks: Vec<_> = (0..said.len()).filter(|&rank| !on.may_be(&said[rank].answer)).collect();
                if ranks.is_empty() {
                    return Ok(said.into_iter().map(|said| said.answer).collect());
                }
                Broken::Channel(ChannelError { ranks, reason: "what arrived answers another question".to_owned() })
            }
        };
        Err(self.broken.insert(broken).error())
    }

    /// The answers of all ranks to what all of them must do.
    ///
    /// # Errors
    /// Why not all have done it.
    fn demand(
        &mut self,
        on: On,
        mut act: impl FnMut(&mut Member<B>) -> Result<Answer, PoolError>,
    ) -> Result<Vec<Answer>, LoadError> {
        let mut own = None;
        let answers = self.ask(on, |member| {
            act(member).unwrap_or_else(|error| {
                let reason = said::reason(&error.to_string());
                own = error.into_load();
                Answer::Failed { reason }
            })
        })?;
        let failure = |(rank, answer): (usize, &Answer)| match answer {
            Answer::Failed { reason } => Some(RankFailure { rank, phase: on.phase(), reason: reason.clone() }),
            _ => None,
        };
        let failures: Vec<_> = answers.iter().enumerate().filter_map(failure).collect();
        if failures.is_empty() { Ok(answers) } else { Err(refused(answers.len(), failures, own)) }
    }

    /// The smallest limits of all ranks.
    fn agree_on(&mut self, limits: Limits, streams: usize) -> Result<Limits, LoadError> {
        let Limits { num_slots: slots, arena_bytes, host_bytes, max_reads } = limits;
        let answers =
            self.ask(On::Limits { slots, streams }, |_| Answer::Limits { arena_bytes, host_bytes, max_reads })?;
        Ok(answers.into_iter().fold(limits, |least, answer| match answer {
            Answer::Limits { arena_bytes, host_bytes, max_reads } => Limits {
                num_slots: slots,
                arena_bytes: least.arena_bytes.min(arena_bytes),
                host_bytes: least.host_bytes.min(host_bytes),
                max_reads: least.max_reads.min(max_reads),
            },
            _ => least,
        }))
    }

    /// Takes note of reads that have ended on all ranks.
    fn end_reads(&mut self, answers: &[Answer]) {
        let mut place = 0;
        for index in 0..MAX_READS.min(self.reading.len()) {
            let ends: Vec<_> = answers.iter().filter_map(|answer| answer.ends().get(index).copied()).collect();
            let is_whole = |end: &End| matches!(end, End::Whole(_));
            let mut fingerprints = ends.iter().filter_map(|end| end.fingerprint());
            let first = fingerprints.next();
            let differ = fingerprints.any(|other| Some(other) != first);
            let was_good = !self.reading[place].has_failed;
            let has_failed = !was_good || differ || ends.contains(&End::Failed);
            let has_ended = if has_failed {
                ends.iter().all(|end| matches!(end, End::Failed | End::Clear(_)))
            } else {
                ends.iter().all(is_whole)
            };
            self.reading[place].has_failed = has_failed;
            if has_failed && was_good {
                self.take_back(place);
            }
            if has_ended && let Some(Reading { id, .. }) = self.reading.remove(place) {
                let read = self.end_read(id, has_failed, answers, &ends);
                self.reads.push_back(read);
            } else {
                place += 1;
            }
        }
    }

    /// The end of a read on all ranks.
    fn end_read(&mut self, id: AdapterId, has_failed: bool, answers: &[Answer], ends: &[End]) -> ReadEnd {
        let (mut time, mut fingerprint, mut own) = (Duration::ZERO, 0, None);
        self.each(|member| {
            if let Some(read) = member.ended.remove(&id) {
                (time, fingerprint) = (read.time, read.fingerprint);
                own = read.result.err();
            }
        });
        if !has_failed {
            return ReadEnd { id, time, fingerprint, result: Ok(()) };
        }
        // What ranks have packed.
        self.each(|member| member.backend.forget(id));
        let failure = |(rank, end): (usize, &End)| match (end, &answers[rank]) {
            (End::Failed, Answer::Ends { reason, .. }) => {
                Some(RankFailure { rank, phase: Phase::Fill, reason: reason.clone() })
            }
            _ => None,
        };
        let failures: Vec<_> = ends.iter().enumerate().filter_map(failure).collect();
        let error = if failures.is_empty() {
            let read = |(rank, end): (usize, &End)| {
                format!("rank {rank} has read an adapter with fingerprint {:016x}", end.fingerprint().unwrap_or(0))
            };
            let ranks = ends.iter().enumerate().map(read).collect();
            LoadError::Group(Box::new(GroupError::Disagreement { ranks }))
        } else {
            refused(answers.len(), failures, own)
        };
        ReadEnd { id, time, fingerprint, result: Err(error) }
    }

    /// Takes the copy of a read back, if it makes one.
    fn take_back(&mut self, place: usize) {
        if let Some(copy) = self.reading[place].copy.take() {
            self.each(|member| member.take_back(&copy));
        }
    }

    /// Takes note of copies that have ended on all ranks.
    fn end_copies(&mut self, answers: &[Answer]) {
        let copied = answers.iter().map(|answer| if let Answer::Ends { copied, .. } = answer { *copied } else { 0 });
        let copied = copied.min().unwrap_or(0);
        while self.copied < copied
            && let Some(number) = self.copying.pop_front()
        {
            self.copied += 1;
            self.each(|member| {
                member.copied.remove(&number);
            });
            self.copies.push_back(number);
        }
    }

    fn note(&mut self, word: u64) {
        self.calls = digest::mix(self.calls, word);
    }

    fn number_of(&self, id: AdapterId) -> u64 {
        self.numbers.get(&id).copied().unwrap_or(u64::MAX)
    }
}

/// What has failed on some of the ranks: in a group of one, the rank's own error.
fn refused(ranks: usize, failures: Vec<RankFailure>, own: Option<LoadError>) -> LoadError {
    match own {
        Some(own) if ranks == 1 => own,
        own => LoadError::Group(Box::new(GroupError::Refused { failures, own: own.map(Box::new) })),
    }
}

impl<R: Exchange<B>, B: Backend<Source: Clone>> Backend for OnRanks<R, B> {
    /// Or why this rank has none.
    type Source = Result<B::Source, AdapterError>;
    type Weights = B::Weights;
    type Batch<'a> = B::Batch<'a>;
    type Workspace = B::Workspace;
    type Step<'a>
        = B::Step<'a>
    where
        Self: 'a;
    type Error = B::Error;

    /// The largest of the ranks' blocks, so that a block has the same place on all of them. This rank's is one of them.
    fn add(&mut self, id: AdapterId, source: Self::Source) -> Result<usize, PoolError> {
        self.registered += 1;
        self.numbers.insert(id, self.registered);
        self.note(self.registered);
        let mut source = source.map_err(Some);
        let answers = self.demand(On::Size, |member| match &mut source {
            Ok(source) => {
                let source = member.backend.shard(source)?;
                Ok(Answer::Size { bytes: member.backend.add(id, source)? })
            }
            Err(error) => Err(error.take().map_or(PoolError::Unknown { id }, |error| LoadError::from(error).into())),
        });
        let answers = answers.inspect_err(|_| self.remove(id))?;
        let sizes = answers.iter().map(|answer| if let Answer::Size { bytes } = answer { *bytes } else { 0 });
        Ok(sizes.max().unwrap_or(0))
    }

    fn weights(&self, stream: StreamId) -> Option<&B::Weights> {
        self.member.backend.weights(stream)
    }

    fn slots<'b>(batch: &'b B::Batch<'_>) -> &'b [Slot] {
        B::slots(batch)
    }

    fn step<'a>(
        &'a self,
        stream: StreamId,
        batch: &B::Batch<'a>,
        workspace: &'a mut B::Workspace,
    ) -> Result<B::Step<'a>, B::Error> {
        self.member.backend.step(stream, batch, workspace)
    }
}

impl<R: Exchange<B>, B: Backend<Source: Clone>> Executor for OnRanks<R, B> {
    fn check(&self) -> Result<(), PoolError> {
        self.broken.as_ref().map_or(Ok(()), |broken| Err(broken.error().into()))
    }

    fn called(&mut self, call: Call<'_>) {
        let words: &[u64] = match call {
            Call::Unregister(id) => &[1, self.number_of(id)],
            Call::Prefetch(id) => &[2, self.number_of(id)],
            Call::Retry(id) => &[3, self.number_of(id)],
            Call::Pin(id, is_pinned) => &[4, self.number_of(id), u64::from(is_pinned)],
            Call::Prepare(ids, stream) => {
                [5, stream.0 as u64, ids.len() as u64].into_iter().for_each(|word| self.note(word));
                return ids.iter().for_each(|&id| self.note(self.number_of(id)));
            }
            Call::Release(slot, stream) => &[6, slot as u64, stream.0 as u64],
            Call::EndStep(stream) => &[7, stream.0 as u64],
        };
        words.iter().for_each(|&word| self.note(word));
    }

    fn tp(&self) -> TpRank {
        self.member.backend.tp()
    }

    fn remove(&mut self, id: AdapterId) {
        self.numbers.remove(&id);
        self.each(|member| member.backend.remove(id));
    }

    /// With a copy, if all ranks can make it. Nothing is read if they cannot agree any more: the read never ends.
    fn read(&mut self, id: AdapterId, to: Range<usize>, copy: Option<&Transfer>) -> bool {
        self.reading.push_back(Reading { id, copy: None, has_failed: false });
        let Some(copy) = copy else {
            if self.broken.is_none() {
                self.each(|member| {
                    member.backend.read(id, to.clone(), None);
                });
            }
            return false;
        };
        let mut begun = Vec::new();
        let answers = self.ask(On::Read, |member| {
            begun.push(member.backend.read(id, to.clone(), Some(copy)));
            if begun.last() == Some(&true) { Answer::Yes } else { Answer::No }
        });
        let is_copied = answers.is_ok_and(|answers| answers.iter().all(Answer::is_yes));
        if is_copied {
            self.reading.back_mut().into_iter().for_each(|reading| reading.copy = Some(copy.clone()));
        } else {
            let mut begun = begun.into_iter();
            self.each(|member| {
                if begun.next() == Some(true) {
                    member.take_back(copy);
                }
            });
        }
        is_copied
    }

    /// A wait goes on while ranks come nearer to the end of a read: others have yet to end what one has, or to take it
    /// back. First it is for any read of this rank, then for those that the other ranks have ended, too.
    fn notice(&mut self, wait: Option<Duration>) {
        let mut before = Vec::new();
        // If they cannot agree any more, nothing ends.
        while self.broken.is_none() {
            let enough = if before.is_empty() { 1 } else { self.reading.len() };
            self.each(|member| member.notice(wait.filter(|_| member.ended.len() < enough)));
            if self.reading.is_empty() && self.copying.is_empty() {
                // Copies that not all ranks could enqueue.
                return self.each(|member| member.copied.clear());
            }
            let (reading, copying) = (mem::take(&mut self.reading), mem::take(&mut self.copying));
            let (reads, copied) = (reading.len().min(MAX_READS), self.copied);
            let answers = self.ask(On::Ends { reads, copied }, |member| member.ends(&reading, &copying, copied));
            (self.reading, self.copying) = (reading, copying);
            let Ok(answers) = answers else { return };
            self.end_copies(&answers);
            self.end_reads(&answers);
            let ends: Vec<_> = answers.iter().flat_map(Answer::ends).copied().collect();
            let is_under_way = ends.iter().all(|end| *end == End::UnderWay);
            if wait.is_none() || !self.reads.is_empty() || is_under_way || ends == before {
                return;
            }
            before = ends;
        }
    }

    fn next_read(&mut self) -> Option<ReadEnd> {
        self.reads.pop_front()
    }

    fn copies_parts(&self) -> bool {
        self.member.backend.copies_parts()
    }

    /// A rank that has enqueued all of the copy ends its read when the copy has run.
    fn revoke(&mut self, copy: &Transfer) -> bool {
        if let Some(place) = self.reading.iter().position(|reading| reading.id == copy.id) {
            self.take_back(place);
        }
        true
    }

    fn finish(&mut self, copy: &Transfer) {
        self.each(|member| member.backend.finish(copy));
        self.copying.push_back(copy.number);
    }

    /// By all ranks, or by none.
    fn copy(&mut self, copy: &Transfer) -> Result<(), LoadError> {
        let copied = self.demand(On::Copy, |member| {
            member.backend.copy(copy)?;
            Ok(Answer::Yes)
        });
        if let Err(refusal) = copied {
            // A rank that has enqueued it reads host memory that others will be given.
            self.each(|member| member.backend.settle());
            return Err(refusal);
        }
        self.copying.push_back(copy.number);
        Ok(())
    }

    fn next_copied(&mut self) -> Option<u64> {
        self.copies.pop_front()
    }

    /// On all ranks, or no step may use the slots.
    fn point(&mut self, granted: &[Granted], stream: StreamId) -> Result<(), PoolError> {
        let is_pointed = |granted: &Granted| self.pointed.get(&(stream, granted.slot)) == Some(&granted.number);
        if granted.iter().all(is_pointed) {
            return Ok(());
        }
        self.demand(On::Point, |member| {
            member.backend.point(granted, stream)?;
            Ok(Answer::Yes)
        })?;
        self.pointed.extend(granted.iter().map(|granted| ((stream, granted.slot), granted.number)));
        Ok(())
    }

    fn may_evict(&mut self) -> bool {
        let answers = self.ask(On::Evict, |member| if member.backend.may_evict() { Answer::Yes } else { Answer::No });
        answers.is_ok_and(|answers| answers.iter().all(Answer::is_yes))
    }

    fn evict(&mut self, slot: usize) {
        self.each(|member| member.backend.evict(slot));
        self.pointed.retain(|(_, pointed), _| *pointed != slot);
    }

    fn forget(&mut self, id: AdapterId) {
        self.each(|member| member.backend.forget(id));
    }
}

impl<R: Ranks, B: Backend<Source = Source>> GroupPool<R, B> {
    /// The pool of a group, of which `pool` is this rank's part: a pool of the rank's model, without adapters. All
    /// ranks call this, and give as many slots; of the sizes of their tiers, the smallest count.
    ///
    /// ```
    /// # use aril::{DType, cpu, group::{GroupPool, InProcess, Ranks}, model::Model, plan::Capacity};
    /// # use aril::pool::{PoolConfig, PoolError};
    /// # fn rank(ranks: InProcess, model: &Model, capacity: Capacity) -> Result<(), PoolError> {
    /// let pool = cpu::AdapterPool::new(model, DType::BF16, capacity, PoolConfig::arena_bytes(1 << 30))?;
    /// let mut pool = GroupPool::new(ranks, pool)?;
    /// pool.poll();
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`PoolError::Slot`] if `pool` has adapters, or unregistered ones still have memory, and [`PoolError::Load`] if
    /// the channel is of another rank than the pool's model ([`GroupError::OtherRank`]), fails, or the ranks have
    /// different numbers of slots ([`GroupError::Disagreement`]).
    pub fn new(ranks: R, pool: AdapterPool<B>) -> Result<Self, PoolError> {
        let (channel, table) = (ranks.tp(), pool.backend.tp());
        if channel != table {
            return Err(LoadError::Group(Box::new(GroupError::OtherRank { channel, table })).into());
        }
        let (backend, limits, streams) = pool.into_backend()?;
        let mut backend = OnRanks::of(ranks, backend);
        let limits = backend.agree_on(limits, streams)?;
        let mut pool = Self::within(backend, limits)?;
        for _ in 1..streams {
            pool.new_stream();
        }
        Ok(pool)
    }
}
