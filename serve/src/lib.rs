//! A reference engine and server: Qwen3 and many LoRA adapters, with the OpenAI API.
//!
//! - `engine`: continuous batching, without a server. Start with `engine/scheduler.rs`.
//! - `worker`: the thread that owns the engine.
//! - `server`: the HTTP server.
//! - `log`: what it says on standard error.
//! - `figures`: the time of decode steps on a GPU.
//!
//! The model is that of the example `qwen3`: this crate compiles the same files.

mod dummy;
mod engine;
#[cfg(feature = "cuda")]
pub mod figures;
pub mod log;
mod options;
/// The model. Its modules name each other from the root of the crate, as in the example.
#[path = "../../examples/qwen3"]
#[expect(dead_code, reason = "the example alone merges adapters and follows tokens")]
mod qwen3 {
    pub(crate) mod adapter_pool;
    pub(crate) mod checkpoint;
    pub(crate) mod config;
    pub(crate) mod cpu;
    #[cfg(feature = "cuda")]
    pub(crate) mod cuda;
    pub(crate) mod device;
    pub(crate) mod device_arg;
    pub(crate) mod error;
    pub(crate) mod experts;
    pub(crate) mod files;
    pub(crate) mod forward;
    pub(crate) mod group;
    pub(crate) mod model;
    pub(crate) mod stderr;
    pub(crate) mod tokenizer;
}
mod server;
mod worker;

#[cfg(feature = "cuda")]
use qwen3::cuda;
use qwen3::{
    adapter_pool, checkpoint, config, cpu, device, error, experts, files, forward, group, model, stderr, tokenizer,
};

pub use self::{
    options::{Dtype, LoadFormat, LoraModule, Options},
    qwen3::device_arg::DeviceArg,
    server::{Running, start},
};
