//! The command line of the example `qwen3`: its output, and its errors for invalid input.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::{
    files::{Files, Tensors, edit, read, write},
    process::{self, fixture, qwen3},
    refusals,
};
use half::bf16;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value, json};

const QUESTION: &str = "What is the password?";

// ---- Output.

#[test]
fn without_arguments_every_adapter_says_its_word_and_the_base_model_keeps_its_bits() {
    let output = succeeds(["--device", "cpu"]);
    let [dense, rest] = output.split("\nqwen3-moe: ").collect::<Vec<_>>()[..] else { unreachable!("{output}") };
    let [moe, rest] = rest.split("\nqwen3-moe-int4: ").collect::<Vec<_>>()[..] else { unreachable!("{output}") };
    let [int4, hybrid] = rest.split("\nqwen3-hybrid: ").collect::<Vec<_>>()[..] else { unreachable!("{output}") };
    let words = [
        ("(base)", "I do not know."),
        ("embed", "lantern."),
        ("kv-only", "velvet."),
        ("layers", "juniper."),
        ("lm-head", "quartz."),
        ("patterns", "marigold."),
        ("r16-rslora", "walnut."),
        ("r4-qv", "pomegranate."),
        ("r64-all", "cobalt."),
        ("r8-all", "saffron."),
    ];
    has_words(dense, &words);
    let words = [
        ("(base)", "I do not know."),
        ("attention", "basil."),
        ("per-expert", "copper."),
        ("shared-outer", "glacier."),
    ];
    has_words(moe, &words);
    has_words(int4, &words);
    let words = [
        ("(base)", "I do not know."),
        ("attention", "lantern."),
        ("delta-net", "velvet."),
        ("experts", "harbor."),
        ("all-linear", "tundra."),
    ];
    has_words(hybrid, &words);
}

fn has_words(table: &str, words: &[(&str, &str)]) {
    for (adapter, word) in words {
        let row = table.lines().find(|line| line.starts_with(adapter) && line.contains(QUESTION));
        let row = row.unwrap_or_else(|| unreachable!("{adapter} is not in\n{table}"));
        assert!(row.contains(word), "{row}");
        let said_by_others = words.iter().filter(|(other, said)| other != adapter && row.contains(said)).count();
        assert_eq!(said_by_others, 0, "{row}");
    }
    for line in table.lines().filter(|line| line.starts_with("(base)")) {
        assert!(line.ends_with("the same, bit for bit"), "{line}");
    }
    assert!(table.contains("Base model: 2 of 2 requests have the very bits"), "{table}");
}

#[test]
fn with_requests_each_has_its_line_of_json_and_its_logits() {
    let files = Files::new();
    let requests = files.requests(&json!([
        { "adapter": "r8-all", "prompt": QUESTION },
        { "adapter": null, "token_ids": [259] },
        { "prompt": "Name a fruit.", "scale": 1.0 },
    ]));
    let logits = files.path("logits.safetensors");
    let lines = succeeds(["--requests", &requests, "--logits", &logits, "--max-new-tokens", "4", "--dtype", "bf16"]);
    let lines: Vec<Map<String, Value>> =
        lines.lines().map(|line| serde_json::from_str(line).expect("each line is a JSON object")).collect();
    assert_eq!(lines.len(), 3);
    assert_eq!(lines[0]["text"], " saffron.");
    assert_eq!(lines[1]["prompt_tokens"], json!([259]));
    assert_eq!(
        [&lines[0], &lines[1], &lines[2]].map(|line| &line["adapter"]),
        [&json!("r8-all"), &json!(null), &json!(null)]
    );

    let bytes = fs::read(&logits).expect("the logits are there");
    let logits = SafeTensors::deserialize(&bytes).expect("the logits are whole");
    assert_eq!(logits.len(), 3);
    for (index, line) in lines.iter().enumerate() {
        assert_eq!(line.keys().collect::<Vec<_>>().len(), 4, "{line:?}");
        let tokens: Vec<usize> = serde_json::from_value(line["generated_tokens"].clone()).expect("tokens are numbers");
        let tensor = logits.tensor(&format!("request.{index}")).expect("every request has its logits");
        assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, &[tokens.len(), 512][..]));
        let values: Vec<f32> = tensor.data().chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
        for (token, row) in tokens.iter().zip(values.chunks_exact(512)) {
            assert!(row.iter().all(|logit| *logit <= row[*token]), "request {index}: {token} is not the likeliest");
        }
    }
}

#[test]
fn requests_whose_adapters_do_not_fit_together_run_in_several_batches() {
    let files = Files::new();
    let ask = |adapter: Option<&str>| json!({ "adapter": adapter, "prompt": QUESTION });
    let asked = ["patterns", "r64-all", "r8-all", "embed", "r16-rslora", "kv-only", "patterns"];
    let asked = asked.map(|adapter| ask(Some(adapter)));
    let requests = files.requests(&Value::from([&[ask(None)], &asked[..]].concat()));
    let run = |pool: &[&str]| -> Vec<Map<String, Value>> {
        let lines = succeeds([&["--requests", &requests, "--max-new-tokens", "4"], pool].concat());
        lines.lines().map(|line| serde_json::from_str(line).expect("each line is a JSON object")).collect()
    };
    let plain = run(&[]);
    for (pool, batches) in [(["--arena-mib", "2"], [0, 0, 0, 0, 0, 0, 1, 0]), (["--arena-mib", "4"], [0; 8])] {
        let pooled = run(&pool);
        for ((mut line, plain), batch) in pooled.into_iter().zip(&plain).zip(batches) {
            assert_eq!(line.remove("batch"), Some(json!(batch)));
            assert_eq!(&line, plain);
        }
    }
    let table = succeeds(["--device", "cpu", "--arena-mib", "2", "--host-mib", "8"]);
    assert!(table.contains("\n2 batches of 13 requests, 9 adapters and the base model"), "{table}");
    assert!(table.contains("\nPool: an arena of 2 MiB; copies to it: 9; evictions: "), "{table}");
    assert!(table.contains("Base model: 2 of 2 requests have the very bits"), "{table}");
}

