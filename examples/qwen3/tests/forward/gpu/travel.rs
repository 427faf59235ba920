//! Tokens that travel to the ranks of their experts and back, as `docs::tensor_parallel` has it: a rank has a step of
//! its own tokens and one of the gathered tokens, each a graph. All numbers are small integers, so that sums are exact
//! in any order.

use std::ptr;

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cuda::{
        Buffer, Graph, Grouping, Kernels, LaunchError, LoraExperts, LoraLinear, Matrix, MatrixMut, Queue, Routing,
        Step, TopK, WeightTable, Workspace,
    },
    model::{Activation, Experts, ExpertsId, Linear, LinearId, Model, ModelSpec, Parallel, Shard, TpRank},
    plan::Capacity,
    routing::Batch,
};
use cudarc::{
    driver::{CudaContext, result::memcpy_dtod_sync},
    nccl::{result as nccl, sys},
};

const HIDDEN: usize = 64;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;
const RANK: usize = 4;
const ADAPTERS: usize = 2;
/// Of a rank in a step.
const MAX_TOKENS: usize = 8;
/// Gate and down of the base model are this in every output.
const BASE: f32 = 1.0;

/// The factors of a module: each rank reads one input, and each output has the sum of some ranks.
fn factors(seed: usize) -> [Vec<f32>; 2] {
    let mixed = |i: usize| (i + 97 * seed).wrapping_mul(2_654_435_761) >> 9;
    let mut a = vec![0.0; RANK * HIDDEN];
    (0..RANK).for_each(|rank| a[rank * HIDDEN + mixed(rank) % HIDDEN] = 1.0);
    [a, (0..HIDDEN * RANK).map(|i| [-1.0, 0.0, 1.0][mixed(RANK + i) % 3]).collect()]
}

/// The seed of a module of an adapter: of `o_proj`, or of an expert's projection.
fn seed(adapter: usize, of_expert: Option<(usize, usize)>) -> usize {
    1000 * adapter + of_expert.map_or(0, |(expert, projection)| 1 + 2 * expert + projection)
}

