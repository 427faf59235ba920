//! Memory under copies, of any size, on any thread, and beside captures that other threads begin.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use aril::{
    DType,
    cuda::{AdapterPool, Buffer, LaunchError, Matrix, MatrixMut, PinnedBuffer, Staging, View},
    error::{LoadError, OperandError},
    plan::Capacity,
    pool::{PoolConfig, Source, StreamId, Tier},
    routing::Batch,
};
use rayon::{ThreadPoolBuilder, prelude::*};

use crate::{
    device::Gpu,
    setup::{self, Setup, Spin, TOKENS},
};

const FEATURES: usize = 1024;
/// An adapter of rank 64 takes 12 MiB, so that it is copied in two pieces.
const LAYERS: usize = 24;
const ADAPTER_BYTES: usize = LAYERS * 2 * 64 * FEATURES * size_of::<f32>();

fn slots(number: i32) -> [i32; TOKENS] {
    [number; TOKENS]
}

/// A panic of the user's `progress` while copies are on their way, with the queue behind or not. The room is free,
/// another staging gets it, and what is loaded there is whole.
#[test]
#[ignore = "needs a GPU"]
fn a_panic_in_progress_frees_no_room_under_a_copy() {
    let mut setup = Setup::new(LAYERS, FEATURES, ADAPTER_BYTES * 3 / 2);
    let spin = Spin::new(&setup.gpu);
    let [mut staging, mut other] = [(); 2].map(|()| Staging::new(&setup.gpu.queue).unwrap());
    let broken = setup.adapter(64, 7.0);
    let broken = broken.plan(setup.model(), DType::F32).unwrap();
    for round in 0..40 {
        let value = 10.0 + round as f32;
        setup.load(0, 64, 3.0).unwrap();
        let spun = spin.run(if round % 4 == 0 { 20 } else { 0 });
        setup.enqueue_on_y(&slots(0));
        setup.weights.unload(0).unwrap();
        let before = setup.weights.usage();
        let reservation = setup.weights.reserve(&broken).unwrap();
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let fill =
                reservation.fill_with_progress(&broken, &mut staging, |_| std::panic::resume_unwind(Box::new(1)));
            drop(fill);
        }));
        assert!(panicked.is_err());
        assert_eq!(setup.weights.usage(), before, "round {round}: room was lost");
        let adapter = setup.adapter(64, value);
        let image = adapter.plan(setup.model(), DType::F32).unwrap();
        let filled = setup.weights.reserve(&image).unwrap().fill(&image, &mut other).unwrap();
        setup.weights.commit(1, filled).unwrap();
        assert_eq!(setup.step(&slots(1)), [value; TOKENS], "round {round}");
        assert!(spun.is_complete());
        setup.weights.unload(1).unwrap();
    }
}

/// Loads on rayon's threads, whose packing takes up other loads. None waits for another, and each slot has one of its
/// adapters.
#[test]
#[ignore = "needs a GPU"]
fn loads_on_rayons_threads_do_not_wait_for_each_other() {
    const LOADS: usize = 64;
    let mut setup = Setup::new(LAYERS, FEATURES, LOADS * ADAPTER_BYTES / 2);
    let adapters: Vec<_> = (0..LOADS).map(|load| setup.adapter(16, load as f32)).collect();
    for threads in [2, 16] {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let weights = &setup.weights;
        pool.install(|| {
            adapters.par_iter().enumerate().with_max_len(1).for_each(|(load, adapter)| {
                let image = adapter.plan(weights.model(), DType::F32).unwrap();
                weights.load(load % setup::SLOTS, &image).unwrap();
            });
        });
        for slot in 0..setup::SLOTS {
            let added = setup.step(&slots(slot as i32))[0];
            assert_eq!((added as usize) % setup::SLOTS, slot, "{threads} threads: {added} in slot {slot}");
        }
    }
}

/// The user's `progress` may load into the same table.
#[test]
#[ignore = "needs a GPU"]
fn progress_may_load() {
    let mut setup = Setup::new(LAYERS, FEATURES, 4 * ADAPTER_BYTES);
    let [outer, inner] = [(64, 5.0), (16, 6.0)].map(|(rank, value)| setup.adapter(rank, value));
    let [outer, inner] = [&outer, &inner].map(|adapter| adapter.plan(setup.model(), DType::F32).unwrap());
    let (weights, mut pieces) = (setup.weights.clone(), 0);
    weights
        .load_with_progress(0, &outer, |_| {
            weights.load(1, &inner).unwrap();
            pieces += 1;
        })
        .unwrap();
    assert!(pieces > 1);
    assert_eq!(setup.step(&slots(0)), [5.0; TOKENS]);
    assert_eq!(setup.step(&slots(1)), [6.0; TOKENS]);
}

