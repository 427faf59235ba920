//! Cases of experts.

use aril::{
    Element,
    adapter::Adapter,
    cpu::{LoraExperts, Matrix, MatrixMut, Step},
    error::OperandError,
    model::{Activation, Experts, ExpertsId, Halves, ModelSpec, Shard, TpRank},
    reference::{self, Delta},
    routing::TopK,
};
use proptest::prelude::*;
use rand::rngs::StdRng;
use serde::{Deserialize, Serialize};

use super::{
    case::{self, Layer, features, halved, indices, poison_rows},
    compare::{Expected, expect_activation, expect_sum},
    factors::{Modules, Pair, fill, scaling},
    small,
    values::{Dtype, Values},
};

/// A layer of experts, its adapters, and the router's choices.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Moe {
    pub op: Op,
    pub shape: Shape,
    pub adapters: Vec<Lora>,
    pub top_k: usize,
    /// By route: a local expert id, -1, or any number that is not an expert.
    pub ids: Vec<i32>,
    /// By route, in units of one half; `None` for no weights.
    pub half_weights: Option<Vec<i8>>,
    /// By route: distinct rows, or any number that is not a row.
    pub rows: Option<Vec<i32>>,
    pub weights_on: WeightsOn,
    pub half_factor: i8,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Op {
    AddGateUp,
    WriteGateUp,
    Activate(Act),
    AddDown,
    WriteDown,
    AddCombined,
    Combine,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Act {
    Gelu,
    GeluTanh,
    Relu2,
    Silu,
    SwigluOai,
}

/// Where the router's weights are applied.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum WeightsOn {
    Input,
    Rows,
    Combine,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Shape {
    pub num_experts: usize,
    /// By local id.
    pub held: Vec<usize>,
    pub hidden: usize,
    /// On each rank.
    pub inter: usize,
    /// Rank and size.
    pub tp: (usize, usize),
    pub halves: Order,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Order {
    Ungated,
    GateUp,
    UpGate,
    Interleaved,
}

/// An adapter.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Lora {
    /// Gate (unused if the experts are ungated), up and down.
    pub modules: [Module; 3],
    /// If all experts have a module with one rank, its factors are stacked in one tensor; shared factors are not
    /// repeated.
    pub stacked: bool,
}

/// A module of an adapter.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Module {
    /// By expert; 0 where the adapter has no such module.
    pub ranks: Vec<usize>,
    /// Whether all experts share A, and B. Then all have the same rank.
    pub shared: [bool; 2],
}

/// An adapter's factors by gate, up and down, and by expert of the whole layer.
pub type Pairs = [Vec<Option<Pair>>; 3];

pub type Case = case::Case<Moe>;
pub type World<T> = case::World<T, Moe>;

const PATH: &str = "layer.experts";
const MODULES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
pub const GATE: usize = 0;
pub const UP: usize = 1;
pub const DOWN: usize = 2;

/// All operations.
pub const OPERATIONS: [Op; 7] = [
    Op::WriteDown,
    Op::AddGateUp,
    Op::Activate(Act::SwigluOai),
    Op::WriteGateUp,
    Op::AddDown,
    Op::AddCombined,
    Op::Combine,
];

/// Rows and columns of an operation's x, y, and what it writes, where there is a gate.
pub fn shapes(op: Op, [hidden, inter]: [usize; 2], [tokens, routes]: [usize; 2]) -> [[usize; 2]; 3] {
    let (x, y) = if op.is_before_activation() {
        ([tokens, hidden], [routes, 2 * inter])
    } else {
        ([routes, inter], [routes, hidden])
    };
    let target = match op {
        Op::Activate(_) => [routes, inter],
        Op::AddCombined | Op::Combine => [tokens, hidden],
        _ => y,
    };
    [x, y, target]
}

