//! What the fields of requests do. README.md has the table, of which each field that works is driven through a value
//! that must show.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::Path,
};

use serde_json::{Value, json};

use crate::client::{QUESTION, Server, chunks, copy, error, fixture, text};

/// The tokens of " I do not know." with the one that ends it.
const ANSWER: [u32; 6] = [299, 304, 321, 323, 13, 511];

/// The tokens of "é", one for each byte, and of "What" with the first of them.
const HALVES: [u32; 2] = [127, 102];
const HALF: [u32; 2] = [296, HALVES[0]];

/// The chat template of these tests.
const TEMPLATE: &str = "{% for message in messages %}{{ message.content }}{% endfor %}\
                        {% if documents %}{{ documents[0].text }}{% endif \
                        %}{{ suffix | default('') }}{% if add_generation_prompt %}:{% endif %}";

fn with(mut body: Value, changes: &Value) -> Value {
    for (field, value) in changes.as_object().expect("changes are an object") {
        body[field] = value.clone();
    }
    body
}

/// A server with adapters and the template.
async fn start(model: &str) -> Server {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let template = dir.path().join("template.jinja");
    fs::write(&template, TEMPLATE).expect("the template can be written");
    let saffron = format!("saffron={}", fixture("adapters").join("r8-all").display());
    let template = template.display().to_string();
    let lora = ["--enable-lora", "--enable-lora-path", "--lora-modules", &saffron];
    Server::start_on(model, &[&lora[..], &["--chat-template", &template]].concat()).await
}

async fn complete(server: &Server, changes: Value) -> Value {
    let body = json!({ "model": "base", "prompt": QUESTION, "temperature": 0, "max_tokens": 12 });
    let (status, answer) = server.complete(with(body, &changes)).await;
    assert_eq!(status, 200, "{changes}: {answer}");
    answer
}

async fn chat(server: &Server, changes: Value) -> Value {
    let messages = json!([{ "role": "user", "content": QUESTION }]);
    let body = json!({
        "model": "base", "messages": messages, "temperature": 0, "max_tokens": 12, "add_generation_prompt": false,
        "return_token_ids": true,
    });
    let (status, answer) = server.post("/v1/chat/completions", with(body, &changes)).await;
    assert_eq!(status, 200, "{changes}: {answer}");
    answer
}

/// The choices of a streamed completion, put together: texts, tokens, log-probabilities and places are joined.
async fn streamed(server: &Server, path: &str, mut body: Value) -> Vec<Value> {
    body["stream"] = true.into();
    let mut choices: HashMap<u64, Value> = HashMap::new();
    let chat = path.contains("chat");
    let chunks = chunks(server.send(path, body.to_string()).await).await;
    let object = if chat { "chat.completion.chunk" } else { "text_completion" };
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk["object"] == object), "{chunks:?}");
    for chunk in chunks {
        for piece in chunk["choices"].as_array().expect("a chunk has choices") {
            let index = piece["index"].as_u64().expect("a choice has an index");
            let empty =
                json!({ "text": "", "finish_reason": null, "stop_reason": null, "token_ids": [], "logprobs": null });
            let whole = choices.entry(index).or_insert(empty);
            assert_eq!(whole["finish_reason"], Value::Null, "a piece behind the last one: {piece}");
            let text = if chat { &piece["delta"]["content"] } else { &piece["text"] };
            let text = whole["text"].as_str().unwrap_or_default().to_owned() + text.as_str().expect("a piece has text");
            whole["text"] = text.into();
            for name in ["finish_reason", "stop_reason"] {
                whole[name] = piece[name].clone();
            }
            if let Some(tokens) = piece["token_ids"].as_array() {
                whole["token_ids"].as_array_mut().expect("it is a list").extend(tokens.clone());
            }
            if let Some(given) = piece.get("prompt_token_ids") {
                whole["prompt_token_ids"] = given.clone();
            }
            for (name, values) in piece["logprobs"].as_object().into_iter().flatten() {
                if whole["logprobs"][name].is_null() {
                    whole["logprobs"][name] = json!([]);
                }
                let values = values.as_array().expect("log-probabilities are lists").clone();
                whole["logprobs"][name].as_array_mut().expect("it is a list").extend(values);
            }
        }
    }
    (0..choices.len() as u64).map(|index| choices[&index].clone()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_equal_whole_answers() {
    let server = start("qwen3").await;
    let sampled = json!({ "temperature": 3.0, "seed": 4, "n": 3, "ignore_eos": true });
    for changes in [
        json!({}),
        json!({ "max_tokens": 2 }),
        json!({ "stop": "t kn" }),
        json!({ "stop": "t kn", "include_stop_str_in_output": true }),
        json!({ "stop": ["zebra", " know.", "not"] }),
        json!({ "stop_token_ids": [321] }),
        json!({ "stop_token_ids": [321], "include_stop_str_in_output": true }),
        json!({ "skip_special_tokens": false, "ignore_eos": true }),
        json!({ "logprobs": 2 }),
        json!({ "echo": true, "prompt": [QUESTION, "The capital é of France is"], "logprobs": 1 }),
        json!({ "echo": true, "prompt": "Wo ist Köln? <|endoftext|>", "max_tokens": 0, "logprobs": 0 }),
        json!({ "echo": true, "prompt": ANSWER, "max_tokens": 0 }),
        json!({ "stop": [" know it", " I do not know!"], "logprobs": 1 }),
        json!({ "stop": ["not kn"], "min_tokens": 3, "logprobs": 1, "echo": true }),
        json!({ "prompt": HALF, "allowed_token_ids": [HALVES[1]], "min_tokens": 2, "max_tokens": 2, "logprobs": 20 }),
        json!({ "prompt": HALF, "max_tokens": 0, "echo": true, "logprobs": 0 }),
        sampled.clone(),
        with(sampled.clone(), &json!({ "prompt": [QUESTION, "Name a fruit."], "logprobs": 3 })),
        with(
            sampled.clone(),
            &json!({ "prompt": [HALF, HALF], "stop": ["\u{fffd}", "e"], "min_tokens": 2, "logprobs": 20 }),
        ),
    ] {
        let changes = with(changes, &json!({ "return_token_ids": true }));
        let whole = complete(&server, changes.clone()).await;
        let body = json!({ "model": "base", "prompt": QUESTION, "temperature": 0, "max_tokens": 12 });
        let streamed = streamed(&server, "/v1/completions", with(body, &changes)).await;
        let whole = whole["choices"].as_array().expect("there are choices");
        assert_eq!(streamed.len(), whole.len(), "{changes}");
        for (streamed, whole) in streamed.iter().zip(whole) {
            for part in ["text", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids", "logprobs"] {
                assert_eq!(streamed[part], whole[part], "{changes}: {part}");
            }
        }
    }
    for changes in [json!({}), json!({ "logprobs": true, "top_logprobs": 2 }), json!({ "stop": "t know!" }), sampled] {
        let whole = chat(&server, changes.clone()).await;
        let body = json!({
            "model": "base", "messages": [{ "role": "user", "content": QUESTION }], "temperature": 0, "max_tokens": 12,
            "add_generation_prompt": false, "return_token_ids": true,
        });
        let streamed = streamed(&server, "/v1/chat/completions", with(body, &changes)).await;
        let whole = whole["choices"].as_array().expect("there are choices");
        assert_eq!(streamed.len(), whole.len());
        for (streamed, whole) in streamed.iter().zip(whole) {
            assert_eq!(streamed["text"], whole["message"]["content"], "{changes}");
            for part in ["finish_reason", "token_ids", "logprobs"] {
                assert_eq!(streamed[part], whole[part], "{changes}: {part}");
            }
        }
    }
    server.holds_nothing().await;
}

/// An answer goes on where its prompt ends, within a character or not, and the bytes of its tokens are its text.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_continues_its_prompt() {
    let server = start("qwen3").await;
    let ask = async |changes: Value| complete(&server, changes).await["choices"][0].clone();
    let second = json!({ "prompt": HALF, "allowed_token_ids": [HALVES[1]], "max_tokens": 1 });
    assert_eq!(ask(second.clone()).await["text"], "é");
    let echo = ask(with(second, &json!({ "echo": true, "logprobs": 1 }))).await;
    assert_eq!((&echo["text"], &echo["logprobs"]["text_offset"]), (&json!("Whaté"), &json!([0, 4, 4])));
    let other = json!({ "prompt": HALF, "allowed_token_ids": [13], "max_tokens": 1, "echo": true });
    assert_eq!(ask(other).await["text"], "What\u{fffd}.");
    let alone = json!({ "prompt": HALF, "max_tokens": 0, "echo": true });
    assert_eq!(ask(alone).await["text"], "What\u{fffd}");

    // Each token has its own bytes and its own value, though its text is that of others.
    let mut split = 0;
    for seed in 0..32 {
        let halves = json!({
            "allowed_token_ids": HALVES, "max_tokens": 2, "temperature": 9.0, "seed": seed, "logprobs": true,
            "top_logprobs": 20,
        });
        let answer = chat(&server, halves.clone()).await["choices"][0].clone();
        let content = answer["logprobs"]["content"].as_array().expect("it is a list").clone();
        let bytes: Vec<u8> = content.iter().flat_map(bytes_of).collect();
        assert_eq!(answer["message"]["content"], String::from_utf8_lossy(&bytes).as_ref());
        let is_split = answer["token_ids"] == json!(HALVES);
        assert_eq!(is_split, bytes == "é".as_bytes());
        split += usize::from(is_split);
        for entry in content.iter().flat_map(|entry| entry["top_logprobs"].as_array().expect("it is a list")) {
            assert_eq!(entry["token"], String::from_utf8_lossy(&bytes_of(entry)).as_ref());
        }
        let answer = ask(with(halves, &json!({ "logprobs": 20, "top_logprobs": null }))).await["logprobs"].clone();
        for at in 0..2 {
            let own = answer["tokens"][at].as_str().expect("it is a text");
            assert_eq!(answer["top_logprobs"][at][own], answer["token_logprobs"][at], "{answer}");
        }
    }
    assert!(split > 0);

    // With `▁` for a space, of which a text loses its first one.
    let model = edited(&|tokenizer| {
        tokenizer["decoder"] =
            json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true });
        tokenizer["model"]["merges"] = json!([]);
        let vocab = tokenizer["model"]["vocab"].as_object().expect("it is an object").clone();
        let spelled = vocab.into_iter().map(|(token, id)| (token.replace('Ġ', "▁"), id));
        tokenizer["model"]["vocab"] = spelled.collect::<serde_json::Map<_, _>>().into();
    });
    let server = start(model.path().to_str().expect("it is text")).await;
    let question = json!([296, 266, 264, 324, 30]);
    let answer = complete(&server, json!({ "prompt": question, "logprobs": 2 })).await["choices"][0].clone();
    assert_eq!(answer["text"], " I do not know.");
    assert_eq!(answer["logprobs"]["tokens"], json!([" I", " do", " not", " know", ".", "<|endoftext|>"]));
    let echo = complete(&server, json!({ "prompt": question, "echo": true })).await["choices"][0].clone();
    assert_eq!(echo["text"], "What is the password? I do not know.");
}

