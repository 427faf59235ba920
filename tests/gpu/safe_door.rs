//! Whatever is thrown at the safe door, it is refused or computed: never a fault. Run it under compute-sanitizer.

use std::sync::Arc;

use aril::{
    DType, Slot,
    cuda::{
        GroupedRoutes, Grouping, Kernels, LaunchError, LoraEmbedding, LoraExperts, LoraLinear, Matrix, MatrixMut,
        Routing, TopK, WeightTable, Workspace, raw,
    },
    error::OperandError,
    model::{Experts, Linear, ModelSpec, Parallel, TpRank},
    plan::{Capacity, RouteCapacity, WorkspaceBytes},
    routing::Batch,
};
use cudarc::driver::{CudaContext, CudaStream};
use proptest::prelude::*;

use crate::{
    common::{
        cases::{Case, Dtype, Op, Values},
        experts::{Case as ExpertsCase, Lora, Op as ExpertsOp},
    },
    device::Gpu,
    experts::{OPERATIONS, launch, shapes},
};

/// A call whose arguments need not fit each other.
#[derive(Clone, Debug)]
struct Call {
    embedding: bool,
    apart: bool,
    on_device: bool,
    layer: [usize; 2],
    ranks: Vec<usize>,
    /// Tokens, slots and rank that the layer, the routing and the table are made for.
    capacities: [Capacity; 3],
    workspace_bytes: WorkspaceBytes,
    /// Elements, rows, columns and row stride.
    x: [usize; 4],
    y: [usize; 4],
    slots: Vec<i32>,
    scales: usize,
    ids: Vec<i32>,
    another_model: bool,
}

/// Mostly what fits.
fn near(value: usize) -> impl Strategy<Value = usize> + Clone {
    prop_oneof![80 => Just(value), 1 => Just(0), 1 => Just(value + 1), 1 => 0..2 * value + 2, 1 => Just(usize::MAX)]
}

fn capacities() -> impl Strategy<Value = Capacity> {
    let capacity = (near(5), near(3), near(8));
    capacity.prop_map(|(max_tokens, num_slots, max_rank)| Capacity { max_tokens, num_slots, max_rank })
}

