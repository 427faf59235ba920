//! `silu_mul`, which reads the `y` of a layer of gate and up, fused with its expand: against the reference, through the
//! safe and the raw API.

use aril::{
    DType, Element,
    cuda::{self, LoraLinear, Routing, WeightTable, Workspace, raw},
    model::{Linear, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    routing::Batch,
};
use proptest::prelude::*;
use rand::{SeedableRng, rngs::StdRng};

use crate::{
    backend::Value,
    common::{
        case::Subject,
        compare::Place,
        consumers::{Case, Consumed, World, cases},
        dense::Sizes,
        factors::{Modules, fill, neighbour},
        slices::SliceBuffers,
        small::choose,
        values::{Dtype, Values},
    },
    device::{Buffer, Gpu},
    for_dtype,
    operations::{
        PoisonedRouting, PoisonedTable, Raw, bits, check_replays, mailbox_of_garbage, matrix, matrix_mut, property,
        raw_matrix, raw_matrix_mut, replayed, table, upload_all,
    },
    setup::slots_of,
};

/// The safe API.
struct Safe<'a> {
    gpu: &'a Gpu,
}

impl Subject<Consumed> for Safe<'_> {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let queue = &self.gpu.queue;
        let (tokens, model) = (case.num_tokens(), &world.model);
        let capacity = world.capacity(tokens);
        let weights = table(queue, model, T::DTYPE, capacity, &world.adapters);
        let mut routing = Routing::new(queue, capacity, 1).unwrap();
        let slots = world.loaded_slots(|slot| weights.get(slot));
        let batch = routing.update(&world.batch_of(&slots)).unwrap();
        let [x, mut out] = [&world.x, &world.out].map(|values: &Vec<T>| self.gpu.upload(values));
        let (x_view, mut out_view) = (x.view::<T>(), out.view_mut::<T>());
        let inputs = SliceBuffers::new(&world.y, case.y(), &case.dense.slices(), case.separate);
        let buffers = upload_all(self.gpu, &inputs);
        let views: Vec<_> = buffers.iter().map(Buffer::view::<T>).collect();
        let mut workspace = Workspace::new(&weights).unwrap();
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let layer = LoraLinear::new(&weights, world.id).unwrap();
        let shrunk = layer.shrink(&mut step, matrix(&x_view, case.x())).unwrap();
        shrunk.silu_mul(inputs.matrices(&views, matrix), matrix_mut(&mut out_view, case.out())).unwrap();
        out.read()
    }
}

impl Subject<Consumed> for Raw<'_> {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let gpu = self.gpu;
        let (model, stream) = (&world.model, gpu.raw_stream());
        let tokens = case.num_tokens() + self.padded_tokens;
        let capacity = world.capacity(tokens);
        let routed = PoisonedRouting::new(
            gpu,
            capacity.slots(capacity.num_slots + self.padded_tokens),
            (&world.slots, world.scales.as_deref()),
        );
        let batch = routed.routing.capture_batch(tokens).unwrap();
        let table = PoisonedTable::new(gpu, world, capacity.num_slots);

        // Padded rows hold NaN, and must not change.
        let padded = |values: &[T], place: Place| {
            [values, &vec![T::from_f32(f32::NAN); self.padded_tokens * place.stride]].concat()
        };
        let [x, out] = [(&world.x, case.x()), (&world.out, case.out())]
            .map(|(values, place): (&Vec<T>, _)| gpu.upload(&padded(values, place)));
        let grown = |place: Place| Place { rows: tokens, ..place };
        let (x_matrix, y) = (raw_matrix::<T>(&x, grown(case.x())), padded(&world.y, case.y()));
        let inputs = SliceBuffers::new(&y, grown(case.y()), &case.dense.slices(), case.separate);
        let y_buffers = upload_all(gpu, &inputs);
        let y_matrices = inputs.matrices(&y_buffers, raw_matrix::<T>);
        let out_matrix = raw_matrix_mut::<T>(&out, grown(case.out()));
        let linear = LoraLinear::for_model(&gpu.kernels, model, world.id, T::DTYPE, capacity).unwrap();
        let bytes = linear.plan().workspace_bytes();
        let buffers = [mailbox_of_garbage(gpu, bytes.mailbox), gpu.poisoned(bytes.partials)];
        let [mailbox, partials] = buffers.each_ref().map(Buffer::region);
        let weights = raw::Table::new(model, T::DTYPE, table.address(), capacity.num_slots, capacity.max_rank);
        let workspace = raw::Workspace { mailbox, partials };
        let step = raw::Step::new(weights, batch, workspace, stream);
        let launch = || {
            // SAFETY: the test owns all operands and keeps them alive until the stream is synchronized.
            unsafe { linear.shrink_raw(&step, x_matrix) }.unwrap();
            // SAFETY: as above.
            unsafe { linear.silu_mul_raw(&step, y_matrices, out_matrix) }.unwrap();
        };
        if self.captured {
            gpu.capture(launch).replay();
        } else {
            launch();
        }
        let mut rows = out.read::<T>();
        let padded = rows.split_off(world.out.len());
        let untouched = padded.iter().all(|value| value.to_f32().is_nan());
        assert!(untouched, "a padded row was written\n{}", case.replay());
        rows
    }
}

