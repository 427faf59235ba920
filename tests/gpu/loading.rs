//! Loading during steps: no step sees a part of an adapter, none waits for the loader, and freed memory is reused only
//! after its last use.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use aril::{
    DType,
    adapter::{Adapter, AdapterError, Tensor},
    cuda::{Buffer, Staging},
    error::LoadError,
};

use crate::{
    common::{adapters, adding},
    device::Gpu,
    setup::{Setup, Spin, TOKENS},
};

const FEATURES: usize = 1024;
/// An adapter of rank 64 takes 12 MiB, so that it is copied in two pieces.
const LAYERS: usize = 24;
const ADAPTER_BYTES: usize = LAYERS * 2 * 64 * FEATURES * size_of::<f32>();
/// Enough for one adapter and for the staged rows of descriptors, but not for two adapters.
const ARENA_BYTES: usize = ADAPTER_BYTES * 3 / 2;

fn slots(number: i32) -> [i32; TOKENS] {
    [number; TOKENS]
}

/// Another thread keeps loading into one slot, with other ranks and values in turn. Each step sees one whole adapter,
/// never an older one than the step before, and the other slot unchanged.
#[test]
#[ignore = "needs a GPU"]
fn a_step_sees_whole_adapters_while_others_load() {
    const LOADS: usize = 60;
    let mut setup = Setup::new(LAYERS, FEATURES, 4 * ADAPTER_BYTES);
    setup.load(1, 16, 1000.0).unwrap();
    let mut graph = setup.capture();
    let weights = setup.weights.clone();
    let loaded = AtomicUsize::new(0);
    thread::scope(|threads| {
        let loader = threads.spawn(|| {
            for number in 1..=LOADS {
                let adapter = adding::adapter(LAYERS, FEATURES, [64, 2, 16][number % 3], number as f32);
                weights.load(0, &adapter.plan(weights.model(), DType::F32).unwrap()).unwrap();
                loaded.store(number, Ordering::Release);
            }
        });
        let (mut last, mut seen) = (0.0, 0);
        loop {
            let (is_last, before) = (loader.is_finished(), loaded.load(Ordering::Acquire));
            let mut both = slots(0);
            both[TOKENS / 2..].fill(1);
            let added = setup.replay(&mut graph, &both);
            let first = added[0];
            assert_eq!(added[..TOKENS / 2], [first; TOKENS / 2]);
            assert_eq!(added[TOKENS / 2..], [1000.0; TOKENS / 2]);
            assert!(first >= last && first >= before as f32, "{first} behind {last}, with {before} loaded");
            assert!(first.fract() == 0.0 && first <= LOADS as f32, "{first} is no adapter's");
            seen += usize::from(first > last);
            last = first;
            if is_last {
                break;
            }
        }
        assert_eq!(last, LOADS as f32);
        assert!(seen > LOADS / 10, "steps saw only {seen} of {LOADS} adapters");
    });
}

/// While the queue is far behind, a slot is emptied and another adapter gets its memory. The step enqueued before still
/// reads the old adapter.
#[test]
#[ignore = "needs a GPU"]
fn room_is_not_overwritten_before_what_reads_it_has_run() {
    let mut setup = Setup::new(LAYERS, FEATURES, ARENA_BYTES);
    let spin = Spin::new(&setup.gpu);
    let mut staging = Staging::new(&setup.gpu.queue).unwrap();
    // Small, so that filling does not wait for a staging buffer.
    let small = setup.adapter(16, 5.0);
    let small = small.plan(setup.model(), DType::F32).unwrap();
    for round in 0..5 {
        let old = 2.0 + round as f32;
        setup.load(0, 64, old).unwrap();
        assert!(!setup.weights.fits(&setup.adapter(64, 1.0).plan(setup.model(), DType::F32).unwrap()));
        setup.y.write(&vec![0.0; setup.y.len()]).unwrap();
        let spun = spin.run(300);
        setup.enqueue_on_y(&slots(0));
        setup.weights.unload(0).unwrap();
        let filled = setup.weights.reserve(&small).unwrap().fill(&small, &mut staging).unwrap();
        // Long enough for copies that wait for nothing.
        thread::sleep(Duration::from_millis(30));
        assert!(!spun.is_complete(), "the test takes longer than the queue was kept busy for");
        assert!(!filled.is_ready(), "the room was written while steps of the old adapter were pending");
        setup.weights.commit(1, filled).unwrap();
        assert!(!spun.is_complete(), "the commit waited for the queue");
        assert_eq!(setup.added(), [old; TOKENS], "round {round}");
        assert_eq!(setup.step(&slots(1)), [5.0; TOKENS]);
        assert_eq!(setup.step(&slots(0)), [0.0; TOKENS]);
        setup.weights.unload(1).unwrap();
    }
}

