#![expect(unsafe_code, reason = "calls the raw API")]

use std::sync::Arc;

use super::{
    LaunchError, Queue, Step, TopK, raw,
    region::{Kept, Region},
};
use crate::plan::RouteCapacity;

/// Groups a layer's routes by expert and slot on the device. Layers may share a grouping; each updates it for its operations.
#[derive(Debug)]
pub struct Grouping {
    raw: raw::Grouping,
    memory: Arc<Region>,
}

/// The routes of the last update of a [`Grouping`]. Borrows the grouping, so that it cannot be updated meanwhile.
#[derive(Debug)]
pub struct GroupedRoutes<'a> {
    pub(super) raw: raw::GroupedRoutes,
    pub(super) top_k: TopK<'a>,
    pub(super) memory: &'a Region,
}

impl Grouping {
    /// Allocates device memory for routes within `capacity`: for one layer,
    /// [`ExpertsPlan::routes`](crate::plan::ExpertsPlan::routes).
    ///
    /// # Errors
    /// [`LaunchError`] if a bound of the capacity is invalid, or device memory is exhausted.
    pub fn new(queue: &Queue, capacity: RouteCapacity) -> Result<Self, LaunchError> {
        let memory = Arc::new(Region::new(queue, raw::Grouping::device_bytes(capacity)?)?);
        // SAFETY: the memory is zero. This type owns it, uses it on one stream only, and frees it in that stream's order. Graphs that
        // read it keep it alive.
        let raw = unsafe { raw::Grouping::new(queue.kernels(), capacity, memory.region()) }?;
        Ok(Self { raw, memory })
    }

    /// Sets the router's choice for the tokens of a step. Many routes are grouped by a kernel that this enqueues, few by the
    /// operations that use them.
    ///
    /// # Errors
    /// [`LaunchError`] if `top_k` and the step differ in their number of tokens or exceed the capacity, or an operand belongs to
    /// another context or stream. Nothing was enqueued.
    pub fn update<'a>(&'a mut self, step: &mut Step<'_>, top_k: TopK<'a>) -> Result<GroupedRoutes<'a>, LaunchError> {
        step.queue().check("the grouping", self.memory.queue())?;
        top_k.check_tokens(step.num_tokens())?;
        top_k.check_step(step)?;
        step.enter()?;
        step.keep(top_k.kept().into_iter().chain([Some(self.memory.clone() as Kept)]));
        let raw = {
            let (top_k, _guards) = top_k.on(step.queue());
            // SAFETY: the operands have a value for each route, and guards order their uses. The memory and the batch belong to the
            // queue. Graphs keep their operands alive.
            unsafe { self.raw.group(step.batch(), top_k, step.queue().raw()) }?
        };
        Ok(GroupedRoutes { raw, top_k, memory: &self.memory })
    }
}

impl GroupedRoutes<'_> {
    /// Routes in the step, which is also the number of rows of `[routes, ..]` matrices.
    pub fn num_routes(&self) -> usize {
        self.raw.num_routes()
    }
}