const DTYPES: [Dtype; 3] = [Dtype::BF16, Dtype::F16, Dtype::F32];

#[test]
#[ignore = "needs a GPU"]
fn consumers_of_the_safe_api_agree_with_the_reference() {
    let gpu = Gpu::new();
    property(150, cases(Sizes::large()), |case| for_dtype!(case.check(&mut Safe { gpu: &gpu })));
}

#[test]
#[ignore = "needs a GPU"]
fn consumers_of_the_raw_api_agree_with_the_reference() {
    let gpu = Gpu::new();
    property(200, cases(Sizes::large()), |case| {
        let (padded_tokens, captured) = ((case.seed % 5) as usize * 7, case.seed % 2 == 0);
        for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens, captured }))
    });
}

/// Gate and up in buffers of their own give the bits of one matrix of both, in every kernel.
#[test]
#[ignore = "needs a GPU"]
fn gate_and_up_apart_have_the_bits_of_one_matrix() {
    fn run<T: Element>(gpu: &Gpu, case: &Case, padded_tokens: usize) -> Result<(), TestCaseError> {
        case.check_separate::<T>(&mut Safe { gpu })?;
        case.check_separate::<T>(&mut Raw { gpu, padded_tokens, captured: true })
    }
    let gpu = Gpu::new();
    property(100, cases(Sizes::large()), |case| for_dtype!(case, run(&gpu, &case, 0)));
    property(40, cases(Sizes::of_many_tokens()), |case| for_dtype!(case, run(&gpu, &case, 0)));
    for dtype in DTYPES {
        // Aligned and misaligned rows, at ranks of each kernel.
        for (features, ranks) in [(512, [16, 8]), (1000, [64, 128]), (33, [3, 0]), (264, [200, 130])] {
            let slots = (0..40).map(|token| token % 3 - 1).collect();
            let case = Case { dtype, ..Case::consumed(72, features, &[ranks, [0, 5]], slots) };
            for padded_tokens in [0, choose(600, 520)] {
                for_dtype!(case, run(&gpu, &case, padded_tokens)).unwrap();
            }
        }
    }
}

/// Wide tiles, with all scales and strides.
#[test]
#[ignore = "needs a GPU"]
fn consumers_of_many_tokens_agree_with_the_reference() {
    let gpu = Gpu::new();
    property(60, cases(Sizes::of_many_tokens()), |case| {
        for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens: 0, captured: false }))
    });
    // Of every rank, with aligned rows.
    property(80, cases(Sizes { max_tokens: 40, max_features: choose(900, 300), max_rank: 128 }), |mut case| {
        (case.offsets, case.gaps) = ([0; 3], [0; 3]);
        for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens: choose(600, 520), captured: false }))
    });
}

