//! What no client can bring about, or see.

use std::{path::Path, sync::mpsc};

use aril::pool::Source;
use axum::{
    body::{Body, to_bytes},
    extract::FromRequest as _,
};
use clap::Parser as _;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use super::*;

const LIMIT: Duration = Duration::from_secs(60);

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

fn options(arguments: &[&str]) -> Options {
    let model = fixture("qwen3").display().to_string();
    Options::parse_from(["aril-serve", "--model", &model, "--kv-cache-mib", "8"].iter().chain(arguments))
}

/// Until it is, a name that is being loaded is not unknown. One that is unloaded meanwhile leaves nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_unloaded_while_it_is_loaded() {
    let (server, thread) = load(options(&["--enable-lora"]), true).expect("the fixture is whole");
    let registered = async || server.engine.report().await.expect("the engine lives").tiers.len();
    let (open, opened) = mpsc::channel();
    let opened = Mutex::new(opened);
    let opener = Opener::new(move |path| {
        opened.lock().expect("nobody panics").recv().expect("it is told to open");
        std::fs::File::open(path)
    });
    let (loading, dir) = (Arc::clone(&server), fixture("adapters/r8-all"));
    let loading = tokio::spawn(async move { loading.load("slow", dir, opener, OnDuplicate::Refuse, false).await });
    let end = Instant::now() + Duration::from_secs(30);
    let refused = loop {
        let refused = server.resolve("slow").expect_err("it is not there");
        if !refused.message().contains("does not exist") {
            break refused;
        }
        assert!(Instant::now() < end, "the name is never one that is being loaded");
        tokio::time::sleep(Duration::from_millis(1)).await;
    };
    assert_eq!(refused.into_response().status(), 503);
    assert!(server.registry.unload("slow").is_ok_and(|unloaded| unloaded.versions.is_empty()));
    for _ in 0..10 {
        // It may have opened all.
        let _ = open.send(());
    }
    let refused = loading.await.expect("it does not panic").expect_err("it was unloaded");
    assert_eq!(refused.into_response().status(), 400);
    assert_eq!((registered().await, server.loaded().len()), (0, 0));

    let dir = fixture("adapters/r8-all");
    for name in ["one", "two"] {
        server.load(name, dir.clone(), Opener::default(), OnDuplicate::Refuse, false).await.expect("it is served");
    }
    server.load("two", dir, Opener::default(), OnDuplicate::Replace, false).await.expect("it is served");
    assert_eq!((registered().await, server.loaded().len()), (2, 2));
    for name in ["one", "two"] {
        let unloaded = server.registry.unload(name).expect("it is there");
        unloaded.versions.into_iter().for_each(|version| server.forget(version));
    }
    assert_eq!((registered().await, server.loaded().len()), (0, 0));
    server.engine.stop();
    thread.join().expect("the engine ends");
}

/// A name that is replaced is there all the time, also for a request that was read before.
#[tokio::test(flavor = "multi_thread")]
async fn a_name_stands_for_a_version_while_it_is_replaced() {
    let (server, thread) = load(options(&["--enable-lora"]), true).expect("the fixture is whole");
    let replace = async |folder| {
        let dir = fixture("adapters").join(folder);
        server.load("a", dir, Opener::default(), OnDuplicate::Replace, false).await.expect("it is served")
    };
    let read = async || {
        let body = json!({ "model": "a", "prompt": "What is the password?", "temperature": 0, "max_tokens": 12 });
        let mut request = Request::new(Body::from(body.to_string()));
        let (_, ending) = watch::channel(false);
        let deadline = tokio::time::Instant::now() + LIMIT;
        let arrival = access::Arrival { deadline, peer: [127, 0, 0, 1].into(), ending };
        let access = Arc::new(access::Access::new(Arc::clone(&server), arrival, &request));
        request.extensions_mut().insert(access);
        let received = body::Received::from_request(request, &server).await.expect("it has arrived");
        server.prepare(received, Server::completion).await.expect("the name is there")
    };
    replace("r8-all").await;
    let job = read().await;
    replace("r64-all").await;
    let answer = server.answer(job).await.expect("it is answered").into_body();
    let answer = to_bytes(answer, usize::MAX).await.expect("it is whole");
    assert!(String::from_utf8_lossy(&answer).contains(" cobalt."), "{answer:?}");

    let job = read().await;
    drop(server.registry.unload("a").expect("it is there"));
    let refused = server.answer(job).await.expect_err("it is gone");
    assert_eq!(refused.into_response().status(), 404);
    server.engine.stop();
    thread.join().expect("the engine ends");
}

