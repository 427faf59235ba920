use std::collections::BTreeMap;

use super::{ExpertsId, TpRank};

/// What one rank holds of a model, to be given to [`ModelSpec::shard`](super::ModelSpec::shard).
///
/// Ranks that only tensor parallelism tells apart need no more than their [`TpRank`], which converts to a shard.
///
/// ```
/// use aril::model::{Experts, ModelSpec, Shard, TpRank};
///
/// // Qwen3-30B-A3B on the second of four ranks, which share out the experts of a layer whole.
/// let mut spec = ModelSpec::new();
/// let id = spec.experts(Experts::new("model.layers.0.mlp.experts", 128, 2048, 768).top_k(8))?;
/// let model = spec.shard(Shard::new(TpRank::new(1, 4)?).experts_tp(TpRank::SINGLE).held(id, 32..64))?;
/// assert_eq!(model[id].held().len(), 32);
/// assert_eq!(model[id].gate_up().out_features(), 2 * 768);
/// # Ok::<(), aril::model::SpecError>(())
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
#[must_use]
pub struct Shard {
    pub(super) tp: TpRank,
    pub(super) experts_tp: TpRank,
    pub(super) held: BTreeMap<ExpertsId, Vec<usize>>,
}

impl Shard {
    /// The shard of a tensor-parallel rank: all experts of each layer, cut like the other layers.
    pub fn new(tp: TpRank) -> Self {
        Self { tp, experts_tp: tp, held: BTreeMap::new() }
    }

    /// The rank's place in the group that `inter` of the experts is cut for, if it is not the model's.
    #[doc(alias = "moe_tp")]
    pub fn experts_tp(mut self, tp: TpRank) -> Self {
        self.experts_tp = tp;
        self
    }

    /// The experts of a layer that the rank holds, if not all, in the order of the engine's local expert ids (expert parallelism).
    #[doc(alias = "expert_map")]
    pub fn held(mut self, layer: ExpertsId, experts: impl IntoIterator<Item = usize>) -> Self {
        self.held.insert(layer, experts.into_iter().collect());
        self
    }
}

impl From<TpRank> for Shard {
    fn from(tp: TpRank) -> Self {
        Self::new(tp)
    }
}
