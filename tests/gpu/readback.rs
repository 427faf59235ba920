//! Adapters whose tensors are in device memory: the bytes and the deltas of the same ones in host memory.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aril::{
    DType, Element,
    adapter::{Adapter, Tensor},
    cuda::{AdapterPool, Buffer, LaunchError, Queue, Readback},
    error::LoadError,
    model::{Experts, Linear, Model, ModelSpec, Parallel, Shard, TpRank},
    plan::Capacity,
    pool::{PoolConfig, Source, StreamId},
};
use cudarc::driver::{DeviceRepr, ValidAsZeroBits};
use half::{bf16, f16};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    common::{adapters, adapters::Lora, adding, small::choose},
    device::Gpu,
    setup::Spin,
};

/// The tensor's elements in device memory.
fn on_device(queue: &Queue, readback: &Readback, tensor: &Tensor) -> Tensor {
    fn of<T>(queue: &Queue, readback: &Readback, tensor: &Tensor) -> Tensor
    where
        T: Element + DeviceRepr + ValidAsZeroBits,
    {
        let values: Vec<T> = tensor.bytes().chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
        let mut buffer = Buffer::<T>::zeros(queue, values.len()).unwrap();
        buffer.write(&values).unwrap();
        readback.tensor(&buffer, tensor.shape()).unwrap()
    }
    match tensor.dtype() {
        DType::BF16 => of::<bf16>(queue, readback, tensor),
        DType::F16 => of::<f16>(queue, readback, tensor),
        _ => of::<f32>(queue, readback, tensor),
    }
}

/// The same adapter in either memory.
fn both(queue: &Queue, modules: &[Lora]) -> [Adapter; 2] {
    let (config, tensors) = adapters::parts(4.0, modules);
    let readback = Readback::new(queue).unwrap();
    let copies: Vec<_> =
        tensors.iter().map(|(name, tensor)| (name.clone(), on_device(queue, &readback, tensor))).collect();
    assert!(tensors.iter().zip(&copies).all(|((_, tensor), (_, copy))| copy.to_f32() == tensor.to_f32()));
    [tensors, copies].map(|tensors| Adapter::from_tensors(&config, tensors).unwrap())
}

fn packed(adapter: &Adapter, model: &Model, dtype: DType) -> Vec<u8> {
    let image = adapter.plan(model, dtype).unwrap();
    // As large as u64, which aligns them.
    let mut block = vec![0_u64; image.bytes().div_ceil(8)];
    image.write_to(&mut bytemuck::cast_slice_mut(&mut block)[..image.bytes()]).unwrap();
    bytemuck::cast_slice(&block).to_vec()
}

/// Linear layers, experts and an embedding, on one rank and on each of two.
#[test]
#[ignore = "needs a GPU"]
fn the_bytes_are_those_of_host_memory() {
    const FEATURES: usize = 96;
    let gpu = Gpu::new();
    let mut rng = StdRng::seed_from_u64(11);
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let mut spec = ModelSpec::new();
        spec.embedding("embed", 50, FEATURES).unwrap();
        spec.linear(Linear::new("qkv", Parallel::Column, FEATURES).slice("q", 64).slice("k", 32)).unwrap();
        spec.linear(Linear::new("o", Parallel::Row, 64).slice("o", FEATURES)).unwrap();
        spec.experts(Experts::new("mlp.experts", 4, FEATURES, 64).top_k(2)).unwrap();
        let experts = (0..4).flat_map(|expert| {
            [("gate_proj", FEATURES, 64), ("up_proj", FEATURES, 64), ("down_proj", 64, FEATURES)]
                .map(|(name, inputs, outputs)| Lora::linear(format!("mlp.experts.{expert}.{name}"), inputs, outputs, 5))
        });
        let modules = [
            Lora::embedding("embed", 50, FEATURES, 9),
            Lora::linear("qkv.q", FEATURES, 64, 16),
            Lora::linear("qkv.k", FEATURES, 32, 3),
            Lora::linear("o.o", 64, FEATURES, 8),
        ];
        let modules = modules.into_iter().chain(experts);
        let modules: Vec<Lora> =
            modules.map(|module| module.dtype(dtype).fill(|| rng.random_range(-1.0..1.0_f32))).collect();
        let [host, device] = both(&gpu.queue, &modules);
        for rank in [TpRank::SINGLE, TpRank::new(0, 2).unwrap(), TpRank::new(1, 2).unwrap()] {
            let model = spec.shard(Shard::new(rank)).unwrap();
            for to in [DType::BF16, DType::F32] {
                let [host, device] = [&host, &device].map(|adapter| packed(adapter, &model, to));
                assert!(host == device, "{dtype} as {to} on {rank:?}");
            }
        }
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
