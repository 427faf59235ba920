use super::MAX_SLICES;

/// Why a model cannot be described so.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// The engine named a module twice.
    #[error("the module `{module}` is described twice")]
    Duplicate {
        /// The module's path.
        module: String,
    },
    /// The engine gave a number of experts that no layer has.
    #[error("`{path}` has {num_experts} experts; a layer has 1 to 2147483647")]
    Experts {
        /// The path of the experts.
        path: String,
        /// The number given.
        num_experts: usize,
    },
    /// The engine gave a size that no layer has.
    #[error("`{path}` has {features} features; a layer has 1 to 2147483647")]
    Features {
        /// The layer's or module's path.
        path: String,
        /// The size given.
        features: usize,
    },
    /// The shard holds experts of a layer of another description.
    #[error("the shard holds experts of a layer of another model")]
    Foreign,
    /// The shard holds an expert that does not exist, or twice.
    #[error("expert {expert} of `{path}` is held twice or not one of its {num_experts}")]
    Held {
        /// The path of the experts.
        path: String,
        /// The expert.
        expert: usize,
        /// Experts of the whole layer.
        num_experts: usize,
    },
    /// The engine's tensor-parallel group does not divide the heads of a layer.
    #[error("`{module}` has {heads} heads, which {size} ranks cannot share")]
    Heads {
        /// The module's path.
        module: String,
        /// Its whole heads.
        heads: usize,
        /// Ranks in the group.
        size: usize,
    },
    /// The engine gave heads to a layer whose output is whole on every rank.
    #[error("`{module}` has heads, which only the slices of a column-parallel layer have")]
    NotColumn {
        /// The module's path.
        module: String,
    },
    /// The engine fused no modules, or too many.
    #[error("the layer at `{path}` has {slices} slices; a layer has 1 to {MAX_SLICES}")]
    Slices {
        /// The layer's path.
        path: String,
        /// How many were given.
        slices: usize,
    },
    /// The engine gave a rank outside its tensor-parallel group.
    #[error("tensor-parallel rank {rank} is not below the group's size {size}")]
    TpRank {
        /// The rank given.
        rank: usize,
        /// The size given.
        size: usize,
    },
    /// The engine's tensor-parallel group does not divide a layer.
    #[error("`{path}` has {features} features, which cannot be cut in {shards} even shards over {size} ranks")]
    Uneven {
        /// The layer's or module's path.
        path: String,
        /// Its whole features.
        features: usize,
        /// Parts asked for.
        shards: usize,
        /// Ranks in the group.
        size: usize,
    },
}
