//! A step of a batch, and its graph.

#![expect(unsafe_code, reason = "copies between operands, captures and launches a graph, and is Send")]

use std::{
    fmt,
    marker::PhantomData,
    ptr,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::driver::{
    CudaContext, DeviceRepr, result,
    sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode, cuGraphGetNodes},
};

use super::{RoutedBatch, Routing};
use crate::{
    Slot,
    cuda::{
        LaunchError, Queue, View, ViewMut, WeightTable,
        loading::Loaded,
        memory::{Kept, Operand, Region},
        operations::Groups,
        raw,
        stream::{OwnStream, Relaxed},
    },
    error::OperandError,
    plan::WorkspaceBytes,
    unique::unique,
};

/// The operations of one batch. The step checks once what they share: table, batch, workspace and stream.
///
/// [`WeightTable::step`](WeightTable::step) creates a step that enqueues its operations,
/// [`WeightTable::capture`](WeightTable::capture) one that records them.
#[derive(Debug)]
pub struct Step<'a> {
    queue: Queue,
    /// On the stream of the queue or, of a captured step, of its capture.
    raw: raw::Step,
    loaded: Loaded<'a>,
    has_adapters: bool,
    /// The stack that has the adapters of the batch.
    placed: Option<u64>,
    /// Of a captured step. It belongs to the capture, so that moving the step cannot lose it.
    recorder: Option<&'a Recorder>,
    operands: PhantomData<&'a mut ()>,
}

/// What a graph has of its captured step.
#[derive(Debug)]
struct Recorder {
    recording: Mutex<Recording>,
    began: Moment,
}

#[derive(Debug)]
struct Recording {
    /// The memory of operands.
    kept: Vec<Kept>,
    /// Where replays group routes.
    groups: Vec<Arc<Groups>>,
    /// Stacks that replays need to have the adapters of the batch.
    stacks: Vec<u64>,
}

impl Recorder {
    fn new(kept: Vec<Kept>) -> Self {
        Self { recording: Mutex::new(Recording { kept, groups: Vec::new(), stacks: Vec::new() }), began: Moment::now() }
    }

