//! A time limit for each test: one that never ends, because of a kernel or a rank that waits for another, terminates
//! the process, which prints the test's name.

use std::{
    env,
    io::{self, Write as _},
    process::Command,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread,
    time::Duration,
};

/// Unless `ARIL_TEST_SECONDS` says otherwise.
const SECONDS: u64 = 300;

/// The limit on this thread's test, until it is dropped.
pub(crate) struct Limit {
    /// Its drop notifies the watching thread.
    _ended: Sender<()>,
}

impl Limit {
    pub(crate) fn new() -> Self {
        let seconds = env::var("ARIL_TEST_SECONDS").map_or(SECONDS, |seconds| seconds.parse().expect("seconds"));
        let test = thread::current().name().unwrap_or("a test").to_owned();
        Self::of(Duration::from_secs(seconds), move || {
            // `eprintln` would write to the test's output, which is lost with the process.
            let _ = writeln!(
                io::stderr(),
                "test {test} ... FAILED: it has not ended after {seconds} s, and ends all others"
            );
            // Not `exit`: the driver would wait for the kernels.
            std::process::abort();
        })
    }

    fn of(limit: Duration, on_timeout: impl FnOnce() + Send + 'static) -> Self {
        let (ended, is_ended) = mpsc::channel();
        thread::spawn(move || {
            if is_ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                on_timeout();
            }
        });
        Self { _ended: ended }
    }
}

#[test]
fn a_test_that_does_not_end_is_ended() {
    let limit = |limit| {
        let (timed_out, is_timed_out) = mpsc::channel();
        (Limit::of(limit, move || timed_out.send(()).expect("a receiver")), is_timed_out)
    };
    let (ends, ended) = limit(Duration::from_secs(3600));
    drop(ends);
    assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Err(RecvTimeoutError::Disconnected));
    let (_hangs, is_timed_out) = limit(Duration::from_millis(400));
    assert_eq!(is_timed_out.recv_timeout(Duration::from_secs(60)), Ok(()));
}

/// This test hangs in a process of its own.
#[test]
fn a_test_that_does_not_end_is_named() {
    const HANGS: &str = "ARIL_TEST_HANGS";
    if env::var_os(HANGS).is_some() {
        let _limit = Limit::new();
        loop {
            thread::park();
        }
    }
    let name = thread::current().name().expect("that of the test").to_owned();
    let hangs = Command::new(env::current_exe().expect("a path"))
        .args([&name, "--exact"])
        .envs([(HANGS, "1"), ("ARIL_TEST_SECONDS", "1")])
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&hangs.stderr);
    assert!(!hangs.status.success() && text.contains(&format!("test {name} ... FAILED")), "{text}");
}
