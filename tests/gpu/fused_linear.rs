//! The fused linear against the reference, through the safe and the raw API, in memory that is NaN outside the
//! operands.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aril::{
    DType, Element, Slot,
    cuda::{
        Buffer, FusedLinear, LaunchError, LoraLinear, Matrix, MatrixMut, Queue, Routing, Step, View, WeightTable,
        Workspace, raw,
    },
    error::OperandError,
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::{Capacity, ForwardPlan, MAX_FORWARD_TOKENS, WorkspaceBytes},
    routing::Batch,
};
use cudarc::driver::{CudaView, sys};
use half::bf16;
use proptest::prelude::*;

use crate::{
    backend::Value,
    common::{
        case::{Subject, loaded_slots},
        compare::Place,
        dense::{self, Sizes},
        fused_linear::{Case, Fused, World, cases},
        slices::SliceBuffers,
        small::choose,
        values::{Dtype, Values},
    },
    device::{
        self, Gpu,
        Refused::{Context, Misaligned, NotKept, Operand, Stream, TooSmall},
        refused,
    },
    for_dtype,
    operations::{
        PoisonedTable, bits, check_replays, mailbox_of_garbage, matrix, matrix_mut, property, raw_matrix,
        raw_matrix_mut, read_all, replayed, upload_all,
    },
};

fn sizes() -> Sizes {
    Sizes { max_tokens: MAX_FORWARD_TOKENS, ..Sizes::large() }
}

/// The safe API, on borrowed slices.
struct Safe<'a> {
    gpu: &'a Gpu,
}

/// The raw API.
#[derive(Clone, Copy)]
struct Raw<'a> {
    gpu: &'a Gpu,
    /// Rows of the batch beyond the live ones, as in a captured graph; and slots of the routing beyond the table's.
    padded_tokens: usize,
    /// Launch from a captured graph.
    captured: bool,
    /// Every block computes all sums itself, instead of taking them from other blocks.
    withholds: bool,
}

impl<'a> Raw<'a> {
    fn eager(gpu: &'a Gpu) -> Self {
        Self { gpu, padded_tokens: 0, captured: false, withholds: false }
    }
}

impl Subject<Fused> for Safe<'_> {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let (gpu, queue) = (self.gpu, &self.gpu.queue);
        let capacity = world.capacity(case.num_tokens());
        let weights = WeightTable::new(queue, &world.model, T::DTYPE, capacity, 1 << 26).unwrap();
        for (slot, adapter) in world.adapters.iter().enumerate() {
            weights.load(slot, &adapter.plan(&world.model, T::DTYPE).unwrap()).unwrap();
        }
        let base = case.base::<T>(case.values);
        let w: Vec<_> = base.slices.iter().map(|(_, w)| gpu.upload(w)).collect();
        let slices = base.slices.iter().zip(&w).map(|((place, _), w)| matrix(&w.view(), *place));
        let layer = FusedLinear::<T>::new(&weights, world.id, slices).unwrap();
        let bias = base.bias.as_ref().map(|(place, bias)| (place.cols, gpu.upload(bias)));
        let layer = match &bias {
            Some((outs, bias)) => layer.with_bias(bias.view::<T>().slice(..*outs)).unwrap(),
            None => layer,
        };
        let mut routing = Routing::new(queue, capacity, 1).unwrap();
        let slots = world.loaded_slots(|slot| weights.get(slot));
        let batch = routing.update(&world.batch_of(&slots)).unwrap();
        let x = gpu.upload(&world.x);
        let x_view: CudaView<'_, T> = x.view();
        let x_matrix = matrix(&x_view, case.x());
        let outputs = SliceBuffers::new(&world.y, case.y(), &case.slices(), case.separate);
        let mut buffers = upload_all(gpu, &outputs);
        let mut views: Vec<_> = buffers.iter_mut().map(device::Buffer::view_mut::<T>).collect();
        let y = outputs.matrices(&mut views, matrix_mut);
        let mut workspace = Workspace::new(&weights).unwrap();
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        if case.accumulates {
            layer.accumulate(&mut step, x_matrix, y).unwrap();
        } else {
            layer.forward(&mut step, x_matrix, y).unwrap();
        }
        outputs.merged(read_all(&buffers))
    }
}

impl Subject<Fused> for Raw<'_> {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let (gpu, padded) = (self.gpu, self.padded_tokens);
        let (live, model, stream) = (case.num_tokens(), &world.model, gpu.raw_stream());
        let tokens = live + padded;
        let capacity = world.capacity(tokens);
        let routed = capacity.slots(capacity.num_slots + padded);
        let memory = gpu.without_indices(raw::Routing::device_bytes(routed).unwrap());
        // SAFETY: the memory outlives the routing and is used on one stream.
        let mut routing = unsafe { raw::Routing::new(&gpu.kernels, routed, 1, memory.region()) }.unwrap();
        // SAFETY: the stream is alive and not capturing.
        unsafe { routing.update(&world.slots, world.scales.as_deref(), stream) }.unwrap();
        let batch = routing.capture_batch(tokens).unwrap();
        let table = PoisonedTable::new(gpu, world, capacity.num_slots);
        let table = raw::Table::new(model, T::DTYPE, table.address(), capacity.num_slots, capacity.max_rank);

        let base = case.base::<T>(case.values);
        let w: Vec<_> = base.slices.iter().map(|(_, w)| gpu.upload(w)).collect();
        let slices: Vec<_> = base.slices.iter().zip(&w).map(|((place, _), w)| raw_matrix::<T>(w, *place)).collect();
        let layer = raw::FusedLinear::new(&gpu.kernels, model, world.id, T::DTYPE, capacity, &slices).unwrap();
        let bias = base.bias.as_ref().map(|(_, bias)| gpu.upload(bias));
        let layer = bias.iter().fold(layer, |layer, bias| layer.with_bias(bias.address()));
        let layer = if self.withholds { layer.withholding() } else { layer };

        // Padded rows belong to the base model and hold NaN, which must not reach other rows.
        let [mut x, mut y] = [&world.x, &world.y].map(|values| values.clone());
        let ends = [case.x(), case.y()].map(|place| (place.at(live, 0), padded * place.stride));
        x.splice(ends[0].0..ends[0].0, vec![T::from_f32(f32::NAN); ends[0].1]);
        y.splice(ends[1].0..ends[1].0, vec![T::from_f32(7.0); ends[1].1]);
        let x = gpu.upload(&x);
        let grown = |place: Place| Place { rows: tokens, ..place };
        let x_matrix = raw_matrix::<T>(&x, grown(case.x()));
        let outputs = SliceBuffers::new(&y, grown(case.y()), &case.slices(), case.separate);
        let buffers = upload_all(gpu, &outputs);
        let y = outputs.matrices(&buffers, raw_matrix_mut::<T>);
        let mailbox = mailbox_of_garbage(gpu, layer.plan().workspace_bytes_for(tokens).mailbox);
        let workspace = raw::Workspace { mailbox: mailbox.region(), partials: raw::DeviceRegion { ptr: 0, bytes: 0 } };
        let step = raw::Step::new(table, batch, workspace, stream);
        let launch = || {
            if case.accumulates {
                // SAFETY: the test owns all operands and keeps them alive until the stream is synchronized.
                unsafe { layer.accumulate(&step, x_matrix, y) }.unwrap();
            } else {
                // SAFETY: as above.
                unsafe { layer.forward(&step, x_matrix, y) }.unwrap();
            }
        };
        if self.captured {
            gpu.capture(launch).replay();
        } else {
            launch();
        }
        let mut result = outputs.merged(read_all::<T>(&buffers));
        let (first, len) = ends[1];
        let padded: Vec<T> = result.drain(first..first + len).collect();
        for row in padded.chunks(case.y().stride) {
            let (row, gap) = row.split_at(case.y().cols);
            assert!(row.iter().all(|y| y.to_f32().is_nan()), "a padded row has no product\n{}", case.replay());
            assert!(gap.iter().all(|y| y.to_f32() == 7.0), "a gap was written\n{}", case.replay());
        }
        result
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_raw_door_agrees_with_the_reference() {
    let gpu = Gpu::new();
    property(200, cases(sizes()), |case| {
        let padded_tokens = ((case.seed % 5) as usize * 7).min(MAX_FORWARD_TOKENS - case.num_tokens());
        let [captured, withholds] = [2, 3].map(|divisor| case.seed.is_multiple_of(divisor));
        for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens, captured, withholds }))
    });
}