    fn into_recording(self) -> Recording {
        self.recording.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, add: impl FnOnce(&mut Recording)) {
        add(&mut self.recording.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Orders the beginnings of captures, and the creations of layers.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(in crate::cuda) struct Moment(u64);

impl Moment {
    pub(in crate::cuda) fn now() -> Self {
        Self(unique())
    }
}

impl<'a> Step<'a> {
    fn new(
        queue: &Queue,
        raw: raw::Step,
        (loaded, has_adapters): (Loaded<'a>, bool),
        recorder: Option<&'a Recorder>,
    ) -> Self {
        Self { queue: queue.clone(), raw, loaded, has_adapters, placed: None, recorder, operands: PhantomData }
    }

    /// Tokens in the batch, which is the number of rows of `[tokens, ..]` matrices.
    pub fn num_tokens(&self) -> usize {
        self.raw.batch.num_tokens()
    }

    /// Whether a token may have an adapter: its slot is known and not [`Slot::BASE`](crate::Slot::BASE), or is in
    /// device memory. If none has, an engine may skip what [`Batch::has_adapters`](crate::routing::Batch::has_adapters)
    /// says.
    pub fn has_adapters(&self) -> bool {
        self.has_adapters
    }

    /// The queue of the operations. A captured step is not on its stream: what is enqueued there while it is recorded
    /// runs at once, and is in no graph.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Enqueues a copy of `from` to the start of `to`. A captured step records it, and keeps both. Never waits.
    ///
    /// # Errors
    /// [`OperandError::Capacity`] if `to` is shorter than `from`. [`LaunchError`] if an operand belongs to another
    /// context or stream, or is borrowed and the step is captured. Nothing was enqueued.
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
            // SAFETY: both have this many bytes, and are as `Checked::enqueue` says. They do not overlap, because the
            // target is borrowed exclusively.
            Ok(unsafe { result::memcpy_dtod_async(to, from, bytes, stream.as_raw().cast()) }?)
        })
    }

    /// The step in the raw API, for further operations there, and for the engine's own kernels, which are captured on
    /// its [`stream`](raw::Step::stream). A captured step does not keep their operands alive, and that stream ends with
    /// the capture. Operations of another step are enqueued before the next update of the routing, and not captured:
    /// its launches are sized for the slots of its batch.
    pub fn raw(&self) -> raw::Step {
        self.raw
    }

    /// Whether the step is being captured.
    pub fn is_captured(&self) -> bool {
        self.recorder.is_some()
    }

    /// Rejects operands of another context or stream, in a captured step borrowed memory, and a batch whose adapters
    /// are not in their slots any more. Then [prepares](Self::prepare).
    pub(in crate::cuda) fn check<'o, const N: usize>(
        &self,
        operands: [Option<Operand<'o>>; N],
    ) -> Result<Checked<'_, 'o, N>, LaunchError> {
        operands.iter().flatten().try_for_each(|(name, memory)| memory.check(name, &self.queue, self.is_captured()))?;
        self.loaded.check()?;
        self.prepare()?;
        Ok(Checked { step: self, operands })
    }

    /// Makes the context current on this thread. Rejects a queue whose stream the engine is capturing; that of a
    /// captured step is the capture's own.
    fn prepare(&self) -> Result<(), LaunchError> {
        if self.is_captured() { self.queue.bind() } else { self.queue.prepare() }
    }

    /// Rejects a layer that reads memory before it waits for the kernel in front, unless all that the step records was
    /// recorded after the layer was created.
    pub(in crate::cuda) fn check_created(&self, layer: &'static str, created: Moment) -> Result<(), LaunchError> {
        match self.recorder {
            Some(recorder) if created > recorder.began => Err(LaunchError::CreatedInCapture { layer }),
            _ => Ok(()),
        }
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

    /// Rejects the stack of another table.
    pub(in crate::cuda) fn check_table(&self, weights: &WeightTable) -> Result<(), OperandError> {
        if self.loaded.is_of(weights) { Ok(()) } else { Err(OperandError::OtherTable) }
    }

    /// The slots of the batch, without repetitions of the one before; none if they are in device memory.
    pub(in crate::cuda) fn adapters(&self) -> &'a [Slot] {
        self.loaded.slots()
    }

    /// Takes note that a stack has the adapters of the batch.
    pub(in crate::cuda) fn has_placed(&mut self, stack: u64) {
        self.placed = Some(stack);
    }

    /// Rejects a batch with adapters that are not in the stack. A captured step makes its replays do so, and keeps the
    /// stack's memory.
    pub(in crate::cuda) fn check_placed(&self, stack: u64, memory: &[Kept]) -> Result<(), OperandError> {
        let Some(recorder) = self.recorder else { return self.check_stacks(&[stack]) };
        recorder.add(|recording| {
            if !recording.stacks.contains(&stack) {
                recording.stacks.push(stack);
                recording.kept.extend_from_slice(memory);
            }
        });
        Ok(())
    }

    fn check_stacks(&self, stacks: &[u64]) -> Result<(), OperandError> {
        let is_placed = stacks.iter().all(|stack| self.placed == Some(*stack));
        if is_placed || !self.has_adapters { Ok(()) } else { Err(OperandError::NotPlaced) }
    }

    /// The batch of the step.
    pub(in crate::cuda) fn batch(&self) -> raw::RoutedBatch {
        self.raw.batch
    }
}

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
}

impl<const N: usize> Checked<'_, '_, N> {
    /// Calls `launch` with the addresses of the operands, 0 for one that is absent, and with the step's stream, to
    /// enqueue work on that stream.
    ///
    /// The stream's context is current on this thread. Until the work has run, and for a captured step as long as its
    /// graph lives, the operands are memory of that context, of as many elements as their views have. They belong to
    /// the queue, whose stream orders their uses and their deallocation; behind what other streams have done with
    /// memory of cudarc, it waits by cudarc's events. The step's table, routing and workspace belong to the queue, too.
    /// A captured step's graph is launched on the queue's stream.
    pub(in crate::cuda) fn enqueue<R>(
        mut self,
        launch: impl FnOnce([u64; N], raw::Stream) -> Result<R, LaunchError>,
    ) -> Result<R, LaunchError> {
        let queue = &self.step.queue;
        self.step.keep(self.operands.iter().map(|operand| operand.as_ref().and_then(|(_, memory)| memory.kept())));
        let mut placed = [const { None }; N];
        for (place, operand) in placed.iter_mut().zip(&mut self.operands) {
            *place = operand.as_mut().map(|(_, memory)| memory.on(queue)).transpose()?;
        }
        let addresses = placed.each_ref().map(|placed| placed.as_ref().map_or(0, |(address, _)| *address));
        let enqueued = launch(addresses, self.step.raw.stream)?;
        self.step.loaded.check()?;
        Ok(enqueued)
    }
}

