//! What several test binaries share.
#![allow(dead_code, unreachable_pub, reason = "not every binary uses all of it")]

pub mod align;
pub mod case;
pub mod compare;
pub mod cpu;
pub mod dense;
pub mod experts;
pub mod factors;
pub mod values;
