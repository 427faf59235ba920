//! The workloads of experts, the data they run on, and the error of their results.
//!
//! One operation is what a layer does after its router: it groups the routes and adds the deltas of gate_up and down.
//! Consecutive operations use other sets of adapters and other choices of the router, so that weights come from memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use aril::{
    model::{self, Experts, ExpertsId, Halves, ModelSpec, TpRank},
    plan::Capacity,
    reference::{self, Factors},
};
use half::bf16;
use rayon::prelude::*;
use serde::Deserialize;

use crate::{
    Result,
    data::{Data, FactorLayout},
    workload::{Bytes, COLD_BYTES, Mapping, Suite},
};

/// The largest size of the sets of a workload, in elements: 8.8 GB.
const MAX_WEIGHTS: usize = 4_400_000_000;
const MAX_SETS: usize = 8;
/// A graph uses so many sets in turn that all their weights exceed this.
const SETS_BYTES: usize = 256 << 20;
/// Choices of the router with few tokens and with many, and the largest number of either.
const CHOICES: [usize; 2] = [16, 4];
const MAX_CHOICES: usize = 512;
/// The largest number of tokens that counts as few.
const FEW_TOKENS: usize = 128;

/// Matrices that share memory start at a multiple of this, in elements.
const ALIGNMENT: usize = 128;

const BF16: usize = size_of::<bf16>();

pub const GATE: usize = 0;
pub const UP: usize = 1;
pub const DOWN: usize = 2;
pub const MODULES: [usize; 3] = [GATE, UP, DOWN];

/// One layer of experts, its tokens, their adapters, and its router.
#[derive(Clone, Debug)]
pub struct ExpertsWorkload {
    pub id: String,
    pub suite: Suite,
    pub tag: String,
    pub shape: Shape,
    /// By slot.
    pub adapters: Vec<ExpertsAdapter>,
    /// By token: the number of the slot, or -1.
    pub slots: Vec<i32>,
    pub router: Router,
}

/// A model's experts.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub hidden: usize,
    pub inter: usize,
    pub num_experts: usize,
    pub top_k: usize,
    /// How gate and up are arranged. Gate comes first.
    pub halves: Halves,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ExpertsAdapter {
    pub rank: usize,
    /// Whether all experts share A of gate, A of up, and B of down.
    pub shared_outer: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Router {
    pub seed: u64,
    pub spread: Spread,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Spread {
    /// Draws experts for each token.
    Uniform,
    /// Gives all tokens the experts of the first.
    Same,
}

/// The numbers of sets and choices: operation `i` uses set `i % sets` and choice `i % choices`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Turns {
    pub sets: usize,
    pub choices: usize,
}

/// The name of a class of token counts.
pub fn size(tokens: usize) -> &'static str {
    match tokens {
        0..=32 => "T<=32",
        33..=128 => "T=128",
        129.. => "T>=1024",
    }
}

impl ExpertsWorkload {
    pub fn num_tokens(&self) -> usize {
        self.slots.len()
    }

    pub fn num_routes(&self) -> usize {
        self.num_tokens() * self.shape.top_k
    }

    pub fn max_rank(&self) -> usize {
        self.adapters.iter().map(|adapter| adapter.rank).max().unwrap_or(1)
    }

    /// The class whose mean its figures enter.
    pub fn class(&self) -> String {
        match self.suite {
            Suite::Moe => format!("{} {}", self.tag, size(self.num_tokens())),
            _ => self.tag.clone(),
        }
    }

    /// A model of these experts alone.
    pub fn model(&self) -> Result<(model::Model, ExpertsId)> {
        let Shape { hidden, inter, num_experts, top_k, halves } = self.shape;
        let mut spec = ModelSpec::new();
        let id = spec.experts(Experts::new("experts", num_experts, hidden, inter).top_k(top_k).halves(halves))?;
        Ok((spec.shard(TpRank::SINGLE)?, id))
    }

    /// The tightest bounds on its batch.
    pub fn capacity(&self) -> Capacity {
        Capacity::tokens(self.num_tokens()).slots(self.adapters.len()).rank(self.max_rank())
    }

    /// The experts of each token, `[tokens, top_k]`, in one choice of the router.
    pub fn chosen(&self, choice: usize) -> Vec<i32> {
        let Self { router: Router { seed, spread }, shape, .. } = self;
        let (tokens, repeats) = match spread {
            Spread::Uniform => (self.num_tokens(), 1),
            Spread::Same => (1, self.num_tokens()),
        };
        top_k_ids(*seed, choice as u64, tokens, shape.num_experts as u64, shape.top_k).repeat(repeats)
    }

