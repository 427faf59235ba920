//! Faults at random: in any phase, on any ranks, by an error or a panic, or of a rank that is gone.

use std::{
    panic::{self, AssertUnwindSafe},
    sync::{Arc, Mutex, Once},
};

use aril::{
    DType, Slot,
    adapter::{AdapterError, SlotImage},
    cpu::{Filled, Reservation, WeightTable},
    error::{LoadError, SlotError},
    group::{Group, GroupError, InProcess, Phase, Ranks, Table},
    model::Model,
};
use proptest::prelude::*;

use crate::world::{NEVER, World, each, refused};

const SLOT: usize = 1;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Fault {
    Error(Phase),
    Panic(Phase),
    /// The rank goes before it loads, or before it commits.
    Gone(Phase),
    /// The rank can neither commit nor empty the slot.
    Stuck,
}

const FAULT: &str = "fault of the test";
/// An error that these tables do not have otherwise.
const ERROR: SlotError = SlotError::OtherImage { bytes: 1, reserved: 2 };

/// A table whose fault happens once.
#[derive(Clone)]
struct Faulty {
    table: WeightTable,
    fault: Arc<Mutex<Option<Fault>>>,
}

impl Faulty {
    fn new(table: WeightTable, fault: Arc<Mutex<Option<Fault>>>) -> Self {
        Self { table, fault }
    }

    fn enter(&self, phase: Phase) -> Result<(), SlotError> {
        if phase == Phase::Commit && *self.fault.lock().unwrap() == Some(Fault::Stuck) {
            return Err(ERROR);
        }
        let fault = self
            .fault
            .lock()
            .unwrap()
            .take_if(|fault| matches!(fault, Fault::Error(at) | Fault::Panic(at) if *at == phase));
        match fault {
            Some(Fault::Error(_)) => Err(ERROR),
            Some(_) => panic::panic_any(FAULT),
            None => Ok(()),
        }
    }
}

impl Table for Faulty {
    type Reservation = Reservation;
    type Filled = Filled;

    fn model(&self) -> &Model {
        self.table.model()
    }

    fn dtype(&self) -> DType {
        self.table.dtype()
    }

    fn free_slot(&self, first: usize) -> Option<usize> {
        Table::free_slot(&self.table, first)
    }

    fn can_hold(&self, image: &SlotImage<'_>) -> bool {
        Table::can_hold(&self.table, image)
    }

    fn reserve(&self, slot: usize, image: &SlotImage<'_>) -> Result<Reservation, LoadError> {
        self.enter(Phase::Reserve)?;
        Table::reserve(&self.table, slot, image)
    }

    fn fill(&self, reservation: Reservation, image: &SlotImage<'_>) -> Result<Filled, LoadError> {
        self.enter(Phase::Fill)?;
        Table::fill(&self.table, reservation, image)
    }

    fn commit(&self, slot: usize, filled: Filled) -> Result<Slot, LoadError> {
        self.enter(Phase::Commit)?;
        Table::commit(&self.table, slot, filled)
    }

    fn unload(&self, slot: usize) -> Result<(), LoadError> {
        self.enter(Phase::Commit)?;
        Table::unload(&self.table, slot)
    }
}

/// What a load must do on all ranks.
#[derive(Debug)]
enum Expected {
    /// These ranks go, and the channel with them.
    GoneBefore(Vec<usize>),
    Refused(Vec<(usize, Phase)>),
    /// These ranks go after the vote.
    GoneAfter(Vec<usize>),
    Torn(Vec<usize>),
    Loaded,
}

