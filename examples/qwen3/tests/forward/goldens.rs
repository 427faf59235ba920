//! The example `qwen3`, on any device, against transformers and PEFT, which ran each batch of `tests/fixtures/goldens`
//! request by request.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock},
};

use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use super::process::{fixture, qwen3};

/// The largest difference from transformers' f32 logits.
pub(crate) const F32_TOLERANCE: f32 = 1e-3;

/// The least by which an effective adapter changes the logits.
pub(crate) const FLOOR: f32 = 0.5;

/// The ones with rows are of adapters with trained rows. The last five are a model with experts, the same with weights in 4 and in 8 bits, and with adapters that change its
/// routers; and one that also has gated delta nets.
pub(crate) const BATCHES: [&str; 11] = [
    "base-only",
    "mixed",
    "one-question",
    "untied",
    "rows",
    "rows-untied",
    "moe",
    "moe-int4",
    "moe-int8",
    "moe-router",
    "hybrid",
];

/// The largest difference of 16-bit logits from transformers' in the same type. The largest measured ones are 0.19 and
/// 0.023, for models with experts on the CPU. Each side's rounding alone may reach these bounds.
fn most_by_rounding(dtype: &str) -> f32 {
    match dtype {
        "bf16" => 0.4,
        "f16" => 0.05,
        other => unreachable!("{other} is not of 16 bits"),
    }
}

/// The batches, and the ranks of groups that their models' heads can be split over. Of 4 or 5 ranks, several have the
/// same kv head.
const RANKS: [(&str, usize); 14] = [
    ("base-only", 2),
    ("mixed", 2),
    ("one-question", 2),
    ("rows", 2),
    ("moe", 2),
    ("moe-int4", 2),
    ("moe-int8", 2),
    ("moe-router", 2),
    ("hybrid", 2),
    ("mixed", 4),
    ("moe", 4),
    ("moe-int4", 4),
    ("untied", 5),
    ("rows-untied", 5),
];

/// The batches of models with 8 experts, and the ranks that these are spread over.
const EXPERT_PARALLEL: [(&str, usize); 7] =
    [("moe", 2), ("moe-int4", 2), ("moe-int8", 2), ("moe-router", 2), ("hybrid", 2), ("moe", 4), ("moe-int4", 4)];

/// How the ranks of a group split a model and its adapters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Split {
    Plain,
    /// Each rank has a part of both factors of each linear layer.
    FullySharded,
    /// Each rank has some of the experts.
    ExpertParallel,
}

impl Split {
    fn switches(self) -> &'static [&'static str] {
        match self {
            Self::Plain => &[],
            Self::FullySharded => &["--fully-sharded-loras"],
            Self::ExpertParallel => &["--ep"],
        }
    }
}

/// The goldens, on groups of up to so many ranks.
pub(crate) fn ranks_reproduce_the_goldens(device: &'static str, split: Split, most: usize) {
    const POOLS: [&[&str]; 2] = [&[], &["--arena-mib", "3"]];
    let plain = || RANKS.into_iter().map(|(batch, ranks)| (batch, ranks, POOLS[0]));
    let of_sharded: [(&str, usize, &[&str]); 3] =
        [("moe", 2, &["--ep"]), ("mixed", 2, POOLS[1]), ("moe", 2, &["--ep", "--arena-mib", "3"])];
    let of_experts = EXPERT_PARALLEL.into_iter().flat_map(|(batch, ranks)| POOLS.map(|pool| (batch, ranks, pool)));
    let runs: Vec<_> = match split {
        Split::Plain => plain().collect(),
        Split::FullySharded => plain().chain(of_sharded).collect(),
        Split::ExpertParallel => of_experts.collect(),
    };
    for (batch, ranks, further) in runs.into_iter().filter(|&(_, ranks, _)| ranks <= most) {
        hold_with(device, batch, "f32", &[&["--tp", &ranks.to_string()], split.switches(), further].concat());
    }
}

/// The goldens in 16 bits, on two ranks.
pub(crate) fn ranks_reproduce_within_rounding(device: &'static str, split: Split, dtypes: &[&str]) {
    let runs = if split == Split::ExpertParallel { &EXPERT_PARALLEL[..] } else { &RANKS };
    for (batch, _) in runs.iter().filter(|&&(_, ranks)| ranks == 2) {
        for dtype in dtypes {
            hold_with(device, batch, dtype, &[&["--tp", "2", "--verify"], split.switches()].concat());
        }
    }
}

/// Runs a batch with further arguments, and holds it to its golden.
fn hold_with(device: &str, batch: &str, dtype: &str, further: &[&str]) {
    let (model, adapters) = models(batch);
    let answers = run_with(device, model, &all_in(adapters), dtype, &requests(batch), further);
    hold(device, batch, dtype, &answers, &golden(batch, dtype));
}

