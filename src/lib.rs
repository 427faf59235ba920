//! CUDA kernels for multi-LoRA inference: many small adapters, one base model, one pass over a batch.
//!
//! For every token `t` and every adapted layer, `y[t] += scaling · B (A x[t])`, where each token has its own adapter or
//! none. An engine computes `y` as usual and then calls `add_delta`; `cuda` describes alternatives. The crate is not an
//! engine: it has no scheduler or tokenizer, and computes only on the stream that it is given.
//!
//! ```text
//! files of an adapter ──► Adapter ──► SlotImage ──► a slot of the WeightTable ──────────────┐
//!   adapter_model.safetensors  (PEFT)   (packed)      (an AdapterPool loads and evicts)     │
//!                                                                                           ▼
//! tokens, each with a Slot ──► Batch ──► Step (tokens grouped by slot) ──► operation(step, x, y) ──► kernel
//!                                                                          checked by a contract,    v = A x
//!                                                                          sized by a plan           y += scaling · B v
//! ```
//!
//! - [`model`]: the layers that adapters may adapt, and their parts on each rank.
//! - [`adapter`]: PEFT's file format, and an adapter's image in a slot. Depends on `model`.
//! - [`plan`]: launch configurations, from shapes and upper bounds. Depends on `model`.
//! - [`routing`]: the adapter and the experts of each token.
//! - [`slots`]: the contents of a weight table's slots. Depends on `adapter` and `plan`.
//! - [`pool`]: the life of an adapter between its files and a slot; `AdapterPool` on any backend. Depends on `slots`.
//! - [`error`]: errors that both backends share.
//! - [`cpu`] and `cuda` (with the feature `cuda`): the operations, with the same types on both backends, which refuse
//!   the same operands by the same errors. They depend on everything above.
//! - [`group`]: loading an adapter on all ranks of a tensor-parallel group, or on none, in a pool of the group.
//!   Depends on both backends.
//! - [`mod@reference`]: the same operations in `f64`, for tests. Depends on `model` alone.
//!
//! # Example
//!
//! ```
//! use aril::{
//!     DType, Slot,
//!     adapter::{Adapter, Tensor},
//!     cpu::{LoraLinear, Matrix, MatrixMut, WeightTable, Workspace},
//!     model::{Linear, ModelSpec, Parallel, TpRank},
//!     plan::Capacity,
//!     routing::Batch,
//! };
//!
//! // The model has one layer: q with 3 and v with 1 output features, fused, on 2 input features.
//! let mut spec = ModelSpec::new();
//! let attn = spec.linear(Linear::new("layers.0.attn", Parallel::Column, 2).slice("q_proj", 3).slice("v_proj", 1))?;
//! let model = spec.shard(TpRank::SINGLE)?;
//!
//! // An adapter of rank 1 for q, from memory. `Adapter::open` reads a directory.
//! let tensor = |shape, values: &[f32]| Tensor::new(DType::F32, shape, bytemuck::cast_slice(values).to_vec());
//! let config = r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 2}"#;
//! let adapter = Adapter::from_tensors(config, [
//!     ("layers.0.attn.q_proj.lora_A.weight".to_owned(), tensor([1, 2], &[1.0, 10.0])?),
//!     ("layers.0.attn.q_proj.lora_B.weight".to_owned(), tensor([3, 1], &[1.0, 0.0, -1.0])?),
//! ])?;
//!
//! // A table of two slots for adapters up to rank 16, and the layer's operations.
//! let capacity = Capacity::tokens(8).slots(2).rank(16);
//! let weights = WeightTable::new(&model, DType::F32, capacity, 1 << 20)?;
//! let attn = LoraLinear::new(&weights, attn)?;
//! let pirate = weights.load(1, &adapter.plan(&model, DType::F32)?)?;
//!
//! // A step of two tokens with the same input, one with the adapter and one without.
//! let slots = [pirate, Slot::BASE];
//! let batch = Batch::new(&slots);
//! let mut workspace = Workspace::default();
//! let mut step = weights.step(&batch, &mut workspace)?;
//! let x = [1.0_f32, 2.0, /* and */ 1.0, 2.0];
//! let mut y = [0.5_f32; 2 * 4];
//! attn.add_delta(&mut step, Matrix::new(&x, 2, 2)?, MatrixMut::new(&mut y, 2, 4)?)?;
//! assert_eq!(y[..4], [42.5, 0.5, -41.5, 0.5]); // 0.5 + 2 · B (1 · 1 + 10 · 2)
//! assert_eq!(y[4..], [0.5; 4]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Vocabulary
//!
#![doc = include_str!("docs/glossary.md")]
//!
//! # Guarantees
//!
#![doc = include_str!("docs/guarantees.md")]
//!
//! # CUDA graphs
//!
//! Capture a step with `cuda::WeightTable::capture`, or the operations whose names end in `_raw`. Adapters, their ranks
//! and the routing may change between replays.
//!
//! # Tensor parallelism
//!
#![doc = include_str!("docs/tensor_parallel.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

pub mod adapter;
mod arena;
#[macro_use]
mod contract;
#[macro_use]
pub mod slots;
pub mod cpu;
#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub mod cuda;
mod digest;
mod dtype;
pub mod error;
mod extent;
mod ffi;
pub mod group;
pub mod model;
pub mod plan;
pub mod pool;
pub mod reference;
pub mod routing;
mod sizes;
mod slices;
mod slot;
mod unique;

#[cfg(not(target_os = "linux"))]
compile_error!("aril runs on Linux alone");

#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
#[doc(no_inline)]
pub use cudarc;
pub use dtype::{DType, Element};
#[doc(no_inline)]
pub use half;
pub use slices::{IntoSlices, Slices};
pub use slot::Slot;
