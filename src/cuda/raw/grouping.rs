//! The grouping of routes, by addresses.

use super::{
    memory::{Arrays, DeviceRegion, Stream, dtype_code, int},
    routing::RoutedBatch,
};
use crate::{
    DType,
    cuda::{Kernels, kernels::check},
    error::{LaunchError, OperandError},
    ffi,
    plan::{ExpertsBatch, GroupedBy, Inputs, RouteCapacity},
    routing::WeightsOn,
};

/// Bytes per expert in the mailbox of `aril_groups`.
const GROUP_MAILBOX_BYTES: usize = ffi::ARIL_GROUP_WORDS as usize * ffi::ARIL_WORD_BYTES as usize;

/// Groups a layer's routes by expert and slot, in device memory of the engine. Layers may share a grouping, one after
/// the other.
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

    /// Sets the router's choice for the tokens of `batch`. Enqueues the grouping kernel if there are too many routes
    /// for the operations to group themselves. May be captured in a CUDA graph.
    ///
    /// # Errors
    /// [`OperandError::Capacity`] if the batch or `top_k` exceeds the capacity. Nothing was enqueued.
    ///
    /// # Safety
    /// - **Validity.** The addresses of `top_k` have one element per route of the batch. `stream` belongs to the
    ///   kernels' context.
    /// - **Liveness.** That memory stays mapped until all operations on the routes have run.
    /// - **Aliasing.** Until then, only work ordered by `stream` writes it. All uses of the routes are ordered by
    ///   `stream`, too.
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
        let is_grouped = GroupedBy::of(batch.num_tokens * top_k.top_k) != GroupedBy::FirstOperation;
        Ok(GroupedRoutes {
            batch,
            top_k: raw,
            weights_on: top_k.weights_on,
            factor: top_k.factor,
            groups: self.groups,
            is_grouped,
            beside_base: false,
            last: Last::Other,
        })
    }
}

/// The routes of a step.
///
/// The first operation may group the routes for those after it, so each operation borrows them exclusively, and host
/// order is stream order. All operations on the same routes must be enqueued on one stream.
#[derive(Debug)]
pub struct GroupedRoutes {
    pub(in crate::cuda) batch: RoutedBatch,
    pub(in crate::cuda) top_k: ffi::aril_top_k,
    pub(in crate::cuda) weights_on: WeightsOn,
    pub(in crate::cuda) factor: f32,
    pub(in crate::cuda) groups: ffi::aril_groups,
    /// Whether the routes are grouped already. If not, the next operation groups them.
    is_grouped: bool,
    /// Whether all work before the base operation in front of an operation has completed when that operation starts.
    beside_base: bool,
    last: Last,
}

/// The last operation on some routes.
#[derive(Clone, Copy, Debug)]
enum Last {
    /// An activation whose thread blocks of expand announce their ends in this mailbox: so many blocks.
    Activation {
        mailbox: u64,
        blocks: i32,
    },
    /// The same, and the base operation behind it starts what is behind it before it has waited for the activation.
    ActivationBeforeEarlyBase {
        mailbox: u64,
        blocks: i32,
    },
    /// Another, behind which the base operation does.
    BeforeEarlyBase,
    Other,
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

    /// As [`may_combine_beside_activation`](crate::cuda::GroupedRoutes::may_combine_beside_activation) of the safe API.
    pub const fn may_combine_beside_activation(&self) -> bool {
        matches!(self.last, Last::Activation { .. })
    }

    /// As [`combine_beside_activation`](crate::cuda::GroupedRoutes::combine_beside_activation) of the safe API.
    ///
    /// # Safety
    /// As there.
    pub const unsafe fn combine_beside_activation(&mut self) {
        self.last = match self.last {
            Last::Activation { mailbox, blocks } => Last::ActivationBeforeEarlyBase { mailbox, blocks },
            Last::ActivationBeforeEarlyBase { .. } => self.last,
            Last::BeforeEarlyBase | Last::Other => Last::BeforeEarlyBase,
        };
    }

