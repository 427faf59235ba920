use std::{
    marker::PhantomData,
    sync::{Mutex, PoisonError},
};

use super::{
    LaunchError, Queue, RoutedBatch, Routing, WeightTable, Workspace,
    graph::{self, Graph},
    raw,
    region::Kept,
};

/// The operations of one batch. The step checks once what they share: table, batch, workspace and stream.
///
/// [`WeightTable::step`](super::WeightTable::step) creates a step that enqueues its operations,
/// [`WeightTable::capture`](super::WeightTable::capture) one that records them.
#[derive(Debug)]
pub struct Step<'a> {
    queue: Queue,
    raw: raw::Step,
    /// The operands of a captured step. They belong to the capture, so that moving the step cannot lose them.
    kept: Option<&'a Mutex<Vec<Kept>>>,
    operands: PhantomData<&'a mut ()>,
}

impl<'a> Step<'a> {
    pub(super) fn new(queue: &Queue, raw: raw::Step, kept: Option<&'a Mutex<Vec<Kept>>>) -> Self {
        Self { queue: queue.clone(), raw, kept, operands: PhantomData }
    }

    /// Tokens in the batch, which is the number of rows of `[tokens, ..]` matrices.
    pub fn num_tokens(&self) -> usize {
        self.raw.batch.num_tokens()
    }

    /// The queue of the operations.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// The step in the raw API, for further operations there. A captured step does not keep their operands alive.
    pub fn raw(&self) -> raw::Step {
        self.raw
    }

    /// Whether the step is being captured.
    pub fn is_captured(&self) -> bool {
        self.kept.is_some()
    }

    /// Makes the context current on this thread. Rejects a stream that is captured by anything but this step.
    pub(super) fn enter(&self) -> Result<(), LaunchError> {
        if self.is_captured() { self.queue.bind() } else { self.queue.enter() }
    }

    /// Keeps the memory of operands alive for the graph.
    pub(super) fn keep(&mut self, operands: impl IntoIterator<Item = Option<Kept>>) {
        if let Some(kept) = self.kept {
            kept.lock().unwrap_or_else(PoisonError::into_inner).extend(operands.into_iter().flatten());
        }
    }

    /// The batch of the step.
    pub(super) fn batch(&self) -> raw::RoutedBatch {
        self.raw.batch
    }
}

impl WeightTable {
    /// Starts a step.
    ///
    /// # Errors
    /// [`LaunchError`] if the table, batch and workspace belong to different queues, or the stream is being captured.
    pub fn step<'a>(&'a self, batch: &RoutedBatch<'a>, workspace: &'a mut Workspace) -> Result<Step<'a>, LaunchError> {
        let queue = self.queue();
        queue.check("the batch", batch.queue())?;
        queue.check("the workspace", workspace.queue())?;
        queue.enter()?;
        Ok(Step::new(queue, raw::Step::new(self.raw(), batch.raw, workspace.raw(), queue.raw()), None))
    }

    /// Captures a step of up to `num_tokens` tokens as a graph of the operations that `record` enqueues. The graph keeps the table,
    /// the routing, the workspace and all operands alive. Operands must be [`Buffer`](super::Buffer)s. Other work that `record`
    /// enqueues is captured, too, but its memory is not kept.
    ///
    /// Replays use the adapters and the [routing](Routing::update) at the time of the replay.
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
        let queue = self.queue();
        queue.check("the routing", routing.queue())?;
        queue.check("the workspace", workspace.queue())?;
        let batch = routing.capture_batch(num_tokens)?;
        let [mailbox, partials] = workspace.kept();
        let kept = vec![self.kept(), routing.kept(), mailbox, partials];
        let raw = raw::Step::new(self.raw(), batch, workspace.raw(), queue.raw());
        graph::capture(queue, kept, |kept| record(&mut Step::new(queue, raw, Some(kept))))
    }
}
