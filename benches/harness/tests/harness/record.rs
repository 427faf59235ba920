//! The tables and plots of the documents are those of the records.

use std::{collections::BTreeSet, fs, path::Path};

use aril::{
    DType,
    plan::{ForwardPlan, LinearPlan},
};
use aril_bench::{
    documents,
    engine::{self, FirstToken, Run},
    plots::{self, Axis, Line, Plot},
    record::{Record, repository},
    report::geometric_mean,
    selection::Chosen,
    workload::BUILT_IN,
};
use serde_json::Value;

/// Those of which the tests take the figures themselves.
const RECORDS: [&str; 2] = ["h100", "h200"];
const GROUPS: [&str; 4] = ["qkv", "o", "gate_up", "down"];

#[test]
fn the_documents_show_the_newest_record() {
    let root = repository();
    for (path, content) in documents::of(&root, &Record::newest(&root).unwrap()).unwrap() {
        let is = fs::read_to_string(root.join(&path)).unwrap_or_default();
        assert!(is == content, "{} is not of the record: `cargo run -p aril-bench -- docs` writes it", path.display());
    }
}

#[test]
fn the_same_record_gives_the_same_files() {
    let root = repository();
    let files = || documents::of(&root, &Record::load(&root, "h100").unwrap()).unwrap();
    assert_eq!(files(), files());
}

#[test]
fn the_newest_gpu_is_shown_once_it_has_a_record() {
    let (root, copy) = (repository(), tempfile::tempdir().unwrap());
    let copied = |from: &str, to: &str, edit: &dyn Fn(String) -> String| {
        let to = copy.path().join(to);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::write(to, edit(fs::read_to_string(root.join(from)).unwrap())).unwrap();
    };
    for file in ["README.md", "benches/README.md"] {
        copied(file, file, &|text| text);
    }
    for file in ["linear.json", "moe.json", "layer.json", "others.json"] {
        copied(&format!("benches/record/h100/{file}"), &format!("benches/record/h100/{file}"), &|text| text);
    }
    let text_of = |file: &str| {
        let files = documents::of(copy.path(), &Record::newest(copy.path()).unwrap()).unwrap();
        files.into_iter().find(|(path, _)| path == Path::new(file)).unwrap().1
    };
    assert!(text_of("README.md").contains("One NVIDIA H100 80GB HBM3, linear layers at commit 7fddccc"));

    // The other record has one commit for linear layers and experts, and another one for layers with their GEMM.
    for file in ["linear.json", "moe.json", "layer.json", "others.json"] {
        copied(&format!("benches/record/h100/{file}"), &format!("benches/record/h200/{file}"), &|text| {
            text.replace("H100 80GB HBM3", "H200").replace("644c058", "7fddccc").replace("4b2b527", "abcdef0")
        });
    }
    let parts = "linear layers at commit 7fddccc, experts at commit 7fddccc, base GEMM with LoRA at commit abcdef0";
    assert!(text_of("README.md").contains(&format!("One NVIDIA H200, {parts} (`benches/record/h200`).")));
    assert!(text_of("benches/README.md").contains("One NVIDIA H200, commit 7fddccc (`benches/record/h200`)."));
    assert!(text_of("benches/plots/tokens.svg").contains("NVIDIA H200, commit 7fddccc, benches/record/h200"));
    assert!(text_of("benches/plots/layer.svg").contains("commit abcdef0"));
}

/// A file of a record, as it is.
fn raw(record: &str, file: &str) -> Value {
    let path = repository().join("benches/record").join(record).join(file);
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn entry<'a>(list: &'a Value, id: &str) -> Option<&'a Value> {
    list.as_array()?.iter().find(|entry| entry["id"] == id)
}

/// A layer of Qwen3-8B with its GEMM.
fn with_gemm<'a>(layer: &'a Value, group: &str, rank: usize, tokens: usize) -> Option<&'a Value> {
    entry(&layer["layer"], &format!("layer/qwen3-8b/{group}/r{rank}/t{tokens}/uniform{}", tokens.min(8)))
}

