//! A server on the ranks of a tensor-parallel group.

use std::fs;

use serde_json::json;

use crate::client::{Server, fixture, text};

/// Experts, tokens that the host chooses, and a stop in between.
#[tokio::test(flavor = "multi_thread")]
async fn experts_are_served_on_ranks() {
    let mut answers = Vec::new();
    let groups = [&["--tp", "1"][..], &["--tp", "2"], &["--tp", "2", "--ep"], &["--tp", "2", "--fully-sharded-loras"]];
    for group in groups {
        let root = fixture("adapters-moe").display().to_string();
        let server = Server::start_on("qwen3-moe", &[group, &["--enable-lora", "--lora-root", &root]].concat()).await;
        let mut names = vec!["base".to_owned()];
        for entry in fs::read_dir(fixture("adapters-moe")).expect("the fixtures are there") {
            let name = entry.expect("the fixtures can be listed").file_name().display().to_string();
            let loaded = server.load(&name, &name, false).await;
            assert_eq!(loaded.0, 200, "{loaded:?}");
            names.push(name);
        }
        names.sort();
        for (name, logprobs) in names.iter().flat_map(|name| [(name, json!(null)), (name, json!(2))]) {
            let body = json!({
                "model": name, "prompt": "What is the password?", "temperature": 0, "max_tokens": 12,
                "logprobs": logprobs,
            });
            answers.push(text(&server.complete(body).await).to_owned());
        }
        server.holds_nothing().await;
    }
    let mut answers = answers.chunks_exact(answers.len() / groups.len());
    let one = answers.next().expect("there are groups");
    assert!(answers.all(|group| group == one));
    let distinct: std::collections::HashSet<&String> = one.iter().collect();
    assert!(distinct.len() > 3, "{one:?}");
}

/// What none of the ranks can run is refused at the start, once.
#[tokio::test]
async fn what_ranks_cannot_share_is_refused() {
    use aril_serve::{Options, start};
    use clap::Parser as _;

    let model = fixture("qwen3").display().to_string();
    let arguments = ["aril-serve", "--model", &model, "--port", "0", "--tp"];
    let usage = Options::try_parse_from(arguments.into_iter().chain(["0"])).expect_err("a group has a rank");
    assert!(usage.to_string().contains("--tp"), "{usage}");
    let refused = start(Options::parse_from(arguments.into_iter().chain(["3"]))).await;
    let refused = refused.expect_err("the heads cannot be split");
    assert!(refused.starts_with("--tp: ") && refused.contains("cannot be split over 3 ranks"), "{refused}");
    // No rank has a device.
    let refused = start(Options::parse_from(arguments.into_iter().chain(["2", "--device", "cuda:1000"]))).await;
    let refused = refused.expect_err("there are fewer devices");
    assert_eq!(refused.matches("--device cuda:1000: ").count(), 1, "{refused}");
    let refused = start(Options::parse_from(arguments.into_iter().chain(["2", "--ep"]))).await;
    let refused = refused.expect_err("the model is dense");
    assert!(refused.starts_with("--ep: ") && refused.ends_with("has no experts"), "{refused}");
}