#[test]
#[ignore = "needs a GPU"]
fn the_safe_api_agrees_with_the_reference() {
    let gpu = Gpu::new();
    property(100, cases(sizes()), |case| for_dtype!(case.check(&mut Safe { gpu: &gpu })));
}

/// A `y` for each slice gives the bits of one for all, and no operation writes around them.
#[test]
#[ignore = "needs a GPU"]
fn separate_outputs_have_the_bits_of_a_fused_one() {
    fn run<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
        case.check_separate::<T>(&mut Safe { gpu })?;
        case.check_separate::<T>(&mut Raw { captured: true, ..Raw::eager(gpu) })
    }
    let gpu = Gpu::new();
    property(80, cases(sizes()), |case| for_dtype!(case, run(&gpu, &case)));
    // Aligned and misaligned pairs of outputs, with one team of multipliers and with two.
    for tokens in [8, 16, 32] {
        for (dtype, slices) in [(Dtype::BF16, [512, 128, 128]), (Dtype::F16, [33, 70, 17])] {
            let slots = (0..tokens).map(|token| token % 4 - 1).collect();
            let dense = dense::Case::linear(264, &slices, &[&[16, 8, 1], &[0, 64, 3], &[5, 0, 0]], slots);
            for accumulates in [false, true] {
                let case = Case::fused(dense::Case { dtype, ..dense.clone() }, accumulates);
                for_dtype!(case, run(&gpu, &case)).unwrap();
            }
        }
    }
}

/// Boundaries of a tile of W, of a cluster's K and of a slice: exact sums of integers.
#[test]
#[ignore = "needs a GPU"]
fn corners() {
    let gpu = Gpu::new();
    let many = |tokens: usize| (0..tokens as i32).map(|token| token % 4 - 1).collect::<Vec<_>>();
    let mut corners: Vec<_> = dense::Case::of_many_features(choose(&[1, 16, 24, 32], &[8, 24]))
        .into_iter()
        .filter(|case| case.in_features().is_multiple_of(8))
        .map(|case| dense::Case { gaps: [0; 3], ..case })
        .collect();
    let of_many_slices = dense::Case::of_many_slices(choose(&[1, 19, 32, 8, 17], &[1, 19])).into_iter();
    corners.extend(of_many_slices.map(|mut case| {
        if let dense::Op::Linear { in_features, .. } = &mut case.op {
            *in_features = 704;
        }
        let dtype = if matches!(case.dtype, Dtype::F32) { Dtype::BF16 } else { case.dtype };
        dense::Case { dtype, ..case }
    }));
    corners.extend([
        // Wide enough for blocks with whole rows of W, and one row more than a cluster of two has.
        dense::Case::linear(64, &[12_672 + 1], &[&[8], &[3]], many(9)),
        dense::Case::linear(136, &[choose(12_672, 672)], &[&[16], &[1]], many(32)),
        dense::Case::linear(8, &[1], &[&[1]], many(1)),
        dense::Case::linear(72, &[15, 16, 17, 31, 32, 33], &[&[4, 0, 1, 9, 16, 17], &[0; 6]], many(17)),
        dense::Case::linear(72, &[15, 16, 17, 31, 32, 33], &[&[4, 0, 1, 9, 16, 17], &[0; 6]], many(29)),
        // The largest rank beside rank 1.
        dense::Case::linear(96, &[300, 20], &[&[512, 1], &[1, 512]], many(32)),
        // As many adapters as tokens, none with an adapter, no adapters, no tokens.
        dense::Case::linear(256, &[96], &(0..32).map(|_| &[16_usize][..]).collect::<Vec<_>>(), (0..32).rev().collect()),
        dense::Case::linear(40, &[40], &[&[4]], vec![-1; 30]),
        dense::Case::linear(40, &[40], &[], vec![0, 5, -1]),
        dense::Case::linear(40, &[40], &[&[4]], vec![]),
    ]);
    for dense in corners {
        for accumulates in [false, true] {
            let case = Case::fused(dense.clone(), accumulates);
            for &withholds in choose(&[false, true][..], &[accumulates]) {
                for_dtype!(case.check(&mut Raw { withholds, ..Raw::eager(&gpu) })).unwrap();
            }
            for_dtype!(case.check(&mut Safe { gpu: &gpu })).unwrap();
        }
    }
}

