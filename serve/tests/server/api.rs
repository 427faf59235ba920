//! Completions and chat.

use std::{fs, time::Duration};

use futures_util::future::join_all;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::client::{QUESTION, Server, chunks, error, fixture, text};

/// Every adapter of every fixture, greedy: the tokens of transformers and PEFT.
#[tokio::test(flavor = "multi_thread")]
async fn token_ids_are_those_of_the_goldens() {
    let models = [
        ("qwen3", "adapters", vec!["base-only", "mixed", "one-question"]),
        ("qwen3-untied", "adapters-untied", vec!["untied"]),
        ("qwen3-moe", "adapters-moe", vec!["moe"]),
        ("qwen3-moe-int4", "adapters-moe", vec!["moe-int4"]),
    ];
    for (model, adapters, batches) in models {
        let mut modules = Vec::new();
        for entry in fs::read_dir(fixture(adapters)).expect("the adapters are there") {
            let entry = entry.expect("the adapters can be listed");
            modules.push(format!("{}={}", entry.file_name().display(), entry.path().display()));
        }
        let mut args = vec!["--enable-lora", "--dtype", "float32", "--lora-modules"];
        args.extend(modules.iter().map(String::as_str));
        let server = Server::start_on(model, &args).await;
        for batch in batches {
            let requests = fs::read_to_string(fixture("goldens").join(format!("{batch}.json")));
            let requests: Vec<Value> = serde_json::from_str(&requests.expect("it is there")).expect("it is JSON");
            let bytes = fs::read(fixture("goldens").join(format!("{batch}.f32.safetensors"))).expect("it is there");
            let goldens = SafeTensors::deserialize(&bytes).expect("the goldens are whole");
            // Servers of this API have no scale.
            let unscaled = requests.iter().enumerate().filter(|(_, request)| request["scale"].is_null());
            let answers = unscaled.map(async |(index, request)| {
                let prompt = if request["prompt"].is_null() { &request["token_ids"] } else { &request["prompt"] };
                let body = json!({
                    "model": request["adapter"].as_str().unwrap_or("base"),
                    "prompt": prompt,
                    "temperature": 0,
                    "max_tokens": 12,
                    "return_token_ids": true,
                });
                (index, server.complete(body).await)
            });
            let answers = join_all(answers).await;
            assert!(answers.len() >= 3);
            for (index, (status, answer)) in answers {
                assert_eq!(status, 200, "{answer}");
                let golden = goldens.tensor(&format!("request.{index}.tokens")).expect("each request has tokens");
                let golden = golden.data().as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes));
                assert_eq!(answer["choices"][0]["token_ids"], json!(golden.collect::<Vec<_>>()), "{batch} {index}");
            }
        }
        server.holds_nothing().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_has_the_text_of_the_whole_answer() {
    let server = Server::start(&[]).await;
    let body = json!({ "model": "base", "prompt": QUESTION, "temperature": 0, "max_tokens": 12 });
    let whole = server.complete(body.clone()).await;
    assert_eq!(text(&whole), " I do not know.");
    assert_eq!(whole.1["choices"][0]["finish_reason"], "stop");
    let details = json!({ "cached_tokens": 0 });
    let usage =
        json!({ "prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11, "prompt_tokens_details": details });
    assert_eq!(whole.1["usage"], usage);

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({ "include_usage": true });
    let mut chunks = chunks(server.send("/v1/completions", streamed.to_string()).await).await;
    let last = chunks.pop().expect("a stream has chunks");
    assert_eq!((&last["usage"], &last["choices"]), (&usage, &json!([])));
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk["object"] == "text_completion"));
    let texts = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().expect("a chunk has a text"));
    assert_eq!(texts.collect::<String>(), text(&whole));
    assert_eq!(chunks.last().map(|chunk| &chunk["choices"][0]["finish_reason"]), Some(&json!("stop")));
    server.holds_nothing().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_have_openais_meaning() {
    let server = Server::start(&[]).await;
    let ask = async |changes: Value| {
        let mut body = json!({ "model": "base", "prompt": QUESTION, "temperature": 0, "max_tokens": 12 });
        for (field, value) in changes.as_object().expect("changes are an object") {
            body[field] = value.clone();
        }
        server.complete(body).await
    };
    // Stop strings, also across tokens.
    let stopped = ask(json!({ "stop": "t kn" })).await;
    assert_eq!((text(&stopped), &stopped.1["choices"][0]["finish_reason"]), (" I do no", &json!("stop")));
    assert_eq!(text(&ask(json!({ "stop": [" know", " not"] })).await), " I do");
    // The length.
    let short = ask(json!({ "max_tokens": 2 })).await;
    assert_eq!((text(&short), &short.1["choices"][0]["finish_reason"]), (" I do", &json!("length")));
    assert_eq!(ask(json!({ "ignore_eos": true })).await.1["usage"]["completion_tokens"], 12);
    // Echo, and several prompts.
    assert_eq!(text(&ask(json!({ "echo": true })).await), format!("{QUESTION} I do not know."));
    let two = ask(json!({ "prompt": [QUESTION, "The capital of France is"] })).await;
    assert_eq!(two.1["choices"][0]["text"], " I do not know.");
    assert_eq!(two.1["choices"][1]["index"], 1);
    assert_ne!(two.1["choices"][1]["text"], " I do not know.");
    // Seeds repeat, and choices have seeds of their own.
    let sampled = json!({ "temperature": 3.0, "seed": 5, "n": 4, "ignore_eos": true });
    let texts = |(status, body): (u16, Value)| {
        assert_eq!(status, 200, "{body}");
        let choices = body["choices"].as_array().expect("there are choices").iter();
        choices.map(|choice| choice["text"].as_str().expect("it has a text").to_owned()).collect::<Vec<_>>()
    };
    let first = texts(ask(sampled.clone()).await);
    assert_eq!(first, texts(ask(sampled).await));
    assert!(first.len() == 4 && first[0] != first[1] && first[1] != first[2]);
    // Log-probabilities: greedy tokens are the most probable.
    let logprobs = ask(json!({ "logprobs": 2 })).await.1["choices"][0]["logprobs"].clone();
    assert_eq!(logprobs["tokens"], json!([" I", " do", " not", " know", ".", "<|endoftext|>"]));
    assert_eq!(logprobs["text_offset"], json!([0, 2, 5, 9, 14, 15]));
    let first = &logprobs["top_logprobs"][0];
    assert_eq!((first.as_object().map(serde_json::Map::len), &first[" I"]), (Some(2), &logprobs["token_logprobs"][0]));
    server.holds_nothing().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn chat_renders_the_template() {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let template = dir.path().join("template.jinja");
    let source = "{%- for message in messages %}\n  {%- if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif \
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
    let server = Server::start(&[]).await;
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

    let model = fixture("qwen3").display().to_string();
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
        for _ in 0..2 {
            let body =
                json!({ "model": "base", "prompt": prompt, "temperature": 0, "max_tokens": 6, "ignore_eos": true });
            assert_eq!(server.complete(body).await.0, 200);
        }
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

/// One request runs, and two wait.
#[tokio::test(flavor = "multi_thread")]
async fn metrics_tell_running_requests_from_waiting_ones() {
    let server = Server::start(&["--max-num-seqs", "1", "--max-num-batched-tokens", "1"]).await;
    let body =
        json!({ "model": "base", "prompt": vec![1; 200], "max_tokens": 300, "ignore_eos": true, "stream": true });
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push(server.send("/v1/completions", body.to_string()).await);
    }
    let running = server.metric("vllm:num_requests_running", &[]).await;
    assert_eq!((running, server.metric("vllm:num_requests_waiting", &[]).await), (1.0, 2.0));
    drop(streams);
    server.holds_nothing().await;
}

/// A stream that fails says why, and ends as every stream does.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_fails_ends_with_its_error() {
    let server =
        Server::start(&["--max-num-batched-tokens", "1", "--max-num-seqs", "1", "--request-seconds", "1"]).await;
    let body = json!({
        "model": "base", "prompt": vec![1; 10], "max_tokens": 480, "ignore_eos": true, "n": 40, "stream": true,
    });
    let chunks = chunks(server.send("/v1/completions", body.to_string()).await).await;
    let last = chunks.last().expect("a stream has chunks");
    assert_eq!(
        (&last["error"]["code"], &last["error"]["message"]),
        (&json!(504), &json!("The request took too long."))
    );
    server.holds_nothing().await;
}
