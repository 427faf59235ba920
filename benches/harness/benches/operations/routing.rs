//! Grouping a batch by slot on the GPU, once per step for all layers: the time in a captured graph.

use std::time::Duration;

use aril::{cuda::raw, plan::Capacity, routing::Segments};
use criterion::{Criterion, Throughput, criterion_group};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use aril_bench::{Result, device::Gpu};

const PER_GRAPH: usize = 64;

fn routing(criterion: &mut Criterion) {
    let gpu = Gpu::new().expect("there is a GPU");
    let mut group = criterion.benchmark_group("routing");
    group.sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for (tokens, num_slots) in [(1, 8), (16, 8), (64, 64), (256, 64), (256, 1024), (2048, 64), (8192, 64)] {
        let mut rng = StdRng::seed_from_u64(1);
        // At most one token in nine has no adapter.
        let slots: Vec<i32> = (0..tokens).map(|_| rng.random_range(-1..num_slots as i32)).collect();
        let capacity = Capacity::tokens(tokens).slots(num_slots).rank(16);
        let bytes = raw::Routing::device_bytes(capacity).expect("it is within the limits");
        let memory = gpu.alloc(bytes).expect("there is memory for it");
        // SAFETY: the memory lives as long as the routing, and is its own.
        let routing = unsafe { raw::Routing::new(&gpu.kernels, capacity, 1, memory.region()) };
        let mut routing = routing.expect("the memory is large enough");
        let device_slots = gpu.upload(&slots).expect("there is memory for it");
        let mut update = || {
            // SAFETY: the slots are alive for as long as the graph.
            unsafe { routing.update_on_device(device_slots.address, None, tokens, gpu.raw_stream()) }
        };
        let graph = gpu.capture(|| (0..PER_GRAPH).try_for_each(|_| update().map(drop).map_err(Into::into)));
        let graph = graph.expect("it can be captured");
        graph.replay().expect("it runs");
        let batch = routing.capture_batch(tokens).expect("it is within the capacity");
        check(&gpu, &batch, &slots, num_slots).expect("it can be read");

        group.throughput(Throughput::Elements(tokens as u64));
        group.bench_function(format!("t{tokens}/s{num_slots}"), |bencher| {
            bencher.iter_custom(|iterations| gpu.time_operations(&graph, PER_GRAPH, iterations).expect("it runs"));
        });
    }
}

/// Compares the grouping of the device with that of the host. The order of a slot's tokens is arbitrary.
fn check(gpu: &Gpu, batch: &raw::RoutedBatch, slots: &[i32], num_slots: usize) -> Result<()> {
    let segments = Segments::new(slots, num_slots);
    let live = segments.iter().map(|(_, tokens)| tokens.len()).sum();
    let mut got: Vec<i32> = gpu.read(batch.tokens(), live)?;
    let mut rest = &mut got[..];
    for (slot, expected) in segments.iter() {
        let tokens;
        (tokens, rest) = rest.split_at_mut(expected.len());
        tokens.sort_unstable();
        assert!(tokens.iter().map(|&token| token as usize).eq(expected.iter().copied()), "slot {slot} has {tokens:?}");
    }
    Ok(())
}

criterion_group!(benches, routing);
