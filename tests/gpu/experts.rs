//! The kernels for experts against the reference, through the safe and the raw API.

mod limits;
pub mod steps;

use aril::{
    DType, Element, Slot,
    adapter::{Adapter, Tensor},
    cuda::{
        GroupedRoutes, Grouping, LaunchError, LoraExperts, Matrix, MatrixMut, Routing, Step, TopK, WeightTable,
        Workspace, raw,
    },
    model::{Activation, Experts, ModelSpec, TpRank},
    plan::{Capacity, RouteCapacity},
    reference,
    routing::Batch,
};
use cudarc::driver::result;
use proptest::prelude::*;

use crate::{
    common::{
        case::Subject,
        compare::{Expected, Place, compare, expect_within},
        experts::{Case, Lora, Module, Moe, OPERATIONS, Op, Sizes, WeightsOn, World, cases},
        small::choose,
        values::Dtype,
    },
    device::{Buffer, Gpu},
    for_dtype,
    operations::{
        PoisonedRouting, PoisonedTable, mailbox_of_garbage, matrix, matrix_mut, property, raw_matrix, raw_matrix_mut,
        table,
    },
};

/// The safe API.
struct Safe<'a> {
    gpu: &'a Gpu,
}

/// The raw API, in memory that is NaN wherever it belongs to no operand.
struct Raw<'a> {
    gpu: &'a Gpu,
    /// Tokens of the operation beyond the routed ones, as in a captured graph. They belong to an earlier step and have
    /// adapters. None if the case gives its rows.
    padded_tokens: usize,
    /// Launch from a graph that was captured for another step and replayed once. Otherwise no step comes before the
    /// case's.
    captured: bool,
}

fn route_capacity(case: &Case) -> RouteCapacity {
    RouteCapacity::tokens(case.num_tokens().max(1)).top_k(case.top_k).experts(case.shape.held.len())
}

fn factor(case: &Case) -> f32 {
    f32::from(case.half_factor) / 2.0
}

impl Subject<Moe> for Safe<'_> {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let queue = &self.gpu.queue;
        let (model, capacity) = (&world.model, world.capacity(case.num_tokens()));
        let weights = table(queue, model, T::DTYPE, capacity, &world.adapters);
        let mut routing = Routing::new(queue, capacity, 1).unwrap();
        let slots = world.loaded_slots(|slot| weights.get(slot));
        let batch = routing.update(&world.batch_of(&slots)).unwrap();
        let mut grouping = Grouping::new(queue, route_capacity(case)).unwrap();
        let [ids, rows] = [Some(&case.ids), case.rows.as_ref()].map(|values| values.map(|v| self.gpu.upload(v)));
        let router = case.router().map(|weights| self.gpu.upload(&weights));
        let mut top_k = TopK::new(ids.as_ref().unwrap().view(), case.top_k).unwrap();
        if let Some(router) = &router {
            top_k = top_k.with_weights(router.view()).unwrap();
        }
        if let Some(rows) = &rows {
            top_k = top_k.with_rows(rows.view()).unwrap();
        }
        top_k = match case.weights_on {
            WeightsOn::Input => top_k.on_input(),
            WeightsOn::Rows => top_k.on_rows(),
            WeightsOn::Combine => top_k,
        };

        let [x, y] = [&world.x, &world.y].map(|values| self.gpu.upload(values));
        let mut written = self.gpu.upload(world.target(case));
        let (x_view, y_view, mut target_view) = (x.view::<T>(), y.view::<T>(), written.view_mut::<T>());
        let x = matrix(&x_view, case.x());
        let (y, target) = (matrix(&y_view, case.y()), matrix_mut(&mut target_view, case.target()));
        let layer = LoraExperts::new(&weights, world.id).unwrap();
        let mut workspace = Workspace::new(&weights).unwrap();
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let mut routes = grouping.update(&mut step, top_k.scaled(factor(case))).unwrap();
        launch(&layer, case.op, &mut step, &mut routes, [x, y], target).unwrap();
        written.read()
    }
}

