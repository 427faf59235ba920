//! The device's grouping of tokens against the host's.

use aril::{
    DType,
    cuda::{LaunchError, LoraLinear, WeightTable, Workspace, raw},
    plan::Capacity,
    routing::Segments,
};
use proptest::prelude::*;

use crate::{
    common::adding,
    device::{Buffer, Gpu},
    operations::config,
};

const FEATURES: usize = 64;

fn update(gpu: &Gpu, memory: &Buffer, capacity: Capacity, slots: &[i32], on_device: bool) -> (Vec<i32>, Vec<i32>) {
    // SAFETY: the memory outlives the routing and is used on one stream.
    let mut routing = unsafe { raw::Routing::new(&gpu.kernels, capacity, 1, memory.region()) }.unwrap();
    let uploaded = gpu.upload(slots);
    let batch = if on_device {
        // SAFETY: the slots are alive until the stream is synchronized.
        unsafe { routing.update_on_device(uploaded.address(), None, slots.len(), gpu.raw_stream()) }.unwrap()
    } else {
        // SAFETY: the stream is alive and not capturing.
        unsafe { routing.update(slots, None, gpu.raw_stream()) }.unwrap()
    };
    let words = memory.read::<i32>();
    let at = |address: u64| ((address - memory.address()) / 4) as usize;
    let indptr = words[at(batch.indptr())..][..capacity.num_slots + 1].to_vec();
    let live = *indptr.last().unwrap() as usize;
    let mut tokens = words[at(batch.tokens())..][..live].to_vec();
    // The order of tokens within a slot is arbitrary.
    indptr.windows(2).for_each(|ends| tokens[ends[0] as usize..ends[1] as usize].sort_unstable());
    (indptr, tokens)
}

#[test]
#[ignore = "needs a GPU"]
fn the_device_groups_as_the_host_does() {
    let gpu = Gpu::new();
    let slots = |max: usize| prop::collection::vec(prop_oneof![6 => 0..40_i32, 1 => -2..9000_i32], 0..max);
    let strategy = (prop_oneof![slots(50), slots(5000)], 1..=60_usize, any::<bool>());
    let run = proptest::test_runner::TestRunner::new(config(60)).run(&strategy, |(slots, num_slots, on_device)| {
        let capacity = Capacity::tokens(slots.len() + 3).slots(num_slots).rank(1);
        let memory = gpu.without_indices(raw::Routing::device_bytes(capacity).unwrap());
        let (indptr, tokens) = update(&gpu, &memory, capacity, &slots, on_device);
        let segments = Segments::new(&slots, num_slots);
        let expected: Vec<i32> = segments.iter().flat_map(|(_, tokens)| tokens).map(|&token| token as i32).collect();
        prop_assert_eq!(tokens, expected);
        for slot in 0..num_slots {
            let expected = segments.iter().find(|(of, _)| *of == slot).map_or(0, |(_, tokens)| tokens.len());
            prop_assert_eq!((indptr[slot + 1] - indptr[slot]) as usize, expected);
        }
        Ok(())
    });
    run.unwrap();
}

#[test]
#[ignore = "needs a GPU"]
fn the_most_slots_and_many_tokens() {
    let gpu = Gpu::new();
    let capacity = Capacity::tokens(70_000).slots(aril::plan::MAX_SLOTS).rank(1);
    let slots: Vec<i32> = (0..70_000_u32).map(|token| (token.wrapping_mul(2_654_435_761) >> 19) as i32).collect();
    let memory = gpu.without_indices(raw::Routing::device_bytes(capacity).unwrap());
    let (_, tokens) = update(&gpu, &memory, capacity, &slots, false);
    let segments = Segments::new(&slots, capacity.num_slots);
    let expected: Vec<i32> = segments.iter().flat_map(|(_, tokens)| tokens).map(|&token| token as i32).collect();
    assert_eq!(tokens, expected);
}

/// While every staging buffer is to be read, `update` returns an error instead of waiting.
#[test]
#[ignore = "needs a GPU"]
fn a_host_that_runs_ahead_is_told() {
    let gpu = Gpu::new();
    let capacity = Capacity::tokens(8).slots(2).rank(1);
    let memory = gpu.without_indices(raw::Routing::device_bytes(capacity).unwrap());
    // SAFETY: the memory outlives the routing and is used on one stream.
    let mut routing = unsafe { raw::Routing::new(&gpu.kernels, capacity, 2, memory.region()) }.unwrap();
    let slots = [1; 8];
    let mut update = || {
        // SAFETY: the stream is alive and not capturing.
        unsafe { routing.update(&slots, None, gpu.raw_stream()) }
    };
    let busy = gpu.upload(&vec![0_u8; 1 << 28]);
    let target = gpu.upload(&vec![0_u8; 1 << 28]);
    for _ in 0..40 {
        // SAFETY: both are large enough and stay alive until the stream is synchronized.
        unsafe {
            cudarc::driver::result::memcpy_dtod_async(target.address(), busy.address(), 1 << 28, gpu.stream.cu_stream())
        }
        .unwrap();
    }
    update().unwrap();
    update().unwrap();
    assert!(matches!(update(), Err(LaunchError::Busy { steps_in_flight: 2 })));
    gpu.synchronize();
    update().unwrap();
}

/// Routing on the device is part of the graph: the slots it reads may change between replays.
#[test]
#[ignore = "needs a GPU"]
fn routing_on_the_device_is_captured() {
    let gpu = Gpu::new();
    let Gpu { kernels, queue, .. } = &gpu;
    let (model, ids) = adding::model(1, FEATURES);
    let capacity = Capacity::tokens(4).slots(2).rank(8);
    let weights = WeightTable::new(queue, &model, DType::F32, capacity, 1 << 20).unwrap();
    for (slot, value) in [(0, 1.0), (1, 2.0)] {
        let adapter = adding::adapter(1, FEATURES, 1, value);
        weights.load(slot, &adapter.plan(&model, DType::F32).unwrap()).unwrap();
    }
    let linear = LoraLinear::for_model(kernels, &model, ids[0], DType::F32, capacity).unwrap();
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
            assert_eq!(result[token * FEATURES], value * scale, "{step:?}, token {token}");
        }
    }
}
