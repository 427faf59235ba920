//! The forward's operations on an NVIDIA GPU.
//!
//! All calls of the library are safe but one, which promises how the grouped GEMMs start (`group`). The launches of the example's own
//! kernels (`kernels/*.cu`, `kernels/*.cuh`), of cuBLASLt (`gemm.rs`) and of NCCL (`nccl.rs`) are unsafe, too. All work is enqueued on one
//! stream or, while a step is captured, on that of the capture, and only copies to the host wait for it.
//!
//! A request's last bits may depend on the number of tokens in its batch, for four reasons: cuBLASLt chooses kernels by shape; steps of
//! few tokens take the library's fused linear and the example's own router instead; steps of more have the deltas of gate and up
//! within SiLU·mul, which then rounds once; and with many routes deltas are added before the activation and the combine instead of
//! fused with them. Each of the library's operations is bit-identical in any batch, and so are the example's own kernels. But how a
//! prompt is divided into steps may change its last bits: attention has a kernel for a sequence's only token in a step, and another for
//! several (`attention.rs`).

#![expect(clippy::disallowed_methods, reason = "the example allocates and waits as it goes")]

mod arena;
mod attention;
mod draws;
mod experts;
mod gemm;
mod nccl;
pub(crate) mod timing;

use std::{
    borrow::Cow, cell::Cell, ffi::c_void, fmt::Display, marker::PhantomData, ops::Range, ptr, result, sync::Arc,
};

use aril::{
    DType, Element, Slot,
    adapter::SlotImage,
    cuda::{
        self, AdapterPool, Buffer, FullyShardedLinear, FusedLinear, Grouping, Kernels, LaunchError, LoraEmbedding,
        LoraExperts, LoraLinear, Queue, Routing, WeightTable, Workspace, raw::Stream,
    },
    model::{Activation, Collective, EmbeddingId, Exchange, ExpertsId, LinearId, Model, SliceSite, TpRank},
    plan::{Capacity, ForwardPlan, Mode, RouteCapacity},
    pool::{PoolConfig, StreamId},
    routing::Batch,
};
use cudarc::{
    driver::{
        CudaContext, CudaFunction, CudaModule, CudaSlice, DeviceRepr, DriverError,
        result::memset_d8_async,
        sys::{
            CUfunction_attribute_enum, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig,
            cuLaunchKernelEx,
        },
    },
    nvrtc::Ptx,
};

use self::{
    arena::{Arena, Memory},
    attention::Attention,
    experts::{GroupedGemms, Tiled},
    gemm::Gemm,
    nccl::Nccl,
};
pub use self::{
    draws::Draws,
    experts::{Grouped, Routes},
};
use crate::{
    config::Heads,
    device::{Cache, Device, Draw, HeadNorms, Places, Rope, Slots},
    error::{Error, Result, bail},
    experts::{ExpertWeights, ExpertsShape, GroupedGemm},
    forward::{Inputs, Stacked},
    group::Rank,
    kernels::{HEADS, IMAGE, THREADS, grouped_gemm, parts},
};

/// The driver's devices; none without a driver.
pub(crate) fn device_count() -> usize {
    if !cuda::driver_is_present() {
        return 0;
    }
    CudaContext::device_count().ok().and_then(|count| usize::try_from(count).ok()).unwrap_or(0)
}

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
    /// Whether the last operation lets the next kernel start before it ends: a linear layer of the library, a rotation, or a combine.
    lets_next_start: Cell<bool>,
    element: PhantomData<T>,
}

/// The example's kernels in `kernels.cu` for an element type, under their names there.
struct Functions {
    add_rms_norm: CudaFunction,
    rotate_and_append: CudaFunction,
    silu_mul: CudaFunction,
    add: CudaFunction,
    gather: CudaFunction,
    draw: CudaFunction,
    subtract: CudaFunction,
    take_drawn: CudaFunction,
    set_inputs: CudaFunction,
    choose_experts: CudaFunction,
    sort_routes: CudaFunction,
    /// Of 16 bits.
    route_few: Option<CudaFunction>,
    grouped_gemm: GroupedGemms,
    grouped_gemm_int4: Tiled,
    combine: CudaFunction,
}

/// With more tokens, SiLU and the deltas of gate and up are one operation: a pass over gate and up that adds deltas takes longer than
/// SiLU itself. And deltas of the other layers follow their GEMM: with 1,024 tokens of 8 adapters, one that adds to deltas written before
/// it takes 2 % of the step longer. Neither depends on whether a token has an adapter, so that base tokens have the same bits beside any
/// others.
const MANY_TOKENS: usize = 512;

/// The ranks of few adapters: eight of rank 16.
const FEW_RANKS: usize = 128;

/// For the layers and for the head, after which values are copied to the host.
const STEPS_IN_FLIGHT: usize = 2;

/// A row-major matrix in device memory, at the start of an allocation. All its uses are on one stream.
pub struct Matrix<T: 'static> {
    rows: usize,
    cols: usize,
    /// Elements between the beginnings of rows: more than `cols` if v follows.
    stride: usize,
    /// Of a base weight, the rows of the stack behind its own.
    stacked: usize,
    data: Memory<T>,
    /// For the example's own kernels.
    pub address: u64,
}

