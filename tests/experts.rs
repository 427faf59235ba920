//! The CPU's operations on experts against the reference, and laws that they have in common.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and its numbers are small"
)]

mod common;

use aril::{
    Element, Slot,
    adapter::Adapter,
    cpu::{LoraExperts, Matrix, MatrixMut, WeightTable},
    model::{Activation, ModelSpec},
    routing::Batch,
};
use common::{
    cases::{Place, Values},
    experts::{Case, DOWN, GATE, Op, Order, Pair, Shape, Sizes, Subject, UP, World, cases, check, halved},
};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};

struct Cpu;

fn table<T: Element>(model: &ModelSpec, adapters: &[Adapter], num_slots: usize, max_rank: usize) -> WeightTable<T> {
    let mut weights = WeightTable::<T>::new(model, num_slots, max_rank);
    for (slot, adapter) in adapters.iter().enumerate() {
        weights.load(Slot::new(slot as u16), &adapter.plan(model, T::DTYPE).unwrap()).unwrap();
    }
    weights
}

fn matrix<T: Element>(buffer: &[T], place: Place) -> Matrix<'_, T> {
    Matrix::strided(&buffer[place.offset..], place.rows, place.cols, place.stride).unwrap()
}

fn matrix_mut<T: Element>(buffer: &mut [T], place: Place) -> MatrixMut<'_, T> {
    MatrixMut::strided(&mut buffer[place.offset..], place.rows, place.cols, place.stride).unwrap()
}

impl Subject for Cpu {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let weights = table(&world.model, &world.adapters, world.num_slots, world.max_rank);
        let experts = LoraExperts::new(&world.model, world.id);
        let (top_k, batch) = (world.top_k(case), world.batch());
        let (x, y, mut buffer) = (matrix(&world.x, case.x()), matrix(&world.y, case.y()), world.target(case).to_vec());
        let target = matrix_mut(&mut buffer, case.target());
        match case.op {
            Op::AddGateUp => experts.add_gate_up_delta(x, target, &top_k, &weights, &batch),
            Op::WriteGateUp => experts.write_gate_up_delta(x, target, &top_k, &weights, &batch),
            Op::Activate(act) => experts.activate(x, y, target, act.activation(), &top_k, &weights, &batch),
            Op::AddDown => experts.add_down_delta(x, target, &top_k, &weights, &batch),
            Op::WriteDown => experts.write_down_delta(x, target, &top_k, &weights, &batch),
            Op::AddCombined => experts.add_combined_delta(x, target, &top_k, &weights, &batch),
            Op::Combine => experts.combine(x, y, target, &top_k, &weights, &batch),
        }
        .unwrap();
        buffer
    }
}

/// Where the operation writes what it makes of a token.
fn rows_of(case: &Case, token: usize) -> Vec<usize> {
    match case.op {
        Op::AddCombined | Op::Combine => vec![token],
        _ => (token * case.top_k..(token + 1) * case.top_k).filter_map(|route| case.row(route)).collect(),
    }
}

