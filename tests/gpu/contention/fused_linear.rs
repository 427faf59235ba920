//! The same of the fused linear, whose blocks wait for the sums of others for a time, and then compute them.

use aril::{
    DType,
    cuda::{Workspace, raw},
};
use half::bf16;

use super::Hog;
use crate::{
    common::{
        dense,
        fused_linear::{Case, World},
        values::Values,
    },
    device::{Buffer, Gpu},
    operations::{PoisonedTable, raw_matrix, raw_matrix_mut},
};

/// Launches of one layer for a batch, each for a y of its own.
const LAUNCHES: usize = 6;

struct Launches<'a> {
    case: &'a Case,
    layer: raw::FusedLinear,
    step: raw::Step,
    x: Buffer,
    y: [Buffer; LAUNCHES],
    _memory: (raw::Routing, Workspace, PoisonedTable, Vec<Buffer>),
}

impl<'a> Launches<'a> {
    fn new(gpu: &Gpu, case: &'a Case) -> Self {
        let world: World<bf16> = case.world();
        let (capacity, stream) = (world.capacity(case.num_tokens()), gpu.raw_stream());
        let memory = gpu.poisoned(raw::Routing::device_bytes(capacity).unwrap());
        // SAFETY: the memory is kept with the routing, and used on one stream.
        let mut routing = unsafe { raw::Routing::new(&gpu.kernels, capacity, 1, memory.region()) }.unwrap();
        // SAFETY: the stream is alive and not capturing.
        let batch = unsafe { routing.update(&world.batch(), stream) }.unwrap();
        let base = case.base::<bf16>(case.values);
        let mut buffers: Vec<_> = base.slices.iter().map(|(_, w)| gpu.upload(w)).collect();
        let slices: Vec<_> =
            base.slices.iter().zip(&buffers).map(|((place, _), w)| raw_matrix::<bf16>(w, *place)).collect();
        let layer =
            raw::FusedLinear::new(&gpu.kernels, &world.model, world.id, DType::BF16, capacity, &slices).unwrap();
        let workspace = Workspace::with_bytes(&gpu.queue, layer.plan().workspace_bytes()).unwrap();
        let poisoned = PoisonedTable::new(gpu, &world, capacity.num_slots);
        let table =
            raw::Table::new(&world.model, DType::BF16, poisoned.address(), capacity.num_slots, capacity.max_rank);
        let step = raw::Step::new(table, batch, workspace.raw(), stream);
        let (x, y) = (gpu.upload(&world.x), [(); LAUNCHES].map(|()| gpu.upload(&world.y)));
        gpu.synchronize();
        buffers.push(memory);
        Self { case, layer, step, x, y, _memory: (routing, workspace, poisoned, buffers) }
    }

    fn enqueue(&self) {
        let x = raw_matrix::<bf16>(&self.x, self.case.x());
        for y in &self.y {
            // SAFETY: all operands are the test's own, and alive until the stream is synchronized.
            unsafe { self.layer.forward(&self.step, x, raw_matrix_mut::<bf16>(y, self.case.y())) }.unwrap();
        }
    }

    /// The bits of every y, which are NaN from then on.
    fn take(&mut self) -> Vec<Vec<u16>> {
        self.y
            .each_mut()
            .into_iter()
            .map(|y| {
                let bits = y.read::<u16>();
                y.write(&vec![bf16::NAN; bits.len()]);
                bits
            })
            .collect()
    }
}

/// Nearly all multiprocessors are taken by another kernel as ours come, and once more while ours run.
#[test]
#[ignore = "needs a GPU to itself"]
fn beside_a_kernel_that_takes_most_multiprocessors() {
    let gpu = Gpu::new();
    Hog::expect_gpu_to_itself(&gpu);
    // Two blocks to a row, and one.
    type Shape<'a> = (usize, &'a [usize], [&'a [usize]; 3]);
    let shapes: [Shape<'_>; 2] = [
        (2048, &[1024, 256, 128], [&[16, 16, 1], &[128, 64, 8], &[1, 0, 33]]),
        (256, &[13_000], [&[16], &[128], &[1]]),
    ];
    for (in_features, slices, adapters) in shapes {
        for tokens in [1, 8, 16, 64] {
            let slots = (0..tokens).map(|token| (token * 3 + 2) % 5 - 1).collect();
            let dense = dense::Case::linear(in_features, slices, &adapters, slots);
            let case = Case::fused(dense::Case { values: Values::Rounded, ..dense }, false);
            let mut launches = Launches::new(&gpu, &case);
            launches.enqueue();
            let expected = launches.take();
            assert!(expected.iter().all(|y| *y == expected[0]));
            let ended_first = Hog::is_outrun(|microseconds| {
                let ended_first = Hog::runs_beside(&gpu, microseconds, || launches.enqueue());
                let what = format!("{tokens} tokens of {in_features} features beside a kernel of {microseconds} µs");
                // Behind the rows is NaN at first, and always.
                assert!(launches.take() == expected, "{what}");
                ended_first
            });
            assert!(
                ended_first,
                "{tokens} tokens of {in_features} features: waits for multiprocessors that it need not have"
            );
        }
    }
}
