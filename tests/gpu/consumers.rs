//! The operations that read a linear layer's `y`, fused with its expand: against the reference, through the safe and the raw API.

use aril::{
    Element, Slot,
    cuda::{self, LoraLinear, Routing, WeightTable, Workspace, raw},
    plan::Capacity,
    routing::Batch,
};
use cudarc::driver::{DeviceRepr, ValidAsZeroBits};
use proptest::prelude::*;

use crate::{
    common::{
        case::Subject,
        compare::{Expected, Place, compare},
        consumers::{Case, Consumed, World, cases},
        dense::Sizes,
        values::{Dtype, Values},
    },
    device::{Buffer, Gpu},
    for_dtype,
    operations::{PoisonedTable, bits, mailbox_of_garbage, matrix, matrix_mut, property, raw_matrix, raw_matrix_mut},
};

/// The safe API.
struct Safe<'a> {
    gpu: &'a Gpu,
}

/// The raw API, in memory that is NaN outside the operands.
struct Raw<'a> {
    gpu: &'a Gpu,
    /// Rows of the batch beyond the live ones, as in a captured graph; and slots of the routing beyond the table's.
    padded_tokens: usize,
    /// Launch from a captured graph.
    captured: bool,
}

impl Subject<Consumed> for Safe<'_> {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let queue = &self.gpu.queue;
        let (tokens, model) = (case.num_tokens(), &world.model);
        let capacity = world.capacity(tokens);
        let weights = WeightTable::new(queue, model, T::DTYPE, capacity, 1 << 26).unwrap();
        for (slot, adapter) in world.adapters.iter().enumerate() {
            weights.load(Slot::new(slot as u16), &adapter.plan(model, T::DTYPE).unwrap()).unwrap();
        }
        let mut routing = Routing::new(queue, capacity, 1).unwrap();
        let batch = routing.update(&world.batch()).unwrap();
        let (x, y) = (self.gpu.upload(&world.x), self.gpu.upload(&world.y));
        let mut out = self.gpu.upload(&world.out);
        let (x_view, y_view, mut out_view) = (x.view::<T>(), y.view::<T>(), out.view_mut::<T>());
        let mut workspace = Workspace::new(&weights).unwrap();
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let layer = LoraLinear::new(&weights, world.id).unwrap();
        if world.batch().has_adapters() {
            layer.shrink(&mut step, matrix(&x_view, case.x())).unwrap();
        }
        layer.silu_mul(&mut step, matrix(&y_view, case.y()), matrix_mut(&mut out_view, case.out())).unwrap();
        out.read()
    }
}

impl Subject<Consumed> for Raw<'_> {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let gpu = self.gpu;
        let (model, stream) = (&world.model, gpu.raw_stream());
        let tokens = case.num_tokens() + self.padded_tokens;
        let capacity = world.capacity(tokens);
        let routed = capacity.slots(capacity.num_slots + self.padded_tokens);
        let memory = gpu.poisoned(raw::Routing::device_bytes(routed).unwrap());
        // SAFETY: the memory outlives the routing and is used on one stream.
        let mut routing = unsafe { raw::Routing::new(&gpu.kernels, routed, 1, memory.region()) }.unwrap();
        // SAFETY: the stream is alive and not capturing.
        unsafe { routing.update(&world.batch(), stream) }.unwrap();
        let batch = routing.capture_batch(tokens).unwrap();
        let table = PoisonedTable::new(gpu, world, capacity.num_slots);

        // Padded rows hold NaN; those of `out` must not change.
        let padded = |values: &[T], place: Place| {
            gpu.upload(&[values, &vec![T::from_f32(f32::NAN); self.padded_tokens * place.stride]].concat())
        };
        let (x, y, out) = (padded(&world.x, case.x()), padded(&world.y, case.y()), padded(&world.out, case.out()));
        let grown = |place: Place| Place { rows: tokens, ..place };
        let (x_matrix, y_matrix) = (raw_matrix::<T>(&x, grown(case.x())), raw_matrix::<T>(&y, grown(case.y())));
        let out_matrix = raw_matrix_mut::<T>(&out, grown(case.out()));
        let linear = raw::LoraLinear::new(&gpu.kernels, model, world.id, T::DTYPE, capacity).unwrap();
        let bytes = linear.plan().workspace_bytes();
        let workspace = [mailbox_of_garbage(gpu, bytes.mailbox), gpu.poisoned(bytes.partials)];
        let [mailbox, partials] = workspace.each_ref().map(Buffer::region);
        let weights = raw::Table::new(model, T::DTYPE, table.address(), capacity.num_slots, capacity.max_rank);
        let step = raw::Step::new(weights, batch, raw::Workspace { mailbox, partials }, stream);
        let launch = || {
            // SAFETY: the test owns all operands and keeps them alive until the stream is synchronized.
            unsafe { linear.shrink(&step, x_matrix) }.unwrap();
            // SAFETY: as above.
            unsafe { linear.silu_mul(&step, y_matrix, out_matrix) }.unwrap();
        };
        if self.captured {
            gpu.capture(launch).replay();
        } else {
            launch();
        }
        let mut result = out.read::<T>();
        let padded = result.split_off(world.out.len());
        assert!(padded.iter().all(|value| value.to_f32().is_nan()), "a padded row was written\n{}", case.replay());
        result
    }
}

