//! Errors of model descriptions.

use super::MAX_SLICES;

/// An invalid model description.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// A module is described twice.
    #[error("the module `{module}` is described twice")]
    Duplicate {
        /// Path of the module.
        module: String,
    },
    /// The number of experts is zero or exceeds `i32::MAX`.
    #[error("`{path}` has {num_experts} experts, but a layer must have 1 to 2147483647")]
    Experts {
        /// Path of the experts.
        path: String,
        /// The number of experts given.
        num_experts: usize,
    },
    /// The number of features is zero or exceeds `i32::MAX`.
    #[error("`{path}` has {features} features, but a layer must have 1 to 2147483647")]
    Features {
        /// Path of the layer or module.
        path: String,
        /// The number of features given.
        features: usize,
    },
    /// The shard, or a declaration of trained rows, refers to a layer of another model.
    #[error("a layer of another model is held by the shard, or has trained rows")]
    Foreign,
    /// A held expert is out of range or listed twice.
    #[error("expert {expert} of `{path}` is listed twice or is not below {num_experts}")]
    Held {
        /// Path of the experts.
        path: String,
        /// The expert index given.
        expert: usize,
        /// Experts of the whole layer.
        num_experts: usize,
    },
    /// The number of heads is not a multiple of the tensor-parallel group's size.
    #[error("`{module}` has {heads} heads, which cannot be split over {size} ranks")]
    Heads {
        /// Path of the module.
        module: String,
        /// Heads of the whole module.
        heads: usize,
        /// Ranks in the group.
        size: usize,
    },
    /// A layer is not a head whose rows are those of an embedding.
    #[error("the head of `{embedding}` {reason}")]
    NotHead {
        /// Path of the embedding.
        embedding: String,
        /// What the layer is instead.
        reason: &'static str,
    },
    /// A module with heads, replicated features or a padded vocabulary is in a layer that is not column-parallel.
    #[error("`{module}` has heads, replicated features or padding, but its layer is not column-parallel")]
    NotColumn {
        /// Path of the module.
        module: String,
    },
    /// The padded vocabulary is smaller than the vocabulary.
    #[error("`{module}` has a vocabulary of {vocab}, which cannot be padded to {padded}")]
    Padding {
        /// Path of the module.
        module: String,
        /// Rows of the vocabulary.
        vocab: usize,
        /// Rows given, with padding.
        padded: usize,
    },
    /// The layer has no slices, or more than [`MAX_SLICES`].
    #[error("the layer at `{path}` has {slices} slices, but must have 1 to {MAX_SLICES}")]
    Slices {
        /// Path of the layer.
        path: String,
        /// The number of slices given.
        slices: usize,
    },
    /// The rank is outside the tensor-parallel group.
    #[error("tensor-parallel rank {rank} must be below the group size {size}")]
    TpRank {
        /// The rank given.
        rank: usize,
        /// The group size given.
        size: usize,
    },
    /// The number of features is not a multiple of the number of shards.
    #[error("`{path}` has {features} features, which cannot be split into {shards} equal shards over {size} ranks")]
    Uneven {
        /// Path of the layer or module.
        path: String,
        /// Features of the whole dimension.
        features: usize,
        /// Shards to split it into.
        shards: usize,
        /// Ranks in the group.
        size: usize,
    },
}
