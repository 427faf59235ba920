//! The check that judges what is timed: it finds no error in the CPU's results, and notices wrong ones.

use std::collections::{BTreeMap, BTreeSet};

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cpu::{LoraEmbedding, LoraExperts, LoraLinear, Matrix, MatrixMut, WeightTable, Workspace},
    model::{Halves, Model},
    routing::{Batch, TopK},
};
use aril_bench::{
    data::{Data, FactorLayout, SetLayout, checked_tokens},
    experts::{DOWN, ExpertsAdapter, ExpertsLayout, ExpertsWorkload, GATE, MODULES, Router, Shape, Spread, UP},
    noise::Noise,
    workload::{Operation, Suite, Workload},
};
use half::bf16;

#[test]
fn noise_repeats_and_is_centred() {
    let noise = Noise::new(1, 10_007, 0.5);
    let values: Vec<f64> = noise.range(0, 20_014).map(f64::from).collect();
    assert!(values[..10_007] == values[10_007..]);
    assert!(noise.range(10_007 + 5, 3).map(f64::from).eq(values[5..8].iter().copied()));
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let variance = values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64;
    assert!(mean.abs() < 0.02 && (variance.sqrt() - 0.5).abs() < 0.01, "{mean} {variance}");
}

#[test]
fn padding_is_what_no_element_is_at() {
    let [a, b] = FactorLayout::linear(3, 300, 64);
    let len = |layout: FactorLayout| layout.padding().iter().map(std::iter::ExactSizeIterator::len).sum::<usize>();
    assert_eq!((a.elems(), len(a)), (8 * 512, 8 * 512 - 3 * 300));
    assert_eq!((b.elems(), len(b)), (8 * 64, 5 * 64));
    assert!(FactorLayout::linear(16, 512, 128).iter().all(|layout| layout.padding().is_empty()));
}

/// What judges the device's results finds none in the CPU's, and notices a wrong adapter, a missing slice and NaN.
#[test]
fn the_check_tells_right_from_wrong() {
    let workload = tiny(Operation::Linear, 100, vec![56, 24], vec![5, 8, 3]);
    let (data, layout) = (tiny_data(), SetLayout::new(&workload));
    let set = 3 * layout.elems;
    let (model, id) = workload.linear_model().unwrap();
    let weights = loaded(&data, &workload, &model, set);
    let tokens = workload.num_tokens();
    let x: Vec<_> = data.inputs.range(0, tokens * 100).collect();
    let mut y: Vec<_> = data.bases.range(0, tokens * 80).collect();
    let (x, y_matrix) = (Matrix::new(&x, tokens, 100).unwrap(), MatrixMut::new(&mut y, tokens, 80).unwrap());
    let slots = slots_of(&weights, &workload.slots);
    let (batch, mut workspace) = (Batch::new(&slots), Workspace::default());
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    LoraLinear::new(&weights, id).unwrap().add_delta(&mut step, x, y_matrix).unwrap();

    let mut got = checked(&workload, &y);
    assert!(got.keys().eq(&[0, 1, 3, 4, 5]));
    let error = data.error(&workload, set, &got);
    assert!(0.0 < error && error < 5e-3, "{error}");
    assert!(data.error(&workload, set + layout.elems, &got) > 0.5);
    got.get_mut(&3).unwrap()[56..].copy_from_slice(&data.bases.range(3 * 80 + 56, 24).collect::<Vec<_>>());
    assert!(data.error(&workload, set, &got) > 2e-2);
    got.get_mut(&3).unwrap()[0] = bf16::NAN;
    assert!(data.error(&workload, set, &got).is_nan());
}

#[test]
fn the_check_of_embeddings_too() {
    let workload = tiny(Operation::Embedding, 1000, vec![80], vec![5, 8, 3]);
    let (data, layout) = (tiny_data(), SetLayout::new(&workload));
    let set = 3 * layout.elems;
    let (model, id) = workload.embedding_model().unwrap();
    let weights = loaded(&data, &workload, &model, set);
    let tokens = workload.num_tokens();
    let ids: Vec<i32> = (0..tokens).map(|token| i32::try_from(workload.token_id(token)).unwrap()).collect();
    let mut y: Vec<_> = data.bases.range(0, tokens * 80).collect();
    let y_matrix = MatrixMut::new(&mut y, tokens, 80).unwrap();
    let slots = slots_of(&weights, &workload.slots);
    let (batch, mut workspace) = (Batch::new(&slots), Workspace::default());
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    LoraEmbedding::new(&weights, id).unwrap().add_delta(&mut step, &ids, y_matrix).unwrap();

    let got = checked(&workload, &y);
    let error = data.error(&workload, set, &got);
    assert!(0.0 < error && error < 5e-3, "{error}");
    assert!(data.error(&workload, set + layout.elems, &got) > 0.5);
}

