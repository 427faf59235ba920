//! The CPU's operations on experts against the reference, and laws that relate them.

use crate::{
    common::{
        case::{Subject, loaded_slots},
        cpu::{self, matrix, matrix_mut, slots},
        experts::{Case, DOWN, GATE, Moe, Order, Pairs, Shape, Sizes, UP, World, cases, launch_on_cpu},
        small::more_cases,
        values::Values,
    },
    for_dtype,
};
use aril::{
    DType, Element, Slot,
    adapter::{Adapter, Tensor},
    cpu::{LoraExperts, Matrix, MatrixMut, WeightTable, Workspace},
    model::{Activation, Experts, ExpertsId, Model, ModelSpec, TpRank},
    plan::Capacity,
    reference::experts::activation as activated,
    routing::{Batch, TopK},
};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};

struct Cpu;

/// A table of `f32`.
fn table(model: &Model, adapters: &[Adapter], num_slots: usize, max_rank: usize) -> WeightTable {
    cpu::table(model, DType::F32, Capacity::tokens(4096).slots(num_slots).rank(max_rank), adapters)
}

impl Subject<Moe> for Cpu {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let weights = cpu::table(&world.model, T::DTYPE, world.capacity(case.num_tokens()), &world.adapters);
        let experts = LoraExperts::new(&weights, world.id).unwrap();
        let (router, slots, mut workspace) =
            (case.router(), world.loaded_slots(|slot| weights.get(slot)), Workspace::default());
        let batch = world.batch_of(&slots);
        let top_k = case.top_k(router.as_deref());
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let (x, y, mut buffer) = (matrix(&world.x, case.x()), matrix(&world.y, case.y()), world.target(case).to_vec());
        let target = matrix_mut(&mut buffer, case.target());
        launch_on_cpu(&experts, case.op, &mut step, &top_k, [x, y], target).unwrap();
        buffer
    }
}

#[test]
fn infinite_sums_stay_infinite() {
    for case in Case::of_infinities(8) {
        for_dtype!(case.check_infinities(&mut Cpu)).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(more_cases(32)))]

    #[test]
    fn cpu_agrees_with_the_reference(case in cases(Sizes::SMALL)) {
        let case = Case::from_environment().unwrap_or(case);
        for_dtype!(case.check(&mut Cpu))?;
    }

    /// A token's result has the same bits in any batch, even if no other token has an adapter.
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
                for row in case.rows_of(token) {
                    let bits = |buffer: &[T]| {
                        let row = &buffer[case.target().at(row, 0)..][..case.target().cols];
                        bytemuck::cast_slice::<T, u8>(row).to_vec()
                    };
                    prop_assert!(bits(&together) == bits(&alone), "token {token}\n{}", case.replay());
                }
            }
            Ok(())
        }
        for_dtype!(case, run(&case, token))?;
    }

    /// A shared factor equals a copy of it for each expert.
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

    /// The result does not depend on the fusion point or on how experts are sharded: the ranks' parts add up to the
    /// layer whose weights are merged with each token's adapter.
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

/// Small enough for exact results, squares included.
const TINY: Sizes = Sizes { max_features: 8, max_tokens: 5, max_rank: 2, max_experts: 4, max_top_k: 3 };

/// The fusion point: where deltas join the base model's kernels.
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
    pairs: Vec<Pairs>,
    adapters: Vec<Adapter>,
    /// The base model's gate, up and down, by expert, `[out, in]`.
    base: [Vec<Vec<f64>>; 3],
    /// By token.
    x: Vec<Vec<f64>>,
}

