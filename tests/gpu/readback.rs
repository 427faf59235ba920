//! Adapters whose tensors are in device memory: the bytes of the same ones in host memory, and what is refused.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aril::{
    DType, Element,
    adapter::{Adapter, AdapterError, Tensor},
    cuda::{AdapterPool, Buffer, LaunchError, Readback, WeightTable, raw::Descriptor},
    error::LoadError,
    model::{Experts, Linear, Model, ModelSpec, Parallel, Shard, TpRank},
    plan::Capacity,
    pool::{PoolConfig, PoolError, Source, StreamId},
};
use cudarc::driver::{DeviceRepr, ValidAsZeroBits, result};
use half::{bf16, f16};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    common::{
        adapters::{self, Lora, Parts},
        adding,
        small::choose,
    },
    device::Gpu,
    setup::Spin,
};

const CAPACITY: Capacity = Capacity::tokens(8).slots(2).rank(80);

/// The tensor's elements in device memory.
pub(crate) fn on_device(readback: &Readback, tensor: &Tensor) -> Tensor {
    fn of<T>(readback: &Readback, tensor: &Tensor) -> Tensor
    where
        T: Element + DeviceRepr + ValidAsZeroBits,
    {
        let values: Vec<T> = tensor.bytes().chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
        let mut buffer = Buffer::<T>::zeros(readback.queue(), values.len()).unwrap();
        buffer.write(&values).unwrap();
        readback.tensor(&buffer, tensor.shape()).unwrap()
    }
    match tensor.dtype() {
        DType::BF16 => of::<bf16>(readback, tensor),
        DType::F16 => of::<f16>(readback, tensor),
        _ => of::<f32>(readback, tensor),
    }
}

/// The same adapter in either memory.
fn both(readback: &Readback, (config, tensors): Parts) -> [Adapter; 2] {
    let copies: Vec<_> = tensors.iter().map(|(name, tensor)| (name.clone(), on_device(readback, tensor))).collect();
    assert!(tensors.iter().zip(&copies).all(|((_, tensor), (_, copy))| copy.to_f32() == tensor.to_f32()));
    [tensors, copies].map(|tensors| Adapter::from_tensors(&config, tensors).unwrap())
}

/// As the host packs it.
fn packed(adapter: &Adapter, model: &Model, dtype: DType) -> Result<Vec<u8>, AdapterError> {
    let image = adapter.plan(model, dtype)?;
    let mut block = vec![0; image.bytes()];
    image.write_to(&mut block)?;
    Ok(block)
}

fn read<T: bytemuck::Pod>(gpu: &Gpu, address: u64, len: usize) -> Vec<T> {
    let mut values = vec![T::zeroed(); len];
    gpu.synchronize();
    // SAFETY: the memory at the address has as many elements.
    unsafe { result::memcpy_dtoh_sync(&mut values, address) }.unwrap();
    values
}

/// The descriptors of a slot.
fn row(gpu: &Gpu, weights: &WeightTable, slot: usize) -> Vec<Descriptor> {
    let entries = weights.model().num_entries();
    read(gpu, weights.raw().address() + (slot * entries * size_of::<Descriptor>()) as u64, entries)
}

/// The slot has the block that the host packs, and the descriptors of the block.
fn slot_has(gpu: &Gpu, weights: &WeightTable, slot: usize, adapter: &Adapter) {
    let row = row(gpu, weights, slot);
    let image = adapter.plan(weights.model(), weights.dtype()).unwrap();
    let block = row.iter().flat_map(|entry| [entry.a, entry.b]).filter(|&address| address > 0).min().unwrap();
    assert_eq!(row, Descriptor::row(&image, block));
    let want = packed(adapter, weights.model(), weights.dtype()).unwrap();
    assert!(read::<u8>(gpu, block, image.bytes()) == want);
}

const FEATURES: usize = 96;
const EXPERTS: usize = 4;

/// Linear layers of sizes that are multiples of tiles and that are not, experts in two formats, an embedding, and so
/// many modules that one launch cannot pack all of them.
fn spec() -> ModelSpec {
    let mut spec = ModelSpec::new();
    spec.embedding("embed", 150, FEATURES).unwrap();
    spec.linear(Linear::new("qkv", Parallel::Column, FEATURES).slice("q", 640).slice("k", 64).slice("v", 72)).unwrap();
    spec.linear(Linear::new("o", Parallel::Row, 600).slice("o", 38)).unwrap();
    spec.linear(Linear::new("one", Parallel::Replicated, 1).slice("one", 1)).unwrap();
    for path in ["mlp.experts", "parameters.experts"] {
        spec.experts(Experts::new(path, EXPERTS, FEATURES, 64).top_k(2)).unwrap();
    }
    for i in 0..40 {
        spec.linear(Linear::new(format!("l{i}"), Parallel::Replicated, 24).slice("m", 8)).unwrap();
    }
    spec
}