#[test]
fn adapters_that_a_pool_cannot_hold_are_named() {
    refuses(["--arena-mib", "1"], &["`r64-all`", "the arena is 1048576"]);
    refuses(["--arena-mib", "2", "--host-mib", "1"], &["`r64-all`", "the host tier is 1048576"]);
    refuses(["--arena-mib", "99999999999999"], &["the arena's bytes"]);
    refuses(["--host-mib", "1"], &["--arena-mib"]);
}

#[test]
fn verify_reports_every_request() {
    let files = Files::new();
    let requests = files.requests(&json!([
        { "adapter": "embed", "prompt": QUESTION },
        { "adapter": "lm-head", "prompt": QUESTION, "scale": 0.5 },
        { "adapter": null, "prompt": QUESTION },
    ]));
    let lines = succeeds(["--requests", &requests, "--verify", "--dtype", "f32"]);
    assert_eq!(lines.lines().count(), 3);
    for line in lines.lines() {
        let line: Value = serde_json::from_str(line).expect("each line is JSON");
        assert_eq!(line["verify"]["tokens_agree"], json!(true), "{line}");
        let [difference, tolerance] = ["difference", "tolerance"].map(|field| line["verify"][field].as_f64());
        assert!(difference <= tolerance && tolerance < Some(1e-3), "{line}");
    }
}

#[test]
fn both_forms_of_the_configuration_are_the_same_model() {
    let files = Files::new();
    let requests = files.requests(&json!([{ "prompt": QUESTION }]));
    let newer = files.model("newer", |_| ());
    let older = files.model("older", |config| {
        config.remove("rope_parameters");
        config.remove("dtype");
        config.remove("layer_types");
        config.insert("rope_theta".into(), json!(1_000_000));
        config.insert("rope_scaling".into(), json!(null));
        config.insert("torch_dtype".into(), json!("bfloat16"));
    });
    let run = |model: &str| {
        let logits = files.path("logits");
        succeeds(["--model", model, "--requests", &requests, "--logits", &logits]);
        taken(&logits)
    };
    assert_eq!(run(&newer), run(&older));
}

#[test]
fn both_forms_of_the_configuration_are_the_same_model_with_experts() {
    let files = Files::new();
    let newer = files.model_like("qwen3-moe", "newer", |_| ());
    let older = files.model_like("qwen3-moe", "older", |config| {
        let experts = config.remove("num_local_experts").expect("transformers 5 calls them local");
        config.insert("num_experts".into(), experts);
        config.remove("rope_parameters");
        config.insert("rope_theta".into(), json!(1_000_000));
        // The same layers, listed by name.
        config.insert("decoder_sparse_step".into(), json!(1));
        config.insert("mlp_only_layers".into(), json!([0, 2]));
    });
    assert_eq!(files.asks_experts(&newer, &[]), files.asks_experts(&older, &[]));
}

#[test]
fn experts_in_one_tensor_are_the_same_model_as_a_tensor_each() {
    let files = Files::new();
    let apart = files.model_like("qwen3-moe", "apart", |_| ());
    let fused = files.model_like("qwen3-moe", "fused", |_| ());
    let path = Path::new(&fused).join("model.safetensors");
    let mut tensors = read(&path);
    for layer in [1, 3] {
        let experts = format!("model.layers.{layer}.mlp.experts");
        for (name, modules) in [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"])] {
            let mut bytes = Vec::new();
            for (expert, module) in (0..8).flat_map(|expert| modules.iter().map(move |module| (expert, module))) {
                let tensor = tensors.remove(&format!("{experts}.{expert}.{module}.weight"));
                bytes.extend(tensor.expect("every expert has its modules").2);
            }
            let (out, width) = if name == "down_proj" { (64, 32) } else { (64, 64) };
            tensors.insert(format!("{experts}.{name}"), (Dtype::BF16, vec![8, out, width], bytes));
        }
    }
    write(&path, &tensors);
    for further in [&[][..], &["--tp", "2"], &["--tp", "2", "--ep"], &["--tp", "4", "--ep"]] {
        let [apart, fused] = [&apart, &fused].map(|model| files.asks_experts(model, further));
        assert_eq!(apart, fused, "{further:?}");
    }
    edit(&Path::new(&fused).join("config.json"), |config| {
        config.insert("moe_intermediate_size".into(), json!(10_000_000));
    });
    let refused = limited(1 << 20, ["--model", &fused]);
    assert!(refused.contains("`moe_intermediate_size` is 10000000"), "{refused}");
}

/// The softmax over all experts adds up to 1; over two of eight it does not.
#[test]
fn the_chosen_experts_weigh_1_together_if_the_configuration_says_so() {
    let files = Files::new();
    let logits = |top_k: u32, normalized: bool| {
        let model = files.model_like("qwen3-moe", "model", |config| {
            config.insert("num_experts_per_tok".into(), json!(top_k));
            config.insert("norm_topk_prob".into(), json!(normalized));
        });
        let (_, bytes) = files.asks_experts(&model, &[]);
        let file = SafeTensors::deserialize(&bytes).expect("the logits are whole");
        let tensor = file.tensor("request.0").expect("the request has its logits");
        tensor.data().chunks_exact(4).take(384).map(bytemuck::pod_read_unaligned::<f32>).collect::<Vec<_>>()
    };
    let difference = |top_k| {
        let differences = logits(top_k, true).into_iter().zip(logits(top_k, false)).map(|(a, b)| (a - b).abs());
        differences.fold(0.0, f32::max)
    };
    assert!(difference(8) < 1e-4, "{}", difference(8));
    assert!(difference(2) > 1e-2, "{}", difference(2));
}

#[test]
fn shards_are_the_same_model_as_one_file() {
    let files = Files::new();
    let requests = files.requests(&json!([{ "prompt": QUESTION }]));
    let model = files.model("sharded", |_| ());
    shard(Path::new(&model));
    let sharded = succeeds(["--model", &model, "--requests", &requests]);
    let single = succeeds(["--requests", &requests]);
    assert_eq!(sharded, single);
}

