#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use std::{
    collections::BTreeMap,
    fmt,
    ops::Range,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor as Factor},
    model::{EmbeddingId, ExpertsId, LinearId, Model},
    plan::{Capacity, PlanError},
    pool::{AdapterId, Lease, Load, PoolConfig, PoolError, Source, StreamId, Version},
};
use candle_core::{
    CpuStorage, CudaStorage, D, DType as CandleDType, Device, Error, InplaceOp2, Layout, Result, Tensor,
    backend::BackendStorage, bail,
};

/// A pool of adapters on a candle device, and the operations of the layers that they adapt. Clones are the same pool.
///
/// Any thread may use it. No call but [`wait_for`](Self::wait_for) waits for a file. On the CPU, calls wait for the
/// operation that is running.
#[derive(Clone)]
pub struct Adapters(Arc<Inner>);

struct Inner {
    model: Model,
    dtype: CandleDType,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu(Box<cpu::Cpu>),
    #[cfg(feature = "cuda")]
    Cuda(Box<cuda::Cuda>),
}

impl fmt::Debug for Adapters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adapters").field("dtype", &self.0.dtype).finish_non_exhaustive()
    }
}

/// What an expression gives of the locked pool, on whichever device it is.
macro_rules! of_pool {
    ($adapters:ident, $pool:ident => $result:expr) => {
        match &$adapters.0.backend {
            Backend::Cpu(cpu) => {
                let $pool = &mut cpu.lock().pool;
                $result
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let $pool = &mut cuda.lock().pool;
                $result
            }
        }
    };
}

impl Adapters {
    /// A pool without adapters, for all layers of `model`, whose activations are in `dtype` on `device`.
    /// [`arena_bytes`](Self::arena_bytes) computes the memory of `config`.
    ///
    /// On a GPU, memory for the adapters and for the largest step is allocated here. Its device is one of
    /// `Device::new_cuda_with_stream`.
    ///
    /// # Errors
    /// If the device is another, a bound of the capacity is invalid, the kernels do not support a layer, memory is
    /// exhausted, threads cannot be started, or the device is one of `Device::new_cuda`, whose stream is another on
    /// each thread.
    pub fn new(model: &Model, dtype: DType, device: &Device, capacity: Capacity, config: PoolConfig) -> Result<Self> {
        let of_candle = match dtype {
            DType::BF16 => CandleDType::BF16,
            DType::F16 => CandleDType::F16,
            DType::F32 => CandleDType::F32,
            dtype => bail!("candle has no {dtype}"),
        };
        let backend = match device {
            Device::Cpu => Backend::Cpu(Box::new(cpu::Cpu::new(model, dtype, capacity, config)?)),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Backend::Cuda(Box::new(cuda::Cuda::new(model, dtype, capacity, config, device)?)),
            device => bail!("there are no adapters on {device:?} in this build"),
        };
        Ok(Self(Arc::new(Inner { model: model.clone(), dtype: of_candle, backend })))
    }

    /// Size of an arena in bytes, on any device, in which `count` adapters of ranks up to `max_rank` fit, even if they
    /// have factors for all modules of the model. Smaller adapters take less.
    pub fn arena_bytes(model: &Model, dtype: DType, max_rank: usize, count: usize) -> usize {
        #[cfg(not(feature = "cuda"))]
        use aril::cpu::AdapterPool;
        // No less than on the CPU.
        #[cfg(feature = "cuda")]
        use aril::cuda::AdapterPool;
        AdapterPool::arena_bytes(model, dtype, max_rank, count)
    }

    /// Starts to load an adapter: one of PEFT's folders ([`Source::directory`]), or of memory ([`Source::memory`]),
    /// such as [`adapter`] makes of candle's tensors. Threads of the pool read it. It is registered until the version
    /// is dropped.
    ///
    /// # Errors
    /// As for [`AdapterPool::load`](aril::pool::AdapterPool::load).
    pub fn load(&self, source: Source) -> std::result::Result<Version, PoolError> {
        of_pool!(self, pool => pool.load(source))
    }