impl Act {
    pub fn activation(self) -> Activation {
        match self {
            Self::Gelu => Activation::Gelu,
            Self::GeluTanh => Activation::GeluTanh,
            Self::Relu2 => Activation::Relu2,
            Self::Silu => Activation::Silu,
            // GPT-OSS's activation, with limits that the values reach.
            Self::SwigluOai => Activation::SwigluOai { alpha: 1.702, limit: 0.75 },
        }
    }
}

impl Lora {
    /// With a different rank for each expert, from 1 to `max_rank`.
    pub fn of_own_ranks(num_experts: usize, max_rank: usize) -> Self {
        let ranks: Vec<usize> = (0..num_experts).map(|expert| max_rank - expert * 7 % max_rank).collect();
        let module = Module { ranks, shared: [false; 2] };
        Self { modules: [module.clone(), module.clone(), module], stacked: false }
    }

    /// With one rank, and factors for each expert, except the shared ones of gate, up and down.
    pub fn of_one_rank(num_experts: usize, rank: usize, shared: [[bool; 2]; 3]) -> Self {
        Self { modules: shared.map(|shared| Module { ranks: vec![rank; num_experts], shared }), stacked: true }
    }

    /// All experts share A of gate and up, and B of down.
    pub fn shared_outer(num_experts: usize, rank: usize) -> Self {
        Self::of_one_rank(num_experts, rank, [[true, false], [true, false], [false, true]])
    }

    /// Without modules.
    pub fn nothing(num_experts: usize) -> Self {
        Self::of_one_rank(num_experts, 0, [[false; 2]; 3])
    }

    pub fn is_nothing(&self) -> bool {
        self.modules.iter().flat_map(|module| &module.ranks).all(|&rank| rank == 0)
    }
}

impl Op {
    pub fn is_before_activation(self) -> bool {
        matches!(self, Self::AddGateUp | Self::WriteGateUp | Self::Activate(_))
    }

    /// Whether the operation reads `y` and writes `out`.
    pub fn has_out(self) -> bool {
        matches!(self, Self::Activate(_) | Self::Combine)
    }

    /// The operation that adds where this one overwrites.
    pub fn adding(self) -> Self {
        match self {
            Self::WriteGateUp => Self::AddGateUp,
            Self::WriteDown => Self::AddDown,
            other => other,
        }
    }
}

impl Order {
    pub fn halves(self) -> Option<Halves> {
        match self {
            Self::Ungated => None,
            Self::GateUp => Some(Halves::GateUp),
            Self::UpGate => Some(Halves::UpGate),
            Self::Interleaved => Some(Halves::Interleaved),
        }
    }
}

impl Shape {
    pub fn experts(&self) -> Experts {
        let experts = Experts::new(PATH, self.num_experts, self.hidden, self.inter * self.tp.1);
        match self.halves.halves() {
            None => experts.ungated(),
            Some(halves) => experts.halves(halves),
        }
    }

    pub fn gate_up(&self) -> usize {
        self.inter * if self.halves == Order::Ungated { 1 } else { 2 }
    }

    /// Whole input and output features of a module.
    pub fn features(&self, module: usize) -> [usize; 2] {
        let inter = self.inter * self.tp.1;
        if module == DOWN { [inter, self.hidden] } else { [self.hidden, inter] }
    }

    /// The output column of a feature of gate (if gated) or of up.
    pub fn column(&self, module: usize, feature: usize) -> usize {
        match self.halves.halves() {
            Some(halves) if module != DOWN => reference::experts::columns(halves, self.inter, feature)[module],
            _ => feature,
        }
    }

    pub fn before_activation(&self) -> &'static [usize] {
        if self.halves == Order::Ungated { &[UP] } else { &[GATE, UP] }
    }
}

impl Layer for Moe {
    const KIND: &'static str = "experts";

    type Id = ExpertsId;
    type Lora = Lora;
    type Pairs = Pairs;

    fn describe(&self, spec: &mut ModelSpec) -> (ExpertsId, Shard) {
        let Shape { held, tp, .. } = &self.shape;
        let id = spec.experts(self.shape.experts().top_k(self.top_k)).unwrap();
        let experts_tp = TpRank::new(tp.0, tp.1).unwrap();
        (id, Shard::new(TpRank::SINGLE).experts_tp(experts_tp).held(id, held.iter().copied()))
    }

