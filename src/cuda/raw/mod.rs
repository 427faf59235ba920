//! The raw API: steps and operands at addresses, in memory and on streams that the engine owns.
//!
//! A layer's operations on them have names that end in `_raw`, such as
//! [`LoraLinear::add_delta_raw`](crate::cuda::LoraLinear::add_delta_raw).
//! [`LoraLinear::for_model`](crate::cuda::LoraLinear::for_model) plans a layer for a [`Table`] of the engine.
//! [`Routing`], [`Grouping`] and [`FusedLinear`] are types of their own, because those of the safe API own or borrow
//! the memory that these have the address of.
//!
//! Types that describe memory are `Copy`, have no lifetime and are safe to create, because an address is only data. The
//! requirements are those of each launch, which is `unsafe`. For engines that do not use cudarc's slices, that capture
//! their own graphs, or that launch on several streams.
//!
//! In the `# Safety` sections, *until the work has run* means until everything that the call enqueued has completed on
//! the stream, not until the call returns. For a captured call it means as long as the graph may be replayed.
//!
#![doc = include_str!("../../docs/own_graphs.md")]
//!
#![doc = include_str!("../../docs/graphs.md")]
#![expect(unsafe_code, reason = "launches on memory that the caller owns")]

mod fused_linear;
mod grouping;
mod memory;
mod routing;
mod stack;
mod step;

pub(in crate::cuda) use self::memory::{NO_OUTPUTS, RawMatrix, dtype_code, int};
pub use self::{
    fused_linear::FusedLinear,
    grouping::{GroupedRoutes, Grouping, TopK},
    memory::{DeviceRegion, MatrixMut, MatrixRef, Stream},
    routing::{RoutedBatch, Routing},
    stack::Stack,
    step::{Descriptor, Step, Table, Workspace},
};
