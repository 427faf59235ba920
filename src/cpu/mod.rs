//! The operations on the CPU: threaded, accumulating in `f32`, rounding once at the store.
//!
//! The default backend of the example, and what an engine's tests run on where there is no GPU. The nouns are those of the CUDA
//! side. A token's result does not depend on what else is in the batch.

mod activation;
mod embedding;
mod experts;
mod factors;
mod fused_linear;
mod linear;
mod matrix;
mod step;
mod table;
mod upload;
mod workspace;

pub use self::{
    embedding::LoraEmbedding,
    experts::LoraExperts,
    fused_linear::FusedLinear,
    linear::LoraLinear,
    matrix::{Matrix, MatrixMut},
    step::Step,
    table::WeightTable,
    upload::{Filled, Reservation},
    workspace::Workspace,
};
