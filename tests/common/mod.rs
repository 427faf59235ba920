//! Code that several test binaries share.
#![allow(dead_code, unreachable_pub, reason = "not every binary uses all of it")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and its numbers are small"
)]

pub mod adapters;
pub mod adding;
pub mod case;
pub mod compare;
pub mod consumers;
pub mod cpu;
pub mod dense;
pub mod experts;
pub mod factors;
pub mod fused_linear;
pub mod fuzz;
pub mod slices;
pub mod small;
pub mod values;
