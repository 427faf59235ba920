//! The keys of tensors.

use aril::{
    DType,
    adapter::{Adapter, AdapterError, BaseWeight, ModuleKind},
    model::{Linear, ModelSpec, Parallel, TpRank},
};

use crate::{CONFIG, common::adapters::tensor, load, ones, refused};

const Q: &str = "model.layers.0.self_attn.q_proj";

#[test]
fn spellings_of_a_module() {
    let factors = ["", ".weight", ".default.weight", ".my-adapter.weight"];
    let plain = [
        "base_model.model.model.layers.0.self_attn.q_proj",
        "base_model.model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.q_proj",
        "module.base_model.model.model.layers.0.self_attn.q_proj",
        "_orig_mod.base_model.model.model.layers.0.self_attn.q_proj",
        "base_model.model._orig_mod.model.layers.0.self_attn.q_proj",
        "base_model.model.model.layers.0._fsdp_wrapped_module.self_attn.q_proj",
        "base_model.model.model.layers.0._checkpoint_wrapped_module._orig_mod.self_attn.q_proj",
    ];
    for path in plain {
        for end in factors {
            let keys = ["A", "B"].map(|factor| format!("{path}.lora_{factor}{end}"));
            let adapter = load(CONFIG, [(&*keys[0], &[2, 8][..]), (&*keys[1], &[8, 2])]).unwrap();
            assert_eq!(adapter.modules().len(), 1, "{path}{end}");
            let module = &adapter.modules()[0];
            assert_eq!(module.path().trim_start_matches("model."), Q.trim_start_matches("model."), "{path}{end}");
            assert_eq!((module.kind(), module.rank()), (ModuleKind::Linear, 2));
            assert_eq!((module.in_features(), module.out_features()), (8, 8));
        }
    }
    for end in ["", ".default", ".weight"] {
        let keys = ["A", "B"].map(|factor| format!("base_model.model.model.embed_tokens.lora_embedding_{factor}{end}"));
        let adapter = load(CONFIG, [(&*keys[0], &[2, 20][..]), (&*keys[1], &[8, 2])]).unwrap();
        assert_eq!(adapter.modules()[0].path(), "model.embed_tokens");
        assert_eq!(adapter.modules()[0].kind(), ModuleKind::Embedding);
    }
}

