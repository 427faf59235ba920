//! Operations on a layer's experts in fixed memory, while routes, adapters and shared factors change, as in replays of
//! a captured graph.

use std::{collections::BTreeMap, marker::PhantomData};

use aril::{
    Element,
    cuda::{LoraExperts, Routing, WeightTable, Workspace, raw},
    model::Model,
    plan::Capacity,
    routing::Batch,
};
use bytemuck::Pod;
use half::{bf16, f16};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};

use super::{Operands, raw_top_k, route_capacity};
use crate::{
    common::{
        compare::{Place, compare},
        experts::{Act, Case, Lora, OPERATIONS, Op, Order, Pairs, WeightsOn},
        small::choose,
        values::{Dtype, Values},
    },
    device::{Buffer, Gpu},
    for_dtype,
    late::Late,
    operations::raw_matrix,
};

/// Operations whose rows are rows of routes.
const OF_ROUTES: [Op; 5] = [Op::AddGateUp, Op::Activate(Act::Silu), Op::WriteGateUp, Op::AddDown, Op::WriteDown];

/// A layer, and operations launched on the same routes, one after the other.
pub struct Layer<'a, T> {
    gpu: &'a Gpu,
    model: Model,
    weights: WeightTable,
    routing: Routing,
    batch: raw::RoutedBatch,
    grouping: raw::Grouping,
    _group_memory: Buffer,
    top_k: raw::TopK,
    ids: Buffer,
    router: Option<Buffer>,
    rows: Option<Buffer>,
    layer: LoraExperts,
    workspace: Workspace,
    operations: Vec<Operation>,
    of_type: PhantomData<T>,
}

/// The operands of an operation.
struct Operation {
    operands: Operands,
    /// Of the target.
    place: Place,
    x: Buffer,
    y: Buffer,
    target: Buffer,
}

impl Operation {
    /// What the base operation in front writes.
    fn base_output(&mut self) -> &mut Buffer {
        if self.operands.op == Op::AddCombined { &mut self.target } else { &mut self.y }
    }
}

impl<'a, T: Element> Layer<'a, T> {
    /// Allocates for steps shaped like `case`, with up to as many tokens and any operations. No adapter is loaded.
    pub fn new(gpu: &'a Gpu, case: &Case, ops: &[Op]) -> Self {
        let Gpu { kernels, queue, .. } = gpu;
        let (model, id) = case.model();
        let capacity = Capacity::tokens(case.num_tokens()).slots(case.num_slots()).rank(case.max_rank());
        let routing = Routing::new(queue, capacity, 1).unwrap();
        let batch = routing.capture_batch(case.num_tokens()).unwrap();
        let group_memory = gpu.upload(&vec![0_u8; raw::Grouping::device_bytes(route_capacity(case)).unwrap()]);
        // SAFETY: the memory is zero, lives as long as the grouping and is used on one stream.
        let grouping = unsafe { raw::Grouping::new(kernels, route_capacity(case), group_memory.region()) }.unwrap();
        let routes = case.num_routes();
        let ids = gpu.upload(&vec![0_i32; routes]);
        let router = case.half_weights.as_ref().map(|_| gpu.upload(&vec![0.0_f32; routes]));
        let rows = case.rows.as_ref().map(|_| gpu.upload(&vec![0_i32; routes]));
        let layer = LoraExperts::for_model(kernels, &model, id, T::DTYPE, capacity).unwrap();
        let operations = ops.iter().map(|&op| {
            let case = case.with(|layer| layer.op = op);
            let places = [case.x(), case.y(), case.target()];
            let [x, y, target] =
                places.map(|place| gpu.upload(&vec![T::default(); place.offset + place.rows * place.stride]));
            let operands = Operands::new::<T>(op, (&x, places[0]), (&y, places[1]), (&target, places[2]));
            Operation { operands, place: places[2], x, y, target }
        });
        Self {
            gpu,
            weights: WeightTable::new(queue, &model, T::DTYPE, capacity, 1 << 28).unwrap(),
            model,
            routing,
            batch,
            grouping,
            _group_memory: group_memory,
            top_k: raw_top_k(case, &ids, router.as_ref(), rows.as_ref()),
            ids,
            router,
            rows,
            workspace: Workspace::with_bytes(queue, layer.plan().workspace_bytes()).unwrap(),
            layer,
            operations: operations.collect(),
            of_type: PhantomData,
        }
    }

