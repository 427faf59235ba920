//! A server under load: the same trace of requests for the base model and for many adapters, by Zipf's law, through
//! HTTP.
//!
//! ```sh
//! cargo run --release -p aril-serve --features cuda --example load -- --model DIR --load-format dummy --device cuda \
//!     --adapters 1000 --rate 24 --requests 480
//! ```
//!
//! All arguments of the server apply. Adapters of random weights are written below `--scratch`: one file, which all of
//! them link to. Prompts are random tokens, and requests arrive when the trace says, whatever the server does.
//!
//! With `--first-tokens RUNS`, it measures the time to the first token for adapters on the device, in host memory and in
//! their directories, whose file is in the page cache, beside 1 and 32 sequences of another adapter. The server then has
//! room for a few adapters, so that there are always some in each place.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use aril_bench::{
    engine::{self, Meta, Record, Run},
    report::percentile,
    trace::{Request, Trace},
};
use aril_serve::{Options, Running, start};
use clap::Parser;
use futures_util::StreamExt as _;
use half::bf16;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use tokio::task::JoinSet;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Adapters that are loaded at the same time.
const LOADS: usize = 8;

/// Adapters whose first tokens are measured, and how many of them have room on the device and in host memory.
const ADAPTERS: u32 = 16;
const ON_DEVICE: usize = 4;
const IN_HOST: usize = 8;
/// From the slowest on, so that each finds an adapter: the last one's is on the device.
const TIERS: [&str; 3] = ["source", "host", "device"];
/// Tokens of the prompt, sequences beside it, and the tokens of their answers.
const PROMPT: usize = 128;
const BESIDE: [u64; 2] = [1, 32];
const ANSWER: usize = 512;

#[derive(Debug, Parser)]
#[command(about = "Measures a server under a trace of requests")]
struct Arguments {
    #[command(flatten)]
    server: Options,
    /// Adapters of the trace
    #[arg(long, default_value_t = 1000)]
    adapters: u32,
    /// Their rank. They change all linear layers
    #[arg(long, default_value_t = 16)]
    rank: usize,
    /// The exponent of Zipf's law
    #[arg(long, default_value_t = 1.0)]
    zipf: f64,
    #[arg(long, default_value_t = 480)]
    requests: usize,
    /// Requests per second; all at once if absent
    #[arg(long)]
    rate: Option<f64>,
    /// Instead of a trace, measures so many first tokens of adapters in each place
    #[arg(long, value_name = "RUNS")]
    first_tokens: Option<usize>,
    /// Where adapters are written
    #[arg(long, default_value = "target/load")]
    scratch: PathBuf,
    /// The GPU's name, for the record
    #[arg(long, default_value = "")]
    gpu: String,
    /// Adds the figures to a record, as JSON
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// When the tokens of a request arrived, after it was sent.
struct Arrivals(Vec<Duration>);

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let Arguments { mut server, mut adapters, rank, first_tokens, scratch, gpu, out, .. } = arguments;
    let started = Instant::now();
    if first_tokens.is_some() {
        adapters = ADAPTERS;
    }
    let bytes = write_adapters(&server.model, &scratch, adapters, rank)?;
    if first_tokens.is_some() {
        // Half of one more, for what blocks are rounded up to.
        let mib = |count: usize| (bytes * (2 * count + 1) / 2).div_ceil(1 << 20);
        (server.arena_mib, server.host_mib) = (mib(ON_DEVICE), mib(IN_HOST));
    }
    let model = server.model.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    server.enable_lora = true;
    server.lora_root = Some(scratch);
    server.served_model_name = vec!["base".into()];
    server.port = 0;
    let longest = server.max_model_len.ok_or("--max-model-len is needed")?;
    let client = Client { running: start(server).await?, http: reqwest::Client::new() };
    let client = Arc::new(client);
    println!("{model}: ready after {:.0} s", started.elapsed().as_secs_f64());
    let loading = Instant::now();
    let load = |adapter: u32| {
        let client = Arc::clone(&client);
        async move {
            let name = name(adapter);
            client.post("/v1/load_lora_adapter", &json!({ "lora_name": name, "lora_path": name })).await
        }
    };
    let mut loads = futures_util::stream::iter((1..=adapters).map(load)).buffer_unordered(LOADS);
    while let Some(loaded) = loads.next().await {
        loaded?;
    }
    drop(loads);
    println!("{adapters} adapters of rank {rank}: loaded in {:.1} s", loading.elapsed().as_secs_f64());