/// A linear layer of adapters.
#[derive(Debug)]
pub enum Linear {
    /// Whose ranks exchange no sums of A x.
    Whole(LoraLinear),
    /// Whose ranks exchange these sums between shrink and expand.
    FullySharded {
        /// The operations on this rank.
        layer: FullyShardedLinear,
        /// What the ranks exchange.
        exchange: Exchange,
        /// The table's.
        max_rank: usize,
    },
}

/// A linear layer with its base weight, and the number of its output features.
#[derive(Debug)]
pub struct Fused<'a, T> {
    layer: FusedLinear<'a, T>,
    outputs: usize,
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

    /// A GPU that computes the part of one rank, without the others: what would be exchanged is left out, for times alone.
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

    /// The uninitialized output of a layer. With `stacked`, its rows have room for v.
    fn output(&self, rows: usize, base: &Matrix<T>, stacked: bool) -> Result<Matrix<T>> {
        let stride = base.rows + if stacked { base.stacked } else { 0 };
        Ok(Matrix { cols: base.rows, ..self.alloc(rows, stride)? })
    }

    /// `x Wᵀ`, with the columns of v if `stacked`.
    fn product(&self, x: &Matrix<T>, base: &Matrix<T>, stacked: bool) -> Result<Matrix<T>> {
        let mut y = self.output(x.rows, base, stacked)?;
        self.gemm.run(self.stream.get(), x, base, &mut y, 0.0)?;
        self.lets_next_start.set(false);
        Ok(y)
    }

    /// An uninitialized matrix, which must be written before it is read.
    fn alloc<V: DeviceRepr>(&self, rows: usize, cols: usize) -> Result<Matrix<V>> {
        if !self.is_on_arena.get() {
            return self.matrix(rows, cols, self.slice(rows, cols)?);
        }
        let len = (rows * cols).max(1);
        let data = match self.arena.take(len) {
            Some(data) => data,
            None => self.arena.own(Buffer::from_slice(&self.queue, self.slice(rows, cols)?)?, len),
        };
        let address = data.device_ptr();
        Ok(Matrix { rows, cols, stride: cols, stacked: 0, data, address })
    }

    fn upload<V: DeviceRepr>(&self, rows: usize, cols: usize, values: &[V]) -> Result<Matrix<V>> {
        let mut slice = self.slice(rows, cols)?;
        self.queue.stream().memcpy_htod(values, &mut slice)?;
        self.matrix(rows, cols, slice)
    }

    /// The memory of a matrix.
    fn slice<V: DeviceRepr>(&self, rows: usize, cols: usize) -> Result<CudaSlice<V>> {
        // Allocations cannot be empty.
        let len = (rows * cols).max(1);
        // SAFETY: the elements are numbers, for which any bits are a valid value.
        let slice = unsafe { self.queue.stream().alloc(len) };
        let megabytes = (len * size_of::<V>()).div_ceil(1_000_000);
        slice.memory_for(format_args!("{megabytes} MB more: {rows} x {cols}"))
    }

    fn matrix<V: DeviceRepr>(&self, rows: usize, cols: usize, slice: CudaSlice<V>) -> Result<Matrix<V>> {
        let data = Buffer::from_slice(&self.queue, slice)?;
        let address = data.device_ptr();
        Ok(Matrix { rows, cols, stride: cols, stacked: 0, data: data.into(), address })
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

    /// Waits for all enqueued work.
    fn download<V: DeviceRepr + Clone + Default>(&self, matrix: &Matrix<V>) -> Result<Vec<V>> {
        self.wait()?;
        let mut values = vec![V::default(); matrix.rows * matrix.cols];
        matrix.data.read(&mut values)?;
        Ok(values)
    }

    fn kernel<'a>(&'a self, function: &'a CudaFunction) -> Launch<'a> {
        self.lets_next_start.set(false);
        let (context, stream) = (self.queue.stream().context(), self.stream.get());
        Launch { context, stream, function, arguments: Vec::new(), starts_early: false, lifetime: PhantomData }
    }

    /// A kernel that starts before the kernel in front of it ends, and waits for that one's results itself.
    fn early<'a>(&'a self, function: &'a CudaFunction) -> Launch<'a> {
        Launch { starts_early: true, ..self.kernel(function) }
    }

    /// A kernel that reads the result of a layer, and starts early behind operations that let it. Behind cuBLASLt and NCCL, which let no
    /// kernel start before they end, an early start takes 1.5 us longer (H200).
    fn consumer<'a>(&'a self, function: &'a CudaFunction) -> Launch<'a> {
        let starts_early = self.lets_next_start.get();
        Launch { starts_early, ..self.kernel(function) }
    }

    /// Copies inputs of a captured step, and changes of its block table, from where the host has staged them: as the kernel has it.
    ///
    /// # Errors
    ///
    /// If the launch fails.
    pub fn copy_inputs(
        &self,
        Inputs { ids, places }: &mut Inputs<Self>,
        staged: u64,
        (tokens, changes): (usize, usize),
        last: Option<&Draws>,
    ) -> Result<()> {
        let drawn = last.map_or(0, Draws::address);
        let mut kernel = self.kernel(&self.functions.set_inputs);
        kernel.arg(&staged).arg(&drawn).arg(&ids.address).arg(&places.positions.address).arg(&places.rows.address);
        kernel.arg(&places.table.first_rows.address).arg(&tokens).arg(&changes);
        launch(kernel, tokens.max(changes).div_ceil(THREADS as usize), 1)
    }

    fn gather_into(&self, x: &Matrix<T>, rows: &Matrix<i32>, out: &mut Matrix<T>) -> Result<()> {
        let mut kernel = self.kernel(&self.functions.gather);
        kernel.arg(&x.address).arg(&rows.address).arg(&out.address).arg(&x.rows).arg(&out.cols);
        launch(kernel, rows.rows, parts(out.cols * size_of::<T>()))
    }

    fn silu_mul_into(&self, gate_up: &Matrix<T>, routes: Option<&Routes>, out: &mut Matrix<T>) -> Result<()> {
        let tokens = routes.map_or(0, |routes| routes.tokens.address);
        let mut kernel = self.consumer(&self.functions.silu_mul);
        kernel.arg(&gate_up.address).arg(&tokens).arg(&out.address).arg(&out.cols);
        launch(kernel, gate_up.rows, parts(out.cols * size_of::<T>()))
    }

    /// Adds `y` to `x`, and normalizes the sum.
    fn normalize(&self, x: &Matrix<T>, y: Option<&Matrix<T>>, weight: &Matrix<T>, eps: f32) -> Result<Matrix<T>> {
        let out = self.alloc(x.rows, x.cols)?;
        let (of_y, stride) = y.map_or((0, x.cols), |y| (y.address, y.stride));
        let mut kernel = self.consumer(&self.functions.add_rms_norm);
        kernel.arg(&x.address).arg(&of_y).arg(&weight.address).arg(&out.address).arg(&x.cols).arg(&stride).arg(&eps);
        launch(kernel, x.rows, 1)?;
        Ok(out)
    }

    /// Adds the deltas of gate_up and applies the activation, in one kernel where that is faster.
    fn activate_into(
        &self,
        layer: &LoraExperts,
        step: &mut cuda::Step<'_>,
        Grouped { routes, grouped }: &mut Grouped<'_, '_>,
        x: &Matrix<T>,
        gate_up: &mut Matrix<T>,
        out: &mut Matrix<T>,
    ) -> Result<()> {
        if !layer.plan().gate_up().prefers_fused(gate_up.rows) {
            layer.add_gate_up_delta(step, grouped, x.operand()?, gate_up.operand_mut()?)?;
            return self.silu_mul_into(gate_up, Some(routes), out);
        }
        let (x, y, out) = (x.operand()?, gate_up.operand()?, out.operand_mut()?);
        layer.activate(step, grouped, x, y, out, Activation::Silu)?;
        routes.may_start_early.set(grouped.may_combine_beside_activation());
        Ok(())
    }

    /// Adds the deltas of down and combines, in one kernel where that is faster.
    fn combine_adapted_into(
        &self,
        layer: &LoraExperts,
        step: &mut cuda::Step<'_>,
        Grouped { routes, grouped }: &mut Grouped<'_, '_>,
        x: &Matrix<T>,
        down: &mut Matrix<T>,
        out: &mut Matrix<T>,
    ) -> Result<()> {
        if !layer.plan().down().prefers_fused(down.rows) {
            layer.add_down_delta(step, grouped, x.operand()?, down.operand_mut()?)?;
            return self.combine_into(down, routes, out);
        }
        if routes.started_early.replace(false) {
            // SAFETY: in front is the product of down, which started the kernel behind it at once, and in front of that the activation.
            unsafe { grouped.combine_beside_activation() };
        }
        layer.combine(step, grouped, x.operand()?, down.operand()?, out.operand_mut()?)?;
        self.lets_next_start.set(true);
        Ok(())
    }

    /// The sum of a token's rows, each times its route's weight.
    fn combine_into(&self, down: &Matrix<T>, routes: &Routes, out: &mut Matrix<T>) -> Result<()> {
        let (tokens, top_k) = (routes.weights.rows, routes.weights.cols);
        let mut kernel = self.early(&self.functions.combine);
        kernel.arg(&down.address).arg(&routes.weights.address).arg(&routes.row_of_route.address).arg(&out.address);
        kernel.arg(&down.cols).arg(&top_k);
        launch(kernel, tokens, parts(down.cols * size_of::<T>()))?;
        self.lets_next_start.set(true);
        Ok(())
    }
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

/// A launch of one of the example's kernels.
struct Launch<'a> {
    context: &'a CudaContext,
    stream: Stream,
    function: &'a CudaFunction,
    arguments: Vec<*mut c_void>,
    /// Before its predecessors have ended. The kernel waits for them.
    starts_early: bool,
    lifetime: PhantomData<&'a c_void>,
}