fn calls() -> impl Strategy<Value = Call> {
    // 5 tokens, 33 in, 17 out.
    let index = prop_oneof![4 => -1..4_i32, 1 => any::<i32>()];
    (
        any::<[bool; 3]>(),
        prop::collection::vec(1..=9_usize, 0..=3),
        [capacities(), capacities(), capacities()],
        [(); 2].map(|()| prop_oneof![20 => Just(1 << 16), 1 => 0..400_usize]),
        ([near(5 * 40), near(5), near(33), near(40)], [near(5 * 20), near(5), near(17), near(20)]),
        (
            prop::bool::weighted(0.9),
            prop::collection::vec(index.clone(), 5),
            prop::collection::vec(index.clone(), 0..=7),
        ),
        (near(5), prop::bool::weighted(0.9), prop::collection::vec(index, 5), prop::bool::weighted(0.05)),
        (prop::bool::weighted(0.9), [1..=33_usize, 1..=17_usize]),
    )
        .prop_map(
            |(
                flags,
                ranks,
                capacities,
                [exchange, planes],
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
                    workspace_bytes: WorkspaceBytes { exchange, planes },
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

/// Makes the call; what comes back is whether it was taken.
fn make(gpu: &Gpu, call: &Call) -> Result<(), LaunchError> {
    let (stream, kernels) = (&gpu.stream, &gpu.kernels);
    let [in_features, out_features] = call.layer;
    let op = if call.embedding {
        Op::Embedding { vocab: in_features, hidden: out_features }
    } else {
        Op::Linear { in_features, slices: vec![out_features] }
    };
    let case = Case {
        op,
        dtype: Dtype::F16,
        values: Values::Rounded,
        adapters: call.ranks.iter().map(|&rank| vec![rank]).collect(),
        empty_slots: 0,
        slots: Vec::new(),
        half_scales: None,
        x_offset: 0,
        x_gap: 0,
        y_offset: 0,
        y_gap: 0,
        seed: 1,
    };
    let world = case.world::<half::f16>();
    let mut other_model = ModelSpec::new(TpRank::SINGLE);
    let other_id = other_model.linear(Linear::new("m", Parallel::Row, in_features).slice("q", out_features)).unwrap();
    let [layer_capacity, routing_capacity, table_capacity] = call.capacities;

    let mut weights = WeightTable::<half::f16>::new(kernels, &world.model, table_capacity, 1 << 14, stream)?;
    for (slot, adapter) in world.adapters.iter().enumerate() {
        let image = adapter.plan(&world.model, aril::DType::F16).unwrap();
        weights.load(Slot::new(slot as u16), &image, stream)?;
    }
    let mut routing = Routing::new(kernels, routing_capacity, 1, stream)?;
    let slots: Vec<Slot> = call.slots.iter().map(|&slot| bytemuck::cast(slot)).collect();
    let scales = vec![0.5_f32; call.scales];
    let (device_slots, device_scales) = (gpu.upload(&call.slots), gpu.upload(&scales));
    let batch = if call.on_device {
        routing.update_on_device(&device_slots.view(), Some(&device_scales.view()), stream)?
    } else {
        routing.update(&Batch::new(&slots).with_scales(&scales)?, stream)?
    };

    let values = |elements: usize| vec![half::f16::ONE; elements];
    let (x, mut y, ids) = (gpu.upload(&values(call.x[0])), gpu.upload(&values(call.y[0])), gpu.upload(&call.ids));
    let mut workspace = Workspace::new(kernels, call.workspace_bytes, stream)?;
    let x = Matrix::strided(x.view(), call.x[1], call.x[2], call.x[3])?;
    let y = MatrixMut::strided(y.view_mut(), call.y[1], call.y[2], call.y[3])?;
    match world.site {
        crate::common::cases::Site::Embedding(id) => {
            let layer = LoraEmbedding::new(kernels, &world.model, id, layer_capacity)?;
            layer.add_delta(&ids.view(), y, &weights, &batch, stream)
        }
        crate::common::cases::Site::Linear(id) => {
            let layer = if call.another_model {
                LoraLinear::new(kernels, &other_model, other_id, layer_capacity)?
            } else {
                LoraLinear::new(kernels, &world.model, id, layer_capacity)?
            };
            if call.apart {
                layer.shrink(x, &weights, &batch, &mut workspace, stream)?;
                layer.expand(y, &weights, &batch, &workspace, stream)
            } else {
                layer.add_delta(x, y, &weights, &batch, &mut workspace, stream)
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn no_safe_call_faults() {
    let gpu = Gpu::new();
    let (cases, taken) = take_or_refuse(&gpu, 2000, &calls(), make);
    assert!(taken > cases / 8, "only {taken} of {cases} calls were taken: the test tests refusals alone");
}

/// Makes so many calls, of which none may fault. How many there were, and how many were taken.
fn take_or_refuse<S: Strategy>(
    gpu: &Gpu,
    cases_wanted: u32,
    calls: &S,
    make: impl Fn(&Gpu, &S::Value) -> Result<(), LaunchError>,
) -> (u32, u32) {
    // Never so few that the share of calls that were taken says nothing.
    let cases = std::env::var("PROPTEST_CASES").map_or(cases_wanted, |cases| cases.parse().unwrap()).max(200);
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let taken = std::cell::Cell::new(0_u32);
    let run = proptest::test_runner::TestRunner::new(config).run(calls, |call| {
        match make(gpu, &call) {
            Ok(()) => taken.set(taken.get() + 1),
            // The driver's and the kernels' own errors would mean that a call got further than it should.
            Err(LaunchError::Driver(error)) if error.0 != cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                prop_assert!(false, "{error} for {call:?}");
            }
            Err(LaunchError::Kernel { message, .. }) => prop_assert!(false, "{message} for {call:?}"),
            Err(_) => {}
        }
        let after = gpu.stream.synchronize();
        prop_assert!(after.is_ok(), "{after:?} after {call:?}");
        Ok(())
    });
    run.unwrap();
    (cases, taken.get())
}

/// As [`Call`], of an operation on experts: 5 tokens with 2 of 3 experts each, 33 hidden features, 17 inside.
#[derive(Clone, Debug)]
struct ExpertsCall {
    op: ExpertsOp,
    ranks: Vec<usize>,
    /// Tokens, slots and rank that the layer, the routing and the table are made for.
    capacities: [Capacity; 3],
    /// What the grouping is made for.
    routes: [usize; 3],
    /// Experts of a token that the layer is made for, and that are chosen.
    top_k: [usize; 2],
    workspace_bytes: WorkspaceBytes,
    /// Elements, rows, columns and row stride of x, y and what is written, where they do not fit.
    matrices: [[Option<usize>; 4]; 3],
    slots: Vec<i32>,
    ids: Vec<i32>,
    /// Of how many routes.
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
    let row = prop_oneof![4 => -1..11_i32, 1 => any::<i32>()];
    let indices = |index: BoxedStrategy<i32>, len: usize| {
        let any = prop::collection::vec(index.clone(), 0..=len + 3);
        prop_oneof![30 => prop::collection::vec(index, len), 1 => any].boxed()
    };
    let index = index.boxed();
    let made_for = ([capacities(), capacities(), capacities()], [near(5), near(2), near(3)], [near(2), near(2)]);
    let chosen = (
        indices(index.clone(), 5),
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
        .prop_map(|(op, ranks, made_for, [exchange, planes], matrices, chosen, another_model)| {
            let ((capacities, routes, top_k), (slots, ids, weights, rows)) = (made_for, chosen);
            let workspace_bytes = WorkspaceBytes { exchange, planes };
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
fn make_experts(gpu: &Gpu, call: &ExpertsCall) -> Result<(), LaunchError> {
    type T = half::f16;
    let (stream, kernels) = (&gpu.stream, &gpu.kernels);
    let lora = |(slot, &rank): (usize, &usize)| match slot {
        1 => Lora::shared_outer(3, rank),
        _ => Lora::of_own_ranks(3, rank),
    };
    let adapters: Vec<Lora> = call.ranks.iter().enumerate().map(lora).collect();
    let case = ExpertsCase::new([3, 33, 17], adapters, [5, 2]);
    let world = case.world::<T>();
    let mut other_model = ModelSpec::new(TpRank::SINGLE);
    let other_id = other_model.experts(Experts::new("layer.experts", 4, 33, 17)).unwrap();
    let [layer_capacity, routing_capacity, table_capacity] = call.capacities;
    let [max_tokens, top_k, num_experts] = call.routes;

    let mut weights = WeightTable::<T>::new(kernels, &world.model, table_capacity, 1 << 20, stream)?;
    for (slot, adapter) in world.adapters.iter().enumerate() {
        weights.load(Slot::new(slot as u16), &adapter.plan(&world.model, DType::F16).unwrap(), stream)?;
    }
    let mut routing = Routing::new(kernels, routing_capacity, 1, stream)?;
    let slots: Vec<Slot> = call.slots.iter().map(|&slot| bytemuck::cast(slot)).collect();
    let batch = routing.update(&Batch::new(&slots), stream)?;
    let mut grouping = Grouping::new(kernels, RouteCapacity { max_tokens, top_k, num_experts }, stream)?;
    let router = call.weights.map(|len| gpu.upload(&vec![0.5_f32; len]));
    let (ids, rows) = (gpu.upload(&call.ids), call.rows.as_ref().map(|rows| gpu.upload(rows)));
    let mut top_k = TopK::new(ids.view(), call.top_k[1])?;
    if let Some(router) = &router {
        top_k = top_k.with_weights(router.view())?;
    }
    if let Some(rows) = &rows {
        top_k = top_k.with_rows(rows.view())?;
    }
    let routes = grouping.update(top_k, &batch, stream)?;

    let fitting = shapes(call.op, [33, 17], [5, 10]);
    let [x, y, target] = [0, 1, 2].map(|matrix| {
        let ([rows, cols], [elements, misfit_rows, misfit_cols, misfit_stride]) =
            (fitting[matrix], call.matrices[matrix]);
        let elements = elements.unwrap_or(rows * cols).min(1 << 12);
        (elements, misfit_rows.unwrap_or(rows), misfit_cols.unwrap_or(cols), misfit_stride.unwrap_or(cols))
    });
    let [x_values, y_values, mut written] = [x.0, y.0, target.0].map(|elements| gpu.upload(&vec![T::ONE; elements]));
    let x = Matrix::strided(x_values.view(), x.1, x.2, x.3)?;
    let y = Matrix::strided(y_values.view(), y.1, y.2, y.3)?;
    let target = MatrixMut::strided(written.view_mut(), target.1, target.2, target.3)?;
    let mut workspace = Workspace::new(kernels, call.workspace_bytes, stream)?;
    let (model, id) = if call.another_model { (&other_model, other_id) } else { (&world.model, world.id) };
    let layer = LoraExperts::<T>::new(kernels, model, id, layer_capacity, call.top_k[0])?;
    launch(&layer, call.op, [x, y], target, &routes, &weights, &mut workspace, stream)
}

#[test]
#[ignore = "needs a GPU"]
fn no_safe_call_on_experts_faults() {
    let gpu = Gpu::new();
    let (cases, taken) = take_or_refuse(&gpu, 1500, &experts_calls(), make_experts);
    assert!(taken > cases / 16, "only {taken} of {cases} calls were taken: the test tests refusals alone");
}

/// A table is as wide as the model it was made for: a layer of another model would read past its adapters.
#[test]
#[ignore = "needs a GPU"]
fn weights_of_another_model_are_refused() {
    let gpu = Gpu::new();
    let (kernels, stream) = (&gpu.kernels, &gpu.stream);
    let model = |features| {
        let mut model = ModelSpec::new(TpRank::SINGLE);
        let id = model.linear(Linear::new("m", Parallel::Replicated, features).slice("q", features)).unwrap();
        (model, id)
    };
    let ((narrow, _), (wide, id)) = (model(4), model(64));
    let capacity = Capacity { max_tokens: 1, num_slots: 1, max_rank: 4 };
    let weights = WeightTable::<f32>::new(kernels, &narrow, capacity, 1 << 12, stream).unwrap();
    let layer = LoraLinear::<f32>::new(kernels, &wide, id, capacity).unwrap();
    let mut workspace = Workspace::new(kernels, layer.plan().workspace_bytes(), stream).unwrap();
    let mut routing = Routing::new(kernels, capacity, 1, stream).unwrap();
    let batch = routing.update(&Batch::new(&[Slot::new(0)]), stream).unwrap();
    let (x, mut y) = (gpu.upload(&[1.0_f32; 64]), gpu.upload(&[1.0_f32; 64]));
    let (x, y) = (Matrix::new(x.view(), 1, 64).unwrap(), MatrixMut::new(y.view_mut(), 1, 64).unwrap());
    let error = layer.add_delta(x, y, &weights, &batch, &mut workspace, stream).unwrap_err();
    assert!(matches!(error, LaunchError::Operand(OperandError::Model)), "{error}");
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
    gpu.context.bind_to_thread().unwrap();
    let other = Gpu::new().stream;

    let (kernels, stream) = (&gpu.kernels, &gpu.stream);
    let mut model = ModelSpec::new(TpRank::SINGLE);
    let id = model.linear(Linear::new("m", Parallel::Replicated, 64).slice("q", 64)).unwrap();
    let capacity = Capacity { max_tokens: 1, num_slots: 1, max_rank: 4 };
    let weights = WeightTable::<f32>::new(kernels, &model, capacity, 1 << 12, stream).unwrap();
    let layer = LoraLinear::<f32>::new(kernels, &model, id, capacity).unwrap();
    let mut workspace = Workspace::new(kernels, layer.plan().workspace_bytes(), stream).unwrap();
    let mut other_workspace = Workspace::new(kernels, layer.plan().workspace_bytes(), &other).unwrap();
    let mut routing = Routing::new(kernels, capacity, 1, stream).unwrap();
    assert!(matches!(routing.update(&Batch::new(&[Slot::BASE]), &other), Err(LaunchError::WrongStream { .. })));
    let batch = routing.update(&Batch::new(&[Slot::new(0)]), stream).unwrap();
    let (x, mut y) = (gpu.upload(&[1.0_f32; 64]), gpu.upload(&[1.0_f32; 64]));
    let mut launch = |x: Matrix<'_, f32>, workspace: &mut Workspace, stream: &CudaStream| {
        let y = MatrixMut::new(y.view_mut(), 1, 64).unwrap();
        layer.add_delta(x, y, &weights, &batch, workspace, stream)
    };
    let local = || Matrix::new(x.view(), 1, 64).unwrap();
    launch(local(), &mut workspace, stream).unwrap();
    let error = launch(Matrix::new(foreign_x.as_view(), 1, 64).unwrap(), &mut workspace, stream).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { operand: "x" }), "{error}");
    let error = launch(local(), &mut other_workspace, stream).unwrap_err();
    assert!(matches!(error, LaunchError::WrongStream { operand: "the workspace" }), "{error}");
    let error = launch(local(), &mut workspace, &other).unwrap_err();
    assert!(matches!(error, LaunchError::WrongStream { operand: "the weight table" }), "{error}");
    let error = launch(local(), &mut workspace, &foreign).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { operand: "the stream" }), "{error}");
    let error = Workspace::new(kernels, WorkspaceBytes::default(), &foreign).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { .. }), "{error}");
    assert_eq!(y.read::<f32>(), [1.0; 64]);
    let _ = Kernels::load_into(&foreign_context).unwrap();
}

/// As of linear layers, and what is only of experts: the router's choices, and routes that were grouped on another stream.
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
    gpu.context.bind_to_thread().unwrap();
    let other = Gpu::new().stream;

    let (kernels, stream) = (&gpu.kernels, &gpu.stream);
    let mut model = ModelSpec::new(TpRank::SINGLE);
    let id = model.experts(Experts::new("m", 2, 4, 4)).unwrap();
    let capacity = Capacity { max_tokens: 1, num_slots: 1, max_rank: 4 };
    let weights = WeightTable::<f32>::new(kernels, &model, capacity, 1 << 12, stream).unwrap();
    let layer = LoraExperts::<f32>::new(kernels, &model, id, capacity, 2).unwrap();
    let mut workspace = Workspace::new(kernels, layer.plan().workspace_bytes(), stream).unwrap();
    let mut other_workspace = Workspace::new(kernels, layer.plan().workspace_bytes(), &other).unwrap();
    let [mut routing, mut other_routing] =
        [stream, &other].map(|stream| Routing::new(kernels, capacity, 1, stream).unwrap());
    let batch = routing.update(&Batch::new(&[Slot::new(0)]), stream).unwrap();
    let other_batch = other_routing.update(&Batch::new(&[Slot::new(0)]), &other).unwrap();
    let route_capacity = RouteCapacity { max_tokens: 1, top_k: 2, num_experts: 2 };
    let [mut grouping, mut other_grouping] =
        [stream, &other].map(|stream| Grouping::new(kernels, route_capacity, stream).unwrap());
    let ids = gpu.upload(&[0_i32, 1]);
    let top_k = || TopK::new(ids.view(), 2).unwrap();

    let error = grouping.update(top_k(), &batch, &other).unwrap_err();
    assert!(matches!(error, LaunchError::WrongStream { operand: "the grouping" }), "{error}");
    let error = grouping.update(top_k(), &batch, &foreign).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { operand: "the grouping" }), "{error}");
    let error = grouping.update(top_k(), &other_batch, stream).unwrap_err();
    assert!(matches!(error, LaunchError::WrongStream { operand: "the batch" }), "{error}");
    let error = grouping.update(TopK::new(foreign_ids.as_view(), 2).unwrap(), &batch, stream).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { operand: "ids" }), "{error}");
    let foreign_weights = top_k().with_weights(foreign_values.slice(..2)).unwrap();
    let error = grouping.update(foreign_weights, &batch, stream).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { operand: "weights" }), "{error}");
    let foreign_rows = top_k().with_rows(foreign_ids.as_view()).unwrap();
    let error = grouping.update(foreign_rows, &batch, stream).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { operand: "rows" }), "{error}");
    let error = Grouping::new(kernels, route_capacity, &foreign).unwrap_err();
    assert!(matches!(error, LaunchError::WrongContext { .. }), "{error}");
    gpu.context.bind_to_thread().unwrap();

    let routes = grouping.update(top_k(), &batch, stream).unwrap();
    let other_routes = other_grouping.update(top_k(), &other_batch, &other).unwrap();
    let (values, mut written) = (gpu.upload(&[1.0_f32; 64]), gpu.upload(&[7.0_f32; 64]));
    for op in OPERATIONS {
        let [x, y, target] = shapes(op, [4, 4], [1, 2]);
        let local = |[rows, cols]: [usize; 2]| Matrix::new(values.view(), rows, cols).unwrap();
        let from = |[rows, cols]: [usize; 2]| Matrix::new(foreign_values.as_view(), rows, cols).unwrap();
        let mut run = |inputs: [Matrix<'_, f32>; 2],
                       routes: &GroupedRoutes<'_>,
                       workspace: &mut Workspace,
                       stream: &CudaStream| {
            let target = MatrixMut::new(written.view_mut(), target[0], target[1]).unwrap();
            launch(&layer, op, inputs, target, routes, &weights, workspace, stream)
        };
        let error = run([from(x), local(y)], &routes, &mut workspace, stream).unwrap_err();
        assert!(matches!(error, LaunchError::WrongContext { operand: "x" }), "{op:?}: {error}");
        if op.has_out() {
            let error = run([local(x), from(y)], &routes, &mut workspace, stream).unwrap_err();
            assert!(matches!(error, LaunchError::WrongContext { operand: "y" }), "{op:?}: {error}");
        }
        let error = run([local(x), local(y)], &other_routes, &mut workspace, stream).unwrap_err();
        assert!(matches!(error, LaunchError::WrongStream { operand: "the routes" }), "{op:?}: {error}");
        let error = run([local(x), local(y)], &routes, &mut other_workspace, stream).unwrap_err();
        assert!(matches!(error, LaunchError::WrongStream { operand: "the workspace" }), "{op:?}: {error}");
        let error = run([local(x), local(y)], &routes, &mut workspace, &other).unwrap_err();
        assert!(matches!(error, LaunchError::WrongStream { operand: "the weight table" }), "{op:?}: {error}");
        let error = run([local(x), local(y)], &routes, &mut workspace, &foreign).unwrap_err();
        assert!(matches!(error, LaunchError::WrongContext { operand: "the stream" }), "{op:?}: {error}");
        let foreign_target = MatrixMut::new(foreign_target.as_view_mut(), target[0], target[1]).unwrap();
        let inputs = [local(x), local(y)];
        let error = launch(&layer, op, inputs, foreign_target, &routes, &weights, &mut workspace, stream).unwrap_err();
        let named = if op.has_out() { "out" } else { "y" };
        assert!(matches!(error, LaunchError::WrongContext { operand } if operand == named), "{op:?}: {error}");
    }
    assert_eq!(written.read::<f32>(), [7.0; 64]);
    for op in OPERATIONS {
        let [x, y, target] = shapes(op, [4, 4], [1, 2]);
        let inputs = [x, y].map(|[rows, cols]| Matrix::new(values.view(), rows, cols).unwrap());
        let target = MatrixMut::new(written.view_mut(), target[0], target[1]).unwrap();
        launch(&layer, op, inputs, target, &routes, &weights, &mut workspace, stream).unwrap();
    }
    assert_ne!(written.read::<f32>(), [7.0; 64]);
}

