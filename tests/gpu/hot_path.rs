//! A launch does not allocate on the host, change the engine's context, or depend on other threads.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use aril::{DType, cuda::Kernels, cuda::LaunchError, cuda::raw, plan::Capacity, routing::Batch};
use cudarc::driver::result;

use crate::{
    common::{
        adapters::Lora,
        case::Subject,
        dense::Case,
        experts::{OPERATIONS, shapes},
        small::choose,
        values::Values,
    },
    device::Gpu,
    experts::launch,
    operations::{Raw, Safe},
    setup::{load, load_experts},
};

/// Counts this thread's allocations.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: it forwards to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's obligations.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's obligations.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `f` and returns how often this thread allocated.
pub fn allocations(f: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.with(Cell::get);
    f();
    ALLOCATIONS.with(Cell::get) - before
}

fn case(slots: Vec<i32>) -> Case {
    let adapters: [&[usize]; 3] = [&[16, 8, 4], &[64, 64, 64], &[3, 0, 5]];
    Case { values: Values::Rounded, seed: 3, ..Case::linear(320, &[256, 64, 64], &adapters, slots) }
}

#[test]
#[ignore = "needs a GPU"]
fn a_launch_allocates_nothing_on_the_host() {
    use aril::cuda::{LoraEmbedding, LoraLinear, Matrix, MatrixMut, Routing, WeightTable, Workspace};
    use aril::model::{Linear, ModelSpec, Parallel, TpRank};

    let gpu = Gpu::new();
    let queue = &gpu.queue;
    let mut spec = ModelSpec::new();
    let linear_id = spec.linear(Linear::new("m", Parallel::Replicated, 64).slice("q", 64)).unwrap();
    let embedding_id = spec.embedding("embed", 10, 64).unwrap();
    let gate_up = Linear::new("mlp", Parallel::Replicated, 64).slice("gate", 64).slice("up", 64);
    let gate_up_id = spec.linear(gate_up).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(32).slots(4).rank(16);
    let weights = WeightTable::new(queue, &model, DType::F32, capacity, 1 << 16).unwrap();
    let mut routing = Routing::new(queue, capacity, 64).unwrap();
    let linear = LoraLinear::new(&weights, linear_id).unwrap();
    let embedding = LoraEmbedding::new(&weights, embedding_id).unwrap();
    let gate_up = LoraLinear::new(&weights, gate_up_id).unwrap();
    let mut workspace = Workspace::new(&weights).unwrap();
    let (x, mut y, ids) = (gpu.upload(&[1.0_f32; 2048]), gpu.upload(&[1.0_f32; 2048]), gpu.upload(&[1_i32; 32]));
    let wide = gpu.upload(&[1.0_f32; 2 * 2048]);
    let [q, gate] = ["m.q", "mlp.gate"].map(|path| Lora::linear(path, 64, 64, 8));
    let slot = load(&weights, 1, &[q, gate, Lora::embedding("embed", 10, 64, 8)]);
    let (slots, scales) = ([slot; 32], [2.0; 32]);
    let mut step = || {
        let batch = Batch::new(&slots).with_scales(&scales).unwrap();
        let batch = routing.update(&batch).unwrap();
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let x = || Matrix::new(x.view::<f32>(), 32, 64).unwrap();
        let y_matrix = MatrixMut::new(y.view_mut(), 32, 64).unwrap();
        linear.add_delta(&mut step, x(), y_matrix).unwrap();
        let shrunk = gate_up.shrink(&mut step, x()).unwrap();
        let wide = Matrix::new(wide.view::<f32>(), 32, 128).unwrap();
        shrunk.silu_mul(wide, MatrixMut::new(y.view_mut(), 32, 64).unwrap()).unwrap();
        let y_matrix = MatrixMut::new(y.view_mut::<f32>(), 32, 64).unwrap();
        embedding.add_delta(&mut step, ids.view(), y_matrix).unwrap();
    };
    step();
    assert_eq!(allocations(|| (0..20).for_each(|_| step())), 0);
}

