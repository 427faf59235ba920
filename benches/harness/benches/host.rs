//! Work on the host: planning, packing an adapter, reading it from a directory, and admitting requests.

use std::{collections::VecDeque, hint::black_box, time::Duration};

use aril::{
    DType,
    adapter::{Adapter, Tensor},
    cpu::AdapterPool,
    model::{Linear, Model, ModelSpec, Parallel, TpRank},
    plan::{Capacity, LinearPlan},
    pool::{PoolConfig, Source},
};
use aril_requests::admission::{Admission, Answer, Limits, Request};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;

use aril_bench::{
    Result,
    data::SMALL,
    noise::Noise,
    pool::{LAYERS as QWEN3_LAYERS, Layers},
};

fn plan(criterion: &mut Criterion) {
    let (model, adapter) = (layers(LAYERS).expect("it is a model"), adapter(LAYERS).expect("it is an adapter"));
    let (of_qwen3, ids) = Layers::qwen3_8b(1).model().expect("it is a model");
    let capacity = Capacity::tokens(8192).slots(64).rank(64);
    let mut group = criterion.benchmark_group("plan");
    group.bench_function("linear", |bencher| {
        bencher
            .iter(|| LinearPlan::new(black_box(&of_qwen3[ids[0]]), DType::BF16, capacity).expect("there is a kernel"));
    });
    let image = adapter.plan(&model, DType::BF16).expect("it fits the model");
    assert_eq!(image.entries().len(), model.num_entries());
    group.bench_function(format!("adapter/{}-modules", model.num_entries()), |bencher| {
        bencher.iter(|| adapter.plan(black_box(&model), DType::BF16).expect("it fits the model"));
    });
}

/// Packs adapters of rank 16 of a decoder layer of Qwen3-8B, which is in the cache, and of all layers, on rayon's
/// threads. `RAYON_NUM_THREADS=1` gives the rate of one thread.
fn pack(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pack");
    for num_layers in [1, QWEN3_LAYERS] {
        let layers = Layers::qwen3_8b(num_layers);
        let (model, _) = layers.model().expect("it is a model");
        let adapter = layers.adapter(RANK, &Noise::new(1, SMALL, 0.02)).expect("it is an adapter");
        for dtype in [DType::BF16, DType::F16] {
            let image = adapter.plan(&model, dtype).expect("it fits the model");
            let mut block = vec![0xff; image.bytes()];
            image.write_to(&mut block).expect("its weights are finite");
            assert!(block.chunks(2).all(|value| value != [0xff, 0xff]), "something was not written");
            group.throughput(Throughput::Bytes(block.len() as u64));
            group.bench_function(format!("{num_layers}-layers/bf16-to-{dtype}"), |bencher| {
                bencher.iter(|| image.write_to(black_box(&mut block)).expect("its weights are finite"));
            });
        }
    }
}

/// Adapters from a directory in the page cache to the host tier of a pool, whose memory is allocated for each load:
/// checking the directory, and reading and packing it. Of the linear layers of Qwen3-8B, and of the experts of eight
/// layers of Qwen3-30B-A3B.
fn directory(criterion: &mut Criterion) {
    directory_of(criterion, "directory", Layers::qwen3_8b(QWEN3_LAYERS));
    directory_of(criterion, "directory-of-experts", Layers::qwen3_30b_a3b(8));
}

fn directory_of(criterion: &mut Criterion, name: &str, layers: Layers) {
    let (model, _) = layers.model().expect("it is a model");
    let dir = tempfile::tempdir().expect("there is a temporary folder");
    layers.write(RANK, &Noise::new(1, SMALL, 0.02), dir.path()).expect("the folder can be written");
    let check = || Source::directory(dir.path(), &model, DType::BF16).expect("it is an adapter");
    let mut group = criterion.benchmark_group(name);
    group.bench_function("check", |bencher| bencher.iter(check));
    let source = check();
    let bytes = source.bytes();
    let config = PoolConfig::arena_bytes(2 * bytes).packers(std::thread::available_parallelism().map_or(1, Into::into));
    let capacity = Capacity::tokens(1).slots(1).rank(RANK);
    let mut pool = AdapterPool::new(&model, DType::BF16, capacity, config).expect("a pool");
    group.throughput(Throughput::Bytes(bytes as u64));
    group.bench_function("load", |bencher| {
        bencher.iter(|| {
            let id = pool.register(source.clone()).expect("it fits the pool");
            pool.prefetch(id).expect("it is registered");
            while pool.wait(Duration::from_secs(10)) {}
            assert!(pool.residency(id).is_some_and(|residency| residency.in_host));
            pool.unregister(id).expect("it is registered");
        });
    });
}

