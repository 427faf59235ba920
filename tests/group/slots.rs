//! All ranks choose the same slot.

use aril::group::GroupError;
use proptest::prelude::*;

use crate::world::{World, each_group, load};

/// The slots that the ranks choose if these are loaded, of two on each rank.
fn chosen(loaded: &[[bool; 2]]) -> Vec<Result<usize, GroupError>> {
    let world = World::new(loaded.len());
    let (adapter, mut tables) = (world.adapter(|_| 7.0), Vec::new());
    for (rank, loaded) in loaded.iter().enumerate() {
        let table = world.table(rank, 2);
        (0..2).filter(|&slot| loaded[slot]).for_each(|slot| _ = load(&table, slot, &adapter));
        tables.push(table);
    }
    each_group(&tables, |_, mut group| group.free_slot())
}

#[test]
fn the_lowest_slot_that_is_empty_on_all_ranks() {
    let (full, empty) = ([true; 2], [false; 2]);
    for (loaded, slot) in [
        (vec![empty; 4], Some(0)),
        (vec![[true, false]; 3], Some(1)),
        (vec![empty, [true, false], empty], Some(1)),
        (vec![[false, true], empty], Some(0)),
        (vec![[true, false], [false, true]], None),
        (vec![empty, full, empty], None),
    ] {
        for chosen in chosen(&loaded) {
            match (chosen, slot) {
                (Ok(chosen), Some(slot)) => assert_eq!(chosen, slot),
                (Err(GroupError::NoFreeSlot), None) => {}
                (chosen, slot) => panic!("{chosen:?}, but {slot:?}"),
            }
        }
    }
}

proptest! {
    #[test]
    fn any_tables(loaded in prop::collection::vec(any::<[bool; 2]>(), 1..6)) {
        let expected = (0..2).find(|&slot| loaded.iter().all(|loaded| !loaded[slot]));
        for chosen in chosen(&loaded) {
            prop_assert_eq!(chosen.ok(), expected);
        }
    }
}