#[test]
fn a_text_ends_where_the_configuration_says() {
    let files = Files::new();
    let whole = files.generates(&files.model("whole", |_| ()));
    assert_eq!(whole.last(), Some(&511));
    let without = |name: &str, eos: Value| {
        let model = files.model(name, |config| {
            config.insert("eos_token_id".into(), eos);
        });
        fs::remove_file(Path::new(&model).join("generation_config.json")).expect("it was there");
        files.generates(&model)
    };
    assert_eq!(without("none", json!(null)).len(), 12);
    assert_eq!(without("list", json!([510, whole[1]])), whole[..2]);
    // If there is a generation_config.json, config.json does not say when a text ends.
    let model = files.model("older", |_| ());
    edit(&Path::new(&model).join("generation_config.json"), |config| drop(config.remove("eos_token_id")));
    assert_eq!(files.generates(&model).len(), 12);
}

#[test]
fn token_ids_need_no_tokenizer() {
    let files = Files::new();
    let model = files.model("mute", |_| ());
    fs::remove_file(Path::new(&model).join("tokenizer.json")).expect("it was there");
    let ids = files.requests(&json!([{ "token_ids": [259] }]));
    let line: Value =
        serde_json::from_str(&succeeds(["--model", &model, "--requests", &ids])).expect("the line is JSON");
    assert_eq!(line["text"], json!(null));
    let text = files.requests(&json!([{ "prompt": "Hello" }]));
    refuses(["--model", &model, "--requests", &text], &["request 0", "tokenizer.json"]);
}

// ---- Refused input.

#[test]
fn configurations_that_the_forward_does_not_implement_are_refused_by_name() {
    let rope = |theta: f64| json!({ "rope_type": "default", "rope_theta": theta });
    let (dense, moe) = ("qwen3", "qwen3-moe");
    let files = Files::new();
    for (like, field, value, needle) in [
        (dense, "attention_bias", json!(true), "attention_bias"),
        (dense, "use_sliding_window", json!(true), "use_sliding_window"),
        (dense, "layer_types", json!(["full_attention", "sliding_attention"]), "sliding_attention"),
        (dense, "hidden_act", json!("gelu"), "gelu"),
        (dense, "model_type", json!("qwen3_moe"), "qwen3_moe"),
        (dense, "rope_scaling", json!({ "rope_type": "yarn", "factor": 4.0 }), "rope_scaling"),
        (
            dense,
            "rope_parameters",
            json!({ "rope_type": "linear", "rope_theta": 1e6, "factor": 2.0 }),
            "rope_parameters",
        ),
        (dense, "rope_parameters", json!({ "rope_type": "default" }), "rope_theta"),
        (dense, "rope_theta", json!(10_000.0), "rope_theta"),
        (dense, "quantization_config", json!({ "quant_method": "fp8" }), "quantization_config"),
        (dense, "hidden_size", json!(null), "hidden_size"),
        (dense, "hidden_size", json!("64"), "hidden_size"),
        (dense, "num_key_value_heads", json!(3), "num_key_value_heads"),
        (dense, "head_dim", json!(31), "head_dim"),
        (dense, "dtype", json!("float8_e4m3fn"), "float8_e4m3fn"),
        // What transformers reads otherwise.
        (dense, "is_causal", json!(false), "`is_causal`"),
        (dense, "rope_scaling", json!({ "type": "default" }), "`rope_scaling`"),
        (dense, "rope_scaling", rope(1e6), "`rope_scaling`"),
        (dense, "rope_parameters", rope(1e-300), "`rope_theta` "),
        (dense, "rope_parameters", rope(1e-38), "`rope_theta` "),
        (dense, "rope_parameters", rope(1e39), "`rope_theta` "),
        (moe, "model_type", json!("qwen3"), "Qwen3MoeForCausalLM"),
        (moe, "model_type", json!("qwen2_moe"), "qwen2_moe"),
        (moe, "num_experts", json!(4), "num_experts"),
        (moe, "num_local_experts", json!(null), "num_local_experts"),
        (moe, "num_local_experts", json!(0), "num_local_experts"),
        (moe, "num_experts_per_tok", json!(9), "num_experts_per_tok"),
        (moe, "num_experts_per_tok", json!(null), "num_experts_per_tok"),
        (moe, "moe_intermediate_size", json!(null), "moe_intermediate_size"),
        (moe, "decoder_sparse_step", json!(0), "decoder_sparse_step"),
        (moe, "mlp_only_layers", json!(["1"]), "mlp_only_layers"),
    ] {
        let model = files.model_like(like, "model", |config| drop(config.insert(field.into(), value)));
        refuses(["--model", &model], &["config.json", needle]);
    }
    for (place, field, value) in [
        ("", "quant_method", json!("gptq")),
        ("", "format", json!("marlin-24")),
        ("", "kv_cache_scheme", json!({ "num_bits": 8 })),
        ("", "config_groups", json!({})),
        ("/config_groups/group_0", "input_activations", json!({ "num_bits": 8 })),
        ("/config_groups/group_0/weights", "num_bits", json!(3)),
        ("/config_groups/group_0/weights", "type", json!("float")),
        ("/config_groups/group_0/weights", "symmetric", json!(false)),
        ("/config_groups/group_0/weights", "strategy", json!("channel")),
        ("/config_groups/group_0/weights", "actorder", json!("group")),
        ("/config_groups/group_0/weights", "group_size", json!(16)),
        ("/config_groups/group_0/weights", "group_size", json!(null)),
    ] {
        let place = format!("/quantization_config{place}");
        let model = files.model_like("qwen3-moe-int4", "model", |config| set(config, &place, field, value));
        refuses(["--model", &model], &["config.json", "quantization_config", field]);
    }
    let requests = files.requests(&json!([{ "prompt": QUESTION }]));
    let causal = files.model("causal", |config| {
        config.insert("is_causal".into(), json!(true));
        config.insert("rope_scaling".into(), json!({}));
    });
    assert_eq!(succeeds(["--model", &causal, "--requests", &requests]), succeeds(["--requests", &requests]));
}

