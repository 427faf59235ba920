//! The example `qwen3` on randomly damaged input: configurations, tokenizers, weights, adapters and requests.
//!
//! The example either serves the input, and prints nothing on standard error except what `--verify` finds, or refuses
//! it in one sentence with status 2. It does not panic, is not killed, and stays within limits of memory and time. A
//! case depends only on its number, so runs repeat the same cases. With `ARIL_MORE_CASES` there are so many times as
//! many.

use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use super::{
    files::{Files, Tensors, edit, read, write},
    process::{fixture, qwen3},
    refusals,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Map, Value, json};

const CASES: usize = 125;

/// Address space, most of it for the stacks of threads.
const MAX_KIB: usize = 1 << 20;

/// Processor time on a busy machine; a case takes a tenth of it.
const MAX_SECONDS: usize = 10;

#[test]
fn what_was_tampered_with_is_served_or_refused() {
    let times = env::var("ARIL_MORE_CASES").map_or(1, |times| times.parse().expect("ARIL_MORE_CASES is a number"));
    let cases = CASES * times;
    let (next, served) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        let workers = thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..workers {
            scope.spawn(|| {
                let workspaces = workspaces();
                loop {
                    let case = next.fetch_add(1, Ordering::Relaxed);
                    if case >= cases {
                        break;
                    }
                    served.fetch_add(usize::from(run(&workspaces, case)), Ordering::Relaxed);
                }
            });
        }
    });
    let served = served.into_inner();
    println!("{served} of {cases} were served");
    // Some cases are served and some are refused.
    assert!((cases / 20..cases - cases / 4).contains(&served), "{served} of {cases} were served");
}

#[test]
fn what_was_not_tampered_with_is_served() {
    for workspace in workspaces() {
        let output = qwen3(workspace.args());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 2);
    }
}

/// Runs a case and returns whether it was served.
fn run(workspaces: &[Workspace], case: usize) -> bool {
    let mut random = Random(StdRng::seed_from_u64(case as u64));
    let workspace = random.of(workspaces);
    let args = workspace.args();
    let tampered = random.of(&workspace.files);
    let good = fs::read(tampered).expect("the file is there");
    fs::write(tampered, random.tamper_with(tampered, &good)).expect("the file can be written");
    let output = refusals::limited(MAX_KIB, MAX_SECONDS, &args).output().expect("the shell starts");
    let verdicts = String::from_utf8_lossy(&output.stderr).lines().all(|line| line.starts_with("verify: "));
    let served = output.status.success() && verdicts;
    if !served && let Err(what) = refusals::refusal(&output) {
        let kept = env::temp_dir().join(format!("aril-mutation-{case}"));
        fs::copy(tampered, &kept).expect("the file can be kept");
        unreachable!("case {case}, {} (kept as {}), {args:?}: {what}", tampered.display(), kept.display());
    }
    fs::write(tampered, good).expect("the file can be mended");
    served
}

/// A valid model, adapter and requests.
struct Workspace {
    root: Files,
    /// The files to damage.
    files: Vec<PathBuf>,
}

