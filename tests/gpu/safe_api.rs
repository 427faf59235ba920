//! Random calls to the safe API are refused or computed, and never fault. Run this under compute-sanitizer.

use std::{error::Error, sync::Arc};

use aril::{
    DType, Slot,
    cuda::{
        Buffer, GroupedRoutes, Grouping, Kernels, LaunchError, LoraEmbedding, LoraExperts, LoraLinear, Matrix,
        MatrixMut, Queue, RoutedBatch, Routing, Step, TopK, View, WeightTable, Workspace, raw,
    },
    error::{LoadError, OperandError},
    model::{Experts, Linear, ModelSpec, Parallel, TpRank},
    plan::{Capacity, PlanError, RouteCapacity, WorkspaceBytes},
    routing::Batch,
};
use cudarc::driver::{CudaContext, CudaStream, sys::CUresult};
use proptest::prelude::*;

use crate::{
    common::{
        adapters,
        case::loaded_slots,
        dense::{Case, Dense, Op, Site},
        experts::{Case as ExpertsCase, Lora, Op as ExpertsOp},
        small,
        values::{Dtype, Values},
    },
    device::Gpu,
    experts::{OPERATIONS, launch, shapes},
    setup::load,
};

/// A call whose arguments may not fit each other.
#[derive(Clone, Debug)]
struct Call {
    embedding: bool,
    apart: bool,
    on_device: bool,
    layer: [usize; 2],
    ranks: Vec<usize>,
    /// Tokens, slots and rank that the layer's own table, the routing and the table are made for.
    capacities: [Capacity; 3],
    workspace_bytes: [usize; 2],
    /// Elements, rows, columns and row stride.
    x: [usize; 4],
    y: [usize; 4],
    slots: Vec<i32>,
    scales: usize,
    ids: Vec<i32>,
    another_model: bool,
}

/// Mostly arguments that fit.
pub fn near(value: usize) -> impl Strategy<Value = usize> + Clone {
    prop_oneof![80 => Just(value), 1 => Just(0), 1 => Just(value + 1), 1 => 0..2 * value + 2, 1 => Just(usize::MAX)]
}

fn capacities() -> impl Strategy<Value = Capacity> {
    let capacity = (near(5), near(3), near(8));
    capacity.prop_map(|(max_tokens, num_slots, max_rank)| Capacity::tokens(max_tokens).slots(num_slots).rank(max_rank))
}

fn calls() -> impl Strategy<Value = Call> {
    // 5 tokens, 33 in, 17 out.
    let index = prop_oneof![4 => -1..4_i32, 1 => any::<i32>()];
    let slot = prop_oneof![30 => -1..3_i32, 1 => any::<i32>()];
    (
        any::<[bool; 3]>(),
        prop::collection::vec(1..=9_usize, 0..=3),
        [capacities(), capacities(), capacities()],
        [(); 2].map(|()| prop_oneof![20 => Just(1 << 16), 1 => 0..400_usize]),
        ([near(5 * 40), near(5), near(33), near(40)], [near(5 * 20), near(5), near(17), near(20)]),
        (prop::bool::weighted(0.9), prop::collection::vec(slot.clone(), 5), prop::collection::vec(slot, 0..=7)),
        (near(5), prop::bool::weighted(0.9), prop::collection::vec(index, 5), prop::bool::weighted(0.05)),
        (prop::bool::weighted(0.9), [1..=33_usize, 1..=17_usize]),
    )
        .prop_map(
            |(
                flags,
                ranks,
                capacities,
                workspace_bytes,
                (x, y),
                (five, slots, other),
                (scales, all_ids, ids, another_model),
                layer,
            )| {
                Call {
                    embedding: flags[0],
                    apart: flags[1],
                    on_device: flags[2],
                    layer: if layer.0 { [33, 17] } else { layer.1 },
                    ranks,
                    capacities,
                    workspace_bytes,
                    x: [x[0].min(1 << 12), x[1], x[2], x[3]],
                    y: [y[0].min(1 << 12), y[1], y[2], y[3]],
                    slots: if five { slots } else { other },
                    scales: scales.min(1 << 12),
                    ids: if all_ids { ids } else { ids[1..].to_vec() },
                    another_model,
                }
            },
        )
}

pub fn workspace_bytes([mailbox, partials]: [usize; 2]) -> WorkspaceBytes {
    let mut bytes = WorkspaceBytes::default();
    (bytes.mailbox, bytes.partials) = (mailbox, partials);
    bytes
}

