//! The same for the operations on experts, and for the grouping that layers share.

use aril::{
    DType,
    adapter::Adapter,
    cuda::{LoraExperts, WeightTable, Workspace, raw},
    model::{Experts, ExpertsId, Halves, Model, ModelSpec, TpRank},
    plan::{Capacity, RouteCapacity},
};
use half::bf16;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::{Hog, Results};
use crate::{
    common::adapters::tensor,
    common::{
        compare::Place,
        experts::{Act, Case, Op, Order},
    },
    device::{Buffer, Gpu, Graph},
    experts::{Operands, steps::routes_go_wide},
};

/// The last two slots stay empty.
const CAPACITY: Capacity = Capacity::tokens(640).slots(8).rank(64);
const EXPERTS: usize = 40;
/// Hidden size, intermediate size and experts per token of each layer. Rows of the second are not aligned.
const LAYERS: [([usize; 2], usize, Order); 2] = [([1152, 264], 4, Order::GateUp), ([300, 100], 2, Order::UpGate)];
const MAX_TOP_K: usize = 4;
/// Tokens with which each layer has few routes, as many as every block groups, one more, as many as one block groups,
/// and more.
const TOKENS: [[usize; 6]; 2] = [[1, 16, 17, 256, 257, 400], [1, 32, 33, 512, 513, 640]];
/// Operations on the same routes, each with a separate target.
const LAUNCHES: [Op; 4] = [Op::AddGateUp, Op::Activate(Act::Silu), Op::AddDown, Op::Combine];

/// Layers whose adapters are in one table.
struct Layers {
    gpu: Gpu,
    model: Model,
    ids: [ExpertsId; LAYERS.len()],
    weights: WeightTable,
}

impl Layers {
    fn new() -> Self {
        let gpu = Gpu::new();
        let mut rng = StdRng::seed_from_u64(6);
        let mut spec = ModelSpec::new();
        let ids = [0, 1].map(|layer| {
            let ([hidden, inter], top_k, order) = LAYERS[layer];
            let experts = Experts::new(format!("layers.{layer}.experts"), EXPERTS, hidden, inter).top_k(top_k);
            spec.experts(experts.halves(order.halves().unwrap_or(Halves::GateUp))).unwrap()
        });
        let model = spec.shard(TpRank::SINGLE).unwrap();
        let weights = WeightTable::new(&gpu.queue, &model, DType::BF16, CAPACITY, 256 << 20).unwrap();
        // Ranks, and whether the experts share the outer factors, by layer.
        let adapters = [
            (16, [false, true]),
            (1, [false, false]),
            (64, [true, false]),
            (33, [true, true]),
            (8, [false, true]),
            (48, [true, false]),
        ];
        for (slot, (rank, shared)) in adapters.into_iter().enumerate() {
            let adapter = adapter(rank, shared, &mut rng);
            weights.load(slot, &adapter.plan(&model, DType::BF16).unwrap()).unwrap();
        }
        gpu.synchronize();
        Self { gpu, model, ids, weights }
    }

    fn layer(&self, gpu: &Gpu, layer: usize) -> LoraExperts {
        LoraExperts::for_model(&gpu.kernels, &self.model, self.ids[layer], DType::BF16, CAPACITY).unwrap()
    }
}

/// In all modules.
fn adapter(rank: usize, shared: [bool; 2], rng: &mut StdRng) -> Adapter {
    let mut tensors = Vec::new();
    let mut put = |path: String, [num_a, num_b]: [usize; 2], rank: usize, [input, output]: [usize; 2]| {
        let mut values = |len: usize| -> Vec<f32> { (0..len).map(|_| rng.random_range(-0.1..0.1)).collect() };
        let a = tensor(DType::BF16, &[num_a, rank, input], &values(num_a * rank * input));
        let b = tensor(DType::BF16, &[num_b, output, rank], &values(num_b * output * rank));
        tensors.extend([(format!("{path}.lora_A.weight"), a), (format!("{path}.lora_B.weight"), b)]);
    };
    for (layer, ([hidden, inter], _, _)) in LAYERS.into_iter().enumerate() {
        for (module, features) in [("gate", [hidden, inter]), ("up", [hidden, inter]), ("down", [inter, hidden])] {
            let num = match (shared[layer], module) {
                (false, _) => [EXPERTS; 2],
                (true, "down") => [EXPERTS, 1],
                (true, _) => [1, EXPERTS],
            };
            let rank = (rank / (1 + usize::from(module == "up"))).max(1);
            put(format!("layers.{layer}.experts.{module}_proj"), num, rank, features);
        }
    }
    let config = r#"{"peft_type": "LORA", "lora_alpha": 16}"#;
    Adapter::from_tensors(config, tensors).unwrap()
}