pub(crate) fn reproduces_the_goldens(device: &'static str, dtype: &'static str) {
    for batch in BATCHES {
        hold(device, batch, dtype, &answers(device, batch, dtype), &golden(batch, dtype));
    }
}

/// The requests without an adapter, on a model that never had one.
pub(crate) fn base_models_reproduce_the_goldens(device: &'static str) {
    for batch in BATCHES {
        let (places, requests) = base_requests(batch);
        for dtype in ["f32", "bf16", "f16"] {
            let answers = run(device, models(batch).0, &[], dtype, &requests, true);
            let mut golden: Vec<_> = golden(batch, dtype).into_iter().map(Some).collect();
            let expected: Vec<_> = places.iter().filter_map(|&index| golden[index].take()).collect();
            hold(device, batch, dtype, &answers, &expected);
        }
    }
}

fn hold(device: &str, batch: &str, dtype: &str, answers: &[Answer], expected: &[Answer]) {
    match dtype {
        "f32" => hold_f32(device, batch, answers, expected),
        _ => hold_rounded(device, batch, dtype, answers, expected),
    }
}

pub(crate) fn hold_f32(device: &str, batch: &str, answers: &[Answer], expected: &[Answer]) {
    assert_eq!(answers.len(), expected.len());
    for (index, (answer, golden)) in answers.iter().zip(expected).enumerate() {
        assert_eq!(answer.tokens, golden.tokens, "{batch}, request {index}");
        let difference = largest_difference(&answer.logits, &golden.logits);
        assert!(difference <= F32_TOLERANCE, "{batch}, request {index}: logits differ by {difference}");
    }
    report(device, batch, "f32", answers, expected);
}

/// A token may differ only at a tie, where the golden token leads by less than both sides' rounding.
pub(crate) fn hold_rounded(device: &str, batch: &str, dtype: &str, answers: &[Answer], expected: &[Answer]) {
    assert_eq!(answers.len(), expected.len());
    for (index, (answer, golden)) in answers.iter().zip(expected).enumerate() {
        // Each side differs from the exact logits by at most the tolerance of `--verify`.
        let bound = most_by_rounding(dtype).min(2.0 * answer.tolerance);
        let mut steps = answer.logits.chunks_exact(answer.vocab);
        let mut is_tied = false;
        for (step, theirs) in golden.logits.chunks_exact(golden.vocab).enumerate() {
            let logits = steps.next().unwrap_or_default();
            assert!(!logits.is_empty(), "{batch}.{dtype}, request {index}: no logits of step {step}");
            let difference = largest_difference(logits, theirs);
            assert!(
                difference <= bound,
                "{batch}.{dtype}, request {index}, step {step}: logits differ by {difference}, more than {bound}"
            );
            if answer.tokens.get(step) != golden.tokens.get(step) {
                let lead = lead(theirs);
                assert!(lead <= 2.0 * bound, "{batch}.{dtype}, request {index}, step {step}: a lead of {lead} lost");
                println!("{batch}.{dtype} on {device}, request {index}: a tie at step {step}, {lead} apart");
                // Later tokens belong to another text.
                is_tied = true;
                break;
            }
        }
        assert!(is_tied || answer.tokens == golden.tokens, "{batch}.{dtype}, request {index}: {:?}", answer.tokens);
    }
    report(device, batch, dtype, answers, expected);
}

pub(crate) fn every_adapter_changes_what_the_base_model_says(device: &'static str) {
    for batch in BATCHES {
        let requests = requests(batch);
        let answers = answers(device, batch, "bf16");
        let prompt = |request: &Value| (request["prompt"].clone(), request["token_ids"].clone());
        for (index, request) in requests.iter().enumerate().filter(|(_, request)| !request["adapter"].is_null()) {
            let same = |other: &&Value| other["adapter"].is_null() && prompt(other) == prompt(request);
            let Some(base) = requests.iter().position(|other| same(&other)) else { continue };
            let (answer, base) = (&answers[index], &answers[base]);
            let moved = largest_difference(&answer.logits[..answer.vocab], &base.logits[..base.vocab]);
            assert!(moved > FLOOR, "{batch}, request {index}: its adapter moves the logits by {moved} only");
            assert!(answer.tolerance < moved, "{batch}, request {index}: --verify would miss a missing adapter");
        }
    }
}

pub(crate) fn base_requests_keep_every_bit(device: &'static str, batches: &[&'static str]) {
    for &batch in batches {
        let with = answers(device, batch, "bf16");
        let (base, requests) = base_requests(batch);
        let without = run(device, models(batch).0, &[], "bf16", &requests, false);
        for (index, without) in base.iter().zip(&without) {
            assert!(with[*index].is_identical(without), "{batch}, request {index}");
        }
    }
}

