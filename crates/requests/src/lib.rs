//! What an engine and a server decide about the adapters of [`aril`]. None of it computes anything.
//!
//! - [`registry`]: the names that requests use for adapters.
//! - [`admission`]: which waiting requests join the running batch.

pub mod admission;
pub mod registry;
