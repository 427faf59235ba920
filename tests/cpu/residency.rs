//! The CPU's weight table: loaded adapters, free memory, and the adapters of a step while others are loaded and
//! unloaded.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use aril::{
    DType, Slot,
    adapter::Adapter,
    cpu::{LoraLinear, Matrix, MatrixMut, Staging, Step, WeightTable, Workspace},
    error::{LoadError, OperandError, SlotError},
    model::{LinearId, Model},
    plan::{Capacity, PlanError},
    routing::Batch,
};

use crate::common::{adding, cpu::slots};
use rayon::prelude::*;

const LAYERS: usize = 4;
const FEATURES: usize = 8;
const MAX_RANK: usize = 16;

fn model() -> (Model, Vec<LinearId>) {
    adding::model(LAYERS, FEATURES)
}

fn adapter(rank: usize, value: f32) -> Adapter {
    adding::adapter(LAYERS, FEATURES, rank, value)
}

fn table(model: &Model, num_slots: usize, arena_bytes: usize) -> WeightTable {
    let capacity = Capacity::tokens(8).slots(num_slots).rank(MAX_RANK);
    WeightTable::new(model, DType::F32, capacity, arena_bytes).unwrap()
}

/// A size that needs no adapter: one of the largest rank in each slot, and each replaced beside the others. No byte is
/// left over.
#[test]
fn an_arena_of_a_capacity_holds_and_replaces_an_adapter_in_each_slot() {
    let (model, ids) = model();
    let capacity = Capacity::tokens(8).slots(3).rank(MAX_RANK);
    let bytes = WeightTable::arena_bytes_for(&model, DType::F32, capacity);
    let adapters = [1.0, 2.0, 3.0, 4.0].map(|value| adapter(MAX_RANK, value));
    let images = adapters.each_ref().map(|adapter| adapter.plan(&model, DType::F32).unwrap());
    assert_eq!(bytes, WeightTable::arena_bytes(&images));
    let weights = WeightTable::new(&model, DType::F32, capacity, bytes).unwrap();
    for first in [0, 1] {
        for (slot, image) in (0..3).zip(&images[first..]) {
            weights.load(slot, image).unwrap();
        }
    }
    assert_eq!(values(&weights, &ids, &slots(&weights, [0, 1, 2])), [2.0, 3.0, 4.0]);
}

/// The deltas of a step's tokens in each layer, for inputs of 1.
fn run(layers: &[LoraLinear], step: &mut Step<'_>) -> Vec<Vec<[f32; FEATURES]>> {
    let tokens = step.num_tokens();
    let x = vec![1.0; tokens * FEATURES];
    let x = Matrix::new(&x, tokens, FEATURES).unwrap();
    let layer = |layer: &LoraLinear| {
        let mut y = vec![[0.0; FEATURES]; tokens];
        layer.add_delta(step, x, MatrixMut::new(y.as_flattened_mut(), tokens, FEATURES).unwrap()).unwrap();
        y
    };
    layers.iter().map(layer).collect()
}

/// The delta of tokens of these slots in a new step: the same in all layers.
fn values(weights: &WeightTable, ids: &[LinearId], slots: &[Slot]) -> Vec<f32> {
    let layers: Vec<_> = ids.iter().map(|&id| LoraLinear::new(weights, id).unwrap()).collect();
    let (batch, mut workspace) = (Batch::new(slots), Workspace::default());
    whole(&run(&layers, &mut weights.step(&batch, &mut workspace).unwrap()))
}

/// The value of each token, after a check that all outputs of all layers have it.
fn whole(layers: &[Vec<[f32; FEATURES]>]) -> Vec<f32> {
    let values: Vec<f32> = layers[0].iter().map(|outputs| outputs[0]).collect();
    for layer in layers {
        for (outputs, &value) in layer.iter().zip(&values) {
            assert_eq!(*outputs, [value; FEATURES], "a token has a part of one adapter, and a part of another");
        }
    }
    values
}