    fn loras(&self) -> &[Lora] {
        &self.adapters
    }

    fn max_rank(&self) -> usize {
        let ranks = self.adapters.iter().flat_map(|lora| &lora.modules).flat_map(|module| &module.ranks);
        ranks.copied().max().unwrap_or(0).max(1)
    }

    fn shapes(&self, num_tokens: usize) -> ([[usize; 2]; 2], Option<[usize; 2]>) {
        let (routes, &Shape { hidden, inter, .. }) = (self.num_routes(), &self.shape);
        let (x, y) = if self.op.is_before_activation() {
            ([num_tokens, hidden], [routes, self.shape.gate_up()])
        } else {
            ([routes, inter], [if self.op == Op::AddCombined { num_tokens } else { routes }, hidden])
        };
        let out = match self.op {
            Op::Activate(_) => Some([routes, inter]),
            Op::Combine => Some([num_tokens, hidden]),
            _ => None,
        };
        ([x, y], out)
    }

    fn pairs_of(&self, values: Values, lora: &Lora, rng: &mut StdRng) -> Pairs {
        [GATE, UP, DOWN].map(|module| {
            let ([input, output], Module { ranks, shared }) = (self.shape.features(module), &lora.modules[module]);
            let scaling = scaling(values, rng);
            let rank = ranks.iter().copied().max().unwrap_or(0);
            // Keeps exact sums small.
            let density = if values == Values::Exact { (32.0 / input as f64).min(1.0) } else { 1.0 };
            let mut fill = |len, density| fill(values, len, density, rng);
            let common = (fill(rank * input, density), fill(output * rank, 1.0));
            let pair = |rank: &usize| {
                (*rank > 0).then(|| Pair {
                    rank: *rank,
                    scaling,
                    a: if shared[0] { common.0.clone() } else { fill(rank * input, density) },
                    b: if shared[1] { common.1.clone() } else { fill(output * rank, 1.0) },
                })
            };
            ranks.iter().map(pair).collect()
        })
    }

    fn load(&self, lora: &Lora, pairs: &Pairs) -> Adapter {
        let mut modules = Modules::default();
        for (module, pairs) in pairs.iter().enumerate() {
            if module == GATE && self.shape.halves == Order::Ungated {
                continue;
            }
            let ([input, output], shared) = (self.shape.features(module), lora.modules[module].shared);
            let whole: Vec<&Pair> = pairs.iter().flatten().collect();
            let is_uniform = whole.len() == pairs.len() && whole.iter().all(|pair| pair.rank == whole[0].rank);
            if lora.stacked && is_uniform {
                let (rank, num) = (whole[0].rank, |side: usize| if shared[side] { 1 } else { whole.len() });
                let a: Vec<f64> = whole[..num(0)].iter().flat_map(|pair| pair.a.clone()).collect();
                let b: Vec<f64> = whole[..num(1)].iter().flat_map(|pair| pair.b.clone()).collect();
                let path = format!("{PATH}.{}", MODULES[module]);
                let shapes = [[num(0), rank, input], [num(1), output, rank]];
                modules.put(&path, whole[0].scaling * rank as f64, Modules::LINEAR, (&shapes[0], &a), (&shapes[1], &b));
            } else {
                for (expert, pair) in pairs.iter().enumerate() {
                    let Some(Pair { rank, scaling, a, b }) = pair else { continue };
                    let path = format!("{PATH}.{expert}.{}", MODULES[module]);
                    modules.put(
                        &path,
                        scaling * *rank as f64,
                        Modules::LINEAR,
                        (&[*rank, input], a),
                        (&[output, *rank], b),
                    );
                }
            }
        }
        modules.adapter()
    }

