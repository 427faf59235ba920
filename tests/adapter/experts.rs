//! The factors of experts: every form gives the same block, and ambiguous forms are refused.

use std::ops::Range;

use aril::{
    DType,
    adapter::{
        Adapter, AdapterError, ImageEntry, Orientation, SlotImage, Tensor,
        layout::{B, LinearA},
    },
    cpu::WeightTable,
    error::{LoadError, SlotError},
    model::{Experts, ExpertsId, Halves, Linear, Model, ModelSpec, Parallel, ProjectionSite, Shard, TpRank},
    plan::Capacity,
};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::{
    common::{
        adapters::{Parts, round, tensor},
        small::more_cases,
    },
    refused,
};

const PATH: &str = "model.layers.0.mlp.experts";
const LORA_ALPHA: f64 = 6.0;

const GATE: usize = 0;
const UP: usize = 1;
const DOWN: usize = 2;

/// The factors of a module of an expert: `[rank, in]` and `[out, rank]`.
#[derive(Clone, Debug, PartialEq)]
struct Pair {
    rank: usize,
    a: Vec<f32>,
    b: Vec<f32>,
}

/// An adapter of the experts of one layer.
#[derive(Clone, Debug)]
struct Case {
    num_experts: usize,
    hidden: usize,
    /// On each of `size` ranks.
    inter: usize,
    size: usize,
    gated: bool,
    halves: Halves,
    stored: Halves,
    held: Vec<usize>,
    dtype: DType,
    rslora: bool,
    /// By gate, up and down, and by expert.
    pairs: [Vec<Option<Pair>>; 3],
}

