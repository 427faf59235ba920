//! Problems for the operations on experts, and the answers that the reference gives: as [`cases`](super::cases) for other layers.
//!
//! What no operation may read is NaN: gaps and guards, rows of `x` whose token has no adapter, rows of what is only read that no
//! route has which is here, and what is only written. What none may write is compared bit by bit.

use std::fmt::Write as _;

use aril::{
    DType, Element, Slot,
    adapter::{Adapter, Tensor},
    cpu::{LoraExperts, Matrix, MatrixMut, Step},
    error::OperandError,
    model::{Activation, Experts, ExpertsId, Halves, Linear, Model, ModelSpec, Parallel, Shard, TpRank},
    plan::Capacity,
    reference::{self, Delta, Factors},
    routing::{Batch, TopK},
};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize};

use super::cases::{Dtype, Expected, Place, Values, compare, error_of_sum, expect_sum, expect_within};

/// A problem.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Case {
    pub op: Op,
    pub dtype: Dtype,
    pub values: Values,
    pub shape: Shape,
    pub adapters: Vec<Lora>,
    /// Slots beyond those that are loaded.
    pub empty_slots: usize,
    /// By token: a slot, -1, or anything else that is no slot.
    pub slots: Vec<i32>,
    /// By token, in halves; none for no scales.
    pub half_scales: Option<Vec<i8>>,
    pub top_k: usize,
    /// By route: a local expert id, -1, or anything else that is none.
    pub ids: Vec<i32>,
    /// By route, in halves; none for no weights.
    pub half_weights: Option<Vec<i8>>,
    /// By route: different rows, or anything that is none.
    pub rows: Option<Vec<i32>>,
    pub weighed: Weighed,
    pub half_factor: i8,
    /// Elements before the first row, and from the end of a row to the next: of x, y and out.
    pub offsets: [usize; 3],
    pub gaps: [usize; 3],
    pub seed: u64,
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
pub enum Weighed {
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
    /// Gate (of which nothing is used if there is none), up and down.
    pub modules: [Module; 3],
    /// Modules that all experts have, in one rank, are stacked in one tensor; in one that is not repeated if they are shared.
    pub stacked: bool,
}

/// A module of an adapter.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Module {
    /// By expert; 0 where the adapter has nothing.
    pub ranks: Vec<usize>,
    /// Whether all experts have the same A, and B: only in one rank.
    pub shared: [bool; 2],
}

/// The factors of a module of an expert as they are in memory, whole.
#[derive(Clone, Debug)]
pub struct Pair {
    pub rank: usize,
    pub scaling: f64,
    /// `[rank, in]`
    pub a: Vec<f64>,
    /// `[out, rank]`
    pub b: Vec<f64>,
}

/// An adapter's factors by gate, up and down, and by expert of the whole layer.
pub type Pairs = [Vec<Option<Pair>>; 3];

/// What a case stands for.
pub struct World<T> {
    pub model: Model,
    pub id: ExpertsId,
    pub adapters: Vec<Adapter>,
    /// By adapter.
    pub pairs: Vec<Pairs>,
    pub slots: Vec<Slot>,
    pub scales: Option<Vec<f32>>,
    pub weights: Option<Vec<f32>>,
    pub num_slots: usize,
    pub max_rank: usize,
    /// The whole buffers.
    pub x: Vec<T>,
    pub y: Vec<T>,
    pub out: Vec<T>,
}

const PATH: &str = "layer.experts";
const MODULES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
pub const GATE: usize = 0;
pub const UP: usize = 1;
pub const DOWN: usize = 2;

impl Act {
    pub fn activation(self) -> Activation {
        match self {
            Self::Gelu => Activation::Gelu,
            Self::GeluTanh => Activation::GeluTanh,
            Self::Relu2 => Activation::Relu2,
            Self::Silu => Activation::Silu,
            // As that of GPT-OSS, but within what values reach.
            Self::SwigluOai => Activation::SwigluOai { alpha: 1.702, limit: 0.75 },
        }
    }
}

