//! Whatever is thrown at the safe door, it is refused or computed: never a fault. Run it under compute-sanitizer.

use std::sync::Arc;

use aril::{
    Slot,
    cuda::{Kernels, LaunchError, LoraEmbedding, LoraLinear, Matrix, MatrixMut, Routing, WeightTable, Workspace},
    error::OperandError,
    model::{Linear, ModelSpec, Parallel, TpRank},
    plan::{Capacity, WorkspaceBytes},
    routing::Batch,
};
use cudarc::driver::{CudaContext, CudaStream};
use proptest::prelude::*;

use crate::{
    common::cases::{Case, Dtype, Op, Values},
    device::Gpu,
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

fn calls() -> impl Strategy<Value = Call> {
    // Mostly what fits: 5 tokens, 33 in, 17 out.
    fn near(value: usize) -> impl Strategy<Value = usize> + Clone {
        prop_oneof![80 => Just(value), 1 => Just(0), 1 => Just(value + 1), 1 => 0..2 * value + 2, 1 => Just(usize::MAX)]
    }
    let capacity = || {
        (near(5), near(3), near(8)).prop_map(|(max_tokens, num_slots, max_rank)| Capacity {
            max_tokens,
            num_slots,
            max_rank,
        })
    };
    let index = prop_oneof![4 => -1..4_i32, 1 => any::<i32>()];
    (
        any::<[bool; 3]>(),
        prop::collection::vec(1..=9_usize, 0..=3),
        [capacity(), capacity(), capacity()],
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
    // Never so few that the share of calls that were taken says nothing.
    let cases = std::env::var("PROPTEST_CASES").map_or(2000, |cases| cases.parse().unwrap()).max(200);
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let taken = std::cell::Cell::new(0_u32);
    let run = proptest::test_runner::TestRunner::new(config).run(&calls(), |call| {
        match make(&gpu, &call) {
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
    assert!(taken.get() > cases / 8, "only {} of {cases} calls were taken: the test tests refusals alone", taken.get());
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
