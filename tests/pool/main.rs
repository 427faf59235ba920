//! The adapter pool on the CPU: who is on the device, what is refused, and what fails.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and its numbers are small"
)]
#![allow(unreachable_pub, reason = "a binary has no outside")]

mod any_calls;
mod backend;
#[path = "../common/mod.rs"]
mod common;
mod failures;
mod ids;
mod leases;
#[path = "../model/mod.rs"]
mod model;
mod residency;
mod setup;
mod threads;