/// Makes the call and returns whether it was accepted.
fn make(gpu: &Gpu, call: &Call) -> Result<(), Box<dyn Error>> {
    let queue = &gpu.queue;
    let [in_features, out_features] = call.layer;
    let op = if call.embedding {
        Op::Embedding { vocab: in_features, hidden: out_features }
    } else {
        Op::Linear { in_features, slices: vec![out_features] }
    };
    let layer = Dense { op, adapters: call.ranks.iter().map(|&rank| vec![rank]).collect() };
    let case = Case { dtype: Dtype::F16, empty_slots: 0, ..Case::of(layer, Values::Rounded, 1) };
    let world = case.world::<half::f16>();
    let mut other_spec = ModelSpec::new();
    let other_id = other_spec.linear(Linear::new("m", Parallel::Row, in_features).slice("q", out_features)).unwrap();
    let other_model = other_spec.shard(TpRank::SINGLE).unwrap();
    let [layer_capacity, routing_capacity, table_capacity] = call.capacities;

    let weights = WeightTable::new(queue, &world.model, DType::F16, table_capacity, 1 << 15)?;
    for (slot, adapter) in world.adapters.iter().enumerate() {
        let image = adapter.plan(&world.model, aril::DType::F16).unwrap();
        weights.load(slot, &image)?;
    }
    let mut routing = Routing::new(queue, routing_capacity, 1)?;
    let slots = loaded_slots(&call.slots, |slot| weights.get(slot));
    let scales = vec![0.5_f32; call.scales];
    let (device_slots, device_scales) = (gpu.upload(&call.slots), gpu.upload(&scales));
    let batch = if call.on_device {
        routing.update_on_device(device_slots.view(), Some(View::from(device_scales.view())))?
    } else {
        routing.update(&Batch::new(&slots).with_scales(&scales)?)?
    };

    let values = |elements: usize| vec![half::f16::ONE; elements];
    let (x, mut y, ids) = (gpu.upload(&values(call.x[0])), gpu.upload(&values(call.y[0])), gpu.upload(&call.ids));
    let mut workspace = Workspace::with_bytes(queue, workspace_bytes(call.workspace_bytes))?;
    let x = Matrix::<half::f16>::strided(x.view(), call.x[1], call.x[2], call.x[3])?;
    let y = MatrixMut::<half::f16>::strided(y.view_mut(), call.y[1], call.y[2], call.y[3])?;
    let planned_for = |model| WeightTable::new(queue, model, DType::F16, layer_capacity, 1);
    let mut step = weights.step(&batch, &mut workspace)?;
    match world.id {
        Site::Embedding(id) => {
            let layer = LoraEmbedding::new(&planned_for(&world.model)?, id)?;
            layer.add_delta(&mut step, ids.view(), y)?;
        }
        Site::Linear(id) => {
            let (model, id) = if call.another_model { (&other_model, other_id) } else { (&world.model, id) };
            let layer = LoraLinear::new(&planned_for(model)?, id)?;
            if call.apart {
                layer.shrink(&mut step, x)?.expand(y)?;
            } else {
                layer.add_delta(&mut step, x, y)?;
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn no_safe_call_faults() {
    let gpu = Gpu::new();
    let (cases, taken) = take_or_refuse(&gpu, 2000, &calls(), make);
    assert!(taken > cases / 8, "only {taken} of {cases} calls were taken: the test tests refusals alone");
}

/// Whether the error came from the driver or a kernel, so that a call passed a check that it should not have.
fn is_of_device(error: &(dyn Error + 'static)) -> bool {
    let load = error.downcast_ref();
    let launch = load.and_then(|error| match error {
        LoadError::Device(error) => Some(error),
        _ => None,
    });
    match launch.or_else(|| error.downcast_ref()) {
        Some(LaunchError::Driver(error)) => error.0 != CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        Some(LaunchError::Kernel { .. }) => true,
        _ => false,
    }
}

/// Makes random calls, none of which may fault. Returns how many there were and how many were accepted.
pub fn take_or_refuse<S: Strategy>(
    gpu: &Gpu,
    cases_wanted: u32,
    calls: &S,
    make: impl Fn(&Gpu, &S::Value) -> Result<(), Box<dyn Error>>,
) -> (u32, u32) {
    // Enough calls for the share of accepted ones to be meaningful.
    let cases = small::random_cases(cases_wanted).max(200);
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let taken = std::cell::Cell::new(0_u32);
    let run = proptest::test_runner::TestRunner::new(config).run(calls, |call| {
        match make(gpu, &call) {
            Ok(()) => taken.set(taken.get() + 1),
            Err(error) => prop_assert!(!is_of_device(&*error), "{error} for {call:?}"),
        }
        let after = gpu.stream.synchronize();
        prop_assert!(after.is_ok(), "{after:?} after {call:?}");
        Ok(())
    });
    run.unwrap();
    (cases, taken.get())
}

/// Like [`Call`], for operations on experts: 5 tokens with 2 of 3 experts each, hidden size 33, intermediate size 17.
#[derive(Clone, Debug)]
struct ExpertsCall {
    op: ExpertsOp,
    ranks: Vec<usize>,
    /// Tokens, slots and rank that the layer's own table, the routing and the table are made for.
    capacities: [Capacity; 3],
    /// The capacity of the grouping.
    routes: [usize; 3],
    /// Experts per token: in the layer's capacity, and chosen.
    top_k: [usize; 2],
    workspace_bytes: [usize; 2],
    /// Elements, rows, columns and row stride of x, y and what is written, where they do not fit.
    matrices: [[Option<usize>; 4]; 3],
    slots: Vec<i32>,
    ids: Vec<i32>,
    /// The number of routes.
    weights: Option<usize>,
    rows: Option<Vec<i32>>,
    another_model: bool,
}

fn experts_calls() -> impl Strategy<Value = ExpertsCall> {
    let misfit = || {
        let value = prop_oneof![1 => Just(0), 4 => 1..40_usize, 4 => 40..400_usize, 1 => Just(usize::MAX)];
        prop::option::weighted(0.03, value)
    };
    let misfits = move || [misfit(), misfit(), misfit(), misfit()];
    let index = prop_oneof![4 => -1..4_i32, 1 => any::<i32>()];
    let slot = prop_oneof![30 => -1..3_i32, 1 => any::<i32>()];
    let row = prop_oneof![4 => -1..11_i32, 1 => any::<i32>()];
    let indices = |index: BoxedStrategy<i32>, len: usize| {
        let any = prop::collection::vec(index.clone(), 0..=len + 3);
        prop_oneof![30 => prop::collection::vec(index, len), 1 => any].boxed()
    };
    let index = index.boxed();
    let made_for = ([capacities(), capacities(), capacities()], [near(5), near(2), near(3)], [near(2), near(2)]);
    let chosen = (
        indices(slot.boxed(), 5),
        indices(index, 10),
        prop::option::of(near(10)),
        prop::option::of(indices(row.boxed(), 10)),
    );
    (
        prop::sample::select(OPERATIONS.to_vec()),
        prop::collection::vec(1..=8_usize, 0..=3),
        made_for,
        [(); 2].map(|()| prop_oneof![30 => Just(1 << 16), 1 => 0..2000_usize]),
        [misfits(), misfits(), misfits()],
        chosen,
        prop::bool::weighted(0.03),
    )
        .prop_map(|(op, ranks, made_for, workspace_bytes, matrices, chosen, another_model)| {
            let ((capacities, routes, top_k), (slots, ids, weights, rows)) = (made_for, chosen);
            ExpertsCall {
                op,
                ranks,
                capacities,
                routes,
                top_k,
                workspace_bytes,
                matrices,
                slots,
                ids,
                weights: weights.map(|len| len.min(1 << 12)),
                rows,
                another_model,
            }
        })
}

/// As [`make`].
fn make_experts(gpu: &Gpu, call: &ExpertsCall) -> Result<(), Box<dyn Error>> {
    type T = half::f16;
    let queue = &gpu.queue;
    let lora = |(slot, &rank): (usize, &usize)| match slot {
        1 => Lora::shared_outer(3, rank),
        _ => Lora::of_own_ranks(3, rank),
    };
    let adapters: Vec<Lora> = call.ranks.iter().enumerate().map(lora).collect();
    let case = ExpertsCase::new([3, 33, 17], adapters, [5, call.top_k[0].min(8)]);
    let world = case.world::<T>();
    let mut other_spec = ModelSpec::new();
    let other_id = other_spec.experts(Experts::new("layer.experts", 4, 33, 17).top_k(2)).unwrap();
    let other_model = other_spec.shard(TpRank::SINGLE).unwrap();
    let [layer_capacity, routing_capacity, table_capacity] = call.capacities;
    let [max_tokens, top_k, num_experts] = call.routes;

    let weights = WeightTable::new(queue, &world.model, DType::F16, table_capacity, 1 << 20)?;
    for (slot, adapter) in world.adapters.iter().enumerate() {
        weights.load(slot, &adapter.plan(&world.model, DType::F16).unwrap())?;
    }
    let mut routing = Routing::new(queue, routing_capacity, 1)?;
    let slots = loaded_slots(&call.slots, |slot| weights.get(slot));
    let batch = routing.update(&Batch::new(&slots))?;
    let mut grouping = Grouping::new(queue, RouteCapacity::tokens(max_tokens).top_k(top_k).experts(num_experts))?;
    let router = call.weights.map(|len| gpu.upload(&vec![0.5_f32; len]));
    let (ids, rows) = (gpu.upload(&call.ids), call.rows.as_ref().map(|rows| gpu.upload(rows)));
    let mut top_k = TopK::new(ids.view(), call.top_k[1])?;
    if let Some(router) = &router {
        top_k = top_k.with_weights(router.view())?;
    }
    if let Some(rows) = &rows {
        top_k = top_k.with_rows(rows.view())?;
    }
    let mut workspace = Workspace::with_bytes(queue, workspace_bytes(call.workspace_bytes))?;
    let mut step = weights.step(&batch, &mut workspace)?;
    let mut routes = grouping.update(&mut step, top_k)?;

    let fitting = shapes(call.op, [33, 17], [5, 10]);
    let [x, y, target] = [0, 1, 2].map(|matrix| {
        let ([rows, cols], [elements, misfit_rows, misfit_cols, misfit_stride]) =
            (fitting[matrix], call.matrices[matrix]);
        let elements = elements.unwrap_or(rows * cols).min(1 << 12);
        (elements, misfit_rows.unwrap_or(rows), misfit_cols.unwrap_or(cols), misfit_stride.unwrap_or(cols))
    });
    let [x_values, y_values, mut written] = [x.0, y.0, target.0].map(|elements| gpu.upload(&vec![T::ONE; elements]));
    let x = Matrix::<T>::strided(x_values.view(), x.1, x.2, x.3)?;
    let y = Matrix::strided(y_values.view(), y.1, y.2, y.3)?;
    let target = MatrixMut::strided(written.view_mut(), target.1, target.2, target.3)?;
    let (model, id) = if call.another_model { (&other_model, other_id) } else { (&world.model, world.id) };
    let planned_for = WeightTable::new(queue, model, DType::F16, layer_capacity, 1)?;
    let layer = LoraExperts::new(&planned_for, id)?;
    Ok(launch(&layer, call.op, &mut step, &mut routes, [x, y], target)?)
}

#[test]
#[ignore = "needs a GPU"]
fn no_safe_call_on_experts_faults() {
    let gpu = Gpu::new();
    let (cases, taken) = take_or_refuse(&gpu, 1500, &experts_calls(), make_experts);
    assert!(taken > cases / 16, "only {taken} of {cases} calls were taken: the test tests refusals alone");
}

/// Layers of another model are refused: they would read past the table's rows.
/// As on the CPU. A routing is for tables of as many slots as it has.
#[test]
#[ignore = "needs a GPU"]
fn batches_beyond_the_table_are_refused() {
    let gpu = Gpu::new();
    let queue = &gpu.queue;
    let mut spec = ModelSpec::new();
    spec.linear(Linear::new("m", Parallel::Replicated, 64).slice("q", 64)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(2).slots(3).rank(4);
    let table = |capacity| WeightTable::new(queue, &model, DType::F32, capacity, 1 << 16).unwrap();
    let (weights, larger) = (table(capacity), table(capacity.slots(5)));
    let modules = [adapters::Lora::linear("m.q", 64, 64, 1)];
    let [own, last] = [0, 2].map(|slot| load(&weights, slot, &modules));
    let [equal, third] = [2, 3].map(|slot| load(&larger, slot, &modules));
    let mut workspace = Workspace::new(&weights).unwrap();
    let mut routing = Routing::new(queue, capacity, 8).unwrap();
    let mut refused = |slots: &[Slot]| match routing.update(&Batch::new(slots)) {
        Ok(batch) => weights.step(&batch, &mut workspace).map(drop).err(),
        Err(error) => Some(error),
    };
    let is = |error: Option<LaunchError>, expected: OperandError| match error {
        Some(LaunchError::Operand(error)) => assert_eq!(error, expected),
        other => panic!("{other:?} instead of {expected}"),
    };
    assert!(refused(&[last, Slot::BASE]).is_none());
    is(refused(&[own, third]), OperandError::NoSuchSlot { slot: third, num_slots: 3 });
    is(refused(&[own, equal]), OperandError::NotLoaded { slot: equal });
    let too_many = OperandError::Capacity { what: "the batch's tokens", got: 3, max: 2 };
    is(refused(&[Slot::BASE; 3]), too_many.clone());
    is(refused(&[third; 3]), too_many);

    for slots in [2, 4] {
        let mut other = Routing::new(queue, capacity.slots(slots), 1).unwrap();
        let differ = OperandError::NumSlots { routing: slots, table: 3 };
        let captured = weights.capture::<LaunchError>(&other, 1, &mut workspace, |_| Ok(()));
        is(captured.err(), differ.clone());
        let batch = other.update(&Batch::new(&[own])).unwrap();
        is(weights.step(&batch, &mut workspace).err(), differ);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn weights_of_another_model_are_refused() {
    let gpu = Gpu::new();
    let queue = &gpu.queue;
    let model = |features| {
        let mut spec = ModelSpec::new();
        let id = spec.linear(Linear::new("m", Parallel::Replicated, features).slice("q", features)).unwrap();
        (spec.shard(TpRank::SINGLE).unwrap(), id)
    };
    let ((narrow, _), (wide, id)) = (model(4), model(64));
    let capacity = Capacity::tokens(1).slots(1).rank(4);
    let weights = WeightTable::new(queue, &narrow, DType::F32, capacity, 1 << 12).unwrap();
    assert!(matches!(LoraLinear::new(&weights, id), Err(PlanError::Foreign)));
    let of_wide = |dtype| WeightTable::new(queue, &wide, dtype, capacity, 1 << 12).unwrap();
    let (wide_weights, of_other_type) = (of_wide(DType::F32), of_wide(DType::BF16));
    let layer = LoraLinear::new(&wide_weights, id).unwrap();
    let mut workspace = Workspace::new(&wide_weights).unwrap();
    let mut routing = Routing::new(queue, capacity, 1).unwrap();
    let batch = routing.update(&Batch::new(&[Slot::BASE])).unwrap();
    let (x, mut y) = (gpu.upload(&[1.0_f32; 64]), gpu.upload(&[1.0_f32; 64]));
    let mut launch = |layer: &LoraLinear, weights: &WeightTable| {
        let (x, y) = (Matrix::new(x.view::<f32>(), 1, 64).unwrap(), MatrixMut::new(y.view_mut(), 1, 64).unwrap());
        layer.add_delta(&mut weights.step(&batch, &mut workspace)?, x, y)
    };
    let error = launch(&layer, &weights).unwrap_err();
    assert!(matches!(error, LaunchError::Operand(OperandError::Model)), "{error}");
    let of_type = |error: &LaunchError, name: &str, [got, want]: [DType; 2]| {
        matches!(error, LaunchError::Operand(OperandError::DType { operand, got: g, want: w })
            if (*operand, *g, *w) == (name, got, want))
    };
    let error = launch(&layer, &of_other_type).unwrap_err();
    assert!(of_type(&error, "weights", [DType::BF16, DType::F32]), "{error}");
    let layer_of_other_type = LoraLinear::new(&of_other_type, id).unwrap();
    let error = launch(&layer_of_other_type, &of_other_type).unwrap_err();
    assert!(of_type(&error, "x", [DType::F32, DType::BF16]), "{error}");
    launch(&layer, &wide_weights).unwrap();
}

/// Operands of another stream or context are refused by name.
#[test]
#[ignore = "needs a GPU"]
fn foreign_operands_are_refused() {
    let gpu = Gpu::new();
    let foreign_context = CudaContext::new_non_primary(0, 0).unwrap();
    foreign_context.bind_to_thread().unwrap();
    let foreign: Arc<CudaStream> = foreign_context.default_stream();
    let foreign_x = foreign.alloc_zeros::<f32>(64).unwrap();
    foreign.synchronize().unwrap();
    let foreign_kernels = Kernels::load_into(&foreign_context).unwrap();
    let foreign_queue = Queue::new(&foreign_kernels, &foreign).unwrap();
    gpu.context.bind_to_thread().unwrap();
    let other = Gpu::new().queue;

    let (kernels, queue) = (&gpu.kernels, &gpu.queue);
    let mut spec = ModelSpec::new();
    let id = spec.linear(Linear::new("m", Parallel::Replicated, 64).slice("q", 64)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(1).slots(1).rank(4);
    let weights = WeightTable::new(queue, &model, DType::F32, capacity, 1 << 12).unwrap();
    let layer = LoraLinear::new(&weights, id).unwrap();
    let mut workspace = Workspace::new(&weights).unwrap();
    let [mut other_workspace, mut foreign_workspace] =
        [&other, &foreign_queue].map(|queue| Workspace::with_bytes(queue, layer.plan().workspace_bytes()).unwrap());
    let [mut routing, mut other_routing, mut foreign_routing] =
        [queue, &other, &foreign_queue].map(|queue| Routing::new(queue, capacity, 1).unwrap());
    let slots = [Slot::BASE];
    let [batch, other_batch, foreign_batch] = [&mut routing, &mut other_routing, &mut foreign_routing]
        .map(|routing| routing.update(&Batch::new(&slots)).unwrap());
    let (x, mut y) = (gpu.upload(&[1.0_f32; 64]), gpu.upload(&[1.0_f32; 64]));
    let [other_buffer, foreign_buffer] = [&other, &foreign_queue].map(|queue| Buffer::<f32>::zeros(queue, 64).unwrap());
    let mut launch = |x: Matrix<'_, f32>, batch: &RoutedBatch<'_>, workspace: &mut Workspace| {
        let y = MatrixMut::new(y.view_mut(), 1, 64).unwrap();
        layer.add_delta(&mut weights.step(batch, workspace)?, x, y)
    };
    let local = || Matrix::new(x.view(), 1, 64).unwrap();
    launch(local(), &batch, &mut workspace).unwrap();
    let error = launch(Matrix::new(&foreign_x, 1, 64).unwrap(), &batch, &mut workspace).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { operand: "x" }), "{error}");
    let error = launch(Matrix::new(&foreign_buffer, 1, 64).unwrap(), &batch, &mut workspace).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { operand: "x" }), "{error}");
    let error = launch(Matrix::new(&other_buffer, 1, 64).unwrap(), &batch, &mut workspace).unwrap_err();
    assert!(matches!(error, LaunchError::WrongStream { operand: "x" }), "{error}");
    let error = launch(local(), &batch, &mut other_workspace).unwrap_err();
    assert!(matches!(error, LaunchError::WrongStream { operand: "the workspace" }), "{error}");
    let error = launch(local(), &batch, &mut foreign_workspace).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { operand: "the workspace" }), "{error}");
    let error = launch(local(), &other_batch, &mut workspace).unwrap_err();
    assert!(matches!(error, LaunchError::WrongStream { operand: "the batch" }), "{error}");
    let error = launch(local(), &foreign_batch, &mut workspace).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { operand: "the batch" }), "{error}");
    let error = Queue::new(kernels, &foreign).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { operand: "the stream" }), "{error}");
    let error = Queue::new(&foreign_kernels, queue.stream()).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { operand: "the stream" }), "{error}");
    let error = Queue::new(kernels, &gpu.context.per_thread_stream()).unwrap_err();
    assert!(matches!(error, LaunchError::PerThreadStream), "{error}");
    let capture = |routing: &Routing, workspace: &mut Workspace| {
        weights.capture(routing, 1, workspace, |_| Ok::<_, LaunchError>(())).unwrap_err()
    };
    let error = capture(&other_routing, &mut workspace);
    assert!(matches!(error, LaunchError::WrongStream { operand: "the routing" }), "{error}");
    let error = capture(&foreign_routing, &mut workspace);
    assert!(matches!(error, LaunchError::WrongContext { operand: "the routing" }), "{error}");
    let error = capture(&routing, &mut other_workspace);
    assert!(matches!(error, LaunchError::WrongStream { operand: "the workspace" }), "{error}");
    let slice = gpu.stream.alloc_zeros::<f32>(1).unwrap();
    let error = Buffer::from_slice(&other, slice).unwrap_err();
    assert!(matches!(error, LaunchError::WrongStream { operand: "the slice" }), "{error}");
    assert_eq!(y.read::<f32>(), [1.0; 64]);
}

