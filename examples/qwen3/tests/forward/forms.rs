//! The example `qwen3`, on any device, with adapters of experts in every form.

use std::{collections::BTreeMap, slice};

use serde_json::{Value, json};

use super::goldens::{Answer, all_in, golden_in, hold_f32, largest_difference, run_with};

/// All forms of an adapter give the result of the trained one, and PEFT's conversions give PEFT's result.
///
/// On the CPU, results and images are bit-identical, so the tolerance of each type is 0.
pub(crate) fn every_form_of_an_adapter_gives_the_same(device: &str, dtypes: &[(&str, f32)], further: &[&str]) {
    let folders = ["adapters-moe", "adapters-moe-router", "adapters-moe-forms"].map(all_in).concat();
    let names = folders.iter().map(|folder| folder.file_name().and_then(|name| name.to_str()).expect("it is UTF-8"));
    let names: Vec<&str> = names.collect();
    let ask = |name: &&str| json!({ "adapter": name, "prompt": "What is the password?" });
    let requests: Vec<Value> = names.iter().map(ask).collect();
    for &(dtype, tolerance) in dtypes {
        let answers = run_with(device, "qwen3-moe", &folders, dtype, &requests, further);
        let mut forms: BTreeMap<&str, Vec<&Answer>> = BTreeMap::new();
        let mut goldens = 0;
        for ((name, folder), answer) in names.iter().zip(&folders).zip(&answers) {
            let (adapter, _) = name.split_once('.').unwrap_or((name, ""));
            let forms = forms.entry(adapter).or_default();
            forms.push(answer);
            assert_eq!(answer.tokens, forms[0].tokens, "{name} in {dtype}");
            let difference = largest_difference(&answer.logits, &forms[0].logits);
            assert!(difference <= tolerance, "{name} in {dtype}: {difference}");
            let golden = folder.join("golden.safetensors");
            if dtype == "f32" && golden.exists() {
                goldens += 1;
                hold_f32(device, name, slice::from_ref(answer), &golden_in(&golden));
            }
        }
        let forms: Vec<_> = forms.iter().map(|(adapter, forms)| (*adapter, forms.len())).collect();
        let expected = [
            ("all-linear", 1),
            ("attention", 1),
            ("down", 3),
            ("gate-up", 3),
            ("per-expert", 12),
            ("per-expert-doubled", 1),
            ("router", 3),
            ("shared-outer", 6),
        ];
        assert_eq!(forms, expected);
        assert!(dtype != "f32" || goldens == 10, "{goldens} goldens");
    }
}