impl WeightTable {
    /// Starts a step of a batch, whose adapters must be in their slots.
    ///
    /// If another thread replaces or unloads one of them meanwhile, every further operation of the step returns
    /// [`OperandError::NotLoaded`], as does one that is being enqueued then, which may use the new adapter: discard
    /// what it wrote.
    ///
    /// # Errors
    /// [`OperandError::NotLoaded`] if an adapter of the batch has been unloaded or replaced, or is in another table or
    /// pool. [`OperandError::Pooled`] if the table belongs to a pool, whose own `step` starts its steps.
    /// [`OperandError::NumSlots`] if the routing was made for another number of slots. [`LaunchError`] if the table,
    /// batch and workspace belong to different queues, or the stream is being captured.
    pub fn step<'a>(&'a self, batch: &RoutedBatch<'a>, workspace: &'a mut Workspace) -> Result<Step<'a>, LaunchError> {
        if self.is_pooled() {
            return Err(OperandError::Pooled.into());
        }
        let queue = self.queue();
        queue.check("the batch", batch.queue())?;
        queue.check("the workspace", workspace.queue())?;
        self.check_slots(batch.num_slots())?;
        queue.prepare()?;
        let raw = raw::Step::new(self.raw(), batch.raw, workspace.raw(), queue.raw());
        Ok(Step::new(queue, raw, (self.loaded_slots(batch.slots())?, batch.has_adapters()), None))
    }

    /// Captures a step of up to `num_tokens` tokens as a graph of the operations of that step which `record` calls. The
    /// graph keeps the table, the routing, the workspace and all operands alive. Operands must be
    /// [`Buffer`](crate::cuda::Buffer)s.
    ///
    /// The capture is on a stream of its own, with the priority of the queue's stream. Everything else that `record`
    /// calls runs at once, as outside of it: calls of aril on the queue, steps of other batches, other captures, and
    /// work of cudarc on the queue's stream. The engine's own kernels are captured if they are launched on the stream
    /// of [`Step::raw`]. That is unsafe, and their memory is not kept.
    ///
    /// A [replay](Graph::replay) is an operation of a step of this table, routing and workspace, and uses its adapters
    /// and its batch. It is enqueued on the queue's stream.
    ///
    /// # Errors
    /// [`LaunchError`] if `num_tokens` exceeds the routing's capacity, the table, routing and workspace belong to
    /// different queues, or no work was captured; or the error of `record`.
    pub fn capture<E: From<LaunchError>>(
        &self,
        routing: &Routing,
        num_tokens: usize,
        workspace: &mut Workspace,
        record: impl FnOnce(&mut Step<'_>) -> Result<(), E>,
    ) -> Result<Graph, E> {
        self.capture_for(true, routing, num_tokens, workspace, record)
    }

    /// Like [`capture`](Self::capture), for batches in which no token has an adapter. `record` may skip what only adds
    /// deltas, and [`shrink`](crate::cuda::LoraLinear::shrink) records nothing. A replay for any other batch is refused
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
        // It is for any batch.
        let loaded = self.loaded_slots(&[]).map_err(LaunchError::from)?;
        let recorder = Recorder::new(vec![self.kept(), routing.kept(), mailbox, partials]);
        let capture = Capture::begin(queue)?;
        let captured = raw::Step::new(self.raw(), batch, workspace.raw(), capture.stream.raw());
        record(&mut Step::new(queue, captured, (loaded, has_adapters), Some(&recorder)))?;
        let graph = capture.end()?;
        Ok(Graph { graph, queue: queue.clone(), recording: recorder.into_recording(), captured, has_adapters })
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
/// Adapters, their ranks and the routing may change between replays. Rows beyond the batch of the step are unchanged by
/// a replay.
pub struct Graph {
    // Dropped before the memory it uses.
    graph: Executable,
    queue: Queue,
    recording: Recording,
    /// The step that was captured. The graph keeps its memory, so that no other object has these addresses.
    captured: raw::Step,
    /// Whether the captured operations serve tokens with adapters.
    has_adapters: bool,
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph")
            .field("queue", &self.queue)
            .field("kept", &self.recording.kept.len())
            .finish_non_exhaustive()
    }
}

