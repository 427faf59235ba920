//! The interface between the forward and a device: memory, the operations of a Qwen3 or Qwen3.5, and the library's
//! multi-LoRA operations.
//!
//! The trait is the example's own, so that one forward serves the CPU and the GPU. The library has no such trait, and
//! an engine needs none. Operations may return before they have run, except those that return values to the host.
//!
//! Every operation computes in `f32` and rounds to the element type at its end, and at the intermediate steps where
//! transformers does; each one documents these. Indices come from the forward and are in bounds.

use std::{borrow::Cow, ops::Range};

use aril::{
    Element, Slot,
    adapter::SlotImage,
    group::GroupPool,
    model::{EmbeddingId, ExpertsId, LinearId, Model, RowsId, TpRank},
    plan::{Capacity, RouteCapacity},
    pool::{AdapterPool, Backend, PoolConfig, Source},
};

use crate::{
    config::{DeltaHeads, Heads},
    error::Result,
    experts::{ExpertWeights, ExpertsShape, GroupedGemm},
    forward::Stacked,
    group::Rank,
};

/// The keys and values of one layer: `[rows, kv_features]` each, in blocks of rows that a [`BlockTable`] assigns to
/// sequences.
pub struct Cache<D: Device> {
    /// The keys.
    pub keys: D::Tensor,
    /// The values.
    pub values: D::Tensor,
}

/// The places of sequences: the cache rows of each, blocks of `block_rows` consecutive positions, each in consecutive
/// rows; and its state in gated delta nets.
#[derive(Clone, Debug, Default)]
pub struct BlockTable<I = Vec<u32>> {
    /// `[sequences, columns]`: the row of each block's first position. Blocks that a sequence does not have yet may
    /// hold any row.
    pub first_rows: I,
    /// Blocks of the longest sequence.
    pub columns: usize,
    /// Positions of a block.
    pub block_rows: u32,
    /// `[sequences]`: where each has its state.
    pub states: I,
}

impl BlockTable {
    /// The cache row of a position of a sequence.
    pub fn row(&self, sequence: u32, position: u32) -> u32 {
        let (block, row) = (position / self.block_rows, position % self.block_rows);
        self.first_rows[sequence as usize * self.columns + block as usize] + row
    }
}

/// Where each token of a step is: its position in its sequence, its sequence's row of the block table, and its own
/// cache row. The tokens of a sequence follow each other, in the order of their positions, and the rows of the sequences
/// ascend.
pub struct Places<D: Device> {
    /// The position in the sequence, from 0.
    pub positions: D::Indices,
    /// The row of the sequence in the block table.
    pub sequences: D::Indices,
    /// The cache row.
    pub rows: D::Indices,
    /// The block table of the sequences.
    pub table: BlockTable<D::Indices>,
    /// The tokens that are the only ones of their sequences, as in decoding; `None` if all are.
    pub alone: Option<D::Indices>,
}

/// A norm: `x / rms(x)`, rounded, times its weight, rounded. If something is added to the weight, which has fewer bits
/// than the sum, only the result is rounded.
pub struct Norm<D: Device> {
    /// `[1, cols]`
    pub weight: D::Tensor,
    /// Added to the weight: 1 in a Qwen3.5, 0 otherwise.
    pub(crate) offset: f32,
    /// Added to the mean square.
    pub(crate) eps: f32,
}

/// The norms of the heads of q and k, of `dim` features each.
pub struct HeadNorms<D: Device> {
    pub(crate) q: Norm<D>,
    pub(crate) k: Norm<D>,
}

/// The weights of a gated delta net beside its projections, and its heads on this rank.
pub struct DeltaNet<D: Device> {
    pub(crate) heads: DeltaHeads,
    /// Of the convolution: `[convolved features, taps]`.
    pub(crate) taps: D::Tensor,
    /// The logarithm of each value head's rate of decay: `[1, value heads]`.
    pub(crate) a_log: D::Tensor,
    /// Added to a of each value head: `[1, value heads]`.
    pub(crate) dt_bias: D::Tensor,
    /// Of a value head.
    pub(crate) norm: Norm<D>,
}

