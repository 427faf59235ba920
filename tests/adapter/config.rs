//! `adapter_config.json`.

use std::time::{Duration, Instant};

use aril::{
    DType,
    adapter::{Adapter, AdapterError},
};
use serde_json::{Value, json};

use crate::{CONFIG, common::adapters::tensor, load, refused};

/// More than a second's work takes on a busy machine, without optimization.
const PATIENCE: Duration = Duration::from_secs(if cfg!(debug_assertions) { 30 } else { 2 });

/// The configuration of a plain adapter, written by PEFT 0.21.
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

/// PEFT's scaling with `rank_pattern` divides by the module's own rank.
#[test]
fn the_rank_is_the_tensors() {
    for fields in ["", r#", "r": 4"#, r#", "r": 64, "rank_pattern": {"v_proj": 2, "q_proj": 4, "(q)_proj": 8}"#] {
        let config = format!(r#"{{"peft_type": "LORA", "lora_alpha": 16{fields}}}"#);
        assert_eq!(one_module(&config, 4).unwrap().modules()[0].scaling(), 4.0);
    }
}

/// PEFT refuses tensors of another shape than its own.
#[test]
fn ranks_are_those_of_the_configuration() {
    refused!(with("r", json!(4)), RankField, "`q_proj.lora_A.weight` has rank 2", "`r`", "requires 4");
    refused!(
        with("rank_pattern", json!({"q_proj": 3})),
        RankField,
        "`q_proj.lora_A.weight`",
        "`rank_pattern`",
        "requires 3"
    );
    for odd in [json!(0), json!(-2), json!(2.0), json!("2"), json!(null), json!(true)] {
        refused!(with("r", odd.clone()), InvalidField, "`r`", odd.to_string(), "a positive integer");
        let pattern = json!({"v_proj": odd});
        refused!(with("rank_pattern", pattern), InvalidField, "`rank_pattern.v_proj`", odd.to_string());
    }
}

/// The alphas that Python finds with PEFT's `re.match(rf"(.*\.)?({key})$", path)`, trying keys in order.
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
    refused!(with("alpha_pattern", json!({KEY: 2})), Pattern, format!("`{KEY}`"));
    let config = |key: &str| json!({"peft_type": "LORA", "lora_alpha": 1, "alpha_pattern": {key: 2}}).to_string();
    let paths = [format!("{}.lora_A.weight", "m".repeat(30)), format!("{}.lora_B.weight", "m".repeat(30))];
    let result = load(&config("(?=m)(.?){9}(.?){9}xN"), [(&*paths[0], &[2, 8][..]), (&*paths[1], &[8, 2])]);
    refused!(result, Pattern, "(.?){9}", "alpha_pattern");
}

/// The limit is on all patterns and all modules together, even if each pattern is small.
#[test]
fn all_patterns_have_a_budget() {
    let start = Instant::now();
    let fields = |fields: [(&str, Value); 2]| {
        let mut config = json!({"peft_type": "LORA", "lora_alpha": 1});
        config.as_object_mut().unwrap().extend(fields.map(|(field, value)| (field.to_owned(), value)));
        config.to_string()
    };
    let keys = |prefix: &str, count: usize| {
        Value::from((0..count).map(|i| (format!("{prefix}N{i}"), json!(2))).collect::<serde_json::Map<_, _>>())
    };
    let none = || json!({});
    let many: Vec<String> = (0..2000).map(|i| format!("model.layers.{i}.self_attn.q_proj")).collect();
    let one = ["q_proj".to_owned()];
    let load = |paths: &[String], config: &str| {
        let keys: Vec<_> =
            paths.iter().flat_map(|path| ["A", "B"].map(|side| format!("{path}.lora_{side}.weight"))).collect();
        let shapes: [&[usize]; 2] = [&[2, 1], &[1, 2]];
        load(config, keys.iter().map(String::as_str).zip(shapes.into_iter().cycle()))
    };
    for (alphas, ranks) in [
        (keys(r"\w{90}", 400), none()),
        (keys("(?=m)(.?){9}(.?){9}x", 200), none()),
        (keys(r"\w", 40), keys(r"\w", 40)),
    ] {
        let config = fields([("alpha_pattern", alphas), ("rank_pattern", ranks)]);
        refused!(load(&one, &config), Regexes, "regular expressions", "64");
    }
    // Few patterns, but too many for this number of modules.
    for key in [r"\w{90}\w{90}", "(?=m).*(.*)[xz]"] {
        let config = fields([("alpha_pattern", keys(key, 30)), ("rank_pattern", keys(key, 30))]);
        refused!(load(&many, &config), Patterns, "60 patterns", "2000 modules");
    }
    // One pattern of the largest size, in whichever field, and long paths.
    let long: Vec<_> = many.iter().map(|path| format!("{path}{}", "q".repeat(120))).collect();
    let large = r"\w{900}";
    for (field, value) in [
        ("target_modules", json!(large)),
        ("exclude_modules", json!(large)),
        ("alpha_pattern", keys(large, 1)),
        ("rank_pattern", keys(large, 1)),
    ] {
        let config = fields([(field, value), ("r", json!(2))]);
        refused!(load(&long, &config), Patterns, "1 patterns", "2000 modules");
    }
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
    // Plain paths are cheap: some of PEFT's configurations have one for each module.
    let paths = |value: usize| {
        Value::from(many.iter().map(|path| (path.clone(), value.into())).collect::<serde_json::Map<_, _>>())
    };
    let config = fields([("alpha_pattern", paths(3)), ("rank_pattern", paths(2))]);
    assert!(load(&many, &config).unwrap().modules().iter().all(|module| module.scaling() == 1.5));
}