proptest! {
    #[test]
    fn cpu_agrees_with_the_reference(case in cases(Sizes::SMALL)) {
        let case = Case::from_environment().unwrap_or(case);
        for_dtype!(case, check(&mut Cpu, &case))?;
    }

    /// A token's result has the same bits with all others base as in any batch.
    #[test]
    fn cpu_is_batch_invariant(case in cases(Sizes::SMALL), token: prop::sample::Index) {
        fn run<T: Element>(case: &Case, token: prop::sample::Index) -> Result<(), TestCaseError> {
            let together = Cpu.run::<T>(case, &case.world());
            if case.num_tokens() > 0 {
                let token = token.index(case.num_tokens());
                let mut slots = vec![-1; case.num_tokens()];
                slots[token] = case.slots[token];
                let alone = Case { slots, ..case.clone() };
                let alone = Cpu.run::<T>(&alone, &alone.world());
                for row in rows_of(case, token) {
                    let bits = |buffer: &[T]| {
                        bytemuck::cast_slice::<T, u8>(&buffer[case.target().at(row, 0)..][..case.target().cols]).to_vec()
                    };
                    prop_assert!(bits(&together) == bits(&alone), "token {token}\n{}", case.replay());
                }
            }
            Ok(())
        }
        for_dtype!(case, run(&case, token))?;
    }

    /// What all experts share is what each has alike.
    #[test]
    fn a_shared_factor_is_one_that_is_repeated(case in cases(Sizes::SMALL)) {
        fn run<T: Element>(case: &Case) -> Result<(), TestCaseError> {
            let [shared, repeated] = [true, false].map(|stacked| {
                let mut case = case.clone();
                case.adapters.iter_mut().for_each(|lora| lora.stacked = stacked);
                Cpu.run::<T>(&case, &case.world())
            });
            prop_assert!(bytemuck::cast_slice::<T, u8>(&shared) == bytemuck::cast_slice::<T, u8>(&repeated));
            Ok(())
        }
        for_dtype!(case, run(&case))?;
    }

    /// Where an engine's kernels let the adapters in, and how it shares the experts out, changes nothing: the ranks' parts add up
    /// to the layer whose weights are merged with each token's adapter.
    #[test]
    fn a_layer_is_that_of_merged_weights(case in cases(TINY), groups in 1..=3_usize) {
        let layer = Layer::new(case);
        let expected = layer.merged();
        for way in [Way::Behind, Way::Before, Way::Inside, Way::Combined] {
            let mut sum = vec![0.0; expected.len()];
            for part in layer.parts(groups) {
                sum.iter_mut().zip(layer.run(&part, way)).for_each(|(sum, part)| *sum += f64::from(part));
            }
            prop_assert_eq!(&sum, &expected, "{:?}\n{}", way, layer.case.replay());
        }
    }
}

/// So small that all is exact, squares and all.
const TINY: Sizes = Sizes { max_features: 8, max_tokens: 5, max_rank: 2, max_experts: 4, max_top_k: 3 };

/// Where the adapters come to the base's kernels.
#[derive(Clone, Copy, Debug)]
enum Way {
    Behind,
    Before,
    Inside,
    Combined,
}

/// A whole layer of experts whose activation is `max(gate, 0)² · up`, of integers and halves.
struct Layer {
    case: Case,
    pairs: Vec<[Vec<Option<Pair>>; 3]>,
    adapters: Vec<Adapter>,
    /// The base's gate, up and down, by expert, `[out, in]`.
    base: [Vec<Vec<f64>>; 3],
    /// By token.
    x: Vec<Vec<f64>>,
}

impl Layer {
    fn new(case: Case) -> Self {
        let held = (0..case.shape.num_experts).collect();
        let shape = Shape { held, tp: (0, case.shape.tp.1), ..case.shape };
        let case = Case { values: Values::Exact, half_scales: None, shape, ..case };
        let mut rng = StdRng::seed_from_u64(case.seed);
        let mut pairs = case.pairs::<f32>(&mut rng);
        for pair in pairs.iter_mut().flatten().flatten().flatten() {
            pair.a.iter_mut().chain(&mut pair.b).for_each(|value| *value = value.clamp(-1.0, 1.0));
            pair.scaling = 1.0;
        }
        let mut fill = |len: usize| -> Vec<f64> { (0..len).map(|_| rng.random_range(-1..=1_i8).into()).collect() };
        let base = [GATE, UP, DOWN].map(|module| {
            let [input, output] = case.shape.features(module);
            (0..case.shape.num_experts).map(|_| fill(output * input)).collect()
        });
        let x = (0..case.num_tokens()).map(|_| fill(case.shape.hidden)).collect();
        let adapters = case.adapters.iter().zip(&pairs).map(|(lora, pairs)| case.load(lora, pairs)).collect();
        Self { case, pairs, adapters, base, x }
    }