impl<'a> Launch<'a> {
    fn arg<V: DeviceRepr>(&mut self, value: &'a V) -> &mut Self {
        self.arguments.push(ptr::from_ref(value).cast_mut().cast());
        self
    }
}

/// Enqueues a kernel of `THREADS` threads, with a block for each row and part of a row.
fn launch(kernel: Launch<'_>, rows: usize, parts: usize) -> Result<()> {
    launch_blocks(kernel, (rows, parts), THREADS, 0)
}

/// Enqueues a kernel with a grid, the threads of a block and the bytes of its dynamic shared memory.
fn launch_blocks(mut kernel: Launch<'_>, grid: (usize, usize), threads: u32, shared_bytes: usize) -> Result<()> {
    if grid.0 * grid.1 == 0 {
        return Ok(());
    }
    kernel.context.bind_to_thread().map_err(LaunchError::from)?;
    let mut attribute = CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let config = CUlaunchConfig {
        gridDimX: u32::try_from(grid.0)?,
        gridDimY: u32::try_from(grid.1)?,
        gridDimZ: 1,
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: u32::try_from(shared_bytes)?,
        hStream: kernel.stream.as_raw().cast(),
        attrs: &raw mut attribute,
        numAttrs: kernel.starts_early.into(),
    };
    let (function, arguments) = (kernel.function.cu_function(), kernel.arguments.as_mut_ptr());
    // SAFETY: each kernel gets the arguments that it declares: matrices of its element type and documented shapes, and sizes of 8 bytes.
    // The forward keeps shapes and indices in bounds.
    unsafe { cuLaunchKernelEx(&raw const config, function, arguments, ptr::null_mut()) }
        .result()
        .map_err(LaunchError::from)?;
    Ok(())
}