/// Each bound by name, of the grouping, of the layer and of what it works in.
#[test]
#[ignore = "needs a GPU"]
fn routes_past_what_there_is_room_for_are_refused() {
    // So many that sums go by way of the planes, too.
    const TOKENS: usize = 600;
    let gpu = Gpu::new();
    let (kernels, stream) = (&gpu.kernels, &gpu.stream);
    let mut model = ModelSpec::new(TpRank::SINGLE);
    let id = model.experts(Experts::new("m", 2, 4, 4)).unwrap();
    let capacity = Capacity { max_tokens: TOKENS, num_slots: 2, max_rank: 4 };
    let weights = WeightTable::<f32>::new(kernels, &model, capacity, 1 << 12, stream).unwrap();
    let mut routing = Routing::new(kernels, capacity, 1, stream).unwrap();
    let batch = routing.update(&Batch::new(&[Slot::new(0); TOKENS]), stream).unwrap();
    let ids = gpu.upload(&[0_i32; 2 * TOKENS]);
    let top_k = || TopK::new(ids.view(), 2).unwrap();
    let route_capacity = RouteCapacity { max_tokens: TOKENS, top_k: 2, num_experts: 2 };
    let grouping = |capacity| Grouping::new(kernels, capacity, stream).unwrap();

    let mut fewer_tokens = grouping(RouteCapacity { max_tokens: TOKENS - 1, ..route_capacity });
    let error = fewer_tokens.update(top_k(), &batch, stream).unwrap_err();
    let is_of_tokens = |error: &LaunchError| match *error {
        LaunchError::Capacity { what, got, max } => (what, got, max) == ("the batch's tokens", TOKENS, TOKENS - 1),
        _ => false,
    };
    assert!(is_of_tokens(&error), "{error}");
    let mut fewer_routes = grouping(RouteCapacity { top_k: 1, ..route_capacity });
    let error = fewer_routes.update(top_k(), &batch, stream).unwrap_err();
    assert!(matches!(error, LaunchError::Capacity { what: "the routes of a token", got: 2, max: 1 }), "{error}");
    let too_many = TopK::new(ids.view(), 1).unwrap();
    let error = fewer_routes.update(too_many, &batch, stream).unwrap_err();
    let is_of_others =
        matches!(error, LaunchError::Operand(OperandError::Tokens { got, want: TOKENS }) if got == 2 * TOKENS);
    assert!(is_of_others, "{error}");
    for num_experts in [0, 1025] {
        let made = Grouping::new(kernels, RouteCapacity { num_experts, ..route_capacity }, stream);
        assert_eq!(made.is_ok(), num_experts == 0);
    }

    let [mut fitting, mut of_three] =
        [2, 3].map(|num_experts| grouping(RouteCapacity { num_experts, ..route_capacity }));
    let routes = fitting.update(top_k(), &batch, stream).unwrap();
    let of_three = of_three.update(top_k(), &batch, stream).unwrap();
    let layer = |capacity, top_k| LoraExperts::<f32>::new(kernels, &model, id, capacity, top_k).unwrap();
    let fitting_layer = layer(capacity, 2);
    let (values, mut written) = (gpu.upload(&[1.0_f32; 16 * TOKENS]), gpu.upload(&[7.0_f32; 16 * TOKENS]));
    for op in OPERATIONS {
        let [x, y, target] = shapes(op, [4, 4], [TOKENS, 2 * TOKENS]);
        let mut run = |layer: &LoraExperts<f32>, routes: &GroupedRoutes<'_>, bytes: WorkspaceBytes| {
            let mut workspace = Workspace::new(kernels, bytes, stream).unwrap();
            let inputs = [x, y].map(|[rows, cols]| Matrix::new(values.view(), rows, cols).unwrap());
            let target = MatrixMut::new(written.view_mut(), target[0], target[1]).unwrap();
            launch(layer, op, inputs, target, routes, &weights, &mut workspace, stream)
        };
        let all = fitting_layer.plan().workspace_bytes();
        let fewer_tokens = layer(Capacity { max_tokens: TOKENS - 1, ..capacity }, 2);
        let error = run(&fewer_tokens, &routes, all).unwrap_err();
        assert!(is_of_tokens(&error), "{op:?}: {error}");
        let error = run(&layer(capacity, 1), &routes, all).unwrap_err();
        assert!(
            matches!(error, LaunchError::Capacity { what: "the routes of a token", got: 2, max: 1 }),
            "{op:?}: {error}"
        );
        let error = run(&layer(Capacity { num_slots: 1, ..capacity }, 2), &routes, all).unwrap_err();
        assert!(
            matches!(error, LaunchError::Capacity { what: "the weights' num_slots", got: 2, max: 1 }),
            "{op:?}: {error}"
        );
        let error = run(&layer(Capacity { max_rank: 3, ..capacity }, 2), &routes, all).unwrap_err();
        assert!(
            matches!(error, LaunchError::Capacity { what: "the weights' max_rank", got: 4, max: 3 }),
            "{op:?}: {error}"
        );
        let error = run(&fitting_layer, &of_three, all).unwrap_err();
        assert!(matches!(error, LaunchError::Operand(OperandError::Model)), "{op:?}: {error}");
        let plan = fitting_layer.plan();
        let projection = if op.is_before_activation() { plan.gate_up() } else { plan.down() };
        let needed = projection.workspace_bytes_for(TOKENS, 2);
        for (bytes, part) in [
            (WorkspaceBytes { exchange: needed.exchange - 1, ..needed }, needed.exchange),
            (WorkspaceBytes { planes: needed.planes - 1, ..needed }, needed.planes),
        ] {
            let error = run(&fitting_layer, &routes, bytes).unwrap_err();
            let is_of_workspace = matches!(error, LaunchError::Capacity { what: "the workspace's use", got, max }
                if got == part && max + 1 == part);
            assert!(is_of_workspace, "{op:?}: {error}");
        }
    }
    assert_eq!(written.read::<f32>(), [7.0; 16 * TOKENS]);
    for op in OPERATIONS {
        let [x, y, target] = shapes(op, [4, 4], [TOKENS, 2 * TOKENS]);
        let inputs = [x, y].map(|[rows, cols]| Matrix::new(values.view(), rows, cols).unwrap());
        let target = MatrixMut::new(written.view_mut(), target[0], target[1]).unwrap();
        let mut workspace = Workspace::new(kernels, fitting_layer.plan().workspace_bytes(), stream).unwrap();
        launch(&fitting_layer, op, inputs, target, &routes, &weights, &mut workspace, stream).unwrap();
    }
}

