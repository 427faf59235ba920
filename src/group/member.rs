//! A rank of a pool's group, and how it reaches the others.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::Duration,
};

use super::{
    channel::{ChannelError, Ranks},
    said::{self, Answer, End, Said},
};
use crate::{
    model::TpRank,
    pool::{AdapterId, Backend, ReadEnd, Transfer},
};

/// Reads whose ends the ranks tell each other in one message.
pub(super) const MAX_READS: usize = 8;

/// A read that has not ended on all ranks.
pub(super) struct Reading {
    pub(super) id: AdapterId,
    /// The copy that it makes, unless this was taken back.
    pub(super) copy: Option<Transfer>,
    /// Whether it has failed on a rank, or the ranks have read different adapters.
    pub(super) has_failed: bool,
}

/// A rank, with what has ended there and not on all.
pub(crate) struct Member<B> {
    pub(crate) backend: B,
    /// Reads that have ended on this rank, and not on all.
    pub(super) ended: HashMap<AdapterId, ReadEnd>,
    /// Copies that have ended on this rank, and not on all.
    pub(super) copied: HashSet<u64>,
    /// Copies that were complete when they were taken back. The reads that made them end with them.
    pub(super) abandoned: HashMap<AdapterId, u64>,
}

impl<B: Backend> Member<B> {
    pub(crate) fn new(backend: B) -> Self {
        Self { backend, ended: HashMap::new(), copied: HashSet::new(), abandoned: HashMap::new() }
    }

    /// Enqueues nothing more of a copy that a read makes. If all of it is, the read ends when that has run.
    pub(super) fn take_back(&mut self, copy: &Transfer) {
        if !self.backend.revoke(copy) && !self.copied.remove(&copy.number) && self.backend.abandon(copy) {
            self.abandoned.insert(copy.id, copy.number);
        }
    }

    /// How far the reads and the copies are that have not ended on all ranks.
    pub(super) fn ends(&self, reading: &VecDeque<Reading>, copying: &VecDeque<u64>, copied: u64) -> Answer {
        let mut failure = None;
        let mut end = |&Reading { id, has_failed, .. }: &Reading| match self.ended.get(&id) {
            None => End::UnderWay,
            Some(_) if self.abandoned.contains_key(&id) => End::UnderWay,
            Some(ReadEnd { fingerprint, result: Ok(()), .. }) if has_failed => End::Clear(*fingerprint),
            Some(ReadEnd { fingerprint, result: Ok(()), .. }) => End::Whole(*fingerprint),
            // A message has room for one reason.
            Some(_) if failure.is_some() => End::UnderWay,
            Some(ReadEnd { result: Err(error), .. }) => {
                failure = Some(said::reason(&error.to_string()));
                End::Failed
            }
        };
        let reads = reading.iter().take(MAX_READS).map(&mut end).collect();
        let ended = copying.iter().take_while(|&number| self.copied.contains(number)).count();
        Answer::Ends { reads, copied: copied + ended as u64, reason: failure.unwrap_or_default() }
    }

    /// Takes note of what has ended on this rank.
    pub(super) fn notice(&mut self, wait: Option<Duration>) {
        self.backend.notice(wait);
        while let Some(number) = self.backend.next_copied() {
            let before = self.abandoned.len();
            self.abandoned.retain(|_, abandoned| *abandoned != number);
            if self.abandoned.len() == before {
                self.copied.insert(number);
            }
        }
        while let Some(read) = self.backend.next_read() {
            self.ended.insert(read.id, read);
        }
    }
}

/// How a rank reaches the others of its group.
pub(crate) trait Exchange<B> {
    /// What all ranks say, by rank, in exchange for what those here do, which is among it as it is.
    fn exchange(&mut self, tp: TpRank, own: Vec<Said>) -> Result<Vec<Said>, ChannelError>;

    /// Has each rank that is here act: `own`, and those that this object has.
    fn each(&mut self, own: &mut Member<B>, mut act: impl FnMut(&mut Member<B>)) {
        act(own);
    }
}

impl<R: Ranks, B> Exchange<B> for R {
    fn exchange(&mut self, tp: TpRank, own: Vec<Said>) -> Result<Vec<Said>, ChannelError> {
        own.first().map_or_else(|| Ok(Vec::new()), |said| said::exchange(self, tp, said))
    }
}
