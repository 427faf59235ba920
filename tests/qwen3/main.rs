//! The example `qwen3` as a process on the CPU: its results, its command line, and damaged input.

mod cli;
mod cpu;
mod files;
mod forms;
mod goldens;
#[path = "../common/limit.rs"]
mod limit;
mod moe;
mod mutations;
mod process;
mod ranks;
mod refusals;
mod verdicts;
