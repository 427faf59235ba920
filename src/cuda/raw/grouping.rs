use super::{
    abi::int,
    memory::{Arrays, DeviceRegion, Stream},
    routing::RoutedBatch,
    top_k::TopK,
};
use crate::{
    cuda::{Kernels, kernels::check},
    error::LaunchError,
    ffi,
    plan::{GroupedBy, RouteCapacity},
    routing::Weighed,
};

/// Bytes of an expert in the mailbox of `aril_groups`.
const GROUP_MAILBOX_BYTES: usize = ffi::ARIL_GROUP_WORDS as usize * ffi::ARIL_WORD_BYTES as usize;

/// A layer's routes grouped by expert and slot, in the engine's device memory. Any number of layers may share one, one after the
/// other.
#[derive(Debug)]
pub struct Grouping {
    kernels: Kernels,
    capacity: RouteCapacity,
    groups: ffi::aril_groups,
}

// SAFETY: device addresses, which are data.
unsafe impl Send for Grouping {}
// SAFETY: as above.
unsafe impl Sync for Grouping {}

/// The arrays of a grouping in the memory at `start`, and their bytes.
fn lay_out(capacity: RouteCapacity, start: u64) -> (ffi::aril_groups, usize) {
    let mut arrays = Arrays::at(start);
    let max_routes = capacity.max_routes();
    let mailbox_bytes = ffi::ARIL_MAILBOX_HEADER as usize + (capacity.num_experts + 2) * GROUP_MAILBOX_BYTES;
    let groups = ffi::aril_groups {
        routes: arrays.push::<ffi::aril_route_entry>(max_routes) as *mut _,
        tiles: arrays.push::<ffi::aril_route_tile>(max_routes) as *mut _,
        num_tiles: arrays.push::<i32>(2) as *mut _,
        wide_tiles: arrays.push::<ffi::aril_route_tile>(max_routes) as *mut _,
        num_wide_tiles: arrays.push::<i32>(2) as *mut _,
        mailbox: arrays.push::<u8>(mailbox_bytes) as *mut _,
    };
    (groups, arrays.bytes())
}

impl Grouping {
    /// The device memory that [`new`](Self::new) needs.
    ///
    /// # Errors
    /// If the capacity is past the kernels' limits.
    pub fn device_bytes(capacity: RouteCapacity) -> Result<usize, LaunchError> {
        Ok(lay_out(capacity.checked()?, 0).1)
    }

    /// Takes `memory`, aligned to 256 bytes.
    ///
    /// # Errors
    /// If the capacity is past the kernels' limits, or `memory` is too small or misaligned.
    ///
    /// # Safety
    /// - **Validity.** `memory` addresses device memory of the kernels' context for its whole extent, all of it zero.
    /// - **Liveness.** That memory stays mapped for as long as this or any routes of it are used, and until the work has run.
    /// - **Aliasing.** Nobody else writes it.
    pub unsafe fn new(kernels: &Kernels, capacity: RouteCapacity, memory: DeviceRegion) -> Result<Self, LaunchError> {
        let (groups, bytes) = lay_out(capacity.checked()?, memory.ptr);
        memory.check_room("the grouping's memory", bytes)?;
        Ok(Self { kernels: kernels.clone(), capacity, groups })
    }

    /// Takes what a layer's router chose for the tokens of `batch`, and enqueues the grouping kernel if there are too many routes for
    /// the operations to sort them by themselves.
    ///
    /// # Errors
    /// `Capacity` if there are more tokens or experts for each than it was made for; then nothing was enqueued.
    ///
    /// # Safety
    /// - **Validity.** `top_k` addresses a value for each route of the batch's tokens, and `stream` is a stream of the kernels'
    ///   context.
    /// - **Liveness.** They stay mapped until all operations on the routes have run.
    /// - **Aliasing.** Nobody writes them meanwhile, except work ordered by `stream`, which also orders all that uses the routes.
    pub unsafe fn group(
        &mut self,
        batch: RoutedBatch,
        top_k: TopK,
        stream: Stream,
    ) -> Result<GroupedRoutes, LaunchError> {
        self.kernels.check_thread()?;
        let raw = top_k.expect(batch, self.capacity)?;
        let args = ffi::aril_group_args {
            num_tokens: int(batch.num_tokens)?,
            top_k: raw,
            routing: batch.routing,
            groups: self.groups,
        };
        if batch.num_tokens > 0 {
            // SAFETY: the memory is laid out for the capacity; the caller vouches for the rest.
            check(unsafe { ffi::aril_group(&args, stream.as_raw()) })?;
        }
        let grouped = GroupedBy::of(batch.num_tokens * top_k.top_k) != GroupedBy::FirstOperation;
        Ok(GroupedRoutes {
            batch,
            top_k: raw,
            weighed: top_k.weighed,
            factor: top_k.factor,
            groups: self.groups,
            grouped,
        })
    }
}

/// A layer's routes of a step.
///
/// The first operation on them may group them for the others, so each operation borrows them exclusively: host order is the order
/// of the stream. All operations on the same routes are enqueued on one stream.
#[derive(Debug)]
pub struct GroupedRoutes {
    pub(super) batch: RoutedBatch,
    pub(super) top_k: ffi::aril_top_k,
    pub(super) weighed: Weighed,
    pub(super) factor: f32,
    pub(super) groups: ffi::aril_groups,
    /// Whether they are grouped already, or are by the next operation on them.
    pub(super) grouped: bool,
}

// SAFETY: device addresses, which are data.
unsafe impl Send for GroupedRoutes {}
// SAFETY: as above.
unsafe impl Sync for GroupedRoutes {}

impl GroupedRoutes {
    /// Whether they are of that batch's tokens.
    pub(in crate::cuda) fn is_of(&self, batch: RoutedBatch) -> bool {
        (self.batch.tokens(), self.batch.num_tokens) == (batch.tokens(), batch.num_tokens)
    }

    /// Tokens that the router chose for.
    pub const fn num_tokens(&self) -> usize {
        self.batch.num_tokens
    }

    /// Rows of the `[routes, ..]` matrices.
    pub const fn num_routes(&self) -> usize {
        self.batch.num_tokens * self.top_k.top_k.cast_unsigned() as usize
    }
}