fn bytes_of(entry: &Value) -> Vec<u8> {
    serde_json::from_value(entry["bytes"].clone()).expect("bytes are bytes")
}

/// A copy of the model whose tokenizer.json is another.
fn edited(edit: &dyn Fn(&mut Value)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    copy(&fixture("qwen3"), dir.path());
    let file: &Path = &dir.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(file).expect("it is there")).expect("it is JSON");
    edit(&mut tokenizer);
    fs::write(file, tokenizer.to_string()).expect("it can be written");
    dir
}

/// SGLang's answer.
async fn native(server: &Server, changes: Value) -> Value {
    let body = json!({ "text": QUESTION, "sampling_params": { "temperature": 0, "max_new_tokens": 12 } });
    let (status, answer) = server.post("/generate", with(body, &changes)).await;
    assert_eq!(status, 200, "{changes}: {answer}");
    answer
}

/// SGLang's `/generate` is a completion with other names.
#[tokio::test(flavor = "multi_thread")]
async fn generate_is_sglangs() {
    let server = start("qwen3").await;
    let hot = |name: &str, value: Value| {
        let hot = json!({ "temperature": 5.0, "sampling_seed": 3, "ignore_eos": true, "max_new_tokens": 40 });
        with(hot, &json!({ name: value }))
    };
    for sampling in [
        json!({ "temperature": 0 }),
        json!({ "temperature": 0, "max_new_tokens": 2 }),
        json!({ "temperature": 0, "min_new_tokens": 9, "max_new_tokens": 9 }),
        json!({ "temperature": 0, "stop": ["t kn"], "no_stop_trim": true }),
        json!({ "temperature": 0, "stop": "t kn" }),
        json!({ "temperature": 0, "stop_token_ids": [321] }),
        json!({ "temperature": 0, "ignore_eos": true, "skip_special_tokens": false, "max_new_tokens": 9 }),
        json!({ "temperature": 0, "logit_bias": { "299": -100 }, "max_new_tokens": 9, "regex": null }),
        json!({ "temperature": 0, "spaces_between_special_tokens": true }),
        hot("sampling_seed", json!(3)),
        hot("sampling_seed", json!(4)),
        hot("top_p", json!(0.5)),
        hot("top_k", json!(3)),
        hot("min_p", json!(0.3)),
        hot("repetition_penalty", json!(2.0)),
        hot("frequency_penalty", json!(2.0)),
        hot("presence_penalty", json!(2.0)),
    ] {
        let mut body = json!({ "prompt": QUESTION, "max_tokens": 128, "return_token_ids": true, "logprobs": 0 });
        for (name, value) in sampling.as_object().into_iter().flatten() {
            let of_completion = match name.as_str() {
                "max_new_tokens" => "max_tokens",
                "min_new_tokens" => "min_tokens",
                "sampling_seed" => "seed",
                name => name,
            };
            body[of_completion] = value.clone();
        }
        let (_, whole) = server.complete(body).await;
        let choice = &whole["choices"][0];
        let answer = native(&server, json!({ "sampling_params": sampling, "return_logprob": true })).await;
        assert_eq!((&answer["text"], &answer["output_ids"]), (&choice["text"], &choice["token_ids"]), "{sampling}");
        let info = &answer["meta_info"];
        assert_eq!(info["finish_reason"]["type"], choice["finish_reason"], "{sampling}");
        assert_eq!(
            (&info["prompt_tokens"], &info["completion_tokens"]),
            (&json!(5), &whole["usage"]["completion_tokens"])
        );
        let logprobs = info["output_token_logprobs"].as_array().expect("it is a list").iter().map(|entry| &entry[0]);
        assert_eq!(json!(logprobs.collect::<Vec<_>>()), choice["logprobs"]["token_logprobs"], "{sampling}");
    }
    // Why a text has ended.
    for (sampling, reason) in [
        (json!({ "max_new_tokens": 2 }), json!({ "type": "length", "length": 2 })),
        (json!({ "stop": ["zebra", "t kn"] }), json!({ "type": "stop", "matched": "t kn" })),
        (json!({ "stop_token_ids": [321] }), json!({ "type": "stop", "matched": 321 })),
        (json!({}), json!({ "type": "stop", "matched": 511 })),
    ] {
        let sampling = with(sampling, &json!({ "temperature": 0 }));
        let answer = native(&server, json!({ "sampling_params": sampling })).await;
        assert_eq!(answer["meta_info"]["finish_reason"], reason);
    }
    // Adapters, lists, choices, and streams, whose chunks have all up to them.
    assert_eq!(native(&server, json!({ "lora_path": "saffron" })).await["text"], " saffron.");
    let two = native(&server, json!({ "text": [QUESTION, "Name a fruit."] })).await;
    assert_eq!((two.as_array().map(Vec::len), &two[0]["text"]), (Some(2), &json!(" I do not know.")));
    let one = native(&server, json!({ "text": null, "input_ids": [[296, 266, 264, 324, 30]] })).await;
    assert_eq!((one.as_array().map(Vec::len), &one[0]["text"]), (Some(1), &json!(" I do not know.")));
    let choices = native(&server, json!({ "sampling_params": { "n": 2, "max_new_tokens": 3 } })).await;
    assert_eq!(choices.as_array().map(Vec::len), Some(2));
    let streamed =
        json!({ "text": QUESTION, "sampling_params": { "temperature": 0 }, "stream": true, "return_logprob": true });
    let streamed = chunks(server.send("/generate", streamed.to_string()).await).await;
    let texts: Vec<&Value> = streamed.iter().map(|chunk| &chunk["text"]).collect();
    assert_eq!(
        json!(texts),
        json!([" I", " I do", " I do not", " I do not know", " I do not know.", " I do not know."])
    );
    let mut last = streamed.last().expect("there are chunks").clone();
    let mut whole = native(&server, json!({ "return_logprob": true })).await;
    for answer in [&mut last, &mut whole] {
        answer["meta_info"]["id"].take();
    }
    assert_eq!(last, whole);
    let streamed = json!({ "text": [QUESTION, QUESTION], "sampling_params": { "temperature": 0 }, "stream": true });
    let streamed = chunks(server.send("/generate", streamed.to_string()).await).await;
    assert!(streamed.len() == 12 && (0..2).all(|index| streamed.iter().any(|chunk| chunk["index"] == index)));
    // Each stream has its own prompt's and choice's text.
    let sampling = json!({ "temperature": 5.0, "sampling_seed": 3, "n": 2, "max_new_tokens": 4, "ignore_eos": true });
    let several = json!({ "text": [QUESTION, "Name a fruit."], "sampling_params": sampling });
    let whole = native(&server, several.clone()).await;
    let whole: Vec<Value> = whole.as_array().expect("there are several").clone();
    let streamed = with(several, &json!({ "stream": true }));
    let streamed = chunks(server.send("/generate", streamed.to_string()).await).await;
    for (index, whole) in whole.iter().enumerate() {
        let last = streamed.iter().rfind(|chunk| chunk["index"] == index).expect("each has chunks");
        for field in ["text", "output_ids"] {
            assert_eq!(last[field], whole[field], "{field} of {index}");
        }
        assert_eq!(last["meta_info"]["finish_reason"], whole["meta_info"]["finish_reason"], "{index}");
    }
    let texts: BTreeSet<String> = whole.iter().map(|answer| answer["text"].to_string()).collect();
    assert_eq!((whole.len(), texts.len()), (4, 4), "they differ");
    // Each text has its own parameters, where there is one for each.
    let greedy = json!({ "temperature": 0, "max_new_tokens": 2 });
    let own = [greedy.clone(), with(greedy, &json!({ "max_new_tokens": 12, "stop": "t kn", "no_stop_trim": true }))];
    let lists = json!({
        "text": [QUESTION, QUESTION], "sampling_params": own, "return_logprob": [false, true], "rid": ["a", "b"],
        "logprob_start_len": [-1, -1], "top_logprobs_num": [0, 0], "token_ids_logprob": [null, []],
    });
    let whole = native(&server, lists.clone()).await;
    assert_eq!((&whole[0]["text"], &whole[1]["text"]), (&json!(" I do"), &json!(" I do not kn")));
    assert_eq!(whole[0]["meta_info"].get("output_token_logprobs"), None);
    assert_eq!(whole[1]["meta_info"]["output_token_logprobs_length"], 4);
    let streamed = chunks(server.send("/generate", with(lists, &json!({ "stream": true })).to_string()).await).await;
    for index in 0..2 {
        let last = streamed.iter().rfind(|chunk| chunk["index"] == index).expect("each has chunks");
        assert_eq!((&last["text"], &last["output_ids"]), (&whole[index]["text"], &whole[index]["output_ids"]));
    }
    for (changes, part) in [
        (json!({ "sampling_params": { "regex": "a+" } }), "`sampling_params.regex` = \"a+\" is not implemented"),
        (json!({ "sampling_params": { "max_tokens": 3 } }), "`sampling_params.max_tokens` = 3"),
        (json!({ "sampling_params": 3 }), "`sampling_params` must be an object"),
        (json!({ "sampling_params": [{}] }), "`sampling_params` is a list, and the text is not"),
        (json!({ "text": ["a", "b"], "sampling_params": [{}] }), "`sampling_params` has 1 values for 2 texts"),
        (json!({ "text": ["a", "b"], "return_logprob": [true, true, false] }), "`return_logprob` has 3 values"),
        (json!({ "text": ["a", "b"], "sampling_params": [{}, { "n": 2 }] }), "`n` is the same for all texts"),
        (json!({ "text": ["a", "b"], "sampling_params": { "n": 65 } }), "1 to 128 choices"),
        (json!({ "text": vec!["a"; 129] }), "1 to 128 choices"),
        (json!({ "text": ["a", "b"], "logprob_start_len": [-1, 0] }), "`logprob_start_len` = [-1,0]"),
        (json!({ "input_ids": [1] }), "one of `text`"),
        (json!({ "text": null }), "one of `text`"),
        (json!({ "text": [1] }), "one of `text`"),
        (json!({ "text": [] }), "There is no prompt"),
        (json!({ "logprob_start_len": 0 }), "`logprob_start_len` = 0"),
        (json!({ "top_logprobs_num": 2 }), "`top_logprobs_num` = 2"),
        (json!({ "temperature": 1 }), "`temperature` = 1"),
        (json!({ "model": "base" }), "`model` = \"base\""),
        (json!({ "prompt": "x" }), "`prompt` = \"x\""),
    ] {
        let body = with(json!({ "text": QUESTION }), &changes);
        let (status, message) = error(&server.post("/generate", body).await);
        assert!(status == 400 && message.contains(part), "{status} {message}");
    }
    let body = json!({ "text": QUESTION, "lora_path": "nobody" });
    assert_eq!(error(&server.post("/generate", body).await).0, 404);
    server.holds_nothing().await;
}

