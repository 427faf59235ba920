//! What the benchmarks share: the workloads, the data they run on, and how a device is timed.
#![allow(dead_code, unreachable_pub, reason = "not every benchmark uses all of it")]

#[cfg(feature = "cuda")]
pub mod ceilings;
pub mod data;
#[cfg(feature = "cuda")]
pub mod device;
pub mod experts;
#[cfg(feature = "cuda")]
pub mod gemm;
#[cfg(feature = "cuda")]
pub mod layer;
pub mod noise;
pub mod own;
pub mod report;
pub mod results;
pub mod workload;

/// Benchmarks stop at what they did not expect.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
