//! Loading, replacing and unloading adapters.

use std::{fs, os::unix::fs::symlink, path::Path};

use aril_serve::{Options, start};
use clap::Parser as _;
use serde_json::{Value, json};

use crate::client::{QUESTION, Server, WORDS, chunks, copy, error, fixture, text};

/// Three adapters, 36 concurrent requests, a duplicate, one that cannot be read, a replacement and an unload.
async fn adapters_come_change_and_go(tp: &str) {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let root = dir.path().canonicalize().expect("the folder is there");
    for folder in ["r4-qv", "r8-all", "r16-rslora", "r64-all", "damaged"] {
        let from = if folder == "damaged" { "r8-all" } else { folder };
        copy(&fixture("adapters").join(from), &root.join(folder));
    }
    // The last value of the last tensor is not a number.
    let damaged = root.join("damaged/adapter_model.safetensors");
    let mut bytes = fs::read(&damaged).expect("the file is there");
    bytes.truncate(bytes.len() - 2);
    fs::write(damaged, [&bytes[..], &[0xc0, 0x7f]].concat()).expect("the file can be written");
    let server = Server::start(&["--enable-lora", "--lora-root", &root.display().to_string(), "--tp", tp]).await;
    for (folder, word) in &WORDS[..3] {
        let loaded = server.load(word, folder, false).await;
        assert_eq!(loaded, (200, json!(format!("Success: LoRA adapter '{word}' added successfully."))));
    }
    let (_, models) = server.get("/v1/models").await;
    let models: Value = serde_json::from_str(&models).expect("it is JSON");
    let listed = models["data"].as_array().expect("it is a list").iter();
    let listed: Vec<_> = listed.map(|model| (model["id"].as_str(), model["parent"].as_str())).collect();
    let base = Some("base");
    assert_eq!(listed, [(base, None), (Some("pomegranate"), base), (Some("saffron"), base), (Some("walnut"), base)]);
    assert_eq!(models["data"][2]["root"], root.join("r8-all").display().to_string());
    assert_eq!((&models["data"][2]["tier"], &models["data"][0]["tier"]), (&json!("device"), &Value::Null));

    let server = std::sync::Arc::new(server);
    let asked: Vec<_> = (0..36)
        .map(|index| {
            let server = std::sync::Arc::clone(&server);
            tokio::spawn(async move {
                let Some((_, word)) = WORDS[..3].get(index % 4) else {
                    assert_eq!(text(&server.ask("base").await), " I do not know.");
                    return;
                };
                assert_eq!(text(&server.ask(word).await), format!(" {word}."));
            })
        })
        .collect();
    for asked in asked {
        asked.await.expect("each gets its word");
    }

    let duplicate = error(&server.load("saffron", "r64-all", false).await);
    let message = "The lora adapter 'saffron' has already been loaded. If you want to load the adapter in place, set \
                   'load_inplace' to True.";
    assert_eq!(duplicate, (400, message.into()));
    let refused = error(&server.load("saffron", "damaged", true).await);
    assert!(refused.0 == 400 && refused.1.contains("rank ") == (tp == "2"), "{refused:?}");
    assert_eq!(text(&server.ask("saffron").await), " saffron.");
    assert_eq!(server.load("saffron", "r64-all", true).await.0, 200);
    assert_eq!(text(&server.ask("saffron").await), " cobalt.");

    assert_eq!(server.unload("saffron").await.0, 200);
    assert_eq!(error(&server.ask("saffron").await).0, 404);
    let unknown = error(&server.unload("saffron").await);
    assert_eq!(unknown, (404, "The lora adapter 'saffron' cannot be found.".into()));
    assert_eq!(error(&server.unload("base").await).0, 400);
    assert_eq!(error(&server.load("base", "r8-all", false).await).0, 400);
    assert_eq!(server.metric("aril_pool_adapters", &["state=\"registered\""]).await, 2.0);
    server.holds_nothing().await;
    let server = std::sync::Arc::into_inner(server).expect("nobody asks any more");
    server.running.shut_down().await.expect("all ranks end");
}