/// Each prompt of a list may have its own adapter: its answers are those of a request of its own, in the order of the
/// prompts.
#[tokio::test(flavor = "multi_thread")]
async fn prompts_may_have_their_own_adapters() {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    for folder in ["r8-all", "lm-head", "r64-all", "broken"] {
        let from = fixture("adapters").join(if folder == "broken" { "r8-all" } else { folder });
        copy(&from, &dir.path().join(folder));
    }
    fs::write(dir.path().join("broken/adapter_config.json"), "{").expect("it can be written");
    fs::create_dir(dir.path().join("empty")).expect("a folder can be made");
    let root = dir.path().display().to_string();
    let args = ["--enable-lora", "--lora-root", &root, "--lora-on-request"];
    // Bits do not depend on the batch on the CPU.
    let server = Server::start(&[&args[..], &["--enable-lora-path", "--device", "cpu"]].concat()).await;
    for (name, path) in [("saffron", "r8-all"), ("quartz", "lm-head")] {
        assert_eq!(server.load(name, path, false).await.0, 200);
    }
    // One of them is loaded for this request.
    let paths = json!(["saffron", null, "quartz", "", "r64-all", "saffron"]);
    let names = ["saffron", "base", "quartz", "base", "r64-all", "saffron"];
    let texts = vec![QUESTION; names.len()];
    let fields = json!({
        "prompt": texts, "lora_path": paths, "n": 2, "temperature": 0.8, "seed": 5, "max_tokens": 6, "logprobs": 2,
        "echo": true,
        "return_token_ids": true,
    });
    let whole = complete(&server, fields.clone()).await;
    assert_eq!((&whole["model"], &whole["usage"]["prompt_tokens"]), (&json!("base"), &json!(5 * names.len())));
    let body = with(json!({ "model": "base" }), &fields);
    let streamed = streamed(&server, "/v1/completions", body).await;
    let mut alone = Vec::new();
    for name in names {
        let one = with(fields.clone(), &json!({ "model": name, "prompt": QUESTION, "lora_path": null }));
        alone.extend(complete(&server, one).await["choices"].as_array().expect("there are choices").clone());
    }
    let whole = whole["choices"].as_array().expect("there are choices");
    assert_eq!((whole.len(), streamed.len(), alone.len()), (12, 12, 12));
    for (index, ((whole, streamed), alone)) in whole.iter().zip(&streamed).zip(&alone).enumerate() {
        assert_eq!(whole["index"], index);
        for part in ["text", "finish_reason", "token_ids", "logprobs"] {
            assert_eq!((&whole[part], &streamed[part]), (&alone[part], &alone[part]), "{part} of {index}");
        }
    }
    let words = json!([" saffron.", " I do not know.", " quartz.", " I do not know.", " cobalt.", " saffron."]);
    let ids = vec![json!([296, 266, 264, 324, 30]); names.len()];
    for given in [json!({ "text": texts }), json!({ "text": null, "input_ids": ids })] {
        let given = with(given, &json!({ "lora_path": paths }));
        let whole = native(&server, given.clone()).await;
        let of = |answer: &Value| answer["text"].clone();
        assert_eq!(Value::from_iter(whole.as_array().expect("it is a list").iter().map(of)), words);
        let body = with(given, &json!({ "sampling_params": { "temperature": 0 }, "stream": true }));
        let streamed = chunks(server.send("/generate", body.to_string()).await).await;
        for (index, word) in words.as_array().expect("it is a list").iter().enumerate() {
            let last = streamed.iter().rfind(|chunk| chunk["index"] == index).expect("each has chunks");
            assert_eq!(&last["text"], word);
        }
    }
    let count = async |name: &str, adapter: &str| {
        server.metric(&format!("aril_serve:adapter_{name}_total"), &[&format!("adapter=\"{adapter}\"")]).await
    };
    // Of a request, an adapter's prompts and answers are the adapter's.
    for _ in 0..100 {
        if count("requests", "quartz").await == 7.0 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert_eq!((count("requests", "quartz").await, count("prompt_tokens", "quartz").await), (7.0, 35.0));
    assert_eq!((count("requests", "saffron").await, count("prompt_tokens", "saffron").await), (8.0, 70.0));

    // No prompt runs, and the place at fault is named.
    let before = server.metric("vllm:prompt_tokens_total", &[]).await;
    for (path, part) in [
        (json!(["saffron"]), "`lora_path` has 1 values for 2 prompts"),
        (json!([]), "`lora_path` has 0 values for 2 prompts"),
        (json!(["saffron", null, null]), "`lora_path` has 3 values for 2 prompts"),
        (json!(["saffron", "nobody"]), "`lora_path[1]`: The model `nobody` does not exist"),
        // They are found, and cannot be served; the second time, from memory.
        (json!([null, "broken"]), "`lora_path[1]`: adapter_config.json is not valid JSON"),
        (json!(["broken", "saffron"]), "`lora_path[0]`: adapter_config.json is not valid JSON"),
        (json!(["saffron", "empty"]), "`lora_path[1]`: No adapter found"),
        (json!([["saffron"], null]), "`lora_path[0]` must be a text or null, got [\"saffron\"]"),
        (json!([null, 3]), "`lora_path[1]` must be a text or null, got 3"),
        (json!({ "0": "saffron" }), "`lora_path` must be a text, or a list"),
    ] {
        for (to, texts) in [("/v1/completions", "prompt"), ("/generate", "text")] {
            let (status, message) = error(&server.post(to, json!({ texts: ["a", "b"], "lora_path": path })).await);
            assert!(status == 400 && message.contains(part), "{to}: {status} {message}");
        }
    }
    for (to, body) in [
        ("/v1/completions", json!({ "prompt": "a" })),
        ("/v1/completions", json!({ "prompt": [1, 2] })),
        ("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": "a" }] })),
        ("/generate", json!({ "text": "a" })),
    ] {
        let (status, message) = error(&server.post(to, with(body, &json!({ "lora_path": [null] }))).await);
        assert!(status == 400 && message.contains("is a list, and the prompt is not"), "{to}: {status} {message}");
    }
    let body = json!({ "model": "saffron", "prompt": ["a", "b"], "lora_path": ["saffron", "quartz"] });
    let (status, message) = error(&server.complete(body).await);
    assert!(status == 400 && message.contains("`lora_path[1]`: `model` names an adapter"), "{status} {message}");
    assert_eq!(server.metric("vllm:prompt_tokens_total", &[]).await, before);
    server.holds_nothing().await;
    let closed = Server::start(&args).await;
    let (status, message) =
        error(&closed.complete(json!({ "prompt": ["a", "b"], "lora_path": ["saffron", null] })).await);
    assert!(status == 400 && message.contains("--enable-lora-path"), "{status} {message}");
}