    fn poison<T: Element>(case: &Case, world: &mut World<T>) {
        let routes = |token: usize| token * case.top_k..(token + 1) * case.top_k;
        let [mut of_any, mut of_here, mut of_adapted] = [(); 3].map(|()| vec![false; case.num_routes()]);
        for route in 0..case.num_routes() {
            let Some(row) = case.row(route) else { continue };
            of_any[row] = true;
            of_here[row] |= case.is_here(route);
            of_adapted[row] |= case.is_here(route) && case.adapter(route / case.top_k).is_some();
        }
        let row_is_here = |row: usize| of_here[row];
        if case.op.is_before_activation() {
            poison_rows(&mut world.x, case.x(), |token| {
                case.adapter(token).is_some() && routes(token).any(|route| case.is_here(route))
            });
        } else {
            poison_rows(&mut world.x, case.x(), |row| of_adapted[row]);
        }
        match case.op {
            Op::AddGateUp | Op::AddDown | Op::AddCombined => {}
            Op::WriteGateUp | Op::WriteDown => poison_rows(&mut world.y, case.y(), |row| !of_any[row]),
            Op::Activate(_) => {
                poison_rows(&mut world.y, case.y(), row_is_here);
                poison_rows(&mut world.out, case.out(), |row| !row_is_here(row));
            }
            Op::Combine => {
                poison_rows(&mut world.y, case.y(), row_is_here);
                poison_rows(&mut world.out, case.out(), |_| false);
            }
        }
    }

    fn expect<T: Element>(case: &Case, world: &World<T>, expected: &mut [Expected<T>]) {
        match case.op {
            Op::AddGateUp | Op::WriteGateUp => world.expect_rows(case, case.shape.before_activation(), expected),
            Op::AddDown | Op::WriteDown => world.expect_rows(case, &[DOWN], expected),
            Op::Activate(act) => world.expect_activated(case, act.activation(), expected),
            Op::AddCombined | Op::Combine => world.expect_combined(case, expected),
        }
    }
}

impl Moe {
    pub fn num_routes(&self) -> usize {
        self.ids.len()
    }

    /// The weights of a route: on its input, on its row of down, and in the combine.
    pub fn weights(&self, route: usize) -> [f64; 3] {
        let weight = self.half_weights.as_ref().map_or(1.0, |halves| f64::from(halves[route]) / 2.0);
        let factor = f64::from(self.half_factor) / 2.0;
        match self.weights_on {
            WeightsOn::Input => [weight, 1.0, factor],
            WeightsOn::Rows => [1.0, weight, factor],
            WeightsOn::Combine => [1.0, 1.0, weight * factor],
        }
    }

    /// The row of a route, if it has one.
    pub fn row(&self, route: usize) -> Option<usize> {
        let row = self.rows.as_ref().map_or(route as i32, |rows| rows[route]);
        (0..self.num_routes() as i32).contains(&row).then_some(row as usize)
    }

    /// The expert of a route, as an index into the whole layer, if this rank holds it.
    pub fn expert(&self, route: usize) -> Option<usize> {
        let local = usize::try_from(self.ids[route]).ok()?;
        self.shape.held.get(local).copied()
    }

    pub fn is_here(&self, route: usize) -> bool {
        self.row(route).is_some() && self.expert(route).is_some()
    }

    /// The router's weights.
    pub fn router(&self) -> Option<Vec<f32>> {
        self.half_weights.as_deref().map(halved)
    }

    /// The router's choices with these weights.
    pub fn top_k<'a>(&'a self, weights: Option<&'a [f32]>) -> TopK<'a> {
        let mut top_k = TopK::new(&self.ids, self.top_k).unwrap();
        if let Some(weights) = weights {
            top_k = top_k.with_weights(weights).unwrap();
        }
        if let Some(rows) = &self.rows {
            top_k = top_k.with_rows(rows).unwrap();
        }
        top_k = match self.weights_on {
            WeightsOn::Input => top_k.on_input(),
            WeightsOn::Rows => top_k.on_rows(),
            WeightsOn::Combine => top_k,
        };
        top_k.scaled(f32::from(self.half_factor) / 2.0)
    }
}