    /// `[tokens, hidden]`
    fn merged(&self) -> Vec<f64> {
        let case = &self.case;
        let mut out = vec![0.0; case.num_tokens() * case.shape.hidden];
        for route in (0..case.num_routes()).filter(|&route| case.is_here(route)) {
            let (token, [on_input, weight]) = (route / case.top_k, case.weights(route));
            let module = |module: usize, x: &[f64]| times(&self.weights(case, route, module), x);
            let x: Vec<f64> = self.x[token].iter().map(|x| on_input * x).collect();
            let gate = (case.shape.halves != Order::Ungated).then(|| module(GATE, &x));
            let inter: Vec<f64> = module(UP, &x)
                .into_iter()
                .enumerate()
                .map(|(feature, up)| relu2(gate.as_ref().map(|gate| gate[feature]), up))
                .collect();
            let row = &mut out[token * case.shape.hidden..][..case.shape.hidden];
            row.iter_mut().zip(module(DOWN, &inter)).for_each(|(out, value)| *out += weight * value);
        }
        out
    }

    /// A module of a route's expert, merged with the adapter of the route's token.
    fn weights(&self, case: &Case, route: usize, module: usize) -> Vec<f64> {
        let expert = case.expert(route).unwrap();
        let mut weights = self.base[module][expert].clone();
        let adapter = case.adapter(route / case.top_k);
        if let Some(pair) = adapter.and_then(|adapter| self.pairs[adapter][module][expert].as_ref()) {
            let input = case.shape.features(module)[0];
            for (at, weight) in weights.iter_mut().enumerate() {
                let product = |r: usize| pair.b[at / input * pair.rank + r] * pair.a[r * input + at % input];
                *weight += pair.scaling * (0..pair.rank).map(product).sum::<f64>();
            }
        }
        weights
    }

    /// The case as the ranks have it, of which each has some of the experts and a part of these.
    fn parts(&self, groups: usize) -> Vec<Case> {
        let Shape { num_experts, tp: (_, size), .. } = self.case.shape;
        let part = |group: usize, rank: usize| {
            let held: Vec<usize> = (0..num_experts).rev().filter(|expert| expert % groups == group).collect();
            let local =
                |id: &i32| held.iter().position(|&expert| expert as i32 == *id).map_or(-1, |local| local as i32);
            let ids = self.case.ids.iter().map(local).collect();
            let shape = Shape { held: held.clone(), tp: (rank, size), ..self.case.shape.clone() };
            Case { ids, shape, ..self.case.clone() }
        };
        (0..groups).flat_map(|group| (0..size).map(move |rank| part(group, rank))).collect()
    }