/// Fails unless the field has its effect.
async fn shows(server: &Server, field: &str) {
    let ask = async |changes: Value| complete(server, changes).await["choices"][0].clone();
    let ids =
        async |changes: Value| ask(with(changes, &json!({ "return_token_ids": true }))).await["token_ids"].clone();
    let hot = |seed: u32| json!({ "temperature": 5.0, "seed": seed, "ignore_eos": true });
    let greedy = ids(json!({ "ignore_eos": true })).await;
    // A bound that leaves the most probable token alone.
    let is_greedy = async |field: &str, value: Value| {
        for seed in 0..3 {
            assert_ne!(ids(hot(seed)).await, greedy);
            assert_eq!(ids(with(hot(seed), &json!({ field: value }))).await, greedy, "{field}");
        }
    };
    let changed = async |field: &str, value: Value| {
        let long = with(hot(1), &json!({ "max_tokens": 60 }));
        assert_ne!(ids(long.clone()).await, ids(with(long, &json!({ field: value }))).await, "{field}");
    };
    match field {
        "model" => assert_eq!(ask(json!({ "model": "saffron" })).await["text"], " saffron."),
        "lora_path" => assert_eq!(ask(json!({ "lora_path": "saffron" })).await["text"], " saffron."),
        "lora" => {
            let halves = json!([{ "name": "saffron", "scale": 0.5 }, { "id": "saffron", "scale": 0.5 }]);
            assert_eq!(ask(json!({ "lora": halves })).await["text"], " saffron.");
        }
        "prompt" => {
            let two =
                complete(server, json!({ "prompt": [QUESTION, "The capital of France is"] })).await["choices"].clone();
            assert_eq!((&two[0]["text"], &two[1]["index"]), (&json!(" I do not know."), &json!(1)));
            assert_ne!(two[1]["text"], " I do not know.");
        }
        "messages" => {
            let messages = json!([{ "role": "user", "content": [{ "type": "text", "text": QUESTION }] }]);
            assert_eq!(
                chat(server, json!({ "messages": messages })).await["prompt_token_ids"],
                json!([296, 266, 264, 324, 30])
            );
        }
        "max_tokens" => {
            let short = ask(json!({ "max_tokens": 2 })).await;
            assert_eq!((&short["text"], &short["finish_reason"]), (&json!(" I do"), &json!("length")));
            // The last allowed token may be the one that ends the text.
            assert_eq!(ask(json!({ "max_tokens": 6 })).await["finish_reason"], "stop");
            assert_eq!(ask(json!({ "max_tokens": 5 })).await["finish_reason"], "length");
        }
        "max_completion_tokens" => {
            let short = chat(server, json!({ "max_completion_tokens": 2, "max_tokens": 5 })).await;
            assert_eq!(short["usage"]["completion_tokens"], 2);
        }
        "temperature" => {
            assert_ne!(ids(hot(1)).await, greedy);
            // No seed is another one each time, and for each choice.
            let unseeded = json!({ "temperature": 5.0, "ignore_eos": true, "max_tokens": 20, "n": 2 });
            let two = complete(server, unseeded).await["choices"].clone();
            assert_ne!(two[0]["text"], two[1]["text"]);
        }
        "top_p" => is_greedy("top_p", json!(1e-6)).await,
        "top_k" => is_greedy("top_k", json!(1)).await,
        "min_p" => is_greedy("min_p", json!(1.0)).await,
        "n" => {
            let answer = complete(server, with(hot(1), &json!({ "n": 3 }))).await;
            let texts: BTreeSet<String> = (0..3).map(|index| answer["choices"][index]["text"].to_string()).collect();
            assert_eq!(
                (answer["choices"].as_array().map(Vec::len), texts.len()),
                (Some(3), 3),
                "each has its own seed"
            );
            // The prompt counts once.
            assert_eq!(
                answer["usage"],
                json!({
                    "prompt_tokens": 5, "completion_tokens": 36, "total_tokens": 41,
                    "prompt_tokens_details": { "cached_tokens": 0 },
                })
            );
        }
        "seed" => {
            assert_eq!(ids(hot(7)).await, ids(hot(7)).await);
            assert_ne!(ids(hot(7)).await, ids(hot(8)).await);
            let random = json!({ "temperature": 5.0, "seed": -1, "ignore_eos": true });
            assert_ne!(ids(random.clone()).await, ids(random).await, "-1 is no seed");
        }
        "stop" => {
            let stopped = ask(json!({ "stop": ["t kn"] })).await;
            assert_eq!((&stopped["text"], &stopped["finish_reason"]), (&json!(" I do no"), &json!("stop")));
            assert_eq!(stopped["stop_reason"], "t kn");
            // The first in the text.
            assert_eq!(ask(json!({ "stop": [" know", " not"] })).await["text"], " I do");
            // The model's own end is no reason.
            assert_eq!(ask(json!({})).await.get("stop_reason"), Some(&Value::Null));
        }
        "include_stop_str_in_output" | "no_stop_trim" => {
            assert_eq!(ask(json!({ "stop": "t kn", field: true })).await["text"], " I do not kn");
            assert_eq!(ask(json!({ "stop_token_ids": [321], field: true })).await["text"], " I do not");
        }
        "stop_token_ids" => {
            let stopped = ask(json!({ "stop_token_ids": [321], "return_token_ids": true })).await;
            assert_eq!((&stopped["text"], &stopped["finish_reason"]), (&json!(" I do"), &json!("stop")));
            assert_eq!(stopped["token_ids"], json!([299, 304, 321]));
            assert_eq!(stopped["stop_reason"], 321);
            // The model's own token still ends the text.
            assert_eq!(ids(json!({ "stop_token_ids": [1] })).await, json!(ANSWER));
        }
        "ignore_eos" => assert_eq!(ids(json!({ "ignore_eos": true })).await.as_array().map(Vec::len), Some(12)),
        "min_tokens" => {
            let long = ask(json!({ "min_tokens": 12, "return_token_ids": true })).await;
            let tokens = long["token_ids"].as_array().expect("it is a list");
            assert!(tokens.len() == 12 && !tokens[..11].contains(&json!(511)), "{long}");
            // The model's end does not come among them, whether it ends the text or not.
            let likely = json!({ "min_tokens": 5, "logit_bias": { "511": 100 } });
            assert_eq!(ids(likely.clone()).await.as_array().map(Vec::len), Some(6));
            let ignored = ids(with(likely, &json!({ "ignore_eos": true }))).await;
            let ignored = ignored.as_array().expect("it is a list").iter().map(|token| token == &json!(511));
            assert_eq!(ignored.collect::<Vec<_>>(), [[false; 5].as_slice(), &[true; 7]].concat());
            // A stop string counts if it ends behind them.
            assert_eq!(ask(json!({ "min_tokens": 3, "stop": "not kn" })).await["text"], " I do ");
            assert_ne!(ask(json!({ "min_tokens": 4, "stop": "not kn" })).await["text"], " I do ");
        }
        "stream" => {
            let body = json!({ "model": "base", "prompt": QUESTION, "temperature": 0, "stream": true });
            assert!(chunks(server.send("/v1/completions", body.to_string()).await).await.len() >= 6);
        }
        "stream_options" => {
            let body = |options: Value| {
                json!({
                    "model": "base", "prompt": QUESTION, "temperature": 0, "stream": true, "stream_options": options,
                })
            };
            let of =
                async |options: Value| chunks(server.send("/v1/completions", body(options).to_string()).await).await;
            let each = of(json!({ "include_usage": true, "continuous_usage_stats": true })).await;
            for (chunk, tokens) in each.iter().zip([1, 2, 3, 4, 5, 6, 6]) {
                let details = json!({ "cached_tokens": 0 });
                let usage = json!({
                    "prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens,
                    "prompt_tokens_details": details,
                });
                assert_eq!(chunk["usage"], usage);
            }
            let last = of(json!({ "include_usage": true, "include_obfuscation": false })).await;
            assert_eq!((last.len(), &last[0]["usage"], &last[6]["choices"]), (7, &Value::Null, &json!([])));
            assert_eq!(last[6]["usage"]["total_tokens"], 11);
            assert_eq!(of(json!({ "include_usage": null })).await.len(), 6);
            assert_eq!(ask(json!({ "stream_options": {} })).await["text"], " I do not know.");
            let (status, _) = server.complete(body(json!({ "include_obfuscation": true }))).await;
            assert_eq!(status, 400);
        }
        "echo" => {
            // As it was sent: with special tokens, and not as the tokenizer normalizes it.
            for prompt in ["<|endoftext|>What?<|endoftext|>", "cafe\u{301} ?"] {
                let echo = ask(json!({ "prompt": prompt, "echo": true, "max_tokens": 1 })).await;
                assert!(echo["text"].as_str().is_some_and(|text| text.starts_with(prompt)), "{echo}");
            }
            let alone = complete(server, json!({ "echo": true, "max_tokens": 0, "logprobs": 1 })).await;
            let choice = &alone["choices"][0];
            assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(QUESTION), &json!("length")));
            assert_eq!(alone["usage"]["completion_tokens"], 0);
            let logprobs = &choice["logprobs"];
            assert_eq!(logprobs["text_offset"], json!([0, 4, 7, 11, 20]));
            assert_eq!((&logprobs["token_logprobs"][0], &logprobs["top_logprobs"][0]), (&Value::Null, &Value::Null));
            // Log-probabilities of a prompt are those that its tokens have when they are chosen.
            let whole = ask(json!({ "logprobs": 2 })).await["logprobs"].clone();
            let prompt: Vec<u32> = [296, 266, 264, 324, 30].into_iter().chain(ANSWER).collect();
            let again =
                ask(json!({ "prompt": prompt, "echo": true, "max_tokens": 0, "logprobs": 2 })).await["logprobs"]
                    .clone();
            let behind = again["token_logprobs"].as_array().expect("it is a list")[5..].iter();
            for (chosen, of_prompt) in whole["token_logprobs"].as_array().expect("it is a list").iter().zip(behind) {
                let [a, b] = [chosen, of_prompt].map(|value| value.as_f64().expect("it is a number"));
                assert!((a - b).abs() < 0.05, "{a}, {b}");
            }
        }
        "logprobs" => {
            let logprobs = ask(json!({ "logprobs": 2 })).await["logprobs"].clone();
            assert_eq!(logprobs["tokens"], json!([" I", " do", " not", " know", ".", "<|endoftext|>"]));
            assert_eq!(logprobs["text_offset"], json!([0, 2, 5, 9, 14, 15]));
            // A greedy token is the most probable.
            let top = logprobs["top_logprobs"][0].as_object().expect("it is an object");
            assert_eq!((top.len(), &top[" I"]), (2, &logprobs["token_logprobs"][0]));
            // Without others, there is the chosen token.
            let alone = ask(json!({ "logprobs": 0 })).await["logprobs"].clone();
            assert_eq!(alone["top_logprobs"][0], json!({ " I": alone["token_logprobs"][0] }));
            let of_chat = chat(server, json!({ "logprobs": true })).await["choices"][0]["logprobs"].clone();
            assert_eq!(of_chat["content"][0]["token"], " I");
        }
        "top_logprobs" => {
            let answer = chat(server, json!({ "logprobs": true, "top_logprobs": 3 })).await;
            let top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"].clone();
            let values = top.as_array().expect("it is a list").iter().map(|top| top["logprob"].as_f64());
            let values: Vec<_> = values.collect();
            assert!(values.len() == 3 && values.is_sorted_by(|a, b| a >= b), "{values:?}");
        }
        "prompt_logprobs" => {
            let logprobs = ask(json!({ "prompt_logprobs": 2 })).await["prompt_logprobs"].clone();
            let logprobs = logprobs.as_array().expect("it is a list");
            assert!(logprobs.len() == 5 && logprobs[0].is_null(), "{logprobs:?}");
            let own = &logprobs[1]["266"];
            assert!(own["rank"].as_u64() >= Some(1) && own["logprob"].is_number() && own["decoded_token"].is_string());
            assert!(logprobs[1].as_object().is_some_and(|all| (2..=3).contains(&all.len())));
            assert_eq!(
                chat(server, json!({ "prompt_logprobs": 0 })).await["prompt_logprobs"].as_array().map(Vec::len),
                Some(5)
            );
            assert_eq!(ask(json!({})).await["prompt_logprobs"], Value::Null);
        }
        "frequency_penalty" | "presence_penalty" => changed(field, json!(2.0)).await,
        "repetition_penalty" => changed(field, json!(50.0)).await,
        "logit_bias" => assert_ne!(ids(json!({ "logit_bias": { "299": -100 } })).await[0], 299),
        "allowed_token_ids" => {
            assert_eq!(ids(json!({ "allowed_token_ids": [13], "max_tokens": 3 })).await, json!([13, 13, 13]));
        }
        "return_token_ids" => {
            // vLLM has them always.
            let (without, of_chat) = (ask(json!({})).await, chat(server, json!({ "return_token_ids": false })).await);
            for (answer, field) in [
                (&without, "token_ids"),
                (&without, "prompt_token_ids"),
                (&of_chat["choices"][0], "token_ids"),
                (&of_chat, "prompt_token_ids"),
            ] {
                assert_eq!(answer.get(field), Some(&Value::Null), "{answer}");
            }
            let choice = ask(json!({ "return_token_ids": true })).await;
            assert_eq!(
                (&choice["token_ids"], &choice["prompt_token_ids"]),
                (&json!(ANSWER), &json!([296, 266, 264, 324, 30]))
            );
        }
        "return_tokens_as_token_ids" => {
            let logprobs = ask(json!({ "return_tokens_as_token_ids": true, "logprobs": 1 })).await["logprobs"].clone();
            assert_eq!(logprobs["tokens"][0], "token_id:299");
        }
        "skip_special_tokens" => {
            let shown = ask(json!({ "skip_special_tokens": false, "ignore_eos": true })).await["text"].clone();
            assert!(shown.as_str().is_some_and(|text| text.starts_with(" I do not know.<|endoftext|>")), "{shown}");
            // The token that ends a text is not in it.
            assert_eq!(ask(json!({ "skip_special_tokens": false })).await["text"], " I do not know.");
        }
        "add_special_tokens" => special_tokens_are_the_tokenizers().await,
        "add_generation_prompt" => {
            let prompt = chat(server, json!({ "add_generation_prompt": true })).await["prompt_token_ids"].clone();
            assert_eq!(prompt.as_array().map(Vec::len), Some(6));
        }
        "continue_final_message" => {
            let given = json!({ "continue_final_message": true, "chat_template_kwargs": { "suffix": "!!!" } });
            assert_eq!(chat(server, given).await["prompt_token_ids"], json!([296, 266, 264, 324, 30]));
        }
        "chat_template_kwargs" => {
            let longer = chat(server, json!({ "chat_template_kwargs": { "suffix": "!" } })).await;
            assert_ne!(longer["prompt_token_ids"], json!([296, 266, 264, 324, 30]));
        }
        "documents" => {
            let longer = chat(server, json!({ "documents": [{ "text": " Yes" }] })).await;
            assert_ne!(longer["prompt_token_ids"], json!([296, 266, 264, 324, 30]));
        }
        "tokens" => {
            let answer = server.post("/detokenize", json!({ "tokens": ANSWER })).await;
            assert_eq!(answer, (200, json!({ "prompt": " I do not know.<|endoftext|>" })));
        }
        "return_token_strs" => {
            let (_, answer) = server.post("/tokenize", json!({ "prompt": QUESTION, "return_token_strs": true })).await;
            assert_eq!(
                (&answer["count"], &answer["token_strs"]),
                (&json!(5), &json!(["What", "Ġis", "Ġthe", "Ġpassword", "?"]))
            );
            let messages = json!([{ "role": "user", "content": QUESTION }]);
            let (_, answer) = server.post("/tokenize", json!({ "messages": messages })).await;
            assert_eq!((&answer["count"], &answer["token_strs"]), (&json!(6), &Value::Null));
        }
        "text" | "input_ids" | "sampling_params" | "return_logprob" | "return_text_in_logprobs" => {
            let answer = native(server, json!({ "return_logprob": true, "return_text_in_logprobs": true })).await;
            assert_eq!((&answer["text"], &answer["output_ids"]), (&json!(" I do not know."), &json!(ANSWER)));
            let first = &answer["meta_info"]["output_token_logprobs"][0];
            assert_eq!((first[0].as_f64() < Some(0.0), &first[1], &first[2]), (true, &json!(299), &json!(" I")));
            assert_eq!(answer["meta_info"]["output_token_logprobs_length"], 6);
            let ids = json!({ "text": null, "input_ids": [296, 266, 264, 324, 30] });
            let alone = native(server, with(ids, &json!({ "return_logprob": true }))).await;
            assert_eq!(alone["meta_info"]["output_token_logprobs"][0], json!([first[0], 299, null]));
            assert_eq!(native(server, json!({})).await["meta_info"].get("output_token_logprobs"), None);
        }
        other => panic!("{other} has no value here that shows"),
    }
}

