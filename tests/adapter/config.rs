//! `adapter_config.json`.

use aril::adapter::{Adapter, AdapterError};
use serde_json::{Value, json};

use crate::{CONFIG, load, refused};

/// What PEFT 0.21 writes for a plain adapter.
fn peft_0_21() -> Value {
    json!({
        "alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": null,
        "base_model_name_or_path": "Qwen/Qwen3-0.6B", "bias": "none", "corda_config": null,
        "ensure_weight_tying": false, "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false,
        "inference_mode": true, "init_lora_weights": true, "kasa_config": null, "layer_replication": null,
        "layers_pattern": null, "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 4, "lora_bias": false,
        "lora_dropout": 0.1, "lora_ga_config": null, "megatron_config": null, "megatron_core": "megatron.core",
        "modules_to_save": null, "monteclora_config": null, "peft_type": "LORA", "peft_version": "0.21.2",
        "qalora_group_size": 16, "r": 2, "rank_pattern": {}, "revision": null, "target_modules": ["q_proj"],
        "target_parameters": null, "task_type": "CAUSAL_LM", "trainable_token_indices": null, "use_bdlora": null,
        "use_dora": false, "use_qalora": false, "use_rslora": false, "velora_config": null,
    })
}

/// An adapter of one module `q_proj` of rank 2, with a field of PEFT's configuration set.
fn with(field: &str, value: Value) -> Result<Adapter, AdapterError> {
    let mut config = peft_0_21();
    config[field] = value;
    one_module(&config.to_string(), 2)
}

fn one_module(config: &str, rank: usize) -> Result<Adapter, AdapterError> {
    load(config, [("q_proj.lora_A.weight", &[rank, 8][..]), ("q_proj.lora_B.weight", &[8, rank])])
}

fn scaling(config: Value, rank: usize) -> f32 {
    one_module(&config.to_string(), rank).unwrap().modules()[0].scaling()
}

#[test]
fn what_peft_writes_is_accepted() {
    let adapter = one_module(&peft_0_21().to_string(), 2).unwrap();
    assert_eq!(adapter.modules()[0].scaling(), 2.0);
}

