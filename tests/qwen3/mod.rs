//! Runs the example `qwen3` as its users do: as a process.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// A path in `tests/fixtures`.
pub(crate) fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}

/// The example with these arguments, on the CPU unless they say otherwise. `cargo test` has built it; with `--test` it does not.
pub(crate) fn qwen3<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Output {
    let test = env::current_exe().expect("a test knows its own path");
    let profile = test.ancestors().nth(2).expect("a test is in target/PROFILE/deps");
    let example = profile.join("examples/qwen3").with_extension(env::consts::EXE_EXTENSION);
    assert!(example.exists(), "{} is not built: run `cargo build --example qwen3` first", example.display());
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    let device: &[&str] = if args.iter().any(|arg| arg == "--device") { &[] } else { &["--device", "cpu"] };
    Command::new(example).args(device).args(args).output().expect("the example starts")
}
