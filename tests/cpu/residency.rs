//! The CPU's weight table: loaded adapters, free memory, and the adapters of a step while others are loaded and unloaded.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use aril::{
    DType, Slot,
    adapter::{Adapter, AdapterError, SlotImage},
    cpu::{LoraLinear, Matrix, MatrixMut, Staging, Step, WeightTable, Workspace},
    error::{LoadError, OperandError, SlotError},
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::{Capacity, PlanError},
    routing::Batch,
    slots::Resident,
};

use crate::common::adapters::{self, Lora};
use rayon::prelude::*;

const LAYERS: usize = 4;
const FEATURES: usize = 8;
const MAX_RANK: usize = 16;

fn model() -> (Model, Vec<LinearId>) {
    let mut spec = ModelSpec::new();
    let layer = |i| Linear::new(format!("layers.{i}"), Parallel::Replicated, FEATURES).slice("q", FEATURES);
    let ids = (0..LAYERS).map(|i| spec.linear(layer(i)).unwrap()).collect();
    (spec.shard(TpRank::SINGLE).unwrap(), ids)
}

/// An adapter that adds `value` to every output of every layer whose inputs are 1.
fn adapter(rank: usize, value: f32) -> Adapter {
    let layer = |i: usize| Lora::adding(format!("layers.{i}.q"), [FEATURES; 2], rank, value);
    adapters::adapter(&(0..LAYERS).map(layer).collect::<Vec<_>>())
}

fn table(model: &Model, num_slots: usize, arena_bytes: usize) -> WeightTable {
    let capacity = Capacity::tokens(8).slots(num_slots).rank(MAX_RANK);
    WeightTable::new(model, DType::F32, capacity, arena_bytes).unwrap()
}

