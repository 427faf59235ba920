//! Steps: the batch that they route, their start on a table, and their graphs.

mod routing;
mod step;

pub(in crate::cuda) use self::step::{Checked, Moment, join};
pub use self::{
    routing::{RoutedBatch, Routing},
    step::{Graph, Step, Workspace},
};
