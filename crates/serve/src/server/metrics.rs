//! `/metrics`: vLLM's names where it has them, and those of the library's pool.

use std::{
    collections::HashSet,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use aril::pool::{AdapterId, Tier};
use axum::{
    extract::State,
    http::{
        HeaderMap,
        header::{ACCEPT, CONTENT_TYPE},
    },
    response::IntoResponse,
};
use metrics::{Histogram, KeyName, Recorder as _, SharedString, counter, gauge, histogram, with_local_recorder};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use metrics_util::MetricKindMask;

use super::{
    Server, Shared,
    error::{ApiError, ApiResult},
};
use crate::error::Result;
use aril_engine::worker::Report;

/// Bounds of the buckets of times, in seconds.
const SECONDS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];
/// Bounds of the buckets of numbers of tokens and choices.
const NUMBERS: [f64; 16] = [
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 50_000.0,
    100_000.0,
];

/// What a metric is, for its readers.
#[derive(Clone, Copy)]
enum Kind {
    Counter,
    Gauge,
    Times,
    Numbers,
}

use Kind::{Counter, Gauge, Numbers, Times};

/// The metrics of the server, with vLLM's names as far as vLLM has them, and those of the library's pool.
const METRICS: [(&str, Kind, &str); 44] = [
    ("vllm:num_requests_running", Gauge, "Requests that run."),
    ("vllm:num_requests_waiting", Gauge, "Requests that wait to run."),
    ("vllm:kv_cache_usage_perc", Gauge, "The part of the KV cache that requests hold, from 0 to 1."),
    ("vllm:cache_config_info", Gauge, "The sizes of the KV cache, as labels."),
    ("vllm:lora_requests_info", Gauge, "The adapters of running and waiting requests, as labels."),
    ("vllm:num_preemptions_total", Counter, "Requests that gave up their blocks and were computed again."),
    ("vllm:prefix_cache_queries_total", Counter, "Tokens that were looked for in the prefix cache."),
    ("vllm:prefix_cache_hits_total", Counter, "Tokens that were found there."),
    ("vllm:prompt_tokens_total", Counter, "Tokens of prompts."),
    ("vllm:generation_tokens_total", Counter, "Tokens that were chosen."),
    ("vllm:iteration_tokens_total", Numbers, "Tokens that a step computes."),
    ("vllm:request_success_total", Counter, "Choices that ended, by reason."),
    ("vllm:time_to_first_token_seconds", Times, "From the submission of a choice to its first token."),
    ("vllm:inter_token_latency_seconds", Times, "Between two tokens of a choice."),
    ("vllm:e2e_request_latency_seconds", Times, "From the submission of a choice to its last token."),
    ("vllm:request_queue_time_seconds", Times, "From the submission of a choice to its first step."),
    ("vllm:request_prefill_time_seconds", Times, "From the first step of a choice to its first token."),
    ("vllm:request_decode_time_seconds", Times, "From the first token of a choice to its last one."),
    ("vllm:request_inference_time_seconds", Times, "From the first step of a choice to its last token."),
    ("vllm:request_time_per_output_token_seconds", Times, "The mean time between two tokens of a choice."),
    ("vllm:request_prompt_tokens", Numbers, "Tokens of a prompt, of each choice."),
    ("vllm:request_generation_tokens", Numbers, "Tokens of a choice."),
    ("vllm:request_params_max_tokens", Numbers, "The most tokens that a choice may have."),
    ("vllm:request_params_n", Numbers, "Choices of each prompt of a request."),
    ("aril_serve:lora_requests_info", Gauge, "The adapters on the device, and those of waiting requests, as labels."),
    ("aril_serve:adapter_requests_total", Counter, "Requests that have ended, by adapter."),
    ("aril_serve:adapter_prompt_tokens_total", Counter, "Tokens of their prompts."),
    ("aril_serve:adapter_generation_tokens_total", Counter, "Tokens of their answers."),
    (
        "aril_serve:host_microseconds_total",
        Counter,
        "Host time between the results of a step and the graph that followed.",
    ),
    ("aril_serve:graph_steps_total", Counter, "Steps that this is the time of."),
    ("aril_pool_hits_total", Counter, "Adapters that were on the device when they were needed."),
    ("aril_pool_misses_total", Counter, "Adapters that were not."),
    ("aril_pool_waits_total", Counter, "Waits for an adapter."),
    ("aril_pool_moves_total", Counter, "Adapters that were moved to make room."),
    ("aril_pool_failures_total", Counter, "Adapters that could not be loaded."),
    ("aril_pool_read_microseconds_total", Counter, "Time in which adapters were read."),
    ("aril_pool_refusals_total", Counter, "Adapters that were refused for now, by reason."),
    ("aril_pool_evictions_total", Counter, "Adapters that left a tier of memory."),
    ("aril_pool_loads_total", Counter, "Adapters that came to a tier of memory."),
    ("aril_pool_load_bytes_total", Counter, "Their bytes."),
    ("aril_pool_memory_bytes", Gauge, "Memory for adapters, by tier and state."),
    ("aril_pool_fragmentation", Gauge, "The part of the free memory of a tier that is not in its largest piece."),
    ("aril_pool_adapters", Gauge, "Adapters, by state."),
    ("aril_pool_leases", Gauge, "Leases of adapters that requests hold."),
];