/// A size that needs no adapter: one of the largest rank in each slot, and each replaced beside the others. No byte is left over.
#[test]
fn an_arena_of_a_capacity_holds_and_replaces_an_adapter_in_each_slot() {
    let (model, ids) = model();
    let capacity = Capacity::tokens(8).slots(3).rank(MAX_RANK);
    let bytes = WeightTable::arena_bytes_for(&model, DType::F32, capacity);
    let adapters = [1.0, 2.0, 3.0, 4.0].map(|value| adapter(MAX_RANK, value));
    let images = adapters.each_ref().map(|adapter| adapter.plan(&model, DType::F32).unwrap());
    assert_eq!(bytes, WeightTable::arena_bytes(&images));
    let weights = WeightTable::new(&model, DType::F32, capacity, bytes).unwrap();
    let slots = [0, 1, 2].map(Slot::new);
    for first in [0, 1] {
        for (slot, image) in slots.into_iter().zip(&images[first..]) {
            weights.load(slot, image).unwrap();
        }
    }
    assert_eq!(values(&weights, &ids, &slots), [2.0, 3.0, 4.0]);
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

fn slot(index: u16) -> Slot {
    Slot::new(index)
}

#[test]
fn a_resident_is_valid_until_its_slot_changes() {
    let (model, ids) = model();
    let adapters = [1.0, 2.0].map(|value| adapter(1, value));
    let [first, second] = adapters.each_ref().map(|adapter| adapter.plan(&model, DType::F32).unwrap());
    let weights = table(&model, 3, 4 * first.bytes());
    let one = weights.load(slot(2), &first).unwrap();
    let other = weights.load(slot(0), &first).unwrap();
    assert_eq!((one.slot(), one.generation(), other.generation()), (slot(2), 1, 2));
    weights.check([one, other]).unwrap();

    let replaced = weights.load(slot(2), &second).unwrap();
    let gone = Err(SlotError::Gone { slot: slot(2), generation: 1 });
    assert_eq!(weights.check([other, one]), gone);
    weights.check([replaced, other]).unwrap();
    assert_eq!(values(&weights, &ids, &[slot(0), slot(1), slot(2)]), [1.0, 0.0, 2.0]);

    weights.unload(slot(2)).unwrap();
    assert_eq!(weights.check([replaced]), Err(SlotError::Gone { slot: slot(2), generation: replaced.generation() }));
    // The same adapter loaded again is another resident.
    let again = weights.load(slot(2), &first).unwrap();
    assert!(again.generation() > replaced.generation());
    assert_eq!(weights.check([one]), gone);
    weights.check([again, other]).unwrap();
    weights.check([]).unwrap();
    // A smaller table has no such slot.
    let smaller = table(&model, 1, 0);
    assert_eq!(smaller.check([again]), Err(SlotError::NoSuchSlot { slot: slot(2), num_slots: 1 }));
}

#[test]
fn a_table_says_what_is_loaded() {
    let (model, _) = model();
    let adapters = [1, 9].map(|rank| adapter(rank, 1.0));
    let [small, large] = adapters.each_ref().map(|adapter| adapter.plan(&model, DType::F32).unwrap());
    let weights = table(&model, 4, small.bytes() + large.bytes());
    assert_eq!((weights.loaded(), weights.get(slot(3))), (vec![], None));
    let residents = [weights.load(slot(3), &small).unwrap(), weights.load(slot(1), &large).unwrap()];
    let infos = weights.loaded();
    let shown: Vec<_> = infos.iter().map(|info| (info.resident, info.bytes, info.max_rank)).collect();
    assert_eq!(shown, [(residents[1], large.bytes(), 9), (residents[0], small.bytes(), 1)]);
    // Clones are the same table.
    let clone = weights.clone();
    clone.unload(slot(1)).unwrap();
    assert_eq!(weights.loaded(), [infos[1]]);
    assert_eq!([0, 1, 3, 4].map(|index| weights.get(slot(index))), [None, None, Some(infos[1]), None]);
    assert_eq!(weights.get(Slot::BASE), None);
    // An empty slot may be emptied.
    weights.unload(slot(1)).unwrap();
    assert_eq!((weights.model(), weights.dtype(), weights.capacity().num_slots), (&model, DType::F32, 4));
}

#[test]
fn slots_that_do_not_exist_are_refused() {
    let (model, _) = model();
    let adapter = adapter(1, 1.0);
    let image = adapter.plan(&model, DType::F32).unwrap();
    let weights = table(&model, 2, image.bytes());
    for slot in [slot(2), Slot::BASE] {
        let refused = SlotError::NoSuchSlot { slot, num_slots: 2 };
        assert_eq!(slot_error(weights.unload(slot)), refused);
        assert!(matches!(weights.load(slot, &image), Err(LoadError::Slot(error)) if error == refused));
        let filled = weights.reserve(&image).unwrap().fill(&image, &mut Staging::default()).unwrap();
        assert_eq!(slot_error(weights.commit(slot, filled)), refused);
        assert_eq!(weights.usage().used, 0);
    }
    assert_eq!(
        SlotError::NoSuchSlot { slot: slot(2), num_slots: 2 }.to_string(),
        "slot 2 is not one of the table's 2 slots"
    );
    let refused = weights.step(&Batch::new(&[Slot::BASE, slot(2)]), &mut Workspace::default()).unwrap_err();
    assert_eq!(refused, OperandError::NoSuchSlot { slot: slot(2), num_slots: 2 });
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
    let kept = weights.load(slot(0), &small).unwrap();
    is_used(bytes);
    let refused = weights.load(slot(1), &large);
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
    assert!(matches!(weights.load(slot(0), &small), Err(LoadError::Full { .. })));
    weights.check([kept]).unwrap();
    drop(reserved);
    is_used(bytes);
    let replaced = weights.load(slot(0), &small).unwrap();
    is_used(bytes);
    weights.check([replaced]).unwrap();
    // A filled reservation that is not committed frees its memory, and so does an unfilled one.
    let filled = weights.reserve(&small).unwrap().fill(&small, &mut Staging::default()).unwrap();
    is_used(2 * bytes);
    drop(filled);
    is_used(bytes);
    drop(weights.reserve(&small).unwrap());
    is_used(bytes);
    weights.unload(slot(0)).unwrap();
    is_used(0);
    weights.load(slot(2), &large).unwrap();
    is_used(large.bytes());
    assert_eq!(values(&weights, &ids, &[slot(0), slot(2)]), [0.0, 2.0]);
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

/// The slot keeps its adapter, and the table frees the memory.
#[test]
fn a_load_that_fails_changes_nothing() {
    let (model, ids) = model();
    let (others, _) = self::model();
    let adapters = [(2, 1.0), (2, f32::NAN), (MAX_RANK + 1, 1.0)].map(|(rank, value)| adapter(rank, value));
    let [good, nan, wide] = adapters.each_ref().map(|adapter| adapter.plan(&model, DType::F32).unwrap());
    let weights = table(&model, 1, 4 * wide.bytes());
    let resident = weights.load(slot(0), &good).unwrap();
    let (usage, info) = (weights.usage(), weights.get(slot(0)));
    let refused = |image: &SlotImage<'_>| {
        let error = weights.load(slot(0), image).unwrap_err();
        weights.check([resident]).unwrap();
        assert_eq!((weights.usage(), weights.get(slot(0))), (usage, info));
        assert_eq!(values(&weights, &ids, &[slot(0)]), [1.0]);
        error
    };
    assert!(matches!(refused(&nan), LoadError::Adapter(AdapterError::Unrepresentable { .. })));
    let rank = refused(&wide);
    assert_eq!(rank.to_string(), "the adapter has rank 17, but the table accepts ranks up to 16");
    let other = refused(&adapters[0].plan(&others, DType::F32).unwrap());
    assert!(matches!(other, LoadError::Slot(SlotError::Model)), "{other}");
    let dtype = refused(&adapters[0].plan(&model, DType::BF16).unwrap());
    assert!(matches!(dtype, LoadError::Slot(SlotError::DType { got: DType::BF16, want: DType::F32 })), "{dtype}");
}

/// An engine has one type of error for making a table and loading into it.
#[test]
fn what_cannot_be_planned_is_an_error_of_loading_too() {
    fn load(num_slots: usize, max_rank: usize) -> Result<Resident, LoadError> {
        let (model, _) = model();
        let adapter = adapter(2, 1.0);
        let image = adapter.plan(&model, DType::F32)?;
        let capacity = Capacity::tokens(1).slots(num_slots).rank(max_rank);
        let weights = WeightTable::new(&model, DType::F32, capacity, WeightTable::arena_bytes([&image]))?;
        weights.load(slot(0), &image)
    }
    let error = load(0, 2).unwrap_err();
    assert!(matches!(error, LoadError::Plan(PlanError::Limit { what: "num_slots", value: 0, .. })), "{error}");
    assert!(matches!(load(1, 1), Err(LoadError::Slot(SlotError::Rank { rank: 2, max_rank: 1 }))));
    assert_eq!(load(1, 2).unwrap().slot(), slot(0));
}

#[test]
fn room_is_of_one_table_and_one_size() {
    let (model, _) = model();
    let adapters = [1, 9].map(|rank| adapter(rank, 1.0));
    let [small, large] = adapters.each_ref().map(|adapter| adapter.plan(&model, DType::F32).unwrap());
    let [weights, other] = [(); 2].map(|()| table(&model, 1, large.bytes()));
    let filled = other.reserve(&small).unwrap().fill(&small, &mut Staging::default()).unwrap();
    assert_eq!(slot_error(weights.commit(slot(0), filled)), SlotError::OtherTable);
    assert_eq!((weights.usage().used, other.usage().used, weights.get(slot(0))), (0, 0, None));

    for (reserved, image) in [(&small, &large), (&large, &small)] {
        let error = weights.reserve(reserved).unwrap().fill(image, &mut Staging::default()).unwrap_err();
        let (bytes, reserved) = (image.bytes(), reserved.bytes());
        assert!(
            matches!(error, LoadError::Slot(SlotError::OtherImage { bytes: b, reserved: r }) if (b, r) == (bytes, reserved))
        );
        assert_eq!(weights.usage().used, 0);
    }
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
    let residents = [0, 1].map(|i| weights.load(slot(i), &images[usize::from(i)]).unwrap());
    let slots = [slot(0), slot(1), slot(2), Slot::BASE];
    let (batch, mut workspace) = (Batch::new(&slots), Workspace::default());
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    weights.check(residents).unwrap();

    weights.unload(slot(0)).unwrap();
    weights.load(slot(1), &images[2]).unwrap();
    weights.load(slot(2), &images[2]).unwrap();
    assert!(weights.check(residents).is_err());
    assert_eq!((weights.usage().used, weights.usage().largest_gap), (4 * bytes, 0));
    assert!(!weights.fits(&images[0]));
    assert_eq!(whole(&run(&layers, &mut step)), [1.0, 2.0, 0.0, 0.0]);
    drop(step);
    assert_eq!(weights.usage().used, 2 * bytes);
    assert_eq!(values(&weights, &ids, &slots), [0.0, 3.0, 3.0, 0.0]);
}

/// Loads on rayon's threads, whose packing takes up other loads, and loads within the `progress` of another one. None waits for another, and
/// each slot has one of its adapters.
#[test]
fn loads_do_not_wait_for_each_other() {
    const SLOTS: u16 = 4;
    const LOADS: u16 = 64;
    let (model, ids) = model();
    let adapters: Vec<_> = (0..LOADS).map(|load| adapter(1, load.into())).collect();
    let images: Vec<_> = adapters.iter().map(|adapter| adapter.plan(&model, DType::F32).unwrap()).collect();
    let weights = table(&model, SLOTS.into(), 2 * usize::from(LOADS) * images[0].bytes());
    let all: Vec<_> = (0..SLOTS).map(slot).collect();
    for threads in [2, 16] {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        threads.install(|| {
            (0..LOADS).into_par_iter().with_max_len(1).for_each(|load| {
                weights.load(slot(load % SLOTS), &images[usize::from(load)]).unwrap();
            });
        });
        for (slot, value) in values(&weights, &ids, &all).into_iter().enumerate() {
            assert_eq!(value as usize % usize::from(SLOTS), slot, "{value}");
        }
    }
    let mut pieces = 0;
    weights
        .load_with_progress(slot(0), &images[7], |_| {
            weights.load(slot(1), &images[9]).unwrap();
            pieces += 1;
        })
        .unwrap();
    assert!(pieces > 0);
    assert_eq!(values(&weights, &ids, &all)[..2], [7.0, 9.0]);
}

/// One thread steps while another loads, replaces and unloads. Every token gets one whole adapter in all layers of its step. A resident
/// that passes the check after the step began is the one that the step serves.
#[test]
fn adapters_come_and_go_while_steps_run() {
    const SLOTS: u16 = 2;
    const CHANGES: usize = 300;
    let (model, ids) = model();
    let adapters: Vec<_> = (1..=5_u8).map(|value| adapter(1 + usize::from(value), value.into())).collect();
    let images: Vec<_> = adapters.iter().map(|adapter| adapter.plan(&model, DType::F32).unwrap()).collect();
    // Room for the adapters in the slots, as many kept by a step, and one being loaded.
    let weights = table(&model, SLOTS.into(), (2 * usize::from(SLOTS) + 1) * images[0].bytes());
    // By generation: the adapter's value.
    let loaded = Mutex::new(vec![0.0]);
    // Dropped when loading ends or fails.
    let loading = Arc::new(());
    let is_loading = Arc::downgrade(&loading);
    thread::scope(|scope| {
        let _loading = loading;
        let steps = scope.spawn(|| {
            let slots = [slot(1), slot(0), Slot::BASE, slot(0)];
            let layers: Vec<_> = ids.iter().map(|&id| LoraLinear::new(&weights, id).unwrap()).collect();
            let (batch, mut workspace, mut last) = (Batch::new(&slots), Workspace::default(), Vec::new());
            let (mut changes, mut checked) = (0, 0);
            while changes < CHANGES {
                assert!(is_loading.strong_count() > 0, "the other thread failed");
                let known = weights.loaded();
                let mut step = weights.step(&batch, &mut workspace).unwrap();
                let valid: Vec<_> = known.iter().filter(|info| weights.check([info.resident]).is_ok()).collect();
                let got = whole(&run(&layers, &mut step));
                assert_eq!((got[2], got[1]), (0.0, got[3]));
                for info in valid {
                    let generation = usize::try_from(info.resident.generation()).unwrap();
                    let token = slots.iter().position(|&slot| slot == info.resident.slot()).unwrap();
                    assert_eq!(got[token], loaded.lock().unwrap()[generation]);
                    checked += 1;
                }
                changes += usize::from(got != last);
                last = got;
            }
            assert!(
                checked > CHANGES / 10,
                "only {checked} residents were valid in steps that changed {changes} times"
            );
        });
        let mut next = 0_usize;
        while !steps.is_finished() {
            next = next.wrapping_mul(1_103_515_245).wrapping_add(12_345);
            let (slot, choice) = (slot((next >> 16) as u16 % SLOTS), (next >> 20) % (images.len() + 1));
            match images.get(choice) {
                None => weights.unload(slot).unwrap(),
                Some(image) => {
                    let filled = weights.reserve(image).unwrap().fill(image, &mut Staging::default()).unwrap();
                    // The lock lets the other thread find every generation that it sees.
                    let mut loaded = loaded.lock().unwrap();
                    let resident = weights.commit(slot, filled).unwrap();
                    assert_eq!(usize::try_from(resident.generation()).unwrap(), loaded.len());
                    loaded.push((1 + choice) as f32);
                }
            }
        }
    });
    let left = weights.loaded();
    assert_eq!(weights.usage().used, left.iter().map(|info| info.bytes).sum::<usize>());
    left.iter().for_each(|info| weights.unload(info.resident.slot()).unwrap());
    assert_eq!(weights.usage().used, 0);
}

/// Why a slot was refused.
fn slot_error<T: std::fmt::Debug>(result: Result<T, LoadError>) -> SlotError {
    let error = result.unwrap_err();
    assert!(matches!(error, LoadError::Slot(_)), "{error}");
    let LoadError::Slot(error) = error else { unreachable!() };
    error
}