#[test]
#[ignore = "needs a GPU"]
fn silu_mul_agrees_with_the_reference() {
    let gpu = Gpu::new();
    property(100, cases(Sizes::LARGE), |case| for_dtype!(case.check(&mut Safe { gpu: &gpu })));
    property(200, cases(Sizes::LARGE), |case| {
        let (padded_tokens, captured) = ((case.seed % 5) as usize * 7, case.seed % 2 == 0);
        for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens, captured }))
    });
}

/// Wide tiles, with all scales and strides.
#[test]
#[ignore = "needs a GPU"]
fn silu_mul_of_many_tokens_agrees_with_the_reference() {
    let gpu = Gpu::new();
    property(60, cases(Sizes { max_tokens: 1500, max_features: 500, max_rank: 200 }), |case| {
        for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens: 0, captured: false }))
    });
    // Of every rank, with aligned rows.
    property(60, cases(Sizes { max_tokens: 40, max_features: 900, max_rank: 128 }), |mut case| {
        (case.offsets, case.gaps) = ([0; 3], [0; 3]);
        for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens: 600, captured: false }))
    });
}

/// Tails of blocks and chunks, ranks up to the largest, absent modules, one tile and many.
#[test]
#[ignore = "needs a GPU"]
fn silu_mul_of_corners() {
    let gpu = Gpu::new();
    let adapters = [[16, 8], [1, 128], [0, 64], [33, 0], [64, 64], [128, 128], [24, 96]];
    let high = [[512, 1], [0, 512], [129, 300]];
    let spread = |tokens: i32, adapters: i32| (0..tokens).map(|token| token % (adapters + 1) - 1).collect();
    for features in [1, 7, 64, 96, 128, 136, 1000, 2112] {
        // The reference of the widest layers is slow.
        let most = if features < 1000 { 1040 } else { 520 };
        for tokens in [1, 8, 17, 100, 512, 513, 1040].into_iter().filter(|&tokens| tokens <= most) {
            for (adapters, slots) in [(&adapters[..], 7), (&high[..], 3)] {
                for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
                    let case = Case { dtype, ..Case::gate_up(72, features, adapters, spread(tokens, slots)) };
                    for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens: 0, captured: false })).unwrap();
                }
            }
        }
    }
    for slots in [vec![], vec![-1; 30], vec![0; 700], vec![5; 70]] {
        let case = Case::gate_up(1100, 264, &[[16, 16]], slots);
        case.check::<half::bf16>(&mut Raw { gpu: &gpu, padded_tokens: 20, captured: true }).unwrap();
    }
}