    /// Enough sets and choices for weights to come from memory. Other libraries are measured with the same numbers.
    pub fn turns(&self) -> Turns {
        let set_elems = ExpertsLayout::new(self).elems;
        let max_sets = MAX_WEIGHTS / set_elems;
        let sets = MAX_SETS.min(max_sets).min(SETS_BYTES.div_ceil(set_elems * BF16)).max(1);
        let is_few = self.num_tokens() <= FEW_TOKENS;
        let choices = CHOICES[usize::from(!is_few)];
        let cold = COLD_BYTES.div_ceil(self.bytes(choices).weights.max(1)).min(MAX_CHOICES);
        // Many different tokens use all experts.
        if (is_few || self.router.spread == Spread::Same) && cold > choices {
            Turns { sets: sets.max(cold).min(max_sets), choices: cold }
        } else {
            Turns { sets, choices }
        }
    }

    /// The bytes that any implementation must move, as a mean over `choices`: the factors of each adapter in use, for
    /// the experts of its tokens, shared factors once; and for tokens with an adapter `x` and both sides of the
    /// activation.
    pub fn bytes(&self, choices: usize) -> Bytes {
        let Shape { hidden, inter, .. } = self.shape;
        let weights: usize = (0..choices).map(|choice| self.weight_elems(&self.chosen(choice))).sum();
        let tokens = self.slots.iter().filter(|&&slot| slot >= 0).count();
        let routes = tokens * self.shape.top_k;
        Bytes {
            weights: weights * BF16 / choices,
            x: (tokens * hidden + routes * inter) * BF16,
            y: routes * (2 * inter + hidden) * BF16 * 2,
        }
    }

    fn weight_elems(&self, ids: &[i32]) -> usize {
        let Shape { hidden, inter, num_experts, top_k, .. } = self.shape;
        let mut used = vec![false; self.adapters.len() * num_experts];
        for (slot, ids) in self.slots.iter().zip(ids.chunks(top_k)) {
            let Ok(slot) = usize::try_from(*slot) else { continue };
            ids.iter().for_each(|id| used[slot * num_experts + id.cast_unsigned() as usize] = true);
        }
        let of_adapter = |(adapter, used): (&ExpertsAdapter, &[bool])| {
            let experts = used.iter().filter(|&&used| used).count();
            let outer = if adapter.shared_outer { experts.min(1) } else { experts };
            adapter.rank * (experts * 3 * inter + outer * 3 * hidden)
        };
        self.adapters.iter().zip(used.chunks(num_experts)).map(of_adapter).sum()
    }

    pub fn flops(&self) -> usize {
        let Shape { hidden, inter, top_k, .. } = self.shape;
        let of_token = |&slot: &i32| {
            let ExpertsAdapter { rank, shared_outer } = usize::try_from(slot).ok().map(|slot| self.adapters[slot])?;
            let shrunk = if shared_outer { 1 } else { top_k };
            Some(2 * rank * (shrunk * 2 * hidden + top_k * (3 * inter + hidden)))
        };
        self.slots.iter().filter_map(of_token).sum()
    }

    /// Where the matrices of down start: in the inputs, behind `x`, and in the outputs, behind those of gate_up.
    pub fn of_down(&self) -> [usize; 2] {
        let Shape { hidden, inter, .. } = self.shape;
        [self.num_tokens() * hidden, self.num_routes() * 2 * inter].map(|elems| elems.next_multiple_of(ALIGNMENT))
    }

    /// The sizes of all inputs and of all outputs, in elements.
    pub fn matrix_elems(&self) -> [usize; 2] {
        let [inputs, outputs] = self.of_down();
        [inputs + self.num_routes() * self.shape.inter, outputs + self.num_routes() * self.shape.hidden]
    }

    /// Input and output features of a module.
    pub fn features(&self, module: usize) -> [usize; 2] {
        let Shape { hidden, inter, .. } = self.shape;
        if module == DOWN { [inter, hidden] } else { [hidden, inter] }
    }

    /// How a slot's A and B of a module lie in memory.
    pub fn factor_layouts(&self, slot: usize, module: usize) -> [FactorLayout; 2] {
        let [in_features, out_features] = self.features(module);
        FactorLayout::linear(self.adapters[slot].rank, in_features, out_features)
    }

