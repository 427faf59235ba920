//! The server on the CPU with the models of `tests/fixtures`, through HTTP.
#![expect(clippy::panic, reason = "a test fails by panicking")]

mod api;
mod client;
mod faults;
mod fields;
mod hybrid;
mod lora;
mod process;
mod ranks;
mod stress;
