//! Groups of 1 to 16 ranks: together they hold every adapter whole, and compute what one rank computes.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and its numbers are small"
)]

#[path = "../common/mod.rs"]
mod common;
mod embeddings;
mod experts;
mod fully_sharded;
mod layout;
mod linears;
mod models;
mod numbers;