    /// The relative errors of the deltas of gate_up and of down of some tokens, given the rows of y of all their
    /// routes; `set` is where the factors begin, and `ids` is what the router chose.
    pub fn errors(&self, data: &Data, set: usize, ids: &[i32], got: &BTreeMap<usize, [Vec<bf16>; 2]>) -> [f64; 2] {
        let (layout, top_k) = (ExpertsLayout::new(self), self.shape.top_k);
        let routes: Vec<usize> = got.keys().flat_map(|token| token * top_k..(token + 1) * top_k).collect();
        let sum = |a: [Squares; 2], b: [Squares; 2]| [0, 1].map(|i| Squares::sum(a[i], b[i]));
        let of_route = |&route: &usize| {
            let (token, expert) = (route / top_k, ids[route].cast_unsigned() as usize);
            self.squares(data, &layout, set, (token, route, expert), &got[&token])
        };
        let squares = routes.par_iter().map(of_route).reduce(Default::default, sum);
        squares.map(Squares::relative)
    }

    fn squares(
        &self,
        data: &Data,
        layout: &ExpertsLayout,
        set: usize,
        (token, route, expert): (usize, usize, usize),
        got: &[Vec<bf16>; 2],
    ) -> [Squares; 2] {
        let Shape { hidden, inter, top_k, halves, .. } = self.shape;
        let mut squares = [Squares::default(); 2];
        let Ok(slot) = usize::try_from(self.slots[token]) else { return squares };
        let [inputs, outputs] = self.of_down();
        for module in MODULES {
            let is_down = usize::from(module == DOWN);
            let (first_x, first_y, cols) = match module {
                DOWN => (inputs + route * inter, outputs + route * hidden, hidden),
                _ => (token * hidden, route * 2 * inter, 2 * inter),
            };
            let x: Vec<f64> = data.inputs.range(first_x, self.features(module)[0]).map(f64::from).collect();
            let bases: Vec<f64> = data.bases.range(first_y, cols).map(f64::from).collect();
            let got = &got[is_down][route % top_k * cols..][..cols];
            let [(a, a_layout), (b, b_layout)] = layout.at(slot, module, expert, self.factor_layouts(slot, module));
            let [a, b]: [Vec<f64>; 2] =
                [(a, a_layout), (b, b_layout)].map(|(at, of)| data.factor(set + at, of).map(f64::from).collect());
            let rank = self.adapters[slot].rank;
            let deltas = reference::linear(&x, Factors { a: &a, b: &b, rank, scaling: 1.0 });
            for (feature, delta) in deltas.iter().enumerate() {
                let col = match module {
                    DOWN => feature,
                    _ => reference::experts::columns(halves, inter, feature)[module],
                };
                squares[is_down].add(got[col].to_f64() - bases[col], delta.value);
            }
        }
        squares
    }
}

/// Sums of squares of the errors and of the expected deltas.
#[derive(Clone, Copy, Debug, Default)]
struct Squares {
    error: f64,
    norm: f64,
}

impl Squares {
    fn add(&mut self, got: f64, want: f64) {
        self.error += (got - want).powi(2);
        self.norm += want.powi(2);
    }

    fn sum(self, other: Self) -> Self {
        Self { error: self.error + other.error, norm: self.norm + other.norm }
    }

    fn relative(self) -> f64 {
        if self.norm == 0.0 { self.error } else { (self.error / self.norm).sqrt() }
    }
}

/// How a set of adapters lies in memory, in elements: each adapter's factors in one piece, in the order in which they
/// are packed.
#[derive(Debug)]
pub struct ExpertsLayout {
    /// By slot, by module and by expert: where A and B begin.
    pub factors: Vec<[Vec<[usize; 2]>; 3]>,
    pub elems: usize,
}

impl ExpertsLayout {
    pub fn new(workload: &ExpertsWorkload) -> Self {
        let mut elems = 0;
        let mut place = |layout: FactorLayout| {
            let start = elems;
            elems += layout.elems();
            start
        };
        let mut factors = Vec::with_capacity(workload.adapters.len());
        for (slot, adapter) in workload.adapters.iter().enumerate() {
            let layouts = MODULES.map(|module| workload.factor_layouts(slot, module));
            let mut of_slot = [const { Vec::new() }; 3];
            let shared_a = [GATE, UP].map(|module| adapter.shared_outer.then(|| place(layouts[module][0])));
            for _ in 0..workload.shape.num_experts {
                let a = [GATE, UP].map(|module| shared_a[module].unwrap_or_else(|| place(layouts[module][0])));
                for module in [GATE, UP] {
                    of_slot[module].push([a[module], place(layouts[module][1])]);
                }
            }
            let [a, b] = layouts[DOWN];
            let shared_b = adapter.shared_outer.then(|| place(b));
            for _ in 0..workload.shape.num_experts {
                of_slot[DOWN].push([place(a), shared_b.unwrap_or_else(|| place(b))]);
            }
            factors.push(of_slot);
        }
        Self { factors, elems }
    }

