//! What a launch will look like, from shapes and upper bounds alone.
//!
//! Pure and printable: no device is needed to make a plan, and the same problem always has the same plan. The tiles are those of
//! `csrc/aril.h`, so that a plan and the kernels it is for cannot disagree.

mod capacity;
mod error;
mod experts;
mod forward;
mod linear;
mod thresholds;
mod workspace;

pub use self::{
    capacity::{AlignCapacity, Capacity, RouteCapacity},
    error::PlanError,
    experts::{ExpertsPlan, ProjectionPlan},
    forward::ForwardPlan,
    linear::LinearPlan,
    thresholds::{MAX_FORWARD_TOKENS, MAX_SLOTS},
    workspace::WorkspaceBytes,
};
#[cfg(feature = "cuda")]
pub(crate) use self::{
    experts::ExpandBy,
    linear::{check_outputs, outs_per_block},
    thresholds::GroupedBy,
};
