//! Graphs captured through the safe API: changes they follow, memory they keep alive, and calls refused during a
//! capture.

use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use aril::{
    DType, Slot,
    cuda::{
        AdapterPool, Buffer, GroupedRoutes, Grouping, LaunchError, LoraEmbedding, LoraExperts, LoraLinear, Matrix,
        MatrixMut, PinnedBuffer, Queue, Routing, Staging, Step, TopK, View, WeightTable, Workspace,
    },
    error::{LoadError, OperandError},
    model::{Activation, Experts, ExpertsId, Linear, ModelSpec, Parallel, TpRank},
    plan::{Capacity, RouteCapacity, WorkspaceBytes},
    pool::{PoolConfig, StreamId},
    routing::Batch,
};
use cudarc::driver::{
    CudaGraph, CudaSlice, CudaStream, result,
    sys::{CUgraphInstantiate_flags, CUstreamCaptureMode, CUstreamCaptureStatus, cuStreamGetPriority},
};
use half::bf16;
use rand::{RngExt as _, SeedableRng, rngs::StdRng};

use crate::{
    common::{
        adapters::Lora,
        adding,
        experts::{OPERATIONS, shapes},
    },
    device::{
        Gpu,
        Refused::{self, NotKept, OtherBatch, Stream},
        refused,
    },
    experts::launch,
    setup::{Setup, Spin, TOKENS, add_deltas, load, load_experts, slots_of},
};

/// A graph is replayed after all its operands were dropped. It must keep their memory from being reused.
#[test]
#[ignore = "needs a GPU"]
fn a_graph_keeps_what_it_works_on() {
    const FEATURES: usize = 1024;
    const LEN: usize = TOKENS * FEATURES;
    let setup = Setup::new(2, FEATURES, 4 << 20);
    let slot = setup.load(1, 16, 3.0).unwrap();
    let Setup { gpu, weights, layers, mut routing, mut workspace, x, .. } = setup;
    let ([mut between, mut result], queue) = ([(); 2].map(|()| Buffer::zeros(&gpu.queue, LEN).unwrap()), &gpu.queue);
    let record = |step: &mut Step<'_>| -> Result<(), LaunchError> {
        layers[0].add_delta(
            step,
            Matrix::<f32>::new(&x, TOKENS, FEATURES)?,
            MatrixMut::new(&mut between, TOKENS, FEATURES)?,
        )?;
        layers[1].add_delta(
            step,
            Matrix::new(&between, TOKENS, FEATURES)?,
            MatrixMut::new(&mut result, TOKENS, FEATURES)?,
        )
    };
    let mut graph = weights.capture(&routing, TOKENS, &mut workspace, record).unwrap();
    let batch = routing.update(&Batch::new(&[slot; TOKENS])).unwrap();
    gpu.synchronize();
    // If the graph did not keep them, they would now hold NaN.
    drop((layers, x, between));
    gpu.synchronize();
    let sizes = [[LEN; 32].to_vec(), vec![1 << 20; 8], vec![64; 256]].concat();
    let fill = |len: usize| {
        let mut buffer = Buffer::<f32>::zeros(queue, len).unwrap();
        buffer.write(&vec![f32::NAN; len]).unwrap();
        buffer
    };
    let others: Vec<_> = sizes.into_iter().map(fill).collect();
    let mut got = vec![0.0; LEN];
    // Between the layers x is 3, then 6. Each replay adds 3 times that.
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    for expected in [9.0, 27.0] {
        graph.replay(&mut step).unwrap();
        result.read(&mut got).unwrap();
        assert_eq!(got, vec![expected; LEN]);
    }
    for other in &others {
        let mut values = vec![0.0; other.len()];
        other.read(&mut values).unwrap();
        assert!(values.iter().all(|value| value.is_nan()), "the graph wrote memory of another");
    }
}

/// A graph, the routing and the buffers may go to another thread, on which no context is current.
#[test]
#[ignore = "needs a GPU"]
fn a_graph_is_replayed_by_another_thread() {
    let mut setup = Setup::new(2, 64, 1 << 20);
    setup.load(3, 8, 6.0).unwrap();
    let mut graph = setup.capture();
    let added = thread::spawn(move || setup.replay(&mut graph, &[3; TOKENS])).join().unwrap();
    assert_eq!(added, [6.0; TOKENS]);
}

#[test]
#[ignore = "needs a GPU"]
fn buffers_are_written_and_read_within_their_ends() {
    let gpu = Gpu::new();
    let mut buffer = Buffer::<f32>::zeros(&gpu.queue, 4).unwrap();
    assert!(buffer.len() == 4 && !buffer.is_empty());
    buffer.write(&[1.0, 2.0]).unwrap();
    let mut got = [9.0; 4];
    buffer.read(&mut got).unwrap();
    assert_eq!(got, [1.0, 2.0, 0.0, 0.0]);
    assert_eq!([beyond(buffer.write(&[3.0; 5])), beyond(buffer.read(&mut [3.0; 5]))], [[5, 4]; 2]);
    buffer.read(&mut got[..1]).unwrap();
    assert_eq!(got, [1.0, 2.0, 0.0, 0.0]);
    for range in [3..5, Range { start: 2, end: 1 }] {
        assert!(catch_unwind(AssertUnwindSafe(|| drop(buffer.slice(range.clone())))).is_err());
        assert!(catch_unwind(AssertUnwindSafe(|| drop(buffer.slice_mut(range)))).is_err());
    }
    let slice = gpu.stream.clone_htod(&[5.0_f32, 6.0]).unwrap();
    let taken = Buffer::from_slice(&gpu.queue, slice).unwrap();
    taken.read(&mut got[2..]).unwrap();
    assert_eq!(got, [1.0, 2.0, 5.0, 6.0]);
}

/// Copies between parts of buffers and slices, enqueued far ahead of the device without waiting.
#[test]
#[ignore = "needs a GPU"]
fn copies_are_in_the_order_of_the_queue() {
    const LEN: usize = 1 << 16;
    let gpu = Gpu::new();
    let (queue, spin) = (&gpu.queue, Spin::new(&gpu));
    let [mut first, mut second] = [(); 2].map(|()| Buffer::<f32>::zeros(queue, LEN).unwrap());
    let inserted = gpu.stream.clone_htod(&[3.0_f32; LEN]).unwrap();
    let mut taken = gpu.stream.clone_htod(&[9.0_f32; LEN]).unwrap();
    let [mut input, mut output] = [LEN, LEN + 1].map(|len| PinnedBuffer::<f32>::zeros(queue, len).unwrap());
    assert_eq!((input.len(), output.elements().unwrap().len(), output.is_empty()), (LEN, LEN + 1, false));
    for value in [5.0, 6.0, 7.0] {
        input.elements().unwrap().fill(value);
        let spun = spin.run(50);
        first.enqueue_write(&mut input, LEN - 1).unwrap();
        queue.copy(&first, &mut second).unwrap();
        queue.copy(inserted.slice(..4), second.slice_mut(2..LEN)).unwrap();
        second.enqueue_read(&mut output, LEN).unwrap();
        queue.copy(&second, &mut taken).unwrap();
        assert!(!input.is_ready().unwrap() && !output.is_ready().unwrap());
        assert!(!spun.is_complete(), "a copy has waited for the queue");
        let mut expected = vec![value; LEN];
        expected[2..6].fill(3.0);
        expected[LEN - 1] = 0.0;
        // This waits for the copy from the pinned buffer.
        input.elements().unwrap().fill(-1.0);
        assert!(spun.is_complete());
        assert_eq!(output.elements().unwrap()[..LEN], expected);
        assert_eq!(output.elements().unwrap()[LEN], 0.0);
        assert_eq!(gpu.stream.clone_dtoh(&taken).unwrap(), expected);
    }
    assert_eq!(beyond(queue.copy(&inserted, second.slice_mut(2..LEN))), [LEN, LEN - 2]);
    assert_eq!(beyond(first.enqueue_write(&mut output, LEN + 1)), [LEN + 1, LEN]);
    assert_eq!(beyond(first.enqueue_read(&mut output, LEN + 1)), [LEN + 1, LEN]);
    let other = Gpu::in_context(gpu.context.clone());
    let mut elsewhere = Buffer::<f32>::zeros(&other.queue, LEN).unwrap();
    for refused in [
        elsewhere.enqueue_write(&mut input, LEN),
        elsewhere.enqueue_read(&mut input, LEN),
        queue.copy(&elsewhere, &mut first),
        queue.copy(&first, &mut elsewhere),
    ] {
        assert!(matches!(refused, Err(LaunchError::WrongStream { .. })), "{refused:?}");
    }
    // Pinned elements may be dropped before their copy is done.
    input.elements().unwrap().fill(7.0);
    spin.run(20);
    first.enqueue_write(&mut input, LEN).unwrap();
    drop(input);
    let mut got = vec![0.0; LEN];
    first.read(&mut got).unwrap();
    assert_eq!(got, [7.0; LEN]);
    assert!(Buffer::<f32>::zeros(queue, 0).unwrap().is_empty());
}