/// Loads a kernel that uses this much dynamic shared memory.
fn load_with_shared(module: &Arc<CudaModule>, name: &str, bytes: usize) -> result::Result<CudaFunction, DriverError> {
    let function = module.load_function(name)?;
    let attribute = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    function.set_attribute(attribute, i32::try_from(bytes).unwrap_or(i32::MAX))?;
    Ok(function)
}

impl Functions {
    fn load(dtype: DType, module: &Arc<CudaModule>) -> result::Result<Self, DriverError> {
        let function = |name: &str| module.load_function(&format!("{name}_{dtype}"));
        Ok(Self {
            add_rms_norm: function("add_rms_norm")?,
            rotate_and_append: function("rotate_and_append")?,
            silu_mul: function("silu_mul")?,
            add: function("add")?,
            gather: function("gather")?,
            draw: function("draw")?,
            subtract: module.load_function("subtract")?,
            take_drawn: module.load_function("take_drawn")?,
            set_inputs: module.load_function("set_inputs")?,
            choose_experts: function("choose_experts")?,
            sort_routes: function("sort_routes")?,
            route_few: (dtype != DType::F32).then(|| function("route_few")).transpose()?,
            grouped_gemm: GroupedGemms::load(dtype, module)?,
            grouped_gemm_int4: Tiled { function: function("grouped_gemm_int4")?, tile: grouped_gemm::SIMPLE },
            combine: function("combine")?,
        })
    }
}

impl<V> Matrix<V> {
    /// Elements.
    #[expect(clippy::len_without_is_empty, reason = "a matrix has elements")]
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    fn view(&self) -> cuda::View<'_, V> {
        self.data.slice(0..self.len())
    }

    /// All elements, with those between rows.
    fn extent(&self) -> usize {
        self.rows * self.stride
    }

    /// The matrix as the library's operand.
    fn operand(&self) -> Result<cuda::Matrix<'_, V>>
    where
        V: Element,
    {
        Ok(cuda::Matrix::strided(self.data.slice(0..self.extent()), self.rows, self.cols, self.stride)?)
    }

    fn operand_mut(&mut self) -> Result<cuda::MatrixMut<'_, V>>
    where
        V: Element,
    {
        Ok(cuda::MatrixMut::strided(&mut *self.data, self.rows, self.cols, self.stride)?)
    }

    /// The matrix with its columns of v.
    fn stacked(&self) -> Result<cuda::Matrix<'_, V>>
    where
        V: Element,
    {
        Ok(cuda::Matrix::new(self.data.slice(0..self.extent()), self.rows, self.stride)?)
    }

    fn stacked_mut(&mut self) -> Result<cuda::MatrixMut<'_, V>>
    where
        V: Element,
    {
        Ok(cuda::MatrixMut::new(&mut *self.data, self.rows, self.stride)?)
    }
}

/// Names the allocation that failed.
trait MemoryFor<V> {
    fn memory_for(self, what: impl Display) -> Result<V>;
}

impl<V, E: Into<LaunchError>> MemoryFor<V> for result::Result<V, E> {
    fn memory_for(self, what: impl Display) -> Result<V> {
        self.map_err(|error| match error.into() {
            error if error.is_out_of_memory() => Error::new(format!("the GPU has not enough memory for {what}")),
            error => error.into(),
        })
    }
}

impl<T: Element + DeviceRepr> Device for Cuda<T> {
    type Elem = T;
    type Tensor = Matrix<T>;
    type Weight = Matrix<T>;
    type Indices = Matrix<i32>;
    type Routes = Routes;
    type Draws = Draws;

    fn tensor(&self, rows: usize, cols: usize, values: &[T]) -> Result<Matrix<T>> {
        self.upload(rows, cols, values)
    }

