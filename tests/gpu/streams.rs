//! Queues of streams that cudarc does not know, and an engine that captures on them.

use aril::{
    DType,
    cuda::{Kernels, LaunchError, LoraLinear, Matrix, MatrixMut, Queue, Routing, WeightTable, Workspace, raw::Stream},
    plan::Capacity,
    routing::Batch,
};
use cudarc::driver::{CudaContext, result};

use crate::{
    common::adding,
    device::{Gpu, load_slots},
    limit::Limit,
    setup::slots_of,
};

#[path = "../../examples/engine_graphs.rs"]
mod engine_graphs;
#[path = "../../examples/speculative.rs"]
mod speculative;

const FEATURES: usize = 64;
const RANK: usize = 16;
const SLOTS: usize = 3;

/// Eager and captured steps, on memory that cudarc allocates on the stream, between drops of all objects of the queue.
/// An arena of the size for the capacity holds an adapter of the largest rank in each slot, and replaces each of them.
#[test]
#[ignore = "needs a GPU"]
fn a_queue_of_a_bare_stream_is_like_any_other() {
    let gpu = Gpu::new();
    let bare = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
    let (model, ids) = adding::model(1, FEATURES);
    let capacity = Capacity::tokens(SLOTS).slots(SLOTS).rank(RANK);
    for round in [0.0, 10.0] {
        // SAFETY: the stream is of this context, and destroyed after what is on it.
        let queue = unsafe { Queue::from_raw(&gpu.kernels, Stream::from_raw(bare.cast())) }.unwrap();
        // SAFETY: as above.
        let same = unsafe { Queue::from_raw(&gpu.kernels, Stream::from_raw(bare.cast())) }.unwrap();
        let bytes = WeightTable::arena_bytes_for(&model, DType::F32, capacity);
        let weights = WeightTable::new(&queue, &model, DType::F32, capacity, bytes).unwrap();
        let layer = LoraLinear::new(&weights, ids[0]).unwrap();
        let (mut routing, mut workspace) =
            (Routing::new(&same, capacity, 2).unwrap(), Workspace::new(&weights).unwrap());
        let buffer = || aril::cuda::Buffer::<f32>::zeros(&queue, SLOTS * FEATURES).unwrap();
        let (mut x, mut y) = (buffer(), buffer());
        x.write(&[1.0; SLOTS * FEATURES]).unwrap();
        let mut graph = weights
            .capture::<LaunchError>(&routing, SLOTS, &mut workspace, |step| {
                let (x, y) = (Matrix::new(&x, SLOTS, FEATURES)?, MatrixMut::new(&mut y, SLOTS, FEATURES)?);
                layer.add_delta(step, x, y)
            })
            .unwrap();
        for replaced in [1.0, 2.0] {
            let adapters = [0.0, 1.0, 2.0].map(|slot| adding::adapter(1, FEATURES, RANK, round + replaced + slot));
            load_slots(&weights, &adapters);
            y.write(&[0.0; SLOTS * FEATURES]).unwrap();
            let slots = slots_of(&weights, &[0, 1, 2]);
            let batch = routing.update(&Batch::new(&slots)).unwrap();
            let mut step = weights.step(&batch, &mut workspace).unwrap();
            graph.replay(&mut step).unwrap();
            let (eager_x, eager_y) =
                (Matrix::new(&x, SLOTS, FEATURES).unwrap(), MatrixMut::new(&mut y, SLOTS, FEATURES));
            layer.add_delta(&mut step, eager_x, eager_y.unwrap()).unwrap();
            let mut rows = [0.0; SLOTS * FEATURES];
            y.read(&mut rows).unwrap();
            for (slot, row) in [0.0, 1.0, 2.0].into_iter().zip(rows.chunks(FEATURES)) {
                assert_eq!(row, [2.0 * (round + replaced + slot); FEATURES]);
            }
        }
    }
    // SAFETY: everything that was on it is gone.
    unsafe { result::stream::destroy(bare) }.unwrap();
}

#[test]
#[ignore = "needs a GPU"]
fn streams_that_a_queue_cannot_order_are_refused() {
    let gpu = Gpu::new();
    let queue = |kernels: &Kernels, stream: *mut std::ffi::c_void| {
        // SAFETY: default streams are of every context, and never destroyed.
        unsafe { Queue::from_raw(kernels, Stream::from_raw(stream)) }
    };
    let (default, per_thread) = (std::ptr::null_mut(), std::ptr::without_provenance_mut(2));
    assert_eq!(queue(&gpu.kernels, default).unwrap().stream().cu_stream(), default.cast());
    let error = queue(&gpu.kernels, per_thread).unwrap_err();
    assert!(matches!(error, LaunchError::PerThreadStream), "{error}");
    // The per-thread stream is that of candle's `Device::new_cuda`.
    assert!(error.to_string().contains("Device::new_cuda_with_stream"), "{error}");

    // cudarc would destroy a context that is not primary. The thread's context remains current.
    let other = CudaContext::new_non_primary(0, 0).unwrap();
    let kernels = Kernels::load_into(&other).unwrap();
    for kernels in [&kernels, &gpu.kernels] {
        let error = queue(kernels, default).unwrap_err();
        assert!(matches!(error, LaunchError::WrongContext { .. }), "{error}");
        assert_eq!(result::ctx::get_current().unwrap(), Some(other.cu_ctx()));
    }
    gpu.context.bind_to_thread().unwrap();
}

/// The example.
#[test]
#[ignore = "needs a GPU"]
fn an_engine_captures_on_streams_of_its_own() {
    let _limit = Limit::new();
    engine_graphs::main().unwrap();
}

/// The example.
#[test]
#[ignore = "needs a GPU"]
fn drafts_are_verified_in_replays() {
    let _gpu = Gpu::new();
    speculative::main().unwrap();
}
