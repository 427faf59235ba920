//! Grouping routes by expert and slot on the GPU, once per layer with many routes: the time in a captured graph. Up to
//! 1,024 routes, the operations on experts group them, and nothing is enqueued.

use std::time::Duration;

use aril::{
    cuda::raw,
    plan::{Capacity, RouteCapacity},
};
use criterion::{Criterion, Throughput, criterion_group};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use aril_bench::device::Gpu;

const PER_GRAPH: usize = 64;
/// Of Qwen3-30B-A3B.
const EXPERTS: usize = 128;
const TOP_K: usize = 8;

fn grouping(criterion: &mut Criterion) {
    let gpu = Gpu::new().expect("there is a GPU");
    let mut group = criterion.benchmark_group("grouping");
    group.sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    // Eight adapters in tables of up to so many slots.
    for (num_slots, tokens) in
        [8, 64, 8192].into_iter().flat_map(|slots| [256, 1024, 4096].map(|tokens| (slots, tokens)))
    {
        let mut rng = StdRng::seed_from_u64(1);
        let slots: Vec<i32> = (0..tokens).map(|_| rng.random_range(0..8)).collect();
        let ids: Vec<i32> = (0..tokens * TOP_K).map(|_| rng.random_range(0..EXPERTS as i32)).collect();
        let capacity = Capacity::tokens(tokens).slots(num_slots).rank(16);
        let bytes = raw::Routing::device_bytes(capacity).expect("it is within the limits");
        let routing_memory = gpu.alloc(bytes).expect("there is memory for it");
        // SAFETY: the memory lives as long as the routing, and is its own.
        let routing = unsafe { raw::Routing::new(&gpu.kernels, capacity, 1, routing_memory.region()) };
        let mut routing = routing.expect("the memory is large enough");
        // SAFETY: the stream is alive and not capturing.
        let batch = unsafe { routing.update(&slots, None, gpu.raw_stream()) }.expect("it fits");
        let routes = RouteCapacity::tokens(tokens).top_k(TOP_K).experts(EXPERTS);
        let bytes = raw::Grouping::device_bytes(routes).expect("it is within the limits");
        let memory = gpu.upload(&vec![0_u8; bytes]).expect("there is memory for it");
        // SAFETY: the memory is zero, lives as long as the grouping, and is its own.
        let grouping = unsafe { raw::Grouping::new(&gpu.kernels, routes, memory.region()) };
        let mut grouping = grouping.expect("the memory is large enough");
        let device_ids = gpu.upload(&ids).expect("there is memory for it");
        let mut update = || {
            // SAFETY: the choices are alive for as long as the graph.
            unsafe { grouping.group(batch, raw::TopK::new(device_ids.address, TOP_K), gpu.raw_stream()) }
        };
        let graph = gpu.capture(|| (0..PER_GRAPH).try_for_each(|_| update().map(drop).map_err(Into::into)));
        let graph = graph.expect("it can be captured");
        group.throughput(Throughput::Elements(ids.len() as u64));
        group.bench_function(format!("r{}/s{num_slots}", ids.len()), |bencher| {
            bencher.iter_custom(|iterations| gpu.time_operations(&graph, PER_GRAPH, iterations).expect("it runs"));
        });
    }
}

criterion_group!(benches, grouping);
