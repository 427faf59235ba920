//! The benchmark harness itself: its workloads, its check, its tables and the documents that show its records.
#![expect(clippy::unwrap_used, reason = "tests")]

mod check;
mod links;
mod pool;
mod record;
mod report;
mod trace;
mod workloads;
