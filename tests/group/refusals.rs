//! What real adapters and tables refuse on one rank, or on several.

use aril::{
    adapter::{Adapter, AdapterError},
    cpu::WeightTable,
    error::{LoadError, SlotError},
    group::{Group, GroupError, InProcess, Phase, Ranks},
    model::TpRank,
};

use crate::world::{NEVER, World, each, each_group, refused};

const SLOT: usize = 1;

/// Checks that all tables still serve the old adapter, with no memory in use beside it.
fn unchanged(world: &World, tables: &[WeightTable]) {
    for table in tables {
        assert_eq!(world.delta(table, SLOT), 7.0);
        assert_eq!((table.loaded().len(), table.usage().used), (1, table.loaded()[0].bytes));
    }
}

/// Loads with what each rank opens, and checks the failures and each failing rank's own error.
fn refuses<'a>(
    world: &World,
    tables: &[WeightTable],
    open: impl Fn(usize) -> Result<&'a Adapter, AdapterError> + Sync,
    expected: &[(usize, Phase)],
    is_own: impl Fn(&LoadError) -> bool,
) {
    let errors = each_group(tables, |rank, mut group| group.load(SLOT, 1, || open(rank)).unwrap_err());
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(refused(error), expected);
        let GroupError::Refused { own, .. } = error else { unreachable!() };
        let fails = expected.iter().any(|(failed, _)| *failed == rank);
        assert_eq!(own.as_deref().map(&is_own), fails.then_some(true), "{own:?}");
    }
    unchanged(world, tables);
}

#[test]
fn all_ranks_load() {
    let world = World::new(4);
    let (tables, adapter) = (world.serving(), world.adapter(|rank| rank as f32));
    let residents = each_group(&tables, |_, mut group| group.load(SLOT, 1, || Ok(&adapter)).unwrap());
    for (rank, (table, slot)) in tables.iter().zip(residents).enumerate() {
        assert_eq!((world.delta(table, SLOT), slot.index()), (rank as f32, Some(SLOT)));
        table.check([slot]).unwrap();
        assert_eq!(table.usage().used, table.loaded()[0].bytes);
    }
}

/// Until the commit, the old adapter serves.
#[test]
fn prepared_adapters_are_in_no_slot() {
    let world = World::new(3);
    let (tables, adapter) = (world.serving(), world.adapter(|_| 9.0));
    each_group(&tables, |rank, mut group| {
        let prepared = group.prepare(SLOT, 1, || Ok(&adapter)).unwrap();
        assert_eq!((prepared.slot(), world.delta(&tables[rank], SLOT)), (SLOT, 7.0));
        assert_eq!(tables[rank].usage().largest_gap, 0);
        drop(prepared);
        unchanged(&world, &tables[rank..=rank]);
        let prepared = group.prepare(SLOT, 1, || Ok(&adapter)).unwrap();
        group.commit(prepared).unwrap();
        assert_eq!(world.delta(group.table(), SLOT), 9.0);
    });
}

#[test]
fn files_that_a_rank_does_not_have() {
    let world = World::new(4);
    let (tables, adapter) = (world.serving(), world.adapter(|_| 9.0));
    let folder = tempfile::tempdir().unwrap();
    let missing = Adapter::open(folder.path().join("missing")).unwrap_err().to_string();
    let open =
        |rank| if rank == 2 { Err(Adapter::open(folder.path().join("missing")).unwrap_err()) } else { Ok(&adapter) };
    refuses(&world, &tables, open, &[(2, Phase::Plan)], |own| own.to_string() == missing);
}

#[test]
fn adapters_of_another_shape() {
    let world = World::new(3);
    let (tables, adapter) = (world.serving(), world.adapter(|_| 9.0));
    let other = world.adapter_of(5, |_| 9.0);
    let open = |rank| Ok(if rank == 1 { &adapter } else { &other });
    let expected = [(0, Phase::Plan), (2, Phase::Plan)];
    refuses(&world, &tables, open, &expected, |own| matches!(own, LoadError::Adapter(AdapterError::Shape { .. })));
}

#[test]
fn arenas_without_room() {
    let world = World::new(3);
    let (mut tables, adapter) = (world.serving(), world.adapter(|_| 9.0));
    for rank in [0, 1] {
        tables[rank] = world.table(rank, 1);
        crate::world::load(&tables[rank], SLOT, &world.adapter(|_| 7.0));
    }
    let expected = [(0, Phase::Reserve), (1, Phase::Reserve)];
    refuses(&world, &tables, |_| Ok(&adapter), &expected, |own| matches!(own, LoadError::Full { .. }));
}

#[test]
fn weights_that_only_one_rank_reads() {
    let world = World::new(4);
    let tables = world.serving();
    for bad in 0..4 {
        let adapter = world.adapter(|rank| if rank == bad { f32::NAN } else { 9.0 });
        let is_own = |own: &LoadError| matches!(own, LoadError::Adapter(AdapterError::Unrepresentable { .. }));
        refuses(&world, &tables, |_| Ok(&adapter), &[(bad, Phase::Fill)], is_own);
    }
}