    fn zeros(&self, rows: usize, cols: usize) -> Result<Matrix<T>> {
        let zeros = self.matrix(rows, cols, self.slice::<T>(rows, cols)?)?;
        let (bytes, stream) = (zeros.len() * size_of::<T>(), self.queue.stream());
        // SAFETY: the memory has this many bytes and is used on this stream only. Zeros are a valid value.
        unsafe { memset_d8_async(zeros.address, 0, bytes, stream.cu_stream()) }?;
        Ok(zeros)
    }

    fn weight(&self, rows: usize, cols: usize, parts: &[Cow<'_, [T]>]) -> Result<Matrix<T>> {
        let mut slice = self.slice(rows, cols)?;
        let mut first = 0;
        for part in parts {
            self.queue.stream().memcpy_htod(&**part, &mut slice.slice_mut(first..first + part.len()))?;
            first += part.len();
        }
        self.matrix(rows, cols, slice)
    }

    fn experts(&self, shape: ExpertsShape, weights: ExpertWeights<'_, T>) -> Result<Box<dyn GroupedGemm<Self>>> {
        experts::new(self, shape, weights)
    }

    fn indices(&self, values: &[u32]) -> Result<Matrix<i32>> {
        self.upload(values.len(), 1, bytemuck::cast_slice(values))
    }

    type Adapters = WeightTable;
    type Tiers = cuda::Tiers;
    type LoraLinear = Linear;
    type FusedLinear<'a> = Fused<'a, T>;
    type Stack = cuda::Stack;
    type LoraEmbedding = LoraEmbedding;
    type LoraExperts = LoraExperts;
    type Buffers = Buffers;
    type LoraStep<'a> = cuda::Step<'a>;
    type Grouping = Grouping;
    type Grouped<'a, 's> = Grouped<'a, 's>;

    fn arena_bytes(images: &[SlotImage<'_>]) -> usize {
        WeightTable::arena_bytes(images)
    }

    fn adapters(&self, model: &Model, capacity: Capacity, arena_bytes: usize) -> Result<WeightTable> {
        WeightTable::new(&self.queue, model, T::DTYPE, capacity, arena_bytes)
            .memory_for(format_args!("{} MB of adapters", arena_bytes.div_ceil(1_000_000)))
    }

    fn load(
        &self,
        adapters: &WeightTable,
        slot: usize,
        image: &SlotImage<'_>,
        progress: impl FnMut(usize),
    ) -> Result<Slot> {
        Ok(adapters.load_with_progress(slot, image, progress)?)
    }

    fn pool(&self, model: &Model, capacity: Capacity, config: PoolConfig) -> Result<(AdapterPool, WeightTable)> {
        let pool = AdapterPool::new(&self.queue, model, T::DTYPE, capacity, config)?;
        let weights = pool.weights(StreamId::FIRST).cloned();
        Ok((pool, weights.ok_or_else(|| Error::new("the pool has no stream"))?))
    }

    fn lora_linear(&self, adapters: &WeightTable, id: LinearId) -> Result<Linear> {
        Ok(match adapters.model()[id].exchange() {
            None => Linear::Whole(LoraLinear::new(adapters, id)?),
            Some(exchange) => Linear::FullySharded {
                layer: FullyShardedLinear::new(adapters, id)?,
                exchange,
                max_rank: adapters.capacity().max_rank,
            },
        })
    }

    fn fused_linear<'a>(
        &self,
        adapters: &WeightTable,
        id: LinearId,
        base: &'a Matrix<T>,
    ) -> Result<Option<Fused<'a, T>>> {
        let (site, device) = (&adapters.model()[id], self.queue.kernels().device());
        // Then the layer has its GEMM, and `write_delta` before it.
        if ForwardPlan::new(site, T::DTYPE, adapters.capacity()).and_then(|plan| plan.on(device)).is_err() {
            return Ok(None);
        }
        let mut first = 0;
        let slices = site.slices().iter().map(|slice| {
            let rows = slice.out_features();
            let values = base.data.slice(first * base.cols..(first + rows) * base.cols);
            first += rows;
            cuda::Matrix::new(values, rows, base.cols)
        });
        let slices = slices.collect::<result::Result<Vec<_>, _>>()?;
        Ok(Some(Fused { layer: FusedLinear::new(adapters, id, slices)?, outputs: base.rows }))
    }

    fn is_fastest_fused(&self, layer: &Linear, fused: &Fused<'_, T>, tokens: usize) -> bool {
        let Linear::Whole(layer) = layer else { return false };
        layer.plan().fastest_mode(tokens, FEW_RANKS, Some(fused.layer.plan()), None) == Mode::Fused
    }

