//! Tensors of adapters in device memory.

#![expect(unsafe_code, reason = "copies on a stream that it owns")]

use std::{io, sync::Arc};

use cudarc::driver::{CudaEvent, DeviceRepr, ValidAsZeroBits, result};

use super::{LaunchError, OwnStream, Queue, Relaxed};
use crate::{
    Element,
    adapter::{AdapterError, Remote, Tensor},
    arena::copies::CopyStream as _,
    cuda::{Buffer, View},
    error::LoadError,
};

/// Reads tensors in device memory for loads, on a stream of its own: those of an engine that trains its adapters, or
/// gets them from one that does. Clones are the same stream.
///
/// Its tensors are like any others: of linear layers, experts and embeddings, for [`Adapter::from_tensors`], a pool's
/// [`Source::memory`] and all ranks of a group. Loader threads read them, and hold up neither the caller nor steps. A
/// tensor is a copy that nothing else can write, so that training goes on at once.
///
/// ```no_run
/// use aril::{adapter::{Adapter, Tensor}, cuda::{Buffer, Queue, Readback}, error::LoadError};
/// use half::bf16;
///
/// /// `factors` have names of PEFT, such as `layers.0.self_attn.q_proj.lora_A.weight`, and are row-major.
/// fn version(
///     queue: &Queue,
///     config: &str,
///     factors: &[(String, [usize; 2], Buffer<bf16>)],
/// ) -> Result<Adapter, LoadError> {
///     let readback = Readback::new(queue)?;
///     let tensor = |(name, shape, factor): &(String, [usize; 2], Buffer<bf16>)| {
///         Ok((name.clone(), readback.tensor(factor, *shape)?))
///     };
///     let tensors = factors.iter().map(tensor).collect::<Result<Vec<_>, LoadError>>()?;
///     Ok(Adapter::from_tensors(config, tensors)?)
/// }
/// ```
///
/// [`Adapter::from_tensors`]: crate::adapter::Adapter::from_tensors
/// [`Source::memory`]: crate::pool::Source::memory
#[derive(Clone, Debug)]
pub struct Readback {
    queue: Queue,
    stream: Arc<OwnStream>,
}

/// A copy of a tensor's elements, and its end on the queue.
#[derive(Debug)]
struct OnDevice<T> {
    buffer: Buffer<T>,
    written: CudaEvent,
    readback: Readback,
}

impl Readback {
    /// A stream for memory of this queue.
    ///
    /// # Errors
    /// [`LaunchError::Driver`].
    pub fn new(queue: &Queue) -> Result<Self, LaunchError> {
        Ok(Self { queue: queue.clone(), stream: Arc::new(OwnStream::new(queue)?) })
    }

    /// A row-major tensor of `elements`, as the work that is on the queue now leaves them, in memory of its own, which
    /// each load reads. [`Tensor::bytes`] is empty.
    ///
    /// # Errors
    /// [`LoadError::Adapter`] if the number of elements does not match the shape, [`LoadError::Device`] if they belong
    /// to another queue, its stream is being captured, or device memory is exhausted.
    pub fn tensor<'a, T: Element + DeviceRepr + ValidAsZeroBits>(
        &self,
        elements: impl Into<View<'a, T>>,
        shape: impl Into<Vec<usize>>,
    ) -> Result<Tensor, LoadError> {
        let elements = elements.into();
        let mut buffer = Buffer::zeros(&self.queue, elements.len())?;
        self.queue.copy(elements, &mut buffer)?;
        let (written, bytes) = (self.queue.new_event()?, buffer.len() * size_of::<T>());
        written.record(self.queue.stream()).map_err(LaunchError::from)?;
        let remote = OnDevice { buffer, written, readback: self.clone() };
        Ok(Tensor::on_device(T::DTYPE, shape.into(), Arc::new(remote), bytes)?)
    }
}

impl<T> OnDevice<T> {
    fn copy(&self, bytes: &mut [u8], start: usize) -> Result<(), LaunchError> {
        let stream = &self.readback.stream;
        stream.context().bind_to_thread()?;
        let _relaxed = Relaxed::new();
        stream.wait_for(&self.written)?;
        let from = self.buffer.device_ptr() + start as u64;
        // SAFETY: the tensor has these bytes, nothing but the copy before `written` writes them, and this copy ends
        // before the call returns.
        unsafe { result::memcpy_dtoh_async(bytes, from, stream.raw().as_raw().cast()) }?;
        stream.synchronize()
    }
}

impl<T: Send + Sync> Remote for OnDevice<T> {
    fn read(&self, bytes: &mut [u8], start: usize) -> Result<(), AdapterError> {
        self.copy(bytes, start).map_err(|error| AdapterError::ReadBack { error: io::Error::other(error) })
    }
}