impl Lora {
    /// Of another rank for each expert, from 1 to `max_rank`.
    pub fn of_own_ranks(num_experts: usize, max_rank: usize) -> Self {
        let ranks: Vec<usize> = (0..num_experts).map(|expert| max_rank - expert * 7 % max_rank).collect();
        let module = Module { ranks, shared: [false; 2] };
        Self { modules: [module.clone(), module.clone(), module], stacked: false }
    }

    /// Of one rank, with factors for each expert but those of gate, up and down that are shared.
    pub fn of_one_rank(num_experts: usize, rank: usize, shared: [[bool; 2]; 3]) -> Self {
        Self { modules: shared.map(|shared| Module { ranks: vec![rank; num_experts], shared }), stacked: true }
    }

    /// All experts have the same A of gate and up, and the same B of down.
    pub fn shared_outer(num_experts: usize, rank: usize) -> Self {
        Self::of_one_rank(num_experts, rank, [[true, false], [true, false], [false, true]])
    }

    /// Without anything for any expert.
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

    /// Whether it reads `y`, and writes `out`.
    pub fn has_out(self) -> bool {
        matches!(self, Self::Activate(_) | Self::Combine)
    }

    /// What adds to what this overwrites.
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

    /// What the rank holds, where the other layers are whole.
    pub fn shard(&self, id: ExpertsId) -> Shard {
        let tp = TpRank::new(self.tp.0, self.tp.1).unwrap();
        Shard::new(TpRank::SINGLE).experts_tp(tp).held(id, self.held.iter().copied())
    }

    pub fn gate_up(&self) -> usize {
        self.inter * if self.halves == Order::Ungated { 1 } else { 2 }
    }

    /// Whole input and output features of a module.
    pub fn features(&self, module: usize) -> [usize; 2] {
        let inter = self.inter * self.tp.1;
        if module == DOWN { [inter, self.hidden] } else { [self.hidden, inter] }
    }

