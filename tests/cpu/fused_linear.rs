//! The fused linear on the CPU against the reference.

use crate::{
    common::{
        adapters::{Lora, parts},
        case::Subject,
        compare::Place,
        cpu::{matrix, matrix_mut, slots, table},
        dense::{self, Sizes},
        fused_linear::{Case, Fused, World, cases},
        slices::SliceBuffers,
        small::more_cases,
        values::Values,
    },
    for_dtype,
};
use aril::{
    DType, Element,
    adapter::Adapter,
    cpu::{FusedLinear, LoraLinear, Matrix, MatrixMut, WeightTable, Workspace},
    model::{Linear, ModelSpec, Parallel, TpRank},
    plan::{Capacity, MAX_FORWARD_TOKENS},
    routing::Batch,
};
use half::f16;
use proptest::prelude::*;
use rand::{SeedableRng, rngs::StdRng};

struct Cpu;

impl Subject<Fused> for Cpu {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let base = case.base::<T>(case.values);
        let weights = table(&world.model, T::DTYPE, world.capacity(case.num_tokens()), &world.adapters);
        let slices = base.slices.iter().map(|(place, w)| matrix(w, *place));
        let layer = FusedLinear::new(&weights, world.id, slices).unwrap();
        let layer = match &base.bias {
            Some((place, bias)) => layer.with_bias(&bias[..place.cols]).unwrap(),
            None => layer,
        };
        let slots = world.loaded_slots(|slot| weights.get(slot));
        let (batch, mut workspace) = (world.batch_of(&slots), Workspace::default());
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let outputs = SliceBuffers::new(&world.y, case.y(), &case.slices(), case.separate);
        let mut buffers = outputs.buffers();
        let y = outputs.matrices(&mut buffers, |buffer, place| matrix_mut(buffer, place));
        let x = matrix(&world.x, case.x());
        if case.accumulates {
            layer.accumulate(&mut step, x, y).unwrap();
        } else {
            layer.forward(&mut step, x, y).unwrap();
        }
        outputs.merged(buffers)
    }
}

#[test]
fn infinite_sums_stay_infinite() {
    for dense in dense::Case::of_infinities(8, 16) {
        let case = Case::fused(dense, false);
        for_dtype!(case.check_infinities(&mut Cpu)).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(more_cases(32)))]

    #[test]
    fn cpu_agrees_with_the_reference(case in cases(Sizes { max_tokens: MAX_FORWARD_TOKENS, ..Sizes::SMALL })) {
        let case = Case::from_environment().unwrap_or(case);
        for_dtype!(case.check(&mut Cpu))?;
    }

    #[test]
    fn separate_outputs_have_the_bits_of_a_fused_one(
        case in cases(Sizes { max_tokens: MAX_FORWARD_TOKENS, ..Sizes::SMALL }),
    ) {
        for_dtype!(case.check_separate(&mut Cpu))?;
    }

    /// A token's result has the same bits in any batch, even if no other token has an adapter.
    #[test]
    fn cpu_is_batch_invariant(case in cases(Sizes { max_features: 100, max_tokens: 6, ..Sizes::SMALL })) {
        for_dtype!(case, invariant(&case))?;
    }
}

fn invariant<T: Element>(case: &Case) -> Result<(), TestCaseError> {
    case.check_invariance::<T>(&mut Cpu, &[1, 4], 1).map(drop)
}

/// The layer `m` in f16, on a rank, and the adapter of slot 0.
fn rank_of(spec: &ModelSpec, adapter: &Adapter, tp: TpRank) -> WeightTable {
    let model = spec.shard(tp).unwrap();
    table(&model, DType::F16, Capacity::tokens(4).slots(1).rank(4), std::slice::from_ref(adapter))
}

