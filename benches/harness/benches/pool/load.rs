//! The time from a prefetch until the copy of the adapter's lease has run on the device.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use aril::{
    DType,
    adapter::Adapter,
    cuda::{AdapterPool, Buffer, PinnedBuffer, Readback},
    plan::Capacity,
    pool::{AdapterId, PoolConfig, Source, StreamId},
};
use aril_bench::{
    Result,
    data::SMALL,
    device::Gpu,
    noise::Noise,
    pool::{EXPERT_LAYERS, Figures, LAYERS, Layers, Load},
    report::median,
};

use crate::{lease, packers, room};

const RANK: usize = 16;
const COPIES: usize = 40;
const READS: usize = 10;
/// Less than what the link to the device has.
const LINK_BYTES_PER_S: f64 = 20e9;

/// Adapters of rank 16: of the linear layers of Qwen3-8B, and of the experts of Qwen3-30B-A3B.
pub(crate) fn measure(gpu: &Gpu, figures: &mut Figures) -> Result<()> {
    measure_of(Layers::qwen3_8b(LAYERS), "", gpu, figures)?;
    measure_of(Layers::qwen3_30b_a3b(EXPERT_LAYERS), ", experts", gpu, figures)
}

/// The pool's device holds one adapter, so that each load evicts the one before.
fn measure_of(layers: Layers, of: &str, gpu: &Gpu, figures: &mut Figures) -> Result<()> {
    let noise = Noise::new(1, SMALL, 0.02);
    let (model, _) = layers.model()?;
    let dir = tempfile::tempdir()?;
    layers.write(RANK, &noise, dir.path())?;
    let memory = Source::memory(Arc::new(layers.adapter(RANK, &noise)?), &model, DType::BF16)?;
    // Just written, and read once before the timed loads: the files are in the page cache.
    let disk = Source::directory(dir.path(), &model, DType::BF16)?;

    let capacity = Capacity::tokens(1).slots(1).rank(RANK);
    let config =
        PoolConfig::arena_bytes(room(&model, &memory, 1)).host_bytes(room(&model, &memory, 3)).packers(packers());
    let queue = gpu.queue()?;
    let mut pool = AdapterPool::new(&queue, &model, DType::BF16, capacity, config)?;
    let mut plain = PlainCopy {
        from: PinnedBuffer::zeros(&queue, memory.bytes())?,
        on_device: Buffer::zeros(&queue, memory.bytes())?,
        to: Buffer::zeros(&queue, memory.bytes())?,
        bytes: memory.bytes(),
    };
    plain.time(gpu)?;

    let pair = [pool.register(memory.clone())?, pool.register(memory.clone())?];
    for id in pair {
        time(gpu, &mut pool, id)?;
    }
    let reads = pool.snapshot().counters.reads;
    let (mut us, mut copy_us) = (Vec::new(), Vec::new());
    for copy in 0..COPIES {
        copy_us.push(plain.time(gpu)?);
        us.push(time(gpu, &mut pool, pair[copy % 2])?);
    }
    if pool.snapshot().counters.reads != reads {
        return Err("an adapter was not in the host tier".into());
    }
    figures.load.push(plain.compare(format!("host{of}"), us, copy_us));

    let device = on_device(layers, RANK, &noise, &Readback::new(&queue)?)?;
    let device = Source::memory(Arc::new(device), &model, DType::BF16)?;
    for (from, source) in [("memory", &memory), ("disk", &disk), ("device", &device)] {
        let (mut us, mut copy_us) = (Vec::new(), Vec::new());
        time_unread(gpu, &mut pool, source)?;
        for _ in 0..READS {
            copy_us.push(if from == "device" {
                // The host's copy of the slot before, which the next packing would wait for.
                thread::sleep(Duration::from_secs_f64(source.bytes() as f64 / LINK_BYTES_PER_S));
                plain.time_on_device(gpu)?
            } else {
                plain.time(gpu)?
            });
            us.push(time_unread(gpu, &mut pool, source)?);
        }
        figures.load.push(plain.compare(format!("{from}{of}"), us, copy_us));
    }
    Ok(())
}

/// An adapter in device memory.
pub(crate) fn on_device(layers: Layers, rank: usize, noise: &Noise, readback: &Readback) -> Result<Adapter> {
    layers.adapter_of(rank, noise, |shape, values| {
        let mut buffer = Buffer::zeros(readback.queue(), values.len())?;
        buffer.write(values)?;
        Ok(readback.tensor(&buffer, shape)?)
    })
}

/// The time of a load in µs.
fn time(gpu: &Gpu, pool: &mut AdapterPool, id: AdapterId) -> Result<f64> {
    gpu.synchronize()?;
    let start = Instant::now();
    pool.prefetch(id)?;
    let leases = lease(pool, &[id])?;
    gpu.synchronize()?;
    let us = start.elapsed().as_secs_f64() * 1e6;
    drop(leases);
    pool.end_step(StreamId::FIRST)?;
    Ok(us)
}

/// The time of a load of an adapter that the host tier does not have, in µs.
fn time_unread(gpu: &Gpu, pool: &mut AdapterPool, source: &Source) -> Result<f64> {
    let id = pool.register(source.clone())?;
    let us = time(gpu, pool, id)?;
    pool.unregister(id)?;
    Ok(us)
}

/// A copy of an adapter's size from page-locked memory to the device, or on it.
struct PlainCopy {
    from: PinnedBuffer<u8>,
    on_device: Buffer<u8>,
    to: Buffer<u8>,
    bytes: usize,
}

impl PlainCopy {
    /// The time of a copy on the host, in µs.
    fn time(&mut self, gpu: &Gpu) -> Result<f64> {
        gpu.synchronize()?;
        let start = Instant::now();
        self.to.enqueue_write(&mut self.from, self.bytes)?;
        gpu.synchronize()?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    }

    fn time_on_device(&mut self, gpu: &Gpu) -> Result<f64> {
        let queue = gpu.queue()?;
        gpu.synchronize()?;
        let start = Instant::now();
        queue.copy(&self.on_device, &mut self.to)?;
        gpu.synchronize()?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    }

    fn compare(&self, from: String, mut us: Vec<f64>, mut copy_us: Vec<f64>) -> Load {
        let (loads, us, copy_us) = (us.len(), median(&mut us), median(&mut copy_us));
        Load { from, bytes: self.bytes, loads, us, copy_us }
    }
}
