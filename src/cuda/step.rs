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

/// A step of a batch: what all its operations have in common, checked once.
///
/// [`WeightTable::step`](super::WeightTable::step) begins one whose operations are enqueued at once,
/// [`WeightTable::capture`](super::WeightTable::capture) one whose operations are recorded.
#[derive(Debug)]
pub struct Step<'a> {
    queue: Queue,
    raw: raw::Step,
    /// What its operations work on, if it is captured. It belongs to the capture, so that a step that is moved still adds to it.
    kept: Option<&'a Mutex<Vec<Kept>>>,
    operands: PhantomData<&'a mut ()>,
}

impl<'a> Step<'a> {
    pub(super) fn new(queue: &Queue, raw: raw::Step, kept: Option<&'a Mutex<Vec<Kept>>>) -> Self {
        Self { queue: queue.clone(), raw, kept, operands: PhantomData }
    }

    /// Rows of the matrices that it is for.
    pub fn num_tokens(&self) -> usize {
        self.raw.batch.num_tokens()
    }

    /// The queue that its operations are enqueued on, or captured from.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// What the raw door calls it, for operations of that door beside these: one that is captured keeps nothing for them.
    pub fn raw(&self) -> raw::Step {
        self.raw
    }

    /// Whether its operations are recorded in a graph.
    pub fn is_captured(&self) -> bool {
        self.kept.is_some()
    }

    /// Makes the context current on this thread, and refuses a stream that somebody else captures.
    pub(super) fn enter(&self) -> Result<(), LaunchError> {
        if self.is_captured() { self.queue.bind() } else { self.queue.enter() }
    }

    /// Keeps the memory of operands for as long as the graph may be replayed.
    pub(super) fn keep(&mut self, operands: impl IntoIterator<Item = Option<Kept>>) {
        if let Some(kept) = self.kept {
            kept.lock().unwrap_or_else(PoisonError::into_inner).extend(operands.into_iter().flatten());
        }
    }

    /// The batch, for what is made of it in this step.
    pub(super) fn batch(&self) -> raw::RoutedBatch {
        self.raw.batch
    }
}

impl WeightTable {
    /// Begins a step of a batch: checks once what its operations have in common.
    ///
    /// # Errors
    /// If the table, the batch and the workspace are not of one queue, or its stream is being captured.
    pub fn step<'a>(&'a self, batch: &RoutedBatch<'a>, workspace: &'a mut Workspace) -> Result<Step<'a>, LaunchError> {
        let queue = self.queue();
        queue.check("the batch", batch.queue())?;
        queue.check("the workspace", workspace.queue())?;
        queue.enter()?;
        Ok(Step::new(queue, raw::Step::new(self.raw(), batch.raw, workspace.raw(), queue.raw()), None))
    }

    /// Captures a step of up to `num_tokens` rows in a graph: what `record` enqueues by the step that it is given. The graph keeps the
    /// table, the routing's memory, the workspace's and that of the operands, which are to be [`Buffer`](super::Buffer)s; it keeps
    /// nothing for what `record` enqueues by other means.
    ///
    /// Replays follow what is loaded and [routed](Routing::update) by then.
    ///
    /// # Errors
    /// If `num_tokens` is past the routing's capacity; the table, the routing and the workspace are not of one queue; its stream is
    /// being captured; nothing was captured; or what `record` returns. The stream is as it was.
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
