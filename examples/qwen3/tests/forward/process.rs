//! Runs the example `qwen3` as a process, like its users.

use std::{
    env,
    ffi::OsString,
    io::Read,
    mem,
    net::{Ipv4Addr, SocketAddrV4},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{LazyLock, mpsc},
    thread,
    time::{Duration, Instant},
};

use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};

/// The repository.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// A path in `tests/fixtures`, or in the copy of it that `ARIL_FIXTURES` names.
pub(crate) fn fixture(path: &str) -> PathBuf {
    let copy = env::var_os("ARIL_FIXTURES").map(PathBuf::from);
    copy.unwrap_or_else(|| Path::new(ROOT).join("tests/fixtures")).join(path)
}

/// The longest that a process or a kernel may run: `ARIL_TEST_SECONDS`, or 300 s.
pub(crate) fn limit() -> Duration {
    let seconds = env::var("ARIL_TEST_SECONDS").map_or(300, |seconds| seconds.parse().expect("seconds"));
    Duration::from_secs(seconds)
}

/// The example with these arguments, on the CPU unless they say otherwise.
pub(crate) fn qwen3<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Output {
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    let device: &[&str] = if args.iter().any(|arg| arg == "--device") { &[] } else { &["--device", "cpu"] };
    output_of(start(Command::new(&*EXAMPLE).args(device).args(args)), limit())
}

/// The longest that a rank may run. Ranks that see the end of another are much quicker.
pub(crate) const END_LIMIT: Duration = Duration::from_secs(100);

/// Starts the example as a rank of a group of processes.
pub(crate) fn start_rank((rank, size): (usize, usize), port: u16, args: &[&str]) -> Child {
    let mut command = Command::new(&*EXAMPLE);
    command.args(args).env("WORLD_SIZE", size.to_string()).env("RANK", rank.to_string());
    start(command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string()))
}

/// Waits for a rank. Returns its status and what it has said.
pub(crate) fn end(rank: Child) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = output_of(rank, END_LIMIT);
    let [text, error] = [stdout, stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    (status.code(), text, error)
}

/// Starts a command whose output is read.
pub(crate) fn start(command: &mut Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts")
}

/// Waits for a process, and ends one that runs for longer than `limit`.
pub(crate) fn output_of(mut process: Child, limit: Duration) -> Output {
    let [stdout, stderr] = [process.stdout.take().map(read), process.stderr.take().map(read)];
    let end = Instant::now() + limit;
    let mut all_of = |pipe: Option<mpsc::Receiver<Vec<u8>>>| {
        let pipe = pipe.expect("the output is piped");
        // The pipe is closed when the process has ended.
        pipe.recv_timeout(end.saturating_duration_since(Instant::now())).unwrap_or_else(|_| {
            process.kill().expect("it is a child");
            unreachable!("a process has not ended within {limit:?}")
        })
    };
    let [stdout, stderr] = [stdout, stderr].map(&mut all_of);
    Output { status: process.wait().expect("it is a child"), stdout, stderr }
}

/// Reads a pipe to its end on a thread of its own, so that no process waits for a reader.
fn read(mut pipe: impl Read + Send + 'static) -> mpsc::Receiver<Vec<u8>> {
    let (sender, all) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).expect("a pipe can be read");
        // A test that has failed does not ask for it.
        let _ = sender.send(bytes);
    });
    all
}

/// A port for rank 0. Nobody else gets it: a socket that does not listen stays bound to it until this process ends.
pub(crate) fn port() -> u16 {
    let socket = net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let socket = socket.expect("there is a socket");
    sockopt::set_socket_reuseaddr(&socket, true).expect("it is a socket");
    net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
    let address = net::getsockname(&socket).and_then(SocketAddrV4::try_from).expect("it is bound");
    mem::forget(socket);
    address.port()
}

/// The example: the file that `ARIL_QWEN3_BIN` names, or else a new build. (`cargo test --test` builds no examples, and
/// would use a stale one.)
pub(crate) static EXAMPLE: LazyLock<PathBuf> =
    LazyLock::new(|| env::var_os("ARIL_QWEN3_BIN").map_or_else(build, PathBuf::from));

fn build() -> PathBuf {
    let cargo = env::var_os("CARGO").expect("cargo runs the tests; without it, ARIL_QWEN3_BIN names the example");
    let test = env::current_exe().expect("a test knows its own path");
    let target = test.ancestors().nth(2).expect("a test is in target/PROFILE/deps");
    let folder = target.file_name().and_then(|name| name.to_str()).expect("a profile's name is UTF-8");
    let profile = if folder == "debug" { "dev" } else { folder };
    let features = if cfg!(feature = "cuda") { "cuda" } else { "" };
    let build = Command::new(cargo)
        // As `cargo test` builds it there: with the features of the same packages.
        .current_dir(ROOT)
        .args(["build", "--quiet", "--example", "qwen3", "--profile", profile, "--features", features])
        .arg("--target-dir")
        .arg(target.parent().expect("a profile is in the target directory"))
        .output()
        .expect("cargo starts");
    assert!(build.status.success(), "the example is not built: {}", String::from_utf8_lossy(&build.stderr));
    target.join("examples/qwen3").with_extension(env::consts::EXE_EXTENSION)
}
