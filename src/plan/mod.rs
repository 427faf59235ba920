//! Launch configurations, from shapes and upper bounds alone.
//!
//! Making a plan needs no device, and equal inputs give equal plans. The plan of a launch is a value of `csrc/aril.h`
//! (`aril_linear_plan` and so on), which the `.cu` files check and launch. Tile sizes come from there, too, so that a
//! plan always matches the kernels that it is for.

mod capacity;
mod error;
mod experts;
mod forward;
mod linear;
mod ring;
#[cfg(any(feature = "cuda", test))]
mod sharded;
#[cfg(any(feature = "cuda", test))]
mod shared_memory;
#[cfg_attr(not(any(feature = "cuda", test)), expect(dead_code, reason = "only the GPU launches"))]
mod thresholds;

pub(crate) use self::linear::check_outputs;
use self::thresholds::{MAILBOX_HEADER, WORD_BYTES};
pub use self::{
    capacity::{Capacity, RouteCapacity},
    error::PlanError,
    experts::{ExpertsPlan, ProjectionPlan},
    forward::ForwardPlan,
    linear::{LinearPlan, Mode},
    thresholds::{MAX_FORWARD_TOKENS, MAX_SLOTS},
};
#[cfg(feature = "cuda")]
pub(crate) use self::{
    experts::{ExpertsBatch, Inputs},
    linear::{embedding_launch, stacked_rows},
    sharded::sharded_launch,
    thresholds::GroupedBy,
};
use crate::sizes::product;

/// What plans ask of a device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Device {
    /// Major and minor compute capability.
    pub compute_capability: (i32, i32),
    /// Multiprocessors: `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`. Grids of linear layers and experts are sized for so
    /// many.
    pub multiprocessors: usize,
    /// The most shared memory that a thread block may have, in bytes:
    /// `CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN`.
    pub shared_bytes: usize,
    /// Shared memory of a multiprocessor, in bytes: `CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR`.
    pub shared_bytes_per_multiprocessor: usize,
    /// Of which the system takes so many for each thread block: `CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK`.
    pub reserved_shared_bytes: usize,
}

impl Device {
    /// NVIDIA H100 SXM and H200.
    pub const H100: Self = Self {
        compute_capability: (9, 0),
        multiprocessors: 132,
        shared_bytes: 227 << 10,
        shared_bytes_per_multiprocessor: 228 << 10,
        reserved_shared_bytes: 1 << 10,
    };

    /// With as many multiprocessors as a grid can be sized for: one, if it has none.
    pub(super) fn sizable(self) -> Self {
        Self { multiprocessors: self.multiprocessors.clamp(1, 1 << 16), ..self }
    }
}

/// What the launches of a batch are sized by, beside the layer.
#[cfg(any(feature = "cuda", test))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchBounds {
    pub(crate) num_tokens: usize,
    /// The most token tiles, and the most wide ones, that the routing can have.
    pub(crate) small_tiles: usize,
    pub(crate) wide_tiles: usize,
    /// The highest rank of the table, which is at most the capacity's.
    pub(crate) table_rank: usize,
}

/// Thread blocks that share the trained rows of a token tile: with one tile, all multiprocessors have some.
#[cfg(feature = "cuda")]
pub(crate) fn rows_blocks(tiles: usize, device: Device) -> usize {
    const OF_MULTIPROCESSOR: usize = 4;
    (OF_MULTIPROCESSOR * device.sizable().multiprocessors).div_ceil(tiles.max(1))
}

/// A number of the C ABI. A launch refuses what is too large for it.
pub(crate) fn int(value: usize) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// Sizes of a workspace, in bytes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct WorkspaceBytes {
    /// Mailboxes between the blocks of one launch: partial sums of `A x`, each tagged with its launch. The memory must
    /// be zero before its first use, and only the kernels may write it.
    pub mailbox: usize,
    /// Partial sums of `A x` that one launch leaves for the next. The memory may hold anything.
    pub partials: usize,
}

impl WorkspaceBytes {
    /// Size of a mailbox for this many sums.
    pub(super) const fn mailbox_of(sums: usize) -> usize {
        product(&[sums, WORD_BYTES]).saturating_add(MAILBOX_HEADER)
    }

    /// The larger of both, for each of the two sizes.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self { mailbox: self.mailbox.max(other.mailbox), partials: self.partials.max(other.partials) }
    }
}
