//! Graphs of a GPU: the library's capture, and the arena of the example's device.

use aril::{
    Element, Slot,
    cuda::{Buffer, Graph, PinnedBuffer, Stack, Step},
    routing::Batch,
};
use cudarc::driver::DeviceRepr;

use crate::graph::{Capture, InputValues};
use crate::{
    cuda::{Buffers, Cuda, Draws},
    device::Slots,
    error::Result,
    forward::Inputs,
};

impl<T: Element + DeviceRepr> Capture for Cuda<T> {
    type Graph = Graph;

    fn capture<R>(
        &self,
        table: &Self::Adapters,
        adapters: Slots<'_, Self>,
        buffers: &mut Buffers,
        (tokens, has_adapters): (usize, bool),
        mut record: impl FnMut(&mut Step<'_>) -> Result<R>,
    ) -> Result<Option<(Graph, R)>> {
        on_arena(self, || {
            // The first run loads what is loaded lazily, and leaves in the arena all memory that the second one needs.
            let slots = vec![Slot::BASE; tokens];
            drop(record(&mut Self::start(adapters, buffers, &Batch::new(&slots))?)?);
            let Buffers { routing, workspace } = buffers;
            let mut result = None;
            let record = |step: &mut Step<'_>| {
                result = Some(self.captured(step, &mut record)?);
                Ok::<_, crate::error::Error>(())
            };
            let graph = match has_adapters {
                true => table.capture(routing, tokens, workspace, record)?,
                false => table.capture_without_adapters(routing, tokens, workspace, record)?,
            };
            Ok(result.map(|result| (graph, result)))
        })
    }

    fn replay(
        &self,
        stacked: Option<(&mut Graph, &mut Stack)>,
        graph: &mut Graph,
        adapters: Slots<'_, Self>,
        buffers: &mut Buffers,
        slots: &[Slot],
    ) -> Result<bool> {
        let mut step = Self::start(adapters, buffers, &Batch::new(slots))?;
        if let Some((graph, stack)) = stacked
            && stack.place(&mut step)?
        {
            graph.replay(&mut step)?;
            return Ok(true);
        }
        // A graph of the base model may have operations with the stack, which need nothing there.
        graph.replay(&mut step)?;
        Ok(false)
    }

    fn meet(&self) -> Result<()> {
        self.meet()
    }

    fn wait(&self) -> Result<()> {
        self.wait()
    }

    type Staging = Staging;

    fn staging(&self, len: usize) -> Result<Staging> {
        Ok(Staging { host: PinnedBuffer::zeros(&self.queue, len)?, device: Buffer::zeros(&self.queue, len)? })
    }

    fn set_inputs(
        &self,
        inputs: &mut Inputs<Self>,
        values: &InputValues,
        Staging { host, device }: &mut Staging,
        last: Option<&Draws>,
    ) -> Result<()> {
        let len = values.values.len();
        // Waits for the copy of the step before the last.
        host.elements()?[..len].copy_from_slice(&values.values);
        device.enqueue_write(host, len)?;
        self.copy_inputs(inputs, device.device_ptr(), (values.tokens, values.changes()), last)
    }
}

/// A step's inputs in page-locked memory, and on the device.
#[derive(Debug)]
pub struct Staging {
    host: PinnedBuffer<i32>,
    device: Buffer<i32>,
}

/// Runs a step whose matrices are in the device's arena. A second run of the same step allocates nothing, so that it
/// can be captured.
fn on_arena<T, R>(device: &Cuda<T>, run: impl FnOnce() -> R) -> R {
    device.is_on_arena.set(true);
    let result = run();
    device.is_on_arena.set(false);
    result
}