/// What was too much for a capacity, and the capacity.
fn beyond<T>(result: Result<T, LaunchError>) -> [usize; 2] {
    match refused(result) {
        Refused::Operand(OperandError::Capacity { got, max, .. }) => [got, max],
        other => panic!("{other:?}"),
    }
}

/// Records the operations of a step; recording may fail.
type Record<'a> = &'a mut dyn FnMut(&mut Step<'_>) -> Result<(), LaunchError>;

/// Captures a step that fails. The queue stays usable.
fn capture(setup: &mut Setup, record: Record<'_>) -> LaunchError {
    let error = setup.weights.capture(&setup.routing, TOKENS, &mut setup.workspace, record).unwrap_err();
    assert_usable(setup);
    error
}

fn assert_usable(setup: &mut Setup) {
    assert_eq!(setup.gpu.stream.capture_status().unwrap(), CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
    setup.load(2, 4, 11.0).unwrap();
    assert_eq!(setup.step(&[2; TOKENS]), [11.0; TOKENS]);
    let mut graph = setup.capture();
    assert_eq!(setup.replay(&mut graph, &[2; TOKENS]), [11.0; TOKENS]);
}

#[test]
#[ignore = "needs a GPU"]
fn captures_that_fail_leave_the_queue_as_it_was() {
    #[derive(Debug)]
    enum Own {
        Launch(#[expect(dead_code, reason = "to be printed")] LaunchError),
        Other(u32),
    }
    impl From<LaunchError> for Own {
        fn from(error: LaunchError) -> Self {
            Self::Launch(error)
        }
    }
    let mut setup = Setup::new(2, 64, 1 << 20);
    assert!(matches!(capture(&mut setup, &mut |_| Ok(())), LaunchError::NothingCaptured));
    for records in [false, true] {
        let Setup { weights, layers, routing, workspace, x, y, .. } = &mut setup;
        let failed = weights.capture(routing, TOKENS, workspace, |step| {
            if records {
                // `From<LaunchError>` is enough for all that a step calls.
                let (x, y) = (Matrix::<f32>::new(&*x, TOKENS, 64)?, MatrixMut::<f32>::new(&mut *y, TOKENS, 64)?);
                layers[0].add_delta(step, x, y)?;
            }
            Err(Own::Other(7))
        });
        assert!(matches!(failed, Err(Own::Other(7))), "{failed:?}");
        assert_usable(&mut setup);
        let Setup { weights, layers, routing, workspace, x, y, .. } = &mut setup;
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            weights.capture(routing, TOKENS, workspace, |step| -> Result<(), LaunchError> {
                if records {
                    add_deltas(layers, 64, step, x, y)?;
                }
                panic!("as an engine's own code may")
            })
        }));
        assert!(panicked.is_err());
        assert_usable(&mut setup);
    }
    let Setup { weights, routing, workspace, .. } = &mut setup;
    let longer = weights.capture::<LaunchError>(routing, TOKENS + 1, workspace, |_| Ok(()));
    assert_eq!(beyond(longer), [TOKENS + 1, TOKENS]);
    assert_usable(&mut setup);
}

const FLAGS: CUgraphInstantiate_flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;

/// What cudarc makes of the queue's stream within a capture is no graph: the stream is not that of the capture.
fn steal(step: &Step<'_>) -> Option<CudaGraph> {
    let stream = step.queue().stream();
    assert_eq!(stream.capture_status().unwrap(), CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
    stream.end_capture(FLAGS).ok().flatten()
}

/// Nobody can take a graph from a capture that no step checks, nor run the captured operations without a step.
#[test]
#[ignore = "needs a GPU"]
fn a_capture_cannot_be_stolen() {
    let mut setup = Setup::new(1, 64, 1 << 20);
    setup.load(0, 2, 4.0).unwrap();
    let Setup { gpu, weights, layers, routing, workspace, x, y, .. } = &mut setup;
    let config = PoolConfig::arena_bytes(1 << 20).host_bytes(1 << 20);
    let pool = AdapterPool::new(&gpu.queue, weights.model(), DType::F32, weights.capacity(), config).unwrap();
    let mut graphs: Vec<_> = [&*weights, pool.weights(StreamId::FIRST).unwrap()]
        .into_iter()
        .map(|table| {
            let record = |step: &mut Step<'_>| -> Result<(), LaunchError> {
                add_deltas(layers, 64, step, x, y)?;
                assert!(steal(step).is_none());
                add_deltas(layers, 64, step, x, y)
            };
            table.capture(routing, TOKENS, workspace, record).unwrap()
        })
        .collect();
    assert_eq!(setup.added(), [0.0; TOKENS]);
    assert_eq!(setup.replay(&mut graphs[0], &[0; TOKENS]), [8.0; TOKENS]);
    // A step of the plain table is none of the pool's.
    let slots = slots_of(&setup.weights, &[0; TOKENS]);
    let batch = setup.routing.update(&Batch::new(&slots)).unwrap();
    let mut step = setup.weights.step(&batch, &mut setup.workspace).unwrap();
    assert!(matches!(graphs[1].replay(&mut step), Err(LaunchError::OtherGraph { what: "table" })));
}

/// All that is called within a capture beside the operations of its step runs at once, and is in no graph: work of
/// cudarc, calls of aril on the queue, steps of other batches, replays and other captures.
#[test]
#[ignore = "needs a GPU"]
fn other_work_within_a_capture_runs_at_once() {
    const LEN: usize = 1 << 20;
    let mut setup = Setup::new(1, 64, 1 << 20);
    setup.load(0, 2, 4.0).unwrap();
    let adapter = setup.adapter(2, 5.0);
    let Setup { gpu, weights, layers, routing, workspace, x, y, .. } = &mut setup;
    let (queue, stream, capacity) = (&gpu.queue, &gpu.stream, weights.capacity());
    let image = adapter.plan(weights.model(), DType::F32).unwrap();
    let (from, mut to) = (stream.clone_htod(&[3.0_f32; LEN]).unwrap(), stream.alloc_zeros::<f32>(LEN).unwrap());
    let mut ys = [(); 2].map(|()| Buffer::<f32>::zeros(queue, y.len()).unwrap());
    let mut other_routing = Routing::new(queue, capacity, 4).unwrap();
    let mut other_workspace = Workspace::new(weights).unwrap();
    let mut allocated = None;
    let mut captured_within = None;
    let read = |buffer: &Buffer<f32>| {
        let mut values = vec![f32::NAN; buffer.len()];
        buffer.read(&mut values).unwrap();
        values
    };
    let record = |step: &mut Step<'_>| -> Result<(), LaunchError> {
        stream.memcpy_dtod(&from, &mut to)?;
        assert!(stream.clone_dtoh(&to)?.iter().all(|&value| value == 3.0));
        allocated = Some(stream.alloc_zeros::<f32>(LEN)?);
        let slot = weights.load(1, &image).unwrap();
        drop(WeightTable::new(queue, weights.model(), DType::F32, capacity, 1 << 16)?);
        queue.copy(&from, &mut to)?;

        let [eager, recorded] = &mut ys;
        let mut graph = weights
            .capture(&other_routing, TOKENS, &mut other_workspace, |step| add_deltas(layers, 64, step, x, recorded))?;
        let batch = other_routing.update(&Batch::new(&[slot; TOKENS]))?;
        let mut other = weights.step(&batch, &mut other_workspace)?;
        add_deltas(layers, 64, &mut other, x, eager)?;
        graph.replay(&mut other)?;
        assert!(read(eager).iter().chain(&read(recorded)).all(|&value| value == 5.0));
        captured_within = Some(graph);
        add_deltas(layers, 64, step, x, y)
    };
    let mut graph = weights.capture(routing, TOKENS, workspace, record).unwrap();
    drop((from, to));
    let allocated = Buffer::from_slice(queue, allocated.unwrap()).unwrap();
    assert!(read(&allocated).iter().all(|&value| value == 0.0));
    assert!(read(y).iter().all(|&value| value == 0.0));
    assert_eq!(setup.replay(&mut graph, &[0; TOKENS]), [4.0; TOKENS]);
    assert_eq!(setup.replay(&mut graph, &[1; TOKENS]), [5.0; TOKENS]);
    assert!(read(&ys[0]).iter().all(|&value| value == 5.0));
    let slots = slots_of(&setup.weights, &[1; TOKENS]);
    let batch = other_routing.update(&Batch::new(&slots)).unwrap();
    captured_within.unwrap().replay(&mut setup.weights.step(&batch, &mut other_workspace).unwrap()).unwrap();
    assert!(read(&ys[1]).iter().all(|&value| value == 10.0));
    setup.gpu.context.check_err().unwrap();
}

