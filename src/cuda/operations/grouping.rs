//! The routes of a layer, grouped by expert and slot.

#![expect(unsafe_code, reason = "calls the raw API")]

use std::{
    marker::PhantomData,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    contract,
    cuda::{
        LaunchError, Queue, Step, View,
        memory::{Kept, Memory, Operand, Region},
        raw,
    },
    error::OperandError,
    plan::RouteCapacity,
    routing::WeightsOn,
};

/// Groups a layer's routes by expert and slot on the device. Layers may share a grouping; each updates it for its
/// operations.
#[derive(Debug)]
pub struct Grouping {
    raw: raw::Grouping,
    memory: Arc<Groups>,
}

/// The memory of a grouping.
#[derive(Debug)]
pub(in crate::cuda) struct Groups {
    region: Region,
    /// How often graphs have grouped other routes there.
    replays: AtomicU64,
}

/// The routes of the last update of a [`Grouping`] in a step. Borrows the grouping, so that it cannot be updated
/// meanwhile, and the step's routing, so that no other batch takes the place of the step's.
#[derive(Debug)]
pub struct GroupedRoutes<'g, 's> {
    pub(in crate::cuda) raw: raw::GroupedRoutes,
    pub(in crate::cuda) top_k: TopK<'g>,
    groups: &'g Groups,
    /// Of the step, which no other capture has.
    stream: raw::Stream,
    /// The value of `Groups::replays` at the update.
    replays: u64,
    step: PhantomData<&'s ()>,
}

impl Grouping {
    /// Allocates device memory for routes within `capacity`: for one layer,
    /// [`ExpertsPlan::routes`](crate::plan::ExpertsPlan::routes).
    ///
    /// # Errors
    /// [`LaunchError`] if a bound of the capacity is invalid, or device memory is exhausted.
    pub fn new(queue: &Queue, capacity: RouteCapacity) -> Result<Self, LaunchError> {
        let region = Region::new(queue, raw::Grouping::device_bytes(capacity)?)?;
        // SAFETY: the memory is zero. This type owns it, uses it on one stream only, and frees it in that stream's
        // order. Graphs that read it keep it alive.
        let raw = unsafe { raw::Grouping::new(queue.kernels(), capacity, region.region()) }?;
        Ok(Self { raw, memory: Arc::new(Groups { region, replays: AtomicU64::new(0) }) })
    }

    /// Sets the router's choice for the tokens of a step. Many routes are grouped by a kernel that this enqueues, few
    /// by the operations that use them.
    ///
    /// # Errors
    /// [`LaunchError`] if `top_k` and the step differ in their number of tokens or exceed the capacity, or an operand
    /// belongs to another context or stream. Nothing was enqueued.
    pub fn update<'g, 's>(
        &'g mut self,
        step: &mut Step<'s>,
        mut top_k: TopK<'g>,
    ) -> Result<GroupedRoutes<'g, 's>, LaunchError> {
        step.queue().check("the grouping", self.memory.region.queue())?;
        top_k.check_tokens(step.num_tokens())?;
        let (batch, of_step) = (step.batch(), top_k.at([0; 3]));
        let operands = step.check(top_k.operands())?;
        step.keep([Some(self.memory.clone() as Kept)]);
        step.keep_groups(&self.memory);
        let raw = operands.enqueue(|[ids, weights, rows], stream| {
            // SAFETY: the operands have a value for each route, and are as `Checked::enqueue` says. The memory belongs
            // to the queue, and graphs keep it alive.
            unsafe { self.raw.group(batch, raw::TopK { ids, weights, rows, ..of_step }, stream) }
        })?;
        let groups = &*self.memory;
        let stream = step.raw().stream();
        Ok(GroupedRoutes { raw, top_k, groups, stream, replays: groups.replays(), step: PhantomData })
    }
}

impl Groups {
    fn replays(&self) -> u64 {
        self.replays.load(Ordering::Relaxed)
    }

    /// Takes note that a graph groups other routes here.
    pub(in crate::cuda) fn replay(&self) {
        self.replays.fetch_add(1, Ordering::Relaxed);
    }
}

impl GroupedRoutes<'_, '_> {
    /// Lets `activate`, `combine` and `add_combined_delta` on these routes begin while the base operation in front of
    /// them still runs: they read `x` and the routes and compute the deltas beside it, and wait for it before they
    /// access `y`. All bits stay the same. Needs compute capability 9.0, and a base kernel that lets its dependents
    /// start early; behind others it changes nothing.
    ///
    /// # Safety
    /// Directly in front of each of these operations on the stream, there is a kernel of the engine, or a copy, that
    /// - writes neither the operation's `x` nor the router's choice, and does not use the step's workspace;
    /// - if it is launched with programmatic stream serialization, lets its dependents start
    ///   (`griddepcontrol.launch_dependents`, or the end of its thread blocks) only after one of them has waited for
    ///   its predecessors (`griddepcontrol.wait`). One that waits nowhere is not allowed between any operations.
    ///
    /// Then whatever is in front of that kernel has completed when the operation starts. Otherwise the operation may
    /// read an `x` or a choice that is not complete, and an operation before it in the workspace may wait for a sum
    /// that has gone, until the launch fails.
    #[must_use]
    pub unsafe fn shrink_beside_base(self) -> Self {
        // SAFETY: the caller's obligations.
        Self { raw: unsafe { self.raw.shrink_beside_base() }, ..self }
    }

    /// Whether the next operation on these routes may be a combine that begins beside the activation
    /// ([`combine_beside_activation`](Self::combine_beside_activation)): the last operation was an `activate` of few
    /// routes that ran beside its base operation.
    pub fn may_combine_beside_activation(&self) -> bool {
        self.raw.may_combine_beside_activation()
    }

