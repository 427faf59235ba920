//! A simulation of serving many adapters: which policy of admission and loading waits for what.
//!
//! Nothing here is measured on a device. A [`Trace`] of requests runs through an engine with continuous batching and chunked prefill, on
//! a model of a GPU; only the policy differs between runs. Time is in whole microseconds, so that a seed gives the same figures again.
//!
//! # Assumptions
//!
//! - Requests arrive as a Poisson process, and their adapters follow Zipf's law. Prompts and outputs have log-normal lengths. The KV
//!   cache holds all running requests, and no request is cancelled or preempted.
//! - All adapters have the size of rank 16 on Qwen3-8B. A step takes a fixed time, a time per token and a time per distinct adapter;
//!   [`Hardware`] has the values, of the order of one H200.
//! - The device holds as many adapters as it has slots. Page-locked host memory holds more, the least recently used of which goes first.
//!   Copies to the device take their turns on one link, and reads from the disk on one other; both overlap steps and each other.
//! - A policy that loads when it admits makes the step wait, but loads of one step are pipelined, which is kinder than the code it
//!   stands for.
//!
//! # Policies
//!
//! | policy | order | loads |
//! |---|---|---|
//! | [`Aril`] | [`Admission`](aril_serving::admission::Admission) | ahead of admission, beside steps; a request starts when its adapter is there |
//! | [`Fifo`] | arrival, up to the first request that cannot start | like `Aril` |
//! | [`Vllm`] | arrival, without requests whose adapter would be one too many | at admission, before the step; LRU |
//! | [`SLora`] | arrival, up to the first request that does not fit | for the next batch while this one runs, the rest at admission; what neither uses is dropped |
//! | [`SLora`], clustered | the same, but requests of the batch's adapters first once it has as many adapters as allowed | the same |
//!
//! `Vllm` is the loop over waiting requests of vLLM's `Scheduler.schedule` (`vllm/v1/core/sched/scheduler.py`) with its worker's LRU
//! cache of `max_loras` slots. `SLora` is `ReqQueue` of S-LoRA (`slora/server/router/req_queue.py`; Sheng et al., *S-LoRA: Serving
//! Thousands of Concurrent LoRA Adapters*, arXiv 2311.03285) with its prefetching and offloading (`manager.py`, `infer_adapter.py`), and
//! its clustered form is `ClusterReqQueue`. S-LoRA keeps all adapters in host memory, and prefills in batches of their own; here it has
//! the host memory and the engine of the others.

mod engine;
mod figures;
mod memory;
mod policy;
mod show;
mod trace;

pub use self::{
    engine::{Engine, Outcome, Room, Server, Times, run},
    figures::{Figures, Kind, Record, Run, Settings},
    memory::Memory,
    policy::{Aril, Fifo, Policy, SLora, Vllm},
    show::{plot, shown, table},
    trace::{Hardware, Request, Trace},
};

/// The record, in the repository.
pub const FILE: &str = "benches/record/serving.json";

/// An adapter, by its rank in Zipf's law.
pub type Adapter = u32;
/// Microseconds since the beginning of a run.
pub type Time = u64;