/// A capture of work that is none of its step's has captured nothing.
#[test]
#[ignore = "needs a GPU"]
fn foreign_work_alone_is_not_captured() {
    let mut setup = Setup::new(1, 64, 1 << 20);
    let stream = Arc::clone(&setup.gpu.stream);
    let (from, mut to) = (stream.clone_htod(&[1.0_f32; 64]).unwrap(), stream.alloc_zeros::<f32>(64).unwrap());
    let error = capture(&mut setup, &mut |step| Ok(step.queue().stream().memcpy_dtod(&from, &mut to)?));
    assert!(matches!(error, LaunchError::NothingCaptured), "{error}");
    assert_eq!(stream.clone_dtoh(&to).unwrap(), [1.0; 64]);
    let error = capture(&mut setup, &mut |step| {
        step.queue().stream().alloc_zeros::<f32>(64)?;
        Ok(())
    });
    assert!(matches!(error, LaunchError::NothingCaptured), "{error}");
    setup.gpu.context.check_err().unwrap();
}

/// The engine's own kernels are captured on the stream of the raw step, which has the priority of the queue's.
#[test]
#[ignore = "needs a GPU"]
fn the_stream_of_the_raw_step_captures() {
    let mut gpu = Gpu::new();
    let (_, highest) = result::stream::get_priority_range().unwrap();
    let raw = result::stream::create_with_priority(result::stream::StreamKind::NonBlocking, highest).unwrap();
    // SAFETY: created in this context and never destroyed.
    gpu.stream = unsafe { gpu.context.wrap_borrowed_stream(raw) };
    gpu.queue = Queue::new(&gpu.kernels, &gpu.stream).unwrap();
    let mut setup = Setup::on(gpu, 1, 64, 1 << 20);
    setup.load(0, 2, 4.0).unwrap();
    let Setup { weights, layers, routing, workspace, x, y, .. } = &mut setup;
    let bytes = y.len() * size_of::<f32>();
    let record = |step: &mut Step<'_>| -> Result<(), LaunchError> {
        let stream = step.raw().stream().as_raw().cast();
        let mut priority = 0;
        // SAFETY: the capture is open, and the pointer is valid for the call.
        unsafe { cuStreamGetPriority(stream, &raw mut priority) }.result()?;
        assert_eq!(priority, highest);
        // SAFETY: the graph keeps the buffer, because the next operation has it.
        unsafe { result::memset_d8_async(y.device_ptr(), 0, bytes, stream) }?;
        add_deltas(layers, 64, step, x, y)
    };
    let mut graph = weights.capture(routing, TOKENS, workspace, record).unwrap();
    y.write(&vec![7.0; y.len()]).unwrap();
    let slots = slots_of(weights, &[0; TOKENS]);
    let batch = routing.update(&Batch::new(&slots)).unwrap();
    let mut step = weights.step(&batch, workspace).unwrap();
    for _ in 0..2 {
        graph.replay(&mut step).unwrap();
    }
    assert_eq!(setup.added(), [4.0; TOKENS]);
}

/// The default stream cannot be captured, and need not be.
#[test]
#[ignore = "needs a GPU"]
fn a_queue_of_the_default_stream_captures() {
    let mut gpu = Gpu::new();
    gpu.stream = gpu.context.default_stream();
    gpu.queue = Queue::new(&gpu.kernels, &gpu.stream).unwrap();
    let mut setup = Setup::on(gpu, 2, 64, 1 << 20);
    setup.load(0, 2, 4.0).unwrap();
    let mut graph = setup.capture();
    assert_eq!(setup.replay(&mut graph, &[0; TOKENS]), [4.0; TOKENS]);
}

/// Threads capture and replay on one queue and one table at once, while others read and make tables there without a
/// pause. No capture waits for them, and none has anything of the others.
#[test]
#[ignore = "needs a GPU"]
fn captures_wait_for_no_thread() {
    const CAPTURES: usize = 50;
    let setup = Setup::new(1, 64, 1 << 20);
    setup.load(0, 2, 4.0).unwrap();
    let (queue, weights, layers, x) = (&setup.gpu.queue, &setup.weights, &setup.layers, &setup.x);
    let is_done = AtomicBool::new(false);
    thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                let buffer = Buffer::<f32>::zeros(queue, 1 << 20).unwrap();
                let mut values = vec![f32::NAN; buffer.len()];
                while !is_done.load(Ordering::Relaxed) {
                    buffer.read(&mut values).unwrap();
                    drop(WeightTable::new(queue, weights.model(), DType::F32, weights.capacity(), 1 << 16).unwrap());
                }
            });
        }
        let capture = || {
            let mut routing = Routing::new(queue, weights.capacity(), 1).unwrap();
            let mut workspace = Workspace::new(weights).unwrap();
            let mut y = Buffer::<f32>::zeros(queue, TOKENS * 64).unwrap();
            for number in 1..=CAPTURES {
                let record = |step: &mut Step<'_>| add_deltas(layers, 64, step, x, &mut y);
                let mut graph = weights.capture(&routing, TOKENS, &mut workspace, record).unwrap();
                routing.wait().unwrap();
                let slots = slots_of(weights, &[0; TOKENS]);
                let batch = routing.update(&Batch::new(&slots)).unwrap();
                graph.replay(&mut weights.step(&batch, &mut workspace).unwrap()).unwrap();
                let mut values = vec![f32::NAN; y.len()];
                y.read(&mut values).unwrap();
                assert!(values.iter().all(|&value| value == 4.0 * number as f32), "capture {number}: {values:?}");
            }
        };
        let capturing = [(); 3].map(|()| threads.spawn(capture));
        let captured = capturing.map(|thread| thread.join());
        is_done.store(true, Ordering::Relaxed);
        captured.into_iter().for_each(|thread| thread.unwrap());
    });
    setup.gpu.context.check_err().unwrap();
}

