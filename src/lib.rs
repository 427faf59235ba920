//! CUDA kernels for multi-LoRA inference: many small adapters served from one base model, in one batch, in one pass.
#![deny(unsafe_code)]

pub mod adapter;
pub mod cpu;
mod dtype;
pub mod error;
pub mod model;
pub mod reference;
pub mod routing;

pub use dtype::{DType, Element};
pub use routing::Slot;
