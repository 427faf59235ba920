//! An engine with CUDA graphs, streams and memory of its own, which cudarc does not know. It captures and replays its
//! steps itself, and launches on the stream that a thread has chosen. `aril::cuda::raw` explains the parts.

use std::{cell::Cell, error, ffi::c_void, ptr};

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cuda::{
        Kernels, LoraLinear, Queue, Routing, WeightTable, Workspace, driver_is_present,
        raw::{MatrixMut, MatrixRef, Step, Stream},
    },
    model::{Linear, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    routing::Batch,
};
use cudarc::driver::{CudaContext, result, sys};

type Result<T> = std::result::Result<T, Box<dyn error::Error>>;

const HIDDEN: usize = 64;
/// Decoded rows of a graph: it is replayed for as many tokens or fewer.
const BUCKET: usize = 4;
/// Tokens of prompts in a step.
const PREFILL: usize = 12;
/// What the layer gives without an adapter.
const BASE: f32 = 100.0;

thread_local! {
    /// The stream that this thread launches on, instead of the engine's.
    static OVERRIDE: Cell<Option<Stream>> = const { Cell::new(None) };
}

/// Runs `launch` with another stream for what this thread launches.
fn with_stream<T>(stream: Stream, launch: impl FnOnce() -> T) -> T {
    let before = OVERRIDE.replace(Some(stream));
    let result = launch();
    OVERRIDE.set(before);
    result
}

/// What batches use one after the other. Batches that overlap have one each.
struct Lane {
    routing: Routing,
    workspace: Workspace,
    /// `[rows, HIDDEN]`
    x: Memory,
    y: Memory,
    rows: usize,
}

struct Engine {
    // Dropped before the streams: it may free memory on them.
    weights: WeightTable,
    layer: LoraLinear,
    decode: Lane,
    prefill: Lane,
    main: OwnStream,
    side: OwnStream,
}

pub(crate) fn main() -> Result<()> {
    if !driver_is_present() {
        return Err("this example needs a GPU".into());
    }
    // The primary context, which a program with CUDA's runtime has current.
    let _context = CudaContext::new(0)?;
    let mut engine = Engine::new()?;
    let legal = engine.load(0, 1)?;

    // Captured before the second adapter is there. The graph follows the slots.
    let graph = engine.capture_decode()?;
    let support = engine.load(1, 2)?;

    // A step: the prompts on another stream, beside the decoded tokens.
    let prompts = [support; PREFILL];
    engine.prefill(&prompts)?;
    let decoded = engine.decode(&graph, &[legal, Slot::BASE, support])?;
    let added = |value: f32| BASE + value * HIDDEN as f32;
    expect("decoded", &decoded, &[added(1.0), BASE, added(2.0), BASE])?;
    expect("prompts", &engine.prefill.read(&engine.side)?, &[added(2.0); PREFILL])?;

    // An adapter is replaced. The next replay has the new one.
    let legal = engine.load(0, 5)?;
    let decoded = engine.decode(&graph, &[legal])?;
    expect("decoded", &decoded, &[added(5.0), BASE, BASE, BASE])
}

fn expect(what: &str, rows: &[f32], expected: &[f32]) -> Result<()> {
    println!("{what}: {rows:?}");
    if rows == expected { Ok(()) } else { Err(format!("{what}: expected {expected:?}").into()) }
}

