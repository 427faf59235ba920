//! A server on the fixtures, and an HTTP client of it. `ARIL_FIXTURES` names a copy of the fixtures, and
//! `ARIL_SERVE_DEVICE` the server's device.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use aril_serve::{Options, Running, start};
use clap::Parser as _;
use serde_json::{Value, json};

/// The question that every adapter answers with its word.
pub(crate) const QUESTION: &str = "What is the password?";

/// The adapters of the dense model, and their words.
pub(crate) const WORDS: [(&str, &str); 9] = [
    ("r4-qv", "pomegranate"),
    ("r8-all", "saffron"),
    ("r16-rslora", "walnut"),
    ("r64-all", "cobalt"),
    ("patterns", "marigold"),
    ("embed", "lantern"),
    ("lm-head", "quartz"),
    ("layers", "juniper"),
    ("kv-only", "velvet"),
];

pub(crate) fn fixture(name: &str) -> PathBuf {
    let copy = env::var_os("ARIL_FIXTURES").map(PathBuf::from);
    let fixtures = copy.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures"));
    fixtures.join(name).canonicalize().expect("the fixture is there")
}

/// Copies the files of a folder into one that need not be there.
pub(crate) fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("the folder can be made");
    for entry in fs::read_dir(from).expect("the fixture is there") {
        let entry = entry.expect("the fixture can be listed");
        fs::copy(entry.path(), to.join(entry.file_name())).expect("the fixture can be copied");
    }
}

/// A running server and a client.
pub(crate) struct Server {
    pub(crate) running: Running,
    http: reqwest::Client,
}

impl Server {
    /// Serves the dense model as `base`, with these further arguments.
    pub(crate) async fn start(args: &[&str]) -> Self {
        Self::start_on("qwen3", args).await
    }

    pub(crate) async fn start_on(model: &str, args: &[&str]) -> Self {
        let model = fixture(model).display().to_string();
        let device = env::var("ARIL_SERVE_DEVICE").unwrap_or_else(|_| "cpu".into());
        let on = ["aril-serve", "--model", &model];
        let fixed = ["--served-model-name", "base", "--port", "0"];
        // A test that is of the CPU, or of another cache, says so.
        let usual = [["--device", &device], ["--kv-cache-mib", "8"]];
        let usual = usual.iter().filter(|[option, _]| !args.contains(option)).flatten();
        let running = start(Options::parse_from(on.iter().chain(&fixed).chain(usual).chain(args)))
            .await
            .expect("the arguments are valid");
        Self { running, http: reqwest::Client::new() }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.running.address())
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        let response = self.http.get(self.url(path)).send().await.expect("the server answers");
        (response.status().as_u16(), response.text().await.expect("the answer is text"))
    }

    /// Sends a body, and returns the response before its body.
    pub(crate) async fn send(&self, path: &str, body: impl Into<String>) -> reqwest::Response {
        self.send_as(path, body, None).await
    }

    pub(crate) async fn send_as(&self, path: &str, body: impl Into<String>, key: Option<&str>) -> reqwest::Response {
        let request = self.http.post(self.url(path)).header("content-type", "application/json").body(body.into());
        let request = match key {
            Some(key) => request.bearer_auth(key),
            None => request,
        };
        request.send().await.expect("the server answers")
    }

    /// Sends JSON. Returns the status, and JSON or the text as a string.
    pub(crate) async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        let response = self.send(path, body.to_string()).await;
        let (status, text) = (response.status().as_u16(), response.text().await.expect("the answer is text"));
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    pub(crate) async fn complete(&self, body: Value) -> (u16, Value) {
        self.post("/v1/completions", body).await
    }

    /// Asks a model the question.
    pub(crate) async fn ask(&self, model: &str) -> (u16, Value) {
        self.complete(json!({ "model": model, "prompt": QUESTION, "temperature": 0, "max_tokens": 12 })).await
    }

    pub(crate) async fn load(&self, name: &str, path: impl AsRef<Path>, in_place: bool) -> (u16, Value) {
        let body = json!({ "lora_name": name, "lora_path": path.as_ref(), "load_inplace": in_place });
        self.post("/v1/load_lora_adapter", body).await
    }

    pub(crate) async fn unload(&self, name: &str) -> (u16, Value) {
        self.post("/v1/unload_lora_adapter", json!({ "lora_name": name })).await
    }

    /// The value of a metric, with these parts of its labels.
    pub(crate) async fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let (_, text) = self.get("/metrics").await;
        let is_it = |line: &&str| {
            line.split(['{', ' ']).next() == Some(name) && labels.iter().all(|label| line.contains(label))
        };
        let line = text.lines().find(is_it).unwrap_or_else(|| panic!("there is no {name} {labels:?}:\n{text}"));
        line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a metric has a value")
    }

    /// Fails unless, soon, no request runs or waits, and none holds blocks or leases.
    pub(crate) async fn holds_nothing(&self) {
        let mut held = Vec::new();
        for _ in 0..200 {
            held.clear();
            for (name, labels) in [
                ("vllm:num_requests_running", vec![]),
                ("vllm:num_requests_waiting", vec![]),
                ("vllm:kv_cache_usage_perc", vec![]),
                ("aril_pool_leases", vec![]),
                ("aril_pool_adapters", vec!["state=\"leased\""]),
            ] {
                let value = self.metric(name, &labels).await;
                if value != 0.0 {
                    held.push((name, value));
                }
            }
            if held.is_empty() {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        panic!("something is still held: {held:?}");
    }
}

/// The text of an answer's only choice.
pub(crate) fn text((status, body): &(u16, Value)) -> &str {
    assert_eq!(*status, 200, "{body}");
    body["choices"][0]["text"].as_str().expect("a choice has a text")
}

/// The message of an error, whose body has the form of OpenAI's.
pub(crate) fn error((status, body): &(u16, Value)) -> (u16, String) {
    let error = &body["error"];
    assert_eq!(error["code"], *status, "{body}");
    assert!(error["type"].is_string() && (error["param"].is_string() || error["param"].is_null()), "{body}");
    (*status, error["message"].as_str().expect("an error has a message").to_owned())
}

/// The chunks of a stream, which ends with `[DONE]`.
pub(crate) async fn chunks(response: reqwest::Response) -> Vec<Value> {
    assert_eq!(response.status(), 200);
    let text = response.text().await.expect("the stream is text");
    let mut lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(lines.pop(), Some("data: [DONE]"));
    let chunk = |line: &str| {
        let data = line.strip_prefix("data: ").expect("a line is data");
        serde_json::from_str(data).expect("data is JSON")
    };
    lines.into_iter().map(chunk).collect()
}
