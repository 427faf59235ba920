use std::sync::Arc;

use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop, ValidAsZeroBits,
};

use super::{Kernels, LaunchError, raw::DeviceRegion};

/// Zeroed device memory that is used on one stream only, so that the stream's own order is all the order it needs; but
/// others may read a view.
#[derive(Debug)]
pub(super) struct Region<T = u8> {
    kernels: Kernels,
    elements: CudaSlice<T>,
    stream: Arc<CudaStream>,
}

impl<T: DeviceRepr + ValidAsZeroBits> Region<T> {
    /// Allocates on `stream`, of the kernels' context.
    #[expect(clippy::disallowed_methods, reason = "owners allocate when they are made, never later")]
    pub(super) fn new(kernels: &Kernels, bytes: usize, stream: &Arc<CudaStream>) -> Result<Self, LaunchError> {
        kernels.check_context("the stream", stream.context())?;
        let elements = stream.alloc_zeros(bytes.div_ceil(size_of::<T>()).max(1))?;
        Ok(Self { kernels: kernels.clone(), elements, stream: stream.clone() })
    }

    /// Where it is. For use on its stream.
    pub(super) fn region(&self) -> DeviceRegion {
        let (ptr, _guard) = self.elements.device_ptr(&self.stream);
        DeviceRegion { ptr, bytes: self.elements.num_bytes() }
    }

    /// For a launch that writes what others view. The guard is to be dropped once it is enqueued.
    pub(super) fn written(&mut self) -> SyncOnDrop<'_> {
        let (_, guard) = self.elements.device_ptr_mut(&self.stream);
        guard
    }

    /// Elements behind the first `offset` bytes, to be read on any stream.
    pub(super) fn view(&self, offset: usize, len: usize) -> CudaView<'_, T> {
        let first = offset / size_of::<T>();
        self.elements.slice(first..first + len)
    }

    /// Refuses another stream, and makes the context current on this thread.
    pub(super) fn check(&self, operand: &'static str, stream: &CudaStream) -> Result<(), LaunchError> {
        self.check_context(operand, stream)?;
        if stream.cu_stream() != self.stream.cu_stream() {
            return Err(LaunchError::WrongStream { operand });
        }
        Ok(stream.context().bind_to_thread()?)
    }

    /// Refuses an operand on a stream of another context.
    pub(super) fn check_context(&self, operand: &'static str, stream: &CudaStream) -> Result<(), LaunchError> {
        self.kernels.check_context(operand, stream.context())
    }
}

impl Region {
    /// Copies from the host, in the order of the stream.
    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), LaunchError> {
        let mut target: CudaViewMut<'_, u8> = self.elements.slice_mut(offset..offset + bytes.len());
        Ok(self.stream.memcpy_htod(bytes, &mut target)?)
    }
}
