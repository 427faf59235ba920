//! The example `qwen3` on the ranks of a tensor-parallel group, each on a GPU of its own, with NCCL between them. They
//! fail with fewer than two GPUs.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use cudarc::driver::CudaContext;

use crate::{
    files::{self, Files, edit},
    goldens::{self, POOLS, Split},
    moe,
    process::{end, fixture, port, qwen3, start_rank},
};

/// The GPUs, of which there are two at least.
fn gpus() -> usize {
    let count = usize::try_from(CudaContext::device_count().expect("there is a driver")).expect("a count");
    assert!(count >= 2, "ranks need two GPUs, and there is {count}");
    count
}

/// Runs a test, which needs two GPUs, in 16 bits.
fn within_rounding(split: Split) {
    gpus();
    goldens::ranks_reproduce_within_rounding("cuda", split, &["bf16", "f16"]);
}

tests! {
    ignore = "needs two GPUs":
    ranks_reproduce_the_goldens => goldens::ranks_reproduce_the_goldens("cuda", Split::Plain, gpus());
    ranks_with_experts_of_their_own_reproduce_the_goldens =>
        goldens::ranks_reproduce_the_goldens("cuda", Split::ExpertParallel, gpus());
    fully_sharded_ranks_reproduce_the_goldens =>
        goldens::ranks_reproduce_the_goldens("cuda", Split::FullySharded, gpus());
    ranks_reproduce_the_goldens_within_rounding => within_rounding(Split::Plain);
    ranks_with_experts_of_their_own_reproduce_the_goldens_within_rounding => within_rounding(Split::ExpertParallel);
    fully_sharded_ranks_reproduce_the_goldens_within_rounding => within_rounding(Split::FullySharded);
    pools_of_ranks_reproduce_the_goldens => {
        gpus();
        goldens::pools_reproduce_the_goldens("cuda", &POOLS)
    };
    // Also with so many routes that deltas are added before the activation and the combine.
    ranks_with_different_numbers_of_experts_are_one_rank => {
        gpus();
        moe::expert_parallel_ranks_are_one_rank("cuda")
    };
}

#[test]
#[ignore = "needs two GPUs"]
fn ranks_keep_every_bit_of_the_base_model() {
    gpus();
    let moe = ("qwen3-moe", "adapters-moe/per-expert");
    for ((model, adapter), ep) in [(("qwen3", "adapters/r8-all"), None), (moe, None), (moe, Some("--ep"))] {
        let [model, adapter] = [model, adapter].map(|path| fixture(path).display().to_string());
        let adapter = format!("adapter={adapter}");
        let args = ["--device", "cuda", "--tp", "2", "--model", &model, "--adapter", &adapter];
        let output = qwen3(args.into_iter().chain(ep));
        let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{stderr}");
        assert!(stdout.contains("Base model: 1 of 1 requests have the very bits"), "{stdout}");
    }
}

/// A model that takes seconds: the small one's layers eight times over, and no end of a text.
fn long_run(files: &Files) -> Vec<String> {
    let model = files.copy(&fixture("qwen3"), "model");
    edit(&model.join("config.json"), |config| {
        config.insert("num_hidden_layers".into(), 32.into());
        config.remove("eos_token_id");
        config.remove("layer_types");
    });
    let _ = fs::remove_file(model.join("generation_config.json"));
    let path = model.join("model.safetensors");
    let mut tensors = files::read(&path);
    for (name, tensor) in tensors.clone() {
        let Some((layer, rest)) = name.strip_prefix("model.layers.").and_then(|name| name.split_once('.')) else {
            continue;
        };
        let layer: usize = layer.parse().expect("a number");
        for copy in 1..8 {
            tensors.insert(format!("model.layers.{}.{rest}", layer + 4 * copy), tensor.clone());
        }
    }
    files::write(&path, &tensors);
    let adapter = fixture("adapters/r8-all");
    let args = ["--device", "cuda", "--tp", "2", "--tp-seconds", "20", "--max-new-tokens", "450", "--model"];
    let mut args: Vec<String> = args.map(String::from).to_vec();
    args.extend([model.display().to_string(), "--adapter".into(), format!("a={}", adapter.display())]);
    args
}

/// Whenever it dies: while it loads, or in the middle of steps, when the other rank's GPU waits for it.
#[test]
#[ignore = "needs two GPUs"]
fn a_killed_rank_ends_the_others() {
    gpus();
    let files = Files::new();
    let args = long_run(&files);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let start_all = || {
        let port = port();
        [0, 1].map(|rank| start_rank((rank, 2), port, &args))
    };
    // The first run also warms caches.
    let mut whole = Duration::MAX;
    for _ in 0..2 {
        let start = Instant::now();
        for rank in start_all() {
            let (code, _, error) = end(rank);
            assert_eq!(code, Some(0), "{error}");
        }
        whole = start.elapsed();
    }
    println!("processes take {whole:?}");
    let mut ended = 0;
    for share in [0.3, 0.5, 0.6, 0.7, 0.8, 0.9] {
        let [first, mut second] = start_all();
        thread::sleep(whole.mul_f64(share));
        second.kill().expect("it is a child");
        second.wait().expect("it is a child");
        let killed = Instant::now();
        let (code, _, error) = end(first);
        let took = killed.elapsed();
        println!("killed after {share} of the time: {code:?} after {took:?}: {error}");
        // A run may be quicker than the one before.
        assert!(code == Some(2) || code == Some(0) && share > 0.75, "{code:?}: {error}");
        assert!(took < Duration::from_secs(10), "it took {took:?}");
        ended += usize::from(code == Some(2));
    }
    assert!(ended >= 4, "{ended} runs were killed in time");
}