    /// Where a feature of gate (if there is one) or of up is in the output.
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

impl Case {
    /// Of a layer that no other rank has a part of, in rounded bf16, rows one behind the other; tokens of the first slot with the first
    /// expert.
    pub fn new([num_experts, hidden, inter]: [usize; 3], adapters: Vec<Lora>, [num_tokens, top_k]: [usize; 2]) -> Self {
        let held = (0..num_experts).collect();
        let mut case = Self {
            op: Op::AddGateUp,
            dtype: Dtype::BF16,
            values: Values::Rounded,
            shape: Shape { num_experts, held, hidden, inter, tp: (0, 1), halves: Order::GateUp },
            adapters,
            empty_slots: 1,
            slots: Vec::new(),
            half_scales: Some(Vec::new()),
            top_k,
            ids: Vec::new(),
            half_weights: Some(Vec::new()),
            rows: None,
            weighed: Weighed::Combine,
            half_factor: 3,
            offsets: [0; 3],
            gaps: [0; 3],
            seed: 11,
        };
        case.choose(num_tokens, |_| 0, |_, _| 0);
        case
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

    pub fn num_tokens(&self) -> usize {
        self.slots.len()
    }

    pub fn num_routes(&self) -> usize {
        self.ids.len()
    }

    pub fn x(&self) -> Place {
        if self.op.is_before_activation() {
            self.place(0, self.num_tokens(), self.shape.hidden)
        } else {
            self.place(0, self.num_routes(), self.shape.inter)
        }
    }

    pub fn y(&self) -> Place {
        let rows = if self.op == Op::AddCombined { self.num_tokens() } else { self.num_routes() };
        let cols = if self.op.is_before_activation() { self.shape.gate_up() } else { self.shape.hidden };
        self.place(1, rows, cols)
    }

    /// Of no use to those that write `y`.
    pub fn out(&self) -> Place {
        match self.op {
            Op::Activate(_) => self.place(2, self.num_routes(), self.shape.inter),
            Op::Combine => self.place(2, self.num_tokens(), self.shape.hidden),
            _ => self.place(2, 0, 0),
        }
    }

    /// Where what is written is.
    pub fn target(&self) -> Place {
        if self.op.has_out() { self.out() } else { self.y() }
    }

    /// The rows of it that are of a token.
    pub fn rows_of(&self, token: usize) -> Vec<usize> {
        match self.op {
            Op::AddCombined | Op::Combine => vec![token],
            _ => (token * self.top_k..(token + 1) * self.top_k).filter_map(|route| self.row(route)).collect(),
        }
    }

    fn place(&self, matrix: usize, rows: usize, cols: usize) -> Place {
        Place { offset: self.offsets[matrix], rows, cols, stride: cols + self.gaps[matrix] }
    }

    /// The case that `ARIL_EXPERTS_CASE` asks for instead of random ones.
    pub fn from_environment() -> Option<Self> {
        let text = std::env::var("ARIL_EXPERTS_CASE").ok()?;
        Some(serde_json::from_str(&text).expect("ARIL_EXPERTS_CASE is a printed case"))
    }

    /// What a route's input is multiplied by, the row of down, and that row in the combine.
    pub fn weights(&self, route: usize) -> [f64; 3] {
        let weight = self.half_weights.as_ref().map_or(1.0, |halves| f64::from(halves[route]) / 2.0);
        let factor = f64::from(self.half_factor) / 2.0;
        match self.weighed {
            Weighed::Input => [weight, 1.0, factor],
            Weighed::Rows => [1.0, weight, factor],
            Weighed::Combine => [1.0, 1.0, weight * factor],
        }
    }

    /// How to run it again.
    pub fn replay(&self) -> String {
        format!("ARIL_EXPERTS_CASE='{}'", serde_json::to_string(self).expect("a case is plain data"))
    }

    /// The row of a route, if it has one.
    pub fn row(&self, route: usize) -> Option<usize> {
        let row = self.rows.as_ref().map_or(route as i32, |rows| rows[route]);
        (0..self.num_routes() as i32).contains(&row).then_some(row as usize)
    }

    /// The expert of a route, by its place in the whole layer, if this rank holds it.
    pub fn expert(&self, route: usize) -> Option<usize> {
        let local = usize::try_from(self.ids[route]).ok()?;
        self.shape.held.get(local).copied()
    }

    pub fn is_here(&self, route: usize) -> bool {
        self.row(route).is_some() && self.expert(route).is_some()
    }

    /// The adapter of a token.
    pub fn adapter(&self, token: usize) -> Option<usize> {
        usize::try_from(self.slots[token]).ok().filter(|&slot| slot < self.adapters.len())
    }

    pub fn world<T: Element>(&self) -> World<T> {
        let mut rng = StdRng::seed_from_u64(self.seed);
        let pairs = self.pairs::<T>(&mut rng);
        let adapters = self.adapters.iter().zip(&pairs).map(|(lora, pairs)| self.load(lora, pairs)).collect();
        World { adapters, ..self.world_of(pairs, &mut rng) }
    }

    /// With those factors, but without the adapters that have them.
    pub fn world_of<T: Element>(&self, pairs: Vec<Pairs>, rng: &mut StdRng) -> World<T> {
        let (model, id) = self.model();
        let mut world = World {
            model,
            id,
            adapters: Vec::new(),
            pairs,
            slots: self.slots.iter().map(|&slot| bytemuck::cast(slot)).collect(),
            scales: self.half_scales.as_deref().map(halved),
            weights: self.half_weights.as_deref().map(halved),
            num_slots: self.adapters.len() + self.empty_slots,
            max_rank: self.max_rank(),
            x: self.x().buffer(self.values, rng),
            y: self.y().buffer(self.values, rng),
            out: self.out().buffer(self.values, rng),
        };
        self.poison(&mut world);
        world
    }

    pub fn model(&self) -> (Model, ExpertsId) {
        let mut spec = ModelSpec::new();
        // Other layers, so that entries have somewhere to go wrong.
        let other = |path: &str| Linear::new(path, Parallel::Replicated, 3).slice("m0", 5);
        spec.linear(other("before")).unwrap();
        let id = spec.experts(self.shape.experts().top_k(self.top_k)).unwrap();
        spec.linear(other("behind")).unwrap();
        (spec.shard(self.shape.shard(id)).unwrap(), id)
    }

    /// By adapter.
    pub fn pairs<T: Element>(&self, rng: &mut StdRng) -> Vec<Pairs> {
        self.adapters.iter().map(|lora| self.pairs_of::<T>(lora, rng)).collect()
    }

    pub fn top_k<'a>(&'a self, weights: Option<&'a [f32]>) -> TopK<'a> {
        let mut top_k = TopK::new(&self.ids, self.top_k).unwrap();
        if let Some(weights) = weights {
            top_k = top_k.with_weights(weights).unwrap();
        }
        if let Some(rows) = &self.rows {
            top_k = top_k.with_rows(rows).unwrap();
        }
        top_k = match self.weighed {
            Weighed::Input => top_k.on_input(),
            Weighed::Rows => top_k.on_rows(),
            Weighed::Combine => top_k,
        };
        top_k.scaled(f32::from(self.half_factor) / 2.0)
    }

    pub fn max_rank(&self) -> usize {
        let ranks = self.adapters.iter().flat_map(|lora| &lora.modules).flat_map(|module| &module.ranks);
        ranks.copied().max().unwrap_or(0).max(1)
    }

    /// Makes NaN what must not be read.
    fn poison<T: Element>(&self, world: &mut World<T>) {
        let routes = |token: usize| token * self.top_k..(token + 1) * self.top_k;
        let [mut of_any, mut of_here, mut of_adapted] = [(); 3].map(|()| vec![false; self.num_routes()]);
        for route in 0..self.num_routes() {
            let Some(row) = self.row(route) else { continue };
            of_any[row] = true;
            of_here[row] |= self.is_here(route);
            of_adapted[row] |= self.is_here(route) && self.adapter(route / self.top_k).is_some();
        }
        let row_is_here = |row: usize| of_here[row];
        let fill = |buffer: &mut [T], place: Place, is_read: &dyn Fn(usize) -> bool| {
            for row in (0..place.rows).filter(|&row| !is_read(row)) {
                buffer[place.at(row, 0)..][..place.cols].fill(T::from_f32(f32::NAN));
            }
        };
        if self.op.is_before_activation() {
            fill(&mut world.x, self.x(), &|token| {
                self.adapter(token).is_some() && routes(token).any(|route| self.is_here(route))
            });
        } else {
            fill(&mut world.x, self.x(), &|row| of_adapted[row]);
        }
        match self.op {
            Op::AddGateUp | Op::AddDown | Op::AddCombined => {}
            Op::WriteGateUp | Op::WriteDown => fill(&mut world.y, self.y(), &|row| !of_any[row]),
            Op::Activate(_) => {
                fill(&mut world.y, self.y(), &row_is_here);
                fill(&mut world.out, self.out(), &|row| !row_is_here(row));
            }
            Op::Combine => {
                fill(&mut world.y, self.y(), &row_is_here);
                fill(&mut world.out, self.out(), &|_| false);
            }
        }
    }

    pub fn pairs_of<T: Element>(&self, lora: &Lora, rng: &mut StdRng) -> Pairs {
        [GATE, UP, DOWN].map(|module| {
            let ([input, output], Module { ranks, shared }) = (self.shape.features(module), &lora.modules[module]);
            // So that exact cases scale by a power of two.
            let scaling = [0.5, 1.0, 2.0][rng.random_range(0..3)];
            let rank = ranks.iter().copied().max().unwrap_or(0);
            let mut fill = |len: usize, density: f64| -> Vec<f64> {
                let value = |rng: &mut StdRng| f64::from(T::from_f32(self.values.value(rng)).to_f32());
                (0..len).map(|_| if rng.random_bool(density) { value(rng) } else { 0.0 }).collect()
            };
            // Exact sums must not become too large.
            let density = if self.values == Values::Exact { (32.0 / input as f64).min(1.0) } else { 1.0 };
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

    /// The adapter, as PEFT or others would write it.
    pub fn load(&self, lora: &Lora, pairs: &Pairs) -> Adapter {
        let (mut tensors, mut alphas) = (Vec::new(), String::new());
        let mut put = |path: &str, alpha: f64, a: (&[usize], &[f64]), b: (&[usize], &[f64])| {
            for (side, (shape, values)) in [("A", a), ("B", b)] {
                let values: Vec<f32> = values.iter().map(|&value| value as f32).collect();
                let tensor = Tensor::new(DType::F32, shape, bytemuck::cast_slice(&values).to_vec()).unwrap();
                tensors.push((format!("{path}.lora_{side}.weight"), tensor));
            }
            write!(alphas, r#"{}"{path}": {alpha}"#, if alphas.is_empty() { "" } else { ", " }).unwrap();
        };
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
                put(&path, whole[0].scaling * rank as f64, (&shapes[0], &a), (&shapes[1], &b));
            } else {
                for (expert, pair) in pairs.iter().enumerate() {
                    let Some(Pair { rank, scaling, a, b }) = pair else { continue };
                    let path = format!("{PATH}.{expert}.{}", MODULES[module]);
                    put(&path, scaling * *rank as f64, (&[*rank, input], a), (&[output, *rank], b));
                }
            }
        }
        // The other layers are always adapted, with weights that would show.
        for path in ["before.m0", "behind.m0"] {
            put(path, 1.0, (&[1, 3], &[1e4; 3]), (&[5, 1], &[1e4; 5]));
        }
        let config = format!(r#"{{"peft_type": "LORA", "lora_alpha": 1, "alpha_pattern": {{{alphas}}}}}"#);
        Adapter::from_tensors(&config, tensors).unwrap()
    }
}

impl<T: Element> World<T> {
    pub fn batch(&self) -> Batch<'_> {
        match &self.scales {
            Some(scales) => Batch::new(&self.slots).with_scales(scales).unwrap(),
            None => Batch::new(&self.slots),
        }
    }

    /// The tightest bounds on the case; of no tokens or slots, those of one.
    pub fn capacity(&self, case: &Case) -> Capacity {
        Capacity::tokens(case.num_tokens().max(1)).slots(self.num_slots.max(1)).rank(self.max_rank)
    }

    pub fn top_k<'a>(&'a self, case: &'a Case) -> TopK<'a> {
        case.top_k(self.weights.as_deref())
    }

    /// What the operation writes to, as it was.
    pub fn target(&self, case: &Case) -> &[T] {
        if case.op.has_out() { &self.out } else { &self.y }
    }

    /// What the reference makes of it.
    pub fn expected(&self, case: &Case) -> Vec<Expected<T>> {
        let mut expected: Vec<_> = self.target(case).iter().map(|&value| Expected::Untouched(value)).collect();
        match case.op {
            Op::AddGateUp | Op::WriteGateUp => self.expect_rows(case, case.shape.before_activation(), &mut expected),
            Op::AddDown | Op::WriteDown => self.expect_rows(case, &[DOWN], &mut expected),
            Op::Activate(act) => self.expect_activated(case, act.activation(), &mut expected),
            Op::AddCombined | Op::Combine => self.expect_combined(case, &mut expected),
        }
        expected
    }

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
            // What the activation takes of a module.
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
                expected[at] = self.expect_activation(case, activation, gate, up[feature]);
            }
        }
    }