/// Arguments for a pool in which the adapters of the batch `mixed` do not fit together, in f32, and for one on each of
/// two ranks.
pub(crate) const POOL: [&str; 2] = ["--arena-mib", "4"];
pub(crate) const POOLS: [&str; 4] = ["--tp", "2", "--arena-mib", "3"];

/// With a pool, on one rank or on several that have one each, in which the adapters do not fit together.
pub(crate) fn pools_reproduce_the_goldens(device: &'static str, arguments: &[&str]) {
    for batch in ["mixed", "moe"] {
        hold_with(device, batch, "f32", arguments);
    }
}

pub(crate) fn a_scale_multiplies_the_adapters_own(device: &'static str) {
    let ask =
        |adapter: Option<&str>, scale: f32| json!({ "adapter": adapter, "prompt": "Name a fruit.", "scale": scale });
    let requests = [
        ask(None, 1.0),
        ask(Some("r8-all"), 0.0),
        ask(Some("r8-all"), 1.0),
        ask(Some("r8-all"), 2.0),
        json!({ "adapter": "r8-all", "prompt": "Name a fruit." }),
    ];
    let [base, zero, one, two, plain] = &run(device, "qwen3", &all_in("adapters"), "f32", &requests, false)[..] else {
        unreachable!("five requests have five answers")
    };
    assert!(zero.is_identical(base));
    assert!(one.is_identical(plain));
    assert!(largest_difference(&one.logits[..one.vocab], &two.logits[..two.vocab]) > FLOOR);
}

/// The result of a request, or the expected one.
pub(crate) struct Answer {
    pub(crate) tokens: Vec<u32>,
    pub(crate) logits: Vec<f32>,
    pub(crate) vocab: usize,
    /// The report of `--verify`, if it ran.
    pub(crate) tolerance: f32,
}

impl Answer {
    pub(crate) fn is_identical(&self, other: &Self) -> bool {
        let bits = |answer: &Self| answer.logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>();
        self.tokens == other.tokens && bits(self) == bits(other)
    }
}

pub(crate) fn requests(batch: &str) -> Vec<Value> {
    let text = fs::read_to_string(fixture(&format!("goldens/{batch}.json"))).expect("the batch is there");
    serde_json::from_str(&text).expect("the batch is JSON")
}

/// The requests of a batch without an adapter, and their places in it.
fn base_requests(batch: &str) -> (Vec<usize>, Vec<Value>) {
    requests(batch).into_iter().enumerate().filter(|(_, request)| request["adapter"].is_null()).unzip()
}

/// A batch's model and its folder of adapters.
pub(crate) fn models(batch: &str) -> (&'static str, &'static str) {
    match batch {
        "untied" => ("qwen3-untied", "adapters-untied"),
        "rows" => ("qwen3", "adapters-rows"),
        "rows-untied" => ("qwen3-untied", "adapters-rows-untied"),
        "moe" => ("qwen3-moe", "adapters-moe"),
        "moe-int4" => ("qwen3-moe-int4", "adapters-moe"),
        "moe-int8" => ("qwen3-moe-int8", "adapters-moe"),
        "moe-router" => ("qwen3-moe", "adapters-moe-router"),
        "hybrid" => ("qwen3-hybrid", "adapters-hybrid"),
        _ => ("qwen3", "adapters"),
    }
}

/// The example's verified results of a batch. Each batch runs once, for all tests.
pub(crate) fn answers(device: &'static str, batch: &'static str, dtype: &'static str) -> Arc<Vec<Answer>> {
    type Run = Arc<OnceLock<Arc<Vec<Answer>>>>;
    static RUNS: Mutex<BTreeMap<(&str, &str, &str), Run>> = Mutex::new(BTreeMap::new());
    let run_once = RUNS.lock().expect("no test fails here").entry((device, batch, dtype)).or_default().clone();
    let (model, adapters) = models(batch);
    run_once.get_or_init(|| Arc::new(run(device, model, &all_in(adapters), dtype, &requests(batch), true))).clone()
}

/// The adapters in a folder.
pub(crate) fn all_in(folder: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(fixture(folder)).expect("the adapters are there");
    entries.map(|entry| entry.expect("the adapters can be listed").path()).collect()
}

/// Runs the example with these adapters loaded, each under its folder's name.
pub(crate) fn run(
    device: &str,
    model: &str,
    adapters: &[PathBuf],
    dtype: &str,
    requests: &[Value],
    verify: bool,
) -> Vec<Answer> {
    run_with(device, model, adapters, dtype, requests, if verify { &["--verify"] } else { &[] })
}

