//! The raw API: the same operations on memory and streams that the engine owns.
//!
//! Types that describe memory are `Copy`, have no lifetime and are safe to create, because an address is only data. The
//! requirements are those of each launch, which is `unsafe`. For engines that do not use cudarc's slices, and for graphs of several
//! streams.
//!
//! In the `# Safety` sections, *until the work has run* means until everything that the call enqueued has completed on the stream,
//! not until the call returns. For a captured call it means as long as the graph may be replayed.
//!
#![doc = include_str!("../../docs/graphs.md")]
#![expect(unsafe_code, reason = "launches on memory that the caller owns")]

mod abi;
mod embedding;
mod experts;
mod fully_sharded;
mod fused_linear;
mod grouping;
mod linear;
mod matrix;
mod memory;
mod routing;
mod step;
mod table;
mod top_k;

pub(in crate::cuda) use self::experts::Form;
pub use self::{
    embedding::LoraEmbedding,
    experts::LoraExperts,
    fully_sharded::FullyShardedLinear,
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
