//! The time on the host of a step's leases and its end, while all its adapters are on the device.

use std::{sync::Arc, time::Instant};

use aril::{
    DType,
    cuda::AdapterPool,
    plan::Capacity,
    pool::{AdapterId, PoolConfig, Source, StreamId},
};
use aril_bench::{
    Result,
    data::SMALL,
    device::Gpu,
    noise::Noise,
    pool::{Figures, Layers, StepCost, Times},
};

use crate::{lease, room};

const RANK: usize = 8;
const RESIDENT: [usize; 3] = [1, 64, 1000];
const LEASED: [usize; 2] = [1, 8];
const WARM_UP: usize = 500;
const STEPS: usize = 5000;

pub(crate) fn measure(gpu: &Gpu, figures: &mut Figures) -> Result<()> {
    let (layers, noise) = (Layers::small(), Noise::new(1, SMALL, 0.02));
    let (model, _) = layers.model()?;
    let source = Source::memory(Arc::new(layers.adapter(RANK, &noise)?), &model, DType::BF16)?;
    for resident in RESIDENT {
        let capacity = Capacity::tokens(8).slots(resident).rank(RANK);
        let config = PoolConfig::arena_bytes(room(&model, &source, resident));
        let mut pool = AdapterPool::new(&gpu.queue()?, &model, DType::BF16, capacity, config)?;
        let ids = (0..resident).map(|_| Ok(pool.register(source.clone())?)).collect::<Result<Vec<_>>>()?;
        ids.iter().try_for_each(|&id| pool.prefetch(id).map(drop))?;
        // The first lease of an adapter on a stream is followed by a copy of its descriptors.
        for &id in &ids {
            drop(lease(&mut pool, &[id])?);
            pool.end_step(StreamId::FIRST)?;
        }
        gpu.synchronize()?;
        pool.poll();
        let on_device = pool.snapshot().resident;
        if on_device != resident {
            return Err(format!("{on_device} of {resident} adapters are on the device").into());
        }
        for leased in LEASED.into_iter().filter(|&leased| leased <= resident) {
            let times = Times::new(time(&mut pool, &ids, leased)?);
            figures.steps.push(StepCost { resident, leased, steps: STEPS, times });
        }
    }
    Ok(())
}

/// The times of steps that lease `leased` adapters in turn, in µs.
fn time(pool: &mut AdapterPool, ids: &[AdapterId], leased: usize) -> Result<Vec<f64>> {
    let mut us = Vec::with_capacity(STEPS);
    let mut turn = ids.iter().copied().cycle();
    for number in 0..WARM_UP + STEPS {
        let batch: Vec<AdapterId> = turn.by_ref().take(leased).collect();
        let start = Instant::now();
        step(pool, &batch)?;
        let time = start.elapsed();
        if number >= WARM_UP {
            us.push(time.as_secs_f64() * 1e6);
        }
    }
    Ok(us)
}

fn step(pool: &mut AdapterPool, batch: &[AdapterId]) -> Result<()> {
    match batch {
        [id] => drop(pool.acquire(*id, StreamId::FIRST)?),
        ids => drop(pool.prepare(ids, StreamId::FIRST)?),
    }
    Ok(pool.end_step(StreamId::FIRST)?)
}