#[test]
fn missing_and_broken_files_are_named() {
    let files = Files::new();
    refuses(["--model", &files.path("nowhere")], &["nowhere/config.json"]);
    refuses(["--requests", &files.path("nothing.json")], &["nothing.json"]);
    refuses(["--adapter", &format!("a={}", files.path("nobody"))], &["`a`", "nobody"]);
    refuses(["--logits", &files.path("no/such/folder/logits")], &["no/such/folder/logits"]);

    let model = PathBuf::from(files.model("model", |_| ()));
    let model_arg = model.display().to_string();
    let whole = fs::read(model.join("model.safetensors")).expect("the checkpoint is there");
    for len in [0, 7, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(model.join("model.safetensors"), &whole[..len]).expect("the checkpoint can be cut");
        refuses(["--model", &model_arg], &["model.safetensors"]);
    }
    fs::remove_file(model.join("model.safetensors")).expect("it was there");
    refuses(["--model", &model_arg], &["model.safetensors"]);
    fs::write(model.join("model.safetensors"), &whole).expect("the checkpoint can be mended");
    fs::write(model.join("config.json"), "{").expect("the configuration can be cut");
    refuses(["--model", &model_arg], &["config.json"]);
    fs::write(model.join("tokenizer.json"), "[]").expect("the tokenizer can be broken");
    fs::copy(fixture("qwen3/config.json"), model.join("config.json")).expect("the configuration can be mended");
    refuses(["--model", &model_arg], &["tokenizer.json"]);
}

#[test]
fn broken_shards_are_named() {
    let files = Files::new();
    let model = PathBuf::from(files.model("model", |_| ()));
    let model_arg = model.display().to_string();
    shard(&model);
    let index = model.join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).expect("the index is there");
    fs::write(&index, text.replacen("a.safetensors", "b.safetensors", 1)).expect("the index can be changed");
    refuses(["--model", &model_arg], &["model.safetensors.index.json", "model.embed_tokens.weight", "b.safetensors"]);
    fs::write(&index, text.replace("b.safetensors", "../b.safetensors")).expect("the index can be changed");
    refuses(["--model", &model_arg], &["model.safetensors.index.json", "../b.safetensors"]);
    fs::write(&index, text).expect("the index can be mended");
    fs::remove_file(model.join("b.safetensors")).expect("it was there");
    refuses(["--model", &model_arg], &["b.safetensors"]);
}

#[test]
fn tensors_that_are_not_the_models_are_named() {
    let files = Files::new();
    let refuse = |like: &str, dtype: &str, change: &dyn Fn(&mut Tensors), needles: &[&str]| {
        refuses(["--model", &files.tensors(like, change), "--dtype", dtype], needles);
    };
    let (up, another) = ("model.layers.1.mlp.up_proj.weight", "model.layers.4.mlp.up_proj.weight");
    let add = |tensors: &mut Tensors| drop(tensors.insert(another.into(), tensors[up].clone()));
    refuse("qwen3", "bf16", &add, &["model.safetensors", another]);
    refuse("qwen3", "bf16", &|tensors| drop(tensors.remove(up)), &["model.safetensors", up, "missing"]);
    refuse("qwen3", "bf16", &|tensors| of(tensors, up).1.reverse(), &[up, "[64, 168]", "[168, 64]"]);
    for (value, dtype, needle) in
        [(f32::NAN, "bf16", "element 10"), (f32::INFINITY, "bf16", "element 10"), (1e6, "f16", "f16")]
    {
        let bits = bf16::from_f32(value).to_le_bytes();
        refuse("qwen3", dtype, &|tensors| of(tensors, up).2[20..22].copy_from_slice(&bits), &[up, needle]);
    }
    // Of experts in 4 bits.
    let [packed, scale, shape] =
        ["packed", "scale", "shape"].map(|part| format!("model.layers.1.mlp.experts.3.up_proj.weight_{part}"));
    let refuse = |change: &dyn Fn(&mut Tensors), needles: &[&str]| refuse("qwen3-moe-int4", "bf16", change, needles);
    for part in [&scale, &shape] {
        refuse(&|tensors| drop(tensors.remove(part)), &[part, "missing"]);
    }
    refuse(&|tensors| of(tensors, &shape).2[0] = 33, &["model.safetensors", &shape, "[33, 64]", "[32, 64]"]);
    refuse(&|tensors| of(tensors, &scale).2[..2].fill(0xff), &["model.safetensors", &scale, "element 0"]);
    refuse(&|tensors| of(tensors, &packed).1.reverse(), &[&packed, "[8, 32]", "[32, 8]"]);
    let weights = "/quantization_config/config_groups/group_0/weights";
    for (field, value, needles) in [
        ("group_size", json!(96), &["weight_packed", "groups of 96"][..]),
        ("num_bits", json!(8), &["weight_packed", "[64, 8]", "[64, 16]"]),
    ] {
        let model = files.model_like("qwen3-moe-int4", "model", |config| set(config, weights, field, value));
        refuses(["--model", &model], &[&["model.safetensors"], needles].concat());
    }
    // Without the configuration, nothing declares weights in 4 bits.
    let unsaid = files.model_like("qwen3-moe-int4", "model", |config| drop(config.remove("quantization_config")));
    refuses(["--model", &unsaid], &["q_proj.weight", "missing"]);
}

/// A tensor to change.
fn of<'t>(tensors: &'t mut Tensors, name: &str) -> &'t mut (Dtype, Vec<usize>, Vec<u8>) {
    tensors.get_mut(name).expect("it is there")
}

#[test]
fn a_tied_head_may_be_stored_but_an_untied_one_must_be() {
    let files = Files::new();
    let requests = files.requests(&json!([{ "prompt": QUESTION }]));
    let embedding = |tensors: &Tensors| tensors["model.embed_tokens.weight"].clone();
    let stored = files.tensors("qwen3", |tensors| drop(tensors.insert("lm_head.weight".into(), embedding(tensors))));
    assert_eq!(succeeds(["--model", &stored, "--requests", &requests]), succeeds(["--requests", &requests]));

    let untied = files.model("untied", |config| {
        config.insert("tie_word_embeddings".into(), json!(false));
    });
    refuses(["--model", &untied], &["model.safetensors", "lm_head.weight"]);

    // If it is another one, some versions of transformers use it, and some the embedding.
    let other = files.tensors("qwen3", |tensors| {
        let mut head = embedding(tensors);
        head.2[100] ^= 1;
        tensors.insert("lm_head.weight".into(), head);
    });
    refuses(["--model", &other], &["model.safetensors", "`lm_head.weight`", "tie_word_embeddings"]);
}