#[test]
fn modules_are_sorted_and_know_their_weights() {
    let tensors = [
        ("b.lora_A.weight", tensor(DType::F16, &[1, 3], &[1.0, 2.0, 3.0])),
        ("a.lora_B.weight", tensor(DType::F32, &[2, 2], &[0.1, 0.2, 0.3, 0.4])),
        ("b.lora_B.weight", tensor(DType::BF16, &[2, 1], &[-1.0, -2.0])),
        ("a.lora_A.weight", ones(&[2, 1])),
    ];
    let adapter = Adapter::from_tensors(CONFIG, tensors.map(|(key, tensor)| (key.to_owned(), tensor))).unwrap();
    assert_eq!(adapter.modules().iter().map(aril::adapter::Module::path).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(adapter.modules()[0].b_f32(), [0.1, 0.2, 0.3, 0.4]);
    assert_eq!(adapter.modules()[1].a_f32(), [1.0, 2.0, 3.0]);
    assert_eq!(adapter.modules()[1].b_f32(), [-1.0, -2.0]);
    assert_eq!(adapter.max_rank(), 2);
}

/// An adapter of q_proj with another tensor of this key.
fn with(key: &str) -> Result<Adapter, AdapterError> {
    let keys = ["A", "B"].map(|factor| format!("base_model.model.{Q}.lora_{factor}.weight"));
    load(CONFIG, [(&*keys[0], &[2, 8][..]), (&*keys[1], &[8, 2]), (key, &[8, 2])])
}

#[test]
fn base_weights_of_embeddings_have_to_be_compared() {
    let mut spec = ModelSpec::new();
    spec.linear(Linear::new("", Parallel::Replicated, 8).slice(Q, 8)).unwrap();
    spec.linear(Linear::new("", Parallel::Replicated, 8).slice("lm_head", 8)).unwrap();
    spec.embedding("model.embed_tokens", 8, 8).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    for (key, path, in_model) in [
        ("base_model.model.model.embed_tokens.base_layer.weight", "model.embed_tokens", "model.embed_tokens"),
        ("base_model.model.lm_head.base_layer.weight", "lm_head", "lm_head"),
        ("lm_head.base_layer.weight", "lm_head", "lm_head"),
        // With `save_embedding_layers`, and in other wrappers.
        ("base_model.model.model.embed_tokens.weight", "model.embed_tokens", "model.embed_tokens"),
        ("base_model.model.lm_head.weight", "lm_head", "lm_head"),
        ("embed_tokens.weight", "embed_tokens", "model.embed_tokens"),
        (
            "model.language_model.embed_tokens.base_layer.weight",
            "model.language_model.embed_tokens",
            "model.embed_tokens",
        ),
        ("base_model.model.language_model.lm_head.weight", "language_model.lm_head", "lm_head"),
    ] {
        let mut adapter = with(key).unwrap();
        assert_eq!(adapter.modules().len(), 1, "{key}");
        let [weight] = adapter.base_weights() else { unreachable!("{key} is the only one") };
        assert_eq!((weight.path(), weight.tensor().shape()), (path, &[8, 2][..]));
        assert_eq!(weight.path_in(&model).unwrap(), in_model);
        refused!(adapter.plan(&model, DType::F32).map(drop), BaseWeight, format!("`{key}`"), "compare_base_weights");
        let other = adapter.compare_base_weights(|_| Ok::<_, AdapterError>(false));
        refused!(other, OtherBase, format!("`{key}`"), "differs from the base model's");
        assert!(adapter.plan(&model, DType::F32).is_err());
        let same = |weight: &BaseWeight| Ok::<_, AdapterError>(weight.tensor().to_f32() == [1.0; 16]);
        adapter.compare_base_weights(same).unwrap();
        assert!(adapter.base_weights().is_empty() && adapter.plan(&model, DType::F32).is_ok());
    }
    for key in [
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
        "base_model.model.not_lm_head.base_layer.weight",
        "base_model.model.lm_head.base_layer.bias",
        "base_model.model.lm_head.base_layer.weight.absmax",
    ] {
        assert!(with(key).unwrap_err().to_string().contains(key));
    }
}

#[test]
fn unsupported_tensors() {
    for (key, what) in [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight", "DoRA"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight", "DoRA"),
        ("base_model.model.model.layers.0.self_attn.q_proj.weight_m_wdecomp.weight", "DoRA"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_E", "AdaLoRA"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_E.default", "AdaLoRA"),
        ("base_model.model.model.layers.0.self_attn.q_proj.ranknum.default", "AdaLoRA"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "bias"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.bias", "bias"),
        ("base_model.model.model.layers.0.self_attn.q_proj.bias", "bias"),
        ("base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias", "bias"),
        ("base_model.model.score.weight", "whole weight"),
        ("base_model.model.classifier.weight", "whole weight"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "modules_to_save"),
        ("base_model.model.lm_head.modules_to_save.weight", "modules_to_save"),
        ("base_model.model.lm_head.original_module.weight", "modules_to_save"),
        ("base_model.model.model.embed_tokens.token_adapter.base_layer.weight", "trainable_token_indices"),
        ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_original", "trainable_token_indices"),
        ("base_model.model.model.embed_tokens.trainable_tokens_delta", "trainable_token_indices"),
        ("input_embeddings", "added tokens"),
        ("output_embeddings", "added tokens"),
    ] {
        refused!(with(key), UnsupportedTensor, format!("`{key}`"), what);
    }
}

#[test]
fn unknown_tensors() {
    for key in [
        "",
        "weight",
        "lora_A.weight",
        ".lora_A.weight",
        "base_model.model.lora_A.weight",
        "base_model.model..lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.a.b.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight.absmax",
        "base_model.model.model.layers.0.self_attn.q_proj.not_lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A2.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_a.weight",
        "base_model.model.model.norm.weight",
        "model.layers.0.self_attention.adapter_layer.lora_kqv_adapter.linear_in.weight",
    ] {
        refused!(with(key), UnknownTensor, format!("`{key}`"));
    }
}

#[test]
fn each_factor_once() {
    let second = format!("{Q}.lora_A.weight");
    refused!(with(&second), Duplicate, format!("`{second}`"), format!("`base_model.model.{second}`"));
}

#[test]
fn a_pair_is_of_one_adapter_and_kind() {
    let load =
        |pairs: &[[String; 2]]| load(CONFIG, pairs.iter().flat_map(|[a, b]| [(&**a, &[2, 8][..]), (&**b, &[8, 2])]));
    let [a, b] = ["lora_A.weight", "lora_embedding_B"].map(|factor| format!("{Q}.{factor}"));
    refused!(load(&[[a.clone(), b.clone()]]), Unpaired, format!("`{a}`"), format!("`{b}`"));
    // Also where each module has the factors of one adapter.
    let pair = |module: &str, [a, b]: [&str; 2]| [format!("{module}.lora_A{a}"), format!("{module}.lora_B{b}")];
    let [none, first, second] = [".weight", ".first.weight", ".second.weight"];
    for (q, v) in [([first, second], [first; 2]), ([none, second], [none; 2]), ([first; 2], [second; 2])] {
        let pairs = [pair("q", q), pair("v", v)];
        let [first, other] = [&pairs[0][0], if q[0] == q[1] { &pairs[1][0] } else { &pairs[0][1] }];
        refused!(load(&pairs), Adapters, format!("`{other}` and `{first}`"), "different adapters");
    }
    assert!(load(&[pair("q", [first; 2]), pair("v", [first; 2])]).is_ok());
    let embedding = ["embed.lora_embedding_A.weight", "embed.lora_embedding_B"].map(str::to_owned);
    assert!(load(&[pair("q", [none; 2]), embedding]).is_ok());
}

#[test]
fn both_factors_are_needed() {
    refused!(load(CONFIG, [("q.lora_A.weight", &[2, 8][..])]), MissingFactor, "`q.lora_A.weight`", "no matching B");
    refused!(load(CONFIG, [("q.lora_B.weight", &[2, 8][..])]), MissingFactor, "`q.lora_B.weight`", "no matching A");
}

#[test]
fn factors_are_matrices_of_one_rank() {
    let pair = |a: &[usize], b: &[usize]| load(CONFIG, [("q.lora_A.weight", a), ("q.lora_B.weight", b)]);
    refused!(pair(&[2, 8, 1], &[8, 2]), NotMatrix, "`q.lora_A.weight`", "[2, 8, 1]");
    refused!(pair(&[2, 8], &[16]), NotMatrix, "`q.lora_B.weight`", "[16]");
    refused!(pair(&[0], &[0]), Ungathered, "`q.lora_A.weight`", "ZeRO-3");
    refused!(pair(&[2, 8], &[0]), Ungathered, "`q.lora_B.weight`", "ZeRO-3");
    refused!(pair(&[2, 8], &[8, 3]), RankMismatch, "`q.lora_A.weight`", "[2, 8]", "[8, 3]");
    refused!(pair(&[8, 2], &[8, 2]), RankMismatch, "`q.lora_A.weight`", "[8, 2]");
    refused!(pair(&[0, 8], &[8, 0]), Rank, "`q.lora_A.weight`", "rank 0", "512");
    refused!(pair(&[513, 8], &[8, 513]), Rank, "`q.lora_A.weight`", "rank 513", "512");
    assert!(pair(&[512, 8], &[8, 512]).is_ok());
}

#[test]
fn nothing_is_not_an_adapter() {
    refused!(load(CONFIG, []), Empty, "no factors");
    refused!(load(CONFIG, [("lm_head.base_layer.weight", &[8, 8][..])]), Empty, "no factors");
}

#[test]
fn tensors_have_as_many_bytes_as_their_shape() {
    use aril::adapter::Tensor;
    refused!(Tensor::new(DType::BF16, [2, 3], vec![0; 11]), Bytes, "11 bytes", "[2, 3]", "bf16");
    refused!(Tensor::new(DType::F32, [usize::MAX, 2], vec![0; 8]), Bytes, "8 bytes");
    let tensor = Tensor::new(DType::F32, [1, 2], vec![0; 8]).unwrap();
    assert_eq!((tensor.dtype(), tensor.shape(), tensor.bytes().len()), (DType::F32, &[1, 2][..], 8));
}

#[test]
fn paths_are_the_models() {
    let mut spec = ModelSpec::new();
    for (parent, slice) in [("model.layers.0.self_attn", "q_proj"), ("", "lm_head")] {
        spec.linear(Linear::new(parent, Parallel::Replicated, 8).slice(slice, 8)).unwrap();
    }
    let model = spec.shard(TpRank::SINGLE).unwrap();
    for (spelled, path) in [(Q, Q), ("layers.0.self_attn.q_proj", Q), ("model.unembed_tokens", "lm_head")] {
        let keys = ["A", "B"].map(|factor| format!("{spelled}.lora_{factor}.weight"));
        let adapter = load(CONFIG, [(&*keys[0], &[2, 8][..]), (&*keys[1], &[8, 2])]).unwrap();
        assert_eq!(adapter.modules()[0].path_in(&model).unwrap(), path);
    }
    let nowhere = load(CONFIG, [("v.lora_A.weight", &[2, 8][..]), ("v.lora_B.weight", &[8, 2])]).unwrap();
    refused!(nowhere.modules()[0].path_in(&model), NoPlace, "`v`");
}

#[test]
fn keys_are_printable_ascii() {
    for key in
        ["q_proj\n.lora_A.weight", "q proj.lora_A.weight", "q_pr\u{f6}j.lora_A.weight", "\u{1b}[31m.lora_A.weight"]
    {
        let text = with(key).unwrap_err().to_string();
        assert!(
            text.contains("is not a known tensor of a LoRA adapter") && !text.contains(char::is_control),
            "{text:?}"
        );
    }
}

/// Whatever names and values an adapter has, an error is one short line without control characters.
#[test]
fn errors_are_short_lines() {
    let long = "x".repeat(100 << 10);
    let hostile = ["\u{1b}]0;title\u{7}", "two\nlines", "\u{202e}backwards", &long];
    let show = |error: AdapterError| {
        let text = error.to_string();
        assert!(text.len() < 1000 && !text.contains(|char: char| char.is_control() || char == '\u{202e}'), "{text:?}");
    };
    for text in hostile {
        let config = |field: &str, value: serde_json::Value| {
            let mut config = serde_json::json!({"peft_type": "LORA", "lora_alpha": 1});
            config[field] = value;
            config.to_string()
        };
        let q = [("q.lora_A.weight", &[2, 8][..]), ("q.lora_B.weight", &[8, 2])];
        for (field, value) in [
            (text, serde_json::json!(1)),
            ("peft_type", text.into()),
            ("lora_alpha", text.into()),
            ("use_rslora", text.into()),
            ("tomorrow", serde_json::json!({text: [text]})),
            ("alpha_pattern", serde_json::json!({text: text})),
            ("alpha_pattern", serde_json::json!({format!("({text}"): 1})),
            ("target_modules", text.into()),
            ("layers_pattern", text.into()),
        ] {
            show(load(&config(field, value), q).unwrap_err());
        }
        show(load(text, q).unwrap_err());
        show(load(&format!("{{\"peft_type\": {text:?}"), q).unwrap_err());
        show(with(text).unwrap_err());
        show(with(&format!("{text}.lora_A.weight")).unwrap_err());
        let shard = serde_json::json!({"weight_map": {"q.lora_A.weight": format!("{text}/x")}}).to_string();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("adapter_config.json"), CONFIG).unwrap();
        std::fs::write(dir.path().join("adapter_model.safetensors.index.json"), shard).unwrap();
        show(Adapter::open(dir.path()).unwrap_err());
    }
    let many = vec![1; 100_000];
    show(load(CONFIG, [("q.lora_A.weight", &many[..]), ("q.lora_B.weight", &[8, 2])]).unwrap_err());
}
