//! Steps: the batch that they route, their start on a table, and their graphs.

mod graph;
mod routing;
mod step;

pub(in crate::cuda) use self::step::{Checked, Operand, join};
pub use self::{
    graph::Graph,
    routing::{RoutedBatch, Routing},
    step::{Step, Workspace},
};