/// An operation on `x` and, if it reads and does not write that, `y`.
pub fn launch<T: Element>(
    layer: &LoraExperts,
    op: Op,
    step: &mut Step<'_>,
    routes: &mut GroupedRoutes<'_, '_>,
    [x, y]: [Matrix<'_, T>; 2],
    target: MatrixMut<'_, T>,
) -> Result<(), LaunchError> {
    match op {
        Op::AddGateUp => layer.add_gate_up_delta(step, routes, x, target),
        Op::WriteGateUp => layer.write_gate_up_delta(step, routes, x, target),
        Op::Activate(act) => layer.activate(step, routes, x, y, target, act.activation()),
        Op::AddDown => layer.add_down_delta(step, routes, x, target),
        Op::WriteDown => layer.write_down_delta(step, routes, x, target),
        Op::AddCombined => layer.add_combined_delta(step, routes, x, target),
        Op::Combine => layer.combine(step, routes, x, y, target),
    }
}

/// The case's choices of the router, in these buffers.
fn raw_top_k(case: &Case, ids: &Buffer, router: Option<&Buffer>, rows: Option<&Buffer>) -> raw::TopK {
    let mut top_k = raw::TopK::new(ids.address(), case.top_k).scaled(factor(case));
    top_k = router.map_or(top_k, |router| top_k.weights(router.address()));
    top_k = rows.map_or(top_k, |rows| top_k.rows(rows.address()));
    match case.weights_on {
        WeightsOn::Input => top_k.on_input(),
        WeightsOn::Rows => top_k.on_rows(),
        WeightsOn::Combine => top_k,
    }
}

/// An operation of the raw API with its arguments, as for [`launch`].
#[derive(Clone, Copy)]
pub struct Operands {
    op: Op,
    x: raw::MatrixRef,
    y: raw::MatrixRef,
    target: raw::MatrixMut,
}

impl Operands {
    /// The operands, each as a buffer and the operand's place in it.
    pub fn new<T: Element>(op: Op, x: (&Buffer, Place), y: (&Buffer, Place), target: (&Buffer, Place)) -> Self {
        let [x, y] = [x, y].map(|(buffer, place)| raw_matrix::<T>(buffer, place));
        let target = raw_matrix_mut::<T>(target.0, target.1);
        Self { op, x, y, target }
    }

    pub fn launch(self, layer: &LoraExperts, step: &raw::Step, routes: &mut raw::GroupedRoutes) {
        let Self { op, x, y, target } = self;
        let launched = match op {
            // SAFETY: the test owns all operands and keeps them alive until the stream is synchronized.
            Op::AddGateUp => unsafe { layer.add_gate_up_delta_raw(step, routes, x, target) },
            // SAFETY: as above.
            Op::WriteGateUp => unsafe { layer.write_gate_up_delta_raw(step, routes, x, target) },
            // SAFETY: as above.
            Op::Activate(act) => unsafe { layer.activate_raw(step, routes, x, y, target, act.activation()) },
            // SAFETY: as above.
            Op::AddDown => unsafe { layer.add_down_delta_raw(step, routes, x, target) },
            // SAFETY: as above.
            Op::WriteDown => unsafe { layer.write_down_delta_raw(step, routes, x, target) },
            // SAFETY: as above.
            Op::AddCombined => unsafe { layer.add_combined_delta_raw(step, routes, x, target) },
            // SAFETY: as above.
            Op::Combine => unsafe { layer.combine_raw(step, routes, x, y, target) },
        };
        launched.unwrap();
    }
}

impl Subject<Moe> for Raw<'_> {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let (gpu, stream, model) = (self.gpu, self.gpu.raw_stream(), &world.model);
        let padded = if case.rows.is_some() { 0 } else { self.padded_tokens };
        let tokens = case.num_tokens() + padded;
        let capacity = world.capacity(tokens);
        let route_capacity = RouteCapacity::tokens(tokens.max(1)).top_k(case.top_k).experts(case.shape.held.len());
        let before = vec![0; if self.captured { tokens } else { 0 }];
        let mut routed = PoisonedRouting::new(gpu, capacity, (&before, None));
        let batch = routed.routing.capture_batch(tokens).unwrap();
        let group_memory = gpu.upload(&vec![0_u8; raw::Grouping::device_bytes(route_capacity).unwrap()]);
        // SAFETY: the memory is zero, outlives the grouping and is used on one stream.
        let mut grouping = unsafe { raw::Grouping::new(&gpu.kernels, route_capacity, group_memory.region()) }.unwrap();

        let descriptors = PoisonedTable::new(gpu, world, capacity.num_slots);
        // Padded rows hold NaN and must not change.
        let of_tokens = |rows: usize| rows + padded;
        let of_routes = |rows: usize| rows + padded * case.top_k;
        let grown = |place: Place, is_of_tokens: bool| Place {
            rows: if is_of_tokens { of_tokens(place.rows) } else { of_routes(place.rows) },
            ..place
        };
        let is_combined = matches!(case.op, Op::AddCombined | Op::Combine);
        let x_at = grown(case.x(), case.op.is_before_activation());
        let y_at = grown(case.y(), case.op == Op::AddCombined);
        let target_at = grown(case.target(), is_combined);
        let with_padding = |values: &[T], place: &Place| {
            let mut values = values.to_vec();
            values.resize(values.len().max(place.offset + place.rows * place.stride), T::from_f32(f32::NAN));
            values
        };
        let [x, y] = [(&world.x, &x_at), (&world.y, &y_at)].map(|(v, place)| gpu.upload(&with_padding(v, place)));
        let before = with_padding(world.target(case), &target_at);
        let mut target = gpu.upload(&before);
        let chosen = [&case.ids[..], &vec![0; padded * case.top_k]].concat();
        let mut ids = gpu.upload(&vec![0_i32; chosen.len()]);
        let rows = case.rows.as_ref().map(|rows| gpu.upload(rows));
        let router = case.router();
        let router = router.map(|weights| gpu.upload(&[weights, vec![1.0; padded * case.top_k]].concat()));
        let top_k = raw_top_k(case, &ids, router.as_ref(), rows.as_ref());
        let operands = Operands::new::<T>(case.op, (&x, x_at), (&y, y_at), (&target, target_at));
        let layer = LoraExperts::for_model(&gpu.kernels, model, world.id, T::DTYPE, capacity).unwrap();
        let bytes = layer.plan().workspace_bytes();
        let [mailbox, partials] = [mailbox_of_garbage(gpu, bytes.mailbox), gpu.poisoned(bytes.partials)];
        let region = raw::Workspace { mailbox: mailbox.region(), partials: partials.region() };
        let table = raw::Table::new(model, T::DTYPE, descriptors.address(), capacity.num_slots, capacity.max_rank);
        let step = raw::Step::new(table, batch, region, stream);
        let front = gpu.upload(&[0_u8]);
        let launch = || {
            // SAFETY: the test owns all operands and keeps them alive until the stream is synchronized.
            let mut routes = unsafe { grouping.group(batch, top_k, stream) }.unwrap();
            if (case.seed / 2).is_multiple_of(2) {
                // In place of a base operation: the kernels that route and group start what is behind them early.
                // SAFETY: the byte is allocated on this stream, and outlives its work.
                unsafe { result::memset_d8_async(front.address(), 1, 1, gpu.stream.cu_stream()) }.unwrap();
                // SAFETY: in front is the byte, which starts when all before it has ended.
                routes = unsafe { routes.shrink_beside_base() };
            }
            operands.launch(&layer, &step, &mut routes);
        };
        // At first every token has the first slot and the first expert; the case's step comes later.
        let mut begin_step = || {
            ids.write(&chosen);
            target.write(&before);
            // SAFETY: as above.
            unsafe { routed.routing.update(&world.slots, world.scales.as_deref(), stream) }.unwrap();
        };
        if self.captured {
            let graph = gpu.capture(launch);
            graph.replay();
            begin_step();
            graph.replay();
        } else {
            begin_step();
            let mut launch = launch;
            launch();
        }
        let mut result = target.read::<T>();
        let padded = result.split_off(world.target(case).len());
        assert!(padded.iter().all(|value| value.to_f32().is_nan()), "a padded row was written\n{}", case.replay());
        result
    }
}

