//! Loading an adapter on all ranks of a tensor-parallel group, or on none.
//!
//! Every rank calls the same operations of its [`Group`] in the same order. [`Group::prepare`] opens the adapter, plans
//! this rank's shard, reserves its memory and fills it; then the ranks exchange their verdicts. If any rank failed, no
//! rank commits, all weight tables are as they were, and every rank gets the failures of all ranks. [`Group::commit`]
//! puts the adapter into the slot, which is the same on all ranks.
//!
//! The ranks must commit between the same two steps, because the ranks of a step must use the same adapter. `prepare`
//! may run on another thread, beside steps.
//!
//! A [`GroupPool`] is an [`AdapterPool`](crate::pool::AdapterPool) on all ranks, for more adapters than fit.
//!
//! The messages go over a channel of the engine's ([`Ranks`]). [`InProcess`] connects the threads of one process.
//!
//! ```
//! use std::{thread, time::Duration};
//!
//! use aril::{
//!     DType,
//!     adapter::{Adapter, Tensor},
//!     cpu::WeightTable,
//!     group::{Group, GroupError, InProcess, Ranks},
//!     model::{Linear, ModelSpec, Parallel},
//!     plan::Capacity,
//! };
//!
//! let mut spec = ModelSpec::new();
//! spec.linear(Linear::new("mlp", Parallel::Column, 2).slice("up_proj", 4))?;
//! let tensor = |shape, values: &[f32]| Tensor::new(DType::F32, shape, bytemuck::cast_slice(values).to_vec());
//! let adapter = Adapter::from_tensors(r#"{"peft_type": "LORA", "lora_alpha": 1}"#, [
//!     ("mlp.up_proj.lora_A.weight".to_owned(), tensor([1, 2], &[1.0, 2.0])?),
//!     ("mlp.up_proj.lora_B.weight".to_owned(), tensor([4, 1], &[1.0, 2.0, 3.0, f32::NAN])?),
//! ])?;
//!
//! // Only the second rank's rows of B have a NaN, but neither rank loads the adapter.
//! let rank = |ranks: InProcess| {
//!     let model = spec.shard(ranks.tp()).unwrap();
//!     let table = WeightTable::new(&model, DType::F32, Capacity::tokens(8).slots(2).rank(8), 1 << 16).unwrap();
//!     let mut group = Group::new(ranks, table.clone()).unwrap();
//!     let slot = group.free_slot().unwrap();
//!     let Err(GroupError::Refused { failures, .. }) = group.load(slot, 1, || Ok(&adapter)) else { panic!() };
//!     assert_eq!((failures.len(), failures[0].rank), (1, 1));
//!     assert_eq!((slot, table.usage().used), (0, 0));
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
mod load;
pub(crate) mod member;
pub(crate) mod pool;
pub(crate) mod said;
mod verdict;

pub use self::{
    channel::{ChannelError, InProcess, Message, Ranks},
    error::{GroupError, Phase, RankFailure},
    load::{Group, Prepared, Table},
    pool::{GroupPool, OnRanks},
};
