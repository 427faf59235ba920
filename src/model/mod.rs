//! The layers of a model that adapters adapt.
//!
//! A [`ModelSpec`] describes the whole model once. [`ModelSpec::shard`] freezes the description as one rank runs it:
//! a [`Model`] gives every adapted module (in PEFT's sense: what `target_modules` names) a row of the descriptor table, and says which
//! part of the module's factors, and of its base weight, the rank holds. Neither knows of adapters or devices.
//!
//! ```
//! use aril::model::{Linear, ModelSpec, Parallel, TpRank};
//!
//! let mut spec = ModelSpec::new();
//! let qkv = Linear::new("model.layers.0.self_attn", Parallel::Column, 1024).heads("q_proj", 16, 128);
//! let qkv = spec.linear(qkv.kv_heads("k_proj", 2, 128).kv_heads("v_proj", 2, 128))?;
//!
//! // Rank 3 of 4: four of the heads of q, and one of k and of v, which rank 2 holds, too.
//! let model = spec.shard(TpRank::new(3, 4)?)?;
//! let [q, k, v] = model[qkv].slices() else { unreachable!() };
//! assert_eq!(q.range(), 12 * 128..16 * 128);
//! assert_eq!((k.range(), v.range()), (128..256, 128..256));
//! # Ok::<(), aril::model::SpecError>(())
//! ```
//!
//! Invariant: every entry is of one module (or of the factors that the experts of a layer share), and no two entries are of the same.

mod cut;
mod error;
mod experts;
mod linear;
mod shard;
mod spec;

pub use self::{
    cut::TpRank,
    error::SpecError,
    experts::{Activation, Experts, ExpertsSite, Halves, ProjectionSite},
    linear::{Linear, LinearSite, Parallel, SliceSite},
    shard::{EmbeddingId, EmbeddingSite, ExpertsId, LinearId, Model, Shard},
    spec::ModelSpec,
};
pub(crate) use self::{
    experts::{ExpertModule, ExpertSlice},
    shard::{ModelId, Target},
};
use crate::ffi;

/// The most slices that one layer may fuse.
pub const MAX_SLICES: usize = ffi::ARIL_MAX_SLICES as usize;

/// The largest rank of a factor.
pub const MAX_RANK: usize = ffi::ARIL_MAX_RANK as usize;