/// The layout is that of packed adapters, padding and what is shared included; and the check finds no error in the
/// CPU's results, but notices another set, another choice, exchanged halves and NaN.
#[test]
fn the_check_of_experts_too() {
    let halves = [Halves::GateUp, Halves::Interleaved];
    for (shape, shared_outer) in halves.into_iter().zip([[false, true], [true, false]]) {
        let workload = tiny_experts(shape, shared_outer);
        let (data, layout) = (tiny_data(), ExpertsLayout::new(&workload));
        let set = 3 * layout.elems;
        let (model, id) = workload.model().unwrap();
        let arena_bytes = layout.elems * DType::BF16.bytes();
        let weights = WeightTable::new(&model, DType::BF16, workload.capacity(), arena_bytes).unwrap();
        let (mut first, mut padding) = (0, Vec::new());
        for slot in 0..workload.adapters.len() {
            let adapter = expert_adapter(&data, &workload, &layout, set, slot);
            let image = adapter.plan(&model, DType::BF16).unwrap();
            let site = &model[id];
            for entry in image.entries() {
                let [module, expert] = (0..workload.shape.num_experts)
                    .flat_map(|expert| MODULES.map(|module| [module, expert]))
                    .find(|&[module, expert]| match module {
                        DOWN => site.down().expert_entry(expert) == entry.entry,
                        _ => site.gate_up().expert_entry(expert) + module == entry.entry,
                    })
                    .unwrap();
                let got = layout.factors[slot][module][expert];
                assert_eq!(got, [first + entry.a_elems, first + entry.b_elems]);
            }
            // For each module what its experts have in common: a rank, and outer factors where they are shared.
            assert_eq!(image.shared().len(), 3);
            for shared in image.shared() {
                let is_down = shared.entry == site.down().shared_entry();
                let has = |is_outer: bool| workload.adapters[slot].shared_outer && is_outer;
                assert_eq!((shared.a_elems.is_some(), shared.b_elems.is_some()), (has(!is_down), has(is_down)));
            }
            let mut block = vec![0xff; image.bytes()];
            image.write_to(&mut block).unwrap();
            let elems: &[bf16] = bytemuck::cast_slice(&block);
            // Of noise hardly anything is zero.
            padding.extend((0..elems.len()).filter(|&elem| elems[elem] == bf16::ZERO).map(|elem| first + elem));
            first += elems.len();
            weights.load(slot, &image).unwrap();
        }
        assert_eq!(first, layout.elems);
        let expected: BTreeSet<usize> = layout.padding(&workload).into_iter().flatten().collect();
        assert!(!expected.is_empty() && expected.iter().eq(&padding));

        let (ids, [inputs, outputs]) = (workload.chosen(1), workload.of_down());
        let Shape { hidden, inter, top_k, .. } = workload.shape;
        let (tokens, routes) = (workload.num_tokens(), workload.num_routes());
        let slots = slots_of(&weights, &workload.slots);
        let (batch, top) = (Batch::new(&slots), TopK::new(&ids, top_k).unwrap());
        let (experts, mut workspace) = (LoraExperts::new(&weights, id).unwrap(), Workspace::default());
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let [x, h]: [Vec<bf16>; 2] = [(0, tokens * hidden), (inputs, routes * inter)]
            .map(|(first, len)| data.inputs.range(first, len).collect());
        let [mut y1, mut y2]: [Vec<bf16>; 2] = [(0, routes * 2 * inter), (outputs, routes * hidden)]
            .map(|(first, len)| data.bases.range(first, len).collect());
        let (x, y) = (Matrix::new(&x, tokens, hidden).unwrap(), MatrixMut::new(&mut y1, routes, 2 * inter).unwrap());
        experts.add_gate_up_delta(&mut step, &top, x, y).unwrap();
        let (x, y) = (Matrix::new(&h, routes, inter).unwrap(), MatrixMut::new(&mut y2, routes, hidden).unwrap());
        experts.add_down_delta(&mut step, &top, x, y).unwrap();

        let mut got: BTreeMap<usize, [Vec<bf16>; 2]> = checked_tokens(&workload.slots)
            .into_iter()
            .map(|token| {
                let rows = |y: &[bf16], cols: usize| y[token * top_k * cols..][..top_k * cols].to_vec();
                (token, [rows(&y1, 2 * inter), rows(&y2, hidden)])
            })
            .collect();
        assert!(got.keys().eq(&[0, 1, 3, 4, 5]));
        let errors = workload.errors(&data, set, &ids, &got);
        assert!(errors.iter().all(|&error| 0.0 < error && error < 1e-2), "{errors:?}");
        let all_wrong = |errors: [f64; 2]| errors.iter().all(|&error| error > 0.5);
        assert!(all_wrong(workload.errors(&data, set + layout.elems, &ids, &got)));
        assert!(all_wrong(workload.errors(&data, set, &workload.chosen(2), &got)));
        let other = match shape {
            Halves::Interleaved => Halves::GateUp,
            _ => Halves::Interleaved,
        };
        let other = ExpertsWorkload { shape: Shape { halves: other, ..workload.shape }, ..workload.clone() };
        let [gate_up, down] = other.errors(&data, set, &ids, &got);
        assert!(gate_up > 0.5 && down < 1e-2, "{gate_up} {down}");
        got.get_mut(&3).unwrap()[1][hidden] = bf16::NAN;
        assert!(workload.errors(&data, set, &ids, &got)[1].is_nan());
    }
}