/// Modules of all experts of Qwen3-30B-A3B.
fn all_experts() -> Vec<String> {
    let experts =
        (0..48).flat_map(|layer| (0..128).map(move |expert| format!("model.layers.{layer}.mlp.experts.{expert}")));
    let attention = (0..48).flat_map(|layer| {
        ["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| format!("model.layers.{layer}.self_attn.{name}"))
    });
    experts
        .flat_map(|path| ["gate_proj", "up_proj", "down_proj"].map(|name| format!("{path}.{name}")))
        .chain(attention)
        .collect()
}

/// Patterns of trainers on as many modules as real adapters have, in the time that a load may take for them.
#[test]
fn patterns_of_many_modules_are_quick() {
    let paths = all_experts();
    assert_eq!(paths.len(), 18_624);
    let tensors: Vec<_> = paths
        .iter()
        .flat_map(|path| ["A", "B"].map(|side| (format!("base_model.model.{path}.lora_{side}.weight"), [1, 1])))
        .collect();
    let seconds = |fields: Value| {
        let mut config = json!({"peft_type": "LORA", "lora_alpha": 2, "r": 1});
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let start = Instant::now();
        let adapter = load(&config.to_string(), tensors.iter().map(|(key, shape)| (&**key, &shape[..])));
        (adapter.unwrap(), start.elapsed())
    };
    let (_, without) = seconds(json!({}));
    let each = |value: Value| {
        Value::from(paths.iter().map(|path| (path.clone(), value.clone())).collect::<serde_json::Map<_, _>>())
    };
    let each_regex =
        |value: Value| json!({r".*\.experts\.\d+\.(?!x)\w+_proj": value, r"self_attn\.[qkvo]_proj": value});
    for fields in [
        json!({"target_modules": r"^(model(?=\.).*\.(experts\.\d+\.\w+|q_proj|k_proj|v_proj|o_proj))$"}),
        json!({"target_modules": r"^(?!.*(?:visual|vision|aligner).*).*(?:\w+_proj).*"}),
        json!({"target_modules": r"^(?:(?!.*visual).*\.)?(?:gate_proj|up_proj|down_proj|[qkvo]_proj)$"}),
        json!({"target_modules": r".*_proj", "exclude_modules": r".*(?<!_)lm_head"}),
        json!({"rank_pattern": each(json!(1)), "alpha_pattern": each(json!(4))}),
        json!({"rank_pattern": each_regex(json!(1)), "alpha_pattern": each_regex(json!(4))}),
    ] {
        let (adapter, took) = seconds(fields.clone());
        assert_eq!(adapter.modules().len(), paths.len());
        let alpha = if fields.get("alpha_pattern").is_some() { 4.0 } else { 2.0 };
        assert!(adapter.modules().iter().all(|module| module.scaling() == alpha));
        // Seconds of a busy machine, without optimization.
        assert!(
            took < without + Duration::from_secs(5),
            "{took:?}, and {without:?} without: {}",
            fields["target_modules"]
        );
    }
}

/// No field of a configuration buys much time.
#[test]
fn a_field_takes_no_long_time() {
    let many = |what: &str, count: usize| what.repeat(count);
    let nested = format!("{}q_proj{}", many("(", 100_000), many(")", 100_000));
    let names: String = (0..20_000).map(|index| format!("(?P<n{index}>a)")).collect();
    let back: String = format!("{}{}", many("(a)", 20_000), many("\\1", 20_000));
    let layers: Vec<String> = (0..200_000).map(|index| format!("n{index}")).collect();
    let keys =
        |text: &str| Value::from((0..60).map(|i| (format!("{text}N{i}"), json!(2))).collect::<serde_json::Map<_, _>>());
    // Each key has wildcards at other places, so that each is looked for apart.
    let forms: serde_json::Map<_, _> = (0..50_000)
        .map(|index| ((0..16).map(|bit| if index >> bit & 1 == 1 { '.' } else { 'x' }).collect::<String>(), json!(2)))
        .collect();
    for (field, value) in [
        ("target_modules", json!(nested)),
        ("target_modules", json!(many("(?:", 50_000))),
        ("target_modules", json!(names)),
        ("target_modules", json!(back)),
        ("target_modules", json!(many("[a-z]", 12_000))),
        ("exclude_modules", json!(many("a{1,99}", 9_000))),
        ("alpha_pattern", keys(&many("(a|b)?", 150))),
        ("alpha_pattern", keys("(?=q)((.*)*)*x")),
        ("alpha_pattern", forms.into()),
        ("layers_pattern", json!(layers)),
    ] {
        let start = Instant::now();
        let mut config = peft_0_21();
        config[field] = value;
        if field == "layers_pattern" {
            config["layers_to_transform"] = json!([1]);
        }
        // Most are refused.
        let paths: Vec<_> = (0..500).map(|index| format!("model.layers.1.m{index}.q_proj")).collect();
        let tensors = paths
            .iter()
            .flat_map(|path| [(format!("{path}.lora_A.weight"), [2, 1]), (format!("{path}.lora_B.weight"), [1, 2])]);
        let tensors: Vec<_> = tensors.collect();
        let text: String = config[field].to_string().chars().take(40).collect();
        let _ = load(&config.to_string(), tensors.iter().map(|(key, shape)| (&**key, &shape[..])));
        assert!(start.elapsed() < PATIENCE, "{field}: {text}: {:?}", start.elapsed());
    }
}

/// The first key that matches wins, whether it is plain, has wildcards or is a regular expression.
#[test]
fn the_first_key_wins() {
    const PATH: &str = "model.layers.1.q_proj";
    for (keys, alpha) in [
        (vec!["q_proj", "q_proj."], 0.0),
        (vec!["v_proj", "layers.1.q_proj", "q_proj"], 1.0),
        (vec!["q_proj", "layers.1.q_proj"], 0.0),
        (vec!["q.proj", "q_proj"], 0.0),
        (vec!["q..roj", "q_proj"], 0.0),
        (vec!["^q_proj", "q_proj"], 1.0),
        (vec!["^model.layers.1.q_proj", "q_proj"], 0.0),
        (vec![r"layers\..\.q_proj", "q_proj"], 0.0),
        (vec![r"layers\.1\.q\.proj", "q_proj"], 1.0),
        (vec!["[qk]_proj", "q_proj"], 0.0),
        (vec!["v_proj", "q_proj", "[qk]_proj"], 1.0),
        (vec!["(?=v)v_proj", "[qk]_proj", "q_proj"], 1.0),
        (vec!["_proj", "yers.1.q_proj", "v_proj"], 9.0),
    ] {
        let patterns: Vec<_> = keys.iter().enumerate().map(|(place, key)| format!("{}: {place}", json!(key))).collect();
        let patterns = patterns.join(", ");
        let config = format!(r#"{{"peft_type": "LORA", "lora_alpha": 9, "alpha_pattern": {{{patterns}}}}}"#);
        let tensors = ["A", "B"].map(|side| format!("{PATH}.lora_{side}.weight"));
        let adapter = load(&config, [(&*tensors[0], &[1, 8][..]), (&*tensors[1], &[8, 1])]).unwrap();
        assert_eq!(adapter.modules()[0].scaling(), alpha, "{keys:?}");
    }
}

/// One reading of the layers' numbers has to select all modules.
#[test]
fn layers_are_read_in_one_way() {
    let load = |layers: &[u64], version: Value, paths: [&str; 2]| {
        let config = json!({
            "peft_type": "LORA", "lora_alpha": 1, "target_modules": ["up_proj", "q_proj", "model.layers.5.k_proj"],
            "layers_to_transform": layers, "peft_version": version,
        });
        let tensors = paths.iter().flat_map(|path| ["A", "B"].map(|side| format!("{path}.lora_{side}.weight")));
        let tensors: Vec<_> = tensors.collect();
        let shapes = [[1, 8], [8, 1]];
        let shapes = shapes.iter().map(|shape| &shape[..]).cycle();
        crate::load(&config.to_string(), tensors.iter().map(String::as_str).zip(shapes))
    };
    let [first, last] = ["model.layers.2.mlp.experts.0.up_proj", "model.layers.0.mlp.experts.2.up_proj"];
    for (layers, paths, refused) in [
        (&[0][..], [last, "model.layers.0.q_proj"], None),
        (&[0], [first, "model.layers.0.q_proj"], None),
        (&[0], [first, "model.layers.5.k_proj"], None),
        (&[0], [first, last], Some(last)),
        (&[0], [first, "model.layers.2.q_proj"], Some("model.layers.2.q_proj")),
        (&[0, 2], [first, last], None),
    ] {
        match refused {
            None => assert!(load(layers, json!(null), paths).is_ok(), "{layers:?} {paths:?}"),
            Some(path) => refused!(load(layers, json!(null), paths), NotTargeted, path, "layers_to_transform"),
        }
    }
    assert!(load(&[0], json!("0.19.1"), [first, "model.layers.0.q_proj"]).is_ok());
    refused!(load(&[0], json!("0.20.0"), [first, "model.layers.0.q_proj"]), NotTargeted, first, "layers_to_transform");
}

/// A linear layer's weight may be a parameter. Fields that select modules do not hold for it, and patterns see the weight's path.
#[test]
fn a_weight_may_be_a_parameter() {
    const PATH: &str = "model.layers.1.mlp.gate";
    let load = |fields: Value| {
        let mut config = json!({"peft_type": "LORA", "lora_alpha": 6, "target_modules": []});
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let keys = ["lora_A", "lora_B"].map(|factor| format!("base_model.model.{PATH}.{factor}.weight"));
        load(&config.to_string(), [(&*keys[0], &[2, 8][..]), (&*keys[1], &[8, 2])])
    };
    for (fields, scaling) in [
        (json!({"target_parameters": ["gate.weight"]}), 3.0),
        (json!({"target_parameters": ["weight"]}), 3.0),
        (json!({"target_parameters": ["up_proj", "model.layers.1.mlp.gate.weight"], "target_modules": null}), 3.0),
        (json!({"target_parameters": ["gate.weight"], "exclude_modules": ["gate"]}), 3.0),
        (json!({"target_parameters": ["gate.weight"], "exclude_modules": ".*"}), 3.0),
        (json!({"target_parameters": ["gate.weight"], "target_modules": ["q_proj"], "layers_to_transform": [0]}), 3.0),
        (json!({"target_parameters": ["gate.weight"], "alpha_pattern": {"gate": 8}}), 3.0),
        (json!({"target_parameters": ["gate.weight"], "alpha_pattern": {"gate": 8, "gate.weight": 4}}), 2.0),
        (json!({"target_parameters": ["gate.weight"], "alpha_pattern": {r".*\.gate\.weight": 4}}), 2.0),
        (json!({"target_parameters": ["gate.weight"], "r": 2, "rank_pattern": {"gate": 8}}), 3.0),
        (json!({"target_modules": ["gate"], "alpha_pattern": {"gate": 8, "gate.weight": 4}}), 4.0),
        (json!({"target_modules": ["gate"], "target_parameters": ["up_proj"], "alpha_pattern": {"gate": 8}}), 4.0),
    ] {
        assert_eq!(load(fields.clone()).unwrap().modules()[0].scaling(), scaling, "{fields}");
    }
    for parameter in ["gate", "ate.weight", "gate.bias", "0.mlp.gate.weight", "weight."] {
        refused!(load(json!({"target_parameters": [parameter]})), NotTargeted, PATH, "`target_modules`");
    }
    let ranks = json!({"target_parameters": ["gate.weight"], "r": 2, "rank_pattern": {"gate.weight": 8}});
    refused!(load(ranks), RankField, "`rank_pattern`", "requires 8");
}

/// PEFT saves the factors of a tied head beside those of the embedding. If one of them is missing, it gives it those of the other.
#[test]
fn what_peft_ties_has_the_same_factors() {
    let load = |targets: Value, embedding: Option<&str>, head: Option<(&str, f32)>| {
        let config =
            json!({"peft_type": "LORA", "lora_alpha": 4, "ensure_weight_tying": true, "target_modules": targets});
        let tensor = |key: String, shape: [usize; 2], values: Vec<f32>| (key, tensor(DType::F32, &shape, &values));
        // Two ranks, three tokens, two features.
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [7.0, 8.0, 9.0, 10.0]);
        let [a_transposed, b_transposed] = [vec![1.0, 4.0, 2.0, 5.0, 3.0, 6.0], vec![7.0, 9.0, 8.0, 10.0]];
        let mut tensors = Vec::new();
        if let Some(path) = embedding {
            tensors.push(tensor(format!("{path}.lora_embedding_A"), [2, 3], a.to_vec()));
            tensors.push(tensor(format!("{path}.lora_embedding_B"), [2, 2], b.to_vec()));
        }
        if let Some((path, last)) = head {
            let a_transposed = [&a_transposed[..5], &[last]].concat();
            tensors.push(tensor(format!("{path}.lora_A.weight"), [2, 2], b_transposed));
            tensors.push(tensor(format!("{path}.lora_B.weight"), [3, 2], a_transposed));
        }
        Adapter::from_tensors(&config.to_string(), tensors)
    };
    let (embedding, head) = ("base_model.model.model.embed_tokens", "base_model.model.lm_head");
    let tied = || json!(["model.embed_tokens"]);
    assert_eq!(load(tied(), Some(embedding), Some((head, 6.0))).unwrap().modules().len(), 2);
    assert!(load(tied(), Some(embedding), Some(("model.unembed_tokens", 6.0))).is_ok());
    assert!(load(json!("(?:q_proj|^model\\.embed_tokens$)"), Some(embedding), Some((head, 6.0))).is_ok());
    refused!(load(tied(), Some(embedding), None), UnsupportedField, "`ensure_weight_tying`", "only one has factors");
    refused!(load(tied(), None, Some((head, 6.0))), UnsupportedField, "`ensure_weight_tying`", "only one has factors");
    refused!(load(tied(), Some(embedding), Some((head, 6.5))), Untied, "lm_head", "embed_tokens", "ties them");
    refused!(load(json!(["q_proj"]), Some(embedding), Some((head, 6.0))), NotTargeted, "embed_tokens");
    // PEFT leaves the head among the targets if the base model is not tied.
    assert!(load(json!(["embed_tokens", "lm_head"]), Some(embedding), Some((head, 6.5))).is_ok());
}

/// Patterns that Python's `re` refuses or reads differently are refused, even if our regex engine accepts them.
#[test]
fn patterns_that_python_reads_otherwise() {
    for pattern in [
        r"[[:alpha:]]_proj",
        r"[a-z&&[^x]]_proj",
        r"[q--v]_proj",
        r"[q~~v]_proj",
        r"[q||v]_proj",
        r"[]q]_proj",
        r"[[q]]_proj",
        r"\<q_proj",
        r"q_proj\>",
        r"\N{LATIN SMALL LETTER Q}_proj",
        r"\p{L}_proj",
        r"\x71_proj",
        r"\u0071_proj",
        r"\Aq_proj\Z",
        r"q_proj\z",
        r"\Gq_proj",
        r"\Kq_proj",
        r"\h_proj",
        r"(?i)Q_PROJ",
        r"(?x) q_proj",
        r"(?i:Q)_proj",
        r"(?<letter>q)_proj",
        r"(?>q)_proj",
        r"(?#comment)q_proj",
        r"(?P>letter)_proj",
        r"(q)?(?(3)_proj|x)",
        r"q++_proj",
        r"q?+_proj",
        r"q{1}+_proj",
        r"q{1}{1}_proj",
        r"q**_proj",
        r"q{,2}_proj",
        r"q{a}_proj",
        r"{q_proj",
        r"q}_proj",
        r"]q_proj",
        r"^*q_proj",
        r"(?=q)*q_proj",
        r"(?<=a|bc)q_proj",
        r"(?<=x*)q_proj",
        r"\1q_proj",
        r"(q\3)_proj",
        r"(q)\12_proj",
        r"(?P=letter)q_proj",
        r"(?P<l>q)_(?P<l>p)roj",
        r"(?P<l>q(?P=l))_proj",
        r"q{2,1}_proj",
        r"q{+1}_proj",
        r"(?!(q)x)q_proj",
        "q_pr\u{f6}j|q_proj",
        "q_proj\n|q_proj",
        r"q_proj\",
        r"(q_proj",
        r"q_proj)",
        r"[q_proj",
    ] {
        refused!(with("alpha_pattern", json!({pattern: 7})), Pattern, "alpha_pattern");
        refused!(with("rank_pattern", json!({pattern: 2})), Pattern, "rank_pattern");
        refused!(with("target_modules", json!(pattern)), Pattern, "target_modules");
        refused!(with("exclude_modules", json!(pattern)), Pattern, "exclude_modules");
    }
    // Python matches these.
    for pattern in [
        r"[\w-]+",
        r"[a-q]_[^a-o]\w{3}",
        r"[-q]_proj",
        r"[q\-.]_proj",
        r"(?P<l>q)_(?P=l)?proj|(q)_proj",
        r"(.)_p(?=roj)\w{3,}",
        r"q??_(?:proj|x){1,2}?",
        r"\bq_\Bproj\b",
        r"(?!v)\S*(?<!k)_proj",
        r"q\_proj|q_proj$",
        r"(q|v)_proj|(?:)|",
    ] {
        let module = with("alpha_pattern", json!({pattern: 7})).map(|adapter| adapter.modules()[0].scaling());
        assert_eq!(module.map_err(|error| error.to_string()), Ok(3.5), "{pattern}");
    }
}

/// Whether PEFT 0.21 adapts the module `model.layers.10.mlp.experts.3.up_proj`; if not, the field that excludes it.
#[test]
fn modules_are_those_that_peft_adapts() {
    const PATH: &str = "model.layers.10.mlp.experts.3.up_proj";
    let check = |fields: Value, refused: Option<&str>| {
        let mut config = json!({"peft_type": "LORA", "lora_alpha": 1});
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let keys = ["lora_A", "lora_B"].map(|factor| format!("base_model.model.{PATH}.{factor}.weight"));
        let adapter = load(&config.to_string(), [(&*keys[0], &[1, 8][..]), (&*keys[1], &[8, 1])]);
        match refused {
            None => assert!(adapter.is_ok(), "{fields}: {adapter:?}"),
            Some(field) => refused!(adapter, NotTargeted, format!("`{PATH}`"), format!("`{field}`")),
        }
    };
    let (targets, exclude, layers) = (Some("target_modules"), Some("exclude_modules"), Some("layers_to_transform"));
    for (value, refused) in [
        (json!(["up_proj"]), None),
        (json!(["3.up_proj"]), None),
        (json!([PATH]), None),
        (json!(["x", "up_proj"]), None),
        (json!(["proj"]), targets),
        (json!(["p_proj"]), targets),
        (json!(["experts.*"]), targets),
        (json!(["mlp.experts"]), targets),
        (json!([]), targets),
        (json!("all-linear"), None),
        (json!("ALL-LINEAR"), None),
        (json!("all"), targets),
        (json!("up_proj"), targets),
        (json!(r".*\.up_proj"), None),
        (json!(r"up_proj|.*(up|down)_proj"), None),
        (json!(r"model\.layers\.1\..*"), targets),
        (json!(r"^(?!.*visual).*(?:up|down)_proj.*"), None),
        (json!(r"^(?!.*layers).*(?:up|down)_proj.*"), targets),
        (json!(""), targets),
        // A widely used trainer writes this.
        (
            json!(
                r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:mlp)\.experts\.\d+\.(?:(?:up_proj|down_proj)))"
            ),
            None,
        ),
    ] {
        check(json!({"target_modules": value}), refused);
    }
    for (value, refused) in [
        (json!(["v_proj"]), None),
        (json!(["up_proj"]), exclude),
        (json!([PATH]), exclude),
        (json!([]), None),
        (json!(null), None),
        (json!(""), None),
        (json!("up_proj"), None),
        (json!(r".*\.experts\..*"), exclude),
    ] {
        check(json!({"target_modules": ["up_proj"], "exclude_modules": value}), refused);
    }
    for (numbers, names, refused) in [
        (json!(10), json!(null), None),
        (json!(3), json!(null), layers),
        (json!([1, 10]), json!([]), None),
        (json!([1, 3]), json!(""), layers),
        (json!([]), json!(null), None),
        (json!(null), json!(null), None),
        (json!(10), json!("layers"), None),
        (json!(3), json!("experts"), None),
        (json!([3]), json!(["h", "experts", "layers"]), None),
        (json!(10), json!(["experts"]), layers),
        (json!(10), json!("layer"), layers),
    ] {
        let fields = json!({
            "target_modules": ["up_proj"], "layers_to_transform": numbers, "layers_pattern": names, "peft_version": "0.20.0",
        });
        check(fields, refused);
    }
    // PEFT took the last number before. Without a version, or with one in between, either will do.
    for (numbers, names, before, either) in [
        (json!(3), json!(null), None, None),
        (json!(10), json!(null), layers, None),
        (json!(4), json!(null), layers, layers),
        (json!(10), json!("layers"), None, None),
        (json!(3), json!("layers"), layers, layers),
        (json!(3), json!(["h", "experts", "layers"]), None, None),
        (json!(10), json!(["layers", "experts"]), None, None),
    ] {
        let mut fields =
            json!({"target_modules": ["up_proj"], "layers_to_transform": numbers, "layers_pattern": names});
        for (version, refused) in [(json!("0.19.1"), before), (json!(null), either), (json!("0.20.0.dev0"), either)] {
            fields["peft_version"] = version;
            check(fields.clone(), refused);
        }
    }
    // A whole path is a target in any layer.
    check(json!({"target_modules": [PATH], "layers_to_transform": 3}), None);
    // Without a field, every module may have factors.
    check(json!({}), None);
    // Parameters alone.
    check(json!({"target_modules": null, "target_parameters": ["experts.up_proj"]}), targets);
    check(json!({"target_modules": null, "target_parameters": ["3.up_proj.weight"]}), None);
}

