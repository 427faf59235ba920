//! All tests that need a GPU, in one binary that can be copied to a machine with a GPU. They are ignored by default:
//! `gpu --include-ignored --test-threads=1` runs them, and fails without a device.
#![cfg(feature = "cuda")]
#![expect(clippy::disallowed_methods, reason = "tests allocate and wait")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and its numbers are small"
)]
#![allow(unreachable_pub, reason = "a binary has no outside")]

mod any_calls;
mod backend;
mod capture;
mod chain;
#[path = "../common/mod.rs"]
mod common;
mod consumers;
mod contention;
mod device;
mod early_loads;
mod experts;
mod fully_sharded;
mod fused_linear;
mod group;
mod hot_path;
mod late;
#[path = "../common/limit.rs"]
mod limit;
mod loading;
mod mailbox;
mod memory;
mod misuse;
#[path = "../model/mod.rs"]
mod model;
mod operations;
mod pool;
mod readback;
mod routing;
mod setup;
mod stacked;
mod stacks;
mod streams;
mod weights;
mod wrong;
