//! Clients that are slow, stand still or have no right to be here.

use std::{
    fs,
    time::{Duration, Instant},
};

use aril_serve::Options;
use clap::Parser as _;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{sleep, timeout},
};

use crate::client::{QUESTION, Server, chunks, error, fixture};

/// The routes that need no key.
const OPEN: [&str; 5] = ["/", "/health", "/ping", "/version", "/metrics"];

/// Every route of the API, the method that it takes, and a body that would be answered.
fn routes() -> [(&'static str, &'static str, String); 14] {
    let lora = json!({ "lora_name": "saffron", "lora_path": "r8-all" }).to_string();
    let chat = json!({ "model": "base", "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 1 });
    let completion = json!({ "model": "base", "prompt": QUESTION, "max_tokens": 1 });
    [
        ("GET", "/v1/models", String::new()),
        ("POST", "/v1/completions", completion.to_string()),
        ("POST", "/v1/chat/completions", chat.to_string()),
        ("POST", "/v1/load_lora_adapter", lora.clone()),
        ("POST", "/v1/unload_lora_adapter", lora),
        ("GET", "/v1/models/base", String::new()),
        ("POST", "/generate", json!({ "text": QUESTION, "sampling_params": { "max_new_tokens": 1 } }).to_string()),
        ("POST", "/tokenize", json!({ "prompt": QUESTION }).to_string()),
        ("POST", "/detokenize", json!({ "tokens": [1] }).to_string()),
        ("GET", "/load", String::new()),
        ("GET", "/server_info", String::new()),
        ("GET", "/get_server_info", String::new()),
        ("GET", "/model_info", String::new()),
        ("GET", "/get_model_info", String::new()),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_guards_every_route() {
    let root = fixture("adapters").display().to_string();
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let file = dir.path().join("keys");
    fs::write(&file, "two\nthree \n").expect("the file can be written");
    let file = file.display().to_string();
    let server =
        Server::start(&["--api-key", "one", "--api-key-file", &file, "--enable-lora", "--lora-root", &root]).await;
    let http = reqwest::Client::new();
    for (method, path, body) in routes() {
        let ask = async |authorization: Option<&str>| {
            let request = match method {
                "GET" => http.get(server.url(path)),
                _ => http.post(server.url(path)).header("content-type", "application/json").body(body.clone()),
            };
            let request = authorization.iter().fold(request, |request, given| request.header("authorization", *given));
            request.send().await.expect("the server answers").status().as_u16()
        };
        for wrong in
            ["", "one", "Bearer", "Bearer ", "Bearer on", "Bearer onee", "Bearer four", "Bearer one two", "Basic one"]
        {
            assert_eq!(ask(Some(wrong)).await, 401, "{path}: {wrong:?}");
        }
        assert_eq!(ask(None).await, 401, "{path}");
        for right in ["Bearer one", "bearer two", "BEARER three"] {
            assert_ne!(ask(Some(right)).await, 401, "{path}: {right:?}");
        }
    }
    for open in OPEN {
        assert_eq!(server.get(open).await.0, 200, "{open}");
    }
}

/// A key that nobody has to know is refused, wherever it comes from.
#[tokio::test]
async fn a_key_is_not_empty() {
    let model = fixture("qwen3").display().to_string();
    let arguments = ["aril-serve", "--model", &model, "--port", "0", "--kv-cache-mib", "8"];
    for wrong in ["", " ", "two words", "zwölf", "line\nbreak"] {
        let refused = Options::try_parse_from(arguments.into_iter().chain(["--api-key", wrong]));
        let refused = refused.expect_err("it is no key").to_string();
        assert!(refused.contains("a key "), "{refused}");
    }
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let file = dir.path().join("keys");
    for wrong in ["", "\n", "one\n\ntwo", "two words"] {
        fs::write(&file, wrong).expect("the file can be written");
        let options = arguments.into_iter().chain(["--api-key-file", file.to_str().expect("it is text")]);
        let refused = aril_serve::start(Options::parse_from(options)).await.expect_err("there is no key");
        assert!(refused.starts_with("--api-key-file ") && refused.contains("key"), "{refused}");
    }
}

/// A page of another origin can send a body of these types without asking the server first, and names its origin.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_is_json_by_its_type() {
    let root = fixture("adapters").display().to_string();
    let server = Server::start(&["--enable-lora", "--lora-root", &root]).await;
    let http = reqwest::Client::new();
    let types = [
        None,
        Some("text/plain"),
        Some("text/plain;charset=UTF-8"),
        Some("application/x-www-form-urlencoded"),
        Some("multipart/form-data; boundary=application/json"),
        Some("text/plain; application/json"),
        Some("application/jsonp"),
    ];
    for (method, path, body) in routes() {
        for &given in types.iter().filter(|_| method == "POST") {
            let request = given.iter().fold(http.post(server.url(path)).body(body.clone()), |request, given| {
                request.header("content-type", *given)
            });
            let page = request.try_clone().expect("a body of bytes").header("origin", "https://a.example");
            assert_eq!(page.send().await.expect("the server answers").status(), 415, "a page, {path}: {given:?}");
            // What commands send unless told another type changes no adapter.
            let is_untold = given.is_none_or(|given| given.ends_with("urlencoded")) && !path.ends_with("lora_adapter");
            let status = request.send().await.expect("the server answers").status();
            assert_eq!(status != 415, is_untold, "{path}: {given:?}: {status}");
        }
    }
    assert_eq!(error(&server.ask("saffron").await).0, 404);
    for given in ["application/json", "Application/JSON; charset=utf-8", "application/json;x=y"] {
        let body = json!({ "model": "base", "prompt": QUESTION, "max_tokens": 1 }).to_string();
        let request = http.post(server.url("/v1/completions")).header("content-type", given).body(body);
        assert_eq!(request.send().await.expect("the server answers").status(), 200, "{given}");
    }
}

/// Whatever a client sends, what is said of it is one short line.
#[tokio::test(flavor = "multi_thread")]
async fn messages_are_short_lines() {
    let server = Server::start(&["--max-body-kib", "4096"]).await;
    let long = "x".repeat(1_000_000);
    for body in [
        json!({ "model": "base", "prompt": "x", &long: 1 }),
        json!({ "model": "base", "prompt": "x", "guided_json": &long }),
        json!({ "model": &long, "prompt": "x" }),
        json!({ "model": "a\nb\u{1b}[31m\u{202e}", "prompt": "x" }),
    ] {
        let (status, message) = error(&server.complete(body).await);
        assert!([400, 404].contains(&status), "{message}");
        assert!(
            message.len() < 10_000 && !message.contains(|char: char| char.is_control() || char == '\u{202e}'),
            "{message}"
        );
    }
}

/// The answer to bytes on a connection of its own, which the server closes.
async fn raw(server: &Server, bytes: &[u8]) -> String {
    let mut stream = connect(server, bytes).await;
    let mut answer = Vec::new();
    let read = timeout(Duration::from_secs(60), stream.read_to_end(&mut answer)).await.expect("the connection ends");
    read.expect("it is closed in order");
    String::from_utf8_lossy(&answer).into_owned()
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("an answer has a status")
}

/// A page of a site whose name has been made to lead to this machine is of the server's origin to its browser, which
/// sends the name as Host.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_a_key_answers_to_its_own_names() {
    let root = fixture("adapters").display().to_string();
    let lora = ["--enable-lora", "--lora-root", &root];
    let (open, keyed) = (Server::start(&lora).await, Server::start(&[&lora[..], &["--api-key", "one"]].concat()).await);
    let named = Server::start(&["--host", "localhost"]).await;
    let routes: Vec<_> = routes().into_iter().chain(OPEN.map(|path| ("GET", path, String::new()))).collect();
    let nowhere = ("GET", "/nowhere", String::new());
    for (method, path, body) in routes.iter().chain([&nowhere]) {
        let ask = async |server: &Server, hosts: &[&str]| {
            let hosts: String = hosts.iter().map(|host| format!("host: {host}\r\n")).collect();
            let fields =
                format!("authorization: Bearer one\r\ncontent-type: application/json\r\nconnection: close\r\n{hosts}");
            let length = body.len();
            let request = format!("{method} {path} HTTP/1.1\r\n{fields}content-length: {length}\r\n\r\n{body}");
            status(&raw(server, request.as_bytes()).await)
        };
        for other in ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"] {
            assert_eq!(ask(&open, &[other]).await, 403, "{path}, {other}");
            assert_ne!(ask(&keyed, &[other]).await, 403, "{path}, {other}");
            assert_eq!(ask(&named, &[other]).await, 403, "{path}, {other}");
        }
        for own in ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000", "10.0.0.7"] {
            assert!(![400, 403].contains(&ask(&open, &[own]).await) || path.ends_with("lora_adapter"), "{path}, {own}");
        }
        for wrong in [&[][..], &["localhost", "localhost"], &["a@localhost"], &["localhost:a"]] {
            for server in [&open, &keyed] {
                assert_eq!(ask(server, wrong).await, 400, "{path}, {wrong:?}");
            }
        }
    }
    assert_eq!(status(&raw(&open, b"GET /version HTTP/1.0\r\n\r\n").await), 200);
    assert_eq!(status(&raw(&open, b"GET /version HTTP/1.0\r\nhost: evil.example\r\n\r\n").await), 403);
}