    /// What the next operation is sized by, with this mailbox. Also a refused operation is the last one on the routes:
    /// no activation is directly in front of the next. The base operation behind it starts as early as before.
    pub(in crate::cuda) fn batch(
        &mut self,
        form: ffi::aril_experts_form,
        table_rank: usize,
        mailbox: u64,
    ) -> ExpertsBatch {
        let last = self.last;
        self.last = match last {
            Last::Activation { .. } | Last::Other => Last::Other,
            Last::ActivationBeforeEarlyBase { .. } | Last::BeforeEarlyBase => Last::BeforeEarlyBase,
        };
        let inputs = match last {
            _ if form.0 < ffi::aril_experts_form::ARIL_ACTIVATE.0 => Inputs::InFront,
            Last::Activation { .. } | Last::Other if self.beside_base => Inputs::Complete,
            _ if form == ffi::aril_experts_form::ARIL_ACTIVATE && self.beside_base => Inputs::Complete,
            Last::ActivationBeforeEarlyBase { mailbox: announced, blocks } if announced == mailbox => {
                Inputs::Announced(blocks)
            }
            _ => Inputs::InFront,
        };
        let top_k = self.top_k.top_k.cast_unsigned() as usize;
        ExpertsBatch { bounds: self.batch.bounds(table_rank), top_k, is_grouped: self.is_grouped, inputs }
    }

    /// Takes note of an operation that has been enqueued.
    pub(in crate::cuda) fn enqueued(&mut self, args: &ffi::aril_experts_args) {
        let blocks = args.plan.activation_blocks;
        let announces = blocks > 0 && args.form == ffi::aril_experts_form::ARIL_ACTIVATE.0.cast_signed();
        self.last = if announces { Last::Activation { mailbox: args.mailbox as u64, blocks } } else { Last::Other };
        // Operations in f32 do not group routes.
        self.is_grouped |= args.dtype != dtype_code(DType::F32);
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

/// A router's choice for a step, in device memory. See [`routing::TopK`](crate::routing::TopK).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopK {
    pub(in crate::cuda) ids: u64,
    pub(in crate::cuda) weights: u64,
    pub(in crate::cuda) rows: u64,
    pub(in crate::cuda) top_k: usize,
    pub(in crate::cuda) weights_on: WeightsOn,
    pub(in crate::cuda) factor: f32,
}

impl TopK {
    /// The address of local expert ids, `i32 [tokens, top_k]`. Any other value, such as -1, makes the route non-local.
    pub const fn new(ids: u64, top_k: usize) -> Self {
        Self { ids, weights: 0, rows: 0, top_k, weights_on: WeightsOn::Combine, factor: 1.0 }
    }

    /// Sets the address of the router's weights, `f32 [tokens, top_k]`. The default is 1.
    #[must_use]
    pub const fn weights(self, weights: u64) -> Self {
        Self { weights, ..self }
    }

    /// Sets the address of the row of each route in `[routes, ..]` matrices, `i32 [tokens, top_k]`. By default, route
    /// `r` has row `r`. A value outside `0..routes` means that the route has no row and is not local.
    #[must_use]
    #[doc(alias = "row_of_route")]
    pub const fn rows(self, rows: u64) -> Self {
        Self { rows, ..self }
    }

    /// Applies the router's weights to the input of the experts instead of in the combine. The deltas of gate and up
    /// are multiplied by them.
    #[must_use]
    pub const fn on_input(self) -> Self {
        Self { weights_on: WeightsOn::Input, ..self }
    }

    /// Declares that the engine's GEMM applies the router's weights to the output rows of down. The deltas of down are
    /// multiplied by them.
    #[must_use]
    pub const fn on_rows(self) -> Self {
        Self { weights_on: WeightsOn::Rows, ..self }
    }

    /// Converts the choice to the C ABI, within the capacity.
    pub(in crate::cuda) fn expect(
        &self,
        batch: RoutedBatch,
        capacity: RouteCapacity,
    ) -> Result<ffi::aril_top_k, LaunchError> {
        let RouteCapacity { max_tokens, top_k: max_top_k, num_experts } = capacity;
        OperandError::within("the batch's tokens for this grouping", batch.num_tokens, max_tokens)?;
        OperandError::within("the routes of a token", self.top_k, max_top_k)?;
        if self.top_k == 0 {
            return Err(OperandError::TopK { ids: 0, top_k: 0 }.into());
        }
        Ok(ffi::aril_top_k {
            ids: self.ids as *const i32,
            weights: self.weights as *const f32,
            rows: self.rows as *const i32,
            top_k: int(self.top_k)?,
            num_experts: int(num_experts)?,
        })
    }

    /// Scales the combine weights (`routed_scaling_factor`).
    #[must_use]
    pub const fn scaled(self, factor: f32) -> Self {
        Self { factor, ..self }
    }
}
