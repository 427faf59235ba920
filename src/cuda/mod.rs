//! The operations on an NVIDIA GPU.
//!
//! This module is the safe door. Operands are cudarc's typed slices, the stream is a `&CudaStream`, and no call can touch memory
//! outside its operands, whatever the arguments and whatever the data on the device. [`raw`] is the door for memory that cudarc
//! does not own and for capturing CUDA graphs; the safe door is a thin layer over it.
//!
//! [`Routing`], [`Grouping`], [`Alignment`], [`WeightTable`] and [`Workspace`] own their memory and belong to the stream they were made on: they are refused
//! on any other, so that what a kernel reads is never overwritten before it has run. Matrices may come from any stream of the
//! context; cudarc orders them.
//!
//! A kernel runs only in the context that [`Kernels`] were loaded in, which each call makes current on its thread, as cudarc does.
//!
//! # Beside the base layer
//!
#![doc = include_str!("../docs/beside.md")]

mod align;
mod buffer;
#[cfg(doctest)]
mod doctests;
mod embedding;
mod error;
mod experts;
mod graph;
mod kernels;
mod linear;
mod matrix;
mod pinned;
mod queue;
pub mod raw;
mod region;
mod routing;
mod step;
mod table;
mod upload;

pub use self::{
    align::{AlignedRoutes, Alignment},
    buffer::{Buffer, View, ViewMut},
    embedding::LoraEmbedding,
    error::LaunchError,
    experts::{GroupedRoutes, Grouping, LoraExperts, TopK},
    graph::Graph,
    kernels::{Kernels, driver_is_present},
    linear::{LoraLinear, Workspace},
    matrix::{Matrix, MatrixMut},
    queue::Queue,
    routing::{RoutedBatch, Routing},
    step::Step,
    table::{Filled, Reservation, WeightTable},
    upload::Staging,
};