    /// Lets the next `combine` or `add_combined_delta` on these routes begin before the activation in front of the base
    /// operation has ended: it finds its routes and loads weights, and waits for `x` by itself. Without
    /// [`may_combine_beside_activation`](Self::may_combine_beside_activation) it waits for all work in front of it
    /// instead.
    ///
    /// # Safety
    /// As for [`shrink_beside_base`](Self::shrink_beside_base), but the kernel in front of the operation lets its
    /// dependents start before it waits for its predecessors, and directly in front of that kernel is the activation.
    pub unsafe fn combine_beside_activation(&mut self) {
        // SAFETY: the caller's obligations.
        unsafe { self.raw.combine_beside_activation() }
    }

    /// Rejects a step of another batch or capture, and routes that a replay has overwritten.
    pub(in crate::cuda) fn check(&self, step: &Step<'_>) -> Result<(), LaunchError> {
        step.queue().check("the routes", self.groups.region.queue())?;
        let is_of_step = self.raw.is_of(step.batch()) && self.stream == step.raw().stream();
        if is_of_step && self.replays == self.groups.replays() {
            return Ok(());
        }
        Err(LaunchError::OtherBatch { operand: "the routes" })
    }

    /// Routes in the step, which is also the number of rows of `[routes, ..]` matrices.
    pub fn num_routes(&self) -> usize {
        self.raw.num_routes()
    }
}

/// A router's choice for a step, in device memory. See [`routing::TopK`](crate::routing::TopK).
#[derive(Debug)]
#[doc(alias = "topk_ids")]
pub struct TopK<'a> {
    ids: View<'a, i32>,
    weights: Option<View<'a, f32>>,
    rows: Option<View<'a, i32>>,
    top_k: usize,
    weights_on: WeightsOn,
    factor: f32,
}

impl<'a> TopK<'a> {
    /// Local expert ids `[tokens, top_k]`. Any other value, such as -1, makes the route non-local.
    ///
    /// # Errors
    /// [`OperandError::TopK`] if `top_k` is zero or does not divide the number of ids.
    pub fn new(ids: impl Into<View<'a, i32>>, top_k: usize) -> Result<Self, LaunchError> {
        let ids = ids.into();
        contract::check_top_k(ids.len(), top_k)?;
        Ok(Self { ids, weights: None, rows: None, top_k, weights_on: WeightsOn::Combine, factor: 1.0 })
    }

    /// Sets the router's weights `[tokens, top_k]`. The default is 1.
    ///
    /// # Errors
    /// [`OperandError::Routes`] if there is not one weight per route.
    pub fn with_weights(self, weights: impl Into<View<'a, f32>>) -> Result<Self, LaunchError> {
        let weights = weights.into();
        contract::check_of_routes("weights", weights.len(), self.ids.len())?;
        Ok(Self { weights: Some(weights), ..self })
    }

    /// Sets the row of each route in `[routes, ..]` matrices, `[tokens, top_k]`. By default, route `r` has row `r`. A
    /// value outside `0..routes` means that the route has no row and is not local. A row that two routes have gets the
    /// delta of either.
    ///
    /// # Errors
    /// [`OperandError::Routes`] if there is not one row per route.
    #[doc(alias = "row_of_route")]
    pub fn with_rows(self, rows: impl Into<View<'a, i32>>) -> Result<Self, LaunchError> {
        let rows = rows.into();
        contract::check_of_routes("rows", rows.len(), self.ids.len())?;
        Ok(Self { rows: Some(rows), ..self })
    }

    /// Applies the router's weights to the input of the experts instead of in the combine. The deltas of gate and up
    /// are multiplied by them.
    #[must_use]
    #[doc(alias = "apply_router_weight_on_input")]
    pub fn on_input(self) -> Self {
        Self { weights_on: WeightsOn::Input, ..self }
    }

    /// Declares that the engine's GEMM applies the router's weights to the output rows of down, so that the combine
    /// only adds rows. The deltas of down are multiplied by them.
    #[must_use]
    #[doc(alias = "mul_routed_weight")]
    pub fn on_rows(self) -> Self {
        Self { weights_on: WeightsOn::Rows, ..self }
    }

    /// Scales the combine weights (`routed_scaling_factor`).
    #[must_use]
    #[doc(alias = "routed_scaling_factor")]
    pub fn scaled(self, factor: f32) -> Self {
        Self { factor, ..self }
    }

    /// Tokens in the step.
    pub fn num_tokens(&self) -> usize {
        self.ids.len() / self.top_k
    }

    /// Rejects a batch with another number of tokens.
    pub(in crate::cuda) fn check_tokens(&self, want: usize) -> Result<(), OperandError> {
        contract::experts::check_tokens(self.num_tokens(), want)
    }

    /// The ids, the weights and the rows.
    pub(in crate::cuda) fn operands(&mut self) -> [Option<Operand<'_>>; 3] {
        [
            Some(("ids", &mut self.ids)),
            self.weights.as_mut().map(|view| ("weights", view as &mut dyn Memory)),
            self.rows.as_mut().map(|view| ("rows", view as &mut dyn Memory)),
        ]
    }

    /// The choice in the raw API, at these addresses of the [`operands`](Self::operands).
    pub(in crate::cuda) fn at(&self, [ids, weights, rows]: [u64; 3]) -> raw::TopK {
        let &Self { top_k, weights_on, factor, .. } = self;
        raw::TopK { ids, weights, rows, top_k, weights_on, factor }
    }
}