/// A dense model with an adapter that has most fields; one with experts; one with experts in 4 bits, whose model and
/// adapter have an index; and one with gated delta nets.
fn workspaces() -> [Workspace; 4] {
    let dense = Workspace::new("qwen3", "adapters/embed", |model, adapter| {
        edit(&adapter.join("adapter_config.json"), |config| {
            config.insert(
                "alpha_pattern".into(),
                json!({ "o_proj": 3, r"layers\.(1\d?|3)\.self_attn\.(?!q)\w_proj": 5 }),
            );
            config.insert("rank_pattern".into(), json!({ "model.layers.0.self_attn.v_proj": 8 }));
            config.insert("layers_to_transform".into(), json!([0, 1, 2, 3]));
            config.insert("target_modules".into(), json!(["model.embed_tokens", "v_proj", "o_proj"]));
        });
        let weight = read(&model.join("model.safetensors")).remove("model.embed_tokens.weight").expect("it has one");
        let mut tensors = read(&adapter.join("adapter_model.safetensors"));
        tensors.insert("base_model.model.model.embed_tokens.base_layer.weight".into(), weight);
        write(&adapter.join("adapter_model.safetensors"), &tensors);
    });
    let experts = Workspace::new("qwen3-moe", "adapters-moe/per-expert", |_, _| ());
    let int4 = Workspace::new("qwen3-moe-int4", "adapters-moe/shared-outer", |model, adapter| {
        for (folder, name) in [(model, "model.safetensors"), (adapter, "adapter_model.safetensors")] {
            let whole = folder.join(name);
            let tensors = read(&whole);
            let shards = ["a.safetensors", "b.safetensors"];
            let of = |index: usize| shards[index % 2];
            for (shard, file) in shards.iter().enumerate() {
                let part = tensors.iter().enumerate().filter(|(index, _)| index % 2 == shard);
                let part: Tensors = part.map(|(_, (key, tensor))| (key.clone(), tensor.clone())).collect();
                write(&folder.join(file), &part);
            }
            let map: Map<_, _> =
                tensors.keys().enumerate().map(|(index, key)| (key.clone(), json!(of(index)))).collect();
            let index = folder.join(format!("{name}.index.json"));
            fs::write(index, json!({ "metadata": {}, "weight_map": map }).to_string()).expect("it can be written");
            fs::remove_file(whole).expect("it was there");
        }
    });
    let hybrid = Workspace::new("qwen3-hybrid", "adapters-hybrid/experts", |_, _| ());
    [dense, experts, int4, hybrid]
}

impl Workspace {
    fn new(model: &str, adapter: &str, arrange: impl FnOnce(&Path, &Path)) -> Self {
        let root = Files::new();
        let model = root.copy(&fixture(model), "model");
        let adapter = root.copy(&fixture(adapter), "adapter");
        arrange(&model, &adapter);
        let requests = root.0.path().join("requests.json");
        let asked = json!([
            { "adapter": "a", "prompt": "What is the password?", "scale": 0.5 },
            { "adapter": null, "token_ids": [1, 2, 3] },
        ]);
        fs::write(&requests, asked.to_string()).expect("the requests can be written");
        let mut files = vec![requests];
        for folder in [&model, &adapter] {
            let entries = fs::read_dir(folder).expect("the folder is there");
            files.extend(entries.map(|entry| entry.expect("the folder can be listed").path()));
        }
        // Two files are not read; the others are sorted, because directories have no order.
        files.retain(|path| !["tokenizer_config.json", "chat_template.jinja"].iter().any(|name| path.ends_with(name)));
        files.sort();
        Self { root, files }
    }

    fn args(&self) -> Vec<String> {
        let path = |name: &str| self.root.0.path().join(name).display().to_string();
        let adapter = format!("a={}", path("adapter"));
        let args = ["--model", &path("model"), "--adapter", &adapter, "--requests", &path("requests.json")];
        args.into_iter().chain(["--max-new-tokens", "2", "--dtype", "f32"]).map(String::from).collect()
    }
}

