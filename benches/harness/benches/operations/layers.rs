//! A few workloads on the GPU: the time of one operation in a captured graph, with weights from memory. Throughput
//! counts the bytes that must be moved, so that it compares with the memory rate.

use std::{cell::LazyCell, time::Duration};

use criterion::{Criterion, Throughput, criterion_group};

use aril_bench::{
    Result,
    layer::{Layer, MAX_ERROR, Room, Stage},
    own::own,
    workload::{self, Workload},
};

const IDS: [&str; 17] = [
    "dec/qwen3-8b/qkv/r16/t1/distinct",
    "dec/qwen3-8b/qkv/r16/t64/uniform8",
    "dec/qwen3-8b/qkv/r16/t64/distinct",
    "dec/qwen3-8b/qkv/r64/t64/distinct",
    "dec/qwen3-8b/o/r16/t16/skewed",
    "dec/qwen3-8b/gate_up/r16/t16/distinct",
    "dec/qwen3-8b/gate_up/r16/t256/skewed",
    "dec/qwen3-8b/down/r16/t64/identical",
    "pre/qwen3-8b/qkv/r16/t2048/seg8",
    "pre/qwen3-8b/gate_up/r64/t2048/seg8",
    "pre/qwen3-8b/down/r16/t512/seg2",
    "pre/qwen3-8b/down/r16/t8192/seg64",
    "own/qwen3-8b/lm_head/r16/t1/uniform1",
    "own/qwen3-8b/lm_head/r16/t64/uniform8",
    "own/qwen3-8b/embedding/r16/t1/uniform1",
    "own/qwen3-8b/embedding/r16/t64/uniform8",
    "own/qwen3-8b/embedding/r16/t2048/uniform8",
];

fn workloads() -> Result<Vec<Workload>> {
    let mut all = workload::parse(workload::BUILT_IN)?;
    all.extend(own()?);
    let find = |id: &str| all.iter().find(|workload| workload.id == id).cloned().ok_or(format!("there is no {id}"));
    Ok(IDS.map(find).into_iter().collect::<std::result::Result<Vec<_>, _>>()?)
}

fn layers(criterion: &mut Criterion) {
    let workloads = workloads().expect("the lists have them");
    // A filter may leave workloads out, which then need neither memory nor time.
    let stage = LazyCell::new(|| Stage::new(workloads.iter().map(Room::new)).expect("there is a GPU with 8 GB"));
    let mut group = criterion.benchmark_group("layers/bf16");
    group.sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for workload in &workloads {
        let layer = LazyCell::new(|| {
            let layer = Layer::new(&stage, workload).expect("there is a kernel for it");
            let error = layer.check().expect("it runs");
            assert!(error < MAX_ERROR, "{}: relative error {error}", workload.id);
            layer
        });
        let graph = LazyCell::new(|| {
            let count = layer.repetitions(layer.num_sets()).expect("it runs");
            (count, layer.capture(count, true).expect("it can be captured"))
        });
        group.throughput(Throughput::Bytes(workload.bytes().total() as u64));
        group.bench_function(workload.criterion_id(), |bencher| {
            let (count, graph) = &*graph;
            bencher.iter_custom(|iterations| stage.gpu.time_operations(graph, *count, iterations).expect("it runs"));
        });
    }
}

criterion_group!(benches, layers);