#[test]
#[ignore = "needs a GPU"]
fn experts_through_the_safe_api_agree_with_the_reference() {
    let gpu = Gpu::new();
    property(300, cases(Sizes::large()), |case| for_dtype!(case.check(&mut Safe { gpu: &gpu })));
}

#[test]
#[ignore = "needs a GPU"]
fn experts_through_the_raw_door_agree_with_the_reference() {
    let gpu = Gpu::new();
    property(300, cases(Sizes::large()), |case| {
        let captured = case.seed % 2 == 0;
        for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens: (case.seed % 3) as usize * 7, captured }))
    });
}

/// A batch without tokens, before which there was none: the routing has no token that could be looked up. However
/// routes are grouped.
#[test]
#[ignore = "needs a GPU"]
fn an_empty_batch_looks_up_no_token() {
    let gpu = Gpu::new();
    for padded_tokens in [1, 8, 16, 128, 129, 400] {
        for op in OPERATIONS {
            let adapters = vec![Lora::of_own_ranks(4, 5), Lora::shared_outer(4, 3)];
            let case = Case::new([4, 40, 24], adapters, [0, 8]).with(|layer| layer.op = op);
            for dtype in [Dtype::BF16, Dtype::F32] {
                let case = Case { dtype, ..case.clone() };
                for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens, captured: false })).unwrap();
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn infinite_sums_of_experts_stay_infinite() {
    let gpu = Gpu::new();
    for case in [8, 100, 400].into_iter().flat_map(Case::of_infinities) {
        for_dtype!(case.check_infinities(&mut Raw { gpu: &gpu, padded_tokens: 0, captured: false })).unwrap();
    }
}

/// More routes than one block groups.
#[test]
#[ignore = "needs a GPU"]
fn many_routes_agree_with_the_reference() {
    let gpu = Gpu::new();
    let sizes = Sizes {
        max_tokens: 700,
        max_features: choose(900, 40),
        max_rank: choose(64, 17),
        max_top_k: 8,
        ..Sizes::large()
    };
    property(60, cases(sizes), |case| {
        for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens: 0, captured: false }))
    });
}

