#![expect(unsafe_code, reason = "copies between operands")]

use std::{
    marker::PhantomData,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::driver::{DeviceRepr, result};

use super::{LaunchError, Queue, View, ViewMut, grouping::Groups, raw, region::Kept};
use crate::{error::OperandError, gate::Entered};

/// The operations of one batch. The step checks once what they share: table, batch, workspace and stream.
///
/// [`WeightTable::step`](super::WeightTable::step) creates a step that enqueues its operations,
/// [`WeightTable::capture`](super::WeightTable::capture) one that records them.
#[derive(Debug)]
pub struct Step<'a> {
    queue: Queue,
    raw: raw::Step,
    has_adapters: bool,
    /// Of a captured step. It belongs to the capture, so that moving the step cannot lose it.
    recorded: Option<&'a Recorded>,
    operands: PhantomData<&'a mut ()>,
}

/// What a graph has of its captured step.
#[derive(Debug, Default)]
pub(super) struct Recorded(Mutex<Parts>);

#[derive(Debug, Default)]
pub(super) struct Parts {
    /// The memory of operands.
    pub(super) kept: Vec<Kept>,
    /// Where replays group routes.
    pub(super) groups: Vec<Arc<Groups>>,
}

impl Recorded {
    pub(super) fn new(kept: Vec<Kept>) -> Self {
        Self(Mutex::new(Parts { kept, groups: Vec::new() }))
    }

    pub(super) fn into_parts(self) -> Parts {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, add: impl FnOnce(&mut Parts)) {
        add(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl<'a> Step<'a> {
    pub(super) fn new(queue: &Queue, raw: raw::Step, has_adapters: bool, recorded: Option<&'a Recorded>) -> Self {
        Self { queue: queue.clone(), raw, has_adapters, recorded, operands: PhantomData }
    }

    /// Tokens in the batch, which is the number of rows of `[tokens, ..]` matrices.
    pub fn num_tokens(&self) -> usize {
        self.raw.batch.num_tokens()
    }

    /// Whether a token may have an adapter: its slot is known and not [`Slot::BASE`](crate::Slot::BASE), or is in device memory. If none
    /// has, an engine may skip what [`Batch::has_adapters`](crate::routing::Batch::has_adapters) says.
    pub fn has_adapters(&self) -> bool {
        self.has_adapters
    }

    /// The queue of the operations.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Enqueues a copy of `from` to the start of `to`. A captured step records it, and keeps both. Never waits.
    ///
    /// # Errors
    /// [`OperandError::Capacity`] if `to` is shorter than `from`. [`LaunchError`] if an operand belongs to another context or (for
    /// buffers) another stream, or is borrowed and the step is captured. Nothing was enqueued.
    pub fn copy<'f, 't, T: DeviceRepr + Send + Sync + 'static>(
        &mut self,
        from: impl Into<View<'f, T>>,
        to: impl Into<ViewMut<'t, T>>,
    ) -> Result<(), LaunchError> {
        let (from, mut to) = (from.into(), to.into());
        OperandError::within("the copy's elements", from.len(), to.len())?;
        from.check("from", self)?;
        to.check("to", self)?;
        let _entered = self.enter()?;
        self.keep([from.kept(), to.kept()]);
        let (queue, bytes) = (&self.queue, from.len() * size_of::<T>());
        if bytes == 0 {
            return Ok(());
        }
        let (source, _source_guard) = from.on(queue);
        let (target, _target_guard) = to.on(queue);
        // SAFETY: both have this many bytes. They do not overlap, because the target is borrowed exclusively. Buffers are used and
        // freed in stream order, and kept by graphs; guards order the other operands.
        Ok(unsafe { result::memcpy_dtod_async(target, source, bytes, queue.stream().cu_stream()) }?)
    }

    /// The step in the raw API, for further operations there. A captured step does not keep their operands alive. Those of another step
    /// are enqueued before the next update of the routing, and not captured: its launches are sized for the slots of its batch.
    pub fn raw(&self) -> raw::Step {
        self.raw
    }

    /// Whether the step is being captured.
    pub fn is_captured(&self) -> bool {
        self.recorded.is_some()
    }

    /// Makes the context current on this thread. Rejects a stream that is captured by anything but this step.
    ///
    /// Keep what it returns until the operation is enqueued, as for a [`Queue`].
    pub(super) fn enter(&self) -> Result<Option<Entered<'_>>, LaunchError> {
        if self.is_captured() { self.queue.bind().map(|()| None) } else { self.queue.enter().map(Some) }
    }

    /// Keeps the memory of operands alive for the graph.
    pub(super) fn keep(&self, operands: impl IntoIterator<Item = Option<Kept>>) {
        if let Some(recorded) = self.recorded {
            recorded.add(|parts| parts.kept.extend(operands.into_iter().flatten()));
        }
    }

    /// Makes replays take note that they group routes there.
    pub(super) fn keep_groups(&self, groups: &Arc<Groups>) {
        if let Some(recorded) = self.recorded {
            recorded.add(|parts| {
                if !parts.groups.iter().any(|other| Arc::ptr_eq(other, groups)) {
                    parts.groups.push(Arc::clone(groups));
                }
            });
        }
    }

    /// The batch of the step.
    pub(super) fn batch(&self) -> raw::RoutedBatch {
        self.raw.batch
    }
}
