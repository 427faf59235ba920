#![expect(unsafe_code, reason = "copies between operands")]

use std::{
    marker::PhantomData,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::driver::{DeviceRepr, result};

use super::{LaunchError, Queue, View, ViewMut, buffer::Memory, grouping::Groups, raw, region::Kept};
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
        let (mut from, mut to) = (from.into(), to.into());
        OperandError::within("the copy's elements", from.len(), to.len())?;
        let bytes = from.len() * size_of::<T>();
        let operands = self.check([Some(("from", &mut from)), Some(("to", &mut to))])?;
        if bytes == 0 {
            return Ok(());
        }
        operands.enqueue(|[from, to], stream| {
            // SAFETY: both have this many bytes, and are as `Checked::enqueue` says. They do not overlap, because the target is borrowed
            // exclusively.
            Ok(unsafe { result::memcpy_dtod_async(to, from, bytes, stream.as_raw().cast()) }?)
        })
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

    /// Rejects operands of another context, buffers of another stream, and in a captured step borrowed memory. Then [enters](Self::enter).
    pub(super) fn check<'o, const N: usize>(
        &self,
        operands: [Option<Operand<'o>>; N],
    ) -> Result<Checked<'_, 'o, N>, LaunchError> {
        operands.iter().flatten().try_for_each(|(name, memory)| memory.check(name, self))?;
        Ok(Checked { _entered: self.enter()?, step: self, operands })
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

/// An operand's name in errors, and its memory.
pub(super) type Operand<'o> = (&'static str, &'o mut dyn Memory);

/// Operands that a step may use.
#[must_use = "nothing is enqueued"]
pub(super) struct Checked<'s, 'o, const N: usize> {
    operands: [Option<Operand<'o>>; N],
    step: &'s Step<'s>,
    _entered: Option<Entered<'s>>,
}

impl<const N: usize> Checked<'_, '_, N> {
    /// Calls `launch` with the addresses of the operands, 0 for one that is absent, and with the step's stream, to enqueue work on that
    /// stream.
    ///
    /// The stream's context is current on this thread. Until the work has run, and for a captured step as long as its graph lives, the
    /// operands are memory of that context, of as many elements as their views have, and the stream orders their uses: those of buffers
    /// because they belong to the queue, those of other memory by cudarc's events. The step's table, routing and workspace belong to the
    /// queue, too.
    pub(super) fn enqueue<R>(
        mut self,
        launch: impl FnOnce([u64; N], raw::Stream) -> Result<R, LaunchError>,
    ) -> Result<R, LaunchError> {
        let queue = &self.step.queue;
        self.step.keep(self.operands.iter().map(|operand| operand.as_ref().and_then(|(_, memory)| memory.kept())));
        let placed = self.operands.each_mut().map(|operand| operand.as_mut().map(|(_, memory)| memory.on(queue)));
        launch(placed.each_ref().map(|placed| placed.as_ref().map_or(0, |(address, _)| *address)), queue.raw())
    }
}
