//! Steps of a host that waits for each of them, beside each part of a load. The GPU is idle when a step begins, so that
//! all that the host enqueues for it takes time of the step: the time on the host from the update of the routing, or
//! from the copy of its slots to the device, until the replay has ended.

use std::time::{Duration, Instant};

use aril::{
    cuda::{Buffer, PinnedBuffer, WeightTable},
    routing::Batch,
};
use aril_bench::{Result, device::Gpu};

use crate::{
    beside::{Make, Setup, run_beside},
    neighbours::Captured,
    stalls::percentiles,
};

const WARM_UP: usize = 200;
/// The steps beside one work end after this time.
const MOST: Duration = Duration::from_secs(4);

pub(crate) fn measure(
    gpu: &Gpu,
    setup: &Setup<'_>,
    captured: &mut Captured,
    works: impl Iterator<Item = (&'static str, Make)>,
    steps: usize,
) -> Result<()> {
    let mut host = Host::new(gpu, setup.weights, captured)?;
    host.steps(false, WARM_UP)?;
    println!("| beside | runs | ms a run | updated: p50 | p99 | max | runs | ms a run | copied: p50 | p99 | max |");
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for (name, make) in works {
        let mut row = format!("| {name} |");
        for is_copied in [false, true] {
            let (us, beside) = run_beside(make(setup)?, || host.steps(is_copied, steps))?;
            let us = percentiles(&us).map(|us| format!("{us:.1}")).join(" | ");
            row += &format!(" {} | {:.2} | {us} |", beside.count, beside.mean_ms());
        }
        println!("{row}");
    }
    println!();
    Ok(())
}

/// A host that replays a captured step.
struct Host<'a> {
    gpu: &'a Gpu,
    weights: &'a WeightTable,
    captured: &'a mut Captured,
    /// The slots on the host and on the device.
    slots: (PinnedBuffer<i32>, Buffer<i32>),
}

impl<'a> Host<'a> {
    fn new(gpu: &'a Gpu, weights: &'a WeightTable, captured: &'a mut Captured) -> Result<Self> {
        let (queue, count) = (weights.queue(), captured.slots.len());
        let mut slots = (PinnedBuffer::zeros(queue, count)?, Buffer::zeros(queue, count)?);
        slots.0.elements()?.iter_mut().zip(&captured.slots).for_each(|(number, slot)| *number = slot.number());
        Ok(Self { gpu, weights, captured, slots })
    }

    /// The times of steps in µs.
    fn steps(&mut self, is_copied: bool, steps: usize) -> Result<Vec<f64>> {
        let Captured { graph, routing, workspace, slots } = &mut *self.captured;
        let ((from, to), mut times, begin) = (&mut self.slots, Vec::with_capacity(steps), Instant::now());
        while times.len() < steps && begin.elapsed() < MOST {
            let start = Instant::now();
            let batch = if is_copied {
                to.enqueue_write(from, slots.len())?;
                routing.update_on_device(&*to, None)?
            } else {
                routing.update(&Batch::new(slots))?
            };
            graph.replay(&mut self.weights.step(&batch, workspace)?)?;
            self.gpu.synchronize()?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        Ok(times)
    }
}
