//! The example `qwen3` on the ranks of a tensor-parallel group on the CPU: threads of one process, and processes.
//!
//! Where a test needs a rank that fails, the test itself is rank 1.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    process::Child,
    thread,
    time::{Duration, Instant},
};

use safetensors::Dtype;

use super::{
    files::{self, Files},
    forms,
    goldens::{self, POOLS, Split},
    moe,
    process::{END_LIMIT, end, fixture, port, qwen3, start_rank},
};

tests! {
    doc = "On the CPU.":
    ranks_reproduce_the_goldens => goldens::ranks_reproduce_the_goldens("cpu", Split::Plain, 5);
    ranks_with_experts_of_their_own_reproduce_the_goldens =>
        goldens::ranks_reproduce_the_goldens("cpu", Split::ExpertParallel, 4);
    fully_sharded_ranks_reproduce_the_goldens => goldens::ranks_reproduce_the_goldens("cpu", Split::FullySharded, 5);
    ranks_reproduce_the_goldens_within_rounding =>
        goldens::ranks_reproduce_within_rounding("cpu", Split::Plain, &["bf16"]);
    ranks_with_experts_of_their_own_reproduce_the_goldens_within_rounding =>
        goldens::ranks_reproduce_within_rounding("cpu", Split::ExpertParallel, &["bf16"]);
    fully_sharded_ranks_reproduce_the_goldens_within_rounding =>
        goldens::ranks_reproduce_within_rounding("cpu", Split::FullySharded, &["bf16"]);
    pools_of_ranks_reproduce_the_goldens => goldens::pools_reproduce_the_goldens("cpu", &POOLS);
    ranks_with_experts_of_their_own_serve_every_form_of_an_adapter => ["2", "4"].into_iter().for_each(|ranks| {
        forms::every_form_of_an_adapter_gives_the_same("cpu", &[("f32", 0.0)], &["--tp", ranks, "--ep"]);
    });
    ranks_with_different_numbers_of_experts_are_one_rank => moe::expert_parallel_ranks_are_one_rank("cpu");
}

/// Adapters that do not fit together are swapped on all ranks, and one that fits on none is refused.
#[test]
fn pools_of_ranks_have_an_arena_each() {
    let [model, adapters] = ["qwen3", "adapters"].map(fixture);
    let mut args: Vec<String> = ["--tp", "2", "--dtype", "f32", "--model"].map(String::from).to_vec();
    args.push(model.display().to_string());
    for name in ["r64-all", "r16-rslora", "r8-all", "patterns"] {
        args.extend(["--adapter".into(), format!("{name}={}", adapters.join(name).display())]);
    }
    args.push("--arena-mib".into());
    let output = qwen3(args.iter().cloned().chain(["3".into()]));
    let (text, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("2 batches of 5 requests"), "{text}{error}");
    let output = qwen3(args.into_iter().chain(["1".into()]));
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(error.contains("adapter `r64-all`: 1 adapters of ") && error.contains("the arena is 1048576"), "{error}");
}