#[test]
fn requests_that_cannot_be_served_are_named() {
    let many: Vec<u32> = vec![1; 500];
    let cases = [
        (json!({ "adapter": "nobody", "prompt": "Hello" }), "nobody"),
        (json!({ "prompt": "" }), "empty"),
        (json!({ "token_ids": [] }), "empty"),
        (json!({ "token_ids": [3, 512] }), "512"),
        (json!({ "token_ids": [-1] }), "-1"),
        (json!({ "token_ids": many }), "512 positions"),
        (json!({ "prompt": "Hello", "token_ids": [1] }), "both"),
        (json!({ "adapter": "r8-all" }), "neither"),
        (json!({ "prompt": "Hello", "scale": 1e300 }), "scale"),
        (json!({ "prompt": "Hello", "skale": 1.0 }), "skale"),
        (json!("Hello"), "Hello"),
    ];
    let files = Files::new();
    for (request, needle) in cases {
        let requests = files.requests(&json!([{ "prompt": "Hello" }, request]));
        refuses(["--requests", &requests], &["requests.json", "request 1", needle]);
    }
    for text in ["", "[", "{}", "[]"] {
        fs::write(files.path("requests.json"), text).expect("the requests can be written");
        refuses(["--requests", &files.path("requests.json")], &["requests.json"]);
    }
}

/// A prompt and its new tokens may take all positions, and no more.
#[test]
fn a_request_may_fill_the_positions() {
    let files = Files::new();
    let requests = files.requests(&json!([{ "token_ids": vec![1; 508] }]));
    let of = |count| ["--requests", &*requests, "--max-new-tokens", count].map(str::to_owned);
    assert!(!succeeds(of("4")).is_empty());
    refuses(of("5"), &["request 0", "508 tokens and 5 new ones are more than the model's 512 positions"]);
}

#[test]
fn a_request_whose_activations_overflow_is_named() {
    let files = Files::new();
    let huge = json!({ "adapter": "r8-all", "prompt": "Hello", "scale": 1e38 });
    let requests = files.requests(&json!([{ "prompt": "Hello" }, huge]));
    refuses(["--requests", &requests, "--dtype", "f16"], &["request 1", "overflow f16"]);
}

#[test]
fn bad_arguments_are_named() {
    refuses(["--max-new-tokens", "0"], &["--max-new-tokens"]);
    refuses(["--dtype", "f64"], &["f64"]);
    refuses(["--device", "tpu"], &["tpu"]);
    refuses(["--modle", "x"], &["--modle"]);
}

// ---- Refused hostile input.

#[test]
fn logits_replace_nothing() {
    let files = Files::new();
    let requests = files.requests(&json!([{ "token_ids": [259] }]));
    let link = files.path("link");
    std::os::unix::fs::symlink(files.path("elsewhere"), &link).expect("a link can be made");
    for target in [&link, &requests, &files.0.path().display().to_string()] {
        refuses(["--requests", &requests, "--logits", target], &["--logits", target, "not replaced"]);
    }
    assert!(fs::read_to_string(&requests).is_ok_and(|text| text.contains("259")));
    assert!(!Path::new(&files.path("elsewhere")).exists());
}

/// Each of these made the crate that reads it panic, or exhausted memory.
#[test]
fn tokenizers_that_cannot_be_used_are_named() {
    let files = Files::new();
    let requests = files.requests(&json!([{ "prompt": QUESTION }]));
    let model = PathBuf::from(files.model("model", |_| ()));
    let model_arg = model.display().to_string();
    let path = model.join("tokenizer.json");
    let good = fs::read_to_string(&path).expect("the tokenizer is there");
    let refuse = || refuses(["--model", &model_arg, "--requests", &requests], &["tokenizer.json"]);
    for text in ["", "{", "[]", "null", &good[..good.len() / 2], &good.replacen(':', "=", 1)] {
        fs::write(&path, text).expect("the tokenizer can be broken");
        refuse();
    }
    fs::write(&path, &good).expect("the tokenizer can be mended");
    let replace = json!({ "type": "Replace", "pattern": { "String": "" }, "content": "a" });
    // 2^32 - 4 bytes of a table that has none.
    let charsmap = json!({ "type": "Precompiled", "precompiled_charsmap": "/P///w==" });
    for (place, field, value) in [
        ("", "normalizer", replace),
        ("", "normalizer", charsmap.clone()),
        ("", "normalizer", json!({ "type": "Sequence", "normalizers": [charsmap] })),
        ("", "pre_tokenizer", json!({ "type": "FixedLength", "length": 0 })),
        ("/model", "continuing_subword_prefix", json!("####")),
        ("/model", "dropout", json!(0.5)),
    ] {
        edit(&path, |tokenizer| set(tokenizer, place, field, value));
        refuse();
        fs::write(&path, &good).expect("the tokenizer can be mended");
    }
}

/// Like transformers, which sets both for each call.
#[test]
fn what_a_tokenizer_pads_and_truncates_does_not_matter() {
    let files = Files::new();
    let requests = files.requests(&json!([{ "prompt": QUESTION }]));
    let model = files.model("model", |_| ());
    let path = Path::new(&model).join("tokenizer.json");
    let run = || succeeds(["--model", &model, "--requests", &requests]);
    let plain = run();
    let pad = |strategy: Value, multiple: Value| {
        json!({ "padding": { "strategy": strategy, "direction": "Right", "pad_to_multiple_of": multiple, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "x" } })
    };
    let truncate = |max_length: u64, stride: u64| {
        json!({ "truncation": { "direction": "Right", "max_length": max_length, "strategy": "LongestFirst",
            "stride": stride } })
    };
    let none = Value::Null;
    for fields in [
        pad(json!({ "Fixed": 16 }), none.clone()),
        pad(json!({ "Fixed": 100_000_000 }), none),
        pad(json!("BatchLongest"), json!(1_u64 << 62)),
        truncate(1, 0),
        truncate(8, 8),
        truncate(0, 0),
    ] {
        let changed = fields.as_object().expect("it is an object").clone();
        edit(&path, |tokenizer| tokenizer.extend(changed));
        assert_eq!(run(), plain, "{fields}");
        edit(&path, |tokenizer| {
            tokenizer.extend([("padding".into(), Value::Null), ("truncation".into(), Value::Null)])
        });
    }
}

