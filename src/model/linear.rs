//! Linear layers: as the engine describes them, and as one rank holds them.

use std::ops::Range;

use super::{
    cut::{Cut, TpRank, cut},
    error::SpecError,
};

/// How tensor parallelism shards a linear layer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Parallel {
    /// Each rank holds a range of the output features: qkv, gate-up, `lm_head`.
    Column,
    /// Each rank holds the whole layer.
    Replicated,
    /// Each rank holds a range of the input features and computes a partial sum: o, down.
    Row,
}

/// Describes one linear layer to [`ModelSpec::linear`](super::ModelSpec::linear): its path, its input features and the modules
/// fused into its output.
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
    pub(super) module: String,
    pub(super) out_features: usize,
    /// Number of attention heads, which sharding must keep whole, and whether ranks may hold the same head.
    pub(super) heads: Option<(usize, Sharing)>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Sharing {
    None,
    Replicated,
}

impl Linear {
    /// A layer whose modules are children of `path` (`""` for a top-level module such as `lm_head`). `in_features` is unsharded.
    pub fn new(path: impl Into<String>, parallel: Parallel, in_features: usize) -> Self {
        Self { path: path.into(), parallel, in_features, slices: Vec::new(), fused: None }
    }

    /// Appends a module with `out_features` unsharded output features. Its columns follow those of the previous module.
    pub fn slice(self, module: impl Into<String>, out_features: usize) -> Self {
        self.push(module, out_features, None)
    }

    /// Appends a column-parallel module of `num_heads` heads with `head_dim` features each, such as q. Each rank holds whole heads.
    pub fn heads(self, module: impl Into<String>, num_heads: usize, head_dim: usize) -> Self {
        self.push(module, num_heads.saturating_mul(head_dim), Some((num_heads, Sharing::None)))
    }

    /// Appends a column-parallel module of key-value heads, such as k or v. With fewer heads than ranks, consecutive ranks hold the
    /// same head.
    pub fn kv_heads(self, module: impl Into<String>, num_heads: usize, head_dim: usize) -> Self {
        self.push(module, num_heads.saturating_mul(head_dim), Some((num_heads, Sharing::Replicated)))
    }

    /// Accepts adapters trained on the fused module of this name: one A for all slices, and one B whose rows are those of the
    /// slices in order.
    pub fn fused(mut self, module: impl Into<String>) -> Self {
        self.fused = Some(module.into());
        self
    }

    fn push(mut self, module: impl Into<String>, out_features: usize, heads: Option<(usize, Sharing)>) -> Self {
        self.slices.push(Slice { module: module.into(), out_features, heads });
        self
    }

    /// The full path of the module `name`.
    pub(super) fn module(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// The layer on rank `tp`.
    pub(super) fn shard(&self, tp: TpRank, first_entry: usize) -> Result<LinearSite, SpecError> {
        let input = if self.parallel == Parallel::Row { tp.size } else { 1 };
        let slices = self.slices.iter().map(|slice| {
            let module = self.module(&slice.module);
            let out_features = slice.cut(self.parallel, tp, &module)?;
            Ok(SliceSite { module, out_features })
        });
        Ok(LinearSite {
            in_features: cut(tp, &self.path, self.in_features, input)?,
            slices: slices.collect::<Result<_, _>>()?,
            first_entry,
        })
    }
}

impl Slice {
    fn cut(&self, parallel: Parallel, tp: TpRank, module: &str) -> Result<Cut, SpecError> {
        let shards = match (parallel, self.heads) {
            (Parallel::Row | Parallel::Replicated, _) => 1,
            (Parallel::Column, None) => tp.size,
            (Parallel::Column, Some((heads, Sharing::Replicated))) if tp.size.is_multiple_of(heads) => {
                tp.size.min(heads)
            }
            (Parallel::Column, Some((heads, _))) if heads.is_multiple_of(tp.size) => tp.size,
            (Parallel::Column, Some((heads, _))) => {
                return Err(SpecError::Heads { module: module.to_owned(), heads, size: tp.size });
            }
        };
        cut(tp, module, self.out_features, shards)
    }
}

/// A linear layer on one rank.
#[derive(Clone, Debug)]
pub struct LinearSite {
    pub(super) in_features: Cut,
    pub(super) slices: Vec<SliceSite>,
    pub(super) first_entry: usize,
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
}

/// One module of a linear layer on one rank.
#[derive(Clone, Debug)]
pub struct SliceSite {
    pub(super) module: String,
    pub(super) out_features: Cut,
}

impl SliceSite {
    /// Full path of the module, such as `model.layers.0.self_attn.q_proj`.
    pub fn module(&self) -> &str {
        &self.module
    }

    /// Output features on this rank.
    pub fn out_features(&self) -> usize {
        self.out_features.len
    }

    /// The rows of the module's unsharded base weight `[out, in]` that this rank holds.
    pub fn range(&self) -> Range<usize> {
        self.out_features.range()
    }
}