#[test]
fn slots_that_do_not_exist() {
    let world = World::new(2);
    let (tables, adapter) = (world.serving(), world.adapter(|_| 9.0));
    for slot in [2, usize::MAX] {
        let errors = each_group(&tables, |_, mut group| group.load(slot, 1, || Ok(&adapter)).unwrap_err());
        for error in errors {
            assert_eq!(refused(&error), [(0, Phase::Reserve), (1, Phase::Reserve)]);
            let GroupError::Refused { own: Some(own), .. } = error else { panic!("{error}") };
            assert!(matches!(*own, LoadError::Slot(own) if own == SlotError::NoSuchSlot { slot, num_slots: 2 }));
        }
        unchanged(&world, &tables);
    }
}

#[test]
fn slots_and_fingerprints_that_differ() {
    let world = World::new(3);
    let (tables, adapter) = (world.serving(), world.adapter(|_| 9.0));
    let of = |rank, slot, fingerprint| {
        format!("rank {rank} loads the adapter with fingerprint {fingerprint} into slot {slot}")
    };
    for (odd, slot, fingerprint) in [(0, 0, 1), (2, SLOT, 2)] {
        let choice = |rank| if rank == odd { (slot, fingerprint) } else { (SLOT, 1) };
        let errors = each_group(&tables, |rank, mut group| {
            group.load(choice(rank).0, choice(rank).1, || Ok(&adapter)).unwrap_err()
        });
        for error in errors {
            let GroupError::Disagreement { ranks } = &error else { panic!("{error}") };
            let expected: Vec<_> = (0..3).map(|rank| of(rank, choice(rank).0, choice(rank).1)).collect();
            assert_eq!(*ranks, expected);
            assert!(error.to_string().ends_with(&expected.join("; ")), "{error}");
        }
        unchanged(&world, &tables);
    }
}

/// One rank asks for a slot, the other loads.
#[test]
fn different_operations() {
    let world = World::new(2);
    let (tables, adapter) = (world.serving(), world.adapter(|_| 9.0));
    let errors = each_group(&tables, |rank, mut group| match rank {
        0 => group.free_slot().unwrap_err(),
        _ => group.load(SLOT, 1, || Ok(&adapter)).unwrap_err(),
    });
    for error in errors {
        let GroupError::Disagreement { ranks } = &error else { panic!("{error}") };
        assert_eq!(*ranks, ["rank 0 chooses a slot", "rank 1 loads the adapter with fingerprint 1 into slot 1"]);
    }
    unchanged(&world, &tables);
}

/// A rank that commits while another one does something else empties the slot.
#[test]
fn a_commit_beside_another_operation() {
    let world = World::new(2);
    let (tables, adapter) = (world.serving(), world.adapter(|_| 9.0));
    each_group(&tables, |rank, mut group| {
        let prepared = group.prepare(SLOT, 1, || Ok(&adapter)).unwrap();
        if rank == 0 {
            let error = group.commit(prepared).unwrap_err();
            let text = "not all ranks of the group committed the adapter to slot 1, which is now empty: rank 1 could not commit: \
                        it chooses a slot";
            assert_eq!(error.to_string(), text);
            let GroupError::Torn { slot, failures, channel: None, not_emptied: None } = error else {
                panic!("{error}")
            };
            assert_eq!((slot, failures.len(), failures[0].rank, failures[0].phase), (SLOT, 1, 1, Phase::Commit));
            assert_eq!(failures[0].reason, "it chooses a slot");
            assert!(group.table().loaded().is_empty());
        } else {
            assert!(matches!(group.free_slot(), Err(GroupError::Disagreement { .. })));
            drop(prepared);
            unchanged(&world, &tables[1..]);
        }
    });
}

#[test]
fn channels_of_another_rank() {
    let world = World::new(2);
    each(InProcess::group(2, NEVER), |rank, ranks| {
        let error = Group::new(ranks, world.table(1 - rank, 1)).unwrap_err();
        let GroupError::OtherRank { channel, table } = error else { panic!("{error}") };
        assert_eq!([channel, table], [rank, 1 - rank].map(|rank| TpRank::new(rank, 2).unwrap()));
        let text = format!("the channel is of rank {rank} of 2, but the table's model is of rank {} of 2", 1 - rank);
        assert_eq!(error.to_string(), text);
    });
    let [ranks] = <[_; 1]>::try_from(InProcess::group(1, NEVER)).unwrap();
    assert_eq!(ranks.tp(), TpRank::SINGLE);
    assert!(matches!(Group::new(ranks, world.table(0, 1)), Err(GroupError::OtherRank { .. })));
}