/// A body that cannot be read as it is sent is refused before it is: by its codings, and by its length.
#[tokio::test(flavor = "multi_thread")]
async fn bodies_are_plain_and_short() {
    let server = Server::start(&["--max-body-kib", "64"]).await;
    let body = json!({ "model": "base", "prompt": QUESTION, "max_tokens": 1 }).to_string();
    let ask = async |fields: &str, body: &str| {
        let head =
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json";
        let answer = raw(&server, format!("{head}\r\n{fields}\r\n{body}").as_bytes()).await;
        (status(&answer), answer)
    };
    let length = format!("content-length: {}\r\n", body.len());
    let chunked = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    assert_eq!(ask(&length, &body).await.0, 200);
    assert_eq!(ask("transfer-encoding: chunked\r\n", &chunked).await.0, 200);
    assert_eq!(ask(&format!("content-encoding: identity\r\n{length}"), &body).await.0, 200);
    for coding in ["gzip, chunked", "gzip\r\ntransfer-encoding: chunked", "deflate, chunked"] {
        assert_eq!(ask(&format!("transfer-encoding: {coding}\r\n"), &chunked).await.0, 501, "{coding}");
    }
    for coding in ["gzip", "br", "identity, gzip", "identity\r\ncontent-encoding: gzip", "GZIP"] {
        let (status, answer) = ask(&format!("content-encoding: {coding}\r\n{length}"), &body).await;
        assert!(status == 415 && answer.contains("accept-encoding: identity"), "{coding}: {answer}");
    }
    for wrong in ["-1", "+5", "5, 6", "abc", "99999999999999999999999"] {
        assert_eq!(ask(&format!("content-length: {wrong}\r\n"), &body).await.0, 400, "{wrong}");
    }
    // Nobody is told to go on with what is too long.
    let expect = "expect: 100-continue\r\n";
    for fields in ["content-length: 10737418240\r\n", "content-length: 65537\r\n"] {
        let (status, answer) = ask(&format!("{expect}{fields}"), "").await;
        assert!(status == 413 && answer.contains("64 KiB") && answer.contains("--max-body-kib"), "{answer}");
    }
    let exact = format!("{body}{}", " ".repeat(65536 - body.len()));
    assert_eq!(ask("content-length: 65536\r\n", &exact).await.0, 200);
    // Of unknown length, it is refused once it is too long.
    let long = format!("{:x}\r\n{exact} \r\n0\r\n\r\n", exact.len() + 1);
    assert_eq!(ask("transfer-encoding: chunked\r\n", &long).await.0, 413);
}