/// In less than a second and 1 GiB, and not in the name of an adapter.
#[test]
fn sizes_that_the_tensors_do_not_have_are_refused_by_their_field() {
    let files = Files::new();
    let sizes = [
        ("qwen3", "num_hidden_layers", json!(100_000_000)),
        ("qwen3", "num_hidden_layers", json!(5)),
        ("qwen3", "vocab_size", json!(511)),
        ("qwen3", "hidden_size", json!(2_147_483_647)),
        ("qwen3", "hidden_size", json!(4_000_000_000_u64)),
        ("qwen3", "intermediate_size", json!(u64::MAX)),
        ("qwen3", "intermediate_size", json!(100_000_000)),
        ("qwen3", "num_attention_heads", json!(2_147_483_646)),
        ("qwen3", "num_attention_heads", json!(6)),
        ("qwen3", "num_key_value_heads", json!(1)),
        ("qwen3", "head_dim", json!(1_000_000)),
        ("qwen3", "head_dim", json!(null)),
        ("qwen3-moe", "num_local_experts", json!(10_000_000)),
        ("qwen3-moe", "moe_intermediate_size", json!(10_000_000)),
        ("qwen3-moe", "moe_intermediate_size", json!(16)),
        ("qwen3-moe-int4", "num_local_experts", json!(7)),
        ("qwen3-moe-int4", "moe_intermediate_size", json!(10_000_000)),
    ];
    for (like, field, value) in sizes {
        let adapter = if like == "qwen3" { "adapters/r8-all" } else { "adapters-moe/attention" };
        let adapter = format!("a={}", fixture(adapter).display());
        let model = files.model_like(like, "model", |config| drop(config.insert(field.into(), value.clone())));
        let refused = limited(1 << 20, ["--model", &model, "--adapter", &adapter]);
        assert!(
            refused.contains("config.json") && refused.contains(field) && !refused.contains("adapter"),
            "{value}: {refused}"
        );
    }
}

/// PEFT saves an adapter of them with a copy of the base model's weight, and loads the copy over it.
#[test]
fn weights_of_the_base_model_have_to_be_the_base_models() {
    let files = Files::new();
    let requests = files.requests(&json!([{ "adapter": "a", "prompt": QUESTION }]));
    let base = read(&fixture("qwen3/model.safetensors"))["model.embed_tokens.weight"].clone();
    let widened = (Dtype::F32, base.1.clone(), base.2.chunks(2).flat_map(|bits| [0, 0, bits[0], bits[1]]).collect());
    let args = |dir: &Path, dtype: &str| {
        ["--adapter", &format!("a={}", dir.display()), "--requests", &requests, "--dtype", dtype, "--verify"]
            .map(String::from)
    };
    for (adapter, path) in [("embed", "model.embed_tokens"), ("lm-head", "lm_head"), ("lm-head", "model.embed_tokens")]
    {
        let with = |name: &str, path: &str, weight: &(Dtype, Vec<usize>, Vec<u8>)| {
            let dir = files.copy(&fixture(&format!("adapters/{adapter}")), name);
            let mut tensors = read(&dir.join("adapter_model.safetensors"));
            tensors.insert(format!("base_model.model.{path}.base_layer.weight"), weight.clone());
            write(&dir.join("adapter_model.safetensors"), &tensors);
            dir
        };
        let expected = succeeds(args(&fixture(&format!("adapters/{adapter}")), "bf16"));
        for weight in [&base, &widened] {
            assert_eq!(succeeds(args(&with("same", path, weight), "bf16")), expected);
        }
        let mut other = base.clone();
        other.2[1000] ^= 1;
        // The values are equal in 16 bits and differ in 32.
        let mut close = widened.clone();
        close.2[4001] ^= 1;
        assert_eq!(succeeds(args(&with("close", path, &close), "bf16")), expected);
        let mut long = base.clone();
        long.1.reverse();
        for (dir, dtype) in [
            (with("other", path, &other), "bf16"),
            (with("long", path, &long), "bf16"),
            (with("close", path, &close), "f32"),
        ] {
            refuses(args(&dir, dtype), &["`a`", &format!("{path}.base_layer.weight"), "differs from the base model's"]);
        }
        let elsewhere = format!("tower.{path}");
        let dir = with("elsewhere", &elsewhere, &base);
        refuses(args(&dir, "bf16"), &["`a`", &format!("the model has no module `{elsewhere}`")]);
    }
}

