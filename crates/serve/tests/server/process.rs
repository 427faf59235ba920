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

/// A log on a full disk, on a closed pipe and on a pipe that nobody reads: every answer is there, and the end is in
/// order.
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

/// What clients send makes no line of the log, and no long one: what users send is not in it, and each request has a
/// line by which it is found.
#[tokio::test]
async fn a_line_of_the_log_is_one_request() {
    const SECRET: &str = "my-secret";
    let mut process = Process::start(Stdio::piped(), &["--max-body-kib", "64"]).await;
    let forged = format!("{SECRET}\n2026-01-01T00:00:00Z  INFO aril_serve: forged\u{1b}[2K\u{2028}");
    let user = json!([{ "role": "user", "content": SECRET }]);
    for (path, body) in [
        ("completions", json!({ "model": forged, "prompt": "x" })),
        ("completions", json!({ "model": SECRET.repeat(5000), "prompt": "x" })),
        ("completions", json!({ "model": "base", "prompt": [SECRET, 5] })),
        ("completions", json!({ "model": "base", "prompt": "x", "input": SECRET })),
        ("completions", json!({ "model": "base", "prompt": "x", SECRET: 1 })),
        ("completions", json!({ "model": "base", "prompt": "x", "stop": { "a": SECRET } })),
        ("completions", json!({ "model": "base", "prompt": "x", "logit_bias": { SECRET: 1 } })),
        ("completions", json!({ "model": "base", "prompt": SECRET, "max_tokens": 100_000 })),
        ("completions", json!({ "model": "base", "prompt": SECRET, "suffix": SECRET })),
        ("completions", json!({ "model": "base", "prompt": SECRET.repeat(100_000) })),
        ("completions", json!({ "model": "base", "prompt": SECRET, "lora_path": SECRET })),
        ("chat/completions", json!({ "model": "base", "messages": SECRET })),
        ("chat/completions", json!({ "model": "base", "messages": [{ "role": SECRET, "content": SECRET }] })),
        ("chat/completions", json!({ "model": "base", "messages": user, "tools": [{ "type": SECRET }] })),
        ("chat/completions", json!({ "model": "base", "messages": user, "chat_template_kwargs": SECRET })),
        (
            "chat/completions",
            json!({ "model": "base", "messages": [{ "role": "user", "content": [{ "type": SECRET }] }] }),
        ),
        ("load_lora_adapter", json!({ "lora_name": SECRET, "lora_path": SECRET })),
        ("load_lora_adapter", json!({ "lora_name": "x", "lora_path": SECRET, SECRET: SECRET })),
        (SECRET, json!({ "model": "base" })),
    ] {
        let path = format!("/v1/{path}?key={SECRET}");
        let status = process.post(&path, body).await.status();
        assert!(status.is_client_error(), "{path}: {status}");
    }
    let answered =
        json!({ "model": "base", "prompt": SECRET, "stop": SECRET, "user": SECRET, "max_tokens": 3, "temperature": 0 });
    assert_eq!(process.post("/v1/completions", answered).await.status(), 200);

    // An adapter's name is the operator's, and may be odd.
    let name = "odd\u{202e}name";
    assert_eq!(
        process.post("/v1/load_lora_adapter", json!({ "lora_name": name, "lora_path": "r8-all" })).await.status(),
        200
    );
    let ask = async |id: &str, path: &str, body: serde_json::Value| {
        let request = process.http.post(process.url(path)).header("x-request-id", id).json(&body);
        let answer = request.send().await.expect("the server answers");
        assert_eq!(answer.headers()["x-request-id"], id);
        answer.text().await.expect("the answer is text")
    };
    let of = |model: &str, stream: bool| {
        let (prompt, max_tokens) = (vec![1; 40], 2);
        json!({ "model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true, "stream": stream })
    };
    for (id, model, stream) in [("trace-1", "base", false), ("trace-2", name, false), ("trace-3", name, true)] {
        let answer = ask(id, "/v1/completions", of(model, stream)).await;
        assert!(answer.contains(&format!("\"cmpl-{id}\"")), "{answer}");
    }
    ask("trace-4", "/v1/completions", json!({ "model": "nobody", "prompt": "x" })).await;
    ask("trace-5", "/tokenize", json!({ "prompt": SECRET })).await;
    let generated =
        ask("trace-6", "/generate", json!({ "text": "What is", "sampling_params": { "max_new_tokens": 2 } })).await;
    assert!(generated.contains("\"cached_tokens\":0"), "{generated}");
    // One whose client goes.
    let long = json!({ "model": "base", "prompt": "x", "max_tokens": 400, "ignore_eos": true, "stream": true });
    let request = process.http.post(process.url("/v1/completions")).header("x-request-id", "trace-7").json(&long);
    drop(request.send().await.expect("the server answers"));
    sleep(Duration::from_secs(1)).await;
    process.tell("-TERM");
    assert!(process.end(Duration::from_secs(30)).await.success());
    let log = std::io::read_to_string(process.child.stderr.take().expect("it is a pipe")).expect("the log is text");
    assert!(!log.contains(SECRET) && !log.contains("forged"), "{log}");
    for line in log.lines() {
        assert!(line.len() < 4000 && !line.contains(|char: char| char.is_control() || char == '\u{202e}'), "{line:?}");
    }
    let tokens = "prompt_tokens=40 cached_tokens=0 completion_tokens=2 first_ms=";
    let base = "method=POST route=\"/v1/completions\" status=200 model=\"base\" prompt_tokens";
    let again = tokens.replace("cached_tokens=0", "cached_tokens=32");
    for (id, parts) in [
        ("trace-1", &["INFO", base, tokens, "ms="][..]),
        ("trace-2", &["status=200", "model=\"base\" adapter=\"odd", tokens]),
        ("trace-3", &["status=200", "model=\"base\" adapter=\"odd", &again]),
        ("trace-4", &["status=404 error=\"NotFoundError\" param=\"model\" ms="]),
        ("trace-5", &["route=\"/tokenize\" status=200 ms="]),
        ("trace-6", &["route=\"/generate\" status=200 model=\"base\"", "completion_tokens=2"]),
        ("trace-7", &["status=499 model=\"base\""]),
    ] {
        let mut lines = log.lines().filter(|line| line.contains(&format!("id=\"{id}\"")));
        let line = lines.next().unwrap_or_else(|| panic!("{id} has no line:\n{log}"));
        assert!(lines.next().is_none(), "{id} has two lines");
        assert!(parts.iter().all(|part| line.contains(part)), "{id} {parts:?}: {line}");
    }
    assert!(!log.contains("route=\"/health\""), "probes are not worth a line");
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
    // Beside an argument, it is one more.
    let model = fixture("qwen3").display().to_string();
    let ended = Command::new(env!("CARGO_BIN_EXE_aril-serve"))
        .args(["--model", &model, "--port", "0", "--api-key", "right"])
        .env("ARIL_API_KEY", "not right")
        .output();
    let said = String::from_utf8_lossy(&ended.expect("the server starts").stderr).into_owned();
    assert!(said.contains("ARIL_API_KEY: a key has printable"), "{said}");
}
