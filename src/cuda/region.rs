use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, CudaViewMut, DevicePtr};

use super::{Kernels, LaunchError, raw::DeviceRegion};

/// Zeroed device memory that is used on one stream only, so that the stream's own order is all the order it needs.
#[derive(Debug)]
pub(super) struct Region {
    kernels: Kernels,
    bytes: CudaSlice<u8>,
    stream: Arc<CudaStream>,
}

impl Region {
    /// Allocates on `stream`, of the kernels' context.
    #[expect(clippy::disallowed_methods, reason = "owners allocate when they are made, never later")]
    pub(super) fn new(kernels: &Kernels, bytes: usize, stream: &Arc<CudaStream>) -> Result<Self, LaunchError> {
        kernels.check_context("the stream", stream.context())?;
        let bytes = stream.alloc_zeros(bytes.max(1))?;
        Ok(Self { kernels: kernels.clone(), bytes, stream: stream.clone() })
    }

    /// Where it is. For use on its stream.
    pub(super) fn region(&self) -> DeviceRegion {
        let (ptr, _guard) = self.bytes.device_ptr(&self.stream);
        DeviceRegion { ptr, bytes: self.bytes.len() }
    }

    /// Copies from the host, in the order of the stream.
    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), LaunchError> {
        let mut target: CudaViewMut<'_, u8> = self.bytes.slice_mut(offset..offset + bytes.len());
        Ok(self.stream.memcpy_htod(bytes, &mut target)?)
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