/// The least that another library adds to a layer of Qwen3-8B with as many adapters.
fn least_of_others(others: &Value, group: &str, rank: usize, tokens: usize) -> Option<f64> {
    let mapping = if tokens <= 8 { "distinct" } else { "uniform8" };
    let times = entry(&others["overlap"], &format!("dec/qwen3-8b/{group}/r{rank}/t{tokens}/{mapping}"))?;
    let times = times.as_object()?.iter().filter(|(name, _)| name.ends_with("_us"));
    let (base, others): (Vec<_>, Vec<_>) = times.partition(|(name, _)| *name == "base_us");
    let us = |(_, us): &(&String, &Value)| us.as_f64().unwrap();
    Some(others.iter().map(us).fold(f64::INFINITY, f64::min) - us(&base[0]))
}

fn rate(results: &Value) -> f64 {
    let rate = |name: &str| results["ceilings"][name].as_f64().unwrap();
    rate("hbm_read_GBps").max(rate("hbm_copy_GBps"))
}

/// The features and the slices of a layer of Qwen3-8B.
fn shape(group: &str) -> (usize, Vec<usize>) {
    let list: Value = serde_json::from_str(BUILT_IN).unwrap();
    let entries = list["dense_decode"].as_array().unwrap();
    let of = entries.iter().find(|entry| entry["model"] == "qwen3-8b" && entry["layer"] == group).unwrap();
    let usize = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    (usize(&of["in_features"]), of["out_slices"].as_array().unwrap().iter().map(usize).collect())
}

/// The figures of a list's entries with this id, by the name of the library.
fn us_of<'a>(list: &'a Value, id: &str) -> Vec<(&'a str, f64)> {
    let entries = list.as_array().unwrap().iter().filter(|entry| entry["id"] == id);
    entries.map(|entry| (entry["peer"].as_str().unwrap(), entry["cold_us"].as_f64().unwrap())).collect()
}

fn floor_us(results: &Value, id: &str) -> f64 {
    let bytes: f64 =
        ["w_bytes", "x_bytes", "y_bytes"].iter().map(|key| results["info"][id][key].as_f64().unwrap()).sum();
    (bytes / rate(results) / 1e3).max(0.9)
}

fn is_near(points: &[(f64, f64)], expected: &[(f64, f64)]) -> bool {
    let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
    points.len() == expected.len() && points.iter().zip(expected).all(|(a, b)| near(a.0, b.0) && near(a.1, b.1))
}

fn line<'a>(plot: &'a Plot, panel: usize, name: &str) -> &'a Line {
    plot.panels[panel].lines.iter().find(|line| line.name == name).unwrap()
}

fn plots_of(record: &str) -> [Plot; 3] {
    let record = Record::load(&repository(), record).unwrap();
    plots::of(&record, &Chosen::all().unwrap()).unwrap().try_into().unwrap()
}

#[test]
fn the_plot_of_tokens_has_the_means_of_the_record() {
    let ([plot, ..], linear, others) = (plots_of("h100"), raw("h100", "linear.json"), raw("h100", "others.json"));
    let batches =
        [(1, "distinct"), (4, "distinct"), (8, "distinct"), (16, "uniform8"), (32, "uniform8"), (64, "uniform8")];
    let batches = batches.into_iter().chain([
        (128, "uniform8"),
        (256, "uniform8"),
        (512, "seg8"),
        (2048, "seg8"),
        (8192, "seg8"),
    ]);
    let mut expected = [const { Vec::new() }; 3];
    for (tokens, mapping) in batches {
        let phase = if tokens < 512 { "dec" } else { "pre" };
        let ids = GROUPS.map(|group| format!("{phase}/qwen3-8b/{group}/r16/t{tokens}/{mapping}"));
        let mean = |of: &dyn Fn(&str) -> f64| ids.iter().map(|id| of(id)).product::<f64>().powf(0.25);
        let us = |list: &Value, id: &str| us_of(list, id)[0].1;
        expected[0].push((f64::from(tokens), mean(&|id| us(&linear["dense"], id))));
        expected[1].push((f64::from(tokens), mean(&|id| us(&others["dense"], id))));
        expected[2].push((f64::from(tokens), mean(&|id| floor_us(&linear, id))));
    }
    for (name, expected) in ["aril", "fastest other library", "floor of bytes"].into_iter().zip(&expected) {
        assert!(is_near(&line(&plot, 0, name).points, expected), "{name}: {plot:?} {expected:?}");
    }
}

