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
        values::Values,
    },
    for_dtype,
};
use aril::{
    DType, Element, Slot,
    adapter::Adapter,
    cpu::{FusedLinear, LoraLinear, Matrix, MatrixMut, WeightTable, Workspace},
    error::OperandError,
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::{Capacity, MAX_FORWARD_TOKENS, PlanError},
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
    #[test]
    fn cpu_agrees_with_the_reference(case in cases(Sizes { max_tokens: MAX_FORWARD_TOKENS, ..Sizes::SMALL })) {
        let case = Case::from_environment().unwrap_or(case);
        for_dtype!(case.check(&mut Cpu))?;
    }

    #[test]
    fn separate_outputs_have_the_bits_of_a_fused_one(case in cases(Sizes { max_tokens: MAX_FORWARD_TOKENS, ..Sizes::SMALL })) {
        for_dtype!(case.check_separate(&mut Cpu))?;
    }

    /// A token's result has the same bits in any batch, even if no other token has an adapter.
    #[test]
    fn cpu_is_batch_invariant(case in cases(Sizes { max_features: 100, max_tokens: 6, ..Sizes::SMALL })) {
        fn run<T: Element>(case: &Case) -> Result<(), TestCaseError> {
            let world = case.world::<T>();
            let together = Cpu.run(case, &world);
            for token in 0..case.num_tokens() {
                let mut alone = case.world::<T>();
                alone.slots.fill(-1);
                alone.slots[token] = world.slots[token];
                let alone = Cpu.run(case, &alone);
                let row = case.y().at(token, 0)..case.y().at(token + 1, 0);
                let bits = |y: &[T]| bytemuck::cast_slice::<T, u8>(&y[row.clone()]).to_vec();
                prop_assert!(bits(&together) == bits(&alone), "token {token}\n{}", case.replay());
            }
            Ok(())
        }
        for_dtype!(case, run(&case))?;
    }
}

/// The layer `m` in f16, on a rank, and the adapter of slot 0.
fn rank_of(spec: &ModelSpec, adapter: &Adapter, tp: TpRank) -> WeightTable {
    let model = spec.shard(tp).unwrap();
    table(&model, DType::F16, Capacity::tokens(4).slots(1).rank(4), std::slice::from_ref(adapter))
}

/// Outputs of a column-parallel layer's ranks, side by side, and sums over a row-parallel layer's ranks equal the output of a single
/// rank. All values are integers, so they are bit-identical.
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

fn layer(spec: &mut ModelSpec) -> (Model, LinearId) {
    let id = spec.linear(Linear::new("layer", Parallel::Replicated, 8).slice("q", 2).slice("v", 1)).unwrap();
    (spec.shard(TpRank::SINGLE).unwrap(), id)
}

