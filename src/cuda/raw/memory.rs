//! Streams and device memory of the engine, and how objects divide their memory.

use std::ffi::c_void;

use crate::error::LaunchError;

/// A CUDA stream of the engine.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(transparent)]
pub struct Stream(*mut c_void);

// SAFETY: it holds a handle. The driver's calls that take it are thread-safe.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Wraps a `CUstream` or `cudaStream_t`. `CU_STREAM_PER_THREAD` names another stream on each thread.
    pub const fn from_raw(stream: *mut c_void) -> Self {
        Self(stream)
    }

    /// The `CUstream` or `cudaStream_t`.
    pub const fn as_raw(self) -> *mut c_void {
        self.0
    }
}

impl From<&cudarc::driver::CudaStream> for Stream {
    fn from(stream: &cudarc::driver::CudaStream) -> Self {
        Self(stream.cu_stream().cast())
    }
}

/// Device memory of the engine.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DeviceRegion {
    /// Address of the first byte.
    pub ptr: u64,
    /// Size in bytes.
    pub bytes: usize,
}

impl DeviceRegion {
    /// Rejects memory that is smaller than `bytes` or not aligned for [`Arrays`].
    pub(in crate::cuda) fn check_room(&self, operand: &'static str, bytes: usize) -> Result<(), LaunchError> {
        LaunchError::room(operand, self.bytes, "this capacity", bytes)?;
        let alignment = Arrays::ALIGNMENT_BYTES;
        if self.ptr.is_multiple_of(alignment as u64) {
            Ok(())
        } else {
            Err(LaunchError::Misaligned { operand, alignment })
        }
    }
}

/// Lays out arrays in device memory, one after the other, each aligned for the kernels.
pub(in crate::cuda) struct Arrays {
    start: u64,
    bytes: usize,
}

impl Arrays {
    /// Alignment of the memory and of each array.
    const ALIGNMENT_BYTES: usize = 256;

    /// An empty layout in memory at the address `start`.
    pub(in crate::cuda) const fn at(start: u64) -> Self {
        Self { start, bytes: 0 }
    }

    /// Appends an array of `len` elements and returns its address.
    pub(in crate::cuda) const fn push<T>(&mut self, len: usize) -> u64 {
        let address = self.start + self.bytes as u64;
        self.bytes += (len * size_of::<T>()).next_multiple_of(Self::ALIGNMENT_BYTES);
        address
    }

    /// Size of all arrays in bytes.
    pub(in crate::cuda) const fn bytes(&self) -> usize {
        self.bytes
    }
}