    let mut figures = Run::default();
    if let Some(runs) = first_tokens {
        for beside in BESIDE {
            let [source, host, device] = measure_first_tokens(&client, beside, runs, longest).await?;
            figures.first_tokens.push(engine::FirstToken {
                model: model.clone(),
                rank,
                bytes,
                prompt: PROMPT,
                beside,
                runs,
                device_p50_ms: device,
                host_p50_ms: host,
                source_p50_ms: source,
            });
        }
    } else {
        let Arguments { zipf, requests, rate, .. } = arguments;
        let trace = Trace { seed: 0, requests, adapters, zipf, rate };
        figures.traces = measure_trace(&client, &model, rank, trace, longest).await?;
    }
    if let Some(path) = out {
        let (aril, commit) = (env!("CARGO_PKG_VERSION").to_owned(), option_env!("ARIL_COMMIT").map(str::to_owned));
        let meta = Meta { gpu, aril, commit, seconds: started.elapsed().as_secs_f64(), ..Meta::default() };
        Record::add(&path, Run { meta, ..figures }).map_err(|error| error.to_string())?;
    }
    let client = Arc::into_inner(client).ok_or("a request still runs")?;
    Ok(client.running.shut_down().await?)
}

/// Measures the server under a trace: on the base model alone, then with the adapters.
async fn measure_trace(
    client: &Arc<Client>,
    model: &str,
    rank: usize,
    trace: Trace,
    longest: usize,
) -> Result<Vec<engine::Trace>> {
    let requests = trace.draw().map_err(|error| error.to_string())?;
    let mut all = Vec::new();
    for is_base in [true, false] {
        let loads = client.metric("aril_pool_loads_total", "tier=\"device\"").await?;
        let (elapsed, arrivals) = run(client, &requests, longest, is_base).await?;
        let loads = client.metric("aril_pool_loads_total", "tier=\"device\"").await? - loads;
        let tokens: usize = arrivals.iter().map(|Arrivals(tokens)| tokens.len()).sum();
        let (mut first, mut between) = (Vec::new(), Vec::new());
        for Arrivals(tokens) in &arrivals {
            first.extend(tokens.first().map(|first| first.as_secs_f64() * 1e3));
            between.extend(tokens.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3));
        }
        first.sort_by(f64::total_cmp);
        between.sort_by(f64::total_cmp);
        let figures = engine::Trace {
            model: model.to_owned(),
            adapters: if is_base { 0 } else { trace.adapters },
            rank: if is_base { 0 } else { rank },
            zipf: trace.zipf,
            requests: arrivals.len(),
            rate: trace.rate,
            requests_per_s: arrivals.len() as f64 / elapsed.as_secs_f64(),
            tokens_per_s: tokens as f64 / elapsed.as_secs_f64(),
            first_token_p50_ms: percentile(&first, 50),
            first_token_p99_ms: percentile(&first, 99),
            between_tokens_p50_ms: percentile(&between, 50),
            between_tokens_p99_ms: percentile(&between, 99),
            loads,
        };
        println!("{}", serde_json::to_string(&figures)?);
        all.push(figures);
    }
    Ok(all)
}

