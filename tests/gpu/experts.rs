//! The kernels for experts against the reference, through both doors.

use aril::{
    Element, Slot,
    cuda::{Grouping, LoraExperts, Matrix, MatrixMut, Routing, TopK, WeightTable, Workspace, raw},
    plan::{Capacity, RouteCapacity},
    routing::Batch,
};
use proptest::prelude::*;

use crate::{
    common::{
        cases::Place,
        experts::{Case, Op, Sizes, Subject, Weighed, World, cases, check},
    },
    device::{Buffer, Gpu},
    for_dtype,
};

/// The safe door.
struct Safe<'a> {
    gpu: &'a Gpu,
}

/// The raw door, in memory where everything that no operand covers is NaN.
struct Raw<'a> {
    gpu: &'a Gpu,
    /// Tokens that the operation is on beside the routed ones, as in a captured graph; of an earlier step, with adapters. None if the
    /// case says where its rows are.
    padded_tokens: usize,
    /// Launch from a captured graph.
    captured: bool,
}

fn capacity<T>(case: &Case, world: &World<T>) -> Capacity {
    Capacity {
        max_tokens: case.num_tokens().max(1),
        num_slots: world.num_slots.max(1),
        max_rank: world.max_rank.max(1),
    }
}

fn route_capacity(case: &Case) -> RouteCapacity {
    RouteCapacity { max_tokens: case.num_tokens().max(1), top_k: case.top_k, num_experts: case.shape.held.len() }
}

impl Subject for Safe<'_> {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let Gpu { stream, kernels, .. } = self.gpu;
        let (model, capacity) = (&world.model, capacity(case, world));
        let mut weights = WeightTable::<T>::new(kernels, model, capacity, 1 << 26, stream).unwrap();
        for (slot, adapter) in world.adapters.iter().enumerate() {
            weights.load(Slot::new(slot as u16), &adapter.plan(model, T::DTYPE).unwrap(), stream).unwrap();
        }
        let mut routing = Routing::new(kernels, capacity, 1, stream).unwrap();
        let batch = routing.update(&world.batch(), stream).unwrap();
        let mut grouping = Grouping::new(kernels, route_capacity(case), stream).unwrap();
        let [ids, rows] = [Some(&case.ids), case.rows.as_ref()].map(|values| values.map(|v| self.gpu.upload(v)));
        let router = world.weights.as_ref().map(|weights| self.gpu.upload(weights));
        let mut top_k = TopK::new(ids.as_ref().unwrap().view(), case.top_k).unwrap();
        if let Some(router) = &router {
            top_k = top_k.with_weights(router.view()).unwrap();
        }
        if let Some(rows) = &rows {
            top_k = top_k.with_rows(rows.view()).unwrap();
        }
        top_k = match case.weighed {
            Weighed::Input => top_k.on_input(),
            Weighed::Rows => top_k.on_rows(),
            Weighed::Combine => top_k,
        };
        let routes = grouping.update(top_k, &batch, stream).unwrap();

        let (x, mut y) = (self.gpu.upload(&world.x), self.gpu.upload(&world.y));
        let (x_view, mut y_view) = (x.view::<T>(), y.view_mut::<T>());
        let (x_at, y_at) = (case.x(), case.y());
        let x = Matrix::strided(x_view.slice(x_at.offset..), x_at.rows, x_at.cols, x_at.stride).unwrap();
        let y_matrix = MatrixMut::strided(y_view.slice_mut(y_at.offset..), y_at.rows, y_at.cols, y_at.stride).unwrap();
        let layer = LoraExperts::<T>::new(kernels, model, world.id, capacity, case.top_k).unwrap();
        let mut workspace = Workspace::new(kernels, layer.plan().workspace_bytes(), stream).unwrap();
        let operation = match case.op {
            Op::AddGateUp => LoraExperts::add_gate_up_delta,
            Op::WriteGateUp => LoraExperts::write_gate_up_delta,
            Op::AddDown => LoraExperts::add_down_delta,
            Op::WriteDown => LoraExperts::write_down_delta,
            other => panic!("{other:?} is not asked for"),
        };
        operation(&layer, x, y_matrix, &routes, &weights, &mut workspace, stream).unwrap();
        y.read()
    }
}