/// Results have the same bits when repeated, captured or padded, through either API, whichever block computes `A x`,
/// and in any batch.
#[test]
#[ignore = "needs a GPU"]
fn a_tokens_bits_depend_on_nothing_else() {
    fn run<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
        let (world, mut eager) = (case.world::<T>(), Raw::eager(gpu));
        let first = case.check_invariance::<T>(&mut eager, &[1, 8, 9, 16, 17], case.num_tokens() / 3 + 1)?;
        let padded_tokens = 3.min(MAX_FORWARD_TOKENS - case.num_tokens());
        let others = [
            ("twice", eager),
            ("captured", Raw { captured: true, ..eager }),
            ("padded", Raw { padded_tokens, ..eager }),
            ("withheld", Raw { withholds: true, ..eager }),
        ];
        for (name, mut subject) in others {
            prop_assert!(bits(&first) == bits(&subject.run(case, &world)), "{name} differs\n{}", case.replay());
        }
        prop_assert!(bits(&first) == bits(&Safe { gpu }.run(case, &world)), "the safe API differs\n{}", case.replay());
        // From the last token to the first.
        let mut reversed = case.world::<T>();
        reversed.slots.reverse();
        reversed.scales.iter_mut().for_each(|scales| scales.reverse());
        let row = |place: Place, token: usize| place.at(token, 0)..place.at(token, 0) + place.cols;
        for token in 0..case.num_tokens() {
            let last = case.num_tokens() - 1 - token;
            reversed.x[row(case.x(), token)].copy_from_slice(&world.x[row(case.x(), last)]);
            reversed.y[row(case.y(), token)].copy_from_slice(&world.y[row(case.y(), last)]);
        }
        let reversed = eager.run(case, &reversed);
        let mut base = case.world::<T>();
        base.slots.fill(-1);
        let base = eager.run(case, &base);
        for token in 0..case.num_tokens() {
            let (at, last) = (row(case.y(), token), row(case.y(), case.num_tokens() - 1 - token));
            prop_assert!(
                bits(&first[at.clone()]) == bits(&reversed[last]),
                "token {token} in another place differs\n{}",
                case.replay()
            );
            if case.adapter(token).is_none() {
                prop_assert!(
                    bits(&first[at.clone()]) == bits(&base[at]),
                    "base row {token} differs without adapters\n{}",
                    case.replay()
                );
            }
        }
        Ok(())
    }
    let gpu = Gpu::new();
    property(50, cases(sizes()), |case| for_dtype!(case, run(&gpu, &case)));
    for dtype in [Dtype::BF16, Dtype::F16] {
        let all = [(1304, [4096, 40]), (4104, [264, 72]), (200, [13_000, 24])];
        for &(in_features, slices) in choose(&all[..], &[(1032, [264, 40])]) {
            let slots = (0..32).map(|token| token % 7 - 1).collect();
            let adapters: [&[usize]; 5] = [&[16, 8], &[1, 128], &[64, 0], &[33, 7], &[100, 512]];
            let dense = dense::Case::linear(in_features, &slices, &adapters, slots);
            let case = Case::fused(dense::Case { dtype, values: Values::Rounded, ..dense }, false);
            for_dtype!(case, run(&gpu, &case)).unwrap();
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn infinite_sums_stay_infinite() {
    let gpu = Gpu::new();
    for dense in [8, 16, 32].into_iter().flat_map(|tokens| dense::Case::of_infinities(tokens, 64)) {
        let case = Case::fused(dense, false);
        for_dtype!(case.check_infinities(&mut Raw::eager(&gpu))).unwrap();
    }
}

/// NaN in one token's rows does not reach other tokens.
#[test]
#[ignore = "needs a GPU"]
fn a_tokens_nan_is_its_own() {
    let gpu = Gpu::new();
    property(100, cases(sizes()), |case| {
        for_dtype!(case.check_nan(&mut Raw { withholds: case.seed.is_multiple_of(2), ..Raw::eager(&gpu) }))
    });
}

/// On integers, the ranks of a column-parallel layer compute its parts, and those of a row-parallel layer add up to it.
#[test]
#[ignore = "needs a GPU"]
fn tensor_parallel_ranks_are_parts_of_the_whole() {
    const IN: usize = 1040;
    const SLICES: [usize; 2] = [80, 48];
    let gpu = Gpu::new();
    let slots = (0..29).map(|token| token % 3 - 1).collect();
    let dense = dense::Case::linear(IN, &SLICES, &[&[16, 3], &[40, 0]], slots);
    let case = Case { gaps: [0; 3], ..Case::fused(dense, false) };
    let (world, base) = (case.world::<bf16>(), case.base::<bf16>(Values::Exact));
    let tokens = case.num_tokens();
    for parallel in [Parallel::Column, Parallel::Row] {
        let mut spec = ModelSpec::new();
        let modules = SLICES.iter().enumerate();
        let linear =
            modules.fold(Linear::new("layer", parallel, IN), |layer, (i, out)| layer.slice(format!("m{i}"), *out));
        // The layers before and after the case's, which every adapter has.
        spec.linear(Linear::new("before", Parallel::Replicated, 3).slice("m0", 5)).unwrap();
        let id = spec.linear(linear).unwrap();
        spec.linear(Linear::new("behind", Parallel::Replicated, 3).slice("m0", 5)).unwrap();
        let run = |tp: TpRank| -> Vec<Vec<f32>> {
            let model = spec.shard(tp).unwrap();
            let capacity = world.capacity(tokens);
            let weights = WeightTable::new(&gpu.queue, &model, DType::BF16, capacity, 1 << 24).unwrap();
            for (slot, adapter) in world.adapters.iter().enumerate() {
                weights.load(slot, &adapter.plan(&model, DType::BF16).unwrap()).unwrap();
            }
            let (site, columns) = (&model[id], model[id].in_range());
            let w: Vec<_> = base.slices.iter().map(|(_, w)| gpu.upload(w)).collect();
            let views: Vec<CudaView<'_, bf16>> = w.iter().map(|w| w.view()).collect();
            let slices = site.slices().iter().zip(&base.slices).zip(&views).map(|((slice, (place, _)), w)| {
                let offset = place.at(slice.ranges()[0].start, columns.start);
                matrix(w, Place { offset, rows: slice.out_features(), cols: columns.len(), ..*place })
            });
            let layer = FusedLinear::new(&weights, id, slices).unwrap();
            let mut routing = Routing::new(&gpu.queue, capacity, 1).unwrap();
            let slots = world.loaded_slots(|slot| weights.get(slot));
            let batch = routing.update(&world.batch_of(&slots)).unwrap();
            let outs = site.out_features();
            let (x, mut y) = (gpu.upload(&world.x), gpu.upload(&vec![bf16::NAN; tokens * outs]));
            let x_place = Place { offset: columns.start, cols: columns.len(), ..case.x() };
            let y_place = Place { offset: 0, rows: tokens, cols: outs, stride: outs };
            let mut workspace = Workspace::new(&weights).unwrap();
            let mut step = weights.step(&batch, &mut workspace).unwrap();
            let mut y_view = y.view_mut::<bf16>();
            layer.forward(&mut step, matrix(&x.view(), x_place), matrix_mut(&mut y_view, y_place)).unwrap();
            y.read::<bf16>().chunks(outs).map(|row| row.iter().map(|y| y.to_f32()).collect()).collect()
        };
        let whole = run(TpRank::SINGLE);
        let [first, second] = [0, 1].map(|rank| run(TpRank::new(rank, 2).unwrap()));
        for token in 0..tokens {
            let (first, second) = (&first[token], &second[token]);
            if parallel == Parallel::Row {
                // Each part rounds once, and so does the whole.
                for (out, (a, b)) in first.iter().zip(second).enumerate() {
                    let bound = DType::BF16.unit_roundoff() as f32 * (a.abs() + b.abs() + whole[token][out].abs());
                    assert!((a + b - whole[token][out]).abs() <= bound, "token {token}, output {out}");
                }
            } else {
                let half = SLICES[0] / 2;
                let joined = [&first[..half], &second[..half], &first[half..], &second[half..]].concat();
                assert_eq!(joined, whole[token], "token {token}");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_replay_sees_what_changed() {
    fn run<T: Value>(gpu: &Gpu, dtype: Dtype, tokens: usize) {
        let steps = replayed(tokens, |seed, adapters, slots| {
            let adapters: Vec<_> = adapters.iter().map(|ranks| &ranks[..]).collect();
            let dense = dense::Case::linear(1104, &[264, 72], &adapters, slots);
            Case::fused(dense::Case { dtype, seed, ..dense }, false)
        });
        let base = steps[0].base::<T>(steps[0].values);
        let of = |values: &[T]| {
            let mut buffer = Buffer::<T>::zeros(&gpu.queue, values.len()).unwrap();
            buffer.write(values).unwrap();
            buffer
        };
        let w: Vec<_> = base.slices.iter().map(|(place, w)| (place, of(w))).collect();
        let bias = of(&base.bias.unwrap().1[..264 + 72]);
        check_replays::<T, _, _>(gpu, &steps, tokens, |weights, id| {
            let slices = w.iter().map(|(place, w)| {
                Matrix::strided(w.slice(place.offset..w.len()), place.rows, place.cols, place.stride).unwrap()
            });
            let layer = FusedLinear::new(weights, id, slices).unwrap().with_bias(&bias).unwrap();
            move |step, x, _, y| layer.forward(step, x, y)
        });
    }
    let gpu = Gpu::new();
    for &tokens in choose(&[8, 16, 24, 32][..], &[8, 24]) {
        run::<half::bf16>(&gpu, Dtype::BF16, tokens);
        run::<half::f16>(&gpu, Dtype::F16, tokens);
    }
}

const IN: usize = 64;
const OUT: [usize; 2] = [40, 8];
const OUTS: usize = OUT[0] + OUT[1];

/// A layer of two slices.
fn spec() -> (ModelSpec, LinearId) {
    let mut spec = ModelSpec::new();
    let id = spec.linear(Linear::new("m", Parallel::Replicated, IN).slice("q", OUT[0]).slice("v", OUT[1])).unwrap();
    (spec, id)
}

fn table(queue: &Queue, model: &Model, dtype: DType, tokens: usize) -> WeightTable {
    let capacity = Capacity::tokens(tokens).slots(2).rank(16);
    WeightTable::new(queue, model, dtype, capacity, 1 << 16).unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn the_raw_door_refuses_by_name() {
    let gpu = Gpu::new();
    let (spec, id) = spec();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(100).slots(2).rank(16);
    let memory = gpu.poisoned(1 << 16);
    let at = |offset: u64, rows, cols| raw::MatrixRef::new::<bf16>(memory.address() + offset, rows, cols);
    let w = [at(0, OUT[0], IN), at(1 << 15, OUT[1], IN)];
    let new =
        |slices: &[raw::MatrixRef]| raw::FusedLinear::new(&gpu.kernels, &model, id, DType::BF16, capacity, slices);
    let of = |slices: &[raw::MatrixRef]| refused(new(slices));
    for (slice, misaligned) in [(0, at(2, OUT[0], IN)), (1, at(8, OUT[1], IN))] {
        let mut slices = w;
        slices[slice] = misaligned;
        assert_eq!(of(&slices), Misaligned("W", 16));
    }
    let rows =
        |operand, stride| Operand(OperandError::MisalignedRows { operand, alignment: 16, stride_bytes: 2 * stride });
    assert_eq!(of(&[w[0], w[1].row_stride(IN + 1)]), rows("W", IN + 1));
    let of_f16 = raw::MatrixRef::new::<half::f16>(memory.address(), OUT[1], IN);
    let of_type = |operand, got| Operand(OperandError::DType { operand, got, want: DType::BF16 });
    assert_eq!(of(&[w[0], of_f16]), of_type("W", DType::F16));
    let elsewhere = std::thread::scope(|scope| scope.spawn(|| of(&w)).join().unwrap());
    assert_eq!(elsewhere, Context("the thread"));

    let layer = new(&w).unwrap();
    assert_eq!(layer.plan().max_tokens(), MAX_FORWARD_TOKENS);
    let table = table(&gpu.queue, &model, DType::BF16, 100);
    let memory = gpu.without_indices(raw::Routing::device_bytes(capacity).unwrap());
    // SAFETY: the memory outlives the routing and is used on one stream.
    let mut routing = unsafe { raw::Routing::new(&gpu.kernels, capacity, 1, memory.region()) }.unwrap();
    // SAFETY: the stream is alive and not capturing.
    unsafe { routing.update(&[-1; 70], None, gpu.raw_stream()) }.unwrap();
    let (x, y) = (gpu.upload(&[bf16::ONE; 70 * (IN + 8)]), gpu.upload(&[bf16::ONE; 70 * OUTS]));
    let bytes = layer.plan().workspace_bytes_for(MAX_FORWARD_TOKENS);
    let workspace = Workspace::with_bytes(&gpu.queue, bytes).unwrap().raw();
    let run = |tokens, x: raw::MatrixRef, y: raw::MatrixMut, workspace| {
        let step = raw::Step::new(table.raw(), routing.capture_batch(tokens).unwrap(), workspace, gpu.raw_stream());
        // SAFETY: the test owns all operands and keeps them alive until the stream is synchronized.
        let results = [unsafe { layer.forward(&step, x, y) }, unsafe { layer.accumulate(&step, x, y) }];
        let [first, second] = results.map(refused);
        assert_eq!(first, second);
        first
    };
    let x_at = |offset: u64, tokens| raw::MatrixRef::new::<bf16>(x.address() + offset, tokens, IN);
    let y_of = |tokens| raw::MatrixMut::new::<bf16>(y.address(), tokens, OUTS);
    let of_x = |x| run(3, x, y_of(3), workspace);
    assert_eq!(of_x(x_at(8, 3)), Misaligned("x", 16));
    assert_eq!(of_x(x_at(0, 3).row_stride(IN + 4)), rows("x", IN + 4));
    let of_f32 = |operand| of_type(operand, DType::F32);
    assert_eq!(run(3, x_at(0, 3), raw::MatrixMut::new::<f32>(y.address(), 3, OUTS), workspace), of_f32("y"));
    let step = raw::Step::new(table.raw(), routing.capture_batch(3).unwrap(), workspace, gpu.raw_stream());
    let ys = [
        raw::MatrixMut::new::<bf16>(y.address(), 3, OUT[0]),
        raw::MatrixMut::new::<f32>(y.address() + (1 << 10), 3, OUT[1]),
    ];
    // SAFETY: as above.
    assert_eq!(refused(unsafe { layer.forward(&step, x_at(0, 3), ys) }), of_f32("y[1]"));
    let mut short = workspace;
    short.mailbox.bytes -= 1;
    let too_small = TooSmall("the workspace", [bytes.mailbox - 1, bytes.mailbox]);
    assert_eq!(run(32, x_at(0, 32), y_of(32), short), too_small);
    let mut misaligned = workspace;
    misaligned.mailbox.ptr += 8;
    misaligned.mailbox.bytes -= 8;
    assert_eq!(run(3, x_at(0, 3), y_of(3), misaligned), Misaligned("the workspace", 16));
    assert!(y.read::<bf16>().iter().all(|&y| y == bf16::ONE));
}

/// Operands of another stream or context, misaligned ones, and a stream under capture are refused.
#[test]
#[ignore = "needs a GPU"]
fn the_safe_api_refuses_by_name() {
    let gpu = Gpu::new();
    let foreign = gpu.foreign();
    let foreign_values = Buffer::<bf16>::zeros(&foreign, IN * OUTS).unwrap();
    let (queue, other) = (&gpu.queue, Gpu::new().queue);
    let (spec, id) = spec();
    let weights = table(queue, &spec.shard(TpRank::SINGLE).unwrap(), DType::BF16, 100);
    let values = gpu.upload(&vec![bf16::ONE; 100 * (IN + 4)]);
    let view: CudaView<'_, bf16> = values.view();
    let other_buffer = Buffer::<bf16>::zeros(&other, IN * OUTS).unwrap();
    let w = |first: usize, rows| Matrix::new(view.slice(first..), rows, IN).unwrap();
    let new = |slices| FusedLinear::new(&weights, id, slices).map(drop);

    new([w(0, OUT[0]), w(8, OUT[1])]).unwrap();
    assert_eq!(refused(new([w(4, OUT[0]), w(8, OUT[1])])), Misaligned("W", 16));
    assert_eq!(refused(new([Matrix::new(&foreign_values, OUT[0], IN).unwrap(), w(0, OUT[1])])), Context("W"));
    assert_eq!(refused(new([w(0, OUT[0]), Matrix::new(&other_buffer, OUT[1], IN).unwrap()])), Stream("W"));

    let layer = || FusedLinear::new(&weights, id, [w(0, OUT[0]), w(0, OUT[1])]).unwrap();
    assert_eq!(refused(layer().with_bias(foreign_values.slice(0..OUTS))), Context("bias"));
    assert_eq!(refused(layer().with_bias(other_buffer.slice(0..OUTS))), Stream("bias"));

    let layer = layer().with_bias(view.slice(1..=OUTS)).unwrap();
    let mut routing = Routing::new(queue, weights.capacity(), 8).unwrap();
    let mut workspace = Workspace::new(&weights).unwrap();
    let mut y = gpu.upload(&[bf16::ONE; 100 * OUTS]);
    for (x, refusal) in [
        (Ok(w(1, 3)), Misaligned("x", 16)),
        (Matrix::new(&foreign_values, 3, IN), Context("x")),
        (Matrix::new(&other_buffer, 3, IN), Stream("x")),
    ] {
        let batch = routing.update(&Batch::new(&[Slot::BASE; 3])).unwrap();
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let y = MatrixMut::new(y.view_mut(), 3, OUTS).unwrap();
        assert_eq!(refused(layer.forward(&mut step, x.unwrap(), y)), refusal);
    }
    assert!(y.read::<bf16>().iter().all(|&y| y == bf16::ONE));

    let (batch, mut other_y) = (routing.update(&Batch::new(&[Slot::BASE; 3])).unwrap(), other_buffer);
    let ys = [MatrixMut::new(y.view_mut(), 3, OUT[0]).unwrap(), MatrixMut::new(&mut other_y, 3, OUT[1]).unwrap()];
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    assert_eq!(refused(layer.forward(&mut step, w(0, 3), ys)), Stream("y[1]"));
    let batch = routing.update(&Batch::new(&[Slot::BASE; 3])).unwrap();
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    gpu.synchronize();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    gpu.stream.begin_capture(mode).unwrap();
    let while_captured = [
        FusedLinear::new(&weights, id, [w(0, OUT[0]), w(0, OUT[1])]).map(drop),
        layer.forward(&mut step, w(0, 3), MatrixMut::new(y.view_mut(), 3, OUTS).unwrap()),
    ];
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    gpu.stream.end_capture(flags).expect("the capture was disturbed");
    for result in while_captured {
        assert!(matches!(result, Err(LaunchError::Capturing)), "{result:?}");
    }
    // All ones: x Wᵀ is 64, and the bias 1.
    layer.forward(&mut step, w(0, 3), MatrixMut::new(y.view_mut(), 3, OUTS).unwrap()).unwrap();
    let y = y.read::<bf16>();
    assert!(y[..3 * OUTS].iter().all(|y| y.to_f32() == 65.0) && y[3 * OUTS..].iter().all(|&y| y == bf16::ONE));
}

/// A layer whose slices have parts of one W.
fn in_parts<'a>(weights: &WeightTable, id: LinearId, w: &View<'a, bf16>) -> Result<FusedLinear<'a, bf16>, LaunchError> {
    let rows = |first: usize, rows: usize| Matrix::new(w.slice(first * IN..(first + rows) * IN), rows, IN);
    FusedLinear::new(weights, id, [rows(0, OUT[0])?, rows(OUT[0], OUT[1])?])
}

/// The kernel reads W before it waits for the one in front of it. So a layer that is created within a capture is not
/// recorded there: W may be what the capture writes. A graph that was captured before may write W between launches,
/// which it ends before.
#[test]
#[ignore = "needs a GPU"]
fn a_layer_reads_w_behind_what_writes_it() {
    const TOKENS: usize = 5;
    let gpu = Gpu::new();
    let queue = &gpu.queue;
    let (spec, id) = spec();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let weights = table(queue, &model, DType::BF16, TOKENS);
    let mut routing = Routing::new(queue, weights.capacity(), 1).unwrap();
    let [mut workspace, mut of_layer] = [(); 2].map(|()| Workspace::new(&weights).unwrap());
    let (x, bias, mut y) =
        (buffer(queue, TOKENS * IN, 1.0), buffer(queue, OUTS, 3.0), buffer(queue, TOKENS * OUTS, 0.0));
    let (mut w, mut next) = (buffer(queue, OUTS * IN, 0.5), buffer(queue, OUTS * IN, 0.0));
    let forward = |layer: &FusedLinear<'_, bf16>, step: &mut Step<'_>, y: &mut Buffer<bf16>| {
        layer.forward(step, Matrix::new(&x, TOKENS, IN)?, MatrixMut::new(y, TOKENS, OUTS)?)
    };
    let is_refused = |result: Result<(), LaunchError>| {
        assert!(matches!(result, Err(LaunchError::CreatedInCapture { layer: "the fused linear" })), "{result:?}");
    };
    let record = |step: &mut Step<'_>| -> Result<(), LaunchError> {
        step.copy(&next, &mut w)?;
        let view = View::from(&w);
        is_refused(forward(&in_parts(&weights, id, &view)?, step, &mut y));
        Ok(())
    };
    let mut writes = weights.capture(&routing, TOKENS, &mut workspace, record).unwrap();
    let view = View::from(&w);
    let older = in_parts(&weights, id, &view).unwrap();
    let record = |step: &mut Step<'_>| -> Result<(), LaunchError> {
        is_refused(forward(&in_parts(&weights, id, &view)?.with_bias(&bias)?, step, &mut y));
        forward(&older, step, &mut y)
    };
    weights.capture(&routing, TOKENS, &mut of_layer, record).unwrap();

    let batch = routing.update(&Batch::new(&[Slot::BASE; TOKENS])).unwrap();
    for value in 1..choose(200, 20) {
        next.write(&vec![bf16::from_f32(value as f32 / 64.0); OUTS * IN]).unwrap();
        writes.replay(&mut weights.step(&batch, &mut workspace).unwrap()).unwrap();
        forward(&older, &mut weights.step(&batch, &mut of_layer).unwrap(), &mut y).unwrap();
        assert_eq!(contents(&y), vec![bf16::from_f32(value as f32 / 64.0 * IN as f32).to_f32(); TOKENS * OUTS]);
    }
}

/// q, k and v may have parts of one shared W, without a lifetime.
#[test]
#[ignore = "needs a GPU"]
fn slices_of_a_layer_share_one_w() {
    let gpu = Gpu::new();
    let (spec, id) = spec();
    let weights = table(&gpu.queue, &spec.shard(TpRank::SINGLE).unwrap(), DType::BF16, 1);
    let w = Arc::new(buffer(&gpu.queue, OUTS * IN, 0.5));
    let layer: FusedLinear<'static, bf16> = in_parts(&weights, id, &View::from(w)).unwrap();
    let (x, mut y) = (buffer(&gpu.queue, IN, 1.0), buffer(&gpu.queue, OUTS, 0.0));
    let mut routing = Routing::new(&gpu.queue, weights.capacity(), 1).unwrap();
    let mut workspace = Workspace::new(&weights).unwrap();
    let batch = routing.update(&Batch::new(&[Slot::BASE])).unwrap();
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    let (x, target) = (Matrix::new(&x, 1, IN).unwrap(), MatrixMut::new(&mut y, 1, OUTS).unwrap());
    layer.forward(&mut step, x, target).unwrap();
    assert_eq!(contents(&y), vec![0.5 * IN as f32; OUTS]);
}

/// Memory of the queue, filled with `value`.
fn buffer(queue: &Queue, len: usize, value: f32) -> Buffer<bf16> {
    let mut buffer = Buffer::zeros(queue, len).unwrap();
    buffer.write(&vec![bf16::from_f32(value); len]).unwrap();
    buffer
}

fn contents(buffer: &Buffer<bf16>) -> Vec<f32> {
    let mut values = vec![bf16::ZERO; buffer.len()];
    buffer.read(&mut values).unwrap();
    values.into_iter().map(bf16::to_f32).collect()
}

/// A graph keeps W and the bias alive, and refuses them if it cannot.
#[test]
#[ignore = "needs a GPU"]
fn a_graph_keeps_w_and_the_bias() {
    const TOKENS: usize = 5;
    let gpu = Gpu::new();
    let queue = &gpu.queue;
    let (spec, id) = spec();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let weights = table(queue, &model, DType::BF16, TOKENS);
    let mut routing = Routing::new(queue, weights.capacity(), 1).unwrap();
    let mut workspace = Workspace::new(&weights).unwrap();
    let slice = gpu.stream.clone_htod(&vec![bf16::ONE; OUT[0] * IN]).unwrap();
    let (x, bias) = (buffer(queue, TOKENS * IN, 1.0), buffer(queue, OUTS, 3.0));
    let (w, mut y) = (OUT.map(|out| buffer(queue, out * IN, 0.5)), buffer(queue, TOKENS * OUTS, 0.0));
    let kept = |slice: usize| Matrix::new(&w[slice], OUT[slice], IN).unwrap();
    fn target(y: &mut Buffer<bf16>) -> MatrixMut<'_, bf16> {
        MatrixMut::new(y, TOKENS, OUTS).unwrap()
    }
    let input = || Matrix::new(&x, TOKENS, IN).unwrap();

    let layer = FusedLinear::new(&weights, id, [Matrix::new(&slice, OUT[0], IN).unwrap(), kept(1)]).unwrap();
    let record = |step: &mut Step<'_>| layer.forward(step, input(), target(&mut y));
    assert_eq!(refused(weights.capture(&routing, TOKENS, &mut workspace, record)), NotKept("W"));
    let layer = FusedLinear::new(&weights, id, [kept(0), kept(1)]).unwrap();
    let borrowed = FusedLinear::new(&weights, id, [kept(0), kept(1)]).unwrap().with_bias(slice.slice(..OUTS)).unwrap();
    let record = |step: &mut Step<'_>| borrowed.forward(step, input(), target(&mut y));
    assert_eq!(refused(weights.capture(&routing, TOKENS, &mut workspace, record)), NotKept("bias"));

    let layer = layer.with_bias(&bias).unwrap();
    let record = |step: &mut Step<'_>| -> Result<(), LaunchError> {
        layer.forward(step, input(), target(&mut y))?;
        layer.accumulate(step, input(), target(&mut y))
    };
    let mut graph = weights.capture(&routing, TOKENS, &mut workspace, record).unwrap();
    let batch = routing.update(&Batch::new(&[Slot::BASE; TOKENS])).unwrap();
    gpu.synchronize();
    drop((layer, borrowed));
    drop((x, w, bias));
    gpu.synchronize();
    // If the graph did not keep them, their memory would now hold other values.
    let others: Vec<_> = [OUT[0] * IN, OUT[1] * IN, OUTS, TOKENS * IN, 1 << 16]
        .into_iter()
        .flat_map(|len| (0..32).map(move |_| len))
        .map(|len| buffer(queue, len, f32::NAN))
        .collect();
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    for _ in 0..2 {
        graph.replay(&mut step).unwrap();
        // Twice 64 / 2 and the bias.
        assert_eq!(contents(&y), [2.0 * (32.0 + 3.0); TOKENS * OUTS]);
    }
    assert!(others.iter().all(|other| contents(other).iter().all(|value| value.is_nan())));
}

/// Work enqueued before a layer is created has written W: the kernel loads W before it waits for earlier kernels.
#[test]
#[ignore = "needs a GPU"]
fn w_may_be_the_result_of_an_operation() {
    let gpu = Gpu::new();
    let queue = &gpu.queue;
    let (spec, id) = spec();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    const TOKENS: usize = IN / 2;
    let weights = table(queue, &model, DType::BF16, TOKENS);
    let mut routing = Routing::new(queue, weights.capacity(), 1).unwrap();
    let mut workspace = Workspace::new(&weights).unwrap();
    let (x, first) = (buffer(queue, TOKENS * IN, 1.0), buffer(queue, OUTS * IN, 0.25));
    fn rows(w: &Buffer<bf16>, first: usize, rows: usize) -> Matrix<'_, bf16> {
        Matrix::new(w.slice(first * IN..(first + rows) * IN), rows, IN).unwrap()
    }
    let layer = FusedLinear::new(&weights, id, [rows(&first, 0, OUT[0]), rows(&first, OUT[0], OUT[1])]).unwrap();
    let batch = routing.update(&Batch::new(&[Slot::BASE; TOKENS])).unwrap();
    for _ in 0..choose(50, 5) {
        // Two of [32, 48], read as [48, 64].
        let (mut second, mut y) = (buffer(queue, IN * OUTS, f32::NAN), buffer(queue, TOKENS * OUTS, 0.0));
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let x = || Matrix::new(&x, TOKENS, IN).unwrap();
        let (half, other) = second.split_at_mut(TOKENS * OUTS);
        for half in [half, other] {
            layer.forward(&mut step, x(), MatrixMut::new(half, TOKENS, OUTS).unwrap()).unwrap();
        }
        let slices = [rows(&second, 0, OUT[0]), rows(&second, OUT[0], OUT[1])];
        let next = FusedLinear::new(&weights, id, slices).unwrap();
        next.forward(&mut step, x(), MatrixMut::new(&mut y, TOKENS, OUTS).unwrap()).unwrap();
        // W is 64 / 4 everywhere, and a sum has 64 terms.
        assert_eq!(contents(&y), [1024.0; TOKENS * OUTS]);
    }
}