/// As [`run`], with further arguments.
pub(crate) fn run_with(
    device: &str,
    model: &str,
    adapters: &[PathBuf],
    dtype: &str,
    requests: &[Value],
    further: &[&str],
) -> Vec<Answer> {
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let [requests_file, logits_file] = ["requests.json", "logits.safetensors"].map(|name| dir.path().join(name));
    fs::write(&requests_file, Value::from(requests).to_string()).expect("the requests can be written");
    let mut args: Vec<String> =
        vec!["--device".into(), device.into(), "--model".into(), fixture(model).display().to_string()];
    args.extend(further.iter().map(|&arg| arg.into()));
    args.extend(["--dtype", dtype, "--max-new-tokens", "12", "--requests"].map(String::from));
    args.extend([requests_file.display().to_string(), "--logits".into(), logits_file.display().to_string()]);
    for adapter in adapters {
        let name = adapter.file_name().expect("an adapter has a folder of its own");
        args.extend(["--adapter".into(), format!("{}={}", name.display(), adapter.display())]);
    }
    let output = qwen3(&args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{model} in {dtype} on {device}: {stderr}");

    let logits = read(&fs::read(logits_file).expect("the logits are there"), "request.", "");
    let lines = String::from_utf8(output.stdout).expect("the output is UTF-8");
    let answer = |(line, (vocab, logits)): (&str, (usize, Vec<f32>))| {
        let line: Value = serde_json::from_str(line).expect("each line is JSON");
        let tokens = serde_json::from_value(line["generated_tokens"].clone()).expect("tokens are numbers");
        let tolerance = serde_json::from_value(line["verify"]["tolerance"].clone()).unwrap_or(f32::NAN);
        Answer { tokens, logits, vocab, tolerance }
    };
    lines.lines().zip(logits).map(answer).collect()
}

pub(crate) fn golden(batch: &str, dtype: &str) -> Vec<Answer> {
    golden_in(&fixture(&format!("goldens/{batch}.{dtype}.safetensors")))
}

pub(crate) fn golden_in(path: &Path) -> Vec<Answer> {
    let bytes = fs::read(path).expect("the golden is there");
    let file = SafeTensors::deserialize(&bytes).expect("the golden is whole");
    let answer = |(index, (vocab, logits)): (usize, (usize, Vec<f32>))| {
        let tokens = file.tensor(&format!("request.{index}.tokens")).expect("there are tokens for the logits");
        assert_eq!(tokens.dtype(), Dtype::I64);
        let (tokens, []) = tokens.data().as_chunks() else { unreachable!("i64 take 8 bytes") };
        let tokens = tokens.iter().map(|&token| i64::from_le_bytes(token).try_into().expect("a token id")).collect();
        Answer { tokens, logits, vocab, tolerance: f32::NAN }
    };
    read(&bytes, "request.", ".logits").into_iter().enumerate().map(answer).collect()
}

/// The tensors `{prefix}I{suffix}` for I = 0, 1, ..., each with its columns.
fn read(bytes: &[u8], prefix: &str, suffix: &str) -> Vec<(usize, Vec<f32>)> {
    let file = SafeTensors::deserialize(bytes).expect("the file is whole");
    let tensor = |index: usize| file.tensor(&format!("{prefix}{index}{suffix}")).ok();
    let widen = |tensor: safetensors::tensor::TensorView<'_>| {
        let (shape, data) = (tensor.shape(), tensor.data());
        let values = match tensor.dtype() {
            Dtype::F32 => data.chunks_exact(4).map(bytemuck::pod_read_unaligned::<f32>).collect(),
            Dtype::BF16 => data.chunks_exact(2).map(|v| bytemuck::pod_read_unaligned::<bf16>(v).to_f32()).collect(),
            Dtype::F16 => data.chunks_exact(2).map(|v| bytemuck::pod_read_unaligned::<f16>(v).to_f32()).collect(),
            other => unreachable!("logits are {other:?}"),
        };
        (shape[1], values)
    };
    (0..).map_while(tensor).map(widen).collect()
}

pub(crate) fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    assert!(a.iter().chain(b).all(|logit| logit.is_finite()));
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The lead of the largest logit.
fn lead(logits: &[f32]) -> f32 {
    let mut sorted = logits.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    sorted[0] - sorted[1]
}

/// Visible with `--nocapture`.
fn report(device: &str, batch: &str, dtype: &str, answers: &[Answer], expected: &[Answer]) {
    let difference = answers
        .iter()
        .zip(expected)
        .filter(|(answer, golden)| answer.tokens == golden.tokens)
        .map(|(answer, golden)| largest_difference(&answer.logits, &golden.logits))
        .fold(0.0, f32::max);
    println!("{batch}.{dtype} on {device}: {} requests, logits within {difference:e}", answers.len());
}
