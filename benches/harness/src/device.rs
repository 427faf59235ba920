//! The device: memory, streams, captured graphs and their times.
#![expect(clippy::disallowed_methods, reason = "benchmarks allocate and wait")]

use std::{ffi::CString, ptr, slice, sync::Arc};

use aril::cuda::{
    Kernels, Queue,
    raw::{DeviceRegion, Stream},
};
use bytemuck::Pod;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result, sys};

use crate::{Result, noise::Noise};

#[derive(Clone)]
pub struct Gpu {
    pub context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
    pub kernels: Kernels,
}

impl Gpu {
    /// The first device, on a stream of its own: the default stream cannot be captured.
    pub fn new() -> Result<Self> {
        if !aril::cuda::driver_is_present() {
            return Err("there is no CUDA driver on this machine".into());
        }
        let context = CudaContext::new(0)?;
        let stream = new_stream(&context)?;
        let kernels = Kernels::load_into(&context)?;
        Ok(Self { context, stream, kernels })
    }

    pub fn raw_stream(&self) -> Stream {
        Stream::from(&*self.stream)
    }

    pub fn queue(&self) -> Result<Queue> {
        Ok(Queue::new(&self.kernels, &self.stream)?)
    }

    /// Another stream.
    pub fn new_stream(&self) -> Result<Arc<CudaStream>> {
        new_stream(&self.context)
    }

    pub fn num_multiprocessors(&self) -> Result<usize> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        Ok(usize::try_from(self.context.attribute(attribute)?)?)
    }

    /// Allocates uninitialised memory.
    pub fn alloc(&self, bytes: usize) -> Result<Memory> {
        // SAFETY: bytes of any value are bytes.
        let slice = unsafe { self.stream.alloc::<u8>(bytes.max(1)) }?;
        let address = slice.device_ptr(&self.stream).0;
        Ok(Memory { address, bytes, _slice: slice })
    }

    pub fn upload<T: Pod>(&self, values: &[T]) -> Result<Memory> {
        let memory = self.alloc(size_of_val(values))?;
        self.write(memory.address, values)?;
        Ok(memory)
    }

    /// Allocates `elems` elements and fills them with the noise.
    pub fn fill(&self, noise: &Noise, elems: usize) -> Result<Memory> {
        let bytes = elems * 2;
        let memory = self.alloc(bytes)?;
        let period = &noise.period()[..noise.period().len().min(elems)];
        self.write(memory.address, period)?;
        let mut filled = size_of_val(period);
        while filled < bytes {
            let more = filled.min(bytes - filled);
            self.copy(memory.address + filled as u64, memory.address, more)?;
            filled += more;
        }
        Ok(memory)
    }

    pub fn write<T: Pod>(&self, address: u64, values: &[T]) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        // SAFETY: the caller's memory, and the values live until the copy is done.
        unsafe { result::memcpy_htod_async(address, bytes, self.stream.cu_stream()) }?;
        self.synchronize()
    }

    pub fn read<T: Pod>(&self, address: u64, len: usize) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); len];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        // SAFETY: the caller's memory, and the values live until the copy is done.
        unsafe { result::memcpy_dtoh_async(bytes, address, self.stream.cu_stream()) }?;
        self.synchronize()?;
        Ok(values)
    }

    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's memory.
        Ok(unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream.cu_stream()) }?)
    }

    pub fn zero(&self, address: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's memory.
        Ok(unsafe { result::memset_d8_async(address, 0, bytes, self.stream.cu_stream()) }?)
    }

    pub fn synchronize(&self) -> Result<()> {
        Ok(self.stream.synchronize()?)
    }

    /// Captures the work that `enqueue` enqueues.
    pub fn capture(&self, enqueue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let stream = self.stream.cu_stream();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream is alive and not capturing.
        unsafe { result::stream::begin_capture(stream, mode) }?;
        let enqueued = enqueue();
        // SAFETY: the stream is capturing.
        let graph = unsafe { result::stream::end_capture(stream) };
        enqueued?;
        let graph = graph?;
        let mut executable = ptr::null_mut();
        // SAFETY: the graph is alive.
        let instantiated = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0).result() };
        // SAFETY: nobody else has it, and the executable does not need it.
        unsafe { result::graph::destroy(graph) }?;
        instantiated?;
        Ok(Graph { executable, stream: self.stream.clone() })
    }

    /// The time of each of `replays`, in µs, after a few that are not timed.
    pub fn time(&self, graph: &Graph, replays: usize) -> Result<Vec<f64>> {
        Ok(self.time_in_turn(slice::from_ref(graph), replays)?.concat())
    }

    /// As `time`, for several graphs. They are replayed in turn, so that all run at the same clock rates.
    pub fn time_in_turn(&self, graphs: &[Graph], replays: usize) -> Result<Vec<Vec<f64>>> {
        const WARM_UP: usize = 3;
        (0..WARM_UP).try_for_each(|_| graphs.iter().try_for_each(Graph::replay))?;
        let pairs = || (0..replays).map(|_| Ok([Event::new()?, Event::new()?])).collect::<Result<Vec<_>>>();
        let events = graphs.iter().map(|_| pairs()).collect::<Result<Vec<_>>>()?;
        for replay in 0..replays {
            for (graph, events) in graphs.iter().zip(&events) {
                let [start, end] = &events[replay];
                start.record(&self.stream)?;
                graph.replay()?;
                end.record(&self.stream)?;
            }
        }
        self.synchronize()?;
        let us = |events: Vec<[Event; 2]>| events.iter().map(|[start, end]| start.us_until(end)).collect();
        events.into_iter().map(us).collect()
    }

    /// The time of each of `count` runs, in µs. The host is at most a few runs ahead of the device, as an engine is.
    pub fn time_each(&self, count: usize, mut enqueue: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
        const AHEAD: usize = 4;
        let events = (0..count).map(|_| Ok([Event::new()?, Event::new()?])).collect::<Result<Vec<_>>>()?;
        for (run, [start, end]) in events.iter().enumerate() {
            if let Some([_, earlier]) = run.checked_sub(AHEAD).map(|earlier| &events[earlier]) {
                earlier.wait()?;
            }
            start.record(&self.stream)?;
            enqueue()?;
            end.record(&self.stream)?;
        }
        self.synchronize()?;
        events.iter().map(|[start, end]| start.us_until(end)).collect()
    }

    /// The time of one run without a graph, in µs.
    pub fn time_eager(&self, enqueue: impl FnOnce() -> Result<()>) -> Result<f64> {
        let (start, end) = (Event::new()?, Event::new()?);
        start.record(&self.stream)?;
        enqueue()?;
        end.record(&self.stream)?;
        self.synchronize()?;
        start.us_until(&end)
    }
}

