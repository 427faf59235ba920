//! The device under test: memory, and a stream that no kernel may hold for ever.

use std::{
    io::{self, Write as _},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use bytemuck::Pod;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr as _, result::stream, sys};

use crate::process::limit;

/// A device for one test.
pub(crate) struct Gpu {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) stream: Arc<CudaStream>,
}

impl Gpu {
    /// The first device, with a new stream.
    pub(crate) fn new() -> Self {
        assert!(aril::cuda::driver_is_present(), "these tests need a CUDA driver, and found none");
        let context = CudaContext::new(0).expect("these tests need a CUDA device");
        // Not `new_stream`: cudarc would then wait for events.
        let raw = stream::create(stream::StreamKind::NonBlocking).unwrap();
        // SAFETY: created in this context and never destroyed.
        let stream = unsafe { context.wrap_borrowed_stream(raw) };
        Self { context, stream }
    }

    pub(crate) fn upload<T: Pod>(&self, values: &[T]) -> Buffer {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        wait(&self.stream);
        // One more element, because allocations cannot be empty.
        let mut device = self.stream.alloc_zeros(bytes.len() + 1).unwrap();
        self.stream.memcpy_htod(bytes, &mut device).unwrap();
        Buffer { bytes: device, stream: self.stream.clone() }
    }

    /// Memory with all bits set, which is NaN in every type.
    pub(crate) fn poisoned(&self, bytes: usize) -> Buffer {
        self.upload(&vec![0xff_u8; bytes])
    }
}

/// Device memory.
pub(crate) struct Buffer {
    bytes: CudaSlice<u8>,
    stream: Arc<CudaStream>,
}

impl Buffer {
    pub(crate) fn address(&self) -> u64 {
        self.bytes.device_ptr(&self.stream).0
    }

    pub(crate) fn read<T: Pod>(&self) -> Vec<T> {
        wait(&self.stream);
        let mut bytes = self.stream.clone_dtoh(&self.bytes).unwrap();
        wait(&self.stream);
        bytes.pop();
        bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }
}

/// Waits for a stream. Kernels that have not ended within the limit on a test end the process, which names the test.
fn wait(stream: &CudaStream) {
    let end = Instant::now() + limit();
    // SAFETY: the stream is alive.
    while let Err(error) = unsafe { sys::cuStreamQuery(stream.cu_stream()) }.result() {
        assert_eq!(error.0, sys::CUresult::CUDA_ERROR_NOT_READY, "the stream has failed");
        if Instant::now() > end {
            let test = thread::current().name().unwrap_or("a test").to_owned();
            let _ = writeln!(io::stderr(), "test {test} ... FAILED: a kernel has not ended, and ends all other tests");
            // Not `exit`: the driver would wait for the kernels.
            std::process::abort();
        }
        thread::sleep(Duration::from_micros(20));
    }
}