#[test]
fn a_table_says_what_is_loaded() {
    let (model, _) = model();
    let adapters = [1, 9].map(|rank| adapter(rank, 1.0));
    let [small, large] = adapters.each_ref().map(|adapter| adapter.plan(&model, DType::F32).unwrap());
    let weights = table(&model, 4, small.bytes() + large.bytes());
    assert_eq!((weights.loaded(), weights.get(3)), (vec![], None));
    let slots = [weights.load(3, &small).unwrap(), weights.load(1, &large).unwrap()];
    let infos = weights.loaded();
    let shown: Vec<_> = infos.iter().map(|info| (info.slot, info.bytes, info.max_rank)).collect();
    assert_eq!(shown, [(slots[1], large.bytes(), 9), (slots[0], small.bytes(), 1)]);
    // Clones are the same table.
    let clone = weights.clone();
    clone.unload(1).unwrap();
    assert_eq!(weights.loaded(), [infos[1]]);
    assert_eq!([0, 1, 3, 4].map(|slot| weights.get(slot)), [None, None, Some(infos[1]), None]);
    // An empty slot may be emptied.
    weights.unload(1).unwrap();
    assert_eq!((weights.model(), weights.dtype(), weights.capacity().num_slots), (&model, DType::F32, 4));
}

#[test]
fn room_is_counted() {
    let (model, ids) = model();
    let adapters = [(8, 1.0), (9, 2.0)].map(|(rank, value)| adapter(rank, value));
    let [small, large] = adapters.each_ref().map(|adapter| adapter.plan(&model, DType::F32).unwrap());
    let (arena, bytes) = (2 * small.bytes() + 64, small.bytes());
    assert!(large.bytes() <= arena && small.bytes() + large.bytes() > arena);
    assert_eq!(WeightTable::arena_bytes([&small, &large, &small]), 2 * small.bytes() + large.bytes());
    let weights = table(&model, 3, arena);
    let is_used = |used: usize| {
        let usage = weights.usage();
        assert_eq!(
            (usage.capacity, usage.used, usage.free(), usage.largest_gap),
            (arena, used, arena - used, arena - used)
        );
        assert_eq!(
            [&small, &large].map(|image| weights.fits(image)),
            [&small, &large].map(|i| used + i.bytes() <= arena)
        );
    };
    is_used(0);
    let kept = weights.load(0, &small).unwrap();
    is_used(bytes);
    let refused = weights.load(1, &large);
    assert!(
        matches!(&refused, Err(LoadError::Full { bytes, largest_gap })
        if (*bytes, *largest_gap) == (large.bytes(), arena - small.bytes())),
        "{refused:?}"
    );
    is_used(bytes);
    // A replacement needs memory beside the old adapter, whose memory is freed afterwards.
    let reserved = weights.reserve(&small).unwrap();
    assert_eq!(reserved.bytes(), bytes);
    is_used(2 * bytes);
    assert!(matches!(weights.load(0, &small), Err(LoadError::Full { .. })));
    weights.check([kept]).unwrap();
    drop(reserved);
    is_used(bytes);
    let replaced = weights.load(0, &small).unwrap();
    is_used(bytes);
    weights.check([replaced]).unwrap();
    // A filled reservation that is not committed frees its memory, and so does an unfilled one.
    let filled = weights.reserve(&small).unwrap().fill(&small, &mut Staging::default()).unwrap();
    is_used(2 * bytes);
    drop(filled);
    is_used(bytes);
    drop(weights.reserve(&small).unwrap());
    is_used(bytes);
    weights.unload(0).unwrap();
    is_used(0);
    weights.load(2, &large).unwrap();
    is_used(large.bytes());
    assert_eq!(values(&weights, &ids, &slots(&weights, [0, 2])), [0.0, 2.0]);
}

/// Even if several threads ask for the same memory.
#[test]
fn room_is_given_once() {
    let (model, _) = model();
    let adapter = adapter(1, 1.0);
    let image = adapter.plan(&model, DType::F32).unwrap();
    let weights = table(&model, 1, 2 * image.bytes() + 64);
    let held = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    match weights.reserve(&image) {
                        Ok(room) => {
                            assert!(held.fetch_add(1, Ordering::SeqCst) < 2);
                            thread::yield_now();
                            held.fetch_sub(1, Ordering::SeqCst);
                            drop(room);
                        }
                        Err(error) => assert!(matches!(error, LoadError::Full { .. }), "{error}"),
                    }
                }
            });
        }
    });
    assert_eq!((held.into_inner(), weights.usage().used), (0, 0));
}