/// An operand of cudarc belongs to the queue's own stream: cudarc has one event for all reads of a slice, so that
/// whoever writes or frees it after reads on two streams waits for the last one alone.
#[test]
#[ignore = "needs a GPU"]
fn a_slice_is_an_operand_of_its_own_stream_alone() {
    fn is_refused(result: Result<(), LaunchError>, operand: &'static str) {
        assert_eq!(refused(result), Stream(operand));
    }
    let mut setup = Setup::new(1, 64, 1 << 20);
    setup.load(0, 2, 4.0).unwrap();
    let other = Gpu::in_context(Arc::clone(&setup.gpu.context));
    let Setup { gpu, weights, layers, routing, workspace, y, .. } = &mut setup;
    let slice = |stream: &Arc<CudaStream>| stream.clone_htod(&[1.0_f32; TOKENS * 64]).unwrap();
    let (x, mut elsewhere) = (slice(&gpu.stream), slice(&other.stream));
    let ids: CudaSlice<i32> = other.stream.alloc_zeros(TOKENS).unwrap();
    let mut there = Buffer::<f32>::zeros(&other.queue, TOKENS * 64).unwrap();

    is_refused(other.queue.copy(&x, &mut there), "from");
    is_refused(other.queue.copy(x.slice(1..), &mut there), "from");
    is_refused(gpu.queue.copy(&x, &mut elsewhere), "to");
    other.queue.copy(&elsewhere, &mut there).unwrap();
    is_refused(routing.update_on_device(&ids, None).map(drop), "token_slots");
    let slots = slots_of(weights, &[0; TOKENS]);
    let batch = routing.update(&Batch::new(&slots)).unwrap();
    let mut step = weights.step(&batch, workspace).unwrap();
    is_refused(step.copy(&elsewhere, y.slice_mut(0..TOKENS * 64)), "from");
    let mut add = |x: &CudaSlice<f32>| {
        layers[0].add_delta(&mut step, Matrix::new(x, TOKENS, 64)?, MatrixMut::new(&mut *y, TOKENS, 64)?)
    };
    is_refused(add(&elsewhere), "x");
    add(&x).unwrap();
    is_refused(Buffer::from_slice(&other.queue, x).map(drop), "the slice");
    assert_eq!(setup.added(), [4.0; TOKENS]);
}

/// The capture of another stream does not reach the queue through the events of cudarc's memory, for which the queue's
/// stream would wait.
#[test]
#[ignore = "needs a GPU"]
fn a_foreign_capture_does_not_spread_by_events() {
    const CALLS: usize = 4;
    let mut setup = Setup::new(1, 64, 1 << 20);
    setup.load(0, 2, 4.0).unwrap();
    let Setup { gpu, weights, layers, routing, workspace, .. } = &mut setup;
    // Their events are not recorded before the context has a stream of `new_stream`: the capture need not wait for
    // them.
    let slice = |len: usize| gpu.stream.clone_htod(&vec![1.0_f32; len]).unwrap();
    let (from, ids) = (slice(TOKENS * 64), gpu.stream.alloc_zeros::<i32>(TOKENS).unwrap());
    let mut captured = [(); CALLS].map(|()| (slice(TOKENS * 64), slice(TOKENS)));
    let mut buffer = Buffer::<f32>::zeros(&gpu.queue, TOKENS * 64).unwrap();
    let mut other_routing = Routing::new(&gpu.queue, weights.capacity(), 2).unwrap();
    gpu.synchronize();
    let foreign = gpu.context.new_stream().unwrap();
    let slots = slots_of(weights, &[0; TOKENS]);
    let batch = routing.update(&Batch::new(&slots)).unwrap();
    let mut step = weights.step(&batch, workspace).unwrap();
    for (call, (to, scales)) in captured.iter_mut().enumerate() {
        foreign.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        foreign.memset_zeros(to).unwrap();
        foreign.memset_zeros(scales).unwrap();
        let (to, scales) = (&*to, &*scales);
        let result = match call {
            0 => gpu.queue.copy(to, &mut buffer),
            1 => step.copy(to, &mut buffer),
            2 => MatrixMut::new(&mut buffer, TOKENS, 64)
                .and_then(|y| layers[0].add_delta(&mut step, Matrix::new(to, TOKENS, 64)?, y)),
            _ => other_routing.update_on_device(&ids, Some(scales.into())).map(drop),
        };
        // Fails if the queue's stream, which has become a part of the capture, does not end in it.
        drop(foreign.end_capture(FLAGS));
        assert!(matches!(result, Err(LaunchError::Capturing)), "{call}: {result:?}");
        assert_eq!(gpu.stream.capture_status().unwrap(), CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
    }
    step.copy(&from, &mut buffer).unwrap();
    let mut values = vec![f32::NAN; buffer.len()];
    buffer.read(&mut values).unwrap();
    assert!(values.iter().all(|&value| value == 1.0), "{values:?}");
    // To free them, cudarc would wait for events of captures that are gone.
    std::mem::forget(captured);
}

/// Parts of a view have its elements, and end with it.
#[test]
#[ignore = "needs a GPU"]
fn parts_of_views_are_within_them() {
    let gpu = Gpu::new();
    let (queue, values) = (&gpu.queue, [1.0_f32, 2.0, 3.0, 4.0, 5.0]);
    let slice = gpu.stream.clone_htod(&values).unwrap();
    let mut buffer = Buffer::<f32>::zeros(queue, 5).unwrap();
    buffer.write(&values).unwrap();
    let shared = Arc::new(buffer);
    let mut to = Buffer::<f32>::zeros(queue, 2).unwrap();
    for view in [View::from(&slice), View::from(&*shared), View::from(Arc::clone(&shared)), shared.slice(0..5)] {
        queue.copy(view.slice(1..5).slice(1..3), &mut to).unwrap();
        let mut got = [0.0; 2];
        to.read(&mut got).unwrap();
        assert_eq!(got, [3.0, 4.0]);
        for range in [4..6, Range { start: 2, end: 1 }] {
            assert!(catch_unwind(AssertUnwindSafe(|| drop(view.slice(1..5).slice(range)))).is_err());
        }
    }
}

/// A captured step refuses operands that do not fit, as an eager one does, and the capture may go on.
#[test]
#[ignore = "needs a GPU"]
fn a_captured_step_goes_on_behind_a_refusal() {
    let mut setup = Setup::new(2, 64, 1 << 20);
    setup.load(0, 2, 4.0).unwrap();
    let Setup { weights, layers, routing, workspace, x, y, .. } = &mut setup;
    let mut graph = weights
        .capture(routing, TOKENS, workspace, |step| {
            assert!(step.is_captured());
            let wide = Matrix::<f32>::new(&*x, TOKENS / 2, 2 * 64)?;
            let target = MatrixMut::new(y.slice_mut(0..TOKENS * 64), TOKENS, 64)?;
            let error = layers[0].add_delta(step, wide, target).unwrap_err();
            assert!(matches!(error, LaunchError::Operand(_)), "{error}");
            add_deltas(layers, 64, step, x, y)
        })
        .unwrap();
    assert_eq!(setup.replay(&mut graph, &[0; TOKENS]), [4.0; TOKENS]);
}

/// A replay is refused in a step that has other objects or more tokens than the captured one, or is being captured
/// itself. Nothing is enqueued then.
#[test]
#[ignore = "needs a GPU"]
fn a_graph_is_replayed_in_steps_like_its_own_alone() {
    const ROWS: usize = TOKENS / 2;
    let mut setup = Setup::new(2, 64, 1 << 20);
    setup.load(0, 2, 4.0).unwrap();
    let Setup { gpu, weights, layers, routing, workspace, x, y, .. } = &mut setup;
    let (queue, capacity) = (&gpu.queue, weights.capacity());
    let mut graph = weights.capture(routing, ROWS, workspace, |step| add_deltas(layers, 64, step, x, y)).unwrap();
    y.write(&vec![7.0; y.len()]).unwrap();

    let mut other_weights = WeightTable::new(queue, weights.model(), DType::F32, capacity, 1 << 16).unwrap();
    let mut other_routing = Routing::new(queue, capacity, 1).unwrap();
    let mut other_workspace = Workspace::new(weights).unwrap();
    let mut replay = |weights: &WeightTable, routing: &mut Routing, workspace: &mut Workspace, tokens: usize| {
        routing.wait().unwrap();
        let slots = slots_of(weights, &[0; TOKENS]);
        let batch = routing.update(&Batch::new(&slots[..tokens])).unwrap();
        graph.replay(&mut weights.step(&batch, workspace).unwrap())
    };
    let is_other = |error: LaunchError, other: &str| {
        assert!(matches!(error, LaunchError::OtherGraph { what } if what == other), "{other}: {error}");
    };
    is_other(replay(&other_weights, routing, workspace, ROWS).unwrap_err(), "table");
    is_other(replay(weights, &mut other_routing, workspace, ROWS).unwrap_err(), "routing");
    is_other(replay(weights, routing, &mut other_workspace, ROWS).unwrap_err(), "workspace");
    assert_eq!(beyond(replay(weights, routing, workspace, ROWS + 1)), [ROWS + 1, ROWS]);

    let ids = Buffer::from_slice(queue, gpu.stream.clone_htod(&[0_i32; TOKENS]).unwrap()).unwrap();
    let batch = routing.update_on_device(ids.slice(0..ROWS + 1), None).unwrap();
    assert_eq!(beyond(graph.replay(&mut weights.step(&batch, workspace).unwrap())), [ROWS + 1, ROWS]);

    let within = other_weights.capture::<LaunchError>(&other_routing, ROWS, &mut other_workspace, |step| {
        let error = graph.replay(step).unwrap_err();
        assert!(matches!(error, LaunchError::CapturedReplay), "{error}");
        Ok(())
    });
    assert!(matches!(within, Err(LaunchError::NothingCaptured)), "{within:?}");

    let elsewhere = Gpu::in_context(gpu.context.clone()).queue;
    other_weights = WeightTable::new(&elsewhere, weights.model(), DType::F32, capacity, 1 << 16).unwrap();
    other_routing = Routing::new(&elsewhere, capacity, 1).unwrap();
    other_workspace = Workspace::new(&other_weights).unwrap();
    let batch = other_routing.update(&Batch::new(&[Slot::BASE; ROWS])).unwrap();
    let replayed = graph.replay(&mut other_weights.step(&batch, &mut other_workspace).unwrap());
    assert_eq!(refused(replayed), Stream("the graph"));

    let mut got = vec![0.0; y.len()];
    y.read(&mut got).unwrap();
    assert!(got.iter().all(|&y| y == 7.0));
    let batch = routing.update_on_device(ids.slice(0..ROWS), None).unwrap();
    graph.replay(&mut weights.step(&batch, workspace).unwrap()).unwrap();
    y.read(&mut got).unwrap();
    // The rows of the graph alone, in both layers.
    let expected = |row: usize| if row % TOKENS < ROWS { 11.0 } else { 7.0 };
    assert!(got.chunks(64).enumerate().all(|(row, values)| values.iter().all(|&y| y == expected(row))));
}

/// A graph without adapters has no shrink, serves base rows alone, and is refused for other batches.
#[test]
#[ignore = "needs a GPU"]
fn a_graph_without_adapters_serves_no_other_batch() {
    const FEATURES: usize = 8;
    let gpu = Gpu::new();
    let queue = &gpu.queue;
    let mut spec = ModelSpec::new();
    let gate_up = Linear::new("m", Parallel::Replicated, 8).slice("gate", FEATURES).slice("up", FEATURES);
    let id = spec.linear(gate_up).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(TOKENS).slots(2).rank(8);
    let weights = WeightTable::new(queue, &model, DType::F32, capacity, 1 << 16).unwrap();
    let layer = LoraLinear::new(&weights, id).unwrap();
    let (mut routing, mut workspace) = (Routing::new(queue, capacity, 2).unwrap(), Workspace::new(&weights).unwrap());
    let (x, mut y) =
        (Buffer::<f32>::zeros(queue, TOKENS * 8).unwrap(), Buffer::<f32>::zeros(queue, TOKENS * 2 * FEATURES).unwrap());
    let mut out = Buffer::<f32>::zeros(queue, TOKENS * FEATURES).unwrap();
    y.write(&vec![1.0; y.len()]).unwrap();
    let x = || Matrix::<f32>::new(&x, TOKENS, 8).unwrap();
    // Only the activation is recorded.
    let nothing = weights.capture_without_adapters::<LaunchError>(&routing, TOKENS, &mut workspace, |step| {
        assert!(!step.has_adapters());
        layer.shrink(step, x()).map(drop)
    });
    assert!(matches!(nothing, Err(LaunchError::NothingCaptured)), "{nothing:?}");
    let record = |step: &mut Step<'_>| -> Result<(), LaunchError> {
        let (y, out) = (Matrix::new(&y, TOKENS, 2 * FEATURES)?, MatrixMut::new(&mut out, TOKENS, FEATURES)?);
        layer.shrink(step, x())?.silu_mul(y, out)
    };
    let mut graph = weights.capture_without_adapters(&routing, TOKENS, &mut workspace, record).unwrap();
    let read = |out: &Buffer<f32>| {
        let mut values = vec![0.0; out.len()];
        out.read(&mut values).unwrap();
        values
    };

    let mut slots = [Slot::BASE; TOKENS];
    slots[3] = load(&weights, 1, &[Lora::linear("m.gate", 8, FEATURES, 1)]);
    let batch = routing.update(&Batch::new(&slots)).unwrap();
    let error = graph.replay(&mut weights.step(&batch, &mut workspace).unwrap()).unwrap_err();
    assert!(matches!(error, LaunchError::WithoutAdapters), "{error}");
    let ids = Buffer::<i32>::zeros(queue, TOKENS).unwrap();
    let batch = routing.update_on_device(&ids, None).unwrap();
    let error = graph.replay(&mut weights.step(&batch, &mut workspace).unwrap()).unwrap_err();
    assert!(matches!(error, LaunchError::WithoutAdapters), "{error}");
    assert_eq!(read(&out), [0.0; TOKENS * FEATURES]);

    let batch = routing.update(&Batch::new(&[Slot::BASE; TOKENS])).unwrap();
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    graph.replay(&mut step).unwrap();
    let captured = read(&out);
    assert!(captured.iter().all(|value| (value - 0.731_058_6).abs() < 1e-6), "{captured:?}");
    let target = MatrixMut::new(&mut out, TOKENS, FEATURES).unwrap();
    let y = Matrix::new(&y, TOKENS, 2 * FEATURES).unwrap();
    layer.shrink(&mut step, x()).unwrap().silu_mul(y, target).unwrap();
    assert_eq!(read(&out), captured);
}