/// Wraps a stream of its own: cudarc would make its own stream wait for events, which a capture rejects.
fn new_stream(context: &Arc<CudaContext>) -> Result<Arc<CudaStream>> {
    let raw = result::stream::create(result::stream::StreamKind::NonBlocking)?;
    // SAFETY: just made in this context, and never destroyed.
    Ok(unsafe { context.wrap_borrowed_stream(raw) })
}

/// Device memory.
pub struct Memory {
    pub address: u64,
    pub bytes: usize,
    _slice: CudaSlice<u8>,
}

impl Memory {
    pub fn region(&self) -> DeviceRegion {
        DeviceRegion { ptr: self.address, bytes: self.bytes }
    }
}

/// A captured graph. What it uses must outlive it.
pub struct Graph {
    executable: sys::CUgraphExec,
    stream: Arc<CudaStream>,
}

impl Graph {
    pub fn replay(&self) -> Result<()> {
        // SAFETY: the graph is alive, and so is what it uses.
        Ok(unsafe { result::graph::launch(self.executable, self.stream.cu_stream()) }?)
    }
}

impl Drop for Graph {
    /// Ignores errors: replays have reported them.
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
        // SAFETY: no replay is running.
        let _ = unsafe { result::graph::exec_destroy(self.executable) };
    }
}

pub struct Event(sys::CUevent);

impl Event {
    pub fn new() -> Result<Self> {
        Ok(Self(result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?))
    }

    pub fn record(&self, stream: &CudaStream) -> Result<()> {
        // SAFETY: both are alive.
        Ok(unsafe { result::event::record(self.0, stream.cu_stream()) }?)
    }

    /// Blocks this thread until the recorded work has run.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: it is alive.
        Ok(unsafe { result::event::synchronize(self.0) }?)
    }

    /// The time until another event of the same stream, in µs.
    pub fn us_until(&self, end: &Self) -> Result<f64> {
        // SAFETY: both are alive, and of one stream.
        let milliseconds = unsafe { result::event::elapsed(self.0, end.0) }?;
        Ok(f64::from(milliseconds) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// Kernels from PTX, never unloaded.
pub struct Module(sys::CUmodule);

impl Module {
    pub fn load(ptx: &str) -> Result<Self> {
        let ptx = CString::new(ptx)?;
        // SAFETY: a context is current since `Gpu::new`, and the text ends with a zero.
        Ok(Self(unsafe { result::module::load_data(ptx.as_ptr().cast()) }?))
    }

    pub fn function(&self, name: &str) -> Result<Function> {
        // SAFETY: the module is never unloaded.
        Ok(Function(unsafe { result::module::get_function(self.0, CString::new(name)?) }?))
    }
}

pub struct Function(sys::CUfunction);

impl Function {
    /// Launches with 8-byte parameters.
    ///
    /// # Safety
    /// They must be the kernel's parameters, and the memory behind their addresses must be alive until it has run.
    pub unsafe fn launch(&self, gpu: &Gpu, blocks: usize, threads: usize, parameters: &mut [u64]) -> Result<()> {
        let mut pointers: Vec<_> = parameters.iter_mut().map(|value| ptr::from_mut(value).cast()).collect();
        let (grid, block) = ((u32::try_from(blocks)?, 1, 1), (u32::try_from(threads)?, 1, 1));
        // SAFETY: the caller's word.
        Ok(unsafe { result::launch_kernel(self.0, grid, block, 0, gpu.stream.cu_stream(), &mut pointers) }?)
    }
}