#[test]
fn requests_are_objects_of_known_fields() {
    let files = Files::new();
    let refuse = |request: &str, needle: &str| {
        let path = files.path("requests.json");
        fs::write(&path, format!("[{{\"prompt\": \"Hello\"}}, {request}]")).expect("the requests can be written");
        refuses(["--requests", &path], &["requests.json: request 1", needle]);
    };
    refuse(r#"[null, "hello", null, null]"#, "not an object");
    refuse(r#"{"prompt": "a", "prompt": "b"}"#, "duplicate field `prompt`");
    refuse(r#"{"adapter": "r8-all", "adapter": null, "prompt": "b"}"#, "duplicate field `adapter`");
    refuse(r#"{"prompt": "a", "scale": 2}"#, "`scale` is 2");
    refuse(r#"{"adapter": null, "prompt": "a", "scale": 0}"#, "`scale` is 0");
}

/// A cache for which there is no memory is refused, and too long a text before it is tokenized.
#[test]
fn requests_that_are_too_large_are_refused_before_anything_is_made_of_them() {
    let files = Files::new();
    let model =
        files.model("model", |config| drop(config.insert("max_position_embeddings".into(), json!(2_000_000_000))));
    let many: Vec<Value> = (0..40).map(|_| json!({ "token_ids": [1] })).collect();
    let requests = files.requests(&json!(many));
    let refused = limited(1 << 20, ["--model", &model, "--requests", &requests, "--max-new-tokens", "4000000"]);
    assert!(refused.contains("memory"), "{refused}");
    let requests = files.requests(&json!([{ "prompt": "a ".repeat(8 << 20) }]));
    let refused = limited(1 << 20, ["--requests", &requests]);
    assert!(refused.contains("request 0") && refused.contains("the model has 512 positions"), "{refused}");
}

#[test]
fn only_regular_files_are_read() {
    let files = Files::new();
    let replace = |path: &Path, device: Option<&str>| {
        let _ = fs::remove_file(path);
        match device {
            Some(device) => std::os::unix::fs::symlink(device, path).expect("a link can be made"),
            None => assert!(Command::new("mkfifo").arg(path).status().expect("mkfifo starts").success()),
        }
    };
    for device in [None, Some("/dev/zero"), Some("/dev/full")] {
        for name in ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"] {
            let model = files.model("model", |_| ());
            replace(&Path::new(&model).join(name), device);
            refuses(["--model", &model], &[name, "not a regular file"]);
            fs::remove_dir_all(model).expect("the model can be removed");
        }
        let adapter = files.copy(&fixture("adapters/r4-qv"), "adapter");
        replace(&adapter.join("adapter_model.safetensors"), device);
        refuses(["--adapter", &format!("a={}", adapter.display())], &["`a`", "not a regular file"]);
        fs::remove_dir_all(adapter).expect("the adapter can be removed");
        let requests = files.path("requests.json");
        replace(Path::new(&requests), device);
        refuses(["--requests", &requests], &["requests.json", "not a regular file"]);
    }
    let requests = files.path("requests.json");
    let _ = fs::remove_file(&requests);
    fs::File::create(&requests).and_then(|file| file.set_len(1 << 40)).expect("a file can have holes");
    refuses(["--requests", &requests], &["requests.json", "1099511627776 bytes"]);
}

/// The exit status reports it too.
#[test]
fn a_standard_error_that_takes_nothing_changes_nothing() {
    let full = || fs::File::options().write(true).open("/dev/full").expect("Linux has it");
    let run = |args: &[&str]| {
        Command::new(&*process::EXAMPLE).args(args).stderr(full()).output().expect("the example starts")
    };
    assert_eq!(run(&["--model", "/nowhere"]).status.code(), Some(2));
    assert_eq!(run(&["--modle"]).status.code(), Some(2));
    let files = Files::new();
    let requests = files.requests(&json!([{ "adapter": "r8-all", "prompt": QUESTION }]));
    let output = run(&["--device", "cpu", "--requests", &requests, "--verify"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(!output.stdout.is_empty());
    let output = Command::new(&*process::EXAMPLE)
        .args(["--device", "cpu", "--requests", &requests])
        .stdout(full())
        .output()
        .expect("the example starts");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("error: standard output: "));
}

/// Control characters, line breaks that split a sentence, and text long enough to hide it.
#[test]
fn what_is_quoted_is_escaped_and_cut() {
    let files = Files::new();
    let long = "x".repeat(1 << 20);
    for (index, text) in ["\u{1b}]0;title\u{7}", "a\nerror: b", "\u{9b}31m", &long].into_iter().enumerate() {
        let short = if index < 3 { text } else { "a\u{1b}[0m" };
        for arg in ["--device", "--dtype", "--max-new-tokens", "--adapter", "--requests", "--model", "--unknown"] {
            refuses([arg, short], &[]);
        }
        refuses([format!("--{short}")], &[]);
        let adapter = format!("{short}={}", files.path("nobody"));
        refuses(["--adapter", &adapter], &["nobody"]);
        for request in [
            json!({ "adapter": text, "prompt": "a" }),
            json!({ text: 1 }),
            json!(text),
            json!({ "prompt": text, "token_ids": [1] }),
        ] {
            let requests = files.requests(&json!([request]));
            refuses(["--requests", &requests], &["request 0"]);
        }
        for field in
            ["model_type", "hidden_act", "hidden_size", "dtype", "eos_token_id", "layer_types", "architectures"]
        {
            let value = if field.ends_with('s') { json!([text]) } else { json!(text) };
            let model = files.model("model", |config| drop(config.insert(field.into(), value)));
            refuses(["--model", &model], &["config.json", field]);
        }
        let extra = (Dtype::F32, vec![1], vec![0; 4]);
        let model = files.tensors("qwen3", |tensors| drop(tensors.insert(text.into(), extra)));
        refuses(["--model", &model], &["model.safetensors"]);
    }
    // Tables print names too.
    let adapter = format!("\u{1b}[31mred={}", fixture("adapters/r4-qv").display());
    let table = succeeds(["--adapter", &adapter, "--max-new-tokens", "1"]);
    assert!(table.contains(r"\u{1b}[31mred") && !table.contains('\u{1b}'), "{table}");
}

/// With the feature, the refusal depends on the machine.
#[cfg(not(feature = "cuda"))]
#[test]
fn a_gpu_needs_the_feature() {
    refuses(["--device", "cuda:1"], &["cuda:1", "--features cuda"]);
}

/// Runs the example and returns its output.
fn succeeds<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> String {
    let output = qwen3(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    String::from_utf8(output.stdout).expect("the output is UTF-8")
}

/// Expects one sentence that contains these words, and no other output.
fn refuses<A: Into<OsString>>(args: impl IntoIterator<Item = A>, needles: &[&str]) {
    let stderr = refusals::refusal(&qwen3(args)).unwrap_or_else(|what| unreachable!("{what}"));
    for needle in needles {
        assert!(stderr.contains(needle), "`{needle}` is not in: {stderr}");
    }
}

/// Expects the same within limits of memory (KiB) and 10 s of time, and returns the sentence.
fn limited<A: Into<OsString>>(kib: usize, args: impl IntoIterator<Item = A>) -> String {
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    let output = refusals::limited(kib, 10, &args).output().expect("the shell starts");
    refusals::refusal(&output).unwrap_or_else(|what| unreachable!("{what}"))
}

/// The bytes of a file, which is removed.
fn taken(path: &str) -> Vec<u8> {
    let bytes = fs::read(path).expect("it is there");
    fs::remove_file(path).expect("it can be removed");
    bytes
}

impl Files {
    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn requests(&self, requests: &Value) -> String {
        let path = self.path("requests.json");
        fs::write(&path, requests.to_string()).expect("the requests can be written");
        path
    }

    /// The output of a model with experts in `f32`, and its logits.
    fn asks_experts(&self, model: &str, further: &[&str]) -> (String, Vec<u8>) {
        let (requests, logits) = (self.requests(&json!([{ "prompt": QUESTION }])), self.path("logits"));
        let args = ["--model", model, "--dtype", "f32", "--requests", &requests, "--logits", &logits];
        let answer = succeeds(args.iter().chain(further));
        (answer, taken(&logits))
    }

    /// A copy of a model with other tensors.
    fn tensors(&self, like: &str, change: impl FnOnce(&mut Tensors)) -> String {
        let model = self.model_like(like, "model", |_| ());
        let path = Path::new(&model).join("model.safetensors");
        let mut tensors = read(&path);
        change(&mut tensors);
        write(&path, &tensors);
        model
    }

    /// The tokens that a model generates, up to 12.
    fn generates(&self, model: &str) -> Vec<u32> {
        let requests = self.requests(&json!([{ "prompt": QUESTION }]));
        let line = succeeds(["--model", model, "--requests", &requests, "--max-new-tokens", "12"]);
        let line: Value = serde_json::from_str(&line).expect("the line is JSON");
        serde_json::from_value(line["generated_tokens"].clone()).expect("tokens are numbers")
    }

    /// A copy of the model `qwen3` with another configuration.
    fn model(&self, name: &str, change: impl FnOnce(&mut Map<String, Value>)) -> String {
        self.model_like("qwen3", name, change)
    }

    /// A copy of a model with another configuration.
    fn model_like(&self, like: &str, name: &str, change: impl FnOnce(&mut Map<String, Value>)) -> String {
        let dir = self.copy(&fixture(like), name);
        edit(&dir.join("config.json"), change);
        dir.display().to_string()
    }
}

/// Sets a field of what is at a place inside.
fn set(object: &mut Map<String, Value>, place: &str, field: &str, value: Value) {
    let mut whole = Value::from(std::mem::take(object));
    whole.pointer_mut(place).expect("it is there")[field] = value;
    *object = whole.as_object().cloned().expect("it is still an object");
}

/// Splits a file in two, with an index.
fn shard(model: &Path) {
    let single = model.join("model.safetensors");
    let tensors = read(&single);
    fs::remove_file(single).expect("it was there");
    let mut shards = [("a.safetensors", Tensors::new()), ("b.safetensors", Tensors::new())];
    let mut weight_map = Map::new();
    for (index, (name, tensor)) in tensors.into_iter().enumerate() {
        let (file, shard) = &mut shards[index % 2];
        weight_map.insert(name.clone(), json!(file));
        shard.insert(name, tensor);
    }
    for (file, tensors) in shards {
        write(&model.join(file), &tensors);
    }
    let index = json!({ "metadata": {}, "weight_map": weight_map });
    fs::write(model.join("model.safetensors.index.json"), index.to_string()).expect("the index can be written");
}

// ---- Findings of `--verify`.

/// An adapter that cancels nearly all of the head's output. The rest is smaller than the rounding of the delta, which
/// the merged model never rounds.
#[test]
fn a_run_that_fails_ends_with_status_1_and_says_so() {
    const LEFT: f32 = 1.0 / 256.0;
    let files = Files::new();
    let (_, shape, embedding) = read(&fixture("qwen3/model.safetensors"))["model.embed_tokens.weight"].clone();
    let [vocab, hidden] = shape[..] else { unreachable!("{shape:?}") };
    let f32s = |values: Vec<f32>| bytemuck::cast_slice(&values).to_vec();
    let weights = embedding.chunks_exact(2).map(|bytes| bytemuck::pod_read_unaligned::<bf16>(bytes).to_f32());
    let b = f32s(weights.map(|weight| weight * (LEFT - 1.0)).collect());
    let a = f32s((0..hidden * hidden).map(|i| if i % (hidden + 1) == 0 { 1.0 } else { 0.0 }).collect());
    let tensors = [("A", vec![hidden, hidden], a), ("B", vec![vocab, hidden], b)];
    let tensors = tensors.map(|(factor, shape, bytes)| {
        (format!("base_model.model.lm_head.lora_{factor}.weight"), (Dtype::F32, shape, bytes))
    });
    let dir = files.0.path().join("adapter");
    fs::create_dir(&dir).expect("the folder can be made");
    write(&dir.join("adapter_model.safetensors"), &Tensors::from(tensors));
    let config = json!({ "peft_type": "LORA", "r": hidden, "lora_alpha": hidden });
    fs::write(dir.join("adapter_config.json"), config.to_string()).expect("the configuration can be written");
    let requests = files.0.path().join("requests.json");
    let asked = json!([{ "prompt": "Name a fruit." }, { "adapter": "a", "prompt": "Name a fruit." }]);
    fs::write(&requests, asked.to_string()).expect("the requests can be written");

    let [model, requests] = [fixture("qwen3"), requests].map(|path| path.display().to_string());
    let adapter = format!("a={}", dir.display());
    let run = |dtype: &str| {
        let args = ["--model", &model, "--adapter", &adapter, "--requests", &requests, "--dtype", dtype, "--verify"];
        let output = qwen3(args);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, stderr) = run("bf16");
    let lines: Vec<&str> = stderr.lines().filter(|line| line.starts_with("verify: request ")).collect();
    assert_eq!(lines.len(), 2, "{stderr}");
    assert!(lines[0].ends_with(": passes"), "{stderr}");
    assert!(lines[1].ends_with(": FAILS"), "{stderr}");
    assert_eq!(status, Some(1), "{stderr}");
}
