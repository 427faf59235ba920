//! The benchmark harness of aril: which workloads are measured, the data they run on, the check of their results, and
//! the tables and plots of the figures.
//!
//! | module | holds |
//! |---|---|
//! | [`workload`], [`experts`], [`own`] | the workloads: linear layers, embeddings, experts, those of aril alone |
//! | [`selection`] | which of these are asked for |
//! | [`noise`], [`data`] | what a workload is computed on, and the error of its results against the `f64` reference |
//! | `device`, `layer`, `gemm`, `ceilings` (`cuda`) | a workload on the GPU, its base GEMM, the limits of the device |
//! | [`results`] | the JSON of measured figures, ours and other libraries' |
//! | [`record`] | the files in `benches/record` |
//! | [`pool`] | the adapters that an adapter pool is measured with, and the JSON of its figures |
//! | [`trace`] | the requests of a server under load |
//! | [`engine`] | the figures of the reference engine |
//! | [`report`], [`plots`], [`documents`] | tables, plots, and the documents that show them |
#![expect(
    missing_debug_implementations,
    missing_docs,
    clippy::missing_errors_doc,
    reason = "unpublished: only the binaries and benchmarks of this package use it"
)]

#[cfg(feature = "cuda")]
pub mod ceilings;
pub mod data;
#[cfg(feature = "cuda")]
pub mod device;
pub mod documents;
pub mod engine;
pub mod experts;
#[cfg(feature = "cuda")]
pub mod gemm;
#[cfg(feature = "cuda")]
pub mod layer;
pub mod noise;
pub mod own;
pub mod plots;
pub mod pool;
pub mod record;
pub mod report;
pub mod results;
pub mod selection;
pub mod trace;
pub mod workload;

/// Benchmarks stop at the first error.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