/// Operands that do not fit are refused by name, and leave `y` as it was.
#[test]
fn operands_that_do_not_fit_are_refused_by_name() {
    const SEVEN: f16 = f16::from_f32_const(7.0);
    let ((model, id), (other_model, other_id)) = (layer(&mut ModelSpec::new()), layer(&mut ModelSpec::new()));
    let capacity = Capacity::tokens(2).slots(1).rank(4);
    let [weights, other_weights] = [&model, &other_model].map(|model| table(model, DType::F16, capacity, &[]));
    let data = [f16::ONE; 32];
    let w = |rows, cols| Matrix::new(&data, rows, cols).unwrap();
    let new = |slices: &[Matrix<'_, f16>]| FusedLinear::new(&weights, id, slices.iter().copied()).map(|_| ());
    let shape = |operand, [rows, cols]: [usize; 2], [want_rows, want_cols]: [usize; 2]| {
        Err(OperandError::Shape { operand, rows, cols, want_rows, want_cols })
    };
    assert_eq!(new(&[w(2, 8), w(1, 8)]), Ok(()));
    assert_eq!(new(&[w(2, 8)]), Err(OperandError::Slices { operand: "W", got: 1, want: 2 }));
    assert_eq!(new(&[w(2, 8), w(1, 8), w(1, 8)]), Err(OperandError::Slices { operand: "W", got: 3, want: 2 }));
    assert_eq!(new(&[w(2, 8), w(2, 8)]), shape("W", [2, 8], [1, 8]));
    assert_eq!(new(&[w(2, 7), w(1, 8)]), shape("W", [2, 7], [2, 8]));
    assert_eq!(FusedLinear::new(&weights, other_id, [w(2, 8), w(1, 8)]).unwrap_err(), PlanError::Foreign.into());
    let of_bf16 = table(&model, DType::BF16, capacity, &[]);
    let error = FusedLinear::new(&of_bf16, id, [w(2, 8), w(1, 8)]).unwrap_err();
    assert_eq!(error, OperandError::DType { operand: "W", got: DType::F16, want: DType::BF16 });

    let layer = FusedLinear::new(&weights, id, [w(2, 8), w(1, 8)]).unwrap();
    for got in [0, 2, 4] {
        let refused = layer.clone().with_bias(&data[..got]).map(|_| ());
        assert_eq!(refused, Err(OperandError::Bias { got, want: 3 }));
    }
    let slots = [Slot::BASE; 2];
    let run = |weights: &WeightTable, [x_rows, x_cols]: [usize; 2], [y_rows, y_cols]: [usize; 2]| {
        let results = [false, true].map(|accumulates| {
            let (mut buffer, mut workspace) = ([SEVEN; 12], Workspace::default());
            let mut step = weights.step(&Batch::new(&slots), &mut workspace).unwrap();
            let (x, y) = (w(x_rows, x_cols), MatrixMut::new(&mut buffer, y_rows, y_cols).unwrap());
            let result = if accumulates { layer.accumulate(&mut step, x, y) } else { layer.forward(&mut step, x, y) };
            assert_eq!(result.is_err(), buffer == [SEVEN; 12], "{result:?}");
            result
        });
        assert_eq!(results[0], results[1]);
        results[0].clone()
    };
    assert_eq!(run(&weights, [2, 8], [2, 3]), Ok(()));
    assert_eq!(run(&weights, [1, 8], [2, 3]), shape("x", [1, 8], [2, 8]));
    assert_eq!(run(&weights, [2, 7], [2, 3]), shape("x", [2, 7], [2, 8]));
    assert_eq!(run(&weights, [2, 8], [2, 4]), shape("y", [2, 4], [2, 3]));
    assert_eq!(run(&weights, [2, 8], [3, 3]), shape("y", [3, 3], [2, 3]));
    assert_eq!(run(&other_weights, [2, 8], [2, 3]), Err(OperandError::Model));
    let refused = Err(OperandError::DType { operand: "weights", got: DType::BF16, want: DType::F16 });
    assert_eq!(run(&of_bf16, [2, 8], [2, 3]), refused);
}

/// What no kernel takes is refused on the CPU, too, so that an engine that runs there runs on a GPU.
#[test]
fn what_a_gpu_refuses_is_refused() {
    let mut spec = ModelSpec::new();
    let mut linear = |name: &str, in_features| {
        spec.linear(Linear::new(name, Parallel::Replicated, in_features).slice("q", 2)).unwrap()
    };
    let (id, odd) = (linear("even", 8), linear("odd", 12));
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(2 * MAX_FORWARD_TOKENS).slots(1).rank(4);
    let of_f32 = table(&model, DType::F32, capacity, &[]);
    let w = [0.0_f32; 16];
    let refused = FusedLinear::new(&of_f32, id, [Matrix::new(&w, 2, 8).unwrap()]).unwrap_err();
    assert_eq!(refused, PlanError::DType { operation: "the fused linear", got: DType::F32 }.into());

    let weights = table(&model, DType::F16, capacity, &[]);
    let data = vec![f16::ONE; (MAX_FORWARD_TOKENS + 1) * 12];
    let matrix = |rows, stride| Matrix::strided(&data, rows, 8, stride).unwrap();
    let refused = FusedLinear::new(&weights, odd, [Matrix::new(&data, 2, 12).unwrap()]).unwrap_err();
    assert_eq!(refused, PlanError::Multiple { what: "in_features", value: 12, of: 8 }.into());
    let rows = |operand| OperandError::MisalignedRows { operand, alignment: 16, stride_bytes: 24 };
    assert_eq!(FusedLinear::new(&weights, id, [matrix(2, 12)]).unwrap_err(), rows("W"));

    let layer = FusedLinear::new(&weights, id, [matrix(2, 8)]).unwrap();
    assert_eq!(layer.plan().max_tokens(), MAX_FORWARD_TOKENS);
    let run = |tokens, stride| {
        let (slots, mut workspace) = (vec![Slot::BASE; tokens], Workspace::default());
        let mut y = vec![f16::ZERO; 2 * tokens];
        let mut step = weights.step(&Batch::new(&slots), &mut workspace).unwrap();
        layer.forward(&mut step, matrix(tokens, stride), MatrixMut::new(&mut y, tokens, 2).unwrap())
    };
    assert_eq!(run(MAX_FORWARD_TOKENS, 8), Ok(()));
    let (got, max) = (MAX_FORWARD_TOKENS + 1, MAX_FORWARD_TOKENS);
    assert_eq!(run(got, 8), Err(OperandError::Capacity { what: "the batch's tokens for this layer", got, max }));
    assert_eq!(run(2, 12), Err(rows("x")));
    // The stride of a single row is not used.
    assert_eq!(run(1, 12), Ok(()));
}