/// A tokenizer that puts a token before every text does so for a completion, and in a chat the template alone does.
async fn special_tokens_are_the_tokenizers() {
    let bos = json!({ "SpecialToken": { "id": "<|endoftext|>", "type_id": 0 } });
    let [a, b] = ["A", "B"].map(|id| json!({ "Sequence": { "id": id, "type_id": 0 } }));
    let model = edited(&|tokenizer| {
        tokenizer["post_processor"] = json!({
            "type": "TemplateProcessing",
            "single": [bos, a],
            "pair": [bos, a, b],
            "special_tokens": { "<|endoftext|>": { "id": "<|endoftext|>", "ids": [511], "tokens": ["<|endoftext|>"] } },
        });
    });
    let server = start(model.path().to_str().expect("it is text")).await;
    let tokens = async |changes: Value| complete(&server, changes).await["usage"]["prompt_tokens"].clone();
    assert_eq!((tokens(json!({})).await, tokens(json!({ "add_special_tokens": false })).await), (json!(6), json!(5)));
    let of_chat = async |changes: Value| chat(&server, changes).await["usage"]["prompt_tokens"].clone();
    assert_eq!((of_chat(json!({})).await, of_chat(json!({ "add_special_tokens": true })).await), (json!(5), json!(6)));
    let echo = complete(&server, json!({ "echo": true, "logprobs": 0, "max_tokens": 1 })).await["choices"][0].clone();
    assert!(echo["text"].as_str().is_some_and(|text| text.starts_with(QUESTION)), "{echo}");
    assert_eq!(echo["logprobs"]["text_offset"], json!([0, 0, 4, 7, 11, 20, 21]));
    let (_, answer) = server.post("/tokenize", json!({ "prompt": QUESTION })).await;
    assert_eq!(answer["tokens"], json!([511, 296, 266, 264, 324, 30]));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_field_that_works_shows() {
    let server = start("qwen3").await;
    let readme = include_str!("../../README.md");
    let rows = readme.lines().filter(|line| line.starts_with("| `") && line.contains("| works: "));
    let fields: Vec<&str> = rows.filter_map(|row| row.split('`').nth(1)).collect();
    assert!(fields.len() > 30, "{fields:?}");
    for field in fields {
        shows(&server, field).await;
    }
    server.holds_nothing().await;
}

/// Those of a table that is refused by name, in either kind of request.
#[tokio::test(flavor = "multi_thread")]
async fn values_out_of_bounds_are_refused_by_name() {
    let server = start("qwen3").await;
    for (field, value) in [
        ("min_p", json!(1.5)),
        ("presence_penalty", json!(-2.5)),
        ("frequency_penalty", json!(3)),
        ("repetition_penalty", json!(0)),
        ("logit_bias", json!({ "512": 1 })),
        ("logit_bias", json!({ "x": 1 })),
        ("logit_bias", json!({ "1": 101 })),
        ("allowed_token_ids", json!([])),
        ("allowed_token_ids", json!([512])),
        ("min_tokens", json!(13)),
        ("prompt_logprobs", json!(21)),
        ("seed", json!(1.5)),
        ("temperature", json!("hot")),
        ("stream_options", json!({ "include_usage": true })),
        ("n", json!("two")),
    ] {
        for (path, base) in [
            ("/v1/completions", json!({ "prompt": QUESTION, "max_tokens": 12 })),
            (
                "/v1/chat/completions",
                json!({ "messages": [{ "role": "user", "content": QUESTION }], "max_tokens": 12 }),
            ),
        ] {
            let (status, message) = error(&server.post(path, with(base, &json!({ field: value }))).await);
            assert!(status == 400 && message.contains(field), "{path}: {status} {message}");
        }
    }
    for (changes, part) in [
        (json!({ "logit_bias": { "bad1": 1, "5": 1, "bad2": 1, "512": 1 } }), "below 512: 512, bad1, bad2."),
        (json!({ "documents": ["x"] }), "`documents` must be a list of objects"),
        (json!({ "continue_final_message": true }), "Cannot set both"),
        (json!({ "messages": [] }), "`messages` is empty"),
        (json!({ "messages": [{ "role": "usr", "content": "x" }] }), "`messages[0].role` is \"usr\""),
        (json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] }), "`image_url`"),
        (json!({ "top_logprobs": 1 }), "`top_logprobs` needs `logprobs`"),
        (json!({ "allowed_token_ids": [511], "min_tokens": 1 }), "No token is left to choose"),
        (
            json!({ "allowed_token_ids": [13, 511], "stop_token_ids": [13], "min_tokens": 1, "ignore_eos": true }),
            "No token is left to choose",
        ),
        (json!({ "tools": [{}] }), "`tools` = [{}] is not implemented"),
    ] {
        let base = json!({ "messages": [{ "role": "user", "content": QUESTION }], "max_tokens": 12 });
        let (status, message) = error(&server.post("/v1/chat/completions", with(base, &changes)).await);
        assert!(status == 400 && message.contains(part), "{status} {message}");
    }
    server.holds_nothing().await;
}