/// The same for a replaced adapter, whose memory is the only room for a third one.
#[test]
#[ignore = "needs a GPU"]
fn replaced_adapters_are_read_to_the_end() {
    let mut setup = Setup::new(LAYERS, FEATURES, ARENA_BYTES);
    let spin = Spin::new(&setup.gpu);
    let mut staging = Staging::new(&setup.gpu.queue).unwrap();
    let [first, second] = [(16, 16.0), (64, 17.0)].map(|(rank, value)| setup.adapter(rank, value));
    let [first, second] = [&first, &second].map(|adapter| adapter.plan(setup.model(), DType::F32).unwrap());
    setup.load(0, 64, 3.0).unwrap();
    setup.y.write(&vec![0.0; setup.y.len()]).unwrap();
    let spun = spin.run(300);
    setup.enqueue_on_y(&slots(0));
    for image in [&first, &second] {
        let reservation = setup.weights.reserve(image).unwrap();
        assert!(!spun.is_complete(), "the test takes longer than the queue was kept busy for");
        setup.weights.commit(0, reservation.fill(image, &mut staging).unwrap()).unwrap();
    }
    assert_eq!(setup.added(), [3.0; TOKENS]);
    assert_eq!(setup.step(&slots(0)), [17.0; TOKENS]);
}

/// An adapter of five pieces, whose factors all differ, goes through two buffers. Its copies wait for a queue that is
/// far behind, so that a buffer that is filled again before its copy has ended is seen.
#[test]
#[ignore = "needs a GPU"]
fn a_staging_buffer_is_kept_until_its_copy_has_ended() {
    const LAYERS: usize = 80;
    const RANK: usize = 64;
    const BYTES: usize = LAYERS * 2 * RANK * FEATURES * size_of::<f32>();
    let mut setup = Setup::new(LAYERS, FEATURES, BYTES * 3 / 2);
    let spin = Spin::new(&setup.gpu);
    let mut staging = Staging::new(&setup.gpu.queue).unwrap();
    // The product of both factors is the layer's number. Each of them alone is of this layer and of none that is 16 or
    // 32 away.
    let tensor = |shape: [usize; 2], value: f32| {
        let values = vec![value; shape[0] * shape[1]];
        Tensor::new(DType::F32, shape, bytemuck::cast_slice(&values).to_vec()).unwrap()
    };
    let number = |layer: usize, round: usize| (1 + layer + 100 * round) as f32;
    for round in 0..3 {
        let tensors = (0..LAYERS).flat_map(|layer| {
            let a = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0][(layer + round) % 7];
            let b = number(layer, round) / a / (RANK * FEATURES) as f32;
            [("A", [RANK, FEATURES], a), ("B", [FEATURES, RANK], b)]
                .map(|(side, shape, value)| (format!("layers.{layer}.m.lora_{side}.weight"), tensor(shape, value)))
        });
        let config = format!(r#"{{"peft_type": "LORA", "r": {RANK}, "lora_alpha": {RANK}}}"#);
        let adapter = Adapter::from_tensors(&config, tensors).unwrap();
        let image = adapter.plan(setup.model(), DType::F32).unwrap();
        assert_eq!(image.bytes(), BYTES);
        setup.load(0, RANK, 7.0).unwrap();
        setup.y.write(&vec![0.0; setup.y.len()]).unwrap();
        spin.run(100);
        setup.enqueue_on_y(&slots(0));
        setup.weights.unload(0).unwrap();
        let filled = setup.weights.reserve(&image).unwrap().fill(&image, &mut staging).unwrap();
        setup.weights.commit(1, filled).unwrap();
        assert_eq!(setup.added(), [7.0; TOKENS], "round {round}: the adapter of before");
        setup.enqueue(&slots(1));
        let mut y = vec![f32::NAN; setup.y.len()];
        setup.y.read(&mut y).unwrap();
        for (layer, outputs) in y.chunks(TOKENS * FEATURES).enumerate() {
            let wrong = outputs.iter().position(|&output| output != number(layer, round));
            assert!(wrong.is_none(), "round {round}, layer {layer}: {wrong:?} has {:?}", wrong.map(|at| outputs[at]));
        }
        setup.weights.unload(1).unwrap();
    }
}

