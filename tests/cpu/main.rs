//! The CPU's operations, the reference that judges all operations, and the types around them.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and its numbers are small"
)]

mod api;
mod archs;
mod arguments;
#[path = "../common/mod.rs"]
mod common;
mod consumers;
mod errors;
mod experts;
mod fused_linear;
mod layout;
mod model;
mod operations;
mod plan;
mod readme;
mod reference;
mod residency;
mod routing;