    /// Loads an adapter into a slot, or empties the slot if the adapter has no module.
    pub fn load(&mut self, slot: usize, case: &Case, lora: &Lora, pairs: &Pairs) {
        if lora.is_nothing() {
            return self.weights.unload(slot).unwrap();
        }
        let adapter = case.load(lora, pairs);
        self.weights.load(slot, &adapter.plan(&self.model, T::DTYPE).unwrap()).unwrap();
    }

    /// Loads the adapters of a case.
    pub fn load_all(&mut self, case: &Case) -> Vec<Pairs> {
        let all = case.pairs(&mut StdRng::seed_from_u64(case.seed));
        let adapters = case.adapters.iter().zip(&all).enumerate();
        for (slot, (lora, pairs)) in adapters.filter(|(_, (lora, _))| !lora.is_nothing()) {
            self.load(slot, case, lora, pairs);
        }
        all
    }

    /// Enqueues the grouping and the operations, each with its shrink beside a base operation that `base` enqueues in
    /// front of it.
    fn launch_beside(&mut self, mut base: impl FnMut(usize, &Operation)) {
        let stream = self.gpu.raw_stream();
        let step = raw::Step::new(self.weights.raw(), self.batch, self.workspace.raw(), stream);
        // SAFETY: the layer owns all operands and keeps them alive until the stream is synchronized.
        let routes = unsafe { self.grouping.group(self.batch, self.top_k, stream) }.unwrap();
        // SAFETY: `base` enqueues a kernel that starts when all before it has ended, and writes y alone.
        let mut routes = unsafe { routes.shrink_beside_base() };
        for (index, operation) in self.operations.iter().enumerate() {
            base(index, operation);
            operation.operands.launch(&self.layer, &step, &mut routes);
        }
    }

    /// Enqueues the grouping, an activation and a combine of what it writes, and returns the result of the combine.
    /// `early`: each beside a base operation in front, the combine beside the activation, too. The time is that of the
    /// base operation of gate and up. `refused`: a combine that is refused comes first, behind which none is beside the
    /// activation.
    fn activate_and_combine(&mut self, early: Option<(&Late, u64)>, refused: bool) -> Vec<T> {
        let stream = self.gpu.raw_stream();
        let step = raw::Step::new(self.weights.raw(), self.batch, self.workspace.raw(), stream);
        let [activation, combine] = &mut self.operations[..] else { panic!("the layer has other operations") };
        for target in [&mut activation.target, &mut combine.target] {
            let len = target.region().bytes / size_of::<T>();
            target.write(&vec![T::from_f32(f32::NAN); len]);
        }
        let scratch = [self.gpu.upload(&[0_u16; 64]), self.gpu.upload(&[0_u16; 64])];
        // SAFETY: the layer owns all operands and keeps them alive until the stream is synchronized.
        let mut routes = unsafe { self.grouping.group(self.batch, self.top_k, stream) }.unwrap();
        if let Some((late, microseconds)) = early {
            // SAFETY: the copies start when all before them has ended, or behind the activation, and write what nobody
            // reads.
            routes = unsafe { routes.shrink_beside_base() };
            late.copy(&scratch[0], &scratch[1], microseconds);
        }
        activation.operands.launch(&self.layer, &step, &mut routes);
        let may_be_early = routes.may_combine_beside_activation();
        assert_eq!(may_be_early, early.is_some() && routes.num_routes() <= 64);
        if let Some((late, _)) = early {
            late.copy_behind(&scratch[0], &scratch[1], 5);
            // SAFETY: in front is a copy that starts its dependents at once, and in front of that the activation.
            unsafe { routes.combine_beside_activation() };
        }
        let x = raw_matrix::<T>(&activation.target, activation.place);
        if refused {
            let Operands { y, target, .. } = combine.operands;
            // SAFETY: as above.
            unsafe { self.layer.combine_raw(&step, &mut routes, y, y, target) }.unwrap_err();
            assert!(!routes.may_combine_beside_activation());
        }
        Operands { x, ..combine.operands }.launch(&self.layer, &step, &mut routes);
        assert!(!routes.may_combine_beside_activation());
        combine.target.read()
    }

