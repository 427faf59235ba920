//! The forward's operations on an NVIDIA GPU.
//!
//! All calls of the library are safe but one, which promises how the grouped GEMMs start (`group`). The launches of the
//! example's own kernels (`kernels/*.cu`, `kernels/*.cuh`), of cuBLASLt (`gemm.rs`) and of NCCL (`nccl.rs`) are unsafe,
//! too. All work is enqueued on one stream or, while a step is captured, on that of the capture, and only copies to the
//! host wait for it.
//!
//! A request's last bits may depend on the number of tokens in its batch, for four reasons: cuBLASLt chooses kernels by
//! shape; steps of few tokens take the library's fused linear and the example's own router instead; steps of more have
//! the deltas of gate and up within SiLU·mul, which then rounds once; and with many routes deltas are added before the
//! activation and the combine instead of fused with them. Each of the library's operations is bit-identical in any
//! batch, and so are the example's own kernels. But how a prompt is divided into steps may change its last bits:
//! attention has a kernel for a sequence's only token in a step, and another for several (`attention.rs`).

#![expect(clippy::disallowed_methods, reason = "the example allocates and waits as it goes")]

mod arena;
mod attention;
mod delta_net;
mod device;
mod draws;
mod experts;
mod functions;
mod gemm;
mod launch;
mod matrix;
mod nccl;

use std::{cell::Cell, marker::PhantomData, sync::Arc};

use aril::{
    Element,
    cuda::{self, Buffer, Kernels, LaunchError, Queue, Routing, Workspace, raw::Stream},
    model::TpRank,
    pool::StreamId,
    routing::Batch,
};
use cudarc::{
    driver::{CudaContext, DeviceRepr},
    nvrtc::Ptx,
};

use self::{arena::Arena, attention::Attention, functions::Functions, gemm::Gemm, matrix::MemoryFor as _, nccl::Nccl};
pub use self::{
    delta_net::States,
    device::{Fused, Linear},
    draws::Draws,
    experts::{Grouped, Routes},
    matrix::Matrix,
};
use crate::{
    device::Slots,
    error::{Result, bail},
    group::Rank,
    kernels::IMAGE,
};

/// A GPU, computing on `T`.
pub struct Cuda<T> {
    tp: TpRank,
    /// Of several ranks. Without it, nothing is exchanged with others.
    nccl: Option<Nccl>,
    /// The stream of all of its work and of its graphs.
    pub queue: Queue,
    /// The stream of launches: the queue's or, while a step is captured, the capture's.
    stream: Cell<Stream>,
    functions: Functions,
    attention: Attention,
    gemm: Gemm,
    /// The blocks of `route_few` that have computed scores: 0 between launches.
    route_arrivals: Buffer<i32>,
    arena: Arena,
    /// Whether new matrices are in the arena, as those of a step that is captured.
    pub is_on_arena: Cell<bool>,
    /// Whether the last operation lets the next kernel start before it ends: a linear layer of the library, a rotation,
    /// or a combine.
    lets_next_start: Cell<bool>,
    element: PhantomData<T>,
}

/// The state that a step's operations share.
#[derive(Debug)]
pub struct Buffers {
    /// Groups the tokens of each step by slot.
    pub routing: Routing,
    /// Of all layers.
    pub workspace: Workspace,
}

impl<T: Element + DeviceRepr> Cuda<T> {
    /// A GPU for one rank of a group. Waits for those of the others.
    ///
    /// # Errors
    ///
    /// If there is no such GPU or no memory for the kernels, or another rank does not come.
    pub fn of_rank(ordinal: usize, rank: &Rank) -> Result<Self> {
        let mut device = Self::without_collectives(ordinal, rank.tp())?;
        if rank.tp().size() > 1 {
            device.nccl = Some(Nccl::new(&device.queue, rank)?);
        }
        Ok(device)
    }

    /// The GPU of this number, for a model that it holds alone.
    ///
    /// # Errors
    ///
    /// If there is no such GPU, or no memory for the kernels.
    pub fn new(ordinal: usize) -> Result<Self> {
        Self::without_collectives(ordinal, TpRank::SINGLE)
    }