/// How a token is chosen from logits: `Draw` of `kernels/sampling.cuh`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Draw {
    /// Divides the logits. With 0, the token with the largest logit is chosen, the first of equals.
    pub temperature: f32,
    /// Only the most probable tokens that together have at least this probability.
    pub top_p: f32,
    /// Only this many of the most probable tokens, the first of equals; 0 for all.
    pub top_k: u64,
    /// In the unit interval without 1, which the tokens divide by their probabilities: the most probable first if
    /// `top_p` or `top_k` is a bound, in their order otherwise.
    pub place: f64,
}

impl Draw {
    /// The token with the largest logit.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, top_k: 0, place: 0.0 };
}

/// The cosines and sines of every position: `[positions, pairs]` each, of the pairs of a head that are rotated.
pub struct Rope<D: Device> {
    pub(crate) cos: D::Tensor,
    /// The sines.
    pub sin: D::Tensor,
}

/// What has the slots that a step's tokens name: a table, or the pool that fills its slots.
pub enum Slots<'a, D: Device> {
    /// A table that the program loads.
    Table(&'a D::Adapters),
    /// A pool on one device.
    Pool(&'a AdapterPool<D::Tiers>),
    /// A pool of the ranks of a group.
    Ranks(&'a GroupPool<Rank, D::Tiers>),
}

impl<D: Device> Clone for Slots<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Device> Copy for Slots<'_, D> {}

/// A device that the forward runs on, computing on one element type.
///
/// # Errors
///
/// An operation fails if the device has no memory for its result, or refuses or aborts a launch; one of several ranks
/// also if another rank has ended. The library's operations also refuse what their documentation says.
#[expect(clippy::missing_errors_doc, reason = "the trait has it, once for all operations")]
pub trait Device: Sized + 'static {
    /// The element type of activations.
    type Elem: Element;
    /// A row-major matrix of `Elem`.
    type Tensor;
    /// The weight of a linear layer, `[out, in]`, or of an embedding, `[vocab, hidden]`.
    type Weight;
    /// Positions, rows or token ids.
    type Indices;
    /// The experts that each token of a step chose in a layer, and the routes sorted by expert, which is the order of
    /// rows in matrices of routes. Routes to experts of other ranks have no rows; as many rows at the end belong to
    /// none.
    type Routes;
    /// The tokens that a step chose, on the device and on their way to the host.
    type Draws;
    /// What a gated delta net keeps of each sequence, at the place that a [`BlockTable`] names: the last inputs of its
    /// convolution, and a matrix `[key_dim, value_dim]` in `f32` for each value head.
    type States;

    /// A matrix of these values, row-major.
    fn tensor(&self, rows: usize, cols: usize, values: &[Self::Elem]) -> Result<Self::Tensor>;
    /// A matrix of zeros.
    fn zeros(&self, rows: usize, cols: usize) -> Result<Self::Tensor>;
    /// Takes a weight in parts that follow each other.
    fn weight(&self, rows: usize, cols: usize, parts: &[Cow<'_, [Self::Elem]>]) -> Result<Self::Weight>;
    /// The weights of one projection of all experts, to multiply with.
    fn experts(
        &self,
        shape: ExpertsShape,
        weights: ExpertWeights<'_, Self::Elem>,
    ) -> Result<Box<dyn GroupedGemm<Self>>>;
    /// Indices on the device.
    fn indices(&self, values: &[u32]) -> Result<Self::Indices>;
    /// States of so many sequences.
    fn states(&self, sequences: usize, heads: DeltaHeads) -> Result<Self::States>;

    // ---- Multi-LoRA: the library's types and operations, under its names.

    /// `aril::{cpu, cuda}::WeightTable`.
    type Adapters: Clone;
    /// `aril::{cpu, cuda}::Tiers`, of a pool.
    type Tiers: Backend<Source = Source, Weights = Self::Adapters> + 'static;
    /// `aril::{cpu, cuda}::LoraLinear`, or `FullyShardedLinear` with what the ranks exchange between its halves.
    type LoraLinear;
    /// `aril::cuda::FusedLinear`.
    type FusedLinear<'a>
    where
        Self: 'a;
    /// `aril::cuda::Stack`.
    type Stack;
    /// `aril::{cpu, cuda}::LoraEmbedding`.
    type LoraEmbedding;
    /// `aril::{cpu, cuda}::TrainedRows`.
    type TrainedRows;
    /// `aril::{cpu, cuda}::LoraExperts`.
    type LoraExperts;
    /// The memory of a step: its routing on the device, and the workspace of the operations.
    type Buffers;
    /// `aril::{cpu, cuda}::Step`: which adapter each token of a step has.
    type LoraStep<'a>;
    /// The memory of a layer's routes on the device, grouped by expert and adapter.
    type Grouping;
    /// The routes of a layer and the adapters of their tokens.
    type Grouped<'a, 's>;

    /// The bytes of an arena with room for these adapters.
    fn arena_bytes(images: &[SlotImage<'_>]) -> usize;
    /// An empty table with an arena of this size.
    fn adapters(&self, model: &Model, capacity: Capacity, arena_bytes: usize) -> Result<Self::Adapters>;
    /// Loads an adapter into a slot, and reports the bytes done.
    fn load(
        &self,
        adapters: &Self::Adapters,
        slot: usize,
        image: &SlotImage<'_>,
        progress: impl FnMut(usize),
    ) -> Result<Slot>;
    /// An empty pool, and the table whose slots it fills.
    fn pool(
        &self,
        model: &Model,
        capacity: Capacity,
        config: PoolConfig,
    ) -> Result<(AdapterPool<Self::Tiers>, Self::Adapters)>;
    /// The library's operations of a linear layer.
    fn lora_linear(&self, adapters: &Self::Adapters, id: LinearId) -> Result<Self::LoraLinear>;
    /// The layer with its base weight, whose rows are those of the layer's slices; `None` if there is no fast kernel
    /// for it.
    fn fused_linear<'a>(
        &self,
        adapters: &Self::Adapters,
        id: LinearId,
        base: &'a Self::Weight,
    ) -> Result<Option<Self::FusedLinear<'a>>>;
    /// Whether one launch of base weights and adapters is faster than a GEMM and a delta, with so many tokens of few
    /// adapters.
    fn is_fastest_fused(&self, layer: &Self::LoraLinear, fused: &Self::FusedLinear<'_>, tokens: usize) -> bool;
    /// A stack for so many adapters of so high a rank in these layers, whose base weights get its rows; `None` if the
    /// device has none.
    fn stack<'a>(
        &self,
        _adapters: &Self::Adapters,
        _bounds: (usize, usize),
        _layers: impl Iterator<Item = (&'a mut Self::Weight, LinearId, &'a Self::LoraLinear)>,
    ) -> Result<Option<Self::Stack>>
    where
        Self::Weight: 'a,
        Self::LoraLinear: 'a,
    {
        Ok(None)
    }
    /// Whether a layer with so many tokens, whatever their adapters, is fastest with the stack, if not as its fused
    /// linear.
    fn is_fastest_stacked(&self, layer: &Self::LoraLinear, stack: &Self::Stack, tokens: usize) -> bool;
    /// Brings the adapters of a step into the stack, and returns whether there is room for them.
    fn place(&self, stack: &mut Self::Stack, step: &mut Self::LoraStep<'_>) -> Result<bool>;
    /// Those of an embedding.
    fn lora_embedding(&self, adapters: &Self::Adapters, id: EmbeddingId) -> Result<Self::LoraEmbedding>;
    /// Those of trained rows.
    fn trained_rows(&self, adapters: &Self::Adapters, id: RowsId) -> Result<Self::TrainedRows>;
    /// Those of the experts of a layer.
    fn lora_experts(&self, adapters: &Self::Adapters, id: ExpertsId) -> Result<Self::LoraExperts>;
    /// Buffers for any step on these adapters.
    fn buffers(&self, adapters: &Self::Adapters) -> Result<Self::Buffers>;
    /// Takes one slot, and one factor on its adapter's scaling, per token. A pool's slots have leases, and change after
    /// the step.
    fn lora_step<'a>(
        &self,
        adapters: Slots<'a, Self>,
        buffers: &'a mut Self::Buffers,
        slots: &'a [Slot],
        scales: &'a [f32],
    ) -> Result<Self::LoraStep<'a>>;
    /// [`gemm`](Self::gemm) and the deltas: `y[t] = x[t] Wᵀ + scale · scaling · B (A x[t])`. All ranks take part if the
    /// layer is fully sharded.
    fn gemm_with_deltas(
        &self,
        x: &Self::Tensor,
        layer: (&Self::Weight, &Self::LoraLinear),
        step: &mut Self::LoraStep<'_>,
        stacked: Stacked<'_, Self>,
    ) -> Result<Self::Tensor>;
    /// `y[t] = x[t] Wᵀ + scale · scaling · B (A x[t])`, rounded once.
    fn forward(
        &self,
        layer: &Self::FusedLinear<'_>,
        step: &mut Self::LoraStep<'_>,
        x: &Self::Tensor,
    ) -> Result<Self::Tensor>;
    /// [`silu_mul`](Self::silu_mul) of [`gemm`](Self::gemm) plus the deltas of a layer of gate and up, rounded once, if
    /// the step has a stack or so many rows that one operation of the library is faster than two. Whether there is such
    /// an operation does not depend on the step's adapters.
    fn gate_up_of_many(
        &self,
        _x: &Self::Tensor,
        _layer: (&Self::Weight, &Self::LoraLinear),
        _step: &mut Self::LoraStep<'_>,
        _stacked: Stacked<'_, Self>,
    ) -> Result<Option<Self::Tensor>> {
        Ok(None)
    }
    /// `y[t] += scale · scaling · B A[:, ids[t]]`, rounded once.
    fn add_embedding_delta(
        &self,
        layer: &Self::LoraEmbedding,
        step: &mut Self::LoraStep<'_>,
        ids: &Self::Indices,
        y: &mut Self::Tensor,
    ) -> Result<()>;
    /// `y[t] = R[ids[t]]` of the tokens whose adapters have trained such a row.
    fn replace_embeddings(
        &self,
        rows: &Self::TrainedRows,
        step: &mut Self::LoraStep<'_>,
        ids: &Self::Indices,
        y: &mut Self::Tensor,
    ) -> Result<()>;
    /// `y[t, id] = x[t] · R[id]`, rounded once, of the rows of the head that the tokens' adapters have trained.
    fn replace_logits(
        &self,
        rows: &Self::TrainedRows,
        step: &mut Self::LoraStep<'_>,
        x: &Self::Tensor,
        y: &mut Self::Tensor,
    ) -> Result<()>;
    /// What groups the routes of a step, within these bounds.
    fn grouping(&self, capacity: RouteCapacity) -> Result<Self::Grouping>;
    /// Sets the choices of a layer's router.
    fn group<'a, 's: 'a>(
        &self,
        grouping: &'a mut Self::Grouping,
        step: &mut Self::LoraStep<'s>,
        routes: &'a Self::Routes,
    ) -> Result<Self::Grouped<'a, 's>>;
    /// `silu(gate) · up` of every route. Gate and up are the base model's `gate_up` plus the adapter's delta for the
    /// expert, `scale · scaling · B (A x[t])`. One operation of the library does all of it and rounds once. With many
    /// routes, the GPU adds the delta first and then runs [`silu_mul`](Self::silu_mul).
    fn activate(
        &self,
        layer: &Self::LoraExperts,
        step: &mut Self::LoraStep<'_>,
        routes: &mut Self::Grouped<'_, '_>,
        x: &Self::Tensor,
        gate_up: Self::Tensor,
    ) -> Result<Self::Tensor>;
    /// The weighted sum over a token's routes of the base model's `down` plus the adapter's delta for the expert,
    /// `scale · scaling · B (A x[route])`. Rounded once; with many routes, the GPU also rounds after adding the delta.
    fn combine(
        &self,
        layer: &Self::LoraExperts,
        step: &mut Self::LoraStep<'_>,
        routes: &mut Self::Grouped<'_, '_>,
        x: &Self::Tensor,
        down: Self::Tensor,
    ) -> Result<Self::Tensor>;

    // ---- The model: the example's own operations.

    /// A layer's experts in a step without adapters, with the bits of [`activate`](Self::activate) and
    /// [`combine`](Self::combine), if there are faster kernels. `x` has a row for each token.
    fn experts_without_adapters(
        &self,
        _layer: &Self::LoraExperts,
        _x: &Self::Tensor,
        _routes: &Self::Routes,
        _gate_up: &dyn GroupedGemm<Self>,
        _down: &dyn GroupedGemm<Self>,
    ) -> Result<Option<Self::Tensor>> {
        Ok(None)
    }

    /// Indices that are lower by `first`. They may be negative, in two's complement.
    fn subtract(&self, indices: &Self::Indices, first: u32) -> Result<Self::Indices>;
    /// Row `ids[t]` of the table for each token; zeros if it has no such row.
    fn embed(&self, table: &Self::Weight, ids: &Self::Indices) -> Result<Self::Tensor>;
    /// `x Wᵀ`, rounded once.
    fn gemm(&self, x: &Self::Tensor, weight: &Self::Weight, stacked: Stacked<'_, Self>) -> Result<Self::Tensor>;
    /// The norm of each row.
    fn rms_norm(&self, x: &Self::Tensor, norm: &Norm<Self>) -> Result<Self::Tensor>;
    /// `x += y`, rounded, and [`rms_norm`](Self::rms_norm) of it.
    fn add_rms_norm(&self, x: &mut Self::Tensor, y: &Self::Tensor, norm: &Norm<Self>) -> Result<Self::Tensor>;
    /// q, k and v, dense, of a projection whose queries have gates behind them.
    fn without_gates(&self, qkv: &Self::Tensor, heads: Heads) -> Result<Self::Tensor>;
    /// `x` times the sigmoid of its gate, rounded, rounded. The gates are those behind the queries of a projection with
    /// these heads, or one of each row.
    fn gate(&self, x: &mut Self::Tensor, gates: &Self::Tensor, heads: Option<Heads>) -> Result<()>;
    /// A gated delta net behind its projection, whose rows are q, k, v, z, b and a. It takes a sequence from the state
    /// that it is in, and from none at position 0, and leaves the state behind its last token.
    ///
    /// q, k and v are convolved over the last `taps` tokens, rounded, and `x · sigmoid(x)` of that is rounded. The
    /// rest is in `f32` for each value head, with q and k of its key head divided by their lengths, and q by
    /// `√key_dim`: the state `S` decays by `exp(-exp(a_log) · softplus(a + dt_bias))`, then `S += k (β (v - Sᵀ k))ᵀ`
    /// with `β = sigmoid(b)`, rounded, and `Sᵀ q`, rounded, goes through the norm, times `z · sigmoid(z)`, rounded.
    fn delta_net(
        &self,
        x: &Self::Tensor,
        net: &DeltaNet<Self>,
        places: &Places<Self>,
        states: &mut Self::States,
    ) -> Result<Self::Tensor>;
    /// [`rms_norm`](Self::rms_norm) of each head of q and k; then the rotation of the pairs `(i, i + n)` of its first
    /// `2 n` features by its token's `n` angles, both products rounded, then their sum; then the copy of k and v to the
    /// token's row of the cache. Of `qkv`, only q is used afterwards.
    fn rotate_and_append(
        &self,
        qkv: &mut Self::Tensor,
        heads: Heads,
        norms: &HeadNorms<Self>,
        rope: &Rope<Self>,
        places: &Places<Self>,
        cache: &mut Cache<Self>,
    ) -> Result<()>;
    /// Each query's attention over the cache, from its sequence's first token to its own, as transformers' `eager`
    /// computes it: `q·k` is rounded, times `1/√dim` is rounded, their softmax (in `f32`) is rounded, and so is the sum
    /// of the values.
    ///
    /// The GPU computes it as transformers' `flash_attention_2` does, in 16 bits with heads of 32, 64 or 128 features
    /// and groups of up to 16 queries: only the powers of the softmax are rounded, before they meet the values, and the
    /// result.
    fn attention(
        &self,
        qkv: &Self::Tensor,
        heads: Heads,
        places: &Places<Self>,
        cache: &Cache<Self>,
    ) -> Result<Self::Tensor>;
    /// `silu(gate)`, rounded, times `up`, rounded: rows hold the gates before the ups.
    fn silu_mul(&self, gate_up: &Self::Tensor) -> Result<Self::Tensor>;
    /// The `top_k` experts of each token whose scores are the largest, the first of equals, and their weights: the
    /// softmax (in `f32`, over all experts), divided by its sum over the chosen experts if `normalized`, rounded.
    /// Scores are `x routerᵀ`, rounded, or [`gemm_with_deltas`](Self::gemm_with_deltas) in a step with adapters. Only
    /// routes to experts in `held` have rows.
    fn choose_experts(
        &self,
        x: &Self::Tensor,
        router: (&Self::Weight, &Self::LoraLinear),
        adapted: Option<&mut Self::LoraStep<'_>>,
        top_k_and_normalized: (usize, bool),
        held: Range<usize>,
    ) -> Result<Self::Routes>;
    /// The row of `x` of each route's token, in the order of the routes' rows, and rows of zeros for the routes that
    /// have none.
    fn rows_of_routes(&self, x: &Self::Tensor, routes: &Self::Routes) -> Result<Self::Tensor>;
    /// `y += x`, rounded.
    fn add(&self, y: &mut Self::Tensor, x: &Self::Tensor) -> Result<()>;
    /// The rows of `x` with these indices.
    fn gather(&self, x: &Self::Tensor, rows: &Self::Indices) -> Result<Self::Tensor>;

    /// Room for the tokens of up to `rows` rows of logits.
    fn draws(&self, rows: usize) -> Result<Self::Draws>;
    /// Chooses a token by each row of logits. Probabilities are in `f64` on the CPU and in `f32` on the GPU, where
    /// their sums are exact.
    fn draw(&self, logits: &Self::Tensor, draws: &[Draw], drawn: &mut Self::Draws) -> Result<()>;
    /// Overwrites each id that has a source, a row of logits, with the token chosen there, or with 0 if none was. A
    /// source is negative for ids that stay.
    fn take_drawn(&self, ids: &mut Self::Indices, sources: &[i32], drawn: &Self::Draws) -> Result<()>;

    // ---- Between the ranks of a tensor-parallel group, which call the same operations in the same order.
    // A single rank changes nothing.

    /// The device's rank.
    fn tp(&self) -> TpRank;
    /// The sum of `y` over all ranks, rounded once for each rank at most. It is bit-identical on all ranks.
    fn all_reduce(&self, y: &mut Self::Tensor) -> Result<()>;
    /// The first `cols` of the columns of all ranks, which have equally many, side by side.
    fn all_gather(&self, x: Self::Tensor, cols: usize) -> Result<Self::Tensor>;

    // ---- To the host.

    /// The token chosen by each row of logits, `None` if one is NaN; and its log-probability in the model, without
    /// temperature and bounds. Does not wait for work that was enqueued after the draw.
    fn drawn(&self, drawn: &mut Self::Draws) -> Result<Vec<(Option<u32>, f32)>>;
    /// All elements of a matrix, row by row.
    fn read(&self, x: &Self::Tensor) -> Result<Vec<f32>>;
}
