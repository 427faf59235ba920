//! The host memory that packing an adapter needs, beyond the mapped files.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    fs::{self, File},
    io::{BufWriter, Write},
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use aril::{
    DType,
    adapter::{Adapter, MIN_STAGING_BYTES},
    cpu::{AdapterPool, WeightTable},
    model::{Experts, ModelSpec, TpRank},
    plan::Capacity,
    pool::{PoolConfig, Source},
};
use half::bf16;
use serde_json::json;

/// Counts the allocated bytes and their maximum.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator, counted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's obligations.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's obligations.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `f` and returns how far the allocated bytes rose above those before.
fn peak(f: impl FnOnce()) -> usize {
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    f();
    PEAK.load(Ordering::Relaxed) - before
}

// Qwen3-30B-A3B's sizes, with fewer experts.
const EXPERTS: usize = 32;
const HIDDEN: usize = 2048;
const INTER: usize = 768;
const RANK: usize = 16;

const PATH: &str = "model.layers.0.mlp.experts";

/// Writes an adapter of bf16 tensors with different values, and returns its bytes of weights.
fn write(dir: &Path, tensors: &[(String, [usize; 2])]) -> usize {
    let config = json!({"peft_type": "LORA", "lora_alpha": 32, "peft_version": "0.19.1"});
    fs::write(dir.join("adapter_config.json"), config.to_string()).unwrap();
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (key, [rows, cols]) in tensors {
        let begin = end;
        end += rows * cols * DType::BF16.bytes();
        let info = json!({"dtype": "BF16", "shape": [rows, cols], "data_offsets": [begin, end]});
        header.insert(format!("base_model.model.{PATH}.{key}.weight"), info);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = BufWriter::new(File::create(dir.join("adapter_model.safetensors")).unwrap());
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let mut seed = 1_u32;
    for _ in 0..end / DType::BF16.bytes() {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let value = f32::from(u8::try_from(seed >> 24).unwrap()) - 128.0;
        file.write_all(&bf16::from_f32(value).to_le_bytes()).unwrap();
    }
    file.flush().unwrap();
    end
}

fn per_expert() -> Vec<(String, [usize; 2])> {
    let modules = [("gate_proj", HIDDEN, INTER), ("up_proj", HIDDEN, INTER), ("down_proj", INTER, HIDDEN)];
    let pair = |(expert, (name, input, output)): (usize, (&str, usize, usize))| {
        let path = format!("{expert}.{name}");
        [(format!("{path}.lora_A"), [RANK, input]), (format!("{path}.lora_B"), [output, RANK])]
    };
    (0..EXPERTS).flat_map(|expert| modules.map(|module| (expert, module))).flat_map(pair).collect()
}

fn parameters() -> Vec<(String, [usize; 2])> {
    let pair = |path: &str, input, output| {
        let rank = RANK * EXPERTS;
        [(format!("{path}lora_A"), [rank, input]), (format!("{path}lora_B"), [output, rank])]
    };
    [pair("base_layer.", HIDDEN, 2 * INTER), pair("", INTER, HIDDEN)].into_iter().flatten().collect()
}

fn assert_peaks(tensors: &[(String, [usize; 2])]) {
    let dir = tempfile::tempdir().unwrap();
    let bytes = write(dir.path(), tensors);
    let mut spec = ModelSpec::new();
    spec.experts(Experts::new(PATH, EXPERTS, HIDDEN, INTER)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();

    let mut done = 0;
    let streamed = peak(|| {
        // SAFETY: nobody modifies the files.
        let adapter = unsafe { Adapter::map(dir.path()) }.unwrap();
        let image = adapter.plan(&model, DType::BF16).unwrap();
        let mut staging = vec![0; MIN_STAGING_BYTES];
        for piece in image.pieces(staging.len()) {
            assert_eq!(piece.range().start, done);
            done = piece.range().end;
            piece.write_to(&mut staging[..piece.range().len()]).unwrap();
        }
        assert_eq!(done, image.bytes());
    });
    assert_eq!(done, bytes, "the block is as large as the adapter");
    assert!(streamed < bytes / 5, "{streamed} bytes for an adapter of {bytes}");

    let before = LIVE.load(Ordering::Relaxed);
    let table = WeightTable::new(&model, DType::BF16, Capacity::tokens(1).slots(1).rank(RANK), bytes).unwrap();
    let mut progress = Vec::with_capacity(16);
    let loaded = peak(|| {
        // SAFETY: nobody modifies the files.
        let adapter = unsafe { Adapter::map(dir.path()) }.unwrap();
        let image = adapter.plan(&model, DType::BF16).unwrap();
        table.load_with_progress(0, &image, |done| progress.push(done)).unwrap();
    });
    assert!(progress.len() > 1 && progress.is_sorted_by(|a, b| a < b), "{progress:?} of {bytes}");
    assert_eq!(progress.last(), Some(&bytes));
    assert!((bytes..bytes * 6 / 5).contains(&loaded), "{loaded} bytes for an adapter of {bytes}");
    drop(table);
    let left = LIVE.load(Ordering::Relaxed).saturating_sub(before);
    assert!(left < bytes / 100, "{left} bytes are left of an adapter of {bytes}");
}

/// What a pool has packed is freed with its place in host memory.
fn assert_pool_frees() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = write(dir.path(), &per_expert());
    let mut spec = ModelSpec::new();
    spec.experts(Experts::new(PATH, EXPERTS, HIDDEN, INTER)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(1).slots(1).rank(RANK);
    let mut pool = AdapterPool::new(&model, DType::BF16, capacity, PoolConfig::arena_bytes(2 * bytes)).unwrap();
    let before = LIVE.load(Ordering::Relaxed);
    let live = || LIVE.load(Ordering::Relaxed).saturating_sub(before);
    let id = pool.register(Source::directory(dir.path(), &model, DType::BF16).unwrap()).unwrap();
    let load = pool.prefetch(id).unwrap();
    assert!(pool.wait_for(&load, Duration::from_secs(30)).unwrap());
    assert!(live() >= bytes, "{} bytes for an adapter of {bytes}", live());
    pool.unregister(id).unwrap();
    assert!(live() < bytes / 10, "{} bytes are left of an adapter of {bytes}", live());
}

/// A single test, because the counter includes all threads.
#[test]
fn packing_takes_little_more_than_the_block() {
    assert_peaks(&per_expert());
    assert_peaks(&parameters());
    assert_pool_frees();
}
