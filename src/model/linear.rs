//! Linear layers: as the engine describes them, and as one rank holds them.

use std::ops::Range;

use super::{
    MAX_SLICES,
    cut::{Cut, Parallel, Part, Rows, TpRank, check_size, cut},
    error::SpecError,
};
use crate::sizes::product;

/// Describes one linear layer to [`ModelSpec::linear`](super::ModelSpec::linear): its path, its input features and the
/// modules fused into its output.
///
/// ```
/// use aril::model::{Linear, ModelSpec, Parallel, TpRank};
///
/// let mut spec = ModelSpec::new();
/// let qkv = Linear::new("model.layers.0.self_attn", Parallel::Column, 1024)
///     .heads("q_proj", 16, 128)
///     .kv_heads("k_proj", 8, 128)
///     .kv_heads("v_proj", 8, 128)
///     .fused("qkv_proj");
/// let qkv = spec.linear(qkv)?;
/// assert_eq!(spec.shard(TpRank::SINGLE)?[qkv].out_features(), 4096);
/// # Ok::<(), aril::model::SpecError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Linear {
    pub(super) path: String,
    pub(super) parallel: Parallel,
    pub(super) in_features: usize,
    pub(super) slices: Vec<Slice>,
    pub(super) fused: Option<String>,
}

/// One unsharded module of a linear layer.
#[derive(Clone, Debug)]
pub(super) struct Slice {
    module: String,
    parts: Vec<Part>,
}

impl Linear {
    /// A layer whose modules are children of `path` (`""` for a top-level module such as `lm_head`). `in_features` is
    /// unsharded.
    pub fn new(path: impl Into<String>, parallel: Parallel, in_features: usize) -> Self {
        Self { path: path.into(), parallel, in_features, slices: Vec::new(), fused: None }
    }

    /// Appends a module with `out_features` unsharded output features. Its columns follow those of the previous module.
    pub fn slice(self, module: impl Into<String>, out_features: usize) -> Self {
        self.merged(module, [Part::even(out_features)])
    }

    /// Appends a column-parallel module of `num_heads` heads with `head_dim` features each, such as q. Each rank holds
    /// whole heads.
    ///
    /// A q with an output gate (Qwen3-Next, Qwen3.5) has the features of each head's gate behind those of its query:
    /// its heads have twice the dimension.
    pub fn heads(self, module: impl Into<String>, num_heads: usize, head_dim: usize) -> Self {
        self.merged(module, [Part::heads(num_heads, head_dim)])
    }

    /// Appends a column-parallel module of key-value heads, such as k or v. With fewer heads than ranks, consecutive
    /// ranks hold the same head.
    pub fn kv_heads(self, module: impl Into<String>, num_heads: usize, head_dim: usize) -> Self {
        self.merged(module, [Part::kv_heads(num_heads, head_dim)])
    }

    /// Appends a module that every rank holds whole to a column-parallel layer, such as a low-rank projection or a gate
    /// that is computed together with sharded modules.
    pub fn replicated(self, module: impl Into<String>, out_features: usize) -> Self {
        self.merged(module, [Part::replicated(out_features)])
    }

    /// Appends a column-parallel module with one output for each of `vocab` token ids, such as `lm_head`, on ranks that
    /// split `padded` outputs evenly. Adapters have `vocab` rows, and the delta of the other outputs is zero.
    ///
    /// ```
    /// use aril::model::{Linear, ModelSpec, Parallel, TpRank};
    ///
    /// let mut spec = ModelSpec::new();
    /// let head = spec.linear(Linear::new("", Parallel::Column, 64).vocab("lm_head", 1000, 1024))?;
    /// let model = spec.shard(TpRank::new(3, 4)?)?;
    /// let last = &model[head].slices()[0];
    /// assert_eq!((last.out_features(), last.ranges()), (256, &[768..1000][..]));
    /// # Ok::<(), aril::model::SpecError>(())
    /// ```
    #[doc(alias = "VocabParallelEmbedding")]
    #[doc(alias = "ParallelLMHead")]
    pub fn vocab(self, module: impl Into<String>, vocab: usize, padded: usize) -> Self {
        self.merged(module, [Part::padded(vocab, padded)])
    }

