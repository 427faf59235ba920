//! Operations of several threads on one step, beside each other and beside candle's own. What waits forever ends the
//! test with an error.

use std::{
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::Duration,
};

use aril::{
    DType,
    model::{Linear, LinearId, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    pool::Lease,
};
use aril_candle::Adapters;
use candle_core::Tensor;
use rayon::prelude::*;

use crate::{device, lease, of_candle, pool};

const FEATURES: usize = 64;
/// More than what one launch works on.
const MANY_ROWS: usize = 600;

/// A layer of two slices on [`FEATURES`] features, and a lease of an adapter that adds the sum of a row of x to its
/// outputs of the first one, and twice that to those of the second.
fn adapters(dtype: DType) -> (Adapters, LinearId, Lease) {
    let mut spec = ModelSpec::new();
    let id =
        spec.linear(Linear::new("m", Parallel::Column, FEATURES).slice("q", FEATURES).slice("k", FEATURES)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let factor = |shape, value| full(value, shape, DType::F32);
    let tensors = [("q", 1.0), ("k", 2.0)].into_iter().flat_map(|(slice, value)| {
        [
            (format!("m.{slice}.lora_A.weight"), factor((1, FEATURES), 1.0)),
            (format!("m.{slice}.lora_B.weight"), factor((FEATURES, 1), value)),
        ]
    });
    let adapter = aril_candle::adapter(r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1}"#, tensors).unwrap();
    let adapters = pool(&model, dtype, Capacity::tokens(MANY_ROWS).slots(1).rank(8));
    let lease = lease(&adapters, &model, dtype, adapter);
    (adapters, id, lease)
}

/// A matrix of this value.
fn full(value: f32, shape: (usize, usize), dtype: DType) -> Tensor {
    Tensor::full(value, shape, &device()).unwrap().to_dtype(of_candle(dtype)).unwrap()
}

fn assert_full(y: &Tensor, value: f32, what: &str) {
    let elements = y.to_dtype(candle_core::DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let wrong = elements.iter().filter(|element| **element != value).count();
    assert_eq!(wrong, 0, "{what}: {wrong} of {} elements are not {value}: {:?}", elements.len(), elements.first());
}

/// Fails if `run` does not end.
fn ends(run: impl FnOnce() + Send + 'static) {
    let (ended, end) = channel();
    let thread = thread::spawn(move || {
        run();
        ended.send(()).unwrap();
    });
    if end.recv_timeout(Duration::from_secs(120)) == Err(RecvTimeoutError::Timeout) {
        panic!("it waits forever");
    }
    thread.join().unwrap();
}

/// In `f32` and with many rows, an operation on a GPU is two launches, with `A x` between them in memory of the step.
#[test]
fn threads_do_not_mix_their_rows() {
    for (dtype, rows, count) in [(DType::F32, 4, 500), (DType::F32, MANY_ROWS, 20), (DType::BF16, MANY_ROWS, 20)] {
        ends(move || {
            let (adapters, id, lease) = adapters(dtype);
            let step = adapters.step(&vec![lease.slot(); rows]).unwrap();
            let last = step.rows((0..rows).rev()).unwrap();
            thread::scope(|threads| {
                for value in [1.0, 2.0, 4.0] {
                    let (step, last) = (&step, &last);
                    threads.spawn(move || {
                        let x = full(value, (rows, FEATURES), dtype);
                        let y: Vec<_> = (0..count).map(|_| full(1.0, (rows, 2 * FEATURES), dtype)).collect();
                        for (number, y) in y.iter().enumerate() {
                            let step = if number % 2 == 0 { step } else { last };
                            y.inplace_op2(&x, &step.delta(id)).unwrap();
                        }
                        for y in &y {
                            let of_slice = |slice: usize| y.narrow(1, slice * FEATURES, FEATURES).unwrap();
                            // Some values are rounded, in any thread alike.
                            let sum = |times: f32| {
                                let exact = 1.0 + times * value * FEATURES as f32;
                                if dtype == DType::BF16 { half::bf16::from_f32(exact).to_f32() } else { exact }
                            };
                            assert_full(&of_slice(0), sum(1.0), "q");
                            assert_full(&of_slice(1), sum(2.0), "k");
                        }
                    });
                }
            });
        });
    }
}

/// Of operations on outputs of their own, and on one that all add to. What a thread waits for may take up neither.
#[test]
fn operations_may_be_tasks_of_rayon() {
    for threads in [2, 4, 16] {
        ends(move || {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let (adapters, id, lease) = adapters(DType::F32);
            let step = adapters.step(&[lease.slot(); 64]).unwrap();
            let zeros = || full(0.0, (64, 2 * FEATURES), DType::F32);
            let (x, all) = (full(1.0, (64, FEATURES), DType::F32), zeros());
            let own: Vec<_> = (0..64).map(|_| zeros()).collect();
            pool.install(|| {
                own.par_iter().with_max_len(1).for_each(|y| {
                    y.inplace_op2(&x, &step.delta(id)).unwrap();
                    all.inplace_op2(&x, &step.delta(id)).unwrap();
                });
            });
            own.iter().for_each(|y| assert_full(&y.narrow(1, 0, FEATURES).unwrap(), FEATURES as f32, "own"));
            assert_full(&all.narrow(1, 0, FEATURES).unwrap(), 64.0 * FEATURES as f32, "all");
        });
    }
}

/// No operation holds an output while it waits for another one: neither two of these do, nor candle's own on the same
/// outputs.
#[test]
fn outputs_may_be_in_any_order() {
    const COUNT: usize = 2000;
    ends(|| {
        let (adapters, id, lease) = adapters(DType::F32);
        let step = adapters.step(&[lease.slot(); 4]).unwrap();
        let matrix = |value| full(value, (4, FEATURES), DType::F32);
        let (x, q, k) = (matrix(1.0), matrix(0.0), matrix(0.0));
        thread::scope(|threads| {
            let (x, q, k, step) = (&x, &q, &k, &step);
            for y in [[q, k], [k, q]] {
                threads.spawn(move || (0..COUNT).for_each(|_| step.delta(id).add_to(y, x).unwrap()));
                threads.spawn(move || (0..COUNT).for_each(|_| drop(y[0].add(y[1]).unwrap())));
            }
        });
        // Each got both slices' deltas as often.
        for y in [&q, &k] {
            assert_full(y, (COUNT * 3 * FEATURES) as f32, "both");
        }
    });
}

/// A launch of a graph that somebody else captures would outlive what the step has.
#[cfg(feature = "cuda")]
#[test]
fn a_stream_that_is_captured_is_refused() {
    use candle_core::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

    let (adapters, id, lease) = adapters(DType::F32);
    let step = adapters.step(&[lease.slot()]).unwrap();
    let (x, y) = (full(1.0, (1, FEATURES), DType::F32), full(0.0, (1, 2 * FEATURES), DType::F32));
    let candle_core::Device::Cuda(device) = y.device() else { panic!("the device is a GPU") };
    let stream = device.cuda_stream();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let refused = y.inplace_op2(&x, &step.delta(id)).unwrap_err().to_string();
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    // A capture without work has no graph.
    let _ = stream.end_capture(flags);
    assert!(refused.contains("captured"), "{refused}");
    y.inplace_op2(&x, &step.delta(id)).unwrap();
    assert_full(&y.narrow(1, 0, FEATURES).unwrap(), FEATURES as f32, "q");
}
