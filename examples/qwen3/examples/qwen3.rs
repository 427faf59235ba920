//! A Qwen3, dense or with experts, and its LoRA adapters, all requests in one batch: `cargo run --example qwen3`.

use std::process::ExitCode;

fn main() -> ExitCode {
    aril_qwen3::main()
}
