//! The LoRA operations of layers, each on typed operands of a step, and on memory that the engine owns (`_raw`).

mod embedding;
mod experts;
mod fully_sharded;
mod linear;

pub use self::{
    embedding::LoraEmbedding,
    experts::LoraExperts,
    fully_sharded::FullyShardedLinear,
    linear::{LoraLinear, Shrunk},
};
