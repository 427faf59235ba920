//! The operations on the CPU: threaded, accumulating in `f32`, rounding once at the store.
//!
//! The default backend of the example, and what an engine's tests run on where there is no GPU. The nouns are those of the CUDA
//! side. A token's result does not depend on what else is in the batch.

mod activation;
mod embedding;
mod experts;
mod forward;
mod linear;
mod matrix;
mod weights;

pub use embedding::LoraEmbedding;
pub use experts::LoraExperts;
pub use forward::FusedLinear;
pub use linear::{LoraLinear, Workspace};
pub use matrix::{Matrix, MatrixMut};
pub use weights::WeightTable;