/// Results have the same bits when repeated or captured, in any batch, on token tiles and on wide tiles. A base row has those of a
/// batch without adapters.
#[test]
#[ignore = "needs a GPU"]
fn silu_mul_of_a_token_depends_on_nothing_else() {
    fn run<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
        let world = case.world::<T>();
        let mut eager = Raw { gpu, padded_tokens: 0, captured: false };
        let first = eager.run(case, &world);
        prop_assert!(bits(&first) == bits(&eager.run(case, &world)), "twice differs\n{}", case.replay());
        let mut others = [
            ("captured", Raw { gpu, padded_tokens: 3, captured: true }),
            ("as one of many", Raw { gpu, padded_tokens: 1100, captured: false }),
        ];
        for (name, subject) in &mut others {
            prop_assert!(bits(&first) == bits(&subject.run(case, &world)), "{name} differs\n{}", case.replay());
        }
        for tokens in [1, 16, 17, 512].into_iter().filter(|&tokens| tokens < case.num_tokens()) {
            let (mut fewer, mut world) = (case.clone(), case.world::<T>());
            fewer.slots.truncate(tokens);
            world.slots.truncate(tokens);
            world.scales.iter_mut().for_each(|scales| scales.truncate(tokens));
            let rows = ..case.out().at(tokens, 0);
            let fewer = eager.run(&fewer, &world);
            prop_assert!(bits(&first[rows]) == bits(&fewer[rows]), "{tokens} tokens differ\n{}", case.replay());
        }
        let row = |token: usize| case.out().at(token, 0)..case.out().at(token, 0) + case.out().cols;
        let mut alone = case.world::<T>();
        for token in (0..case.num_tokens()).step_by(case.num_tokens() / 3 + 1) {
            alone.slots.fill(Slot::BASE);
            alone.slots[token] = world.slots[token];
            let alone = eager.run(case, &alone);
            let row = row(token);
            prop_assert!(bits(&first[row.clone()]) == bits(&alone[row]), "{token} alone differs\n{}", case.replay());
        }
        alone.slots.fill(Slot::BASE);
        let base = eager.run(case, &alone);
        for token in (0..case.num_tokens()).filter(|&token| case.adapter(token).is_none()) {
            let row = row(token);
            prop_assert!(bits(&first[row.clone()]) == bits(&base[row]), "base token {token}\n{}", case.replay());
        }
        Ok(())
    }
    let gpu = Gpu::new();
    property(60, cases(Sizes { max_tokens: 80, ..Sizes::LARGE }), |case| for_dtype!(case, run(&gpu, &case)));
    for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
        let slots = (0..513).map(|token| token % 7 - 1).collect();
        let adapters = [[16, 8], [1, 128], [64, 0], [33, 7], [100, 3]];
        let case = Case { dtype, values: Values::Rounded, ..Case::gate_up(1300, 200, &adapters, slots) };
        for_dtype!(case, run(&gpu, &case)).unwrap();
    }
    // A layer of a large model: gate_up of 4,096 tokens of many slots, and the same tokens one tile after another.
    let slots: Vec<i32> = (0..4096).map(|token| token * 7 % 34 - 1).collect();
    let adapters: Vec<[usize; 2]> = (0..32).map(|i| [16, 8 + 2 * i]).collect();
    let case = Case { values: Values::Rounded, ..Case::gate_up(512, 3072, &adapters, slots) };
    let world = case.world::<half::bf16>();
    let mut subject = Raw { gpu: &gpu, padded_tokens: 0, captured: false };
    let all = subject.run(&case, &world);
    for first in (0..4096).step_by(512) {
        let part = |buffer: &[half::bf16], cols: usize| buffer[first * cols..(first + 512) * cols].to_vec();
        let mut some = case.world::<half::bf16>();
        some.slots = world.slots[first..first + 512].to_vec();
        (some.x, some.y, some.out) = (part(&world.x, 512), part(&world.y, 6144), part(&world.out, 3072));
        let case = Case { slots: case.slots[first..first + 512].to_vec(), ..case.clone() };
        assert_eq!(bits(&subject.run(&case, &some)), bits(&part(&all, 3072)), "tokens from {first}");
    }
}

/// NaN in one token's rows does not reach other tokens.
#[test]
#[ignore = "needs a GPU"]
fn silu_mul_keeps_a_tokens_nan() {
    fn run<T: Element>(gpu: &Gpu, case: &Case, padded_tokens: usize) -> Result<(), TestCaseError> {
        let mut subject = Raw { gpu, padded_tokens, captured: false };
        let mut world = case.world::<T>();
        let expected = subject.run(case, &world);
        let Some(token) = (case.seed as usize).checked_rem(case.num_tokens()) else { return Ok(()) };
        for (buffer, place) in [(&mut world.x, case.x()), (&mut world.y, case.y())] {
            buffer[place.at(token, 0)..][..place.cols].fill(T::from_f32(f32::NAN));
        }
        let got = subject.run(case, &world);
        let row = case.out().at(token, 0)..case.out().at(token, 0) + case.out().cols;
        prop_assert!(got[row.clone()].iter().all(|value| value.to_f32().is_nan()), "NaN is lost\n{}", case.replay());
        prop_assert!(
            bits(&got[..row.start]) == bits(&expected[..row.start])
                && bits(&got[row.end..]) == bits(&expected[row.end..]),
            "NaN has spread\n{}",
            case.replay()
        );
        Ok(())
    }
    let gpu = Gpu::new();
    for padded_tokens in [0, 1100] {
        property(60, cases(Sizes { max_tokens: 80, ..Sizes::LARGE }), |case| {
            for_dtype!(case, run(&gpu, &case, padded_tokens))
        });
    }
}