    /// Enqueues the grouping and the operations.
    pub fn launch(&mut self) {
        let stream = self.gpu.raw_stream();
        let step = raw::Step::new(self.weights.raw(), self.batch, self.workspace.raw(), stream);
        // SAFETY: the layer owns all operands and keeps them alive until the stream is synchronized.
        let mut routes = unsafe { self.grouping.group(self.batch, self.top_k, stream) }.unwrap();
        for Operation { operands, .. } in &self.operations {
            operands.launch(&self.layer, &step, &mut routes);
        }
    }

    /// Writes the operands of a step whose first `live` tokens are routed, launches it, and compares the result of each
    /// operation with the reference for adapters with these factors. No route of the other tokens may have a row.
    pub fn check(&mut self, step: &Case, live: usize, pairs: &[Pairs], what: &str, launch: impl FnOnce(&mut Self)) {
        fn padded<V: Clone>(values: &[V], live: usize, len: usize, padding: V) -> Vec<V> {
            let mut values = values[..live].to_vec();
            values.resize(len, padding);
            values
        }
        let cases: Vec<Case> =
            self.operations.iter().map(|operation| step.with(|layer| layer.op = operation.operands.op)).collect();
        let worlds: Vec<_> = cases
            .iter()
            .map(|case| case.world_of::<T>(pairs.to_vec(), &mut StdRng::seed_from_u64(step.seed)))
            .collect();
        let routes = live * step.top_k;
        // Otherwise, rows without a live token would be routes of the first row to the first expert.
        let all = self.ids.region().bytes / size_of::<i32>();
        self.ids.write(&padded(&step.ids, routes, all, 0));
        if let Some(rows) = &mut self.rows {
            rows.write(&padded(step.rows.as_ref().unwrap(), routes, all, 0));
        }
        if let Some(router) = &mut self.router {
            router.write(&padded(&step.router().unwrap(), routes, all, 1.0));
        }
        for (operation, (case, world)) in self.operations.iter_mut().zip(cases.iter().zip(&worlds)) {
            let Operation { x, y, target, .. } = operation;
            for (buffer, values) in [(x, &world.x[..]), (y, &world.y[..]), (target, world.target(case))] {
                let len = buffer.region().bytes / size_of::<T>();
                buffer.write(&padded(values, values.len().min(len), len, T::from_f32(f32::NAN)));
            }
        }
        let scales = worlds[0].scales.as_ref().map(|scales| &scales[..live]);
        let slots = worlds[0].loaded_slots(|slot| self.weights.get(slot));
        let batch = Batch::new(&slots[..live]);
        let batch = scales.map_or(batch, |scales| batch.with_scales(scales).unwrap());
        self.routing.update(&batch).unwrap();
        launch(self);
        for (operation, (case, world)) in self.operations.iter().zip(cases.iter().zip(&worlds)) {
            let what = format!("{what}, {:?} in {:?}", case.op, T::DTYPE);
            let mut got = operation.target.read::<T>();
            let mut expected = world.expected(case);
            let behind = got.split_off(got.len().min(expected.len()));
            assert!(behind.iter().all(|value| value.to_f32().is_nan()), "{what}: a padded row was written");
            expected.truncate(got.len());
            compare(case.target(), &got, &expected, &what).unwrap();
        }
    }
}

