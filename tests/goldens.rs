//! The example `qwen3` on the CPU against transformers and PEFT.

#[path = "qwen3/files.rs"]
mod files;
#[path = "qwen3/moe.rs"]
mod moe;
#[path = "qwen3/mod.rs"]
mod process;
#[path = "qwen3/goldens.rs"]
mod shared;

use std::{collections::BTreeMap, slice};

use files::{Files, edit};
use process::fixture;
use serde_json::{Value, json};
use shared::{Answer, BATCHES, all_in, answers, models, requests, run};

const DEVICE: &str = "cpu";

#[test]
fn f32_reproduces_the_goldens() {
    shared::f32_reproduces_the_goldens(DEVICE);
}

#[test]
fn bf16_reproduces_the_goldens() {
    shared::reproduces_within_rounding(DEVICE, "bf16");
}

#[test]
fn f16_reproduces_the_goldens() {
    shared::reproduces_within_rounding(DEVICE, "f16");
}

#[test]
fn base_models_reproduce_the_goldens() {
    shared::base_models_reproduce_the_goldens(DEVICE);
}

#[test]
fn every_adapter_changes_what_the_base_model_says() {
    shared::every_adapter_changes_what_the_base_model_says(DEVICE);
}

#[test]
fn base_requests_keep_every_bit_whatever_adapters_are_there() {
    shared::base_requests_keep_every_bit_whatever_adapters_are_there(DEVICE, &BATCHES);
}

#[test]
fn a_scale_multiplies_the_adapters_own() {
    shared::a_scale_multiplies_the_adapters_own(DEVICE);
}

#[test]
fn int4_differs_by_the_rounding_of_its_weights_alone() {
    moe::int4_differs_by_the_rounding_of_its_weights_alone(DEVICE, 0.0);
}

#[test]
fn groups_of_128_are_what_they_unpack_to() {
    moe::groups_of_128_are_what_they_unpack_to(DEVICE, 0.0);
}

/// The forms that an adapter comes in give the very bits that it gives as it was trained, and what PEFT has made of it what PEFT gives.
#[test]
fn every_form_of_an_adapter_gives_the_same() {
    let folders = [all_in("adapters-moe"), all_in("adapters-moe-forms")].concat();
    let names = folders.iter().map(|folder| folder.file_name().and_then(|name| name.to_str()).expect("it is UTF-8"));
    let names: Vec<&str> = names.collect();
    let ask = |name: &&str| json!({ "adapter": name, "prompt": "What is the password?" });
    let requests: Vec<Value> = names.iter().map(ask).collect();
    for dtype in ["f32", "bf16", "f16"] {
        let answers = run(DEVICE, "qwen3-moe", &folders, dtype, &requests, false);
        let mut forms: BTreeMap<&str, Vec<&Answer>> = BTreeMap::new();
        let mut goldens = 0;
        for ((name, folder), answer) in names.iter().zip(&folders).zip(&answers) {
            let (adapter, _) = name.split_once('.').unwrap_or((name, ""));
            let forms = forms.entry(adapter).or_default();
            forms.push(answer);
            assert!(answer.is_identical(forms[0]), "{name} in {dtype}");
            let golden = folder.join("golden.safetensors");
            if dtype == "f32" && golden.exists() {
                goldens += 1;
                shared::hold_f32(DEVICE, name, slice::from_ref(answer), &shared::golden_in(&golden));
            }
        }
        let forms: Vec<_> = forms.iter().map(|(adapter, forms)| (*adapter, forms.len())).collect();
        let expected = [
            ("attention", 1),
            ("down", 3),
            ("gate-up", 3),
            ("per-expert", 12),
            ("per-expert-doubled", 1),
            ("shared-outer", 6),
        ];
        assert_eq!(forms, expected);
        assert!(dtype != "f32" || goldens == 8, "{goldens} goldens");
    }
}

/// What the experts of a token weigh is then the softmax over all, and not 1 together.
#[test]
fn what_experts_weigh_need_not_be_normalized() {
    let files = Files::new();
    let model = files.copy(&fixture("qwen3-moe"), "model");
    edit(&model.join("config.json"), |config| drop(config.insert("norm_topk_prob".into(), json!(false))));
    let (model, batch) = (model.display().to_string(), "moe-unnormalized");
    let answers = run(DEVICE, &model, &all_in("adapters-moe"), "f32", &requests(batch), true);
    shared::hold_f32(DEVICE, batch, &answers, &shared::golden(batch, "f32"));
}

#[test]
fn experts_of_any_size_verify() {
    moe::experts_are_those_of_the_cpu(DEVICE);
}

#[test]
fn a_request_gets_in_the_batch_what_it_gets_alone() {
    for batch in ["mixed", "moe", "moe-int4"] {
        let (requests, (model, adapters)) = (requests(batch), models(batch));
        let together = answers(DEVICE, batch, "bf16");
        for (index, (request, answer)) in requests.iter().zip(together.iter()).enumerate().step_by(2) {
            let alone = run(DEVICE, model, &all_in(adapters), "bf16", std::slice::from_ref(request), false);
            assert!(alone[0].is_identical(answer), "{batch}, request {index}");
        }
    }
}