/// Random factors of all modules, of different ranks, in this type or, for `None`, in any.
fn factors(dtype: Option<DType>, rng: &mut StdRng) -> Parts {
    let mut modules = vec![
        Lora::embedding("embed", 150, FEATURES, 9),
        Lora::linear("qkv.q", FEATURES, 640, 16),
        Lora::linear("qkv.k", FEATURES, 64, 3),
        Lora::linear("qkv.v", FEATURES, 72, 80),
        Lora::linear("o.o", 600, 38, 24),
        Lora::linear("one.one", 1, 1, 1),
    ];
    modules.extend((0..EXPERTS).flat_map(|expert| {
        [("gate_proj", FEATURES, 64), ("up_proj", FEATURES, 64), ("down_proj", 64, FEATURES)]
            .map(|(name, inputs, outputs)| Lora::linear(format!("mlp.experts.{expert}.{name}"), inputs, outputs, 5))
    }));
    modules.extend((0..40).map(|i| Lora::linear(format!("l{i}.m"), 24, 8, 8 + i % 2)));
    let dtypes = [DType::BF16, DType::F16, DType::F32];
    let of = |number: usize| dtype.unwrap_or(dtypes[number % 3]);
    // Also subnormal numbers, and zeros of both signs.
    let mut value = || match rng.random_range(0..16) {
        0 => 0.0,
        1 => -0.0,
        2 => 1e-7,
        _ => rng.random_range(-2.0..2.0_f32),
    };
    let modules: Vec<_> =
        modules.into_iter().enumerate().map(|(i, module)| module.dtype(of(i)).fill(&mut value)).collect();
    let (config, mut tensors) = adapters::parts(4.0, &modules);
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    // Of the modules that have none of their own.
    config["r"] = 6.into();
    // Stacked, with experts fastest in B.
    let mut stacked = |name: &str, shape: [usize; 2], number: usize| {
        let values: Vec<_> = (0..shape[0] * shape[1]).map(|_| adapters::round(value(), of(number))).collect();
        tensors.push((format!("parameters.experts.{name}.weight"), adapters::tensor(of(number), &shape, &values)));
    };
    for (number, (proj, inputs, outputs)) in [("base_layer.", FEATURES, 128), ("", 64, FEATURES)].iter().enumerate() {
        stacked(&format!("{proj}lora_A"), [EXPERTS * 6, *inputs], number);
        stacked(&format!("{proj}lora_B"), [*outputs, EXPERTS * 6], number);
    }
    (config.to_string(), tensors)
}

/// Every kind of factor, in every type, on one rank and on each of two: what the host packs, and what the device does.
#[test]
#[ignore = "needs a GPU"]
fn the_bytes_are_those_of_host_memory() {
    let gpu = Gpu::new();
    let readback = Readback::new(&gpu.queue).unwrap();
    let mut rng = StdRng::seed_from_u64(11);
    for dtype in [Some(DType::BF16), Some(DType::F16), Some(DType::F32), None] {
        let [host, device] = both(&readback, factors(dtype, &mut rng));
        for rank in [TpRank::SINGLE, TpRank::new(0, 2).unwrap(), TpRank::new(1, 2).unwrap()] {
            let model = spec().shard(Shard::new(rank)).unwrap();
            for to in [DType::BF16, DType::F16, DType::F32] {
                let [of_host, of_device] = [&host, &device].map(|adapter| packed(adapter, &model, to).unwrap());
                assert!(of_host == of_device, "{dtype:?} as {to} on {rank:?}");
                let bytes = WeightTable::arena_bytes_for(&model, to, CAPACITY);
                let weights = WeightTable::new(&gpu.queue, &model, to, CAPACITY, bytes).unwrap();
                for _ in 0..2 {
                    weights.load(1, &device.plan(&model, to).unwrap()).unwrap();
                    slot_has(&gpu, &weights, 1, &host);
                }
            }
        }
    }
}

