//! The example `qwen3` on experts, on any device: packed weights against their unpacked values, and models of odd sizes.

use std::{
    fs,
    path::{Path, PathBuf},
    slice,
};

use half::bf16;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use safetensors::Dtype;
use serde_json::{Value, json};

use super::{
    files::{Files, Tensors, edit, read, write},
    goldens::{F32_TOLERANCE, FLOOR, all_in, largest_difference, requests, run, run_with},
    process::{fixture, qwen3},
};

/// Adapters change the logits of a model in 4 or 8 bits as they change those of its unpacked weights. The two bases are
/// equal, so the rounding of the weights is the only difference from the original model.
///
/// On the CPU they are bit-identical, because both multiply the same numbers in the same order: the tolerance is 0.
pub(crate) fn packed_weights_differ_by_their_rounding_alone(device: &str, tolerance: f32) {
    for (bits, least) in [(4, 10.0 * F32_TOLERANCE), (8, F32_TOLERANCE)] {
        differs_by_rounding_alone(bits, least, device, tolerance);
    }
}

/// Rounding to so many bits moves the logits by `least` or more.
fn differs_by_rounding_alone(bits: usize, least: f32, device: &str, tolerance: f32) {
    let files = Files::new();
    let model = fixture(&format!("qwen3-moe-int{bits}"));
    let unpacked = files.copy(&model, "unpacked");
    unpack(&unpacked, Packing { bits, group: 32 });
    let (with, adapters) = (requests(&format!("moe-int{bits}")), all_in("adapters-moe"));
    let without: Vec<Value> = with.iter().map(without_adapter).collect();
    let logits = |model: &Path, requests: &[Value]| {
        let answers = run(device, &model.display().to_string(), &adapters, "f32", requests, false);
        answers.into_iter().map(|answer| answer.logits[..answer.vocab].to_vec()).collect::<Vec<_>>()
    };
    let deltas = |model: &Path| {
        let [with, without] = [&with, &without].map(|requests| logits(model, requests));
        let subtract = |(a, b): (&Vec<f32>, &Vec<f32>)| a.iter().zip(b).map(|(a, b)| a - b).collect::<Vec<f32>>();
        let deltas: Vec<Vec<f32>> = with.iter().zip(&without).map(subtract).collect();
        (deltas, without)
    };
    let (packed, base) = deltas(&model);
    let (plain, plain_base) = deltas(&unpacked);
    for (index, request) in with.iter().enumerate() {
        let differences =
            [(&packed, &plain), (&base, &plain_base)].map(|(a, b)| largest_difference(&a[index], &b[index]));
        assert!(differences.iter().all(|&difference| difference <= tolerance), "request {index}: {differences:?}");
        let moved = packed[index].iter().fold(0.0, |moved: f32, delta| moved.max(delta.abs()));
        assert!(
            request["adapter"].is_null() || moved > FLOOR,
            "request {index}: its adapter moves the logits by {moved}"
        );
    }
    let rounded = largest_difference(&base[0], &logits(&fixture("qwen3-moe"), &without)[0]);
    assert!(rounded > least, "rounding to {bits} bits moves the logits by {rounded} only");
    println!("{bits} bits on {device}: rounding moves the logits by up to {rounded}, and no adapter's delta otherwise");
}

/// Groups of large models' sizes, several steps of a kernel each. Without an adapter, and with one of all experts.
pub(crate) fn groups_of_128_are_what_they_unpack_to(device: &str, tolerance: f32) {
    for bits in [4, 8] {
        groups_are_what_they_unpack_to(Packing { bits, group: 128 }, device, tolerance);
    }
}

fn groups_are_what_they_unpack_to(packing: Packing, device: &str, tolerance: f32) {
    let files = Files::new();
    let sizes = Sizes { hidden: 256, inter: 128, experts: 5, top_k: 3 };
    let model = files.random_model("packed", sizes, Some(packing));
    let unpacked = files.copy(Path::new(&model), "unpacked");
    unpack(&unpacked, packing);
    let adapter = files.adapter("adapter", sizes);
    let adapted = questions().into_iter().map(|mut request| {
        request["adapter"] = json!("adapter");
        request
    });
    let requests: Vec<Value> = questions().into_iter().chain(adapted).collect();
    let [packed, plain] = [model, unpacked.display().to_string()]
        .map(|model| run(device, &model, slice::from_ref(&adapter), "f32", &requests, false));
    for (index, (packed, plain)) in packed.iter().zip(&plain).enumerate() {
        let difference = largest_difference(&packed.logits, &plain.logits);
        assert!(difference <= tolerance, "request {index}: {difference}");
    }
    let (base, adapted) = packed.split_at(requests.len() / 2);
    for (base, adapted) in base.iter().zip(adapted) {
        let [base, adapted] = [base, adapted].map(|answer| &answer.logits[..answer.vocab]);
        let moved = largest_difference(base, adapted);
        assert!(moved > 10.0 * F32_TOLERANCE, "the adapter moves the logits by {moved} only");
    }
}

