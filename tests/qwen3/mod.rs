//! Code that the tests of the example `qwen3` share.
#![allow(dead_code, reason = "not every binary uses all of it")]

pub(crate) mod files;
pub(crate) mod forms;
pub(crate) mod goldens;
pub(crate) mod moe;
pub(crate) mod process;
pub(crate) mod refusals;
