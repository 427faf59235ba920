//! Streams and device memory that somebody else owns, and how objects divide theirs.

use std::ffi::c_void;

use crate::error::LaunchError;

/// A CUDA stream that somebody else owns.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(transparent)]
pub struct Stream(*mut c_void);

// SAFETY: a handle; the driver's calls that take it are thread-safe.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Names a stream by its raw `CUstream` or `cudaStream_t`.
    pub const fn from_raw(stream: *mut c_void) -> Self {
        Self(stream)
    }

    /// The raw `CUstream` or `cudaStream_t`.
    pub const fn as_raw(self) -> *mut c_void {
        self.0
    }
}

impl From<&cudarc::driver::CudaStream> for Stream {
    fn from(stream: &cudarc::driver::CudaStream) -> Self {
        Self(stream.cu_stream().cast())
    }
}

/// Bytes in device memory that somebody else owns.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DeviceRegion {
    /// The address of the first.
    pub ptr: u64,
    /// How many.
    pub bytes: usize,
}

impl DeviceRegion {
    /// Refuses a memory that is smaller than `bytes`, or where [`Arrays`] cannot begin.
    pub(super) fn check_room(&self, operand: &'static str, bytes: usize) -> Result<(), LaunchError> {
        LaunchError::within(operand, bytes, self.bytes)?;
        let alignment = Arrays::ALIGNMENT_BYTES;
        if self.ptr.is_multiple_of(alignment as u64) {
            Ok(())
        } else {
            Err(LaunchError::Misaligned { operand, alignment })
        }
    }
}

/// Arrays in a device memory, one after the other, each aligned for kernels.
pub(super) struct Arrays {
    start: u64,
    bytes: usize,
}

impl Arrays {
    /// What the memory and each array is aligned to.
    const ALIGNMENT_BYTES: usize = 256;

    /// None yet, in the memory at this address.
    pub(super) const fn at(start: u64) -> Self {
        Self { start, bytes: 0 }
    }

    /// Appends an array of `len` elements and returns its address.
    pub(super) const fn push<T>(&mut self, len: usize) -> u64 {
        let address = self.start + self.bytes as u64;
        self.bytes += (len * size_of::<T>()).next_multiple_of(Self::ALIGNMENT_BYTES);
        address
    }

    /// The bytes of all arrays.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }
}