    /// The activation of what is itself off by a little.
    fn expect_activation(&self, case: &Case, activation: Activation, gate: Option<Delta>, up: Delta) -> Expected<T> {
        let value = reference::experts::activation(activation, gate.map(|gate| gate.value), up.value);
        let exact = |value: f64| f64::from(value as f32) == value;
        // The gate's function, of what it is, and what the result is multiplied by.
        let (x, factor) = (gate.unwrap_or(up), gate.map(|_| up));
        if case.values == Values::Exact && activation == Activation::Relu2 && exact(x.value.powi(2)) && exact(value) {
            return Expected::Exactly(T::from_f32(value as f32));
        }
        // How far off each is, and no less than how large.
        let error = |sum: Delta| {
            if case.values == Values::Exact { 0.0 } else { error_of_sum::<T>(sum, self.roundings(case)) }
        };
        let x_error = error(x);
        let (factor, factor_error) = factor.map_or((1.0, 0.0), |up| (up.value.abs() + error(up) + 1.0, error(up)));
        // The functions are no steeper than 1.13, nor larger than what they are of; a square is both.
        let largest = x.value.abs() + x_error;
        let (steepest, result) = match activation {
            Activation::Relu2 => (2.0 * largest, largest.powi(2)),
            _ => (1.13, largest),
        };
        // A sigmoid has the error of its argument, and it and the rest a few roundings.
        let computed = (16.0 + 4.0 * 1.702 * largest) * DType::F32.unit_roundoff() * result * factor;
        expect_within(value, steepest * x_error * factor + result * factor_error + computed)
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
                // So that numbers of this size are multiples of what is left of the halves.
                assert!(case.values == Values::Rounded || sum.magnitude < f64::from(1 << 20), "the case is not exact");
                let y = if case.op == Op::Combine { 0.0 } else { f64::from(self.y[at].to_f32()) };
                expected[at] = expect_sum(case.values, y, sum, self.roundings(case));
            }
        }
    }

    /// What the adapter of a route's token adds to a module of its expert, if it is here and has any.
    fn deltas(&self, case: &Case, route: usize, module: usize) -> Option<Vec<Delta>> {
        let (token, row, expert) = (route / case.top_k, case.row(route)?, case.expert(route)?);
        let pair = self.pairs[case.adapter(token)?][module][expert].as_ref()?;
        let Pair { rank, a, b, .. } = pair;
        let [input, output] = case.shape.features(module);
        let here = case.shape.tp.0 * case.shape.inter..(case.shape.tp.0 + 1) * case.shape.inter;
        let (inputs, outputs) = if module == DOWN { (here, 0..output) } else { (0..input, here) };
        let a: Vec<f64> = a.chunks(input).flat_map(|row| row[inputs.clone()].to_vec()).collect();
        let b = &b[outputs.start * rank..outputs.end * rank];
        let scale = self.scales.as_ref().map_or(1.0, |scales| scales[token].into());
        let scaling = pair.scaling * scale * case.weights(route)[usize::from(module == DOWN)];
        let x = case.x().row(&self.x, if module == DOWN { row } else { token });
        Some(reference::linear(&x, Factors { a: &a, b, rank: *rank, scaling }))
    }

    /// Each of the products and sums over an input, a rank and the routes, and a few scalings, rounds once.
    fn roundings(&self, case: &Case) -> usize {
        case.x().cols + self.max_rank + case.top_k + 12
    }
}

