//! The operations of the forward.

use std::{borrow::Cow, ops::Range, result};

use aril::{
    DType, Element, Slot,
    adapter::SlotImage,
    cuda::{
        self, AdapterPool, Buffer, FullyShardedLinear, FusedLinear, Grouping, LoraEmbedding, LoraExperts, LoraLinear,
        Routing, TrainedRows, WeightTable, Workspace,
    },
    model::{Activation, Collective, EmbeddingId, Exchange, ExpertsId, LinearId, Model, RowsId, SliceSite, TpRank},
    plan::{Capacity, ForwardPlan, Mode, RouteCapacity},
    pool::{PoolConfig, StreamId},
    routing::Batch,
};
use cudarc::driver::{DeviceRepr, result::memset_d8_async};

use super::{Buffers, Cuda, Draws, Grouped, Matrix, Routes, States, experts, launch::launch, matrix::MemoryFor as _};
use crate::{
    config::{DeltaHeads, Heads},
    device::{Cache, DeltaNet, Device, Draw, HeadNorms, Norm, Places, Rope, Slots},
    error::{Error, Result, bail},
    experts::{ExpertWeights, ExpertsShape, GroupedGemm},
    forward::Stacked,
    kernels::{HEADS, THREADS, parts},
};

/// With more tokens, SiLU and the deltas of gate and up are one operation: a pass over gate and up that adds deltas
/// takes longer than SiLU itself. And deltas of the other layers follow their GEMM: with 1,024 tokens of 8 adapters,
/// one that adds to deltas written before it takes 2 % of the step longer. Neither depends on whether a token has an
/// adapter, so that base tokens have the same bits beside any others.
const MANY_TOKENS: usize = 512;

/// The ranks of few adapters: eight of rank 16.
const FEW_RANKS: usize = 128;

/// For the layers and for the head, after which values are copied to the host.
const STEPS_IN_FLIGHT: usize = 2;

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

impl<T: Element + DeviceRepr> Cuda<T> {
    /// `x Wᵀ`, with the columns of v if `stacked`.
    fn product(&self, x: &Matrix<T>, base: &Matrix<T>, stacked: bool) -> Result<Matrix<T>> {
        let mut y = self.output(x.rows, base, stacked)?;
        self.gemm.run(self.stream.get(), x, base, &mut y, 0.0)?;
        self.lets_next_start.set(false);
        Ok(y)
    }
}

impl<T: Element + DeviceRepr> Device for Cuda<T> {
    type Elem = T;
    type Tensor = Matrix<T>;
    type Weight = Matrix<T>;
    type Indices = Matrix<i32>;
    type Routes = Routes;
    type Draws = Draws;
    type States = States<T>;

    fn tensor(&self, rows: usize, cols: usize, values: &[T]) -> Result<Matrix<T>> {
        self.upload(rows, cols, values)
    }