impl Case {
    /// A layer on a single rank, in rounded bf16, with contiguous rows. All tokens have the first slot and the first
    /// expert.
    pub fn new([num_experts, hidden, inter]: [usize; 3], adapters: Vec<Lora>, [num_tokens, top_k]: [usize; 2]) -> Self {
        let held = (0..num_experts).collect();
        let layer = Moe {
            op: Op::AddGateUp,
            shape: Shape { num_experts, held, hidden, inter, tp: (0, 1), halves: Order::GateUp },
            adapters,
            top_k,
            ids: Vec::new(),
            half_weights: Some(Vec::new()),
            rows: None,
            weights_on: WeightsOn::Combine,
            half_factor: 3,
        };
        let mut case = Self::of(layer, Values::Rounded, 11);
        case.choose(num_tokens, |_| 0, |_, _| 0);
        case
    }

    /// Sums of deltas in bf16 and f16 for `check_infinities`. A delta of rank 1 is infinite, a sum of several is mostly
    /// NaN.
    pub fn of_infinities(num_tokens: usize) -> Vec<Self> {
        let adapters = vec![Lora::of_own_ranks(4, 1), Lora::shared_outer(4, 1), Lora::of_own_ranks(4, 18)];
        let mut case = Self::new([4, 72, 40], adapters, [num_tokens, 4]);
        case.choose(num_tokens, |token| token % 4 - 1, |token, k| (token + k) % 4);
        let ops = [Op::AddGateUp, Op::AddDown, Op::AddCombined, Op::Combine];
        let cases = ops.map(|op| case.with(|layer| layer.op = op));
        cases
            .into_iter()
            .flat_map(|case| [Dtype::BF16, Dtype::F16].map(|dtype| Self { dtype, ..case.clone() }))
            .collect()
    }

    /// Has tokens of other slots, and experts for them.
    pub fn choose(
        &mut self,
        num_tokens: usize,
        mut slot: impl FnMut(i32) -> i32,
        mut expert: impl FnMut(i32, i32) -> i32,
    ) {
        let (tokens, top_k) = (num_tokens as i32, self.top_k as i32);
        self.slots = (0..tokens).map(&mut slot).collect();
        self.ids = (0..tokens * top_k).map(|route| expert(route / top_k, route % top_k)).collect();
        self.half_scales = Some((0..tokens).map(|token| (token % 9 - 4) as i8).collect());
        self.half_weights = Some((0..tokens * top_k).map(|route| (route % 6 - 1) as i8).collect());
    }

    /// The rows of a token.
    pub fn rows_of(&self, token: usize) -> Vec<usize> {
        match self.op {
            Op::AddCombined | Op::Combine => vec![token],
            _ => (token * self.top_k..(token + 1) * self.top_k).filter_map(|route| self.row(route)).collect(),
        }
    }
}

impl<T: Element> World<T> {
    fn expect_rows(&self, case: &Case, modules: &[usize], expected: &mut [Expected<T>]) {
        let (place, overwrites) = (case.y(), case.op.adding() != case.op);
        for route in 0..case.num_routes() {
            let Some(row) = case.row(route) else { continue };
            if overwrites {
                expected[place.at(row, 0)..][..place.cols].fill(Expected::Exactly(T::default()));
            }
            for &module in modules {
                let Some(deltas) = self.deltas(case, route, module) else { continue };
                for (feature, delta) in deltas.into_iter().enumerate() {
                    let at = place.at(row, case.shape.column(module, feature));
                    let y = if overwrites { 0.0 } else { f64::from(self.y[at].to_f32()) };
                    expected[at] = expect_sum(case.values, y, delta, self.roundings(case));
                }
            }
        }
    }

