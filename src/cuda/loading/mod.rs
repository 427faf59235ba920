//! What is in the slots: weight tables, the arenas that they point into, loads, and pools of adapters.

mod arena;
mod factors;
mod part_copy;
mod pool;
mod staging;
mod table;
mod upload;

pub(in crate::cuda) use self::table::Loaded;
pub use self::{
    factors::Factors,
    pool::{AdapterPool, Tiers},
    staging::Staging,
    table::WeightTable,
    upload::{Filled, Reservation},
};
use super::{
    LaunchError, Queue, RoutedBatch, Step, Workspace,
    memory::{HostArena, HostPart, Kept, Pinned, Region},
    raw,
    stream::{OwnStream, Relaxed},
};