impl Subject for Raw<'_> {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let (gpu, stream, model) = (self.gpu, self.gpu.raw_stream(), &world.model);
        let padded = if case.rows.is_some() { 0 } else { self.padded_tokens };
        let tokens = case.num_tokens() + padded;
        let capacity = Capacity { max_tokens: tokens.max(1), ..capacity(case, world) };
        let route_capacity = RouteCapacity { max_tokens: tokens.max(1), ..route_capacity(case) };
        let memory = gpu.poisoned(raw::Routing::device_bytes(capacity).unwrap());
        // SAFETY: the memory outlives the routing and is used on one stream.
        let mut routing = unsafe { raw::Routing::new(&gpu.kernels, capacity, 2, memory.region()) }.unwrap();
        // SAFETY: the stream is alive and not capturing.
        unsafe { routing.update(&Batch::new(&vec![Slot::new(0); tokens]), stream) }.unwrap();
        // SAFETY: as above.
        unsafe { routing.update(&world.batch(), stream) }.unwrap();
        let batch = routing.capture_batch(tokens).unwrap();
        let group_memory = gpu.upload(&vec![0_u8; raw::Grouping::device_bytes(route_capacity).unwrap()]);
        // SAFETY: the memory is zero, outlives the grouping and is used on one stream.
        let mut grouping = unsafe { raw::Grouping::new(&gpu.kernels, route_capacity, group_memory.region()) }.unwrap();

        let num_entries = model.num_entries();
        let nowhere = gpu.poisoned(1 << 12);
        let absent = raw::Descriptor { a: nowhere.address(), b: nowhere.address(), rank: 0, scaling: f32::NAN };
        let mut table = vec![absent; capacity.num_slots * num_entries];
        let mut blocks = Vec::new();
        for (slot, adapter) in world.adapters.iter().enumerate() {
            let image = adapter.plan(model, T::DTYPE).unwrap();
            let mut block = vec![T::default(); image.bytes() / size_of::<T>()];
            image.write_to(bytemuck::cast_slice_mut(&mut block)).unwrap();
            // What is behind must not matter.
            block.resize(block.len() + 1024, T::from_f32(f32::NAN));
            let block = gpu.upload(&block);
            let row = raw::Descriptor::row(&image, block.address());
            for (to, from) in table[slot * num_entries..].iter_mut().zip(row) {
                if from.rank > 0 {
                    *to = from;
                }
            }
            blocks.push(block);
        }
        let table = gpu.upload(&table);
        // Padded rows are rows like any other, but hold NaN and must stay as they are.
        let is_gate_up = matches!(case.op, Op::AddGateUp | Op::WriteGateUp);
        let (mut x_at, mut y_at) = (case.x(), case.y());
        x_at.rows += padded * if is_gate_up { 1 } else { case.top_k };
        y_at.rows += padded * case.top_k;
        let with_padding = |values: &[T], place: &Place| {
            let mut values = values.to_vec();
            values.resize(values.len().max(place.offset + place.rows * place.stride), T::from_f32(f32::NAN));
            gpu.upload(&values)
        };
        let (x, y) = (with_padding(&world.x, &x_at), with_padding(&world.y, &y_at));
        let ids = gpu.upload(&[&case.ids[..], &vec![0; padded * case.top_k]].concat());
        let rows = case.rows.as_ref().map(|rows| gpu.upload(rows));
        let router = world.weights.as_ref();
        let router = router.map(|weights| gpu.upload(&[&weights[..], &vec![1.0; padded * case.top_k]].concat()));
        let mut top_k = raw::TopK::new(ids.address(), case.top_k);
        top_k = router.as_ref().map_or(top_k, |router| top_k.weights(router.address()));
        top_k = rows.as_ref().map_or(top_k, |rows| top_k.rows(rows.address()));
        top_k = match case.weighed {
            Weighed::Input => top_k.on_input(),
            Weighed::Rows => top_k.on_rows(),
            Weighed::Combine => top_k,
        };
        let at = |buffer: &Buffer, elems: usize| buffer.address() + (elems * size_of::<T>()) as u64;
        let x_matrix = raw::MatrixRef::new::<T>(at(&x, x_at.offset), x_at.rows, x_at.cols).row_stride(x_at.stride);
        let y_matrix = raw::MatrixMut::new::<T>(at(&y, y_at.offset), y_at.rows, y_at.cols).row_stride(y_at.stride);
        let layer = raw::LoraExperts::new(&gpu.kernels, model, world.id, T::DTYPE, capacity, case.top_k).unwrap();
        // Of the exchange only the header is what it must be: tags of no launch are as good as none.
        let bytes = layer.plan().workspace_bytes();
        let mut exchange = vec![0xff_u8; bytes.exchange];
        exchange.iter_mut().take(128).for_each(|byte| *byte = 0);
        let [exchange, planes] = [gpu.upload(&exchange), gpu.poisoned(bytes.planes)];
        let region = raw::Workspace { exchange: exchange.region(), planes: planes.region() };
        let site = &model[world.id];
        let first_entry = if is_gate_up { site.gate_up() } else { site.down() }.shared_entry();
        let weights =
            raw::LayerWeights::new(table.address(), capacity.num_slots, num_entries, first_entry, capacity.max_rank);
        let launch = || {
            // SAFETY: all operands are the test's own, and alive until the stream is synchronized.
            let routes = unsafe { grouping.group(top_k, batch, stream) }.unwrap();
            let operation = match case.op {
                Op::AddGateUp => raw::LoraExperts::add_gate_up_delta,
                Op::WriteGateUp => raw::LoraExperts::write_gate_up_delta,
                Op::AddDown => raw::LoraExperts::add_down_delta,
                Op::WriteDown => raw::LoraExperts::write_down_delta,
                other => panic!("{other:?} is not asked for"),
            };
            // SAFETY: as above.
            unsafe { operation(&layer, x_matrix, y_matrix, weights, &routes, region, stream) }.unwrap();
        };
        if self.captured {
            gpu.capture(launch).replay();
        } else {
            let mut launch = launch;
            launch();
        }
        let mut result = y.read::<T>();
        let padded = result.split_off(world.y.len());
        assert!(padded.iter().all(|value| value.to_f32().is_nan()), "a padded row was written\n{}", case.replay());
        result
    }
}

