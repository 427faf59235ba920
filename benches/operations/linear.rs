//! Linear layers on the GPU, for a few of the workloads and for lm_head: the time of one operation in a captured graph, with
//! weights from memory. Throughput counts what must be moved, so that it compares with the device's.

use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group};

use crate::common::{
    Result,
    layer::{Layer, MAX_ERROR, Stage},
    workload::{self, Workload},
};

const WEIGHT_ELEMS: usize = 1 << 29;

const IDS: [&str; 12] = [
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
];

const VOCAB: usize = 151_936;

fn workloads() -> Result<Vec<Workload>> {
    let all = workload::parse(workload::BUILT_IN)?;
    let find = |id: &str| all.iter().find(|workload| workload.id == id).cloned().ok_or(format!("there is no {id}"));
    let mut workloads = IDS.map(find).into_iter().collect::<std::result::Result<Vec<_>, _>>()?;
    let heads = workloads[..2].to_vec();
    workloads.extend(heads.into_iter().map(|qkv| Workload {
        id: qkv.id.replace("qkv", "lm_head"),
        layer: "lm_head".to_owned(),
        out_slices: vec![VOCAB],
        ..qkv
    }));
    Ok(workloads)
}

fn linear(criterion: &mut Criterion) {
    let workloads = workloads().expect("the list has them");
    let stage = Stage::new(&workloads, WEIGHT_ELEMS).expect("there is a GPU with 2 GB");
    let mut group = criterion.benchmark_group("linear/bf16");
    group.sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for workload in &workloads {
        let layer = Layer::new(&stage, workload).expect("there is a kernel for it");
        let error = layer.check().expect("it runs");
        assert!(error < MAX_ERROR, "{}: relative error {error}", workload.id);
        let count = layer.repetitions(layer.num_sets()).expect("it runs");
        let graph = layer.capture(count, true).expect("it can be captured");
        group.throughput(Throughput::Bytes(workload.bytes().total() as u64));
        group.bench_function(workload.criterion_id(), |bencher| {
            bencher.iter_custom(|iterations| stage.gpu.time_operations(&graph, count, iterations).expect("it runs"));
        });
    }
}

criterion_group!(benches, linear);
