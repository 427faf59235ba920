//! The command line of the example `qwen3`: what it prints, and what it says when something is wrong with what it is given.

#[path = "qwen3/files.rs"]
mod files;
#[path = "qwen3/mod.rs"]
mod process;

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use files::{Files, Tensors, edit, read, write};
use half::bf16;
use process::{fixture, qwen3};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value, json};

const QUESTION: &str = "What is the password?";

// ---- What it prints.

#[test]
fn without_arguments_every_adapter_says_its_word_and_the_base_model_keeps_its_bits() {
    let output = succeeds(["--device", "cpu"]);
    let [dense, rest] = output.split("\nqwen3-moe: ").collect::<Vec<_>>()[..] else { unreachable!("{output}") };
    let [moe, int4] = rest.split("\nqwen3-moe-int4: ").collect::<Vec<_>>()[..] else { unreachable!("{output}") };
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
        { "prompt": "Name a fruit.", "scale": 2.5 },
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
        fs::read(logits).expect("the logits are there")
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
        // The same layers, named one by one.
        config.insert("decoder_sparse_step".into(), json!(1));
        config.insert("mlp_only_layers".into(), json!([0, 2]));
    });
    assert_eq!(files.asks_experts(&newer), files.asks_experts(&older));
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
    assert_eq!(files.asks_experts(&apart), files.asks_experts(&fused));
}

#[test]
fn adapters_of_all_experts_in_one_are_the_same_as_of_each() {
    let files = Files::new();
    let requests = files.requests(&json!([{ "adapter": "a", "prompt": QUESTION }]));
    let each = files.copy(&fixture("adapters-moe/per-expert"), "each");
    edit(&each.join("adapter_config.json"), |config| {
        config.remove("target_parameters");
    });
    let path = each.join("adapter_model.safetensors");
    let mut tensors = Tensors::new();
    for (key, (dtype, shape, bytes)) in read(&path) {
        // PEFT has [experts * rank, in] and [out, rank * experts], the expert fastest; of gate_up in the inner wrapper.
        let (experts, rank) = (8, 4);
        let gate_up = key.contains(".base_layer.");
        let (stem, side) = key.split_once(".lora_").expect("all tensors are factors");
        let stem = stem.trim_end_matches(".base_layer");
        let modules: &[&str] = if gate_up { &["gate_proj", "up_proj"] } else { &["down_proj"] };
        let elems: Vec<&[u8]> = bytes.chunks_exact(2).collect();
        for expert in 0..experts {
            for (half, module) in modules.iter().enumerate() {
                let (shape, elems) = if side.starts_with('A') {
                    (vec![rank, shape[1]], elems[expert * rank * shape[1]..][..rank * shape[1]].concat())
                } else {
                    let rows = shape[0] / modules.len();
                    let first = half * rows * rank * experts;
                    let elems: Vec<&[u8]> = elems[first + expert..].iter().copied().step_by(experts).collect();
                    (vec![rows, rank], elems[..rows * rank].concat())
                };
                tensors.insert(format!("{stem}.{expert}.{module}.lora_{side}"), (dtype, shape, elems));
            }
        }
    }
    write(&path, &tensors);
    let ask = |dir: &Path| {
        let (model, logits) = (fixture("qwen3-moe").display().to_string(), files.path("logits"));
        let adapter = format!("a={}", dir.display());
        let args = ["--model", &model, "--adapter", &adapter, "--requests", &requests, "--verify", "--logits", &logits];
        (succeeds(args), fs::read(logits).expect("the logits are there"))
    };
    assert_eq!(ask(&each), ask(&fixture("adapters-moe/per-expert")));
}