/// More input features than one slab, and more ranks than one step.
#[test]
#[ignore = "needs a GPU"]
fn wide_experts_agree_with_the_reference() {
    let gpu = Gpu::new();
    let (max_features, max_rank) = choose((3000, 512), (1100, 144));
    let sizes = Sizes { max_features, max_tokens: 20, max_rank, max_experts: 4, max_top_k: 3 };
    property(60, cases(sizes), |case| {
        for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens: 0, captured: false }))
    });
}

/// Experts above the table's rank have no module, beside others of the slot that have one.
#[test]
#[ignore = "needs a GPU"]
fn experts_above_the_tables_rank_have_no_module() {
    fn run<T: Element>(gpu: &Gpu, case: &Case) {
        let mut world = case.world::<T>();
        world.max_rank = 16;
        let got = Raw { gpu, padded_tokens: 0, captured: false }.run(case, &world);
        for pair in world.pairs.iter_mut().flatten().flatten() {
            pair.take_if(|pair| pair.rank > 16);
        }
        compare(case.target(), &got, &world.expected(case), &case.replay()).unwrap();
    }
    let gpu = Gpu::new();
    let adapters = [[8, 32], [8, 8], [16, 32], [32, 32]].map(|ranks| Lora {
        modules: [(); 3].map(|()| Module { ranks: ranks.to_vec(), shared: [false; 2] }),
        stacked: false,
    });
    for tokens in choose(&[1, 8, 100, 400][..], &[1, 8]) {
        for (slots, op) in [1, 4].into_iter().flat_map(|slots| OPERATIONS.map(|op| (slots, op))) {
            let mut case = Case::new([2, 72, 40], adapters.to_vec(), [*tokens, 2]).with(|layer| layer.op = op);
            case.choose(*tokens, |token| token % slots, |token, k| (token + k) % 2);
            for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
                let case = Case { dtype, ..case.clone() };
                for_dtype!(case, run(&gpu, &case));
            }
        }
    }
}