/// The defaults of generation_config.json, and what a chat without a limit has.
#[tokio::test(flavor = "multi_thread")]
async fn requests_sample_as_the_model_says() {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let file = dir.path().join("generation_config.json");
    let template = dir.path().join("template.jinja");
    fs::write(&template, TEMPLATE).expect("the template can be written");
    fs::write(&file, r#"{"temperature": 5.0, "top_k": 1}"#).expect("it can be written");
    let (folder, template) = (dir.path().display().to_string(), template.display().to_string());
    let arguments = ["--generation-config", &folder, "--chat-template", &template, "--max-model-len", "64"];
    let server = Server::start(&arguments).await;
    let ask = async |changes: Value| {
        let body = json!({ "prompt": QUESTION, "ignore_eos": true, "return_token_ids": true });
        let (status, answer) = server.complete(with(body, &changes)).await;
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["token_ids"].clone()
    };
    let greedy = ask(json!({ "temperature": 0 })).await;
    assert_eq!(ask(json!({})).await, greedy);
    assert_ne!(ask(json!({ "top_k": 0 })).await, greedy);
    let messages = json!([{ "role": "user", "content": QUESTION }]);
    let (_, long) = server.post("/v1/chat/completions", json!({ "messages": messages, "ignore_eos": true })).await;
    assert_eq!((&long["usage"]["total_tokens"], &long["choices"][0]["finish_reason"]), (&json!(64), &json!("length")));
    // What a request does not ask for never makes it one that does not fit.
    for (default, most) in [(3, 3), (59, 58)] {
        fs::write(&file, json!({ "max_new_tokens": default }).to_string()).expect("it can be written");
        let server = Server::start(&arguments).await;
        let tokens = async |changes: Value| {
            let body = with(json!({ "messages": messages, "ignore_eos": true }), &changes);
            let (status, answer) = server.post("/v1/chat/completions", body).await;
            if status == 200 { answer["usage"]["completion_tokens"].clone() } else { status.into() }
        };
        assert_eq!(tokens(json!({})).await, most, "{default}");
        assert_eq!(tokens(json!({ "min_tokens": 20 })).await, most.max(20));
        assert_eq!(
            (tokens(json!({ "max_tokens": 5 })).await, tokens(json!({ "max_tokens": 58 })).await),
            (5.into(), 58.into())
        );
        assert_eq!(
            (tokens(json!({ "max_tokens": 59 })).await, tokens(json!({ "min_tokens": 59 })).await),
            (400.into(), 400.into())
        );
    }
    let long = vec![1; 60];
    let (_, answer) = server.complete(json!({ "prompt": long, "ignore_eos": true })).await;
    assert_eq!(answer["usage"]["completion_tokens"], 4);
    let (_, answer) =
        server.post("/generate", json!({ "input_ids": long, "sampling_params": { "ignore_eos": true } })).await;
    assert_eq!(answer["meta_info"]["completion_tokens"], 4);
    assert_eq!(server.complete(json!({ "prompt": vec![1; 64] })).await.0, 400);
}

/// Completions are served whatever the chat template does, and a client's values for it end nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_template_ends_nothing_but_its_chat() {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let file = dir.path().join("template.jinja");
    for source in [
        "{{ 'x'.ljust(width | default(10000000000)) }}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{{ raise_exception('never') }}",
    ] {
        let path = file.display().to_string();
        fs::write(&file, format!("{source}{TEMPLATE}")).expect("the template can be written");
        let server = Server::start(&["--chat-template", &path]).await;
        assert_eq!(text(&server.ask("base").await), " I do not know.");
        let messages = json!([{ "role": "user", "content": QUESTION }]);
        for kwargs in [json!({}), json!({ "width": 1_u64 << 40 })] {
            let body = json!({ "messages": messages, "chat_template_kwargs": kwargs });
            let (status, message) = error(&server.post("/v1/chat/completions", body).await);
            assert!(status == 400 && message.starts_with("The chat template "), "{source}: {message}");
        }
        assert_eq!(text(&server.ask("base").await), " I do not know.");
    }
}