#[test]
fn checked_tokens_are_spread_over_those_with_an_adapter() {
    let slots: Vec<i32> = (0..1000).map(|token| if token % 4 == 0 { -1 } else { token }).collect();
    let checked = checked_tokens(&slots);
    assert_eq!((checked.len(), checked[0], *checked.last().unwrap()), (32, 1, 999));
    assert!(checked.is_sorted() && checked.iter().all(|token| token % 4 != 0));
    assert_eq!(checked_tokens(&slots[..2]), [1]);
}

/// Of a slot.
fn expert_adapter(data: &Data, workload: &ExpertsWorkload, layout: &ExpertsLayout, set: usize, slot: usize) -> Adapter {
    let (ExpertsAdapter { rank, shared_outer }, mut tensors) = (workload.adapters[slot], Vec::new());
    for (module, name) in [(GATE, "gate_proj"), (UP, "up_proj"), (DOWN, "down_proj")] {
        let (layouts, [cols, rows]) = (workload.factor_layouts(slot, module), workload.features(module));
        let shared = [module != DOWN, module == DOWN].map(|is_outer| is_outer && shared_outer);
        let factors = [("A", [rank, cols]), ("B", [rows, rank])];
        for (factor, (letter, [rows, cols])) in factors.into_iter().enumerate() {
            let experts = if shared[factor] { 1 } else { workload.shape.num_experts };
            let firsts = layout.factors[slot][module][..experts].iter().map(|firsts| set + firsts[factor]);
            let values: Vec<bf16> = firsts.flat_map(|first| data.factor(first, layouts[factor])).collect();
            let tensor = Tensor::new(DType::BF16, [experts, rows, cols], bytemuck::cast_slice(&values).to_vec());
            tensors.push((format!("experts.{name}.lora_{letter}.weight"), tensor.unwrap()));
        }
    }
    let config = format!(r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}}}"#);
    Adapter::from_tensors(&config, tensors).unwrap()
}

fn tiny_experts(halves: Halves, shared_outer: [bool; 2]) -> ExpertsWorkload {
    let [first, second] = shared_outer;
    let adapter = |rank, shared_outer| ExpertsAdapter { rank, shared_outer };
    ExpertsWorkload {
        id: "moe-own/tiny".to_owned(),
        suite: Suite::MoeOwn,
        tag: String::new(),
        shape: Shape { hidden: 100, inter: 56, num_experts: 5, top_k: 2, halves },
        adapters: vec![adapter(5, first), adapter(8, second), adapter(3, first)],
        slots: tiny_slots(),
        router: Router { seed: 1, spread: Spread::Uniform },
    }
}

fn tiny(operation: Operation, in_features: usize, out_slices: Vec<usize>, ranks: Vec<usize>) -> Workload {
    Workload {
        id: "dec/tiny/layer/r8/t6/uniform3".to_owned(),
        suite: Suite::Decode,
        tag: String::new(),
        model: "tiny".to_owned(),
        layer: "layer".to_owned(),
        operation,
        in_features,
        out_slices,
        ranks,
        slots: tiny_slots(),
    }
}

fn tiny_slots() -> Vec<i32> {
    vec![2, 0, -1, 1, 2, 0]
}

/// The slots of these numbers, with the adapters that are there.
fn slots_of(weights: &WeightTable, numbers: &[i32]) -> Vec<Slot> {
    let slot = |&number: &i32| usize::try_from(number).map_or(Slot::BASE, |slot| weights.get(slot).unwrap().slot);
    numbers.iter().map(slot).collect()
}

fn tiny_data() -> Data {
    Data { weights: Noise::new(1, 10_007, 0.2), inputs: Noise::new(2, 10_007, 1.0), bases: Noise::new(3, 10_007, 0.1) }
}

/// The adapters of a set.
fn loaded(data: &Data, workload: &Workload, model: &Model, set: usize) -> WeightTable {
    let arena_bytes = SetLayout::new(workload).elems * DType::BF16.bytes();
    let weights = WeightTable::new(model, DType::BF16, workload.capacity(), arena_bytes).unwrap();
    for (slot, adapter) in data.adapters(workload, set).unwrap().iter().enumerate() {
        weights.load(slot, &adapter.plan(model, DType::BF16).unwrap()).unwrap();
    }
    weights
}

/// The rows of y that are checked.
fn checked(workload: &Workload, y: &[bf16]) -> BTreeMap<usize, Vec<bf16>> {
    let cols = workload.out_features();
    let rows = checked_tokens(&workload.slots).into_iter();
    rows.map(|token| (token, y[token * cols..][..cols].to_vec())).collect()
}