/// Results have the same bits when repeated, when captured, and among more routes, which are grouped in another way.
#[test]
#[ignore = "needs a GPU"]
fn a_routes_bits_depend_on_nothing_else() {
    fn run<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
        let run = |case: &Case, world: &World<T>, captured| Raw { gpu, padded_tokens: 0, captured }.run(case, world);
        let bits = |values: &[T]| bytemuck::cast_slice::<T, u8>(values).to_vec();
        let world = case.world::<T>();
        let first = run(case, &world, false);
        prop_assert!(bits(&first) == bits(&run(case, &world, false)), "twice differs\n{}", case.replay());
        prop_assert!(bits(&first) == bits(&run(case, &world, true)), "captured differs\n{}", case.replay());
        if case.rows.is_some() || case.num_routes() == 0 {
            return Ok(());
        }
        // The first block groups these, with one or several routes for each thread, or a separate kernel does.
        for least in [65, 257, 1025] {
            let times = usize::div_ceil(least, case.num_routes());
            let mut many = case.clone();
            many.slots = case.slots.repeat(times);
            many.ids = case.ids.repeat(times);
            many.half_scales = case.half_scales.as_ref().map(|scales| scales.repeat(times));
            many.half_weights = case.half_weights.as_ref().map(|weights| weights.repeat(times));
            let mut many_world = many.world::<T>();
            let many_buffers = [&mut many_world.x, &mut many_world.y, &mut many_world.out];
            let buffers = [&world.x, &world.y, &world.out].into_iter().zip(many_buffers);
            for (place, (from, to)) in [case.x(), case.y(), case.out()].into_iter().zip(buffers) {
                for row in 0..place.rows {
                    let at = place.offset + row * place.stride;
                    to[at..at + place.cols].copy_from_slice(&from[at..at + place.cols]);
                }
            }
            let as_one_of_many = run(&many, &many_world, false);
            let place = case.target();
            for row in 0..place.rows {
                for col in 0..place.cols {
                    let [got, as_one] = [&first, &as_one_of_many].map(|values| values[place.at(row, col)]);
                    prop_assert!(
                        bits(&[got]) == bits(&[as_one]),
                        "[{row}, {col}] is {}, and {} one of {least}\n{}",
                        got.to_f32(),
                        as_one.to_f32(),
                        case.replay()
                    );
                }
            }
        }
        Ok(())
    }
    let gpu = Gpu::new();
    property(80, cases(Sizes::large()), |case| for_dtype!(case, run(&gpu, &case)));
}

/// A token's bits do not depend on other tokens: not when these have no adapter, nor on the order of tokens.
#[test]
#[ignore = "needs a GPU"]
fn a_tokens_bits_do_not_depend_on_the_others() {
    fn reversed_rows<T: Element>(values: &mut [T], place: Place) {
        let from = values.to_vec();
        for row in 0..place.rows {
            let [from_at, to_at] = [place.at(place.rows - 1 - row, 0), place.at(row, 0)];
            values[to_at..to_at + place.cols].copy_from_slice(&from[from_at..from_at + place.cols]);
        }
    }
    fn reversed<V: Clone>(values: &[V], of_token: usize) -> Vec<V> {
        values.chunks(of_token).rev().flatten().cloned().collect()
    }
    fn run<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
        let run = |case: &Case, world: &World<T>| Raw { gpu, padded_tokens: 0, captured: false }.run(case, world);
        // The routes keep their rows.
        let identity = || (0..case.num_routes() as i32).collect();
        let case = &case.with(|layer| layer.rows = Some(layer.rows.clone().unwrap_or_else(identity)));
        let world = case.world::<T>();
        let together = run(case, &world);
        let place = case.target();
        let bits = |values: &[T], row: usize| {
            bytemuck::cast_slice::<T, u8>(&values[place.at(row, 0)..][..place.cols]).to_vec()
        };

        let layer = Moe {
            ids: reversed(&case.ids, case.top_k),
            half_weights: case.half_weights.as_ref().map(|weights| reversed(weights, case.top_k)),
            rows: case.rows.as_ref().map(|rows| reversed(rows, case.top_k)),
            ..case.layer.clone()
        };
        let slots = reversed(&case.slots, 1);
        let half_scales = case.half_scales.as_ref().map(|scales| reversed(scales, 1));
        let other = Case { layer, slots, half_scales, ..case.clone() };
        let mut other_world = other.world::<T>();
        for (to, from) in
            [(&mut other_world.x, &world.x), (&mut other_world.y, &world.y), (&mut other_world.out, &world.out)]
        {
            to.clone_from(from);
        }
        if case.op.is_before_activation() {
            reversed_rows(&mut other_world.x, case.x());
        }
        match case.op {
            Op::AddCombined => reversed_rows(&mut other_world.y, case.y()),
            Op::Combine => reversed_rows(&mut other_world.out, case.out()),
            _ => {}
        }
        let permuted = run(&other, &other_world);
        for token in 0..case.num_tokens() {
            let rows = case.rows_of(token).into_iter().zip(other.rows_of(case.num_tokens() - 1 - token));
            for (row, permuted_row) in rows {
                prop_assert!(
                    bits(&together, row) == bits(&permuted, permuted_row),
                    "token {token} differs in another order\n{}",
                    case.replay()
                );
            }
        }

        if case.num_tokens() > 0 {
            let token = case.seed as usize % case.num_tokens();
            let mut slots = vec![-1; case.num_tokens()];
            slots[token] = case.slots[token];
            let alone_case = Case { slots, ..case.clone() };
            let alone = run(&alone_case, &alone_case.world());
            for row in case.rows_of(token) {
                prop_assert!(bits(&together, row) == bits(&alone, row), "token {token} alone\n{}", case.replay());
            }
        }
        Ok(())
    }
    let gpu = Gpu::new();
    property(120, cases(Sizes::large()), |case| for_dtype!(case, run(&gpu, &case)));
}

