//! Runs the example `qwen3` as a process, like its users.

use std::{
    env,
    ffi::OsString,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::LazyLock,
    thread,
    time::{Duration, Instant},
};

use crate::limit::Limit;

/// A path in `tests/fixtures`, or in the copy of it that `ARIL_FIXTURES` names.
pub(crate) fn fixture(path: &str) -> PathBuf {
    let copy = env::var_os("ARIL_FIXTURES").map(PathBuf::from);
    copy.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")).join(path)
}

/// The example with these arguments, on the CPU unless they say otherwise. One that never ends ends the tests.
pub(crate) fn qwen3<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Output {
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    let _limit = Limit::new();
    let device: &[&str] = if args.iter().any(|arg| arg == "--device") { &[] } else { &["--device", "cpu"] };
    Command::new(&*EXAMPLE).args(device).args(args).output().expect("the example starts")
}

/// The longest that a process may run. Ranks that see the end of another are much quicker.
pub(crate) const END_LIMIT: Duration = Duration::from_secs(100);

/// Starts the example as a rank of a group of processes.
pub(crate) fn start_rank((rank, size): (usize, usize), port: u16, args: &[&str]) -> Child {
    let mut command = Command::new(&*EXAMPLE);
    command.args(args).env("WORLD_SIZE", size.to_string()).env("RANK", rank.to_string());
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the example starts")
}

/// Waits for a process. Returns its status and what it has said.
pub(crate) fn end(mut process: Child) -> (Option<i32>, String, String) {
    let start = Instant::now();
    while process.try_wait().expect("it is a child").is_none() {
        let hangs = start.elapsed() > END_LIMIT;
        if hangs {
            process.kill().expect("it is a child");
        }
        assert!(!hangs, "it hangs");
        thread::sleep(Duration::from_millis(10));
    }
    let output = process.wait_with_output().expect("it has ended");
    let [text, error] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    (output.status.code(), text, error)
}

/// A port that was free a moment ago.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    listener.local_addr().expect("it is bound").port()
}

/// The example: the file that `ARIL_QWEN3_BIN` names, or else a new build. (`cargo test --test` builds no examples, and would use a
/// stale one.)
pub(crate) static EXAMPLE: LazyLock<PathBuf> =
    LazyLock::new(|| env::var_os("ARIL_QWEN3_BIN").map_or_else(build, PathBuf::from));

fn build() -> PathBuf {
    let cargo = env::var_os("CARGO").expect("cargo runs the tests; without it, ARIL_QWEN3_BIN names the example");
    let test = env::current_exe().expect("a test knows its own path");
    let target = test.ancestors().nth(2).expect("a test is in target/PROFILE/deps");
    let folder = target.file_name().and_then(|name| name.to_str()).expect("a profile's name is UTF-8");
    let profile = if folder == "debug" { "dev" } else { folder };
    let features = [("cuda", cfg!(feature = "cuda")), ("bindgen", cfg!(feature = "bindgen"))];
    let features: Vec<&str> = features.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
    let build = Command::new(cargo)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["build", "--quiet", "--example", "qwen3", "--profile", profile, "--features", &features.join(",")])
        .arg("--target-dir")
        .arg(target.parent().expect("a profile is in the target directory"))
        .output()
        .expect("cargo starts");
    assert!(build.status.success(), "the example is not built: {}", String::from_utf8_lossy(&build.stderr));
    target.join("examples/qwen3").with_extension(env::consts::EXE_EXTENSION)
}