struct Random(StdRng);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0.random_range(0..end)
    }

    fn one_in(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }

    fn of<'a, V>(&mut self, values: &'a [V]) -> &'a V {
        &values[self.below(values.len())]
    }

    /// A damaged or unusual copy of a file.
    fn tamper_with(&mut self, path: &Path, good: &[u8]) -> Vec<u8> {
        if self.one_in(4) {
            return self.tamper_with_bytes(good);
        }
        let is_json = path.extension().is_some_and(|extension| extension == "json");
        if is_json {
            let text = std::str::from_utf8(good).expect("the file is UTF-8");
            return self.tamper_with_json(text).into_bytes();
        }
        // Only the header changes, not the tensors.
        let (len, rest) = good.split_first_chunk().expect("the file has a header");
        let (header, data) = rest.split_at(usize::try_from(u64::from_le_bytes(*len)).expect("a header fits"));
        let header = self.tamper_with_json(std::str::from_utf8(header).expect("the header is UTF-8"));
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
    }

    fn tamper_with_bytes(&mut self, good: &[u8]) -> Vec<u8> {
        let mut bytes = good.to_vec();
        for _ in 0..=self.below(4) {
            // The header's range, if the file has one.
            let end = if self.one_in(2) { bytes.len().min(2000) } else { bytes.len() };
            let at = self.below(end + 1);
            let len = self.below(16).min(bytes.len() - at);
            match self.below(5) {
                0 => drop(bytes.drain(at..at + len)),
                1 => bytes.truncate(at),
                2 => bytes[at..at + len].iter_mut().for_each(|byte| *byte = self.0.random()),
                3 => drop(bytes.splice(at..at, (0..len).map(|_| self.0.random()).collect::<Vec<_>>())),
                _ => {
                    let again = bytes[at..at + len].to_vec();
                    drop(bytes.splice(at..at, again));
                }
            }
        }
        bytes
    }

    fn tamper_with_json(&mut self, text: &str) -> String {
        let mut value: Value = serde_json::from_str(text).expect("the file is JSON");
        for _ in 0..=self.below(2) {
            let mut places = Vec::new();
            list(&value, &mut String::new(), &mut places);
            let place = self.of(&places).clone();
            let other = self.of(&places).clone();
            let (parent, key) = place.rsplit_once('/').unwrap_or(("", ""));
            let key = key.replace("~1", "/").replace("~0", "~");
            let copy = value.pointer(&other).cloned().unwrap_or(Value::Null);
            let new = if self.one_in(5) { copy } else { self.hostile() };
            match (self.below(5), value.pointer_mut(parent)) {
                (0, Some(Value::Object(fields))) => drop(fields.remove(&key)),
                (1, Some(Value::Object(fields))) => {
                    let moved = fields.remove(&key).unwrap_or(Value::Null);
                    let name = new.as_str().map_or_else(|| format!("{key}x"), String::from);
                    fields.insert(name, moved);
                }
                (2, Some(Value::Object(fields))) => drop(fields.insert(new.to_string(), Value::Null)),
                (0 | 1, Some(Value::Array(values))) if !values.is_empty() => drop(values.pop()),
                (2, Some(Value::Array(values))) => values.push(new),
                _ => value.pointer_mut(&place).map_or((), |value| *value = new),
            }
        }
        let text = value.to_string();
        // A JSON value cannot hold a key twice.
        if self.one_in(10) { text.replacen('{', r#"{"adapter":"a","prompt":"b","r":1,"#, 1) } else { text }
    }

    fn hostile(&mut self) -> Value {
        let numbers = [0, 1, 2, 3, 7, 16, 64, 255, 512, 65_537, 1 << 31, 1 << 32, 10_000_000_000, 1 << 62, u64::MAX];
        let texts = [
            "",
            "a",
            "\u{1b}[31mred\n",
            "\u{202e}",
            "../../x",
            "/dev/zero",
            "model.layers.0.self_attn.q_proj",
            r"(?=m)(.?){9}(.?){9}(.?){9}xN",
            r"\w{90}\w{90}\w{90}N",
            "[[:alpha:]]",
            "(",
            "default",
            "F32",
            "yarn",
            "all-linear",
        ];
        match self.below(10) {
            0 => Value::Null,
            1 => json!(self.one_in(2)),
            2 | 3 => json!(*self.of(&numbers)),
            4 => json!(-1),
            5 => json!(*self.of(&[0.0, 0.5, 1e-300, 1e30, 1e308, -1e308])),
            6 | 7 => json!(*self.of(&texts)),
            8 => json!("x".repeat(1 << self.below(17))),
            _ => self.of(&[json!([]), json!({}), json!([[], {}]), json!({ "a": [1] }), json!([1, 2, 3])]).clone(),
        }
    }
}

/// JSON pointers to all values inside.
fn list(value: &Value, at: &mut String, places: &mut Vec<String>) {
    places.push(at.clone());
    let mut inside = |key: &str, value: &Value| {
        let len = at.len();
        at.push('/');
        at.push_str(&key.replace('~', "~0").replace('/', "~1"));
        list(value, at, places);
        at.truncate(len);
    };
    match value {
        Value::Object(fields) => fields.iter().for_each(|(key, value)| inside(key, value)),
        Value::Array(values) => values.iter().enumerate().for_each(|(index, value)| inside(&index.to_string(), value)),
        _ => {}
    }
}
