//! Runs the example `qwen3` as its users do: as a process.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// A path in `tests/fixtures`, or in the copy of it that `ARIL_FIXTURES` names.
pub(crate) fn fixture(path: &str) -> PathBuf {
    let copy = env::var_os("ARIL_FIXTURES").map(PathBuf::from);
    copy.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")).join(path)
}

/// The example with these arguments, on the CPU unless they say otherwise. `ARIL_QWEN3_BIN` names it, or else `cargo test` has
/// built it; with `--test` it does not.
pub(crate) fn qwen3<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Output {
    let example = env::var_os("ARIL_QWEN3_BIN").map_or_else(built, PathBuf::from);
    assert!(example.exists(), "{} is not built: run `cargo build --example qwen3` first", example.display());
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    let device: &[&str] = if args.iter().any(|arg| arg == "--device") { &[] } else { &["--device", "cpu"] };
    Command::new(example).args(device).args(args).output().expect("the example starts")
}

/// Where cargo puts the example.
fn built() -> PathBuf {
    let test = env::current_exe().expect("a test knows its own path");
    let profile = test.ancestors().nth(2).expect("a test is in target/PROFILE/deps");
    profile.join("examples/qwen3").with_extension(env::consts::EXE_EXTENSION)
}
