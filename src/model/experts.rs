//! The experts of a mixture-of-experts layer: as the model has them, and as one rank holds them.

use std::ops::Range;

use super::{
    cut::{Cut, TpRank, check_size, cut},
    error::SpecError,
};

/// How gate and up stand in the rows of a weight, or the features of an output, that has both.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Halves {
    /// All of gate, then all of up.
    #[default]
    GateUp,
    /// All of up, then all of gate.
    UpGate,
    /// Gate and up in turn, gate first: GPT-OSS.
    Interleaved,
}

/// What experts compute between their gate and up and their down. What is said of a gate is true of up where there is
/// [none](Experts::ungated).
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Activation {
    /// `gelu(gate) · up`, by the error function: `gate · (1 + erf(gate / √2)) / 2 · up`.
    Gelu,
    /// `gelu(gate) · up`, approximately: `gate · (1 + tanh(√(2/π) (gate + 0.044715 gate³))) / 2 · up`.
    GeluTanh,
    /// `max(gate, 0)² · up`: Nemotron-H, without a gate.
    Relu2,
    /// `silu(gate) · up`: `gate · sigmoid(gate) · up`.
    Silu,
    /// `gate · sigmoid(alpha · gate) · (up + 1)`, of `gate` up to `limit` and `up` from `-limit` to `limit`. Only with a gate.
    SwigluOai {
        /// What the gate is multiplied by in the sigmoid.
        alpha: f32,
        /// Where gate and up end.
        limit: f32,
    },
}

impl Activation {
    /// That of GPT-OSS.
    pub const GPT_OSS: Self = Self::SwigluOai { alpha: 1.702, limit: 7.0 };
}

/// The experts of one layer, to be described to [`ModelSpec::experts`](super::ModelSpec::experts).
///
/// Each has a gate and an up (or [only an up](Self::ungated)), `[inter, hidden]`, and a down, `[hidden, inter]`. Which of them an
/// adapter has, with which ranks, and whether experts have factors of their own or share one, is the adapter's. Which of them a rank
/// holds, and in which group they are cut, is its [`Shard`](super::Shard)'s.
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

/// How the model's checkpoint has the parameters that hold all experts. Adapters of such parameters follow it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Stored {
    /// The order within gate_up.
    pub(crate) halves: Halves,
    /// `[experts, in, out]` instead of `[experts, out, in]`.
    pub(crate) transposed: bool,
}

impl Experts {
    /// Names the module that the experts are in, such as `model.layers.0.mlp.experts`, how many the whole model has in it, and
    /// their whole, unsharded features.
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

    /// The most experts that the router chooses for a token. The GPU's operations need it.
    #[doc(alias = "num_experts_per_tok")]
    pub fn top_k(mut self, top_k: usize) -> Self {
        self.top_k = top_k;
        self
    }

    /// Experts without a gate: `down(activation(up(x)))`.
    pub fn ungated(mut self) -> Self {
        self.gated = false;
        self
    }

    /// How gate and up stand in what the engine computes, if not gate first.
    pub fn halves(mut self, halves: Halves) -> Self {
        self.halves = halves;
        self
    }

    /// How gate and up stand in the gate_up of the checkpoint that adapters are trained on, if not gate first.
    pub fn stored_halves(mut self, halves: Halves) -> Self {
        self.stored.halves = halves;
        self
    }

    /// The checkpoint that adapters are trained on has parameters `[experts, in, out]`: GPT-OSS, Llama 4.
    #[doc(alias = "is_transposed")]
    pub fn stored_transposed(mut self) -> Self {
        self.stored.transposed = true;
        self
    }
}