/// The time to the first token of adapters in each of [`TIERS`], in milliseconds, beside so many sequences.
async fn measure_first_tokens(client: &Arc<Client>, beside: u64, runs: usize, longest: usize) -> Result<[f64; 3]> {
    let mut sequences = JoinSet::new();
    for seed in 0..beside {
        let client = Arc::clone(client);
        sequences.spawn(async move {
            let body = completion(&name(1), &prompt(seed, 1), ANSWER.min(longest / 2));
            loop {
                if let Err(error) = client.stream(&body).await {
                    return error;
                }
            }
        });
    }
    while client.metric("vllm:num_requests_running", "").await? < beside as f64 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        if let Some(failed) = sequences.try_join_next() {
            return Err(failed?);
        }
    }
    let mut times = [const { Vec::new() }; TIERS.len()];
    for seed in 0..runs as u64 {
        for (tier, times) in TIERS.iter().zip(&mut times) {
            let models: Value = serde_json::from_str(&client.get("/v1/models").await?)?;
            let mut models = models["data"].as_array().into_iter().flatten();
            let found = models.find(|model| model["tier"] == *tier && model["id"] != name(1));
            let adapter =
                found.and_then(|model| model["id"].as_str()).ok_or_else(|| format!("no adapter in {tier}"))?;
            let Arrivals(tokens) = client.stream(&completion(adapter, &prompt(beside + seed, PROMPT), 1)).await?;
            times.extend(tokens.first().map(|first| first.as_secs_f64() * 1e3));
        }
    }
    sequences.shutdown().await;
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    Ok(times.map(|times| percentile(&times, 50)))
}

fn name(adapter: u32) -> String {
    format!("adapter-{adapter}")
}

/// Random tokens.
fn prompt(seed: u64, tokens: usize) -> Vec<u32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..tokens).map(|_| rng.random_range(0..256)).collect()
}

/// A request for so many tokens.
fn completion(model: &str, prompt: &[u32], tokens: usize) -> Value {
    json!({
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": true,
        "stream": true,
    })
}

/// Sends all requests when they arrive, and returns how long it took to answer them.
async fn run(
    client: &Arc<Client>,
    requests: &[Request],
    longest: usize,
    is_base: bool,
) -> Result<(Duration, Vec<Arrivals>)> {
    let start = Instant::now();
    let tasks: Vec<_> = requests
        .iter()
        .zip(0_u64..)
        .map(|(&request, seed)| {
            let client = Arc::clone(client);
            tokio::spawn(async move {
                tokio::time::sleep_until((start + Duration::from_micros(request.arrival)).into()).await;
                let output = request.output.min(longest / 2);
                let prompt = prompt(seed, request.prompt.min(longest - output));
                let model = if is_base { "base".to_owned() } else { name(request.adapter) };
                client.stream(&completion(&model, &prompt, output)).await
            })
        })
        .collect();
    let mut arrivals = Vec::new();
    for task in tasks {
        arrivals.push(task.await??);
    }
    Ok((start.elapsed(), arrivals))
}

struct Client {
    running: Running,
    http: reqwest::Client,
}

impl Client {
    async fn send(&self, path: &str, body: &Value) -> Result<reqwest::Response> {
        let url = format!("http://{}{path}", self.running.address());
        let response = self.http.post(url).json(body).send().await?;
        if response.status().is_success() {
            return Ok(response);
        }
        Err(format!("{path}: {}: {}", response.status(), response.text().await?).into())
    }

    async fn post(&self, path: &str, body: &Value) -> Result<String> {
        Ok(self.send(path, body).await?.text().await?)
    }

    async fn get(&self, path: &str) -> Result<String> {
        let url = format!("http://{}{path}", self.running.address());
        Ok(self.http.get(url).send().await?.text().await?)
    }