/// Lengths whose bytes no memory can hold are refused, those that would wrap to few bytes, too.
#[test]
#[ignore = "needs a GPU"]
fn no_memory_is_smaller_than_its_length() {
    fn refused<T>(made: Result<T, LaunchError>, want: usize) {
        let Err(LaunchError::Operand(OperandError::Capacity { got, max, .. })) = made else {
            panic!("{:?}", made.map(|_| ()))
        };
        assert_eq!(got, want);
        assert!(got > max);
    }
    let gpu = Gpu::new();
    for len in [1 << 62, (1 << 62) + 1, 1 << 61, usize::MAX] {
        refused(PinnedBuffer::<f32>::zeros(&gpu.queue, len), len);
        refused(Buffer::<f32>::zeros(&gpu.queue, len), len);
    }
    assert!(Buffer::<u8>::zeros(&gpu.queue, 1 << 50).is_err_and(|error| error.is_out_of_memory()));
    assert!(PinnedBuffer::<u8>::zeros(&gpu.queue, 1 << 50).is_err());
    assert_eq!(Buffer::<f32>::zeros(&gpu.queue, 3).unwrap().len(), 3);
}

/// Page-locked memory is freed on threads without a context.
#[test]
#[ignore = "needs a GPU"]
fn page_locked_memory_is_freed_on_any_thread() {
    const ROUNDS: usize = 128;
    const LEAK_KB: usize = ROUNDS * (16 << 10);
    let available = || {
        let text = fs::read_to_string("/proc/meminfo").unwrap();
        let line = text.lines().find(|line| line.starts_with("MemAvailable:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap()
    };
    let gpu = Gpu::new();
    drop(Staging::new(&gpu.queue).unwrap());
    let before = available();
    for _ in 0..ROUNDS {
        let staging = Staging::new(&gpu.queue).unwrap();
        let pinned = PinnedBuffer::<u8>::zeros(&gpu.queue, 1 << 10).unwrap();
        thread::spawn(move || drop((staging, pinned))).join().unwrap();
    }
    let used = before.saturating_sub(available());
    assert!(used < LEAK_KB / 2, "{used} kB of {LEAK_KB} kB did not come back");
}

/// Host memory of any size holds whole blocks alone, and none of them ends beyond the memory.
#[test]
#[ignore = "needs a GPU"]
fn a_host_tier_has_any_size() {
    let gpu = Gpu::new();
    let setup = Setup::on(gpu, 1, 64, 1 << 20);
    let adapter = Arc::new(setup.adapter(8, 1.0));
    let source = Source::memory(adapter, setup.model(), DType::F32).unwrap();
    let capacity = Capacity::tokens(TOKENS).slots(1).rank(8);
    // One byte less than each multiple of the granule, of which one is a multiple of the adapter's size, too.
    for host_bytes in (0..20).map(|granule| (1 << 16) + granule * 256 - 1) {
        let config = PoolConfig::arena_bytes(1 << 16).host_bytes(host_bytes);
        let mut pool = AdapterPool::new(&setup.gpu.queue, setup.model(), DType::F32, capacity, config).unwrap();
        // More than fit, so that every place is used.
        let ids: Vec<_> = (0..40).map(|_| pool.register(source.clone()).unwrap()).collect();
        for &id in &ids {
            pool.prefetch(id).unwrap();
            while pool.residency(id).is_none_or(|residency| residency.tier != Tier::Device) {
                let failure = pool.residency(id).and_then(|residency| residency.failure);
                assert!(failure.is_none(), "{host_bytes} bytes: {failure:?}");
                pool.wait(std::time::Duration::from_millis(1));
                pool.poll();
                pool.prefetch(id).unwrap();
            }
            drop(pool.acquire(id, StreamId::FIRST).unwrap());
            pool.end_step(StreamId::FIRST).unwrap();
        }
    }
}

/// One thread captures, while another loads into a slot and a third updates a routing, all on one stream. What they
/// enqueue is in no graph: the slot has the last adapter after all graphs are replayed.
#[test]
#[ignore = "needs a GPU"]
fn what_other_threads_enqueue_is_in_no_graph() {
    const CAPTURES: usize = 300;
    let mut setup = Setup::new(2, 64, 1 << 22);
    let slot = setup.load(1, 8, 9.0).unwrap();
    let (weights, queue, capacity) = (setup.weights.clone(), setup.gpu.queue.clone(), setup.weights.capacity());
    let (is_done, loads, updates) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let adapters: Vec<_> = (0..8).map(|value| setup.adapter(8, value as f32)).collect();
    let graphs = Mutex::new(Vec::new());
    thread::scope(|threads| {
        threads.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                for adapter in &adapters {
                    let image = adapter.plan(weights.model(), DType::F32).unwrap();
                    match weights.load(0, &image) {
                        Ok(_) => _ = loads.fetch_add(1, Ordering::Relaxed),
                        Err(LoadError::Device(LaunchError::Capturing)) => (),
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        });
        threads.spawn(|| {
            let mut routing = aril::cuda::Routing::new(&queue, capacity, 4);
            while !is_done.load(Ordering::Relaxed) {
                let Ok(routing) = &mut routing else {
                    routing = aril::cuda::Routing::new(&queue, capacity, 4);
                    continue;
                };
                match routing.update(&Batch::new(&[slot; TOKENS])) {
                    Ok(_) => _ = updates.fetch_add(1, Ordering::Relaxed),
                    Err(LaunchError::Capturing | LaunchError::Busy { .. }) => (),
                    Err(error) => panic!("{error}"),
                }
                // Freed while the stream is captured or not.
                drop(Buffer::<u8>::zeros(&queue, 64));
            }
        });
        let is_enough = || loads.load(Ordering::Relaxed) > 8 && updates.load(Ordering::Relaxed) > 8;
        while graphs.lock().unwrap().len() < CAPTURES || !is_enough() {
            graphs.lock().unwrap().push(setup.capture());
        }
        is_done.store(true, Ordering::Relaxed);
    });
    setup.load(0, 8, 77.0).unwrap();
    for graph in graphs.into_inner().unwrap().iter_mut() {
        assert_eq!(setup.replay(graph, &slots(1)), [9.0; TOKENS]);
    }
    assert_eq!(setup.step(&slots(0)), [77.0; TOKENS]);
    assert_eq!(setup.step(&slots(1)), [9.0; TOKENS]);
}

/// Input and output in one buffer, views that are used several times, and a shared buffer, which nobody can write to
/// meanwhile.
#[test]
#[ignore = "needs a GPU"]
fn a_buffer_is_split_and_shared() {
    const SMALL: usize = 64;
    let mut setup = Setup::new(1, SMALL, 1 << 20);
    let slot = setup.load(0, 8, 2.0).unwrap();
    let (queue, rows) = (setup.gpu.queue.clone(), TOKENS * SMALL);
    let mut both = Buffer::<f32>::zeros(&queue, 2 * rows).unwrap();
    both.write(&vec![1.0; rows]).unwrap();
    let mut shared = Arc::new(Buffer::<f32>::zeros(&queue, rows).unwrap());
    let input: View<'static, f32> = Arc::clone(&shared).into();
    assert!(Arc::get_mut(&mut shared).is_none(), "a shared buffer can be written to");
    {
        let batch = setup.routing.update(&Batch::new(&[slot; TOKENS])).unwrap();
        let mut step = setup.weights.step(&batch, &mut setup.workspace).unwrap();
        let (x, mut y) = both.split_at_mut(rows);
        for _ in 0..3 {
            let (x, y) = (Matrix::new(x.as_view(), TOKENS, SMALL), MatrixMut::new(y.reborrow(), TOKENS, SMALL));
            setup.layers[0].add_delta(&mut step, x.unwrap(), y.unwrap()).unwrap();
        }
        // An input of zeros.
        let (x, y) = (Matrix::new(input, TOKENS, SMALL), MatrixMut::new(y, TOKENS, SMALL));
        setup.layers[0].add_delta(&mut step, x.unwrap(), y.unwrap()).unwrap();
    }
    assert!(Arc::get_mut(&mut shared).is_some());
    let mut got = vec![0.0; 2 * rows];
    both.read(&mut got).unwrap();
    assert!(got[..rows].iter().all(|&x| x == 1.0) && got[rows..].iter().all(|&y| y == 6.0));
}