/// The raw door looks at what it can: sizes, alignments, element types, and the context of the thread.
#[test]
#[ignore = "needs a GPU"]
fn raw_memory_that_experts_cannot_use_is_refused() {
    let gpu = Gpu::new();
    let (kernels, stream) = (&gpu.kernels, gpu.raw_stream());
    let capacity = RouteCapacity { max_tokens: 2, top_k: 2, num_experts: 2 };
    let bytes = raw::Grouping::device_bytes(capacity).unwrap();
    let memory = gpu.upload(&vec![0_u8; bytes + 256]);
    let within = |offset: usize, bytes: usize| {
        let region = raw::DeviceRegion { ptr: memory.address() + offset as u64, bytes };
        // SAFETY: the memory is zero, outlives the grouping and is used on one stream.
        unsafe { raw::Grouping::new(kernels, capacity, region) }
    };
    let error = within(0, bytes - 1).unwrap_err();
    let is_of_bytes = matches!(error, LaunchError::Capacity { what: "the grouping's memory", got, max }
        if got == bytes && max + 1 == bytes);
    assert!(is_of_bytes, "{error}");
    let error = within(128, bytes).unwrap_err();
    assert!(matches!(error, LaunchError::Misaligned { operand: "the grouping's memory", alignment: 256 }), "{error}");
    let mut grouping = within(256, bytes).unwrap();

    let mut model = ModelSpec::new(TpRank::SINGLE);
    let id = model.experts(Experts::new("m", 2, 4, 4)).unwrap();
    let table_capacity = Capacity { max_tokens: 2, num_slots: 1, max_rank: 4 };
    let weights = WeightTable::<f32>::new(kernels, &model, table_capacity, 1 << 12, &gpu.stream).unwrap();
    let mut routing = Routing::new(kernels, table_capacity, 1, &gpu.stream).unwrap();
    routing.update(&Batch::new(&[Slot::new(0); 2]), &gpu.stream).unwrap();
    let batch = routing.capture_batch(2).unwrap();
    let (ids, values, target) = (gpu.upload(&[0_i32; 4]), gpu.upload(&[1.0_f32; 64]), gpu.upload(&[7.0_f32; 64]));
    let mut group = |top_k| {
        let top_k = raw::TopK::new(ids.address(), top_k);
        // SAFETY: all is the test's own, and alive until the stream is synchronized.
        unsafe { grouping.group(top_k, batch, stream) }
    };
    let error = group(0).unwrap_err();
    assert!(matches!(error, LaunchError::Operand(OperandError::TopK { top_k: 0, .. })), "{error}");
    let error = group(3).unwrap_err();
    assert!(matches!(error, LaunchError::Capacity { what: "the routes of a token", got: 3, max: 2 }), "{error}");
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let error = group(2).unwrap_err();
            assert!(matches!(error, LaunchError::WrongContext { operand: "the thread" }), "{error}");
        });
        other.join().unwrap();
    });
    let routes = group(2).unwrap();

    let layer = raw::LoraExperts::new(kernels, &model, id, DType::F32, table_capacity, 2).unwrap();
    let workspace = Workspace::new(kernels, layer.plan().workspace_bytes(), &gpu.stream).unwrap().region();
    let weights = weights.layer(model[id].gate_up().shared_entry());
    let add = |dtype, workspace| {
        let x = raw::MatrixRef::with_dtype(values.address(), dtype, 2, 4);
        let y = raw::MatrixMut::new::<f32>(target.address(), 4, 8);
        // SAFETY: as above.
        unsafe { layer.add_gate_up_delta(x, y, weights, &routes, workspace, stream) }
    };
    let error = add(DType::BF16, workspace).unwrap_err();
    let of_type = OperandError::DType { operand: "x", got: DType::BF16, want: DType::F32 };
    assert!(matches!(&error, LaunchError::Operand(error) if *error == of_type), "{error}");
    let mut misaligned = workspace;
    misaligned.exchange.ptr += 8;
    let error = add(DType::F32, misaligned).unwrap_err();
    assert!(matches!(error, LaunchError::Misaligned { operand: "workspace", alignment: 16 }), "{error}");
    assert_eq!(target.read::<f32>(), [7.0; 64]);
}