    /// Waits up to a time for a load, and returns whether it has ended.
    ///
    /// # Errors
    /// As for [`Load::has_ended`].
    pub fn wait_for(&self, load: &Load, timeout: Duration) -> std::result::Result<bool, PoolError> {
        let begin = Instant::now();
        while !load.has_ended()? {
            if begin.elapsed() >= timeout {
                return Ok(false);
            }
            // Operations are not to wait for it.
            thread::sleep(Duration::from_millis(1));
            of_pool!(self, pool => pool.poll());
        }
        Ok(true)
    }

    /// Leases adapters for the steps to come: all of these or none, one lease for each id, in order. It may give the
    /// slots of leases that were dropped before to other adapters.
    ///
    /// # Errors
    /// As for [`AdapterPool::prepare`](aril::pool::AdapterPool::prepare): `Loading` and `Full` ask to retry later.
    pub fn prepare(&self, adapters: &[AdapterId]) -> std::result::Result<Vec<Lease>, PoolError> {
        of_pool!(self, pool => pool.end_step(StreamId::FIRST).and_then(|()| pool.prepare(adapters, StreamId::FIRST)))
    }

    /// Starts a forward of one batch: the slot of each token, in the order of the rows of activations.
    ///
    /// A lease is good for a step until the first [`prepare`](Self::prepare) after it was dropped. From then on,
    /// operations of the step are refused.
    ///
    /// # Errors
    /// If there are more tokens than the capacity allows, or a slot is not leased. On a GPU also if its stream is being
    /// captured.
    pub fn step(&self, tokens: &[Slot]) -> Result<Step> {
        self.route(tokens.to_vec())
    }

    fn route(&self, slots: Vec<Slot>) -> Result<Step> {
        #[cfg(feature = "cuda")]
        let mut routing = None;
        match &self.0.backend {
            Backend::Cpu(cpu) => cpu.check(&slots)?,
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => routing = Some(cuda.route(&slots)?),
        }
        Ok(Step {
            adapters: self.clone(),
            slots,
            #[cfg(feature = "cuda")]
            routing,
        })
    }
}

/// The adapter of candle's tensors, such as a trainer has them. `config` is the text of an `adapter_config.json`; the
/// tensors are named as in PEFT's files, with or without `base_model.model.`.
///
/// # Errors
/// If a tensor is in another type than `BF16`, `F16` and `F32`, or as for [`Adapter::from_tensors`].
pub fn adapter(config: &str, tensors: impl IntoIterator<Item = (String, Tensor)>) -> Result<Adapter> {
    let factor = |(name, tensor): (String, Tensor)| {
        let dtype = match tensor.dtype() {
            CandleDType::BF16 => DType::BF16,
            CandleDType::F16 => DType::F16,
            CandleDType::F32 => DType::F32,
            dtype => bail!("`{name}` is in {dtype:?}, but must be in BF16, F16 or F32"),
        };
        let mut bytes = Vec::new();
        tensor.write_bytes(&mut bytes)?;
        Ok((name, Factor::new(dtype, tensor.dims(), bytes).map_err(Error::wrap)?))
    };
    let factors = tensors.into_iter().map(factor).collect::<Result<Vec<_>>>()?;
    Adapter::from_tensors(config, factors).map_err(Error::wrap)
}

/// A forward of one batch, or some [rows](Self::rows) of one. Threads may share it: operations follow one another.
#[derive(Debug)]
pub struct Step {
    adapters: Adapters,
    /// Of each row.
    slots: Vec<Slot>,
    /// Of the rows, on a GPU.
    #[cfg(feature = "cuda")]
    routing: Option<Arc<aril::cuda::Routing>>,
}

impl Step {
    /// Some rows of this step, for layers that get no others: a range of tokens, or the tokens whose logits are
    /// computed. In any order, any number of times.
    ///
    /// All layers can use it. On a GPU, each call enqueues the kernel that groups rows by slot.
    ///
    /// # Errors
    /// If the step has no such row, or more rows are asked for than the capacity has tokens.
    pub fn rows(&self, rows: impl IntoIterator<Item = usize>) -> Result<Step> {
        let slot = |row| match self.slots.get(row) {
            Some(&slot) => Ok(slot),
            None => bail!("the step has no row {row}, but {}", self.slots.len()),
        };
        self.adapters.route(rows.into_iter().map(slot).collect::<Result<_>>()?)
    }