/// A reservation dropped at any stage frees its memory. Its pending copies precede those of the next adapter there,
/// even while the queue is far behind and through another staging.
#[test]
#[ignore = "needs a GPU"]
fn dropped_reservations_give_their_room_back() {
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Stage {
        Reserved,
        Filled,
        /// So small that its copies are still pending.
        Pending,
        Failed,
        Late,
    }
    let mut setup = Setup::new(LAYERS, FEATURES, ARENA_BYTES);
    let spin = Spin::new(&setup.gpu);
    let [mut staging, mut other] = [(); 2].map(|()| Staging::new(&setup.gpu.queue).unwrap());
    let (large, small) = (setup.adapter(64, 9.0), setup.adapter(16, 8.0));
    let broken = adding::modules(LAYERS, FEATURES, 64, |layer| if layer + 1 == LAYERS { f32::NAN } else { 9.0 });
    let broken = adapters::adapter(&broken);
    let [large, small, broken] =
        [&large, &small, &broken].map(|adapter| adapter.plan(setup.model(), DType::F32).unwrap());
    let behind = [false, true].into_iter().flat_map(|behind| {
        [Stage::Reserved, Stage::Filled, Stage::Pending, Stage::Failed, Stage::Late].map(|stage| (behind, stage))
    });
    for (round, (is_behind, stage)) in behind.enumerate() {
        let what = format!("{stage:?}, queue behind: {is_behind}");
        let next = 20.0 + round as f32;
        setup.load(0, 64, 7.0).unwrap();
        setup.y.write(&vec![0.0; setup.y.len()]).unwrap();
        let used = setup.weights.usage();
        let spun = spin.run(if is_behind { 300 } else { 0 });
        setup.enqueue_on_y(&slots(0));
        assert!(matches!(setup.weights.reserve(&large), Err(LoadError::Full { bytes: ADAPTER_BYTES, .. })), "{what}");
        assert_eq!(setup.weights.usage(), used, "{what}: what was refused took room");
        setup.weights.unload(0).unwrap();
        let free = setup.weights.usage();
        assert_eq!(free.used, 0, "{what}");
        let reserved = match stage {
            Stage::Pending => &small,
            Stage::Filled | Stage::Late => &large,
            _ => &broken,
        };
        let reservation = setup.weights.reserve(reserved).unwrap();
        assert_eq!(setup.weights.fits(&large), stage == Stage::Pending, "{what}");
        match stage {
            Stage::Reserved => drop(reservation),
            Stage::Filled => drop(reservation.fill(&large, &mut staging).unwrap()),
            Stage::Pending => {
                let filled = reservation.fill(&small, &mut staging).unwrap();
                assert!(!is_behind || !filled.is_ready(), "{what}: not behind the queue");
            }
            Stage::Failed => {
                let error = reservation.fill(&broken, &mut staging).unwrap_err();
                assert!(matches!(error, LoadError::Adapter(AdapterError::Unrepresentable { .. })), "{what}: {error}");
            }
            Stage::Late => {
                let filled = reservation.fill(&large, &mut staging).unwrap();
                filled.wait().unwrap();
                assert!(filled.is_ready());
                drop(filled);
            }
        }
        assert_eq!(setup.weights.usage(), free, "{what}: room was lost");
        assert!(setup.weights.loaded().is_empty());
        if is_behind && matches!(stage, Stage::Reserved | Stage::Pending) {
            assert!(!spun.is_complete(), "{what}: the test takes longer than the queue was kept busy for");
        }
        let adapter = setup.adapter(64, next);
        let image = adapter.plan(setup.model(), DType::F32).unwrap();
        let filled = setup.weights.reserve(&image).unwrap().fill(&image, &mut other).unwrap();
        setup.weights.commit(2, filled).unwrap();
        assert_eq!(setup.added(), [7.0; TOKENS], "{what}: the adapter of before");
        assert_eq!(setup.step(&slots(2)), [next; TOKENS], "{what}: the adapter of after");
        setup.weights.unload(2).unwrap();
    }
}

/// The table may be dropped while copies into it are pending.
#[test]
#[ignore = "needs a GPU"]
fn a_table_may_be_dropped_while_it_is_filled() {
    let gpu = Gpu::new();
    for _ in 0..10 {
        let setup = Setup::on(Gpu::in_context(gpu.context.clone()), LAYERS, FEATURES, ARENA_BYTES);
        let spin = Spin::new(&setup.gpu);
        let mut staging = Staging::new(&setup.gpu.queue).unwrap();
        setup.load(0, 64, 1.0).unwrap();
        let adapter = setup.adapter(16, 2.0);
        let image = adapter.plan(setup.model(), DType::F32).unwrap();
        spin.run(20);
        setup.weights.unload(0).unwrap();
        let filled = setup.weights.reserve(&image).unwrap().fill(&image, &mut staging).unwrap();
        let Setup { gpu, weights, .. } = setup;
        drop((filled, weights));
        // Reuses the arena's memory, unless copies into it are still pending.
        let mut other = Buffer::<f32>::zeros(&gpu.queue, ARENA_BYTES / size_of::<f32>()).unwrap();
        let ones = vec![1.0; other.len()];
        other.write(&ones).unwrap();
        drop(staging);
        let mut got = vec![0.0; other.len()];
        other.read(&mut got).unwrap();
        assert!(got == ones, "a table that is gone was filled");
    }
}
