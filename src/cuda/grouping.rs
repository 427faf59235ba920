#![expect(unsafe_code, reason = "calls the raw API")]

use std::{
    marker::PhantomData,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    LaunchError, Queue, Step, TopK, raw,
    region::{Kept, Region},
};
use crate::plan::RouteCapacity;

/// Groups a layer's routes by expert and slot on the device. Layers may share a grouping; each updates it for its operations.
#[derive(Debug)]
pub struct Grouping {
    raw: raw::Grouping,
    memory: Arc<Groups>,
}

/// The memory of a grouping.
#[derive(Debug)]
pub(super) struct Groups {
    region: Region,
    /// How often graphs have grouped other routes there.
    replays: AtomicU64,
}

/// The routes of the last update of a [`Grouping`] in a step. Borrows the grouping, so that it cannot be updated meanwhile, and the
/// step's routing, so that no other batch takes the place of the step's.
#[derive(Debug)]
pub struct GroupedRoutes<'g, 's> {
    pub(super) raw: raw::GroupedRoutes,
    pub(super) top_k: TopK<'g>,
    groups: &'g Groups,
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
        // SAFETY: the memory is zero. This type owns it, uses it on one stream only, and frees it in that stream's order. Graphs that
        // read it keep it alive.
        let raw = unsafe { raw::Grouping::new(queue.kernels(), capacity, region.region()) }?;
        Ok(Self { raw, memory: Arc::new(Groups { region, replays: AtomicU64::new(0) }) })
    }

    /// Sets the router's choice for the tokens of a step. Many routes are grouped by a kernel that this enqueues, few by the
    /// operations that use them.
    ///
    /// # Errors
    /// [`LaunchError`] if `top_k` and the step differ in their number of tokens or exceed the capacity, or an operand belongs to
    /// another context or stream. Nothing was enqueued.
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
            // SAFETY: the operands have a value for each route, and are as `Checked::enqueue` says. The memory belongs to the queue, and
            // graphs keep it alive.
            unsafe { self.raw.group(batch, raw::TopK { ids, weights, rows, ..of_step }, stream) }
        })?;
        let groups = &*self.memory;
        Ok(GroupedRoutes { raw, top_k, groups, replays: groups.replays(), step: PhantomData })
    }
}

impl Groups {
    fn replays(&self) -> u64 {
        self.replays.load(Ordering::Relaxed)
    }

    /// Takes note that a graph groups other routes here.
    pub(super) fn replay(&self) {
        self.replays.fetch_add(1, Ordering::Relaxed);
    }
}

impl GroupedRoutes<'_, '_> {
    /// Lets `activate`, `combine` and `add_combined_delta` on these routes begin while the base operation in front of them still runs:
    /// they read `x` and the routes and compute the deltas beside it, and wait for it before they access `y`. All bits stay the same.
    /// Needs compute capability 9.0, and a base kernel that lets its dependents start early; behind others it changes nothing.
    ///
    /// # Safety
    /// Directly in front of each of these operations on the stream, there is a kernel of the engine, or a copy, that
    /// - writes neither the operation's `x` nor the router's choice, and does not use the step's workspace;
    /// - if it is launched with programmatic stream serialization, lets its dependents start (`griddepcontrol.launch_dependents`, or the
    ///   end of its blocks) only after one of its blocks has waited for its predecessors (`griddepcontrol.wait`).
    ///
    /// Then whatever is in front of that kernel has completed when the operation starts. Otherwise the operation may read an `x` or a
    /// choice that is not complete, and an operation before it in the workspace may wait for a sum that has gone, until the launch fails.
    #[must_use]
    pub unsafe fn shrink_beside_base(self) -> Self {
        // SAFETY: the caller's obligations.
        Self { raw: unsafe { self.raw.shrink_beside_base() }, ..self }
    }

    /// Rejects a step of another batch, and routes that a replay has overwritten.
    pub(super) fn check(&self, step: &Step<'_>) -> Result<(), LaunchError> {
        step.queue().check("the routes", self.groups.region.queue())?;
        if self.raw.is_of(step.batch()) && self.replays == self.groups.replays() {
            return Ok(());
        }
        Err(LaunchError::OtherBatch { operand: "the routes" })
    }

    /// Routes in the step, which is also the number of rows of `[routes, ..]` matrices.
    pub fn num_routes(&self) -> usize {
        self.raw.num_routes()
    }
}
