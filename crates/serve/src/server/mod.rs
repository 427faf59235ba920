//! The HTTP server: OpenAI's API, with adapters as models.

mod access;
mod adapters;
mod body;
mod chat;
mod combined;
mod connections;
mod defaults;
mod error;
mod fields;
mod finds;
mod generate;
mod head;
mod jinja;
mod messages;
mod metrics;
mod native;
mod peers;
mod request;
mod root;
#[cfg(test)]
mod tests;
mod text;
mod turns;
mod warnings;

use std::{
    collections::HashMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use aril::{
    DType,
    adapter::Opener,
    cpu::AdapterPool,
    model::TpRank,
    pool::{AdapterId, PoolConfig, Source},
};
use aril_engine::{
    Sizes,
    worker::{self, Handle, Setup, Version},
};
use aril_requests::registry::{OnDuplicate, Registry, Version as _};
use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, Method, Uri, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use tokio::{
    net::{TcpSocket, lookup_host},
    sync::watch,
    time::timeout,
};

use self::{
    chat::Template,
    combined::Combinations,
    defaults::Defaults,
    error::{ApiError, ApiResult},
    finds::Finds,
    head::Hosts,
    metrics::Metrics,
    root::Root,
    turns::Turns,
};
use crate::{
    DeviceArg,
    checkpoint::Checkpoint,
    config::{Config, Heads},
    dummy,
    error::{Context, Error, Result, bail},
    model::{Described, Split, describe},
    options::{LoadFormat, Options},
    tokenizer::Tokenizer,
};

/// Slots beyond those of a batch, for adapters that are next.
const SPARE_SLOTS: usize = 2;

/// How long the server waits for the errors of requests that it has ended to be sent.
const ERRORS: Duration = Duration::from_secs(1);

/// Connections that wait to be accepted.
const BACKLOG: u32 = 1024;

/// The state of all handlers.
type Shared = State<Arc<Server>>;

/// What requests are answered from.
#[derive(Debug)]
struct Server {
    engine: Handle,
    registry: Registry<Version>,
    /// The versions that are served.
    loaded: Mutex<HashMap<AdapterId, Loaded>>,
    combinations: Combinations,
    /// The base model's names.
    names: Vec<String>,
    model: PathBuf,
    lora_root: Option<Root>,
    /// Adapters that are loaded for their first request, if any are.
    finds: Option<Finds>,
    /// Whether requests may name their adapter beside the base model.
    takes_lora_path: bool,
    checkpoint: Arc<Checkpoint>,
    described: Arc<Described>,
    dtype: DType,
    tied: bool,
    vocab: usize,
    eos: Vec<u32>,
    max_positions: usize,
    /// Tokens of a block of the cache.
    block_rows: usize,
    max_rank: usize,
    max_loras: usize,
    tokenizer: Tokenizer,
    template: Template,
    /// Of the sampling of requests.
    defaults: Defaults,
    limits: Limits,
    /// Of long bodies, to be read.
    turns: Arc<Turns>,
    hosts: Hosts,
    api_keys: Vec<String>,
    metrics: Metrics,
    /// When the server started, in seconds since 1970.
    created: u64,
}

/// A version of an adapter.
#[derive(Debug)]
struct Loaded {
    folder: Arc<Path>,
    source: Source,
}

#[derive(Clone, Copy, Debug)]
struct Limits {
    body_bytes: usize,
    request_time: Duration,
    /// When the engine is taken for hung.
    step_time: Duration,
}

impl Server {
    fn loaded(&self) -> MutexGuard<'_, HashMap<AdapterId, Loaded>> {
        // A map is whole between its calls.
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The folder of a version.
    fn folder(&self, id: AdapterId) -> Option<Arc<Path>> {
        self.loaded().get(&id).map(|loaded| Arc::clone(&loaded.folder))
    }

    /// Unloads a version that no name stands for any more, and its combinations.
    fn forget(&self, version: Version) {
        self.loaded().remove(&version.id());
        self.combinations.forget(version.id());
        drop(version);
    }
}

/// A running server. Dropping it ends all requests and waits for the engine's thread, so that a process never ends
/// beside its work.
#[derive(Debug)]
pub struct Running {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    serving: Option<tokio::task::JoinHandle<()>>,
    engine: Handle,
    thread: Option<JoinHandle<()>>,
    drain: Duration,
}

impl Running {
    /// Where the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts no further connection, waits for the requests that run, at most for the time of `--drain-seconds`, and
    /// ends.
    ///
    /// # Errors
    /// A sentence, if the server had failed.
    pub async fn shut_down(mut self) -> std::result::Result<(), String> {
        // The server may have ended by itself.
        let _ = self.stop.send(true);
        if let Some(mut serving) = self.serving.take()
            && timeout(self.drain, &mut serving).await.is_err()
        {
            tracing::warn!("requests still run, and are ended");
            // Their answers end with an error.
            self.engine.stop();
            if timeout(ERRORS, &mut serving).await.is_err() {
                serving.abort();
            }
        }
        self.engine.stop();
        let thread = self.thread.take();
        let joined = tokio::task::spawn_blocking(|| thread.map_or(Ok(()), JoinHandle::join)).await;
        joined.map_err(|error| error.to_string())?.map_err(|_| "the engine has panicked".into())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.engine.stop();
        if let Some(serving) = &self.serving {
            serving.abort();
        }
        // A panic has been reported on the thread.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Loads the model and the adapters, and starts to serve.
///
/// # Errors
/// A sentence that names the argument, file or tensor at fault.
pub async fn start(options: Options) -> std::result::Result<Running, String> {
    serve(options).await.map_err(|error| error.to_string())
}

async fn serve(options: Options) -> Result<Running> {
    // Nobody is let in before the model is loaded, but the port is taken.
    let socket = bind(&options.host, options.port).await;
    let socket = socket.context(format_args!("--host {} --port {}", options.host, options.port))?;
    let drain = Duration::from_secs(options.drain_seconds);
    let modules = options.lora_modules.clone();
    let is_local = socket.local_addr()?.ip().to_canonical().is_loopback();
    let loaded = tokio::task::spawn_blocking(move || load(options, is_local)).await?;
    let (server, thread) = loaded?;
    let engine = server.engine.clone();
    let (stop, stopped) = watch::channel(false);
    let mut running =
        Running { address: socket.local_addr()?, stop, serving: None, engine, thread: Some(thread), drain };
    for module in modules {
        let loaded = server.load(&module.name, module.path, Opener::default(), OnDuplicate::Refuse, false).await;
        loaded.map_err(|error| Error::new(error.message())).context(format_args!("--lora-modules {}", module.name))?;
    }
    let app = router(Arc::clone(&server));
    let (listener, address) = (socket.listen(BACKLOG)?, running.address);
    running.serving = Some(tokio::spawn(connections::serve(listener, app, server.limits.request_time, stopped)));
    tracing::info!(%address, model = %server.model.display(), "serving");
    Ok(running)
}

/// A socket at the first of a host's addresses that it can be bound to.
async fn bind(host: &str, port: u16) -> Result<TcpSocket> {
    let mut refused = Error::new("the host has no address");
    for address in lookup_host((host, port)).await? {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // A server that has just ended is no obstacle.
        socket.set_reuseaddr(true)?;
        match socket.bind(address) {
            Ok(()) => return Ok(socket),
            Err(error) => refused = error.into(),
        }
    }
    Err(refused)
}

/// Loads the model and starts its engine; `is_local`: for this machine alone.
fn load(options: Options, is_local: bool) -> Result<(Arc<Server>, JoinHandle<()>)> {
    let api_keys = options.api_keys()?;
    let hosts = match (api_keys.is_empty(), is_local) {
        (true, true) => Hosts::Local(options.host.clone()),
        (true, false) => {
            tracing::warn!(
                "whoever reaches this address may use the server, any web page among them: it has no --api-key"
            );
            Hosts::Any
        }
        (false, _) => Hosts::Any,
    };
    let model = options.model.clone();
    let config = Config::read(&model)?;
    let dtype = options.dtype.map(DType::from).or(config.dtype).unwrap_or(DType::F32);
    let checkpoint = match options.load_format {
        LoadFormat::Safetensors => Checkpoint::open(&model)?,
        LoadFormat::Dummy => dummy::checkpoint(&config, dtype, |_| Ok(()))?,
    };
    checkpoint.check(&config)?;
    let tokenizer = Tokenizer::read(&model)?;
    let Some(tokenizer) = tokenizer else { bail!("{}: it is missing", model.join("tokenizer.json").display()) };
    let template = Template::read(&model, options.chat_template.as_deref())?;
    let encoded = |adds_special| tokenizer.encode(".", adds_special, usize::MAX);
    if template.asks_for_bos() && encoded(true)? == encoded(false)? {
        tracing::warn!(
            "`add_bos_token` of tokenizer_config.json has no effect: texts have the special tokens that tokenizer.json \
             adds"
        );
    }
    let defaults = Defaults::read(&model, &options.generation_config).context("--generation-config")?;
    if defaults != Defaults::default() {
        tracing::info!(
            defaults = defaults.shown(),
            "requests sample as generation_config.json has it, where they do not say"
        );
    }
    let has_adapters = !options.lora_modules.is_empty() || options.lora_root.is_some();
    if has_adapters && !options.enable_lora {
        bail!("--lora-modules and --lora-root need --enable-lora");
    }
    let lora_root = options.lora_root.as_ref().map(|root| Root::open(root).context(root.display())).transpose()?;
    let sizes = sizes(&options, &config, dtype)?;
    let max_positions = sizes.max_positions;
    let names = match options.served_model_name.is_empty() {
        true => vec![model.display().to_string()],
        false => options.served_model_name.clone(),
    };
    let max_loras = if options.enable_lora { options.max_loras } else { 0 };
    if options.ep && config.moe.is_none() {
        bail!("--ep: {} has no experts", options.model.display());
    }
    let split = Split {
        tp: TpRank::new(0, options.tp).context("--tp")?,
        expert_parallel: options.ep,
        fully_sharded: options.fully_sharded_loras,
    };
    tracing::info!(
        model = %model.display(),
        layers = config.layers,
        experts = config.moe.as_ref().map_or(0, |moe| moe.experts),
        %dtype,
        device = %options.device,
        ranks = options.tp,
        weights_mib = checkpoint.tensors.values().map(|tensor| tensor.bytes.len() >> 10).sum::<usize>() >> 10,
        "loading the model"
    );
    tracing::info!(
        kv_cache_mib = options.kv_cache_mib,
        kv_cache_tokens = sizes.blocks as usize * sizes.block_rows,
        max_model_len = max_positions,
        positions_of_the_model = config.max_positions,
        max_loras,
        arena_mib = options.arena_mib,
        host_mib = options.host_mib,
        "memory of each rank{}",
        if max_positions < config.max_positions {
            ": --kv-cache-mib or --max-model-len makes sequences shorter"
        } else {
            ""
        },
    );
    let (checkpoint, described) = (Arc::new(checkpoint), Arc::new(describe(&config, split).context("--tp")?));
    let (tied, vocab, eos) = (config.tied, config.vocab, config.eos.clone());
    let host_bytes = match options.max_cpu_loras {
        None => options.host_mib << 20,
        Some(count) if count < options.max_loras => {
            bail!("--max-cpu-loras {count} is less than --max-loras {}", options.max_loras)
        }
        Some(count) => AdapterPool::arena_bytes(&described.model, dtype, options.max_lora_rank, count),
    };
    let metrics = Metrics::new(names.first().cloned().unwrap_or_default())?;
    let setup = Setup {
        device: options.device,
        split,
        tp_limit: Duration::from_secs(options.tp_seconds),
        dtype,
        checkpoint: Arc::clone(&checkpoint),
        config,
        described: Arc::clone(&described),
        sizes,
        max_rank: options.max_lora_rank,
        slots: max_loras + SPARE_SLOTS,
        stack: (if options.enable_lora { options.stacked_loras } else { 0 }, options.stacked_lora_rank),
        pool: PoolConfig::arena_bytes(options.arena_mib << 20).host_bytes(host_bytes),
        step_tokens: metrics.step_tokens(),
    };
    let start = Instant::now();
    let (engine, thread) = worker::start(setup)?;
    tracing::info!(seconds = start.elapsed().as_secs_f32(), "the model is loaded");
    let server = Server {
        engine,
        registry: Registry::keeping(options.lora_versions, names.iter().map(String::as_str)),
        loaded: Mutex::default(),
        combinations: Combinations::default(),
        metrics,
        names,
        model,
        lora_root,
        finds: options.lora_on_request.then(Finds::default),
        takes_lora_path: options.enable_lora_path,
        checkpoint,
        described,
        dtype,
        tied,
        vocab,
        eos,
        max_positions,
        block_rows: options.block_size,
        max_rank: options.max_lora_rank,
        max_loras,
        tokenizer,
        template,
        defaults,
        limits: Limits {
            body_bytes: options.max_body_kib << 10,
            request_time: Duration::from_secs(options.request_seconds),
            step_time: Duration::from_secs(options.step_seconds),
        },
        // A client has half of the cores at most.
        turns: Arc::new(Turns::new(thread::available_parallelism().map_or(1, usize::from).div_ceil(2) + 1)),
        hosts,
        api_keys,
        created: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs(),
    };
    Ok((Arc::new(server), thread))
}

fn sizes(options: &Options, config: &Config, dtype: DType) -> Result<Sizes> {
    let Options { block_size, max_num_seqs, max_num_batched_tokens, kv_cache_mib, .. } = *options;
    if max_num_batched_tokens < max_num_seqs {
        bail!("--max-num-batched-tokens {max_num_batched_tokens} is less than --max-num-seqs {max_num_seqs}");
    }
    let elem_bytes = if dtype == DType::F32 { 4 } else { 2 };
    // Ranks beyond the heads have copies of them.
    let heads = Heads { kv: config.heads.kv.div_ceil(options.tp), ..config.heads };
    let block_bytes = 2 * config.attention_layers() * heads.kv_features() * elem_bytes * block_size;
    let blocks = (kv_cache_mib << 20) / block_bytes;
    let room = blocks * block_size;
    let max_positions = options.max_model_len.unwrap_or(config.max_positions.min(room));
    if max_positions > config.max_positions {
        bail!("--max-model-len {max_positions} is more than the model's {} positions", config.max_positions);
    }
    if room < max_positions.max(1) {
        bail!("--kv-cache-mib {kv_cache_mib} has room for {room} tokens, and the longest sequence has {max_positions}");
    }
    // More than every sequence at its longest is never used.
    let blocks = blocks.min(max_num_seqs * max_positions.div_ceil(block_size));
    let limits = aril_engine::Limits {
        step_tokens: max_num_batched_tokens,
        running: max_num_seqs,
        waiting: options.max_queue,
        adapters: options.max_loras,
        max_wait: Duration::from_millis(options.max_wait_ms),
    };
    Ok(Sizes {
        limits,
        blocks: u32::try_from(blocks)?,
        block_rows: block_size,
        max_positions,
        is_sharing: !options.no_enable_prefix_caching,
        // The CPU computes a step before it is enqueued.
        runs_ahead: matches!(options.device, DeviceArg::Cuda(_)),
    })
}

fn router(server: Arc<Server>) -> Router {
    let guarded = Router::new()
        .route("/v1/models", get(adapters::list))
        .route("/v1/models/{*id}", get(adapters::one))
        .route("/v1/completions", post(generate::completions))
        .route("/v1/chat/completions", post(generate::chat))
        .route("/generate", post(native::generate))
        .route("/v1/load_lora_adapter", post(adapters::load))
        .route("/v1/unload_lora_adapter", post(adapters::unload))
        .merge(peers::routes())
        .layer(middleware::from_fn_with_state(Arc::clone(&server), check_key));
    Router::new()
        .merge(guarded)
        .route("/", get(page))
        .route("/health", get(health))
        .route("/ping", get(health).post(health))
        .route("/version", get(peers::version))
        .route("/metrics", get(metrics::render))
        .fallback(async |uri: Uri| ApiError::not_found(format!("There is no {}.", uri.path())))
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            ApiError::with_status(
                axum::http::StatusCode::METHOD_NOT_ALLOWED,
                format!("{} takes no {method}.", uri.path()),
            )
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&server), access::enter))
        .with_state(server)
}