#[test]
fn only_lora_is_served() {
    assert!(with("peft_type", json!("lora")).is_ok());
    for other in [json!("ADALORA"), json!("LOHA"), json!("XLORA"), json!(null), json!(1)] {
        refused!(with("peft_type", other.clone()), UnsupportedField, "`peft_type`", other.to_string());
    }
    refused!(one_module(r#"{"lora_alpha": 4}"#, 2), MissingField, "`peft_type`");
}

#[test]
fn alpha_is_required() {
    refused!(one_module(r#"{"peft_type": "LORA", "r": 2}"#, 2), MissingField, "`lora_alpha`");
    for odd in [json!(null), json!("16"), json!(true), json!([16])] {
        refused!(with("lora_alpha", odd.clone()), InvalidField, "`lora_alpha`", odd.to_string());
    }
}

#[test]
fn alpha_may_be_a_float_or_zero() {
    assert_eq!(scaling(json!({"peft_type": "LORA", "lora_alpha": 24.5}), 8), 3.0625);
    assert_eq!(scaling(json!({"peft_type": "LORA", "lora_alpha": 0}), 8), 0.0);
}

#[test]
fn a_scaling_must_be_a_finite_number_that_does_not_vanish() {
    for alpha in [1e39, -1e300, 1e-44] {
        refused!(with("lora_alpha", json!(alpha)), Scaling, "`q_proj`", alpha.to_string(), "rank 2");
    }
    refused!(one_module(r#"{"peft_type": "LORA", "lora_alpha": 1e999}"#, 2), Json, "adapter_config.json");
}

#[test]
fn rank_stabilised_scaling() {
    assert_eq!(scaling(json!({"peft_type": "LORA", "lora_alpha": 6, "use_rslora": true}), 16), 1.5);
    assert_eq!(scaling(json!({"peft_type": "LORA", "lora_alpha": 3, "use_rslora": true}), 2), 2.1213203);
    refused!(with("use_rslora", json!("yes")), InvalidField, "`use_rslora`", "\"yes\"");
}

#[test]
fn the_rank_is_the_tensors() {
    // As PEFT's scaling with `rank_pattern`: the module's own rank divides.
    let config = json!({"peft_type": "LORA", "r": 64, "rank_pattern": {"q_proj": 32}, "lora_alpha": 16});
    assert_eq!(scaling(config, 4), 4.0);
}

/// The alphas are what Python finds with PEFT's `re.match(rf"(.*\.)?({key})$", path)`, keys in order.
#[test]
fn alpha_pattern_is_matched_as_in_peft() {
    const PATH: &str = "model.layers.10.self_attn.q_proj";
    #[rustfmt::skip]
    let cases = [
        // the whole path, or an end of it that begins after a dot
        (r#"{"q_proj": 7}"#, 7.0),
        (r#"{"self_attn.q_proj": 7}"#, 7.0),
        (r#"{"model.layers.10.self_attn.q_proj": 7}"#, 7.0),
        (r#"{"_proj": 7}"#, 1.0),
        (r#"{"proj": 7}"#, 1.0),
        (r#"{"self_attn": 7}"#, 1.0),
        (r#"{"0.self_attn.q_proj": 7}"#, 1.0),
        (r#"{"q_pro": 7}"#, 1.0),
        (r#"{"model": 7}"#, 1.0),
        // a dot is any character, unless escaped
        (r#"{"self.attn.q_proj": 7}"#, 7.0),
        (r#"{"self\\.attn\\.q_proj": 7}"#, 1.0),
        (r#"{"self_attn\\.q_proj": 7}"#, 7.0),
        // the first key that matches, in the order of the file
        (r#"{"q_proj": 7, "self_attn.q_proj": 8}"#, 7.0),
        (r#"{"self_attn.q_proj": 8, "q_proj": 7}"#, 8.0),
        (r#"{"zz": 9, "q_proj": 7, "aa": 5}"#, 7.0),
        (r#"{"b|q_proj": 6, "a|q_proj": 5}"#, 6.0),
        // regular expressions: alternatives, digits, look-around, back references
        (r#"{"(q|v)_proj": 7}"#, 7.0),
        (r#"{"v_proj|q_proj": 7}"#, 7.0),
        (r#"{"q_proj|x": 7}"#, 7.0),
        (r#"{"layers\\.(1\\d|2)\\..*": 7}"#, 7.0),
        (r#"{"layers\\.\\d\\..*": 7}"#, 1.0),
        (r#"{"layers\\.(?!10\\.)\\d+\\.self_attn\\.q_proj": 7}"#, 1.0),
        (r#"{"layers\\.(?!11\\.)\\d+\\.self_attn\\.q_proj": 7}"#, 7.0),
        (r#"{"(?<!v)_proj": 7}"#, 1.0),
        (r#"{".*(?<=q)_proj": 7}"#, 7.0),
        (r#"{"^model\\..*q_proj": 7}"#, 7.0),
        (r#"{"^q_proj": 7}"#, 1.0),
        (r#"{"q_proj$": 7}"#, 7.0),
        (r#"{".*": 7}"#, 7.0),
        (r#"{"": 7}"#, 1.0),
        (r#"{"(?P<letter>l)ayers.*self_at{2}n.*(?P=letter)?.*": 7}"#, 7.0),
    ];
    for (patterns, alpha) in cases {
        let config = format!(r#"{{"peft_type": "LORA", "lora_alpha": 1, "alpha_pattern": {patterns}}}"#);
        let keys = ["lora_A", "lora_B"].map(|factor| format!("base_model.model.{PATH}.{factor}.weight"));
        let adapter = load(&config, [(&*keys[0], &[1, 8][..]), (&*keys[1], &[8, 1])]).unwrap();
        assert_eq!(adapter.modules()[0].scaling(), alpha, "{patterns}");
    }
}

#[test]
fn broken_alpha_patterns() {
    refused!(with("alpha_pattern", json!({"q_proj": 1, "(q": 2})), Pattern, "`(q`");
    refused!(with("alpha_pattern", json!({"q_proj": "1"})), InvalidField, "`alpha_pattern.q_proj`", "\"1\"");
    refused!(with("alpha_pattern", json!(["q_proj"])), InvalidField, "`alpha_pattern`");
    refused!(with("alpha_pattern", json!({"q_proj": 1e39})), Scaling, "`q_proj`");
    assert!(with("alpha_pattern", json!(null)).is_ok());
}

#[test]
fn alpha_patterns_that_take_too_long() {
    const KEY: &str = "(?:(?:(?:(?:x(?=y)){0,99}){0,99}){0,99}){0,99}";
    refused!(with("alpha_pattern", json!({KEY: 2})), Pattern, format!("`{KEY}`"), "backtracking");
}

#[test]
fn what_switches_something_on() {
    for (field, value) in [
        ("bias", json!("all")),
        ("bias", json!("lora_only")),
        ("lora_bias", json!(true)),
        ("use_dora", json!(true)),
        ("modules_to_save", json!(["lm_head"])),
        ("trainable_token_indices", json!([0, 1])),
        ("trainable_token_indices", json!({"embed_tokens": [0]})),
        ("alora_invocation_tokens", json!([1, 2])),
        ("use_qalora", json!(true)),
        ("use_bdlora", json!({"nblocks": 2})),
        ("layer_replication", json!([[0, 4], [2, 5]])),
        ("init_lora_weights", json!("pissa")),
        ("init_lora_weights", json!("pissa_niter_16")),
        ("init_lora_weights", json!("olora")),
        ("init_lora_weights", json!("corda")),
        ("init_lora_weights", json!("loftq")),
        ("init_lora_weights", json!("lora_ga")),
        ("init_lora_weights", json!("mica")),
        ("arrow_config", json!({"top_k": 3})),
        ("kasa_config", json!({"beta": 1e-4})),
        ("lora_ga_config", json!({"direction": "ArB2r"})),
        ("monteclora_config", json!({"samples": 2})),
        ("velora_config", json!({"num_groups": 2})),
        ("ensure_weight_tying", json!(true)),
        ("a_field_of_tomorrow", json!(1)),
    ] {
        refused!(with(field, value.clone()), UnsupportedField, format!("`{field}`"), value.to_string());
    }
}

#[test]
fn what_switches_nothing_on() {
    for (field, value) in [
        ("init_lora_weights", json!(false)),
        ("init_lora_weights", json!("gaussian")),
        ("init_lora_weights", json!("eva")),
        ("init_lora_weights", json!("orthogonal")),
        ("modules_to_save", json!([])),
        ("target_modules", json!("all-linear")),
        ("target_modules", json!(r".*\.q_proj")),
        ("target_modules", json!(null)),
        ("target_parameters", json!(["mlp.experts.gate_up_proj"])),
        ("layers_to_transform", json!(3)),
        ("layers_to_transform", json!([1, 3])),
        ("exclude_modules", json!(["v_proj"])),
        ("fan_in_fan_out", json!(true)),
        ("base_model_name_or_path", json!("some/other-model")),
        ("eva_config", json!({"rho": 2.0})),
        ("a_field_of_tomorrow", json!(null)),
        ("a_field_of_tomorrow", json!(false)),
        ("a_field_of_tomorrow", json!("")),
        ("a_field_of_tomorrow", json!([])),
        ("a_field_of_tomorrow", json!({})),
    ] {
        assert!(with(field, value.clone()).is_ok(), "{field}: {value}");
    }
}

#[test]
fn what_is_not_json() {
    for text in ["", "{", "[]", "null", "{\"peft_type\": LORA}", &format!("{CONFIG}x")] {
        refused!(one_module(text, 2), Json, "adapter_config.json");
    }
}
