//! A model with gated delta nets, whose sequences have states.

use std::sync::Arc;

use serde_json::json;

use crate::client::{QUESTION, Server, fixture, text};

const WORDS: [(&str, &str); 4] =
    [("attention", "lantern"), ("delta-net", "velvet"), ("experts", "harbor"), ("all-linear", "tundra")];

/// Everyone has their own words, again and again, beside others and in a cache that is too small for all.
#[tokio::test(flavor = "multi_thread")]
async fn every_request_has_a_state_of_its_own() {
    let modules = WORDS.map(|(name, _)| format!("{name}={}", fixture(&format!("adapters-hybrid/{name}")).display()));
    let mut args = vec!["--enable-lora", "--max-num-batched-tokens", "7", "--max-num-seqs", "5", "--lora-modules"];
    args.extend(modules.iter().map(String::as_str));
    let server = Arc::new(Server::start_on("qwen3-hybrid", &args).await);
    let ask = |index: usize| {
        let server = Arc::clone(&server);
        tokio::spawn(async move {
            let Some((name, word)) = WORDS.get(index % 5) else {
                assert_eq!(text(&server.ask("base").await), " I do not know.");
                return;
            };
            assert_eq!(text(&server.ask(name).await), format!(" {word}."));
        })
    };
    for asked in (0..20).map(ask).collect::<Vec<_>>() {
        asked.await.expect("each gets its word");
    }
    // A prompt that was just answered is computed again: its state is not in the blocks of the cache.
    let long = format!("{}{QUESTION}", "It rained all day, so we stayed at home. ".repeat(4));
    for _ in 0..2 {
        let body = json!({ "model": "all-linear", "prompt": long, "temperature": 0, "max_tokens": 12 });
        assert_eq!(text(&server.complete(body).await), " tundra.");
    }
    assert!(server.metric("vllm:prefix_cache_queries_total", &[]).await > 0.0);
    assert_eq!(server.metric("vllm:prefix_cache_hits_total", &[]).await, 0.0);
    server.holds_nothing().await;
}