fn adapter(number: usize) -> Adapter {
    let of_experts = (0..EXPERTS).flat_map(|expert| {
        let module = move |(i, name): (usize, &str)| (format!("mlp.experts.{expert}.{name}"), Some((expert, i)));
        ["up_proj", "down_proj"].into_iter().enumerate().map(module)
    });
    let mut tensors = Vec::new();
    for (module, of_expert) in [("attn.o_proj".to_owned(), None)].into_iter().chain(of_experts) {
        let shapes = [("A", [RANK, HIDDEN]), ("B", [HIDDEN, RANK])];
        for ((side, shape), values) in shapes.into_iter().zip(factors(seed(number, of_expert))) {
            let tensor = Tensor::new(DType::F32, shape, bytemuck::cast_slice(&values).to_vec()).unwrap();
            tensors.push((format!("layers.0.{module}.lora_{side}.weight"), tensor));
        }
    }
    Adapter::from_tensors(&format!(r#"{{"peft_type": "LORA", "r": {RANK}, "lora_alpha": {RANK}}}"#), tensors).unwrap()
}

/// `B A x` of an adapter's module; zeros without an adapter.
fn delta(adapter: Option<usize>, of_expert: Option<(usize, usize)>, x: &[f32]) -> Vec<f32> {
    let Some(adapter) = adapter else { return vec![0.0; HIDDEN] };
    let [a, b] = factors(seed(adapter, of_expert));
    let dot = |row: &[f32], x: &[f32]| row.iter().zip(x).map(|(a, x)| a * x).sum::<f32>();
    let v: Vec<f32> = a.chunks(HIDDEN).map(|row| dot(row, x)).collect();
    b.chunks(RANK).map(|row| dot(row, &v)).collect()
}

#[derive(Clone)]
struct Token {
    x: Vec<f32>,
    adapter: Option<usize>,
    experts: [usize; TOP_K],
}

impl Token {
    fn new(number: usize) -> Self {
        let x = (0..HIDDEN).map(|i| [-1.0, 0.0, 1.0, 2.0][(i * 7 + number * 13) % 4]).collect();
        let first = number % EXPERTS;
        Self { x, adapter: [None, Some(0), Some(1)][number % 3], experts: [first, (first + 3) % EXPERTS] }
    }

    /// The layer's output, by naive products.
    fn expected(&self) -> Vec<f32> {
        let x: Vec<f32> = self.x.iter().zip(delta(self.adapter, None, &self.x)).map(|(x, delta)| x + delta).collect();
        let mut sums = vec![0.0; HIDDEN];
        for expert in self.experts {
            let relu2 = |delta: f32| (BASE + delta).max(0.0).powi(2);
            let inter: Vec<f32> = delta(self.adapter, Some((expert, 0)), &x).into_iter().map(relu2).collect();
            let down = delta(self.adapter, Some((expert, 1)), &inter);
            sums.iter_mut().zip(down).for_each(|(sum, down)| *sum += BASE + down);
        }
        sums
    }
}

/// A step that is a graph.
struct Half {
    routing: Routing,
    workspace: Workspace,
    graph: Graph,
}

impl Half {
    fn new(
        weights: &WeightTable,
        tokens: usize,
        record: impl FnOnce(&mut Step<'_>) -> Result<(), LaunchError>,
    ) -> Self {
        let routing = Routing::new(weights.queue(), weights.capacity(), 2).unwrap();
        let mut workspace = Workspace::new(weights).unwrap();
        let graph = weights.capture(&routing, tokens, &mut workspace, record).unwrap();
        Self { routing, workspace, graph }
    }
}

/// A rank, with the memory of what it sends and what it gets.
struct Rank {
    queue: Queue,
    weights: WeightTable,
    slots: Vec<Slot>,
    own: Half,
    gathered: Half,
    x: Buffer<f32>,
    /// `[MAX_TOKENS, HIDDEN]`: what the experts get, and then their sums.
    y: Buffer<f32>,
    /// `[MAX_TOKENS]`, and by rank, with the local numbers of its experts, `[MAX_TOKENS, TOP_K]`.
    numbers: Buffer<i32>,
    choices: Vec<Buffer<i32>>,
    /// The same of all ranks.
    all_x: Buffer<f32>,
    all_numbers: Buffer<i32>,
    all_choices: Vec<Buffer<i32>>,
    sums: Buffer<f32>,
}

fn describe(rank: TpRank) -> (Model, LinearId, ExpertsId) {
    let mut spec = ModelSpec::new();
    let o = Linear::new("layers.0.attn", Parallel::Replicated, HIDDEN).slice("o_proj", HIDDEN);
    let experts = Experts::new("layers.0.mlp.experts", EXPERTS, HIDDEN, HIDDEN).top_k(TOP_K).ungated();
    let (o, experts) = (spec.linear(o).unwrap(), spec.experts(experts).unwrap());
    let share = EXPERTS / rank.size();
    let held = rank.rank() * share..(rank.rank() + 1) * share;
    (spec.shard(Shard::new(rank).experts_tp(TpRank::SINGLE).held(experts, held)).unwrap(), o, experts)
}

impl Rank {
    fn new(ordinal: usize, rank: TpRank) -> Self {
        let context = CudaContext::new(ordinal).unwrap();
        let queue = Queue::new(&Kernels::load_into(&context).unwrap(), &context.new_stream().unwrap()).unwrap();
        let ((model, o, experts), all) = (describe(rank), rank.size() * MAX_TOKENS);
        let capacity = Capacity::tokens(all).slots(ADAPTERS).rank(RANK);
        let bytes = WeightTable::arena_bytes_for(&model, DType::F32, capacity);
        let weights = WeightTable::new(&queue, &model, DType::F32, capacity, bytes).unwrap();
        let load = |number| weights.load(number, &adapter(number).plan(&model, DType::F32).unwrap()).unwrap();
        let slots = (0..ADAPTERS).map(load).collect();

        let floats = |rows: usize, value: f32| {
            let mut buffer = Buffer::zeros(&queue, rows * HIDDEN).unwrap();
            buffer.write(&vec![value; rows * HIDDEN]).unwrap();
            buffer
        };
        let choices = |tokens: usize| (0..rank.size()).map(move |_| tokens * TOP_K);
        let choices = |tokens| choices(tokens).map(|len| Buffer::zeros(&queue, len).unwrap()).collect::<Vec<_>>();
        let (x, mut y, all_x) = (floats(MAX_TOKENS, 0.0), floats(MAX_TOKENS, 0.0), floats(all, 0.0));
        let (all_choices, mut sums) = (choices(all), floats(all, 0.0));
        let layer = LoraLinear::new(&weights, o).unwrap();
        let own = Half::new(&weights, MAX_TOKENS, |step| {
            layer.add_delta(step, Matrix::new(&x, MAX_TOKENS, HIDDEN)?, MatrixMut::new(&mut y, MAX_TOKENS, HIDDEN)?)
        });
        let layer = LoraExperts::new(&weights, experts).unwrap();
        let routes = layer.plan().routes();
        let (mut grouping, routes) = (Grouping::new(&queue, routes).unwrap(), all * TOP_K);
        let (base, mut inter) = (floats(routes, BASE), floats(routes, 0.0));
        let gathered = Half::new(&weights, all, |step| {
            let of_experts = |buffer| Matrix::new(buffer, routes, HIDDEN);
            let mut grouped = grouping.update(step, TopK::new(&all_choices[rank.rank()], TOP_K)?)?;
            let (x, out) = (Matrix::new(&all_x, all, HIDDEN)?, MatrixMut::new(&mut inter, routes, HIDDEN)?);
            layer.activate(step, &mut grouped, x, of_experts(&base)?, out, Activation::Relu2)?;
            let out = MatrixMut::new(&mut sums, all, HIDDEN)?;
            layer.combine(step, &mut grouped, of_experts(&inter)?, of_experts(&base)?, out)
        });
        let numbers = |tokens| Buffer::zeros(&queue, tokens).unwrap();
        Self {
            numbers: numbers(MAX_TOKENS),
            all_numbers: numbers(all),
            choices: choices(MAX_TOKENS),
            slots,
            own,
            gathered,
            x,
            y,
            all_x,
            all_choices,
            sums,
            weights,
            queue,
        }
    }

    /// The rank's own tokens, through the linear layer.
    fn run_own(&mut self, tokens: &[Token]) {
        let rows = |value: &dyn Fn(&Token) -> Vec<f32>| {
            let mut rows: Vec<f32> = tokens.iter().flat_map(value).collect();
            rows.resize(MAX_TOKENS * HIDDEN, 0.0);
            rows
        };
        self.x.write(&rows(&|token| token.x.clone())).unwrap();
        self.y.write(&rows(&|token| token.x.clone())).unwrap();
        let slots: Vec<Slot> =
            tokens.iter().map(|token| token.adapter.map_or(Slot::BASE, |adapter| self.slots[adapter])).collect();
        // Rows that are free have no slot, and no expert anywhere.
        let mut numbers = [-1; MAX_TOKENS];
        numbers.iter_mut().zip(&slots).for_each(|(number, slot)| *number = slot.number());
        self.numbers.write(&numbers).unwrap();
        let share = EXPERTS / self.choices.len();
        for (rank, choices) in self.choices.iter_mut().enumerate() {
            let local = |expert: usize| if expert / share == rank { (expert % share) as i32 } else { -1 };
            let mut ids: Vec<i32> = tokens.iter().flat_map(|token| token.experts.map(local)).collect();
            ids.resize(MAX_TOKENS * TOP_K, -1);
            choices.write(&ids).unwrap();
        }
        if !tokens.is_empty() {
            let Half { routing, workspace, graph } = &mut self.own;
            let batch = routing.update(&Batch::new(&slots)).unwrap();
            graph.replay(&mut self.weights.step(&batch, workspace).unwrap()).unwrap();
        }
    }

    /// The tokens of all ranks, through the experts of this one.
    fn run_gathered(&mut self) {
        let Half { routing, workspace, graph } = &mut self.gathered;
        let batch = routing.update_on_device(&self.all_numbers, None).unwrap();
        graph.replay(&mut self.weights.step(&batch, workspace).unwrap()).unwrap();
    }
}

/// How the ranks exchange.
enum Exchange {
    /// Copies, by the host, on one GPU.
    Copies,
    Nccl(Vec<sys::ncclComm_t>),
}

impl Exchange {
    fn by_nccl(ranks: usize) -> Self {
        let (mut communicators, devices) = (vec![ptr::null_mut(); ranks], (0..ranks as i32).collect::<Vec<_>>());
        // SAFETY: both have an element for each rank.
        unsafe { nccl::comm_init_all(communicators.as_mut_ptr(), ranks as i32, devices.as_ptr()) }.unwrap();
        Self::Nccl(communicators)
    }

    /// Each rank gets the parts of all, each from an address, of so many words of 32 bits.
    fn all_gather(&self, ranks: &[Rank], words: usize, part: impl Fn(&Rank) -> (u64, u64)) {
        match self {
            Self::Copies => {
                ranks.iter().for_each(|rank| rank.queue.stream().synchronize().unwrap());
                for (place, from) in ranks.iter().enumerate() {
                    for to in ranks {
                        let to = part(to).1 + (place * words * 4) as u64;
                        // SAFETY: the buffers have so many words, and nothing else uses them meanwhile.
                        unsafe { memcpy_dtod_sync(to, part(from).0, words * 4) }.unwrap();
                    }
                }
            }
            Self::Nccl(communicators) => {
                nccl::group_start().unwrap();
                for (rank, &communicator) in ranks.iter().zip(communicators) {
                    let ((from, to), stream) = (part(rank), rank.queue.stream().cu_stream().cast());
                    let word = sys::ncclDataType_t::ncclInt32;
                    // SAFETY: as above, in the order of the ranks' streams.
                    unsafe { nccl::all_gather(from as *const _, to as *mut _, words, word, communicator, stream) }
                        .unwrap();
                }
                nccl::group_end().unwrap();
            }
        }
    }

    /// Each rank gets the sums of its own rows.
    fn reduce_scatter(&self, ranks: &mut [Rank]) {
        const LEN: usize = MAX_TOKENS * HIDDEN;
        match self {
            Self::Copies => {
                let mut sums = vec![0.0; ranks.len() * LEN];
                for rank in &*ranks {
                    let mut part = vec![0.0; sums.len()];
                    rank.sums.read(&mut part).unwrap();
                    sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
                }
                ranks.iter_mut().zip(sums.chunks(LEN)).for_each(|(rank, sums)| rank.y.write(sums).unwrap());
            }
            Self::Nccl(communicators) => {
                nccl::group_start().unwrap();
                for (rank, &communicator) in ranks.iter().zip(communicators) {
                    let (from, to) = (rank.sums.device_ptr(), rank.y.device_ptr());
                    let (float, sum) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
                    let stream = rank.queue.stream().cu_stream().cast();
                    // SAFETY: as above.
                    unsafe {
                        nccl::reduce_scatter(from as *const _, to as *mut _, LEN, float, sum, communicator, stream)
                    }
                    .unwrap();
                }
                nccl::group_end().unwrap();
            }
        }
    }
}

/// Steps whose tokens are spread unevenly: a rank without any, a rank with all, and no token at all.
fn tokens_travel(ranks: &mut [Rank], exchange: &Exchange) {
    let mut number = 0;
    for spread in [[3, 2], [1, MAX_TOKENS], [0, 5], [MAX_TOKENS, 0], [0, 0], [2, 6]] {
        let batches = spread.map(|count| {
            number += count;
            (number - count..number).map(Token::new).collect::<Vec<_>>()
        });
        ranks.iter_mut().zip(&batches).for_each(|(rank, tokens)| rank.run_own(tokens));
        exchange.all_gather(ranks, MAX_TOKENS * HIDDEN, |rank| (rank.y.device_ptr(), rank.all_x.device_ptr()));
        let numbers = |rank: &Rank| (rank.numbers.device_ptr(), rank.all_numbers.device_ptr());
        exchange.all_gather(ranks, MAX_TOKENS, numbers);
        for of in 0..ranks.len() {
            let choices = |rank: &Rank| (rank.choices[of].device_ptr(), rank.all_choices[of].device_ptr());
            exchange.all_gather(ranks, MAX_TOKENS * TOP_K, choices);
        }
        ranks.iter_mut().for_each(Rank::run_gathered);
        exchange.reduce_scatter(ranks);
        for (rank, tokens) in ranks.iter().zip(&batches) {
            let mut y = vec![f32::NAN; MAX_TOKENS * HIDDEN];
            rank.y.read(&mut y).unwrap();
            for (row, token) in y.chunks(HIDDEN).zip(tokens) {
                assert_eq!(row, token.expected(), "{spread:?}, adapter {:?}", token.adapter);
            }
        }
    }
}

fn rank(number: usize) -> TpRank {
    TpRank::new(number, 2).unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn tokens_travel_on_one_gpu() {
    tokens_travel(&mut [0, 1].map(|number| Rank::new(0, rank(number))), &Exchange::Copies);
}

#[test]
#[ignore = "needs two GPUs"]
fn tokens_travel_between_ranks_by_nccl() {
    tokens_travel(&mut [0, 1].map(|number| Rank::new(number, rank(number))), &Exchange::by_nccl(2));
}