/// The page: a chat with several models side by side. It loads nothing else, and asks this server alone.
async fn page() -> impl IntoResponse {
    const POLICY: &str = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; \
                          style-src 'unsafe-inline'; \
                          form-action 'none'; base-uri 'none'; frame-ancestors 'none'";
    let headers = [(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CONTENT_SECURITY_POLICY, POLICY)];
    (headers, include_str!("page.html"))
}

/// Whether the engine lives and makes progress. It is not asked, because a step may take longer than a probe waits.
async fn health(State(server): Shared) -> ApiResult<()> {
    check_step(server.engine.busy_for().ok_or_else(ApiError::ended)?, server.limits.step_time)
}

/// Whether a step that has taken so long is one of an engine that makes progress.
fn check_step(time: Duration, limit: Duration) -> ApiResult<()> {
    if time > limit {
        let message = format!("The engine has been in one step for {} s (--step-seconds).", time.as_secs());
        return Err(ApiError::unavailable(message));
    }
    Ok(())
}

/// Refuses requests without a key, if there are keys.
async fn check_key(State(server): Shared, request: Request, next: Next) -> Response {
    let given = key_of(request.headers());
    // Every key is compared, and every byte, so that the time tells nothing of them.
    let is_known = server.api_keys.iter().fold(false, |known, key| known | is_same(key.as_bytes(), given.as_bytes()));
    if !server.api_keys.is_empty() && !is_known {
        return ApiError::unauthorized().into_response();
    }
    next.run(request).await
}

/// The key that a request gives.
fn key_of(headers: &HeaderMap) -> &str {
    let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let given =
        given.and_then(|value| value.split_once(' ')).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
    given.map_or("", |(_, key)| key)
}

fn is_same(key: &[u8], given: &[u8]) -> bool {
    let differences = key.iter().zip(given).fold(0, |all, (a, b)| all | (a ^ b));
    differences == 0 && key.len() == given.len()
}
