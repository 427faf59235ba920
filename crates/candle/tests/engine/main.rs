//! The crate's operation on tensors of many layouts, and the model of the example `qwen3`. With the feature `cuda`, on
//! a GPU.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../examples/qwen3/adapters.rs"]
mod adapters;
#[path = "../../examples/qwen3/generate.rs"]
mod generate;
#[path = "../../examples/qwen3/model.rs"]
mod model;
mod operation;
mod sequential;
mod threads;

/// The device of these tests.
fn device() -> candle_core::Device {
    if cfg!(feature = "cuda") {
        candle_core::Device::new_cuda_with_stream(0).unwrap()
    } else {
        candle_core::Device::Cpu
    }
}