/// The experts of one layer as this rank holds them.
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
    /// Experts of the whole model's layer.
    pub fn num_experts(&self) -> usize {
        self.num_experts
    }

    /// The most experts that the router chooses for a token; 0 if it was not described.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// The features between gate-up and down that this rank holds, of the whole `inter`: the rows of each expert's gate and up, and
    /// the columns of its down.
    pub fn inter_range(&self) -> Range<usize> {
        self.down.input.range()
    }

    /// The experts that this rank holds, by local expert id.
    pub fn held(&self) -> &[usize] {
        &self.held
    }

    /// How gate and up stand in the output of [`gate_up`](Self::gate_up); none if there is no gate.
    pub fn halves(&self) -> Option<Halves> {
        self.halves
    }

    /// What is before the activation: the slices gate and up, in the order of the output ([`Halves::Interleaved`]: gate first), or
    /// up alone.
    pub fn gate_up(&self) -> &ProjectionSite {
        &self.gate_up
    }

    /// What is after the activation: one slice.
    pub fn down(&self) -> &ProjectionSite {
        &self.down
    }

    pub(crate) fn stored(&self) -> Stored {
        self.stored
    }

    /// Whether the experts have what the activation needs: [`Activation::SwigluOai`] needs a gate.
    pub(crate) fn allows(&self, activation: Activation) -> bool {
        self.halves.is_some() || !matches!(activation, Activation::SwigluOai { .. })
    }

    /// The slice of gate, if there is one, and that of up.
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

/// One projection of all experts, before or after the activation.
///
/// Its descriptor-table entries are those of what all experts share, one for each slice, then, for each expert that the rank holds,
/// those of the expert, one for each slice: together `(1 + held) * slices`.
///
/// - An expert's descriptor is complete: where A and B are (those that it shares with the others, too), the rank, the scaling.
///   Rank 0: the adapter has nothing for this expert.
/// - What is shared has the address of A if it is the same for all experts that the adapter has, of B likewise, and their rank.
///   Rank 0: nothing is shared. A kernel finds there, without knowing an expert, that `A x` is to be computed once for a token, or
///   `B v` once for the sum of a token's routes. Its scaling is 1: each expert has its own.
#[derive(Clone, Debug)]
pub struct ProjectionSite {
    input: Cut,
    slices: Vec<ExpertSlice>,
    /// Whether the slices stand in turn in the output, feature by feature.
    interleaved: bool,
    first_entry: usize,
    num_entries: usize,
}

/// One module of a projection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct ExpertSlice {
    pub(crate) module: ExpertModule,
    pub(crate) output: Cut,
}

/// What PEFT's `target_modules` would name of an expert.
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

    /// Output features on this rank, over all slices.
    pub fn out_features(&self) -> usize {
        self.slices.iter().map(|slice| slice.output.len).sum()
    }

    /// Modules side by side in the output.
    pub fn num_slices(&self) -> usize {
        self.slices.len()
    }

    /// The descriptor-table entry of what all experts share of the first slice; the others follow it.
    pub fn shared_entry(&self) -> usize {
        self.first_entry
    }

    /// The descriptor-table entry of the first slice of an expert, by its local id; the others follow it.
    pub fn expert_entry(&self, local: usize) -> usize {
        self.first_entry + (1 + local) * self.slices.len()
    }

    pub(crate) fn input(&self) -> Cut {
        self.input
    }

    pub(crate) fn slices(&self) -> &[ExpertSlice] {
        &self.slices
    }

    /// Where a slice begins in the output, and how far apart its features are.
    pub(crate) fn columns(&self, slice: usize) -> (usize, usize) {
        if self.interleaved { (slice, self.slices.len()) } else { (slice * self.slices[slice].output.len, 1) }
    }
}

impl Experts {
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Refuses what is wrong on every rank.
    pub(super) fn check(&self) -> Result<(), SpecError> {
        let Self { path, num_experts, hidden, inter, .. } = self;
        if *num_experts == 0 || i32::try_from(*num_experts).is_err() {
            return Err(SpecError::Experts { path: path.clone(), num_experts: *num_experts });
        }
        check_size(path, *hidden)?;
        check_size(path, *inter)
    }

    /// The experts as rank `tp` of their group holds them: all, or those given.
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

    /// Refuses to hold an expert that does not exist, or one twice.
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