    fn expect_activated(&self, case: &Case, activation: Activation, expected: &mut [Expected<T>]) {
        let Shape { inter, ref halves, .. } = case.shape;
        for route in (0..case.num_routes()).filter(|&route| case.is_here(route)) {
            let row = case.row(route).unwrap();
            let y = case.y().row(&self.y, row);
            // A module's input to the activation.
            let inputs = |module: usize| -> Vec<Delta> {
                let deltas = self.deltas(case, route, module);
                let sum = |feature: usize| {
                    plus(y[case.shape.column(module, feature)], deltas.as_ref().map(|deltas| deltas[feature]))
                };
                (0..inter).map(sum).collect()
            };
            let (gate, up) = ((*halves != Order::Ungated).then(|| inputs(GATE)), inputs(UP));
            for feature in 0..inter {
                let gate = gate.as_ref().map(|gate| gate[feature]);
                let at = case.out().at(row, feature);
                expected[at] = expect_activation(case.values, activation, gate, up[feature], self.roundings(case));
            }
        }
    }

    fn expect_combined(&self, case: &Case, expected: &mut [Expected<T>]) {
        let place = case.target();
        for token in 0..case.num_tokens() {
            let routes = token * case.top_k..(token + 1) * case.top_k;
            let (mut weights, mut outputs) = (Vec::new(), Vec::new());
            for route in routes.filter(|&route| case.is_here(route)) {
                let deltas = self.deltas(case, route, DOWN);
                let output = match case.op {
                    Op::Combine => {
                        let y = case.y().row(&self.y, case.row(route).unwrap());
                        let delta = |feature| deltas.as_ref().map(|deltas: &Vec<Delta>| deltas[feature]);
                        y.iter().enumerate().map(|(feature, y)| plus(*y, delta(feature))).collect()
                    }
                    _ => match deltas {
                        Some(deltas) => deltas,
                        None => continue,
                    },
                };
                weights.push(case.weights(route)[2]);
                outputs.push(output);
            }
            let nothing = vec![Delta { value: 0.0, magnitude: 0.0 }; case.shape.hidden];
            let sums = match (outputs.is_empty(), case.op) {
                (false, _) => reference::experts::combine(&weights, &outputs),
                (true, Op::Combine) => nothing,
                (true, _) => continue,
            };
            for (feature, sum) in sums.into_iter().enumerate() {
                let at = place.at(token, feature);
                // Numbers of this size are then multiples of the remaining halves.
                assert!(case.values == Values::Rounded || sum.magnitude < f64::from(1 << 20), "the case is not exact");
                let y = if case.op == Op::Combine { 0.0 } else { f64::from(self.y[at].to_f32()) };
                expected[at] = expect_sum(case.values, y, sum, self.roundings(case));
            }
        }
    }

    /// The delta that the adapter of a route's token adds to a module of the route's expert, if the expert is local and
    /// adapted.
    fn deltas(&self, case: &Case, route: usize, module: usize) -> Option<Vec<Delta>> {
        let (token, row, expert) = (route / case.top_k, case.row(route)?, case.expert(route)?);
        let Pair { rank, scaling, a, b } = self.pairs[case.adapter(token)?][module][expert].as_ref()?;
        let [input, output] = case.shape.features(module);
        let here = case.shape.tp.0 * case.shape.inter..(case.shape.tp.0 + 1) * case.shape.inter;
        let (inputs, outputs) = if module == DOWN { (here, 0..output) } else { (0..input, here) };
        let here = Pair {
            rank: *rank,
            scaling: *scaling,
            a: a.chunks(input).flat_map(|row| row[inputs.clone()].to_vec()).collect(),
            b: b[outputs.start * rank..outputs.end * rank].to_vec(),
        };
        let x = case.x().row(&self.x, if module == DOWN { row } else { token });
        Some(here.linear::<T>(&x, case.scale(token) * case.weights(route)[usize::from(module == DOWN)]))
    }

    /// Bounds the error: each product and sum over an input, a rank and the routes, and a few scalings, rounds once.
    fn roundings(&self, case: &Case) -> usize {
        case.x().cols + self.max_rank + case.top_k + 12
    }
}