    /// Reads a stream of tokens.
    async fn stream(&self, body: &Value) -> Result<Arrivals> {
        let start = Instant::now();
        let mut bytes = self.send("/v1/completions", body).await?.bytes_stream();
        let (mut arrivals, mut line) = (Vec::new(), Vec::new());
        while let Some(part) = bytes.next().await {
            let now = start.elapsed();
            for byte in part? {
                if byte != b'\n' {
                    line.push(byte);
                    continue;
                }
                if line.starts_with(b"data: {") {
                    let chunk: Value = serde_json::from_slice(&line[6..])?;
                    if let Some(error) = chunk.get("error") {
                        return Err(error.to_string().into());
                    }
                    arrivals.push(now);
                }
                line.clear();
            }
        }
        let wanted = body["max_tokens"].as_u64().and_then(|tokens| usize::try_from(tokens).ok());
        if wanted != Some(arrivals.len()) {
            return Err(format!("{} tokens, not {wanted:?}", arrivals.len()).into());
        }
        Ok(Arrivals(arrivals))
    }

    /// The value of a metric, 0 if there is none yet.
    async fn metric(&self, name: &str, label: &str) -> Result<f64> {
        let text = self.get("/metrics").await?;
        let line = text.lines().find(|line| line.starts_with(name) && line.contains(label));
        Ok(line.and_then(|line| line.rsplit(' ').next()).map_or(Ok(0.0), str::parse)?)
    }
}

/// Writes an adapter for all linear layers of a dense model, and links the others to it. Returns the bytes of its factors.
fn write_adapters(model: &Path, scratch: &Path, count: u32, rank: usize) -> Result<usize> {
    let config: Value = serde_json::from_slice(&fs::read(model.join("config.json"))?)?;
    let size = |name: &str| -> Result<usize> {
        let size = config[name].as_u64().ok_or_else(|| format!("config.json has no {name}"))?;
        Ok(usize::try_from(size)?)
    };
    let (hidden, inter, dim) = (size("hidden_size")?, size("intermediate_size")?, size("head_dim")?);
    let (query, kv) = (size("num_attention_heads")? * dim, size("num_key_value_heads")? * dim);
    let mut rng = StdRng::seed_from_u64(0);
    let longest = rank * hidden.max(inter).max(query);
    let noise: Vec<bf16> = (0..longest).map(|_| bf16::from_f32(rng.random_range(-0.02..0.02))).collect();
    let noise: &[u8] = bytemuck::cast_slice(&noise);
    let (mut tensors, mut size_of_all) = (HashMap::new(), 0);
    for layer in 0..size("num_hidden_layers")? {
        for (module, cols, rows) in [
            ("self_attn.q_proj", hidden, query),
            ("self_attn.k_proj", hidden, kv),
            ("self_attn.v_proj", hidden, kv),
            ("self_attn.o_proj", query, hidden),
            ("mlp.gate_proj", hidden, inter),
            ("mlp.up_proj", hidden, inter),
            ("mlp.down_proj", inter, hidden),
        ] {
            for (factor, shape) in [("A", [rank, cols]), ("B", [rows, rank])] {
                let bytes = &noise[..shape.iter().product::<usize>() * size_of::<bf16>()];
                size_of_all += bytes.len();
                let path = format!("base_model.model.model.layers.{layer}.{module}.lora_{factor}.weight");
                tensors.insert(path, TensorView::new(Dtype::BF16, shape.into(), bytes)?);
            }
        }
    }
    if scratch.exists() {
        fs::remove_dir_all(scratch)?;
    }
    let files = ["adapter_config.json", "adapter_model.safetensors"];
    let first = scratch.join(name(1));
    fs::create_dir_all(&first)?;
    let modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    let peft = json!({ "peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules });
    fs::write(first.join(files[0]), peft.to_string())?;
    safetensors::serialize_to_file(&tensors, None, &first.join(files[1]))?;
    for adapter in 2..=count {
        let dir = scratch.join(name(adapter));
        fs::create_dir(&dir)?;
        for file in files {
            fs::hard_link(first.join(file), dir.join(file))?;
        }
    }
    Ok(size_of_all)
}