/// No measured mode of a layer is much faster than the one that the library names: 5 % on the H200, 9 % with a stack, 7 %
/// on the H100.
#[test]
fn the_mode_that_is_called_fastest_is_near_the_best() {
    let chosen = Chosen::all().unwrap();
    let records =
        [("h200", 1.05), ("h100", 1.07)].map(|(folder, most)| (Record::load(&repository(), folder).unwrap(), most));
    let mut modes = BTreeSet::new();
    let layers = records.iter().flat_map(|(record, most)| record.added(&chosen).into_iter().map(move |of| (of, most)));
    for ((workload, added), most) in layers {
        let (model, id) = workload.linear_model().unwrap();
        let (site, capacity) = (&model[id], workload.capacity());
        let fused = ForwardPlan::new(site, DType::BF16, capacity).unwrap();
        let plan = LinearPlan::new(site, DType::BF16, capacity).unwrap();
        // All adapters are in the batch, and the stack has as many positions, of their rank.
        let ranks: usize = workload.ranks.iter().sum();
        let has_stack = added.added_us.contains_key("stacked");
        let rank = workload.ranks.iter().max().copied().filter(|_| has_stack);
        for stack_rank in BTreeSet::from([None, rank]) {
            let mode = plan.fastest_mode(workload.num_tokens(), ranks, Some(&fused), stack_rank);
            let name = format!("{mode:?}").to_lowercase();
            // The record of the H100 has the fused linear of more tokens, which the library has no longer.
            let is_there = |name: &str| match name {
                "within" => false,
                "fused" => workload.num_tokens() <= fused.max_tokens(),
                "stacked" => stack_rank.is_some(),
                _ => true,
            };
            let of_gemm = added.added_us.iter().filter(|(name, _)| is_there(name));
            let least = of_gemm.map(|(_, us)| *us).fold(f64::INFINITY, f64::min);
            let share = (added.gemm_us + added.added_us[&name]) / (added.gemm_us + least);
            let most = if stack_rank.is_some() { 1.09 } else { *most };
            assert!(
                share <= most,
                "{}: {name} takes {share:.3} of the time of the best, {:?}",
                added.id,
                added.added_us
            );
            modes.insert(name);
        }
    }
    assert_eq!(modes.len(), 3, "{modes:?}");
}

/// README.md has the means of whole layers: the GEMM, and what the best arrangement and the best other library add to
/// it.
#[test]
fn the_summary_has_base_gemms_with_lora() {
    for record in RECORDS {
        let (layer, others) = (raw(record, "layer.json"), raw(record, "others.json"));
        let (mut ours, mut floors, mut of_others) = (Vec::new(), Vec::new(), Vec::new());
        for (group, rank, tokens) in GROUPS.into_iter().flat_map(|group| {
            [16, 64].into_iter().flat_map(move |rank| [1, 8, 64, 256].map(|tokens| (group, rank, tokens)))
        }) {
            let entry = with_gemm(&layer, group, rank, tokens).unwrap();
            let (gemm_us, added_us) = (entry["gemm_us"].as_f64().unwrap(), entry["added_us"].as_object().unwrap());
            ours.push(gemm_us + added_us.values().map(|us| us.as_f64().unwrap()).fold(f64::INFINITY, f64::min));
            of_others.push(least_of_others(&others, group, rank, tokens).map(|us| gemm_us + us));
            let (inputs, slices) = shape(group);
            let outputs = slices.iter().sum::<usize>();
            let factors = tokens.min(8) * rank * (slices.len() * inputs + outputs);
            let elems = inputs * outputs + factors + tokens * (inputs + outputs);
            floors.push((2.0 * elems as f64 / rate(&layer) / 1e3).max(0.9));
        }
        let (us, floor_us) = (geometric_mean(ours.iter().copied()), geometric_mean(floors));
        let of_others: Vec<f64> = of_others.into_iter().map(Option::unwrap).collect();
        let faster = ours.iter().zip(&of_others).filter(|(ours, other)| other < ours).count();
        let (other_us, name) = (geometric_mean(of_others), "base GEMM with LoRA, 1 to 256 tokens");
        let row =
            format!("| {name} | 32 | {us:.1} | {floor_us:.1} | {other_us:.1} | {:.2} | {faster} |\n", other_us / us);
        let root = repository();
        let files = documents::of(&root, &Record::load(&root, record).unwrap()).unwrap();
        let (_, readme) = files.iter().find(|(path, _)| path == Path::new("README.md")).unwrap();
        assert!(readme.contains(&row), "{record}: {row} is not in {readme}");
    }
}

