//! A reference engine and server: Qwen3 and many LoRA adapters, with the OpenAI API.
//!
//! - `engine`: continuous batching, without a server. Start with `engine/scheduler.rs`.
//! - `worker`: the thread that owns the engine.
//! - `server`: the HTTP server.
//! - `log`: what it says on standard error.
//! - `figures`: the time of decode steps on a GPU.
//!
//! The model is `aril_qwen3`.

mod dummy;
mod engine;
#[cfg(feature = "cuda")]
pub mod figures;
pub mod log;
mod options;
mod server;
mod worker;

use aril_qwen3::{checkpoint, config, cpu, device, error, files, forward, group, model, tokenizer};
#[cfg(feature = "cuda")]
use aril_qwen3::{cuda, stderr};

pub use aril_qwen3::device_arg::DeviceArg;

pub use self::{
    options::{Dtype, LoadFormat, LoraModule, Options},
    server::{Running, start},
};