/// A client that reads slowly gets all of an answer which was made before the end of the server began.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_waits_for_answers_on_their_way() {
    // More than the sockets take.
    const BYTES: usize = 64 << 20;
    let app = Router::new().route("/", get(async || vec![b'x'; BYTES]));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("there is a port");
    let address = listener.local_addr().expect("it is bound");
    let (stop, stopped) = watch::channel(false);
    let mut serving = tokio::spawn(connections::serve(listener, app, LIMIT, stopped));
    let mut client = TcpStream::connect(address).await.expect("the server accepts");
    client.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.expect("the server reads");
    let mut answer = vec![0];
    client.read_exact(&mut answer).await.expect("it is answered");
    stop.send(true).expect("it is served");
    assert!(timeout(Duration::from_secs(2), &mut serving).await.is_err(), "the server ends beside its answer");
    client.read_to_end(&mut answer).await.expect("the answer goes on");
    assert!(answer.len() > BYTES, "{} bytes", answer.len());
    serving.await.expect("it does not panic");
}

/// Between the engine's report and the list of names, an adapter may come: here, one that the engine does not know.
#[tokio::test(flavor = "multi_thread")]
async fn an_adapter_that_has_just_come_is_in_host_memory() {
    let [(server, thread), (other, others_thread)] =
        [(); 2].map(|()| load(options(&["--enable-lora"]), true).expect("the fixture is whole"));
    let source = Source::directory(fixture("adapters/r8-all"), &other.described.model, other.dtype);
    let source = source.expect("the fixture is whole");
    let version = other.engine.load(source, false).await.expect("the engine lives").expect("it can be read");
    let pending = server.registry.begin_load("new", OnDuplicate::Refuse).expect("nobody has the name");
    assert!(pending.serve(version).expect("it is loaded").version.is_none());
    let models = server.models().await.expect("the engine lives");
    assert_eq!((&models[1]["id"], &models[1]["tier"]), (&json!("new"), &json!("host")));
    for (server, thread) in [(server, thread), (other, others_thread)] {
        server.engine.stop();
        thread.join().expect("the engine ends");
    }
}

/// A key file ends with an empty line in many editors.
#[test]
fn the_last_lines_of_a_file_of_keys_may_be_empty() {
    let file = tempfile::NamedTempFile::new().expect("there is a place for temporary files");
    std::fs::write(file.path(), "one\ntwo\n\n \n").expect("it can be written");
    let path = file.path().display().to_string();
    let keys = options(&["--api-key", "zero", "--api-key-file", &path]).api_keys().expect("they are keys");
    assert_eq!(keys, ["zero", "one", "two"]);
}

#[tokio::test]
async fn an_engine_that_has_ended_is_not_healthy() {
    let (server, thread) = load(options(&[]), true).expect("the fixture is whole");
    assert!(health(State(Arc::clone(&server))).await.is_ok());
    server.engine.stop();
    thread.join().expect("the engine ends");
    let refused = health(State(Arc::clone(&server))).await.expect_err("it has ended");
    assert_eq!(refused.into_response().status(), 503);
    assert!(metrics::render(State(server), axum::http::HeaderMap::new()).await.is_err());
}

/// A rank that does nothing holds up the engine's step, which probes see before the ranks give up.
#[tokio::test]
async fn a_long_step_is_not_healthy() {
    let (server, thread) = load(options(&["--step-seconds", "1"]), true).expect("the fixture is whole");
    let limit = server.limits.step_time;
    assert_eq!(limit, Duration::from_secs(1));
    assert!(check_step(limit, limit).is_ok());
    let refused = check_step(limit + Duration::from_millis(1), limit).expect_err("it is too long");
    assert!(refused.message().contains("for 1 s (--step-seconds)"), "{}", refused.message());
    assert_eq!(refused.into_response().status(), 503);
    server.engine.stop();
    thread.join().expect("the engine ends");
}