#[test]
fn ranks_keep_every_bit_of_the_base_model() {
    let [model, adapter] = ["qwen3", "adapters/r8-all"].map(|path| fixture(path).display().to_string());
    let output = qwen3(["--tp", "2", "--model", &model, "--adapter", &format!("a={adapter}"), "--verify"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("bf16 on cpu and 2 ranks"), "{text}");
    assert!(text.contains("1 of 1 requests have the very bits"), "{text}");
}

#[test]
fn a_model_that_cannot_be_split_is_refused_once() {
    let output = qwen3(["--tp", "3", "--model", &fixture("qwen3").display().to_string()]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(stderr.matches("4 heads, which cannot be split over 3 ranks").count(), 1, "{stderr}");
}

/// Only the second rank's rows of B have a value that is too large for f16.
#[test]
fn an_adapter_that_one_rank_cannot_load_ends_all() {
    let files = Files::new();
    let adapter = files.copy(&fixture("adapters/r4-qv"), "adapter");
    let path = adapter.join("adapter_model.safetensors");
    let mut tensors = files::read(&path);
    let (_, (dtype, _, bytes)) = tensors.iter_mut().find(|(name, _)| name.contains("q_proj.lora_B")).expect("there is");
    assert_eq!(*dtype, Dtype::F32);
    let last = bytes.len() - size_of::<f32>();
    bytes[last..].copy_from_slice(&1e6_f32.to_le_bytes());
    files::write(&path, &tensors);
    let [model, adapter] = [fixture("qwen3"), adapter].map(|path| path.display().to_string());
    let output = qwen3(["--tp", "2", "--dtype", "f16", "--model", &model, "--adapter", &format!("damaged={adapter}")]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &*output.stdout), (Some(2), &[][..]));
    assert!(stderr.contains("rank 0: rank 1: left the group; rank 1: adapter `damaged`: "), "{stderr}");
}

#[test]
fn processes_are_ranks() {
    let port = port();
    let ranks: Vec<Child> = (0..2).map(|rank| start(rank, port, &["--verify"])).collect();
    let outputs: Vec<(Option<i32>, String, String)> = ranks.into_iter().map(end).collect();
    let [(first, text, first_error), (second, nothing, second_error)] = &outputs[..] else { unreachable!("two ranks") };
    assert_eq!((first, second), (&Some(0), &Some(0)), "{first_error}{second_error}");
    assert!(text.contains("2 ranks") && text.contains("passes"), "{text}");
    assert_eq!(nothing, "");
}

/// An arena that is too small for a rank's part of one factor and all of the other.
#[test]
fn fully_sharded_ranks_hold_a_part_of_both_factors() {
    let [model, adapter] = ["qwen3", "adapters/r64-all"].map(|path| fixture(path).display().to_string());
    let adapter = format!("a={adapter}");
    let args = ["--tp", "2", "--dtype", "f32", "--arena-mib", "2", "--model", &model, "--adapter", &adapter];
    refuse(&args, "adapter `a`: 1 adapters of ", "the arena is 2097152");
    let output = qwen3(args.into_iter().chain(["--fully-sharded-loras"]));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
}

#[test]
fn the_small_models_with_experts_run_with_experts_on_their_ranks() {
    let output = qwen3(["--tp", "2", "--ep", "--verify"]);
    let (text, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}{error}");
    assert!(text.starts_with("qwen3-moe: "), "{text}");
    assert!(["int4", "hybrid"].iter().all(|name| text.contains(name)), "{text}");
    assert_eq!(text.matches("bf16 on cpu and 2 ranks, each with some of the experts").count(), 3, "{text}");
    assert_eq!(text.matches("2 of 2 requests have the very bits").count(), 3, "{text}");
}

#[test]
fn splits_that_cannot_be_are_refused() {
    let model = fixture("qwen3").display().to_string();
    refuse(&["--tp", "2", "--ep", "--model", &model], "--ep: ", "has no experts");
    for switch in ["--ep", "--fully-sharded-loras"] {
        refuse(&[switch], "the following required arguments were not provided: --tp <N>", "");
    }
    moe::fewer_experts_than_ranks_are_refused();
}

fn refuse(args: &[&str], beginning: &str, end: &str) {
    let output = qwen3(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains(beginning) && stderr.trim_end().ends_with(end), "{stderr}");
}

#[test]
fn ranks_that_split_the_model_differently_are_refused() {
    let model = fixture("qwen3-moe").display().to_string();
    let args = ["--device", "cpu", "--tp", "2", "--max-new-tokens", "2", "--model", &model];
    for switch in ["--ep", "--fully-sharded-loras"] {
        let (port, of_ranks) = (port(), [vec![], vec![switch]]);
        let start = |(rank, own): (usize, &Vec<&str>)| start_rank((rank, 2), port, &[&args[..], own].concat());
        let ranks: Vec<Child> = of_ranks.iter().enumerate().map(start).collect();
        for (code, _, error) in ranks.into_iter().map(end) {
            assert_eq!(code, Some(2));
            let refusal = format!("rank 1 was started with {switch}, and rank 0 without it");
            assert!(error.contains(&refusal), "{error}");
        }
    }
}

#[test]
fn a_rank_that_does_not_come_ends_the_others() {
    let (code, _, error) = end(start(0, port(), &["--tp-seconds", "1"]));
    assert_eq!(code, Some(2));
    assert!(error.contains("rank 1 has not come within 1s"), "{error}");
}

#[test]
fn a_rank_of_another_group_is_refused() {
    let port = port();
    let first = start(0, port, &[]);
    let _stranger = come(port, 1, 3);
    let (code, _, error) = end(first);
    assert_eq!(code, Some(2));
    assert!(error.contains("a process came as rank 1 of 3"), "{error}");
}

/// In the middle of a step: after it has sent its part of an all-reduce, and before it has taken the sum.
#[test]
fn a_rank_that_dies_ends_the_others() {
    let port = port();
    let first = start(0, port, &[]);
    let mut second = come(port, 1, 2);
    exchange(&mut second);
    drop(second);
    let (code, _, error) = end(first);
    assert_eq!(code, Some(2));
    assert!(error.contains("rank 1: left the group"), "{error}");
}

#[test]
fn a_rank_that_hangs_ends_the_others() {
    let port = port();
    let first = start(0, port, &["--tp-seconds", "1"]);
    let mut second = come(port, 1, 2);
    exchange(&mut second);
    let (code, _, error) = end(first);
    assert_eq!(code, Some(2));
    assert!(error.contains("rank 1: no answer within the time limit"), "{error}");
}

#[test]
fn ranks_that_do_different_things_are_told() {
    let port = port();
    let first = start(0, port, &[]);
    let mut second = come(port, 1, 2);
    second.write_all(&[3_u64.to_le_bytes().as_slice(), b"abc"].concat()).expect("rank 0 listens");
    let (code, _, error) = end(first);
    assert_eq!(code, Some(2));
    assert!(error.contains("rank 1: of another size than"), "{error}");
}

/// Sends the zeros that rank 1 has as its switches, as the rank of its adapters and as its part of the embedding of the
/// first prompt, and drops the answers.
fn exchange(second: &mut TcpStream) {
    // The tokens of the default request, each of 64 features in bf16.
    let prompt = 7 * 64 * 2;
    for len in [2, 8, prompt] {
        second.write_all(&(len as u64).to_le_bytes()).expect("rank 0 listens");
        second.write_all(&vec![0; len]).expect("rank 0 listens");
        let mut answer = vec![0; 2 * (8 + len)];
        second.read_exact(&mut answer).expect("rank 0 answers");
    }
}

/// Starts a process as a rank of two.
fn start(rank: usize, port: u16, further: &[&str]) -> Child {
    let model = fixture("qwen3").display().to_string();
    let args = ["--device", "cpu", "--tp", "2", "--max-new-tokens", "2", "--model", &model];
    start_rank((rank, 2), port, &[&args[..], further].concat())
}

/// Comes to rank 0 as a rank.
fn come(port: u16, rank: u64, size: u64) -> TcpStream {
    let start = Instant::now();
    let mut stream = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(error) => assert!(start.elapsed() < END_LIMIT, "rank 0 does not listen: {error}"),
        }
        thread::sleep(Duration::from_millis(10));
    };
    stream.write_all(&[rank.to_le_bytes(), size.to_le_bytes()].concat()).expect("rank 0 listens");
    stream
}
