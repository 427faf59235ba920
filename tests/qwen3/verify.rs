//! `--verify` of the example `qwen3`, as its users see it.

use std::fs;

use half::bf16;
use safetensors::Dtype;
use serde_json::json;

use crate::{
    files::{Files, Tensors, read, write},
    process::{fixture, qwen3},
};

/// An adapter that takes away nearly all of what the head says: what is left is smaller than the rounding of what is taken away,
/// which the merged model never rounds.
#[test]
fn a_run_that_fails_ends_with_status_1_and_says_so() {
    const LEFT: f32 = 1.0 / 256.0;
    let files = Files::new();
    let (_, shape, embedding) = read(&fixture("qwen3/model.safetensors"))["model.embed_tokens.weight"].clone();
    let [vocab, hidden] = shape[..] else { unreachable!("{shape:?}") };
    let f32s = |values: Vec<f32>| bytemuck::cast_slice(&values).to_vec();
    let weights = embedding.chunks_exact(2).map(|bytes| bytemuck::pod_read_unaligned::<bf16>(bytes).to_f32());
    let b = f32s(weights.map(|weight| weight * (LEFT - 1.0)).collect());
    let a = f32s((0..hidden * hidden).map(|i| if i % (hidden + 1) == 0 { 1.0 } else { 0.0 }).collect());
    let tensors = [("A", vec![hidden, hidden], a), ("B", vec![vocab, hidden], b)];
    let tensors = tensors.map(|(factor, shape, bytes)| {
        (format!("base_model.model.lm_head.lora_{factor}.weight"), (Dtype::F32, shape, bytes))
    });
    let dir = files.0.path().join("adapter");
    fs::create_dir(&dir).expect("the folder can be made");
    write(&dir.join("adapter_model.safetensors"), &Tensors::from(tensors));
    let config = json!({ "peft_type": "LORA", "r": hidden, "lora_alpha": hidden });
    fs::write(dir.join("adapter_config.json"), config.to_string()).expect("the configuration can be written");
    let requests = files.0.path().join("requests.json");
    let asked = json!([{ "prompt": "Name a fruit." }, { "adapter": "a", "prompt": "Name a fruit." }]);
    fs::write(&requests, asked.to_string()).expect("the requests can be written");

    let [model, requests] = [fixture("qwen3"), requests].map(|path| path.display().to_string());
    let adapter = format!("a={}", dir.display());
    let run = |dtype: &str| {
        let args = ["--model", &model, "--adapter", &adapter, "--requests", &requests, "--dtype", dtype, "--verify"];
        let output = qwen3(args);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, stderr) = run("bf16");
    let lines: Vec<&str> = stderr.lines().filter(|line| line.starts_with("verify: request ")).collect();
    assert_eq!(lines.len(), 2, "{stderr}");
    assert!(lines[0].ends_with(": passes"), "{stderr}");
    assert!(lines[1].ends_with(": FAILS"), "{stderr}");
    assert_eq!(status, Some(1), "{stderr}");
}