#[test]
fn targets_that_peft_does_not_take() {
    for (fields, culprit) in [
        (json!({"target_modules": null}), "`target_modules` is null"),
        (json!({"target_modules": 1}), "`target_modules` is 1"),
        (json!({"target_modules": ["q_proj", 1]}), "`target_modules` is"),
        (json!({"target_modules": "q_proj", "layers_to_transform": [1]}), "`layers_to_transform` is [1]"),
        (json!({"target_modules": "all-linear", "layers_to_transform": 1}), "`layers_to_transform` is 1"),
        (json!({"target_modules": "q_proj", "layers_pattern": "h"}), "`layers_pattern` is \"h\""),
        (json!({"target_modules": ["q_proj"], "layers_pattern": "h"}), "`layers_pattern` is \"h\""),
        (json!({"target_modules": ["q_proj"], "layers_to_transform": "1"}), "`layers_to_transform` is \"1\""),
        (json!({"target_modules": ["q_proj"], "layers_to_transform": [1, true]}), "`layers_to_transform` is true"),
        (
            json!({"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "h|g"}),
            "`layers_pattern` is",
        ),
        (json!({"exclude_modules": [1]}), "`exclude_modules` is [1]"),
    ] {
        let mut config = json!({"peft_type": "LORA", "lora_alpha": 1});
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        refused!(one_module(&config.to_string(), 2), InvalidField, culprit);
    }
}

#[test]
fn all_linear_layers_are_neither_the_head_nor_embeddings() {
    let config = r#"{"peft_type": "LORA", "lora_alpha": 1, "target_modules": "all-linear"}"#;
    let load = |path: &str, factors: [&str; 2]| {
        let keys = factors.map(|factor| format!("{path}.{factor}"));
        load(config, [(&*keys[0], &[2, 8][..]), (&*keys[1], &[8, 2])])
    };
    let linear = ["lora_A.weight", "lora_B.weight"];
    assert!(load("model.layers.0.self_attn.q_proj", linear).is_ok());
    // Written by trainers that mean it.
    assert!(load("model.unembed_tokens", linear).is_ok());
    refused!(load("lm_head", linear), NotTargeted, "`lm_head`", "`target_modules`");
    let embedding = load("model.embed_tokens", ["lora_embedding_A", "lora_embedding_B"]);
    refused!(embedding, NotTargeted, "`model.embed_tokens`", "`target_modules`");
}

/// Values that PEFT raises an error for.
#[test]
fn values_that_peft_does_not_take() {
    for (field, value) in [
        ("bias", json!(null)),
        ("bias", json!("")),
        ("bias", json!(false)),
        ("bias", json!("NONE")),
        ("bias", json!([])),
        ("lora_dropout", json!(null)),
        ("lora_dropout", json!("0.1")),
        ("lora_dropout", json!(1.5)),
        ("eva_config", json!("rho")),
        ("corda_config", json!([1])),
        ("megatron_config", json!(true)),
        ("loftq_config", json!(4)),
        ("lora_ga_config", json!("ArB2r")),
    ] {
        refused!(with(field, value.clone()), InvalidField, format!("`{field}`"), value.to_string());
    }
    for value in [json!("EVA"), json!("Orthogonal"), json!("new"), json!(1), json!({"a": 1}), json!(["gaussian"])] {
        let refused = with("init_lora_weights", value.clone());
        refused!(refused, UnsupportedField, "`init_lora_weights`", value.to_string(), "PEFT does not know");
    }
    for value in ["pissa", "olora", "loftq"] {
        refused!(with("init_lora_weights", json!(value)), UnsupportedField, value, "changes the base weights");
    }
}

#[test]
fn what_switches_something_on() {
    for (field, value) in [
        ("lora_bias", json!(true)),
        ("use_dora", json!(true)),
        ("modules_to_save", json!(["score"])),
        ("modules_to_save", json!(["lm_head", "model.layers.0.mlp"])),
        ("use_qalora", json!(true)),
        ("use_bdlora", json!({"nblocks": 2})),
        ("layer_replication", json!([[0, 4], [2, 5]])),
        ("init_lora_weights", json!("pissa")),
        ("init_lora_weights", json!("pissa_niter_16")),
        ("init_lora_weights", json!("olora")),
        ("init_lora_weights", json!("corda")),
        ("init_lora_weights", json!("loftq")),
        ("init_lora_weights", json!("OLoRA")),
        ("init_lora_weights", json!("corda_of_tomorrow")),
        ("arrow_config", json!({})),
        ("arrow_config", json!({"top_k": 3})),
        ("kasa_config", json!({})),
        ("monteclora_config", json!({})),
        ("use_bdlora", json!({})),
        ("velora_config", json!({})),
        ("kasa_config", json!({"beta": 1e-4})),
        ("monteclora_config", json!({"samples": 2})),
        ("velora_config", json!({"num_groups": 2})),
        ("use_qa_lora", json!(true)),
        ("use_merged_linear", json!(true)),
        ("enable_lora", json!([true, false])),
        ("a_field_of_tomorrow", json!(1)),
        ("a_field_of_tomorrow", json!("on")),
    ] {
        refused!(with(field, value.clone()), UnsupportedField, format!("`{field}`"), value.to_string());
    }
}

#[test]
fn what_switches_nothing_on() {
    for (field, value) in [
        ("bias", json!("all")),
        ("bias", json!("lora_only")),
        ("init_lora_weights", json!(false)),
        ("init_lora_weights", json!("gaussian")),
        ("init_lora_weights", json!("eva")),
        ("init_lora_weights", json!("orthogonal")),
        ("init_lora_weights", json!("mica")),
        ("init_lora_weights", json!("MiCA")),
        ("init_lora_weights", json!("lora_ga")),
        ("lora_ga_config", json!({"direction": "ArB2r", "scale": "stable", "stable_gamma": 16})),
        ("ensure_weight_tying", json!(true)),
        ("swift_type", json!("LORA")),
        ("lora_dtype", json!("float32")),
        ("lorap_lr_ratio", json!(16.0)),
        ("lorap_emb_lr", json!(1e-6)),
        ("loraplus_lr_ratio", json!(16)),
        ("merge_weights", json!(true)),
        ("use_qa_lora", json!(false)),
        ("trainer_version", json!("1.2.3")),
        ("modules_to_save", json!([])),
        ("init_lora_weights", json!("Gaussian")),
        ("init_lora_weights", json!(null)),
        ("target_modules", json!("all-linear")),
        ("target_modules", json!(r"(.*\.)?q_proj")),
        ("target_parameters", json!(["mlp.experts.gate_up_proj"])),
        ("layers_to_transform", json!([])),
        ("exclude_modules", json!(["v_proj"])),
        ("fan_in_fan_out", json!(true)),
        ("base_model_name_or_path", json!("some/other-model")),
        ("eva_config", json!({"rho": 2.0})),
        ("kasa_config", json!(null)),
        ("use_bdlora", json!(false)),
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