impl Expected {
    fn of(faults: &[Option<Fault>]) -> Self {
        let ranks = |is: &dyn Fn(Fault) -> bool| -> Vec<usize> {
            (0..faults.len()).filter(|&rank| faults[rank].is_some_and(is)).collect()
        };
        let failing = |rank: usize| match faults[rank] {
            Some(Fault::Error(phase) | Fault::Panic(phase)) if phase != Phase::Commit => Some((rank, phase)),
            _ => None,
        };
        let refused: Vec<_> = (0..faults.len()).filter_map(failing).collect();
        let [before, after] = [Phase::Plan, Phase::Commit].map(|phase| ranks(&|fault| fault == Fault::Gone(phase)));
        let torn = ranks(&|fault| matches!(fault, Fault::Error(Phase::Commit) | Fault::Panic(Phase::Commit)));
        match (before.is_empty(), refused.is_empty(), after.is_empty(), torn.is_empty()) {
            (false, ..) => Self::GoneBefore(before),
            (_, false, ..) => Self::Refused(refused),
            (_, _, false, _) => Self::GoneAfter(after),
            (.., false) => Self::Torn(torn),
            _ => Self::Loaded,
        }
    }

    /// Whether the load gets as far as this phase.
    fn reaches(&self, phase: Phase) -> bool {
        phase != Phase::Commit || !matches!(self, Self::GoneBefore(_) | Self::Refused(_))
    }

    fn lasts(&self) -> bool {
        !matches!(self, Self::GoneBefore(_) | Self::GoneAfter(_))
    }
}

/// Loads the adapter with fingerprint 1 on a rank with a fault, over an adapter that adds 7. Returns its group, unless it goes.
fn load(
    world: &World,
    ranks: InProcess,
    table: &WeightTable,
    fault: Option<Fault>,
    expected: &Expected,
) -> Option<Group<InProcess, Faulty>> {
    let rank = ranks.tp().rank();
    let faulty = Faulty::new(table.clone(), Arc::new(Mutex::new(fault)));
    let mut group = Group::new(ranks, faulty.clone()).unwrap();
    if fault == Some(Fault::Gone(Phase::Plan)) {
        return None;
    }
    let new = world.adapter(|_| 9.0);
    let open = || faulty.enter(Phase::Plan).map(|()| &new).map_err(|_| AdapterError::Empty);
    let loaded = panic::catch_unwind(AssertUnwindSafe(|| {
        let prepared = group.prepare(SLOT, 1, open)?;
        if fault == Some(Fault::Gone(Phase::Commit)) { Ok(None) } else { group.commit(prepared).map(Some) }
    }));
    // The value that the slot adds now.
    let value = match (expected, loaded) {
        (_, Err(payload)) => {
            let Some(Fault::Panic(phase)) = fault else { panic!("rank {rank} panicked") };
            assert_eq!(payload.downcast_ref(), Some(&FAULT));
            assert!(expected.reaches(phase));
            if phase == Phase::Commit { 0.0 } else { 7.0 }
        }
        (Expected::GoneBefore(gone), Ok(Err(GroupError::Channel(error)))) => {
            assert!(error.ranks.len() == 1 && gone.contains(&error.ranks[0]), "{error}");
            assert!(error.to_string().ends_with("left the group"));
            7.0
        }
        (Expected::Refused(failures), Ok(Err(error))) => {
            assert_eq!(refused(&error), *failures);
            let GroupError::Refused { own, .. } = error else { unreachable!() };
            assert_eq!(own.is_some(), failures.iter().any(|(failed, _)| *failed == rank));
            7.0
        }
        (Expected::GoneAfter(_), Ok(Ok(None))) => {
            drop(group);
            check(world, table, 7.0);
            return None;
        }
        (Expected::GoneAfter(gone), Ok(Err(GroupError::Torn { slot, failures, channel, not_emptied: None }))) => {
            let channel = channel.unwrap();
            assert!(channel.ranks.len() == 1 && gone.contains(&channel.ranks[0]), "{channel}");
            assert_eq!((slot, failures.iter().any(|failure| failure.rank != rank)), (SLOT, false));
            assert_eq!(failures.len(), usize::from(fault == Some(Fault::Error(Phase::Commit))));
            0.0
        }
        (Expected::Torn(torn), Ok(Err(GroupError::Torn { slot, failures, channel: None, not_emptied: None }))) => {
            assert_eq!(failures.iter().map(|failure| failure.rank).collect::<Vec<_>>(), *torn);
            assert!(slot == SLOT && failures.iter().all(|failure| failure.phase == Phase::Commit));
            0.0
        }
        (Expected::Loaded, Ok(Ok(Some(slot)))) => {
            table.check([slot]).unwrap();
            assert_eq!(slot.index(), Some(SLOT));
            9.0
        }
        (expected, loaded) => panic!("rank {rank}: {loaded:?}, but {expected:?}"),
    };
    check(world, table, value);
    Some(group)
}

