//! Two ranks on one GPU: they load on both or on neither.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use aril::{
    DType, Slot,
    adapter::Adapter,
    cuda::{AdapterPool, Buffer, LaunchError, LoraLinear, Matrix, MatrixMut, Routing, Tiers, Workspace},
    error::{LoadError, OperandError},
    group::{GroupError, GroupPool, InProcess, Phase, Ranks},
    model::{Linear, LinearId, Model, ModelSpec, Parallel},
    plan::Capacity,
    pool::{AdapterId, Lease, PoolConfig, PoolError, Source, StreamId},
    routing::Batch,
};

use crate::{
    common::adapters::{self, Lora},
    device::Gpu,
};

const RANKS: usize = 2;
const FEATURES: usize = 256;
const STREAM: StreamId = StreamId::FIRST;

type Pool = GroupPool<InProcess, Tiers>;

/// An adapter that adds a value to all outputs of each rank.
fn adapter(values: [f32; RANKS]) -> Adapter {
    let value = |output: usize| values[output / FEATURES] / FEATURES as f32;
    adapters::adapter(&[Lora::linear("m.q", FEATURES, RANKS * FEATURES, 1).of_rows(value)])
}

/// A rank's device, and its part of a column-parallel layer.
struct Rank {
    gpu: Gpu,
    model: Model,
    id: LinearId,
    number: usize,
}

impl Rank {
    fn source(&self, values: [f32; RANKS]) -> Source {
        Source::memory(Arc::new(adapter(values)), &self.model, DType::F32).unwrap()
    }

    /// Checks what a slot adds on this rank.
    fn check(&self, pool: &Pool, slot: Slot, values: [f32; RANKS]) {
        assert_eq!(delta_of(&self.gpu, pool, self.id, slot).unwrap(), values[self.number]);
    }
}