    /// The deltas of a linear layer, for `y` `[.., out_features]`, the output of the base layer, whose slices lie side
    /// by side, and `x` `[.., in_features]`.
    pub fn delta(&self, id: LinearId) -> Delta<'_> {
        Delta { step: self, operation: Operation::Linear(id, None) }
    }

    /// The deltas of an embedding, for `y` `[.., hidden]`, what the base's table gives, and `x` the ids of the tokens, in
    /// `U32` and contiguous. An id outside the vocabulary has none.
    pub fn embedding_delta(&self, id: EmbeddingId) -> Delta<'_> {
        Delta { step: self, operation: Operation::Embedding(id) }
    }

    /// A router's choice for the rows of the step: the experts `[.., top_k]` of each, in `U32`, and their weights, which
    /// are 1 if there are none. An id that is not one of an expert on this rank has no delta. Both are copied.
    ///
    /// # Errors
    /// If `experts` is in another type, or candle fails.
    pub fn routes(&self, experts: &Tensor, weights: Option<&Tensor>) -> Result<Routes<'_>> {
        if experts.dtype() != CandleDType::U32 {
            bail!("`experts` is in {:?}, but must be in U32", experts.dtype())
        }
        let weights = weights.map(|weights| weights.to_dtype(CandleDType::F32)?.force_contiguous()).transpose()?;
        let (top_k, experts) = (experts.dim(D::Minus1)?, experts.force_contiguous()?);
        Ok(Routes { step: self, top_k, experts, weights })
    }
}

/// A router's choice of experts for the rows of a step. Route `k` of row `t` has row `t · top_k + k` of the tensors
/// `[routes, ..]`.
#[derive(Debug)]
pub struct Routes<'a> {
    step: &'a Step,
    top_k: usize,
    /// `[routes]`. Nobody else has them, so that an operation need not wait for them.
    experts: Tensor,
    weights: Option<Tensor>,
}

impl Routes<'_> {
    /// The deltas of gate and up, for `y` `[routes, gate_up]`, the output of the base's, and `x` `[rows, hidden]`.
    pub fn gate_up_delta(&self, id: ExpertsId) -> Delta<'_> {
        self.at(id, Point::GateUp)
    }

    /// The deltas of down for each route, for `y` `[routes, hidden]`, the output of the base's without the weights, and
    /// `x` `[routes, inter]`, what the activation gives.
    pub fn down_delta(&self, id: ExpertsId) -> Delta<'_> {
        self.at(id, Point::Down)
    }

    /// The deltas of down for each row, multiplied by the weights, for `y` `[rows, hidden]`, the weighted sum of the
    /// base's outputs, and `x` `[routes, inter]`. Instead of [`down_delta`](Self::down_delta).
    pub fn combined_delta(&self, id: ExpertsId) -> Delta<'_> {
        self.at(id, Point::Combined)
    }

    fn at(&self, id: ExpertsId, point: Point) -> Delta<'_> {
        Delta { step: self.step, operation: Operation::Experts(id, point, self) }
    }
}

/// A candle in-place operation: `y.inplace_op2(&x, &delta)` adds `scaling · B (A x[t])` of each row's adapter to
/// `y[t]`.
///
/// `y` and `x` have the element type of the [`Adapters`] and as many rows as the step, all dimensions but the last taken
/// together, unless the operation says otherwise. Elements of a row are adjacent; rows may be any distance apart, as in
/// a part of a wider tensor that `narrow` gives. Rows without an adapter keep every bit.
///
/// It fails, and leaves `y` unchanged, if an operand is none of these, is on another device, or if `x` shares its
/// storage with `y`.
///
/// Outputs in tensors of their own, one for each slice of a linear layer, are for [`add_to`](Self::add_to).
#[derive(Clone, Copy, Debug)]
pub struct Delta<'a> {
    step: &'a Step,
    operation: Operation<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Operation<'a> {
    /// Of all slices, or of one.
    Linear(LinearId, Option<usize>),
    Embedding(EmbeddingId),
    Experts(ExpertsId, Point, &'a Routes<'a>),
}

/// Where the deltas of experts are added.
#[derive(Clone, Copy, Debug)]
enum Point {
    GateUp,
    Down,
    Combined,
}

