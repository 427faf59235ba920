//! The example `qwen3` on a model with gated delta nets, on any device, in the forms of its checkpoints.

use std::{
    fs,
    path::{Path, PathBuf},
};

use safetensors::Dtype;
use serde_json::{Value, json};

use super::{
    files::{Files, Tensors, edit, read, write},
    goldens::{all_in, largest_difference, models, requests, run},
    process::{fixture, qwen3},
};

/// The model that also sees images has the same text model under other names, its experts in a tensor each, and
/// adapters with these names.
pub(crate) fn the_text_part_of_a_larger_model_is_the_same(device: &str, tolerance: f32) {
    let (files, batch) = (Files::new(), "hybrid");
    let (model, adapters) = models(batch);
    let larger = files.copy(&fixture(model), "larger");
    let path = larger.join("model.safetensors");
    let mut tensors = named(fused(read(&path)), "model.", "model.language_model.");
    for other in ["model.visual.patch_embed.proj.weight", "mtp.fc.weight"] {
        tensors.insert(other.into(), (Dtype::BF16, vec![1], vec![0; 2]));
    }
    write(&path, &tensors);
    edit(&larger.join("config.json"), |config| {
        let mut text = config.clone();
        text.insert("model_type".into(), json!("qwen3_5_moe_text"));
        // Of images alone.
        text["rope_parameters"]["mrope_interleaved"] = json!(true);
        text["rope_parameters"]["mrope_section"] = json!([3, 3, 2]);
        let outer = json!({
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "text_config": text,
            "vision_config": { "depth": 1, "hidden_size": 8 },
            "tie_word_embeddings": true,
        });
        *config = outer.as_object().expect("it is an object").clone();
    });
    let renamed = |folder: PathBuf| {
        let name = folder.file_name().and_then(|name| name.to_str()).expect("it is UTF-8").to_owned();
        let copy = files.copy(&folder, &name);
        let path = copy.join("adapter_model.safetensors");
        let tensors = read(&path);
        write(&path, &named(tensors, "base_model.model.model.", "base_model.model.model.language_model."));
        copy
    };
    let adapters = all_in(adapters);
    let plain = run(device, model, &adapters, "f32", &requests(batch), false);
    let adapters: Vec<PathBuf> = adapters.into_iter().map(renamed).collect();
    let larger = run(device, &larger.display().to_string(), &adapters, "f32", &requests(batch), true);
    for (index, (plain, larger)) in plain.iter().zip(&larger).enumerate() {
        assert_eq!(plain.tokens, larger.tokens, "request {index}");
        let difference = largest_difference(&plain.logits, &larger.logits);
        assert!(difference <= tolerance, "request {index}: {difference}");
    }
}

/// The tensors with another beginning of their names.
fn named(tensors: Tensors, from: &str, to: &str) -> Tensors {
    let name = |name: String| name.strip_prefix(from).map_or(name.clone(), |rest| format!("{to}{rest}"));
    tensors.into_iter().map(|(key, tensor)| (name(key), tensor)).collect()
}

/// The tensors with one for all experts of a projection.
fn fused(mut tensors: Tensors) -> Tensors {
    const EXPERTS: usize = 8;
    for experts in (0..3).map(|layer| format!("model.layers.{layer}.mlp.experts")) {
        for (name, modules) in [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"])] {
            let (mut all, mut of_one) = (Vec::new(), Vec::new());
            for (expert, module) in (0..EXPERTS).flat_map(|expert| modules.iter().map(move |module| (expert, module))) {
                let tensor = tensors.remove(&format!("{experts}.{expert}.{module}.weight"));
                let (_, shape, bytes) = tensor.expect("every expert has its modules");
                of_one = shape;
                all.extend(bytes);
            }
            let shape = vec![EXPERTS, modules.len() * of_one[0], of_one[1]];
            tensors.insert(format!("{experts}.{name}"), (Dtype::BF16, shape, all));
        }
    }
    tensors
}