    /// What an engine computes on a rank, `[tokens, hidden]`.
    fn run(&self, case: &Case, way: Way) -> Vec<f32> {
        let Shape { hidden, inter, .. } = case.shape;
        let (tokens, routes, gate_up) = (case.num_tokens(), case.num_routes(), case.shape.gate_up());
        let (model, id) = case.model();
        let (experts, weights) = (LoraExperts::new(&model, id), table(&model, &self.adapters, 8, case.max_rank()));
        let slots: Vec<Slot> = case.slots.iter().map(|&slot| bytemuck::cast(slot)).collect();
        let router = case.half_weights.as_deref().map(halved);
        let (top_k, batch) = (case.top_k(router.as_deref()), Batch::new(&slots));
        let x: Vec<f32> = self.x.concat().into_iter().map(|x| x as f32).collect();
        let x = Matrix::new(&x, tokens, hidden).unwrap();
        let here = || (0..routes).filter(|&route| case.is_here(route)).map(|route| (route, case.row(route).unwrap()));

        let mut y = vec![0.0; routes * gate_up];
        if let Way::Before = way {
            let y = MatrixMut::new(&mut y, routes, gate_up).unwrap();
            experts.write_gate_up_delta(x, y, &top_k, &weights, &batch).unwrap();
        }
        for (route, row) in here() {
            let x: Vec<f64> = self.x[route / case.top_k].iter().map(|x| case.weights(route)[0] * x).collect();
            for &module in case.shape.before_activation() {
                for (feature, value) in self.base_of(case, route, module, &x).into_iter().enumerate() {
                    y[row * gate_up + case.shape.column(module, feature)] += value as f32;
                }
            }
        }
        let mut activated = vec![0.0; routes * inter];
        if let Way::Inside | Way::Combined = way {
            let (y, out) = (Matrix::new(&y, routes, gate_up), MatrixMut::new(&mut activated, routes, inter));
            let (y, out) = (y.unwrap(), out.unwrap());
            experts.activate(x, y, out, Activation::Relu2, &top_k, &weights, &batch).unwrap();
        } else {
            if let Way::Behind = way {
                let y = MatrixMut::new(&mut y, routes, gate_up).unwrap();
                experts.add_gate_up_delta(x, y, &top_k, &weights, &batch).unwrap();
            }
            for (_, row) in here() {
                let y = |module: usize, feature| f64::from(y[row * gate_up + case.shape.column(module, feature)]);
                for feature in 0..inter {
                    let gate = (case.shape.halves != Order::Ungated).then(|| y(GATE, feature));
                    activated[row * inter + feature] = relu2(gate, y(UP, feature)) as f32;
                }
            }
        }

        let mut y = vec![0.0; routes * hidden];
        let x = Matrix::new(&activated, routes, inter).unwrap();
        if let Way::Before = way {
            let y = MatrixMut::new(&mut y, routes, hidden).unwrap();
            experts.write_down_delta(x, y, &top_k, &weights, &batch).unwrap();
        }
        for (route, row) in here() {
            let x: Vec<f64> = activated[row * inter..][..inter].iter().map(|&x| f64::from(x)).collect();
            let values = self.base_of(case, route, DOWN, &x);
            y[row * hidden..][..hidden].iter_mut().zip(values).for_each(|(y, value)| *y += value as f32);
        }
        if let Way::Behind = way {
            let y = MatrixMut::new(&mut y, routes, hidden).unwrap();
            experts.add_down_delta(x, y, &top_k, &weights, &batch).unwrap();
        }
        let mut out = vec![0.0; tokens * hidden];
        if let Way::Inside = way {
            let (y, out) = (Matrix::new(&y, routes, hidden), MatrixMut::new(&mut out, tokens, hidden));
            experts.combine(x, y.unwrap(), out.unwrap(), &top_k, &weights, &batch).unwrap();
        }
        for (route, row) in here().filter(|_| !matches!(way, Way::Inside)) {
            let weight = case.weights(route)[1] as f32;
            let out = &mut out[route / case.top_k * hidden..][..hidden];
            out.iter_mut().zip(&y[row * hidden..]).for_each(|(out, y)| *out += weight * y);
        }
        if let Way::Combined = way {
            let out = MatrixMut::new(&mut out, tokens, hidden).unwrap();
            experts.add_combined_delta(x, out, &top_k, &weights, &batch).unwrap();
        }
        out
    }

    /// This rank's part of a module of a route's expert, without adapters.
    fn base_of(&self, case: &Case, route: usize, module: usize, x: &[f64]) -> Vec<f64> {
        let (input, weights) = (case.shape.features(module)[0], &self.base[module][case.expert(route).unwrap()]);
        let here = case.shape.tp.0 * case.shape.inter..(case.shape.tp.0 + 1) * case.shape.inter;
        if module == DOWN {
            weights.chunks(input).map(|row| times(&row[here.clone()], x)[0]).collect()
        } else {
            times(&weights[here.start * input..here.end * input], x)
        }
    }
}

/// `W x`, W `[out, in]`.
fn times(w: &[f64], x: &[f64]) -> Vec<f64> {
    w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn relu2(gate: Option<f64>, up: f64) -> f64 {
    gate.map_or(up.max(0.0).powi(2), |gate| gate.max(0.0).powi(2) * up)
}