/// Random models whose sizes are not multiples of the kernels' tiles, or several tiles large. In 16 bits every token
/// has all experts, because rounding could otherwise change the router's choice. The CPU has no tiles: there, many experts
/// are a few.
pub(crate) fn experts_are_those_of_the_cpu(device: &str) {
    let many = if device == "cpu" { 13 } else { 130 };
    let cases = [
        (Sizes { hidden: 72, inter: 40, experts: 3, top_k: 2 }, None),
        (Sizes { hidden: 33, inter: 17, experts: 7, top_k: 1 }, None),
        (Sizes { hidden: 64, inter: 96, experts: many, top_k: 8 }, None),
        (Sizes { hidden: 256, inter: 128, experts: 5, top_k: 3 }, Some(Packing { bits: 4, group: 128 })),
        (Sizes { hidden: 96, inter: 160, experts: 9, top_k: 4 }, Some(Packing { bits: 4, group: 32 })),
        (Sizes { hidden: 96, inter: 160, experts: 9, top_k: 4 }, Some(Packing { bits: 8, group: 32 })),
    ];
    for (sizes, packing) in cases {
        for dtype in ["f32", "bf16", "f16"] {
            let top_k = if dtype == "f32" { sizes.top_k } else { sizes.experts };
            let sizes = Sizes { top_k, ..sizes };
            let files = Files::new();
            let model = files.random_model("model", sizes, packing);
            let here = run(device, &model, &[], dtype, &questions(), true);
            if device == "cpu" {
                // `--verify` has checked it.
                continue;
            }
            let cpu = run("cpu", &model, &[], dtype, &questions(), true);
            for (index, (here, cpu)) in here.iter().zip(&cpu).enumerate() {
                // A random model's greedy tokens soon diverge.
                let [a, b] = [here, cpu].map(|answer| &answer.logits[..answer.vocab]);
                let difference = largest_difference(a, b);
                let bound = if dtype == "f32" { F32_TOLERANCE } else { 2.0 * here.tolerance };
                assert!(difference <= bound, "{sizes:?} {packing:?} {dtype}, request {index}: {difference} > {bound}");
            }
        }
    }
}

/// Models whose experts two ranks cannot share evenly, with an adapter of all experts: the logits of one rank. Also
/// where a rank has a single expert, and in 4 and 8 bits.
pub(crate) fn expert_parallel_ranks_are_one_rank(device: &str) {
    let cases = [
        (Sizes { hidden: 72, inter: 40, experts: 3, top_k: 2 }, None),
        (Sizes { hidden: 64, inter: 17, experts: 2, top_k: 1 }, None),
        (Sizes { hidden: 64, inter: 96, experts: 131, top_k: 8 }, None),
        (Sizes { hidden: 96, inter: 160, experts: 9, top_k: 4 }, Some(Packing { bits: 4, group: 32 })),
        (Sizes { hidden: 96, inter: 160, experts: 9, top_k: 4 }, Some(Packing { bits: 8, group: 32 })),
    ];
    for (sizes, packing) in cases {
        let files = Files::new();
        let (model, adapter) = (files.random_model("model", sizes, packing), files.adapter("adapter", sizes));
        let requests: Vec<Value> = questions().into_iter().flat_map(|request| both(&request)).collect();
        let [ranks, one] = [&["--tp", "2", "--ep"][..], &[]]
            .map(|further| run_with(device, &model, slice::from_ref(&adapter), "f32", &requests, further));
        for (index, (ranks, one)) in ranks.iter().zip(&one).enumerate() {
            // A random model's greedy tokens soon diverge.
            let [a, b] = [ranks, one].map(|answer| &answer.logits[..answer.vocab]);
            let difference = largest_difference(a, b);
            assert!(difference <= F32_TOLERANCE, "{sizes:?} {packing:?}, request {index}: {difference}");
        }
        for answers in ranks.chunks_exact(2) {
            let [base, adapted] = [&answers[0], &answers[1]].map(|answer| &answer.logits[..answer.vocab]);
            let moved = largest_difference(base, adapted);
            assert!(moved > 10.0 * F32_TOLERANCE, "{sizes:?}: the adapter moves the logits by {moved} only");
        }
    }
}