/// The refusals of linear layers, and those of experts alone: the router's choices, and routes grouped on another stream.
#[test]
#[ignore = "needs a GPU"]
fn foreign_operands_of_experts_are_refused() {
    let gpu = Gpu::new();
    let foreign_context = CudaContext::new_non_primary(0, 0).unwrap();
    foreign_context.bind_to_thread().unwrap();
    let foreign: Arc<CudaStream> = foreign_context.default_stream();
    let (foreign_values, mut foreign_target) =
        (foreign.alloc_zeros::<f32>(64).unwrap(), foreign.alloc_zeros::<f32>(64).unwrap());
    let foreign_ids = foreign.alloc_zeros::<i32>(2).unwrap();
    foreign.synchronize().unwrap();
    let foreign_queue = Queue::new(&Kernels::load_into(&foreign_context).unwrap(), &foreign).unwrap();
    gpu.context.bind_to_thread().unwrap();
    let other = Gpu::new().queue;

    let queue = &gpu.queue;
    let mut spec = ModelSpec::new();
    let id = spec.experts(Experts::new("m", 2, 4, 4).top_k(2)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(1).slots(1).rank(4);
    let [weights, other_weights] =
        [queue, &other].map(|queue| WeightTable::new(queue, &model, DType::F32, capacity, 1 << 12).unwrap());
    let layer = LoraExperts::new(&weights, id).unwrap();
    let [mut workspace, mut second_workspace] = [&weights; 2].map(|weights| Workspace::new(weights).unwrap());
    let mut other_workspace = Workspace::new(&other_weights).unwrap();
    let [mut routing, mut second_routing, mut other_routing] =
        [queue, queue, &other].map(|queue| Routing::new(queue, capacity, 1).unwrap());
    let slots = [Slot::BASE];
    let [batch, second_batch, other_batch] = [&mut routing, &mut second_routing, &mut other_routing]
        .map(|routing| routing.update(&Batch::new(&slots)).unwrap());
    let route_capacity = RouteCapacity::tokens(1).top_k(2).experts(2);
    let [mut grouping, mut second_grouping, mut other_grouping, mut foreign_grouping] =
        [queue, queue, &other, &foreign_queue].map(|queue| Grouping::new(queue, route_capacity).unwrap());
    let ids = gpu.upload(&[0_i32, 1]);
    let top_k = || TopK::new(ids.view(), 2).unwrap();
    let other_ids = Buffer::<i32>::zeros(&other, 2).unwrap();

    let error = weights.step(&other_batch, &mut workspace).unwrap_err();
    assert!(matches!(error, LaunchError::WrongStream { operand: "the batch" }), "{error}");
    let error = weights.step(&batch, &mut other_workspace).unwrap_err();
    assert!(matches!(error, LaunchError::WrongStream { operand: "the workspace" }), "{error}");
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    let error = other_grouping.update(&mut step, top_k()).unwrap_err();
    assert!(matches!(error, LaunchError::WrongStream { operand: "the grouping" }), "{error}");
    let error = foreign_grouping.update(&mut step, top_k()).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { operand: "the grouping" }), "{error}");
    let error = grouping.update(&mut step, TopK::new(&foreign_ids, 2).unwrap()).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { operand: "ids" }), "{error}");
    let error = grouping.update(&mut step, TopK::new(&other_ids, 2).unwrap()).unwrap_err();
    assert!(matches!(error, LaunchError::WrongStream { operand: "ids" }), "{error}");
    let foreign_weights = top_k().with_weights(foreign_values.slice(..2)).unwrap();
    let error = grouping.update(&mut step, foreign_weights).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { operand: "weights" }), "{error}");
    let foreign_rows = top_k().with_rows(&foreign_ids).unwrap();
    let error = grouping.update(&mut step, foreign_rows).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { operand: "rows" }), "{error}");

    let mut routes = grouping.update(&mut step, top_k()).unwrap();
    let mut second_step = weights.step(&second_batch, &mut second_workspace).unwrap();
    let mut second_routes = second_grouping.update(&mut second_step, top_k()).unwrap();
    let mut other_step = other_weights.step(&other_batch, &mut other_workspace).unwrap();
    let mut other_routes = other_grouping.update(&mut other_step, TopK::new(&other_ids, 2).unwrap()).unwrap();
    let (values, mut written) = (gpu.upload(&[1.0_f32; 64]), gpu.upload(&[7.0_f32; 64]));
    for op in OPERATIONS {
        let [x, y, target] = shapes(op, [4, 4], [1, 2]);
        let local = |[rows, cols]: [usize; 2]| Matrix::new(values.view(), rows, cols).unwrap();
        let from = |[rows, cols]: [usize; 2]| Matrix::new(&foreign_values, rows, cols).unwrap();
        let mut run = |inputs: [Matrix<'_, f32>; 2], step: &mut Step<'_>, routes: &mut GroupedRoutes<'_, '_>| {
            let target = MatrixMut::new(written.view_mut(), target[0], target[1]).unwrap();
            launch(&layer, op, step, routes, inputs, target)
        };
        let error = run([from(x), local(y)], &mut step, &mut routes).unwrap_err();
        assert!(matches!(error, LaunchError::WrongContext { operand: "x" }), "{op:?}: {error}");
        if op.has_out() {
            let error = run([local(x), from(y)], &mut step, &mut routes).unwrap_err();
            assert!(matches!(error, LaunchError::WrongContext { operand: "y" }), "{op:?}: {error}");
        }
        let error = run([local(x), local(y)], &mut step, &mut other_routes).unwrap_err();
        assert!(matches!(error, LaunchError::WrongStream { operand: "the routes" }), "{op:?}: {error}");
        let error = run([local(x), local(y)], &mut other_step, &mut routes).unwrap_err();
        assert!(matches!(error, LaunchError::WrongStream { operand: "the routes" }), "{op:?}: {error}");
        let error = run([local(x), local(y)], &mut step, &mut second_routes).unwrap_err();
        assert!(matches!(error, LaunchError::OtherBatch { operand: "the routes" }), "{op:?}: {error}");
        let foreign_target = MatrixMut::new(&mut foreign_target, target[0], target[1]).unwrap();
        let inputs = [local(x), local(y)];
        let error = launch(&layer, op, &mut step, &mut routes, inputs, foreign_target).unwrap_err();
        let named = if op.has_out() { "out" } else { "y" };
        assert!(matches!(error, LaunchError::WrongContext { operand } if operand == named), "{op:?}: {error}");
    }
    assert_eq!(written.read::<f32>(), [7.0; 64]);
    for op in OPERATIONS {
        let [x, y, target] = shapes(op, [4, 4], [1, 2]);
        let inputs = [x, y].map(|[rows, cols]| Matrix::new(values.view::<f32>(), rows, cols).unwrap());
        let target = MatrixMut::new(written.view_mut(), target[0], target[1]).unwrap();
        launch(&layer, op, &mut step, &mut routes, inputs, target).unwrap();
    }
    assert_ne!(written.read::<f32>(), [7.0; 64]);
}

