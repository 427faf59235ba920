//! The LoRA operations of layers, each on typed operands of a step, and on memory that the engine owns (`_raw`).

mod embedding;
mod experts;
mod fully_sharded;
mod fused_linear;
mod grouping;
mod linear;
mod rows;
mod stack;

pub(in crate::cuda) use self::grouping::Groups;
pub use self::{
    embedding::LoraEmbedding,
    experts::LoraExperts,
    fully_sharded::FullyShardedLinear,
    fused_linear::FusedLinear,
    grouping::{GroupedRoutes, Grouping, TopK},
    linear::{LoraLinear, Shrunk},
    rows::TrainedRows,
    stack::Stack,
};
