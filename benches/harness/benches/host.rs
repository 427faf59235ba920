//! Work on the host: planning, packing an adapter, a step of a pool, grouping a batch, admitting requests, and the
//! operations of the CPU.

use std::{
    collections::{BTreeMap, VecDeque},
    hint::black_box,
    sync::Arc,
    time::Duration,
};

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cpu::{AdapterPool, LoraLinear, Matrix, MatrixMut, WeightTable, Workspace},
    model::{Linear, Model, ModelSpec, Parallel, TpRank},
    plan::{Capacity, LinearPlan},
    pool::{AdapterId, PoolConfig, Source, StreamId},
    routing::{Batch, Segments},
};
use aril_requests::admission::{Admission, Answer, Limits, Request};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;

use aril_bench::{
    Result,
    data::{Data, SMALL, checked_tokens},
    noise::Noise,
    pool::{LAYERS as QWEN3_LAYERS, Layers},
    workload::{self, Workload},
};

const MAX_ERROR: f64 = 2e-2;

/// More than any workload's adapters take.
const ARENA_BYTES: usize = 1 << 30;

fn plan(criterion: &mut Criterion) {
    let (model, adapter) = (layers(LAYERS).expect("it is a model"), adapter(LAYERS).expect("it is an adapter"));
    let (single, id) = workloads().remove(0).linear_model().expect("it is a model");
    let capacity = Capacity::tokens(8192).slots(64).rank(64);
    let mut group = criterion.benchmark_group("plan");
    group.bench_function("linear", |bencher| {
        bencher.iter(|| LinearPlan::new(black_box(&single[id]), DType::BF16, capacity).expect("there is a kernel"));
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

/// A step's calls of a pool whose adapters are all on the device: `prepare` a batch, drop its leases, `end_step`.
fn pool(criterion: &mut Criterion) {
    const FEATURES: usize = 64;
    const BATCH: usize = 8;
    let mut spec = ModelSpec::new();
    let layer = Linear::new("m", Parallel::Replicated, FEATURES).slice("q", FEATURES);
    spec.linear(layer).expect("it is a layer");
    let model = spec.shard(TpRank::SINGLE).expect("one rank has all of it");
    let factor =
        |shape: [usize; 2]| Tensor::new(DType::BF16, shape, vec![0; 2 * shape[0] * shape[1]]).expect("a tensor");
    let tensors = [("A", [1, FEATURES]), ("B", [FEATURES, 1])]
        .map(|(side, shape)| (format!("m.q.lora_{side}.weight"), factor(shape)));
    let config = r#"{"peft_type": "LORA", "lora_alpha": 1}"#;
    let adapter = Arc::new(Adapter::from_tensors(config, tensors).expect("it is an adapter"));
    let mut group = criterion.benchmark_group("pool");
    for resident in [1, 64, 1000] {
        let capacity = Capacity::tokens(BATCH).slots(resident).rank(8);
        let mut pool =
            AdapterPool::new(&model, DType::BF16, capacity, PoolConfig::arena_bytes(64 << 20)).expect("a pool");
        let ids: Vec<AdapterId> = (0..resident)
            .map(|_| {
                let source = Source::memory(Arc::clone(&adapter), &model, DType::BF16).expect("it fits the model");
                let id = pool.register(source).expect("it fits the pool");
                pool.prefetch(id).expect("it is registered");
                id
            })
            .collect();
        while pool.wait(Duration::from_secs(10)) {}
        assert_eq!(pool.snapshot().resident, resident);
        let mut batches = ids.chunks(BATCH.min(resident)).cycle();
        group.bench_function(format!("step/{resident}-resident"), |bencher| {
            bencher.iter(|| {
                let leases = pool.prepare(black_box(batches.next().unwrap_or_default()), StreamId::FIRST);
                drop(leases.expect("all are on the device"));
                pool.end_step(StreamId::FIRST).expect("the stream exists");
            });
        });
        assert_eq!(pool.snapshot().counters.misses, 0);
        group.bench_function(format!("snapshot/{resident}-resident"), |bencher| {
            bencher.iter(|| black_box(pool.snapshot()));
        });
    }
}

fn segments(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("segments");
    for (tokens, num_slots) in [(64, 8_u16), (256, 64), (8192, 64)] {
        // Scattered over the slots.
        let slots: Vec<i32> = (0..).map(|token| token * 7919 % i32::from(num_slots)).take(tokens).collect();
        let segments = Segments::new(&slots, num_slots.into());
        assert_eq!(segments.iter().map(|(_, tokens)| tokens.len()).sum::<usize>(), tokens);
        group.throughput(Throughput::Elements(tokens as u64));
        group.bench_function(format!("t{tokens}/s{num_slots}"), |bencher| {
            bencher.iter(|| Segments::new(black_box(&slots), num_slots.into()));
        });
    }
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
            admission.enqueue(Request::new(id, adapter, 1, Duration::from_micros(id as u64))).expect("the id is new");
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

fn cpu(criterion: &mut Criterion) {
    let data = Data::new(SMALL);
    let mut group = criterion.benchmark_group("cpu-linear/bf16");
    for workload in workloads() {
        let (model, id) = workload.linear_model().expect("it is a model");
        let weights = WeightTable::new(&model, DType::BF16, workload.capacity(), ARENA_BYTES).expect("it is a table");
        let mut loaded = Vec::new();
        for (slot, adapter) in data.adapters(&workload, 0).expect("they are adapters").iter().enumerate() {
            let image = adapter.plan(&model, DType::BF16).expect("it fits the model");
            loaded.push(weights.load(slot, &image).expect("it fits the table"));
        }
        let (tokens, cols) = (workload.num_tokens(), workload.out_features());
        let x: Vec<bf16> = data.inputs.range(0, tokens * workload.in_features).collect();
        let bases: Vec<bf16> = data.bases.range(0, tokens * cols).collect();
        let layer = LoraLinear::new(&weights, id).expect("it is of the model");
        let slot = |slot: &i32| usize::try_from(*slot).map_or(Slot::BASE, |slot| loaded[slot]);
        let slots: Vec<Slot> = workload.slots.iter().map(slot).collect();
        let (batch, mut workspace) = (Batch::new(&slots), Workspace::default());
        let mut run = |y: &mut [bf16]| {
            let x = Matrix::new(&x, tokens, workload.in_features).expect("it has as many rows");
            let y = MatrixMut::new(y, tokens, cols).expect("it has as many rows");
            let mut step = weights.step(&batch, &mut workspace).expect("it fits the table");
            layer.add_delta(&mut step, x, y).expect("the operands fit");
        };
        let mut y = bases.clone();
        run(&mut y);
        let rows = checked_tokens(&workload.slots).into_iter().map(|token| (token, y[token * cols..][..cols].to_vec()));
        let error = data.error(&workload, 0, &rows.collect::<BTreeMap<_, _>>());
        assert!(error < MAX_ERROR, "{}: relative error {error}", workload.id);

        group.throughput(Throughput::Bytes(workload.bytes().total() as u64));
        group.bench_function(workload.criterion_id(), |bencher| {
            bencher.iter_batched_ref(|| bases.clone(), |y| run(y), BatchSize::LargeInput);
        });
    }
}

/// A small workload and a medium one.
fn workloads() -> Vec<Workload> {
    let mut workloads = workload::parse(workload::BUILT_IN).expect("the list is well formed");
    workloads.retain(|workload| {
        ["dec/qwen3-8b/qkv/r8/t1/distinct", "dec/qwen3-4b/o/r16/t64/uniform8"].contains(&workload.id.as_str())
    });
    workloads
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

criterion_group!(name = benches; config = config(); targets = plan, pack, directory, pool, segments, admission, cpu);
criterion_main!(benches);