/// Tails of blocks and chunks, ranks up to the largest, absent modules, one tile and many.
#[test]
#[ignore = "needs a GPU"]
fn consumers_of_corners() {
    let gpu = Gpu::new();
    let adapters = [[16, 8], [1, 128], [0, 64], [33, 0], [64, 64], [128, 128], [24, 96]];
    let high = choose([[512, 1], [0, 512], [129, 300]], [[136, 1], [0, 144], [129, 130]]);
    let spread = |tokens: i32, adapters: i32| (0..tokens).map(|token| token % (adapters + 1) - 1).collect();
    for &features in choose(&[1, 7, 64, 96, 128, 136, 1000, 2112, 8200][..], &[7, 136]) {
        // The reference of wide layers is slow.
        let most = if features < 1000 { 1040 } else { 20 };
        let tokens = choose(&[1, 8, 17, 100, 512, 513, 1040][..], &[17, 520]);
        for &tokens in tokens.iter().filter(|&&tokens| tokens <= most) {
            for (adapters, slots) in [(&adapters[..], 7), (&high[..], 3)] {
                let few = if features < 1000 { &DTYPES[..] } else { &DTYPES[..1] };
                for &dtype in choose(&DTYPES[..], few) {
                    let case = Case::consumed(72, features, adapters, spread(tokens, slots));
                    let case = Case { dtype, ..case };
                    // With padding, the few tokens of wide layers are on wide tiles, too.
                    for padded_tokens in if features < 1000 { &[0][..] } else { &[0, 600] } {
                        let padded_tokens = *padded_tokens;
                        for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens, captured: false })).unwrap();
                    }
                }
            }
        }
    }
    for slots in [vec![], vec![-1; 30], vec![0; 700], vec![5; 70]] {
        let case = Case::consumed(1100, 264, &[[16, 16]], slots);
        case.check::<half::bf16>(&mut Raw { gpu: &gpu, padded_tokens: 20, captured: true }).unwrap();
    }
}

/// Few tiles and many, up to those that the table's slots may have.
#[test]
#[ignore = "needs a GPU"]
fn consumers_of_tables_of_many_slots() {
    let gpu = Gpu::new();
    let adapters: Vec<[usize; 2]> = (0..130).map(|slot| [3 + slot % 11, slot % 5 * 4]).chain([[128, 128]]).collect();
    let of = |slot: fn(i32) -> i32| (0..300).map(slot).collect::<Vec<_>>();
    let batches = [
        of(|token| token % 131),
        of(|token| 130 - token % 8),
        // Every fourth slot; base rows in between.
        of(|token| token % 27 * 4),
        of(|token| token % 28 * 4),
        of(|token| if token % 3 == 0 { -1 } else { token * token % 131 }),
        of(|_| 130),
        of(|_| -1),
    ];
    let raw = |padded_tokens, captured| Raw { gpu: &gpu, padded_tokens, captured };
    for slots in batches.iter().take(choose(7, 2)) {
        let case = Case::consumed(72, 1400, &adapters, slots.clone());
        case.check::<half::bf16>(&mut raw(0, false)).unwrap();
        case.check::<half::f16>(&mut raw(20, true)).unwrap();
    }
    // Of high ranks.
    let case = Case::consumed(72, 1400, &vec![[200, 130]; 60], of(|token| token % 60));
    case.check::<half::bf16>(&mut raw(200, true)).unwrap();
}