/// Memory that launches share, large enough for any of the layers.
struct Scratch {
    workspace: Workspace,
    grouping: raw::Grouping,
    _group_memory: Buffer,
}

impl Scratch {
    fn new(layers: &Layers, gpu: &Gpu) -> Self {
        let bytes = [0, 1].map(|layer| layers.layer(gpu, layer).plan().workspace_bytes());
        let capacity = RouteCapacity::tokens(CAPACITY.max_tokens).top_k(MAX_TOP_K).experts(EXPERTS);
        let group_memory = gpu.upload(&vec![0_u8; raw::Grouping::device_bytes(capacity).unwrap()]);
        Self {
            workspace: Workspace::with_bytes(&gpu.queue, bytes[0].max(bytes[1])).unwrap(),
            // SAFETY: the memory is zero, lives as long as the grouping and is used on one stream.
            grouping: unsafe { raw::Grouping::new(&gpu.kernels, capacity, group_memory.region()) }.unwrap(),
            _group_memory: group_memory,
        }
    }
}

/// Successive batches on one layer and stream. Each is routed on the device and grouped, and all operations run on it.
struct Steps<'a> {
    gpu: &'a Gpu,
    number: usize,
    layer: LoraExperts,
    table: raw::Table,
    routing: raw::Routing,
    _routing_memory: Buffer,
    /// The tokens of each batch.
    tokens: Vec<usize>,
    slots: Buffer,
    ids: Buffer,
    router: Buffer,
    /// x, and y if it is only read, of every step, by launch.
    inputs: [[Buffer; 2]; LAUNCHES.len()],
    targets: [Buffer; LAUNCHES.len()],
    initial: [Vec<bf16>; LAUNCHES.len()],
}

impl<'a> Steps<'a> {
    /// Batches for layer `layer`, on the stream of `gpu`.
    fn new(layers: &'a Layers, layer: usize, gpu: &'a Gpu, tokens: &[usize]) -> Self {
        let mut rng = StdRng::seed_from_u64(layer as u64);
        let top_k = LAYERS[layer].1;
        let (total, most): (usize, usize) = (tokens.iter().sum(), *tokens.iter().max().unwrap());
        // In the first layer, one slot has half of the tokens and three experts have most of them. In the second, all
        // have few.
        let (is_large, end) = (layer == 0, CAPACITY.num_slots as i32);
        let slots: Vec<i32> =
            (0..total).map(|_| if is_large && rng.random() { 2 } else { rng.random_range(-1..end) }).collect();
        let ids: Vec<i32> = (0..total * top_k)
            .map(|_| match is_large && rng.random_bool(0.9) {
                true => rng.random_range(0..3),
                false => rng.random_range(-1..=EXPERTS as i32),
            })
            .collect();
        let mut before = 0;
        for &tokens in tokens {
            let (slots, ids) = (&slots[before..][..tokens], &ids[before * top_k..][..tokens * top_k]);
            let goes_wide = routes_go_wide(slots, ids, [CAPACITY.num_slots, EXPERTS, CAPACITY.max_rank]);
            assert!(tokens * top_k <= 1024 || goes_wide == is_large, "layer {layer}: {tokens} tokens by other tiles");
            before += tokens;
        }
        let router: Vec<f32> = (0..total * top_k).map(|_| rng.random_range(0.0..1.0)).collect();
        let mut values =
            |count: usize| -> Vec<bf16> { (0..count).map(|_| bf16::from_f32(rng.random_range(-1.0..1.0))).collect() };
        let inputs = LAUNCHES.map(|op| {
            let case = case_of(layer, op, most);
            [case.x(), case.y()].map(|place| gpu.upload(&values(place.rows * place.stride)))
        });
        let initial = LAUNCHES.map(|op| {
            let place = case_of(layer, op, most).target();
            let (rows, of_token) = (values(place.rows * place.stride), place.rows / most * place.stride);
            tokens.iter().flat_map(|tokens| rows[..tokens * of_token].to_vec()).collect::<Vec<_>>()
        });
        let routing_memory = gpu.without_indices(raw::Routing::device_bytes(CAPACITY).unwrap());
        let steps = Self {
            gpu,
            number: layer,
            layer: layers.layer(gpu, layer),
            table: layers.weights.raw(),
            // SAFETY: the memory lives as long as the routing and is used on one stream.
            routing: unsafe { raw::Routing::new(&gpu.kernels, CAPACITY, 1, routing_memory.region()) }.unwrap(),
            _routing_memory: routing_memory,
            tokens: tokens.to_vec(),
            slots: gpu.upload(&slots),
            ids: gpu.upload(&ids),
            router: gpu.upload(&router),
            inputs,
            targets: initial.each_ref().map(|values| gpu.upload(values)),
            initial,
        };
        gpu.synchronize();
        steps
    }