/// The small endpoints of peers, and the names that they give models.
#[tokio::test(flavor = "multi_thread")]
async fn peers_clients_find_what_they_ask_for() {
    let server = start("qwen3").await;
    for path in ["/health", "/ping"] {
        assert_eq!(server.get(path).await, (200, String::new()), "{path}");
    }
    assert_eq!(server.post("/ping", json!({})).await.0, 200);
    let get = async |path: &str| {
        let (status, text) = server.get(path).await;
        assert_eq!(status, 200, "{path}: {text}");
        serde_json::from_str::<Value>(&text).expect("it is JSON")
    };
    assert_eq!(get("/version").await, json!({ "version": env!("CARGO_PKG_VERSION") }));
    assert_eq!(get("/load").await, json!({ "server_load": 0 }));
    assert_eq!(get("/v1/models/saffron").await["parent"], "base");
    for path in ["/server_info", "/get_server_info", "/model_info", "/get_model_info"] {
        assert_eq!(get(path).await["served_model_name"], "base", "{path}");
    }
    assert_eq!(server.get("/v1/models/nobody").await.0, 404);
    // Texts of any length are counted.
    for (text, count) in [("1", Some(600)), (" ", None), ("\u{4e2d}", None), ("password ", None)] {
        let text = text.repeat(600);
        let (status, answer) = server.post("/tokenize", json!({ "prompt": text })).await;
        let counted = answer["count"].as_u64();
        assert!(status == 200 && counted >= Some(600) && count.is_none_or(|count| counted == Some(count)), "{answer}");
        let messages = json!([{ "role": "user", "content": text }]);
        assert_eq!(server.post("/tokenize", json!({ "messages": messages })).await.0, 200);
        assert_eq!(server.complete(json!({ "prompt": text })).await.0, 400);
    }
    assert_eq!(text(&server.ask("base").await), " I do not know.");
}

