//! Launch configurations, from shapes and upper bounds alone.
//!
//! Making a plan needs no device, and equal inputs give equal plans. Tile sizes come from `csrc/aril.h`, so that a plan always
//! matches the kernels that it is for.

mod capacity;
mod device;
mod error;
mod experts;
mod forward;
mod linear;
mod mode;
mod ring;
#[cfg(any(feature = "cuda", test))]
mod shared_memory;
#[cfg_attr(not(any(feature = "cuda", test)), expect(dead_code, reason = "only the GPU launches"))]
mod thresholds;
mod workspace;

pub(crate) use self::linear::check_outputs;
#[cfg(feature = "cuda")]
pub(crate) use self::{
    capacity::limit,
    experts::{ExpandBy, WideLaunch},
    linear::{EmbeddingLaunch, LinearLaunch, SiluMulLaunch, Turns},
    ring::Ring,
    thresholds::GroupedBy,
};
pub use self::{
    capacity::{Capacity, RouteCapacity},
    device::Device,
    error::PlanError,
    experts::{ExpertsPlan, ProjectionPlan},
    forward::ForwardPlan,
    linear::LinearPlan,
    mode::Mode,
    thresholds::{MAX_FORWARD_TOKENS, MAX_SLOTS},
    workspace::WorkspaceBytes,
};
