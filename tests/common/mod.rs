//! What several test binaries share.
#![allow(dead_code, unreachable_pub, reason = "not every binary uses all of it")]

pub mod align;
pub mod cases;
pub mod experts;
pub mod forward;
