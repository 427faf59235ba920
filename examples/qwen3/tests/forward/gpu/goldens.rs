//! The example `qwen3` on CUDA against transformers and PEFT. `--verify` also checks each run.
//!
//! On a machine without the repository, `ARIL_QWEN3_BIN` and `ARIL_FIXTURES` name the example and its fixtures
//! (`process.rs`).

use cudarc::driver::result;

use super::device::Gpu;
use crate::{
    forms, goldens, hybrid, moe,
    process::{fixture, qwen3},
};

const DEVICE: &str = "cuda";

tests! {
    ignore = "needs a GPU":
    f32_reproduces_the_goldens => goldens::reproduces_the_goldens(DEVICE, "f32");
    bf16_reproduces_the_goldens => goldens::reproduces_the_goldens(DEVICE, "bf16");
    f16_reproduces_the_goldens => goldens::reproduces_the_goldens(DEVICE, "f16");
    base_models_reproduce_the_goldens => goldens::base_models_reproduce_the_goldens(DEVICE);
    every_adapter_changes_what_the_base_model_says => goldens::every_adapter_changes_what_the_base_model_says(DEVICE);
    // For batches without adapters only: cuBLASLt's bits depend on the shape of the batch.
    base_requests_keep_every_bit_whatever_adapters_are_there =>
        goldens::base_requests_keep_every_bit(DEVICE, &["base-only"]);
    a_scale_multiplies_the_adapters_own => goldens::a_scale_multiplies_the_adapters_own(DEVICE);
    a_pool_reproduces_the_goldens => goldens::pools_reproduce_the_goldens(DEVICE, &goldens::POOL);
    packed_weights_differ_by_their_rounding_alone =>
        moe::packed_weights_differ_by_their_rounding_alone(DEVICE, goldens::F32_TOLERANCE);
    groups_of_128_are_what_they_unpack_to => moe::groups_of_128_are_what_they_unpack_to(DEVICE, goldens::F32_TOLERANCE);
    experts_are_those_of_the_cpu => moe::experts_are_those_of_the_cpu(DEVICE);
    the_text_part_of_a_larger_model_is_the_same => hybrid::the_text_part_of_a_larger_model_is_the_same(DEVICE, 0.0);
    every_form_of_an_adapter_gives_the_same =>
        forms::every_form_of_an_adapter_gives_the_same(DEVICE, &[("f32", goldens::F32_TOLERANCE)], &[]);
}

/// The example repeats batches with adapters on a model that never had one, and reports what is equal.
#[test]
#[ignore = "needs a GPU"]
fn base_requests_keep_every_bit_beside_adapters() {
    let models = [
        ("qwen3", "adapters/r8-all"),
        ("qwen3-moe", "adapters-moe/per-expert"),
        ("qwen3-hybrid", "adapters-hybrid/delta-net"),
    ];
    for (model, adapter) in models {
        let [model, adapter] = [model, adapter].map(|path| fixture(path).display().to_string());
        let adapter = format!("adapter={adapter}");
        for dtype in ["bf16", "f16", "f32"] {
            let output = qwen3(["--device", DEVICE, "--dtype", dtype, "--model", &model, "--adapter", &adapter]);
            let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(output.status.success(), "{stderr}");
            assert!(stdout.contains("Base model: 1 of 1 requests have the very bits"), "{stdout}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn without_arguments_every_small_model_runs_and_verifies() {
    let output = qwen3(["--device", DEVICE, "--verify"]);
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    for model in ["qwen3: ", "qwen3-moe: ", "qwen3-moe-int4: ", "qwen3-hybrid: "] {
        assert!(stdout.lines().any(|line| line.starts_with(model)), "{stdout}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_device_that_is_not_there_is_refused() {
    let output = qwen3(["--device", "cuda:99", "--model", &fixture("qwen3").display().to_string()]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("cuda:99: there is no such device"), "{stderr}");
}

/// Memory runs out at any point of a run.
#[test]
#[ignore = "needs a GPU"]
fn a_full_gpu_is_refused() {
    let gpu = Gpu::new();
    let (mut held, mut bytes) = (Vec::new(), 1_usize << 36);
    while bytes >= 1 << 20 {
        // SAFETY: a context is current, and the memory is freed below.
        match unsafe { result::malloc_sync(bytes) } {
            Ok(address) => held.push(address),
            Err(_) => bytes /= 2,
        }
    }
    let output = qwen3(["--device", DEVICE, "--model", &fixture("qwen3").display().to_string()]);
    gpu.stream.synchronize().unwrap();
    for address in held {
        // SAFETY: allocated above and unused.
        unsafe { result::free_sync(address) }.unwrap();
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("not enough memory") && !stderr.contains("panicked"), "{stderr}");
}
