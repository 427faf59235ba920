//! Loading an adapter on all ranks of a group, or on none.
//!
//! Mistakes of other engines, and the tests that would find them in this one:
//!
//! | mistake | test |
//! |---|---|
//! | one rank loads, another fails, and the group computes with both or hangs | `pool::an_adapter_that_one_rank_*` |
//! | ranks choose different slots | `pool::all_ranks_decide_the_same` |
//! | ranks evict different adapters, or one evicts what another's requests use | `pool::*` |
//! | a dead rank blocks the others for ever | `channel::*`, `pool::a_rank_that_*` |
//! | ranks serve different adapters under one name | `lies::ranks_that_*` |
//! | what a message says decides where memory is written | `lies::*` |
#![allow(
    clippy::cast_possible_truncation,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and its numbers are small"
)]

mod channel;
#[path = "../common/mod.rs"]
mod common;
mod lies;
#[path = "../common/limit.rs"]
mod limit;
mod pool;
mod world;
