//! Tensors of adapters in device memory.

#![expect(unsafe_code, reason = "copies on a stream that it owns")]

use std::{
    any::Any,
    io,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::driver::{CudaEvent, DeviceRepr, result};

use super::{LaunchError, OwnStream, Queue, Region, Relaxed};
use crate::{
    DType, Element,
    adapter::{AdapterError, Remote, Tensor},
    arena::copies::CopyStream as _,
    cuda::{View, memory::Memory as _},
    error::LoadError,
    sizes::product,
};

/// Tensors of adapters in device memory: those of an engine that trains its adapters, or gets them from one that does.
/// Clones are the same reader.
///
/// They are like any others: of linear layers, experts and embeddings, for [`Adapter::from_tensors`], a pool's
/// [`Source::memory`] and all ranks of a group. Loads of tables and pools of this device pack them by a kernel. Others,
/// and those of a [combination](crate::adapter::SlotImage::combined), read them on a stream of the reader's own. Loader
/// threads wait for them, and hold up neither the caller nor steps. A tensor is a copy that nothing else can write, so
/// that training goes on at once.
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
    /// Copies so far.
    copies: Arc<Mutex<u64>>,
}

/// A copy of a tensor's elements, and its end on the queue.
#[derive(Debug)]
pub(super) struct OnDevice {
    memory: Region,
    /// Among the copies of its reader, whose order is that of their ends.
    number: u64,
    written: CudaEvent,
    readback: Readback,
}

impl Readback {
    /// A stream for memory of this queue.
    ///
    /// # Errors
    /// [`LaunchError::Driver`].
    pub fn new(queue: &Queue) -> Result<Self, LaunchError> {
        Ok(Self { queue: queue.clone(), stream: Arc::new(OwnStream::new(queue)?), copies: Arc::default() })
    }

    /// The queue of the copies.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// A row-major tensor of `elements`, as the work that is on the queue now leaves them, in memory of its own, which
    /// each load reads. [`Tensor::bytes`] is empty.
    ///
    /// # Errors
    /// [`LoadError::Adapter`] if the number of elements does not match the shape, [`LoadError::Device`] if they belong
    /// to another queue, its stream is being captured, or device memory is exhausted.
    pub fn tensor<'a, T: Element + DeviceRepr>(
        &self,
        elements: impl Into<View<'a, T>>,
        shape: impl Into<Vec<usize>>,
    ) -> Result<Tensor, LoadError> {
        let mut elements = elements.into();
        elements.check_queue("the tensor", &self.queue)?;
        let bytes = elements.len() * size_of::<T>();
        let (from, _guard) = elements.on(&self.queue)?;
        // SAFETY: the memory has as many bytes. It belongs to this stream, in whose order it is used and freed.
        unsafe { self.copy(from, T::DTYPE, shape.into(), bytes) }
    }

    /// [`tensor`](Self::tensor) at an address, in memory that the engine owns.
    ///
    /// # Errors
    /// As for `tensor`.
    ///
    /// # Safety
    /// - **Validity.** `elements` is the address of device memory of the queue's context, of a tensor of this type and
    ///   shape, aligned to its elements.
    /// - **Liveness.** That memory stays mapped until the work that is on the queue when this returns has run.
    /// - **Aliasing.** Only work that the queue's stream is ordered behind or ahead of writes it.
    pub unsafe fn tensor_raw(
        &self,
        elements: u64,
        dtype: DType,
        shape: impl Into<Vec<usize>>,
    ) -> Result<Tensor, LoadError> {
        let shape = shape.into();
        let bytes = product(&[product(&shape), dtype.bytes()]);
        // SAFETY: the caller's obligations.
        unsafe { self.copy(elements, dtype, shape, bytes) }
    }

    /// # Safety
    /// As for [`tensor_raw`](Self::tensor_raw), of so many bytes.
    unsafe fn copy(&self, from: u64, dtype: DType, shape: Vec<usize>, bytes: usize) -> Result<Tensor, LoadError> {
        let memory = Region::new(&self.queue, bytes)?;
        let written = self.queue.new_event()?;
        let stream = self.queue.stream();
        // A panic cannot leave the number half-changed.
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller's obligations. The target has as many bytes, and is used and freed in the stream's order.
        unsafe { result::memcpy_dtod_async(memory.region().ptr, from, bytes, stream.cu_stream()) }
            .and_then(|()| written.record(stream))
            .map_err(LaunchError::from)?;
        *copies += 1;
        let number = *copies;
        drop(copies);
        let remote = OnDevice { memory, number, written, readback: self.clone() };
        Ok(Tensor::of_device(dtype, shape, Arc::new(remote), bytes)?)
    }
}

impl OnDevice {
    pub(super) fn address(&self) -> u64 {
        self.memory.region().ptr
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// What all copies of its reader have in common, and no others.
    pub(super) fn reader(&self) -> usize {
        Arc::as_ptr(&self.readback.copies).addr()
    }

    pub(super) fn is_of_context(&self, queue: &Queue) -> bool {
        queue.kernels().check_context("the tensor", self.readback.stream.context()).is_ok()
    }

    /// Blocks this thread until this copy, and those of its reader before it, have run.
    pub(super) fn wait(&self) -> Result<(), LaunchError> {
        let _relaxed = Relaxed::new();
        Ok(self.written.synchronize()?)
    }

    fn read_back(&self, bytes: &mut [u8], start: usize) -> Result<(), LaunchError> {
        let stream = &self.readback.stream;
        stream.context().bind_to_thread()?;
        let _relaxed = Relaxed::new();
        stream.wait_for(&self.written)?;
        // SAFETY: the tensor has these bytes, nothing but the copy before `written` writes them, and this copy ends
        // before the call returns.
        unsafe { result::memcpy_dtoh_async(bytes, self.address() + start as u64, stream.raw().as_raw().cast()) }?;
        stream.synchronize()
    }
}

impl Remote for OnDevice {
    fn read(&self, bytes: &mut [u8], start: usize) -> Result<(), AdapterError> {
        self.read_back(bytes, start).map_err(|error| AdapterError::ReadBack { error: io::Error::other(error) })
    }

    fn on_device(&self) -> Option<&(dyn Any + Send + Sync)> {
        Some(self)
    }
}
