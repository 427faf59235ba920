//! Loads of an adapter on all ranks, and the tables that they load into.

use std::{
    any::Any,
    borrow::Borrow,
    panic::{self, AssertUnwindSafe},
};

use super::{
    channel::{ChannelError, Ranks},
    error::{GroupError, Phase, RankFailure},
    verdict::{self, Verdict},
};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{
    DType, Slot,
    adapter::{Adapter, AdapterError, SlotImage},
    cpu,
    error::LoadError,
    model::Model,
};

/// One rank's view of a tensor-parallel group: its channel to the other ranks, and its weight table.
///
/// All ranks call the same operations in the same order. Each blocks until all ranks have called it, or the channel
/// fails.
#[derive(Debug)]
pub struct Group<R, T> {
    ranks: R,
    table: T,
    broken: Option<ChannelError>,
}

/// An adapter that all ranks of a group are ready to commit. Dropping it frees its memory; then all ranks must drop
/// theirs.
#[derive(Debug)]
#[must_use]
pub struct Prepared<T: Table> {
    slot: usize,
    fingerprint: u64,
    filled: T::Filled,
}

impl<T: Table> Prepared<T> {
    /// Index of the slot that the adapter was prepared for.
    pub fn slot(&self) -> usize {
        self.slot
    }
}

/// Why this rank failed.
enum Failure {
    Error(LoadError),
    Panic(Box<dyn Any + Send>),
}

impl<R: Ranks, T: Table> Group<R, T> {
    /// The group of these ranks.
    ///
    /// # Errors
    /// [`GroupError::OtherRank`] if the table's model was sharded for another rank.
    pub fn new(ranks: R, table: T) -> Result<Self, GroupError> {
        let (channel, own) = (ranks.tp(), table.model().tp());
        if channel != own {
            return Err(GroupError::OtherRank { channel, table: own });
        }
        Ok(Self { ranks, table, broken: None })
    }

    /// The table of this rank.
    pub fn table(&self) -> &T {
        &self.table
    }

    /// The lowest slot that is empty on all ranks. Nothing keeps it empty: the slot is for the group's next load.
    ///
    /// # Errors
    /// [`GroupError::NoFreeSlot`], [`GroupError::Disagreement`] or [`GroupError::Channel`].
    pub fn free_slot(&mut self) -> Result<usize, GroupError> {
        let mut first = 0;
        loop {
            let verdicts = self.exchange(&Verdict::Free(self.table.free_slot(first)))?;
            let free = |verdict: &Verdict| if let Verdict::Free(free) = verdict { Some(*free) } else { None };
            let Some(free) = verdicts.iter().map(free).collect::<Option<Vec<_>>>() else {
                return Err(disagreement(&verdicts));
            };
            let Some(free) = free.into_iter().collect::<Option<Vec<usize>>>() else {
                return Err(GroupError::NoFreeSlot);
            };
            // Each round raises `first`, until all ranks have the same slot or one has none.
            let lower: Vec<_> = (0..free.len()).filter(|&rank| free[rank] < first).collect();
            if !lower.is_empty() {
                let reason = format!("a slot below {first}, from which on all were asked for one");
                return Err(self.broken.insert(ChannelError { ranks: lower, reason }).clone().into());
            }
            first = free.iter().fold(first, |first, &free| first.max(free));
            if free.iter().all(|&free| free == first) {
                return Ok(first);
            }
        }
    }

    /// Opens an adapter, plans this rank's part, reserves its memory and writes it. Returns when all ranks have done
    /// so. The slot is unchanged until [`commit`](Self::commit), and may hold an adapter, which keeps serving.
    ///
    /// `fingerprint` is a number by which all ranks know the adapter, such as a hash of its name and revision. An
    /// [`AdapterId`](crate::pool::AdapterId) is none, because processes count them separately.
    ///
    /// # Errors
    /// [`GroupError::Refused`] if any rank failed, [`GroupError::Disagreement`] if the ranks gave different slots or
    /// fingerprints, or [`GroupError::Channel`].
    ///
    /// # Panics
    /// If `open` panics. The other ranks get [`GroupError::Refused`], and the group can be used again.
    pub fn prepare<A: Borrow<Adapter>>(
        &mut self,
        slot: usize,
        fingerprint: u64,
        open: impl FnOnce() -> Result<A, AdapterError>,
    ) -> Result<Prepared<T>, GroupError> {
        if let Some(broken) = &self.broken {
            return Err(broken.clone().into());
        }
        let (mut phase, mut can_hold) = (Phase::Plan, false);
        let table = &self.table;
        let own = attempt(|| {
            let adapter = open()?;
            let image = adapter.borrow().plan(table.model(), table.dtype())?;
            (phase, can_hold) = (Phase::Reserve, table.can_hold(&image));
            let reservation = table.reserve(slot, &image)?;
            phase = Phase::Fill;
            table.fill(reservation, &image)
        });
        let ready = Verdict::Ready { slot, fingerprint };
        let verdicts =
            self.exchange(&own.as_ref().map_or_else(|failure| failure.verdict(phase, can_hold), |_| ready.clone()));
        let own = match own {
            Err(Failure::Panic(payload)) => panic::resume_unwind(payload),
            Err(Failure::Error(error)) => Err(error),
            Ok(filled) => Ok(filled),
        };
        let verdicts = verdicts?;
        let failures = failures(&verdicts);
        match own {
            Ok(filled) if verdicts.iter().all(|verdict| *verdict == ready) => {
                Ok(Prepared { slot, fingerprint, filled })
            }
            own if !failures.is_empty() => Err(GroupError::Refused { failures, own: own.err().map(Box::new) }),
            _ => Err(disagreement(&verdicts)),
        }
    }

