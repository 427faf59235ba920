//! The example `qwen3` on the CPU against transformers and PEFT.

#[path = "qwen3/goldens.rs"]
mod goldens;
#[path = "qwen3/mod.rs"]
mod process;

use goldens::{DENSE, MOE, answers, requests, run};

const DEVICE: &str = "cpu";

fn batches() -> Vec<&'static str> {
    [&DENSE[..], &MOE].concat()
}

#[test]
fn f32_reproduces_the_goldens() {
    goldens::f32_reproduces_the_goldens(DEVICE, &batches());
}

#[test]
fn bf16_reproduces_the_goldens() {
    goldens::reproduces_within_rounding(DEVICE, "bf16", &batches());
}

#[test]
fn f16_reproduces_the_goldens() {
    goldens::reproduces_within_rounding(DEVICE, "f16", &batches());
}

#[test]
fn base_models_reproduce_the_goldens() {
    goldens::base_models_reproduce_the_goldens(DEVICE, &batches());
}

#[test]
fn every_adapter_changes_what_the_base_model_says() {
    goldens::every_adapter_changes_what_the_base_model_says(DEVICE, &batches());
}

#[test]
fn base_requests_keep_every_bit_whatever_adapters_are_there() {
    goldens::base_requests_keep_every_bit_whatever_adapters_are_there(DEVICE, &batches());
}

#[test]
fn a_scale_multiplies_the_adapters_own() {
    goldens::a_scale_multiplies_the_adapters_own(DEVICE);
}

#[test]
fn a_request_gets_in_the_batch_what_it_gets_alone() {
    let requests = requests("mixed");
    let together = answers(DEVICE, "mixed", "bf16");
    for (index, (request, answer)) in requests.iter().zip(together.iter()).enumerate().step_by(2) {
        let alone = run(DEVICE, "qwen3", Some("adapters"), "bf16", std::slice::from_ref(request), false);
        assert!(alone[0].is_identical(answer), "request {index}");
    }
}
