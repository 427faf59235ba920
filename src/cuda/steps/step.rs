//! A step of a batch, and its graph.

#![expect(unsafe_code, reason = "copies between operands, queries the driver about a graph, and is Send")]

use std::{
    fmt,
    marker::PhantomData,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::driver::{
    CudaGraph, DeviceRepr, result,
    sys::{CUgraphInstantiate_flags, CUstreamCaptureMode, cuGraphGetNodes},
};

use super::{RoutedBatch, Routing};
use crate::{
    cuda::{
        LaunchError, Queue, View, ViewMut, WeightTable,
        memory::{Kept, Memory, Region},
        operations::Groups,
        raw, stream,
    },
    error::OperandError,
    gate::Entered,
    plan::WorkspaceBytes,
};

/// The operations of one batch. The step checks once what they share: table, batch, workspace and stream.
///
/// [`WeightTable::step`](WeightTable::step) creates a step that enqueues its operations,
/// [`WeightTable::capture`](WeightTable::capture) one that records them.
#[derive(Debug)]
pub struct Step<'a> {
    queue: Queue,
    raw: raw::Step,
    has_adapters: bool,
    /// Of a captured step. It belongs to the capture, so that moving the step cannot lose it.
    recorder: Option<&'a Recorder>,
    operands: PhantomData<&'a mut ()>,
}

/// What a graph has of its captured step.
#[derive(Debug, Default)]
pub(in crate::cuda) struct Recorder(Mutex<Recording>);

#[derive(Debug, Default)]
pub(in crate::cuda) struct Recording {
    /// The memory of operands.
    pub(in crate::cuda) kept: Vec<Kept>,
    /// Where replays group routes.
    pub(in crate::cuda) groups: Vec<Arc<Groups>>,
}

impl Recorder {
    pub(in crate::cuda) fn new(kept: Vec<Kept>) -> Self {
        Self(Mutex::new(Recording { kept, groups: Vec::new() }))
    }