/// Results have the same bits when repeated or captured, in any batch, on token tiles and on wide tiles. A base row has
/// those of a batch without adapters.
#[test]
#[ignore = "needs a GPU"]
fn a_consumers_token_depends_on_nothing_else() {
    fn run<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
        let world = case.world::<T>();
        let mut eager = Raw { gpu, padded_tokens: 0, captured: false };
        let first = eager.run(case, &world);
        let mut others = [
            ("twice", Raw { gpu, padded_tokens: 0, captured: false }),
            ("captured", Raw { gpu, padded_tokens: 3, captured: true }),
            ("as one of many", Raw { gpu, padded_tokens: choose(1100, 520), captured: false }),
        ];
        for (name, subject) in &mut others {
            prop_assert!(bits(&first) == bits(&subject.run(case, &world)), "{name} differs\n{}", case.replay());
        }
        // Without the tokens after it: 512 rows run as small_m, and 513 as large_m.
        let firsts = [1, 16, 17, 512].into_iter().filter(|&tokens| tokens < case.num_tokens()).map(|tokens| 0..tokens);
        let single = (0..case.num_tokens()).step_by(case.num_tokens() / 3 + 1).map(|token| token..token + 1);
        for tokens in firsts.chain(single) {
            let (part, some) = case.part(&world, tokens.clone());
            let some = eager.run(&part, &some);
            for (at, token) in tokens.clone().enumerate() {
                let same = case.written(&first, token) == part.written(&some, at);
                prop_assert!(same, "token {token} of {tokens:?} differs\n{}", case.replay());
            }
        }
        let mut base = case.world::<T>();
        base.slots.fill(-1);
        let base = eager.run(case, &base);
        for token in (0..case.num_tokens()).filter(|&token| case.adapter(token).is_none()) {
            let same = case.written(&first, token) == case.written(&base, token);
            prop_assert!(same, "base token {token} differs\n{}", case.replay());
        }
        Ok(())
    }
    let gpu = Gpu::new();
    property(100, cases(Sizes { max_tokens: 80, ..Sizes::large() }), |case| for_dtype!(case, run(&gpu, &case)));
    for &dtype in choose(&DTYPES[..], &[Dtype::F16, Dtype::F32]) {
        let slots = (0..513).map(|token| token % 7 - 1).collect();
        let adapters = [[16, 8], [1, 128], [64, 0], [33, 7], [100, 3]];
        let case = Case::consumed(choose(1300, 264), choose(200, 72), &adapters, slots);
        for_dtype!(case, run(&gpu, &Case { dtype, values: Values::Rounded, ..case.clone() })).unwrap();
    }
}

/// 4,096 tokens of 32 adapters on layers as wide as those of large models: the same bits as 512 tokens at a time.
#[test]
#[ignore = "needs a GPU"]
fn consumers_of_thousands_of_tokens_agree_with_themselves() {
    let gpu = Gpu::new();
    let (tokens, at_a_time) = choose((4096, 512), (576, 64));
    let slots: Vec<i32> = (0..tokens as i32).map(|token| token * 7 % 34 - 1).collect();
    let adapters: Vec<[usize; 2]> = (0..32).map(|i| [16, 8 + 2 * i]).collect();
    let case = Case::consumed(choose(512, 72), choose(3072, 136), &adapters, slots);
    let case = Case { values: Values::Rounded, ..case };
    let world = case.world::<half::bf16>();
    let mut subject = Raw { gpu: &gpu, padded_tokens: 0, captured: false };
    let all = subject.run(&case, &world);
    for first in (0..tokens).step_by(at_a_time) {
        let (part, some) = case.part(&world, first..first + at_a_time);
        let some = subject.run(&part, &some);
        for at in 0..at_a_time {
            assert!(case.written(&all, first + at) == part.written(&some, at), "token {}", first + at);
        }
    }
}