/// What a client needs to know beside an error is in the head of the answer; what is wrong with JSON, and where, is
/// said.
#[tokio::test(flavor = "multi_thread")]
async fn errors_say_what_helps() {
    let root = fixture("adapters").display().to_string();
    let lora = ["--enable-lora", "--lora-root", &root, "--arena-mib", "1", "--host-mib", "1", "--api-key", "one"];
    let server = Server::start(
        &[&lora[..], &["--max-num-seqs", "1", "--max-queue", "1", "--max-num-batched-tokens", "1"]].concat(),
    )
    .await;
    assert_eq!(server.send("/v1/completions", "{}").await.headers()["www-authenticate"], "Bearer");
    let body =
        json!({ "model": "base", "prompt": vec![1; 400], "max_tokens": 100, "ignore_eos": true, "stream": true });
    let mut streams = Vec::new();
    let busy = loop {
        let answer = server.send_as("/v1/completions", body.to_string(), Some("one")).await;
        if answer.status() == 503 {
            break answer;
        }
        streams.push(answer);
    };
    assert_eq!(busy.headers()["retry-after"], "1");
    drop(streams);
    for (body, part) in [
        ("{\"model\": ", "not JSON: it ends early, at line 1, column 10"),
        ("{\"model\" 1}", "not JSON: line 1, column 10 is unexpected"),
        ("[1]", "expected an object"),
        ("{\"model\": \"a\", \"model\": \"b\"}", "`model` is there twice"),
    ] {
        let answer = server.send_as("/v1/completions", body, Some("one")).await;
        let answer = (answer.status().as_u16(), answer.json().await.expect("an error is JSON"));
        let (status, message) = error(&answer);
        assert!(status == 400 && message.contains(part), "{body}: {message}");
    }
    let load = json!({ "lora_name": "large", "lora_path": "r64-all" }).to_string();
    let refused = server.send_as("/v1/load_lora_adapter", load, Some("one")).await.text().await.expect("it is text");
    assert!(refused.contains("--arena-mib") && !refused.contains("pinned"), "{refused}");
}

