//! The operations on an NVIDIA GPU.
//!
//! This module is the safe door: no call can touch memory outside its operands, whatever the arguments and whatever the data on the
//! device. Operands are cudarc's typed slices, or [`Buffer`]s, which captured steps keep. [`raw`] is the door for memory that neither
//! owns; the safe door is a thin layer over it.
//!
//! | | once | each step | each layer |
//! |---|---|---|---|
//! | [`Kernels`], [`Queue`] | load, take a stream | | |
//! | [`WeightTable`] | make, for a model | [`step`](WeightTable::step); load and unload at any time | |
//! | [`Routing`], [`Workspace`] | make | [`update`](Routing::update) | |
//! | [`LoraLinear`], [`LoraEmbedding`], [`LoraExperts`] | plan, for a table | | its operations |
//! | [`FusedLinear`] | plan, for a table and base weights | | its operations |
//!
//! Everything is made on a [`Queue`] and is refused on any other, so that what a kernel reads is never overwritten before it has
//! run. A kernel runs only in the context that [`Kernels`] were loaded in, which each call makes current on its thread, as cudarc does.
//!
//! # Beside the base layer
//!
#![doc = include_str!("../docs/beside.md")]
//!
#![doc = include_str!("../docs/threads.md")]
//!
#![doc = include_str!("../docs/graphs.md")]

mod align;
mod arena;
mod buffer;
#[cfg(doctest)]
mod doctests;
mod embedding;
mod experts;
mod fused_linear;
mod graph;
mod grouping;
mod kernels;
mod linear;
mod matrix;
mod pinned;
mod queue;
pub mod raw;
mod region;
mod routing;
mod staging;
mod step;
mod table;
mod top_k;
mod upload;
mod workspace;

pub use self::{
    align::{AlignedRoutes, Alignment},
    buffer::{Buffer, View, ViewMut},
    embedding::LoraEmbedding,
    experts::LoraExperts,
    fused_linear::FusedLinear,
    graph::Graph,
    grouping::{GroupedRoutes, Grouping},
    kernels::{Kernels, driver_is_present},
    linear::LoraLinear,
    matrix::{Matrix, MatrixMut},
    queue::Queue,
    routing::{RoutedBatch, Routing},
    staging::Staging,
    step::Step,
    table::WeightTable,
    top_k::TopK,
    upload::{Filled, Reservation},
    workspace::Workspace,
};
pub use crate::error::LaunchError;
