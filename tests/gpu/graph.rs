//! A captured step follows its memory: adapters, ranks, slots and routing change between replays.

use aril::{
    DType,
    adapter::Adapter,
    cuda::{LoraEmbedding, LoraLinear, Routing, WeightTable, Workspace, raw},
    model::{Linear, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    routing::Batch,
};

use crate::{
    common::adapters::{self, Lora},
    device::Gpu,
    setup::slots_of,
};

const FEATURES: usize = 64;

/// An adapter of `rank` that adds `rank * value` times the sum of x to every feature of both layers and to the
/// embedding.
fn adapter(rank: usize, value: f32) -> Adapter {
    let modules = [Lora::linear("m.q", FEATURES, FEATURES, rank), Lora::embedding("embed", 10, FEATURES, rank)];
    adapters::adapter(&modules.map(|module| module.of_rows(|_| value)))
}

#[test]
#[ignore = "needs a GPU"]
fn a_replay_sees_what_changed() {
    let gpu = Gpu::new();
    let Gpu { kernels, queue, .. } = &gpu;
    let mut spec = ModelSpec::new();
    let linear_id = spec.linear(Linear::new("m", Parallel::Replicated, FEATURES).slice("q", FEATURES)).unwrap();
    let embedding_id = spec.embedding("embed", 10, FEATURES).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(16).slots(3).rank(32);
    let weights = WeightTable::new(queue, &model, DType::F32, capacity, 1 << 20).unwrap();
    let mut routing = Routing::new(queue, capacity, 2).unwrap();
    let linear = LoraLinear::for_model(kernels, &model, linear_id, DType::F32, capacity).unwrap();
    let embedding = LoraEmbedding::for_model(kernels, &model, embedding_id, DType::F32, capacity).unwrap();
    let workspace = Workspace::with_bytes(queue, linear.plan().workspace_bytes()).unwrap();

    let tokens = 16;
    let x = gpu.upload(&vec![1.0_f32; tokens * FEATURES]);
    let ids = gpu.upload(&vec![3_i32; tokens]);
    let mut y = [gpu.poisoned(tokens * FEATURES * 4), gpu.poisoned(tokens * FEATURES * 4)];
    let matrices = [0, 1].map(|i| raw::MatrixMut::new::<f32>(y[i].address(), tokens, FEATURES));
    let x_matrix = raw::MatrixRef::new::<f32>(x.address(), tokens, FEATURES);
    let batch = routing.capture_batch(tokens).unwrap();
    let graph = gpu.capture(|| {
        let step = raw::Step::new(weights.raw(), batch, workspace.raw(), gpu.raw_stream());
        // SAFETY: every captured operand outlives the last replay.
        unsafe { linear.add_delta_raw(&step, x_matrix, matrices[0]) }.unwrap();
        // SAFETY: as above.
        unsafe { embedding.add_delta_raw(&step, ids.address(), matrices[1]) }.unwrap();
    });

    // Slots hold adapters of `rank` and `value`; each step changes some of them and routes another batch.
    let mut held: [Option<(usize, f32)>; 3] = [None; 3];
    type Step<'a> = (&'a [(usize, Option<(usize, f32)>)], &'a [i32]);
    let steps: [Step<'_>; 6] = [
        (&[], &[0, 1, 2, -1]),
        (&[(0, Some((4, 1.0))), (2, Some((32, 0.5)))], &[0, 1, 2, -1, 2, 0, -1]),
        (&[(0, Some((17, 2.0)))], &[0; 16]),
        (&[(2, None), (1, Some((1, 3.0)))], &[2, 1, 1, 0, 2, 2, 1, -1, 0]),
        (&[(0, None), (1, None)], &[0, 1, 2]),
        (&[(1, Some((5, 1.0)))], &[]),
    ];
    for (step, (changes, slots)) in steps.into_iter().enumerate() {
        for &(slot, change) in changes {
            held[slot] = change;
            match change {
                Some((rank, value)) => {
                    let adapter = adapter(rank, value);
                    weights.load(slot, &adapter.plan(&model, DType::F32).unwrap()).unwrap();
                }
                None => weights.unload(slot).unwrap(),
            }
        }
        y.iter_mut().for_each(|y| y.write(&vec![100.0_f32; tokens * FEATURES]));
        let loaded = slots_of(&weights, slots);
        routing.update(&Batch::new(&loaded)).unwrap();
        graph.replay();
        let results = [y[0].read::<f32>(), y[1].read::<f32>()];
        for token in 0..tokens {
            let held =
                slots.get(token).and_then(|&slot| usize::try_from(slot).ok()).and_then(|slot| *held.get(slot)?);
            let delta = held.map_or(0.0, |(rank, value)| rank as f32 * value);
            let expected = [100.0 + delta * FEATURES as f32, 100.0 + delta];
            for (result, expected) in results.iter().zip(expected) {
                let row = &result[token * FEATURES..][..FEATURES];
                assert!(row.iter().all(|&y| y == expected), "step {step}, token {token}: {} is not {expected}", row[0]);
            }
        }
    }
}

/// Routing on the device is part of the graph: the slots it reads may change between replays.
#[test]
#[ignore = "needs a GPU"]
fn routing_on_the_device_is_captured() {
    let gpu = Gpu::new();
    let Gpu { kernels, queue, .. } = &gpu;
    let mut spec = ModelSpec::new();
    let id = spec.linear(Linear::new("m", Parallel::Replicated, FEATURES).slice("q", FEATURES)).unwrap();
    spec.embedding("embed", 10, FEATURES).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(4).slots(2).rank(8);
    let weights = WeightTable::new(queue, &model, DType::F32, capacity, 1 << 20).unwrap();
    for (slot, value) in [(0, 1.0), (1, 2.0)] {
        let adapter = adapter(1, value);
        weights.load(slot, &adapter.plan(&model, DType::F32).unwrap()).unwrap();
    }
    let linear = LoraLinear::for_model(kernels, &model, id, DType::F32, capacity).unwrap();
    let workspace = Workspace::with_bytes(queue, linear.plan().workspace_bytes()).unwrap();
    let memory = gpu.without_indices(raw::Routing::device_bytes(capacity).unwrap());
    // SAFETY: the memory outlives the routing and is used on one stream.
    let mut routing = unsafe { raw::Routing::new(kernels, capacity, 1, memory.region()) }.unwrap();
    let mut slots = gpu.upload(&[-1_i32; 4]);
    let mut scales = gpu.upload(&[1.0_f32; 4]);
    let x = gpu.upload(&[1.0_f32; 4 * FEATURES]);
    let mut y = gpu.upload(&[0.0_f32; 4 * FEATURES]);
    let (x_matrix, y_matrix) =
        (raw::MatrixRef::new::<f32>(x.address(), 4, FEATURES), raw::MatrixMut::new::<f32>(y.address(), 4, FEATURES));
    let graph = gpu.capture(|| {
        let stream = gpu.raw_stream();
        // SAFETY: every captured operand outlives the last replay.
        let batch = unsafe { routing.update_on_device(slots.address(), Some(scales.address()), 4, stream) }.unwrap();
        let step = raw::Step::new(weights.raw(), batch, workspace.raw(), stream);
        // SAFETY: as above.
        unsafe { linear.add_delta_raw(&step, x_matrix, y_matrix) }.unwrap();
    });
    for step in [[0, 1, -1, 9], [1, 1, 0, 0], [i32::MIN, -1, 1, i32::MAX]] {
        slots.write(&step);
        scales.write(&[1.0_f32, 0.5, 3.0, -1.0]);
        y.write(&[0.0_f32; 4 * FEATURES]);
        graph.replay();
        let result = y.read::<f32>();
        for (token, (slot, scale)) in step.into_iter().zip([1.0, 0.5, 3.0, -1.0]).enumerate() {
            let value = match slot {
                0 => 1.0,
                1 => 2.0,
                _ => 0.0,
            };
            assert_eq!(result[token * FEATURES], value * scale * FEATURES as f32, "{step:?}, token {token}");
        }
    }
}