    /// The ranges of a set where kernels expect zeros.
    pub fn padding(&self, workload: &ExpertsWorkload) -> Vec<Range<usize>> {
        let mut padding = Vec::new();
        for (slot, modules) in self.factors.iter().enumerate() {
            for module in MODULES {
                let ranges = workload.factor_layouts(slot, module).map(FactorLayout::padding);
                for firsts in &modules[module] {
                    for (first, ranges) in firsts.iter().zip(&ranges) {
                        padding.extend(ranges.iter().map(|range| first + range.start..first + range.end));
                    }
                }
            }
        }
        padding
    }

    fn at(&self, slot: usize, module: usize, expert: usize, layouts: [FactorLayout; 2]) -> [(usize, FactorLayout); 2] {
        let [a, b] = self.factors[slot][module][expert];
        [(a, layouts[0]), (b, layouts[1])]
    }
}

/// Reads the experts of a list in the format of `benches/workloads.json`.
pub fn parse(text: &str) -> Result<Vec<ExpertsWorkload>> {
    let File { mappings, moe_model, moe } = serde_json::from_str(text)?;
    let Model { hidden, moe_inter: inter, experts: num_experts, top_k } = moe_model;
    let shape = Shape { hidden, inter, num_experts, top_k, halves: Halves::GateUp };
    moe.into_iter().map(|entry| entry.resolve(shape, &mappings)).collect()
}

/// Keeps rank 16 and a few batch sizes of each class.
pub fn quick(mut workloads: Vec<ExpertsWorkload>) -> Vec<ExpertsWorkload> {
    let mut seen = BTreeSet::new();
    workloads.retain(|workload| {
        let tokens = workload.num_tokens();
        workload.max_rank() == 16 && [1, 8, 1024].contains(&tokens) && seen.insert((workload.class(), tokens))
    });
    workloads
}

#[derive(Deserialize)]
struct File {
    mappings: BTreeMap<String, Mapping>,
    moe_model: Model,
    moe: Vec<Entry>,
}

#[derive(Deserialize)]
struct Model {
    hidden: usize,
    moe_inter: usize,
    experts: usize,
    top_k: usize,
}

#[derive(Deserialize)]
struct Entry {
    id: String,
    layout: String,
    rank: usize,
    tokens: usize,
    adapters: usize,
    mapping: String,
    topk_seed: u64,
}

impl Entry {
    fn resolve(self, shape: Shape, mappings: &BTreeMap<String, Mapping>) -> Result<ExpertsWorkload> {
        let Self { id, layout, rank, tokens, adapters, mapping, topk_seed: seed } = self;
        let mapping = mappings.get(&mapping).ok_or_else(|| format!("{id}: there is no mapping {mapping}"))?;
        let slots = mapping.slots(&id, tokens)?;
        if mapping.adapters != adapters {
            return Err(format!("{id}: {adapters} adapters, but its mapping has {}", mapping.adapters).into());
        }
        let shared_outer = match layout.as_str() {
            "per_expert" => false,
            "shared_outer" => true,
            _ => return Err(format!("{id}: there is no layout {layout}").into()),
        };
        let adapters = vec![ExpertsAdapter { rank, shared_outer }; adapters];
        let router = Router { seed, spread: Spread::Uniform };
        Ok(ExpertsWorkload { id, suite: Suite::Moe, tag: layout, shape, adapters, slots, router })
    }
}

/// Draws different experts for each token, as the list defines it.
fn top_k_ids(seed: u64, choice: u64, tokens: usize, num_experts: u64, top_k: usize) -> Vec<i32> {
    let mut state = seed.wrapping_add(choice.wrapping_mul(1_000_003));
    let mut ids = Vec::with_capacity(tokens * top_k);
    for _ in 0..tokens {
        let first = ids.len();
        while ids.len() < first + top_k {
            #[expect(clippy::cast_possible_truncation, reason = "fewer experts than i32::MAX")]
            let id = (split_mix(&mut state) % num_experts) as i32;
            if !ids[first..].contains(&id) {
                ids.push(id);
            }
        }
    }
    ids
}

/// The next number of splitmix64.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = *state;
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
