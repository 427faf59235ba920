//! The errors of the example `qwen3`.

use std::{
    ffi::OsStr,
    process::{Command, Output},
};

use super::process::EXAMPLE;

/// The example on the CPU, with limits on address space (KiB) and processor time (seconds).
pub(crate) fn limited<A: AsRef<OsStr>>(kib: usize, seconds: usize, args: &[A]) -> Command {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!(r#"ulimit -v {kib} && ulimit -t {seconds} && exec "$0" --device cpu "$@""#));
    shell.arg(&*EXAMPLE).args(args);
    shell
}

/// The sentence with which the example refused its input. An error if it did anything else.
pub(crate) fn refusal(output: &Output) -> Result<String, String> {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let status = output.status;
    let sentence = stderr.strip_suffix('\n').unwrap_or(&stderr);
    if status.code() != Some(2) {
        return Err(format!("{status}: {stderr}"));
    }
    let is_one =
        sentence.starts_with("error: ") && !sentence.contains(char::is_control) && sentence.chars().count() < 4000;
    if !is_one || stderr.contains("panicked") || stderr.contains("RUST_BACKTRACE") {
        return Err(format!("not a sentence: {stderr:?}"));
    }
    match output.stdout.is_empty() {
        true => Ok(sentence.to_owned()),
        false => Err(format!("{sentence}, and on standard output: {}", String::from_utf8_lossy(&output.stdout))),
    }
}