/// An engine has one type of error for making a table and loading into it.
#[test]
fn what_cannot_be_planned_is_an_error_of_loading_too() {
    fn load(num_slots: usize, max_rank: usize) -> Result<Slot, LoadError> {
        let (model, _) = model();
        let adapter = adapter(2, 1.0);
        let image = adapter.plan(&model, DType::F32)?;
        let capacity = Capacity::tokens(1).slots(num_slots).rank(max_rank);
        let weights = WeightTable::new(&model, DType::F32, capacity, WeightTable::arena_bytes([&image]))?;
        weights.load(0, &image)
    }
    let error = load(0, 2).unwrap_err();
    assert!(matches!(error, LoadError::Plan(PlanError::Limit { what: "num_slots", value: 0, .. })), "{error}");
    assert!(matches!(load(1, 1), Err(LoadError::Slot(SlotError::Rank { rank: 2, max_rank: 1 }))));
    assert_eq!(load(1, 2).unwrap().index(), Some(0));
}

#[test]
fn room_is_of_one_table_and_one_adapter() {
    let (model, _) = model();
    let adapters = [(1, 1.0), (9, 1.0), (1, 2.0)].map(|(rank, value)| adapter(rank, value));
    let [small, large, other_small] = adapters.each_ref().map(|adapter| adapter.plan(&model, DType::F32).unwrap());
    let [weights, other] = [(); 2].map(|()| table(&model, 1, large.bytes()));
    let filled = other.reserve(&small).unwrap().fill(&small, &mut Staging::default()).unwrap();
    assert_eq!(slot_error(weights.commit(0, filled)), SlotError::OtherTable);
    assert_eq!((weights.usage().used, other.usage().used, weights.get(0)), (0, 0, None));

    // Also if the other adapter is as large.
    for (reserved, image) in [(&small, &large), (&large, &small), (&small, &other_small)] {
        let error = slot_error(weights.reserve(reserved).unwrap().fill(image, &mut Staging::default()));
        assert_eq!(error, SlotError::OtherImage { bytes: image.bytes(), reserved: reserved.bytes() });
        assert_eq!(weights.usage().used, 0);
    }
    // An adapter that is planned again is the same.
    let again = adapters[0].plan(&model, DType::F32).unwrap();
    drop(weights.reserve(&small).unwrap().fill(&again, &mut Staging::default()).unwrap());
    // Another element type is refused for its type, whatever its size.
    let half = adapters[1].plan(&model, DType::F16).unwrap();
    let error = weights.reserve(&small).unwrap().fill(&half, &mut Staging::default()).unwrap_err();
    assert!(matches!(error, LoadError::Slot(SlotError::DType { got: DType::F16, want: DType::F32 })), "{error}");
}

/// A step keeps its adapters after an unload or a replacement, and their memory stays in use until the step ends.
#[test]
fn a_step_works_on_what_was_loaded_when_it_began() {
    let (model, ids) = model();
    let adapters = [1.0, 2.0, 3.0].map(|value| adapter(1, value));
    let images = adapters.each_ref().map(|adapter| adapter.plan(&model, DType::F32).unwrap());
    let bytes = images[0].bytes();
    let weights = table(&model, 3, 4 * bytes);
    let layers: Vec<_> = ids.iter().map(|&id| LoraLinear::new(&weights, id).unwrap()).collect();
    let loaded = [0, 1].map(|slot| weights.load(slot, &images[slot]).unwrap());
    let slots = [loaded[0], loaded[1], Slot::BASE];
    let (batch, mut workspace) = (Batch::new(&slots), Workspace::default());
    let mut step = weights.step(&batch, &mut workspace).unwrap();

    weights.unload(0).unwrap();
    let replaced = weights.load(1, &images[2]).unwrap();
    weights.load(2, &images[2]).unwrap();
    assert!(weights.check(loaded).is_err());
    assert_eq!((weights.usage().used, weights.usage().largest_gap), (4 * bytes, 0));
    assert!(!weights.fits(&images[0]));
    assert_eq!(whole(&run(&layers, &mut step)), [1.0, 2.0, 0.0]);
    drop(step);
    assert_eq!(weights.usage().used, 2 * bytes);
    let refused = weights.step(&batch, &mut workspace).unwrap_err();
    assert_eq!(refused, OperandError::NotLoaded { slot: loaded[0] });
    assert_eq!(values(&weights, &ids, &[replaced, Slot::BASE]), [3.0, 0.0]);
}

