//! The crate's operations on tensors of many layouts, and the model of the example `qwen3`. With the feature `cuda`, on
//! a GPU.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../examples/qwen3/adapters.rs"]
mod adapters;
#[path = "../../examples/qwen3/generate.rs"]
mod generate;
#[path = "../../examples/qwen3/model.rs"]
mod model;
mod naive;
mod operation;
mod sequential;
mod threads;

use std::{sync::Arc, time::Duration};

use aril::{
    DType,
    adapter::Adapter,
    model::Model,
    plan::Capacity,
    pool::{Lease, PoolConfig, PoolError, Source},
};
use aril_candle::Adapters;

/// A pool with room for an adapter in each slot.
fn pool(model: &Model, dtype: DType, capacity: Capacity) -> Adapters {
    let arena = Adapters::arena_bytes(model, dtype, capacity.max_rank, capacity.num_slots);
    Adapters::new(model, dtype, &device(), capacity, PoolConfig::arena_bytes(arena)).unwrap()
}

/// Loads an adapter and leases it, which keeps it.
fn lease(adapters: &Adapters, model: &Model, dtype: DType, adapter: Adapter) -> Lease {
    let source = Source::memory(Arc::new(adapter), model, dtype).unwrap();
    let version = adapters.load(source).unwrap();
    assert!(adapters.wait_for(version.load(), Duration::from_secs(60)).unwrap());
    loop {
        match adapters.prepare(&[version.id()]) {
            // Another one is still on its way to the device.
            Err(PoolError::Loading { .. }) => std::thread::sleep(Duration::from_millis(1)),
            leases => return leases.unwrap().remove(0),
        }
    }
}

/// The element type of candle's tensors.
fn of_candle(dtype: DType) -> candle_core::DType {
    match dtype {
        DType::BF16 => candle_core::DType::BF16,
        DType::F16 => candle_core::DType::F16,
        _ => candle_core::DType::F32,
    }
}

/// The device of these tests.
fn device() -> candle_core::Device {
    if cfg!(feature = "cuda") {
        candle_core::Device::new_cuda_with_stream(0).unwrap()
    } else {
        candle_core::Device::Cpu
    }
}
