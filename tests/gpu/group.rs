//! Two ranks on one GPU: they load on both or on neither.

use std::{thread, time::Duration};

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cuda::{Buffer, LoraLinear, Matrix, MatrixMut, Routing, WeightTable, Workspace},
    group::{Group, GroupError, GroupPool, InProcess, Phase, Ranks},
    model::{Linear, LinearId, ModelSpec, Parallel},
    plan::Capacity,
    routing::Batch,
};

use crate::device::Gpu;

const RANKS: usize = 2;
const FEATURES: usize = 256;
const SLOT: Slot = Slot::new(1);

/// An adapter that adds a value to all outputs of each rank.
fn adapter(values: [f32; RANKS]) -> Adapter {
    let tensor = |shape: [usize; 2], values: &[f32]| {
        Tensor::new(DType::F32, shape, bytemuck::cast_slice(values).to_vec()).unwrap()
    };
    let b = values.map(|value| [value; FEATURES]).concat();
    let tensors = [("A", [1, FEATURES], &[1.0; FEATURES][..]), ("B", [RANKS * FEATURES, 1], &b)];
    let tensors = tensors.map(|(side, shape, values)| (format!("m.q.lora_{side}.weight"), tensor(shape, values)));
    let config = format!(r#"{{"peft_type": "LORA", "lora_alpha": {}}}"#, 1.0 / FEATURES as f32);
    Adapter::from_tensors(&config, tensors).unwrap()
}

/// What the table adds to each output with the adapter of a slot.
fn delta(gpu: &Gpu, weights: &WeightTable, id: LinearId, slot: Slot) -> f32 {
    let layer = LoraLinear::new(weights, id).unwrap();
    let mut routing = Routing::new(&gpu.queue, weights.capacity(), 1).unwrap();
    let mut workspace = Workspace::new(weights).unwrap();
    let [mut x, mut y] = [(); 2].map(|()| Buffer::zeros(&gpu.queue, FEATURES).unwrap());
    x.write(&[1.0_f32; FEATURES]).unwrap();
    let batch = routing.update(&Batch::new(&[slot])).unwrap();
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    let x = Matrix::new(&x, 1, FEATURES).unwrap();
    layer.add_delta(&mut step, x, MatrixMut::new(&mut y, 1, FEATURES).unwrap()).unwrap();
    let mut added = [f32::NAN; FEATURES];
    y.read(&mut added).unwrap();
    assert_eq!(added, [added[0]; FEATURES]);
    added[0]
}

#[test]
#[ignore = "needs a GPU"]
fn two_ranks_load_on_both_or_on_neither() {
    let mut spec = ModelSpec::new();
    let id = spec.linear(Linear::new("m", Parallel::Column, FEATURES).slice("q", RANKS * FEATURES)).unwrap();
    let (old, bad, new) = (adapter([7.0, 8.0]), adapter([1.0, f32::NAN]), adapter([3.0, 4.0]));
    let run = |ranks: InProcess| {
        let rank = ranks.tp().rank();
        let gpu = Gpu::new();
        let model = spec.shard(ranks.tp()).unwrap();
        let images = [&old, &new].map(|adapter| adapter.plan(&model, DType::F32).unwrap());
        let capacity = Capacity::tokens(1).slots(2).rank(1);
        let table =
            WeightTable::new(&gpu.queue, &model, DType::F32, capacity, WeightTable::arena_bytes(&images)).unwrap();
        let mut group = Group::new(ranks, table.clone()).unwrap();
        assert_eq!(group.free_slot().unwrap(), Slot::new(0));
        group.load(SLOT, 1, || Ok(&old)).unwrap();
        let used = table.usage().used;
        let Err(GroupError::Refused { failures, own }) = group.load(SLOT, 2, || Ok(&bad)) else { unreachable!() };
        assert_eq!(
            failures.iter().map(|failure| (failure.rank, failure.phase)).collect::<Vec<_>>(),
            [(1, Phase::Fill)]
        );
        assert_eq!((own.is_some(), table.usage().used), (rank == 1, used));
        assert_eq!(delta(&gpu, &table, id, SLOT), [7.0, 8.0][rank]);
        let prepared = group.prepare(SLOT, 3, || Ok(&new)).unwrap();
        assert_eq!(delta(&gpu, &table, id, SLOT), [7.0, 8.0][rank]);
        let resident = group.commit(prepared).unwrap();
        table.check([resident]).unwrap();
        assert_eq!(delta(&gpu, &table, id, SLOT), [3.0, 4.0][rank]);
    };
    thread::scope(|scope| {
        for ranks in InProcess::group(RANKS, Duration::from_secs(60)) {
            scope.spawn(|| run(ranks));
        }
    });
}

/// Five adapters in two slots. The second rank has room for one adapter at a time, so that both evict for it.
#[test]
#[ignore = "needs a GPU"]
fn two_ranks_share_their_slots() {
    let mut spec = ModelSpec::new();
    let id = spec.linear(Linear::new("m", Parallel::Column, FEATURES).slice("q", RANKS * FEATURES)).unwrap();
    let values = |version: u64| [version as f32, 10.0 + version as f32];
    let run = |ranks: InProcess| {
        let rank = ranks.tp().rank();
        let gpu = Gpu::new();
        let model = spec.shard(ranks.tp()).unwrap();
        let one = adapter(values(1));
        let image = one.plan(&model, DType::F32).unwrap();
        let capacity = Capacity::tokens(1).slots(2).rank(1);
        let arena_bytes = WeightTable::arena_bytes([&image]) * [4, 1][rank];
        let table = WeightTable::new(&gpu.queue, &model, DType::F32, capacity, arena_bytes).unwrap();
        let mut pool = GroupPool::new(Group::new(ranks, table.clone()).unwrap());
        let mut slots = Vec::new();
        for version in (1..=5).chain([5, 4, 1]) {
            let slot = pool.acquire(version, || Ok(adapter(values(version)))).unwrap();
            assert_eq!(delta(&gpu, &table, id, slot), values(version)[rank]);
            assert!(pool.acquire(9, || Ok(adapter(values(9)))).is_err(), "the second rank has no room beside a lease");
            assert_eq!(delta(&gpu, &table, id, slot), values(version)[rank]);
            pool.release(version).unwrap();
            slots.push(slot);
        }
        slots
    };
    let slots: Vec<Vec<Slot>> = thread::scope(|scope| {
        let ranks = InProcess::group(RANKS, Duration::from_secs(60));
        let threads: Vec<_> = ranks.into_iter().map(|ranks| scope.spawn(|| run(ranks))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(slots[0], slots[1]);
}