/// Values that the histograms are told between two times that they are sorted into buckets. Until then each takes
/// memory.
const UNSORTED: usize = 4096;

/// The most adapters that have counters of their own. The others have those without a name.
const COUNTED: usize = 200;

/// How long a gauge is shown that is not set any more.
const GAUGES_LAST: Duration = Duration::from_secs(60);

/// The metrics of one server.
pub(super) struct Metrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    model: String,
    observed: AtomicUsize,
    /// The adapters that have counters of their own.
    adapters: Mutex<HashSet<String>>,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").field("model", &self.model).finish_non_exhaustive()
    }
}

impl Metrics {
    pub(super) fn new(model: String) -> Result<Self> {
        let mut builder = PrometheusBuilder::new()
            // `vllm:lora_requests_info` has the adapters' names as labels.
            .idle_timeout(MetricKindMask::GAUGE, Some(GAUGES_LAST));
        for (name, kind, _) in METRICS {
            let bounds: &[f64] = match kind {
                Times => &SECONDS,
                Numbers => &NUMBERS,
                Counter | Gauge => continue,
            };
            builder = builder.set_buckets_for_metric(Matcher::Full(name.into()), bounds)?;
        }
        let recorder = builder.build_recorder();
        for (name, kind, help) in METRICS {
            let (name, help) = (KeyName::from(name), SharedString::from(help));
            match kind {
                Counter => recorder.describe_counter(name, None, help),
                Gauge => recorder.describe_gauge(name, None, help),
                Times | Numbers => recorder.describe_histogram(name, None, help),
            }
        }
        Ok(Self {
            handle: recorder.handle(),
            recorder,
            model,
            observed: AtomicUsize::new(0),
            adapters: Mutex::default(),
        })
    }

    /// Where the tokens of each step are recorded.
    pub(super) fn step_tokens(&self) -> Histogram {
        with_local_recorder(
            &self.recorder,
            || histogram!("vllm:iteration_tokens_total", "model_name" => self.model.clone()),
        )
    }

    #[cfg(test)]
    pub(super) fn rendered(&self) -> String {
        self.handle.render()
    }

    /// Counts a request for an adapter that has ended.
    pub(super) fn count_adapter(&self, adapter: &str, prompt_tokens: usize, generated_tokens: usize) {
        // A set is whole between its calls.
        let mut adapters = self.adapters.lock().unwrap_or_else(PoisonError::into_inner);
        let is_counted = adapters.contains(adapter) || adapters.len() < COUNTED && adapters.insert(adapter.to_owned());
        drop(adapters);
        let labels =
            [("model_name", self.model.clone()), ("adapter", if is_counted { adapter.into() } else { String::new() })];
        with_local_recorder(&self.recorder, || {
            counter!("aril_serve:adapter_requests_total", &labels).increment(1);
            counter!("aril_serve:adapter_prompt_tokens_total", &labels).increment(prompt_tokens as u64);
            counter!("aril_serve:adapter_generation_tokens_total", &labels).increment(generated_tokens as u64);
        });
    }

    /// Adds a value to a histogram.
    pub(super) fn observe(&self, name: &'static str, value: f64) {
        let Self { recorder, handle, model, observed, .. } = self;
        with_local_recorder(recorder, || histogram!(name, "model_name" => model.clone()).record(value));
        // Whether or not anyone ever asks for the metrics. A step has hardly ever no value of its own.
        if observed.fetch_add(1, Ordering::Relaxed) % UNSORTED == UNSORTED - 1 {
            handle.run_upkeep();
        }
    }
}