/// NaN in one token's rows does not reach other tokens.
#[test]
#[ignore = "needs a GPU"]
fn a_consumers_nan_is_its_own() {
    let gpu = Gpu::new();
    for padded_tokens in [0, choose(1100, 520)] {
        property(80, cases(Sizes { max_tokens: 80, ..Sizes::large() }), |case| {
            for_dtype!(case.check_nan(&mut Raw { gpu: &gpu, padded_tokens, captured: false }))
        });
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_consumers_replay_sees_what_changed() {
    fn run<T: Value>(gpu: &Gpu, dtype: Dtype, tokens: usize) {
        let (inputs, features) = choose((1100, 200), (264, 72));
        let steps = replayed(tokens, |seed, adapters, slots| Case {
            dtype,
            seed,
            ..Case::consumed(inputs, features, adapters, slots)
        });
        check_replays::<T, _, _>(gpu, &steps, tokens, |weights, id| {
            let layer = LoraLinear::new(weights, id).unwrap();
            move |step, x, y, out| layer.shrink(step, x)?.silu_mul(y, out)
        });
    }
    let gpu = Gpu::new();
    for &tokens in choose(&[16, 40, 512, 600][..], &[40, 520]) {
        run::<half::bf16>(&gpu, Dtype::BF16, tokens);
        run::<half::f16>(&gpu, Dtype::F16, tokens);
        run::<f32>(&gpu, Dtype::F32, tokens);
    }
}

/// Operations behind one another, each of which starts while the one before ends, give the bits of operations that
/// wait.
#[test]
#[ignore = "needs a GPU"]
fn a_chain_of_consumers_reads_what_was_written_before() {
    const SLOTS: usize = 5;
    let (hidden, inter, layers, rounds) = choose((512, 384, 24, 10), (128, 96, 2, 1));
    let gpu = Gpu::new();
    let queue = &gpu.queue;
    let mut rng = StdRng::seed_from_u64(3);
    let mut spec = ModelSpec::new();
    let gate_up = Linear::new("gate_up", Parallel::Replicated, hidden).slice("gate", inter).slice("up", inter);
    let gate_up = spec.linear(gate_up).unwrap();
    let down = spec.linear(Linear::new("down", Parallel::Replicated, inter).slice("down", hidden)).unwrap();
    for path in ["before", "behind"] {
        spec.linear(neighbour(path)).unwrap();
    }
    let model = spec.shard(TpRank::SINGLE).unwrap();
    for &tokens in choose(&[1, 40, 512, 700][..], &[40, 520]) {
        let capacity = Capacity::tokens(tokens).slots(SLOTS).rank(32);
        let weights = WeightTable::new(queue, &model, DType::BF16, capacity, 1 << 22).unwrap();
        for slot in 0..SLOTS {
            let rank = 8 + 5 * slot;
            let mut modules = Modules::default();
            for (path, [input, output]) in
                [("gate_up.gate", [hidden, inter]), ("gate_up.up", [hidden, inter]), ("down.down", [inter, hidden])]
            {
                let [a, b] = [rank * input, output * rank].map(|len| fill(Values::Rounded, len, 1.0, &mut rng));
                modules.put(path, 0.5, Modules::LINEAR, (&[rank, input], &a), (&[output, rank], &b));
            }
            weights.load(slot, &modules.adapter().plan(&model, DType::BF16).unwrap()).unwrap();
        }
        let [gate_up, down] = [gate_up, down].map(|id| LoraLinear::new(&weights, id).unwrap());
        let mut workspace = Workspace::new(&weights).unwrap();
        let mut routing = Routing::new(queue, capacity, 2).unwrap();
        let mut buffer = |rows: usize, cols: usize| {
            let values: Vec<half::bf16> =
                (0..rows * cols).map(|_| half::bf16::from_f32(Values::Rounded.value(&mut rng))).collect();
            let mut buffer = cuda::Buffer::zeros(queue, rows * cols).unwrap();
            buffer.write(&values).unwrap();
            buffer
        };
        // The base's output stays the same; what is activated, and the sums that the next layer reads, are passed on.
        let (wide, x) = (buffer(tokens, 2 * inter), buffer(tokens, hidden));
        let slots: Vec<i32> = (0..tokens as i32).map(|token| token * 7 % 6 - 1).collect();
        let slots = slots_of(&weights, &slots);
        let mut run = |waits: bool| {
            let mut sums = cuda::Buffer::<half::bf16>::zeros(queue, tokens * hidden).unwrap();
            queue.copy(&x, &mut sums).unwrap();
            let mut active = cuda::Buffer::<half::bf16>::zeros(queue, tokens * inter).unwrap();
            let batch = routing.update(&Batch::new(&slots)).unwrap();
            let mut step = weights.step(&batch, &mut workspace).unwrap();
            let wait = || {
                if waits {
                    gpu.synchronize()
                }
            };
            for _ in 0..layers {
                let shrunk = gate_up.shrink(&mut step, cuda::Matrix::new(&sums, tokens, hidden).unwrap()).unwrap();
                wait();
                let y = cuda::Matrix::new(&wide, tokens, 2 * inter).unwrap();
                let out = cuda::MatrixMut::new(&mut active, tokens, inter).unwrap();
                shrunk.silu_mul(y, out).unwrap();
                wait();
                let active = cuda::Matrix::new(&active, tokens, inter).unwrap();
                down.add_delta(&mut step, active, cuda::MatrixMut::new(&mut sums, tokens, hidden).unwrap()).unwrap();
                wait();
            }
            let mut got = vec![half::bf16::ZERO; tokens * hidden];
            sums.read(&mut got).unwrap();
            got
        };
        let expected = run(true);
        assert!(expected.iter().all(|value| value.is_finite()), "the chain has left the range of numbers");
        for round in 0..rounds {
            assert!(bits(&run(false)) == bits(&expected), "{tokens} tokens, round {round}");
        }
    }
}
