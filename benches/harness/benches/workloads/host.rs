//! The cost of a layer on the host: planned once, then checked and launched in every step.

use std::{hint::black_box, time::Instant};

use aril::{DType, plan::LinearPlan};

use aril_bench::{
    Result,
    device::Gpu,
    layer::{Layer, Stage},
    report::median,
    results::{HostCost, Results},
    workload::Workload,
};

const ROUNDS: usize = 200;
/// Few enough for the stream to accept all of them without waiting for the device.
const CALLS_PER_ROUND: usize = 32;

pub(crate) fn measure(stage: &Stage, workload: &Workload, results: &mut Results) -> Result<()> {
    let (gpu, layer) = (&stage.gpu, Layer::new(stage, workload)?);
    let ((model, id), capacity) = (workload.linear_model()?, workload.capacity());
    let plan = || Ok(LinearPlan::new(black_box(&model[id]), DType::BF16, capacity)?);
    results.host.push(HostCost {
        id: workload.id.clone(),
        plan_us: median_us(gpu, plan)?,
        operands_us: median_us(gpu, || layer.add_no_delta())?,
        add_delta_us: median_us(gpu, || layer.add_delta(0))?,
    });
    Ok(())
}

/// The median over rounds of the host's time for one call. Waiting for the device between rounds is not counted.
fn median_us<T>(gpu: &Gpu, call: impl Fn() -> Result<T>) -> Result<f64> {
    let mut us = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        gpu.synchronize()?;
        let start = Instant::now();
        for _ in 0..CALLS_PER_ROUND {
            black_box(call()?);
        }
        us.push(start.elapsed().as_secs_f64() * 1e6 / CALLS_PER_ROUND as f64);
    }
    gpu.synchronize()?;
    Ok(median(&mut us))
}
