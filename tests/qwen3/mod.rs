//! Runs the example `qwen3` as its users do: as a process.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// A path in `tests/fixtures`.
pub(crate) fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}

/// The example with these arguments, on the CPU.
pub(crate) fn qwen3<A: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = A>) -> Output {
    let test = env::current_exe().expect("a test knows its own path");
    let profile = test.ancestors().nth(2).expect("a test is in target/PROFILE/deps");
    let example = profile.join("examples/qwen3").with_extension(env::consts::EXE_EXTENSION);
    assert!(example.exists(), "{} is not built: run `cargo build --example qwen3` first", example.display());
    Command::new(example).args(["--device", "cpu"]).args(args).output().expect("the example starts")
}