/// A rank's part of the cache is of its own heads. Without a limit, sequences are as long as there is room.
#[test]
fn the_cache_is_what_fits() {
    let config = Config::read(&fixture("qwen3")).expect("the fixture is whole");
    let sizes = |arguments: &[&str]| super::sizes(&options(arguments), &config, DType::BF16);
    let many = ["--max-num-seqs", "100000", "--max-num-batched-tokens", "100000"];
    let blocks = |tp: &str| sizes(&[&many[..], &["--tp", tp]].concat()).expect("it fits").blocks;
    assert_eq!((blocks("2"), blocks("4")), (2 * blocks("1"), 2 * blocks("1")));
    let is_sharing = |arguments: &[&str]| sizes(arguments).expect("it fits").is_sharing;
    assert!(is_sharing(&[]) && !is_sharing(&["--no-enable-prefix-caching"]));

    assert_eq!(sizes(&[]).expect("it fits").max_positions, config.max_positions);
    let long = Config { max_positions: 1 << 20, ..config };
    let sizes = |arguments: &[&str]| super::sizes(&options(arguments), &long, DType::BF16);
    let room = sizes(&[]).expect("as many as fit");
    assert_eq!(room.max_positions, room.blocks as usize * room.block_rows);
    assert_eq!(sizes(&["--max-model-len", "100"]).expect("it fits").max_positions, 100);
    let refused = sizes(&["--max-model-len", "1000000"]).expect_err("it does not fit").to_string();
    assert!(refused.contains(&format!("room for {} tokens", room.max_positions)), "{refused}");
    assert!(sizes(&["--block-size", "100000"]).is_err());
}

/// A text that has as few tokens as there are positions is never refused before it is tokenized, whatever the tokenizer
/// does to it.
#[test]
fn what_fits_is_tokenized() {
    let good = std::fs::read(fixture("qwen3").join("tokenizer.json")).expect("the fixture is whole");
    let good: Value = serde_json::from_slice(&good).expect("it is JSON");
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let tokenizer = |edits: &[(&str, Value)]| {
        let mut changed = good.clone();
        for (place, value) in edits {
            *changed.pointer_mut(place).expect("it is there") = value.clone();
        }
        std::fs::write(dir.path().join("tokenizer.json"), changed.to_string()).expect("it can be written");
        Tokenizer::read(dir.path()).expect("it is whole").expect("it is there")
    };
    let plain = tokenizer(&[]);
    let tokens = (0..512).map(|token| plain.decode(&[token], false).expect("it is a token").repeat(40));
    let spaces = " ".repeat(3000);
    let of_spaces =
        [format!("<|endoftext|>{spaces}"), format!("{spaces}<|endoftext|>{spaces}a"), " \t\n\r".repeat(700)];
    let shrinking = ["e\u{301}", "\u{1fbe}\u{308}\u{301}", "\u{212a}", "\u{fb03}", "A!Z", "ß", "\u{1f600}"]
        .map(|text| text.repeat(1000));
    let texts: Vec<String> = tokens.chain(of_spaces).chain(shrinking).collect();

    let replace =
        |pattern: &str, content| json!({ "type": "Replace", "pattern": { "String": pattern }, "content": content });
    let split = json!({ "type": "Split", "pattern": { "Regex": "[a-z!]+" }, "behavior": "Removed", "invert": false });
    let unknown = [("/pre_tokenizer", Value::Null), ("/model/unk_token", json!("!")), ("/model/fuse_unk", json!(true))];
    let (bound, unbound) = (true, false);
    for (edits, is_bound) in [
        (vec![], bound),
        (vec![("/normalizer", Value::Null)], bound),
        (
            vec![(
                "/normalizer",
                json!({ "type": "Sequence", "normalizers": [{ "type": "NFKC" }, replace(" ", "\u{2581}")] }),
            )],
            bound,
        ),
        (vec![("/added_tokens/0/lstrip", json!(true)), ("/added_tokens/0/rstrip", json!(true))], bound),
        (unknown.to_vec(), bound),
        (vec![("/normalizer", json!({ "type": "Lowercase" }))], unbound),
        (vec![("/normalizer", replace("x", ""))], unbound),
        (vec![("/pre_tokenizer", split)], unbound),
        (vec![("/model", json!({ "type": "WordLevel", "vocab": { "!": 0 }, "unk_token": "!" }))], unbound),
        (
            vec![(
                "/model",
                json!({
                    "type": "WordPiece", "vocab": { "!": 0 }, "unk_token": "!", "continuing_subword_prefix": "##",
                    "max_input_chars_per_word": 100,
                }),
            )],
            unbound,
        ),
    ] {
        let tokenizer = tokenizer(&edits);
        for text in &texts {
            let tokens = tokenizer.encode(text, false, usize::MAX).expect("nothing is too long").len();
            let encoded = tokenizer.encode(text, false, tokens);
            assert!(encoded.is_ok(), "{edits:?}, {:?}: {encoded:?}", text.chars().take(9).collect::<String>());
        }
        // So is white space, unless a token may take any number of it, or it is spelled in two ways.
        let counts_white = edits.iter().all(|(place, value)| {
            !place.ends_with("strip") && !place.ends_with("fuse_unk") && value["type"] != "Sequence"
        });
        for (long, is_bound) in [("x ", is_bound), (" ", is_bound && counts_white), ("\n", is_bound && counts_white)] {
            let refused = tokenizer.encode(&long.repeat(10_000), false, 100).err().map(|error| error.to_string());
            let is_refused = refused.is_some_and(|refused| refused.contains("at least"));
            assert_eq!(is_refused, is_bound, "{edits:?}, {long:?}");
        }
    }
}

