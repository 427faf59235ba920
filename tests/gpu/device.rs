//! The device under test, and copies to and from it.

use std::{env, sync::Arc};

use aril::{
    adapter::Adapter,
    cuda::{Kernels, LaunchError, Queue, WeightTable, raw::DeviceRegion, raw::Stream},
    error::OperandError,
    plan::Device,
};
use bytemuck::Pod;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, sys};

use crate::limit::Limit;

/// A device for one test, which has a time limit.
pub struct Gpu {
    _limit: Limit,
    pub context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
    pub kernels: Kernels,
    pub queue: Queue,
}

/// A device that plans are to be for: compute capability, KB of shared memory of a block, and multiprocessors, as
/// `12.0,99,48`.
fn parse(device: &str) -> Device {
    let [capability, kilobytes, multiprocessors] = device.split(',').collect::<Vec<_>>().try_into().unwrap();
    let (major, minor) = capability.split_once('.').unwrap();
    let shared_bytes = kilobytes.parse::<usize>().unwrap() << 10;
    Device {
        compute_capability: (major.parse().unwrap(), minor.parse().unwrap()),
        multiprocessors: multiprocessors.parse().unwrap(),
        shared_bytes,
        shared_bytes_per_multiprocessor: shared_bytes + (1 << 10),
        ..Device::H100
    }
}

impl Gpu {
    /// The first device, with a new stream.
    pub fn new() -> Self {
        assert!(aril::cuda::driver_is_present(), "these tests need a CUDA driver, and found none");
        Self::in_context(CudaContext::new(0).expect("these tests need a CUDA device"))
    }

    pub fn in_context(context: Arc<CudaContext>) -> Self {
        let limit = Limit::new();
        // Not `new_stream`: cudarc would then wait for events, which captures do not allow.
        let raw =
            cudarc::driver::result::stream::create(cudarc::driver::result::stream::StreamKind::NonBlocking).unwrap();
        // SAFETY: created in this context and never destroyed.
        let stream = unsafe { context.wrap_borrowed_stream(raw) };
        let mut kernels = Kernels::load_into(&context).unwrap();
        if let Ok(device) = env::var("ARIL_TEST_DEVICE") {
            kernels = kernels.planned_for(parse(&device));
        }
        let queue = Queue::new(&kernels, &stream).unwrap();
        Self { _limit: limit, context, stream, kernels, queue }
    }

    /// A queue of another context of the same device. That of this one stays current.
    pub fn foreign(&self) -> Queue {
        let context = CudaContext::new_non_primary(0, 0).unwrap();
        context.bind_to_thread().unwrap();
        let queue = Queue::new(&Kernels::load_into(&context).unwrap(), &context.default_stream()).unwrap();
        self.context.bind_to_thread().unwrap();
        queue
    }

    pub fn raw_stream(&self) -> Stream {
        Stream::from(&*self.stream)
    }

    pub fn upload<T: Pod>(&self, values: &[T]) -> Buffer {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        // One more element, because allocations cannot be empty.
        let mut device = self.stream.alloc_zeros(bytes.len() + 1).unwrap();
        self.stream.memcpy_htod(bytes, &mut device).unwrap();
        Buffer { bytes: device, stream: self.stream.clone() }
    }

    /// Memory with all bits set, which is NaN in every type.
    pub fn poisoned(&self, bytes: usize) -> Buffer {
        self.upload(&vec![0xff_u8; bytes])
    }

    /// Memory that holds no index of anything: what it names is outside every allocation.
    pub fn without_indices(&self, bytes: usize) -> Buffer {
        self.upload(&vec![0x7f_u8; bytes])
    }

    /// Bytes allocated in stream order.
    pub fn used_bytes(&self) -> u64 {
        let (mut pool, mut bytes) = (std::ptr::null_mut(), 0_u64);
        // SAFETY: the device exists, and the pointer is valid for the call.
        unsafe { sys::cuDeviceGetMemPool(&raw mut pool, self.context.cu_device()) }.result().unwrap();
        let used = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
        // SAFETY: the attribute is of 64 bits.
        unsafe { sys::cuMemPoolGetAttribute(pool, used, (&raw mut bytes).cast()) }.result().unwrap();
        bytes
    }

    pub fn synchronize(&self) {
        self.stream.synchronize().unwrap();
    }