/// A step that takes long holds up neither probes nor those who watch. One that takes too long is a hung engine, to
/// probes.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_waits_for_a_long_step() {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let mut config: serde_json::Value =
        serde_json::from_slice(&fs::read(fixture("qwen3/config.json")).expect("it is there")).expect("it is JSON");
    for (name, value) in
        [("hidden_size", 512), ("intermediate_size", 1536), ("head_dim", 64), ("max_position_embeddings", 2048)]
    {
        config[name] = json!(value);
    }
    // A step takes longer than a second, on many cores and with optimisation, too.
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let layers = cores * if cfg!(debug_assertions) { 2 } else { 8 };
    config["num_hidden_layers"] = json!(layers);
    config.as_object_mut().expect("it is an object").remove("layer_types");
    config["num_attention_heads"] = json!(8);
    config["num_key_value_heads"] = json!(4);
    fs::write(dir.path().join("config.json"), config.to_string()).expect("it can be written");
    fs::copy(fixture("qwen3/tokenizer.json"), dir.path().join("tokenizer.json")).expect("it can be copied");
    let args = [
        "--load-format",
        "dummy",
        "--max-num-batched-tokens",
        "2048",
        "--max-model-len",
        "1024",
        "--step-seconds",
        "1",
        // For the sequences of many layers.
        "--kv-cache-mib",
        "1024",
        "--device",
        "cpu",
    ];
    let server = std::sync::Arc::new(Server::start_on(&dir.path().display().to_string(), &args).await);
    let asking = std::sync::Arc::clone(&server);
    let prompts: Vec<_> = (0..4).map(|first| vec![first; 500]).collect();
    let body = json!({ "model": "base", "prompt": prompts, "max_tokens": 1 });
    let asking = tokio::spawn(async move { asking.complete(body).await.0 });
    let (mut slowest, mut was_hung) = (Duration::ZERO, false);
    while !asking.is_finished() {
        for (path, limit) in [("/health", 0.9), ("/ping", 0.9), ("/metrics", 2.5), ("/v1/models", 2.5)] {
            let started = Instant::now();
            let (status, body) = server.get(path).await;
            assert!(started.elapsed().as_secs_f32() < limit, "{path}: {:?}", started.elapsed());
            if path == "/health" {
                slowest = slowest.max(started.elapsed());
                was_hung |= status == 503 && body.contains("--step-seconds");
            }
        }
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(asking.await.expect("it is answered"), 200);
    assert!(was_hung, "the step was short: {slowest:?}");
    assert_eq!(server.get("/health").await.0, 200);
}

/// Connections without a request, and requests whose bodies do not come, which are told of it, hold up no end.
#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_come_does_not_hold_up_the_end() {
    let server = Server::start(&["--drain-seconds", "60"]).await;
    let mut halves = Vec::new();
    for _ in 0..20 {
        halves.push(connect(&server, &post("{\"model\":", 1000)).await);
    }
    let idle = [connect(&server, b"").await, connect(&server, b"GET /health HTTP/1.1\r\n").await];
    // On a connection that has been used, too.
    let mut kept = connect(&server, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert!(kept.read(&mut [0; 1000]).await.expect("it is answered") > 0);
    kept.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n").await.expect("the server reads");
    sleep(Duration::from_millis(200)).await;
    let started = Instant::now();
    server.running.shut_down().await.expect("the server ends");
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    drop(idle);
    for mut half in halves {
        let mut answer = Vec::new();
        // What it has not sent may reset it.
        let _ = half.read_to_end(&mut answer).await;
        assert!(answer.starts_with(b"HTTP/1.1 503 "), "{}", String::from_utf8_lossy(&answer));
    }
}

/// Sends bytes on a connection of its own.
async fn connect(server: &Server, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(server.running.address()).await.expect("the server accepts");
    stream.write_all(bytes).await.expect("the server reads");
    stream
}