    /// Appends a module whose output features are these parts, one after the other. Each part is sharded by its own
    /// rule, so that a rank's columns are its part of the first, then of the second, and so on.
    ///
    /// ```
    /// use aril::model::{Linear, ModelSpec, Parallel, Part, TpRank};
    ///
    /// // The gated delta net of Qwen3.5-35B-A3B, where one module has the heads of q, k and v.
    /// let mut spec = ModelSpec::new();
    /// let layer = Linear::new("model.layers.0.linear_attn", Parallel::Column, 2048)
    ///     .merged("in_proj_qkv", [Part::heads(16, 128), Part::heads(16, 128), Part::heads(32, 128)])
    ///     .heads("in_proj_z", 32, 128);
    /// let id = spec.linear(layer)?;
    /// let model = spec.shard(TpRank::new(1, 4)?)?;
    /// assert_eq!(model[id].slices()[0].ranges(), [512..1024, 2560..3072, 5120..6144]);
    /// assert_eq!(model[id].out_features(), 512 + 512 + 1024 + 1024);
    /// # Ok::<(), aril::model::SpecError>(())
    /// ```
    #[doc(alias = "MergedColumnParallelLinear")]
    pub fn merged(mut self, module: impl Into<String>, parts: impl IntoIterator<Item = Part>) -> Self {
        self.slices.push(Slice { module: module.into(), parts: parts.into_iter().collect() });
        self
    }

    /// Accepts adapters trained on the fused module of this name: one A for all slices, and one B whose rows are those
    /// of the slices in order.
    pub fn fused(mut self, module: impl Into<String>) -> Self {
        self.fused = Some(module.into());
        self
    }

    /// The full path of the module `name`.
    pub(super) fn module(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// Checks everything that does not depend on the rank, and returns the paths of all modules.
    pub(super) fn check(&self) -> Result<Vec<String>, SpecError> {
        let Self { path, parallel, in_features, slices, fused } = self;
        if slices.is_empty() || slices.len() > MAX_SLICES {
            return Err(SpecError::Slices { path: path.clone(), slices: slices.len() });
        }
        check_size(path, *in_features)?;
        let mut modules = Vec::with_capacity(slices.len() + 1);
        for slice in slices {
            let module = self.module(&slice.module);
            Part::check_all(&slice.parts, *parallel, &module)?;
            modules.push(module);
        }
        modules.extend(fused.as_ref().map(|name| self.module(name)));
        Ok(modules)
    }

    /// The layer on rank `tp`.
    pub(super) fn shard(
        &self,
        tp: TpRank,
        is_fully_sharded: bool,
        first_entry: usize,
    ) -> Result<LinearSite, SpecError> {
        let input = if self.parallel == Parallel::Row { tp.size } else { 1 };
        let collective = match self.parallel {
            Parallel::Column => Some(Collective::AllGather),
            Parallel::Replicated => None,
            Parallel::Row => Some(Collective::AllReduce),
        };
        let collective = collective.filter(|_| is_fully_sharded && tp.size > 1);
        let slices = self.slices.iter().map(|slice| {
            let module = self.module(&slice.module);
            let rows = Part::rows(&slice.parts, self.parallel, tp, &module)?;
            let deltas = if collective == Some(Collective::AllReduce) { tp.size } else { 1 };
            let delta = cut(tp, &module, rows.len, deltas)?;
            Ok(SliceSite { module, rows, delta })
        });
        Ok(LinearSite {
            in_features: cut(tp, &self.path, self.in_features, input)?,
            slices: slices.collect::<Result<_, _>>()?,
            exchange: collective.map(|collective| Exchange::new(collective, tp, self.slices.len())),
            first_entry,
        })
    }
}

/// A linear layer on one rank.
#[derive(Clone, Debug)]
pub struct LinearSite {
    in_features: Cut,
    slices: Vec<SliceSite>,
    exchange: Option<Exchange>,
    first_entry: usize,
}

impl LinearSite {
    /// Input features on this rank.
    pub fn in_features(&self) -> usize {
        self.in_features.len
    }

    /// The columns of the unsharded base weight `[out, in]` that this rank holds.
    pub fn in_range(&self) -> Range<usize> {
        self.in_features.range()
    }

    /// The exchange between shrink and expand, if the layer is [fully sharded](super::Shard::fully_sharded).
    pub fn exchange(&self) -> Option<Exchange> {
        self.exchange
    }

    /// The rows of A on this rank, for an adapter of rank `rank`.
    pub(crate) fn a_rows(&self, rank: usize) -> Range<usize> {
        self.exchange.map_or(0..rank, |exchange| exchange.a_rows(rank))
    }

    /// Input features of the unsharded layer.
    pub(crate) fn whole_in_features(&self) -> usize {
        self.in_features.whole
    }

    /// Output features on this rank, summed over all slices.
    pub fn out_features(&self) -> usize {
        self.slices.iter().map(SliceSite::out_features).sum()
    }

    /// The slices, in output order.
    pub fn slices(&self) -> &[SliceSite] {
        &self.slices
    }

    /// Descriptor-table entry of the first slice. Those of the other slices follow.
    pub fn first_entry(&self) -> usize {
        self.first_entry
    }

    /// The layer with this slice alone.
    pub(crate) fn with_slice(&self, index: usize) -> Option<Self> {
        let slices = vec![self.slices.get(index)?.clone()];
        Some(Self { slices, first_entry: self.first_entry + index, ..self.clone() })
    }
}

/// One module of a linear layer on one rank.
#[derive(Clone, Debug)]
pub struct SliceSite {
    module: String,
    rows: Rows,
    delta: Cut,
}

impl SliceSite {
    /// Full path of the module, such as `model.layers.0.self_attn.q_proj`.
    pub fn module(&self) -> &str {
        &self.module
    }

