//! The same for the norm behind a linear layer, whose blocks form clusters of eight and wait for each other.

use aril::{
    DType, Slot,
    cuda::{Buffer, LoraLinear, Matrix, MatrixMut, Routing, WeightTable, Workspace},
    model::{Linear, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    routing::Batch,
};
use half::bf16;
use rand::{SeedableRng, rngs::StdRng};

use super::Hog;
use crate::{
    common::{
        consumers::EPS,
        factors::{Modules, fill, neighbour},
        values::Values,
    },
    device::Gpu,
};

const IN: usize = 256;
const FEATURES: usize = 4096;
const LAUNCHES: usize = 6;
const SLOTS: u16 = 3;
/// Multiprocessors that the other kernel leaves. The hardware places a cluster on neighbouring multiprocessors only.
const LEFT: [usize; 5] = [16, 24, 32, 48, 64];

/// Another kernel occupies most multiprocessors when the kernels start, and again while they run.
#[test]
#[ignore = "needs a GPU to itself"]
fn a_norm_beside_a_kernel_that_takes_most_multiprocessors() {
    let gpu = Gpu::new();
    let queue = &gpu.queue;
    Hog::expect_gpu_to_itself(&gpu);
    let mut rng = StdRng::seed_from_u64(5);
    let mut spec = ModelSpec::new();
    let id = spec.linear(Linear::new("o", Parallel::Replicated, IN).slice("o", FEATURES)).unwrap();
    for path in ["before", "behind"] {
        spec.linear(neighbour(path)).unwrap();
    }
    let model = spec.shard(TpRank::SINGLE).unwrap();
    for tokens in [1, 8, 600] {
        let capacity = Capacity::tokens(tokens).slots(SLOTS.into()).rank(64);
        let weights = WeightTable::new(queue, &model, DType::BF16, capacity, 1 << 22).unwrap();
        for slot in 0..SLOTS {
            let rank = 16 << slot;
            let [a, b] = [rank * IN, FEATURES * rank].map(|len| fill(Values::Rounded, len, 1.0, &mut rng));
            let mut modules = Modules::default();
            modules.put("o.o", 1.0, Modules::LINEAR, (&[rank, IN], &a), (&[FEATURES, rank], &b));
            weights.load(Slot::new(slot), &modules.adapter().plan(&model, DType::BF16).unwrap()).unwrap();
        }
        let layer = LoraLinear::new(&weights, id).unwrap();
        let mut workspace = Workspace::new(&weights).unwrap();
        let mut routing = Routing::new(queue, capacity, 2).unwrap();
        let mut values = |rows: usize, cols: usize| -> Vec<bf16> {
            (0..rows * cols).map(|_| bf16::from_f32(Values::Rounded.value(&mut rng))).collect()
        };
        let initial = values(tokens, FEATURES);
        let [x, y, weight] = [(tokens, IN), (tokens, FEATURES), (1, FEATURES)].map(|(rows, cols)| {
            let mut buffer = Buffer::<bf16>::zeros(queue, rows * cols).unwrap();
            buffer.write(&values(rows, cols)).unwrap();
            buffer
        });
        let mut residual = Buffer::<bf16>::zeros(queue, tokens * FEATURES).unwrap();
        let mut out = Buffer::<bf16>::zeros(queue, tokens * FEATURES).unwrap();
        let slots: Vec<Slot> = (0..tokens as i32).map(|token| bytemuck::cast((token * 3 + 2) % 4 - 1)).collect();
        // All launches, one after the other on one residual, which `around` may run beside something else.
        let mut run = |around: &dyn Fn(&mut dyn FnMut())| -> Vec<bf16> {
            residual.write(&initial).unwrap();
            let batch = routing.update(&Batch::new(&slots)).unwrap();
            gpu.synchronize();
            let mut step = weights.step(&batch, &mut workspace).unwrap();
            around(&mut || {
                for _ in 0..LAUNCHES {
                    let shrunk = layer.shrink(&mut step, Matrix::new(&x, tokens, IN).unwrap()).unwrap();
                    let y = Matrix::new(&y, tokens, FEATURES).unwrap();
                    let [sums, out] =
                        [&mut residual, &mut out].map(|buffer| MatrixMut::new(buffer, tokens, FEATURES).unwrap());
                    shrunk.add_rms_norm(y, sums, &weight, EPS, out).unwrap();
                }
            });
            let mut got = vec![bf16::ZERO; 2 * tokens * FEATURES];
            let (sums, rows) = got.split_at_mut(tokens * FEATURES);
            residual.read(sums).unwrap();
            out.read(rows).unwrap();
            got
        };
        let expected = run(&|launch| launch());
        let outruns = |left: usize| {
            Hog::is_outrun(|microseconds| {
                let ended_first = std::cell::Cell::new(false);
                let got = run(&|launch| ended_first.set(Hog::runs_beside(&gpu, left, microseconds, launch)));
                let same = bytemuck::cast_slice::<_, u16>(&got) == bytemuck::cast_slice::<_, u16>(&expected);
                assert!(
                    same,
                    "{tokens} tokens beside a kernel of {microseconds} µs that leaves {left} multiprocessors"
                );
                ended_first.get()
            })
        };
        assert!(LEFT.into_iter().any(outruns), "{tokens} tokens: the clusters do not start beside another kernel");
    }
}
