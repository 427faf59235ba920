//! CUDA kernels for multi-LoRA inference: many small adapters served from one base model, in one batch, in one pass.
#![deny(unsafe_code)]

pub mod adapter;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod dtype;
pub mod error;
mod extent;
mod ffi;
pub mod model;
pub mod plan;
pub mod reference;
pub mod routing;

pub use dtype::{DType, Element};
pub use routing::Slot;