/// Loads on rayon's threads, whose packing takes up other loads, and loads within the `progress` of another one. None
/// waits for another, and each slot has one of its adapters.
#[test]
fn loads_do_not_wait_for_each_other() {
    const SLOTS: usize = 4;
    const LOADS: u16 = 64;
    let (model, ids) = model();
    let adapters: Vec<_> = (0..LOADS).map(|load| adapter(1, load.into())).collect();
    let images: Vec<_> = adapters.iter().map(|adapter| adapter.plan(&model, DType::F32).unwrap()).collect();
    let weights = table(&model, SLOTS, 2 * usize::from(LOADS) * images[0].bytes());
    for threads in [2, 16] {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        threads.install(|| {
            (0..LOADS).into_par_iter().with_max_len(1).for_each(|load| {
                let load = usize::from(load);
                weights.load(load % SLOTS, &images[load]).unwrap();
            });
        });
        for (slot, value) in values(&weights, &ids, &slots(&weights, [0, 1, 2, 3])).into_iter().enumerate() {
            assert_eq!(value as usize % SLOTS, slot, "{value}");
        }
    }
    let mut pieces = 0;
    weights
        .load_with_progress(0, &images[7], |_| {
            weights.load(1, &images[9]).unwrap();
            pieces += 1;
        })
        .unwrap();
    assert!(pieces > 0);
    assert_eq!(values(&weights, &ids, &slots(&weights, [0, 1])), [7.0, 9.0]);
}

/// One thread steps while another loads, replaces and unloads. Every token gets the whole adapter that its slot names,
/// in all layers of its step, or the step is refused.
#[test]
fn adapters_come_and_go_while_steps_run() {
    const SLOTS: usize = 2;
    const CHANGES: usize = 300;
    let (model, ids) = model();
    let adapters: Vec<_> = (1..=5_u8).map(|value| adapter(1 + usize::from(value), value.into())).collect();
    let images: Vec<_> = adapters.iter().map(|adapter| adapter.plan(&model, DType::F32).unwrap()).collect();
    // Room for the adapters in the slots, as many kept by a step, and one being loaded.
    let weights = table(&model, SLOTS, (2 * SLOTS + 1) * images[0].bytes());
    // The adapter's value, by what its load returned.
    let loaded = Mutex::new(HashMap::from([(Slot::BASE, 0.0)]));
    // Dropped when loading ends or fails.
    let loading = Arc::new(());
    let is_loading = Arc::downgrade(&loading);
    thread::scope(|scope| {
        let _loading = loading;
        let steps = scope.spawn(|| {
            let layers: Vec<_> = ids.iter().map(|&id| LoraLinear::new(&weights, id).unwrap()).collect();
            let (mut workspace, mut last) = (Workspace::default(), Vec::new());
            let (mut changes, mut refusals) = (0, 0);
            while changes < CHANGES {
                assert!(is_loading.strong_count() > 0, "the other thread failed");
                let slots = slots(&weights, [1, 0, -1, 0]);
                thread::yield_now();
                let batch = Batch::new(&slots);
                let mut step = match weights.step(&batch, &mut workspace) {
                    Ok(step) => step,
                    Err(OperandError::NotLoaded { .. }) => {
                        refusals += 1;
                        continue;
                    }
                    Err(error) => panic!("{error}"),
                };
                let got = whole(&run(&layers, &mut step));
                let loaded = loaded.lock().unwrap();
                assert_eq!(got, slots.map(|slot| loaded[&slot]));
                changes += usize::from(got != last);
                last = got;
            }
            println!("{changes} changes, {refusals} refused steps");
        });
        let mut next = 0_usize;
        while !steps.is_finished() {
            next = next.wrapping_mul(1_103_515_245).wrapping_add(12_345);
            let (slot, choice) = ((next >> 16) % SLOTS, (next >> 20) % (images.len() + 1));
            match images.get(choice) {
                None => weights.unload(slot).unwrap(),
                Some(image) => {
                    let filled = weights.reserve(image).unwrap().fill(image, &mut Staging::default()).unwrap();
                    // The lock lets the other thread find every slot that it sees.
                    let mut loaded = loaded.lock().unwrap();
                    let slot = weights.commit(slot, filled).unwrap();
                    assert_eq!(loaded.insert(slot, (1 + choice) as f32), None);
                }
            }
        }
    });
    let left = weights.loaded();
    assert_eq!(weights.usage().used, left.iter().map(|info| info.bytes).sum::<usize>());
    left.iter().for_each(|info| weights.unload(info.slot.index().unwrap()).unwrap());
    assert_eq!(weights.usage().used, 0);
}

/// Why a slot was refused.
fn slot_error<T: std::fmt::Debug>(result: Result<T, LoadError>) -> SlotError {
    let error = result.unwrap_err();
    assert!(matches!(error, LoadError::Slot(_)), "{error}");
    let LoadError::Slot(error) = error else { unreachable!() };
    error
}