/// In a pool: packed on the device, copied again from host memory after an eviction, and read from the device where
/// there is no room to pack.
#[test]
#[ignore = "needs a GPU"]
fn a_pool_has_the_bytes_of_host_memory() {
    const ADAPTERS: usize = 5;
    let gpu = Gpu::new();
    let readback = Readback::new(&Gpu::in_context(Arc::clone(&gpu.context)).queue).unwrap();
    let mut rng = StdRng::seed_from_u64(12);
    let model = spec().shard(Shard::new(TpRank::SINGLE)).unwrap();
    let bytes = AdapterPool::arena_bytes(&model, DType::BF16, 80, 2);
    // Host memory for three, so that some are packed again.
    let config = PoolConfig::arena_bytes(bytes).host_bytes(bytes / 2 * 3).poisoning();
    let mut pool = AdapterPool::new(&gpu.queue, &model, DType::BF16, CAPACITY, config).unwrap();
    let adapters: Vec<_> = (0..ADAPTERS).map(|_| both(&readback, factors(None, &mut rng))).collect();
    let (hosts, ids): (Vec<_>, Vec<_>) = adapters
        .into_iter()
        .map(|[host, device]| {
            let source = Source::memory(Arc::new(device), &model, DType::BF16).unwrap();
            (host, pool.register(source).unwrap())
        })
        .unzip();
    for step in 0..choose(200, 20) {
        let mut batch: Vec<usize> = (0..rng.random_range(1..=2)).map(|_| rng.random_range(0..ADAPTERS)).collect();
        batch.dedup();
        let of_batch: Vec<_> = batch.iter().map(|&adapter| ids[adapter]).collect();
        // Some are asked for and then not waited for.
        let may_wait = step % 3 > 0;
        let leases = loop {
            match pool.prepare(&of_batch, StreamId::FIRST) {
                Ok(leases) => break leases,
                Err(PoolError::Loading { .. } | PoolError::Full) if !may_wait => break Vec::new(),
                Err(PoolError::Loading { .. } | PoolError::Full) => drop(pool.wait(Duration::from_secs(10))),
                Err(error) => panic!("{error}"),
            }
        };
        let weights = pool.weights(StreamId::FIRST).unwrap();
        for (lease, &adapter) in leases.iter().zip(&batch) {
            slot_has(&gpu, weights, lease.slot().index().unwrap(), &hosts[adapter]);
        }
        drop(leases);
        pool.end_step(StreamId::FIRST).unwrap();
    }
}

/// A load waits for the work that writes the tensors, and the calls of the pool do not. What is written to their memory
/// afterwards is not theirs.
#[test]
#[ignore = "needs a GPU"]
fn a_pool_loads_what_the_queue_leaves() {
    const FEATURES: usize = 4096;
    const LAYERS: usize = 40;
    let (gpu, (model, _)) = (Gpu::new(), adding::model(LAYERS, FEATURES));
    let spin = Spin::new(&gpu);
    // The pool's work is on another stream than the trainer's.
    let trainer = Gpu::in_context(Arc::clone(&gpu.context));
    let spin_of_trainer = Spin::new(&trainer);
    drop(spin);
    let capacity = Capacity::tokens(8).slots(2).rank(64);
    let layers = choose(LAYERS, 2);
    let modules = adding::modules(layers, FEATURES, 64, |_| 3.0);
    let bytes = AdapterPool::arena_bytes(&model, DType::BF16, 64, 2);
    let config = PoolConfig::arena_bytes(bytes).host_bytes(2 * bytes);
    let mut pool = AdapterPool::new(&gpu.queue, &model, DType::BF16, capacity, config).unwrap();

    let (config, tensors) = adapters::parts(1.0, &modules);
    let readback = Readback::new(&trainer.queue).unwrap();
    let filled = |values: &[f32]| {
        let mut buffer = Buffer::zeros(&trainer.queue, values.len()).unwrap();
        buffer.write(values).unwrap();
        buffer
    };
    // All tensors have as many elements, and are in one buffer in turn.
    let steps: Vec<_> = tensors.iter().map(|(_, tensor)| filled(&tensor.to_f32())).collect();
    let nan = filled(&vec![f32::NAN; steps[0].len()]);
    let mut factor = filled(&vec![f32::NAN; steps[0].len()]);
    let spun = spin_of_trainer.run(300);
    let start = Instant::now();
    let of_device = tensors.iter().zip(&steps).map(|((name, tensor), step)| {
        trainer.queue.copy(step, &mut factor).unwrap();
        let tensor = readback.tensor(&factor, tensor.shape()).unwrap();
        trainer.queue.copy(&nan, &mut factor).unwrap();
        (name.clone(), tensor)
    });
    let adapter = Arc::new(Adapter::from_tensors(&config, of_device.collect::<Vec<_>>()).unwrap());
    let id = pool.register(Source::memory(adapter, &model, DType::BF16).unwrap()).unwrap();
    let _ = pool.acquire(id, StreamId::FIRST);
    assert!(start.elapsed() < Duration::from_millis(200), "the caller waited: {:?}", start.elapsed());
    assert!(!spun.is_complete(), "the kernel was too short");
    let lease = loop {
        match pool.acquire(id, StreamId::FIRST) {
            Ok(lease) => break lease,
            Err(_) => drop(pool.wait(Duration::from_secs(10))),
        }
        assert!(start.elapsed() < Duration::from_secs(60), "nothing loads");
    };
    assert!(spun.is_complete());
    println!("{} MB of f32 from device memory in {:?}, 300 ms of it waited", layers * 2, start.elapsed());
    // NaN would have been refused.
    assert!(lease.slot().index().is_some());
}