#[test]
fn the_plot_of_layers_has_the_percentages_of_the_record() {
    for record in RECORDS {
        let ([_, plot, _], layer, others) = (plots_of(record), raw(record, "layer.json"), raw(record, "others.json"));
        assert_eq!(plot.axis, Axis::Percent);
        for (panel, rank) in [16, 64].into_iter().enumerate() {
            // Sums over the groups, where all have a figure.
            let percentages = |of: &dyn Fn(&str, usize) -> Option<f64>| -> Vec<(f64, f64)> {
                let percent = |tokens: usize| {
                    let added_us: f64 = GROUPS.iter().map(|group| of(group, tokens)).sum::<Option<f64>>()?;
                    let gemm_us = |group: &&str| with_gemm(&layer, group, rank, tokens)?["gemm_us"].as_f64();
                    Some((tokens as f64, 100.0 * added_us / GROUPS.iter().map(gemm_us).sum::<Option<f64>>()?))
                };
                [1, 8, 16, 32, 64, 128, 256, 512, 2048, 4096, 8192].into_iter().filter_map(percent).collect()
            };
            let floor_us = |group: &str, tokens: usize| {
                let (inputs, slices) = shape(group);
                let outputs = slices.iter().sum::<usize>();
                let factors = tokens.min(8) * rank * (slices.len() * inputs + outputs);
                Some((2.0 * (factors + tokens * (inputs + 2 * outputs)) as f64 / rate(&layer) / 1e3).max(0.9))
            };
            let mode = |mode: &str| {
                percentages(&|group, tokens| with_gemm(&layer, group, rank, tokens)?["added_us"].get(mode)?.as_f64())
            };
            let is_at = |points: &[(f64, f64)], tokens: &[f64]| points.iter().map(|point| &point.0).eq(tokens);
            let (fused, other) =
                (mode("fused"), percentages(&|group, tokens| least_of_others(&others, group, rank, tokens)));
            assert!(is_at(&fused[..4], &[1.0, 8.0, 16.0, 32.0]) && is_at(&other, &[1.0, 8.0, 16.0, 64.0, 256.0]));
            assert!(fused[0].1 < 0.0 && fused[fused.len() - 1].1 > fused[fused.len() - 2].1, "{fused:?}");
            let expected = [
                ("aril, behind the GEMM", mode("after")),
                ("aril, before the GEMM", mode("first")),
                ("aril, fused linear", fused),
                ("aril, A as rows of W", mode("stacked")),
                ("fastest other library", other),
                ("floor of bytes", percentages(&floor_us)),
            ];
            let expected: Vec<_> = expected.into_iter().filter(|(_, points)| !points.is_empty()).collect();
            assert!(
                plot.panels[panel].lines.iter().map(|line| &line.name).eq(expected.iter().map(|(name, _)| name)),
                "{record} {rank}"
            );
            for (name, expected) in &expected {
                assert!(is_near(&line(&plot, panel, name).points, expected), "{record} {name} {rank}: {expected:?}");
            }
        }
    }
}

#[test]
fn the_plot_of_experts_has_the_figures_of_the_record() {
    let ([_, _, plot], moe, others) = (plots_of("h100"), raw("h100", "moe.json"), raw("h100", "others.json"));
    for (panel, layout) in ["per_expert", "shared_outer"].into_iter().enumerate() {
        let mut expected = [const { Vec::new() }; 4];
        for tokens in [1, 8, 32, 128, 1024, 4096] {
            let id = format!("moe/{layout}/r16/t{tokens}/a{}", tokens.min(8));
            let other = |is_deltas: bool| {
                let times = us_of(&others["moe"], &id);
                let times = times.iter().filter(|(name, _)| (*name == "sglang_v2_moe") == is_deltas).map(|(_, us)| *us);
                times.fold(f64::INFINITY, f64::min)
            };
            let us = [us_of(&moe["moe"], &id)[0].1, other(false), other(true), floor_us(&moe, &id)];
            expected.iter_mut().zip(us).for_each(|(points, us)| points.push((f64::from(tokens), us)));
        }
        let names = ["aril", "fastest other that adds", "fastest other, deltas only", "floor of bytes"];
        for (name, expected) in names.into_iter().zip(&expected) {
            assert!(is_near(&line(&plot, panel, name).points, expected), "{name}: {plot:?} {expected:?}");
        }
    }
}

