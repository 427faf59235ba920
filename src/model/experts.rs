//! The experts of a mixture-of-experts layer: as the engine describes them, and as one rank holds them.

use std::ops::Range;

use super::{
    cut::{Cut, TpRank, check_size, cut},
    error::SpecError,
};
use crate::sizes::{product, sum};

/// The order of gate and up within a fused gate-up weight or its output.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Halves {
    /// All gate features, then all up features.
    #[default]
    GateUp,
    /// All up features, then all gate features.
    UpGate,
    /// Gate and up features alternate, gate first (GPT-OSS).
    Interleaved,
}

/// The function between an expert's gate-up and down projections. [Ungated](Experts::ungated) experts apply it to `up`
/// alone.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Activation {
    /// `gelu(gate) · up`, with the error function: `gelu(x) = x · (1 + erf(x / √2)) / 2`.
    Gelu,
    /// `gelu(gate) · up`, with the tanh approximation: `gelu(x) = x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2`.
    GeluTanh,
    /// `max(gate, 0)² · up`. Nemotron-H uses it without a gate.
    Relu2,
    /// `silu(gate) · up`, with `silu(x) = x · sigmoid(x)`.
    Silu,
    /// `gate · sigmoid(alpha · gate) · (up + 1)`, after clamping `gate` to at most `limit` and `up` to
    /// `-limit..=limit`. Requires a gate.
    SwigluOai {
        /// Factor on the sigmoid's argument.
        alpha: f32,
        /// Clamp limit.
        limit: f32,
    },
}

impl Activation {
    /// The activation of GPT-OSS: `alpha` 1.702, `limit` 7.
    pub const GPT_OSS: Self = Self::SwigluOai { alpha: 1.702, limit: 7.0 };
}

/// Describes the experts of one layer to [`ModelSpec::experts`](super::ModelSpec::experts).
///
/// Each expert has a gate and an up projection of shape `[inter, hidden]` ([or up alone](Self::ungated)) and a down
/// projection of shape `[hidden, inter]`. The adapter determines which projections are adapted, their ranks, and
/// whether experts share factors. Which experts a rank holds, and which group shards `inter`, is set in its
/// [`Shard`](super::Shard).
///
/// The router is a [linear layer](super::Linear) of its own: a [replicated](super::Parallel::Replicated) one whose
/// outputs are the scores of all experts, such as
/// `Linear::new("model.layers.0.mlp", Parallel::Replicated, 2048).slice("gate", 128)`.
///
/// ```
/// use aril::model::{Experts, ModelSpec, TpRank};
///
/// // Qwen3-30B-A3B
/// let mut spec = ModelSpec::new();
/// let id = spec.experts(Experts::new("model.layers.0.mlp.experts", 128, 2048, 768).top_k(8))?;
/// let model = spec.shard(TpRank::new(1, 4)?)?;
/// assert_eq!(model[id].gate_up().out_features(), 2 * 768 / 4);
/// # Ok::<(), aril::model::SpecError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
#[doc(alias = "FusedMoE")]
pub struct Experts {
    path: String,
    num_experts: usize,
    hidden: usize,
    inter: usize,
    top_k: usize,
    gated: bool,
    halves: Halves,
    stored: Stored,
}

/// The layout of expert parameters in the checkpoint that adapters are trained on. PEFT's `target_parameters` adapters
/// use the same layout.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Stored {
    /// Order of gate and up within `gate_up_proj`.
    pub(crate) halves: Halves,
    /// Parameters are `[experts, in, out]` instead of `[experts, out, in]`.
    pub(crate) transposed: bool,
}

impl Experts {
    /// Experts at the module `path`, such as `model.layers.0.mlp.experts`. `num_experts`, `hidden` and `inter` are
    /// those of the whole layer, before any sharding.
    pub fn new(path: impl Into<String>, num_experts: usize, hidden: usize, inter: usize) -> Self {
        Self {
            path: path.into(),
            num_experts,
            hidden,
            inter,
            top_k: 0,
            gated: true,
            halves: Halves::default(),
            stored: Stored::default(),
        }
    }

    /// Sets the number of experts per token. The GPU operations require it.
    #[doc(alias = "num_experts_per_tok")]
    pub fn top_k(mut self, top_k: usize) -> Self {
        self.top_k = top_k;
        self
    }

    /// Removes the gate: experts compute `down(activation(up(x)))`.
    pub fn ungated(mut self) -> Self {
        self.gated = false;
        self
    }

    /// Sets the order of gate and up in the engine's gate-up output. The default is [`Halves::GateUp`].
    pub fn halves(mut self, halves: Halves) -> Self {
        self.halves = halves;
        self
    }

    /// Sets the order of gate and up in the checkpoint's `gate_up_proj`. The default is [`Halves::GateUp`].
    pub fn stored_halves(mut self, halves: Halves) -> Self {
        self.stored.halves = halves;
        self
    }

