//! Loading an adapter on all ranks of a tensor-parallel group, or on none.
//!
//! A [`GroupPool`] is an [`AdapterPool`](crate::pool::AdapterPool) on all ranks. Every rank makes the same calls in the
//! same order. If a rank cannot load an adapter, no rank does, and every rank gets the failures of all ranks.
//!
//! The messages go over a channel of the engine's ([`Ranks`]). [`InProcess`] connects the threads of one process.
//!
//! ```
//! use std::{sync::Arc, thread, time::Duration};
//!
//! use aril::{
//!     DType,
//!     adapter::{Adapter, Tensor},
//!     cpu::AdapterPool,
//!     error::LoadError,
//!     group::{GroupError, GroupPool, InProcess, Ranks},
//!     model::{Linear, ModelSpec, Parallel},
//!     plan::Capacity,
//!     pool::{PoolConfig, PoolError, Source},
//! };
//!
//! let mut spec = ModelSpec::new();
//! spec.linear(Linear::new("mlp", Parallel::Column, 2).slice("up_proj", 4))?;
//! let tensor = |shape, values: &[f32]| Tensor::new(DType::F32, shape, bytemuck::cast_slice(values).to_vec());
//! let adapter = Arc::new(Adapter::from_tensors(r#"{"peft_type": "LORA", "lora_alpha": 1}"#, [
//!     ("mlp.up_proj.lora_A.weight".to_owned(), tensor([1, 2], &[1.0, 2.0])?),
//!     ("mlp.up_proj.lora_B.weight".to_owned(), tensor([4, 1], &[1.0, 2.0, 3.0, f32::NAN])?),
//! ])?);
//!
//! // Only the second rank's rows of B have a NaN, but neither rank loads the adapter.
//! let rank = |ranks: InProcess| {
//!     let model = spec.shard(ranks.tp()).unwrap();
//!     let (capacity, config) = (Capacity::tokens(8).slots(2).rank(8), PoolConfig::arena_bytes(1 << 16));
//!     let pool = AdapterPool::new(&model, DType::F32, capacity, config).unwrap();
//!     let mut pool = GroupPool::new(ranks, pool).unwrap();
//!     let id = pool.register(Source::memory(Arc::clone(&adapter), &model, DType::F32)).unwrap();
//!     let load = pool.prefetch(id).unwrap();
//!     let Err(PoolError::Failed { error, .. }) = pool.wait_for(&load, Duration::from_secs(60)) else { panic!() };
//!     let LoadError::Group(error) = &*error else { panic!("{error}") };
//!     let GroupError::Refused { failures, .. } = &**error else { panic!("{error}") };
//!     assert_eq!((failures.len(), failures[0].rank), (1, 1));
//!     assert_eq!(pool.snapshot().device_memory.used, 0);
//! };
//! thread::scope(|scope| {
//!     for ranks in InProcess::group(2, Duration::from_secs(60)) {
//!         scope.spawn(move || rank(ranks));
//!     }
//! });
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod channel;
mod error;
pub(crate) mod member;
pub(crate) mod pool;
pub(crate) mod said;

pub use self::{
    channel::{ChannelError, InProcess, Message, Ranks},
    error::{GroupError, Phase, RankFailure},
    pool::{GroupPool, OnRanks},
};