/// Checks what the slot adds, and that no other memory is in use.
fn check(world: &World, table: &WeightTable, value: f32) {
    assert_eq!(world.delta(table, SLOT), value);
    assert_eq!(table.get(SLOT).is_some(), value != 0.0);
    assert_eq!(table.usage().used, table.loaded().iter().map(|info| info.bytes).sum::<usize>());
}

fn check_group(faults: &[Option<Fault>]) {
    let world = World::new(faults.len());
    let (tables, expected) = (world.serving(), Expected::of(faults));
    each(InProcess::group(world.size, NEVER), |rank, ranks| {
        let Some(mut group) = load(&world, ranks, &tables[rank], faults[rank], &expected) else { return };
        // The group loads again, unless a rank has gone.
        group.table().fault.lock().unwrap().take();
        let again = group.load(SLOT, 2, || Ok(world.adapter(|_| 11.0)));
        match again {
            Ok(_) if expected.lasts() => check(&world, &tables[rank], 11.0),
            Err(GroupError::Channel(_)) if !expected.lasts() => {}
            other => panic!("{other:?} after {expected:?}"),
        }
    });
}

const PHASES: [Phase; 4] = [Phase::Plan, Phase::Reserve, Phase::Fill, Phase::Commit];

fn faults() -> Vec<Fault> {
    let gone = [Phase::Plan, Phase::Commit].map(Fault::Gone);
    PHASES.map(Fault::Error).into_iter().chain(PHASES.map(Fault::Panic)).chain(gone).collect()
}

/// Each fault on each rank of four, alone.
#[test]
fn all_or_nothing() {
    silence();
    check_group(&[None; 4]);
    for fault in faults() {
        for rank in 0..4 {
            let mut faults = [None; 4];
            faults[rank] = Some(fault);
            check_group(&faults);
        }
    }
}

/// Its own rank hears that the slot is not empty.
#[test]
fn a_slot_that_cannot_be_emptied() {
    let world = World::new(2);
    let tables = world.serving();
    each(InProcess::group(2, NEVER), |rank, ranks| {
        let fault = Arc::new(Mutex::new((rank == 0).then_some(Fault::Stuck)));
        let mut group = Group::new(ranks, Faulty::new(tables[rank].clone(), fault)).unwrap();
        let error = group.load(SLOT, 1, || Ok(world.adapter(|_| 9.0))).unwrap_err();
        assert_eq!(error.to_string().contains("slot 1, which must not be used"), rank == 0, "{error}");
        let GroupError::Torn { failures, channel: None, not_emptied, .. } = error else { panic!("{error}") };
        assert_eq!(failures.iter().map(|failure| failure.rank).collect::<Vec<_>>(), [0]);
        assert_eq!(not_emptied.is_some(), rank == 0);
        check(&world, &tables[rank], if rank == 0 { 7.0 } else { 0.0 });
    });
}

/// Each pair of faults on two ranks of three.
#[test]
fn two_faults() {
    silence();
    for (first, second) in
        faults().into_iter().flat_map(|first| faults().into_iter().map(move |second| (first, second)))
    {
        check_group(&[Some(first), None, Some(second)]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_faults(faults in prop::collection::vec(prop::option::weighted(0.4, prop::sample::select(faults())), 1..=8)) {
        silence();
        check_group(&faults);
    }
}

/// Prints no panic of this test's faults.
fn silence() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if info.payload().downcast_ref() != Some(&FAULT) {
                print(info);
            }
        }));
    });
}