/// Whether the device chooses wide tiles if it may and each route has a row (`takes_large_m` in
/// `csrc/moe/route_tiles.cuh`).
pub fn routes_go_wide(slots: &[i32], ids: &[i32], [num_slots, num_experts, max_rank]: [usize; 3]) -> bool {
    let top_k = ids.len() / slots.len().max(1);
    let mut groups = BTreeMap::<_, usize>::new();
    for (route, id) in ids.iter().enumerate() {
        let slot = slots[route / top_k];
        if (0..num_slots as i32).contains(&slot) && (0..num_experts as i32).contains(id) {
            *groups.entry((slot, id)).or_default() += 1;
        }
    }
    let tiles_of = |size| groups.values().map(|routes| routes.div_ceil(size)).sum::<usize>();
    let (tiles, wide_tiles) = (tiles_of(8), tiles_of(64));
    tiles * max_rank > 28 * wide_tiles && 4 * tiles > 5 * wide_tiles
}

/// The same for a case.
pub fn goes_wide(case: &Case) -> bool {
    routes_go_wide(&case.slots, &case.ids, [case.num_slots(), case.shape.held.len(), case.max_rank()])
}

/// One graph with more than 1024 routes: the device chooses small tiles in some replays and wide ones in others.
#[test]
#[ignore = "needs a GPU"]
fn a_replay_goes_by_the_tiles_that_its_routes_make() {
    const TOKENS: usize = 320;
    /// Slots by token, and experts by token and choice.
    type Choice = (usize, fn(i32) -> i32, fn(i32, i32) -> i32);
    fn run<T: Element>(gpu: &Gpu, case: &Case) {
        let steps: [Choice; 10] = [
            // Four routes of each slot to each expert.
            (TOKENS, |token| token % 8, |token, k| (token / 8 * 4 + k) % 40),
            // One slot, four experts.
            (TOKENS, |_| 1, |_, k| [3, 7, 11, 39][k as usize]),
            (TOKENS, |token| token / 40, |token, k| (token * 7 + k * 11) % 40),
            // With base tokens, a slot without an adapter, and routes that are not local.
            (
                TOKENS,
                |token| token % 10 - 1,
                |token, k| [-1, token % 2, 39, if token % 5 == 0 { 40 } else { 2 }][k as usize],
            ),
            // Fewer than were captured.
            (37, |token| token % 8, |token, k| (token * 4 + k) % 40),
            (200, |_| 0, |_, k| 9 + k),
            (0, |_| 0, |_, _| 0),
            // Large and small groups: wide tiles if ranks are high.
            (
                TOKENS,
                |token| if token < 256 { 2 } else { token % 8 },
                |token, k| if token < 256 { k } else { (token * 4 + k) % 40 },
            ),
            (TOKENS, |_| -1, |_, k| k),
            (TOKENS, |_| 6, |token, k| token % 2 * 4 + k),
        ];
        let mut layer = Layer::<T>::new(gpu, case, &OPERATIONS);
        let pairs = layer.load_all(case);
        let graph = gpu.capture(|| layer.launch());
        let mut ways = Vec::new();
        for (number, (tokens, slot, expert)) in steps.into_iter().enumerate() {
            let mut step = Case { seed: number as u64, ..case.clone() };
            step.choose(tokens, slot, expert);
            ways.push(goes_wide(&step));
            layer.check(&step, tokens, &pairs, &format!("step {number}"), |_| graph.replay());
        }
        assert_eq!(
            ways[..7],
            [false, true, false, true, false, true, false],
            "the steps do not go by both tiles in turn"
        );
    }

    let gpu = Gpu::new();
    let variants = [
        (Dtype::BF16, Values::Exact, [136, 72], Order::GateUp, 40, WeightsOn::Combine),
        (Dtype::F16, Values::Rounded, [136, 72], Order::UpGate, 40, WeightsOn::Input),
        // More than one slab, before and after the activation.
        (Dtype::F16, Values::Exact, [1100, 40], Order::GateUp, 12, WeightsOn::Rows),
        (Dtype::BF16, Values::Rounded, [72, 1032], Order::UpGate, 16, WeightsOn::Rows),
        // The highest rank of wide tiles.
        (Dtype::BF16, Values::Rounded, [72, 40], Order::GateUp, 128, WeightsOn::Input),
        (Dtype::F16, Values::Rounded, [40, 72], Order::GateUp, 128, WeightsOn::Combine),
    ];
    for (dtype, values, [hidden, inter], halves, rank, weights_on) in variants {
        let mut up_alone = Lora::shared_outer(40, 9);
        up_alone.modules[0].ranks.fill(0);
        let mut of_some = Lora::of_own_ranks(40, rank);
        of_some.modules.iter_mut().for_each(|module| module.ranks[20..].fill(0));
        let adapters = vec![
            Lora::of_own_ranks(40, rank),
            Lora::shared_outer(40, rank),
            Lora::of_one_rank(40, 5, [[false; 2]; 3]),
            Lora::shared_outer(40, 3),
            Lora::of_one_rank(40, 8, [[true; 2]; 3]),
            of_some,
            up_alone,
            Lora::of_own_ranks(40, 1),
        ];
        let case = Case::new([40, hidden, inter], adapters, [TOKENS, 4]);
        let case = Case { dtype, values, ..case };
        let case = case.with(|layer| (layer.weights_on, layer.shape.halves) = (weights_on, halves));
        for_dtype!(case, run(&gpu, &case));
    }
}