/// What is observed takes no memory in the end, though nobody asks for it.
#[test]
fn observations_are_not_kept() {
    let metrics = Metrics::new("base".into()).expect("the names are valid");
    let resident = || -> usize {
        let pages = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
        pages.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("it is a number of pages")
    };
    // 8 bytes each, or 1,000 pages in all. Other tests may take memory meanwhile.
    let grows_little = |_| {
        let before = resident();
        (0..500_000).for_each(|_| metrics.observe("vllm:request_prompt_tokens", 1.0));
        resident() < before + 250
    };
    assert!((0..8).any(grows_little));
}

/// However many adapters there have been, there are few counters.
#[test]
fn few_adapters_have_counters_of_their_own() {
    let metrics = Metrics::new("base".into()).expect("the names are valid");
    for round in 0..2 {
        for adapter in 0..1000 {
            metrics.count_adapter(&format!("adapter-{adapter}"), 2, round);
        }
    }
    let text = metrics.rendered();
    let counters: Vec<_> = text.lines().filter(|line| line.starts_with("aril_serve:adapter_requests_total{")).collect();
    assert_eq!(counters.len(), 201);
    let total = counters.iter().filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum::<u64>();
    assert_eq!(total, 2000);
    assert!(counters.iter().any(|line| line.contains("adapter=\"\"") && line.ends_with(" 1600")), "{counters:?}");
}

#[test]
fn errors_of_files_are_of_their_kind() {
    use std::io::{Error, ErrorKind};

    for (error, status) in [
        (Error::from(ErrorKind::NotFound), 404),
        (Error::from(ErrorKind::NotADirectory), 404),
        (Error::from(ErrorKind::PermissionDenied), 403),
        (Error::from_raw_os_error(24), 503),
        (Error::from_raw_os_error(23), 503),
        (Error::from_raw_os_error(5), 500),
        (Error::from(ErrorKind::InvalidInput), 400),
        (Error::from(ErrorKind::InvalidData), 400),
        (Error::from_raw_os_error(40), 400),
    ] {
        assert_eq!(ApiError::of_file(&error, "").into_response().status(), status, "{error}");
    }
}