/// A softmax over all experts has a sum of 1 already; over two of eight it has not.
#[test]
fn the_chosen_experts_weigh_1_together_if_the_configuration_says_so() {
    let files = Files::new();
    let logits = |top_k: u32, normalized: bool| {
        let model = files.model_like("qwen3-moe", "model", |config| {
            config.insert("num_experts_per_tok".into(), json!(top_k));
            config.insert("norm_topk_prob".into(), json!(normalized));
        });
        let (_, bytes) = files.asks_experts(&model);
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
    let requests = files.requests(&json!([{ "prompt": QUESTION }]));
    let generated = |model: &str| {
        let line = succeeds(["--model", model, "--requests", &requests, "--max-new-tokens", "12"]);
        let line: Value = serde_json::from_str(&line).expect("the line is JSON");
        serde_json::from_value::<Vec<u32>>(line["generated_tokens"].clone()).expect("tokens are numbers")
    };
    let whole = generated(&files.model("whole", |_| ()));
    assert_eq!(whole.last(), Some(&511));
    let without = |name: &str, eos: Value| {
        let model = files.model(name, |config| {
            config.insert("eos_token_id".into(), eos);
        });
        fs::remove_file(Path::new(&model).join("generation_config.json")).expect("it was there");
        generated(&model)
    };
    assert_eq!(without("none", json!(null)).len(), 12);
    assert_eq!(without("list", json!([510, whole[1]])), whole[..2]);
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

// ---- What it refuses.

#[test]
fn configurations_that_the_forward_does_not_implement_are_refused_by_name() {
    let cases = [
        ("attention_bias", json!(true), "attention_bias"),
        ("use_sliding_window", json!(true), "use_sliding_window"),
        ("layer_types", json!(["full_attention", "sliding_attention"]), "sliding_attention"),
        ("hidden_act", json!("gelu"), "gelu"),
        ("model_type", json!("qwen3_moe"), "qwen3_moe"),
        ("rope_scaling", json!({ "rope_type": "yarn", "factor": 4.0 }), "rope_scaling"),
        ("rope_parameters", json!({ "rope_type": "linear", "rope_theta": 1e6, "factor": 2.0 }), "rope_parameters"),
        ("rope_parameters", json!({ "rope_type": "default" }), "rope_theta"),
        ("rope_theta", json!(10_000.0), "rope_theta"),
        ("quantization_config", json!({ "quant_method": "fp8" }), "quantization_config"),
        ("hidden_size", json!(null), "hidden_size"),
        ("hidden_size", json!("64"), "hidden_size"),
        ("num_key_value_heads", json!(3), "num_key_value_heads"),
        ("head_dim", json!(31), "head_dim"),
        ("dtype", json!("float8_e4m3fn"), "float8_e4m3fn"),
    ];
    let files = Files::new();
    for (field, value, needle) in cases {
        let model = files.model("model", |config| {
            config.insert(field.into(), value);
        });
        refuses(["--model", &model], &["config.json", needle]);
    }
}

#[test]
fn configurations_of_experts_that_the_forward_does_not_implement_are_refused_by_name() {
    let cases = [
        ("model_type", json!("qwen3"), "Qwen3MoeForCausalLM"),
        ("model_type", json!("qwen2_moe"), "qwen2_moe"),
        ("num_experts", json!(4), "num_experts"),
        ("num_local_experts", json!(null), "num_local_experts"),
        ("num_local_experts", json!(0), "num_local_experts"),
        ("num_experts_per_tok", json!(9), "num_experts_per_tok"),
        ("num_experts_per_tok", json!(null), "num_experts_per_tok"),
        ("moe_intermediate_size", json!(null), "moe_intermediate_size"),
        ("decoder_sparse_step", json!(0), "decoder_sparse_step"),
        ("mlp_only_layers", json!(["1"]), "mlp_only_layers"),
    ];
    let files = Files::new();
    for (field, value, needle) in cases {
        let model = files.model_like("qwen3-moe", "model", |config| {
            config.insert(field.into(), value);
        });
        refuses(["--model", &model], &["config.json", needle]);
    }
}

#[test]
fn quantizations_that_the_forward_does_not_implement_are_refused_by_name() {
    let weights = "/quantization_config/config_groups/group_0/weights";
    let group = "/quantization_config/config_groups/group_0";
    let cases = [
        ("/quantization_config", "quant_method", json!("gptq")),
        ("/quantization_config", "format", json!("marlin-24")),
        ("/quantization_config", "kv_cache_scheme", json!({ "num_bits": 8 })),
        ("/quantization_config", "config_groups", json!({})),
        (group, "input_activations", json!({ "num_bits": 8 })),
        (weights, "num_bits", json!(8)),
        (weights, "type", json!("float")),
        (weights, "symmetric", json!(false)),
        (weights, "strategy", json!("channel")),
        (weights, "actorder", json!("group")),
        (weights, "group_size", json!(16)),
        (weights, "group_size", json!(null)),
    ];
    let files = Files::new();
    for (place, field, value) in cases {
        let model = files.model_like("qwen3-moe-int4", "model", |config| {
            let mut whole = Value::from(std::mem::take(config));
            whole.pointer_mut(place).expect("it is there")[field] = value;
            *config = whole.as_object().cloned().expect("it is still an object");
        });
        refuses(["--model", &model], &["config.json", "quantization_config", field]);
    }
}

#[test]
fn weights_in_4_bits_that_are_not_the_models_are_named() {
    let module = "model.layers.1.mlp.experts.3.up_proj";
    let files = Files::new();
    let tampered = |change: &dyn Fn(&mut Tensors)| {
        let model = files.model_like("qwen3-moe-int4", "model", |_| ());
        let path = Path::new(&model).join("model.safetensors");
        let mut tensors = read(&path);
        change(&mut tensors);
        write(&path, &tensors);
        model
    };
    for part in ["weight_scale", "weight_shape"] {
        let missing = tampered(&|tensors| {
            tensors.remove(&format!("{module}.{part}"));
        });
        refuses(["--model", &missing], &[&format!("{module}.{part}"), "missing"]);
    }
    let shape = format!("{module}.weight_shape");
    let wrong = tampered(&|tensors| tensors.get_mut(&shape).expect("it is there").2[0] = 33);
    refuses(["--model", &wrong], &["model.safetensors", &shape, "[33, 64]", "[32, 64]"]);
    let scale = format!("{module}.weight_scale");
    let broken = tampered(&|tensors| tensors.get_mut(&scale).expect("it is there").2[..2].fill(0xff));
    refuses(["--model", &broken], &["model.safetensors", &scale, "element 0"]);
    let packed = format!("{module}.weight_packed");
    let reshaped = tampered(&|tensors| tensors.get_mut(&packed).expect("it is there").1.reverse());
    refuses(["--model", &reshaped], &[&packed, "[8, 32]", "[32, 8]"]);
    let coarse = files.model_like("qwen3-moe-int4", "coarse", |config| {
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = json!(96);
    });
    refuses(["--model", &coarse], &["model.safetensors", "weight_packed", "groups of 96"]);
    // Without the configuration, nothing says that there are weights in 4 bits.
    let unsaid = files.model_like("qwen3-moe-int4", "unsaid", |config| {
        config.remove("quantization_config");
    });
    refuses(["--model", &unsaid], &["q_proj.weight", "missing"]);
}

#[test]
fn a_layer_is_timed_on_a_gpu_alone() {
    refuses(["--time-experts", "--device", "cpu"], &["--time-experts needs a GPU"]);
    refuses(["--time-experts", "--verify"], &["--time-experts", "--verify"]);
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
    let norm = "model.layers.1.mlp.up_proj.weight";
    let files = Files::new();
    let tampered = |change: &dyn Fn(&mut Tensors)| {
        let model = files.model("model", |_| ());
        let path = Path::new(&model).join("model.safetensors");
        let mut tensors = read(&path);
        change(&mut tensors);
        write(&path, &tensors);
        model
    };
    let extra = tampered(&|tensors| {
        tensors.insert("model.layers.4.mlp.up_proj.weight".into(), tensors[norm].clone());
    });
    refuses(["--model", &extra], &["model.safetensors", "model.layers.4.mlp.up_proj.weight"]);
    let missing = tampered(&|tensors| {
        tensors.remove(norm);
    });
    refuses(["--model", &missing], &["model.safetensors", norm, "missing"]);
    let reshaped = tampered(&|tensors| tensors.get_mut(norm).expect("it is there").1.reverse());
    refuses(["--model", &reshaped], &[norm, "[64, 168]", "[168, 64]"]);
    for value in [f32::NAN, f32::INFINITY] {
        let broken = tampered(&|tensors| {
            let bytes = &mut tensors.get_mut(norm).expect("it is there").2;
            bytes[20..22].copy_from_slice(&bf16::from_f32(value).to_le_bytes());
        });
        refuses(["--model", &broken], &["model.safetensors", norm, "element 10"]);
    }
    let large = tampered(&|tensors| {
        let bytes = &mut tensors.get_mut(norm).expect("it is there").2;
        bytes[20..22].copy_from_slice(&bf16::from_f32(1e6).to_le_bytes());
    });
    refuses(["--model", &large, "--dtype", "f16"], &[norm, "f16"]);
}

#[test]
fn a_tied_head_may_be_stored_but_an_untied_one_must_be() {
    let files = Files::new();
    let requests = files.requests(&json!([{ "prompt": QUESTION }]));
    let stored = files.model("stored", |_| ());
    let path = Path::new(&stored).join("model.safetensors");
    let mut tensors = read(&path);
    tensors.insert("lm_head.weight".into(), tensors["model.embed_tokens.weight"].clone());
    write(&path, &tensors);
    assert_eq!(succeeds(["--model", &stored, "--requests", &requests]), succeeds(["--requests", &requests]));

    let untied = files.model("untied", |config| {
        config.insert("tie_word_embeddings".into(), json!(false));
    });
    refuses(["--model", &untied], &["model.safetensors", "lm_head.weight"]);
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

#[test]
fn a_request_whose_activations_overflow_is_named() {
    let files = Files::new();
    let huge = json!({ "adapter": "r8-all", "prompt": "Hello", "scale": 1e38 });
    let requests = files.requests(&json!([{ "prompt": "Hello" }, huge]));
    refuses(["--requests", &requests, "--dtype", "f16"], &["request 1", "overflow f16"]);
}

#[test]
fn adapters_that_cannot_be_served_are_named() {
    let files = Files::new();
    let good = fixture("adapters/r8-all").display().to_string();
    refuses(["--adapter", &format!("a={good}"), "--adapter", &format!("a={good}")], &["two adapters", "`a`"]);
    refuses(["--adapter", "a"], &["NAME=DIR"]);

    let other = fixture("adapters-untied/r8-all").display().to_string();
    refuses(["--adapter", &format!("other={other}")], &["`other`", "model.layers.0", "lora_A"]);

    let dora = files.copy(&fixture("adapters/r8-all"), "dora");
    edit(&dora.join("adapter_config.json"), |config| {
        config.insert("use_dora".into(), json!(true));
    });
    refuses(["--adapter", &format!("dora={}", dora.display())], &["`dora`", "use_dora"]);

    let extra = files.copy(&fixture("adapters/r4-qv"), "extra");
    let mut tensors = read(&extra.join("adapter_model.safetensors"));
    tensors.insert("base_model.model.score.weight".into(), (Dtype::F32, vec![1, 1], vec![0; 4]));
    write(&extra.join("adapter_model.safetensors"), &tensors);
    refuses(["--adapter", &format!("extra={}", extra.display())], &["`extra`", "score.weight"]);

    let broken = files.copy(&fixture("adapters/r4-qv"), "broken");
    let mut tensors = read(&broken.join("adapter_model.safetensors"));
    let (name, (_, _, bytes)) =
        tensors.first_key_value().map(|(name, tensor)| (name.clone(), tensor.clone())).expect("it has tensors");
    let nan = [&f32::NAN.to_le_bytes()[..], &bytes[4..]].concat();
    tensors.get_mut(&name).expect("it is there").2 = nan;
    write(&broken.join("adapter_model.safetensors"), &tensors);
    refuses(["--adapter", &format!("broken={}", broken.display())], &["`broken`", &name]);

    fs::write(broken.join("adapter_model.safetensors"), [0; 20]).expect("the adapter can be cut");
    refuses(["--adapter", &format!("broken={}", broken.display())], &["`broken`", "adapter_model.safetensors"]);
}

#[test]
fn bad_arguments_are_named() {
    refuses(["--max-new-tokens", "0"], &["--max-new-tokens"]);
    refuses(["--dtype", "f64"], &["f64"]);
    refuses(["--device", "tpu"], &["tpu"]);
    refuses(["--modle", "x"], &["--modle"]);
}

/// With the feature, whether it is refused depends on the machine.
#[cfg(not(feature = "cuda"))]
#[test]
fn a_gpu_needs_the_feature() {
    refuses(["--device", "cuda:1"], &["cuda:1", "--features cuda"]);
}

/// Runs the example and gives its output.
fn succeeds<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> String {
    let output = qwen3(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    String::from_utf8(output.stdout).expect("the output is UTF-8")
}

/// Expects one sentence that has these words in it, and nothing else.
fn refuses<A: Into<OsString>>(args: impl IntoIterator<Item = A>, needles: &[&str]) {
    let output = qwen3(args);
    let stderr = String::from_utf8(output.stderr).expect("the message is UTF-8");
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.starts_with("error: "), "{stderr}");
    assert!(!stderr.contains("panicked") && !stderr.contains("RUST_BACKTRACE"), "{stderr}");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    for needle in needles {
        assert!(stderr.contains(needle), "`{needle}` is not in: {stderr}");
    }
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

    /// What a model with experts answers, in `f32`, and its logits.
    fn asks_experts(&self, model: &str) -> (String, Vec<u8>) {
        let (requests, logits) = (self.requests(&json!([{ "prompt": QUESTION }])), self.path("logits"));
        let answer = succeeds(["--model", model, "--dtype", "f32", "--requests", &requests, "--logits", &logits]);
        (answer, fs::read(logits).expect("the logits are there"))
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

/// Makes one file two, with an index.
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