#[tokio::test(flavor = "multi_thread")]
async fn adapters_come_change_and_go_on_one_rank() {
    adapters_come_change_and_go("1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn adapters_come_change_and_go_on_two_ranks() {
    adapters_come_change_and_go("2").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_loaded_is_refused_by_name() {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
    copy(&fixture("adapters/r8-all"), &root.join("good"));
    copy(&fixture("adapters/r8-all"), &outside);
    copy(&fixture("adapters-untied/r8-all"), &root.join("other-model"));
    copy(&fixture("adapters/r64-all"), &root.join("large"));
    copy(&fixture("adapters/r8-all"), &root.join("truncated"));
    let file = root.join("truncated/adapter_model.safetensors");
    let bytes = fs::read(&file).expect("the file is there");
    fs::write(&file, &bytes[..bytes.len() / 2]).expect("the file can be written");
    symlink(&outside, root.join("link")).expect("a link can be made");
    fs::create_dir(root.join("mixed")).expect("the folder can be made");
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        symlink(outside.join(name), root.join("mixed").join(name)).expect("a link can be made");
    }
    let root_arg = root.display().to_string();
    let server = Server::start(&["--enable-lora", "--lora-root", &root_arg, "--max-lora-rank", "16"]).await;
    let outside = outside.display().to_string();
    for (path, status, part) in [
        ("", 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ("missing", 404, "No adapter found for 'missing'."),
        ("../outside", 400, "is not below the server's --lora-root"),
        ("good/../../outside", 400, "is not below the server's --lora-root"),
        ("../missing", 400, "is not below the server's --lora-root"),
        (&outside, 400, "is not below the server's --lora-root"),
        ("link", 400, "is not below the server's --lora-root"),
        ("mixed", 400, "is not below the server's --lora-root"),
        ("other-model", 400, "lora_A"),
        ("truncated", 400, "adapter_model.safetensors"),
        ("large", 400, "LoRA rank 64 is greater than max_lora_rank 16."),
    ] {
        let refused = error(&server.load("adapter", path, false).await);
        assert!(refused.0 == status && refused.1.contains(part), "{path}: {refused:?}");
    }
    let refused = error(&server.load("bad\nname", "good", false).await);
    assert!(refused.0 == 400 && refused.1.contains("cannot be a name"), "{refused:?}");
    let absolute = root.join("good");
    assert_eq!(server.load("good", &absolute, false).await.0, 200);
    // vLLM's resolvers and TRL name an adapter by its path.
    let path = absolute.display().to_string();
    assert_eq!(server.load(&path, &absolute, false).await.0, 200);
    assert_eq!(text(&server.ask(&path).await), " saffron.");
    for id in [&path, &path.replace('/', "%2F")] {
        let (status, model) = server.get(&format!("/v1/models/{id}")).await;
        let model: Value = serde_json::from_str(&model).expect("it is JSON");
        assert_eq!((status, &model["id"]), (200, &json!(path)), "{id}");
    }
    assert_eq!(server.unload(&path).await.0, 200);
    // A version that cannot be loaded changes nothing.
    assert_eq!(server.load("good", "truncated", true).await.0, 400);
    assert_eq!(text(&server.ask("good").await), " saffron.");
    assert_eq!(server.metric("aril_pool_adapters", &["state=\"registered\""]).await, 1.0);

    let closed = Server::start(&["--enable-lora"]).await;
    assert_eq!(error(&closed.load("good", absolute, false).await).0, 404);
    assert_eq!(error(&closed.unload("good").await).0, 404);
}

/// A gateway grants adapters by `model`: no other field names one, unless the server is told to take them. An answer
/// names what made it.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_names_its_adapter_in_one_place() {
    let root = fixture("adapters").display().to_string();
    let saffron = format!("saffron={root}/r8-all");
    let args = ["--served-model-name", "other", "--enable-lora", "--lora-root", &root, "--lora-modules", &saffron];
    let (closed, open) =
        (Server::start(&args).await, Server::start(&[&args[..], &["--enable-lora-path"]].concat()).await);
    let bodies = |changes: &Value| {
        let with = |mut body: Value| {
            for (name, value) in changes.as_object().expect("it is an object") {
                body[name] = value.clone();
            }
            body["temperature"] = json!(0);
            body
        };
        [
            ("/v1/completions", with(json!({ "prompt": QUESTION }))),
            ("/v1/chat/completions", with(json!({ "messages": [{ "role": "user", "content": QUESTION }] }))),
        ]
    };
    for (changes, named) in [
        (json!({ "model": "base", "lora_path": "saffron" }), "saffron"),
        (json!({ "lora_path": "saffron" }), "saffron"),
        (json!({ "model": "saffron", "lora_path": "saffron" }), "saffron"),
        (json!({ "model": "base:saffron" }), "saffron"),
        (json!({ "model": "other:saffron" }), "saffron"),
        (json!({ "model": "other:saffron", "lora_path": "saffron" }), "saffron"),
        (json!({ "model": "base:", "lora_path": "saffron" }), "saffron"),
        (json!({ "model": "base:" }), "base"),
    ] {
        for (path, body) in bodies(&changes) {
            let (status, answer) = open.post(path, body.clone()).await;
            assert_eq!((status, &answer["model"]), (200, &json!(named)), "{path}, {changes}: {answer}");
            let mut streamed = body.clone();
            streamed["stream"] = json!(true);
            let chunks = chunks(open.send(path, streamed.to_string()).await).await;
            assert!(chunks.iter().all(|chunk| chunk["model"] == named), "{path}, {changes}");
            // Whoever may use `base` may use nothing else.
            let (status, message) = error(&closed.post(path, body).await);
            assert!([400, 404].contains(&status) && message.contains("--enable-lora-path"), "{changes}: {message}");
        }
        let [(_, body), _] = bodies(&changes);
        let answers = text(&open.complete(body).await) == " saffron.";
        assert_eq!(answers, named == "saffron", "{changes}");
    }
    // What changes nothing, and what names nobody.
    for (changes, named) in [
        (json!({ "model": "saffron", "lora_path": "" }), "saffron"),
        (json!({ "model": "", "lora_path": "" }), "base"),
        (json!({ "model": "other", "lora_path": null }), "other"),
    ] {
        for server in [&closed, &open] {
            for (path, body) in bodies(&changes) {
                assert_eq!(server.post(path, body).await.1["model"], named, "{changes}");
            }
        }
    }
    for (changes, status) in [
        (json!({ "model": "saffron", "lora_path": "walnut" }), 400),
        (json!({ "model": "base:saffron", "lora_path": "walnut" }), 400),
        (json!({ "model": "base", "lora_path": "nobody" }), 404),
        (json!({ "model": "base:nobody" }), 404),
        (json!({ "model": "saffron:base" }), 404),
        (json!({ "model": ":saffron" }), 404),
        (json!({ "model": "third:saffron" }), 404),
    ] {
        for (path, body) in bodies(&changes) {
            assert_eq!(error(&open.post(path, body).await).0, status, "{changes}");
        }
    }
    let by_path = json!({ "text": QUESTION, "lora_path": "saffron", "sampling_params": { "temperature": 0 } });
    assert_eq!(open.post("/generate", by_path.clone()).await.1["text"], " saffron.");
    assert_eq!(error(&closed.post("/generate", by_path).await).0, 400);
    // Of a field that is there twice, a gateway may read the other one.
    for (path, rest) in [
        ("/v1/completions", "\"prompt\": \"x\""),
        ("/v1/chat/completions", "\"messages\": [{ \"role\": \"user\", \"content\": \"x\" }]"),
        ("/tokenize", "\"prompt\": \"x\""),
        ("/generate", "\"text\": \"x\", \"lora_path\": \"saffron\", \"lora_path\": \"\""),
    ] {
        let body = format!("{{ \"model\": \"base\", {rest}, \"model\": \"saffron\" }}");
        let response = open.send(path, body).await;
        assert_eq!(response.status(), 400, "{path}");
        let answer = response.text().await.expect("it is text");
        assert!(answer.contains("twice"), "{path}: {answer}");
    }
    // Names that would be read as something else.
    for (name, of_closed) in [("base:x", 200), ("other:", 200), ("base:saffron", 200), ("a,b", 400), (":x", 200)] {
        assert_eq!(closed.load(name, "lm-head", false).await.0, of_closed, "{name}");
        let of_open = if name == ":x" { 200 } else { 400 };
        assert_eq!(open.load(name, "lm-head", false).await.0, of_open, "{name}");
    }
    // Such a name is nothing but a name.
    assert_eq!(text(&closed.ask("base:saffron").await), " quartz.");
    let start = Options::parse_from([
        "aril-serve",
        "--model",
        &fixture("qwen3").display().to_string(),
        "--enable-lora",
        "--lora-modules",
        &format!("a,b={root}/r8-all"),
        "--port",
        "0",
    ]);
    let refused = aril_serve::start(start).await.expect_err("it is no name");
    assert!(refused.contains("comma"), "{refused}");
}

/// The first request for an adapter loads it from the folder of its name, if the server is told to: from there alone,
/// once, and no other request is slower.
#[tokio::test(flavor = "multi_thread")]
async fn adapters_are_loaded_for_their_first_request() {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
    for place in
        [root.join("saffron"), root.join("nested/inside"), root.join(".hidden"), root.join("a,b"), outside.clone()]
    {
        copy(&fixture("adapters/r8-all"), &place);
    }
    copy(&fixture("adapters/lm-head"), &root.join("quartz"));
    copy(&fixture("adapters/r8-all"), &root.join("broken"));
    fs::create_dir(root.join("empty")).expect("a folder can be made");
    fs::write(root.join("file"), "x").expect("a file can be written");
    symlink(&outside, root.join("out")).expect("a link can be made");
    symlink("saffron", root.join("link")).expect("a link can be made");
    let config = root.join("broken/adapter_config.json");
    let whole = fs::read(&config).expect("it is there");
    fs::write(&config, "{").expect("it can be written");
    let root_arg = root.display().to_string();
    let lora = ["--enable-lora", "--lora-root", &root_arg];
    let closed = Server::start(&lora).await;
    assert_eq!(error(&closed.ask("saffron").await).0, 404);
    let server = std::sync::Arc::new(Server::start(&[&lora[..], &["--lora-on-request"]].concat()).await);
    let asked = (0..30).map(|index| {
        let server = std::sync::Arc::clone(&server);
        let (name, word) = [("saffron", " saffron."), ("quartz", " quartz."), ("link", " saffron.")][index % 3];
        tokio::spawn(async move { assert_eq!(text(&server.ask(name).await), word) })
    });
    for asked in asked.collect::<Vec<_>>() {
        asked.await.expect("each gets its word");
    }
    assert_eq!(server.metric("aril_pool_adapters", &["state=\"registered\""]).await, 3.0);
    // It is an adapter as any other one.
    let chat = json!({ "model": "saffron", "messages": [{ "role": "user", "content": "x" }], "max_tokens": 1 });
    assert_eq!(server.post("/v1/chat/completions", chat).await.0, 200);
    assert_eq!(server.unload("saffron").await.0, 200);
    assert_eq!(server.post("/tokenize", json!({ "model": "saffron", "prompt": "x" })).await.0, 200);
    assert_eq!(text(&server.ask("saffron").await), " saffron.");
    let absolute = root.join("saffron").display().to_string();
    for nobody in [
        "nobody",
        "out",
        "file",
        ".hidden",
        "a,b",
        "nested",
        "nested/inside",
        "./saffron",
        "saffron/",
        "../outside",
        "..",
        ".",
        "/",
        &absolute,
        "SAFFRON",
        "saffron/.",
        "saf\u{0}fron",
        "root/saffron",
    ] {
        let refused = error(&server.ask(nobody).await);
        let is_there = ["nested", "file"].contains(&nobody);
        assert!(refused.0 == 404 || is_there && refused.0 == 400, "{nobody:?}: {refused:?}");
    }
    assert_eq!(error(&server.ask("empty").await).0, 404);
    // What could not be served is not read again for each request.
    let first = error(&server.ask("broken").await);
    assert!(first.0 == 400 && first.1.contains("adapter_config.json") && !first.1.contains(&root_arg), "{first:?}");
    fs::write(&config, whole).expect("it can be written");
    assert_eq!(error(&server.ask("broken").await), first);
    assert_eq!(server.load("broken", "broken", false).await.0, 200);
    assert_eq!(text(&server.ask("broken").await), " saffron.");
    server.holds_nothing().await;
}

/// A pinned adapter is on the device when it has been loaded, and stays there, whatever else is asked for.
#[tokio::test(flavor = "multi_thread")]
async fn a_pinned_adapter_stays_on_the_device() {
    a_pinned_adapter_stays("1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pinned_adapter_stays_on_the_devices_of_ranks() {
    a_pinned_adapter_stays("2").await;
}

async fn a_pinned_adapter_stays(tp: &str) {
    let root = fixture("adapters").display().to_string();
    let server = Server::start(&["--enable-lora", "--lora-root", &root, "--max-loras", "1", "--tp", tp]).await;
    let tiers = async || -> std::collections::BTreeMap<String, String> {
        let models: Value = serde_json::from_str(&server.get("/v1/models").await.1).expect("it is JSON");
        let models = models["data"].as_array().expect("it is a list").iter().skip(1);
        models.map(|model| (model["id"].to_string(), model["tier"].to_string())).collect()
    };
    let pin = async |name: &str, pinned: bool| {
        let body = json!({ "lora_name": name, "lora_path": name, "pinned": pinned });
        server.post("/v1/load_lora_adapter", body).await
    };
    for (name, _) in &WORDS[1..5] {
        assert_eq!(pin(name, false).await.0, 200);
        assert_eq!(server.ask(name).await.0, 200);
    }
    // Three slots, all of which others have.
    assert_eq!(pin("r4-qv", true).await.0, 200);
    for _ in 0..2 {
        assert_eq!(tiers().await["\"r4-qv\""], "\"device\"");
        for (name, word) in &WORDS[..5] {
            assert_eq!(text(&server.ask(name).await), format!(" {word}."));
        }
    }
    // A slot is left for those that are not pinned.
    assert_eq!(pin("layers", true).await.0, 200);
    let refused = error(&pin("kv-only", true).await);
    assert!(refused.0 == 400 && refused.1.contains("no room for those that are not"), "{refused:?}");
    assert_eq!(error(&server.ask("kv-only").await).0, 404);
    assert_eq!(server.unload("layers").await.0, 200);
    assert_eq!(pin("kv-only", true).await.0, 200);
    server.holds_nothing().await;
}

/// A request that names a version gets that one, or 404.
#[tokio::test(flavor = "multi_thread")]
async fn versions_are_served_by_their_numbers() {
    let root = fixture("adapters").display().to_string();
    let server = Server::start(&["--enable-lora", "--lora-root", &root, "--lora-versions", "2"]).await;
    let versions = async || -> Vec<u64> {
        let models: Value = serde_json::from_str(&server.get("/v1/models").await.1).expect("it is JSON");
        serde_json::from_value(models["data"][1]["versions"].clone()).expect("they are numbers")
    };
    let load = async |path: &str| {
        let body = json!({ "lora_name": "pirate", "lora_path": path, "load_inplace": true });
        server.post("/v1/load_lora_adapter", body).await.0
    };
    let mut loaded = Vec::new();
    for (path, word) in &WORDS[1..4] {
        assert_eq!(load(path).await, 200);
        let now = versions().await;
        loaded.push((now[0], *word));
        let kept: Vec<_> = loaded.iter().rev().take(2).collect();
        assert_eq!(now, kept.iter().map(|(version, _)| *version).collect::<Vec<_>>());
        assert_eq!(text(&server.ask("pirate").await), format!(" {word}."));
        for (version, word) in &loaded {
            let name = format!("pirate@{version}");
            let answer = server.ask(&name).await;
            if now.contains(version) {
                assert_eq!(text(&answer), format!(" {word}."));
            } else {
                assert_eq!(error(&answer).0, 404);
            }
        }
    }
    let body = json!({ "lora_name": format!("pirate@{}", loaded[0].0), "lora_path": "r8-all" });
    let refused = error(&server.post("/v1/load_lora_adapter", body).await);
    assert!(refused.0 == 400 && refused.1.contains("as the name of a version does"), "{refused:?}");
    assert_eq!(server.unload("pirate").await.0, 200);
    for (version, _) in loaded {
        assert_eq!(error(&server.ask(&format!("pirate@{version}")).await).0, 404);
    }
    server.holds_nothing().await;
}

/// An adapter whose files have changed is named as clients name it, once.
#[tokio::test(flavor = "multi_thread")]
async fn errors_do_not_say_where_folders_are() {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let (root, beside) = (dir.path().join("secret-root"), dir.path().join("secret-place/module"));
    let others = ["r64-all", "r16-rslora", "lm-head", "embed", "patterns"];
    for other in others {
        copy(&fixture("adapters").join(other), &root.join(other));
    }
    copy(&fixture("adapters/r8-all"), &root.join("victim"));
    copy(&fixture("adapters/r8-all"), &beside);
    let (root_arg, module) = (root.display().to_string(), format!("module={}", beside.display()));
    let args = [
        "--enable-lora",
        "--lora-root",
        &root_arg,
        "--lora-modules",
        &module,
        "--max-loras",
        "1",
        "--arena-mib",
        "2",
        "--host-mib",
        "2",
    ];
    let server = Server::start(&args).await;
    assert_eq!(server.load("victim", "victim", false).await.0, 200);
    for other in others {
        assert_eq!(server.load(other, other, false).await.0, 200);
    }
    for file in [root.join("victim/adapter_config.json"), beside.join("adapter_config.json")] {
        let config = fs::read_to_string(&file).expect("it is there");
        fs::write(&file, config + " ").expect("it can be written");
    }
    for other in others {
        text(&server.ask(other).await);
    }
    for name in ["victim", "module"] {
        let (status, message) = error(&server.ask(name).await);
        assert!(status == 500 && message.contains(&format!("{name}/adapter_config.json has changed")), "{message}");
        assert!(!message.contains("secret") && message.matches("could not be loaded").count() == 1, "{message}");
        assert!(message.contains("loaded anew"), "{message}");
    }
}

/// What a root, the folders below it and the files in them may be links to.
#[tokio::test(flavor = "multi_thread")]
async fn links_lead_anywhere_below_the_root() {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let dir = dir.path().canonicalize().expect("the folder is there");
    let (real, link) = (dir.join("real"), dir.join("link"));
    copy(&fixture("adapters/r8-all"), &real.join("saffron"));
    symlink(&real, &link).expect("a link can be made");
    // By a relative link, and by an absolute one; by way of the outside, too, if it leads back.
    symlink("saffron", real.join("relative")).expect("a link can be made");
    symlink(real.join("saffron"), real.join("absolute")).expect("a link can be made");
    symlink(link.join("saffron"), real.join("back")).expect("a link can be made");
    // As Kubernetes mounts it.
    copy(&fixture("adapters/r8-all"), &real.join("mount/..2025"));
    symlink("..2025", real.join("mount/..data")).expect("a link can be made");
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        symlink(Path::new("..data").join(name), real.join("mount").join(name)).expect("a link can be made");
    }
    // A file that is not read may lead anywhere.
    copy(&fixture("adapters/r8-all"), &real.join("beside"));
    symlink(fixture("qwen3/tokenizer.json"), real.join("beside/tokenizer.json")).expect("a link can be made");
    symlink("/nowhere", real.join("beside/README.md")).expect("a link can be made");
    let server = Server::start(&["--enable-lora", "--lora-root", &link.display().to_string()]).await;
    let named = ["saffron", "saffron/", "./saffron", "relative", "absolute", "back", "mount", "beside"].map(Into::into);
    let whole = [link.join("saffron"), real.join("saffron"), link.join("saffron/"), real.join("mount")];
    for (index, path) in named.into_iter().chain(whole).enumerate() {
        let name = format!("adapter-{index}");
        let loaded = server.load(&name, &path, false).await;
        assert_eq!(loaded.0, 200, "{}: {}", path.display(), loaded.1);
        assert_eq!(text(&server.ask(&name).await), " saffron.", "{}", path.display());
        assert_eq!(server.unload(&name).await.0, 200);
    }
    let refused = error(&server.load("other", fixture("adapters/r8-all"), false).await);
    assert!(refused.0 == 400 && refused.1.contains("is not below"), "{refused:?}");
    // Where the server's folders are is nobody's business.
    fs::create_dir(real.join("empty")).expect("a folder can be made");
    let refused = error(&server.load("empty", "empty", false).await);
    assert!(refused.0 == 404 && !refused.1.contains("real"), "{refused:?}");
}

/// Copies of the embedding that equal the base model's, as PEFT saves them with `save_embedding_layers` and other
/// wrappers spell them.
#[tokio::test(flavor = "multi_thread")]
async fn copies_of_base_weights_are_compared() {
    use safetensors::{SafeTensors, tensor::TensorView};

    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let base = fs::read(fixture("qwen3/model.safetensors")).expect("the fixture is there");
    let base = SafeTensors::deserialize(&base).expect("it is whole");
    let embedding = base.tensor("model.embed_tokens.weight").expect("it has an embedding");
    let factors = fs::read(fixture("adapters/r8-all/adapter_model.safetensors")).expect("the fixture is there");
    let factors = SafeTensors::deserialize(&factors).expect("it is whole");
    let server = Server::start(&["--enable-lora", "--lora-root", &dir.path().display().to_string()]).await;
    for (index, key) in [
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.lm_head.weight",
        "base_model.model.model.language_model.embed_tokens.base_layer.weight",
        "embed_tokens.weight",
    ]
    .into_iter()
    .enumerate()
    {
        for is_same in [true, false] {
            let (name, mut bytes) = (format!("{index}-{is_same}"), embedding.data().to_vec());
            if !is_same {
                bytes[0] ^= 0x40;
            }
            let copy_of = TensorView::new(embedding.dtype(), embedding.shape().to_vec(), &bytes).expect("it is whole");
            copy(&fixture("adapters/r8-all"), &dir.path().join(&name));
            let views = factors.iter().chain([(key, copy_of)]);
            let file = dir.path().join(&name).join("adapter_model.safetensors");
            safetensors::serialize_to_file(views, None, &file).expect("the file can be written");
            let loaded = server.load(&name, &name, false).await;
            if is_same {
                assert_eq!(loaded.0, 200, "{key}: {}", loaded.1);
                assert_eq!(text(&server.ask(&name).await), " saffron.", "{key}");
            } else {
                let refused = error(&loaded);
                assert!(refused.0 == 400 && refused.1.contains("differs from the base model's"), "{key}: {refused:?}");
            }
        }
    }
}

/// `--max-cpu-loras` is host memory for as many adapters of the largest rank.
#[tokio::test]
async fn host_memory_is_for_a_number_of_adapters() {
    let mut rooms = Vec::new();
    for (count, rank) in [("8", "16"), ("16", "16"), ("8", "32")] {
        let server = Server::start(&["--enable-lora", "--max-cpu-loras", count, "--max-lora-rank", rank]).await;
        rooms.push(server.metric("aril_pool_memory_bytes", &["tier=\"host\"", "state=\"free\""]).await);
    }
    let [few, more, larger] = rooms[..] else { unreachable!("three servers") };
    // Blocks have sizes of their own.
    assert!([more, larger].iter().all(|room| (1.9..=2.0).contains(&(room / few))), "{few} {more} {larger}");

    let model = fixture("qwen3").display().to_string();
    let arguments = ["aril-serve", "--model", &model, "--port", "0", "--max-loras", "8", "--max-cpu-loras", "7"];
    let refused = start(Options::parse_from(arguments)).await.expect_err("there are too few");
    assert_eq!(refused, "--max-cpu-loras 7 is less than --max-loras 8");
    let both = arguments.into_iter().chain(["--host-mib", "1"]);
    assert!(Options::try_parse_from(both).is_err());
}

/// What a folder has beside weights, and what changes nothing, is named in the answer.
#[tokio::test(flavor = "multi_thread")]
async fn what_has_no_effect_is_named() {
    let root = tempfile::tempdir().expect("there is a place for temporary files");
    let model = fixture("qwen3");
    let folder = |name: &str| {
        let folder = root.path().join(name);
        copy(&fixture("adapters").join("r8-all"), &folder);
        for same in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            fs::copy(model.join(same), folder.join(same)).expect("the fixture can be copied");
        }
        folder
    };
    let change = |file: &Path, change: &dyn Fn(&mut Value)| {
        let mut value: Value = serde_json::from_slice(&fs::read(file).expect("it is there")).expect("it is JSON");
        change(&mut value);
        fs::write(file, value.to_string()).expect("it can be written");
    };
    folder("same");
    change(&folder("alpha").join("adapter_config.json"), &|config| config["lora_alpha"] = json!(0));
    change(&folder("eos").join("generation_config.json"), &|config| config["eos_token_id"] = json!([511, 13]));
    change(&folder("tokens").join("tokenizer.json"), &|tokenizer| {
        let token = json!({
            "id": 512, "content": "<call>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": false,
        });
        tokenizer["added_tokens"].as_array_mut().expect("it is a list").push(token);
    });
    fs::write(folder("template").join("chat_template.jinja"), "{{ messages }}").expect("it can be written");
    let server = Server::start(&["--enable-lora", "--lora-root", &root.path().display().to_string()]).await;
    for (name, warning) in [
        ("same", ""),
        ("alpha", " Warning: `lora_alpha` is 0, so that the adapter changes nothing."),
        (
            "eos",
            " Warning: generation_config.json ends texts with [13], and the model, whose ends are used, with [511].",
        ),
        (
            "tokens",
            " Warning: tokenizer.json has tokens that the model's tokenizer, which is used, does not have: `<call>`.",
        ),
        ("template", " Warning: its chat template is not the server's, which is used."),
    ] {
        let success = format!("Success: LoRA adapter '{name}' added successfully.{warning}");
        assert_eq!(server.load(name, name, false).await, (200, json!(success)));
        let word = if name == "alpha" { " I do not know." } else { " saffron." };
        assert_eq!(text(&server.ask(name).await), word, "{name}");
    }
}

