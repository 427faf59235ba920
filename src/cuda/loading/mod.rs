//! What is in the slots: weight tables, the arenas that they point into, and loads.

mod arena;
mod pack;
mod readback;
mod staging;
mod table;
mod upload;

pub(in crate::cuda) use self::{
    arena::Arena,
    pack::Packing,
    table::{Copied, Loaded, row_bytes},
};
pub use self::{
    readback::Readback,
    staging::Staging,
    table::WeightTable,
    upload::{Filled, Reservation},
};
use super::{
    LaunchError, Queue,
    memory::{Kept, Pinned, Region},
    raw,
    stream::{OwnStream, Relaxed},
};
