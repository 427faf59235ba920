//! `/metrics`: vLLM's names where it has them, and those of the library's pool.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aril::pool::AdapterId;
use axum::extract::State;
use metrics::{counter, gauge, histogram, with_local_recorder};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use metrics_util::MetricKindMask;

use super::{
    Server, Shared,
    error::{ApiError, ApiResult},
};
use crate::{error::Result, worker::Report};

/// Bounds of the histograms' buckets, in seconds.
const SECONDS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// How long a gauge is shown that is not set any more.
const GAUGES_LAST: Duration = Duration::from_secs(60);

/// The metrics of one server.
pub(super) struct Metrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    model: String,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").field("model", &self.model).finish_non_exhaustive()
    }
}

impl Metrics {
    pub(super) fn new(model: String) -> Result<Self> {
        let recorder = PrometheusBuilder::new()
            .set_buckets(&SECONDS)?
            // `vllm:lora_requests_info` has the adapters' names as labels.
            .idle_timeout(MetricKindMask::GAUGE, Some(GAUGES_LAST))
            .build_recorder();
        Ok(Self { handle: recorder.handle(), recorder, model })
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

    /// Adds a time to a histogram.
    pub(super) fn observe(&self, name: &'static str, time: Duration) {
        let Metrics { recorder, model, .. } = &self.metrics;
        with_local_recorder(recorder, || histogram!(name, "model_name" => model.clone()).record(time.as_secs_f64()));
    }
}

/// `GET /metrics`
pub(super) async fn render(State(server): Shared) -> ApiResult<String> {
    let Report { state, pool, host_time, .. } = server.engine.report().await.ok_or_else(ApiError::ended)?;
    let Metrics { recorder, handle, model } = &server.metrics;
    let names = |adapters: &[AdapterId]| {
        let names = adapters.iter().filter_map(|&id| server.registry.name_of(id));
        names.map(|name| name.to_string()).collect::<Vec<_>>().join(",")
    };
    let lora_labels = [
        ("max_lora", server.max_loras.to_string()),
        ("running_lora_adapters", names(&state.running_adapters)),
        ("waiting_lora_adapters", names(&state.waiting_adapters)),
    ];
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
        gauge!("vllm:lora_requests_info", &lora_labels).set(now);
        pool.export(model);
    });
    Ok(handle.render())
}