/// benches/README.md has chosen other kernels beside ours: means over the layers, and of deltas that are only written
/// the time of the same.
#[test]
fn kernels_of_others_stand_beside_ours_of_the_same_call() {
    let kernels = raw("h200", "kernels.json");
    let root = repository();
    let files = documents::of(&root, &Record::load(&root, "h200").unwrap()).unwrap();
    let (_, shown) = files.iter().find(|(path, _)| path == Path::new("benches/README.md")).unwrap();
    let us = |list: &str, id: &str, name: &str| {
        us_of(&kernels[list], id).into_iter().find_map(|(known, us)| (known == name).then_some(us))
    };
    for (phase, batch, cells) in
        [("dec", "t64/distinct", "decode | 64 | 64 | 16"), ("pre", "t2048/seg8", "prefill | 2048 | 8 | 16")]
    {
        let mean = |name: &str| {
            let of = GROUPS.map(|group| us("dense", &format!("{phase}/qwen3-8b/{group}/r16/{batch}"), name));
            of.into_iter().collect::<Option<Vec<f64>>>().map(geometric_mean)
        };
        let ours = mean("aril").unwrap();
        let other = |name: &str| mean(name).map_or(" | ".into(), |us| format!("{us:.1} | {:.1}", us / ours));
        let row = format!("| {cells} | {ours:.1} | {} | {} |\n", other("mistralrs"), other("pegainfer"));
        assert!(shown.contains(&row), "{row}");
        assert_eq!(mean("pegainfer").is_some(), phase == "dec");
    }
    let id = "moe/per_expert/r16/t4096/a8";
    let [ours, adding, writing_only] =
        ["aril", "mistralrs_moe", "flashinfer_bgmv_moe"].map(|name| us("moe", id, name).unwrap());
    let written = entry(&kernels["moe"], id).unwrap()["write_us"].as_f64().unwrap();
    assert!(ours < adding && format!("{:.1}", writing_only / ours) != format!("{:.1}", writing_only / written));
    let row = format!(
        "| per_expert | 4096 | 8 | 16 | {ours:.1} | {written:.1} | {writing_only:.1} | {:.1} | {adding:.1} | {:.1} |\n",
        writing_only / written,
        adding / ours
    );
    assert!(shown.contains(&row), "{row}");
}

#[test]
fn blocks_are_replaced_and_never_missed() {
    let text = "a\n<!-- record: x -->\nold\n<!-- end -->\nb\n<!-- record: y -->\nkept\n<!-- end -->\n";
    let expected = "a\n<!-- record: x -->\nnew\n<!-- end -->\nb\n<!-- record: y -->\nkept\n<!-- end -->\n";
    assert_eq!(documents::fill(text, "x", "new\n").unwrap(), expected);
    for (text, name) in [(text, "z"), ("<!-- record: x -->\nno end", "x")] {
        assert!(documents::fill(text, name, "").is_err());
    }
}

#[test]
fn the_first_tokens_of_adapters_have_a_table() {
    let first = |beside, source_p50_ms| FirstToken {
        model: "Qwen3-8B".into(),
        rank: 16,
        bytes: 87_293_952,
        prompt: 128,
        beside,
        runs: 20,
        device_p50_ms: 20.0,
        host_p50_ms: 24.25,
        source_p50_ms,
    };
    let run = |first_tokens| Run { first_tokens, ..Run::default() };
    let record = engine::Record { runs: vec![run(vec![first(1, 30.0), first(32, 40.0)]), run(vec![first(1, 31.0)])] };
    let rows = [
        "| Qwen3-8B | 16 | 87 | 128 | 1 | 20.0 | 24.2 | 31.0 |",
        "| Qwen3-8B | 16 | 87 | 128 | 32 | 20.0 | 24.2 | 40.0 |",
    ];
    assert!(record.shown("").contains(&rows.join("\n")), "{}", record.shown(""));
}