/// Exceeding a bound of the grouping, of the layer or of the workspace is refused by the bound's name.
#[test]
#[ignore = "needs a GPU"]
fn routes_past_what_there_is_room_for_are_refused() {
    // So many that sums also pass through the partials.
    const TOKENS: usize = 600;
    let gpu = Gpu::new();
    let queue = &gpu.queue;
    let mut spec = ModelSpec::new();
    let [id, of_one_route] =
        [2, 1].map(|top_k| spec.experts(Experts::new(format!("m{top_k}"), 2, 4, 4).top_k(top_k)).unwrap());
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(TOKENS).slots(2).rank(4);
    let weights = WeightTable::new(queue, &model, DType::F32, capacity, 1 << 12).unwrap();
    let mut routing = Routing::new(queue, capacity, 1).unwrap();
    let batch = routing.update(&Batch::new(&[Slot::BASE; TOKENS])).unwrap();
    let mut workspace = Workspace::new(&weights).unwrap();
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    let ids = gpu.upload(&[0_i32; 2 * TOKENS]);
    let top_k = || TopK::new(ids.view(), 2).unwrap();
    let route_capacity = RouteCapacity::tokens(TOKENS).top_k(2).experts(2);
    let grouping = |capacity| Grouping::new(queue, capacity).unwrap();

    let mut fewer_tokens = grouping(RouteCapacity::tokens(TOKENS - 1).top_k(2).experts(2));
    let error = fewer_tokens.update(&mut step, top_k()).unwrap_err();
    let is_of_tokens = |error: &LaunchError, limited: &str| match *error {
        LaunchError::Operand(OperandError::Capacity { what, got, max }) => {
            what == limited && (got, max) == (TOKENS, TOKENS - 1)
        }
        _ => false,
    };
    assert!(is_of_tokens(&error, "the batch's tokens for this grouping"), "{error}");
    let mut fewer_routes = grouping(route_capacity.top_k(1));
    let error = fewer_routes.update(&mut step, top_k()).unwrap_err();
    assert!(
        matches!(error, LaunchError::Operand(OperandError::Capacity { what: "the routes of a token", got: 2, max: 1 })),
        "{error}"
    );
    let too_many = TopK::new(ids.view(), 1).unwrap();
    let error = fewer_routes.update(&mut step, too_many).unwrap_err();
    let is_of_others =
        matches!(error, LaunchError::Operand(OperandError::Tokens { got, want: TOKENS }) if got == 2 * TOKENS);
    assert!(is_of_others, "{error}");
    for num_experts in [0, 1025] {
        let made = Grouping::new(queue, route_capacity.experts(num_experts));
        assert_eq!(made.is_ok(), num_experts == 0);
    }

    let [mut fitting, mut of_three] = [2, 3].map(|num_experts| grouping(route_capacity.experts(num_experts)));
    let mut routes = fitting.update(&mut step, top_k()).unwrap();
    let mut of_three = of_three.update(&mut step, top_k()).unwrap();
    let layer = |capacity, id| {
        let planned_for = WeightTable::new(queue, &model, DType::F32, capacity, 1).unwrap();
        LoraExperts::new(&planned_for, id).unwrap()
    };
    let fitting_layer = layer(capacity, id);
    let (values, mut written) = (gpu.upload(&[1.0_f32; 16 * TOKENS]), gpu.upload(&[7.0_f32; 16 * TOKENS]));
    for op in OPERATIONS {
        let [x, y, target] = shapes(op, [4, 4], [TOKENS, 2 * TOKENS]);
        let mut run = |layer: &LoraExperts, routes: &mut GroupedRoutes<'_, '_>, bytes: WorkspaceBytes| {
            let mut workspace = Workspace::with_bytes(queue, bytes).unwrap();
            let mut step = weights.step(&batch, &mut workspace).unwrap();
            let inputs = [x, y].map(|[rows, cols]| Matrix::new(values.view::<f32>(), rows, cols).unwrap());
            let target = MatrixMut::new(written.view_mut(), target[0], target[1]).unwrap();
            launch(layer, op, &mut step, routes, inputs, target)
        };
        let all = fitting_layer.plan().workspace_bytes();
        let fewer_tokens = layer(Capacity::tokens(TOKENS - 1).slots(2).rank(4), id);
        let error = run(&fewer_tokens, &mut routes, all).unwrap_err();
        assert!(is_of_tokens(&error, "the batch's tokens for this layer"), "{op:?}: {error}");
        let error = run(&layer(capacity, of_one_route), &mut routes, all).unwrap_err();
        assert!(
            matches!(
                error,
                LaunchError::Operand(OperandError::Capacity { what: "the routes of a token", got: 2, max: 1 })
            ),
            "{op:?}: {error}"
        );
        let error = run(&layer(capacity.slots(1), id), &mut routes, all).unwrap_err();
        assert!(
            matches!(
                error,
                LaunchError::Operand(OperandError::Capacity { what: "the weights' num_slots", got: 2, max: 1 })
            ),
            "{op:?}: {error}"
        );
        let error = run(&layer(capacity.rank(3), id), &mut routes, all).unwrap_err();
        assert!(
            matches!(
                error,
                LaunchError::Operand(OperandError::Capacity { what: "the weights' max_rank", got: 4, max: 3 })
            ),
            "{op:?}: {error}"
        );
        let error = run(&fitting_layer, &mut of_three, all).unwrap_err();
        assert!(matches!(error, LaunchError::Operand(OperandError::Model)), "{op:?}: {error}");
        let plan = fitting_layer.plan();
        let projection = if op.is_before_activation() { plan.gate_up() } else { plan.down() };
        let needed = projection.workspace_bytes_for(TOKENS, 2);
        for (bytes, part) in [
            ([needed.mailbox - 1, needed.partials], needed.mailbox),
            ([needed.mailbox, needed.partials - 1], needed.partials),
        ] {
            let error = run(&fitting_layer, &mut routes, workspace_bytes(bytes)).unwrap_err();
            let is_of_workspace = matches!(error, LaunchError::TooSmall { memory: "the workspace", got, want, .. }
                if want == part && got + 1 == part);
            assert!(is_of_workspace, "{op:?}: {error}");
        }
    }
    assert_eq!(written.read::<f32>(), [7.0; 16 * TOKENS]);
    for op in OPERATIONS {
        let [x, y, target] = shapes(op, [4, 4], [TOKENS, 2 * TOKENS]);
        let inputs = [x, y].map(|[rows, cols]| Matrix::new(values.view::<f32>(), rows, cols).unwrap());
        let target = MatrixMut::new(written.view_mut(), target[0], target[1]).unwrap();
        launch(&fitting_layer, op, &mut step, &mut routes, inputs, target).unwrap();
    }
}

