//! Combinations of adapters in a table, against the sum of what each adapter adds.

use aril::{
    DType,
    adapter::SlotImage,
    model::{Linear, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    reference::{self, Factors},
    routing::Batch,
};
use half::{bf16, f16};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use crate::{
    backend::{Backend, LoraEmbedding, LoraLinear, Matrix, MatrixMut, Value, elements_of, part, part_mut},
    common::adapters::{Lora, adapter},
};

const TOKENS: usize = 5;
const FEATURES: usize = 96;
const OUTPUTS: [usize; 2] = [40, 17];
const VOCAB: usize = 33;
/// Of each part: its scale, and the ranks of the slices and of the embedding; 0 where it does not have the module.
const PARTS: [(f32, [usize; 3]); 4] = [(0.7, [3, 0, 4]), (-1.9, [8, 5, 0]), (0.7, [0, 0, 2]), (2.5, [17, 1, 9])];
/// What each part is multiplied by in the second combination, whose scalings are one.
const EQUAL: f32 = -0.375;

/// Each output is the sum of what the adapters add, each times its scale, up to the roundings of factors that are
/// multiplied and of the operation.
pub fn combinations_are_sums(backend: &Backend) {
    check::<f32>(backend);
    check::<bf16>(backend);
    check::<f16>(backend);
}

fn check<T: Value>(backend: &Backend) {
    let mut spec = ModelSpec::new();
    let layer = Linear::new("m", Parallel::Replicated, FEATURES).slice("q", OUTPUTS[0]).slice("k", OUTPUTS[1]);
    let layer = spec.linear(layer).unwrap();
    let embedding = spec.embedding("e", VOCAB, OUTPUTS[0]).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let mut rng = StdRng::seed_from_u64(60);
    // Exact in each of the types.
    let mut value = move || f32::from(rng.random_range(-16_i8..=16)) / 16.0;
    let modules = PARTS.map(|(_, ranks)| {
        let [q, k, e] = ranks;
        let new = [
            Lora::linear("m.q", FEATURES, OUTPUTS[0], q),
            Lora::linear("m.k", FEATURES, OUTPUTS[1], k),
            Lora::embedding("e", VOCAB, OUTPUTS[0], e),
        ];
        new.map(|module| module.dtype(DType::F32).fill(&mut value))
    });
    let of_ranks = |modules: &[Lora; 3]| modules.iter().filter(|module| module.rank > 0).cloned().collect::<Vec<_>>();
    let adapters = modules.each_ref().map(|modules| {
        let modules = of_ranks(modules).into_iter().map(|module| {
            let scaling = 1.5 * module.rank as f64;
            module.alpha(scaling)
        });
        adapter(&modules.collect::<Vec<_>>())
    });
    let capacity = Capacity::tokens(TOKENS).slots(3).rank(32);
    let table = backend.table(&model, T::DTYPE, capacity, 1 << 20).unwrap();
    let scales = [PARTS.map(|(scale, _)| scale), [EQUAL; 4]];
    for (slot, scales) in scales.iter().enumerate() {
        let parts: Vec<_> = adapters.iter().zip(scales).map(|(adapter, scale)| (adapter, *scale)).collect();
        table.load(slot, &SlotImage::combined(&parts, &model, T::DTYPE).unwrap()).unwrap();
    }
    let of_token = [Some(0), None, Some(1), Some(0), Some(1)];
    let slots = of_token.map(|slot| slot.map_or(aril::Slot::BASE, |slot| table.get(slot).unwrap().slot));
    let mut routing = backend.routing(0, capacity).unwrap();
    let batch = backend.update(&mut routing, &Batch::new(&slots), None).unwrap();
    let mut workspace = backend.workspace(0, &table);
    let mut step = table.step(&batch, &mut workspace).unwrap();
    let x: Vec<T> = (0..TOKENS * FEATURES).map(|_| T::from_f32(value())).collect();
    let ids = [3_u8, 0, 32, 7, 0];
    let outputs = OUTPUTS.iter().sum();
    let mut y = backend.elements(0, &vec![T::default(); TOKENS * outputs]);
    let mut embedded = backend.elements(0, &vec![T::default(); TOKENS * OUTPUTS[0]]);
    let (of_x, of_ids) = (backend.elements(0, &x), backend.elements(0, &ids.map(i32::from)));
    let linear = LoraLinear::new(&table, layer).unwrap();
    let of_x = Matrix::new(part(&of_x, 0), TOKENS, FEATURES).unwrap();
    linear.add_delta(&mut step, of_x, MatrixMut::new(part_mut(&mut y, 0), TOKENS, outputs).unwrap()).unwrap();
    let to = MatrixMut::new(part_mut(&mut embedded, 0), TOKENS, OUTPUTS[0]).unwrap();
    LoraEmbedding::new(&table, embedding).unwrap().add_delta(&mut step, &of_ids, to).unwrap();
    backend.synchronize().unwrap();

    let [y, embedded] = [&y, &embedded].map(|elements| {
        let elements: Vec<T> = elements_of(elements);
        elements.into_iter().map(|element| f64::from(element.to_f32())).collect::<Vec<_>>()
    });
    for token in 0..TOKENS {
        let x: Vec<_> = x[token * FEATURES..][..FEATURES].iter().map(|value| f64::from(value.to_f32())).collect();
        let mut first = 0;
        for (module, outputs) in [OUTPUTS[0], OUTPUTS[1], OUTPUTS[0]].into_iter().enumerate() {
            let got = match module {
                2 => &embedded[token * OUTPUTS[0]..][..outputs],
                _ => &y[token * (OUTPUTS[0] + OUTPUTS[1]) + first..][..outputs],
            };
            first += outputs;
            let (mut sums, mut magnitudes) = (vec![0.0; outputs], vec![0.0; outputs]);
            for (part, modules) in modules.iter().enumerate() {
                let Lora { rank, a, b, .. } = &modules[module];
                let Some(slot) = of_token[token].filter(|_| *rank > 0) else { continue };
                let [a, b] = [a, b].map(|values| values.iter().map(|&value| f64::from(value)).collect::<Vec<_>>());
                let scaling = 1.5 * f64::from(scales[slot][part]);
                let factors = Factors { a: &a, b: &b, rank: *rank, scaling };
                let deltas = match module {
                    2 => reference::embedding(usize::from(ids[token]), VOCAB, factors),
                    _ => reference::linear(&x, factors),
                };
                for (delta, (sum, magnitude)) in deltas.iter().zip(sums.iter_mut().zip(&mut magnitudes)) {
                    *sum += delta.value;
                    *magnitude += delta.magnitude;
                }
            }
            let roundoff = T::DTYPE.unit_roundoff();
            for (output, (&got, (sum, magnitude))) in got.iter().zip(sums.iter().zip(&magnitudes)).enumerate() {
                let bound = (roundoff + 200.0 * DType::F32.unit_roundoff()) * magnitude + roundoff * sum.abs();
                assert!(
                    (got - sum).abs() <= bound,
                    "{}, token {token}, module {module}, output {output}: {got}, not {sum}",
                    T::DTYPE
                );
            }
        }
    }
}