/// Nor does an operation on experts or a grouping, whether every block groups the routes, one block, or a separate
/// kernel.
#[test]
#[ignore = "needs a GPU"]
fn a_launch_on_experts_allocates_nothing_on_the_host() {
    use aril::cuda::{Grouping, LoraExperts, Matrix, MatrixMut, Routing, TopK, WeightTable, Workspace};
    use aril::model::{Experts, ModelSpec, TpRank};
    use aril::plan::RouteCapacity;

    const TOKENS: usize = 600;
    let gpu = Gpu::new();
    let queue = &gpu.queue;
    let mut spec = ModelSpec::new();
    let id = spec.experts(Experts::new("m", 2, 64, 32).top_k(2)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(TOKENS).slots(4).rank(16);
    let weights = WeightTable::new(queue, &model, DType::BF16, capacity, 1 << 16).unwrap();
    let mut routing = Routing::new(queue, capacity, 64).unwrap();
    let routes = RouteCapacity::tokens(TOKENS).top_k(2).experts(2);
    let mut grouping = Grouping::new(queue, routes).unwrap();
    let layer = LoraExperts::new(&weights, id).unwrap();
    let mut workspace = Workspace::new(&weights).unwrap();
    let ones = vec![half::bf16::ONE; 2 * TOKENS * 64];
    let (values, mut target) = (gpu.upload(&ones), gpu.upload(&ones));
    let all_rows: Vec<i32> = (0..2 * TOKENS as i32).collect();
    let (ids, router) = (gpu.upload(&vec![1_i32; 2 * TOKENS]), gpu.upload(&vec![0.5_f32; 2 * TOKENS]));
    let rows = gpu.upload(&all_rows);
    let slot = load_experts(&weights, 1, "m", [64, 32]);
    let (slots, scales) = ([slot; TOKENS], [2.0; TOKENS]);
    for tokens in [32, 512, TOKENS] {
        let mut step = || {
            let batch = Batch::new(&slots[..tokens]).with_scales(&scales[..tokens]).unwrap();
            let batch = routing.update(&batch).unwrap();
            let top_k = TopK::new(ids.view::<i32>().slice(..2 * tokens), 2).unwrap();
            let top_k = top_k.with_weights(router.view::<f32>().slice(..2 * tokens)).unwrap();
            let top_k = top_k.with_rows(rows.view::<i32>().slice(..2 * tokens)).unwrap();
            let mut step = weights.step(&batch, &mut workspace).unwrap();
            let mut routes = grouping.update(&mut step, top_k).unwrap();
            for op in OPERATIONS {
                let [x, y, [rows, cols]] = shapes(op, [64, 32], [tokens, 2 * tokens]);
                let inputs = [x, y].map(|[rows, cols]| Matrix::new(values.view::<half::bf16>(), rows, cols).unwrap());
                let target = MatrixMut::new(target.view_mut(), rows, cols).unwrap();
                launch(&layer, op, &mut step, &mut routes, inputs, target).unwrap();
            }
        };
        step();
        assert_eq!(allocations(|| (0..20).for_each(|_| step())), 0, "{tokens} tokens");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_engines_context_is_left_as_it_was() {
    let gpu = Gpu::new();
    let case = case(vec![0, 1, 2, -1, 0]);
    let world = case.world::<half::bf16>();
    let tracking = (gpu.context.is_in_multi_stream_mode(), gpu.context.is_event_tracking());
    let first = Safe { gpu: &gpu, apart: false }.run(&case, &world);
    assert_eq!(tracking, (gpu.context.is_in_multi_stream_mode(), gpu.context.is_event_tracking()));
    assert_eq!(result::ctx::get_current().unwrap(), Some(gpu.context.cu_ctx()));
    // cudarc still uses the context.
    let other = gpu.stream.clone_htod(&[1.0_f32, 2.0]).unwrap();
    assert_eq!(gpu.stream.clone_dtoh(&other).unwrap(), [1.0, 2.0]);
    gpu.synchronize();
    let again = Safe { gpu: &gpu, apart: false }.run(&case, &world);
    assert_eq!(bytemuck::cast_slice::<_, u8>(&first), bytemuck::cast_slice::<_, u8>(&again));
}

/// The raw API refuses a thread without the kernels' context. Nothing runs on another device or in another context.
#[test]
#[ignore = "needs a GPU"]
fn another_context_is_refused() {
    let gpu = Gpu::new();
    let capacity = Capacity::tokens(4).slots(1).rank(1);
    let memory = gpu.without_indices(raw::Routing::device_bytes(capacity).unwrap());
    // SAFETY: the memory outlives the routing and is used on one stream.
    let mut routing = unsafe { raw::Routing::new(&gpu.kernels, capacity, 1, memory.region()) }.unwrap();
    std::thread::scope(|scope| {
        let stream = gpu.raw_stream();
        let refused = scope.spawn(move || {
            // SAFETY: the stream is alive and not capturing.
            let error = unsafe { routing.update(&[-1], None, stream) }.unwrap_err();
            assert!(matches!(error, LaunchError::WrongContext { operand: "the thread" }), "{error}");
            assert!(matches!(Kernels::load(), Err(LaunchError::WrongContext { .. })));
        });
        refused.join().unwrap();
    });
}

/// Allocations of the driver, and a context that is not the primary one, work as well as cudarc's.
#[test]
#[ignore = "needs a GPU"]
fn a_context_of_the_engines_own() {
    let case = case(vec![2, 1, 0, 0, -1]);
    let world = case.world::<half::bf16>();
    let expected = Raw { gpu: &Gpu::new(), padded_tokens: 0, captured: false }.run(&case, &world);
    let context = cudarc::driver::CudaContext::new_non_primary(0, 0).unwrap();
    context.bind_to_thread().unwrap();
    let gpu = Gpu::in_context(context);
    let got = Raw { gpu: &gpu, padded_tokens: 0, captured: true }.run(&case, &world);
    assert_eq!(bytemuck::cast_slice::<_, u8>(&got), bytemuck::cast_slice::<_, u8>(&expected));
}

/// Two threads with separate streams and memory share the kernels, while the caches are swept.
#[test]
#[ignore = "needs a GPU"]
fn threads_and_streams_do_not_meet() {
    let expected = {
        let gpu = Gpu::new();
        [vec![0, 1, 2], vec![1; 300]].map(|slots| {
            let case = case(slots);
            (Raw { gpu: &gpu, padded_tokens: 0, captured: false }.run(&case, &case.world::<half::bf16>()), case)
        })
    };
    std::thread::scope(|scope| {
        for (expected, case) in &expected {
            scope.spawn(move || {
                let gpu = Gpu::new();
                let sweep = [gpu.upload(&vec![0_u8; 64 << 20]), gpu.upload(&vec![0_u8; 64 << 20])];
                let world = case.world::<half::bf16>();
                for round in 0..choose(30, 5) {
                    // SAFETY: both are large enough and stay alive until the stream is synchronized.
                    unsafe {
                        result::memcpy_dtod_async(
                            sweep[0].address(),
                            sweep[1].address(),
                            64 << 20,
                            gpu.stream.cu_stream(),
                        )
                    }
                    .unwrap();
                    let got = Raw { gpu: &gpu, padded_tokens: 0, captured: false }.run(case, &world);
                    let same = got.iter().zip(expected).all(|(a, b)| a.to_f32().to_bits() == b.to_f32().to_bits());
                    assert!(same, "round {round}");
                }
            });
        }
    });
}
