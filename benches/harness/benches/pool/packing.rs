//! The time to pack factors that are in device memory into a slot, against a plain copy of as many bytes on the device.

use std::{iter, time::Instant};

use aril::{
    DType,
    cuda::{Buffer, Factors, Matrix, WeightTable},
    model::{LinearId, Model},
    plan::Capacity,
};
use aril_bench::{
    Result,
    device::Gpu,
    pool::{Figures, LAYERS, Layers, Load},
    report::median,
};
use half::bf16;

const LOADS: usize = 40;

/// Adapters of Qwen3-8B, row-major in bf16. The call takes time beside the packing, which the larger rank shows.
pub(crate) fn measure(gpu: &Gpu, figures: &mut Figures) -> Result<()> {
    let (model, ids) = Layers::qwen3_8b(LAYERS).model()?;
    for rank in [16, 64] {
        figures.load.push(pack(gpu, &model, &ids, rank)?);
    }
    Ok(())
}

fn pack(gpu: &Gpu, model: &Model, ids: &[LinearId], rank: usize) -> Result<Load> {
    let queue = gpu.queue()?;
    let capacity = Capacity::tokens(1).slots(1).rank(rank);
    let arena = WeightTable::arena_bytes_for(model, DType::BF16, capacity);
    let weights = WeightTable::new(&queue, model, DType::BF16, capacity, arena)?;
    let slices = || ids.iter().flat_map(|&id| iter::repeat(id).zip(0..model[id].slices().len()));
    let elems = |(id, slice): (LinearId, usize)| {
        [model[id].in_features(), model[id].slices()[slice].out_features()].map(|features| rank * features)
    };
    let total: usize = slices().map(|module| elems(module).iter().sum::<usize>()).sum();
    let factors = Buffer::<bf16>::zeros(&queue, total)?;
    let mut copy = Buffer::<bf16>::zeros(&queue, total)?;
    let mut modules = Vec::new();
    let mut begin = 0;
    for (layer, slice) in slices() {
        let [a, b] = elems((layer, slice));
        modules.push((layer, slice, begin..begin + a, begin + a..begin + a + b));
        begin += a + b;
    }
    let time = |run: &mut dyn FnMut() -> Result<()>| -> Result<f64> {
        gpu.synchronize()?;
        let start = Instant::now();
        run()?;
        gpu.synchronize()?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    };
    let (mut us, mut copy_us) = (Vec::new(), Vec::new());
    for load in 0..=LOADS {
        let copied = time(&mut || Ok(queue.copy(&factors, &mut copy)?))?;
        let packed = time(&mut || {
            let factors = modules.iter().map(|(layer, slice, a, b)| {
                let a = Matrix::new(factors.slice(a.clone()), rank, model[*layer].in_features())?;
                let b = Matrix::new(factors.slice(b.clone()), b.len() / rank, rank)?;
                Ok(Factors { layer: *layer, slice: *slice, scaling: 1.0, a, b })
            });
            weights.load_factors(0, factors.collect::<Result<Vec<_>>>()?)?;
            Ok(())
        })?;
        // The first ones load what is loaded lazily.
        if load > 0 {
            us.push(packed);
            copy_us.push(copied);
        }
    }
    let (us, copy_us) = (median(&mut us), median(&mut copy_us));
    Ok(Load { from: format!("device, rank {rank}"), bytes: 2 * total, loads: LOADS, us, copy_us })
}