/// Elements that are not finite in the table's type, each by its place. Nothing changes, and no room is lost.
#[test]
#[ignore = "needs a GPU"]
fn weights_that_are_not_finite_are_refused_by_name() {
    let gpu = Gpu::new();
    let readback = Readback::new(&gpu.queue).unwrap();
    let (model, _) = adding::model(1, 16);
    let bytes = WeightTable::arena_bytes_for(&model, DType::F16, CAPACITY);
    let weights = WeightTable::new(&gpu.queue, &model, DType::F16, CAPACITY, bytes).unwrap();
    let config = PoolConfig::arena_bytes(AdapterPool::arena_bytes(&model, DType::F16, 8, 2)).host_bytes(1 << 20);
    let mut pool = AdapterPool::new(&gpu.queue, &model, DType::F16, CAPACITY, config).unwrap();
    let of = |place: Option<(usize, f32)>| {
        let [mut module] = <[Lora; 1]>::try_from(adding::modules(1, 16, 4, |_| 1.0)).unwrap();
        if let Some((place, value)) = place {
            let a = module.a.len();
            *if place < a { &mut module.a[place] } else { &mut module.b[place - a] } = value;
        }
        let [_, device] = both(&readback, adapters::parts(1.0, &[module]));
        device
    };
    let loaded = weights.load(0, &of(None).plan(&model, DType::F16).unwrap()).unwrap();
    let (before, used) = (row(&gpu, &weights, 0), weights.usage().used);
    // Beyond f16, in the last row of A; then in B.
    for (place, value) in [(3 * 16 + 15, 7e4), (4 * 16 + 5, f32::INFINITY)] {
        let bad = of(Some((place, value)));
        let want = packed(&bad, &model, DType::F16).unwrap_err().to_string();
        assert!(want.contains("lora_"), "{want}");
        let refused = weights.load(0, &bad.plan(&model, DType::F16).unwrap()).unwrap_err();
        assert_eq!(refused.to_string(), want);
        let id = pool.register(Source::memory(Arc::new(bad), &model, DType::F16).unwrap()).unwrap();
        let failed = loop {
            match pool.acquire(id, StreamId::FIRST) {
                Err(PoolError::Loading { .. }) => drop(pool.wait(Duration::from_secs(10))),
                result => break result.unwrap_err(),
            }
        };
        assert!(failed.to_string().contains(&want), "{failed}");
        pool.unregister(id).unwrap();
    }
    assert_eq!((row(&gpu, &weights, 0), weights.usage().used), (before, used));
    weights.check([loaded]).unwrap();
}

#[test]
#[ignore = "needs a GPU"]
fn what_is_no_tensor_is_refused() {
    let gpu = Gpu::new();
    let readback = Readback::new(&gpu.queue).unwrap();
    let short = readback.tensor(&Buffer::<f32>::zeros(&gpu.queue, 11).unwrap(), [3, 4]);
    assert!(matches!(short, Err(LoadError::Adapter(_))), "{short:?}");
    let other = Gpu::in_context(Arc::clone(&gpu.context));
    let foreign = readback.tensor(&Buffer::<f32>::zeros(&other.queue, 12).unwrap(), [3, 4]);
    assert!(matches!(foreign, Err(LoadError::Device(LaunchError::WrongStream { .. }))), "{foreign:?}");
}

/// At an address, in an engine's own memory.
#[test]
#[ignore = "needs a GPU"]
fn a_tensor_may_be_at_an_address() {
    let gpu = Gpu::new();
    let readback = Readback::new(&gpu.queue).unwrap();
    let values: Vec<f32> = (0..24_u8).map(f32::from).collect();
    let memory = gpu.upload(&values);
    // SAFETY: the memory has as many elements, and is written no more.
    let tensor = unsafe { readback.tensor_raw(memory.address(), DType::F32, [2, 3, 4]) }.unwrap();
    assert_eq!((tensor.shape(), tensor.to_f32()), (&[2, 3, 4][..], values));
    // SAFETY: no memory is as large, which is found before it is used.
    let too_large = unsafe { readback.tensor_raw(memory.address(), DType::F32, [usize::MAX, 2]) };
    assert!(matches!(too_large, Err(LoadError::Device(_))), "{too_large:?}");
}
