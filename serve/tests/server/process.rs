//! The server's process: what becomes of it beside logs and signals. On the CPU alone, because it is another process.

use std::{
    env,
    fs::File,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use serde_json::json;
use tokio::{
    net::{TcpSocket, TcpStream},
    time::sleep,
};

use crate::client::{QUESTION, fixture};

/// A process that serves the dense model. Dropping it kills it.
struct Process {
    child: Child,
    address: SocketAddr,
    http: reqwest::Client,
    /// Has the port as well, so that nobody else gets it before the server listens.
    _port: TcpSocket,
}

impl Process {
    async fn start(stderr: Stdio, args: &[&str]) -> Self {
        let port = TcpSocket::new_v4().expect("there is a socket");
        port.set_reuseaddr(true).and_then(|()| port.bind(([127, 0, 0, 1], 0).into())).expect("there is a port");
        let address = port.local_addr().expect("it is bound");
        let (model, root) = (fixture("qwen3"), fixture("adapters"));
        let child = Command::new(env!("CARGO_BIN_EXE_aril-serve"))
            .args(["--served-model-name", "base", "--kv-cache-mib", "8", "--enable-lora"])
            .args(["--port", &address.port().to_string()])
            .arg("--model")
            .arg(model)
            .arg("--lora-root")
            .arg(root)
            .args(args)
            .stderr(stderr)
            .spawn()
            .expect("the server starts");
        let process = Self { child, address, http: reqwest::Client::new(), _port: port };
        let until = Instant::now() + Duration::from_secs(120);
        while process.http.get(process.url("/health")).send().await.is_err() {
            assert!(Instant::now() < until, "the server does not come up");
            sleep(Duration::from_millis(20)).await;
        }
        process
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    async fn post(&self, path: &str, body: serde_json::Value) -> reqwest::Response {
        self.http.post(self.url(path)).json(&body).send().await.expect("the server answers")
    }

    fn tell(&self, signal: &str) {
        tell(&self.child, signal);
    }

    /// Waits until nobody is let in any more.
    async fn closes(&self) {
        let until = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(self.address).await.is_ok() {
            assert!(Instant::now() < until, "the server goes on");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits for the end.
    async fn end(&mut self, limit: Duration) -> ExitStatus {
        let until = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().expect("it is a child") {
                return status;
            }
            assert!(Instant::now() < until, "the server has not ended");
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Sends a signal.
fn tell(child: &Child, signal: &str) {
    let told = Command::new("kill").args([signal, &child.id().to_string()]).status();
    assert!(told.expect("there is kill").success());
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A log on a full disk, on a closed pipe and on a pipe that nobody reads: every answer is there, and the end is in order.
#[tokio::test]
async fn a_log_that_cannot_be_written_changes_nothing() {
    let full = || Stdio::from(File::options().write(true).open("/dev/full").expect("Linux has it"));
    for (log, stderr) in [("full", full()), ("closed", Stdio::piped()), ("unread", Stdio::piped())] {
        let mut process = Process::start(stderr, &[]).await;
        let pipe = process.child.stderr.take();
        // Kept open without being read, or closed.
        let _unread = pipe.filter(|_| log == "unread");
        // A pipe takes 64 KB.
        for _ in 0..500 {
            let refused = process.post("/v1/completions", json!({ "model": "x".repeat(1000), "prompt": "x" })).await;
            assert_eq!(refused.status(), 404, "{log}");
            assert!(refused.text().await.expect("the answer is whole").contains("does not exist"), "{log}");
        }
        for path in ["load_lora_adapter", "unload_lora_adapter"] {
            let body = match path {
                "load_lora_adapter" => json!({ "lora_name": "saffron", "lora_path": "r8-all" }),
                _ => json!({ "lora_name": "saffron" }),
            };
            let answer = process.post(&format!("/v1/{path}"), body).await;
            assert_eq!(answer.status(), 200, "{log}: {path}");
        }
        let body =
            json!({ "model": "base", "prompt": QUESTION, "max_tokens": 400, "ignore_eos": true, "stream": true });
        let stream = process.post("/v1/completions", body).await;
        process.tell("-TERM");
        let stream = stream.text().await.expect("the stream is whole");
        assert!(stream.ends_with("data: [DONE]\n\n"), "{log}: {stream}");
        assert!(process.end(Duration::from_secs(30)).await.success(), "{log}");
    }
}

/// What a client sends makes no line of the log, and no long one.
#[tokio::test]
async fn a_line_of_the_log_is_one_event() {
    let mut process = Process::start(Stdio::piped(), &[]).await;
    let forged = "a\n2026-01-01T00:00:00Z  INFO aril_serve: forged\u{1b}[2K\u{2028}";
    for model in [forged, &"x".repeat(100_000)] {
        assert_eq!(process.post("/v1/completions", json!({ "model": model, "prompt": "x" })).await.status(), 404);
    }
    process.tell("-TERM");
    assert!(process.end(Duration::from_secs(30)).await.success());
    let log = std::io::read_to_string(process.child.stderr.take().expect("it is a pipe")).expect("the log is text");
    assert!(log.contains("forged") && log.contains("xxxx"), "{log}");
    for line in log.lines() {
        assert!(line.len() < 4000 && !line.contains(|char: char| char.is_control() || char == '\u{2028}'), "{line:?}");
        assert!(!line.starts_with("2026-01-01"), "{line:?}");
    }
}

/// The first signal lets requests finish; the second one does not.
#[tokio::test]
async fn a_second_signal_ends_at_once() {
    for signals in [["-TERM", "-TERM"], ["-INT", "-TERM"], ["-TERM", "-INT"]] {
        let args = ["--drain-seconds", "600", "--max-num-batched-tokens", "1", "--max-num-seqs", "1"];
        let mut process = Process::start(Stdio::null(), &args).await;
        let body = json!({ "model": "base", "prompt": vec![1; 400], "max_tokens": 100, "n": 100, "stream": true });
        let stream = process.post("/v1/completions", body).await;
        process.tell(signals[0]);
        process.closes().await;
        assert!(process.child.try_wait().expect("it is a child").is_none(), "it does not wait for its request");
        process.tell(signals[1]);
        assert_eq!(process.end(Duration::from_secs(10)).await.code(), Some(1));
        drop(stream);
    }
}

/// A signal that comes before the first request is one, too.
#[test]
fn a_server_that_starts_waits_for_signals() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_aril-serve"))
        .args(["--port", "0", "--kv-cache-mib", "8", "--model"])
        .arg(fixture("qwen3"))
        .stderr(Stdio::piped())
        .spawn()
        .expect("the server starts");
    let mut log = BufReader::new(child.stderr.take().expect("it is a pipe")).lines();
    assert!(log.any(|line| line.expect("the log is text").contains("loading the model")));
    tell(&child, "-TERM");
    let ended = child.wait().expect("it is a child");
    assert!(ended.code().is_some(), "nobody waited for the signal: {ended}");
}

/// A key from the environment, which other users of the machine do not see.
#[test]
fn a_key_comes_from_the_environment() {
    let ended =
        Command::new(env!("CARGO_BIN_EXE_aril-serve")).args(["--model", "nowhere"]).env("ARIL_API_KEY", "").output();
    let ended = ended.expect("the server starts");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success() && said.contains("a key is empty"), "{said}");
    let ended = Command::new(env!("CARGO_BIN_EXE_aril-serve")).arg("--help").env("ARIL_API_KEY", "secret").output();
    let help = ended.expect("the server starts").stdout;
    assert!(!String::from_utf8_lossy(&help).contains("secret"));
    assert!(env::var_os("ARIL_API_KEY").is_none(), "the tests run without a key");
}