fn plus(y: f64, delta: Option<Delta>) -> Delta {
    let Delta { value, magnitude } = delta.unwrap_or(Delta { value: 0.0, magnitude: 0.0 });
    Delta { value: y + value, magnitude: y.abs() + magnitude }
}

/// The largest sizes of cases.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub max_features: usize,
    pub max_tokens: usize,
    pub max_rank: usize,
    pub max_experts: usize,
    pub max_top_k: usize,
}

impl Sizes {
    /// Small enough for a debug build on the CPU.
    pub const SMALL: Self = Self { max_features: 90, max_tokens: 12, max_rank: 20, max_experts: 6, max_top_k: 4 };

    /// More than one of every tile of the kernels.
    pub fn large() -> Self {
        let large = Self { max_features: 900, max_tokens: 150, max_rank: 64, max_experts: 12, max_top_k: 8 };
        small::choose(large, Self { max_features: 136, max_tokens: 24, max_rank: 40, max_experts: 6, max_top_k: 4 })
    }
}

/// Any case.
pub fn cases(sizes: Sizes) -> impl Strategy<Value = Case> {
    case::cases(sizes.max_tokens, move |num_tokens, num_adapters| layers(sizes, num_tokens, num_adapters))
}

fn layers(sizes: Sizes, num_tokens: usize, num_adapters: usize) -> impl Strategy<Value = Moe> {
    (any_shape(sizes).boxed(), 1..=sizes.max_top_k).prop_flat_map(move |(shape, top_k)| {
        let num_routes = num_tokens * top_k;
        let op = ops(shape.halves != Order::Ungated).boxed();
        let adapters = prop::collection::vec(loras(shape.num_experts, sizes.max_rank).boxed(), num_adapters);
        let ids = prop_oneof![
            indices(shape.held.len(), num_routes).boxed(),
            different_indices(shape.held.len(), num_tokens, top_k).boxed(),
        ];
        let weights_on = prop_oneof![Just(WeightsOn::Input), Just(WeightsOn::Rows), Just(WeightsOn::Combine)];
        let weights = prop::option::of(prop::collection::vec(-1..=4_i8, num_routes));
        (op, adapters, ids, weights, rows(num_routes), weights_on, 1..=4_i8).prop_map(
            move |(op, adapters, ids, half_weights, rows, weights_on, half_factor)| {
                let shape = shape.clone();
                Moe { op, shape, adapters, top_k, ids, half_weights, rows, weights_on, half_factor }
            },
        )
    })
}

fn ops(gated: bool) -> impl Strategy<Value = Op> {
    let act = prop_oneof![
        Just(Act::Gelu),
        Just(Act::GeluTanh),
        Just(Act::Relu2),
        Just(Act::Silu),
        Just(if gated { Act::SwigluOai } else { Act::Relu2 }),
    ];
    prop_oneof![
        1 => Just(Op::AddGateUp),
        1 => Just(Op::WriteGateUp),
        2 => act.prop_map(Op::Activate),
        1 => Just(Op::AddDown),
        1 => Just(Op::WriteDown),
        1 => Just(Op::AddCombined),
        1 => Just(Op::Combine),
    ]
}

fn any_shape(sizes: Sizes) -> impl Strategy<Value = Shape> {
    let features = || features(sizes.max_features);
    let halves = prop_oneof![Just(Order::Ungated), Just(Order::GateUp), Just(Order::UpGate), Just(Order::Interleaved)];
    let tp = prop_oneof![2 => Just((0, 1)), 1 => Just((0, 2)), 1 => Just((1, 2))];
    // All experts in order, all in another order, or some.
    let held = (1..=sizes.max_experts).prop_flat_map(|num_experts| {
        let all: Vec<usize> = (0..num_experts).collect();
        let some = prop::sample::subsequence(all.clone(), 0..=num_experts).prop_shuffle();
        (Just(num_experts), prop_oneof![Just(all.clone()), Just(all).prop_shuffle(), some])
    });
    (held, features(), features(), tp, halves).prop_map(|((num_experts, held), hidden, inter, tp, halves)| Shape {
        num_experts,
        held,
        hidden,
        inter,
        tp,
        halves,
    })
}

