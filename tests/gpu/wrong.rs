//! Calls that the GPU alone refuses: operands of other streams and contexts, routes and workspaces without room, and
//! raw memory that kernels cannot use. Run the random calls under compute-sanitizer.

use aril::{
    DType, Slot,
    cuda::{
        Buffer, GroupedRoutes, Grouping, LaunchError, LoraExperts, LoraLinear, Matrix, MatrixMut, Queue, RoutedBatch,
        Routing, Step, TopK, WeightTable, Workspace, raw,
    },
    error::OperandError,
    model::{Experts, Linear, ModelSpec, Parallel, TpRank},
    plan::{Capacity, RouteCapacity},
    routing::Batch,
};

use crate::{
    backend::Backend,
    common::{
        experts::{OPERATIONS, shapes},
        small,
    },
    device::{
        Gpu,
        Refused::{self, Context, Misaligned, Operand, OtherBatch, Stream, TooSmall},
        refused,
    },
    experts::launch,
    model::wrong,
};

#[test]
#[ignore = "needs a GPU"]
fn every_refusal_is_named() {
    wrong::every_refusal_is_named(&Backend::new());
}

#[test]
#[ignore = "needs a GPU"]
fn random_calls_are_refused_or_computed() {
    // Enough calls for the share of accepted ones to be meaningful.
    wrong::random_calls_are_refused_or_computed(&Backend::new(), small::random_cases(5000).max(600));
}