/// Between replays of a graph, adapters are loaded, unloaded, and change ranks and shared factors, for each way of
/// grouping routes.
#[test]
#[ignore = "needs a GPU"]
fn a_replay_sees_what_became_of_the_adapters() {
    const EXPERTS: usize = 6;
    fn run<T: Element>(gpu: &Gpu, case: &Case) {
        let nothing = || Lora::nothing(EXPERTS);
        // The adapters that a step loads, and its tokens.
        let tokens = case.num_tokens();
        let steps = [
            (vec![], tokens),
            (vec![(0, Lora::of_own_ranks(EXPERTS, 40)), (1, Lora::shared_outer(EXPERTS, 16))], tokens),
            // Shares the factors that each expert had, and the other way round.
            (vec![(0, Lora::shared_outer(EXPERTS, 33)), (1, Lora::of_own_ranks(EXPERTS, 5))], tokens),
            (vec![(2, Lora::of_one_rank(EXPERTS, 8, [[true; 2]; 3])), (1, Lora::shared_outer(EXPERTS, 7))], tokens - 3),
            (vec![(0, Lora::shared_outer(EXPERTS, 2))], tokens),
            (vec![(1, nothing()), (2, Lora::of_one_rank(EXPERTS, 40, [[false; 2]; 3]))], 1),
            // All remaining adapters share factors.
            (vec![(2, nothing())], tokens),
            (vec![(0, nothing())], tokens),
            (vec![(2, Lora::of_own_ranks(EXPERTS, 40))], tokens),
        ];
        let mut layer = Layer::<T>::new(gpu, case, &OPERATIONS);
        let graph = gpu.capture(|| layer.launch());
        let mut rng = StdRng::seed_from_u64(case.seed);
        let mut held: Vec<(Lora, Pairs)> =
            case.adapters.iter().map(|_| (nothing(), case.pairs_of(&nothing(), &mut rng))).collect();
        for (number, (changes, live)) in steps.into_iter().enumerate() {
            for (slot, lora) in changes {
                let pairs = case.pairs_of(&lora, &mut rng);
                layer.load(slot, case, &lora, &pairs);
                held[slot] = (lora, pairs);
            }
            let (adapters, pairs): (Vec<Lora>, Vec<Pairs>) = held.iter().cloned().unzip();
            let mut step = Case { seed: rng.random(), ..case.with(|layer| layer.adapters = adapters) };
            let mut slots = StdRng::seed_from_u64(number as u64);
            let slot = |_| slots.random_range(-1..=4);
            step.choose(live, slot, |_, _| rng.random_range(-1..=EXPERTS as i32));
            layer.check(&step, live, &pairs, &format!("{tokens} tokens, step {number}"), |_| graph.replay());
        }
    }

    let gpu = Gpu::new();
    for tokens in [16, 200, 320] {
        for (dtype, values) in
            [(Dtype::BF16, Values::Rounded), (Dtype::F16, Values::Exact), (Dtype::F32, Values::Rounded)]
        {
            let largest = Lora::of_own_ranks(EXPERTS, 40);
            let case = Case::new([EXPERTS, 72, 40], vec![largest; 3], [tokens, 4]);
            let case = Case { dtype, values, ..case };
            for_dtype!(case, run(&gpu, &case));
        }
    }
}