impl Graph {
    /// Enqueues the captured operations for the batch of `step`, which may have fewer tokens than the captured one.
    /// Neither allocates nor waits.
    ///
    /// # Errors
    /// [`LaunchError::OtherGraph`] if the graph was captured with another table, routing or workspace than those of the
    /// step. [`OperandError::Capacity`](crate::error::OperandError::Capacity) if the batch has more tokens than the
    /// graph, [`LaunchError::WithoutAdapters`] if it has an adapter and the graph was captured
    /// [without](crate::cuda::WeightTable::capture_without_adapters),
    /// [`OperandError::NotPlaced`](crate::error::OperandError::NotPlaced) if it has operations with a stack, in which
    /// the batch is not placed, [`OperandError::NotLoaded`](crate::error::OperandError::NotLoaded) as for any operation
    /// of the step, [`LaunchError::WrongStream`] if the graph belongs to another queue, [`LaunchError::CapturedReplay`]
    /// if the step is being captured. [`LaunchError::Capturing`] if the engine captures the queue's stream.
    /// [`LaunchError::Driver`].
    pub fn replay(&mut self, step: &mut Step<'_>) -> Result<(), LaunchError> {
        if step.is_captured() {
            return Err(LaunchError::CapturedReplay);
        }
        step.queue().check("the graph", &self.queue)?;
        self.captured.check_replay(&step.raw())?;
        if step.has_adapters() && !self.has_adapters {
            return Err(LaunchError::WithoutAdapters);
        }
        step.check_stacks(&self.recording.stacks)?;
        step.loaded.check()?;
        step.prepare()?;
        self.recording.groups.iter().for_each(|groups| groups.replay());
        self.graph.launch(step.queue())?;
        Ok(step.loaded.check()?)
    }
}

/// A capture on a stream that nothing but its step has. It ends on every path.
#[derive(Debug)]
struct Capture {
    stream: OwnStream,
    is_open: bool,
}

impl Capture {
    fn begin(queue: &Queue) -> Result<Self, LaunchError> {
        let stream = OwnStream::like(queue)?;
        // Forbids no call on any thread: none that is not the step's touches the stream.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive, and its context is current.
        unsafe { result::stream::begin_capture(stream.raw().as_raw().cast(), mode) }?;
        Ok(Self { stream, is_open: true })
    }

    fn end(mut self) -> Result<Executable, LaunchError> {
        let mut graph =
            Executable { context: Arc::clone(self.stream.context()), graph: self.close()?, exec: ptr::null_mut() };
        let mut num_nodes = 0;
        // SAFETY: the graph is alive. Given no array of nodes, the driver only counts them.
        unsafe { cuGraphGetNodes(graph.graph, ptr::null_mut(), &raw mut num_nodes) }.result()?;
        if num_nodes == 0 {
            return Err(LaunchError::NothingCaptured);
        }
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let _relaxed = Relaxed::new();
        // SAFETY: the graph is alive.
        graph.exec = unsafe { result::graph::instantiate(graph.graph, flags) }?;
        Ok(graph)
    }

    /// Ends the capture. The graph is the caller's.
    fn close(&mut self) -> Result<sys::CUgraph, LaunchError> {
        self.is_open = false;
        self.stream.context().bind_to_thread()?;
        // SAFETY: the stream is alive.
        Ok(unsafe { result::stream::end_capture(self.stream.raw().as_raw().cast()) }?)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if self.is_open
            && let Ok(graph) = self.close()
        {
            drop(Executable { context: Arc::clone(self.stream.context()), graph, exec: ptr::null_mut() });
        }
        // The error that led here is the one to report.
    }
}

/// A graph of the driver, and its executable form.
struct Executable {
    context: Arc<CudaContext>,
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
}

// SAFETY: the driver's graphs belong to no thread, but are not synchronized: a launch borrows the graph exclusively.
unsafe impl Send for Executable {}

impl Executable {
    /// Launches the graph on the stream of a queue, whose context is current.
    fn launch(&mut self, queue: &Queue) -> Result<(), LaunchError> {
        // SAFETY: the graph was instantiated. The stream is alive, and orders the uses of the graph's memory.
        Ok(unsafe { result::graph::launch(self.exec, queue.stream().cu_stream()) }?)
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        // On an error the context is gone, and with it the graph.
        let _ = self.context.bind_to_thread();
        let _relaxed = Relaxed::new();
        if !self.exec.is_null() {
            // SAFETY: nothing else has it. The driver destroys it once its launches are done.
            let _ = unsafe { result::graph::exec_destroy(self.exec) };
        }
        if !self.graph.is_null() {
            // SAFETY: nothing else has it.
            let _ = unsafe { result::graph::destroy(self.graph) };
        }
    }
}
