//! Graphs of a GPU: the library's capture, and the arena of the example's device.

use aril::{
    Element, Slot,
    cuda::{Graph, LaunchError, Step},
    routing::Batch,
};
use cudarc::driver::{DeviceRepr, result::memcpy_htod_async};

use super::graph::Capture;
use crate::{
    cuda::{Buffers, Cuda},
    error::Result,
};

impl<T: Element + DeviceRepr> Capture for Cuda<T> {
    type Graph = Graph;

    fn capture<R>(
        &self,
        adapters: &Self::Adapters,
        Buffers { routing, workspace }: &mut Buffers,
        tokens: usize,
        mut record: impl FnMut(&mut Step<'_>) -> Result<R>,
    ) -> Result<Option<(Graph, R)>> {
        on_arena(self, || {
            // The first run loads what is loaded lazily, and leaves in the arena all memory that the second one needs.
            let slots = vec![Slot::BASE; tokens];
            routing.wait()?;
            let batch = routing.update(&Batch::new(&slots))?;
            drop(record(&mut adapters.step(&batch, workspace)?)?);
            let mut result = None;
            let graph = adapters.capture(routing, tokens, workspace, |step| {
                result = Some(record(step)?);
                Ok::<_, crate::error::Error>(())
            })?;
            Ok(result.map(|result| (graph, result)))
        })
    }

    fn replay(&self, graph: &mut Graph, Buffers { routing, .. }: &mut Buffers, slots: &[Slot]) -> Result<()> {
        routing.wait()?;
        routing.update(&Batch::new(slots))?;
        Ok(graph.replay()?)
    }

    fn overwrite(&self, indices: &mut Self::Indices, first: usize, values: &[u32]) -> Result<()> {
        let (len, values) = (indices.len(), bytemuck::cast_slice::<u32, i32>(values));
        assert!(first + values.len() <= len, "the indices have {len} places, not {first} and {}", values.len());
        let address = indices.address + (first * size_of::<i32>()) as u64;
        let stream = self.queue.stream();
        stream.context().bind_to_thread().map_err(LaunchError::from)?;
        // SAFETY: the values fit in (asserted), and the stream orders all uses of the memory. The driver copies pageable values before
        // it returns.
        Ok(unsafe { memcpy_htod_async(address, values, stream.cu_stream()) }.map_err(LaunchError::from)?)
    }
}

/// Runs a step whose matrices are in the device's arena. A second run of the same step allocates nothing, so that it can be captured.
fn on_arena<T, R>(device: &Cuda<T>, run: impl FnOnce() -> R) -> R {
    device.is_on_arena.set(true);
    let result = run();
    device.is_on_arena.set(false);
    result
}
