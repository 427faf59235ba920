//! LoRA operations on the CPU, multithreaded. They accumulate in `f32` and round once, when they store.
//!
//! The types have the names of those in `cuda`, and their calls the same arguments, so that engines can test without a
//! GPU: a loader or a step loop compiles for both and differs in its imports. What a GPU's object is made on (its
//! queue), the CPU's is made without, and [`step`](WeightTable::step) takes a batch as it is, where a GPU's takes what
//! its routing returns. A token's result does not depend on the rest of the batch.

mod experts;
mod factors;
mod fully_sharded;
mod fused_linear;
mod linear;
mod matrix;
mod pool;
mod rows;
mod step;
mod table;
mod upload;

pub use self::{
    experts::LoraExperts,
    fully_sharded::FullyShardedLinear,
    fused_linear::FusedLinear,
    linear::{LoraEmbedding, LoraLinear, Shrunk},
    matrix::{Matrix, MatrixMut},
    pool::{AdapterPool, Tiers},
    rows::TrainedRows,
    step::{Step, Workspace},
    table::WeightTable,
    upload::{Filled, Reservation, Staging},
};