    /// Puts the adapter into the slot on all ranks and replaces the previous one. If a rank calls this, all must,
    /// between the same two steps and on the thread that steps.
    ///
    /// # Errors
    /// [`GroupError::Torn`] if a rank did not commit, or another adapter or to another slot, or [`GroupError::Channel`]
    /// if the group was broken before.
    ///
    /// # Panics
    /// If the table panics. The other ranks get [`GroupError::Torn`].
    pub fn commit(&mut self, prepared: Prepared<T>) -> Result<Slot, GroupError> {
        if let Some(broken) = &self.broken {
            return Err(broken.clone().into());
        }
        let Prepared { slot, fingerprint, filled } = prepared;
        let own = attempt(|| self.table.commit(slot, filled));
        let committed = Verdict::Committed { slot, fingerprint };
        let verdict = own.as_ref().map_or_else(|failure| failure.verdict(Phase::Commit, false), |_| committed.clone());
        let (verdicts, channel) = match self.exchange(&verdict) {
            Ok(verdicts) => (verdicts, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        if let (Ok(slot), None) = (&own, &channel)
            && verdicts.iter().all(|verdict| *verdict == committed)
        {
            return Ok(*slot);
        }
        let not_emptied = self.table.unload(slot).err().map(Box::new);
        if let Err(Failure::Panic(payload)) = own {
            panic::resume_unwind(payload);
        }
        let of_own = [verdict];
        let (first, verdicts) = match &channel {
            None => (0, &verdicts[..]),
            Some(_) => (self.table.model().tp().rank(), &of_own[..]),
        };
        let others = (first..).zip(verdicts).filter(|(_, verdict)| **verdict != committed);
        let failures = others.map(|(rank, verdict)| not_committed(rank, verdict)).collect();
        Err(GroupError::Torn { slot, failures, channel, not_emptied })
    }

    /// [`prepare`](Self::prepare) and [`commit`](Self::commit), for engines that load between steps.
    ///
    /// # Errors
    /// As for `prepare` and `commit`.
    pub fn load<A: Borrow<Adapter>>(
        &mut self,
        slot: usize,
        fingerprint: u64,
        open: impl FnOnce() -> Result<A, AdapterError>,
    ) -> Result<Slot, GroupError> {
        let prepared = self.prepare(slot, fingerprint, open)?;
        self.commit(prepared)
    }

    /// The verdicts of all ranks.
    fn exchange(&mut self, verdict: &Verdict) -> Result<Vec<Verdict>, ChannelError> {
        if let Some(broken) = &self.broken {
            return Err(broken.clone());
        }
        let tp = self.table.model().tp();
        verdict::exchange(&mut self.ranks, tp, verdict).inspect_err(|error| self.broken = Some(error.clone()))
    }
}

impl Failure {
    fn verdict(&self, phase: Phase, can_hold: bool) -> Verdict {
        let panicked = |text: &str| format!("panicked: {text}");
        let is_full = can_hold && matches!(self, Self::Error(LoadError::Full { .. }));
        Verdict::failed(
            phase,
            &match self {
                Self::Error(error) => error.to_string(),
                Self::Panic(payload) => match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
                    (Some(text), _) => panicked(text),
                    (None, Some(text)) => panicked(text),
                    (None, None) => "panicked".to_owned(),
                },
            },
            is_full,
        )
    }
}

/// Calls `f`, and catches a panic, so that the other ranks hear of it.
fn attempt<O>(f: impl FnOnce() -> Result<O, LoadError>) -> Result<O, Failure> {
    // The caller resumes the panic, or drops what it left.
    match panic::catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result.map_err(Failure::Error),
        Err(payload) => Err(Failure::Panic(payload)),
    }
}