/// Rows of routes anywhere among the captured rows, which outnumber the live routes.
#[test]
#[ignore = "needs a GPU"]
fn live_routes_have_any_of_the_captured_rows() {
    const EXPERTS: i32 = 5;
    fn run<T: Element>(gpu: &Gpu, case: &Case) {
        let mut layer = Layer::<T>::new(gpu, case, &OF_ROUTES);
        let pairs = layer.load_all(case);
        let graph = gpu.capture(|| layer.launch());
        let (tokens, routes) = (case.num_tokens(), case.num_routes());
        let mut rng = StdRng::seed_from_u64(case.seed);
        for live in [tokens / 2, tokens, 1, tokens - 1, 0] {
            let mut step = Case { seed: live as u64, ..case.clone() };
            step.choose(tokens, |token| token % 4 - 1, |token, k| (token + k * 3) % (EXPERTS + 2) - 1);
            let mut rows: Vec<i32> = (0..routes as i32).collect();
            rows.shuffle(&mut rng);
            for (route, row) in rows.iter_mut().enumerate() {
                if route >= live * case.top_k || route % 11 == 3 {
                    *row = [-1, routes as i32, i32::MAX, i32::MIN][route % 4];
                }
            }
            step.rows = Some(rows);
            layer.check(&step, live, &pairs, &format!("{live} of {tokens} tokens"), |_| graph.replay());
        }
    }

    let gpu = Gpu::new();
    for tokens in [16, 200, 330] {
        for (dtype, weights_on) in
            [(Dtype::BF16, WeightsOn::Rows), (Dtype::F16, WeightsOn::Input), (Dtype::F32, WeightsOn::Rows)]
        {
            let adapters = vec![Lora::of_own_ranks(5, 24), Lora::shared_outer(5, 16)];
            let case = Case::new([5, 72, 40], adapters, [tokens, 4]);
            let case = case.with(|layer| (layer.weights_on, layer.rows) = (weights_on, Some(Vec::new())));
            let case = Case { dtype, ..case };
            for_dtype!(case, run(&gpu, &case));
        }
    }
}

/// Experts of [`case_of_three`].
const EXPERTS: usize = 12;

/// With three adapters, so many tokens and experts for each.
fn case_of_three(routes: [usize; 2]) -> Case {
    let adapters = vec![
        Lora::of_own_ranks(EXPERTS, 24),
        Lora::shared_outer(EXPERTS, 16),
        Lora::of_one_rank(EXPERTS, 8, [[true; 2]; 3]),
    ];
    Case::new([EXPERTS, choose(2048, 136), choose(512, 72)], adapters, routes)
}

