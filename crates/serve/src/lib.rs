//! A reference server: Qwen3 and many LoRA adapters, with the OpenAI API.
//!
//! - `server`: the HTTP server.
//! - `log`: what it says on standard error.
//!
//! The engine is `aril_engine`, and the model `aril_qwen3`.

pub mod log;
mod options;
mod server;

use aril_qwen3::{checkpoint, config, dummy, error, files, model, tokenizer};

pub use aril_qwen3::device_arg::DeviceArg;

pub use self::{
    options::{Dtype, LoadFormat, LoraModule, Options},
    server::{Running, start},
};