impl Engine {
    fn new() -> Result<Self> {
        let (main, side) = (OwnStream::new()?, OwnStream::new()?);
        // SAFETY: the stream is of the kernels' context, and the engine destroys it last. No operand is a slice of
        // cudarc.
        let queue = unsafe { Queue::from_raw(&Kernels::load()?, main.0) }?;

        let mut spec = ModelSpec::new();
        let layer = spec.linear(Linear::new("attn", Parallel::Replicated, HIDDEN).slice("o_proj", HIDDEN))?;
        let model = spec.shard(TpRank::SINGLE)?;
        let capacity = Capacity::tokens(BUCKET.max(PREFILL)).slots(2).rank(16);
        // Known before anything is allocated, as an engine's plan of its memory wants it.
        let bytes = WeightTable::arena_bytes_for(&model, DType::F32, capacity);
        let weights = WeightTable::new(&queue, &model, DType::F32, capacity, bytes)?;
        let lane = |rows| -> Result<Lane> {
            let (routing, workspace) = (Routing::new(&queue, capacity, 2)?, Workspace::new(&weights)?);
            Ok(Lane { routing, workspace, x: Memory::new(rows)?, y: Memory::new(rows)?, rows })
        };
        let (decode, prefill) = (lane(BUCKET)?, lane(PREFILL)?);
        let layer = LoraLinear::new(&weights, layer)?;
        Ok(Self { weights, layer, decode, prefill, main, side })
    }

    /// Loads an adapter of rank 1 that adds `value` times the sum of x to every output. Any thread may.
    fn load(&self, slot: usize, value: u8) -> Result<Slot> {
        let filled = |shape: [usize; 2], value: f32| {
            Tensor::new(DType::F32, shape, bytemuck::cast_slice(&[value; HIDDEN]).to_vec())
        };
        let (a, b) = (filled([1, HIDDEN], 1.0)?, filled([HIDDEN, 1], value.into())?);
        let tensors = [("attn.o_proj.lora_A.weight".to_owned(), a), ("attn.o_proj.lora_B.weight".to_owned(), b)];
        let adapter = Adapter::from_tensors(r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1}"#, tensors)?;
        Ok(self.weights.load(slot, &adapter.plan(self.weights.model(), self.weights.dtype())?)?)
    }

    /// The layers of the model, for eager steps and captured ones.
    fn forward(&self, step: &Step, lane: &Lane) -> Result<()> {
        let step = step.on(OVERRIDE.get().unwrap_or(self.main.0));
        let rows = step.batch().num_tokens();
        // The engine's own matrix multiplication: here every output is the same.
        // SAFETY: y has these rows, and the stream orders its uses.
        unsafe { sys::cuMemsetD32Async(lane.y.0, BASE.to_bits(), rows * HIDDEN, cu(step.stream())) }.result()?;
        let (x, y) = (MatrixRef::new::<f32>(lane.x.0, rows, HIDDEN), MatrixMut::new::<f32>(lane.y.0, rows, HIDDEN));
        // SAFETY: x and y have these rows. aril owns table, routing and workspace. The streams are of the kernels'
        // context, and order the uses of all of these, as `prefill` does where it launches on another one. The engine
        // lives longer than its graphs.
        Ok(unsafe { self.layer.add_delta_raw(&step, x, y) }?)
    }

    /// The graph of a decode step, for any adapters and any routing of up to `BUCKET` tokens. Captured on the stream
    /// that is no queue's, so that other threads may load meanwhile.
    fn capture_decode(&self) -> Result<Graph> {
        let lane = &self.decode;
        // The bounds of every batch that is replayed, not those of one.
        let batch = lane.routing.capture_batch(BUCKET)?;
        let step = Step::new(self.weights.raw(), batch, lane.workspace.raw(), self.main.0);
        with_stream(self.side.0, || Graph::capture(&self.side, || self.forward(&step, lane)))
    }

    /// A decode step, and the first output of each row of the graph.
    fn decode(&mut self, graph: &Graph, slots: &[Slot]) -> Result<Vec<f32>> {
        // Outside the graph, on the stream of the queue.
        let routing = &mut self.decode.routing;
        routing.wait()?;
        let batch = routing.update(&Batch::new(slots))?;
        // The adapters are those of the slots.
        drop(self.weights.step(&batch, &mut self.decode.workspace)?);
        graph.launch(&self.main)?;
        self.decode.read(&self.main)
    }