fn post(body: &str, length: usize) -> Vec<u8> {
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: ";
    format!("{head}{length}\r\n\r\n{body}").into_bytes()
}

/// Neither a head nor a body that does not come, nor a reader that stands still, outlives the time of a request.
#[tokio::test(flavor = "multi_thread")]
async fn clients_that_stand_still_are_left() {
    let server = Server::start(&["--request-seconds", "2", "--drain-seconds", "60", "--max-model-len", "512"]).await;
    // Each token is 16 KB of log-probabilities, so that the answer fills what the sockets take.
    let body = json!({
        "model": "base", "prompt": [vec![1; 16], vec![2; 16], vec![3; 16]], "max_tokens": 400, "ignore_eos": true,
        "stream": true,
        "n": 40, "temperature": 1, "logprobs": 20,
    })
    .to_string();
    let idle = connect(&server, b"").await;
    let mut head = connect(&server, b"GET /health HTTP/1.1\r\nhost:").await;
    let mut half = connect(&server, &post("{\"model\":", 1000)).await;
    let mut reader = connect(&server, &post(&body, body.len())).await;
    // One that never says anything, and goes on saying nothing.
    let mut slow = connect(&server, b"").await;
    let dripping = tokio::spawn(async move {
        for byte in b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ".iter().chain(std::iter::repeat_n(&b'a', 1000)) {
            if slow.write_all(&[*byte]).await.is_err() {
                return;
            }
            sleep(Duration::from_millis(50)).await;
        }
        panic!("the head took a minute");
    });
    let limit = Duration::from_secs(20);
    let mut answer = Vec::new();
    let ended = timeout(limit, half.read_to_end(&mut answer)).await.expect("the wait for a body ends");
    ended.expect("the connection is closed in order");
    assert!(answer.starts_with(b"HTTP/1.1 408 "), "{}", String::from_utf8_lossy(&answer));
    let mut nothing = Vec::new();
    // It may be reset, or closed.
    let _ = timeout(limit, head.read_to_end(&mut nothing)).await.expect("the wait for a head ends");
    timeout(limit, dripping).await.expect("a slow head ends").expect("it is cut");
    server.holds_nothing().await;
    // What is left of the stream ends.
    let mut left = vec![0; 1 << 20];
    let started = Instant::now();
    while !matches!(timeout(limit, reader.read(&mut left)).await.expect("the stream ends"), Ok(0) | Err(_)) {
        assert!(started.elapsed() < limit, "the stream goes on");
    }
    drop(idle);
    let started = Instant::now();
    server.running.shut_down().await.expect("the server ends");
    assert!(started.elapsed() < Duration::from_secs(30), "something is still served");
}

/// A stream that takes too long ends with an error.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_stream_ends_with_an_error() {
    let server =
        Server::start(&["--request-seconds", "1", "--max-num-batched-tokens", "1", "--max-num-seqs", "1"]).await;
    let body = json!({
        "model": "base", "prompt": [1], "max_tokens": 500, "ignore_eos": true, "stream": true, "n": 100,
        "temperature": 1,
    });
    let chunks = chunks(server.send("/v1/completions", body.to_string()).await).await;
    let error = &chunks.last().expect("a stream has chunks")["error"];
    assert_eq!((&error["code"], &error["message"]), (&json!(504), &json!("The request took too long.")));
    server.holds_nothing().await;
}

/// The numbers of requests that run and wait, with which a router decides.
#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_what_their_names_say() {
    let server = Server::start(&["--max-num-seqs", "1", "--max-num-batched-tokens", "1"]).await;
    let body =
        json!({ "model": "base", "prompt": vec![1; 400], "max_tokens": 100, "ignore_eos": true, "stream": true });
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push(server.send("/v1/completions", body.to_string()).await);
    }
    let mut seen = (0.0, 0.0);
    for _ in 0..200 {
        seen = (
            server.metric("vllm:num_requests_running", &[]).await,
            server.metric("vllm:num_requests_waiting", &[]).await,
        );
        if seen == (1.0, 2.0) {
            break;
        }
        sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(seen, (1.0, 2.0));
    drop(streams);
    server.holds_nothing().await;
}