/// A router's choices: distinct for each token, as far as possible; some are -1 or out of range.
fn different_indices(end: usize, num_tokens: usize, top_k: usize) -> impl Strategy<Value = Vec<i32>> {
    let end = end as i32;
    let stray = prop_oneof![Just(i32::MIN), Just(i32::MAX), Just(end), Just(-1)];
    let strays = prop::collection::vec(prop::option::weighted(0.1, stray), top_k);
    let token = (Just((0..end.max(1)).collect::<Vec<_>>()).prop_shuffle(), strays);
    prop::collection::vec(token, num_tokens).prop_map(|tokens| {
        let token = |(experts, strays): (Vec<i32>, Vec<Option<i32>>)| {
            strays
                .into_iter()
                .zip(experts.into_iter().cycle())
                .map(|(stray, expert)| stray.unwrap_or(expert))
                .collect::<Vec<_>>()
        };
        tokens.into_iter().flat_map(token).collect()
    })
}

/// No rows, a permutation, or a permutation where some routes have no row.
pub fn rows(num_routes: usize) -> impl Strategy<Value = Option<Vec<i32>>> {
    let end = num_routes as i32;
    let permutation = move || Just((0..end).collect::<Vec<_>>()).prop_shuffle();
    let stray = prop_oneof![Just(-1), Just(end), Just(i32::MAX), Just(i32::MIN)];
    let strays = prop::collection::vec(prop::option::weighted(0.2, stray), num_routes);
    let some = (permutation(), strays).prop_map(|(rows, strays)| {
        rows.into_iter().zip(strays).map(|(row, stray)| stray.unwrap_or(row)).collect::<Vec<_>>()
    });
    prop_oneof![Just(None), permutation().prop_map(Some), some.prop_map(Some)]
}

fn loras(num_experts: usize, max_rank: usize) -> impl Strategy<Value = Lora> {
    let module = move || {
        let rank = prop_oneof![1 => Just(0), 4 => 1..=max_rank.min(17), 3 => 1..=max_rank];
        // Whether ranks differ by expert, and which experts are adapted.
        let own = prop::option::weighted(0.3, prop::collection::vec(1..=max_rank, num_experts));
        let has = prop_oneof![Just(vec![true; num_experts]), prop::collection::vec(any::<bool>(), num_experts)];
        (rank, own, has, any::<[bool; 2]>()).prop_map(|(rank, own, has, shared)| {
            let own = own.filter(|_| shared == [false; 2] && rank > 0);
            let rank = |expert: usize| own.as_ref().map_or(rank, |own| own[expert]) * usize::from(has[expert]);
            Module { ranks: (0..has.len()).map(rank).collect(), shared }
        })
    };
    ([module(), module(), module()], any::<bool>()).prop_map(|(modules, stacked)| Lora { modules, stacked })
}

/// An operation of the CPU on `x`, and on `y` if it only reads `y`.
pub fn launch_on_cpu<T: Element>(
    experts: &LoraExperts,
    op: Op,
    step: &mut Step<'_>,
    top_k: &TopK<'_>,
    [x, y]: [Matrix<'_, T>; 2],
    target: MatrixMut<'_, T>,
) -> Result<(), OperandError> {
    match op {
        Op::AddGateUp => experts.add_gate_up_delta(step, top_k, x, target),
        Op::WriteGateUp => experts.write_gate_up_delta(step, top_k, x, target),
        Op::Activate(act) => experts.activate(step, top_k, x, y, target, act.activation()),
        Op::AddDown => experts.add_down_delta(step, top_k, x, target),
        Op::WriteDown => experts.write_down_delta(step, top_k, x, target),
        Op::AddCombined => experts.add_combined_delta(step, top_k, x, target),
        Op::Combine => experts.combine(step, top_k, x, y, target),
    }
}