fn is_on_the_gpu(case: &Case) -> bool {
    matches!(case.op, Op::AddGateUp | Op::WriteGateUp | Op::AddDown | Op::WriteDown)
}

/// Runs a property over random cases, or over the one that `ARIL_EXPERTS_CASE` names.
fn property(cases_wanted: u32, sizes: Sizes, test: impl Fn(Case) -> Result<(), TestCaseError>) {
    let result = match Case::from_environment() {
        Some(case) => test(case).map_err(|error| error.to_string()),
        None => proptest::test_runner::TestRunner::new(crate::operations::config(cases_wanted))
            .run(&cases(sizes).prop_filter("operations that the GPU has", is_on_the_gpu), test)
            .map_err(|error| error.to_string()),
    };
    if let Err(error) = result {
        panic!("{error}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn experts_through_the_safe_door_agree_with_the_reference() {
    let gpu = Gpu::new();
    property(300, Sizes::LARGE, |case| for_dtype!(case, check(&mut Safe { gpu: &gpu }, &case)));
}

#[test]
#[ignore = "needs a GPU"]
fn experts_through_the_raw_door_agree_with_the_reference() {
    let gpu = Gpu::new();
    property(300, Sizes::LARGE, |case| {
        let captured = case.seed % 2 == 0;
        for_dtype!(case, check(&mut Raw { gpu: &gpu, padded_tokens: (case.seed % 3) as usize * 7, captured }, &case))
    });
}

/// More routes than one block groups.
#[test]
#[ignore = "needs a GPU"]
fn many_routes_agree_with_the_reference() {
    let gpu = Gpu::new();
    let sizes = Sizes { max_tokens: 700, ..Sizes::LARGE };
    property(60, sizes, |case| {
        for_dtype!(case, check(&mut Raw { gpu: &gpu, padded_tokens: 0, captured: false }, &case))
    });
}

/// More input features than one group of lanes, and more ranks than one step.
#[test]
#[ignore = "needs a GPU"]
fn wide_experts_agree_with_the_reference() {
    let gpu = Gpu::new();
    let sizes = Sizes { max_features: 3000, max_tokens: 20, max_rank: 192, max_experts: 4, max_top_k: 3 };
    property(60, sizes, |case| {
        for_dtype!(case, check(&mut Raw { gpu: &gpu, padded_tokens: 0, captured: false }, &case))
    });
}

/// The same bits twice, captured or not, and as the first of so many routes that a kernel of its own groups them.
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
        let times = 1025_usize.div_ceil(case.num_routes());
        let mut many = case.clone();
        many.slots = case.slots.repeat(times);
        many.ids = case.ids.repeat(times);
        many.half_scales = case.half_scales.as_ref().map(|scales| scales.repeat(times));
        many.half_weights = case.half_weights.as_ref().map(|weights| weights.repeat(times));
        let mut many_world = many.world::<T>();
        for (place, from, to) in [(case.x(), &world.x, &mut many_world.x), (case.y(), &world.y, &mut many_world.y)] {
            for row in 0..place.rows {
                let at = place.offset + row * place.stride;
                to[at..at + place.cols].copy_from_slice(&from[at..at + place.cols]);
            }
        }
        let as_one_of_many = run(&many, &many_world, false);
        let place = case.y();
        for row in 0..place.rows {
            let at = place.offset + row * place.stride;
            let row = at..at + place.cols;
            prop_assert!(
                bits(&first[row.clone()]) == bits(&as_one_of_many[row]),
                "differs as one of many\n{}",
                case.replay()
            );
        }
        Ok(())
    }
    let gpu = Gpu::new();
    property(80, Sizes::LARGE, |case| for_dtype!(case, run(&gpu, &case)));
}