    fn tokens_before(&self, step: usize) -> usize {
        self.tokens[..step].iter().sum()
    }

    /// Routes and groups a step.
    fn route(&mut self, step: usize, scratch: &mut Scratch) -> (raw::Step, raw::GroupedRoutes) {
        let (tokens, stream, top_k) = (self.tokens[step], self.gpu.raw_stream(), LAYERS[self.number].1);
        let behind = |buffer: &Buffer, words: usize| buffer.address() + (words * size_of::<i32>()) as u64;
        let before = self.tokens_before(step);
        let slots = behind(&self.slots, before);
        let top_k =
            raw::TopK::new(behind(&self.ids, before * top_k), top_k).weights(behind(&self.router, before * top_k));
        // SAFETY: the test owns the slots and the routing and keeps them alive until the stream is synchronized.
        let batch = unsafe { self.routing.update_on_device(slots, None, tokens, stream) }.unwrap();
        // SAFETY: the test also owns the choices and the grouping, and keeps them alive as long.
        let routes = unsafe { scratch.grouping.group(batch, top_k, stream) }.unwrap();
        (raw::Step::new(self.table, batch, scratch.workspace.raw(), stream), routes)
    }

    fn launch(&self, step: usize, launch: usize, (on, routes): &mut (raw::Step, raw::GroupedRoutes)) {
        let case = case_of(self.number, LAUNCHES[launch], self.tokens[step]);
        let target = case.target();
        let target =
            Place { offset: self.tokens_before(step) * target.rows / self.tokens[step] * target.stride, ..target };
        let [x, y] = &self.inputs[launch];
        let operands = Operands::new::<bf16>(case.op, (x, case.x()), (y, case.y()), (&self.targets[launch], target));
        operands.launch(&self.layer, on, routes);
    }

    fn enqueue(&mut self, step: usize, scratch: &mut Scratch) {
        let mut routed = self.route(step, scratch);
        (0..LAUNCHES.len()).for_each(|launch| self.launch(step, launch, &mut routed));
    }

    /// What the targets are after every launch was made `times`, each with the device and a scratch to itself.
    fn alone(&mut self, layers: &Layers, times: usize) -> Results {
        for _ in 0..times {
            for step in 0..self.tokens.len() {
                for launch in 0..LAUNCHES.len() {
                    let mut scratch = Scratch::new(layers, self.gpu);
                    let mut routed = self.route(step, &mut scratch);
                    self.launch(step, launch, &mut routed);
                    self.gpu.synchronize();
                }
            }
        }
        let results = self.take_results();
        for (initial, results) in self.initial.iter().zip(results.chunks(self.tokens.len())) {
            assert!(bytemuck::cast_slice::<_, u16>(initial) != results.concat(), "the launches change nothing");
        }
        results
    }

    /// Takes the targets, by launch and step, and restores their initial values.
    fn take_results(&mut self) -> Results {
        let mut results = Vec::new();
        for (target, initial) in self.targets.iter_mut().zip(&self.initial) {
            let of_token = initial.len() / self.tokens.iter().sum::<usize>();
            let mut all = target.read::<u16>().into_iter();
            results.extend(self.tokens.iter().map(|tokens| all.by_ref().take(tokens * of_token).collect::<Vec<_>>()));
            target.write(initial);
        }
        self.gpu.synchronize();
        results
    }

    fn check(&mut self, expected: &Results, what: &str) {
        for (i, (got, expected)) in self.take_results().iter().zip(expected).enumerate() {
            let (op, tokens) = (LAUNCHES[i / self.tokens.len()], self.tokens[i % self.tokens.len()]);
            assert!(got == expected, "{what}: {op:?} of {tokens} tokens differs from the same alone");
        }
    }
}

/// The operands' places for an operation on `tokens` tokens.
fn case_of(layer: usize, op: Op, tokens: usize) -> Case {
    let ([hidden, inter], top_k, halves) = LAYERS[layer];
    let case = Case::new([EXPERTS, hidden, inter], Vec::new(), [tokens, top_k]);
    case.with(|layer| (layer.op, layer.shape.halves) = (op, halves))
}

