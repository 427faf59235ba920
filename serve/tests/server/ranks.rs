//! A server on the ranks of a tensor-parallel group.

use std::fs;

use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::client::{Server, WORDS, error, fixture, text};

/// Loads, a duplicate, replacements and unloads. A version that one rank alone cannot load changes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn adapters_come_change_and_go_on_all_ranks() {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let root = dir.path().canonicalize().expect("the folder is there");
    for (folder, _) in &WORDS {
        fs::create_dir(root.join(folder)).expect("the folder can be made");
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            let from = fixture("adapters").join(folder).join(file);
            fs::copy(from, root.join(folder).join(file)).expect("the fixture can be copied");
        }
    }
    // A NaN in the last row of q's B, which the last rank has.
    let damaged = root.join("r8-all/adapter_model.safetensors");
    let mut bytes = fs::read(&damaged).expect("the file is there");
    let end = {
        let file = SafeTensors::deserialize(&bytes).expect("the fixture is whole");
        let mut tensors = file.iter().filter(|(name, _)| name.ends_with("layers.0.self_attn.q_proj.lora_B.weight"));
        let data = tensors.next().expect("it has q_proj").1.data();
        data.as_ptr_range().end as usize - bytes.as_ptr() as usize
    };
    bytes[end - 2..end].copy_from_slice(&[0xc0, 0x7f]);
    fs::create_dir(root.join("damaged")).expect("the folder can be made");
    fs::copy(root.join("r8-all/adapter_config.json"), root.join("damaged/adapter_config.json")).expect("it is there");
    fs::write(root.join("damaged/adapter_model.safetensors"), bytes).expect("the file can be written");

    let root_arg = root.display().to_string();
    let server = Server::start(&["--tp", "2", "--enable-lora", "--lora-root", &root_arg]).await;
    assert_eq!(text(&server.ask("base").await), " I do not know.");
    for (folder, word) in &WORDS {
        assert_eq!(server.load(word, folder, false).await.0, 200);
    }
    let server = std::sync::Arc::new(server);
    let asked = (0..30).map(|index| {
        let server = std::sync::Arc::clone(&server);
        tokio::spawn(async move {
            let Some((_, word)) = WORDS.get(index % (WORDS.len() + 1)) else {
                assert_eq!(text(&server.ask("base").await), " I do not know.");
                return;
            };
            assert_eq!(text(&server.ask(word).await), format!(" {word}."));
        })
    });
    for asked in asked.collect::<Vec<_>>() {
        asked.await.expect("each gets its word");
    }
    let (_, models) = server.get("/v1/models").await;
    let models: Value = serde_json::from_str(&models).expect("it is JSON");
    assert_eq!(models["data"].as_array().map(Vec::len), Some(1 + WORDS.len()));

    assert_eq!(error(&server.load("saffron", "r64-all", false).await).0, 400);
    let refused = error(&server.load("saffron", "damaged", true).await);
    assert!(refused.0 == 400 && refused.1.contains("rank 1 could not"), "{refused:?}");
    assert_eq!(text(&server.ask("saffron").await), " saffron.");
    assert_eq!(server.load("saffron", "r64-all", true).await.0, 200);
    assert_eq!(text(&server.ask("saffron").await), " cobalt.");
    assert_eq!(server.unload("saffron").await.0, 200);
    assert_eq!(error(&server.ask("saffron").await).0, 404);
    assert_eq!(error(&server.unload("saffron").await).0, 404);
    assert_eq!(server.metric("aril_pool_adapters", &["state=\"registered\""]).await, 8.0);
    server.holds_nothing().await;

    let server = std::sync::Arc::into_inner(server).expect("nobody asks any more");
    server.running.shut_down().await.expect("all ranks end");
}

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
