//! The server on the CPU with the models of `tests/fixtures`, through HTTP.

mod api;
mod client;
mod lora;
mod stress;