/// What is counted for each adapter, and which adapters a router is told of: those that run, and those on the device.
#[tokio::test(flavor = "multi_thread")]
async fn metrics_name_adapters() {
    let root = fixture("adapters").display().to_string();
    let server = Server::start(&["--enable-lora", "--lora-root", &root]).await;
    for (name, folder) in [("saffron", "r8-all"), ("quartz", "lm-head")] {
        assert_eq!(server.load(name, folder, false).await.0, 200);
    }
    for _ in 0..2 {
        assert_eq!(server.ask("saffron").await.0, 200);
    }
    assert_eq!(server.ask("base").await.0, 200);
    let labels = ["adapter=\"saffron\"", "model_name=\"base\""];
    let mut counts = Vec::new();
    for name in ["requests", "prompt_tokens", "generation_tokens"] {
        counts.push(server.metric(&format!("aril_serve:adapter_{name}_total"), &labels).await);
    }
    assert_eq!(counts, [2.0, 10.0, 6.0]);
    let (_, metrics) = server.get("/metrics").await;
    let listed = |name: &str| {
        metrics.lines().filter(|line| line.starts_with(&format!("{name}{{"))).collect::<Vec<_>>().join("\n")
    };
    assert!(!listed("aril_serve:adapter_requests_total").contains("quartz"), "it has had none");
    // Idle: on the device, and not running.
    let (running, on_device) = (listed("vllm:lora_requests_info"), listed("aril_serve:lora_requests_info"));
    assert!(running.contains("running_lora_adapters=\"\""), "{running}");
    assert!(on_device.contains("running_lora_adapters=\"saffron,quartz\""), "{on_device}");
}

/// A request that needs the whole cache runs, and so does the next one.
#[tokio::test(flavor = "multi_thread")]
async fn the_last_block_is_used() {
    let server = Server::start(&["--max-num-seqs", "1", "--max-model-len", "64", "--block-size", "16"]).await;
    for token in [1, 2, 1] {
        let body = json!({ "model": "base", "prompt": vec![token; 10], "max_tokens": 54, "ignore_eos": true });
        let answer = timeout(Duration::from_secs(60), server.complete(body)).await.expect("it runs");
        assert_eq!((answer.0, &answer.1["usage"]["completion_tokens"]), (200, &json!(54)), "{}", answer.1);
    }
    server.holds_nothing().await;
}

/// What the only request held is given back though nothing comes after it.
#[tokio::test(flavor = "multi_thread")]
async fn an_idle_engine_holds_nothing() {
    let root = fixture("adapters").display().to_string();
    let server =
        Server::start(&["--enable-lora", "--lora-root", &root, "--max-num-batched-tokens", "1", "--max-num-seqs", "1"])
            .await;
    assert_eq!(server.load("saffron", "r8-all", false).await.0, 200);
    let free = async || server.metric("aril_pool_memory_bytes", &["tier=\"device\"", "state=\"free\""]).await;
    let before = free().await;
    let body = json!({
        "model": "saffron", "prompt": vec![1; 400], "max_tokens": 100, "ignore_eos": true, "stream": true, "n": 100,
    });
    let stream = server.send("/v1/completions", body.to_string()).await;
    while server.metric("aril_pool_leases", &[]).await == 0.0 {
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(server.unload("saffron").await.0, 200);
    drop(stream);
    server.holds_nothing().await;
    let mut after = free().await;
    for _ in 0..200 {
        if after > before {
            break;
        }
        sleep(Duration::from_millis(10)).await;
        after = free().await;
    }
    assert!(after > before, "{after} of {before} bytes are free");
    assert_eq!(server.metric("aril_pool_adapters", &["state=\"registered\""]).await, 0.0);
}

/// Bodies are read, templates rendered and texts tokenized beside the only thread that serves.
#[tokio::test]
async fn long_work_stops_nobody() {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let template = dir.path().join("template.jinja");
    let long = "{% for i in range(10000) %}{% for j in range(200) %}{{ '' }}{% endfor %}{% endfor %}";
    fs::write(&template, long).expect("the template can be written");
    let server = std::sync::Arc::new(Server::start(&["--chat-template", &template.display().to_string()]).await);
    let long = std::sync::Arc::clone(&server);
    let long = tokio::spawn(async move {
        let body = json!({ "model": "base", "messages": [{ "role": "user", "content": "x" }] });
        error(&long.post("/v1/chat/completions", body).await)
    });
    // Until it has arrived.
    sleep(Duration::from_millis(100)).await;
    assert_eq!(server.get("/health").await.0, 200);
    assert!(!long.is_finished(), "it was short");
    let bound = "The chat template takes too long, or too much memory, for the messages.";
    assert_eq!(long.await.expect("it is answered"), (400, bound.into()));
}
