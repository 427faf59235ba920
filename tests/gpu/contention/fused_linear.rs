//! The same for the fused linear, whose blocks wait for sums of other blocks for a limited time and then compute them.

use aril::cuda::Workspace;

use super::Hog;
use crate::{
    common::{dense, fused_linear::Case, values::Values},
    device::Gpu,
    fused_linear::Launches,
};

const LAUNCHES: usize = 6;

/// Multiprocessors that the other kernel leaves. A cluster of two blocks needs two in one GPC, and an H200 has eight GPCs.
const LEFT: usize = 16;

/// Another kernel occupies nearly all multiprocessors when the kernels start, and again while they run.
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
        for tokens in [1, 8, 16, 64] {
            let slots = (0..tokens).map(|token| (token * 3 + 2) % 5 - 1).collect();
            let dense = dense::Case::linear(in_features, slices, &adapters, slots);
            let case = Case::fused(dense::Case { values: Values::Rounded, ..dense }, false);
            let mut launches = Launches::new(&gpu, &case, LAUNCHES);
            let workspace = Workspace::with_bytes(&gpu.queue, launches.workspace_bytes()).unwrap();
            let enqueue =
                |launches: &Launches| (0..LAUNCHES).for_each(|number| launches.launch(number, workspace.raw()));
            enqueue(&launches);
            let expected = launches.take();
            assert!(expected.iter().all(|y| *y == expected[0]));
            let ended_first = Hog::is_outrun(|microseconds| {
                let ended_first = Hog::runs_beside(&gpu, LEFT, microseconds, || enqueue(&launches));
                let what = format!("{tokens} tokens of {in_features} features beside a kernel of {microseconds} µs");
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