impl Delta<'_> {
    /// Adds the deltas of all slices of a linear layer to a tensor `[.., out_features]` for each slice, in their order,
    /// one after the other. Each is as `y` is for the in-place operation; their rows may be at different distances. One
    /// tensor is the output of all slices.
    ///
    /// # Errors
    /// As for the in-place operation. All outputs are then unchanged, unless the driver failed in between.
    pub fn add_to<'t>(&self, y: impl IntoIterator<Item = &'t Tensor>, x: &Tensor) -> Result<()> {
        let y: Vec<_> = y.into_iter().collect();
        match y[..] {
            [] => bail!("there is no output"),
            [y] => return y.inplace_op2(x, self),
            _ => {}
        }
        let Operation::Linear(id, _) = self.operation else { bail!("`y` is {} matrices, but must be one", y.len()) };
        let site = found(self.step.adapters.0.model.linear(id), id)?;
        if y.len() != site.slices().len() {
            bail!("`y` is {} matrices, but the layer has {} slices", y.len(), site.slices().len())
        }
        // Before one of them is changed.
        for (index, (y, slice)) in y.iter().zip(site.slices()).enumerate() {
            self.check(&format!("y[{index}]"), y, slice.out_features(), x)?;
        }
        // Each has its storage to itself, as in candle's own operations: no two are waited for at once.
        let of_slice = |slice| Delta { operation: Operation::Linear(id, Some(slice)), ..*self };
        y.iter().enumerate().try_for_each(|(slice, y)| y.inplace_op2(x, &of_slice(slice)))
    }

    /// Rejects an output that the operation would reject.
    fn check(&self, name: &str, y: &Tensor, cols: usize, x: &Tensor) -> Result<()> {
        if y.dtype() != x.dtype() {
            bail!("`{name}` is in {:?} and `x` in {:?}", y.dtype(), x.dtype())
        }
        if !y.device().same_device(x.device()) {
            bail!("`{name}` is on {:?} and `x` on {:?}", y.device().location(), x.device().location())
        }
        if storage(y) == storage(x) {
            bail!("`{name}` and `x` share a storage")
        }
        let at = Matrix::of(name, y.layout())?;
        let (got, want) = ([at.rows, at.cols], [self.step.slots.len(), cols]);
        if got != want {
            bail!("`{name}` is {got:?}, but must be {want:?}")
        }
        if at.row_stride < at.cols {
            bail!("`{name}` has row stride {}, but {} columns", at.row_stride, at.cols)
        }
        Ok(())
    }

    /// Rejects operands in other types than those of the operation.
    fn check_types(&self, y: CandleDType, x: CandleDType) -> Result<()> {
        let of_y = self.step.adapters.0.dtype;
        let of_x = if matches!(self.operation, Operation::Embedding(_)) { CandleDType::U32 } else { of_y };
        if (y, x) != (of_y, of_x) {
            bail!("`y` is in {y:?} and `x` in {x:?}, but must be in {of_y:?} and {of_x:?}")
        }
        Ok(())
    }
}

/// The address of a tensor's storage.
fn storage(tensor: &Tensor) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}