/// The raw API checks what it can: sizes, alignments, element types, and the thread's context.
#[test]
#[ignore = "needs a GPU"]
fn raw_memory_that_experts_cannot_use_is_refused() {
    let gpu = Gpu::new();
    let (kernels, stream) = (&gpu.kernels, gpu.raw_stream());
    let capacity = RouteCapacity::tokens(2).top_k(2).experts(2);
    let bytes = raw::Grouping::device_bytes(capacity).unwrap();
    let memory = gpu.upload(&vec![0_u8; bytes + 256]);
    let within = |offset: usize, bytes: usize| {
        let region = raw::DeviceRegion { ptr: memory.address() + offset as u64, bytes };
        // SAFETY: the memory is zero, outlives the grouping and is used on one stream.
        unsafe { raw::Grouping::new(kernels, capacity, region) }
    };
    let error = within(0, bytes - 1).unwrap_err();
    let is_of_bytes = matches!(error, LaunchError::TooSmall { memory: "the grouping's memory", got, want, .. }
        if want == bytes && got + 1 == bytes);
    assert!(is_of_bytes, "{error}");
    let error = within(128, bytes).unwrap_err();
    assert!(matches!(error, LaunchError::Misaligned { operand: "the grouping's memory", alignment: 256 }), "{error}");
    let mut grouping = within(256, bytes).unwrap();

    let mut spec = ModelSpec::new();
    let id = spec.experts(Experts::new("m", 2, 4, 4).top_k(2)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let table_capacity = Capacity::tokens(2).slots(1).rank(4);
    let weights = WeightTable::new(&gpu.queue, &model, DType::F32, table_capacity, 1 << 12).unwrap();
    let mut routing = Routing::new(&gpu.queue, table_capacity, 1).unwrap();
    routing.update(&Batch::new(&[Slot::BASE; 2])).unwrap();
    let batch = routing.capture_batch(2).unwrap();
    let (ids, values, target) = (gpu.upload(&[0_i32; 4]), gpu.upload(&[1.0_f32; 64]), gpu.upload(&[7.0_f32; 64]));
    let mut group = |top_k| {
        let top_k = raw::TopK::new(ids.address(), top_k);
        // SAFETY: the test owns all operands and keeps them alive until the stream is synchronized.
        unsafe { grouping.group(batch, top_k, stream) }
    };
    let error = group(0).unwrap_err();
    assert!(matches!(error, LaunchError::Operand(OperandError::TopK { top_k: 0, .. })), "{error}");
    let error = group(3).unwrap_err();
    assert!(
        matches!(error, LaunchError::Operand(OperandError::Capacity { what: "the routes of a token", got: 3, max: 2 })),
        "{error}"
    );
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let error = group(2).unwrap_err();
            assert!(matches!(error, LaunchError::WrongContext { operand: "the thread" }), "{error}");
        });
        other.join().unwrap();
    });
    let mut routes = group(2).unwrap();

    let layer = LoraExperts::for_model(kernels, &model, id, DType::F32, table_capacity).unwrap();
    let workspace_memory = Workspace::new(&weights).unwrap();
    let workspace = workspace_memory.raw();
    let mut add = |dtype, workspace| {
        let step = raw::Step::new(weights.raw(), batch, workspace, stream);
        let x = raw::MatrixRef::with_dtype(values.address(), dtype, 2, 4);
        let y = raw::MatrixMut::new::<f32>(target.address(), 4, 8);
        // SAFETY: as above.
        unsafe { layer.add_gate_up_delta_raw(&step, &mut routes, x, y) }
    };
    let error = add(DType::BF16, workspace).unwrap_err();
    let of_type = OperandError::DType { operand: "x", got: DType::BF16, want: DType::F32 };
    assert!(matches!(&error, LaunchError::Operand(error) if *error == of_type), "{error}");
    let mut misaligned = workspace;
    misaligned.mailbox.ptr += 8;
    let error = add(DType::F32, misaligned).unwrap_err();
    assert!(matches!(error, LaunchError::Misaligned { operand: "the workspace", alignment: 16 }), "{error}");
    assert_eq!(target.read::<f32>(), [7.0; 64]);
}