/// More experts per token than a warp reads at once.
#[test]
#[ignore = "needs a GPU"]
fn tokens_of_many_experts_agree_with_the_reference() {
    let gpu = Gpu::new();
    let (max_features, max_tokens) = choose((200, 12), (72, 5));
    let sizes = Sizes { max_features, max_tokens, max_rank: 40, max_experts: 50, max_top_k: 70 };
    property(60, cases(sizes), |case| {
        for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens: 0, captured: false }))
    });
}

/// NaN in one token's rows does not reach other tokens, even with routes in the same tile.
#[test]
#[ignore = "needs a GPU"]
fn a_tokens_nan_is_its_own() {
    fn run<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
        let mut subject = Raw { gpu, padded_tokens: 0, captured: false };
        let mut world = case.world::<T>();
        let expected = subject.run(case, &world);
        let Some(token) = (case.seed as usize).checked_rem(case.num_tokens()) else { return Ok(()) };
        let of_routes: Vec<usize> =
            (token * case.top_k..(token + 1) * case.top_k).filter_map(|route| case.row(route)).collect();
        let poison = |buffer: &mut [T], place: Place, rows: &[usize]| {
            rows.iter().for_each(|&row| buffer[place.at(row, 0)..][..place.cols].fill(T::from_f32(f32::NAN)));
        };
        let of_token = [token];
        let x_rows = if case.op.is_before_activation() { &of_token[..] } else { &of_routes };
        let y_rows = if case.op == Op::AddCombined { &of_token[..] } else { &of_routes };
        poison(&mut world.x, case.x(), x_rows);
        poison(&mut world.y, case.y(), y_rows);
        let mut got = subject.run(case, &world);
        for row in case.rows_of(token) {
            let row = case.target().at(row, 0)..case.target().at(row, 0) + case.target().cols;
            got[row.clone()].copy_from_slice(&expected[row]);
        }
        let bits = |values: &[T]| bytemuck::cast_slice::<T, u8>(values).to_vec();
        prop_assert!(bits(&got) == bits(&expected), "NaN has spread\n{}", case.replay());
        Ok(())
    }
    let gpu = Gpu::new();
    property(100, cases(Sizes::large()), |case| for_dtype!(case, run(&gpu, &case)));
    for tokens in [16, 100, 320] {
        let shape = choose([2, 136, 72], [2, 72, 40]);
        let mut case = Case::new(shape, vec![Lora::of_own_ranks(2, 20), Lora::shared_outer(2, 24)], [tokens, 4]);
        let slots = choose(&[0, 1][..], &[1]);
        for (slot, op) in slots.iter().flat_map(|&slot| OPERATIONS.map(|op| (slot, op))) {
            case.choose(tokens, |_| slot, |_, k| k % 2);
            for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
                let case = Case { dtype, ..case.with(|layer| layer.op = op) };
                for_dtype!(case, run(&gpu, &case)).unwrap();
            }
        }
    }
}

