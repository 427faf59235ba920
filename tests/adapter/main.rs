//! Loading adapters: each adapter is served exactly or refused by name.
//!
//! Mistakes of other loaders, and the tests that would find them in this one:
//!
//! | mistake | test |
//! |---|---|
//! | rsLoRA ignored: scaling off by √r | `config::rank_stabilised_scaling` |
//! | alpha_pattern ignored, or its keys matched in another way than PEFT's | `config::alpha_pattern_is_matched_as_in_peft` |
//! | the rank taken from the configuration or from the first module | `config::the_rank_is_the_tensors`, `config::ranks_are_those_of_the_configuration`, `plan::slices_of_different_ranks` |
//! | factors of modules that were not targets applied, or dropped without a word | `config::modules_are_those_that_peft_adapts`, `plan::factors_are_for_modules_of_their_kind` |
//! | Python's patterns read in another dialect, or without an end | `config::patterns_that_python_reads_otherwise`, `config::all_patterns_have_a_budget` |
//! | alpha missing or a float; errors in the configuration swallowed | `config::alpha_is_required`, `config::what_is_not_json` |
//! | keys with another prefix match nothing, and the adapter does nothing | `names::spellings_of_a_module`, `plan::multimodal_paths` |
//! | only the end of a path is compared | `plan::modules_without_a_place`, `names::unknown_tensors` |
//! | names found inside other names | `names::unknown_tensors`, `plan::modules_without_a_place` |
//! | experts' factors taken for those of another layout, by version or expert-major for expert-fastest | `peft::experts_are_what_peft_adds`, `experts::all_forms_give_the_same`, `experts::a_version_is_believed` |
//! | a layout guessed where two fit | `experts::parameters_that_could_stand_in_two_ways_are_refused` |
//! | gate and up exchanged, or interleaved ones not taken apart | `experts::all_forms_give_the_same` |
//! | one expert taken for shared factors | `experts::one_expert_shares_nothing` |
//! | experts beyond the model's, placeholders without elements | `experts::modules_that_experts_do_not_have`, `experts::experts_without_a_gate` |
//! | A and B told apart by their shapes | `plan::shapes_are_the_models`: names decide, shapes only confirm |
//! | DoRA, biases, modules_to_save dropped | `names::unsupported_tensors`, `config::what_switches_something_on` |
//! | an adapter with an invocation applied to whole sequences | `invocation::an_invocation_has_to_be_taken` |
//! | base weights of embeddings in the file refused, dropped, or taken for weights | `names::base_weights_of_embeddings_have_to_be_compared` |
//! | a file that is truncated later kills the process, one that never ends stops it | `files::an_open_adapter_does_not_follow_its_files`, `files::only_regular_files_are_read` |
//! | pickles executed | `files::pickles_are_refused` |
//! | an adapter of another base model accepted | `plan::shapes_are_the_models`, `random::broken_adapters_are_refused` |
//! | f32 weights cut to f16 infinities | `plan::weights_must_be_finite` |
//! | a good adapter refused for `added_tokens.json` | `files::other_files_are_ignored` |
//! | missing layers refused, layers beyond the model accepted | `plan::any_subset`, `plan::modules_without_a_place` |
//! | ranks of a group disagree on whether an adapter is good | `random::ranks_agree_on_what_they_refuse`: shapes are checked whole |
//! | towers of a multimodal model adapted with the language model's factors | `plan::multimodal_paths` |
//! | paths that lead out of the directory | `files::shards_are_beside_the_index` (names in HTTP requests are the engine's) |
//! | a rank beyond the table's stops the engine | `plan::ranks_beyond_a_table_are_an_error` |
//! | q without v, k alone, up without gate refused or dropped | `plan::any_subset` |
//! | a missing slice filled with zeros of a wrong width | cannot happen: a slice without a module has no entry (`plan::any_subset`) |
//! | "already stacked" guessed from a dimension | cannot happen: a fused module is one by its name (`plan::fused_modules`) |
//! | slices of different ranks stacked at multiples of one | `plan::slices_of_different_ranks`, `random::images_are_naive_packings` |
#![allow(clippy::unwrap_used, reason = "tests")]

mod combined;
#[path = "../common/mod.rs"]
mod common;
mod config;
mod experts;
mod files;
mod invocation;
mod names;
mod peft;
mod plan;
mod random;
mod rows;
mod toy;

use aril::{
    DType,
    adapter::{Adapter, AdapterError, Tensor},
};

/// Fails unless the result is an error of this variant whose message contains all the culprits.
macro_rules! refused {
    ($result:expr, $variant:ident, $($culprit:expr),+ $(,)?) => {{
        let error = $result.expect_err("this must be refused");
        assert!(matches!(error, aril::adapter::AdapterError::$variant { .. }), "{error:?}");
        let text = error.to_string();
        $(assert!(text.contains(&*$culprit), "`{}` is not in: {text}", $culprit);)+
    }};
}
pub(crate) use refused;

const CONFIG: &str = r#"{"peft_type": "LORA", "lora_alpha": 4, "bias": "none"}"#;

/// A bf16 tensor of ones.
fn ones(shape: &[usize]) -> Tensor {
    common::adapters::tensor(DType::BF16, shape, &vec![1.0; shape.iter().product()])
}

/// An adapter in memory with these keys, all ones.
fn load<'a>(config: &str, tensors: impl IntoIterator<Item = (&'a str, &'a [usize])>) -> Result<Adapter, AdapterError> {
    Adapter::from_tensors(config, tensors.into_iter().map(|(key, shape)| (key.to_owned(), ones(shape))))
}

/// An adapter of linear modules at these paths, from 8 to 8 features.
fn load_paths(paths: &[&str]) -> Result<Adapter, AdapterError> {
    let keys: Vec<_> =
        paths.iter().flat_map(|path| [format!("{path}.lora_A.weight"), format!("{path}.lora_B.weight")]).collect();
    let shapes: [&[usize]; 2] = [&[2, 8], &[8, 2]];
    load(CONFIG, keys.iter().map(String::as_str).zip(shapes.into_iter().cycle()))
}

#[test]
fn adapters_may_be_shared_between_threads() {
    fn check<T: Send + Sync + 'static>() {}
    check::<Adapter>();
    check::<AdapterError>();
}
