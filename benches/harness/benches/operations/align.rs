//! Aligned route blocks on the GPU, each of one slot and one expert: the time in a captured graph.

use std::time::Duration;

use aril::{
    Slot,
    cuda::raw,
    plan::{AlignCapacity, Capacity, RouteCapacity},
    routing::Batch,
};
use criterion::{Criterion, Throughput, criterion_group};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use aril_bench::device::Gpu;

const PER_GRAPH: usize = 64;

/// Steps whose tokens draw a slot each, and their experts from all or from the first one only.
#[derive(Clone, Copy, Debug)]
struct Steps {
    top_k: usize,
    num_experts: usize,
    num_slots: usize,
    one_expert: bool,
}

fn align(criterion: &mut Criterion) {
    let gpu = Gpu::new().expect("there is a GPU");
    let mut group = criterion.benchmark_group("align");
    group.sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    let qwen3 = Steps { top_k: 8, num_experts: 128, num_slots: 8, one_expert: false };
    let shapes = [
        ("e128-k8-s8", qwen3),
        ("e128-k8-s64", Steps { num_slots: 64, ..qwen3 }),
        ("e8-k2-s8", Steps { top_k: 2, num_experts: 8, ..qwen3 }),
        ("e256-k8-s1024", Steps { num_experts: 256, num_slots: 1024, ..qwen3 }),
        ("e128-k8-s8-one", Steps { one_expert: true, ..qwen3 }),
    ];
    for (name, shape) in shapes {
        for tokens in [1, 16, 128, 1024, 4096] {
            let Steps { top_k, num_experts, num_slots, one_expert } = shape;
            let mut rng = StdRng::seed_from_u64(1);
            let slots: Vec<Slot> = (0..tokens).map(|_| Slot::new(rng.random_range(0..num_slots as u16))).collect();
            let chosen = if one_expert { 1 } else { num_experts as i32 };
            let ids: Vec<i32> = (0..tokens * top_k).map(|_| rng.random_range(0..chosen)).collect();
            let routes = RouteCapacity::tokens(tokens).top_k(top_k).experts(num_experts);
            let capacity = AlignCapacity::new(routes, num_slots, 16);
            let batches = Capacity::tokens(tokens).slots(num_slots).rank(1);
            let bytes = raw::Routing::device_bytes(batches).expect("it is within the limits");
            let routing_memory = gpu.alloc(bytes).expect("there is memory for it");
            // SAFETY: the memory lives as long as the routing, and is its own.
            let routing = unsafe { raw::Routing::new(&gpu.kernels, batches, 1, routing_memory.region()) };
            let mut routing = routing.expect("the memory is large enough");
            // SAFETY: the stream is alive and not capturing.
            let batch = unsafe { routing.update(&Batch::new(&slots), gpu.raw_stream()) }.expect("it fits");
            let bytes = raw::Alignment::device_bytes(capacity).expect("it is within the limits");
            let memory = gpu.upload(&vec![0_u8; bytes]).expect("there is memory for it");
            // SAFETY: the memory is zero, lives as long as the alignment, and is its own.
            let alignment = unsafe { raw::Alignment::new(&gpu.kernels, capacity, memory.region()) };
            let mut alignment = alignment.expect("the memory is large enough");
            let device_ids = gpu.upload(&ids).expect("there is memory for it");
            let top_k = raw::TopK::new(device_ids.address, top_k);
            let mut align = || {
                // SAFETY: the choices are alive for as long as the graph.
                unsafe { alignment.align(batch, top_k, gpu.raw_stream()) }
            };
            let graph = gpu.capture(|| (0..PER_GRAPH).try_for_each(|_| align().map(drop).map_err(Into::into)));
            let graph = graph.expect("it can be captured");
            group.throughput(Throughput::Elements(ids.len() as u64));
            group.bench_function(format!("{name}/t{tokens}"), |bencher| {
                bencher.iter_custom(|iterations| gpu.time_operations(&graph, PER_GRAPH, iterations).expect("it runs"));
            });
        }
    }
}

criterion_group!(benches, align);