impl InplaceOp2 for Delta<'_> {
    fn name(&self) -> &'static str {
        "lora-delta"
    }

    fn cpu_fwd(&self, y: &mut CpuStorage, y_layout: &Layout, x: &CpuStorage, x_layout: &Layout) -> Result<()> {
        #[cfg_attr(not(feature = "cuda"), expect(irrefutable_let_patterns, reason = "the only backend"))]
        let Backend::Cpu(cpu) = &self.step.adapters.0.backend else { bail!("these adapters are not on the CPU") };
        self.check_types(y.dtype(), x.dtype())?;
        match y {
            CpuStorage::BF16(y) => cpu.add(self, (y, y_layout), (x, x_layout)),
            CpuStorage::F16(y) => cpu.add(self, (y, y_layout), (x, x_layout)),
            CpuStorage::F32(y) => cpu.add(self, (y, y_layout), (x, x_layout)),
            y => bail!("there are no adapters in {:?}", y.dtype()),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, y: &mut CudaStorage, y_layout: &Layout, x: &CudaStorage, x_layout: &Layout) -> Result<()> {
        let Step { adapters, routing: Some(routing), .. } = self.step else { bail!("these adapters are not on a GPU") };
        let Backend::Cuda(cuda) = &adapters.0.backend else { bail!("these adapters are not on a GPU") };
        self.check_types(y.dtype(), x.dtype())?;
        let (y, x) = ((y, y_layout), (x, x_layout));
        match y.0.dtype() {
            CandleDType::BF16 => cuda.add::<half::bf16>(self, routing, y, x),
            CandleDType::F16 => cuda.add::<half::f16>(self, routing, y, x),
            CandleDType::F32 => cuda.add::<f32>(self, routing, y, x),
            dtype => bail!("there are no adapters in {dtype:?}"),
        }
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &mut CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<()> {
        bail!("aril-candle was built without its feature `cuda`")
    }
}

/// The operations of a model's layers.
#[derive(Debug)]
struct Layers<L, E, X> {
    /// Of all slices, followed by those of each.
    linears: BTreeMap<LinearId, Vec<L>>,
    embeddings: BTreeMap<EmbeddingId, E>,
    experts: BTreeMap<ExpertsId, X>,
}

impl<L, E, X> Layers<L, E, X> {
    fn new(
        model: &Model,
        (linear, with_slice): (impl Fn(LinearId) -> Planned<L>, impl Fn(&L, usize) -> Option<L>),
        embedding: impl Fn(EmbeddingId) -> Planned<E>,
        experts: impl Fn(ExpertsId) -> Planned<X>,
    ) -> Planned<Self> {
        let linears = model.linear_ids().map(|id| {
            let mut all = vec![linear(id)?];
            all.extend((0..).map_while(|slice| with_slice(&all[0], slice)).collect::<Vec<_>>());
            Ok((id, all))
        });
        Ok(Self {
            linears: linears.collect::<Planned<_>>()?,
            embeddings: model.embedding_ids().map(|id| Ok((id, embedding(id)?))).collect::<Planned<_>>()?,
            experts: model.experts_ids().map(|id| Ok((id, experts(id)?))).collect::<Planned<_>>()?,
        })
    }

    fn linear(&self, id: LinearId, slice: Option<usize>) -> Result<&L> {
        found(self.linears.get(&id).and_then(|layers| layers.get(slice.map_or(0, |slice| slice + 1))), id)
    }
}

type Planned<T> = std::result::Result<T, PlanError>;

/// What belongs to an id.
fn found<T>(layer: Option<T>, id: impl fmt::Debug) -> Result<T> {
    layer.ok_or_else(|| Error::Msg(format!("{id:?} is of another model than the adapters")))
}

/// Where the elements of a contiguous tensor are in its storage.
fn span(operand: &str, layout: &Layout) -> Result<Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => bail!("`{operand}` is not contiguous: {layout:?}"),
    }
}

/// Rows at equal distances in a storage.
#[derive(Clone, Copy, Debug)]
struct Matrix {
    /// Elements before the first row.
    start: usize,
    rows: usize,
    cols: usize,
    /// Elements between the starts of rows.
    row_stride: usize,
}

impl Matrix {
    /// The rows of a tensor: all its dimensions but the last.
    fn of(operand: &str, layout: &Layout) -> Result<Self> {
        let (Some((&cols, dims)), Some((&stride, strides))) =
            (layout.dims().split_last(), layout.stride().split_last())
        else {
            bail!("`{operand}` is a scalar")
        };
        if stride != 1 && cols > 1 {
            bail!("the elements of a row of `{operand}` are not adjacent: {layout:?}")
        }
        if dims.contains(&0) {
            return Ok(Self { start: layout.start_offset(), rows: 0, cols, row_stride: cols });
        }
        let (mut rows, mut row_stride) = (1, None);
        // From the innermost dimension on. One of size 1 has any stride.
        for (&dim, &stride) in dims.iter().zip(strides).rev().filter(|(dim, _)| **dim != 1) {
            let row_stride = *row_stride.get_or_insert(stride);
            if stride != row_stride * rows {
                bail!("the rows of `{operand}` are not at equal distances: {layout:?}")
            }
            rows *= dim;
        }
        Ok(Self { start: layout.start_offset(), rows, cols, row_stride: row_stride.unwrap_or(cols) })
    }
}