/// A step of an engine with a full batch and a long queue: a request ends, another one arrives, and one is admitted.
fn admission(criterion: &mut Criterion) {
    const ADAPTERS: usize = 1000;
    const MAX_REQUESTS: usize = 64;
    let mut group = criterion.benchmark_group("admission");
    for (name, max_wait) in [("young", Duration::MAX), ("overdue", Duration::ZERO)] {
        let mut admission = Admission::new(Limits::new(32, max_wait));
        let arrive = |admission: &mut Admission<usize, usize>, id: usize| {
            // Adapters with small numbers are asked for most.
            let adapter = (id * 7919 % ADAPTERS) * (id * 104_729 % ADAPTERS) / ADAPTERS;
            admission.enqueue(Request::new(id, adapter, Duration::from_micros(id as u64))).expect("the id is new");
        };
        let admit = |admission: &mut Admission<usize, usize>, running: &mut VecDeque<usize>| {
            let now = Duration::from_secs(10);
            admission.admit(now, |request| {
                if running.len() == MAX_REQUESTS {
                    return Answer::Stop;
                }
                running.push_back(request.id);
                Answer::Take
            });
        };
        let (mut running, mut next) = (VecDeque::new(), 10_000);
        (0..next).for_each(|id| arrive(&mut admission, id));
        admit(&mut admission, &mut running);
        assert!(running.len() > 30, "the batch is nearly full");
        group.bench_function(format!("step/{name}"), |bencher| {
            bencher.iter(|| {
                let done = running.pop_front().expect("a request runs");
                admission.finish(&done).expect("it runs");
                arrive(&mut admission, next);
                next += 1;
                admit(&mut admission, &mut running);
            });
        });
    }
}

/// The modules of a small decoder layer: name, input and output features.
const MODULES: [(&str, usize, usize); 7] = [
    ("self_attn.q_proj", 1024, 2048),
    ("self_attn.k_proj", 1024, 1024),
    ("self_attn.v_proj", 1024, 1024),
    ("self_attn.o_proj", 2048, 1024),
    ("mlp.gate_proj", 1024, 3072),
    ("mlp.up_proj", 1024, 3072),
    ("mlp.down_proj", 3072, 1024),
];
const LAYERS: usize = 28;
const RANK: usize = 16;

/// A model of `layers` decoder layers.
fn layers(layers: usize) -> Result<Model> {
    let mut spec = ModelSpec::new();
    for layer in 0..layers {
        for (name, in_features, out_features) in MODULES {
            let path = format!("model.layers.{layer}");
            spec.linear(Linear::new(path, Parallel::Replicated, in_features).slice(name, out_features))?;
        }
    }
    Ok(spec.shard(TpRank::SINGLE)?)
}

/// An adapter on every module of `layers` decoder layers.
fn adapter(layers: usize) -> Result<Adapter> {
    let mut tensors = Vec::new();
    for layer in 0..layers {
        for (name, in_features, out_features) in MODULES {
            for (side, shape) in [("A", [RANK, in_features]), ("B", [out_features, RANK])] {
                let values = vec![bf16::from_f32(0.5); shape[0] * shape[1]];
                let tensor = Tensor::new(DType::BF16, shape, bytemuck::cast_slice(&values).to_vec())?;
                tensors.push((format!("base_model.model.model.layers.{layer}.{name}.lora_{side}.weight"), tensor));
            }
        }
    }
    Ok(Adapter::from_tensors(&format!(r#"{{"peft_type": "LORA", "r": {RANK}, "lora_alpha": {RANK}}}"#), tensors)?)
}

fn config() -> Criterion {
    Criterion::default().warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2))
}

criterion_group!(name = benches; config = config(); targets = plan, pack, directory, admission);
criterion_main!(benches);