    /// Captures what `enqueue` enqueues, in the mode that refuses unsafe calls of all threads.
    pub fn capture(&self, enqueue: impl FnOnce()) -> Graph {
        let stream = self.stream.cu_stream();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream is alive and not capturing.
        unsafe { cudarc::driver::result::stream::begin_capture(stream, mode) }.unwrap();
        enqueue();
        // SAFETY: the stream is capturing.
        let graph = unsafe { cudarc::driver::result::stream::end_capture(stream) }.unwrap();
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph is alive.
        unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0).result() }.unwrap();
        Graph { executable, stream: self.stream.clone() }
    }
}

/// Why a call was refused, and which operand or memory it names.
#[derive(Debug, PartialEq)]
pub enum Refused {
    /// It is of another stream, of another context, of another batch, or borrowed.
    Stream(&'static str),
    Context(&'static str),
    OtherBatch(&'static str),
    NotKept(&'static str),
    /// It does not begin at a multiple of so many bytes.
    Misaligned(&'static str, usize),
    /// It has so many bytes instead of so many.
    TooSmall(&'static str, [usize; 2]),
    Operand(OperandError),
}

/// # Panics
/// If the call was not refused, or for another reason.
pub fn refused<T>(result: Result<T, LaunchError>) -> Refused {
    match result.err().expect("a call that does not fit") {
        LaunchError::WrongStream { operand } => Refused::Stream(operand),
        LaunchError::WrongContext { operand } => Refused::Context(operand),
        LaunchError::OtherBatch { operand } => Refused::OtherBatch(operand),
        LaunchError::NotKept { operand } => Refused::NotKept(operand),
        LaunchError::Misaligned { operand, alignment } => Refused::Misaligned(operand, alignment),
        LaunchError::TooSmall { memory, got, want, .. } => Refused::TooSmall(memory, [got, want]),
        LaunchError::Operand(error) => Refused::Operand(error),
        LaunchError::Plan(error) => Refused::Operand(error.into()),
        error => panic!("{error}"),
    }
}

/// Device memory.
pub struct Buffer {
    bytes: CudaSlice<u8>,
    stream: Arc<CudaStream>,
}

impl Buffer {
    pub fn region(&self) -> DeviceRegion {
        DeviceRegion { ptr: self.address(), bytes: self.bytes.len() - 1 }
    }

    pub fn address(&self) -> u64 {
        self.bytes.device_ptr(&self.stream).0
    }

    pub fn view<T: Pod>(&self) -> CudaView<'_, T> {
        // SAFETY: any bits are a value of a `Pod` type, and allocations are aligned.
        unsafe { self.bytes.transmute((self.bytes.len() - 1) / size_of::<T>()) }.unwrap()
    }

    pub fn view_mut<T: Pod>(&mut self) -> CudaViewMut<'_, T> {
        let len = (self.bytes.len() - 1) / size_of::<T>();
        // SAFETY: as above.
        unsafe { self.bytes.transmute_mut(len) }.unwrap()
    }

    pub fn write<T: Pod>(&mut self, values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        self.stream.clone().memcpy_htod(bytes, &mut self.bytes).unwrap();
    }

    pub fn read<T: Pod>(&self) -> Vec<T> {
        let mut bytes = self.stream.clone_dtoh(&self.bytes).unwrap();
        self.stream.synchronize().unwrap();
        bytes.pop();
        bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }
}

/// A captured graph.
pub struct Graph {
    executable: sys::CUgraphExec,
    stream: Arc<CudaStream>,
}

impl Graph {
    pub fn replay(&self) {
        // SAFETY: the graph is alive, and the test owns what it uses.
        unsafe { sys::cuGraphLaunch(self.executable, self.stream.cu_stream()).result() }.unwrap();
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.stream.synchronize().unwrap();
        // SAFETY: no replay is running.
        unsafe { sys::cuGraphExecDestroy(self.executable).result() }.unwrap();
    }
}

/// Loads adapters into the first slots, and empties the others.
pub fn load_slots(weights: &WeightTable, adapters: &[Adapter]) {
    for slot in 0..weights.capacity().num_slots {
        match adapters.get(slot) {
            Some(adapter) => {
                weights.load(slot, &adapter.plan(weights.model(), weights.dtype()).unwrap()).unwrap();
            }
            None => weights.unload(slot).unwrap(),
        }
    }
}
