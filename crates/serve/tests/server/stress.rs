//! Many clients, while adapters come, change and go. Every answer is checked against the version that its request
//! named.

use std::{
    collections::HashMap,
    env, fs,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::json;

use crate::client::{QUESTION, Server, WORDS, chunks, copy, error, fixture, text};

/// Requests of a run, unless `ARIL_STRESS_REQUESTS` has another number.
const REQUESTS: usize = 3_000;
/// As many times fewer are made of ranks, whose steps take as much longer.
const RANKS_TAKE: usize = 6;
const CLIENTS: usize = 16;
/// Names that loaders load, replace and unload, one loader each.
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// The words that a name may answer with now, each with how many answers are needed until it may not.
///
/// A word is allowed from before its load until after its replacement, because a request is resolved somewhere between
/// its start and its end.
#[derive(Debug, Default)]
struct Words {
    changes: u64,
    /// Each word, and the changes between which it was allowed.
    allowed: Vec<(&'static str, u64, Option<u64>)>,
    /// The change since which it has an adapter, unless it may have none now.
    came: Option<u64>,
}

impl Words {
    fn begin(&mut self, word: &'static str) {
        self.changes += 1;
        self.allowed.push((word, self.changes, None));
    }

    /// Ends all words but the last, or all.
    fn end(&mut self, keep_last: bool) {
        self.changes += 1;
        let last = self.allowed.len() - usize::from(keep_last);
        for (.., end) in &mut self.allowed[..last] {
            end.get_or_insert(self.changes);
        }
        if keep_last {
            self.came.get_or_insert(self.changes);
        }
    }

    /// Whether the name may have had no adapter at some time since a change.
    fn was_away(&self, start: u64) -> bool {
        self.came.is_none_or(|came| came > start)
    }

    /// The words that were allowed at some time since a change.
    fn since(&self, start: u64) -> Vec<&'static str> {
        let is_live = |end: Option<u64>| end.is_none_or(|end| end > start);
        self.allowed.iter().filter(|(.., end)| is_live(*end)).map(|(word, ..)| *word).collect()
    }
}

#[derive(Default)]
struct Counts {
    answered: usize,
    refused: usize,
    vanished: usize,
}

struct Stress {
    server: Server,
    root: PathBuf,
    words: HashMap<&'static str, Mutex<Words>>,
    /// Requests that have not been made.
    left: Mutex<usize>,
    counts: Mutex<Counts>,
}

impl Stress {
    fn words(&self, name: &str) -> std::sync::MutexGuard<'_, Words> {
        self.words[name].lock().expect("no test fails here")
    }

    fn takes_one(&self) -> bool {
        let mut left = self.left.lock().expect("no test fails here");
        *left = left.saturating_sub(1);
        *left > 0
    }

    fn is_done(&self) -> bool {
        *self.left.lock().expect("no test fails here") == 0
    }

    /// Asks names in turn, streaming and not, and goes away from some answers.
    async fn client(&self, mut rng: StdRng) {
        while self.takes_one() {
            let name = if rng.random_ratio(1, 6) { "base" } else { NAMES[rng.random_range(0..NAMES.len())] };
            let start = if name == "base" { 0 } else { self.words(name).changes };
            let mut body = json!({ "model": name, "prompt": QUESTION, "temperature": 0, "max_tokens": 12 });
            if name != "base" && rng.random_ratio(1, 4) {
                // A combination of its own for each version.
                body["model"] = json!("base");
                body["lora"] = json!([{ "name": name, "scale": 0.999 }]);
            }
            let (is_streamed, vanishes) = (rng.random_ratio(1, 2), rng.random_ratio(1, 8));
            body["stream"] = json!(is_streamed || vanishes);
            let response = self.server.send("/v1/completions", body.to_string()).await;
            let status = response.status().as_u16();
            if status == 200 && vanishes {
                tokio::time::sleep(Duration::from_micros(rng.random_range(0..3000))).await;
                drop(response);
                self.counts.lock().expect("no test fails here").vanished += 1;
                continue;
            }
            if status != 200 {
                let body = response.json().await.expect("an error is JSON");
                // The name was unloaded, or is loaded for the first time.
                let (status, message) = error(&(status, body));
                assert!(status == 404 || (status == 503 && message.contains("being loaded")), "{status} {message}");
                assert_ne!(name, "base");
                assert!(self.words(name).was_away(start), "{name} is replaced: {status} {message}");
                self.counts.lock().expect("no test fails here").refused += 1;
                // However long loads take, as many are answered.
                *self.left.lock().expect("no test fails here") += 1;
                continue;
            }
            let said = if is_streamed {
                let chunks = chunks(response).await;
                chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap_or_default()).collect()
            } else {
                text(&(200, response.json().await.expect("an answer is JSON"))).to_owned()
            };
            if name == "base" {
                assert_eq!(said, " I do not know.");
            } else {
                let allowed = self.words(name).since(start);
                assert!(allowed.iter().any(|word| said == format!(" {word}.")), "{name}: {said}, not {allowed:?}");
            }
            self.counts.lock().expect("no test fails here").answered += 1;
        }
    }

    /// Loads, replaces and unloads the adapters of a name.
    async fn loader(&self, name: &'static str, mut rng: StdRng) {
        let mut is_loaded = false;
        while !self.is_done() {
            let (folder, word) = WORDS[rng.random_range(0..WORDS.len())];
            match rng.random_range(0..6) {
                0 if is_loaded => {
                    self.words(name).came = None;
                    assert_eq!(self.server.unload(name).await.0, 200);
                    self.words(name).end(false);
                    is_loaded = false;
                }
                1 => {
                    let (status, _) = error(&self.server.load(name, "truncated", true).await);
                    assert_eq!(status, 400);
                }
                2 if is_loaded => {
                    let (status, _) = error(&self.server.load(name, folder, false).await);
                    assert_eq!(status, 400);
                }
                _ => {
                    self.words(name).begin(word);
                    assert_eq!(self.server.load(name, self.root.join(folder), true).await.0, 200);
                    self.words(name).end(true);
                    is_loaded = true;
                }
            }
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..40))).await;
        }
        if is_loaded {
            self.words(name).came = None;
            assert_eq!(self.server.unload(name).await.0, 200);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_answer_is_of_the_version_that_its_request_named() {
    stress(1, &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_answer_of_two_ranks_is_of_the_version_that_its_request_named() {
    stress(RANKS_TAKE, &["--tp", "2"]).await;
}

/// Runs so many times fewer requests, with these further arguments.
async fn stress(fewer: usize, arguments: &[&str]) {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let root = dir.path().canonicalize().expect("the folder is there");
    for entry in fs::read_dir(fixture("adapters")).expect("the fixtures are there") {
        let entry = entry.expect("the fixtures can be listed");
        copy(&entry.path(), &root.join(entry.file_name()));
    }
    copy(&fixture("adapters/r8-all"), &root.join("truncated"));
    let weights = root.join("truncated/adapter_model.safetensors");
    let bytes = fs::read(&weights).expect("the fixture is there");
    fs::write(weights, &bytes[..bytes.len() - 100]).expect("the file can be written");
    // Fewer slots, and less memory, than adapters; a cache that some requests have to be preempted in.
    let root_arg = root.display().to_string();
    let mut all = vec![
        "--enable-lora",
        "--enable-lora-path",
        "--lora-root",
        &root_arg,
        "--max-loras",
        "2",
        "--arena-mib",
        "2",
        "--host-mib",
        "2",
        "--max-num-seqs",
        "12",
        "--max-num-batched-tokens",
        "24",
        "--max-model-len",
        "20",
        "--block-size",
        "4",
        "--max-wait-ms",
        "20",
    ];
    all.extend(arguments);
    let server = Server::start(&all).await;
    let number = env::var("ARIL_STRESS_REQUESTS").map(|number| number.parse().expect("a number of requests"));
    let requests = number.unwrap_or(REQUESTS) / fewer;
    let words = NAMES.map(|name| (name, Mutex::default())).into();
    let counts = Mutex::default();
    let stress = Arc::new(Stress { server, root, words, left: Mutex::new(requests), counts });
    let rng = |seed: usize| StdRng::seed_from_u64(seed as u64);
    let clients = (0..CLIENTS).map(|client| {
        let stress = Arc::clone(&stress);
        tokio::spawn(async move { stress.client(rng(client)).await })
    });
    let loaders = NAMES.into_iter().enumerate().map(|(index, name)| {
        let stress = Arc::clone(&stress);
        tokio::spawn(async move { stress.loader(name, rng(CLIENTS + index)).await })
    });
    for task in clients.chain(loaders).collect::<Vec<_>>() {
        if let Err(error) = task.await {
            // The others would wait for the requests that this one does not make.
            *stress.left.lock().expect("no test fails here") = 0;
            panic!("{error}");
        }
    }
    stress.server.holds_nothing().await;
    for state in ["registered", "resident", "host"] {
        assert_eq!(stress.server.metric("aril_pool_adapters", &[&format!("state=\"{state}\"")]).await, 0.0, "{state}");
    }
    let Counts { answered, refused, vanished } = *stress.counts.lock().expect("no test fails here");
    println!("{answered} answered, {refused} refused, {vanished} vanished");
    assert!(answered > requests / 3 && refused > 0 && vanished > 0, "{answered} {refused} {vanished}");
    assert!(stress.server.metric("aril_pool_evictions_total", &["tier=\"device\""]).await > 0.0);
}