    /// Copies the base weights to where there are rows behind them.
    fn stack<'a>(
        &self,
        adapters: &WeightTable,
        bounds: (usize, usize),
        layers: impl Iterator<Item = (&'a mut Matrix<T>, LinearId, &'a Linear)>,
    ) -> Result<Option<cuda::Stack>> {
        if T::DTYPE == DType::F32 {
            return Ok(None);
        }
        let mut rows = Vec::new();
        for (base, id, layer) in layers {
            let Linear::Whole(layer) = layer else { continue };
            let outputs = adapters.model()[id].slices().iter().map(SliceSite::out_features);
            if !outputs.chain([base.cols]).all(|size| size.is_multiple_of(8)) {
                continue;
            }
            let stacked = layer.plan().stacked_rows(bounds.0, bounds.1);
            let mut data = Buffer::from_slice(&self.queue, self.slice(base.rows + stacked, base.cols)?)?;
            self.queue.copy(base.view(), &mut data)?;
            let of_stack = data.split_off(base.len());
            let (address, bytes) = (of_stack.device_ptr(), of_stack.len() * size_of::<T>());
            // SAFETY: the memory has this many bytes and is used on this stream only. Zeros are a valid value.
            unsafe { memset_d8_async(address, 0, bytes, self.queue.stream().cu_stream()) }?;
            *base = Matrix { stacked, address: data.device_ptr(), data: data.into(), ..*base };
            rows.push((id, of_stack));
        }
        if rows.is_empty() { Ok(None) } else { Ok(Some(cuda::Stack::new(adapters, bounds, rows)?)) }
    }

    fn is_fastest_stacked(&self, layer: &Linear, stack: &cuda::Stack, tokens: usize) -> bool {
        let Linear::Whole(layer) = layer else { return false };
        layer.plan().fastest_mode(tokens, FEW_RANKS, None, Some(stack.rank())) == Mode::Stacked
    }

    fn place(&self, stack: &mut cuda::Stack, step: &mut cuda::Step<'_>) -> Result<bool> {
        Ok(stack.place(step)?)
    }

    fn lora_embedding(&self, adapters: &WeightTable, id: EmbeddingId) -> Result<LoraEmbedding> {
        Ok(LoraEmbedding::new(adapters, id)?)
    }

    fn lora_experts(&self, adapters: &WeightTable, id: ExpertsId) -> Result<LoraExperts> {
        Ok(LoraExperts::new(adapters, id)?)
    }

    fn buffers(&self, adapters: &WeightTable) -> Result<Buffers> {
        let routing = Routing::new(&self.queue, adapters.capacity(), STEPS_IN_FLIGHT).memory_for("the routing")?;
        Ok(Buffers { routing, workspace: Workspace::new(adapters).memory_for("the library's workspace")? })
    }

    fn lora_step<'a>(
        &self,
        adapters: Slots<'a, Self>,
        buffers: &'a mut Buffers,
        slots: &'a [Slot],
        scales: &'a [f32],
    ) -> Result<cuda::Step<'a>> {
        Self::start(adapters, buffers, &Batch::new(slots).with_scales(scales)?)
    }

    /// With few tokens the deltas come first, and the GEMM adds to them: their kernel starts before the one in front of it has ended, and
    /// nothing starts early behind a GEMM of cuBLASLt. With many, a GEMM that adds to what its output holds takes longer.
    fn gemm_with_deltas(
        &self,
        x: &Matrix<T>,
        (base, layer): (&Matrix<T>, &Linear),
        step: &mut cuda::Step<'_>,
        stacked: Stacked<'_, Self>,
    ) -> Result<Matrix<T>> {
        let (layer, exchange, max_rank) = match layer {
            Linear::Whole(layer) => {
                if let Stacked::Deltas(stack) = stacked
                    && base.stacked > 0
                {
                    let mut y = self.product(x, base, true)?;
                    layer.add_stacked_delta(step, stack, y.stacked_mut()?)?;
                    self.lets_next_start.set(true);
                    return Ok(y);
                }
                if x.rows > MANY_TOKENS {
                    let mut y = self.product(x, base, stacked.has_rows())?;
                    layer.add_delta(step, x.operand()?, y.operand_mut()?)?;
                    return Ok(y);
                }
                let mut y = self.output(x.rows, base, stacked.has_rows())?;
                layer.write_delta(step, x.operand()?, y.operand_mut()?)?;
                self.gemm.run(self.stream.get(), x, base, &mut y, 1.0)?;
                self.lets_next_start.set(false);
                return Ok(y);
            }
            Linear::FullySharded { layer, exchange, max_rank } => (layer, exchange, *max_rank),
        };
        let Some(nccl) = &self.nccl else { bail!("a fully sharded layer needs the other ranks") };
        let mut y = self.product(x, base, false)?;
        let [rows, cols] = exchange.sent(x.rows, max_rank);
        let mut v = self.alloc::<f32>(rows, cols)?;
        layer.shrink(step, x.operand()?, v.operand_mut()?)?;
        let [rows, cols] = exchange.received(x.rows, max_rank);
        let v = match exchange.collective() {
            Collective::AllGather => {
                let mut all = self.alloc(rows, cols)?;
                nccl.gather(self.stream.get(), &v, &mut all)?;
                all
            }
            Collective::AllReduce => {
                nccl.all_reduce(self.stream.get(), &mut v)?;
                v
            }
        };
        layer.expand(step, v.operand()?, y.operand_mut()?)?;
        Ok(y)
    }

    fn forward(&self, fused: &Fused<'_, T>, step: &mut cuda::Step<'_>, x: &Matrix<T>) -> Result<Matrix<T>> {
        let mut y = self.alloc(x.rows, fused.outputs)?;
        fused.layer.forward(step, x.operand()?, y.operand_mut()?)?;
        self.lets_next_start.set(true);
        Ok(y)
    }

    fn gate_up_of_many(
        &self,
        x: &Matrix<T>,
        (base, layer): (&Matrix<T>, &Linear),
        step: &mut cuda::Step<'_>,
        stacked: Stacked<'_, Self>,
    ) -> Result<Option<Matrix<T>>> {
        let Linear::Whole(layer) = layer else { return Ok(None) };
        let has_rows = stacked.has_rows() && base.stacked > 0;
        if T::DTYPE == DType::F32 || !has_rows && x.rows <= MANY_TOKENS {
            return Ok(None);
        }
        let y = self.product(x, base, has_rows)?;
        let mut out = self.alloc(y.rows, y.cols / 2)?;
        if let Stacked::Deltas(stack) = stacked
            && has_rows
        {
            layer.stacked_silu_mul(step, stack, y.stacked()?, out.operand_mut()?)?;
            return Ok(Some(out));
        }
        layer.shrink(step, x.operand()?)?.silu_mul(y.operand()?, out.operand_mut()?)?;
        Ok(Some(out))
    }

    fn add_embedding_delta(
        &self,
        layer: &LoraEmbedding,
        step: &mut cuda::Step<'_>,
        ids: &Matrix<i32>,
        y: &mut Matrix<T>,
    ) -> Result<()> {
        Ok(layer.add_delta(step, ids.view(), y.operand_mut()?)?)
    }

    fn grouping(&self, capacity: RouteCapacity) -> Result<Grouping> {
        Grouping::new(&self.queue, capacity).memory_for("the grouping of routes")
    }

    fn group<'a, 's: 'a>(
        &self,
        grouping: &'a mut Grouping,
        step: &mut cuda::Step<'s>,
        routes: &'a Routes,
    ) -> Result<Grouped<'a, 's>> {
        let grouped = grouping.update(step, routes.top_k()?)?;
        // SAFETY: in front of the activation and the combine is a grouped GEMM, which does not write the rows that it multiplies, nor the
        // routes. It starts early only in the kernels of `TENSOR`, all of whose blocks wait before they let the next kernel start.
        Ok(Grouped { routes, grouped: unsafe { grouped.shrink_beside_base() } })
    }

    fn activate(
        &self,
        layer: &LoraExperts,
        step: &mut cuda::Step<'_>,
        grouped: &mut Grouped<'_, '_>,
        x: &Matrix<T>,
        mut gate_up: Matrix<T>,
    ) -> Result<Matrix<T>> {
        let mut out = self.alloc(gate_up.rows, gate_up.cols / 2)?;
        self.activate_into(layer, step, grouped, x, &mut gate_up, &mut out)?;
        Ok(out)
    }

    fn experts_without_adapters(
        &self,
        layer: &LoraExperts,
        x: &Matrix<T>,
        routes: &Routes,
        gate_up: &dyn GroupedGemm<Self>,
        down: &dyn GroupedGemm<Self>,
    ) -> Result<Option<Matrix<T>>> {
        // Where deltas are added to the product, none leave it as it is.
        let inter = if layer.plan().gate_up().prefers_fused(routes.tokens.rows) {
            gate_up.run_activated(self, x, routes)?
        } else {
            let gate_up = gate_up.run_on_tokens(self, x, routes)?;
            let mut inter = self.alloc(gate_up.rows, gate_up.cols / 2)?;
            self.silu_mul_into(&gate_up, Some(routes), &mut inter)?;
            Some(inter)
        };
        let Some(inter) = inter else { return Ok(None) };
        let down = down.run(self, &inter, routes)?;
        let mut out = self.alloc(x.rows, down.cols)?;
        self.combine_into(&down, routes, &mut out)?;
        Ok(Some(out))
    }

    fn combine(
        &self,
        layer: &LoraExperts,
        step: &mut cuda::Step<'_>,
        grouped: &mut Grouped<'_, '_>,
        x: &Matrix<T>,
        mut down: Matrix<T>,
    ) -> Result<Matrix<T>> {
        let mut out = self.alloc(grouped.routes.weights.rows, down.cols)?;
        self.combine_adapted_into(layer, step, grouped, x, &mut down, &mut out)?;
        Ok(out)
    }

    fn subtract(&self, indices: &Matrix<i32>, first: u32) -> Result<Matrix<i32>> {
        let out = self.alloc(indices.rows, indices.cols)?;
        let mut kernel = self.kernel(&self.functions.subtract);
        let count = indices.len();
        kernel.arg(&indices.address).arg(&out.address).arg(&count).arg(&first);
        launch(kernel, count.div_ceil(THREADS as usize), 1)?;
        Ok(out)
    }

    fn embed(&self, table: &Matrix<T>, ids: &Matrix<i32>) -> Result<Matrix<T>> {
        self.gather(table, ids)
    }

    fn gemm(&self, x: &Matrix<T>, weight: &Matrix<T>, stacked: Stacked<'_, Self>) -> Result<Matrix<T>> {
        self.product(x, weight, stacked.has_rows())
    }

    fn rms_norm(&self, x: &Matrix<T>, weight: &Matrix<T>, eps: f32) -> Result<Matrix<T>> {
        self.normalize(x, None, weight, eps)
    }

    fn add_rms_norm(&self, x: &mut Matrix<T>, y: &Matrix<T>, weight: &Matrix<T>, eps: f32) -> Result<Matrix<T>> {
        self.normalize(x, Some(y), weight, eps)
    }

    fn rotate_and_append(
        &self,
        qkv: &mut Matrix<T>,
        heads: Heads,
        norms: HeadNorms<'_, Self>,
        rope: &Rope<Self>,
        places: &Places<Self>,
        cache: &mut Cache<Self>,
    ) -> Result<()> {
        let mut kernel = self.consumer(&self.functions.rotate_and_append);
        kernel.arg(&qkv.address).arg(&norms.q.address).arg(&norms.k.address);
        kernel.arg(&rope.cos.address).arg(&rope.sin.address).arg(&places.positions.address).arg(&places.rows.address);
        kernel.arg(&cache.keys.address).arg(&cache.values.address).arg(&qkv.stride);
        kernel.arg(&heads.query).arg(&heads.kv).arg(&heads.dim).arg(&norms.eps);
        launch(kernel, qkv.rows, (heads.query + 2 * heads.kv).div_ceil(HEADS))?;
        self.lets_next_start.set(true);
        Ok(())
    }

    fn attention(
        &self,
        qkv: &Matrix<T>,
        heads: Heads,
        places: &Places<Self>,
        cache: &Cache<Self>,
    ) -> Result<Matrix<T>> {
        let mut out = self.alloc(qkv.rows, heads.query_features())?;
        self.attention.run(self, qkv, heads, places, cache, &mut out)?;
        Ok(out)
    }

    fn silu_mul(&self, gate_up: &Matrix<T>) -> Result<Matrix<T>> {
        let mut out = self.alloc(gate_up.rows, gate_up.cols / 2)?;
        self.silu_mul_into(gate_up, None, &mut out)?;
        Ok(out)
    }

    fn choose_experts(
        &self,
        x: &Matrix<T>,
        (router, lora): (&Matrix<T>, &Linear),
        adapted: Option<&mut cuda::Step<'_>>,
        (top_k, normalized): (usize, bool),
        held: Range<usize>,
    ) -> Result<Routes> {
        let mut scores = self.alloc(x.rows, router.rows)?;
        let has_deltas = adapted.is_some();
        if let Some(step) = adapted {
            let Linear::Whole(lora) = lora else { bail!("a rank has the whole router") };
            lora.write_delta(step, x.operand()?, scores.operand_mut()?)?;
        }
        let mut routes = Routes::new(self, x.rows, (router.rows, held), top_k)?;
        routes.choose(self, (x, router), (&mut scores, has_deltas), normalized)?;
        Ok(routes)
    }

    fn rows_of_routes(&self, x: &Matrix<T>, routes: &Routes) -> Result<Matrix<T>> {
        self.gather(x, &routes.tokens)
    }

    fn add(&self, y: &mut Matrix<T>, x: &Matrix<T>) -> Result<()> {
        let mut kernel = self.kernel(&self.functions.add);
        kernel.arg(&y.address).arg(&x.address).arg(&y.cols).arg(&x.stride);
        launch(kernel, y.rows, parts(y.cols * size_of::<T>()))
    }

    fn gather(&self, x: &Matrix<T>, rows: &Matrix<i32>) -> Result<Matrix<T>> {
        let mut out = self.alloc(rows.rows, x.cols)?;
        self.gather_into(x, rows, &mut out)?;
        Ok(out)
    }

    fn tp(&self) -> TpRank {
        self.tp
    }

    fn all_reduce(&self, y: &mut Matrix<T>) -> Result<()> {
        let Some(nccl) = &self.nccl else { return Ok(()) };
        self.lets_next_start.set(false);
        nccl.all_reduce(self.stream.get(), y)
    }

    fn all_gather(&self, x: Matrix<T>, cols: usize) -> Result<Matrix<T>> {
        let Some(nccl) = &self.nccl else { return Ok(x) };
        let mut parts = self.alloc(self.tp.size() * x.rows, x.cols)?;
        let mut out = self.alloc(x.rows, cols)?;
        nccl.all_gather(self.stream.get(), &x, &mut parts, &mut out)?;
        Ok(out)
    }

    fn draws(&self, rows: usize) -> Result<Draws> {
        Draws::new(&self.queue, rows)
    }

    fn draw(&self, logits: &Matrix<T>, draws: &[Draw], drawn: &mut Draws) -> Result<()> {
        drawn.draw(self, logits, draws)
    }

    fn take_drawn(&self, ids: &mut Matrix<i32>, sources: &[i32], drawn: &Draws) -> Result<()> {
        assert_eq!(ids.len(), sources.len(), "each id has a source or none");
        let sources = self.upload(sources.len(), 1, sources)?;
        let (tokens, address) = (sources.rows, drawn.address());
        let mut kernel = self.kernel(&self.functions.take_drawn);
        kernel.arg(&sources.address).arg(&address).arg(&ids.address).arg(&tokens);
        launch(kernel, tokens.div_ceil(THREADS as usize), 1)
    }

    fn drawn(&self, drawn: &mut Draws) -> Result<Vec<(Option<u32>, f32)>> {
        if let Some(nccl) = &self.nccl {
            drawn.wait(nccl)?;
        }
        drawn.read()
    }

    fn read(&self, x: &Matrix<T>) -> Result<Vec<f32>> {
        Ok(self.download(x)?.into_iter().map(T::to_f32).collect())
    }
}