/// How a model with this change of its configuration is refused.
fn refusal(change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> String {
    let files = Files::new();
    let model = files.copy(&fixture("qwen3-hybrid"), "model");
    edit(&model.join("config.json"), change);
    refusal_of(&model)
}

fn refusal_of(model: &Path) -> String {
    let output = qwen3(["--device", "cpu", "--model", &model.display().to_string()]);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    stderr
}

#[test]
fn hybrid_configurations_that_the_forward_does_not_implement_are_refused_by_name() {
    let delta_net = "linear_attention";
    for (field, value, needle) in [
        ("layer_types", json!([delta_net, "sliding_attention", delta_net]), "sliding_attention"),
        ("layer_types", json!([delta_net, "full_attention"]), "2 layers"),
        ("layer_types", json!([delta_net, delta_net, delta_net]), "no layer has attention"),
        ("attn_output_gate", json!(false), "attn_output_gate"),
        ("linear_num_key_heads", json!(3), "linear_num_key_heads"),
        ("linear_num_key_heads", json!(4), "linear_num_key_heads"),
        ("linear_num_key_heads", json!(null), "linear_num_key_heads"),
        ("linear_num_value_heads", json!(2), "linear_num_value_heads"),
        ("linear_key_head_dim", json!(i32::MAX), "linear_"),
        ("linear_key_head_dim", json!(8), "linear_key_head_dim"),
        ("linear_value_head_dim", json!(8), "linear_value_head_dim"),
        ("linear_conv_kernel_dim", json!(3), "linear_conv_kernel_dim"),
        ("shared_expert_intermediate_size", json!(16), "shared_expert_intermediate_size"),
        ("rope_parameters", json!({ "rope_theta": 1e6, "partial_rotary_factor": 0.01 }), "partial_rotary_factor"),
        ("rope_parameters", json!({ "rope_theta": 1e6, "partial_rotary_factor": 1.5 }), "partial_rotary_factor"),
        ("model_type", json!("qwen3_moe"), "Qwen3MoeForCausalLM"),
    ] {
        let refused = refusal(|config| drop(config.insert(field.into(), value.clone())));
        assert!(refused.contains("config.json") && refused.contains(needle), "{field} {value}: {refused}");
    }
    // Without a list, each fourth layer has attention.
    let refused = refusal(|config| drop(config.remove("layer_types")));
    assert!(refused.contains("no layer has attention"), "{refused}");
    let refused = refusal(|config| {
        config.remove("layer_types");
        config.insert("full_attention_interval".into(), json!(3));
    });
    assert!(refused.contains("model.layers.1.linear_attn"), "{refused}");
    let refused = refusal(|config| {
        let text = config.clone();
        config.insert("text_config".into(), text.into());
        config.insert("model_type".into(), json!("qwen3_5_moe"));
        config.insert("architectures".into(), Value::Null);
        config.insert("tie_word_embeddings".into(), json!(false));
    });
    assert!(refused.contains("`tie_word_embeddings` is false, but true in `text_config`"), "{refused}");
}

#[test]
fn tensors_of_gated_delta_nets_are_read_whole() {
    let files = Files::new();
    let path = "model.layers.2.linear_attn";
    for name in ["conv1d.weight", "A_log", "dt_bias", "norm.weight", "in_proj_a.weight", "out_proj.weight"] {
        let model = files.copy(&fixture("qwen3-hybrid"), "model");
        let weights = model.join("model.safetensors");
        let mut tensors = read(&weights);
        let tensor = tensors.remove(&format!("{path}.{name}")).expect("it is there");
        write(&weights, &tensors);
        let refused = refusal_of(&model);
        assert!(refused.contains(&format!("{path}.{name}` is missing")), "{refused}");
        tensors.insert(format!("{path}.{name}"), tensor.clone());
        tensors.insert(format!("{path}.more.{name}"), tensor);
        write(&weights, &tensors);
        let refused = refusal_of(&model);
        assert!(refused.contains(&format!("{path}.more.{name}` has no place")), "{refused}");
        fs::remove_dir_all(model).expect("it can be removed");
    }
}