    /// Output features on this rank, with any padding.
    pub fn out_features(&self) -> usize {
        self.rows.len
    }

    /// The rows of the module's unsharded base weight `[out, in]` that this rank holds, in output order. The ranges
    /// ascend and are not adjacent. Padding follows them.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.rows.ranges
    }

    /// The outputs on this rank that its delta is added to: all of them, except in a
    /// [fully sharded](super::Shard::fully_sharded) row-parallel layer.
    pub fn delta_range(&self) -> Range<usize> {
        self.delta.range()
    }

    /// Output features of the unsharded module, without padding.
    pub(crate) fn whole_out_features(&self) -> usize {
        self.rows.whole
    }

    /// The rows of B on this rank.
    pub(crate) fn b_rows(&self) -> Rows {
        // Only in a row-parallel layer, where the rows are all outputs, is the delta's range a part of them.
        if self.delta.len == self.rows.len { self.rows.clone() } else { self.delta.into() }
    }
}

/// The exchange between the two halves of the delta in a [fully sharded](super::Shard::fully_sharded) layer: shrink
/// writes a part of `v = A x` to a buffer of the engine, the engine exchanges it with the other ranks, and expand reads
/// the result. All buffers are `f32`, row-major and contiguous.
///
/// | | column-parallel | row-parallel |
/// |---|---|---|
/// | A on a rank | rows `i·w..(i + 1)·w` of rank `i`, with `w = ⌈rank / ranks⌉` | its input columns |
/// | shrink writes | these rows of `v`: `[tokens, slices, ⌈max_rank / ranks⌉]` | a partial sum of `v`: `[tokens, slices, max_rank]` |
/// | the engine | gathers the buffers of all ranks, in their order | sums the buffers of all ranks |
/// | expand reads | `[ranks, tokens, slices, ⌈max_rank / ranks⌉]` | `[tokens, slices, max_rank]` |
/// | B on a rank | the rows of its outputs | an equal range of rows |
/// | expand adds to | all its columns of `y` | [these columns](super::SliceSite::delta_range) of its partial sum `y` |
///
/// `max_rank` is the table's, and `rank` the adapter's. Shrink writes zeros beyond the adapter's rank, and for tokens
/// without an adapter. The exchange is between all ranks: each takes part for every fully sharded layer of a step, or
/// none does, which all ranks can tell from the [batch](crate::routing::Batch::has_adapters). The engine's own
/// all-reduce of a row-parallel layer's `y` follows expand, as without full sharding.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Exchange {
    collective: Collective,
    tp: TpRank,
    slices: usize,
}

/// The collective operation of an [`Exchange`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Collective {
    /// Concatenates the buffers of all ranks, in their order.
    AllGather,
    /// Adds up the buffers of all ranks.
    AllReduce,
}

impl Exchange {
    pub(super) fn new(collective: Collective, tp: TpRank, slices: usize) -> Self {
        Self { collective, tp, slices }
    }

    /// What the engine does between shrink and expand.
    pub fn collective(&self) -> Collective {
        self.collective
    }

    /// Rows and columns of the buffer that shrink writes: the tokens, and the ranks of all slices. A size beyond
    /// `usize::MAX` is that.
    pub fn sent(&self, num_tokens: usize, max_rank: usize) -> [usize; 2] {
        [num_tokens, product(&[self.slices, self.width(max_rank)])]
    }

    /// Rows and columns of the buffer that expand reads: the rows of all ranks' buffers, or of their sum. A size beyond
    /// `usize::MAX` is that.
    pub fn received(&self, num_tokens: usize, max_rank: usize) -> [usize; 2] {
        let [rows, cols] = self.sent(num_tokens, max_rank);
        match self.collective {
            Collective::AllGather => [product(&[self.tp.size, rows]), cols],
            Collective::AllReduce => [rows, cols],
        }
    }

    /// This rank.
    #[cfg(feature = "cuda")]
    pub(crate) fn tp(&self) -> TpRank {
        self.tp
    }

    /// Elements of `v` that one rank computes for an adapter of rank `rank`.
    pub(crate) fn width(&self, rank: usize) -> usize {
        match self.collective {
            Collective::AllGather => rank.div_ceil(self.tp.size),
            Collective::AllReduce => rank,
        }
    }

    /// The rows of A on this rank.
    pub(super) fn a_rows(&self, rank: usize) -> Range<usize> {
        let (first, width) = match self.collective {
            Collective::AllGather => (self.tp.rank, self.width(rank)),
            Collective::AllReduce => (0, rank),
        };
        (first * width).min(rank)..((first + 1) * width).min(rank)
    }
}
