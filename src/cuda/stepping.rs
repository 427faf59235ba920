//! Starts steps, and captures them as graphs.

use std::sync::Arc;

use super::{Graph, LaunchError, RoutedBatch, Routing, Step, WeightTable, Workspace, graph, raw, region::Kept};
use crate::error::OperandError;

impl WeightTable {
    /// Starts a step.
    ///
    /// # Errors
    /// [`OperandError::Pooled`] if the table belongs to a pool, whose own `step` starts its steps. [`OperandError::NumSlots`] if the
    /// routing was made for another number of slots. [`LaunchError`] if the table, batch and workspace belong to different queues, or the
    /// stream is being captured.
    pub fn step<'a>(&'a self, batch: &RoutedBatch<'a>, workspace: &'a mut Workspace) -> Result<Step<'a>, LaunchError> {
        if self.is_pooled() {
            return Err(OperandError::Pooled.into());
        }
        let queue = self.queue();
        queue.check("the batch", batch.queue())?;
        queue.check("the workspace", workspace.queue())?;
        self.check_slots(batch.num_slots())?;
        drop(queue.enter()?);
        Ok(Step::new(
            queue,
            raw::Step::new(self.raw(), batch.raw, workspace.raw(), queue.raw()),
            batch.has_adapters(),
            None,
        ))
    }

    /// Captures a step of up to `num_tokens` tokens as a graph of the operations that `record` enqueues. The graph keeps the table,
    /// the routing, the workspace and all operands alive. Operands must be [`Buffer`](super::Buffer)s. Other work that `record`
    /// enqueues is captured, too, but its memory is not kept.
    ///
    /// A [replay](Graph::replay) is an operation of a step of this table, routing and workspace, and uses its adapters and its batch.
    ///
    /// # Errors
    /// [`LaunchError`] if `num_tokens` exceeds the routing's capacity, the table, routing and workspace belong to different queues,
    /// the stream is being captured, or no work was captured; or the error of `record`. The stream remains usable.
    pub fn capture<E: From<LaunchError>>(
        &self,
        routing: &Routing,
        num_tokens: usize,
        workspace: &mut Workspace,
        record: impl FnOnce(&mut Step<'_>) -> Result<(), E>,
    ) -> Result<Graph, E> {
        self.capture_for(true, routing, num_tokens, workspace, record)
    }

    /// Like [`capture`](Self::capture), for batches in which no token has an adapter. `record` may skip what only adds deltas, and
    /// [`shrink`](super::LoraLinear::shrink) records nothing. A replay for any other batch is refused
    /// ([`LaunchError::WithoutAdapters`]).
    ///
    /// # Errors
    /// As for `capture`.
    pub fn capture_without_adapters<E: From<LaunchError>>(
        &self,
        routing: &Routing,
        num_tokens: usize,
        workspace: &mut Workspace,
        record: impl FnOnce(&mut Step<'_>) -> Result<(), E>,
    ) -> Result<Graph, E> {
        self.capture_for(false, routing, num_tokens, workspace, record)
    }

    fn capture_for<E: From<LaunchError>>(
        &self,
        has_adapters: bool,
        routing: &Routing,
        num_tokens: usize,
        workspace: &mut Workspace,
        record: impl FnOnce(&mut Step<'_>) -> Result<(), E>,
    ) -> Result<Graph, E> {
        let queue = self.queue();
        queue.check("the routing", routing.queue())?;
        queue.check("the workspace", workspace.queue())?;
        self.check_slots(routing.num_slots())?;
        let batch = routing.capture_batch(num_tokens)?;
        let [mailbox, partials] = workspace.kept();
        let kept = vec![self.kept(), routing.kept(), mailbox, partials];
        let raw = raw::Step::new(self.raw(), batch, workspace.raw(), queue.raw());
        graph::capture(queue, kept, (raw, has_adapters), |recorded| {
            record(&mut Step::new(queue, raw, has_adapters, Some(recorded)))
        })
    }

    /// Rejects a routing for another number of slots.
    fn check_slots(&self, routing: usize) -> Result<(), LaunchError> {
        let table = self.capacity().num_slots;
        if routing == table { Ok(()) } else { Err(OperandError::NumSlots { routing, table }.into()) }
    }

    /// What a graph keeps alive: the descriptors, and the arena that they point into.
    fn kept(&self) -> Kept {
        Arc::clone(&self.shared) as Kept
    }
}