/// Log-probabilities of a prompt are those of its tokens on two ranks as on one, whatever else runs, and in steps of
/// few rows.
#[tokio::test(flavor = "multi_thread")]
async fn ranks_report_a_prompt_as_one_does() {
    let prompt: Vec<u32> = (0..70).map(|token| token * 7 % 500).collect();
    let mut reports: Vec<Vec<f64>> = Vec::new();
    for arguments in
        [vec![], vec!["--tp", "2"], vec!["--tp", "2", "--max-num-seqs", "3", "--max-num-batched-tokens", "16"]]
    {
        let server = Server::start(&[&["--dtype", "float32"], &*arguments].concat()).await;
        let beside = json!({
            "prompt": QUESTION, "max_tokens": 40, "ignore_eos": true, "temperature": 2.0, "n": 2, "min_p": 0.1,
        });
        let ask = json!({ "prompt": prompt, "echo": true, "max_tokens": 0, "logprobs": 1 });
        let (beside, answer) = tokio::join!(server.complete(beside), server.complete(ask));
        assert_eq!((beside.0, answer.0), (200, 200), "{} {}", beside.1, answer.1);
        let logprobs = answer.1["choices"][0]["logprobs"]["token_logprobs"].as_array().expect("it is a list");
        assert!(logprobs.len() == 70 && logprobs[0].is_null());
        reports.push(logprobs[1..].iter().map(|value| value.as_f64().expect("it is a number")).collect());
        server.holds_nothing().await;
    }
    for report in &reports[1..] {
        assert!(report.iter().zip(&reports[0]).all(|(a, b)| (a - b).abs() < 1e-3), "{report:?} {:?}", reports[0]);
    }
}
