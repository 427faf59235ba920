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

/// Bytes per expert in the mailbox of `aril_groups`.
const GROUP_MAILBOX_BYTES: usize = ffi::ARIL_GROUP_WORDS as usize * ffi::ARIL_WORD_BYTES as usize;

/// Groups a layer's routes by expert and slot, in device memory of the engine. Layers may share a grouping, one after the other.
#[derive(Debug)]
pub struct Grouping {
    kernels: Kernels,
    capacity: RouteCapacity,
    groups: ffi::aril_groups,
}

// SAFETY: it holds device addresses, which are plain data.
unsafe impl Send for Grouping {}
// SAFETY: as above.
unsafe impl Sync for Grouping {}

/// The arrays of a grouping in memory at `start`, and the number of bytes they take.
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
    /// Device memory that [`new`](Self::new) needs, in bytes.
    ///
    /// # Errors
    /// [`LaunchError::Plan`] if a bound of the capacity is invalid.
    pub fn device_bytes(capacity: RouteCapacity) -> Result<usize, LaunchError> {
        Ok(lay_out(capacity.checked()?, 0).1)
    }

    /// A grouping in `memory`, which must be aligned to 256 bytes.
    ///
    /// # Errors
    /// [`LaunchError`] if a bound of the capacity is invalid, or `memory` is too small or misaligned.
    ///
    /// # Safety
    /// - **Validity.** `memory` is device memory of the kernels' context, and all of it is zero.
    /// - **Liveness.** It stays mapped while the grouping or its routes are in use, and until the work has run.
    /// - **Aliasing.** Nothing else writes it.
    pub unsafe fn new(kernels: &Kernels, capacity: RouteCapacity, memory: DeviceRegion) -> Result<Self, LaunchError> {
        let (groups, bytes) = lay_out(capacity.checked()?, memory.ptr);
        memory.check_room("the grouping's memory", bytes)?;
        Ok(Self { kernels: kernels.clone(), capacity, groups })
    }

    /// Sets the router's choice for the tokens of `batch`. Enqueues the grouping kernel if there are too many routes for the
    /// operations to group themselves. May be captured in a CUDA graph.
    ///
    /// # Errors
    /// [`OperandError::Capacity`](crate::error::OperandError::Capacity) if the batch or `top_k` exceeds the capacity. Nothing was enqueued.
    ///
    /// # Safety
    /// - **Validity.** The addresses of `top_k` have one element per route of the batch. `stream` belongs to the kernels' context.
    /// - **Liveness.** That memory stays mapped until all operations on the routes have run.
    /// - **Aliasing.** Until then, only work ordered by `stream` writes it. All uses of the routes are ordered by `stream`, too.
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
            num_slots: int(batch.num_slots)?,
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
            beside_base: false,
        })
    }
}

/// The routes of a step.
///
/// The first operation may group the routes for those after it, so each operation borrows them exclusively, and host order is
/// stream order. All operations on the same routes must be enqueued on one stream.
#[derive(Debug)]
pub struct GroupedRoutes {
    pub(in crate::cuda) batch: RoutedBatch,
    pub(in crate::cuda) top_k: ffi::aril_top_k,
    pub(in crate::cuda) weighed: Weighed,
    pub(in crate::cuda) factor: f32,
    pub(in crate::cuda) groups: ffi::aril_groups,
    /// Whether the routes are grouped already. If not, the next operation groups them.
    pub(in crate::cuda) grouped: bool,
    /// Whether shrink starts before the base operation in front has ended.
    pub(in crate::cuda) beside_base: bool,
}

// SAFETY: it holds device addresses, which are plain data.
unsafe impl Send for GroupedRoutes {}
// SAFETY: as above.
unsafe impl Sync for GroupedRoutes {}

impl GroupedRoutes {
    /// Whether the routes belong to that batch.
    pub(in crate::cuda) fn is_of(&self, batch: RoutedBatch) -> bool {
        (self.batch.tokens(), self.batch.num_tokens) == (batch.tokens(), batch.num_tokens)
    }

    /// As [`shrink_beside_base`](crate::cuda::GroupedRoutes::shrink_beside_base) of the safe API.
    ///
    /// # Safety
    /// As there.
    #[must_use]
    pub const unsafe fn shrink_beside_base(self) -> Self {
        Self { beside_base: true, ..self }
    }

    /// Tokens in the step.
    pub const fn num_tokens(&self) -> usize {
        self.batch.num_tokens
    }

    /// Routes in the step, which is also the number of rows of `[routes, ..]` matrices.
    pub const fn num_routes(&self) -> usize {
        self.batch.num_tokens * self.top_k.top_k.cast_unsigned() as usize
    }
}