    fn zeros(&self, rows: usize, cols: usize) -> Result<Matrix<T>> {
        self.zeroed(rows, cols)
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

    fn states(&self, sequences: usize, heads: DeltaHeads) -> Result<States<T>> {
        States::new(self, sequences, heads)
    }

    type Adapters = WeightTable;
    type Tiers = cuda::Tiers;
    type LoraLinear = Linear;
    type FusedLinear<'a> = Fused<'a, T>;
    type Stack = cuda::Stack;
    type LoraEmbedding = LoraEmbedding;
    type TrainedRows = TrainedRows;
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

    fn trained_rows(&self, adapters: &WeightTable, id: RowsId) -> Result<TrainedRows> {
        Ok(TrainedRows::new(adapters, id)?)
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

    /// With few tokens the deltas come first, and the GEMM adds to them: their kernel starts before the one in front of
    /// it has ended, and nothing starts early behind a GEMM of cuBLASLt. With many, a GEMM that adds to what its output
    /// holds takes longer.
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

    fn replace_embeddings(
        &self,
        rows: &TrainedRows,
        step: &mut cuda::Step<'_>,
        ids: &Matrix<i32>,
        y: &mut Matrix<T>,
    ) -> Result<()> {
        Ok(rows.replace_embeddings(step, ids.view(), y.operand_mut()?)?)
    }

    fn replace_logits(
        &self,
        rows: &TrainedRows,
        step: &mut cuda::Step<'_>,
        x: &Matrix<T>,
        y: &mut Matrix<T>,
    ) -> Result<()> {
        Ok(rows.replace_logits(step, x.operand()?, y.operand_mut()?)?)
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
        // SAFETY: in front of the activation and the combine is a grouped GEMM, which does not write the rows that it
        // multiplies, nor the routes. It starts early only in the kernels of `TENSOR`, all of whose blocks wait before
        // they let the next kernel start.
        Ok(Grouped { routes, grouped: unsafe { grouped.shrink_beside_base() } })
    }

    /// In one kernel where that is faster.
    fn activate(
        &self,
        layer: &LoraExperts,
        step: &mut cuda::Step<'_>,
        Grouped { routes, grouped }: &mut Grouped<'_, '_>,
        x: &Matrix<T>,
        mut gate_up: Matrix<T>,
    ) -> Result<Matrix<T>> {
        let mut out = self.alloc(gate_up.rows, gate_up.cols / 2)?;
        if layer.plan().gate_up().prefers_fused(gate_up.rows) {
            let (x, y) = (x.operand()?, gate_up.operand()?);
            layer.activate(step, grouped, x, y, out.operand_mut()?, Activation::Silu)?;
            routes.may_start_early.set(grouped.may_combine_beside_activation());
        } else {
            layer.add_gate_up_delta(step, grouped, x.operand()?, gate_up.operand_mut()?)?;
            self.silu_mul_into(&gate_up, Some(routes), &mut out)?;
        }
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

    /// In one kernel where that is faster.
    fn combine(
        &self,
        layer: &LoraExperts,
        step: &mut cuda::Step<'_>,
        Grouped { routes, grouped }: &mut Grouped<'_, '_>,
        x: &Matrix<T>,
        mut down: Matrix<T>,
    ) -> Result<Matrix<T>> {
        let mut out = self.alloc(routes.weights.rows, down.cols)?;
        if !layer.plan().down().prefers_fused(down.rows) {
            layer.add_down_delta(step, grouped, x.operand()?, down.operand_mut()?)?;
            self.combine_into(&down, routes, &mut out)?;
            return Ok(out);
        }
        if routes.started_early.replace(false) {
            // SAFETY: in front is the product of down, which started the kernel behind it at once, and in front of that
            // the activation.
            unsafe { grouped.combine_beside_activation() };
        }
        layer.combine(step, grouped, x.operand()?, down.operand()?, out.operand_mut()?)?;
        self.lets_next_start.set(true);
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

    fn rms_norm(&self, x: &Matrix<T>, norm: &Norm<Self>) -> Result<Matrix<T>> {
        self.normalize(x, None, norm)
    }

    fn add_rms_norm(&self, x: &mut Matrix<T>, y: &Matrix<T>, norm: &Norm<Self>) -> Result<Matrix<T>> {
        self.normalize(x, Some(y), norm)
    }

    fn without_gates(&self, qkv: &Matrix<T>, heads: Heads) -> Result<Matrix<T>> {
        let out = self.alloc(qkv.rows, heads.query_features() + 2 * heads.kv_features())?;
        let mut kernel = self.kernel(&self.functions.delta_net.without_gates);
        kernel.arg(&qkv.address).arg(&out.address).arg(&qkv.stride).arg(&heads.query).arg(&heads.kv).arg(&heads.dim);
        launch(kernel, out.rows, out.cols.div_ceil(THREADS as usize))?;
        Ok(out)
    }

    fn gate(&self, x: &mut Matrix<T>, gates: &Matrix<T>, heads: Option<Heads>) -> Result<()> {
        let dim = heads.map_or(0, |heads| heads.dim);
        let mut kernel = self.kernel(&self.functions.delta_net.gate);
        kernel.arg(&x.address).arg(&gates.address).arg(&x.cols).arg(&x.stride).arg(&gates.stride).arg(&dim);
        launch(kernel, x.rows, x.cols.div_ceil(THREADS as usize))
    }

    fn delta_net(
        &self,
        x: &Matrix<T>,
        net: &DeltaNet<Self>,
        places: &Places<Self>,
        states: &mut States<T>,
    ) -> Result<Matrix<T>> {
        states.run(self, x, net, places)
    }

    fn rotate_and_append(
        &self,
        qkv: &mut Matrix<T>,
        heads: Heads,
        HeadNorms { q, k }: &HeadNorms<Self>,
        rope: &Rope<Self>,
        places: &Places<Self>,
        cache: &mut Cache<Self>,
    ) -> Result<()> {
        let is_whole = 2 * rope.cos.cols == heads.dim && q.offset == 0.0;
        let mut kernel = self.consumer(&self.functions.rotate_and_append[usize::from(!is_whole)]);
        kernel.arg(&qkv.address).arg(&q.weight.address).arg(&k.weight.address);
        kernel.arg(&rope.cos.address).arg(&rope.sin.address).arg(&places.positions.address).arg(&places.rows.address);
        kernel.arg(&cache.keys.address).arg(&cache.values.address).arg(&qkv.stride);
        // Both norms have the same constants.
        kernel.arg(&heads.query).arg(&heads.kv).arg(&heads.dim).arg(&rope.cos.cols).arg(&q.eps).arg(&q.offset);
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
        let out = self.alloc(rows.rows, x.cols)?;
        let mut kernel = self.kernel(&self.functions.gather);
        kernel.arg(&x.address).arg(&rows.address).arg(&out.address).arg(&x.rows).arg(&out.cols);
        launch(kernel, rows.rows, parts(out.cols * size_of::<T>()))?;
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
