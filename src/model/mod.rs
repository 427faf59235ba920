//! The layers that adapters may adapt.
//!
//! A [`ModelSpec`] describes the whole model once. [`ModelSpec::shard`] turns it into the immutable [`Model`] of one
//! tensor-parallel rank. The model assigns each adapted module (in the sense of PEFT's `target_modules`) an entry of
//! the descriptor table, and knows which part of the module's factors and base weight the rank holds. It knows nothing
//! of adapters or devices.
//!
//! ```
//! use aril::model::{Linear, ModelSpec, Parallel, TpRank};
//!
//! let mut spec = ModelSpec::new();
//! let qkv = Linear::new("model.layers.0.self_attn", Parallel::Column, 1024).heads("q_proj", 16, 128);
//! let qkv = spec.linear(qkv.kv_heads("k_proj", 2, 128).kv_heads("v_proj", 2, 128))?;
//!
//! // Rank 3 of 4: four of the heads of q, and one of k and v, which rank 2 also holds.
//! let model = spec.shard(TpRank::new(3, 4)?)?;
//! let [q, k, v] = model[qkv].slices() else { unreachable!() };
//! assert_eq!(q.ranges(), [12 * 128..16 * 128]);
//! assert_eq!((k.ranges(), v.ranges()), (&[128..256][..], &[128..256][..]));
//! # Ok::<(), aril::model::SpecError>(())
//! ```
//!
//! Invariant: each entry belongs to one module, or to the factors that a layer's experts share, and each module has its
//! own entry.

mod cut;
mod embedding;
mod error;
mod experts;
mod linear;
mod rows;
mod shard;
mod spec;

pub(crate) use self::{
    cut::Rows,
    experts::{ExpertModule, ExpertSlice},
    rows::RowsPart,
    shard::{ModelId, Target},
};
pub use self::{
    cut::{Parallel, Part, TpRank},
    embedding::EmbeddingSite,
    error::SpecError,
    experts::{Activation, Experts, ExpertsSite, Halves, ProjectionSite},
    linear::{Collective, Exchange, Linear, LinearSite, SliceSite},
    rows::RowsSite,
    shard::{EmbeddingId, ExpertsId, LinearId, Model, RowsId, Shard},
    spec::ModelSpec,
};
use crate::ffi;

/// The largest number of modules that one layer may fuse.
pub const MAX_SLICES: usize = ffi::ARIL_MAX_SLICES as usize;

/// The largest supported rank.
pub const MAX_RANK: usize = ffi::ARIL_MAX_RANK as usize;
