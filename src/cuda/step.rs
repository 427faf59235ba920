use std::{
    marker::PhantomData,
    sync::{Mutex, PoisonError},
};

use super::{LaunchError, Queue, raw, region::Kept};

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

    /// The step in the raw API, for further operations there. A captured step does not keep their operands alive. Those of another step
    /// are enqueued before the next update of the routing, and not captured: its launches are sized for the slots of its batch.
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
    pub(super) fn keep(&self, operands: impl IntoIterator<Item = Option<Kept>>) {
        if let Some(kept) = self.kept {
            kept.lock().unwrap_or_else(PoisonError::into_inner).extend(operands.into_iter().flatten());
        }
    }

    /// The batch of the step.
    pub(super) fn batch(&self) -> raw::RoutedBatch {
        self.raw.batch
    }
}
