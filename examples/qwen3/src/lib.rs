//! The reference forward of aril, on the CPU and on the GPU: a Qwen3, dense or with experts, or a Qwen3.5 with experts,
//! that serves many LoRA adapters in one batch.
//!
//! Start with [`forward`], which has the multi-LoRA calls. `aril-engine` runs on it, and so does the program [`main`],
//! whose manual is README.md.

pub mod checkpoint;
mod cli;
pub mod config;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
pub mod device_arg;
pub mod dummy;
pub mod error;
pub mod experts;
pub mod files;
pub mod forward;
mod generate;
pub mod group;
mod job;
#[cfg(feature = "cuda")]
pub mod kernels;
pub mod model;
mod opaque;
mod pool;
mod report;
mod requests;
pub mod stderr;
pub mod tokenizer;
mod verdict;
mod verify;

pub use cli::main;