    /// A GPU that computes the part of one rank, without the others: what would be exchanged is left out, for times
    /// alone.
    ///
    /// # Errors
    ///
    /// If there is no such GPU, or no memory for the kernels.
    pub fn without_collectives(ordinal: usize, tp: TpRank) -> Result<Self> {
        let context = context(ordinal)?;
        let kernels = Kernels::load_into(&context).memory_for("the library's kernels")?;
        let module = context.load_module(Ptx::from_binary(IMAGE.to_vec()));
        let module = module.memory_for("the example's kernels")?;
        let functions = Functions::load(T::DTYPE, &module).memory_for("the example's kernels")?;
        let queue = Queue::new(&kernels, &context.new_stream()?)?;
        let stream = Cell::new(Stream::from(&**queue.stream()));
        let attention = Attention::new(T::DTYPE, &module, &queue)?;
        let gemm = Gemm::new(T::DTYPE, &queue)?;
        let route_arrivals = Buffer::zeros(&queue, 1).memory_for("a counter")?;
        Ok(Self {
            tp,
            nccl: None,
            queue,
            stream,
            functions,
            attention,
            gemm,
            route_arrivals,
            arena: Arena::default(),
            is_on_arena: Cell::new(false),
            lets_next_start: Cell::new(false),
            element: PhantomData,
        })
    }

    /// Runs what enqueues a captured step: all of its launches are on the stream of the capture.
    pub fn captured<R>(&self, step: &mut cuda::Step<'_>, record: impl FnOnce(&mut cuda::Step<'_>) -> R) -> R {
        let before = self.stream.replace(step.raw().stream());
        let result = record(step);
        self.stream.set(before);
        result
    }

    /// Starts a step of a batch.
    ///
    /// # Errors
    ///
    /// If the batch exceeds the table's capacity or names a slot without a lease, or a call of CUDA fails.
    pub fn start<'a>(
        adapters: Slots<'a, Self>,
        Buffers { routing, workspace }: &'a mut Buffers,
        batch: &Batch<'_>,
    ) -> Result<cuda::Step<'a>> {
        // An engine may enqueue a step before the last one has run.
        routing.wait()?;
        let batch = routing.update(batch)?;
        Ok(match adapters {
            Slots::Table(table) => table.step(&batch, workspace)?,
            Slots::Pool(pool) => pool.step(StreamId::FIRST, &batch, workspace)?,
            Slots::Ranks(pool) => pool.step(StreamId::FIRST, &batch, workspace)?,
        })
    }

    /// Waits until all ranks have come this far.
    ///
    /// # Errors
    ///
    /// If another rank has ended, or a call of CUDA or NCCL fails.
    pub fn meet(&self) -> Result<()> {
        self.nccl.as_ref().map_or(Ok(()), Nccl::meet)
    }

    /// Waits for all enqueued work if other ranks take part in it, so that no later wait is for a rank that has ended.
    ///
    /// # Errors
    ///
    /// If another rank has ended, or a call of CUDA or NCCL fails.
    pub fn wait(&self) -> Result<()> {
        self.nccl.as_ref().map_or(Ok(()), Nccl::wait)
    }
}

/// The driver's devices; none without a driver.
pub(crate) fn device_count() -> usize {
    if !cuda::driver_is_present() {
        return 0;
    }
    CudaContext::device_count().ok().and_then(|count| usize::try_from(count).ok()).unwrap_or(0)
}

/// The context of a device.
fn context(ordinal: usize) -> Result<Arc<CudaContext>> {
    if !cuda::driver_is_present() {
        bail!("no CUDA driver was found on this machine");
    }
    let count = CudaContext::device_count().map_err(LaunchError::from)?;
    if usize::try_from(count)? <= ordinal {
        bail!("there is no such device; those of the CUDA driver are {count}, counted from 0");
    }
    CudaContext::new(ordinal).memory_for("a context")
}
