//! The forward as a process: its results, its command line, and damaged input. In `gpu`, also its kernels.

mod cli;
mod cpu;
mod files;
mod forms;
mod goldens;
#[cfg(feature = "cuda")]
mod gpu;
mod moe;
mod mutations;
mod process;
mod ranks;
mod refusals;
