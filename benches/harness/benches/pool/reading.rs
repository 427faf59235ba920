//! The limits of a load from files: what it takes to check a directory, to read its file from the page cache, and to
//! pack what is in memory, without a device.

use std::{fs::File, io, os::unix::fs::FileExt as _, path::Path, time::Instant};

use aril::{DType, adapter::Adapter, cuda::PinnedBuffer};
use aril_bench::{
    Result,
    data::SMALL,
    device::Gpu,
    noise::Noise,
    pool::{Figures, LAYERS, Layers, Reading},
    report::median,
};
use rayon::{ThreadPoolBuilder, prelude::*};

use crate::packers;

const RANK: usize = 16;
const RUNS: usize = 20;
/// Bytes of a read, which stay in a cache of the core.
const READ_BYTES: usize = 128 << 10;

pub(crate) fn measure(gpu: &Gpu, figures: &mut Figures) -> Result<()> {
    let (layers, noise) = (Layers::qwen3_8b(LAYERS), Noise::new(1, SMALL, 0.02));
    let (model, _) = layers.model()?;
    let dir = tempfile::tempdir()?;
    layers.write(RANK, &noise, dir.path())?;
    let file = dir.path().join("adapter_model.safetensors");
    let adapter = layers.adapter(RANK, &noise)?;
    let image = adapter.plan(&model, DType::BF16)?;
    let queue = gpu.queue()?;
    let mut packed = PinnedBuffer::<u8>::zeros(&queue, image.bytes())?;
    // SAFETY: nobody modifies the files.
    let open_us = time(|| Ok(unsafe { Adapter::map(dir.path()) }.map(drop)?))?;
    let plan_us = time(|| Ok(adapter.plan(&model, DType::BF16).map(drop)?))?;
    let mut threads: Vec<usize> = [1, 4, 8].into_iter().filter(|&threads| threads < packers()).collect();
    threads.push(packers());
    for threads in threads {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build()?;
        let read_us = time(|| Ok(pool.install(|| read(&file))?))?;
        let block = packed.elements()?;
        let pack_us = time(|| Ok(pool.install(|| image.write_to(block))?))?;
        figures.reading.push(Reading { threads, bytes: image.bytes(), open_us, plan_us, read_us, pack_us });
    }
    Ok(())
}

/// The median time of some runs after a first one, in µs.
fn time(mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    run()?;
    let mut us = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        let start = Instant::now();
        run()?;
        us.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(median(&mut us))
}

/// Reads a file on rayon's threads, each into memory of its own.
fn read(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
    let starts: Vec<usize> = (0..len).step_by(READ_BYTES).collect();
    starts.into_par_iter().try_for_each_init(
        || vec![0; READ_BYTES],
        |buffer, start| file.read_exact_at(&mut buffer[..READ_BYTES.min(len - start)], start as u64),
    )
}