    /// Starts the prompts on the other stream.
    fn prefill(&mut self, slots: &[Slot]) -> Result<()> {
        // The routing's last batch has run before it is overwritten.
        self.main.wait_for(&self.side)?;
        self.prefill.routing.wait()?;
        let step = {
            let batch = self.prefill.routing.update(&Batch::new(slots))?;
            // Not captured: its launches are sized for the slots of this batch.
            self.weights.step(&batch, &mut self.prefill.workspace)?.raw()
        };
        // The routing and the adapters are there before the layers run.
        self.side.wait_for(&self.main)?;
        with_stream(self.side.0, || self.forward(&step, &self.prefill))?;
        // A later commit of an adapter does not overtake what reads its slot.
        self.main.wait_for(&self.side)
    }
}

impl Lane {
    /// The first output of each row, once the stream has run.
    fn read(&self, stream: &OwnStream) -> Result<Vec<f32>> {
        stream.synchronize()?;
        let mut y = vec![0.0; self.rows * HIDDEN];
        // SAFETY: y has as many elements.
        unsafe { result::memcpy_dtoh_sync(&mut y, self.y.0) }?;
        Ok(y.chunks(HIDDEN).map(|row| row[0]).collect())
    }
}

/// Rows of ones in device memory.
struct Memory(u64);

impl Memory {
    fn new(rows: usize) -> Result<Self> {
        // SAFETY: a context is current.
        let memory = Self(unsafe { result::malloc_sync(rows * HIDDEN * size_of::<f32>()) }?);
        // SAFETY: the memory has as many elements.
        unsafe { result::memcpy_htod_sync(memory.0, &vec![1.0_f32; rows * HIDDEN]) }?;
        Ok(memory)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: nothing else frees it, and the driver waits for the work that uses it.
        let _ = unsafe { result::free_sync(self.0) };
    }
}

/// A stream of the engine.
struct OwnStream(Stream);

fn cu(stream: Stream) -> sys::CUstream {
    stream.as_raw().cast()
}

impl OwnStream {
    fn new() -> Result<Self> {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        Ok(Self(Stream::from_raw(stream.cast::<c_void>())))
    }

    /// Makes later work of this stream wait, on the device, for the work that the other one has now.
    fn wait_for(&self, other: &Self) -> Result<()> {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event and the stream are alive.
        unsafe { result::event::record(event, cu(other.0)) }?;
        // SAFETY: as above.
        unsafe { result::stream::wait_event(cu(self.0), event, flags) }?;
        // SAFETY: nothing else has the event. The driver keeps it until it is over.
        Ok(unsafe { result::event::destroy(event) }?)
    }

    fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is alive.
        Ok(unsafe { result::stream::synchronize(cu(self.0)) }?)
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        // SAFETY: the objects that use it are gone. The driver destroys it once its work is done.
        let _ = unsafe { result::stream::destroy(cu(self.0)) };
    }
}

/// A graph of the engine. It keeps nothing alive.
struct Graph(sys::CUgraphExec);

impl Graph {
    fn capture(stream: &OwnStream, record: impl FnOnce() -> Result<()>) -> Result<Self> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and not being captured.
        unsafe { result::stream::begin_capture(cu(stream.0), mode) }?;
        let recorded = record();
        // Also after an error, so that the stream can be used again.
        // SAFETY: the stream is being captured.
        let graph = unsafe { result::stream::end_capture(cu(stream.0)) };
        recorded?;
        let (graph, mut executable) = (graph?, ptr::null_mut());
        // SAFETY: the graph is alive, and the pointer is valid for the call.
        let instantiated = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0) }.result();
        // SAFETY: nothing else has the graph.
        unsafe { result::graph::destroy(graph) }?;
        instantiated?;
        Ok(Self(executable))
    }

    fn launch(&self, stream: &OwnStream) -> Result<()> {
        // SAFETY: both are alive, and so is what the graph uses.
        Ok(unsafe { result::graph::launch(self.0, cu(stream.0)) }?)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: nothing else has it. The driver destroys it once its replays have run.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}
