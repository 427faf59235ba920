//! The raw door: the operations on memory that somebody else owns.
//!
//! Descriptors of memory are `Copy`, carry no lifetime and are safe to make: an address is data. What must hold is said once, at
//! each launch, which is `unsafe`. For engines that are not built on cudarc's slices, and for graphs of several streams.
//!
//! In the `# Safety` sections, *until the work has run* means until everything enqueued by the call is complete on the stream, not
//! until the call returns. For a call that is captured, it means for as long as the graph may be replayed.
//!
#![doc = include_str!("../../docs/graphs.md")]
#![expect(unsafe_code, reason = "launches on memory that somebody else owns")]

mod abi;
mod align;
mod embedding;
mod experts;
mod fused_linear;
mod grouping;
mod linear;
mod matrix;
mod memory;
mod routing;
mod step;
mod table;
mod top_k;

pub use self::{
    align::{AlignedRoutes, Alignment},
    embedding::LoraEmbedding,
    experts::LoraExperts,
    fused_linear::FusedLinear,
    grouping::{GroupedRoutes, Grouping},
    linear::LoraLinear,
    matrix::{MatrixMut, MatrixRef},
    memory::{DeviceRegion, Stream},
    routing::{RoutedBatch, Routing},
    step::{Step, Workspace},
    table::{Descriptor, Table},
    top_k::TopK,
};
pub(in crate::cuda) use self::{experts::Form, linear::Kernel};