impl Server {
    /// Adds to a counter.
    pub(super) fn count(&self, name: &'static str, value: usize) {
        let Metrics { recorder, model, .. } = &self.metrics;
        with_local_recorder(recorder, || counter!(name, "model_name" => model.clone()).increment(value as u64));
    }

    /// Counts a choice that has ended.
    pub(super) fn count_finished(&self, reason: &'static str) {
        let Metrics { recorder, model, .. } = &self.metrics;
        with_local_recorder(recorder, || {
            let labels = [("model_name", model.clone()), ("finished_reason", reason.into())];
            counter!("vllm:request_success_total", &labels).increment(1);
        });
    }

    /// Adds a value to a histogram.
    pub(super) fn observe(&self, name: &'static str, value: f64) {
        self.metrics.observe(name, value);
    }
}

/// `GET /metrics`, in the form of OpenMetrics if the client asks for it, or in that of Prometheus.
pub(super) async fn render(State(server): Shared, headers: HeaderMap) -> ApiResult<impl IntoResponse> {
    let report = server.engine.report().await.ok_or_else(ApiError::ended)?;
    let Report { state, pool, host_time, tiers } = &*report;
    let Metrics { recorder, handle, model, .. } = &server.metrics;
    let names = |adapters: &[AdapterId]| {
        let of_combination = |id| server.combinations.names_of(id);
        let name = |&id| server.registry.name_of(id).map(|name| name.to_string()).or_else(|| of_combination(id));
        adapters.iter().filter_map(name).collect::<Vec<_>>().join(",")
    };
    let lora_labels = |running: &[AdapterId]| {
        [
            ("max_lora", server.max_loras.to_string()),
            ("running_lora_adapters", names(running)),
            ("waiting_lora_adapters", names(&state.waiting_adapters)),
        ]
    };
    let mut on_device: Vec<_> = tiers.iter().filter(|(_, tier)| **tier == Tier::Device).map(|(id, _)| *id).collect();
    on_device.sort_unstable();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64();
    with_local_recorder(recorder, || {
        let label = || [("model_name", model.clone())];
        for (name, value) in [
            ("vllm:num_requests_running", state.running as f64),
            ("vllm:num_requests_waiting", state.waiting as f64),
            ("vllm:kv_cache_usage_perc", 1.0 - state.free_blocks as f64 / state.blocks as f64),
        ] {
            gauge!(name, &label()).set(value);
        }
        for (name, value) in [
            ("vllm:num_preemptions_total", state.preemptions),
            ("vllm:prefix_cache_queries_total", state.cache.queried_tokens),
            ("vllm:prefix_cache_hits_total", state.cache.shared_tokens),
            ("aril_serve:host_microseconds_total", u64::try_from(host_time.total.as_micros()).unwrap_or(u64::MAX)),
            ("aril_serve:graph_steps_total", host_time.steps),
        ] {
            counter!(name, &label()).absolute(value);
        }
        gauge!("vllm:lora_requests_info", &lora_labels(&state.running_adapters)).set(now);
        gauge!("aril_serve:lora_requests_info", &lora_labels(&on_device)).set(now);
        let cache_labels = [
            ("model_name", model.clone()),
            ("block_size", server.block_rows.to_string()),
            ("num_gpu_blocks", state.blocks.to_string()),
        ];
        gauge!("vllm:cache_config_info", &cache_labels).set(1.0);
        pool.export(model);
    });
    let accepted = headers.get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    Ok(if accepted.contains("application/openmetrics-text") {
        let form = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        ([(CONTENT_TYPE, form)], open_metrics(&handle.render()))
    } else {
        ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], handle.render())
    })
}

/// OpenMetrics: a counter is named without the end of its samples' names, and the last line is the end.
fn open_metrics(text: &str) -> String {
    let mut counters = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("# TYPE ").and_then(|line| line.strip_suffix("_total counter")) {
            counters.push(name);
        }
    }
    let mut open = String::with_capacity(text.len());
    for line in text.lines().filter(|line| !line.is_empty()) {
        let of_family = line.strip_prefix("# HELP ").or(line.strip_prefix("# TYPE "));
        let name = of_family.and_then(|line| line.split(' ').next()).and_then(|name| name.strip_suffix("_total"));
        match name.filter(|name| counters.contains(name)) {
            Some(name) => open += &line.replacen(&format!("{name}_total"), name, 1),
            None => open += line,
        }
        open.push('\n');
    }
    open + "# EOF\n"
}