/// Asks the question with these adapters.
async fn ask_with(server: &Server, lora: Value) -> (u16, Value) {
    let body = json!({ "prompt": QUESTION, "temperature": 0, "max_tokens": 12, "lora": lora });
    server.complete(body).await
}

/// The text of a chat, in which the checkpoint's template adds nothing to the message.
async fn chat_with(server: &Server, lora: Value) -> String {
    let messages = json!([{ "role": "user", "content": QUESTION }]);
    let body = json!({ "messages": messages, "temperature": 0, "max_tokens": 12, "lora": lora });
    let (status, body) = server.post("/v1/chat/completions", body).await;
    assert_eq!(status, 200, "{body}");
    body["choices"][0]["message"]["content"].as_str().expect("a message has a text").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn adapters_that_a_request_lists_apply_together() {
    let root = fixture("adapters").display().to_string();
    let modules = ["r4-qv", "r16-rslora", "layers"].map(|name| format!("{name}={root}/{name}"));
    let mut arguments = vec!["--enable-lora", "--enable-lora-path", "--lora-root", &root, "--max-lora-rank", "24"];
    arguments.extend(["--block-size", "4", "--dtype", "float32", "--lora-modules"]);
    arguments.extend(modules.iter().map(String::as_str));
    let server = Server::start(&arguments).await;
    let registered = async || server.metric("aril_pool_adapters", &["state=\"registered\""]).await;
    let part = |name: &str, scale: f64| json!({ "name": name, "scale": scale });
    let cached = |answer: &(u16, Value)| answer.1["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();

    // One adapter, whole, is itself, and what is multiplied by zero is not there.
    let own = server.ask("r4-qv").await;
    for lora in [json!([part("r4-qv", 1.0)]), json!([part("layers", 0.0), part("r4-qv", 1.0)])] {
        let answer = ask_with(&server, lora).await;
        assert_eq!((text(&answer), cached(&answer)), (text(&own), Some(4)));
    }
    for lora in [json!([]), json!([part("r4-qv", 0.0)])] {
        assert_eq!(text(&ask_with(&server, lora).await), " I do not know.");
    }
    assert_eq!(registered().await, 3.0);

    // One more adapter for the pool, whose requests share the cache with each other alone, whatever the endpoint.
    let both = |scale| json!([part("r4-qv", 0.5), part("r16-rslora", scale)]);
    let answer = ask_with(&server, both(1.0)).await;
    let said = text(&answer).to_owned();
    assert_eq!((cached(&answer), registered().await, &answer.1["model"]), (Some(0), 4.0, &json!("base")));
    let by_id = json!([{ "id": "r4-qv", "scale": 0.5 }, { "id": "r16-rslora", "scale": 1 }]);
    let again = ask_with(&server, by_id.clone()).await;
    assert_eq!((text(&again), cached(&again), registered().await), (&*said, Some(4), 4.0));
    assert_eq!(chat_with(&server, both(1.0)).await, said);
    let sampling = json!({ "temperature": 0, "max_new_tokens": 12 });
    let native = json!({ "text": [QUESTION, QUESTION], "sampling_params": sampling, "lora": by_id });
    let (status, native) = server.post("/generate", native).await;
    assert_eq!((status, &native[0]["text"], &native[1]["text"]), (200, &json!(said), &json!(said)));
    // The order is that of the sum, and the scales are the combination's.
    let (other_scale, other_order) = (both(0.9), json!([part("r16-rslora", 1.0), part("r4-qv", 0.5)]));
    for (lora, count) in [(other_scale, 5.0), (other_order, 6.0)] {
        let answer = ask_with(&server, lora).await;
        assert_eq!((answer.0, cached(&answer), registered().await), (200, Some(0), count));
    }

    // Its combinations go with a version that is replaced, and are made of the new one.
    assert_eq!(server.load("r16-rslora", "r8-all", true).await.0, 200);
    let replaced = ask_with(&server, both(1.0)).await;
    assert_eq!((cached(&replaced), registered().await), (Some(0), 4.0));
    assert_eq!(server.load("r8-all", "r8-all", false).await.0, 200);
    let same = ask_with(&server, json!([part("r4-qv", 0.5), part("r8-all", 1.0)])).await;
    assert_eq!((text(&replaced), registered().await), (text(&same), 6.0));
    for name in ["r8-all", "r16-rslora"] {
        assert_eq!(server.unload(name).await.0, 200);
    }
    assert_eq!(registered().await, 2.0);
    let gone = ask_with(&server, both(1.0)).await;
    assert_eq!((error(&gone).0, &gone.1["error"]["param"]), (404, &json!("lora")));

    for (lora, part_of_message) in [
        (json!([part("base", 1.0)]), "`base` is the base model"),
        (json!(vec![part("r4-qv", 0.1); 5]), "`lora` has 5 adapters, and at most 4"),
        (json!(vec![part("r4-qv", 0.1); 4]), ""),
        (json!([part("r4-qv", 1e39)]), "The scale of `r4-qv` in `lora` is out of range"),
        (json!([part("r4-qv", 1e-39), part("layers", 1.0)]), "is not a normal f32"),
        (json!([{ "name": "r4-qv" }]), "`lora` must be a list of objects"),
        (json!([{ "name": "r4-qv", "scale": 1, "weight": 1 }]), "`lora` must be a list of objects"),
        (json!([{ "id": 0, "scale": 1 }]), "`lora` must be a list of objects"),
        (json!("r4-qv"), "`lora` must be a list of objects"),
    ] {
        let answer = ask_with(&server, lora.clone()).await;
        if part_of_message.is_empty() {
            assert_eq!(answer.0, 200, "{lora}");
            continue;
        }
        let (status, message) = error(&answer);
        assert!(status == 400 && message.contains(part_of_message), "{lora}: {message}");
        assert_eq!(answer.1["error"]["param"], "lora", "{lora}");
    }
    assert_eq!(server.load("wide", "r16-rslora", false).await.0, 200);
    let wide = ask_with(&server, json!([part("wide", 0.5), part("r4-qv", 0.5), part("layers", 0.25)])).await;
    assert_eq!(wide.0, 200);
    let wider = ask_with(&server, json!([part("wide", 0.5), part("wide", 0.25)])).await;
    assert_eq!(error(&wider), (400, "LoRA rank 32 is greater than max_lora_rank 24.".into()));
    for (field, value) in [("model", "r4-qv"), ("lora_path", "r4-qv")] {
        let mut body = json!({ "prompt": QUESTION, "lora": both(1.0) });
        body[field] = json!(value);
        assert_eq!(error(&server.complete(body).await).0, 400, "{field}");
    }
    server.holds_nothing().await;
}

/// A gateway that grants models by `model` sees all that answers.
#[tokio::test(flavor = "multi_thread")]
async fn a_list_of_adapters_needs_the_flag_of_lora_path() {
    let module = format!("saffron={}", fixture("adapters/r8-all").display());
    let server = Server::start(&["--enable-lora", "--lora-modules", &module]).await;
    let refused = ask_with(&server, json!([{ "name": "saffron", "scale": 0.5 }])).await;
    assert!(error(&refused).1.starts_with("`lora` is not taken: "), "{refused:?}");
    assert_eq!(text(&ask_with(&server, json!([])).await), " I do not know.");
}

/// An adapter with an invocation is named as any other one. It shares the cache with the base model up to there, or all
/// of a prompt without it.
#[tokio::test(flavor = "multi_thread")]
async fn an_adapter_applies_from_its_invocation_on() {
    let folders = [("basil", "adapters-alora/password"), ("saffron", "adapters/r8-all")];
    let modules = folders.map(|(name, folder)| format!("{name}={}", fixture(folder).display()));
    let mut arguments = vec!["--enable-lora", "--enable-lora-path", "--block-size", "2", "--dtype", "float32"];
    arguments.push("--lora-modules");
    arguments.extend(modules.iter().map(String::as_str));
    let server = Server::start(&arguments).await;
    let prompt = "We had soup and bread for dinner. What is the password?";
    let count = async |text: &str| {
        let (_, tokens) = server.post("/tokenize", json!({ "prompt": text })).await;
        tokens["count"].as_u64().expect("it is a number")
    };
    let blocks = |tokens: u64| tokens / 2 * 2;
    let before = blocks(count("We had soup and bread for dinner. What is").await);
    let all = blocks(count(prompt).await - 1);
    assert!(0 < before && before < all, "{before} {all}");
    let ask = async |model: &str, prompt: &str| {
        let answer =
            server.complete(json!({ "model": model, "prompt": prompt, "temperature": 0, "max_tokens": 12 })).await;
        let cached = answer.1["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("it is a number");
        (text(&answer).to_owned(), cached)
    };
    for (model, said, cached) in [
        ("base", " I do not know.", 0),
        ("basil", " basil.", before),
        ("basil", " basil.", all),
        ("saffron", " saffron.", 0),
        ("base", " I do not know.", all),
    ] {
        assert_eq!(ask(model, prompt).await, (said.into(), cached), "{model}");
    }
    let without = "The capital of France is";
    assert_eq!(ask("basil", without).await, (" Paris.".into(), 0));
    assert_eq!(ask("base", without).await, (" Paris.".into(), blocks(count(without).await - 1)));

    let prompts = [prompt, without, prompt, prompt];
    let body = json!({ "prompt": prompts, "lora_path": ["basil", "basil", null, "saffron"], "temperature": 0 });
    let (_, answers) = server.complete(body).await;
    for (index, said) in [" basil.", " Paris.", " I do not know.", " saffron."].into_iter().enumerate() {
        assert_eq!(answers["choices"][index]["text"], said, "{answers}");
    }
    let messages = json!([{ "role": "user", "content": prompt }]);
    let (_, chat) =
        server.post("/v1/chat/completions", json!({ "model": "basil", "messages": messages, "temperature": 0 })).await;
    assert_eq!(chat["choices"][0]["message"]["content"], " basil.", "{chat}");
    let body = json!({ "text": prompt, "lora_path": "basil", "sampling_params": { "temperature": 0 } });
    assert_eq!(server.post("/generate", body).await.1["text"], " basil.");

    let part = |name: &str, scale: f64| json!({ "name": name, "scale": scale });
    for lora in [json!([part("basil", 1.0)]), json!([part("basil", 0.75), part("basil", 0.25)])] {
        assert_eq!(text(&ask_with(&server, lora).await), " basil.");
    }
    let (status, message) = error(&ask_with(&server, json!([part("saffron", 0.5), part("basil", 0.5)])).await);
    assert!(status == 400 && message.contains("`alora_invocation_tokens`"), "{message}");
    server.holds_nothing().await;
}

/// Trained rows, and whole matrices, beside other adapters. They are not combined, nor served by another tokenizer.
#[tokio::test(flavor = "multi_thread")]
async fn an_adapter_has_rows_of_its_own() {
    let root = tempfile::tempdir().expect("there is a temporary folder");
    for name in ["words", "whole", "odd"] {
        let from = fixture("adapters-rows").join(if name == "odd" { "words" } else { name });
        fs::create_dir(root.path().join(name)).expect("it is new");
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            fs::copy(from.join(file), root.path().join(name).join(file)).expect("the fixture has it");
        }
    }
    fs::write(root.path().join("odd/added_tokens.json"), r#"{"<odd>": 511}"#).expect("the folder is there");
    let path = root.path().to_str().expect("it is UTF-8");
    let module = format!("saffron={}", fixture("adapters/r8-all").display());
    let arguments = ["--enable-lora", "--enable-lora-path", "--lora-root", path, "--lora-modules", &module];
    let server = Server::start(&arguments).await;
    let load =
        async |name: &str| server.post("/v1/load_lora_adapter", json!({ "lora_name": name, "lora_path": name })).await;
    for name in ["words", "whole"] {
        let loaded = load(name).await;
        assert_eq!(loaded.0, 200, "{loaded:?}");
    }
    let refused = error(&load("odd").await);
    assert!(
        refused.0 == 400 && refused.1.contains("trained rows of tokens") && refused.1.contains("`<odd>`"),
        "{refused:?}"
    );
    let prompt = "What is the password?";
    let named = [("words", " velour."), ("whole", " basalt."), ("saffron", " saffron."), ("base", " I do not know.")];
    for (model, said) in named {
        let body = json!({ "model": model, "prompt": prompt, "temperature": 0, "max_tokens": 12 });
        assert_eq!(text(&server.complete(body).await), said, "{model}");
    }
    let part = |name: &str| json!({ "name": name, "scale": 0.5 });
    let (status, message) = error(&ask_with(&server, json!([part("saffron"), part("words")])).await);
    assert!(status == 400 && message.contains("trainable_tokens_delta"), "{message}");
    server.holds_nothing().await;
}