/// A form of a checkpoint.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Form {
    PerExpert { names: [&'static str; 3] },
    PerExpertFused,
    Stacked { names: [&'static str; 3], once: bool },
    StackedFused { two_a: bool },
    Fms { transposed: bool },
    SideBySide,
    Parameters { version: Option<&'static str>, transposed: bool, orientation: Orientation },
}

const PEFT_NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
const W_NAMES: [&str; 3] = ["w1", "w3", "w2"];

const FORMS: [Form; 14] = [
    Form::PerExpert { names: PEFT_NAMES },
    Form::PerExpert { names: W_NAMES },
    Form::PerExpertFused,
    Form::Stacked { names: PEFT_NAMES, once: false },
    Form::Stacked { names: PEFT_NAMES, once: true },
    Form::Stacked { names: W_NAMES, once: true },
    Form::StackedFused { two_a: false },
    Form::StackedFused { two_a: true },
    Form::Fms { transposed: true },
    Form::Fms { transposed: false },
    Form::SideBySide,
    Form::Parameters { version: Some("0.19.1"), transposed: false, orientation: Orientation::Forward },
    Form::Parameters { version: Some("0.18.1"), transposed: false, orientation: Orientation::Reversed },
    Form::Parameters { version: Some("0.18.1"), transposed: true, orientation: Orientation::Forward },
];

impl Case {
    fn inter(&self) -> usize {
        self.inter * self.size
    }

    fn features(&self, module: usize) -> [usize; 2] {
        if module == DOWN { [self.inter(), self.hidden] } else { [self.hidden, self.inter()] }
    }

    fn model(&self, rank: usize, transposed: bool) -> (Model, ExpertsId) {
        let mut spec = ModelSpec::new();
        // A layer before it, so that entries do not begin at 0.
        spec.linear(Linear::new("", Parallel::Replicated, 8).slice("lm_head", 8)).unwrap();
        let mut experts = Experts::new(PATH, self.num_experts, self.hidden, self.inter())
            .halves(self.halves)
            .stored_halves(self.stored);
        if !self.gated {
            experts = experts.ungated();
        }
        if transposed {
            experts = experts.stored_transposed();
        }
        let id = spec.experts(experts).unwrap();
        let experts_tp = TpRank::new(rank, self.size).unwrap();
        let shard = Shard::new(TpRank::SINGLE).experts_tp(experts_tp).held(id, self.held.iter().copied());
        (spec.shard(shard).unwrap(), id)
    }

    /// All experts of a module, if it has all.
    fn whole(&self, module: usize) -> Option<Vec<&Pair>> {
        let pairs: Vec<_> = self.pairs[module].iter().flatten().collect();
        let uniform = pairs.windows(2).all(|pairs| pairs[0].rank == pairs[1].rank);
        (pairs.len() == self.num_experts && uniform).then_some(pairs)
    }

    /// The adapter in a form, if that can express it.
    fn parts(&self, form: Form) -> Option<Parts> {
        let mut tensors = Vec::new();
        let mut put = |path: String, [a, b]: [(Vec<usize>, Vec<f32>); 2]| {
            let path = format!("base_model.model.{path}");
            tensors.push((format!("{path}.lora_A.weight"), tensor(self.dtype, &a.0, &a.1)));
            tensors.push((format!("{path}.lora_B.weight"), tensor(self.dtype, &b.0, &b.1)));
        };
        let fused = || self.fused();
        let has = |module: usize| self.pairs[module].iter().any(Option::is_some);
        let modules: Vec<usize> = (0..3).filter(|module| has(*module)).collect();
        let named = |names: [&'static str; 3], module: usize| match (self.gated, names, module) {
            // Only one parameter precedes the activation, so it is the first.
            (false, W_NAMES, UP) => "w1",
            _ => names[module],
        };
        match form {
            Form::PerExpert { names } => {
                for module in modules {
                    let [input, output] = self.features(module);
                    for (expert, pair) in self.pairs[module].iter().enumerate() {
                        let Some(Pair { rank, a, b }) = pair.clone() else { continue };
                        let path = format!("{PATH}.{expert}.{}", named(names, module));
                        put(path, [(vec![rank, input], a), (vec![output, rank], b)]);
                    }
                }
            }
            Form::PerExpertFused => {
                for (expert, Pair { rank, a, b }) in fused()?.into_iter().enumerate() {
                    let shapes = [vec![rank, self.hidden], vec![2 * self.inter(), rank]];
                    let [a_shape, b_shape] = shapes;
                    put(format!("{PATH}.{expert}.gate_up_proj"), [(a_shape, a), (b_shape, b)]);
                }
                self.put_down(&mut put, Form::PerExpert { names: PEFT_NAMES })?;
            }
            Form::Stacked { names, once } => {
                for module in modules {
                    let stack = self.stack(&self.whole(module)?, self.features(module), once);
                    put(format!("{PATH}.{}", named(names, module)), stack);
                }
            }
            Form::StackedFused { two_a } => {
                let mut fused = if two_a { self.fused_with_two()? } else { fused()? };
                let features = [self.hidden, 2 * self.inter()];
                let rank = fused[0].rank;
                let b_rank = if two_a { rank / 2 } else { rank };
                let a: Vec<f32> = fused.iter_mut().flat_map(|pair| std::mem::take(&mut pair.a)).collect();
                let b: Vec<f32> = fused.iter_mut().flat_map(|pair| std::mem::take(&mut pair.b)).collect();
                let shapes = [vec![self.num_experts, rank, features[0]], vec![self.num_experts, features[1], b_rank]];
                let [a_shape, b_shape] = shapes;
                put(format!("{PATH}.gate_up_proj"), [(a_shape, a), (b_shape, b)]);
                self.put_down(&mut put, Form::Stacked { names: PEFT_NAMES, once: true })?;
            }
            Form::Fms { transposed } => {
                for module in modules {
                    let [input, output] = self.features(module);
                    let pairs = self.whole(module)?;
                    let rank = pairs[0].rank;
                    let [mut a, mut b] = self.stack(&pairs, [input, output], false);
                    if rank == input && rank == output {
                        return None;
                    }
                    if transposed {
                        a = (vec![self.num_experts, input, rank], transposed_each(&a.1, rank, input));
                        b = (vec![self.num_experts, rank, output], transposed_each(&b.1, output, rank));
                    }
                    let parent = PATH.replace("mlp.experts", "block_sparse_moe");
                    put(format!("{parent}.{}", named(W_NAMES, module)), [a, b]);
                }
            }
            Form::SideBySide => {
                for module in modules {
                    let [input, output] = self.features(module);
                    let pairs = self.whole(module)?;
                    let (rank, num) = (pairs[0].rank, self.num_experts);
                    let same = |of: fn(&Pair) -> &Vec<f32>| pairs.iter().all(|pair| of(pair) == of(pairs[0]));
                    let factors = if module == DOWN && same(|pair| &pair.b) {
                        let row =
                            |row: usize| pairs.iter().flat_map(move |pair| pair.a[row * input..][..input].to_vec());
                        let a = (0..rank).flat_map(row).collect();
                        [(vec![rank, num * input], a), (vec![output, rank], pairs[0].b.clone())]
                    } else if module != DOWN && same(|pair| &pair.a) {
                        let b = pairs.iter().flat_map(|pair| pair.b.clone()).collect();
                        [(vec![rank, input], pairs[0].a.clone()), (vec![num * output, rank], b)]
                    } else {
                        return None;
                    };
                    put(format!("{PATH}.{}", named(PEFT_NAMES, module)), factors);
                }
            }
            Form::Parameters { orientation, .. } => {
                let first = if self.gated { fused()? } else { self.whole(UP)?.into_iter().cloned().collect() };
                let outputs = if self.gated { 2 * self.inter() } else { self.inter() };
                let inner = format!("{PATH}.base_layer");
                put(inner, parameter(&first.iter().collect::<Vec<_>>(), [self.hidden, outputs], orientation));
                put(PATH.to_owned(), parameter(&self.whole(DOWN)?, [self.inter(), self.hidden], orientation));
            }
        }
        let mut config = json!({"peft_type": "LORA", "lora_alpha": LORA_ALPHA, "use_rslora": self.rslora});
        if let Form::Parameters { version, .. } = form {
            config["peft_version"] = json!(version);
            let first = if self.gated { "gate_up_proj" } else { "up_proj" };
            config["target_parameters"] = json!([format!("mlp.experts.{first}"), "mlp.experts.down_proj"]);
        }
        (!tensors.is_empty()).then(|| (config.to_string(), tensors))
    }

    fn put_down(&self, put: &mut impl FnMut(String, [(Vec<usize>, Vec<f32>); 2]), form: Form) -> Option<()> {
        let [input, output] = self.features(DOWN);
        match form {
            Form::Stacked { once, .. } => {
                if self.pairs[DOWN].iter().any(Option::is_some) {
                    put(format!("{PATH}.down_proj"), self.stack(&self.whole(DOWN)?, [input, output], once));
                }
            }
            _ => {
                for (expert, pair) in self.pairs[DOWN].iter().enumerate() {
                    let Some(Pair { rank, a, b }) = pair.clone() else { continue };
                    put(format!("{PATH}.{expert}.down_proj"), [(vec![rank, input], a), (vec![output, rank], b)]);
                }
            }
        }
        Some(())
    }

    /// Factors with three dimensions. If `once`, the first is 1 for factors that all experts share.
    fn stack(&self, pairs: &[&Pair], [input, output]: [usize; 2], once: bool) -> [(Vec<usize>, Vec<f32>); 2] {
        let rank = pairs[0].rank;
        let factor = |of: fn(&Pair) -> &Vec<f32>, rows, cols| {
            let same = pairs.iter().all(|pair| of(pair) == of(pairs[0]));
            let stacked = if once && same { &pairs[..1] } else { pairs };
            (vec![stacked.len(), rows, cols], stacked.iter().flat_map(|pair| of(pair).clone()).collect())
        };
        [factor(|pair| &pair.a, rank, input), factor(|pair| &pair.b, output, rank)]
    }

    /// Gate and up fused, by expert, if they share A.
    fn fused(&self) -> Option<Vec<Pair>> {
        let (gate, up) = (self.whole(GATE)?, self.whole(UP)?);
        let fuse = |(gate, up): (&Pair, &Pair)| {
            (gate.a == up.a && gate.rank == up.rank).then(|| Pair { b: self.fused_b(gate, up), ..gate.clone() })
        };
        gate.into_iter().zip(up).map(fuse).collect()
    }

    /// Gate and up fused: one A after the other, with the sum of their ranks.
    fn fused_with_two(&self) -> Option<Vec<Pair>> {
        let (gate, up) = (self.whole(GATE)?, self.whole(UP)?);
        let fuse = |(gate, up): (&Pair, &Pair)| {
            let (first, second) = match self.stored {
                Halves::GateUp => (gate, up),
                Halves::UpGate => (up, gate),
                Halves::Interleaved => return None,
            };
            let pair = Pair { rank: 2 * gate.rank, a: [&first.a[..], &second.a].concat(), b: self.fused_b(gate, up) };
            (gate.rank == up.rank).then_some(pair)
        };
        gate.into_iter().zip(up).map(fuse).collect()
    }

    fn fused_b(&self, gate: &Pair, up: &Pair) -> Vec<f32> {
        match self.stored {
            Halves::GateUp => [&gate.b[..], &up.b].concat(),
            Halves::UpGate => [&up.b[..], &gate.b].concat(),
            Halves::Interleaved => {
                gate.b.chunks(gate.rank).zip(up.b.chunks(up.rank)).flat_map(|(gate, up)| [gate, up].concat()).collect()
            }
        }
    }

    /// Checks an image element by element, and that it has nothing else.
    fn check(&self, rank: usize, image: &SlotImage<'_>, (model, id): (&Model, ExpertsId)) {
        let block = block(image);
        let site = &model[id];
        let mut entries = image.entries().to_vec();
        let mut begins = Vec::new();
        let before: &[usize] = match (self.gated, self.halves) {
            (false, _) => &[UP],
            (true, Halves::UpGate) => &[UP, GATE],
            (true, _) => &[GATE, UP],
        };
        let here = rank * self.inter..(rank + 1) * self.inter;
        let projections =
            [(site.gate_up(), before, 0..self.hidden, here.clone()), (site.down(), &[DOWN], here, 0..self.hidden)];
        for (projection, modules, inputs, outputs) in projections {
            assert_eq!((projection.in_features(), projection.num_slices()), (inputs.len(), modules.len()));
            for (slice, &module) in modules.iter().enumerate() {
                let all: Vec<_> = self.pairs[module].iter().flatten().collect();
                let held = self.held.iter().enumerate();
                let held: Vec<_> =
                    held.filter_map(|(local, expert)| Some((local, self.pairs[module][*expert].as_ref()?))).collect();
                let same = |of: fn(&Pair) -> &Vec<f32>| {
                    all.len() > 1 && !held.is_empty() && all.iter().all(|pair| of(pair) == of(all[0]))
                };
                // Factors of different shapes may have equal values, so ranks are compared too.
                let uniform = all.iter().all(|pair| pair.rank == all[0].rank);
                let shared = [same(|pair| &pair.a) && uniform, same(|pair| &pair.b) && uniform];
                let found = image.shared().iter().find(|found| found.entry == projection.shared_entry() + slice);
                assert_eq!(
                    found.map_or([false; 2], |found| [found.a_elems, found.b_elems].map(|at| at.is_some())),
                    shared
                );
                assert_eq!(found.map(|found| found.rank), held.iter().map(|(_, pair)| pair.rank).max());
                for (local, pair) in held {
                    let number = projection.expert_entry(local) + slice;
                    let index = entries.iter().position(|entry| entry.entry == number).unwrap();
                    let entry = entries.remove(index);
                    let rank = pair.rank as f64;
                    #[expect(clippy::cast_possible_truncation, reason = "as f32 as the library's")]
                    let scaling = (LORA_ALPHA / if self.rslora { rank.sqrt() } else { rank }) as f32;
                    assert_eq!((entry.rank, entry.scaling), (pair.rank, scaling));
                    let found = found.unwrap();
                    assert!(found.a_elems.is_none_or(|at| at == entry.a_elems));
                    assert!(found.b_elems.is_none_or(|at| at == entry.b_elems));
                    check_pair(&block, &entry, pair, self.features(module)[0], (&inputs, &outputs));
                    let (a, b) = layouts(entry.rank, projection, modules.len());
                    begins.extend([(entry.a_elems, a.elems()), (entry.b_elems, b.elems())]);
                }
            }
        }
        assert!(entries.is_empty(), "{entries:?}");
        begins.sort_unstable();
        begins.dedup();
        let end = begins.into_iter().fold(0, |end, (begin, elems)| {
            assert_eq!(begin, end, "factors overlap or leave gaps");
            begin + elems
        });
        assert_eq!(end, block.len());
    }
}

fn layouts(rank: usize, projection: &ProjectionSite, slices: usize) -> (LinearA, B) {
    let a = LinearA { rank, in_features: projection.in_features() };
    (a, B { out_features: projection.out_features() / slices, rank })
}

/// Compares a pair of whole factors with its part in the block.
fn check_pair(
    block: &[f32],
    entry: &ImageEntry,
    pair: &Pair,
    in_features: usize,
    (inputs, outputs): (&Range<usize>, &Range<usize>),
) {
    let rank = pair.rank;
    let (a, b) = (LinearA { rank, in_features: inputs.len() }, B { out_features: outputs.len(), rank });
    for row in 0..rank {
        for (at, col) in inputs.clone().enumerate() {
            assert_eq!(block[entry.a_elems + a.at(row, at)], pair.a[row * in_features + col], "A at {row}, {col}");
        }
        for (at, output) in outputs.clone().enumerate() {
            assert_eq!(block[entry.b_elems + b.at(at, row)], pair.b[output * rank + row], "B at {output}, {row}");
        }
    }
}

fn block(image: &SlotImage<'_>) -> Vec<f32> {
    let mut block = vec![f32::NAN; image.bytes() / 4];
    image.write_to(bytemuck::cast_slice_mut(&mut block)).unwrap();
    block
}

/// Transposes each of several `[rows, cols]` matrices.
fn transposed_each(values: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    values
        .chunks(rows * cols)
        .flat_map(|matrix| (0..cols).flat_map(move |col| (0..rows).map(move |row| matrix[row * cols + col])))
        .collect()
}

/// The tensors that PEFT saves for a parameter of experts: `[E r, in]`, and `[out, r, E]` flattened to `[out, r E]`.
fn parameter(pairs: &[&Pair], [input, output]: [usize; 2], orientation: Orientation) -> [(Vec<usize>, Vec<f32>); 2] {
    let (rank, num) = (pairs[0].rank, pairs.len());
    let (takes, gives, pairs): (_, _, Vec<Pair>) = match orientation {
        Orientation::Forward => (input, output, pairs.iter().map(|pair| (*pair).clone()).collect()),
        // (B A)ᵀ = Aᵀ Bᵀ
        Orientation::Reversed => {
            let reverse = |pair: &&Pair| {
                let a = transposed_each(&pair.b, output, rank);
                Pair { rank, a, b: transposed_each(&pair.a, rank, input) }
            };
            (output, input, pairs.iter().map(reverse).collect())
        }
    };
    let a = pairs.iter().flat_map(|pair| pair.a.clone()).collect();
    let pairs = &pairs;
    let b =
        (0..gives).flat_map(|row| (0..rank).flat_map(move |r| pairs.iter().map(move |pair| pair.b[row * rank + r])));
    [(vec![num * rank, takes], a), (vec![gives, rank * num], b.collect())]
}

fn plan_all(case: &Case, form: Form) -> Option<Vec<(Vec<f32>, Vec<ImageEntry>)>> {
    let (config, tensors) = case.parts(form)?;
    let transposed = matches!(form, Form::Parameters { transposed: true, .. });
    let adapter = Adapter::from_tensors(&config, tensors).unwrap();
    let ranks = (0..case.size).map(|rank| {
        let (model, id) = case.model(rank, transposed);
        let image = adapter.plan(&model, DType::F32).map_err(|error| (form, error)).unwrap();
        assert!(image.bytes() <= SlotImage::max_bytes(&model, DType::F32, image.max_rank()), "{form:?}");
        case.check(rank, &image, (&model, id));
        (block(&image), image.entries().to_vec())
    });
    Some(ranks.collect())
}

fn cases() -> impl Strategy<Value = Case> {
    let halves = || prop_oneof![Just(Halves::GateUp), Just(Halves::UpGate), Just(Halves::Interleaved)];
    let dtypes = prop_oneof![Just(DType::BF16), Just(DType::F16), Just(DType::F32)];
    let sizes = (1..=5_usize, 1..=40_usize, 1..=20_usize, 1..=2_usize);
    // Whether all experts have each module, gate and up share A, and all experts share A or B.
    let kinds = (any::<bool>(), any::<bool>(), any::<[[bool; 2]; 3]>(), 1..=17_usize, any::<bool>());
    let some = proptest::collection::vec((proptest::bool::weighted(0.8), any::<bool>()), 15);
    (sizes, kinds, halves(), halves(), some, dtypes, any::<u32>()).prop_map(
        |((num_experts, hidden, inter, size), (all, tied, shared, rank, gated), halves, stored, some, dtype, seed)| {
            let mut held: Vec<_> = (0..num_experts).filter(|expert| some[*expert].1 || seed % 3 == 0).collect();
            let first = seed as usize % held.len().max(1);
            held.rotate_left(first);
            let pairs = [const { Vec::new() }; 3];
            let rslora = seed % 2 == 0;
            let mut case = Case { num_experts, hidden, inter, size, gated, halves, stored, held, dtype, rslora, pairs };
            let mut seed = seed;
            let mut value = || {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                round(f32::from(u16::try_from(seed >> 16).unwrap()) / 1024.0 - 32.0, dtype)
            };
            for module in 0..3 {
                let [input, output] = case.features(module);
                let rank = if all { rank } else { 1 + (rank + module) % 5 };
                let mut fill = |len: usize| (0..len).map(|_| value()).collect::<Vec<_>>();
                let common = (fill(rank * input), fill(output * rank));
                let mut pairs: Vec<Option<Pair>> = Vec::new();
                for expert in 0..num_experts {
                    let a = if shared[module][0] { common.0.clone() } else { fill(rank * input) };
                    let b = if shared[module][1] { common.1.clone() } else { fill(output * rank) };
                    let has = all || some[module * 5 + expert].0;
                    pairs.push(has.then_some(Pair { rank, a, b }));
                }
                if module == UP && tied && all {
                    for (up, gate) in pairs.iter_mut().zip(&case.pairs[GATE]) {
                        up.as_mut().unwrap().a = gate.as_ref().unwrap().a.clone();
                    }
                }
                case.pairs[module] = pairs;
            }
            if !gated {
                case.pairs[GATE].clear();
            }
            case
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(more_cases(32)))]

    /// Every form that can express an adapter gives the same block, which equals the adapter element by element.
    #[test]
    fn all_forms_give_the_same(case in cases()) {
        let Some(first) = plan_all(&case, FORMS[0]) else { return Ok(()) };
        for form in &FORMS[1..] {
            if let Some(other) = plan_all(&case, *form) {
                prop_assert!(other == first, "{:?}", form);
            }
        }
    }
}

/// The first form, from this one on, that can express the adapter and has experts stored as the other forms do.
fn expressed(case: &Case, first: usize) -> Parts {
    let is_plain = |form: &&Form| !matches!(form, Form::Parameters { transposed: true, .. });
    let mut forms = FORMS.iter().cycle().skip(first).take(FORMS.len()).filter(is_plain);
    forms.find_map(|form| case.parts(*form)).unwrap()
}

/// The factors of two adapters, one after the other along the rank.
fn joined(first: &Pair, second: &Pair) -> Pair {
    let rows = first.b.chunks(first.rank).zip(second.b.chunks(second.rank));
    let b = rows.flat_map(|(first, second)| [first, second].concat()).collect();
    Pair { rank: first.rank + second.rank, a: [&first.a[..], &second.a].concat(), b }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(more_cases(32)))]

    /// Adapters of any two forms, each halved, are as one adapter of each expert that has the factors of both, with
    /// what all experts share stored once. Either may lack experts.
    #[test]
    fn combinations_of_forms_are_joined(case in cases(), kept in any::<u16>(), forms in any::<[usize; 2]>()) {
        let first = Case { rslora: false, ..case };
        let mut second = first.clone();
        let mut both = first.clone();
        // α, by module and expert, of those with factors of one adapter: half of their scaling.
        let mut halved = serde_json::Map::new();
        for (module, name) in PEFT_NAMES.into_iter().enumerate() {
            for (expert, pair) in second.pairs[module].iter_mut().enumerate() {
                let is_kept = kept >> ((module * 5 + expert) % 16) & 1 == 1 || kept % 3 == 0;
                if !is_kept && first.pairs[1 + module % 2].iter().any(Option::is_some) && module == DOWN {
                    *pair = None;
                }
                for values in pair.iter_mut().flat_map(|pair| [&mut pair.a, &mut pair.b]) {
                    values.reverse();
                }
                let own = &mut both.pairs[module][expert];
                match (&*own, &*pair) {
                    (Some(one), Some(other)) => *own = Some(joined(one, other)),
                    (Some(_), None) => {
                        halved.insert(format!("experts\\.{expert}\\.{name}"), (LORA_ALPHA / 2.0).into());
                    }
                    (None, _) => {}
                }
            }
        }
        prop_assume!([&first, &second].iter().all(|case| case.pairs.iter().flatten().any(Option::is_some)));
        let [one, other] = [(&first, forms[0]), (&second, forms[1])].map(|(case, form)| {
            let (config, tensors) = expressed(case, form % FORMS.len());
            Adapter::from_tensors(&config, tensors).unwrap()
        });
        let (config, tensors) = both.parts(FORMS[0]).unwrap();
        let mut config: Value = serde_json::from_str(&config).unwrap();
        config["alpha_pattern"] = halved.into();
        let whole = Adapter::from_tensors(&config.to_string(), tensors).unwrap();
        for rank in 0..both.size {
            let (model, _) = both.model(rank, false);
            let image = SlotImage::combined(&[(&one, 0.5), (&other, 0.5)], &model, DType::F32).unwrap();
            let want = whole.plan(&model, DType::F32).unwrap();
            prop_assert_eq!(image.entries(), want.entries());
            prop_assert_eq!(image.shared(), want.shared());
            prop_assert_eq!(block(&image), block(&want));
        }
    }
}

/// An adapter of all modules, of rank 2, with distinct values.
fn plain(num_experts: usize, hidden: usize, inter: usize) -> Case {
    let mut next = 0_u16;
    let mut fill = |len: usize| -> Vec<f32> {
        let mut value = || {
            next += 1;
            f32::from(next)
        };
        (0..len).map(|_| value()).collect()
    };
    let mut case = Case {
        num_experts,
        hidden,
        inter,
        size: 1,
        gated: true,
        halves: Halves::GateUp,
        stored: Halves::GateUp,
        held: (0..num_experts).collect(),
        dtype: DType::F32,
        rslora: false,
        pairs: [const { Vec::new() }; 3],
    };
    for module in 0..3 {
        let [input, output] = case.features(module);
        let mut pair = || Some(Pair { rank: 2, a: fill(2 * input), b: fill(output * 2) });
        case.pairs[module] = (0..num_experts).map(|_| pair()).collect();
    }
    case.pairs[UP] = case.pairs[UP]
        .iter()
        .zip(&case.pairs[GATE])
        .map(|(up, gate)| Some(Pair { a: gate.as_ref()?.a.clone(), ..up.clone()? }))
        .collect();
    case
}

/// Every form can express some adapter, so the test above covers all forms.
#[test]
fn every_form_is_tried() {
    let mut case = plain(3, 8, 6);
    for pair in case.pairs[DOWN].iter_mut().flatten() {
        pair.b = (0..16_u8).map(f32::from).collect();
    }
    let a: Vec<f32> = (0..16_u8).map(f32::from).collect();
    for pair in case.pairs[..2].iter_mut().flatten().flatten() {
        pair.a = a.clone();
    }
    let first = plan_all(&case, FORMS[0]).unwrap();
    for form in FORMS {
        assert_eq!(plan_all(&case, form).unwrap(), first, "{form:?}");
    }
}

/// The adapter in a form, with its configuration changed by `edit`, planned for the model.
fn plan(case: &Case, form: Form, edit: impl FnOnce(&mut Value)) -> Result<usize, AdapterError> {
    let (config, tensors) = case.parts(form).unwrap();
    let mut config = serde_json::from_str(&config).unwrap();
    edit(&mut config);
    plan_tensors(case, &config, tensors)
}

fn plan_tensors(case: &Case, config: &Value, tensors: Vec<(String, Tensor)>) -> Result<usize, AdapterError> {
    let adapter = Adapter::from_tensors(&config.to_string(), tensors)?;
    Ok(adapter.plan(&case.model(0, false).0, DType::F32)?.bytes())
}

const BY_PARAMETER: Form =
    Form::Parameters { version: Some("0.19.1"), transposed: false, orientation: Orientation::Forward };

#[test]
fn shapes_say_how_parameters_stand_if_the_version_does_not() {
    let forgetful = |case: &Case, orientation| {
        let form = Form::Parameters { version: None, transposed: false, orientation };
        let blocks = plan_all(case, form).unwrap();
        assert_eq!(blocks, plan_all(case, FORMS[0]).unwrap());
    };
    forgetful(&plain(3, 8, 6), Orientation::Forward);
    forgetful(&plain(3, 8, 6), Orientation::Reversed);
    // The shape of gate_up decides for a square down.
    forgetful(&plain(3, 8, 8), Orientation::Forward);
    forgetful(&plain(3, 8, 8), Orientation::Reversed);
    // The shape of down decides for a square gate_up.
    forgetful(&plain(3, 8, 4), Orientation::Reversed);
    // Development versions of PEFT decide nothing.
    let case = plain(3, 8, 6);
    for version in ["0.18.1.dev0", "0.18.2.dev0@0a1b2c", "unknown", ""] {
        for orientation in [Orientation::Forward, Orientation::Reversed] {
            let form = Form::Parameters { version: None, transposed: false, orientation };
            assert!(plan(&case, form, |config| config["peft_version"] = json!(version)).is_ok(), "{version}");
        }
    }
}

#[test]
fn a_version_is_believed() {
    let case = plain(3, 8, 6);
    for (version, orientation) in [
        ("0.17.0", Orientation::Reversed),
        ("0.18.0", Orientation::Reversed),
        ("0.18.1", Orientation::Reversed),
        ("0.19.0", Orientation::Forward),
        ("0.19.0.dev0", Orientation::Forward),
        ("0.21.2", Orientation::Forward),
        ("1.0.0", Orientation::Forward),
    ] {
        let other = match orientation {
            Orientation::Forward => Orientation::Reversed,
            Orientation::Reversed => Orientation::Forward,
        };
        let form = |orientation| Form::Parameters { version: Some(version), transposed: false, orientation };
        assert!(plan(&case, form(orientation), |_| ()).is_ok(), "{version}");
        refused!(plan(&case, form(other), |_| ()), ExpertShapes, "experts.lora_A", "[3 * rank, ");
    }
}

#[test]
fn parameters_that_could_stand_in_two_ways_are_refused() {
    // All parameters are square except gate_up, which is missing.
    let case = plain(3, 8, 8);
    let (_, mut tensors) = case.parts(BY_PARAMETER).unwrap();
    tensors.retain(|(key, _)| !key.contains("base_layer"));
    let config = json!({"peft_type": "LORA", "lora_alpha": 4});
    let refusal = plan_tensors(&case, &config, tensors.clone());
    refused!(refusal, AmbiguousExperts, "experts.lora_A", "[6, 8]", "[8, 6]", "peft_version", "Adapter::oriented");
    // The version that the error asks for decides.
    for version in ["0.18.1", "0.19.1"] {
        let config = json!({"peft_type": "LORA", "lora_alpha": 4, "peft_version": version});
        assert!(plan_tensors(&case, &config, tensors.clone()).is_ok());
    }
    let (model, _) = case.model(0, false);
    let packed = |orientation| {
        let adapter = Adapter::from_tensors(&config.to_string(), tensors.clone()).unwrap().oriented(orientation);
        block(&adapter.plan(&model, DType::F32).unwrap())
    };
    assert_ne!(packed(Orientation::Forward), packed(Orientation::Reversed));
    // For transposed experts, versions from 0.19 on decide nothing.
    let (model, _) = case.model(0, true);
    let with_version = |version: &str| {
        let config = json!({"peft_type": "LORA", "lora_alpha": 4, "peft_version": version});
        let adapter = Adapter::from_tensors(&config.to_string(), tensors.clone()).unwrap();
        adapter.plan(&model, DType::F32).map(|image| block(&image))
    };
    assert_eq!(with_version("0.18.1").unwrap(), packed(Orientation::Forward));
    refused!(with_version("0.19.1"), AmbiguousExperts, "experts.lora_A");
    // The hidden size is twice the intermediate size.
    let case = plain(3, 8, 4);
    let (_, mut tensors) = case.parts(BY_PARAMETER).unwrap();
    tensors.retain(|(key, _)| key.contains("base_layer"));
    refused!(plan_tensors(&case, &config, tensors), AmbiguousExperts, "experts.base_layer.lora_A", "[6, 8]");
}

#[test]
fn a_single_parameter_is_known_by_its_shape() {
    let case = plain(3, 8, 6);
    let (config, tensors) = case.parts(BY_PARAMETER).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config.as_object_mut().unwrap().remove("target_parameters");
    for (inner, entries) in [(true, 6), (false, 3)] {
        // PEFT wraps a single parameter once.
        let single = tensors.iter().filter(|(key, _)| key.contains("base_layer") == inner);
        let single: Vec<_> = single.map(|(key, tensor)| (key.replace(".base_layer", ""), tensor.clone())).collect();
        let adapter = Adapter::from_tensors(&config.to_string(), single).unwrap();
        assert_eq!(adapter.stacks()[0].path(), PATH);
        assert_eq!(adapter.stacks()[0].a_shape(), [6, if inner { 8 } else { 6 }]);
        let (model, id) = case.model(0, false);
        let image = adapter.plan(&model, DType::F32).unwrap();
        assert_eq!(image.entries().len(), entries);
        let projection = if inner { model[id].gate_up() } else { model[id].down() };
        assert_eq!(image.entries()[0].entry, projection.expert_entry(0));
    }
}

#[test]
fn parameters_are_those_that_were_targets() {
    let case = plain(3, 8, 6);
    let targets = |names: Value| plan(&case, BY_PARAMETER, |config| config["target_parameters"] = names);
    assert!(targets(json!(["down_proj", "gate_up_proj"])).is_ok());
    assert!(
        plan(&case, BY_PARAMETER, |config| drop(config.as_object_mut().unwrap().remove("target_parameters"))).is_ok()
    );
    for none in [json!(null), json!([]), json!(["own_proj", "gate_up"]), json!(["other.experts.down_proj"])] {
        refused!(targets(none), NotTargeted, "model.layers.0.mlp.experts", "`target_parameters`");
    }
    refused!(targets(json!(["mlp.experts.down_proj"])), ExpertShapes, "experts.base_layer.lora_A", "of down_proj");
    refused!(targets(json!("all")), InvalidField, "`target_parameters`", "a list of names");
    refused!(targets(json!([1])), InvalidField, "`target_parameters`", "a list of names");
}

/// The wrappers say which parameter is the first, however the paths before them are spelled, and two are not the same.
#[test]
fn parameters_are_known_by_their_wrappers() {
    let mut case = plain(3, 6, 6);
    case.gated = false;
    case.pairs[GATE].clear();
    let (config, tensors) = case.parts(BY_PARAMETER).unwrap();
    let planned = |respell: &dyn Fn(&str) -> String| {
        let tensors = tensors.iter().map(|(key, tensor)| (respell(key), tensor.clone()));
        let adapter = Adapter::from_tensors(&config, tensors.collect::<Vec<_>>()).unwrap();
        adapter.plan(&case.model(0, false).0, DType::F32).map(|image| block(&image))
    };
    let plain = planned(&str::to_owned).unwrap();
    let inner = |key: &str| key.contains("base_layer");
    let shorter = |key: &str| key.replace("model.model.layers", "model.layers");
    for inside in [true, false] {
        let one = |key: &str| if inner(key) == inside { shorter(key) } else { key.to_owned() };
        assert!(planned(&one).unwrap() == plain, "{inside}");
    }
    let same = |key: &str| if inner(key) { shorter(key).replace(".base_layer", "") } else { key.to_owned() };
    refused!(planned(&same), Overlap, "`layers.0.mlp.experts`", "`model.layers.0.mlp.experts`");
}

/// PEFT finds a parameter by its path without `base_layer`.
#[test]
fn alpha_patterns_of_parameters() {
    let case = plain(2, 8, 6);
    let (config, tensors) = case.parts(BY_PARAMETER).unwrap();
    let scalings = |pattern: &str| {
        let mut config: Value = serde_json::from_str(&config).unwrap();
        config["alpha_pattern"] = json!({pattern: 3});
        let adapter = Adapter::from_tensors(&config.to_string(), tensors.clone()).unwrap();
        let (model, id) = case.model(0, false);
        let image = adapter.plan(&model, DType::F32).unwrap();
        [model[id].gate_up(), model[id].down()].map(|projection| {
            let number = projection.expert_entry(1);
            image.entries().iter().find(|entry| entry.entry == number).unwrap().scaling
        })
    };
    assert_eq!(scalings("experts.gate_up_proj"), [1.5, 3.0]);
    assert_eq!(scalings(r"model\.layers\.0\.mlp\.experts\.down_proj"), [3.0, 1.5]);
    assert_eq!(scalings("experts"), [3.0, 3.0]);
}

#[test]
fn experts_have_ranks_and_scalings_of_their_own() {
    let mut case = plain(2, 8, 6);
    // A has the values of the other's first rows.
    case.pairs[UP] = [2, 3].map(|rank| Some(Pair { rank, a: vec![1.0; rank * 8], b: vec![2.0; 6 * rank] })).into();
    case.pairs[GATE][0] = None;
    plan_all(&case, FORMS[0]).unwrap();
    let (config, tensors) = case.parts(FORMS[0]).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["alpha_pattern"] = json!({r"experts\.1\.down_proj": 5});
    let adapter = Adapter::from_tensors(&config.to_string(), tensors).unwrap();
    let (model, id) = case.model(0, false);
    let image = adapter.plan(&model, DType::F32).unwrap();
    let scaling = |number| image.entries().iter().find(|entry| entry.entry == number).unwrap().scaling;
    assert_eq!([0, 1].map(|local| scaling(model[id].down().expert_entry(local))), [3.0, 2.5]);
}

/// Whichever row it is: factors are compared some rows at a time.
#[test]
fn factors_that_differ_in_one_row_are_not_shared() {
    const RANK: usize = 40;
    const HIDDEN: usize = 1024;
    let mut case = plain(2, HIDDEN, 1);
    case.pairs = [vec![None; 2], vec![None; 2], vec![None; 2]];
    let pair = |a: Vec<f32>| Some(Pair { rank: RANK, a, b: vec![1.0; RANK] });
    for row in 0..=RANK {
        let mut other = vec![1.0; RANK * HIDDEN];
        // Of the last row, none.
        if let Some(last) = other.get_mut((row + 1) * HIDDEN - 1) {
            *last = 2.0;
        }
        case.pairs[UP] = vec![pair(vec![1.0; RANK * HIDDEN]), pair(other)];
        let (config, tensors) = case.parts(FORMS[0]).unwrap();
        let adapter = Adapter::from_tensors(&config, tensors).unwrap();
        let image = adapter.plan(&case.model(0, false).0, DType::F32).unwrap();
        assert_eq!(image.shared().iter().any(|shared| shared.a_elems.is_some()), row == RANK, "row {row}");
    }
}

/// All ranks give the same errors, whichever experts they hold.
#[test]
fn experts_that_are_elsewhere_are_checked() {
    let mut case = plain(3, 8, 6);
    let (config, mut tensors) = case.parts(FORMS[0]).unwrap();
    let bad = tensors.iter_mut().find(|(key, _)| key.contains("experts.2.up_proj.lora_B")).unwrap();
    bad.1 = crate::ones(&[5, 2]);
    let config = serde_json::from_str(&config).unwrap();
    let verdicts = [vec![0, 1, 2], vec![2], vec![0], vec![]].map(|held| {
        case.held = held;
        plan_tensors(&case, &config, tensors.clone()).unwrap_err().to_string()
    });
    assert!(verdicts[0].contains("experts.2.up_proj.lora_B") && verdicts[0].contains("[5, 2]"), "{verdicts:?}");
    assert!(verdicts.iter().all(|verdict| *verdict == verdicts[0]), "{verdicts:?}");
}

#[test]
fn a_table_of_other_experts_refuses_an_image() {
    let mut case = plain(3, 8, 6);
    let (config, tensors) = case.parts(FORMS[0]).unwrap();
    let adapter = Adapter::from_tensors(&config, tensors).unwrap();
    let models = [vec![0, 1], vec![1, 0], vec![0, 2]].map(|held| {
        case.held = held;
        case.model(0, false).0
    });
    let load = |model: &Model, rank, image: &SlotImage<'_>| {
        let capacity = Capacity::tokens(1).slots(1).rank(rank);
        WeightTable::new(model, DType::F32, capacity, image.bytes()).unwrap().load(0, image)
    };
    for (i, model) in models.iter().enumerate() {
        let image = adapter.plan(model, DType::F32).unwrap();
        for (j, other) in models.iter().enumerate() {
            let loaded = load(other, 2, &image);
            if i == j {
                loaded.unwrap();
            } else {
                assert!(matches!(loaded, Err(LoadError::Slot(SlotError::Model))), "{loaded:?}");
            }
        }
        let loaded = load(model, 1, &image);
        assert!(matches!(loaded, Err(LoadError::Slot(SlotError::Rank { rank: 2, max_rank: 1 }))), "{loaded:?}");
    }
}

/// Gate and up share A in a block only if they do in every expert. One expert's A must not stand for another's.
#[test]
fn gate_and_up_of_one_expert_may_have_one_a() {
    let tied = plain(3, 8, 6);
    let (model, id) = tied.model(0, false);
    let begins = |case: &Case| {
        let (config, tensors) = case.parts(FORMS[0]).unwrap();
        let adapter = Adapter::from_tensors(&config, tensors).unwrap();
        let image = adapter.plan(&model, DType::F32).unwrap();
        case.check(0, &image, (&model, id));
        let begin = |entry: usize| image.entries().iter().find(|at| at.entry == entry).unwrap().a_elems;
        let gate_up = |expert: usize| [0, 1].map(|slice| begin(model[id].gate_up().expert_entry(expert) + slice));
        [0, 1, 2].map(gate_up)
    };
    assert!(begins(&tied).iter().all(|[gate, up]| gate == up));
    for untied in 0..3 {
        let mut case = tied.clone();
        case.pairs[UP][untied].as_mut().unwrap().a[5] += 1.0;
        assert!(begins(&case).iter().all(|[gate, up]| gate != up), "expert {untied} is not tied");
    }
}

/// An interleaved gate_up has one A: a second A would belong to neither half of B.
#[test]
fn interleaved_halves_have_one_a() {
    let mut case = plain(3, 8, 6);
    let two = case.parts(Form::StackedFused { two_a: true }).unwrap();
    let one = case.parts(Form::StackedFused { two_a: false }).unwrap();
    let mut planned = |(config, tensors): Parts, stored| {
        case.stored = stored;
        plan_tensors(&case, &serde_json::from_str(&config).unwrap(), tensors)
    };
    planned(two.clone(), Halves::GateUp).unwrap();
    planned(one, Halves::Interleaved).unwrap();
    refused!(planned(two, Halves::Interleaved), RankMismatch, "gate_up_proj");
}

/// A single expert shares no factor.
#[test]
fn one_expert_shares_nothing() {
    let case = plain(1, 8, 6);
    for form in FORMS {
        if let Some((config, tensors)) = case.parts(form) {
            let adapter = Adapter::from_tensors(&config, tensors).unwrap();
            let transposed = matches!(form, Form::Parameters { transposed: true, .. });
            let (model, _) = case.model(0, transposed);
            let image = adapter.plan(&model, DType::F32).unwrap();
            assert!(image.shared().iter().all(|shared| (shared.a_elems, shared.b_elems) == (None, None)), "{image:?}");
        }
    }
}

/// Interleaved gate and up of transposed parameters, as in GPT-OSS, where the hidden and the intermediate size are equal.
#[test]
fn transposed_interleaved_parameters() {
    let mut case = plain(3, 6, 6);
    case.stored = Halves::Interleaved;
    let first = plan_all(&case, FORMS[0]).unwrap();
    for version in [None, Some("0.18.1"), Some("0.19.1")] {
        for orientation in [Orientation::Forward, Orientation::Reversed] {
            if (version, orientation) == (Some("0.18.1"), Orientation::Reversed) {
                continue;
            }
            let form = Form::Parameters { version, transposed: true, orientation };
            assert_eq!(plan_all(&case, form).unwrap(), first, "{form:?}");
        }
    }
}

#[test]
fn other_names_of_what_experts_are_in() {
    let case = plain(2, 8, 6);
    let (config, tensors) = case.parts(FORMS[0]).unwrap();
    let renamed = |to: &str| {
        let tensors = tensors.iter().map(|(key, tensor)| (key.replace("model.layers.0.mlp", to), tensor.clone()));
        let adapter = Adapter::from_tensors(&config, tensors.collect::<Vec<_>>()).unwrap();
        adapter.plan(&case.model(0, false).0, DType::F32).map(|image| image.entries().len())
    };
    for to in ["model.layers.0.block_sparse_moe", "model.language_model.layers.0.mlp", "layers.0.block_sparse_moe"] {
        assert_eq!(renamed(to).unwrap(), 6, "{to}");
    }
    for to in ["model.layers.1.mlp", "model.layers.0.feed_forward", "model.layers.0.mlp.mlp"] {
        refused!(renamed(to), NoPlace, format!("{to}.experts.0.down_proj"));
    }
}

#[test]
fn modules_that_experts_do_not_have() {
    let case = plain(2, 8, 6);
    let config = json!({"peft_type": "LORA", "lora_alpha": 4});
    let one = |path: &str, a: &[usize], b: &[usize]| {
        let keys = ["A", "B"].map(|factor| format!("{path}.lora_{factor}.weight"));
        let [a_key, b_key] = keys;
        let ones = |shape: &[usize]| crate::ones(shape);
        plan_tensors(&case, &config, vec![(a_key, ones(a)), (b_key, ones(b))])
    };
    let expert = |name: &str| format!("{PATH}.{name}");
    assert!(one(&expert("1.up_proj"), &[2, 8], &[6, 2]).is_ok());
    refused!(one(&expert("2.up_proj"), &[2, 8], &[6, 2]), NoExpert, expert("2.up_proj"), "expert 2", "has 2");
    for name in ["1.gate", "01.up_proj", "-1.up_proj", "1.up_proj.inner", "1.2.up_proj", "w4", "bias", "one.up_proj"] {
        refused!(one(&expert(name), &[2, 8], &[6, 2]), NoPlace, expert(name));
    }
    refused!(one(&expert("1.up_proj"), &[2, 7], &[6, 2]), Shape, expert("1.up_proj.lora_A"), "[2, 7]", "[2, 8]");
    refused!(one(&expert("1.up_proj"), &[2, 8], &[8, 2]), Shape, expert("1.up_proj.lora_B"), "[8, 2]", "[6, 2]");
    refused!(one(&expert("1.up_proj"), &[2, 2, 8], &[2, 6, 2]), NotMatrix, expert("1.up_proj.lora_A"), "[2, 2, 8]");
    let stacked = |a: &[usize], b: &[usize]| one(&expert("up_proj"), a, b);
    assert!(stacked(&[2, 2, 8], &[1, 6, 2]).is_ok());
    for (a, b) in [
        ([3, 2, 8], [2, 6, 2]),
        ([2, 2, 8], [3, 6, 2]),
        ([2, 2, 6], [2, 6, 2]),
        ([2, 2, 8], [2, 8, 2]),
        ([2, 8, 2], [2, 2, 6]),
        ([0, 2, 8], [2, 6, 2]),
    ] {
        refused!(stacked(&a, &b), ExpertShapes, expert("up_proj.lora_A"), "[2 or 1, rank, 8] and [2 or 1, 6, rank]");
    }
    refused!(stacked(&[2, 2, 8], &[2, 6, 3]), RankMismatch, expert("up_proj.lora_A"));
    refused!(stacked(&[2, 513, 8], &[2, 6, 513]), Rank, expert("up_proj.lora_A"), "rank 513");
    // Two A's for one module.
    refused!(stacked(&[2, 4, 8], &[2, 6, 2]), RankMismatch, expert("up_proj.lora_A"));
    refused!(one(&expert("gate_up_proj"), &[2, 8], &[24, 2]), ExpertShapes, "separate gate and up");
    refused!(one(&expert("up_proj"), &[2, 8], &[6, 2]), ExpertShapes, "[experts * out, rank]");
    refused!(
        one(PATH, &[3, 8], &[12, 3]),
        ExpertShapes,
        "experts.lora_A",
        "[2 * rank, 8] and [12, rank * 2] of gate_up_proj"
    );
    refused!(one(PATH, &[1026, 8], &[12, 1026]), Rank, "experts.lora_A", "rank 513");
    let fms = |a: &[usize], b: &[usize]| one("model.layers.0.block_sparse_moe.w1", a, b);
    assert!(fms(&[2, 2, 8], &[2, 6, 2]).is_ok() && fms(&[2, 8, 2], &[2, 2, 6]).is_ok());
    refused!(fms(&[2, 8, 2], &[2, 6, 2]), ExpertShapes, "w1.lora_A", "[2, 8, rank] and [2, rank, 6], or");
    refused!(fms(&[1, 2, 8], &[2, 6, 2]), ExpertShapes, "w1.lora_A");
    // Dense layers are not experts.
    let dense = "model.layers.0.mlp.gate_proj";
    refused!(one(dense, &[2, 2, 8], &[2, 6, 2]), NoPlace, dense);
    refused!(one("lm_head", &[2, 2, 8], &[2, 8, 2]), NotMatrix, "lm_head.lora_A");
}

/// Empty placeholders, as trainers write them that store parameters elsewhere, must not hide missing factors.
#[test]
fn factors_without_elements_are_refused() {
    let case = plain(2, 8, 6);
    let (config, tensors) = case.parts(FORMS[0]).unwrap();
    let config = serde_json::from_str(&config).unwrap();
    for module in ["0.gate_proj", "0.up_proj", "1.down_proj"] {
        let empty = |(key, tensor): &(String, Tensor)| {
            (key.clone(), if key.contains(module) { crate::ones(&[0]) } else { tensor.clone() })
        };
        let refusal = plan_tensors(&case, &config, tensors.iter().map(empty).collect());
        refused!(refusal, UnsupportedTensor, format!("experts.{module}.lora_A"), "an empty factor");
    }
    let elsewhere = |(key, _): &(String, Tensor)| (key.replace("layers.0", "layers.7"), crate::ones(&[0]));
    let refusal = plan_tensors(&case, &config, tensors.iter().cloned().chain(tensors.iter().map(elsewhere)).collect());
    refused!(refusal, NoPlace, "model.layers.7.mlp.experts");
}

#[test]
fn factors_of_fms_that_could_be_transposed_are_refused() {
    let case = plain(3, 2, 2);
    let (config, tensors) = Case { num_experts: 3, ..case.clone() }.parts(FORMS[3]).unwrap();
    let named = |to: &str| {
        let rename = |key: &str| key.replace("mlp.experts.gate_proj", to).replace("mlp.experts.up_proj", "x");
        let tensors = tensors.iter().filter(|(key, _)| key.contains("gate_proj"));
        let tensors = tensors.map(|(key, tensor)| (rename(key), tensor.clone())).collect();
        plan_tensors(&case, &serde_json::from_str(&config).unwrap(), tensors)
    };
    refused!(named("block_sparse_moe.w1"), AmbiguousExperts, "w1.lora_A", "[3, 2, 2]", "rename them to `experts.w1`");
    assert!(named("block_sparse_moe.experts.w1").is_ok());
}

#[test]
fn experts_without_a_gate() {
    let mut case = plain(2, 8, 6);
    case.gated = false;
    case.pairs[GATE].clear();
    let (config, tensors) = case.parts(FORMS[0]).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let with = |key: &str, shapes: [&[usize]; 2]| {
        let keys = ["A", "B"].map(|factor| format!("{PATH}.{key}.lora_{factor}.weight"));
        let more = keys.into_iter().zip(shapes.map(crate::ones));
        plan_tensors(&case, &config, tensors.iter().cloned().chain(more).collect())
    };
    let plain = plan_tensors(&case, &config, tensors.clone()).unwrap();
    // Empty factors that some trainers write for a missing module.
    for (key, shapes) in
        [("0.gate_proj", [&[0, 8][..], &[6, 0]]), ("w3", [&[2, 0, 8], &[2, 0, 0]]), ("1.w3", [&[0], &[0]])]
    {
        assert_eq!(with(key, shapes).unwrap(), plain, "{key}");
    }
    // In ungated experts, up may be named `w1`.
    let (_, w_tensors) = case.parts(Form::PerExpert { names: W_NAMES }).unwrap();
    let placeholder = |tensors: &[(String, Tensor)], key: &str| {
        let keys = ["A", "B"].map(|factor| (format!("{PATH}.{key}.lora_{factor}.weight"), crate::ones(&[0])));
        plan_tensors(&case, &config, tensors.iter().cloned().chain(keys).collect())
    };
    assert_eq!(placeholder(&w_tensors, "0.up_proj").unwrap(), plain);
    let none: Vec<_> = tensors.iter().filter(|(key, _)| !key.contains("0.up_proj")).cloned().collect();
    for (tensors, key) in [(&none, "0.up_proj"), (&tensors, "down_proj"), (&tensors, "base_layer")] {
        refused!(placeholder(tensors, key), UnsupportedTensor, format!("experts.{key}.lora_A"), "an empty factor");
    }
    refused!(with("0.gate_proj", [&[2, 8], &[6, 2]]), NoPlace, "experts.0.gate_proj");
    refused!(with("gate_up_proj", [&[2, 2, 8], &[2, 12, 2]]), NoPlace, "experts.gate_up_proj");
    refused!(with("0.w1", [&[2, 8], &[6, 2]]), Overlap, "experts.0.up_proj", "experts.0.w1");
    // Up and down have one shape. Their order identifies two of them, and a name a single one.
    let mut square = Case { hidden: 6, ..case };
    let pair = |value: f32| Some(Pair { rank: 2, a: vec![value; 12], b: vec![-value; 12] });
    square.pairs = [vec![], vec![pair(1.0), pair(2.0)], vec![pair(3.0), pair(4.0)]];
    assert_eq!(plan_all(&square, BY_PARAMETER).unwrap(), plan_all(&square, FORMS[0]).unwrap());
    let single = |targets: Option<Value>| {
        let (config, mut tensors) = square.parts(BY_PARAMETER).unwrap();
        tensors.retain(|(key, _)| !key.contains("base_layer"));
        let mut config: Value = serde_json::from_str(&config).unwrap();
        config.as_object_mut().unwrap().remove("target_parameters");
        config.as_object_mut().unwrap().extend(targets.map(|targets| ("target_parameters".to_owned(), targets)));
        plan_tensors(&square, &config, tensors)
    };
    assert!(single(Some(json!(["experts.up_proj"]))).is_ok() && single(Some(json!(["experts.down_proj"]))).is_ok());
    refused!(single(None), AmbiguousExperts, "experts.lora_A", "`target_parameters`");
}

#[test]
fn an_expert_has_one_pair_of_a_module() {
    let case = plain(2, 8, 6);
    let (config, mut tensors) = case.parts(FORMS[0]).unwrap();
    tensors.extend(case.parts(Form::Stacked { names: W_NAMES, once: true }).unwrap().1);
    let twice = plan_tensors(&case, &serde_json::from_str(&config).unwrap(), tensors);
    refused!(twice, Overlap, "experts.0.gate_proj", "experts.w1");
}

#[test]
fn shared_experts_are_dense_or_experts() {
    let mut spec = ModelSpec::new();
    let mlp = "model.layers.0.mlp.shared_expert";
    spec.linear(Linear::new(mlp, Parallel::Column, 8).slice("gate_proj", 6).slice("up_proj", 6)).unwrap();
    let gate =
        Linear::new("model.layers.0.mlp", Parallel::Replicated, 8).slice("shared_expert_gate", 1).slice("gate", 4);
    spec.linear(gate).unwrap();
    let two = spec.experts(Experts::new("model.layers.1.mlp.shared_experts", 2, 8, 6)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let config = json!({"peft_type": "LORA", "lora_alpha": 4}).to_string();
    let entries = |modules: &[(&str, [usize; 2])]| {
        let tensors = modules.iter().flat_map(|(path, [input, output])| {
            let shapes = [[2, *input], [*output, 2]];
            ["A", "B"].into_iter().zip(shapes).map(move |(factor, shape)| {
                (format!("base_model.model.model.layers.{path}.lora_{factor}.weight"), crate::ones(&shape))
            })
        });
        let adapter = Adapter::from_tensors(&config, tensors.collect::<Vec<_>>()).unwrap();
        adapter
            .plan(&model, DType::F32)
            .map(|image| image.entries().iter().map(|entry| entry.entry).collect::<Vec<_>>())
    };
    assert_eq!(
        entries(&[("0.mlp.shared_expert.up_proj", [8, 6]), ("0.mlp.shared_expert_gate", [8, 1])]).unwrap(),
        [1, 2]
    );
    assert_eq!(entries(&[("0.mlp.gate", [8, 4])]).unwrap(), [3]);
    let up = |local| model[two].gate_up().expert_entry(local) + 1;
    assert_eq!(entries(&[("1.mlp.shared_experts.1.up_proj", [8, 6])]).unwrap(), [up(1)]);
    assert_eq!(entries(&[("1.mlp.shared_experts.up_proj", [8, 12])]).unwrap(), [up(0), up(1)]);
    refused!(entries(&[("1.mlp.shared_experts.up_proj", [8, 18])]), ExpertShapes, "shared_experts.up_proj.lora_A");
    refused!(entries(&[("1.mlp.shared_expert.up_proj", [8, 6])]), NoPlace, "shared_expert.up_proj");
}

#[test]
fn weights_that_are_not_finite_are_named_by_their_place() {
    let case = plain(3, 8, 6);
    let refusal = |form: Form, of: &str, place: usize| {
        let (config, mut tensors) = case.parts(form).unwrap();
        let (_, bad) = tensors.iter_mut().find(|(key, _)| key.ends_with(of)).unwrap();
        let mut values: Vec<f32> = bytemuck::cast_slice::<u8, f32>(bad.bytes()).to_vec();
        values[place] = f32::NAN;
        *bad = tensor(DType::F32, bad.shape(), &values);
        let adapter = Adapter::from_tensors(&config, tensors).unwrap();
        let (model, _) = case.model(0, false);
        let image = adapter.plan(&model, DType::F32).unwrap();
        image.write_to(&mut vec![0; image.bytes()])
    };
    let stacked = Form::Stacked { names: PEFT_NAMES, once: false };
    refused!(refusal(stacked, "up_proj.lora_B.weight", 12 + 5), Unrepresentable, "NaN at [1, 2, 1]");
    refused!(refusal(BY_PARAMETER, "base_layer.lora_B.weight", 6 * 9 + 4), Unrepresentable, "NaN at [9, 4]");
}