    /// Declares that the checkpoint's expert parameters are `[experts, in, out]` (GPT-OSS, Llama 4).
    #[doc(alias = "is_transposed")]
    pub fn stored_transposed(mut self) -> Self {
        self.stored.transposed = true;
        self
    }
}

/// The experts of one layer on one rank.
#[derive(Clone, Debug)]
pub struct ExpertsSite {
    num_experts: usize,
    top_k: usize,
    held: Vec<usize>,
    halves: Option<Halves>,
    stored: Stored,
    gate_up: ProjectionSite,
    down: ProjectionSite,
}

impl ExpertsSite {
    /// Experts of the whole layer, over all ranks.
    pub fn num_experts(&self) -> usize {
        self.num_experts
    }

    /// The largest number of experts per token; 0 if [`Experts::top_k`] was not called.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// The range of the whole `inter` that this rank holds: rows of each expert's gate and up weights, and columns of
    /// its down weight.
    pub fn inter_range(&self) -> Range<usize> {
        self.down.input.range()
    }

    /// The experts on this rank, indexed by local expert id.
    pub fn held(&self) -> &[usize] {
        &self.held
    }

    /// The order of gate and up in the output of [`gate_up`](Self::gate_up); `None` for ungated experts.
    pub fn halves(&self) -> Option<Halves> {
        self.halves
    }

    /// The projection before the activation. Its slices are gate and up in output order ([`Halves::Interleaved`]: gate
    /// first), or up alone.
    pub fn gate_up(&self) -> &ProjectionSite {
        &self.gate_up
    }

    /// The projection after the activation. It has one slice.
    pub fn down(&self) -> &ProjectionSite {
        &self.down
    }

    pub(crate) fn stored(&self) -> Stored {
        self.stored
    }

    /// Whether the experts support the activation: [`Activation::SwigluOai`] requires a gate.
    pub(crate) fn allows(&self, activation: Activation) -> bool {
        self.halves.is_some() || !matches!(activation, Activation::SwigluOai { .. })
    }

    /// The slice index of gate, if there is one, and of up.
    pub(crate) fn gate_and_up(&self) -> (Option<usize>, usize) {
        match self.halves {
            None => (None, 0),
            Some(Halves::GateUp | Halves::Interleaved) => (Some(0), 1),
            Some(Halves::UpGate) => (Some(1), 0),
        }
    }

    /// Descriptor-table entries of both projections.
    pub(super) fn num_entries(&self) -> usize {
        self.gate_up.num_entries + self.down.num_entries
    }
}

/// One projection (gate-up or down) of all experts on this rank.
///
/// It takes `(1 + held) * num_slices` descriptor-table entries: first one per slice for what all experts have in
/// common, then one per slice for each local expert.
///
/// - An expert's descriptor is complete: the addresses of A and B (shared or not), the rank and the scaling. Rank 0
///   means that the adapter does not adapt this expert.
/// - A shared descriptor holds the largest rank of the experts' modules, by which kernels size their work: a smaller
///   one is an error of the launch. Rank 0 means that the slot adapts no expert. It also holds the address of A if all
///   adapted experts have the same A, and likewise of B. Such a factor lets a kernel compute `A x` once per token, or
///   `B v` once per sum over a token's routes, without reading any expert's descriptor. Its scaling is always 1; each
///   expert's own descriptor holds the scaling.
#[derive(Clone, Debug)]
pub struct ProjectionSite {
    input: Cut,
    slices: Vec<ExpertSlice>,
    /// Whether the features of the slices alternate in the output.
    interleaved: bool,
    first_entry: usize,
    num_entries: usize,
}

/// One slice of a projection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct ExpertSlice {
    pub(crate) module: ExpertModule,
    pub(crate) output: Cut,
}

/// An expert's module, as PEFT's `target_modules` names it.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(crate) enum ExpertModule {
    Gate,
    Up,
    Down,
}

impl ProjectionSite {
    /// Input features on this rank.
    pub fn in_features(&self) -> usize {
        self.input.len
    }

    /// Output features on this rank, summed over all slices.
    pub fn out_features(&self) -> usize {
        self.slices.iter().map(|slice| slice.output.len).sum()
    }

    /// Number of slices in the output.
    pub fn num_slices(&self) -> usize {
        self.slices.len()
    }

    /// Descriptor-table entry of what the experts have in common in slice 0. Those of the other slices follow.
    pub fn shared_entry(&self) -> usize {
        self.first_entry
    }

    /// Descriptor-table entry of slice 0 of the expert with this local id. Those of the other slices follow. An id of
    /// no expert here has no entry of this projection.
    pub fn expert_entry(&self, local: usize) -> usize {
        sum([self.first_entry, self.slices.len(), product(&[local, self.slices.len()])])
    }

    pub(crate) fn input(&self) -> Cut {
        self.input
    }

    pub(crate) fn slices(&self) -> &[ExpertSlice] {
        &self.slices
    }

    /// First output column of a slice, and the distance between its columns.
    pub(crate) fn columns(&self, slice: usize) -> (usize, usize) {
        if self.interleaved { (slice, self.slices.len()) } else { (slice * self.slices[slice].output.len, 1) }
    }
}