/// A request without and with the adapter.
fn both(request: &Value) -> [Value; 2] {
    let mut adapted = request.clone();
    adapted["adapter"] = json!("adapter");
    [request.clone(), adapted]
}

pub(crate) fn fewer_experts_than_ranks_are_refused() {
    let files = Files::new();
    let model = files.random_model("model", Sizes { hidden: 64, inter: 32, experts: 1, top_k: 1 }, None);
    let requests = files.0.path().join("requests.json");
    fs::write(&requests, r#"[{"token_ids": [1]}]"#).expect("the requests can be written");
    let output = qwen3(["--tp", "2", "--ep", "--model", &model, "--requests", &requests.display().to_string()]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let refusal = "model.layers.0.mlp.experts: 1 experts cannot be spread over 2 ranks, each of which needs one";
    assert_eq!(stderr.matches(refusal).count(), 1, "{stderr}");
}

fn without_adapter(request: &Value) -> Value {
    let mut request = request.clone();
    request["adapter"] = Value::Null;
    request
}

/// Prompts of 1 token and of more than one tile of a kernel.
fn questions() -> Vec<Value> {
    [1, 7, 90].map(|len| json!({ "token_ids": (0..len).map(|i| i * 7 % VOCAB).collect::<Vec<_>>() })).to_vec()
}

const VOCAB: usize = 48;

/// The bits of an integer, and the elements that share a scale.
#[derive(Clone, Copy, Debug)]
struct Packing {
    bits: usize,
    group: usize,
}

#[derive(Clone, Copy, Debug)]
struct Sizes {
    hidden: usize,
    inter: usize,
    experts: usize,
    top_k: usize,
}

impl Files {
    /// A random model of two layers with experts, whose linear layers may be packed.
    fn random_model(&self, name: &str, sizes: Sizes, packing: Option<Packing>) -> String {
        let Sizes { hidden, inter, experts, top_k } = sizes;
        let dir = self.copy(&fixture("qwen3-moe-int4"), name);
        edit(&dir.join("config.json"), |config| {
            let fields = [
                ("vocab_size", VOCAB),
                ("hidden_size", hidden),
                ("num_hidden_layers", 2),
                ("decoder_sparse_step", 1),
                ("num_attention_heads", 2),
                ("num_key_value_heads", 1),
                ("head_dim", 32),
                ("num_local_experts", experts),
                ("num_experts_per_tok", top_k),
                ("moe_intermediate_size", inter),
            ];
            config.extend(fields.map(|(field, size)| (field.into(), json!(size))));
            config.insert("layer_types".into(), Value::Null);
            config.insert("norm_topk_prob".into(), json!(false));
            config.insert("eos_token_id".into(), Value::Null);
            match packing {
                Some(Packing { bits, group }) => {
                    let weights = &mut config["quantization_config"]["config_groups"]["group_0"]["weights"];
                    weights["num_bits"] = json!(bits);
                    weights["group_size"] = json!(group);
                }
                None => drop(config.remove("quantization_config")),
            }
        });
        fs::remove_file(dir.join("generation_config.json")).expect("it was there");
        let mut random = Random { rng: StdRng::seed_from_u64(1), tensors: Tensors::new() };
        random.plain("model.embed_tokens", &[VOCAB, hidden], 1.0);
        random.plain("model.norm", &[hidden], 1.0);
        for layer in (0..2).map(|layer| format!("model.layers.{layer}")) {
            for (norm, len) in [("input_layernorm", hidden), ("post_attention_layernorm", hidden)] {
                random.plain(&format!("{layer}.{norm}"), &[len], 1.0);
            }
            for norm in ["q_norm", "k_norm"] {
                random.plain(&format!("{layer}.self_attn.{norm}"), &[32], 1.0);
            }
            for (module, out) in [("q_proj", 64), ("k_proj", 32), ("v_proj", 32)] {
                random.linear(
                    &format!("{layer}.self_attn.{module}"),
                    [out, hidden],
                    packing.filter(|packing| hidden % packing.group == 0),
                );
            }
            let packing_of_o = packing.filter(|packing| 64 % packing.group == 0);
            random.linear(&format!("{layer}.self_attn.o_proj"), [hidden, 64], packing_of_o);
            random.linear(&format!("{layer}.mlp.gate"), [experts, hidden], None);
            for expert in (0..experts).map(|expert| format!("{layer}.mlp.experts.{expert}")) {
                for module in ["gate_proj", "up_proj"] {
                    random.linear(&format!("{expert}.{module}"), [inter, hidden], packing);
                }
                random.linear(&format!("{expert}.down_proj"), [hidden, inter], packing);
            }
        }
        write(&dir.join("model.safetensors"), &random.tensors);
        dir.display().to_string()
    }

    /// A random adapter of all experts and routers of such a model.
    fn adapter(&self, name: &str, Sizes { hidden, inter, experts, .. }: Sizes) -> PathBuf {
        const RANK: usize = 4;
        let dir = self.0.path().join(name);
        fs::create_dir(&dir).expect("the folder can be made");
        let config = json!({ "peft_type": "LORA", "r": RANK, "lora_alpha": RANK });
        fs::write(dir.join("adapter_config.json"), config.to_string()).expect("the configuration can be written");
        let mut random = Random { rng: StdRng::seed_from_u64(2), tensors: Tensors::new() };
        for layer in 0..2 {
            for (module, input, output) in
                [("gate_proj", hidden, inter), ("up_proj", hidden, inter), ("down_proj", inter, hidden)]
            {
                let path = format!("model.layers.{layer}.mlp.experts.{module}");
                random.plain(&format!("{path}.lora_A"), &[experts, RANK, input], 1.0 / (input as f32).sqrt());
                random.plain(&format!("{path}.lora_B"), &[experts, output, RANK], 0.5);
            }
            let router = format!("model.layers.{layer}.mlp.gate");
            random.plain(&format!("{router}.lora_A"), &[RANK, hidden], 1.0 / (hidden as f32).sqrt());
            random.plain(&format!("{router}.lora_B"), &[experts, RANK], 0.5);
        }
        write(&dir.join("adapter_model.safetensors"), &random.tensors);
        dir
    }
}

struct Random {
    rng: StdRng,
    tensors: Tensors,
}

impl Random {
    fn plain(&mut self, module: &str, shape: &[usize], size: f32) {
        let len: usize = shape.iter().product();
        let values = (0..len).flat_map(|_| bf16::from_f32(self.rng.random_range(-size..size)).to_le_bytes());
        let values = values.collect();
        self.tensors.insert(format!("{module}.weight"), (Dtype::BF16, shape.to_vec(), values));
    }

    fn linear(&mut self, module: &str, [rows, cols]: [usize; 2], packing: Option<Packing>) {
        let size = 2.0 / (cols as f32).sqrt();
        let Some(Packing { bits, group }) = packing else { return self.plain(module, &[rows, cols], size) };
        self.plain(module, &[rows, cols / group], size / (1 << (bits - 1)) as f32);
        let (_, scales) = self.tensors.remove_entry(&format!("{module}.weight")).expect("it was just put there");
        self.tensors.insert(format!("{module}.weight_scale"), scales);
        let width = cols * bits / 32;
        let words = (0..rows * width).flat_map(|_| self.rng.random::<u32>().to_le_bytes()).collect();
        self.tensors.insert(format!("{module}.weight_packed"), (Dtype::I32, vec![rows, width], words));
        let shape = [rows, cols].iter().flat_map(|size| (*size as u64).to_le_bytes()).collect();
        self.tensors.insert(format!("{module}.weight_shape"), (Dtype::I64, vec![2], shape));
    }
}

/// Replaces packed weights by the same numbers in `f32`.
fn unpack(dir: &Path, Packing { bits, group }: Packing) {
    edit(&dir.join("config.json"), |config| drop(config.remove("quantization_config")));
    let path = dir.join("model.safetensors");
    let mut plain = Tensors::new();
    let packed = read(&path);
    for (name, (dtype, shape, bytes)) in &packed {
        let Some(module) = name.strip_suffix(".weight_packed") else {
            if name.ends_with(".weight") {
                plain.insert(name.clone(), (*dtype, shape.clone(), bytes.clone()));
            }
            continue;
        };
        let scales = &packed[&format!("{module}.weight_scale")].2;
        let value = |i: usize| {
            let integer = match bits {
                4 => i16::from(bytes[i / 2] >> (4 * (i % 2)) & 0xf) - 8,
                _ => i16::from(bytes[i]) - 128,
            };
            let scale = bf16::from_le_bytes([scales[i / group * 2], scales[i / group * 2 + 1]]);
            f32::from(integer) * scale.to_f32()
        };
        let values = (0..bytes.len() * 8 / bits).flat_map(|i| value(i).to_le_bytes()).collect();
        plain.insert(format!("{module}.weight"), (Dtype::F32, vec![shape[0], shape[1] * 32 / bits], values));
    }
    write(&path, &plain);
}
