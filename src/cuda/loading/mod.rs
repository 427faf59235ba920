//! What is in the slots: weight tables, the arenas that they point into, loads, and pools of adapters.

mod arena;
mod factors;
mod part_copy;
mod pool;
mod pooled;
mod staging;
mod table;
mod upload;

pub use self::{
    factors::Factors,
    pool::{AdapterPool, Tiers},
    staging::Staging,
    table::WeightTable,
    upload::{Filled, Reservation},
};
use super::{
    LaunchError, Queue, RoutedBatch, Step, Workspace,
    memory::{Kept, Pinned, Region, host_arena::HostArena},
    raw,
    stream::{Relaxed, own_stream::OwnStream},
};
