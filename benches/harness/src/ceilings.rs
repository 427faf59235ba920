//! The limits of the device, measured in the same run as the workloads.

use std::collections::BTreeMap;

use crate::{
    Result,
    device::{Function, Gpu, Module},
    report::median,
};

/// Bytes that no cache holds.
const BYTES: usize = 4 << 30;
const BYTES_PER_VECTOR: usize = 16;
const VECTORS_PER_ROUND: usize = 4;
const REPLAYS: usize = 20;

/// Measures rates in GB/s and times in µs, with the names of the common JSON schema.
pub fn measure(gpu: &Gpu) -> Result<BTreeMap<String, f64>> {
    let module = Module::load(include_str!("ceilings.ptx"))?;
    let (empty, read, copy) = (module.function("empty")?, module.function("read")?, module.function("copy")?);
    let (source, target) = (gpu.alloc(BYTES)?, gpu.alloc(BYTES)?);
    let mut ceilings = BTreeMap::new();

    let us = time(gpu, 2, || gpu.copy(target.address, source.address, BYTES))?;
    let memcpy = 2.0 * BYTES as f64 / us / 1e3;
    ceilings.insert("hbm_copy_memcpy_GBps".to_owned(), memcpy);
    let of_kernel = |kernel: &Function| best(gpu, kernel, source.address, target.address);
    ceilings.insert("hbm_copy_GBps".to_owned(), memcpy.max(2.0 * of_kernel(&copy)?));
    ceilings.insert("hbm_read_GBps".to_owned(), of_kernel(&read)?);
    for blocks in [1, 132, 1056] {
        // SAFETY: it takes nothing.
        let us = time(gpu, 500, || unsafe { empty.launch(gpu, blocks, 128, &mut []) })?;
        ceilings.insert(format!("empty_kernel_us_grid{blocks}"), us);
    }
    Ok(ceilings)
}

/// The best rate of `kernel` over a few grids, for one pass over the source.
fn best(gpu: &Gpu, kernel: &Function, source: u64, target: u64) -> Result<f64> {
    let mut best = 0.0_f64;
    for (blocks_per_multiprocessor, threads) in [(8, 256), (4, 512), (16, 128), (32, 256)] {
        let blocks = gpu.num_multiprocessors()? * blocks_per_multiprocessor;
        let round = blocks * threads * VECTORS_PER_ROUND * BYTES_PER_VECTOR;
        let rounds = BYTES / round;
        let mut parameters = [source, rounds as u64, target];
        // SAFETY: the rounds end within both, and the sink is smaller than they are.
        let us = time(gpu, 2, || unsafe { kernel.launch(gpu, blocks, threads, &mut parameters) })?;
        best = best.max((rounds * round) as f64 / us / 1e3);
    }
    Ok(best)
}

/// The median time of one of `count` runs in a graph.
fn time(gpu: &Gpu, count: usize, mut enqueue: impl FnMut() -> Result<()>) -> Result<f64> {
    let graph = gpu.capture(|| (0..count).try_for_each(|_| enqueue()))?;
    Ok(median(&mut gpu.time(&graph, REPLAYS)?) / count as f64)
}