    pub(in crate::cuda) fn into_recording(self) -> Recording {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, add: impl FnOnce(&mut Recording)) {
        add(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl<'a> Step<'a> {
    pub(in crate::cuda) fn new(
        queue: &Queue,
        raw: raw::Step,
        has_adapters: bool,
        recorder: Option<&'a Recorder>,
    ) -> Self {
        Self { queue: queue.clone(), raw, has_adapters, recorder, operands: PhantomData }
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
        self.recorder.is_some()
    }

    /// Rejects operands of another context, buffers of another stream, and in a captured step borrowed memory. Then [enters](Self::enter).
    pub(in crate::cuda) fn check<'o, const N: usize>(
        &self,
        operands: [Option<Operand<'o>>; N],
    ) -> Result<Checked<'_, 'o, N>, LaunchError> {
        operands.iter().flatten().try_for_each(|(name, memory)| memory.check(name, self))?;
        Ok(Checked { _entered: self.enter()?, step: self, operands })
    }

    /// Makes the context current on this thread. Rejects a stream that is captured by anything but this step.
    ///
    /// Keep what it returns until the operation is enqueued, as for a [`Queue`].
    pub(in crate::cuda) fn enter(&self) -> Result<Option<Entered<'_>>, LaunchError> {
        if self.is_captured() { self.queue.bind().map(|()| None) } else { self.queue.enter().map(Some) }
    }

    /// Keeps the memory of operands alive for the graph.
    pub(in crate::cuda) fn keep(&self, operands: impl IntoIterator<Item = Option<Kept>>) {
        if let Some(recorder) = self.recorder {
            recorder.add(|recording| recording.kept.extend(operands.into_iter().flatten()));
        }
    }

    /// Makes replays take note that they group routes there.
    pub(in crate::cuda) fn keep_groups(&self, groups: &Arc<Groups>) {
        if let Some(recorder) = self.recorder {
            recorder.add(|recording| {
                if !recording.groups.iter().any(|other| Arc::ptr_eq(other, groups)) {
                    recording.groups.push(Arc::clone(groups));
                }
            });
        }
    }

    /// The batch of the step.
    pub(in crate::cuda) fn batch(&self) -> raw::RoutedBatch {
        self.raw.batch
    }
}

/// An operand's name in errors, and its memory.
pub(in crate::cuda) type Operand<'o> = (&'static str, &'o mut dyn Memory);

/// The operands of an operation, one after the other; `N` is the number of all.
pub(in crate::cuda) fn join<'o, const N: usize>(
    first: impl IntoIterator<Item = Option<Operand<'o>>>,
    others: impl IntoIterator<Item = Option<Operand<'o>>>,
) -> [Option<Operand<'o>>; N] {
    let mut operands = first.into_iter().chain(others);
    std::array::from_fn(|_| operands.next().flatten())
}

/// Operands that a step may use.
#[must_use = "nothing is enqueued"]
pub(in crate::cuda) struct Checked<'s, 'o, const N: usize> {
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
    pub(in crate::cuda) fn enqueue<R>(
        mut self,
        launch: impl FnOnce([u64; N], raw::Stream) -> Result<R, LaunchError>,
    ) -> Result<R, LaunchError> {
        let queue = &self.step.queue;
        self.step.keep(self.operands.iter().map(|operand| operand.as_ref().and_then(|(_, memory)| memory.kept())));
        let placed = self.operands.each_mut().map(|operand| operand.as_mut().map(|(_, memory)| memory.on(queue)));
        launch(placed.each_ref().map(|placed| placed.as_ref().map_or(0, |(address, _)| *address)), queue.raw())
    }
}

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
    /// the routing, the workspace and all operands alive. Operands must be [`Buffer`](crate::cuda::Buffer)s. Other work that `record`
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
    /// [`shrink`](crate::cuda::LoraLinear::shrink) records nothing. A replay for any other batch is refused
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
        capture(queue, kept, (raw, has_adapters), |recorder| {
            record(&mut Step::new(queue, raw, has_adapters, Some(recorder)))
        })
    }

    /// Rejects a routing for another number of slots.
    fn check_slots(&self, routing: usize) -> Result<(), LaunchError> {
        let table = self.capacity().num_slots;
        if routing == table { Ok(()) } else { Err(OperandError::NumSlots { routing, table }.into()) }
    }
}

/// Scratch memory for the operations of a step. All layers and graphs of a queue may share one workspace.
#[derive(Debug)]
pub struct Workspace {
    mailbox: Arc<Region>,
    partials: Arc<Region>,
}

impl Workspace {
    /// A workspace for any layer of the table's model.
    ///
    /// # Errors
    /// [`LaunchError`] if the kernels do not support a layer, or device memory is exhausted.
    pub fn new(weights: &WeightTable) -> Result<Self, LaunchError> {
        Self::with_bytes(weights.queue(), weights.workspace_bytes()?)
    }

    /// A workspace of this size: the [maximum](WorkspaceBytes::max) over the layers' plans, such as
    /// [`LinearPlan::workspace_bytes`](crate::plan::LinearPlan::workspace_bytes).
    ///
    /// # Errors
    /// [`LaunchError`] if device memory is exhausted.
    pub fn with_bytes(queue: &Queue, bytes: WorkspaceBytes) -> Result<Self, LaunchError> {
        let region = |bytes| Ok::<_, LaunchError>(Arc::new(Region::new(queue, bytes)?));
        Ok(Self { mailbox: region(bytes.mailbox)?, partials: region(bytes.partials)? })
    }

    pub(in crate::cuda) fn queue(&self) -> &Queue {
        self.mailbox.queue()
    }

    pub(in crate::cuda) fn kept(&self) -> [Kept; 2] {
        [self.mailbox.clone(), self.partials.clone()]
    }

    /// The workspace in the raw API.
    pub fn raw(&self) -> raw::Workspace {
        raw::Workspace { mailbox: self.mailbox.region(), partials: self.partials.region() }
    }
}

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
