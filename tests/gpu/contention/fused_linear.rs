//! The same for the fused linear, whose blocks wait for sums of other blocks for a limited time and then compute them.

use aril::cuda::Workspace;

use super::Hog;
use crate::{
    common::{dense, fused_linear::Case, values::Values},
    device::Gpu,
    fused_linear::Launches,
};

const LAUNCHES: usize = 6;

/// Multiprocessors that the other kernel leaves: as few as are enough for the same launches without adapters, whose
/// blocks wait for no sums. Two blocks that share a row form a cluster, which the hardware places on neighbouring
/// multiprocessors only.
const LEFT: [usize; 5] = [8, 16, 24, 32, 48];

/// Another kernel occupies most multiprocessors when the kernels start, and again while they run.
#[test]
#[ignore = "needs a GPU to itself"]
fn beside_a_kernel_that_takes_most_multiprocessors() {
    let gpu = Gpu::new();
    Hog::expect_gpu_to_itself(&gpu);
    // Two blocks for each row, and one.
    type Shape<'a> = (usize, &'a [usize], [&'a [usize]; 3]);
    let shapes: [Shape<'_>; 2] = [
        (2048, &[1024, 256, 128], [&[16, 16, 1], &[128, 64, 8], &[1, 0, 33]]),
        (256, &[13_000], [&[16], &[128], &[1]]),
    ];
    for (in_features, slices, adapters) in shapes {
        for tokens in [1, 8, 16, 32] {
            let launches = |slots| {
                let case = dense::Case::linear(in_features, slices, &adapters, slots);
                Beside::new(&gpu, &Case::fused(dense::Case { values: Values::Rounded, ..case }, false))
            };
            let mut base = launches(vec![-1; tokens as usize]);
            let left = LEFT.into_iter().find(|&left| base.outrun(&gpu, left));
            let left = left.expect("the launches without adapters end before the other kernel");
            let mut adapted = launches((0..tokens).map(|token| (token * 3 + 2) % 5 - 1).collect());
            assert!(
                adapted.outrun(&gpu, left),
                "{tokens} tokens of {in_features} features: waits for multiprocessors that it need not have, beside \
                 {left}"
            );
        }
    }
}

/// Launches of a case, and their results when nothing runs beside them.
struct Beside {
    launches: Launches,
    workspace: Workspace,
    expected: Vec<u16>,
}

impl Beside {
    fn new(gpu: &Gpu, case: &Case) -> Self {
        let mut launches = Launches::new(gpu, case, LAUNCHES);
        let workspace = Workspace::with_bytes(&gpu.queue, launches.workspace_bytes()).unwrap();
        Self::enqueue(&launches, &workspace);
        let expected = launches.take();
        assert!(expected.iter().all(|y| *y == expected[0]));
        Self { launches, workspace, expected: expected[0].clone() }
    }

    fn enqueue(launches: &Launches, workspace: &Workspace) {
        (0..LAUNCHES).for_each(|number| launches.launch(number, workspace.raw()));
    }

    /// Whether they end before a kernel that leaves that many multiprocessors. Their results are the same in any case.
    fn outrun(&mut self, gpu: &Gpu, left: usize) -> bool {
        Hog::is_outrun(|microseconds| {
            let ended_first =
                Hog::runs_beside(gpu, left, microseconds, || Self::enqueue(&self.launches, &self.workspace));
            let same = self.launches.take().iter().all(|y| *y == self.expected);
            assert!(same, "beside a kernel of {microseconds} µs that leaves {left} multiprocessors");
            ended_first
        })
    }
}
