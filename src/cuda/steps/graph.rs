#![expect(unsafe_code, reason = "queries the driver about a graph, and is Send")]

use std::{fmt, sync::Arc};

use cudarc::driver::{
    CudaGraph,
    sys::{CUgraphInstantiate_flags, CUstreamCaptureMode, cuGraphGetNodes},
};

use super::step::{Recorder, Recording};
use crate::cuda::{LaunchError, Queue, Step, memory::Kept, raw, stream};

/// A captured step, to replay as an operation of other steps. It keeps the memory of its operands alive.
///
/// Adapters, their ranks and the routing may change between replays. Rows beyond the batch of the step are unchanged by a replay.
pub struct Graph {
    // Dropped before the memory it uses.
    graph: CudaGraph,
    queue: Queue,
    recording: Recording,
    /// The step that was captured. The graph keeps its memory, so that no other object has these addresses.
    captured: raw::Step,
    /// Whether the captured operations serve tokens with adapters.
    has_adapters: bool,
}

// SAFETY: the driver's graphs belong to no thread, but are not synchronized: `replay` borrows the graph exclusively.
unsafe impl Send for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph")
            .field("queue", &self.queue)
            .field("kept", &self.recording.kept.len())
            .finish_non_exhaustive()
    }
}

impl Graph {
    /// Enqueues the captured operations for the batch of `step`, which may have fewer tokens than the captured one. Neither allocates
    /// nor waits.
    ///
    /// # Errors
    /// [`LaunchError::OtherGraph`] if the graph was captured with another table, routing or workspace than those of the step.
    /// [`OperandError::Capacity`](crate::error::OperandError::Capacity) if the batch has more tokens than the graph,
    /// [`LaunchError::WithoutAdapters`] if it has an adapter and the graph was captured
    /// [without](crate::cuda::WeightTable::capture_without_adapters), [`LaunchError::WrongStream`] if the graph belongs to another queue,
    /// [`LaunchError::CapturedReplay`] if the step is being captured. [`LaunchError`] if something else captures the stream, or the
    /// driver returns an error.
    pub fn replay(&mut self, step: &mut Step<'_>) -> Result<(), LaunchError> {
        if step.is_captured() {
            return Err(LaunchError::CapturedReplay);
        }
        step.queue().check("the graph", &self.queue)?;
        self.captured.check_replay(&step.raw())?;
        if step.has_adapters() && !self.has_adapters {
            return Err(LaunchError::WithoutAdapters);
        }
        let _entered = step.enter()?;
        self.recording.groups.iter().for_each(|groups| groups.replay());
        Ok(self.graph.launch()?)
    }
}

/// Captures what `record` enqueues on the queue for a step. The graph keeps `kept`, to which `record` may add.
pub(in crate::cuda) fn capture<E: From<LaunchError>>(
    queue: &Queue,
    kept: Vec<Kept>,
    (captured, has_adapters): (raw::Step, bool),
    record: impl FnOnce(&Recorder) -> Result<(), E>,
) -> Result<Graph, E> {
    let recorder = Recorder::new(kept);
    let mut capture = Capture { queue, open: false };
    // Other threads may allocate and copy meanwhile.
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let alone = queue.enter_alone()?;
    queue.stream().begin_capture(mode).map_err(LaunchError::from)?;
    capture.open = true;
    drop(alone);
    record(&recorder)?;
    let graph = capture.end()?.ok_or(LaunchError::NothingCaptured)?;
    if num_nodes(&graph)? == 0 {
        return Err(LaunchError::NothingCaptured.into());
    }
    Ok(Graph { graph, queue: queue.clone(), recording: recorder.into_recording(), captured, has_adapters })
}

fn num_nodes(graph: &CudaGraph) -> Result<usize, LaunchError> {
    let mut num_nodes = 0;
    // SAFETY: the graph is alive. Given no array of nodes, the driver only counts them.
    unsafe { cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &raw mut num_nodes) }.result()?;
    Ok(num_nodes)
}

/// Ends the capture on every path, so that the stream remains usable.
struct Capture<'a> {
    queue: &'a Queue,
    open: bool,
}

impl Capture<'_> {
    fn end(&mut self) -> Result<Option<CudaGraph>, LaunchError> {
        self.open = false;
        let stream = Arc::clone(self.queue.stream());
        let graph = stream.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
        stream::free_postponed(stream.context());
        Ok(graph?)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.open {
            // The error that led here is the one to report.
            let _ = self.end();
        }
    }
}