/// A copy is an operation of a step: a graph records it, keeps both operands, and runs it between the others.
#[test]
#[ignore = "needs a GPU"]
fn copies_of_a_step_are_captured() {
    const LEN: usize = TOKENS * 64;
    let mut setup = Setup::new(1, 64, 1 << 20);
    setup.load(0, 2, 4.0).unwrap();
    let Setup { gpu, weights, layers, routing, workspace, x, y, .. } = &mut setup;
    let queue = &gpu.queue;
    let [mut residual, mut copy] = [(); 2].map(|()| Buffer::<f32>::zeros(queue, LEN + 1).unwrap());
    residual.write(&[7.0; LEN + 1]).unwrap();
    let slice = gpu.stream.clone_htod(&[1.0_f32; LEN]).unwrap();
    let mut graph = weights
        .capture(routing, TOKENS, workspace, |step| -> Result<(), LaunchError> {
            assert_eq!(refused(step.copy(&slice, y.slice_mut(0..LEN))), NotKept("from"));
            assert_eq!(beyond(step.copy(&residual, y.slice_mut(0..LEN)))[1], LEN);
            step.copy(residual.slice(0..LEN), y.slice_mut(0..LEN))?;
            add_deltas(layers, 64, step, x, y)?;
            step.copy(y.slice(0..LEN), &mut copy)
        })
        .unwrap();
    drop(residual);
    let others: Vec<_> = (0..32).map(|_| Buffer::<f32>::zeros(queue, LEN + 1).unwrap()).collect();
    let slots = slots_of(weights, &[0; TOKENS]);
    let batch = routing.update(&Batch::new(&slots)).unwrap();
    let mut step = weights.step(&batch, workspace).unwrap();
    let mut got = vec![f32::NAN; LEN + 1];
    for _ in 0..2 {
        graph.replay(&mut step).unwrap();
        copy.read(&mut got).unwrap();
        assert!(got[..LEN].iter().all(|&value| value == 11.0) && got[LEN] == 0.0, "{got:?}");
    }
    drop(others);

    let mut taken = gpu.stream.clone_htod(&[0.0_f32; LEN]).unwrap();
    step.copy(copy.slice(0..LEN), &mut taken).unwrap();
    assert_eq!(gpu.stream.clone_dtoh(&taken).unwrap(), [11.0; LEN]);
}