/// Behind a base operation that lets them start before it has written y: it copies the case's y into one of NaN, later
/// than shrink ends.
#[test]
#[ignore = "needs a GPU"]
fn deltas_beside_the_base_agree_with_the_reference() {
    const OPS: [Op; 4] = [Op::Activate(Act::Silu), Op::AddCombined, Op::Combine, Op::Activate(Act::SwigluOai)];
    const MICROSECONDS: u64 = 50;
    fn run<T: Element + Pod>(gpu: &Gpu, late: &Late, case: &Case) {
        let mut layer = Layer::<T>::new(gpu, case, &OPS);
        let pairs = layer.load_all(case);
        let places = OPS.map(|op| case.with(|layer| layer.op = op).y());
        let mut copied = places.map(|place| gpu.upload(&vec![T::default(); place.rows * place.cols]));
        let graph = gpu.capture(|| {
            layer.launch_beside(|index, operation| {
                let to = if operation.operands.op == Op::AddCombined { &operation.target } else { &operation.y };
                late.copy(&copied[index], to, MICROSECONDS);
            });
        });
        let tokens = case.num_tokens();
        for number in 0..choose(12, 3) {
            let mut rng = StdRng::seed_from_u64(number);
            let mut step = Case { seed: number, ..case.clone() };
            let has_base = number % 3 != 0;
            let slot = |_| if has_base { rng.random_range(-1..=3) } else { 1 };
            let mut choices = StdRng::seed_from_u64(number + 100);
            let first = if number % 4 == 0 { 0 } else { -1 };
            step.choose(tokens, slot, |_, _| choices.random_range(first..=EXPERTS as i32));
            layer.check(&step, tokens, &pairs, &format!("{tokens} tokens, step {number}"), |layer| {
                for (operation, copied) in layer.operations.iter_mut().zip(&mut copied) {
                    let output = operation.base_output();
                    let mut values = output.read::<T>();
                    copied.write(&values[..copied.region().bytes / size_of::<T>()]);
                    values.fill(T::from_f32(f32::NAN));
                    output.write(&values);
                }
                graph.replay();
            });
        }
    }

    let gpu = Gpu::new();
    let late = Late::new(&gpu);
    // Each operation groups the routes, the first block of the first one does, and there are more for a token than a
    // warp reads at once.
    for (tokens, top_k) in [(1, 8), (8, 8), (choose(40, 17), 8), (2, 40)] {
        for dtype in [Dtype::BF16, Dtype::F16] {
            let case = case_of_three([tokens, top_k]);
            let case = Case { dtype, ..case };
            match case.dtype {
                Dtype::BF16 => run::<bf16>(&gpu, &late, &case),
                _ => run::<f16>(&gpu, &late, &case),
            }
        }
    }
}

/// The combine begins before the activation in front of its base operation has written x. With more routes it waits for
/// all in front of it.
#[test]
#[ignore = "needs a GPU"]
fn combines_beside_their_activation_have_the_same_bits() {
    fn run<T: Element + Pod>(gpu: &Gpu, late: &Late, case: &Case) {
        let mut layer = Layer::<T>::new(gpu, case, &[Op::Activate(Act::Silu), Op::Combine]);
        let pairs = layer.load_all(case);
        let tokens = case.num_tokens();
        for number in 0..choose(12, 3) {
            let mut rng = StdRng::seed_from_u64(number);
            let mut step = Case { seed: number, ..case.clone() };
            let mut choices = StdRng::seed_from_u64(number + 100);
            step.choose(tokens, |_| rng.random_range(-1..=3), |_, _| choices.random_range(-1..=EXPERTS as i32));
            let what = format!("{tokens} tokens, step {number}");
            layer.check(&step, tokens, &pairs, &what, Layer::launch);
            let expected = layer.activate_and_combine(None, false);
            for (microseconds, refused) in [(0, false), (20, false), (60, false), (60, true)] {
                let got = layer.activate_and_combine(Some((late, microseconds)), refused);
                let bits = |values: &[T]| bytemuck::cast_slice::<T, u8>(values).to_vec();
                assert_eq!(bits(&got), bits(&expected), "{what}, {:?}, {microseconds} us, {refused}", T::DTYPE);
            }
        }
    }

    let gpu = Gpu::new();
    let late = Late::new(&gpu);
    for (tokens, top_k) in [(1, 8), (8, 8), (3, 5), (17, 8)] {
        for dtype in [Dtype::BF16, Dtype::F16] {
            let case = case_of_three([tokens, top_k]);
            match dtype {
                Dtype::BF16 => run::<bf16>(&gpu, &late, &Case { dtype, ..case }),
                _ => run::<f16>(&gpu, &late, &Case { dtype, ..case }),
            }
        }
    }
}