/// Results do not depend on which adapter is in which slot.
#[test]
#[ignore = "needs a GPU"]
fn a_tokens_bits_do_not_depend_on_the_slots() {
    fn run<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
        let mut subject = Raw { gpu, padded_tokens: 0, captured: false };
        let mut world = case.world::<T>();
        let expected = subject.run(case, &world);
        let end = world.adapters.len();
        world.adapters.reverse();
        for slot in &mut world.slots {
            if (0..end as i32).contains(slot) {
                *slot = end as i32 - 1 - *slot;
            }
        }
        let got = subject.run(case, &world);
        let bits = |values: &[T]| bytemuck::cast_slice::<T, u8>(values).to_vec();
        prop_assert!(bits(&got) == bits(&expected), "other slots differ\n{}", case.replay());
        Ok(())
    }
    let gpu = Gpu::new();
    property(60, cases(Sizes::large()), |case| for_dtype!(case, run(&gpu, &case)));
    property(20, cases(Sizes { max_tokens: 500, max_features: choose(200, 40), ..Sizes::large() }), |case| {
        for_dtype!(case, run(&gpu, &case))
    });
}

/// Activations over the whole range and beyond, with an adapter that adds zero and with none, alone and among many
/// tokens.
#[test]
#[ignore = "needs a GPU"]
fn activations_are_those_of_the_reference() {
    fn run<T: Element>(gpu: &Gpu, tokens: usize) {
        let queue = &gpu.queue;
        let of = |values: &[f32]| values.iter().map(|&value| T::from_f32(value)).collect::<Vec<_>>();
        let gates: Vec<f32> = (-500..=500_i16)
            .step_by(choose(1, 25))
            .map(|step| f32::from(step) / 16.0)
            .chain([-1e4, -100.0, 100.0, 1e4, f32::INFINITY, f32::NEG_INFINITY])
            .collect();
        let (gates, inter) = (of(&gates), gates.len());
        let mut spec = ModelSpec::new();
        let gated = spec.experts(Experts::new("m", 1, 1, inter).top_k(1)).unwrap();
        let ungated = spec.experts(Experts::new("n", 1, 1, inter).ungated().top_k(1)).unwrap();
        let model = spec.shard(TpRank::SINGLE).unwrap();
        let nothing = ["m.0.gate_proj", "m.0.up_proj", "n.0.up_proj"].into_iter().flat_map(|path| {
            [("A", [1, 1]), ("B", [inter, 1])].map(|(side, shape)| {
                let zeros = vec![0; shape[0] * size_of::<f32>()];
                (format!("{path}.lora_{side}.weight"), Tensor::new(DType::F32, shape, zeros).unwrap())
            })
        });
        let nothing = Adapter::from_tensors(r#"{"peft_type": "LORA", "lora_alpha": 1}"#, nothing).unwrap();
        let capacity = Capacity::tokens(tokens).slots(1).rank(1);
        let weights = WeightTable::new(queue, &model, T::DTYPE, capacity, 1 << 20).unwrap();
        let slot = weights.load(0, &nothing.plan(&model, T::DTYPE).unwrap()).unwrap();
        let mut routing = Routing::new(queue, capacity, 1).unwrap();
        let slots: Vec<Slot> = (0..tokens).map(|token| if token % 2 == 0 { Slot::BASE } else { slot }).collect();
        let batch = routing.update(&Batch::new(&slots)).unwrap();
        let capacity_of_routes = RouteCapacity::tokens(tokens).top_k(1).experts(1);
        let mut grouping = Grouping::new(queue, capacity_of_routes).unwrap();
        let (ids, x) = (gpu.upload(&vec![0_i32; tokens]), gpu.upload(&vec![T::default(); tokens]));
        let mut workspace = Workspace::new(&weights).unwrap();
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let mut routes = grouping.update(&mut step, TopK::new(ids.view(), 1).unwrap()).unwrap();
        let mut out = gpu.poisoned(tokens * inter * size_of::<T>());
        // For all routes: they share one row of y.
        let mut activate = |id, y: &[T], activation| -> Vec<T> {
            let layer = LoraExperts::new(&weights, id).unwrap();
            let rows = gpu.upload(&y.repeat(tokens));
            let y = Matrix::new(rows.view::<T>(), tokens, y.len()).unwrap();
            let x = Matrix::new(x.view(), tokens, 1).unwrap();
            let matrix = MatrixMut::new(out.view_mut(), tokens, inter).unwrap();
            layer.activate(&mut step, &mut routes, x, y, matrix, activation).unwrap();
            let mut got = out.read::<T>();
            let first = bytemuck::cast_slice::<T, u8>(&got[..inter]).to_vec();
            for row in got.chunks(inter) {
                assert!(bytemuck::cast_slice::<T, u8>(row) == first, "{activation:?}: routes differ");
            }
            got.truncate(inter);
            got
        };
        let check = |activation, got: Vec<T>, up: Option<f64>| {
            let place = Place { offset: 0, rows: 1, cols: inter, stride: inter };
            let expected: Vec<Expected<T>> = gates
                .iter()
                .zip(&got)
                .map(|(x, &got)| {
                    let x = f64::from(x.to_f32());
                    let value = match up {
                        Some(up) => reference::experts::activation(activation, Some(x), up),
                        None => reference::experts::activation(activation, None, x),
                    };
                    if value.is_nan() {
                        assert!(got.to_f32().is_nan(), "{activation:?} of {x}, {up:?}: {}", got.to_f32());
                        return Expected::Untouched(got);
                    }
                    if value.is_infinite() {
                        return Expected::Exactly(T::from_f32(value as f32));
                    }
                    // As in `World::expect_activation`: the factors' magnitudes times a few roundings, and those of an
                    // exponent.
                    let (x, up) = match activation {
                        Activation::SwigluOai { limit, .. } => {
                            let limit = f64::from(limit);
                            (x.min(limit), up.map(|up| up.clamp(-limit, limit)))
                        }
                        _ => (x, up),
                    };
                    let factor = up.map_or(1.0, |up| up.abs() + 1.0);
                    let size = if activation == Activation::Relu2 { x * x } else { x.abs() };
                    let bound = (16.0 + 4.0 * 1.702 * x.abs()) * DType::F32.unit_roundoff() * size * factor;
                    expect_within(value, bound)
                })
                .collect();
            compare(place, &got, &expected, &format!("{activation:?} of {up:?}, {tokens} tokens of {:?}", T::DTYPE))
                .unwrap();
        };
        for activation in
            [Activation::Gelu, Activation::GeluTanh, Activation::Relu2, Activation::Silu, Activation::GPT_OSS]
        {
            // Values past the limit count as the limit.
            let past: &[f32] = match activation {
                Activation::SwigluOai { .. } => &[-1e4, 1e4, f32::NEG_INFINITY, f32::INFINITY],
                _ => &[],
            };
            for up in of(&[choose(&[-9.0, -0.3, 0.0, 2.5, 11.0][..], &[-0.3]), past].concat()) {
                let y = [gates.clone(), vec![up; inter]].concat();
                check(activation, activate(gated, &y, activation), Some(up.to_f32().into()));
            }
            if activation != Activation::GPT_OSS {
                check(activation, activate(ungated, &gates, activation), None);
            }
            let mut y = of(&vec![1.0; 2 * inter]);
            let whole = activate(gated, &y, activation);
            for nan in [0, inter] {
                y[nan] = T::from_f32(f32::NAN);
                let out = activate(gated, &y, activation);
                y[nan] = T::from_f32(1.0);
                let others = bytemuck::cast_slice::<T, u8>(&out[1..]) == bytemuck::cast_slice::<T, u8>(&whole[1..]);
                assert!(out[0].to_f32().is_nan() && others, "{activation:?}");
            }
        }
    }
    let gpu = Gpu::new();
    for &tokens in choose(&[1, 70, 1030][..], &[16, 1030]) {
        run::<half::bf16>(&gpu, tokens);
        run::<half::f16>(&gpu, tokens);
        run::<f32>(&gpu, tokens);
    }
}