/// Borrowed memory is refused by the operand's name, because a graph could not keep it alive.
#[test]
#[ignore = "needs a GPU"]
fn borrowed_operands_are_not_captured() {
    let mut setup = Setup::new(1, 64, 1 << 20);
    let slice = setup.gpu.stream.clone_htod(&[1.0_f32; TOKENS * 64]).unwrap();
    let mut target = setup.gpu.stream.clone_htod(&[7.0_f32; TOKENS * 64]).unwrap();
    let buffer = Buffer::<f32>::zeros(&setup.gpu.queue, TOKENS * 64).unwrap();
    let mut kept = Buffer::<f32>::zeros(&setup.gpu.queue, TOKENS * 64).unwrap();
    let layer = setup.layers[0].clone();
    let mut borrowed = |operand, record: Record<'_>| {
        assert_eq!(refused(Err::<(), _>(capture(&mut setup, record))), NotKept(operand));
    };
    borrowed("x", &mut |step| {
        layer.add_delta(step, Matrix::new(&slice, TOKENS, 64)?, MatrixMut::new(&mut kept, TOKENS, 64)?)
    });
    borrowed("y", &mut |step| {
        layer.add_delta(step, Matrix::new(&buffer, TOKENS, 64)?, MatrixMut::new(&mut target, TOKENS, 64)?)
    });
    borrowed("x", &mut |step| layer.shrink(step, Matrix::new(&slice, TOKENS, 64)?).map(drop));
    borrowed("y", &mut |step| {
        layer.write_delta(step, Matrix::new(&buffer, TOKENS, 64)?, MatrixMut::new(target.as_view_mut(), TOKENS, 64)?)
    });
    assert_eq!(setup.gpu.stream.clone_dtoh(&target).unwrap(), [7.0; TOKENS * 64]);
}

#[test]
#[ignore = "needs a GPU"]
fn borrowed_operands_of_other_layers_are_not_captured() {
    let gpu = Gpu::new();
    let (queue, stream) = (&gpu.queue, &gpu.stream);
    let mut spec = ModelSpec::new();
    let embedding = spec.embedding("embed", 10, 64).unwrap();
    let experts = spec.experts(Experts::new("m", 2, 8, 8).top_k(2)).unwrap();
    let gate_up = Linear::new("gate_up", Parallel::Replicated, 8).slice("gate", 8).slice("up", 8);
    let gate_up = spec.linear(gate_up).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(1).slots(1).rank(4);
    let weights = WeightTable::new(queue, &model, DType::F32, capacity, 1 << 12).unwrap();
    let embedding = LoraEmbedding::new(&weights, embedding).unwrap();
    let experts = LoraExperts::new(&weights, experts).unwrap();
    let gate_up = LoraLinear::new(&weights, gate_up).unwrap();
    let routing = Routing::new(queue, capacity, 1).unwrap();
    let mut workspace = Workspace::new(&weights).unwrap();
    let mut grouping = Grouping::new(queue, RouteCapacity::tokens(1).top_k(2).experts(2)).unwrap();
    let (ids, kept_ids) = (stream.clone_htod(&[0_i32, 1]).unwrap(), Buffer::<i32>::zeros(queue, 2).unwrap());
    let (values, kept) = (stream.clone_htod(&[1.0_f32; 64]).unwrap(), Buffer::<f32>::zeros(queue, 64).unwrap());
    let (mut target, mut kept_target) =
        (stream.clone_htod(&[7.0_f32; 64]).unwrap(), Buffer::<f32>::zeros(queue, 64).unwrap());
    let mut borrowed = |operand, record: Record<'_>| {
        assert_eq!(refused(weights.capture(&routing, 1, &mut workspace, record)), NotKept(operand));
    };
    borrowed("token_ids", &mut |step| {
        embedding.add_delta(step, ids.slice(..1), MatrixMut::new(kept_target.slice_mut(0..64), 1, 64)?)
    });
    borrowed("y", &mut |step| embedding.add_delta(step, kept_ids.slice(0..1), MatrixMut::new(&mut target, 1, 64)?));
    let x = || Matrix::new(kept.slice(0..8), 1, 8);
    borrowed("y", &mut |step| {
        gate_up.shrink(step, x()?)?.silu_mul(Matrix::new(&values, 1, 16)?, MatrixMut::new(&mut kept_target, 1, 8)?)
    });
    borrowed("out", &mut |step| {
        let y = Matrix::new(kept.slice(0..16), 1, 16)?;
        gate_up.shrink(step, x()?)?.silu_mul(y, MatrixMut::new(&mut target, 1, 8)?)
    });
    borrowed("ids", &mut |step| grouping.update(step, TopK::new(&ids, 2)?).map(drop));
    borrowed("weights", &mut |step| {
        grouping.update(step, TopK::new(&kept_ids, 2)?.with_weights(values.slice(..2))?).map(drop)
    });
    borrowed("rows", &mut |step| grouping.update(step, TopK::new(&kept_ids, 2)?.with_rows(&ids)?).map(drop));
    for op in OPERATIONS {
        let [x, y, [rows, cols]] = shapes(op, [8, 8], [1, 2]);
        let kept_matrix = |[rows, cols]: [usize; 2]| Matrix::new(kept.slice(0..rows * cols), rows, cols);
        let outside = |[rows, cols]: [usize; 2]| Matrix::new(&values, rows, cols);
        borrowed("x", &mut |step| {
            let mut routes = grouping.update(step, TopK::new(&kept_ids, 2)?)?;
            let target = MatrixMut::new(&mut kept_target, rows, cols)?;
            launch(&experts, op, step, &mut routes, [outside(x)?, kept_matrix(y)?], target)
        });
        if op.has_out() {
            borrowed("y", &mut |step| {
                let mut routes = grouping.update(step, TopK::new(&kept_ids, 2)?)?;
                let target = MatrixMut::new(&mut kept_target, rows, cols)?;
                launch(&experts, op, step, &mut routes, [kept_matrix(x)?, outside(y)?], target)
            });
        }
        borrowed(if op.has_out() { "out" } else { "y" }, &mut |step| {
            let mut routes = grouping.update(step, TopK::new(&kept_ids, 2)?)?;
            let target = MatrixMut::new(&mut target, rows, cols)?;
            launch(&experts, op, step, &mut routes, [kept_matrix(x)?, kept_matrix(y)?], target)
        });
    }
    assert_eq!(stream.clone_dtoh(&target).unwrap(), [7.0; 64]);
}