impl Layer {
    fn new(case: Case) -> Self {
        let held = (0..case.shape.num_experts).collect();
        let case = Case { values: Values::Exact, half_scales: None, ..case };
        let case = case.with(|layer| layer.shape = Shape { held, tp: (0, layer.shape.tp.1), ..layer.shape.clone() });
        let mut rng = StdRng::seed_from_u64(case.seed);
        let mut pairs = case.pairs(&mut rng);
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
            let (token, [on_input, on_row, weight]) = (route / case.top_k, case.weights(route));
            let module = |module: usize, x: &[f64]| times(&self.weights(case, route, module), x);
            let x: Vec<f64> = self.x[token].iter().map(|x| on_input * x).collect();
            let gate = (case.shape.halves != Order::Ungated).then(|| module(GATE, &x));
            let inter: Vec<f64> = module(UP, &x)
                .into_iter()
                .enumerate()
                .map(|(feature, up)| relu2(gate.as_ref().map(|gate| gate[feature]), up))
                .collect();
            let row = &mut out[token * case.shape.hidden..][..case.shape.hidden];
            row.iter_mut().zip(module(DOWN, &inter)).for_each(|(out, value)| *out += weight * on_row * value);
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

    /// The case as the ranks hold it: each has some of the experts, and a part of each.
    fn parts(&self, groups: usize) -> Vec<Case> {
        let Shape { num_experts, tp: (_, size), .. } = self.case.shape;
        let part = |group: usize, rank: usize| {
            let held: Vec<usize> = (0..num_experts).rev().filter(|expert| expert % groups == group).collect();
            let local =
                |id: &i32| held.iter().position(|&expert| expert as i32 == *id).map_or(-1, |local| local as i32);
            let ids = self.case.ids.iter().map(local).collect();
            let shape = Shape { held: held.clone(), tp: (rank, size), ..self.case.shape.clone() };
            self.case.with(|layer| (layer.ids, layer.shape) = (ids, shape))
        };
        (0..groups).flat_map(|group| (0..size).map(move |rank| part(group, rank))).collect()
    }

    /// An engine's result on a rank, `[tokens, hidden]`.
    fn run(&self, case: &Case, way: Way) -> Vec<f32> {
        let Shape { hidden, inter, .. } = case.shape;
        let (tokens, routes, gate_up) = (case.num_tokens(), case.num_routes(), case.shape.gate_up());
        let (model, id) = case.model();
        let weights = table(&model, &self.adapters, 8, case.max_rank());
        let experts = LoraExperts::new(&weights, id).unwrap();
        let slots = loaded_slots(&case.slots, |slot| weights.get(slot));
        let router = case.router();
        let (top_k, batch, mut workspace) = (case.top_k(router.as_deref()), Batch::new(&slots), Workspace::default());
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let x: Vec<f32> = self.x.concat().into_iter().map(|x| x as f32).collect();
        let x = Matrix::new(&x, tokens, hidden).unwrap();
        let here = || (0..routes).filter(|&route| case.is_here(route)).map(|route| (route, case.row(route).unwrap()));

        let mut y = vec![0.0; routes * gate_up];
        if let Way::Before = way {
            let y = MatrixMut::new(&mut y, routes, gate_up).unwrap();
            experts.write_gate_up_delta(&mut step, &top_k, x, y).unwrap();
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
            experts.activate(&mut step, &top_k, x, y, out, Activation::Relu2).unwrap();
        } else {
            if let Way::Behind = way {
                let y = MatrixMut::new(&mut y, routes, gate_up).unwrap();
                experts.add_gate_up_delta(&mut step, &top_k, x, y).unwrap();
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
            experts.write_down_delta(&mut step, &top_k, x, y).unwrap();
        }
        for (route, row) in here() {
            let x: Vec<f64> = activated[row * inter..][..inter].iter().map(|&x| f64::from(x)).collect();
            let values = self.base_of(case, route, DOWN, &x).into_iter().map(|value| case.weights(route)[1] * value);
            y[row * hidden..][..hidden].iter_mut().zip(values).for_each(|(y, value)| *y += value as f32);
        }
        if let Way::Behind = way {
            let y = MatrixMut::new(&mut y, routes, hidden).unwrap();
            experts.add_down_delta(&mut step, &top_k, x, y).unwrap();
        }
        let mut out = vec![0.0; tokens * hidden];
        if let Way::Inside = way {
            let (y, out) = (Matrix::new(&y, routes, hidden), MatrixMut::new(&mut out, tokens, hidden));
            experts.combine(&mut step, &top_k, x, y.unwrap(), out.unwrap()).unwrap();
        }
        for (route, row) in here().filter(|_| !matches!(way, Way::Inside)) {
            let weight = case.weights(route)[2] as f32;
            let out = &mut out[route / case.top_k * hidden..][..hidden];
            out.iter_mut().zip(&y[row * hidden..]).for_each(|(out, y)| *out += weight * y);
        }
        if let Way::Combined = way {
            let out = MatrixMut::new(&mut out, tokens, hidden).unwrap();
            experts.add_combined_delta(&mut step, &top_k, x, out).unwrap();
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

/// A layer of two experts with intermediate and hidden size 2, and an adapter of rank 1 for all modules of the second.
fn pair_of_experts() -> (WeightTable, LoraExperts) {
    let (model, id) = model(Experts::new("m", 2, 2, 2).top_k(2));
    let tensor = |shape: [usize; 2], values: [f32; 2]| {
        Tensor::new(DType::F32, shape, bytemuck::cast_slice(&values).to_vec()).unwrap()
    };
    let factors = |module: &str, a, b| {
        let path = |side: &str| format!("m.1.{module}.lora_{side}.weight");
        [(path("A"), tensor([1, 2], a)), (path("B"), tensor([2, 1], b))]
    };
    let tensors = [
        factors("gate_proj", [1.0, 0.0], [1.0, -1.0]),
        factors("up_proj", [0.0, 1.0], [0.0, 10.0]),
        factors("down_proj", [1.0, 1.0], [2.0, 4.0]),
    ];
    let config = r#"{"peft_type": "LORA", "lora_alpha": 0.5}"#;
    let adapter = Adapter::from_tensors(config, tensors.into_iter().flatten()).unwrap();
    let weights = table(&model, &[adapter], 1, 1);
    let experts = LoraExperts::new(&weights, id).unwrap();
    (weights, experts)
}

/// A model that has only these experts.
fn model(experts: Experts) -> (Model, ExpertsId) {
    let mut spec = ModelSpec::new();
    let id = spec.experts(experts).unwrap();
    (spec.shard(TpRank::SINGLE).unwrap(), id)
}

#[test]
fn deltas_worked_by_hand() {
    let (weights, experts) = pair_of_experts();
    let (slots, mut workspace) = (slots(&weights, [0, -1]), Workspace::default());
    let batch = Batch::new(&slots);
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    // The first token has chosen the second expert twice, and its second route has the last row.
    let (ids, rows, router) = ([1, 1, 1, 0], [0, 3, 1, 2], [0.25, 0.75, 0.5, 0.5]);
    let top_k = TopK::new(&ids, 2).unwrap().with_rows(&rows).unwrap().with_weights(&router).unwrap();
    let (x, mut y) = ([2.0, 4.0, 8.0, 16.0], [100.0; 4 * 4]);
    let x = Matrix::new(&x, 2, 2).unwrap();
    let y_matrix = MatrixMut::new(&mut y, 4, 4).unwrap();
    experts.add_gate_up_delta(&mut step, &top_k, x, y_matrix).unwrap();
    // Gate: ½ · 2 · [1, −1]; up: ½ · 4 · [0, 10].
    let adapted = [101.0, 99.0, 100.0, 120.0];
    assert_eq!(y, [&adapted[..], &[100.0; 8], &adapted].concat()[..]);

    let y_matrix = MatrixMut::new(&mut y, 4, 4).unwrap();
    experts.write_gate_up_delta(&mut step, &top_k.on_input(), x, y_matrix).unwrap();
    // The same, times the routes' weights.
    assert_eq!(y, [[0.25, -0.25, 0.0, 5.0], [0.0; 4], [0.0; 4], [0.75, -0.75, 0.0, 15.0]].concat()[..]);

    let (x, y, mut out) = ([1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0], [[1.0, 0.0]; 4].concat(), [9.0; 4]);
    let x = Matrix::new(&x, 4, 2).unwrap();
    let out_matrix = MatrixMut::new(&mut out, 2, 2).unwrap();
    experts.add_combined_delta(&mut step, &top_k.scaled(2.0), x, out_matrix).unwrap();
    // ½ · 2 · [2, 4] for the first row and ½ · 8 · [2, 4] for the last, times ¼ and ¾, times 2.
    assert_eq!(out, [9.0 + 13.0, 9.0 + 26.0, 9.0, 9.0]);
    let (y, out_matrix) = (Matrix::new(&y, 4, 2).unwrap(), MatrixMut::new(&mut out, 2, 2).unwrap());
    experts.combine(&mut step, &top_k.scaled(2.0), x, y, out_matrix).unwrap();
    assert_eq!(out, [13.0 + 2.0, 26.0, 2.0, 0.0]);
    let out_matrix = MatrixMut::new(&mut out, 2, 2).unwrap();
    experts.combine(&mut step, &top_k.on_input().scaled(2.0), x, y, out_matrix).unwrap();
    // ½ · (2 + 8) · [2, 4], plus both rows of the base model, times 2.
    assert_eq!(out, [20.0 + 4.0, 40.0, 4.0, 0.0]);
    let (on_rows, out_matrix) = (top_k.on_rows().scaled(2.0), MatrixMut::new(&mut out, 2, 2).unwrap());
    experts.combine(&mut step, &on_rows, x, y, out_matrix).unwrap();
    // As without weights, except the base model's rows, which are weighted already.
    assert_eq!(out, [13.0 + 4.0, 26.0, 4.0, 0.0]);
    let out_matrix = MatrixMut::new(&mut out, 2, 2).unwrap();
    experts.add_combined_delta(&mut step, &on_rows, x, out_matrix).unwrap();
    assert_eq!(out, [17.0 + 13.0, 26.0 + 26.0, 4.0, 0.0]);
    let mut rows = [[1.0, 0.0]; 4].concat();
    let rows_matrix = MatrixMut::new(&mut rows, 4, 2).unwrap();
    experts.add_down_delta(&mut step, &on_rows, x, rows_matrix).unwrap();
    // ½ · 2 · [2, 4] times ¼, plus ½ · 8 · [2, 4] times ¾.
    assert_eq!(rows, [1.5, 1.0, 1.0, 0.0, 1.0, 0.0, 7.0, 12.0]);
}

/// Products of experts that share B are summed before it, each with the scaling of its own expert.
#[test]
fn experts_of_one_b_have_scalings_of_their_own() {
    let (model, id) = model(Experts::new("m", 2, 1, 1).top_k(2).ungated());
    let tensors = [("0", "A", 1.0_f32), ("0", "B", 1.0), ("1", "A", 10.0), ("1", "B", 1.0)];
    let tensors = tensors.map(|(expert, side, value)| {
        let value = Tensor::new(DType::F32, [1, 1], value.to_le_bytes()).unwrap();
        (format!("m.{expert}.down_proj.lora_{side}.weight"), value)
    });
    let config = r#"{"peft_type": "LORA", "lora_alpha": 2, "alpha_pattern": {"1.down_proj": 3}}"#;
    let weights = table(&model, &[Adapter::from_tensors(config, tensors).unwrap()], 1, 1);
    let (experts, slots) = (LoraExperts::new(&weights, id).unwrap(), slots(&weights, [0]));
    let batch = Batch::new(&slots);
    for ids in [[0, 1], [1, 0]] {
        let (top_k, mut workspace, mut y) = (TopK::new(&ids, 2).unwrap(), Workspace::default(), [0.0]);
        let (x, y_matrix) = (Matrix::new(&[1.0; 2], 2, 1).unwrap(), MatrixMut::new(&mut y, 1, 1).unwrap());
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        experts.add_combined_delta(&mut step, &top_k, x, y_matrix).unwrap();
        assert_eq!(y, [2.0 * 1.0 + 3.0 * 10.0], "{ids:?}");
    }
}

/// Each adapter decides for each layer which factors its experts share.
#[test]
fn layers_share_what_they_share() {
    const EXPERTS: usize = 3;
    // Whether all experts share A of gate and up, and B of down.
    let layers = [("a", [true, true]), ("b", [false, false]), ("c", [false, true]), ("d", [true, false])];
    let mut rng = StdRng::seed_from_u64(1);
    let mut fill = |shape: [usize; 3]| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.random_range(-1.0..1.0)).collect();
        Tensor::new(DType::F32, shape, bytemuck::cast_slice(&values).to_vec()).unwrap()
    };
    let factors = |(layer, [a, b]): (&str, [bool; 2])| {
        let count = |shared| if shared { 1 } else { EXPERTS };
        let modules =
            [("gate_proj", [count(a), EXPERTS]), ("up_proj", [count(a), EXPERTS]), ("down_proj", [EXPERTS, count(b)])];
        let pair = |(module, [a, b]): (&str, [usize; 2])| {
            [("A", fill([a, 2, 4])), ("B", fill([b, 4, 2]))]
                .map(|(side, tensor)| (format!("{layer}.{module}.lora_{side}.weight"), tensor))
        };
        modules.into_iter().flat_map(pair).collect::<Vec<_>>()
    };
    let factors = layers.map(factors);
    let load = |names: &[&str], factors: &[Vec<(String, Tensor)>]| {
        let mut spec = ModelSpec::new();
        let ids = names.iter().map(|name| spec.experts(Experts::new(*name, EXPERTS, 4, 4).top_k(2)).unwrap());
        let ids: Vec<_> = ids.collect();
        let config = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 2}"#;
        (spec.shard(TpRank::SINGLE).unwrap(), ids, Adapter::from_tensors(config, factors.concat()).unwrap())
    };
    let (model, ids, adapter) = load(&layers.map(|(name, _)| name), &factors);
    let image = adapter.plan(&model, DType::F32).unwrap();
    let shared: Vec<_> = image
        .shared()
        .iter()
        .filter(|shared| shared.a_elems.is_some() || shared.b_elems.is_some())
        .map(|shared| (shared.entry, [shared.a_elems.is_some(), shared.b_elems.is_some()]))
        .collect();
    let [a, _, c, d] = [0, 1, 2, 3].map(|layer| {
        let site = &model[ids[layer]];
        [site.gate_up().shared_entry(), site.gate_up().shared_entry() + 1, site.down().shared_entry()]
    });
    let (of_a, of_b) = ([true, false], [false, true]);
    assert_eq!(shared, [(a[0], of_a), (a[1], of_a), (a[2], of_b), (c[2], of_b), (d[0], of_a), (d[1], of_a)]);

    let run = |id, weights: &WeightTable| {
        let (slots, ids) = (slots(weights, [0, -1, 0]), [0, 1, 2, 0, 2, 1]);
        let (batch, top_k, mut workspace) = (Batch::new(&slots), TopK::new(&ids, 2).unwrap(), Workspace::default());
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let (x, y, mut inter, mut out) = ([0.5; 12], [0.25; 48], [0.0; 24], [0.0; 12]);
        let experts = LoraExperts::new(weights, id).unwrap();
        let (x, gate_up) = (Matrix::new(&x, 3, 4).unwrap(), Matrix::new(&y, 6, 8).unwrap());
        let target = MatrixMut::new(&mut inter, 6, 4).unwrap();
        experts.activate(&mut step, &top_k, x, gate_up, target, Activation::Silu).unwrap();
        let (x, down) = (Matrix::new(&inter, 6, 4).unwrap(), Matrix::new(&y, 6, 4).unwrap());
        experts.combine(&mut step, &top_k, x, down, MatrixMut::new(&mut out, 3, 4).unwrap()).unwrap();
        (inter, out)
    };
    let (weights, none) = (table(&model, &[adapter], 1, 2), table(&model, &[], 1, 2));
    for ((id, (name, _)), factors) in ids.into_iter().zip(layers).zip(factors) {
        let (alone, ids, adapter) = load(&[name], &[factors]);
        let (got, base) = (run(id, &weights), run(id, &none));
        assert_eq!(got, run(ids[0], &table(&alone, &[adapter], 1, 2)), "{name}");
        assert!(got.0 != base.0 && got.1 != base.1, "{name}");
    }
}

#[test]
fn a_router_chooses_routes_for_whole_tokens() {
    assert_eq!(TopK::new(&[], 4).unwrap().num_tokens(), 0);
    let top_k = TopK::new(&[0; 6], 3).unwrap();
    assert_eq!((top_k.num_tokens(), top_k.num_routes(), top_k.top_k()), (2, 6, 3));
    let error = top_k.with_weights(&[1.0; 2]).unwrap_err();
    assert_eq!(error.to_string(), "`weights` has 2 elements, but there are 6 routes");
}

#[test]
fn what_is_no_expert_or_row_is_not_here() {
    let ids = [-1, 0, 2, 3, i32::MIN, i32::MAX];
    let top_k = TopK::new(&ids, 2).unwrap();
    let experts: Vec<_> = (0..6).map(|route| top_k.expert(route, 3)).collect();
    assert_eq!(experts, [None, Some(0), Some(2), None, None, None]);
    assert_eq!((0..6).map(|route| top_k.row(route)).collect::<Vec<_>>(), (0..6).map(Some).collect::<Vec<_>>());
    let rows = [5, -1, 6, 0, i32::MIN, i32::MAX];
    let top_k = top_k.with_rows(&rows).unwrap();
    let rows: Vec<_> = (0..6).map(|route| top_k.row(route)).collect();
    assert_eq!(rows, [Some(5), None, None, Some(0), None, None]);
}

/// A row shared by two routes is the engine's error, but no write leaves `y`.
#[test]
fn two_routes_of_one_row_do_no_harm() {
    let (weights, experts) = pair_of_experts();
    let (slots, x, mut y) = (slots(&weights, [0; 2]), [2.0, 4.0, 2.0, 4.0], [0.0; 2 * 4]);
    let top_k = TopK::new(&[1, 1], 1).unwrap().with_rows(&[1, 1]).unwrap();
    let (x, y_matrix) = (Matrix::new(&x, 2, 2).unwrap(), MatrixMut::new(&mut y, 2, 4).unwrap());
    let (batch, mut workspace) = (Batch::new(&slots), Workspace::default());
    experts.add_gate_up_delta(&mut weights.step(&batch, &mut workspace).unwrap(), &top_k, x, y_matrix).unwrap();
    assert_eq!(y, [0.0, 0.0, 0.0, 0.0, 1.0, -1.0, 0.0, 20.0]);
}

/// Activations over the whole range and beyond.
#[test]
fn activations_are_those_of_the_reference() {
    let all = [Activation::Gelu, Activation::GeluTanh, Activation::Relu2, Activation::Silu, Activation::GPT_OSS];
    let gates: Vec<f32> =
        (-4000..=4000_i16).map(|step| f32::from(step) / 128.0).chain([-1e4, -100.0, 100.0, 1e4]).collect();
    let up = [-9.0_f32, -0.3, 0.0, 2.5, 11.0];
    let mut spec = ModelSpec::new();
    let gated = spec.experts(Experts::new("m", 1, 1, gates.len()).top_k(1)).unwrap();
    let ungated = spec.experts(Experts::new("n", 1, 1, gates.len()).top_k(1).ungated()).unwrap();
    let weights = table(&spec.shard(TpRank::SINGLE).unwrap(), &[], 1, 1);
    let activate = |id, y: &[f32], activation| {
        let mut out = vec![f32::NAN; gates.len()];
        let (x, y) = (Matrix::new(&[0.0], 1, 1).unwrap(), Matrix::new(y, 1, y.len()).unwrap());
        let (out_matrix, top_k) = (MatrixMut::new(&mut out, 1, gates.len()).unwrap(), TopK::new(&[0], 1).unwrap());
        let (batch, mut workspace) = (Batch::new(&[Slot::BASE]), Workspace::default());
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        LoraExperts::new(&weights, id).unwrap().activate(&mut step, &top_k, x, y, out_matrix, activation).unwrap();
        out
    };
    let check = |activation, got: Vec<f32>, up: Option<f32>| {
        for (got, &x) in got.into_iter().zip(&gates) {
            let x = f64::from(x);
            let (value, factor) = match up {
                Some(up) => (activated(activation, Some(x), up.into()), f64::from(up).abs() + 1.0),
                None => (activated(activation, None, x), 1.0),
            };
            // As in `World::expect_activation`: the factors' magnitudes times a few roundings, and those of an
            // exponent.
            let size = if activation == Activation::Relu2 { x * x } else { x.abs() * factor };
            let bound = (16.0 + 4.0 * 1.702 * x.abs()) * DType::F32.unit_roundoff() * size * factor;
            assert!((f64::from(got) - value).abs() <= bound, "{activation:?} of {x}, {up:?}: {got}, not {value}");
        }
    };
    for activation in all {
        for up in up {
            let y = [gates.clone(), vec![up; gates.len()]].concat();
            check(activation, activate(gated, &y, activation), Some(up));
        }
        if activation != Activation::GPT_OSS {
            check(activation, activate(ungated, &gates, activation), None);
        }
        for nan in [0, gates.len()] {
            let mut y = vec![1.0; 2 * gates.len()];
            y[nan] = f32::NAN;
            let out = activate(gated, &y, activation);
            assert!(out[0].is_nan() && !out[1].is_nan(), "{activation:?}");
        }
    }
}