/// A captured step of the safe API follows its memory: adapters of other ranks, other slots and fewer tokens between replays.
#[test]
#[ignore = "needs a GPU"]
fn silu_mul_of_a_replay_sees_what_changed() {
    fn run<T: Element + DeviceRepr + ValidAsZeroBits>(gpu: &Gpu, dtype: Dtype, tokens: usize) {
        const IN: usize = 1100;
        const FEATURES: usize = 200;
        // By step: the ranks of each slot's adapter, and the slots of the live tokens.
        let case = |seed: u64, adapters: &[[usize; 2]], live: usize| {
            let slots = (0..live as i32).map(|token| (token * 5 + token / 3 + seed as i32) % 5 - 1).collect();
            Case { dtype, seed, ..Case::gate_up(IN, FEATURES, adapters, slots) }
        };
        let steps = [
            case(1, &[[16, 8], [1, 0], [64, 64]], tokens),
            case(2, &[[17, 0], [1, 30], [3, 128]], tokens - 1),
            case(3, &[[128, 128], [0, 5]], tokens / 2),
            case(4, &[], tokens),
            case(5, &[[8, 8]], 1),
            case(6, &[[33, 2], [100, 7], [5, 5]], tokens),
        ];
        let capacity = Capacity::tokens(tokens).slots(4).rank(128);
        let first = steps[0].world::<T>();
        let (queue, model) = (&gpu.queue, &first.model);
        let weights = WeightTable::new(queue, model, T::DTYPE, capacity, 1 << 24).unwrap();
        let mut routing = Routing::new(queue, capacity, 2).unwrap();
        let mut workspace = Workspace::new(&weights).unwrap();
        let layer = LoraLinear::new(&weights, first.id).unwrap();
        let [mut x, mut y, mut out] =
            [IN, 2 * FEATURES, FEATURES].map(|cols| cuda::Buffer::<T>::zeros(queue, tokens * cols).unwrap());
        let mut graph = weights
            .capture(&routing, tokens, &mut workspace, |step| {
                layer.shrink(step, cuda::Matrix::new(&x, tokens, IN)?)?;
                let y = cuda::Matrix::new(&y, tokens, 2 * FEATURES)?;
                layer.silu_mul(step, y, cuda::MatrixMut::new(&mut out, tokens, FEATURES)?)
            })
            .unwrap();
        for case in &steps {
            let world = case.world::<T>();
            for slot in 0..capacity.num_slots {
                let at = Slot::new(slot as u16);
                match world.adapters.get(slot) {
                    Some(adapter) => drop(weights.load(at, &adapter.plan(model, T::DTYPE).unwrap()).unwrap()),
                    None => weights.unload(at).unwrap(),
                }
            }
            // Rows without a token hold NaN and do not change.
            let padded = |values: &[T], cols: usize| {
                let mut padded = vec![T::from_f32(f32::NAN); tokens * cols];
                padded[..case.num_tokens() * cols].copy_from_slice(&values[..case.num_tokens() * cols]);
                padded
            };
            x.write(&padded(&world.x, IN)).unwrap();
            y.write(&padded(&world.y, 2 * FEATURES)).unwrap();
            out.write(&padded(&world.out, FEATURES)).unwrap();
            routing.update(&Batch::new(&world.slots)).unwrap();
            graph.replay().unwrap();
            let (mut got, mut expected) = (vec![T::default(); out.len()], world.expected(case));
            out.read(&mut got).unwrap();
            expected.truncate(case.num_tokens() * FEATURES);
            expected.resize(tokens * FEATURES, Expected::Untouched(T::from_f32(f32::NAN)));
            let place = Place { rows: tokens, ..case.out() };
            compare(place, &got, &expected, &format!("{tokens} tokens, step {}", case.seed)).unwrap();
        }
    }
    let gpu = Gpu::new();
    for tokens in [16, 40, 512, 600] {
        run::<half::bf16>(&gpu, Dtype::BF16, tokens);
        run::<half::f16>(&gpu, Dtype::F16, tokens);
        run::<f32>(&gpu, Dtype::F32, tokens);
    }
}