/// Calls that enqueue, allocate or copy on a stream that cudarc is capturing are refused. The capture continues.
#[test]
#[ignore = "needs a GPU"]
fn a_stream_that_somebody_else_captures_is_left_alone() {
    let gpu = Gpu::new();
    let (queue, stream) = (&gpu.queue, &gpu.stream);
    let mut spec = ModelSpec::new();
    let linear = spec.linear(Linear::new("layers.0", Parallel::Replicated, 64).slice("m", 64)).unwrap();
    let embedding = spec.embedding("embed", 10, 64).unwrap();
    let experts = spec.experts(Experts::new("m", 2, 8, 8).top_k(2)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(1).slots(2).rank(4);
    let weights = WeightTable::new(queue, &model, DType::F32, capacity, 1 << 16).unwrap();
    let (linear, embedding) =
        (LoraLinear::new(&weights, linear).unwrap(), LoraEmbedding::new(&weights, embedding).unwrap());
    let experts = LoraExperts::new(&weights, experts).unwrap();
    let routes = RouteCapacity::tokens(1).top_k(2).experts(2);
    let [mut workspace, mut of_step, mut captured_workspace] =
        [&weights; 3].map(|weights| Workspace::new(weights).unwrap());
    let [mut routing, mut of_batch, mut captured] = [queue; 3].map(|queue| Routing::new(queue, capacity, 2).unwrap());
    let [mut grouping, mut of_routes] = [queue; 2].map(|queue| Grouping::new(queue, routes).unwrap());
    let ids = Buffer::<i32>::zeros(queue, 2).unwrap();
    let (mut values, mut target) = (Buffer::<f32>::zeros(queue, 64).unwrap(), Buffer::<f32>::zeros(queue, 64).unwrap());
    let mut pinned = PinnedBuffer::<f32>::zeros(queue, 64).unwrap();
    let adapter = adding::adapter(1, 64, 2, 5.0);
    let image = adapter.plan(&model, DType::F32).unwrap();
    let slots = [weights.load(0, &image).unwrap()];
    let top_k = || TopK::new(&ids, 2).unwrap();
    fn y(target: &mut Buffer<f32>) -> MatrixMut<'_, f32> {
        MatrixMut::new(target, 1, 64).unwrap()
    }
    let x = || Matrix::<f32>::new(&values, 1, 64).unwrap();
    let record = |step: &mut Step<'_>| linear.add_delta(step, x(), y(&mut target));
    let mut graph = weights.capture(&captured, 1, &mut captured_workspace, record).unwrap();
    let batch = of_batch.update(&Batch::new(&slots)).unwrap();
    let mut step = weights.step(&batch, &mut of_step).unwrap();
    let mut grouped = of_routes.update(&mut step, top_k()).unwrap();
    let replayed = captured.update(&Batch::new(&slots)).unwrap();
    let mut of_graph = weights.step(&replayed, &mut captured_workspace).unwrap();
    gpu.synchronize();

    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let mut launches: Vec<(&str, Result<(), LaunchError>)> = vec![
        ("Routing::update", routing.update(&Batch::new(&slots)).map(drop)),
        ("Routing::update_on_device", routing.update_on_device(ids.slice(0..1), None).map(drop)),
        ("Routing::new", Routing::new(queue, capacity, 1).map(drop)),
        ("Workspace::new", Workspace::new(&weights).map(drop)),
        ("Workspace::with_bytes", Workspace::with_bytes(queue, WorkspaceBytes::default()).map(drop)),
        ("WeightTable::new", WeightTable::new(queue, &model, DType::F32, capacity, 1 << 12).map(drop)),
        ("WeightTable::step", weights.step(&batch, &mut workspace).map(drop)),
        ("Graph::replay", graph.replay(&mut of_graph)),
        ("Grouping::new", Grouping::new(queue, routes).map(drop)),
        ("Grouping::update", grouping.update(&mut step, top_k()).map(drop)),
        ("Buffer::zeros", Buffer::<f32>::zeros(queue, 64).map(drop)),
        ("Buffer::write", target.write(&[9.0; 64])),
        ("Buffer::read", target.read(&mut [0.0; 64])),
        ("Buffer::enqueue_write", target.enqueue_write(&mut pinned, 64)),
        ("Buffer::enqueue_read", target.enqueue_read(&mut pinned, 64)),
        ("Queue::copy", queue.copy(&values, &mut target)),
        ("LoraLinear::add_delta", linear.add_delta(&mut step, x(), y(&mut target))),
        ("LoraLinear::write_delta", linear.write_delta(&mut step, x(), y(&mut target))),
        ("LoraLinear::shrink", linear.shrink(&mut step, x()).map(drop)),
        ("LoraEmbedding::add_delta", embedding.add_delta(&mut step, ids.slice(0..1), y(&mut target))),
    ];
    for op in OPERATIONS {
        let [x, y, [rows, cols]] = shapes(op, [8, 8], [1, 2]);
        let inputs = [x, y].map(|[rows, cols]| Matrix::<f32>::new(&values, rows, cols).unwrap());
        let target = MatrixMut::new(&mut target, rows, cols).unwrap();
        launches.push(("LoraExperts", launch(&experts, op, &mut step, &mut grouped, inputs, target)));
    }
    // A reservation may be made and filled during the capture, but not committed.
    let filled = thread::scope(|threads| {
        let fill = || weights.reserve(&image).unwrap().fill(&image, &mut Staging::new(queue).unwrap()).unwrap();
        threads.spawn(fill).join().unwrap()
    });
    // A capture of aril has its own stream.
    let record = |step: &mut Step<'_>| linear.add_delta(step, x(), y(&mut target));
    let beside = weights.capture(&routing, 1, &mut workspace, record).map(drop);
    let loads = [
        ("WeightTable::load", weights.load(1, &image).map(drop)),
        ("WeightTable::unload", weights.unload(0)),
        ("WeightTable::commit", weights.commit(1, filled).map(drop)),
    ];
    let captured = stream.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
    captured.expect("the capture was disturbed");
    beside.unwrap();
    for (name, result) in launches {
        assert!(matches!(result, Err(LaunchError::Capturing)), "{name}: {result:?}");
    }
    for (name, result) in loads {
        assert!(matches!(result, Err(LoadError::Device(LaunchError::Capturing))), "{name}: {result:?}");
    }

    // The table is as before, and all of it still works.
    weights.check(slots).unwrap();
    assert!(weights.get(1).is_none());
    assert_eq!(weights.usage().used, weights.loaded()[0].bytes);
    values.write(&[1.0; 64]).unwrap();
    linear.add_delta(&mut step, Matrix::<f32>::new(&values, 1, 64).unwrap(), y(&mut target)).unwrap();
    let mut got = [0.0; 64];
    target.read(&mut got).unwrap();
    assert_eq!(got, [5.0; 64]);
    graph.replay(&mut of_graph).unwrap();
    target.read(&mut got).unwrap();
    assert_eq!(got, [10.0; 64]);
    weights.load(1, &image).unwrap();
    weights.unload(0).unwrap();
    assert!(weights.check(slots).is_err());
}

/// The modes in which an engine may itself capture the queue's stream.
const MODES: [CUstreamCaptureMode; 2] =
    [CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL];

/// Runs `act` while the stream is captured. It must not disturb the capture.
fn while_captured(gpu: &Gpu, mode: CUstreamCaptureMode, act: impl FnOnce()) {
    gpu.stream.begin_capture(mode).unwrap();
    act();
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    gpu.stream.end_capture(flags).expect("the capture was disturbed");
}

/// The thread that captures may load during the capture, up to the commit.
#[test]
#[ignore = "needs a GPU"]
fn the_thread_that_captures_reserves_and_fills() {
    let mut setup = Setup::new(2, 64, 1 << 20);
    setup.load(0, 2, 4.0).unwrap();
    let adapters = [6.0, 7.0, 8.0].map(|value| setup.adapter(8, value));
    let images = adapters.each_ref().map(|adapter| adapter.plan(setup.model(), DType::F32).unwrap());
    let Setup { gpu, weights, layers, routing, workspace, x, y, .. } = &mut setup;
    let mut staging = Staging::new(&gpu.queue).unwrap();
    let mut fill = |image| {
        // Freed memory, whose last use is queried.
        let filled = weights.reserve(image).unwrap().fill(image, &mut staging).unwrap();
        drop(weights.reserve(image).unwrap().fill(image, &mut Staging::new(&gpu.queue).unwrap()).unwrap());
        while !filled.is_ready() {
            thread::yield_now();
        }
        filled.wait().unwrap();
        filled
    };
    let mut filled = Vec::new();
    let record = |step: &mut Step<'_>| -> Result<(), LaunchError> {
        add_deltas(layers, 64, step, x, y)?;
        filled.push(fill(&images[0]));
        Ok(())
    };
    let mut graph = weights.capture(routing, TOKENS, workspace, record).unwrap();
    for (mode, image) in MODES.into_iter().zip(&images[1..]) {
        while_captured(gpu, mode, || filled.push(fill(image)));
    }
    for (slot, filled) in (1..).zip(filled) {
        weights.commit(slot, filled).unwrap();
    }
    let slots: [i32; TOKENS] = std::array::from_fn(|token| token as i32 % 4);
    assert_eq!(setup.replay(&mut graph, &slots), [4.0, 6.0, 7.0, 8.0].repeat(TOKENS / 4)[..]);
    setup.gpu.context.check_err().unwrap();
}