/// The failures before a commit.
fn failures(verdicts: &[Verdict]) -> Vec<RankFailure> {
    let failure = |(rank, verdict): (usize, &Verdict)| match verdict {
        Verdict::Failed { phase, reason, is_full } => {
            Some(RankFailure { rank, phase: *phase, reason: reason.clone(), is_full: *is_full })
        }
        _ => None,
    };
    verdicts.iter().enumerate().filter_map(failure).collect()
}

/// The failure of a rank that this one expects to have committed what it has itself.
fn not_committed(rank: usize, verdict: &Verdict) -> RankFailure {
    let reason = match verdict {
        Verdict::Failed { phase: Phase::Commit, reason, .. } => reason.clone(),
        other => format!("it {other}"),
    };
    RankFailure { rank, phase: Phase::Commit, reason, is_full: false }
}

fn disagreement(verdicts: &[Verdict]) -> GroupError {
    let ranks = verdicts.iter().enumerate().map(|(rank, verdict)| format!("rank {rank} {verdict}"));
    GroupError::Disagreement { ranks: ranks.collect() }
}

/// A weight table that a [`Group`](super::Group) loads into.
///
/// Reservations and filled adapters free their memory when they are dropped.
pub trait Table {
    /// Memory for an adapter.
    type Reservation;
    /// An adapter that is not in a slot yet.
    type Filled;

    /// The model of the adapters.
    fn model(&self) -> &Model;

    /// The element type of factors.
    fn dtype(&self) -> DType;

    /// The lowest empty slot from the index `first` on.
    fn free_slot(&self, first: usize) -> Option<usize>;

    /// Whether an image would fit if no adapter was loaded.
    fn can_hold(&self, image: &SlotImage<'_>) -> bool;

    /// Reserves memory for an adapter that will be put into `slot`.
    ///
    /// # Errors
    /// [`LoadError`] if the slot does not exist, the image does not match the table, or there is no room.
    fn reserve(&self, slot: usize, image: &SlotImage<'_>) -> Result<Self::Reservation, LoadError>;

    /// Writes an adapter and waits until it is written, so that no failed copy can make the commit fail.
    ///
    /// # Errors
    /// [`LoadError`] if a weight has no finite value in the table's element type, or a copy failed.
    fn fill(&self, reservation: Self::Reservation, image: &SlotImage<'_>) -> Result<Self::Filled, LoadError>;

    /// Puts an adapter into the slot that its memory was reserved for. [`GroupError::Torn`](super::GroupError::Torn)
    /// lists what may still fail here.
    ///
    /// # Errors
    /// [`LoadError`]. The slot is then unchanged.
    fn commit(&self, slot: usize, filled: Self::Filled) -> Result<Slot, LoadError>;

    /// Empties a slot.
    ///
    /// # Errors
    /// [`LoadError`] if the slot does not exist, or as for `commit`.
    fn unload(&self, slot: usize) -> Result<(), LoadError>;
}

/// Implements [`Table`] for a backend's table. `fill` is the way that the backend writes an adapter.
macro_rules! table {
    ($backend:ident, $fill:expr) => {
        impl Table for $backend::WeightTable {
            type Reservation = $backend::Reservation;
            type Filled = $backend::Filled;

            fn model(&self) -> &Model {
                self.model()
            }

            fn dtype(&self) -> DType {
                self.dtype()
            }

            fn free_slot(&self, first: usize) -> Option<usize> {
                (first..self.capacity().num_slots).find(|&slot| self.get(slot).is_none())
            }

            fn can_hold(&self, image: &SlotImage<'_>) -> bool {
                Self::arena_bytes([image]) <= self.usage().capacity
            }

            fn reserve(&self, slot: usize, image: &SlotImage<'_>) -> Result<Self::Reservation, LoadError> {
                self.check_slot(slot)?;
                self.reserve(image)
            }

            fn fill(&self, reservation: Self::Reservation, image: &SlotImage<'_>) -> Result<Self::Filled, LoadError> {
                let fill: fn(&Self, Self::Reservation, &SlotImage<'_>) -> Result<Self::Filled, LoadError> = $fill;
                fill(self, reservation, image)
            }

            fn commit(&self, slot: usize, filled: Self::Filled) -> Result<Slot, LoadError> {
                self.commit(slot, filled)
            }

            fn unload(&self, slot: usize) -> Result<(), LoadError> {
                self.unload(slot)
            }
        }
    };
}

table!(cpu, |_, reservation, image| reservation.fill(image, &mut cpu::Staging::default()));
#[cfg(feature = "cuda")]
table!(cuda, |table, reservation, image| table.fill_with_progress(reservation, image, |_| ()));