/// Operands of another stream or context are refused by name.
#[test]
#[ignore = "needs a GPU"]
fn foreign_operands_are_refused() {
    let gpu = Gpu::new();
    let foreign = gpu.foreign();
    let foreign_x = foreign.stream().alloc_zeros::<f32>(64).unwrap();
    foreign.stream().synchronize().unwrap();
    gpu.context.bind_to_thread().unwrap();
    let other = Gpu::new().queue;

    let (kernels, queue) = (&gpu.kernels, &gpu.queue);
    let mut spec = ModelSpec::new();
    let id = spec.linear(Linear::new("m", Parallel::Replicated, 64).slice("q", 64)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(1).slots(1).rank(4);
    let weights = WeightTable::new(queue, &model, DType::F32, capacity, 1 << 12).unwrap();
    let layer = LoraLinear::new(&weights, id).unwrap();
    let bytes = layer.plan().workspace_bytes();
    let [mut workspace, mut other_workspace, mut foreign_workspace] =
        [queue, &other, &foreign].map(|queue| Workspace::with_bytes(queue, bytes).unwrap());
    let mut routings =
        [queue, &other, &foreign, queue, &other, &foreign].map(|queue| Routing::new(queue, capacity, 1).unwrap());
    let (routings, captured) = routings.split_at_mut(3);
    let slots = [Slot::BASE];
    let batches: Vec<_> = routings.iter_mut().map(|routing| routing.update(&Batch::new(&slots)).unwrap()).collect();
    let [batch, other_batch, foreign_batch] = &batches[..] else { unreachable!("there are three routings") };
    let (x, mut y) = (gpu.upload(&[1.0_f32; 64]), gpu.upload(&[1.0_f32; 64]));
    let [other_buffer, foreign_buffer] = [&other, &foreign].map(|queue| Buffer::<f32>::zeros(queue, 64).unwrap());
    let mut launch = |x: Matrix<'_, f32>, batch: &RoutedBatch<'_>, workspace: &mut Workspace| {
        let y = MatrixMut::new(y.view_mut(), 1, 64).unwrap();
        layer.add_delta(&mut weights.step(batch, workspace)?, x, y)
    };
    let local = || Matrix::new(x.view(), 1, 64).unwrap();
    launch(local(), batch, &mut workspace).unwrap();
    for (x, refusal) in [
        (Matrix::new(&foreign_x, 1, 64), Context("x")),
        (Matrix::new(&foreign_buffer, 1, 64), Context("x")),
        (Matrix::new(&other_buffer, 1, 64), Stream("x")),
    ] {
        assert_eq!(refused(launch(x.unwrap(), batch, &mut workspace)), refusal);
    }
    assert_eq!(refused(launch(local(), batch, &mut other_workspace)), Stream("the workspace"));
    assert_eq!(refused(launch(local(), batch, &mut foreign_workspace)), Context("the workspace"));
    assert_eq!(refused(launch(local(), other_batch, &mut workspace)), Stream("the batch"));
    assert_eq!(refused(launch(local(), foreign_batch, &mut workspace)), Context("the batch"));
    assert_eq!(refused(Queue::new(kernels, foreign.stream())), Context("the stream"));
    assert_eq!(refused(Queue::new(foreign.kernels(), queue.stream())), Context("the stream"));
    let error = Queue::new(kernels, &gpu.context.per_thread_stream()).unwrap_err();
    assert!(matches!(error, LaunchError::PerThreadStream), "{error}");
    let capture = |routing: usize, workspace: &mut Workspace| {
        refused(weights.capture(&captured[routing], 1, workspace, |_| Ok::<_, LaunchError>(())))
    };
    assert_eq!(capture(1, &mut workspace), Stream("the routing"));
    assert_eq!(capture(2, &mut workspace), Context("the routing"));
    assert_eq!(capture(0, &mut other_workspace), Stream("the workspace"));
    let slice = gpu.stream.alloc_zeros::<f32>(1).unwrap();
    assert_eq!(refused(Buffer::from_slice(&other, slice)), Stream("the slice"));
    assert_eq!(y.read::<f32>(), [1.0; 64]);
}

/// The refusals of linear layers, and those of experts alone: the router's choices, and routes grouped on another
/// stream.
#[test]
#[ignore = "needs a GPU"]
fn foreign_operands_of_experts_are_refused() {
    let gpu = Gpu::new();
    let foreign = gpu.foreign();
    let [foreign_values, mut foreign_target] = [(); 2].map(|()| Buffer::<f32>::zeros(&foreign, 64).unwrap());
    let foreign_ids = Buffer::<i32>::zeros(&foreign, 2).unwrap();
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
        [queue, queue, &other, &foreign].map(|queue| Grouping::new(queue, route_capacity).unwrap());
    let ids = gpu.upload(&[0_i32, 1]);
    let top_k = || TopK::new(ids.view(), 2).unwrap();
    let other_ids = Buffer::<i32>::zeros(&other, 2).unwrap();

    assert_eq!(refused(weights.step(&other_batch, &mut workspace)), Stream("the batch"));
    assert_eq!(refused(weights.step(&batch, &mut other_workspace)), Stream("the workspace"));
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    assert_eq!(refused(other_grouping.update(&mut step, top_k())), Stream("the grouping"));
    assert_eq!(refused(foreign_grouping.update(&mut step, top_k())), Context("the grouping"));
    for (top_k, refusal) in [
        (TopK::new(&foreign_ids, 2), Context("ids")),
        (TopK::new(&other_ids, 2), Stream("ids")),
        (top_k().with_weights(foreign_values.slice(0..2)), Context("weights")),
        (top_k().with_rows(&foreign_ids), Context("rows")),
    ] {
        assert_eq!(refused(grouping.update(&mut step, top_k.unwrap())), refusal);
    }

    let mut routes = grouping.update(&mut step, top_k()).unwrap();
    let mut second_step = weights.step(&second_batch, &mut second_workspace).unwrap();
    let mut second_routes = second_grouping.update(&mut second_step, top_k()).unwrap();
    let mut other_step = other_weights.step(&other_batch, &mut other_workspace).unwrap();
    let mut other_routes = other_grouping.update(&mut other_step, TopK::new(&other_ids, 2).unwrap()).unwrap();
    let (values, mut written) = (gpu.upload(&[1.0_f32; 64]), gpu.upload(&[7.0_f32; 64]));
    for op in OPERATIONS {
        let [x, y, target] = shapes(op, [4, 4], [1, 2]);
        let local = |[rows, cols]: [usize; 2]| Matrix::new(values.view::<f32>(), rows, cols).unwrap();
        let from = |[rows, cols]: [usize; 2]| Matrix::new(foreign_values.slice(0..rows * cols), rows, cols).unwrap();
        let mut run = |inputs: [Matrix<'_, f32>; 2], step: &mut Step<'_>, routes: &mut GroupedRoutes<'_, '_>| {
            let target = MatrixMut::new(written.view_mut(), target[0], target[1]).unwrap();
            refused(launch(&layer, op, step, routes, inputs, target))
        };
        assert_eq!(run([from(x), local(y)], &mut step, &mut routes), Context("x"), "{op:?}");
        if op.has_out() {
            assert_eq!(run([local(x), from(y)], &mut step, &mut routes), Context("y"), "{op:?}");
        }
        let inputs = || [local(x), local(y)];
        assert_eq!(run(inputs(), &mut step, &mut other_routes), Stream("the routes"), "{op:?}");
        assert_eq!(run(inputs(), &mut other_step, &mut routes), Stream("the routes"), "{op:?}");
        assert_eq!(run(inputs(), &mut step, &mut second_routes), OtherBatch("the routes"), "{op:?}");
        let elsewhere =
            MatrixMut::new(foreign_target.slice_mut(0..target[0] * target[1]), target[0], target[1]).unwrap();
        let named = if op.has_out() { "out" } else { "y" };
        assert_eq!(refused(launch(&layer, op, &mut step, &mut routes, inputs(), elsewhere)), Context(named), "{op:?}");
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

/// What exceeds a bound of the grouping or the workspace of experts is refused by the bound's name.
#[test]
#[ignore = "needs a GPU"]
fn routes_past_what_there_is_room_for_are_refused() {
    // So many that sums also pass through the partials.
    const TOKENS: usize = 600;
    let gpu = Gpu::new();
    let queue = &gpu.queue;
    let mut spec = ModelSpec::new();
    let id = spec.experts(Experts::new("m", 2, 4, 4).top_k(2)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(TOKENS).slots(2).rank(4);
    let weights = WeightTable::new(queue, &model, DType::F32, capacity, 1 << 12).unwrap();
    let mut routing = Routing::new(queue, capacity, 1).unwrap();
    let batch = routing.update(&Batch::new(&[Slot::BASE; TOKENS])).unwrap();
    let mut workspace = Workspace::new(&weights).unwrap();
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    let ids = gpu.upload(&[0_i32; 2 * TOKENS]);
    let routes = RouteCapacity::tokens(TOKENS).top_k(2).experts(2);
    let mut group = |capacity: RouteCapacity, top_k| {
        let mut grouping = Grouping::new(queue, capacity).unwrap();
        refused(grouping.update(&mut step, TopK::new(ids.view(), top_k).unwrap()))
    };
    let within = |what, got, max| Operand(OperandError::Capacity { what, got, max });
    let of_tokens = |what| within(what, TOKENS, TOKENS - 1);
    let fewer_tokens = RouteCapacity::tokens(TOKENS - 1).top_k(2).experts(2);
    assert_eq!(group(fewer_tokens, 2), of_tokens("the batch's tokens for this grouping"));
    assert_eq!(group(routes.top_k(1), 2), within("the routes of a token", 2, 1));
    assert_eq!(group(routes.top_k(1), 1), Operand(OperandError::Tokens { got: 2 * TOKENS, want: TOKENS }));
    for num_experts in [0, 1025] {
        assert_eq!(Grouping::new(queue, routes.experts(num_experts)).is_ok(), num_experts == 0);
    }

    let [mut fitting, mut of_three] =
        [2, 3].map(|num_experts| Grouping::new(queue, routes.experts(num_experts)).unwrap());
    let mut routes = fitting.update(&mut step, TopK::new(ids.view(), 2).unwrap()).unwrap();
    let mut of_three = of_three.update(&mut step, TopK::new(ids.view(), 2).unwrap()).unwrap();
    let layer = LoraExperts::new(&weights, id).unwrap();
    let (values, mut written) = (gpu.upload(&[1.0_f32; 16 * TOKENS]), gpu.upload(&[7.0_f32; 16 * TOKENS]));
    let mut run = |op, routes: &mut GroupedRoutes<'_, '_>, bytes| {
        let [x, y, target] = shapes(op, [4, 4], [TOKENS, 2 * TOKENS]);
        let mut workspace = Workspace::with_bytes(queue, bytes).unwrap();
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let inputs = [x, y].map(|[rows, cols]| Matrix::new(values.view::<f32>(), rows, cols).unwrap());
        let target = MatrixMut::new(written.view_mut(), target[0], target[1]).unwrap();
        launch(&layer, op, &mut step, routes, inputs, target)
    };
    let plan = layer.plan();
    for op in OPERATIONS {
        assert_eq!(refused(run(op, &mut of_three, plan.workspace_bytes())), Operand(OperandError::Model), "{op:?}");
        let projection = if op.is_before_activation() { plan.gate_up() } else { plan.down() };
        let needed = projection.workspace_bytes_for(TOKENS, 2);
        let [mut mailbox, mut partials] = [needed; 2];
        mailbox.mailbox -= 1;
        partials.partials -= 1;
        for (bytes, want) in [(mailbox, needed.mailbox), (partials, needed.partials)] {
            let too_small = TooSmall("the workspace", [want - 1, want]);
            assert_eq!(refused(run(op, &mut routes, bytes)), too_small, "{op:?}");
        }
    }
    for op in OPERATIONS {
        run(op, &mut routes, plan.workspace_bytes()).unwrap();
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
    assert_eq!(refused(within(0, bytes - 1)), TooSmall("the grouping's memory", [bytes - 1, bytes]));
    assert_eq!(refused(within(128, bytes)), Misaligned("the grouping's memory", 256));
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
    assert!(matches!(refused(group(0)), Operand(OperandError::TopK { top_k: 0, .. })));
    let too_many = OperandError::Capacity { what: "the routes of a token", got: 3, max: 2 };
    assert_eq!(refused(group(3)), Operand(too_many));
    let elsewhere = std::thread::scope(|scope| scope.spawn(|| refused(group(2))).join().unwrap());
    assert_eq!(elsewhere, Context("the thread"));
    let mut routes = group(2).unwrap();

    let layer = LoraExperts::for_model(kernels, &model, id, DType::F32, table_capacity).unwrap();
    let workspace_memory = Workspace::new(&weights).unwrap();
    let workspace = workspace_memory.raw();
    let mut add = |dtype, workspace| -> Refused {
        let step = raw::Step::new(weights.raw(), batch, workspace, stream);
        let x = raw::MatrixRef::with_dtype(values.address(), dtype, 2, 4);
        let y = raw::MatrixMut::new::<f32>(target.address(), 4, 8);
        // SAFETY: as above.
        refused(unsafe { layer.add_gate_up_delta_raw(&step, &mut routes, x, y) })
    };
    let of_type = OperandError::DType { operand: "x", got: DType::BF16, want: DType::F32 };
    assert_eq!(add(DType::BF16, workspace), Operand(of_type));
    let mut misaligned = workspace;
    misaligned.mailbox.ptr += 8;
    assert_eq!(add(DType::F32, misaligned), Misaligned("the workspace", 16));
    assert_eq!(target.read::<f32>(), [7.0; 64]);
}