/// Another kernel occupies nearly all multiprocessors when the kernels start, and again while they run.
#[test]
#[ignore = "needs a GPU to itself"]
fn beside_a_kernel_that_takes_most_multiprocessors() {
    let layers = Layers::new();
    Hog::expect_gpu_to_itself(&layers.gpu);
    for (layer, tokens) in [0, 1].into_iter().flat_map(|layer| TOKENS[layer].map(|tokens| (layer, tokens))) {
        let mut steps = Steps::new(&layers, layer, &layers.gpu, &[tokens; 4]);
        let expected = steps.alone(&layers, 1);
        let mut scratch = Scratch::new(&layers, &layers.gpu);
        let ended_first = Hog::is_outrun(|microseconds| {
            let ended_first = Hog::runs_beside(&layers.gpu, Hog::LEFT, microseconds, || {
                (0..steps.tokens.len()).for_each(|step| steps.enqueue(step, &mut scratch));
            });
            steps.check(&expected, &format!("layer {layer} beside a kernel of {microseconds} µs"));
            ended_first
        });
        assert!(ended_first, "layer {layer}, {tokens} tokens: waits for multiprocessors that it need not have");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn two_streams_at_once() {
    const STEPS: usize = 42;
    const REPLAYS: usize = 3;
    let layers = Layers::new();
    let other = Gpu::in_context(layers.gpu.context.clone());
    let tokens = TOKENS.map(|tokens| tokens.into_iter().cycle().take(STEPS).collect::<Vec<_>>());
    let reversed: Vec<usize> = tokens[1].iter().rev().copied().collect();
    let mut streams = [Steps::new(&layers, 0, &layers.gpu, &tokens[0]), Steps::new(&layers, 1, &other, &reversed)];
    let mut scratches = streams.each_ref().map(|steps| Scratch::new(&layers, steps.gpu));
    streams.iter().for_each(|steps| steps.gpu.synchronize());

    let expected = streams.each_mut().map(|steps| steps.alone(&layers, 1));
    for step in 0..STEPS {
        streams.iter_mut().zip(&mut scratches).for_each(|(steps, scratch)| steps.enqueue(step, scratch));
    }
    streams.iter_mut().zip(&expected).for_each(|(steps, expected)| steps.check(expected, "eager"));

    let expected = streams.each_mut().map(|steps| steps.alone(&layers, REPLAYS));
    let graphs: Vec<Graph> = streams
        .iter_mut()
        .zip(&mut scratches)
        .map(|(steps, scratch)| steps.gpu.capture(|| (0..STEPS).for_each(|step| steps.enqueue(step, scratch))))
        .collect();
    for _ in 0..REPLAYS {
        graphs.iter().for_each(Graph::replay);
    }
    streams.iter_mut().zip(&expected).for_each(|(steps, expected)| steps.check(expected, "captured"));
}

/// Layers of different shapes and route counts share a workspace, eager and captured. No launch reads sums or routes of
/// another.
#[test]
#[ignore = "needs a GPU"]
fn a_workspace_and_a_grouping_remember_nothing() {
    const ROUNDS: usize = 2;
    let layers = Layers::new();
    let tokens = TOKENS.map(|[few, fewest, more, many, most, last]| [many, most, few, last, fewest, most, more, 3]);
    let mut both = [0, 1].map(|layer| Steps::new(&layers, layer, &layers.gpu, &tokens[layer]));
    // A round launches the steps in order, in reverse order, and twice from the graph.
    let expected = both.each_mut().map(|steps| steps.alone(&layers, 4 * ROUNDS));
    let mut scratch = Scratch::new(&layers, &layers.gpu);
    let steps: Vec<(usize, usize)> = (0..tokens[0].len()).flat_map(|step| [(0, step), (1, step)]).collect();
    let graph = layers.gpu.capture(|| {
        steps.iter().for_each(|&(layer, step)| both[layer].enqueue(step, &mut scratch));
    });
    for _ in 0..ROUNDS {
        steps.iter().for_each(|&(layer, step)| both[layer].enqueue(step, &mut scratch));
        graph.replay();
        steps.iter().rev().for_each(|&(layer, step)| both[layer].enqueue(step, &mut scratch));
        graph.replay();
    }
    both.iter_mut().zip(&expected).for_each(|(steps, expected)| steps.check(expected, "with one scratch"));
}