pub fn halved(halves: &[i8]) -> Vec<f32> {
    halves.iter().map(|&half| f32::from(half) / 2.0).collect()
}

fn plus(y: f64, delta: Option<Delta>) -> Delta {
    let Delta { value, magnitude } = delta.unwrap_or(Delta { value: 0.0, magnitude: 0.0 });
    Delta { value: y + value, magnitude: y.abs() + magnitude }
}

/// How large the cases are.
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
    /// Past every tile of the kernels.
    pub const LARGE: Self = Self { max_features: 900, max_tokens: 150, max_rank: 64, max_experts: 12, max_top_k: 8 };
}

/// Any case.
pub fn cases(sizes: Sizes) -> impl Strategy<Value = Case> {
    let size = (shapes(sizes), 1..=sizes.max_top_k, 0..=sizes.max_tokens, 0..=4_usize, 0..=2_usize);
    size.prop_flat_map(move |(shape, top_k, num_tokens, num_adapters, empty_slots)| {
        let num_routes = num_tokens * top_k;
        let op = ops(shape.halves != Order::Ungated);
        let adapters = prop::collection::vec(loras(shape.num_experts, sizes.max_rank), num_adapters);
        let slots = indices(num_adapters + empty_slots, num_tokens);
        let ids = prop_oneof![
            indices(shape.held.len(), num_routes).boxed(),
            different_indices(shape.held.len(), num_tokens, top_k).boxed(),
        ];
        let weighed = prop_oneof![Just(Weighed::Input), Just(Weighed::Rows), Just(Weighed::Combine)];
        let choices = (ids, rows(num_routes), weighed, 1..=4_i8);
        let scales = prop::option::of(prop::collection::vec(-4..=4_i8, num_tokens));
        let weights = prop::option::of(prop::collection::vec(-1..=4_i8, num_routes));
        let gaps = || prop::array::uniform3(prop_oneof![Just(0), 0..9_usize]);
        let dtype = prop_oneof![Just(Dtype::BF16), Just(Dtype::F16), Just(Dtype::F32)];
        let values = prop_oneof![Just(Values::Exact), Just(Values::Rounded)];
        let numbers = (dtype, values, scales, weights, gaps(), gaps(), any::<u64>());
        (op, adapters, slots, choices, numbers).prop_map(
            move |(op, adapters, slots, (ids, rows, weighed, half_factor), numbers)| {
                let (dtype, values, half_scales, half_weights, offsets, gaps, seed) = numbers;
                Case {
                    op,
                    dtype,
                    values,
                    shape: shape.clone(),
                    adapters,
                    empty_slots,
                    slots,
                    half_scales,
                    top_k,
                    ids,
                    half_weights,
                    rows,
                    weighed,
                    half_factor,
                    offsets,
                    gaps,
                    seed,
                }
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

fn shapes(sizes: Sizes) -> impl Strategy<Value = Shape> {
    let features =
        || prop_oneof![1..=sizes.max_features, 1..=20_usize, (1..=sizes.max_features / 8).prop_map(|n| n * 8)];
    let halves = prop_oneof![Just(Order::Ungated), Just(Order::GateUp), Just(Order::UpGate), Just(Order::Interleaved)];
    let tp = prop_oneof![2 => Just((0, 1)), 1 => Just((0, 2)), 1 => Just((1, 2))];
    // All in their order, all in another, or some.
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

/// What is mostly below `end`, and sometimes -1 or out of range; or always the same.
pub fn indices(end: usize, len: usize) -> impl Strategy<Value = Vec<i32>> {
    let end = end as i32;
    let stray = prop_oneof![Just(i32::MIN), Just(i32::MAX), Just(end), Just(-2), Just(-1)];
    let any = prop_oneof![6 => 0..end.max(1), 1 => Just(-1), 1 => stray];
    // Each another, as far as there are so many.
    let each = (0..end.max(1)).prop_map(move |first| (0..len as i32).map(|i| (first + i) % end.max(1)).collect());
    prop_oneof![
        4 => prop::collection::vec(any, len),
        1 => (0..end.max(1)).prop_map(move |one| vec![one; len]),
        1 => each,
    ]
}

/// As a router chooses: for each token different ones, as far as there are so many; some are -1 or out of range.
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

/// None, a permutation, or one of which some have no row.
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
        // Whether each expert has a rank of its own, and which of them have any.
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

/// An operation of the CPU's on `x` and, if it reads and does not write that, `y`.
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

/// What computes the answer to a case: the buffer that the operation writes, as it leaves it.
pub trait Subject {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T>;
}

/// Runs a case and compares the answer with the reference's.
pub fn check<T: Element>(subject: &mut impl Subject, case: &Case) -> Result<(), TestCaseError> {
    let world = case.world::<T>();
    compare(case.target(), &subject.run(case, &world), &world.expected(case), &case.replay())
}