/// Memory dropped during a capture adds no deallocation to the graph, and is freed: at once, or after the engine's own
/// capture.
#[test]
#[ignore = "needs a GPU"]
fn what_is_dropped_during_a_capture_is_freed_behind_it() {
    const BYTES: usize = 32 << 20;
    let mut setup = Setup::new(2, 64, 1 << 20);
    setup.load(0, 2, 4.0).unwrap();
    let adapter = setup.adapter(2, 1.0);
    let Setup { gpu, weights, layers, routing, workspace, x, y, .. } = &mut setup;
    let (queue, capacity) = (&gpu.queue, weights.capacity());
    let image = adapter.plan(weights.model(), DType::F32).unwrap();
    let make = || {
        let table = WeightTable::new(queue, weights.model(), DType::F32, capacity, BYTES).unwrap();
        let slot = table.load(0, &image).unwrap();
        // A copy that the table waits for.
        let mut staging = Staging::new(queue).unwrap();
        drop(table.reserve(&image).unwrap().fill(&image, &mut staging).unwrap());
        let mut routing = Routing::new(queue, capacity, 2).unwrap();
        routing.update(&Batch::new(&[slot])).unwrap();
        let workspace = Workspace::with_bytes(queue, weights.workspace_bytes().unwrap()).unwrap();
        (table, staging, routing, workspace, Buffer::<f32>::zeros(queue, BYTES / size_of::<f32>()).unwrap())
    };
    gpu.synchronize();
    let before = gpu.used_bytes();
    let made = make();
    gpu.synchronize();
    assert!(gpu.used_bytes() >= before + 2 * BYTES as u64);
    let record = |step: &mut Step<'_>| -> Result<(), LaunchError> {
        add_deltas(layers, 64, step, x, y)?;
        drop(made);
        Ok(())
    };
    let mut graph = weights.capture(routing, TOKENS, workspace, record).unwrap();
    gpu.synchronize();
    assert_eq!(gpu.used_bytes(), before);
    for mode in MODES {
        let made = make();
        while_captured(gpu, mode, || drop(made));
        drop(Buffer::<u8>::zeros(queue, 1).unwrap());
        gpu.synchronize();
        assert_eq!(gpu.used_bytes(), before);
    }
    gpu.context.check_err().unwrap();
    assert_eq!(setup.replay(&mut graph, &[0; TOKENS]), [4.0; TOKENS]);
}

/// The experts of a layer, and the operands of a step.
struct ExpertsStep {
    layer: LoraExperts,
    activation: Activation,
    tokens: usize,
    ids: Buffer<i32>,
    router: Buffer<f32>,
    x: Buffer<bf16>,
    gate_up: Buffer<bf16>,
    inner: Buffer<bf16>,
    down: Buffer<bf16>,
    out: Buffer<bf16>,
}

const EXPERTS: usize = 6;
const HIDDEN: usize = 136;
const INTER: usize = 72;
const TOP_K: usize = 2;

impl ExpertsStep {
    fn new(weights: &WeightTable, id: ExpertsId, tokens: usize, rng: &mut StdRng) -> Self {
        let queue = weights.queue();
        let mut filled = |len: usize| {
            let values: Vec<bf16> = (0..len).map(|_| bf16::from_f32(rng.random_range(-1.0..1.0))).collect();
            let mut buffer = Buffer::zeros(queue, len).unwrap();
            buffer.write(&values).unwrap();
            buffer
        };
        Self {
            layer: LoraExperts::new(weights, id).unwrap(),
            activation: Activation::Silu,
            tokens,
            x: filled(tokens * HIDDEN),
            gate_up: filled(tokens * TOP_K * 2 * INTER),
            inner: filled(tokens * TOP_K * INTER),
            down: filled(tokens * TOP_K * HIDDEN),
            out: filled(tokens * HIDDEN),
            ids: Buffer::zeros(queue, tokens * TOP_K).unwrap(),
            router: Buffer::zeros(queue, tokens * TOP_K).unwrap(),
        }
    }

    fn record(&mut self, step: &mut Step<'_>, grouping: &mut Grouping) -> Result<(), LaunchError> {
        let (tokens, routes) = (self.tokens, self.tokens * TOP_K);
        let top_k = TopK::new(&self.ids, TOP_K)?.with_weights(&self.router)?;
        let mut grouped = grouping.update(step, top_k)?;
        let (x, y) = (Matrix::new(&self.x, tokens, HIDDEN)?, Matrix::new(&self.gate_up, routes, 2 * INTER)?);
        let inner = MatrixMut::new(&mut self.inner, routes, INTER)?;
        self.layer.activate(step, &mut grouped, x, y, inner, self.activation)?;
        let (x, y) = (Matrix::new(&self.inner, routes, INTER)?, Matrix::new(&self.down, routes, HIDDEN)?);
        self.layer.combine(step, &mut grouped, x, y, MatrixMut::new(&mut self.out, tokens, HIDDEN)?)
    }
}

/// Routes are refused after a replay that has grouped others in their place.
#[test]
#[ignore = "needs a GPU"]
fn routes_are_refused_where_others_may_have_been_grouped() {
    const ROWS: usize = 16;
    let gpu = Gpu::new();
    let queue = &gpu.queue;
    let mut spec = ModelSpec::new();
    let id = spec.experts(Experts::new("m", EXPERTS, HIDDEN, INTER).top_k(TOP_K)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(ROWS).slots(2).rank(16);
    let weights = WeightTable::new(queue, &model, DType::BF16, capacity, 1 << 20).unwrap();
    let mut routing = Routing::new(queue, capacity, 1).unwrap();
    let [mut workspace, mut other_workspace] = [&weights; 2].map(|weights| Workspace::new(weights).unwrap());
    let routes = RouteCapacity::tokens(ROWS).top_k(TOP_K).experts(EXPERTS);
    let [mut grouping, mut other_grouping] = [queue; 2].map(|queue| Grouping::new(queue, routes).unwrap());
    let mut on = ExpertsStep::new(&weights, id, ROWS, &mut StdRng::seed_from_u64(3));
    let mut capture = |grouping: &mut Grouping, workspace: &mut Workspace| {
        weights.capture(&routing, ROWS, workspace, |step| on.record(step, grouping)).unwrap()
    };
    let mut own = capture(&mut grouping, &mut workspace);
    let mut other = capture(&mut other_grouping, &mut workspace);

    let layer = LoraExperts::new(&weights, id).unwrap();
    let ids = Buffer::<i32>::zeros(queue, ROWS * TOP_K).unwrap();
    let x = Buffer::<bf16>::zeros(queue, ROWS * HIDDEN).unwrap();
    let mut y = Buffer::<bf16>::zeros(queue, ROWS * TOP_K * 2 * INTER).unwrap();
    let mut add = |step: &mut Step<'_>, routes: &mut GroupedRoutes<'_, '_>| {
        let y = MatrixMut::new(&mut y, ROWS * TOP_K, 2 * INTER)?;
        layer.add_gate_up_delta(step, routes, Matrix::new(&x, ROWS, HIDDEN)?, y)
    };
    let is_refused = |result: Result<(), LaunchError>| assert_eq!(refused(result), OtherBatch("the routes"));
    let slot = load_experts(&weights, 1, "m", [HIDDEN, INTER]);
    let batch = routing.update(&Batch::new(&[slot; ROWS])).unwrap();
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    let mut routes = grouping.update(&mut step, TopK::new(&ids, TOP_K).unwrap()).unwrap();
    add(&mut step, &mut routes).unwrap();
    other.replay(&mut step).unwrap();
    add(&mut step, &mut routes).unwrap();
    own.replay(&mut step).unwrap();
    is_refused(add(&mut step, &mut routes));
    let mut routes = grouping.update(&mut step, TopK::new(&ids, TOP_K).unwrap()).unwrap();
    add(&mut step, &mut routes).unwrap();
    let mut step = weights.step(&batch, &mut other_workspace).unwrap();
    add(&mut step, &mut routes).unwrap();

    // Routes of a capture are those of its step alone.
    let record = |step: &mut Step<'_>| -> Result<(), LaunchError> {
        let mut routes = grouping.update(step, TopK::new(&ids, TOP_K)?)?;
        let within = |other: &mut Step<'_>| add(other, &mut routes);
        is_refused(weights.capture(&routing, ROWS, &mut other_workspace, within).map(drop));
        add(step, &mut routes)
    };
    weights.capture(&routing, ROWS, &mut workspace, record).unwrap();
}
