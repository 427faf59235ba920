//! The parts of the pool's benchmark that need no GPU.

use std::{sync::Arc, time::Duration};

use aril::{
    DType,
    cpu::AdapterPool,
    plan::Capacity,
    pool::{PoolConfig, PoolError, Source, StreamId, Tier},
};
use aril_bench::{
    data::SMALL,
    noise::Noise,
    pool::{Figures, LAYERS, Layers, Load, Memory, Neighbours, Replays, StepCost, Times},
};

/// Elements of the factors of rank 1 in a decoder layer of Qwen3-8B.
const ELEMS: usize = (4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096) + 3 * (4096 + 12288);

#[test]
fn an_adapter_of_rank_16_has_83_mebibytes() {
    let layers = Layers::qwen3_8b(LAYERS);
    let (model, ids) = layers.model().unwrap();
    assert_eq!((ids.len(), model.num_entries()), (LAYERS * 4, LAYERS * 7));
    let bytes = LAYERS * 16 * ELEMS * 2;
    assert_eq!(bytes >> 20, 83);
    let adapter = layers.adapter(16, &Noise::new(1, SMALL, 0.02)).unwrap();
    assert_eq!(adapter.plan(&model, DType::BF16).unwrap().bytes(), bytes);
}

/// The adapter in memory and the one in files are loaded by a pool, with every module.
#[test]
fn a_written_adapter_is_the_one_in_memory() {
    let (layers, noise) = (Layers::qwen3_8b(1), Noise::new(1, SMALL, 0.02));
    let (model, _) = layers.model().unwrap();
    let dir = tempfile::tempdir().unwrap();
    layers.write(8, &noise, dir.path()).unwrap();
    let sources = [
        Source::memory(Arc::new(layers.adapter(8, &noise).unwrap()), &model, DType::BF16).unwrap(),
        Source::directory(dir.path(), &model, DType::BF16).unwrap(),
    ];
    let capacity = Capacity::tokens(1).slots(2).rank(8);
    let mut pool = AdapterPool::new(&model, DType::BF16, capacity, PoolConfig::arena_bytes(8 << 20)).unwrap();
    for source in sources {
        assert_eq!(source.bytes(), 8 * ELEMS * 2);
        let id = pool.register(source).unwrap();
        let lease = loop {
            match pool.acquire(id, StreamId::FIRST) {
                Err(PoolError::Loading { .. }) => drop(pool.wait(Duration::from_secs(10))),
                lease => break lease.unwrap(),
            }
        };
        assert_eq!(pool.residency(id).unwrap().tier, Tier::Device);
        drop(lease);
    }
    assert_eq!(pool.snapshot().counters.read_bytes, 2 * 8 * (ELEMS as u64) * 2);
}

#[test]
fn padded_slots_take_the_largest_rank_each() {
    let memory = Memory::of_qwen3_8b().unwrap();
    assert_eq!((memory.adapters, memory.ranks), (100, [8, 64]));
    assert_eq!(memory.padded_bytes, 100 * LAYERS * 64 * ELEMS * 2);
    // A factor is stored as matrices of 8 by 8 elements.
    let ranks: usize = (0..100_usize).map(|adapter| (8 + adapter * 57 / 100).next_multiple_of(8)).sum();
    assert_eq!(memory.exact_bytes, ranks * LAYERS * ELEMS * 2);
    assert!((memory.ratio() - 6400.0 / ranks as f64).abs() < 1e-9);
}

#[test]
fn figures_survive_their_file_and_show_ratios() {
    let times = Times::new((1..=200).rev().map(f64::from).collect());
    assert_eq!(times, Times { p50_us: 100.0, p99_us: 198.0 });
    let mut figures = Figures::default();
    figures.load.push(Load { from: "host".to_owned(), bytes: 87_000_000, loads: 3, us: 2000.0, copy_us: 1900.0 });
    figures.steps.push(StepCost { resident: 64, leased: 1, steps: 200, times });
    for (beside, p99_us) in Neighbours::ALL.into_iter().zip([198.0, 207.9, 396.0]) {
        let device = Times { p99_us, ..times };
        figures.replays.push(Replays {
            beside,
            replays: 200,
            device,
            host: times,
            copies: 2,
            copied_bytes: 3_000_000_000,
            seconds: 1.5,
        });
    }
    figures.fail("memory", "there is none".to_owned());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool.json");
    figures.save(&path).unwrap();
    let read: Figures = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), serde_json::to_value(&figures).unwrap());
    let tables: Vec<String> = read.tables().iter().map(|table| table.markdown()).collect();
    let [load, steps, replays] = &tables[..] else { unreachable!("memory has no table: {tables:?}") };
    assert!(load.contains("| host | 87.0 | 2000 | 43.50 | 1900 | 0.95 | at least 0.9 |"), "{load}");
    assert!(steps.contains("| 64 | 1 | 100.00 | 198.00 | at most 5 |"), "{steps}");
    assert!(replays.contains("| alone | 100.0 | 198.0 | 1.000 | 100.0 | 198.0 | 1.000 | 2 | 2.0 |  |"), "{replays}");
    assert!(replays.contains("| 207.9 | 1.050 |") && replays.contains("| 396.0 | 2.000 |"), "{replays}");
}
