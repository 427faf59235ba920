//! Two ranks on one GPU: they load on both or on neither.

use std::{cell::RefCell, sync::Arc, thread, time::Duration};

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cuda::{Buffer, LaunchError, LoraLinear, Matrix, MatrixMut, Routing, WeightTable, Workspace},
    error::OperandError,
    group::{Group, GroupError, GroupPool, InProcess, Phase, Ranks},
    model::{Linear, LinearId, ModelSpec, Parallel},
    plan::Capacity,
    pool::{Source, Tier},
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

/// Runs each rank on a thread of its own, and returns what they return.
fn on_each_rank<R: Send>(run: impl Fn(InProcess) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let ranks = InProcess::group(RANKS, Duration::from_secs(60));
        let threads: Vec<_> = ranks.into_iter().map(|ranks| scope.spawn(|| run(ranks))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// What the table adds to each output with the adapter of a slot.
fn delta(gpu: &Gpu, weights: &WeightTable, id: LinearId, slot: Slot) -> f32 {
    added(gpu, weights, id, slot, None).unwrap()
}

/// The same of a pool's table.
fn delta_of(gpu: &Gpu, pool: &GroupPool<InProcess, WeightTable>, id: LinearId, slot: Slot) -> f32 {
    added(gpu, pool.table(), id, slot, Some(pool)).unwrap()
}

fn added(
    gpu: &Gpu,
    weights: &WeightTable,
    id: LinearId,
    slot: Slot,
    pool: Option<&GroupPool<InProcess, WeightTable>>,
) -> Result<f32, LaunchError> {
    let layer = LoraLinear::new(weights, id).unwrap();
    let mut routing = Routing::new(&gpu.queue, weights.capacity(), 1).unwrap();
    let mut workspace = Workspace::new(weights).unwrap();
    let [mut x, mut y] = [(); 2].map(|()| Buffer::zeros(&gpu.queue, FEATURES).unwrap());
    x.write(&[1.0_f32; FEATURES]).unwrap();
    let batch = routing.update(&Batch::new(&[slot])).unwrap();
    let mut step = match pool {
        Some(pool) => pool.step(&batch, &mut workspace)?,
        None => weights.step(&batch, &mut workspace)?,
    };
    let x = Matrix::new(&x, 1, FEATURES).unwrap();
    layer.add_delta(&mut step, x, MatrixMut::new(&mut y, 1, FEATURES).unwrap()).unwrap();
    let mut added = [f32::NAN; FEATURES];
    y.read(&mut added).unwrap();
    assert_eq!(added, [added[0]; FEATURES]);
    Ok(added[0])
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
    on_each_rank(run);
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
        let mut pool = GroupPool::new(Group::new(ranks, table.clone()).unwrap()).unwrap();
        let mut slots = Vec::new();
        for version in (1..=5).chain([5, 4, 1]) {
            let slot = pool.acquire(version, || Ok(adapter(values(version)))).unwrap();
            assert_eq!(delta_of(&gpu, &pool, id, slot), values(version)[rank]);
            assert!(pool.acquire(9, || Ok(adapter(values(9)))).is_err(), "the second rank has no room beside a lease");
            assert_eq!(delta_of(&gpu, &pool, id, slot), values(version)[rank]);
            pool.release(version).unwrap();
            slots.push(slot);
        }
        slots
    };
    let slots = on_each_rank(run);
    assert_eq!(slots[0], slots[1]);
}

/// Five adapters in two slots, which come back from page-locked memory. The first rank's has room for all of them, the second rank's
/// for two. One rank that cannot load an adapter changes neither rank.
#[test]
#[ignore = "needs a GPU"]
fn two_ranks_bring_adapters_back_from_host_memory() {
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
        let arena_bytes = WeightTable::arena_bytes([&image; 3]);
        let table = WeightTable::new(&gpu.queue, &model, DType::F32, capacity, arena_bytes).unwrap();
        let host_bytes = WeightTable::arena_bytes([&image]) * [8, 2][rank];
        let pool = GroupPool::new(Group::new(ranks, table.clone()).unwrap()).unwrap();
        let mut pool = pool.with_host_tier(host_bytes, 2).unwrap();
        let opened = RefCell::new(Vec::new());
        let open = |version| {
            opened.borrow_mut().push(version);
            Ok(adapter(values(version)))
        };
        let kept = pool.acquire(1, || open(1)).unwrap();
        let mut slots = vec![kept];
        for version in (2..=5).chain(2..=5).chain(2..=5) {
            let slot = pool.acquire(version, || open(version)).unwrap();
            assert_eq!(delta_of(&gpu, &pool, id, slot), values(version)[rank], "version {version}");
            assert_eq!(delta_of(&gpu, &pool, id, kept), values(1)[rank], "beside version {version}");
            pool.release(version).unwrap();
            slots.push(slot);
        }
        assert!(pool.host_usage().unwrap().used > 0);
        let again = opened.borrow().len() - 5;
        assert_eq!(again, [0, 8][rank], "{opened:?}");
        assert_eq!(pool.tier(2), [Tier::Host, Tier::Source][rank]);

        // Prefetched beside a step, and opened by no rank.
        let source = |adapter| Source::memory(Arc::new(adapter), &model, DType::F32).unwrap();
        pool.prefetch(6, source(adapter(values(6)))).unwrap();
        let slot = pool.acquire(6, || -> Result<Adapter, _> { unreachable!("it was prefetched") }).unwrap();
        assert_eq!(delta_of(&gpu, &pool, id, slot), values(6)[rank]);
        pool.release(6).unwrap();
        let error = added(&gpu, pool.table(), id, slot, Some(&pool)).unwrap_err();
        assert!(
            matches!(error, LaunchError::Operand(OperandError::NotLeased { slot: stale }) if stale == slot),
            "{error}"
        );
        let error = added(&gpu, pool.table(), id, slot, None).unwrap_err();
        assert!(matches!(error, LaunchError::Operand(OperandError::Pooled)), "{error}");

        // The second rank cannot pack it: while it is loaded, and in a prefetch of this rank alone.
        let (used, bad) = (table.usage().used, |version| adapter([values(version)[0], f32::NAN]));
        for (version, phase) in [(9, Phase::Fill), (10, Phase::Plan)] {
            if phase == Phase::Plan && rank == 1 {
                pool.prefetch(version, source(bad(version))).unwrap();
            }
            let Err(GroupError::Refused { failures, own }) = pool.acquire(version, || Ok(bad(version))) else {
                unreachable!()
            };
            let failures: Vec<_> = failures.iter().map(|failure| (failure.rank, failure.phase)).collect();
            assert_eq!((failures, own.is_some()), (vec![(1, phase)], rank == 1));
            assert_eq!(table.usage().used, used);
            assert_eq!([1, 6, version].map(|version| pool.slot(version)), [Some(kept), Some(slot), None]);
            assert_eq!(pool.acquire(6, || open(6)).unwrap(), slot);
            assert_eq!(
                [kept, slot].map(|slot| delta_of(&gpu, &pool, id, slot)),
                [1, 6].map(|version| values(version)[rank])
            );
            pool.release(6).unwrap();
        }
        slots.push(pool.acquire(10, || open(10)).unwrap());
        assert_eq!(delta_of(&gpu, &pool, id, slot), values(10)[rank]);
        slots
    };
    let slots = on_each_rank(run);
    assert_eq!(slots[0], slots[1]);
}
