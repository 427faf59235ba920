#![expect(unsafe_code, reason = "calls the raw door")]

use std::sync::Arc;

use super::{
    LaunchError, Queue, Step, TopK, raw,
    region::{Kept, Region},
};
use crate::plan::RouteCapacity;

/// A layer's routes grouped by expert and slot, on the device. Layers may share one: each updates it for its operations.
#[derive(Debug)]
pub struct Grouping {
    raw: raw::Grouping,
    memory: Arc<Region>,
}

/// The routes that a [`Grouping`] was last updated with. While they live, it cannot be updated again.
#[derive(Debug)]
pub struct GroupedRoutes<'a> {
    pub(super) raw: raw::GroupedRoutes,
    pub(super) top_k: TopK<'a>,
    pub(super) memory: &'a Region,
}

impl Grouping {
    /// Allocates what the routes within `capacity` need: of a layer, [`ExpertsPlan::routes`](crate::plan::ExpertsPlan::routes).
    ///
    /// # Errors
    /// If the capacity is past the kernels' limits, or there is no memory left.
    pub fn new(queue: &Queue, capacity: RouteCapacity) -> Result<Self, LaunchError> {
        let memory = Arc::new(Region::new(queue, raw::Grouping::device_bytes(capacity)?)?);
        // SAFETY: the memory is zero, this type's own, freed in the order of its stream, and used on that stream alone; graphs that
        // read it keep it.
        let raw = unsafe { raw::Grouping::new(queue.kernels(), capacity, memory.region()) }?;
        Ok(Self { raw, memory })
    }

    /// Takes what a layer's router chose for the tokens of a step. Many routes are grouped by a kernel that this enqueues, few by the
    /// operations on them.
    ///
    /// # Errors
    /// If the router chose for other tokens than the batch has, or for more than there is room for. Nothing was enqueued.
    pub fn update<'a>(&'a mut self, step: &mut Step<'_>, top_k: TopK<'a>) -> Result<GroupedRoutes<'a>, LaunchError> {
        step.queue().check("the grouping", self.memory.queue())?;
        top_k.check_tokens(step.num_tokens())?;
        top_k.check_step(step)?;
        step.enter()?;
        step.keep(top_k.kept().into_iter().chain([Some(self.memory.clone() as Kept)]));
        let raw = {
            let (top_k, _guards) = top_k.on(step.queue());
            // SAFETY: there is a value for each route, and guards order them; the memory and the batch are of the queue. What a graph
            // replays is kept.
            unsafe { self.raw.group(step.batch(), top_k, step.queue().raw()) }?
        };
        Ok(GroupedRoutes { raw, top_k, memory: &self.memory })
    }
}

impl GroupedRoutes<'_> {
    /// Rows of the `[routes, ..]` matrices.
    pub fn num_routes(&self) -> usize {
        self.raw.num_routes()
    }
}
