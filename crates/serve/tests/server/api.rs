//! Completions and chat.

use std::{fs, time::Duration};

use serde_json::{Value, json};

use crate::client::{QUESTION, Server, chunks, error, text};

#[tokio::test(flavor = "multi_thread")]
async fn chat_renders_the_template() {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let template = dir.path().join("template.jinja");
    let source = "{%- for message in messages %}\n  {%- if message.role == 'tool' %}\
                  {{ raise_exception('no tools') }}{% endif \
                  %}\n  {{- message.content.strip() }}\n{%- endfor %}";
    fs::write(&template, source).expect("the template can be written");
    let server = Server::start(&["--chat-template", &template.display().to_string()]).await;
    let messages = json!([{ "role": "user", "content": format!("  {QUESTION} ") }]);
    let body = json!({ "model": "base", "messages": messages, "temperature": 0, "logprobs": true, "top_logprobs": 1 });
    let (status, answer) = server.post("/v1/chat/completions", body.clone()).await;
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"], json!({ "role": "assistant", "content": " I do not know." }));
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(choice["logprobs"]["content"][0]["token"], " I");
    assert_eq!(choice["logprobs"]["content"][0]["top_logprobs"][0]["bytes"], json!([32, 73]));

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let chunks = chunks(server.send("/v1/chat/completions", streamed.to_string()).await).await;
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    let texts = chunks.iter().map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    assert_eq!(texts.collect::<String>(), " I do not know.");

    let tool = json!({ "model": "base", "messages": [{ "role": "tool", "content": "" }] });
    let (status, message) = error(&server.post("/v1/chat/completions", tool).await);
    assert!(status == 400 && message.contains("no tools"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_get_openais_errors() {
    let server = Server::start(&["--max-body-kib", "4", "--max-model-len", "64"]).await;
    let ask = async |body: Value| error(&server.complete(body).await);
    let base = |changes: Value| {
        let mut body = json!({ "model": "base", "prompt": QUESTION, "max_tokens": 4 });
        for (field, value) in changes.as_object().expect("changes are an object") {
            body[field] = value.clone();
        }
        body
    };
    let unknown = ask(base(json!({ "model": "nobody" }))).await;
    assert_eq!(unknown, (404, "The model `nobody` does not exist.".into()));
    for (changes, part) in [
        (json!({ "temperature": -1.0 }), "temperature must be non-negative"),
        (json!({ "top_p": 0.0 }), "top_p must be in (0, 1]"),
        (json!({ "top_k": -2 }), "top_k"),
        (json!({ "max_tokens": 0 }), "max_tokens must be at least 1"),
        (json!({ "max_tokens": 60 }), "maximum context length is 64 tokens"),
        (json!({ "prompt": "" }), "The prompt is empty"),
        (json!({ "prompt": [] }), "There is no prompt"),
        (json!({ "prompt": ["one", ""] }), "The prompt is empty"),
        (json!({ "prompt": [512] }), "Token id 512 is out of vocabulary"),
        (json!({ "n": 0 }), "choices"),
        (json!({ "n": 2, "temperature": 0 }), "n must be 1 when using greedy sampling"),
        (json!({ "stop": "" }), "stop"),
        (json!({ "logprobs": 21 }), "logprobs must be in [0, 20], got 21"),
        (json!({ "suffix": "x" }), "`suffix` = \"x\" is not implemented"),
        (json!({ "guided_json": {} }), "`guided_json`"),
        (json!({ "prompt": 7 }), "`prompt` must be a text, a list of texts"),
    ] {
        let (status, message) = ask(base(changes)).await;
        assert!(status == 400 && message.contains(part), "{status} {message}");
    }
    // What changes nothing is taken.
    let neutral =
        base(json!({ "frequency_penalty": 0, "user": "me", "logit_bias": {}, "best_of": 1, "temperature": 0 }));
    assert_eq!(text(&server.complete(neutral).await), " I do not know");

    let of = async |response: reqwest::Response| {
        let status = response.status().as_u16();
        error(&(status, response.json().await.expect("an error is JSON")))
    };
    assert_eq!(of(server.send("/v1/completions", "{").await).await.0, 400);
    assert_eq!(of(server.send("/v1/completions", " ".repeat(5000)).await).await.0, 413);
    assert_eq!(of(server.send("/v1/embeddings", "{}").await).await.0, 404);
    assert_eq!(of(server.send("/v1/models", "{}").await).await.0, 405);
    let (status, _) = error(&server.post("/v1/chat/completions", json!({ "messages": [] })).await);
    assert_eq!(status, 400);
    assert_eq!(server.get("/health").await, (200, String::new()));
    server.holds_nothing().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_are_errors_that_lose_nothing() {
    let server = Server::start(&["--max-num-seqs", "1", "--max-num-batched-tokens", "1", "--max-queue", "2"]).await;
    // Prompts of one token at a step, so that the first one is still there.
    let body =
        json!({ "model": "base", "prompt": vec![1; 200], "max_tokens": 300, "ignore_eos": true, "stream": true });
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push(server.send("/v1/completions", body.to_string()).await);
    }
    assert!(streams[..2].iter().all(|stream| stream.status() == 200));
    let refused = loop {
        let answer = server.ask("base").await;
        if answer.0 != 200 {
            break error(&answer);
        }
    };
    assert_eq!(refused.0, 503);
    assert!(refused.1.contains("are waiting, which are the most"), "{}", refused.1);
    // Their clients go away.
    drop(streams);
    server.holds_nothing().await;
    assert_eq!(text(&server.ask("base").await), " I do not know.");

    let slow = Server::start(&["--max-num-batched-tokens", "1", "--max-num-seqs", "1", "--request-seconds", "1"]).await;
    let body = json!({ "model": "base", "prompt": vec![1; 10], "max_tokens": 480, "ignore_eos": true, "n": 40 });
    let (status, message) = error(&slow.complete(body).await);
    assert_eq!((status, message.as_str()), (504, "The request took too long."));
    slow.holds_nothing().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ending_drains_the_requests() {
    let server = Server::start(&["--drain-seconds", "120"]).await;
    let body = json!({ "model": "base", "prompt": QUESTION, "max_tokens": 300, "ignore_eos": true, "stream": true });
    let stream = server.send("/v1/completions", body.to_string()).await;
    let ended = tokio::spawn(server.running.shut_down());
    tokio::time::sleep(Duration::from_millis(20)).await;
    let chunks = chunks(stream).await;
    assert_eq!(chunks.last().map(|chunk| &chunk["choices"][0]["finish_reason"]), Some(&json!("length")));
    ended.await.expect("it does not panic").expect("the server ends");
}

#[cfg(not(feature = "cuda"))]
#[tokio::test]
async fn a_build_without_cuda_refuses_a_gpu() {
    use clap::Parser as _;

    let model = crate::client::fixture("qwen3").display().to_string();
    let options = aril_serve::Options::parse_from([
        "aril-serve",
        "--model",
        &model,
        "--port",
        "0",
        "--max-model-len",
        "64",
        "--device",
        "cuda:1",
    ]);
    let refused = aril_serve::start(options).await.expect_err("it has no CUDA");
    assert_eq!(refused, "--device cuda:1: this build has no CUDA; build it with `--features cuda`");
}

/// The page has no part elsewhere, and needs no key.
#[tokio::test]
async fn the_page_is_one_file() {
    let server = Server::start(&["--api-key", "secret"]).await;
    let (status, page) = server.get("/").await;
    assert_eq!(status, 200);
    assert!(page.starts_with("<!doctype html>") && !page.contains("http://") && !page.contains("https://"), "{page}");
}

/// Random weights answer with random tokens, as many as were asked for.
#[tokio::test(flavor = "multi_thread")]
async fn random_weights_are_served() {
    let server = Server::start(&["--load-format", "dummy"]).await;
    let body = json!({
        "model": "base", "prompt": QUESTION, "temperature": 1, "seed": 1, "max_tokens": 5, "ignore_eos": true,
        "return_token_ids": true,
    });
    let (status, answer) = server.complete(body).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"][0]["token_ids"].as_array().map(Vec::len), Some(5), "{answer}");
    server.holds_nothing().await;
}

/// Each family has its help, in both forms, and the values are those of what has happened.
#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_what_has_happened() {
    let prompt: Vec<u32> = (1..=40).collect();
    for (arguments, hits) in [(vec![], 32.0), (vec!["--no-enable-prefix-caching"], 0.0)] {
        let server = Server::start(&arguments).await;
        let cached = async |choices: usize| {
            let body = json!({ "prompt": prompt, "temperature": 1, "n": choices, "max_tokens": 6, "ignore_eos": true });
            let (status, answer) = server.complete(body).await;
            assert_eq!(status, 200, "{answer}");
            answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_f64().expect("it is a number")
        };
        assert_eq!((cached(1).await, cached(1).await), (0.0, hits));
        for (name, value) in [
            ("vllm:prefix_cache_queries_total", 80.0),
            ("vllm:prefix_cache_hits_total", hits),
            ("vllm:prompt_tokens_total", 80.0),
            ("vllm:generation_tokens_total", 12.0),
            ("vllm:request_success_total", 2.0),
            ("vllm:time_to_first_token_seconds_count", 2.0),
            ("vllm:inter_token_latency_seconds_count", 10.0),
            ("vllm:request_queue_time_seconds_count", 2.0),
            ("vllm:request_generation_tokens_sum", 12.0),
            ("vllm:request_prompt_tokens_sum", 80.0),
            ("vllm:request_params_max_tokens_sum", 12.0),
            ("vllm:iteration_tokens_total_count", 12.0),
            ("vllm:iteration_tokens_total_sum", 90.0 - hits),
        ] {
            assert_eq!(server.metric(name, &[]).await, value, "{name}");
        }
        // Choices share their prompt.
        assert_eq!(cached(2).await, hits);
        let (_, text) = server.get("/metrics").await;
        let families = |start: &str| -> Vec<String> {
            let lines = text.lines().filter_map(|line| line.strip_prefix(start)?.split(' ').next());
            lines.map(str::to_owned).collect()
        };
        assert_eq!(families("# HELP "), families("# TYPE "));
        let request = reqwest::Client::new().get(server.url("/metrics"));
        let open = request.header("accept", "application/openmetrics-text;version=1.0.0").send().await;
        let open = open.expect("the server answers");
        assert!(
            open.headers()["content-type"].to_str().is_ok_and(|form| form.starts_with("application/openmetrics-text"))
        );
        let open = open.text().await.expect("it is text");
        assert!(open.ends_with("\n# EOF\n") && open.contains("# TYPE vllm:prompt_tokens counter\n"), "{open}");
        assert!(open.contains("\nvllm:prompt_tokens_total{") && !open.contains("\n\n"), "{open}");
    }
}
