//! The example `qwen3` on the CPU against transformers and PEFT.

use super::{
    files::{Files, edit},
    forms,
    goldens::{self, BATCHES, POOL, all_in, answers, models, requests, run, run_with},
    hybrid, moe,
    process::fixture,
};
use serde_json::json;

const DEVICE: &str = "cpu";

tests! {
    doc = "On the CPU.":
    f32_reproduces_the_goldens => goldens::reproduces_the_goldens(DEVICE, "f32");
    bf16_reproduces_the_goldens => goldens::reproduces_the_goldens(DEVICE, "bf16");
    f16_reproduces_the_goldens => goldens::reproduces_the_goldens(DEVICE, "f16");
    base_models_reproduce_the_goldens => goldens::base_models_reproduce_the_goldens(DEVICE);
    every_adapter_changes_what_the_base_model_says => goldens::every_adapter_changes_what_the_base_model_says(DEVICE);
    base_requests_keep_every_bit_whatever_adapters_are_there => goldens::base_requests_keep_every_bit(DEVICE, &BATCHES);
    a_scale_multiplies_the_adapters_own => goldens::a_scale_multiplies_the_adapters_own(DEVICE);
    a_pool_reproduces_the_goldens => goldens::pools_reproduce_the_goldens(DEVICE, &POOL);
    packed_weights_differ_by_their_rounding_alone =>
        moe::packed_weights_differ_by_their_rounding_alone(DEVICE, 0.0);
    groups_of_128_are_what_they_unpack_to => moe::groups_of_128_are_what_they_unpack_to(DEVICE, 0.0);
    experts_of_any_size_verify => moe::experts_are_those_of_the_cpu(DEVICE);
    the_text_part_of_a_larger_model_is_the_same => hybrid::the_text_part_of_a_larger_model_is_the_same(DEVICE, 0.0);
    every_form_of_an_adapter_gives_the_same =>
        forms::every_form_of_an_adapter_gives_the_same(DEVICE, &[("f32", 0.0), ("bf16", 0.0), ("f16", 0.0)], &[]);
}

/// The golden's files, changed by `edit`.
fn hold_edited(edit: impl FnOnce(&mut goldens::Answer)) {
    let golden = goldens::golden("one-question", "bf16");
    let mut answers = goldens::golden("one-question", "bf16");
    answers.iter_mut().for_each(|answer| answer.tolerance = 0.4);
    edit(&mut answers[3]);
    goldens::hold_rounded(DEVICE, "one-question", "bf16", &answers, &golden);
}

#[test]
fn a_golden_holds_itself() {
    hold_edited(|_| ());
}

#[test]
#[should_panic(expected = "request 3: no logits of step 2")]
fn an_answer_that_ends_early_does_not_hold() {
    hold_edited(|answer| {
        answer.tokens.truncate(2);
        answer.logits.truncate(2 * answer.vocab);
    });
}

#[test]
#[should_panic(expected = "request 3, step 1: logits differ by 0.5")]
fn logits_that_differ_do_not_hold() {
    hold_edited(|answer| answer.logits[answer.vocab + 3] += 0.5);
}

/// The weights of a token's experts are then the softmax over all experts, and do not add up to 1.
#[test]
fn what_experts_weigh_need_not_be_normalized() {
    let files = Files::new();
    let model = files.copy(&fixture("qwen3-moe"), "model");
    edit(&model.join("config.json"), |config| drop(config.insert("norm_topk_prob".into(), json!(false))));
    let (model, batch) = (model.display().to_string(), "moe-unnormalized");
    let answers = run(DEVICE, &model, &all_in("adapters-moe"), "f32", &requests(batch), true);
    goldens::hold_f32(DEVICE, batch, &answers, &goldens::golden(batch, "f32"));
}

#[test]
fn a_request_gets_from_a_pool_what_it_gets_from_a_table() {
    for batch in ["mixed", "untied", "moe-int4", "moe-int8", "hybrid"] {
        let (model, adapters) = models(batch);
        let pooled = run_with(DEVICE, model, &all_in(adapters), "f32", &requests(batch), &POOL);
        for (index, (pooled, answer)) in pooled.iter().zip(answers(DEVICE, batch, "f32").iter()).enumerate() {
            assert!(pooled.is_identical(answer), "{batch}, request {index}");
        }
    }
}

#[test]
fn a_request_gets_in_the_batch_what_it_gets_alone() {
    for batch in ["mixed", "moe", "moe-int4", "hybrid"] {
        let (requests, (model, adapters)) = (requests(batch), models(batch));
        let together = answers(DEVICE, batch, "bf16");
        for (index, (request, answer)) in requests.iter().zip(together.iter()).enumerate().step_by(2) {
            let alone = run(DEVICE, model, &all_in(adapters), "bf16", std::slice::from_ref(request), false);
            assert!(alone[0].is_identical(answer), "{batch}, request {index}");
        }
    }
}