/// Runs each rank on a thread of its own, and returns what they return.
fn on_each_rank<R: Send>(run: impl Fn(InProcess, Rank) -> R + Sync) -> Vec<R> {
    let mut spec = ModelSpec::new();
    let id = spec.linear(Linear::new("m", Parallel::Column, FEATURES).slice("q", RANKS * FEATURES)).unwrap();
    let run = |ranks: InProcess| {
        let rank = Rank { gpu: Gpu::new(), model: spec.shard(ranks.tp()).unwrap(), id, number: ranks.tp().rank() };
        run(ranks, rank)
    };
    thread::scope(|scope| {
        let ranks = InProcess::group(RANKS, Duration::from_secs(60));
        let threads: Vec<_> = ranks.into_iter().map(|ranks| scope.spawn(|| run(ranks))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Unregisters all adapters, and expects that nothing of them is left.
fn finish(mut pool: Pool, ids: impl IntoIterator<Item = AdapterId>) {
    ids.into_iter().for_each(|id| pool.unregister(id).unwrap());
    pool.end_step(STREAM).unwrap();
    while pool.snapshot().resident > 0 {
        pool.poll();
    }
    let snapshot = pool.snapshot();
    assert_eq!((snapshot.device_memory.used, snapshot.host_memory.used), (0, 0));
}

/// What the pool's table adds to each output with the adapter of a slot, or why it refuses the step.
fn delta_of(gpu: &Gpu, pool: &Pool, id: LinearId, slot: Slot) -> Result<f32, LaunchError> {
    let weights = pool.weights(STREAM).unwrap();
    let layer = LoraLinear::new(weights, id).unwrap();
    let mut routing = Routing::new(&gpu.queue, weights.capacity(), 1).unwrap();
    let mut workspace = Workspace::new(weights).unwrap();
    let [mut x, mut y] = [(); 2].map(|()| Buffer::zeros(&gpu.queue, FEATURES).unwrap());
    x.write(&[1.0_f32; FEATURES]).unwrap();
    let batch = routing.update(&Batch::new(&[slot])).unwrap();
    let mut step = pool.step(STREAM, &batch, &mut workspace)?;
    let x = Matrix::new(&x, 1, FEATURES).unwrap();
    layer.add_delta(&mut step, x, MatrixMut::new(&mut y, 1, FEATURES).unwrap()).unwrap();
    let mut added = [f32::NAN; FEATURES];
    y.read(&mut added).unwrap();
    assert_eq!(added, [added[0]; FEATURES]);
    Ok(added[0])
}

/// A rank's part of a pool, with two slots and room for so many adapters on the device and in host memory.
fn pool(gpu: &Gpu, model: &Model, ranks: InProcess, device: usize, host: usize) -> Pool {
    let [device, host] = [device, host].map(|count| AdapterPool::arena_bytes(model, DType::F32, 1, count));
    let capacity = Capacity::tokens(1).slots(2).rank(1);
    let config = PoolConfig::arena_bytes(device).host_bytes(host).poisoning();
    GroupPool::new(ranks, AdapterPool::new(&gpu.queue, model, DType::F32, capacity, config).unwrap()).unwrap()
}

/// Leases an adapter, once it has been read and copies have ended.
fn acquire(pool: &mut Pool, id: AdapterId) -> Result<Lease, PoolError> {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        match pool.acquire(id, STREAM) {
            Err(PoolError::Loading { .. }) => drop(pool.wait(Duration::from_secs(30))),
            result => return result,
        }
        assert!(Instant::now() < end, "nothing loads");
    }
}

fn values(number: u64) -> [f32; RANKS] {
    [number as f32, 10.0 + number as f32]
}

/// Five adapters in two slots and in host memory. The first rank has room for more than the second one, which decides.
#[test]
#[ignore = "needs a GPU"]
fn two_ranks_share_their_slots() {
    let run = |ranks: InProcess, rank: Rank| {
        let mut pool = pool(&rank.gpu, &rank.model, ranks, [4, 2][rank.number], [8, 4][rank.number]);
        let ids: Vec<_> = (0..5).map(|number| pool.register(Ok(rank.source(values(number)))).unwrap()).collect();
        let kept = acquire(&mut pool, ids[0]).unwrap();
        let mut slots = vec![kept.slot()];
        for number in (1..5).chain(1..5).chain([2, 2, 1, 3]) {
            let lease = acquire(&mut pool, ids[usize::try_from(number).unwrap()]).unwrap();
            rank.check(&pool, lease.slot(), values(number));
            rank.check(&pool, kept.slot(), values(0));
            slots.push(lease.slot());
            drop(lease);
            pool.end_step(STREAM).unwrap();
        }
        let stale = slots[slots.len() - 1];
        assert!(matches!(
            delta_of(&rank.gpu, &pool, rank.id, stale),
            Err(LaunchError::Operand(OperandError::NotLeased { slot })) if slot == stale
        ));
        let counters = pool.snapshot().counters;
        assert!(counters.reads >= 5 && counters.evictions >= 8, "{counters:?}");
        // Each rank's pool numbers the copies for itself.
        let numbers: Vec<_> = slots.iter().map(|slot| slot.index()).collect();
        (numbers, counters.reads, counters.copies, counters.evictions)
    };
    let of_ranks = on_each_rank(run);
    assert_eq!(of_ranks[0], of_ranks[1]);
}

/// The second rank cannot pack an adapter, whose copy the first has begun or made. No rank has it, and nothing of it is
/// left.
#[test]
#[ignore = "needs a GPU"]
fn an_adapter_that_one_rank_cannot_pack_is_on_neither() {
    let run = |ranks: InProcess, rank: Rank| {
        let mut pool = pool(&rank.gpu, &rank.model, ranks, 2, 4);
        let ids: Vec<_> = (0..3).map(|number| pool.register(Ok(rank.source(values(number)))).unwrap()).collect();
        let bad = pool.register(Ok(rank.source([1.0, f32::NAN]))).unwrap();
        let kept = acquire(&mut pool, ids[0]).unwrap();
        for number in [1, 2, 1] {
            pool.retry(bad).unwrap();
            let error = acquire(&mut pool, bad).unwrap_err();
            let PoolError::Failed { error, .. } = error else { panic!("{error}") };
            let LoadError::Group(error) = &*error else { panic!("{error}") };
            let GroupError::Refused { failures, own } = &**error else { panic!("{error}") };
            let failures: Vec<_> = failures.iter().map(|failure| (failure.rank, failure.phase)).collect();
            assert_eq!((failures, own.is_some()), (vec![(1, Phase::Fill)], rank.number == 1));
            let lease = acquire(&mut pool, ids[usize::try_from(number).unwrap()]).unwrap();
            rank.check(&pool, lease.slot(), values(number));
            rank.check(&pool, kept.slot(), values(0));
            drop(lease);
            pool.end_step(STREAM).unwrap();
        }
        drop(kept);
        finish(pool, ids.into_iter().chain([bad]));
    };
    on_each_rank(run);
}

/// The ranks have registered two adapters in another order. Each reads and copies its own, and neither is leased.
#[test]
#[ignore = "needs a GPU"]
fn adapters_that_differ_between_ranks_are_on_neither() {
    let run = |ranks: InProcess, rank: Rank| {
        let mut pool = pool(&rank.gpu, &rank.model, ranks, 2, 4);
        let register = |pool: &mut Pool, number| pool.register(Ok(rank.source(values(number)))).unwrap();
        let [kept, other] = [0, 1].map(|number| register(&mut pool, number));
        let mixed = if rank.number == 0 { [2, 3] } else { [3, 2] }.map(|number| register(&mut pool, number));
        let lease = acquire(&mut pool, kept).unwrap();
        for mixed in mixed.into_iter().chain(mixed) {
            pool.retry(mixed).unwrap();
            let error = acquire(&mut pool, mixed).unwrap_err();
            let PoolError::Failed { error, .. } = error else { panic!("{error}") };
            let LoadError::Group(error) = &*error else { panic!("{error}") };
            assert!(matches!(&**error, GroupError::Disagreement { ranks } if ranks.len() == RANKS), "{error}");
            rank.check(&pool, lease.slot(), values(0));
            let beside = acquire(&mut pool, other).unwrap();
            rank.check(&pool, beside.slot(), values(1));
            drop(beside);
            pool.end_step(STREAM).unwrap();
        }
        drop(lease);
        finish(pool, [kept, other].into_iter().chain(mixed));
    };
    on_each_rank(run);
}
