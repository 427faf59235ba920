//! LoRA operations on NVIDIA GPUs.
//!
//! This module is the safe API: no call can access memory outside its operands, whatever its arguments and whatever the
//! data on the device. Operands are cudarc's typed slices of the queue's stream, or [`Buffer`]s, which captured steps
//! keep alive. Layers have the same operations for memory that the engine owns, whose names end in `_raw`. [`raw`] has
//! the types that those take.
//!
//! | type | created once | per step | per layer |
//! |---|---|---|---|
//! | [`Kernels`], [`Queue`] | load the kernels, wrap a stream | | |
//! | [`WeightTable`] | for a model | [`step`](WeightTable::step); load and unload at any time | |
//! | [`Routing`], [`Workspace`] | for a capacity | [`update`](Routing::update) | |
//! | [`LoraLinear`], [`LoraEmbedding`], [`LoraExperts`] | for a layer of a table | | its operations |
//! | [`FusedLinear`] | for a layer of a table and its base weights | | its operations |
//! | [`FullyShardedLinear`] | for a fully sharded layer of a table | | its operations |
//!
//! Every object and operand belongs to a [`Queue`] and is rejected on any other, so that stream order protects what
//! kernels read. Kernels run only in the context that [`Kernels`] were loaded into. Each call makes it current on its
//! thread, as cudarc does.
//!
//! # Example
//!
#![doc = include_str!("../docs/loop.md")]
//!
//! # Where to add the deltas
//!
#![doc = include_str!("../docs/modes.md")]
//!
#![doc = include_str!("../docs/threads.md")]
//!
#![doc = include_str!("../docs/graphs.md")]
//!
#![doc = include_str!("../docs/building.md")]

#[cfg(doctest)]
mod doctests;
mod kernels;
mod loading;
mod memory;
mod operations;
mod pool;
pub mod raw;
mod steps;
mod stream;

pub use self::{
    kernels::{Kernels, driver_is_present},
    loading::{Filled, Readback, Reservation, Staging, WeightTable},
    memory::{Buffer, Matrix, MatrixMut, PinnedBuffer, View, ViewMut},
    operations::{
        FullyShardedLinear, FusedLinear, GroupedRoutes, Grouping, LoraEmbedding, LoraExperts, LoraLinear, Shrunk,
        Stack, TopK, TrainedRows,
    },
    pool::{AdapterPool, Tiers},
    steps::{Graph, RoutedBatch, Routing, Step, Workspace},
    stream::Queue,
};
pub use crate::error::LaunchError;