impl Experts {
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Checks everything that does not depend on the rank.
    pub(super) fn check(&self) -> Result<(), SpecError> {
        let Self { path, num_experts, hidden, inter, .. } = self;
        if *num_experts == 0 || i32::try_from(*num_experts).is_err() {
            return Err(SpecError::Experts { path: path.clone(), num_experts: *num_experts });
        }
        check_size(path, *hidden)?;
        check_size(path, *inter)
    }

    /// The experts on rank `tp` of their group: all, or those in `held`.
    pub(super) fn shard(
        &self,
        tp: TpRank,
        held: Option<&[usize]>,
        first_entry: usize,
    ) -> Result<ExpertsSite, SpecError> {
        let held = match held {
            Some(held) => self.check_held(held)?.to_vec(),
            None => (0..self.num_experts).collect(),
        };
        let hidden = cut(tp, &self.path, self.hidden, 1)?;
        let inter = cut(tp, &self.path, self.inter, tp.size)?;
        let modules: &[ExpertModule] = match (self.gated, self.halves) {
            (false, _) => &[ExpertModule::Up],
            (true, Halves::GateUp | Halves::Interleaved) => &[ExpertModule::Gate, ExpertModule::Up],
            (true, Halves::UpGate) => &[ExpertModule::Up, ExpertModule::Gate],
        };
        let projection = |first_entry, input, modules: &[ExpertModule], output, interleaved| {
            let slices: Vec<_> = modules.iter().map(|&module| ExpertSlice { module, output }).collect();
            let num_entries = (1 + held.len()) * slices.len();
            ProjectionSite { input, slices, interleaved, first_entry, num_entries }
        };
        let interleaved = self.gated && self.halves == Halves::Interleaved;
        let gate_up = projection(first_entry, hidden, modules, inter, interleaved);
        let down = projection(first_entry + gate_up.num_entries, inter, &[ExpertModule::Down], hidden, false);
        Ok(ExpertsSite {
            num_experts: self.num_experts,
            top_k: self.top_k,
            halves: self.gated.then_some(self.halves),
            stored: self.stored,
            gate_up,
            down,
            held,
        })
    }

    /// Rejects an expert that is out of range or listed twice.
    fn check_held<'a>(&self, held: &'a [usize]) -> Result<&'a [usize], SpecError> {
        let num_experts = self.num_experts;
        let mut seen = vec![false; num_experts];
        for &expert in held {
            if seen.get_mut(expert).is_none_or(|seen| std::mem::replace(seen, true)) {
                return Err(SpecError::Held { path: self.path.clone(), expert, num_experts });
            }
        }
        Ok(held)
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::{Activation, ExpertModule, ExpertModule::*, Experts, Halves, Stored};
    use crate::model::{ModelSpec, TpRank};

    /// Gate and up by slice: where their modules, their columns and their activations are.
    #[test]
    fn gate_and_up_are_where_the_halves_say() {
        type Expected = (&'static [ExpertModule], (Option<usize>, usize), [(usize, usize); 2]);
        let cases: [(Option<Halves>, Expected); 4] = [
            (Some(Halves::GateUp), (&[Gate, Up], (Some(0), 1), [(0, 1), (6, 1)])),
            (Some(Halves::UpGate), (&[Up, Gate], (Some(1), 0), [(0, 1), (6, 1)])),
            (Some(Halves::Interleaved), (&[Gate, Up], (Some(0), 1), [(0, 2), (1, 2)])),
            (None, (&[Up], (None, 0), [(0, 1), (0, 1)])),
        ];
        for (halves, (modules, gate_and_up, columns)) in cases {
            let experts = Experts::new("m", 2, 4, 6);
            let experts = halves.map_or(experts.clone().ungated(), |halves| experts.halves(halves));
            let mut spec = ModelSpec::new();
            let id = spec.experts(experts.stored_halves(Halves::UpGate).stored_transposed()).unwrap();
            let model = spec.shard(TpRank::SINGLE).unwrap();
            let site = &model[id];
            let slices = site.gate_up().slices();
            assert_eq!(slices.iter().map(|slice| slice.module).collect::<Vec<_>>(), modules, "{halves:?}");
            assert_eq!(site.gate_and_up(), gate_and_up, "{halves:?}");
            for (slice, columns) in columns.into_iter().enumerate().take(slices.len()) {
                assert_eq!(site.gate_up().columns(slice), columns, "{halves:?}");
            }
            assert_eq!((site.down().slices()[0].module, site.down().columns(0)), (Down, (0, 1)));
            assert_eq!(site.stored(), Stored { halves: Halves::UpGate, transposed: true });
            assert!(site.allows(Activation::Silu));
            assert_eq!(site.allows(Activation::GPT_OSS), halves.is_some());
            assert_eq!(model.experts_at("m"), Some(id));
            assert_eq!(model.experts_at("other"), None);
        }
    }
}