/// Outputs of a column-parallel layer's ranks, side by side, and sums over a row-parallel layer's ranks equal the
/// output of a single rank. All values are integers, so they are bit-identical.
#[test]
fn tensor_parallel_ranks_are_parts_of_the_whole() {
    const IN: usize = 32;
    const Q: usize = 16;
    const V: usize = 8;
    const TOKENS: usize = 3;
    let mut rng = StdRng::seed_from_u64(3);
    let mut values = |rows: usize, cols: usize| -> Vec<f32> {
        let place = Place { offset: 0, rows, cols, stride: cols };
        place.buffer(Values::Exact, &mut rng)[..rows * cols].to_vec()
    };
    let modules = [("m.q", Q), ("m.v", V)].map(|(path, out)| {
        let mut numbers = values(1, 3 * (IN + out)).into_iter();
        Lora::linear(path, IN, out, 3).fill(|| numbers.next().unwrap())
    });
    let (config, tensors) = parts(3.0, &modules);
    let adapter = Adapter::from_tensors(&config, tensors).unwrap();
    let mut halves = |rows, cols| values(rows, cols).into_iter().map(f16::from_f32).collect::<Vec<_>>();
    let (w, bias, x) = ([halves(Q, IN), halves(V, IN)], halves(1, Q + V), halves(TOKENS, IN));
    for parallel in [Parallel::Column, Parallel::Row] {
        let mut spec = ModelSpec::new();
        let id = spec.linear(Linear::new("m", parallel, IN).slice("q", Q).slice("v", V)).unwrap();
        // By rank and token.
        let run = |tp: TpRank| -> Vec<Vec<f16>> {
            let weights = rank_of(&spec, &adapter, tp);
            let site = &weights.model()[id];
            let (columns, outs) = (site.in_range(), site.out_features());
            let slices = site.slices().iter().zip(&w).map(|(slice, w)| {
                let first = slice.ranges()[0].start * IN + columns.start;
                Matrix::strided(&w[first..], slice.out_features(), columns.len(), IN).unwrap()
            });
            let layer = FusedLinear::new(&weights, id, slices).unwrap();
            let own_bias: Vec<f16> = [0, Q]
                .into_iter()
                .zip(site.slices())
                .flat_map(|(first, slice)| bias[first..][slice.ranges()[0].clone()].to_vec())
                .collect();
            let layer = if parallel == Parallel::Column || tp == TpRank::SINGLE || columns.start == 0 {
                layer.with_bias(&own_bias).unwrap()
            } else {
                layer
            };
            let mut y = vec![f16::NAN; TOKENS * outs];
            let mut workspace = Workspace::default();
            let slots = slots(&weights, [0, -1, 0]);
            let mut step = weights.step(&Batch::new(&slots), &mut workspace).unwrap();
            let x = Matrix::strided(&x[columns.start..], TOKENS, columns.len(), IN).unwrap();
            layer.forward(&mut step, x, MatrixMut::new(&mut y, TOKENS, outs).unwrap()).unwrap();
            y.chunks(outs).map(<[f16]>::to_vec).collect()
        };
        let whole = run(TpRank::SINGLE);
        let [first, second] = [0, 1].map(|rank| run(TpRank::new(rank, 2).unwrap()));
        for token in 0..TOKENS {
            let (first, second) = (&first[token], &second[token]);
            let joined: Vec<f16> = match parallel {
                Parallel::Row => first.iter().zip(second).map(|(a, b)| a + b).collect(),
                _ => [&first[..Q / 2], &second[..Q / 2], &first[Q / 2..], &second[Q / 2..]].concat(),
            };
            assert_eq!(joined, whole[token], "{parallel:?}, token {token}");
        }
    }
}

/// Adding to zeros equals writing, and equals `add_delta` after a base layer computed by the engine.
#[test]
fn it_is_the_base_layer_and_its_delta() {
    let dense = crate::common::dense::Case::linear(24, &[5, 8], &[&[3, 2], &[0, 4]], vec![0, 1, -1, 0]);
    let case = Case::fused(dense, false);
    let world = case.world::<f16>();
    let written = Cpu.run(&case, &world);
    let base = case.base::<f16>(case.values);
    let weights = table(&world.model, DType::F16, world.capacity(4), &world.adapters);
    let mut y = written.clone();
    for token in 0..case.num_tokens() {
        let row = case.x().row(&world.x, token);
        let rows = base.slices.iter().flat_map(|(place, w)| (0..place.rows).map(|row| place.row(w, row)));
        let (place, bias) = base.bias.as_ref().unwrap();
        for ((out, w), bias) in rows.enumerate().zip(place.row(bias, 0)) {
            let sum = w.iter().zip(&row).map(|(w, x)| w * x).sum::<f64>() + bias;
            y[case.y().at(token, out)] = f16::from_f64(sum);
        }
    }
    let mut workspace = Workspace::default();
    let slots = world.loaded_slots(|slot| weights.get(slot));
    let mut step = weights.step(&world.batch_of(&slots), &mut workspace).unwrap();
    let layer = LoraLinear::new(&weights, world.id).unwrap();
    layer.add_delta(&mut step, matrix(&world.x, case.x()), matrix_mut(&mut y, case.y())).unwrap();
    let rows = ..case.y().at(case.num_tokens(), 0);
    assert_eq!(y[rows], written[rows]);
}