/// A workspace for all layers of a model is large enough for the fused linear.
#[test]
#[ignore = "needs a GPU"]
fn a_tables_workspace_is_enough() {
    let gpu = Gpu::new();
    let (spec, id) = spec();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    for tokens in [1, 64, 1000] {
        let weights = table(&gpu.queue, &model, DType::F16, tokens);
        let needed = ForwardPlan::new(&model[id], DType::F16, weights.capacity()).unwrap().workspace_bytes();
        let bytes = weights.workspace_bytes().unwrap();
        assert_eq!(bytes.max(needed), bytes);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_launch_allocates_nothing_on_the_host() {
    const TOKENS: usize = 32;
    let gpu = Gpu::new();
    let queue = &gpu.queue;
    let (spec, id) = spec();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let weights = table(queue, &model, DType::BF16, TOKENS);
    let mut routing = Routing::new(queue, weights.capacity(), 64).unwrap();
    let mut workspace = Workspace::new(&weights).unwrap();
    let (values, mut y) = (buffer(queue, OUTS * IN, 1.0), buffer(queue, TOKENS * OUTS, 0.0));
    let slices = OUT.map(|out| Matrix::new(&values, out, IN).unwrap());
    let layer = FusedLinear::new(&weights, id, slices).unwrap().with_bias(values.slice(0..OUTS)).unwrap();
    let slots = [Slot::BASE; TOKENS];
    let mut step = || {
        let batch = routing.update(&Batch::new(&slots)).unwrap();
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let x = || Matrix::new(&values, TOKENS, IN).unwrap();
        layer.forward(&mut step, x(), MatrixMut::new(&mut y, TOKENS, OUTS).unwrap()).unwrap();
        layer.accumulate(&mut step, x(), MatrixMut::new(&mut y, TOKENS, OUTS).unwrap()).unwrap();
    };
    step();
    assert_eq!(crate::hot_path::allocations(|| (0..20).for_each(|_| step())), 0);
}

/// Shares a workspace with the other operations, eager and captured, of other layers and batches. No launch reads sums
/// of another.
#[test]
#[ignore = "needs a GPU"]
fn a_workspace_remembers_nothing() {
    let gpu = Gpu::new();
    let queue = &gpu.queue;
    let (capacity, slots) = (Capacity::tokens(64).slots(4).rank(64), [0, 3, 1, -1, 2, 1, 0]);
    let dense = |in_features, slices: &[usize]| {
        let ranks: [Vec<usize>; 3] = [16, 64, 3].map(|rank| vec![rank; slices.len()]);
        let slots = (0..32).map(|token| slots[token % slots.len()]).collect();
        dense::Case::linear(in_features, slices, &ranks.each_ref().map(|ranks| &ranks[..]), slots)
    };
    let cases = [dense(1040, &[264, 40]), dense(264, &[24])]
        .map(|dense| Case::fused(dense::Case { values: Values::Rounded, ..dense }, false));
    // By layer.
    let worlds = cases.each_ref().map(|case| case.world::<bf16>());
    let tables = worlds.each_ref().map(|world| {
        let weights = WeightTable::new(queue, &world.model, DType::BF16, capacity, 1 << 22).unwrap();
        for (slot, adapter) in world.adapters.iter().enumerate() {
            let image = adapter.plan(&world.model, DType::BF16).unwrap();
            weights.load(slot, &image).unwrap();
        }
        weights
    });
    let of = |values: &[bf16]| {
        let mut buffer = Buffer::zeros(queue, values.len()).unwrap();
        buffer.write(values).unwrap();
        buffer
    };
    let bases = cases.each_ref().map(|case| case.base::<bf16>(case.values));
    let w = bases.each_ref().map(|base| base.slices.iter().map(|(_, w)| of(w)).collect::<Vec<_>>());
    let fused = [0, 1].map(|layer| {
        let slices = bases[layer].slices.iter().zip(&w[layer]).map(|((place, _), w)| {
            Matrix::strided(w.slice(place.offset..w.len()), place.rows, place.cols, place.stride).unwrap()
        });
        FusedLinear::new(&tables[layer], worlds[layer].id, slices).unwrap()
    });
    let lora = [0, 1].map(|layer| LoraLinear::new(&tables[layer], worlds[layer].id).unwrap());
    let x = worlds.each_ref().map(|world| of(&world.x));
    let bytes = tables.each_ref().map(|table| table.workspace_bytes().unwrap());
    let workspace = || Workspace::with_bytes(queue, bytes[0].max(bytes[1])).unwrap();
    let record = |layer: usize, fuses: bool, step: &mut Step<'_>, y: &mut Buffer<bf16>| {
        let (tokens, [place, y_place]) = (step.num_tokens(), [cases[layer].x(), cases[layer].y()]);
        let x = Matrix::new(x[layer].slice(0..tokens * place.cols), tokens, place.cols)?;
        let y = MatrixMut::new(y.slice_mut(0..tokens * y_place.cols), tokens, y_place.cols)?;
        if fuses { fused[layer].accumulate(step, x, y) } else { lora[layer].add_delta(step, x, y) }
    };
    let launches: Vec<_> = choose(&[32, 1, 17, 9, 8][..], &[32, 1, 17])
        .iter()
        .flat_map(|&tokens| [(0, true), (1, false), (1, true), (0, false)].map(|launch| (launch, tokens)))
        .collect();
    let targets = || launches.iter().map(|((layer, _), _)| buffer(queue, 32 * cases[*layer].y().cols, 0.0));
    let rounds = choose(3, 1);
    let mut routing = Routing::new(queue, capacity, rounds * launches.len()).unwrap();
    let mut run = |shared: Option<&mut Workspace>, captured: bool| -> Vec<Vec<f32>> {
        let mut y: Vec<_> = targets().collect();
        let mut own = Vec::new();
        let mut shared = shared;
        let mut graphs = Vec::new();
        for round in 0..rounds {
            for (number, &((layer, fuses), tokens)) in launches.iter().enumerate() {
                let workspace = match &mut shared {
                    Some(workspace) => &mut **workspace,
                    None => {
                        own.push(workspace());
                        own.last_mut().unwrap()
                    }
                };
                let slots = loaded_slots(&worlds[layer].slots[..tokens], |slot| tables[layer].get(slot));
                let enqueue = |step: &mut Step<'_>| record(layer, fuses, step, &mut y[number]);
                if captured {
                    if round == 0 {
                        graphs.push(tables[layer].capture(&routing, tokens, workspace, enqueue).unwrap());
                    }
                    let batch = routing.update(&Batch::new(&slots)).unwrap();
                    graphs[number].replay(&mut tables[layer].step(&batch, workspace).unwrap()).unwrap();
                } else {
                    let batch = routing.update(&Batch::new(&slots)).unwrap();
                    let mut step = tables[layer].step(&batch, workspace).unwrap();
                    let mut enqueue = enqueue;
                    enqueue(&mut step).unwrap();
                }
            }
        }
        y.iter().map(contents).collect()
    };
    let expected = run(None, false);
    assert!(expected.iter().all(|y| y.iter().any(|&y| y != 0.0)));
    let mut workspace = workspace();
    for captured in [false, true, false] {
        assert!(run(Some(&mut workspace), captured) == expected, "captured: {captured}");
    }
}

/// Launches of one layer on a batch through the raw API, each with a separate y.
pub struct Launches {
    layer: raw::FusedLinear,
    table: raw::Table,
    batch: raw::RoutedBatch,
    stream: raw::Stream,
    x: raw::MatrixRef,
    places: Place,
    y: Vec<crate::device::Buffer>,
    _routing: raw::Routing,
    _adapters: PoisonedTable,
    _memory: Vec<crate::device::Buffer>,
}

impl Launches {
    pub fn new(gpu: &Gpu, case: &Case, launches: usize) -> Self {
        let world: World<bf16> = case.world();
        let (capacity, stream) = (world.capacity(case.num_tokens()), gpu.raw_stream());
        let routing_memory = gpu.without_indices(raw::Routing::device_bytes(capacity).unwrap());
        // SAFETY: the memory is kept with the routing, and used on one stream.
        let mut routing = unsafe { raw::Routing::new(&gpu.kernels, capacity, 1, routing_memory.region()) }.unwrap();
        // SAFETY: the stream is alive and not capturing.
        let batch = unsafe { routing.update(&world.slots, world.scales.as_deref(), stream) }.unwrap();
        let base = case.base::<bf16>(case.values);
        let mut memory: Vec<_> = base.slices.iter().map(|(_, w)| gpu.upload(w)).collect();
        let slices: Vec<_> =
            base.slices.iter().zip(&memory).map(|((place, _), w)| raw_matrix::<bf16>(w, *place)).collect();
        let layer =
            raw::FusedLinear::new(&gpu.kernels, &world.model, world.id, DType::BF16, capacity, &slices).unwrap();
        let adapters = PoisonedTable::new(gpu, &world, capacity.num_slots);
        let table =
            raw::Table::new(&world.model, DType::BF16, adapters.address(), capacity.num_slots, capacity.max_rank);
        let (x, y) = (gpu.upload(&world.x), (0..launches).map(|_| gpu.upload(&world.y)).collect());
        let x_matrix = raw_matrix::<bf16>(&x, case.x());
        memory.extend([routing_memory, x]);
        gpu.synchronize();
        Self {
            layer,
            table,
            batch,
            stream,
            x: x_matrix,
            places: case.y(),
            y,
            _routing: routing,
            _adapters: adapters,
            _memory: memory,
        }
    }

    /// Every block computes all sums itself.
    fn withholding(self) -> Self {
        Self { layer: self.layer.withholding(), ..self }
    }

    pub fn workspace_bytes(&self) -> WorkspaceBytes {
        self.layer.plan().workspace_bytes()
    }

    pub fn launch(&self, number: usize, workspace: raw::Workspace) {
        let step = raw::Step::new(self.table, self.batch, workspace, self.stream);
        let y = raw_matrix_mut::<bf16>(&self.y[number], self.places);
        // SAFETY: the test owns all operands and keeps them alive until the stream is synchronized.
        unsafe { self.layer.forward(&step, self.x, y) }.unwrap();
    }

    /// Takes the bits of every y and fills it with NaN.
    pub fn take(&mut self) -> Vec<Vec<u16>> {
        let take = |y: &mut crate::device::Buffer| {
            let bits = y.read::<u16>();
            y.write(&vec![bf16::NAN; bits.len()]);
            bits
        };
        self.y.iter_mut().map(take).collect()
    }
}

/// Where no block hands over its sums, and each of 32 tokens has an adapter of its own, the blocks of a slice compute
/// the sums of its adapters themselves: four parts of 16 ranks of each, one after the other. A block alone would take
/// less than 10 us for each.
#[test]
#[ignore = "needs a GPU"]
fn missing_sums_are_computed_in_a_bounded_time() {
    const PARTS: u32 = 4;
    const OF_A_SUM: Duration = Duration::from_micros(10);
    let gpu = Gpu::new();
    for rank in [16, 64] {
        let ranks = [rank; 3];
        let adapters = vec![&ranks[..]; choose(32, 4)];
        let slots = (0..32).map(|token| token % adapters.len() as i32).collect();
        let dense = dense::Case::linear(1024, choose(&[1024, 256, 256], &[96, 32, 32]), &adapters, slots);
        let case = Case::fused(dense::Case { values: Values::Rounded, ..dense }, false);
        let mut expected = Launches::new(&gpu, &case, 1);
        let workspace = Workspace::with_bytes(&gpu.queue, expected.workspace_bytes()).unwrap();
        expected.launch(0, workspace.raw());
        let expected = expected.take().concat();
        let mut launches = Launches::new(&gpu, &case, 6).withholding();
        let mut longest = Duration::ZERO;
        for number in 0..6 {
            gpu.synchronize();
            let start = Instant::now();
            launches.launch(number, workspace.raw());
            gpu.synchronize();
            // The first one is slower.
            longest = longest.max(if number == 0 { Duration::ZERO } else { start.elapsed() });
        }
        assert!(launches.take().iter().all(|y| *y == expected), "rank {rank}: the results differ");
        let most = OF_A_SUM * PARTS * (32 * rank as u32 / 16);
        println!("rank {rank}: {longest:?} of {most:?}");
        assert!(longest < most, "rank {rank}: {longest:?}, and at most {most:?} are expected");
    }
}

/// The counter of launches wraps around, while the words of earlier launches hold the tags that are used again.
#[test]
#[ignore = "needs a GPU"]
fn tags_come_again_without_harm() {
    const HEADER_WORDS: usize = 16;
    let gpu = Gpu::new();
    let slots = (0..32).map(|token| token % 3).collect();
    let dense = dense::Case::linear(2048, &[256, 64], &[&[16, 9], &[64, 1], &[3, 0]], slots);
    let large = Case::fused(dense::Case { values: Values::Rounded, ..dense }, false);
    let mut small = large.clone();
    small.slots.truncate(1);
    let mut cases = [&large, &small].map(|case| Launches::new(&gpu, case, 6));
    let bytes = cases[0].workspace_bytes().mailbox;
    let on = |mailbox: &crate::device::Buffer| raw::Workspace {
        mailbox: mailbox.region(),
        partials: raw::DeviceRegion { ptr: 0, bytes: 0 },
    };
    let expected = cases.each_mut().map(|launches| {
        launches.launch(0, on(&gpu.upload(&vec![0_u8; bytes])));
        launches.take().swap_remove(0)
    });
    // The state after a launch of all rows, with another epoch and other tags.
    let whole = gpu.upload(&vec![0_u8; bytes]);
    cases[0].launch(0, on(&whole));
    let header = whole.read::<u64>();
    for &stale_tag in choose(&[None, Some(1_u32), Some(2), Some(3)][..], &[None, Some(2)]) {
        for big in (1..6).step_by(choose(1, 2)) {
            let mut words = header.clone();
            words[0] = 0xffff_fffd << 32;
            let nan = u64::from(f32::NAN.to_bits());
            for word in &mut words[HEADER_WORDS..] {
                *word = stale_tag.map_or(0, |tag| u64::from(tag) << 32 | nan);
            }
            let mailbox = gpu.upload(&words);
            for number in 0..6 {
                cases[usize::from(number != big)].launch(number, on(&mailbox));
            }
            let [of_large, of_small] = cases.each_mut().map(Launches::take);
            for (number, (large, small)) in of_large.iter().zip(&of_small).enumerate() {
                let is_right = if number == big { *large == expected[0] } else { *small == expected[1] };
                assert!(is_right, "launch {number}, the large one {big}, behind words of tag {stale_tag:?}");
            }
            // No launch is running.
            assert_eq!(mailbox.read::<u64>()[0] as u32, 0);
        }
    }
}
